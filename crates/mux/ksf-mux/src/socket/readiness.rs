//! Event loops: which of the sockets that wait is told of what comes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use super::MessageSocket;
use crate::pollable::Pollable;
use crate::sync::Arc;
use crate::wait_set::Poller as _;

impl MessageSocket {
    /// Reads connections that have bytes and queues their messages for all workers, without taking one or waiting.
    pub(crate) fn look(&self) -> std::io::Result<()> {
        self.with_cx(|shared, cx| shared.poll(cx))?;
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.rouse());
        self.note_ready();
        Ok(())
    }

    /// Makes [`Self::poll_fd`] readable: something that was received is not worked on.
    pub(crate) fn announce(&self) {
        if let Some(pollable) = self.pollable.get() {
            pollable.notify();
        }
    }

    /// A descriptor that is readable while [`Self::try_recv`] may have something. It may be readable without a message:
    /// bytes came, but not a whole message, or another socket was quicker.
    ///
    /// Of several sockets whose programs wait, one is told of what comes, and the next one once that has received. A
    /// program that is told receives until there is nothing ([`RecvError::WouldBlock`]), or does so soon after it is
    /// told once more: it is if it does not within 5 to 10 ms, and so is another one then.
    pub fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        let pollable = match self.pollable.get() {
            Some(pollable) => pollable,
            None => {
                let new = Arc::new(Pollable::new(self.mux.0.connections_set())?);
                self.pollable.get_or_init(|| new)
            }
        };
        Ok(pollable.fd())
    }

    /// Says whether messages wait that no event of a connection announces, and has another socket told of those.
    pub(super) fn note_ready(&self) {
        let Some(pollable) = self.pollable.get() else { return };
        if self.mux.0.scheduler.queued() > 0 || !self.lock().lease.batches.is_empty() {
            pollable.notify();
        }
        self.mux.0.wait_set.yield_lead(pollable);
    }

    /// Nothing is there: an event loop will be told. False: something came meanwhile.
    pub(super) fn fall_asleep(&self) -> bool {
        let Some(pollable) = self.pollable.get() else { return true };
        pollable.clear();
        let shared = &self.mux.0;
        if self.disabled.load(Ordering::SeqCst) {
            return true;
        }
        pollable.set_told();
        let (asleep, watch) = shared.wait_set.sleep(pollable, || shared.scheduler.sleep());
        if watch {
            shared.timer.watch_wait_set();
        }
        if self.disabled.load(Ordering::SeqCst) {
            // Meanwhile, by another thread.
            self.leave_wait_set();
        }
        asleep
    }

    pub(super) fn awake(&self) {
        if let Some(pollable) = self.pollable.get()
            && pollable.take_told()
        {
            let shared = &self.mux.0;
            if shared.wait_set.come(pollable, || shared.scheduler.awake(0)) {
                shared.timer.watch_wait_set();
            }
        }
    }

    /// Another socket is told of what comes.
    pub(super) fn yield_lead(&self) {
        if let Some(pollable) = self.pollable.get() {
            self.mux.0.wait_set.yield_lead(pollable);
        }
    }

    /// Its event loop is not told any more of what comes.
    pub(super) fn leave_wait_set(&self) {
        if let Some(pollable) = self.pollable.get() {
            let shared = &self.mux.0;
            shared.wait_set.leave(pollable, || shared.scheduler.awake(0));
        }
    }
}
