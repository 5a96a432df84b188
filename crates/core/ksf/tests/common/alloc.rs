//! An allocator that counts, per thread, so that a shard's allocations can be told from its peers'. A test file that
//! wants it says `#[global_allocator] static COUNTING: Counting = Counting;`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ksf::framing::Framing;
use ksf::{Message, Peer, Refused, Reply, Service};

pub struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

/// Times the calling thread allocated or grew something.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// Bytes the calling thread has allocated and not freed.
pub fn bytes() -> i64 {
    BYTES.get()
}

fn note(allocations: u64, bytes: i64) {
    // The cells need no destructor, so they are there for as long as their thread.
    ALLOCATIONS.set(ALLOCATIONS.get() + allocations);
    BYTES.set(BYTES.get() + bytes);
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

/// Length of an answer to [`METER`].
pub const METER_BYTES: usize = 16;

/// The message that asks a [`Meter`] for its thread's counts.
pub const METER: &[u8] = b"how much?";

/// Echoes messages of any framing, and tells what its thread has allocated.
pub struct Meter(pub Framing);

impl Service for Meter {
    type Conn = ();

    fn name(&self) -> &str {
        "meter"
    }

    fn framing(&self) -> Framing {
        self.0
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes() == METER {
            reply.message(|out| {
                out.extend_from_slice(&allocations().to_be_bytes());
                out.extend_from_slice(&bytes().to_be_bytes());
            });
        } else if (2048..=4096).contains(&message.bytes().len()) {
            // From where it lies: it came in one slot.
            reply.chunk(message.keep());
        } else {
            reply.bytes(message.bytes());
        }
    }
}
