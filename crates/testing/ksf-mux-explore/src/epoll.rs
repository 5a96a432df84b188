//! An edge-triggered epoll instance with an eventfd in it, as far as the multiplexor relies on them (fs/eventpoll.c,
//! fs/eventfd.c).

use std::collections::VecDeque;

use crate::sync::{Condvar, Mutex, MutexGuard};

/// What a wait returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The eventfd was written to.
    Signal,
    /// Bytes came on this connection.
    Readable(usize),
}

#[derive(Default)]
pub(crate) struct Epoll {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Count of the eventfd.
    signals: usize,
    /// The ready list. An item is in it once, however often it becomes ready.
    ready: VecDeque<Event>,
    closed: bool,
}

impl Epoll {
    /// Marks an item ready and wakes one that waits.
    pub(crate) fn announce(&self, event: Event) {
        let mut state = self.lock();
        if !state.ready.contains(&event) {
            state.ready.push_back(event);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// write(2) on the eventfd: an event even when it was readable before.
    pub(crate) fn signal(&self, count: usize) {
        self.lock().signals += count;
        self.announce(Event::Signal);
    }

    /// read(2) on the eventfd: all of its count, or nothing.
    pub(crate) fn take_signals(&self) -> usize {
        std::mem::take(&mut self.lock().signals)
    }

    /// epoll_wait(2): up to `max` events; waits for the first one if `block`. Empty also when [`Self::close`] was called.
    pub(crate) fn wait(&self, max: usize, block: bool) -> Vec<Event> {
        let mut state = self.lock();
        while block && state.ready.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap();
        }
        let count = max.min(state.ready.len());
        let events = state.ready.drain(..count).collect();
        let more = !state.ready.is_empty();
        drop(state);
        if more {
            // ep_done_scan() wakes the next one.
            self.changed.notify_one();
        }
        events
    }

    /// The scenario is over: no thread waits any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}
