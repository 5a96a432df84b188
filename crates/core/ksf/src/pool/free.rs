//! Free slots, for any thread to give back and to take.
//!
//! `tests/slot_schedules.rs` compiles this file against primitives that try one schedule of the threads after the other.

use super::sync::{AtomicU32, AtomicU64, Ordering};

const NONE: u32 = u32::MAX;

/// A lock-free stack of indexes. The link from an index to the one below it is the caller's, one per index.
///
/// In the low half of `top` is the index on top, in the high half the number of indexes that were ever taken. So a
/// thread that was held up while it took an index does not mistake a stack that others changed meanwhile for the one
/// it read, even if the same index is on top again.
#[derive(Debug)]
pub(super) struct FreeStack {
    top: AtomicU64,
}

impl Default for FreeStack {
    fn default() -> Self {
        Self { top: AtomicU64::new(u64::from(NONE)) }
    }
}

impl FreeStack {
    /// Puts an index on top that only the caller has.
    pub(super) fn push<'a>(&self, index: u32, link: impl Fn(u32) -> &'a AtomicU32) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            link(index).store(top as u32, Ordering::Relaxed);
            let new = top & !u64::from(u32::MAX) | u64::from(index);
            // Release: what this thread did with the slot happens before its next use.
            match self.top.compare_exchange_weak(top, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// The index that was given back last, so the one that is warm in a cache; it is the caller's alone.
    pub(super) fn pop<'a>(&self, link: impl Fn(u32) -> &'a AtomicU32) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let index = top as u32;
            if index == NONE {
                return None;
            }
            let below = link(index).load(Ordering::Relaxed);
            match self.top.compare_exchange_weak(top, taken(top, below), Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(index),
                Err(now) => top = now,
            }
        }
    }

    /// Takes all of them; the one that was given back last ends up last.
    pub(super) fn take_all<'a>(&self, into: &mut Vec<u32>, link: impl Fn(u32) -> &'a AtomicU32) {
        let mut top = self.top.load(Ordering::Relaxed);
        while let Err(now) = self.top.compare_exchange_weak(top, taken(top, NONE), Ordering::Acquire, Ordering::Relaxed)
        {
            top = now;
        }
        let (mut at, start) = (top as u32, into.len());
        while at != NONE {
            into.push(at);
            at = link(at).load(Ordering::Relaxed);
        }
        if into.len() > start + 1 {
            into[start..].reverse();
        }
    }
}

fn taken(top: u64, below: u32) -> u64 {
    ((top >> 32).wrapping_add(1) << 32) | u64::from(below)
}
