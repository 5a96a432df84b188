//! Servers on loopback, their counters, and peers that never wait for ever.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::{Message, Peer, Refused, Reply, Server, Service};
use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, unshare_unsafe};

/// Far more than anything here takes: a guard against hanging, not a measure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The engines of this machine. Without io_uring (a container, a sysctl) half of the tests' meaning is gone, so CI
/// must have it.
pub fn engines() -> Vec<EngineKind> {
    let mut engines = vec![EngineKind::Epoll];
    // On another thread: the end of the ring it tries interrupts system calls of the thread that made it.
    match std::thread::spawn(|| EngineKind::Uring.probe()).join().unwrap() {
        Ok(()) => engines.push(EngineKind::Uring),
        Err(error) => skip("io_uring", &error.to_string()),
    }
    engines
}

/// Says that something is not tested here; in CI that is a failure.
pub fn skip(what: &str, why: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: needs {what} ({why})");
    // Not by `println!`, which the test runner hides of a test that passes.
    let thread = std::thread::current();
    let line = format!("skipped: {}: needs {what} ({why})\n", thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}

/// Gives this test, and every thread and process it starts from now on, a network namespace with nothing but a loopback
/// device in its first state: no port is taken, no sysctl or firewall of the machine plays a part. Without
/// CAP_SYS_ADMIN the test runs on the machine's own loopback. The namespace ends with its last thread and socket.
pub fn own_network() {
    if !may_have_networks() {
        return;
    }
    // SAFETY: changes the network namespace of this thread only, no memory and no descriptor.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    let status = Command::new("ip").args(["link", "set", "lo", "up"]).status().expect("ip (iproute2) starts");
    assert!(status.success(), "ip link set lo up: {status}");
}

fn may_have_networks() -> bool {
    capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN)
}

/// Fails in a test that has forgotten `own_network`, which would pass here and not on a machine set up otherwise.
fn assert_own_network() {
    let network = |task: &str| std::fs::read_link(format!("/proc/{task}/ns/net")).unwrap();
    // The main thread, which runs no test, has the network this process was started in. That of a helper is its test's.
    let own = network("thread-self") != network("self");
    assert!(own || is_helper() || !may_have_networks(), "a test on sockets begins with own_network()");
}

/// Sends back what comes.
pub struct Echo;

impl Service for Echo {
    type Conn = ();

    fn name(&self) -> &str {
        "echo"
    }

    fn framing(&self) -> Framing {
        Framing::Raw
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.chunk(message.keep());
    }
}

/// One shard, so that counts are exact and places are reused in a known order.
pub fn one_shard<S: Service>(engine: EngineKind, addr: &str, limits: Limits, service: Arc<S>) -> Server {
    assert_own_network();
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let addr = addr.parse().unwrap();
    Server::builder().engine(engine).cpus(Some(cpus)).limits(limits).listen(addr, service, None).start().unwrap()
}

/// A shard on every CPU.
pub fn all_shards<S: Service>(engine: EngineKind, addr: &str, limits: Limits, service: Arc<S>) -> Server {
    assert_own_network();
    Server::builder().engine(engine).limits(limits).listen(addr.parse().unwrap(), service, None).start().unwrap()
}

pub const ANY: &str = "tcp:127.0.0.1:0";

pub fn addr(server: &Server) -> SocketAddr {
    match server.listeners()[0].addr {
        ListenAddr::Tcp(addr) | ListenAddr::Udp(addr) => addr,
        _ => panic!("no port"),
    }
}

pub fn connect(server: &Server) -> TcpStream {
    connect_to(addr(server))
}

pub fn connect_to(addr: SocketAddr) -> TcpStream {
    assert_own_network();
    let peer = TcpStream::connect(addr).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.set_write_timeout(Some(PATIENCE)).unwrap();
    peer.set_nodelay(true).unwrap();
    peer
}

/// Closes with a reset instead of an end of stream.
pub fn reset(peer: TcpStream) {
    socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Asserts that `request` is answered by `reply`.
pub fn ask(peer: &mut TcpStream, request: &[u8], reply: &[u8]) {
    peer.write_all(request).unwrap();
    expect(peer, reply);
}

/// Asserts that these bytes come next.
pub fn expect(peer: &mut impl Read, reply: &[u8]) {
    let mut got = vec![0; reply.len()];
    peer.read_exact(&mut got).unwrap_or_else(|error| panic!("no {:?}: {error}", String::from_utf8_lossy(reply)));
    assert!(got == reply, "{:?} instead of {:?}", String::from_utf8_lossy(&got), String::from_utf8_lossy(reply));
}

/// Asserts that the server resets the connection.
pub fn expect_reset(peer: &mut impl Read) {
    let error = peer.read_to_end(&mut Vec::new()).expect_err("a reset, and no orderly end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Asserts that the server closes, now and without a reset.
pub fn expect_end(peer: &mut impl Read) {
    let mut rest = Vec::new();
    match peer.read_to_end(&mut rest) {
        Ok(0) => {}
        other => panic!("{other:?} ({rest:?}) instead of the end of the stream"),
    }
}

pub fn count(server: &Server, name: &str) -> u64 {
    let counters = server.counters();
    counters.iter().find(|counter| counter.name == name).unwrap_or_else(|| panic!("no counter {name}")).value
}

/// Looks again and again until `done`: for what a server says only in its counters.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        // Not to synchronise: to leave the CPU to whom we wait for.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a counter has this value, and fails if it is past it.
pub fn until_count(server: &Server, name: &str, value: u64) {
    until(name, || count(server, name) >= value);
    assert_eq!(count(server, name), value, "{name}");
}

/// Bytes that tell every place from its neighbours.
pub fn pattern(length: usize) -> Vec<u8> {
    let mut random = ksf_sim::random::Random::new(length as u64);
    (0..length).map(|_| random.bits() as u8).collect()
}

/// Runs an ignored test of this same file in a process of its own, which talks through its standard input and output.
pub struct Helper {
    child: Child,
    input: ChildStdin,
    output: std::io::BufReader<ChildStdout>,
}

impl Helper {
    pub fn start(test: &str, env: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
            .envs(env.iter().map(|(name, value)| (name, value)))
            .env(HELPER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// The next line it says to us (its test harness talks on the same stream).
    pub fn hear(&mut self) -> String {
        use std::io::BufRead;
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the helper process ended early");
            if let Some((_, said)) = line.split_once("helper: ") {
                return said.trim().to_owned();
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub const HELPER: &str = "KSF_TEST_HELPER";

/// False when an ignored test is run by hand: it is only a part of another one.
pub fn is_helper() -> bool {
    std::env::var_os(HELPER).is_some()
}

/// Says a line to the process that started this one.
pub fn say(line: impl std::fmt::Display) {
    println!("helper: {line}");
    std::io::stdout().flush().unwrap();
}

/// What it says to us; `None` when it is gone.
pub fn listen() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).unwrap();
    (read > 0).then(|| line.trim().to_owned())
}

/// Lets this process have `files` descriptors, if the administrator does.
pub fn raise_files(files: u64) -> Result<(), String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= files) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(files));
    // Beyond the hard limit only where we are privileged.
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum })
        .map_err(|error| format!("RLIMIT_NOFILE {files}, hard limit {:?}: {error}", limit.maximum))
}

/// True when the descriptor is in non-blocking mode.
pub fn is_nonblocking(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK)
}
