//! Connections that are not read because memory is short, and those that are read all the same.
//!
//! **Input**, memory for messages that have not arrived in full: at [`Limits::assembly_bytes_max`](ksf::limits::Limits::assembly_bytes_max) a connection with a message in part is not
//! read any more; at twice that the others are read 4 KiB at a time. Those that wait go on in their order, a few at a time, each with a *pass*: it is
//! read to the end of its message whatever there is. A peer that holds a pass and sends nothing for
//! `pressure_timeout_ms` is closed, which frees its memory, and the pass goes on. While a connection waits all passes are
//! taken, so the one that gives a place back wakes the next.
//!
//! **Room** for messages and their replies: while all connections together use
//! [`Limits::shard_bytes_max`](ksf::limits::Limits::shard_bytes_max), one that uses none of it is read 4 KiB at a time, so
//! that short messages are answered. When more than that of a message has arrived the connection waits. A few at a time
//! go on with a pass of another kind, which they keep until their peer has taken the reply or there is room. When there
//! is, the timer thread lets one go on for each that waits.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU8, Ordering};

use ksf::budget::Passes;
use ksf::limits::Time;

use super::{Shared, now};
use crate::connection::{Connection, Reader};
use crate::sync::{Arc, MutexGuard};
use crate::timer_thread;

/// Bytes of a message that are read though there is no room for it, and the most that are received at a time then.
pub(super) const SHORT_BYTES: usize = 4096;

/// What is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// Memory for messages that have not arrived in full.
    Input,
    /// Room for messages and replies.
    Room,
}

impl Shortage {
    fn of(self, conn: &Connection) -> &Pressure {
        match self {
            Self::Input => &conn.pressure,
            Self::Room => &conn.room,
        }
    }

    fn passes(self, shared: &Shared) -> MutexGuard<'_, Passes> {
        let passes = match self {
            Self::Input => &shared.passes,
            Self::Room => &shared.room_passes,
        };
        passes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
    /// What a connection must wait for before more of it is received.
    pub(super) fn shortage(&self, conn: &Connection, reader: &Reader) -> Option<Shortage> {
        let unread = reader.input.unread_bytes();
        if unread > SHORT_BYTES && self.is_full() && !conn.room.has_pass() {
            return Some(Shortage::Room);
        }
        let is_short = unread > 0 && self.input_bytes.load(Ordering::SeqCst) >= self.budget.input_bytes_max();
        (is_short && !conn.pressure.has_pass()).then_some(Shortage::Input)
    }

    /// The most that may be received of a connection at once.
    pub(super) fn receive_bytes_max(&self, conn: &Connection, reader: &Reader) -> usize {
        if self.is_full() && !conn.room.has_pass() {
            SHORT_BYTES
        } else if conn.pressure.has_pass() {
            // The pass is for one message: what follows stays with the peer.
            reader.input.missing_bytes().max(SHORT_BYTES)
        } else if self.input_bytes.load(Ordering::SeqCst) >= self.budget.input_bytes_max().saturating_mul(2) {
            SHORT_BYTES
        } else {
            usize::MAX
        }
    }

    /// Does not read a connection until it has a pass, or there is room.
    pub(super) fn wait_for_memory(&self, conn: &Connection, what: Shortage) {
        if !what.of(conn).change(Pressure::NONE, Pressure::WAITS) {
            return;
        }
        let count = match what {
            Shortage::Input => &self.counts.memory_waits,
            Shortage::Room => &self.counts.rx_pauses,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let mut passes = what.passes(self);
        passes.wait(conn.id, false);
        // Connections that ended leave their places: gone over when they may be half of all.
        let attached = self.read_table().all.len();
        if passes.waiting() > 2 * attached {
            passes.forget_ended(|id| self.find(id).is_some());
        }
        drop(passes);
        if what == Shortage::Room {
            // The other pass is for a connection that is read.
            self.return_pass(conn, Shortage::Input);
        }
        self.hand_passes_out(what);
    }

    /// A connection needs its pass no longer, if it had one.
    pub(crate) fn return_pass(&self, conn: &Connection, what: Shortage) {
        let pressure = what.of(conn);
        if pressure.has_pass() && pressure.change(Pressure::PASS, Pressure::NONE) {
            what.passes(self).give_back();
            self.hand_passes_out(what);
        }
    }

    /// A connection may have less waiting, or owe less: without either it needs no room beyond the limit.
    pub(crate) fn return_room(&self, conn: &Connection) {
        if conn.room.has_pass() && (conn.uses_no_room() || !self.is_full()) {
            self.return_pass(conn, Shortage::Room);
        }
    }

    /// Looks after a connection that waits for room, or was read without: there may be some. The timer thread calls this
    /// while the connection has a message in part or replies that are not sent.
    pub(super) fn check_room(&self, conn: &Connection) {
        if self.is_full() {
            return;
        }
        self.return_pass(conn, Shortage::Room);
        while conn.room.waits() {
            // The one that waits longest, which is this one at some time.
            let Some(next) = Shortage::Room.passes(self).take_next() else { return };
            let next = self.find(next).filter(|next| next.error.get().is_none());
            if let Some(next) = next.filter(|next| next.room.change(Pressure::WAITS, Pressure::NONE)) {
                return self.wake(self.scheduler.push_reread(None, next));
            }
        }
    }

    /// Lets connections go on that wait longest, as far as passes are left.
    fn hand_passes_out(&self, what: Shortage) {
        loop {
            let mut passes = what.passes(self);
            if passes.waiting() == 0 || !passes.take(false) {
                return;
            }
            let next = passes.take_next();
            drop(passes);
            let conn = next.and_then(|id| self.find(id)).filter(|conn| conn.error.get().is_none());
            match conn {
                Some(conn) if what.of(&conn).change(Pressure::WAITS, Pressure::PASS) => {
                    // Its peer was not read until now.
                    conn.input_at.store(now().0, Ordering::SeqCst);
                    self.timer.schedule_check(&conn, timer_thread::TIMEOUT_TICK);
                    self.wake(self.scheduler.push_reread(None, Arc::clone(&conn)));
                    let is_gone = conn.error.get().is_some() || conn.detached.load(Ordering::SeqCst);
                    if is_gone && what.of(&conn).change(Pressure::PASS, Pressure::NONE) {
                        // It ended meanwhile, too early to give the pass back itself.
                        what.passes(self).give_back();
                    }
                }
                _ => what.passes(self).give_back(),
            }
        }
    }

    /// True if a connection that is read although memory is short does not go on. What it sent and was not read yet is
    /// not its peer's fault.
    pub(super) fn is_stuck(&self, conn: &Connection, reader: &Reader, limit_ms: u64, now: Time) -> bool {
        if limit_ms == 0 || !(conn.pressure.has_pass() || conn.room.has_pass()) {
            return false;
        }
        if has_unread(reader) {
            conn.input_at.store(now.0, Ordering::SeqCst);
        }
        now > Time(conn.input_at.load(Ordering::SeqCst)).plus_ms(limit_ms)
    }
}

/// True if bytes have arrived that no worker has read yet.
pub(super) fn has_unread(reader: &Reader) -> bool {
    unread_bytes(reader) > 0
}

/// Bytes that have arrived and that no worker has read yet.
pub(super) fn unread_bytes(reader: &Reader) -> u64 {
    reader.socket.as_ref().map_or(0, |socket| rustix::io::ioctl_fionread(socket).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use ksf::framing::Framing;

    use super::{Shortage, now};
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
            shared.wait_for_memory(&shared.find(id).unwrap(), Shortage::Input);
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
        conns.iter().for_each(|conn| shared.wait_for_memory(conn, Shortage::Input));
        assert!(conns.iter().all(|conn| conn.pressure.waits()));
        // The first one ends while it waits: the second one gets the pass.
        mux.detach(conns[0].id).unwrap();
        shared.passes.lock().unwrap().give_back();
        shared.hand_passes_out(Shortage::Input);
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

    #[test]
    fn a_connection_that_waits_for_room_is_not_idle() {
        let mut options = MuxOptions::new(Framing::RecordMark);
        options.limits.idle_timeout_ms = 1000;
        // The time here is not that of the thread.
        let (mux, _timer) = Mux::without_thread(options).unwrap();
        let shared = mux.shared();
        let (_peer, socket) = std::os::unix::net::UnixStream::pair().unwrap();
        let conn = shared.find(mux.attach(socket.into()).unwrap()).unwrap();
        let others_bytes = shared.budget.shard_bytes_max();
        shared.memory.fetch_add(others_bytes, Ordering::SeqCst);
        while shared.room_passes.lock().unwrap().take(false) {}
        shared.wait_for_memory(&conn, Shortage::Room);
        let later = |ms| now().plus_ms(ms);
        shared.check_time(&conn, later(10_000));
        assert_eq!(conn.error.get(), None);
        // Its time begins when it is read again.
        shared.memory.fetch_sub(others_bytes, Ordering::SeqCst);
        shared.check_time(&conn, later(10_500));
        assert_eq!(conn.error.get(), None);
        assert!(!conn.room.waits());
        shared.check_time(&conn, later(20_000));
        assert_eq!(conn.error.get(), Some(&crate::ConnectionError::IdleTimeout { limit_ms: 1000 }));
    }
}
