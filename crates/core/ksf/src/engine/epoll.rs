//! The epoll engine: the shard's operations on plain system calls, for machines, containers and seccomp profiles
//! without io_uring. Level-triggered; a receive or a send is tried when the descriptor is ready, with MSG_DONTWAIT, so
//! the sockets themselves stay in blocking mode as for io_uring. Only a call that waits can be interrupted (signal(7)), so
//! EINTR comes from the wait for events alone.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;
use std::{io, mem, ptr};

use super::datagram_receiver::{DatagramReceiver, NoSlot, check_not_shut_down};
use super::datagrams::DatagramQueues;
use super::files::BlockingFiles;
use super::msg::{SendMsg, send_now, sockaddr};
use super::no_memory::NoMemory;
use super::syscalls::{accept_now, receive_into, set_nonblocking};
use super::{Engine, Event, Reading, SPARES_MAX, Wait, pause};
use crate::boxes::Boxes;
use crate::cutter::Direct;
use crate::datagram_output::DatagramOutput;
use crate::env::Env;
use crate::error::Error;
use crate::files::Begun;
use crate::output::SendBatch;
use crate::service::ConnKey;

/// Descriptors reported by one call.
const READY_MAX: usize = 256;
/// Connections accepted from one socket before others get their turn.
const BURST: usize = 64;
/// When no slot is free, look again after this time: their holders do not tell the engine.
const STARVED: Duration = Duration::from_micros(500);

pub(crate) struct Epoll {
    epoll: OwnedFd,
    ready: Vec<libc::epoll_event>,
    conns: Vec<Conn>,
    listeners: Vec<RawFd>,
    datagrams: DatagramQueues,
    /// What epoll was last told of each datagram socket; `None`: it was shut down, and epoll knows it only while it is full.
    datagram_interest: Vec<Option<u32>>,
    receiver: DatagramReceiver,
    /// Events that came of an operation instead of the descriptor.
    done: Vec<Event>,
    msg: Box<SendMsg>,
    spare_batches: Boxes<SendBatch, SPARES_MAX>,
    files: BlockingFiles,
    starved: bool,
    /// Connections that [lack memory](Conn::lacks_memory), and maybe others.
    no_memory: NoMemory,
}

#[derive(Default)]
struct Conn {
    key: Option<ConnKey>,
    socket: RawFd,
    reading: Reading,
    /// The buffer that is lent.
    direct: Option<Direct>,
    /// Boxed, because most batches leave at once.
    batch: Option<Box<SendBatch>>,
    /// The kernel reported room, and took nothing: it would report it in every wait.
    lacks_memory: bool,
    /// A connect is under way.
    connecting: bool,
    /// What epoll was last told; `None`: it was never told of this socket, which may be closed before it must be.
    interest: Option<u32>,
}

/// What a descriptor is, in the data of its epoll entry: kind in the top byte, index below.
#[derive(Clone, Copy)]
enum Source {
    Conn(u32),
    Datagram(u32),
    Listener(u32),
    Watch(u32),
}

impl Source {
    fn data(self) -> u64 {
        match self {
            Self::Conn(index) => 1 << 56 | u64::from(index),
            Self::Datagram(index) => 2 << 56 | u64::from(index),
            Self::Listener(index) => 3 << 56 | u64::from(index),
            Self::Watch(index) => 4 << 56 | u64::from(index),
        }
    }

    fn from_data(data: u64) -> Self {
        let index = data as u32;
        match data >> 56 {
            1 => Self::Conn(index),
            2 => Self::Datagram(index),
            3 => Self::Listener(index),
            _ => Self::Watch(index),
        }
    }
}

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const HANGUP: u32 = libc::EPOLLRDHUP as u32;
/// A datagram socket that is read.
const DATAGRAMS: u32 = IN | HANGUP;
const BROKEN: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Engine { engine: "epoll", step, source }
}

impl Engine for Epoll {
    #[cfg(test)]
    const CONN_BYTES: usize = size_of::<Conn>();

    fn new(_env: &mut Env, _spins: bool) -> Result<Self, Error> {
        // SAFETY: no pointers are involved; the result is checked before it is owned.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(failed("epoll_create1")(io::Error::last_os_error()));
        }
        // SAFETY: just made, and no other code knows it.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        Ok(Self {
            epoll,
            ready: Vec::with_capacity(READY_MAX),
            conns: Vec::new(),
            listeners: Vec::new(),
            datagrams: DatagramQueues::new(),
            datagram_interest: Vec::new(),
            receiver: DatagramReceiver::new(),
            done: Vec::new(),
            msg: SendMsg::boxed(),
            spare_batches: Boxes::default(),
            files: BlockingFiles::new().map_err(failed("eventfd"))?,
            starved: false,
            no_memory: NoMemory::default(),
        })
    }

    fn watch(&mut self, watch: u32, fd: RawFd) -> Result<(), Error> {
        self.control(libc::EPOLL_CTL_ADD, fd, IN, Source::Watch(watch)).map_err(failed("epoll_ctl"))
    }

    fn listen(&mut self, listener: u32, socket: RawFd) {
        let at = listener as usize;
        if at >= self.listeners.len() {
            self.listeners.resize(at + 1, -1);
        }
        self.listeners[at] = socket;
        // Where shards share a socket, another one may take the connection that woke this one.
        let nonblocking = set_nonblocking(socket, true);
        // Exclusive: where shards share one socket (inherited, Unix), a connection wakes one of them.
        let interest = IN | libc::EPOLLEXCLUSIVE as u32;
        let added = self.control(libc::EPOLL_CTL_ADD, socket, interest, Source::Listener(listener));
        if let Err(error) = nonblocking.and(added) {
            self.done.push(Event::AcceptFailed { listener, error });
        }
    }

    fn unlisten(&mut self, listener: u32) {
        if let Some(socket) = self.listeners.get_mut(listener as usize).map(|socket| mem::replace(socket, -1))
            && socket >= 0
        {
            // It may have been removed when accepting failed.
            let _ = self.control(libc::EPOLL_CTL_DEL, socket, 0, Source::Listener(listener));
        }
    }

    fn listen_datagrams(&mut self, socket: u32, fd: RawFd) -> io::Result<()> {
        check_not_shut_down(fd)?;
        self.datagrams.open(socket, fd);
        self.receiver.open(socket, fd);
        self.datagram_interest.resize((socket as usize + 1).max(self.datagram_interest.len()), Some(DATAGRAMS));
        self.control(libc::EPOLL_CTL_ADD, fd, DATAGRAMS, Source::Datagram(socket))
    }

    fn set_datagrams_reading(&mut self, socket: u32, reads: bool) {
        self.receiver.set_reading(socket, reads);
        self.update_datagram_interest();
    }

    fn open(&mut self, conn: ConnKey, socket: RawFd, reading: Reading) {
        let at = conn.index as usize;
        if at >= self.conns.len() {
            self.conns.resize_with(at + 1, Conn::default);
        }
        self.conns[at] = Conn { key: Some(conn), socket, reading, ..Conn::default() };
        // One that is opened unread may end in this turn, without a system call. Else its reading is set.
        if reading != Reading::Off {
            self.update_interest(conn.index);
        }
    }

    fn connect(&mut self, conn: ConnKey, to: SocketAddr) {
        let Some(state) = self.conn(conn) else { return };
        let socket = state.socket;
        let (addr, len) = sockaddr(to);
        let connected = set_nonblocking(socket, true).and_then(|()| {
            // SAFETY: `addr` lives through the call, and `len` is the length of the address in it.
            let result = unsafe { libc::connect(socket, ptr::from_ref(&addr).cast(), len) };
            if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
        match connected {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
                state.connecting = true;
                self.update_interest(conn.index);
            }
            result => self.done.push(Event::Connected { conn, error: result.err() }),
        }
    }

    fn set_reading(&mut self, conn: ConnKey, reading: Reading) {
        if let Some(state) = self.conn(conn) {
            state.reading = reading;
            let called_back = if reading == Reading::Direct { None } else { state.direct.take() };
            self.update_interest(conn.index);
            self.done.extend(called_back.map(|direct| Event::ReceivedDirect { conn, direct, bytes: 0 }));
        }
    }

    fn is_quiet(&mut self, conn: ConnKey) -> bool {
        self.conn(conn).is_some_and(|state| state.direct.is_none())
    }

    fn receive_direct(&mut self, conn: ConnKey, direct: Direct) {
        if let Some(state) = self.conn(conn) {
            state.direct = Some(direct);
        }
    }

    fn send(&mut self, conn: ConnKey, mut batch: SendBatch, last: bool, env: &mut Env) -> (usize, bool) {
        let Some(state) = self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn)) else {
            return (0, false);
        };
        debug_assert!(state.batch.is_none(), "one send in flight per connection");
        match send_now(state.socket, &mut batch, last, &mut self.msg, env) {
            Ok(bytes) if batch.is_empty() => {
                batch.recycle(&mut env.spares);
                (bytes, true)
            }
            Ok(bytes) => {
                let mut boxed = self.spare_batches.take();
                *boxed = batch;
                state.batch = Some(boxed);
                self.update_interest(conn.index);
                (bytes, false)
            }
            Err(_) => {
                self.done.push(Event::Failed { conn });
                (0, false)
            }
        }
    }

    fn datagram_output(&mut self, socket: u32) -> &mut DatagramOutput {
        self.datagrams.output(socket)
    }

    fn datagrams_added(&mut self, socket: u32, env: &mut Env) {
        self.datagrams.added(socket, env);
    }

    fn flush(&mut self, env: &mut Env) {
        self.datagrams.flush(env);
        self.update_datagram_interest();
    }

    fn release(&mut self, conn: ConnKey) -> bool {
        let Some(state) = self.conn(conn) else { return false };
        // Closing it takes it out of epoll: no other code has the descriptor. Until then it may be reported once more, in
        // this very turn, and is not looked for any more.
        *state = Conn::default();
        true
    }

    fn begin_file(&mut self, begun: Box<Begun>, env: &mut Env) {
        self.files.start(begun, env);
    }

    fn end_files(&mut self, env: &mut Env) -> Vec<Begun> {
        let mut ended = Vec::new();
        self.files.end(env, &mut ended);
        ended
    }

    fn shutdown(&mut self) {
        // Nothing is under way between two calls.
    }

    fn wait(&mut self, env: &mut Env, wait: Wait, events: &mut Vec<Event>) -> io::Result<()> {
        self.flush(env);
        let mut wait = wait;
        if self.receiver.is_look_due() {
            wait = Wait { timeout: Some(Duration::ZERO), gather: None };
        } else if self.receive_more(env, events) {
            events.append(&mut self.done);
            return Ok(());
        }
        self.receiver.looked();
        let idle = self.done.is_empty();
        if mem::take(&mut self.starved) {
            // Sockets with unread bytes would end every wait at once; only time brings slots back.
            pause(STARVED, env);
        }
        if let Some(gather) = wait.gather.filter(|_| idle) {
            // There is no min-wait for epoll: sleep, then look.
            pause(gather, env);
        }
        wait.timeout = self.no_memory.limit(wait.timeout);
        env.stats.syscalls.add(1);
        let count = self.wait_ready(if idle { wait.timeout } else { Some(Duration::ZERO) });
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        // SAFETY: the kernel initialised that many entries, and `count` is at most the capacity.
        unsafe { self.ready.set_len(count as usize) };
        events.append(&mut self.done);
        for index in self.no_memory.take_due() {
            if mem::take(&mut self.conns[index as usize].lacks_memory) {
                self.update_interest(index);
            }
        }
        for at in 0..self.ready.len() {
            let ready = self.ready[at];
            match Source::from_data(ready.u64) {
                Source::Conn(index) => self.conn_ready(index, ready.events, env, events),
                Source::Datagram(index) => self.datagram_ready(index, ready.events, env, events),
                Source::Listener(index) => self.listener_ready(index, env, events),
                Source::Watch(watch) => events.push(Event::Watched { watch }),
            }
        }
        Ok(())
    }
}

impl Epoll {
    /// Waits with the precision of the clock where the kernel can (epoll_pwait2, 5.11), else of a millisecond.
    fn wait_ready(&mut self, timeout: Option<Duration>) -> i32 {
        let (epoll, room) = (self.epoll.as_raw_fd(), READY_MAX as i32);
        let ready = self.ready.as_mut_ptr();
        let Some(timeout) = timeout.filter(|timeout| !timeout.is_zero()) else {
            // SAFETY: `ready` has room for `READY_MAX` entries, of which the kernel writes the first `count`.
            return unsafe { libc::epoll_wait(epoll, ready, room, if timeout.is_none() { -1 } else { 0 }) };
        };
        let time = rustix::time::Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        let no_mask = ptr::null::<libc::sigset_t>();
        // SAFETY: as above; `time` is a kernel timespec that lives through the call, and no mask is given.
        let count =
            unsafe { libc::syscall(libc::SYS_epoll_pwait2, epoll, ready, room, &raw const time, no_mask, 0usize) };
        if count >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOSYS) {
            return count as i32;
        }
        // Rounded up: a wait that ends early would spin until the time has come.
        let timeout_ms = i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        // SAFETY: as above.
        unsafe { libc::epoll_wait(epoll, ready, room, timeout_ms) }
    }

    fn conn(&mut self, conn: ConnKey) -> Option<&mut Conn> {
        self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn))
    }

    fn control(&self, operation: i32, fd: RawFd, interest: u32, source: Source) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest, u64: source.data() };
        // SAFETY: `event` lives through the call.
        let result = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &mut event) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn update_interest(&mut self, index: u32) {
        let state = &self.conns[index as usize];
        let reading = match state.reading {
            Reading::Off => 0,
            // A slot per report and connection, either way.
            Reading::On | Reading::Sparing | Reading::Head | Reading::Direct => IN,
            Reading::Parked => HANGUP,
        };
        let interest = reading | if state.batch.is_some() && !state.lacks_memory || state.connecting { OUT } else { 0 };
        let (told, socket) = (state.interest, state.socket);
        // Also without interest: a reset is reported then, too.
        let Some(conn) = state.key.filter(|_| told != Some(interest)) else { return };
        self.conns[index as usize].interest = Some(interest);
        if told.is_some() {
            // Changing an entry that is there cannot fail.
            let _ = self.control(libc::EPOLL_CTL_MOD, socket, interest, Source::Conn(index));
        } else if self.control(libc::EPOLL_CTL_ADD, socket, interest, Source::Conn(index)).is_err() {
            self.done.push(Event::Failed { conn });
        }
    }

    fn conn_ready(&mut self, index: u32, ready: u32, env: &mut Env, events: &mut Vec<Event>) {
        if self.conns[index as usize].connecting {
            self.connect_ready(index, events);
            return;
        }
        if ready & OUT != 0 {
            self.try_send(index, env, events);
        }
        let state = &mut self.conns[index as usize];
        let Some(conn) = state.key else { return };
        if state.reading == Reading::Parked && ready & (HANGUP | BROKEN) != 0 {
            events.push(Event::Unparked { conn });
        } else if state.direct.is_some() && ready & (IN | BROKEN) != 0 {
            self.receive_lent(index, conn, env, events);
        } else if state.reading.receives() && ready & (IN | BROKEN) != 0 {
            self.receive(index, conn, env, events);
        } else if ready & BROKEN != 0 {
            // The connection is not read, so no receive would report it; epoll does so until it is taken care of.
            events.push(Event::Failed { conn });
        }
    }

    fn connect_ready(&mut self, index: u32, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        let Some(conn) = state.key else { return };
        // Epoll is told when the shard reads, which it does next.
        state.connecting = false;
        // SAFETY: the socket is open until it is released, and was not.
        let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
        let error = rustix::net::sockopt::socket_error(socket).and_then(|result| result).err().map(io::Error::from);
        events.push(Event::Connected { conn, error });
    }

    fn receive(&mut self, index: u32, conn: ConnKey, env: &mut Env, events: &mut Vec<Event>) {
        let Some(mut slot) = env.pool.take() else {
            env.stats.slots_exhausted.add(1);
            self.starved = true;
            return;
        };
        env.stats.syscalls.add(1);
        let state = &self.conns[index as usize];
        let room = slot.as_mut_slice();
        let most = state.reading.bytes_max().min(room.len());
        match receive_into(state.socket, &mut room[..most]) {
            Ok(bytes @ 1..) => events.push(Event::Received { conn, chunk: slot.freeze(bytes) }),
            ended => self.receives_no_more(index, conn, ended, events),
        }
    }

    /// Receives into the buffer that is lent.
    fn receive_lent(&mut self, index: u32, conn: ConnKey, env: &mut Env, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        let Some(mut direct) = state.direct.take() else { return };
        env.stats.syscalls.add(1);
        match receive_into(state.socket, direct.room_mut()) {
            Ok(bytes @ 1..) => events.push(Event::ReceivedDirect { conn, direct, bytes }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => state.direct = Some(direct),
            ended => {
                events.push(Event::ReceivedDirect { conn, direct, bytes: 0 });
                self.receives_no_more(index, conn, ended, events);
            }
        }
    }

    /// A receive brought no bytes.
    fn receives_no_more(&mut self, index: u32, conn: ConnKey, ended: io::Result<usize>, events: &mut Vec<Event>) {
        let end = match ended {
            Ok(_) => Event::Eof { conn },
            // A socket under a kernel half may wake up for bytes the kernel half then took.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => Event::Failed { conn },
        };
        self.conns[index as usize].reading = Reading::Off;
        self.update_interest(index);
        events.push(end);
    }

    /// Goes on with the batch of a connection, and asks to be told when there is room for the rest.
    fn try_send(&mut self, index: u32, env: &mut Env, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        let (Some(conn), Some(mut batch)) = (state.key, state.batch.take()) else { return };
        match send_now(state.socket, &mut batch, false, &mut self.msg, env) {
            Ok(bytes) => {
                let done = batch.is_empty();
                if done {
                    mem::take(&mut *batch).recycle(&mut env.spares);
                    self.spare_batches.give(batch);
                } else {
                    state.batch = Some(batch);
                    state.lacks_memory = bytes == 0;
                }
                if bytes > 0 {
                    events.push(Event::Sent { conn, bytes, done });
                } else {
                    self.no_memory.add(index, env);
                }
            }
            Err(_) => events.push(Event::Failed { conn }),
        }
        self.update_interest(index);
    }

    fn listener_ready(&mut self, listener: u32, env: &mut Env, events: &mut Vec<Event>) {
        let socket = self.listeners[listener as usize];
        if socket < 0 {
            return;
        }
        for _ in 0..BURST {
            env.stats.syscalls.add(1);
            match accept_now(socket) {
                Ok(Some(socket)) => events.push(Event::Accepted { listener, socket }),
                Ok(None) => return,
                Err(error) => {
                    let _ = self.control(libc::EPOLL_CTL_DEL, socket, 0, Source::Listener(listener));
                    events.push(Event::AcceptFailed { listener, error });
                    return;
                }
            }
        }
    }

    fn datagram_ready(&mut self, socket: u32, ready: u32, env: &mut Env, events: &mut Vec<Event>) {
        if ready & OUT != 0 {
            self.datagrams.has_room(socket, env);
            self.update_datagram_interest();
        }
        if ready & BROKEN != 0 {
            // No receive takes it where the socket is not read, nor from its queue of errors, and epoll would report it in
            // every wait.
            self.datagrams.take_errors(socket);
        }
        let (before, was_starved) = (events.len(), mem::take(&mut self.starved));
        self.receive_datagrams(socket, env, events);
        if ready & (HANGUP | libc::EPOLLHUP as u32) != 0 && events.len() == before && !self.starved {
            self.end_datagrams(socket, env);
        }
        self.starved |= was_starved;
    }

    /// A datagram socket was shut down, by another holder of it: epoll would report that in every wait.
    fn end_datagrams(&mut self, socket: u32, env: &mut Env) {
        self.receiver.end(socket);
        if self.datagrams.is_full(socket) {
            // One that is shut down for sending, too, has room for nothing, and refuses what waits for room.
            self.datagrams.has_room(socket, env);
        }
        self.update_datagram_interest();
    }

    /// Receives from sockets that had several datagrams the last time: whether there are more costs no more to try than
    /// to ask. True if there were.
    fn receive_more(&mut self, env: &mut Env, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        for socket in 0..self.datagram_interest.len() as u32 {
            if self.receiver.is_busy(socket) {
                self.receive_datagrams(socket, env, events);
            }
        }
        events.len() > before
    }

    fn receive_datagrams(&mut self, socket: u32, env: &mut Env, events: &mut Vec<Event>) {
        self.starved |= self.receiver.receive(socket, env, events) == Err(NoSlot);
    }

    /// Asks to be told when a full socket has room, and when one that is read has something.
    fn update_datagram_interest(&mut self) {
        for socket in 0..self.datagram_interest.len() as u32 {
            let room = if self.datagrams.is_full(socket) { OUT } else { 0 };
            let reading = if self.receiver.reads(socket) { DATAGRAMS } else { 0 };
            let is_watched = room != 0 || !self.receiver.has_ended(socket);
            let interest = is_watched.then_some(room | reading);
            let told = mem::replace(&mut self.datagram_interest[socket as usize], interest);
            let op = match (told, interest) {
                (None, Some(_)) => libc::EPOLL_CTL_ADD,
                (Some(_), None) => libc::EPOLL_CTL_DEL,
                (told, interest) if told != interest => libc::EPOLL_CTL_MOD,
                _ => continue,
            };
            // Changing or removing an entry that is there cannot fail; without memory for a new one, replies stay unsent.
            let fd = self.datagrams.fd(socket);
            let _ = self.control(op, fd, interest.unwrap_or(0), Source::Datagram(socket));
        }
    }
}
