//! Receiving: one message per call, or a piece of one.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::KcmSocketError;
use super::flags::Flags;
use super::socket::{KcmSocket, Kind, MessageOf, lock};
use crate::backend::{Endpoint as _, Multiplexor, Received as _};
use crate::error::RecvError;
use crate::mux::ConnectionId;

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

/// A message that was received and is not done with.
pub(super) struct Held<T> {
    pub(super) message: T,
    /// Bytes of it that were read.
    pub(super) at: usize,
}

type HeldBy<'a, M> = MutexGuard<'a, VecDeque<Held<MessageOf<M>>>>;

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

impl<M: Multiplexor> KcmSocket<M> {
    /// `recvmsg`: the next message, or the next piece of one, into `parts`.
    pub fn recvmsg(&self, parts: &mut [IoSliceMut<'_>], flags: Flags) -> Result<RecvInfo, KcmSocketError> {
        self.receive(parts, flags, Wait::new(flags, self.receive_timeout()))
    }

    /// `recv`: the same, into one buffer.
    pub fn recv(&self, buffer: &mut [u8], flags: Flags) -> Result<RecvInfo, KcmSocketError> {
        self.recvmsg(&mut [IoSliceMut::new(buffer)], flags)
    }

    /// `recvmmsg`: a message for each slot. Returns how many there were; fails only if there was none. Waits for all of
    /// them, or for the first only ([`Flags::WAITFORONE`]), at most for `timeout` in all.
    pub fn recvmmsg(
        &self,
        slots: &mut [RecvBuffer<'_, '_>],
        flags: Flags,
        timeout: Option<Duration>,
    ) -> Result<usize, KcmSocketError> {
        let all = Wait::new(Flags::NONE, timeout);
        let mut now = flags;
        for (count, slot) in slots.iter_mut().enumerate() {
            let own = Wait::new(now, self.receive_timeout());
            let wait = match (own, all) {
                (Wait::Until(own), Wait::Until(all)) => Wait::Until(own.min(all)),
                (Wait::Forever, all) => all,
                (own, _) => own,
            };
            match self.receive(slot.parts, flags, wait) {
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
        let mut held = self.front(Wait::new(flags, self.receive_timeout()))?;
        // The target may be slow: others need not wait for it.
        let Some(mut front) = held.pop_front() else { return Err(KcmSocketError::WouldBlock) };
        drop(held);
        let rest = &front.message[front.at..];
        let written = rustix::io::write(to, &rest[..rest.len().min(bytes_max)]);
        front.at += written.unwrap_or(0);
        if front.at == front.message.len() {
            self.finished(front);
        } else {
            lock(&self.held).push_front(front);
            self.socket.announce();
        }
        written.map_err(|errno| KcmSocketError::System(errno.into()))
    }

    fn receive(&self, parts: &mut [IoSliceMut<'_>], flags: Flags, wait: Wait) -> Result<RecvInfo, KcmSocketError> {
        let mut held = self.front(wait)?;
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

    /// The messages held, with at least one.
    pub(super) fn front(&self, wait: Wait) -> Result<HeldBy<'_, M>, KcmSocketError> {
        loop {
            let held = lock(&self.held);
            if !held.is_empty() {
                return Ok(held);
            }
            drop(held);
            match self.socket.receive(wait.left()) {
                Ok(message) => {
                    let mut held = lock(&self.held);
                    held.push_back(Held { message, at: 0 });
                    return Ok(held);
                }
                Err(RecvError::Disabled) => self.wait_until_enabled(wait)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn wait_until_enabled(&self, wait: Wait) -> Result<(), KcmSocketError> {
        let held = lock(&self.held);
        let disabled = |_: &mut VecDeque<Held<MessageOf<M>>>| !self.is_receiving();
        match wait.left() {
            None => drop(self.enabled.wait_while(held, disabled)),
            Some(left) => {
                let waited = self.enabled.wait_timeout_while(held, left, disabled);
                let (_held, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                if timeout.timed_out() {
                    return Err(KcmSocketError::WouldBlock);
                }
            }
        }
        Ok(())
    }

    fn finished(&self, held: Held<MessageOf<M>>) {
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
