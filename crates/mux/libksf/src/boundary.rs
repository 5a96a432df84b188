//! What every call has in common: panics end here, errors become numbers, words are kept for a later call.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use ksf_mux::{AttachError, RecvError, SendError};

/// A failed call: an error number, and words.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: c_int,
    text: String,
}

impl Failure {
    pub(crate) fn new(errno: c_int, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self::new(error.errno(), error.to_string())
    }
}

impl From<SendError> for Failure {
    fn from(error: SendError) -> Self {
        let errno = match error {
            SendError::Gone(_) => libc::EPIPE,
            SendError::NotConnected => libc::ENOTCONN,
            SendError::WouldBlock | SendError::TimedOut(_) => libc::EAGAIN,
            _ => libc::EINVAL,
        };
        Self::new(errno, error.to_string())
    }
}

impl From<RecvError> for Failure {
    fn from(error: RecvError) -> Self {
        let errno = match &error {
            RecvError::System(error) => error.raw_os_error().unwrap_or(libc::EIO),
            RecvError::Connection { error, .. } => error.errno(),
            _ => libc::EAGAIN,
        };
        Self::new(errno, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a call: its number, or a negative error number.
pub(crate) fn call(work: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // What a call works on is behind locks that pass on what a panic left.
    let result = catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Failure::new(libc::EIO, "a defect in libksf; please report it")));
    result.unwrap_or_else(|failure| {
        let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
        LAST.with(|last| *last.borrow_mut() = text);
        -failure.errno
    })
}

/// The same for calls that return nothing, or something else.
pub(crate) fn quiet<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// The words of the last failure of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ksf_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// The version, "MAJOR.MINOR.PATCH".
#[unsafe(no_mangle)]
pub extern "C" fn ksf_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// What a caller's pointer leads to, or EINVAL for a null pointer.
///
/// # Safety
///
/// `pointer` is null, or valid for reads for `'a`, as the header demands of every caller.
pub(crate) unsafe fn at<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller of this function keeps it.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::new(libc::EINVAL, format!("{name} is NULL")))
}

/// A place for a result, or EINVAL for a null pointer. It need not be initialised.
pub(crate) fn place<T>(pointer: *mut T, name: &str) -> Result<*mut T, Failure> {
    if pointer.is_null() { Err(Failure::new(libc::EINVAL, format!("{name} is NULL"))) } else { Ok(pointer) }
}

/// The caller's bytes. None may be at NULL.
///
/// # Safety
///
/// `bytes` is valid for reads of `count` bytes for `'a`, or `count` is 0.
pub(crate) unsafe fn bytes<'a>(bytes: *const std::ffi::c_void, count: usize) -> Result<&'a [u8], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if bytes.is_null() || count > isize::MAX as usize {
        return Err(Failure::new(libc::EINVAL, "bytes is NULL, or count too large"));
    }
    // SAFETY: not null, not longer than an object can be, and valid by the contract of this function.
    Ok(unsafe { std::slice::from_raw_parts(bytes.cast(), count) })
}
