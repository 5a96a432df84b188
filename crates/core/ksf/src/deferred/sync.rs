//! What the queue is made of. In a file of its own, so that the queue can also be compiled against other primitives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) use std::sync::atomic::{AtomicBool, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};

/// An event descriptor (eventfd(2)): readable once it was written to, until it is read.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(super) fn new() -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable.
    pub(super) fn write(&self) {
        // Fails only if 2^64 - 2 writes were not read.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all writes at once; does nothing if there was none.
    pub(super) fn read(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
