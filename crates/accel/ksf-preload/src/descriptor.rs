//! This library's own descriptors: queues, eventfds, inner epoll instances.
//!
//! Their numbers are high, out of the way of a program that counts on the lowest free number; they are closed by
//! `exec`; `close()` says that they are not open, because the program does not know of them.

use std::ffi::{c_int, c_uint};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

use ksf_interpose::OwnDescriptors;
use rustix::io::Errno;

use crate::table::{self, DescriptorKind, FDS_MAX};

/// A descriptor for a call to the kernel.
pub(crate) fn borrow<'a>(fd: c_int) -> BorrowedFd<'a> {
    // SAFETY: used for one system call; where the number means nothing any more, the kernel says so.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

static OWN: OwnDescriptors<FDS_MAX> = OwnDescriptors::new();

/// Takes a descriptor as the library's own, under a high number.
///
/// # Errors
///
/// EMFILE: no number of the table is free. EBADF: the program has closed it.
pub(crate) fn keep(fd: OwnedFd) -> Result<c_int, Errno> {
    let fd = OWN.keep(fd)?.into_raw_fd();
    table::set_kind(fd, DescriptorKind::Own);
    Ok(fd)
}

/// True if the number is still what `keep` made it. If not, it is marked as the program's.
pub(crate) fn is_intact(fd: c_int) -> bool {
    if table::kind(fd) != DescriptorKind::Own {
        return false;
    }
    let is_intact = OWN.is_intact(fd);
    if !is_intact {
        OWN.forget(fd);
        table::set_kind(fd, DescriptorKind::None);
    }
    is_intact
}

/// Closes one of the library's own, unless it is not that any more.
pub(crate) fn release(fd: c_int) {
    if is_intact(fd) {
        table::set_kind(fd, DescriptorKind::None);
        OWN.forget(fd);
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
    // SAFETY: closes what the program wants closed.
    OWN.close_around(first, last, |first, last| unsafe { crate::real::close_range(first, last, flags) })
}

/// Gives a number of the library's own to the program, which is about to `dup2()` onto it.
pub(crate) fn make_room(fd: c_int) {
    let Ok(elsewhere) = rustix::io::fcntl_dupfd_cloexec(borrow(fd), fd + 1) else { return };
    let Ok(new) = keep(elsewhere) else { return };
    crate::worker::moved(fd, new);
    release(fd);
}

/// True if a queue is none any more: the holder has ended it, or somebody has closed its number.
pub(crate) fn is_lost(fd: c_int) -> bool {
    !is_intact(fd) || rustix::net::sockopt::socket_acceptconn(borrow(fd)) != Ok(true)
}
