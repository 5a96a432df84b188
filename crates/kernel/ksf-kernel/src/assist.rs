//! The seam to the framework: sockets go under the programs and out again, and the two halves agree on who answers.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use ksf::assist::{Assist, AssistConn};

use crate::abi::ConnState;
use crate::conns::{NEVER, TRIAL_FIRST};
use crate::service::ServiceState;
use crate::tcp;

/// Messages that tell a mean length.
const TYPICAL_MESSAGES: u64 = 16;

/// A kernel half as the engines see it. Clones and connections share the loaded service.
#[derive(Clone, Debug)]
pub struct KernelAssist {
    shared: Arc<ServiceState>,
}

impl KernelAssist {
    pub(crate) fn new(shared: Arc<ServiceState>) -> Self {
        Self { shared }
    }

    fn try_attach(&self, socket: BorrowedFd<'_>) -> Option<KernelConn> {
        let shared = &self.shared;
        let cookie = tcp::cookie(socket).ok()?;
        let index = shared.conns.take(cookie, || shared.wait_for_programs())?;
        // From here on dropping it undoes all.
        let conn = KernelConn {
            shared: Arc::clone(shared),
            index,
            cookie,
            replied_drained: 0,
            unseen_bytes: NEVER,
            sent_settled: NEVER,
            settled: NEVER,
            bytes_at_park: 0,
            messages_at_park: 0,
            typical_bytes: 0,
            trial_seen: TRIAL_FIRST,
        };
        let maps = &shared.loaded.maps;
        maps.index.update(&cookie.to_ne_bytes(), &index.to_ne_bytes()).ok()?;
        maps.socks.update(&cookie.to_ne_bytes(), &(socket.as_raw_fd() as u64).to_ne_bytes()).ok()?;
        Some(conn)
    }
}

impl Assist for KernelAssist {
    fn attach(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn AssistConn>> {
        let conn = self.try_attach(socket);
        if conn.is_none() {
            self.shared.refused.fetch_add(1, Relaxed);
        }
        conn.map(|conn| Box::new(conn) as Box<dyn AssistConn>)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters().iter().map(|counter| (counter.name, counter.value)).collect()
    }

    fn wake_fd(&self, shard: usize) -> Option<BorrowedFd<'_>> {
        self.shared.ring_fd(shard)
    }

    fn take_wakes(&self, shard: usize, wake: &mut dyn FnMut(u64)) {
        if let Some(ring) = self.shared.rings.get(shard) {
            ring.take(wake);
        }
    }
}

/// One connection under the programs. [`NEVER`] is no count of bytes: it stands for one that is not known, in the room of
/// a count, because most connections of a server are idle and this is a part of their price.
#[derive(Debug)]
struct KernelConn {
    shared: Arc<ServiceState>,
    index: u32,
    cookie: u64,
    /// Reply bytes of the program that TCP was last seen to have taken.
    replied_drained: u64,
    /// Bytes user space has received that the program never saw, because they had arrived before it; once learned.
    unseen_bytes: u64,
    /// The bytes sent that the program was last told of.
    sent_settled: u64,
    /// What the program was last told is answered; `NEVER`: it must not answer.
    settled: u64,
    /// Bytes the program had answered when the connection was parked.
    bytes_at_park: u64,
    /// Messages it had answered then.
    messages_at_park: u32,
    /// Mean length of what it answered while the connection was parked; 0 before that can be told.
    typical_bytes: u32,
    /// When the next trial was due, the last time user space looked.
    trial_seen: u32,
}

impl KernelConn {
    fn state(&self) -> &ConnState {
        self.shared.conns.at(self.index)
    }

    /// Bytes that arrived before the program saw the socket, and were or will be read by user space all the same.
    /// `None`: cannot be told now. Until it is known the program answers nothing, so all it sees it passes.
    fn learn_unseen(&self, socket: BorrowedFd<'_>, received_bytes: u64) -> Option<u64> {
        // `passed` before TCP's count: what was passed by then TCP had received before it is asked.
        let passed = self.state().passed.load(Acquire);
        fence(SeqCst);
        let received = tcp::received(socket).ok()?;
        if received == passed {
            return Some(0);
        }
        // User space has read all that TCP ever received, so all that was passed is among it.
        if received == received_bytes { received_bytes.checked_sub(passed) } else { None }
    }

    /// Tells the program that everything up to `settled` is answered, by `sent` bytes in all.
    fn publish(&mut self, settled: u64, sent: u64) {
        let state = self.shared.conns.at(self.index);
        if self.sent_settled != sent {
            self.sent_settled = sent;
            state.sent.store(sent, Relaxed);
            // Never 0 again: that means that nothing was published yet.
            let epoch = state.epoch.load(Relaxed).wrapping_add(1).max(1);
            state.epoch.store(epoch, Relaxed);
        }
        if self.settled != settled {
            // After the others: the program reads them in the opposite order.
            state.settled.store(settled, Release);
            self.settled = settled;
        }
    }

    /// Bytes and messages the program has answered. The number of messages starts again at 0 after 2^32.
    fn answered(&self) -> (u64, u32) {
        (self.state().taken.load(Relaxed), self.state().messages.load(Relaxed))
    }

    /// Learns from what the program answered while the connection was parked, if it is enough to tell.
    fn learn_typical_bytes(&mut self) {
        let (bytes, messages) = self.answered();
        let messages = u64::from(messages.wrapping_sub(self.messages_at_park));
        if messages >= TYPICAL_MESSAGES {
            let mean_bytes = (bytes - self.bytes_at_park) / messages;
            self.typical_bytes = u32::try_from(mean_bytes).unwrap_or(u32::MAX);
        }
    }

    /// Stops the program from answering, and returns when no run that may still answer is under way.
    fn unsettle(&mut self, socket: BorrowedFd<'_>) {
        if std::mem::replace(&mut self.settled, NEVER) != NEVER {
            self.state().settled.store(NEVER, SeqCst);
            fence(SeqCst);
            // Takes the socket's lock, under which the program runs. An error means the socket is gone.
            let _ = tcp::received(socket);
        }
    }
}

impl AssistConn for KernelConn {
    fn replied_bytes(&self) -> u64 {
        self.state().replied.load(Acquire)
    }

    fn drained(&mut self, socket: BorrowedFd<'_>, sent_bytes: u64) -> bool {
        let replied = self.replied_bytes();
        // Of a broken connection there is nothing left to wait for.
        if replied == self.replied_drained || self.is_broken() {
            return true;
        }
        // What TCP has taken once it never gives back, so a yes holds until `replied` moves.
        let drained = tcp::has_taken(socket, replied + sent_bytes).unwrap_or(false);
        if drained {
            self.replied_drained = replied;
        }
        drained
    }

    fn settle(&mut self, socket: BorrowedFd<'_>, received_bytes: u64, sent_bytes: u64) {
        self.settle_ahead(socket, received_bytes, sent_bytes);
    }

    fn settle_ahead(&mut self, socket: BorrowedFd<'_>, received_bytes: u64, sent_after_bytes: u64) {
        if self.unseen_bytes == NEVER {
            self.unseen_bytes = self.learn_unseen(socket, received_bytes).unwrap_or(NEVER);
        }
        // Of no connection as many bytes as `NEVER` are received.
        if let Some(settled) = received_bytes.checked_sub(self.unseen_bytes) {
            self.publish(settled, sent_after_bytes);
        }
    }

    fn is_end(&mut self, socket: BorrowedFd<'_>, received_bytes: u64) -> bool {
        let taken = self.state().taken.load(SeqCst);
        // TCP counts the FIN as a byte. A socket that cannot be asked has nothing more to give.
        tcp::received(socket).map_or(true, |received| received_bytes + taken + 1 >= received)
    }

    fn has_unread(&mut self, socket: BorrowedFd<'_>, received_bytes: u64) -> bool {
        let taken = self.state().taken.load(SeqCst);
        tcp::received(socket).map_or(true, |received| received_bytes + taken < received)
    }

    fn is_trial(&mut self) -> bool {
        let trial_at = self.state().trial_at.load(Relaxed);
        std::mem::replace(&mut self.trial_seen, trial_at) != trial_at
    }

    fn typical_bytes(&self) -> Option<u64> {
        (self.typical_bytes > 0).then_some(self.typical_bytes.into())
    }

    fn is_broken(&self) -> bool {
        self.state().broken.load(Acquire) != 0
    }

    fn token(&self) -> u64 {
        self.cookie
    }

    fn park(&mut self, socket: BorrowedFd<'_>, shard: usize) -> bool {
        let settled = self.settled;
        if settled == NEVER || self.shared.rings.get(shard).is_none() {
            return false;
        }
        let state = self.shared.conns.at(self.index);
        let answered = self.answered();
        let is_quiet = || state.passed.load(SeqCst) == settled && state.broken.load(SeqCst) == 0;
        if !is_quiet() {
            return false;
        }
        state.shard.store(shard as u32, Relaxed);
        state.park_seq.fetch_add(1, Release);
        state.parked.store(1, SeqCst);
        // The program raises `passed`, then looks at `parked`; we do it the other way round. One of us sees the other.
        fence(SeqCst);
        if !is_quiet() {
            state.parked.store(0, SeqCst);
            return false;
        }
        (self.bytes_at_park, self.messages_at_park) = answered;
        // Nobody polls now, so the lag may be repaid in full and grow again. SO_RCVLOWAT goes first: with a lag below
        // what it stands for the program would not be called.
        if state.lag_floor.load(Relaxed) != 0 && tcp::set_rcvlowat(socket, 1).is_ok() {
            state.lag_floor.store(0, SeqCst);
        }
        true
    }

    fn unpark(&mut self, socket: BorrowedFd<'_>) {
        self.learn_typical_bytes();
        self.state().parked.store(0, SeqCst);
        fence(SeqCst);
        if self.is_broken() {
            // The engine ends the connection, by a reset: an orderly end would hide that bytes are missing.
            return;
        }
        // The lag must stand still while SO_RCVLOWAT is set to follow it: one too high would stall the connection.
        // It does when something was passed, because then the program answers no more until we settle.
        if self.settled != NEVER && self.state().passed.load(SeqCst) == self.settled {
            if self.state().lag.load(SeqCst) == self.state().lag_floor.load(Relaxed) {
                return;
            }
            self.unsettle(socket);
        }
        let lag = self.state().lag.load(SeqCst);
        // An error leaves the socket readable too often, which is slow and not wrong.
        if lag != self.state().lag_floor.load(Relaxed) && tcp::set_rcvlowat(socket, lag + 1).is_ok() {
            self.state().lag_floor.store(lag, SeqCst);
        }
    }
}

impl Drop for KernelConn {
    fn drop(&mut self) {
        self.state().settled.store(NEVER, SeqCst);
        let maps = &self.shared.loaded.maps;
        // Errors mean that it is not there: closing the socket has removed it, or attaching failed half-way.
        let _ = maps.socks.delete(&self.cookie.to_ne_bytes());
        let _ = maps.index.delete(&self.cookie.to_ne_bytes());
        self.shared.conns.give(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the 16 bytes that the allocator adds it is 88, where 1024 are the goal for all of an idle connection.
    #[cfg(target_pointer_width = "64")]
    #[test]
    fn an_idle_connection_is_small() {
        assert!(size_of::<KernelConn>() <= 72, "{} bytes", size_of::<KernelConn>());
    }
}
