//! Asking for a length allocates nothing, whatever the answer.

use std::hint::black_box;

use ksf_bpf_framing::{BuiltinFraming, FramingOptions, FramingProgram, FramingVerdict, RunError};
use ksf_test::alloc::{Counting, allocations};

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn no_call_allocates() {
    let mut options = FramingOptions::default();
    let record = FramingProgram::builtin(&BuiltinFraming::RecordMark, &options).unwrap();
    let line = FramingProgram::builtin(&BuiltinFraming::Delimiter(b"\r\n"), &options).unwrap();
    options.instructions_max = 5;
    let short = FramingProgram::builtin(&BuiltinFraming::RecordMark, &options).unwrap();

    let before = allocations();
    assert_eq!(record.message_len(black_box(&[&[0x80, 0], &[0, 9]])), Ok(FramingVerdict::Length(13)));
    assert_eq!(record.message_len(black_box(&[&[0x80]])), Ok(FramingVerdict::NeedMore));
    assert_eq!(line.message_len(black_box(&[b"GET /\r", b"\n"])), Ok(FramingVerdict::Length(7)));
    assert_eq!(short.message_len(black_box(&[&[0; 4]])), Err(RunError::Budget { limit: 5 }));
    assert_eq!(allocations(), before);
    // The counter counts.
    black_box(Box::new(before));
    assert!(allocations() > before);
}
