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

    /// The same, `max` at most: where fewer were taken, the oldest is forgotten.
    pub(super) fn push_within(&self, max: usize, item: T) {
        let mut items = lock(&self.items);
        if items.len() >= max {
            items.pop_front();
        } else {
            let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
        }
        items.push_back(item);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_where_there_is_a_limit_and_the_descriptor_counts_what_is_left() {
        let queue = Queue::new().unwrap();
        (0..5).for_each(|item| queue.push_within(3, item));
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(queue.as_fd(), rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&now)), Ok(1));
        assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(rustix::event::poll(&mut polled, Some(&now)), Ok(0));
    }
}
