//! Files and folders that stay open for their client: what was opened is used without a further check, as after open(2), also when
//! it has lost its last name.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::change::check;
use super::content::{read_whole, write_whole};
use super::list::each_entry;
use super::lock::{LockCounts, LockedRanges};
use super::make::{Place, TRIES, take_back};
use super::{FILE_SIZE_MAX, Stable};
use crate::account::Account;
use crate::attr::{Attr, Changed, FileType, Found, SetAttr};
use crate::closing::Closer;
use crate::credential::{Credential, Identity};
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::inside::{inode, open_up};
use crate::lane::Lane;
use crate::layer::{Fs, INSIDE, WRITE_BIT, attr_and_device, attr_of, describe, entry_name, name_error};
use crate::ops::Entry;
use crate::owed::{Debt, Owed, What};
use crate::shares::{Shares, Slot};
use crate::sys::{self, RawLock, access};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenHow {
    /// Its bytes are read.
    pub read: bool,
    /// Its bytes are written.
    pub write: bool,
    /// Its bytes are thrown away first.
    pub truncate: bool,
    /// Each write is at the end.
    pub append: bool,
    /// When its writes are done.
    pub stable: Stable,
}

impl OpenHow {
    /// For reading.
    pub const READ: Self = Self { read: true, write: false, truncate: false, append: false, stable: Stable::Unstable };

    fn flags(self) -> OFlags {
        let access = match (self.read, self.write) {
            (_, false) => OFlags::RDONLY,
            (false, true) => OFlags::WRONLY,
            (true, true) => OFlags::RDWR,
        };
        let stable = match self.stable {
            Stable::Unstable => OFlags::empty(),
            Stable::DataSync => OFlags::DSYNC,
            Stable::FileSync => OFlags::SYNC,
        };
        let more = [(self.append, OFlags::APPEND), (self.truncate, OFlags::TRUNC)];
        more.into_iter().fold(access | stable, |flags, (is_set, more)| if is_set { flags | more } else { flags })
    }
}

/// A file or folder that is open. Clones are the same open file. After the drop of the last one a thread of the export closes it:
/// that may wait for a disk. Another one releases its locks first.
#[derive(Clone, Debug)]
pub struct OpenFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    handle: Handle,
    file_type: FileType,
    /// `None` when it is closed.
    file: Option<Descriptor>,
    how: OpenHow,
    /// Who opened it: the kernel takes set-user-id away when another than root writes.
    caller: Identity,
    /// Held by the listing that the position in the folder is of.
    position: Mutex<()>,
    closer: Closer,
}

/// The fields are dropped in this order: a file counts until it is closed, and its locks until they are released.
#[derive(Debug)]
struct Descriptor {
    file: OwnedFd,
    locks: Locks,
    slot: Slot,
}

/// The locks of an open file.
#[derive(Debug)]
pub(super) struct Locks {
    ranges: Mutex<LockedRanges>,
    handle: Handle,
    /// The connection for which the file is open.
    account: Account,
    all: Arc<OpenFiles>,
}

impl Locks {
    /// Changes the number of the ranges. False: the connection may not have so many.
    pub(super) fn count(&self, before: usize, after: usize) -> bool {
        self.all.locks.change(&self.handle, self.account.number(), before, after)
    }

    fn is_empty(&self) -> bool {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner).len() == 0
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        let count = self.ranges.get_mut().unwrap_or_else(PoisonError::into_inner).len();
        self.count(count, 0);
    }
}

impl Descriptor {
    fn new(file: OwnedFd, handle: &Handle, slot: Slot, all: &Arc<OpenFiles>) -> Self {
        let (ranges, account) = (Mutex::default(), slot.account().clone());
        let locks = Locks { ranges, handle: handle.clone(), account, all: Arc::clone(all) };
        Self { file, locks, slot }
    }
}

impl Opened {
    fn file(&self) -> Result<&OwnedFd, FsError> {
        Ok(self.file.as_ref().map(|descriptor| &descriptor.file).ok_or(Errno::BADF)?)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(descriptor) = self.file.take() else { return };
        if descriptor.locks.is_empty() {
            return self.closer.drop_there(descriptor);
        }
        let closer = self.closer.clone();
        self.closer.unlock(move || {
            let Descriptor { file, locks, slot } = descriptor;
            let all = RawLock { kind: sys::LOCK_NONE, start: 0, length: 0 };
            // What the kernel does not release now it does when it closes the file.
            let locks = sys::try_lock(&file, all).is_err().then_some(locks);
            closer.drop_there((file, locks, slot));
        });
    }
}

/// What is open for clients: its number, in all and for each connection, and its locks.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    shares: Arc<Shares>,
    locks: LockCounts,
}

impl OpenFiles {
    pub(crate) fn new(max: usize) -> Self {
        Self { shares: Arc::new(Shares::new(max, Account::open_files)), locks: LockCounts::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.shares.count()
    }

    /// One more for a connection. Like open(2), fails with EMFILE at the connection's limit and with ENFILE if none is free.
    fn take(&self, account: &Account) -> Result<Slot, FsError> {
        let full = || if self.shares.is_full() { Errno::NFILE } else { Errno::MFILE };
        self.shares.take(account).ok_or_else(|| full().into())
    }
}

impl OpenFile {
    fn new(export: &Export, found: (Handle, FileType), file: Descriptor, how: OpenHow, caller: Identity) -> Self {
        let ((handle, file_type), closer) = (found, export.closing.closer().clone());
        let file = Some(file);
        Self(Arc::new(Opened { handle, file_type, file, how, caller, position: Mutex::default(), closer }))
    }

    /// Closes it here if this is the last clone. A lane may wait for a disk.
    pub fn close(self, _: &Lane) {
        drop(Arc::into_inner(self.0).and_then(|mut opened| opened.file.take()));
    }

    /// Its handle.
    pub fn handle(&self) -> &Handle {
        &self.0.handle
    }

    pub(crate) fn descriptor(&self) -> Result<&OwnedFd, FsError> {
        self.0.file()
    }

    /// The file, its locked ranges for as long as no other call locks, and their count.
    pub(super) fn locks(&self) -> Result<(&OwnedFd, MutexGuard<'_, LockedRanges>, &Locks), FsError> {
        let Descriptor { file, locks, .. } = self.0.file.as_ref().ok_or(Errno::BADF)?;
        Ok((file, locks.ranges.lock().unwrap_or_else(PoisonError::into_inner), locks))
    }

    /// Memory that its locked ranges take.
    pub fn lock_bytes(&self) -> usize {
        self.locks().map_or(0, |(_, ranges, _)| ranges.bytes())
    }

    pub(crate) fn is_read(&self) -> bool {
        self.0.how.read
    }

    /// What it is.
    pub fn file_type(&self) -> FileType {
        self.0.file_type
    }
}

impl Owed {
    /// A sync of an open file; `data_only`: without attributes that are not needed to find the data. [`Lane::settle`] tells its result.
    pub fn sync(file: OpenFile, data_only: bool) -> Self {
        let what = What::Opened { file: file.clone(), data_only };
        Self { own: vec![Debt { handle: file.0.handle.clone(), what }], ..Self::default() }
    }
}

impl Fs {
    /// Opens a regular file or a folder, as the caller, whom the kernel checks as at open(2).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::WrongType`], [`ErrorKind::Symlink`]: it is neither. [`ErrorKind::IsDirectory`]: a folder is to be written.
    /// [`ErrorKind::ReadOnly`], and what the kernel says. [`ErrorKind::TryLater`]: too much is open.
    pub fn open(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        how: OpenHow,
    ) -> Result<(OpenFile, Attr), FsError> {
        let node = self.node(lane, handle)?;
        self.open_for_client(lane, credential, (handle, &node.descriptor, node.attr.file_type), how)
    }

    /// [`Fs::open`] of the object of an open file, which may have lost its last name.
    pub fn open_again(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        OpenFile(opened): &OpenFile,
        how: OpenHow,
    ) -> Result<(OpenFile, Attr), FsError> {
        lane.check()?;
        self.open_for_client(lane, credential, (&opened.handle, opened.file()?, opened.file_type), how)
    }

    fn open_for_client(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        (handle, object, file_type): (&Handle, &OwnedFd, FileType),
        how: OpenHow,
    ) -> Result<(OpenFile, Attr), FsError> {
        check_type(file_type, how)?;
        let call = self.begin(lane, credential, handle, how.write || how.truncate)?;
        let slot = self.open_files.take(&lane.account)?;
        let changing = how.truncate.then(|| self.attrs.changing(handle));
        let opened = lane.as_caller(&call.caller, || self.reopen(call.export, object, how.flags()))?;
        drop(changing);
        let file = opened?;
        let attr = attr_of(call.export, &file)?;
        let file = Descriptor::new(file, handle, slot, &self.open_files);
        let opened = OpenFile::new(call.export, (handle.clone(), file_type), file, how, call.caller);
        if how.truncate {
            // The length is an attribute.
            self.owe_names(lane, handle)?;
        }
        Ok((opened, attr))
    }

    /// Makes a regular file and opens it, also for what its mode forbids, or opens the one that there is unless `exclusive`.
    pub fn create_open(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        (mode, exclusive): (u32, bool),
        how: OpenHow,
    ) -> Changed<(OpenFile, Found)> {
        let slot = match self.open_files.take(&lane.account) {
            Ok(slot) => slot,
            Err(error) => return Changed::failed(error),
        };
        let make = |place: &Place<'_>| self.make_open(place, mode, exclusive, how);
        let dots = if exclusive { Errno::EXIST } else { Errno::ISDIR };
        let name = entry_name(name, FsError::of_call(ErrorKind::Exists, dots));
        let Changed { wcc, result } = self.change_folder(lane, credential, dir, name, make, |place, file| {
            let found = describe(place.export, &file, Some((place.handle, &place.name)))?;
            let caller = place.caller.clone();
            let known = (found.handle.clone(), found.attr.file_type);
            let file = Descriptor::new(file, &found.handle, slot, &self.open_files);
            Ok((OpenFile::new(place.export, known, file, how, caller), found))
        });
        let result = result.and_then(|made| {
            if how.truncate {
                // It may have been there, with a length.
                self.owe_names(lane, &made.1.handle)?;
            }
            Ok(made)
        });
        Changed { wcc, result }
    }

    /// As the caller.
    fn make_open(&self, place: &Place<'_>, mode: u32, exclusive: bool, how: OpenHow) -> Result<OwnedFd, FsError> {
        let (folder, name) = (&*place.folder, place.name.as_c_str());
        let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
        let flags = how.flags().difference(OFlags::TRUNC) | new;
        let permissions = Permissions::from_raw_mode(mode & 0o7777);
        for _ in 0..TRIES {
            match self.with_room(place.export, || rustix::fs::openat2(folder, name, flags, permissions, INSIDE)) {
                Ok(file) => {
                    let dressed = self.dress(place, &file, &SetAttr::default(), Some(mode & 0o7777));
                    dressed.map_err(|error| take_back(place, &file, AtFlags::empty(), error))?;
                    return Ok(file);
                }
                Err(Errno::EXIST) if exclusive => return Err(ErrorKind::Exists.into()),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(name_error(errno)),
            }
            match self.open_name(place.export, folder, name) {
                Ok(object) => {
                    let file_type = attr_of(place.export, &object)?.file_type;
                    if file_type == FileType::Directory {
                        return Err(ErrorKind::IsDirectory.into());
                    }
                    check_type(file_type, how)?;
                    let _changing = self.changing_object(place.export, &object);
                    return self.reopen(place.export, &object, how.flags());
                }
                // It was removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::TryLater.into())
    }

    /// Reads up to `wanted` bytes, and appends them; fewer at the end of the file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::BadMode`]: it is not open for reading. [`ErrorKind::IsDirectory`].
    pub fn read_open(
        &self,
        lane: &Lane,
        OpenFile(opened): &OpenFile,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Result<usize, FsError> {
        lane.check()?;
        match opened.file_type {
            FileType::Directory => return Err(ErrorKind::IsDirectory.into()),
            _ if !opened.how.read => return Err(ErrorKind::BadMode.into()),
            _ => {}
        }
        // The time of the last access.
        let _changing = self.attrs.changing(&opened.handle);
        let room = usize::try_from(FILE_SIZE_MAX.saturating_sub(offset)).unwrap_or(usize::MAX);
        Ok(read_whole(opened.file()?, offset, wanted.min(room), into)?)
    }

    /// Writes bytes, fewer than all if the medium got full on the way. Writes of one file happen one after the other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::BadMode`]: it is not open for writing. [`ErrorKind::TooBig`].
    pub fn write_open(
        &self,
        lane: &mut Lane,
        OpenFile(opened): &OpenFile,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, FsError> {
        if !opened.how.write {
            return Err(ErrorKind::BadMode.into());
        }
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(ErrorKind::TooBig.into());
        }
        let (file, _changing) = (opened.file()?, self.attrs.changing(&opened.handle));
        Ok(lane.as_caller(&opened.caller, || write_whole(file, offset, data))??)
    }

    /// [`Fs::setattr`] with [`Resize::Writer`] of an open object, which may have lost its last name. The length of a file that is open
    /// for writing changes by the rights of its opener, as with ftruncate(2). All other changes need those of the caller.
    pub fn setattr_open(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        file: &OpenFile,
        to: &SetAttr,
    ) -> Result<(), FsError> {
        let OpenFile(opened) = file;
        check(to)?;
        let opened_file = opened.file()?;
        let order = self.lock(&opened.handle);
        let call = self.begin(lane, credential, &opened.handle, true)?;
        let reopened;
        let content = match to.size {
            None => None,
            Some(_) if opened.how.write => Some(opened_file),
            Some(_) if opened.file_type == FileType::Directory => return Err(ErrorKind::IsDirectory.into()),
            // By what is open: there may be no name any more.
            Some(_) => {
                lane.as_caller(&call.caller, || access(opened_file, WRITE_BIT))??;
                reopened = self.reopen(call.export, opened_file, OFlags::WRONLY)?;
                Some(&reopened)
            }
        };
        lane.as_caller(&call.caller, || self.change(opened_file, content, to))??;
        drop(order);
        self.owe_names(lane, &opened.handle)
    }

    /// The attributes of what is open.
    pub fn attr_open(&self, lane: &Lane, OpenFile(opened): &OpenFile) -> Result<Attr, FsError> {
        lane.check()?;
        attr_of(self.export(&opened.handle)?, opened.file()?)
    }

    /// Lists the entries of an open folder, as [`Fs::list`] does, from behind the one with this cookie; 0: from the start. True at
    /// the end. `take` must not block.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotDirectory`]. [`ErrorKind::BadCookie`]: the file system gave no such cookie.
    pub fn list_open(
        &self,
        lane: &mut Lane,
        OpenFile(opened): &OpenFile,
        cookie: u64,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<bool, FsError> {
        if opened.file_type != FileType::Directory {
            return Err(ErrorKind::NotDirectory.into());
        }
        lane.check()?;
        if i64::try_from(cookie).is_err() {
            return Err(ErrorKind::BadCookie.into());
        }
        let export = self.export(&opened.handle)?;
        let file = opened.file()?;
        // What lies above the root is not part of the export.
        let is_root = opened.handle == *export.root();
        let (own, device) = attr_and_device(export, file)?;
        let _changing = self.attrs.changing(&opened.handle);
        let _position = opened.position.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut memory, mut failed) = (lane.take_entries(), None);
        let listed = each_entry(file, cookie, &mut memory, &mut |raw| {
            let (name, entry) = (raw.name, Entry::of(raw, own.fsid));
            let may_be_elsewhere = name != c"." && export.may_have_parts(entry.file_type);
            take(match () {
                () if is_root && name == c".." => Entry { fileid: export.root_inode, ..entry },
                () if may_be_elsewhere => match self.numbers(export, (file, device), name, &entry) {
                    Ok((fsid, fileid)) => Entry { fsid, fileid, ..entry },
                    Err(error) => {
                        failed = Some(error);
                        return false;
                    }
                },
                () => entry,
            })
        });
        lane.put_entries(memory);
        failed.map_or(listed, Err)
    }

    /// `fsid` and `fileid` of the object of an entry, which may lie in another part of the file system than its folder. Mounts are not
    /// crossed: theirs may hang.
    fn numbers(
        &self,
        export: &Export,
        (folder, device): (&OwnedFd, (u32, u32)),
        name: &CStr,
        entry: &Entry<'_>,
    ) -> Result<(u64, u64), FsError> {
        let opened = match name {
            name if name == c".." => {
                self.above(export, folder, || self.with_room(export, || open_up(folder)).map_err(name_error))
            }
            name => self.open_name(export, folder, name).map(Some),
        };
        let object = match opened {
            Ok(object) => object,
            Err(error) => {
                return match error.kind() {
                    // Also `..` of what was moved out of the export. No object has this number.
                    ErrorKind::MountPoint | ErrorKind::Stale => Ok((entry.fsid ^ u64::from(u32::MAX), entry.fileid)),
                    // It was removed meanwhile, or a server without root may not search the folder.
                    ErrorKind::NotFound | ErrorKind::Access => Ok((entry.fsid, entry.fileid)),
                    _ => Err(error),
                };
            }
        };
        let object = object.as_ref().unwrap_or(&export.root_descriptor);
        let (fileid, on) = inode(object)?;
        let fsid = if on == device { entry.fsid } else { attr_of(export, object)?.fsid };
        Ok((fsid, fileid))
    }
}

/// Other types than regular files and folders are not opened: a FIFO or a device could block.
fn check_type(file_type: FileType, how: OpenHow) -> Result<(), FsError> {
    match file_type {
        FileType::Regular => Ok(()),
        FileType::Directory if how.write || how.truncate => Err(ErrorKind::IsDirectory.into()),
        FileType::Directory => Ok(()),
        FileType::Symlink => Err(ErrorKind::Symlink.into()),
        _ => Err(ErrorKind::WrongType.into()),
    }
}

/// Brings what is open to the medium.
pub(crate) fn sync_opened(OpenFile(opened): &OpenFile, data_only: bool) -> Result<(), FsError> {
    let file = opened.file()?;
    let synced = if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) };
    match synced {
        // The file system has no medium.
        Err(Errno::INVAL) => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;
    use crate::common::{Served, on_lane, root};
    use crate::credential::Squash;
    use crate::export::ExportOptions;
    use crate::lanes::{LaneOptions, Lanes};
    use crate::layer::FsOptions;
    use crate::ops::{LockKind, LockRange};
    use crate::pool::Length;

    /// Opens as many files as the connection gets, and the error of the next one.
    fn take_all(all: &OpenFiles, account: &Account) -> (Vec<Slot>, i32) {
        let mut slots = Vec::new();
        loop {
            match all.take(account) {
                Ok(slot) => slots.push(slot),
                Err(error) => return (slots, error.errno),
            }
        }
    }

    #[test]
    fn connections_that_open_all_they_can_leave_files_to_others() {
        let all = OpenFiles::new(1000);
        let accounts: Vec<Account> = (0..100).map(|_| Account::default()).collect();
        let mut taken: Vec<_> = accounts.iter().map(|account| take_all(&all, account)).collect();
        let counts: Vec<_> = taken.iter().map(|(slots, _)| slots.len()).collect();
        // Of the rest, each gets half of what is free; the reserve of 500 has 8 for each of 62.
        assert_eq!(counts[..10], [8 + 250, 8 + 125, 8 + 63, 8 + 31, 8 + 16, 8 + 8, 8 + 4, 8 + 2, 8 + 1, 8]);
        assert_eq!((counts[61], counts[62], counts[63]), (8, 4, 0));
        assert_eq!((taken[0].1, taken[99].1), (libc::EMFILE, libc::ENFILE));
        assert_eq!(all.count(), 1000);
        // A connection that ends gives back what it had.
        drop(taken.swap_remove(0));
        assert_eq!(take_all(&all, &accounts[99]).0.len(), 8 + 125);
        drop(taken);
        assert_eq!(all.count(), 0);
    }

    #[test]
    fn a_lease_of_a_local_program_holds_up_no_open() {
        let folder = ksf_test::Folder::to_export();
        let (data, state) = (folder.path("data"), folder.path("state"));
        std::fs::create_dir(&data).unwrap();
        std::fs::write(data.join("file"), "text").unwrap();
        let mut fs = Fs::new(FsOptions::default()).unwrap();
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let export = fs.add_export(&data, &state, options).unwrap();
        let open = || {
            let (mut lane, user, root) = (Lane::attach().unwrap(), Credential::unix(0, 0, &[]), export.root());
            let handle = fs.lookup(&mut lane, &user, root, b"file").result.unwrap().handle;
            let opened = fs.open(&mut lane, &user, &handle, OpenHow::READ).map(drop);
            let created =
                fs.create_open(&mut lane, &user, root, b"file", (0o600, false), OpenHow::READ).result.map(drop);
            [opened, created].map(|done| done.map_err(|error| error.errno))
        };
        // A lane is a thread of its own.
        let opened = || std::thread::scope(|scope| scope.spawn(open).join().unwrap());
        let local = OwnedFd::from(std::fs::File::options().read(true).write(true).open(data.join("file")).unwrap());
        sys::set_lease(&local, libc::F_WRLCK);
        assert_eq!(opened(), [Err(libc::EAGAIN); 2]);
        sys::set_lease(&local, libc::F_UNLCK);
        assert_eq!(opened(), [Ok(()); 2]);
    }

    /// Numbers of two entries of a folder in the root, on a thread to which the kernel refuses to open names with this error.
    fn numbers_without(errno: Option<Errno>) -> [Result<(u64, u64), FsError>; 2] {
        let served = Served::open_to_all();
        std::fs::create_dir_all(served.path("folder/inner")).unwrap();
        let folder = OwnedFd::from(std::fs::File::open(served.path("folder")).unwrap());
        let inner = OwnedFd::from(std::fs::File::open(served.path("folder/inner")).unwrap());
        let (fs, export) = (&served.fs, &served.export);
        let root = attr_of(export, &export.root_descriptor).unwrap();
        let device = inode(&folder).unwrap().1;
        let told = [(c"inner", inode(&inner).unwrap().0), (c"..", root.fileid)].map(|(name, fileid)| {
            let entry = |fileid| Entry {
                name: name.to_bytes(),
                fileid,
                fsid: root.fsid,
                cookie: 1,
                file_type: Some(FileType::Directory),
                found: None,
            };
            (name, entry(fileid + 1), fileid)
        });
        let numbers = || {
            errno.iter().for_each(|errno| ksf_test::refuse_call(libc::SYS_openat2, *errno));
            told.map(|(name, entry, fileid)| {
                // How much the number differs from that of the object, by which the entry differs by 1.
                let (fsid, number) = fs.numbers(export, (&folder, device), name, &entry)?;
                Ok((fsid ^ root.fsid, number - fileid))
            })
        };
        std::thread::scope(|scope| scope.spawn(numbers).join().unwrap())
    }

    #[test]
    fn an_entry_has_a_number_of_its_own_only_if_it_is_a_mount() {
        let (own, of_entry, of_none) = (Ok((0, 0)), Ok((0, 1)), Ok((u64::from(u32::MAX), 1)));
        assert_eq!(numbers_without(None), [own, own]);
        // Below a mount on the root it is above still.
        assert_eq!(numbers_without(Some(Errno::XDEV)), [of_none, own]);
        for errno in [Errno::ACCESS, Errno::NOENT] {
            assert_eq!(numbers_without(Some(errno)), [of_entry, of_entry], "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO] {
            assert_eq!(numbers_without(Some(errno)), [Err(errno.into()), Err(errno.into())], "{errno}");
        }
    }

    #[test]
    fn locks_end_with_their_file_and_do_not_wait_for_others_that_are_being_closed() {
        let served = Served::open_to_all();
        on_lane(|lane| {
            std::fs::write(served.path("file"), "text").unwrap();
            let handle = served.find(lane, "file").handle;
            let how = OpenHow { write: true, ..OpenHow::READ };
            let [holder, other] = [(); 2].map(|()| served.fs.open(lane, &root(), &handle, how).unwrap().0);
            let all = LockRange { start: 0, length: 0 };
            let lock = |file: &OpenFile, lane: &Lane| served.fs.lock_open(lane, file, Some(LockKind::Exclusive), all);
            assert!(lock(&holder, lane).unwrap());
            let hang = served.export.closing.closer().hang();
            // A request on it is in progress.
            let request = holder.clone();
            drop(holder);
            assert!(!lock(&other, lane).unwrap());
            drop(request);
            ksf_test::wait_until("the other has the lock", || lock(&other, lane).unwrap());
            assert_eq!(served.fs.counters().open_files, 2, "not closed yet");
            drop(hang);
            ksf_test::wait_until("it is closed", || served.fs.counters().open_files == 1);
        });
    }

    #[test]
    fn an_open_file_is_closed_by_its_thread_wherever_it_is_dropped() {
        let served = Served::open_to_all();
        let export = Arc::clone(&served.export);
        let (fs, lanes) = (Arc::new(served.fs), Lanes::start(&LaneOptions { threads: 1 }, 1).unwrap());
        let (sender, opened) = channel();
        let opens = Arc::clone(&fs);
        lanes.submit(0, Length::Short, 0, move |lane| {
            let root = opens.exports()[0].root().clone();
            for _ in 0..5 {
                sender.send(opens.open(lane, &Credential::unix(0, 0, &[]), &root, OpenHow::READ).unwrap().0).unwrap();
            }
        });
        let files: Vec<OpenFile> = opened.iter().collect();
        let hang = export.closing.closer().hang();
        let [one, result, queued, refused, last] = files.try_into().unwrap();
        drop((one.clone(), one));
        // The result of a request whose connection is gone.
        drop(Box::new(result) as Box<dyn Any + Send>);
        // A job that waits when the lanes end: the only one is busy.
        let ((busy, is_busy), (go_on, waits)) = (channel(), channel::<()>());
        lanes.submit(0, Length::Short, 0, move |_| {
            busy.send(()).unwrap();
            waits.recv().unwrap_err();
        });
        is_busy.recv().unwrap();
        lanes.submit(0, Length::Short, 0, move |_| drop(queued));
        lanes.close(Instant::now());
        lanes.submit(0, Length::Short, 0, move |_| drop(refused));
        drop(go_on);
        assert_eq!(fs.counters().open_files, 5, "none is closed by the thread that dropped it");
        drop(hang);
        ksf_test::wait_until("all but the last are closed", || fs.counters().open_files == 1);
        rustix::fs::fstat(last.descriptor().unwrap()).expect("it stays usable");
        drop(last);
        ksf_test::wait_until("the last one is closed", || fs.counters().open_files == 0);
    }
}
