//! The ends of connections: why, who is told, and when nothing of them is left to do.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ksf::limits::Time;
use rustix::net::{Shutdown, shutdown};

use super::{Shared, now};
use crate::error::ConnectionError;
use crate::link::{Attachment, Link};
use crate::monitor::{Event, UNREAD_MAX};
use crate::sync::Arc;

impl Shared {
    /// A connection brings no more messages.
    pub(crate) fn end(&self, link: &Arc<Link>, error: ConnectionError) {
        // Also where the peer's direction ended before: nothing can be sent any more.
        let failed = matches!(error, ConnectionError::Socket { .. } | ConnectionError::SendTimeout { .. });
        if link.error.set(error.clone()).is_ok() {
            if let Some(Attachment { ended, .. }) = link.attachment.get() {
                ended(link, &error);
            }
            self.counts.ends.note(&error);
            self.events.push(Event::Ended { connection: link.id, error });
        } else if !failed {
            return;
        }
        if failed {
            let leftover = link.outbox.fail();
            let mut messages = leftover.uncertain;
            for (body, repeatable) in leftover.movable {
                self.counts.tx_retries.fetch_add(1, Ordering::Relaxed);
                // Nowhere to go: as lost as if it had been sent and not arrived.
                messages += usize::from(self.send_anywhere(&body, repeatable, Some(link.id)).is_err());
            }
            if messages > 0 {
                self.events.push(Event::Uncertain { connection: link.id, messages });
            }
        }
        self.settle(link);
    }

    /// Detaches a connection that ended and of which nothing is left to do, where that was asked for; tells readers of
    /// it when its last message is done with.
    pub(crate) fn settle(&self, link: &Arc<Link>) {
        let Some(error) = link.error.get() else { return };
        if link.waiting_messages.load(Ordering::SeqCst) > 0 {
            return;
        }
        if !link.reported.swap(true, Ordering::SeqCst) && self.reports_wanted.load(Ordering::SeqCst) > 0 {
            let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
            // Where nobody has read so many: there is a visit for the oldest, which will find this one instead.
            let is_full = reports.len() == UNREAD_MAX;
            if is_full {
                reports.pop_front();
            }
            reports.push_back((link.id, error.clone()));
            drop(reports);
            if !is_full {
                self.wake(self.scheduler.push_visit(None, Arc::clone(link)));
            }
        }
        if self.options.detach_ended
            && link.is_done()
            && let Some(detached) = self.detach(link.id)
        {
            self.events.push(Event::Detached { connection: link.id });
            if !matches!(error, ConnectionError::PeerClosed | ConnectionError::Socket { .. }) {
                // Closing with unread bytes would reset the connection, and destroy what is on its way to the peer.
                let _ = shutdown(&detached.socket, Shutdown::Write);
                self.keeper.linger(detached.socket, now().plus_ms(self.limits().linger_timeout_ms));
            }
        }
    }

    /// Keeps the time limits of a connection.
    pub(crate) fn check_time(&self, link: &Arc<Link>, now: Time) {
        let limits = link.limits();
        let mut ended = None;
        let limit_ms = limits.assembly_timeout_ms;
        if limit_ms != 0 && link.unfinished_bytes.load(Ordering::SeqCst) > 0 {
            let mut reader = link.reader.lock();
            if link.paused.load(Ordering::SeqCst) {
                // Who is not read cannot send the rest: the time begins when it is read again.
                reader.framer.restart(now);
            } else if reader.framer.unfinished_since().is_some_and(|since| now > since.plus_ms(limit_ms)) {
                ended = Some(ConnectionError::AssemblyTimeout { limit_ms });
            }
        }
        let limit_ms = limits.idle_timeout_ms;
        if limit_ms != 0 && link.waiting_messages.load(Ordering::SeqCst) == 0 {
            let active = Time(link.active_at.load(Ordering::Relaxed));
            if now > active.plus_ms(limit_ms) {
                ended = Some(ConnectionError::IdleTimeout { limit_ms });
            }
        }
        let limit_ms = limits.send_timeout_ms;
        let mut progress = link.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_overdue(link.outbox.bytes(), link.outbox.sent(), now, limit_ms) {
            ended = Some(ConnectionError::SendTimeout { limit_ms });
        }
        drop(progress);
        if let Some(error) = ended {
            self.end(link, error);
        }
    }

    pub(super) fn finish_reading(&self) {
        for link in self.all() {
            if link.unfinished_bytes.load(Ordering::SeqCst) == 0 {
                self.end(&link, ConnectionError::Stopping);
            }
        }
    }
}
