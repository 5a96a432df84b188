//! Everything a peer can make grow has a limit here. The defaults suit a service on a trusted network with messages up
//! to 1 MiB; each limit that closes or refuses a connection has a counter.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Longest message by default: 1 MiB of data, and 64 KiB for the headers that protocols put in front of it.
pub const MESSAGE_BYTES_MAX: usize = (1 << 20) + (64 << 10);

/// Bounds on what one peer, and all of them, may cost. Where the multiplexor (`ksf-mux`) has the connections, the bounds
/// of a shard are those of the multiplexor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest message, in bytes of body. A longer one closes the connection before its bytes are stored.
    pub message_bytes_max: usize,
    /// Most bytes that may arrive before the length of a message is known. Delimiter framing has no header: what waits for
    /// its delimiter is message, and only `message_bytes_max` bounds it.
    pub header_bytes_max: usize,
    /// Most parts a message may have (record-marking fragments; empty ones count).
    pub fragments_max: u32,
    /// Time from the first byte of a message to its last, not prolonged by progress: a trickling peer is cut off.
    /// Where a service is handed a message in parts, the time of the rest begins with each part
    /// ([`SessionState::awaits_rest`](crate::service::SessionState::awaits_rest)).
    pub assembly_timeout_ms: u64,
    /// Time without a byte in either direction after which a connection is closed; 0: never.
    pub idle_timeout_ms: u64,
    /// Time in which a peer must take some of the replies queued for it, and in which a part of a file must be read for a
    /// reply.
    pub send_timeout_ms: u64,
    /// Replies queued for one peer above which its requests are not read any more; and bytes passed on to the other end of
    /// an exchange above which no more are.
    pub out_queue_bytes_max: usize,
    /// Budget of one connection: requests in work, what their replies will need as far as that is known, replies held
    /// back and replies queued. At the budget no further request of the connection is handed over, so one request and
    /// its reply may exceed it. Replies that were not announced close the connection at twice the budget.
    pub connection_bytes_max: usize,
    /// The same for all connections of a shard together, outgoing ones included. At the budget a connection that has
    /// something in it waits until its own share is gone. Half of it may be states of sessions. A socket of datagrams with deferred replies, or replies behind
    /// gates, is not read at the budget.
    pub shard_bytes_max: usize,
    /// Connections per server; a further one is accepted and closed at once.
    pub connections_max: usize,
    /// Memory per shard for messages that arrived in part, and for requests that wait because replies do. When it is
    /// used up, connections with an unfinished message are not read, but for a few at a time, each of which may exceed
    /// it by one message. What arrives while a connection stops is put aside; at twice this limit no connection is read
    /// but those few, so that the receive slots of a shard are the most by which it can be exceeded.
    pub assembly_bytes_max: usize,
    /// Time in which a peer that is read although memory is short must send something of its unfinished message; if it
    /// sends less than 64 KiB, and not the rest, others are read before it is its turn again. And time in which a peer
    /// whose requests wait behind replies must read some of these when memory is at twice the limit.
    pub pressure_timeout_ms: u64,
    /// Messages of one connection that may wait for a deferred reply, or that workers are not done with; above it the
    /// connection is not read.
    pub deferred_max: u32,
    /// Deferred replies to datagrams that may be outstanding per shard; while they are, further datagrams are dropped,
    /// as a full network drops them: there is no peer to stop.
    pub deferred_datagrams_max: usize,
    /// Replies to datagrams that may wait per shard for a socket the kernel has no room for; further ones are dropped, and
    /// those for which `shard_bytes_max` has no room.
    pub datagram_queue_max: usize,
    /// Time after a close in which the peer may read the last replies before the connection is reset.
    pub linger_timeout_ms: u64,
    /// Bytes a peer may send in that time, which are thrown away. Before a receive of one more slot could exceed it the
    /// connection is reset.
    pub linger_bytes_max: usize,
    /// Time in which an outgoing connection must be there.
    pub connect_timeout_ms: u64,
    /// Time without a byte in either direction after which an outgoing connection that is waited for is given up; 0:
    /// never.
    pub upstream_timeout_ms: u64,
    /// Time an outgoing connection is kept for a later exchange; 0: for as long as the other end keeps it.
    pub upstream_idle_ms: u64,
    /// Outgoing connections kept per shard and address.
    pub upstreams_idle_max: usize,
    /// Operations on files that may be under way per shard, at least one; a further one is refused, and messages of services that
    /// begin operations wait.
    pub file_ops_max: usize,
    /// Bytes that these may read and write, so their memory; one operation alone may exceed it.
    pub file_bytes_max: usize,
    /// Time a stopping server gives its connections, the operations on files that are under way, and the tasks that run.
    pub drain_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes_max: MESSAGE_BYTES_MAX,
            header_bytes_max: 4096,
            fragments_max: 4096,
            assembly_timeout_ms: 10_000,
            idle_timeout_ms: 0,
            send_timeout_ms: 30_000,
            out_queue_bytes_max: 256 << 10,
            connection_bytes_max: 4 << 20,
            shard_bytes_max: 256 << 20,
            connections_max: 65_536,
            assembly_bytes_max: 64 << 20,
            pressure_timeout_ms: 1_000,
            deferred_max: 1024,
            deferred_datagrams_max: 4096,
            datagram_queue_max: 1024,
            linger_timeout_ms: 1_000,
            linger_bytes_max: 1 << 20,
            connect_timeout_ms: 3_000,
            upstream_timeout_ms: 30_000,
            upstream_idle_ms: 10_000,
            upstreams_idle_max: 64,
            file_ops_max: 1024,
            file_bytes_max: 256 << 20,
            drain_timeout_ms: 5_000,
        }
    }
}

/// The limits of a server, and those of its listeners where they differ. Read as [`Limits`] it is those of the server:
/// what a shard, or the server, keeps for all of its connections together has no other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerLimits {
    all: Limits,
    listeners: Vec<Limits>,
}

impl ServerLimits {
    /// Limits of a server whose listeners, in the order they were given, have limits of their own.
    pub fn new(all: Limits, listeners: Vec<Limits>) -> Self {
        Self { all, listeners }
    }

    /// The limits of a listener's connections and datagrams; those of the server for a listener that is not known.
    #[inline]
    pub fn of(&self, listener: u32) -> &Limits {
        self.listeners.get(listener as usize).unwrap_or(&self.all)
    }
}

impl From<Limits> for ServerLimits {
    fn from(all: Limits) -> Self {
        Self { all, listeners: Vec::new() }
    }
}

impl Deref for ServerLimits {
    type Target = Limits;

    #[inline]
    fn deref(&self) -> &Limits {
        &self.all
    }
}

impl DerefMut for ServerLimits {
    fn deref_mut(&mut self) -> &mut Limits {
        &mut self.all
    }
}

/// A point on the monotonic clock, in nanoseconds. The sans-IO parts are handed the time, they never ask for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// This point plus a number of milliseconds.
    pub fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }

    /// So much later.
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The first point at which more than this many milliseconds have passed, for limits that 0 turns off.
    pub(crate) fn after_ms(self, ms: u64) -> Option<Self> {
        (ms != 0).then(|| Self(self.plus_ms(ms).0.saturating_add(1)))
    }

    /// Time from `earlier` to this point; zero if it is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A time that may be missing, in the room of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SomeTime(u64);

impl SomeTime {
    /// No time. The end of all time stands for it: no clock gets there.
    pub(crate) const NONE: Self = Self(u64::MAX);

    #[inline]
    pub(crate) fn get(self) -> Option<Time> {
        self.is_set().then_some(Time(self.0))
    }

    #[inline]
    pub(crate) fn is_set(self) -> bool {
        self != Self::NONE
    }

    /// The time, which is `now` from here on if there was none.
    pub(crate) fn get_or_insert(&mut self, now: Time) -> Time {
        let time = self.get().unwrap_or(now);
        *self = time.into();
        time
    }
}

impl From<Option<Time>> for SomeTime {
    fn from(time: Option<Time>) -> Self {
        time.map_or(Self::NONE, Self::from)
    }
}

impl From<Time> for SomeTime {
    fn from(time: Time) -> Self {
        Self(time.0)
    }
}

/// The first of the times that there are.
#[inline]
pub(crate) fn earlier(one: Option<Time>, other: Option<Time>) -> Option<Time> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
