//! Services with their types erased, as connections and datagram sockets call them.
//!
//! ```text
//!   Connection ─────┬─► ServiceInfo   what is the same for all messages: framing, order, room for operations on files
//!   DatagramService ┤                 (one for each service on a shard, read without a call)
//!                   └─► dyn Session   two virtual calls per message: the call, and what the state keeps
//!                          └─ SessionOf<S>: state of the connection, OnShard<S> ─► state of the shard ─► ShardService::call
//! ```
//!
//! A session lies at the end of the memory of its connection, so that neither costs an allocation of its own. What is around it
//! is compiled once, whatever the services.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::framing::{Frame, Framing};
use crate::limits::Limits;
use crate::outgoing::Upstream;
use crate::service::{Message, Order, Peer, Refused, Reply, SessionState};
use crate::shard_service::{OnShard, ShardService};

/// The service's side of one connection, or of one datagram socket: the state that the service has for it, and the calls that
/// are handed this state.
///
/// [`Connection::new`](crate::connection::Connection::new) makes it. A call panics where the service does.
pub trait Session {
    /// [`ShardService::call`].
    fn call(&mut self, message: &Message<'_>, reply: &mut Reply<'_>);

    /// [`ShardService::resume`].
    fn resume(&mut self, state: Box<dyn Any + Send>, reply: &mut Reply<'_>);

    /// [`ShardService::upstream`].
    fn upstream(&mut self, event: Upstream, reply: &mut Reply<'_>);

    /// [`ShardService::refuse`].
    fn refuse(&mut self, reason: CloseReason, reply: &mut Reply<'_>);

    /// [`ShardService::cut`].
    ///
    /// # Errors
    ///
    /// The bytes make no sense; the connection is closed.
    fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError>;

    /// [`ShardService::header_bytes_max`].
    fn header_bytes_max(&self, limits: &Limits) -> usize;

    /// [`ShardService::awaits_rest`].
    fn awaits_rest(&self) -> bool;

    /// [`ShardService::reply_bytes`].
    fn reply_bytes(&mut self, message: &[u8]) -> usize;

    /// [`ShardService::session`].
    fn state(&self) -> SessionState;

    /// [`ShardService::close`]. No call of the service follows.
    fn close(&mut self);
}

/// The session of a service of type `S`; none once it was closed.
pub(crate) struct SessionOf<S: ShardService>(Option<(OnShard<S>, S::Conn)>);

impl<S: ShardService> SessionOf<S> {
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

impl<S: ShardService> Session for SessionOf<S> {
    #[inline]
    fn call(&mut self, message: &Message<'_>, reply: &mut Reply<'_>) {
        if let Some((on, conn)) = &mut self.0 {
            on.call(|service, shard| service.call(shard, conn, message, reply));
        }
    }

    fn resume(&mut self, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        if let Some((on, conn)) = &mut self.0 {
            on.call(|service, shard| service.resume(shard, conn, state, reply));
        }
    }

    fn upstream(&mut self, event: Upstream, reply: &mut Reply<'_>) {
        if let Some((on, conn)) = &mut self.0 {
            on.call(|service, shard| service.upstream(shard, conn, event, reply));
        }
    }

    fn refuse(&mut self, reason: CloseReason, reply: &mut Reply<'_>) {
        if let Some((on, conn)) = &mut self.0 {
            on.call(|service, shard| service.refuse(shard, conn, reason, reply));
        }
    }

    fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        let Some((on, conn)) = &mut self.0 else { return Err(FramingError::Malformed) };
        on.service().cut(conn, buf, scanned, limits)
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        self.0.as_ref().map_or(limits.header_bytes_max, |(on, _)| on.service().header_bytes_max(limits))
    }

    fn awaits_rest(&self) -> bool {
        self.0.as_ref().is_some_and(|(on, conn)| on.service().awaits_rest(conn))
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
