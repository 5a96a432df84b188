//! Lanes: the threads on which operations run, and their queue.
//!
//! The framework's pool for tasks that block would not do: a thread that cannot go back to the server's identity must end, its
//! threads serve others that need the capabilities that a lane gives up, and its queue counts tasks but not their bytes.
//!
//! ```text
//!   submit ─► queue (jobs and bytes are counted) ─► lane 1..n        a lane without its identity ends
//!                                                                                  │
//!                                                              keeper ◄────────────┘ starts another
//! ```
//!
//! A thread inherits identity and capabilities of the one that starts it, so none is started by a lane: the keeper does, which
//! has those of the thread that started the lanes.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::lane::{Identities, Lane, LaneError};

/// How long the keeper waits before it tries again to start a thread that the system refused.
const RETRY: Duration = Duration::from_millis(100);

/// How many lanes there are.
#[derive(Clone, Debug)]
pub struct LaneOptions {
    /// Threads; at least 1. More than CPUs, because they wait for disks. Default 16.
    pub threads: usize,
}

impl Default for LaneOptions {
    fn default() -> Self {
        Self { threads: 16 }
    }
}

/// Figures of the lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounters {
    /// Jobs that wait now.
    pub queued_jobs: usize,
    /// Bytes of the jobs that wait now.
    pub queued_bytes: usize,
    /// Lanes that live now.
    pub lanes: usize,
    /// Jobs that ran.
    pub done: u64,
    /// Jobs that panicked, which ran, too.
    pub panicked: u64,
}

type Work = Box<dyn FnOnce(&mut Lane) + Send>;

struct Job {
    bytes: usize,
    work: Work,
}

/// The lanes of a server. Dropping it drops the jobs that wait and waits for those that run.
#[derive(Debug)]
pub struct Lanes {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
    identities: Identities,
}

impl Lanes {
    /// Starts all threads.
    ///
    /// # Errors
    ///
    /// [`LaneError`]: there is no thread to be had, or it cannot become a lane.
    pub fn start(options: LaneOptions) -> Result<Self, LaneError> {
        let options = LaneOptions { threads: options.threads.max(1) };
        let shared =
            Arc::new(Shared { options, inner: Mutex::default(), work: Condvar::new(), changed: Condvar::new() });
        let mut lanes = Self { shared, keeper: None, identities: Identities::Own };
        for _ in 0..lanes.shared.options.threads {
            // When one fails, those that were started end with `lanes`.
            lanes.identities = lanes.shared.start_lane()?;
        }
        let shared = Arc::clone(&lanes.shared);
        let keeper = thread::Builder::new().name("ksf-fs-keeper".to_owned()).spawn(move || shared.keep());
        lanes.keeper = Some(keeper.map_err(LaneError::Thread)?);
        Ok(lanes)
    }

    /// Puts a job into the queue, which has no bound: the giver has one for what it reads. `bytes` is what the job keeps in memory.
    ///
    /// A job that panics is counted, and what it captured is dropped. After [`Lanes::close`] jobs are dropped.
    pub fn submit(&self, bytes: usize, job: impl FnOnce(&mut Lane) + Send + 'static) {
        let job = Job { bytes, work: Box::new(job) };
        let mut inner = self.shared.lock();
        if inner.is_closed {
            drop(inner);
            // Outside of the lock: what a job captured may call back.
            drop(job);
            return;
        }
        inner.bytes += job.bytes;
        inner.queue.push_back(job);
        drop(inner);
        self.shared.work.notify_one();
    }

    /// As whom operations run.
    pub fn identities(&self) -> Identities {
        self.identities
    }

    /// Figures until now.
    pub fn counters(&self) -> LaneCounters {
        let inner = self.shared.lock();
        LaneCounters { queued_jobs: inner.queue.len(), queued_bytes: inner.bytes, lanes: inner.lanes, ..inner.counters }
    }

    /// Takes no more jobs, drops those that wait, and waits until the running ones are done or `deadline` is over. Returns how
    /// many still run; their threads end with them.
    pub fn close(&self, deadline: Instant) -> usize {
        self.shared.refuse_and_drop();
        self.shared.wait_for_lanes(Some(deadline))
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        if self.shared.refuse_and_drop() {
            self.shared.wait_for_lanes(None);
        }
        if let Some(keeper) = self.keeper.take() {
            // The keeper does not panic, and it has been told to end.
            let _ = keeper.join();
        }
    }
}

struct Shared {
    options: LaneOptions,
    inner: Mutex<Inner>,
    /// For lanes: a job, or the end.
    work: Condvar,
    /// For the keeper and for who waits for the end: a lane ended, or the lanes were closed.
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Job>,
    bytes: usize,
    lanes: usize,
    running: usize,
    is_closed: bool,
    counters: LaneCounters,
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
        let thread = thread::Builder::new().name("ksf-fs-lane".to_owned()).spawn(move || {
            match Lane::attach() {
                Ok(lane) => {
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
            let Some(job) = inner.queue.pop_front() else {
                if inner.is_closed {
                    return;
                }
                inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            inner.bytes -= job.bytes;
            inner.running += 1;
            drop(inner);
            let panicked = catch_unwind(AssertUnwindSafe(|| (job.work)(&mut lane))).is_err();
            inner = self.lock();
            inner.running -= 1;
            inner.counters.done += 1;
            inner.counters.panicked += u64::from(panicked);
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
        let dropped = std::mem::take(&mut inner.queue);
        drop(inner);
        // Outside of the lock: what a job captured may call back.
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

    use super::*;

    fn lanes(options: LaneOptions) -> Lanes {
        Lanes::start(options).unwrap()
    }

    /// Waits until `is_so` holds, which other threads make true.
    fn until(lanes: &Lanes, is_so: impl Fn(LaneCounters) -> bool) {
        while !is_so(lanes.counters()) {
            thread::yield_now();
        }
    }

    #[test]
    fn jobs_run_on_several_lanes_at_once() {
        let lanes = lanes(LaneOptions { threads: 3 });
        // Passed only if three jobs run at the same time.
        let all = Arc::new(Barrier::new(4));
        for _ in 0..3 {
            let all = Arc::clone(&all);
            lanes.submit(0, move |_| {
                all.wait();
            });
        }
        all.wait();
        until(&lanes, |counters| counters.done == 3);
        assert_eq!(lanes.counters().lanes, 3);
    }

    #[test]
    fn a_job_that_panics_ends_no_lane() {
        let lanes = lanes(LaneOptions { threads: 1 });
        lanes.submit(0, |_| panic!("of the test"));
        lanes.submit(0, |_| ());
        until(&lanes, |counters| counters.done == 2);
        assert_eq!((lanes.counters().panicked, lanes.counters().lanes), (1, 1));
    }

    #[test]
    fn a_lane_that_lost_its_identity_is_replaced() {
        let lanes = lanes(LaneOptions { threads: 1 });
        let (sender, receiver) = mpsc::channel();
        for round in 0..3 {
            let sender = sender.clone();
            lanes.submit(0, move |lane| {
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

    #[test]
    fn closing_drops_what_waits_and_leaves_what_runs() {
        let lanes = lanes(LaneOptions { threads: 1 });
        let gate = Arc::new(Barrier::new(2));
        let (held, started) = (Arc::clone(&gate), Arc::new(Barrier::new(2)));
        let start = Arc::clone(&started);
        lanes.submit(0, move |_| {
            start.wait();
            held.wait();
        });
        started.wait();
        let dropped = Arc::new(());
        let captured = Arc::clone(&dropped);
        lanes.submit(10, move |_| drop(captured));
        assert_eq!(lanes.close(Instant::now()), 1);
        assert_eq!(Arc::strong_count(&dropped), 1);
        lanes.submit(0, |_| panic!("runs after the end"));
        gate.wait();
        drop(lanes);
    }
}
