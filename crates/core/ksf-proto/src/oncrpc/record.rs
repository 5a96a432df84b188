//! Record marks: how messages lie in a byte stream (RFC 5531 section 11).
//!
//! ```text
//!  31 30                             0
//! +--+--------------------------------+
//! | L|      length of the fragment    |   then that many bytes
//! +--+--------------------------------+
//! ```
//!
//! A message is one or more fragments; L is set in the mark of the last one. A
//! fragment may be empty.

use crate::xdr::XdrWrite;

/// Size of a record mark.
pub const MARK_BYTES: usize = 4;
/// Greatest length of one fragment: 31 bits.
pub const FRAGMENT_LIMIT_BYTES: u32 = 0x7fff_ffff;
const LAST: u32 = 0x8000_0000;

/// The four bytes before a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordMark {
    /// True if the message ends with this fragment.
    pub last: bool,
    /// Length of the fragment in bytes, without the mark; at most [`FRAGMENT_LIMIT_BYTES`].
    pub len: u32,
}

impl RecordMark {
    /// Reads a mark. Every value of the four bytes is one.
    #[inline]
    pub const fn from_bytes(bytes: [u8; MARK_BYTES]) -> Self {
        let word = u32::from_be_bytes(bytes);
        Self { last: word & LAST != 0, len: word & FRAGMENT_LIMIT_BYTES }
    }

    /// The mark as it lies on the wire.
    ///
    /// A length above [`FRAGMENT_LIMIT_BYTES`] is a bug of the caller; it is cut
    /// to 31 bits.
    #[inline]
    pub const fn to_bytes(self) -> [u8; MARK_BYTES] {
        debug_assert!(self.len <= FRAGMENT_LIMIT_BYTES);
        let word = self.len & FRAGMENT_LIMIT_BYTES;
        (if self.last { word | LAST } else { word }).to_be_bytes()
    }
}

/// Appends a message as one fragment: a mark, then what `message` writes.
///
/// # Panics
///
/// If the message is 2 GiB or longer; split it with [`put_fragments`].
#[inline]
pub fn put_record(out: &mut Vec<u8>, message: impl FnOnce(&mut Vec<u8>)) {
    let mark_at = out.len();
    out.put(&[0; MARK_BYTES]);
    message(out);
    let len = out.len() - mark_at - MARK_BYTES;
    let mark = RecordMark { last: true, len: fragment_len(len) };
    out[mark_at..mark_at + MARK_BYTES].copy_from_slice(&mark.to_bytes());
}

/// Appends a message as several fragments, in the lengths given. What is left
/// of the message goes in a last fragment; lengths beyond its end are cut.
///
/// # Panics
///
/// If a fragment is 2 GiB or longer.
pub fn put_fragments(out: &mut impl XdrWrite, message: &[u8], lengths: impl IntoIterator<Item = usize>) {
    let mut rest = message;
    for len in lengths {
        let (fragment, tail) = rest.split_at(len.min(rest.len()));
        put_fragment(out, false, fragment);
        rest = tail;
    }
    put_fragment(out, true, rest);
}

fn put_fragment(out: &mut impl XdrWrite, last: bool, bytes: &[u8]) {
    let len = fragment_len(bytes.len());
    out.put(&RecordMark { last, len }.to_bytes());
    out.put(bytes);
}

fn fragment_len(len: usize) -> u32 {
    u32::try_from(len).ok().filter(|&len| len <= FRAGMENT_LIMIT_BYTES).expect("a fragment is shorter than 2 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_as_the_rfc_draws_them() {
        for (bytes, last, len) in [
            ([0x80, 0, 0, 0x28], true, 40),
            ([0x00, 0, 0, 0x01], false, 1),
            ([0x00, 0, 0, 0x00], false, 0),
            ([0x80, 0, 0, 0x00], true, 0),
            ([0xff, 0xff, 0xff, 0xff], true, 0x7fff_ffff),
            ([0x7f, 0xff, 0xff, 0xff], false, 0x7fff_ffff),
        ] {
            let mark = RecordMark { last, len };
            assert_eq!(RecordMark::from_bytes(bytes), mark);
            assert_eq!(mark.to_bytes(), bytes);
        }
    }

    #[test]
    fn a_record_is_appended_behind_what_is_there() {
        let mut out = vec![9];
        put_record(&mut out, |w| w.put_u32(7));
        assert_eq!(out, [9, 0x80, 0, 0, 4, 0, 0, 0, 7]);
    }

    #[test]
    fn fragments_are_cut_where_asked() {
        let mut out = Vec::new();
        put_fragments(&mut out, b"abcdef", [1, 0, 3]);
        let expected: &[u8] = &[
            0, 0, 0, 1, b'a', // one byte
            0, 0, 0, 0, // none
            0, 0, 0, 3, b'b', b'c', b'd', // three
            0x80, 0, 0, 2, b'e', b'f', // the rest, last
        ];
        assert_eq!(out, expected);
        let mut out = Vec::new();
        put_fragments(&mut out, b"ab", [9]);
        assert_eq!(out, [0, 0, 0, 2, b'a', b'b', 0x80, 0, 0, 0]);
    }
}
