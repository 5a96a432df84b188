//! Changing attributes.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode as Permissions, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Result as SysResult;
use rustix::process::{Gid, Uid};

use super::FILE_SIZE_MAX;
use super::xattr::XattrOf;
use crate::attr::{Changed, FileType, SetAttr, SetTime, Time, Wcc};
use crate::credential::Credential;
use crate::descriptors::Mode;
use crate::error::{ErrorKind, FsError};
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::{Fs, WRITE_BIT, permit, process_name};
use crate::sys::access;

/// The callers that may change the length of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// The owner, and callers with write permission. For NFS, whose client checked the mode when it opened the file.
    Owner,
    /// Callers with write permission, as truncate(2) has it.
    Writer,
}

impl Fs {
    /// Changes attributes: first the size, then owner and group, permissions, times. `guard`: only if this is the ctime
    /// ([`ErrorKind::NotSync`]), which no other call of this server changes meanwhile.
    ///
    /// What was changed before an error stays changed; `wcc` shows it.
    pub fn setattr(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        to: &SetAttr,
        guard: Option<Time>,
        resize: Resize,
    ) -> Changed<()> {
        let order = self.lock(handle);
        let node = match self.node(lane, handle) {
            Ok(node) => node,
            Err(error) => return Changed::failed(error),
        };
        let result = match guard {
            Some(ctime) if ctime != node.attr.ctime => Err(ErrorKind::NotSync.into()),
            _ => self.set(lane, credential, handle, (&node.descriptor, node.attr.file_type), to, resize),
        };
        let after = self.node(lane, handle).ok().map(|node| node.attr);
        let before = self.before(&order, handle, &node.attr);
        drop(order);
        let result = result.and_then(|()| self.owe_names(lane, handle));
        Changed { wcc: Wcc { before, after }, result }
    }

    /// Sets the time of the last change to now, as chown(2) does without an owner and a group.
    pub fn set_ctime(&self, lane: &mut Lane, credential: &Credential, object: XattrOf<'_>) -> Result<(), FsError> {
        self.at_path(lane, credential, object, true, |path| rustix::fs::chown(path, None, None))?;
        self.owe_names(lane, object.handle())
    }

    /// Changes attributes of an object by a descriptor of it.
    pub(super) fn set(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        (object, file_type): (&OwnedFd, FileType),
        to: &SetAttr,
        resize: Resize,
    ) -> Result<(), FsError> {
        let call = self.begin(lane, credential, handle, true)?;
        check(to)?;
        if to.mode.is_some() && file_type == FileType::Symlink {
            return Err(ErrorKind::NotSupported.into());
        }
        let resized = match to.size {
            Some(size) => Some((size, self.content(lane, &call.caller, handle, Mode::Write)?)),
            None => None,
        };
        let change = || {
            if let Some((size, file)) = &resized {
                match resize {
                    Resize::Owner => permit(file, WRITE_BIT, &call.caller)?,
                    Resize::Writer => access(file, WRITE_BIT)?,
                }
                rustix::fs::ftruncate(file, *size)?;
            }
            set_owner(object, to)?;
            if let Some(mode) = to.mode {
                self.set_mode(object, mode)?;
            }
            set_times(object, to)
        };
        Ok(lane.as_caller(&call.caller, change)??)
    }

    /// By its name in `/proc/self/fd`: the kernel changes the mode of what is open without its content since Linux 6.6 only.
    pub(crate) fn set_mode(&self, object: &OwnedFd, mode: u32) -> SysResult<()> {
        let name = process_name(object);
        rustix::fs::chmodat(&self.process, name.as_c_str(), Permissions::from_raw_mode(mode & 0o7777), AtFlags::empty())
    }
}

/// Refuses values that mean something else to the kernel.
pub(crate) fn check(to: &SetAttr) -> Result<(), FsError> {
    let is_time = |time: Option<SetTime>| !matches!(time, Some(SetTime::To(time)) if time.nanos >= 1_000_000_000);
    if to.uid == Some(u32::MAX) || to.gid == Some(u32::MAX) || !is_time(to.atime) || !is_time(to.mtime) {
        return Err(ErrorKind::Invalid.into());
    }
    if to.size.is_some_and(|size| size > FILE_SIZE_MAX) {
        return Err(ErrorKind::TooBig.into());
    }
    Ok(())
}

pub(crate) fn set_owner(object: &OwnedFd, to: &SetAttr) -> SysResult<()> {
    if to.uid.is_none() && to.gid.is_none() {
        return Ok(());
    }
    let (uid, gid) = (to.uid.map(Uid::from_raw), to.gid.map(Gid::from_raw));
    rustix::fs::chownat(object, c"", uid, gid, AtFlags::EMPTY_PATH)
}

pub(crate) fn set_times(object: &OwnedFd, to: &SetAttr) -> SysResult<()> {
    if to.atime.is_none() && to.mtime.is_none() {
        return Ok(());
    }
    let of = |time| match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::To(time)) => Timespec { tv_sec: time.seconds, tv_nsec: time.nanos.into() },
    };
    let times = Timestamps { last_access: of(to.atime), last_modification: of(to.mtime) };
    rustix::fs::utimensat(object, c"", &times, AtFlags::EMPTY_PATH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Served, root};
    use crate::sys::refuse_call;

    /// Few kernels that run tests have quotas of users.
    #[test]
    fn owner_beyond_quota_is_refused_and_nothing_is_changed() {
        let test = || {
            let (served, mut lane) = (Served::open_to_all(), Lane::attach().unwrap());
            let file = served.make(&mut lane, "file");
            refuse_call(libc::SYS_fchownat, rustix::io::Errno::DQUOT);
            let to = SetAttr { uid: Some(1001), mode: Some(0o600), ..SetAttr::default() };
            let changed = served.fs.setattr(&mut lane, &root(), &file.handle, &to, None, Resize::Owner);
            assert_eq!(changed.result.unwrap_err().kind(), ErrorKind::Quota);
            assert_eq!(changed.wcc.after, Some(file.attr));
        };
        std::thread::scope(|scope| scope.spawn(test).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    #[test]
    fn values_that_mean_something_else_to_the_kernel_are_refused() {
        let time = |nanos| Some(SetTime::To(Time { seconds: 1, nanos }));
        let none = SetAttr::default();
        let table = [
            (none, None),
            (SetAttr { uid: Some(u32::MAX), ..none }, Some(ErrorKind::Invalid)),
            (SetAttr { gid: Some(u32::MAX), ..none }, Some(ErrorKind::Invalid)),
            (SetAttr { uid: Some(u32::MAX - 1), gid: Some(0), ..none }, None),
            (SetAttr { atime: time(999_999_999), mtime: Some(SetTime::Now), ..none }, None),
            (SetAttr { atime: time(1_000_000_000), ..none }, Some(ErrorKind::Invalid)),
            (SetAttr { mtime: time(UTIME_NOW as u32), ..none }, Some(ErrorKind::Invalid)),
            (SetAttr { mtime: time(UTIME_OMIT as u32), ..none }, Some(ErrorKind::Invalid)),
            (SetAttr { size: Some(FILE_SIZE_MAX), ..none }, None),
            (SetAttr { size: Some(FILE_SIZE_MAX + 1), ..none }, Some(ErrorKind::TooBig)),
        ];
        for (to, expected) in table {
            assert_eq!(check(&to).err().map(|error| error.kind()), expected, "{to:?}");
        }
    }
}
