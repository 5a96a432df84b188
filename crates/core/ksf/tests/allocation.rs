//! No allocation per message on the fast path: counted, not believed.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use common::meter::{METER, METER_BYTES, Meter};
use common::net::*;
use common::{env, in_slot};
use ksf::Pieces;
use ksf::Profile;
use ksf::connection::Connection;
use ksf::deferred::Deferred;
use ksf::files::{File, FileRange, NoFileReplies};
use ksf::framing::{Delimiter, Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::pool::Chunk;
use ksf::service::{ConnKey, Message, Peer, Reply, Service};
use ksf_sim::ideal::encode;
use ksf_test::alloc::{Counting, allocations};

#[global_allocator]
static COUNTING: Counting = Counting;

const FRAMINGS: [Framing; 4] = [
    Framing::Raw,
    Framing::RecordMark,
    Framing::Delimiter(Delimiter::LF),
    Framing::LengthPrefix(LengthPrefix::big_endian(4)),
];

/// Small, small and many, from its slot, not whole in one slot, a batch longer than 64 KiB, and the longest messages.
const SIZES: [(usize, usize); 6] = [(64, 1), (64, 20), (4000, 1), (6000, 1), (1024, 128), (1 << 20, 1)];

/// Message by message, and in batches, whole and in parts: a connection that is warm needs no memory.
#[test]
fn a_warm_connection_allocates_nothing() {
    for framing in FRAMINGS {
        for (size, batch) in SIZES {
            let mut env = env(Limits { out_queue_bytes_max: 2 << 20, ..Limits::default() }, 4096, 16);
            let rounds = 20_000_000 / (size * batch).max(2000);
            let key = ConnKey { index: 0, generation: 0 };
            let mut conn = Connection::new(Arc::new(Meter(framing)), Peer::Unix, key, env.now).unwrap();
            let wire = encode(framing, &vec![b'x'; size], &[]).repeat(batch);
            let mut replied = 0;
            let mut one = || {
                let mut rest = &wire[..];
                while !rest.is_empty() {
                    // As an engine does: straight into the message, where its rest is long.
                    if let Some(mut direct) = conn.lend_buffer(32 << 10, &mut env) {
                        let (part, behind) = rest.split_at(direct.missing().min(50_000));
                        direct.room_mut()[..part.len()].copy_from_slice(part);
                        conn.received_direct(direct, part.len(), &mut env);
                        rest = behind;
                        continue;
                    }
                    let (part, behind) = rest.split_at(rest.len().min(4096));
                    let chunk = in_slot(&mut env, part);
                    conn.receive(chunk, &mut env);
                    rest = behind;
                }
                while let Some(mut batch) = conn.take_batch(env.now, &mut env.spares) {
                    let bytes = batch.len();
                    batch.advance(bytes, &mut env.spares);
                    batch.recycle(&mut env.spares);
                    conn.sent(bytes, true, &mut env);
                    replied += bytes;
                }
            };
            (0..100).for_each(|_| one());
            let before = allocations();
            (0..rounds).for_each(|_| one());
            let made = allocations() - before;
            assert_eq!(made, 0, "{framing:?}: {made} allocations for {rounds} times {batch} of {size} bytes");
            assert_eq!(replied, (rounds + 100) * wire.len());
        }
    }
}

/// Replies that come later, of any length: the buffers that held them come back.
#[test]
fn warm_deferred_replies_allocate_nothing() {
    struct Later(Framing, Mutex<Vec<Deferred>>);
    impl Service for Later {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("later", self.0)
        }

        fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
            self.1.lock().unwrap().push(reply.defer());
        }
    }
    for framing in FRAMINGS {
        for size in [64, 1024, 100_000] {
            let limits = Limits { out_queue_bytes_max: 2 << 20, ..Limits::default() };
            let mut env = env(limits, 4096, 16);
            let key = ConnKey { index: 0, generation: 0 };
            let service = Arc::new(Later(framing, Mutex::default()));
            let mut conn = Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap();
            let wire = encode(framing, b"a request", &[]);
            let mut answers = Vec::new();
            let mut deliveries = Vec::new();
            let mut one = || {
                for _ in 0..8 {
                    let chunk = in_slot(&mut env, &wire);
                    conn.receive(chunk, &mut env);
                }
                answers.append(&mut service.1.lock().unwrap());
                // The last ones first: all of them are held back until the first is there.
                while let Some(deferred) = answers.pop() {
                    let mut body = env.buffers.take(size);
                    body.set_len(size);
                    deferred.reply_buffer(body);
                }
                env.mailbox.take_deliveries_into(&mut deliveries);
                for delivery in deliveries.drain(..) {
                    assert!(conn.deliver(delivery, &mut env));
                }
                while let Some(mut batch) = conn.take_batch(env.now, &mut env.spares) {
                    let bytes = batch.len();
                    batch.advance(bytes, &mut env.spares);
                    batch.recycle(&mut env.spares);
                    conn.sent(bytes, true, &mut env);
                }
            };
            (0..20).for_each(|_| one());
            let before = allocations();
            (0..500).for_each(|_| one());
            let made = allocations() - before;
            assert_eq!(made, 0, "{framing:?}: {made} allocations for 4,000 deferred replies of {size} bytes");
        }
    }
}

/// Replies of pieces with ranges of a file among them, at once and later: what their lists lie in comes back, too.
#[test]
fn warm_replies_of_pieces_allocate_nothing() {
    struct InPieces(Framing, Chunk, File, Mutex<Vec<Deferred>>);
    impl InPieces {
        fn add(&self, pieces: &mut Pieces<'_>) -> Result<(), NoFileReplies> {
            for bytes in [100, 10_000, 300_000] {
                pieces.bytes(b"copied");
                pieces.chunk(self.1.clone());
                pieces.file(FileRange { file: self.2.clone(), offset: 0, bytes })?;
            }
            pieces.bytes(b"end");
            Ok(())
        }
    }
    impl Service for InPieces {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("pieces", self.0)
        }

        fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
            match message.bytes() {
                b"later" => self.3.lock().unwrap().push(reply.defer_for(400_000)),
                _ => reply.pieces(|pieces| self.add(pieces)).unwrap(),
            }
        }
    }
    for framing in [Framing::RecordMark, Framing::Delimiter(Delimiter::LF)] {
        let limits = Limits { out_queue_bytes_max: 8 << 20, connection_bytes_max: 8 << 20, ..Limits::default() };
        let mut env = env(limits, 4096, 16);
        let key = ConnKey { index: 0, generation: 0 };
        let file = File::from(std::fs::File::open("/dev/null").unwrap());
        let service = Arc::new(InPieces(framing, Chunk::from_vec(vec![b'c'; 3000]), file, Mutex::default()));
        let mut conn = Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap();
        let wire = ["now", "later", "now", "later"].map(|body| encode(framing, body.as_bytes(), &[])).concat();
        let (mut answers, mut deliveries, mut sent) = (Vec::new(), Vec::new(), 0);
        let mut one = || {
            let chunk = in_slot(&mut env, &wire);
            conn.receive(chunk, &mut env);
            answers.append(&mut service.3.lock().unwrap());
            while let Some(deferred) = answers.pop() {
                Deferred::reply_pieces(deferred, |pieces| service.add(pieces)).unwrap();
            }
            env.mailbox.take_deliveries_into(&mut deliveries);
            for delivery in deliveries.drain(..) {
                assert!(conn.deliver(delivery, &mut env));
            }
            while !conn.is_settled() {
                if let Some(range) = conn.file_to_read(env.now) {
                    let mut into = env.buffers.take(range.bytes);
                    into.set_len(range.bytes);
                    assert!(conn.file_read(&range, Ok(into), &mut env));
                }
                if let Some(batch) = conn.take_batch(env.now, &mut env.spares) {
                    sent += batch.len();
                    conn.sent(batch.len(), true, &mut env);
                    batch.recycle(&mut env.spares);
                }
            }
        };
        // Until each list has met the longest one.
        (0..100).for_each(|_| one());
        let before = allocations();
        (0..200).for_each(|_| one());
        let made = allocations() - before;
        assert_eq!(made, 0, "{framing:?}: {made} allocations for 800 replies of pieces");
        assert!(sent > 300 * 4 * 310_000);
    }
}

/// Warm means: every buffer has met the largest batch. When that is depends on how the kernel joins what peers send, so
/// it is not a number of rounds; but it comes, and one allocation per thousand messages would keep it from coming.
fn until_none(what: &str, allocated: &mut dyn FnMut() -> u64) {
    let mut before = allocated();
    let mut made = Vec::new();
    for _ in 0..20 {
        let now = allocated();
        if now == before {
            return;
        }
        made.push(now - before);
        before = now;
    }
    panic!("{what}: always some allocations: {made:?}");
}

/// What the shard's thread has allocated so far, told by a service that runs on it.
fn shard_allocations(peer: &mut TcpStream, framing: Framing) -> u64 {
    peer.write_all(&encode(framing, METER, &[])).unwrap();
    let mut reply = vec![0; encode(framing, &[0; METER_BYTES], &[]).len()];
    peer.read_exact(&mut reply).unwrap();
    let body = ksf_sim::ideal::decode(framing, &Limits::default(), &reply).messages.remove(0);
    u64::from_be_bytes(body[..8].try_into().unwrap())
}

/// From the socket to the socket: accepting costs memory, messages do not.
#[test]
fn a_warm_shard_allocates_nothing() {
    own_network();
    let framing = Framing::RecordMark;
    for engine in engines() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Meter(framing)));
        let mut meter = connect(&server);
        let mut peers: Vec<_> = (0..4).map(|_| connect(&server)).collect();
        for (size, batch) in [(64, 1), (64, 100), (1000, 10), (4000, 1), (40_000, 1), (1024, 128), (1 << 20, 1)] {
            let times = 20_000_000 / (size * batch).max(40_000);
            let wire = encode(framing, &vec![7; size], &[]).repeat(batch);
            let mut got = vec![0; wire.len()];
            let mut rounds = |number| {
                for _ in 0..number {
                    for peer in &mut peers {
                        peer.write_all(&wire).unwrap();
                    }
                    for peer in &mut peers {
                        peer.read_exact(&mut got).unwrap();
                        assert!(got == wire);
                    }
                }
            };
            let mut allocated = || {
                rounds(times);
                shard_allocations(&mut meter, framing)
            };
            until_none(&format!("{engine}: {times} times 4 times {batch} messages of {size} bytes"), &mut allocated);
        }
    }
}

#[test]
fn datagrams_allocate_nothing() {
    for engine in engines_in_own_network() {
        let server = one_shard(engine, "udp:127.0.0.1:0", Limits::default(), Arc::new(Meter(Framing::Raw)));
        let peer = datagrams(addr(&server));
        let mut got = [0; 9000];
        let mut ask = |request: &[u8]| {
            peer.send(request).unwrap();
            let length = peer.recv(&mut got).unwrap();
            got[..length].to_vec()
        };
        for size in [64, 3000] {
            let request = vec![9; size];
            let mut rounds = |number| {
                for _ in 0..number {
                    assert!(ask(&request) == request);
                }
                u64::from_be_bytes(ask(METER)[..8].try_into().unwrap())
            };
            until_none(&format!("{engine}: 1,000 datagrams of {size} bytes"), &mut || rounds(1000));
        }
    }
}
