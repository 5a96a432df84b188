//! Receiving: one message per call, or a piece of one.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::KcmSocketError;
use super::flags::Flags;
use super::socket::{KcmSocket, Kind, lock};
use crate::error::RecvError;
use crate::mux::ConnectionId;
use crate::reply_order::{CALL_MESSAGES_MAX, ReplyOrder, this_thread};
use crate::socket::Message;

/// What a call received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvInfo {
    /// Bytes in the buffers; with [`Flags::TRUNC`] in the call: bytes that were there.
    pub bytes: usize,
    /// [`Flags::EOR`] with the last byte of a message, [`Flags::TRUNC`] if some of it is dropped.
    pub flags: Flags,
    /// The connection it came on.
    pub connection: ConnectionId,
}

/// Room for one message of several.
#[derive(Debug)]
pub struct RecvBuffer<'a, 'b> {
    /// Buffers, filled one after the other.
    pub parts: &'a mut [IoSliceMut<'b>],
    /// What was received into them.
    pub received: Option<RecvInfo>,
}

/// What was received.
#[derive(Default)]
pub(super) struct Receiving {
    /// Messages that were peeked at or not read to their end.
    pub(super) held: VecDeque<Held>,
    /// Where answers go.
    pub(super) order: ReplyOrder,
}

/// A message that was received and is not done with.
pub(super) struct Held {
    pub(super) message: Message,
    /// Bytes of it that were read.
    pub(super) at: usize,
    /// The thread that read the last of them, and may answer; 0: none has.
    reader: u64,
}

impl Held {
    /// Bytes of it are read by the calling thread, which so has received it, as the `at`-th message of its call.
    fn is_read(&mut self, order: &mut ReplyOrder, at: usize) {
        let thread = this_thread();
        // One message, in however many pieces.
        if self.reader != thread {
            self.reader = thread;
            order.received(self.message.connection(), at);
        }
    }
}

/// How long a call waits.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    Not,
    Until(Instant),
    Forever,
}

impl Wait {
    /// For a call with these flags on a socket with this timeout.
    pub(super) fn new(flags: Flags, timeout: Option<Duration>) -> Self {
        if flags.contains(Flags::DONTWAIT) {
            return Self::Not;
        }
        // A time beyond the clock's end does not come.
        timeout.map_or(Self::Forever, |timeout| Instant::now().checked_add(timeout).map_or(Self::Forever, Self::Until))
    }

    /// What is left of it; `None`: no end.
    fn left(self) -> Option<Duration> {
        match self {
            Self::Not => Some(Duration::ZERO),
            Self::Until(end) => Some(end.saturating_duration_since(Instant::now())),
            Self::Forever => None,
        }
    }
}

impl KcmSocket {
    /// `recvmsg`: the next message, or the next piece of one, into `parts`.
    pub fn recvmsg(&self, parts: &mut [IoSliceMut<'_>], flags: Flags) -> Result<RecvInfo, KcmSocketError> {
        self.recvmsg_at(0, parts, flags)
    }

    /// The same, as the `at`-th message of a call that receives several, counted from 0: messages are answered in this
    /// order. For callers that make a call like [`Self::recvmmsg`] themselves; of at most
    /// [`CALL_MESSAGES_MAX`](crate::CALL_MESSAGES_MAX).
    pub fn recvmsg_at(
        &self,
        at: usize,
        parts: &mut [IoSliceMut<'_>],
        flags: Flags,
    ) -> Result<RecvInfo, KcmSocketError> {
        self.receive(at, parts, flags, Wait::new(flags, self.receive_timeout()))
    }

    /// `recv`: the same, into one buffer.
    pub fn recv(&self, buffer: &mut [u8], flags: Flags) -> Result<RecvInfo, KcmSocketError> {
        self.recvmsg(&mut [IoSliceMut::new(buffer)], flags)
    }

    /// `recvmmsg`: a message for each slot. Returns how many there were; fails only if there was none. Waits for all of
    /// them, or for the first only ([`Flags::WAITFORONE`]), at most for `timeout` in all. What is sent next answers them in
    /// their order. Fills at most [`CALL_MESSAGES_MAX`](crate::CALL_MESSAGES_MAX) slots.
    pub fn recvmmsg(
        &self,
        slots: &mut [RecvBuffer<'_, '_>],
        flags: Flags,
        timeout: Option<Duration>,
    ) -> Result<usize, KcmSocketError> {
        let all = Wait::new(Flags::NONE, timeout);
        let mut now = flags;
        let most = slots.len().min(CALL_MESSAGES_MAX);
        let slots = &mut slots[..most];
        for (count, slot) in slots.iter_mut().enumerate() {
            let own = Wait::new(now, self.receive_timeout());
            let wait = match (own, all) {
                (Wait::Until(own), Wait::Until(all)) => Wait::Until(own.min(all)),
                (Wait::Forever, all) => all,
                (own, _) => own,
            };
            match self.receive(count, slot.parts, flags, wait) {
                Ok(received) => slot.received = Some(received),
                Err(error) if count == 0 => return Err(error),
                // It comes again with the next call, as errors of recvmmsg do.
                Err(_) => return Ok(count),
            }
            if flags.contains(Flags::WAITFORONE) {
                now |= Flags::DONTWAIT;
            }
        }
        Ok(slots.len())
    }

    /// `splice`: up to `bytes_max` bytes of a message into a pipe or file. What is left of it is received or spliced
    /// next, whatever the type of the socket.
    pub fn splice(&self, to: impl AsFd, bytes_max: usize, flags: Flags) -> Result<usize, KcmSocketError> {
        self.splice_with(bytes_max, flags, |bytes| Ok(rustix::io::write(&to, bytes)?))
    }

    /// [`Self::splice`] to a target that `write` writes to. The call holds no lock of this crate while `write` runs, which
    /// so may wait, and returns the bytes taken.
    pub fn splice_with(
        &self,
        bytes_max: usize,
        flags: Flags,
        write: impl FnOnce(&[u8]) -> io::Result<usize>,
    ) -> Result<usize, KcmSocketError> {
        let mut receiving = self.front(Wait::new(flags, self.receive_timeout()))?;
        // The target may be slow: others need not wait for it.
        let Some(mut front) = receiving.held.pop_front() else { return Err(KcmSocketError::WouldBlock) };
        drop(receiving);
        let rest = &front.message[front.at..];
        let written = write(&rest[..rest.len().min(bytes_max)]);
        let mut receiving = lock(&self.receiving);
        if written.is_ok() {
            front.is_read(&mut receiving.order, 0);
        }
        front.at += *written.as_ref().unwrap_or(&0);
        if front.at == front.message.len() {
            drop(receiving);
            self.finished(front);
        } else {
            receiving.held.push_front(front);
            drop(receiving);
            self.socket.announce();
        }
        written.map_err(KcmSocketError::System)
    }

    fn receive(
        &self,
        at: usize,
        parts: &mut [IoSliceMut<'_>],
        flags: Flags,
        wait: Wait,
    ) -> Result<RecvInfo, KcmSocketError> {
        let mut receiving = self.front(wait)?;
        let Receiving { held, order } = &mut *receiving;
        let Some(front) = held.front_mut() else { return Err(KcmSocketError::WouldBlock) };
        let rest = &front.message[front.at..];
        let copied = scatter(rest, parts);
        let fits = copied == rest.len();
        let dgram = self.kind() == Kind::Dgram;
        let mut received = RecvInfo {
            bytes: if flags.contains(Flags::TRUNC) { rest.len() } else { copied },
            flags: if fits || dgram { Flags::EOR } else { Flags::NONE },
            connection: front.message.connection(),
        };
        if dgram && !fits {
            received.flags |= Flags::TRUNC;
        }
        let ends = fits || dgram;
        if !flags.contains(Flags::PEEK) {
            front.is_read(order, at);
            front.at += copied;
            if ends && let Some(front) = held.pop_front() {
                self.finished(front);
            }
        }
        if !held.is_empty() {
            self.socket.announce();
        }
        Ok(received)
    }

    /// What was received, with at least one message held.
    pub(super) fn front(&self, wait: Wait) -> Result<MutexGuard<'_, Receiving>, KcmSocketError> {
        loop {
            let receiving = lock(&self.receiving);
            if !receiving.held.is_empty() {
                return Ok(receiving);
            }
            drop(receiving);
            match self.socket.recv_within(wait.left()) {
                Ok(message) => {
                    let mut receiving = lock(&self.receiving);
                    receiving.held.push_back(Held { message, at: 0, reader: 0 });
                    return Ok(receiving);
                }
                Err(RecvError::Disabled) => self.wait_until_enabled(wait)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn wait_until_enabled(&self, wait: Wait) -> Result<(), KcmSocketError> {
        let receiving = lock(&self.receiving);
        let disabled = |_: &mut Receiving| !self.is_receiving();
        match wait.left() {
            None => drop(self.enabled.wait_while(receiving, disabled)),
            Some(left) => {
                let waited = self.enabled.wait_timeout_while(receiving, left, disabled);
                let (_receiving, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                if timeout.timed_out() {
                    return Err(KcmSocketError::WouldBlock);
                }
            }
        }
        Ok(())
    }

    fn finished(&self, held: Held) {
        self.counts.rx_messages.fetch_add(1, Ordering::Relaxed);
        self.counts.rx_bytes.fetch_add(held.message.len() as u64, Ordering::Relaxed);
    }
}

/// Copies what fits, and says how much that is.
fn scatter(mut bytes: &[u8], parts: &mut [IoSliceMut<'_>]) -> usize {
    let before = bytes.len();
    for part in parts {
        let (now, later) = bytes.split_at(bytes.len().min(part.len()));
        part[..now.len()].copy_from_slice(now);
        bytes = later;
    }
    before - bytes.len()
}
