//! A stream connection without a socket and without a clock: bytes in, messages to the service, replies out.
//!
//! ```text
//!   receive(chunk) ──► framing ──whole in the chunk──► Service::call ──► Output ──take_batch──► engine
//!                         │                                ▲                ▲
//!                         └─ in part ─► Assembly ──whole───┘                │
//!                                                 Deferred (other thread) ──┴─ held until its turn
//! ```
//!
//! A message that lies whole in a received chunk is handed over in place. One that does not is put together in a
//! buffer of the connection, so that between two turns no connection occupies a slot. Everything the peer can make
//! grow is limited ([`Limits`](crate::limits::Limits)): while the peer does not take its replies, its further
//! requests wait unprocessed and the socket is not read.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::assembly::{Assembly, Progress};
use crate::deferred::{Answer, Delivery, Target};
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::framing::{Frame, Framing};
use crate::limits::Time;
use crate::outgoing::{Exchange, Upstream};
use crate::output::{Output, SendBatch};
use crate::pool::Chunk;
use crate::service::{ConnKey, Message, Order, Peer, Refused, Reply, Service, Sink};

/// State of one connection, apart from its socket.
pub struct Connection<S: Service> {
    service: Arc<S>,
    state: S::Conn,
    peer: Peer,
    key: ConnKey,
    framing: Framing,
    order: Order,
    assembly: Assembly,
    output: Output,
    /// A batch is with the engine: no second one until it is sent, so that replies stay whole and in order.
    sending: bool,
    sending_bytes: usize,
    /// Chunks that wait because replies do.
    stalled: VecDeque<Chunk>,
    /// Replies that wait for an earlier, deferred one.
    held: VecDeque<Held>,
    held_bytes: usize,
    next_ticket: u64,
    deferred: u32,
    exchange: Exchange,
    eof: bool,
    closing: Option<CloseReason>,
    /// The service wants no waiting for the peer at the end, and the peer has sent nothing that stands against it.
    at_once: bool,
    received_bytes: u64,
    sent_bytes: u64,
    last_activity: Time,
    last_send_progress: Time,
}

/// A place in the order of replies.
struct Held {
    ticket: u64,
    output: Output,
    /// Answers that are still to come.
    awaiting: u32,
}

impl<S: Service> Connection<S> {
    /// A fresh connection; the service may refuse it.
    pub fn new(service: Arc<S>, peer: Peer, key: ConnKey, now: Time) -> Result<Self, Refused> {
        let state = service.accept(&peer)?;
        let (framing, order) = (service.framing(), service.order());
        Ok(Self {
            service,
            state,
            peer,
            key,
            framing,
            order,
            assembly: Assembly::default(),
            output: Output::default(),
            sending: false,
            sending_bytes: 0,
            stalled: VecDeque::new(),
            held: VecDeque::new(),
            held_bytes: 0,
            next_ticket: 0,
            deferred: 0,
            exchange: Exchange::default(),
            eof: false,
            closing: None,
            at_once: false,
            received_bytes: 0,
            sent_bytes: 0,
            last_activity: now,
            last_send_progress: now,
        })
    }

    /// Takes bytes that were received. Calls the service for every message that is now whole.
    pub fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        self.received_bytes += chunk.len() as u64;
        env.stats.bytes_in.add(chunk.len() as u64);
        self.last_activity = env.now;
        if self.closing.is_some() || self.eof {
            self.at_once = false;
            return;
        }
        if self.is_stalled(env) || !self.stalled.is_empty() {
            self.stall(chunk, env);
            return;
        }
        self.process(chunk, env);
    }

    /// The peer sends nothing more. What it sent is still answered.
    pub fn peer_closed(&mut self, env: &mut Env) {
        self.eof = true;
        self.finish_input(env);
    }

    /// No further requests are taken; everything received is answered, then the connection closes.
    pub fn drain(&mut self, env: &mut Env) {
        if self.closing.is_none() && self.assembly.is_idle() && self.stalled.is_empty() {
            self.close(CloseReason::Drained, env);
        }
    }

    /// Delivers a deferred answer. False if nobody waits for it.
    pub(crate) fn answer(&mut self, ticket: u64, answer: Answer, env: &mut Env) -> bool {
        if self.deferred == 0 {
            return false;
        }
        let was_stalled = self.is_stalled(env);
        self.deferred -= 1;
        if matches!(answer, Answer::Abandoned) {
            // Also at an end that waits for the answers: it is no longer an orderly one.
            if self.closing_gently() {
                self.closing = Some(CloseReason::Abandoned);
            }
            self.close(CloseReason::Abandoned, env);
        } else {
            self.place_answer(ticket, answer, env);
        }
        self.resume(was_stalled, env);
        true
    }

    /// Delivers a deferred answer as a shard does. False, and nothing happens, if it is for another connection (the one
    /// that had this place before) or nobody waits for it.
    pub fn deliver(&mut self, delivery: Delivery, env: &mut Env) -> bool {
        delivery.key == self.key && self.answer(delivery.ticket, delivery.answer, env)
    }

    /// Tells the service what happened to its exchange, if one is open.
    pub fn upstream(&mut self, event: Upstream, env: &mut Env) {
        if !self.exchange.open {
            return;
        }
        let was_stalled = self.is_stalled(env);
        if matches!(event, Upstream::Failed(_)) {
            self.exchange = Exchange { open: false, full: false, ..self.exchange };
        }
        if !matches!(event, Upstream::ClientEnded) {
            self.last_activity = env.now;
        }
        let mut reply = Reply {
            framing: self.framing,
            sink: Sink::Stream(&mut self.output),
            env,
            target: Target::Stream { key: self.key, ticket: self.next_ticket },
            deferred: 0,
            close: false,
            at_once: false,
            exchange: self.exchange,
        };
        self.service.upstream(&mut self.state, event, &mut reply);
        let (close, at_once) = (reply.close, reply.at_once);
        self.exchange = reply.exchange;
        env.count_copies();
        if close {
            self.at_once = at_once;
            self.close(CloseReason::Service, env);
        }
        self.resume(was_stalled, env);
    }

    /// The other end of the exchange takes no more bytes for now, or does again. While it does not, no message is handed
    /// over.
    pub fn set_full(&mut self, full: bool, env: &mut Env) {
        let was_stalled = self.is_stalled(env);
        self.exchange.full = full && self.exchange.open;
        self.resume(was_stalled, env);
    }

    /// Everything that waits to be sent, unless a batch is under way already.
    pub fn take_batch(&mut self, now: Time) -> Option<SendBatch> {
        if self.sending || self.output.is_empty() {
            return None;
        }
        self.sending = true;
        self.sending_bytes = self.output.len();
        self.last_send_progress = now;
        Some(self.output.take())
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
            self.sending = false;
        }
        self.resume(was_stalled, env);
    }

    /// Checks the clock. A reason means: end it now, without waiting for the peer.
    pub fn tick(&mut self, env: &mut Env) -> Option<CloseReason> {
        let limits = &env.limits;
        let overdue = |since: Time, ms: u64| ms != 0 && env.now > since.plus_ms(ms);
        if self.sending && overdue(self.last_send_progress, limits.send_timeout_ms) {
            return Some(CloseReason::SendTimeout);
        }
        if self.closing.is_none() {
            // Who is not read cannot send the rest.
            let reads = self.stalled.is_empty() && !self.is_stalled(env);
            if !self.assembly.is_idle() && reads && overdue(self.assembly.started, limits.assembly_timeout_ms) {
                self.refuse(CloseReason::AssemblyTimeout, env);
            } else if self.deferred == 0 && !self.exchange.open && overdue(self.last_activity, limits.idle_timeout_ms) {
                self.close(CloseReason::IdleTimeout, env);
            }
        }
        None
    }

    /// Bytes moved without passing through here: the kernel half answered.
    pub fn note_activity(&mut self, now: Time) {
        self.last_activity = now;
    }

    /// True while further bytes may be received.
    pub fn wants_bytes(&self, env: &Env) -> bool {
        self.closing.is_none() && !self.eof && self.stalled.is_empty() && !self.is_full(env)
    }

    /// The reason to close for, once every reply that is due has been sent.
    pub fn finished(&self) -> Option<CloseReason> {
        let waits = self.sending || !self.output.is_empty() || self.waits_for_answers();
        self.closing.filter(|_| !waits)
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
            && !self.exchange.open
            && !self.exchange.hold
            && self.assembly.is_idle()
            && self.stalled.is_empty()
    }

    /// True when the connection will be [finished](Self::finished) as soon as the batch with the engine is sent.
    pub fn ends_with_the_batch(&self) -> bool {
        self.closing.is_some() && self.output.is_empty() && !self.waits_for_answers()
    }

    /// Messages handed to the service so far.
    pub fn messages(&self) -> u64 {
        self.next_ticket
    }

    /// Bytes received so far.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Bytes sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Bytes of replies this connection holds: waiting, being sent, or held back by an earlier one that is deferred.
    pub fn queued_bytes(&self) -> usize {
        self.output.len() + self.sending_bytes + self.held_bytes
    }

    /// Places in the order of replies: one for each message with a deferred reply, one for all replies between two.
    pub fn held_replies(&self) -> usize {
        self.held.len()
    }

    /// Bytes of input this connection keeps: of a message that arrived in part, and put aside while replies wait. None
    /// once it closes. Looks at every chunk put aside, so it is for the moment when memory is short.
    pub fn unfinished_bytes(&self) -> usize {
        self.assembly.len() + self.stalled.iter().map(|chunk| chunk.len()).sum::<usize>()
    }

    /// Ends the connection for keeping most of the memory for unfinished input, which is free again when this returns.
    /// To be called on the one with most [`unfinished_bytes`](Self::unfinished_bytes) when a [`receive`](Self::receive)
    /// left the environment [over its budget](Env::is_over_budget). By itself a connection closes for lack of memory
    /// only if it alone keeps more than all of them may.
    pub fn close_for_memory(&mut self, env: &mut Env) {
        self.close(CloseReason::MemoryLimit, env);
    }

    /// True when replies wait and none is being sent.
    pub fn has_output(&self) -> bool {
        !self.sending && !self.output.is_empty()
    }

    /// Ends the connection: the service gets its state back.
    pub fn end(mut self, env: &mut Env) {
        self.assembly.reset(env);
        self.drop_stalled(env);
        self.service.close(self.state);
    }

    /// True while an end has to wait for what somebody else still does for the connection.
    fn waits_for_answers(&self) -> bool {
        self.closing_gently() && (self.deferred > 0 || self.exchange.open)
    }

    fn closing_gently(&self) -> bool {
        use CloseReason::{Drained, PeerClosed, PeerClosedMidMessage, Service};
        matches!(self.closing, Some(Drained | PeerClosed | PeerClosedMidMessage | Service))
    }

    fn close(&mut self, reason: CloseReason, env: &mut Env) {
        if self.closing.is_none() {
            self.closing = Some(reason);
            self.at_once &= self.stalled.is_empty();
            self.assembly.reset(env);
            self.drop_stalled(env);
        }
    }

    /// True while no message is handed over. One chunk may be received all the same when only an exchange is in the
    /// way: to stop and start receiving for each would cost more, and the end of the stream is heard of.
    fn is_stalled(&self, env: &Env) -> bool {
        self.exchange.hold || self.exchange.full || self.is_full(env)
    }

    fn is_full(&self, env: &Env) -> bool {
        self.queued_bytes() > env.limits.out_queue_bytes_max || self.deferred >= env.limits.deferred_max
    }

    /// Puts a chunk aside, behind those that wait already.
    fn stall(&mut self, chunk: Chunk, env: &mut Env) {
        env.assembly_bytes += chunk.len();
        self.stalled.push_back(chunk.into_kept());
        self.check_memory(env);
    }

    fn check_memory(&mut self, env: &mut Env) {
        // Only what nobody else can be blamed for: which of several connections goes is up to whoever has them all.
        if env.is_over_budget() && self.unfinished_bytes() > env.limits.assembly_bytes_max {
            self.close(CloseReason::MemoryLimit, env);
        }
    }

    fn drop_stalled(&mut self, env: &mut Env) {
        for chunk in self.stalled.drain(..) {
            env.assembly_bytes -= chunk.len();
        }
    }

    /// Goes on with what was put aside, as far as replies have room again.
    fn resume(&mut self, was_stalled: bool, env: &mut Env) {
        if was_stalled && !self.is_stalled(env) && !self.assembly.is_idle() {
            // The rest of a message could not come while the peer was not read: its time begins now.
            self.assembly.started = env.now;
        }
        while self.closing.is_none() && !self.stalled.is_empty() && !self.is_stalled(env) {
            let chunk = self.stalled.pop_front().unwrap_or_else(|| Chunk::from_vec(Vec::new()));
            env.assembly_bytes -= chunk.len();
            self.process(chunk, env);
        }
        if self.eof {
            self.finish_input(env);
        }
    }

    fn finish_input(&mut self, env: &mut Env) {
        if self.closing.is_none() && self.stalled.is_empty() {
            let mid_message = !self.assembly.is_idle();
            self.close(if mid_message { CloseReason::PeerClosedMidMessage } else { CloseReason::PeerClosed }, env);
            if self.exchange.open {
                self.upstream(Upstream::ClientEnded, env);
            }
        }
    }

    /// Cuts `chunk` into messages. What is left when replies must be taken first is put aside, in front of what was
    /// put aside before.
    fn process(&mut self, chunk: Chunk, env: &mut Env) {
        let mut at = 0;
        while at < chunk.len() && self.closing.is_none() {
            if self.is_stalled(env) {
                let rest = chunk.slice(at..chunk.len());
                env.assembly_bytes += rest.len();
                self.stalled.push_front(rest.into_kept());
                self.check_memory(env);
                return;
            }
            let step = if self.assembly.is_idle() {
                self.cut_in_place(&chunk, &mut at, env)
            } else {
                self.cut_assembled(&chunk, &mut at, env)
            };
            if let Err(reason) = step {
                self.refuse(reason, env);
            }
        }
        self.at_once &= at == chunk.len();
    }

    /// Closes for what the peer did; the service may tell it.
    fn refuse(&mut self, reason: CloseReason, env: &mut Env) {
        // Behind an answer that is still to come nothing can be said: the end does not wait for that.
        if self.closing.is_none() && self.held.is_empty() {
            let ticket = self.next_ticket;
            let mut reply = Reply {
                framing: self.framing,
                sink: Sink::Stream(&mut self.output),
                env,
                target: Target::Stream { key: self.key, ticket },
                deferred: 0,
                close: false,
                at_once: false,
                exchange: self.exchange,
            };
            self.service.refuse(&mut self.state, reason, &mut reply);
            self.exchange = reply.exchange;
        }
        self.close(reason, env);
    }

    /// Cuts the next part off `buf`.
    fn cut(&mut self, buf: &[u8], scanned: usize, env: &Env) -> Result<Frame, CloseReason> {
        let cut = match self.framing {
            Framing::Custom => self.service.cut(&mut self.state, buf, scanned, &env.limits),
            framing => framing.parse(buf, scanned),
        };
        cut.map_err(malformed)
    }

    /// The next message starts at `at`: hands it over where it lies, or begins to put it together.
    fn cut_in_place(&mut self, chunk: &Chunk, at: &mut usize, env: &mut Env) -> Result<(), CloseReason> {
        let rest = &chunk[*at..];
        match self.cut(rest, 0, env)? {
            Frame::Part(part) if part.last && part.total_bytes() <= rest.len() => {
                // What a service cuts itself is a piece, as long as it happened to arrive.
                if self.framing != Framing::Custom {
                    self.check_size(part.body_bytes, env)?;
                }
                let start = *at + part.header_bytes;
                *at += part.total_bytes();
                let body = start..start + part.body_bytes;
                self.call(&chunk[body], Some((chunk, start)), env);
            }
            Frame::Part(part) => {
                self.check_size(part.body_bytes, env)?;
                self.assembly.begin(env);
                self.assembly.start_part(part, env)?;
                *at += part.header_bytes.min(rest.len());
            }
            Frame::Incomplete { .. } => {
                self.check_header(rest.len(), env)?;
                self.assembly.begin(env);
                self.assembly.append(rest, env)?;
                self.assembly.scanned = rest.len();
                *at = chunk.len();
            }
        }
        Ok(())
    }

    /// Goes on with a message that began in an earlier chunk, or in an earlier part.
    fn cut_assembled(&mut self, chunk: &Chunk, at: &mut usize, env: &mut Env) -> Result<(), CloseReason> {
        let rest = &chunk[*at..];
        if let Some(progress) = self.assembly.part {
            let body = progress.body_left.min(rest.len());
            self.assembly.append(&rest[..body], env)?;
            let trailer = progress.trailer_left.min(rest.len() - body);
            *at += body + trailer;
            let left = Progress {
                body_left: progress.body_left - body,
                trailer_left: progress.trailer_left - trailer,
                last: progress.last,
            };
            self.assembly.part = Some(left);
        } else {
            self.cut_header(rest, at, env)?;
        }
        // Also for parts without a body, which are complete as soon as they begin.
        if let Some(Progress { body_left: 0, trailer_left: 0, last }) = self.assembly.part {
            self.assembly.finish_part();
            if last {
                self.call_assembled(env);
            }
        }
        Ok(())
    }

    /// Between two parts: takes as many bytes as the header needs, and cuts.
    fn cut_header(&mut self, rest: &[u8], at: &mut usize, env: &mut Env) -> Result<(), CloseReason> {
        let held = self.assembly.raw().len();
        let need = match self.framing {
            // Said before that it needs more.
            Framing::Custom => rest.len(),
            framing => match framing.parse(self.assembly.raw(), self.assembly.scanned).map_err(malformed)? {
                Frame::Incomplete { need_bytes } => need_bytes.map_or(rest.len(), |need| need - held).min(rest.len()),
                Frame::Part(_) => 0,
            },
        };
        self.assembly.append(&rest[..need], env)?;
        *at += need;
        let cut = match self.framing {
            Framing::Custom => {
                self.service.cut(&mut self.state, self.assembly.raw(), self.assembly.scanned, &env.limits)
            }
            framing => framing.parse(self.assembly.raw(), self.assembly.scanned),
        };
        match cut.map_err(malformed)? {
            Frame::Incomplete { .. } => {
                self.assembly.scanned = held + need;
                self.check_header(held + need, env)
            }
            Frame::Part(part) => {
                self.check_size(self.assembly.body_bytes + part.body_bytes, env)?;
                // Bytes beyond this part belong to the next message; all of them came from `rest`, since without
                // them the part could not be cut.
                let surplus = (held + need).saturating_sub(part.total_bytes());
                *at -= surplus;
                self.assembly.cut_raw(part, surplus, env)
            }
        }
    }

    fn check_size(&self, bytes: usize, env: &Env) -> Result<(), CloseReason> {
        // Pieces of a stream are as long as they happen to arrive.
        if bytes > env.limits.message_bytes_max && self.framing != Framing::Raw {
            Err(CloseReason::OversizedMessage)
        } else {
            Ok(())
        }
    }

    fn check_header(&self, bytes: usize, env: &Env) -> Result<(), CloseReason> {
        let limits = &env.limits;
        match self.framing {
            Framing::Delimiter(delimiter) => {
                // The last bytes may be the delimiter's beginning; all before them is body.
                let body_bytes = (bytes + 1).saturating_sub(delimiter.as_bytes().len());
                let oversized = body_bytes > limits.message_bytes_max.max(limits.header_bytes_max);
                if oversized { Err(CloseReason::OversizedMessage) } else { Ok(()) }
            }
            _ if bytes > limits.header_bytes_max => Err(CloseReason::EndlessHeader),
            _ => Ok(()),
        }
    }

    fn call_assembled(&mut self, env: &mut Env) {
        env.stats.messages_assembled.add(1);
        let bytes = self.assembly.take(env);
        if self.service.keeps_messages() {
            let chunk = Chunk::from_vec(bytes);
            self.call(&chunk, Some((&chunk, 0)), env);
        } else {
            self.call(&bytes, None, env);
            env.spares.give(bytes);
        }
    }

    fn call(&mut self, bytes: &[u8], origin: Option<(&Chunk, usize)>, env: &mut Env) {
        env.stats.messages.add(1);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let message = Message { bytes, origin, peer: self.peer, key: self.key };
        // Behind an unanswered message, replies wait in an output of their own.
        let mut behind = (!self.held.is_empty()).then(Output::default);
        let mut reply = Reply {
            framing: self.framing,
            sink: Sink::Stream(behind.as_mut().unwrap_or(&mut self.output)),
            env,
            target: Target::Stream { key: self.key, ticket },
            deferred: 0,
            close: false,
            at_once: false,
            exchange: self.exchange,
        };
        self.service.call(&mut self.state, &message, &mut reply);
        let (deferred, close, at_once) = (reply.deferred, reply.close, reply.at_once);
        self.exchange = reply.exchange;
        env.count_copies();
        self.deferred += deferred;
        let waits = deferred > 0 && self.order == Order::Requests;
        // What was replied before deferring leads the deferred answer.
        let output = behind.unwrap_or_default();
        self.held_bytes += output.len();
        match self.held.back_mut() {
            // One buffer for all replies behind the same deferred one, however many there are.
            Some(last) if !waits && last.awaiting == 0 => last.output.append(output, &mut env.spares),
            _ if waits || !output.is_empty() => self.held.push_back(Held { ticket, output, awaiting: deferred }),
            _ => {}
        }
        if close {
            self.at_once = at_once;
            self.close(CloseReason::Service, env);
        }
    }

    fn place_answer(&mut self, ticket: u64, answer: Answer, env: &mut Env) {
        let mut output = Output::default();
        let mut reply = Reply {
            framing: self.framing,
            sink: Sink::Stream(&mut output),
            env,
            target: Target::Stream { key: self.key, ticket },
            deferred: 0,
            close: false,
            at_once: false,
            exchange: Exchange::default(),
        };
        match answer {
            Answer::Bytes(body) if body.len() > crate::service::COPY_BYTES_MAX => reply.chunk(Chunk::from_vec(body)),
            Answer::Bytes(body) => reply.bytes(&body),
            Answer::Chunk(chunk) => reply.chunk(chunk),
            Answer::Nothing | Answer::Abandoned => {}
        }
        let unframable = reply.close;
        env.stats.replies_deferred.add(1);
        if self.order == Order::Free {
            self.output.append(output, &mut env.spares);
        } else if let Some(place) = self.held.iter_mut().find(|held| held.ticket == ticket && held.awaiting > 0) {
            self.held_bytes += output.len();
            place.output.append(output, &mut env.spares);
            place.awaiting -= 1;
            while let Some(Held { output, .. }) = self.held.pop_front_if(|held| held.awaiting == 0) {
                self.held_bytes -= output.len();
                self.output.append(output, &mut env.spares);
            }
        }
        if unframable {
            self.close(CloseReason::Service, env);
        }
    }
}

fn malformed(error: FramingError) -> CloseReason {
    match error {
        FramingError::HeaderTooLong { .. } => CloseReason::EndlessHeader,
        _ => CloseReason::MalformedFrame,
    }
}
