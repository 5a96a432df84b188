//! One connection, its multiplexor in the kernel, and its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ksf::adopt::{Adopted, Place};
use ksf::error::CloseReason;
use ksf::{Peer, Service};

use super::outbox::Outbox;
use super::{key, lock};
use crate::error::KcmError;
use crate::intake::{Intake, is_dead};
use crate::socket::KcmSocket;

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
    pub(super) intake: Intake,
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
            intake: Intake::new(0),
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
        let is_busy = self.intake.is_active() || self.pending.load(Ordering::SeqCst) > 0;
        if is_busy { Duration::ZERO } else { self.intake.idle_for(now) }
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
        self.intake.unread_bytes(&self.tcp, self.sockets())
    }

    fn sockets(&self) -> impl Iterator<Item = &KcmSocket> {
        self.lanes.iter().map(|lane| &lane.socket)
    }

    /// Whether TCP has given up the connection, so that nothing can be sent.
    pub(super) fn is_dead(&self) -> bool {
        is_dead(&self.tcp)
    }

    /// Time for which the beginning of a message has waited for its rest, as far as was looked.
    pub(super) fn unfinished_for(&self, now: Instant) -> Duration {
        self.intake.unfinished_for(self.tcp(), self.sockets(), self.end.get().is_none(), now)
    }

    /// Whether a peer that has ended its stream has ended it within a message.
    pub(super) fn ended_inside_message(&self) -> bool {
        // The end of the stream counts as a byte. The kernel keeps the beginning of a message to itself.
        self.intake.outstanding_bytes(self.tcp()) > 0
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
