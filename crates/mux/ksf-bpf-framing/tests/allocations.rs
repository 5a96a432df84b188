//! Asking for a length allocates nothing, whatever the answer. One test: the counter is the process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

use ksf_bpf_framing::{Builtin, FramingProgram, Options, RunError, Verdict};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the arguments it was made with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, so from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn no_call_allocates() {
    let mut options = Options::default();
    let record = FramingProgram::builtin(&Builtin::RecordMark, &options).unwrap();
    let line = FramingProgram::builtin(&Builtin::Delimiter(b"\r\n"), &options).unwrap();
    options.instructions_max = 5;
    let short = FramingProgram::builtin(&Builtin::RecordMark, &options).unwrap();

    // The smallest of several rounds: the test runner's own threads may allocate in between, but not each time.
    let allocated = (0..20).map(|_| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        assert_eq!(record.message_len(black_box(&[&[0x80, 0], &[0, 9]])), Ok(Verdict::Length(13)));
        assert_eq!(record.message_len(black_box(&[&[0x80]])), Ok(Verdict::NeedMore));
        assert_eq!(line.message_len(black_box(&[b"GET /\r", b"\n"])), Ok(Verdict::Length(7)));
        assert_eq!(short.message_len(black_box(&[&[0; 4]])), Err(RunError::Budget { limit: 5 }));
        ALLOCATIONS.load(Ordering::Relaxed) - before
    });
    assert_eq!(allocated.min(), Some(0));
    // The counter counts.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    black_box(Box::new(before));
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > before);
}
