//! What the administrator set holds, also while it changes, and also when the process has no descriptor left.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;

use crate::common::Recorder;
use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::{Limits, ServerLimits};
use ksf::listener::ListenAddr;
use ksf::{Message, Order, Peer, Profile, Refused, Reply, Server, Service};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// True if the server answers, false if it has closed the connection instead.
fn is_served(peer: &mut TcpStream) -> bool {
    let mut got = [0; 2];
    if peer.write_all(b"ok").is_err() {
        return false;
    }
    match peer.read_exact(&mut got) {
        Ok(()) => &got == b"ok",
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("neither served nor refused"),
        Err(_) => false,
    }
}

#[test]
fn connections_beyond_the_maximum_are_refused_and_the_place_is_free_again() {
    for engine in engines_in_own_network() {
        let limits = Limits { connections_max: 2, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::new(Echo));
        let (mut one, mut two) = (connect(&server), connect(&server));
        assert!(is_served(&mut one) && is_served(&mut two));
        let mut three = connect(&server);
        assert!(!is_served(&mut three), "{engine}");
        assert_eq!((server.connections(), count(&server, "refused_connections_max")), (2, 1));
        drop(one);
        wait_until("a place is free", || server.connections() == 1);
        assert!(is_served(&mut connect(&server)) && is_served(&mut two), "{engine}");
    }
}

/// There is no limit per address.
#[test]
fn one_host_may_take_all_connections() {
    own_network();
    const CONNECTIONS_MAX: usize = 64;
    for engine in engines() {
        let limits = Limits { connections_max: CONNECTIONS_MAX, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::new(Echo));
        let mut peers: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connect(&server)).collect();
        assert!(peers.iter_mut().all(is_served), "{engine}");
        let from_another_address = || {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).unwrap();
            socket.connect(&addr(&server).into()).unwrap();
            let peer = TcpStream::from(socket);
            be_patient(&peer);
            peer
        };
        assert!(!is_served(&mut from_another_address()), "{engine}");
        drop(peers.pop());
        wait_until("a place is free", || server.connections() < CONNECTIONS_MAX);
        assert!(is_served(&mut from_another_address()), "{engine}");
    }
}

#[test]
fn a_service_refuses_connections() {
    own_network();
    struct Refuses;
    impl Service for Refuses {
        ksf::stateless!(shard);
        type Conn = ();

        fn profile(&self) -> Profile<'_> {
            Profile::new("refuses", Framing::Raw)
        }

        fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
            Err(Refused)
        }
        fn call(&self, (): &mut (), _: &mut (), _: &Message<'_>, _: &mut Reply<'_>) {
            unreachable!("no connection, no message");
        }
    }
    for engine in engines() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Refuses));
        for _ in 0..3 {
            assert!(!is_served(&mut connect(&server)));
        }
        assert_eq!((count(&server, "refused_by_service"), server.connections()), (3, 0), "{engine}");
    }
}

#[test]
fn limits_change_while_the_server_runs() {
    side_by_side(engines(), |engine| {
        let service = Recorder::new(LINES, Order::Requests);
        let server = all_shards(engine, ANY, Limits::default(), service);
        let line = [&[b'x'; 5000][..], b"\n"].concat();
        let mut open = connect(&server);
        ask(&mut open, &line, &line);
        server.set_limits(&Limits { message_bytes_max: 4000, ..Limits::default() }.into());
        // When the shards have read their mail, nobody tells: the open connection meets the new limit then.
        let mut refused = false;
        wait_until("the limit is lower", || {
            let mut got = vec![0; line.len()];
            refused = open.write_all(&line).is_err() || open.read_exact(&mut got).is_err();
            refused
        });
        until_count(&server, "closed_oversized_message", 1);
        let mut idle = connect(&server);
        ask(&mut idle, b"short\n", b"short\n");
        server.set_limits(&Limits { idle_timeout_ms: 20, ..Limits::default() }.into());
        expect_end(&mut idle);
        until_count(&server, "closed_idle_timeout", 1);
    });
}

/// Each of two listeners of one service has limits of its own; a third has those of the server.
#[test]
fn listeners_have_limits_of_their_own() {
    side_by_side(engines(), |engine| {
        let service = Recorder::new(LINES, Order::Requests);
        let any = || ANY.parse().unwrap();
        let all = Limits { message_bytes_max: 3000, connections_max: 4, ..Limits::default() };
        let short = Limits { message_bytes_max: 1000, header_bytes_max: 1000, ..all.clone() };
        let few = Limits { connections_max: 1, ..all.clone() };
        let server = Server::builder().engine(engine).limits(all.clone());
        let server = server.listen(any(), Arc::clone(&service), None).listener_limits(short.clone());
        let server = server.listen(any(), Arc::clone(&service), None).listener_limits(few.clone());
        let server = server.listen(any(), service, None).start().unwrap();
        let to = |listener: usize| match server.listeners()[listener].addr {
            ListenAddr::Tcp(addr) => connect_to(addr),
            _ => unreachable!("all are TCP"),
        };
        let line = [&[b'x'; 2000][..], b"\n"].concat();

        let (mut one, mut two, mut three) = (to(0), to(1), to(2));
        ask(&mut two, &line, &line);
        ask(&mut three, &line, &line);
        ask(&mut one, b"short\n", b"short\n");
        one.write_all(&line).unwrap();
        expect_end(&mut one);
        until_count(&server, "closed_oversized_message", 1);
        expect_end(&mut to(1));
        ask(&mut to(2), &line, &line);
        assert_eq!(count(&server, "refused_connections_max"), 1, "{engine}: one at the second listener");

        // The idle limit reaches the open connection of its listener, and no other.
        let idle = Limits { idle_timeout_ms: 20, ..few };
        server.set_limits(&ServerLimits::new(all, vec![short, idle]));
        expect_end(&mut two);
        ask(&mut three, &line, &line);
        until_count(&server, "closed_idle_timeout", 1);
        wait_until("the others are gone", || server.connections() == 1);
        // With one connection more than it may have by all listeners together, the server is full.
        let more: Vec<_> = (0..3).map(|_| to(2)).collect();
        wait_until("all are there", || server.connections() == 4);
        expect_end(&mut to(2));
        drop((more, three));
    });
}

#[test]
fn a_datagram_socket_has_limits_of_its_own() {
    for engine in engines_in_own_network() {
        let echo = Arc::new(Echo);
        let any = || "udp:127.0.0.1:0".parse().unwrap();
        let server = Server::builder().engine(engine).listen(any(), Arc::clone(&echo), None);
        let server = server.listener_limits(Limits { message_bytes_max: 100, ..Limits::default() });
        let server = server.listen(any(), echo, None).start().unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        for listener in [0, 1] {
            let ListenAddr::Udp(addr) = server.listeners()[listener].addr else { unreachable!("all are UDP") };
            peer.send_to(&[7; 101], addr).unwrap();
        }
        let mut got = [0; 200];
        let (bytes, from) = peer.recv_from(&mut got).unwrap();
        assert_eq!((bytes, ListenAddr::Udp(from)), (101, server.listeners()[1].addr.clone()), "{engine}");
        until_count(&server, "datagrams_oversized", 1);
    }
}

/// More memory is asked for than there is: everybody is slowed down, and nobody is closed.
#[test]
fn many_long_messages_at_once_all_arrive() {
    own_network();
    const PEERS: usize = 48;
    const BYTES: usize = 64 << 10;
    for engine in engines() {
        // Room for eight of them.
        let limits = Limits {
            assembly_bytes_max: 8 * BYTES,
            pressure_timeout_ms: PATIENCE.as_millis() as u64,
            ..Limits::default()
        };
        let server = one_shard(engine, ANY, limits, Recorder::new(LINES, Order::Requests));
        let mut peers: Vec<_> = (0..PEERS).map(|_| connect(&server)).collect();
        let line = [&[b'x'; BYTES][..], b"\n"].concat();
        let (head, tail) = line.split_at(BYTES / 2);
        // All of them wait for their rest at the same time.
        peers.iter_mut().for_each(|peer| peer.write_all(head).unwrap());
        wait_until("memory is short", || count(&server, "memory_waits") > 0);
        let writers: Vec<_> = peers
            .into_iter()
            .map(|mut peer| {
                let (tail, line) = (tail.to_vec(), line.clone());
                std::thread::spawn(move || {
                    ask(&mut peer, &tail, &line);
                    peer
                })
            })
            .collect();
        let peers: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        assert_eq!((count(&server, "closed_total"), server.connections()), (0, PEERS), "{engine}");
        drop(peers);
    }
}

/// With the limits as they are by default, and all of them on one shard.
#[test]
fn sixty_four_writers_of_a_mebibyte_all_finish() {
    own_network();
    const WRITERS: usize = 64;
    let line = [&vec![b'w'; 1 << 20][..], b"\n"].concat();
    for engine in engines() {
        let limits = Limits { pressure_timeout_ms: PATIENCE.as_millis() as u64, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Recorder::new(LINES, Order::Requests));
        let mut peers: Vec<_> = (0..WRITERS).map(|_| connect(&server)).collect();
        // Half of a message each, before any of them goes on.
        let (head, tail) = line.split_at(line.len() / 2);
        std::thread::scope(|scope| {
            for peer in &mut peers {
                scope.spawn(|| peer.write_all(head).unwrap());
            }
        });
        std::thread::scope(|scope| {
            for peer in &mut peers {
                scope.spawn(|| ask(peer, tail, &line));
            }
        });
        assert_eq!((count(&server, "closed_total"), server.connections()), (0, WRITERS), "{engine}");
        assert_eq!(count(&server, "messages"), WRITERS as u64, "{engine}");
    }
}

/// Peers that fill the memory and say nothing more are closed one after the other; the others are served.
#[test]
fn when_memory_is_short_who_does_not_go_on_is_closed() {
    const HOGS: usize = 6;
    side_by_side(engines(), |engine| {
        let limits = Limits { assembly_bytes_max: 256 << 10, pressure_timeout_ms: 1000, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Recorder::new(LINES, Order::Requests));
        let mut hogs: Vec<_> = (0..HOGS).map(|_| connect(&server)).collect();
        hogs.iter_mut().for_each(|hog| hog.write_all(&[b'h'; 60 << 10]).unwrap());
        wait_until("memory is short", || count(&server, "memory_waits") > 0);
        let mut peer = connect(&server);
        let line = [&[b'x'; 100 << 10][..], b"\n"].concat();
        ask(&mut peer, &line, &line);
        wait_until("who does not go on is closed", || count(&server, "closed_memory_limit") > 0);
        let closed = count(&server, "closed_memory_limit");
        assert_eq!(count(&server, "closed_total"), closed, "{engine}");
        ask(&mut peer, b"still here\n", b"still here\n");
    });
}

/// Silent peers were read eight at a time, a second each, and everybody else waited for them.
#[test]
fn silent_peers_do_not_keep_others_waiting() {
    const HOGS: usize = 100;
    side_by_side(engines(), |engine| {
        let patient = Limits {
            assembly_bytes_max: 1 << 20,
            pressure_timeout_ms: PATIENCE.as_millis() as u64,
            assembly_timeout_ms: 0,
            ..Limits::default()
        };
        let server = one_shard(engine, ANY, patient.clone(), Recorder::new(LINES, Order::Requests));
        let (mut early, mut hogs) = (connect(&server), (0..HOGS).map(|_| connect(&server)).collect::<Vec<_>>());
        hogs.iter_mut().for_each(|hog| hog.write_all(&[b'h'; 60 << 10]).unwrap());
        wait_until("memory is short", || count(&server, "memory_stops") > 0);
        for peer in [&mut early, &mut connect(&server)] {
            ask(peer, b"ping\n", b"ping\n");
        }
        assert_eq!(count(&server, "closed_memory_limit"), 0, "{engine}: nobody had to go for that");
        server.set_limits(&Limits { pressure_timeout_ms: 200, ..patient }.into());
        let line = [&[b'x'; 100 << 10][..], b"\n"].concat();
        ask(&mut early, &line, &line);
        let closed = count(&server, "closed_memory_limit");
        assert!(closed > ksf::budget::PASSES as u64, "{engine}: {closed} were closed");
        assert!(closed < HOGS as u64, "{engine}: those that keep little may stay");
        drop(hogs);
    });
}

/// Nothing stops the sender of datagrams: above the limit they are dropped, and counted.
#[test]
fn deferred_datagrams_are_bounded() {
    for engine in engines_in_own_network() {
        let service = Recorder::new(Framing::Raw, Order::Free);
        let limits = Limits { deferred_datagrams_max: 3, ..Limits::default() };
        let server = one_shard(engine, "udp:127.0.0.1:0", limits, Arc::clone(&service));
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        peer.connect(addr(&server)).unwrap();
        let hear = |reply: &[u8]| {
            let mut got = [0; 100];
            let length = peer.recv(&mut got).unwrap();
            assert_eq!(&got[..length], reply, "{engine}");
        };
        let send = |datagram: &[u8]| assert_eq!(peer.send(datagram).unwrap(), datagram.len());
        // A datagram counts as often as it is owed an answer.
        send(b"twice 1");
        send(b"defer 2");
        wait_until("all are deferred", || service.deferred.lock().unwrap().len() == 3);
        send(b"dropped");
        send(b"dropped, too");
        until_count(&server, "datagrams_refused_deferred_max", 2);
        let answer = |body: &[u8]| {
            let deferred = service.deferred.lock().unwrap().pop().unwrap();
            deferred.reply(body.to_vec());
        };
        answer(b"two");
        hear(b"two");
        send(b"room again");
        hear(b"room again");
        send(b"defer 3");
        wait_until("it is deferred", || service.deferred.lock().unwrap().len() == 3);
        send(b"dropped");
        until_count(&server, "datagrams_refused_deferred_max", 3);
        // One that is forgotten gives its place back, too.
        drop(service.deferred.lock().unwrap().pop());
        until_count(&server, "datagrams_abandoned", 1);
        send(b"and again");
        hear(b"and again");
        assert_eq!(count(&server, "messages"), 5, "{engine}");
    }
}

#[test]
fn a_server_with_few_slots_serves_everybody() {
    for engine in engines_in_own_network() {
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).slots(ksf::server::SLOT_BYTES, 2);
        let server = builder.listen(ANY.parse().unwrap(), Arc::new(Echo), None).start().unwrap();
        let mut peers: Vec<_> = (0..50).map(|_| connect(&server)).collect();
        peers.iter_mut().for_each(|peer| peer.write_all(b"hello").unwrap());
        peers.iter_mut().for_each(|peer| expect(peer, b"hello"));
    }
}

#[test]
fn slots_that_cannot_be_had_are_an_error_at_the_start() {
    for engine in engines_in_own_network() {
        let builder = Server::builder().engine(engine).slots(u32::MAX, u32::MAX);
        match builder.listen(ANY.parse().unwrap(), Arc::new(Echo), None).start() {
            Err(ksf::Error::Pool { bytes, .. }) => assert_eq!(bytes, u32::MAX as usize * u32::MAX as usize),
            Err(error) => panic!("{engine}: {error}"),
            Ok(_) => panic!("{engine}: it started"),
        }
    }
}

/// Also between shards: what one accepts counts for the other.
#[test]
fn the_maximum_is_the_servers_not_the_shards() {
    for engine in engines_in_own_network() {
        let limits = Limits { connections_max: 10, ..Limits::default() };
        let server = all_shards(engine, ANY, limits, Arc::new(Echo));
        let mut peers: Vec<_> = (0..40).map(|_| connect(&server)).collect();
        let served = peers.iter_mut().filter_map(|peer| is_served(peer).then_some(())).count();
        // Each shard looks before it adds, so a race may let in one per further shard.
        assert!((10..=10 + server.cpus().len() - 1).contains(&served), "{engine}: {served} of 10 are served");
        assert_eq!(count(&server, "refused_connections_max"), 40 - served as u64);
    }
}

/// A process of its own, because descriptors belong to the process.
#[test]
fn without_descriptors_peers_are_refused_and_service_goes_on() {
    side_by_side(engines(), |engine| {
        let mut helper =
            Helper::start("limits::helper_with_few_descriptors", &[("KSF_TEST_ENGINE", engine.name().into())]);
        let at = helper.hear().parse().unwrap();
        let mut served = Vec::new();
        let mut refused = 0;
        for _ in 0..120 {
            let mut peer = connect_to(at);
            if is_served(&mut peer) {
                served.push(peer);
            } else {
                refused += 1;
            }
        }
        assert!(served.len() > 20, "{engine}: {} are served", served.len());
        assert!(refused > 20, "{engine}: {refused} are refused");
        assert_eq!(helper.ask("refused"), refused.to_string(), "{engine}: every refusal is counted");
        for peer in &mut served {
            assert!(is_served(peer), "{engine}: who was there before is served as before");
        }
        // The socket is shared: left in blocking mode, it could hang another shard of the epoll engine.
        if engine == EngineKind::Epoll {
            assert_eq!(helper.ask("nonblocking"), "true");
        }
        served.truncate(10);
        wait_until("accepting resumes", || is_served(&mut connect_to(at)));
        helper.tell("end");
        assert_eq!(helper.hear(), "ended");
    });
}

#[test]
#[ignore = "a part of without_descriptors_peers_are_refused_and_service_goes_on"]
fn helper_with_few_descriptors() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    if !is_helper() {
        return;
    }
    let engine = match std::env::var("KSF_TEST_ENGINE").as_deref() {
        Ok("uring") => EngineKind::Uring,
        _ => EngineKind::Epoll,
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = listener.try_clone().unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(80), maximum: Some(80) }).unwrap();
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let server = Server::builder()
        .engine(engine)
        .cpus(Some(cpus))
        .inherit(listener.into(), Arc::new(Echo), None)
        .start()
        .unwrap();
    say(addr(&server));
    while let Some(line) = listen() {
        match line.as_str() {
            "refused" => say(count(&server, "refused_no_fd")),
            "nonblocking" => say(is_nonblocking(&ours)),
            _ => break,
        }
    }
    drop(server);
    say("ended");
}
