//! This library's own descriptors: queues, eventfds, inner epoll instances.
//!
//! Their numbers are high, out of the way of a program that counts on the lowest free number; they are closed by
//! `exec`; `close()` says that they are not open, because the program does not know of them.

use std::ffi::{c_int, c_uint};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, getrlimit};

use crate::table::{self, DescriptorKind, FDS_MAX};

/// From this number on, where the limit allows.
const FIRST: u64 = 4096;

/// A descriptor for a call to the kernel.
pub(crate) fn borrow<'a>(fd: c_int) -> BorrowedFd<'a> {
    // SAFETY: used for one system call; where the number means nothing any more, the kernel says so.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// What `keep` has put under each number. The program may close it by a bare system call, or libc may, and then the
/// number is the program's: it must not be closed, or asked questions, any more.
static INODES: [AtomicU64; FDS_MAX] = [const { AtomicU64::new(0) }; FDS_MAX];

/// Takes a descriptor as the library's own, under a high number.
pub(crate) fn keep(fd: OwnedFd) -> c_int {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let first = if limit >= FIRST + 256 { FIRST } else { limit - limit / 4 };
    // Without a free high number the low one has to do.
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, first as c_int).unwrap_or(fd).into_raw_fd();
    if let Some(inode) = INODES.get(fd as usize) {
        inode.store(inode_of(fd).unwrap_or(0), Ordering::Relaxed);
        table::set_kind(fd, DescriptorKind::Own);
    }
    fd
}

/// True if the number is still what `keep` made it: sockets have an inode each, eventfds and epoll instances have one
/// together. If not, it is marked as the program's.
pub(crate) fn is_intact(fd: c_int) -> bool {
    if table::kind(fd) != DescriptorKind::Own {
        return false;
    }
    let kept = INODES.get(fd as usize).map(|inode| inode.load(Ordering::Relaxed));
    let is_intact = kept.is_some() && inode_of(fd) == kept;
    if !is_intact {
        table::set_kind(fd, DescriptorKind::None);
    }
    is_intact
}

fn inode_of(fd: c_int) -> Option<u64> {
    rustix::fs::fstat(borrow(fd)).ok().map(|stat| stat.st_ino)
}

/// Closes one of the library's own, unless it is not that any more.
pub(crate) fn release(fd: c_int) {
    if is_intact(fd) {
        table::set_kind(fd, DescriptorKind::None);
        // SAFETY: it is the library's own: `keep` took it, and nothing else closes it. Not as an `OwnedFd`, which would
        // end the program if another thread has closed it just now.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
}

/// `close_range`, but for the library's own descriptors.
///
/// # Errors
///
/// -1 and `errno`, as `close_range` has it.
pub(crate) fn close_range_around(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    for (fd, _) in table::marked(first, last).filter(|(_, kind)| *kind == DescriptorKind::Own) {
        let fd = fd as c_uint;
        // SAFETY: closes what the program wants closed.
        if fd > from && unsafe { crate::real::close_range(from, fd - 1, flags) } != 0 {
            return -1;
        }
        from = fd + 1;
    }
    if from > last {
        return 0;
    }
    // SAFETY: as above.
    unsafe { crate::real::close_range(from, last, flags) }
}

/// Gives a number of the library's own to the program, which is about to `dup2()` onto it.
pub(crate) fn make_room(fd: c_int) {
    let Ok(elsewhere) = rustix::io::fcntl_dupfd_cloexec(borrow(fd), fd + 1) else { return };
    let new = keep(elsewhere);
    crate::worker::moved(fd, new);
    release(fd);
}

/// True if a queue is none any more: the holder has ended it, or somebody has closed its number.
pub(crate) fn is_lost(fd: c_int) -> bool {
    !is_intact(fd) || rustix::net::sockopt::socket_acceptconn(borrow(fd)) != Ok(true)
}
