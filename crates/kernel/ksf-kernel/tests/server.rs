//! The shipped combination: a server of the framework, on each base engine, behind the kernel half.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::rig::*;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kernel::ObjectSource;

const ECHO_BYTES_MAX: usize = 70_000;
/// Connections that share the sizes.
const ECHO_CLIENTS: usize = 4;

/// Every size, cut at random places, on connections that live through all of them.
#[test]
fn every_size_comes_back_byte_by_byte() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let bytes = pattern(2 * ECHO_BYTES_MAX, 1);
    for engine in engines() {
        in_new_network(|| {
            let rig = Rig::start(Spoken::Echo, engine);
            thread::scope(|scope| {
                for first in 1..=ECHO_CLIENTS {
                    let (rig, bytes) = (&rig, &bytes);
                    scope.spawn(move || echo_sizes(&mut rig.connect(), bytes, first));
                }
            });
            // Both halves had their part. How much of it each had depends on the load of the machine.
            assert!(rig.counter("segments_answered") > 100);
            assert!(rig.counter("segments_passed") > 100);
            rig.end();
        });
    }
}

fn echo_sizes(client: &mut TcpStream, bytes: &[u8], first: usize) {
    let mut got = vec![0; ECHO_BYTES_MAX];
    for size in (first..=ECHO_BYTES_MAX).step_by(ECHO_CLIENTS) {
        let chance = pattern(12, size as u64);
        // Another piece of the pattern each time: a late byte of the last message is seen.
        let message = &bytes[size * 31 % ECHO_BYTES_MAX..][..size];
        let mut rest = message;
        for place in chance[4..].chunks(2).take(usize::from(chance[0] % 4)) {
            let at = usize::from(u16::from_ne_bytes([place[0], place[1]])) % (rest.len() + 1);
            let (piece, behind) = rest.split_at(at);
            send_all(client, piece);
            rest = behind;
        }
        send_all(client, rest);
        client.read_exact(&mut got[..size]).unwrap_or_else(|error| panic!("{size} bytes: {error}"));
        assert!(got[..size] == *message, "{size} bytes came back changed");
    }
}

/// The client ends its direction behind its last message: all replies come, then the end.
#[test]
fn a_half_close_gets_every_reply_and_the_end() {
    on_each(|spoken, engine| {
        let rig = Rig::start(spoken, engine);
        for round in 0..40 {
            for in_flight in [1, 50] {
                let mut client = rig.connect();
                // Some of the connections have been with the kernel half for a while.
                let first = round % 4 * 3;
                (0..first).for_each(|index| rig.exchange(&mut client, index));
                let last = first + in_flight;
                (first..last).for_each(|index| send_all(&mut client, &spoken.request(index)));
                client.shutdown(Shutdown::Write).unwrap();
                let mut got = Vec::new();
                let end = client.read_to_end(&mut got);
                let replies: Vec<u8> = (first..last).flat_map(|index| spoken.reply(index)).collect();
                if end.is_err() || got != replies {
                    let (got, all) = (got.len(), replies.len());
                    panic!("round {round}, {in_flight} in flight: {got} of {all}, {end:?}, {}", rig.state());
                }
            }
        }
        assert!(rig.counter("segments_answered") > 0);
        rig.end();
    });
}

/// Bytes that wait for the client.
fn unread(client: &TcpStream) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes an int.
    unsafe { libc::ioctl(client.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    bytes as usize
}

/// A client that sends more than all buffers hold before it reads. Its first messages, each alone, go to the kernel half.
fn echo_to_a_slow_reader(rig: &Rig, message: &[u8]) {
    const PIECE: usize = 7001;
    const ONE_BY_ONE: usize = 4 * PIECE;
    let mut client = rig.connect();
    rustix::net::sockopt::set_socket_recv_buffer_size(&client, 64 << 10).unwrap();
    let (slowly, quickly) = message.split_at(ONE_BY_ONE);
    for (number, piece) in slowly.chunks(PIECE).enumerate() {
        send_all(&mut client, piece);
        wait_until("its echo arrives", || unread(&client) == (number + 1) * PIECE);
    }
    let [paused, refused] = ["reads_paused", "sends_without_memory"].map(|name| rig.server_counter(name));
    let mut sender = client.try_clone().unwrap();
    let mut got = Vec::with_capacity(message.len());
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            for piece in quickly.chunks(PIECE) {
                sender.write_all(piece).unwrap_or_else(|error| panic!("{error}: {}", rig.state()));
            }
            sender.shutdown(Shutdown::Write).unwrap();
        });
        // A server that has many slots free may have it all in its out-queue before it pauses.
        let is_full =
            || rig.server_counter("reads_paused") > paused || rig.server_counter("sends_without_memory") > refused;
        wait_until("the way back is full", || sender.is_finished() || is_full());
        let mut buf = [0; 15_000];
        loop {
            match client.read(&mut buf).expect("more of the echo") {
                0 => break,
                bytes => got.extend_from_slice(&buf[..bytes]),
            }
        }
    });
    let wrong = got.iter().zip(message).position(|(got, sent)| got != sent);
    assert!(got == message, "{} of {}, wrong {wrong:?}, {}", got.len(), message.len(), rig.state());
}

/// The kernel half answers a client that does not read, until TCP is full and user space takes over.
#[test]
fn a_slow_reader_misses_nothing() {
    let rounds = effort(20, 60);
    /// More than the send buffer of an assisted connection, the out-queue and the client's receive buffer hold.
    const MESSAGE: usize = 6 << 20;
    let Some(()) = root_or_skip("eBPF") else { return };
    let bytes = pattern(MESSAGE + rounds * 1000, 3);
    for engine in engines() {
        in_new_network(|| {
            // Or all of it waits in the sockets until the client reads, where the server gets little of the CPU.
            sysctl("ipv4/tcp_rmem", "4096 131072 262144");
            sysctl("ipv4/tcp_wmem", "4096 16384 262144");
            let rig = Rig::start(Spoken::Echo, engine);
            for round in 0..rounds {
                echo_to_a_slow_reader(&rig, &bytes[round * 997..][..MESSAGE + round]);
            }
            assert!(rig.counter("segments_answered") > rounds as u64);
            assert!(rig.server_counter("reads_paused") > 0);
            rig.end();
        });
    }
}

/// The kernel refuses sends of such a connection with EFAULT while it has no memory for them.
#[test]
fn a_slow_reader_misses_nothing_while_tcp_is_short_of_memory() {
    let rounds = effort(3, 30);
    const MESSAGE: usize = 1 << 20;
    let Some(()) = root_or_skip("eBPF") else { return };
    let bytes = pattern(MESSAGE + rounds * 1000, 3);
    for engine in engines() {
        in_new_network(|| {
            let Some(_short) = TcpMemory::limit(512 << 10) else { return };
            let rig = Rig::start(Spoken::Echo, engine);
            // An io_uring request waits in the kernel where it can, and is refused less often.
            let was_refused = || engine != EngineKind::Epoll || rig.server_counter("sends_without_memory") > 0;
            for round in 0.. {
                assert!(round < 50 * rounds, "there was memory enough");
                echo_to_a_slow_reader(&rig, &bytes[round % rounds * 997..][..MESSAGE + round % rounds]);
                if round >= rounds && was_refused() {
                    break;
                }
            }
            rig.end();
        });
    }
}

/// The calling thread, and those that it starts, get no more memory for sockets of TCP.
struct TcpMemory {
    own: std::path::PathBuf,
    before: std::path::PathBuf,
}

impl TcpMemory {
    /// `None`: the test is skipped.
    fn limit(bytes: usize) -> Option<Self> {
        let groups = std::fs::read_to_string("/proc/thread-self/cgroup").unwrap();
        let before = groups.lines().find_map(|line| line.split_once(":memory:")).map_or("/", |(_, path)| path);
        let before = std::path::PathBuf::from(format!("/sys/fs/cgroup/memory{before}"));
        let own = before.join(format!("ksf-test-{}", rustix::thread::gettid().as_raw_nonzero()));
        if !before.join("memory.kmem.tcp.limit_in_bytes").exists() {
            skip("needs a memory controller (version 1) that limits TCP");
            return None;
        }
        std::fs::create_dir(&own).unwrap();
        let limited = TcpMemory { own, before };
        std::fs::write(limited.own.join("memory.kmem.tcp.limit_in_bytes"), bytes.to_string()).unwrap();
        limited.enter(&limited.own);
        Some(limited)
    }

    fn enter(&self, group: &std::path::Path) {
        std::fs::write(group.join("tasks"), rustix::thread::gettid().as_raw_nonzero().to_string()).unwrap();
    }
}

impl Drop for TcpMemory {
    fn drop(&mut self) {
        self.enter(&self.before);
        // A thread that has been joined leaves the group a little later.
        if !thread::panicking() {
            wait_until("its threads have left the group", || std::fs::remove_dir(&self.own).is_ok());
        }
    }
}

/// Clients of both kinds, each until its connection ends.
fn under_load(address: std::net::SocketAddr, spoken: Spoken, end: impl FnOnce() + Send) {
    let verified: [AtomicU64; 4] = Default::default();
    thread::scope(|scope| {
        for (index, verified) in verified.iter().enumerate() {
            let load = if index % 2 == 0 { Load::PingPong } else { Load::Flood };
            scope.spawn(move || press(address, spoken, load, verified));
        }
        wait_until("every client gets replies", || verified.iter().all(|bytes| bytes.load(Ordering::Relaxed) > 4_000));
        end();
    });
}

/// The original panicked when its module was unloaded with active connections.
#[test]
fn a_server_dropped_under_load_leaves_nothing() {
    on_each(|spoken, engine| {
        for _ in 0..4 {
            let rig = Rig::start(spoken, engine);
            let objects = Objects::of(&rig.kernel);
            assert!(objects.programs.len() == 5 && objects.maps.len() > 10 && !objects.are_gone(), "{objects:?}");
            under_load(rig.address, spoken, || drop(rig));
            wait_until("programs and maps are gone", || objects.are_gone());
        }
    });
}

const PLAN: &str = "KSF_TEST_SERVER";

#[test]
fn a_server_killed_under_load_leaves_nothing() {
    on_each(|spoken, engine| {
        for _ in 0..3 {
            let plan = format!("{engine} {}", spoken.name());
            let mut server = Helper::start("server::killed_server", &[(PLAN, plan)]);
            let line = server.hear();
            let [address, programs, maps] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let ids = |list: &str| list.split(',').map(|id| id.parse().unwrap()).collect();
            let objects = Objects { programs: ids(programs), maps: ids(maps) };
            assert!(objects.programs.len() == 5 && objects.maps.len() > 10 && !objects.are_gone(), "{objects:?}");
            under_load(address.parse().unwrap(), spoken, || drop(server));
            wait_until("programs and maps are gone", || objects.are_gone());
        }
    });
}

/// Not a test: the server of the one above.
#[test]
#[ignore = "run by a_server_killed_under_load_leaves_nothing"]
fn killed_server() {
    let Ok(plan) = std::env::var(PLAN) else { return };
    let (engine, spoken) = plan.split_once(' ').unwrap();
    let engine = [EngineKind::Epoll, EngineKind::Uring].into_iter().find(|kind| kind.name() == engine).unwrap();
    let rig = Rig::start(Spoken::from_name(spoken).unwrap(), engine);
    let Objects { programs, maps } = Objects::of(&rig.kernel);
    let list = |ids: Vec<u32>| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    say(format_args!("{} {} {}", rig.address, list(programs), list(maps)));
    // Until it is killed, or its starter is gone.
    listen();
}

/// Few messages in flight: the halves take turns at every one of them.
#[test]
fn replies_keep_their_order() {
    const MESSAGES: u32 = 5_000;
    on_each(|spoken, engine| {
        let rig = Rig::start(spoken, engine);
        for in_flight in [2, 4] {
            let mut client = rig.connect();
            (0..in_flight).for_each(|index| send_all(&mut client, &spoken.request(index)));
            for index in 0..MESSAGES {
                let reply = spoken.reply(index);
                assert_eq!(read_exactly(&mut client, reply.len()), reply, "message {index}, {in_flight} in flight");
                if index + in_flight < MESSAGES {
                    send_all(&mut client, &spoken.request(index + in_flight));
                }
            }
        }
        assert!(rig.counter("segments_passed") > 0);
        rig.end();
    });
}

/// TCP joins a retransmitted segment to what follows it. The part that had arrived must not arrive again.
#[test]
fn retransmitted_bytes_are_taken_once() {
    const ROUNDS: u32 = 6;
    on_each(|spoken, engine| {
        let rig = Rig::start(spoken, engine);
        let mut client = rig.connect();
        // Longer than what one step cuts off, and messages of both halves.
        let message = |index: u32| match spoken {
            Spoken::Echo => pattern(9_000 + index as usize, u64::from(index)),
            Spoken::Rpc => spoken.request(index),
        };
        let reply = |index| if spoken == Spoken::Echo { message(index) } else { spoken.reply(index) };
        for index in (0..2 * ROUNDS).step_by(2) {
            send_all(&mut client, &message(index));
            assert_eq!(read_exactly(&mut client, reply(index).len()), reply(index), "message {index}");
            retransmit::send_joined(&client, &message(index), &message(index + 1));
            wait_until("the segment arrives", || rig.counter("segments_trimmed") == u64::from(index / 2 + 1));
            send_all(&mut client, &message(index + 1));
            assert_eq!(read_exactly(&mut client, reply(index + 1).len()), reply(index + 1), "message {}", index + 1);
        }
        // The longest that IP carries, and the end with it.
        let (old, new) = (message(40_000), message(2 * ROUNDS));
        send_all(&mut client, &old);
        assert_eq!(read_exactly(&mut client, reply(40_000).len()), reply(40_000));
        retransmit::send_joined_and_end(&client, &old, &new);
        wait_until("the last segment arrives", || rig.counter("segments_trimmed") == u64::from(ROUNDS + 1));
        send_all(&mut client, &new);
        client.shutdown(Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).expect("the last reply and the end");
        assert!(rest == reply(2 * ROUNDS), "{} bytes, {}", rest.len(), rig.state());
        rig.end();
    });
}

/// Repeated bytes that cannot be cut off, because the kernel has no memory for it: the peer is reset, and never told
/// that all is well by an orderly end; the others do not notice.
#[test]
fn a_segment_that_cannot_be_cut_resets_its_connection_only() {
    const ROUNDS: u32 = 6;
    on_each(|spoken, engine| {
        let service =
            format!("-DSERVICE=\"../../bpf/{}.bpf.c\"", if spoken == Spoken::Echo { "echo" } else { "rpc_null" });
        let object = ObjectSource::File(object::compile("tests/bpf/no_memory.bpf.c", &[&service]));
        // Nothing that is waited for may hide what is lost: not within the patience of any test.
        let limits = Limits { send_timeout_ms: 3_600_000, ..Limits::default() };
        let rig = Rig::start_from(&object, spoken, engine, "127.0.0.1:0", limits);
        let mut steady = rig.connect();
        for round in 0..ROUNDS {
            let mut client = rig.connect();
            // With the kernel half from the first message on, or not yet looked after.
            (0..=round).for_each(|index| rig.exchange(&mut client, index));
            let (old, new) = (spoken.request(round), spoken.request(round + 1));
            if round % 2 == 0 {
                retransmit::send_joined(&client, &old, &new);
            } else {
                retransmit::send_joined_and_end(&client, &old, &new);
            }
            // Its own TCP has to send what the server has acknowledged, or it would not even take an orderly end.
            let written = client.write_all(&new);
            if round % 2 == 1 {
                let _ = client.shutdown(Shutdown::Write);
            }
            let mut got = Vec::new();
            let ends = [written.err(), client.read_to_end(&mut got).err()];
            let is_reset = ends.iter().flatten().any(|error| error.kind() == ErrorKind::ConnectionReset);
            assert!(is_reset, "round {round}: {ends:?}, {}", rig.state());
            assert!(got.is_empty(), "{} bytes behind the lost ones", got.len());
            let resets = u64::from(round + 1);
            wait_until("the reset is counted", || rig.server_counter("closed_kernel_half") == resets);
            assert_eq!((rig.counter("segments_trimmed"), rig.counter("replies_broken")), (resets, resets));
            rig.exchange(&mut steady, round);
        }
        drop(steady);
        wait_until("the steady connection ends", || rig.server.connections() == 0);
        assert_eq!(rig.server_counter("closed_by_peer"), 1, "{}", rig.state());
        rig.server.drain().expect("the shards end well");
    });
}

/// User space gets a turn now and then. A client with one message in flight stays with the kernel half.
#[test]
fn a_trial_keeps_a_waiting_client_in_the_kernel() {
    /// After the second trial, and before the third.
    const ANSWERED: u64 = 1_200;
    on_each(|spoken, engine| {
        let rig = Rig::start(spoken, engine);
        let mut client = rig.connect();
        // On a busy machine user space answers some for other reasons.
        let mut easy = (0..).filter(|index| index % 11 != 7).take(2 * ANSWERED as usize);
        let stays = easy.any(|index| {
            rig.exchange(&mut client, index);
            rig.counter("messages_answered") >= ANSWERED
        });
        assert!(stays, "most messages went to user space: {}", rig.state());
        assert_eq!(rig.counter("passed_trial"), 2, "one after 256 messages and one after 1024");
        drop(client);
        rig.end();
    });
}

#[test]
fn ipv6_is_served_by_both_halves() {
    on_each(|spoken, engine| {
        let rig = Rig::start_with(spoken, engine, "[::1]:0", Limits::default());
        let mut client = rig.connect();
        (0..2_000).for_each(|index| rig.exchange(&mut client, index));
        let answered = rig.counter("messages_answered");
        assert!(answered > 1_000, "{answered} of 2000 in the kernel");
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).expect("the end"), 0);
        rig.end();
    });
}

/// Connections that end by a reset, with messages under way, next to one that goes on.
#[test]
fn a_reset_ends_its_connection_only() {
    on_each(|spoken, engine| {
        let rig = Rig::start(spoken, engine);
        let mut steady = rig.connect();
        for round in 0..100 {
            let mut client = rig.connect();
            (0..round % 5).for_each(|index| rig.exchange(&mut client, index));
            let under_way: Vec<u8> = (0..round % 7).flat_map(|index| spoken.request(index)).collect();
            client.write_all(&under_way[..under_way.len() - under_way.len() / 3]).unwrap();
            rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
            drop(client);
            rig.exchange(&mut steady, round);
        }
        wait_until("the reset connections end", || rig.server.connections() == 1);
        rig.exchange(&mut steady, 1);
        drop(steady);
        rig.end();
    });
}

/// Under a kernel half the socket of a peer that is not read does not tell whether it is silent. Such peers were closed by passes
/// alone: a few per timeout, those that came first, and others waited for each of them.
#[test]
fn silent_peers_do_not_keep_others_waiting() {
    /// Of each kind.
    const HOGS: usize = 50;
    const FEW_BYTES: usize = 1 << 10;
    const MANY_BYTES: usize = 40 << 10;
    const HEADER_BYTES: usize = 4;
    const PRESSURE_MS: u64 = 100;
    on_each(|spoken, engine| {
        // Echo has no messages that could be unfinished.
        if spoken == Spoken::Echo {
            return;
        }
        // All of them come to one shard.
        pin(cpus()[0]);
        let limits = Limits { assembly_timeout_ms: 0, ..Limits::default() };
        let rig = Rig::start_with(spoken, engine, "127.0.0.1:0", limits.clone());
        let begin = |bytes: usize| -> Vec<TcpStream> {
            let part = [&(0x8000_0000_u32 | (100 << 10)).to_be_bytes()[..], &vec![0; bytes]].concat();
            let hogs = (0..HOGS).map(|_| {
                let mut hog = rig.connect();
                send_all(&mut hog, &part);
                hog
            });
            hogs.collect()
        };
        let (few, many) = (begin(FEW_BYTES), begin(MANY_BYTES));
        let sent = HOGS * (FEW_BYTES + MANY_BYTES + 2 * HEADER_BYTES);
        wait_until("all of it is read", || rig.server_counter("bytes_in") == sent as u64);
        // So all of them are silent when memory is short: the first look finds those that keep most.
        let read = Instant::now();
        wait_until("their time is over", || read.elapsed() >= Duration::from_millis(PRESSURE_MS));
        // From now on nobody is read, and nobody has a pass: it is asked for by those that send.
        let limits = Limits { assembly_bytes_max: 512 << 10, pressure_timeout_ms: PRESSURE_MS, ..limits };
        rig.server.set_limits(&limits.into());
        let closed = || rig.server_counter("closed_memory_limit");
        wait_until("silent peers are closed", || closed() > 5 * ksf::budget::PASSES as u64);
        assert_eq!(rig.server_counter("memory_waits"), 0, "{engine}");
        let is_open = |hog: &TcpStream| {
            hog.set_nonblocking(true).unwrap();
            hog.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        };
        assert!(few.iter().all(is_open), "{engine}: those that keep little may stay");
        let mut client = rig.connect();
        rig.exchange(&mut client, 1);
        drop((client, few, many));
        rig.end();
    });
}
