//! A running server: listeners, shards, and what can be asked of them.

use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::adopt::{Adopter, OpenConnections};
use crate::assist::Assist;
use crate::buffers::Buffers;
use crate::cpus::{self, CpuSet};
use crate::deferred::{Mail, Mailbox};
use crate::engine::{Engine, EngineKind, epoll::Epoll, uring::Uring};
use crate::env::Env;
use crate::error::Error;
use crate::gates::Gates;
use crate::limits::{Limits, ServerLimits};
use crate::listener::{self, ListenAddr, SocketOptions, Sockets, UnlinkOnDrop};
use crate::output::Spares;
use crate::pool::{Memory, Opened, Pool, PoolSpec, PoolUsage};
use crate::service::Service;
use crate::shard::{AnyService, ListenerKind, Shard, ShardListener, now};
use crate::shares::Shares;
use crate::spin::Spin;
use crate::stats::{self, CounterValue, Stats};
use crate::tasks::{TaskOptions, TaskPool};
use crate::threads;

/// Size of a receive slot: the largest UDP datagram (65,507 bytes) fits. Effect of larger ones: fewer
/// completions under load; price: address space, and memory only as far as it was received into.
pub const SLOT_BYTES: u32 = 68 << 10;

/// Slots per shard; memory is only used for those that were ever needed at the same time.
pub const SLOTS: u32 = 256;

/// Short slots per shard, of 2 KiB each; memory is only used for those that were ever needed at the same time.
pub const SHORT_SLOTS: u32 = 4096;

/// Send buffer of connections under a kernel half. Far above what it may have queued, so that nothing it sends finds
/// the buffer full.
const ASSISTED_SEND_BUFFER_BYTES: usize = 2 << 20;

/// Describes a server before it starts.
pub struct Builder {
    engine: EngineKind,
    cpus: Option<CpuSet>,
    limits: Limits,
    tasks: TaskOptions,
    slot_bytes: u32,
    slots: u32,
    short_slots: u32,
    pool: Option<PoolOf>,
    locality: bool,
    spin: Spin,
    listeners: Vec<Planned>,
}

/// Makes the pool of a shard, by its number.
type PoolOf = Arc<dyn Fn(usize) -> std::io::Result<PoolSpec> + Send + Sync>;

struct Planned {
    source: Source,
    service: Arc<dyn AnyService>,
    assist: Option<Arc<dyn Assist>>,
    adopter: Option<Arc<dyn Adopter>>,
    limits: Option<Limits>,
}

enum Source {
    Bind(ListenAddr),
    Inherit(OwnedFd),
}

impl Builder {
    /// The engine; io_uring unless said otherwise.
    pub fn engine(mut self, engine: EngineKind) -> Self {
        self.engine = engine;
        self
    }

    /// Runs a shard on each of these CPUs that the process may use; on every CPU it may use unless said otherwise.
    pub fn cpus(mut self, cpus: Option<Vec<usize>>) -> Self {
        self.cpus = cpus.map(|cpus| cpus.into_iter().collect());
        self
    }

    /// What peers may cost, but for listeners that have [limits of their own](Self::listener_limits).
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The threads for tasks that block ([`Reply::block`](crate::Reply::block)).
    pub fn tasks(mut self, tasks: TaskOptions) -> Self {
        self.tasks = tasks;
        self
    }

    /// Size and number of the receive slots of each shard; [`SLOT_BYTES`] and [`SLOTS`] unless said otherwise. Half of
    /// them may be kept beyond the turn that received into them; the rest is for the engine to receive into.
    pub fn slots(mut self, slot_bytes: u32, slots: u32) -> Self {
        (self.slot_bytes, self.slots) = (slot_bytes, slots);
        self
    }

    /// Number of short slots of each shard, which messages of at most 2 KiB are kept in ([`Message::keep`]); [`SHORT_SLOTS`]
    /// unless said otherwise. With 0 they are kept in the slots they were received into.
    ///
    /// [`Message::keep`]: crate::Message::keep
    pub fn short_slots(mut self, short_slots: u32) -> Self {
        self.short_slots = short_slots;
        self
    }

    /// Makes the pool of each shard: where its memory lives, its slots, and which of them are live. Called on the shard's
    /// thread with the shard's number, in the place of [`Builder::slots`] and [`Builder::short_slots`]: the shard has short
    /// slots only if the pool says so ([`PoolSpec::with_short`]), so that no name is of another pool. Services find what was live by
    /// [`Turn::take_live`](crate::Turn::take_live).
    pub fn pool(mut self, pool: impl Fn(usize) -> std::io::Result<PoolSpec> + Send + Sync + 'static) -> Self {
        self.pool = Some(Arc::new(pool));
        self
    }

    /// How long a shard looks for events before it sleeps, where that pays; not at all unless said otherwise.
    pub fn spin(mut self, spin: Spin) -> Self {
        self.spin = spin;
        self
    }

    /// Counts how many connections were accepted on the CPU that received them, at the price of a system call for each.
    pub fn locality(mut self, locality: bool) -> Self {
        self.locality = locality;
        self
    }

    /// Serves `service` at `addr`, with a kernel half in front where there is one (TCP only).
    pub fn listen<S: Service>(mut self, addr: ListenAddr, service: Arc<S>, assist: Option<Arc<dyn Assist>>) -> Self {
        let source = Source::Bind(addr);
        self.listeners.push(Planned { source, service: Arc::new(service), assist, adopter: None, limits: None });
        self
    }

    /// Serves `service` on a socket that another process has bound (socket activation), and that others may listen on when
    /// this server stops: connections that come from then on wait there for them.
    pub fn inherit<S: Service>(mut self, socket: OwnedFd, service: Arc<S>, assist: Option<Arc<dyn Assist>>) -> Self {
        let source = Source::Inherit(socket);
        self.listeners.push(Planned { source, service: Arc::new(service), assist, adopter: None, limits: None });
        self
    }

    /// Connections of the stream listener that was added last are given to `adopter` instead of being served by the
    /// shards. Datagrams are served as before.
    pub fn adopt(mut self, adopter: Arc<dyn Adopter>) -> Self {
        if let Some(last) = self.listeners.last_mut() {
            last.adopter = Some(adopter);
        }
        self
    }

    /// What the peers of the listener that was added last may cost. What a shard, or the server, keeps for all of its
    /// connections together is limited by [`Builder::limits`]; `connections_max` holds for the listener and for the
    /// server. An [adopter](Self::adopt) has its own limits.
    pub fn listener_limits(mut self, limits: Limits) -> Self {
        if let Some(last) = self.listeners.last_mut() {
            last.limits = Some(limits);
        }
        self
    }

    /// Opens every listener and starts the shards. When this returns, connections are accepted.
    pub fn start(self) -> Result<Server, Error> {
        let cpus = cpus::choose(self.cpus.as_ref())?;
        let tasks = Arc::new(TaskPool::new(self.tasks));
        let mut infos = Vec::new();
        let mut unlinks = Vec::new();
        let mut services = Vec::new();
        let mut assists: Vec<Arc<dyn Assist>> = Vec::new();
        let mut adopters: Vec<Arc<dyn Adopter>> = Vec::new();
        let mut per_shard: Vec<Vec<ShardListener>> = cpus.iter().map(|_| Vec::new()).collect();
        let mut listener_limits = Vec::new();
        for Planned { source, service, assist, adopter, limits } in self.listeners {
            listener_limits.push(limits.unwrap_or_else(|| self.limits.clone()));
            service.profile().framing.validate()?;
            let send_buffer_bytes = if assist.is_some() { ASSISTED_SEND_BUFFER_BYTES } else { 0 };
            let opened = match source {
                Source::Bind(addr) => {
                    let defer_accept = service.profile().peer_speaks_first && adopter.is_none();
                    listener::open(&addr, &cpus, SocketOptions { send_buffer_bytes, defer_accept })?
                }
                Source::Inherit(socket) => listener::inherit(socket, cpus.len())?,
            };
            let Sockets { addr, sockets, handed_over, unlink } = opened;
            let kind = match addr {
                ListenAddr::Tcp(_) => ListenerKind::Tcp,
                ListenAddr::Udp(_) => ListenerKind::Udp,
                ListenAddr::Unix(_) => ListenerKind::Unix,
            };
            for (shard, socket) in per_shard.iter_mut().zip(sockets) {
                let (addr, service, assist) = (addr.clone(), Arc::clone(&service), assist.clone());
                let adopter = adopter.clone();
                let socket = Some(socket);
                shard.push(ShardListener { addr, socket, handed_over, kind, service, adopter, assist });
            }
            let assisted = assist.is_some() && kind == ListenerKind::Tcp;
            infos.push(ListenerInfo { addr, service: service.profile().name.to_owned(), assisted });
            unlinks.extend(unlink);
            services.push(service);
            if let Some(assist) = assist.filter(|assist| !assists.iter().any(|known| Arc::ptr_eq(known, assist))) {
                assists.push(assist);
            }
            if let Some(adopter) = adopter.filter(|new| !adopters.iter().any(|known| Arc::ptr_eq(known, new))) {
                adopters.push(adopter);
            }
        }
        let mut server = Server {
            engine: self.engine,
            cpus,
            infos,
            unlinks,
            services,
            assists,
            adopters,
            shards: Vec::new(),
            tasks,
            buffers: Buffers::within(&self.limits),
            gates: Gates::new(),
            mailboxes: Arc::default(),
            connections: Arc::new(OpenConnections::new(listener_limits.len())),
            drain_timeout_ms: AtomicU64::new(self.limits.drain_timeout_ms),
        };
        let limits = ServerLimits::new(self.limits, listener_limits);
        for (number, listeners) in per_shard.into_iter().enumerate() {
            let plan = ShardPlan {
                number,
                cpu: server.cpus[number],
                listeners,
                limits: limits.clone(),
                slot_bytes: self.slot_bytes,
                slots: self.slots,
                short_slots: self.short_slots,
                pool: self.pool.clone(),
                locality: self.locality,
                spin: self.spin,
            };
            let shard = match self.engine {
                EngineKind::Epoll => server.start_shard::<Epoll>(plan)?,
                EngineKind::Uring => server.start_shard::<Uring>(plan)?,
            };
            server.shards.push(shard);
        }
        let mailboxes = server.shards.iter().map(|shard| Arc::clone(&shard.mailbox)).collect();
        // Set here only, once.
        let _ = server.mailboxes.set(mailboxes);
        // A log may have been released before a shard could be woken for it.
        server.shards.iter().for_each(|shard| shard.mailbox.post(Mail::Released));
        Ok(server)
    }
}

struct ShardPlan {
    number: usize,
    cpu: usize,
    listeners: Vec<ShardListener>,
    limits: ServerLimits,
    slot_bytes: u32,
    slots: u32,
    short_slots: u32,
    pool: Option<PoolOf>,
    locality: bool,
    spin: Spin,
}

/// A listener of a running server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerInfo {
    /// Where it listens; the real port where port 0 was asked for.
    pub addr: ListenAddr,
    /// Name of its service.
    pub service: String,
    /// True when a kernel half answers in front.
    pub assisted: bool,
}

struct ShardHandle {
    mailbox: Arc<Mailbox>,
    stats: Arc<Stats>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Tasks, and calls of [adopters](Builder::adopt), that still ran when `drain_timeout_ms` was over. Their threads are
    /// detached: they go on until the task or the process ends, keep the service alive as far as the task holds it, and their
    /// answers are thrown away.
    pub tasks_left: usize,
}

/// A running server. Dropping it stops it at once; [`Server::drain`] stops it gently. Both wait for tasks that run, but
/// not longer than `drain_timeout_ms`.
pub struct Server {
    engine: EngineKind,
    cpus: Vec<usize>,
    infos: Vec<ListenerInfo>,
    unlinks: Vec<UnlinkOnDrop>,
    services: Vec<Arc<dyn AnyService>>,
    assists: Vec<Arc<dyn Assist>>,
    adopters: Vec<Arc<dyn Adopter>>,
    shards: Vec<ShardHandle>,
    tasks: Arc<TaskPool>,
    buffers: Buffers,
    gates: Arc<Gates>,
    /// Of all shards, as soon as all of them run.
    mailboxes: Arc<OnceLock<Vec<Arc<Mailbox>>>>,
    connections: Arc<OpenConnections>,
    /// As in the limits the shards have.
    drain_timeout_ms: AtomicU64,
}

impl Server {
    /// A server without listeners yet.
    pub fn builder() -> Builder {
        Builder {
            engine: EngineKind::default(),
            cpus: None,
            limits: Limits::default(),
            tasks: TaskOptions::default(),
            slot_bytes: SLOT_BYTES,
            slots: SLOTS,
            short_slots: SHORT_SLOTS,
            pool: None,
            locality: false,
            spin: Spin::default(),
            listeners: Vec::new(),
        }
    }

    /// The engine it runs on.
    pub fn engine(&self) -> EngineKind {
        self.engine
    }

    /// The CPUs its shards run on.
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// Its listeners, in the order they were given.
    pub fn listeners(&self) -> &[ListenerInfo] {
        &self.infos
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.connections.sum()
    }

    /// Counters of the shards, summed.
    pub fn counters(&self) -> Vec<CounterValue> {
        let adopted = Stats::default();
        self.adopters.iter().for_each(|adopter| adopter.add_counts(&adopted));
        let mut counters = stats::sum(self.shards.iter().map(|shard| &*shard.stats).chain([&adopted]));
        let of_pool =
            [("tasks_panicked", self.tasks.panicked()), ("task_threads_refused", self.tasks.refused_threads())];
        for (name, value) in of_pool {
            if let Some(counter) = counters.iter_mut().find(|counter| counter.name == name) {
                counter.value += value;
            }
        }
        counters
    }

    /// Slots of the shards, summed.
    pub fn slots(&self) -> PoolUsage {
        let of_shards = self.shards.iter().map(|shard| shard.stats.slots());
        of_shards.fold(PoolUsage::default(), PoolUsage::plus)
    }

    /// Each shard: its CPU and its counters. What [adopters](Builder::adopt) counted is not in there.
    pub fn shards(&self) -> impl Iterator<Item = (usize, &Stats)> {
        self.cpus.iter().copied().zip(self.shards.iter().map(|shard| &*shard.stats))
    }

    /// Counters of each service: its name, and names and values.
    pub fn service_counters(&self) -> Vec<(String, Vec<(&'static str, u64)>)> {
        self.services.iter().map(|service| (service.profile().name.to_owned(), service.counters())).collect()
    }

    /// Counters of the kernel halves.
    pub fn assist_counters(&self) -> Vec<(&'static str, u64)> {
        self.assists.iter().flat_map(|assist| assist.counters()).collect()
    }

    /// Replaces the limits, for connections that are open, too. Those of listeners stand in the order of
    /// [`Server::listeners`]; a listener without any has those of the server, also if it had others before.
    pub fn set_limits(&self, limits: &ServerLimits) {
        self.drain_timeout_ms.store(limits.drain_timeout_ms, Ordering::Relaxed);
        for shard in &self.shards {
            shard.mailbox.post(Mail::Limits(Box::new(limits.clone())));
        }
        self.adopters.iter().for_each(|adopter| adopter.set_limits(limits));
    }

    /// Stops listening, answers what was received, closes every connection, and returns when all are closed and no task
    /// runs, or when `drain_timeout_ms` is over. Within that time it also waits for connections that linger, for `linger_timeout_ms` at
    /// most: a socket that is closed earlier is reset when its peer sends anything, and the peer could lose replies that it has not read.
    pub fn drain(mut self) -> std::io::Result<Drained> {
        let deadline = self.drain_deadline();
        for shard in &self.shards {
            shard.mailbox.post(Mail::Drain);
        }
        self.join(deadline)
    }

    fn drain_deadline(&self) -> Instant {
        // More than a year is for ever; and the clock cannot overflow.
        const FOR_EVER: Duration = Duration::from_secs(1 << 25);
        let patience = Duration::from_millis(self.drain_timeout_ms.load(Ordering::Relaxed));
        Instant::now() + patience.min(FOR_EVER)
    }

    /// True while every shard runs. A shard ends by itself only if its engine fails.
    pub fn is_running(&self) -> bool {
        self.shards.iter().all(|shard| shard.thread.as_ref().is_some_and(|thread| !thread.is_finished()))
    }

    fn join(&mut self, deadline: Instant) -> std::io::Result<Drained> {
        let mut result = Ok(());
        for shard in &mut self.shards {
            if let Some(thread) = shard.thread.take() {
                result = result.and(thread.join().expect("a panic of the thread aborts the process"));
            }
        }
        // The shards accept nothing more. All at the same time: one that takes long leaves no time to those behind it.
        let adopters = std::mem::take(&mut self.adopters);
        let calls_left: usize = thread::scope(|scope| {
            let drains: Vec<_> = adopters
                .iter()
                .map(|adopter| {
                    let drain = move || adopter.drain(deadline);
                    thread::Builder::new().name("ksf-drain".into()).spawn_scoped(scope, drain).map_err(|_| drain)
                })
                .collect();
            let ended = drains.into_iter().map(|drain| match drain {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                // Without a thread of its own: in its turn.
                Err(drain) => drain(),
            });
            ended.sum()
        });
        drop(adopters);
        let tasks_left = self.tasks.close(deadline) + calls_left;
        self.unlinks.clear();
        result.map(|()| Drained { tasks_left })
    }

    fn start_shard<E: Engine>(&self, plan: ShardPlan) -> Result<ShardHandle, Error> {
        let mailbox = Mailbox::new().map_err(Error::Thread)?;
        let stats = Arc::<Stats>::default();
        let (ready, started) = mpsc::channel();
        let env = {
            let (mailbox, stats) = (Arc::clone(&mailbox), Arc::clone(&stats));
            let (tasks, number) = (Arc::clone(&self.tasks), plan.number);
            let (buffers, gates, shards) = (self.buffers.clone(), Arc::clone(&self.gates), Arc::clone(&self.mailboxes));
            // Made on the shard's own thread: its memory is then local to the shard's CPU.
            move || -> Result<Env, Error> {
                let spec = match plan.pool {
                    Some(pool) => pool(number).map_err(|source| Error::Pool { bytes: 0, source })?,
                    None => {
                        let long = PoolSpec::new(Memory::Anonymous, plan.slot_bytes, plan.slots);
                        let short = || PoolSpec::short(Memory::Anonymous, plan.short_slots);
                        if plan.short_slots == 0 { long } else { long.with_short(short()) }
                    }
                };
                let Opened { pool, live } = Pool::open(PoolSpec { buffers: buffers.clone(), ..spec })?;
                stats.watch(&pool);
                Ok(Env {
                    now: now(),
                    spares: Spares::within(plan.limits.shard_bytes_max),
                    limits: plan.limits,
                    stats,
                    pool,
                    live,
                    spare_held: Default::default(),
                    spare_asides: Default::default(),
                    buffers,
                    budget: Default::default(),
                    deferred_datagrams: 0,
                    mailbox,
                    answers: None,
                    tasks: Some(tasks),
                    gates,
                    shards,
                    shares: Shares::default(),
                    gated: Vec::new(),
                    logs: Vec::new(),
                    released: false,
                    answered: Vec::new(),
                    exchange_work: Vec::new(),
                    files: Default::default(),
                    wakes: Vec::new(),
                    service: 0,
                    shard: number,
                })
            }
        };
        let (connections, listeners, cpu) = (Arc::clone(&self.connections), plan.listeners, plan.cpu);
        let spin = plan.spin;
        let local_cpu = plan.locality.then_some(cpu as u32);
        let thread = threads::start(format!("ksf-shard-{}", plan.number), move || {
            let shard = cpus::pin_to(cpu)
                .map_err(Error::Thread)
                .and_then(|()| Shard::<E>::new(env()?, listeners, connections, local_cpu, spin));
            match shard {
                Ok(shard) => {
                    // Fails only if the starter is gone, and then the shard is told to stop.
                    let _ = ready.send(Ok(()));
                    shard.run()
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    Ok(())
                }
            }
        });
        let thread = Some(thread.map_err(Error::Thread)?);
        let handle = ShardHandle { mailbox, stats, thread };
        match started.recv() {
            Ok(Ok(())) => Ok(handle),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::Thread(std::io::Error::other("the shard ended before it was ready"))),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.shards.iter().all(|shard| shard.thread.is_none()) {
            // Drained before. Tasks that were left then are not waited for once more.
            return;
        }
        let deadline = self.drain_deadline();
        for shard in &self.shards {
            shard.mailbox.post(Mail::Stop);
        }
        let adopters = std::mem::take(&mut self.adopters);
        // The server has no caller left to tell of an error, nor of tasks that are left.
        let _ = self.join(deadline);
        adopters.iter().for_each(|adopter| adopter.stop());
    }
}
