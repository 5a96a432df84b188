//! What the tests share: networks of their own, and a program that speaks the library's side of the protocol.

#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread;

use ksf_accel::{AccelOptions, Holder, Level, Started};
use ksf_accel_proto::message::{ANSWER_BYTES, Answer, NO_WORKER, Refusal, Request};
use ksf_accel_proto::state::{State, VERSION, Worker};
pub(crate) use ksf_test::*;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

/// A network namespace of the test's own; `None`: the test is skipped.
pub(crate) fn own_network() -> Option<()> {
    own_network_or_skip("a network namespace, sk_lookup")
}

/// The same, and the first two CPUs.
pub(crate) fn network_on_two_cpus() -> Option<[usize; 2]> {
    network_on_two_cpus_or_skip("a network namespace, sk_lookup")
}

pub(crate) fn options() -> AccelOptions {
    options_in(folder())
}

pub(crate) fn options_in(folder: PathBuf) -> AccelOptions {
    let mut options = AccelOptions::default();
    // Workers of tests let connections wait, which is not to be taken for a stall.
    options.look_ms = 1000;
    options.status_folder = Some(folder);
    options
}

pub(crate) fn start() -> Started {
    start_with(|_| {})
}

/// A holder in a network namespace of the test's own, and a program that has joined; `None`: the test is skipped.
pub(crate) fn begin() -> Option<(Started, Library)> {
    own_network()?;
    let holder = start();
    let library = Library::hello(&holder);
    Some((holder, library))
}

pub(crate) fn start_with(change: impl FnOnce(&mut AccelOptions)) -> Started {
    let mut options = options();
    change(&mut options);
    Holder::start(options).expect("a holder starts")
}

pub(crate) fn start_at(level: Level) -> Started {
    let holder = start_with(|options| {
        options.level = Some(level);
        if level == Level::ClassicBpf {
            // It is told who is ready at a look.
            options.look_ms = 100;
        }
    });
    assert_eq!(holder.level(), level, "{:?}", holder.refused());
    holder
}

/// The library's side of a connection to the holder.
pub(crate) struct Library {
    pub(crate) socket: OwnedFd,
    state: *const State,
    pub(crate) lifetime: Option<OwnedFd>,
}

// SAFETY: the state is shared memory of atomics.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// A worker as the library has it.
pub(crate) struct JoinedWorker {
    pub(crate) listener: u32,
    pub(crate) worker: u32,
    pub(crate) cpu: i32,
    pub(crate) generation: u32,
    pub(crate) queue: TcpListener,
    pub(crate) rescue: OwnedFd,
}

impl Library {
    pub(crate) fn hello(holder: &Started) -> Self {
        Self::hello_to(holder.name(), holder.token())
    }

    pub(crate) fn hello_to(name: &str, token: [u8; 16]) -> Self {
        Self::hello_as(name, token, 0)
    }

    /// `begins`: 1 as a library does that has just been loaded.
    pub(crate) fn hello_as(name: &str, token: [u8; 16], begins: u32) -> Self {
        Self::try_hello_as(name, token, begins).expect("the holder answers")
    }

    /// `None`: the holder has hung up.
    pub(crate) fn try_hello_as(name: &str, token: [u8; 16], begins: u32) -> Option<Self> {
        let socket = connect(name);
        let hello = Request::Hello { version: VERSION, token, pid: std::process::id(), begins };
        let (answer, files) = ask(socket.as_fd(), &hello.encode(), &[])?;
        assert!(matches!(answer, Answer::Done { .. }), "{answer:?}");
        let [state, lifetime]: [OwnedFd; 2] = files.try_into().expect("state and lifetime");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of a descriptor that holds a `State`.
        let state = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size_of::<State>(), protection, MapFlags::SHARED, &state, 0).unwrap()
        };
        Some(Self { socket, state: state.cast(), lifetime: Some(lifetime) })
    }

    /// What a child of this process has in its memory.
    pub(crate) fn secret(&self) -> [u8; 16] {
        let mut secret = [0; 16];
        let lifetime = self.lifetime.as_ref().expect("not taken");
        assert_eq!(rustix::io::pread(lifetime, &mut secret, 0), Ok(16));
        secret
    }

    pub(crate) fn state(&self) -> &State {
        // SAFETY: mapped by `hello_to`, never unmapped.
        unsafe { &*self.state }
    }

    pub(crate) fn worker(&self, index: u32) -> &Worker {
        &self.state().workers[index as usize]
    }

    pub(crate) fn ask(&self, request: Request, files: &[BorrowedFd<'_>]) -> (Answer, Vec<OwnedFd>) {
        ask(self.socket.as_fd(), &request.encode(), files).expect("the holder answers")
    }

    /// As the library does after `listen()`.
    pub(crate) fn listen(&self, listener: &TcpListener) -> Result<u32, Refusal> {
        let request = Request::Listen { cookie: cookie(listener), backlog: 128 };
        match self.ask(request, &[listener.as_fd()]).0 {
            Answer::Done { listener, .. } => Ok(listener),
            Answer::Refused { reason } => Err(reason),
        }
    }

    /// As the library does when an epoll instance begins to watch the listener; the ready bit is not set.
    pub(crate) fn join(&self, listener: &TcpListener, worker: u32, cpu: i32) -> Result<JoinedWorker, Refusal> {
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let request = Request::Join { cookie: cookie(listener), worker, tid, cpu };
        match self.ask(request, &[listener.as_fd()]) {
            (Answer::Done { listener, worker, cpu, generation, .. }, files) => {
                let [queue, rescue]: [OwnedFd; 2] = files.try_into().expect("queue and eventfd");
                Ok(JoinedWorker { listener, worker, cpu, generation, queue: queue.into(), rescue })
            }
            (Answer::Refused { reason }, _) => Err(reason),
        }
    }

    /// A new worker at home on a CPU, ready.
    pub(crate) fn ready(&self, listener: &TcpListener, cpu: i32) -> JoinedWorker {
        let place = self.join(listener, NO_WORKER, cpu).expect("a place");
        self.set_ready(&place, true);
        place
    }

    pub(crate) fn set_ready(&self, place: &JoinedWorker, ready: bool) {
        let bits = &self.worker(place.worker).ready;
        if ready {
            bits.fetch_or(1 << place.listener, SeqCst);
        } else {
            bits.fetch_and(!(1 << place.listener), SeqCst);
        }
    }

    /// Busy since so many milliseconds.
    pub(crate) fn set_busy(&self, place: &JoinedWorker, ms: u64) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        self.worker(place.worker).busy_since_ns.store(now - ms * 1_000_000, SeqCst);
    }

    pub(crate) fn leave(&self, cookie: u64, worker: u32, closed: bool) -> Answer {
        self.ask(Request::Leave { cookie, worker, closed: closed.into() }, &[]).0
    }

    /// The queue that the holder offers.
    pub(crate) fn steal(&self, own: &TcpListener, worker: u32) -> Option<(u32, TcpListener)> {
        match self.ask(Request::Steal { cookie: cookie(own), worker }, &[own.as_fd()]) {
            (Answer::Done { found: 1, worker, .. }, files) => {
                Some((worker, files.into_iter().next().expect("a queue").into()))
            }
            (Answer::Done { .. }, _) => None,
            (refused, _) => panic!("{refused:?}"),
        }
    }

    /// Accepts all that wait in the own queue.
    pub(crate) fn accept_own(&self, place: &JoinedWorker) -> Vec<TcpStream> {
        let streams = accept_all(&place.queue);
        self.worker(place.worker).accepted_own.fetch_add(streams.len() as u64, Relaxed);
        streams
    }
}

/// Does `work` as another user, in this process and network namespace. The kernel has a user for each thread; libc's call
/// would change them all.
pub(crate) fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    let change = move || {
        // SAFETY: numbers; the thread ends with the work.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        work()
    };
    thread::scope(|scope| scope.spawn(change).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A user that has nothing to do with the program.
pub(crate) const STRANGER: u32 = 65534;

/// All connections of 20 reach a listener of another user.
pub(crate) fn takes_all(address: SocketAddr) {
    as_user(STRANGER, || {
        let mut theirs = None;
        wait_until("the port is free", || {
            theirs = TcpListener::bind(address).ok();
            theirs.is_some()
        });
        let theirs = theirs.unwrap();
        theirs.set_nonblocking(true).unwrap();
        let (v4, v6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
        let reached = match address.ip() {
            ip if !ip.is_unspecified() => vec![ip],
            IpAddr::V4(_) => vec![v4],
            // Its sockets are for both.
            IpAddr::V6(_) => vec![v4, v6],
        };
        for ip in reached {
            let _clients = connect_from(cpus()[0], SocketAddr::new(ip, address.port()), 20);
            assert_eq!(accept_all(&theirs).len(), 20, "{address} by {ip}");
        }
    });
}

/// Hello with a token: the answer, and the descriptors that come with it.
pub(crate) fn hello_with(name: &str, token: [u8; 16]) -> (OwnedFd, Answer, Vec<OwnedFd>) {
    let socket = connect(name);
    let hello = Request::Hello { version: VERSION, token, pid: std::process::id(), begins: 0 };
    let (answer, files) = ask(socket.as_fd(), &hello.encode(), &[]).expect("the holder answers");
    (socket, answer, files)
}

/// Another process of the program, which joins `workers` times, with all of them ready. [`wait_for_workers`] says when it
/// has.
pub(crate) fn joins(holder: &Started, listener: &TcpListener, cpu: i32, workers: usize) -> Running {
    let mut command = Helper::command("common::helper_joins");
    command.env("HOLDER", holder.environment()).env("JOINS", format!("{cpu} {workers}"));
    Running::start(command.stdin(OwnedFd::from(listener.try_clone().unwrap())).stdout(Stdio::null()))
}

#[test]
#[ignore = "a part of other tests"]
fn helper_joins() {
    if !is_helper() {
        return;
    }
    // SAFETY: no memory is involved. Ends with the thread of the test that has started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let library = hello_by_environment();
    let listener = TcpListener::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let joins = std::env::var("JOINS").unwrap();
    let (cpu, workers) = joins.split_once(' ').unwrap();
    let _places: Vec<JoinedWorker> =
        (0..workers.parse().unwrap()).map(|_: usize| library.ready(&listener, cpu.parse().unwrap())).collect();
    thread::park();
}

/// The workers of the program, as soon as there are so many and all are ready.
pub(crate) fn wait_for_workers(holder: &Started, count: usize) -> Vec<ksf_accel::status::WorkerStatus> {
    let mut workers = Vec::new();
    wait_until("the workers are there", || {
        workers = holder.status().unwrap().workers;
        workers.len() == count && workers.iter().all(|worker| !worker.ready.is_empty())
    });
    workers
}

pub(crate) fn hello_by_environment() -> Library {
    let address = std::env::var("HOLDER").unwrap();
    let (name, token) = address.rsplit_once(':').unwrap();
    let token = u128::from_str_radix(token, 16).unwrap().to_be_bytes();
    Library::hello_to(name, token)
}

pub(crate) fn connect(name: &str) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    socket
}

pub(crate) fn say(socket: BorrowedFd<'_>, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    rustix::net::sendmsg(socket, &[io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// `None`: the holder has hung up.
pub(crate) fn ask(socket: BorrowedFd<'_>, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Option<(Answer, Vec<OwnedFd>)> {
    say(socket, bytes, files).ok()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut answer = [0; ANSWER_BYTES];
    let mut parts = [io::IoSliceMut::new(&mut answer)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    if got.bytes == 0 {
        return None;
    }
    let mut received = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            received.extend(rights);
        }
    }
    Some((Answer::decode(&answer).expect("an answer"), received))
}

pub(crate) fn cookie(socket: impl AsFd) -> u64 {
    sockopt::socket_cookie(socket).unwrap()
}

/// A listener of the program, non-blocking.
pub(crate) fn listener(address: &str) -> TcpListener {
    let listener = TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    listener.set_nonblocking(true).unwrap();
    listener
}

/// As [`listener`], with a change before `bind()`.
pub(crate) fn listener_with(address: &str, backlog: i32, change: impl FnOnce(&socket2::Socket)) -> TcpListener {
    let address: SocketAddr = address.parse().unwrap();
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    change(&socket);
    socket.bind(&address.into()).unwrap_or_else(|error| panic!("{address}: {error}"));
    socket.listen(backlog).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

/// All that wait in a queue now.
pub(crate) fn accept_all(queue: &TcpListener) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    loop {
        match queue.accept() {
            Ok((stream, _)) => streams.push(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return streams,
            Err(error) => panic!("accept(): {error}"),
        }
    }
}

/// Connects from one CPU, so often. The namespace is the calling thread's.
pub(crate) fn connect_from(cpu: usize, address: SocketAddr, count: usize) -> Vec<TcpStream> {
    on_cpu(cpu, || (0..count).map(|_| TcpStream::connect_timeout(&address, PATIENCE).expect("connected")).collect())
}

/// The process that says its id to everybody.
pub(crate) fn pid_of(mut stream: TcpStream) -> Option<u32> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut pid = [0; 4];
    stream.read_exact(&mut pid).ok()?;
    Some(u32::from_ne_bytes(pid))
}

/// Connects `count` times from a CPU: the processes that serve the connections, and how many each serves.
pub(crate) fn servers_from(cpu: usize, address: SocketAddr, count: usize) -> BTreeMap<u32, usize> {
    let mut servers = BTreeMap::new();
    for stream in connect_from(cpu, address, count) {
        *servers.entry(pid_of(stream).expect("served")).or_default() += 1;
    }
    servers
}

pub(crate) fn readable(fd: impl AsFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
}

/// Listening TCP sockets of this thread's network namespace.
pub(crate) fn listening_sockets() -> usize {
    let tables =
        ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap());
    tables.iter().flat_map(|table| table.lines()).filter(|line| line.contains(" 0A ")).count()
}
