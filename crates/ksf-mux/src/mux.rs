//! The multiplexor: connections on one side, message sockets on the other.
//!
//! There is no thread that reads for others. Workers that have nothing to do wait together for all connections; the
//! kernel wakes one of them per connection that has bytes. It reads, cuts, works on the first message and leaves the
//! others where any worker can take them; one sleeping worker is woken per message left. While all workers are busy
//! nobody reads, and TCP slows the peers down.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use ksf::limits::Time;
use ksf::output::Output;
use ksf::pool::{Chunk, Pool};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType, sockopt};

use crate::error::{AttachError, ConnectionError};
use crate::keeper::{self, Keeper};
use crate::link::{Attachment, Link};
use crate::monitor::{Event, Events};
use crate::options::{Limits, MessageFraming, Options};
use crate::outbox::Sent;
use crate::run::{self, Found, Run};
use crate::scheduler::{Scheduler, Worker};
use crate::socket::MessageSocket;
use crate::sync::{Arc, Mutex};

/// Names a connection of a multiplexor. The generation tells it from its predecessors in the same place, so a late
/// reply never reaches another peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId {
    /// Place in the table.
    pub index: u32,
    /// Counts the connections that had this place.
    pub generation: u32,
}

impl ConnectionId {
    /// As one number, for C.
    pub fn to_u64(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The inverse of [`Self::to_u64`].
    pub fn from_u64(id: u64) -> Self {
        Self { index: id as u32, generation: (id >> 32) as u32 }
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

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
    pub(crate) options: Options,
    limits: RwLock<Arc<Limits>>,
    pub(crate) scheduler: Scheduler<Arc<Link>>,
    pub(crate) keeper: Keeper,
    pub(crate) events: Events,
    epoll: OwnedFd,
    /// Written to when sleepers are to wake; holds how many.
    signal: OwnedFd,
    table: RwLock<Table>,
    /// Bytes of messages that are not done with, and of unfinished ones.
    pub(crate) memory: AtomicUsize,
    /// Connections that ended and of which readers are to be told.
    pub(crate) reports: Mutex<std::collections::VecDeque<(ConnectionId, ConnectionError)>>,
    pub(crate) reports_wanted: AtomicUsize,
    users: AtomicUsize,
    keeper_thread: Mutex<Option<std::thread::JoinHandle<()>>>,
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
    pub(crate) wakes: AtomicU64,
    pub(crate) rx_bytes: AtomicU64,
    pub(crate) tx_bytes: AtomicU64,
    pub(crate) rx_pauses: AtomicU64,
    pub(crate) ends: crate::kcm::EndCounts,
    /// Of connections that are detached.
    pub(crate) retired: crate::link::Counts,
}

#[derive(Default)]
pub(crate) struct Table {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Attached connections, in no order: messages for any connection go round here.
    pub(crate) all: Vec<Arc<Link>>,
}

#[derive(Default)]
struct Place {
    generation: u32,
    link: Option<Arc<Link>>,
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

/// Cookies of attached sockets, of all multiplexors of this process.
static ATTACHED: std::sync::Mutex<Option<HashSet<u64>>> = std::sync::Mutex::new(None);

fn with_attached<R>(f: impl FnOnce(&mut HashSet<u64>) -> R) -> R {
    f(ATTACHED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Data of the signal in the epoll set; no connection has it, because a generation never reaches it.
const SIGNAL: u64 = u64::MAX;

impl Mux {
    /// A multiplexor without connections. Starts a thread that keeps time limits.
    pub fn new(options: Options) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &signal, epoll::EventData::new_u64(SIGNAL), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        let shared = Arc::new(Shared {
            scheduler: Scheduler::new(&options.class_caps),
            limits: RwLock::new(Arc::new(options.limits.clone())),
            options,
            keeper: Keeper::new(),
            events: Events::new()?,
            epoll,
            signal,
            table: RwLock::default(),
            memory: AtomicUsize::new(0),
            reports: Mutex::default(),
            reports_wanted: AtomicUsize::new(0),
            users: AtomicUsize::new(1),
            keeper_thread: Mutex::default(),
            stopped: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            counts: MuxCounts::default(),
        });
        let keeper = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("ksf-mux-keeper".into()).spawn(move || Keeper::run(&keeper))?;
        *shared.keeper_thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self(Handle(shared)))
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
        ordering: crate::options::Ordering,
    ) -> Result<ConnectionId, AttachError> {
        self.shared().attach(socket, framing, ordering, None)
    }

    /// The same, with something to go with the connection, and a function that is told when it ends.
    pub(crate) fn attach_served(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: crate::options::Ordering,
        attachment: Attachment,
    ) -> Result<ConnectionId, AttachError> {
        self.shared().attach(socket, framing, ordering, Some(attachment))
    }

    /// Ends a connection and lets go of it at once.
    pub(crate) fn abort(&self, connection: ConnectionId, error: ConnectionError) {
        let shared = self.shared();
        if let Some(link) = shared.find(connection) {
            shared.end(&link, error);
            drop(shared.detach(connection));
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
    pub fn reply(&self, connection: ConnectionId, body: &[u8]) -> Result<(), crate::SendError> {
        let link = self.shared().find(connection).ok_or(crate::SendError::Gone(connection))?;
        self.shared().reply(&link, false, |tail| tail.extend_from_slice(body))
    }

    /// Replaces the limits, for connections that are attached, too.
    pub fn set_limits(&self, limits: Limits) {
        *self.shared().limits.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(limits);
    }

    /// The limits now.
    pub fn limits(&self) -> Arc<Limits> {
        self.shared().limits()
    }

    /// Connections closed from this side whose peers may still read what was sent last.
    pub fn lingering(&self) -> usize {
        self.shared().keeper.lingering()
    }

    /// Bytes of messages that are not done with, and of those that have not arrived in full.
    pub fn memory(&self) -> usize {
        self.shared().memory.load(Ordering::SeqCst)
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
        self.shared().read_table().all.iter().map(|link| link.id).collect()
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

/// What a thread needs to receive: slots and a list, kept for their memory.
pub(crate) struct Receiver {
    pool: Pool,
    found: Vec<Found>,
    runs: Vec<Run>,
    /// Lists of places in a run, to be used again.
    pub(crate) ranges: Vec<Vec<std::ops::Range<u32>>>,
}

impl Receiver {
    /// Long enough for 64 messages of a kilobyte, and for what a socket buffer usually holds.
    const SLOT_BYTES: u32 = 64 << 10;
    const SLOTS: u32 = 32;

    pub(crate) fn new() -> std::io::Result<Self> {
        let pool = Pool::new(ksf::pool::Memory::Anonymous, Self::SLOT_BYTES, Self::SLOTS)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self { pool, found: Vec::new(), runs: Vec::new(), ranges: Vec::new() })
    }

    /// Receives what is there, up to a slot. Where all slots hold messages somebody keeps: into a block of its own.
    fn receive(&mut self, socket: &OwnedFd) -> Result<(Chunk, bool), Errno> {
        match self.pool.take() {
            Some(mut slot) => {
                let (bytes, _) = rustix::net::recv(socket, slot.as_mut_slice(), RecvFlags::DONTWAIT)?;
                let full = bytes == slot.capacity();
                Ok((slot.freeze(bytes), full))
            }
            None => {
                let mut block = vec![0; 16 << 10];
                let (bytes, _) = rustix::net::recv(socket, &mut block[..], RecvFlags::DONTWAIT)?;
                let full = bytes == block.len();
                block.truncate(bytes);
                block.shrink_to_fit();
                Ok((Chunk::from_vec(block), full))
            }
        }
    }
}

/// The calling thread, as a worker.
pub(crate) struct Me<'a> {
    pub(crate) worker: Option<&'a Worker<Arc<Link>>>,
    pub(crate) receiver: &'a mut Receiver,
    /// How many messages may travel together.
    pub(crate) run_len: usize,
}

impl Shared {
    pub(crate) fn attach(
        self: &Arc<Self>,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: crate::options::Ordering,
        attachment: Option<Attachment>,
    ) -> Result<ConnectionId, AttachError> {
        self.attach_limited(socket, framing, ordering, attachment, None)
    }

    /// The same, with limits of its own; those of the multiplexor as a whole stay.
    pub(crate) fn attach_limited(
        self: &Arc<Self>,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: crate::options::Ordering,
        attachment: Option<Attachment>,
        limits: Option<Limits>,
    ) -> Result<ConnectionId, AttachError> {
        let system = |step| move |errno: Errno| AttachError::System { step, source: errno.into() };
        check_stream(&socket)?;
        let cookie = sockopt::socket_cookie(&socket).map_err(system("SO_COOKIE"))?;
        if !with_attached(|attached| attached.insert(cookie)) {
            return Err(AttachError::Already);
        }
        let forget = |error| {
            with_attached(|attached| attached.remove(&cookie));
            error
        };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let limit = self.limits().connections_max;
        if table.all.len() >= limit {
            return Err(forget(AttachError::TooMany { limit }));
        }
        let index = table.free.pop().unwrap_or_else(|| {
            table.places.push(Place::default());
            table.places.len() as u32 - 1
        });
        let id = ConnectionId { index, generation: table.places[index as usize].generation };
        let raw = socket.as_raw_fd();
        let link = Arc::new(Link::new(id, Arc::clone(self), socket, framing, ordering, limits));
        if let Some(attachment) = attachment {
            let _ = link.attachment.set(attachment);
        }
        table.places[index as usize].link = Some(Arc::clone(&link));
        table.all.push(Arc::clone(&link));
        // Found by workers from here on. What is there to read already is an event, too.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let reader = link.reader.lock();
        let added = reader.socket.as_ref().map_or(Ok(()), |socket| {
            debug_assert_eq!(socket.as_raw_fd(), raw);
            epoll::add(&self.epoll, socket, epoll::EventData::new_u64(id.to_u64()), flags)
        });
        drop(reader);
        if let Err(errno) = added {
            table.remove(id);
            return Err(forget(system("epoll_ctl")(errno)));
        }
        self.counts.attach.fetch_add(1, Ordering::Relaxed);
        if self.limits().idle_timeout_ms > 0 {
            self.keeper.look_after(&link, keeper::IDLE);
        }
        Ok(id)
    }

    pub(crate) fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        let link = self.table.write().unwrap_or_else(PoisonError::into_inner).remove(connection)?;
        link.detached.store(true, Ordering::SeqCst);
        let mut reader = link.reader.lock();
        let socket = reader.socket.take();
        let unread = reader.framer.take_unread();
        drop(reader);
        self.charge(&link, 0);
        let (for_sending, unsent) = link.outbox.stop();
        drop(for_sending);
        let socket = socket?;
        if let Ok(cookie) = sockopt::socket_cookie(&socket) {
            with_attached(|attached| attached.remove(&cookie));
        }
        let _ = epoll::delete(&self.epoll, &socket);
        self.counts.unattach.fetch_add(1, Ordering::Relaxed);
        self.counts.retired.add(&link.counts);
        // Both sides let go of it under their locks, so this is the last holder; a duplicate would do as well.
        let socket = Arc::try_unwrap(socket).or_else(|shared| shared.try_clone()).ok()?;
        Some(Detached { socket, unread, unsent })
    }

    /// Detaches a connection that ended and of which nothing is left to do, where that was asked for; tells readers of
    /// it when its last message is done with.
    pub(crate) fn settle(&self, link: &Arc<Link>) {
        let Some(error) = link.error.get() else { return };
        if link.waiting_messages.load(Ordering::SeqCst) > 0 {
            return;
        }
        if !link.reported.swap(true, Ordering::SeqCst) && self.reports_wanted.load(Ordering::SeqCst) > 0 {
            let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
            reports.push_back((link.id, error.clone()));
            drop(reports);
            self.wake(self.scheduler.push_visit(None, Arc::clone(link)));
        }
        if self.options.detach_ended
            && link.is_done()
            && let Some(detached) = self.detach(link.id)
        {
            self.events.push(Event::Detached { connection: link.id });
            if !matches!(error, ConnectionError::PeerClosed | ConnectionError::Socket { .. }) {
                // Closing with unread bytes would reset the connection, and destroy what is on its way to the peer.
                let _ = rustix::net::shutdown(&detached.socket, rustix::net::Shutdown::Write);
                self.keeper.linger(detached.socket, now().plus_ms(self.limits().linger_timeout_ms));
            }
        }
    }

    pub(crate) fn limits(&self) -> Arc<Limits> {
        Arc::clone(&self.limits.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake(self.scheduler.wake_all());
    }

    fn finish_reading(&self) {
        for link in self.all() {
            if link.unfinished_bytes.load(Ordering::SeqCst) == 0 {
                self.end(&link, ConnectionError::Stopping);
            }
        }
    }

    pub(crate) fn find(&self, connection: ConnectionId) -> Option<Arc<Link>> {
        let table = self.read_table();
        let place = table.places.get(connection.index as usize)?;
        place.link.as_ref().filter(|link| link.id == connection).map(Arc::clone)
    }

    /// The `at`-th connection, counted round.
    pub(crate) fn nth(&self, at: usize) -> Option<(Arc<Link>, usize)> {
        let table = self.read_table();
        let count = table.all.len();
        (count > 0).then(|| (Arc::clone(&table.all[at % count]), count))
    }

    /// Every connection.
    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.read_table().all.clone()
    }

    /// Queues a message for a connection. `more`: others will follow from the same worker at once, so it may wait for
    /// them.
    pub(crate) fn reply(
        &self,
        link: &Arc<Link>,
        more: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), crate::SendError> {
        if link.detached.load(Ordering::SeqCst) {
            return Err(crate::SendError::Gone(link.id));
        }
        if !link.outbox.push(&link.framing, write).map_err(crate::SendError::Unframable)? {
            return Err(crate::SendError::Gone(link.id));
        }
        self.queued(link, more);
        Ok(())
    }

    /// The same with a body that is sent from where it lies.
    pub(crate) fn reply_chunk(&self, link: &Arc<Link>, more: bool, body: Chunk) -> Result<(), crate::SendError> {
        if link.detached.load(Ordering::SeqCst) {
            return Err(crate::SendError::Gone(link.id));
        }
        if !link.outbox.push_chunk(&link.framing, body).map_err(crate::SendError::Unframable)? {
            return Err(crate::SendError::Gone(link.id));
        }
        self.queued(link, more);
        Ok(())
    }

    /// Queues what a service wrote for so many messages, framing included, to leave with what follows from the same worker, or within
    /// [`keeper::CORK`].
    pub(crate) fn hold_framed(&self, link: &Arc<Link>, output: &mut Output, messages: u64) {
        link.outbox.append(output);
        link.counts.tx_messages.fetch_add(messages, Ordering::Relaxed);
        self.cork(link);
    }

    fn cork(&self, link: &Arc<Link>) {
        if !link.corked.load(Ordering::SeqCst) && !link.corked.swap(true, Ordering::SeqCst) {
            self.keeper.look_after(link, keeper::CORK);
        }
    }

    pub(crate) fn queued(&self, link: &Arc<Link>, more: bool) {
        link.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        if more {
            self.cork(link);
        } else {
            self.send(link);
        }
    }

    /// The same for a message that may wait for the next one for so long.
    pub(crate) fn batched(&self, link: &Arc<Link>, wait: std::time::Duration) {
        link.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        // Sent before there is too much of it: a connection that is full takes no message that would push it.
        if wait.is_zero() || link.outbox.bytes() >= self.limits().out_queue_bytes_max / 2 {
            return self.send(link);
        }
        let until = now().0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
        // The first message of a batch sets the time of all.
        let first = link.batch_until_ns.compare_exchange(0, until, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if first {
            self.keeper.look_after(link, keeper::CORK.min(wait));
        }
    }

    /// Sends what TCP takes.
    pub(crate) fn send(&self, link: &Arc<Link>) {
        link.batch_until_ns.store(0, Ordering::SeqCst);
        link.corked.store(false, Ordering::SeqCst);
        link.corked_seen.store(false, Ordering::SeqCst);
        match link.outbox.send() {
            Sent::Elsewhere => {}
            Sent::All(bytes) => {
                self.sent(link, bytes);
                self.resume(link);
                if link.error.get().is_some() {
                    self.settle(link);
                }
            }
            Sent::Blocked(bytes) => {
                self.sent(link, bytes);
                self.keeper.look_after(link, keeper::TIMED);
                self.resume(link);
            }
            Sent::Failed(errno) => self.end(link, ConnectionError::Socket { errno }),
        }
    }

    fn sent(&self, link: &Link, bytes: usize) {
        if bytes > 0 {
            link.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            self.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            link.active_at.store(now().0, Ordering::Relaxed);
        }
    }

    /// A connection brings no more messages.
    pub(crate) fn end(&self, link: &Arc<Link>, error: ConnectionError) {
        // Also where the peer's direction ended before: nothing can be sent any more.
        let failed = matches!(error, ConnectionError::Socket { .. } | ConnectionError::SendTimeout { .. });
        if link.error.set(error.clone()).is_ok() {
            if let Some(Attachment { ended, .. }) = link.attachment.get() {
                ended(link, &error);
            }
            self.counts.ends.note(&error);
            self.events.push(Event::Ended { connection: link.id, error });
        } else if !failed {
            return;
        }
        if failed {
            let leftover = link.outbox.fail();
            if leftover.uncertain > 0 {
                self.events.push(Event::Uncertain { connection: link.id, messages: leftover.uncertain });
            }
            for (body, repeatable) in leftover.movable {
                self.counts.tx_retries.fetch_add(1, Ordering::Relaxed);
                // Nowhere to go: as lost as if it had been sent and not arrived.
                if self.send_anywhere(&body, repeatable, Some(link.id)).is_err() {
                    self.events.push(Event::Uncertain { connection: link.id, messages: 1 });
                }
            }
        }
        self.settle(link);
    }

    /// Queues a message on some connection, whatever is queued there already.
    fn send_anywhere(&self, body: &[u8], repeatable: bool, but: Option<ConnectionId>) -> Result<(), crate::SendError> {
        let mut links = self.all();
        links.retain(|link| Some(link.id) != but && link.error.get().is_none());
        links.sort_by_key(|link| link.outbox.bytes());
        for link in links {
            let pushed = link.outbox.push_movable(&link.framing, body, repeatable);
            if pushed.map_err(crate::SendError::Unframable)? {
                self.queued(&link, false);
                return Ok(());
            }
        }
        Err(crate::SendError::NotConnected)
    }

    /// Reads on where a connection was left alone because too much of it waited.
    pub(crate) fn resume(&self, link: &Arc<Link>) {
        if link.paused.load(Ordering::SeqCst) && !link.is_full() && link.paused.swap(false, Ordering::SeqCst) {
            self.wake(self.scheduler.push_visit(None, Arc::clone(link)));
        }
    }

    /// Messages are done with; several only where none is in a class or a lane. `worker`: the one that calls, if it
    /// comes for another at once.
    pub(crate) fn finish(
        &self,
        worker: Option<&Worker<Arc<Link>>>,
        link: &Arc<Link>,
        messages: usize,
        bytes: usize,
        class: Option<usize>,
    ) {
        link.waiting_bytes.fetch_sub(bytes, Ordering::SeqCst);
        self.memory.fetch_sub(bytes, Ordering::SeqCst);
        let left = link.waiting_messages.fetch_sub(messages, Ordering::SeqCst) - messages;
        if class.is_some() || crate::scheduler::Source::lane(link).is_some() {
            self.wake(self.scheduler.finish(worker, link, class));
        }
        self.resume(link);
        if left == 0 && link.error.get().is_some() {
            self.settle(link);
        }
    }

    /// Reads a connection: a chunk, or until its end if that was announced.
    pub(crate) fn read(self: &Arc<Self>, link: &Arc<Link>, me: &mut Me<'_>) {
        let mut wakes = 0;
        let mut ended = None;
        link.reader.run(|reader| {
            loop {
                let Some(socket) = reader.socket.clone() else { return };
                if link.error.get().is_some() || ended.is_some() {
                    return;
                }
                if link.doomed.load(Ordering::SeqCst) {
                    reader.framer.take_unread();
                    self.charge(link, 0);
                    ended = Some(ConnectionError::MemoryLimit { limit: self.limits().mux_bytes_max });
                    return;
                }
                if link.is_full() {
                    self.counts.rx_pauses.fetch_add(1, Ordering::Relaxed);
                    link.paused.store(true, Ordering::SeqCst);
                    // What was in the way may have gone before the flag was up.
                    if link.is_full() || !link.paused.swap(false, Ordering::SeqCst) {
                        return;
                    }
                }
                match me.receiver.receive(&socket) {
                    Ok((chunk, _)) if chunk.is_empty() => {
                        let bytes = reader.framer.unfinished_bytes();
                        ended = Some(match bytes {
                            0 => ConnectionError::PeerClosed,
                            bytes => ConnectionError::PeerClosedMidMessage { bytes },
                        });
                        return;
                    }
                    Ok((chunk, full)) => {
                        link.active_at.store(now().0, Ordering::Relaxed);
                        let (more_wakes, error) = self.cut(link, reader, &chunk, me);
                        wakes += more_wakes;
                        ended = error;
                        if full && ended.is_none() {
                            // Others first: what is left is read when its turn comes.
                            wakes += self.scheduler.push_visit(me.worker, Arc::clone(link));
                            return;
                        }
                        // Less than there was room for: everything is read. What comes later is another event, but
                        // an end that was announced already is not.
                        if !link.hangup.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return,
                    Err(errno) => {
                        ended = Some(ConnectionError::Socket { errno: errno.raw_os_error() });
                        return;
                    }
                }
            }
        });
        self.wake(wakes);
        if let Some(error) = ended {
            self.end(link, error);
        }
    }

    /// Cuts a chunk and queues its messages. Returns how many workers to wake.
    fn cut(
        self: &Arc<Self>,
        link: &Arc<Link>,
        reader: &mut crate::link::Reader,
        chunk: &Chunk,
        me: &mut Me<'_>,
    ) -> (usize, Option<ConnectionError>) {
        let Receiver { found, runs, ranges, .. } = &mut *me.receiver;
        let had_unfinished = reader.framer.unfinished_bytes() > 0;
        let cut = reader.framer.push(chunk, now(), &link.limits(), found);
        let unfinished = if cut.is_ok() { reader.framer.unfinished_bytes() } else { 0 };
        if unfinished > 0 || had_unfinished {
            self.charge(link, unfinished);
        }
        if unfinished > 0 {
            if reader.framer.needs_header() {
                link.counts.rx_need_more.fetch_add(1, Ordering::Relaxed);
            }
            self.keeper.look_after(link, keeper::TIMED);
            if self.memory.load(Ordering::SeqCst) > self.limits().mux_bytes_max {
                self.relieve_memory();
            }
        }
        let bytes: usize = found.iter().map(Found::len).sum();
        let count = found.len();
        if count == 0 {
            return (0, cut.err());
        }
        link.counts.rx_messages.fetch_add(count as u64, Ordering::Relaxed);
        link.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        link.waiting_messages.fetch_add(count, Ordering::SeqCst);
        link.waiting_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.memory.fetch_add(bytes, Ordering::SeqCst);
        // Where each is looked at by itself it also travels by itself.
        let alone = self.options.classify.is_some() || crate::scheduler::Source::lane(link).is_some();
        run::gather(chunk, found, if alone { 1 } else { me.run_len }, ranges, runs);
        (self.scheduler.push(me.worker, link, runs.drain(..)), cut.err())
    }

    /// Notes how many bytes of an unfinished message a connection keeps.
    fn charge(&self, link: &Link, bytes: usize) {
        let before = link.unfinished_bytes.swap(bytes, Ordering::SeqCst);
        if bytes > before {
            self.memory.fetch_add(bytes - before, Ordering::SeqCst);
        } else {
            self.memory.fetch_sub(before - bytes, Ordering::SeqCst);
        }
    }

    /// Dooms the connection that keeps most for an unfinished message.
    fn relieve_memory(&self) {
        let table = self.read_table();
        let hog = table.all.iter().max_by_key(|link| link.unfinished_bytes.load(Ordering::SeqCst)).cloned();
        drop(table);
        if let Some(hog) = hog
            && !hog.doomed.swap(true, Ordering::SeqCst)
        {
            self.wake(self.scheduler.push_visit(None, hog));
        }
    }

    /// Keeps the time limits of a connection.
    pub(crate) fn check_time(&self, link: &Arc<Link>, now: Time) {
        let limits = link.limits();
        let mut ended = None;
        let limit_ms = limits.assembly_timeout_ms;
        if limit_ms != 0 && link.unfinished_bytes.load(Ordering::SeqCst) > 0 {
            let reader = link.reader.lock();
            let late = reader.framer.unfinished_since().is_some_and(|since| now > since.plus_ms(limit_ms));
            // Who is not read cannot send the rest.
            if late && !link.paused.load(Ordering::SeqCst) {
                ended = Some(ConnectionError::AssemblyTimeout { limit_ms });
            }
        }
        let limit_ms = limits.idle_timeout_ms;
        if limit_ms != 0 && link.waiting_messages.load(Ordering::SeqCst) == 0 {
            let active = Time(link.active_at.load(Ordering::Relaxed));
            if now > active.plus_ms(limit_ms) {
                ended = Some(ConnectionError::IdleTimeout { limit_ms });
            }
        }
        let limit_ms = limits.send_timeout_ms;
        let mut progress = link.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_overdue(link.outbox.bytes(), link.outbox.sent(), now, limit_ms) {
            ended = Some(ConnectionError::SendTimeout { limit_ms });
        }
        drop(progress);
        if let Some(error) = ended {
            self.end(link, error);
        }
    }

    /// Waits for something to do, for so long. Events of connections are handled: what they bring is queued.
    pub(crate) fn wait(
        self: &Arc<Self>,
        timeout: Option<&Timespec>,
        as_me: impl FnOnce(&mut dyn FnMut(&mut Me<'_>)),
    ) -> std::io::Result<()> {
        let mut buffer = [EVENT; EVENTS_MAX];
        // One while others wait too: each takes one.
        let max = if self.scheduler.has_sleepers() { 1 } else { EVENTS_MAX };
        if !self.scheduler.sleep() {
            return Ok(());
        }
        if self.is_stopped() {
            // Whoever stopped it did not see this sleeper.
            self.scheduler.awake(0);
            return Ok(());
        }
        let waited = epoll::wait(&self.epoll, &mut buffer[..max], timeout);
        let events = match waited {
            Ok(count) => &buffer[..count],
            Err(Errno::INTR) => &[],
            Err(errno) => {
                self.scheduler.awake(0);
                return Err(errno.into());
            }
        };
        let signalled = events.iter().any(|event| event.data.u64() == SIGNAL) && self.take_signal();
        self.scheduler.awake(usize::from(signalled));
        if !events.is_empty() {
            as_me(&mut |me| events.iter().for_each(|event| self.handle(event.data.u64(), event.flags, me)));
        }
        Ok(())
    }

    /// Looks for events without waiting.
    pub(crate) fn poll(self: &Arc<Self>, me: &mut Me<'_>) -> std::io::Result<()> {
        let mut buffer = [EVENT; EVENTS_MAX];
        let max = if self.scheduler.has_sleepers() { 1 } else { EVENTS_MAX };
        let count = match epoll::wait(&self.epoll, &mut buffer[..max], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for event in &buffer[..count] {
            if event.data.u64() == SIGNAL {
                let signals = usize::from(self.take_signal());
                self.scheduler.note_signals(signals);
            }
            self.handle(event.data.u64(), event.flags, me);
        }
        Ok(())
    }

    fn handle(self: &Arc<Self>, data: u64, flags: epoll::EventFlags, me: &mut Me<'_>) {
        let Some(link) = self.find(ConnectionId::from_u64(data)) else { return };
        let ends = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(ends) {
            link.hangup.store(true, Ordering::SeqCst);
        }
        if flags.contains(epoll::EventFlags::OUT) && link.outbox.is_blocked() {
            self.send(&link);
        }
        if flags.intersects(ends | epoll::EventFlags::IN) {
            self.read(&link, me);
        }
    }

    /// Wakes sleeping workers.
    pub(crate) fn wake(&self, workers: usize) {
        if workers > 0 {
            self.counts.wakes.fetch_add(workers as u64, Ordering::Relaxed);
            let _ = rustix::io::write(&self.signal, &(workers as u64).to_ne_bytes());
        }
    }

    /// Takes one wake-up and passes the others on. False if somebody else took it.
    fn take_signal(&self) -> bool {
        let mut count = [0; 8];
        if rustix::io::read(&self.signal, &mut count).is_err() {
            return false;
        }
        let rest = u64::from_ne_bytes(count) - 1;
        if rest > 0 {
            let _ = rustix::io::write(&self.signal, &rest.to_ne_bytes());
        }
        true
    }

    pub(crate) fn epoll_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn read_table(&self) -> std::sync::RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last user is gone.
    fn close(&self) {
        self.keeper.stop();
        // It holds connections: they are gone when this returns. It has no handle, so it is not the one that calls.
        let thread = self.keeper_thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = thread.map(std::thread::JoinHandle::join);
        let all: Vec<_> = self.read_table().all.iter().map(|link| link.id).collect();
        for id in all {
            drop(self.detach(id));
        }
        // What waits holds its connection, which holds this.
        self.scheduler.clear();
    }
}

const EVENTS_MAX: usize = 16;
const EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

impl Table {
    fn remove(&mut self, id: ConnectionId) -> Option<Arc<Link>> {
        let place = self.places.get_mut(id.index as usize)?;
        let link = place.link.take_if(|link| link.id == id)?;
        // The signal's number is not given out, nor is any twice within four billion connections of one place.
        place.generation = (place.generation + 1) % (u32::MAX - 1);
        self.free.push(id.index);
        self.all.retain(|other| !Arc::ptr_eq(other, &link));
        Some(link)
    }
}

fn check_stream(socket: &OwnedFd) -> Result<(), AttachError> {
    let not = |what| Err(AttachError::NotAStream { what });
    match sockopt::socket_type(socket) {
        Err(_) => return not("no socket"),
        Ok(SocketType::STREAM) => {}
        Ok(_) => return not("of another type"),
    }
    let domain = sockopt::socket_domain(socket).unwrap_or(AddressFamily::UNSPEC);
    let tcp = [AddressFamily::INET, AddressFamily::INET6].contains(&domain)
        && sockopt::socket_protocol(socket).is_ok_and(|protocol| protocol == Some(rustix::net::ipproto::TCP));
    if !tcp && domain != AddressFamily::UNIX {
        return not("of another protocol");
    }
    if sockopt::socket_acceptconn(socket).unwrap_or(false) {
        return not("listening");
    }
    match rustix::net::getpeername(socket) {
        Ok(Some(_)) => Ok(()),
        Ok(None) if domain == AddressFamily::UNIX => Ok(()),
        _ => not("not connected"),
    }
}

/// The monotonic clock.
pub(crate) fn now() -> Time {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
