//! What a store has in memory, counted while it changes, over all shards.
//!
//! ```text
//!   0 ─────────── fixed ──────────── used ─────── low ── max
//!     keys, short     │ values that     │               │     above it commands that write wait until values were let go of;
//!     values, cells   │ may be let go of│               │     when what is fixed is above it, they are refused
//! ```
//!
//! Every change is counted by the shard that makes it, before anybody else sees it: what is counted is what is there.

use std::ops::{Add, AddAssign, Sub};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;

use crate::index::leaf::ENTRY_BYTES;
use crate::log::Purpose;

/// Bytes of memory, and what is in them. A difference of two wraps as the difference of two numbers does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of memory that are taken, but for what the allocator needs.
    pub used: usize,
    /// Those of them that come back by themselves: values that may be let go of, because they are on a medium, too, or will
    /// be; and what a flush took out.
    pub values: usize,
    /// Values that are on a medium alone.
    pub away: usize,
    /// Bytes of these values.
    pub away_bytes: usize,
    /// Entries that say that something is gone. Their memory comes back when the logs were cleaned of what they outweigh, and of
    /// them.
    pub tombstones: usize,
}

impl Add for Sizes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            used: self.used.wrapping_add(other.used),
            values: self.values.wrapping_add(other.values),
            away: self.away.wrapping_add(other.away),
            away_bytes: self.away_bytes.wrapping_add(other.away_bytes),
            tombstones: self.tombstones.wrapping_add(other.tombstones),
        }
    }
}

impl AddAssign for Sizes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Sizes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            used: self.used.wrapping_sub(other.used),
            values: self.values.wrapping_sub(other.values),
            away: self.away.wrapping_sub(other.away),
            away_bytes: self.away_bytes.wrapping_sub(other.away_bytes),
            tombstones: self.tombstones.wrapping_sub(other.tombstones),
        }
    }
}

/// The memory of a store, and how much of it there may be.
#[derive(Debug)]
pub struct Memory {
    bytes_max: usize,
    counts: CachePadded<Counts>,
    /// Tombstones are not waited for: cleaning has taken none out for long.
    gives_up: AtomicBool,
}

#[derive(Debug, Default)]
struct Counts {
    used: AtomicUsize,
    values: AtomicUsize,
    away: AtomicUsize,
    away_bytes: AtomicUsize,
    tombstones: AtomicUsize,
}

/// Tombstones are waited for where they have this part of the memory: each look at all logs for them brings back as much.
const TOMBSTONES_PART: usize = 64;

/// What keeps may take this part of the memory above all that there is: times of ends, and what is left behind where something was.
const KEPT_PART: usize = 8;

/// Why nothing may be written for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// There is room when values were let go of, or tombstones were taken out.
    Yet,
    /// What must stay in memory alone is more than may be.
    Full,
}

impl Memory {
    /// At most so many bytes; `usize::MAX`: as many as there are.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, counts: CachePadded::default(), gives_up: AtomicBool::new(false) }
    }

    /// Bytes that may be used.
    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// Bytes down to which values are let go of, so that those who write find room without waiting.
    pub(crate) fn low_bytes(&self) -> usize {
        self.bytes_max - self.bytes_max / 16
    }

    /// What is there now.
    pub fn sizes(&self) -> Sizes {
        let Counts { used, values, away, away_bytes, tombstones } = &*self.counts;
        Sizes {
            used: used.load(Ordering::Relaxed),
            values: values.load(Ordering::Relaxed),
            away: away.load(Ordering::Relaxed),
            away_bytes: away_bytes.load(Ordering::Relaxed),
            tombstones: tombstones.load(Ordering::Relaxed),
        }
    }

    /// Bytes that are used.
    pub(crate) fn used(&self) -> usize {
        self.counts.used.load(Ordering::Relaxed)
    }

    /// Whether something may be written for a purpose. What only takes away always may: it brings room.
    pub(crate) fn admit(&self, purpose: Purpose) -> Result<(), NoRoom> {
        let limit = match purpose {
            Purpose::Cleaning | Purpose::Removing => return Ok(()),
            Purpose::Keeping => self.bytes_max.saturating_add(self.bytes_max / KEPT_PART),
            Purpose::Writing => self.bytes_max,
        };
        if self.used() <= limit {
            return Ok(());
        }
        let comes_back = self.fixed_bytes() <= limit || self.has_tombstones();
        if comes_back { Err(NoRoom::Yet) } else { Err(NoRoom::Full) }
    }

    /// Bytes that do not come back by themselves.
    fn fixed_bytes(&self) -> usize {
        let used = self.used();
        // Read later than what is used: a value that came in between makes what is fixed look smaller, and the command is
        // tried again.
        used.saturating_sub(self.counts.values.load(Ordering::Relaxed))
    }

    /// Whether tombstones have so much memory that it is worth to wait for it.
    fn has_tombstones(&self) -> bool {
        let bytes = self.counts.tombstones.load(Ordering::Relaxed).saturating_mul(ENTRY_BYTES);
        bytes > self.bytes_max / TOMBSTONES_PART && !self.gives_up.load(Ordering::Relaxed)
    }

    /// Whether the memory of tombstones is needed, now or soon: logs are to be cleaned for it.
    pub(crate) fn is_short_of_tombstones(&self) -> bool {
        self.used() > self.low_bytes() && self.fixed_bytes() > self.low_bytes() && self.has_tombstones()
    }

    /// Whether commands that write wait until tombstones were taken out.
    pub(crate) fn waits_for_tombstones(&self) -> bool {
        self.used() > self.bytes_max && self.fixed_bytes() > self.bytes_max && self.has_tombstones()
    }

    pub(crate) fn set_giving_up(&self, gives_up: bool) {
        self.gives_up.store(gives_up, Ordering::Relaxed);
    }

    /// It has become so much more; what has become less wraps.
    pub(crate) fn count(&self, more: Sizes) {
        let Counts { used, values, away, away_bytes, tombstones } = &*self.counts;
        let counts = [
            (used, more.used),
            (values, more.values),
            (away, more.away),
            (away_bytes, more.away_bytes),
            (tombstones, more.tombstones),
        ];
        for (count, more) in counts {
            // Most changes are none of most counts.
            if more != 0 {
                count.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// All that there is will be given back in steps, but for so many bytes. Nobody changes anything meanwhile.
    pub(crate) fn all_goes(&self, but_bytes: usize) {
        let Counts { used, values, away, away_bytes, tombstones } = &*self.counts;
        tombstones.store(0, Ordering::Relaxed);
        values.store(used.load(Ordering::Relaxed).saturating_sub(but_bytes), Ordering::Relaxed);
        away.store(0, Ordering::Relaxed);
        away_bytes.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_waits_for_values_and_is_refused_for_what_is_fixed() {
        let memory = Memory::new(1000);
        memory.count(Sizes { used: 900, values: 300, ..Sizes::default() });
        assert_eq!(memory.admit(Purpose::Writing), Ok(()));
        memory.count(Sizes { used: 200, values: 200, ..Sizes::default() });
        assert_eq!(memory.admit(Purpose::Writing), Err(NoRoom::Yet));
        memory.count(Sizes::default() - Sizes { used: 500, values: 500, ..Sizes::default() });
        assert_eq!((memory.admit(Purpose::Writing), memory.sizes().used), (Ok(()), 600));
        memory.count(Sizes { used: 500, values: 50, ..Sizes::default() });
        assert_eq!(memory.admit(Purpose::Writing), Err(NoRoom::Full));
        memory.count(Sizes { tombstones: 1, ..Sizes::default() });
        assert!(memory.admit(Purpose::Writing) == Err(NoRoom::Yet) && memory.waits_for_tombstones());
        memory.set_giving_up(true);
        assert!(memory.admit(Purpose::Writing) == Err(NoRoom::Full) && !memory.waits_for_tombstones());
    }

    #[test]
    fn what_takes_away_is_never_refused_and_what_keeps_late() {
        let memory = Memory::new(800);
        memory.count(Sizes { used: 801, ..Sizes::default() });
        let admitted = |purpose| memory.admit(purpose);
        assert_eq!((admitted(Purpose::Writing), admitted(Purpose::Keeping)), (Err(NoRoom::Full), Ok(())));
        memory.count(Sizes { used: 100, values: 1, ..Sizes::default() });
        assert_eq!((admitted(Purpose::Keeping), admitted(Purpose::Removing)), (Err(NoRoom::Yet), Ok(())));
        memory.count(Sizes { used: 1, ..Sizes::default() });
        assert_eq!((admitted(Purpose::Keeping), admitted(Purpose::Removing)), (Err(NoRoom::Full), Ok(())));
        let unlimited = Memory::new(usize::MAX);
        assert_eq!(unlimited.admit(Purpose::Keeping), Ok(()));
    }

    #[test]
    fn differences_wrap() {
        let (one, other) = (Sizes { used: 1, away: 5, ..Sizes::default() }, Sizes { used: 3, ..Sizes::default() });
        let memory = Memory::new(usize::MAX);
        memory.count(other);
        memory.count(one - other);
        assert_eq!(memory.sizes(), one);
    }
}
