//! Memory that an engine may register with the kernel, and what tells it from other memory that had its address before.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number for pages of memory, which no others ever had. Memory that is freed and allocated anew at the same address, or that
/// gave its pages back to the machine, has other pages there: the holder of the old ones would read and write those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PagesId(u64);

impl PagesId {
    /// A number of its own.
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: each addition gives another number, and memory is handed to another thread by what orders it itself. 64 bits
        // last for centuries.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Memory that may be registered: while its number is the same it has the same pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages {
    pub(crate) id: PagesId,
    pub(crate) base: NonNull<u8>,
    /// What of it is taken from the machine already, so that registering takes no more.
    pub(crate) bytes: usize,
}

impl Pages {
    /// Bytes of the pages that it lies in.
    pub(crate) fn pinned_bytes(&self) -> usize {
        let page_bytes = rustix::param::page_size();
        let (start, end) = (self.base.addr().get(), self.base.addr().get() + self.bytes);
        end.next_multiple_of(page_bytes) - start / page_bytes * page_bytes
    }
}
