//! Thread pools: one for short tasks that stay on the core of their shard, one for tasks that block.
//!
//! Short tasks have one group of threads per shard. A group starts empty; a task that finds no idle thread starts one, up to a limit;
//! a thread without work for a while leaves. The queue is bounded: a place is reserved before a task is made, so a
//! refused task costs nothing. Tasks never move between groups: the connection they answer lives on this core.
//!
//! Tasks that block, in a file system for instance, share one group whose threads are bound to no CPU. Such a task is
//! never refused: when the queue is full, connections that wait for an answer are not read, see
//! [`Reply::block`](crate::Reply::block).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How a pool grows and shrinks. Defaults follow the FreeBSD original: at most 8 threads per core, 30 s of patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOptions {
    /// Most threads per group; 0: none, and every task is refused.
    pub threads_max: usize,
    /// Most tasks that wait per group; a further one is refused.
    pub queue_max: usize,
    /// Time without work after which a thread ends.
    pub idle_exit_ms: u64,
}

impl Default for TaskOptions {
    fn default() -> Self {
        Self { threads_max: 8, queue_max: 1024, idle_exit_ms: 30_000 }
    }
}

/// Threads for tasks that block, and their queue, by default. More threads than CPUs: they wait for disks.
pub const BLOCKING: TaskOptions = TaskOptions { threads_max: 64, queue_max: 1024, idle_exit_ms: 30_000 };

/// A piece of work.
pub struct Task(Box<dyn FnOnce() + Send>);

impl Task {
    /// Wraps a closure.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Box::new(work))
    }
}

/// The pool: one group per shard.
#[derive(Debug)]
pub struct TaskPool {
    /// One group for each shard, and last the one for tasks that block.
    groups: Vec<Arc<Group>>,
    /// Tasks wait in a group without a thread, because none was to be had.
    lacks_thread: Arc<AtomicBool>,
}

impl TaskPool {
    /// One group for each CPU of `cpus`, its threads bound to that CPU, and one for tasks that block.
    pub fn new(cpus: &[usize], options: TaskOptions) -> Self {
        Self::with_blocking(cpus, options, BLOCKING)
    }

    /// The same with other options for tasks that block, which always have one thread at least.
    pub fn with_blocking(cpus: &[usize], options: TaskOptions, blocking: TaskOptions) -> Self {
        let lacks_thread = Arc::<AtomicBool>::default();
        let group = |cpus, options| {
            Arc::new(Group {
                cpus,
                options,
                inner: Mutex::default(),
                queued: AtomicUsize::new(0),
                work: Condvar::new(),
                panicked: AtomicU64::new(0),
                lacks_thread: Arc::clone(&lacks_thread),
                refused_threads: AtomicU64::new(0),
                #[cfg(test)]
                no_threads: AtomicBool::new(false),
            })
        };
        let blocking = TaskOptions { threads_max: blocking.threads_max.max(1), ..blocking };
        // As the administrator set it for this thread: that of a shard will be narrower.
        let anywhere = crate::cpus::allowed().unwrap_or_else(|_| cpus.to_vec());
        let pinned = cpus.iter().map(|cpu| group(vec![*cpu], options));
        let groups = pinned.chain([group(anywhere, blocking)]).collect();
        Self { groups, lacks_thread }
    }

    /// Puts a task that may block into the queue, also if that is full: the caller looks at
    /// [`TaskPool::is_blocking_full`] before it takes on more work. Dropped when the pool is closed.
    pub fn block(&self, task: Task) {
        let Some(group) = self.groups.last() else { return };
        {
            let mut inner = group.lock();
            if inner.closed {
                drop(inner);
                // Outside of the lock: a dropped task may answer a connection.
                return drop(task);
            }
            inner.reserved += 1;
        }
        TaskPlace { group }.submit(task);
    }

    /// True while the queue of tasks that block is full.
    pub fn is_blocking_full(&self) -> bool {
        let full = |group: &Arc<Group>| group.queued.load(Ordering::Relaxed) >= group.options.queue_max;
        self.groups.last().is_some_and(full)
    }

    /// A place in the queue of `group`; `None` when it is full, may have no thread, or the pool is closing.
    pub fn reserve(&self, group: usize) -> Option<TaskPlace<'_>> {
        let group = &self.groups[group % (self.groups.len() - 1)];
        let mut inner = group.lock();
        let no_thread = group.options.threads_max == 0;
        if inner.closed || no_thread || inner.queue.len() + inner.reserved >= group.options.queue_max {
            return None;
        }
        inner.reserved += 1;
        Some(TaskPlace { group })
    }

    /// Tasks that panicked since the start.
    pub fn panicked(&self) -> u64 {
        self.groups.iter().map(|group| group.panicked.load(Ordering::Relaxed)).sum()
    }

    /// Threads that the system refused to start since the start of the pool.
    pub fn refused_threads(&self) -> u64 {
        self.groups.iter().map(|group| group.refused_threads.load(Ordering::Relaxed)).sum()
    }

    /// True while tasks wait that no thread will run: the system had none when they came. The giver of tasks calls
    /// [`TaskPool::try_start_threads`] from time to time then.
    pub fn lacks_thread(&self) -> bool {
        self.lacks_thread.load(Ordering::Relaxed)
    }

    /// Tries again to start a thread for each group that has tasks and none.
    pub fn try_start_threads(&self) {
        self.lacks_thread.store(false, Ordering::Relaxed);
        for group in &self.groups {
            let start = {
                let mut inner = group.lock();
                let start = inner.threads == 0 && !inner.queue.is_empty();
                inner.threads += usize::from(start);
                start
            };
            if start {
                group.start_counted_thread();
            }
        }
    }

    /// Threads that run now.
    pub fn threads(&self) -> usize {
        self.groups.iter().map(|group| group.lock().threads).sum()
    }

    /// Takes no more tasks, drops those that wait, and waits until the running ones are done or `deadline` is over.
    /// Returns how many still run: their threads are left alone, keep what their tasks hold, and end with them.
    pub fn close(&self, deadline: Instant) -> usize {
        self.refuse_and_drop();
        self.groups.iter().map(|group| group.wait_until_idle(Some(deadline))).sum()
    }

    /// Takes no more tasks, and drops those that wait. True if the pool was open before.
    fn refuse_and_drop(&self) -> bool {
        let mut was_open = false;
        for group in &self.groups {
            let dropped = {
                let mut inner = group.lock();
                was_open |= !inner.closed;
                inner.closed = true;
                std::mem::take(&mut inner.queue)
            };
            // Outside of the lock: a dropped task may answer a connection.
            drop(dropped);
            group.work.notify_all();
        }
        was_open
    }
}

impl Drop for TaskPool {
    /// Waits for running tasks, however long they take, unless the pool was [closed](TaskPool::close) before.
    fn drop(&mut self) {
        if self.refuse_and_drop() {
            self.groups.iter().for_each(|group| {
                group.wait_until_idle(None);
            });
        }
    }
}

/// A reserved place in a queue; dropping it frees the place.
#[derive(Debug)]
pub struct TaskPlace<'a> {
    group: &'a Arc<Group>,
}

impl TaskPlace<'_> {
    /// Puts a task into the place.
    pub fn submit(self, task: Task) {
        let start = {
            let mut inner = self.group.lock();
            inner.queue.push_back(task);
            self.group.queued.store(inner.queue.len(), Ordering::Relaxed);
            let start = inner.queue.len() > inner.idle && inner.threads < self.group.options.threads_max;
            inner.threads += usize::from(start);
            start
        };
        if start {
            self.group.start_counted_thread();
        }
        self.group.work.notify_one();
    }
}

impl Drop for TaskPlace<'_> {
    fn drop(&mut self) {
        self.group.lock().reserved -= 1;
    }
}

#[derive(Debug)]
struct Group {
    /// Where its threads run.
    cpus: Vec<usize>,
    options: TaskOptions,
    inner: Mutex<Inner>,
    /// Length of the queue, to be looked at without the lock.
    queued: AtomicUsize,
    /// Signalled for new work, for closing, and when a thread ends.
    work: Condvar,
    panicked: AtomicU64,
    /// That of the pool.
    lacks_thread: Arc<AtomicBool>,
    refused_threads: AtomicU64,
    /// Plays a system that has no threads left.
    #[cfg(test)]
    no_threads: AtomicBool,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Task>,
    reserved: usize,
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

impl Group {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that is counted already. If there is none to be had, and no other, the tasks wait: to run them here
    /// would block a shard.
    fn start_counted_thread(self: &Arc<Self>) {
        if Self::start_thread(self) {
            return;
        }
        self.refused_threads.fetch_add(1, Ordering::Relaxed);
        let mut inner = self.lock();
        inner.threads -= 1;
        if inner.threads == 0 && !inner.queue.is_empty() {
            self.lacks_thread.store(true, Ordering::Relaxed);
        }
    }

    fn start_thread(group: &Arc<Self>) -> bool {
        #[cfg(test)]
        if group.no_threads.load(Ordering::Relaxed) {
            return false;
        }
        let group = Arc::clone(group);
        let name = match group.cpus[..] {
            [cpu] => format!("ksf-task-{cpu}"),
            _ => "ksf-block".to_owned(),
        };
        thread::Builder::new().name(name).spawn(move || group.work_until_idle()).is_ok()
    }

    fn work_until_idle(&self) {
        // A CPU that went offline is no reason to refuse work. Threads inherit the mask of the shard that starts them, so
        // those of the blocking group are given theirs, too.
        let _ = crate::cpus::keep_to(&self.cpus);
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

    use super::*;

    /// Far more than anything here takes: a guard against hanging, not a measure.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn pool(options: TaskOptions) -> TaskPool {
        TaskPool::new(&[crate::cpus::allowed().unwrap()[0]], options)
    }

    #[test]
    fn starts_threads_on_demand_up_to_the_limit() {
        let pool = pool(TaskOptions { threads_max: 2, ..TaskOptions::default() });
        assert_eq!(pool.threads(), 0);
        let (all_in, done) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
        for _ in 0..2 {
            let (all_in, done) = (Arc::clone(&all_in), Arc::clone(&done));
            pool.reserve(0).unwrap().submit(Task::new(move || {
                all_in.wait();
                done.wait();
            }));
        }
        all_in.wait();
        let (sender, receiver) = mpsc::channel();
        pool.reserve(0).unwrap().submit(Task::new(move || sender.send(()).unwrap()));
        assert_eq!(pool.threads(), 2, "both threads are busy and no third may start");
        assert!(receiver.try_recv().is_err());
        done.wait();
        receiver.recv().unwrap();
    }

    #[test]
    fn a_full_queue_refuses_and_a_dropped_place_is_free_again() {
        let pool = pool(TaskOptions { queue_max: 1, ..TaskOptions::default() });
        let place = pool.reserve(0).unwrap();
        assert!(pool.reserve(0).is_none());
        drop(place);
        assert!(pool.reserve(0).is_some());
    }

    #[test]
    fn without_threads_every_task_is_refused() {
        let pool = pool(TaskOptions { threads_max: 0, ..TaskOptions::default() });
        assert!(pool.reserve(0).is_none(), "nobody would ever run it");
    }

    /// Not by the caller, which would wait for it: a shard.
    #[test]
    fn without_a_thread_to_be_had_tasks_wait_until_there_is_one() {
        let pool = pool(TaskOptions::default());
        pool.groups.iter().for_each(|group| group.no_threads.store(true, Ordering::Relaxed));
        let caller = thread::current().id();
        let (sender, receiver) = mpsc::channel();
        for short in [true, false, true, false] {
            let sender = sender.clone();
            let task = Task::new(move || sender.send(thread::current().id()).unwrap());
            if short { pool.reserve(0).unwrap().submit(task) } else { pool.block(task) }
        }
        assert!(receiver.try_recv().is_err(), "nobody may have run it");
        assert!(pool.lacks_thread());
        pool.try_start_threads();
        assert!(pool.lacks_thread());
        assert_eq!((pool.refused_threads(), pool.threads()), (6, 0));
        pool.groups.iter().for_each(|group| group.no_threads.store(false, Ordering::Relaxed));
        pool.try_start_threads();
        for _ in 0..4 {
            assert_ne!(receiver.recv_timeout(PATIENCE).unwrap(), caller);
        }
        assert!(!pool.lacks_thread());
    }

    #[test]
    fn idle_threads_leave() {
        let pool = pool(TaskOptions { idle_exit_ms: 1, ..TaskOptions::default() });
        pool.reserve(0).unwrap().submit(Task::new(|| ()));
        let group = &pool.groups[0];
        let mut inner = group.lock();
        while inner.threads > 0 {
            inner = group.work.wait(inner).unwrap();
        }
        assert!(inner.queue.is_empty());
    }

    #[test]
    fn a_panic_is_counted_and_the_thread_goes_on() {
        let pool = pool(TaskOptions { threads_max: 1, ..TaskOptions::default() });
        pool.reserve(0).unwrap().submit(Task::new(|| std::panic::resume_unwind(Box::new("on purpose"))));
        let (sender, receiver) = mpsc::channel();
        pool.reserve(0).unwrap().submit(Task::new(move || sender.send(()).unwrap()));
        receiver.recv().unwrap();
        assert_eq!(pool.panicked(), 1);
    }

    #[test]
    fn closing_waits_for_running_tasks_and_refuses_new_ones() {
        let pool = pool(TaskOptions::default());
        let (started, wait_started) = mpsc::channel();
        let (finish, wait_finish) = mpsc::channel::<()>();
        let done = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&done);
        pool.reserve(0).unwrap().submit(Task::new(move || {
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
        assert!(pool.reserve(0).is_none());
    }

    #[test]
    fn closing_leaves_tasks_that_do_not_end() {
        let pool = pool(TaskOptions { threads_max: 3, ..TaskOptions::default() });
        let (started, wait_started) = mpsc::channel();
        let (finish, wait_finish) = mpsc::channel::<()>();
        pool.reserve(0).unwrap().submit(Task::new(move || {
            started.send(()).unwrap();
            // Ends only when the test does.
            wait_finish.recv().unwrap_err();
        }));
        wait_started.recv().unwrap();
        assert_eq!(pool.close(Instant::now()), 1);
        // Nor does dropping the pool wait once it was given up.
        let group = Arc::clone(&pool.groups[0]);
        let (dropped, wait_dropped) = mpsc::channel();
        thread::spawn(move || {
            drop(pool);
            dropped.send(()).unwrap();
        });
        wait_dropped.recv_timeout(PATIENCE).expect("the pool waits for a task that does not end");
        // The thread left alone ends with its task.
        drop(finish);
        assert_eq!(group.wait_until_idle(Some(Instant::now() + PATIENCE)), 0);
    }
}
