//! Shares of a turn: how many messages of one connection a shard handles before the other connections have their turn.
//!
//! A message counts whether it has a reply or not. A connection whose share is used up gives way: the shard puts the rest of its
//! input aside and goes on with it in a later turn, in the order in which connections gave way.

use std::collections::VecDeque;

use crate::service::ConnKey;

/// Messages of one share. A receive slot holds about as many short requests, so a pipeline that fits into one is handled in one
/// turn.
const MESSAGES_MAX: u32 = 4096;
/// A turn is full after this many shares of messages, which take some milliseconds if they are short. Connections that gave way
/// go on in the next turn then, and new input gets a part of a share ([`LATE`]).
const SHARES: u32 = 4;
/// In a full turn a share is divided by this. The rest is more than an ordinary pipeline has in flight; each receive slot of the
/// turn may have another connection.
const LATE: u32 = 16;

/// The messages of the turn at hand, and the connections that gave way.
#[derive(Debug)]
pub(crate) struct Shares {
    /// Messages of one share.
    messages_max: u32,
    /// The number of the turn. 0 where no shard takes turns (simulators, workers): then nothing is counted.
    turn: u32,
    messages: u32,
    waiting: VecDeque<ConnKey>,
    /// How many of `waiting`, from the front, gave way in earlier turns.
    ready: usize,
}

impl Default for Shares {
    fn default() -> Self {
        Self::of(MESSAGES_MAX)
    }
}

/// The messages of one connection in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    turn: u32,
    messages: u32,
}

impl Shares {
    /// Shares of so many messages.
    pub(crate) fn of(messages_max: u32) -> Self {
        Self { messages_max, turn: 0, messages: 0, waiting: VecDeque::new(), ready: 0 }
    }

    fn is_full(&self) -> bool {
        self.messages >= SHARES * self.messages_max
    }

    pub(crate) fn begin_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1).max(1);
        self.messages = 0;
        self.ready = self.waiting.len();
    }

    /// The connection that goes on next in this turn, of those that gave way in earlier ones.
    pub(crate) fn next_to_go_on(&mut self) -> Option<ConnKey> {
        if self.ready == 0 || self.is_full() {
            return None;
        }
        self.ready -= 1;
        self.waiting.pop_front()
    }

    /// The connection goes on in a later turn.
    pub(crate) fn give_way(&mut self, key: ConnKey) {
        self.waiting.push_back(key);
    }

    /// True while a connection waits that gave way.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Counts a message of a connection. False if its share of this turn is used up.
    #[inline]
    pub(crate) fn takes(&mut self, share: &mut Share) -> bool {
        if self.turn == 0 {
            return true;
        }
        if share.turn != self.turn {
            *share = Share { turn: self.turn, messages: 0 };
        }
        let most = if self.is_full() { (self.messages_max / LATE).max(1) } else { self.messages_max };
        if share.messages >= most {
            return false;
        }
        share.messages += 1;
        self.messages += 1;
        true
    }
}
