//! The requests in flight on one connection, and what a reply's identifier means.
//!
//! An identifier is a slot number and a generation, so that a reply is classified in constant time and
//! bounded memory, however long a request stays unanswered:
//!
//! ```text
//!   id = ((generation << slot_bits) | slot) ^ base       cut to id_bits
//! ```
//!
//! Slots are handed out first in, first out. With a power of two in flight and replies in order the identifiers
//! are therefore simply 0, 1, 2, ... as in the original rpctest. `base` makes the identifiers of successive UDP
//! sockets differ, so that a datagram that was late for its socket is not taken for a reply of the next.

/// What a reply's identifier turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The answer to a request in flight, which is now settled.
    Answer(Request),
    /// The request was answered before.
    Duplicate,
    /// The request had been given up as lost.
    Late,
    /// No such request was ever sent.
    Unknown,
}

/// A request that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// When its latency started to count, CLOCK_MONOTONIC.
    pub(crate) start_ns: u64,
    /// The how-manieth request of this connection it is, from 0.
    pub(crate) index: u64,
    /// What it asks for: whose histogram its latency goes to.
    pub(crate) operation: u8,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    request: Request,
    /// Generation of the request in this slot, or of the last one.
    generation: u64,
    /// How many requests were issued from this slot.
    issued: u64,
    /// The last generation that was given up, while its reply has not come after all.
    lost_generation: Option<u64>,
    live: bool,
}

impl Slot {
    const EMPTY: Slot = Slot {
        request: Request { start_ns: 0, index: 0, operation: 0 },
        generation: 0,
        issued: 0,
        lost_generation: None,
        live: false,
    };
}

/// The table of requests in flight.
#[derive(Debug)]
pub(crate) struct RequestTable {
    slots: Box<[Slot]>,
    /// Ring of free slot numbers: `free_len` of them from `free_head`.
    free: Box<[u32]>,
    free_head: usize,
    free_len: usize,
    /// For replies in order: the slot of the oldest request.
    oldest: usize,
    slot_bits: u32,
    id_mask: u32,
    base: u32,
    next_index: u64,
}

impl RequestTable {
    /// A table for up to `in_flight` requests whose identifiers have `id_bits` bits on the wire (at most 32).
    ///
    /// The caller makes sure that the slots fit the identifier: see [`RequestTable::most_in_flight`].
    pub(crate) fn new(in_flight: usize, id_bits: u32, base: u32) -> RequestTable {
        let slot_bits = in_flight.next_power_of_two().trailing_zeros();
        assert!(slot_bits <= id_bits && id_bits <= 32, "checked when the plan was made");
        let id_mask = u32::MAX >> (32 - id_bits);
        RequestTable {
            slots: vec![Slot::EMPTY; in_flight].into(),
            free: (0..in_flight as u32).collect(),
            free_head: 0,
            free_len: in_flight,
            oldest: 0,
            slot_bits,
            id_mask,
            base: base & id_mask,
            next_index: 0,
        }
    }

    /// Forgets all requests: a connection begins.
    pub(crate) fn reset(&mut self) {
        self.slots.fill(Slot::EMPTY);
        for (number, free) in self.free.iter_mut().enumerate() {
            *free = number as u32;
        }
        (self.free_head, self.free_len, self.oldest, self.next_index) = (0, self.slots.len(), 0, 0);
    }

    /// The most requests in flight that identifiers of `id_bits` can tell apart and still leave one bit of
    /// generation to recognise a duplicate.
    pub(crate) fn most_in_flight(id_bits: u32) -> usize {
        1 << (id_bits.min(32) - 1)
    }

    /// Requests in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free_len
    }

    /// Whether another request may be sent.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.free_len > 0
    }

    /// When the request began that replies in order answer next.
    #[inline]
    pub(crate) fn oldest_start_ns(&self) -> Option<u64> {
        let slot = &self.slots[self.oldest];
        slot.live.then_some(slot.request.start_ns)
    }

    /// Takes a slot for a new request. Must only be called when [`RequestTable::has_room`].
    #[inline]
    pub(crate) fn issue(&mut self, start_ns: u64, operation: u8) -> (u32, u64) {
        debug_assert!(self.has_room());
        let number = self.free[self.free_head];
        self.free_head += 1;
        if self.free_head == self.free.len() {
            self.free_head = 0;
        }
        self.free_len -= 1;
        let index = self.next_index;
        self.next_index += 1;
        let slot = &mut self.slots[number as usize];
        slot.generation = slot.issued;
        slot.issued += 1;
        slot.request = Request { start_ns, index, operation };
        slot.live = true;
        let raw = ((slot.generation << self.slot_bits) as u32 | number) & self.id_mask;
        (raw ^ self.base, index)
    }

    /// Looks a reply's identifier up and settles the request it answers.
    #[inline]
    pub(crate) fn settle(&mut self, id: u32) -> Settled {
        if id & !self.id_mask != 0 {
            return Settled::Unknown;
        }
        let raw = id ^ self.base;
        let number = raw & ((1u64 << self.slot_bits) - 1) as u32;
        let generation_mask = u64::from(self.id_mask >> self.slot_bits);
        let generation = u64::from(raw) >> self.slot_bits;
        let Some(slot) = self.slots.get_mut(number as usize) else { return Settled::Unknown };
        if slot.live && slot.generation & generation_mask == generation {
            let request = slot.request;
            self.release(number);
            return Settled::Answer(request);
        }
        if slot.lost_generation.is_some_and(|lost| lost & generation_mask == generation) {
            slot.lost_generation = None;
            return Settled::Late;
        }
        // How many generations back the reply is. What lies more than half the number space back is taken
        // for one that was never issued.
        let newest = slot.issued.wrapping_sub(1);
        let age = newest.wrapping_sub(generation) & generation_mask;
        if age < slot.issued && age <= generation_mask / 2 { Settled::Duplicate } else { Settled::Unknown }
    }

    /// Whether `id` belongs to a request in flight.
    pub(crate) fn is_live(&self, id: u32) -> bool {
        let raw = id ^ self.base;
        let number = raw & ((1u64 << self.slot_bits) - 1) as u32;
        let generation = u64::from(raw) >> self.slot_bits;
        let generation_mask = u64::from(self.id_mask >> self.slot_bits);
        id & !self.id_mask == 0
            && self
                .slots
                .get(number as usize)
                .is_some_and(|slot| slot.live && slot.generation & generation_mask == generation)
    }

    /// Settles the oldest request, for protocols whose replies come in order and carry no identifier.
    #[inline]
    pub(crate) fn settle_oldest(&mut self) -> Option<Request> {
        let number = self.oldest;
        let slot = &self.slots[number];
        if !slot.live {
            return None;
        }
        let request = slot.request;
        // First in, first out on both sides, so the slots are used round and round.
        self.oldest = if number + 1 == self.slots.len() { 0 } else { number + 1 };
        self.release(number as u32);
        Some(request)
    }

    /// Gives up every request that started before `deadline_ns`; returns how many.
    pub(crate) fn expire(&mut self, deadline_ns: u64) -> u64 {
        let mut expired = 0;
        for number in 0..self.slots.len() {
            let slot = &mut self.slots[number];
            if slot.live && slot.request.start_ns < deadline_ns {
                slot.lost_generation = Some(slot.generation);
                self.release(number as u32);
                expired += 1;
            }
        }
        expired
    }

    #[inline]
    fn release(&mut self, number: u32) {
        self.slots[number as usize].live = false;
        let mut tail = self.free_head + self.free_len;
        if tail >= self.free.len() {
            tail -= self.free.len();
        }
        self.free[tail] = number;
        self.free_len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answer(settled: Settled) -> u64 {
        match settled {
            Settled::Answer(request) => request.index,
            other => panic!("expected an answer, got {other:?}"),
        }
    }

    #[test]
    fn identifiers_count_up_when_replies_come_in_order() {
        let mut table = RequestTable::new(4, 32, 0);
        for expected in 0..100 {
            let (id, index) = table.issue(0, 0);
            assert_eq!((id, index), (expected, u64::from(expected)));
            assert_eq!(answer(table.settle(id)), index);
        }
    }

    #[test]
    fn a_second_reply_is_a_duplicate_however_late() {
        let mut table = RequestTable::new(2, 32, 0x1234_5678);
        let (first, _) = table.issue(0, 0);
        answer(table.settle(first));
        assert_eq!(table.settle(first), Settled::Duplicate);
        for _ in 0..1000 {
            let (id, _) = table.issue(0, 0);
            answer(table.settle(id));
        }
        assert_eq!(table.settle(first), Settled::Duplicate);
    }

    #[test]
    fn what_was_never_sent_is_unknown() {
        let mut table = RequestTable::new(3, 32, 0);
        assert_eq!(table.settle(0), Settled::Unknown, "nothing sent yet");
        let (id, _) = table.issue(0, 0);
        assert_eq!(table.settle(3), Settled::Unknown, "no such slot");
        assert_eq!(table.settle(id + 4), Settled::Unknown, "a later generation");
        assert_eq!(table.settle(id | 0x8000_0000), Settled::Unknown);
        answer(table.settle(id));
    }

    #[test]
    fn a_lost_request_is_late_once_then_a_duplicate() {
        let mut table = RequestTable::new(1, 32, 9);
        let (id, _) = table.issue(100, 0);
        assert_eq!(table.expire(100), 0);
        assert_eq!(table.expire(101), 1);
        let (next, _) = table.issue(200, 0);
        assert_eq!(table.settle(id), Settled::Late);
        assert_eq!(table.settle(id), Settled::Duplicate);
        answer(table.settle(next));
    }

    #[test]
    fn narrow_identifiers_still_tell_duplicates() {
        // One byte on the wire: one slot bit for two in flight, seven bits of generation.
        let mut table = RequestTable::new(2, 8, 0x55);
        for _ in 0..1000 {
            let (id, _) = table.issue(0, 0);
            assert!(id < 256);
            answer(table.settle(id));
            assert_eq!(table.settle(id), Settled::Duplicate);
        }
        assert_eq!(table.settle(256), Settled::Unknown);
        assert_eq!(RequestTable::most_in_flight(8), 128);
    }

    proptest! {
        /// Against the obvious model: any order of answering, with replays of old identifiers in between.
        #[test]
        fn agrees_with_a_model(
            slots in 1usize..20,
            base: u32,
            steps in proptest::collection::vec((0u8..3, any::<usize>()), 1..400),
        ) {
            let mut table = RequestTable::new(slots, 32, base);
            let mut live: Vec<(u32, u64)> = Vec::new();
            let mut done: Vec<u32> = Vec::new();
            for (action, pick) in steps {
                match action {
                    0 if table.has_room() => live.push(table.issue(1, 0)),
                    1 if !live.is_empty() => {
                        let (id, index) = live.swap_remove(pick % live.len());
                        prop_assert_eq!(answer(table.settle(id)), index);
                        done.push(id);
                    }
                    2 if !done.is_empty() => {
                        let id = done[pick % done.len()];
                        prop_assert_eq!(table.settle(id), Settled::Duplicate);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.in_flight(), live.len());
                prop_assert_eq!(table.has_room(), live.len() < slots);
            }
        }

        #[test]
        fn ordered_settling_returns_requests_in_order(slots in 1usize..9, plan in proptest::collection::vec(any::<bool>(), 1..200)) {
            let mut table = RequestTable::new(slots, 32, 0);
            let mut expected = 0;
            for send in plan {
                if send && table.has_room() {
                    table.issue(0, 0);
                } else if let Some(request) = table.settle_oldest() {
                    prop_assert_eq!(request.index, expected);
                    expected += 1;
                }
            }
        }
    }
}
