//! Messages on their way out.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ksf::error::FramingError;
use ksf::output::Output;
use ksf::pool::Chunk;

use super::{ConnectionId, Mux, Shared, now};
use crate::connection::{Admission, Connection};
use crate::error::{ConnectionError, SendError};
use crate::out_queue::{Pushed, Room, Sent};
use crate::sync::Arc;
use crate::timer_thread;

/// Bytes of replies that a worker holds back for those that follow.
pub(crate) const HELD_BYTES_MAX: usize = 64 << 10;

impl Mux {
    /// True if this connection has room for an answer; `None`: if some connection has room for a message. Also true where
    /// there is no such connection: sending fails at once.
    pub(crate) fn has_room(&self, connection: Option<ConnectionId>) -> bool {
        let shared = self.shared();
        if let Some(connection) = connection {
            return shared.find(connection).is_none_or(|conn| conn.takes(Admission::Answer));
        }
        let table = shared.read_table();
        table.all.is_empty() || table.all.iter().any(|conn| conn.takes(Admission::Send))
    }

    /// Sends what is queued for this connection, as far as TCP takes it.
    pub(crate) fn flush(&self, connection: ConnectionId) {
        let shared = self.shared();
        if let Some(conn) = shared.find(connection) {
            shared.send(&conn);
        }
    }
}

impl Shared {
    /// Queues a message for a connection. `more`: others will follow from the same worker at once, so it may wait for
    /// them.
    pub(crate) fn reply(
        &self,
        conn: &Arc<Connection>,
        admission: Admission,
        more: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), SendError> {
        let pushed = if conn.detached.load(Ordering::SeqCst) {
            Ok(Pushed::Ended)
        } else {
            conn.out_queue.push(&conn.framing, conn.room(admission), write)
        };
        self.pushed(conn, admission, more, pushed)
    }

    /// The same with a body that is sent from where it lies.
    pub(crate) fn reply_chunk(
        &self,
        conn: &Arc<Connection>,
        admission: Admission,
        more: bool,
        body: Chunk,
    ) -> Result<(), SendError> {
        let pushed = if conn.detached.load(Ordering::SeqCst) {
            Ok(Pushed::Ended)
        } else {
            conn.out_queue.push_chunk(&conn.framing, conn.room(admission), body)
        };
        self.pushed(conn, admission, more, pushed)
    }

    fn pushed(
        &self,
        conn: &Arc<Connection>,
        admission: Admission,
        more: bool,
        pushed: Result<Pushed, FramingError>,
    ) -> Result<(), SendError> {
        if let Admission::Reserved(bytes) = admission {
            match pushed {
                Ok(Pushed::Queued) => conn.replace_reserved(bytes),
                _ => conn.unreserve(bytes),
            }
        }
        match pushed.map_err(SendError::Unframable)? {
            Pushed::Queued => {
                self.queued(conn, more);
                Ok(())
            }
            Pushed::Full => Err(SendError::WouldBlock),
            Pushed::Ended => Err(SendError::Gone(conn.id)),
        }
    }

    /// Queues what a service wrote for so many messages, framing included, to leave with what follows from the same
    /// worker, or when the timer thread finds that none does.
    pub(crate) fn hold_framed(&self, conn: &Arc<Connection>, output: &mut Output, messages: u64) {
        conn.out_queue.append(output);
        conn.counts.tx_messages.fetch_add(messages, Ordering::Relaxed);
        self.cork_or_send(conn);
    }

    /// Holds replies back for those that follow, as long as they are few.
    fn cork_or_send(&self, conn: &Arc<Connection>) {
        if conn.out_queue.bytes() < HELD_BYTES_MAX {
            self.cork(conn);
        } else {
            self.send(conn);
        }
    }

    pub(super) fn cork(&self, conn: &Arc<Connection>) {
        if !conn.corked.load(Ordering::SeqCst) && !conn.corked.swap(true, Ordering::SeqCst) {
            self.timer.schedule_check(conn, timer_thread::TICK);
        }
    }

    pub(crate) fn queued(&self, conn: &Arc<Connection>, more: bool) {
        conn.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        if more {
            self.cork_or_send(conn);
        } else {
            self.send(conn);
        }
    }

    /// The same for a message that may wait for the next one for so long.
    pub(crate) fn batched(&self, conn: &Arc<Connection>, wait: Duration) {
        conn.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        // Sent before there is too much of it: a connection that is full takes no message that would push it.
        if wait.is_zero() || conn.out_queue.bytes() >= self.limits().out_queue_bytes_max / 2 {
            return self.send(conn);
        }
        let until = now().0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
        // The first message of a batch sets the time of all.
        let first = conn.batch_until_ns.compare_exchange(0, until, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if first {
            self.timer.schedule_check(conn, timer_thread::TICK.min(wait));
        }
    }

    /// Sends what TCP takes.
    pub(crate) fn send(&self, conn: &Arc<Connection>) {
        conn.batch_until_ns.store(0, Ordering::SeqCst);
        conn.corked.store(false, Ordering::SeqCst);
        conn.corked_seen.store(false, Ordering::SeqCst);
        match conn.out_queue.send() {
            Sent::Elsewhere => {}
            Sent::All(bytes) => {
                self.sent(conn, bytes);
                self.resume(conn);
                if conn.error.get().is_some() {
                    self.settle(conn);
                }
            }
            Sent::Blocked(bytes) => {
                self.sent(conn, bytes);
                self.timer.schedule_check(conn, timer_thread::TIMEOUT_TICK);
                self.resume(conn);
            }
            Sent::Failed(errno) => self.end(conn, ConnectionError::Socket { errno }),
        }
    }

    pub(super) fn sent(&self, conn: &Connection, bytes: usize) {
        if bytes > 0 {
            conn.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            self.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            conn.active_at.store(now().0, Ordering::Relaxed);
        }
    }

    /// Queues a message on some connection, whatever is queued there already.
    pub(super) fn send_anywhere(
        &self,
        body: &[u8],
        repeatable: bool,
        but: Option<ConnectionId>,
    ) -> Result<(), SendError> {
        let mut conns = self.all();
        conns.retain(|conn| Some(conn.id) != but && conn.error.get().is_none());
        conns.sort_by_key(|conn| conn.out_queue.bytes());
        for conn in conns {
            let pushed = conn.out_queue.push_movable(&conn.framing, Room::Reserved(0), body, repeatable);
            if pushed.map_err(SendError::Unframable)? == Pushed::Queued {
                self.queued(&conn, false);
                return Ok(());
            }
        }
        Err(SendError::NotConnected)
    }
}
