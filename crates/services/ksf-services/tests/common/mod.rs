//! Drives a service through the framework's connection, without a socket.

#![allow(dead_code, unused_imports, reason = "each test binary compiles this file and uses a part of it")]

pub(crate) mod vectors;

use std::sync::{Arc, Mutex};

use ksf::connection::Connection;
use ksf::deferred::{Answers, Delivery};
use ksf::engine::EngineKind;
use ksf::env::Env;
use ksf::limits::{Limits, Time};
use ksf::outgoing::{ExchangeRequest, Upstream};
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::ConnKey;
use ksf::session::OnShard;
use ksf::tasks::TaskPool;
use ksf::{CloseReason, Peer, Service, Turn};

/// Bytes in a receive slot of the tests.
pub(crate) const SLOT_BYTES: usize = 4096;

/// Deferred answers that no shard takes.
#[derive(Debug, Default)]
pub(crate) struct Taken(Mutex<Vec<Delivery>>);

impl Answers for Taken {
    fn answer(&self, delivery: Delivery) {
        self.0.lock().expect("no panic").push(delivery);
    }
}

/// One connection: bytes go in, bytes come out.
pub(crate) struct Wire {
    env: Env,
    connection: Box<Connection>,
}

impl Wire {
    /// A fresh connection with default limits.
    pub(crate) fn new<S: Service>(service: &Arc<S>) -> Self {
        Self::with_limits(service, Limits::default())
    }

    /// A fresh connection.
    pub(crate) fn with_limits<S: Service>(service: &Arc<S>, limits: Limits) -> Self {
        let pool = Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 64).expect("64 slots");
        let mut env = Env::new(limits, pool).expect("an event descriptor");
        let state = service.start(&mut Turn::new(&mut env)).expect("the service starts");
        let on = OnShard::new(Arc::clone(service), state);
        let peer = Peer::Tcp("127.0.0.1:9".parse().expect("an address"));
        let key = ConnKey { index: 0, generation: 0 };
        let connection = Connection::new(on, peer, key, Time(0)).expect("the service takes every connection");
        Self { env, connection }
    }

    /// Has deferred answers taken as on a worker: by what is returned, not by a shard's mailbox.
    pub(crate) fn on_worker(&mut self) -> Arc<Taken> {
        let taken = Arc::<Taken>::default();
        self.env.answers = Some(Arc::clone(&taken) as Arc<dyn Answers>);
        taken
    }

    /// Delivers what a worker took.
    pub(crate) fn deliver_taken(&mut self, taken: &Taken) -> Vec<u8> {
        for delivery in std::mem::take(&mut *taken.0.lock().expect("no panic")) {
            assert!(self.connection.deliver(delivery, &mut self.env), "the connection waits for it");
        }
        self.sent()
    }

    /// The threads that tasks run on; without them a task that may block runs at once.
    pub(crate) fn set_tasks(&mut self, tasks: Option<Arc<TaskPool>>) {
        self.env.tasks = tasks;
    }

    /// Feeds one chunk as the engine would, in a slot if it fits in one, and
    /// returns what the connection sends.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let chunk = match self.env.pool.take() {
            Some(mut slot) if bytes.len() <= SLOT_BYTES => {
                slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
                slot.freeze(bytes.len())
            }
            _ => Chunk::from_vec(bytes.to_vec()),
        };
        self.connection.receive(chunk, &mut self.env);
        self.sent()
    }

    /// Feeds bytes of a peer that reads nothing yet.
    pub(crate) fn feed_unread(&mut self, bytes: &[u8]) {
        self.connection.receive(Chunk::from_vec(bytes.to_vec()), &mut self.env);
    }

    /// Feeds chunks, one after the other.
    pub(crate) fn feed_all<'a>(&mut self, chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
        chunks.into_iter().flat_map(|c| self.feed(c)).collect()
    }

    /// Delivers the answers that were given meanwhile.
    #[allow(dead_code, reason = "each test file uses a part")]
    pub(crate) fn deliver(&mut self) -> Vec<u8> {
        for delivery in self.env.mailbox.take_deliveries() {
            assert!(self.connection.deliver(delivery, &mut self.env), "the connection waits for it");
        }
        self.sent()
    }

    /// The peer closes its direction.
    pub(crate) fn eof(&mut self) -> Vec<u8> {
        self.connection.peer_closed(&mut self.env);
        self.sent()
    }

    /// Something happens at the other end of its exchange.
    pub(crate) fn upstream(&mut self, event: Upstream) -> Vec<u8> {
        self.connection.upstream(event, &mut self.env);
        self.sent()
    }

    /// The same, with a peer that reads nothing.
    pub(crate) fn upstream_unread(&mut self, event: Upstream) {
        self.connection.upstream(event, &mut self.env);
    }

    /// The other end of its exchange takes no bytes for now, or does again.
    pub(crate) fn set_full(&mut self, full: bool) {
        self.connection.set_full(full, &mut self.env);
    }

    /// True while it would be read.
    pub(crate) fn wants_bytes(&self) -> bool {
        self.connection.wants_bytes(&self.env)
    }

    /// What it asked of its shard since the last call.
    pub(crate) fn orders(&mut self) -> Vec<ExchangeRequest> {
        let mut orders = Vec::new();
        loop {
            let more = self.env.take_exchange_requests();
            if more.is_empty() {
                return orders;
            }
            for (_, order) in more {
                if let ExchangeRequest::Pass(bytes) = &order {
                    self.connection.passed(bytes.len(), &mut self.env);
                }
                orders.push(order);
            }
        }
    }

    /// The time of the next event.
    pub(crate) fn set_time_ms(&mut self, ms: u64) -> Vec<u8> {
        self.env.now = Time(0).plus_ms(ms);
        assert_eq!(self.connection.tick(&mut self.env), None, "the peer takes everything");
        self.sent()
    }

    /// Bytes of input it keeps.
    pub(crate) fn unfinished_bytes(&self) -> usize {
        self.connection.unfinished_bytes()
    }

    /// Bytes that the shard counts for the state that the service keeps of the peer.
    pub(crate) fn session_bytes(&self) -> usize {
        self.env.budget.session_bytes()
    }

    /// The service gets its state back.
    pub(crate) fn into_end(mut self) -> Env {
        self.connection.end(&mut self.env);
        self.env
    }

    /// Why the connection is over, if it is.
    pub(crate) fn closed(&self) -> Option<CloseReason> {
        self.connection.finished()
    }

    /// True if its end, now, is a reset.
    pub(crate) fn needs_reset(&self) -> bool {
        self.connection.needs_reset()
    }

    /// Receive slots that are still held.
    pub(crate) fn slots_in_use(&self) -> u32 {
        self.env.pool.in_use()
    }

    /// Everything that waits to be sent, taken by a peer that reads at once.
    pub(crate) fn sent(&mut self) -> Vec<u8> {
        let mut sent = Vec::new();
        while let Some(batch) = self.connection.take_batch(Time(0), &mut self.env.spares) {
            let mut slices: [&[u8]; 64] = [&[]; 64];
            let filled = batch.slices(&mut slices);
            let before = sent.len();
            sent.extend(slices[..filled].iter().copied().flatten());
            let bytes = sent.len() - before;
            assert_eq!(bytes, batch.len(), "the batch has more than 64 pieces");
            self.connection.sent(bytes, true, &mut self.env);
        }
        sent
    }
}

/// The engines of this machine.
pub(crate) fn engines() -> Vec<EngineKind> {
    ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe)
}

/// Value of a service's own counter.
pub(crate) fn counter(service: &impl Service, name: &str) -> u64 {
    let counters = service.counters();
    let found = counters.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no counter {name} in {counters:?}")).1
}
