//! The scheduler: workers that read, take, steal, sleep and wake as those of the multiplexor do.
//!
//! [`World`] is `mux.rs` and `socket.rs` without sockets: the same calls in the same order, around an [`Epoll`] that
//! behaves as the kernel's. Connections are lists of messages that a network thread fills.

use std::collections::VecDeque;

use shuttle::thread;

use crate::batch::MessageBatch;
use crate::combining_lock::CombiningLock;
use crate::epoll::{Epoll, Event};
use crate::lease::Grant;
use crate::scheduler::{OrderedQueue, Parked, Scheduler, Source, TURN_NS, Take, Turn, Worker};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Condvar, Mutex, Ordering};
use crate::worker_state::{InPlaceBatch, Message, TimerThread, WorkerState};

/// What is played.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Workers, each with a thread.
    pub workers: usize,
    /// Most batches a worker takes at once.
    pub want: usize,
    /// Most messages of one read that travel together, as a batch.
    pub batch_len: usize,
    /// Workers work on batches where they lie, as those of a service do.
    pub in_place: bool,
    /// There is a timer thread, which revokes the lease of a worker that is held up.
    pub timer: bool,
    /// Messages of a batch in place that a worker goes through without a lock.
    pub grant: usize,
    /// Peers send a message and wait for its answer before they let the work on the next one go on.
    pub one_by_one: bool,
    /// Messages of each connection, in bursts: each burst arrives at once.
    pub bursts: &'static [&'static [usize]],
    /// Messages one read brings; a full read asks for another one.
    pub read_messages: usize,
    /// Connections keep their order.
    pub ordered: bool,
    /// Caps of classes; message `n` of a connection is of class `n % (caps + 1)`, the last of which is not capped.
    pub caps: &'static [usize],
    /// No worker is done with a message before so many are being worked on at once.
    pub together: usize,
    /// A thread stops the first worker: it takes no more messages, and gives back what it took.
    pub stop: Option<Stop>,
    /// Workers drop messages instead of coming for the next at once.
    pub dropped: bool,
    /// The first worker gives back what it took beyond the first message, once; not in place.
    pub gives_back: bool,
    /// Answers to a connection that its peer has not read above which none of its messages is to be taken.
    pub unread_max: Option<usize>,
    /// Workers reserve an answer before they work on a message, as for a long reply: it counts as one that is not read. Only in place.
    pub reserves: bool,
    /// Each message is the work of a turn of its connection, and this is how many are let in at a time.
    pub turn: Option<usize>,
}

/// How a worker ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Receiving is switched off by another thread.
    Disable,
    /// It leaves by itself after the first message.
    Leave,
}

impl Scenario {
    /// Three workers, one message at a time, no order, no classes.
    pub const PLAIN: Self = Self {
        workers: 3,
        want: 1,
        batch_len: 1,
        in_place: false,
        timer: false,
        grant: 1,
        one_by_one: false,
        bursts: &[],
        read_messages: 8,
        ordered: false,
        caps: &[],
        together: 1,
        stop: None,
        dropped: false,
        gives_back: false,
        unread_max: None,
        reserves: false,
        turn: None,
    };

    /// Plays it and checks that every message was worked on once, in an ordered queue in order and alone, in a class within its
    /// cap, and that no more workers were woken than entries were queued.
    pub fn play(self) {
        let world = Arc::new(World::new(self));
        let mut threads: Vec<_> = (0..self.workers)
            .map(|index| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.work(index))
            })
            .collect();
        for connection in 0..self.bursts.len() {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || world.arrive(connection)));
        }
        for connection in 0..self.unread_max.map_or(0, |_| self.bursts.len()) {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || world.read_answers(connection)));
        }
        if self.stop == Some(Stop::Disable) {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || world.disable()));
        }
        let timer = self.timer.then(|| {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.timer.run(|left| world.wake(world.scheduler.give_back(left.into_iter())));
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.timer.stop();
        let _ = timer.map(|thread| thread.join().unwrap());
        world.check();
    }
}

struct World {
    scenario: Scenario,
    scheduler: Scheduler<Arc<Connection>>,
    epoll: Epoll,
    connections: Vec<Arc<Connection>>,
    timer: TimerThread,
    /// The first worker's side, for the thread that disables it.
    first: Mutex<Option<First>>,
    first_disabled: AtomicBool,
    begun: Mutex<usize>,
    enough_begun: Condvar,
    done: AtomicUsize,
    running: Vec<AtomicUsize>,
    wakes: AtomicUsize,
    entries: AtomicUsize,
}

type First = (Arc<Worker<Arc<Connection>>>, Arc<Mutex<WorkerState>>);

pub(crate) struct Connection {
    index: usize,
    classes: usize,
    inbox: Mutex<VecDeque<u8>>,
    reader: CombiningLock<()>,
    ordered_queue: Option<OrderedQueue<MessageBatch>>,
    /// Messages in the order in which they were begun.
    begun: Mutex<Vec<u8>>,
    busy: AtomicBool,
    /// Messages whose answers have left.
    answered: Mutex<Vec<u8>>,
    more_answered: Condvar,
    /// Answers that the peer has not read, and at how many of them it is throttled.
    unread: AtomicUsize,
    unread_max: usize,
    /// Answers that are reserved.
    reserved: AtomicUsize,
    parked: Parked<MessageBatch>,
}

impl Connection {
    /// Answers leave.
    pub(crate) fn answer(&self, answers: &mut Vec<u8>) {
        if !answers.is_empty() {
            self.unread.fetch_add(answers.len(), Ordering::SeqCst);
            self.answered.lock().unwrap().append(answers);
            self.more_answered.notify_all();
        }
    }
}

impl Source for Arc<Connection> {
    type Message = MessageBatch;

    fn key(&self) -> usize {
        Self::as_ptr(self).addr()
    }

    fn ordered_queue(&self) -> Option<&OrderedQueue<MessageBatch>> {
        self.ordered_queue.as_ref()
    }

    fn class(&self, message: &MessageBatch) -> Option<usize> {
        // Where there are classes each message travels alone.
        let class = usize::from(message.chunk()[0]) % (self.classes + 1);
        (class < self.classes).then_some(class)
    }

    fn is_throttled(&self) -> bool {
        self.unread.load(Ordering::SeqCst) + self.reserved.load(Ordering::SeqCst) >= self.unread_max
    }

    fn parked(&self) -> &Parked<MessageBatch> {
        &self.parked
    }
}

/// A worker's side: a message socket.
struct WorkerSide {
    worker: Arc<Worker<Arc<Connection>>>,
    state: Arc<Mutex<WorkerState>>,
    busy: bool,
    /// It is the one that another thread may disable.
    can_be_disabled: bool,
    gives_back: bool,
}

impl World {
    fn new(scenario: Scenario) -> Self {
        let connection = |(index, _): (usize, _)| {
            Arc::new(Connection {
                index,
                classes: scenario.caps.len(),
                inbox: Mutex::default(),
                reader: CombiningLock::new(()),
                ordered_queue: scenario.ordered.then(OrderedQueue::default),
                begun: Mutex::default(),
                busy: AtomicBool::new(false),
                answered: Mutex::default(),
                more_answered: Condvar::new(),
                unread: AtomicUsize::new(0),
                unread_max: scenario.unread_max.unwrap_or(usize::MAX),
                reserved: AtomicUsize::new(0),
                parked: Parked::default(),
            })
        };
        Self {
            scheduler: Scheduler::new(scenario.caps),
            epoll: Epoll::default(),
            connections: scenario.bursts.iter().enumerate().map(connection).collect(),
            timer: TimerThread::default(),
            first: Mutex::new(None),
            first_disabled: AtomicBool::new(false),
            begun: Mutex::new(0),
            enough_begun: Condvar::new(),
            done: AtomicUsize::new(0),
            running: scenario.caps.iter().map(|_| AtomicUsize::new(0)).collect(),
            wakes: AtomicUsize::new(0),
            entries: AtomicUsize::new(0),
            scenario,
        }
    }

    fn total(&self) -> usize {
        self.scenario.bursts.iter().flat_map(|bursts| bursts.iter()).sum()
    }

    /// The network.
    fn arrive(&self, connection: usize) {
        let mut next = 0;
        for burst in self.scenario.bursts[connection] {
            let end = next + *burst as u8;
            self.connections[connection].inbox.lock().unwrap().extend(next..end);
            next = end;
            self.epoll.announce(Event::Readable(connection));
        }
    }

    /// The peer reads one answer after the other: what `Shared::send` does when TCP has taken some, and its `resume`.
    fn read_answers(&self, connection: usize) {
        let connection = &self.connections[connection];
        let total = self.scenario.bursts[connection.index].iter().sum::<usize>();
        for read in 0..total {
            let mut answered = connection.answered.lock().unwrap();
            while answered.len() <= read {
                answered = connection.more_answered.wait(answered).unwrap();
            }
            drop(answered);
            connection.unread.fetch_sub(1, Ordering::SeqCst);
            self.resume(connection);
        }
    }

    /// `Shared::resume`.
    fn resume(&self, connection: &Arc<Connection>) {
        if !connection.parked.is_empty() && !connection.is_throttled() {
            self.wake(self.scheduler.unpark(connection));
        }
    }

    /// `MessageSocket::set_receiving(false)`, by another thread than the worker's.
    fn disable(&self) {
        self.first_disabled.store(true, Ordering::SeqCst);
        if let Some((worker, state)) = &*self.first.lock().unwrap() {
            let mut state = state.lock().unwrap();
            let wakes = self.scheduler.give_back(state.lease.revoke().into_iter()) + self.scheduler.yield_all(worker);
            drop(state);
            self.wake(wakes);
        }
    }

    /// The thread of a worker.
    fn work(&self, index: usize) {
        let worker = Arc::new(self.scheduler.join());
        let state = Arc::new(Mutex::new(WorkerState::new()));
        self.timer.workers.lock().unwrap().push(Arc::clone(&state));
        let stop = self.scenario.stop.filter(|_| index == 0);
        let can_be_disabled = stop == Some(Stop::Disable);
        if can_be_disabled {
            *self.first.lock().unwrap() = Some((Arc::clone(&worker), Arc::clone(&state)));
        }
        let gives_back = self.scenario.gives_back && index == 0;
        let mut side = WorkerSide { worker, state, busy: false, can_be_disabled, gives_back };
        if self.scenario.in_place {
            while let Some(batch) = self.recv(&mut side, WorkerState::begin_in_place) {
                self.work_in_place(&side, &batch);
            }
            return;
        }
        while let Some(message) = self.recv(&mut side, WorkerState::pop) {
            self.work_on(&side, &message.connection, message.number, message.class);
            message.connection.answer(&mut vec![message.number]);
            if stop == Some(Stop::Leave) {
                self.leave(side, message);
                return;
            }
            if std::mem::take(&mut side.gives_back) {
                let mut state = side.state.lock().unwrap();
                let wakes = self.scheduler.give_back(state.lease.revoke().into_iter());
                drop(state);
                self.wake(wakes);
            }
            self.finish(Some(&side), &message.connection, 1, message.class);
        }
    }

    /// `Worker::work` of a service.
    fn work_in_place(&self, side: &WorkerSide, batch: &InPlaceBatch) {
        let connection = &batch.source;
        let (mut answers, mut done) = (Vec::new(), 0);
        let mut grant = side.state.lock().unwrap().lease.grant();
        while self.grant_more(side, batch, &mut answers, &mut grant) {
            while let Some(place) = grant.next(|| side.state.lock().unwrap().lease.kept()) {
                let number = batch.chunk[place.start as usize];
                if self.scenario.reserves {
                    connection.reserved.fetch_add(1, Ordering::SeqCst);
                }
                self.work_on(side, connection, number, None);
                answers.push(number);
                done += 1;
                if self.scenario.reserves {
                    let mut state = side.state.lock().unwrap();
                    state.hold(&mut answers);
                    state.queue_held(batch);
                    drop(state);
                    // `Connection::unreserve`. The peer may have read the answer already, and found the connection throttled by this.
                    connection.reserved.fetch_sub(1, Ordering::SeqCst);
                    self.resume(connection);
                }
            }
        }
        side.state.lock().unwrap().done_in_place(batch);
        if done > 0 {
            self.finish(Some(side), connection, done, None);
        }
    }

    /// `MessageSocket::grant_more`.
    fn grant_more(&self, side: &WorkerSide, batch: &InPlaceBatch, answers: &mut Vec<u8>, grant: &mut Grant) -> bool {
        let mut state = side.state.lock().unwrap();
        state.hold(answers);
        if self.scenario.unread_max.is_some() {
            // As if each were long.
            state.queue_held(batch);
        }
        if batch.source.is_throttled() && !state.lease.is_revoked(batch) {
            let rest = state.lease.end_in_place(grant);
            self.wake(self.scheduler.give_back(rest.into_iter()));
            return false;
        }
        state.grant_more(batch, self.scenario.grant, grant)
    }

    /// `MessageSocket::recv_with`.
    fn recv<R>(&self, side: &mut WorkerSide, next: impl Fn(&mut WorkerState) -> Option<R>) -> Option<R> {
        loop {
            let mut state = side.state.lock().unwrap();
            let found = if self.fill(side, &mut state) { next(&mut state) } else { None };
            drop(state);
            if found.is_some() {
                side.busy = true;
                return found;
            }
            if self.epoll.is_closed() {
                return None;
            }
            if std::mem::take(&mut side.busy) && !self.is_disabled(side) {
                let most = self.events_max();
                let mut state = side.state.lock().unwrap();
                self.handle(self.epoll.wait(most, false), side, &mut state);
                continue;
            }
            if self.is_disabled(side) {
                // What it was woken for, and what it read meanwhile, is for others.
                let wakes = self.scheduler.yield_all(&side.worker) + self.scheduler.decline();
                self.entries.fetch_add(1, Ordering::SeqCst);
                self.wake(wakes);
                return None;
            }
            self.wait(side);
        }
    }

    /// `MessageSocket::fill` and `take`.
    fn fill(&self, side: &WorkerSide, state: &mut WorkerState) -> bool {
        if let Some(first) = state.lease.batches.front() {
            if !first.source.is_throttled() {
                return true;
            }
            let revoked = state.lease.revoke();
            self.wake(self.scheduler.give_back(revoked.into_iter()));
        }
        if self.is_disabled(side) {
            return false;
        }
        loop {
            match self.scheduler.take(&side.worker, self.scenario.want, &mut state.lease.batches) {
                Take::Nothing => return false,
                Take::Turn(turn) => {
                    let most = self.events_max();
                    self.handle(self.epoll.wait(most, false), side, state);
                    match turn {
                        Turn::Reread(connection) => self.read(&connection, side, state),
                        Turn::Parked(connection) => {
                            let max = self.scenario.turn.unwrap_or(usize::MAX);
                            self.wake(self.scheduler.begin_turn(&side.worker, &connection, max));
                        }
                    }
                }
                Take::Messages => {
                    self.wake(self.scheduler.pass_on());
                    if state.lease.messages() > 1 {
                        self.timer.watch_leases();
                    }
                    return true;
                }
            }
        }
    }

    /// `Shared::wait`.
    fn wait(&self, side: &WorkerSide) {
        let most = self.events_max();
        if !self.scheduler.sleep() {
            // Another worker is in the middle of taking or moving what is queued.
            thread::yield_now();
            return;
        }
        let events = self.epoll.wait(most, true);
        // Without the lock: the thread that disables this worker may have it.
        self.scheduler.awake(self.signals(&events));
        let mut state = side.state.lock().unwrap();
        self.read_all(events, side, &mut state);
    }

    fn events_max(&self) -> usize {
        if self.scheduler.has_sleepers() { 1 } else { 16 }
    }

    /// `Shared::poll`.
    fn handle(&self, events: Vec<Event>, side: &WorkerSide, state: &mut WorkerState) {
        self.scheduler.note_signals(self.signals(&events));
        self.read_all(events, side, state);
    }

    fn signals(&self, events: &[Event]) -> usize {
        usize::from(events.contains(&Event::Signal) && self.take_signal())
    }

    fn read_all(&self, events: Vec<Event>, side: &WorkerSide, state: &mut WorkerState) {
        for event in events {
            if let Event::Readable(connection) = event {
                self.read(&self.connections[connection], side, state);
            }
        }
    }

    /// `Shared::take_signal`.
    fn take_signal(&self) -> bool {
        let count = self.epoll.take_signals();
        if count > 1 {
            self.epoll.signal(count - 1);
        }
        count > 0
    }

    /// `Shared::read`.
    fn read(&self, connection: &Arc<Connection>, side: &WorkerSide, state: &mut WorkerState) {
        let mut wakes = 0;
        connection.reader.run(|()| {
            let mut inbox = connection.inbox.lock().unwrap();
            let count = inbox.len().min(self.scenario.read_messages);
            let messages: Vec<_> = inbox.drain(..count).collect();
            drop(inbox);
            if messages.is_empty() {
                return;
            }
            let batches = state.gather(messages, self.scenario.batch_len);
            self.entries.fetch_add(batches.len(), Ordering::SeqCst);
            wakes += self.scheduler.push(Some(&side.worker), connection, batches);
            if count == self.scenario.read_messages {
                self.entries.fetch_add(1, Ordering::SeqCst);
                wakes += self.scheduler.push_reread(Some(&side.worker), Arc::clone(connection));
            }
        });
        self.wake(wakes);
    }

    fn wake(&self, workers: usize) {
        if workers > 0 {
            self.wakes.fetch_add(workers, Ordering::SeqCst);
            self.epoll.signal(workers);
        }
    }

    /// What a service does with a message.
    fn work_on(&self, side: &WorkerSide, connection: &Connection, number: u8, class: Option<usize>) {
        if let Some(class) = class {
            let before = self.running[class].fetch_add(1, Ordering::SeqCst);
            assert!(before < self.scenario.caps[class], "more of class {class} than its cap");
        }
        if connection.ordered_queue.is_some() {
            assert!(!connection.busy.swap(true, Ordering::SeqCst), "two of connection {} at once", connection.index);
        }
        connection.begun.lock().unwrap().push(number);
        let mut begun = self.begun.lock().unwrap();
        *begun += 1;
        self.enough_begun.notify_all();
        while *begun < self.scenario.together {
            // In place the one that is worked on is still there.
            let state = usize::from(self.scenario.in_place);
            let bound = if self.scenario.timer { state } else { side.state.lock().unwrap().lease.messages() };
            assert_eq!(bound, state, "a batch was taken while others could have worked");
            begun = self.enough_begun.wait(begun).unwrap();
        }
        drop(begun);
        if self.scenario.one_by_one && number > 0 {
            let mut answered = connection.answered.lock().unwrap();
            while !answered.contains(&(number - 1)) {
                answered = connection.more_answered.wait(answered).unwrap();
            }
        }
        connection.busy.store(false, Ordering::SeqCst);
        if self.scenario.turn.is_some() {
            connection.parked.note_work(TURN_NS as u64, false);
        }
        if let Some(class) = class {
            self.running[class].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// `Shared::finish`, by a worker that comes for the next message at once, or the drop of a message.
    fn finish(&self, side: Option<&WorkerSide>, connection: &Arc<Connection>, messages: usize, class: Option<usize>) {
        let worker = side.filter(|_| !self.scenario.dropped).map(|side| &*side.worker);
        if class.is_some() || connection.ordered_queue.is_some() {
            self.wake(self.scheduler.finish(worker, connection, class));
        }
        if self.done.fetch_add(messages, Ordering::SeqCst) + messages == self.total() {
            self.epoll.close();
        }
    }

    /// The drop of a message socket, then that of the message it was used for.
    fn leave(&self, side: WorkerSide, message: Message) {
        let mut wakes = self.scheduler.give_back(side.state.lock().unwrap().lease.revoke().into_iter());
        if let Some(worker) = Arc::into_inner(side.worker) {
            wakes += self.scheduler.leave(worker);
        }
        self.wake(wakes);
        self.finish(None, &message.connection, 1, message.class);
    }

    fn is_disabled(&self, side: &WorkerSide) -> bool {
        side.can_be_disabled && self.first_disabled.load(Ordering::SeqCst)
    }

    fn check(&self) {
        for connection in &self.connections {
            let mut begun = connection.begun.lock().unwrap().clone();
            if connection.ordered_queue.is_none() {
                begun.sort_unstable();
            }
            let total = self.scenario.bursts[connection.index].iter().sum::<usize>() as u8;
            assert!(begun.iter().copied().eq(0..total), "connection {}: {begun:?} of {total}", connection.index);
            let mut answered = connection.answered.lock().unwrap().clone();
            answered.sort_unstable();
            assert!(answered.iter().copied().eq(0..total), "connection {}: answers {answered:?}", connection.index);
        }
        let requeues = !self.scenario.caps.is_empty()
            || self.scenario.gives_back
            || self.scenario.stop.is_some()
            || self.scenario.unread_max.is_some()
            || self.scenario.turn.is_some()
            || self.scenario.timer;
        let (wakes, entries) = (self.wakes.load(Ordering::SeqCst), self.entries.load(Ordering::SeqCst));
        assert!(requeues || wakes <= entries, "{wakes} wake-ups for {entries} entries");
    }
}
