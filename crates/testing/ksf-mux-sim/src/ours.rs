//! The multiplexor: its scheduler, with what `mux.rs` and `socket.rs` do around it in simulated time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ksf_mux::cost::CostEstimate;
use ksf_mux::scheduler::{OrderedQueue, Parked, Scheduler, Source, Take, Taken, Turn, Worker};

use crate::clock::Clock;
use crate::{Arrivals, Costs, Record};

/// Messages that one read brings at most: a slot of 64 KiB, with messages of 128 bytes.
const READ_MESSAGES: usize = 512;
/// `mux.rs`, EVENTS_MAX.
const EVENTS_MAX: usize = 16;

struct MuxConnection {
    index: usize,
    ordered_queue: Option<OrderedQueue<Message>>,
    parked: Parked<Message>,
    /// Messages that wait or are in work.
    waiting: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Message {
    job: usize,
    long: bool,
}

impl Source for Handle {
    type Message = Message;

    fn key(&self) -> usize {
        self.0.index
    }

    fn ordered_queue(&self) -> Option<&OrderedQueue<Message>> {
        self.0.ordered_queue.as_ref()
    }

    fn class(&self, message: &Message) -> Option<usize> {
        // Without caps the scheduler knows no class 0.
        message.long.then_some(0)
    }

    /// Peers here read at once.
    fn is_throttled(&self) -> bool {
        false
    }

    fn parked(&self) -> &Parked<Message> {
        &self.0.parked
    }
}

#[derive(Clone)]
struct Handle(Arc<MuxConnection>);

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive {
        segment: usize,
    },
    /// epoll_wait returns.
    Woken {
        worker: usize,
    },
    /// A worker is done with what it did.
    Step {
        worker: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    Signal,
    Connection(usize),
}

struct WorkerState {
    worker: Worker<Handle>,
    lease: VecDeque<Taken<Handle>>,
    cost: CostEstimate,
    taken: usize,
    taken_at_ns: u64,
    taken_from: Option<Handle>,
    working_on: Option<Taken<Handle>>,
    busy: bool,
    events_max: usize,
}

struct World<'a> {
    costs: Costs,
    arrivals: &'a Arrivals,
    scheduler: Scheduler<Handle>,
    connections: Vec<Handle>,
    inboxes: Vec<VecDeque<usize>>,
    workers: Vec<WorkerState>,
    clock: Clock<Event>,
    /// The epoll instance: its ready list and who waits, the longest first.
    ready: VecDeque<Ready>,
    waiters: VecDeque<usize>,
    signals: usize,
}

pub(crate) fn play(
    workers: usize,
    costs: Costs,
    arrivals: &Arrivals,
    ordered: bool,
    long_cap: Option<usize>,
    record: &mut Record,
) {
    let scheduler = Scheduler::new(long_cap.as_slice());
    let new_worker = |_| WorkerState {
        worker: scheduler.join(),
        lease: VecDeque::new(),
        cost: CostEstimate::new(),
        taken: 0,
        taken_at_ns: 0,
        taken_from: None,
        working_on: None,
        busy: false,
        events_max: 1,
    };
    let workers: Vec<_> = (0..workers).map(new_worker).collect();
    let connection = |index| {
        Handle(Arc::new(MuxConnection {
            index,
            ordered_queue: ordered.then(OrderedQueue::default),
            parked: Parked::default(),
            waiting: AtomicUsize::new(0),
        }))
    };
    let mut world = World {
        costs,
        arrivals,
        connections: (0..arrivals.connections).map(connection).collect(),
        inboxes: vec![VecDeque::new(); arrivals.connections],
        clock: Clock::new(),
        ready: VecDeque::new(),
        waiters: VecDeque::new(),
        signals: 0,
        scheduler,
        workers,
    };
    for worker in 0..world.workers.len() {
        world.clock.plan(0, Event::Step { worker });
    }
    for (segment, arrival) in arrivals.segments.iter().enumerate() {
        world.clock.plan(arrival.at_ns, Event::Arrive { segment });
    }
    while let Some((now_ns, event)) = world.clock.next() {
        match event {
            Event::Arrive { segment } => world.arrive(segment, now_ns),
            Event::Woken { worker } => world.woken(worker, now_ns),
            Event::Step { worker } => world.step(worker, now_ns, record),
        }
    }
}

impl World<'_> {
    /// The network.
    fn arrive(&mut self, segment: usize, now_ns: u64) {
        let segment = &self.arrivals.segments[segment];
        self.inboxes[segment.connection].extend(segment.jobs.clone());
        self.announce(Ready::Connection(segment.connection), now_ns);
    }

    /// An item of the epoll instance became ready; the one that waits for the longest time is woken.
    fn announce(&mut self, item: Ready, now_ns: u64) {
        if !self.ready.contains(&item) {
            self.ready.push_back(item);
        }
        self.wake_waiter(now_ns);
    }

    fn wake_waiter(&mut self, now_ns: u64) {
        if let Some(worker) = self.waiters.pop_front() {
            self.clock.plan(now_ns + self.costs.wake_ns, Event::Woken { worker });
        }
    }

    /// `Shared::wait`, from where epoll_wait returns.
    fn woken(&mut self, worker: usize, now_ns: u64) {
        if self.ready.is_empty() {
            // Another worker was quicker.
            self.waiters.push_back(worker);
            return;
        }
        let mut at_ns = now_ns;
        let events = self.take_events(self.workers[worker].events_max, now_ns);
        let signalled = self.take_signal(&events, &mut at_ns);
        self.scheduler.awake(signalled);
        self.read_all(worker, &events, &mut at_ns);
        self.clock.plan(at_ns, Event::Step { worker });
    }

    fn take_events(&mut self, max: usize, now_ns: u64) -> Vec<Ready> {
        let count = max.min(self.ready.len());
        let events = self.ready.drain(..count).collect();
        if !self.ready.is_empty() {
            self.wake_waiter(now_ns);
        }
        events
    }

    /// `Shared::take_signal`.
    fn take_signal(&mut self, events: &[Ready], at_ns: &mut u64) -> usize {
        if !events.contains(&Ready::Signal) || self.signals == 0 {
            return 0;
        }
        *at_ns += self.costs.call_ns;
        let rest = std::mem::take(&mut self.signals) - 1;
        self.wake(rest, at_ns);
        1
    }

    /// `Shared::wake`.
    fn wake(&mut self, workers: usize, at_ns: &mut u64) {
        if workers > 0 {
            *at_ns += self.costs.call_ns;
            self.signals += workers;
            self.announce(Ready::Signal, *at_ns);
        }
    }

    fn read_all(&mut self, worker: usize, events: &[Ready], at_ns: &mut u64) {
        for event in events {
            if let Ready::Connection(connection) = *event {
                self.read(worker, connection, at_ns);
            }
        }
    }

    /// `Shared::read`: one chunk.
    fn read(&mut self, worker: usize, connection: usize, at_ns: &mut u64) {
        *at_ns += self.costs.call_ns;
        let inbox = &mut self.inboxes[connection];
        let count = inbox.len().min(READ_MESSAGES);
        let jobs = &self.arrivals.jobs;
        let messages = inbox.drain(..count).map(|job| Message { job, long: jobs[job].long });
        let (state, connection) = (&self.workers[worker].worker, &self.connections[connection]);
        connection.0.waiting.fetch_add(count, Ordering::Relaxed);
        let mut wakes = self.scheduler.push(Some(state), connection, messages);
        if count == READ_MESSAGES {
            wakes += self.scheduler.push_reread(Some(state), connection.clone());
        }
        self.wake(wakes, at_ns);
    }

    /// A worker comes for more: `MessageSocket::done` and `recv`.
    fn step(&mut self, worker: usize, now_ns: u64, record: &mut Record) {
        let mut at_ns = now_ns;
        if let Some(done) = self.workers[worker].working_on.take() {
            done.source.0.waiting.fetch_sub(1, Ordering::Relaxed);
            let wakes = self.scheduler.finish(Some(&self.workers[worker].worker), &done.source, done.class);
            self.wake(wakes, &mut at_ns);
        }
        let events_max = self.events_max();
        let state = &mut self.workers[worker];
        if let Some(taken) = state.lease.pop_front() {
            return self.work(worker, taken, at_ns, record);
        }
        if state.taken > 0 {
            let work_ns = now_ns - state.taken_at_ns;
            state.cost.observe(work_ns, std::mem::take(&mut state.taken));
            if let Some(Handle(connection)) = state.taken_from.take() {
                connection.parked.note_work(work_ns, connection.waiting.load(Ordering::Relaxed) == 0);
            }
        }
        at_ns += self.costs.queue_ns;
        match self.scheduler.take(&state.worker, state.cost.want(), &mut state.lease) {
            Take::Messages => {
                state.taken = state.lease.len();
                state.taken_at_ns = at_ns;
                state.busy = true;
                if let Some(first) = state.lease.pop_front() {
                    state.taken_from = Some(first.source.clone());
                    let wakes = self.scheduler.pass_on();
                    self.wake(wakes, &mut at_ns);
                    self.work(worker, first, at_ns, record);
                }
            }
            Take::Turn(turn) => {
                // Others have their turn before one that always has more.
                self.poll(worker, &mut at_ns);
                match turn {
                    Turn::Reread(connection) => self.read(worker, connection.0.index, &mut at_ns),
                    Turn::Parked(connection) => {
                        let state = &self.workers[worker];
                        let wakes = self.scheduler.begin_turn(&state.worker, &connection, state.cost.turn_batches());
                        self.wake(wakes, &mut at_ns);
                    }
                }
                self.clock.plan(at_ns, Event::Step { worker });
            }
            Take::Nothing if std::mem::take(&mut state.busy) => {
                self.poll(worker, &mut at_ns);
                self.clock.plan(at_ns, Event::Step { worker });
            }
            Take::Nothing => {
                state.events_max = events_max;
                if !self.scheduler.sleep() {
                    self.clock.plan(at_ns, Event::Step { worker });
                } else if self.ready.is_empty() {
                    self.waiters.push_back(worker);
                } else {
                    self.clock.plan(at_ns + self.costs.call_ns, Event::Woken { worker });
                }
            }
        }
    }

    fn work(&mut self, worker: usize, taken: Taken<Handle>, now_ns: u64, record: &mut Record) {
        let done_ns = record.begin(taken.message.job, now_ns, self.arrivals);
        self.workers[worker].working_on = Some(taken);
        self.clock.plan(done_ns, Event::Step { worker });
    }

    /// `Shared::poll`.
    fn poll(&mut self, worker: usize, at_ns: &mut u64) {
        *at_ns += self.costs.call_ns;
        let events = self.take_events(self.events_max(), *at_ns);
        let signals = self.take_signal(&events, at_ns);
        self.scheduler.note_signals(signals);
        self.read_all(worker, &events, at_ns);
    }

    fn events_max(&self) -> usize {
        if self.scheduler.has_sleepers() { 1 } else { EVENTS_MAX }
    }
}
