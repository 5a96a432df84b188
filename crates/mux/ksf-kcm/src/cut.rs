//! The message in what AF_KCM delivered.

use ksf::buffers::Buffers;
use ksf::cutter::{Cut, CutError, Cutter, Native, Room};
use ksf::error::FramingError;
use ksf::framing::Framing;
use ksf::limits::{Limits, Time};
use ksf::pool::Chunk;

/// Takes the framing off a message as it was on the wire. That the kernel has cut it right is not taken for granted:
/// `Ok(None)` if these bytes are not one message.
pub(crate) fn cut(
    framing: Framing,
    wire: &[u8],
    limits: &Limits,
    buffers: &Buffers,
) -> Result<Option<Chunk>, CutError<FramingError>> {
    let (mut cutter, mut at) = (Cutter::default(), 0);
    let mut rule = Native { framing, limits };
    let message = match cutter.next(wire, &mut at, &mut rule, &mut Here, buffers, Time::default())? {
        Cut::InPlace(body) => Chunk::from_vec(wire[body].to_vec()),
        Cut::Assembled(message) => Chunk::from_buffer(message),
        Cut::More | Cut::NoRoom => return Ok(None),
    };
    Ok((at == wire.len()).then_some(message))
}

/// Room for what is here already.
struct Here;

impl Room for Here {
    fn grow(&mut self, _: usize) -> bool {
        true
    }

    fn shrink(&mut self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf::framing::{Delimiter, LengthPrefix};

    #[test]
    fn a_message_is_taken_out_of_its_framing() {
        let limits = Limits { message_bytes_max: 6, fragments_max: 2, ..Limits::default() };
        let prefix = Framing::LengthPrefix(LengthPrefix::big_endian(2));
        let buffers = Buffers::default();
        let take = |framing, wire: &[u8]| {
            cut(framing, wire, &limits, &buffers).map(|message| message.map(|message| message.to_vec()))
        };
        assert_eq!(take(prefix, b"\0\x03abc"), Ok(Some(b"abc".to_vec())));
        assert_eq!(take(prefix, b"\0\x03abcd"), Ok(None));
        assert_eq!(take(prefix, b"\0\x03ab"), Ok(None));
        assert_eq!(take(prefix, b""), Ok(None));
        assert_eq!(take(prefix, b"\0\x07abcdefg"), Err(CutError::Oversized { bytes: 7, limit: 6 }));
        let marks = Framing::RecordMark;
        assert_eq!(take(marks, b"\0\0\0\x02ab\x80\0\0\x01c"), Ok(Some(b"abc".to_vec())));
        assert_eq!(take(marks, b"\0\0\0\0\0\0\0\0\x80\0\0\0"), Err(CutError::EndlessParts { limit: 2 }));
        assert_eq!(take(Framing::Delimiter(Delimiter::CRLF), b"ab\r\n"), Ok(Some(b"ab".to_vec())));
    }
}
