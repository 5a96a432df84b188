//! What one thread measures: latencies by operation, faults by kind, connections, system calls.
//!
//! Everything is allocated and touched before the clock starts; recording allocates nothing unless a fault
//! is described. No socket and no clock in here.

pub(crate) mod fault;
pub(crate) mod latencies;
pub(crate) mod run;
pub(crate) mod running;
pub(crate) mod sink;
pub(crate) mod tally;

pub(crate) use self::fault::{End, Fault, Faults};
pub(crate) use self::latencies::Latencies;
pub(crate) use self::sink::Sink;

use self::tally::{Tally, TallyKind};

/// How many faults of a thread are described in words.
const NOTES_MAX: usize = 10;

/// What a protocol counts beside replies and faults.
pub(crate) trait Counters: Default + Clone + std::fmt::Debug + Send {
    /// Adds what another thread counted.
    fn merge(&mut self, other: &Self);
}

impl Counters for () {
    fn merge(&mut self, _other: &()) {}
}

/// System calls on the connections.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Calls {
    pub(crate) sends: u64,
    pub(crate) receives: u64,
    /// The most replies that one receive returned.
    pub(crate) replies_per_receive_max: u64,
}

/// Something that was wrong, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    /// CLOCK_MONOTONIC.
    pub(crate) at_ns: u64,
    pub(crate) connection: u32,
    pub(crate) text: String,
}

/// What became of connections: `attempted = established + not_established`, and `established` is the sum of `ends`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Connections {
    pub(crate) attempted: u64,
    pub(crate) established: u64,
    /// Before the end of the time that counts.
    pub(crate) established_in_time: u64,
    pub(crate) not_established: u64,
    pub(crate) ends: Tally<End>,
    /// Those that brought bytes for which nothing was outstanding.
    pub(crate) surplus: u64,
    /// Those that the server was asked to close and did not within the time limit.
    pub(crate) close_timeouts: u64,
}

/// The steps on the way to a response, each counted from the start of the request.
#[derive(Debug, Clone)]
pub(crate) struct Steps {
    /// To the connection; only of requests that opened one.
    pub(crate) connect: Latencies,
    pub(crate) first_byte: Latencies,
    /// First bytes before the end of the time that counts.
    pub(crate) first_byte_in_time: u64,
}

/// What one thread measured in one run: `started = answered + failed + unanswered + in flight`.
#[derive(Debug, Clone)]
pub(crate) struct Record<C> {
    /// Requests that were begun.
    pub(crate) started: u64,
    /// Requests with a right reply.
    pub(crate) answered: u64,
    /// Right replies before the end of the time that counts.
    pub(crate) answered_in_time: u64,
    /// Requests with a wrong reply, or without one.
    pub(crate) failed: u64,
    /// Requests that were in flight at the end, and given up.
    pub(crate) unanswered: u64,
    /// Of the right replies, by operation.
    pub(crate) latencies: Vec<Latencies>,
    /// Only where connections come and go.
    pub(crate) steps: Option<Box<Steps>>,
    pub(crate) connections: Connections,
    pub(crate) faults: Faults,
    /// Replies that came after a reply to a younger request of their connection.
    pub(crate) reordered: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) calls: Calls,
    /// The end of the time that counts for rates, CLOCK_MONOTONIC.
    pub(crate) until_ns: u64,
    /// When the last request was settled.
    pub(crate) last_ns: u64,
    /// The first few faults in words.
    pub(crate) notes: Vec<Note>,
    /// Why connections that were to last ended.
    pub(crate) failures: Vec<String>,
    /// What the protocol counts.
    pub(crate) counters: C,
}

impl<C: Counters> Record<C> {
    /// An empty record for so many operations; `steps` where connections come and go.
    pub(crate) fn new(operations: usize, steps: bool) -> Record<C> {
        let steps =
            steps.then(|| Steps { connect: Latencies::new(), first_byte: Latencies::new(), first_byte_in_time: 0 });
        Record {
            started: 0,
            answered: 0,
            answered_in_time: 0,
            failed: 0,
            unanswered: 0,
            latencies: (0..operations).map(|_| Latencies::new()).collect(),
            steps: steps.map(Box::new),
            connections: Connections::default(),
            faults: Faults::default(),
            reordered: 0,
            sent_bytes: 0,
            received_bytes: 0,
            calls: Calls::default(),
            until_ns: u64::MAX,
            last_ns: 0,
            notes: Vec::with_capacity(NOTES_MAX),
            failures: Vec::new(),
            counters: C::default(),
        }
    }

    /// Adds what another thread measured.
    pub(crate) fn merge(&mut self, other: &Record<C>) {
        self.started += other.started;
        self.answered += other.answered;
        self.answered_in_time += other.answered_in_time;
        self.failed += other.failed;
        self.unanswered += other.unanswered;
        for (mine, theirs) in self.latencies.iter_mut().zip(&other.latencies) {
            mine.merge(theirs);
        }
        if let (Some(mine), Some(theirs)) = (&mut self.steps, &other.steps) {
            mine.connect.merge(&theirs.connect);
            mine.first_byte.merge(&theirs.first_byte);
            mine.first_byte_in_time += theirs.first_byte_in_time;
        }
        self.connections.merge(&other.connections);
        self.faults.merge(&other.faults);
        self.reordered += other.reordered;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.calls.sends += other.calls.sends;
        self.calls.receives += other.calls.receives;
        let most = self.calls.replies_per_receive_max.max(other.calls.replies_per_receive_max);
        self.calls.replies_per_receive_max = most;
        self.last_ns = self.last_ns.max(other.last_ns);
        self.notes.extend(other.notes.iter().cloned());
        self.failures.extend(other.failures.iter().cloned());
        self.counters.merge(&other.counters);
    }

    /// Requests that were settled, whether by a right reply or not.
    #[inline]
    pub(crate) fn settled(&self) -> u64 {
        self.answered + self.failed
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> u64 {
        self.started - self.answered - self.failed - self.unanswered
    }

    /// Whether every reply was right, none is missing and no other bytes came.
    pub(crate) fn is_clean(&self) -> bool {
        self.faults.total() == 0 && self.failures.is_empty() && self.unanswered == 0 && self.connections.surplus == 0
    }

    /// A connection stands, `latency_ns` after the start of its first request.
    pub(crate) fn connected(&mut self, latency_ns: u64, now_ns: u64) {
        self.connections.established += 1;
        self.connections.established_in_time += u64::from(now_ns <= self.until_ns);
        if let Some(steps) = &mut self.steps {
            steps.connect.record(latency_ns);
        }
    }

    /// A request of this operation has its right reply.
    #[inline]
    pub(crate) fn answer(&mut self, operation: usize, latency_ns: u64, now_ns: u64) {
        self.answered += 1;
        self.answered_in_time += u64::from(now_ns <= self.until_ns);
        self.last_ns = now_ns;
        self.latencies[operation].record(latency_ns);
    }

    /// So many requests have failed for this reason.
    #[cold]
    pub(crate) fn fail(&mut self, fault: Fault, requests: u64, at: Moment, describe: impl FnOnce() -> String) {
        self.failed += requests;
        if requests > 0 {
            self.last_ns = at.now_ns;
            self.fault(fault, requests, at, describe);
        }
    }

    /// Counts `count` faults and describes them if few have been described so far.
    #[cold]
    pub(crate) fn fault(&mut self, fault: Fault, count: u64, at: Moment, describe: impl FnOnce() -> String) {
        self.faults.add(fault, count);
        self.note(at, || format!("{}: {}", fault.name(), describe()));
    }

    /// Something was wrong that is no fault of a reply.
    pub(crate) fn note(&mut self, at: Moment, describe: impl FnOnce() -> String) {
        if self.notes.len() < NOTES_MAX {
            self.notes.push(Note { at_ns: at.now_ns, connection: at.connection, text: describe() });
        }
    }

    /// Whether every request and every connection is accounted for exactly once, with `in_flight` requests and
    /// `connecting` and `open` connections still there.
    pub(crate) fn check(&self, in_flight: u64, connecting: u64, open: u64) -> Result<(), String> {
        let equal = |what: &str, have: u64, parts: u64| match have == parts {
            true => Ok(()),
            false => Err(format!("{what}: {have} are not {parts}")),
        };
        let connections = &self.connections;
        let settled = self.answered + self.failed + self.unanswered;
        equal("started requests and those accounted for", self.started, settled + in_flight)?;
        equal(
            "attempted connections and those accounted for",
            connections.attempted,
            connections.established + connections.not_established + connecting,
        )?;
        equal(
            "established connections and those that ended",
            connections.established,
            connections.ends.total() + open,
        )?;
        let measured = self.latencies.iter().map(Latencies::count).sum();
        equal("right replies and their latencies", self.answered, measured)?;
        let Some(steps) = &self.steps else { return Ok(()) };
        equal("connections and their latencies", connections.established, steps.connect.count())?;
        match steps.first_byte.count() >= self.answered {
            true => Ok(()),
            false => Err("more responses than first bytes".to_owned()),
        }
    }
}

impl Connections {
    fn merge(&mut self, other: &Connections) {
        self.attempted += other.attempted;
        self.established += other.established;
        self.established_in_time += other.established_in_time;
        self.not_established += other.not_established;
        self.ends.merge(&other.ends);
        self.surplus += other.surplus;
        self.close_timeouts += other.close_timeouts;
    }
}

/// When something happened, and on which connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    pub(crate) connection: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_bounded() {
        let mut record: Record<()> = Record::new(1, false);
        for i in 0..100 {
            record.fault(Fault::Corrupt, 1, Moment { now_ns: i, connection: 0 }, || format!("{i}"));
        }
        assert_eq!(record.faults.count(Fault::Corrupt), 100);
        assert_eq!(record.notes.len(), NOTES_MAX);
    }
}
