//! Messages of a program's own accord: on a connection in turn, or on one that is named.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::MessageSocket;
use crate::connection::{Admission, Connection};
use crate::error::SendError;
use crate::mux::{ConnectionId, Shared};
use crate::out_queue::Pushed;
use crate::sync::Arc;

/// How [`MessageSocket::send`] sends.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// The message may be repeated on another connection when this one fails in the middle of it: receiving it twice
    /// does no harm.
    pub repeatable: bool,
    /// Waits for room for so long; `None`: not at all.
    pub wait: Option<Duration>,
    /// The connection to use if it takes messages, else any.
    pub prefer: Option<ConnectionId>,
    /// The only connection to use, as in [`MessageSocket::send_to`]: [`SendError::Gone`] if it is there no longer.
    pub to: Option<ConnectionId>,
    /// The message answers one of the connection named by `to`: there is room for it as for
    /// [`Message::reply`], in the budget of the connection.
    pub answer: bool,
    /// More messages follow at once: this one may wait for them (it leaves within 10 ms at most).
    pub more: bool,
    /// The message may wait for so long for the next one without this, and leaves with it.
    pub batch: Option<Duration>,
}

impl SendOptions {
    /// Whether there is room for it as for an answer.
    pub fn is_answer(&self) -> bool {
        self.answer && self.to.is_some()
    }

    fn admission(&self) -> Admission {
        if self.is_answer() { Admission::Answer } else { Admission::Send }
    }
}

impl MessageSocket {
    /// Sends a message on some connection: the next one in turn that takes messages. For clients whose connections all
    /// lead to the same server. Success means that it is queued. Returns the connection.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] or, after [`SendOptions::wait`], [`SendError::TimedOut`] while every connection that it
    /// may go to has [`Limits::out_queue_bytes_max`](ksf::limits::Limits::out_queue_bytes_max) queued;
    /// [`SendError::NotConnected`] if there is none, [`SendError::Gone`] if there is not the one it is for.
    pub fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        let shared = &self.mux.0;
        let deadline = options.wait.map(|wait| Instant::now() + wait);
        loop {
            if let Some(conn) = shared.choose(&options)? {
                let (framing, room) = (&conn.framing, conn.room(options.admission()));
                let pushed = match options.to {
                    Some(_) => conn.out_queue.push(framing, room, |tail| tail.extend_from_slice(body)),
                    None => conn.out_queue.push_movable(framing, room, body, options.repeatable),
                };
                match pushed.map_err(SendError::Unframable)? {
                    Pushed::Queued => {}
                    Pushed::Ended if options.to.is_some() => return Err(SendError::Gone(conn.id)),
                    // It ended since it was chosen, or others were quicker.
                    Pushed::Ended | Pushed::Full => continue,
                }
                match options.batch {
                    Some(wait) => shared.batched(&conn, wait),
                    None => shared.queued(&conn, options.more),
                }
                return Ok(conn.id);
            }
            let Some((deadline, wait)) = deadline.zip(options.wait) else { return Err(SendError::WouldBlock) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SendError::TimedOut(wait));
            }
            shared.wait_for_room(options.to, left);
        }
    }

    /// Sends a message to this connection. Never waits; [`SendOptions::to`] does.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] while [`Limits::out_queue_bytes_max`](ksf::limits::Limits::out_queue_bytes_max) bytes are
    /// queued for it; [`SendError::Gone`].
    pub fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        self.mux().reply(connection, body)
    }
}

impl Shared {
    /// The connection the next message goes to. `None`: all that it may go to have too much queued.
    fn choose(&self, options: &SendOptions) -> Result<Option<Arc<Connection>>, SendError> {
        if let Some(only) = options.to {
            let conn = self.find(only).ok_or(SendError::Gone(only))?;
            return Ok(conn.takes(options.admission()).then_some(conn));
        }
        let takes = |conn: &Arc<Connection>| conn.error.get().is_none() && conn.takes(Admission::Send);
        if let Some(conn) = options.prefer.and_then(|id| self.find(id)).filter(takes) {
            return Ok(Some(conn));
        }
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut alive = false;
        let mut at = 0;
        while let Some((conn, count)) = self.nth(first.wrapping_add(at)) {
            if takes(&conn) {
                return Ok(Some(conn));
            }
            alive |= conn.error.get().is_none();
            at += 1;
            if at >= count {
                break;
            }
        }
        if alive { Ok(None) } else { Err(SendError::NotConnected) }
    }

    /// Waits until TCP has room on this connection, or on any, for so long at most.
    fn wait_for_room(&self, only: Option<ConnectionId>, timeout: Duration) {
        let conns = match only {
            Some(only) => self.find(only).into_iter().collect(),
            None => self.all(),
        };
        let sockets: Vec<_> = conns.iter().filter_map(|conn| conn.out_queue.socket()).collect();
        let mut polled: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect();
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        let _ = rustix::event::poll(&mut polled, Some(&timeout));
        for conn in conns {
            self.send(&conn);
        }
    }
}
