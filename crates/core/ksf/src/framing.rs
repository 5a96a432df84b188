//! Where does a message end?
//!
//! A [`Framing`] looks at the front of a byte stream and says how the next part of a message is cut: how many
//! bytes of header precede the body, how long the body is, what trails it, and whether the message ends there.
//! It has no state and no buffer: a [`Cutter`](crate::cutter::Cutter) keeps both, so that one description serves every
//! engine, the multiplexor, the kernel half and the tests.
//!
//! ```text
//!   record mark     | mark 4 | body ............ |           last = top bit of the mark (RFC 5531, section 11)
//!   length prefix   | ... len ... | body ....... |           header kept in the body unless `strip`
//!   delimiter       | body ........... | delim   |
//!   raw             | whatever has arrived       |
//! ```
//!
//! Where the end of a message depends on what came before it (HTTP/1: the head says how the body ends), the service cuts,
//! with the state it has for the connection: [`Framing::Custom`].

use std::ops::Range;

use crate::error::FramingError;

/// How a byte stream is cut into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Framing {
    /// Every received chunk is a message: echo, or a service that frames by itself.
    Raw,
    /// ONC RPC record marking: a message is one or more fragments, each behind a big-endian word whose top bit
    /// marks the last one and whose other 31 bits are the fragment's length (RFC 5531, section 11).
    RecordMark,
    /// A length field at a fixed place of a fixed header.
    LengthPrefix(LengthPrefix),
    /// A message ends before this byte sequence.
    Delimiter(Delimiter),
    /// The service itself cuts the stream: [`Service::cut`](crate::Service::cut). Replies leave as they are written.
    Custom,
}

/// A length field in front of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthPrefix {
    /// Bytes before the length field.
    pub offset: u8,
    /// Width of the field in bytes: 1, 2, 4 or 8.
    pub width: u8,
    /// Byte order of the field.
    pub endian: Endian,
    /// Added to the field's value to get the length of the whole message, header included.
    /// 0 where the field counts everything (9P), `offset + width` where it counts what follows it (Thrift: 4).
    pub adjust: i32,
    /// True: the service sees the bytes after the field only, and replies get a header of their own
    /// (needs `offset == 0`). False: it sees the message as on the wire, and writes replies as on the wire.
    pub strip: bool,
}

impl LengthPrefix {
    /// A `width`-byte big-endian count of the bytes that follow it, not shown to the service.
    pub const fn big_endian(width: u8) -> Self {
        Self { offset: 0, width, endian: Endian::Big, adjust: width as i32, strip: true }
    }

    /// Length of the header: everything up to the end of the length field.
    pub const fn header_bytes(&self) -> usize {
        self.offset as usize + self.width as usize
    }

    fn is_valid(&self) -> bool {
        matches!(self.width, 1 | 2 | 4 | 8) && !(self.strip && self.offset != 0)
    }

    fn read(&self, field: &[u8]) -> u64 {
        let add = |value: u64, &byte: &u8| value << 8 | u64::from(byte);
        match self.endian {
            Endian::Big => field.iter().fold(0, add),
            Endian::Little => field.iter().rev().fold(0, add),
        }
    }

    fn write(&self, total: usize, field: &mut [u8]) -> Result<(), FramingError> {
        let value = i64::try_from(total).ok().and_then(|total| total.checked_sub(i64::from(self.adjust)));
        let value = value
            .and_then(|value| u64::try_from(value).ok())
            .filter(|value| self.width == 8 || *value < 1 << (8 * u32::from(self.width)));
        let value = value.ok_or(FramingError::ReplyTooLong { bytes: total, limit: self.limit() })?;
        let bytes = value.to_be_bytes();
        field.copy_from_slice(&bytes[8 - field.len()..]);
        if self.endian == Endian::Little {
            field.reverse();
        }
        Ok(())
    }

    fn limit(&self) -> usize {
        if self.width >= 8 { usize::MAX } else { (1usize << (8 * u32::from(self.width))) - 1 }
    }
}

/// Byte order of a length field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endian {
    /// Most significant byte first.
    Big,
    /// Least significant byte first.
    Little,
}

/// A byte sequence of 1 to 8 bytes that ends a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delimiter {
    bytes: [u8; 8],
    len: u8,
}

impl Delimiter {
    /// A line feed.
    pub const LF: Self = Self { bytes: [b'\n', 0, 0, 0, 0, 0, 0, 0], len: 1 };
    /// Carriage return and line feed.
    pub const CRLF: Self = Self { bytes: [b'\r', b'\n', 0, 0, 0, 0, 0, 0], len: 2 };

    /// A delimiter of 1 to 8 bytes; `None` for any other length.
    pub fn new(delimiter: &[u8]) -> Option<Self> {
        let mut bytes = [0; 8];
        bytes.get_mut(..delimiter.len()).filter(|room| !room.is_empty())?.copy_from_slice(delimiter);
        Some(Self { bytes, len: delimiter.len() as u8 })
    }

    /// The bytes that end a message.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    fn find(&self, buf: &[u8], from: usize) -> Option<usize> {
        let delimiter = self.as_bytes();
        let mut at = from;
        while let Some(hit) = buf.get(at..)?.iter().position(|byte| *byte == delimiter[0]) {
            at += hit;
            if buf[at..].starts_with(delimiter) {
                return Some(at);
            }
            at += 1;
        }
        None
    }
}

/// What the front of the stream holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The end of the next part cannot be told yet.
    Incomplete {
        /// Ask again when this many bytes are buffered; `None`: any further byte may tell (delimiter).
        need_bytes: Option<usize>,
    },
    /// The next part of a message, which need not have arrived in full.
    Part(Part),
}

/// The cut of one part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes before the body, not part of the message.
    pub header_bytes: usize,
    /// Bytes of the message.
    pub body_bytes: usize,
    /// Bytes after the body, not part of the message.
    pub trailer_bytes: usize,
    /// True when the message ends with this part.
    pub last: bool,
}

impl Part {
    /// Bytes of the stream this part takes.
    pub fn total_bytes(&self) -> usize {
        self.header_bytes + self.body_bytes + self.trailer_bytes
    }
}

/// Longest part any framing may announce; keeps sums of lengths far from overflow.
const PART_BYTES_MAX: u64 = 1 << 40;

impl Framing {
    /// Checks the description itself: widths, and what can be stripped.
    pub fn validate(self) -> Result<Self, FramingError> {
        match self {
            Self::LengthPrefix(prefix) if !prefix.is_valid() => Err(FramingError::InvalidPrefix(prefix)),
            framing => Ok(framing),
        }
    }

    /// Cuts the next part off `buf`, the unconsumed front of the stream. `scanned` bytes of it were already looked
    /// at by an earlier call that returned [`Frame::Incomplete`]; only the delimiter framing makes use of that.
    pub fn parse(&self, buf: &[u8], scanned: usize) -> Result<Frame, FramingError> {
        match self {
            Self::Raw | Self::Custom if buf.is_empty() => Ok(Frame::Incomplete { need_bytes: Some(1) }),
            // A service that cuts by itself does not ask here; a caller that asks all the same gets the bytes as they are.
            Self::Raw | Self::Custom => Ok(part(0, buf.len(), 0, true)),
            Self::RecordMark => Ok(match buf.first_chunk::<4>() {
                None => Frame::Incomplete { need_bytes: Some(4) },
                Some(mark) => {
                    let mark = u32::from_be_bytes(*mark);
                    part(4, (mark & !RECORD_LAST) as usize, 0, mark & RECORD_LAST != 0)
                }
            }),
            Self::LengthPrefix(prefix) => prefix_part(prefix, buf),
            Self::Delimiter(delimiter) => {
                let overlap = delimiter.as_bytes().len() - 1;
                Ok(match delimiter.find(buf, scanned.saturating_sub(overlap)) {
                    Some(body_bytes) => part(0, body_bytes, overlap + 1, true),
                    None => Frame::Incomplete { need_bytes: None },
                })
            }
        }
    }

    /// Calls `each` with the bodies of the messages at the front of `buf`, as long as they are there in one part and in
    /// full and no longer than `body_bytes_max`, and returns how many bytes they take. A short cut for streams of short
    /// messages: what it leaves is for [`Framing::parse`].
    pub fn whole_messages(&self, buf: &[u8], body_bytes_max: usize, each: impl FnMut(Range<usize>)) -> usize {
        // A loop of its own for each kind: the compiler leaves nothing but the comparisons in it.
        match *self {
            Self::RecordMark => each_whole(buf, 0, body_bytes_max, each, |mark| {
                let mark = u32::from_be_bytes(mark);
                (mark & RECORD_LAST != 0).then_some((4, 4 + (mark & !RECORD_LAST) as usize))
            }),
            Self::LengthPrefix(LengthPrefix { offset, width: 4, endian, adjust, strip }) => {
                let offset = usize::from(offset);
                let header_bytes = offset + 4;
                let body = if strip { header_bytes } else { 0 };
                let adjust = i64::from(adjust);
                let span = |value: u32| {
                    let end = usize::try_from(i64::from(value) + adjust).ok()?;
                    (end >= header_bytes).then_some((body, end))
                };
                match endian {
                    Endian::Big => {
                        each_whole(buf, offset, body_bytes_max, each, |field| span(u32::from_be_bytes(field)))
                    }
                    Endian::Little => {
                        each_whole(buf, offset, body_bytes_max, each, |field| span(u32::from_le_bytes(field)))
                    }
                }
            }
            _ => 0,
        }
    }

    /// Reserves the bytes of the header of a reply, which is appended next; [`Framing::finish_reply`] fills them.
    #[inline]
    pub fn begin_reply(&self, reply: &mut Vec<u8>) {
        match self.reply_header_bytes() {
            0 => {}
            // Of a length the compiler knows: stores instead of a call.
            4 => reply.extend_from_slice(&[0; 4]),
            bytes => reply.resize(reply.len() + bytes, 0),
        }
    }

    /// Bytes to reserve in front of a reply; filled by [`Framing::finish_reply`].
    #[inline]
    pub fn reply_header_bytes(&self) -> usize {
        match self {
            Self::RecordMark => 4,
            Self::LengthPrefix(prefix) if prefix.strip => prefix.header_bytes(),
            _ => 0,
        }
    }

    /// Completes a reply that starts with [`Framing::reply_header_bytes`] reserved bytes: writes the header and
    /// appends the trailer. `body_beyond` bytes of the body follow outside of `reply` (zero-copy chunks).
    #[inline]
    pub fn finish_reply(&self, reply: &mut [u8], start: usize, body_beyond: usize) -> Result<(), FramingError> {
        let header_bytes = self.reply_header_bytes();
        let body_bytes = reply.len() - start - header_bytes + body_beyond;
        match self {
            Self::RecordMark => {
                let length = u32::try_from(body_bytes).ok().filter(|length| length & RECORD_LAST == 0);
                let limit = (RECORD_LAST - 1) as usize;
                let length = length.ok_or(FramingError::ReplyTooLong { bytes: body_bytes, limit })?;
                reply[start..start + 4].copy_from_slice(&(length | RECORD_LAST).to_be_bytes());
            }
            Self::LengthPrefix(prefix) if prefix.strip => {
                prefix.write(header_bytes + body_bytes, &mut reply[start..start + header_bytes])?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Bytes that follow every reply.
    #[inline]
    pub fn reply_trailer(&self) -> &[u8] {
        match self {
            Self::Delimiter(delimiter) => delimiter.as_bytes(),
            _ => &[],
        }
    }
}

/// Top bit of a record mark: this fragment is the last of its record.
const RECORD_LAST: u32 = 1 << 31;

/// [`Framing::whole_messages`] for one kind of header: `span` tells from the four bytes at `field_at` where the body
/// begins and where it ends.
#[inline]
fn each_whole(
    buf: &[u8],
    field_at: usize,
    body_bytes_max: usize,
    mut each: impl FnMut(Range<usize>),
    span: impl Fn([u8; 4]) -> Option<(usize, usize)>,
) -> usize {
    let mut at = 0;
    while let Some(field) = buf[at..].get(field_at..).and_then(|rest| rest.first_chunk::<4>()) {
        let Some((body, end)) = span(*field) else { break };
        if end > buf.len() - at || end - body > body_bytes_max {
            break;
        }
        each(at + body..at + end);
        at += end;
    }
    at
}

fn part(header_bytes: usize, body_bytes: usize, trailer_bytes: usize, last: bool) -> Frame {
    Frame::Part(Part { header_bytes, body_bytes, trailer_bytes, last })
}

fn prefix_part(prefix: &LengthPrefix, buf: &[u8]) -> Result<Frame, FramingError> {
    let header_bytes = prefix.header_bytes();
    let Some(header) = buf.get(..header_bytes) else {
        return Ok(Frame::Incomplete { need_bytes: Some(header_bytes) });
    };
    let value = prefix.read(&header[usize::from(prefix.offset)..]);
    let total = i128::from(value) + i128::from(prefix.adjust);
    if total < header_bytes as i128 {
        return Err(FramingError::ShorterThanHeader { value, header_bytes });
    }
    let total = u64::try_from(total).ok().filter(|total| *total <= PART_BYTES_MAX);
    let total = total.ok_or(FramingError::Absurd { value })? as usize;
    Ok(if prefix.strip { part(header_bytes, total - header_bytes, 0, true) } else { part(0, total, 0, true) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_marks() {
        let framing = Framing::RecordMark;
        assert_eq!(framing.parse(&[0x80, 0, 0], 0), Ok(Frame::Incomplete { need_bytes: Some(4) }));
        assert_eq!(framing.parse(&[0x80, 0, 0, 7, 1], 0), Ok(part(4, 7, 0, true)));
        assert_eq!(framing.parse(&[0, 0, 1, 0], 0), Ok(part(4, 256, 0, false)));
        assert_eq!(framing.parse(&[0x80, 0, 0, 0], 0), Ok(part(4, 0, 0, true)));
    }

    #[test]
    fn length_prefixes() {
        let nine_p = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };
        assert_eq!(Framing::LengthPrefix(nine_p).parse(&[7, 0, 0, 0], 0), Ok(part(0, 7, 0, true)));
        let short = Framing::LengthPrefix(nine_p).parse(&[3, 0, 0, 0], 0);
        assert_eq!(short, Err(FramingError::ShorterThanHeader { value: 3, header_bytes: 4 }));
        let thrift = Framing::LengthPrefix(LengthPrefix::big_endian(4));
        assert_eq!(thrift.parse(&[0, 0, 0, 9, 0], 0), Ok(part(4, 9, 0, true)));
        let wide = LengthPrefix { offset: 1, width: 8, endian: Endian::Big, adjust: 0, strip: false };
        assert_eq!(
            Framing::LengthPrefix(wide).parse(&[0, 255, 255, 255, 255, 255, 255, 255, 255], 0),
            Err(FramingError::Absurd { value: u64::MAX })
        );
        let odd = LengthPrefix { width: 3, ..nine_p };
        assert_eq!(Framing::LengthPrefix(odd).validate(), Err(FramingError::InvalidPrefix(odd)));
    }

    #[test]
    fn delimiters_split_between_chunks() {
        let framing = Framing::Delimiter(Delimiter::CRLF);
        assert_eq!(framing.parse(b"ab\r", 0), Ok(Frame::Incomplete { need_bytes: None }));
        assert_eq!(framing.parse(b"ab\r\ncd", 3), Ok(part(0, 2, 2, true)));
        assert_eq!(framing.parse(b"\r\r\n", 0), Ok(part(0, 1, 2, true)));
        assert_eq!(Delimiter::new(b""), None);
        assert_eq!(Delimiter::new(b"123456789"), None);
    }

    #[test]
    fn replies_parse_as_what_was_written() {
        let framings = [
            Framing::RecordMark,
            Framing::LengthPrefix(LengthPrefix::big_endian(2)),
            Framing::LengthPrefix(LengthPrefix { endian: Endian::Little, adjust: 0, ..LengthPrefix::big_endian(4) }),
            Framing::Delimiter(Delimiter::LF),
        ];
        for framing in framings {
            let mut reply = vec![0; framing.reply_header_bytes()];
            reply.extend_from_slice(b"hello");
            framing.finish_reply(&mut reply, 0, 0).unwrap();
            reply.extend_from_slice(framing.reply_trailer());
            let Ok(Frame::Part(cut)) = framing.parse(&reply, 0) else { panic!("{framing:?} does not cut its reply") };
            assert_eq!(&reply[cut.header_bytes..][..cut.body_bytes], b"hello", "{framing:?}");
            assert_eq!(cut.total_bytes(), reply.len());
        }
    }

    #[test]
    fn the_short_cut_agrees_with_the_long_way() {
        let framings = [
            Framing::RecordMark,
            Framing::LengthPrefix(LengthPrefix::big_endian(4)),
            Framing::LengthPrefix(LengthPrefix {
                offset: 1,
                width: 4,
                endian: Endian::Little,
                adjust: -3,
                strip: false,
            }),
            Framing::LengthPrefix(LengthPrefix::big_endian(2)),
            Framing::Delimiter(Delimiter::LF),
        ];
        let mut found = 0;
        for framing in framings {
            // Every length and mark that fits into eight bytes, and some that do not; a second message behind it.
            for first in [0u8, 0x80, 1, 5] {
                for (value, body_bytes_max) in (0..20u8).flat_map(|value| [(value, usize::MAX), (value, 3)]) {
                    for len in 0..=18 {
                        let buf = [first, 0, 0, value, 0, 1, 0x80, 0, 0, 1, 7, 0, 0, 0, 2, 8, 8, 8];
                        let buf = &buf[..len];
                        let mut short = Vec::new();
                        let taken = framing.whole_messages(buf, body_bytes_max, |body| short.push(body));
                        found += short.len();
                        let (mut long, mut at) = (Vec::new(), 0);
                        while long.len() < short.len() {
                            let Ok(Frame::Part(cut)) = framing.parse(&buf[at..], 0) else {
                                panic!("{framing:?}: {buf:?}")
                            };
                            assert!(cut.last && cut.body_bytes <= body_bytes_max);
                            let start = at + cut.header_bytes;
                            long.push(start..start + cut.body_bytes);
                            at += cut.total_bytes();
                        }
                        assert_eq!((&short, taken), (&long, at), "{framing:?}: {buf:?}");
                        assert!(taken <= len);
                    }
                }
            }
        }
        assert!(found > 100, "{found}");
        // And it is taken where it can be.
        let bodies = |framing: Framing, buf: &[u8]| {
            let mut bodies = Vec::new();
            (framing.whole_messages(buf, 2, |body| bodies.push(body)), bodies)
        };
        let marked = [0x80, 0, 0, 1, 7, 0x80, 0, 0, 0, 0x80, 0, 0, 1];
        assert_eq!(bodies(Framing::RecordMark, &marked), (9, vec![4..5, 9..9]));
        let thrift = Framing::LengthPrefix(LengthPrefix::big_endian(4));
        assert_eq!(bodies(thrift, &[0, 0, 0, 2, 7, 9, 0, 0, 0, 0, 0, 0, 0, 3]), (10, vec![4..6, 10..10]));
    }

    #[test]
    fn a_reply_that_does_not_fit_the_length_field_is_refused() {
        let framing = Framing::LengthPrefix(LengthPrefix::big_endian(1));
        let mut reply = vec![0; 1 + 256];
        assert_eq!(framing.finish_reply(&mut reply, 0, 0), Err(FramingError::ReplyTooLong { bytes: 257, limit: 255 }));
    }
}
