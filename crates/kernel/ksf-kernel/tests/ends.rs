//! How connections end, as their peers see it: soon after the server decided it, on every engine, also for a peer that goes on
//! sending.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::rig::*;
use ksf::assist::Assist;
use ksf::engine::EngineKind;
use ksf::error::CloseReason;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::Builder;
use ksf::stats::{self, CounterValue, Stats};
use ksf::{Message, Peer, Profile, Refused, Reply, Server, Service, Turn, Unlogged, WorkerService};
use ksf_kernel::KernelService;
use ksf_mux::{Workers, WorkersOptions};
use ksf_services::{echo::Echo, rpc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

/// What makes a connection end.
struct Way {
    what: &'static str,
    /// What the peer sends.
    sends: Vec<u8>,
    /// What it sends on, without an end.
    goes_on: Vec<u8>,
    reads: bool,
    /// The peers whose connections end connect after others.
    connects_late: bool,
    by: By,
    limits: Limits,
    /// What is counted, where the server lives on to tell.
    reason: Option<CloseReason>,
}

/// Who ends it.
#[derive(Clone, Copy)]
enum By {
    Limits,
    Refusal,
    Panic,
    /// The service, in a message.
    HangUp,
    /// The same by a deferred reply that it drops.
    Forget,
    Server(fn(Ending)),
    /// Of a process of its own.
    Kill,
    /// The same of one that has stopped before its peers sent as much as they can.
    KillWhenFull,
}

/// A service that ends connections when it is told to.
struct Awkward<S> {
    inner: S,
    acts: Arc<Acts>,
}

#[derive(Default)]
struct Acts(Mutex<Option<By>>);

impl Acts {
    fn now(&self) -> Option<By> {
        *self.0.lock().unwrap()
    }
}

impl<S: Service<Shard = (), Conn = (), Mode = Unlogged>> Service for Awkward<S> {
    type Shard = ();
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        self.inner.profile()
    }

    fn start(&self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.inner.start(turn)
    }

    fn accept(&self, shard: &mut (), peer: &Peer) -> Result<(), Refused> {
        if matches!(self.acts.now(), Some(By::Refusal)) { Err(Refused) } else { self.inner.accept(shard, peer) }
    }

    fn call(&self, shard: &mut (), conn: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        match self.acts.now() {
            Some(By::Panic) => panic!("it was told to"),
            Some(By::HangUp) => reply.close(),
            Some(By::Forget) => drop(reply.defer()),
            _ => self.inner.call(shard, conn, message, reply),
        }
    }
}

/// The part that answers the messages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Answering {
    Shards,
    /// As many as it can; the others are for the shards.
    KernelHalf,
    Workers,
}

impl Answering {
    const ALL: [Self; 3] = [Self::Shards, Self::KernelHalf, Self::Workers];
}

/// A server on a base engine.
enum Ending {
    Here { server: Server, kernel: Option<KernelService>, acts: Arc<Acts>, address: SocketAddr },
    Apart { server: Helper, address: SocketAddr },
}

impl Ending {
    fn start(spoken: Spoken, engine: EngineKind, answering: Answering, limits: Limits) -> Self {
        let shards = ksf::cpus::choose(None).unwrap().len() as u32;
        let kernel = (answering == Answering::KernelHalf)
            .then(|| load_with(spoken.builtin(), |options| options.shards = shards));
        let assist = kernel.as_ref().map(|kernel| Arc::new(kernel.assist()) as Arc<dyn Assist>);
        let acts = Arc::<Acts>::default();
        let listen = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
        let builder = Server::builder().engine(engine).limits(limits.clone());
        let workers = (answering == Answering::Workers).then(|| WorkersOptions::new(2, limits));
        let awkward_echo = Arc::new(Awkward { inner: Echo, acts: Arc::clone(&acts) });
        let builder = match spoken {
            Spoken::Echo => serve(builder, listen, awkward_echo, assist, workers),
            Spoken::Rpc => {
                let mut table = rpc::ProgramTable::new();
                table.register(rpc::Program::NFS_V3).unwrap();
                let inner = rpc::NullService::new("rpc", table);
                serve(builder, listen, Arc::new(Awkward { inner, acts: Arc::clone(&acts) }), assist, workers)
            }
        };
        let server = builder.start().unwrap();
        let listener = &server.listeners()[0];
        assert_eq!(listener.assisted, kernel.is_some());
        let ListenAddr::Tcp(address) = listener.addr else { panic!("no port") };
        Self::Here { server, kernel, acts, address }
    }

    fn start_apart(spoken: Spoken, engine: EngineKind, answering: Answering) -> Self {
        let plan = format!("{} {engine} {answering:?}", spoken.name());
        let mut server = Helper::start("ends::helper_serves", &[(PLAN, plan)]);
        let address = server.hear().parse().unwrap();
        Self::Apart { server, address }
    }

    fn address(&self) -> SocketAddr {
        let (Self::Here { address, .. } | Self::Apart { address, .. }) = self;
        *address
    }

    /// From now on connections end in this way.
    fn change(&self, way: &Way) {
        let Self::Here { server, acts, .. } = self else { return };
        *acts.0.lock().unwrap() = Some(way.by);
        server.set_limits(&way.limits.clone().into());
    }

    fn drain(self) {
        let Self::Here { server, kernel, .. } = self else { panic!("no server of this process") };
        server.drain().unwrap();
        drop(kernel);
    }
}

/// By the shards, unless there are workers.
fn serve<S: WorkerService>(
    builder: Builder,
    listen: ListenAddr,
    service: Arc<S>,
    assist: Option<Arc<dyn Assist>>,
    workers: Option<WorkersOptions>,
) -> Builder {
    let workers = workers.map(|options| Workers::start(Arc::clone(&service), options).unwrap());
    let builder = builder.listen(listen, service, assist);
    match workers {
        Some(workers) => builder.adopt(workers),
        None => builder,
    }
}

const PLAN: &str = "KSF_TEST_SERVER";

/// Serves until it is killed, or its starter is gone.
#[test]
#[ignore = "the server that is killed"]
fn helper_serves() {
    if !is_helper() {
        return;
    }
    let plan = std::env::var(PLAN).unwrap();
    let [spoken, engine, answering] = plan.split(' ').collect::<Vec<_>>()[..] else { panic!("{plan}") };
    let engine = engines().into_iter().find(|kind| kind.name() == engine).unwrap();
    let spoken = Spoken::from_name(spoken).unwrap();
    let answering = Answering::ALL.into_iter().find(|one| format!("{one:?}") == answering).unwrap();
    let server = Ending::start(spoken, engine, answering, Limits::default());
    say(server.address());
    listen();
}

const PEERS: usize = 4;

/// Of the limits below, each of which ends a connection within a second.
const LIMIT_MS: u64 = 200;

fn ways(spoken: Spoken) -> Vec<Way> {
    let call = || spoken.request(1);
    let load = call().repeat(1_000);
    let limits = Limits { linger_timeout_ms: LIMIT_MS, drain_timeout_ms: LIMIT_MS, ..Limits::default() };
    let way = |what, sends: &[u8], goes_on: &[u8]| Way {
        what,
        sends: sends.to_vec(),
        goes_on: goes_on.to_vec(),
        reads: true,
        connects_late: false,
        by: By::Limits,
        limits: limits.clone(),
        reason: None,
    };
    let by = |by, way: Way| Way { by, ..way };
    let counts = |reason, way: Way| Way { reason: Some(reason), ..way };
    let late = |way: Way| Way { connects_late: true, ..way };
    let unread = |way: Way| Way { reads: false, ..way };
    let slow_peer = Limits { send_timeout_ms: LIMIT_MS, ..limits.clone() };
    let idle = Limits { idle_timeout_ms: LIMIT_MS, ..limits.clone() };
    let crowded = Limits { connections_max: PEERS, ..limits.clone() };
    let mut ways = vec![
        counts(
            CloseReason::SendTimeout,
            Way { limits: slow_peer, ..unread(way("replies that are not read", &[], &load)) },
        ),
        counts(CloseReason::IdleTimeout, Way { limits: idle, ..way("nothing more", &[], &[]) }),
        Way { limits: crowded.clone(), ..late(way("too many connections", &[], &[])) },
        Way { limits: crowded, ..late(way("too many connections under load", &[], &load)) },
        by(By::Refusal, late(way("a refusal", &[], &[]))),
        by(By::Refusal, late(way("a refusal under load", &[], &load))),
        counts(CloseReason::Panicked, by(By::Panic, way("a panic", &[], &load))),
        counts(CloseReason::Service, by(By::HangUp, way("an end by the service", &[], &load))),
        counts(CloseReason::Abandoned, by(By::Forget, way("a reply that never comes", &[], &load))),
        counts(CloseReason::Drained, by(By::Server(Ending::drain), way("a drain", &[], &[]))),
        by(By::Server(Ending::drain), way("a drain under load", &[], &load)),
        counts(CloseReason::Stopped, by(By::Server(drop), way("the end of the server", &[], &[]))),
        by(By::Server(drop), way("the end of the server under load", &[], &load)),
        by(By::Server(drop), unread(way("the end of the server with unread replies", &[], &load))),
        by(By::Kill, way("a kill", &[], &[])),
        by(By::Kill, way("a kill under load", &[], &load)),
        by(By::Kill, unread(way("a kill with unread replies", &[], &load))),
        by(By::KillWhenFull, way("a kill behind a full window", &[], &load)),
    ];
    if spoken == Spoken::Rpc {
        let (endless, zeros) = (u32::MAX.to_be_bytes(), [0; 64 << 10]);
        let part = [&(0x8000_0000_u32 | (100 << 10)).to_be_bytes()[..], &[0; 20 << 10]].concat();
        let slow = Limits { assembly_timeout_ms: LIMIT_MS, ..limits.clone() };
        let short = Limits { assembly_bytes_max: 1 << 10, pressure_timeout_ms: LIMIT_MS, ..limits.clone() };
        ways.extend([
            counts(CloseReason::OversizedMessage, way("a record that is too long", &endless, &[])),
            counts(CloseReason::OversizedMessage, way("a record that is too long, on and on", &endless, &zeros)),
            counts(CloseReason::EndlessFragments, way("too many fragments", &[], &[0, 0, 0, 1, 7].repeat(10_000))),
            counts(
                CloseReason::AssemblyTimeout,
                Way { limits: slow.clone(), ..way("a record that stops", &call()[..20], &[]) },
            ),
            counts(
                CloseReason::AssemblyTimeout,
                Way { limits: slow, ..way("a call that stops in its mark", &[0x80, 0], &[]) },
            ),
            counts(
                CloseReason::MemoryLimit,
                Way { limits: short, ..late(way("no memory for a record that stops", &part, &[])) },
            ),
            counts(
                CloseReason::DrainTimeout,
                by(By::Server(Ending::drain), way("a drain in a record", &call()[..20], &[])),
            ),
            by(By::Server(drop), way("the end of the server in a record", &call()[..20], &[])),
            by(By::Kill, way("a kill in a record", &call()[..20], &[])),
        ]);
    }
    ways
}

/// True if the server has closed its end, and what is left of that in the kernel waits for this peer's, for a minute.
fn is_forgotten(peer: &TcpStream) -> bool {
    let Ok(server) = peer.peer_addr() else { return false };
    // FIN_WAIT2, with the timer of TIME_WAIT: no socket any more.
    is_listed([server, peer.local_addr().unwrap()], |state, timer| state == "05" && timer == "03")
}

/// True while the kernel lists a socket with these addresses, its own first, whose state and timer are those (proc_net_tcp.rst).
fn is_listed(ends: [SocketAddr; 2], is_so: impl Fn(&str, &str) -> bool) -> bool {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let ends = ends.map(|end| format!("0100007F:{:04X}", end.port()));
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[1..3] == ends && is_so(fields[3], &fields[5][..2])
    })
}

/// Sends and reads until the connection has ended: for one that sends, until it cannot any more. A peer that can neither
/// send nor read while the kernel has forgotten the server's socket has a window that never opens: it would be reset a
/// minute later. In a soak the end comes within a second after its limit, if one ends it.
fn until_end(peer: &mut TcpStream, way: &Way, what: &str) {
    let limit_ms = if matches!(way.by, By::Kill | By::KillWhenFull) { 0 } else { LIMIT_MS };
    let patience = effort(PATIENCE, Duration::from_millis(1_000 + limit_ms));
    peer.set_nonblocking(true).unwrap();
    let mut begun = Instant::now();
    let (mut saw_end, mut block) = (false, &way.goes_on[..]);
    while !(saw_end && way.goes_on.is_empty()) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, way.reads && !saw_end);
        flags.set(PollFlags::OUT, !way.goes_on.is_empty());
        let left =
            patience.checked_sub(begun.elapsed()).unwrap_or_else(|| panic!("{what}: the connection does not end"));
        let look = Timespec::try_from(left.min(Duration::from_secs(1))).unwrap();
        let moved = poll(&mut [PollFd::new(&*peer, flags)], Some(&look)).unwrap();
        assert!(moved > 0 || !is_forgotten(peer), "{what}: the peer waits for a time limit of the kernel");
        let mut buf = [0; 16 << 10];
        if way.reads && !saw_end {
            match peer.read(&mut buf) {
                Ok(bytes) => saw_end = bytes == 0,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        if !way.goes_on.is_empty() {
            match peer.write(block) {
                Ok(bytes) => {
                    block = if bytes < block.len() { &block[bytes..] } else { &way.goes_on[..] };
                    if !way.reads {
                        // The limit runs once its replies have filled both sockets.
                        begun = Instant::now();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}

/// Sends until nothing moves any more: there is no room here, and the peer acknowledges nothing.
fn fill(peer: &mut TcpStream, block: &[u8]) {
    peer.set_nonblocking(true).unwrap();
    let mut rest = block;
    wait_until("its window is closed", || {
        loop {
            match peer.write(rest) {
                Ok(bytes) => rest = if bytes < rest.len() { &rest[bytes..] } else { block },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return window_is_closed(peer),
                Err(error) => panic!("{error}"),
            }
        }
    });
}

/// True while the kernel probes whether its peer's window has opened.
fn window_is_closed(peer: &TcpStream) -> bool {
    is_listed([peer.local_addr(), peer.peer_addr()].map(Result::unwrap), |_, timer| timer == "04")
}

/// Stops a process, and returns when none of its threads runs any more.
fn stop(pid: u32) {
    rustix::process::kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::STOP).unwrap();
    let has_stopped = |thread: io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    wait_until("it has stopped", || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(has_stopped));
}

fn end_in_each_way(spoken: Spoken) {
    let Some(()) = root_or_skip("eBPF") else { return };
    let engines = engines();
    let all: Vec<_> = engines.iter().flat_map(|engine| Answering::ALL.map(|by| (*engine, by))).collect();
    for (number, way) in ways(spoken).iter().enumerate() {
        // In the gate once in each, on the engines in turn.
        let turn = |number: usize| engines[number % engines.len()];
        let tried = (0..).zip(Answering::ALL).map(|(at, by)| (turn(number + at), by)).collect();
        side_by_side(effort(tried, all.clone()), |(engine, answering)| {
            let what = format!("{}: {} on {engine}, answered by {answering:?}", spoken.name(), way.what);
            end_in(way, spoken, engine, answering, &what);
        });
    }
}

/// Its name.
fn counter_of(reason: CloseReason) -> &'static str {
    let stats = Stats::default();
    stats.count_close(reason);
    let counted = |counter: &CounterValue| counter.value > 0 && counter.name != "closed_total";
    stats::sum([&stats]).into_iter().find(counted).unwrap().name
}

fn end_in(way: &Way, spoken: Spoken, engine: EngineKind, answering: Answering, what: &str) {
    // A change of the limits reaches the shards a little later: connections may come before.
    let limits = if way.connects_late { way.limits.clone() } else { Limits::default() };
    let server = match way.by {
        By::Kill | By::KillWhenFull => Ending::start_apart(spoken, engine, answering),
        _ => Ending::start(spoken, engine, answering, limits),
    };
    let mut peers: Vec<TcpStream> = (0..PEERS).map(|_| connect(server.address())).collect();
    for (number, peer) in peers.iter_mut().enumerate() {
        // Some have been with the kernel half for a while. All are accepted.
        for _ in 0..1 + number * 4 {
            send_all(peer, &spoken.request(1));
            assert_eq!(read_exactly(peer, spoken.reply(1).len()), spoken.reply(1), "{what}");
        }
        if !way.connects_late {
            send_all(peer, &way.sends);
        }
    }
    // Only now: no pause of this test ends a connection before.
    server.change(way);
    if let (By::KillWhenFull, Ending::Apart { server, .. }) = (way.by, &server) {
        stop(server.pid());
        peers.iter_mut().for_each(|peer| fill(peer, &way.goes_on));
    }
    let mut late: Vec<TcpStream> = Vec::new();
    if way.connects_late {
        late.extend((0..PEERS).map(|_| connect(server.address())));
        for peer in &mut late {
            // It may have ended already.
            let _ = peer.write_all(&way.sends);
        }
    }
    let ending = if way.connects_late { &mut late } else { &mut peers };
    thread::scope(|scope| {
        let spawn = |peer| scope.spawn(move || until_end(peer, way, what));
        let ends: Vec<_> = ending.iter_mut().map(spawn).collect();
        let kept = match way.by {
            By::Server(ends) => {
                ends(server);
                None
            }
            By::Kill | By::KillWhenFull => {
                drop(server);
                None
            }
            By::Limits | By::Refusal | By::Panic | By::HangUp | By::Forget => Some(server),
        };
        ends.into_iter().for_each(|end| end.join().unwrap());
        // The kernel half may have met the end first, for a reason of its own.
        if let (Some(Ending::Here { server, kernel: None, .. }), Some(reason)) = (&kept, way.reason) {
            let name = counter_of(reason);
            let is_counted = |counter: &CounterValue| counter.name == name && counter.value > 0;
            wait_until(format!("{what}: {name}"), || server.counters().iter().any(is_counted));
        }
        drop(kept);
    });
}

/// Reasons that no way here has, and why.
const ELSEWHERE: [(CloseReason, &str); 8] = [
    (CloseReason::EndlessHeader, "neither protocol has headers without a length; HTTP: ksf-cli tests/ends.rs"),
    (CloseReason::FileRange, "neither service sends files"),
    (CloseReason::Io, "the peer's own end"),
    (CloseReason::KernelHalf, "in place of others here, with the kernel half"),
    (CloseReason::MalformedFrame, "no bytes are malformed in either protocol"),
    (CloseReason::PeerClosed, "the peer's own end"),
    (CloseReason::PeerClosedMidMessage, "the peer's own end"),
    (CloseReason::ReplyLimit, "neither service defers more than one reply; ksf tests/budget.rs"),
];

#[test]
fn every_reason_is_tried_or_has_an_exception() {
    let ways = ways(Spoken::Rpc);
    for reason in CloseReason::ALL {
        let tried = ways.iter().any(|way| way.reason == Some(reason));
        let excepted = ELSEWHERE.iter().any(|(other, _)| *other == reason);
        assert!(tried != excepted, "{reason:?}");
    }
}

#[test]
fn every_end_reaches_its_peer_soon() {
    end_in_each_way(Spoken::Rpc);
}

#[test]
fn every_end_without_framing_reaches_its_peer_soon() {
    end_in_each_way(Spoken::Echo);
}
