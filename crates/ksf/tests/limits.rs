//! What the administrator set holds, also while it changes, and also when the process has no descriptor left.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use common::Recorder;
use common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::{Message, Order, Peer, Refused, Reply, Server, Service};

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
    own_network();
    for engine in engines() {
        let limits = Limits { connections_max: 2, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::new(Echo));
        let (mut one, mut two) = (connect(&server), connect(&server));
        assert!(is_served(&mut one) && is_served(&mut two));
        let mut three = connect(&server);
        assert!(!is_served(&mut three), "{engine}");
        assert_eq!((server.connections(), count(&server, "refused_connections_max")), (2, 1));
        drop(one);
        until("a place is free", || server.connections() == 1);
        assert!(is_served(&mut connect(&server)) && is_served(&mut two), "{engine}");
    }
}

#[test]
fn a_service_refuses_connections() {
    own_network();
    struct Refuses;
    impl Service for Refuses {
        type Conn = ();
        fn name(&self) -> &str {
            "refuses"
        }
        fn framing(&self) -> Framing {
            Framing::Raw
        }
        fn accept(&self, _: &Peer) -> Result<(), Refused> {
            Err(Refused)
        }
        fn call(&self, _: &mut (), _: &Message<'_>, _: &mut Reply<'_>) {
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
    own_network();
    for engine in engines() {
        let service = Recorder::new(LINES, Order::Requests);
        let server = all_shards(engine, ANY, Limits::default(), service);
        let line = [&[b'x'; 5000][..], b"\n"].concat();
        let mut open = connect(&server);
        ask(&mut open, &line, &line);
        server.set_limits(&Limits { message_bytes_max: 4000, ..Limits::default() });
        // When the shards have read their mail, nobody tells: the open connection meets the new limit then.
        let mut refused = false;
        until("the limit is lower", || {
            let mut got = vec![0; line.len()];
            refused = open.write_all(&line).is_err() || open.read_exact(&mut got).is_err();
            refused
        });
        until_count(&server, "closed_oversized_message", 1);
        let mut idle = connect(&server);
        ask(&mut idle, b"short\n", b"short\n");
        server.set_limits(&Limits { idle_timeout_ms: 20, ..Limits::default() });
        expect_end(&mut idle);
        until_count(&server, "closed_idle_timeout", 1);
    }
}

/// Also between shards: what one accepts counts for the other.
#[test]
fn the_maximum_is_the_servers_not_the_shards() {
    own_network();
    for engine in engines() {
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
    own_network();
    for engine in engines() {
        let mut helper = Helper::start("helper_with_few_descriptors", &[("KSF_TEST_ENGINE", engine.name().into())]);
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
        until("accepting resumes", || is_served(&mut connect_to(at)));
        helper.tell("end");
        assert_eq!(helper.hear(), "ended");
    }
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
