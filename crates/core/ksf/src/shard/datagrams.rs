//! A bound datagram socket: each datagram is a message.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::datagram_output::{DatagramOutput, Mark};
use crate::deferred::{Answer, Target};
use crate::env::Env;
use crate::framing::Framing;
use crate::gates::GateSet;
use crate::listener::DatagramPeer;
use crate::pool::Chunk;
use crate::service::{ConnKey, EXPECTED_REPLY_BYTES, Message, Peer, Refused, Reply, Said, Service, SessionState, Sink};
use crate::session::{OnShard, ServiceInfo, Session, SessionOf};

/// A datagram socket of any service; as with a [`Connection`](crate::connection::Connection), the type parameter is another one only
/// while it is made.
pub(crate) struct DatagramService<T: ?Sized = dyn Session> {
    info: Rc<ServiceInfo>,
    socket: u32,
    /// Replies behind gates, in the order in which they were made.
    held: VecDeque<HeldDatagram>,
    /// What arrived while no more was handed over, until the engine stopped to receive.
    put_aside: VecDeque<(DatagramPeer, Chunk)>,
    /// Its share of the shard's budget: datagrams in work, with the replies they announced, and replies behind gates.
    counted_bytes: usize,
    /// The longest deferred reply so far: what the next one is assumed to need.
    expected_bytes: usize,
    session: T,
}

/// A reply behind gates.
type HeldDatagram = (GateSet, DatagramPeer, Vec<u8>);

fn held_bytes(bytes: &Vec<u8>) -> usize {
    size_of::<HeldDatagram>() + bytes.capacity()
}

impl DatagramService {
    /// The service may refuse it.
    pub(super) fn open<S: Service>(on: OnShard<S>, local: &Peer, socket: u32) -> Result<Box<Self>, Refused> {
        Ok(Box::new(DatagramService {
            info: Rc::clone(on.info()),
            socket,
            held: VecDeque::new(),
            put_aside: VecDeque::new(),
            counted_bytes: 0,
            expected_bytes: EXPECTED_REPLY_BYTES,
            session: SessionOf::open(on, local)?,
        }))
    }

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
        self.counted_bytes > 0 && env.budget.is_full(&env.limits)
    }

    /// True while datagrams are handed over.
    #[inline]
    fn takes(&self, env: &Env) -> bool {
        !self.is_full(env) && !self.info.waits_for_files(env)
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
        self.with_reply(peer, chunk.len(), env, output, |session, reply| session.call(&message, reply));
    }

    /// Calls the service with a reply to one datagram, and counts what it deferred.
    fn with_reply(
        &mut self,
        peer: DatagramPeer,
        message_bytes: usize,
        env: &mut Env,
        output: &mut DatagramOutput,
        call: impl FnOnce(&mut dyn Session, &mut Reply<'_>) -> SessionState,
    ) {
        let target = Target::Datagram { socket: self.socket, peer, work_bytes: 0 };
        let mark = output.mark();
        let mut said = Said::new(Framing::Raw, target, message_bytes);
        said.expected_bytes = self.expected_bytes;
        let mut reply = Reply::new(Sink::Datagrams(output, peer), env, &mut said);
        let session = &mut self.session;
        let called = self.info.guard(|| call(session, &mut reply));
        let Said { deferred, work_bytes, gates, .. } = said;
        let deferred = deferred as usize;
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

    pub(super) fn receive(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, output: &mut DatagramOutput) {
        if self.put_aside.is_empty() && self.takes(env) {
            self.hand_over(peer, chunk, env, output);
        } else {
            self.put_aside(peer, chunk, env);
        }
    }

    /// Goes on with what was put aside. True if it takes more.
    pub(super) fn go_on(&mut self, env: &mut Env, output: &mut DatagramOutput) -> bool {
        while self.takes(env)
            && env.deferred_datagrams < env.limits.deferred_datagrams_max
            && let Some((peer, chunk)) = self.put_aside.pop_front()
        {
            env.budget.remove_input(chunk.memory_bytes());
            self.hand_over(peer, &chunk, env, output);
        }
        self.put_aside.is_empty() && self.takes(env)
    }

    /// `work_bytes`: what was counted for this answer.
    pub(super) fn answer(
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
        self.with_reply(peer, 0, env, output, |session, reply| reply.answer(answer, session));
        env.stats.replies_deferred.add(1);
    }

    /// Lets the replies go whose gates have opened.
    pub(super) fn open_gates(&mut self, env: &mut Env, output: &mut DatagramOutput) {
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

    /// Gives the service its state back. No other call follows.
    pub(super) fn end(&mut self, env: &mut Env) {
        let Self { info, session, held, put_aside, counted_bytes, .. } = self;
        env.budget.recount_replies(*counted_bytes, 0);
        put_aside.iter().for_each(|(_, chunk)| env.budget.remove_input(chunk.memory_bytes()));
        held.drain(..).for_each(|(_, _, bytes)| env.spares.give(bytes));
        if info.guard(|| session.close()).is_err() {
            env.stats.panics.add(1);
        }
    }
}
