//! Memory that the peers of one shard can make grow, and the order in which they go on when it is short.
//!
//! One sum is kept ([`Budget::bytes`]). It has three parts, and two limits:
//!
//! * **input**: messages that arrived in part, and chunks put aside ([`Limits::assembly_bytes_max`]);
//! * **replies**: requests in work, replies held back, replies queued, and what waits for outgoing connections
//!   ([`Limits::shard_bytes_max`], together with the sessions);
//! * **sessions**: what services keep of their peers between messages ([`SessionState::bytes`](crate::service::SessionState::bytes)).
//!   They have at most half of that limit, so that replies always have the other half, and no more than replies leave of it.
//!   The first [`EXPECTED_REPLY_BYTES`] of each session need no room, as a short reply needs none: a peer can begin, whatever
//!   others keep.
//!
//! A connection at a message boundary is always read: a request that arrives whole needs no memory. Above the limit for
//! input a connection with an unfinished message is not read. So that such connections do not wait for each other for
//! ever, a few at a time hold a *pass*: they are read to the end of their message all the same. A peer that holds a pass
//! and sends nothing in [`Limits::pressure_timeout_ms`] is closed. One that sends less than 64 KiB, and not its message's
//! end, waits for another turn; of its message's time ([`Limits::assembly_timeout_ms`]) its turns count. In both cases the
//! pass goes on. Strangers, peers that have not told who they are, get a pass only while nobody else waits for one and half
//! of the passes are left.
//!
//! What a connection receives in the turn in which it stops cannot be given back to its socket: it is taken in, and
//! counted. Above twice the limit the shard is *overfull*: of the connections with an unfinished message only those with
//! a pass are read, and the others 4 KiB at a time. That ends at one and a half times the limit.
//!
//! While replies and sessions have more than half of their limit, the shard asks the service before a message is handed
//! over how long its reply may become (`reply_bytes`). A message goes on if it fits together with its reply, or both are
//! short. Others wait in the order in which they came, also those of connections that owe nothing, until there is room.
//! One of them at a time goes on without ([`Budget::next_to_proceed`]), and keeps this place until its peer has taken the
//! reply, or its backend all of the request.
//!
//! A request in work counts until it is answered, also when its connection ends before: its message and what was found
//! for it are with other threads until then.
//!
//! How long the response of a backend becomes is not known before. From half of the limit on what backends send is read
//! 4 KiB at a time, and only while the client was sent all that came before, or there is room: a short response reaches
//! its client, and a client that does not read keeps little.
//!
//! Passes alone would make everyone wait for each silent peer in turn. So while memory is short the shard also looks for
//! peers that keep an unfinished message and have sent nothing for `pressure_timeout_ms`, with nothing of theirs left in
//! the socket. It closes them, strangers first and then those with the most bytes, until half of the limit is free
//! ([`Budget::keeps_too_much`]). The time of the others does not depend on the number of silent peers.

use std::collections::VecDeque;
use std::mem;

use crate::cutter::Room;
use crate::limits::Limits;
use crate::service::{ConnKey, EXPECTED_REPLY_BYTES};

/// Connections that are read at the same time although memory is short. Each may exceed the limit by one message.
pub const PASSES: usize = 8;

/// Passes taken at which strangers get no further one, so that others need not wait for theirs.
const STRANGERS_PASSES: usize = PASSES / 2;

/// Bytes of replies that may wait for a stranger; with more it is closed. Their buffer has twice as many at most.
pub const STRANGER_REPLIES_MAX: usize = 8 << 10;

/// The sums, the passes, and the connections that wait for one.
#[derive(Debug, Default)]
pub struct Budget {
    input_bytes: usize,
    reply_bytes: usize,
    session_bytes: usize,
    /// Of the replies, requests in work whose connections have ended.
    orphan_bytes: usize,
    /// The most that the sum was since the owner returned memory.
    most_bytes: usize,
    /// Connections whose next message waits for room for its reply, with the bytes of that.
    for_replies: VecDeque<(ConnKey, usize)>,
    /// A connection that went on though there was no room for its reply, and has not sent it.
    reply_pass: Option<ConnKey>,
    /// The connection that was told last to go on with a long reply.
    reply_turn: Option<ConnKey>,
    passes: Passes,
    /// The connection that was told last to go on.
    tried: Option<ConnKey>,
    /// What was left of the memory when that was too little for the one that tried to go on without a pass.
    too_little_bytes: usize,
    overfull: bool,
    /// Backends are read a little at a time.
    short_of_replies: bool,
}

/// A peer that keeps an unfinished message and sends nothing. In the order in which a shard closes them, the last one
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Silent {
    /// It has not told who it is: [`SessionState::is_stranger`](crate::service::SessionState::is_stranger).
    pub is_stranger: bool,
    /// Memory of the unfinished message.
    pub bytes: usize,
}

/// Connections that are not read because memory is short, and the number of those that are read all the same. The
/// multiplexor (`ksf-mux`) has one, too, behind a lock.
#[derive(Debug, Default)]
pub struct Passes {
    taken: usize,
    /// In the order in which they stopped.
    waiting: VecDeque<ConnKey>,
    /// The same of strangers, which go on behind all others.
    strangers: VecDeque<ConnKey>,
}

impl Passes {
    /// A connection stops being read. `is_stranger`: its peer has not told who it is.
    pub fn wait(&mut self, key: ConnKey, is_stranger: bool) {
        let queue = if is_stranger { &mut self.strangers } else { &mut self.waiting };
        queue.push_back(key);
    }

    /// Takes the connection off that goes on first: the one that waits longest, strangers last.
    pub fn take_next(&mut self) -> Option<ConnKey> {
        self.waiting.pop_front().or_else(|| self.strangers.pop_front())
    }

    /// Connections that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.strangers.len()
    }

    /// Forgets those that wait and that `exists` knows no more: a connection that ends leaves its place in the queue.
    pub fn forget_ended(&mut self, exists: impl Fn(ConnKey) -> bool) {
        self.waiting.retain(|key| exists(*key));
        self.strangers.retain(|key| exists(*key));
    }

    /// True if a connection waits that may be read although memory is short.
    fn is_left_for_next(&self) -> bool {
        self.waiting() > 0 && self.is_left(self.waiting.is_empty())
    }

    fn is_left(&self, is_stranger: bool) -> bool {
        self.taken < if is_stranger { STRANGERS_PASSES } else { PASSES }
    }

    /// True, and counted, if one more connection may be read although memory is short.
    pub fn take(&mut self, is_stranger: bool) -> bool {
        let free = self.is_left(is_stranger);
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

    /// Bytes that services keep of their peers between messages.
    pub fn session_bytes(&self) -> usize {
        self.session_bytes
    }

    /// All bytes that the peers of the shard made it keep.
    pub fn bytes(&self) -> usize {
        self.input_bytes + self.reply_bytes + self.session_bytes
    }

    /// The most that [`Budget::bytes`] was since [`Budget::forget_most`].
    pub(crate) fn most_bytes(&self) -> usize {
        self.most_bytes.max(self.bytes())
    }

    /// The freed memory was returned.
    pub(crate) fn forget_most(&mut self) {
        self.most_bytes = self.bytes();
    }

    fn note_most(&mut self) {
        self.most_bytes = self.most_bytes();
    }

    /// Bytes of replies and sessions, which have one limit together.
    pub(crate) fn owed_bytes(&self) -> usize {
        self.reply_bytes + self.session_bytes
    }

    /// Bytes that one session may add, which keeps `kept` already; `limits` are those of its listener.
    pub(crate) fn session_room(&self, kept: usize, limits: &Limits, shard_limits: &Limits) -> usize {
        let own = limits.connection_bytes_max.max(limits.message_bytes_max).saturating_sub(kept);
        let of_sessions = (shard_limits.shard_bytes_max / 2).saturating_sub(self.session_bytes);
        let of_all = shard_limits.shard_bytes_max.saturating_sub(self.owed_bytes());
        own.min(of_sessions.min(of_all).max(EXPECTED_REPLY_BYTES.saturating_sub(kept)))
    }

    /// True if replies and sessions have their limit: who has a share in it waits until that is gone.
    #[inline]
    pub(crate) fn is_full(&self, limits: &Limits) -> bool {
        self.owed_bytes() >= limits.shard_bytes_max
    }

    /// Replaces what one connection has counted among the sessions.
    pub(crate) fn recount_session(&mut self, before: usize, after: usize) {
        self.session_bytes = self.session_bytes - before + after;
        self.note_most();
    }

    /// True if it matters how long a reply may become.
    #[inline]
    pub(crate) fn asks_for_replies(&self, limits: &Limits) -> bool {
        self.owed_bytes() > limits.shard_bytes_max / 2
    }

    fn fits_reply(&self, bytes: usize, limits: &Limits) -> bool {
        self.owed_bytes().saturating_add(bytes) <= limits.shard_bytes_max
    }

    /// True if the message of a connection may be handed over whose reply may have so many bytes. Else
    /// [`Budget::next_to_proceed`] names the connection when it may.
    pub(crate) fn admits_reply(&mut self, key: ConnKey, bytes: usize, limits: &Limits) -> bool {
        let is_turn = self.reply_turn.take_if(|turn| *turn == key).is_some();
        if self.needs_no_room(bytes, limits) || self.reply_pass == Some(key) {
            return true;
        }
        if is_turn || self.for_replies.is_empty() {
            if self.fits_reply(bytes, limits) {
                return true;
            }
            if self.has_reply_pass() {
                self.reply_pass = Some(key);
                return true;
            }
        }
        match is_turn {
            true => self.for_replies.push_front((key, bytes)),
            false => self.for_replies.push_back((key, bytes)),
        }
        false
    }

    /// True while this connection has the place without room.
    pub(crate) fn has_pass_of(&self, key: ConnKey) -> bool {
        self.reply_pass == Some(key)
    }

    /// A connection owes nothing, nor does its outgoing one, or it ends: the place without room goes to another one, if it has that.
    #[inline]
    pub(crate) fn return_reply_pass(&mut self, key: ConnKey) {
        if self.reply_pass == Some(key) {
            self.reply_pass = None;
        }
    }

    /// True if this connection was told to go on with its message.
    pub(crate) fn is_reply_turn(&self, key: ConnKey) -> bool {
        self.reply_turn == Some(key)
    }

    /// That connection went on, or waits again.
    pub(crate) fn end_reply_turn(&mut self) {
        self.reply_turn = None;
    }

    fn may_reply(&self, limits: &Limits) -> bool {
        let next = self.for_replies.front();
        next.is_some_and(|(_, bytes)| {
            self.needs_no_room(*bytes, limits) || self.has_reply_pass() || self.fits_reply(*bytes, limits)
        })
    }

    /// True if a message may be handed over beyond the limit: its reply, with the message, has at most
    /// [`EXPECTED_REPLY_BYTES`]. Each connection has at most one such message, but peers that ask and leave have no such bound:
    /// none is handed over so while the work of ended connections fills the limit.
    fn needs_no_room(&self, bytes: usize, limits: &Limits) -> bool {
        bytes <= EXPECTED_REPLY_BYTES && self.orphan_bytes < limits.shard_bytes_max
    }

    /// True if one connection may go on without room for its reply. Not before the work of ended connections is done: peers
    /// that ask and leave would have it one after the other.
    fn has_reply_pass(&self) -> bool {
        self.reply_pass.is_none() && self.orphan_bytes == 0
    }

    /// True while connections wait for memory, or the shard is overfull: the owner looks for silent peers then.
    pub fn is_short(&self) -> bool {
        self.overfull || self.passes.waiting() > 0
    }

    /// True while silent peers are closed: unfinished messages keep more than half of their limit.
    pub fn keeps_too_much(&self, limits: &Limits) -> bool {
        self.input_bytes > limits.assembly_bytes_max / 2
    }

    /// True while no connection with an unfinished message is read but those that hold a pass.
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

    /// True while what backends send is read a little at a time: how much that is no service can tell, so there is no
    /// reply to wait for room for.
    pub(crate) fn is_short_of_replies(&self) -> bool {
        self.short_of_replies
    }

    /// Looks whether that is so, from half of the limit on until a quarter; the owner calls it once a turn. True if it
    /// changed: the owner looks after all outgoing connections.
    pub(crate) fn update_short_of_replies(&mut self, limits: &Limits) -> bool {
        let above = limits.shard_bytes_max / if self.short_of_replies { 4 } else { 2 };
        let short = self.owed_bytes() > above;
        mem::replace(&mut self.short_of_replies, short) != short
    }

    /// The next connection that may go on after it was not read for lack of memory: the owner calls
    /// [`Connection::proceed`](crate::connection::Connection::proceed) on it, if it still exists.
    pub fn next_to_proceed(&mut self, limits: &Limits) -> Option<ConnKey> {
        let next_reply = if self.may_reply(limits) { self.for_replies.pop_front() } else { None };
        self.reply_turn = next_reply.map(|(key, _)| key);
        if self.reply_turn.is_some() {
            return self.reply_turn;
        }
        self.tried = if self.may_be_read(limits) { self.passes.take_next() } else { None };
        if self.passes.waiting() == 0 {
            // What was too little for those that waited may be enough for those that come.
            self.too_little_bytes = 0;
        }
        self.tried
    }

    /// True if there is a connection that may go on: with a pass, or because more memory is left than the last one found
    /// too little. Otherwise all of them would try again in every turn.
    pub(crate) fn may_proceed(&self, limits: &Limits) -> bool {
        self.may_reply(limits) || self.may_be_read(limits)
    }

    fn may_be_read(&self, limits: &Limits) -> bool {
        self.passes.is_left_for_next() || self.passes.waiting() > 0 && self.left_bytes(limits) > self.too_little_bytes
    }

    fn left_bytes(&self, limits: &Limits) -> usize {
        limits.assembly_bytes_max.saturating_sub(self.input_bytes)
    }

    /// Connections that wait for memory, to be read or to be answered.
    pub fn waiting(&self) -> usize {
        self.passes.waiting() + self.for_replies.len()
    }

    /// Forgets those that wait and that `exists` knows no more: a connection that ends leaves its place in the queue.
    pub(crate) fn forget_ended(&mut self, exists: impl Fn(ConnKey) -> bool) {
        self.for_replies.retain(|(key, _)| exists(*key));
        self.passes.forget_ended(exists);
    }

    pub(crate) fn wait(&mut self, key: ConnKey, is_stranger: bool, limits: &Limits) {
        if self.tried == Some(key) {
            self.too_little_bytes = self.left_bytes(limits);
        }
        self.passes.wait(key, is_stranger);
    }

    pub(crate) fn is_input_full(&self, limits: &Limits) -> bool {
        self.input_bytes >= limits.assembly_bytes_max
    }

    /// True, and counted, if one more connection may be read although memory is short.
    pub(crate) fn take_pass(&mut self, is_stranger: bool) -> bool {
        let taken = self.passes.take(is_stranger);
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
        self.note_most();
    }

    pub(crate) fn remove_input(&mut self, bytes: usize) {
        self.input_bytes -= bytes;
    }

    /// Replaces what one connection has counted among the replies.
    pub(crate) fn recount_replies(&mut self, before: usize, after: usize) {
        self.reply_bytes = self.reply_bytes - before + after;
        self.note_most();
    }

    /// A connection ends that has counted `bytes` among the replies. Its requests in work, `work_bytes`, count until
    /// [`Budget::orphan_done`] gives them back: others still hold their memory.
    pub(crate) fn end_replies(&mut self, key: ConnKey, bytes: usize, work_bytes: usize) {
        self.return_reply_pass(key);
        self.recount_replies(bytes, work_bytes);
        self.orphan_bytes += work_bytes;
    }

    /// A request was answered whose connection has ended. `work_bytes`: what was counted for it
    /// ([`Delivery::work_bytes`](crate::deferred::Delivery::work_bytes)).
    pub fn orphan_done(&mut self, work_bytes: usize) {
        self.orphan_bytes -= work_bytes;
        self.reply_bytes -= work_bytes;
    }
}

/// The room for one connection's unfinished message.
pub(crate) struct InputRoom<'a> {
    pub(crate) budget: &'a mut Budget,
    pub(crate) limit_bytes: usize,
    /// Memory is given although it is short: for a pass, and for bytes that are received already.
    pub(crate) grants_all: bool,
}

impl Room for InputRoom<'_> {
    fn grow(&mut self, bytes: usize) -> bool {
        let granted = self.grants_all || self.fits(bytes);
        if granted {
            self.budget.input_bytes += bytes;
            self.budget.note_most();
        }
        granted
    }

    fn shrink(&mut self, bytes: usize) {
        self.budget.input_bytes -= bytes;
    }

    fn fits(&self, bytes: usize) -> bool {
        self.budget.input_bytes.saturating_add(bytes) <= self.limit_bytes
    }
}

#[cfg(test)]
mod tests {
    use ksf_test::Random;

    use super::*;

    #[test]
    fn the_places_of_ended_connections_are_given_up() {
        let mut budget = Budget::default();
        (0..100).for_each(|index| budget.wait(ConnKey { index, generation: 0 }, false, &Limits::default()));
        budget.forget_ended(|key| key.index % 10 == 0);
        assert_eq!(budget.waiting(), 10);
        let next = budget.next_to_proceed(&Limits::default());
        assert_eq!(next, Some(ConnKey { index: 0, generation: 0 }));
    }

    #[test]
    fn a_session_begins_while_replies_fill_the_shard_and_grows_when_they_are_gone() {
        let limits = Limits { shard_bytes_max: 1 << 20, connection_bytes_max: 1 << 20, ..Limits::default() };
        let mut budget = Budget::default();
        let room = |budget: &Budget, kept| budget.session_room(kept, &limits, &limits);
        assert_eq!((room(&budget, 0), room(&budget, 1 << 19)), (1 << 19, 1 << 19));
        budget.recount_replies(0, 600 << 10);
        assert_eq!(room(&budget, 0), 424 << 10, "replies have more than half");
        budget.recount_replies(600 << 10, 1 << 20);
        assert_eq!([0, 1000, 4096, 5000].map(|kept| room(&budget, kept)), [4096, 3096, 0, 0]);
        budget.recount_replies(1 << 20, 0);
        budget.recount_session(0, 1 << 19);
        assert_eq!([0, 1000, 1 << 19].map(|kept| room(&budget, kept)), [4096, 3096, 0], "others keep the half");
        let own = Limits { connection_bytes_max: 1000, message_bytes_max: 2000, ..limits.clone() };
        assert_eq!(budget.session_room(500, &own, &limits), 1500);
    }

    /// Replies alone may have the limit, and sessions the half of it, but never one and a half together.
    #[test]
    fn replies_and_sessions_have_one_limit_together() {
        const PEERS: usize = 32;
        const LONG: usize = 256 << 10;
        const LIMIT: usize = 4 << 20;
        let limits = Limits { shard_bytes_max: LIMIT, connection_bytes_max: 1 << 20, ..Limits::default() };
        let key = |at: usize| ConnKey { index: at as u32, generation: 0 };
        let mut random = Random::of_test(1);
        let (mut budget, mut most) = (Budget::default(), 0);
        // Of each peer: its reply, the reply that waits for room, and its session.
        let mut peers = [(0, 0, 0); PEERS];
        for step in 0..20_000 {
            // Replies fill the shard, then sessions what is left, then both come and go, and then all is given back.
            let (replies_grow, sessions_grow) = match step / 500 % 4 {
                0 => (true, false),
                1 => (true, true),
                2 => (random.one_in(2), random.one_in(2)),
                _ => (false, false),
            };
            let at = random.within(0..=PEERS - 1);
            let (owed, waits, kept) = &mut peers[at];
            match random.within(0..=1) {
                0 if replies_grow => {
                    if (*owed, *waits) != (0, 0) {
                        continue;
                    }
                    let bytes = random.pick(&[100, EXPECTED_REPLY_BYTES, 20_000, LONG]);
                    if !budget.asks_for_replies(&limits) || budget.admits_reply(key(at), bytes, &limits) {
                        budget.recount_replies(0, bytes);
                        *owed = bytes;
                    } else {
                        *waits = bytes;
                    }
                }
                0 => {
                    budget.recount_replies(*owed, 0);
                    budget.return_reply_pass(key(at));
                    *owed = 0;
                }
                _ if sessions_grow => {
                    let room = budget.session_room(*kept, &limits, &limits);
                    let more = random.within(0..=room);
                    budget.recount_session(*kept, *kept + more);
                    *kept += more;
                }
                _ => {
                    budget.recount_session(*kept, 0);
                    *kept = 0;
                }
            }
            while let Some(next) = budget.next_to_proceed(&limits) {
                let (owed, waits, _) = &mut peers[next.index as usize];
                assert!(budget.admits_reply(next, *waits, &limits), "it is its turn");
                budget.recount_replies(0, *waits);
                (*owed, *waits) = (*waits, 0);
            }
            // One goes on without room, and each peer may have a short reply and a short session.
            let short = PEERS * EXPECTED_REPLY_BYTES;
            let (sum, kept) = (budget.owed_bytes(), budget.session_bytes());
            assert!(sum <= LIMIT + LONG + 2 * short, "step {step}: {sum} bytes, {kept} of them of sessions");
            assert!(kept <= LIMIT / 2 + short, "step {step}: {kept} bytes of sessions");
            most = most.max(sum);
        }
        assert!(most > LIMIT, "the limit was never met: {most}");
    }

    #[test]
    fn strangers_go_on_last_and_leave_half_of_the_passes() {
        let limits = Limits { assembly_bytes_max: 0, ..Limits::default() };
        let key = |index| ConnKey { index, generation: 0 };
        let mut budget = Budget::default();
        (0..10).for_each(|index| budget.wait(key(index), true, &limits));
        for index in 0..STRANGERS_PASSES as u32 {
            assert_eq!(budget.next_to_proceed(&limits), Some(key(index)));
            assert!(budget.take_pass(true));
        }
        assert_eq!(budget.next_to_proceed(&limits), None);
        (10..20).for_each(|index| budget.wait(key(index), false, &limits));
        for index in 10..10 + (PASSES - STRANGERS_PASSES) as u32 {
            assert_eq!(budget.next_to_proceed(&limits), Some(key(index)));
            assert!(budget.take_pass(false));
        }
        assert_eq!((budget.next_to_proceed(&limits), budget.waiting()), (None, 12));
    }
}
