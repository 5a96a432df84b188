//! What a shard lends to its connections while they work.

use std::sync::Arc;

use crate::deferred::{Answers, Mailbox};
use crate::limits::{Limits, Time};
use crate::outgoing::Order;
use crate::output::Spares;
use crate::pool::Pool;
use crate::stats::Stats;
use crate::tasks::TaskPool;

/// The shard's memory, limits, counters and clock reading. Tests and simulators make one without a shard.
#[derive(Debug)]
pub struct Env {
    /// The time, read once per turn.
    pub now: Time,
    /// What a peer may cost.
    pub limits: Limits,
    /// The shard's counters.
    pub stats: Arc<Stats>,
    /// Receive slots.
    pub pool: Pool,
    /// Buffers for replies.
    pub spares: Spares,
    /// Bytes of heap memory in messages that arrived in part, over all connections of the shard.
    pub assembly_bytes: usize,
    /// Deferred replies to datagrams that are outstanding.
    pub deferred_datagrams: usize,
    /// Where deferred replies arrive.
    pub mailbox: Arc<Mailbox>,
    /// Where they arrive instead, outside of shards.
    pub answers: Option<Arc<dyn Answers>>,
    /// Threads for short tasks.
    pub tasks: Option<Arc<TaskPool>>,
    /// What connections ask of the shard in this turn.
    pub(crate) orders: Vec<Order>,
    /// Number of the shard.
    pub shard: usize,
}

impl Env {
    /// An environment with its own counters and letter box, at time zero, without a thread pool.
    pub fn new(limits: Limits, pool: Pool) -> std::io::Result<Self> {
        Ok(Self {
            now: Time::default(),
            limits,
            stats: Arc::default(),
            pool,
            spares: Spares::default(),
            assembly_bytes: 0,
            deferred_datagrams: 0,
            mailbox: Mailbox::new()?,
            answers: None,
            tasks: None,
            orders: Vec::new(),
            shard: 0,
        })
    }

    /// True when connections together keep more unfinished input than they may: the one that keeps most is to be closed
    /// ([`Connection::close_for_memory`](crate::connection::Connection::close_for_memory)).
    pub fn is_over_budget(&self) -> bool {
        self.assembly_bytes > self.limits.assembly_bytes_max
    }

    /// Counts what a service just kept as a copy, because too many slots were kept already.
    pub(crate) fn count_copies(&self) {
        self.stats.kept_as_copy.add(self.pool.take_copies());
    }
}
