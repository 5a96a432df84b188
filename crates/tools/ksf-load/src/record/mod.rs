//! What one thread measures: latencies, faults by kind, system calls.
//!
//! Everything is allocated and touched before the clock starts; recording allocates nothing unless a fault
//! is described.

pub(crate) mod fault;
pub(crate) mod stats;
pub(crate) mod tally;

use hdrhistogram::Histogram;

use crate::drive::table::{Request, Settled, Table};
use crate::record::fault::{Fault, Faults};
use crate::record::tally::Kind;

/// The largest latency the histogram tells apart; larger ones are counted there. One hour in nanoseconds.
const LATENCY_NS_MAX: u64 = 3600 * 1_000_000_000;

/// How many faults of a thread are described in words.
const NOTES_MAX: usize = 5;

/// A latency distribution in nanoseconds: three significant digits, with the extremes exact.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    pub(crate) histogram: Histogram<u64>,
    pub(crate) min_ns: u64,
    pub(crate) max_ns: u64,
    pub(crate) sum_ns: u128,
}

impl Latencies {
    /// An empty distribution whose memory has been touched, so that the measurement meets no page fault.
    pub(crate) fn new() -> Latencies {
        let mut histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are valid constants");
        // Memory from the allocator may not be mapped yet; resetting writes every counter.
        histogram.reset();
        Latencies { histogram, min_ns: u64::MAX, max_ns: 0, sum_ns: 0 }
    }

    #[inline]
    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.histogram.saturating_record(latency_ns);
        self.min_ns = self.min_ns.min(latency_ns);
        self.max_ns = self.max_ns.max(latency_ns);
        self.sum_ns += u128::from(latency_ns);
    }

    pub(crate) fn merge(&mut self, other: &Latencies) {
        self.histogram.add(&other.histogram).expect("all histograms have the same bounds");
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.sum_ns += other.sum_ns;
    }

    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.histogram.is_empty()
    }

    /// Smallest latency in nanoseconds, 0 if there is none.
    pub(crate) fn min(&self) -> u64 {
        match self.is_empty() {
            true => 0,
            false => self.min_ns,
        }
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        match self.count() {
            0 => 0.0,
            n => self.sum_ns as f64 / n as f64,
        }
    }

    /// The latency in nanoseconds that `percent` of the replies did not exceed: the floor of its bucket, as in
    /// the originals, but never outside the exact extremes.
    pub(crate) fn at_percent(&self, percent: f64) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let value = self.histogram.value_at_quantile(percent / 100.0);
        self.histogram.lowest_equivalent(value).clamp(self.min_ns, self.max_ns)
    }
}

/// What one thread measured in one run.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) latencies: Latencies,
    pub(crate) faults: Faults,
    /// Replies that were settled, whether right or wrong.
    pub(crate) settled: u64,
    /// Replies that came after a reply to a younger request.
    pub(crate) reordered: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) send_calls: u64,
    pub(crate) receive_calls: u64,
    /// The most replies that one receive returned: 1 by the method, more with `--batch`.
    pub(crate) replies_per_receive_max: u64,
    /// The first few faults in words.
    pub(crate) notes: Vec<String>,
    youngest_settled: u64,
}

impl Record {
    pub(crate) fn new() -> Record {
        Record {
            latencies: Latencies::new(),
            faults: Faults::default(),
            settled: 0,
            reordered: 0,
            sent_bytes: 0,
            received_bytes: 0,
            send_calls: 0,
            receive_calls: 0,
            replies_per_receive_max: 0,
            notes: Vec::with_capacity(NOTES_MAX),
            youngest_settled: 0,
        }
    }

    /// Counts `n` faults and describes them if few have been described so far.
    #[cold]
    pub(crate) fn fault(&mut self, kind: Fault, n: u64, describe: impl FnOnce() -> String) {
        self.faults.add(kind, n);
        if n > 0 && self.notes.len() < NOTES_MAX {
            self.notes.push(format!("{}: {}", kind.name(), describe()));
        }
    }
}

/// What a protocol reports its findings to while it reads received bytes.
pub(crate) struct Sink<'a> {
    table: &'a mut Table,
    record: &'a mut Record,
    /// When the bytes were received, CLOCK_MONOTONIC.
    now_ns: u64,
    /// Set when the stream cannot be read any further.
    broken: bool,
}

impl<'a> Sink<'a> {
    #[inline]
    pub(crate) fn new(table: &'a mut Table, record: &'a mut Record, now_ns: u64) -> Sink<'a> {
        Sink { table, record, now_ns, broken: false }
    }

    /// Finds the request a reply answers; counts duplicates, late and unknown replies.
    #[inline]
    pub(crate) fn settle(&mut self, id: u32) -> Option<Request> {
        let (kind, meaning) = match self.table.settle(id) {
            Settled::Answer(request) => {
                self.note_order(&request);
                return Some(request);
            }
            Settled::Duplicate => (Fault::Duplicate, "was answered before"),
            Settled::Late => (Fault::Late, "had been given up as lost"),
            Settled::Unknown => (Fault::Unknown, "was never sent"),
        };
        self.record.fault(kind, 1, || format!("reply to request {id:#x}, which {meaning}"));
        None
    }

    /// Like [`settle`](Sink::settle), but believes only the identifier of a request in flight and counts nothing.
    pub(crate) fn settle_if_live(&mut self, id: u32) -> Option<Request> {
        match self.table.is_live(id) {
            true => self.settle(id),
            false => None,
        }
    }

    /// The oldest request in flight, for protocols that answer in order.
    #[inline]
    pub(crate) fn settle_oldest(&mut self) -> Option<Request> {
        self.table.settle_oldest()
    }

    /// Whether a reply is awaited at all.
    #[inline]
    pub(crate) fn is_awaiting(&self) -> bool {
        self.table.in_flight() > 0
    }

    /// The request was answered correctly.
    #[inline]
    pub(crate) fn complete(&mut self, request: Request) {
        self.record.settled += 1;
        self.record.latencies.record(self.now_ns.saturating_sub(request.start_ns));
    }

    /// The request was answered, but wrongly. Its latency does not count.
    pub(crate) fn reject(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.settled_wrong();
        self.record.fault(kind, 1, describe);
    }

    /// A request was answered wrongly, and that has been counted as a fault before.
    pub(crate) fn settled_wrong(&mut self) {
        self.record.settled += 1;
    }

    /// Something arrived that answers no request.
    pub(crate) fn fault(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.record.fault(kind, 1, describe);
    }

    /// The stream cannot be read any further.
    pub(crate) fn break_off(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.record.fault(kind, 1, describe);
        self.broken = true;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    #[inline]
    fn note_order(&mut self, request: &Request) {
        if request.index < self.record.youngest_settled {
            self.record.reordered += 1;
        } else {
            self.record.youngest_settled = request.index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_stay_between_the_exact_extremes() {
        let mut latencies = Latencies::new();
        assert_eq!((latencies.min(), latencies.at_percent(50.0)), (0, 0));
        for ns in [1_234_567, 2_000_001, 7_654_321] {
            latencies.record(ns);
        }
        assert_eq!(latencies.at_percent(0.0), 1_234_567);
        assert_eq!(latencies.min(), 1_234_567);
        assert_eq!(latencies.max_ns, 7_654_321);
        let median = latencies.at_percent(50.0);
        assert!((1_998_000..=2_000_001).contains(&median), "{median}");
        assert!((latencies.mean_ns() - 3_629_629.67).abs() < 0.01);
    }

    #[test]
    fn a_latency_beyond_the_range_is_counted() {
        let mut latencies = Latencies::new();
        latencies.record(u64::MAX);
        assert_eq!(latencies.count(), 1);
        assert_eq!(latencies.max_ns, u64::MAX);
    }

    #[test]
    fn notes_are_bounded() {
        let mut record = Record::new();
        for i in 0..100 {
            record.fault(Fault::Corrupt, 1, || format!("{i}"));
        }
        assert_eq!(record.faults.count(Fault::Corrupt), 100);
        assert_eq!(record.notes.len(), NOTES_MAX);
    }

    #[test]
    fn a_reply_overtaken_by_a_younger_one_counts_as_reordered() {
        let mut table = Table::new(4, 32, 0);
        let mut record = Record::new();
        let ids: Vec<u32> = (0..4).map(|_| table.issue(0).0).collect();
        let mut sink = Sink::new(&mut table, &mut record, 5);
        for at in [0, 2, 1, 3] {
            let request = sink.settle(ids[at]).unwrap();
            sink.complete(request);
        }
        assert_eq!(record.reordered, 1);
        assert_eq!(record.settled, 4);
    }
}
