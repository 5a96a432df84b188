//! Ten thousand connections at once: all are served, and an idle one costs at most 1 KiB of user memory.

mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;

use common::meter::{METER, METER_BYTES, Meter};
use common::net::*;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf_test::alloc::Counting;
use socket2::{Domain, Socket, Type};

#[global_allocator]
static COUNTING: Counting = Counting;

const CROWD: usize = 10_000;
/// Beyond the connections: listeners, rings, standard streams.
const FILES: u64 = CROWD as u64 + 200;

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
    if let Err(why) = raise_files(FILES) {
        return skip(format_args!("needs 10,200 file descriptors per process ({why})"));
    }
    for engine in engines() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Meter(FRAMING)));
        let mut meter = connect(&server);
        let before = shard_bytes(&mut meter);
        // In a process of their own: the descriptors of both ends would be too many for one.
        let mut crowd = Helper::start("helper_is_a_crowd", &[("KSF_TEST_ADDR", addr(&server).to_string())]);
        assert_eq!(crowd.hear(), "connected", "{engine}");
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

#[test]
#[ignore = "a part of ten_thousand_connections_at_once"]
fn helper_is_a_crowd() {
    if !is_helper() {
        return;
    }
    raise_files(FILES).unwrap();
    let at: SocketAddr = std::env::var("KSF_TEST_ADDR").unwrap().parse().unwrap();
    let mut peers: Vec<TcpStream> = (0..CROWD).map(|number| connect_from(number, at)).collect();
    // The last in the queue of the listening socket has been accepted when it is answered.
    talk(&mut peers[CROWD - 1..]);
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
