//! Operations. Each begins as the server, which finds the object, goes on as the caller, whom the kernel checks, and ends as the
//! server, which looks at the attributes.

mod change;
mod content;
mod list;
mod lock;
mod look;
mod make;
mod open;
mod settle;
mod take;
mod xattr;

use std::ops::{BitAnd, BitOr};

use crate::attr::{SetAttr, Time};
use crate::layer::{EXECUTE_BIT, READ_BIT, WRITE_BIT};

pub(crate) use look::{greatest_file_size_max, measured_file_size_max, measured_time_step, nameless_file, possible};
pub(crate) use open::{OpenFiles, sync_opened};
pub(crate) use settle::changed_for_good;

pub use change::Resize;
pub use list::{Cursor, Detail, Entry, Listed};
pub use lock::{LOCKS_MAX, LOCKS_OF_FILE_MAX, LOCKS_OF_OPEN_MAX, LockKind, LockRange};
pub use open::{OpenFile, OpenHow};
pub use xattr::{XATTR_BYTES_MAX, XattrHow, XattrOf};

/// Bytes of a file, at most (off_t).
pub const FILE_SIZE_MAX: u64 = i64::MAX as u64;

/// The finest step between two times that file systems keep.
pub(crate) const TIME_STEP_MIN: Time = Time { seconds: 0, nanos: 1 };

/// A set of rights to an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access(u32);

impl Access {
    /// No right.
    pub const NONE: Self = Self(0);
    /// Reading a file or the entries of a folder.
    pub const READ: Self = Self(READ_BIT);
    /// Writing a file, or making and removing entries of a folder, for which it must be searched, too.
    pub const WRITE: Self = Self(WRITE_BIT);
    /// Executing a file, or searching a folder.
    pub const EXECUTE: Self = Self(EXECUTE_BIT);
    /// Reading a file by its handle: [`permit`](crate::layer::permit).
    pub(crate) const READ_BY_HANDLE: Self = Self(8);

    /// True if all of `other` are among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// As access(2) has them.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The rights in bits as access(2) has them; others are ignored.
    pub const fn from_bits_truncate(bits: u32) -> Self {
        Self(bits & (READ_BIT | WRITE_BIT | EXECUTE_BIT))
    }
}

impl Access {
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitAnd for Access {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// When a write is done (RFC 1813, section 3.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stable {
    /// When the system has the data; a commit brings it to the medium.
    Unstable,
    /// When the data is on the medium, and what is needed to find it.
    DataSync,
    /// When data and attributes are on the medium.
    FileSync,
}

/// What was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadDone {
    /// Bytes; fewer than asked for only at the end of the file.
    pub count: usize,
    /// The end of the file was reached.
    pub eof: bool,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes; fewer than were given if the medium got full on the way.
    pub count: usize,
    /// As it was asked for.
    pub committed: Stable,
    /// Whether data was lost since: compare it with that of the commit.
    pub verifier: [u8; 8],
}

/// What happens if the name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateHow {
    /// The file that there is, is taken; of the attributes only the size is set.
    Unchecked(SetAttr),
    /// [`ErrorKind::Exists`](crate::ErrorKind::Exists).
    Guarded(SetAttr),
    /// The same, but for a file that was made with the same verifier: the call was sent twice.
    Exclusive([u8; 8]),
}

/// What is made by [`Fs::mknod`](crate::Fs::mknod).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// A named pipe.
    Fifo,
    /// The name of a Unix socket.
    Socket,
    /// A character device with its major and minor number.
    CharDevice(u32, u32),
    /// A block device with its major and minor number.
    BlockDevice(u32, u32),
}

/// The room of a file system. All below 8 EiB, above which clients are known to overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsStat {
    /// Its size in bytes.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Free bytes without those that are reserved for root.
    pub available_bytes: u64,
    /// Inodes.
    pub total_files: u64,
    /// Free inodes.
    pub free_files: u64,
    /// Free inodes without those that are reserved for root.
    pub available_files: u64,
}

/// Limits and rules of a file system for files, links and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathConf {
    /// Bytes of a regular file, at most.
    pub file_size_max: u64,
    /// Step between two times of a file.
    pub time_step: Time,
    /// Links to one object, at most.
    pub link_max: u32,
    /// Bytes of a name, at most.
    pub name_max: u32,
    /// Longer names are refused, not cut.
    pub no_trunc: bool,
    /// Only root gives files away.
    pub chown_restricted: bool,
    /// Names that differ in case are the same.
    pub case_insensitive: bool,
    /// The case of names is kept.
    pub case_preserving: bool,
}
