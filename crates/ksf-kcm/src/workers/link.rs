//! One connection, its multiplexor in the kernel, and its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ksf::adopt::{Adopted, Place};
use ksf::error::CloseReason;
use ksf::{Peer, Service};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::outbox::Outbox;
use super::{key, lock};
use crate::error::KcmError;
use crate::socket::KcmSocket;
use crate::sys;

pub(super) struct Link<S: Service> {
    pub(super) number: u64,
    pub(super) peer: Peer,
    service: Arc<S>,
    tcp: OwnedFd,
    pub(super) lanes: Vec<Lane<S>>,
    pub(super) outbox: Mutex<Outbox>,
    /// TCP has no room for replies: the home worker tries again and again.
    pub(super) blocked: AtomicBool,
    /// Messages whose answers come later.
    pub(super) pending: AtomicUsize,
    /// Workers that take or work on a message now.
    pub(super) active: AtomicUsize,
    /// Messages taken so far, and their bytes.
    pub(super) taken: AtomicU64,
    pub(super) taken_bytes: AtomicU64,
    /// When a message was taken last.
    pub(super) taken_at: Mutex<Instant>,
    /// The beginning of a message is there: so many had been taken before, and since when it is.
    unfinished: Mutex<Option<(u64, Instant)>>,
    /// Why it ends; set once.
    pub(super) end: OnceLock<End>,
    _place: Place,
}

/// One of the multiplexor's sockets, read by one worker.
pub(super) struct Lane<S: Service> {
    pub(super) socket: KcmSocket,
    pub(super) worker: usize,
    /// The service's state for messages that come here; taken while one is worked on.
    pub(super) state: Mutex<Option<S::Conn>>,
    /// It is not read until somebody says that it can be.
    pub(super) parked: AtomicBool,
    /// Its worker has it on the list of those to be read.
    pub(super) listed: AtomicBool,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) reason: CloseReason,
    pub(super) reading: Reading,
}

/// What is still taken of a connection that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Everything that has arrived.
    All,
    /// What the kernel has cut: it cuts no more.
    Cut,
    /// No message. Answers that are due are sent.
    Stopped,
    /// No message, and nothing can be sent either.
    Nothing,
}

impl<S: Service> Lane<S> {
    pub(super) fn new(socket: KcmSocket, worker: usize, state: S::Conn) -> Self {
        Self {
            socket,
            worker,
            state: Mutex::new(Some(state)),
            parked: AtomicBool::new(false),
            listed: AtomicBool::new(false),
        }
    }
}

impl<S: Service> Link<S> {
    pub(super) fn new(number: u64, adopted: Adopted, service: Arc<S>, lanes: Vec<Lane<S>>) -> Self {
        Self {
            number,
            peer: adopted.peer,
            service,
            tcp: adopted.socket,
            lanes,
            outbox: Mutex::default(),
            blocked: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            taken: AtomicU64::new(0),
            taken_bytes: AtomicU64::new(0),
            taken_at: Mutex::new(Instant::now()),
            unfinished: Mutex::default(),
            end: OnceLock::new(),
            _place: adopted.place,
        }
    }

    pub(super) fn tcp(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }

    pub(super) fn key(&self) -> ksf::service::ConnKey {
        key(self.number)
    }

    /// The socket that the connection is attached to.
    pub(super) fn first(&self) -> &KcmSocket {
        // A link is made with at least one.
        &self.lanes[0].socket
    }

    /// The worker that watches the TCP socket and ends the connection.
    pub(super) fn home(&self) -> usize {
        self.lanes[0].worker
    }

    /// The socket that a worker reads.
    pub(super) fn lane(&self, worker: usize) -> Option<&Lane<S>> {
        self.lanes.iter().find(|lane| lane.worker == worker)
    }

    /// Time without a message, or an answer that is due.
    pub(super) fn idle_for(&self, now: Instant) -> Duration {
        let is_busy = self.active.load(Ordering::SeqCst) > 0 || self.pending.load(Ordering::SeqCst) > 0;
        if is_busy { Duration::ZERO } else { now.saturating_duration_since(*lock(&self.taken_at)) }
    }

    /// Whether messages are taken still.
    pub(super) fn is_read(&self) -> bool {
        self.end.get().is_none_or(|end| matches!(end.reading, Reading::All | Reading::Cut))
    }

    /// Takes the connection out of the kernel's multiplexor.
    pub(super) fn detach(&self) {
        // It fails only for one that is not attached.
        let _ = self.first().unattach(&self.tcp);
    }

    /// Bytes of the stream that are in no message, as far as can be told: `None` while a message waits or is in hand.
    pub(super) fn unread_bytes(&self) -> Result<Option<u64>, KcmError> {
        // A message can go to a socket after that was found empty: a worker emptied another one, which made room for a
        // message the kernel had to hold back. Then the worker was at it, before or after.
        let taken = self.taken.load(Ordering::SeqCst);
        if self.active.load(Ordering::SeqCst) > 0 {
            return Ok(None);
        }
        // Takes the lock of the socket, under which the kernel cuts messages: 0 means that it has cut everything.
        let unread = rustix::io::ioctl_fionread(&self.tcp).map_err(KcmError::os("FIONREAD"))?;
        for lane in &self.lanes {
            if lane.socket.has_message()? {
                return Ok(None);
            }
        }
        let is_quiet = self.active.load(Ordering::SeqCst) == 0 && self.taken.load(Ordering::SeqCst) == taken;
        Ok(is_quiet.then_some(unread))
    }

    /// Whether TCP has given up the connection, so that nothing can be sent.
    pub(super) fn is_dead(&self) -> bool {
        let mut fds = [PollFd::new(&self.tcp, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Time for which the beginning of a message has waited for its rest, as far as was looked.
    ///
    /// The kernel has a timer for that, and does not always set it: not for a message that is behind others in a segment
    /// and shorter than that (seen on 6.1; `strp_peek_len` counts what was cut already).
    pub(super) fn unfinished_for(&self, now: Instant) -> Duration {
        let received = sys::received_bytes(self.tcp.as_fd()).unwrap_or(0);
        let is_unfinished = received > self.taken_bytes.load(Ordering::SeqCst)
            && self.end.get().is_none()
            && matches!(self.unread_bytes(), Ok(Some(_)));
        let mut unfinished = lock(&self.unfinished);
        let taken = self.taken.load(Ordering::SeqCst);
        let before = unfinished.filter(|(before, _)| is_unfinished && *before == taken);
        let since = before.map_or(now, |(_, since)| since);
        *unfinished = is_unfinished.then_some((taken, since));
        now.saturating_duration_since(since)
    }

    /// Whether a peer that has ended its stream has ended it within a message.
    pub(super) fn ended_inside_message(&self) -> bool {
        // The end of the stream counts as a byte. The kernel keeps the beginning of a message to itself.
        let received = sys::received_bytes(self.tcp.as_fd()).map(|bytes| bytes.saturating_sub(1));
        received.is_ok_and(|bytes| bytes != self.taken_bytes.load(Ordering::SeqCst))
    }
}

impl<S: Service> Drop for Link<S> {
    fn drop(&mut self) {
        for lane in &self.lanes {
            if let Some(state) = lock(&lane.state).take() {
                self.service.close(state);
            }
        }
    }
}
