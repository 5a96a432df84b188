//! The next definition of a function: libc's, or another library's that is preloaded.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function that a library defines once more, and where the definition behind it is.
#[derive(Debug)]
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// Of the function with this name, which ends with a NUL.
    ///
    /// # Panics
    ///
    /// If it does not, or has another NUL: when the program is compiled, for a static.
    pub const fn new(name: &'static str) -> Self {
        match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Self { name, found: AtomicPtr::new(std::ptr::null_mut()) },
            Err(_) => panic!("the name of a function ends with its only NUL"),
        }
    }

    /// Looks it up, so that [`Self::get`] calls nothing: dlsym may allocate and take a lock.
    pub fn look_up(&self) {
        // SAFETY: the name is a string. Two threads that look at once find the same.
        self.found.store(unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }, Ordering::Relaxed);
    }

    /// Its address, looked up once. Ends the process where there is none: a program that calls what its libc does not
    /// have could not have been started without this library.
    pub fn get(&self) -> *mut c_void {
        if self.found.load(Ordering::Relaxed).is_null() {
            self.look_up();
        }
        let function = self.found.load(Ordering::Relaxed);
        if function.is_null() {
            std::process::abort();
        }
        function
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_found_once() {
        static NEXT: Next = Next::new("getpid\0");
        NEXT.look_up();
        let found = NEXT.get();
        assert!(!found.is_null());
        assert_eq!(NEXT.get(), found);
    }
}
