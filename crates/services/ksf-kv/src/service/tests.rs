//! One shard of the server, on a medium whose writes complete when the test lets them.

use std::sync::atomic::AtomicBool;

use ksf::connection::Connection;
use ksf::env::Env;
use ksf::files::FileOutcome;
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::Reply;
use ksf::session::OnShard;
use ksf::{Profile, Service, Turn};
use ksf_test::Folder;
use ksf_test::alloc::{Counting, allocations, bytes};

use super::background::{HOPE_MS, IDLE_MS, NO_HOPE_MS, SWEEP_SLEEP_MS_MAX};
use super::*;
use crate::disk::{BLOCK_BYTES, DiskOptions};

mod combining;
#[path = "../../tests/common/table.rs"] // also where the tests of a whole server have this file
mod table;
mod turns;
mod waiting;

#[global_allocator]
static COUNTING: Counting = Counting;

/// The server, with counters of its shard.
struct Watched {
    kv: Kv,
    /// True: each write completes at the end of the turn after that in which it began.
    completes: AtomicBool,
    /// At the end of the last turn: queued commands, and below bytes not yet on the medium.
    waiting: AtomicU64,
    unwritten_bytes: AtomicU64,
    /// Reads that the queue has not started.
    reads: AtomicU64,
}

impl Service for Watched {
    type Shard = KvShard;
    type Conn = KvConn;
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        self.kv.profile()
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<KvShard> {
        self.kv.start(turn)
    }

    fn accept(&self, shard: &mut KvShard, peer: &Peer) -> Result<KvConn, Refused> {
        self.kv.accept(shard, peer)
    }

    fn cut(&self, conn: &mut KvConn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        self.kv.cut(conn, buf, scanned, limits)
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        self.kv.header_bytes_max(limits)
    }

    fn refuse(&self, shard: &mut KvShard, conn: &mut KvConn, reason: CloseReason, reply: &mut Reply<'_, Logged>) {
        self.kv.refuse(shard, conn, reason, reply);
    }

    fn call(&self, shard: &mut KvShard, conn: &mut KvConn, message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        self.kv.call(shard, conn, message, reply);
    }

    fn resume(
        &self,
        shard: &mut KvShard,
        conn: &mut KvConn,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_, Logged>,
    ) {
        self.kv.resume(shard, conn, state, reply);
    }

    fn session(&self, conn: &KvConn) -> ksf::service::SessionState {
        self.kv.session(conn)
    }

    fn turn_end(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        if self.completes.load(Ordering::Relaxed) {
            for (token, _) in shard.writes.clone() {
                let (result, op) = (Ok(FileOutcome::Done), FileOp::data_sync(&shard.file));
                self.kv.file_done(shard, FileDone { token, result, op }, turn);
            }
        }
        self.kv.turn_end(shard, turn);
        self.waiting.store(shard.queue.len() as u64, Ordering::Relaxed);
        self.reads.store(shard.queue.reads_to_begin() as u64, Ordering::Relaxed);
        self.unwritten_bytes.store(shard.shard.log().unwritten_bytes() as u64, Ordering::Relaxed);
    }

    fn close(&self, shard: &mut KvShard, conn: KvConn) {
        self.kv.close(shard, conn);
    }
}

/// Half a segment.
const UNWRITTEN_BYTES: usize = 512 << 10;
const VALUE_BYTES: usize = 100_000;
const LIMIT: usize = 1 << 20;

struct World {
    env: Env,
    service: Arc<Watched>,
    on: OnShard<Watched>,
    conns: Vec<Option<Box<Connection>>>,
    /// Shards without connections.
    _idle: Vec<KvShard>,
    _folder: Folder,
}

impl World {
    /// Replies are sent before their writes are durable.
    fn new(conns: u32) -> Self {
        Self::durable(conns, Durability::None)
    }

    fn durable(conns: u32, durability: Durability) -> Self {
        Self::on_last_of(1, conns, durability)
    }

    /// All connections are on the last of `shards` shards.
    fn on_last_of(shards: u16, conns: u32, durability: Durability) -> Self {
        Self::on(Folder::new(), Medium::Block, shards, conns, durability)
    }

    /// [`Self::on_last_of`] in `folder`, on `medium`.
    fn on(folder: Folder, medium: Medium, shards: u16, conns: u32, durability: Durability) -> Self {
        Self::set_up(folder, medium, shards, conns, Settings { durability, ..Settings::default() })
    }

    fn set_up(folder: Folder, medium: Medium, shards: u16, conns: u32, settings: Settings) -> Self {
        let options = DiskOptions { logs: shards, segment_bytes: 2 * UNWRITTEN_BYTES as u64, places: 8, medium };
        Self::set_up_with(folder, options, conns, settings)
    }

    fn set_up_with(folder: Folder, options: DiskOptions, conns: u32, settings: Settings) -> Self {
        let shards = options.logs;
        let disk = Disk::open(&folder.path(""), options).unwrap();
        let service = Arc::new(Watched {
            kv: Kv::new(disk, settings, |error| panic!("a write failed: {error}")).unwrap(),
            completes: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            unwritten_bytes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
        });
        let limits = Limits { message_bytes_max: LIMIT, connection_bytes_max: LIMIT, ..Limits::default() };
        let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 8).unwrap()).unwrap();
        let mut idle: Vec<_> = (0..shards).map(|_| service.start(&mut Turn::new(&mut env)).unwrap()).collect();
        let on = OnShard::new(Arc::clone(&service), idle.pop().unwrap());
        let key = |index| ConnKey { index, generation: 0 };
        let conn = |index| Some(Connection::new(on.clone(), Peer::Unix, key(index), env.now).unwrap());
        let conns = (0..conns).map(conn).collect();
        Self { env, service, on, conns, _idle: idle, _folder: folder }
    }

    /// Hands the bytes of inline commands over in one chunk.
    fn receive(&mut self, conn: usize, commands: &str) {
        let chunk = Chunk::from_vec(commands.as_bytes().to_vec());
        self.conns[conn].as_mut().unwrap().receive(chunk, &mut self.env);
    }

    /// [`Self::receive`], then [`Self::end_turn`].
    fn send(&mut self, conn: usize, commands: &str) {
        self.receive(conn, commands);
        self.end_turn();
    }

    fn set(&mut self, conn: usize, keys: std::ops::Range<usize>) {
        let value = "v".repeat(VALUE_BYTES);
        let set = |key| format!("*3\r\n$3\r\nSET\r\n$1\r\n{key}\r\n${VALUE_BYTES}\r\n{value}\r\n");
        self.send(conn, &keys.map(set).collect::<String>());
    }

    fn end_one_turn(&mut self) {
        self.on.turn_end(&mut self.env);
        for delivery in self.env.take_answered() {
            if let Some(conn) = &mut self.conns[delivery.key().index as usize] {
                conn.deliver(delivery, &mut self.env);
            }
        }
    }

    fn end_turn(&mut self) {
        while self.on.waits_for_turn_end() {
            self.end_one_turn();
        }
        self.env.take_gated();
        self.conns.iter_mut().flatten().for_each(|conn| conn.open_gates(&mut self.env));
    }

    /// Advances the clock to the wake-up that the service requested. Returns the milliseconds until then, `None` without a request.
    fn sleep(&mut self) -> Option<u64> {
        let at = self.env.next_wake()?;
        let slept = at.since(self.env.now);
        self.env.now = at;
        assert_eq!(self.env.take_due_wakes().count(), 1);
        self.on.wake();
        self.end_turn();
        Some(slept.as_millis() as u64)
    }

    /// Lets writes complete from now on.
    fn complete(&mut self) {
        self.service.completes.store(true, Ordering::Relaxed);
    }

    fn waiting(&self) -> u64 {
        self.service.waiting.load(Ordering::Relaxed)
    }

    /// The next batch of replies of a connection, `None` without one.
    fn take_batch(&mut self, conn: usize) -> Option<String> {
        let mut batch = self.conns[conn].as_mut().unwrap().take_batch(self.env.now, &mut self.env.spares)?;
        let mut slices = [&[][..]; 64];
        let filled = batch.slices(&mut slices);
        let taken = slices[..filled].concat();
        let bytes = batch.len();
        assert_eq!(taken.len(), bytes);
        batch.advance(bytes, &mut self.env.spares);
        batch.recycle(&mut self.env.spares);
        self.conns[conn].as_mut().unwrap().sent(bytes, true, &mut self.env);
        Some(String::from_utf8(taken).unwrap())
    }

    /// All replies of a connection.
    fn take(&mut self, conn: usize) -> String {
        let mut taken = String::new();
        while let Some(batch) = self.take_batch(conn) {
            taken.push_str(&batch);
            self.end_turn();
        }
        taken
    }
}

/// While the medium stalls, writers wait, and the shard keeps no more unwritten bytes than the bound and one command.
#[test]
fn slow_medium_delays_writes_but_no_reads() {
    let mut world = World::new(2);
    world.set(0, 0..10);
    assert_eq!((world.waiting(), world.take(0)), (4, "+OK\r\n".repeat(6)));
    let unwritten_bytes = world.service.unwritten_bytes.load(Ordering::Relaxed) as usize;
    let bounds = UNWRITTEN_BYTES..UNWRITTEN_BYTES + VALUE_BYTES + 3 * BLOCK_BYTES;
    assert!(bounds.contains(&unwritten_bytes), "{unwritten_bytes}");
    world.send(1, "STRLEN 5\r\nEXISTS 6\r\n");
    assert_eq!(world.take(1), format!(":{VALUE_BYTES}\r\n:0\r\n"), "a command that reads does not wait");
    world.send(1, "DEL 5\r\nEXISTS 5\r\n");
    assert_eq!((world.waiting(), world.take(1)), (6, String::new()), "nor does one overtake those of its connection");
    world.complete();
    world.send(0, "PING\r\n");
    assert_eq!((world.take(0), world.take(1)), ("+OK\r\n".repeat(4) + "+PONG\r\n", ":1\r\n:0\r\n".into()));
    assert_eq!(world.waiting(), 0);
}

/// On persistent memory the shard starts no file operation. It sends replies in the turn of their commands, also if these write
/// more than the bound of unwritten bytes.
#[test]
fn writes_to_persistent_memory_are_acknowledged_in_their_turn() {
    let Some(folder) = Folder::in_memory_or_skip() else { return };
    let mut world = World::on(folder, Medium::PmemMemory, 1, 2, Durability::Always);
    for round in 0..3 {
        world.send(0, &format!("SET key {round}\r\nGET key\r\n"));
        assert_eq!(world.take(0), format!("+OK\r\n$1\r\n{round}\r\n"));
    }
    world.set(0, 0..10);
    assert_eq!((world.waiting(), world.take(0)), (0, "+OK\r\n".repeat(10)));
    assert_eq!(world.service.unwritten_bytes.load(Ordering::Relaxed), 0);
    world.send(1, "SAVE\r\nINFO persistence\r\n");
    let said = world.take(1);
    assert!(said.starts_with("+OK\r\n"), "{said}");
    assert!(said.contains("\r\nksf_medium:pmem-memory\r\nksf_survives_power_cut:0\r\n"), "{said}");
}

/// When queued commands continue together, their replies stay within the limit of the connection.
#[test]
fn a_pipeline_that_waits_is_answered_whole() {
    const READS: usize = 30;
    let mut world = World::new(2);
    world.set(0, 0..6);
    world.take(0);
    let reads = "GET 0\r\n".repeat(READS);
    world.send(1, &format!("SET short value\r\n{reads}GET short\r\n"));
    assert_eq!((world.waiting(), world.take(1)), (2, String::new()), "a read that waits may have a long reply");
    world.complete();
    world.send(0, "PING\r\n");
    let replies = world.take(1);
    assert!(replies.starts_with("+OK\r\n$100000\r\n") && replies.ends_with("$5\r\nvalue\r\n"), "{}", replies.len());
    assert_eq!(replies.matches("$100000").count(), READS);
    assert!(!world.conns[1].as_ref().unwrap().is_closing());
}

/// As if others had taken all of the shard's memory.
#[test]
fn a_short_transaction_needs_no_room_and_a_long_one_is_refused() {
    let mut world = World::new(1);
    let room_bytes = std::mem::replace(&mut world.env.limits.shard_bytes_max, 1);
    let value = "x".repeat(1000);
    let transaction = |world: &mut World, sets: usize| {
        assert_eq!(world.ask(0, &["MULTI"]), "+OK\r\n");
        let queued: String = (0..sets).map(|_| world.ask(0, &["SET", "key", &value])).collect();
        (queued, world.ask(0, &["EXEC"]))
    };
    assert_eq!(transaction(&mut world, 3), ("+QUEUED\r\n".repeat(3), format!("*3\r\n{}", "+OK\r\n".repeat(3))));
    let (queued, done) = transaction(&mut world, 4);
    assert!(
        queued.contains("-OOM no room for more of a transaction") && done.starts_with("-EXECABORT"),
        "{queued}{done}"
    );
    world.env.limits.shard_bytes_max = room_bytes;
    assert_eq!(transaction(&mut world, 4).0, "+QUEUED\r\n".repeat(4));
}

/// The reply to `SAVE` waits until all earlier writes are durable, also if replies to writes do not wait.
#[test]
fn save_waits_for_what_was_acknowledged() {
    let mut world = World::new(2);
    world.send(0, "SET a 1\r\nSET b 2\r\n");
    assert_eq!(world.take(0), "+OK\r\n+OK\r\n");
    world.send(1, "SAVE\r\nBGSAVE\r\nLASTSAVE\r\n");
    assert_eq!(world.take(1), "", "it is not on the medium");
    world.complete();
    world.send(0, "PING\r\n");
    world.end_turn();
    assert_eq!(world.take(0), "+PONG\r\n");
    let replies = world.take(1);
    assert!(replies.starts_with("+OK\r\n+Background saving started\r\n:"), "{replies}");
}

#[test]
fn closing_connection_drops_queued_commands() {
    let mut world = World::new(3);
    world.set(0, 0..10);
    world.send(1, "SET kept 1\r\n");
    assert_eq!(world.waiting(), 5);
    world.conns[0].take().unwrap().end(&mut world.env);
    world.end_turn();
    assert_eq!(world.waiting(), 1, "that of the other connection");
    world.complete();
    world.send(2, "PING\r\n");
    assert_eq!((world.waiting(), world.take(1)), (0, "+OK\r\n".into()));
    world.send(2, "EXISTS 5 9\r\n");
    assert_eq!(world.take(2), "+PONG\r\n:1\r\n", "what was carried out before stays, the rest was not");
}

/// The end of a connection costs a number of looks that depends on its own queued commands only.
#[test]
fn closing_connection_visits_its_own_commands_only() {
    const CONNS: usize = 40;
    const EACH: usize = 50;
    let mut world = World::new(CONNS as u32 + 1);
    world.set(CONNS, 0..10);
    (0..CONNS).for_each(|conn| world.send(conn, &"INCR key\r\n".repeat(EACH)));
    assert_eq!(world.waiting() as usize, 4 + CONNS * EACH);
    let before = queue::LOOKS.get();
    (0..CONNS).for_each(|conn| world.conns[conn].take().unwrap().end(&mut world.env));
    let looks = (queue::LOOKS.get() - before) as usize;
    world.end_turn();
    assert_eq!(world.waiting(), 4);
    assert!(looks <= CONNS * (EACH + 1), "{looks}");
}

/// A connection that ends drops its reads that have not started.
#[test]
fn reads_go_with_their_connection() {
    const EACH: usize = 50;
    let settings = Settings { durability: Durability::None, memory_bytes_max: 1 << 20, ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 1, 3, settings);
    world.complete();
    let value = "v".repeat(16 << 10);
    let mut told = (0..4 * EACH).map(|key| world.ask(0, &["SET", &format!("key:{key}"), &value]));
    assert!(told.all(|told| told == "+OK\r\n"));
    for conn in [1, 2] {
        let keys = (conn * EACH..(conn + 1) * EACH).map(|key| format!("key:{key}"));
        let words: Vec<String> = ["MGET".to_owned()].into_iter().chain(keys).collect();
        world.send(conn, &array(words.into_iter()));
    }
    let reads = |world: &World| world.service.reads.load(Ordering::Relaxed);
    assert!(world.waiting() == 2 && reads(&world) > 0, "{}", reads(&world));
    world.conns[2].take().unwrap().end(&mut world.env);
    world.end_turn();
    assert_eq!((world.waiting(), reads(&world)), (1, 0));
}

/// The budget counts at least the bytes that the allocator gave to a queued command.
#[test]
fn queued_command_counts_all_its_memory() {
    const COMMANDS: usize = 500;
    /// Overhead of the allocator for the three allocations of a command.
    const OVERHEAD_BYTES: usize = 3 * 16;
    let mut world = World::new(4);
    assert_eq!(world.ask(0, &["CLIENT", "PAUSE", "600000", "ALL"]), "+OK\r\n");
    let delete = "DELETE /key HTTP/1.1\r\nHost: x\r\n\r\n";
    for (conn, command) in [(1, "INCR key\r\n"), (2, "*2\r\n$4\r\nINCR\r\n$3\r\nkey\r\n"), (3, delete)] {
        let (taken, counted, waiting) = (bytes(), world.env.budget.reply_bytes(), world.waiting() as usize);
        world.send(conn, &command.repeat(COMMANDS));
        assert_eq!(world.waiting() as usize, waiting + COMMANDS);
        let taken = (bytes() - taken) as usize / COMMANDS + OVERHEAD_BYTES;
        let counted = (world.env.budget.reply_bytes() - counted) / COMMANDS;
        assert!(taken <= counted, "{command:?}: {taken} bytes, of which {counted} are counted");
    }
}

/// `WAIT` reserves no room for a long reply.
#[test]
fn wait_reserves_no_long_reply() {
    let mut world = World::new(1);
    let before = world.env.budget.reply_bytes();
    world.send(0, "WAIT 1 0\r\n");
    assert_eq!(world.waiting(), 1);
    let counted = world.env.budget.reply_bytes() - before;
    assert!(counted < 4096, "{counted}");
}

fn statuses(responses: &str) -> Vec<&str> {
    responses.split("HTTP/1.1 ").skip(1).map(|response| &response[..3]).collect()
}

/// The reply to a reader of an unwritten value waits as that to its writer, over either protocol.
#[test]
fn no_response_is_sent_before_its_data_is_durable() {
    let mut world = World::durable(8, Durability::Always);
    world.send(0, "PUT /key HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nvalue");
    world.send(1, "GET /key HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n");
    world.send(2, "GET key\r\n");
    // A refusal reveals the state of the key, too.
    let others = [
        ("GET /", "", "200"),
        ("HEAD /key", "", "200"),
        ("GET /key", "Range: bytes=9-\r\n", "416"),
        ("PUT /key", "If-None-Match: *\r\nContent-Length: 0\r\n", "412"),
        ("DELETE /key", "If-Match: \"x\"\r\n", "412"),
    ];
    for (at, (line, fields, _)) in others.iter().enumerate() {
        world.send(3 + at, &format!("{line} HTTP/1.1\r\nHost: x\r\n{fields}\r\n"));
    }
    for conn in 0..8 {
        assert_eq!(world.take(conn), "", "{conn}");
    }
    world.send(0, "DELETE /key HTTP/1.1\r\nHost: x\r\n\r\nGET /key HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(world.take(0), "");
    world.complete();
    world.send(2, "EXISTS key\r\n");
    world.end_turn();
    assert_eq!(statuses(&world.take(0)), ["201", "204", "404"]);
    let read = world.take(1);
    assert_eq!(statuses(&read), ["200", "200"]);
    assert!(read.contains("\r\n\r\nvalue") && read.ends_with("{\"keys\":[\"key\"],\"next\":null}\n"), "{read}");
    assert_eq!(world.take(2), "$5\r\nvalue\r\n:0\r\n");
    for (at, (line, _, status)) in others.iter().enumerate() {
        assert_eq!(statuses(&world.take(3 + at)), [*status], "{line}");
    }
}

/// Requests of HTTP that write wait for the medium in their order, as commands do. So does the `100 Continue` of a later one.
#[test]
fn requests_that_write_wait_for_a_medium_that_is_behind() {
    let mut world = World::new(2);
    world.set(0, 0..6);
    world.take(0);
    let get = "GET /0 HTTP/1.1\r\nHost: x\r\n\r\n";
    world.send(1, get);
    assert_eq!(statuses(&world.take(1)), ["200"]);
    let put = "PUT /6 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nvalue";
    let asks = put.replace("Host", "Expect: 100-continue\r\nHost").replace("value", "");
    world.send(1, &format!("{put}{get}{asks}"));
    assert_eq!((world.waiting(), world.take(1)), (2, String::new()));
    world.complete();
    world.send(0, "PING\r\n");
    assert_eq!(statuses(&world.take(1)), ["201", "200", "100"]);
    world.send(1, "again");
    world.send(1, &get.replace("/0", "/6"));
    let told = world.take(1);
    assert_eq!(statuses(&told), ["204", "200"]);
    assert!(told.ends_with("\r\n\r\nagain"), "{told}");
}

/// Counts allocations from the bytes of the commands to the records in the batch and the replies.
#[test]
fn a_warm_set_and_get_of_a_key_that_is_there_allocate_nothing() {
    const PIPELINE: usize = 16;
    let mut world = World::new(1);
    world.complete();
    let value = "v".repeat(64);
    let (set, get) =
        (format!("*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$64\r\n{value}\r\n"), "*2\r\n$3\r\nget\r\n$3\r\nkey\r\n");
    let (commands, replies) = ((set + get).repeat(PIPELINE), format!("+OK\r\n$64\r\n{value}\r\n").repeat(PIPELINE));
    for round in 0..40 {
        let mut slot = world.env.pool.take().unwrap();
        slot.as_mut_slice()[..commands.len()].copy_from_slice(commands.as_bytes());
        let chunk = slot.freeze(commands.len());
        let before = allocations();
        world.conns[0].as_mut().unwrap().receive(chunk, &mut world.env);
        let counted = allocations() - before;
        world.end_turn();
        assert_eq!(world.take(0), replies);
        assert!(round < 20 || counted == 0, "{counted} allocations for {} commands in round {round}", 2 * PIPELINE);
    }
}

/// An idle log writes one commit marker. A shard without work requests no wake-up.
#[test]
fn idle_shard_writes_one_marker_and_sleeps() {
    let mut world = World::new(1);
    world.complete();
    for round in 0..3 {
        world.send(0, "SET a 1\r\n");
        world.send(0, "PING\r\n");
        assert_eq!(world.take(0), "+OK\r\n+PONG\r\n");
        assert_eq!(world.sleep(), Some(IDLE_MS), "round {round}");
        assert!(world.service.unwritten_bytes.load(Ordering::Relaxed) > 0, "it writes a commit marker");
        world.send(0, "PING\r\n");
        assert_eq!((world.take(0), world.sleep()), ("+PONG\r\n".into(), None), "round {round}");
    }
    // Reads, and writes that change nothing, need no marker.
    world.send(0, "GET a\r\nDEL b\r\n");
    assert_eq!((world.take(0), world.sleep()), ("$1\r\n1\r\n:0\r\n".into(), None));
}

/// Other shards sleep and do not learn of the key: the shard that set it wakes for its expiry.
#[test]
fn shard_that_set_a_key_wakes_for_its_expiry() {
    let mut world = World::on_last_of(2, 1, Durability::None);
    world.complete();
    world.send(0, "SET later 1 EX 100\r\n");
    world.send(0, "PING\r\n");
    assert_eq!(world.take(0), "+OK\r\n+PONG\r\n");
    world.sleep();
    world.send(0, "PING\r\n");
    assert_eq!((world.take(0), world.sleep()), ("+PONG\r\n".into(), Some(SWEEP_SLEEP_MS_MAX)));
}

/// A shard wakes for the next expiry, but sleeps no longer than it trusts the clock.
#[test]
fn a_shard_sleeps_until_a_key_ends() {
    let mut world = World::new(1);
    world.complete();
    world.send(0, "SET later 1 EX 100\r\n");
    world.send(0, "PING\r\n");
    world.sleep();
    world.send(0, "PING\r\n");
    assert_eq!(world.take(0), "+OK\r\n+PONG\r\n+PONG\r\n");
    assert_eq!(world.sleep(), Some(SWEEP_SLEEP_MS_MAX));
    assert_eq!(world.sleep(), Some(SWEEP_SLEEP_MS_MAX), "its clock stands still here");
}

/// A command as a RESP array.
fn array(words: impl ExactSizeIterator<Item = String>) -> String {
    let count = words.len();
    words.fold(format!("*{count}\r\n"), |text, word| text + &format!("${}\r\n{word}\r\n", word.len()))
}

/// Another client gets its reply after a bounded part of the pipeline.
#[test]
fn pipeline_of_dear_commands_lets_others_in() {
    const KEYS: usize = 6_000;
    let mut world = World::new(2);
    world.complete();
    for first in (0..KEYS).step_by(1_000) {
        let keys = (first..first + 1_000).flat_map(|key| [format!("key:{key}"), "v".to_owned()]);
        let words: Vec<String> = ["MSET".to_owned()].into_iter().chain(keys).collect();
        world.send(0, &array(words.into_iter()));
        let members = (first..first + 1_000).map(|member| format!("member:{member}"));
        let words: Vec<String> = ["SADD".to_owned(), "set".to_owned()].into_iter().chain(members).collect();
        world.send(0, &array(words.into_iter()));
    }
    for key in ["one", "other"] {
        world.send(0, &array(["SET", key, &"ab".repeat(400)].map(str::to_owned).into_iter()));
    }
    world.take(0);
    for (count, command, reply) in [
        (500, "KEYS nothing*\r\n", "*0\r\n"),
        (8, "SUNIONSTORE to set\r\n", ":6000\r\n"),
        (20, "SCARD set\r\nSDIFF set to\r\n", ":6000\r\n*0\r\n"),
        (20, "MULTI\r\nSDIFF set to\r\nSDIFF set to\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n*0\r\n*0\r\n"),
        (20, "LCS one other LEN\r\n", ":800\r\n"),
        (20, "MULTI\r\nLCS one other LEN\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n*1\r\n:800\r\n"),
    ] {
        world.receive(0, &command.repeat(count));
        let (mut told, mut turns) = (String::new(), 0);
        loop {
            world.receive(1, "PING\r\n");
            assert_eq!(world.take_batch(1).as_deref(), Some("+PONG\r\n"), "{command:?}");
            while let Some(batch) = world.take_batch(0) {
                told.push_str(&batch);
            }
            if told.len() >= reply.len() * count {
                break;
            }
            turns += 1;
            assert!(turns <= 4 * count, "{command:?} does not go on");
            world.end_one_turn();
        }
        assert!(told == reply.repeat(count), "{command:?}: {}", &told[..told.len().min(400)]);
        // At most three of these fit into one turn.
        assert!(turns >= count / 4 - 1, "{command:?}: {turns} turns for {count}");
        world.end_turn();
    }
    // A pipeline of cheap commands ends within one turn.
    world.receive(0, &"STRLEN one\r\n".repeat(1_000));
    assert_eq!(world.take_batch(0).map(|told| told.matches(":800\r\n").count()), Some(1_000));
}

/// A command that names a key repeatedly costs as much as one that names it once.
#[test]
fn a_set_that_is_named_many_times_is_gone_through_once() {
    const TIMES: usize = 50;
    let mut world = World::new(1);
    world.complete();
    for (key, members) in [("set", 0..2_000), ("other", 1_000..2_500)] {
        let words = ["SADD".to_owned(), key.to_owned()].into_iter().chain(members.map(|member| member.to_string()));
        world.send(0, &array(words.collect::<Vec<_>>().into_iter()));
    }
    world.take(0);
    let mut told = |name: &str, keys: &[&str]| {
        let before = work::done();
        let words: Vec<&str> = name.split(' ').chain(keys.iter().copied()).collect();
        let reply = world.ask(0, &words);
        let units = work::done() - before;
        let reply = if words.len() > 1 + keys.len() { world.ask(0, &["SMEMBERS", "to"]) } else { reply };
        (reply.replacen('~', "*", 1), units)
    };
    for (plain, store) in [("SUNION", "SUNIONSTORE to"), ("SINTER", "SINTERSTORE to"), ("SDIFF", "SDIFFSTORE to")] {
        for name in [plain, store] {
            for keys in [&["set"][..], &["set", "other"], &["other", "set"], &["set", "nothing"], &["nothing", "set"]] {
                // The first one replaces the destination, which is work, too.
                told(name, keys);
                let (reply, units) = told(name, keys);
                let all = keys.repeat(TIMES);
                let others = [&keys[..1], &keys[1..].repeat(TIMES)].concat();
                let is_diff = plain == "SDIFF";
                for (many, expected) in [(all, if is_diff { "*0\r\n" } else { &reply }), (others, &reply)] {
                    let (reply, many_units) = told(name, &many);
                    assert!(reply == expected, "{name} {keys:?}: {}", &reply[..reply.len().min(200)]);
                    let bound = units + 4 * many.len() as u64;
                    assert!(many_units <= bound, "{name} {keys:?}: {many_units} units of {bound}");
                }
            }
        }
    }
}

/// Commands count as work also if their replies are dropped, or if they find nothing.
#[test]
fn pipeline_without_replies_lets_others_in() {
    let mut world = World::new(2);
    world.complete();
    let long = "b".repeat(6_000);
    for command in [["SET", &long, ""], ["SADD", "set", &long]] {
        world.ask(0, &command);
    }
    world.ask(0, &["HSET", "hash", &long, ""]);
    world.ask(0, &["ZADD", "scores", "1", &long]);
    let class = format!("*[{}]", "a".repeat(1_000));
    let many = |count: usize, words: &[&str]| array(words.iter().map(|word| (*word).to_owned())).repeat(count);
    for (commands, turns_min) in [
        (many(200, &["COMMAND", "DOCS"]), 50),
        (many(200, &["COMMAND"]), 20),
        (many(2_000, &["COMMAND", "LIST", "FILTERBY", "PATTERN", "nothing*"]), 50),
        (many(1_000, &["INFO"]), 5),
        (many(1_000, &["CLIENT", "LIST"]), 2),
        (many(1_000, &["PING", &long]), 20),
        (many(1_000, &["KEYS", &class]), 5),
        (many(1_000, &["SCAN", "0", "MATCH", &class]), 5),
        (many(1_000, &["HSCAN", "hash", "0", "MATCH", &class]), 5),
        (many(1_000, &["SSCAN", "set", "0", "MATCH", &class]), 5),
        (many(1_000, &["ZSCAN", "scores", "0", "MATCH", &class]), 5),
    ] {
        world.receive(0, &format!("CLIENT REPLY OFF\r\n{commands}CLIENT REPLY ON\r\n"));
        let what = commands[..60].escape_default();
        let mut turns = 0;
        while world.take_batch(0).is_none() {
            world.receive(1, "PING\r\n");
            assert_eq!(world.take_batch(1).as_deref(), Some("+PONG\r\n"), "{what}");
            turns += 1;
            assert!(turns <= 10_000, "{what} does not go on");
            world.end_one_turn();
        }
        assert!(turns >= turns_min, "{what}: {turns} turns");
        world.end_turn();
    }
}

/// An empty line has no reply, and either protocol may follow it.
#[test]
fn a_stranger_is_ended_after_a_few_empty_lines() {
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 1, 2, settings);
    world.send(0, &"\n \r\n".repeat(16));
    assert!(!world.conns[0].as_ref().unwrap().is_closing());
    assert_eq!(world.ask(0, &["AUTH", "open sesame"]), "+OK\r\n");
    world.send(0, &"\n".repeat(1_000));
    assert_eq!(world.ask(0, &["PING"]), "+PONG\r\n");
    world.send(1, &"\n".repeat(33));
    assert!(world.conns[1].as_ref().unwrap().is_closing());
    assert_eq!(world.take_batch(1), None);
    // Without a password there is no bound, as in Redis.
    let mut world = World::new(1);
    world.send(0, &"\n".repeat(1_000));
    assert_eq!(world.ask(0, &["PING"]), "+PONG\r\n");
}

/// Unfinished inputs of strangers: the front, and the part that grows.
fn unfinished() -> Vec<(&'static str, String)> {
    let arguments = format!("$1500\r\n{}\r\n", "v".repeat(1500)).repeat(9);
    let chunks = format!("100\r\n{}\r\n", "v".repeat(256)).repeat(50);
    let fields = "X-Field: value\r\n".repeat(900);
    vec![
        ("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n", format!("$16000\r\n{}", "v".repeat(15_000))),
        ("*10\r\n", format!("{arguments}$1000\r\n{}", "v".repeat(999))),
        ("SET key ", "v".repeat(15_000)),
        ("GET /", "k".repeat(15_000)),
        ("PUT /key HTTP/1.1\r\nHost: x\r\n", fields.clone()),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nContent-Length: 16000\r\n\r\n", "v".repeat(15_000)),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunks),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", fields[..4000].to_owned()),
    ]
}

/// Counts allocated bytes for unfinished inputs, and for replies that the stranger does not read.
#[test]
fn a_stranger_takes_16_kib_of_memory() {
    const MOST: i64 = 16 << 10;
    // The connection itself, and the rest of whole pages.
    const BESIDE: i64 = 4 << 10;
    let no_request = "GET /key HTTP/1.1\r\nHost: x\r\n\r\n";
    let unread = ["PING\r\n", "*1\r\n$4\r\nPING\r\n", "AUTH no\r\n", no_request].map(|one| ("", one.repeat(20_000)));
    for (front, rest) in unfinished().into_iter().chain(unread) {
        for step in [1, 1000, 60_000] {
            let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
            let mut world = World::set_up(Folder::new(), Medium::Block, 1, 0, settings);
            let what = format!("{}... by {step}", format!("{front}{rest}")[..40].escape_default());
            let before = bytes();
            let key = ConnKey { index: 0, generation: 0 };
            let conn = Connection::new(world.on.clone(), Peer::Unix, key, world.env.now).unwrap();
            world.conns.push(Some(conn));
            for piece in [front, &rest].iter().flat_map(|part| part.as_bytes().chunks(step)) {
                let conn = world.conns[0].as_mut().unwrap();
                if conn.is_closing() || !conn.wants_bytes(&world.env) {
                    break;
                }
                conn.receive(Chunk::from_vec(piece.to_vec()), &mut world.env);
                world.end_turn();
            }
            // Buffers that are kept for later messages are no memory of this one.
            world.env.buffers.free_kept();
            let (taken, counted) = (bytes() - before, world.env.budget.bytes() as i64);
            assert!(taken <= MOST + BESIDE, "{what}: {taken} bytes");
            assert!(counted <= MOST + BESIDE, "{what}: {counted} bytes are counted");
        }
    }
}

/// Each byte of a message that arrives in pieces is scanned once, except for a few at its front and at its end, and for the length
/// of the unfinished argument. The test overwrites the bytes between with some that would end the message.
#[test]
fn a_resumed_look_at_a_message_does_not_begin_anew() {
    /// Empty lines in front of a request, and its method.
    const FRONT_BYTES: usize = 33;
    /// A line with a number.
    const END_BYTES: usize = 24;
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 2, 0, settings);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let limits = Limits::default();
    let many = ("*2000\r\n", "$4\r\nmore\r\n".repeat(1999));
    let known = || unfinished().into_iter().chain([many.clone()]).map(|input| (Standing::Known, input));
    let all = unfinished().into_iter().map(|input| (Standing::Unknown, input)).chain(known());
    // The end of a body with a length is known.
    for (standing, (front, rest)) in all.filter(|(_, (front, _))| !front.contains("Content-Length")) {
        for step in [1, 7, 100] {
            let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
            conn.session.standing = standing;
            let mut buf = front.as_bytes().to_vec();
            assert!(matches!(kv.cut(&mut conn, &buf, 0, &limits), Ok(Frame::Incomplete { .. })), "{front}");
            let (mut from, mut argument) = (FRONT_BYTES.max(front.len()), usize::MAX);
            for piece in rest.as_bytes().chunks(step) {
                let scanned = buf.len();
                let end = argument.min(scanned.saturating_sub(END_BYTES));
                buf.get_mut(from..end).unwrap_or_default().fill(b'\n');
                from = from.max(end);
                argument = piece.iter().rposition(|byte| *byte == b'$').map_or(argument, |at| scanned + at);
                buf.extend_from_slice(piece);
                let told = kv.cut(&mut conn, &buf, scanned, &limits);
                let is_open = matches!(told, Ok(Frame::Incomplete { .. }));
                assert!(is_open, "{front} by {step}: {told:?} at {}", buf.len());
            }
            kv.close(shard, conn);
        }
    }
}

/// With a password, a peer that authenticates over either protocol is no stranger until `RESET`, or until a request without the
/// password.
#[test]
fn authenticated_peer_is_no_stranger() {
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 2, 0, settings);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let limits = Limits::default();
    let is_stranger = |conn: &KvConn| kv.session(conn).is_stranger;
    let request = |fields: &str| format!("GET /key HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes();
    let with = request("Authorization: Bearer open sesame\r\n");
    let part_of_body = b"PUT /key HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer open sesame\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab";
    for (bytes, is_one) in [
        (&request("")[..], true),
        (&request("Authorization: Bearer no\r\n"), true),
        (&with, false),
        (&part_of_body[..], false),
        // The head is unfinished.
        (&with[..with.len() - 2], true),
    ] {
        let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
        assert!(is_stranger(&conn));
        kv.cut(&mut conn, bytes, 0, &limits).unwrap();
        assert_eq!(is_stranger(&conn), is_one, "{}", bytes.escape_ascii());
        kv.close(shard, conn);
    }
    let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
    for (bytes, is_one) in [(&with, false), (&request(""), true), (&with, false), (&request("X: y\r\n"), true)] {
        kv.cut(&mut conn, bytes, 0, &limits).unwrap();
        assert_eq!(is_stranger(&conn), is_one, "{}", bytes.escape_ascii());
    }
    kv.close(shard, conn);
    // Without a password, no local peer is a stranger.
    let mut world = World::on_last_of(2, 0, Durability::None);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
    kv.cut(&mut conn, &request(""), 0, &limits).unwrap();
    assert!(!kv.session(&conn).is_stranger);
    kv.close(shard, conn);
}

impl World {
    fn ask(&mut self, conn: usize, words: &[&str]) -> String {
        self.send(conn, &array(words.iter().map(|word| (*word).to_owned())));
        self.take(conn)
    }

    /// Sets keys until the log is full. Returns their number.
    fn fill(&mut self) -> usize {
        let keys = (0..200).find(|number| self.ask(0, &["SET", &long_key(*number), ""]) != "+OK\r\n").unwrap();
        assert!(keys > 50, "{keys}");
        let told = self.ask(0, &["SET", &long_key(keys), ""]);
        assert!(told.starts_with("-OOM the log is full"), "{told}");
        keys
    }
}

/// A key so long that a few removals use up the reserve.
fn long_key(number: usize) -> String {
    format!("{number:060000}")
}

/// A removal without room waits for the cleaner, whose reads never complete here, for at most `HOPE_MS`. Then removals are refused
/// for `NO_HOPE_MS`.
#[test]
fn removal_without_room_is_refused_after_a_bounded_wait() {
    let mut world = World::new(3);
    world.complete();
    let keys = world.fill();
    let waits = (0..keys).find(|number| world.ask(0, &["DEL", &long_key(*number)]) != ":1\r\n").unwrap();
    assert!(waits > 5, "{waits}");
    let pass = |world: &mut World, ms: u64| {
        world.env.now = world.env.now.plus_ms(ms);
        assert_eq!(world.ask(1, &["PING"]), "+PONG\r\n");
        world.take(0)
    };
    assert_eq!((world.waiting(), pass(&mut world, HOPE_MS - 1)), (1, String::new()));
    let told = pass(&mut world, 1);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    let told = world.ask(2, &["DEL", &long_key(waits)]);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    assert_eq!(pass(&mut world, NO_HOPE_MS), "");
    assert_eq!((world.ask(2, &["DEL", &long_key(waits)]), world.waiting()), (String::new(), 1));
    assert_eq!(world.ask(1, &["STRLEN", &long_key(waits)]), ":0\r\n", "what only reads does not wait");
}

/// Queued commands continue together, and one of them must wait again: no later command of its connection overtakes it.
#[test]
fn no_command_overtakes_one_that_waits_once_more() {
    const PAIRS: usize = 14;
    let mut world = World::new(2);
    world.complete();
    world.fill();
    (0..8).for_each(|number| assert_eq!(world.ask(0, &["DEL", &long_key(number)]), ":1\r\n"));
    world.service.completes.store(false, Ordering::Relaxed);
    let pair = |number| array(["DEL", &long_key(number)].map(str::to_owned).into_iter()) + "HDEL nothing field\r\n";
    world.send(0, &(8..8 + PAIRS).map(pair).collect::<String>());
    let mut told = world.take(0);
    assert!(world.waiting() > 0, "the medium is behind");
    world.complete();
    for _ in 0..PAIRS {
        assert_eq!(world.ask(1, &["PING"]), "+PONG\r\n");
        told.push_str(&world.take(0));
    }
    let replies = told.lines().count();
    assert!((2..2 * PAIRS).contains(&replies), "{replies}");
    assert_eq!((told, world.waiting() as usize), (":1\r\n:0\r\n".repeat(replies / 2), 2 * PAIRS - replies));
}
