//! Work that commands did, for callers that bound it.
//!
//! One unit is an entry of an index that was visited, a record that was written, or 256 bytes of a value that was looked at: some 50 ns.

use std::cell::Cell;

/// Bytes of a value that count as one unit.
const BYTES_PER_UNIT: usize = 256;

thread_local! {
    static DONE: Cell<u64> = const { Cell::new(0) };
}

/// Units that this thread has done since it began.
#[inline]
pub fn done() -> u64 {
    DONE.get()
}

/// Adds to the work of this thread.
#[inline]
pub fn add(units: u64) {
    DONE.set(DONE.get() + units);
}

/// Units for a value of so many bytes.
#[inline]
pub fn of_bytes(bytes: usize) -> u64 {
    (bytes / BYTES_PER_UNIT) as u64
}
