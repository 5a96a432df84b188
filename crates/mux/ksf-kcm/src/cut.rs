//! The message in what AF_KCM delivered.

use ksf::error::CloseReason;
use ksf::framing::{Frame, Framing};
use ksf::limits::Limits;
use ksf::pool::Chunk;

/// Takes the framing off a message as it was on the wire. That the kernel has cut it right is not taken for granted.
pub(crate) fn cut(framing: &Framing, wire: &[u8], limits: &Limits) -> Result<Chunk, CloseReason> {
    let mut body = Vec::new();
    let mut at = 0;
    for _ in 0..limits.fragments_max {
        let Ok(Frame::Part(part)) = framing.parse(&wire[at..], 0) else { return Err(CloseReason::MalformedFrame) };
        let bytes = wire.get(at + part.header_bytes..at + part.header_bytes + part.body_bytes);
        body.extend_from_slice(bytes.ok_or(CloseReason::MalformedFrame)?);
        at += part.total_bytes();
        if body.len() > limits.message_bytes_max {
            return Err(CloseReason::OversizedMessage);
        }
        if part.last {
            let is_all = at == wire.len();
            return if is_all { Ok(Chunk::from_vec(body)) } else { Err(CloseReason::MalformedFrame) };
        }
    }
    Err(CloseReason::EndlessFragments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf::framing::{Delimiter, LengthPrefix};

    #[test]
    fn a_message_is_taken_out_of_its_framing() {
        let limits = Limits { message_bytes_max: 6, fragments_max: 2, ..Limits::default() };
        let prefix = Framing::LengthPrefix(LengthPrefix::big_endian(2));
        let take = |framing, wire: &[u8]| cut(framing, wire, &limits).map(|chunk| chunk.to_vec());
        assert_eq!(take(&prefix, b"\0\x03abc"), Ok(b"abc".to_vec()));
        assert_eq!(take(&prefix, b"\0\x03abcd"), Err(CloseReason::MalformedFrame));
        assert_eq!(take(&prefix, b"\0\x03ab"), Err(CloseReason::MalformedFrame));
        assert_eq!(take(&prefix, b"\0\x07abcdefg"), Err(CloseReason::OversizedMessage));
        let marks = Framing::RecordMark;
        assert_eq!(take(&marks, b"\0\0\0\x02ab\x80\0\0\x01c"), Ok(b"abc".to_vec()));
        assert_eq!(take(&marks, b"\0\0\0\0\0\0\0\0\x80\0\0\0"), Err(CloseReason::EndlessFragments));
        assert_eq!(take(&Framing::Delimiter(Delimiter::CRLF), b"ab\r\n"), Ok(b"ab".to_vec()));
    }
}
