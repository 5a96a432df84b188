//! Ten thousand connections at once: all are served, and an idle one costs at most 1 KiB of user memory. A hundred thousand
//! that are idle, or as many as there are descriptors for: they cost no turn.

mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use common::meter::{METER, METER_BYTES, Meter};
use common::net::*;
use ksf::Server;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf_test::alloc::Counting;
use socket2::{Domain, Socket, Type};

#[global_allocator]
static COUNTING: Counting = Counting;

const CROWD: usize = 10_000;
const IDLE: usize = 100_000;
/// Beyond the connections: listeners, rings, standard streams.
const FILES_SLACK: usize = 400;

/// The tests take turns: both need all the descriptors that a process may have.
static ALONE: Mutex<()> = Mutex::new(());
/// Connections that there are descriptors for.
static ROOM: LazyLock<Result<usize, String>> = LazyLock::new(|| {
    let mut least = Err(String::new());
    for connections in [IDLE, 50_000, 19_000, CROWD] {
        least = raise_files((connections + FILES_SLACK) as u64).map(|()| connections);
        if least.is_ok() {
            break;
        }
    }
    least
});

const FRAMING: Framing = Framing::LengthPrefix(LengthPrefix::big_endian(1));

/// Bytes the shard's thread holds, told by a service that runs on it.
fn shard_bytes(peer: &mut TcpStream) -> i64 {
    peer.write_all(&[&[METER.len() as u8], METER].concat()).unwrap();
    let mut reply = [0; 1 + METER_BYTES];
    peer.read_exact(&mut reply).unwrap();
    i64::from_be_bytes(reply[9..].try_into().unwrap())
}

#[test]
fn ten_thousand_connections_at_once() {
    own_network();
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(why) = &*ROOM {
        return skip(format_args!("needs 10,400 file descriptors per process ({why})"));
    }
    for engine in engines() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Meter(FRAMING)));
        let mut meter = connect(&server);
        let before = shard_bytes(&mut meter);
        // In a process of their own: the descriptors of both ends would be too many for one.
        let mut crowd = crowd(&server, CROWD);
        wait_until("all are accepted", || server.connections() == CROWD + 1);
        let each = (shard_bytes(&mut meter) - before) / CROWD as i64;
        println!("{engine}: {each} bytes of user memory per idle connection");
        assert!(each <= 1024, "{engine}: {each} bytes per idle connection");
        // All talk, then all are idle again: what they needed for that is given back, or shared.
        assert_eq!(crowd.ask("talk"), "talked", "{engine}");
        let each = (shard_bytes(&mut meter) - before) / CROWD as i64;
        println!("{engine}: {each} bytes after each has talked");
        assert!(each <= 1024, "{engine}: {each} bytes per connection that was active once");
        assert_eq!(crowd.ask("leave"), "left");
        wait_until("all are gone", || server.connections() == 1);
        ask(&mut meter, b"\x05hello", b"\x05hello");
        let closed = count(&server, "closed_total");
        assert_eq!((closed, count(&server, "accepted")), (CROWD as u64, CROWD as u64 + 1), "{engine}");
    }
}

/// Counted, not timed: what a shard does for idle connections it would do in a turn, by an event or by the clock.
#[test]
fn idle_connections_cost_no_turn() {
    const ASKS: u64 = 1_000;
    own_network();
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let open = match &*ROOM {
        Ok(room) => *room,
        Err(why) => return skip(format_args!("needs 10,400 file descriptors per process ({why})")),
    };
    for engine in engines() {
        let limits = Limits { connections_max: 2 * IDLE, idle_timeout_ms: 3_600_000, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::new(Meter(FRAMING)));
        let mut peer = connect(&server);
        let mut crowd = crowd(&server, open);
        wait_until("all are accepted", || server.connections() == open + 1);
        let counts = || ["events", "turns", "deadlines_checked"].map(|name| count(&server, name));
        ask(&mut peer, b"\x05hello", b"\x05hello");
        let before = counts();
        (0..ASKS).for_each(|_| ask(&mut peer, b"\x05hello", b"\x05hello"));
        let after = counts();
        let [events, turns, deadlines] = std::array::from_fn(|at| after[at] - before[at]);
        println!("{engine}: {open} idle connections, {ASKS} requests on another: {events} events in {turns} turns");
        // Some turns bring nothing: a timer that is put off, a signal.
        assert!((ASKS..ASKS + 20).contains(&events), "{engine}: {events} events");
        assert!((ASKS..ASKS + 20).contains(&turns), "{engine}: {turns} turns");
        assert_eq!(deadlines, 0, "{engine}: idle connections were looked at");
        assert_eq!(crowd.ask("leave"), "left");
        wait_until("all are gone", || server.connections() == 1);
    }
}

/// So many connections, of another process.
fn crowd(server: &Server, connections: usize) -> Helper {
    let wanted = [("KSF_TEST_ADDR", addr(server).to_string()), ("KSF_TEST_CROWD", connections.to_string())];
    let mut crowd = Helper::start("helper_is_a_crowd", &wanted);
    assert_eq!(crowd.hear(), "connected");
    crowd
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_is_a_crowd() {
    if !is_helper() {
        return;
    }
    let at: SocketAddr = std::env::var("KSF_TEST_ADDR").unwrap().parse().unwrap();
    let connections: usize = std::env::var("KSF_TEST_CROWD").unwrap().parse().unwrap();
    raise_files((connections + FILES_SLACK) as u64).unwrap();
    let mut peers: Vec<TcpStream> = Vec::new();
    while peers.len() < connections {
        // No more than the queue of the listening socket takes; the last in it has been accepted when it is answered.
        let next = connections.min(peers.len() + 1_000);
        peers.extend((peers.len()..next).map(|number| connect_from(number, at)));
        talk(&mut peers[next - 1..]);
    }
    say("connected");
    while let Some(line) = listen() {
        match line.as_str() {
            "talk" => {
                talk(&mut peers);
                say("talked");
            }
            _ => {
                // With a reset: ten thousand ports in TIME_WAIT would be in the way of other tests.
                peers.into_iter().for_each(reset);
                say("left");
                return;
            }
        }
    }
}

/// Each asks something of its own, all at once, and then each gets its own answer.
fn talk(peers: &mut [TcpStream]) {
    for (number, peer) in peers.iter_mut().enumerate() {
        peer.write_all(&[&[8][..], &number.to_be_bytes()].concat()).unwrap();
    }
    for (number, peer) in peers.iter_mut().enumerate() {
        expect(peer, &[&[8][..], &number.to_be_bytes()].concat());
    }
}

/// Several source addresses: one has not enough ports.
fn connect_from(number: usize, at: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let source = IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1 + (number / 2500) as u8));
    socket.bind(&SocketAddr::new(source, 0).into()).unwrap();
    socket.connect(&at.into()).unwrap();
    let peer = TcpStream::from(socket);
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer
}
