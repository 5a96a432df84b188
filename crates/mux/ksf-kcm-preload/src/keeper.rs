//! The keeper: the one thread of this library. It keeps the time limits of all multiplexors and hands the errors of their
//! connections on.
//!
//! To start or end a thread takes locks of libc's and memory of its allocator, which a signal handler may have
//! interrupted. So the keeper is started where no handler can run: before the process installs its first one, or, in a
//! process without handlers, by its first `socket(AF_KCM)`. It never ends.
//!
//! `close` waits for the keeper ([`MuxTimer`]), also in a handler. So the keeper calls nothing of libc's that allocates.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ksf_interpose::Handlers;
use ksf_mux::{MuxTimer, TimerWaker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::kcm::{Answer, Group};
use crate::ownership;
use crate::signals::Blocked;
use crate::table::lock;

/// This process has one.
static RUNS: AtomicBool = AtomicBool::new(false);
/// The error of the last attempt to start it, until one succeeds.
static START: Mutex<Option<c_int>> = Mutex::new(None);

/// As threads of std have.
const STACK_BYTES: usize = 2 << 20;

static TASKS: Mutex<Tasks> = Mutex::new(Tasks { added: Vec::new(), waker: None });
static ADDED: Condvar = Condvar::new();

/// What `socket(AF_KCM)` hands to the keeper.
pub(crate) struct Tasks {
    added: Vec<Task>,
    /// Of a multiplexor that the keeper waits for, if there is one.
    waker: Option<TimerWaker>,
}

/// A multiplexor.
struct Task {
    timer: MuxTimer,
    group: Weak<Group>,
    /// `None`: at no time.
    due: Option<Instant>,
    when_ready: bool,
}

/// Starts the keeper if this process may run handlers. What fails here is reported by [`ensure_started`].
pub(crate) fn start_for_handlers() {
    let handlers = Handlers::of_process();
    if !(handlers.restarting.is_empty() && handlers.ending.is_empty()) {
        start_before_handler();
    }
}

/// Starts the keeper unless it runs. Called before a handler is installed.
pub(crate) fn start_before_handler() {
    if !RUNS.load(Ordering::Acquire) && ownership::is_owner() {
        let _blocked = Blocked::all();
        let _ = start(&mut lock(&START));
    }
}

/// Starts the keeper unless it runs, for `socket(AF_KCM)`.
///
/// # Errors
///
/// It could not be started. If that was before a handler was installed, it is not tried again here: this may be a handler.
pub(crate) fn ensure_started() -> Answer<()> {
    if RUNS.load(Ordering::Acquire) {
        return Ok(());
    }
    let mut failed = lock(&START);
    let handlers = Handlers::of_process();
    match *failed {
        Some(errno) if !(handlers.restarting.is_empty() && handlers.ending.is_empty()) => Err(errno),
        _ => start(&mut failed),
    }
}

fn start(failed: &mut Option<c_int>) -> Answer<()> {
    if RUNS.load(Ordering::Acquire) {
        return Ok(());
    }
    // A thread of std would allocate in libc when it begins, which a handler in `close` would wait for.
    let (mut thread, mut attributes) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the attributes are filled in before they are used; the thread has no argument, and never ends. It inherits
    // that signals are blocked.
    let errno = unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        // The default is the limit of the process, which may be small.
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
        let errno = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, std::ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        errno
    };
    *failed = (errno != 0).then_some(errno);
    RUNS.store(errno == 0, Ordering::Release);
    failed.map_or(Ok(()), Err)
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    // SAFETY: the name is a string; the kernel copies it.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"ksf-kcm".as_ptr()) };
    let _blocked = Blocked::all();
    keep()
}

/// Keeps a new multiplexor from now on.
pub(crate) fn add(timer: MuxTimer, group: Weak<Group>) {
    let mut tasks = lock(&TASKS);
    tasks.added.push(Task { timer, group, due: Some(Instant::now()), when_ready: false });
    ADDED.notify_one();
    let waker = tasks.waker.clone();
    drop(tasks);
    // Without one, or if its multiplexor has ended, the keeper looks for new ones before it waits.
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn keep() -> ! {
    let mut kept: Vec<Task> = Vec::new();
    loop {
        kept.retain_mut(Task::check);
        let mut tasks = lock(&TASKS);
        tasks.waker = kept.first().map(|task| task.timer.waker());
        while kept.is_empty() && tasks.added.is_empty() {
            tasks = ADDED.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
        if tasks.added.is_empty() {
            drop(tasks);
            wait(&mut kept);
        } else {
            kept.append(&mut tasks.added);
        }
    }
}

impl Task {
    /// Does what is due. False once the multiplexor ends.
    fn check(&mut self) -> bool {
        if self.due.is_none_or(|due| due > Instant::now()) {
            return true;
        }
        let Some(next) = self.timer.check() else { return false };
        self.due = next.within.and_then(|within| Instant::now().checked_add(within));
        self.when_ready = next.when_ready;
        true
    }

    fn fds(&self) -> [BorrowedFd<'_>; 3] {
        let connections = if self.when_ready { self.timer.connections() } else { self.timer.changed() };
        [self.timer.event_fd(), self.timer.changed(), connections]
    }
}

/// Waits until one of them is due. Hands errors on.
fn wait(kept: &mut [Task]) {
    let due = kept.iter().filter_map(|task| task.due).min();
    let left = due.map(|due| due.saturating_duration_since(Instant::now()));
    let left = left.map(|left| Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() });
    let fds = kept.iter().flat_map(Task::fds);
    let mut polled: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // A failure is one for want of memory: the next one may succeed.
    let found = poll(&mut polled, left.as_ref()).is_ok();
    let ready: Vec<_> = polled.iter().map(|polled| found && !polled.revents().is_empty()).collect();
    drop(polled);
    for (task, ready) in kept.iter_mut().zip(ready.chunks(3)) {
        if ready[0]
            && let Some(group) = task.group.upgrade()
        {
            group.hand_on(|| task.timer.event());
        }
        if ready[1] || ready[2] {
            task.due = Some(Instant::now());
        }
    }
}

/// What is shared with the keeper, locked while no handler can run.
pub(crate) struct Locked {
    start: MutexGuard<'static, Option<c_int>>,
    tasks: MutexGuard<'static, Tasks>,
}

pub(crate) fn locked() -> Locked {
    Locked { start: lock(&START), tasks: lock(&TASKS) }
}

/// In a child, which has no keeper: forgets the parent's multiplexors.
pub(crate) fn leave(locked: &mut Locked) {
    RUNS.store(false, Ordering::Release);
    *locked.start = None;
    std::mem::forget(std::mem::take(&mut locked.tasks.added));
    std::mem::forget(locked.tasks.waker.take());
}
