//! The io_uring engine: one ring per shard.
//!
//! Multishot accept and receive, so one request serves a socket for as long as it lives (Linux 5.19, 6.0); receive
//! buffers come from a provided-buffer ring whose entries are slots of the pool (5.19); one completion per buffer,
//! because bundles and incremental buffers were delivered out of order by some 6.x kernels (liburing issues 1409 and
//! 1432); one send in flight per connection, because several at once reorder (measured). Completions run when the
//! shard waits (DEFER_TASKRUN, 6.1), not in the middle of its work.
//!
//! A turn is one system call to wait, and one per batch to send: sends are first tried without the ring, and only
//! what TCP does not take waits in the kernel.
//!
//! ```text
//!   pool ──take──► buffer ring ──kernel fills──► completion(connection, entry, length) ──► Chunk ──► shard
//!     ▲                 ▲                                                                    │
//!     └── last drop ────┼──────────────────────── another slot takes the entry's place ◄─────┘
//! ```

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;
use std::{io, mem, ptr};

use io_uring::types::{Fd, RecvMsgOut, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::buffer_ring::{BUFFER_GROUP, BUFFERS, BufferRing};
use super::epoll::set_nonblocking;
use super::msg::{
    CONTROL_BYTES, SLICES_MAX, SendMsg, read_pktinfo, send_datagram_now, send_now, sockaddr, socket_addr,
};
use super::{Engine, Event, Reading, Wait, pause};
use crate::env::Env;
use crate::error::Error;
use crate::listener::DatagramPeer;
use crate::output::SendBatch;
use crate::pool::{Memory, Pool};
use crate::service::ConnKey;

/// Requests per submission; more than that are submitted in several calls.
const SUBMISSIONS: u32 = 256;
/// Completions that fit before the kernel has to set them aside.
const COMPLETIONS: u32 = 4096;
/// How long dropping the engine waits for the kernel to end its requests, per look and in looks.
const DROP_WAIT: Duration = Duration::from_millis(10);
const DROP_WAITS_MAX: u32 = 200;
/// When no slot is free, look again after this time: their holders tell nobody.
const STARVED: Duration = Duration::from_micros(500);

pub(crate) struct Uring {
    /// Dropped first: the kernel then ends all requests and no longer touches what the fields below own.
    ring: IoUring,
    buffers: BufferRing,
    conns: Vec<Conn>,
    listeners: Vec<Listener>,
    sockets: Vec<DatagramSocket>,
    datagrams: Vec<Option<DatagramSend>>,
    free_datagrams: Vec<u32>,
    /// Send headers to use again; boxed, because they move between here and sends that the kernel reads.
    #[expect(clippy::vec_box, reason = "the address must hold")]
    spare_msgs: Vec<Box<SendMsg>>,
    /// Requests that did not fit the submission queue yet.
    backlog: VecDeque<squeue::Entry>,
    /// Receives that ended and shall be started again at the next wait.
    rearm: Vec<Op>,
    /// Events that need no completion.
    ready: Vec<Event>,
    watches: Vec<RawFd>,
    /// Requests whose last completion has not been seen: the kernel may use what they point to.
    under_way: usize,
    /// The kernel lets completions gather (6.12). Older ones refuse the argument.
    min_wait: bool,
    /// For sends without the ring.
    msg: Box<SendMsg>,
}

/// One connection, as far as the engine is concerned.
#[derive(Default)]
struct Conn {
    key: Option<ConnKey>,
    socket: RawFd,
    recv: Recv,
    /// A poll for the end of the stream is armed.
    hangup: Recv,
    wanted: Reading,
    /// The address of a connect that is under way; boxed, because the kernel reads it.
    connect: Option<Box<libc::sockaddr_storage>>,
    send: Option<Send>,
    releasing: bool,
}

/// State of a request that stays armed.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Recv {
    #[default]
    Off,
    Armed,
    Cancelling,
}

struct Send {
    batch: SendBatch,
    /// Owned here because the kernel reads it until the completion.
    msg: Option<Box<SendMsg>>,
    cancelling: bool,
}

struct Listener {
    socket: RawFd,
    armed: bool,
    wanted: bool,
}

struct DatagramSocket {
    fd: RawFd,
    /// Read by the kernel while the receive is armed; boxed so that its address holds.
    header: Box<libc::msghdr>,
}

struct DatagramSend {
    batch: SendBatch,
    msg: Box<SendMsg>,
}

/// What a completion is about: kind in the top byte of `user_data`, index below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Accept(u32),
    Cancel,
    Connect(u32),
    Datagram(u32),
    Hangup(u32),
    Recv(u32),
    Send(u32),
    SendDatagram(u32),
    Watch(u32),
}

impl Op {
    fn user_data(self) -> u64 {
        let (kind, index) = match self {
            Self::Accept(index) => (1u64, index),
            Self::Cancel => (2, 0),
            Self::Datagram(index) => (3, index),
            Self::Hangup(index) => (4, index),
            Self::Recv(index) => (5, index),
            Self::Send(index) => (6, index),
            Self::SendDatagram(index) => (7, index),
            Self::Watch(index) => (8, index),
            Self::Connect(index) => (9, index),
        };
        kind << 56 | u64::from(index)
    }

    fn from_user_data(data: u64) -> Option<Self> {
        let index = data as u32;
        Some(match data >> 56 {
            1 => Self::Accept(index),
            2 => Self::Cancel,
            3 => Self::Datagram(index),
            4 => Self::Hangup(index),
            5 => Self::Recv(index),
            6 => Self::Send(index),
            7 => Self::SendDatagram(index),
            8 => Self::Watch(index),
            9 => Self::Connect(index),
            _ => return None,
        })
    }
}

/// Tries to set up a ring with everything the engine needs.
pub(crate) fn probe() -> Result<(), Error> {
    let ring = build_ring()?;
    let mut pool = Pool::new(Memory::Anonymous, 4096, u32::from(BUFFERS) * 2)?;
    BufferRing::register(&ring, &mut pool).map(|_| ())
}

pub(super) fn failed(step: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Engine { engine: "uring", step, source }
}

/// Time is up; a signal; or completions must be reaped, or memory found, first: the next wait goes on.
fn tolerate(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// The best ring this kernel gives: deferred completions need 6.1, no submission array 6.6.
fn build_ring() -> Result<IoUring, Error> {
    let mut result = Err(io::Error::from_raw_os_error(libc::EINVAL));
    for tier in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp().setup_submit_all();
        if tier < 2 {
            builder.setup_single_issuer().setup_defer_taskrun();
        } else {
            builder.setup_coop_taskrun();
        }
        if tier == 0 {
            builder.setup_no_sqarray();
        }
        result = builder.build(SUBMISSIONS);
        if !matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            break;
        }
    }
    result.map_err(failed("io_uring_setup"))
}

impl Engine for Uring {
    fn new(env: &mut Env) -> Result<Self, Error> {
        let ring = build_ring()?;
        // Saves a descriptor look-up per system call (5.18); without it all works the same.
        let _ = ring.submitter().register_ring_fd();
        let buffers = BufferRing::register(&ring, &mut env.pool)?;
        let min_wait = ring.params().is_feature_min_timeout();
        Ok(Self {
            ring,
            buffers,
            conns: Vec::new(),
            listeners: Vec::new(),
            sockets: Vec::new(),
            datagrams: Vec::new(),
            free_datagrams: Vec::new(),
            spare_msgs: Vec::new(),
            backlog: VecDeque::new(),
            rearm: Vec::new(),
            ready: Vec::new(),
            watches: Vec::new(),
            under_way: 0,
            min_wait,
            msg: SendMsg::boxed(),
        })
    }

    fn watch(&mut self, watch: u32, fd: RawFd) -> Result<(), Error> {
        let at = watch as usize;
        if at >= self.watches.len() {
            self.watches.resize(at + 1, -1);
        }
        self.watches[at] = fd;
        self.arm_watch(watch);
        Ok(())
    }

    fn listen(&mut self, listener: u32, socket: RawFd) {
        let at = listener as usize;
        if at >= self.listeners.len() {
            self.listeners.resize_with(at + 1, || Listener { socket: -1, armed: false, wanted: false });
        }
        self.listeners[at].socket = socket;
        self.listeners[at].wanted = true;
        // An inherited socket, or one that was accepted from directly, may be in non-blocking mode. Linux 6.18 waits all
        // the same; for a kernel that fails the accept instead, which is then tried anew at ticks, the mode is changed.
        let _ = set_nonblocking(socket, false);
        self.arm_accept(listener);
    }

    fn unlisten(&mut self, listener: u32) {
        if let Some(state) = self.listeners.get_mut(listener as usize) {
            state.wanted = false;
            if state.armed {
                self.cancel(Op::Accept(listener));
            }
        }
    }

    fn listen_datagrams(&mut self, socket: u32, fd: RawFd) -> io::Result<()> {
        // SAFETY: all fields are plain data for which zero is a valid value.
        let mut header: Box<libc::msghdr> = unsafe { Box::new(mem::zeroed()) };
        header.msg_namelen = mem::size_of::<libc::sockaddr_in6>() as libc::socklen_t;
        header.msg_controllen = CONTROL_BYTES;
        let at = socket as usize;
        while self.sockets.len() <= at {
            // SAFETY: as above.
            let header = unsafe { Box::new(mem::zeroed()) };
            self.sockets.push(DatagramSocket { fd: -1, header });
        }
        self.sockets[at] = DatagramSocket { fd, header };
        self.arm_datagram(socket);
        Ok(())
    }

    fn open(&mut self, conn: ConnKey, socket: RawFd, reading: Reading) {
        let at = conn.index as usize;
        if at >= self.conns.len() {
            self.conns.resize_with(at + 1, Conn::default);
        }
        debug_assert!(self.conns[at].key.is_none(), "a place is reused only after Released");
        self.conns[at] = Conn { key: Some(conn), socket, wanted: reading, ..Conn::default() };
        self.arm_recv(conn.index);
    }

    fn connect(&mut self, conn: ConnKey, to: SocketAddr) {
        let Some(state) = self.conn(conn) else { return };
        let (addr, len) = sockaddr(to);
        let addr = state.connect.insert(Box::new(addr));
        let entry = opcode::Connect::new(Fd(state.socket), ptr::from_ref(&**addr).cast(), len).build();
        self.push(entry.user_data(Op::Connect(conn.index).user_data()));
    }

    fn set_reading(&mut self, conn: ConnKey, reading: Reading) {
        let Some(state) = self.conn(conn) else { return };
        state.wanted = reading;
        let stop_recv = reading != Reading::On && state.recv == Recv::Armed;
        if stop_recv {
            state.recv = Recv::Cancelling;
        }
        let stop_hangup = reading != Reading::Parked && state.hangup == Recv::Armed;
        if stop_hangup {
            state.hangup = Recv::Cancelling;
        }
        if stop_recv {
            self.cancel(Op::Recv(conn.index));
        }
        if stop_hangup {
            self.cancel(Op::Hangup(conn.index));
        }
        self.arm_recv(conn.index);
    }

    fn send(&mut self, conn: ConnKey, mut batch: SendBatch, last: bool, env: &mut Env) -> (usize, bool) {
        let Some(state) = self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn)) else {
            return (0, false);
        };
        debug_assert!(state.send.is_none(), "one send in flight per connection");
        match send_now(state.socket, &mut batch, last, &mut self.msg, env) {
            Ok(bytes) if batch.is_empty() => {
                batch.recycle(&mut env.spares);
                (bytes, true)
            }
            Ok(bytes) => {
                state.send = Some(Send { batch, msg: None, cancelling: false });
                self.submit_send(conn.index);
                (bytes, false)
            }
            Err(_) => {
                self.ready.push(Event::Failed { conn });
                (0, false)
            }
        }
    }

    fn send_datagram(&mut self, socket: u32, peer: DatagramPeer, batch: SendBatch, env: &mut Env) {
        let fd = self.sockets[socket as usize].fd;
        let counter = match send_datagram_now(fd, &peer, &batch, &mut self.msg, env) {
            Ok(true) => &env.stats.datagrams_out,
            Ok(false) => match self.submit_datagram(fd, &peer, batch, env.limits.datagram_queue_max) {
                Ok(()) => return,
                Err(back) => {
                    env.stats.datagrams_unsent.add(1);
                    return back.recycle(&mut env.spares);
                }
            },
            Err(_) => &env.stats.datagrams_unsent,
        };
        counter.add(1);
        batch.recycle(&mut env.spares);
    }

    fn release(&mut self, conn: ConnKey) -> bool {
        let Some(state) = self.conn(conn) else { return false };
        state.releasing = true;
        let cancel_send = state.send.as_mut().is_some_and(|send| !mem::replace(&mut send.cancelling, true));
        let cancel_connect = state.connect.is_some();
        self.set_reading(conn, Reading::Off);
        if cancel_connect {
            self.cancel(Op::Connect(conn.index));
        }
        if cancel_send {
            self.cancel(Op::Send(conn.index));
        }
        self.released(conn.index).is_some()
    }

    fn shutdown(&mut self) {
        if self.under_way == 0 {
            return;
        }
        // Closing a ring ends its requests later, from a work queue: until then sockets stay open (a new server would
        // find the port busy) and memory may be used. So they are ended here, and waited for.
        self.push(opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(Op::Cancel.user_data()));
        for _ in 0..DROP_WAITS_MAX {
            self.flush_backlog();
            let patience = Timespec::from(DROP_WAIT);
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&patience));
            for entry in self.ring.completion() {
                self.under_way -= usize::from(!cqueue::more(entry.flags()));
                if matches!(Op::from_user_data(entry.user_data()), Some(Op::Accept(_))) && entry.result() >= 0 {
                    // SAFETY: the kernel made this descriptor for the accept request and told nobody else of it.
                    drop(unsafe { OwnedFd::from_raw_fd(entry.result()) });
                }
            }
            if self.under_way == 0 {
                return;
            }
        }
        // The kernel does not let go: leak what it may still use rather than free it.
        mem::forget(mem::take(&mut self.conns));
        mem::forget(mem::take(&mut self.sockets));
        mem::forget(mem::take(&mut self.datagrams));
        self.buffers.leak_slots();
        self.under_way = 0;
    }

    fn wait(&mut self, env: &mut Env, wait: Wait, events: &mut Vec<Event>) -> io::Result<()> {
        self.buffers.refill(&mut env.pool);
        self.rearm_all();
        let mut timeout = wait.timeout;
        if self.buffers.is_starved() {
            timeout = Some(timeout.map_or(STARVED, |timeout| timeout.min(STARVED)));
        }
        let nothing_ready = self.ready.is_empty() && self.ring.completion().is_empty();
        let want = usize::from(nothing_ready);
        self.enter(env, want, timeout, wait.gather)?;
        events.append(&mut self.ready);
        self.reap(env, events);
        Ok(())
    }
}

impl Uring {
    fn conn(&mut self, conn: ConnKey) -> Option<&mut Conn> {
        self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn))
    }

    /// Submits what was pushed and waits for `want` completions. With `gather`, more may come until that time is
    /// over, and the shard sleeps through all of them (min-wait, 6.12; before that it just sleeps first).
    fn enter(&mut self, env: &Env, want: usize, timeout: Option<Duration>, gather: Option<Duration>) -> io::Result<()> {
        while !self.backlog.is_empty() {
            self.flush_backlog();
            if !self.backlog.is_empty() {
                env.stats.syscalls.add(1);
                tolerate(self.ring.submit())?;
                if !self.ring.completion().is_empty() {
                    // Room for completions comes first; the rest of the requests goes with the next wait.
                    return Ok(());
                }
            }
        }
        env.stats.syscalls.add(1);
        let mut args = SubmitArgs::new();
        let timespec;
        let result = if want == 0 {
            self.ring.submit()
        } else {
            let mut want = want;
            if let Some(gather) = gather.filter(|_| !self.min_wait) {
                pause(gather, env);
            }
            if let Some(gather) = gather.filter(|_| self.min_wait) {
                // Returns with however many there are when the time is over, or earlier with this many.
                args = args.min_wait_usec(gather.as_micros().min(10_000) as u32);
                want = COMPLETIONS as usize / 4;
            }
            if let Some(timeout) = timeout {
                timespec = Timespec::from(timeout);
                args = args.timespec(&timespec);
            }
            self.ring.submitter().submit_with_args(want, &args)
        };
        tolerate(result)
    }

    fn reap(&mut self, env: &mut Env, events: &mut Vec<Event>) {
        // Completions are copied out in small groups: handling one may push requests, which borrows the ring.
        let mut group: [cqueue::Entry; 64] = std::array::from_fn(|_| EMPTY.clone());
        loop {
            let mut taken = 0;
            {
                let mut completions = self.ring.completion();
                while taken < group.len() {
                    let Some(entry) = completions.next() else { break };
                    group[taken] = entry;
                    taken += 1;
                }
            }
            for entry in &group[..taken] {
                self.complete(entry, env, events);
            }
            if taken < group.len() {
                return;
            }
        }
    }

    fn complete(&mut self, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        self.under_way -= usize::from(!cqueue::more(entry.flags()));
        match Op::from_user_data(entry.user_data()) {
            Some(Op::Accept(listener)) => self.accepted(listener, entry, events),
            Some(Op::Connect(index)) => self.connected(index, entry, events),
            Some(Op::Datagram(socket)) => self.received_datagram(socket, entry, env, events),
            Some(Op::Hangup(index)) => self.hung_up(index, entry, events),
            Some(Op::Recv(index)) => self.received(index, entry, env, events),
            Some(Op::Send(index)) => self.sent(index, entry, env, events),
            Some(Op::SendDatagram(index)) => self.sent_datagram(index, entry, env),
            Some(Op::Watch(watch)) => {
                events.push(Event::Watched { watch });
                if !cqueue::more(entry.flags()) {
                    self.rearm.push(Op::Watch(watch));
                }
            }
            Some(Op::Cancel) | None => {}
        }
    }

    fn connected(&mut self, index: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        state.connect = None;
        let Some(conn) = state.key else { return };
        if !state.releasing {
            let error = (entry.result() < 0).then(|| io::Error::from_raw_os_error(-entry.result()));
            events.push(Event::Connected { conn, error });
        }
        events.extend(self.released(index));
    }

    fn hung_up(&mut self, index: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        state.hangup = Recv::Off;
        let Some(conn) = state.key else { return };
        if entry.result() >= 0 && state.wanted == Reading::Parked {
            events.push(Event::Unparked { conn });
        } else if state.wanted == Reading::Parked {
            // Cancelled, and parked again before that took effect.
            self.rearm.push(Op::Recv(index));
        }
        events.extend(self.released(index));
    }

    fn accepted(&mut self, listener: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.listeners[listener as usize];
        state.armed = cqueue::more(entry.flags());
        let result = entry.result();
        if result >= 0 {
            // SAFETY: the kernel made this descriptor for the accept request and told nobody else of it.
            let socket = unsafe { OwnedFd::from_raw_fd(result) };
            events.push(Event::Accepted { listener, socket });
            if !state.armed && state.wanted {
                self.rearm.push(Op::Accept(listener));
            }
        } else if state.wanted && !state.armed {
            let error = io::Error::from_raw_os_error(-result);
            events.push(Event::AcceptFailed { listener, error });
        }
    }

    fn received(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        let slot = cqueue::buffer_select(entry.flags()).and_then(|at| self.buffers.take(at, &mut env.pool));
        let state = &mut self.conns[index as usize];
        let Some(conn) = state.key else { return };
        let ended = !cqueue::more(entry.flags());
        if ended {
            state.recv = Recv::Off;
        }
        let result = entry.result();
        match (result, slot) {
            (1.., Some(slot)) => {
                let chunk = slot.freeze(result as usize);
                events.push(Event::Received { conn, chunk });
            }
            (0, _) => {
                state.wanted = Reading::Off;
                events.push(Event::Eof { conn });
            }
            _ => match -result {
                libc::ENOBUFS => env.stats.slots_exhausted.add(1),
                // Linux 6.18 never gives us the last two, and no test can cause them. When another reader took what woke
                // a receive, it goes on waiting (io_recv returns to its poll), whatever the mode of the socket
                // (REQ_F_NOWAIT comes of MSG_DONTWAIT alone). EINTR needs a worker thread, which a socket that can be
                // polled gets only when there is no memory for that. They are here so that a kernel that does otherwise
                // costs a wake-up, and not a connection.
                libc::ECANCELED | libc::EAGAIN | libc::EINTR => {}
                _ => {
                    state.wanted = Reading::Off;
                    events.push(Event::Failed { conn });
                }
            },
        }
        if ended && state.wanted == Reading::On {
            self.rearm.push(Op::Recv(index));
        }
        events.extend(self.released(index));
    }

    fn sent(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        let (Some(conn), Some(mut send)) = (state.key, state.send.take()) else { return };
        self.spare_msgs.extend(send.msg.take());
        let result = entry.result();
        // Not on Linux 6.18: as in `received`.
        let retry = matches!(-result, libc::EAGAIN | libc::EINTR);
        if result < 0 && (send.cancelling || !retry) {
            send.batch.recycle(&mut env.spares);
            if !state.releasing {
                events.push(Event::Failed { conn });
            }
        } else {
            let bytes = result.max(0) as usize;
            send.batch.advance(bytes, &mut env.spares);
            let done = send.batch.is_empty();
            if bytes > 0 {
                events.push(Event::Sent { conn, bytes, done });
            }
            if done || state.releasing {
                send.batch.recycle(&mut env.spares);
            } else {
                state.send = Some(send);
                self.submit_send(index);
            }
        }
        events.extend(self.released(index));
    }

    fn received_datagram(&mut self, socket: u32, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        if !cqueue::more(entry.flags()) {
            self.rearm.push(Op::Datagram(socket));
        }
        if entry.result() == -libc::ENOBUFS {
            env.stats.slots_exhausted.add(1);
        }
        let Some(slot) = cqueue::buffer_select(entry.flags()).and_then(|at| self.buffers.take(at, &mut env.pool))
        else {
            return;
        };
        let Ok(length) = usize::try_from(entry.result()) else { return };
        let whole = slot.freeze(length);
        let header = &self.sockets[socket as usize].header;
        let Ok(out) = RecvMsgOut::parse(&whole, header) else { return };
        let Some(addr) = socket_addr(out.name_data()) else { return };
        let peer = DatagramPeer { addr, local: read_pktinfo(out.control_data()) };
        let truncated = out.is_payload_truncated() || out.flags() & libc::MSG_TRUNC as u32 != 0;
        let payload_bytes = out.payload_data().len();
        let start = whole.len() - payload_bytes;
        let chunk = whole.slice(start..start + payload_bytes);
        events.push(Event::Datagram { socket, peer, chunk, truncated });
    }

    fn sent_datagram(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env) {
        if let Some(send) = self.datagrams[index as usize].take() {
            send.batch.recycle(&mut env.spares);
            self.spare_msgs.push(send.msg);
            self.free_datagrams.push(index);
            let counter = if entry.result() < 0 { &env.stats.datagrams_unsent } else { &env.stats.datagrams_out };
            counter.add(1);
        }
    }

    /// The event that ends a connection, once nothing of it is left in the kernel.
    fn released(&mut self, index: u32) -> Option<Event> {
        let state = &mut self.conns[index as usize];
        if !state.releasing || state.recv != Recv::Off || state.hangup != Recv::Off {
            return None;
        }
        if state.send.is_some() || state.connect.is_some() {
            return None;
        }
        let conn = state.key.take()?;
        *state = Conn::default();
        Some(Event::Released { conn })
    }

    fn rearm_all(&mut self) {
        // Receives without a free buffer would fail at once, over and over.
        let starved = self.buffers.is_starved();
        let mut ops = mem::take(&mut self.rearm);
        ops.retain(|op| match *op {
            Op::Recv(_) | Op::Datagram(_) if starved => true,
            op => {
                match op {
                    Op::Accept(listener) => self.arm_accept(listener),
                    Op::Datagram(socket) => self.arm_datagram(socket),
                    Op::Recv(index) => self.arm_recv(index),
                    Op::Watch(watch) => self.arm_watch(watch),
                    Op::Cancel | Op::Connect(_) | Op::Hangup(_) | Op::Send(_) | Op::SendDatagram(_) => {}
                }
                false
            }
        });
        self.rearm = ops;
    }

    fn arm_accept(&mut self, listener: u32) {
        let state = &mut self.listeners[listener as usize];
        if state.wanted && !state.armed {
            state.armed = true;
            let entry = opcode::AcceptMulti::new(Fd(state.socket)).flags(libc::SOCK_CLOEXEC).build();
            self.push(entry.user_data(Op::Accept(listener).user_data()));
        }
    }

    /// Starts what is wanted of a connection and not under way yet.
    fn arm_recv(&mut self, index: u32) {
        let state = &mut self.conns[index as usize];
        if state.key.is_none() {
            return;
        }
        let socket = Fd(state.socket);
        if state.wanted == Reading::On && state.recv == Recv::Off {
            state.recv = Recv::Armed;
            let entry = opcode::RecvMulti::new(socket, BUFFER_GROUP).build();
            self.push(entry.user_data(Op::Recv(index).user_data()));
        } else if state.wanted == Reading::Parked && state.hangup == Recv::Off {
            state.hangup = Recv::Armed;
            let entry = opcode::PollAdd::new(socket, libc::POLLRDHUP as u32).build();
            self.push(entry.user_data(Op::Hangup(index).user_data()));
        }
    }

    fn arm_datagram(&mut self, socket: u32) {
        let state = &self.sockets[socket as usize];
        let entry = opcode::RecvMsgMulti::new(Fd(state.fd), &raw const *state.header, BUFFER_GROUP).build();
        self.push(entry.user_data(Op::Datagram(socket).user_data()));
    }

    fn arm_watch(&mut self, watch: u32) {
        let fd = self.watches[watch as usize];
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(entry.user_data(Op::Watch(watch).user_data()));
    }

    fn submit_send(&mut self, index: u32) {
        let state = &mut self.conns[index as usize];
        let Some(send) = &mut state.send else { return };
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = send.batch.slices(&mut slices);
        let flags = libc::MSG_NOSIGNAL;
        let entry = if filled == 1 {
            let bytes = slices[0];
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            opcode::Send::new(Fd(state.socket), bytes.as_ptr(), len).flags(flags).build()
        } else {
            let mut msg = self.spare_msgs.pop().unwrap_or_else(SendMsg::boxed);
            let header = msg.prepare(&slices[..filled], None);
            send.msg = Some(msg);
            opcode::SendMsg::new(Fd(state.socket), header).flags(flags as u32).build()
        };
        self.push(entry.user_data(Op::Send(index).user_data()));
    }

    /// Lets a datagram wait for room in its socket; gives it back if `queue_max` do already.
    fn submit_datagram(
        &mut self,
        fd: RawFd,
        peer: &DatagramPeer,
        batch: SendBatch,
        queue_max: usize,
    ) -> Result<(), SendBatch> {
        if self.datagrams.len() - self.free_datagrams.len() >= queue_max {
            return Err(batch);
        }
        let index = self.free_datagrams.pop().unwrap_or_else(|| {
            self.datagrams.push(None);
            self.datagrams.len() as u32 - 1
        });
        let mut msg = self.spare_msgs.pop().unwrap_or_else(SendMsg::boxed);
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = batch.slices(&mut slices);
        let header = msg.prepare(&slices[..filled], Some(peer));
        let entry = opcode::SendMsg::new(Fd(fd), header).flags(libc::MSG_NOSIGNAL as u32).build();
        self.datagrams[index as usize] = Some(DatagramSend { batch, msg });
        self.push(entry.user_data(Op::SendDatagram(index).user_data()));
        Ok(())
    }

    fn cancel(&mut self, op: Op) {
        let entry = opcode::AsyncCancel::new(op.user_data()).build();
        self.push(entry.user_data(Op::Cancel.user_data()));
    }

    fn push(&mut self, entry: squeue::Entry) {
        self.under_way += 1;
        // Never overtake a request that waits already.
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
        }
    }

    fn flush_backlog(&mut self) {
        while let Some(entry) = self.backlog.front() {
            let entry = entry.clone();
            if !self.try_push(&entry) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: everything the request points to lives until its completion: batches, headers and addresses are owned by
        // `conns`, `datagrams` and `sockets` until then (boxed, or heap buffers that are not changed meanwhile), and
        // on drop the ring goes first. Descriptors stay open until `Released` (the shard's promise).
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Does nothing when it was done already.
        self.shutdown();
    }
}

const EMPTY: cqueue::Entry = {
    // SAFETY: a completion is three integers.
    unsafe { mem::zeroed() }
};
