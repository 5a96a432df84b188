//! Connections that are served elsewhere: a shard accepts them, where they arrived, and gives them away.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::limits::Limits;
use crate::service::Peer;
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
