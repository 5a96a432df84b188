//! What happens to connections, for whoever looks after them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::ConnectionError;
use crate::mux::ConnectionId;
use crate::sync::Mutex;

/// Something happened to a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// It brings no more messages. Those it brought can still be received, and answered where the error allows it.
    Ended {
        /// Which one.
        connection: ConnectionId,
        /// Why.
        error: ConnectionError,
    },
    /// It could not be sent everything that [`send`](crate::MessageSocket::send) gave it: so many messages may have
    /// arrived or not. They were not repeated elsewhere, because nobody said that they may be.
    Uncertain {
        /// Which one.
        connection: ConnectionId,
        /// Messages.
        messages: usize,
    },
    /// It is detached by itself ([`Options::detach_ended`](crate::Options::detach_ended)).
    Detached {
        /// Which one.
        connection: ConnectionId,
    },
}

/// Events that wait. There are at most three per connection, and an ended one keeps its place until it is detached, so
/// the list is bounded like the connections.
#[derive(Debug)]
pub struct Events {
    waiting: Mutex<VecDeque<Event>>,
    /// Readable while events wait.
    ready: OwnedFd,
    /// Nobody ever asked: nothing is kept.
    wanted: std::sync::atomic::AtomicBool,
}

impl Events {
    /// None.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            ready: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            wanted: false.into(),
        })
    }

    /// From now on events are kept.
    pub fn want(&self) {
        self.wanted.store(true, std::sync::atomic::Ordering::SeqCst);
    }

    /// Adds one, if anybody wants them.
    pub fn push(&self, event: Event) {
        if !self.wanted.load(std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        waiting.push_back(event);
        if waiting.len() == 1 {
            let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
        }
    }

    /// The oldest.
    pub fn pop(&self) -> Option<Event> {
        let mut waiting = self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let event = waiting.pop_front();
        if waiting.is_empty() {
            let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        }
        event
    }

    /// Readable while there are some.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}
