//! A thousand peers with messages in parts, beside some whose requests the kernel half, or a worker, answers.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::rig::*;
use ksf::Server;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_mux::{Workers, WorkersOptions};
use ksf_services::rpc::{NullService, Program, ProgramTable};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const STRANGERS: usize = 1000;

/// Sends the same messages again and again, a few bytes at a time, and discards the replies.
struct Stranger {
    address: SocketAddr,
    stream: TcpStream,
    messages: Vec<u8>,
    step_bytes: usize,
    sent_bytes: usize,
    /// It sends once in 50 ms, the others as fast as the server reads.
    is_slow: bool,
}

impl Stranger {
    fn new(address: SocketAddr, number: usize) -> Self {
        let long =
            |sent_bytes: usize| [&(0x8000_0000_u32 | 100 << 10).to_be_bytes()[..], &vec![0; sent_bytes]].concat();
        let with_arguments = [rpc::call(1, 100_003, 3, 0), vec![0; 14_000]].concat();
        let (messages, step_bytes, is_slow) = match number % 8 {
            // The first two do not end within the test.
            0 => (long(40_000), 1, true),
            1 => (long(40_000), 100, true),
            2 => (long(40_000), 10_000, true),
            // Fragments of a byte, and calls.
            3 => ([rpc::fragment(false, &[0]).repeat(8), rpc::fragment(true, &[0; 32])].concat(), 1, true),
            4 => (null_call(1), 1, true),
            5 => (null_call(1), 1, false),
            6 => (null_call(1).repeat(10), 43, false),
            // User space refuses the arguments.
            _ => (rpc::record(&with_arguments), 1000, false),
        };
        Self { address, stream: Self::connect(address), messages, step_bytes, sent_bytes: 0, is_slow }
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = connect(address);
        stream.set_nonblocking(true).unwrap();
        stream
    }

    fn go_on(&mut self) {
        let is_over = |result: std::io::Result<usize>| match result {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        let rest = &self.messages[self.sent_bytes..];
        let sent = self.stream.write(&rest[..rest.len().min(self.step_bytes)]);
        let sent_bytes = *sent.as_ref().unwrap_or(&0);
        if is_over(self.stream.read(&mut [0; 4096])) || is_over(sent) {
            self.stream = Self::connect(self.address);
            self.sent_bytes = 0;
        } else {
            self.sent_bytes = (self.sent_bytes + sent_bytes) % self.messages.len();
        }
    }
}

/// Lets all strangers send until `ends`, and counts the rounds of the slow ones.
fn annoy(strangers: &mut [Stranger], ends: &AtomicBool, slow_rounds: &AtomicU64) {
    let mut slow_at = Instant::now();
    while !ends.load(Ordering::Relaxed) {
        let is_slow_round = Instant::now() >= slow_at;
        if is_slow_round {
            slow_at = Instant::now() + Duration::from_millis(50);
            slow_rounds.fetch_add(1, Ordering::Relaxed);
        }
        strangers.iter_mut().filter(|stranger| is_slow_round || !stranger.is_slow).for_each(Stranger::go_on);
    }
}

/// Lets this process have the descriptors of both ends of all connections, and of ends of earlier ones that linger.
fn raise_files() {
    const FILES: u64 = 3 * STRANGERS as u64 + 256;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < FILES) {
        // Beyond the hard limit only root may.
        let maximum = limit.maximum.map(|maximum| maximum.max(FILES));
        setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum }).expect("root may");
    }
}

/// Also while the strangers have all the memory for messages in parts.
#[test]
fn a_thousand_strangers_keep_no_request_waiting_for_a_second() {
    let Some(()) = root_or_skip("eBPF") else { return };
    raise_files();
    let little = Limits { assembly_bytes_max: 1 << 20, ..Limits::default() };
    for engine in engines() {
        for (limits, is_short) in [(Limits::default(), false), (little.clone(), true)] {
            in_new_network(|| {
                let rig = Rig::start_with(Spoken::Rpc, engine, "127.0.0.1:0", limits);
                withstands(&rig.server, rig.address, is_short);
                // All connections have a kernel half, and it answers those of both.
                assert_eq!(rig.counter("sockets_refused"), 0, "{}", rig.state());
                assert!(rig.counter("messages_answered") > 0, "{}", rig.state());
            });
        }
    }
}

#[test]
fn a_thousand_strangers_keep_no_request_of_workers_waiting_for_a_second() {
    raise_files();
    let little = Limits { assembly_bytes_max: 1 << 20, ..Limits::default() };
    // An engine accepts, no more.
    let engine = engines()[0];
    for (limits, is_short) in [(Limits::default(), false), (little, true)] {
        own_network();
        let mut table = ProgramTable::new();
        table.register(Program::NFS_V3).unwrap();
        let service = Arc::new(NullService::new("rpc", table));
        let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(2, limits.clone())).unwrap();
        let listen = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
        let builder = Server::builder().engine(engine).limits(limits).listen(listen, service, None);
        let server = builder.adopt(workers).start().unwrap();
        let ListenAddr::Tcp(address) = server.listeners()[0].addr else { panic!("no port") };
        withstands(&server, address, is_short);
    }
}

fn withstands(server: &Server, address: SocketAddr, is_short: bool) {
    const REQUESTS: u32 = 500;
    let mut clients: Vec<TcpStream> = (0..4).map(|_| connect(address)).collect();
    let mut strangers: Vec<_> = (0..STRANGERS).map(|number| Stranger::new(address, number)).collect();
    let counters = || server.counters().into_iter();
    let (ends, slow_rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut most = Duration::ZERO;
    thread::scope(|scope| {
        scope.spawn(|| annoy(&mut strangers, &ends, &slow_rounds));
        // After a panic the thread above would not end.
        let result = catch_unwind(AssertUnwindSafe(|| {
            let rounds = || slow_rounds.load(Ordering::Relaxed);
            let waits = || counters().find(|counter| counter.name == "memory_waits").unwrap().value;
            let is_at_work = || rounds() > 5 && (waits() > 0 || !is_short);
            wait_until("the strangers are at work", is_at_work);
            let end = rounds() + 30;
            for index in (0..).take_while(|index| *index < REQUESTS || rounds() < end) {
                let client = &mut clients[index as usize % 4];
                let begin = Instant::now();
                if index % 10 == 9 {
                    *client = connect(address);
                }
                exchange(client, Spoken::Rpc, index);
                most = most.max(begin.elapsed());
            }
        }));
        ends.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| resume_unwind(panic));
    });
    // The promise is one second. Next to other tests the machine may take longer.
    let bound = effort(PATIENCE, Duration::from_secs(1));
    let counted: Vec<_> = counters().filter(|counter| counter.value > 0).collect();
    assert!(most <= bound, "a request took {most:?}; short of memory: {is_short}, {counted:?}");
}
