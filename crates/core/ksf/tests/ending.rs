//! How connections end on the wire: the last reply leaves together with the end of the stream, and is not lost where the
//! peer has said more than it may.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use crate::common::Recorder;
use crate::common::net::*;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::{Message, Order, Profile, Reply, Server, Service};
use socket2::{Domain, Protocol, Socket, Type};

/// Answers one line, and ends the connection.
struct Once {
    at_once: bool,
    /// Says that it has a message, and waits for leave to answer.
    pause: Option<Mutex<(Sender<()>, Receiver<()>)>>,
}

impl Service for Once {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { peer_speaks_first: // As HTTP's: with a receive at once, the connection may end in the turn in which it was accepted.
        self.at_once, ..Profile::new("once", Framing::Delimiter(Delimiter::LF)) }
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if let Some(pause) = &self.pause {
            let (has, may) = &*pause.lock().unwrap();
            has.send(()).unwrap();
            may.recv_timeout(PATIENCE).unwrap();
        }
        reply.bytes(message.bytes());
        if self.at_once { reply.close_at_once() } else { reply.close() }
    }
}

/// Every TCP segment that arrives in this network from now on.
struct Segments(Socket);

impl Segments {
    fn listen() -> Option<Self> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP));
        match socket {
            Ok(socket) => {
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                Some(Self(socket))
            }
            Err(error) => {
                skip(format_args!("needs CAP_NET_RAW ({error})"));
                None
            }
        }
    }

    /// The next one from this address that carries bytes or an end: how many bytes, and whether it is the end.
    fn next_from(&mut self, from: SocketAddr) -> (usize, bool) {
        let mut packet = [0; 2048];
        loop {
            let length = self.0.read(&mut packet).expect("a segment");
            let tcp = &packet[usize::from(packet[0] & 0x0f) * 4..length];
            let port = u16::from_be_bytes([tcp[0], tcp[1]]);
            let payload_bytes = tcp.len() - usize::from(tcp[12] >> 4) * 4;
            let is_end = tcp[13] & 0x01 != 0;
            if port == from.port() && (payload_bytes > 0 || is_end) {
                return (payload_bytes, is_end);
            }
        }
    }
}

#[test]
fn the_last_reply_leaves_in_one_segment_with_the_end() {
    own_network();
    let Some(mut segments) = Segments::listen() else { return };
    for engine in engines() {
        for (at_once, half_closed) in [(true, false), (false, false), (false, true)] {
            let server = one_shard(engine, ANY, Limits::default(), Arc::new(Once { at_once, pause: None }));
            let mut peer = connect(&server);
            peer.write_all(b"only\n").unwrap();
            if half_closed {
                peer.shutdown(std::net::Shutdown::Write).unwrap();
            }
            expect(&mut peer, b"only\n");
            expect_end(&mut peer);
            assert_eq!(segments.next_from(addr(&server)), (5, true), "{engine}, {at_once}, {half_closed}");
        }
    }
}

#[test]
fn who_says_more_than_it_may_has_its_reply_all_the_same() {
    for engine in engines_in_own_network() {
        let ((has, has_it), (leave, may)) = (channel(), channel());
        let service = Once { at_once: true, pause: Some(Mutex::new((has, may))) };
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(service));
        let mut peer = connect(&server);
        peer.write_all(b"first\n").unwrap();
        has_it.recv_timeout(PATIENCE).unwrap();
        // Nobody will read this: the socket that is closed with it sends a reset.
        peer.write_all(b"more").unwrap();
        leave.send(()).unwrap();
        until_count(&server, "closed_total", 1);
        expect(&mut peer, b"first\n");
    }
}

/// It may send while it reads its last replies, but not for as long as the lingering takes.
#[test]
fn a_peer_that_sends_on_after_a_refusal_is_reset_in_time() {
    /// Far beyond the limit and all socket buffers.
    const ENDLESS: usize = 64 << 20;
    for engine in engines_in_own_network() {
        // Only the bytes can end it.
        let limits = Limits { linger_timeout_ms: PATIENCE.as_millis() as u64, ..Limits::default() };
        let linger_bytes_max = limits.linger_bytes_max as u64;
        let service = Recorder::new(Framing::RecordMark, Order::Requests);
        let server = one_shard(engine, ANY, limits, service);
        let mut peer = connect(&server);
        // The last fragment of a record, of 2 GiB - 1.
        peer.write_all(&u32::MAX.to_be_bytes()).unwrap();
        expect_end(&mut peer);
        let taken = count(&server, "bytes_in");
        let (block, mut written) = (vec![0; 64 << 10], 0);
        let error = loop {
            match peer.write(&block) {
                Ok(bytes) => written += bytes,
                Err(error) => break error.kind(),
            }
            assert!(written < ENDLESS, "{engine}: {} were taken", count(&server, "bytes_in"));
        };
        assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{engine}: {error}");
        until_count(&server, "closed_oversized_message", 1);
        until_count(&server, "lingers_cut", 1);
        let taken = count(&server, "bytes_in") - taken;
        assert!(taken <= linger_bytes_max, "{engine}: {taken} bytes were taken for nothing");

        // One that sends less has its answer and an orderly end.
        let mut peer = connect(&server);
        peer.write_all(&u32::MAX.to_be_bytes()).unwrap();
        expect_end(&mut peer);
        peer.write_all(&vec![0; 512 << 10]).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        until_count(&server, "closed_oversized_message", 2);
        assert_eq!(count(&server, "lingers_cut"), 1);
    }
}

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// Bytes of a reply that no socket takes all of.
const ENDLESS_REPLY: usize = 16 << 20;

/// Otherwise the end would pass for one in order, and the kernel would keep the replies for minutes, for a peer that counts
/// nowhere.
#[test]
fn an_end_that_throws_replies_away_is_a_reset() {
    for engine in engines_in_own_network() {
        let long = || calls(Profile::new("long", LINES), |_, reply| reply.bytes(&vec![b'l'; ENDLESS_REPLY]));
        let ask = |server: &Server| {
            let mut peer = connect_with_small_window(server);
            peer.write_all(b"all of it\n").unwrap();
            until_count(server, "messages", 1);
            peer
        };

        let limits = Limits { send_timeout_ms: 50, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, long());
        let mut peer = ask(&server);
        until_count(&server, "closed_send_timeout", 1);
        expect_reset(&mut peer);
        drop(server);

        let limits = Limits { drain_timeout_ms: 50, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, long());
        let mut peer = ask(&server);
        server.drain().unwrap();
        expect_reset(&mut peer);

        let server = one_shard(engine, ANY, Limits::default(), long());
        let mut peer = ask(&server);
        drop(server);
        expect_reset(&mut peer);

        // More than twice the budget: none of it is sent.
        let limits = Limits { connection_bytes_max: ENDLESS_REPLY / 3, ..Limits::default() };
        let later = calls(Profile::new("later", LINES), |_, reply| reply.defer().reply(vec![b'l'; ENDLESS_REPLY]));
        let server = one_shard(engine, ANY, limits, later);
        let mut peer = ask(&server);
        until_count(&server, "closed_reply_limit", 1);
        expect_reset(&mut peer);
    }
}
