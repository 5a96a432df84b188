//! What the multiplexor is compared with.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::clock::Clock;
use crate::{Arrivals, Costs, Record};

/// One queue, first come first served.
pub(crate) fn ideal(workers: usize, arrivals: &Arrivals, record: &mut Record) {
    let mut free: BinaryHeap<_> = (0..workers).map(|_| Reverse(0)).collect();
    for (job, arrival) in arrivals.jobs.iter().enumerate() {
        let Some(Reverse(free_ns)) = free.pop() else { return };
        free.push(Reverse(record.begin(job, free_ns.max(arrival.arrived_ns), arrivals)));
    }
}

/// The segments, as events.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive {
        segment: usize,
    },
    /// A worker was woken, or is done with a message.
    Step {
        worker: usize,
    },
}

fn with_segments(arrivals: &Arrivals) -> Clock<Event> {
    let mut clock = Clock::new();
    for (segment, arrival) in arrivals.segments.iter().enumerate() {
        clock.plan(arrival.at_ns, Event::Arrive { segment });
    }
    clock
}

/// An event loop per worker: it reads a connection that has bytes, works on all it has read, and goes to the next.
pub(crate) fn pinned(workers: usize, costs: Costs, arrivals: &Arrivals, record: &mut Record) {
    #[derive(Clone, Default)]
    struct Loop {
        ready: VecDeque<usize>,
        read: VecDeque<usize>,
        awake: bool,
    }
    let mut loops = vec![Loop::default(); workers];
    let mut inboxes = vec![VecDeque::new(); arrivals.connections];
    let mut clock = with_segments(arrivals);
    while let Some((now_ns, event)) = clock.next() {
        match event {
            Event::Arrive { segment } => {
                let segment = &arrivals.segments[segment];
                let worker = segment.connection % workers;
                if inboxes[segment.connection].is_empty() {
                    loops[worker].ready.push_back(segment.connection);
                }
                inboxes[segment.connection].extend(segment.jobs.clone());
                if !std::mem::replace(&mut loops[worker].awake, true) {
                    clock.plan(now_ns + costs.wake_ns, Event::Step { worker });
                }
            }
            Event::Step { worker } => {
                let own = &mut loops[worker];
                let mut at_ns = now_ns;
                if own.read.is_empty()
                    && let Some(connection) = own.ready.pop_front()
                {
                    at_ns += costs.call_ns;
                    own.read.append(&mut inboxes[connection]);
                }
                match own.read.pop_front() {
                    Some(job) => clock.plan(record.begin(job, at_ns, arrivals), Event::Step { worker }),
                    None => own.awake = false,
                }
            }
        }
    }
}

/// Messages that fill a socket's receive buffer: 212,992 bytes, charged with the segment each lies in (4 kB).
const KCM_BUFFER_MESSAGES: usize = 38;

/// net/kcm/kcmsock.c: a segment's messages go to the first of the sockets whose buffer has room, which is then the last
/// in turn. A full one is in turn again when it is empty.
pub(crate) fn kcm(workers: usize, costs: Costs, arrivals: &Arrivals, record: &mut Record) {
    #[derive(Clone, Default)]
    struct Socket {
        buffer: VecDeque<usize>,
        full: bool,
        awake: bool,
    }
    struct Mux {
        sockets: Vec<Socket>,
        turn: VecDeque<usize>,
        /// Messages for which no socket has room.
        held: VecDeque<usize>,
    }
    impl Mux {
        /// Hands out messages that came together. Returns the workers to wake.
        fn deliver(&mut self, jobs: impl Iterator<Item = usize>) -> Vec<usize> {
            let mut woken = Vec::new();
            let mut reserved = None;
            for job in jobs {
                let Some(socket) = reserved.or_else(|| self.turn.pop_front()) else {
                    self.held.push_back(job);
                    continue;
                };
                let own = &mut self.sockets[socket];
                own.buffer.push_back(job);
                own.full = own.buffer.len() >= KCM_BUFFER_MESSAGES;
                reserved = (!own.full).then_some(socket);
                if !std::mem::replace(&mut own.awake, true) {
                    woken.push(socket);
                }
            }
            self.turn.extend(reserved);
            woken
        }
    }
    let mut mux =
        Mux { sockets: vec![Socket::default(); workers], turn: (0..workers).collect(), held: VecDeque::new() };
    let mut clock = with_segments(arrivals);
    while let Some((now_ns, event)) = clock.next() {
        let woken = match event {
            Event::Arrive { segment } => {
                let mut held = std::mem::take(&mut mux.held);
                held.extend(arrivals.segments[segment].jobs.clone());
                mux.deliver(held.into_iter())
            }
            Event::Step { worker } => {
                let own = &mut mux.sockets[worker];
                match own.buffer.pop_front() {
                    Some(job) => {
                        let done_ns = record.begin(job, now_ns + costs.call_ns, arrivals);
                        clock.plan(done_ns, Event::Step { worker });
                    }
                    None => own.awake = false,
                }
                if own.buffer.is_empty() && std::mem::take(&mut own.full) {
                    mux.turn.push_back(worker);
                    let held = std::mem::take(&mut mux.held);
                    mux.deliver(held.into_iter())
                } else {
                    Vec::new()
                }
            }
        };
        for worker in woken {
            clock.plan(now_ns + costs.wake_ns, Event::Step { worker });
        }
    }
}
