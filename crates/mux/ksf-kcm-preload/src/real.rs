//! The functions of libc behind those defined here.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{epoll_event, nfds_t, pollfd, sigset_t, timespec};

/// The next definition of a function, found once.
pub(crate) fn next(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    let known = found.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is a string. Two threads that look at once find the same.
    let function = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if function.is_null() {
        // SAFETY: ends the process. It has called a function that its libc does not have.
        unsafe { libc::abort() };
    }
    found.store(function, Ordering::Relaxed);
    function
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
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    // SAFETY: the function has this type, and the arguments are the caller's.
    unsafe { std::mem::transmute::<*mut c_void, Function>(next(c"ppoll", &FOUND))(set, count, timeout, signals) }
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
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    // SAFETY: the function has this type, and the arguments are the caller's.
    unsafe {
        std::mem::transmute::<*mut c_void, Function>(next(c"epoll_pwait", &FOUND))(set, found, max, timeout_ms, signals)
    }
}
