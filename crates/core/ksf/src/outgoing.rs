//! Outgoing connections: what a service needs that asks another server before it answers, such as a proxy.
//!
//! A connection may use one outgoing connection at a time: an *exchange*. The service dials with
//! [`Reply::dial`](crate::Reply::dial), passes bytes on with [`Reply::pass`](crate::Reply::pass), hears of the other end
//! in [`Service::upstream`](crate::Service::upstream), and hangs up with [`Reply::hang_up`](crate::Reply::hang_up). The
//! shard's engine connects, sends and receives, on the shard's own thread; a connection that is hung up to be kept
//! serves a later exchange of the same shard with the same address.
//!
//! ```text
//!   client ══► Connection ──requests──► shard ──► Outgoing ══► backend
//!          ◄══            ◄──Upstream──       ◄──          ◄══
//! ```
//!
//! Both directions are bounded by `out_queue_bytes_max`: the end that does not take its bytes stops the other one from being
//! read. What waits for the other end counts towards `shard_bytes_max`, too; when that is used up, an exchange that has a
//! share of its own in it is full. While an exchange is full no message is handed over, and what the service passes on all
//! the same, out of [`Service::upstream`](crate::Service::upstream) or a deferred answer, [comes back](ExchangeFull); then
//! the other end is not read, either, until it has taken some, and the service is told ([`Upstream::Room`]). Every wait
//! has an end: `connect_timeout_ms`, `send_timeout_ms`, `upstream_timeout_ms`.
//!
//! The service says whether the exchange is over when it hangs up ([`HangUp`]). One that is not over, also because its connection
//! ends, and one with bytes that TCP has not taken end with a reset: the backend must not take the end of the stream for that of
//! the request.

use std::net::SocketAddr;

use crate::pool::Chunk;
use crate::service::ConnKey;

/// What happens at the other end of an exchange, in the order in which it happens.
#[derive(Debug)]
#[non_exhaustive]
pub enum Upstream {
    /// The connection is there. `reused`: it served an earlier exchange, so the other end may close it at any moment.
    Connected {
        /// True for a kept connection.
        reused: bool,
    },
    /// Bytes of the other end.
    Received(Chunk),
    /// The other end ended its direction. The exchange goes on until it is hung up.
    Ended,
    /// The exchange is over.
    Failed(Failure),
    /// The other end takes bytes again, after some [came back](ExchangeFull).
    Room,
    /// Not the other end: the client ended its direction. What it sent before was handed over.
    ClientEnded,
}

/// Why an exchange ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// No server listens there (or a firewall says so).
    Refused,
    /// There is no way there.
    Unreachable,
    /// No answer to the connect within `connect_timeout_ms`.
    ConnectTimeout,
    /// The connection was reset.
    Reset,
    /// Nothing was heard for `upstream_timeout_ms`.
    Silent,
    /// Nothing was taken for `send_timeout_ms`.
    NotTaken,
    /// This machine has no descriptor, memory or port for the connection.
    NoResources,
}

/// There is no way to dial out here: the message is a datagram, or its service is called outside of a shard, by workers for
/// instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outgoing connections belong to shards, and to messages of streams: there is none to be had here")]
pub struct NoOutgoing;

/// The other end of the exchange does not take its bytes: these were not passed on. [`Upstream::Room`] follows, unless the
/// exchange ends before.
#[derive(Debug, thiserror::Error)]
#[error("{} bytes were not passed on: more than may wait for the other end of the exchange already does", .0.len())]
pub struct ExchangeFull(pub Chunk);

/// What a connection asks of its shard, or of what plays its shard
/// ([`Env::take_exchange_requests`](crate::env::Env::take_exchange_requests)).
#[derive(Debug)]
#[non_exhaustive]
pub enum ExchangeRequest {
    /// Begin an exchange with this address; the one before ends. `reuse`: a kept connection will do.
    Dial {
        /// Where to.
        to: SocketAddr,
        /// A kept connection will do.
        reuse: bool,
    },
    /// Bytes for the other end.
    Pass(Chunk),
    /// The exchange ends.
    HangUp(HangUp),
}

/// How an exchange ends for the other server. With bytes that TCP has not taken it ends with a reset in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangUp {
    /// Both ends agree that it is over: the connection may serve another one.
    Keep,
    /// It is over, and so is the connection.
    Close,
    /// It is not over: the other server sees a reset, and takes no part of a request for a whole one.
    Reset,
}

/// What a shard has to do for exchanges in this turn.
#[derive(Debug)]
pub(crate) enum ExchangeWork {
    /// From a connection.
    Request { from: ConnKey, request: ExchangeRequest },
    /// From an outgoing connection to its owner.
    Deliver { to: ConnKey, by: ConnKey, event: Upstream },
    /// An outgoing connection takes bytes again.
    Room { to: ConnKey, by: ConnKey },
}

/// A connection's share of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// Dialed, and neither hung up nor failed.
    pub(crate) open: bool,
    /// The service wants no further message for now.
    pub(crate) hold: bool,
    /// The other end does not take its bytes.
    pub(crate) full: bool,
    /// The service was refused to pass on bytes, and hears when there is room again.
    pub(crate) refused: bool,
}
