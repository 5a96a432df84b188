//! Bodies: counted as they pass, in pieces of any size.

use std::io::Write;

use crate::looked;

/// How the end of a body is told (RFC 9112, section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLength {
    /// So many bytes.
    Fixed(u64),
    /// Chunks, each behind its length; the last one is empty, and trailers may follow.
    Chunked,
    /// All bytes until the connection ends; responses only.
    UntilClose,
}

/// The chunks of a body do not follow the grammar (RFC 9112, section 7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the chunks of a body are malformed")]
pub struct MalformedBody;

/// Longest line of a chunk's size with its extensions, and longest trailers, in bytes.
const LINE_BYTES_MAX: u32 = 4096;

/// Longest chunk, in bytes: a tebibyte.
const CHUNK_BYTES_MAX: u64 = 1 << 40;

/// Most digits of a chunk's size, zeros in front included.
const DIGITS_MAX: u8 = 15;

/// Fields that no trailer may have (RFC 9110, section 6.5.1): a recipient that adds trailers to the head would frame,
/// route, authenticate or read the message by them.
const NO_TRAILERS: [&str; 38] = [
    "age",
    "authorization",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-range",
    "content-type",
    "cookie",
    "date",
    "expect",
    "expires",
    "forwarded",
    "host",
    "http2-settings",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "keep-alive",
    "location",
    "max-forwards",
    "origin",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "range",
    "retry-after",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "vary",
    "via",
    "www-authenticate",
];

/// The rest of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body(State);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Done,
    Fixed(u64),
    UntilClose,
    /// In the digits of a chunk's size, of which there are `digits` so far.
    Size {
        size: u64,
        digits: u8,
    },
    /// Behind the digits, `line_bytes` of the line.
    Extension {
        size: u64,
        line_bytes: u32,
        part: Extension,
    },
    /// The line feed that ends the size.
    SizeEnd {
        size: u64,
    },
    Data(u64),
    /// The line end behind the data.
    DataCr,
    DataLf,
    /// In the trailers, of which there are `bytes` without line ends.
    Trailer {
        bytes: u32,
        part: Trailer,
    },
}

/// The parts of a chunk's extensions: `;name`, `;name=value`, `;name="value"`. RFC 9112, section 7.1.1, lets recipients
/// take blanks between them; readers differ on these, so they are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extension {
    /// Behind a semicolon.
    NameBegin,
    Name,
    /// Behind an equals sign.
    ValueBegin,
    Value,
    Quoted,
    /// Behind a backslash in quotes.
    Escaped,
    QuotedEnd,
}

impl Extension {
    /// The part behind one more byte of the line; `None` if the byte may not stand there.
    fn step(self, byte: u8) -> Option<Self> {
        Some(match (self, byte) {
            (Self::NameBegin | Self::Name, _) if is_token(byte) => Self::Name,
            (Self::Name, b'=') => Self::ValueBegin,
            (Self::ValueBegin, b'"') => Self::Quoted,
            (Self::ValueBegin | Self::Value, _) if is_token(byte) => Self::Value,
            (Self::Name | Self::Value | Self::QuotedEnd, b';') => Self::NameBegin,
            (Self::Quoted, b'"') => Self::QuotedEnd,
            (Self::Quoted, b'\\') => Self::Escaped,
            (Self::Quoted | Self::Escaped, _) if is_text(byte) => Self::Quoted,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Name | Self::Value | Self::QuotedEnd)
    }
}

/// The parts of trailers, which are field lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trailer {
    LineBegin,
    /// In a name, of which this is the [hash](hash_step).
    Name(u64),
    Value,
    /// Behind the carriage return of a line.
    LineEnd,
    /// Behind the carriage return of the empty line.
    End,
}

/// A character of a token (RFC 9110, section 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A character of a field's value and of a quoted string: a tab, a blank, what is visible, and other than ASCII.
fn is_text(byte: u8) -> bool {
    byte == b'\t' || byte >= b' ' && byte != 0x7f
}

/// The hash of no byte (FNV-1a).
const HASH_BEGIN: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash with one more byte, whatever its case. A name that is no trailer is found by its hash alone, so that a name
/// in pieces takes no memory; another name with the same hash is refused, too.
const fn hash_step(hash: u64, byte: u8) -> u64 {
    (hash ^ byte.to_ascii_lowercase() as u64).wrapping_mul(0x0100_0000_01b3)
}

const NO_TRAILER_HASHES: [u64; NO_TRAILERS.len()] = {
    let mut hashes = [HASH_BEGIN; NO_TRAILERS.len()];
    let mut name = 0;
    while name < hashes.len() {
        let bytes = NO_TRAILERS[name].as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            hashes[name] = hash_step(hashes[name], bytes[at]);
            at += 1;
        }
        name += 1;
    }
    hashes
};

impl Trailer {
    /// The part behind one more byte, and whether that counts to the bytes of the trailers; `None` if it may not stand there.
    fn step(self, byte: u8) -> Option<(Self, bool)> {
        Some(match (self, byte) {
            (Self::LineBegin, b'\r') => (Self::End, false),
            (Self::LineBegin, _) if is_token(byte) => (Self::Name(hash_step(HASH_BEGIN, byte)), true),
            (Self::Name(hash), b':') if !NO_TRAILER_HASHES.contains(&hash) => (Self::Value, true),
            (Self::Name(hash), _) if is_token(byte) => (Self::Name(hash_step(hash, byte)), true),
            (Self::Value, b'\r') => (Self::LineEnd, false),
            (Self::Value, _) if is_text(byte) => (Self::Value, true),
            (Self::LineEnd, b'\n') => (Self::LineBegin, false),
            _ => return None,
        })
    }
}

impl Body {
    /// A body at its beginning.
    pub fn new(length: BodyLength) -> Self {
        Self(match length {
            BodyLength::Fixed(0) => State::Done,
            BodyLength::Fixed(bytes) => State::Fixed(bytes),
            BodyLength::Chunked => State::Size { size: 0, digits: 0 },
            BodyLength::UntilClose => State::UntilClose,
        })
    }

    /// True when the message is over.
    pub fn is_done(&self) -> bool {
        self.0 == State::Done
    }

    /// True if only the end of the stream ends the message.
    pub fn is_until_close(&self) -> bool {
        self.0 == State::UntilClose
    }

    /// True when the end of the stream is the end of the message.
    pub fn may_end_here(&self) -> bool {
        matches!(self.0, State::Done | State::UntilClose)
    }

    /// Takes bytes of this body off the front of `buf`: how many belong to it. Fewer than there are only if the body
    /// is done.
    ///
    /// # Errors
    ///
    /// [`MalformedBody`]: the chunks, their extensions or the trailers do not follow the grammar, or a trailer is one
    /// of the fields that no trailer may be. What follows must not be read.
    pub fn take(&mut self, buf: &[u8]) -> Result<usize, MalformedBody> {
        let mut at = 0;
        while at < buf.len() {
            match &mut self.0 {
                State::Done => break,
                State::UntilClose => return Ok(buf.len()),
                State::Fixed(left) | State::Data(left) => {
                    let bytes = usize::try_from(*left).unwrap_or(usize::MAX).min(buf.len() - at);
                    *left -= bytes as u64;
                    at += bytes;
                    match self.0 {
                        State::Fixed(0) => self.0 = State::Done,
                        State::Data(0) => self.0 = State::DataCr,
                        _ => {}
                    }
                }
                _ => {
                    looked::add(1);
                    self.0 = self.0.step(buf[at])?;
                    at += 1;
                }
            }
        }
        Ok(at)
    }
}

impl State {
    /// One byte of what stands between the data of chunks.
    fn step(self, byte: u8) -> Result<Self, MalformedBody> {
        Ok(match (self, byte) {
            (Self::Size { size, digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                let size = size << 4 | u64::from(digit);
                if digits == DIGITS_MAX || size > CHUNK_BYTES_MAX {
                    return Err(MalformedBody);
                }
                Self::Size { size, digits: digits + 1 }
            }
            (Self::Size { digits: 0, .. }, _) => return Err(MalformedBody),
            (Self::Size { size, .. }, b'\r') => Self::SizeEnd { size },
            (Self::Size { size, .. }, b';') => Self::Extension { size, line_bytes: 1, part: Extension::NameBegin },
            (Self::Extension { size, part, .. }, b'\r') if part.may_end() => Self::SizeEnd { size },
            (Self::Extension { size, line_bytes, part }, _) if line_bytes < LINE_BYTES_MAX => {
                let part = part.step(byte).ok_or(MalformedBody)?;
                Self::Extension { size, line_bytes: line_bytes + 1, part }
            }
            (Self::SizeEnd { size: 0 }, b'\n') => Self::Trailer { bytes: 0, part: Trailer::LineBegin },
            (Self::SizeEnd { size }, b'\n') => Self::Data(size),
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => Self::Size { size: 0, digits: 0 },
            (Self::Trailer { part: Trailer::End, .. }, b'\n') => Self::Done,
            (Self::Trailer { bytes, part }, _) => {
                let (part, counts) = part.step(byte).ok_or(MalformedBody)?;
                if counts && bytes == LINE_BYTES_MAX {
                    return Err(MalformedBody);
                }
                Self::Trailer { bytes: bytes + u32::from(counts), part }
            }
            _ => return Err(MalformedBody),
        })
    }
}

/// Line end behind the data of a chunk.
pub const CHUNK_END: &[u8] = b"\r\n";

/// The chunk that ends a body, without trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Appends the line in front of a chunk of `bytes` bytes. Without any, it would be the last one.
pub fn begin_chunk(bytes: usize, out: &mut Vec<u8>) {
    // Writing to a vector does not fail.
    let _ = write!(out, "{bytes:x}\r\n");
}

/// The data of a chunked body that a [`Body`] took whole, without what stands between the chunks.
pub fn unchunked(body: &[u8]) -> Vec<u8> {
    let mut data = Vec::with_capacity(body.len());
    let mut rest = body;
    loop {
        let digits = rest.iter().map_while(|byte| char::from(*byte).to_digit(16));
        let size = digits.fold(0_usize, |size, digit| size << 4 | digit as usize);
        let Some(line_end) = rest.iter().position(|byte| *byte == b'\n') else { return data };
        let Some((chunk, behind)) = rest[line_end + 1..].split_at_checked(size) else { return data };
        if chunk.is_empty() {
            return data;
        }
        data.extend_from_slice(chunk);
        rest = behind.get(2..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `stream` in pieces of `step` bytes: how many bytes belong to the body, and whether it is done.
    fn pass(length: BodyLength, stream: &[u8], step: usize) -> Result<(usize, bool), MalformedBody> {
        let mut body = Body::new(length);
        let mut taken = 0;
        for piece in stream.chunks(step) {
            let bytes = body.take(piece)?;
            taken += bytes;
            if bytes < piece.len() {
                assert!(body.is_done(), "bytes are left and the body is not done");
                break;
            }
        }
        Ok((taken, body.is_done()))
    }

    #[test]
    fn every_split_finds_the_same_end() {
        let chunked = b"4\r\nwiki\r\nA;x=\"y\"\r\n0123456789\r\n0\r\nT: v\r\nU: w\r\n\r\nGET / HTTP/1.1";
        for step in 1..chunked.len() {
            assert_eq!(pass(BodyLength::Chunked, chunked, step), Ok((chunked.len() - 14, true)), "by {step}");
            assert_eq!(pass(BodyLength::Fixed(7), chunked, step), Ok((7, true)));
            assert_eq!(pass(BodyLength::UntilClose, chunked, step), Ok((chunked.len(), false)));
        }
        assert_eq!(pass(BodyLength::Fixed(0), b"x", 1), Ok((0, true)));
    }

    #[test]
    fn the_data_of_chunks_is_what_was_sent() {
        assert_eq!(unchunked(b"4\r\nwiki\r\nA;x=\"y\"\r\n01234\r\n789\r\n0\r\nT: v\r\n\r\n"), b"wiki01234\r\n789");
        assert_eq!(unchunked(b"0\r\n\r\n"), b"");
        for cut_short in [&b""[..], b"4", b"4\r\nwi", b"fffffffffffffff\r\nx", b"x\r\n"] {
            assert_eq!(unchunked(cut_short), b"");
        }
    }

    #[test]
    fn extensions_and_trailers_follow_the_grammar() {
        for (what, is_right) in [
            ("1;a\r\n", true),
            ("1;a;b=c;d=\"e\\\" ;\t\u{e4}\";f\r\n", true),
            ("1;a=\"\"\r\n", true),
            ("001\r\n", true),
            ("1;\r\n", false),
            ("1;;a\r\n", false),
            ("1 \r\n", false),
            ("1\t;a\r\n", false),
            ("1 ;a\r\n", false),
            ("1; a\r\n", false),
            ("1;a =b\r\n", false),
            ("1;a= b\r\n", false),
            ("1;a=\r\n", false),
            ("1;=b\r\n", false),
            ("1;a=\"b\r\n", false),
            ("1;a=\"b\"c\r\n", false),
            ("1;a=\"b\n\"\r\n", false),
            ("1;a=\"\\\r\n", false),
            ("1;a=\0\r\n", false),
            ("1;a\rb\r\n", false),
            ("+1\r\n", false),
            ("1_0\r\n", false),
            ("10000000001\r\n", false),
            ("ffffffffffffffff\r\n", false),
            ("10000000000000001\r\n", false),
        ] {
            for step in [1, what.len()] {
                assert_eq!(pass(BodyLength::Chunked, what.as_bytes(), step).is_ok(), is_right, "{what:?}");
            }
        }
        for (trailers, is_right) in [
            ("", true),
            ("T: v\r\nU:\r\nHosts: \u{e4}\tx \r\n", true),
            ("GET /smug HTTP/1.1\r\n", false),
            ("GET http://x/ HTTP/1.1\r\n", false),
            ("T\r\n", false),
            (": v\r\n", false),
            (" T: v\r\n", false),
            ("T : v\r\n", false),
            ("T: v\r\n folded\r\n", false),
            ("T: v\n", false),
            ("T: v\rU: w\r\n", false),
            ("T: \0\r\n", false),
            ("T: \x7f\r\n", false),
        ] {
            let stream = format!("0\r\n{trailers}\r\n");
            for step in [1, stream.len()] {
                let passed = pass(BodyLength::Chunked, stream.as_bytes(), step);
                assert_eq!(passed.is_ok_and(|(_, is_done)| is_done), is_right, "{trailers:?}");
            }
        }
        for name in NO_TRAILERS.iter().flat_map(|name| [(*name).to_owned(), name.to_ascii_uppercase()]) {
            let stream = format!("0\r\nT: v\r\n{name}: 1\r\n\r\n");
            assert_eq!(pass(BodyLength::Chunked, stream.as_bytes(), 1), Err(MalformedBody), "{name}");
            let longer = format!("0\r\nX-{name}: 1\r\n{name}-x: 1\r\n\r\n");
            assert!(pass(BodyLength::Chunked, longer.as_bytes(), 1).is_ok(), "{name}");
        }
    }

    /// A body is never looked at again, and its data never byte by byte.
    #[test]
    fn resumed_body_looks_at_each_byte_of_its_lines_once() {
        let chunk = [&b"1000;a=\"b\"\r\n"[..], &[b'x'; 4096], b"\r\n"].concat();
        let stream = [chunk.repeat(10), b"0\r\nT: v\r\n\r\n".to_vec()].concat();
        for step in [1, 4, 1000] {
            let looked = looked::bytes_of(|| {
                assert_eq!(pass(BodyLength::Chunked, &stream, step), Ok((stream.len(), true)));
            });
            assert_eq!(looked, stream.len() - 10 * 4096, "by {step}");
        }
    }

    #[test]
    fn malformed_chunks_are_refused() {
        let endless = format!("1;{}", "x".repeat(5000));
        let trailers = format!("0\r\n{}", "a: b\r\n".repeat(2000));
        let bad: [&[u8]; 14] = [
            b"\r\n",
            b"g\r\n",
            b"-1\r\n",
            b"0x1\r\n",
            b"1\n",
            b"1\r\nab",
            b"1\r\na\n",
            b"1\rx",
            b"1;a\nb",
            b" 1\r\n",
            b"1000000000000000\r\n",
            b"0\r\na\n\r\n",
            endless.as_bytes(),
            trailers.as_bytes(),
        ];
        for stream in bad {
            let shown = String::from_utf8_lossy(&stream[..stream.len().min(20)]);
            assert_eq!(pass(BodyLength::Chunked, stream, stream.len()), Err(MalformedBody), "{shown:?}");
            assert_eq!(pass(BodyLength::Chunked, stream, 1), Err(MalformedBody), "{shown:?}");
        }
    }
}
