//! The threads for tasks that block, in a file system for instance: one pool for all shards of a server, bound to no CPU.
//!
//! The pool starts empty. A task that finds no idle thread starts one, up to a limit; a thread without work for a while ends. A
//! task is never refused: while the queue is full, connections that wait for an answer are not read, see
//! [`Reply::block`](crate::Reply::block).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::threads;

/// How the pool grows and shrinks. By default it may have more threads than there are CPUs: they wait for disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOptions {
    /// Most threads, at least one.
    pub threads_max: usize,
    /// Tasks in the queue from which on it counts as full.
    pub queue_max: usize,
    /// Time without work after which a thread ends.
    pub idle_exit_ms: u64,
}

impl Default for TaskOptions {
    fn default() -> Self {
        Self { threads_max: 64, queue_max: 1024, idle_exit_ms: 30_000 }
    }
}

/// A piece of work.
pub struct Task(Box<dyn FnOnce() + Send>);

impl Task {
    /// Wraps a closure.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Box::new(work))
    }
}

/// The pool.
#[derive(Debug)]
pub struct TaskPool(Arc<Shared>);

impl TaskPool {
    /// A pool whose threads run on the CPUs that the calling thread may use.
    pub fn new(options: TaskOptions) -> Self {
        Self(Arc::new(Shared {
            // As the administrator set it for this thread: that of a shard will be narrower.
            cpus: crate::cpus::allowed().ok(),
            options: TaskOptions { threads_max: options.threads_max.max(1), ..options },
            inner: Mutex::default(),
            queued: AtomicUsize::new(0),
            work: Condvar::new(),
            panicked: AtomicU64::new(0),
            lacks_thread: AtomicBool::new(false),
            refused_threads: AtomicU64::new(0),
            #[cfg(test)]
            no_threads: AtomicBool::new(false),
        }))
    }

    /// Puts a task into the queue, also if that is full: the caller checks [`TaskPool::is_full`] before it takes on more work.
    /// The task is dropped if the pool is closed.
    pub fn block(&self, task: Task) {
        let start = {
            let mut inner = self.0.lock();
            if inner.closed {
                drop(inner);
                // Outside of the lock: a dropped task may answer a connection.
                return drop(task);
            }
            inner.queue.push_back(task);
            self.0.queued.store(inner.queue.len(), Ordering::Relaxed);
            let start = inner.queue.len() > inner.idle && inner.threads < self.0.options.threads_max;
            inner.threads += usize::from(start);
            start
        };
        if start {
            self.0.start_counted_thread();
        }
        self.0.work.notify_one();
    }

    /// True while the queue is full.
    pub fn is_full(&self) -> bool {
        self.0.queued.load(Ordering::Relaxed) >= self.0.options.queue_max
    }

    /// Tasks that panicked since the start.
    pub fn panicked(&self) -> u64 {
        self.0.panicked.load(Ordering::Relaxed)
    }

    /// Threads that the system refused to start since the start of the pool.
    pub fn refused_threads(&self) -> u64 {
        self.0.refused_threads.load(Ordering::Relaxed)
    }

    /// True while tasks wait that no thread will run: the system had none when they came. The giver of tasks calls
    /// [`TaskPool::try_start_thread`] from time to time then.
    pub fn lacks_thread(&self) -> bool {
        self.0.lacks_thread.load(Ordering::Relaxed)
    }

    /// Tries again to start a thread, if there are tasks and none.
    pub fn try_start_thread(&self) {
        self.0.lacks_thread.store(false, Ordering::Relaxed);
        let start = {
            let mut inner = self.0.lock();
            let start = inner.threads == 0 && !inner.queue.is_empty();
            inner.threads += usize::from(start);
            start
        };
        if start {
            self.0.start_counted_thread();
        }
    }

    /// Threads that run now.
    pub fn threads(&self) -> usize {
        self.0.lock().threads
    }

    /// Takes no more tasks, drops those that wait, and waits until the running ones are done or `deadline` is over.
    /// Returns how many still run: their threads are left alone, keep what their tasks hold, and end with them.
    pub fn close(&self, deadline: Instant) -> usize {
        self.refuse_and_drop();
        self.0.wait_until_idle(Some(deadline))
    }

    /// Takes no more tasks, and drops those that wait. True if the pool was open before.
    fn refuse_and_drop(&self) -> bool {
        let (was_open, dropped) = {
            let mut inner = self.0.lock();
            (!std::mem::replace(&mut inner.closed, true), std::mem::take(&mut inner.queue))
        };
        // Outside of the lock: a dropped task may answer a connection.
        drop(dropped);
        self.0.work.notify_all();
        was_open
    }
}

impl Drop for TaskPool {
    /// Waits for running tasks, however long they take, unless the pool was [closed](TaskPool::close) before.
    fn drop(&mut self) {
        if self.refuse_and_drop() {
            self.0.wait_until_idle(None);
        }
    }
}

/// What the threads of the pool have in common.
#[derive(Debug)]
struct Shared {
    /// Where its threads run; `None`: where the thread that starts them does.
    cpus: Option<Vec<usize>>,
    options: TaskOptions,
    inner: Mutex<Inner>,
    /// Length of the queue, to be read without the lock.
    queued: AtomicUsize,
    /// Signalled for new work, for closing, and when a thread ends.
    work: Condvar,
    panicked: AtomicU64,
    lacks_thread: AtomicBool,
    refused_threads: AtomicU64,
    /// Plays a system that has no threads left.
    #[cfg(test)]
    no_threads: AtomicBool,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Task>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// Threads that run a task.
    running: usize,
    closed: bool,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("queued", &self.queue.len()).field("threads", &self.threads).finish()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that is counted already. If there is none to be had, and no other, the tasks wait: to run them here
    /// would block a shard.
    fn start_counted_thread(self: &Arc<Self>) {
        if self.start_thread() {
            return;
        }
        self.refused_threads.fetch_add(1, Ordering::Relaxed);
        let mut inner = self.lock();
        inner.threads -= 1;
        if inner.threads == 0 && !inner.queue.is_empty() {
            self.lacks_thread.store(true, Ordering::Relaxed);
        }
    }

    fn start_thread(self: &Arc<Self>) -> bool {
        #[cfg(test)]
        if self.no_threads.load(Ordering::Relaxed) {
            return false;
        }
        let pool = Arc::clone(self);
        threads::start("ksf-block", move || pool.work_until_idle()).is_ok()
    }

    fn work_until_idle(&self) {
        // Threads inherit the mask of the shard that starts them. A CPU that went offline is no reason to refuse work.
        let _ = self.cpus.as_deref().map(crate::cpus::keep_to);
        let patience = Duration::from_millis(self.options.idle_exit_ms);
        let mut inner = self.lock();
        loop {
            if let Some(task) = inner.queue.pop_front() {
                self.queued.store(inner.queue.len(), Ordering::Relaxed);
                inner.running += 1;
                drop(inner);
                self.run(task);
                inner = self.lock();
                inner.running -= 1;
                continue;
            }
            if inner.closed {
                break;
            }
            inner.idle += 1;
            let (woken, timeout) = self.work.wait_timeout(inner, patience).unwrap_or_else(PoisonError::into_inner);
            inner = woken;
            inner.idle -= 1;
            if timeout.timed_out() && inner.queue.is_empty() {
                break;
            }
        }
        inner.threads -= 1;
        drop(inner);
        self.work.notify_all();
    }

    /// After closing: waits until no thread is left. Returns how many still run a task at `deadline`; threads without
    /// one are on their way out.
    fn wait_until_idle(&self, deadline: Option<Instant>) -> usize {
        let mut inner = self.lock();
        while inner.threads > 0 {
            let left = deadline.filter(|_| inner.running > 0).map(|at| at.saturating_duration_since(Instant::now()));
            inner = match left {
                Some(Duration::ZERO) => return inner.running,
                Some(left) => self.work.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.work.wait(inner).unwrap_or_else(PoisonError::into_inner),
            };
        }
        0
    }

    fn run(&self, task: Task) {
        // The panic has printed its message; its `Deferred` was dropped on the way, which closes the connection.
        if catch_unwind(AssertUnwindSafe(task.0)).is_err() {
            self.panicked.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Far more than anything here takes: a guard against hanging, not a measure.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn starts_threads_on_demand_up_to_the_limit() {
        let pool = TaskPool::new(TaskOptions { threads_max: 2, ..TaskOptions::default() });
        assert_eq!(pool.threads(), 0);
        let (all_in, done) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
        for _ in 0..2 {
            let (all_in, done) = (Arc::clone(&all_in), Arc::clone(&done));
            pool.block(Task::new(move || {
                all_in.wait();
                done.wait();
            }));
        }
        all_in.wait();
        let (sender, receiver) = mpsc::channel();
        pool.block(Task::new(move || sender.send(()).unwrap()));
        assert_eq!(pool.threads(), 2, "both threads are busy and no third may start");
        assert!(receiver.try_recv().is_err());
        done.wait();
        receiver.recv().unwrap();
    }

    #[test]
    fn a_full_queue_is_said_and_takes_more_all_the_same() {
        let pool = TaskPool::new(TaskOptions { threads_max: 0, queue_max: 1, ..TaskOptions::default() });
        let (finish, wait_finish) = mpsc::channel::<()>();
        let (started, wait_started) = mpsc::channel();
        pool.block(Task::new(move || {
            started.send(()).unwrap();
            wait_finish.recv().unwrap_err();
        }));
        wait_started.recv().unwrap();
        assert!(!pool.is_full());
        let (sender, receiver) = mpsc::channel();
        for number in 0..2 {
            let sender = sender.clone();
            pool.block(Task::new(move || sender.send(number).unwrap()));
            assert!(pool.is_full());
        }
        assert_eq!(pool.threads(), 1, "the one thread that there is at least");
        drop(finish);
        assert_eq!([receiver.recv().unwrap(), receiver.recv().unwrap()], [0, 1]);
        assert!(!pool.is_full());
    }

    /// Not by the caller, which would wait for it: a shard.
    #[test]
    fn without_a_thread_to_be_had_tasks_wait_until_there_is_one() {
        let pool = TaskPool::new(TaskOptions::default());
        pool.0.no_threads.store(true, Ordering::Relaxed);
        let caller = thread::current().id();
        let (sender, receiver) = mpsc::channel();
        for _ in 0..4 {
            let sender = sender.clone();
            pool.block(Task::new(move || sender.send(thread::current().id()).unwrap()));
        }
        assert!(receiver.try_recv().is_err(), "nobody may have run it");
        assert!(pool.lacks_thread());
        pool.try_start_thread();
        assert!(pool.lacks_thread());
        assert_eq!((pool.refused_threads(), pool.threads()), (5, 0));
        pool.0.no_threads.store(false, Ordering::Relaxed);
        pool.try_start_thread();
        for _ in 0..4 {
            assert_ne!(receiver.recv_timeout(PATIENCE).unwrap(), caller);
        }
        assert!(!pool.lacks_thread());
    }

    #[test]
    fn idle_threads_leave() {
        let pool = TaskPool::new(TaskOptions { idle_exit_ms: 1, ..TaskOptions::default() });
        pool.block(Task::new(|| ()));
        let mut inner = pool.0.lock();
        while inner.threads > 0 {
            inner = pool.0.work.wait(inner).unwrap();
        }
        assert!(inner.queue.is_empty());
    }

    #[test]
    fn a_panic_is_counted_and_the_thread_goes_on() {
        let pool = TaskPool::new(TaskOptions { threads_max: 1, ..TaskOptions::default() });
        pool.block(Task::new(|| std::panic::resume_unwind(Box::new("on purpose"))));
        let (sender, receiver) = mpsc::channel();
        pool.block(Task::new(move || sender.send(()).unwrap()));
        receiver.recv().unwrap();
        assert_eq!(pool.panicked(), 1);
    }

    #[test]
    fn closing_waits_for_running_tasks_and_refuses_new_ones() {
        let pool = TaskPool::new(TaskOptions::default());
        let (started, wait_started) = mpsc::channel();
        let (finish, wait_finish) = mpsc::channel::<()>();
        let done = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&done);
        pool.block(Task::new(move || {
            started.send(()).unwrap();
            wait_finish.recv().unwrap();
            seen.store(1, Ordering::SeqCst);
        }));
        wait_started.recv().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(pool.close(Instant::now() + PATIENCE), 0));
            finish.send(()).unwrap();
        });
        assert_eq!(done.load(Ordering::SeqCst), 1);
        // It is dropped, and with it the receiver hears nothing.
        let (sender, receiver) = mpsc::channel::<()>();
        pool.block(Task::new(move || sender.send(()).unwrap()));
        receiver.recv().unwrap_err();
    }

    #[test]
    fn closing_leaves_tasks_that_do_not_end() {
        let pool = TaskPool::new(TaskOptions { threads_max: 3, ..TaskOptions::default() });
        let (started, wait_started) = mpsc::channel();
        let (finish, wait_finish) = mpsc::channel::<()>();
        pool.block(Task::new(move || {
            started.send(()).unwrap();
            // Ends only when the test does.
            wait_finish.recv().unwrap_err();
        }));
        wait_started.recv().unwrap();
        assert_eq!(pool.close(Instant::now()), 1);
        // Nor does dropping the pool wait once it was given up.
        let shared = Arc::clone(&pool.0);
        let (dropped, wait_dropped) = mpsc::channel();
        thread::spawn(move || {
            drop(pool);
            dropped.send(()).unwrap();
        });
        wait_dropped.recv_timeout(PATIENCE).expect("the pool waits for a task that does not end");
        // The thread left alone ends with its task.
        drop(finish);
        assert_eq!(shared.wait_until_idle(Some(Instant::now() + PATIENCE)), 0);
    }
}
