//! Replies that do not leave yet, in the order in which they will.

use std::collections::VecDeque;

use crate::gates::{Gate, GateSet};
use crate::output::{Output, Spares};

/// Places, and marks, for which memory is kept: with all spares of a shard that is some 20 MiB.
const KEEP_MAX: usize = 128;

/// A place in the order of replies.
pub(super) struct Held {
    pub(super) ticket: u64,
    pub(super) output: Output,
    /// Answers that are still to come.
    pub(super) awaiting: u32,
    /// What must be durable before the output may leave.
    pub(super) gates: GateSet,
    /// The gate that the shard was told of.
    pub(super) named: Option<Gate>,
    /// What the output takes beyond its bytes, as it was counted last.
    pub(super) slack_bytes: usize,
    /// Bytes of it that have left.
    pub(super) left_bytes: usize,
}

/// From here on the bytes of a place wait for a gate more. Pipelined messages of a log have one each.
pub(super) struct Mark {
    /// Of the place.
    pub(super) ticket: u64,
    /// Since the place began.
    pub(super) at_bytes: usize,
    pub(super) gate: Gate,
}

impl Held {
    pub(super) fn new(ticket: u64, output: Output, awaiting: u32, gates: GateSet) -> Self {
        Self { ticket, output, awaiting, gates, named: None, slack_bytes: 0, left_bytes: 0 }
    }
}

/// The places of a connection: replies that wait for an earlier one, or for a gate. A connection has none of this while
/// nothing waits.
#[derive(Default)]
pub(crate) struct HeldReplies {
    pub(super) places: VecDeque<Held>,
    /// Where in these more must be durable: in order.
    pub(super) marks: VecDeque<Mark>,
    pub(super) bytes: usize,
    /// What these places take beyond the bytes of their replies.
    pub(super) slack_bytes: usize,
}

impl HeldReplies {
    /// Puts a place behind those that wait already. True if it is the first of all.
    pub(super) fn push(&mut self, held: Held, spares: &mut Spares) -> bool {
        self.bytes += held.output.memory_bytes();
        // One buffer for all replies behind the same place, however many there are.
        if let Some(last) = self.places.back_mut().filter(|last| held.awaiting == 0 && last.awaiting == 0) {
            let marked = self.marks.back().filter(|mark| mark.ticket == last.ticket).map(|mark| mark.gate);
            let covered = last.gates.covers(&held.gates) || marked.is_some_and(|gate| held.gates.is_covered_by(gate));
            if covered || held.gates.only().is_some() {
                if let Some(gate) = held.gates.only().filter(|_| !covered) {
                    let at_bytes = last.left_bytes + last.output.len();
                    self.marks.push_back(Mark { ticket: last.ticket, at_bytes, gate });
                }
                last.output.append(held.output, spares);
                self.count_slack(self.places.len() - 1);
                return false;
            }
        }
        self.places.push_back(held);
        self.count_slack(self.places.len() - 1);
        self.places.len() == 1
    }

    /// Takes a place away that is empty.
    pub(super) fn remove(&mut self, at: usize) {
        if let Some(held) = self.places.remove(at) {
            self.slack_bytes -= held.slack_bytes;
        }
    }

    /// Joins a place with the next one, if both wait for the same.
    pub(super) fn join(&mut self, at: usize, spares: &mut Spares) {
        let (Some(first), Some(second)) = (self.places.get(at), self.places.get(at + 1)) else { return };
        let marked = self.marks.binary_search_by_key(&second.ticket, |mark| mark.ticket).is_ok();
        if first.awaiting > 0 || second.awaiting > 0 || marked || !first.gates.covers(&second.gates) {
            return;
        }
        let Some(second) = self.places.remove(at + 1) else { return };
        self.slack_bytes -= second.slack_bytes;
        self.places[at].output.join(second.output, spares);
        self.count_slack(at);
    }

    /// Counts anew what a place takes beyond its bytes.
    pub(super) fn count_slack(&mut self, at: usize) {
        let place = &mut self.places[at];
        let slack_bytes = size_of::<Held>() + place.output.slack_bytes();
        self.slack_bytes = self.slack_bytes - place.slack_bytes + slack_bytes;
        place.slack_bytes = slack_bytes;
    }

    /// Bytes that it takes beyond those of the replies.
    pub(super) fn extra_bytes(&self) -> usize {
        self.slack_bytes + self.marks.len() * size_of::<Mark>()
    }

    /// False if it took so much memory that the allocator gets it back.
    pub(super) fn is_worth_keeping(&self) -> bool {
        self.places.capacity().max(self.marks.capacity()) <= KEEP_MAX
    }

    /// Throws the replies away, and leaves it as new.
    pub(super) fn clear(&mut self, spares: &mut Spares) {
        self.places.drain(..).for_each(|held| held.output.recycle(spares));
        self.marks.clear();
        (self.bytes, self.slack_bytes) = (0, 0);
    }
}
