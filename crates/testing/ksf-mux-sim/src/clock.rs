//! What happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Events in the order of their times; those of the same time in the order in which they were planned.
pub(crate) struct Clock<E: Ord> {
    events: BinaryHeap<Reverse<(u64, u64, E)>>,
    planned: u64,
}

impl<E: Ord> Clock<E> {
    pub(crate) fn new() -> Self {
        Self { events: BinaryHeap::new(), planned: 0 }
    }

    pub(crate) fn plan(&mut self, at_ns: u64, event: E) {
        self.planned += 1;
        self.events.push(Reverse((at_ns, self.planned, event)));
    }

    pub(crate) fn next(&mut self) -> Option<(u64, E)> {
        self.events.pop().map(|Reverse((at_ns, _, event))| (at_ns, event))
    }
}
