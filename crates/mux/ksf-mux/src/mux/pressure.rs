//! Memory for messages that have not arrived in full, when it is short.
//!
//! At [`Limits::assembly_bytes_max`](ksf::limits::Limits::assembly_bytes_max) a connection with a message in part is not
//! read any more; at twice that none is. Those that wait go on in their order, a few at a time, each with a *pass*: it is
//! read to the end of its message whatever there is. A peer that holds a pass and sends nothing for
//! `pressure_timeout_ms` is closed, which frees its memory, and the pass goes on. While a connection waits all passes are
//! taken, so the one that gives a place back wakes the next.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU8, Ordering};

use ksf::limits::Time;

use super::{Shared, now};
use crate::connection::{Connection, Reader};
use crate::sync::Arc;
use crate::timer_thread;

/// Whether a connection is read although memory is short.
#[derive(Debug, Default)]
pub(crate) struct Pressure(AtomicU8);

impl Pressure {
    const NONE: u8 = 0;
    const WAITS: u8 = 1;
    const PASS: u8 = 2;

    /// It is not read.
    pub(crate) fn waits(&self) -> bool {
        self.0.load(Ordering::SeqCst) == Self::WAITS
    }

    /// It is read to the end of its message.
    pub(crate) fn has_pass(&self) -> bool {
        self.0.load(Ordering::SeqCst) == Self::PASS
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

impl Shared {
    /// True if a connection must wait before more of it is received.
    pub(super) fn must_wait(&self, conn: &Connection, reader: &Reader) -> bool {
        let bytes = self.input_bytes.load(Ordering::SeqCst);
        let limit = self.budget.input_bytes_max();
        let is_short = bytes >= limit && (reader.input.unread_bytes() > 0 || bytes >= limit.saturating_mul(2));
        is_short && !conn.pressure.has_pass()
    }

    /// Does not read a connection until it has a pass.
    pub(super) fn wait_for_memory(&self, conn: &Connection) {
        if conn.pressure.change(Pressure::NONE, Pressure::WAITS) {
            self.counts.memory_waits.fetch_add(1, Ordering::Relaxed);
            let mut passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
            passes.wait(conn.id, false);
            // Connections that ended leave their places: gone over when they may be half of all.
            let attached = self.read_table().all.len();
            if passes.waiting() > 2 * attached {
                passes.forget_ended(|id| self.find(id).is_some());
            }
            drop(passes);
            self.hand_passes_out();
        }
    }

    /// A connection needs its pass no longer, if it had one.
    pub(crate) fn return_pass(&self, conn: &Connection) {
        if conn.pressure.has_pass() && conn.pressure.change(Pressure::PASS, Pressure::NONE) {
            self.passes.lock().unwrap_or_else(PoisonError::into_inner).give_back();
            self.hand_passes_out();
        }
    }

    /// Lets connections go on that wait longest, as far as passes are left.
    fn hand_passes_out(&self) {
        loop {
            let mut passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
            if passes.waiting() == 0 || !passes.take(false) {
                return;
            }
            let next = passes.take_next();
            drop(passes);
            let conn = next.and_then(|id| self.find(id)).filter(|conn| conn.error.get().is_none());
            match conn {
                Some(conn) if conn.pressure.change(Pressure::WAITS, Pressure::PASS) => {
                    // Its peer was not read until now.
                    conn.input_at.store(now().0, Ordering::SeqCst);
                    self.timer.schedule_check(&conn, timer_thread::TIMEOUT_TICK);
                    self.wake(self.scheduler.push_reread(None, Arc::clone(&conn)));
                    let is_gone = conn.error.get().is_some() || conn.detached.load(Ordering::SeqCst);
                    if is_gone && conn.pressure.change(Pressure::PASS, Pressure::NONE) {
                        // It ended meanwhile, too early to give the pass back itself.
                        self.passes.lock().unwrap_or_else(PoisonError::into_inner).give_back();
                    }
                }
                _ => self.passes.lock().unwrap_or_else(PoisonError::into_inner).give_back(),
            }
        }
    }

    /// True if a connection that is read although memory is short does not go on. What it sent and was not read yet is
    /// not its peer's fault.
    pub(super) fn is_stuck(&self, conn: &Connection, reader: &Reader, limit_ms: u64, now: Time) -> bool {
        if limit_ms == 0 || !conn.pressure.has_pass() {
            return false;
        }
        let unread = reader
            .socket
            .as_ref()
            .is_some_and(|socket| rustix::io::ioctl_fionread(socket).is_ok_and(|bytes| bytes > 0));
        if unread {
            conn.input_at.store(now.0, Ordering::SeqCst);
        }
        now > Time(conn.input_at.load(Ordering::SeqCst)).plus_ms(limit_ms)
    }
}

#[cfg(test)]
mod tests {
    use ksf::framing::Framing;

    use crate::{Mux, MuxOptions};

    #[test]
    fn the_places_of_ended_connections_are_given_up() {
        let mux = Mux::new(MuxOptions::new(Framing::RecordMark)).unwrap();
        let shared = mux.shared();
        let passes = || shared.passes.lock().unwrap();
        while passes().take(false) {}
        for _ in 0..100 {
            let (_peer, socket) = std::os::unix::net::UnixStream::pair().unwrap();
            let id = mux.attach(socket.into()).unwrap();
            shared.wait_for_memory(&shared.find(id).unwrap());
            mux.detach(id).unwrap();
        }
        assert!(passes().waiting() <= 2, "{} places", passes().waiting());
    }

    #[test]
    fn a_pass_goes_to_the_connection_that_waits_longest_and_is_not_lost_with_it() {
        let mux = Mux::new(MuxOptions::new(Framing::RecordMark)).unwrap();
        let shared = mux.shared();
        let pairs: Vec<_> = (0..3).map(|_| std::os::unix::net::UnixStream::pair().unwrap()).collect();
        let mut peers = Vec::new();
        let mut conns = Vec::new();
        for (peer, socket) in pairs {
            peers.push(peer);
            conns.push(shared.find(mux.attach(socket.into()).unwrap()).unwrap());
        }
        let mut taken = 0;
        while shared.passes.lock().unwrap().take(false) {
            taken += 1;
        }
        conns.iter().for_each(|conn| shared.wait_for_memory(conn));
        assert!(conns.iter().all(|conn| conn.pressure.waits()));
        // The first one ends while it waits: the second one gets the pass.
        mux.detach(conns[0].id).unwrap();
        shared.passes.lock().unwrap().give_back();
        shared.hand_passes_out();
        assert!(conns[1].pressure.has_pass() && conns[2].pressure.waits());
        // It ends with the pass: the third one gets it, and gives it back.
        shared.end(&conns[1], crate::ConnectionError::Stopping);
        assert!(conns[2].pressure.has_pass() && !conns[1].pressure.has_pass());
        mux.detach(conns[2].id).unwrap();
        (1..taken).for_each(|_| shared.passes.lock().unwrap().give_back());
        let mut left = 0;
        while shared.passes.lock().unwrap().take(false) {
            left += 1;
        }
        assert_eq!((left, shared.passes.lock().unwrap().waiting()), (taken, 0));
    }
}
