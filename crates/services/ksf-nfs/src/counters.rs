//! What the server counts of each procedure.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::procedure::Procedure;
use crate::status::Status;

const PROCEDURES: usize = Procedure::ALL.len();

/// Counters of all procedures, shared by all threads.
#[derive(Debug)]
pub(crate) struct Counters([Cells; PROCEDURES]);

/// A line of the cache each, so that threads that carry out other procedures do not wait.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cells {
    calls: AtomicU64,
    failed: AtomicU64,
    replayed: AtomicU64,
    total_us: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Cells::default()))
    }
}

/// What one procedure has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcedureCounts {
    /// The procedure.
    pub procedure: Procedure,
    /// Calls that were answered, from the cache of duplicates, too.
    pub calls: u64,
    /// Calls that were answered with another status than OK.
    pub failed: u64,
    /// Calls that were answered with the reply to an earlier try.
    pub replayed: u64,
    /// Time from the call to its answer, of all calls together, in microseconds.
    pub total_us: u64,
}

impl Counters {
    /// A call was answered after this time.
    pub(crate) fn answered(&self, procedure: Procedure, status: Status, took: Duration) {
        let cells = &self.0[procedure as usize];
        cells.calls.fetch_add(1, Ordering::Relaxed);
        if status != Status::OK {
            cells.failed.fetch_add(1, Ordering::Relaxed);
        }
        cells.total_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A call was answered with what an earlier try was answered.
    pub(crate) fn replayed(&self, procedure: Procedure) {
        let cells = &self.0[procedure as usize];
        cells.calls.fetch_add(1, Ordering::Relaxed);
        cells.replayed.fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted so far.
    pub(crate) fn read(&self) -> Vec<ProcedureCounts> {
        let read = |(procedure, cells): (&Procedure, &Cells)| ProcedureCounts {
            procedure: *procedure,
            calls: cells.calls.load(Ordering::Relaxed),
            failed: cells.failed.load(Ordering::Relaxed),
            replayed: cells.replayed.load(Ordering::Relaxed),
            total_us: cells.total_us.load(Ordering::Relaxed),
        };
        Procedure::ALL.iter().zip(&self.0).map(read).collect()
    }
}
