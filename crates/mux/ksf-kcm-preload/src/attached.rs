//! TCP sockets that are attached: their errors, which only the kernel could put on them, and what unattach gives back.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

use crate::descriptor::keep;
use crate::kcm::Group;
use crate::table::lock;

/// One of them.
pub(crate) struct Attached {
    pub(crate) group: Arc<Group>,
    /// A positive error number that was not asked for yet, or 0.
    error: AtomicI32,
    /// The writing end of a pipe: it has an error, for event loops, when the reading end is closed.
    alarm: OwnedFd,
    alarm_reader: Mutex<Option<OwnedFd>>,
    /// What unattach found read: it comes before what the socket has.
    pub(crate) unread: Mutex<VecDeque<u8>>,
}

impl Attached {
    pub(crate) fn new(group: Arc<Group>) -> std::io::Result<Self> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        Ok(Self {
            group,
            error: AtomicI32::new(0),
            alarm: keep(writer)?,
            alarm_reader: Mutex::new(Some(keep(reader)?)),
            unread: Mutex::default(),
        })
    }

    pub(crate) fn fail(&self, errno: i32) {
        self.error.store(errno, Ordering::SeqCst);
        let reader = lock(&self.alarm_reader).take();
        drop(reader);
    }

    pub(crate) fn has_error(&self) -> bool {
        self.error.load(Ordering::SeqCst) != 0
    }

    /// The error, once, as SO_ERROR gives it.
    pub(crate) fn take_error(&self) -> i32 {
        self.error.swap(0, Ordering::SeqCst)
    }

    /// Has an error (POLLERR) from the time the connection has one.
    pub(crate) fn alarm(&self) -> RawFd {
        self.alarm.as_raw_fd()
    }

    pub(crate) fn has_unread(&self) -> bool {
        !lock(&self.unread).is_empty()
    }
}
