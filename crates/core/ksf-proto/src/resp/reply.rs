//! Replies of RESP2, the client's side.
//!
//! ```text
//!   +OK\r\n    -ERR text\r\n    :42\r\n    $5\r\nhello\r\n    $-1\r\n    *2\r\n and two replies
//! ```
//!
//! [`read`] takes the reply at the front of what arrived, without taking memory. An array is its head alone: its parts
//! are read as replies of their own.

use crate::looked;

/// Longest line: a status, an error, a number.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// A reply, where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// `+OK`.
    Status(&'a [u8]),
    /// `-ERR text`: what follows the dash.
    Error(&'a [u8]),
    /// `:42`.
    Integer(i64),
    /// A string with any bytes.
    Bulk(&'a [u8]),
    /// No string, or no array.
    Null,
    /// The head of an array, with the number of replies that follow.
    Array(usize),
}

/// What is wrong with a reply. What follows it cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// It begins with a byte that begins no reply of RESP2.
    #[error("a reply begins with '{}', which no reply of RESP2 does", .0.escape_ascii())]
    Kind(u8),
    /// A number, or a length, is none.
    #[error("a number of a reply is none")]
    Number,
    /// A line or a string does not end in `\r\n`.
    #[error("a line or a string of a reply does not end where it should")]
    End,
    /// A line without an end.
    #[error("a line of a reply is longer than {} bytes", LINE_BYTES_MAX)]
    LongLine,
    /// A string above the limit.
    #[error("a string of a reply is longer than {limit} bytes")]
    LongString {
        /// The limit.
        limit: usize,
    },
}

/// The reply at the front of `buf`, and how many bytes it takes. `None`: it is not whole yet. A string has at most
/// `string_bytes_max` bytes.
///
/// # Errors
///
/// [`BadReply`]: the connection is of no more use.
pub fn read(buf: &[u8], string_bytes_max: usize) -> Result<Option<(Reply<'_>, usize)>, BadReply> {
    resume(buf, string_bytes_max, &mut 0)
}

/// Reads as [`read`] does a reply that arrives in pieces. `scanned` is where the search for the end of its line goes on:
/// 0 at first, and again once the reply is read.
///
/// # Errors
///
/// [`BadReply`]: the connection is of no more use.
pub fn resume<'b>(
    buf: &'b [u8],
    string_bytes_max: usize,
    scanned: &mut usize,
) -> Result<Option<(Reply<'b>, usize)>, BadReply> {
    let read = front(buf, string_bytes_max, scanned);
    if !matches!(read, Ok(None)) {
        *scanned = 0;
    }
    read
}

fn front<'b>(
    buf: &'b [u8],
    string_bytes_max: usize,
    scanned: &mut usize,
) -> Result<Option<(Reply<'b>, usize)>, BadReply> {
    let Some(kind) = buf.first() else { return Ok(None) };
    if !b"+-:$*".contains(kind) {
        return Err(BadReply::Kind(*kind));
    }
    let Some((text, next)) = line(buf, scanned)? else { return Ok(None) };
    let reply = match kind {
        b'+' => Reply::Status(text),
        b'-' => Reply::Error(text),
        b':' => Reply::Integer(number(text)?),
        _ => match (number(text)?, kind) {
            (-1, _) => Reply::Null,
            (count, b'*') => Reply::Array(usize::try_from(count).map_err(|_| BadReply::Number)?),
            (bytes, _) => return bulk(buf, next, bytes, string_bytes_max),
        },
    };
    Ok(Some((reply, next)))
}

/// A bulk string of a known length, from `at`.
fn bulk(buf: &[u8], at: usize, bytes: i64, limit: usize) -> Result<Option<(Reply<'_>, usize)>, BadReply> {
    let bytes = usize::try_from(bytes).map_err(|_| BadReply::Number)?;
    if bytes > limit {
        return Err(BadReply::LongString { limit });
    }
    let Some((string, rest)) = buf[at..].split_at_checked(bytes) else { return Ok(None) };
    match rest {
        [b'\r', b'\n', ..] => Ok(Some((Reply::Bulk(string), at + bytes + 2))),
        [] | [b'\r'] => Ok(None),
        _ => Err(BadReply::End),
    }
}

/// The text between the first byte and `\r\n`, and where what follows begins. No carriage return is among the first
/// `scanned` bytes.
fn line<'b>(buf: &'b [u8], scanned: &mut usize) -> Result<Option<(&'b [u8], usize)>, BadReply> {
    let look = &buf[1..buf.len().min(1 + LINE_BYTES_MAX + 2)];
    let from = scanned.saturating_sub(1).min(look.len());
    let end = look[from..].iter().position(|byte| *byte == b'\r').map(|end| from + end);
    looked::add(end.map_or(look.len(), |end| end + 1) - from);
    *scanned = 1 + end.unwrap_or(look.len());
    match end {
        Some(end) => match look.get(end + 1) {
            Some(b'\n') => Ok(Some((&look[..end], 1 + end + 2))),
            Some(_) => Err(BadReply::End),
            None if look.len() > LINE_BYTES_MAX + 1 => Err(BadReply::LongLine),
            None => Ok(None),
        },
        None if look.len() > LINE_BYTES_MAX => Err(BadReply::LongLine),
        None => Ok(None),
    }
}

fn number(text: &[u8]) -> Result<i64, BadReply> {
    let text = std::str::from_utf8(text).map_err(|_| BadReply::Number)?;
    // `parse` takes a plus sign, which no server of Redis' protocol sends.
    if text.starts_with('+') { Err(BadReply::Number) } else { text.parse().map_err(|_| BadReply::Number) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 100;

    #[test]
    fn every_kind_is_read_when_it_is_whole() {
        for (bytes, reply) in [
            (&b"+OK\r\n"[..], Reply::Status(b"OK")),
            (b"+\r\n", Reply::Status(b"")),
            (b"-ERR no such thing\r\n", Reply::Error(b"ERR no such thing")),
            (b":-42\r\n", Reply::Integer(-42)),
            (b"$5\r\nhe\r\no\r\n", Reply::Bulk(b"he\r\no")),
            (b"$0\r\n\r\n", Reply::Bulk(b"")),
            (b"$-1\r\n", Reply::Null),
            (b"*-1\r\n", Reply::Null),
            (b"*2\r\n", Reply::Array(2)),
        ] {
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes[..cut], LIMIT), Ok(None), "{}", bytes[..cut].escape_ascii());
            }
            let behind = [bytes, b"+OK\r\n"].concat();
            assert_eq!(read(&behind, LIMIT), Ok(Some((reply, bytes.len()))));
        }
    }

    #[test]
    fn what_is_no_reply_is_told() {
        for (bytes, error) in [
            (&b"HTTP/1.1 400\r\n"[..], BadReply::Kind(b'H')),
            (b"_\r\n", BadReply::Kind(b'_')),
            (b":x\r\n", BadReply::Number),
            (b":+1\r\n", BadReply::Number),
            (b"$-2\r\n", BadReply::Number),
            (b"*-2\r\n", BadReply::Number),
            (b"$\r\n", BadReply::Number),
            (b"$99999999999999999999\r\n", BadReply::Number),
            (b"$101\r\n", BadReply::LongString { limit: LIMIT }),
            (b"$2\r\nabc", BadReply::End),
            (b"$2\r\nab\rx", BadReply::End),
            (b"+OK\rx", BadReply::End),
        ] {
            assert_eq!(read(bytes, LIMIT), Err(error), "{}", bytes.escape_ascii());
        }
        let long = [b"-", &[b'x'; LINE_BYTES_MAX][..], b"\r\n"].concat();
        assert_eq!(read(&long, LIMIT), Ok(Some((Reply::Error(&long[1..=LINE_BYTES_MAX]), long.len()))));
        assert_eq!(read(&[b'+'; LINE_BYTES_MAX + 2], LIMIT), Err(BadReply::LongLine));
        assert_eq!(BadReply::Kind(b'\r').to_string(), "a reply begins with '\\r', which no reply of RESP2 does");
    }

    /// However small the pieces are, a byte of a line is looked at once, and its end a few times.
    #[test]
    fn resumed_search_for_the_end_of_a_line_looks_at_each_byte_once() {
        for (bytes, again) in [
            ([&b"-"[..], &[b'x'; 60_000], b"\r\n"].concat(), 2),
            // The length is found again for each piece of the string.
            ([&b"$90\r\n"[..], &[b'x'; 90], b"\r\n"].concat(), 95),
        ] {
            let mut scanned = 0;
            let looked = looked::bytes_of(|| {
                for end in 0..bytes.len() {
                    assert_eq!(resume(&bytes[..end], LIMIT, &mut scanned), Ok(None));
                }
                assert!(matches!(resume(&bytes, LIMIT, &mut scanned), Ok(Some((_, used))) if used == bytes.len()));
            });
            assert!(looked <= bytes.len() + again, "{looked} of {}", bytes.len());
            assert_eq!(resume(b"+OK\r\n", LIMIT, &mut scanned), Ok(Some((Reply::Status(b"OK"), 5))));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_none_are_used_twice(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            while let Ok(Some((_, used))) = read(rest, LIMIT) {
                prop_assert!(used > 0 && used <= rest.len());
                rest = &rest[used..];
            }
        }
    }
}
