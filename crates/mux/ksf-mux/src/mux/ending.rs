//! The ends of connections: why, which sockets are told, and when nothing of them is left to do.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ksf::limits::Time;
use rustix::net::{Shutdown, shutdown};

use super::pressure::{has_unread, unread_bytes};
use super::{Shared, Shortage, now};
use crate::connection::{Attachment, Connection, Reader};
use crate::error::ConnectionError;
use crate::lingering::{Lingering, reset};
use crate::monitor::{Event, UNREAD_MAX};
use crate::sync::Arc;

impl Shared {
    /// A connection brings no more messages.
    pub(crate) fn end(&self, conn: &Arc<Connection>, error: ConnectionError) {
        // Also where the peer's direction ended before: nothing can be sent any more.
        let failed = matches!(
            error,
            ConnectionError::Socket { .. } | ConnectionError::SendTimeout { .. } | ConnectionError::ReplyLimit { .. }
        );
        if conn.error.set(error.clone()).is_ok() {
            if let Some(Attachment { ended, .. }) = conn.attachment.get() {
                ended(conn, &error);
            }
            self.counts.ends.note(&error);
            self.return_pass(conn, Shortage::Input);
            self.return_room(conn);
            self.events.push(Event::Ended { connection: conn.id, error });
        } else if !failed {
            return;
        }
        if failed {
            let leftover = conn.out_queue.fail();
            let mut messages = leftover.uncertain;
            for (body, repeatable) in leftover.movable {
                self.counts.tx_retries.fetch_add(1, Ordering::Relaxed);
                // Nowhere to go: as lost as if it had been sent and not arrived.
                messages += usize::from(self.send_anywhere(&body, repeatable, Some(conn.id)).is_err());
            }
            if messages > 0 {
                self.events.push(Event::Uncertain { connection: conn.id, messages });
            }
            self.resume(conn);
        }
        self.settle(conn);
    }

    /// Detaches a connection that ended and of which nothing is left to do, where that was asked for; tells readers of
    /// it when its last message is done with.
    pub(crate) fn settle(&self, conn: &Arc<Connection>) {
        let Some(error) = conn.error.get() else { return };
        if conn.waiting_messages.load(Ordering::SeqCst) > 0 {
            return;
        }
        if !conn.reported.swap(true, Ordering::SeqCst) && self.reports_wanted.load(Ordering::SeqCst) > 0 {
            let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
            // Where so many were not read: a read is queued for the oldest, which will find this one instead.
            let is_full = reports.len() == UNREAD_MAX;
            if is_full {
                reports.pop_front();
            }
            reports.push_back((conn.id, error.clone()));
            drop(reports);
            if !is_full {
                self.wake(self.scheduler.push_reread(None, Arc::clone(conn)));
            }
        }
        // It is where a peer does not take its replies, or is owed too much.
        let lost_replies = conn.out_queue.has_failed();
        if self.options.detach_ended
            && conn.is_done()
            && let Some(detached) = self.detach(conn.id)
        {
            self.events.push(Event::Detached { connection: conn.id });
            if lost_replies {
                reset(detached.socket);
            } else if !matches!(error, ConnectionError::PeerClosed | ConnectionError::Socket { .. }) {
                // Closing with unread bytes would reset the connection, and destroy what is on its way to the peer.
                let _ = shutdown(&detached.socket, Shutdown::Write);
                let deadline = now().plus_ms(conn.limits().linger_timeout_ms);
                self.timer.linger(Lingering::new(detached.socket, conn, deadline));
            }
        }
    }

    /// Keeps the time limits of a connection.
    pub(crate) fn check_time(&self, conn: &Arc<Connection>, now: Time) {
        self.check_room(conn);
        let limits = conn.limits();
        let mut ended = None;
        // While all workers are busy none reads what arrives, also from peers that get replies. Asked for only where nothing was
        // read for a while: each time is a system call.
        let is_unread_for = |ms| now > Time(conn.read_at.load(Ordering::Relaxed)).plus_ms(ms);
        let is_silent_for = |ms| now > Time(conn.active_at.load(Ordering::Relaxed)).plus_ms(ms);
        let is_paused = conn.paused.load(Ordering::SeqCst);
        let is_starved = conn.pressure.waits() || conn.room.waits();
        let limit_ms = limits.assembly_timeout_ms;
        if conn.is_amid_a_message() {
            let mut reader = conn.reader.lock();
            if self.is_stuck(conn, &reader, limits.pressure_timeout_ms, now) {
                ended = Some(ConnectionError::MemoryLimit { limit: limits.assembly_bytes_max });
            } else if is_paused
                || is_starved
                || limit_ms != 0 && is_unread_for(limit_ms / 4) && has_unread_rest(&reader)
            {
                // A peer that is not read cannot send the rest: the time begins when it is read again.
                reader.input.restart(now);
            } else if limit_ms != 0
                && reader.input.unfinished_since().is_some_and(|since| now > since.plus_ms(limit_ms))
            {
                // Workers that are busy with others may have read it a piece at a time. One that is idle reads what there is.
                if !self.scheduler.has_sleepers() && has_unread_rest(&reader) {
                    reader.input.restart(now);
                } else {
                    ended = Some(ConnectionError::AssemblyTimeout { limit_ms });
                }
            }
        }
        let limit_ms = limits.idle_timeout_ms;
        if limit_ms != 0 && conn.waiting_messages.load(Ordering::SeqCst) == 0 {
            if is_starved || is_silent_for(limit_ms) && !is_paused && has_unread(&conn.reader.lock()) {
                conn.active_at.store(now.0, Ordering::Relaxed);
            } else if is_silent_for(limit_ms) {
                ended = Some(ConnectionError::IdleTimeout { limit_ms });
            }
        }
        let limit_ms = limits.send_timeout_ms;
        let mut progress = conn.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_overdue(conn.out_queue.bytes(), conn.out_queue.sent(), now, limit_ms) {
            ended = Some(ConnectionError::SendTimeout { limit_ms });
        }
        drop(progress);
        if let Some(error) = ended {
            let for_memory = matches!(error, ConnectionError::MemoryLimit { .. });
            self.end(conn, error);
            if for_memory {
                // It is dropped only now, when no more of it is cut: without its rest it is of no use, and others need
                // the memory.
                drop(conn.reader.lock().input.take_unread(&mut conn.input_room()));
            }
        }
    }

    pub(super) fn finish_reading(&self) {
        for conn in self.all() {
            if conn.unfinished_bytes.load(Ordering::SeqCst) == 0 {
                self.end(&conn, ConnectionError::Stopping);
            }
        }
    }
}

/// True if the peer has sent what it can while no worker reads: the rest of the message, or of its part, or as much as any socket
/// takes. One that trickles has not.
fn has_unread_rest(reader: &Reader) -> bool {
    /// Less than the smallest receive buffer of TCP takes.
    const TAKEN_BYTES: u64 = 256;
    /// The same of the send buffer of a Unix socket, where each write counts with its header: six writes of a byte (Linux 6.18).
    const TAKEN_BYTES_UNIX: u64 = 6;
    let unread = unread_bytes(reader);
    let is_unix = |socket| rustix::net::sockopt::socket_domain(socket) == Ok(rustix::net::AddressFamily::UNIX);
    // Before the length is known a byte may be the rest.
    let missing = reader.input.missing_bytes().max(1) as u64;
    unread >= missing.min(TAKEN_BYTES) || unread >= TAKEN_BYTES_UNIX && reader.socket.as_ref().is_some_and(is_unix)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use ksf::framing::Framing;

    use super::*;
    use crate::out_queue::{Room, Sent};
    use crate::{Mux, MuxOptions, RecvError};

    /// Each check finds bytes of the message that no worker has read yet. A worker has read others a moment ago, or none has read for
    /// long.
    #[test]
    fn the_time_of_a_message_stands_still_only_while_no_worker_reads_its_rest() {
        ksf_test::own_network();
        for (is_unix, rest, read_before_ms, sleeps, has_ended) in [
            (true, &[2][..], 0, true, true),
            (true, &[2; 5], 0, false, true),
            (true, &[2; 5], 1500, false, true),
            (true, &[2; 6], 0, true, true),
            // As much as a Unix socket takes of a peer that writes single bytes.
            (true, &[2; 6], 0, false, false),
            (true, &[2; 6], 1500, false, false),
            (false, &[2; 7], 0, false, true),
            (false, &[2; 7], 1500, false, true),
            (false, &[2; 8], 0, true, true),
            (false, &[2; 8], 0, false, false),
            (false, &[2; 8], 1500, false, false),
        ] {
            let mut options = MuxOptions::new(Framing::RecordMark);
            options.limits.assembly_timeout_ms = 1000;
            // The time here is not that of the thread.
            let (mux, _timer) = Mux::without_thread(options).unwrap();
            let (shared, worker) = (mux.shared(), mux.socket().unwrap());
            let (mut peer, socket): (Box<dyn Write>, OwnedFd) = if is_unix {
                let (peer, socket) = UnixStream::pair().unwrap();
                (Box::new(peer), socket.into())
            } else {
                let (peer, socket) = ksf_test::stream::pair(&TcpListener::bind("127.0.0.1:0").unwrap());
                (Box::new(peer), socket.into())
            };
            let conn = shared.find(mux.attach(socket).unwrap()).unwrap();
            peer.write_all(&[0x80, 0, 0, 9, 1]).unwrap();
            ksf_test::wait_until("a worker has the first bytes", || {
                assert!(matches!(worker.try_recv(), Err(RecvError::WouldBlock)));
                conn.is_amid_a_message()
            });
            assert!(!shared.scheduler.has_sleepers());
            peer.write_all(rest).unwrap();
            ksf_test::wait_until("the rest is there", || unread_bytes(&conn.reader.lock()) == rest.len() as u64);
            if sleeps {
                assert!(shared.scheduler.sleep());
            }
            let later = now().plus_ms(1500);
            conn.read_at.store(later.0 - read_before_ms * 1_000_000, Ordering::Relaxed);
            shared.check_time(&conn, later);
            let ended = has_ended.then_some(ConnectionError::AssemblyTimeout { limit_ms: 1000 });
            assert_eq!(conn.error.get(), ended.as_ref(), "{is_unix} {rest:?} {read_before_ms} {sleeps}");
        }
    }

    /// The kernel tells an error once, and then an end of stream.
    #[test]
    fn a_reset_of_which_a_sender_was_told_is_no_end_of_the_peer() {
        ksf_test::own_network();
        let (mux, _timer) = Mux::without_thread(MuxOptions::new(Framing::RecordMark)).unwrap();
        let (shared, worker) = (mux.shared(), mux.socket().unwrap());
        let (peer, socket) = ksf_test::stream::pair(&TcpListener::bind("127.0.0.1:0").unwrap());
        let conn = shared.find(mux.attach(socket.into()).unwrap()).unwrap();
        ksf_test::stream::reset(peer);
        // Another worker has sent, and goes on behind the one here.
        let mut failed = None;
        ksf_test::wait_until("the reset arrives", || {
            conn.out_queue.push(&conn.framing, Room::Reserved(0), |body| body.push(1)).unwrap();
            if let Sent::Failed(errno) = conn.out_queue.send() {
                failed = Some(errno);
            }
            failed.is_some()
        });
        let _ = worker.try_recv();
        assert_eq!(conn.error.get(), Some(&ConnectionError::Socket { errno: failed.unwrap() }));
    }
}
