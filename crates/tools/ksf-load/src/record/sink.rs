//! What a protocol tells its findings to while it reads received bytes.

use crate::drive::table::{Request, RequestTable, Settled};
use crate::record::{Counters, Fault, Moment, Record};

/// What one connection brought.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Share {
    /// Right replies.
    pub(crate) answered: u64,
    /// Of their latencies.
    pub(crate) sum_ns: u128,
    /// The youngest request that was answered, plus one.
    pub(crate) youngest: u64,
    /// A part of the reply to the oldest request is here.
    pub(crate) begun: bool,
}

/// What a protocol tells its findings to while it reads received bytes.
pub(crate) struct Sink<'a, C> {
    table: &'a mut RequestTable,
    share: &'a mut Share,
    record: &'a mut Record<C>,
    /// When the bytes were received.
    moment: Moment,
    /// Set when the stream cannot be read any further.
    broken: bool,
}

impl<'a, C: Counters> Sink<'a, C> {
    #[inline]
    pub(crate) fn new(
        table: &'a mut RequestTable,
        share: &'a mut Share,
        record: &'a mut Record<C>,
        moment: Moment,
    ) -> Sink<'a, C> {
        Sink { table, share, record, moment, broken: false }
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
        self.fault(kind, || format!("reply to request {id:#x}, which {meaning}"));
        None
    }

    /// Like [`settle`](Sink::settle), but believes only the identifier of a request in flight and counts nothing.
    pub(crate) fn settle_if_live(&mut self, id: u32) -> Option<Request> {
        if self.table.is_live(id) { self.settle(id) } else { None }
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

    /// A part of the reply to the oldest request is here.
    pub(crate) fn begin_reply(&mut self) {
        let now_ns = self.moment.now_ns;
        let Some(start_ns) = self.table.oldest_start_ns() else { return };
        if std::mem::replace(&mut self.share.begun, true) {
            return;
        }
        if let Some(steps) = &mut self.record.steps {
            steps.first_byte.record(now_ns.saturating_sub(start_ns));
            steps.first_byte_in_time += u64::from(now_ns <= self.record.until_ns);
        }
    }

    /// The request was answered correctly.
    #[inline]
    pub(crate) fn complete(&mut self, request: Request) {
        let latency_ns = self.moment.now_ns.saturating_sub(request.start_ns);
        self.share.begun = false;
        self.share.answered += 1;
        self.share.sum_ns += u128::from(latency_ns);
        self.record.answer(request.operation.into(), latency_ns, self.moment.now_ns);
    }

    /// The request was answered, but wrongly. Its latency does not count.
    pub(crate) fn reject(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.share.begun = false;
        self.record.fail(kind, 1, self.moment, describe);
    }

    /// A request was answered wrongly, and that has been counted as a fault before.
    pub(crate) fn settled_wrong(&mut self) {
        self.record.failed += 1;
        self.record.last_ns = self.moment.now_ns;
    }

    /// Something arrived that answers no request.
    pub(crate) fn fault(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.record.fault(kind, 1, self.moment, describe);
    }

    /// The stream cannot be read any further.
    pub(crate) fn break_off(&mut self, kind: Fault, describe: impl FnOnce() -> String) {
        self.fault(kind, describe);
        self.broken = true;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// What the protocol counts.
    pub(crate) fn counters(&mut self) -> &mut C {
        &mut self.record.counters
    }

    #[inline]
    fn note_order(&mut self, request: &Request) {
        self.record.reordered += u64::from(request.index < self.share.youngest);
        self.share.youngest = self.share.youngest.max(request.index + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_overtaken_by_a_younger_one_counts_as_reordered() {
        let (mut table, mut share) = (RequestTable::new(4, 32, 0), Share::default());
        let mut record: Record<()> = Record::new(1, false);
        let ids: Vec<u32> = (0..4).map(|_| table.issue(0, 0).0).collect();
        let moment = Moment { now_ns: 5, connection: 0 };
        let mut sink = Sink::new(&mut table, &mut share, &mut record, moment);
        for at in [0, 2, 1, 3] {
            let request = sink.settle(ids[at]).unwrap();
            sink.complete(request);
        }
        assert_eq!((record.reordered, record.answered), (1, 4));
    }
}
