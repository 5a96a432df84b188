//! Returns memory to the machine after a burst.
//!
//! The allocator and the pool of buffers keep what was freed for the next requests. After a burst that is most of the
//! memory of a server, and no other program can use it.

use crate::limits::{Limits, Time};

/// Memory that must have been freed, or a part of the limits where that is less.
const FREED_BYTES_MIN: usize = 16 << 20;
const FREED_PART: usize = 16;
/// Shortest time between two returns: one takes some milliseconds for a large heap.
const INTERVAL_MS: u64 = 5_000;

/// When memory is returned: a sum has fallen to a quarter of the most that it was since the last time, and by a sixteenth of
/// the limits, or 16 MiB if that is less. At most every five seconds; and once more after that time, because other threads free
/// later than they say so.
#[derive(Debug, Default)]
pub struct GiveBack {
    /// Not before this time.
    after: Time,
    once_more: bool,
}

impl GiveBack {
    /// The time at which memory is to be returned, if there is any.
    pub fn due(&self, most_bytes: usize, bytes: usize, limits: &Limits) -> Option<Time> {
        (self.once_more || has_fallen(most_bytes, bytes, limits)).then_some(self.after)
    }

    /// True if memory is to be returned now: the caller frees what it keeps, calls [`trim`], and takes `bytes` for the most
    /// from now on.
    pub fn take(&mut self, most_bytes: usize, bytes: usize, limits: &Limits, now: Time) -> bool {
        let is_due = self.due(most_bytes, bytes, limits).is_some_and(|at| now >= at);
        if is_due {
            self.once_more = has_fallen(most_bytes, bytes, limits);
            self.after = now.plus_ms(INTERVAL_MS);
        }
        is_due
    }
}

fn has_fallen(most_bytes: usize, bytes: usize, limits: &Limits) -> bool {
    most_bytes - bytes >= freed_bytes_min(limits) && bytes <= most_bytes / 4
}

/// A burst up to small limits frees little, which is most of the memory of such a server nevertheless.
fn freed_bytes_min(limits: &Limits) -> usize {
    FREED_BYTES_MIN.min(limits.shard_bytes_max.saturating_add(limits.assembly_bytes_max) / FREED_PART)
}

/// Has the allocator keep freed memory, up to 4 MiB at the end of each of its heaps, until [`trim`]. Otherwise the machine gets such
/// an end back from 128 KiB on, and the next long reply takes it again, page by page: replies of 512 KiB took twice the CPU time.
/// Allocators other than glibc's stay as they are.
///
/// It is for the whole process, so it is for programs to call.
pub fn keep() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes no pointer and may be called at any time.
    unsafe {
        // From this length on memory is a mapping of its own: the greatest that glibc chooses by itself.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 4 << 20);
    }
}

/// Has the allocator return what is free. Does nothing where that is not glibc's.
pub fn trim() {
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
        let (mut give_back, limits) = (GiveBack::default(), Limits::default());
        assert!(!give_back.take(FREED_BYTES_MIN - 1, 0, &limits, Time(1)), "that is little");
        assert!(!give_back.take(FREED_BYTES_MIN, FREED_BYTES_MIN, &limits, Time(1)), "nothing was freed");
        assert!(give_back.take(FREED_BYTES_MIN, 0, &limits, Time(1)));
        assert!(!give_back.take(0, 0, &limits, Time(1)), "it was returned");
        let at = Time(1).plus_ms(INTERVAL_MS);
        assert!(give_back.take(0, 0, &limits, at), "what other threads freed meanwhile");
        assert_eq!(give_back.due(0, 0, &limits), None);
        let at = at.plus_ms(INTERVAL_MS);
        assert_eq!(give_back.due(FREED_BYTES_MIN, 0, &limits), Some(at));
        assert!(!give_back.take(FREED_BYTES_MIN, 0, &limits, Time(at.0 - 1)));
        assert!(give_back.take(FREED_BYTES_MIN, 0, &limits, at));
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn freed_memory_is_used_again_without_page_faults() {
        // minflt (proc_pid_stat(5)), the tenth; the second is a name in parentheses.
        let faults = || {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            stat.rsplit_once(") ").unwrap().1.split(' ').nth(7).unwrap().parse::<usize>().unwrap()
        };
        let use_pages = || {
            let before = faults();
            let blocks: Vec<Vec<u8>> = (0..4).map(|_| vec![1; 512 << 10]).collect();
            drop(std::hint::black_box(blocks));
            faults() - before
        };
        keep();
        let first = use_pages();
        let again = use_pages();
        assert!(first > 256 && again < 64, "{first} and {again} faults");
    }

    #[test]
    fn small_limits_have_small_bursts() {
        let limits = Limits { shard_bytes_max: 8 << 20, assembly_bytes_max: 4 << 20, ..Limits::default() };
        assert!(GiveBack::default().take(1 << 20, 0, &limits, Time(1)));
    }
}
