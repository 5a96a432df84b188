//! Short messages that a service keeps: each occupies a short slot, whose name is found again after a restart.

use std::collections::HashSet;
use std::io::Write;
use std::net::UdpSocket;
use std::sync::Arc;

use crate::common::keeper::Keeper;
use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::pool::{Chunk, Memory, PoolSpec, SHORT_ID, SlotName};
use ksf::server::{Builder, SLOT_BYTES};
use ksf::{Message, Peer, Profile, Refused, Reply, Server, Service, Turn, Unlogged};

/// It answers with a short line.
fn keeper() -> Arc<Keeper> {
    Arc::new(Keeper { answer: Some(b"kept"), keeps_messages: true, ..Keeper::default() })
}

fn builder(engine: EngineKind) -> Builder {
    Server::builder().engine(engine).cpus(Some(ksf::cpus::allowed().unwrap()[..1].to_vec()))
}

fn line(number: usize, bytes: usize) -> Vec<u8> {
    format!("{number:0bytes$}").into_bytes()
}

/// Sent as fast as they are taken, so that one receive slot has many of them, and cut anywhere.
#[test]
fn ten_thousand_kept_messages_of_100_bytes_occupy_2_kib_each() {
    const LINES: usize = 10_000;
    for engine in engines_in_own_network() {
        let keeper = keeper();
        let builder = builder(engine).short_slots(LINES as u32);
        let server = builder.listen(ANY.parse().unwrap(), Arc::clone(&keeper), None).start().unwrap();
        let mut peer = connect(&server);
        for round in 0..10 {
            let lines: Vec<_> = (0..LINES / 10).map(|number| line(round * LINES / 10 + number, 100)).collect();
            peer.write_all(&[lines.join(&b'\n'), b"\n".to_vec()].concat()).unwrap();
            expect(&mut peer, &b"kept\n".repeat(LINES / 10));
        }
        let kept = keeper.take();
        assert_eq!(kept.len(), LINES);
        for (number, chunk) in kept.iter().enumerate() {
            assert_eq!(&**chunk, line(number, 100), "{engine}");
            assert!(chunk.occupied_bytes() <= 2048, "{engine}: {number} occupies {}", chunk.occupied_bytes());
        }
        let names: HashSet<_> = kept.iter().map(|chunk| chunk.name().unwrap().index).collect();
        assert_eq!(names.len(), LINES, "{engine}: a slot of its own each");
        let slots = server.slots();
        assert_eq!((slots.short.kept_bytes(), slots.long.kept), (LINES as u64 * 2048, 0), "{engine}");
        assert_eq!(count(&server, "kept_as_copy"), 0, "{engine}");
        std::thread::spawn(move || drop(kept)).join().unwrap();
        assert_eq!((server.slots().short.kept, server.slots().short.in_use), (0, 0), "{engine}");
    }
}

/// What does not go into a short slot is kept as without any: in its long slot while half of these are free, then copied.
#[test]
fn messages_beyond_the_short_slots_are_kept_elsewhere() {
    for engine in engines_in_own_network() {
        let keeper = keeper();
        let builder = builder(engine).slots(SLOT_BYTES, 20).short_slots(15);
        let server = builder.listen(ANY.parse().unwrap(), Arc::clone(&keeper), None).start().unwrap();
        let mut peer = connect(&server);
        for round in 1..=3 {
            let ask = |peer: &mut _, number, bytes| ask(peer, &[&line(number, bytes)[..], b"\n"].concat(), b"kept\n");
            ask(&mut peer, 0, 2049);
            (1..50).for_each(|number| ask(&mut peer, number, 2048));
            let kept = keeper.take();
            for (number, chunk) in kept.iter().enumerate() {
                assert_eq!(&**chunk, line(number, if number == 0 { 2049 } else { 2048 }), "{engine}");
            }
            let of = |pool| kept.iter().filter(|chunk| chunk.name().map(|name| name.pool) == pool).count();
            assert_eq!((of(Some(SHORT_ID)), of(Some(0)), of(None)), (15, 10, 25), "{engine}");
            let slots = server.slots();
            assert_eq!((slots.short.kept, slots.long.kept), (15, 10), "{engine}");
            assert_eq!(count(&server, "kept_as_copy"), round * 25, "{engine}");
        }
    }
}

#[test]
fn datagrams_are_kept_in_short_slots() {
    for engine in engines_in_own_network() {
        let keeper = keeper();
        let builder = builder(engine).listen("udp:127.0.0.1:0".parse().unwrap(), Arc::clone(&keeper), None);
        let server = builder.start().unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.connect(addr(&server)).unwrap();
        for (number, bytes) in [100, 2048, 2049].into_iter().enumerate() {
            peer.send(&line(number, bytes)).unwrap();
            assert_eq!(peer.recv(&mut [0; 16]).unwrap(), 4);
        }
        let kept = keeper.take();
        let places: Vec<_> = kept.iter().map(|chunk| (chunk.name().unwrap().pool, chunk.len())).collect();
        assert_eq!(places, [(SHORT_ID, 100), (SHORT_ID, 2048), (0, 2049)], "{engine}");
        assert!(kept.iter().enumerate().all(|(number, chunk)| **chunk == line(number, chunk.len())), "{engine}");
    }
}

/// A cache over restarts: keeps every line, and answers with its name; `all` with all of them.
struct Cache;

impl Service for Cache {
    type Shard = Vec<Chunk>;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile { keeps_messages: true, ..Profile::new("cache", Framing::Delimiter(Delimiter::LF)) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Vec<Chunk>> {
        Ok(turn.take_live())
    }

    fn accept(&self, _: &mut Vec<Chunk>, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, kept: &mut Vec<Chunk>, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes() == b"all" {
            return reply.bytes(&kept.iter().map(|chunk| &**chunk).collect::<Vec<_>>().join(&b' '));
        }
        let chunk = message.keep();
        let name = chunk.name().unwrap();
        // As many digits each time: the test knows how long an answer is.
        reply.bytes(format!("{:05} {:05} {:05} {:05}", name.pool, name.index, name.offset, name.len).as_bytes());
        kept.push(chunk);
    }
}

#[test]
fn short_slots_keep_their_names_and_bytes_over_restarts() {
    const SHORT: u16 = 6;
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let [long_path, short_path] = ["long", "short"].map(|name| folder.path().join(name));
        std::fs::File::create(&long_path).unwrap().set_len(16 * 4096).unwrap();
        std::fs::File::create(&short_path).unwrap().set_len(16 * 2048).unwrap();
        let start = |live: &[SlotName]| {
            let (long_path, short_path, live) = (long_path.clone(), short_path.clone(), live.to_vec());
            let pool = move |_: usize| {
                let open = |path| std::fs::File::options().read(true).write(true).open(path);
                let live = |id| live.iter().filter(|name| name.pool == id).copied().collect();
                let short = Memory::File(open(&short_path)?.into());
                let short = PoolSpec { id: SHORT, live: live(SHORT), ..PoolSpec::short(short, 16) };
                let long = PoolSpec::new(Memory::File(open(&long_path)?.into()), 4096, 16);
                Ok(PoolSpec { id: 5, live: live(5), ..long }.with_short(short))
            };
            builder(engine).pool(pool).listen(ANY.parse().unwrap(), Arc::new(Cache), None).start().unwrap()
        };
        let lines = [b"one".to_vec(), line(2, 3000), b"three".to_vec()];
        let mut names = Vec::new();
        let all = [lines.join(&b' '), b"\n".to_vec()].concat();
        let server = start(&[]);
        let mut peer = connect(&server);
        for line in &lines {
            peer.write_all(&[line, &b"\n"[..]].concat()).unwrap();
            let answer = String::from_utf8(read_exactly(&mut peer, 24)).unwrap();
            let numbers: Vec<u32> = answer.split_whitespace().map(|number| number.parse().unwrap()).collect();
            let [pool, index, offset, len] = numbers[..] else { panic!("{answer}") };
            names.push(SlotName { pool: pool as u16, index, offset, len });
        }
        assert_eq!(names.iter().map(|name| name.pool).collect::<Vec<_>>(), [SHORT, 5, SHORT], "{engine}");
        ask(&mut peer, b"all\n", &all);
        drop(peer);
        server.drain().unwrap();

        // Long ones first, as they are handed out; others are kept meanwhile, and let go of.
        let all = [&lines[1][..], b" one three\n"].concat();
        let server = start(&names);
        let mut peer = connect(&server);
        assert_eq!((server.slots().long.kept, server.slots().short.kept), (1, 2), "{engine}");
        ask(&mut peer, b"all\n", &all);
        let mut taken = HashSet::new();
        for _ in 0..10 {
            peer.write_all(b"another\n").unwrap();
            let answer = String::from_utf8(read_exactly(&mut peer, 24)).unwrap();
            assert!(answer.starts_with("00006 "), "{engine}: {answer}");
            assert!(taken.insert(answer), "{engine}: given out twice");
        }
        ask(&mut peer, b"all\n", &[&all[..all.len() - 1], &b" another".repeat(10), b"\n"].concat());
        drop(peer);
        server.drain().unwrap();
    }
}
