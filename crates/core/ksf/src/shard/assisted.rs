//! A connection under a kernel half: whose turn it is to send, and when the half may take over.

use std::mem;
use std::os::fd::BorrowedFd;

use crate::assist::AssistConn;
use crate::connection::Connection;
use crate::env::Env;
use crate::limits::{Limits, SomeTime, Time};

/// Lone messages after which a connection is given to the kernel half. Enough that a pipelining client, which has a
/// single message outstanding now and then, stays with the batching of user space.
const LONE_MESSAGES: u8 = 4;

/// The same for a peer that has had several messages outstanding: it will again, and on a CPU that it shares with the
/// server each change of sides costs more than it wins.
const LONE_MESSAGES_PIPELINING: u8 = 64;

/// Time in which something announced by the kernel half must arrive before the connection may be parked again.
const EXPECT_MS: u64 = 500;

/// Time between two looks at a connection on which the kernel half is busy, at most.
const LOOK_MS: u32 = 250;
/// The same at a connection on which nothing happens: a hundred thousand of them cost 0.1 % of a CPU.
const LOOK_CALM_MS: u32 = 8_000;

pub(super) struct AssistState {
    pub(super) conn: Box<dyn AssistConn>,
    /// Messages in a row that were answered before the next one came: low load, which the kernel half serves best.
    pub(super) lone_messages: u8,
    /// How many it takes: more when the peer was seen to pipeline.
    lone_wanted: u8,
    messages_seen: u32,
    received_seen: u64,
    waiting_since: SomeTime,
    /// Reply bytes of the kernel half at the last look.
    replied_seen: u64,
    /// The next look at what no event tells of, and the time between it and the last one.
    look_at: Time,
    look_ms: u32,
    /// Bytes received when something was announced that is not here yet, and how long to wait for it.
    expects: (u64, SomeTime),
    /// Since when receives said "end" too early, and the bytes received by then: a peer that reads slowly keeps the
    /// bytes in front of the end back for as long as it likes.
    end_since: (SomeTime, u64),
    /// A receive said "end" while bytes still wait in the kernel: receive again a little later.
    pub(super) early_end: bool,
    /// Since when TCP has not taken what the kernel half queued, as looks saw it.
    undrained_since: SomeTime,
}

/// Which half may send on a connection with a kernel half.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Ours,
    KernelHalfs,
    /// It was the kernel half's for too long.
    Stuck,
}

/// What a look found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Quiet,
    /// The connection is to be looked after at the end of the turn.
    Due,
    /// TCP has not taken the kernel half's replies for too long: they are lost.
    Lost,
}

impl AssistState {
    pub(super) fn new(conn: Box<dyn AssistConn>, limits: &Limits, now: Time) -> Self {
        let look_ms = look_ms(limits, LOOK_MS);
        Self {
            conn,
            lone_messages: LONE_MESSAGES,
            lone_wanted: LONE_MESSAGES,
            messages_seen: 0,
            received_seen: 0,
            waiting_since: SomeTime::NONE,
            replied_seen: 0,
            look_at: now.plus_ms(look_ms.into()),
            look_ms,
            expects: (0, SomeTime::NONE),
            end_since: (SomeTime::NONE, 0),
            early_end: false,
            undrained_since: SomeTime::NONE,
        }
    }

    /// Whether user space may send or close: only when TCP has taken what the kernel half queued.
    pub(super) fn whose_turn(&mut self, socket: BorrowedFd<'_>, stream: &Connection, env: &Env) -> Turn {
        if self.conn.drained(socket, stream.sent_bytes()) {
            self.waiting_since = SomeTime::NONE;
            return Turn::Ours;
        }
        env.stats.assist_waits.add(1);
        let since = self.waiting_since.get_or_insert(env.now);
        // A peer that does not read fills TCP, and then the queue does not drain.
        if env.now > since.plus_ms(stream.limits(env).send_timeout_ms) { Turn::Stuck } else { Turn::KernelHalfs }
    }

    /// True while messages come one at a time.
    fn is_lone(&mut self, stream: &Connection) -> bool {
        let fresh = u64::from(stream.messages().wrapping_sub(self.messages_seen));
        self.messages_seen = stream.messages();
        let fresh_bytes = stream.received_bytes() - self.received_seen;
        self.received_seen += fresh_bytes;
        // Without framing all that came together is one message. What came to the kernel half, one by one, tells.
        let joined = fresh == 1 && self.conn.typical_bytes().is_some_and(|typical| fresh_bytes >= 2 * typical);
        let fresh = fresh + u64::from(joined);
        match fresh {
            0 => {}
            1 => self.lone_messages = self.lone_messages.saturating_add(1),
            _ => {
                self.lone_messages = 0;
                self.lone_wanted = LONE_MESSAGES_PIPELINING;
            }
        }
        if self.lone_messages < self.lone_wanted {
            return false;
        }
        self.lone_wanted = LONE_MESSAGES;
        true
    }

    /// Told before a batch that answers everything: its receiver may send the next message before this thread goes on.
    pub(super) fn settle_ahead(&mut self, socket: BorrowedFd<'_>, stream: &Connection, batch_bytes: usize) {
        if self.is_lone(stream) {
            let sent_after = stream.sent_bytes() + batch_bytes as u64;
            self.conn.settle_ahead(socket, stream.received_bytes(), sent_after);
        }
    }

    /// Gives a quiet, settled connection to the kernel half. True if the engine need not look for bytes.
    pub(super) fn hand_over(&mut self, settled: bool, socket: BorrowedFd<'_>, stream: &Connection, env: &Env) -> bool {
        if !settled || !self.is_lone(stream) {
            return false;
        }
        self.conn.settle(socket, stream.received_bytes(), stream.sent_bytes());
        if self.expects.1.is_set() && self.expects.0 == stream.received_bytes() {
            return false;
        }
        self.expects.1 = SomeTime::NONE;
        let parked = self.conn.park(socket, env.shard);
        env.stats.assist_settled.add(u64::from(parked));
        parked
    }

    /// When it is to be looked at.
    pub(super) fn deadline(&self) -> Time {
        self.expects.1.get().map_or(self.look_at, |until| until.min(self.look_at))
    }

    /// Looks at what no event tells of: often while the kernel half answers, rarely while nothing happens.
    pub(super) fn look(&mut self, socket: BorrowedFd<'_>, stream: &mut Connection, env: &Env) -> Look {
        // What the kernel half answers is activity, too.
        let replied = self.conn.replied_bytes();
        let busy = mem::replace(&mut self.replied_seen, replied) != replied;
        if busy {
            stream.note_activity(env.now);
            self.undrained_since = SomeTime::NONE;
        }
        let mut look_after = self.conn.is_broken();
        if self.expects.1.get().is_some_and(|until| env.now >= until) {
            self.expects.1 = SomeTime::NONE;
            look_after = true;
        }
        if self.conn.drained(socket, stream.sent_bytes()) {
            self.undrained_since = SomeTime::NONE;
        } else {
            // TCP had room for it, so this takes microseconds, and more on a machine that is overloaded.
            let since = self.undrained_since.get_or_insert(env.now);
            if env.now > since.plus_ms(stream.limits(env).send_timeout_ms) {
                return Look::Lost;
            }
        }
        let calm = !busy && !look_after && !self.undrained_since.is_set();
        let limits = stream.limits(env);
        self.look_ms =
            if calm { (self.look_ms * 2).min(look_ms(limits, LOOK_CALM_MS)) } else { look_ms(limits, LOOK_MS) };
        self.look_at = env.now.plus_ms(self.look_ms.into());
        if look_after { Look::Due } else { Look::Quiet }
    }

    /// Something was announced that is not here yet.
    pub(super) fn expect(&mut self, received_bytes: u64, now: Time) {
        self.expects = (received_bytes, now.plus_ms(EXPECT_MS).into());
    }

    /// A receive said "end" too early, when as many bytes were received. Returns since when that is so.
    pub(super) fn end_since(&mut self, received_bytes: u64, now: Time) -> Time {
        let (since, received) = self.end_since;
        let since = since.get().filter(|_| received == received_bytes).unwrap_or(now);
        self.end_since = (since.into(), received_bytes);
        since
    }
}

/// Time between two looks: several within each time limit that they serve.
fn look_ms(limits: &Limits, most_ms: u32) -> u32 {
    let timeouts_ms = [limits.send_timeout_ms, limits.idle_timeout_ms];
    let shortest_ms = timeouts_ms.into_iter().filter(|ms| *ms > 0).min().unwrap_or(u64::MAX);
    u32::try_from(shortest_ms / 4).unwrap_or(u32::MAX).clamp(5, most_ms)
}
