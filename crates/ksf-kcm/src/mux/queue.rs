//! What waits for any of several event loops: a queue whose descriptor is readable while something is in it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};

use super::lock;

#[derive(Debug)]
pub(super) struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    /// Counts them.
    ready: OwnedFd,
}

impl<T> Queue<T> {
    pub(super) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        Ok(Self { items: Mutex::default(), ready: eventfd(0, flags)? })
    }

    pub(super) fn push(&self, item: T) {
        let mut items = lock(&self.items);
        items.push_back(item);
        let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
    }

    /// In front of the others: it was taken from there.
    pub(super) fn push_front(&self, item: T) {
        let mut items = lock(&self.items);
        items.push_front(item);
        let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
    }

    pub(super) fn pop(&self) -> Option<T> {
        let mut items = lock(&self.items);
        let item = items.pop_front()?;
        // One of the semaphore's for each item, under the lock.
        let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        Some(item)
    }

    pub(super) fn clear(&self) {
        while self.pop().is_some() {}
    }
}

impl<T> AsFd for Queue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}
