//! Operations that change nothing: attributes, names, rights, links, the file system.

use std::os::fd::OwnedFd;

use rustix::fs::{
    AtFlags, Mode as Permissions, OFlags, SeekFrom, StatVfs, StatxFlags, Timespec, Timestamps, fstatfs, fstatvfs,
    futimens, openat, seek, statx,
};

use super::{Access, FILE_SIZE_MAX, FsStat, PathConf};
use crate::attr::{Attr, FileType, Found, Seen, Time};
use crate::credential::Credential;
use crate::descriptors::Mode;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::inside::open_up;
use crate::lane::Lane;
use crate::layer::{Fs, NAME_BYTES_MAX, Node, checked_name, name_error};
use crate::rights::Question;
use crate::sys;

/// ext2, ext3 and ext4 (statfs(2), `f_type`).
const EXT4: i64 = 0xef53;
const FAT: i64 = 0x4d44;

/// Links of one object by the kind of the file system (statfs(2), `f_type`); 255 where it is not known here.
const LINK_MAX: [(i64, u32); 4] =
    [(EXT4, 65_000), (0x5846_5342, i32::MAX as u32), (0x9123_683e, 65_535), (0x0102_1994, i32::MAX as u32)];

/// A new regular file in a directory, without a name. `None`: this process cannot create one there.
pub(crate) fn nameless_file(dir: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    openat(dir, c".", flags, Permissions::RUSR | Permissions::WUSR).ok()
}

/// Size limit of a regular file.
///
/// No system call returns the limit, but lseek(2) fails above it. A file of ext4 has another limit with extents than with indirect
/// blocks, as files of ext2 and ext3 have, and statfs(2) reports the same type for the three.
pub(crate) fn measured_file_size_max(file: &OwnedFd) -> u64 {
    let allows = |size| seek(file, SeekFrom::Start(size)).is_ok();
    let bits = (0..i64::BITS - 1).rev().map(|bit| 1 << bit);
    bits.fold(0, |size, bit| if allows(size | bit) { size | bit } else { size })
}

/// Step between two times of a file. `None`: it is more than two seconds, or the file keeps no times.
///
/// The file gets a time just before one that steps of all usual lengths have, and keeps the last step before it.
pub(crate) fn measured_time_step(file: &OwnedFd) -> Option<Time> {
    const SECOND_NANOS: i64 = 1_000_000_000;
    let set = Timespec { tv_sec: 1_000_000_001, tv_nsec: SECOND_NANOS - 1 };
    futimens(file, &Timestamps { last_access: set, last_modification: set }).ok()?;
    let kept = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MTIME).ok()?.stx_mtime;
    let step = (set.tv_sec - kept.tv_sec) * SECOND_NANOS + SECOND_NANOS - i64::from(kept.tv_nsec);
    let time = Time { seconds: step / SECOND_NANOS, nanos: (step % SECOND_NANOS) as u32 };
    (1..=2 * SECOND_NANOS).contains(&step).then_some(time)
}

/// Greatest size limit of a regular file on a kind of file system. xfs, btrfs and tmpfs have the kernel's own limit.
pub(crate) fn greatest_file_size_max(kind: i64, block_bytes: u64) -> u64 {
    match kind {
        // Numbers of blocks have 32 bits.
        EXT4 => block_bytes * u64::from(u32::MAX),
        FAT => u64::from(u32::MAX),
        _ => FILE_SIZE_MAX,
    }
}

/// Bytes of a name, at most. `reported`: by statfs(2), which counts bytes of UTF-8 for FAT.
fn name_max(reported: i64) -> u32 {
    usize::try_from(reported).map_or(NAME_BYTES_MAX, |max| max.min(NAME_BYTES_MAX)) as u32
}

/// Counts of a file system in the units of [`FsStat`], each at most [`FILE_SIZE_MAX`].
fn room(stat: &StatVfs) -> FsStat {
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize).min(FILE_SIZE_MAX);
    let files = |files: u64| files.min(FILE_SIZE_MAX);
    FsStat {
        total_bytes: bytes(stat.f_blocks),
        free_bytes: bytes(stat.f_bfree),
        available_bytes: bytes(stat.f_bavail),
        total_files: files(stat.f_files),
        free_files: files(stat.f_ffree),
        available_files: files(stat.f_favail),
    }
}

/// Those of the rights that an export gives to anyone.
pub(crate) fn possible(want: Access, export: &Export) -> Access {
    if export.options().read_only { want.without(Access::WRITE) } else { want }
}

/// Those of the rights that the kernel grants this thread.
fn granted(object: &OwnedFd, want: Access) -> Access {
    let asked = [Access::READ, Access::WRITE, Access::EXECUTE].into_iter().filter(|right| want.contains(*right));
    let granted = asked.filter(|right| sys::access(object, right.bits()).is_ok());
    granted.fold(Access::NONE, |all, right| all | right)
}

impl Fs {
    /// The attributes of an object. No right is needed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Stale`], [`ErrorKind::Io`], [`ErrorKind::TryLater`].
    pub fn getattr(&self, lane: &mut Lane, handle: &Handle) -> Result<Attr, FsError> {
        let is_exclusive = self.export(handle)?.options().exclusive;
        let filling = is_exclusive.then(|| self.attrs.filling(handle)).flatten();
        let attr = self.node(lane, handle)?.attr;
        if let Some(filling) = filling {
            filling.keep(handle, &attr);
        }
        Ok(attr)
    }

    /// The object of a name in a folder. `.` is the folder itself, `..` the one above, and the export's root above its root.
    pub fn lookup(&self, lane: &mut Lane, credential: &Credential, dir: &Handle, name: &[u8]) -> Seen<Found> {
        match self.node(lane, dir) {
            Ok(node) => Seen { after: Some(node.attr), result: self.look(lane, credential, dir, &node, name) },
            Err(error) => Seen::failed(error),
        }
    }

    fn look(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        node: &Node,
        name: &[u8],
    ) -> Result<Found, FsError> {
        if node.attr.file_type != FileType::Directory {
            return Err(ErrorKind::NotDirectory.into());
        }
        let name = checked_name(name)?;
        let call = self.begin(lane, credential, dir, false)?;
        let is_root = dir == call.export.root();
        if name.as_c_str() == c".." && !is_root {
            let (export, folder) = (call.export, &*node.descriptor);
            let up =
                || lane.as_caller(&call.caller, || self.with_room(export, || open_up(folder)))?.map_err(name_error);
            let Some(above) = self.above(export, folder, up)? else {
                let root = export.root();
                return Ok(Found { handle: root.clone(), attr: self.node(lane, root)?.attr });
            };
            self.check_inside(export, &above)?;
            return self.found(export, above, Mode::Path, None);
        }
        let is_dots = name.as_c_str() == c"." || name.as_c_str() == c"..";
        let looked_for = if is_dots { c"." } else { name.as_c_str() };
        let question = Question::about(&node.attr);
        let looked = lane.as_caller(&call.caller, || self.open_name(call.export, &node.descriptor, looked_for))?;
        if looked.is_ok() || looked.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            self.keep_rights(&call, dir, question, (Access::EXECUTE, Access::EXECUTE));
        }
        let object = looked?;
        let place = (!is_dots).then_some((dir, name.as_c_str()));
        self.found(call.export, object, Mode::Path, place)
    }

    /// Which of the rights in `want` the kernel grants the caller. Without the exceptions for owners that reads and writes have.
    pub fn access(&self, lane: &mut Lane, credential: &Credential, handle: &Handle, want: Access) -> Seen<Access> {
        let node = match self.node(lane, handle) {
            Ok(node) => node,
            Err(error) => return Seen::failed(error),
        };
        let granted = self.begin(lane, credential, handle, false).and_then(|call| {
            let want = possible(want, call.export);
            let question = Question::about(&node.attr);
            let granted = lane.as_caller(&call.caller, || granted(&node.descriptor, want))?;
            self.keep_rights(&call, handle, question, (want, granted));
            Ok(granted)
        });
        Seen { after: Some(node.attr), result: granted }
    }

    /// What a symbolic link holds: at most 4095 bytes, which are not checked.
    pub fn readlink(&self, lane: &mut Lane, credential: &Credential, handle: &Handle) -> Seen<Vec<u8>> {
        let node = match self.node(lane, handle) {
            Ok(node) => node,
            Err(error) => return Seen::failed(error),
        };
        let result = self.begin(lane, credential, handle, false).and_then(|call| {
            if node.attr.file_type != FileType::Symlink {
                return Err(ErrorKind::Invalid.into());
            }
            // The time of the last access.
            let _changing = self.attrs.changing(handle);
            let read = || rustix::fs::readlinkat(&*node.descriptor, c"", Vec::<u8>::new());
            Ok(lane.as_caller(&call.caller, read)??.into_bytes())
        });
        Seen { after: Some(node.attr), result }
    }

    /// The room of the object's file system.
    pub fn fsstat(&self, lane: &mut Lane, handle: &Handle) -> Seen<FsStat> {
        let node = match self.node(lane, handle) {
            Ok(node) => node,
            Err(error) => return Seen::failed(error),
        };
        let result = fstatvfs(&*node.descriptor).map_err(FsError::from).map(|stat| room(&stat));
        Seen { after: Some(node.attr), result }
    }

    /// Limits of the object's file system.
    pub fn pathconf(&self, lane: &mut Lane, handle: &Handle) -> Seen<PathConf> {
        let node = match self.node(lane, handle) {
            Ok(node) => node,
            Err(error) => return Seen::failed(error),
        };
        let result = self.export(handle).and_then(|export| {
            let stat = fstatfs(&*node.descriptor)?;
            let known = LINK_MAX.iter().find(|(kind, _)| *kind == stat.f_type);
            Ok(PathConf {
                file_size_max: export.file_size_max,
                time_step: export.time_step,
                link_max: known.map_or(255, |(_, max)| *max),
                name_max: name_max(stat.f_namelen),
                no_trunc: true,
                chown_restricted: true,
                case_insensitive: false,
                case_preserving: true,
            })
        });
        Seen { after: Some(node.attr), result }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_of_a_file_system_is_below_8_eib() {
        let stat = |blocks, block_bytes, files| StatVfs {
            f_bsize: 1 << 20,
            f_frsize: block_bytes,
            f_blocks: blocks,
            f_bfree: blocks,
            f_bavail: blocks,
            f_files: files,
            f_ffree: files,
            f_favail: files,
            f_fsid: 0,
            f_flag: rustix::fs::StatVfsMountFlags::empty(),
            f_namemax: 255,
        };
        for (blocks, block_bytes, files, expected) in [
            (u64::MAX, 4096, u64::MAX, (FILE_SIZE_MAX, FILE_SIZE_MAX)),
            // 8 EiB exactly, and a product of which 64 bits are 0.
            (1 << 51, 4096, 1 << 63, (FILE_SIZE_MAX, FILE_SIZE_MAX)),
            (1 << 52, 4096, 7, (FILE_SIZE_MAX, 7)),
            ((1 << 51) - 1, 4096, FILE_SIZE_MAX - 1, (FILE_SIZE_MAX - 4095, FILE_SIZE_MAX - 1)),
            (3, 512, 0, (1536, 0)),
        ] {
            let seen = room(&stat(blocks, block_bytes, files));
            assert_eq!([seen.total_bytes, seen.free_bytes, seen.available_bytes], [expected.0; 3]);
            assert_eq!([seen.total_files, seen.free_files, seen.available_files], [expected.1; 3]);
        }
    }

    #[test]
    fn names_have_no_more_bytes_than_a_name_of_a_call_may_have() {
        // FAT, ext4, eCryptfs, and none.
        assert_eq!([1530, 255, 143, -1].map(name_max), [255, 255, 143, 255]);
    }

    #[test]
    fn greatest_size_limit_of_a_file_depends_on_the_file_system() {
        assert_eq!(greatest_file_size_max(EXT4, 1024), (4 << 40) - 1024);
        assert_eq!(greatest_file_size_max(EXT4, 4096), (16 << 40) - 4096);
        assert_eq!(greatest_file_size_max(FAT, 4096), (4 << 30) - 1);
        assert_eq!(greatest_file_size_max(0x5846_5342, 4096), FILE_SIZE_MAX);
    }
}
