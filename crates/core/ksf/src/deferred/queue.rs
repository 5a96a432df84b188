//! A queue that any thread fills and one thread empties, which sleeps on a descriptor meanwhile.
//!
//! The first item of a batch costs its producer a wake-up, the others do not: a flag says that one is on its way. The
//! flag and the wake-up are two steps, and the consumer may run between them, because it looks into the queue in every
//! turn and not only when it was woken:
//!
//! ```text
//!   producer: push, set the flag ─────────────────────────── write ──► readable, and the queue is empty
//!   consumer:                     clear the flag, take all                       read
//! ```
//!
//! So the consumer reads the descriptor whenever it is reported, whatever the flag says.
//!
//! `tests/mailbox_schedules.rs` compiles this file against primitives that try one schedule of the threads after the
//! other.

use super::sync::{AtomicBool, Event, Mutex, MutexGuard, Ordering, PoisonError};

/// Items on their way to the one thread that takes them.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    items: Mutex<Vec<T>>,
    /// True from the first item until the consumer empties the queue: one wake-up per batch of items.
    full: AtomicBool,
    event: Event,
}

impl<T> Queue<T> {
    /// An empty queue whose consumer waits for `event`.
    pub(crate) fn new(event: Event) -> Self {
        Self { items: Mutex::default(), full: AtomicBool::new(false), event }
    }

    /// What the consumer waits for: readable while there may be items.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// Adds an item, and wakes the consumer unless another thread does so already. Any thread.
    pub(crate) fn push(&self, item: T) {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).push(item);
        // After the push: a consumer that clears the flag and then takes the items misses none.
        if !self.full.swap(true, Ordering::AcqRel) {
            self.event.write();
        }
    }

    /// True if there are items, unless the consumer is about to be woken for the first of them.
    pub(crate) fn has_items(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Moves all items into `into`. `woken`: the descriptor was reported as readable. It is read then, also when the
    /// queue is empty by now: unread, it would end every further wait of a level-triggered poller.
    pub(crate) fn take(&self, woken: bool, into: &mut Vec<T>) {
        if woken || self.has_items() {
            into.append(&mut self.open());
        }
    }

    /// Calls `each` with every item, while producers wait.
    #[allow(dead_code, reason = "the schedules of the threads are tried with `take`")]
    pub(crate) fn drain(&self, each: impl FnMut(T)) {
        self.open().drain(..).for_each(each);
    }

    /// The items, from a queue that is not full any more.
    fn open(&self) -> MutexGuard<'_, Vec<T>> {
        // Before the flag is cleared: the thread that sets it again wakes the consumer again.
        self.event.read();
        // A producer that finds the flag set has pushed before: this sees its item, and a store could come too late.
        self.full.swap(false, Ordering::AcqRel);
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
