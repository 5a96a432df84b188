//! The closed loop: at most N requests in flight, a new one for every reply.
//!
//! The original's method, kept on purpose. Each turn sends at most one request and receives at most one reply.
//! The receive blocks when as many requests are in flight as may be (or all have been sent); only while the
//! window is being filled at the start it does not wait. With one in flight this is the plain
//! `send, recv, send, recv` of a synchronous client, without any other system call.

use std::time::Duration;

use rustix::net::RecvFlags;

use crate::drive::exchange::{End, Exchange};
use crate::drive::protocol::Protocol;

/// How the closed loop receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClosedLoop {
    /// `-a 0`: every receive waits for all the bytes it asked for (MSG_WAITALL).
    pub(crate) wait_all: bool,
    /// How long a wait for room in the send buffer lasts before the time limit is looked at.
    pub(crate) tick: Duration,
}

impl ClosedLoop {
    /// A loop that is used to wait for what is outstanding.
    pub(crate) fn draining(tick: Duration) -> ClosedLoop {
        ClosedLoop { wait_all: false, tick }
    }

    /// Runs until all messages are settled, the user stops, or the connection fails.
    pub(crate) fn run<P: Protocol>(self, x: &mut Exchange<'_, P>) -> End {
        match self.turns(x) {
            Ok(end) | Err(end) => end,
        }
    }

    fn turns<P: Protocol>(self, x: &mut Exchange<'_, P>) -> Result<End, End> {
        let waiting = match self.wait_all {
            true => RecvFlags::WAITALL,
            false => RecvFlags::empty(),
        };
        let batch = x.limits.batch;
        loop {
            let stopped = x.is_stopped();
            let more = x.has_more() && !stopped;
            if x.is_blocked() {
                x.flush()?;
            } else if more && x.table.has_room() {
                let start = x.start_time();
                match batch {
                    1 => x.send_one(start)?,
                    batch => x.send_batch(start, batch)?,
                }
            }
            if x.table.in_flight() == 0 {
                match (more, stopped) {
                    (true, _) => continue,
                    (false, true) => return Ok(End::Interrupted),
                    (false, false) => return Ok(End::Done),
                }
            }
            let blocked = x.is_blocked();
            let may_send = more && x.table.has_room();
            let may_wait = !blocked && !may_send;
            let flags = match may_wait {
                true => waiting,
                false => RecvFlags::DONTWAIT,
            };
            if x.receive(flags)? {
                x.sweep_if_due();
            } else if may_wait {
                x.check_time()?;
            } else if blocked {
                // Neither direction moves: sleep until one does, instead of spinning.
                x.wait(self.tick);
                x.check_time()?;
            }
        }
    }
}
