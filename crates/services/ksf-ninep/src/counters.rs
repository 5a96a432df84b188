//! What the server counts of each message.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ksf_proto::p9::Request;

/// Types of messages are below this number.
const KINDS: usize = 128;

/// Counters of all messages, shared by all threads.
#[derive(Debug)]
pub(crate) struct Counters {
    cells: [Cells; KINDS],
    tags_reused: AtomicU64,
}

/// A line of the cache each, so that threads that answer other messages do not wait.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cells {
    calls: AtomicU64,
    failed: AtomicU64,
    total_us: AtomicU64,
}

/// What was counted of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageCounts {
    /// Name of the message without its T: `walk`.
    pub name: &'static str,
    /// Requests that were answered.
    pub calls: u64,
    /// Of these with Rlerror.
    pub failed: u64,
    /// Time from the request to its answer, of all together, in microseconds.
    pub total_us: u64,
}

/// Names of all requests, in the order of their types.
pub fn message_names() -> impl Iterator<Item = &'static str> {
    Request::KINDS.iter().map(|(_, name)| *name)
}

impl Default for Counters {
    fn default() -> Self {
        Self { cells: std::array::from_fn(|_| Cells::default()), tags_reused: AtomicU64::new(0) }
    }
}

impl Counters {
    /// A request of this type was answered after this time.
    pub(crate) fn answered(&self, kind: u8, is_fine: bool, took: Duration) {
        let Some(cells) = self.cells.get(usize::from(kind)) else { return };
        cells.calls.fetch_add(1, Ordering::Relaxed);
        if !is_fine {
            cells.failed.fetch_add(1, Ordering::Relaxed);
        }
        cells.total_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A client used a tag that was in use.
    pub(crate) fn tag_reused(&self) {
        self.tags_reused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn tags_reused(&self) -> u64 {
        self.tags_reused.load(Ordering::Relaxed)
    }

    /// What was counted so far, in the order of the types.
    pub(crate) fn read(&self) -> Vec<MessageCounts> {
        let read = |(kind, name): &(u8, &'static str)| {
            let cells = self.cells.get(usize::from(*kind))?;
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let (calls, failed) = (count(&cells.calls), count(&cells.failed));
            Some(MessageCounts { name, calls, failed, total_us: count(&cells.total_us) })
        };
        Request::KINDS.iter().filter_map(read).collect()
    }
}
