//! What the author of a service writes: a framing, and a function from message to replies.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;

use crate::deferred::Target;
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::framing::{Frame, Framing};
use crate::limits::Limits;
use crate::outgoing::Upstream;
use crate::output::Output;
use crate::pool::Chunk;

mod pieces;
mod reply;

pub use pieces::Pieces;
pub(crate) use reply::{COPY_BYTES_MAX, Sink};
pub use reply::{EXPECTED_REPLY_BYTES, Reply};

/// A service: how the stream is cut into messages, and what answers them.
///
/// One value serves all shards, so it is shared between threads; what belongs to one connection lives in
/// [`Service::Conn`] and is touched by one thread at a time, without a lock.
pub trait Service: Send + Sync + 'static {
    /// Private state of one connection (of one socket, for datagrams).
    type Conn: Send + 'static;

    /// Name in messages and counters.
    fn name(&self) -> &str;

    /// How a byte stream is cut into messages. Datagrams are messages as they are.
    fn framing(&self) -> Framing;

    /// Cuts the next part off `buf`, where the framing is [`Framing::Custom`]: the unconsumed front of the stream.
    /// `scanned` bytes of it were in an earlier call that returned [`Frame::Incomplete`]. A [`Frame::Part`] must be the
    /// last of its message, without header and trailer, and not empty. A service that returns one may change `conn`: the
    /// part is handed to [`Service::call`] next. If it is longer than `buf` it is put together first, and must not be longer
    /// than `message_bytes_max`; what is there in full may be.
    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let _ = (conn, limits);
        self.framing().parse(buf, scanned)
    }

    /// Most bytes that may arrive before [`Service::cut`] tells how a message goes on; `limits.header_bytes_max` unless said
    /// otherwise. A protocol that knows the length of a message only at its end returns `limits.message_bytes_max`.
    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.header_bytes_max
    }

    /// True if what was handed over last is a part of a message, of which the next part is to come: it has
    /// [`assembly_timeout_ms`](Limits::assembly_timeout_ms) from now to arrive. Asked after each call of [`call`](Self::call), where the
    /// framing is [`Framing::Custom`]; false unless said otherwise.
    fn awaits_rest(&self, conn: &Self::Conn) -> bool {
        let _ = conn;
        false
    }

    /// Last words to a peer whose connection is about to be closed for what it sent, or for how slowly: malformed,
    /// too long, or not whole in time. Nothing, unless said otherwise. They leave behind the replies that wait already.
    fn refuse(&self, conn: &mut Self::Conn, reason: CloseReason, reply: &mut Reply<'_>) {
        let _ = (conn, reason, reply);
    }

    /// Goes on with a message that was deferred, back on its connection:
    /// [`Deferred::resume`](crate::deferred::Deferred::resume) carried `state` here. The reply takes the message's place, and
    /// may be deferred once more. It is not called if the connection ended, and on shards only.
    fn resume(&self, conn: &mut Self::Conn, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        let _ = (conn, state, reply);
    }

    /// Something happened to the exchange of a connection ([`crate::outgoing`]). Replies leave at once, but behind those that
    /// are held back: by a deferred reply where order matters, or by a gate.
    fn upstream(&self, conn: &mut Self::Conn, event: Upstream, reply: &mut Reply<'_>) {
        let _ = (conn, event, reply);
    }

    /// True for protocols in which the peer speaks first. A connection is then accepted when its first bytes are here
    /// (TCP_DEFER_ACCEPT, tcp(7)), and they are received at once: one wake-up less per connection. A peer that says
    /// nothing stays in the kernel, without a socket, and is accepted a second later.
    fn peer_speaks_first(&self) -> bool {
        false
    }

    /// False if the service does not ask for the address of a peer: [`Peer::Unnamed`] then saves a system call per connection.
    fn needs_peer_addresses(&self) -> bool {
        true
    }

    /// Whether replies must leave in the order of their requests.
    fn order(&self) -> Order {
        Order::Requests
    }

    /// True when the service keeps messages beyond [`Service::call`]: those that did not arrive in one slot are then
    /// made keepable without a further copy.
    fn keeps_messages(&self) -> bool {
        false
    }

    /// A connection was accepted, or a datagram socket opened.
    fn accept(&self, peer: &Peer) -> Result<Self::Conn, Refused>;

    /// Answers a message: at once, later ([`Reply::defer`]), several times, or not at all.
    fn call(&self, conn: &mut Self::Conn, message: &Message<'_>, reply: &mut Reply<'_>);

    /// A further state for the same connection, so that two of its messages can be worked on at once where the service
    /// has several [workers](crate::adopt). `None`, unless said otherwise: they are worked on one after the other.
    /// It is not asked where replies keep the order of requests.
    fn fork(&self, conn: &Self::Conn) -> Option<Self::Conn> {
        let _ = conn;
        None
    }

    /// The connection ended.
    fn close(&self, conn: Self::Conn) {
        drop(conn);
    }

    /// Most bytes that the reply to a message may have. The shard asks before it hands the message over while it owes more
    /// than half of `shard_bytes_max`; a message whose reply may be long then waits until there is room. 0 by default, so a
    /// service whose replies can be much longer than its requests answers this.
    fn reply_bytes(&self, conn: &mut Self::Conn, message: &[u8]) -> usize {
        let _ = (conn, message);
        0
    }

    /// What the state of a connection means for the memory of its shard: [`SessionState`].
    fn session(&self, conn: &Self::Conn) -> SessionState {
        let _ = conn;
        SessionState::default()
    }

    /// True if it does what only shards can: [`Reply::dial`] or [`Reply::hold`]. Code that calls services elsewhere
    /// refuses it at start ([`adopt::check`](crate::adopt::check)).
    fn needs_shards(&self) -> bool {
        false
    }

    /// Counters of the service's own: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// What a shard asks of the state of a connection when memory is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionState {
    /// The peer has not told who it is, as it must: it is closed before others are. False by default.
    pub is_stranger: bool,
    /// Bytes that the state keeps because of what the peer sent, beyond a fixed size: they are counted with what the shard
    /// owes. The shard asks after each call. A service adds no more than [`Reply::session_room`] at a time. 0 by default.
    pub bytes: usize,
}

/// Order of replies on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As the requests came: a deferred reply holds back those behind it.
    Requests,
    /// As they are ready: the protocol carries ids.
    Free,
}

/// The service does not want this connection; it is closed and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// The address of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Peer {
    /// A TCP connection from this address.
    Tcp(SocketAddr),
    /// A Unix-domain stream connection.
    Unix,
    /// A stream connection whose peer was not asked for ([`Service::needs_peer_addresses`]).
    Unnamed,
    /// A datagram from this address; for [`Service::accept`], the address the socket is bound to.
    Udp(SocketAddr),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => write!(f, "tcp {addr}"),
            Self::Unix => f.write_str("unix"),
            Self::Unnamed => f.write_str("unnamed"),
            Self::Udp(addr) => write!(f, "udp {addr}"),
        }
    }
}

/// Names where a message came from: a stream connection, or a datagram socket. The generation tells a connection from
/// its predecessor in the same place, so a late reply never reaches another peer.
///
/// No two connections and sockets of a shard, and no two connections of a multiplexor, have the same key while a server runs (but for a place that had 2^32
/// connections, when its first key comes again). Those of two shards may ([`Reply::shard`] tells them apart). All
/// datagrams of a socket have the socket's key. A service that remembers something of a sender of datagrams, such as the
/// reply to a request that may be repeated, files it under the sender's address ([`Message::peer`]), too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnKey {
    /// Place in the table.
    pub index: u32,
    /// Counts the connections that had this place.
    pub generation: u32,
}

impl ConnKey {
    /// The key of what arrives at a datagram socket of a shard. Counted from the end: a place is taken for each
    /// connection that is open, and there can never be so many.
    pub(crate) const fn of_datagrams(socket: u32) -> Self {
        Self { index: u32::MAX - socket, generation: 0 }
    }

    /// As one number, for C and for the data of an epoll event.
    pub const fn to_u64(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// The inverse of [`Self::to_u64`].
    pub const fn from_u64(id: u64) -> Self {
        Self { index: id as u32, generation: (id >> 32) as u32 }
    }
}

impl fmt::Display for ConnKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// One message: the bytes between the framing.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub(crate) bytes: &'a [u8],
    /// The chunk that holds `bytes`, and where in it they begin.
    pub(crate) origin: Option<(&'a Chunk, usize)>,
    pub(crate) peer: Peer,
    pub(crate) key: ConnKey,
}

impl<'a> Message<'a> {
    /// The message.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The address of its sender.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The connection, or datagram socket, it came on.
    pub fn key(&self) -> ConnKey {
        self.key
    }

    /// Keeps the message beyond the call. A message of at most 2 KiB is copied into a [short slot](crate::pool), where it
    /// occupies no more than that. A longer one, and any if all short slots are taken or the shard has none, stays where it was
    /// received: the slot is counted, not copied, as long as no more than half of the shard's slots are kept; beyond that the
    /// message is copied to the heap, so that there is always a slot to receive into. One that was put together from several
    /// slots is copied to the heap, unless the service said that it [keeps messages](Service::keeps_messages).
    /// [`Chunk::name`] tells which it was.
    pub fn keep(&self) -> Chunk {
        match self.origin {
            Some((chunk, start)) => chunk.slice(start..start + self.bytes.len()).into_kept_message(),
            None => Chunk::from_vec(self.bytes.to_vec()),
        }
    }
}

impl Message<'_> {
    /// The same for a part of the message.
    ///
    /// # Panics
    /// If the range is not inside the message.
    pub fn keep_part(&self, range: std::ops::Range<usize>) -> Chunk {
        let part = &self.bytes[range.clone()];
        match self.origin {
            Some((chunk, start)) => chunk.slice(start + range.start..start + range.end).into_kept_message(),
            None => Chunk::from_vec(part.to_vec()),
        }
    }
}

impl<'a> Message<'a> {
    /// A message for [`call_outside`].
    pub fn new(chunk: &'a Chunk, peer: Peer, key: ConnKey) -> Self {
        Self::of_chunk(chunk, 0..chunk.len(), peer, key)
    }

    /// The same for a part of a chunk.
    ///
    /// # Panics
    /// If the range is not inside the chunk.
    pub fn of_chunk(chunk: &'a Chunk, range: std::ops::Range<usize>, peer: Peer, key: ConnKey) -> Self {
        Self { bytes: &chunk[range.clone()], origin: Some((chunk, range.start)), peer, key }
    }
}

/// What is left to do for a message when [`call_outside`] returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOutcome {
    /// Answers that will come to [`Env::answers`].
    pub deferred: u32,
    /// What these answers will need, as far as it is known ([`Reply::defer_for`]).
    pub work_bytes: usize,
    /// The service wants the connection closed, after these answers.
    pub close: bool,
}

/// Calls a service outside of a shard, for code that moves the bytes of streams in another way. Replies are appended to
/// `output`, framed; `ticket` is what deferred ones will be known by, `expected_bytes` what one of them is assumed to need.
pub fn call_outside<S: Service>(
    service: &S,
    conn: &mut S::Conn,
    message: &Message<'_>,
    ticket: u64,
    expected_bytes: usize,
    output: &mut Output,
    env: &mut Env,
) -> CallOutcome {
    let target = Target::Stream { key: message.key, ticket, work_bytes: 0 };
    // The message itself is counted by the caller, which keeps it.
    let mut reply = Reply::new(service.framing(), Sink::Stream(output), env, target, 0);
    reply.expected_bytes = expected_bytes;
    service.call(conn, message, &mut reply);
    CallOutcome { deferred: reply.deferred, work_bytes: reply.work_bytes, close: reply.close }
}
