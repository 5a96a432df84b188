//! Services that promise durability: every reply says what it depends on, and the compiler sees to it.
//!
//! [`LoggedService`] is [`ShardService`] with another reply. A [`LoggedReply`] has no method that sends bytes without an
//! [`After`], and a message that was deferred can only be resumed, which leads to a [`LoggedReply`] again. So no reply
//! can pass the gate by an oversight.

use std::any::Any;

use crate::deferred::Deferred;
use crate::error::{CloseReason, FramingError};
use crate::files::{FileDone, FileRange, NoFileReplies};
use crate::framing::Frame;
use crate::gates::Gate;
use crate::limits::Limits;
use crate::pool::Chunk;
use crate::service::{Message, Peer, Pieces, Refused, Reply, SessionState};
use crate::shard_service::{Profile, ShardService, Turn};

/// What must be durable before a reply may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// Nothing: the reply tells of no data (a greeting, a refusal, a counter).
    Nothing,
    /// Everything in a log up to a number: of a write, its own record; of a read, the record that wrote what it saw.
    Gate(Gate),
}

impl From<Gate> for After {
    fn from(gate: Gate) -> Self {
        Self::Gate(gate)
    }
}

/// A service whose replies wait for logs. [`Logged`] makes a [`ShardService`] of it.
pub trait LoggedService: Send + Sync + 'static {
    /// State of one shard: [`ShardService::Shard`].
    type Shard: 'static;
    /// State of one connection: [`ShardService::Conn`].
    type Conn: 'static;

    /// See [`ShardService::profile`].
    fn profile(&self) -> Profile<'_>;

    /// See [`ShardService::start`].
    ///
    /// # Errors
    ///
    /// The service cannot work here; the server does not start.
    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Self::Shard>;

    /// See [`ShardService::accept`].
    ///
    /// # Errors
    ///
    /// [`Refused`]: the service does not want the connection.
    fn accept(&self, shard: &mut Self::Shard, peer: &Peer) -> Result<Self::Conn, Refused>;

    /// See [`ShardService::call`].
    fn call(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, message: &Message<'_>, reply: LoggedReply<'_, '_>);

    /// See [`ShardService::turn_end`]: here the batch of the turn is written.
    fn turn_end(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>);

    /// See [`ShardService::file_done`]: here a batch that is durable is [released](Turn::release).
    fn file_done(&self, shard: &mut Self::Shard, done: FileDone, turn: &mut Turn<'_>) {
        let _ = (shard, done, turn);
    }

    /// See [`ShardService::files_have_room`].
    fn files_have_room(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>) {
        let _ = (shard, turn);
    }

    /// See [`ShardService::resume`].
    fn resume(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        state: Box<dyn Any + Send>,
        reply: LoggedReply<'_, '_>,
    ) {
        let _ = (shard, conn, state, reply);
    }

    /// See [`ShardService::cut`].
    ///
    /// # Errors
    ///
    /// The bytes make no sense; the connection is closed.
    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let _ = (conn, limits);
        self.profile().framing.parse(buf, scanned)
    }

    /// See [`ShardService::header_bytes_max`].
    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.header_bytes_max
    }

    /// See [`ShardService::awaits_rest`].
    fn awaits_rest(&self, conn: &Self::Conn) -> bool {
        let _ = conn;
        false
    }

    /// See [`ShardService::refuse`].
    fn refuse(&self, conn: &mut Self::Conn, reason: CloseReason, reply: LoggedReply<'_, '_>) {
        let _ = (conn, reason, reply);
    }

    /// See [`ShardService::reply_bytes`].
    fn reply_bytes(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, message: &[u8]) -> usize {
        let _ = (shard, conn, message);
        0
    }

    /// See [`ShardService::session`].
    fn session(&self, conn: &Self::Conn) -> SessionState {
        let _ = conn;
        SessionState::default()
    }

    /// See [`ShardService::close`].
    fn close(&self, shard: &mut Self::Shard, conn: Self::Conn) {
        let _ = shard;
        drop(conn);
    }

    /// See [`ShardService::stop`].
    fn stop(&self, shard: Self::Shard) {
        drop(shard);
    }

    /// See [`ShardService::counters`].
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A [`LoggedService`] as the server takes it.
#[derive(Debug)]
pub struct Logged<S>(pub S);

impl<S: LoggedService> ShardService for Logged<S> {
    type Shard = S::Shard;
    type Conn = S::Conn;

    fn profile(&self) -> Profile<'_> {
        self.0.profile()
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<S::Shard> {
        self.0.start(turn)
    }

    fn accept(&self, shard: &mut S::Shard, peer: &Peer) -> Result<S::Conn, Refused> {
        self.0.accept(shard, peer)
    }

    fn call(&self, shard: &mut S::Shard, conn: &mut S::Conn, message: &Message<'_>, reply: &mut Reply<'_>) {
        self.0.call(shard, conn, message, LoggedReply(reply));
    }

    fn turn_end(&self, shard: &mut S::Shard, turn: &mut Turn<'_>) {
        self.0.turn_end(shard, turn);
    }

    fn file_done(&self, shard: &mut S::Shard, done: FileDone, turn: &mut Turn<'_>) {
        self.0.file_done(shard, done, turn);
    }

    fn files_have_room(&self, shard: &mut S::Shard, turn: &mut Turn<'_>) {
        self.0.files_have_room(shard, turn);
    }

    fn resume(&self, shard: &mut S::Shard, conn: &mut S::Conn, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        self.0.resume(shard, conn, state, LoggedReply(reply));
    }

    fn cut(&self, conn: &mut S::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        self.0.cut(conn, buf, scanned, limits)
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        self.0.header_bytes_max(limits)
    }

    fn awaits_rest(&self, conn: &S::Conn) -> bool {
        self.0.awaits_rest(conn)
    }

    fn refuse(&self, _: &mut S::Shard, conn: &mut S::Conn, reason: CloseReason, reply: &mut Reply<'_>) {
        self.0.refuse(conn, reason, LoggedReply(reply));
    }

    fn reply_bytes(&self, shard: &mut S::Shard, conn: &mut S::Conn, message: &[u8]) -> usize {
        self.0.reply_bytes(shard, conn, message)
    }

    fn session(&self, conn: &S::Conn) -> SessionState {
        self.0.session(conn)
    }

    fn close(&self, shard: &mut S::Shard, conn: S::Conn) {
        self.0.close(shard, conn);
    }

    fn stop(&self, shard: S::Shard) {
        self.0.stop(shard);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}

/// Where the replies to one message go. Everything that sends says what must be durable first.
pub struct LoggedReply<'a, 'env>(&'a mut Reply<'env>);

impl LoggedReply<'_, '_> {
    fn after(&mut self, after: After) -> &mut Self {
        if let After::Gate(gate) = after {
            self.0.gate(gate);
        }
        self
    }

    /// Sends one reply once `after` is durable: [`Reply::message`].
    pub fn message<R>(&mut self, after: impl Into<After>, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.after(after.into()).0.message(write)
    }

    /// Sends one reply with this body once `after` is durable.
    pub fn bytes(&mut self, after: impl Into<After>, body: &[u8]) {
        self.after(after.into()).0.bytes(body);
    }

    /// Sends one reply with this body, from where it lies, once `after` is durable: [`Reply::chunk`].
    pub fn chunk(&mut self, after: impl Into<After>, body: Chunk) {
        self.after(after.into()).0.chunk(body);
    }

    /// Sends one reply that has a range of a file in it, once `after` is durable: [`Reply::file`].
    ///
    /// # Errors
    ///
    /// [`NoFileReplies`]: there are none here. Nothing was sent.
    pub fn file(
        &mut self,
        after: impl Into<After>,
        head: impl FnOnce(&mut Vec<u8>),
        range: FileRange,
        end: &'static [u8],
    ) -> Result<(), NoFileReplies> {
        self.after(after.into()).0.file(head, range, end)
    }

    /// Sends one reply of the pieces that `write` adds, once `after` is durable: [`Reply::pieces`].
    ///
    /// # Errors
    ///
    /// What `write` returns, [`NoFileReplies`] of [`Pieces::file`]. Nothing was sent.
    pub fn pieces(
        &mut self,
        after: impl Into<After>,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<(), NoFileReplies> {
        self.after(after.into()).0.pieces(write)
    }

    /// Adds a further log to wait for: a reply that saw what several logs wrote.
    pub fn also_after(&mut self, gate: Gate) {
        self.0.gate(gate);
    }

    /// Goes on later, for a reply that needs up to `reply_bytes` bytes: [`Reply::defer_for`].
    pub fn defer_for(&mut self, reply_bytes: usize) -> LoggedDeferred {
        LoggedDeferred(self.0.defer_for(reply_bytes))
    }

    /// Closes the connection after the replies to this message and to those before it.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Bytes that may be added to the state of this connection: [`Reply::session_room`].
    pub fn session_room(&self) -> usize {
        self.0.session_room()
    }

    /// Number of the shard this runs on.
    pub fn shard(&self) -> usize {
        self.0.shard()
    }
}

/// The right, and the duty, to go on with a message. It can be resumed, or need no reply; it cannot be answered past the
/// gate.
#[derive(Debug)]
pub struct LoggedDeferred(Deferred);

impl LoggedDeferred {
    /// Goes on from any thread: [`Deferred::resume`].
    pub fn resume(self, state: impl Any + Send) {
        self.0.resume(state);
    }

    /// Goes on in this turn, on the shard's own thread: [`Turn::resume`].
    pub fn resume_in(self, turn: &mut Turn<'_>, state: Box<dyn Any + Send>) {
        turn.resume(self.0, state);
    }

    /// Lets the message be without an answer: it needs none.
    pub fn no_reply(self) {
        self.0.no_reply();
    }
}
