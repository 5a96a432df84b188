//! The program's `errno`: what is done here beside its own call must not show in it.

use std::ffi::c_int;

pub(crate) fn errno() -> c_int {
    // SAFETY: the place of this thread's errno can be read.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the place of this thread's errno can be written.
    unsafe { *libc::__errno_location() = errno };
}

/// The answer of a call that failed.
pub(crate) fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}
