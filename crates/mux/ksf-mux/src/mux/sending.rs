//! Messages on their way out.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ksf::output::Output;
use ksf::pool::Chunk;

use super::{ConnectionId, Shared, now};
use crate::error::{ConnectionError, SendError};
use crate::keeper;
use crate::link::Link;
use crate::outbox::Sent;
use crate::sync::Arc;

impl Shared {
    /// Queues a message for a connection. `more`: others will follow from the same worker at once, so it may wait for
    /// them.
    pub(crate) fn reply(
        &self,
        link: &Arc<Link>,
        more: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), SendError> {
        if link.detached.load(Ordering::SeqCst) {
            return Err(SendError::Gone(link.id));
        }
        if !link.outbox.push(&link.framing, write).map_err(SendError::Unframable)? {
            return Err(SendError::Gone(link.id));
        }
        self.queued(link, more);
        Ok(())
    }

    /// The same with a body that is sent from where it lies.
    pub(crate) fn reply_chunk(&self, link: &Arc<Link>, more: bool, body: Chunk) -> Result<(), SendError> {
        if link.detached.load(Ordering::SeqCst) {
            return Err(SendError::Gone(link.id));
        }
        if !link.outbox.push_chunk(&link.framing, body).map_err(SendError::Unframable)? {
            return Err(SendError::Gone(link.id));
        }
        self.queued(link, more);
        Ok(())
    }

    /// Queues what a service wrote for so many messages, framing included, to leave with what follows from the same
    /// worker, or when the keeper finds that none does.
    pub(crate) fn hold_framed(&self, link: &Arc<Link>, output: &mut Output, messages: u64) {
        link.outbox.append(output);
        link.counts.tx_messages.fetch_add(messages, Ordering::Relaxed);
        self.cork(link);
    }

    pub(super) fn cork(&self, link: &Arc<Link>) {
        if !link.corked.load(Ordering::SeqCst) && !link.corked.swap(true, Ordering::SeqCst) {
            self.keeper.look_after(link, keeper::CORK);
        }
    }

    pub(crate) fn queued(&self, link: &Arc<Link>, more: bool) {
        link.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        if more {
            self.cork(link);
        } else {
            self.send(link);
        }
    }

    /// The same for a message that may wait for the next one for so long.
    pub(crate) fn batched(&self, link: &Arc<Link>, wait: Duration) {
        link.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        // Sent before there is too much of it: a connection that is full takes no message that would push it.
        if wait.is_zero() || link.outbox.bytes() >= self.limits().out_queue_bytes_max / 2 {
            return self.send(link);
        }
        let until = now().0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
        // The first message of a batch sets the time of all.
        let first = link.batch_until_ns.compare_exchange(0, until, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if first {
            self.keeper.look_after(link, keeper::CORK.min(wait));
        }
    }

    /// Sends what TCP takes.
    pub(crate) fn send(&self, link: &Arc<Link>) {
        link.batch_until_ns.store(0, Ordering::SeqCst);
        link.corked.store(false, Ordering::SeqCst);
        link.corked_seen.store(false, Ordering::SeqCst);
        match link.outbox.send() {
            Sent::Elsewhere => {}
            Sent::All(bytes) => {
                self.sent(link, bytes);
                self.resume(link);
                if link.error.get().is_some() {
                    self.settle(link);
                }
            }
            Sent::Blocked(bytes) => {
                self.sent(link, bytes);
                self.keeper.look_after(link, keeper::TIMED);
                self.resume(link);
            }
            Sent::Failed(errno) => self.end(link, ConnectionError::Socket { errno }),
        }
    }

    pub(super) fn sent(&self, link: &Link, bytes: usize) {
        if bytes > 0 {
            link.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            self.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            link.active_at.store(now().0, Ordering::Relaxed);
        }
    }

    /// Queues a message on some connection, whatever is queued there already.
    pub(super) fn send_anywhere(
        &self,
        body: &[u8],
        repeatable: bool,
        but: Option<ConnectionId>,
    ) -> Result<(), SendError> {
        let mut links = self.all();
        links.retain(|link| Some(link.id) != but && link.error.get().is_none());
        links.sort_by_key(|link| link.outbox.bytes());
        for link in links {
            let pushed = link.outbox.push_movable(&link.framing, body, repeatable);
            if pushed.map_err(SendError::Unframable)? {
                self.queued(&link, false);
                return Ok(());
            }
        }
        Err(SendError::NotConnected)
    }
}
