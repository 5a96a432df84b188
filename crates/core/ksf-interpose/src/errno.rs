//! The program's `errno`: what is done here beside its own call must not show in it.

use std::ffi::c_int;

/// That of the calling thread.
pub fn errno() -> c_int {
    // SAFETY: the place of this thread's errno can be read.
    unsafe { *libc::__errno_location() }
}

/// Sets that of the calling thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the place of this thread's errno can be written.
    unsafe { *libc::__errno_location() = errno };
}

/// The answer of a call that failed: -1, with this `errno`.
pub fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}
