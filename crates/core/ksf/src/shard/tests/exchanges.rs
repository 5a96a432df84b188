//! Exchanges with slow backends and slow clients, and the memory that they take.

use std::collections::VecDeque;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::*;
use crate::engine::HEAD_BYTES;
use crate::outgoing::{ExchangeFull, HangUp, Upstream};
use crate::pool::Chunk;
use crate::service::EXPECTED_REPLY_BYTES;

/// Passes each message of its client on to its backend.
struct PassesOn {
    backend: SocketAddr,
}

impl Service for PassesOn {
    crate::stateless!(shard);
    type Conn = bool;

    fn profile(&self) -> Profile<'_> {
        Profile::new("passes on", Framing::Raw)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<bool, Refused> {
        Ok(false)
    }

    fn call(&self, (): &mut (), dialed: &mut bool, message: &Message<'_>, reply: &mut Reply<'_>) {
        if !mem::replace(dialed, true) {
            reply.dial(self.backend, false).unwrap();
        }
        reply.pass(message.keep()).expect("no message is handed over while the exchange is full");
    }

    fn upstream(&self, (): &mut (), _: &mut bool, event: Upstream, reply: &mut Reply<'_>) {
        if matches!(event, Upstream::Ended) {
            reply.hang_up(HangUp::Close);
        }
    }
}

/// Bytes queued on outgoing connections.
fn held_bytes<E: Engine>(shard: &mut Shard<E>) -> usize {
    let streams = shard.places.iter_mut().filter_map(|place| place.conn.as_mut()).map(|conn| &mut conn.stream);
    streams.filter_map(|stream| stream.outgoing()).map(|outgoing| outgoing.queued_bytes()).sum()
}

/// Writes until the socket is full.
fn write_some(mut to: impl Write, bytes: &[u8]) -> usize {
    let mut written = 0;
    while let Ok(more) = to.write(bytes) {
        written += more;
        if written > 4 << 20 {
            break;
        }
    }
    written
}

fn turn<E: Engine>(shard: &mut Shard<E>) {
    let now = shard.env.now;
    turn_at(shard, now, Some(Duration::from_millis(1)));
    shard.end_turn();
    shard.settle();
}

#[test]
fn what_waits_for_slow_backends_is_in_the_shards_budget() {
    on_each_engine(many_slow_backends::<Epoll>, many_slow_backends::<Uring>);
}

fn many_slow_backends<E: Engine>() {
    const CLIENTS: usize = 24;
    const SHARD_BYTES_MAX: usize = 1 << 20;
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let limits = Limits { shard_bytes_max: SHARD_BYTES_MAX, ..Limits::default() };
    let service = PassesOn { backend: backend.local_addr().unwrap() };
    let mut shard = serving::<E, _>(Arc::new(service), limits);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let client = connect(&mut shard);
            client.set_nonblocking(true).unwrap();
            client
        })
        .collect();
    // No backend reads: sockets and budgets fill up.
    let mut quiet = 0;
    let mut most = 0;
    while quiet < 50 {
        let written: usize = clients.iter().map(|client| write_some(client, &[7; 16 << 10])).sum();
        turn(&mut shard);
        quiet = if written == 0 { quiet + 1 } else { 0 };
        most = most.max(held_bytes(&mut shard));
        let counted = shard.env.budget.reply_bytes();
        assert!(counted >= held_bytes(&mut shard), "{counted} bytes are counted of {}", held_bytes(&mut shard));
    }
    assert!(most >= SHARD_BYTES_MAX, "the sockets took everything: {most}");
    // One message at a time proceeds without room, until its backend has read it. Short messages need no room.
    let limit = SHARD_BYTES_MAX + shard.env.pool.slot_bytes() + CLIENTS * EXPECTED_REPLY_BYTES;
    assert!(most <= limit, "{most} bytes are held, limit {limit}");
    // The backends read: all bytes arrive, and none stays counted.
    let backends: Vec<_> = (0..CLIENTS).map(|_| backend.accept().unwrap().0).collect();
    backends.iter().for_each(|backend| backend.set_nonblocking(true).unwrap());
    let mut quiet = 0;
    while quiet < 50 || held_bytes(&mut shard) > 0 {
        let read: usize = backends.iter().map(read_some).sum();
        turn(&mut shard);
        quiet = if read == 0 { quiet + 1 } else { 0 };
    }
    let stats = &shard.env.stats;
    assert_eq!(stats.bytes_in.value(), stats.outgoing_bytes_out.value(), "bytes were lost");
    assert_eq!(shard.env.budget.reply_bytes(), 0);
    shard.engine.shutdown();
}

fn read_some(mut from: &TcpStream) -> usize {
    let mut buffer = vec![0; 1 << 20];
    let mut all = 0;
    while let Ok(more @ 1..) = from.read(&mut buffer) {
        all += more;
    }
    all
}

/// Passes the bytes of a backend on to its client.
struct HandsBack {
    backend: SocketAddr,
}

impl Service for HandsBack {
    crate::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("hands back", Framing::Raw)
    }

    fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        reply.dial(self.backend, false).unwrap();
    }

    fn upstream(&self, (): &mut (), (): &mut (), event: Upstream, reply: &mut Reply<'_>) {
        if let Upstream::Received(chunk) = event {
            reply.bytes(&chunk);
        }
    }
}

/// The length of a response is not known in advance, so each client that does not read would exceed the limit by a slot.
#[test]
fn backends_are_read_a_little_at_a_time_when_replies_are_many() {
    on_each_engine(many_slow_clients::<Epoll>, many_slow_clients::<Uring>);
}

fn many_slow_clients<E: Engine>() {
    const CLIENTS: usize = 24;
    const FILLING: usize = 8;
    const SHARD_BYTES_MAX: usize = 1 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let service = HandsBack { backend: listener.local_addr().unwrap() };
    let limits = Limits { shard_bytes_max: SHARD_BYTES_MAX, out_queue_bytes_max: 512 << 10, ..Limits::default() };
    let mut shard = serving::<E, _>(Arc::new(service), limits);
    let (mut peers, mut kept) = (Vec::new(), Vec::new());
    // Each response fills the socket of its client, then the memory of the shard.
    for _ in 0..CLIENTS {
        let mut client = connect(&mut shard);
        client.write_all(b"dial").unwrap();
        let backend = loop {
            turn(&mut shard);
            if let Ok((backend, _)) = listener.accept() {
                break backend;
            }
        };
        backend.set_nonblocking(true).unwrap();
        let (mut quiet, mut received) = (0, 0);
        while quiet < 20 {
            let written = write_some(&backend, &[7; 64 << 10]);
            turn(&mut shard);
            let before = mem::replace(&mut received, shard.env.stats.outgoing_bytes_in.value());
            quiet = if written == 0 && before == received { quiet + 1 } else { 0 };
        }
        peers.push((client, backend));
        kept.push(shard.env.budget.reply_bytes());
    }
    // The first ones fill it; each later one adds little.
    let more = kept[CLIENTS - 1] - kept[FILLING - 1];
    assert!(kept[FILLING - 1] >= SHARD_BYTES_MAX, "the sockets took everything: {kept:?}");
    assert!(more <= (CLIENTS - FILLING) * 2 * HEAD_BYTES, "{more} bytes more are kept: {kept:?}");
    drop(peers);
    shard.engine.shutdown();
}

#[test]
fn a_backend_that_reads_nothing_is_not_read_for_ever() {
    on_each_engine(returned_to_its_sender::<Epoll>, returned_to_its_sender::<Uring>);
}

fn returned_to_its_sender<E: Engine>() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let told_of_room = Arc::new(AtomicUsize::new(0));
    let service = Returns { backend: listener.local_addr().unwrap(), told_of_room: Arc::clone(&told_of_room) };
    // Less than a slot: the bytes of one turn exceed it.
    let limits = Limits { out_queue_bytes_max: 16 << 10, ..Limits::default() };
    let mut shard = serving::<E, _>(Arc::new(service), limits);
    let mut client = connect(&mut shard);
    client.write_all(b"dial").unwrap();
    listener.set_nonblocking(true).unwrap();
    let backend = loop {
        turn(&mut shard);
        if let Ok((backend, _)) = listener.accept() {
            break backend;
        }
    };
    backend.set_nonblocking(true).unwrap();
    let (mut sent, mut returned, mut quiet) = (Vec::new(), Vec::new(), 0);
    while quiet < 50 {
        let written = write_numbered(&backend, &mut sent);
        turn(&mut shard);
        quiet = if written == 0 { quiet + 1 } else { 0 };
        let held = held_bytes(&mut shard);
        // As many bytes again may be on the way to a connection that was not full.
        let limit = 2 * shard.env.limits.out_queue_bytes_max + shard.env.pool.slot_bytes();
        assert!(held <= limit, "{held} bytes are held, limit {limit}");
    }
    // The backend reads: the shard reads it again, and the refused bytes follow in their place.
    while sent.len() < 24 << 20 {
        read_more(&backend, &mut returned);
        write_numbered(&backend, &mut sent);
        turn(&mut shard);
    }
    while returned.len() < sent.len() {
        read_more(&backend, &mut returned);
        turn(&mut shard);
    }
    assert!(returned == sent, "the stream came back changed");
    assert!(told_of_room.load(Relaxed) > 0, "nothing was refused");
    drop((client, backend));
    shard.engine.shutdown();
}

/// Returns the bytes of a backend to it. Keeps refused bytes until there is room.
struct Returns {
    backend: SocketAddr,
    told_of_room: Arc<AtomicUsize>,
}

impl Service for Returns {
    crate::stateless!(shard);
    type Conn = VecDeque<Chunk>;

    fn profile(&self) -> Profile<'_> {
        Profile::new("returns", Framing::Raw)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Self::Conn, Refused> {
        Ok(VecDeque::new())
    }

    fn call(&self, (): &mut (), _: &mut Self::Conn, _: &Message<'_>, reply: &mut Reply<'_>) {
        reply.dial(self.backend, false).unwrap();
    }

    fn upstream(&self, (): &mut (), refused: &mut Self::Conn, event: Upstream, reply: &mut Reply<'_>) {
        match event {
            Upstream::Received(chunk) => refused.push_back(chunk),
            Upstream::Room => drop(self.told_of_room.fetch_add(1, Relaxed)),
            _ => return,
        }
        while let Some(chunk) = refused.pop_front() {
            if let Err(ExchangeFull(chunk)) = reply.pass(chunk) {
                refused.push_front(chunk);
                break;
            }
        }
    }
}

/// Continues a stream of numbers at `sent` until the socket is full.
fn write_numbered(mut to: impl Write, sent: &mut Vec<u8>) -> usize {
    let before = sent.len();
    while sent.len() < before + (4 << 20) {
        let at = sent.len() as u64 / 8;
        let bytes: Vec<u8> = (at..at + 2048).flat_map(u64::to_le_bytes).skip(sent.len() % 8).collect();
        match to.write(&bytes) {
            Ok(written) => sent.extend_from_slice(&bytes[..written]),
            Err(_) => break,
        }
    }
    sent.len() - before
}

fn read_more(mut from: &TcpStream, to: &mut Vec<u8>) {
    let mut buffer = [0; 64 << 10];
    while let Ok(more @ 1..) = from.read(&mut buffer) {
        to.extend_from_slice(&buffer[..more]);
    }
}

/// Passes on each message, which exceeds the limit, and dials again in the same call.
struct DialsAgain {
    backend: SocketAddr,
    calls: Arc<AtomicUsize>,
}

impl Service for DialsAgain {
    crate::stateless!(shard);
    type Conn = bool;

    fn profile(&self) -> Profile<'_> {
        Profile::new("dials again", Framing::Raw)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<bool, Refused> {
        Ok(false)
    }

    fn call(&self, (): &mut (), dialed: &mut bool, message: &Message<'_>, reply: &mut Reply<'_>) {
        self.calls.fetch_add(1, Relaxed);
        if mem::replace(dialed, true) {
            reply.pass(message.keep()).expect("a connection that was just dialed is not full");
        }
        reply.dial(self.backend, false).unwrap();
    }
}

#[test]
fn a_full_exchange_is_not_taken_for_the_next_one() {
    on_each_engine(dialed_again::<Epoll>, dialed_again::<Uring>);
}

fn dialed_again<E: Engine>() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let service = DialsAgain { backend: listener.local_addr().unwrap(), calls: Arc::clone(&calls) };
    let limits = Limits { out_queue_bytes_max: 1 << 10, ..Limits::default() };
    let mut shard = serving::<E, _>(Arc::new(service), limits);
    let mut client = connect(&mut shard);
    for number in 1..=8 {
        client.write_all(&[number; 8 << 10]).unwrap();
        let before = calls.load(Relaxed);
        let mut turns = 0;
        while calls.load(Relaxed) == before {
            turn(&mut shard);
            turns += 1;
            assert!(turns < 5_000, "message {number} waits for room at a connection that was hung up");
        }
    }
    drop(client);
    shard.engine.shutdown();
}

/// Peers may choose the addresses that a service dials, so the shard must not keep all of them.
#[test]
fn addresses_without_a_kept_connection_are_forgotten() {
    on_each_engine(dials_once::<Epoll>, dials_once::<Uring>);
}

fn dials_once<E: Engine>() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let service = PassesOn { backend: listener.local_addr().unwrap() };
    let mut shard = serving::<E, _>(Arc::new(service), Limits::default());
    let mut client = connect(&mut shard);
    client.write_all(b"dial").unwrap();
    while shard.open < 2 {
        turn(&mut shard);
    }
    while listener.accept().is_err() {
        turn(&mut shard);
    }
    while shard.open == 2 {
        turn(&mut shard);
    }
    assert_eq!((shard.open, shard.idle.len()), (1, 0));
    shard.engine.shutdown();
}

/// A client may vanish in the turn in which its bytes were received, before the shard hands them over.
#[test]
fn bytes_passed_on_by_a_connection_that_vanishes_reset_the_backend() {
    on_each_engine(passed_on_and_gone::<Epoll>, passed_on_and_gone::<Uring>);
}

fn passed_on_and_gone<E: Engine>() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let service = PassesOn { backend: listener.local_addr().unwrap() };
    let mut shard = serving::<E, _>(Arc::new(service), Limits::default());
    let mut client = connect(&mut shard);
    client.write_all(b"first").unwrap();
    while shard.env.stats.outgoing_bytes_out.value() < 5 {
        turn(&mut shard);
    }
    let (mut backend, _) = listener.accept().unwrap();
    let key = ConnKey { index: 0, generation: shard.places[0].generation };
    let (served, env) = shard.served(key).unwrap();
    served.receive(Chunk::from_vec(b"second".to_vec()), env);
    shard.abort(0, CloseReason::Io);
    while shard.open > 0 {
        turn(&mut shard);
    }
    let mut received = Vec::new();
    let end = backend.read_to_end(&mut received).map_err(|error| error.kind());
    assert_eq!((end, received.as_slice()), (Err(std::io::ErrorKind::ConnectionReset), b"first".as_slice()));
    shard.engine.shutdown();
}
