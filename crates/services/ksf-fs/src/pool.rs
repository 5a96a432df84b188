//! A pool of lanes: the threads on which operations run, and their queues.
//!
//! The framework's pool for tasks that block would not do: a thread that cannot go back to the server's identity must end, its
//! threads serve others that need the capabilities that a lane gives up, and its queue counts tasks but not their bytes.
//!
//! ```text
//!   submit ─► a queue for each share ─► lane 1..n        a lane without its identity ends
//!             (bytes are counted)                                              │
//!                                                        keeper ◄──────────────┘ starts another
//! ```
//!
//! A share is an export. Shares take turns. Where there are several, a share has at most half of the lanes, and the last quarter
//! of the lanes is left to shares that have none: a share whose file system hangs does not stop the others.
//!
//! Of the lanes of a share a quarter, or at least one, is left to its short jobs, so that what needs no medium does not wait for
//! what does.
//!
//! Within a share the accounts of connections take turns, one for short jobs and one for long ones: a job waits for at most one short
//! and one long job of each other connection, and not for all that these have sent. The jobs of one account and length begin in their
//! order.
//!
//! A thread inherits identity and capabilities of the one that starts it, so none is started by a lane: the keeper does, which
//! has those of the thread that started the pool.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ksf::threads;

use crate::account::Account;
use crate::lane::{Identities, Lane, LaneError};
use crate::syncs::Syncs;

/// How long the keeper waits before it tries again to start a thread that the system refused.
const RETRY: Duration = Duration::from_millis(100);

/// Figures of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolCounters {
    /// Jobs that wait now.
    pub(crate) queued_jobs: usize,
    /// Bytes of the jobs that wait now.
    pub(crate) queued_bytes: usize,
    /// Jobs that run now.
    pub(crate) running_jobs: usize,
    /// Lanes that live now.
    pub(crate) lanes: usize,
    /// Jobs that ran.
    pub(crate) done: u64,
    /// Jobs that panicked, which ran, too.
    pub(crate) panicked: u64,
}

/// What a pool is started with.
#[derive(Debug)]
pub(crate) struct PoolOptions {
    /// Name of its threads.
    pub(crate) name: &'static str,
    /// Threads; at least 1.
    pub(crate) threads: usize,
    /// Shares; at least 1.
    pub(crate) shares: usize,
    /// Where its lanes leave what waits for the medium.
    pub(crate) syncs: Option<Arc<Syncs>>,
}

/// How long a job may keep its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// It looks, or changes a name or an attribute: mostly in memory.
    Short,
    /// It moves data or lists a folder: it may wait for the medium many times.
    Long,
}

type Work = Box<dyn FnOnce(&mut Lane) + Send>;

struct Job {
    account: Account,
    length: Length,
    bytes: usize,
    work: Work,
}

/// A pool. Dropping it drops the jobs that wait and waits for those that run.
#[derive(Debug)]
pub(crate) struct Pool {
    queue: Queue,
    keeper: Option<JoinHandle<()>>,
    identities: Identities,
}

/// The way into a pool; it does not keep the threads.
#[derive(Clone, Debug)]
pub(crate) struct Queue(Arc<Shared>);

impl Queue {
    /// Puts a job into the queue of its share, which has no bound: the giver has one for what it reads. `bytes` is the memory that
    /// the job keeps.
    ///
    /// A job that panics is counted, and its captured values are dropped. After the end of the pool jobs are dropped: false.
    pub(crate) fn submit(
        &self,
        account: Account,
        share: usize,
        length: Length,
        bytes: usize,
        job: impl FnOnce(&mut Lane) + Send + 'static,
    ) -> bool {
        let job = Job { account, length, bytes, work: Box::new(job) };
        let mut inner = self.0.lock();
        if inner.is_closed {
            drop(inner);
            // Outside of the lock: captured values may call back.
            drop(job);
            return false;
        }
        inner.bytes += job.bytes;
        let (at, turn) = (share % inner.shares.len(), inner.next_turn());
        inner.shares[at].queue_mut(length).push(turn, job);
        drop(inner);
        self.0.work.notify_one();
        true
    }

    /// Figures until now.
    pub(crate) fn counters(&self) -> PoolCounters {
        let inner = self.0.lock();
        let queued_jobs = inner.shares.iter().map(Share::len).sum();
        let Inner { bytes: queued_bytes, running: running_jobs, lanes, counters, .. } = *inner;
        PoolCounters { queued_jobs, queued_bytes, running_jobs, lanes, ..counters }
    }
}

impl Pool {
    /// Starts all threads.
    ///
    /// # Errors
    ///
    /// [`LaneError`]: there is no thread to be had, or it cannot become a lane.
    pub(crate) fn start(options: PoolOptions) -> Result<Self, LaneError> {
        let options = PoolOptions { threads: options.threads.max(1), ..options };
        let inner = Inner::new(options.threads, options.shares.max(1));
        let shared = Shared { options, inner: Mutex::new(inner), work: Condvar::new(), changed: Condvar::new() };
        let mut pool = Self { queue: Queue(Arc::new(shared)), keeper: None, identities: Identities::Own };
        for _ in 0..pool.queue.0.options.threads {
            // When one fails, those that were started end with `pool`.
            pool.identities = pool.queue.0.start_lane()?;
        }
        let shared = Arc::clone(&pool.queue.0);
        let keeper = threads::start("ksf-fs-keeper", move || shared.keep());
        pool.keeper = Some(keeper.map_err(LaneError::Thread)?);
        Ok(pool)
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// As whom operations run.
    pub(crate) fn identities(&self) -> Identities {
        self.identities
    }

    /// Waits until no job waits or runs, or `deadline` is over.
    pub(crate) fn wait_until_idle(&self, deadline: Instant) {
        let shared = &self.queue.0;
        let mut inner = shared.lock();
        inner.is_awaited = true;
        while inner.running > 0 || inner.shares.iter().any(|share| share.len() > 0) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            inner = shared.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes no more jobs, drops those that wait, and waits until the running ones are done or `deadline` is over. Returns how
    /// many still run; their threads end with them.
    pub(crate) fn close(&self, deadline: Instant) -> usize {
        self.queue.0.refuse_and_drop();
        self.queue.0.wait_for_lanes(Some(deadline))
    }
}

impl Pool {
    /// Drops the jobs that wait, and waits for those that run unless [`Pool::close`] has.
    pub(crate) fn end(&mut self) {
        if self.queue.0.refuse_and_drop() {
            self.queue.0.wait_for_lanes(None);
        }
        if let Some(keeper) = self.keeper.take() {
            // It has been told to end.
            let _ = keeper.join();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.end();
    }
}

struct Shared {
    options: PoolOptions,
    inner: Mutex<Inner>,
    /// For lanes: a job, or the end.
    work: Condvar,
    /// For the keeper and for who waits for the end: a lane ended, the pool was closed, or it has nothing to do.
    changed: Condvar,
}

/// Jobs of one share and one length. Accounts take turns, one job each. Each call takes constant time.
#[derive(Default)]
struct Turns {
    /// First job of each account that has any, with the number of its turn, in the order of these numbers.
    first: VecDeque<(u64, Job)>,
    /// Further jobs of the same accounts, by their numbers. The queue of an account with one job allocates no memory.
    more: HashMap<u64, VecDeque<Job>>,
    len: usize,
}

impl Turns {
    /// `turn`: number of the account's turn if it has no other job here.
    fn push(&mut self, turn: u64, job: Job) {
        self.len += 1;
        match self.more.entry(job.account.number()) {
            Entry::Occupied(more) => more.into_mut().push_back(job),
            Entry::Vacant(none) => {
                none.insert(VecDeque::new());
                self.first.push_back((turn, job));
            }
        }
    }

    /// Number of the next turn.
    fn next(&self) -> Option<u64> {
        self.first.front().map(|(turn, _)| *turn)
    }

    /// Takes the next job. `turn`: number of its account's next turn.
    fn pop(&mut self, turn: u64) -> Option<Job> {
        let (_, job) = self.first.pop_front()?;
        self.len -= 1;
        if let Entry::Occupied(mut more) = self.more.entry(job.account.number()) {
            match more.get_mut().pop_front() {
                Some(next) => self.first.push_back((turn, next)),
                None => drop(more.remove()),
            }
        }
        Some(job)
    }
}

/// The jobs of one share.
#[derive(Default)]
struct Share {
    short: Turns,
    long: Turns,
    running: usize,
    /// The long ones among them.
    running_long: usize,
}

impl Share {
    /// Jobs that wait.
    fn len(&self) -> usize {
        self.short.len + self.long.len
    }

    fn queue_mut(&mut self, length: Length) -> &mut Turns {
        match length {
            Length::Short => &mut self.short,
            Length::Long => &mut self.long,
        }
    }

    /// Takes the job whose turn is the next one of those that may run. `turn`: number of its account's next turn.
    fn pop(&mut self, turn: u64, long_lanes_max: usize) -> Option<Job> {
        let long = self.long.next().filter(|_| self.running_long < long_lanes_max);
        let length = match (self.short.next(), long) {
            (Some(short), Some(long)) if short < long => Length::Short,
            (_, Some(_)) => Length::Long,
            (_, None) => Length::Short,
        };
        let job = self.queue_mut(length).pop(turn)?;
        self.running += 1;
        self.running_long += usize::from(length == Length::Long);
        Some(job)
    }

    fn ended(&mut self, length: Length) {
        self.running -= 1;
        self.running_long -= usize::from(length == Length::Long);
    }
}

struct Inner {
    shares: Vec<Share>,
    /// The share whose turn it is.
    next: usize,
    /// Lanes that one share may have.
    share_lanes_max: usize,
    /// Of these, lanes that long jobs may have.
    long_lanes_max: usize,
    /// Lanes that only a share without one may take.
    reserved: usize,
    /// All lanes.
    threads: usize,
    bytes: usize,
    /// Turns of accounts that were ever given.
    turns: u64,
    lanes: usize,
    running: usize,
    is_closed: bool,
    /// Somebody waits until there is nothing to do.
    is_awaited: bool,
    counters: PoolCounters,
}

impl Inner {
    fn new(threads: usize, shares: usize) -> Self {
        let (share_lanes_max, reserved) = if shares == 1 { (threads, 0) } else { (threads.div_ceil(2), threads / 4) };
        Self {
            shares: (0..shares).map(|_| Share::default()).collect(),
            next: 0,
            share_lanes_max,
            long_lanes_max: (share_lanes_max - (share_lanes_max / 4).max(1)).max(1),
            reserved,
            threads,
            bytes: 0,
            turns: 0,
            lanes: 0,
            running: 0,
            is_closed: false,
            is_awaited: false,
            counters: PoolCounters::default(),
        }
    }

    /// Number of the next turn of an account.
    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    /// The next job that may run, and its share.
    fn take(&mut self) -> Option<(usize, Job)> {
        let (free, turn) = (self.threads.saturating_sub(self.running), self.next_turn());
        let count = self.shares.len();
        for at in (self.next..self.next + count).map(|at| at % count) {
            let share = &mut self.shares[at];
            let has_room = share.running < self.share_lanes_max && free > self.reserved;
            if share.running > 0 && !has_room {
                continue;
            }
            let Some(job) = share.pop(turn, self.long_lanes_max) else { continue };
            self.running += 1;
            self.bytes -= job.bytes;
            self.next = (at + 1) % count;
            return Some((at, job));
        }
        None
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a lane and waits until it is one.
    fn start_lane(self: &Arc<Self>) -> Result<Identities, LaneError> {
        let (ready, is_ready) = mpsc::sync_channel(1);
        let shared = Arc::clone(self);
        self.lock().lanes += 1;
        let thread = threads::start(self.options.name, move || {
            match Lane::attach() {
                Ok(mut lane) => {
                    lane.leave_to(shared.options.syncs.clone());
                    // The other end waits for this.
                    let _ = ready.send(Ok(lane.identities()));
                    shared.run(lane);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
            shared.lock().lanes -= 1;
            shared.changed.notify_all();
        });
        if let Err(error) = thread {
            self.lock().lanes -= 1;
            return Err(LaneError::Thread(error));
        }
        let ended = || LaneError::Thread(std::io::Error::other("the thread ended at once"));
        is_ready.recv().unwrap_or_else(|_| Err(ended()))
    }

    fn run(&self, mut lane: Lane) {
        let mut inner = self.lock();
        loop {
            let Some((share, Job { account, length, work, .. })) = inner.take() else {
                if inner.is_closed {
                    return;
                }
                if inner.running == 0 && inner.is_awaited {
                    self.changed.notify_all();
                }
                inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(inner);
            lane.account = account;
            let panicked = catch_unwind(AssertUnwindSafe(|| work(&mut lane))).is_err();
            inner = self.lock();
            inner.running -= 1;
            let ended = &mut inner.shares[share];
            ended.ended(length);
            if ended.running == 0 && ended.len() > 0 {
                // This lane may take a job of another share, and a reserved one waits for the next job that comes.
                self.work.notify_one();
            }
            inner.counters.done += 1;
            inner.counters.panicked += u64::from(panicked);
            lane.owed = None;
            if lane.is_lost() {
                return;
            }
        }
    }

    /// The keeper's thread: starts a lane for each that ended.
    fn keep(self: &Arc<Self>) {
        let mut inner = self.lock();
        while !inner.is_closed {
            if inner.lanes >= self.options.threads {
                inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(inner);
            let started = self.start_lane();
            inner = self.lock();
            if started.is_err() && !inner.is_closed {
                inner = self.changed.wait_timeout(inner, RETRY).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// True if the lanes were open before.
    fn refuse_and_drop(&self) -> bool {
        let mut inner = self.lock();
        let was_open = !inner.is_closed;
        inner.is_closed = true;
        inner.bytes = 0;
        let take = |share: &mut Share| (std::mem::take(&mut share.short), std::mem::take(&mut share.long));
        let dropped: Vec<_> = inner.shares.iter_mut().map(take).collect();
        drop(inner);
        // Outside of the lock: captured values may call back.
        drop(dropped);
        self.work.notify_all();
        self.changed.notify_all();
        was_open
    }

    fn wait_for_lanes(&self, deadline: Option<Instant>) -> usize {
        let mut inner = self.lock();
        while inner.lanes > 0 {
            // Lanes without a job are on their way out.
            let left = deadline.filter(|_| inner.running > 0).map(|at| at.saturating_duration_since(Instant::now()));
            inner = match left {
                Some(Duration::ZERO) => return inner.running,
                Some(left) => self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
            };
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use ksf_test::Random;

    use super::*;

    fn lanes(threads: usize, shares: usize) -> Pool {
        Pool::start(PoolOptions { name: "ksf-fs-lane", threads, shares, syncs: None }).unwrap()
    }

    /// Puts a job of another connection into the queue of its share.
    fn submit(lanes: &Pool, share: usize, length: Length, bytes: usize, job: impl FnOnce(&mut Lane) + Send + 'static) {
        lanes.queue().submit(Account::default(), share, length, bytes, job);
    }

    /// Waits until `is_so` holds, which other threads make true.
    fn until(lanes: &Pool, is_so: impl Fn(PoolCounters) -> bool) {
        while !is_so(lanes.queue().counters()) {
            thread::yield_now();
        }
    }

    #[test]
    fn jobs_run_on_several_lanes_at_once() {
        let lanes = lanes(3, 1);
        // Passed only if three jobs run at the same time.
        let all = Arc::new(Barrier::new(4));
        for _ in 0..3 {
            let all = Arc::clone(&all);
            submit(&lanes, 0, Length::Short, 0, move |_| {
                all.wait();
            });
        }
        all.wait();
        until(&lanes, |counters| counters.done == 3);
        assert_eq!(lanes.queue().counters().lanes, 3);
    }

    #[test]
    fn a_job_that_panics_ends_no_lane() {
        let lanes = lanes(1, 1);
        submit(&lanes, 0, Length::Short, 0, |_| panic!("of the test"));
        submit(&lanes, 0, Length::Short, 0, |_| ());
        until(&lanes, |counters| counters.done == 2);
        assert_eq!((lanes.queue().counters().panicked, lanes.queue().counters().lanes), (1, 1));
    }

    #[test]
    fn a_lane_that_lost_its_identity_is_replaced() {
        let lanes = lanes(1, 1);
        let (sender, receiver) = mpsc::channel();
        for round in 0..3 {
            let sender = sender.clone();
            submit(&lanes, 0, Length::Short, 0, move |lane| {
                sender.send(thread::current().id()).unwrap();
                if round < 2 {
                    lane.lose();
                }
            });
        }
        let threads: Vec<_> = receiver.iter().take(3).collect();
        assert!(threads[0] != threads[1] && threads[1] != threads[2]);
        until(&lanes, |counters| counters.done == 3 && counters.lanes == 1);
    }

    /// A job of a share that ends with `gate`.
    fn block(lanes: &Pool, share: usize, length: Length, gate: &Arc<(Mutex<bool>, Condvar)>) {
        let gate = Arc::clone(gate);
        submit(lanes, share, length, 0, move |_| {
            let mut is_open = gate.0.lock().unwrap();
            while !*is_open {
                is_open = gate.1.wait(is_open).unwrap();
            }
        });
    }

    /// Ends the jobs of a gate.
    fn open(gate: &(Mutex<bool>, Condvar)) {
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
    }

    #[test]
    fn a_share_whose_jobs_hang_leaves_lanes_to_the_others() {
        let lanes = lanes(4, 3);
        let gate = Arc::<(Mutex<bool>, Condvar)>::default();
        let (sender, receiver) = mpsc::channel();
        // Two shares hang: the first on two lanes, the second on the one that is not reserved.
        for share in [0, 1] {
            (0..100).for_each(|_| block(&lanes, share, Length::Short, &gate));
            until(&lanes, |counters| counters.queued_jobs == if share == 0 { 98 } else { 98 + 99 });
        }
        for number in 0..10 {
            let sender = sender.clone();
            submit(&lanes, 2, Length::Short, 0, move |_| sender.send(number).unwrap());
        }
        let served: Vec<i32> = receiver.iter().take(10).collect();
        assert_eq!(served, (0..10).collect::<Vec<_>>());
        assert_eq!(lanes.queue().counters().queued_jobs, 98 + 99);
        open(&gate);
        until(&lanes, |counters| counters.done == 210);
    }

    #[test]
    fn a_share_without_a_lane_gets_a_reserved_one_while_others_wait() {
        let lanes = lanes(8, 5);
        let gates: [Arc<(Mutex<bool>, Condvar)>; 3] = Default::default();
        let [hanging, first, reserved] = &gates;
        // All lanes: the last two are reserved.
        for (share, gate) in [(0, hanging), (0, hanging), (0, hanging), (0, hanging), (1, hanging), (2, first)] {
            block(&lanes, share, Length::Short, gate);
        }
        until(&lanes, |counters| counters.running_jobs == 6);
        (3..5).for_each(|share| block(&lanes, share, Length::Short, reserved));
        until(&lanes, |counters| counters.running_jobs == 8);
        block(&lanes, 1, Length::Short, hanging);
        let (sender, receiver) = mpsc::channel();
        submit(&lanes, 2, Length::Short, 0, move |_| sender.send(()).unwrap());
        // The reserved lanes find nothing that may run, and sleep.
        open(reserved);
        until(&lanes, |counters| counters.done == 2);
        // The lane of this job takes the one of share 1, whose turn it is.
        open(first);
        receiver.recv_timeout(ksf_test::PATIENCE).unwrap();
        open(hanging);
        until(&lanes, |counters| counters.done == 10);
    }

    #[test]
    fn long_jobs_leave_lanes_to_the_short_ones_of_their_share() {
        for (threads, shares, long) in [(8, 1, 6), (4, 1, 3), (2, 1, 1), (8, 2, 3), (4, 2, 1)] {
            let lanes = lanes(threads, shares);
            let gate = Arc::<(Mutex<bool>, Condvar)>::default();
            (0..20).for_each(|_| block(&lanes, 0, Length::Long, &gate));
            until(&lanes, |counters| counters.queued_jobs == 20 - long);
            let (sender, receiver) = mpsc::channel();
            for number in 0..10 {
                let sender = sender.clone();
                submit(&lanes, 0, Length::Short, 0, move |_| sender.send(number).unwrap());
            }
            let served: Vec<i32> = receiver.iter().take(10).collect();
            assert!((0..10).all(|number| served.contains(&number)));
            assert_eq!(lanes.queue().counters().queued_jobs, 20 - long, "{threads} lanes, {shares} shares");
            open(&gate);
            until(&lanes, |counters| counters.done == 30);
        }
    }

    #[test]
    fn long_and_short_jobs_of_different_connections_begin_in_their_order() {
        let lanes = lanes(1, 1);
        let (started, (sender, receiver)) = (Arc::new(Barrier::new(2)), mpsc::channel());
        let start = Arc::clone(&started);
        submit(&lanes, 0, Length::Short, 0, move |_| {
            start.wait();
            start.wait();
        });
        started.wait();
        let [short, long] = [Length::Short, Length::Long];
        for (number, length) in [long, short, short, long, long, short].into_iter().enumerate() {
            let sender = sender.clone();
            submit(&lanes, 0, length, 0, move |_| sender.send(number).unwrap());
        }
        started.wait();
        assert_eq!(receiver.iter().take(6).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_job_waits_for_as_many_jobs_of_each_other_connection_as_of_its_own() {
        let mut random = Random::of_test(29);
        for _ in 0..200 {
            let accounts: Vec<Account> = (0..random.within(1..=8)).map(|_| Account::default()).collect();
            // By account: jobs that wait, each with the number of jobs that each account has begun when it came.
            let mut waiting: Vec<VecDeque<Vec<usize>>> = vec![VecDeque::new(); accounts.len()];
            let mut begun = vec![0; accounts.len()];
            let (mut turns, mut turn) = (Turns::default(), 0);
            for _ in 0..300 {
                turn += 1;
                if random.one_in(2) {
                    // A few send most jobs.
                    let at = random.length(accounts.len() - 1);
                    let job =
                        Job { account: accounts[at].clone(), length: Length::Long, bytes: at, work: Box::new(|_| ()) };
                    turns.push(turn, job);
                    waiting[at].push_back(begun.clone());
                } else if let Some(Job { bytes: at, .. }) = turns.pop(turn) {
                    let before = waiting[at].pop_front().expect("a job that was pushed");
                    let own = begun[at] - before[at] + 1;
                    let others = begun.iter().zip(&before).map(|(now, then)| now - then);
                    assert!(others.clone().all(|of_other| of_other <= own), "{own}: {:?}", others.collect::<Vec<_>>());
                    begun[at] += 1;
                }
                assert_eq!(turns.len, waiting.iter().map(VecDeque::len).sum::<usize>());
                assert_eq!(turns.more.len(), waiting.iter().filter(|jobs| !jobs.is_empty()).count());
            }
            while let Some(Job { bytes: at, .. }) = turns.pop(turn) {
                waiting[at].pop_front().unwrap();
            }
            assert!(turns.more.is_empty() && waiting.iter().all(VecDeque::is_empty), "no job is lost");
        }
    }

    #[test]
    fn long_jobs_of_a_connection_do_not_go_before_a_short_one_of_another() {
        let lanes = lanes(1, 1);
        let gate = Arc::<(Mutex<bool>, Condvar)>::default();
        block(&lanes, 0, Length::Short, &gate);
        until(&lanes, |counters| (counters.running_jobs, counters.queued_jobs) == (1, 0));
        let (sender, receiver) = mpsc::channel();
        let [flooding, other] = [(); 2].map(|()| Account::default());
        let jobs = (0..100).map(|_| (&flooding, Length::Long)).chain([(&other, Length::Short)]);
        for (number, (account, length)) in jobs.enumerate() {
            let sender = sender.clone();
            lanes.queue().submit(account.clone(), 0, length, 0, move |_| sender.send(number).unwrap());
        }
        open(&gate);
        assert_eq!(receiver.iter().take(3).collect::<Vec<_>>(), [0, 100, 1]);
        until(&lanes, |counters| counters.done == 102);
    }

    #[test]
    fn a_share_that_is_alone_has_all_lanes_and_shares_take_turns() {
        let alone = lanes(4, 1);
        let gate = Arc::<(Mutex<bool>, Condvar)>::default();
        (0..9).for_each(|_| block(&alone, 0, Length::Short, &gate));
        until(&alone, |counters| counters.queued_jobs == 5);
        open(&gate);
        // One lane: the order is that of the turns.
        let lanes = lanes(1, 2);
        let started = Arc::new(Barrier::new(2));
        let start = Arc::clone(&started);
        submit(&lanes, 0, Length::Short, 0, move |_| {
            start.wait();
            start.wait();
        });
        started.wait();
        let (sender, receiver) = mpsc::channel();
        for job in [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)] {
            let sender = sender.clone();
            submit(&lanes, job.0, Length::Short, 0, move |_| sender.send(job.1).unwrap());
        }
        started.wait();
        assert_eq!(receiver.iter().take(5).collect::<Vec<_>>(), [4, 1, 5, 2, 3]);
    }

    #[test]
    fn closing_drops_what_waits_and_leaves_what_runs() {
        let lanes = lanes(1, 1);
        let gate = Arc::new(Barrier::new(2));
        let (held, started) = (Arc::clone(&gate), Arc::new(Barrier::new(2)));
        let start = Arc::clone(&started);
        submit(&lanes, 0, Length::Short, 0, move |_| {
            start.wait();
            held.wait();
        });
        started.wait();
        let dropped = Arc::new(());
        let captured = Arc::clone(&dropped);
        submit(&lanes, 0, Length::Short, 10, move |_| drop(captured));
        assert_eq!(lanes.close(Instant::now()), 1);
        assert_eq!(Arc::strong_count(&dropped), 1);
        submit(&lanes, 0, Length::Short, 0, |_| panic!("runs after the end"));
        gate.wait();
        drop(lanes);
    }
}
