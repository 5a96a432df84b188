//! Changing attributes.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode as Permissions, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::{Errno, Result as SysResult};
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
    /// Changes attributes: owner and group, permissions, times, then the size, so that a caller that may not change the others does
    /// not cut the file. `guard`: only if this is the ctime ([`ErrorKind::NotSync`]), which no other call of this server changes
    /// meanwhile.
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
        let mut set = || {
            if guard.is_some_and(|ctime| ctime != node.attr.ctime) {
                return Err(ErrorKind::NotSync.into());
            }
            let call = self.begin(lane, credential, handle, true)?;
            check(to)?;
            if to.mode.is_some() && node.attr.file_type == FileType::Symlink {
                return Err(ErrorKind::NotSupported.into());
            }
            let content = match to.size {
                Some(_) => Some(self.content(lane, &call.caller, handle, Mode::Write)?),
                None => None,
            };
            let change = || {
                if let Some(file) = &content {
                    match resize {
                        Resize::Owner => permit(file, WRITE_BIT, &call.caller)?,
                        Resize::Writer => access(file, WRITE_BIT)?,
                    }
                }
                self.change(&node.descriptor, content.as_deref(), to)
            };
            Ok::<_, FsError>(lane.as_caller(&call.caller, change)??)
        };
        let result = set();
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

    /// Changes attributes as the caller. `content`: the file open for writing, with a new size; the caller may write to it.
    ///
    /// open(2) with O_TRUNC and ftruncate(2) on a client are a size with the time of the server, and of 9P also the mode without its
    /// set-id bits. A caller with write permission may do that to the file of another owner, but may not set a mode or one of the times by
    /// themselves. ftruncate(2) here does both.
    pub(super) fn change(&self, object: &OwnedFd, content: Option<&OwnedFd>, to: &SetAttr) -> SysResult<()> {
        let mut first = *to;
        if content.is_some() {
            first.mtime = first.mtime.filter(|time| *time != SetTime::Now);
            first.mode = match first.mode {
                Some(mode) if !is_left_by_cut(mode, mode_of(object)?) => Some(mode),
                _ => None,
            };
        }
        set_owner(object, &first)?;
        if let Some(mode) = first.mode {
            self.set_mode(object, mode)?;
        }
        set_times(object, &first)?;
        let (Some(content), Some(size)) = (content, to.size) else { return Ok(()) };
        rustix::fs::ftruncate(content, size)?;
        // It set the time of the last change, and may have cleared bits of the mode.
        if let Some(mode) = to.mode
            && mode & 0o7777 != mode_of(object)?
        {
            self.set_mode(object, mode)?;
        }
        set_times(object, &first)
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
    let set = |atime, mtime| {
        let times = Timestamps { last_access: of(atime), last_modification: of(mtime) };
        rustix::fs::utimensat(object, c"", &times, AtFlags::EMPTY_PATH)
    };
    match set(to.atime, to.mtime) {
        // The kernel takes one time of the two for a chosen one, which is for the owner. NFS and 9P let all who may write set one of
        // them to now; the other one follows.
        Err(Errno::PERM) if is_now(to.atime) && is_now(to.mtime) => set(Some(SetTime::Now), Some(SetTime::Now)),
        result => result,
    }
}

fn is_now(time: Option<SetTime>) -> bool {
    time.is_none_or(|time| time == SetTime::Now)
}

pub(crate) fn mode_of(object: &OwnedFd) -> SysResult<u32> {
    Ok(rustix::fs::statat(object, c"", AtFlags::EMPTY_PATH)?.st_mode & 0o7777)
}

/// True if a mode is that which ftruncate(2) leaves of the present one (`setattr_should_drop_suidgid` of fs/attr.c).
fn is_left_by_cut(mode: u32, present: u32) -> bool {
    let cleared = if present & 0o010 != 0 { 0o6000 } else { 0o4000 };
    mode & 0o7777 == present & !cleared
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Served, root};

    /// Few kernels that run tests have quotas of users.
    #[test]
    fn owner_beyond_quota_is_refused_and_nothing_is_changed() {
        let test = || {
            let (served, mut lane) = (Served::open_to_all(), Lane::attach().unwrap());
            let file = served.make(&mut lane, "file");
            ksf_test::refuse_call(libc::SYS_fchownat, rustix::io::Errno::DQUOT);
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
