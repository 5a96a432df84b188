//! What every engine owes a shard.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;
use std::{mem, ptr};

use ksf_test::{PATIENCE, skip};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::epoll::Epoll;
use super::uring::Uring;
use super::*;
use crate::budget::{Budget, InputRoom};
use crate::buffers::Buffers;
use crate::cutter::{Cut, Cutter, Native};
use crate::framing::{Framing, LengthPrefix};
use crate::limits::{Limits, Time};
use crate::output::Output;
use crate::pool::{Memory, Pool};

const QUEUE_MAX: usize = 3;

pub(super) fn send_datagram<E: Engine>(engine: &mut E, peer: DatagramPeer, bytes: &[u8], env: &mut Env) {
    engine.datagram_output(0).add(peer, |to| to.extend_from_slice(bytes));
    engine.datagrams_added(0, env);
}

/// Runs a test on each engine of this machine.
pub(crate) fn on_each_engine(on_epoll: fn(), on_uring: fn()) {
    on_epoll();
    match EngineKind::Uring.probe() {
        Ok(()) => on_uring(),
        Err(error) => skip(format_args!("needs io_uring ({error})")),
    }
}

/// A Unix socket of packets stands in for one of UDP: it ignores the address it is to send to (unix(7)), and is full
/// when its peer does not read. One of UDP is full only while a network is slow.
#[test]
fn datagrams_that_wait_for_a_full_socket_are_bounded() {
    on_each_engine(a_full_socket_holds_so_many_datagrams::<Epoll>, a_full_socket_holds_so_many_datagrams::<Uring>);
}

fn a_full_socket_holds_so_many_datagrams<E: Engine>() {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (full, reader) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
    let mut fillers = 0;
    while send(&full, b"datagram", SendFlags::DONTWAIT).is_ok() {
        fillers += 1;
    }
    let limits = Limits { datagram_queue_max: QUEUE_MAX, ..Limits::default() };
    let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
    let mut engine = E::new(&mut env, false).unwrap();
    engine.listen_datagrams(0, full.as_raw_fd()).unwrap();
    let peer = DatagramPeer { addr: SocketAddr::from(([127, 0, 0, 1], 9)), local: None };
    for number in 0..QUEUE_MAX + 1 {
        send_datagram(&mut engine, peer, &[number as u8], &mut env);
    }
    engine.flush(&mut env);
    // The socket is known to be full now.
    send_datagram(&mut engine, peer, b"too late", &mut env);
    assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (0, 2));
    // Those that wait leave when there is room, and then there is room for others.
    let read = |expected: &[u8]| {
        let mut got = [0; 20];
        let (length, _) = recv(&reader, &mut got[..], RecvFlags::DONTWAIT).unwrap();
        assert_eq!(&got[..length], expected);
    };
    (0..fillers).for_each(|_| read(b"datagram"));
    let mut events = Vec::new();
    let start = Instant::now();
    while env.stats.datagrams_out.value() < QUEUE_MAX as u64 {
        assert!(start.elapsed() < PATIENCE, "those that wait do not leave");
        engine.wait(&mut env, Wait { timeout: Some(PATIENCE), gather: None }, &mut events).unwrap();
    }
    send_datagram(&mut engine, peer, b"last", &mut env);
    engine.flush(&mut env);
    assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (QUEUE_MAX as u64 + 1, 2));
    // In the order in which they were sent.
    (0..QUEUE_MAX as u8).for_each(|number| read(&[number]));
    read(b"last");
    engine.shutdown();
}

/// They are part of the shard's budget, and at the budget those that come last are given up.
#[test]
fn bytes_of_datagrams_that_wait_for_a_full_socket_are_bounded() {
    on_each_engine(a_full_socket_holds_so_many_bytes::<Epoll>, a_full_socket_holds_so_many_bytes::<Uring>);
}

fn a_full_socket_holds_so_many_bytes<E: Engine>() {
    const REPLY_BYTES: usize = 1000;
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (full, reader) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
    while send(&full, b"datagram", SendFlags::DONTWAIT).is_ok() {}
    let limits = Limits { shard_bytes_max: 3 * REPLY_BYTES, ..Limits::default() };
    let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
    let mut engine = E::new(&mut env, false).unwrap();
    engine.listen_datagrams(0, full.as_raw_fd()).unwrap();
    let peer = DatagramPeer { addr: SocketAddr::from(([127, 0, 0, 1], 9)), local: None };
    for _ in 0..5 {
        send_datagram(&mut engine, peer, &[7; REPLY_BYTES], &mut env);
    }
    engine.flush(&mut env);
    assert_eq!((env.budget.reply_bytes(), env.stats.datagrams_unsent.value()), (3 * REPLY_BYTES, 2));
    // The socket is known to be full now.
    send_datagram(&mut engine, peer, &[7; REPLY_BYTES], &mut env);
    assert_eq!((env.budget.reply_bytes(), env.stats.datagrams_unsent.value()), (3 * REPLY_BYTES, 3));
    // Others use the budget up: that is no fault of those that wait.
    env.budget.recount_replies(0, 2 * REPLY_BYTES);
    send_datagram(&mut engine, peer, &[7; REPLY_BYTES], &mut env);
    env.budget.recount_replies(2 * REPLY_BYTES, 0);
    assert_eq!((env.budget.reply_bytes(), env.stats.datagrams_unsent.value()), (3 * REPLY_BYTES, 4));
    let start = Instant::now();
    while env.stats.datagrams_out.value() < 3 {
        assert!(start.elapsed() < PATIENCE, "those that wait do not leave");
        while recv(&reader, &mut [0; 20][..], RecvFlags::DONTWAIT).is_ok() {}
        engine.wait(&mut env, Wait { timeout: Some(PATIENCE), gather: None }, &mut Vec::new()).unwrap();
    }
    assert_eq!(env.budget.reply_bytes(), 0);
    engine.shutdown();
}

/// Each by a call of its own, they cost more than the messages in them.
#[test]
fn datagrams_of_a_turn_take_few_system_calls() {
    on_each_engine(many_datagrams::<Epoll>, many_datagrams::<Uring>);
}

fn many_datagrams<E: Engine>() {
    const COUNT: usize = 50;
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peers = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    // Those after the first find the receiver prepared for one.
    for round in 0..2 {
        for number in 0..COUNT {
            peers[number % 2].send_to(&[number as u8; 9], ours.local_addr().unwrap()).unwrap();
        }
        let before = bench.env.stats.syscalls.value();
        bench.wait_for("all datagrams", |events| events.len() >= COUNT);
        for (number, event) in mem::take(&mut bench.events).into_iter().enumerate() {
            let Event::Datagram { socket: 0, peer, chunk, truncated: false } = event else { panic!("{event:?}") };
            assert_eq!(*chunk, [number as u8; 9]);
            assert_eq!(peer.addr, peers[number % 2].local_addr().unwrap());
            send_datagram(&mut bench.engine, peer, &chunk, &mut bench.env);
        }
        bench.engine.flush(&mut bench.env);
        let calls = bench.env.stats.syscalls.value() - before;
        // Epoll doubles what it is ready for, from two datagrams on: 2, 4, 8, 16, 32, and a wait in front.
        assert!(calls <= 8, "round {round}: {calls} system calls for {COUNT} datagrams and as many replies");
        assert_eq!(bench.env.stats.datagrams_out.value(), ((round + 1) * COUNT) as u64);
    }
    for number in 0..2 * COUNT {
        let mut got = [0; 20];
        let peer = &peers[number % 2];
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(peer.recv_from(&mut got).unwrap(), (9, ours.local_addr().unwrap()));
        assert_eq!(got[..9], [(number % COUNT) as u8; 9], "out of order");
    }
}

/// Looking again and again would cost a call each; a ring shows in shared memory whether there is something. Of datagrams
/// it is asked to tell when the shard sleeps: until then a call is quicker than the ring, and asks for less.
#[test]
fn a_look_at_a_ring_that_finds_nothing_takes_no_system_call() {
    if let Err(error) = EngineKind::Uring.probe() {
        return skip(format_args!("needs io_uring ({error})"));
    }
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::<Uring>::spinning();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let look = Wait { timeout: Some(Duration::ZERO), gather: None };
    let sleep = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
    for number in 0..3 {
        bench.engine.wait(&mut bench.env, sleep, &mut bench.events).unwrap();
        let before = bench.env.stats.syscalls.value();
        for _ in 0..1_000 {
            bench.engine.wait(&mut bench.env, look, &mut bench.events).unwrap();
        }
        assert_eq!((bench.events.len(), bench.env.stats.syscalls.value()), (0, before));
        peer.send_to(&[number], ours.local_addr().unwrap()).unwrap();
        let start = Instant::now();
        while bench.events.is_empty() {
            assert!(start.elapsed() < PATIENCE, "what came is not seen");
            bench.engine.wait(&mut bench.env, look, &mut bench.events).unwrap();
        }
        assert!(
            matches!(&bench.events[..], [Event::Datagram { chunk, .. }] if **chunk == [number]),
            "{:?}",
            bench.events
        );
        bench.events.clear();
        // The next one comes before the shard slept.
        peer.send_to(&[number, number], ours.local_addr().unwrap()).unwrap();
        let before = bench.env.stats.syscalls.value();
        bench.engine.wait(&mut bench.env, look, &mut bench.events).unwrap();
        assert!(matches!(&bench.events[..], [Event::Datagram { chunk, .. }] if chunk.len() == 2), "{:?}", bench.events);
        assert_eq!(bench.env.stats.syscalls.value(), before + 1);
        bench.events.clear();
    }
}

/// An engine, and what it has reported.
pub(super) struct Bench<E: Engine> {
    pub(super) env: Env,
    pub(super) engine: E,
    pub(super) events: Vec<Event>,
}

impl<E: Engine> Drop for Bench<E> {
    /// The engine lets go of the memory of the pool before that is freed.
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

impl<E: Engine> Bench<E> {
    pub(super) fn new() -> Self {
        Self::with(false)
    }

    fn spinning() -> Self {
        Self::with(true)
    }

    fn with(spins: bool) -> Self {
        let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
        let engine = E::new(&mut env, spins).unwrap();
        Self { env, engine, events: Vec::new() }
    }

    /// One call: until something happens.
    pub(super) fn wait(&mut self) {
        let wait = Wait { timeout: Some(PATIENCE), gather: None };
        self.engine.wait(&mut self.env, wait, &mut self.events).unwrap();
    }

    pub(super) fn wait_for(&mut self, what: &str, done: impl Fn(&[Event]) -> bool) {
        let start = Instant::now();
        while !done(&self.events) {
            assert!(start.elapsed() < PATIENCE, "in vain: {what}; instead: {:?}", self.events);
            self.wait();
        }
    }

    /// Waits for so many bytes of connections, and asserts that nothing else is reported.
    fn expect_bytes(&mut self, bytes: &[u8]) {
        let received = |events: &[Event]| -> Vec<u8> {
            let chunks = events.iter().map(|event| match event {
                Event::Received { chunk, .. } => chunk.to_vec(),
                other => panic!("{other:?} instead of bytes"),
            });
            chunks.flatten().collect()
        };
        self.wait_for("bytes", |events| received(events).len() >= bytes.len());
        assert_eq!(received(&self.events), bytes);
        self.events.clear();
    }
}

impl<E: Engine> Bench<E> {
    pub(super) fn count(&self, is: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|event| is(event)).count()
    }
}

fn key(index: u32) -> ConnKey {
    ConnKey { index, generation: 0 }
}

/// io_uring starts an operation that waits; epoll tries one that does not, whatever the mode of the socket.
fn waits_in_the_kernel<E: Engine>() -> bool {
    std::any::type_name::<E>() == std::any::type_name::<Uring>()
}

fn is_nonblocking(socket: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(socket).unwrap().contains(rustix::fs::OFlags::NONBLOCK)
}

/// Two readers of one socket, as a kernel half is one beside the engine: a wake-up is for both, the bytes for one.
#[test]
fn bytes_that_another_reader_took_are_waited_for_again() {
    on_each_engine(another_reader::<Epoll>, another_reader::<Uring>);
}

fn another_reader<E: Engine>() {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let again = ours.try_clone().unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.open(key(0), ours.as_raw_fd(), Reading::On);
    bench.engine.open(key(1), again.as_raw_fd(), Reading::On);
    for _ in 0..3 {
        peer.write_all(b"bytes").unwrap();
        bench.expect_bytes(b"bytes");
    }
    // A peer that came too late is still there to be told of the end.
    drop(peer);
    let ended = |events: &[Event], index| {
        events.iter().any(|event| matches!(event, Event::Eof { conn } if *conn == key(index)))
    };
    bench.wait_for("the end, twice", |events| ended(events, 0) && ended(events, 1));
    assert_eq!(bench.events.len(), 2, "{:?}", bench.events);
}

/// Two listeners on one socket, as shards and processes share it: both are woken, and one gets the connection.
#[test]
fn connections_that_another_listener_took_are_waited_for_again() {
    on_each_engine(another_listener::<Epoll>, another_listener::<Uring>);
}

fn another_listener<E: Engine>() {
    let (listener, name) = unix_listener();
    let again = listener.try_clone().unwrap();
    let mut bench = Bench::<E>::new();
    let mut peers = vec![UnixStream::connect_addr(&name).unwrap()];
    bench.engine.listen(0, listener.as_raw_fd());
    bench.engine.listen(1, again.as_raw_fd());
    for accepted in 1..4 {
        bench.wait_for("a connection", |events| events.len() >= accepted);
        assert_eq!(bench.count(|event| matches!(event, Event::Accepted { .. })), accepted, "{:?}", bench.events);
        peers.push(UnixStream::connect_addr(&name).unwrap());
    }
}

/// In a network namespace of its own or not: the kernel chooses a name that is free.
fn unix_listener() -> (UnixListener, std::os::unix::net::SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new_unnamed()).unwrap();
    socket.listen(8).unwrap();
    let listener = UnixListener::from(OwnedFd::from(socket));
    let name = listener.local_addr().unwrap();
    (listener, name)
}

/// The mode belongs to all that share the socket, a kernel half among them.
#[test]
fn a_socket_put_in_the_other_mode_still_receives() {
    on_each_engine(receiving_in_the_other_mode::<Epoll>, receiving_in_the_other_mode::<Uring>);
}

fn receiving_in_the_other_mode<E: Engine>() {
    for nonblocking in [true, false] {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let mut bench = Bench::<E>::new();
        bench.engine.open(key(0), ours.as_raw_fd(), Reading::On);
        ours.set_nonblocking(nonblocking).unwrap();
        // Nothing to receive yet.
        let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
        bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
        assert!(bench.events.is_empty(), "{:?}", bench.events);
        peer.write_all(b"bytes").unwrap();
        bench.expect_bytes(b"bytes");
    }
}

#[test]
fn a_socket_put_in_the_other_mode_still_sends() {
    on_each_engine(sending_in_the_other_mode::<Epoll>, sending_in_the_other_mode::<Uring>);
}

fn sending_in_the_other_mode<E: Engine>() {
    const BYTES: usize = 4 << 20;
    for nonblocking in [true, false] {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        ours.set_nonblocking(nonblocking).unwrap();
        let mut bench = Bench::<E>::new();
        bench.engine.open(key(0), ours.as_raw_fd(), Reading::On);
        bench.engine.set_reading(key(0), Reading::Off);
        let mut output = Output::default();
        output.tail(&mut bench.env.spares).resize(BYTES, 7);
        let (mut sent, done) = bench.engine.send(key(0), output.take(), false, &mut bench.env);
        assert!(!done && sent < BYTES);
        let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
        bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
        assert!(bench.events.is_empty(), "{:?}", bench.events);
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; BYTES];
            peer.read_exact(&mut got).map(|()| got)
        });
        while sent < BYTES {
            bench.wait_for("room", |events| !events.is_empty());
            for event in bench.events.drain(..) {
                let Event::Sent { bytes, done, .. } = event else { panic!("{event:?} instead of room") };
                sent += bytes;
                assert_eq!(done, sent == BYTES);
            }
        }
        assert!(reader.join().unwrap().unwrap() == [7; BYTES]);
    }
}

#[test]
fn a_listener_put_in_the_other_mode_still_accepts() {
    on_each_engine(accepting_in_the_other_mode::<Epoll>, accepting_in_the_other_mode::<Uring>);
}

fn accepting_in_the_other_mode<E: Engine>() {
    let (listener, name) = unix_listener();
    let mut bench = Bench::<E>::new();
    bench.engine.listen(0, listener.as_raw_fd());
    if waits_in_the_kernel::<E>() {
        // An accept of epoll would wait where it finds nothing: there is no other way to accept without waiting.
        listener.set_nonblocking(true).unwrap();
    }
    let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
    bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
    if let Some(Event::AcceptFailed { error, .. }) = bench.events.pop() {
        // As other kernels may do; the shard tries again, and with that the mode must be right.
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        bench.engine.listen(0, listener.as_raw_fd());
        assert!(!is_nonblocking(&listener));
    }
    let _peer = UnixStream::connect_addr(&name).unwrap();
    bench.wait_for("a connection", |events| !events.is_empty());
    assert!(matches!(bench.events[..], [Event::Accepted { .. }]), "{:?}", bench.events);
}

/// A wait that a signal ends reports nothing, and no error.
#[test]
fn a_signal_only_ends_a_wait() {
    on_each_engine(signalled::<Epoll>, signalled::<Uring>);
}

fn signalled<E: Engine>() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: zero is a valid value of every field; the handler does nothing, and so may run at any time.
    let result = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut())
    };
    assert_eq!(result, 0);
    let (tell, told) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        let mut bench = Bench::<E>::new();
        // SAFETY: no memory is involved.
        tell.send(unsafe { libc::pthread_self() }).unwrap();
        let start = Instant::now();
        bench.engine.wait(&mut bench.env, Wait { timeout: Some(PATIENCE), gather: None }, &mut bench.events).unwrap();
        assert!(bench.events.is_empty(), "{:?}", bench.events);
        assert!(start.elapsed() < PATIENCE, "no signal ended the wait");
    });
    let thread = told.recv().unwrap();
    while !waiter.is_finished() {
        // Again and again: one that comes before the thread waits ends nothing.
        // SAFETY: the thread is not joined yet, so its name is valid.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        std::thread::yield_now();
    }
    waiter.join().unwrap();
}

#[test]
fn a_wait_ends_when_its_time_is_over() {
    on_each_engine(timed_out::<Epoll>, timed_out::<Uring>);
}

fn timed_out<E: Engine>() {
    let mut bench = Bench::<E>::new();
    for micros in [0, 1, 2000] {
        let wait = Wait { timeout: Some(Duration::from_micros(micros)), gather: None };
        bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
        assert!(bench.events.is_empty(), "{:?}", bench.events);
    }
}

/// The buffer of a message of 100,000 bytes, as a connection lends it.
fn lent(buffers: &Buffers) -> Direct {
    let mut budget = Budget::default();
    let mut room = InputRoom { budget: &mut budget, limit_bytes: usize::MAX, grants_all: true };
    let limits = Limits::default();
    let mut rule = Native { framing: Framing::LengthPrefix(LengthPrefix::big_endian(4)), limits: &limits };
    let mut cutter = Cutter::default();
    let header = 100_000_u32.to_be_bytes();
    let cut = cutter.next(&header, &mut 0, &mut rule, &mut room, buffers, Time::default());
    assert!(matches!(cut, Ok(Cut::More)));
    cutter.direct(1, &mut room).unwrap()
}

#[test]
fn bytes_arrive_in_the_buffer_that_is_lent() {
    on_each_engine(receiving_into_lent_buffers::<Epoll>, receiving_into_lent_buffers::<Uring>);
}

fn receiving_into_lent_buffers<E: Engine>() {
    let buffers = Buffers::default();
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.open(key(0), ours.as_raw_fd(), Reading::On);
    peer.write_all(b"in a slot").unwrap();
    bench.expect_bytes(b"in a slot");
    // What is under way comes as before; then nothing is.
    bench.engine.set_reading(key(0), Reading::Direct);
    if !bench.engine.is_quiet(key(0)) {
        bench.wait_for("quiet", |events| matches!(events[..], [Event::Quiet { .. }]));
        bench.events.clear();
    }
    assert!(bench.engine.is_quiet(key(0)));
    for text in [&b"one"[..], b"and another"] {
        bench.engine.receive_direct(key(0), lent(&buffers));
        assert!(!bench.engine.is_quiet(key(0)));
        peer.write_all(text).unwrap();
        bench.wait_for("the buffer", |events| !events.is_empty());
        let Some(Event::ReceivedDirect { mut direct, bytes, .. }) = bench.events.pop() else { panic!("no buffer") };
        assert_eq!(&direct.room_mut()[..bytes], text);
        assert!(bench.events.is_empty() && bench.engine.is_quiet(key(0)), "{:?}", bench.events);
    }
    // Called back, it is empty, and bytes come in slots again.
    bench.engine.receive_direct(key(0), lent(&buffers));
    bench.engine.set_reading(key(0), Reading::Head);
    bench.wait_for("the empty buffer", |events| !events.is_empty());
    assert!(matches!(bench.events[..], [Event::ReceivedDirect { bytes: 0, .. }]), "{:?}", bench.events);
    bench.events.clear();
    peer.write_all(&[5; HEAD_BYTES + 1]).unwrap();
    bench.wait_for("the head", |events| !events.is_empty());
    assert!(matches!(&bench.events[..], [Event::Received { chunk, .. }] if chunk.len() == HEAD_BYTES));
    bench.events.clear();
    bench.expect_bytes(&[5]);
    // An end, too, brings it back.
    bench.engine.set_reading(key(0), Reading::Direct);
    if !bench.engine.is_quiet(key(0)) {
        bench.wait_for("quiet", |events| !events.is_empty());
        bench.events.clear();
    }
    bench.engine.receive_direct(key(0), lent(&buffers));
    drop(peer);
    bench.wait_for("the end", |events| events.len() >= 2);
    // A Unix socket whose peer has closed is reset, too.
    let [Event::ReceivedDirect { bytes: 0, .. }, Event::Eof { .. }, ..] = bench.events[..] else {
        panic!("{:?}", bench.events)
    };
}

/// The kernel may write into it until then.
#[test]
fn a_lent_buffer_is_kept_until_the_kernel_is_done_with_it() {
    on_each_engine(ending_with_lent_buffers::<Epoll>, ending_with_lent_buffers::<Uring>);
}

fn ending_with_lent_buffers<E: Engine>() {
    let buffers = Buffers::default();
    let (ours, _peer) = UnixStream::pair().unwrap();
    let (others, _other_peer) = UnixStream::pair().unwrap();
    let mut bench = Bench::<E>::new();
    for (index, socket) in [(0, &ours), (1, &others)] {
        bench.engine.open(key(index), socket.as_raw_fd(), Reading::Direct);
        bench.engine.receive_direct(key(index), lent(&buffers));
    }
    let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
    bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
    assert_eq!((bench.events.len(), buffers.kept()), (0, 0), "{:?}", bench.events);
    // The connection is released: nobody is told, and the buffer is free once the engine is done.
    if !bench.engine.release(key(0)) {
        assert_eq!(buffers.kept(), 0, "free while the kernel has it");
        bench.wait_for("the end", |events| matches!(events[..], [Event::Released { .. }]));
    }
    assert_eq!(buffers.kept(), 1);
    // The server ends.
    bench.engine.shutdown();
    drop(bench);
    assert_eq!(buffers.kept(), 2);
}

/// A connection that was paused while it was owed a reply stayed for ever with io_uring, when its peer had reset it.
#[test]
fn a_reset_is_reported_while_nothing_is_read() {
    ksf_test::own_network();
    on_each_engine(reset_while_unread::<Epoll>, reset_while_unread::<Uring>);
}

fn reset_while_unread<E: Engine>() {
    const WAYS: [&[Reading]; 5] = [
        &[Reading::Off],
        &[Reading::Off, Reading::On, Reading::Off],
        &[Reading::Parked, Reading::Off],
        &[Reading::Off, Reading::Parked, Reading::On, Reading::Off],
        &[Reading::Direct],
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // What came with a connection may have been received before the engine had it: it is opened unread then.
    let opened = |way| [(way, Reading::On, false), (way, Reading::On, true), (way, Reading::Off, false)];
    for (way, opened, settles) in WAYS.into_iter().flat_map(opened) {
        let (ours, peer) = ksf_test::stream::pair(&listener);
        let mut bench = Bench::<E>::new();
        bench.engine.open(key(0), ours.as_raw_fd(), opened);
        for reading in way {
            if settles {
                let now = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
                bench.engine.wait(&mut bench.env, now, &mut bench.events).unwrap();
            }
            bench.engine.set_reading(key(0), *reading);
        }
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        bench.events.clear();
        bench.wait_for("the reset", |events| events.iter().any(|event| matches!(event, Event::Failed { .. })));
        bench.events.clear();
        if !bench.engine.release(key(0)) {
            bench.wait_for("the end", |events| matches!(events[..], [Event::Released { .. }]));
        }
    }
}

/// A reply of many pieces is one message to the peer, however many calls it takes.
#[test]
fn the_pieces_of_a_batch_leave_in_one_segment() {
    ksf_test::own_network();
    on_each_engine(many_pieces::<Epoll>, many_pieces::<Uring>);
}

fn many_pieces<E: Engine>() {
    const PIECES: u8 = 40;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (ours, mut peer) = ksf_test::stream::pair(&listener);
    ours.set_nodelay(true).unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.open(key(0), ours.as_raw_fd(), Reading::Off);
    let mut output = Output::default();
    for piece in 0..PIECES {
        output.push_chunk(Chunk::from_vec(vec![piece; 100]), &mut bench.env.spares);
    }
    let sent = bench.engine.send(key(0), output.take(), false, &mut bench.env);
    assert_eq!(sent, (usize::from(PIECES) * 100, true));
    let mut got = [0; PIECES as usize * 100];
    peer.read_exact(&mut got).unwrap();
    assert!(got.chunks(100).zip(0..PIECES).all(|(bytes, piece)| bytes == [piece; 100]));
    assert_eq!(data_segments_sent(&ours), 1);
}

/// Segments with bytes that a connection has sent: `tcpi_data_segs_out` (linux/tcp.h), which `libc` does not have.
fn data_segments_sent(socket: &TcpStream) -> u32 {
    const DATA_SEGS_OUT: usize = 156 / 4;
    let mut info = [0_u32; DATA_SEGS_OUT + 1];
    let mut len = mem::size_of_val(&info) as libc::socklen_t;
    let (fd, place) = (socket.as_raw_fd(), info.as_mut_ptr().cast());
    // SAFETY: `info` and `len` live through the call, and the kernel writes at most `len` bytes.
    let result = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, place, &raw mut len) };
    assert_eq!((result, len as usize), (0, mem::size_of_val(&info)));
    info[DATA_SEGS_OUT]
}
