//! What several test files need: services that record, and a connection driven by hand.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "every test file uses a part of it")]

pub mod calls;
pub mod files;
pub mod keeper;
pub mod meter;
pub mod net;

use std::sync::{Arc, Mutex};

use ksf::connection::Connection;
use ksf::deferred::Deferred;
use ksf::env::Env;
use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::output::SendBatch;
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::ConnKey;
use ksf::{CloseReason, Message, Order, Peer, Profile, Reply, Service};

/// Records every message, and answers as its content says: `defer...` later, `twice...` later in two parts,
/// `last...` with an echo and the end of the connection, `quiet...` not at all, `long...` with 10,000 bytes, anything
/// else with an echo.
pub struct Recorder {
    pub framing: Framing,
    pub order: Order,
    pub messages: Mutex<Vec<Vec<u8>>>,
    pub deferred: Mutex<Vec<Deferred>>,
}

impl Recorder {
    pub fn new(framing: Framing, order: Order) -> Arc<Self> {
        Arc::new(Self { framing, order, messages: Mutex::default(), deferred: Mutex::default() })
    }

    /// The last of the answers that are owed, as soon as there is one. That bytes were received does not mean that they were
    /// handed over.
    pub fn wait_for_deferred(&self) -> Deferred {
        let mut last = None;
        ksf_test::wait_until("a message is deferred", || {
            last = self.deferred.lock().unwrap().pop();
            last.is_some()
        });
        last.unwrap()
    }
}

impl Service for Recorder {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: self.order, ..Profile::new("recorder", self.framing) }
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let bytes = message.bytes();
        self.messages.lock().unwrap().push(bytes.to_vec());
        let mut deferred = self.deferred.lock().unwrap();
        match bytes {
            [b'd', b'e', b'f', b'e', b'r', ..] => deferred.push(reply.defer()),
            [b't', b'w', b'i', b'c', b'e', ..] => deferred.extend([reply.defer(), reply.defer()]),
            [b'l', b'a', b's', b't', ..] => {
                reply.bytes(bytes);
                reply.close();
            }
            [b'q', b'u', b'i', b'e', b't', ..] => {}
            [b'l', b'o', b'n', b'g', ..] => reply.bytes(&[b'.'; 10_000]),
            _ => reply.bytes(bytes),
        }
    }
}

pub const KEY: ConnKey = ConnKey { index: 0, generation: 0 };

/// One connection with an environment of its own, and a peer that takes every reply at once unless told otherwise.
pub struct Bench {
    pub env: Env,
    pub service: Arc<Recorder>,
    pub conn: Box<Connection>,
    /// What the peer has received.
    pub got: Vec<u8>,
}

impl Bench {
    pub fn new(framing: Framing, order: Order, limits: Limits) -> Self {
        let service = Recorder::new(framing, order);
        let env = env(limits, 4096, 8);
        let conn = Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap();
        Self { env, service, conn, got: Vec::new() }
    }

    /// Lines, answered in order, with the default limits.
    pub fn lines() -> Self {
        Self::new(Framing::Delimiter(ksf::framing::Delimiter::LF), Order::Requests, Limits::default())
    }

    pub fn receive(&mut self, bytes: &[u8]) {
        let chunk = in_slot(&mut self.env, bytes);
        self.conn.receive(chunk, &mut self.env);
    }

    /// Answers the deferred message number `at`, and delivers the answer.
    pub fn answer(&mut self, at: usize, body: &[u8]) {
        let deferred = self.service.deferred.lock().unwrap().remove(at);
        deferred.reply(body.to_vec());
        self.deliver();
    }

    pub fn deliver(&mut self) {
        for delivery in self.env.mailbox.take_deliveries() {
            self.conn.deliver(delivery, &mut self.env);
        }
    }

    /// The peer takes everything.
    pub fn take(&mut self) {
        while let Some(mut batch) = self.conn.take_batch(self.env.now, &mut self.env.spares) {
            let bytes = bytes_of(&batch);
            self.got.extend_from_slice(&bytes);
            batch.advance(bytes.len(), &mut self.env.spares);
            batch.recycle(&mut self.env.spares);
            self.conn.sent(bytes.len(), true, &mut self.env);
        }
    }

    pub fn got(&self) -> &str {
        std::str::from_utf8(&self.got).unwrap()
    }
}

/// The outcome of a whole stream.
#[derive(Debug, PartialEq, Eq)]
pub struct Fed {
    pub messages: Vec<Vec<u8>>,
    pub replies: Vec<u8>,
    pub end: Option<CloseReason>,
}

/// Feeds `stream` in chunks of these lengths and the rest in one, then half-closes. Checks that nothing is left over.
pub fn feed(framing: Framing, limits: &Limits, stream: &[u8], chunks: &[usize]) -> Fed {
    let mut bench = Bench::new(framing, Order::Requests, limits.clone());
    bench.env.pool = Pool::new(Memory::Anonymous, 1 << 16, 4).unwrap();
    let mut rest = stream;
    for length in chunks.iter().copied().chain([usize::MAX]) {
        let (chunk, behind) = rest.split_at(length.min(rest.len()));
        rest = behind;
        if !chunk.is_empty() {
            bench.receive(chunk);
            bench.take();
        }
        let limit = limits.assembly_bytes_max + chunk.len();
        assert!(
            bench.env.budget.input_bytes() <= limit,
            "{} bytes are kept, limit {limit}",
            bench.env.budget.input_bytes()
        );
    }
    bench.conn.peer_closed(&mut bench.env);
    bench.take();
    let end = bench.conn.finished();
    let Bench { mut env, service, conn, got, .. } = bench;
    conn.end(&mut env);
    assert_eq!(env.budget.input_bytes(), 0, "memory of unfinished messages is not given back");
    assert_eq!(env.pool.in_use(), 0, "a slot is not given back");
    let messages = std::mem::take(&mut *service.messages.lock().unwrap());
    Fed { messages, replies: got, end }
}

pub fn env(limits: Limits, slot_bytes: u32, slots: u32) -> Env {
    Env::new(limits, Pool::new(Memory::Anonymous, slot_bytes, slots).unwrap()).unwrap()
}

/// A chunk in a slot, as an engine delivers it.
pub fn in_slot(env: &mut Env, bytes: &[u8]) -> Chunk {
    let mut slot = env.pool.take().expect("a free slot");
    slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    slot.freeze(bytes.len())
}

pub fn bytes_of(batch: &SendBatch) -> Vec<u8> {
    let mut slices = [&[][..]; 64];
    let filled = batch.slices(&mut slices);
    let bytes = slices[..filled].concat();
    assert_eq!(bytes.len(), batch.len(), "more pieces than this test looks at");
    bytes
}
