//! This library's own descriptors: queues, eventfds, inner epoll instances.
//!
//! Their numbers are high, out of the way of a program that counts on the lowest free number; they are closed by
//! `exec`; the program cannot close them by number, because it does not know that they are there.

use std::ffi::{c_int, c_uint};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use rustix::process::{Resource, getrlimit};

use crate::table::{self, Kind};

/// From this number on, where the limit allows.
const FIRST: u64 = 4096;

/// A descriptor for a call to the kernel.
pub(crate) fn borrow<'a>(fd: c_int) -> BorrowedFd<'a> {
    // SAFETY: used for one system call; where the number means nothing any more, the kernel says so.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// Takes a descriptor as the library's own, under a high number.
pub(crate) fn keep(fd: OwnedFd) -> c_int {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let first = if limit >= FIRST + 256 { FIRST } else { limit - limit / 4 };
    // Without a free high number the low one has to do.
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, first as c_int).unwrap_or(fd).into_raw_fd();
    table::set_kind(fd, Kind::Own);
    fd
}

/// Closes one of the library's own, unless it is not that any more.
pub(crate) fn release(fd: c_int) {
    if table::kind(fd) == Kind::Own {
        table::set_kind(fd, Kind::None);
        // SAFETY: it is the library's own: `keep` took it, and nothing else closes it.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

/// `close_range`, but for the library's own descriptors.
///
/// # Errors
///
/// -1 and `errno`, as `close_range` has it.
pub(crate) fn close_range_around(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    for (fd, _) in table::marked(first, last).filter(|(_, kind)| *kind == Kind::Own) {
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

/// True if the socket behind a queue's number is gone: somebody closed it behind this library's back.
pub(crate) fn is_lost(fd: c_int) -> bool {
    rustix::net::sockopt::socket_acceptconn(borrow(fd)) != Ok(true)
}
