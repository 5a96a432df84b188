//! The connections of all shards, for `CLIENT`: what each of them is told of the others, and how it ends them.
//!
//! A shard locks its own part when a connection comes or goes. What changes with every command is two numbers of the connection's
//! own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf::Closer;
use ksf::service::ConnKey;
use ksf_store::work;

/// Locks what single calls change that do not panic in between.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Milliseconds by the monotonic clock, by which `WAIT` and `CLIENT PAUSE` end: setting the clock of the machine changes neither.
pub(crate) fn monotonic_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Connections by their numbers.
type ById = BTreeMap<u64, Arc<Client>>;

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct Clients {
    last_id: AtomicU64,
    shards: Box<[Mutex<ById>]>,
    /// Until when commands wait, by [`monotonic_ms`], and whether only those that write do (the lowest bit); 0: none does.
    pause: AtomicU64,
}

impl Clients {
    /// Of a server with so many shards.
    pub(crate) fn new(shards: usize) -> Self {
        let shards = (0..shards).map(|_| Mutex::default()).collect();
        Self { last_id: AtomicU64::new(0), shards, pause: AtomicU64::new(0) }
    }

    /// A connection was accepted on a shard. `peer`: its address, if it came by TCP.
    pub(crate) fn add(&self, shard: u16, peer: Option<SocketAddr>, closer: &Closer, now_ms: u64) -> Arc<Client> {
        let client = Arc::new(Client {
            // The first one has the number 1.
            id: 1 + self.last_id.fetch_add(1, Ordering::Relaxed),
            peer,
            since_ms: now_ms,
            asked_ms: AtomicU64::new(now_ms),
            queued: AtomicI32::new(NOT_QUEUING),
            closer: Some(closer.clone()),
            ..Client::default()
        });
        lock(&self.shards[usize::from(shard)]).insert(client.id, Arc::clone(&client));
        client
    }

    /// A connection of a shard is gone.
    pub(crate) fn remove(&self, shard: u16, client: &Client) {
        lock(&self.shards[usize::from(shard)]).remove(&client.id);
    }

    pub(crate) fn count(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// All of them, in the order in which they came.
    pub(crate) fn all(&self) -> Vec<Arc<Client>> {
        let mut all = Vec::new();
        self.shards.iter().for_each(|shard| all.extend(lock(shard).values().cloned()));
        work::add(all.len() as u64);
        all.sort_unstable_by_key(|client| client.id);
        all
    }

    /// Has commands wait until a time by [`monotonic_ms`], all of them or those that write. What was said before is forgotten.
    pub(crate) fn pause(&self, until_ms: u64, writes_only: bool) {
        self.pause.store(until_ms.min(u64::MAX >> 1) << 1 | u64::from(writes_only), Ordering::Release);
    }

    /// Has them go on.
    pub(crate) fn resume(&self) {
        self.pause.store(0, Ordering::Release);
    }

    /// Whether commands may have to wait: [`waits`](Self::waits) says so exactly.
    pub(crate) fn is_paused(&self) -> bool {
        self.pause.load(Ordering::Relaxed) != 0
    }

    /// Whether a command waits at this time that writes, or does not.
    pub(crate) fn waits(&self, writes: bool, now_ms: u64) -> bool {
        let pause = self.pause.load(Ordering::Acquire);
        let is_over = now_ms >= pause >> 1;
        if is_over && pause != 0 {
            // Unless another one began meanwhile.
            let _ = self.pause.compare_exchange(pause, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        !is_over && (writes || pause & 1 == 0)
    }

    /// The one with this number.
    pub(crate) fn get(&self, id: u64) -> Option<Arc<Client>> {
        self.shards.iter().find_map(|shard| lock(shard).get(&id).cloned())
    }
}

/// No transaction is open.
const NOT_QUEUING: i32 = -1;
/// Nothing was asked yet.
const NOTHING: u32 = u32::MAX;

/// One connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: u64,
    /// Its address, if it came by TCP.
    pub(crate) peer: Option<SocketAddr>,
    /// When it came, and when it asked something last: milliseconds since 1970.
    pub(crate) since_ms: u64,
    asked_ms: AtomicU64,
    /// What it asked last, by its number in the table of commands.
    command: AtomicU32,
    /// Commands that wait for its `EXEC`.
    queued: AtomicI32,
    is_resp3: AtomicBool,
    is_killed: AtomicBool,
    /// Its name in the shard, once it has sent something.
    key: AtomicU64,
    /// Ends connections of its shard; `None`: it belongs to none.
    closer: Option<Closer>,
    labels: Mutex<Labels>,
}

/// What it calls itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Labels {
    pub(crate) name: Box<str>,
    pub(crate) library: Box<str>,
    pub(crate) library_version: Box<str>,
}

/// No key is this number: a place is taken for each connection that is open.
const NO_KEY: u64 = u64::MAX;

impl Default for Client {
    fn default() -> Self {
        Self {
            id: 0,
            peer: None,
            since_ms: 0,
            asked_ms: AtomicU64::new(0),
            command: AtomicU32::new(NOTHING),
            queued: AtomicI32::new(NOT_QUEUING),
            is_resp3: AtomicBool::new(false),
            is_killed: AtomicBool::new(false),
            key: AtomicU64::new(NO_KEY),
            closer: None,
            labels: Mutex::default(),
        }
    }
}

impl Client {
    /// A message of it came, which has this key. True: the connection was killed, and the message must not be carried out.
    pub(crate) fn is_killed(&self, key: ConnKey) -> bool {
        if self.key.load(Ordering::Relaxed) == NO_KEY {
            // In one order with what kills: either that sees the key, or this sees that it was killed.
            self.key.store(key.to_u64(), Ordering::SeqCst);
        }
        self.is_killed.load(Ordering::SeqCst)
    }

    /// Ends the connection: at once, but for one that has never sent anything, which ends when it does. False if it was killed
    /// before.
    pub(crate) fn kill(&self) -> bool {
        let is_first = !self.is_killed.swap(true, Ordering::SeqCst);
        let key = self.key.load(Ordering::SeqCst);
        if let Some(closer) = &self.closer
            && is_first
            && key != NO_KEY
        {
            closer.close(ConnKey::from_u64(key));
        }
        is_first
    }

    /// It asks for this command.
    pub(crate) fn asks(&self, command: u32, now_ms: u64) {
        self.command.store(command, Ordering::Relaxed);
        self.asked_ms.store(now_ms, Ordering::Relaxed);
    }

    /// How many commands wait for its `EXEC`; `None`: there is no transaction.
    pub(crate) fn queues(&self, commands: Option<usize>) {
        let queued = commands.map_or(NOT_QUEUING, |commands| i32::try_from(commands).unwrap_or(i32::MAX));
        self.queued.store(queued, Ordering::Relaxed);
    }

    pub(crate) fn speaks_resp3(&self, is_resp3: bool) {
        self.is_resp3.store(is_resp3, Ordering::Relaxed);
    }

    pub(crate) fn labels(&self) -> Labels {
        lock(&self.labels).clone()
    }

    pub(crate) fn relabel(&self, change: impl FnOnce(&mut Labels)) {
        change(&mut lock(&self.labels));
    }

    /// Where it comes from, as `CLIENT` tells it.
    pub(crate) fn address(&self) -> String {
        // The name of a Unix socket is not asked for.
        self.peer.map_or_else(|| "unix:0".to_owned(), |peer| peer.to_string())
    }

    /// What `CLIENT LIST` tells of it, with the name of a command.
    pub(crate) fn line(&self, now_ms: u64, command: impl FnOnce(u32) -> Option<&'static str>) -> String {
        let seconds_since = |ms: u64| now_ms.saturating_sub(ms) / 1000;
        let (age, idle) = (seconds_since(self.since_ms), seconds_since(self.asked_ms.load(Ordering::Relaxed)));
        let queued = self.queued.load(Ordering::Relaxed);
        let mut flags = String::new();
        flags.extend((queued != NOT_QUEUING).then_some('x'));
        flags.extend(self.peer.is_none().then_some('U'));
        if flags.is_empty() {
            flags.push('N');
        }
        let command = match self.command.load(Ordering::Relaxed) {
            NOTHING => None,
            number => command(number),
        };
        let resp = if self.is_resp3.load(Ordering::Relaxed) { 3 } else { 2 };
        let Labels { name, library, library_version } = self.labels();
        format!(
            "id={} addr={} name={name} age={age} idle={idle} flags={flags} db=0 sub=0 psub=0 ssub=0 multi={queued} \
             cmd={} user=default redir=-1 resp={resp} lib-name={library} lib-ver={library_version}\n",
            self.id,
            self.address(),
            command.unwrap_or("NULL"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_what_a_connection_does() {
        let client =
            Client { id: 7, peer: Some("127.0.0.1:99".parse().unwrap()), since_ms: 1_000, ..Client::default() };
        assert_eq!(
            client.line(9_999, |_| None),
            "id=7 addr=127.0.0.1:99 name= age=8 idle=9 flags=N db=0 sub=0 psub=0 ssub=0 multi=-1 cmd=NULL user=default \
             redir=-1 resp=2 lib-name= lib-ver=\n"
        );
        client.asks(3, 9_000);
        client.queues(Some(2));
        client.speaks_resp3(true);
        client.relabel(|labels| labels.name = "me".into());
        assert_eq!(
            client.line(10_000, |number| (number == 3).then_some("get")),
            "id=7 addr=127.0.0.1:99 name=me age=9 idle=1 flags=x db=0 sub=0 psub=0 ssub=0 multi=2 cmd=get user=default \
             redir=-1 resp=3 lib-name= lib-ver=\n"
        );
    }

    #[test]
    fn a_pause_ends_by_its_time_or_before() {
        let clients = Clients::new(1);
        assert!(!clients.is_paused() && !clients.waits(true, 0));
        clients.pause(100, true);
        assert!(clients.is_paused() && clients.waits(true, 99) && !clients.waits(false, 99));
        clients.pause(50, false);
        assert!(clients.waits(true, 49) && clients.waits(false, 49));
        assert!(!clients.waits(true, 50) && !clients.is_paused());
        clients.pause(u64::MAX, false);
        assert!(clients.waits(false, 1 << 62));
        clients.resume();
        assert!(!clients.is_paused() && !clients.waits(true, 0));
    }

    #[test]
    fn a_connection_that_was_killed_says_so_to_its_next_message() {
        let client = Client::default();
        let key = ConnKey { index: 1, generation: 0 };
        assert!(!client.is_killed(key));
        assert!(client.kill() && !client.kill());
        assert!(client.is_killed(key));
    }
}
