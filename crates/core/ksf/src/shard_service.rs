//! Services with state of their own on each shard: what a store or a file server needs beyond [`Service`].
//!
//! Every [`Service`] is a [`ShardService`] without such state. A service that has some implements this trait instead:
//! it is told when a turn's messages are through, so that it can commit all of them with one write, it hears of the
//! file operations it began, and its replies may wait behind [gates](crate::gates).

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use crate::deferred::{Answer, Deferred, Mail, Mailbox};
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::files::{FileDone, Files, NoFileReplies, Owner};
use crate::framing::{Frame, Framing};
use crate::gates::{Gates, LogId, TooManyLogs};
use crate::limits::{Limits, Time};
use crate::outgoing::Upstream;
use crate::pool::Chunk;
use crate::service::{ConnKey, Message, Order, Peer, Pieces, Refused, Reply, Service, SessionState};
use crate::session::{Panicked, ServiceInfo};

/// What a shard must know of a service before its first connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile<'a> {
    /// Name in messages and counters.
    pub name: &'a str,
    /// How a byte stream is cut into messages.
    pub framing: Framing,
    /// Whether replies must leave in the order of their requests.
    pub order: Order,
    /// See [`Service::keeps_messages`].
    pub keeps_messages: bool,
    /// See [`Service::peer_speaks_first`].
    pub peer_speaks_first: bool,
    /// See [`Service::needs_peer_addresses`].
    pub needs_peer_addresses: bool,
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
        }
    }
}

/// A service with state on each shard.
///
/// One value serves all shards; [`ShardService::Shard`] is made on the shard's own thread, stays there, and is handed to
/// every call without a lock.
pub trait ShardService: Send + Sync + 'static {
    /// False if [`turn_end`](Self::turn_end) need not be called.
    const HAS_TURN_END: bool = true;

    /// State of one shard.
    type Shard: 'static;
    /// State of one connection, or of one datagram socket.
    type Conn: 'static;

    /// What a shard must know of the service.
    fn profile(&self) -> Profile<'_>;

    /// The same as [`Self::HAS_TURN_END`] for a value that knows it only when it is made: one that serves others.
    fn has_turn_end(&self) -> bool {
        Self::HAS_TURN_END
    }

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

    /// Answers a message: at once, later, behind a gate, several times, or not at all.
    fn call(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, message: &Message<'_>, reply: &mut Reply<'_>);

    /// The messages of a turn are through, of all connections; nothing of their replies has left yet. Called only after
    /// turns in which the service was called, and when it [asked for one](Turn::wake_at). After a panic here the service's logs on this shard are
    /// [lost](crate::gates), and the connections end whose replies wait for them; the others go on.
    fn turn_end(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>) {
        let _ = (shard, turn);
    }

    /// An operation ended that the service began with its [`Files`]. Each one ends once, also when the server stops; only one
    /// that the kernel does not let go of in time does not. A panic is as one in [`turn_end`](Self::turn_end).
    fn file_done(&self, shard: &mut Self::Shard, done: FileDone, turn: &mut Turn<'_>) {
        let _ = (shard, done, turn);
    }

    /// There is room for operations on files again, after one of this service was refused on this shard: what it kept of that
    /// can be tried again. What is refused once more is told of once more.
    fn files_have_room(&self, shard: &mut Self::Shard, turn: &mut Turn<'_>) {
        let _ = (shard, turn);
    }

    /// Goes on with a message that was deferred, back on its connection: [`Deferred::resume`] carried `state` here. The
    /// reply takes the message's place in the order; it may be deferred once more. Not called if the connection ended.
    fn resume(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_>,
    ) {
        let _ = (shard, conn, state, reply);
    }

    /// Cuts the next part of the stream, where the framing is [`Framing::Custom`]: [`Service::cut`].
    ///
    /// # Errors
    ///
    /// The bytes make no sense; the connection is closed.
    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let _ = (conn, limits);
        self.profile().framing.parse(buf, scanned)
    }

    /// Most bytes that may arrive before [`ShardService::cut`] tells how a message goes on: [`Service::header_bytes_max`].
    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.header_bytes_max
    }

    /// True if the rest of a message is to come: [`Service::awaits_rest`].
    fn awaits_rest(&self, conn: &Self::Conn) -> bool {
        let _ = conn;
        false
    }

    /// Last words to a peer: [`Service::refuse`].
    fn refuse(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, reason: CloseReason, reply: &mut Reply<'_>) {
        let _ = (shard, conn, reason, reply);
    }

    /// Something happened to the exchange of a connection: [`Service::upstream`].
    fn upstream(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, event: Upstream, reply: &mut Reply<'_>) {
        let _ = (shard, conn, event, reply);
    }

    /// Most bytes that the reply to a message may have: [`Service::reply_bytes`].
    fn reply_bytes(&self, shard: &mut Self::Shard, conn: &mut Self::Conn, message: &[u8]) -> usize {
        let _ = (shard, conn, message);
        0
    }

    /// What the state of a connection means for the memory of its shard: [`SessionState`].
    fn session(&self, conn: &Self::Conn) -> SessionState {
        let _ = conn;
        SessionState::default()
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

impl<S: Service> ShardService for S {
    const HAS_TURN_END: bool = false;

    type Shard = ();
    type Conn = <S as Service>::Conn;

    fn profile(&self) -> Profile<'_> {
        Profile {
            name: self.name(),
            framing: self.framing(),
            order: self.order(),
            keeps_messages: self.keeps_messages(),
            peer_speaks_first: self.peer_speaks_first(),
            needs_peer_addresses: self.needs_peer_addresses(),
        }
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn accept(&self, (): &mut (), peer: &Peer) -> Result<Self::Conn, Refused> {
        Service::accept(self, peer)
    }

    #[inline]
    fn call(&self, (): &mut (), conn: &mut Self::Conn, message: &Message<'_>, reply: &mut Reply<'_>) {
        Service::call(self, conn, message, reply);
    }

    fn resume(&self, (): &mut (), conn: &mut Self::Conn, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        Service::resume(self, conn, state, reply);
    }

    fn cut(&self, conn: &mut Self::Conn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        Service::cut(self, conn, buf, scanned, limits)
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        Service::header_bytes_max(self, limits)
    }

    fn awaits_rest(&self, conn: &Self::Conn) -> bool {
        Service::awaits_rest(self, conn)
    }

    fn refuse(&self, (): &mut (), conn: &mut Self::Conn, reason: CloseReason, reply: &mut Reply<'_>) {
        Service::refuse(self, conn, reason, reply);
    }

    fn upstream(&self, (): &mut (), conn: &mut Self::Conn, event: Upstream, reply: &mut Reply<'_>) {
        Service::upstream(self, conn, event, reply);
    }

    fn reply_bytes(&self, (): &mut (), conn: &mut Self::Conn, message: &[u8]) -> usize {
        Service::reply_bytes(self, conn, message)
    }

    fn session(&self, conn: &Self::Conn) -> SessionState {
        Service::session(self, conn)
    }

    fn close(&self, (): &mut (), conn: Self::Conn) {
        Service::close(self, conn);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Service::counters(self)
    }
}

/// What a service can do outside of a message: at its start, at the end of a turn, when a file operation is done.
pub struct Turn<'a> {
    pub(crate) env: &'a mut Env,
}

impl<'a> Turn<'a> {
    /// A turn of the shard that `env` belongs to; for code that plays a shard.
    pub fn new(env: &'a mut Env) -> Self {
        Self { env }
    }

    /// The time, read once per turn.
    pub fn now(&self) -> Time {
        self.env.now
    }

    /// Number of the shard.
    pub fn shard(&self) -> usize {
        self.env.shard
    }

    /// Asks for a [turn end](ShardService::turn_end) at this time or soon after it, though nothing may happen until then. What
    /// the service asked for before on this shard is forgotten; what it asked for is told once.
    pub fn wake_at(&mut self, at: Time) {
        let Env { wakes, service, .. } = &mut *self.env;
        match wakes.iter_mut().find(|(number, _)| number == service) {
            Some((_, known)) => *known = at,
            None => wakes.push((*service, at)),
        }
    }

    /// What was live in the shard's pool when it was opened ([`PoolSpec::live`](crate::pool::PoolSpec::live)), in that order;
    /// for the service that owns it, at its start.
    pub fn take_live(&mut self) -> Vec<Chunk> {
        std::mem::take(&mut self.env.live)
    }

    /// What this service begins operations on files with, on this shard. It is kept in the service's state, and serves any of
    /// its calls.
    pub fn files(&mut self) -> Files {
        let Env { files, service, limits, buffers, .. } = &mut *self.env;
        files.of(Owner::Service(*service), limits, buffers)
    }

    /// Opens a log of this service on this shard: its replies may wait for what is written there. If the service panics in
    /// [`ShardService::turn_end`] or [`ShardService::file_done`], its logs on this shard are [lost](crate::gates).
    ///
    /// # Errors
    ///
    /// [`TooManyLogs`]: the server has [`LOGS_MAX`](crate::gates::LOGS_MAX) already.
    pub fn open_log(&mut self) -> Result<LogId, TooManyLogs> {
        let log = self.env.gates.open_log()?;
        self.env.logs.push((self.env.service, log));
        Ok(log)
    }

    /// How far the logs of the server are durable.
    pub fn gates(&self) -> &Arc<Gates> {
        &self.env.gates
    }

    /// Says that `log` is durable up to `number`: the replies that waited for it leave at the end of this turn, those
    /// on other shards as soon as these wake up.
    pub fn release(&mut self, log: LogId, number: u64) {
        let waiting = self.env.gates.release(log, number);
        self.env.wake(waiting);
    }

    /// Releases logs from another thread: a committer's, for instance.
    pub fn releaser(&self) -> Releaser {
        Releaser { gates: Arc::clone(&self.env.gates), shards: Arc::clone(&self.env.shards) }
    }

    /// Wakes this shard from another thread.
    pub fn waker(&self) -> Waker {
        Waker { mailbox: Arc::clone(&self.env.mailbox) }
    }

    /// Ends connections of this shard from another thread, or from a call that is about another one.
    pub fn closer(&self) -> Closer {
        Closer { mailbox: Arc::clone(&self.env.mailbox) }
    }

    /// Answers a deferred message with bytes from where they lie: what a file operation read, for instance.
    pub fn reply_chunk(&mut self, deferred: Deferred, body: Chunk) {
        self.env.answer(deferred, Answer::Chunk(body));
    }

    /// The same between a head and an end: [`Reply::parts`].
    pub fn reply_parts(&mut self, deferred: Deferred, head: Vec<u8>, body: Chunk, end: &'static [u8]) {
        self.env.answer(deferred, Answer::Parts(head, body, end));
    }

    /// Answers a deferred message with the pieces that `write` adds: [`Reply::pieces`].
    ///
    /// # Errors
    ///
    /// [`Deferred::reply_pieces`].
    pub fn reply_pieces(
        &mut self,
        deferred: Deferred,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<(), Deferred> {
        match deferred.collect(&mut self.env.spares, write) {
            Ok(answer) => {
                self.env.answer(deferred, answer);
                Ok(())
            }
            Err(NoFileReplies) => Err(deferred),
        }
    }

    /// Answers a deferred message with this body, without the detour over the mailbox that other threads take.
    pub fn reply(&mut self, deferred: Deferred, body: Vec<u8>) {
        self.env.answer(deferred, Answer::Bytes(body));
    }

    /// Goes on with a deferred message on its connection: [`ShardService::resume`], still in this turn.
    pub fn resume(&mut self, deferred: Deferred, state: Box<dyn Any + Send>) {
        self.env.answer(deferred, Answer::Resume(state));
    }
}

/// Releases logs from any thread.
#[derive(Clone, Debug)]
pub struct Releaser {
    gates: Arc<Gates>,
    shards: Arc<OnceLock<Vec<Arc<Mailbox>>>>,
}

impl Releaser {
    /// Says that `log` is durable up to `number`, and wakes the shards whose replies wait for it.
    pub fn release(&self, log: LogId, number: u64) {
        let waiting = self.gates.release(log, number);
        // Before the server has started no reply waits.
        for (shard, mailbox) in self.shards.get().into_iter().flatten().enumerate() {
            if waiting >> shard & 1 == 1 {
                mailbox.post(Mail::Released);
            }
        }
    }
}

/// Ends connections of one shard from any thread.
#[derive(Clone, Debug)]
pub struct Closer {
    mailbox: Arc<Mailbox>,
}

impl Closer {
    /// Ends a connection as soon as its shard hears of it, without waiting for anything: replies that were not sent are lost. It
    /// counts as ended by the service. A connection that is gone is no mistake.
    pub fn close(&self, key: ConnKey) {
        self.mailbox.post(Mail::Close(key));
    }
}

/// Wakes one shard from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    mailbox: Arc<Mailbox>,
}

impl Waker {
    /// The services of the shard get a turn end though nothing happens to them: soon, and once for several calls at a time.
    pub fn wake(&self) {
        self.mailbox.post(Mail::Wake);
    }
}

/// A service on one shard: the value that all shards share, and the state of this one. Connections of the shard hold
/// clones of it.
pub struct OnShard<S: ShardService>(Rc<Local<S>>);

struct Local<S: ShardService> {
    service: Arc<S>,
    /// Borrowed for the time of one call; no call of a service leads to another one.
    shard: RefCell<S::Shard>,
    info: Rc<ServiceInfo>,
}

impl<S: ShardService> OnShard<S> {
    /// The service with this state.
    pub fn new(service: Arc<S>, shard: S::Shard) -> Self {
        let has_turn_end = S::HAS_TURN_END && service.has_turn_end();
        let Profile { framing, order, keeps_messages, .. } = service.profile();
        let (active, begins_files) = (Cell::new(false), Cell::new(false));
        let info = Rc::new(ServiceInfo { framing, order, keeps_messages, has_turn_end, active, begins_files });
        Self(Rc::new(Local { service, shard: RefCell::new(shard), info }))
    }

    /// The service.
    pub fn service(&self) -> &Arc<S> {
        &self.0.service
    }

    #[inline]
    pub(crate) fn info(&self) -> &Rc<ServiceInfo> {
        &self.0.info
    }

    /// Calls the service. A panic goes on: [`ServiceInfo::guard`] is around this.
    #[inline]
    pub(crate) fn call<R>(&self, call: impl FnOnce(&S, &mut S::Shard) -> R) -> R {
        call(&self.0.service, &mut self.0.shard.borrow_mut())
    }

    /// Calls the service outside of a message.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&S, &mut S::Shard) -> R) -> Result<R, Panicked> {
        self.0.info.guard(|| self.call(call))
    }

    /// The same with what the service can do outside of a message. A panic loses the logs of the service on this shard.
    ///
    /// No connection can be closed for a panic in which none was named, but none may wait for ever for what the service was
    /// about to do: to release a log. To go on with it later would be wrong, too. The records of a write that failed, or
    /// was forgotten, would pass for durable as soon as a later one is.
    pub(crate) fn with_turn(&self, env: &mut Env, call: impl FnOnce(&S, &mut S::Shard, &mut Turn<'_>)) {
        let called = self.with(|service, shard| call(service, shard, &mut Turn { env }));
        self.0.info.note_files(env);
        if called == Err(Panicked) {
            env.stats.panics.add(1);
            env.lose_logs();
        }
    }

    /// Ends the turn, if the service was called in it. A panic loses the logs of the service on this shard.
    pub fn turn_end(&self, env: &mut Env) {
        if self.waits_for_turn_end() {
            self.with_turn(env, |service, shard, turn| {
                service.turn_end(shard, turn);
            });
            self.0.info.active.set(false);
        }
    }

    /// True if the service wants to hear of the end of each turn in which it was called.
    pub fn has_turn_end(&self) -> bool {
        self.0.info.has_turn_end
    }

    /// The service gets a turn end though it was not called.
    pub fn wake(&self) {
        self.0.info.active.set(true);
    }

    /// True if the service was called since its last turn end, and wants to hear of the next.
    pub fn waits_for_turn_end(&self) -> bool {
        self.0.info.waits_for_turn_end()
    }

    /// Gives the state of the shard back to the service, if no connection is left.
    pub fn stop(self) {
        if let Ok(local) = Rc::try_unwrap(self.0) {
            local.service.stop(local.shard.into_inner());
        }
    }
}

impl<S: ShardService> Clone for OnShard<S> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<S: ShardService<Shard = ()>> From<Arc<S>> for OnShard<S> {
    fn from(service: Arc<S>) -> Self {
        Self::new(service, ())
    }
}
