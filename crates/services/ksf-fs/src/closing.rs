//! Descriptors released by a shard. A lane closes them: closing the last one of a removed file frees its blocks, which may wait
//! for the disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::descriptors::Gone;

/// Descriptors that a lane closes together.
const BATCH: usize = 64;
/// Most descriptors that wait to be closed, with those in the queue of a lane. Beyond that shards open nothing.
const WAITING_MAX: usize = 256;

/// Descriptors of one export that lanes have to close.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    next: Mutex<Vec<Gone>>,
    waiting: Arc<AtomicUsize>,
}

/// Descriptors for one job; dropping it closes them.
#[derive(Debug)]
pub(crate) struct Batch {
    gone: Vec<Gone>,
    waiting: Arc<AtomicUsize>,
}

impl Closing {
    /// False: too many descriptors wait.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < WAITING_MAX
    }

    /// Adds released descriptors. Returns all waiting ones when a lane should close them: they are enough for a job, or one is
    /// open for writing and prevents execution of its file.
    pub(crate) fn add(&self, gone: Gone) -> Option<Batch> {
        let count = gone.count();
        if count == 0 {
            return None;
        }
        self.waiting.fetch_add(count, Ordering::Relaxed);
        let is_urgent = gone.is_writable();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.push(gone);
        (is_urgent || next.len() >= BATCH).then(|| self.batch(std::mem::take(&mut *next)))
    }

    /// All waiting descriptors, after the last call of many.
    pub(crate) fn take(&self) -> Option<Batch> {
        let gone = std::mem::take(&mut *self.next.lock().unwrap_or_else(PoisonError::into_inner));
        (!gone.is_empty()).then(|| self.batch(gone))
    }

    fn batch(&self, gone: Vec<Gone>) -> Batch {
        Batch { gone, waiting: Arc::clone(&self.waiting) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let count = self.gone.iter().map(Gone::count).sum();
        self.gone.clear();
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn gone() -> Gone {
        Gone::of(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()))
    }

    #[test]
    fn what_waits_is_bounded_until_it_is_closed() {
        let closing = Closing::default();
        assert!(closing.add(Gone::default()).is_none() && closing.take().is_none());
        let batches: Vec<Batch> = (0..WAITING_MAX).filter_map(|_| closing.add(gone())).collect();
        assert_eq!(batches.len(), WAITING_MAX / BATCH);
        assert!(!closing.has_room(), "a lane has not closed them yet");
        drop(batches);
        assert!(closing.has_room());
        assert!(closing.add(gone()).is_none(), "the first of the next ones");
        assert_eq!(closing.take().unwrap().gone.len(), 1);
        assert_eq!(closing.waiting.load(Ordering::Relaxed), 0);
    }
}
