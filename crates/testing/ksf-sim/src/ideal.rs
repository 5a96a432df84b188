//! What a stream of bytes means, told by looking at all of it at once: the ideal that a connection, which sees the
//! stream in pieces, must agree with whatever the pieces are.
//!
//! Written from the descriptions of the framings, not from their code, and as simple as it can be: no state, no
//! limits on memory, no speed.

use ksf::CloseReason;
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf::limits::Limits;

/// The messages of a stream, and why a connection ends that receives all of it and then the peer's half-close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ideal {
    /// Bodies as a service sees them, in order.
    pub messages: Vec<Vec<u8>>,
    /// Why the connection ends after them.
    pub end: CloseReason,
}

/// Decodes a whole stream. A raw stream counts as one message here: its cut is not the framing's.
pub fn decode(framing: Framing, limits: &Limits, stream: &[u8]) -> Ideal {
    let mut messages = Vec::new();
    let mut rest = stream;
    let end = loop {
        if rest.is_empty() {
            break CloseReason::PeerClosed;
        }
        let next = match framing {
            Framing::RecordMark => record(limits, rest),
            Framing::LengthPrefix(prefix) => prefixed(&prefix, limits, rest),
            Framing::Delimiter(delimiter) => delimited(&delimiter, limits, rest),
            _ => Ok((rest.to_vec(), &[][..])),
        };
        match next {
            Ok((message, behind)) => {
                messages.push(message);
                rest = behind;
            }
            Err(reason) => break reason,
        }
    };
    Ideal { messages, end }
}

type Next<'a> = Result<(Vec<u8>, &'a [u8]), CloseReason>;

fn record<'a>(limits: &Limits, mut rest: &'a [u8]) -> Next<'a> {
    let mut message = Vec::new();
    for fragment in 1.. {
        let (mark, behind) = rest.split_first_chunk::<4>().ok_or(CloseReason::PeerClosedMidMessage)?;
        let mark = u32::from_be_bytes(*mark);
        let (last, length) = (mark >> 31 == 1, (mark & 0x7fff_ffff) as usize);
        if message.len() + length > limits.message_bytes_max {
            return Err(CloseReason::OversizedMessage);
        }
        if fragment > limits.fragments_max {
            return Err(CloseReason::EndlessFragments);
        }
        let (body, behind) = behind.split_at_checked(length).ok_or(CloseReason::PeerClosedMidMessage)?;
        message.extend_from_slice(body);
        rest = behind;
        if last {
            break;
        }
    }
    Ok((message, rest))
}

fn prefixed<'a>(prefix: &LengthPrefix, limits: &Limits, rest: &'a [u8]) -> Next<'a> {
    let header_bytes = usize::from(prefix.offset) + usize::from(prefix.width);
    let header = rest.get(..header_bytes).ok_or(CloseReason::PeerClosedMidMessage)?;
    let mut field = header[usize::from(prefix.offset)..].to_vec();
    if prefix.endian == Endian::Little {
        field.reverse();
    }
    let value = field.iter().fold(0i128, |value, byte| value * 256 + i128::from(*byte));
    let total = value + i128::from(prefix.adjust);
    // 2^40: the longest message the framework lets anybody announce.
    if total < header_bytes as i128 || total > 1 << 40 {
        return Err(CloseReason::MalformedFrame);
    }
    let total = total as usize;
    let hidden = if prefix.strip { header_bytes } else { 0 };
    if total - hidden > limits.message_bytes_max {
        return Err(CloseReason::OversizedMessage);
    }
    let (message, behind) = rest.split_at_checked(total).ok_or(CloseReason::PeerClosedMidMessage)?;
    Ok((message[hidden..].to_vec(), behind))
}

fn delimited<'a>(delimiter: &Delimiter, limits: &Limits, rest: &'a [u8]) -> Next<'a> {
    let delimiter = delimiter.as_bytes();
    let found = rest.windows(delimiter.len()).position(|window| window == delimiter);
    // Without a delimiter all but its possible beginning is body.
    let body = found.unwrap_or((rest.len() + 1).saturating_sub(delimiter.len()));
    match found {
        _ if body > limits.message_bytes_max => Err(CloseReason::OversizedMessage),
        None => Err(CloseReason::PeerClosedMidMessage),
        Some(at) => Ok((rest[..at].to_vec(), &rest[at + delimiter.len()..])),
    }
}

/// The bytes a peer sends for a message with this body. `fragments` cuts a record into fragments of these lengths, as
/// far as they fit, and one more; other framings have none. Where the header stays in the message, bytes in front of
/// the length field are zero.
pub fn encode(framing: Framing, body: &[u8], fragments: &[usize]) -> Vec<u8> {
    match framing {
        Framing::RecordMark => {
            let (mut wire, mut rest) = (Vec::new(), body);
            for length in fragments {
                let (fragment, behind) = rest.split_at((*length).min(rest.len()));
                wire.extend_from_slice(&(fragment.len() as u32).to_be_bytes());
                wire.extend_from_slice(fragment);
                rest = behind;
            }
            wire.extend_from_slice(&(1 << 31 | rest.len() as u32).to_be_bytes());
            wire.extend_from_slice(rest);
            wire
        }
        Framing::LengthPrefix(prefix) => {
            let total = (prefix.header_bytes() + body.len()) as i64;
            let value = (total - i64::from(prefix.adjust)).to_be_bytes();
            let mut field = value[8 - usize::from(prefix.width)..].to_vec();
            if prefix.endian == Endian::Little {
                field.reverse();
            }
            [&vec![0; usize::from(prefix.offset)][..], &field, body].concat()
        }
        Framing::Delimiter(delimiter) => [body, delimiter.as_bytes()].concat(),
        _ => body.to_vec(),
    }
}

/// The part of a message behind the header that the framing leaves in it.
pub fn payload(framing: Framing, message: &[u8]) -> &[u8] {
    match framing {
        Framing::LengthPrefix(prefix) if !prefix.strip => message.get(prefix.header_bytes()..).unwrap_or_default(),
        _ => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let prefix = LengthPrefix { offset: 2, width: 2, endian: Endian::Little, adjust: 3, strip: false };
        let delimiter = Delimiter::new(b"--").unwrap();
        let framings = [
            Framing::RecordMark,
            Framing::LengthPrefix(prefix),
            Framing::Delimiter(delimiter),
            Framing::Delimiter(Delimiter::LF),
        ];
        for framing in framings {
            let stream = [encode(framing, b"hello", &[2, 0, 9]), encode(framing, b"bye", &[])].concat();
            let ideal = decode(framing, &Limits::default(), &stream);
            let bodies: Vec<_> = ideal.messages.iter().map(|message| payload(framing, message)).collect();
            assert_eq!(bodies, [&b"hello"[..], b"bye"], "{framing:?}");
            assert_eq!(ideal.end, CloseReason::PeerClosed);
            let cut = decode(framing, &Limits::default(), &stream[..stream.len() - 1]);
            assert_eq!((cut.messages.len(), cut.end), (1, CloseReason::PeerClosedMidMessage));
        }
    }

    #[test]
    fn limits_end_a_stream_for_the_documented_reason() {
        let limits = Limits { message_bytes_max: 4, fragments_max: 2, ..Limits::default() };
        let end = |framing, stream: &[u8]| decode(framing, &limits, stream).end;
        assert_eq!(end(Framing::RecordMark, &[0x80, 0, 0, 5]), CloseReason::OversizedMessage);
        assert_eq!(end(Framing::RecordMark, &[0; 12]), CloseReason::EndlessFragments);
        let crlf = Framing::Delimiter(Delimiter::CRLF);
        assert_eq!(end(crlf, b"1234\r"), CloseReason::PeerClosedMidMessage);
        assert_eq!(end(crlf, b"1234\r\n"), CloseReason::PeerClosed);
        assert_eq!(end(crlf, b"12345\r"), CloseReason::OversizedMessage);
    }
}
