//! 9P2000.L, the dialect of 9P that Linux speaks (Documentation/filesystems/9p.rst, diod's protocol.md, include/net/9p/9p.h).
//!
//! ```text
//!   size[4] type[1] tag[2] fields...        little endian; size counts itself
//!   string: length[2] bytes                 any bytes, without a NUL
//!   data:   length[4] bytes
//! ```
//!
//! [`Request`] has the messages of a client (T), [`Reply`] those of a server (R); both are read and written. Names and data are
//! borrowed from the message. A message is read to its last byte: one with bytes left over is an error, as is one that is cut.

mod field;
mod messages;
mod types;

pub use field::{Data, Names, P9Error, Qids, WALK_NAMES_MAX};
pub use messages::{Header, Reply, Request};
pub use types::{DirEntry, GetLock, Lock, Qid, SetStat, Stat, StatFs};

/// The version that these messages belong to.
pub const VERSION: &[u8] = b"9P2000.L";
/// The version of a reply that refuses the client's.
pub const UNKNOWN_VERSION: &[u8] = b"unknown";

/// The tag of Tversion.
pub const NO_TAG: u16 = u16::MAX;
/// The fid that is none: without authentication.
pub const NO_FID: u32 = u32::MAX;
/// The numeric user of an attach that names its user by text alone.
pub const NO_UID: u32 = u32::MAX;

/// Bytes of size, type and tag.
pub const HEADER_BYTES: usize = 7;
/// Bytes of Rread and Rreaddir in front of the data.
pub const READ_HEAD_BYTES: usize = HEADER_BYTES + 4;
/// Bytes that Linux leaves for the head of a Twrite, the longest in front of data (P9_IOHDRSZ).
pub const IO_HEAD_BYTES: usize = 24;

/// Kinds of objects, in [`Qid::kind`].
pub mod qid_kind {
    /// A directory.
    pub const DIRECTORY: u8 = 0x80;
    /// A symbolic link.
    pub const SYMLINK: u8 = 0x02;
    /// Everything else.
    pub const FILE: u8 = 0;
}

/// Flags of Tlopen and Tlcreate: those of open(2) on x86.
pub mod open_flag {
    /// Bits that say what is done: 0 read, 1 write, 2 both.
    pub const ACCESS_MASK: u32 = 0o3;
    /// Writing alone.
    pub const WRITE: u32 = 0o1;
    /// Reading and writing.
    pub const READ_WRITE: u32 = 0o2;
    /// The name must be new.
    pub const EXCLUSIVE: u32 = 0o200;
    /// The content is thrown away.
    pub const TRUNCATE: u32 = 0o1000;
    /// Each write is at the end.
    pub const APPEND: u32 = 0o2000;
    /// Writes are on the medium when they return, without attributes.
    pub const DATA_SYNC: u32 = 0o10_000;
    /// It must be a directory.
    pub const DIRECTORY: u32 = 0o200_000;
    /// Writes are on the medium when they return; together with [`DATA_SYNC`].
    pub const SYNC: u32 = 0o4_000_000;
}

/// Bits of Tsetattr that say what is set.
pub mod set_bit {
    /// Permissions.
    pub const MODE: u32 = 0x1;
    /// Owner.
    pub const UID: u32 = 0x2;
    /// Group.
    pub const GID: u32 = 0x4;
    /// Length.
    pub const SIZE: u32 = 0x8;
    /// Time of the last access: the server's, unless [`ATIME_SET`].
    pub const ATIME: u32 = 0x10;
    /// Time of the last change of the content: the server's, unless [`MTIME_SET`].
    pub const MTIME: u32 = 0x20;
    /// Time of the last change: is the server's.
    pub const CTIME: u32 = 0x40;
    /// The time of the last access is that of the message.
    pub const ATIME_SET: u32 = 0x80;
    /// The time of the last change of the content is that of the message.
    pub const MTIME_SET: u32 = 0x100;
}

/// Bits of Rgetattr for the fields of stat(2): mode to blocks.
pub const STAT_BASIC: u64 = 0x7ff;

/// Flag of Tunlinkat: a directory is removed (AT_REMOVEDIR).
pub const UNLINK_DIRECTORY: u32 = 0x200;
