//! The descriptor that a message socket has for event loops.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::descriptor::placed;
use crate::sync::{Arc, Mutex};
use crate::wait_set::Poller;

/// An epoll set that an event loop polls, with two descriptors in it.
pub(crate) struct Pollable {
    set: OwnedFd,
    /// The epoll set of the multiplexor. It is listened to in turn; see [`crate::wait_set`].
    connections: Arc<OwnedFd>,
    /// An eventfd: readable while messages wait that no event of a connection will announce.
    ready: OwnedFd,
    is_ready: Mutex<bool>,
    /// Its program was told that there is nothing.
    told_nothing: AtomicBool,
}

impl Pollable {
    /// Readable at first: what came before was announced to no program.
    pub(crate) fn new(connections: &Arc<OwnedFd>) -> std::io::Result<Self> {
        let set = placed(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let ready = placed(eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
        epoll::add(&set, connections, DATA, epoll::EventFlags::empty())?;
        epoll::add(&set, &ready, DATA, epoll::EventFlags::IN)?;
        let connections = Arc::clone(connections);
        Ok(Self { set, connections, ready, is_ready: Mutex::new(true), told_nothing: AtomicBool::new(false) })
    }

    /// The descriptor to poll.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// No longer readable, as far as that is up to this one.
    pub(crate) fn clear(&self) {
        let mut is_ready = self.is_ready.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *is_ready, false) {
            let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        }
    }

    /// Its program is told that there is nothing.
    pub(crate) fn set_told(&self) {
        self.told_nothing.store(true, Ordering::SeqCst);
    }

    /// Its program comes. Whether it was told that there was nothing since it came last.
    pub(crate) fn take_told(&self) -> bool {
        self.told_nothing.load(Ordering::SeqCst) && self.told_nothing.swap(false, Ordering::SeqCst)
    }
}

impl Poller for Arc<Pollable> {
    fn is_same(&self, other: &Self) -> bool {
        Self::ptr_eq(self, other)
    }

    fn listen(&self, on: bool) {
        // Changed, not added and deleted: that would take a lock of all epoll sets of the machine, and a walk over all
        // connections, each time (do_epoll_ctl() and ep_loop_check() in fs/eventpoll.c).
        let events = if on { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        // It is in the set for as long as both are open, and nothing is allocated.
        let _ = epoll::modify(&self.set, &self.connections, DATA, events);
        if !on {
            // An edge-triggered event loop does not poll the set again after it was told, so the set still lists the
            // connections as ready; and what is listed is not announced by the next change (ep_modify()). To ask the
            // set takes them off the list.
            let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: DATA };
            let _ = epoll::wait(&self.set, &mut [nothing; 2], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
    }

    fn notify(&self) {
        let mut is_ready = self.is_ready.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *is_ready, true) {
            let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
        }
    }
}

impl fmt::Debug for Pollable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pollable").field("set", &self.set).finish_non_exhaustive()
    }
}

/// It is not looked at.
const DATA: epoll::EventData = epoll::EventData::new_u64(0);

#[cfg(test)]
mod tests;
