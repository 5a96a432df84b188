//! Sockets, and the connections attached to them.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ksf::Order;
use ksf::limits::Limits;
use ksf_bpf_framing::FramingProgram;
use rustix::net::sockopt::{self, Timeout};

use super::error::{KcmSocketError, NotAttached, OpenError};
use super::receive::Receiving;
use super::send::Sending;
use super::stats::SocketCounts;
use crate::error::AttachError;
use crate::monitor::Event;
use crate::mux::{ConnectionId, Detached, Mux};
use crate::options::MessageFraming;
use crate::reply_order::Unanswered;
use crate::socket::MessageSocket;
use crate::sync::{Arc, Mutex};
use crate::timer_thread::MuxTimer;

/// The type of a message socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `SOCK_DGRAM`: a message ends with its call, unless `MSG_MORE` is set; of one that does not fit the buffer the
    /// rest is dropped.
    Dgram,
    /// `SOCK_SEQPACKET`: a message ends with `MSG_EOR`; one that does not fit the buffer goes on with the next call.
    Seqpacket,
}

impl Kind {
    /// From the arguments of `socket(AF_KCM, ...)`; flags of the type (SOCK_NONBLOCK, SOCK_CLOEXEC) are ignored.
    pub fn from_raw(socket_type: i32, protocol: i32) -> Result<Self, OpenError> {
        // SOCK_TYPE_MASK of include/linux/net.h.
        let kind = match socket_type & 0xf {
            2 => Self::Dgram,
            5 => Self::Seqpacket,
            other => return Err(OpenError::Type(other)),
        };
        if protocol == 0 { Ok(kind) } else { Err(OpenError::Protocol(protocol)) }
    }

    /// The number of the type, for `SO_TYPE`.
    pub const fn raw(self) -> i32 {
        match self {
            Self::Dgram => 2,
            Self::Seqpacket => 5,
        }
    }
}

/// Which connection a message goes to that names none. `docs/kcm.md` has the rule ("Which connection a message goes to").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// That of the message which the thread received last; in turn where nothing was received. For servers.
    #[default]
    Answer,
    /// The next one that takes messages. For clients whose connections all lead to the same server.
    InTurn,
}

impl Routing {
    /// The environment variable by which `ksf kcm-run` tells the library that it preloads.
    pub const VARIABLE: &str = "KSF_KCM_SEND";

    /// Its name, as `ksf kcm-run --send` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Answer => "answer",
            Self::InTurn => "in-turn",
        }
    }
}

/// Set once, when the first socket of a multiplexor is made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KcmOptions {
    /// Longest time a message sent with `MSG_BATCH` waits for one without, in milliseconds. AF_KCM has no such limit.
    pub batch_timeout_ms: u64,
    /// Which connection a message goes to that names none.
    pub routing: Routing,
    /// Bounds of the multiplexor, and of connections where [`AttachOptions`] and the connection say nothing.
    pub limits: Limits,
}

impl Default for KcmOptions {
    fn default() -> Self {
        Self { batch_timeout_ms: 1, routing: Routing::default(), limits: Limits::default() }
    }
}

/// Bounds of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttachOptions {
    /// Longest message. `None`: SO_RCVBUF of the connection, as it is when it is attached.
    pub message_bytes_max: Option<usize>,
    /// Time from the first byte of a message to its last. `None`: SO_RCVTIMEO of the connection, or where that is not
    /// set, the multiplexor's limit.
    pub assembly_timeout_ms: Option<u64>,
}

/// A message socket with the contract of AF_KCM. A thread has one of its own: where several threads receive from one,
/// a message that one of them left unfinished is not announced to those that wait already.
pub struct KcmSocket {
    pub(super) group: Arc<Group>,
    pub(super) socket: MessageSocket,
    pub(super) receiving: Mutex<Receiving>,
    /// Wakes the threads that wait for a disabled socket.
    pub(super) enabled: Condvar,
    pub(super) sending: Mutex<Sending>,
    /// Wakes the threads that wait for the end of a message in pieces.
    pub(super) ended: Condvar,
    timeouts: Mutex<Timeouts>,
    pub(super) counts: Arc<SocketCounts>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Timeouts {
    receive: Option<Duration>,
    send: Option<Duration>,
}

/// What the sockets of a multiplexor share.
pub(super) struct Group {
    pub(super) mux: Mux,
    kind: Kind,
    pub(super) options: KcmOptions,
    /// Attached connections by the cookie of their socket.
    attached: Mutex<HashMap<u64, ConnectionId>>,
    pub(super) sockets: Mutex<Vec<Weak<SocketCounts>>>,
    pub(super) unattach_reserved: AtomicU64,
    /// Batches of messages that ended, and all that began, of sockets that are gone.
    pub(super) reserved: AtomicU64,
    pub(super) unreserved: AtomicU64,
}

impl KcmSocket {
    /// The first socket of a new multiplexor.
    pub fn new(kind: Kind, options: KcmOptions) -> std::io::Result<Self> {
        let mux = Mux::new(Self::mux_options(&options))?;
        Self::first(mux, kind, options)
    }

    /// The same, with the time limits of the multiplexor, for a thread of the caller's to keep. Starts no thread. The end
    /// of the last socket waits until that thread has dropped them.
    pub fn without_thread(kind: Kind, options: KcmOptions) -> std::io::Result<(Self, MuxTimer)> {
        let (mux, timer) = Mux::without_thread(Self::mux_options(&options))?;
        // Where this fails, the time limits are dropped before the last handle of the multiplexor, which waits for that.
        let socket = Self::first(mux.clone(), kind, options)?;
        Ok((socket, timer))
    }

    fn mux_options(options: &KcmOptions) -> crate::MuxOptions {
        // Every connection brings its own program; this one is never asked.
        let never = ksf::framing::Framing::LengthPrefix(ksf::framing::LengthPrefix::big_endian(4));
        let mut mux = crate::MuxOptions::new(never);
        mux.limits = options.limits.clone();
        mux
    }

    fn first(mux: Mux, kind: Kind, options: KcmOptions) -> std::io::Result<Self> {
        // AF_KCM keeps errors of connections until the program asks; here they are events, kept from now on.
        let _ = mux.event_fd();
        Self::with_group(Arc::new(Group {
            mux,
            kind,
            options,
            attached: Mutex::default(),
            sockets: Mutex::default(),
            unattach_reserved: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            unreserved: AtomicU64::new(0),
        }))
    }

    fn with_group(group: Arc<Group>) -> std::io::Result<Self> {
        let socket = group.mux.socket()?;
        // A socket that may be polled takes one message at a time, so that the others stay free for all workers.
        socket.poll_fd()?;
        let mut sockets = lock(&group.sockets);
        sockets.retain(|counts| counts.strong_count() > 0);
        let index = (0..).find(|index| sockets.iter().filter_map(Weak::upgrade).all(|counts| counts.index != *index));
        let counts = Arc::new(SocketCounts::new(index.unwrap_or(u32::MAX)));
        sockets.push(Arc::downgrade(&counts));
        drop(sockets);
        Ok(Self {
            socket,
            receiving: Mutex::default(),
            enabled: Condvar::new(),
            sending: Mutex::default(),
            ended: Condvar::new(),
            timeouts: Mutex::default(),
            counts,
            group,
        })
    }

    /// `SIOCKCMCLONE`: another socket of the same type on the same multiplexor.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        Self::with_group(Arc::clone(&self.group))
    }

    /// The type.
    pub fn kind(&self) -> Kind {
        self.group.kind
    }

    /// `SIOCKCMATTACH`: attaches a connection, with the program that cuts it. A duplicate of the descriptor is enough;
    /// a program that keeps another one must not read from it.
    pub fn attach(
        &self,
        socket: OwnedFd,
        program: std::sync::Arc<FramingProgram>,
        options: AttachOptions,
    ) -> Result<ConnectionId, AttachError> {
        let mut limits = self.group.options.limits.clone();
        let receive_buffer = sockopt::socket_recv_buffer_size(&socket).unwrap_or(limits.message_bytes_max);
        limits.message_bytes_max = options.message_bytes_max.unwrap_or(receive_buffer);
        let set_ms = sockopt::socket_timeout(&socket, Timeout::Recv).ok().flatten().map(|timeout| {
            // Rounded up: no time is no limit.
            u64::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
        });
        limits.assembly_timeout_ms = options.assembly_timeout_ms.or(set_ms).unwrap_or(limits.assembly_timeout_ms);
        let cookie = sockopt::socket_cookie(&socket).ok();
        let framing = MessageFraming::Program(program);
        let mut attached = lock(&self.group.attached);
        let connection = self.group.mux.shared().attach_limited(socket, framing, Order::Free, None, Some(limits))?;
        attached.extend(cookie.map(|cookie| (cookie, connection)));
        Ok(connection)
    }

    /// `SIOCKCMUNATTACH`: takes a connection away, with the bytes of it that belong to no whole message. Messages of
    /// it that are whole can still be received.
    pub fn unattach(&self, connection: ConnectionId) -> Result<Detached, NotAttached> {
        let group = &self.group;
        let is_reserved = |counts: Weak<SocketCounts>| {
            counts.upgrade().is_some_and(|counts| counts.batch.load(Ordering::SeqCst) == connection.to_u64())
        };
        let reserved = lock(&group.sockets).iter().cloned().any(is_reserved);
        let mut attached = lock(&group.attached);
        let detached = group.mux.detach(connection).ok_or(NotAttached)?;
        attached.retain(|_, other| *other != connection);
        if reserved {
            group.unattach_reserved.fetch_add(1, Ordering::Relaxed);
        }
        Ok(detached)
    }

    /// The connection that a descriptor of its socket belongs to, if it is attached to this multiplexor.
    pub fn connection_of(&self, socket: impl AsFd) -> Option<ConnectionId> {
        let cookie = sockopt::socket_cookie(socket).ok()?;
        lock(&self.group.attached).get(&cookie).copied()
    }

    /// The multiplexor, for its events and connections.
    pub fn mux(&self) -> &Mux {
        &self.group.mux
    }

    /// `KCM_RECV_DISABLE`, the other way round: whether this socket receives. When it stops, what it holds untouched
    /// goes to others; the rest of a message it has begun stays.
    pub fn set_receiving(&self, receiving: bool) {
        let mut received = lock(&self.receiving);
        self.socket.set_receiving(receiving);
        if !receiving {
            let (begun, untouched) = received.held.drain(..).partition(|held| held.at > 0);
            received.held = begun;
            // The youngest first, each in front of the younger ones.
            for held in VecDeque::into_iter(untouched).rev() {
                self.socket.give_back(held.message);
            }
        }
        drop(received);
        self.enabled.notify_all();
    }

    /// Whether it receives.
    pub fn is_receiving(&self) -> bool {
        self.socket.is_receiving()
    }

    /// `SO_RCVTIMEO`: the longest time a receiving call waits.
    pub fn set_receive_timeout(&self, timeout: Option<Duration>) {
        lock(&self.timeouts).receive = timeout;
    }

    /// Its value.
    pub fn receive_timeout(&self) -> Option<Duration> {
        lock(&self.timeouts).receive
    }

    /// `SO_SNDTIMEO`: the longest time a sending call waits.
    pub fn set_send_timeout(&self, timeout: Option<Duration>) {
        lock(&self.timeouts).send = timeout;
    }

    /// Its value.
    pub fn send_timeout(&self) -> Option<Duration> {
        lock(&self.timeouts).send
    }

    /// From now on receiving calls return the end of a connection as an error, after its last message.
    pub fn report_errors(&self) {
        self.socket.report_ends();
    }

    /// The next event of a connection: its error, above all.
    pub fn event(&self) -> Option<Event> {
        self.group.mux.event()
    }

    /// Readable while a receiving call may have something; see [`MessageSocket::poll_fd`](crate::MessageSocket::poll_fd).
    pub fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.socket.poll_fd()
    }

    /// Reads connections that have bytes, so that their errors are found, without receiving a message.
    pub fn look(&self) -> std::io::Result<()> {
        self.socket.look()
    }

    /// True if a receiving call will find a message. That message is kept for this socket.
    pub fn is_readable(&self) -> Result<bool, KcmSocketError> {
        match self.front(super::receive::Wait::Not) {
            Ok(_) => {
                self.socket.announce();
                Ok(true)
            }
            Err(KcmSocketError::WouldBlock) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// True if a sending call of this thread need not wait, or fails at once.
    pub fn is_writable(&self) -> bool {
        let begun = lock(&self.sending).recipient();
        let recipient = begun.or_else(|| self.unanswered().map(|message| message.connection));
        self.group.mux.has_room(recipient)
    }

    /// The message that the next one answers, of this thread. `None`: what is sent goes in turn.
    pub(super) fn unanswered(&self) -> Option<Unanswered> {
        match self.group.options.routing {
            Routing::Answer => lock(&self.receiving).order.next(),
            Routing::InTurn => None,
        }
    }
}

impl Drop for KcmSocket {
    fn drop(&mut self) {
        // What was not begun goes to others; the rest of a message that was begun goes with this socket.
        for held in lock(&self.receiving).held.drain(..).rev().filter(|held| held.at == 0) {
            self.socket.give_back(held.message);
        }
        self.flush();
        self.group.reserved.fetch_add(self.counts.reserved.load(Ordering::Relaxed), Ordering::Relaxed);
        self.group.unreserved.fetch_add(self.counts.reserved.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl fmt::Debug for KcmSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KcmSocket")
            .field("kind", &self.kind())
            .field("index", &self.counts.index)
            .finish_non_exhaustive()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
