//! The closed loop of one connection per thread, which waits in its receive calls: at most N requests in flight, a new
//! one for every reply.
//!
//! The original's method, kept on purpose. Each turn sends at most one request and receives at most one reply.
//! The receive blocks when as many requests are in flight as may be (or all have been sent); only while the
//! window is being filled at the start it does not wait. With one in flight this is the plain
//! `send, recv, send, recv` of a synchronous client, without any other system call. `--batch` is the only way around
//! it.

use rustix::net::RecvFlags;

use crate::drive::clock::monotonic_ns;
use crate::drive::connection::Phase;
use crate::drive::protocol::Protocol;
use crate::drive::worker::{Worker, ns};

impl<P: Protocol> Worker<'_, P> {
    /// Runs until all requests are settled, the user stops, or the connection fails.
    pub(super) fn run_blocking(&mut self) {
        let waiting = if self.plan.wait_all { RecvFlags::WAITALL } else { RecvFlags::empty() };
        let mut look_ns = self.now_ns + ns(self.tick);
        while self.slots[0].connection.phase() == Phase::Open {
            self.heed_stop();
            let more = self.may_start();
            if !self.slots[0].out.is_empty() {
                self.flush(0);
            } else if more && self.slots[0].connection.has_room(&self.terms) {
                self.send_batch();
            }
            let slot = &self.slots[0];
            if slot.connection.in_flight() == 0 {
                if more { continue } else { return }
            }
            let is_blocked = !slot.out.is_empty();
            let may_send = !is_blocked && more && slot.connection.has_room(&self.terms);
            let got = match is_blocked || may_send {
                true => self.receive(0, RecvFlags::DONTWAIT, false).is_some(),
                false => self.receive_waiting(waiting),
            };
            if !got && !may_send {
                if is_blocked {
                    // Neither direction moves: sleep until one does, instead of spinning.
                    self.wait_for(0, self.tick);
                }
                self.read_clock();
            }
            if self.now_ns >= look_ns {
                look_ns = self.now_ns + ns(self.tick);
                self.expire(0);
            }
        }
    }

    /// Waits for a reply; polls first, if replies come fast. Returns whether anything came.
    fn receive_waiting(&mut self, waiting: RecvFlags) -> bool {
        if !self.spinner.is_on() {
            return self.receive(0, waiting, false).is_some();
        }
        let receives = self.record.calls.receives;
        let spin_ns = self.spinner.begin();
        let begin_ns = monotonic_ns();
        let (mut polled_ns, mut got) = (0, false);
        while !got && polled_ns < spin_ns {
            got = self.receive(0, RecvFlags::DONTWAIT, false).is_some();
            std::hint::spin_loop();
            polled_ns = monotonic_ns() - begin_ns;
        }
        let caught = got;
        got = got || self.receive(0, waiting, false).is_some();
        // Polls in vain are no calls of the method.
        self.record.calls.receives = receives + 1;
        self.spinner.end(monotonic_ns() - begin_ns, polled_ns, caught);
        if got {
            self.look_where_replies_are_handled(0);
        }
        got
    }

    /// Sends one request, or as many as may be sent together.
    #[inline]
    fn send_batch(&mut self) {
        let start_ns = self.start_time();
        for _ in 0..self.plan.batch {
            if !self.slots[0].connection.has_room(&self.terms) || !self.may_start() {
                break;
            }
            self.issue(0, start_ns);
        }
        if self.plan.batch > 1 {
            self.flush(0);
        }
    }
}
