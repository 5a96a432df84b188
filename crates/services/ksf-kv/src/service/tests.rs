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

mod backlog;
mod combining;
mod full_log;
mod memory;
mod pipelines;
mod requests;
mod sleep;
mod strangers;
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

fn statuses(responses: &str) -> Vec<&str> {
    responses.split("HTTP/1.1 ").skip(1).map(|response| &response[..3]).collect()
}

/// A command as a RESP array.
fn array(words: impl ExactSizeIterator<Item = String>) -> String {
    let count = words.len();
    words.fold(format!("*{count}\r\n"), |text, word| text + &format!("${}\r\n{word}\r\n", word.len()))
}

impl World {
    fn ask(&mut self, conn: usize, words: &[&str]) -> String {
        self.send(conn, &array(words.iter().map(|word| (*word).to_owned())));
        self.take(conn)
    }
}
