//! Replies that wait until what they tell is durable.
//!
//! A service that writes a log numbers its records. A reply is marked with a [`Gate`]: the log, and the number that must
//! be durable before the reply may leave. The reply is written at once, into the connection's place for it, and costs no
//! message of its own; when the log's owner releases a number, every reply up to it may go, on all connections and all
//! shards.
//!
//! ```text
//!   shard 0: append record 7 ─► reply.gate(Gate { log 0, 7 })  ─► held in its connection
//!   shard 1: read what record 7 wrote ─► the same gate         ─► held in another connection
//!   shard 0: the write completes ─► Gates::release(log 0, 7)   ─► both leave; shard 1 is woken
//! ```
//!
//! A log is lost when its owner panics outside of a message: a commit may have been under way, so how far the log is
//! durable is unknown. A lost log releases nothing until the server starts again, and every connection whose reply waits
//! for it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Shards that one server may have, so that one word tells which of them wait for a log.
pub const SHARDS_MAX: usize = 64;

/// Logs that one server may have.
pub const LOGS_MAX: usize = 256;

/// Names a log of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId(u16);

impl LogId {
    /// The log's number, from 0.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What must be durable before a reply may leave: everything up to `number` in `log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    /// The log.
    pub log: LogId,
    /// The last record that the reply depends on, below 2^63. The first record of a log is 1.
    pub number: u64,
}

/// How far each log of a server is durable. Shared by all shards; every operation is a few atomic accesses.
#[derive(Debug)]
pub struct Gates {
    logs: Box<[Log]>,
    opened: AtomicUsize,
}

/// On a cache line of its own: each log is released by another shard.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Log {
    /// The last number that is durable, and [`LOST`].
    released: AtomicU64,
    /// Shards with a reply that waits for this log, a bit each.
    waiting: AtomicU64,
}

/// Set in a log's word when it is lost: its number stays as it is. One word for both, so that no release comes after the loss.
const LOST: u64 = 1 << 63;

/// Every log of the server is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server has at most {LOGS_MAX} logs")]
pub struct TooManyLogs;

impl Default for Gates {
    fn default() -> Self {
        Self { logs: (0..LOGS_MAX).map(|_| Log::default()).collect(), opened: AtomicUsize::new(0) }
    }
}

impl Gates {
    /// Gates without a log, to be shared.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A new log, of which nothing is released. Services open theirs by [`Turn::open_log`](crate::Turn::open_log), which
    /// remembers whose it is.
    ///
    /// # Errors
    ///
    /// [`TooManyLogs`] beyond [`LOGS_MAX`].
    pub(crate) fn open_log(&self) -> Result<LogId, TooManyLogs> {
        let take = |opened| (opened < LOGS_MAX).then_some(opened + 1);
        let log = self.opened.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).map_err(|_| TooManyLogs)?;
        Ok(LogId(log as u16))
    }

    /// The last number of `log` that is durable; 0 before the first.
    pub fn released(&self, log: LogId) -> u64 {
        self.logs[log.index()].released.load(Ordering::SeqCst) & !LOST
    }

    /// True when nothing of `log` will be released any more.
    pub fn is_lost(&self, log: LogId) -> bool {
        self.logs[log.index()].released.load(Ordering::SeqCst) & LOST != 0
    }

    /// True when a reply behind `gate` may leave.
    pub fn is_open(&self, gate: Gate) -> bool {
        self.released(gate.log) >= gate.number
    }

    /// Says that `log` is durable up to `number`. Returns the shards that have replies waiting for the log, a bit each;
    /// the caller wakes them. Numbers never go back: a smaller one changes nothing, and none does once the log is lost.
    #[must_use = "the shards that wait must be woken"]
    pub fn release(&self, log: LogId, number: u64) -> u64 {
        let log = &self.logs[log.index()];
        // That of a lost log is larger than any number.
        log.released.fetch_max(number & !LOST, Ordering::SeqCst);
        log.waiting.swap(0, Ordering::SeqCst)
    }

    /// Says that nothing of `log` will be released any more. Returns the shards that have replies waiting for it; the caller
    /// wakes them.
    #[must_use = "the shards that wait must be woken"]
    pub(crate) fn lose(&self, log: LogId) -> u64 {
        let log = &self.logs[log.index()];
        log.released.fetch_or(LOST, Ordering::SeqCst);
        log.waiting.swap(0, Ordering::SeqCst)
    }

    /// Has `shard` woken at the next release of the gate's log. False if the gate is open already or never opens, which may
    /// have happened meanwhile: then no release will wake it.
    pub fn wait(&self, gate: Gate, shard: usize) -> bool {
        // The bit before the look: a release after the look sees the bit, one before it is seen by the look.
        self.logs[gate.log.index()].waiting.fetch_or(1 << (shard % SHARDS_MAX), Ordering::SeqCst);
        !self.is_open(gate) && !self.is_lost(gate.log)
    }
}

/// Gates of one reply: at most one for each log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GateSet {
    first: Option<Gate>,
    /// Further logs. A reply that waits for several is rare; the vector allocates for those only.
    others: Vec<Gate>,
}

impl GateSet {
    pub(crate) fn add(&mut self, gate: Gate) {
        let same = self.first.iter_mut().chain(&mut self.others).find(|known| known.log == gate.log);
        if let Some(known) = same {
            known.number = known.number.max(gate.number);
        } else if self.first.is_none() {
            self.first = Some(gate);
        } else {
            self.others.push(gate);
        }
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        other.iter().for_each(|gate| self.add(gate));
    }

    /// True if everything that `other` waits for is waited for here, too.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        other.iter().all(|gate| self.iter().any(|own| own.log == gate.log && own.number >= gate.number))
    }

    /// True if there is nothing to wait for.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The gate, if there is one and no more.
    pub(crate) fn only(&self) -> Option<Gate> {
        self.first.filter(|_| self.others.is_empty())
    }

    /// True if all of it is waited for with this gate.
    pub(crate) fn is_covered_by(&self, gate: Gate) -> bool {
        self.iter().all(|own| own.log == gate.log && own.number <= gate.number)
    }

    /// One of the gates that are closed.
    pub(crate) fn closed(&self, gates: &Gates) -> Option<Gate> {
        self.iter().find(|gate| !gates.is_open(*gate))
    }

    /// True if one of the gates will never open.
    pub(crate) fn is_lost(&self, gates: &Gates) -> bool {
        self.iter().any(|gate| gates.is_lost(gate.log) && !gates.is_open(gate))
    }

    fn iter(&self) -> impl Iterator<Item = Gate> {
        self.first.iter().chain(&self.others).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_opens_with_its_number_and_stays_open() {
        let gates = Gates::new();
        let log = gates.open_log().unwrap();
        let gate = |number| Gate { log, number };
        assert!(gates.is_open(gate(0)) && !gates.is_open(gate(1)));
        assert_eq!(gates.release(log, 2), 0);
        assert!(gates.is_open(gate(2)) && !gates.is_open(gate(3)));
        assert_eq!(gates.release(log, 1), 0);
        assert_eq!(gates.released(log), 2);
    }

    #[test]
    fn a_release_names_the_shards_that_wait_once() {
        let gates = Gates::new();
        let (one, other) = (gates.open_log().unwrap(), gates.open_log().unwrap());
        assert!(gates.wait(Gate { log: one, number: 1 }, 0));
        assert!(gates.wait(Gate { log: one, number: 5 }, 3));
        assert!(gates.wait(Gate { log: other, number: 1 }, 2));
        assert_eq!(gates.release(one, 1), 0b1001);
        assert_eq!(gates.release(one, 5), 0, "shard 3 has to say again that it waits");
        assert!(!gates.wait(Gate { log: one, number: 5 }, 3), "it is open already");
        assert_eq!(gates.release(other, 1), 0b100);
    }

    #[test]
    fn a_lost_log_keeps_what_was_released_and_releases_nothing_more() {
        let gates = Gates::new();
        let (one, other) = (gates.open_log().unwrap(), gates.open_log().unwrap());
        let gate = |log, number| Gate { log, number };
        assert_eq!(gates.release(one, 2), 0);
        assert!(gates.wait(gate(one, 3), 1));
        assert_eq!(gates.lose(one), 0b10, "shard 1 hears of it");
        assert_eq!(gates.release(one, 3), 0);
        assert_eq!((gates.released(one), gates.is_lost(one), gates.is_lost(other)), (2, true, false));
        assert!(gates.is_open(gate(one, 2)) && !gates.is_open(gate(one, 3)));
        assert!(!gates.wait(gate(one, 3), 0), "nobody would wake it");
        let mut set = GateSet::default();
        set.add(gate(one, 2));
        set.add(gate(other, 1));
        assert!(!set.is_lost(&gates), "what was durable before is durable");
        set.add(gate(one, 3));
        assert!(set.is_lost(&gates));
    }

    #[test]
    fn logs_are_bounded() {
        let gates = Gates::new();
        (0..LOGS_MAX).for_each(|number| assert_eq!(gates.open_log().unwrap().index(), number));
        assert_eq!(gates.open_log(), Err(TooManyLogs));
    }

    #[test]
    fn a_set_keeps_the_last_number_of_each_log() {
        let gates = Gates::new();
        let (one, other) = (gates.open_log().unwrap(), gates.open_log().unwrap());
        let set = |numbers: &[(LogId, u64)]| {
            let mut set = GateSet::default();
            numbers.iter().for_each(|(log, number)| set.add(Gate { log: *log, number: *number }));
            set
        };
        let both = set(&[(one, 3), (other, 1), (one, 2)]);
        assert_eq!(both, set(&[(one, 3), (other, 1)]));
        assert!(both.covers(&set(&[(one, 2)])) && both.covers(&set(&[])) && !both.covers(&set(&[(other, 2)])));
        assert_eq!(both.closed(&gates), Some(Gate { log: one, number: 3 }));
        let _ = gates.release(one, 3);
        assert_eq!(both.closed(&gates), Some(Gate { log: other, number: 1 }));
        let _ = gates.release(other, 1);
        assert_eq!(both.closed(&gates), None);
    }
}
