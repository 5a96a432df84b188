//! What the author of a service writes: a framing, and a function from message to replies.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;

use crate::datagram_output::DatagramOutput;
use crate::deferred::{Deferred, Target};
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::files::{FileRange, NoFileReplies};
use crate::framing::{Frame, Framing};
use crate::gates::{Gate, GateSet};
use crate::limits::Limits;
use crate::listener::DatagramPeer;
use crate::outgoing::{Exchange, ExchangeFull, ExchangeRequest, ExchangeWork, NoOutgoing, Upstream};
use crate::output::Output;
use crate::pool::Chunk;
use crate::tasks::Task;

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
    /// last of its message, without header and trailer, and not empty. Who returns one may change `conn`: the part is
    /// handed to [`Service::call`] next. If it is longer than `buf` it is put together first, and must not be longer than
    /// `message_bytes_max`; what is there in full may be.
    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let _ = (conn, limits);
        self.framing().parse(buf, scanned)
    }

    /// Most bytes that may arrive before [`Service::cut`] tells how a message goes on; `limits.header_bytes_max` unless said
    /// otherwise. A protocol that knows the length of a message only at its end returns `limits.message_bytes_max`.
    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.header_bytes_max
    }

    /// Last words to a peer whose connection is about to be closed for what it sent, or for how slowly: malformed,
    /// too long, or not whole in time. Nothing, unless said otherwise. They leave behind the replies that wait already.
    fn refuse(&self, conn: &mut Self::Conn, reason: CloseReason, reply: &mut Reply<'_>) {
        let _ = (conn, reason, reply);
    }

    /// Goes on with a message that was deferred, back on its connection: [`Deferred::resume`] carried `state` here. The
    /// reply takes the message's place, and may be deferred once more. Not called if the connection ended. On shards only.
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

    /// False if nobody asks for the address of a peer: [`Peer::Unnamed`] then saves a system call per connection.
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
    /// Not asked where replies keep the order of requests.
    fn fork(&self, conn: &Self::Conn) -> Option<Self::Conn> {
        let _ = conn;
        None
    }

    /// The connection ended.
    fn close(&self, conn: Self::Conn) {
        drop(conn);
    }

    /// True if it does what only shards can: [`Reply::dial`] or [`Reply::hold`]. Whoever calls services elsewhere
    /// refuses it at start ([`adopt::check`](crate::adopt::check)).
    fn needs_shards(&self) -> bool {
        false
    }

    /// Counters of the service's own: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
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

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Peer {
    /// A TCP connection from this address.
    Tcp(SocketAddr),
    /// A Unix-domain stream connection.
    Unix,
    /// A stream connection whose peer nobody asked for ([`Service::needs_peer_addresses`]).
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
/// datagrams of a socket have its key, whoever sent them: what is remembered of a sender of datagrams, such as the reply
/// to a request that may be repeated, is filed under its address ([`Message::peer`]) as well.
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

    /// Who sent it.
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
pub struct Outcome {
    /// Answers that will come to [`Env::answers`].
    pub deferred: u32,
    /// What these answers will need, as far as it is known ([`Reply::defer_for`]).
    pub work_bytes: usize,
    /// The service wants the connection closed, after these answers.
    pub close: bool,
}

/// Calls a service outside of a shard, for whoever moves the bytes of streams in another way. Replies are appended to
/// `output`, framed; `ticket` is what deferred ones will be known by, `expected_bytes` what one of them is assumed to need.
pub fn call_outside<S: Service>(
    service: &S,
    conn: &mut S::Conn,
    message: &Message<'_>,
    ticket: u64,
    expected_bytes: usize,
    output: &mut Output,
    env: &mut Env,
) -> Outcome {
    let target = Target::Stream { key: message.key, ticket, work_bytes: 0 };
    // The message itself is counted by the caller, who keeps it.
    let mut reply = Reply::new(service.framing(), Sink::Stream(output), env, target, 0);
    reply.expected_bytes = expected_bytes;
    service.call(conn, message, &mut reply);
    Outcome { deferred: reply.deferred, work_bytes: reply.work_bytes, close: reply.close }
}

/// Where the replies to one message go.
pub struct Reply<'a> {
    pub(crate) framing: Framing,
    pub(crate) sink: Sink<'a>,
    pub(crate) env: &'a mut Env,
    pub(crate) target: Target,
    /// Bytes of the message, until they are counted as work.
    message_bytes: usize,
    /// What a deferred reply is assumed to need, where the service does not say it.
    pub(crate) expected_bytes: usize,
    /// What was counted as work.
    pub(crate) work_bytes: usize,
    /// What was passed on to the other end of the exchange.
    pub(crate) passed_bytes: usize,
    /// Answers the message is still owed.
    pub(crate) deferred: u32,
    /// What must be durable before the replies may leave.
    pub(crate) gates: GateSet,
    /// A task was given to the threads that may block.
    pub(crate) blocks: bool,
    pub(crate) close: bool,
    /// The close need not wait for the peer.
    pub(crate) at_once: bool,
    pub(crate) exchange: Exchange,
}

pub(crate) enum Sink<'a> {
    Stream(&'a mut Output),
    Datagrams(&'a mut DatagramOutput, DatagramPeer),
}

/// Appends one reply with its framing. False: it cannot be framed, and `tail` is as before.
// Always: with what it writes known, it is a few stores; as a call it was a third of the cost of a small reply.
#[inline(always)]
fn append_framed<R>(framing: &Framing, tail: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> R) -> (R, bool) {
    let start = tail.len();
    framing.begin_reply(tail);
    let result = write(tail);
    let fits = framing.finish_reply(tail, start, 0).is_ok();
    if fits {
        tail.extend_from_slice(framing.reply_trailer());
    } else {
        tail.truncate(start);
    }
    (result, fits)
}

fn note_framed<R>((result, fits): (R, bool), env: &Env, close: &mut bool) -> R {
    if fits {
        env.stats.replies.add(1);
    } else {
        env.stats.replies_unframable.add(1);
        *close = true;
    }
    result
}

/// Replies below this length are copied even where they could be sent from their slot: that is faster, and frees it.
pub(crate) const COPY_BYTES_MAX: usize = 2048;

/// What a deferred reply is assumed to need before a connection has seen one.
pub const EXPECTED_REPLY_BYTES: usize = 4096;

impl<'a> Reply<'a> {
    pub(crate) fn new(
        framing: Framing,
        sink: Sink<'a>,
        env: &'a mut Env,
        target: Target,
        message_bytes: usize,
    ) -> Self {
        Self {
            framing,
            sink,
            env,
            target,
            message_bytes,
            expected_bytes: EXPECTED_REPLY_BYTES,
            work_bytes: 0,
            passed_bytes: 0,
            deferred: 0,
            gates: GateSet::default(),
            blocks: false,
            close: false,
            at_once: false,
            exchange: Exchange::default(),
        }
    }
}

impl Reply<'_> {
    /// Holds the replies to this message until what `gate` names is durable. They are written now and leave when it is
    /// [released](crate::Turn::release); replies behind them wait, too. Several gates must all open.
    ///
    /// Only shards have gates: on workers and for datagrams a service defers instead.
    pub fn gate(&mut self, gate: Gate) {
        self.gates.add(gate);
    }

    /// Sends one reply: `write` appends its body to the buffer (and must not touch what is there already); header
    /// and trailer of the framing are added around it.
    pub fn message<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.message_for(0, write)
    }

    /// The same, for a body of about `bytes` bytes.
    #[inline]
    fn message_for<R>(&mut self, bytes: usize, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        match &mut self.sink {
            Sink::Stream(output) => {
                let framed = append_framed(&self.framing, output.tail_for(bytes, &mut self.env.spares), write);
                note_framed(framed, self.env, &mut self.close)
            }
            Sink::Datagrams(output, peer) => {
                // A datagram is a message as it is, without framing.
                self.env.stats.replies.add(1);
                output.add(*peer, write)
            }
        }
    }

    /// Sends one reply with this body.
    pub fn bytes(&mut self, body: &[u8]) {
        /// What a framing adds: a header of at most 8 bytes, a delimiter of at most 8.
        const AROUND_BYTES: usize = 16;
        self.message_for(body.len() + AROUND_BYTES, |tail| tail.extend_from_slice(body));
    }

    /// Sends one reply with this body, without copying it if it is long.
    pub fn owned(&mut self, body: Vec<u8>) {
        if body.len() <= COPY_BYTES_MAX || matches!(self.sink, Sink::Datagrams(..)) {
            return self.bytes(&body);
        }
        self.piece(body.len(), |output, env| output.push_bytes(body, &mut env.spares));
    }

    /// Sends one reply with this body from where it lies, if it is long and its slot may be kept, else copied.
    pub fn chunk(&mut self, body: Chunk) {
        if body.len() <= COPY_BYTES_MAX || matches!(self.sink, Sink::Datagrams(..)) || !body.keep() {
            return self.bytes(&body);
        }
        self.piece(body.len(), |output, env| output.push_chunk(body, &mut env.spares));
    }

    /// Sends one reply of three parts: `head` appends the first, as in [`Reply::message`]; `body` leaves from where it lies,
    /// if it is long; `end` follows (padding, for instance).
    pub fn parts(&mut self, head: impl FnOnce(&mut Vec<u8>), body: Chunk, end: &'static [u8]) {
        let copied = body.len() <= COPY_BYTES_MAX || matches!(self.sink, Sink::Datagrams(..)) || !body.keep();
        if copied {
            return self.message(|tail| {
                head(tail);
                tail.extend_from_slice(&body);
                tail.extend_from_slice(end);
            });
        }
        self.pieces(body.len() + end.len(), head, |output, env| {
            output.push_chunk(body, &mut env.spares);
            output.tail(&mut env.spares).extend_from_slice(end);
        });
    }

    /// Sends one reply of three parts: `head` appends the first, as in [`Reply::message`]; `range` of a file follows, and
    /// then `end`. The shard reads the file while the connection sends, a [window](crate::output::FILE_WINDOW_BYTES) at a
    /// time, and never waits for it. If the file turns out to be shorter than promised, or cannot be read, the connection
    /// is reset and [counted](CloseReason::FileRange); so it is if a part of it does not come within
    /// [`send_timeout_ms`](crate::limits::Limits::send_timeout_ms).
    ///
    /// # Errors
    ///
    /// [`NoFileReplies`]: only shards send files, and only on streams. Nothing was sent.
    pub fn file(
        &mut self,
        head: impl FnOnce(&mut Vec<u8>),
        range: FileRange,
        end: &'static [u8],
    ) -> Result<(), NoFileReplies> {
        if matches!(self.sink, Sink::Datagrams(..)) || self.env.answers.is_some() {
            return Err(NoFileReplies);
        }
        if let Sink::Stream(output) = &mut self.sink {
            output.begin_head(&mut self.env.spares);
        }
        self.pieces(range.bytes + end.len(), head, |output, env| {
            output.push_file(range, &mut env.spares);
            output.tail(&mut env.spares).extend_from_slice(end);
        });
        Ok(())
    }

    /// Frames a body of `bytes` bytes that `push` appends as a piece of its own. For streams.
    fn piece(&mut self, bytes: usize, push: impl FnOnce(&mut Output, &mut Env)) {
        self.pieces(bytes, |_| (), push);
    }

    /// The same behind what `head` appends.
    fn pieces(&mut self, bytes: usize, head: impl FnOnce(&mut Vec<u8>), push: impl FnOnce(&mut Output, &mut Env)) {
        let Sink::Stream(output) = &mut self.sink else { return };
        let tail = output.tail(&mut self.env.spares);
        let start = tail.len();
        self.framing.begin_reply(tail);
        head(tail);
        if self.framing.finish_reply(tail, start, bytes).is_err() {
            tail.truncate(start);
            self.env.stats.replies_unframable.add(1);
            self.close = true;
            return;
        }
        push(output, self.env);
        let trailer = self.framing.reply_trailer();
        if !trailer.is_empty() {
            output.tail(&mut self.env.spares).extend_from_slice(trailer);
        }
        self.env.stats.replies.add(1);
    }

    /// Answers later, from any thread. The message counts as outstanding until then; called several times, until the
    /// last of the answers.
    pub fn defer(&mut self) -> Deferred {
        self.defer_for(self.expected_bytes)
    }

    /// The same, for a reply whose length the protocol tells before the work begins, such as the answer to a read. These
    /// bytes are taken off the connection's budget ([`Limits::connection_bytes_max`]) until the answer comes, so a peer
    /// cannot have more work done than it may have memory for. For a datagram they are taken off the shard's
    /// ([`Limits::shard_bytes_max`]).
    pub fn defer_for(&mut self, reply_bytes: usize) -> Deferred {
        self.deferred += 1;
        let work_bytes = std::mem::take(&mut self.message_bytes) + reply_bytes;
        self.work_bytes += work_bytes;
        let target = match self.target {
            Target::Stream { key, ticket, .. } => Target::Stream { key, ticket, work_bytes },
            Target::Datagram { socket, peer, .. } => Target::Datagram { socket, peer, work_bytes },
        };
        Deferred::new(self.env, target)
    }

    /// Runs `task` on the shard's thread pool, which answers through the [`Deferred`] it is given. When the pool's
    /// queue is full the task comes back, and the service decides: answer busy, or do the work here.
    ///
    /// # Errors
    ///
    /// The task, if the queue is full or there is no thread pool.
    pub fn offload<T>(&mut self, task: T) -> Result<(), T>
    where
        T: FnOnce(Deferred) + Send + 'static,
    {
        let Some(tasks) = self.env.tasks.clone() else { return Err(task) };
        let Some(room) = tasks.reserve(self.env.shard) else {
            self.env.stats.tasks_refused.add(1);
            return Err(task);
        };
        let deferred = self.defer();
        room.submit(Task::new(move || task(deferred)));
        Ok(())
    }

    /// Runs `task` on a thread that may block, in a file system for instance, and that is bound to no CPU. The task
    /// answers through the [`Deferred`] it is given, with up to `reply_bytes` bytes ([`Reply::defer_for`]).
    ///
    /// The task is never refused. While the queue of these threads is full, a connection that has an answer outstanding
    /// is not read, so that the queue grows by at most one task for each connection. A datagram is dropped then, and
    /// counted: its sender asks again. Outside of shards the task runs at once: the thread of a worker may block.
    pub fn block<T>(&mut self, reply_bytes: usize, task: T)
    where
        T: FnOnce(Deferred) + Send + 'static,
    {
        let Some(tasks) = self.env.tasks.clone() else { return task(self.defer_for(reply_bytes)) };
        if matches!(self.target, Target::Datagram { .. }) && tasks.is_blocking_full() {
            return self.env.stats.tasks_refused.add(1);
        }
        let deferred = self.defer_for(reply_bytes);
        self.blocks = true;
        tasks.block(Task::new(move || task(deferred)));
    }

    /// Closes the connection after the replies to this message and to those before it, deferred ones included.
    pub fn close(&mut self) {
        self.close = true;
    }

    /// The same, for protocols in which the peer sends nothing behind this message: the socket is closed with the last
    /// reply, without waiting for the peer's end. If more has arrived all the same, this is [`Reply::close`].
    pub fn close_at_once(&mut self) {
        self.close = true;
        self.at_once = true;
    }

    /// Begins an exchange with somebody else: connects, or takes a kept connection if `reuse` lets it. Ends the one
    /// before. What is passed on before it is connected waits.
    ///
    /// What comes of it is told to [`Service::upstream`]. A service that dials says so by [`Service::needs_shards`]: it is
    /// then refused at start where this would fail for every message.
    ///
    /// # Errors
    ///
    /// [`NoOutgoing`]: only shards have outgoing connections, for messages of streams. Nothing was begun.
    pub fn dial(&mut self, to: SocketAddr, reuse: bool) -> Result<(), NoOutgoing> {
        let (Target::Stream { key: from, .. }, None) = (self.target, &self.env.answers) else { return Err(NoOutgoing) };
        self.exchange = Exchange { open: true, hold: self.exchange.hold, ..Exchange::default() };
        self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::Dial { to, reuse } });
        Ok(())
    }

    /// Passes bytes to the other end of the exchange; lost if there is none. A message is never handed over while the
    /// exchange is full, so all that is passed on for it is taken.
    ///
    /// # Errors
    ///
    /// [`ExchangeFull`] with the bytes, in the calls that come all the same, for what the other end sends and for deferred
    /// answers: too much waited for the other end when the call began. The other end is not read until it takes bytes
    /// again; then [`Upstream::Room`](crate::outgoing::Upstream::Room) is told.
    pub fn pass(&mut self, bytes: Chunk) -> Result<(), ExchangeFull> {
        if let Target::Stream { key: from, .. } = self.target
            && self.exchange.open
        {
            if self.exchange.full || self.exchange.crowded {
                self.exchange.refused = true;
                return Err(ExchangeFull(bytes));
            }
            self.passed_bytes += bytes.len();
            self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::Pass(bytes) });
        }
        Ok(())
    }

    /// Ends the exchange. `keep`: the connection may serve another one, because both ends agree that this one is over.
    /// A kept one with unsent bytes is closed all the same.
    pub fn hang_up(&mut self, keep: bool) {
        if let Target::Stream { key: from, .. } = self.target
            && self.exchange.open
        {
            self.exchange = Exchange { hold: self.exchange.hold, ..Exchange::default() };
            self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::HangUp { keep } });
        }
    }

    /// Holds further messages of this connection back, or lets them come again: a request behind one that is with
    /// somebody else waits. On shards only, see [`Service::needs_shards`].
    pub fn hold(&mut self, hold: bool) {
        self.exchange.hold = hold;
    }

    /// Number of the shard this runs on, below the number of CPUs of the server.
    pub fn shard(&self) -> usize {
        self.env.shard
    }
}
