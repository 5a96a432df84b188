//! ONC RPC (RFC 5531), written word by word: nothing here uses the encoders under test.

use std::io::{self, ErrorKind, Read};

/// Words as XDR has them: big-endian.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A call without credentials and arguments, without a record mark: 40 bytes.
pub fn call(xid: u32, program: u32, version: u32, procedure: u32) -> Vec<u8> {
    words(&[xid, 0, 2, program, version, procedure, 0, 0, 0, 0])
}

/// An accepted reply without a record mark: its status (0 is success), and what belongs to that.
pub fn accepted(xid: u32, status: &[u32]) -> Vec<u8> {
    [words(&[xid, 1, 0, 0, 0]), words(status)].concat()
}

/// The identifier of a call or reply.
pub fn xid(message: &[u8]) -> u32 {
    u32::from_be_bytes(*message.first_chunk().expect("a whole message"))
}

/// A fragment behind its record mark.
pub fn fragment(is_last: bool, bytes: &[u8]) -> Vec<u8> {
    let mark = bytes.len() as u32 | u32::from(is_last) << 31;
    [&mark.to_be_bytes(), bytes].concat()
}

/// A message as one record.
pub fn record(message: &[u8]) -> Vec<u8> {
    fragment(true, message)
}

/// Reads one record, however fragmented, without its marks; `None` at the end of the stream.
pub fn read_record(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    loop {
        let mut mark = [0; 4];
        match stream.read_exact(&mut mark) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
        let mark = u32::from_be_bytes(mark);
        let start = record.len();
        record.resize(start + (mark & 0x7fff_ffff) as usize, 0);
        stream.read_exact(&mut record[start..])?;
        if mark >> 31 == 1 {
            return Ok(Some(record));
        }
    }
}
