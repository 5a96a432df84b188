//! An allocator that counts, for each thread and for all. A test binary that wants it says
//! `#[global_allocator] static COUNTING: Counting = Counting;`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

static ALL_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static ALL_BYTES: AtomicU64 = AtomicU64::new(0);

/// Times the calling thread allocated or grew something.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// Bytes the calling thread has allocated and not freed.
pub fn bytes() -> i64 {
    BYTES.get()
}

/// Times any thread of this process allocated or grew something.
pub fn allocations_of_all() -> u64 {
    ALL_ALLOCATIONS.load(Relaxed)
}

/// Bytes that all threads of this process have ever allocated.
pub fn bytes_of_all() -> u64 {
    ALL_BYTES.load(Relaxed)
}

fn note(allocations: u64, bytes: i64) {
    // The cells need no destructor, so they are there for as long as their thread.
    ALLOCATIONS.set(ALLOCATIONS.get() + allocations);
    BYTES.set(BYTES.get() + bytes);
    ALL_ALLOCATIONS.fetch_add(allocations, Relaxed);
    ALL_BYTES.fetch_add(bytes.try_into().unwrap_or(0), Relaxed);
}

// SAFETY: every call is passed on to the system's allocator, unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(1, size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        note(0, -(layout.size() as i64));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(at, layout) }
    }
}
