//! Shares of a turn: how many messages of one connection a shard handles before the other connections have their turn.
//!
//! A message counts whether it has a reply or not. A connection that has had its share gives way: the rest of its input is put
//! aside, and later turns go on with it, first come, first served.

use std::collections::VecDeque;

use crate::service::ConnKey;

/// Messages of one connection in a turn at most. Of short requests a receive slot has about as many: a pipeline that fits gives
/// way to nobody.
const MESSAGES_MAX: u32 = 4096;
/// Turns with so many shares in them have had enough: no further connection goes on that gave way, and the others have an
/// [`n`th](LATE) of a share each. Some milliseconds of short messages.
const SHARES: u32 = 4;
/// Each receive slot may bring another connection. What is left to each is more than an ordinary pipeline has in flight.
const LATE: u32 = 16;

/// The messages of the turn at hand, and the connections that gave way.
#[derive(Debug)]
pub(crate) struct Shares {
    /// Messages of one share.
    messages_max: u32,
    /// Tells the turn from those before. 0 while there are none, because no shard takes them: nobody gives way then.
    turn: u32,
    messages: u32,
    waiting: VecDeque<ConnKey>,
    /// Those of `waiting` that gave way in earlier turns.
    ready: usize,
}

impl Default for Shares {
    fn default() -> Self {
        Self::of(MESSAGES_MAX)
    }
}

/// What a connection has had of a turn.
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

    fn is_late(&self) -> bool {
        self.messages >= SHARES * self.messages_max
    }

    pub(crate) fn begin_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1).max(1);
        self.messages = 0;
        self.ready = self.waiting.len();
    }

    /// The connection that goes on next in this turn, of those that gave way in earlier ones.
    pub(crate) fn next_to_go_on(&mut self) -> Option<ConnKey> {
        if self.ready == 0 || self.is_late() {
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

    /// Counts a message of a connection. False if it has had its share of this turn.
    #[inline]
    pub(crate) fn takes(&mut self, share: &mut Share) -> bool {
        if self.turn == 0 {
            return true;
        }
        if share.turn != self.turn {
            *share = Share { turn: self.turn, messages: 0 };
        }
        let most = if self.is_late() { (self.messages_max / LATE).max(1) } else { self.messages_max };
        if share.messages >= most {
            return false;
        }
        share.messages += 1;
        self.messages += 1;
        true
    }
}
