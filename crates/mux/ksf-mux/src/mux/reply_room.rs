//! Room for the replies of services: a request whose reply may be long reserves before it is made, or waits.
//!
//! The worker that begins a message asks the service how long the reply may become
//! ([`Service::reply_bytes`](ksf::Service::reply_bytes)), and reserves that much of
//! [`Limits::shard_bytes_max`](ksf::limits::Limits::shard_bytes_max) unless it is short. The reservation ends when the reply is
//! queued and counts there, or when the service has deferred it with a reservation of its own.
//!
//! A connection whose reply has no room gets its message back and waits in a queue, as throttled: its messages are parked.
//! Whenever memory is released the connections in front get their room, as a *grant* that counts from then on. One at a time goes on
//! without room, with the *pass*, and keeps that until its peer has taken the reply. So a reply that is longer than the limit
//! leaves, too, and requests that fill the memory do not wait for themselves.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::{ConnectionId, Shared};
use crate::connection::Connection;
use crate::sync::{Mutex, MutexGuard};

/// Connections that wait for room for a reply.
#[derive(Debug, Default)]
pub(crate) struct ReplyRoom {
    /// Their number, for a look without the lock.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    /// In their order, with the bytes of the reply.
    waiting: VecDeque<(ConnectionId, usize)>,
    pass_taken: bool,
}

/// How a connection stands to the room for replies. Written under the lock of [`ReplyRoom`].
#[derive(Debug, Default)]
pub(crate) struct ReplyTurn {
    flags: AtomicU8,
    /// Bytes of the grant.
    granted: AtomicUsize,
}

impl ReplyTurn {
    const WAITS: u8 = 1;
    const GRANT: u8 = 2;
    const PASS: u8 = 4;

    /// It is in the queue: none of its messages may be taken.
    pub(crate) fn waits(&self) -> bool {
        self.has(Self::WAITS)
    }

    /// Its next reply has room already.
    pub(crate) fn has_grant(&self) -> bool {
        self.has(Self::GRANT)
    }

    fn is_idle(&self) -> bool {
        self.flags.load(Ordering::SeqCst) == 0
    }

    fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::SeqCst) & flag != 0
    }

    fn raise(&self, flag: u8) {
        self.flags.fetch_or(flag, Ordering::SeqCst);
    }

    fn lower(&self, flag: u8) {
        self.flags.fetch_and(!flag, Ordering::SeqCst);
    }

    fn grant(&self, bytes: usize) {
        self.granted.fetch_add(bytes, Ordering::SeqCst);
        self.raise(Self::GRANT);
        self.lower(Self::WAITS);
    }

    fn take_grant(&self) -> usize {
        self.lower(Self::GRANT);
        self.granted.swap(0, Ordering::SeqCst)
    }
}

impl Shared {
    /// Reserves room for the reply to a message that a worker is about to work on; [`Connection::unreserve`] ends the
    /// reservation. False: nothing is reserved, and the connection is throttled until there is room.
    pub(crate) fn reserve_reply(&self, conn: &Connection, bytes: usize) -> bool {
        let nobody_waits = self.reply_room.waiting.load(Ordering::SeqCst) == 0 && conn.reply_turn.is_idle();
        let reserved = nobody_waits && self.count_if_fits(bytes) || self.reserve_in_turn(conn, bytes);
        if reserved {
            conn.reserve_counted(bytes);
        }
        reserved
    }

    #[cold]
    fn reserve_in_turn(&self, conn: &Connection, bytes: usize) -> bool {
        let turn = &conn.reply_turn;
        let mut queue = self.lock_reply_room();
        if turn.waits() {
            // Another worker has a message of the same connection.
            return false;
        }
        let granted = turn.take_grant();
        self.memory.fetch_add(bytes, Ordering::SeqCst);
        self.memory.fetch_sub(granted, Ordering::SeqCst);
        // Nothing is kept for a connection that has failed.
        if granted >= bytes || conn.is_gone() {
            return true;
        }
        self.memory.fetch_sub(bytes, Ordering::SeqCst);
        self.grant_room(&mut queue);
        // Before the look: what is released after it is seen by the thread that finds a connection waiting.
        self.reply_room.waiting.fetch_add(1, Ordering::SeqCst);
        let mut goes_on = queue.waiting.is_empty() && self.count_if_fits(bytes);
        if !goes_on && queue.waiting.is_empty() && (!queue.pass_taken || turn.has(ReplyTurn::PASS)) {
            self.memory.fetch_add(bytes, Ordering::SeqCst);
            queue.pass_taken = true;
            turn.raise(ReplyTurn::PASS);
            goes_on = true;
        }
        if goes_on {
            self.reply_room.waiting.fetch_sub(1, Ordering::SeqCst);
        } else {
            turn.raise(ReplyTurn::WAITS);
            queue.waiting.push_back((conn.id, bytes));
            self.counts.rx_pauses.fetch_add(1, Ordering::Relaxed);
        }
        goes_on
    }

    /// Looks after the room for replies when a connection has less in work or owes less: it returns what it does not need any
    /// more, and others get theirs.
    pub(super) fn return_reply_room(&self, conn: &Connection) {
        let turn = &conn.reply_turn;
        if turn.is_idle() && self.reply_room.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut queue = self.lock_reply_room();
        if turn.waits() && conn.is_gone() {
            let before = queue.waiting.len();
            queue.waiting.retain(|(id, _)| *id != conn.id);
            self.reply_room.waiting.fetch_sub(before - queue.waiting.len(), Ordering::SeqCst);
            turn.lower(ReplyTurn::WAITS);
        }
        if turn.has_grant() && conn.waiting_messages.load(Ordering::SeqCst) == 0 {
            // The service was not called with its message: it had closed the connection.
            self.memory.fetch_sub(turn.take_grant(), Ordering::SeqCst);
        }
        if turn.has(ReplyTurn::PASS) && !turn.has_grant() && conn.owed_bytes() == 0 {
            turn.lower(ReplyTurn::PASS);
            queue.pass_taken = false;
        }
        self.grant_room(&mut queue);
    }

    /// Grants room to the connections that wait longest, as far as there is some, and the pass.
    fn grant_room(&self, queue: &mut Queue) {
        while let Some((id, bytes)) = queue.waiting.front().copied() {
            let fits = self.count_if_fits(bytes);
            if !fits && queue.pass_taken {
                return;
            }
            queue.waiting.pop_front();
            self.reply_room.waiting.fetch_sub(1, Ordering::SeqCst);
            let Some(conn) = self.find(id) else {
                if fits {
                    self.memory.fetch_sub(bytes, Ordering::SeqCst);
                }
                continue;
            };
            if !fits {
                self.memory.fetch_add(bytes, Ordering::SeqCst);
                queue.pass_taken = true;
                conn.reply_turn.raise(ReplyTurn::PASS);
            }
            conn.reply_turn.grant(bytes);
            self.wake(self.scheduler.unpark(&conn));
        }
    }

    /// True, and counted, if so many bytes fit below the limit.
    fn count_if_fits(&self, bytes: usize) -> bool {
        self.memory.fetch_add(bytes, Ordering::SeqCst);
        let fits = self.memory() <= self.budget.shard_bytes_max();
        if !fits {
            self.memory.fetch_sub(bytes, Ordering::SeqCst);
        }
        fits
    }

    fn lock_reply_room(&self) -> MutexGuard<'_, Queue> {
        self.reply_room.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
