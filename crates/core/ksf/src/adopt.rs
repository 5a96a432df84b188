//! Connections that are served elsewhere: a shard accepts them, where they arrived, and gives them away.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::framing::Framing;
use crate::limits::{Limits, ServerLimits};
use crate::service::{Peer, Profile, WorkerService};
use crate::stats::Stats;

/// Takes accepted connections: a multiplexor, for instance. It answers them, keeps the limits, and counts.
pub trait Adopter: Send + Sync {
    /// Takes a connection. Called on the shard's thread, so it must not take long.
    fn adopt(&self, connection: Adopted);

    /// Replaces the limits, for connections that are open, too.
    fn set_limits(&self, limits: &Limits);

    /// Adds what it counted to `stats`, under the names a shard uses.
    fn add_counts(&self, stats: &Stats);

    /// No connection comes any more: answers what was received, then closes every connection; those that are not done
    /// at `deadline` are cut off. Returns when none is left, with the number of calls of the service that still run: their
    /// threads are [left alone](crate::server::Drained::tasks_left).
    fn drain(&self, deadline: Instant) -> usize;

    /// Closes every connection at once.
    fn stop(&self);
}

/// Why a service can be run by shards only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnShardsOnly {
    /// Its framing is [`Framing::Custom`].
    #[error("the service {service} cuts its streams itself, which only shards let it do: run it without workers")]
    CutsItself {
        /// Its name.
        service: String,
    },
    /// It says so by [`Profile::needs_shards`].
    #[error("the service {service} dials out, and only shards have outgoing connections: run it without workers")]
    DialsOut {
        /// Its name.
        service: String,
    },
}

/// Whether a service can be called outside of shards; for code that is about to do so.
///
/// # Errors
///
/// What it needs that only shards have.
pub fn check<S: WorkerService>(service: &S) -> Result<(), OnShardsOnly> {
    match service.profile() {
        Profile { name, needs_shards: true, .. } => Err(OnShardsOnly::DialsOut { service: name.to_owned() }),
        Profile { name, framing: Framing::Custom, .. } => Err(OnShardsOnly::CutsItself { service: name.to_owned() }),
        _ => Ok(()),
    }
}

/// A connection on its way to its [`Adopter`].
#[derive(Debug)]
pub struct Adopted {
    /// The socket. TCP_NODELAY is set as by the listener.
    pub socket: OwnedFd,
    /// The address of the other end.
    pub peer: Peer,
    /// To be dropped when the connection ends: until then it counts as one of the server's.
    pub place: Place,
}

/// One of the connections a listener, and so its server, may have.
#[derive(Debug)]
pub struct Place {
    connections: Arc<OpenConnections>,
    listener: u32,
}

impl Place {
    pub(crate) fn take(connections: &Arc<OpenConnections>, listener: u32) -> Self {
        connections.add(listener);
        Self { connections: Arc::clone(connections), listener }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.remove(self.listener);
    }
}

/// How many connections are open, by listener; all shards count.
#[derive(Debug)]
pub(crate) struct OpenConnections(Box<[AtomicUsize]>);

impl OpenConnections {
    pub(crate) fn new(listeners: usize) -> Self {
        Self((0..listeners).map(|_| AtomicUsize::new(0)).collect())
    }

    pub(crate) fn add(&self, listener: u32) {
        self.0[listener as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, listener: u32) {
        self.0[listener as usize].fetch_sub(1, Ordering::Relaxed);
    }

    /// Those of all listeners.
    pub(crate) fn sum(&self) -> usize {
        self.0.iter().map(|open| open.load(Ordering::Relaxed)).sum()
    }

    /// True while the listener, or the server, has as many as it may.
    pub(crate) fn is_full(&self, listener: u32, limits: &ServerLimits) -> bool {
        self.0[listener as usize].load(Ordering::Relaxed) >= limits.of(listener).connections_max
            || self.sum() >= limits.connections_max
    }
}
