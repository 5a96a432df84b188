//! Bodies: counted as they pass, in pieces of any size.

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
    /// Behind the digits, in what is not looked at.
    Extension {
        size: u64,
        line_bytes: u32,
    },
    /// The line feed that ends the size.
    SizeEnd {
        size: u64,
    },
    Data(u64),
    /// The line end behind the data.
    DataCr,
    DataLf,
    /// In the trailers. `column`: bytes of this line so far; an empty line is the end.
    Trailer {
        column: u32,
        bytes: u32,
    },
    TrailerLf {
        column: u32,
        bytes: u32,
    },
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

    /// True when the end of the stream is the end of the message.
    pub fn may_end_here(&self) -> bool {
        matches!(self.0, State::Done | State::UntilClose)
    }

    /// Takes bytes of this body off the front of `buf`: how many belong to it. Fewer than there are only if the body
    /// is done.
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
                // 15 digits are a petabyte, and the size cannot overflow.
                if digits == 15 {
                    return Err(MalformedBody);
                }
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                Self::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
            }
            (Self::Size { digits: 0, .. }, _) => return Err(MalformedBody),
            (Self::Size { size, .. } | Self::Extension { size, .. }, b'\r') => Self::SizeEnd { size },
            (Self::Size { size, .. }, b';' | b' ' | b'\t') => Self::Extension { size, line_bytes: 1 },
            // A bare line feed inside an extension is where readers disagree (RFC 9112, section 2.2): refused.
            (Self::Extension { size, line_bytes }, _) if byte != b'\n' && line_bytes < LINE_BYTES_MAX => {
                Self::Extension { size, line_bytes: line_bytes + 1 }
            }
            (Self::SizeEnd { size: 0 }, b'\n') => Self::Trailer { column: 0, bytes: 0 },
            (Self::SizeEnd { size }, b'\n') => Self::Data(size),
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => Self::Size { size: 0, digits: 0 },
            (Self::Trailer { column, bytes }, b'\r') => Self::TrailerLf { column, bytes },
            (Self::Trailer { column, bytes }, _) if byte != b'\n' && bytes < LINE_BYTES_MAX => {
                Self::Trailer { column: column + 1, bytes: bytes + 1 }
            }
            (Self::TrailerLf { column: 0, .. }, b'\n') => Self::Done,
            (Self::TrailerLf { bytes, .. }, b'\n') => Self::Trailer { column: 0, bytes },
            _ => return Err(MalformedBody),
        })
    }
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
