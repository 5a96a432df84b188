//! Making entries of folders.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType as RawType, Mode as Permissions, OFlags, StatxFlags, Timespec, makedev};
use rustix::io::Errno;
use rustix::time::ClockId;

use super::change::{Resize, check, mode_of, set_owner, set_times};
use super::settle::changed_for_good;
use super::{CreateHow, Node};
use crate::attr::{Changed, FileType, Found, Linked, SetAttr, SetTime, Time, Wcc};
use crate::credential::{Credential, Identity};
use crate::descriptors::Mode;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::{Fs, INSIDE, attr_of, entry_name, name_error, process_name};

/// How often a name may come and go while a file of that name is made.
pub(super) const TRIES: usize = 16;
/// Bytes of what a symbolic link holds, at most (PATH_MAX without its NUL).
const TARGET_BYTES_MAX: usize = 4095;
/// Greatest numbers of a device: mknod(2) takes 32 bits for both, and would make another device of more.
const MAJOR_MAX: u32 = 0xfff;
const MINOR_MAX: u32 = 0xf_ffff;
/// First time of access that holds a verifier, in January 2038. The last of 65,536 seconds is before the end of 32 bits with sign,
/// where Linux drops what is less than a second (`timestamp_truncate` of fs/inode.c).
const ACCESS_SECONDS: u64 = 0x7ffe_0000;
/// Permissions where the client names none: the owner's.
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;

/// A folder with the name that is made, found or removed in it.
pub(crate) struct Place<'a> {
    pub(crate) export: &'a Export,
    pub(crate) handle: &'a Handle,
    pub(crate) folder: Arc<OwnedFd>,
    pub(crate) name: CString,
    pub(crate) caller: Identity,
    /// Modes are as asked for, but for a default ACL; else they may lack what the umask of the process took.
    has_own_umask: bool,
}

impl Place<'_> {
    /// True if the umask of the process has taken permissions from what was made here: a default ACL takes its place.
    fn is_masked(&self) -> Result<bool, FsError> {
        if self.has_own_umask {
            return Ok(false);
        }
        // By its name in /proc: it is open without its content.
        let path =
            CString::new(format!("/proc/self/fd/{}", self.folder.as_raw_fd())).map_err(|_| ErrorKind::Invalid)?;
        match rustix::fs::getxattr(path.as_c_str(), c"system.posix_acl_default", &mut [0_u8; 0][..]) {
            Ok(_) => Ok(false),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// An object of the name that was asked for.
struct Made {
    object: OwnedFd,
    /// Descriptor's purpose.
    mode: Mode,
    /// Made by this call.
    is_new: bool,
}

impl Fs {
    /// Makes a regular file, or takes the one that there is: [`CreateHow`]. Owner and group in the attributes count only if the
    /// caller is root.
    ///
    /// An exclusive call keeps its 8 bytes in the file's times, from where the next `setattr` of the client takes them; an
    /// attribute of its own would stay forever, and not every file system has those.
    pub fn create(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        how: &CreateHow,
    ) -> Changed<Found> {
        let made = self.make_entry(lane, credential, dir, name, |place| self.make_file(place, how));
        let result = made.result.and_then(|(found, is_new)| match how {
            CreateHow::Unchecked(SetAttr { size: Some(size), .. }) if !is_new => {
                let to = SetAttr { size: Some(*size), ..SetAttr::default() };
                let changed = self.setattr(lane, credential, &found.handle, &to, None, Resize::Owner);
                changed.result?;
                Ok(Found { attr: changed.wcc.after.unwrap_or(found.attr), ..found })
            }
            // The bytes of the verifier have to outlive a crash, too, as what answers a retry.
            CreateHow::Unchecked(_) | CreateHow::Guarded(_) if !is_new || !is_dressed(how) => Ok(found),
            _ => self.owe_names(lane, &found.handle).map(|()| found),
        });
        Changed { wcc: made.wcc, result }
    }

    /// As the caller.
    fn make_file(&self, place: &Place<'_>, how: &CreateHow) -> Result<Made, FsError> {
        let attr = match how {
            CreateHow::Unchecked(attr) | CreateHow::Guarded(attr) => *attr,
            CreateHow::Exclusive(verifier) => times_of(*verifier),
        };
        check(&attr)?;
        if attr.size.is_some_and(|size| size > place.export.file_size_max) {
            // Before there is a file that must be removed.
            return Err(ErrorKind::TooBig.into());
        }
        let mode = attr.mode.unwrap_or(FILE_MODE) & 0o7777;
        let access = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        for _ in 0..TRIES {
            let (folder, name) = (&*place.folder, place.name.as_c_str());
            let made = self.with_room(place.export, || {
                rustix::fs::openat2(folder, name, flags, Permissions::from_raw_mode(mode), INSIDE)
            });
            match made {
                Ok(file) => {
                    let dressed = self.dress_file(place, &file, &attr, mode, how);
                    dressed.map_err(|error| take_back(place, &file, AtFlags::empty(), error))?;
                    return Ok(Made { object: file, mode: Mode::Write, is_new: true });
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(name_error(errno)),
            }
            match self.open_name(place.export, folder, name) {
                Ok(object) if is_taken(place.export, &object, how)? => {
                    return Ok(Made { object, mode: Mode::Path, is_new: false });
                }
                Ok(_) => return Err(ErrorKind::Exists.into()),
                // It was removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::TryLater.into())
    }

    fn dress_file(
        &self,
        place: &Place<'_>,
        file: &OwnedFd,
        attr: &SetAttr,
        mode: u32,
        how: &CreateHow,
    ) -> Result<(), FsError> {
        // Other calls may know it by its name already.
        let _changing = self.changing_object(place.export, file);
        self.dress_with_size(place, file, attr, Some(mode), attr.size.unwrap_or(0))?;
        if let CreateHow::Exclusive(verifier) = how
            && !has_times_of(&attr_of(place.export, file)?, *verifier)
        {
            // The file system rounds times too much for 8 bytes.
            return Err(ErrorKind::NotSupported.into());
        }
        Ok(())
    }

    /// Gives what was just made its attributes but for the size, as the caller. `mode`: the one that was asked for; `None` for folders
    /// and links.
    pub(super) fn dress(
        &self,
        place: &Place<'_>,
        object: &OwnedFd,
        attr: &SetAttr,
        mode: Option<u32>,
    ) -> Result<(), FsError> {
        self.dress_with_size(place, object, attr, mode, 0)
    }

    /// The same, and a size other than 0 for a file that is open for writing.
    fn dress_with_size(
        &self,
        place: &Place<'_>,
        object: &OwnedFd,
        attr: &SetAttr,
        mode: Option<u32>,
        size: u64,
    ) -> Result<(), FsError> {
        let is_given = place.caller.uid == 0 && (attr.uid.is_some() || attr.gid.is_some());
        let mode = match mode {
            Some(mode) if place.is_masked()? => Some(mode),
            // A change of the owner or the size takes set-user-id and set-group-id away. The kernel may have given less than was
            // asked for, by a default ACL.
            Some(mode) if mode & 0o6000 != 0 && (is_given || size > 0) => {
                Some(mode_of(object)?).filter(|mode| mode & 0o6000 != 0)
            }
            _ => None,
        };
        if size > 0 {
            rustix::fs::ftruncate(object, size)?;
        }
        if is_given {
            set_owner(object, attr)?;
        }
        if let Some(mode) = mode {
            self.set_mode(object, mode)?;
        }
        Ok(set_times(object, attr)?)
    }

    /// Makes a folder. In a folder with set-group-id it has its group and that bit, as the kernel has it.
    pub fn mkdir(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        attr: &SetAttr,
    ) -> Changed<Found> {
        let mode = attr.mode.unwrap_or(FOLDER_MODE) & 0o1777;
        let make = |place: &Place<'_>| -> Result<(), FsError> {
            Ok(rustix::fs::mkdirat(&*place.folder, place.name.as_c_str(), Permissions::from_raw_mode(mode))?)
        };
        let dress = |place: &Place<'_>, object: &OwnedFd| -> Result<(), FsError> {
            if place.is_masked()? {
                let inherited = attr_of(place.export, object)?.mode & 0o2000;
                self.set_mode(object, mode | inherited)?;
            }
            self.dress(place, object, attr, None)
        };
        self.make(lane, credential, dir, name, attr, AtFlags::REMOVEDIR, make, dress)
    }

    /// Makes a symbolic link that holds `target`, which is not looked at. Permissions in the attributes do not count.
    pub fn symlink(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        target: &[u8],
        attr: &SetAttr,
    ) -> Changed<Found> {
        let make = |place: &Place<'_>| -> Result<(), FsError> {
            if target.len() > TARGET_BYTES_MAX {
                return Err(ErrorKind::NameTooLong.into());
            }
            let target = CString::new(target).map_err(|_| ErrorKind::Invalid)?;
            if target.is_empty() {
                return Err(FsError::of_call(ErrorKind::Invalid, Errno::NOENT));
            }
            Ok(rustix::fs::symlinkat(target.as_c_str(), &*place.folder, place.name.as_c_str())?)
        };
        let dress = |place: &Place<'_>, object: &OwnedFd| self.dress(place, object, attr, None);
        self.make(lane, credential, dir, name, attr, AtFlags::empty(), make, dress)
    }

    /// Makes a FIFO, the name of a socket, or a device, for which the caller must be root. Numbers of a device that the kernel
    /// does not have are [`ErrorKind::Invalid`].
    pub fn mknod(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        node: Node,
        attr: &SetAttr,
    ) -> Changed<Found> {
        let mode = attr.mode.unwrap_or(FILE_MODE) & 0o7777;
        let (kind, device) = match node {
            Node::Fifo => (RawType::Fifo, 0),
            Node::Socket => (RawType::Socket, 0),
            Node::CharDevice(major, minor) => (RawType::CharacterDevice, makedev(major, minor)),
            Node::BlockDevice(major, minor) => (RawType::BlockDevice, makedev(major, minor)),
        };
        let make = |place: &Place<'_>| -> Result<(), FsError> {
            if let Node::CharDevice(major, minor) | Node::BlockDevice(major, minor) = node
                && (major > MAJOR_MAX || minor > MINOR_MAX)
            {
                return Err(ErrorKind::Invalid.into());
            }
            let permissions = Permissions::from_raw_mode(mode);
            Ok(rustix::fs::mknodat(&*place.folder, place.name.as_c_str(), kind, permissions, device)?)
        };
        let dress = |place: &Place<'_>, object: &OwnedFd| self.dress(place, object, attr, Some(mode));
        self.make(lane, credential, dir, name, attr, AtFlags::empty(), make, dress)
    }

    /// Gives an object that is no folder another name, in the same export.
    pub fn link(&self, lane: &mut Lane, credential: &Credential, file: &Handle, dir: &Handle, name: &[u8]) -> Linked {
        if file.export_id() != dir.export_id() {
            // The disk of the other export may hang.
            return Linked { file: None, dir: Wcc::default(), result: Err(ErrorKind::CrossesDevice.into()) };
        }
        let node = match self.node(lane, file) {
            Ok(node) => node,
            Err(error) => {
                let after = self.node(lane, dir).ok().map(|node| node.attr);
                return Linked { file: None, dir: Wcc { before: None, after }, result: Err(error) };
            }
        };
        let changing = self.attrs.changing(file);
        let changed = self.change_folder(
            lane,
            credential,
            dir,
            entry_name(name, ErrorKind::Exists.into()),
            |place| {
                // By its name in /proc: to link what is open takes CAP_DAC_READ_SEARCH, which callers lack.
                let old = process_name(&node.descriptor);
                let (folder, new) = (&*place.folder, place.name.as_c_str());
                Ok(rustix::fs::linkat(&self.process, old.as_c_str(), folder, new, AtFlags::SYMLINK_FOLLOW)?)
            },
            |place, ()| {
                place.export.learn_other(file, place.handle, &place.name);
                Ok(())
            },
        );
        let after = self.node(lane, file).ok().map(|node| node.attr);
        drop(changing);
        Linked { file: after, dir: changed.wcc, result: changed.result }
    }

    /// Makes an entry that is no regular file, and gives it its attributes by `dress`. What cannot be opened or dressed is removed
    /// again, with `removal`: a client that calls a second time must not meet it.
    ///
    /// It is opened by its name, which the owner of the folder may have given to another object by then. An older one stays as it
    /// is.
    #[expect(clippy::too_many_arguments)]
    fn make(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        attr: &SetAttr,
        removal: AtFlags,
        make: impl FnOnce(&Place<'_>) -> Result<(), FsError>,
        dress: impl FnOnce(&Place<'_>, &OwnedFd) -> Result<(), FsError>,
    ) -> Changed<Found> {
        let made = self.make_entry(lane, credential, dir, name, |place| {
            check(attr)?;
            let before = rustix::time::clock_gettime(ClockId::RealtimeCoarse);
            make(place)?;
            let (folder, name) = (&*place.folder, place.name.as_c_str());
            let opened = self.open_name(place.export, folder, name);
            let (at, path) = opened.as_ref().map_or((folder, name), |object| (object, c""));
            if is_older(place.export, at, path, before).map_err(changed_for_good)? {
                return Err(ErrorKind::Io.into());
            }
            let object = opened.map_err(|error| match rustix::fs::unlinkat(folder, name, removal) {
                Ok(()) => error,
                Err(_) => changed_for_good(error),
            })?;
            // Other calls may know it by its name already.
            let _changing = self.changing_object(place.export, &object);
            dress(place, &object).map_err(|error| take_back(place, &object, removal, error))?;
            Ok(Made { object, mode: Mode::Path, is_new: true })
        });
        let result = made.result.and_then(|(found, _)| {
            if has_more_than_mode(attr) {
                self.owe_names(lane, &found.handle)?;
            }
            Ok(found)
        });
        Changed { wcc: made.wcc, result }
    }

    /// Makes an entry by `make`, which runs as the caller. Returns the object, and whether it is new.
    fn make_entry(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        make: impl FnOnce(&Place<'_>) -> Result<Made, FsError>,
    ) -> Changed<(Found, bool)> {
        let name = entry_name(name, ErrorKind::Exists.into());
        self.change_folder(lane, credential, dir, name, make, |place, Made { object, mode, is_new }| {
            let found = self.found(place.export, object, mode, Some((place.handle, &place.name)))?;
            Ok((found, is_new))
        })
    }

    /// Changes the entries of a folder: `act` runs as the caller, `finish` as the server.
    pub(crate) fn change_folder<A, T>(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: Result<CString, FsError>,
        act: impl FnOnce(&Place<'_>) -> Result<A, FsError>,
        finish: impl FnOnce(&Place<'_>, A) -> Result<T, FsError>,
    ) -> Changed<T> {
        let order = self.lock(dir);
        let node = match self.node(lane, dir) {
            Ok(node) => node,
            Err(error) => return Changed::failed(error),
        };
        let result = self.place(lane, credential, dir, &node, name).and_then(|place| {
            let acted = lane.as_caller(&place.caller, || act(&place))??;
            finish(&place, acted).map_err(changed_for_good)
        });
        let after = self.node(lane, dir).ok().map(|node| node.attr);
        let before = self.before(&order, dir, &node.attr);
        drop(order);
        let result = result.and_then(|made| self.owe_names(lane, dir).map(|()| made));
        Changed { wcc: Wcc { before, after }, result }
    }

    /// A folder that a call may change, and a name in it.
    pub(crate) fn place<'a>(
        &'a self,
        lane: &Lane,
        credential: &Credential,
        dir: &'a Handle,
        node: &crate::layer::Node,
        name: Result<CString, FsError>,
    ) -> Result<Place<'a>, FsError> {
        if node.attr.file_type != FileType::Directory {
            return Err(ErrorKind::NotDirectory.into());
        }
        let name = name?;
        let call = self.begin(lane, credential, dir, true)?;
        Ok(Place {
            export: call.export,
            handle: dir,
            folder: Arc::clone(&node.descriptor),
            name,
            caller: call.caller,
            has_own_umask: lane.has_own_umask(),
        })
    }
}

/// Removes an object that this call has made and could not finish. Returns the error of the call.
///
/// Another object that a local program has given the name stays. Between the comparison and the removal the program can still give
/// the name away: the kernel removes by name only.
pub(super) fn take_back(place: &Place<'_>, object: &OwnedFd, removal: AtFlags, error: FsError) -> FsError {
    let (folder, name) = (&*place.folder, place.name.as_c_str());
    let inode = |at, path, flags| rustix::fs::statat(at, path, flags).map(|stat| (stat.st_dev, stat.st_ino));
    let is_removed = inode(object, c"", AtFlags::EMPTY_PATH).is_ok_and(|made| {
        inode(folder, name, AtFlags::SYMLINK_NOFOLLOW) == Ok(made)
            && rustix::fs::unlinkat(folder, name, removal).is_ok()
    });
    if is_removed { error } else { changed_for_good(error) }
}

/// True for an object that was there before `before`. False where its time of birth is not told, or by another clock than this
/// machine's.
fn is_older(export: &Export, at: &OwnedFd, path: &CStr, before: Timespec) -> Result<bool, FsError> {
    if !export.is_warm() {
        return Ok(false);
    }
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    let stat = rustix::fs::statx(at, path, flags, StatxFlags::BTIME)?;
    let is_told = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let birth = (stat.stx_btime.tv_sec, i64::from(stat.stx_btime.tv_nsec));
    Ok(is_told && birth < (before.tv_sec, before.tv_nsec))
}

/// Whether a new file got attributes after it was made, which do not come to the medium with its name.
fn is_dressed(how: &CreateHow) -> bool {
    match how {
        CreateHow::Unchecked(attr) | CreateHow::Guarded(attr) => has_more_than_mode(attr),
        CreateHow::Exclusive(_) => true,
    }
}

fn has_more_than_mode(attr: &SetAttr) -> bool {
    SetAttr { mode: None, ..*attr } != SetAttr::default()
}

/// Is this the file that a call asked for?
fn is_taken(export: &Export, object: &OwnedFd, how: &CreateHow) -> Result<bool, FsError> {
    let attr = attr_of(export, object)?;
    Ok(attr.file_type == FileType::Regular
        && match how {
            CreateHow::Unchecked(_) => true,
            CreateHow::Guarded(_) => false,
            CreateHow::Exclusive(verifier) => has_times_of(&attr, *verifier),
        })
}

/// The times of access and of modification that hold a verifier.
///
/// The time of access is later than the other times and than now, so a reader does not change it with `relatime`
/// (`relatime_need_update` of fs/inode.c). It has 16 bits in its seconds, the time of modification has 30: both fit into the 32
/// bits with sign of ext4 with small inodes and of xfs without `bigtime`. Each has 9 more bits as milliseconds, which ext4 with
/// inodes of 256 bytes, xfs, btrfs and tmpfs keep, as does every file system whose steps divide a millisecond.
fn stored(verifier: [u8; 8]) -> (Time, Time) {
    let all = u64::from_be_bytes(verifier);
    let time = |seconds: u64, millis: u64| Time { seconds: seconds as i64, nanos: (millis & 0x1ff) as u32 * 1_000_000 };
    (time(ACCESS_SECONDS + (all >> 48), all >> 39), time(all >> 9 & 0x3fff_ffff, all))
}

fn times_of(verifier: [u8; 8]) -> SetAttr {
    let (atime, mtime) = stored(verifier);
    SetAttr { atime: Some(SetTime::To(atime)), mtime: Some(SetTime::To(mtime)), ..SetAttr::default() }
}

fn has_times_of(attr: &crate::attr::Attr, verifier: [u8; 8]) -> bool {
    (attr.atime, attr.mtime) == stored(verifier)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use ksf_test::{root_or_skip, wait_until};
    use proptest::prelude::*;
    use rustix::fs::{CWD, RenameFlags};

    use super::*;
    use crate::common::{Served, on_lane, root};

    /// Its owner gives the name of what root makes in a folder to an older object, which is another's.
    #[test]
    fn an_object_that_has_taken_the_name_of_a_new_one_stays_as_it_is() {
        let Some(()) = root_or_skip("owners of files") else { return };
        let served = Served::open_to_all();
        let attr = SetAttr { uid: Some(1001), gid: Some(1001), mode: Some(0o666), ..SetAttr::default() };
        let [old, new] = ["old", "new"].map(|name| served.path(name));
        for kind in [RawType::Fifo, RawType::RegularFile] {
            rustix::fs::mknodat(CWD, &old, kind, Permissions::RUSR, 0).unwrap();
            let object =
                served.fs.open_name(&served.export, &File::open(served.path("")).unwrap().into(), c"old").unwrap();
            let now = || rustix::time::clock_gettime(ClockId::RealtimeCoarse);
            wait_until("it is of the past", || is_older(&served.export, &object, c"", now()).unwrap());
            let make = |place: &Place<'_>| {
                rustix::fs::mknodat(&*place.folder, place.name.as_c_str(), RawType::Fifo, Permissions::RUSR, 0)?;
                rustix::fs::renameat_with(CWD, &old, CWD, &new, RenameFlags::EXCHANGE)?;
                Ok(())
            };
            let dress = |place: &Place<'_>, object: &OwnedFd| served.fs.dress(place, object, &attr, Some(0o666));
            let mut result = Ok(());
            on_lane(|lane| {
                let made = served.fs.make(lane, &root(), served.root(), b"new", &attr, AtFlags::empty(), make, dress);
                result = made.result.map(drop).map_err(|error| error.kind());
            });
            assert_eq!(result, Err(ErrorKind::Io));
            let there = std::fs::symlink_metadata(&new).unwrap();
            assert_eq!((there.uid(), there.mode() & 0o7777), (0, 0o400), "{kind:?}");
            std::fs::remove_file(&old).unwrap();
            std::fs::remove_file(&new).unwrap();
        }
    }

    /// A local program gives the name of a new object to another one, and then the call fails.
    #[test]
    fn an_object_that_has_the_name_of_one_that_is_taken_back_stays() {
        let served = Served::open_to_all();
        let [old, new] = ["old", "new"].map(|name| served.path(name));
        for (kind, removal) in [(RawType::Directory, AtFlags::REMOVEDIR), (RawType::Fifo, AtFlags::empty())] {
            let make_at = |folder: &OwnedFd, name: &CStr| match kind {
                RawType::Directory => rustix::fs::mkdirat(folder, name, Permissions::RWXU),
                kind => rustix::fs::mknodat(folder, name, kind, Permissions::RUSR, 0),
            };
            make_at(&File::open(served.path("")).unwrap().into(), c"old").unwrap();
            let inode = std::fs::symlink_metadata(&old).unwrap().ino();
            for exchanges in [true, false] {
                let make = |place: &Place<'_>| Ok(make_at(&place.folder, &place.name)?);
                let dress = |_: &Place<'_>, _: &OwnedFd| {
                    if exchanges {
                        rustix::fs::renameat_with(CWD, &old, CWD, &new, RenameFlags::EXCHANGE)?;
                    }
                    Err(ErrorKind::TryLater.into())
                };
                let attr = SetAttr::default();
                on_lane(|lane| {
                    let made = served.fs.make(lane, &root(), served.root(), b"new", &attr, removal, make, dress);
                    // What stays for good must not be made again by a second call.
                    let expected = if exchanges { ErrorKind::Io } else { ErrorKind::TryLater };
                    assert_eq!(made.result.unwrap_err().kind(), expected, "{kind:?}");
                });
                let there = std::fs::symlink_metadata(&new).ok().map(|there| there.ino());
                assert_eq!(there, exchanges.then_some(inode), "{kind:?}");
                if exchanges {
                    rustix::fs::renameat_with(CWD, &old, CWD, &new, RenameFlags::EXCHANGE).unwrap();
                    rustix::fs::unlinkat(CWD, &new, removal).unwrap();
                }
            }
            rustix::fs::unlinkat(CWD, &old, removal).unwrap();
        }
    }

    #[test]
    fn a_file_beyond_the_greatest_size_is_not_made() {
        let served = Served::open_to_all();
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        File::open(served.path("")).unwrap().set_modified(long_ago).unwrap();
        on_lane(|lane| {
            for size in [served.export.file_size_max + 1, u64::MAX] {
                let how = CreateHow::Guarded(SetAttr { size: Some(size), ..SetAttr::default() });
                let made = served.fs.create(lane, &root(), served.root(), b"file", &how).result;
                assert_eq!(made.unwrap_err().kind(), ErrorKind::TooBig, "{size}");
            }
        });
        assert_eq!(std::fs::metadata(served.path("")).unwrap().modified().unwrap(), long_ago, "no name came and went");
    }

    proptest! {
        /// Two verifiers with the same times would take one client's file for the other's.
        #[test]
        fn all_bits_of_a_verifier_are_stored(verifier: [u8; 8], bit in 0_usize..64) {
            let mut other = verifier;
            other[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(stored(verifier), stored(other));
            let (atime, mtime) = stored(verifier);
            // Later than now and than the other times, and before the end of 32 bits with sign.
            let range = 2_147_000_000..i64::from(i32::MAX);
            prop_assert!(range.contains(&atime.seconds) && mtime.seconds < range.start, "{atime:?} {mtime:?}");
            prop_assert!(check(&times_of(verifier)).is_ok());
        }
    }
}
