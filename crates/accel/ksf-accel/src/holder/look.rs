//! Looks at the queues: finds those whose worker does not take, and wakes another.
//!
//! A queue with as many connections as in the last look, and nothing accepted between, has a stalled worker: steering
//! passes it over until it comes out of its wait again, and the listener's rescue eventfd wakes another. The same happens
//! at once for a queue whose worker is gone. Where none is left to be woken, its connections wait for the next worker, and
//! are reset after [`AccelOptions::abandoned_ms`](crate::AccelOptions::abandoned_ms).
//!
//! That a queue is not served is what the holder has seen (its length, by TCP_INFO) or knows (its worker's end). What the
//! program writes into shared memory can only deny it: no process gets another's queue by writing there.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags};

use super::listener::{Listener, waiting};
use super::{EventSource, Holder, data};
use crate::status::WorkerCounters;
use crate::steer::Choice;
use crate::{queue, sys};

/// When to look.
pub(super) struct LookTimer {
    interval: Duration,
    next: Option<Instant>,
    /// Nothing has happened since then.
    quiet_since: Instant,
    /// Sum of all counters at the last look.
    counted: WorkerCounters,
}

/// As long as something happened so recently, looks go on.
const QUIET_AFTER: Duration = Duration::from_secs(1);

impl LookTimer {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, next: None, quiet_since: Instant::now(), counted: WorkerCounters::default() }
    }

    /// Something has happened.
    pub(super) fn activity(&mut self, now: Instant) {
        self.quiet_since = now;
        self.next.get_or_insert(now + self.interval);
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| next <= now)
    }
}

impl Holder {
    pub(super) fn look(&mut self, now: Instant) {
        let mut waits = false;
        for index in 0..self.listeners.len() {
            if self.listeners[index].is_some() {
                waits |= self.look_at(index, now);
                self.tell(index);
            }
        }
        let counted = self.count();
        if waits || counted != self.look_timer.counted {
            self.look_timer.quiet_since = now;
        }
        self.look_timer.counted = counted;
        if now.duration_since(self.look_timer.quiet_since) < QUIET_AFTER {
            self.look_timer.next = Some(now + self.look_timer.interval);
        } else {
            self.look_timer.next = None;
            self.arm();
        }
    }

    /// A queue, not the thief's own, that has connections and no worker to serve them.
    pub(super) fn find_unserved(&mut self, index: usize, thief: usize) -> Option<usize> {
        let has_joined = self.has_joined(index, thief);
        let listener = self.listener(index);
        let readable = readable(listener);
        let mut candidates: Vec<usize> = readable
            .into_iter()
            .filter(|&(worker, has)| has && !(worker == thief && has_joined) && self.is_unserved(index, worker))
            .map(|(worker, _)| worker)
            .collect();
        // Where several wake up, each begins with another queue.
        candidates.sort_by_key(|&worker| (worker < listener.steal_next, worker));
        let found = candidates.first().copied()?;
        self.listener_mut(index).steal_next = found + 1;
        Some(found)
    }

    /// True if connections wait.
    fn look_at(&mut self, index: usize, now: Instant) -> bool {
        let mut waits = false;
        let mut needs_rescue = false;
        let mut abandoned = Vec::new();
        let mut empty_orphans = Vec::new();
        for (worker, has) in readable(self.listener(index)) {
            waits |= has;
            let served = self.is_served(index, worker);
            let place = self.steering.shared.worker(worker);
            let accepted = place.accepted_own.load(Relaxed);
            let waits_idle = place.busy_since_ns.load(Relaxed) == 0;
            let queue = self.listeners[index].as_mut().and_then(|listener| listener.queues.get_mut(&worker));
            let queue = queue.expect("listed above");
            let waiting = if has { waiting(queue.fd.as_fd()).map_or(1, |(count, _)| count.max(1)) } else { 0 };
            if !has || queue.accepted != accepted {
                queue.untouched = false;
            } else if queue.waited > 0 && waiting >= queue.waited {
                // Until it is empty: what others take of it is not its worker's doing.
                queue.untouched = true;
            }
            let untouched = queue.untouched;
            (queue.waited, queue.accepted) = (waiting, accepted);
            if !has && waits_idle {
                // Rescued while its worker never noticed: there is nothing left that would wake it and clear this.
                place.stalled.store(0, Relaxed);
            }
            if !has && self.workers[worker].is_none() && queue.own_cookie.is_some() {
                empty_orphans.push(worker);
            }
            if served && untouched {
                place.stalled.store(1, SeqCst);
                self.stalls += 1;
            }
            let is_abandoned = !self.has_joined(index, worker);
            needs_rescue |= has && (untouched || is_abandoned);
            if has && is_abandoned {
                abandoned.push(worker);
            }
        }
        for worker in empty_orphans {
            self.forget_own(index, worker);
        }
        let bit = 1 << index;
        if needs_rescue && self.any_ready(index) {
            self.listener_mut(index).abandoned_since = None;
            self.request_rescue(index);
            self.rescues += 1;
            return waits;
        }
        self.reset_abandoned(index, &abandoned, now);
        if let Some(at) = self.displaced.iter().position(|displaced| displaced.listener == index) {
            self.displaced[at].requests_left -= 1;
            if self.displaced[at].requests_left == 0 {
                self.displaced.swap_remove(at);
            }
            // Another may have been woken in its place.
            self.request_rescue(index);
            return true;
        }
        let calls = &self.steering.shared.state().control.rescue_pending;
        if calls.load(Relaxed) & bit != 0 && !is_readable(self.listener(index).rescue.as_fd()) {
            calls.fetch_and(!bit, SeqCst);
        }
        waits
    }

    /// Resets the connections of `queues`, which have no worker, when the listener has had such queues for
    /// [`AccelOptions::abandoned_ms`](crate::AccelOptions::abandoned_ms).
    fn reset_abandoned(&mut self, index: usize, queues: &[usize], now: Instant) {
        let limit = Duration::from_millis(self.options.abandoned_ms.into());
        let listener = self.listener_mut(index);
        if queues.is_empty() {
            listener.abandoned_since = None;
            return;
        }
        if now.duration_since(*listener.abandoned_since.get_or_insert(now)) < limit {
            return;
        }
        let reset = |worker: &usize| {
            let queue = &listener.queues[worker];
            queue::reset_waiting(queue.fd.as_fd(), queue.waited)
        };
        let count: usize = queues.iter().map(reset).sum();
        listener.abandoned_since = None;
        listener.trouble = Some(format!("{count} connections were reset: no worker has taken them for {limit:?}"));
    }

    /// Wakes a worker of the listener: it takes from queues that nobody serves, and joins anew if it was given up.
    pub(super) fn request_rescue(&self, index: usize) {
        // Before: who wakes up must see it.
        self.steering.shared.state().control.rescue_pending.fetch_or(1 << index, SeqCst);
        // Stays readable until a woken worker finds nothing more to take.
        let _ = rustix::io::write(&self.listener(index).rescue, &1u64.to_ne_bytes());
    }

    fn has_joined(&self, index: usize, worker: usize) -> bool {
        self.workers[worker].as_ref().is_some_and(|worker| worker.joined & 1 << index != 0)
    }

    /// The worker of this queue lives, and says that it serves it and is not stalled. For choices between workers only.
    fn is_served(&self, index: usize, worker: usize) -> bool {
        self.is_ready(index, worker) && self.steering.shared.worker(worker).stalled.load(Relaxed) == 0
    }

    /// The worker of this queue has ended, or was seen not to take what waits, and has not come back since.
    fn is_unserved(&self, index: usize, worker: usize) -> bool {
        let untouched = self.listener(index).queues.get(&worker).is_some_and(|queue| queue.untouched);
        !self.has_joined(index, worker) || untouched && !self.is_served(index, worker)
    }

    /// The worker of this queue lives, and says that it serves it.
    pub(super) fn is_ready(&self, index: usize, worker: usize) -> bool {
        self.has_joined(index, worker) && self.steering.shared.worker(worker).ready.load(Relaxed) & 1 << index != 0
    }

    pub(super) fn any_ready(&self, index: usize) -> bool {
        (0..self.workers.len()).any(|worker| self.is_ready(index, worker))
    }

    /// Gives up the holder's descriptor of a worker's own listener.
    pub(super) fn forget_own(&mut self, index: usize, worker: usize) {
        self.steering.remove(index, worker);
        self.listener_mut(index).queues.remove(&worker);
    }

    /// [`tell`](Self::tell) of each listener.
    pub(super) fn tell_all(&mut self) {
        for index in 0..self.listeners.len() {
            if self.listeners[index].is_some() {
                self.tell(index);
            }
        }
    }

    /// Tells a mechanism that cannot read the state who is ready, if that has changed.
    pub(super) fn tell(&mut self, index: usize) {
        if !self.steering.is_blind() {
            return;
        }
        let off = !self.options.on;
        let listener = self.listener(index);
        let homes: Vec<(usize, Option<u32>)> = listener
            .members
            .iter()
            .map(|&worker| {
                let entry = self.workers[worker].as_ref().filter(|_| !off && self.is_served(index, worker));
                (worker, entry.and_then(|worker| worker.cpu))
            })
            .collect();
        if listener.told.as_ref() == Some(&homes) {
            return;
        }
        let choices: Vec<Choice<'_>> = homes
            .iter()
            .enumerate()
            // The program's own listener is the first member.
            .map(|(place, (worker, cpu))| Choice {
                queue: listener.queues[worker].fd.as_fd(),
                member: place as u32 + 1,
                cpu: *cpu,
            })
            .collect();
        let Some(first) = choices.first() else { return };
        let result = self.steering.tell(first.queue, &choices);
        let listener = self.listener_mut(index);
        match result {
            Ok(()) => listener.told = Some(homes),
            Err(error) => listener.trouble = Some(format!("telling the mechanism who is ready: {error}")),
        }
    }

    /// Nothing happens: sleep until a connection arrives in any queue.
    fn arm(&mut self) {
        for listener in self.listeners.iter_mut().flatten() {
            for queue in listener.queues.values_mut() {
                let flags = EventFlags::IN | EventFlags::ONESHOT;
                let done = if queue.armed {
                    epoll::modify(&self.epoll, &queue.fd, data(EventSource::Queue, 0), flags)
                } else {
                    epoll::add(&self.epoll, &queue.fd, data(EventSource::Queue, 0), flags)
                };
                queue.armed = done.is_ok();
            }
        }
    }

    /// Over all workers.
    fn count(&self) -> WorkerCounters {
        let end = self.workers.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let mut sum = WorkerCounters::default();
        (0..end).for_each(|index| sum.add(&self.steering.shared.counters(index)));
        sum
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    // Where that cannot be told, it may be.
    sys::readable_now(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)]) != Ok(0)
}

/// Each queue's worker, and whether connections wait in it.
fn readable(listener: &Listener) -> Vec<(usize, bool)> {
    let fds: Vec<BorrowedFd<'_>> = listener.queues.values().map(|queue| queue.fd.as_fd()).collect();
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    if sys::readable_now(&mut polled).is_err() {
        return Vec::new();
    }
    let has = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
    listener.queues.keys().copied().zip(polled.iter().map(has)).collect()
}
