//! A connection under a kernel half: whose turn it is to send, and when the half may take over.

use std::mem;
use std::os::fd::BorrowedFd;

use super::erased::Stream;
use crate::assist::AssistConn;
use crate::env::Env;
use crate::limits::Time;

/// Lone messages after which a connection is given to the kernel half. Enough that a pipelining client, which has a
/// single message outstanding now and then, stays with the batching of user space.
const LONE_MESSAGES: u32 = 4;

/// The same for a peer that has had several messages outstanding: it will again, and on a CPU that it shares with the
/// server each change of sides costs more than it wins.
const LONE_MESSAGES_PIPELINING: u32 = 64;

/// Ticks in which something announced by the kernel half must arrive before the connection may be parked again.
const EXPECT_TICKS: u8 = 2;

pub(super) struct AssistState {
    pub(super) conn: Box<dyn AssistConn>,
    /// Messages in a row that were answered before the next one came: low load, which the kernel half serves best.
    pub(super) lone_messages: u32,
    /// How many it takes: more when the peer was seen to pipeline.
    lone_wanted: u32,
    messages_seen: u64,
    received_seen: u64,
    waiting_since: Option<Time>,
    /// Reply bytes of the kernel half at the last tick.
    replied_seen: u64,
    /// Bytes received when something was announced that is not here yet, and ticks to wait for it.
    expects: Option<(u64, u8)>,
    /// Since when receives said "end" too early, and the bytes received by then: a peer that reads slowly keeps the
    /// bytes in front of the end back for as long as it likes.
    pub(super) end_since: Option<(Time, u64)>,
    /// A receive said "end" while bytes still wait in the kernel: receive again a little later.
    pub(super) early_end: bool,
    /// Since when TCP has not taken what the kernel half queued, as ticks saw it.
    undrained_since: Option<Time>,
}

/// Who may send on a connection with a kernel half.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Ours,
    KernelHalfs,
    /// It was the kernel half's for too long.
    Stuck,
}

/// What a tick found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tick {
    Quiet,
    /// The connection is to be looked after at the end of the turn.
    LookAfter,
    /// TCP has not taken the kernel half's replies for too long: they are lost.
    Lost,
}

impl AssistState {
    pub(super) fn new(conn: Box<dyn AssistConn>) -> Self {
        Self {
            conn,
            lone_messages: LONE_MESSAGES,
            lone_wanted: LONE_MESSAGES,
            messages_seen: 0,
            received_seen: 0,
            waiting_since: None,
            replied_seen: 0,
            expects: None,
            end_since: None,
            early_end: false,
            undrained_since: None,
        }
    }

    /// Whether user space may send or close: only when TCP has taken what the kernel half queued.
    pub(super) fn whose_turn(&mut self, socket: BorrowedFd<'_>, sent_bytes: u64, env: &Env) -> Turn {
        // The kernel half's worker may wait for this very CPU: let it run before sleeping, which takes longer.
        for look in 0..2 {
            if self.conn.drained(socket, sent_bytes) {
                self.waiting_since = None;
                return Turn::Ours;
            }
            if look == 0 {
                rustix::thread::sched_yield();
            }
        }
        env.stats.assist_waits.add(1);
        let since = *self.waiting_since.get_or_insert(env.now);
        // A peer that does not read fills TCP, and then the queue does not drain.
        if env.now > since.plus_ms(env.limits.send_timeout_ms) { Turn::Stuck } else { Turn::KernelHalfs }
    }

    /// True while messages come one at a time.
    fn is_lone(&mut self, stream: &dyn Stream) -> bool {
        let fresh = stream.messages() - self.messages_seen;
        self.messages_seen += fresh;
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
    pub(super) fn settle_ahead(&mut self, socket: BorrowedFd<'_>, stream: &dyn Stream, batch_bytes: usize) {
        if self.is_lone(stream) {
            let sent_after = stream.sent_bytes() + batch_bytes as u64;
            self.conn.settle_ahead(socket, stream.received_bytes(), sent_after);
        }
    }

    /// Gives a quiet, settled connection to the kernel half. True if the engine need not look for bytes.
    pub(super) fn hand_over(&mut self, settled: bool, socket: BorrowedFd<'_>, stream: &dyn Stream, env: &Env) -> bool {
        if !settled || !self.is_lone(stream) {
            return false;
        }
        self.conn.settle(socket, stream.received_bytes(), stream.sent_bytes());
        if self.expects.is_some_and(|(received, _)| received == stream.received_bytes()) {
            return false;
        }
        self.expects = None;
        let parked = self.conn.park(socket, env.shard);
        env.stats.assist_settled.add(u64::from(parked));
        parked
    }

    /// Looks, now and then, at what no event tells of.
    pub(super) fn tick(&mut self, socket: BorrowedFd<'_>, stream: &mut dyn Stream, env: &Env) -> Tick {
        // What the kernel half answers is activity, too.
        let replied = self.conn.replied_bytes();
        if mem::replace(&mut self.replied_seen, replied) != replied {
            stream.note_activity(env.now);
            self.undrained_since = None;
        }
        let mut look_after = self.conn.is_broken();
        if let Some((_, ticks)) = &mut self.expects {
            *ticks -= 1;
            if *ticks == 0 {
                self.expects = None;
                look_after = true;
            }
        }
        if self.conn.drained(socket, stream.sent_bytes()) {
            self.undrained_since = None;
        } else {
            // TCP had room for it, so this takes microseconds, and more on a machine that is overloaded.
            let since = *self.undrained_since.get_or_insert(env.now);
            if env.now > since.plus_ms(env.limits.send_timeout_ms) {
                return Tick::Lost;
            }
        }
        if look_after { Tick::LookAfter } else { Tick::Quiet }
    }

    /// Something was announced that is not here yet.
    pub(super) fn expect(&mut self, received_bytes: u64) {
        self.expects = Some((received_bytes, EXPECT_TICKS));
    }
}
