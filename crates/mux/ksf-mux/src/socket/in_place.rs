//! Batches that are worked on where they lie, by services: what a worker may go through, and its answers.

use std::sync::atomic::Ordering;

use ksf::output::Output;

use super::MessageSocket;
use crate::connection::Connection;
use crate::error::RecvError;
use crate::lease::{self, Grant};
use crate::mux::HELD_BYTES_MAX;
use crate::scheduler::Source as _;
use crate::sync::Arc;

/// The first batch of a worker's lease, worked on where it lies.
pub(crate) type InPlaceBatch = lease::InPlaceBatch<Arc<Connection>>;

/// Answers of a worker that no other thread sees yet.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// With their framing.
    pub(crate) output: Output,
    /// Messages in it.
    pub(crate) messages: u64,
}

impl MessageSocket {
    /// Waits for messages and leaves the first batch of them where it is.
    pub(crate) fn recv_in_place(&self) -> Result<InPlaceBatch, RecvError> {
        self.recv_with(None, Self::next_in_place)
    }

    /// What this worker goes through in place.
    pub(crate) fn grant(&self) -> Grant {
        self.lock().lease.grant()
    }

    /// Takes the framed answers to messages of the last grant, and grants a few more. A few, because its answers wait for
    /// the worker to come again. False: there are none left, the lease was revoked, or the peer does not take what it is
    /// owed.
    pub(crate) fn grant_more(&self, batch: &InPlaceBatch, replies: &mut Replies, grant: &mut Grant) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        // Under the lock that is taken anyway; the timer thread sends them if the next messages take long.
        state.hold(replies);
        if state.held.len() >= HELD_BYTES_MAX {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
        if batch.source.is_throttled() && !state.lease.is_revoked(batch) {
            let rest = state.lease.end_in_place(grant);
            self.mux.0.wake(self.mux.0.scheduler.give_back(rest.into_iter()));
            return false;
        }
        state.lease.grant_more(batch, state.cost.grant(), grant, &mut state.receiver.ranges)
    }

    /// How many messages of a grant that the timer thread closed are this worker's.
    #[cold]
    pub(crate) fn kept(&self) -> usize {
        self.lock().lease.kept()
    }

    /// Queues what is answered so far.
    pub(crate) fn answer(&self, batch: &InPlaceBatch, replies: &mut Replies) {
        let mut state = self.lock();
        let state = &mut *state;
        state.hold(replies);
        if state.held_messages > 0 {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
    }

    /// Messages of a batch are done with. Replies that were held back leave with those to the next one, if that is of the
    /// same connection, and else when the worker comes for it.
    pub(crate) fn done_in_place(&self, batch: &InPlaceBatch, messages: usize, bytes: usize) {
        let mut state = self.lock();
        state.held_for = None;
        if state.held_messages > 0 {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
        if batch.source.corked.load(Ordering::SeqCst) {
            state.corked = Some(Arc::clone(&batch.source));
        }
        drop(state);
        if messages > 0 {
            self.mux.0.finish(self.worker.as_ref(), &batch.source, messages, bytes, batch.class);
        }
    }
}
