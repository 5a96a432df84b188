//! A service with its types erased: what a shard, which serves any of them, calls.

use std::sync::Arc;

use super::outgoing::Outgoing;
use crate::connection::Connection;
use crate::deferred::{Answer, Target};
use crate::env::Env;
use crate::error::CloseReason;
use crate::framing::Framing;
use crate::limits::Time;
use crate::listener::DatagramPeer;
use crate::outgoing::{Exchange, Upstream};
use crate::output::SendBatch;
use crate::pool::Chunk;
use crate::service::{ConnKey, Message, Peer, Refused, Reply, Service, Sink};

/// A service with its types erased: it makes connections.
pub(crate) trait AnyService: Send + Sync {
    fn open(&self, peer: Peer, key: ConnKey, env: &Env) -> Result<Box<dyn Stream>, Refused>;
    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<dyn Datagrams>, Refused>;
    fn counters(&self) -> Vec<(&'static str, u64)>;
    fn framing(&self) -> Framing;
    fn name(&self) -> &str;
    fn peer_speaks_first(&self) -> bool;
    fn needs_peer_addresses(&self) -> bool;
}

impl<S: Service> AnyService for Arc<S> {
    fn open(&self, peer: Peer, key: ConnKey, env: &Env) -> Result<Box<dyn Stream>, Refused> {
        Ok(Box::new(Connection::new(Self::clone(self), peer, key, env.now)?))
    }

    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<dyn Datagrams>, Refused> {
        Ok(Box::new(DatagramService { service: Self::clone(self), state: self.accept(&local)?, socket }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Service::counters(&**self)
    }

    fn framing(&self) -> Framing {
        Service::framing(&**self)
    }

    fn name(&self) -> &str {
        Service::name(&**self)
    }

    fn peer_speaks_first(&self) -> bool {
        Service::peer_speaks_first(&**self)
    }

    fn needs_peer_addresses(&self) -> bool {
        Service::needs_peer_addresses(&**self)
    }
}

/// A [`Connection`] of any service.
pub(crate) trait Stream {
    fn receive(&mut self, chunk: Chunk, env: &mut Env);
    fn peer_closed(&mut self, env: &mut Env);
    fn drain(&mut self, env: &mut Env);
    fn answer(&mut self, ticket: u64, answer: Answer, env: &mut Env) -> bool;
    fn take_batch(&mut self, now: Time) -> Option<SendBatch>;
    fn sent(&mut self, bytes: usize, done: bool, env: &mut Env);
    fn tick(&mut self, env: &mut Env) -> Option<CloseReason>;
    fn note_activity(&mut self, now: Time);
    fn wants_bytes(&self, env: &Env) -> bool;
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
    /// Itself, if it is an outgoing connection.
    fn outgoing(&mut self) -> Option<&mut Outgoing>;
    fn unfinished_bytes(&self) -> usize;
    fn close_for_memory(&mut self, env: &mut Env);
    fn messages(&self) -> u64;
    fn received_bytes(&self) -> u64;
    fn sent_bytes(&self) -> u64;
    fn end(self: Box<Self>, env: &mut Env);
}

impl<S: Service> Stream for Connection<S> {
    fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        Self::receive(self, chunk, env);
    }
    fn peer_closed(&mut self, env: &mut Env) {
        Self::peer_closed(self, env);
    }
    fn drain(&mut self, env: &mut Env) {
        Self::drain(self, env);
    }
    fn answer(&mut self, ticket: u64, answer: Answer, env: &mut Env) -> bool {
        Self::answer(self, ticket, answer, env)
    }
    fn take_batch(&mut self, now: Time) -> Option<SendBatch> {
        Self::take_batch(self, now)
    }
    fn sent(&mut self, bytes: usize, done: bool, env: &mut Env) {
        Self::sent(self, bytes, done, env);
    }
    fn tick(&mut self, env: &mut Env) -> Option<CloseReason> {
        Self::tick(self, env)
    }
    fn note_activity(&mut self, now: Time) {
        Self::note_activity(self, now);
    }
    fn wants_bytes(&self, env: &Env) -> bool {
        Self::wants_bytes(self, env)
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
    fn outgoing(&mut self) -> Option<&mut Outgoing> {
        None
    }
    fn unfinished_bytes(&self) -> usize {
        Self::unfinished_bytes(self)
    }
    fn close_for_memory(&mut self, env: &mut Env) {
        Self::close_for_memory(self, env);
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
    fn receive(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, replies: &mut Vec<SendBatch>);
    fn answer(&mut self, peer: DatagramPeer, answer: Answer, env: &mut Env, replies: &mut Vec<SendBatch>);
    fn end(self: Box<Self>);
}

struct DatagramService<S: Service> {
    service: Arc<S>,
    state: S::Conn,
    socket: u32,
}

impl<S: Service> Datagrams for DatagramService<S> {
    fn receive(&mut self, peer: DatagramPeer, chunk: &Chunk, env: &mut Env, replies: &mut Vec<SendBatch>) {
        env.stats.messages.add(1);
        let key = ConnKey::of_datagrams(self.socket);
        let message = Message { bytes: chunk, origin: Some((chunk, 0)), peer: Peer::Udp(peer.addr), key };
        let target = Target::Datagram { socket: self.socket, peer };
        let sink = Sink::Datagrams(replies);
        let mut reply = Reply {
            framing: Framing::Raw,
            sink,
            env,
            target,
            deferred: 0,
            close: false,
            at_once: false,
            exchange: Exchange::default(),
        };
        self.service.call(&mut self.state, &message, &mut reply);
        let deferred = reply.deferred as usize;
        env.deferred_datagrams += deferred;
        env.count_copies();
    }

    fn answer(&mut self, peer: DatagramPeer, answer: Answer, env: &mut Env, replies: &mut Vec<SendBatch>) {
        env.deferred_datagrams -= 1;
        let target = Target::Datagram { socket: self.socket, peer };
        let sink = Sink::Datagrams(replies);
        let mut reply = Reply {
            framing: Framing::Raw,
            sink,
            env,
            target,
            deferred: 0,
            close: false,
            at_once: false,
            exchange: Exchange::default(),
        };
        match answer {
            Answer::Bytes(body) => reply.bytes(&body),
            Answer::Chunk(chunk) => reply.chunk(chunk),
            Answer::Nothing => {}
            // There is no connection to close; the peer asks again, as for any datagram that got lost.
            Answer::Abandoned => return env.stats.datagrams_abandoned.add(1),
        }
        env.stats.replies_deferred.add(1);
    }

    fn end(self: Box<Self>) {
        self.service.close(self.state);
    }
}
