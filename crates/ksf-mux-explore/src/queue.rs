//! The scheduler: workers that read, take, steal, sleep and wake as those of the multiplexor do.
//!
//! [`World`] is `mux.rs` and `socket.rs` without sockets: the same calls in the same order, around an [`Epoll`] that
//! behaves as the kernel's. Connections are lists of messages that a network thread fills.

use std::collections::VecDeque;

use shuttle::thread;

use crate::baton::Baton;
use crate::epoll::{Epoll, Event};
use crate::scheduler::{Lane, Scheduler, Source, Take, Taken, Worker};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Condvar, Mutex, Ordering};

/// What is played.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Workers, each with a thread.
    pub workers: usize,
    /// Most messages a worker takes at once.
    pub want: usize,
    /// Messages of each connection, in bursts: each burst arrives at once.
    pub bursts: &'static [&'static [usize]],
    /// Messages one read brings; a full read asks for another visit.
    pub read_messages: usize,
    /// Connections keep their order.
    pub lanes: bool,
    /// Caps of classes; message `n` of a connection is of class `n % (caps + 1)`, the last of which is not capped.
    pub caps: &'static [usize],
    /// Nobody is done with a message before so many are being worked on at once.
    pub together: usize,
    /// A thread stops the first worker: it takes no more messages, and gives back what it took.
    pub stop: Option<Stop>,
    /// Workers drop messages instead of coming for the next at once.
    pub dropped: bool,
    /// The first worker gives back what it took beyond the first message, once.
    pub gives_back: bool,
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
        bursts: &[],
        read_messages: 8,
        lanes: false,
        caps: &[],
        together: 1,
        stop: None,
        dropped: false,
        gives_back: false,
    };

    /// Plays it and checks that every message was worked on once, in a lane in order and alone, in a class within its
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
        if self.stop == Some(Stop::Disable) {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || world.disable()));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.check();
    }
}

struct World {
    scenario: Scenario,
    scheduler: Scheduler<Arc<Connection>>,
    epoll: Epoll,
    connections: Vec<Arc<Connection>>,
    /// The first worker's side, for the thread that disables it.
    first: Mutex<Option<Arc<Worker<Arc<Connection>>>>>,
    first_disabled: AtomicBool,
    begun: Mutex<usize>,
    enough_begun: Condvar,
    done: AtomicUsize,
    running: Vec<AtomicUsize>,
    wakes: AtomicUsize,
    entries: AtomicUsize,
}

struct Connection {
    index: usize,
    classes: usize,
    inbox: Mutex<VecDeque<usize>>,
    reader: Baton<()>,
    lane: Option<Lane<usize>>,
    /// Messages in the order in which they were begun.
    begun: Mutex<Vec<usize>>,
    busy: AtomicBool,
}

impl Source for Arc<Connection> {
    type Message = usize;

    fn is_same(&self, other: &Self) -> bool {
        Self::ptr_eq(self, other)
    }

    fn lane(&self) -> Option<&Lane<usize>> {
        self.lane.as_ref()
    }

    fn class(&self, message: &usize) -> Option<usize> {
        let class = message % (self.classes + 1);
        (class < self.classes).then_some(class)
    }
}

/// A worker's side: `Own` of a message socket.
struct Me {
    worker: Arc<Worker<Arc<Connection>>>,
    hand: VecDeque<Taken<Arc<Connection>>>,
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
                reader: Baton::new(()),
                lane: scenario.lanes.then(Lane::default),
                begun: Mutex::default(),
                busy: AtomicBool::new(false),
            })
        };
        Self {
            scheduler: Scheduler::new(scenario.caps),
            epoll: Epoll::default(),
            connections: scenario.bursts.iter().enumerate().map(connection).collect(),
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
            self.connections[connection].inbox.lock().unwrap().extend(next..next + burst);
            next += burst;
            self.epoll.announce(Event::Readable(connection));
        }
    }

    /// `MessageSocket::set_receiving(false)`, by another thread than the worker's.
    fn disable(&self) {
        self.first_disabled.store(true, Ordering::SeqCst);
        if let Some(worker) = &*self.first.lock().unwrap() {
            let wakes = self.scheduler.yield_all(worker);
            self.wake(wakes);
        }
    }

    /// The thread of a worker.
    fn work(&self, index: usize) {
        let worker = Arc::new(self.scheduler.join());
        let stop = self.scenario.stop.filter(|_| index == 0);
        let can_be_disabled = stop == Some(Stop::Disable);
        if can_be_disabled {
            *self.first.lock().unwrap() = Some(Arc::clone(&worker));
        }
        let gives_back = self.scenario.gives_back && index == 0;
        let mut me = Me { worker, hand: VecDeque::new(), busy: false, can_be_disabled, gives_back };
        while let Some(taken) = self.recv(&mut me) {
            self.work_on(&me, &taken);
            if stop == Some(Stop::Leave) {
                self.leave(me, taken);
                return;
            }
            if std::mem::take(&mut me.gives_back) {
                self.wake(self.scheduler.give_back(me.hand.drain(..)));
            }
            self.finish(Some(&me), taken);
        }
    }

    /// `MessageSocket::recv`.
    fn recv(&self, me: &mut Me) -> Option<Taken<Arc<Connection>>> {
        loop {
            if self.is_disabled(me) {
                // What it was woken for, and what it read meanwhile, is for others.
                let wakes = self.scheduler.give_back(me.hand.drain(..))
                    + self.scheduler.yield_all(&me.worker)
                    + self.scheduler.decline();
                self.entries.fetch_add(1, Ordering::SeqCst);
                self.wake(wakes);
                return None;
            }
            if let Some(taken) = self.next(me) {
                me.busy = true;
                return Some(taken);
            }
            if std::mem::take(&mut me.busy) {
                let most = self.events_max();
                self.handle(self.epoll.wait(most, false), me, false);
                continue;
            }
            if self.epoll.is_closed() {
                return None;
            }
            self.wait(me);
        }
    }

    /// `MessageSocket::next`.
    fn next(&self, me: &mut Me) -> Option<Taken<Arc<Connection>>> {
        if let Some(taken) = me.hand.pop_front() {
            return Some(taken);
        }
        loop {
            match self.scheduler.take(&me.worker, self.scenario.want, &mut me.hand) {
                Take::Nothing => return None,
                Take::Visit(connection) => {
                    let most = self.events_max();
                    self.handle(self.epoll.wait(most, false), me, false);
                    self.read(&connection, me);
                }
                Take::Messages => {
                    self.wake(self.scheduler.pass_on());
                    return me.hand.pop_front();
                }
            }
        }
    }

    /// `Shared::wait`.
    fn wait(&self, me: &Me) {
        let most = self.events_max();
        if !self.scheduler.sleep() {
            // Somebody is in the middle of taking or moving what is queued.
            thread::yield_now();
            return;
        }
        let events = self.epoll.wait(most, true);
        self.handle(events, me, true);
    }

    fn events_max(&self) -> usize {
        if self.scheduler.has_sleepers() { 1 } else { 16 }
    }

    fn handle(&self, events: Vec<Event>, me: &Me, slept: bool) {
        let signalled = events.contains(&Event::Signal) && self.take_signal();
        if slept {
            self.scheduler.awake(usize::from(signalled));
        } else {
            self.scheduler.note_signals(usize::from(signalled));
        }
        for event in events {
            if let Event::Readable(connection) = event {
                self.read(&self.connections[connection], me);
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
    fn read(&self, connection: &Arc<Connection>, me: &Me) {
        let mut wakes = 0;
        connection.reader.run(|()| {
            let mut inbox = connection.inbox.lock().unwrap();
            let count = inbox.len().min(self.scenario.read_messages);
            let messages: Vec<_> = inbox.drain(..count).collect();
            drop(inbox);
            if messages.is_empty() {
                return;
            }
            self.entries.fetch_add(count, Ordering::SeqCst);
            wakes += self.scheduler.push(Some(&me.worker), connection, messages);
            if count == self.scenario.read_messages {
                self.entries.fetch_add(1, Ordering::SeqCst);
                wakes += self.scheduler.push_visit(Some(&me.worker), Arc::clone(connection));
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
    fn work_on(&self, me: &Me, taken: &Taken<Arc<Connection>>) {
        let connection = &taken.source;
        if let Some(class) = taken.class {
            let before = self.running[class].fetch_add(1, Ordering::SeqCst);
            assert!(before < self.scenario.caps[class], "more of class {class} than its cap");
        }
        if connection.lane.is_some() {
            assert!(!connection.busy.swap(true, Ordering::SeqCst), "two of connection {} at once", connection.index);
        }
        connection.begun.lock().unwrap().push(taken.message);
        let mut begun = self.begun.lock().unwrap();
        *begun += 1;
        self.enough_begun.notify_all();
        while *begun < self.scenario.together {
            assert!(me.hand.is_empty(), "a batch was taken while others could have worked");
            begun = self.enough_begun.wait(begun).unwrap();
        }
        drop(begun);
        connection.busy.store(false, Ordering::SeqCst);
        if let Some(class) = taken.class {
            self.running[class].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// `MessageSocket::done`, or the drop of a message.
    fn finish(&self, me: Option<&Me>, taken: Taken<Arc<Connection>>) {
        let worker = me.filter(|_| !self.scenario.dropped).map(|me| &*me.worker);
        if taken.class.is_some() || taken.source.lane.is_some() {
            self.wake(self.scheduler.finish(worker, &taken.source, taken.class));
        }
        if self.done.fetch_add(1, Ordering::SeqCst) + 1 == self.total() {
            self.epoll.close();
        }
    }

    /// The drop of a message socket, then that of the message it was used for.
    fn leave(&self, mut me: Me, taken: Taken<Arc<Connection>>) {
        let mut wakes = self.scheduler.give_back(me.hand.drain(..));
        if let Some(worker) = Arc::into_inner(me.worker) {
            wakes += self.scheduler.leave(worker);
        }
        self.wake(wakes);
        self.finish(None, taken);
    }

    fn is_disabled(&self, me: &Me) -> bool {
        me.can_be_disabled && self.first_disabled.load(Ordering::SeqCst)
    }

    fn check(&self) {
        for connection in &self.connections {
            let mut begun = connection.begun.lock().unwrap().clone();
            if connection.lane.is_none() {
                begun.sort_unstable();
            }
            let total = self.scenario.bursts[connection.index].iter().sum();
            assert!(begun.iter().copied().eq(0..total), "connection {}: {begun:?} of {total}", connection.index);
        }
        let requeues = !self.scenario.caps.is_empty() || self.scenario.gives_back || self.scenario.stop.is_some();
        let (wakes, entries) = (self.wakes.load(Ordering::SeqCst), self.entries.load(Ordering::SeqCst));
        assert!(requeues || wakes <= entries, "{wakes} wake-ups for {entries} entries");
    }
}
