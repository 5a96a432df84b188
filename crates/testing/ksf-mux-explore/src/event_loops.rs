//! The wait set: programs in event loops, one of which listens at a time, and the timer thread that checks them.
//!
//! [`Kernel`] plays the epoll set of the multiplexor nested in the set of each message socket, and that in the set of
//! an event loop: a socket that listens is readable while an event is there, and each event is announced to it once.

use std::collections::VecDeque;

use shuttle::thread;

use crate::sync::{Arc, AtomicBool, AtomicUsize, Condvar, Mutex, Ordering};
use crate::wait_set::{Poller, WaitSet};

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopProgram {
    /// Receives until there is nothing, each time its loop is told.
    Drains,
    /// Receives one message each time it is told. Only with a level-triggered loop.
    TakesOne,
    /// Looks once, finds nothing or not, and does something else for ever.
    NeverComes,
    /// Looks once, and closes its socket.
    Leaves,
}

/// What is played.
#[derive(Clone, Copy, Debug)]
pub struct LoopScenario {
    /// One thread each.
    pub programs: &'static [LoopProgram],
    /// Loops are edge-triggered.
    pub edge: bool,
    /// Events, of one message each.
    pub messages: usize,
    /// The next message is sent when all programs are asleep again; else all are sent at once.
    pub one_by_one: bool,
    /// No program is done with a message before so many are being worked on.
    pub together: usize,
    /// There is a timer thread.
    pub timer: bool,
}

impl LoopScenario {
    /// Three programs that drain, a message for each.
    pub const PLAIN: Self = Self {
        programs: &[LoopProgram::Drains; 3],
        edge: false,
        messages: 3,
        one_by_one: false,
        together: 1,
        timer: true,
    };

    /// Plays it and checks that every message is received once, that one socket listens at a time, that those counted as
    /// sleepers are those that sleep, and, one by one without a timer thread, that one loop is told per message.
    pub fn play(self) {
        let world = Arc::new(World::new(self));
        let spawn = |run: fn(&World, usize), index| {
            let world = Arc::clone(&world);
            thread::spawn(move || run(&world, index))
        };
        let mut threads: Vec<_> = (0..self.programs.len()).map(|index| spawn(World::program, index)).collect();
        threads.push(spawn(|world, _| world.network(), 0));
        let timer = self.timer.then(|| spawn(|world, _| world.keep(), 0));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.list.lock().unwrap().stop = true;
        world.hurried.notify_all();
        world.kernel.changed.notify_all();
        let _ = timer.map(|thread| thread.join().unwrap());
        world.check();
    }
}

struct World {
    scenario: LoopScenario,
    wait_set: WaitSet<Socket>,
    kernel: Arc<Kernel>,
    /// As the scheduler counts them.
    sleepers: AtomicUsize,
    received: Mutex<Vec<usize>>,
    more_received: Condvar,
    wakes: AtomicUsize,
    list: Mutex<List>,
    hurried: Condvar,
}

/// The timer thread's.
#[derive(Default)]
struct List {
    /// It waits: only then it need be told.
    waits: bool,
    hurried: bool,
    stop: bool,
}

#[derive(Default)]
struct Kernel {
    state: Mutex<KernelState>,
    changed: Condvar,
}

impl Kernel {
    /// Something that is looked at under the lock has changed without it.
    fn tell(&self) {
        drop(self.state.lock().unwrap());
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct KernelState {
    /// Events of the multiplexor's set.
    ready: VecDeque<usize>,
    listening: Vec<bool>,
    notified: Vec<bool>,
    /// What an edge-triggered loop has not been told yet.
    announced: Vec<bool>,
    closed: bool,
}

impl KernelState {
    fn is_readable(&self, index: usize) -> bool {
        self.notified[index] || (self.listening[index] && !self.ready.is_empty())
    }
}

#[derive(Clone)]
struct Socket {
    index: usize,
    kernel: Arc<Kernel>,
    told_nothing: Arc<AtomicBool>,
}

impl Poller for Socket {
    fn is_same(&self, other: &Self) -> bool {
        self.index == other.index
    }

    fn listen(&self, on: bool) {
        let mut state = self.kernel.state.lock().unwrap();
        state.listening[self.index] = on;
        assert!(state.listening.iter().filter(|listens| **listens).count() <= 1, "several listen");
        if on && !state.ready.is_empty() {
            state.announced[self.index] = true;
        }
        drop(state);
        self.kernel.changed.notify_all();
    }

    fn notify(&self) {
        let mut state = self.kernel.state.lock().unwrap();
        if !std::mem::replace(&mut state.notified[self.index], true) {
            state.announced[self.index] = true;
        }
        drop(state);
        self.kernel.changed.notify_all();
    }
}

impl World {
    fn new(scenario: LoopScenario) -> Self {
        let count = scenario.programs.len();
        let state = KernelState {
            listening: vec![false; count],
            notified: vec![true; count],
            announced: vec![true; count],
            ..KernelState::default()
        };
        Self {
            scenario,
            wait_set: WaitSet::new(),
            kernel: Arc::new(Kernel { state: Mutex::new(state), changed: Condvar::new() }),
            sleepers: AtomicUsize::new(0),
            received: Mutex::default(),
            more_received: Condvar::new(),
            wakes: AtomicUsize::new(0),
            list: Mutex::default(),
            hurried: Condvar::new(),
        }
    }

    /// The peers.
    fn network(&self) {
        let count = self.scenario.programs.len();
        for number in 0..self.scenario.messages {
            if self.scenario.one_by_one {
                let mut received = self.received.lock().unwrap();
                while received.len() < number {
                    received = self.more_received.wait(received).unwrap();
                }
                drop(received);
                let mut state = self.kernel.state.lock().unwrap();
                while self.sleepers.load(Ordering::SeqCst) < count {
                    state = self.kernel.changed.wait(state).unwrap();
                }
                if number == 0 {
                    self.wakes.store(0, Ordering::SeqCst);
                }
            }
            let mut state = self.kernel.state.lock().unwrap();
            state.ready.push_back(number);
            for index in 0..count {
                state.announced[index] |= state.listening[index];
            }
            drop(state);
            self.kernel.changed.notify_all();
        }
        let mut received = self.received.lock().unwrap();
        while received.len() < self.scenario.messages {
            received = self.more_received.wait(received).unwrap();
        }
        drop(received);
        self.kernel.state.lock().unwrap().closed = true;
        self.kernel.changed.notify_all();
    }

    /// The thread of a program.
    fn program(&self, index: usize) {
        let socket = Socket { index, kernel: Arc::clone(&self.kernel), told_nothing: Arc::new(AtomicBool::new(false)) };
        let program = self.scenario.programs[index];
        while self.wait(index) {
            self.wakes.fetch_add(1, Ordering::SeqCst);
            while self.try_recv(&socket) && program == LoopProgram::Drains {}
            match program {
                LoopProgram::Drains | LoopProgram::TakesOne => {}
                LoopProgram::NeverComes => return,
                LoopProgram::Leaves => {
                    self.wait_set.leave(&socket, || self.uncount());
                    return;
                }
            }
        }
    }

    /// `epoll_wait` or `poll` of the event loop. False: the scenario is over.
    fn wait(&self, index: usize) -> bool {
        let mut state = self.kernel.state.lock().unwrap();
        loop {
            let told = !self.scenario.edge || std::mem::take(&mut state.announced[index]);
            if told && state.is_readable(index) {
                return true;
            }
            if state.closed {
                return false;
            }
            state = self.kernel.changed.wait(state).unwrap();
        }
    }

    /// `MessageSocket::try_recv`.
    fn try_recv(&self, socket: &Socket) -> bool {
        if socket.told_nothing.load(Ordering::SeqCst)
            && socket.told_nothing.swap(false, Ordering::SeqCst)
            && self.wait_set.come(socket, || self.uncount())
        {
            self.hurry();
        }
        let event = self.kernel.state.lock().unwrap().ready.pop_front();
        if let Some(number) = event {
            self.wait_set.yield_lead(socket);
            self.work_on(number);
            return true;
        }
        // `MessageSocket::fall_asleep`.
        self.kernel.state.lock().unwrap().notified[socket.index] = false;
        socket.told_nothing.store(true, Ordering::SeqCst);
        let (_, watch) = self.wait_set.sleep(socket, || {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            true
        });
        if watch {
            self.hurry();
        }
        self.kernel.tell();
        false
    }

    fn work_on(&self, number: usize) {
        let mut received = self.received.lock().unwrap();
        received.push(number);
        self.more_received.notify_all();
        while received.len() < self.scenario.together {
            received = self.more_received.wait(received).unwrap();
        }
    }

    fn uncount(&self) {
        assert!(self.sleepers.fetch_sub(1, Ordering::SeqCst) > 0, "more awake than slept");
    }

    /// `TimerThread::hurry`.
    fn hurry(&self) {
        let mut list = self.list.lock().unwrap();
        if list.waits {
            list.hurried = true;
            drop(list);
            self.hurried.notify_all();
            self.kernel.tell();
        }
    }

    /// `TimerThread::run`, as far as it looks after event loops. Its time passes as the schedule says.
    fn keep(&self) {
        loop {
            let is_ready = || !self.kernel.state.lock().unwrap().ready.is_empty();
            let next = self.wait_set.check(is_ready, || self.uncount());
            let mut list = self.list.lock().unwrap();
            if list.stop {
                return;
            }
            if next.soon || (self.wait_set.is_watched() && !next.when_ready) {
                drop(list);
                thread::yield_now();
                continue;
            }
            list.waits = true;
            if next.when_ready {
                drop(list);
                let mut state = self.kernel.state.lock().unwrap();
                while state.ready.is_empty() && !state.closed && !self.list.lock().unwrap().hurried {
                    state = self.kernel.changed.wait(state).unwrap();
                }
                drop(state);
                list = self.list.lock().unwrap();
            } else {
                while !list.hurried && !list.stop {
                    list = self.hurried.wait(list).unwrap();
                }
            }
            list.waits = false;
            list.hurried = false;
            let stop = list.stop;
            drop(list);
            if stop || self.kernel.state.lock().unwrap().closed {
                return;
            }
        }
    }

    fn check(&self) {
        let mut received = self.received.lock().unwrap().clone();
        received.sort_unstable();
        assert!(received.iter().copied().eq(0..self.scenario.messages), "{received:?}");
        let (sleepers, asleep) = (self.sleepers.load(Ordering::SeqCst), self.wait_set.asleep());
        assert_eq!(sleepers, asleep, "counted as sleepers, and asleep");
        if self.scenario.one_by_one && !self.scenario.timer {
            let wakes = self.wakes.load(Ordering::SeqCst);
            assert_eq!(wakes, self.scenario.messages, "loops told");
        }
    }
}
