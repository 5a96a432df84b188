//! What the tests share: skipping, network namespaces, connections, bytes that tell their place.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ksf_hop::{Hop, Options, Scope};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longer than anything takes on a loaded machine; reaching it is a failure, never an expectation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Says that a test does not run; in CI a skip is a failure.
pub(crate) fn say_skipped(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: {why}");
    let thread = thread::current();
    let line = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}

/// True when the test may run; says that it is skipped when not.
pub(crate) fn is_root() -> bool {
    let may = ksf_bpf::missing_capabilities().is_empty();
    if !may {
        say_skipped("needs root (eBPF, network namespaces)");
    }
    may
}

/// Runs `work` on a thread of its own, in a network namespace of its own with lo up; both end with it.
pub(crate) fn in_new_network<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let name = thread::current().name().map(str::to_owned).unwrap_or_default();
        let handle = thread::Builder::new().name(name).spawn_scoped(scope, || {
            // SAFETY: changes the network namespace of this thread only, which is new and ends soon.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", io::Error::last_os_error());
            ip("link set lo up");
            work()
        });
        handle.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// `ip` of iproute2, in the network namespace of the calling thread.
pub(crate) fn ip(line: &str) {
    let output = Command::new("ip").args(line.split(' ')).output().unwrap_or_else(|error| panic!("ip: {error}"));
    assert!(output.status.success(), "ip {line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Nobody here reads by splice() or asks by FIONREAD, but where a test says so.
pub(crate) fn options() -> Options {
    let mut options = Options::default();
    options.no_splice = true;
    options.no_fionread = true;
    options
}

/// Joins the connections of one port.
pub(crate) fn start(port: u16) -> Hop {
    start_with(port, &options())
}

pub(crate) fn start_with(port: u16, options: &Options) -> Hop {
    let scope = Scope { ports: vec![port], ..Scope::default() };
    Hop::start(&scope, options).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn count(hop: &Hop, name: &str) -> u64 {
    let counters = hop.counters().unwrap();
    counters.iter().find(|counter| counter.name == name).unwrap_or_else(|| panic!("no counter {name}")).value
}

pub(crate) fn listen(address: &str) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// A connection with both ends here: who connected, and who was connected to.
pub(crate) fn connect(listener: &TcpListener, to: SocketAddr) -> (TcpStream, TcpStream) {
    let one = TcpStream::connect(to).unwrap();
    let (other, _) = listener.accept().unwrap();
    for end in [&one, &other] {
        end.set_nonblocking(true).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (one, other)
}

/// A message in each direction: what a direction must have done by TCP before it may leave it.
pub(crate) fn warm_up(one: &mut TcpStream, other: &mut TcpStream) {
    write(one, b"!");
    assert_eq!(read(other, 1), b"!");
    write(other, b"!");
    assert_eq!(read(one, 1), b"!");
}

/// `size` bytes of a stream that tells its place.
pub(crate) fn pattern(from: usize, size: usize) -> Vec<u8> {
    (from..from + size).map(|place| (place ^ place >> 8 ^ place >> 16) as u8).collect()
}

/// Writes all, waiting where the peer is slow.
pub(crate) fn write(stream: &mut TcpStream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::OUT),
            Err(error) => panic!("send: {error}"),
        }
    }
}

/// As many bytes, or less if the stream ends.
pub(crate) fn read(stream: &mut TcpStream, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    let mut filled = 0;
    while filled < size {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(received) => filled += received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::IN),
            Err(error) => panic!("recv: {error}"),
        }
    }
    bytes.truncate(filled);
    bytes
}

/// What is there, at most `size` bytes; nothing if the stream ends.
pub(crate) fn read_some(stream: &mut TcpStream, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    loop {
        match stream.read(&mut bytes) {
            Ok(received) => {
                bytes.truncate(received);
                return bytes;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::IN),
            Err(error) => panic!("recv: {error}"),
        }
    }
}

/// Both directions at once, with readers that are faster and slower than the writers.
pub(crate) fn both_directions(one: &TcpStream, other: &TcpStream, total: usize, seed: u64) {
    let read = [AtomicUsize::new(0), AtomicUsize::new(0)];
    thread::scope(|scope| {
        for (number, from, to) in [(0, one, other), (1, other, one)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let read = &read[number as usize];
            scope.spawn(move || send_stream(&mut from, total, seed + number, read));
            scope.spawn(move || receive_stream(&mut to, total, seed + 2 + number, read));
        }
    });
}

pub(crate) fn wait(stream: &TcpStream, what: PollFlags) {
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let mut ends = [PollFd::new(stream, what)];
    match poll(&mut ends, Some(&patience)) {
        Ok(0) => panic!("nothing happens for {PATIENCE:?} ({what:?})"),
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => panic!("poll: {error}"),
    }
}

/// xorshift64: the same numbers for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// Sends `total` bytes in pieces of random sizes; now and then waits until all of them were read.
pub(crate) fn send_stream(stream: &mut TcpStream, total: usize, seed: u64, read: &AtomicUsize) {
    let mut random = Random(seed);
    let mut sent = 0;
    while sent < total {
        let piece = match random.below(20) {
            0 => 1,
            1..=15 => 1 + random.below(3000),
            16..=18 => 1 + random.below(40_000),
            _ => 1 + random.below(300_000),
        };
        let piece = piece.min(total - sent);
        write(stream, &pattern(sent, piece));
        sent += piece;
        if random.below(8) == 0 {
            until("everything is read", || read.load(Ordering::Acquire) == sent);
        }
    }
}

/// Waits for something that another thread or process does.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "not after {PATIENCE:?}: {what}");
        thread::yield_now();
    }
}

/// Receives `total` bytes by buffers of random sizes, at times slowly, and compares each.
pub(crate) fn receive_stream(stream: &mut TcpStream, total: usize, seed: u64, progress: &AtomicUsize) {
    let mut random = Random(seed);
    let mut received = 0;
    while received < total {
        let some = read_some(stream, (1 + random.below(50_000)).min(total - received));
        assert!(!some.is_empty(), "the stream ends after {received} of {total} bytes");
        // Not by assert_eq!, which would print both.
        assert!(some == pattern(received, some.len()), "bytes {received} to {} are others", received + some.len());
        received += some.len();
        progress.store(received, Ordering::Release);
        if random.below(4) == 0 {
            thread::yield_now();
        }
    }
}
