//! Message sockets on AF_KCM: the calls of `ksf-mux`, where the kernel cuts messages and hands them out.
//!
//! AF_KCM does not say from which connection of a multiplexor a message came, and gives what is queued for a connection
//! that died to the next one. So each connection has a multiplexor of its own, with a socket for each message socket:
//!
//! ```text
//!  connection 1 ─► multiplexor ─┬─► socket ─┐
//!                               └─► socket ─│─┐     ┌─► message socket 1   waits for the first sockets of all
//!                                           └─│─────┘                      connections, in an epoll set of its own
//!  connection 2 ─► multiplexor ─┬─► socket ───│─────┘
//!                               └─► socket ───┴───────► message socket 2   for the second ones
//! ```
//!
//! The kernel decides which message socket gets a message, when it arrives. Replies leave through the TCP socket itself,
//! from one queue per connection: AF_KCM takes the end of the peer's stream for a broken connection, and keeps what is
//! sent after it for ever. A thread looks after what no other thread is told of: the ends of connections, queues that TCP
//! had no room for (AF_KCM takes that event away), limits of time.

mod connection;
mod message;
mod queue;
mod socket;
mod timer_thread;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use ksf::buffers::Buffers;
use ksf::limits::Limits;
use ksf_bpf_framing::KernelProgram;
use ksf_mux::backend::{EndCounts, Event, Events, Multiplexor, Pushed, Sent, check_stream};
use ksf_mux::kcm::{ConnectionStats, MuxStats};
use ksf_mux::{
    AttachError, ConnectionError, ConnectionId, Detached, MessageFraming, MuxOptions, SendError, SendOptions,
};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{AddressFamily, sockopt};

use self::connection::{KernelConnection, Lane, Tcp, wire_bytes_max};
use self::queue::Queue;
use self::socket::{Member, Report};
use crate::error::KcmError;
use crate::intake;
use crate::socket::RawKcmSocket;

pub use self::message::KernelMessage;
pub use self::socket::KernelSocket;

/// A multiplexor whose messages the kernel cuts and hands out: [`ksf_mux::Mux`] on AF_KCM. Clones are handles of the same
/// one; it ends with the last handle and message socket.
///
/// What AF_KCM cannot do is refused: messages of a connection in order, classes, `detach_ended`, and limits other than
/// the default for `header_bytes_max`, `fragments_max`, `shard_bytes_max` and `assembly_bytes_max` ([`KcmError::Unsupported`]).
#[derive(Clone)]
pub struct KernelMux(Handle);

struct Shared {
    options: MuxOptions,
    programs: Mutex<Vec<(MessageFraming, Arc<KernelProgram>)>>,
    /// Message sockets. A thread that changes them, or which connections there are, holds this.
    members: Mutex<Members>,
    table: RwLock<Table>,
    events: Events,
    /// Memory for records that came in fragments.
    buffers: Buffers,
    /// Messages that were received and given back, and those of connections that are detached.
    returned: Queue<KernelMessage>,
    reports: Queue<Report>,
    reports_wanted: AtomicUsize,
    /// TCP sockets of all connections, and the signal.
    watched: OwnedFd,
    signal: OwnedFd,
    /// Connections the timer thread is to look after.
    busy: Mutex<Vec<Arc<KernelConnection>>>,
    timer_thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    stopped: AtomicBool,
    users: AtomicUsize,
    /// Whose turn it is for a message to any connection.
    turn: AtomicUsize,
    /// Some queue has become shorter.
    room: (Mutex<()>, Condvar),
    counts: MuxCounts,
}

#[derive(Default)]
struct Members {
    all: Vec<Arc<Member>>,
    next: u64,
}

#[derive(Default)]
struct Table {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Attached connections, in no order: messages for any connection go round here.
    all: Vec<Arc<KernelConnection>>,
}

#[derive(Default)]
struct Place {
    generation: u32,
    conn: Option<Arc<KernelConnection>>,
}

#[derive(Default)]
struct MuxCounts {
    attach: AtomicU64,
    unattach: AtomicU64,
    tx_retries: AtomicU64,
    ends: EndCounts,
    /// Of connections that are detached.
    retired: connection::Counts,
}

/// Counts the users: the timer thread and connections hold what is shared, too.
struct Handle(Arc<Shared>);

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

/// The timer thread's signal; no connection has this name.
const SIGNAL: u64 = u64::MAX;

impl KernelMux {
    /// A multiplexor without connections. Starts a thread that looks after connections.
    ///
    /// Fails with what is missing: AF_KCM itself, the right to load the framing program, an end of messages
    /// ([`KcmError::NoProgram`]), or what AF_KCM cannot do ([`KcmError::Unsupported`]).
    pub fn new(options: MuxOptions) -> Result<Self, KcmError> {
        // First: where it is missing, nothing else matters.
        RawKcmSocket::new()?;
        unsupported(&options)?;
        let os = |call| move |error| KcmError::Os { call, error };
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(KcmError::os("epoll_create"))?;
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(KcmError::os("eventfd"))?;
        let data = epoll::EventData::new_u64(SIGNAL);
        epoll::add(&watched, &signal, data, epoll::EventFlags::IN).map_err(KcmError::os("epoll_ctl"))?;
        let shared = Arc::new(Shared {
            options,
            buffers: Buffers::default(),
            programs: Mutex::default(),
            members: Mutex::default(),
            table: RwLock::default(),
            events: Events::new().map_err(os("eventfd"))?,
            returned: Queue::new().map_err(os("eventfd"))?,
            reports: Queue::new().map_err(os("eventfd"))?,
            reports_wanted: AtomicUsize::new(0),
            watched,
            signal,
            busy: Mutex::default(),
            timer_thread: Mutex::default(),
            stopped: AtomicBool::new(false),
            users: AtomicUsize::new(1),
            turn: AtomicUsize::new(0),
            room: (Mutex::default(), Condvar::new()),
            counts: MuxCounts::default(),
        });
        // What connections will need is tried before there are any.
        shared.program(&shared.options.framing)?;
        let looked_after = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("ksf-kcm-timer".into()).spawn(move || timer_thread::run(&looked_after));
        *lock(&shared.timer_thread) = Some(thread.map_err(os("start the timer thread"))?);
        Ok(Self(Handle(shared)))
    }

    /// A message socket: one worker's side.
    pub fn socket(&self) -> std::io::Result<KernelSocket> {
        KernelSocket::new(self.0.clone())
    }

    /// Attaches a connected TCP socket, with the framing and limits of the multiplexor. Its SO_RCVBUF and SO_RCVTIMEO
    /// are set to what these need.
    pub fn attach(&self, socket: OwnedFd) -> Result<ConnectionId, AttachError> {
        let MuxOptions { framing, limits, .. } = &self.0.0.options;
        self.0.0.attach(socket, framing.clone(), limits.clone())
    }

    /// Takes a connection away. What the kernel has cut of it can still be received. What it has read of a message that
    /// is not whole is lost: [`Detached::lost_bytes`] says how much that is.
    pub fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        self.0.0.detach(connection)
    }

    /// Sends a message on this connection. Never waits.
    pub fn reply(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        let shared = &self.0.0;
        let conn = shared.find(connection).ok_or(SendError::Gone(connection))?;
        shared.reply(&conn, conn.limits.out_queue_bytes_max, body)
    }
}

impl Multiplexor for KernelMux {
    type Socket = KernelSocket;

    fn socket(&self) -> std::io::Result<KernelSocket> {
        self.socket()
    }

    fn attach_limited(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        limits: Limits,
    ) -> Result<ConnectionId, AttachError> {
        unkept(&limits).map_err(refused)?;
        self.0.0.attach(socket, framing, limits)
    }

    fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        self.detach(connection)
    }

    fn connections(&self) -> Vec<ConnectionId> {
        read(&self.0.0.table).all.iter().map(|conn| conn.id).collect()
    }

    fn event(&self) -> Option<Event> {
        self.0.0.events.want();
        self.0.0.events.pop()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.0.events.want();
        self.0.0.events.fd()
    }

    fn has_room(&self, connection: Option<ConnectionId>) -> bool {
        if let Some(connection) = connection {
            return self.0.0.find(connection).is_none_or(|conn| conn.outbox.bytes() < conn.answer_bytes_max());
        }
        let table = read(&self.0.0.table);
        table.all.is_empty() || table.all.iter().any(|conn| conn.outbox.bytes() < conn.limits.out_queue_bytes_max)
    }

    fn flush(&self, connection: ConnectionId) {
        if let Some(conn) = self.0.0.find(connection) {
            self.0.0.flush(&conn);
        }
    }

    fn kcm_stats(&self) -> MuxStats {
        let counts = &self.0.0.counts;
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut stats = MuxStats::default();
        let conns = self.0.0.all();
        for of in conns.iter().map(|conn| &conn.counts).chain([&counts.retired]) {
            stats.rx_messages += load(&of.rx_messages);
            stats.rx_bytes += load(&of.rx_bytes);
            stats.tx_messages += load(&of.tx_messages);
            stats.tx_bytes += load(&of.tx_bytes);
        }
        stats.tx_retries = load(&counts.tx_retries);
        stats.attach = load(&counts.attach);
        stats.unattach = load(&counts.unattach);
        counts.ends.fill(&mut stats);
        stats
    }

    fn connection_stats(&self) -> Vec<ConnectionStats> {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let of = |conn: &Arc<KernelConnection>| {
            let mut stats = ConnectionStats::of(conn.id);
            stats.rx_messages = load(&conn.counts.rx_messages);
            stats.rx_bytes = load(&conn.counts.rx_bytes);
            stats.tx_messages = load(&conn.counts.tx_messages);
            stats.tx_bytes = load(&conn.counts.tx_bytes);
            stats.waiting_messages = conn.waiting_messages.load(Ordering::SeqCst);
            let in_kernel = conn.tcp().map_or(0, |tcp| conn.intake.outstanding_bytes(tcp.as_fd()));
            stats.waiting_bytes = conn.waiting_bytes.load(Ordering::SeqCst) + in_kernel as usize;
            stats.unsent_bytes = conn.outbox.bytes();
            stats.is_ended = conn.error.get().is_some();
            stats.is_paused = conn.is_paused();
            stats
        };
        self.0.0.all().iter().map(of).collect()
    }
}

impl fmt::Debug for KernelMux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelMux").field("connections", &read(&self.0.0.table).all.len()).finish_non_exhaustive()
    }
}

/// What AF_KCM cannot do.
fn unsupported(options: &MuxOptions) -> Result<(), KcmError> {
    let refuse = |what| Err(KcmError::Unsupported { what });
    if options.ordering != ksf::Order::Free {
        return refuse("messages of a connection one at a time, in order");
    }
    if options.classify.is_some() || !options.class_caps.is_empty() {
        return refuse("classes of messages");
    }
    if options.detach_ended {
        return refuse("connections that are detached by themselves");
    }
    unkept(&options.limits)
}

/// Limits it does not keep.
fn unkept(limits: &Limits) -> Result<(), KcmError> {
    let usual = Limits::default();
    let refuse = |what| Err(KcmError::Unsupported { what });
    match limits {
        limits if limits.header_bytes_max != usual.header_bytes_max => refuse("header_bytes_max"),
        limits if limits.fragments_max != usual.fragments_max => refuse("fragments_max"),
        limits if limits.shard_bytes_max != usual.shard_bytes_max => refuse("shard_bytes_max"),
        limits if limits.assembly_bytes_max != usual.assembly_bytes_max => refuse("assembly_bytes_max"),
        _ => Ok(()),
    }
}

fn refused(error: KcmError) -> AttachError {
    let errno = error.errno().unwrap_or(libc::EINVAL);
    AttachError::Kernel { errno, text: format!("{error}; {}", error.remedy()) }
}

impl Shared {
    // --- connections ------------------------------------------------------------------------------------------------

    /// The framing program, loaded once.
    fn program(&self, framing: &MessageFraming) -> Result<Arc<KernelProgram>, KcmError> {
        let is_same = |other: &MessageFraming| match (framing, other) {
            (MessageFraming::Native(one), MessageFraming::Native(other)) => one == other,
            (MessageFraming::Program(one), MessageFraming::Program(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let mut programs = lock(&self.programs);
        if let Some((_, loaded)) = programs.iter().find(|(other, _)| is_same(other)) {
            return Ok(Arc::clone(loaded));
        }
        let loaded = Arc::new(match framing {
            MessageFraming::Native(framing) => crate::program::load(framing)?,
            MessageFraming::Program(program) => program.verify_with_kernel()?,
            _ => return Err(KcmError::Unsupported { what: "this framing" }),
        });
        // A connection holds its framing; of programs that no other part has, none comes with another one.
        programs.retain(|(other, _)| match other {
            MessageFraming::Program(program) => Arc::strong_count(program) > 1,
            _ => true,
        });
        programs.push((framing.clone(), Arc::clone(&loaded)));
        Ok(loaded)
    }

    fn attach(
        self: &Arc<Self>,
        socket: OwnedFd,
        framing: MessageFraming,
        limits: Limits,
    ) -> Result<ConnectionId, AttachError> {
        check_stream(&socket)?;
        if sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX) {
            return Err(AttachError::NotAStream { what: "a Unix socket: AF_KCM takes TCP only" });
        }
        let program = self.program(&framing).map_err(refused)?;
        let members = lock(&self.members);
        let limit = self.options.limits.connections_max;
        if read(&self.table).all.len() >= limit {
            return Err(AttachError::TooMany { limit });
        }
        let time = (limits.assembly_timeout_ms > 0).then_some(limits.assembly_timeout_ms);
        crate::tcp::bound(&socket, wire_bytes_max(&framing, &limits), time).map_err(refused)?;
        let root = RawKcmSocket::new().and_then(|root| root.set_recv_disabled(true).map(|()| root)).map_err(refused)?;
        let read_bytes = intake::read_bytes(socket.as_fd()).map_err(refused)?;
        let conn = write(&self.table)
            .insert(|id| Arc::new(KernelConnection::new(id, self, socket, (framing, limits), root, read_bytes)));
        let attached = self.start(&conn, &members.all, &program);
        if let Err(error) = attached {
            write(&self.table).remove(conn.id);
            conn.take_lanes();
            return Err(match error {
                KcmError::Os { error, .. } if error.raw_os_error() == Some(libc::EALREADY) => AttachError::Already,
                KcmError::Os { error, .. } if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    AttachError::NotAStream { what: "no connected TCP socket" }
                }
                error => refused(error),
            });
        }
        self.counts.attach.fetch_add(1, Ordering::Relaxed);
        // The timer thread may sleep without a limit, and has times to look after now.
        self.signal();
        Ok(conn.id)
    }

    /// Has the kernel cut, while all workers wait for it.
    fn start(
        &self,
        conn: &Arc<KernelConnection>,
        members: &[Arc<Member>],
        program: &KernelProgram,
    ) -> Result<(), KcmError> {
        use epoll::EventFlags as On;
        members.iter().try_for_each(|member| conn.join(member))?;
        let Some(tcp) = conn.tcp() else { return Ok(()) };
        conn.root.attach(&*tcp, program)?;
        // What happened before is reported at once.
        let data = epoll::EventData::new_u64(conn.id.to_u64());
        let watched = epoll::add(&self.watched, &*tcp, data, On::ERR | On::HUP | On::RDHUP | On::ET);
        watched.map_err(|error| {
            let _ = conn.root.unattach(&*tcp);
            KcmError::os("epoll_ctl")(error)
        })
    }

    fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        // No connection joins or leaves meanwhile.
        let _members = lock(&self.members);
        let conn = write(&self.table).remove(connection)?;
        conn.detached.store(true, Ordering::SeqCst);
        let tcp = conn.take_tcp()?;
        let _ = epoll::delete(&self.watched, &*tcp);
        // What no socket wanted comes here now; unattach drops it.
        let _ = conn.root.set_recv_disabled(false);
        let _ = conn.root.unattach(&*tcp);
        self.take_rest(&conn);
        let lost_bytes = conn.intake.lost_bytes(tcp.as_fd());
        let (for_sending, unsent) = conn.outbox.stop();
        drop(for_sending);
        self.counts.unattach.fetch_add(1, Ordering::Relaxed);
        self.counts.retired.add(&conn.counts);
        // Both sides let go of it, so this is the last holder; a duplicate would do as well.
        let socket = match Arc::try_unwrap(tcp) {
            Ok(tcp) => tcp.socket,
            Err(shared) => shared.socket.try_clone().ok()?,
        };
        Some(Detached { socket, unread: Vec::new(), unsent, lost_bytes: lost_bytes as usize })
    }

    /// Receives what the kernel has cut of a connection that is detached, for the next receiver.
    fn take_rest(&self, conn: &Arc<KernelConnection>) {
        let lanes = conn.take_lanes();
        let mut buffer = vec![0; conn.wire_bytes_max().saturating_add(1)];
        for socket in lanes.iter().map(|lane| &lane.socket).chain([&conn.root]) {
            while !conn.refused.load(Ordering::SeqCst)
                && let Ok(Some(message)) = self.take(conn, socket, &mut buffer)
            {
                self.returned.push(message);
            }
        }
        // A worker that found a message before this is about to count it.
        while conn.intake.is_active() {
            std::thread::yield_now();
        }
    }

    /// Takes a message from one of the kernel's sockets. `None`: there is none, or it was not one. An error: the socket
    /// is of no use any more.
    fn take(
        &self,
        conn: &Arc<KernelConnection>,
        socket: &RawKcmSocket,
        buffer: &mut [u8],
    ) -> Result<Option<KernelMessage>, KcmError> {
        conn.intake.enter();
        let received = socket.recv(buffer);
        if let Ok(Some(received)) = &received {
            conn.intake.took(received.bytes);
        }
        conn.intake.leave();
        let received = match received {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.refuse(conn, ConnectionError::Kernel { errno: error.errno().unwrap_or(libc::EIO) });
                return Err(error);
            }
        };
        conn.counts.rx_messages.fetch_add(1, Ordering::Relaxed);
        conn.counts.rx_bytes.fetch_add(received.bytes as u64, Ordering::Relaxed);
        let is_whole = received.is_whole && received.bytes < buffer.len();
        match conn.body(&buffer[..received.bytes], is_whole, &self.buffers) {
            Ok(body) => Ok(Some(KernelMessage::new(Arc::clone(conn), body))),
            Err(error) => {
                self.refuse(conn, error);
                Ok(None)
            }
        }
    }

    /// Reads a connection no more, because too much of it waits. True if that is over already.
    fn pause(&self, conn: &KernelConnection) -> bool {
        conn.set_paused(true);
        // The thread that made it wait no longer may have looked before that.
        if conn.must_wait() {
            return false;
        }
        conn.set_paused(false);
        true
    }

    fn resume(&self, conn: &KernelConnection) {
        if conn.is_paused() && !conn.must_wait() {
            conn.set_paused(false);
        }
    }

    fn find(&self, connection: ConnectionId) -> Option<Arc<KernelConnection>> {
        let table = read(&self.table);
        let place = table.places.get(connection.index as usize)?;
        place.conn.as_ref().filter(|conn| conn.id == connection).map(Arc::clone)
    }

    fn all(&self) -> Vec<Arc<KernelConnection>> {
        read(&self.table).all.clone()
    }

    // --- message sockets --------------------------------------------------------------------------------------------

    fn join(&self) -> std::io::Result<Arc<Member>> {
        let mut members = lock(&self.members);
        let member = Arc::new(Member::new(members.next, &self.returned)?);
        members.next += 1;
        for conn in self.all() {
            if let Err(error) = conn.join(&member) {
                self.all().iter().for_each(|conn| conn.leave(&member));
                return Err(std::io::Error::other(error));
            }
        }
        members.all.push(Arc::clone(&member));
        Ok(member)
    }

    fn leave(&self, member: &Member) {
        let mut members = lock(&self.members);
        members.all.retain(|other| other.number != member.number);
        self.all().iter().for_each(|conn| conn.leave(member));
    }

    fn set_receiving(&self, member: &Member, receiving: bool) {
        let _members = lock(&self.members);
        if member.change_receiving(receiving, &self.returned) {
            for lane in self.all().iter().filter_map(|conn| conn.lane(member)) {
                // It fails for no socket that is one.
                let _: Result<(), KcmError> = Lane::set_receiving(&lane, receiving);
            }
        }
    }

    // --- sending ----------------------------------------------------------------------------------------------------

    /// Queues a message, unless `bytes_max` bytes wait for the connection already.
    fn reply(&self, conn: &Arc<KernelConnection>, bytes_max: usize, body: &[u8]) -> Result<(), SendError> {
        let gone = || SendError::Gone(conn.id);
        if conn.detached.load(Ordering::SeqCst) {
            return Err(gone());
        }
        let pushed = conn.outbox.push(&conn.framing, bytes_max, |tail| tail.extend_from_slice(body));
        match pushed.map_err(SendError::Unframable)? {
            Pushed::Queued => {}
            Pushed::Full => return Err(SendError::WouldBlock),
            Pushed::Ended => return Err(gone()),
        }
        conn.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
        self.flush(conn);
        Ok(())
    }

    fn send_to_any(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        let deadline = options.wait.map(|wait| Instant::now() + wait);
        loop {
            if let Some(conn) = self.choose(&options)? {
                let limit = if options.is_answer() { conn.answer_bytes_max() } else { conn.limits.out_queue_bytes_max };
                let pushed = match options.to {
                    Some(_) => conn.outbox.push(&conn.framing, limit, |tail| tail.extend_from_slice(body)),
                    None => conn.outbox.push_movable(&conn.framing, limit, body, options.repeatable),
                };
                match pushed.map_err(SendError::Unframable)? {
                    Pushed::Queued => {}
                    Pushed::Ended if options.to.is_some() => return Err(SendError::Gone(conn.id)),
                    // It ended since it was chosen, or others were quicker.
                    Pushed::Ended | Pushed::Full => continue,
                }
                conn.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
                match options.batch {
                    Some(wait) => self.batched(&conn, wait),
                    None => self.flush(&conn),
                }
                return Ok(conn.id);
            }
            let Some((deadline, wait)) = deadline.zip(options.wait) else { return Err(SendError::WouldBlock) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SendError::TimedOut(wait));
            }
            // Told late of what became free before this, it looks again soon.
            const LOOK_EVERY: Duration = Duration::from_millis(10);
            let (lock_of, changed) = &self.room;
            drop(changed.wait_timeout(lock(lock_of), left.min(LOOK_EVERY)));
        }
    }

    /// The connection the next message goes to. `None`: all that it may go to have too much queued.
    fn choose(&self, options: &SendOptions) -> Result<Option<Arc<KernelConnection>>, SendError> {
        let has_room = |conn: &Arc<KernelConnection>| conn.outbox.bytes() < conn.limits.out_queue_bytes_max;
        if let Some(only) = options.to {
            let conn = self.find(only).ok_or(SendError::Gone(only))?;
            let limit = if options.is_answer() { conn.answer_bytes_max() } else { conn.limits.out_queue_bytes_max };
            return Ok((conn.outbox.bytes() < limit).then_some(conn));
        }
        let takes = |conn: &Arc<KernelConnection>| conn.error.get().is_none() && has_room(conn);
        if let Some(conn) = options.prefer.and_then(|id| self.find(id)).filter(takes) {
            return Ok(Some(conn));
        }
        let table = read(&self.table);
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let turn = |at| table.all.get(first.wrapping_add(at) % table.all.len().max(1));
        let chosen = (0..table.all.len()).filter_map(turn).find(|conn| takes(conn)).cloned();
        let is_none_alive = || table.all.iter().all(|conn| conn.error.get().is_some());
        if chosen.is_none() && is_none_alive() { Err(SendError::NotConnected) } else { Ok(chosen) }
    }

    fn batched(&self, conn: &Arc<KernelConnection>, wait: Duration) {
        // Sent before there is too much of it: a connection that is full takes no message that would push it.
        if wait.is_zero() || conn.outbox.bytes() >= conn.limits.out_queue_bytes_max / 2 {
            return self.flush(conn);
        }
        let mut until = lock(&conn.batch_until);
        if until.is_none() {
            *until = Instant::now().checked_add(wait);
            drop(until);
            self.look_after(conn);
        }
    }

    /// Sends what TCP takes.
    fn flush(&self, conn: &Arc<KernelConnection>) {
        *lock(&conn.batch_until) = None;
        match conn.outbox.send() {
            Sent::Elsewhere => {}
            Sent::All(bytes) => self.sent(conn, bytes),
            Sent::Blocked(bytes) => {
                self.sent(conn, bytes);
                self.look_after(conn);
            }
            Sent::Failed(errno) => self.end(conn, ConnectionError::Socket { errno }),
        }
        if let Some(errno) = conn.tcp().and_then(|tcp| Tcp::take_report(&tcp)) {
            self.note(conn, epoll::EventFlags::empty(), Some(errno));
        }
        self.resume(conn);
    }

    fn sent(&self, conn: &KernelConnection, bytes: usize) {
        if bytes > 0 {
            conn.counts.tx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            self.room.1.notify_all();
        }
    }

    /// The last user is gone.
    fn close(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.signal();
        // It has no handle, so it is not the one that calls.
        let thread = lock(&self.timer_thread).take();
        let _ = thread.map(std::thread::JoinHandle::join);
        for conn in self.all() {
            drop(self.detach(conn.id));
        }
        self.returned.clear();
    }
}

impl Table {
    fn insert(&mut self, make: impl FnOnce(ConnectionId) -> Arc<KernelConnection>) -> Arc<KernelConnection> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        let conn = make(ConnectionId { index, generation: place.generation });
        place.conn = Some(Arc::clone(&conn));
        self.all.push(Arc::clone(&conn));
        conn
    }

    fn remove(&mut self, id: ConnectionId) -> Option<Arc<KernelConnection>> {
        let place = self.places.get_mut(id.index as usize)?;
        let conn = place.conn.take_if(|conn| conn.id == id)?;
        // Names that mean something else are not given out, nor is any twice within four billion connections of one
        // place.
        place.generation = (place.generation + 1) % (u32::MAX - 1);
        self.free.push(id.index);
        self.all.retain(|other| !Arc::ptr_eq(other, &conn));
        Some(conn)
    }
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
