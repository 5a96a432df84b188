//! A shard without sockets, and connections to it whose caller decides when the result of each lane arrives. `ksf-fuzz` has this
//! file, too.
//!
//! Lanes are idle before anything else happens, so they work one after the other.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ksf::connection::Connection;
use ksf::deferred::Delivery;
use ksf::env::Env;
use ksf::limits::{Limits, Time};
use ksf::pool::{Memory, Pool};
use ksf::service::ConnKey;
use ksf::session::OnShard;
use ksf::{Peer, Service, Turn};
use ksf_ninep::{Ninep, NinepService};
use ksf_proto::p9::{Header, Reply, Request};
use ksf_test::wait_until;

const SLOT_BYTES: usize = 4096;
/// More than requests of these tests announce: none waits for room.
const CONNECTION_BYTES_MAX: usize = 256 << 20;
/// A connection's share of a turn is spent by fewer requests that the shard answers without a lane.
const WARM_MAX: usize = 250;

const TFLUSH: u8 = 108;
const TVERSION: u8 = 100;
const RLERROR: u8 = 7;

/// A shard of a server, with one connection at a time.
pub(crate) struct Shard {
    env: Env,
    on: OnShard<NinepService>,
    ninep: Rc<Ninep>,
    connections: u32,
}

impl Shard {
    pub(crate) fn new(ninep: Rc<Ninep>) -> Self {
        let service = Arc::new(ninep.service("9p"));
        let pool = Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 64).unwrap();
        let limits = Limits { connection_bytes_max: CONNECTION_BYTES_MAX, ..Limits::default() };
        let mut env = Env::new(limits, pool).unwrap();
        let state = service.start(&mut Turn::new(&mut env)).unwrap();
        Self { env, on: OnShard::new(service, state), ninep, connections: 0 }
    }

    /// Results of the lanes, when these have nothing to do any more.
    fn results(&self) -> Vec<Delivery> {
        wait_until("the lanes are idle", || {
            let counters = self.ninep.files().lane_counters();
            counters.queued_jobs + counters.running_jobs + counters.queued_syncs == 0
        });
        self.env.mailbox.take_deliveries()
    }
}

/// A request without a reply.
#[derive(Debug)]
struct Asked<W> {
    serial: u64,
    kind: u8,
    /// Number of the request whose reply comes before this Rflush.
    flushed: Option<u64>,
    wanted: W,
}

/// A reply.
#[derive(Debug)]
pub(crate) struct Answered<W> {
    /// Number of its request; tags are used again.
    pub(crate) serial: u64,
    pub(crate) wanted: W,
    pub(crate) message: Vec<u8>,
}

/// A connection. It checks that each tag has one reply, and the order of a flushed request's reply and its Rflush.
pub(crate) struct Driven<'a, W> {
    shard: &'a mut Shard,
    pub(crate) connection: Box<Connection>,
    /// Results that are kept back.
    pending: Vec<Delivery>,
    asked: BTreeMap<u16, Asked<W>>,
    /// Number of the last request.
    serial: u64,
}

impl<'a, W: std::fmt::Debug> Driven<'a, W> {
    pub(crate) fn new(shard: &'a mut Shard) -> Self {
        let key = ConnKey { index: 0, generation: shard.connections };
        shard.connections += 1;
        let connection = Connection::new(shard.on.clone(), Peer::Unix, key, Time(0)).unwrap();
        Self { shard, connection, pending: Vec::new(), asked: BTreeMap::new(), serial: 0 }
    }

    /// Spends the connection's share of the turn, which never ends. All later requests take a lane, whatever the kernel has in
    /// memory.
    pub(crate) fn leave_all_to_lanes(&mut self, fid: u32) {
        for _ in 0..WARM_MAX {
            self.alone(0, Request::Getattr { fid, mask: 0 });
        }
    }

    pub(crate) fn next_serial(&self) -> u64 {
        self.serial + 1
    }

    pub(crate) fn is_outstanding(&self, tag: u16) -> bool {
        self.asked.contains_key(&tag)
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.asked.len()
    }

    /// Results that can be delivered.
    pub(crate) fn results(&self) -> usize {
        self.pending.len()
    }

    /// Messages that the server sends now.
    fn output(&mut self) -> Vec<Vec<u8>> {
        let (env, mut sent) = (&mut self.shard.env, Vec::new());
        while let Some(batch) = self.connection.take_batch(Time(0), &mut env.spares) {
            let mut slices: [&[u8]; 64] = [&[]; 64];
            let filled = batch.slices(&mut slices);
            let bytes = slices[..filled].concat();
            assert_eq!(bytes.len(), batch.len(), "the batch has more than 64 pieces");
            self.connection.sent(bytes.len(), true, env);
            sent.extend(bytes);
        }
        let mut rest = sent.as_slice();
        std::iter::from_fn(|| {
            let size = u32::from_le_bytes(*rest.first_chunk()?);
            let (message, behind) = rest.split_at(size as usize);
            rest = behind;
            Some(message.to_vec())
        })
        .collect()
    }

    /// Sends any bytes. Their results are on their way then.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        for piece in bytes.chunks(SLOT_BYTES) {
            let mut slot = self.shard.env.pool.take().expect("a free slot");
            slot.as_mut_slice()[..piece.len()].copy_from_slice(piece);
            self.connection.receive(slot.freeze(piece.len()), &mut self.shard.env);
        }
        let replies = self.output();
        self.pending.extend(self.shard.results());
        replies
    }

    /// Sends a whole message, whose tag is free unless it is a Tversion.
    pub(crate) fn ask(&mut self, message: &[u8], wanted: W) -> Vec<Answered<W>> {
        let Header { kind, tag } = Header::parse(message).unwrap();
        let flushed = match Request::parse(message) {
            Ok((_, Request::Flush { oldtag })) => self.asked.get(&oldtag).map(|asked| asked.serial),
            _ => None,
        };
        if kind == TVERSION && Request::parse(message).is_ok() {
            // No request before it is answered any more.
            self.asked.clear();
        }
        self.serial += 1;
        let before = self.asked.insert(tag, Asked { serial: self.serial, kind, flushed, wanted });
        assert!(before.is_none(), "{tag} is in use: {before:?}");
        let replies = self.send(message);
        self.answered(replies)
    }

    /// Delivers one of the results that are kept back.
    pub(crate) fn deliver(&mut self, at: usize) -> Vec<Answered<W>> {
        let replies = self.deliver_any(at);
        self.answered(replies)
    }

    /// [`Self::deliver`], without a look at tags.
    pub(crate) fn deliver_any(&mut self, at: usize) -> Vec<Vec<u8>> {
        let delivery = self.pending.swap_remove(at);
        assert!(self.connection.deliver(delivery, &mut self.shard.env), "nothing waits for it");
        let replies = self.output();
        self.pending.extend(self.shard.results());
        replies
    }

    /// Waits for a result: groups of users are looked up beside the lanes.
    pub(crate) fn wait(&mut self) {
        let before = self.pending.len();
        wait_until("there is a result", || {
            self.pending.extend(self.shard.results());
            self.pending.len() > before
        });
    }

    /// Sends a request that has its reply before anything else happens.
    pub(crate) fn alone(&mut self, tag: u16, request: Request<'_>) -> Vec<u8> {
        let mut message = Vec::new();
        request.put(tag, &mut message).unwrap();
        if let Request::Version { .. } = request {
            self.asked.clear();
        }
        let before = self.pending.len();
        let mut replies = self.send(&message);
        while replies.is_empty() {
            if self.pending.len() == before {
                self.wait();
            }
            replies.extend(self.deliver_any(self.pending.len() - 1));
        }
        let [reply] = replies.as_slice() else { panic!("{request:?}: {} replies", replies.len()) };
        let Header { kind, tag: answered } = Header::parse(reply).unwrap();
        assert!(answered == tag && (kind == RLERROR || kind == request.kind() + 1), "{request:?}: {reply:?}");
        replies.remove(0)
    }

    /// Looks at replies in their order, and that no Rflush waits for a request that is answered.
    fn answered(&mut self, replies: Vec<Vec<u8>>) -> Vec<Answered<W>> {
        let mut answered = Vec::new();
        for message in replies {
            let (tag, reply) = Reply::parse(&message).unwrap();
            let asked = self.asked.remove(&tag).unwrap_or_else(|| panic!("{tag} waits for no answer: {reply:?}"));
            assert!(reply.kind() == RLERROR || reply.kind() == asked.kind + 1, "{asked:?}: {reply:?}");
            assert!(!self.is_flush_early(&asked), "Rflush of {tag} comes before the reply");
            answered.push(Answered { serial: asked.serial, wanted: asked.wanted, message });
        }
        let late = self.asked.values().find(|asked| asked.kind == TFLUSH && !self.is_flush_early(asked));
        assert!(late.is_none(), "an Rflush that waits for nothing: {late:?}");
        answered
    }

    /// True while the request that this one flushes is not answered.
    fn is_flush_early(&self, flush: &Asked<W>) -> bool {
        flush.flushed.is_some_and(|flushed| self.asked.values().any(|asked| asked.serial == flushed))
    }

    /// Ends the connection with what is on its way, which comes afterwards. All that was counted for it is given back.
    pub(crate) fn end(self) {
        let Self { shard, connection, mut pending, .. } = self;
        connection.end(&mut shard.env);
        wait_until("all memory of the connection is given back", || {
            pending.extend(shard.results());
            pending.drain(..).for_each(|delivery| shard.env.budget.orphan_done(delivery.work_bytes()));
            let budget = &shard.env.budget;
            (budget.bytes(), budget.session_bytes(), shard.env.pool.in_use()) == (0, 0, 0)
        });
    }
}
