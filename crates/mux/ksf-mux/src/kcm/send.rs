//! Sending: answers to the connections that were heard; other messages to any connection, in turn, batches of them to
//! one.

use std::io::IoSlice;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::error::KcmSocketError;
use super::flags::Flags;
use super::socket::{KcmSocket, Kind, lock};
use super::stats::NO_BATCH;
use crate::error::SendError;
use crate::mux::ConnectionId;
use crate::reply_order::Unanswered;
use crate::socket::SendOptions;

/// Longest wait, for calls that wait for ever: the clock reaches no end within it.
const FOREVER: Duration = Duration::from_secs(1 << 32);

/// What a socket keeps between sending calls. No call keeps the lock while it waits.
#[derive(Debug, Default)]
pub(super) struct Sending {
    /// The beginning of a message.
    message: Vec<u8>,
    /// The message that it answers.
    answers: Option<Unanswered>,
    /// A call that ends a message, and has its beginning, waits for room. If there is none in time, the beginning comes
    /// back, so no other message begins until then that does not end with its call.
    is_ending: bool,
    /// The connection that has the messages of an unfinished batch.
    batch: Option<ConnectionId>,
    repeatable: bool,
}

impl Sending {
    /// Where the message goes that has begun, if that is settled.
    pub(super) fn recipient(&self) -> Option<ConnectionId> {
        self.answers.filter(|_| !self.message.is_empty()).map(|message| message.connection)
    }

    /// After a call that ends a message, which had it: keeps so much of its beginning for the next one.
    fn put_back(&mut self, mut message: Vec<u8>, answers: Option<Unanswered>, keep: usize) {
        // Another message may have begun meanwhile, unless there is a beginning to be kept.
        if self.message.is_empty() {
            message.truncate(keep);
            self.message = message;
            self.answers = answers;
        }
    }
}

impl KcmSocket {
    /// `sendmsg`: a message, or a piece of one, to the connection of the message that it answers (`docs/kcm.md`, "Which
    /// connection a message goes to"). Success means that it is queued. Returns the bytes taken: all of them.
    ///
    /// # Errors
    ///
    /// [`KcmSocketError::SenderGone`] if that connection is gone: the message is dropped, and the next one answers the
    /// next message.
    pub fn sendmsg(&self, parts: &[IoSlice<'_>], flags: Flags) -> Result<usize, KcmSocketError> {
        self.sendmsg_at(0, parts, flags)
    }

    /// The same, as the `at`-th message of a call that sends several, counted from 0. Such a call tells of no error of a
    /// later message, which comes again with the next call. For callers that make a call like [`Self::sendmmsg`]
    /// themselves.
    pub fn sendmsg_at(&self, at: usize, parts: &[IoSlice<'_>], flags: Flags) -> Result<usize, KcmSocketError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let ends = match self.kind() {
            Kind::Dgram => !flags.contains(Flags::MORE),
            Kind::Seqpacket => flags.contains(Flags::EOR),
        };
        let wait = (!flags.contains(Flags::DONTWAIT)).then(|| self.send_timeout().unwrap_or(FOREVER).min(FOREVER));
        let mut sending = lock(&self.sending);
        if !ends && sending.is_ending {
            sending = self.wait_for_end(sending, wait)?;
        }
        let before = sending.message.len();
        let limit = self.group.options.limits.message_bytes_max;
        if before + bytes > limit {
            return Err(KcmSocketError::TooLong { bytes: before + bytes, limit });
        }
        if before == 0 {
            sending.answers = self.unanswered();
        }
        parts.iter().for_each(|part| sending.message.extend_from_slice(part));
        if sending.message.is_empty() {
            return Ok(bytes);
        }
        let answers = sending.answers;
        let answered = || {
            if let Some(message) = answers {
                lock(&self.receiving).order.answered(message);
            }
        };
        if before == 0 && !ends {
            // With its beginning it is settled where the rest goes, whatever is received meanwhile.
            answered();
        }
        if !ends {
            return Ok(bytes);
        }
        let batch = flags.contains(Flags::BATCH);
        let batch_wait = batch.then(|| Duration::from_millis(self.group.options.batch_timeout_ms));
        let options = SendOptions {
            repeatable: sending.repeatable,
            to: answers.map(|message| message.connection),
            answer: true,
            prefer: sending.batch,
            batch: batch_wait,
            ..SendOptions::default()
        };
        let message = std::mem::take(&mut sending.message);
        let mut sent = self.socket.send(&message, options);
        if matches!(sent, Err(SendError::WouldBlock)) && wait.is_some() {
            sending.is_ending |= before > 0;
            drop(sending);
            sent = self.socket.send(&message, SendOptions { wait, ..options });
            sending = lock(&self.sending);
            if before > 0 {
                sending.is_ending = false;
                self.ended.notify_all();
            }
        }
        match sent {
            Ok(connection) => {
                self.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
                self.counts.tx_bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
                sending.put_back(message, answers, 0);
                answered();
                if sending.batch != Some(connection) {
                    self.counts.reserved.fetch_add(1, Ordering::Relaxed);
                    // What goes elsewhere ends the batch.
                    if let Some(other) = sending.batch {
                        self.group.mux.flush(other);
                    }
                }
                sending.batch = batch.then_some(connection);
                self.counts.batch.store(sending.batch.map_or(NO_BATCH, ConnectionId::to_u64), Ordering::SeqCst);
                Ok(bytes)
            }
            Err(SendError::Gone(connection)) => {
                // A caller that is told of it does not come again with the message.
                let is_told = at == 0;
                sending.put_back(message, answers, if is_told { 0 } else { before });
                if is_told {
                    answered();
                }
                Err(KcmSocketError::SenderGone(connection))
            }
            Err(error) => {
                sending.put_back(message, answers, before);
                Err(error.into())
            }
        }
    }

    /// Waits until the message is queued, or not in time, whose last piece waits for room.
    fn wait_for_end<'a>(
        &'a self,
        sending: MutexGuard<'a, Sending>,
        wait: Option<Duration>,
    ) -> Result<MutexGuard<'a, Sending>, KcmSocketError> {
        let wait = wait.ok_or(KcmSocketError::WouldBlock)?;
        let waited = self.ended.wait_timeout_while(sending, wait, |sending| sending.is_ending);
        let (sending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if sending.is_ending { Err(KcmSocketError::WouldBlock) } else { Ok(sending) }
    }

    /// `send`: the same, of one buffer.
    pub fn send(&self, bytes: &[u8], flags: Flags) -> Result<usize, KcmSocketError> {
        self.sendmsg(&[IoSlice::new(bytes)], flags)
    }

    /// `sendmmsg`: several, with flags of their own ([`Flags::EOR`] counts). All but the last are a batch: those to one
    /// connection leave together, and those that answer nothing all go to one. Returns how many were taken; fails only if
    /// none was.
    pub fn sendmmsg(&self, messages: &[(&[IoSlice<'_>], Flags)], flags: Flags) -> Result<usize, KcmSocketError> {
        for (at, (parts, own)) in messages.iter().enumerate() {
            let batch = if at + 1 < messages.len() { Flags::BATCH } else { Flags::NONE };
            match self.sendmsg_at(at, parts, flags | *own | batch) {
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
