//! Flags of a call and of a message.

use std::ops::{BitOr, BitOrAssign};

/// Flags of a call and of what it returns, with the numbers of Linux (include/linux/socket.h), so that they pass to
/// and from C unchanged. Unknown ones are ignored, as AF_KCM does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(i32);

impl Flags {
    /// None.
    pub const NONE: Self = Self(0);
    /// `MSG_PEEK`: the message stays where it is, for the next call on this socket.
    pub const PEEK: Self = Self(0x2);
    /// `MSG_TRUNC`. Of a call: return the real length of what is there. Of a message: some of it did not fit and is
    /// dropped ([`Kind::Dgram`](super::Kind::Dgram)).
    pub const TRUNC: Self = Self(0x20);
    /// `MSG_DONTWAIT`: do not wait.
    pub const DONTWAIT: Self = Self(0x40);
    /// `MSG_EOR`: the end of a message.
    pub const EOR: Self = Self(0x80);
    /// `MSG_MORE`: the message goes on with the next call ([`Kind::Dgram`](super::Kind::Dgram)).
    pub const MORE: Self = Self(0x8000);
    /// `MSG_WAITFORONE`: wait for the first message of several only.
    pub const WAITFORONE: Self = Self(0x10000);
    /// `MSG_BATCH`: queue it, it leaves with the next one without this flag, or when its time is over.
    pub const BATCH: Self = Self(0x40000);

    /// From a number of C.
    pub const fn from_bits(bits: i32) -> Self {
        Self(bits)
    }

    /// As a number for C.
    pub const fn bits(self) -> i32 {
        self.0
    }

    /// True if all of these are set.
    pub const fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl BitOr for Flags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Flags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
