//! Returns memory to the machine after a burst.
//!
//! The allocator and the pool of buffers keep what was freed for the next requests. After a burst that is most of the
//! memory of a server, and no other program can use it.

use crate::budget::Budget;
use crate::limits::{Limits, Time};

/// Memory that must have been freed, or a part of the limits where that is less.
const FREED_BYTES_MIN: usize = 16 << 20;
const FREED_PART: usize = 16;
/// Shortest time between two returns: one takes some milliseconds for a large heap.
const INTERVAL_MS: u64 = 5_000;

/// When a shard returns memory: its sum has fallen to a quarter of the most that it was since the last time, and by
/// [`freed_bytes_min`].
#[derive(Debug, Default)]
pub(super) struct GiveBack {
    /// Not before this time.
    after: Time,
}

impl GiveBack {
    /// The time at which memory is to be returned, if there is any.
    pub(super) fn due(&self, budget: &Budget, limits: &Limits) -> Option<Time> {
        let (most_bytes, bytes) = (budget.most_bytes(), budget.bytes());
        (most_bytes - bytes >= freed_bytes_min(limits) && bytes <= most_bytes / 4).then_some(self.after)
    }

    /// True if memory is to be returned now. The next time is [`INTERVAL_MS`] later at the soonest.
    pub(super) fn take(&mut self, budget: &mut Budget, limits: &Limits, now: Time) -> bool {
        let is_due = self.due(budget, limits).is_some_and(|at| now >= at);
        if is_due {
            budget.forget_most();
            self.after = now.plus_ms(INTERVAL_MS);
        }
        is_due
    }
}

/// A burst up to small limits frees little, which is most of the memory of such a server nevertheless.
fn freed_bytes_min(limits: &Limits) -> usize {
    FREED_BYTES_MIN.min(limits.shard_bytes_max.saturating_add(limits.assembly_bytes_max) / FREED_PART)
}

/// Has the allocator return what is free. Does nothing where that is not glibc's.
pub(super) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes no pointer, may be called from any thread, and touches free memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_once_after_a_burst_and_not_again_at_once() {
        let (mut budget, mut give_back, limits) = (Budget::default(), GiveBack::default(), Limits::default());
        let burst = |budget: &mut Budget, bytes| {
            budget.add_input(bytes);
            budget.remove_input(bytes);
        };
        burst(&mut budget, FREED_BYTES_MIN - 1);
        assert!(!give_back.take(&mut budget, &limits, Time(1)), "that is little");
        budget.add_input(FREED_BYTES_MIN);
        assert!(!give_back.take(&mut budget, &limits, Time(1)), "nothing was freed");
        budget.remove_input(FREED_BYTES_MIN);
        assert!(give_back.take(&mut budget, &limits, Time(1)));
        assert!(!give_back.take(&mut budget, &limits, Time(1)), "it was returned");
        burst(&mut budget, FREED_BYTES_MIN);
        let at = Time(1).plus_ms(INTERVAL_MS);
        assert_eq!(give_back.due(&budget, &limits), Some(at));
        assert!(!give_back.take(&mut budget, &limits, Time(at.0 - 1)));
        assert!(give_back.take(&mut budget, &limits, at));
    }

    #[test]
    fn small_limits_have_small_bursts() {
        let limits = Limits { shard_bytes_max: 8 << 20, assembly_bytes_max: 4 << 20, ..Limits::default() };
        let (mut budget, mut give_back) = (Budget::default(), GiveBack::default());
        budget.add_input(1 << 20);
        budget.remove_input(1 << 20);
        assert!(give_back.take(&mut budget, &limits, Time(1)));
    }
}
