//! The one thread a multiplexor has of its own. It moves no messages: it does in time what no worker comes to do,
//! because all of them work, or none receives.
//!
//! Connections are put on its list when they have something that must not wait for ever: replies that were held back to
//! leave together, bytes TCP had no room for, a message that began and must end in time. It also takes from workers that
//! are held up what they have not begun. While there is nothing of the kind the thread sleeps.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ksf::limits::Time;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use crate::link::Link;
use crate::mux::{Shared, now};
use crate::socket::Own;
use crate::sync::Arc;

/// How often workers are looked at that hold messages or replies back: those wait for others for up to twice that, when
/// their worker is held up by a message that takes longer than the last ones did. Not oftener: each look takes a CPU
/// away from somebody, which on two CPUs cost a connection in a hundred a millisecond (Linux 6.18).
pub(crate) const CORK: Duration = Duration::from_millis(5);

/// How exactly the time for a message to arrive and the time to send it are kept, and how long bytes wait that TCP had no
/// room for when no worker is there to hear that it has.
pub(crate) const TIMED: Duration = Duration::from_millis(10);

/// How exactly the time without any byte is kept.
pub(crate) const IDLE: Duration = Duration::from_millis(100);

/// Looks without corked replies after which a longer time is used: a connection that corks will do so again.
const CALM_LOOKS: u32 = 100;

#[derive(Debug)]
pub(crate) struct Keeper {
    list: Mutex<List>,
    /// An eventfd: the thread is to look at its list. Not a condition variable, because it waits for connections, too.
    changed: OwnedFd,
    /// It comes by within [`CORK`] anyway.
    is_brisk: AtomicBool,
    /// A worker may hold messages that others could work on.
    hands: AtomicBool,
    workers: Mutex<Vec<Weak<Mutex<Own>>>>,
    /// Sockets that linger.
    lingering: AtomicUsize,
}

#[derive(Debug, Default)]
struct List {
    links: Vec<Arc<Link>>,
    /// Connections closed from this side that may still read, and until when.
    lingering: Vec<(OwnedFd, Time)>,
    /// How long the thread sleeps now; `None`: until it is woken.
    sleeps: Option<Duration>,
    stop: bool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Keeper {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            list: Mutex::default(),
            changed: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_brisk: AtomicBool::new(false),
            hands: AtomicBool::new(false),
            workers: Mutex::default(),
            lingering: AtomicUsize::new(0),
        })
    }

    /// Puts a connection on the list, if it is not there, to be looked at within this time.
    pub(crate) fn look_after(&self, link: &Arc<Link>, within: Duration) {
        let is_new = !link.listed.swap(true, Ordering::SeqCst);
        if !is_new && (within > CORK || (within == CORK && self.is_brisk.load(Ordering::SeqCst))) {
            return;
        }
        let mut list = self.lock();
        if is_new {
            list.links.push(Arc::clone(link));
        }
        self.hurry(list, within);
    }

    /// Looks after what a worker has in its hand, from now on.
    pub(crate) fn watch(&self, own: &Arc<Mutex<Own>>) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(own));
    }

    /// A worker took several messages: they are given to others if it is held up by one of them.
    pub(crate) fn come_by(&self) {
        if !self.hands.load(Ordering::SeqCst) && !self.hands.swap(true, Ordering::SeqCst) {
            self.hurry(self.lock(), CORK);
        }
    }

    /// Looks after message sockets in event loops, from now on.
    pub(crate) fn look_after_herd(&self) {
        self.hurry(self.lock(), CORK);
    }

    /// Gives what held-up workers have in their hands to others. Whether any worker has a hand.
    fn look_at_hands(&self, shared: &Shared) -> bool {
        // First down, then the look: whoever takes a hand from here on puts it up again.
        self.hands.store(false, Ordering::SeqCst);
        let workers: Vec<_> = {
            let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
            workers.iter().filter_map(Weak::upgrade).collect()
        };
        let mut any = false;
        for own in workers {
            // A worker that is at its hand now is not held up.
            let Ok(mut own) = own.try_lock() else {
                any = true;
                continue;
            };
            let (has_hand, left) = own.look();
            drop(own);
            any |= has_hand;
            if !left.is_empty() {
                shared.wake(shared.scheduler.give_back(left.into_iter()));
            }
        }
        if any {
            self.hands.store(true, Ordering::SeqCst);
        }
        any
    }

    /// Closes a socket when its peer has, or at `deadline`.
    pub(crate) fn linger(&self, socket: OwnedFd, deadline: Time) {
        self.lingering.fetch_add(1, Ordering::SeqCst);
        let mut list = self.lock();
        list.lingering.push((socket, deadline));
        self.hurry(list, TIMED);
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
    fn hurry(&self, list: MutexGuard<'_, List>, within: Duration) {
        let late = list.sleeps.is_none_or(|sleeps| sleeps > within);
        drop(list);
        if late {
            let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
        }
    }

    /// Waits until something is new, or for so long; `set`: or until that has events.
    fn wait(&self, timeout: Option<Duration>, set: Option<&OwnedFd>) {
        let timeout =
            timeout.map(|timeout| Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() });
        let mut polled = vec![PollFd::new(&self.changed, PollFlags::IN)];
        polled.extend(set.map(|set| PollFd::new(set, PollFlags::IN)));
        let _ = rustix::event::poll(&mut polled, timeout.as_ref());
        if polled[0].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(&self.changed, &mut [0; 8]);
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    pub(crate) fn run(shared: &Shared) {
        let keeper = &shared.keeper;
        let mut calm = CALM_LOOKS;
        let mut list = keeper.lock();
        while !list.stop {
            let mut links = std::mem::take(&mut list.links);
            let mut lingering = std::mem::take(&mut list.lingering);
            drop(list);
            let time = now();
            let before = lingering.len();
            lingering.retain(|(socket, deadline)| time < *deadline && !has_ended(socket));
            keeper.lingering.fetch_sub(before - lingering.len(), Ordering::SeqCst);
            let mut soonest = (!lingering.is_empty()).then_some(TIMED);
            links.retain(|link| {
                let next = look(shared, link);
                soonest = soonest.into_iter().chain(next).min();
                next.is_some()
            });
            if keeper.look_at_hands(shared) {
                soonest = Some(soonest.map_or(CORK, |soonest| soonest.min(CORK)));
            }
            let look = shared.herd.look(|| is_ready(shared.connections_set()), || shared.scheduler.awake(0));
            if look.again {
                soonest = Some(soonest.map_or(CORK, |soonest| soonest.min(CORK)));
            }
            calm = if soonest.is_some_and(|soonest| soonest <= CORK) { 0 } else { calm + 1 };
            if calm < CALM_LOOKS {
                soonest = soonest.into_iter().chain([CORK]).min();
            }
            list = keeper.lock();
            // Behind those that were put on it meanwhile, which are few.
            list.links.append(&mut links);
            list.lingering.append(&mut lingering);
            if shared.herd.is_watched() && !look.again && !look.watch {
                // Asked for since the look, and whoever did found the thread awake.
                soonest = Some(soonest.map_or(CORK, |soonest| soonest.min(CORK)));
            }
            list.sleeps = soonest;
            if soonest.is_none_or(|soonest| soonest > CORK) {
                keeper.is_brisk.store(false, Ordering::SeqCst);
                if keeper.hands.load(Ordering::SeqCst) {
                    // Put up since the look: whoever did found the thread awake.
                    list.sleeps = Some(CORK);
                    soonest = Some(CORK);
                }
            } else {
                keeper.is_brisk.store(true, Ordering::SeqCst);
            }
            if list.stop {
                break;
            }
            let time = match soonest {
                None if list.links.is_empty() && list.lingering.is_empty() => None,
                _ => Some(soonest.unwrap_or(CORK)),
            };
            drop(list);
            // While it comes by anyway it need not be woken by what it would only note.
            let is_calm = time.is_none_or(|time| time > CORK);
            keeper.wait(time, (look.watch && is_calm).then(|| &**shared.connections_set()));
            list = keeper.lock();
            // While it looks it will come by again at once.
            list.sleeps = Some(Duration::ZERO);
        }
        list.links.clear();
        list.lingering.clear();
    }
}

/// Whether an epoll set has events.
fn is_ready(set: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
}

/// Throws away what still comes, and says whether the peer has closed.
fn has_ended(socket: &OwnedFd) -> bool {
    let mut waste = [0; 4096];
    for _ in 0..64 {
        match rustix::net::recv(socket, &mut waste[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((0, _)) => return true,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return errno != rustix::io::Errno::AGAIN,
        }
    }
    false
}

/// Looks after one connection. Returns within what time it must be looked at again, if at all.
fn look(shared: &Shared, link: &Arc<Link>) -> Option<Duration> {
    // First off the list, then the look: what comes later puts it on again.
    link.listed.store(false, Ordering::SeqCst);
    let batch_until_ns = link.batch_until_ns.load(Ordering::SeqCst);
    let corked = link.corked.load(Ordering::SeqCst);
    // What was held back a moment ago its worker is about to send: only what stays is sent here.
    let stays = corked && !link.corked_seen.swap(true, Ordering::SeqCst);
    if (link.outbox.bytes() > 0 || batch_until_ns != 0) && now().0 >= batch_until_ns && !stays {
        shared.send(link);
    }
    shared.check_time(link, now());
    if link.detached.load(Ordering::SeqCst) {
        return None;
    }
    let batch_until_ns = link.batch_until_ns.load(Ordering::SeqCst);
    let next = if batch_until_ns != 0 {
        Duration::from_nanos(batch_until_ns.saturating_sub(now().0)).min(CORK)
    } else if corked {
        CORK
    } else if link.outbox.bytes() > 0 || link.unfinished_bytes.load(Ordering::SeqCst) > 0 {
        TIMED
    } else if link.limits().idle_timeout_ms > 0 {
        IDLE
    } else {
        return None;
    };
    // On the list again already: by somebody else, with a place of its own.
    (!link.listed.swap(true, Ordering::SeqCst)).then_some(next)
}
