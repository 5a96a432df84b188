//! A stream connection without a socket and without a clock: bytes in, messages to the service, replies out.
//!
//! ```text
//!   receive(chunk) ──► Cutter ──whole message──► Session ──► Output ──take_batch──► engine
//!        │                                                     ▲
//!        └─ put aside while replies wait                       │
//!             answers of other threads, closed gates ──► held ─┘  each in its place
//! ```
//!
//! A message that lies whole in a received chunk is handed over in place. One that does not is put together in a
//! buffer, so that between two turns no connection occupies a slot. Everything the peer can make grow is limited
//! ([`Limits`](crate::limits::Limits)), over its whole way:
//!
//! | bytes | counted as | at the limit |
//! |---|---|---|
//! | of a message that arrived in part, and chunks put aside | input of the shard's [`Budget`](crate::budget::Budget) | a connection with an unfinished message is not read |
//! | of the longest reply that a message may get, before it is handed over | nothing yet: it must fit into what is left of the shard's budget, or be short | the message waits, and the connection is not read |
//! | of what the service keeps of the peer between messages | sessions of the shard's budget | the service refuses to keep more |
//! | of requests in work, with the replies they announced; of replies held back, queued and being sent; passed on | budget of the connection and of the shard | no further message is handed over, and the connection is not read |

use std::rc::Rc;

use crate::cutter::{Cutter, Direct};
use crate::deferred::{Answer, Delivery};
use crate::engine::Reading;
use crate::env::Env;
use crate::error::CloseReason;
use crate::limits::{Limits, SomeTime, Time};
use crate::outgoing::{Exchange, ExchangeRequest, ExchangeWork, HangUp, Upstream};
use crate::output::{Output, SendBatch, Spares};
use crate::pool::Chunk;
use crate::service::{ConnKey, EXPECTED_REPLY_BYTES, Peer, Refused, ReplyEnd, Service, SessionState};
use crate::session::{OnShard, Panicked, ServiceInfo, Session, SessionOf};
use crate::shares::Share;

mod deadlines;
mod files;
mod held;
pub(crate) mod input;
mod replies;

pub(crate) use held::HeldReplies;
pub(crate) use input::Aside;
use input::DIRECT_BYTES_MIN;

/// State of one connection, apart from its socket. Most connections of a server are idle, so each byte here is one of the
/// price of that: what is empty unless something goes on is in a box, which the shard keeps for the next connection.
///
/// Connections of all services are of one type, which is always in a box: the type parameter names what lies at the end of its
/// memory, and is another one only while the connection is made.
pub struct Connection<T: ?Sized = dyn Session> {
    /// Of its service.
    info: Rc<ServiceInfo>,
    peer: Peer,
    key: ConnKey,
    /// Whose limits it has.
    listener: u32,
    cutter: Cutter,
    output: Output,
    /// A batch is with the engine: no second one until it is sent, so that replies stay whole and in order.
    sending: bool,
    sending_bytes: usize,
    /// Bytes of the batch that are sent. Their memory is free when all of the batch is sent.
    sent_of_batch: u32,
    memory: Memory,
    /// What waits because replies do, or because memory is short. There while memory is short for it, or chunks wait.
    aside: Option<Box<Aside>>,
    /// Replies that wait for an earlier one, or for a gate. There while some do.
    held: Option<Box<HeldReplies>>,
    /// Requests in work, and what their replies need as far as it was announced.
    work_bytes: usize,
    /// What was passed on and is not yet counted by the outgoing connection of the exchange.
    passing_bytes: usize,
    /// What the shard's budget knows of this connection: what it owes, whenever that is asked.
    counted_bytes: usize,
    /// What the service keeps of the peer, as the shard's budget knows it.
    session_bytes: u32,
    /// The longest deferred reply so far, or what fits in here: what the next one is assumed to need.
    expected_bytes: u32,
    next_ticket: u64,
    /// It wraps around.
    messages: u32,
    share: Share,
    deferred: u32,
    /// The service gave tasks to the threads that may block.
    blocks: bool,
    /// A part of a file is being read for a reply, or waits to be read, since then.
    reading_file: SomeTime,
    /// It is among those that go on when there is room for operations on files.
    waits_for_files: bool,
    /// The last words to the peer, while some of them are still to come.
    last_words: Option<Box<LastWords>>,
    exchange: Exchange,
    eof: bool,
    closing: Option<CloseReason>,
    /// Short messages after which no long one is expected any more.
    heads_left: u8,
    /// The service wants no waiting for the peer at the end, and the peer has sent nothing that stands against it.
    at_once: bool,
    received_bytes: u64,
    sent_bytes: u64,
    last_activity: Time,
    last_send_progress: Time,
    /// What the service has of it.
    session: T,
}

/// The message of the last words to a peer, and answers that are still to come for it.
struct LastWords {
    ticket: u64,
    awaiting: u32,
}

/// Whether the connection is read while memory for unfinished messages is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// There was room whenever it needed some.
    Enough,
    /// It is not read, and waits for its turn.
    Waiting,
    /// It is one of the few that are read to the end of their message.
    Pass,
}

impl Connection {
    /// A fresh connection; the service may refuse it.
    ///
    /// # Errors
    ///
    /// [`Refused`], also if the service panicked.
    pub fn new<S: Service>(
        on: impl Into<OnShard<S>>,
        peer: Peer,
        key: ConnKey,
        now: Time,
    ) -> Result<Box<Self>, Refused> {
        let on = on.into();
        Ok(Box::new(Connection {
            info: Rc::clone(on.info()),
            peer,
            key,
            listener: u32::MAX,
            cutter: Cutter::default(),
            output: Output::default(),
            sending: false,
            sending_bytes: 0,
            sent_of_batch: 0,
            memory: Memory::Enough,
            aside: None,
            held: None,
            work_bytes: 0,
            passing_bytes: 0,
            counted_bytes: 0,
            session_bytes: 0,
            expected_bytes: EXPECTED_REPLY_BYTES as u32,
            next_ticket: 0,
            messages: 0,
            share: Share::default(),
            deferred: 0,
            blocks: false,
            reading_file: SomeTime::NONE,
            waits_for_files: false,
            last_words: None,
            exchange: Exchange::default(),
            eof: false,
            closing: None,
            heads_left: 0,
            at_once: false,
            received_bytes: 0,
            sent_bytes: 0,
            last_activity: now,
            last_send_progress: now,
            session: SessionOf::open(on, &peer)?,
        }))
    }

    /// The connection with the limits of this listener; with those of the server unless said otherwise.
    pub fn of_listener(mut self: Box<Self>, listener: u32) -> Box<Self> {
        self.listener = listener;
        self
    }

    /// The limits of its listener.
    #[inline]
    pub fn limits<'e>(&self, env: &'e Env) -> &'e Limits {
        env.limits.of(self.listener)
    }

    /// Takes bytes that were received. Calls the service for every message that is now whole.
    pub fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        self.note_received(chunk.len(), env);
        if self.closing.is_some() || self.eof {
            self.at_once = false;
            return;
        }
        if self.is_stalled(env) || !self.has_none_aside() {
            self.stall(chunk, env);
            self.wait_for_files(env);
            return;
        }
        self.process(chunk, env);
    }

    fn note_received(&mut self, bytes: usize, env: &Env) {
        self.received_bytes += bytes as u64;
        env.stats.bytes_in.add(bytes as u64);
        self.last_activity = env.now;
        self.cutter.note_heard(env.now);
    }

    /// True while the buffer of a long message is lent, or [`Connection::lend_buffer`] lends it now. The memory for that is
    /// counted from here on.
    pub fn may_lend(&mut self, bytes_min: usize, env: &mut Env) -> bool {
        self.wants_bytes(env) && self.cutter.may_lend(bytes_min, &mut self.memory.room(env))
    }

    /// Lends the buffer of a long message to be received into, if at least `bytes_min` bytes are to come or it was lent for
    /// this message before. Until [`Connection::received_direct`] nothing else may be received.
    pub fn lend_buffer(&mut self, bytes_min: usize, env: &mut Env) -> Option<Direct> {
        if !self.wants_bytes(env) {
            return None;
        }
        self.cutter.direct(bytes_min, &mut self.memory.room(env))
    }

    /// Takes the lent buffer back, with `bytes` bytes that were received into it.
    pub fn received_direct(&mut self, direct: Direct, bytes: usize, env: &mut Env) {
        if bytes > 0 {
            self.note_received(bytes, env);
        }
        let message = self.cutter.give_back(direct, bytes, &mut self.memory.room(env));
        if self.closing.is_some() || self.eof {
            self.at_once = false;
            self.reset_input(env);
            return;
        }
        if let Some(message) = message {
            self.call_assembled(message, env);
            self.message_ends(env);
        } else if bytes > 0 {
            self.bound_input(env);
        }
        self.recount(env);
    }

    /// The peer sends nothing more. What it sent is still answered.
    pub fn peer_closed(&mut self, env: &mut Env) {
        self.eof = true;
        self.finish_input(env);
        self.recount(env);
    }

    /// No further requests are taken; everything received is answered, then the connection closes.
    pub fn drain(&mut self, env: &mut Env) {
        if self.closing.is_none() && self.cutter.since().is_none() && self.has_none_aside() {
            self.close(CloseReason::Drained, env);
        }
    }

    /// Delivers a deferred answer. False if no message waits for it.
    pub(crate) fn answer(&mut self, ticket: u64, work_bytes: usize, answer: Answer, env: &mut Env) -> bool {
        if self.deferred == 0 {
            return false;
        }
        let was_stalled = self.is_stalled(env);
        self.deferred -= 1;
        self.work_bytes -= work_bytes;
        if matches!(answer, Answer::Abandoned) {
            // This holds for an end that waits for the answers, too: it is no longer an orderly one.
            if self.waits_for_answers() || self.closing_gently() {
                self.closing = Some(CloseReason::Abandoned);
                self.last_words = None;
            }
            self.close(CloseReason::Abandoned, env);
        } else if self.closing.is_none() || self.closing_gently() || self.last_words.is_some() {
            self.place_answer(ticket, answer, env);
        }
        self.resume(was_stalled, env);
        true
    }

    /// A deferred answer that comes after nothing can be sent any more, and before the [end](Self::end).
    pub(crate) fn answered_too_late(&mut self, work_bytes: usize, env: &mut Env) {
        self.deferred = self.deferred.saturating_sub(1);
        self.work_bytes -= work_bytes;
        self.recount(env);
    }

    /// Delivers a deferred answer as a shard does. False, and nothing happens, if it is for another connection (the one
    /// that had this place before): then the caller gives its work back by
    /// [`Budget::orphan_done`](crate::budget::Budget::orphan_done). False as well if no message waits for it.
    pub fn deliver(&mut self, delivery: Delivery, env: &mut Env) -> bool {
        delivery.key == self.key && self.answer(delivery.ticket, delivery.work_bytes, delivery.answer, env)
    }

    /// Lets the replies go whose gates have opened.
    pub fn open_gates(&mut self, env: &mut Env) {
        let was_stalled = self.is_stalled(env);
        self.release_held(env);
        self.resume(was_stalled, env);
    }

    /// Goes on after the connection was not read for lack of memory:
    /// [`Budget::next_to_proceed`](crate::budget::Budget::next_to_proceed) named it.
    pub fn proceed(&mut self, env: &mut Env) {
        if env.budget.is_reply_turn(self.key) {
            if let Some(aside) = &mut self.aside {
                aside.is_queued = false;
                // Where its own replies are in the way, it asks once more when these are gone.
                self.resume(true, env);
            }
            env.budget.end_reply_turn();
            return;
        }
        if self.memory != Memory::Waiting {
            return;
        }
        self.memory = Memory::Enough;
        if self.is_closing() || self.cutter.is_idle() {
            // What arrived when it stopped ended its message.
            self.leave_aside(env);
            return;
        }
        let unread_since = self.aside.as_ref().map_or(env.now, |aside| aside.unread_since);
        // With a pass also where there is room again: it might not be enough.
        if env.budget.take_pass(self.state().is_stranger) {
            self.memory = Memory::Pass;
            self.watch_pass(env.now);
        } else if env.budget.is_input_full(&env.limits) {
            self.wait_for_memory(env);
            self.aside_mut(env).unread_since = unread_since;
            return;
        }
        // Its peer was not read until now. The time of its message goes on where it stopped, so that one that trickles does
        // not come here for ever.
        self.cutter.put_off(env.now.since(unread_since));
        self.take_up(env);
    }

    /// Goes on with input that was put aside because the connection had had its share of a turn:
    /// [`Env::next_to_go_on`] named it.
    pub fn go_on(&mut self, env: &mut Env) {
        if let Some(aside) = &mut self.aside {
            aside.gave_way = false;
            self.resume(true, env);
        }
    }

    /// Goes on after no connection was read because the shard was
    /// [overfull](crate::budget::Budget::is_overfull): its peer could not send.
    pub fn read_again(&mut self, env: &Env) {
        self.cutter.restart(env.now);
        self.last_activity = env.now;
        self.watch_pass(env.now);
    }

    /// Tells the service what happened to its exchange, if one is open.
    pub fn upstream(&mut self, event: Upstream, env: &mut Env) {
        if !self.exchange.open {
            return;
        }
        let was_stalled = self.is_stalled(env);
        if matches!(event, Upstream::Failed(_)) {
            self.exchange = Exchange { hold: self.exchange.hold, ..Exchange::default() };
        }
        if !matches!(event, Upstream::ClientEnded) {
            self.last_activity = env.now;
        }
        self.call_upstream(event, env);
        self.resume(was_stalled, env);
    }

    /// The other end of the exchange takes no more bytes for now, or does again. While it does not, no message is handed
    /// over.
    pub fn set_full(&mut self, full: bool, env: &mut Env) {
        let was_stalled = self.is_stalled(env);
        self.exchange.full = full && self.exchange.open;
        self.tell_of_room(env);
        self.resume(was_stalled, env);
    }

    /// The shard took `bytes` of what was [passed on](crate::Reply::pass), and counts them from now on. If they
    /// are too many, [`set_full`](Self::set_full) said so before.
    pub fn passed(&mut self, bytes: usize, env: &mut Env) {
        let was_stalled = self.is_stalled(env);
        self.passing_bytes -= bytes;
        self.tell_of_room(env);
        self.resume(was_stalled, env);
    }

    /// Tells the service that it may pass on bytes again, before any message that waits for the same.
    fn tell_of_room(&mut self, env: &mut Env) {
        if self.exchange.refused && !self.is_exchange_full(env) {
            self.exchange.refused = false;
            self.call_upstream(Upstream::Room, env);
        }
    }

    /// True while the other end of the exchange is not to be read: the service could not pass on what it was told.
    pub(crate) fn awaits_room(&self) -> bool {
        self.exchange.refused
    }

    fn is_exchange_full(&self, env: &Env) -> bool {
        self.exchange.full || self.is_exchange_crowded(env)
    }

    /// True while too much is on its way to the outgoing connection.
    #[inline]
    fn is_exchange_crowded(&self, env: &Env) -> bool {
        self.passing_bytes > 0 && self.passing_bytes > self.limits(env).out_queue_bytes_max
    }

    /// Everything that waits to be sent, unless a batch is under way already; up to a range of a file that is not read.
    pub fn take_batch(&mut self, now: Time, spares: &mut Spares) -> Option<SendBatch> {
        if !self.has_output() {
            return None;
        }
        let batch = self.output.take_ready(spares);
        self.sending = true;
        self.sending_bytes = batch.len();
        self.last_send_progress = now;
        Some(batch)
    }

    /// The engine sent `bytes` more; `done` when the batch is complete.
    pub fn sent(&mut self, bytes: usize, done: bool, env: &mut Env) {
        let was_stalled = self.is_stalled(env);
        self.sending_bytes -= bytes;
        self.sent_bytes += bytes as u64;
        env.stats.bytes_out.add(bytes as u64);
        if bytes > 0 {
            self.last_activity = env.now;
            self.last_send_progress = env.now;
        }
        if done {
            (self.sending, self.sent_of_batch) = (false, 0);
        } else {
            self.sent_of_batch = self.sent_of_batch.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        }
        self.resume(was_stalled, env);
    }

    /// Bytes moved without passing through here: the kernel half answered.
    pub fn note_activity(&mut self, now: Time) {
        self.last_activity = now;
    }

    /// True while further bytes may be received.
    pub fn wants_bytes(&self, env: &Env) -> bool {
        self.closing.is_none()
            && !self.eof
            && self.has_none_aside()
            && !self.waits_for_memory()
            && self.is_in_turn(env)
            && !self.is_full(env)
    }

    /// Whether further bytes may be received, and how.
    pub(crate) fn reading(&mut self, env: &mut Env) -> Reading {
        self.wait_for_files(env);
        if !self.wants_bytes(env) {
            Reading::Off
        } else if self.may_lend(DIRECT_BYTES_MIN, env) {
            Reading::Direct
        } else if self.expects_long() || env.budget.is_overfull() {
            Reading::Head
        } else {
            Reading::On
        }
    }

    /// True when long messages came lately: the next one is best received by its head alone, and then into its buffer.
    pub fn expects_long(&self) -> bool {
        self.heads_left > 0
    }

    /// The reason to close for, once every reply that is due has been sent.
    pub fn finished(&self) -> Option<CloseReason> {
        let waits = self.sending || !self.output.is_empty() || self.waits_for_answers();
        self.closing.filter(|_| !waits)
    }

    /// True if the end of the connection must be a reset now: replies are left that TCP has not taken (those that wait for an
    /// answer are none yet), or an orderly end would pass for the end of a reply of which a part is missing.
    pub fn needs_reset(&self) -> bool {
        let is_cut_short = match self.state().reply_end {
            ReplyEnd::Marked => false,
            ReplyEnd::Close => self.finished().is_none() || !self.closing_gently(),
            ReplyEnd::CutShort => true,
        };
        is_cut_short || self.sending || !self.output.is_empty()
    }

    /// True once the connection takes no more requests.
    pub fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// True when the connection may be closed with the last reply: the service said that the peer sends nothing more,
    /// and it has not.
    pub fn closes_at_once(&self) -> bool {
        self.at_once
    }

    /// True when the peer has ended its direction.
    pub fn saw_eof(&self) -> bool {
        self.eof
    }

    /// True when the peer is owed nothing and owes nothing: at a message boundary, everything answered and sent.
    pub fn is_settled(&self) -> bool {
        !self.sending && self.owes_only_the_batch()
    }

    /// True when the connection will be [settled](Self::is_settled) as soon as the batch with the engine is sent.
    pub fn owes_only_the_batch(&self) -> bool {
        self.closing.is_none()
            && !self.eof
            && self.output.is_empty()
            && self.deferred == 0
            && self.held.is_none()
            && !self.exchange.open
            && !self.exchange.hold
            && self.is_between_messages()
            && self.has_none_aside()
    }

    /// True when the connection will be [finished](Self::finished) as soon as the batch with the engine is sent.
    pub fn ends_with_the_batch(&self) -> bool {
        self.closing.is_some() && self.output.is_empty() && !self.waits_for_answers()
    }

    /// Messages handed to the service so far, modulo 2^32.
    pub fn messages(&self) -> u32 {
        self.messages
    }

    /// Bytes received so far.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Bytes sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Bytes of replies this connection holds: waiting, being sent, or held back. A range of a file holds none of its bytes
    /// before it is read; all those that wait to be sent count together with the two windows that the connection reads.
    pub fn queued_bytes(&self) -> usize {
        let held_bytes = self.held.as_ref().map_or(0, |held| held.bytes);
        self.output.memory_bytes() + self.output.window_bytes() + self.sending_bytes + held_bytes
    }

    /// Bytes that count towards [`connection_bytes_max`](crate::limits::Limits::connection_bytes_max): replies, requests in
    /// work with the replies they announced, and what was passed on and no outgoing connection counts yet; of replies held
    /// back, and of a batch that is sent in part, all memory that they take.
    pub fn owed_bytes(&self) -> usize {
        let extra_bytes = self.held.as_ref().map_or(0, |held| held.extra_bytes()) + self.sent_of_batch as usize;
        self.queued_bytes() + extra_bytes + self.work_bytes + self.passing_bytes
    }

    /// Bytes that the service keeps of the peer between messages.
    pub fn session_bytes(&self) -> usize {
        self.session_bytes as usize
    }

    /// Places in the order of replies: one for each message with an unanswered reply, one for all replies between two that
    /// wait for one gate each.
    pub fn held_replies(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.places.len())
    }

    /// Bytes of input this connection keeps: of a message that arrived in part, and put aside. None once it closes. Looks
    /// at every chunk put aside, so it is for tests and simulators.
    pub fn unfinished_bytes(&self) -> usize {
        let aside = self.aside.iter().flat_map(|aside| aside.message.iter().chain(&aside.chunks));
        self.cutter.unfinished_bytes() + aside.map(|chunk| chunk.len()).sum::<usize>()
    }

    /// True when replies wait that can be sent, and none is being sent.
    pub fn has_output(&self) -> bool {
        !self.sending && self.output.is_ready()
    }

    /// Ends the connection: the service gets its state back.
    pub fn end(mut self: Box<Self>, env: &mut Env) {
        self.reset_input(env);
        env.budget.end_replies(self.key, self.counted_bytes, self.work_bytes);
        env.budget.recount_session(self.session_bytes(), 0);
        let Self { info, session, .. } = &mut *self;
        if info.guard(|| session.close()) == Err(Panicked) {
            env.stats.panics.add(1);
        }
    }

    fn is_between_messages(&self) -> bool {
        self.cutter.is_idle()
    }

    /// True while an end has to wait for work that others still do for the connection.
    fn waits_for_answers(&self) -> bool {
        self.last_words.is_some() || self.closing_gently() && self.is_worked_for()
    }

    fn is_worked_for(&self) -> bool {
        self.deferred > 0 || self.exchange.open || self.held.is_some()
    }

    /// True while requests of the peer are not answered: others work on them, or they wait.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.is_worked_for() || !self.has_none_aside()
    }

    fn closing_gently(&self) -> bool {
        use CloseReason::{Drained, PeerClosed, PeerClosedMidMessage, Service};
        matches!(self.closing, Some(Drained | PeerClosed | PeerClosedMidMessage | Service))
    }

    fn close(&mut self, reason: CloseReason, env: &mut Env) {
        if self.closing.is_none() {
            self.closing = Some(reason);
            self.at_once &= self.has_none_aside();
            self.reset_input(env);
        }
    }

    /// The service panicked: nothing of this connection is handed to it any more, and what it had begun to say is gone.
    fn close_for_panic(&mut self, env: &mut Env) {
        env.stats.panics.add(1);
        self.end_for_panic(env);
    }

    /// Ends it without what the service still owes: last words do not come any more, either.
    fn end_for_panic(&mut self, env: &mut Env) {
        if self.closing_gently() || self.last_words.take().is_some() {
            self.closing = Some(CloseReason::Panicked);
        }
        self.drop_held(env);
        if std::mem::take(&mut self.exchange).open {
            // What the other end sends is not told to the service any more.
            let request = ExchangeRequest::HangUp(HangUp::Reset);
            env.exchange_work.push(ExchangeWork::Request { from: self.key, request });
        }
        self.close(CloseReason::Panicked, env);
    }

    /// Tells the shard's budget what this connection holds of replies now. To be called whenever that may have changed, before
    /// the connection is asked whether it is stalled.
    fn recount(&mut self, env: &mut Env) {
        let owed_bytes = self.owed_bytes();
        if owed_bytes != self.counted_bytes {
            env.budget.recount_replies(self.counted_bytes, owed_bytes);
            self.counted_bytes = owed_bytes;
        }
        // What it passed on is owed by the outgoing connection, which returns the place when all of that is sent.
        if owed_bytes == 0 && self.deferred == 0 && !self.exchange.open {
            env.budget.return_reply_pass(self.key);
        }
        self.wait_for_files(env);
    }

    /// True while no message is handed over. One chunk may be received all the same when only an exchange is in the
    /// way: to stop and start receiving for each would cost more, and the end of the stream is heard of.
    #[inline]
    fn is_stalled(&self, env: &Env) -> bool {
        self.exchange.hold || self.waits_for_reply() || self.is_exchange_full(env) || self.is_full(env)
    }

    /// Whether a message may be handed over now: it and its reply are short, or there is room for both. Else the connection
    /// waits, and its owner keeps the message.
    #[inline]
    fn admits(&mut self, message: &[u8], env: &mut Env) -> bool {
        !env.budget.asks_for_replies(&env.limits) || self.admits_reply(message, env)
    }

    #[inline(never)]
    fn admits_reply(&mut self, message: &[u8], env: &mut Env) -> bool {
        let session = &mut self.session;
        // A panic here is not one of the message: the call tells whether the service still works.
        let reply_bytes = self.info.guard(|| session.reply_bytes(message)).unwrap_or(0);
        // It may stay in work.
        let message_bytes = if message.len() > EXPECTED_REPLY_BYTES { message.len() } else { 0 };
        let bytes = reply_bytes.saturating_add(message_bytes);
        let admits = env.budget.admits_reply(self.key, bytes, &env.limits);
        env.stats.reply_waits.add(u64::from(!admits));
        admits
    }

    /// What the service says of its state; the default after a panic.
    fn state(&self) -> SessionState {
        let session = &self.session;
        self.info.guard(|| session.state()).unwrap_or_default()
    }

    /// True while its next message waits for room for the reply.
    #[inline]
    fn waits_for_reply(&self) -> bool {
        self.aside.as_ref().is_some_and(|aside| aside.is_queued)
    }

    /// Asked several times for each message, and mostly while the peer is owed nothing.
    #[inline]
    fn is_full(&self, env: &Env) -> bool {
        debug_assert_eq!(self.counted_bytes, self.owed_bytes(), "it was recounted");
        let owes_nothing = self.counted_bytes == 0 && self.deferred == 0;
        match owes_nothing && self.limits(env).deferred_max > 0 {
            true => self.info.waits_for_files(env),
            false => self.is_full_owing(env),
        }
    }

    #[inline(never)]
    fn is_full_owing(&self, env: &Env) -> bool {
        let (limits, owed_bytes) = (self.limits(env), self.counted_bytes);
        // What is queued is a part of what is owed; of a range of a file all bytes wait for the peer, too.
        owed_bytes > limits.out_queue_bytes_max && self.queued_bytes() > limits.out_queue_bytes_max
            || self.output.len() + self.sending_bytes > limits.out_queue_bytes_max
            // With an answer outstanding, it is looked at again when that comes.
            || self.blocks && self.deferred > 0 && env.is_tasks_full()
            || self.info.waits_for_files(env)
            || self.deferred >= limits.deferred_max
            || owed_bytes >= limits.connection_bytes_max && owed_bytes > 0
            // With a share of its own in the sum, it is looked at again when that share is gone.
            || owed_bytes > 0 && env.budget.is_full(&env.limits)
    }
}
