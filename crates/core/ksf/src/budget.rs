//! Memory that the peers of one shard can make grow, and the order in which they go on when it is short.
//!
//! Two sums are kept, each with a limit:
//!
//! * **input**: messages that arrived in part, and chunks put aside ([`Limits::assembly_bytes_max`]);
//! * **replies**: requests in work, replies held back, replies queued, and what waits for outgoing connections
//!   ([`Limits::shard_bytes_max`]).
//!
//! Above the limit for input a connection with an unfinished message is not read. So that such connections do not wait
//! for each other for ever, a few at a time hold a *pass*: they are read to the end of their message all the same. A
//! peer that holds a pass and sends nothing in [`Limits::pressure_timeout_ms`] is closed. One that sends less than 64 KiB,
//! and not its message's end, waits for another turn; of its message's time ([`Limits::assembly_timeout_ms`]) its turns
//! count. In both cases the pass goes on.
//!
//! What a connection receives in the turn in which it stops cannot be given back to its socket: it is put aside, and
//! counted. Above twice the limit the shard is *overfull*: no connection without a pass is read, so that each adds no
//! more than what was on its way. That ends at one and a half times the limit.

use std::collections::VecDeque;
use std::mem;

use crate::cutter::Room;
use crate::limits::Limits;
use crate::service::ConnKey;

/// Connections that are read at the same time although memory is short. Each may exceed the limit by one message.
pub const PASSES: usize = 8;

/// The sums, the passes, and the connections that wait for one.
#[derive(Debug, Default)]
pub struct Budget {
    input_bytes: usize,
    reply_bytes: usize,
    passes: Passes,
    /// The connection that was told last to go on.
    tried: Option<ConnKey>,
    /// What was left of the memory when that was too little for the one that tried to go on without a pass.
    too_little_bytes: usize,
    overfull: bool,
}

/// Connections that are not read because memory is short, and the number of those that are read all the same. The
/// multiplexor (`ksf-mux`) has one, too, behind a lock.
#[derive(Debug, Default)]
pub struct Passes {
    taken: usize,
    /// In the order in which they stopped.
    waiting: VecDeque<ConnKey>,
}

impl Passes {
    /// A connection stops being read.
    pub fn wait(&mut self, key: ConnKey) {
        self.waiting.push_back(key);
    }

    /// Takes the connection off that waits longest.
    pub fn take_next(&mut self) -> Option<ConnKey> {
        self.waiting.pop_front()
    }

    /// Connections that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets those that wait and that `exists` knows no more: a connection that ends leaves its place in the queue.
    pub fn forget_ended(&mut self, exists: impl Fn(ConnKey) -> bool) {
        self.waiting.retain(|key| exists(*key));
    }

    /// True if one more connection may be read although memory is short.
    pub fn is_left(&self) -> bool {
        self.taken < PASSES
    }

    /// True, and counted, if one more connection may be read although memory is short.
    pub fn take(&mut self) -> bool {
        let free = self.is_left();
        self.taken += usize::from(free);
        free
    }

    /// A connection that took one needs it no longer.
    pub fn give_back(&mut self) {
        self.taken -= 1;
    }
}

impl Budget {
    /// Bytes of unfinished input that are kept.
    pub fn input_bytes(&self) -> usize {
        self.input_bytes
    }

    /// Bytes of requests in work and of replies that are not sent.
    pub fn reply_bytes(&self) -> usize {
        self.reply_bytes
    }

    /// True while no connection is read but those that hold a pass.
    pub fn is_overfull(&self) -> bool {
        self.overfull
    }

    /// Looks whether the shard is overfull; the owner calls it once a turn. True if that changed: the owner looks after
    /// all connections, and calls [`Connection::read_again`](crate::connection::Connection::read_again) on each if the
    /// shard is overfull no longer.
    pub fn update_overfull(&mut self, limits: &Limits) -> bool {
        let limit = limits.assembly_bytes_max;
        // Unfinished messages alone stay below the limit, so this comes to an end when those that wait had their pass.
        let above = limit.saturating_add(if self.overfull { limit / 2 } else { limit });
        let overfull = self.input_bytes > above;
        mem::replace(&mut self.overfull, overfull) != overfull
    }

    /// The next connection that may go on after it was not read for lack of memory: the owner calls
    /// [`Connection::proceed`](crate::connection::Connection::proceed) on it, if it still exists.
    pub fn next_to_proceed(&mut self, limits: &Limits) -> Option<ConnKey> {
        self.tried = if self.may_proceed(limits) { self.passes.take_next() } else { None };
        if self.waiting() == 0 {
            // What was too little for those that waited may be enough for those that come.
            self.too_little_bytes = 0;
        }
        self.tried
    }

    /// True if there is a connection that may go on: with a pass, or because more memory is left than the last one found
    /// too little. Otherwise all of them would try again in every turn.
    pub(crate) fn may_proceed(&self, limits: &Limits) -> bool {
        self.waiting() > 0 && (self.passes.is_left() || self.left_bytes(limits) > self.too_little_bytes)
    }

    fn left_bytes(&self, limits: &Limits) -> usize {
        limits.assembly_bytes_max.saturating_sub(self.input_bytes)
    }

    /// Connections that wait for memory.
    pub fn waiting(&self) -> usize {
        self.passes.waiting()
    }

    /// Forgets those that wait and that `exists` knows no more: a connection that ends leaves its place in the queue.
    pub(crate) fn forget_ended(&mut self, exists: impl Fn(ConnKey) -> bool) {
        self.passes.forget_ended(exists);
    }

    pub(crate) fn wait(&mut self, key: ConnKey, limits: &Limits) {
        if self.tried == Some(key) {
            self.too_little_bytes = self.left_bytes(limits);
        }
        self.passes.wait(key);
    }

    pub(crate) fn is_input_full(&self, limits: &Limits) -> bool {
        self.input_bytes >= limits.assembly_bytes_max
    }

    /// True, and counted, if one more connection may be read although memory is short.
    pub(crate) fn take_pass(&mut self) -> bool {
        let taken = self.passes.take();
        if taken {
            // It may have been the one that needs most.
            self.too_little_bytes = 0;
        }
        taken
    }

    pub(crate) fn return_pass(&mut self) {
        self.passes.give_back();
    }

    /// Counts input that is here, whether there is room or not.
    pub(crate) fn add_input(&mut self, bytes: usize) {
        self.input_bytes += bytes;
    }

    pub(crate) fn remove_input(&mut self, bytes: usize) {
        self.input_bytes -= bytes;
    }

    /// Replaces what one connection has counted among the replies.
    pub(crate) fn recount_replies(&mut self, before: usize, after: usize) {
        self.reply_bytes = self.reply_bytes - before + after;
    }
}

/// The room for one connection's unfinished message.
pub(crate) struct InputRoom<'a> {
    pub(crate) budget: &'a mut Budget,
    pub(crate) limit_bytes: usize,
    pub(crate) has_pass: bool,
}

impl Room for InputRoom<'_> {
    fn grow(&mut self, bytes: usize) -> bool {
        let granted = self.has_pass || self.budget.input_bytes.saturating_add(bytes) <= self.limit_bytes;
        if granted {
            self.budget.input_bytes += bytes;
        }
        granted
    }

    fn shrink(&mut self, bytes: usize) {
        self.budget.input_bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_of_ended_connections_are_given_up() {
        let mut budget = Budget::default();
        (0..100).for_each(|index| budget.wait(ConnKey { index, generation: 0 }, &Limits::default()));
        budget.forget_ended(|key| key.index % 10 == 0);
        assert_eq!(budget.waiting(), 10);
        let next = budget.next_to_proceed(&Limits::default());
        assert_eq!(next, Some(ConnKey { index: 0, generation: 0 }));
    }
}
