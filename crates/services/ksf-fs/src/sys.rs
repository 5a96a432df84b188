//! System calls that rustix does not have: identities of a thread, kernel handles, checks of access, the groups of a user, locks of
//! open files.

use std::ffi::{CStr, c_int, c_long};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::{Errno, Result};

/// Bytes of a kernel handle, at most (MAX_HANDLE_SZ).
const KERNEL_HANDLE_BYTES_MAX: usize = 128;

/// Sets the file system uid of this thread; true if the thread has it now.
///
/// The kernel drops the capabilities that override file permissions from the effective set when the uid changes from 0 to
/// another, and brings back those that are permitted when it changes to 0 (capabilities(7), "Effect of user ID changes on
/// capabilities"). The call returns the uid before, also on failure, so a second call asks.
pub(crate) fn set_fs_uid(uid: u32) -> bool {
    // SAFETY: setfsuid has no memory arguments, and glibc makes the plain call: it changes this thread alone.
    unsafe {
        libc::setfsuid(uid);
        libc::setfsuid(u32::MAX) as u32 == uid
    }
}

/// Sets the file system gid of this thread; true if the thread has it now.
pub(crate) fn set_fs_gid(gid: u32) -> bool {
    // SAFETY: setfsgid has no memory arguments, and glibc makes the plain call: it changes this thread alone.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsgid(u32::MAX) as u32 == gid
    }
}

/// Gives this thread a umask (and working folder) of its own.
pub(crate) fn own_umask() -> Result<()> {
    // SAFETY: only FS is unshared; the table of descriptors stays shared, so no thread sees another one's descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) }
}

/// Does the kernel let this thread have `mode` (R_OK, W_OK, X_OK) of an open object? By its file system ids: faccessat2(2)
/// with AT_EACCESS, since Linux 5.8.
pub(crate) fn access(object: impl AsFd, mode: u32) -> Result<()> {
    let flags = (AtFlags::EMPTY_PATH | AtFlags::EACCESS).bits();
    // SAFETY: the path is a constant with its NUL, and the descriptor is borrowed for the call.
    let done = unsafe {
        libc::syscall(libc::SYS_faccessat2, object.as_fd().as_raw_fd(), c"".as_ptr(), mode as c_int, flags as c_int)
    };
    checked(done).map(drop)
}

/// `struct file_handle` with room for the longest one.
#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    bytes: [u8; KERNEL_HANDLE_BYTES_MAX],
}

/// Reads up to `count` bytes of a file behind those that are in `into`, with one call. `flags`: RWF_NOWAIT, or 0.
pub(crate) fn read_behind(
    file: impl AsFd,
    offset: u64,
    count: usize,
    into: &mut Vec<u8>,
    flags: c_int,
) -> Result<usize> {
    into.reserve_exact(count);
    let room = &mut into.spare_capacity_mut()[..count];
    let part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let offset = libc::off64_t::try_from(offset).map_err(|_| Errno::INVAL)?;
    // SAFETY: `part` is memory of `into` that nothing else refers to during the call, and the kernel writes at most its length.
    let read = unsafe { libc::preadv2(file.as_fd().as_raw_fd(), &raw const part, 1, offset, flags) };
    let read = checked(read as c_long)? as usize;
    // SAFETY: the kernel has written `read` bytes behind those that were there, and there was room for `count`, which is no less.
    unsafe { into.set_len(into.len() + read.min(count)) };
    Ok(read)
}

/// `struct cachestat_range`.
#[repr(C)]
struct CacheRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Number of cachestat(2), since Linux 6.5, on all architectures.
const SYS_CACHESTAT: c_long = 451;

/// Pages of a part of a file that are in memory. `length`: not 0, which means all that follows.
pub(crate) fn cached_pages(file: impl AsFd, offset: u64, length: u64) -> Result<u64> {
    let range = CacheRange { offset, length };
    let mut stat = CacheStat::default();
    // SAFETY: both are laid out as the kernel has them, live for the call, and the kernel writes `stat` alone.
    let done = unsafe { libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), &raw const range, &raw mut stat, 0) };
    checked(done).map(|_| stat.cached)
}

/// Has the kernel refuse cachestat(2) to this thread, as a sandbox or an older kernel does.
#[cfg(test)]
pub(crate) fn refuse_cachestat(errno: Errno) {
    ksf_test::refuse_call(SYS_CACHESTAT, errno);
}

/// Takes a lease on a file that is open here alone, or gives it back. The kernel reports a break of it by a signal that does nothing.
#[cfg(test)]
pub(crate) fn set_lease(file: &OwnedFd, kind: libc::c_int) {
    /// asm-generic/fcntl.h; libc has it for musl alone.
    const F_SETSIG: c_int = 10;
    // SAFETY: neither command has an argument that is a pointer.
    let is_set = unsafe {
        libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) == 0
    };
    assert!(is_set, "{}", std::io::Error::last_os_error());
}

/// What the kernel calls an inode: a type and bytes that only its file system reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelHandle {
    pub(crate) handle_type: i32,
    length: usize,
    bytes: [u8; KERNEL_HANDLE_BYTES_MAX],
}

impl KernelHandle {
    /// `None` for more bytes than a handle may have.
    pub(crate) fn new(handle_type: i32, bytes: &[u8]) -> Option<Self> {
        let mut all = [0; KERNEL_HANDLE_BYTES_MAX];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self { handle_type, length: bytes.len(), bytes: all })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// The inode's number, in the formats of ext4, tmpfs, xfs and btrfs (`encode_fh` of each, Linux 6.18).
    pub(crate) fn inode(&self) -> Option<u64> {
        let word = |at: usize| self.bytes()[at..].first_chunk().copied().map(u32::from_ne_bytes).map(u64::from);
        let long = |at: usize| self.bytes()[at..].first_chunk().copied().map(u64::from_ne_bytes);
        match (self.handle_type, self.length) {
            // FILEID_INO32_GEN: number and generation; of tmpfs generation and number.
            (1, 8) => word(0),
            (1, 12) => Some(word(4)? | word(8)? << 32),
            // XFS_FILEID_TYPE_64FLAG; FILEID_BTRFS_WITHOUT_PARENT.
            (0x81, 12) | (0x4d, 20) => long(0),
            _ => None,
        }
    }
}

/// The kernel's handle of `name` in a folder, or of the object itself if `name` is empty, and the number of its mount.
/// Links are not followed.
pub(crate) fn name_to_handle(object: impl AsFd, name: &CStr) -> Result<(KernelHandle, i32)> {
    let mut raw =
        RawHandle { handle_bytes: KERNEL_HANDLE_BYTES_MAX as u32, handle_type: 0, bytes: [0; KERNEL_HANDLE_BYTES_MAX] };
    let mut mount: c_int = 0;
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH.bits() } else { 0 };
    // SAFETY: `raw` is laid out as struct file_handle with `handle_bytes` bytes behind it, which the kernel fills at most;
    // `mount` is an int, and `name` ends with NUL.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            object.as_fd().as_raw_fd(),
            name.as_ptr(),
            &raw mut raw,
            &raw mut mount,
            flags as c_int,
        )
    };
    checked(done)?;
    let length = (raw.handle_bytes as usize).min(KERNEL_HANDLE_BYTES_MAX);
    Ok((KernelHandle { handle_type: raw.handle_type, length, bytes: raw.bytes }, mount))
}

/// Opens what a kernel handle names, on the file system of `mount`. Needs CAP_DAC_READ_SEARCH.
///
/// Linux fails with ENOMEM, too, while it gives the inode number of a removed file to a new one (`iget_locked` of fs/inode.c, Linux
/// 6.18). That passes, and then the handle is stale: so this tries again for two seconds.
pub(crate) fn open_by_handle(mount: impl AsFd, handle: &KernelHandle, flags: OFlags) -> Result<OwnedFd> {
    let mut wait = Duration::from_millis(1);
    loop {
        match try_open_by_handle(&mount, handle, flags) {
            Err(Errno::NOMEM) if wait < Duration::from_secs(2) => std::thread::sleep(wait),
            opened => return opened,
        }
        wait *= 2;
    }
}

fn try_open_by_handle(mount: impl AsFd, handle: &KernelHandle, flags: OFlags) -> Result<OwnedFd> {
    let mut raw =
        RawHandle { handle_bytes: handle.length as u32, handle_type: handle.handle_type, bytes: handle.bytes };
    // SAFETY: `raw` is laid out as struct file_handle and has `handle_bytes` bytes, which is at most 128.
    let done = unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, mount.as_fd().as_raw_fd(), &raw mut raw, flags.bits() as c_int)
    };
    let descriptor = checked(done)?;
    // SAFETY: the kernel has just made this descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as c_int) })
}

fn checked(done: c_long) -> Result<c_long> {
    if done >= 0 {
        return Ok(done);
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Longest entry of a user in the system's databases.
pub(crate) const USER_BYTES_MAX: usize = 1 << 20;

/// The supplementary groups of a user by the system's databases, which may wait for a server; `None` for an unknown user.
///
/// # Errors
///
/// No database could tell: a server does not answer, or the entry is longer than [`USER_BYTES_MAX`].
pub(crate) fn groups_of(uid: u32, groups_max: usize) -> Result<Option<Vec<u32>>> {
    let mut text = vec![0; 16 << 10];
    // SAFETY: passwd is a structure of integers and pointers, for which zeros are valid.
    let mut user: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    loop {
        // SAFETY: all pointers are to live memory of this function, and `text` has the length that is passed.
        match unsafe { libc::getpwuid_r(uid, &raw mut user, text.as_mut_ptr(), text.len(), &raw mut found) } {
            // The latter say the same of a user that is not there (getpwuid(3)), as without /etc/passwd.
            0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => break,
            libc::ERANGE if text.len() < USER_BYTES_MAX => text.resize(4 * text.len(), 0),
            errno => return Err(Errno::from_raw_os_error(errno)),
        }
    }
    if found.is_null() {
        return Ok(None);
    }
    let mut groups = vec![0; groups_max.max(1)];
    let mut count = c_int::try_from(groups.len()).unwrap_or(c_int::MAX);
    // SAFETY: `pw_name` points into `text`, which is alive, and `groups` has room for `count` groups, which is as many as the
    // library writes.
    unsafe { libc::getgrouplist(user.pw_name, user.pw_gid, groups.as_mut_ptr(), &raw mut count) };
    // With more groups than there is room for, the library fills the room and tells the whole number.
    groups.truncate(usize::try_from(count).unwrap_or(0));
    Ok(Some(groups))
}

/// Kinds of locks, as fcntl(2) has them.
pub(crate) const LOCK_SHARED: i16 = libc::F_RDLCK as i16;
pub(crate) const LOCK_EXCLUSIVE: i16 = libc::F_WRLCK as i16;
pub(crate) const LOCK_NONE: i16 = libc::F_UNLCK as i16;

/// A lock on a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawLock {
    pub(crate) kind: i16,
    pub(crate) start: i64,
    /// 0: to the end.
    pub(crate) length: i64,
}

/// Takes a lock that belongs to the open file, or gives it back. False: there is another in the way.
pub(crate) fn try_lock(file: impl AsFd, lock: RawLock) -> Result<bool> {
    match control_lock(file, libc::F_OFD_SETLK, lock) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The first lock in the way of this one; of kind [`LOCK_NONE`] if there is none.
pub(crate) fn find_lock(file: impl AsFd, lock: RawLock) -> Result<RawLock> {
    control_lock(file, libc::F_OFD_GETLK, lock)
}

fn control_lock(file: impl AsFd, command: c_int, lock: RawLock) -> Result<RawLock> {
    // SAFETY: flock is a structure of integers, for which zeros are valid; with these commands the pid must be 0.
    let mut raw: libc::flock = unsafe { std::mem::zeroed() };
    raw.l_type = lock.kind;
    raw.l_whence = libc::SEEK_SET as i16;
    raw.l_start = lock.start;
    raw.l_len = lock.length;
    // SAFETY: the descriptor is borrowed for the call, and `raw` is a live flock, which the kernel reads and may fill.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut raw) };
    checked(done.into())?;
    Ok(RawLock { kind: raw.l_type, start: raw.l_start, length: raw.l_len })
}
