//! The allocator of debug builds: ends the program where a handler could interrupt an allocation.

use std::alloc::{GlobalAlloc, Layout};
use std::os::fd::BorrowedFd;

use dlmalloc::GlobalDlmalloc;

use crate::signals::may_come;

pub(crate) struct WatchedDlmalloc;

fn check() {
    if may_come() {
        // SAFETY: whatever the program has there takes the message or fails.
        let stderr = unsafe { BorrowedFd::borrow_raw(2) };
        let _ = rustix::io::write(stderr, b"ksf kcm-run: memory is allocated while a handler may come\n");
        std::process::abort();
    }
}

// SAFETY: the blocks are dlmalloc's, which keeps the contract.
unsafe impl GlobalAlloc for WatchedDlmalloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: the caller keeps the contract of `alloc`, which is this one's.
        unsafe { GlobalDlmalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        check();
        // SAFETY: the block is from `alloc` above, or from the default of `realloc`, which calls it.
        unsafe { GlobalDlmalloc.dealloc(block, layout) }
    }
}
