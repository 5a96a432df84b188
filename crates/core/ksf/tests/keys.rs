//! What a message's key names, and what it does not.

use std::collections::HashSet;
use std::io::Write;
use std::net::UdpSocket;
use std::sync::{Arc, Mutex};

use crate::common::net::*;
use ksf::framing::{Delimiter, Framing};
use ksf::{Peer, Profile, Server};

/// A cache of replies by key would answer a stream with what was a datagram's.
#[test]
fn a_datagram_has_a_key_that_no_stream_has() {
    for engine in engines_in_own_network() {
        let keys = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&keys);
        let service = calls(Profile::new("keys", Framing::Delimiter(Delimiter::LF)), move |message, reply| {
            recorded.lock().unwrap().push((matches!(message.peer(), Peer::Udp(_)), message.key()));
            reply.bytes(message.bytes());
        });
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let mut builder = Server::builder().engine(engine).cpus(Some(cpus));
        for addr in ["udp:127.0.0.1:0", ANY, "udp:127.0.0.1:0"] {
            builder = builder.listen(addr.parse().unwrap(), Arc::clone(&service), None);
        }
        let server = builder.start().unwrap();
        let at = |listener: usize| match server.listeners()[listener].addr {
            ksf::listener::ListenAddr::Tcp(at) | ksf::listener::ListenAddr::Udp(at) => at,
            _ => panic!("no port"),
        };
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.set_read_timeout(Some(PATIENCE)).unwrap();
        for listener in [0, 2] {
            udp.send_to(b"datagram", at(listener)).unwrap();
            udp.recv(&mut [0; 16]).unwrap();
        }
        // Several places, and the first of them twice.
        let mut peers: Vec<_> = (0..4).map(|_| connect_to(at(1))).collect();
        for peer in &mut peers {
            ask(peer, b"line\n", b"line\n");
        }
        peers.clear();
        wait_until("all have ended", || server.connections() == 0);
        let mut peer = connect_to(at(1));
        peer.write_all(b"line\n").unwrap();
        expect(&mut peer, b"line\n");
        let keys = std::mem::take(&mut *keys.lock().unwrap());
        let of = |datagrams: bool| keys.iter().filter(move |(is, _)| *is == datagrams).map(|(_, key)| *key);
        let (sockets, streams): (HashSet<_>, HashSet<_>) = (of(true).collect(), of(false).collect());
        assert_eq!((sockets.len(), streams.len()), (2, 5), "{engine}: {keys:?}");
        assert!(sockets.is_disjoint(&streams), "{engine}: {keys:?}");
    }
}
