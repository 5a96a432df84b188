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
    /// Bytes of it that have left, and how many of these are still in the output, at its beginning.
    pub(super) left_bytes: usize,
    pub(super) gone_bytes: usize,
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
        Self { ticket, output, awaiting, gates, named: None, slack_bytes: 0, left_bytes: 0, gone_bytes: 0 }
    }

    fn memory_bytes(&self) -> usize {
        self.output.memory_bytes() - self.gone_bytes
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
                    let at_bytes = last.left_bytes + last.output.len() - last.gone_bytes;
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

    /// Moves what is in front of a mark of the first place behind what is in `to`. The rest waits for the mark's gate.
    pub(super) fn split_first(&mut self, mark: &Mark, to: &mut Output, spares: &mut Spares) {
        let Some(first) = self.places.front_mut() else { return };
        let before = first.memory_bytes();
        first.output.move_front(mark.at_bytes - first.left_bytes, &mut first.gone_bytes, to, spares);
        self.bytes -= before - first.memory_bytes();
        (first.left_bytes, first.named) = (mark.at_bytes, None);
        first.gates = GateSet::default();
        first.gates.add(mark.gate);
        self.count_slack(0);
    }

    /// Moves all of the first place behind what is in `to`.
    pub(super) fn take_first(&mut self, to: &mut Output, spares: &mut Spares) {
        let Some(mut first) = self.places.pop_front() else { return };
        self.bytes -= first.memory_bytes();
        self.slack_bytes -= first.slack_bytes;
        if first.gone_bytes == 0 {
            return to.append(first.output, spares);
        }
        let bytes = first.output.len() - first.gone_bytes;
        first.output.move_front(bytes, &mut first.gone_bytes, to, spares);
        first.output.recycle(spares);
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
        let slack_bytes = size_of::<Held>() + place.output.slack_bytes() + place.gone_bytes;
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

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;
    use std::sync::Arc;

    use crate::connection::Connection;
    use crate::env::Env;
    use crate::framing::{Framing, LengthPrefix};
    use crate::gates::{Gate, LogId};
    use crate::limits::Limits;
    use crate::output::Piece;
    use crate::pool::{Chunk, Memory, Pool};
    use crate::service::{ConnKey, Message, Peer, Profile, Reply, Service};

    const REQUESTS: u64 = 1000;
    const LONG_BYTES: usize = 3000;

    /// Writes a record for each message, which says the number of it. A part of the replies are sent from where they lie.
    struct Log {
        log: LogId,
        long: fn(u64) -> bool,
    }

    impl Service for Log {
        crate::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("log", Framing::LengthPrefix(LengthPrefix::big_endian(4)))
        }

        fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
            let number = u64::from_be_bytes(message.bytes().try_into().unwrap());
            reply.gate(Gate { log: self.log, number });
            reply.chunk(Chunk::from_vec(body(number, self.long)));
        }
    }

    fn body(number: u64, long: fn(u64) -> bool) -> Vec<u8> {
        vec![number as u8; if long(number) { LONG_BYTES } else { 5 }]
    }

    fn framed(body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_be_bytes(), body].concat()
    }

    struct Bench {
        env: Env,
        conn: Box<Connection>,
        log: LogId,
        long: fn(u64) -> bool,
    }

    impl Bench {
        fn new(long: fn(u64) -> bool) -> Self {
            let limits = Limits { out_queue_bytes_max: 16 << 20, connection_bytes_max: 64 << 20, ..Limits::default() };
            let env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 8).unwrap()).unwrap();
            let log = env.gates.open_log().unwrap();
            let key = ConnKey { index: 0, generation: 0 };
            let conn = Connection::new(Arc::new(Log { log, long }), Peer::Unix, key, env.now).unwrap();
            Self { env, conn, log, long }
        }

        fn ask(&mut self, numbers: RangeInclusive<u64>) {
            let wire: Vec<u8> = numbers.flat_map(|number| framed(&number.to_be_bytes())).collect();
            self.conn.receive(Chunk::from_vec(wire), &mut self.env);
            assert_eq!(self.conn.held_replies(), 1, "pipelined replies share a place");
        }

        /// Releases one record, and takes the reply that leaves then.
        fn release(&mut self, number: u64) {
            let Self { env, conn, .. } = self;
            let _ = env.gates.release(self.log, number);
            conn.open_gates(env);
            let mut batch = conn.take_batch(env.now, &mut env.spares).unwrap();
            let expected = framed(&body(number, self.long));
            let mut slices = [&[][..]; 4];
            let filled = batch.slices(&mut slices);
            assert!(slices[..filled].concat() == expected, "reply {number}");
            batch.advance(expected.len(), &mut env.spares);
            batch.recycle(&mut env.spares);
            conn.sent(expected.len(), true, env);
        }

        fn end(&self) -> Option<(*const u8, Option<*const Piece>, usize)> {
            self.conn.held.as_ref().map(|held| held.places[0].output.end())
        }
    }

    /// A log that is released record by record, while as many replies wait as a peer pipelined: what is behind a gate that opens
    /// stays where it is, else each release costs what all that waits does.
    #[test]
    fn what_stays_behind_a_gate_is_not_moved_for_those_that_open() {
        for (name, long) in [("short", (|_| false) as fn(u64) -> bool), ("long", |_| true), ("both", |at| at % 3 == 0)]
        {
            let mut bench = Bench::new(long);
            bench.ask(1..=REQUESTS);
            let all_bytes = bench.conn.queued_bytes();
            let (mut moved_bytes, mut moved_pieces, mut all_pieces) = (0, 0, 0);
            for number in 1..=REQUESTS {
                let before = bench.end();
                bench.release(number);
                if let (Some((tail, piece, pieces)), Some((new_tail, new_piece, _))) = (before, bench.end()) {
                    moved_bytes += if new_tail == tail { 0 } else { bench.conn.queued_bytes() };
                    moved_pieces += if new_piece == piece { 0 } else { pieces };
                    all_pieces = all_pieces.max(pieces);
                }
            }
            assert_eq!((bench.conn.held_replies(), bench.conn.owed_bytes()), (0, 0));
            let moved = format!("{name}: {moved_bytes} of {all_bytes} bytes, {moved_pieces} of {all_pieces} pieces");
            assert!(moved_bytes <= 2 * all_bytes && moved_pieces <= 2 * all_pieces, "{moved}");
        }
    }

    #[test]
    fn a_place_that_is_never_empty_keeps_no_memory_of_what_has_left() {
        const AHEAD: u64 = 20;
        for long in [(|_| false) as fn(u64) -> bool, |at| at % 3 == 0] {
            let mut bench = Bench::new(long);
            bench.ask(1..=AHEAD);
            for number in 1..=10 * REQUESTS {
                bench.release(number);
                bench.ask(number + AHEAD..=number + AHEAD);
                assert!(bench.conn.owed_bytes() <= 40 << 10, "{} bytes at {number}", bench.conn.owed_bytes());
            }
        }
    }
}
