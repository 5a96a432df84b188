//! How much of a connection's stream has come out of AF_KCM in messages, and how much must still be in there.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::KcmError;
use crate::socket::RawKcmSocket;
use crate::sys;

/// Counts what was taken, and compares it with what TCP has received.
#[derive(Debug)]
pub(crate) struct Intake {
    /// The thread that takes a message now, or works on one where that is not told apart.
    active: AtomicUsize,
    /// Messages taken so far.
    taken: AtomicU64,
    /// Their bytes, and those that were read before the connection was attached.
    taken_bytes: AtomicU64,
    /// When a message was taken last.
    taken_at: Mutex<Instant>,
    /// The beginning of a message is there: so many had been taken before, and since when it is.
    unfinished: Mutex<Option<(u64, Instant)>>,
}

impl Intake {
    /// Of a connection of whose stream so many bytes were read already.
    pub(crate) fn new(read_bytes: u64) -> Self {
        Self {
            active: AtomicUsize::new(0),
            taken: AtomicU64::new(0),
            taken_bytes: AtomicU64::new(read_bytes),
            taken_at: Mutex::new(Instant::now()),
            unfinished: Mutex::default(),
        }
    }

    /// A thread is about to take a message.
    pub(crate) fn enter(&self) {
        self.active.fetch_add(1, Ordering::SeqCst);
    }

    /// A message was taken, as long as this on the wire.
    pub(crate) fn took(&self, bytes: usize) {
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.taken_bytes.fetch_add(bytes as u64, Ordering::SeqCst);
        *self.taken_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// The counterpart of [`Self::enter`].
    pub(crate) fn leave(&self) {
        self.active.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst) > 0
    }

    /// Time since a message was taken.
    pub(crate) fn idle_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.taken_at.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Bytes of the stream that are in no message, as far as can be told: `None` while a message waits on one of these
    /// sockets or is being taken.
    pub(crate) fn unread_bytes<'a>(
        &self,
        tcp: impl AsFd,
        sockets: impl IntoIterator<Item = &'a RawKcmSocket>,
    ) -> Result<Option<u64>, KcmError> {
        // A message can go to a socket after that was found empty: a worker emptied another one, which made room for a
        // message the kernel had to hold back. Then the worker was at it, before or after.
        let taken = self.taken.load(Ordering::SeqCst);
        if self.is_active() {
            return Ok(None);
        }
        // Takes the lock of the socket, under which the kernel cuts messages: 0 means that it has cut everything.
        let unread = rustix::io::ioctl_fionread(tcp).map_err(KcmError::os("FIONREAD"))?;
        for socket in sockets {
            if socket.has_message()? {
                return Ok(None);
            }
        }
        let is_quiet = !self.is_active() && self.taken.load(Ordering::SeqCst) == taken;
        Ok(is_quiet.then_some(unread))
    }

    /// Bytes TCP has received that were not taken.
    pub(crate) fn outstanding_bytes(&self, tcp: BorrowedFd<'_>) -> u64 {
        received_bytes(tcp).unwrap_or(0).saturating_sub(self.taken_bytes.load(Ordering::SeqCst))
    }

    /// Bytes of a connection that is not attached any more which are neither taken nor left in TCP.
    pub(crate) fn lost_bytes(&self, tcp: BorrowedFd<'_>) -> u64 {
        read_bytes(tcp).unwrap_or(0).saturating_sub(self.taken_bytes.load(Ordering::SeqCst))
    }

    /// Time for which the beginning of a message has waited for its rest, as far as was looked.
    ///
    /// The kernel has a timer for that, and does not always set it: not for a message that is behind others in a segment
    /// and shorter than that (seen on 6.1; `strp_peek_len` counts what was cut already).
    pub(crate) fn unfinished_for<'a>(
        &self,
        tcp: BorrowedFd<'_>,
        sockets: impl IntoIterator<Item = &'a RawKcmSocket>,
        is_read: bool,
        now: Instant,
    ) -> Duration {
        let is_unfinished =
            self.outstanding_bytes(tcp) > 0 && is_read && matches!(self.unread_bytes(tcp, sockets), Ok(Some(_)));
        let mut unfinished = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = self.taken.load(Ordering::SeqCst);
        let before = unfinished.filter(|(before, _)| is_unfinished && *before == taken);
        let since = before.map_or(now, |(_, since)| since);
        *unfinished = is_unfinished.then_some((taken, since));
        now.saturating_duration_since(since)
    }
}

/// Bytes of a connection's stream that have been read so far.
pub(crate) fn read_bytes(tcp: BorrowedFd<'_>) -> Result<u64, KcmError> {
    loop {
        let received = received_bytes(tcp)?;
        let waiting = rustix::io::ioctl_fionread(tcp).map_err(KcmError::os("FIONREAD"))?;
        // Nothing came in between.
        if received_bytes(tcp)? == received {
            return Ok(received.saturating_sub(waiting));
        }
    }
}

/// Bytes TCP has received so far. It counts the peer's end of the stream as one, which is none.
fn received_bytes(tcp: BorrowedFd<'_>) -> Result<u64, KcmError> {
    let count = || sys::received_bytes(tcp).map_err(KcmError::os("TCP_INFO"));
    let mut before = count()?;
    loop {
        let has_ended = reports(tcp, PollFlags::RDHUP);
        let after = count()?;
        // The end did not come in between.
        if after == before {
            return Ok(after.saturating_sub(has_ended.into()));
        }
        before = after;
    }
}

/// Whether TCP has given up the connection, so that nothing can be sent.
pub(crate) fn is_dead(tcp: impl AsFd) -> bool {
    reports(tcp, PollFlags::HUP)
}

fn reports(tcp: impl AsFd, what: PollFlags) -> bool {
    let mut fds = [PollFd::new(&tcp, what)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().contains(what)
}
