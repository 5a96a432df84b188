//! Which worker gets which message next: the policy, without a socket, a clock or a thread of its own.
//!
//! ```text
//!   reads a chunk ──push──► queue of the reading worker ──take──► the same worker: one, or a batch while all are busy
//!                               ▲   │
//!                               │   └──steal (single messages while a worker is idle)──► any worker out of work
//!                               │   │
//!                next turn ─────┴───┴──park (its connection has done a millisecond of work)
//! ```
//!
//! A message is bound to a worker as late as possible: it lies in a queue that all may take from until one works
//! on it. What the multiplexor runs is also what `ksf-mux-sim` runs with a simulated clock (`docs/scheduling.md`), and
//! what `ksf-mux-explore` runs in one schedule of its threads after the other.
//!
//! Lessons behind the rules: late binding and stealing of single messages (ZygOS, SOSP'17), a bound on what a worker
//! takes beyond the message it works on (R2P2's JBSQ, ATC'19), room for short messages beside long ones (Persephone,
//! SOSP'21).

use std::collections::{HashMap, VecDeque};

use crate::sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, RwLock};

/// Where messages come from: a connection.
pub trait Source: Clone {
    /// A message.
    type Message;

    /// Number of the connection. No other connection has it while this value exists.
    fn key(&self) -> usize;

    /// True for the same connection.
    fn is_same(&self, other: &Self) -> bool {
        self.key() == other.key()
    }

    /// Set where messages are worked on one at a time, in their order.
    fn ordered_queue(&self) -> Option<&OrderedQueue<Self::Message>>;

    /// The class of a message, an index into the caps given to [`Scheduler::new`]. `None`: not capped.
    fn class(&self, message: &Self::Message) -> Option<usize>;

    /// True while none of its messages may be taken: its peer does not take what it is owed. When that has changed,
    /// [`Scheduler::unpark`] has to be called.
    fn is_throttled(&self) -> bool;

    /// Its messages that wait for that, or for its next turn.
    fn parked(&self) -> &Parked<Self::Message>;
}

/// Work in ns after which a connection gives way to the others: its messages in the queues are parked until its next turn.
pub const TURN_NS: usize = 1_000_000;

/// Messages of a connection that was throttled, or had done the work of a turn, when they were to be taken; and those that
/// arrived behind them.
#[derive(Debug)]
pub struct Parked<M> {
    state: Mutex<ParkedState<M>>,
    /// Messages in it, so that no thread locks an empty list.
    len: AtomicUsize,
    /// Work of the connection in its turn.
    work_ns: AtomicUsize,
}

#[derive(Debug)]
struct ParkedState<M> {
    messages: VecDeque<M>,
    /// Of these, those that were parked out of a queue since the last turn began. They are older than the others.
    from_queues: usize,
    /// The connection is in the queue for its next turn.
    has_turn: bool,
}

impl<M> Default for Parked<M> {
    fn default() -> Self {
        let state = Mutex::new(ParkedState { messages: VecDeque::new(), from_queues: 0, has_turn: false });
        Self { state, len: AtomicUsize::new(0), work_ns: AtomicUsize::new(0) }
    }
}

impl<M> Parked<M> {
    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Adds work on messages of the connection to its count. `is_last`: no message of it waits or is in work, so the count restarts.
    pub fn note_work(&self, ns: u64, is_last: bool) {
        if is_last {
            self.work_ns.store(0, Ordering::SeqCst);
        } else {
            // No more than ends the turn: the sum stays small.
            self.work_ns.fetch_add(usize::try_from(ns).unwrap_or(TURN_NS).min(TURN_NS), Ordering::SeqCst);
        }
    }

    /// True if the work of a turn is done.
    fn is_turn_over(&self) -> bool {
        self.work_ns.load(Ordering::SeqCst) >= TURN_NS
    }
}

/// Messages of a connection that keeps their order: those that wait for the ones worked on.
#[derive(Debug)]
pub struct OrderedQueue<M>(Mutex<OrderedState<M>>);

#[derive(Debug)]
struct OrderedState<M> {
    /// A message is in a queue or with a worker.
    busy: bool,
    waiting: VecDeque<M>,
}

impl<M> Default for OrderedQueue<M> {
    fn default() -> Self {
        Self(Mutex::new(OrderedState { busy: false, waiting: VecDeque::new() }))
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
    /// In a connection that keeps its order: another message waits for this one, and all workers are busy, so that the
    /// answer may wait for the next one.
    pub more: bool,
}

/// What [`Scheduler::take`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Take<S> {
    /// Nothing: every queue is empty.
    Nothing,
    /// Messages; they were appended to the lease.
    Messages,
    /// The turn of a connection. All messages in the queues were taken; what others have sent meanwhile is to be read first.
    Turn(Turn<S>),
}

/// What a connection waits for behind all messages in the queues.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn<S> {
    /// It has to be read again.
    Reread(S),
    /// Its parked messages may be taken again: [`Scheduler::begin_turn`] has to be called.
    Parked(S),
}

/// The turns that connections wait for. Rereads and the others take turns themselves: a read is short, and a long message takes many,
/// each of which would wait for a turn of every connection that has work.
struct Turns<S> {
    rereads: VecDeque<S>,
    parked: VecDeque<S>,
    is_reread_next: bool,
}

impl<S> Turns<S> {
    fn next(&mut self) -> Option<Turn<S>> {
        let is_reread = !self.rereads.is_empty() && (self.is_reread_next || self.parked.is_empty());
        self.is_reread_next = !is_reread;
        if is_reread { self.rereads.pop_front().map(Turn::Reread) } else { self.parked.pop_front().map(Turn::Parked) }
    }
}

/// Most entries that an empty queue keeps room for. A queue that was longer frees its memory when it is empty. Growing again costs
/// little beside the work on that many messages.
const ROOM_KEPT: usize = 4096;

/// The queue of one worker, which every other may take from.
pub struct Worker<S: Source>(Arc<Queue<S>>);

struct Queue<S: Source> {
    entries: Mutex<VecDeque<Entry<S>>>,
    /// Entries in it, so that no thread locks an empty queue.
    len: AtomicUsize,
}

/// A message, and where it came from.
type Entry<S> = (S, <S as Source>::Message);

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
    /// Connections with parked messages, each once; they take turns.
    turns: VecDeque<S>,
    /// Their messages, by [`Source::key`].
    parked: HashMap<usize, VecDeque<S::Message>>,
}

impl<S: Source> ClassState<S> {
    fn park(&mut self, source: S, message: S::Message) {
        let messages = self.parked.entry(source.key()).or_default();
        if messages.is_empty() {
            self.turns.push_back(source);
        }
        messages.push_back(message);
    }

    /// The next message that was parked.
    fn unpark(&mut self) -> Option<Entry<S>> {
        let source = self.turns.pop_front()?;
        let key = source.key();
        let messages = self.parked.get_mut(&key)?;
        let message = messages.pop_front()?;
        if messages.is_empty() {
            self.parked.remove(&key);
        } else {
            self.turns.push_back(source.clone());
        }
        Some((source, message))
    }
}

/// Queues, and how many workers sleep.
pub struct Scheduler<S: Source> {
    workers: RwLock<Vec<Arc<Queue<S>>>>,
    /// What comes from threads that are no workers, and what workers left behind.
    common: Queue<S>,
    /// Connections that gave way to the messages in the other queues. All workers take them, when these are empty: each brings
    /// no more than the work of a turn there, so none waits for ever.
    turns: Mutex<Turns<S>>,
    /// Entries in all queues.
    queued: Padded,
    /// Workers that wait for something to do.
    sleepers: Padded,
    /// Wake-ups on their way to them.
    signals: Padded,
    /// Wake-ups that may still be sent: one per entry ever queued, less those that were sent.
    wakes_left: Padded,
    classes: Box<[Class<S>]>,
}

/// A counter on cache lines of its own (CPUs fetch them in pairs): workers that read one are not slowed down by those
/// that write another.
#[repr(align(128))]
struct Padded(AtomicUsize);

impl std::ops::Deref for Padded {
    type Target = AtomicUsize;

    fn deref(&self) -> &AtomicUsize {
        &self.0
    }
}

impl<S: Source> Scheduler<S> {
    /// A scheduler without workers. `class_caps`: how many messages of each class may be worked on at once.
    pub fn new(class_caps: &[usize]) -> Self {
        let class = |cap: &usize| Class {
            cap: (*cap).max(1),
            state: Mutex::new(ClassState { running: 0, turns: VecDeque::new(), parked: HashMap::new() }),
        };
        Self {
            workers: RwLock::new(Vec::new()),
            common: Queue::default(),
            turns: Mutex::new(Turns { rereads: VecDeque::new(), parked: VecDeque::new(), is_reread_next: true }),
            queued: Padded(AtomicUsize::new(0)),
            sleepers: Padded(AtomicUsize::new(0)),
            signals: Padded(AtomicUsize::new(0)),
            wakes_left: Padded(AtomicUsize::new(0)),
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
    ///
    /// A caller works on one at once, and on none if something was in its queue before.
    pub fn push(
        &self,
        worker: Option<&Worker<S>>,
        source: &S,
        messages: impl IntoIterator<Item = S::Message>,
    ) -> usize {
        let mut messages = messages.into_iter();
        let wanted = if let Some(ordered) = source.ordered_queue() {
            let mut ordered = lock(&ordered.0);
            // While one is worked on they wait; the worker that finishes it queues the next.
            let head = if ordered.busy { None } else { messages.next() };
            ordered.waiting.extend(messages);
            ordered.busy |= head.is_some();
            drop(ordered);
            self.append(worker, head.map(|message| (source.clone(), message)))
        } else if self.park_behind(source, &mut messages) {
            0
        } else {
            self.append(worker, messages.map(|message| (source.clone(), message)))
        };
        self.claim_wakes(wanted)
    }

    /// Parks messages behind those that are parked. False: there are none.
    fn park_behind(&self, source: &S, messages: &mut impl Iterator<Item = S::Message>) -> bool {
        let parked = source.parked();
        if parked.is_empty() {
            return false;
        }
        let mut state = lock(&parked.state);
        let before = state.messages.len();
        if before > 0 {
            state.messages.extend(messages);
            parked.len.fetch_add(state.messages.len() - before, Ordering::SeqCst);
        }
        before > 0
    }

    /// Asks for another read of a connection when all that is queued was taken. Returns how many workers to wake.
    pub fn push_reread(&self, worker: Option<&Worker<S>>, source: S) -> usize {
        self.push_turn(Turn::Reread(source));
        // A caller without messages takes it at once.
        self.claim_wakes(usize::from(worker.is_none_or(|worker| worker.0.len.load(Ordering::SeqCst) > 0)))
    }

    fn push_turn(&self, turn: Turn<S>) {
        let mut turns = lock(&self.turns);
        match turn {
            Turn::Reread(source) => turns.rereads.push_back(source),
            Turn::Parked(source) => turns.parked.push_back(source),
        }
        self.count_queued(1);
    }

    /// Lets some of a connection's parked messages be taken, `max` at most; for the others it is queued for another turn.
    /// `worker` is the one that calls, and will take next. Returns how many others to wake.
    pub fn begin_turn(&self, worker: &Worker<S>, source: &S, max: usize) -> usize {
        let parked = source.parked();
        let mut state = lock(&parked.state);
        state.has_turn = false;
        parked.work_ns.store(0, Ordering::SeqCst);
        // After the mark is gone: the thread that ends the throttling later sees that, and queues the connection.
        if source.is_throttled() {
            return 0;
        }
        let count = state.messages.len().min(max.max(1));
        let messages: Vec<_> = state.messages.drain(..count).collect();
        state.from_queues = 0;
        parked.len.fetch_sub(count, Ordering::SeqCst);
        state.has_turn = !state.messages.is_empty();
        let has_more = state.has_turn;
        drop(state);
        let mut wanted = self.append(Some(worker), messages.into_iter().map(|message| (source.clone(), message)));
        if has_more {
            self.push_turn(Turn::Parked(source.clone()));
            wanted += 1;
        }
        self.claim_wakes(wanted)
    }

    /// Work for a worker, its own first, then that of others, then the next turn of a connection. Messages are appended to
    /// `lease`: one while others are idle, up to `want` while all are busy, always of one connection.
    pub fn take(&self, worker: &Worker<S>, want: usize, lease: &mut VecDeque<Taken<S>>) -> Take<S> {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return Take::Nothing;
        }
        let want = if self.sleepers.load(Ordering::SeqCst) > 0 { 1 } else { want.max(1) };
        match self.take_from(&worker.0, want, lease) {
            Take::Nothing => {}
            found => return found,
        }
        match self.take_from(&self.common, want, lease) {
            Take::Nothing => {}
            found => return found,
        }
        let workers = read(&self.workers);
        let own = workers.iter().position(|queue| Arc::ptr_eq(queue, &worker.0)).unwrap_or(0);
        for victim in workers[own..].iter().chain(&workers[..own]) {
            // Half of it: the owner is about to work on the rest.
            let share = victim.len.load(Ordering::SeqCst).div_ceil(2).min(want);
            match self.take_from(victim, share, lease) {
                Take::Nothing => {}
                found => return found,
            }
        }
        drop(workers);
        let mut turns = lock(&self.turns);
        let Some(turn) = turns.next() else { return Take::Nothing };
        self.queued.fetch_sub(1, Ordering::SeqCst);
        Take::Turn(turn)
    }

    /// Takes messages back that were taken and not begun. Returns how many workers to wake.
    pub fn give_back(&self, lease: impl DoubleEndedIterator<Item = Taken<S>>) -> usize {
        let mut wakes = 0;
        // The youngest first, each in front of those that are younger.
        for Taken { source, message, class, .. } in lease.rev() {
            let mut parked = None;
            if let Some(class) = class.and_then(|class| self.classes.get(class)) {
                let mut state = lock(&class.state);
                state.running -= 1;
                parked = state.unpark();
            }
            let mut entries = lock(&self.common.entries);
            let before = entries.len();
            entries.push_front((source, message));
            entries.extend(parked);
            let added = entries.len() - before;
            self.common.len.fetch_add(added, Ordering::SeqCst);
            self.count_queued(added);
            drop(entries);
            wakes += self.claim_wakes(added);
        }
        wakes
    }

    /// A message is done with. `worker` is the one that calls, if one does. Returns how many workers to wake.
    pub fn finish(&self, worker: Option<&Worker<S>>, source: &S, class: Option<usize>) -> usize {
        let mut wanted = 0;
        if let Some(class) = class.and_then(|class| self.classes.get(class)) {
            let mut state = lock(&class.state);
            state.running -= 1;
            let next = state.unpark();
            drop(state);
            wanted += self.append(worker, next);
        }
        if let Some(ordered) = source.ordered_queue() {
            let mut ordered = lock(&ordered.0);
            let next = ordered.waiting.pop_front();
            ordered.busy = next.is_some();
            drop(ordered);
            wanted += self.append(worker, next.map(|message| (source.clone(), message)));
        }
        self.claim_wakes(wanted)
    }

    /// A connection is throttled no longer: it is queued for a turn. Returns how many workers to wake.
    pub fn unpark(&self, source: &S) -> usize {
        let mut state = lock(&source.parked().state);
        if state.messages.is_empty() || std::mem::replace(&mut state.has_turn, true) {
            return 0;
        }
        self.push_turn(Turn::Parked(source.clone()));
        drop(state);
        self.claim_wakes(1)
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

    /// A worker woke up; `signals` wake-ups were meant for any worker and taken by it.
    pub fn awake(&self, signals: usize) {
        // In this order: a push between the two that took the wake-up for one on its way to another sleeper would leave
        // that one asleep.
        self.signals.fetch_sub(signals, Ordering::SeqCst);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// A worker that does not sleep took so many wake-ups.
    pub fn note_signals(&self, signals: usize) {
        self.signals.fetch_sub(signals, Ordering::SeqCst);
    }

    /// To be asked by a worker that took something, before it works on it: how many to wake for what it leaves behind.
    ///
    /// A wake-up may have been taken by a worker that was awake already, and that then found other work. This passes it
    /// on, so that nothing waits in a queue while a worker sleeps and no other looks.
    pub fn pass_on(&self) -> usize {
        if self.sleepers.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let queued = self.queued.load(Ordering::SeqCst);
        // The worker that is woken asks the same.
        self.claim_wakes(queued.saturating_sub(self.signals.load(Ordering::SeqCst)).min(1))
    }

    /// To be asked by a worker that may have taken a wake-up and will not look for work: how many to wake in its place.
    pub fn decline(&self) -> usize {
        self.wakes_left.fetch_add(1, Ordering::SeqCst);
        self.pass_on()
    }

    /// True while a worker waits for something to do.
    pub fn has_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) > 0
    }

    /// Entries that wait.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// How many workers to wake for what is queued: for one that has queued it, and may have taken a wake-up, and takes
    /// nothing.
    pub fn rouse(&self) -> usize {
        self.wakes_left.fetch_add(1, Ordering::SeqCst);
        self.claim_wakes(self.queued())
    }

    /// Wakes every worker, to look at something else than the queues. Returns how many workers to wake.
    pub fn wake_all(&self) -> usize {
        let sleepers = self.sleepers.load(Ordering::SeqCst);
        self.wakes_left.fetch_add(sleepers, Ordering::SeqCst);
        self.claim_wakes(sleepers)
    }

    /// Throws away everything that waits: no worker will come for it.
    pub fn clear(&self) {
        let workers = read(&self.workers);
        for queue in workers.iter().map(|queue| &**queue).chain([&self.common]) {
            let entries = std::mem::take(&mut *lock(&queue.entries));
            queue.len.fetch_sub(entries.len(), Ordering::SeqCst);
            self.queued.fetch_sub(entries.len(), Ordering::SeqCst);
        }
        let mut turns = lock(&self.turns);
        let (rereads, parked) = (std::mem::take(&mut turns.rereads), std::mem::take(&mut turns.parked));
        drop(turns);
        self.queued.fetch_sub(rereads.len() + parked.len(), Ordering::SeqCst);
        for class in &self.classes {
            let mut state = lock(&class.state);
            state.turns.clear();
            state.parked.clear();
        }
    }

    /// How many of `wanted` wake-ups find a sleeper that none is on its way to. The caller must send as many.
    fn claim_wakes(&self, wanted: usize) -> usize {
        if wanted == 0 || self.sleepers.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        // Taken before the sleepers are counted: a thread that finds none left relies on the one that took them.
        let mut allowed = 0;
        let _ = self.wakes_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
            allowed = left.min(wanted);
            Some(left - allowed)
        });
        let sleepers = self.sleepers.load(Ordering::SeqCst);
        let mut claimed = 0;
        let _ = self.signals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |signals| {
            claimed = allowed.min(sleepers.saturating_sub(signals));
            (claimed > 0).then_some(signals + claimed)
        });
        self.wakes_left.fetch_add(allowed - claimed, Ordering::SeqCst);
        claimed
    }

    fn count_queued(&self, added: usize) {
        self.wakes_left.fetch_add(added, Ordering::SeqCst);
        self.queued.fetch_add(added, Ordering::SeqCst);
    }

    /// Returns how many of the entries the caller will not work on at once.
    fn append(&self, worker: Option<&Worker<S>>, entries: impl IntoIterator<Item = Entry<S>>) -> usize {
        let queue = worker.map_or(&self.common, |worker| &worker.0);
        let mut queued = lock(&queue.entries);
        let before = queued.len();
        queued.extend(entries);
        let added = queued.len() - before;
        // Under the lock: the worker that takes them must not subtract before this adds.
        queue.len.fetch_add(added, Ordering::SeqCst);
        self.count_queued(added);
        added.saturating_sub(usize::from(worker.is_some() && before == 0))
    }

    fn take_from(&self, queue: &Queue<S>, want: usize, lease: &mut VecDeque<Taken<S>>) -> Take<S> {
        if queue.len.load(Ordering::SeqCst) == 0 {
            return Take::Nothing;
        }
        let mut entries = lock(&queue.entries);
        let mut popped = 0;
        let mut found = Take::Nothing;
        let mut taken = 0;
        while taken < want {
            // A batch is of one connection: its replies leave together.
            let is_next =
                |(source, _): &mut Entry<S>| taken == 0 || lease.back().is_some_and(|last| last.source.is_same(source));
            let Some((source, message)) = entries.pop_front_if(is_next) else { break };
            popped += 1;
            if let Some(admitted) = self.admit(source, message, queue, &mut entries) {
                lease.push_back(admitted);
                taken += 1;
                found = Take::Messages;
            }
        }
        if entries.is_empty() && entries.capacity() > ROOM_KEPT {
            *entries = VecDeque::new();
        }
        let len = queue.len.fetch_sub(popped, Ordering::SeqCst);
        let queued = self.queued.fetch_sub(popped, Ordering::SeqCst);
        debug_assert!(popped <= len && popped <= queued, "taken before it was counted");
        drop(entries);
        if want > 1
            && let Some(last) = lease.back_mut().filter(|_| taken == 1)
            && let Some(ordered) = last.source.ordered_queue()
        {
            last.more = !lock(&ordered.0).waiting.is_empty();
        }
        found
    }

    /// The message, unless its connection is throttled or has done the work of its turn, or its class is at its cap: then it is
    /// put aside until the connection has its next turn, or one of the class is finished. `entries` are those of the queue that
    /// it was in.
    fn admit(
        &self,
        source: S,
        message: S::Message,
        queue: &Queue<S>,
        entries: &mut VecDeque<Entry<S>>,
    ) -> Option<Taken<S>> {
        let class = source.class(&message).filter(|class| *class < self.classes.len());
        let message = if source.is_throttled() || source.parked().is_turn_over() {
            let Some(message) = self.park(&source, message) else {
                if let Some(next) = class.and_then(|class| self.next_below_cap(class)) {
                    entries.push_back(next);
                    queue.len.fetch_add(1, Ordering::SeqCst);
                    self.count_queued(1);
                }
                return None;
            };
            message
        } else {
            message
        };
        if let Some(at) = class {
            let Class { cap, state } = &self.classes[at];
            let mut state = lock(state);
            if state.running >= *cap {
                state.park(source, message);
                return None;
            }
            state.running += 1;
        }
        Some(Taken { source, message, class, more: false })
    }

    /// The next parked message of a class that has a place. To be asked for when a message of it is parked for its connection:
    /// the place may have been for that one.
    fn next_below_cap(&self, class: usize) -> Option<Entry<S>> {
        let Class { cap, state } = self.classes.get(class)?;
        let mut state = lock(state);
        if state.running < *cap { state.unpark() } else { None }
    }

    /// Parks a message while its connection is throttled or has done the work of its turn; else returns it.
    fn park(&self, source: &S, message: S::Message) -> Option<S::Message> {
        let parked = source.parked();
        let mut state = lock(&parked.state);
        // Counted before the look: an end of the throttling before it is seen by the look, and one after it sees the count.
        parked.len.fetch_add(1, Ordering::SeqCst);
        let is_throttled = source.is_throttled();
        if !is_throttled && !parked.is_turn_over() {
            parked.len.fetch_sub(1, Ordering::SeqCst);
            return Some(message);
        }
        let at = state.from_queues;
        state.messages.insert(at, message);
        state.from_queues += 1;
        if !is_throttled && !std::mem::replace(&mut state.has_turn, true) {
            // The worker that parks it takes it from there, or passes a wake-up on when it has found something else.
            self.push_turn(Turn::Parked(source.clone()));
        }
        None
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

#[cfg(test)]
#[path = "scheduler/tests.rs"] // also where `ksf-mux-explore` has this file
mod tests;
