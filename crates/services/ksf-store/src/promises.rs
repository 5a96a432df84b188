//! How far replies may tell of each log: what is durable there, together with all that it saw of other logs.
//!
//! A shard writes what it does to a log of its own, and what it does may depend on what another shard wrote a moment ago.
//! A reply about it leaves when both are durable. Recovery cuts logs by the same rule, so what was told is never cut.
//!
//! Two batches may have seen each other, so neither can wait for the other one's promise: the largest ends are looked for
//! that satisfy every link among them, beginning with everything that is durable.

use std::collections::VecDeque;

use crate::format::{Link, Lsn};

/// The batches of all logs that are durable and not promised.
#[derive(Debug, Default)]
pub struct Promises {
    logs: Vec<OfLog>,
}

#[derive(Debug, Default)]
struct OfLog {
    promised: Lsn,
    batches: VecDeque<Durable>,
}

#[derive(Debug)]
struct Durable {
    end: Lsn,
    links: Vec<Link>,
}

impl Promises {
    /// Logs that are promised up to these ends.
    pub fn new(ends: impl IntoIterator<Item = Lsn>) -> Self {
        let of_log = |promised| OfLog { promised, batches: VecDeque::new() };
        Self { logs: ends.into_iter().map(of_log).collect() }
    }

    /// How far replies may tell of a log.
    pub fn promised(&self, log: u16) -> Lsn {
        self.logs[usize::from(log)].promised
    }

    /// A batch of the log is durable, and everything before it.
    pub fn durable(&mut self, log: u16, end: Lsn, links: Vec<Link>) {
        self.logs[usize::from(log)].batches.push_back(Durable { end, links });
    }

    /// Promises what can be promised. Calls `moved` with each log of which that is more than before.
    pub fn advance(&mut self, mut moved: impl FnMut(u16, Lsn)) {
        // What saw nothing of another log waits for nothing.
        if self.logs.iter().all(|of_log| of_log.batches.iter().all(|batch| batch.links.is_empty())) {
            for (log, of_log) in (0..).zip(&mut self.logs) {
                if let Some(last) = of_log.batches.drain(..).next_back() {
                    of_log.promised = last.end;
                    moved(log, last.end);
                }
            }
            return;
        }
        // Of each log, the number of batches that can be promised: all at first.
        let mut counts: Vec<usize> = self.logs.iter().map(|of_log| of_log.batches.len()).collect();
        loop {
            let end = |log: usize, count: usize| {
                let of_log = &self.logs[log];
                count.checked_sub(1).map_or(of_log.promised, |last| of_log.batches[last].end)
            };
            let ends: Vec<Lsn> = counts.iter().enumerate().map(|(log, count)| end(log, *count)).collect();
            let is_there = |link: &Link| ends.get(usize::from(link.log)).is_some_and(|end| link.lsn <= *end);
            let mut cut = false;
            for (of_log, count) in self.logs.iter().zip(&mut counts) {
                let batches = of_log.batches.iter().take(*count);
                let whole = batches.take_while(|batch| batch.links.iter().all(is_there)).count();
                cut |= whole < *count;
                *count = whole;
            }
            if !cut {
                break;
            }
        }
        for (log, (of_log, count)) in self.logs.iter_mut().zip(counts).enumerate() {
            if let Some(last) = of_log.batches.drain(..count).next_back() {
                of_log.promised = last.end;
                moved(log as u16, last.end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(log: u16, lsn: u64) -> Link {
        Link { log, lsn: Lsn(lsn) }
    }

    fn advance(promises: &mut Promises) -> Vec<(u16, u64)> {
        let mut moved = Vec::new();
        promises.advance(|log, lsn| moved.push((log, lsn.0)));
        moved
    }

    #[test]
    fn a_batch_waits_for_what_it_saw() {
        let mut promises = Promises::new([Lsn(0); 3]);
        promises.durable(0, Lsn(10), vec![link(1, 5)]);
        promises.durable(0, Lsn(20), vec![]);
        assert_eq!(advance(&mut promises), []);
        promises.durable(1, Lsn(8), vec![link(2, 1)]);
        assert_eq!(advance(&mut promises), [], "what it saw saw something, too");
        promises.durable(2, Lsn(4), vec![]);
        assert_eq!(advance(&mut promises), [(0, 20), (1, 8), (2, 4)]);
        assert_eq!(promises.promised(1), Lsn(8));
    }

    #[test]
    fn batches_that_saw_each_other_are_promised_together() {
        let mut promises = Promises::new([Lsn(0); 2]);
        promises.durable(0, Lsn(10), vec![link(1, 10)]);
        assert_eq!(advance(&mut promises), []);
        promises.durable(1, Lsn(10), vec![link(0, 10)]);
        assert_eq!(advance(&mut promises), [(0, 10), (1, 10)]);
    }
}
