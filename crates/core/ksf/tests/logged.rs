//! Services with state per shard: turn ends, replies behind gates, messages that continue on their
//! connection.

use std::any::Any;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, mpsc};

use crate::common::net::*;
use crate::common::{KEY, bytes_of, env, in_slot};
use ksf::connection::Connection;
use ksf::deferred::Deferred;
use ksf::env::Env;
use ksf::framing::{Delimiter, Framing};
use ksf::gates::{Gate, LogId};
use ksf::limits::Limits;
use ksf::logged::{After, Logged};
use ksf::service::{ConnKey, Message, Order, Peer, Refused};
use ksf::session::OnShard;
use ksf::{CloseReason, Profile, Releaser, Reply, Server, Service, Turn, Unlogged};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// A durable counter. `add` replies with the new value when its record is durable, `get` with a
/// durable value, other messages with a greeting. `slow` is deferred.
struct Counter {
    order: Order,
    /// Batches on their way to the medium: the shard's log, and the last record of the batch.
    commits: mpsc::Sender<Commit>,
    slow: Mutex<Vec<Deferred<Logged>>>,
}

struct Commit {
    log: LogId,
    last: u64,
    records: u64,
    releaser: Releaser,
}

impl Commit {
    /// Reports the batch as durable.
    fn complete(&self) {
        self.releaser.release(self.log, self.last);
    }
}

struct OnThisShard {
    log: LogId,
    last: u64,
    committed: u64,
}

impl Counter {
    fn new(order: Order) -> (Arc<Self>, mpsc::Receiver<Commit>) {
        let (commits, committed) = mpsc::channel();
        (Arc::new(Self { order, commits, slow: Mutex::default() }), committed)
    }
}

impl Service for Counter {
    type Shard = OnThisShard;
    type Conn = ();
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, order: self.order, ..Profile::new("counter", LINES) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OnThisShard> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        Ok(OnThisShard { log, last: 0, committed: 0 })
    }

    fn accept(&self, _: &mut OnThisShard, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OnThisShard, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        match message.bytes() {
            b"add" => {
                shard.last += 1;
                reply.after(Gate { log: shard.log, number: shard.last }).bytes(shard.last.to_string().as_bytes());
            }
            b"get" => reply.after(Gate { log: shard.log, number: shard.last }).bytes(shard.last.to_string().as_bytes()),
            b"slow" => self.slow.lock().unwrap().push(reply.defer_for(10)),
            _ => reply.after(After::Nothing).bytes(b"hello"),
        }
    }

    fn turn_end(&self, shard: &mut OnThisShard, turn: &mut Turn<'_>) {
        let records = shard.last - shard.committed;
        if records > 0 {
            shard.committed = shard.last;
            let commit = Commit { log: shard.log, last: shard.last, records, releaser: turn.releaser() };
            self.commits.send(commit).unwrap();
        }
    }

    fn resume(&self, shard: &mut OnThisShard, (): &mut (), state: Box<dyn Any + Send>, reply: &mut Reply<'_, Logged>) {
        shard.last += 1;
        let what = state.downcast::<&str>().unwrap();
        reply.after(Gate { log: shard.log, number: shard.last }).bytes(format!("{what} {}", shard.last).as_bytes());
    }
}

/// The connections of a shard, without a server.
struct Shard {
    env: Env,
    service: Arc<Counter>,
    on: OnShard<Counter>,
    conns: Vec<Box<Connection>>,
    commits: mpsc::Receiver<Commit>,
}

impl Shard {
    fn new(order: Order, conns: u32) -> Self {
        let (service, commits) = Counter::new(order);
        let mut env = env(Limits::default(), 4096, 16);
        let state = service.start(&mut Turn::new(&mut env)).unwrap();
        let on = OnShard::new(Arc::clone(&service), state);
        let open = |index| Connection::new(on.clone(), Peer::Unix, ConnKey { index, ..KEY }, env.now).unwrap();
        let conns = (0..conns).map(open).collect();
        Self { env, service, on, conns, commits }
    }

    fn receive(&mut self, conn: usize, bytes: &[u8]) {
        let chunk = in_slot(&mut self.env, bytes);
        self.conns[conn].receive(chunk, &mut self.env);
    }

    /// Ends a turn as a shard does. Returns the commit of the turn.
    fn turn_end(&mut self) -> Option<Commit> {
        self.on.turn_end(&mut self.env);
        self.look();
        self.commits.try_recv().ok()
    }

    fn look(&mut self) {
        for (gate, key) in self.env.take_gated() {
            if self.env.gates.is_open(gate) {
                self.conns[key.index as usize].open_gates(&mut self.env);
            }
        }
        for conn in &mut self.conns {
            conn.open_gates(&mut self.env);
        }
    }

    fn take(&mut self, conn: usize) -> String {
        let Some(batch) = self.conns[conn].take_batch(self.env.now, &mut self.env.spares) else { return String::new() };
        let bytes = bytes_of(&batch);
        self.conns[conn].sent(bytes.len(), true, &mut self.env);
        String::from_utf8(bytes).unwrap()
    }
}

#[test]
fn no_reply_leaves_before_its_record_is_durable() {
    for order in [Order::Requests, Order::Free] {
        let mut shard = Shard::new(order, 3);
        shard.receive(0, b"add\nadd\n");
        shard.receive(1, b"get\n");
        shard.receive(2, b"hi\n");
        let commit = shard.turn_end().unwrap();
        assert_eq!((commit.last, commit.records), (2, 2), "one commit for all connections of the turn");
        assert_eq!((shard.take(0), shard.take(1)), (String::new(), String::new()), "{order:?}");
        assert_eq!(shard.take(2), "hello\n", "a reply without a gate does not wait");
        let queued: usize = shard.conns.iter().map(|conn| conn.queued_bytes()).sum();
        assert_eq!(queued, 2 + 2 + 2, "replies that wait count");
        let owed: usize = shard.conns.iter().map(|conn| conn.owed_bytes()).sum();
        assert_eq!(owed, shard.env.budget.reply_bytes());
        commit.complete();
        shard.look();
        assert_eq!((shard.take(0), shard.take(1)), ("1\n2\n".into(), "2\n".into()), "{order:?}");
        assert_eq!(shard.env.budget.reply_bytes(), 0);
    }
}

#[test]
fn release_opens_the_gates_it_covers_and_no_later_one() {
    let mut shard = Shard::new(Order::Requests, 1);
    shard.receive(0, b"hi\nadd\n");
    let first = shard.turn_end().unwrap();
    assert_eq!(shard.take(0), "hello\n", "a reply in front of the gate leaves");
    shard.receive(0, b"add\nhi\n");
    let second = shard.turn_end().unwrap();
    assert_eq!(shard.take(0), "");
    first.complete();
    shard.look();
    assert_eq!(shard.take(0), "1\n");
    second.complete();
    shard.look();
    assert_eq!(shard.take(0), "2\nhello\n", "a greeting does not overtake the reply in front of it");
}

/// Replies to pipelined records share a buffer. They leave as far as the log is durable.
#[test]
fn replies_behind_the_gates_of_a_pipeline_share_a_place() {
    let order_of_releases = [3, 3, 50, 51, 100];
    for behind_deferred in [false, true] {
        let mut shard = Shard::new(Order::Requests, 1);
        if behind_deferred {
            shard.receive(0, b"slow\n");
        }
        // Three messages at once, then many.
        shard.receive(0, b"add\nadd\nhi\n");
        (2..100).for_each(|_| shard.receive(0, b"add\n"));
        let Commit { log, releaser, .. } = shard.turn_end().unwrap();
        assert_eq!(shard.conns[0].held_replies(), 1 + usize::from(behind_deferred));
        assert!(shard.conns[0].owed_bytes() < 20_000, "{}", shard.conns[0].owed_bytes());
        if behind_deferred {
            let slow = shard.service.slow.lock().unwrap().pop().unwrap();
            slow.no_reply();
            for delivery in shard.env.mailbox.take_deliveries() {
                assert!(shard.conns[0].deliver(delivery, &mut shard.env));
            }
        }
        let mut replied = 0;
        for released in order_of_releases {
            releaser.release(log, released);
            shard.look();
            let greeting = |number| if number == 2 { "hello\n" } else { "" };
            let expected: String = (replied + 1..=released).map(|at| format!("{at}\n{}", greeting(at))).collect();
            assert_eq!(shard.take(0), expected, "{behind_deferred} {released}");
            let owed_bytes = shard.conns[0].owed_bytes();
            assert_eq!(owed_bytes, shard.env.budget.reply_bytes());
            replied = released;
        }
        assert_eq!(shard.env.budget.reply_bytes(), 0);
    }
}

#[test]
fn an_orderly_end_waits_for_the_gate() {
    let mut shard = Shard::new(Order::Requests, 1);
    shard.receive(0, b"add\n");
    let commit = shard.turn_end().unwrap();
    let Shard { env, conns, .. } = &mut shard;
    conns[0].peer_closed(env);
    assert_eq!(shard.conns[0].finished(), None);
    commit.complete();
    shard.look();
    assert_eq!(shard.take(0), "1\n");
    assert_eq!(shard.conns[0].finished(), Some(CloseReason::PeerClosed));
}

#[test]
fn resumed_message_keeps_its_connection_and_its_place() {
    let mut shard = Shard::new(Order::Requests, 1);
    shard.receive(0, b"slow\nadd\n");
    let first = shard.turn_end().unwrap();
    first.complete();
    shard.look();
    assert_eq!(shard.take(0), "", "the first reply is deferred");
    let slow = shard.service.slow.lock().unwrap().pop().unwrap();
    slow.resume("resumed");
    for delivery in shard.env.mailbox.take_deliveries() {
        assert!(shard.conns[0].deliver(delivery, &mut shard.env));
    }
    let second = shard.turn_end().unwrap();
    assert_eq!(shard.take(0), "", "the resumed reply waits for its own record");
    second.complete();
    shard.look();
    assert_eq!(shard.take(0), "resumed 2\n1\n");
}

/// A real server has few commits for many connections, and no reply passes its gate on any shard.
#[test]
fn one_commit_serves_the_connections_of_a_turn() {
    own_network();
    const PEERS: usize = 32;
    for engine in engines() {
        let (service, commits) = Counter::new(Order::Requests);
        let server = Server::builder().engine(engine).listen(ANY.parse().unwrap(), service, None).start().unwrap();
        let mut peers: Vec<_> = (0..PEERS).map(|_| connect(&server)).collect();
        peers.iter_mut().for_each(|peer| peer.write_all(b"hi\nadd\n").unwrap());
        for peer in &mut peers {
            expect(peer, b"hello\n");
            peer.set_nonblocking(true).unwrap();
        }
        // Each record is in a commit by now or soon. No commit is complete.
        let mut pending = Vec::new();
        while pending.iter().map(|commit: &Commit| commit.records).sum::<u64>() < PEERS as u64 {
            pending.push(commits.recv().unwrap());
        }
        for peer in &mut peers {
            assert_eq!(peer.read(&mut [0; 16]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "{engine}");
            peer.set_nonblocking(false).unwrap();
        }
        pending.iter().for_each(Commit::complete);
        let shards = server.cpus().len();
        let mut seen = Vec::new();
        for peer in &mut peers {
            let mut line = Vec::new();
            while line.last() != Some(&b'\n') {
                line.extend(read_exactly(peer, 1));
            }
            seen.push(String::from_utf8(line).unwrap().trim().parse::<u64>().unwrap());
        }
        // Each shard counted its own records from 1.
        let firsts = seen.iter().filter(|number| **number == 1).count();
        assert!((1..=shards).contains(&firsts), "{engine}: {seen:?}");
        server.drain().unwrap();
    }
}

/// Its log is never committed. `end` makes the end of the turn panic, `file` the end of a file
/// operation. The reply to `see` depends on the last record of `add`, on any shard.
#[derive(Default)]
struct Fragile {
    last: Mutex<Option<Gate>>,
}

struct FragileShard {
    log: LogId,
    last: u64,
    files: ksf::files::Files,
    panics: bool,
}

impl Service for Fragile {
    type Shard = FragileShard;
    type Conn = ();
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, ..Profile::new("fragile", LINES) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<FragileShard> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        Ok(FragileShard { log, last: 0, files: turn.files(), panics: false })
    }

    fn accept(&self, _: &mut FragileShard, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut FragileShard, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        match message.bytes() {
            b"add" => {
                shard.last += 1;
                let gate = Gate { log: shard.log, number: shard.last };
                *self.last.lock().unwrap() = Some(gate);
                reply.after(gate).bytes(b"added");
            }
            b"see" => reply.after(self.last.lock().unwrap().unwrap()).bytes(b"seen"),
            b"end" => shard.panics = true,
            b"file" => {
                let null = std::fs::File::open("/dev/null").unwrap().into();
                shard.files.begin(ksf::files::FileOp::Sync { file: null, data_only: true }, 0).unwrap();
            }
            _ => reply.after(After::Nothing).bytes(b"hello"),
        }
    }

    fn turn_end(&self, shard: &mut FragileShard, _: &mut Turn<'_>) {
        if std::mem::take(&mut shard.panics) {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
    }

    fn file_done(&self, _: &mut FragileShard, _: ksf::files::FileDone, _: &mut Turn<'_>) {
        std::panic::resume_unwind(Box::new("on purpose"));
    }
}

/// After a panic during a commit the service does not know which records are durable. Replies
/// behind its log do not leave, and their connections end.
#[test]
fn panic_outside_of_a_message_closes_connections_that_wait_for_the_log() {
    for engine in engines_in_own_network() {
        for how in ["end\n", "file\n"] {
            let listen = ANY.parse().unwrap();
            let server = Server::builder().engine(engine).listen(listen, Arc::new(Fragile::default()), None).start();
            let server = server.unwrap();
            let mut writer = connect(&server);
            ask(&mut writer, b"hi\n", b"hello\n");
            writer.write_all(b"add\n").unwrap();
            until_count(&server, "messages", 2);
            let mut readers: Vec<_> = (0..8).map(|_| connect(&server)).collect();
            readers.iter_mut().for_each(|peer| peer.write_all(b"see\n").unwrap());
            let mut other = connect(&server);
            ask(&mut other, b"hi\n", b"hello\n");
            until_count(&server, "messages", 11);
            writer.write_all(how.as_bytes()).unwrap();
            expect_end(&mut writer);
            readers.iter_mut().for_each(|peer| expect_end(peer));
            ask(&mut other, b"hi\n", b"hello\n");
            other.write_all(b"see\n").unwrap();
            expect_end(&mut other);
            assert_eq!((count(&server, "panics"), count(&server, "logs_lost")), (1, 1), "{engine} {how}");
            drop((writer, readers, other));
            until_count(&server, "closed_panicked", 10);
            server.drain().unwrap();
        }
    }
}

/// A reply behind the log is lost, as datagrams may be. The socket stays open.
#[test]
fn datagrams_behind_a_lost_log_are_dropped_and_counted() {
    for engine in engines_in_own_network() {
        let listen = "udp:127.0.0.1:0".parse().unwrap();
        let cpus = vec![ksf::cpus::allowed().unwrap()[0]];
        let builder = Server::builder().engine(engine).cpus(Some(cpus));
        let server = builder.listen(listen, Arc::new(Fragile::default()), None).start().unwrap();
        let peer = datagrams(addr(&server));
        let ask = |request: &[u8]| {
            peer.send(request).unwrap();
            let mut got = [0; 100];
            let length = peer.recv(&mut got).unwrap();
            assert_eq!(&got[..length], b"hello", "{engine}");
        };
        peer.send(b"add").unwrap();
        peer.send(b"see").unwrap();
        ask(b"hi");
        peer.send(b"end").unwrap();
        until_count(&server, "datagrams_unsent", 2);
        ask(b"hi");
        peer.send(b"see").unwrap();
        until_count(&server, "datagrams_unsent", 3);
        ask(b"hi");
        server.drain().unwrap();
    }
}

/// A service whose last words and whose replies out of an exchange are behind gates.
struct Gated(LogId);

impl Service for Gated {
    ksf::stateless!(shard);
    type Conn = Vec<ksf::deferred::Deferred>;

    fn profile(&self) -> Profile<'_> {
        Profile::new("gated", LINES)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Self::Conn, Refused> {
        Ok(Vec::new())
    }

    fn call(&self, (): &mut (), _: &mut Self::Conn, message: &Message<'_>, reply: &mut ksf::Reply<'_>) {
        match message.bytes() {
            b"dial" => reply.dial(([127, 0, 0, 1], 9).into(), false).unwrap(),
            bytes => reply.bytes(bytes),
        }
    }

    fn refuse(&self, (): &mut (), _: &mut Self::Conn, _: CloseReason, reply: &mut ksf::Reply<'_>) {
        reply.gate(Gate { log: self.0, number: 1 });
        reply.bytes(b"refused");
    }

    fn upstream(&self, (): &mut (), conn: &mut Self::Conn, event: ksf::outgoing::Upstream, reply: &mut ksf::Reply<'_>) {
        use ksf::outgoing::Upstream;
        match event {
            Upstream::Connected { .. } => {
                reply.gate(Gate { log: self.0, number: 1 });
                reply.bytes(b"connected");
            }
            Upstream::Received(bytes) => reply.bytes(&bytes),
            _ => {
                reply.gate(Gate { log: self.0, number: 2 });
                reply.bytes(b"ended");
                conn.push(reply.defer());
            }
        }
    }
}

struct GatedBench {
    env: Env,
    conn: Box<Connection>,
    log: LogId,
}

impl GatedBench {
    fn new() -> Self {
        let mut env = env(Limits { message_bytes_max: 10, ..Limits::default() }, 4096, 16);
        let log = Turn::new(&mut env).open_log().unwrap();
        let conn = Connection::new(OnShard::new(Arc::new(Gated(log)), ()), Peer::Unix, KEY, env.now).unwrap();
        Self { env, conn, log }
    }

    fn receive(&mut self, bytes: &[u8]) {
        let chunk = in_slot(&mut self.env, bytes);
        self.conn.receive(chunk, &mut self.env);
    }

    fn release(&mut self, number: u64) {
        Turn::new(&mut self.env).release(self.log, number);
        self.conn.open_gates(&mut self.env);
    }

    fn take(&mut self) -> String {
        let Some(batch) = self.conn.take_batch(self.env.now, &mut self.env.spares) else { return String::new() };
        let bytes = bytes_of(&batch);
        self.conn.sent(bytes.len(), true, &mut self.env);
        String::from_utf8(bytes).unwrap()
    }
}

#[test]
fn last_words_wait_for_their_gate_and_the_end_waits_for_them() {
    let mut bench = GatedBench::new();
    bench.receive(b"hello\nlonger than it may be\n");
    assert_eq!((bench.take(), bench.conn.finished()), ("hello\n".into(), None));
    assert_eq!(bench.env.take_gated().len(), 1, "the shard is notified");
    assert_eq!(bench.conn.queued_bytes(), "refused\n".len());
    assert_eq!(bench.conn.owed_bytes(), bench.env.budget.reply_bytes());
    bench.release(1);
    assert_eq!((bench.take(), bench.conn.finished()), ("refused\n".into(), Some(CloseReason::OversizedMessage)));
    assert_eq!(bench.env.budget.reply_bytes(), 0);
}

#[test]
fn replies_out_of_an_exchange_wait_for_their_gates() {
    use ksf::outgoing::Upstream;
    let mut bench = GatedBench::new();
    bench.receive(b"dial\n");
    let GatedBench { env, conn, .. } = &mut bench;
    assert_eq!(env.take_exchange_requests().len(), 1);
    conn.upstream(Upstream::Connected { reused: false }, env);
    conn.upstream(Upstream::Received(ksf::pool::Chunk::from_vec(b"bytes".to_vec())), env);
    conn.upstream(Upstream::Ended, env);
    assert_eq!(bench.take(), "");
    bench.release(1);
    assert_eq!(bench.take(), "connected\nbytes\n", "a later reply does not overtake");
    bench.receive(b"behind\n");
    bench.release(2);
    assert_eq!(bench.take(), "", "bytes in front of the deferral lead the deferred reply");
    // The connection's state keeps the deferred reply, and its end abandons it.
    let GatedBench { mut env, conn, .. } = bench;
    conn.end(&mut env);
    let [abandoned] = &env.mailbox.take_deliveries()[..] else { panic!("there is one") };
    env.budget.orphan_done(abandoned.work_bytes());
    assert_eq!(env.budget.reply_bytes(), 0);
}

/// After a restart a service gets the slots that it kept in its pool's file. The server receives
/// into none of them.
#[test]
fn live_slots_of_the_pool_survive_a_restart() {
    use ksf::pool::{Chunk, Memory, PoolSpec, SlotName};
    use ksf::{Reply, Service};

    /// Keeps each line except `which`, whose reply is all kept lines.
    struct Keeps;
    impl Service for Keeps {
        type Shard = Vec<Chunk>;
        type Conn = ();
        type Mode = Unlogged;
        fn profile(&self) -> Profile<'_> {
            Profile::new("keeps", LINES)
        }
        fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Vec<Chunk>> {
            Ok(turn.take_live())
        }
        fn accept(&self, _: &mut Vec<Chunk>, _: &Peer) -> Result<(), Refused> {
            Ok(())
        }
        fn call(&self, kept: &mut Vec<Chunk>, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
            if message.bytes() == b"which" {
                return reply.bytes(&kept.iter().map(|chunk| &**chunk).collect::<Vec<_>>().join(&b' '));
            }
            let chunk = message.keep();
            let SlotName { pool, index, offset, len } = chunk.name().unwrap();
            reply.bytes(format!("{pool} {index} {offset} {len}").as_bytes());
            kept.push(chunk);
        }
    }

    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        std::fs::File::create(&path).unwrap().set_len(16 * 4096).unwrap();
        let start = |live: Vec<SlotName>| {
            let path = path.clone();
            let pool = move |shard: usize| {
                let file = std::fs::File::options().read(true).write(true).open(&path)?;
                let spec = PoolSpec::new(Memory::File(file.into()), 4096, 16);
                Ok(PoolSpec { id: shard as u16 + 5, headroom_bytes: 100, live: live.clone(), ..spec })
            };
            let builder = Server::builder().engine(engine).cpus(Some(vec![ksf::cpus::allowed().unwrap()[0]]));
            builder.pool(pool).listen(ANY.parse().unwrap(), Arc::new(Keeps), None).start().unwrap()
        };
        let server = start(Vec::new());
        let mut peer = connect(&server);
        let mut names = Vec::new();
        for line in ["one\n", "two\n"] {
            peer.write_all(line.as_bytes()).unwrap();
            let mut answer = Vec::new();
            while answer.last() != Some(&b'\n') {
                answer.extend(read_exactly(&mut peer, 1));
            }
            let text = String::from_utf8(answer).unwrap();
            let numbers: Vec<u32> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
            let [pool, index, offset, len] = numbers[..] else { panic!("{text}") };
            assert_eq!((pool, offset, len), (5, 100, 3), "{engine}");
            names.push(SlotName { pool: pool as u16, index, offset, len });
        }
        drop(peer);
        server.drain().unwrap();

        let server = start(names);
        let mut peer = connect(&server);
        // More than the other slots hold at a time.
        (0..100).for_each(|_| ask(&mut peer, b"which\n", b"one two\n"));
        drop(peer);
        server.drain().unwrap();
    }
}
