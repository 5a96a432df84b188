//! Sending: messages to any connection, in turn; batches of them to one.

use std::io::IoSlice;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::error::KcmSocketError;
use super::flags::Flags;
use super::socket::{KcmSocket, Kind, lock};
use super::stats::NO_BATCH;
use crate::backend::{Endpoint as _, Multiplexor};
use crate::mux::ConnectionId;
use crate::socket::SendOptions;

/// Longest wait, for calls that wait for ever: the clock reaches no end within it.
const FOREVER: Duration = Duration::from_secs(1 << 32);

/// What a socket keeps between sending calls.
#[derive(Debug, Default)]
pub(super) struct Sending {
    /// The beginning of a message.
    message: Vec<u8>,
    /// The connection that has the messages of an unfinished batch.
    batch: Option<ConnectionId>,
    repeatable: bool,
}

impl<M: Multiplexor> KcmSocket<M> {
    /// `sendmsg`: a message, or a piece of one, to a connection in turn. Success means that it is queued. Returns the
    /// bytes taken: all of them.
    pub fn sendmsg(&self, parts: &[IoSlice<'_>], flags: Flags) -> Result<usize, KcmSocketError> {
        let mut sending = if flags.contains(Flags::DONTWAIT) {
            match self.sending.try_lock() {
                Ok(sending) => sending,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Another thread waits for room.
                Err(TryLockError::WouldBlock) => return Err(KcmSocketError::WouldBlock),
            }
        } else {
            lock(&self.sending)
        };
        let sending = &mut *sending;
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let ends = match self.kind() {
            Kind::Dgram => !flags.contains(Flags::MORE),
            Kind::Seqpacket => flags.contains(Flags::EOR),
        };
        let before = sending.message.len();
        let limit = self.group.options.limits.message_bytes_max;
        if before + bytes > limit {
            return Err(KcmSocketError::TooLong { bytes: before + bytes, limit });
        }
        parts.iter().for_each(|part| sending.message.extend_from_slice(part));
        if !ends || sending.message.is_empty() {
            return Ok(bytes);
        }
        let wait = (!flags.contains(Flags::DONTWAIT)).then(|| self.send_timeout().unwrap_or(FOREVER).min(FOREVER));
        let batch = flags.contains(Flags::BATCH);
        let batch_wait = batch.then(|| Duration::from_millis(self.group.options.batch_timeout_ms));
        let options = SendOptions {
            repeatable: sending.repeatable,
            wait,
            prefer: sending.batch,
            batch: batch_wait,
            ..SendOptions::default()
        };
        match self.socket.send(&sending.message, options) {
            Ok(connection) => {
                self.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
                self.counts.tx_bytes.fetch_add(sending.message.len() as u64, Ordering::Relaxed);
                sending.message.clear();
                if sending.batch.is_none() {
                    self.counts.reserved.fetch_add(1, Ordering::Relaxed);
                }
                sending.batch = batch.then_some(connection);
                self.counts.batch.store(sending.batch.map_or(NO_BATCH, ConnectionId::to_u64), Ordering::SeqCst);
                Ok(bytes)
            }
            Err(error) => {
                sending.message.truncate(before);
                Err(error.into())
            }
        }
    }

    /// `send`: the same, of one buffer.
    pub fn send(&self, bytes: &[u8], flags: Flags) -> Result<usize, KcmSocketError> {
        self.sendmsg(&[IoSlice::new(bytes)], flags)
    }

    /// `sendmmsg`: several, with flags of their own ([`Flags::EOR`] counts). All but the last are a batch, so they go
    /// to one connection. Returns how many were taken; fails only if none was.
    pub fn sendmmsg(&self, messages: &[(&[IoSlice<'_>], Flags)], flags: Flags) -> Result<usize, KcmSocketError> {
        for (at, (parts, own)) in messages.iter().enumerate() {
            let batch = if at + 1 < messages.len() { Flags::BATCH } else { Flags::NONE };
            match self.sendmsg(parts, flags | *own | batch) {
                Ok(_) => {}
                Err(error) if at == 0 => return Err(error),
                Err(_) => {
                    // No later message ends this batch.
                    self.flush();
                    return Ok(at);
                }
            }
        }
        Ok(messages.len())
    }

    /// Answers: a whole message to this connection and to no other. Never waits. AF_KCM cannot.
    pub fn reply(&self, connection: ConnectionId, message: &[u8]) -> Result<(), KcmSocketError> {
        self.socket.send_to(connection, message)?;
        self.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        self.counts.tx_bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a batch: what waits of it leaves now.
    pub fn flush(&self) {
        let batch = lock(&self.sending).batch.take();
        self.counts.batch.store(NO_BATCH, Ordering::SeqCst);
        if let Some(connection) = batch {
            self.group.mux.flush(connection);
        }
    }

    /// Whether a message may be repeated on another connection when the one that has it fails in its middle: set it
    /// for requests that do no harm when they are received twice. AF_KCM repeats always.
    pub fn set_repeatable(&self, repeatable: bool) {
        lock(&self.sending).repeatable = repeatable;
    }
}
