//! What happens to connections, for the part of a program that looks after them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::descriptor::placed;
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
    /// arrived or not. They were not repeated elsewhere, because their sender did not allow it.
    Uncertain {
        /// Which one.
        connection: ConnectionId,
        /// Messages.
        messages: usize,
    },
    /// So many older events were not read in time, and are forgotten.
    Lost {
        /// Events.
        events: u64,
    },
    /// It is detached by itself ([`MuxOptions::detach_ended`](crate::MuxOptions::detach_ended)).
    Detached {
        /// Which one.
        connection: ConnectionId,
    },
}

/// Events that wait, [`UNREAD_MAX`] at most: connections that detach by themselves come and go, whether or not the
/// program reads what happened to them.
#[derive(Debug)]
pub(crate) struct Events {
    waiting: Mutex<Waiting>,
    /// Readable while events wait.
    ready: OwnedFd,
    /// The program has asked for events: without that nothing is kept.
    wanted: std::sync::atomic::AtomicBool,
}

/// What waits to be told, of events and of ends of connections each. When there is more, the oldest are forgotten.
pub(crate) const UNREAD_MAX: usize = 65_536;

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<Event>,
    lost: u64,
}

impl Events {
    /// None.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            ready: placed(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?,
            wanted: false.into(),
        })
    }

    /// From now on events are kept.
    pub(crate) fn want(&self) {
        self.wanted.store(true, std::sync::atomic::Ordering::SeqCst);
    }

    /// Adds one, if anybody wants them.
    pub(crate) fn push(&self, event: Event) {
        if !self.wanted.load(std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if waiting.events.len() == UNREAD_MAX {
            waiting.events.pop_front();
            waiting.lost += 1;
        }
        waiting.events.push_back(event);
        if waiting.events.len() == 1 {
            let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
        }
    }

    /// The oldest; before it, how many were lost.
    pub(crate) fn pop(&self) -> Option<Event> {
        let mut waiting = self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if waiting.lost > 0 {
            return Some(Event::Lost { events: std::mem::take(&mut waiting.lost) });
        }
        let event = waiting.events.pop_front();
        if waiting.events.is_empty() {
            let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        }
        event
    }

    /// Readable while there are some.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_events_have_a_limit_and_the_loss_is_told() {
        let events = Events::new().unwrap();
        events.want();
        let number = |generation| Event::Detached { connection: ConnectionId { index: 0, generation } };
        (0..UNREAD_MAX as u32 + 3).for_each(|at| events.push(number(at)));
        assert_eq!(events.pop(), Some(Event::Lost { events: 3 }));
        assert_eq!(events.pop(), Some(number(3)));
        // Counted anew.
        events.push(number(7));
        events.push(number(8));
        assert_eq!(events.pop(), Some(Event::Lost { events: 1 }));
        let rest = std::iter::from_fn(|| events.pop()).last();
        assert_eq!(rest, Some(number(8)));
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(events.fd(), rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&now)), Ok(0));
    }
}
