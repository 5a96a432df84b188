//! What the tests share: skipping, network namespaces with a veth between them, CPUs, frames.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use ksf_accel::flow::{CpuMask, Layout, source_port};

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

/// The first two CPUs of this process, for tests about two.
pub(crate) fn two_cpus() -> Option<[usize; 2]> {
    let cpus: Vec<usize> = CpuMask::of_this_thread().unwrap().iter().collect();
    match cpus[..] {
        [first, second, ..] => Some([first, second]),
        _ => {
            say_skipped("needs two CPUs");
            None
        }
    }
}

pub(crate) fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

/// Runs `work` on a thread of its own, in a network namespace of its own with lo up; both end with it.
pub(crate) fn in_new_network<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let name = thread::current().name().map(str::to_owned).unwrap_or_default();
        let builder = thread::Builder::new().name(name);
        let handle = builder.spawn_scoped(scope, || {
            new_network();
            work()
        });
        handle.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn new_network() {
    // SAFETY: changes the network namespace of this thread only, which is new and ends soon.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", io::Error::last_os_error());
    ip("link set lo up");
}

/// `ip` of iproute2, in the network namespace of the calling thread.
pub(crate) fn ip(line: &str) {
    run(Command::new("ip").args(line.split(' ')));
}

pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// A machine on the other end of a veth: a thread in a network namespace of its own that serves echo.
///
/// Here `near` is 10.9.8.1 and fd09::1, there `far` is 10.9.8.2 and fd09::2, port 7.
pub(crate) struct Peer {
    close: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) const NEAR: &str = "near";
pub(crate) const ECHO4: &str = "10.9.8.2:7";
pub(crate) const ECHO6: &str = "[fd09::2]:7";
/// Nobody listens there.
pub(crate) const CLOSED: &str = "10.9.8.2:9";

impl Peer {
    /// Needs a network namespace of the test's own. `checksum_offload`: the peer leaves checksums to the device, as a
    /// veth's end does by default.
    pub(crate) fn start(checksum_offload: bool) -> Self {
        let (ready, is_ready) = mpsc::channel();
        let (close, closed) = mpsc::channel();
        let (tid, is_known) = mpsc::channel();
        let (go, is_linked) = mpsc::channel();
        let thread = thread::spawn(move || {
            new_network();
            tid.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
            if is_linked.recv().is_err() {
                return;
            }
            if !checksum_offload {
                write_checksums("far");
            }
            ip("addr add 10.9.8.2/24 dev far");
            ip("-6 addr add fd09::2/64 dev far nodad");
            ip("link set far up");
            let servers = [TcpListener::bind("0.0.0.0:7"), TcpListener::bind("[fd09::2]:7")].map(Result::unwrap);
            let threads = servers.each_ref().map(|server| {
                let server = server.try_clone().unwrap();
                thread::spawn(move || server.incoming().map_while(Result::ok).for_each(echo))
            });
            ready.send(()).unwrap();
            let _ = closed.recv();
            for (server, thread) in servers.iter().zip(threads) {
                // SAFETY: a descriptor that is open; accept(2) on it ends.
                unsafe { libc::shutdown(server.as_raw_fd(), libc::SHUT_RDWR) };
                thread.join().unwrap();
            }
        });
        let tid = is_known.recv().expect("the peer has a namespace");
        ip(&format!("link add near type veth peer name far netns {tid}"));
        ip("addr add 10.9.8.1/24 dev near");
        ip("-6 addr add fd09::1/64 dev near nodad");
        ip("link set near up");
        go.send(()).unwrap();
        is_ready.recv().expect("the peer serves");
        // Both ends are up when the peer serves; the first packet resolves the address.
        drop(TcpStream::connect(ECHO4).expect("the peer answers"));
        drop(TcpStream::connect(ECHO6).expect("the peer answers"));
        Self { close: Some(close), thread: Some(thread) }
    }
}

/// Has the stack write the checksums of what an interface of this thread's network sends (`ethtool -K IFACE tx off`).
fn write_checksums(interface: &str) {
    /// `struct ethtool_value` and `ETHTOOL_STXCSUM` of linux/ethtool.h.
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value { command: 0x17, data: 0 };
    // SAFETY: an ifreq is numbers and a pointer; zeros are valid for all of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // SAFETY: the request and the value it points to live for the call; the name ends with a zero.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.close.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn echo(mut stream: TcpStream) {
    thread::spawn(move || {
        let mut buf = [0; 4096];
        while let Ok(bytes @ 1..) = stream.read(&mut buf) {
            if stream.write_all(&buf[..bytes]).is_err() {
                return;
            }
        }
    });
}

/// A TCP socket that is not connected.
pub(crate) fn tcp_socket(to: &SocketAddr) -> OwnedFd {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: makes a descriptor of three numbers.
    let socket = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(socket) }
}

/// An address as connect(2) takes it: the bytes and how many of them count.
pub(crate) fn raw_address(to: &SocketAddr) -> ([u8; 28], libc::socklen_t) {
    let mut bytes = [0; 28];
    bytes[2..4].copy_from_slice(&to.port().to_be_bytes());
    let (family, length) = match to {
        SocketAddr::V4(to) => {
            bytes[4..8].copy_from_slice(&to.ip().octets());
            (libc::AF_INET, 16)
        }
        SocketAddr::V6(to) => {
            bytes[8..24].copy_from_slice(&to.ip().octets());
            (libc::AF_INET6, 28)
        }
    };
    bytes[..2].copy_from_slice(&(family as libc::sa_family_t).to_ne_bytes());
    (bytes, length)
}

/// Connects a socket as a program under the preload library does.
pub(crate) fn connect_by_library(layout: &Layout, loopback: bool, socket: RawFd, to: &SocketAddr) -> io::Result<()> {
    let (address, length) = raw_address(to);
    let pointer: *const libc::sockaddr = address.as_ptr().cast();
    // SAFETY: connect(2) with an address that lives for the call.
    let result = unsafe {
        source_port::connect(layout, loopback, socket, pointer, length, || libc::connect(socket, pointer, length))
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One exchange over a connected socket. A reply that does not come fails the test.
pub(crate) fn exchange(stream: &mut TcpStream, bytes: usize) {
    let limit = Some(std::time::Duration::from_secs(10));
    stream.set_read_timeout(limit).unwrap();
    stream.set_nodelay(true).unwrap();
    let sent = vec![b'x'; bytes];
    let mut received = vec![0; bytes];
    stream.write_all(&sent).unwrap();
    stream.read_exact(&mut received).unwrap_or_else(|error| panic!("the echo of {bytes} bytes comes back: {error}"));
    assert_eq!(received, sent);
}

/// The CPU that processed what the socket received last.
pub(crate) fn incoming_cpu(stream: &TcpStream) -> usize {
    let mut cpu = -1i32;
    let mut bytes = size_of_val(&cpu) as libc::socklen_t;
    // SAFETY: the kernel writes at most four bytes to `cpu`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            (&raw mut cpu).cast(),
            &raw mut bytes,
        )
    };
    assert_eq!(result, 0);
    usize::try_from(cpu).expect("something was received")
}

/// Compiles a policy as the example's Makefile does, against the headers as they are installed.
pub(crate) fn compile_policy(source: &Path, flags: &[&str]) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("policy-{}-{number}", std::process::id()));
    ksf_bpf::write_sdk(&folder, &[ksf_accel::flow::SDK]).unwrap();
    let object = folder.join("policy.bpf.o");
    run(Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".into()))
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function"])
        .args(flags)
        .arg("-I")
        .arg(&folder)
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&object));
    object
}
