//! A service of the framework on the kernel's own message sockets: shards accept, workers answer.
//!
//! AF_KCM does not say from which connection of a multiplexor a message came, and gives what is queued for a connection
//! that died to the next one. So each connection has a multiplexor of its own, with a socket for each worker:
//!
//! ```text
//!  connection 1 ─► multiplexor ─┬─► socket ─► worker 1     worker 1 waits for the first sockets of all connections,
//!                               └─► socket ─► worker 2     worker 2 for the second ones
//!  connection 2 ─► multiplexor ─┬─► socket ─► worker 2     home of connection 2: watches its TCP socket, ends it
//!                               └─► socket ─► worker 1
//! ```
//!
//! The kernel decides which worker gets a message, when it arrives. Replies leave through the TCP socket itself, from one
//! queue per connection. AF_KCM could send them, but it takes the end of the peer's stream for a broken connection: what
//! is sent after it is kept for ever, and what has no room in a socket's buffer is never sent (both seen on 6.1).

mod desk;
mod ending;
mod link;
mod outbox;
mod worker;

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ksf::adopt::{self, Adopted, Adopter};
use ksf::deferred::Answers;
use ksf::error::CloseReason;
use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::output::Output;
use ksf::service::ConnKey;
use ksf::stats::Stats;
use ksf::{Order, Service};
use ksf_bpf_framing::KernelProgram;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket};

use self::desk::Desk;
use self::link::{End, Lane, Link, Reading};
use self::worker::{Inbox, Worker};
use crate::error::KcmError;
use crate::program::{load, overhead_bytes};
use crate::socket::KcmSocket;
use crate::tcp;

/// How a service is run by workers on AF_KCM.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct KernelWorkersOptions {
    /// Worker threads; at least one. They run where the thread may run that starts them.
    pub workers: usize,
    /// Limits of the framework, as far as they concern streams and AF_KCM can keep them.
    pub limits: Limits,
}

impl KernelWorkersOptions {
    /// So many workers.
    pub fn new(workers: usize, limits: Limits) -> Self {
        Self { workers, limits }
    }
}

/// Workers that answer the messages of a service, which the kernel cuts and hands out. They end when this is dropped.
pub struct KernelWorkers<S: Service> {
    shared: Arc<Shared<S>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the workers and whoever gives them connections have in common.
struct Shared<S: Service> {
    service: Arc<S>,
    desk: Arc<Desk<S>>,
    program: KernelProgram,
    inboxes: Vec<Inbox>,
    /// One set per worker, written by it alone.
    stats: Vec<Arc<Stats>>,
    limits: RwLock<Arc<Limits>>,
    links: RwLock<HashMap<u64, Arc<Link<S>>>>,
    next_link: AtomicU64,
    /// Connections that are not closed yet; those that linger are not among `links` any more.
    open: AtomicUsize,
    stopping: AtomicBool,
    closes: [AtomicU64; CloseReason::ALL.len()],
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl<S: Service> KernelWorkers<S> {
    /// Loads the framing program of the service and starts the workers.
    ///
    /// Fails with what is missing: shards for a service that needs them, AF_KCM itself, the right to load the program, an end of messages
    /// ([`KcmError::NoProgram`]), or a receive buffer for the longest message.
    pub fn start(service: Arc<S>, options: KernelWorkersOptions) -> Result<Arc<Self>, KcmError> {
        adopt::check(&*service)?;
        // First: where it is missing, nothing else matters.
        KcmSocket::new()?;
        let framing = service.framing();
        let program = load(&framing)?;
        let trial = socket(AddressFamily::INET, SocketType::STREAM, None).map_err(KcmError::os("socket"))?;
        set_options(&trial, &framing, &options.limits)?;
        let desk = Arc::<Desk<S>>::default();
        let count = options.workers.max(1);
        let inboxes: Result<Vec<Inbox>, KcmError> = (0..count).map(|_| Inbox::new()).collect();
        let mut stats = Vec::new();
        let mut envs = Vec::new();
        for number in 0..count {
            let mut env = worker::env(&options.limits)?;
            env.shard = number;
            env.answers = Some(Arc::clone(&desk) as Arc<dyn Answers>);
            stats.push(Arc::clone(&env.stats));
            envs.push(env);
        }
        let shared = Arc::new(Shared {
            service,
            desk,
            program,
            inboxes: inboxes?,
            stats,
            limits: RwLock::new(Arc::new(options.limits)),
            links: RwLock::default(),
            next_link: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            closes: std::array::from_fn(|_| AtomicU64::new(0)),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        });
        shared.desk.belongs_to(&shared);
        // Those that were started end with this if one cannot be.
        let workers = Self { shared: Arc::clone(&shared), threads: Mutex::default() };
        for (number, env) in envs.into_iter().enumerate() {
            let worker = Worker::new(Arc::clone(&shared), number, env);
            let thread = thread::Builder::new().name(format!("ksf-kcm-{number}")).spawn(move || worker.run());
            lock(&workers.threads).push(thread.map_err(|error| KcmError::Os { call: "start a worker", error })?);
        }
        Ok(Arc::new(workers))
    }

    /// Ends the workers, then the connections.
    fn end(&self, reason: CloseReason) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        for inbox in &self.shared.inboxes {
            inbox.wake();
        }
        for thread in lock(&self.threads).drain(..) {
            // A worker catches what a service does wrong.
            let _ = thread.join();
        }
        let links: Vec<_> = write(&self.shared.links).drain().collect();
        for (_, link) in links {
            self.shared.count_close(reason);
            link.detach();
        }
        // Nobody waits for these answers any more.
        self.shared.desk.clear();
    }
}

impl<S: Service> Drop for KernelWorkers<S> {
    fn drop(&mut self) {
        self.end(CloseReason::Stopped);
    }
}

impl<S: Service> Adopter for KernelWorkers<S> {
    fn adopt(&self, connection: Adopted) {
        let shared = &self.shared;
        let Ok(state) = shared.service.accept(&connection.peer) else {
            shared.count_close(CloseReason::Service);
            return;
        };
        if shared.attach(connection, state).is_err() {
            // It ended before it was attached, it is not TCP, or descriptors ran out.
            shared.count_close(CloseReason::Io);
        }
    }

    fn set_limits(&self, limits: &Limits) {
        *write(&self.shared.limits) = Arc::new(limits.clone());
        let framing = self.shared.service.framing();
        for link in self.shared.all_links() {
            // Where the kernel gives no larger buffer, longer messages end the connection as before.
            let _ = set_options(link.tcp(), &framing, limits);
        }
    }

    fn add_counts(&self, stats: &Stats) {
        let shared = &self.shared;
        for worker in &shared.stats {
            stats.messages.add(worker.messages.value());
            stats.messages_assembled.add(worker.messages_assembled.value());
            stats.replies.add(worker.replies.value());
            stats.replies_unframable.add(worker.replies_unframable.value());
            stats.reads_paused.add(worker.reads_paused.value());
            stats.tasks_panicked.add(worker.tasks_panicked.value());
        }
        stats.bytes_in.add(shared.bytes_in.load(Ordering::Relaxed));
        stats.bytes_out.add(shared.bytes_out.load(Ordering::Relaxed));
        for (reason, count) in CloseReason::ALL.iter().zip(&shared.closes) {
            stats.add_closes(*reason, count.load(Ordering::Relaxed));
        }
    }

    fn drain(&self, deadline: Instant) {
        const LOOK_EVERY: Duration = Duration::from_millis(2);
        for link in self.shared.all_links() {
            self.shared.end(&link, End { reason: CloseReason::Drained, reading: Reading::All });
        }
        while self.shared.open.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
            thread::sleep(LOOK_EVERY);
        }
        self.end(CloseReason::DrainTimeout);
    }

    fn stop(&self) {
        self.end(CloseReason::Stopped);
    }
}

impl<S: Service> Shared<S> {
    /// Gives a connection a multiplexor of its own, with a socket for each worker that may have its messages.
    fn attach(&self, connection: Adopted, state: S::Conn) -> Result<(), KcmError> {
        let states = self.states(state);
        let sockets = match sockets(states.len()) {
            Ok(sockets) => sockets,
            Err(error) => {
                states.into_iter().for_each(|state| self.service.close(state));
                return Err(error);
            }
        };
        let number = self.next_link.fetch_add(1, Ordering::Relaxed);
        let workers = self.inboxes.len();
        let home = (number % workers as u64) as usize;
        let lane = |(at, (socket, state))| Lane::new(socket, (home + at) % workers, state);
        let lanes = sockets.into_iter().zip(states).enumerate().map(lane).collect();
        let link = Arc::new(Link::new(number, connection, Arc::clone(&self.service), lanes));
        set_options(link.tcp(), &self.service.framing(), &self.limits())?;
        link.first().attach(link.tcp(), &self.program)?;
        self.open.fetch_add(1, Ordering::SeqCst);
        write(&self.links).insert(number, Arc::clone(&link));
        if let Err(error) = self.watch(&link) {
            write(&self.links).remove(&number);
            self.open.fetch_sub(1, Ordering::SeqCst);
            link.detach();
            return Err(error);
        }
        // It may be waiting without a limit of time, and has one to look after now.
        self.inboxes[home].post(number);
        Ok(())
    }

    /// As many states as workers may have messages of the connection at once: one, where replies keep the order of
    /// requests or the service wants one message at a time.
    fn states(&self, state: S::Conn) -> Vec<S::Conn> {
        let mut states = vec![state];
        if self.service.order() == Order::Requests {
            return states;
        }
        while states.len() < self.inboxes.len() {
            match states.first().and_then(|state| self.service.fork(state)) {
                Some(state) => states.push(state),
                None => {
                    states.drain(1..).for_each(|state| self.service.close(state));
                    break;
                }
            }
        }
        states
    }

    /// Has the workers wait for the link. What happened before is reported to them at once.
    fn watch(&self, link: &Link<S>) -> Result<(), KcmError> {
        use epoll::EventFlags as On;
        for lane in &link.lanes {
            let inbox = &self.inboxes[lane.worker];
            inbox.watch(&lane.socket, link.number << 1, On::IN | On::ET)?;
        }
        let ends = On::ERR | On::HUP | On::RDHUP | On::ET;
        self.inboxes[link.home()].watch(link.tcp(), link.number << 1 | 1, ends)
    }

    fn limits(&self) -> Arc<Limits> {
        Arc::clone(&read(&self.limits))
    }

    fn link(&self, number: u64) -> Option<Arc<Link<S>>> {
        read(&self.links).get(&number).cloned()
    }

    fn all_links(&self) -> Vec<Arc<Link<S>>> {
        read(&self.links).values().cloned().collect()
    }

    /// Has the home worker end a connection, unless it is ending already.
    fn end(&self, link: &Link<S>, end: End) {
        if link.end.set(end).is_ok() {
            self.inboxes[link.home()].post(link.number);
        }
    }

    fn count_close(&self, reason: CloseReason) {
        if let Some(at) = CloseReason::ALL.iter().position(|known| *known == reason) {
            self.closes[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Queues replies and sends what the kernel takes.
    fn send(&self, link: &Link<S>, mut output: Output) {
        if output.is_empty() {
            return;
        }
        lock(&link.outbox).push(output.take());
        self.flush(link);
    }

    fn flush(&self, link: &Link<S>) {
        let mut outbox = lock(&link.outbox);
        let flushed = outbox.flush(Instant::now(), |slices| self.send_now(link, slices));
        let left_bytes = outbox.bytes();
        drop(outbox);
        match flushed {
            Ok(sent_bytes) => {
                self.bytes_out.fetch_add(sent_bytes as u64, Ordering::Relaxed);
            }
            Err(_) => self.end(link, End { reason: CloseReason::Io, reading: Reading::Nothing }),
        }
        if left_bytes > 0 && !link.blocked.swap(true, Ordering::SeqCst) {
            self.inboxes[link.home()].post(link.number);
        }
        if left_bytes <= self.limits().out_queue_bytes_max {
            self.resume(link);
        }
    }

    fn send_now(&self, link: &Link<S>, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        tcp::send(link.tcp(), slices, |error| {
            if let Some(end) = worker::end_of(epoll::EventFlags::empty(), Some(error)) {
                self.end(link, end);
            }
        })
    }

    /// Has the workers look again at sockets they had stopped to read.
    fn resume(&self, link: &Link<S>) {
        for lane in &link.lanes {
            if lane.parked.swap(false, Ordering::SeqCst) {
                self.inboxes[lane.worker].post(link.number);
            }
        }
    }

    /// Whether no more messages of the link are to be taken for now.
    fn must_wait(&self, link: &Link<S>, limits: &Limits) -> bool {
        let pending = link.pending.load(Ordering::SeqCst);
        pending >= limits.deferred_max as usize
            || (pending > 0 && self.service.order() == Order::Requests)
            || lock(&link.outbox).bytes() > limits.out_queue_bytes_max
    }
}

/// A multiplexor's first socket, and its clones.
fn sockets(count: usize) -> Result<Vec<KcmSocket>, KcmError> {
    let mut sockets = vec![KcmSocket::new()?];
    while sockets.len() < count {
        let clone = sockets[0].try_clone()?;
        sockets.push(clone);
    }
    Ok(sockets)
}

/// What keeps AF_KCM within bounds, for a service with this framing.
fn set_options(tcp: impl AsFd, framing: &Framing, limits: &Limits) -> Result<(), KcmError> {
    tcp::bound(tcp, wire_bytes_max(framing, limits), Some(limits.assembly_timeout_ms.max(1)))
}

/// The longest message as on the wire.
fn wire_bytes_max(framing: &Framing, limits: &Limits) -> usize {
    limits.message_bytes_max.saturating_add(overhead_bytes(framing))
}

/// The name of a connection for a service.
fn key(number: u64) -> ConnKey {
    ConnKey { index: number as u32, generation: (number >> 32) as u32 }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(shared: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    shared.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(shared: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    shared.write().unwrap_or_else(PoisonError::into_inner)
}
