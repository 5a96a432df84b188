//! Calls of the service, and the order in which its replies leave.

use super::held::Held;
use super::input::{DIRECT_BYTES_MIN, HEADS};
use super::{Connection, LastWords};
use crate::budget::STRANGER_REPLIES_MAX;
use crate::buffers::Buffer;
use crate::deferred::{Answer, Target};
use crate::env::Env;
use crate::error::CloseReason;
use crate::gates::GateSet;
use crate::outgoing::{Exchange, Upstream};
use crate::output::Output;
use crate::pool::Chunk;
use crate::service::{Message, Order, Reply, Said, SessionState, Sink};
use crate::session::{Panicked, Session};

/// What a call of the service left behind, apart from the bytes of its replies.
struct Called {
    deferred: u32,
    gates: GateSet,
    close: bool,
    at_once: bool,
    awaits_rest: bool,
    exchange: Exchange,
}

/// Where a call writes its replies.
enum Destination<'a> {
    /// Behind what waits to be sent.
    Queue,
    /// A place of its own.
    Place(&'a mut Output),
}

impl Connection {
    /// Calls the service with a reply, and counts what it deferred: also if it panicked then, because the answers come all
    /// the same. After a panic nothing of what it wrote is left.
    #[inline]
    fn with_reply(
        &mut self,
        ticket: u64,
        message_bytes: usize,
        into: Destination<'_>,
        env: &mut Env,
        call: impl FnOnce(&mut dyn Session, &mut Reply<'_>) -> SessionState,
    ) -> Result<Called, Panicked> {
        // What comes with a message is taken, because none is handed over while the exchange is full.
        let passing_bytes_max = if message_bytes > 0 { usize::MAX } else { self.limits(env).out_queue_bytes_max };
        let output = match into {
            Destination::Queue => &mut self.output,
            Destination::Place(output) => output,
        };
        let before = output.len();
        let target = Target::Stream { key: self.key, ticket, work_bytes: 0 };
        let mut said = Said::new(self.info.framing, target, message_bytes);
        said.expected_bytes = self.expected_bytes as usize;
        said.exchange = self.exchange;
        (said.passing_bytes, said.passing_bytes_max) = (self.passing_bytes, passing_bytes_max);
        (said.session_bytes, said.listener) = (self.session_bytes as usize, self.listener);
        let mut reply = Reply::new(Sink::Stream(&mut *output), env, &mut said);
        let session = &mut self.session;
        let state = self.info.guard(|| call(session, &mut reply));
        self.deferred += said.deferred;
        self.work_bytes += said.work_bytes;
        self.passing_bytes = said.passing_bytes;
        self.blocks |= said.blocks;
        if state.is_err() {
            output.truncate(before);
        }
        // After a panic the state is kept until the connection has ended, and counts until then.
        let SessionState { bytes, awaits_rest, .. } = state.unwrap_or_else(|Panicked| self.state());
        let session_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if session_bytes != self.session_bytes {
            env.budget.recount_session(self.session_bytes as usize, session_bytes as usize);
            self.session_bytes = session_bytes;
        }
        let called = state.map(|_| Called {
            deferred: said.deferred,
            gates: said.gates,
            close: said.close,
            at_once: said.at_once,
            awaits_rest,
            exchange: said.exchange,
        });
        env.count_copies();
        called
    }

    pub(super) fn call_assembled(&mut self, message: Buffer, env: &mut Env) {
        env.stats.messages_assembled.add(1);
        self.heads_left = match message.len() {
            DIRECT_BYTES_MIN.. => HEADS,
            _ => self.heads_left.saturating_sub(1),
        };
        if !self.admits(&message, env) {
            return self.keep_message(Chunk::from_buffer(message), env);
        }
        if self.info.keeps_messages {
            // Now, as `Message::keep` cannot reach the pool from a buffer.
            let short = env.pool.keep_short(&message);
            let chunk = short.unwrap_or_else(|| Chunk::from_buffer(message));
            self.call(&chunk, Some((&chunk, 0)), env);
        } else {
            self.call(&message, None, env);
        }
    }

    pub(super) fn call(&mut self, bytes: &[u8], origin: Option<(&Chunk, usize)>, env: &mut Env) {
        env.stats.messages.add(1);
        self.messages = self.messages.wrapping_add(1);
        let message = Message { bytes, origin, peer: self.peer, key: self.key };
        let close = self.call_in_order(bytes.len(), env, |session, reply| session.call(&message, reply));
        self.close_if_asked(close, env);
        // Behind what it does not read more of its messages would wait, a receive slot full of them.
        if self.queued_bytes() > STRANGER_REPLIES_MAX && self.state().is_stranger {
            self.close(CloseReason::ReplyLimit, env);
        }
    }

    /// Calls the service with a reply behind all others. What it says leaves at once if no earlier place waits and no gate is
    /// named, else in a place of its own. Returns the wish to close, if there is one, and whether at once.
    #[inline]
    fn call_in_order(
        &mut self,
        message_bytes: usize,
        env: &mut Env,
        call: impl FnOnce(&mut dyn Session, &mut Reply<'_>) -> SessionState,
    ) -> Option<bool> {
        let ticket = self.take_ticket();
        // Behind an unanswered message, replies wait in an output of their own.
        let mut behind = self.held.is_some().then(Output::default);
        let before = self.output.len();
        let into = behind.as_mut().map_or(Destination::Queue, Destination::Place);
        let Ok(called) = self.with_reply(ticket, message_bytes, into, env, call) else {
            self.close_for_panic(env);
            return None;
        };
        self.exchange = called.exchange;
        // Only a message says so: other calls do not prolong what an earlier one has.
        if called.awaits_rest && message_bytes > 0 {
            self.cutter.await_rest(env.now);
        }
        let close = called.close.then_some(called.at_once);
        let awaiting = if self.info.order == Order::Requests { called.deferred } else { 0 };
        if behind.is_none() && awaiting == 0 && called.gates.is_empty() {
            // What it says is where it belongs.
            return close;
        }
        // What was replied before deferring leads the deferred answer.
        let output = match behind {
            Some(output) => output,
            None if called.gates.closed(&env.gates).is_some() => self.output.split_off(before, &mut env.spares),
            None => Output::default(),
        };
        self.hold(Held::new(ticket, output, awaiting, called.gates), env);
        close
    }

    fn close_if_asked(&mut self, close: Option<bool>, env: &mut Env) {
        if let Some(at_once) = close {
            self.at_once = at_once;
            self.close(CloseReason::Service, env);
        }
    }

    fn take_ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// Puts a place behind those that wait already, if it has something to wait for, or something in it.
    fn hold(&mut self, held: Held, env: &mut Env) {
        if held.awaiting == 0 && held.output.is_empty() {
            return;
        }
        let replies = self.held.get_or_insert_with(|| env.spare_held.take());
        if replies.push(held, &mut env.spares) {
            self.release_held(env);
        }
    }

    /// Lets the places go that wait for nothing more. The first one that waits for a gate is named to the shard. If that
    /// gate never opens the connection closes, and no place goes any more.
    pub(super) fn release_held(&mut self, env: &mut Env) {
        while let Some(replies) = self.held.as_deref_mut()
            && let Some(first) = replies.places.front_mut().filter(|held| held.awaiting == 0)
        {
            if let Some(gate) = first.gates.closed(&env.gates) {
                if first.gates.is_lost(&env.gates) {
                    return self.end_for_panic(env);
                }
                if first.named.replace(gate) != Some(gate) {
                    env.gated.push((gate, self.key));
                }
                return;
            }
            if let Some(mark) = replies.marks.pop_front_if(|mark| mark.ticket == first.ticket) {
                if env.gates.is_open(mark.gate) {
                    continue;
                }
                replies.split_first(&mark, &mut self.output, &mut env.spares);
                continue;
            }
            replies.take_first(&mut self.output, &mut env.spares);
        }
        if self.held.as_ref().is_some_and(|replies| replies.places.is_empty()) {
            self.drop_held(env);
        }
        self.end_last_words();
    }

    /// The end of the connection waits no longer for last words that are all here, and behind no closed gate.
    fn end_last_words(&mut self) {
        if self.held.is_none() && self.last_words.as_ref().is_some_and(|words| words.awaiting == 0) {
            self.last_words = None;
        }
    }

    pub(super) fn place_answer(&mut self, ticket: u64, answer: Answer, env: &mut Env) {
        let mut output = Output::default();
        env.stats.replies_deferred.add(1);
        let into = Destination::Place(&mut output);
        let called = self.with_reply(ticket, 0, into, env, |session, reply| reply.answer(answer, session));
        let Ok(called) = called else { return self.close_for_panic(env) };
        self.exchange = called.exchange;
        let bytes = u32::try_from(output.memory_bytes()).unwrap_or(u32::MAX);
        self.expected_bytes = self.expected_bytes.max(bytes);
        if let Some(words) = self.last_words.as_mut().filter(|words| words.ticket == ticket) {
            words.awaiting = words.awaiting + called.deferred - 1;
        }
        if self.info.order == Order::Free {
            if self.held.is_none() && called.gates.closed(&env.gates).is_none() {
                self.output.append(output, &mut env.spares);
            } else {
                // Tickets of places ascend.
                let place = self.take_ticket();
                self.hold(Held::new(place, output, 0, called.gates), env);
            }
        } else {
            self.add_to_place(ticket, output, &called, env);
        }
        self.end_last_words();
        if called.close {
            self.close(CloseReason::Service, env);
        }
        if self.queued_bytes() + self.work_bytes > self.limits(env).connection_bytes_max.saturating_mul(2) {
            // Replies that were not announced: the work was done before their size was known.
            self.drop_replies(env);
            self.closing = None;
            self.close(CloseReason::ReplyLimit, env);
        }
    }

    /// Adds what was answered to the place that waits for it.
    fn add_to_place(&mut self, ticket: u64, output: Output, called: &Called, env: &mut Env) {
        let Some(replies) = self.held.as_deref_mut() else { return };
        // Places are in the order of their messages.
        let at = replies.places.partition_point(|held| held.ticket < ticket);
        let Some(place) = replies.places.get_mut(at).filter(|held| held.ticket == ticket && held.awaiting > 0) else {
            return;
        };
        replies.bytes += output.memory_bytes();
        place.output.append(output, &mut env.spares);
        place.awaiting = place.awaiting + called.deferred - 1;
        place.gates.add_all(&called.gates);
        let (answered, empty) = (place.awaiting == 0, place.output.is_empty());
        replies.count_slack(at);
        if answered && at > 0 {
            // Of two neighbours one is unanswered, or they wait for different gates: however many answers come behind one
            // that does not, they take few places and little memory.
            if empty {
                replies.remove(at);
            } else {
                replies.join(at, &mut env.spares);
            }
            replies.join(at - 1, &mut env.spares);
        }
        self.release_held(env);
    }

    /// Throws away the replies that are not with the engine.
    fn drop_replies(&mut self, env: &mut Env) {
        self.drop_held(env);
        std::mem::take(&mut self.output).recycle(&mut env.spares);
        self.last_words = None;
    }

    pub(super) fn drop_held(&mut self, env: &mut Env) {
        if let Some(mut replies) = self.held.take() {
            replies.clear(&mut env.spares);
            if replies.is_worth_keeping() {
                env.spare_held.give(replies);
            }
        }
    }

    pub(super) fn call_upstream(&mut self, event: Upstream, env: &mut Env) {
        let close = self.call_in_order(0, env, |session, reply| session.upstream(event, reply));
        self.close_if_asked(close, env);
    }

    /// Closes for what the peer did; the service may tell it. The end waits for last words that come later.
    pub(super) fn refuse(&mut self, reason: CloseReason, env: &mut Env) {
        if reason == CloseReason::Panicked {
            return self.close_for_panic(env);
        }
        // An earlier reply is deferred, so last words could not be sent in order: close without any.
        if self.closing.is_none() && self.held.is_none() {
            let ticket = self.next_ticket;
            let deferred = self.deferred;
            self.call_in_order(0, env, |session, reply| session.refuse(reason, reply));
            if self.closing.is_some() {
                // It panicked, or a log that it named is lost.
                return;
            }
            self.last_words = Some(Box::new(LastWords { ticket, awaiting: self.deferred - deferred }));
            self.end_last_words();
        }
        self.close(reason, env);
    }
}
