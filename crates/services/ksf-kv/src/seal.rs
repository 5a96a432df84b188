//! How a backup begins and ends: with commands that any server of RESP takes and that do nothing, so that a file that was cut
//! is told from a whole one.
//!
//! ```text
//!   ECHO "ksf-backup 1"   the commands of a dump   ECHO "ksf-backup end keys=3 bytes=321 crc32c=0123abcd"
//! ```
//!
//! `bytes` are those in front of the end. The checksum is that of these and of the text in front of it.

use std::io::{self, Write};

use crate::offline::write_command;

/// What the text of every version begins with.
pub(crate) const NAME: &[u8] = b"ksf-backup ";
/// The text of the first command.
pub(crate) const BEGIN: &[u8] = b"ksf-backup 1";

/// The last command of a backup whose other ones have this checksum.
pub(crate) fn end(keys: u64, bytes: u64, crc: u32) -> Vec<u8> {
    let text = format!("ksf-backup end keys={keys} bytes={bytes}");
    let text = format!("{text} crc32c={:08x}", crc32c::crc32c_append(crc, text.as_bytes()));
    let mut command = Vec::new();
    // Writing to a vector does not fail.
    let _ = echo(&mut command, text.as_bytes());
    command
}

/// The keys that the text of a last command says; `None`: it is no such text.
pub(crate) fn keys_of(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.strip_prefix("ksf-backup end keys=")?;
    text.split(' ').next()?.parse().ok()
}

/// Counts what is written, and knows its checksum.
#[derive(Debug)]
pub(crate) struct Sealing<W> {
    to: W,
    bytes: u64,
    crc: u32,
}

impl<W: Write> Sealing<W> {
    /// Begins a backup.
    pub(crate) fn begin(to: W) -> io::Result<Self> {
        let mut sealing = Self { to, bytes: 0, crc: 0 };
        echo(&mut sealing, BEGIN)?;
        Ok(sealing)
    }

    /// Ends it. Returns what is written to, and the bytes of all.
    pub(crate) fn end(mut self, keys: u64) -> io::Result<(W, u64)> {
        let end = end(keys, self.bytes, self.crc);
        self.write_all(&end)?;
        self.to.flush()?;
        Ok((self.to, self.bytes))
    }
}

fn echo(to: &mut impl Write, text: &[u8]) -> io::Result<()> {
    write_command(to, [&b"ECHO"[..], text].into_iter())
}

impl<W: Write> Write for Sealing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.bytes += written as u64;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_read_as_it_is_written() {
        let mut sealing = Sealing::begin(Vec::new()).unwrap();
        sealing.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
        let (bytes, count) = sealing.end(7).unwrap();
        assert_eq!(bytes.len() as u64, count);
        let text = String::from_utf8(bytes).unwrap();
        let at = text.rfind("*2\r\n$4\r\nECHO\r\n").unwrap();
        let (front, last) = text.split_at(at);
        assert!(front.starts_with("*2\r\n$4\r\nECHO\r\n$12\r\nksf-backup 1\r\n"), "{front}");
        assert_eq!(last.as_bytes(), end(7, at as u64, crc32c::crc32c(front.as_bytes())));
        assert_eq!(keys_of(last.lines().nth(4).unwrap().as_bytes()), Some(7));
        for wrong in ["", "ksf-backup 1", "ksf-backup end", "ksf-backup end keys=", "ksf-backup end keys=x"] {
            assert_eq!(keys_of(wrong.as_bytes()), None);
        }
    }
}
