//! How a connection ends: in an orderly way, at once, or with the whole server.

use std::time::Duration;

use super::stream::Stream;
use super::{Conn, Draining, Lingering, Phase, Shard};
use crate::engine::{Engine, Reading};
use crate::error::CloseReason;
use crate::service::ConnKey;

/// Time in which handshakes that were begun before a drain may be completed: longer than a round trip to most peers. A
/// drain takes at least this long where TCP is listened for.
const HANDSHAKES_MS: u64 = 50;

impl<E: Engine> Shard<E> {
    /// All replies are sent: ends our direction, and waits for the peer to end its own. The last of them may wait in the
    /// kernel to leave with that end ([`Engine::send`]), so it comes first, also where nothing is waited for: a socket
    /// that is closed with unread bytes is reset, and what it has not sent is lost. A connection that [must be
    /// reset](crate::connection::Connection::needs_reset) has no such end.
    pub(super) fn finish(&mut self, index: u32, reason: CloseReason) {
        self.end_exchange(index);
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        if must_reset(&conn.stream, reason) {
            return self.release(index, reason);
        }
        let ended = rustix::net::shutdown(&conn.socket, rustix::net::Shutdown::Write);
        let Stream::Served(stream) = &conn.stream else { return self.release(index, reason) };
        // Under a kernel half a close that meets bytes of the peer resets the connection, and the last reply is lost.
        let ends = stream.saw_eof() || stream.closes_at_once() && conn.assist.is_none();
        let linger_timeout_ms = stream.limits(&self.env).linger_timeout_ms;
        if ends || linger_timeout_ms == 0 || ended.is_err() {
            return self.release(index, reason);
        }
        let deadline = self.env.now.plus_ms(linger_timeout_ms);
        conn.phase = Phase::Lingering(reason);
        conn.lingering = Some(Box::new(Lingering { deadline, received_before: stream.received_bytes() }));
        if conn.reading != Reading::Sparing {
            conn.reading = Reading::Sparing;
            self.engine.set_reading(key, Reading::Sparing);
        }
    }

    /// A lingering connection has something to tell.
    pub(super) fn look_after_lingering(&mut self, index: u32, reason: CloseReason) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        let Some(Lingering { received_before, .. }) = conn.lingering.as_deref() else { return };
        let Stream::Served(stream) = &conn.stream else { return };
        let thrown_away = stream.received_bytes() - received_before;
        let room = (stream.limits(&self.env).linger_bytes_max as u64).saturating_sub(thrown_away);
        if stream.saw_eof() {
            self.release(index, reason);
        } else if room < self.env.pool.slot_bytes() as u64 && thrown_away > 0 {
            // It is not about to read its replies. What it has sent already, or sends next, makes the kernel reset it.
            self.env.stats.lingers_cut.add(1);
            self.release(index, reason);
        } else if conn.reading != Reading::Sparing {
            // The engine stopped at an end that came too early.
            conn.reading = Reading::Sparing;
            self.engine.set_reading(key, Reading::Sparing);
        }
    }

    /// Ends a connection without waiting for anything.
    pub(super) fn abort(&mut self, index: u32, reason: CloseReason) {
        let Some(conn) = self.places[index as usize].conn.as_ref() else { return };
        let reason = match conn.phase {
            Phase::Releasing(_) => return,
            Phase::Lingering(reason) => reason,
            // A reason that loses replies stays the reason.
            Phase::Open if loses_replies(reason) => reason,
            // The peer is gone after an orderly end: that end is the reason.
            Phase::Open => conn.stream.finished().unwrap_or(reason),
        };
        self.release(index, reason);
    }

    /// Ends a connection for its service, if it is still there.
    pub(super) fn close(&mut self, key: ConnKey) {
        if self.places.get(key.index as usize).is_some_and(|place| place.generation == key.generation) {
            self.abort(key.index, CloseReason::Service);
        }
    }

    pub(super) fn release(&mut self, index: u32, reason: CloseReason) {
        self.end_exchange(index);
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        if let Some(conn) = place.conn.as_mut() {
            conn.phase = Phase::Releasing(reason);
            if self.engine.release(key) {
                self.forget(index, reason);
            }
        }
    }

    pub(super) fn released(&mut self, key: ConnKey) {
        let place = &self.places[key.index as usize];
        if place.generation == key.generation
            && let Some(Conn { phase: Phase::Releasing(reason), .. }) = place.conn
        {
            self.forget(key.index, reason);
        }
    }

    /// Closes the socket and frees the place.
    pub(super) fn forget(&mut self, index: u32, reason: CloseReason) {
        let place = &mut self.places[index as usize];
        let Some(conn) = place.conn.take() else { return };
        let peer_ended = matches!(&conn.stream, Stream::Served(stream) if stream.saw_eof());
        if must_reset(&conn.stream, reason) {
            let _ = rustix::net::sockopt::set_socket_linger(&conn.socket, Some(Duration::ZERO));
        } else if conn.assist.is_some() && peer_ended {
            // Not as set where it was accepted.
            let _ = rustix::net::sockopt::set_socket_linger(&conn.socket, None);
        }
        place.generation = place.generation.wrapping_add(1);
        if let Some(assist) = conn.assist {
            self.tokens.remove(&assist.conn.token());
        }
        drop(conn.socket);
        let served = matches!(conn.stream, Stream::Served(_));
        conn.stream.end(&mut self.env);
        self.deadlines.remove(index);
        self.free.push(index);
        self.open -= 1;
        if served {
            self.env.stats.count_close(reason);
            self.connections.remove(conn.listener);
        }
    }

    pub(super) fn start_draining(&mut self) {
        if self.draining.is_some() {
            return;
        }
        let now = self.env.now;
        let deadline = now.plus_ms(self.env.limits.drain_timeout_ms);
        self.draining = Some(Draining { deadline, handshakes_until: None });
        let mut handshakes = false;
        for index in 0..self.listeners.len() as u32 {
            handshakes |= self.refuse_new(index);
        }
        let handshakes_until = handshakes.then_some(deadline.min(now.plus_ms(HANDSHAKES_MS)));
        self.draining = Some(Draining { deadline, handshakes_until });
        self.next_tick = self.next_tick.min(handshakes_until.unwrap_or(deadline));
        for index in 0..self.places.len() as u32 {
            let key = ConnKey { index, generation: self.places[index as usize].generation };
            if let Some((stream, env)) = self.stream(key) {
                stream.drain(env);
            }
        }
        self.look_after_touched();
    }
}

/// True if the end of a connection for this reason must be a reset now.
fn must_reset(stream: &Stream, reason: CloseReason) -> bool {
    // The answers that a service still owes are replies, too, for a server that stops before they come.
    let is_unanswered = || match stream {
        Stream::Served(served) => served.is_unanswered(),
        Stream::Outgoing(_) => false,
    };
    let is_stopped = matches!(reason, CloseReason::DrainTimeout | CloseReason::Stopped);
    stream.needs_reset() || loses_replies(reason) || is_stopped && is_unanswered()
}

/// True if an end for this reason loses replies, whatever is left of them: it is a reset. After an orderly end TCP keeps what
/// it has for minutes, for a peer that counts nowhere, and the peer takes the end for that of its replies.
fn loses_replies(reason: CloseReason) -> bool {
    match reason {
        // Bytes that were announced do not exist, were lost, or were thrown away.
        CloseReason::FileRange | CloseReason::KernelHalf | CloseReason::ReplyLimit => true,
        // At once, wherever the connection is: it is a reset if replies are left
        // ([`Connection::needs_reset`](crate::connection::Connection::needs_reset)), and so always with `SendTimeout`.
        CloseReason::DrainTimeout
        | CloseReason::Io
        | CloseReason::SendTimeout
        | CloseReason::Service
        | CloseReason::Stopped => false,
        // When all replies are sent that were made.
        CloseReason::Abandoned
        | CloseReason::AssemblyTimeout
        | CloseReason::Drained
        | CloseReason::EndlessFragments
        | CloseReason::EndlessHeader
        | CloseReason::IdleTimeout
        | CloseReason::MalformedFrame
        | CloseReason::MemoryLimit
        | CloseReason::OversizedMessage
        | CloseReason::Panicked
        | CloseReason::PeerClosed
        | CloseReason::PeerClosedMidMessage => false,
    }
}
