//! What the author of a service writes: a framing, and a function from message to replies.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;

use crate::deferred::Target;
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::files::FileDone;
use crate::framing::{Frame, Framing};
use crate::limits::Limits;
use crate::logged::{Mode, Unlogged};
use crate::outgoing::Upstream;
use crate::output::Output;
use crate::pool::Chunk;
use crate::turn::Turn;

mod pieces;
mod reply;

pub use pieces::Pieces;
pub(crate) use reply::{COPY_BYTES_MAX, Said, Sink};
pub use reply::{EXPECTED_REPLY_BYTES, Reply};

/// What a shard must know of a service before its first connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile<'a> {
    /// Name in messages and counters.
    pub name: &'a str,
    /// How a byte stream is cut into messages. Datagrams are messages as they are.
    pub framing: Framing,
    /// Whether replies must leave in the order of their requests. They must, by default.
    pub order: Order,
    /// True when the service keeps messages beyond [`Service::call`]: those that did not arrive in one slot are then
    /// made keepable without a further copy. False by default.
    pub keeps_messages: bool,
    /// True for protocols in which the peer speaks first. A connection is then accepted when its first bytes are here
    /// (TCP_DEFER_ACCEPT, tcp(7)), and they are received at once: one wake-up less per connection. A peer that says
    /// nothing stays in the kernel, without a socket, and is accepted a second later. False by default.
    pub peer_speaks_first: bool,
    /// False if the service does not ask for the address of a peer: [`Peer::Unnamed`] then saves a system call per connection.
    /// True by default.
    pub needs_peer_addresses: bool,
    /// True if [`Service::turn_end`] is to be called. False by default.
    pub turn_ends: bool,
    /// True if the service does what only shards can: [`Reply::dial`] or [`Reply::hold`]. Code that calls services elsewhere
    /// refuses it at start ([`adopt::check`](crate::adopt::check)). False by default.
    pub needs_shards: bool,
}

impl<'a> Profile<'a> {
    /// A service with ordered replies, and nothing special.
    pub fn new(name: &'a str, framing: Framing) -> Self {
        Self {
            name,
            framing,
            order: Order::Requests,
            keeps_messages: false,
            peer_speaks_first: false,
            needs_peer_addresses: true,
            turn_ends: false,
            needs_shards: false,
        }
    }
}

/// A service: how the stream is cut into messages, and what answers them.
///
/// One value serves all shards, so it is shared between threads. What belongs to one shard or to one connection is handed to
/// each call without a lock: a call runs on the thread of the shard, and no other call of this service runs there meanwhile.
///
/// Three types have no default, nor have [`profile`](Self::profile), [`start`](Self::start), [`accept`](Self::accept) and
/// [`call`](Self::call); [`stateless!`](crate::stateless) defines all but `profile` and `call` for a service without state. A service
/// with `Shard = ()` and `Mode = Unlogged` may also run on the [workers](crate::adopt) of a multiplexor.
pub trait Service: Send + Sync + 'static {
    /// State of one shard, made on its thread, where it stays: `()` if there is none.
    type Shard: 'static;
    /// State of one connection, or of one datagram socket.
    type Conn: 'static;
    /// [`Unlogged`], or [`Logged`](crate::logged::Logged) for a service that promises durability: each of its replies then names the log
    /// that it waits for.
    type Mode: Mode;

    /// What a shard must know of the service.
    fn profile(&self) -> Profile<'_>;

    /// Makes the state of a shard, on its thread, before it accepts anything.
    ///
    /// # Errors
    ///
    /// The service cannot work here; the server does not start.
    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Self::Shard>;

    /// A connection was accepted, or a datagram socket opened.
    ///
    /// # Errors
    ///
    /// [`Refused`]: the service does not want it; it is closed and counted.
    fn accept(&self, shard: &mut Self::Shard, peer: &Peer) -> Result<Self::Conn, Refused>;

    /// Answers a message: at once, later ([`Reply::defer`]), behind a gate, several times, or not at all.
    fn call(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        message: &Message<'_>,
        reply: &mut Reply<'_, Self::Mode>,
    );

    /// Goes on with a message that was deferred, back on its connection:
    /// [`Deferred::resume`](crate::deferred::Deferred::resume) carried `state` here. The reply takes the message's place in the
    /// order, and may be deferred once more. It is not called if the connection ended, and on shards only.
    fn resume(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_, Self::Mode>,
    ) {
        let _ = (shard, conn, state, reply);
    }

    /// The messages of a turn are through, of all connections; nothing of their replies has left yet. Called if the
    /// [profile](Profile::turn_ends) says so, after turns in which the service was called, and when it
    /// [asked for one](Turn::wake_at). After a panic here the service's logs on this shard are [lost](crate::gates), and the
    /// connections end whose replies wait for them; the others go on.
    fn turn_end(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>) {
        let _ = (shard, turn);
    }

    /// An operation ended that the service began with its [`Files`](crate::files::Files). Each one ends once, also when the server
    /// stops; only one that the kernel does not let go of in time does not. A panic is as one in [`turn_end`](Self::turn_end).
    fn file_done(&self, shard: &mut Self::Shard, done: FileDone, turn: &mut Turn<'_>) {
        let _ = (shard, done, turn);
    }

    /// There is room for operations on files again, after one of this service was refused on this shard: the service can try
    /// again those that it kept. It is called again if one is refused again.
    fn files_have_room(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>) {
        let _ = (shard, turn);
    }

    /// Cuts the next part off `buf`, where the framing is [`Framing::Custom`]: the unconsumed front of the stream.
    /// `scanned` bytes of it were in an earlier call that returned [`Frame::Incomplete`]. A [`Frame::Part`] must be the
    /// last of its message, without header and trailer, and not empty. A service that returns one may change `conn`: the
    /// part is handed to [`Service::call`] next. If it is longer than `buf` it is put together first, and must not be longer
    /// than `message_bytes_max`; what is there in full may be.
    ///
    /// # Errors
    ///
    /// The bytes make no sense; the connection is closed.
    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let _ = (conn, limits);
        self.profile().framing.parse(buf, scanned)
    }

    /// Most bytes that may arrive before [`Service::cut`] tells how a message goes on; `limits.header_bytes_max` unless said
    /// otherwise. A protocol that knows the length of a message only at its end returns `limits.message_bytes_max`.
    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.header_bytes_max
    }

    /// Last words to a peer whose connection is about to be closed for what it sent, or for how slowly: malformed,
    /// too long, or not whole in time. Nothing, unless said otherwise. They leave behind the replies that wait already.
    fn refuse(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        reason: CloseReason,
        reply: &mut Reply<'_, Self::Mode>,
    ) {
        let _ = (shard, conn, reason, reply);
    }

    /// Something happened to the exchange of a connection ([`crate::outgoing`]). Replies leave at once, but behind those that
    /// are held back: by a deferred reply where order matters, or by a gate.
    fn upstream(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        event: Upstream,
        reply: &mut Reply<'_, Self::Mode>,
    ) {
        let _ = (shard, conn, event, reply);
    }

    /// Most bytes that the reply to a message may have. The shard asks before it hands the message over while it owes more
    /// than half of `shard_bytes_max`; a worker of a multiplexor asks before each call. A message whose reply may be long then
    /// waits until there is room. 0 by default, so a service whose replies can be much longer than its requests answers this.
    fn reply_bytes(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, message: &[u8]) -> usize {
        let _ = (shard, conn, message);
        0
    }

    /// What the shard must know of the state of a connection: [`SessionState`]. The shard asks after each call for the connection.
    fn session(&self, conn: &Self::Conn) -> SessionState {
        let _ = conn;
        SessionState::default()
    }

    /// A further state for the same connection, so that two of its messages can be worked on at once where the service
    /// has several [workers](crate::adopt). `None`, unless said otherwise: they are worked on one after the other.
    /// It is not asked where replies keep the order of requests.
    fn fork(&self, conn: &Self::Conn) -> Option<Self::Conn> {
        let _ = conn;
        None
    }

    /// The connection ended.
    fn close(&self, shard: &mut Self::Shard, conn: Self::Conn) {
        let _ = shard;
        drop(conn);
    }

    /// The shard ends; no connection is left.
    fn stop(&self, shard: Self::Shard) {
        drop(shard);
    }

    /// Counters of the service's own: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A service that may run outside of shards, on the [workers](crate::adopt) of a multiplexor: without state on shards and without
/// logs. Every such service is one.
pub trait WorkerService: Service<Shard = (), Mode = Unlogged, Conn: Send> {}

impl<S: Service<Shard = (), Mode = Unlogged, Conn: Send>> WorkerService for S {}

/// The items of a [`Service`] without state, in its `impl`: the three types, `start`, and an `accept` that refuses no peer.
/// `stateless!(shard)` is for a service that has state of connections: it leaves out `Conn` and `accept`.
#[macro_export]
macro_rules! stateless {
    () => {
        $crate::stateless!(shard);
        type Conn = ();

        fn accept(&self, (): &mut (), _: &$crate::Peer) -> ::std::result::Result<(), $crate::Refused> {
            ::std::result::Result::Ok(())
        }
    };
    (shard) => {
        type Shard = ();
        type Mode = $crate::Unlogged;

        fn start(&self, _: &mut $crate::Turn<'_>) -> ::std::io::Result<()> {
            ::std::result::Result::Ok(())
        }
    };
}

/// What a shard asks of the state of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionState {
    /// The peer has not told who it is, as it must: it is closed before others are, and when more than
    /// [`STRANGER_REPLIES_MAX`](crate::budget::STRANGER_REPLIES_MAX) bytes of replies wait for it. False by default.
    pub is_stranger: bool,
    /// Bytes that the state keeps because of what the peer sent, beyond a fixed size: they are counted with what the shard
    /// owes. A service adds no more than [`Reply::session_room`] at a time, but needs no room for the first
    /// [`EXPECTED_REPLY_BYTES`] of a connection. 0 by default.
    pub bytes: usize,
    /// Of a service with [`Framing::Custom`]: the message that was handed over last is a part, of which the next part is to come.
    /// It has [`assembly_timeout_ms`](Limits::assembly_timeout_ms) from now to arrive. False by default.
    pub awaits_rest: bool,
    /// The end of the reply that was begun last. Of streams only.
    pub reply_end: ReplyEnd,
}

/// How a peer learns that it has all of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyEnd {
    /// By the reply itself: its length, or a mark behind it.
    #[default]
    Marked,
    /// By an orderly end of the connection, after [`Reply::close`]. An end for another reason, or before all of the reply is
    /// sent, is a reset.
    Close,
    /// Not at all, because the rest of the reply is missing. The end of the connection is a reset.
    CutShort,
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
    /// A stream connection whose peer was not asked for ([`Profile::needs_peer_addresses`]).
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
    /// slots is copied to the heap, unless the service said that it [keeps messages](Profile::keeps_messages).
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
pub fn call_outside<S: WorkerService>(
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
    let mut said = Said::new(service.profile().framing, target, 0);
    said.expected_bytes = expected_bytes;
    service.call(&mut (), conn, message, &mut Reply::new(Sink::Stream(output), env, &mut said));
    CallOutcome { deferred: said.deferred, work_bytes: said.work_bytes, close: said.close }
}
