//! A service with its types erased: what a shard, which serves any of them, calls.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::outgoing::Outgoing;
use crate::buffers::Buffer;
use crate::connection::Connection;
use crate::connection::input::DIRECT_BYTES_MIN;
use crate::cutter::Direct;
use crate::datagram_output::{DatagramOutput, Mark};
use crate::deferred::{Answer, Target};
use crate::engine::Reading;
use crate::env::Env;
use crate::error::CloseReason;
use crate::files::{FileDone, FileError, FileRange};
use crate::framing::Framing;
use crate::gates::GateSet;
use crate::limits::{Limits, Time};
use crate::listener::DatagramPeer;
use crate::outgoing::Upstream;
use crate::output::{SendBatch, Spares};
use crate::pool::Chunk;
use crate::service::{ConnKey, EXPECTED_REPLY_BYTES, Message, Peer, Refused, Reply, Sink};
use crate::shard_service::{OnShard, Profile, ShardService, Turn};

/// A service with its types erased, before any shard runs it.
pub(crate) trait AnyService: Send + Sync {
    /// Makes the service's state for the shard of this thread.
    fn start(&self, env: &mut Env) -> Result<Rc<dyn LocalService>, crate::Error>;
    fn profile(&self) -> Profile<'_>;
    fn counters(&self) -> Vec<(&'static str, u64)>;
    /// The same for every listener that serves the same value.
    fn identity(&self) -> usize;
}

impl<S: ShardService> AnyService for Arc<S> {
    fn start(&self, env: &mut Env) -> Result<Rc<dyn LocalService>, crate::Error> {
        let state = ShardService::start(&**self, &mut Turn::new(env));
        let name = || ShardService::profile(&**self).name.to_owned();
        let state = state.map_err(|source| crate::Error::ServiceStart { service: name(), source })?;
        let on = OnShard::new(Self::clone(self), state);
        on.note_files(env);
        Ok(Rc::new(on))
    }

    fn profile(&self) -> Profile<'_> {
        ShardService::profile(&**self)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        ShardService::counters(&**self)
    }

    fn identity(&self) -> usize {
        Arc::as_ptr(self).addr()
    }
}

/// A service on one shard: it makes connections.
pub(crate) trait LocalService {
    /// A connection of the listener of this number.
    fn open(&self, peer: Peer, key: ConnKey, listener: u32, env: &Env) -> Result<Box<dyn Stream>, Refused>;
    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<dyn Datagrams>, Refused>;
    /// True if it wants to hear of the end of each turn in which it was called.
    fn has_turn_end(&self) -> bool;
    fn turn_end(&self, env: &mut Env);
    /// It gets a turn end though it was not called.
    fn wake(&self);
    /// True if it was called since its last turn end, and wants to hear of the next.
    fn waits_for_turn_end(&self) -> bool;
    fn file_done(&self, done: FileDone, env: &mut Env);
    fn files_have_room(&self, env: &mut Env);
    fn stop(self: Rc<Self>);
}

impl<S: ShardService> LocalService for OnShard<S> {
    fn open(&self, peer: Peer, key: ConnKey, listener: u32, env: &Env) -> Result<Box<dyn Stream>, Refused> {
        Ok(Box::new(Connection::new(self.clone(), peer, key, env.now)?.of_listener(listener)))
    }

    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<dyn Datagrams>, Refused> {
        let state = self.with(|service, shard| service.accept(shard, &local)).unwrap_or(Err(Refused))?;
        Ok(Box::new(DatagramService {
            on: self.clone(),
            state,
            socket,
            held: VecDeque::new(),
            put_aside: VecDeque::new(),
            counted_bytes: 0,
            expected_bytes: EXPECTED_REPLY_BYTES,
        }))
    }

    fn has_turn_end(&self) -> bool {
        Self::has_turn_end(self)
    }

    fn turn_end(&self, env: &mut Env) {
        Self::turn_end(self, env);
    }

    fn wake(&self) {
        Self::wake(self);
    }

    fn waits_for_turn_end(&self) -> bool {
        Self::waits_for_turn_end(self)
    }

    fn file_done(&self, done: FileDone, env: &mut Env) {
        Self::file_done(self, done, env);
    }

    fn files_have_room(&self, env: &mut Env) {
        Self::files_have_room(self, env);
    }

    fn stop(self: Rc<Self>) {
        if let Ok(on) = Rc::try_unwrap(self) {
            Self::stop(on);
        }
    }
}

/// A [`Connection`] of any service.
pub(crate) trait Stream {
    fn receive(&mut self, chunk: Chunk, env: &mut Env);
    /// The buffer of its unfinished message, while its reading is [`Reading::Direct`] and nothing else can arrive.
    fn lend_buffer(&mut self, env: &mut Env) -> Option<Direct>;
    fn received_direct(&mut self, direct: Direct, bytes: usize, env: &mut Env);
    fn peer_closed(&mut self, env: &mut Env);
    fn drain(&mut self, env: &mut Env);
    fn answer(&mut self, ticket: u64, work_bytes: usize, answer: Answer, env: &mut Env) -> bool;
    fn open_gates(&mut self, env: &mut Env);
    fn proceed(&mut self, env: &mut Env);
    fn read_again(&mut self, env: &Env);
    fn take_batch(&mut self, now: Time, spares: &mut Spares) -> Option<SendBatch>;
    fn sent(&mut self, bytes: usize, done: bool, env: &mut Env);
    /// What must be read of a file before more can be sent.
    fn file_to_read(&mut self, now: Time) -> Option<FileRange>;
    fn file_read(&mut self, range: &FileRange, read: Result<Buffer, FileError>, env: &mut Env) -> bool;
    fn file_not_read(&mut self);
    fn files_have_room(&mut self, env: &mut Env);
    fn file_follows(&self) -> bool;
    fn tick(&mut self, env: &mut Env) -> Option<CloseReason>;
    fn deadline(&self, env: &Env) -> Option<Time>;
    fn note_activity(&mut self, now: Time);
    /// Whether further bytes may be received, and how.
    fn reading(&mut self, env: &mut Env) -> Reading;
    fn limits<'e>(&self, env: &'e Env) -> &'e Limits;
    fn finished(&self) -> Option<CloseReason>;
    fn is_closing(&self) -> bool;
    fn closes_at_once(&self) -> bool;
    fn saw_eof(&self) -> bool;
    fn is_settled(&self) -> bool;
    fn owes_only_the_batch(&self) -> bool;
    fn ends_with_the_batch(&self) -> bool;
    fn has_output(&self) -> bool;
    fn queued_bytes(&self) -> usize;
    /// What happens at the other end of its exchange.
    fn upstream(&mut self, event: Upstream, env: &mut Env);
    /// The other end of its exchange takes no more for now, or does again.
    fn set_full(&mut self, full: bool, env: &mut Env);
    /// An outgoing connection, or none, counts from now on what it passed on.
    fn passed(&mut self, bytes: usize, env: &mut Env);
    /// True while the other end of its exchange is not to be read, because the service could not pass on what it was told.
    fn awaits_room(&self) -> bool;
    /// Itself, if it is an outgoing connection.
    fn outgoing(&mut self) -> Option<&mut Outgoing>;
    fn messages(&self) -> u64;
    fn received_bytes(&self) -> u64;
    fn sent_bytes(&self) -> u64;
    fn end(self: Box<Self>, env: &mut Env);
}

impl<S: ShardService> Stream for Connection<S> {
    fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        Self::receive(self, chunk, env);
    }
    fn lend_buffer(&mut self, env: &mut Env) -> Option<Direct> {
        Self::lend_buffer(self, DIRECT_BYTES_MIN, env)
    }
    fn received_direct(&mut self, direct: Direct, bytes: usize, env: &mut Env) {
        Self::received_direct(self, direct, bytes, env);
    }
    fn peer_closed(&mut self, env: &mut Env) {
        Self::peer_closed(self, env);
    }
    fn drain(&mut self, env: &mut Env) {
        Self::drain(self, env);
    }
    fn answer(&mut self, ticket: u64, work_bytes: usize, answer: Answer, env: &mut Env) -> bool {
        Self::answer(self, ticket, work_bytes, answer, env)
    }
    fn open_gates(&mut self, env: &mut Env) {
        Self::open_gates(self, env);
    }
    fn proceed(&mut self, env: &mut Env) {
        Self::proceed(self, env);
    }
    fn read_again(&mut self, env: &Env) {
        Self::read_again(self, env);
    }
    fn take_batch(&mut self, now: Time, spares: &mut Spares) -> Option<SendBatch> {
        Self::take_batch(self, now, spares)
    }
    fn sent(&mut self, bytes: usize, done: bool, env: &mut Env) {
        Self::sent(self, bytes, done, env);
    }
    fn file_to_read(&mut self, now: Time) -> Option<FileRange> {
        Self::file_to_read(self, now)
    }
    fn file_read(&mut self, range: &FileRange, read: Result<Buffer, FileError>, env: &mut Env) -> bool {
        Self::file_read(self, range, read, env)
    }
    fn file_not_read(&mut self) {
        Self::file_not_read(self);
    }
    fn files_have_room(&mut self, env: &mut Env) {
        Self::files_have_room(self, env);
    }
    fn file_follows(&self) -> bool {
        Self::file_follows(self)
    }
    fn tick(&mut self, env: &mut Env) -> Option<CloseReason> {
        Self::tick(self, env)
    }
    fn deadline(&self, env: &Env) -> Option<Time> {
        Self::deadline(self, env)
    }
    fn note_activity(&mut self, now: Time) {
        Self::note_activity(self, now);
    }
    fn reading(&mut self, env: &mut Env) -> Reading {
        self.wait_for_files(env);
        if !self.wants_bytes(env) {
            Reading::Off
        } else if self.may_lend(DIRECT_BYTES_MIN, env) {
            Reading::Direct
        } else if self.expects_long() {
            Reading::Head
        } else {
            Reading::On
        }
    }
    fn limits<'e>(&self, env: &'e Env) -> &'e Limits {
        Self::limits(self, env)
    }
    fn finished(&self) -> Option<CloseReason> {
        Self::finished(self)
    }
    fn is_closing(&self) -> bool {
        Self::is_closing(self)
    }
    fn closes_at_once(&self) -> bool {
        Self::closes_at_once(self)
    }
    fn saw_eof(&self) -> bool {
        Self::saw_eof(self)
    }
    fn is_settled(&self) -> bool {
        Self::is_settled(self)
    }
    fn owes_only_the_batch(&self) -> bool {
        Self::owes_only_the_batch(self)
    }
    fn ends_with_the_batch(&self) -> bool {
        Self::ends_with_the_batch(self)
    }
    fn has_output(&self) -> bool {
        Self::has_output(self)
    }
    fn queued_bytes(&self) -> usize {
        Self::queued_bytes(self)
    }
    fn upstream(&mut self, event: Upstream, env: &mut Env) {
        Self::upstream(self, event, env);
    }
    fn set_full(&mut self, full: bool, env: &mut Env) {
        Self::set_full(self, full, env);
    }
    fn passed(&mut self, bytes: usize, env: &mut Env) {
        Self::passed(self, bytes, env);
    }
    fn awaits_room(&self) -> bool {
        Self::awaits_room(self)
    }
    fn outgoing(&mut self) -> Option<&mut Outgoing> {
        None
    }
    fn messages(&self) -> u64 {
        Self::messages(self)
    }
    fn received_bytes(&self) -> u64 {
        Self::received_bytes(self)
    }
    fn sent_bytes(&self) -> u64 {
        Self::sent_bytes(self)
    }
    fn end(self: Box<Self>, env: &mut Env) {
        Self::end(*self, env);
    }
}

/// A bound datagram socket of any service.
pub(crate) trait Datagrams {
    fn receive(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, output: &mut DatagramOutput);
    /// `work_bytes`: what was counted for this answer.
    fn answer(
        &mut self,
        peer: DatagramPeer,
        work_bytes: usize,
        answer: Answer,
        env: &mut Env,
        output: &mut DatagramOutput,
    );
    /// Goes on with what was put aside. True if it takes more.
    fn go_on(&mut self, env: &mut Env, output: &mut DatagramOutput) -> bool;
    /// Lets the replies go whose gates have opened.
    fn open_gates(&mut self, env: &mut Env, output: &mut DatagramOutput);
    fn end(self: Box<Self>, env: &mut Env);
}

struct DatagramService<S: ShardService> {
    on: OnShard<S>,
    state: S::Conn,
    socket: u32,
    /// Replies behind gates, in the order in which they were made.
    held: VecDeque<HeldDatagram>,
    /// What arrived while no more was handed over, until the engine stopped to receive.
    put_aside: VecDeque<(DatagramPeer, Chunk)>,
    /// Its share of the shard's budget: datagrams in work, with the replies they announced, and replies behind gates.
    counted_bytes: usize,
    /// The longest deferred reply so far: what the next one is assumed to need.
    expected_bytes: usize,
}

/// A reply behind gates.
type HeldDatagram = (GateSet, DatagramPeer, Vec<u8>);

fn held_bytes(bytes: &Vec<u8>) -> usize {
    size_of::<HeldDatagram>() + bytes.capacity()
}

impl<S: ShardService> DatagramService<S> {
    fn count(&mut self, bytes: usize, env: &mut Env) {
        env.budget.recount_replies(0, bytes);
        self.counted_bytes += bytes;
    }

    fn uncount(&mut self, bytes: usize, env: &mut Env) {
        env.budget.recount_replies(bytes, 0);
        self.counted_bytes -= bytes;
    }

    /// True while nothing more may be held. With a share of its own in the shard's sum, as for connections.
    fn is_full(&self, env: &Env) -> bool {
        self.counted_bytes > 0 && env.budget.reply_bytes() >= env.limits.shard_bytes_max
    }

    /// True while datagrams are handed over.
    #[inline]
    fn takes(&self, env: &Env) -> bool {
        !self.is_full(env) && !self.on.waits_for_files(env)
    }

    fn put_aside(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env) {
        if env.budget.is_input_full(&env.limits) {
            return env.stats.datagrams_refused_memory.add(1);
        }
        let chunk = chunk.slice(0..chunk.len()).into_kept();
        env.count_copies();
        env.budget.add_input(chunk.memory_bytes());
        self.put_aside.push_back((peer, chunk));
    }

    fn hand_over(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, output: &mut DatagramOutput) {
        env.stats.messages.add(1);
        let key = ConnKey::of_datagrams(self.socket);
        let message = Message { bytes: chunk, origin: Some((chunk, 0)), peer: Peer::Udp(peer.addr), key };
        self.with_reply(peer, chunk.len(), env, output, |service, shard, conn, reply| {
            service.call(shard, conn, &message, reply);
        });
    }

    /// Calls the service with a reply to one datagram, and counts what it deferred.
    fn with_reply(
        &mut self,
        peer: DatagramPeer,
        message_bytes: usize,
        env: &mut Env,
        output: &mut DatagramOutput,
        call: impl FnOnce(&S, &mut S::Shard, &mut S::Conn, &mut Reply<'_>),
    ) {
        let target = Target::Datagram { socket: self.socket, peer, work_bytes: 0 };
        let mark = output.mark();
        let mut reply = Reply::new(Framing::Raw, Sink::Datagrams(output, peer), env, target, message_bytes);
        reply.expected_bytes = self.expected_bytes;
        let state = &mut self.state;
        let called = self.on.with(|service, shard| call(service, shard, state, &mut reply));
        let (deferred, work_bytes, gates) = (reply.deferred as usize, reply.work_bytes, reply.gates);
        env.count_copies();
        if deferred > 0 {
            env.deferred_datagrams += deferred;
            self.count(work_bytes, env);
        }
        if called.is_err() {
            // There is no connection to close; the peer asks again, as for any datagram that got lost.
            env.stats.panics.add(1);
            output.truncate(mark);
        }
        if gates.closed(&env.gates).is_some() {
            self.hold(mark, &gates, env, output);
        }
        if !self.held.is_empty() {
            self.open_gates(env, output);
        }
    }

    /// Takes the replies that were added since out of the output, to wait for their gates.
    fn hold(&mut self, mark: Mark, gates: &GateSet, env: &mut Env, output: &mut DatagramOutput) {
        for (peer, bytes) in output.since(mark) {
            if self.held.len() >= env.limits.datagram_queue_max || self.is_full(env) {
                env.stats.datagrams_unsent.add(1);
                continue;
            }
            let mut held = env.spares.take();
            held.extend_from_slice(bytes);
            self.count(held_bytes(&held), env);
            self.held.push_back((gates.clone(), *peer, held));
        }
        output.truncate(mark);
    }
}

impl<S: ShardService> Datagrams for DatagramService<S> {
    fn receive(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, output: &mut DatagramOutput) {
        if self.put_aside.is_empty() && self.takes(env) {
            self.hand_over(peer, chunk, env, output);
        } else {
            self.put_aside(peer, chunk, env);
        }
    }

    fn go_on(&mut self, env: &mut Env, output: &mut DatagramOutput) -> bool {
        while self.takes(env)
            && env.deferred_datagrams < env.limits.deferred_datagrams_max
            && let Some((peer, chunk)) = self.put_aside.pop_front()
        {
            env.budget.remove_input(chunk.memory_bytes());
            self.hand_over(peer, &chunk, env, output);
        }
        self.put_aside.is_empty() && self.takes(env)
    }

    fn answer(
        &mut self,
        peer: DatagramPeer,
        work_bytes: usize,
        answer: Answer,
        env: &mut Env,
        output: &mut DatagramOutput,
    ) {
        env.deferred_datagrams -= 1;
        self.uncount(work_bytes, env);
        self.expected_bytes = self.expected_bytes.max(answer.reply_bytes());
        if matches!(answer, Answer::Abandoned) {
            // There is no connection to close; the peer asks again, as for any datagram that got lost.
            return env.stats.datagrams_abandoned.add(1);
        }
        self.with_reply(peer, 0, env, output, |service, shard, conn, reply| match answer {
            Answer::Bytes(body) => reply.bytes(&body),
            Answer::Chunk(chunk) => reply.chunk(chunk),
            Answer::Parts(head, body, end) => reply.parts(|tail| tail.extend_from_slice(&head), body, end),
            Answer::Pieces(body) => reply.collected(body),
            Answer::Resume(state) => service.resume(shard, conn, state, reply),
            Answer::Nothing | Answer::Abandoned => {}
        });
        env.stats.replies_deferred.add(1);
    }

    fn open_gates(&mut self, env: &mut Env, output: &mut DatagramOutput) {
        // From the front only: replies of one socket leave in the order of their logs' records. Those of a lost log are
        // lost, as datagrams may be.
        while let Some((gates, _, _)) = self.held.front() {
            if let Some(gate) = gates.closed(&env.gates)
                && env.gates.wait(gate, env.shard)
            {
                return;
            }
            let Some((gates, peer, bytes)) = self.held.pop_front() else { return };
            if gates.is_lost(&env.gates) {
                env.stats.datagrams_unsent.add(1);
                self.uncount(held_bytes(&bytes), env);
                env.spares.give(bytes);
            } else if gates.closed(&env.gates).is_some() {
                self.held.push_front((gates, peer, bytes));
            } else {
                self.uncount(held_bytes(&bytes), env);
                output.add(peer, |to| to.extend_from_slice(&bytes));
                env.spares.give(bytes);
            }
        }
    }

    fn end(self: Box<Self>, env: &mut Env) {
        let Self { on, state, held, put_aside, counted_bytes, .. } = *self;
        env.budget.recount_replies(counted_bytes, 0);
        put_aside.iter().for_each(|(_, chunk)| env.budget.remove_input(chunk.memory_bytes()));
        held.into_iter().for_each(|(_, _, bytes)| env.spares.give(bytes));
        if on.with(|service, shard| service.close(shard, state)).is_err() {
            env.stats.panics.add(1);
        }
    }
}
