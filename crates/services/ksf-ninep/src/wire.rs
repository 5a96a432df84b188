//! What the file layer tells, in the words of 9P2000.L.

use ksf_fs::{Attr, Entry, FileType, FsStat, LockKind, OpenHow, SetAttr, SetTime, Stable, Time};
use ksf_proto::p9::{DirEntry, Qid, STAT_BASIC, SetStat, Stat, StatFs, open_flag, qid_kind, set_bit};

use rustix::io::Errno;

/// What statfs(2) says of 9P (V9FS_MAGIC).
const FILE_SYSTEM_KIND: u32 = 0x0102_1997;
/// Bytes of a block, and those that are good to read and write at a time.
const BLOCK_BYTES: u32 = 4096;

fn kind_of(file_type: FileType) -> u8 {
    match file_type {
        FileType::Directory => qid_kind::DIRECTORY,
        FileType::Symlink => qid_kind::SYMLINK,
        _ => qid_kind::FILE,
    }
}

/// A number that is unique over the export. A part of its file system that has inode numbers of its own differs in the high bits.
fn path_of(fsid: u64, fileid: u64) -> u64 {
    // The high bits of `fsid` are those of the export.
    fileid ^ (fsid << 32)
}

/// The version of a regular file is never 0, and another one when the content has changed; others have none.
pub(crate) fn qid_of(attr: &Attr) -> Qid {
    let version = match attr.file_type {
        FileType::Regular => {
            let mixed = (attr.ctime.seconds as u64).rotate_left(32) ^ u64::from(attr.ctime.nanos) ^ attr.size;
            // The high half has the best bits of a product.
            ((mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32).max(1)
        }
        _ => 0,
    };
    Qid { kind: kind_of(attr.file_type), version, path: path_of(attr.fsid, attr.fileid) }
}

/// Type and permissions as in stat(2).
fn mode_of(attr: &Attr) -> u32 {
    attr.mode | type_bits(attr.file_type)
}

fn type_bits(file_type: FileType) -> u32 {
    match file_type {
        FileType::Regular => libc::S_IFREG,
        FileType::Directory => libc::S_IFDIR,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Fifo => libc::S_IFIFO,
        FileType::Socket => libc::S_IFSOCK,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::BlockDevice => libc::S_IFBLK,
    }
}

pub(crate) fn stat_of(attr: &Attr) -> Stat {
    let (major, minor) = attr.device;
    let time = |time: Time| (time.seconds as u64, u64::from(time.nanos));
    let ((atime_seconds, atime_nanos), (mtime_seconds, mtime_nanos)) = (time(attr.atime), time(attr.mtime));
    let (ctime_seconds, ctime_nanos) = time(attr.ctime);
    Stat {
        valid: STAT_BASIC,
        qid: qid_of(attr),
        mode: mode_of(attr),
        uid: attr.uid,
        gid: attr.gid,
        nlink: attr.nlink.into(),
        rdev: libc::makedev(major, minor),
        size: attr.size,
        block_bytes: BLOCK_BYTES.into(),
        blocks: attr.used / 512,
        atime_seconds,
        atime_nanos,
        mtime_seconds,
        mtime_nanos,
        ctime_seconds,
        ctime_nanos,
        ..Stat::default()
    }
}

pub(crate) fn statfs_of(stat: &FsStat, export: u32, name_bytes_max: u32) -> StatFs {
    let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
    StatFs {
        kind: FILE_SYSTEM_KIND,
        block_bytes: BLOCK_BYTES,
        blocks: blocks(stat.total_bytes),
        blocks_free: blocks(stat.free_bytes),
        blocks_available: blocks(stat.available_bytes),
        files: stat.total_files,
        files_free: stat.free_files,
        id: export.into(),
        name_bytes_max,
    }
}

/// An entry of a folder. The version of its qid is 0: attributes take a call of the kernel for each entry, which costs more than
/// clients make of it. Linux' client takes the path alone, as `d_ino`.
pub(crate) fn entry_of<'a>(entry: &Entry<'a>) -> DirEntry<'a> {
    // Without a type in the folder a client asks for attributes.
    let kind = entry.file_type.map_or(0, |file_type| (type_bits(file_type) >> 12) as u8);
    let qid = Qid { kind: entry.file_type.map_or(0, kind_of), version: 0, path: path_of(entry.fsid, entry.fileid) };
    DirEntry { qid, offset: entry.cookie, kind, name: entry.name }
}

/// What a file is opened for. Flags that are not named here do not matter to a server.
pub(crate) fn how_of(flags: u32) -> OpenHow {
    let has = |flag: u32| flags & flag == flag;
    let (read, write) = match flags & open_flag::ACCESS_MASK {
        open_flag::WRITE => (false, true),
        open_flag::READ_WRITE => (true, true),
        // 3 is for ioctl(2) alone, which there is none of.
        _ => (true, false),
    };
    let stable = match (has(open_flag::SYNC), has(open_flag::DATA_SYNC)) {
        (true, _) => Stable::FileSync,
        (false, true) => Stable::DataSync,
        (false, false) => Stable::Unstable,
    };
    OpenHow { read, write, truncate: has(open_flag::TRUNCATE), append: has(open_flag::APPEND), stable }
}

/// The kind of a lock; `None`: it is given back, or there is none.
pub(crate) fn lock_kind_of(kind: u8) -> Result<Option<LockKind>, Errno> {
    match kind {
        0 => Ok(Some(LockKind::Shared)),
        1 => Ok(Some(LockKind::Exclusive)),
        2 => Ok(None),
        _ => Err(Errno::INVAL),
    }
}

/// The same the other way.
pub(crate) fn wire_kind(kind: Option<LockKind>) -> u8 {
    match kind {
        Some(LockKind::Shared) => 0,
        Some(LockKind::Exclusive) => 1,
        None => 2,
    }
}

/// What a Tsetattr changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    Attr(SetAttr),
    /// The time of the last change alone. All other changes set it, too.
    Ctime,
}

pub(crate) fn set_of(to: &SetStat) -> Set {
    let all = set_bit::MODE | set_bit::UID | set_bit::GID | set_bit::SIZE | set_bit::ATIME | set_bit::MTIME;
    if to.valid & (all | set_bit::CTIME) == set_bit::CTIME { Set::Ctime } else { Set::Attr(set_attr_of(to)) }
}

fn set_attr_of(to: &SetStat) -> SetAttr {
    let has = |bit: u32| to.valid & bit != 0;
    let time = |bit, set, seconds: u64, nanos: u64| {
        // More nanoseconds than a second has are refused by the file layer.
        let nanos = u32::try_from(nanos).unwrap_or(u32::MAX);
        let to = if has(set) { SetTime::To(Time { seconds: seconds as i64, nanos }) } else { SetTime::Now };
        has(bit).then_some(to)
    };
    SetAttr {
        mode: has(set_bit::MODE).then_some(to.mode & 0o7777),
        uid: has(set_bit::UID).then_some(to.uid),
        gid: has(set_bit::GID).then_some(to.gid),
        size: has(set_bit::SIZE).then_some(to.size),
        atime: time(set_bit::ATIME, set_bit::ATIME_SET, to.atime_seconds, to.atime_nanos),
        mtime: time(set_bit::MTIME, set_bit::MTIME_SET, to.mtime_seconds, to.mtime_nanos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr() -> Attr {
        Attr {
            file_type: FileType::Regular,
            mode: 0o644,
            nlink: 1,
            uid: 1,
            gid: 2,
            size: 3,
            used: 4096,
            device: (0, 0),
            fsid: 0x7777_0000_0000,
            fileid: 9,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time { seconds: 5, nanos: 6 },
        }
    }

    #[test]
    fn versions_are_those_of_the_content_and_paths_are_unique() {
        let (first, part) = (qid_of(&attr()), Attr { fsid: attr().fsid | 0x8000_0001, ..attr() });
        assert_eq!((first.kind, first.path), (qid_kind::FILE, 9));
        assert_ne!(first.version, 0);
        assert_ne!(qid_of(&part).path, first.path);
        for later in [
            Attr { size: 4, ..attr() },
            Attr { ctime: Time { seconds: 5, nanos: 7 }, ..attr() },
            Attr { ctime: Time { seconds: 6, nanos: 6 }, ..attr() },
        ] {
            assert_ne!(qid_of(&later).version, first.version, "{later:?}");
        }
        let empty = Attr { size: 0, ctime: Time::default(), ..attr() };
        assert_ne!(qid_of(&empty).version, 0, "a file of 1970");
        let folder = qid_of(&Attr { file_type: FileType::Directory, ..attr() });
        assert_eq!((folder.kind, folder.version), (qid_kind::DIRECTORY, 0));
    }

    #[test]
    fn attributes_are_those_of_stat() {
        let device = Attr { file_type: FileType::CharDevice, device: (1, 0x12345), ..attr() };
        let stat = stat_of(&device);
        assert_eq!((stat.mode, stat.blocks), (0o20_644, 8));
        assert_eq!(stat.rdev, 0x1230_0145, "the kernel's client reads 32 bits");
        let time = |seconds| Time { seconds, nanos: seconds as u32 + 1 };
        let stat = stat_of(&Attr { nlink: 7, atime: time(1), mtime: time(3), ctime: time(5), ..attr() });
        assert_eq!((stat.mode, stat.uid, stat.gid, stat.nlink, stat.size), (0o100_644, 1, 2, 7, 3));
        assert_eq!((stat.atime_seconds, stat.atime_nanos), (1, 2));
        assert_eq!((stat.mtime_seconds, stat.mtime_nanos), (3, 4));
        assert_eq!((stat.ctime_seconds, stat.ctime_nanos), (5, 6));
        let before = stat_of(&Attr { mtime: Time { seconds: -1, nanos: 5 }, ..attr() });
        assert_eq!((before.mtime_seconds as i64, before.mtime_nanos), (-1, 5));
    }

    #[test]
    fn room_is_in_blocks_of_4_kib() {
        let room = FsStat {
            total_bytes: 9 << 12,
            free_bytes: 8 << 12,
            available_bytes: (8 << 12) - 1,
            total_files: 6,
            free_files: 5,
            available_files: 4,
        };
        let stat = statfs_of(&room, 3, 255);
        assert_eq!((stat.kind, stat.block_bytes, stat.id, stat.name_bytes_max), (0x0102_1997, 4096, 3, 255));
        assert_eq!(
            [stat.blocks, stat.blocks_free, stat.blocks_available, stat.files, stat.files_free],
            [9, 8, 7, 6, 5]
        );
    }

    #[test]
    fn flags_say_what_a_file_is_opened_for() {
        let how = |flags| {
            let OpenHow { read, write, truncate, append, stable } = how_of(flags);
            (read, write, truncate, append, stable)
        };
        for (flags, wanted) in [
            (0o0, (true, false, false, false, Stable::Unstable)),
            (0o3, (true, false, false, false, Stable::Unstable)),
            (0o100_001, (false, true, false, false, Stable::Unstable)),
            (0o3002, (true, true, true, true, Stable::Unstable)),
            (0o10_001, (false, true, false, false, Stable::DataSync)),
            (0o4_010_001, (false, true, false, false, Stable::FileSync)),
        ] {
            assert_eq!(how(flags), wanted, "{flags:o}");
        }
    }

    #[test]
    fn what_is_not_valid_is_not_set() {
        let to = SetStat { valid: 0, mode: 7, uid: 7, gid: 7, size: 7, ..SetStat::default() };
        assert_eq!(set_attr_of(&to), SetAttr::default());
        let all = SetStat { valid: 0x1ff, mode: 0o100_644, atime_nanos: 5, mtime_nanos: u64::MAX, ..to };
        let set = set_attr_of(&all);
        assert_eq!((set.mode, set.size), (Some(0o644), Some(7)));
        assert_eq!(set.atime, Some(SetTime::To(Time { seconds: 0, nanos: 5 })));
        assert_eq!(set.mtime, Some(SetTime::To(Time { seconds: 0, nanos: u32::MAX })));
        let now = set_attr_of(&SetStat { valid: 0x30, ..all });
        assert_eq!((now.atime, now.mtime), (Some(SetTime::Now), Some(SetTime::Now)));
    }
}
