//! XDR, the External Data Representation (RFC 4506).
//!
//! Every item is a multiple of four bytes, big endian. Variable items carry
//! their length first and are filled up with zero bytes.
//!
//! The reader is strict where the RFC is: lengths are held against the limit
//! that the protocol declares, a bool is 0 or 1, and fill bytes are zero
//! (section 4.9 calls them "residual zero bytes"). A reader that skips the last
//! check hides encoders that leak four bytes of old memory per string.

mod reader;
mod writer;

pub use reader::XdrReader;
pub use writer::XdrWrite;

/// Size in bytes of the unit that all XDR items are multiples of (RFC 4506 section 3).
pub const UNIT_BYTES: usize = 4;

/// Why bytes are not the XDR item that was asked for.
///
/// `offset` counts bytes from the start of the buffer that the reader was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XdrError {
    /// The buffer ends inside the item.
    #[error("XDR item at offset {offset} needs {needed} bytes and {left} are left")]
    Truncated {
        /// Where the item starts.
        offset: usize,
        /// Bytes that the item needs.
        needed: usize,
        /// Bytes that the buffer still has.
        left: usize,
    },
    /// A length or count is above what the protocol declares.
    #[error("XDR length {len} at offset {offset} is above the limit of {limit}")]
    TooLong {
        /// Where the length lies.
        offset: usize,
        /// The length that was sent.
        len: u32,
        /// The greatest length allowed.
        limit: u32,
    },
    /// A fill byte is not zero.
    #[error("XDR fill bytes at offset {offset} are not zero")]
    Padding {
        /// Where the fill bytes start.
        offset: usize,
    },
    /// A value is none of those that the type has: a bool of 2, an unknown enum.
    #[error("{value} at offset {offset} is no value of {kind}")]
    Value {
        /// Where the value lies.
        offset: usize,
        /// The value that was sent.
        value: u32,
        /// Name of the type, for people.
        kind: &'static str,
    },
    /// A string that has to be UTF-8 is not.
    #[error("XDR string at offset {offset} is not UTF-8")]
    Utf8 {
        /// Where the bytes of the string start.
        offset: usize,
    },
    /// Bytes follow the last item.
    #[error("{left} bytes follow the last XDR item, from offset {offset}")]
    Trailing {
        /// Where the bytes start.
        offset: usize,
        /// How many there are.
        left: usize,
    },
}

/// Fill bytes that follow `len` bytes of opaque data: 0 to 3.
#[inline]
pub(crate) const fn padding_bytes(len: usize) -> usize {
    len.wrapping_neg() % UNIT_BYTES
}
