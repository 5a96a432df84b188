//! Connections that are served elsewhere: a shard accepts them, where they arrived, and gives them away.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::framing::Framing;
use crate::limits::Limits;
use crate::service::{Peer, Service};
use crate::stats::Stats;

/// Who takes accepted connections, a multiplexor for instance. It answers them, keeps the limits, and counts.
pub trait Adopter: Send + Sync {
    /// Takes a connection. Called on the shard's thread, so it must not take long.
    fn adopt(&self, connection: Adopted);

    /// Replaces the limits, for connections that are open, too.
    fn set_limits(&self, limits: &Limits);

    /// Adds what it counted to `stats`, under the names a shard uses.
    fn add_counts(&self, stats: &Stats);

    /// No connection comes any more: answers what was received, then closes every connection; those that are not done
    /// at `deadline` are cut off. Returns when none is left.
    fn drain(&self, deadline: Instant);

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
    /// It says so by [`Service::needs_shards`].
    #[error("the service {service} dials out, and only shards have outgoing connections: run it without workers")]
    DialsOut {
        /// Its name.
        service: String,
    },
}

/// Whether a service can be called outside of shards; for those who are about to do so.
///
/// # Errors
///
/// What it needs that only shards have.
pub fn check<S: Service>(service: &S) -> Result<(), OnShardsOnly> {
    let name = || service.name().to_owned();
    if service.needs_shards() {
        return Err(OnShardsOnly::DialsOut { service: name() });
    }
    if service.framing() == Framing::Custom {
        return Err(OnShardsOnly::CutsItself { service: name() });
    }
    Ok(())
}

/// A connection on its way to its [`Adopter`].
#[derive(Debug)]
pub struct Adopted {
    /// The socket. TCP_NODELAY is set as by the listener.
    pub socket: OwnedFd,
    /// Who is at the other end.
    pub peer: Peer,
    /// To be dropped when the connection ends: until then it counts as one of the server's.
    pub place: Place,
}

/// One of the connections a server may have.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Place {
    pub(crate) fn take(connections: &Arc<AtomicUsize>) -> Self {
        connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(connections))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
