//! The timer thread: the one thread a multiplexor has of its own, unless a thread of the program keeps its time limits
//! ([`MuxTimer`]). It moves no messages. It does in time what no worker comes to do, because all of them work, or none
//! receives.
//!
//! Connections are put on its list when they have something that must not wait for ever: replies that were held back to
//! leave together, bytes TCP had no room for, a message that began and must end in time. It also revokes the leases of
//! workers that are held up. While there is nothing of the kind the thread sleeps.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ksf::give_back::{self, GiveBack};
use ksf::limits::Time;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use crate::connection::Connection;
use crate::descriptor::placed;
use crate::lingering::Lingering;
use crate::monitor::Event;
use crate::mux::{Shared, now};
use crate::socket::WorkerState;
use crate::sync::{Arc, Mutex};

/// How often workers are checked that hold messages or replies back: those wait for others for up to twice that, when
/// their worker is held up by a message that takes longer than the last ones did. Not oftener: each check takes a CPU
/// away from another thread, which on two CPUs cost a connection in a hundred a millisecond (Linux 6.18).
pub(crate) const TICK: Duration = Duration::from_millis(5);

/// How exactly the time for a message to arrive and the time to send it are kept, and how long bytes wait that TCP had no
/// room for when no worker is there to hear that it has.
pub(crate) const TIMEOUT_TICK: Duration = Duration::from_millis(10);

/// How exactly the time without any byte is kept.
pub(crate) const IDLE_TICK: Duration = Duration::from_millis(100);

/// Checks without corked replies after which a longer time is used: a connection that corks will do so again.
const QUIET_CHECKS: u32 = 100;

#[derive(Debug)]
pub(crate) struct TimerThread {
    list: Mutex<List>,
    /// An eventfd: the thread is to look at its list. Not a condition variable, because it waits for connections, too.
    changed: OwnedFd,
    /// It wakes within [`TICK`] anyway.
    is_ticking: AtomicBool,
    /// A worker may hold messages that others could work on.
    leases: AtomicBool,
    workers: Mutex<Vec<Weak<Mutex<WorkerState>>>>,
    /// Sockets that linger.
    lingering: AtomicUsize,
    /// The end of the multiplexor waits for this.
    pub(crate) gone: Arc<Gone>,
}

#[derive(Debug, Default)]
struct List {
    conns: Vec<Arc<Connection>>,
    /// Connections closed from this side that may still read.
    lingering: Vec<Lingering>,
    /// How long the thread sleeps now; `None`: until it is woken.
    sleeps: Option<Duration>,
    /// The soonest check that was asked for while the thread checked, by what it had checked already.
    asked: Option<Duration>,
    stop: bool,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).finish_non_exhaustive()
    }
}

impl TimerThread {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            list: Mutex::default(),
            changed: placed(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?,
            is_ticking: AtomicBool::new(false),
            leases: AtomicBool::new(false),
            workers: Mutex::default(),
            lingering: AtomicUsize::new(0),
            gone: Arc::default(),
        })
    }

    /// Puts a connection on the list, if it is not there, to be checked within this time.
    pub(crate) fn schedule_check(&self, conn: &Arc<Connection>, within: Duration) {
        let is_new = !conn.listed.swap(true, Ordering::SeqCst);
        if !is_new && (within > TICK || (within == TICK && self.is_ticking.load(Ordering::SeqCst))) {
            return;
        }
        let mut list = self.lock();
        if is_new {
            list.conns.push(Arc::clone(conn));
        }
        self.hurry(list, within);
    }

    /// Checks the lease of a worker from now on.
    pub(crate) fn watch(&self, state: &Arc<Mutex<WorkerState>>) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(state));
    }

    /// A worker took several messages: its lease is revoked if it is held up by one of them.
    pub(crate) fn watch_leases(&self) {
        if !self.leases.load(Ordering::SeqCst) && !self.leases.swap(true, Ordering::SeqCst) {
            self.hurry(self.lock(), TICK);
        }
    }

    /// Checks the message sockets in event loops from now on.
    pub(crate) fn watch_wait_set(&self) {
        self.hurry(self.lock(), TICK);
    }

    /// Gives what held-up workers have on lease to others. Whether any worker has a lease.
    fn check_leases(&self, shared: &Shared) -> bool {
        // First down, then the check: a worker that takes a lease from here on puts it up again.
        self.leases.store(false, Ordering::SeqCst);
        let workers: Vec<_> = {
            let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
            workers.iter().filter_map(Weak::upgrade).collect()
        };
        let mut any = false;
        for state in workers {
            // A worker that is at its lease now is not held up.
            let Ok(mut state) = state.try_lock() else {
                any = true;
                continue;
            };
            let (has_lease, revoked) = state.check();
            drop(state);
            any |= has_lease;
            if !revoked.is_empty() {
                shared.wake(shared.scheduler.give_back(revoked.into_iter()));
            }
        }
        if any {
            self.leases.store(true, Ordering::SeqCst);
        }
        any
    }

    /// Closes a connection when it [is over](Lingering::is_over).
    pub(crate) fn linger(&self, lingering: Lingering) {
        self.lingering.fetch_add(1, Ordering::SeqCst);
        let mut list = self.lock();
        list.lingering.push(lingering);
        self.hurry(list, TIMEOUT_TICK);
    }

    /// Sockets that linger.
    pub(crate) fn lingering(&self) -> usize {
        self.lingering.load(Ordering::SeqCst)
    }

    pub(crate) fn stop(&self) {
        let mut list = self.lock();
        list.stop = true;
        self.hurry(list, Duration::ZERO);
    }

    /// Wakes the thread if it would sleep for longer.
    fn hurry(&self, mut list: MutexGuard<'_, List>, within: Duration) {
        let late = list.sleeps.is_none_or(|sleeps| sleeps > within);
        list.asked = list.asked.into_iter().chain([within]).min();
        drop(list);
        if late {
            self.wake();
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time limits of a multiplexor, for the thread that keeps them. Exactly one exists per multiplexor; the end of the
/// multiplexor waits until it is dropped, so the thread must call nothing that waits for a user of message sockets.
pub struct MuxTimer {
    shared: Arc<Shared>,
    quiet: u32,
    memory: Memory,
    /// Dropped last: nothing of the multiplexor is left here then.
    _dropped: Dropped,
}

/// When [`MuxTimer::check`] is due again: when the time is over, [`MuxTimer::changed`] is readable, or, if `when_ready`,
/// [`MuxTimer::connections`] is.
#[derive(Debug)]
pub struct NextCheck {
    /// `None`: no time.
    pub within: Option<Duration>,
    /// See above.
    pub when_ready: bool,
    /// The multiplexor has freed much memory since the last check: it may be returned to the machine.
    pub has_freed: bool,
}

/// Whether the [`MuxTimer`] of a multiplexor is dropped.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    is_gone: Mutex<bool>,
    changed: Condvar,
}

impl Gone {
    pub(crate) fn wait(&self) {
        let is_gone = self.is_gone.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(is_gone, |is_gone| !*is_gone));
    }
}

#[derive(Debug)]
struct Dropped(Arc<Gone>);

impl Drop for Dropped {
    fn drop(&mut self) {
        *self.0.is_gone.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

/// Wakes the thread that has a [`MuxTimer`]. Holds nothing of the multiplexor.
#[derive(Clone)]
pub struct TimerWaker(Weak<Shared>);

impl std::fmt::Debug for MuxTimer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MuxTimer").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for TimerWaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TimerWaker").finish_non_exhaustive()
    }
}

impl TimerWaker {
    /// Makes [`MuxTimer::changed`] readable, if that is there.
    pub fn wake(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.timer.wake();
        }
    }
}

impl MuxTimer {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            quiet: QUIET_CHECKS,
            memory: Memory::default(),
            _dropped: Dropped(Arc::clone(&shared.timer.gone)),
        }
    }

    /// Readable when a check is due earlier than [`Self::check`] returned.
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.shared.timer.changed.as_fd()
    }

    /// The set of all connections.
    pub fn connections(&self) -> BorrowedFd<'_> {
        self.shared.connections_set().as_fd()
    }

    /// The same as [`Mux::event_fd`](crate::Mux::event_fd).
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.fd()
    }

    /// The same as [`Mux::event`](crate::Mux::event).
    pub fn event(&self) -> Option<Event> {
        self.shared.events.pop()
    }

    /// Wakes the thread that has this.
    pub fn waker(&self) -> TimerWaker {
        TimerWaker(Arc::downgrade(&self.shared))
    }

    /// The thread of a multiplexor that has one.
    pub(crate) fn run(mut self) {
        while let Some(next) = self.check() {
            if next.has_freed {
                give_back::trim();
            }
            let timeout = next
                .within
                .map(|within| Timespec { tv_sec: within.as_secs() as _, tv_nsec: within.subsec_nanos().into() });
            let mut polled = vec![PollFd::from_borrowed_fd(self.changed(), PollFlags::IN)];
            if next.when_ready {
                polled.push(PollFd::from_borrowed_fd(self.connections(), PollFlags::IN));
            }
            let _ = rustix::event::poll(&mut polled, timeout.as_ref());
        }
    }

    /// Does what is due. `None`: the multiplexor ends, and waits until this is dropped.
    pub fn check(&mut self) -> Option<NextCheck> {
        let shared = &*self.shared;
        let timer = &shared.timer;
        let _ = rustix::io::read(&timer.changed, &mut [0; 8]);
        let mut list = timer.lock();
        if list.stop {
            return None;
        }
        // During the check the thread need not be woken: it sleeps no longer then than it is asked to.
        list.sleeps = Some(Duration::ZERO);
        list.asked = None;
        let mut conns = std::mem::take(&mut list.conns);
        let mut lingering = std::mem::take(&mut list.lingering);
        drop(list);
        let time = now();
        let over = lingering.extract_if(.., |lingering| lingering.is_over(time)).count();
        timer.lingering.fetch_sub(over, Ordering::SeqCst);
        let mut soonest = (!lingering.is_empty()).then_some(TIMEOUT_TICK);
        conns.retain(|conn| {
            let next = check(shared, conn);
            soonest = soonest.into_iter().chain(next).min();
            next.is_some()
        });
        if timer.check_leases(shared) {
            soonest = Some(soonest.map_or(TICK, |soonest| soonest.min(TICK)));
        }
        let of_waiters = shared.wait_set.check(|| is_ready(shared.connections_set()), || shared.scheduler.awake(0));
        if of_waiters.soon {
            soonest = Some(soonest.map_or(TICK, |soonest| soonest.min(TICK)));
        }
        self.quiet = if soonest.is_some_and(|soonest| soonest <= TICK) { 0 } else { self.quiet + 1 };
        if self.quiet < QUIET_CHECKS {
            soonest = soonest.into_iter().chain([TICK]).min();
        }
        let (has_freed, due) = self.memory.look(shared, now());
        soonest = soonest.into_iter().chain(due).min();
        let mut list = timer.lock();
        // Behind those that were put on it meanwhile, which are few.
        list.conns.append(&mut conns);
        list.lingering.append(&mut lingering);
        soonest = soonest.into_iter().chain(list.asked.take()).min();
        if shared.wait_set.is_watched() && !of_waiters.soon && !of_waiters.when_ready {
            // Asked for since the check, by a thread that found this one awake.
            soonest = Some(soonest.map_or(TICK, |soonest| soonest.min(TICK)));
        }
        list.sleeps = soonest;
        if soonest.is_none_or(|soonest| soonest > TICK) {
            timer.is_ticking.store(false, Ordering::SeqCst);
            if timer.leases.load(Ordering::SeqCst) {
                // Put up since the check, by a thread that found this one awake.
                list.sleeps = Some(TICK);
                soonest = Some(TICK);
            }
        } else {
            timer.is_ticking.store(true, Ordering::SeqCst);
        }
        if list.stop {
            return None;
        }
        let within = match soonest {
            None if list.conns.is_empty() && list.lingering.is_empty() => None,
            _ => Some(soonest.unwrap_or(TICK)),
        };
        // While it ticks anyway it need not be woken by what it would only note.
        let is_quiet = within.is_none_or(|within| within > TICK);
        Some(NextCheck { within, when_ready: of_waiters.when_ready && is_quiet, has_freed })
    }
}

impl Drop for MuxTimer {
    fn drop(&mut self) {
        let mut list = self.shared.timer.lock();
        let held = (std::mem::take(&mut list.conns), std::mem::take(&mut list.lingering));
        drop(list);
        drop(held);
    }
}

/// Memory of the multiplexor, seen each time that the thread wakes: it is awake while there are messages in part or replies
/// that wait.
#[derive(Debug, Default)]
struct Memory {
    most_bytes: usize,
    give_back: GiveBack,
}

impl Memory {
    /// Returns whether memory can go back to the machine, after a burst, and within what time to look again, if at all.
    fn look(&mut self, shared: &Shared, now: Time) -> (bool, Option<Duration>) {
        let bytes = shared.memory() + shared.input_bytes.load(Ordering::SeqCst);
        self.most_bytes = self.most_bytes.max(bytes);
        let limits = shared.limits();
        let has_freed = self.give_back.take(self.most_bytes, bytes, &limits, now);
        if has_freed {
            shared.buffers.free_kept();
            self.most_bytes = bytes;
        }
        let due = self.give_back.due(self.most_bytes, bytes, &limits);
        (has_freed, due.map(|at| at.since(now).max(TIMEOUT_TICK)))
    }
}

/// Whether an epoll set has events.
fn is_ready(set: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
}

/// Checks one connection. Returns within what time it must be checked again, if at all.
fn check(shared: &Shared, conn: &Arc<Connection>) -> Option<Duration> {
    // First off the list, then the check: what comes later puts it on again.
    conn.listed.store(false, Ordering::SeqCst);
    let batch_until_ns = conn.batch_until_ns.load(Ordering::SeqCst);
    let corked = conn.corked.load(Ordering::SeqCst);
    // What was held back a moment ago its worker is about to send: only what stays is sent here.
    let stays = corked && !conn.corked_seen.swap(true, Ordering::SeqCst);
    if (conn.out_queue.bytes() > 0 || batch_until_ns != 0) && now().0 >= batch_until_ns && !stays {
        shared.send(conn);
    }
    shared.check_time(conn, now());
    if conn.detached.load(Ordering::SeqCst) {
        return None;
    }
    let batch_until_ns = conn.batch_until_ns.load(Ordering::SeqCst);
    let next = if batch_until_ns != 0 {
        Duration::from_nanos(batch_until_ns.saturating_sub(now().0)).min(TICK)
    } else if corked {
        TICK
    } else if conn.out_queue.bytes() > 0 || conn.is_amid_a_message() {
        TIMEOUT_TICK
    } else if conn.limits().idle_timeout_ms > 0 {
        IDLE_TICK
    } else {
        return None;
    };
    // On the list again already: by another thread, with a place of its own.
    (!conn.listed.swap(true, Ordering::SeqCst)).then_some(next)
}
