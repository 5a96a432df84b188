//! The functions of libc behind those defined here.

use std::ffi::{c_int, c_void};

use ksf_interpose::Next;
use libc::{epoll_event, nfds_t, pollfd, sigset_t, timespec};

static PPOLL: Next = Next::new("ppoll\0");
static EPOLL_PWAIT: Next = Next::new("epoll_pwait\0");

/// Looks them up: dlsym might allocate or take a lock in a signal handler.
pub(crate) fn look_up_all() {
    PPOLL.look_up();
    EPOLL_PWAIT.look_up();
}

/// ppoll(2)
///
/// # Safety
///
/// As its manual page demands.
pub(crate) unsafe fn ppoll(
    set: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    type Function = unsafe extern "C" fn(*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int;
    // SAFETY: the function has this type, and the arguments are the caller's.
    unsafe { std::mem::transmute::<*mut c_void, Function>(PPOLL.get())(set, count, timeout, signals) }
}

/// epoll_pwait(2)
///
/// # Safety
///
/// As its manual page demands.
pub(crate) unsafe fn epoll_pwait(
    set: c_int,
    found: *mut epoll_event,
    max: c_int,
    timeout_ms: c_int,
    signals: *const sigset_t,
) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int;
    // SAFETY: the function has this type, and the arguments are the caller's.
    unsafe { std::mem::transmute::<*mut c_void, Function>(EPOLL_PWAIT.get())(set, found, max, timeout_ms, signals) }
}
