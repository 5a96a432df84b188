//! What the person who runs a program must know, on standard error: one line, once.

use std::fmt;
use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says it unless it was said.
pub(crate) fn once(told: &AtomicBool, text: fmt::Arguments<'_>) {
    if !told.swap(true, Ordering::Relaxed) {
        // No memory of the allocator: this may be a child of `_Fork`.
        let mut line = [0; 512];
        let mut rest = &mut line[..];
        let _ = writeln!(rest, "ksf kcm-run: {text}; see docs/kcm.md");
        let left = rest.len();
        let line = &line[..line.len() - left];
        // SAFETY: only written to; a program that has closed it is told nothing.
        let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
        let _ = rustix::io::write(stderr, line);
    }
}
