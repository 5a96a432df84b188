//! The duplicate request cache: a request that is sent again is answered with the reply to its first try.
//!
//! NFSv3 runs over transports on which a client sends a request again when no reply came (RFC 1813 section 4.8). Carried
//! out twice, a REMOVE would answer NOENT and a CREATE EXIST, although the first try has done what was asked for. So the
//! procedures that change something keep their replies here for a while.
//!
//! ```text
//!            begin()                       end()
//!  request ─────────► Started ─► carried out ─────► reply kept, and given to a try that waits
//!      │
//!      ├─► Replay: the kept reply
//!      ├─► Waits: the first try is being carried out, and its reply answers this one, too
//!      └─► Foreign: it looks like what another connection has under way
//! ```
//!
//! **What a request is known by** ([`RequestKey`]): the client's address, the xid, program and procedure, and a checksum
//! of the credential (without its stamp) and of all bytes of the arguments. The credential has the name of the client's
//! machine, so two clients behind one address are told apart by it, and where their names are the same by xid and arguments.
//! The address has no port: a client that lost its connection asks again from another one. A credential that names no
//! machine (AUTH_NONE) tells too little for that. Its reply serves another connection only once the first one has ended
//! ([`Origin`]). The checksum is keyed, but for the data of a WRITE, which count by their CRC-32C. A client that forges it can
//! have the WRITE of another client taken for its own only with that one's address, credential, xid, file and offset; with
//! these it can write there itself.
//!
//! **Bounds** of the replies that are kept: entries and bytes. For a new reply the oldest one goes of the client whose replies take the
//! most bytes, so that no client pushes out the replies to another one that has fewer. Of that client, replies to WRITE go first while
//! they are at least half of its entries: a WRITE that is carried out twice has the same end, a REMOVE has not, and clients write much
//! and remove little. Replies are not given after [`DrcLimits::age_max_ms`].
//!
//! Requests under way have no bound here, and are never given up: each is in the budgets of its connection and shard until it is
//! answered, its entry included. So no client has the requests of another one refused by what it has under way.
//!
//! A try of what is under way is never refused: to a client that would be the reply, and it would send the request anew, as
//! another one. It waits, and counts in the budget of its connection.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ksf_proto::oncrpc::{Call, Credential, NFS_PROGRAM};

use crate::procedure::Procedure;

/// Bounds of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrcLimits {
    /// Most replies.
    pub entries_max: usize,
    /// Most bytes of the replies and of their entries.
    pub bytes_max: usize,
    /// Age above which a reply is not given again.
    pub age_max_ms: u64,
}

impl Default for DrcLimits {
    /// 16,384 replies, 8 MiB, 120 seconds.
    fn default() -> Self {
        Self { entries_max: 16_384, bytes_max: 8 << 20, age_max_ms: 120_000 }
    }
}

/// Parts of the cache, each behind a lock of its own.
const STRIPES: usize = 16;

/// What an entry takes without its reply: the key twice (map and queue), and the entry.
pub const ENTRY_BYTES: usize = 2 * size_of::<RequestKey>() + 96;

/// Bytes at the beginning of the arguments of a WRITE, handle, offset and count among them. Behind them lie data only.
const WRITE_HEAD_BYTES: usize = 256;

/// Who sent a request, as far as the transport tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientAddress {
    ip: IpAddr,
}

impl ClientAddress {
    /// The sender of a request that came by a stream.
    pub fn of_stream(address: SocketAddr) -> Self {
        Self { ip: address.ip().to_canonical() }
    }

    /// A sender without an address, on a Unix socket of this machine.
    pub fn of_this_machine() -> Self {
        Self { ip: IpAddr::V6(Ipv6Addr::UNSPECIFIED) }
    }
}

/// What a request is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey {
    client: ClientAddress,
    xid: u32,
    program: u32,
    procedure: u32,
    checksum: u64,
}

impl RequestKey {
    fn is_write(&self) -> bool {
        self.program == NFS_PROGRAM && self.procedure == Procedure::Write as u32
    }
}

/// The connection that a request came by. All requests of one connection have the same origin.
#[derive(Clone, Debug, Default)]
pub struct Origin(Arc<()>);

impl Origin {
    /// A connection that is new.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Where an entry came from, without keeping the connection.
#[derive(Debug)]
struct CameBy {
    origin: Weak<()>,
    /// The credential names a machine.
    named: bool,
}

impl CameBy {
    fn is(&self, origin: &Origin) -> bool {
        self.origin.as_ptr() == Arc::as_ptr(&origin.0)
    }

    /// Whether a request by `origin` may be another try of this one.
    fn may_be_repeated_by(&self, origin: &Origin) -> bool {
        self.named || self.is(origin) || self.origin.strong_count() == 0
    }
}

/// What there is to do for a request, whose way to its sender is `W`.
#[derive(Debug)]
pub enum Begun<W> {
    /// It is new: it is to be carried out and answered, and its end told by [`Ticket::end`].
    Started(Ticket<W>, W),
    /// It was carried out: it is to be answered with these results.
    Replay(W, Arc<[u8]>),
    /// It is being carried out; [`Ticket::end`] of its first try returns what answers this one.
    Waits,
    /// Another connection, whose credential names no machine either, has the same request under way. It may be of another client, so
    /// neither is its reply given nor is this one carried out: the connection is to be closed, over another one the client asks again.
    Foreign(W),
}

/// Tries that wait for the end of the first one, with their connections.
struct Waiting<W>(Vec<(Weak<()>, W)>);

impl<W> Default for Waiting<W> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<W> Waiting<W> {
    /// Adds a try. Returns the number of tries that it looked at, a constant on average.
    fn add(&mut self, origin: &Origin, way: W) -> usize {
        let Self(tries) = self;
        let mut looked_at = 0;
        if tries.len() == tries.capacity() {
            looked_at = tries.len();
            // A client that connects again and again while a disk hangs leaves at most as much behind as waits.
            tries.retain(|(by, _)| by.strong_count() > 0);
            tries.reserve(tries.len() + 1);
        }
        tries.push((Arc::downgrade(&origin.0), way));
        looked_at
    }

    /// Ways to the connections that have not ended.
    fn end(self) -> Vec<W> {
        self.0.into_iter().filter(|(by, _)| by.strong_count() > 0).map(|(_, way)| way).collect()
    }
}

enum State<W> {
    UnderWay { waiting: Waiting<W> },
    Done { reply: Arc<[u8]>, at_ms: u64 },
}

struct Entry<W> {
    came_by: CameBy,
    /// Tells this entry from an earlier one of the same key in the queue.
    number: u64,
    state: State<W>,
}

/// What one client has in a stripe.
#[derive(Default)]
struct OfClient {
    /// Entries that are done, the oldest first. One whose number is not that of the entry was replaced.
    writes: VecDeque<(RequestKey, u64)>,
    others: VecDeque<(RequestKey, u64)>,
    bytes: usize,
}

struct Stripe<W> {
    entries: HashMap<RequestKey, Entry<W>>,
    clients: HashMap<ClientAddress, OfClient>,
    /// Clients by the bytes of their entries that are done, where there are any.
    by_bytes: BTreeSet<(usize, ClientAddress)>,
    /// Of the entries that are done.
    bytes: usize,
    /// Entries that are not done.
    under_way: usize,
    last_number: u64,
}

impl<W> Default for Stripe<W> {
    fn default() -> Self {
        let (entries, clients, by_bytes) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        Self { entries, clients, by_bytes, bytes: 0, under_way: 0, last_number: 0 }
    }
}

impl<W> Stripe<W> {
    /// Changes what a client has. A client that has nothing is forgotten.
    fn change<T>(&mut self, client: ClientAddress, change: impl FnOnce(&mut OfClient) -> T) -> T {
        let of_client = self.clients.entry(client).or_default();
        let before = of_client.bytes;
        let changed = change(of_client);
        let after = of_client.bytes;
        if after != before {
            self.by_bytes.remove(&(before, client));
            if after > 0 {
                self.by_bytes.insert((after, client));
            }
        }
        if after == 0 {
            self.clients.remove(&client);
        }
        changed
    }

    /// Forgets the oldest reply of the client with the most; false if there is none.
    fn forget_oldest(&mut self) -> bool {
        let Some(&(_, client)) = self.by_bytes.last() else { return false };
        let oldest = self.change(client, |of_client| {
            let writes_first = of_client.writes.len() >= of_client.others.len();
            let (first, second) = if writes_first {
                (&mut of_client.writes, &mut of_client.others)
            } else {
                (&mut of_client.others, &mut of_client.writes)
            };
            first.pop_front().or_else(|| second.pop_front())
        });
        if let Some((key, number)) = oldest
            && self.entries.get(&key).is_some_and(|entry| entry.number == number)
        {
            self.remove(&key);
        }
        // One that was replaced made room when it was.
        oldest.is_some()
    }

    /// Forgets the replies to a client that are too old.
    fn forget_old(&mut self, client: ClientAddress, now_ms: u64, age_max_ms: u64) {
        let is_old = |entry: &Entry<W>| matches!(entry.state, State::Done { at_ms, .. } if now_ms.saturating_sub(at_ms) > age_max_ms);
        for writes in [true, false] {
            while let Some(of_client) = self.clients.get_mut(&client) {
                let queue = if writes { &mut of_client.writes } else { &mut of_client.others };
                let Some(&(key, number)) = queue.front() else { break };
                let is_same = self.entries.get(&key).filter(|entry| entry.number == number);
                if is_same.is_some_and(|entry| !is_old(entry)) {
                    break;
                }
                queue.pop_front();
                if is_same.is_some() {
                    self.remove(&key);
                }
            }
        }
    }

    fn remove(&mut self, key: &RequestKey) -> Option<Entry<W>> {
        let entry = self.entries.remove(key)?;
        match &entry.state {
            State::Done { reply, .. } => {
                let bytes = ENTRY_BYTES + reply.len();
                self.change(key.client, |of_client| of_client.bytes -= bytes);
                self.bytes -= bytes;
            }
            State::UnderWay { .. } => self.under_way -= 1,
        }
        Some(entry)
    }
}

struct Shared<W> {
    stripes: [Mutex<Stripe<W>>; STRIPES],
    /// Of each stripe.
    limits: DrcLimits,
    hasher: RandomState,
}

impl<W> Shared<W> {
    fn stripe(&self, key: &RequestKey) -> MutexGuard<'_, Stripe<W>> {
        // The checksum is keyed, so clients cannot choose a stripe.
        let stripe = &self.stripes[key.checksum as usize % STRIPES];
        // A panic between the changes of one stripe is not possible: nothing in between calls code of others.
        stripe.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cache. `W` is what a try that waits for the reply is answered by.
pub struct Drc<W>(Arc<Shared<W>>);

impl<W> Clone for Drc<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W> std::fmt::Debug for Drc<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drc").field("sizes", &self.sizes()).finish_non_exhaustive()
    }
}

/// How much the cache has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrcSizes {
    /// Entries, those under way included.
    pub entries: usize,
    /// Entries under way.
    pub under_way: usize,
    /// Bytes of the replies and of all entries.
    pub bytes: usize,
}

impl<W> Drc<W> {
    /// An empty cache. Its 16 parts have a sixteenth of the limits each, and room for one reply at least.
    pub fn new(limits: DrcLimits) -> Self {
        let limits = DrcLimits {
            entries_max: (limits.entries_max / STRIPES).max(1),
            bytes_max: (limits.bytes_max / STRIPES).max(ENTRY_BYTES),
            ..limits
        };
        let stripes = std::array::from_fn(|_| Mutex::default());
        Self(Arc::new(Shared { stripes, limits, hasher: RandomState::new() }))
    }

    /// What a call is known by.
    pub fn key(&self, client: ClientAddress, call: &Call<'_>) -> RequestKey {
        let mut hasher = self.0.hasher.build_hasher();
        match call.credential {
            Credential::None => 0.hash(&mut hasher),
            Credential::Sys(sys) => {
                // Not the stamp: a client may write another one each time.
                (1, sys.machine_name, sys.uid, sys.gid).hash(&mut hasher);
                sys.gids.iter().for_each(|gid| gid.hash(&mut hasher));
            }
        }
        let is_write = (call.program, call.procedure) == (NFS_PROGRAM, Procedure::Write as u32);
        let keyed_bytes = if is_write { call.args.len().min(WRITE_HEAD_BYTES) } else { call.args.len() };
        let (keyed, data) = call.args.split_at(keyed_bytes);
        // The keyed hash of 1 MiB takes the shard some milliseconds.
        (call.args.len(), keyed, crc32c::crc32c(data)).hash(&mut hasher);
        // With the xid calls that are alike spread over the stripes.
        (client, call.xid).hash(&mut hasher);
        let checksum = hasher.finish();
        RequestKey { client, xid: call.xid, program: call.program, procedure: call.procedure, checksum }
    }

    /// A request came that `way` answers. `named`: its credential names a machine.
    pub fn begin(&self, key: RequestKey, origin: &Origin, named: bool, now_ms: u64, way: W) -> Begun<W> {
        let limits = &self.0.limits;
        let mut stripe = self.0.stripe(&key);
        let stripe = &mut *stripe;
        stripe.forget_old(key.client, now_ms, limits.age_max_ms);
        if let Some(entry) = stripe.entries.get_mut(&key) {
            let repeats = entry.came_by.may_be_repeated_by(origin);
            match &mut entry.state {
                State::Done { reply, .. } if repeats => return Begun::Replay(way, Arc::clone(reply)),
                // Of another client that names no machine: its reply goes, because there is one place for both.
                State::Done { .. } => {}
                State::UnderWay { waiting } if repeats => {
                    waiting.add(origin, way);
                    return Begun::Waits;
                }
                State::UnderWay { .. } => return Begun::Foreign(way),
            }
            stripe.remove(&key);
        }
        stripe.last_number += 1;
        stripe.under_way += 1;
        let came_by = CameBy { origin: Arc::downgrade(&origin.0), named };
        let state = State::UnderWay { waiting: Waiting::default() };
        stripe.entries.insert(key, Entry { came_by, number: stripe.last_number, state });
        Begun::Started(Ticket { drc: self.clone(), key, is_over: false }, way)
    }

    /// How much it has now.
    pub fn sizes(&self) -> DrcSizes {
        let mut sizes = DrcSizes::default();
        for stripe in &self.0.stripes {
            let stripe = stripe.lock().unwrap_or_else(PoisonError::into_inner);
            sizes.entries += stripe.entries.len();
            sizes.under_way += stripe.under_way;
            sizes.bytes += stripe.bytes + ENTRY_BYTES * stripe.under_way;
        }
        sizes
    }
}

/// The duty to tell the end of a request. Dropping it (a task that panicked) forgets the request, so that another try is
/// carried out; one that waits is dropped, too.
pub struct Ticket<W> {
    drc: Drc<W>,
    key: RequestKey,
    is_over: bool,
}

impl<W> std::fmt::Debug for Ticket<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("key", &self.key).finish_non_exhaustive()
    }
}

impl<W> Ticket<W> {
    /// The request was carried out, and these are the results of its reply. The tries that wait for them are returned, to be
    /// answered with the same.
    pub fn end(mut self, results: &[u8], now_ms: u64) -> Vec<W> {
        self.is_over = true;
        let shared = &self.drc.0;
        let mut stripe = shared.stripe(&self.key);
        let stripe = &mut *stripe;
        let Some(entry) = stripe.entries.get_mut(&self.key) else { return Vec::new() };
        let done = State::Done { reply: results.into(), at_ms: now_ms };
        let State::UnderWay { waiting } = std::mem::replace(&mut entry.state, done) else { return Vec::new() };
        let (key, number) = (self.key, entry.number);
        stripe.under_way -= 1;
        stripe.change(key.client, |of_client| {
            of_client.bytes += ENTRY_BYTES + results.len();
            let queue = if key.is_write() { &mut of_client.writes } else { &mut of_client.others };
            queue.push_back((key, number));
        });
        stripe.bytes += ENTRY_BYTES + results.len();
        let is_too_much = |stripe: &Stripe<W>| {
            stripe.entries.len() - stripe.under_way > shared.limits.entries_max
                || stripe.bytes > shared.limits.bytes_max
        };
        while is_too_much(stripe) && stripe.forget_oldest() {}
        waiting.end()
    }

    /// The request was not carried out, and another try of it should be. The tries that wait are returned, to be answered
    /// likewise.
    pub fn forget(mut self) -> Vec<W> {
        self.remove()
    }

    fn remove(&mut self) -> Vec<W> {
        self.is_over = true;
        let entry = self.drc.0.stripe(&self.key).remove(&self.key);
        match entry.map(|entry| entry.state) {
            Some(State::UnderWay { waiting }) => waiting.end(),
            _ => Vec::new(),
        }
    }
}

impl<W> Drop for Ticket<W> {
    fn drop(&mut self) {
        if !self.is_over {
            // Outside of the lock: what waits answers a connection when it is dropped.
            drop(self.remove());
        }
    }
}

#[cfg(test)]
mod tests;
