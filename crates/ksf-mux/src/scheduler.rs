//! Which worker gets which message next: the policy, without a socket, a clock or a thread of its own.
//!
//! ```text
//!   reads a chunk ──push──► queue of the reading worker ──take──► the same worker: one, or a batch while all are busy
//!                                   │
//!                                   └──steal (single messages while a worker is idle)──► any worker out of work
//! ```
//!
//! A message is bound to a worker as late as possible: it lies in a queue that all may take from until somebody works
//! on it. What the multiplexor runs is also what `simulate` runs with a simulated clock, and what the schedule
//! exploration of `ksf-mux-explore` runs with its own threads.
//!
//! Lessons behind the rules: late binding and stealing of single messages (ZygOS, SOSP'17), a bound on what a worker
//! takes beyond the message it works on (R2P2's JBSQ, ATC'19), room for short messages beside long ones (Persephone,
//! SOSP'21).

use std::collections::VecDeque;

use crate::sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, RwLock};

/// Where messages come from: a connection.
pub trait Source: Clone {
    /// A message.
    type Message;

    /// True for the same connection.
    fn is_same(&self, other: &Self) -> bool;

    /// Set where messages are worked on one at a time, in their order.
    fn lane(&self) -> Option<&Lane<Self::Message>>;

    /// The class of a message, an index into the caps given to [`Scheduler::new`]. `None`: not capped.
    fn class(&self, message: &Self::Message) -> Option<usize>;
}

/// Messages of a connection that keeps their order: those that wait for the ones worked on.
#[derive(Debug)]
pub struct Lane<M>(Mutex<LaneState<M>>);

#[derive(Debug)]
struct LaneState<M> {
    /// Messages in a queue or with a worker.
    running: usize,
    waiting: VecDeque<M>,
}

impl<M> Default for Lane<M> {
    fn default() -> Self {
        Self(Mutex::new(LaneState { running: 0, waiting: VecDeque::new() }))
    }
}

/// A message for a worker. It must be given to [`Scheduler::finish`] when it is done with.
#[derive(Debug)]
pub struct Taken<S: Source> {
    /// The connection it came from.
    pub source: S,
    /// The message.
    pub message: S::Message,
    /// Its class, if that is capped.
    pub class: Option<usize>,
}

/// What [`Scheduler::take`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Take<S> {
    /// Nothing: every queue is empty.
    Nothing,
    /// Messages; they were appended to the hand.
    Messages,
    /// A connection that wants to be read again.
    Visit(S),
}

enum Entry<S: Source> {
    Message(S, S::Message),
    Visit(S),
}

/// The queue of one worker, which every other may take from.
pub struct Worker<S: Source>(Arc<Queue<S>>);

struct Queue<S: Source> {
    entries: Mutex<VecDeque<Entry<S>>>,
    /// Entries in it, so that nobody locks an empty queue.
    len: AtomicUsize,
}

impl<S: Source> Default for Queue<S> {
    fn default() -> Self {
        Self { entries: Mutex::new(VecDeque::new()), len: AtomicUsize::new(0) }
    }
}

/// A kind of long work that may not occupy every worker.
struct Class<S: Source> {
    cap: usize,
    state: Mutex<ClassState<S>>,
}

struct ClassState<S: Source> {
    running: usize,
    parked: VecDeque<(S, S::Message)>,
}

/// Queues, and who sleeps.
pub struct Scheduler<S: Source> {
    workers: RwLock<Vec<Arc<Queue<S>>>>,
    /// What comes from threads that are no workers, and what workers left behind.
    common: Queue<S>,
    /// Entries in all queues.
    queued: AtomicUsize,
    /// Workers that wait for something to do.
    sleepers: AtomicUsize,
    /// Wake-ups on their way to them.
    signals: AtomicUsize,
    classes: Box<[Class<S>]>,
}

impl<S: Source> Scheduler<S> {
    /// A scheduler without workers. `class_caps`: how many messages of each class may be worked on at once.
    pub fn new(class_caps: &[usize]) -> Self {
        let class = |cap: &usize| Class {
            cap: (*cap).max(1),
            state: Mutex::new(ClassState { running: 0, parked: VecDeque::new() }),
        };
        Self {
            workers: RwLock::new(Vec::new()),
            common: Queue::default(),
            queued: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            signals: AtomicUsize::new(0),
            classes: class_caps.iter().map(class).collect(),
        }
    }

    /// Adds a worker.
    pub fn join(&self) -> Worker<S> {
        let queue = Arc::new(Queue::default());
        write(&self.workers).push(Arc::clone(&queue));
        Worker(queue)
    }

    /// Takes what waits in a worker's queue away from it, for others: it leaves, or takes no messages for a while.
    /// Returns how many workers to wake.
    pub fn yield_all(&self, worker: &Worker<S>) -> usize {
        let mut left = lock(&worker.0.entries);
        let count = left.len();
        worker.0.len.fetch_sub(count, Ordering::SeqCst);
        let mut common = lock(&self.common.entries);
        // In front: they are older than what others will add.
        for entry in left.drain(..).rev() {
            common.push_front(entry);
        }
        self.common.len.fetch_add(count, Ordering::SeqCst);
        drop((common, left));
        self.claim_wakes(count)
    }

    /// Removes a worker. Returns how many workers to wake.
    pub fn leave(&self, worker: Worker<S>) -> usize {
        write(&self.workers).retain(|queue| !Arc::ptr_eq(queue, &worker.0));
        self.yield_all(&worker)
    }

    /// Adds messages of one connection, in their order; `worker` is the one that calls, and will take next. Returns how
    /// many others to wake: at most one per message that the caller cannot work on at once.
    pub fn push(
        &self,
        worker: Option<&Worker<S>>,
        source: &S,
        messages: impl IntoIterator<Item = S::Message>,
    ) -> usize {
        let mut messages = messages.into_iter();
        let count = if let Some(lane) = source.lane() {
            let mut lane = lock(&lane.0);
            // While the lane is busy they wait in it; whoever finishes the last one running takes the next.
            let head = if lane.running == 0 { messages.next() } else { None };
            lane.waiting.extend(messages);
            lane.running += usize::from(head.is_some());
            drop(lane);
            self.append(worker, head.map(|message| Entry::Message(source.clone(), message)))
        } else {
            self.append(worker, messages.map(|message| Entry::Message(source.clone(), message)))
        };
        self.claim_wakes(count.saturating_sub(usize::from(worker.is_some())))
    }

    /// Asks for a visit of a connection after what is queued already. Returns how many workers to wake.
    pub fn push_visit(&self, worker: Option<&Worker<S>>, source: S) -> usize {
        self.append(worker, [Entry::Visit(source)]);
        self.claim_wakes(usize::from(worker.is_none()))
    }

    /// Work for a worker, its own first, then anybody's. Messages are appended to `hand`: one while others are idle, up
    /// to `want` while all are busy, always of one connection.
    pub fn take(&self, worker: &Worker<S>, want: usize, hand: &mut VecDeque<Taken<S>>) -> Take<S> {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return Take::Nothing;
        }
        let want = if self.sleepers.load(Ordering::SeqCst) > 0 { 1 } else { want.max(1) };
        match self.take_from(&worker.0, want, hand) {
            Take::Nothing => {}
            found => return found,
        }
        match self.take_from(&self.common, want, hand) {
            Take::Nothing => {}
            found => return found,
        }
        let workers = read(&self.workers);
        let own = workers.iter().position(|queue| Arc::ptr_eq(queue, &worker.0)).unwrap_or(0);
        for victim in workers[own..].iter().chain(&workers[..own]) {
            // Half of it: the owner is about to work on the rest.
            let share = victim.len.load(Ordering::SeqCst).div_ceil(2).min(want);
            match self.take_from(victim, share, hand) {
                Take::Nothing => {}
                found => return found,
            }
        }
        Take::Nothing
    }

    /// Takes messages back that were taken and not begun. Returns how many workers to wake.
    pub fn give_back(&self, hand: impl DoubleEndedIterator<Item = Taken<S>>) -> usize {
        let mut wakes = 0;
        // The youngest first, each in front of those that are younger.
        for Taken { source, message, class } in hand.rev() {
            let mut parked = None;
            if let Some(class) = class.and_then(|class| self.classes.get(class)) {
                let mut state = lock(&class.state);
                state.running -= 1;
                parked = state.parked.pop_front();
            }
            let mut head = Some(message);
            if let Some(lane) = source.lane() {
                let mut lane = lock(&lane.0);
                if lane.running > 1
                    && let Some(message) = head.take()
                {
                    // An older one is in a queue or with a worker.
                    lane.running -= 1;
                    lane.waiting.push_front(message);
                }
            }
            let mut entries = lock(&self.common.entries);
            let before = entries.len();
            if let Some(message) = head {
                entries.push_front(Entry::Message(source, message));
            }
            entries.extend(parked.map(|(source, message)| Entry::Message(source, message)));
            let added = entries.len() - before;
            self.common.len.fetch_add(added, Ordering::SeqCst);
            self.queued.fetch_add(added, Ordering::SeqCst);
            drop(entries);
            wakes += self.claim_wakes(added);
        }
        wakes
    }

    /// A message is done with. `worker` is the one that calls, if one does. Returns how many workers to wake.
    pub fn finish(&self, worker: Option<&Worker<S>>, source: &S, class: Option<usize>) -> usize {
        let mut freed = 0;
        if let Some(class) = class.and_then(|class| self.classes.get(class)) {
            let mut state = lock(&class.state);
            state.running -= 1;
            let next = state.parked.pop_front();
            drop(state);
            freed += self.append(worker, next.map(|(source, message)| Entry::Message(source, message)));
        }
        if let Some(lane) = source.lane() {
            let mut lane = lock(&lane.0);
            lane.running -= 1;
            let next = if lane.running == 0 { lane.waiting.pop_front() } else { None };
            lane.running += usize::from(next.is_some());
            drop(lane);
            freed += self.append(worker, next.map(|message| Entry::Message(source.clone(), message)));
        }
        self.claim_wakes(freed.saturating_sub(usize::from(worker.is_some())))
    }

    /// Says that a worker found nothing and will sleep. False: something was queued meanwhile, it must look again.
    /// After true it sleeps until it is signalled or has another reason to wake, and then calls [`Self::awake`].
    pub fn sleep(&self) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // After the addition: a push that does not see this sleeper is seen here.
        if self.queued.load(Ordering::SeqCst) == 0 {
            return true;
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// A worker woke up; `signals` wake-ups were meant for somebody and taken by it.
    pub fn awake(&self, signals: usize) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.signals.fetch_sub(signals, Ordering::SeqCst);
    }

    /// A worker that does not sleep took so many wake-ups.
    pub fn note_signals(&self, signals: usize) {
        self.signals.fetch_sub(signals, Ordering::SeqCst);
    }

    /// True while a worker waits for something to do.
    pub fn has_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) > 0
    }

    /// Entries that wait.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// How many workers to wake for what is queued: for one that has queued it, and taken wake-ups, and takes nothing.
    pub fn rouse(&self) -> usize {
        self.claim_wakes(self.queued())
    }

    /// How many of `wanted` wake-ups find a sleeper that none is on its way to. The caller must send as many.
    fn claim_wakes(&self, wanted: usize) -> usize {
        if wanted == 0 {
            return 0;
        }
        let sleepers = self.sleepers.load(Ordering::SeqCst);
        let mut signals = self.signals.load(Ordering::SeqCst);
        loop {
            let wakes = wanted.min(sleepers.saturating_sub(signals));
            if wakes == 0 {
                return 0;
            }
            let claimed = self.signals.compare_exchange(signals, signals + wakes, Ordering::SeqCst, Ordering::SeqCst);
            match claimed {
                Ok(_) => return wakes,
                Err(now) => signals = now,
            }
        }
    }

    fn append(&self, worker: Option<&Worker<S>>, entries: impl IntoIterator<Item = Entry<S>>) -> usize {
        let queue = worker.map_or(&self.common, |worker| &worker.0);
        let mut queued = lock(&queue.entries);
        let before = queued.len();
        queued.extend(entries);
        let added = queued.len() - before;
        // Under the lock: whoever takes them must not subtract before this adds.
        queue.len.fetch_add(added, Ordering::SeqCst);
        self.queued.fetch_add(added, Ordering::SeqCst);
        added
    }

    fn take_from(&self, queue: &Queue<S>, want: usize, hand: &mut VecDeque<Taken<S>>) -> Take<S> {
        if queue.len.load(Ordering::SeqCst) == 0 {
            return Take::Nothing;
        }
        let mut entries = lock(&queue.entries);
        let mut popped = 0;
        let mut found = Take::Nothing;
        let mut taken = 0;
        while taken < want {
            match entries.front() {
                None => break,
                Some(Entry::Visit(_)) if taken > 0 => break,
                // A batch is of one connection: its replies leave together.
                Some(Entry::Message(source, _))
                    if taken > 0 && !hand.back().is_some_and(|last| last.source.is_same(source)) =>
                {
                    break;
                }
                Some(_) => {}
            }
            popped += 1;
            match entries.pop_front() {
                None => break,
                Some(Entry::Visit(source)) => {
                    found = Take::Visit(source);
                    break;
                }
                Some(Entry::Message(source, message)) => {
                    if let Some(admitted) = self.admit(source, message) {
                        hand.push_back(admitted);
                        taken += 1;
                        found = Take::Messages;
                    }
                }
            }
        }
        queue.len.fetch_sub(popped, Ordering::SeqCst);
        self.queued.fetch_sub(popped, Ordering::SeqCst);
        drop(entries);
        if taken == 1 {
            self.fill_from_lane(want, hand);
        }
        found
    }

    /// The message, unless its class is at its cap: then it is put aside until one of the class is finished.
    fn admit(&self, source: S, message: S::Message) -> Option<Taken<S>> {
        let class = source.class(&message).filter(|class| *class < self.classes.len());
        if let Some(at) = class {
            let Class { cap, state } = &self.classes[at];
            let mut state = lock(state);
            if state.running >= *cap {
                state.parked.push_back((source, message));
                return None;
            }
            state.running += 1;
        }
        Some(Taken { source, message, class })
    }

    /// The rest of a batch from a connection that keeps its order: what waits in its lane, up to one that is capped.
    fn fill_from_lane(&self, want: usize, hand: &mut VecDeque<Taken<S>>) {
        let Some(source) = hand.back().map(|first| first.source.clone()) else { return };
        let Some(lane) = source.lane() else { return };
        let mut lane = lock(&lane.0);
        for _ in 1..want {
            let plain = lane.waiting.front().is_some_and(|message| source.class(message).is_none());
            let Some(message) = lane.waiting.pop_front_if(|_| plain) else { return };
            lane.running += 1;
            hand.push_back(Taken { source: source.clone(), message, class: None });
        }
    }
}

/// How many messages a busy worker takes at once, told by how long it worked on the last ones.
///
/// What it has taken nobody can take from it, so that must be little work: [`Self::WORK_MAX_NS`]. Messages that cost
/// more are taken one by one; those that cost less than a look into the queues, in batches.
#[derive(Clone, Copy, Debug)]
pub struct BatchSize {
    message_ns: u64,
}

impl BatchSize {
    /// Work that may be bound to a worker beyond the message it works on.
    pub const WORK_MAX_NS: u64 = 50_000;
    /// Most messages taken at once.
    pub const MESSAGES_MAX: usize = 64;

    /// For a worker that knows nothing of its messages yet: one at a time.
    pub const fn new() -> Self {
        Self { message_ns: Self::WORK_MAX_NS }
    }

    /// Messages to take.
    pub fn want(&self) -> usize {
        let fit = Self::WORK_MAX_NS / self.message_ns.max(1);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::MESSAGES_MAX)
    }

    /// `messages` took `time_ns`. Expensive ones are believed at once, cheap ones after a while.
    pub fn observe(&mut self, time_ns: u64, messages: usize) {
        let each_ns = time_ns / messages.max(1) as u64;
        let weight = if each_ns > self.message_ns { 2 } else { 8 };
        self.message_ns = (self.message_ns * (weight - 1) + each_ns) / weight;
    }
}

impl Default for BatchSize {
    fn default() -> Self {
        Self::new()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn read<T>(lock: &RwLock<T>) -> impl std::ops::Deref<Target = T> + '_ {
    lock.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn write<T>(lock: &RwLock<T>) -> impl std::ops::DerefMut<Target = T> + '_ {
    lock.write().unwrap_or_else(|poisoned| poisoned.into_inner())
}
