//! What a shard lends to its connections while they work.

use std::sync::Arc;

use crate::deferred::{Answers, Mailbox};
use crate::limits::{Limits, Time};
use crate::outgoing::{Errand, Order};
use crate::output::Spares;
use crate::pool::Pool;
use crate::service::ConnKey;
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
    /// What is to be done for exchanges in this turn.
    pub(crate) errands: Vec<Errand>,
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
            errands: Vec::new(),
            shard: 0,
        })
    }

    /// True when connections together keep more unfinished input than they may: the one that keeps most is to be closed
    /// ([`Connection::close_for_memory`](crate::connection::Connection::close_for_memory)).
    pub fn is_over_budget(&self) -> bool {
        self.assembly_bytes > self.limits.assembly_bytes_max
    }

    /// What connections asked of their shard since the last call, in order, and which of them: for whoever plays the
    /// shard. It tells them what comes of it by [`Connection::upstream`](crate::connection::Connection::upstream).
    pub fn take_orders(&mut self) -> Vec<(ConnKey, Order)> {
        let errands = std::mem::take(&mut self.errands);
        let orders = errands.into_iter().filter_map(|errand| match errand {
            Errand::Order { from, order } => Some((from, order)),
            // Only shards have outgoing connections, which send the others.
            _ => None,
        });
        orders.collect()
    }

    /// Counts what a service just kept as a copy, because too many slots were kept already.
    pub(crate) fn count_copies(&self) {
        self.stats.kept_as_copy.add(self.pool.take_copies());
    }
}
