//! What a shard lends to its connections while they work.

use std::sync::Arc;

use crate::boxes::Boxes;
use crate::budget::Budget;
use crate::buffers::Buffers;
use crate::connection::{Aside, HeldReplies};
use crate::deferred::{Answer, Answers, Deferred, Mail, Mailbox};
use crate::files::ShardFiles;
use crate::gates::{Gate, Gates, LogId};
use crate::limits::{Limits, ServerLimits, Time};
use crate::logged::Mode;
use crate::outgoing::{ExchangeRequest, ExchangeWork};
use crate::output::Spares;
use crate::pool::{Chunk, Pool};
use crate::service::ConnKey;
use crate::shares::Shares;
use crate::stats::Stats;
use crate::tasks::TaskPool;

/// As many connections may have such state in one turn without an allocation. Bounded, because memory for lists stays with it.
const SPARES_MAX: usize = 1024;

/// The shard's memory, limits, counters and clock reading. Tests and simulators make one without a shard.
#[derive(Debug)]
pub struct Env {
    /// The time, read once per turn.
    pub now: Time,
    /// What a peer may cost.
    pub limits: ServerLimits,
    /// The shard's counters.
    pub stats: Arc<Stats>,
    /// Receive slots.
    pub pool: Pool,
    /// What was live in the pool when it was opened, until a service takes it.
    pub(crate) live: Vec<Chunk>,
    /// Buffers for replies.
    pub spares: Spares,
    /// Room for replies that wait, and for input that does: for connections that have none of their own.
    pub(crate) spare_held: Boxes<HeldReplies, SPARES_MAX>,
    pub(crate) spare_asides: Boxes<Aside, SPARES_MAX>,
    /// Buffers for what is longer than a slot.
    pub buffers: Buffers,
    /// Memory that the connections of the shard take together.
    pub budget: Budget,
    /// Deferred replies to datagrams that are outstanding.
    pub deferred_datagrams: usize,
    /// Where deferred replies arrive.
    pub mailbox: Arc<Mailbox>,
    /// Where they arrive instead, outside of shards.
    pub answers: Option<Arc<dyn Answers>>,
    /// Threads for short tasks.
    pub tasks: Option<Arc<TaskPool>>,
    /// How far the logs of the server are durable.
    pub gates: Arc<Gates>,
    /// Logs that services of this shard opened: the number of the service, and the log.
    pub(crate) logs: Vec<(u32, LogId)>,
    /// The shards of the server, to be woken when a log is released; empty without a server.
    pub(crate) shards: Arc<std::sync::OnceLock<Vec<Arc<Mailbox>>>>,
    /// What connections have had of the turn.
    pub(crate) shares: Shares,
    /// Connections whose next replies wait for a gate, as they began to wait.
    pub(crate) gated: Vec<(Gate, ConnKey)>,
    /// True when a log was released since the shard looked at the replies that wait.
    pub(crate) released: bool,
    /// Answers that were given on the shard's own thread, in this turn.
    pub(crate) answered: Vec<Mail>,
    /// What is to be done for exchanges in this turn.
    pub(crate) exchange_work: Vec<ExchangeWork>,
    /// Operations on files.
    pub(crate) files: ShardFiles,
    /// When services want a turn end though nothing happens, by their numbers.
    pub(crate) wakes: Vec<(u32, Time)>,
    /// Number of the service that is called without a connection.
    pub(crate) service: u32,
    /// Number of the shard.
    pub shard: usize,
}

impl Env {
    /// An environment with its own counters and mailbox, at time zero, without a thread pool.
    pub fn new(limits: Limits, pool: Pool) -> std::io::Result<Self> {
        Ok(Self {
            now: Time::default(),
            spares: Spares::within(limits.shard_bytes_max),
            limits: limits.into(),
            stats: Arc::default(),
            pool,
            live: Vec::new(),
            spare_held: Boxes::default(),
            spare_asides: Boxes::default(),
            buffers: Buffers::default(),
            budget: Budget::default(),
            deferred_datagrams: 0,
            mailbox: Mailbox::new()?,
            answers: None,
            tasks: None,
            gates: Gates::new(),
            logs: Vec::new(),
            shards: Arc::default(),
            shares: Shares::default(),
            gated: Vec::new(),
            released: false,
            answered: Vec::new(),
            exchange_work: Vec::new(),
            files: ShardFiles::default(),
            wakes: Vec::new(),
            service: 0,
            shard: 0,
        })
    }

    /// True while the queue of the threads for tasks is full.
    pub(crate) fn is_tasks_full(&self) -> bool {
        self.tasks.as_ref().is_some_and(|tasks| tasks.is_full())
    }

    /// Answers a deferred message of this shard in this turn.
    pub(crate) fn answer<M: Mode>(&mut self, deferred: Deferred<M>, answer: Answer) {
        if let Some(mail) = deferred.answer_here(&self.mailbox, answer) {
            self.answered.push(mail);
        }
    }

    /// Wakes these shards, a bit each, because a log was released; this one looks by itself at the end of the turn.
    pub(crate) fn wake(&mut self, shards: u64) {
        self.released = true;
        let Some(mailboxes) = self.shards.get() else { return };
        for (number, mailbox) in mailboxes.iter().enumerate() {
            if shards >> number & 1 == 1 && number != self.shard {
                mailbox.post(Mail::Released);
            }
        }
    }

    /// The service panicked in a call without a connection: how far its logs are durable is unknown.
    pub(crate) fn lose_logs(&mut self) {
        for at in 0..self.logs.len() {
            let (service, log) = self.logs[at];
            if service == self.service {
                self.stats.logs_lost.add(u64::from(!self.gates.is_lost(log)));
                let waiting = self.gates.lose(log);
                self.wake(waiting);
            }
        }
    }

    /// Has connections give way after so many messages of a turn, and not after thousands: for simulators.
    pub fn set_share(&mut self, messages_max: u32) {
        self.shares = Shares::of(messages_max);
    }

    /// A turn begins: each connection has its share of messages anew. For code that plays the shard, as the next one; without it
    /// no connection gives way.
    pub fn begin_turn(&mut self) {
        self.shares.begin_turn();
    }

    /// The next connection that gave way in an earlier turn, to [go on](crate::connection::Connection::go_on) in this one; `None`
    /// when there is none, or the turn has had enough of them.
    pub fn next_to_go_on(&mut self) -> Option<ConnKey> {
        self.shares.next_to_go_on()
    }

    /// Answers given in this turn, to be delivered before replies are sent; for code that plays the shard, as
    /// [`Mailbox::take_deliveries`].
    pub fn take_answered(&mut self) -> Vec<crate::deferred::Delivery> {
        self.answered.drain(..).filter_map(crate::deferred::delivery).collect()
    }

    /// When a service wants a turn end though nothing happens ([`Turn::wake_at`](crate::Turn::wake_at)), the
    /// earliest of all; for code that plays the shard, which calls [`OnShard::wake`](crate::session::OnShard::wake) then.
    pub fn next_wake(&self) -> Option<Time> {
        self.wakes.iter().map(|(_, at)| *at).min()
    }

    /// The services whose time has come, by their numbers: each is told once.
    pub fn take_due_wakes(&mut self) -> impl Iterator<Item = u32> {
        let now = self.now;
        self.wakes.extract_if(.., move |(_, at)| *at <= now).map(|(number, _)| number)
    }

    /// Connections whose next replies wait for a gate, since the last call; for code that plays the shard. It calls
    /// [`Connection::open_gates`](crate::connection::Connection::open_gates) on them when the gate opens.
    pub fn take_gated(&mut self) -> Vec<(Gate, ConnKey)> {
        std::mem::take(&mut self.gated)
    }

    /// True while bytes of this connection are on their way to its outgoing one.
    pub(crate) fn passes_on(&self, key: ConnKey) -> bool {
        let is_its = |work: &ExchangeWork| matches!(work, ExchangeWork::Request { from, request: ExchangeRequest::Pass(_) } if *from == key);
        self.exchange_work.iter().any(is_its)
    }

    /// What connections asked of their shard since the last call, in order, and which of them: for code that plays the
    /// shard. It tells them what comes of it by [`Connection::upstream`](crate::connection::Connection::upstream).
    pub fn take_exchange_requests(&mut self) -> Vec<(ConnKey, ExchangeRequest)> {
        let exchange_work = std::mem::take(&mut self.exchange_work);
        let requests = exchange_work.into_iter().filter_map(|work| match work {
            ExchangeWork::Request { from, request } => Some((from, request)),
            // Only shards have outgoing connections, which send the others.
            _ => None,
        });
        requests.collect()
    }

    /// Counts what a service just kept as a copy, because too many slots were kept already.
    pub(crate) fn count_copies(&self) {
        self.stats.kept_as_copy.add(self.pool.take_copies());
    }
}
