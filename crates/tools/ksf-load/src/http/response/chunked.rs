//! The chunked transfer coding (RFC 9112, section 7.1), cut at any byte.

use super::{HEAD_BYTES_MAX, Malformed};

/// Digits of a size, leading zeros included.
const DIGITS_MAX: u32 = 16;

/// Where in a chunked body the next byte belongs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Chunked {
    state: ChunkedState,
    /// Of the chunk's size: read so far, then bytes of data to come.
    size: u64,
    digits: u32,
    /// Bytes of extensions and trailers, which are bounded.
    extra_bytes: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ChunkedState {
    #[default]
    Size,
    Extension,
    /// Behind the carriage return of the size's line.
    SizeEnd,
    Data,
    /// Behind the data: carriage return and line feed.
    DataReturn,
    DataEnd,
    /// At the begin of a trailer line, or of the empty line that ends the body.
    Line,
    Trailer,
    /// Behind the carriage return of the last line.
    LastEnd,
    Done,
}

impl Chunked {
    pub(crate) fn is_done(&self) -> bool {
        self.state == ChunkedState::Done
    }

    /// Reads up to the next data: returns how many bytes are framing and how many behind them are data. Takes all of
    /// `bytes` unless there is data or the body ends.
    pub(crate) fn next(&mut self, bytes: &[u8]) -> Result<(usize, usize), Malformed> {
        for (at, &byte) in bytes.iter().enumerate() {
            if self.state == ChunkedState::Data {
                let data = self.size.min((bytes.len() - at) as u64);
                self.size -= data;
                if self.size == 0 {
                    self.state = ChunkedState::DataReturn;
                }
                return Ok((at, data as usize));
            }
            self.step(byte)?;
            if self.is_done() {
                return Ok((at + 1, 0));
            }
        }
        Ok((bytes.len(), 0))
    }

    fn step(&mut self, byte: u8) -> Result<(), Malformed> {
        self.state = match (&self.state, byte) {
            (ChunkedState::Size, byte) if byte.is_ascii_hexdigit() => {
                self.digits += 1;
                if self.digits > DIGITS_MAX {
                    return Err("the size of a chunk has more than 16 digits");
                }
                self.size = self.size << 4 | u64::from(hexadecimal(byte));
                ChunkedState::Size
            }
            (ChunkedState::Size, _) if self.digits == 0 => return Err("a chunk has no size"),
            (ChunkedState::Size | ChunkedState::Extension, b'\r') => ChunkedState::SizeEnd,
            (ChunkedState::Size | ChunkedState::Extension | ChunkedState::SizeEnd, b'\n') => self.after_size(),
            (ChunkedState::Size, b';' | b' ' | b'\t') => ChunkedState::Extension,
            (ChunkedState::Size, _) => return Err("the size of a chunk is no number"),
            (ChunkedState::Extension, _) => self.extra(ChunkedState::Extension)?,
            (ChunkedState::SizeEnd, _) => return Err("the size of a chunk does not end with its line"),
            (ChunkedState::DataReturn, b'\r') => ChunkedState::DataEnd,
            (ChunkedState::DataReturn | ChunkedState::DataEnd, b'\n') => ChunkedState::Size,
            (ChunkedState::DataReturn | ChunkedState::DataEnd, _) => return Err("a chunk is longer than its size"),
            (ChunkedState::Line, b'\r') => ChunkedState::LastEnd,
            (ChunkedState::Line | ChunkedState::LastEnd, b'\n') => ChunkedState::Done,
            (ChunkedState::LastEnd, _) => return Err("the last chunk does not end with an empty line"),
            (ChunkedState::Trailer, b'\n') => self.extra(ChunkedState::Line)?,
            (ChunkedState::Line | ChunkedState::Trailer, _) => self.extra(ChunkedState::Trailer)?,
            (ChunkedState::Data | ChunkedState::Done, _) => {
                unreachable!("next() takes data itself and stops at the end")
            }
        };
        Ok(())
    }

    fn after_size(&mut self) -> ChunkedState {
        self.digits = 0;
        match self.size {
            0 => ChunkedState::Line,
            _ => ChunkedState::Data,
        }
    }

    fn extra(&mut self, state: ChunkedState) -> Result<ChunkedState, Malformed> {
        self.extra_bytes += 1;
        match self.extra_bytes > HEAD_BYTES_MAX {
            true => Err("chunk extensions and trailers are longer than 32 KiB"),
            false => Ok(state),
        }
    }
}

fn hexadecimal(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of a whole body and how many bytes it took; `None` if it did not end.
    fn decode(bytes: &[u8]) -> Result<Option<(Vec<u8>, usize)>, Malformed> {
        let (mut chunked, mut data, mut at) = (Chunked::default(), Vec::new(), 0);
        while at < bytes.len() {
            let (skip, length) = chunked.next(&bytes[at..])?;
            data.extend_from_slice(&bytes[at + skip..at + skip + length]);
            at += skip + length;
            if chunked.is_done() {
                return Ok(Some((data, at)));
            }
        }
        Ok(None)
    }

    #[test]
    fn chunks_are_joined() {
        assert_eq!(decode(b"1\r\na\r\n2;x\r\nbc\r\n0\r\n\r\nZ"), Ok(Some((b"abc".to_vec(), 20))));
        assert_eq!(decode(b"0\r\nA: b\r\n\r\n"), Ok(Some((Vec::new(), 11))));
        assert_eq!(decode(b"0\r\nA: b\r\n"), Ok(None));
    }

    #[test]
    fn wrong_framing_is_named() {
        let endless = [b"1;".to_vec(), vec![b'x'; HEAD_BYTES_MAX + 1]].concat();
        for (bytes, reason) in [
            (&b"\r\n"[..], "no size"),
            (b"g\r\n", "no size"),
            (b"1g\r\n", "no number"),
            (b"1\rx", "its line"),
            (b"1\r\nab", "longer than its size"),
            (b"0\r\n\rx", "empty line"),
            (b"00000000000000001\r\n", "16 digits"),
            (&endless, "32 KiB"),
        ] {
            assert!(decode(bytes).expect_err("wrong").contains(reason), "{reason}");
        }
    }
}
