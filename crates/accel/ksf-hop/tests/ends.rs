//! How the hop begins and ends: killed, dropped, refused; and whom it leaves alone.

mod common;

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use common::*;
use ksf_hop::{Hop, HopError, Scope};

/// Which port the owner's process joins.
const PORT: &str = "KSF_HOP_TEST_PORT";

/// A process that joins connections until it is killed.
struct Owner {
    child: Child,
}

impl Owner {
    fn start(port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "owner", "--ignored", "--nocapture"])
            .env(PORT, port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: one system call between fork and exec: the owner does not outlive the thread that started it.
        unsafe {
            command
                .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?))
        };
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("the hop has begun")), "the owner ended: {:?}", child.wait());
        Self { child }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The owner's process.
#[test]
#[ignore = "a part of the tests below"]
fn owner() {
    let Some(port) = std::env::var(PORT).ok().and_then(|port| port.parse().ok()) else { return };
    let _hop = start(port);
    println!("the hop has begun");
    // Until it is killed, or whoever started it is gone.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Programs of the hop that the kernel has, by their ids.
fn programs() -> Vec<u32> {
    let all = libbpf_rs::query::ProgInfoIter::default();
    all.filter(|program| program.name.as_encoded_bytes().starts_with(b"ksf_hop_")).map(|program| program.id).collect()
}

#[test]
fn a_killed_owner_loses_no_byte() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let before = programs();
        let owner = Owner::start(at.port());
        let ours: Vec<u32> = programs().into_iter().filter(|id| !before.contains(id)).collect();
        assert!(ours.len() >= 2, "{ours:?}");
        let mut connections = Vec::new();
        for _ in 0..4 {
            let (mut one, mut other) = connect(&listener, at);
            warm_up(&mut one, &mut other);
            // Bytes that wait outside of TCP when the owner is killed.
            write(&mut one, &pattern(0, 10_000));
            connections.push((one, other));
        }
        thread::scope(|scope| {
            let (started, is_started) = mpsc::channel();
            for (number, (one, other)) in connections.iter().enumerate() {
                let started = started.clone();
                scope.spawn(move || {
                    if number % 2 == 0 {
                        assert!(read(&mut other.try_clone().unwrap(), 10_000) == pattern(0, 10_000));
                        started.send(()).unwrap();
                        both_directions(one, other, 8 << 20, number as u64 + 1);
                    } else {
                        started.send(()).unwrap();
                    }
                });
            }
            (0..connections.len()).for_each(|_| is_started.recv().unwrap());
            owner.kill();
        });
        for (one, other) in &mut connections.iter_mut().skip(1).step_by(2) {
            write(one, &pattern(10_000, 50_000));
            assert!(read(other, 60_000) == pattern(0, 60_000));
            both_directions(one, other, 1 << 20, 77);
        }
        // New ones are not joined, and whoever was is closed now: then the kernel has nothing of it left.
        let (mut one, mut other) = connect(&listener, at);
        both_directions(&one, &other, 1 << 20, 99);
        warm_up(&mut one, &mut other);
        drop(connections);
        until("the programs are gone", || !programs().iter().any(|id| ours.contains(id)));
    });
}

#[test]
fn an_orderly_end_leads_joined_connections_back() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        write(&mut one, &pattern(0, 10_000));
        assert_eq!(count(&hop, "messages"), 1);
        let by_tcp = bytes_by_tcp(&other);
        drop(hop);
        write(&mut one, &pattern(10_000, 1000));
        assert!(read(&mut other, 11_000) == pattern(0, 11_000));
        assert_eq!(bytes_by_tcp(&other) - by_tcp, 1000);
        both_directions(&one, &other, 4 << 20, 5);
        // The same connection is free for nobody else until it is closed; a new one is.
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        write(&mut one, b"joined");
        assert_eq!(count(&hop, "messages"), 1);
        assert_eq!(read(&mut other, 6), b"joined");
    });
}

/// Bytes that TCP has brought: `tcpi_bytes_received` of linux/tcp.h, which libc's struct does not have yet.
fn bytes_by_tcp(reader: &TcpStream) -> u64 {
    const AT: usize = 128;
    let mut info = [0u8; AT + 8];
    let mut bytes = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, which is the array's length.
    let result = unsafe {
        libc::getsockopt(
            reader.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    assert_eq!((result, bytes as usize), (0, info.len()));
    u64::from_ne_bytes(info[AT..].try_into().unwrap())
}

#[test]
fn joined_bytes_pass_tcp_by() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let _hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        let by_tcp = bytes_by_tcp(&other);
        write(&mut one, &pattern(0, 10_000));
        assert!(read(&mut other, 10_000) == pattern(0, 10_000));
        assert_eq!(bytes_by_tcp(&other), by_tcp);
    });
}

#[test]
fn a_socket_connected_to_itself_is_left_alone() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let hop = start(40_000);
        // The only port there is is that of the socket and of its peer.
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000").unwrap();
        let mut alone = TcpStream::connect("127.0.0.1:40000").unwrap();
        alone.set_nonblocking(true).unwrap();
        assert_eq!(alone.local_addr().unwrap(), alone.peer_addr().unwrap());
        for size in [1, 1000, 10_000] {
            write(&mut alone, &pattern(0, size));
            assert!(read(&mut alone, size) == pattern(0, size));
        }
        assert_eq!((count(&hop, "watched"), count(&hop, "not_plain")), (0, 1));
    });
}

#[test]
fn an_end_under_load_loses_nothing() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        for round in 1..6 {
            let hop = start(at.port());
            let (mut one, mut other) = connect(&listener, at);
            warm_up(&mut one, &mut other);
            thread::scope(|scope| {
                scope.spawn(|| both_directions(&one, &other, 4 << 20, round));
                until("messages are handed over", || count(&hop, "messages") > 20 * round);
                drop(hop);
            });
        }
    });
}

#[test]
fn other_ports_namespaces_and_machines_are_left_alone() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("0.0.0.0:0");
        let hop = start(at.port());
        let same = SocketAddr::new("127.0.0.1".parse().unwrap(), at.port());

        let (free, to) = listen("127.0.0.1:0");
        let (mut one, mut other) = connect(&free, to);
        warm_up(&mut one, &mut other);

        // The same port in another network namespace, whose sockets are of the same cgroup.
        let (tid, is_known) = mpsc::channel();
        let (linked, is_linked) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                in_new_network(move || {
                    let elsewhere = TcpListener::bind(same).unwrap();
                    let (mut one, mut other) = connect(&elsewhere, same);
                    warm_up(&mut one, &mut other);
                    tid.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
                    is_linked.recv().unwrap();
                    ip("addr add 10.9.8.2/24 dev far");
                    ip("link set far up");
                    // From there to here: the peer's end is not in this namespace.
                    let mut far = TcpStream::connect(("10.9.8.1", same.port())).unwrap();
                    far.set_nonblocking(true).unwrap();
                    assert!(read(&mut far, 30_000) == pattern(0, 30_000));
                    write(&mut far, b"thanks");
                });
            });
            // A failure here ends the other thread's wait.
            let linked = linked;
            let tid = is_known.recv().unwrap();
            assert_eq!(count(&hop, "watched"), 0);
            ip(&format!("link add near type veth peer name far netns {tid}"));
            ip("addr add 10.9.8.1/24 dev near");
            ip("link set near up");
            linked.send(()).unwrap();
            listener.set_nonblocking(true).unwrap();
            let mut accepted = None;
            until("the other machine connects", || {
                accepted = listener.accept().ok();
                accepted.is_some()
            });
            let (mut near, _) = accepted.unwrap();
            near.set_nonblocking(true).unwrap();
            listener.set_nonblocking(false).unwrap();
            for piece in 0..30 {
                write(&mut near, &pattern(piece * 1000, 1000));
            }
            assert_eq!(read(&mut near, 6), b"thanks");
        });
        assert_eq!(count(&hop, "watched"), 0);
        assert_eq!(count(&hop, "not_local"), 1);
        // The address of an interface of this machine is local.
        let (mut one, mut other) = connect(&listener, SocketAddr::new("10.9.8.1".parse().unwrap(), at.port()));
        warm_up(&mut one, &mut other);
        write(&mut one, b"joined");
        assert_eq!(read(&mut other, 6), b"joined");
        assert_eq!(count(&hop, "messages"), 1);
    });
}

#[test]
fn a_second_hop_leaves_the_firsts_connections_alone() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let first = start(at.port());
        let second = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        both_directions(&one, &other, 1 << 20, 3);
        assert_eq!((count(&first, "watched"), count(&second, "watched")), (2, 0));
        assert_eq!(count(&second, "not_taken"), 2);
        assert!(count(&first, "messages") > 0);
    });
}

#[test]
fn a_scope_may_name_a_cgroup_twice() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let root = mounts.lines().find(|line| line.contains(" cgroup2 ")).and_then(|line| line.split(' ').nth(1));
        let root = root.expect("cgroup2 is mounted").into();
        let own = Scope { cgroups: vec![root; 2], ports: vec![at.port()] };
        // Each link runs the programs for the same sockets, as those of a cgroup and of one above it do.
        let hop = Hop::start(&own, &options()).unwrap();
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        write(&mut one, b"joined");
        assert_eq!(read(&mut other, 6), b"joined");
        assert_eq!((count(&hop, "watched"), count(&hop, "not_taken"), count(&hop, "messages")), (2, 0, 1));
    });
}

#[test]
fn readers_that_block_stay_on_tcp() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        other.set_nonblocking(false).unwrap();
        warm_up(&mut one, &mut other);
        write(&mut one, b"by TCP");
        assert_eq!(read(&mut other, 6), b"by TCP");
        assert_eq!((count(&hop, "messages"), count(&hop, "tcp_blocking")), (0, 1));
        // The other direction's reader does not block.
        write(&mut other, b"joined");
        assert_eq!(read(&mut one, 6), b"joined");
        assert_eq!(count(&hop, "messages"), 1);
    });
}

#[test]
fn short_conversations_stay_on_tcp() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let mut options = options();
        options.warm_up = 3;
        let hop = start_with(at.port(), &options);
        let (mut one, mut other) = connect(&listener, at);
        for number in 0..5 {
            warm_up(&mut one, &mut other);
            assert_eq!(count(&hop, "messages"), [0, 0, 0, 2, 4][number]);
        }
    });
}

#[test]
fn bytes_that_tcp_brought_are_read_first() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        // Nobody has read the first one yet.
        write(&mut one, b"1");
        write(&mut one, b"2");
        assert_eq!(read(&mut other, 1), b"1");
        write(&mut one, b"3");
        assert_eq!((count(&hop, "messages"), count(&hop, "tcp_unread")), (0, 2));
        assert_eq!(read(&mut other, 2), b"23");
        write(&mut one, b"4");
        assert_eq!(count(&hop, "messages"), 1);
        assert_eq!(read(&mut other, 1), b"4");
    });
}

#[test]
fn a_self_test_that_fails_joins_nothing_and_says_why() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        // Receive buffers too small for the test's messages.
        std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 4096 4096").unwrap();
        let (listener, at) = listen("127.0.0.1:0");
        let scope = Scope { ports: vec![at.port()], ..Scope::default() };
        let error = Hop::start(&scope, &options()).unwrap_err();
        assert!(matches!(error, HopError::SelfTest { .. }), "{error}");
        assert!(error.to_string().contains("larger than what may wait"), "{error}");
        std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 6291456").unwrap();
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        both_directions(&one, &other, 1 << 20, 3);
        // No loopback, no test.
        ip("link set lo down");
        let error = Hop::start(&scope, &options()).unwrap_err();
        assert!(error.to_string().contains("cannot connect on loopback"), "{error}");
    });
}

#[test]
fn without_a_guard_somebody_must_say_that_nobody_takes_splice() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let scope = Scope { ports: vec![9], ..Scope::default() };
        match Hop::start(&scope, &ksf_hop::Options::default()) {
            Ok(hop) => assert_eq!(*hop.guard(), ksf_hop::Guard::Attached),
            Err(error) => {
                assert!(matches!(error, HopError::NoGuard { .. }), "{error}");
                assert!(matches!(start(9).guard(), ksf_hop::Guard::Trusted(_)));
            }
        }
    });
}

#[test]
fn wrong_scopes_are_explained() {
    assert!(matches!(Hop::start(&Scope::default(), &options()), Err(HopError::NothingChosen)));
    let scope = |folder: &str| Scope { cgroups: vec![folder.into()], ..Scope::default() };
    let missing = Hop::start(&scope("/nonexistent"), &options()).unwrap_err();
    assert!(missing.to_string().contains("cannot use /nonexistent"), "{missing}");
    if is_root() {
        let error = Hop::start(&scope("/tmp"), &options()).unwrap_err();
        assert!(error.to_string().contains("not a folder of cgroup2"), "{error}");
    }
}
