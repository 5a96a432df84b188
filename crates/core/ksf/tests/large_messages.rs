//! Large messages are received straight into the buffer that has their size: copies are counted, not believed, and
//! whatever the splits, the ends and the memory, the same bytes give the same messages.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::{Message, Profile, Reply, Server, Service};
use ksf_sim::ideal::encode;
use ksf_test::Random;

const LONG_BYTES: usize = 1 << 20;

/// Answers each message with its length and the sum of its bytes; with itself, from where it lies, if it ends with `!`.
struct Digest(Framing);

fn digest(message: &[u8]) -> Vec<u8> {
    if message.last() == Some(&b'!') {
        return message.to_vec();
    }
    // FNV-1a: order and value of every byte count.
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = message.iter().fold(0xcbf2_9ce4_8422_2325, step);
    [message.len() as u64, hash].iter().flat_map(|number| number.to_be_bytes()).collect()
}

impl Service for Digest {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { keeps_messages: true, ..Profile::new("digest", self.0) }
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes().last() == Some(&b'!') {
            reply.chunk(message.keep());
        } else {
            reply.bytes(&digest(message.bytes()));
        }
    }
}

fn server(engine: EngineKind, framing: Framing, limits: Limits) -> Server {
    one_shard(engine, ANY, limits, Arc::new(Digest(framing)))
}

/// Sends a message whole, and takes the answer to it.
fn ask(peer: &mut TcpStream, framing: Framing, body: &[u8]) {
    peer.write_all(&encode(framing, body, &[])).unwrap();
    expect(peer, &encode(framing, &digest(body), &[]));
}

/// Once a connection has sent a long message, the next ones cost the copy of what their header arrives with.
#[test]
fn the_body_of_a_long_message_is_not_copied() {
    const ROUNDS: u64 = 20;
    /// The head, and what may have to be asked for again when it arrives in two pieces.
    const COPIED_MAX: u64 = 2 * 4096;
    for engine in engines_in_own_network() {
        for framing in [Framing::RecordMark, Framing::LengthPrefix(LengthPrefix::big_endian(4))] {
            let server = server(engine, framing, Limits::default());
            let mut peer = connect(&server);
            for bytes in [150_000, 300_000, LONG_BYTES] {
                let body = ksf_test::pattern(bytes, 3);
                ask(&mut peer, framing, &body);
                let before = count(&server, "bytes_copied");
                (0..ROUNDS).for_each(|_| ask(&mut peer, framing, &body));
                let copied = count(&server, "bytes_copied") - before;
                assert!(copied <= ROUNDS * COPIED_MAX, "{engine}: {copied} bytes for {ROUNDS} messages of {bytes}");
                // Short ones between two long ones do not make it forget.
                (0..8).for_each(|_| ask(&mut peer, framing, b"short"));
                ask(&mut peer, framing, &body);
                let copied = count(&server, "bytes_copied") - before;
                assert!(
                    copied <= (ROUNDS + 1) * COPIED_MAX + 8 * 100,
                    "{engine}: {copied} bytes behind short messages"
                );
            }
        }
    }
}

/// Messages of every size, in parts where the framing has them, written in pieces of any length, while their answers are
/// read.
#[test]
fn every_split_gives_the_same_messages() {
    own_network();
    let nine_p = LengthPrefix { offset: 0, width: 4, endian: ksf::framing::Endian::Little, adjust: 0, strip: false };
    for engine in engines() {
        for (seed, framing) in [
            (1, Framing::RecordMark),
            (2, Framing::LengthPrefix(LengthPrefix::big_endian(8))),
            (3, Framing::LengthPrefix(nine_p)),
        ] {
            let server = server(engine, framing, Limits { out_queue_bytes_max: 3 << 20, ..Limits::default() });
            let mut random = Random::of_test(seed);
            let (mut wire, mut expected) = (Vec::new(), Vec::new());
            for number in 0..60 {
                let bytes = match random.within(0..=4) {
                    0 => random.within(0..=300),
                    1 => random.within(30_000..=70_000),
                    _ => random.within(100_000..=LONG_BYTES),
                };
                let mut body = ksf_test::pattern(bytes, number);
                body.extend(random.one_in(4).then_some(b'!'));
                let cuts: Vec<_> = (0..random.within(0..=2)).map(|_| random.within(0..=200_000)).collect();
                let from = wire.len();
                wire.extend(encode(framing, &body, &cuts));
                // A framing that does not strip its header hands it over with the body.
                let strips = !matches!(framing, Framing::LengthPrefix(LengthPrefix { strip: false, .. }));
                let message = if strips { &body } else { &wire[from..] };
                // What is not stripped is sent as it is.
                expected.extend(if strips { encode(framing, &digest(message), &[]) } else { digest(message) });
            }
            let mut peer = connect(&server);
            let mut reader = peer.try_clone().unwrap();
            let writer = std::thread::spawn(move || {
                let mut rest = &wire[..];
                while !rest.is_empty() {
                    let most = random.pick(&[7, 5_000, 70_000, 2_000_000]);
                    let (now, behind) = rest.split_at(random.within(1..=most).min(rest.len()));
                    peer.write_all(now).unwrap();
                    rest = behind;
                    if random.one_in(8) {
                        std::thread::yield_now();
                    }
                }
                peer.shutdown(Shutdown::Write).unwrap();
            });
            let mut got = Vec::new();
            reader.read_to_end(&mut got).unwrap();
            writer.join().unwrap();
            assert_eq!(got.len(), expected.len(), "{engine} {framing:?}");
            assert!(got == expected, "{engine} {framing:?}: other bytes");
        }
    }
}

/// A peer with half of a long message, all of which the server has received when this returns.
fn half_a_message(server: &Server) -> TcpStream {
    let before = count(server, "bytes_in");
    let mut peer = connect(server);
    let mut half = (0x8000_0000 | LONG_BYTES as u32).to_be_bytes().to_vec();
    half.resize(LONG_BYTES / 2, 7);
    peer.write_all(&half).unwrap();
    wait_until("half of a message", || count(server, "bytes_in") >= before + half.len() as u64);
    peer
}

/// The kernel may have the buffer when the connection ends: it is the engine's until it is given back.
#[test]
fn ends_in_the_middle_leave_nothing_behind() {
    for engine in engines_in_own_network() {
        let server = server(engine, Framing::RecordMark, Limits::default());
        for round in 0..24 {
            let mut peer = half_a_message(&server);
            match round % 4 {
                0 => reset(peer),
                1 => drop(peer),
                2 => {
                    peer.shutdown(Shutdown::Write).unwrap();
                    expect_end(&mut peer);
                }
                _ => {
                    peer.write_all(&[7; LONG_BYTES / 4]).unwrap();
                    reset(peer);
                }
            }
            until_count(&server, "closed_total", round + 1);
        }
        // Its memory serves the next one.
        let mut peer = connect(&server);
        ask(&mut peer, Framing::RecordMark, &ksf_test::pattern(LONG_BYTES, 1));
    }
}

/// A drain waits for the rest; a stop does not, and takes the buffer back from the kernel.
#[test]
fn a_server_ends_in_the_middle_of_a_long_message() {
    for engine in engines_in_own_network() {
        let framing = Framing::RecordMark;
        let server = server(engine, framing, Limits { drain_timeout_ms: 60_000, ..Limits::default() });
        let mut peer = half_a_message(&server);
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| server.drain());
            let rest = vec![7; LONG_BYTES / 2 + 4];
            peer.write_all(&rest).unwrap();
            expect(&mut peer, &encode(framing, &digest(&[7; LONG_BYTES]), &[]));
            expect_end(&mut peer);
            drop(peer);
            ended.join().unwrap().unwrap();
        });
        let server = self::server(engine, framing, Limits::default());
        let mut peer = half_a_message(&server);
        drop(server);
        let end = peer.read(&mut [0]);
        assert!(
            matches!(&end, Ok(0)) || end.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset),
            "{end:?}"
        );
    }
}

/// Peers whose messages do not fit the memory together: each waits, and all of them are served.
#[test]
fn loans_wait_for_memory_like_everything_else() {
    for engine in engines_in_own_network() {
        let limits = Limits { assembly_bytes_max: 200_000, pressure_timeout_ms: 60_000, ..Limits::default() };
        let server = server(engine, Framing::RecordMark, limits);
        let mut peers: Vec<_> = (0..16).map(|_| connect(&server)).collect();
        // A message each, one after the other: what comes next is received by its head, and then as far as there is room.
        let first = ksf_test::pattern(150_000, 4);
        peers.iter_mut().for_each(|peer| ask(peer, Framing::RecordMark, &first));
        let body = ksf_test::pattern(LONG_BYTES, 5);
        std::thread::scope(|scope| {
            for peer in &mut peers {
                let body = &body;
                scope.spawn(move || (0..3).for_each(|_| ask(peer, Framing::RecordMark, body)));
            }
        });
        assert!(count(&server, "memory_waits") > 0, "{engine}: there was room for all of them");
        assert_eq!(count(&server, "messages"), 64);
    }
}
