//! Attributes, and what operations tell of them.

use rustix::fs::{FileType as RawType, RawMode, Statx, StatxFlags, StatxTimestamp};

use crate::error::FsError;
use crate::handle::Handle;

/// What `statx` is asked for.
pub(crate) const ASKED: StatxFlags = StatxFlags::BASIC_STATS;

/// A point in time since 1970, to the nanosecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Seconds since 1970-01-01 00:00 UTC; negative before.
    pub seconds: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanos: u32,
}

impl From<StatxTimestamp> for Time {
    fn from(time: StatxTimestamp) -> Self {
        Self { seconds: time.tv_sec, nanos: time.tv_nsec }
    }
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileType {
    /// A file with bytes.
    Regular,
    /// A folder.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// The name of a Unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileType {
    /// `None` for a type that Linux does not have.
    pub(crate) fn of(raw: RawType) -> Option<Self> {
        Some(match raw {
            RawType::RegularFile => Self::Regular,
            RawType::Directory => Self::Directory,
            RawType::Symlink => Self::Symlink,
            RawType::Fifo => Self::Fifo,
            RawType::Socket => Self::Socket,
            RawType::CharacterDevice => Self::CharDevice,
            RawType::BlockDevice => Self::BlockDevice,
            RawType::Unknown => return None,
        })
    }
}

/// The attributes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// What the object is.
    pub file_type: FileType,
    /// Permissions with set-user-id, set-group-id and sticky: at most 0o7777.
    pub mode: u32,
    /// Names of the object.
    pub nlink: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Length in bytes.
    pub size: u64,
    /// Bytes that it takes on the medium.
    pub used: u64,
    /// Major and minor number of a device; zeros for others.
    pub device: (u32, u32),
    /// The export, and the part of it if the file system has several with inode numbers of their own (btrfs subvolumes).
    pub fsid: u64,
    /// The inode's number, unique with `fsid`.
    pub fileid: u64,
    /// Last read.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
}

impl Attr {
    /// The attributes in what `statx` tells, for an export and a part of its file system.
    pub(crate) fn of(stat: &Statx, export_id: u32, part: u32) -> Self {
        let mode = u32::from(stat.stx_mode);
        // What is of no known type is a device that nothing opens.
        let file_type =
            FileType::of(RawType::from_raw_mode(RawMode::from(stat.stx_mode))).unwrap_or(FileType::CharDevice);
        Self {
            file_type,
            mode: mode & 0o7777,
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: stat.stx_size,
            used: stat.stx_blocks.saturating_mul(512),
            device: (stat.stx_rdev_major, stat.stx_rdev_minor),
            fsid: u64::from(export_id) << 32 | u64::from(part),
            fileid: stat.stx_ino,
            atime: stat.stx_atime.into(),
            mtime: stat.stx_mtime.into(),
            ctime: stat.stx_ctime.into(),
        }
    }

    /// What weak cache data has of an object before a change.
    pub fn before(&self) -> Before {
        Before { size: self.size, mtime: self.mtime, ctime: self.ctime }
    }
}

/// An object before a change (RFC 1813, `wcc_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    /// Length in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
}

/// An object before and after a change: weak cache data.
///
/// `before` is there only if no other change of the object came between it and `after`: a client that has what `before` tells
/// takes `after` for the whole difference, and keeps what it has of the content. So it is missing for commits, for changes that ran
/// beside another one, and everywhere in exports that are not `exclusive`, where local programs may change the object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wcc {
    /// Before the change.
    pub before: Option<Before>,
    /// After it, also if it failed.
    pub after: Option<Attr>,
}

/// A time to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the server.
    Now,
    /// This time.
    To(Time),
}

/// What is to be changed; `None`: is left as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permissions: bits above 0o7777 are ignored.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// Length in bytes, of regular files.
    pub size: Option<u64>,
    /// Last read.
    pub atime: Option<SetTime>,
    /// Last change of the content.
    pub mtime: Option<SetTime>,
}

/// What came of an operation that changes nothing, with the attributes of the object that it looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen<T> {
    /// The object, or the folder that was looked into, also on failure.
    pub after: Option<Attr>,
    /// The result.
    pub result: Result<T, FsError>,
}

impl<T> Seen<T> {
    pub(crate) fn failed(error: impl Into<FsError>) -> Self {
        Self { after: None, result: Err(error.into()) }
    }
}

/// What came of an operation that changes an object, or the entries of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed<T> {
    /// The object or the folder.
    pub wcc: Wcc,
    /// The result.
    pub result: Result<T, FsError>,
}

impl<T> Changed<T> {
    pub(crate) fn failed(error: impl Into<FsError>) -> Self {
        Self { wcc: Wcc::default(), result: Err(error.into()) }
    }
}

/// An object that was found or made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its handle.
    pub handle: Handle,
    /// Its attributes.
    pub attr: Attr,
}

/// What came of a rename.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renamed {
    /// The folder that had the name.
    pub from: Wcc,
    /// The folder that has it now.
    pub to: Wcc,
    /// The result.
    pub result: Result<(), FsError>,
}

/// What came of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    /// The object with the new name.
    pub file: Option<Attr>,
    /// The folder of the name.
    pub dir: Wcc,
    /// The result.
    pub result: Result<(), FsError>,
}
