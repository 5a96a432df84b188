//! What the person who runs a program must know, on standard error: one line, once.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says it unless it was said.
pub(crate) fn once(told: &AtomicBool, text: impl FnOnce() -> String) {
    if !told.swap(true, Ordering::Relaxed) {
        let line = format!("ksf kcm-run: {}; see docs/kcm.md\n", text());
        // SAFETY: only written to; a program that has closed it is told nothing.
        let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
        let _ = rustix::io::write(stderr, line.as_bytes());
    }
}
