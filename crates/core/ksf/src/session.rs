//! Services with their types erased, as connections and datagram sockets call them.
//!
//! ```text
//!   Connection ─────┬─► ServiceInfo   what is the same for all messages: framing, order, room for operations on files
//!   DatagramService ┤                 (one for each service on a shard, read without a call)
//!                   └─► dyn Session   one virtual call per message, which tells what the state of the connection is then
//!                          └─ SessionOf<S>: state of the connection, OnShard<S> ─► state of the shard ─► Service::call
//! ```
//!
//! A session lies at the end of the memory of its connection, so that neither costs an allocation of its own. What is around it
//! is compiled once, whatever the services.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::framing::{Frame, Framing};
use crate::limits::Limits;
use crate::outgoing::Upstream;
use crate::service::{Message, Order, Peer, Profile, Refused, Reply, Service, SessionState};
use crate::turn::Turn;

/// The service's side of one connection, or of one datagram socket: the state that the service has for it, and the calls that
/// are handed this state.
///
/// [`Connection::new`](crate::connection::Connection::new) makes it. A call panics where the service does.
pub trait Session {
    /// [`Service::call`], and then [`Service::session`], as after each of the next three.
    fn call(&mut self, message: &Message<'_>, reply: &mut Reply<'_>) -> SessionState;

    /// [`Service::resume`].
    fn resume(&mut self, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) -> SessionState;

    /// [`Service::upstream`].
    fn upstream(&mut self, event: Upstream, reply: &mut Reply<'_>) -> SessionState;

    /// [`Service::refuse`].
    fn refuse(&mut self, reason: CloseReason, reply: &mut Reply<'_>) -> SessionState;

    /// [`Service::cut`].
    ///
    /// # Errors
    ///
    /// The bytes make no sense; the connection is closed.
    fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError>;

    /// [`Service::header_bytes_max`].
    fn header_bytes_max(&self, limits: &Limits) -> usize;

    /// [`Service::reply_bytes`].
    fn reply_bytes(&mut self, message: &[u8]) -> usize;

    /// [`Service::session`].
    fn state(&self) -> SessionState;

    /// [`Service::close`]. No call of the service follows.
    fn close(&mut self);
}

/// A service on one shard: the value that all shards share, and the state of this one. Connections of the shard hold
/// clones of it.
pub struct OnShard<S: Service>(Rc<Local<S>>);

struct Local<S: Service> {
    service: Arc<S>,
    /// Borrowed for the time of one call; no call of a service leads to another one.
    shard: RefCell<S::Shard>,
    info: Rc<ServiceInfo>,
}

impl<S: Service> OnShard<S> {
    /// The service with this state.
    pub fn new(service: Arc<S>, shard: S::Shard) -> Self {
        let Profile { framing, order, keeps_messages, turn_ends: has_turn_end, .. } = service.profile();
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

impl<S: Service> Clone for OnShard<S> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<S: Service<Shard = ()>> From<Arc<S>> for OnShard<S> {
    fn from(service: Arc<S>) -> Self {
        Self::new(service, ())
    }
}

/// The session of a service of type `S`; none once it was closed.
pub(crate) struct SessionOf<S: Service>(Option<(OnShard<S>, S::Conn)>);

impl<S: Service> SessionOf<S> {
    /// Asks the service for the state of a connection or of a datagram socket.
    ///
    /// # Errors
    ///
    /// [`Refused`], also if the service panicked.
    pub(crate) fn open(on: OnShard<S>, peer: &Peer) -> Result<Self, Refused> {
        let conn = on.with(|service, shard| service.accept(shard, peer)).unwrap_or(Err(Refused))?;
        Ok(Self(Some((on, conn))))
    }
}

impl<S: Service> SessionOf<S> {
    /// Calls the service, and asks for what the state of the connection is then.
    #[inline]
    fn call(&mut self, call: impl FnOnce(&S, &mut S::Shard, &mut S::Conn)) -> SessionState {
        let Some((on, conn)) = &mut self.0 else { return SessionState::default() };
        on.call(|service, shard| call(service, shard, conn));
        on.service().session(conn)
    }
}

impl<S: Service> Session for SessionOf<S> {
    #[inline]
    fn call(&mut self, message: &Message<'_>, reply: &mut Reply<'_>) -> SessionState {
        Self::call(self, |service, shard, conn| service.call(shard, conn, message, &mut reply.to()))
    }

    fn resume(&mut self, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) -> SessionState {
        Self::call(self, |service, shard, conn| service.resume(shard, conn, state, &mut reply.to()))
    }

    fn upstream(&mut self, event: Upstream, reply: &mut Reply<'_>) -> SessionState {
        Self::call(self, |service, shard, conn| service.upstream(shard, conn, event, &mut reply.to()))
    }

    fn refuse(&mut self, reason: CloseReason, reply: &mut Reply<'_>) -> SessionState {
        Self::call(self, |service, shard, conn| service.refuse(shard, conn, reason, &mut reply.to()))
    }

    fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let Some((on, conn)) = &mut self.0 else { return Err(FramingError::Malformed) };
        on.service().cut(conn, buf, scanned, limits)
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        self.0.as_ref().map_or(limits.header_bytes_max, |(on, _)| on.service().header_bytes_max(limits))
    }

    fn reply_bytes(&mut self, message: &[u8]) -> usize {
        let Some((on, conn)) = &mut self.0 else { return 0 };
        on.call(|service, shard| service.reply_bytes(shard, conn, message))
    }

    #[inline]
    fn state(&self) -> SessionState {
        self.0.as_ref().map_or_else(SessionState::default, |(on, conn)| on.service().session(conn))
    }

    fn close(&mut self) {
        if let Some((on, conn)) = self.0.take() {
            on.call(|service, shard| service.close(shard, conn));
        }
    }
}

/// A service panicked; the message is on standard error, as the panic hook writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panicked;

/// What a shard, and the connections on it, know of a service without calling it.
pub(crate) struct ServiceInfo {
    pub(crate) framing: Framing,
    pub(crate) order: Order,
    pub(crate) keeps_messages: bool,
    /// True if the service wants to hear of the end of each turn in which it was called.
    pub(crate) has_turn_end: bool,
    /// True if the service was called since its last turn end.
    pub(crate) active: Cell<bool>,
    /// True if the service may begin operations on files.
    pub(crate) begins_files: Cell<bool>,
}

impl ServiceInfo {
    /// Calls the service. A panic ends with this call: its caller closes the connection.
    #[inline]
    pub(crate) fn guard<R>(&self, call: impl FnOnce() -> R) -> Result<R, Panicked> {
        self.active.set(true);
        // The state of the connection is not used again after a panic but to be given back; that of the shard is the
        // service's own to keep valid, as it is for any lock it might hold.
        catch_unwind(AssertUnwindSafe(call)).map_err(|_| Panicked)
    }

    /// True if the service was called since its last turn end, and wants to hear of the next.
    pub(crate) fn waits_for_turn_end(&self) -> bool {
        self.has_turn_end && self.active.get()
    }

    /// To be called after a call in which the service could take its [`Files`](crate::files::Files).
    pub(crate) fn note_files(&self, env: &mut Env) {
        if env.files.were_taken() {
            self.begins_files.set(true);
        }
    }

    /// True while messages are not handed to the service because operations on files would be refused.
    #[inline]
    pub(crate) fn waits_for_files(&self, env: &Env) -> bool {
        self.begins_files.get() && env.files.is_full()
    }
}
