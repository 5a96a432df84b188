//! The multiplexor: connections on one side, message sockets on the other.
//!
//! There is no thread that reads for others. Workers that have nothing to do wait together for all connections; the
//! kernel wakes one of them per connection that has bytes. It reads, cuts, works on the first message (or batch of cheap
//! ones) and leaves the others where any worker can take them; one sleeping worker is woken per batch left. While all
//! workers are busy none reads, and TCP slows the peers down.

mod ending;
mod pressure;
mod receiving;
mod reply_room;
mod sending;
mod table;
mod waiting;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ksf::Order;
use ksf::budget::Passes;
use ksf::buffers::Buffers;
use ksf::limits::{Limits, Time};
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::budget::SharedBudget;
use crate::connection::{Admission, Attachment, Connection};
use crate::descriptor::placed;
use crate::error::{AttachError, ConnectionError};
use crate::lingering::reset;
use crate::monitor::{Event, Events};
use crate::options::{MessageFraming, MuxOptions};
use crate::pollable::Pollable;
use crate::scheduler::Scheduler;
use crate::socket::MessageSocket;
use crate::sync::{Arc, Mutex, RwLock};
use crate::timer_thread::{self, MuxTimer, TimerThread};
use crate::wait_set::WaitSet;

pub(crate) use pressure::{Pressure, Shortage};
pub(crate) use receiving::{Receiver, WorkerCx};
pub(crate) use reply_room::{ReplyRoom, ReplyTurn};
pub(crate) use sending::HELD_BYTES_MAX;
use table::Table;

pub use table::AttachedLocked;
use waiting::SIGNAL;

/// Names a connection of a multiplexor, as connections of shards are named: a late reply never reaches another peer.
pub use ksf::service::ConnKey as ConnectionId;

/// A multiplexor. Clones are handles of the same one; it ends with the last handle and message socket.
#[derive(Clone)]
pub struct Mux(pub(crate) Handle);

/// What is left of a connection that was detached.
#[derive(Debug)]
pub struct Detached {
    /// The connection.
    pub socket: OwnedFd,
    /// Bytes received that belong to no whole message, as they were on the wire: they come before what can still be
    /// read from the socket.
    pub unread: Vec<u8>,
    /// Bytes queued that were not sent. The first ones may be the rest of a message whose beginning was sent.
    pub unsent: Vec<u8>,
}

/// What all handles share.
pub(crate) struct Shared {
    pub(crate) options: MuxOptions,
    limits: RwLock<Arc<Limits>>,
    pub(crate) budget: SharedBudget,
    pub(crate) scheduler: Scheduler<Arc<Connection>>,
    pub(crate) timer: TimerThread,
    pub(crate) events: Events,
    epoll: Arc<OwnedFd>,
    /// Message sockets that wait in event loops.
    pub(crate) wait_set: WaitSet<Arc<Pollable>>,
    /// Written to when sleepers are to wake; holds how many.
    signal: OwnedFd,
    table: RwLock<Table>,
    /// Bytes of messages that are not done with, what answers that are to come will need, and bytes of all out-queues.
    pub(crate) memory: Arc<AtomicUsize>,
    /// Memory for messages that have not arrived in full.
    pub(crate) input_bytes: AtomicUsize,
    /// Which connections are read although that is short.
    passes: Mutex<Passes>,
    /// Which are read although there is no room for their messages.
    room_passes: Mutex<Passes>,
    /// Which wait for room for a reply.
    reply_room: ReplyRoom,
    /// Memory for messages that are put together.
    pub(crate) buffers: Buffers,
    /// Connections that ended and of which readers are to be told.
    pub(crate) reports: Mutex<std::collections::VecDeque<(ConnectionId, ConnectionError)>>,
    pub(crate) reports_wanted: AtomicUsize,
    users: AtomicUsize,
    /// `None`: a thread of the program's has the [`MuxTimer`].
    timer_handle: Mutex<Option<std::thread::JoinHandle<()>>>,
    stopped: AtomicBool,
    /// Whose turn it is for a message to any connection.
    pub(crate) turn: AtomicUsize,
    pub(crate) counts: MuxCounts,
}

/// Counters, under the names AF_KCM gives them in /proc/net/kcm_stats where it has them.
#[derive(Debug, Default)]
pub(crate) struct MuxCounts {
    pub(crate) attach: AtomicU64,
    pub(crate) unattach: AtomicU64,
    pub(crate) tx_retries: AtomicU64,
    pub(crate) rx_bytes: AtomicU64,
    pub(crate) tx_bytes: AtomicU64,
    pub(crate) rx_pauses: AtomicU64,
    /// Times a connection was not read because memory for messages in part was short.
    pub(crate) memory_waits: AtomicU64,
    /// Closed connections whose peers sent too much.
    pub(crate) lingers_cut: AtomicU64,
    pub(crate) ends: crate::kcm::EndCounts,
    /// Of connections that are detached.
    pub(crate) retired: crate::connection::Counts,
}

/// Counts the users of a multiplexor: connections hold it, so references would never end.
pub(crate) struct Handle(pub(crate) Arc<Shared>);

impl Clone for Handle {
    fn clone(&self) -> Self {
        self.0.users.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.close();
        }
    }
}

impl Mux {
    /// A multiplexor without connections. Starts a thread that keeps time limits.
    pub fn new(options: MuxOptions) -> std::io::Result<Self> {
        let (mux, timer) = Self::without_thread(options)?;
        let thread = ksf::threads::start("ksf-mux-timer", move || timer.run())?;
        *mux.shared().timer_handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(mux)
    }

    /// A multiplexor without connections, and its time limits, for a thread of the caller's to keep. Starts no thread.
    pub(crate) fn without_thread(options: MuxOptions) -> std::io::Result<(Self, MuxTimer)> {
        let epoll = placed(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let signal = placed(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
        epoll::add(&epoll, &signal, epoll::EventData::new_u64(SIGNAL), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        let shared = Arc::new(Shared {
            scheduler: Scheduler::new(&options.class_caps),
            limits: RwLock::new(Arc::new(options.limits.clone())),
            budget: SharedBudget::new(&options.limits),
            buffers: Buffers::within(&options.limits),
            options,
            timer: TimerThread::new()?,
            events: Events::new()?,
            epoll: Arc::new(epoll),
            wait_set: WaitSet::new(),
            signal,
            table: RwLock::default(),
            memory: Arc::default(),
            input_bytes: AtomicUsize::new(0),
            passes: Mutex::default(),
            room_passes: Mutex::default(),
            reply_room: ReplyRoom::default(),
            reports: Mutex::default(),
            reports_wanted: AtomicUsize::new(0),
            users: AtomicUsize::new(1),
            timer_handle: Mutex::default(),
            stopped: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            counts: MuxCounts::default(),
        });
        let timer = MuxTimer::new(&shared);
        Ok((Self(Handle(shared)), timer))
    }

    /// A message socket: one worker's side. Workers and connections come and go independently of each other.
    pub fn socket(&self) -> std::io::Result<MessageSocket> {
        MessageSocket::new(self.0.clone())
    }

    /// Attaches a connected TCP or Unix stream socket. What was received on it before is not lost. Whether it blocks is
    /// left as it is.
    pub fn attach(&self, socket: OwnedFd) -> Result<ConnectionId, AttachError> {
        let shared = self.shared();
        self.attach_with(socket, shared.options.framing.clone(), shared.options.ordering)
    }

    /// The same, with a framing and an order of its own.
    pub fn attach_with(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: Order,
    ) -> Result<ConnectionId, AttachError> {
        self.shared().attach(socket, framing, ordering, None)
    }

    /// The same, with something to go with the connection, and a function that is told when it ends.
    pub(crate) fn attach_served(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: Order,
        attachment: Attachment,
    ) -> Result<ConnectionId, AttachError> {
        self.shared().attach(socket, framing, ordering, Some(attachment))
    }

    /// Ends a connection and lets go of it at once: with a reset, unless every message that was received is known to be answered.
    /// A reply that a worker sends meanwhile may be destroyed by the reset. Without it, a reply that comes too late would be
    /// lost behind an orderly end.
    pub(crate) fn abort(&self, connection: ConnectionId, error: ConnectionError) {
        let shared = self.shared();
        if let Some(conn) = shared.find(connection) {
            // Then it has thrown its replies away.
            let has_failed = conn.out_queue.has_failed();
            let is_unanswered = conn.waiting_messages.load(Ordering::SeqCst) > 0;
            shared.end(&conn, error);
            if let Some(Detached { socket, unsent, .. }) = shared.detach(connection)
                && (has_failed || is_unanswered || !unsent.is_empty())
            {
                reset(socket);
            }
        }
    }

    /// Counters.
    pub(crate) fn counts(&self) -> &MuxCounts {
        &self.shared().counts
    }

    /// Takes a connection away. Messages of it that wait or are being worked on stay valid; answers to them fail.
    /// `None` if there is no such connection.
    pub fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        self.shared().detach(connection)
    }

    /// Queues a message for one connection and sends what TCP takes at once. Never waits.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`](crate::SendError::WouldBlock) while as much is queued for the connection as
    /// [`Limits::out_queue_bytes_max`] allows: its peer does not read. [`MessageSocket::send`] can wait for that.
    pub fn reply(&self, connection: ConnectionId, body: &[u8]) -> Result<(), crate::SendError> {
        let conn = self.shared().find(connection).ok_or(crate::SendError::Gone(connection))?;
        self.shared().reply(&conn, Admission::Send, false, |tail| tail.extend_from_slice(body))
    }

    /// Replaces the limits, for connections that are attached, too.
    pub fn set_limits(&self, limits: Limits) {
        let shared = self.shared();
        shared.budget.set(&limits);
        *shared.limits.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(limits);
        // Those that do nothing may have a time limit now.
        shared.all().iter().for_each(|conn| {
            shared.timer.schedule_check(conn, timer_thread::IDLE_TICK);
            shared.resume(conn);
        });
    }

    /// The limits now.
    pub fn limits(&self) -> Arc<Limits> {
        self.shared().limits()
    }

    /// Connections closed from this side whose peers may still read what was sent last.
    pub fn lingering(&self) -> usize {
        self.shared().timer.lingering()
    }

    /// Bytes that count against [`Limits::shard_bytes_max`] (of messages that are not done with, of replies that are
    /// queued, and what answers that come later are assumed to need) and against [`Limits::assembly_bytes_max`] (of
    /// messages that have not arrived in full).
    pub fn memory(&self) -> usize {
        self.shared().memory() + self.shared().input_bytes.load(Ordering::SeqCst)
    }

    /// How many times a connection was not read because [`Limits::assembly_bytes_max`] was used up.
    pub fn memory_waits(&self) -> u64 {
        self.counts().memory_waits.load(Ordering::Relaxed)
    }

    /// Takes no more messages from any connection, apart from those that have begun to arrive. The messages that are
    /// there are still received; connections that have none left end.
    pub fn finish_reading(&self) {
        self.shared().finish_reading();
    }

    /// Ends every wait for messages, for good: receivers get what is queued, then [`RecvError::Stopped`](crate::RecvError).
    pub fn stop(&self) {
        self.shared().stop();
    }

    /// Connections attached.
    pub fn connections(&self) -> Vec<ConnectionId> {
        self.shared().read_table().all.iter().map(|conn| conn.id).collect()
    }

    /// The next event of a connection, if one waits. From the first call on events are kept.
    pub fn event(&self) -> Option<Event> {
        self.shared().events.want();
        self.shared().events.pop()
    }

    /// Readable while [`Self::event`] has events.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared().events.want();
        self.shared().events.fd()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }
}

impl fmt::Debug for Mux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mux").field("connections", &self.shared().read_table().all.len()).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn limits(&self) -> Arc<Limits> {
        Arc::clone(&self.limits.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn memory(&self) -> usize {
        self.memory.load(Ordering::SeqCst)
    }

    /// True while the budget of all connections together is used up.
    pub(crate) fn is_full(&self) -> bool {
        self.memory() >= self.budget.shard_bytes_max()
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wait_set.notify_all(|| self.scheduler.awake(0));
        self.wake(self.scheduler.wake_all());
    }

    /// The last user is gone.
    fn close(&self) {
        self.timer.stop();
        // It holds connections: they are gone when this returns. Its thread has no handle, so it is not the one that calls.
        self.timer.gone.wait();
        let thread = self.timer_handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = thread.map(std::thread::JoinHandle::join);
        let all: Vec<_> = self.read_table().all.iter().map(|conn| conn.id).collect();
        for id in all {
            drop(self.detach(id));
        }
        // What waits holds its connection, which holds this.
        self.scheduler.clear();
    }
}

/// The monotonic clock.
pub(crate) fn now() -> Time {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
