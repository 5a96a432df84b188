//! Message sockets whose programs wait in event loops: which of them is told that bytes came.
//!
//! The descriptor of such a socket has the multiplexor's epoll set nested in it. The kernel tells every epoll set that
//! another one is nested in (EPOLLEXCLUSIVE is refused for nested ones, fs/eventpoll.c), so if all of them listened, all
//! event loops would wake for one message. Here one listens at a time, the *leader* (the leader/followers pattern):
//!
//! - A waiter whose program found nothing is *asleep*; one of those leads. Among several the one that fell asleep last
//!   leads next: its caches are warm.
//! - A leader whose program takes something yields, and the next sleeper listens. The bytes that the multiplexor's set
//!   still has tell that one at once.
//! - Nothing can make a program come. A leader that was told and does not come within two checks of the timer thread is
//!   *notified*, which is for good: its descriptor stays readable until its program comes, and it no longer counts as
//!   asleep. The next one listens.
//! - A program that takes one message and then waits, without having been told that there are no more, is *awake* and
//!   is not told of the next ones. After two checks it is notified, too.
//!
//! So every socket whose program is in its event loop either listens, waits behind one that does and that is checked,
//! or is readable.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};

/// The descriptor of a socket, as its event loop sees it.
pub(crate) trait Poller: Clone {
    /// True for the same socket.
    fn is_same(&self, other: &Self) -> bool;

    /// From now on it is readable while a connection has something, or no longer.
    fn listen(&self, on: bool);

    /// Makes it readable until its program came and found nothing.
    fn notify(&self);
}

/// The sockets of a multiplexor that wait in event loops.
#[derive(Debug)]
pub(crate) struct WaitSet<P> {
    waiters: Mutex<Waiters<P>>,
    /// Waiters that are asleep, so that no thread takes the lock for nothing.
    asleep: AtomicUsize,
    /// Other workers wait in blocking calls.
    has_blocking: AtomicBool,
}

#[derive(Debug)]
struct Waiters<P> {
    /// Those that fell asleep later come later.
    list: Vec<Waiter<P>>,
    /// Counts the leaders, and the times that one came.
    term: u64,
    /// The term in which the timer thread found the leader told.
    told: Option<u64>,
    /// The timer thread checks this set.
    is_watched: bool,
    /// Waiters notified in place of one that was told and did not come.
    replaced: u64,
}

#[derive(Debug)]
struct Waiter<P> {
    poller: P,
    state: WaiterState,
    leads: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaiterState {
    /// Its program found nothing, and waits.
    Asleep,
    /// Its program came, and was not told since that there is nothing. `seen`: by the timer thread.
    Awake { seen: bool },
    /// Readable until its program comes.
    Notified,
}

/// When the timer thread has to check the set again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NextCheck {
    /// Soon.
    pub(crate) soon: bool,
    /// Soon after the multiplexor's set has become ready.
    pub(crate) when_ready: bool,
}

impl<P: Poller> WaitSet<P> {
    pub(crate) fn new() -> Self {
        let waiters = Waiters { list: Vec::new(), term: 0, told: None, is_watched: false, replaced: 0 };
        Self { waiters: Mutex::new(waiters), asleep: AtomicUsize::new(0), has_blocking: AtomicBool::new(false) }
    }

    /// Its program found nothing. `count` counts it among the scheduler's sleepers, or says that something came: then
    /// this returns false, and the program must look again. True, true: the timer thread must be told to check.
    pub(crate) fn sleep(&self, poller: &P, count: impl FnOnce() -> bool) -> (bool, bool) {
        let mut waiters = self.lock();
        let mut leads = false;
        if let Some(at) = waiters.find(poller) {
            if waiters.list[at].state == WaiterState::Asleep {
                return (true, false);
            }
            leads = waiters.list.remove(at).leads;
        }
        if !count() {
            let waiter = Waiter { poller: poller.clone(), state: WaiterState::Awake { seen: false }, leads };
            waiters.list.push(waiter);
            return (false, false);
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        waiters.list.push(Waiter { poller: poller.clone(), state: WaiterState::Asleep, leads });
        if waiters.leader().is_none_or(|leader| waiters.list[leader].state != WaiterState::Asleep) {
            let newest = waiters.list.len() - 1;
            waiters.lead(newest);
        }
        (true, self.needs_watch(&mut waiters))
    }

    /// Its program has come. `uncount`: it was counted among the scheduler's sleepers, and is not any more. True: the
    /// timer thread must be told to check.
    pub(crate) fn come(&self, poller: &P, uncount: impl FnOnce()) -> bool {
        let mut waiters = self.lock();
        // One that was notified stays readable until it finds nothing.
        let asleep = waiters.find(poller).filter(|at| waiters.list[*at].state == WaiterState::Asleep);
        let Some(at) = asleep else { return false };
        waiters.list[at].state = WaiterState::Awake { seen: false };
        if waiters.list[at].leads {
            waiters.term += 1;
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        uncount();
        self.needs_watch(&mut waiters)
    }

    /// Its program has something to work on: another one listens, if one sleeps.
    pub(crate) fn yield_lead(&self, poller: &P) {
        if self.asleep.load(Ordering::SeqCst) == 0 {
            // A waiter that falls asleep from here on leads.
            return;
        }
        let mut waiters = self.lock();
        let is_awake = |at: usize| waiters.list[at].leads && waiters.list[at].state != WaiterState::Asleep;
        if waiters.find(poller).is_some_and(is_awake)
            && let Some(next) = waiters.next()
        {
            waiters.lead(next);
        }
    }

    /// It receives no more. `uncount` as with [`Self::come`].
    pub(crate) fn leave(&self, poller: &P, uncount: impl FnOnce()) {
        let mut waiters = self.lock();
        let Some(at) = waiters.find(poller) else { return };
        let left = waiters.list.remove(at);
        if left.state == WaiterState::Asleep {
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            uncount();
        }
        if left.leads {
            left.poller.listen(false);
            waiters.term += 1;
            if let Some(next) = waiters.next() {
                waiters.lead(next);
            }
        }
    }

    /// A worker waits in a blocking call. True: the timer thread must be told to check.
    pub(crate) fn note_blocking(&self) -> bool {
        if self.has_blocking.load(Ordering::Relaxed) {
            return false;
        }
        let mut waiters = self.lock();
        self.has_blocking.store(true, Ordering::Relaxed);
        self.needs_watch(&mut waiters)
    }

    /// Whether the timer thread checks the set, or was told to.
    pub(crate) fn is_watched(&self) -> bool {
        self.lock().is_watched
    }

    /// Notifies every waiter.
    pub(crate) fn notify_all(&self, uncount: impl Fn()) {
        let mut waiters = self.lock();
        for waiter in &mut waiters.list {
            if std::mem::replace(&mut waiter.state, WaiterState::Notified) == WaiterState::Asleep {
                self.asleep.fetch_sub(1, Ordering::SeqCst);
                uncount();
            }
            waiter.poller.notify();
        }
    }

    /// Called by the timer thread. `is_ready`: whether the multiplexor's set has events. `uncount` as with
    /// [`Self::come`].
    pub(crate) fn check(&self, is_ready: impl FnOnce() -> bool, uncount: impl FnOnce()) -> NextCheck {
        let mut waiters = self.lock();
        let mut next = NextCheck::default();
        if self.has_others(&waiters) {
            for waiter in &mut waiters.list {
                match &mut waiter.state {
                    WaiterState::Awake { seen: true } => {
                        waiter.state = WaiterState::Notified;
                        waiter.poller.notify();
                    }
                    WaiterState::Awake { seen } => {
                        *seen = true;
                        next.soon = true;
                    }
                    WaiterState::Asleep | WaiterState::Notified => {}
                }
            }
        }
        // One that sleeps alone listens, and stays readable.
        if self.asleep.load(Ordering::SeqCst) > 1 {
            next.when_ready = true;
            let told = is_ready();
            if told && waiters.told == Some(waiters.term) {
                self.replace_leader(&mut waiters, uncount);
                // The next one is told at this moment.
                waiters.told = Some(waiters.term);
                next.soon = true;
                next.when_ready = self.asleep.load(Ordering::SeqCst) > 1;
            } else {
                waiters.told = told.then_some(waiters.term);
                next.soon |= told;
            }
        }
        waiters.is_watched = next.when_ready || next.soon;
        next
    }

    /// The leader was told and does not come.
    fn replace_leader(&self, waiters: &mut Waiters<P>, uncount: impl FnOnce()) {
        let Some(leader) = waiters.leader() else { return };
        let late = &mut waiters.list[leader];
        if late.state == WaiterState::Asleep {
            late.state = WaiterState::Notified;
            late.poller.notify();
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            uncount();
        }
        waiters.replaced += 1;
        if let Some(next) = waiters.next() {
            waiters.lead(next);
        }
    }

    /// True if the timer thread must be told that there is something to check.
    fn needs_watch(&self, waiters: &mut Waiters<P>) -> bool {
        self.has_others(waiters) && !std::mem::replace(&mut waiters.is_watched, true)
    }

    /// True if messages can go to others than the only waiter.
    fn has_others(&self, waiters: &Waiters<P>) -> bool {
        waiters.list.len() > 1 || (self.has_blocking.load(Ordering::Relaxed) && !waiters.list.is_empty())
    }

    /// Times that another one was told in place of one that did not come.
    #[cfg_attr(not(test), allow(dead_code, reason = "for tests that count wake-ups"))]
    pub(crate) fn replaced(&self) -> u64 {
        self.lock().replaced
    }

    /// Waiters that are asleep.
    #[cfg_attr(not(test), allow(dead_code, reason = "for tests that count wake-ups"))]
    pub(crate) fn asleep(&self) -> usize {
        self.asleep.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Waiters<P>> {
        self.waiters.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<P: Poller> Waiters<P> {
    fn find(&self, poller: &P) -> Option<usize> {
        self.list.iter().position(|waiter| waiter.poller.is_same(poller))
    }

    fn leader(&self) -> Option<usize> {
        self.list.iter().position(|waiter| waiter.leads)
    }

    /// The one to lead next.
    fn next(&self) -> Option<usize> {
        self.list.iter().rposition(|waiter| waiter.state == WaiterState::Asleep)
    }

    /// This one listens, and no other.
    fn lead(&mut self, next: usize) {
        if let Some(leader) = self.leader().filter(|leader| *leader != next) {
            self.list[leader].leads = false;
            self.list[leader].poller.listen(false);
        }
        self.term += 1;
        if !std::mem::replace(&mut self.list[next].leads, true) {
            self.list[next].poller.listen(true);
        }
    }
}
