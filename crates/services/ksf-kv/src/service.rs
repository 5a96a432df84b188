//! The server: RESP and HTTP on connections, commands and requests on the store, batches to the disk.
//!
//! ```text
//!   turn: messages ─► commands ─► index, open batch ─► replies, each behind its gates
//!   turn_end ─► next_write ─► disk ─► file_done ─► written ─► promises ─► gates open ─► replies leave
//!                    └► persistent memory: stores, flushes, one fence ─┘ in the same turn
//! ```

mod background;
mod connection;
mod queue;

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use ksf::error::FramingError;
use ksf::files::{File, FileDone, FileOp, Files};
use ksf::framing::{Frame, Framing, Part};
use ksf::gates::{Gate, LogId};
use ksf::limits::{Limits, Time};
use ksf::logged::{After, Logged};
use ksf::service::{ConnKey, Message, Peer, Refused};
use ksf::{CloseReason, Closer, Profile, Reply, Service, Turn, Waker};
use ksf_proto::resp::{self, RespLimits, Scan, Spans, Version, Writer};
use ksf_store::format::{LOGS_MAX, Lsn};
use ksf_store::log::{Purpose, WriteId};
use ksf_store::store::{Needs, Shard, Store, Undone};
use ksf_store::work;

pub use self::connection::KvConn;
use self::connection::{Protocol, scan_of_stranger};
use self::queue::{At, Fetch, Fetched, Lines, Queue, Resumed};
use crate::cleaner::Cleaner;
use crate::clients::{Clients, monotonic_ms};
use crate::commands::backup::LogFiles;
use crate::commands::{self, Session, Standing};
use crate::disk::{Disk, DiskError};
use crate::http::{self, STRANGER_BYTES_MAX};
use crate::medium::{self, MappedLog, Medium};
use crate::settings::{Durability, Settings};

/// Bytes of a log that are not on the medium at most, or half a segment if that is less: above it, commands that write wait.
/// A disk with four writes of 2 MiB each under way is as fast as it can be.
const UNWRITTEN_BYTES_MAX: usize = 8 << 20;
/// Empty lines, and commands without words, that a stranger may send: none has a reply that would bound them.
const EMPTIES_MAX: u8 = 32;
/// [Work](ksf_store::work) after which the commands of a connection wait for the next turn of its shard: others have theirs before.
/// About a millisecond; one command alone may exceed it.
const TURN_WORK_MAX: u64 = 16 << 10;
/// Work of all connections after which a turn is full: those whose commands wait leave the rest to the next turn, and those that have
/// worked join them. A client that comes waits for some of these, however many connections have work left.
const ALL_WORK_MAX: u64 = 8 * TURN_WORK_MAX;
/// Work in a turn after which a connection has worked, in this turn and the next one, if they are full: cheap commands of others are
/// not put off.
const LITTLE_WORK: u64 = TURN_WORK_MAX / 16;

/// A write that failed while the shards stopped.
#[derive(Debug)]
pub struct EndError {
    /// Its log, which lacks the last writes that no reply waited for. `None`: the superblock. Then
    /// the store is whole, and a start does not notice an older copy of a log.
    pub log: Option<u16>,
    /// The error of the file system.
    pub source: io::Error,
}

/// The service. One value serves all shards.
pub struct Kv {
    store: Arc<Store>,
    settings: Arc<Settings>,
    clients: Arc<Clients>,
    segment_bytes: u64,
    for_backups: Arc<LogFiles>,
    /// Shards of the store that no shard of the server has taken yet, with the files of their logs.
    free: Mutex<Vec<(Shard, File, Option<MappedLog>)>>,
    /// The files of all logs: any shard reads values from any.
    logs: Vec<File>,
    /// The gates' names of the logs.
    names: Vec<OnceLock<LogId>>,
    /// Wake the shards of the logs.
    wakers: Vec<OnceLock<Waker>>,
    failed: Box<dyn Fn(&str) + Send + Sync>,
    /// Segments that were cleaned.
    cleaned: AtomicU64,
    /// Commands that waited for room in the log, or for the medium.
    waits: AtomicU64,
    /// Keys that were taken out because their time was over.
    ended: AtomicU64,
    /// Values that were read for commands, and those of them that were damaged.
    read: AtomicU64,
    damaged: AtomicU64,
    /// The first failed write of a log at the end of its shard.
    unwritten: Mutex<Option<EndError>>,
    /// Holds the lock of its folder; its logs are with the shards.
    disk: Disk,
}

impl Kv {
    /// Serves the store on this disk. `failed` is called when a write of a shard that runs fails,
    /// and must not return; replies that wait for the disk are never sent. [`Kv::ended`] returns
    /// the error of a shard that stops.
    ///
    /// # Errors
    ///
    /// The logs cannot be read once more.
    pub fn new(
        mut disk: Disk,
        settings: Settings,
        failed: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, DiskError> {
        let (store, shards) = disk.open_store(settings.memory_bytes_max)?;
        let clients = Arc::new(Clients::new(shards.len()));
        let logs: Vec<File> = std::mem::take(&mut disk.logs).into_iter().map(File::from).collect();
        let places = shards.first().map_or(0, |shard| shard.log().free_places() + shard.log().segments().len());
        let for_backups = LogFiles { geometry: disk.geometry, places: places as u32, files: logs.clone() };
        let mut mapped = std::mem::take(&mut disk.mapped).into_iter();
        let mut free: Vec<_> =
            shards.into_iter().zip(&logs).map(|(s, file)| (s, file.clone(), mapped.next())).collect();
        free.reverse();
        Ok(Self {
            store,
            logs,
            settings: Arc::new(settings),
            clients,
            segment_bytes: disk.geometry.segment_bytes,
            for_backups: Arc::new(for_backups),
            free: Mutex::new(free),
            names: (0..LOGS_MAX).map(|_| OnceLock::new()).collect(),
            wakers: (0..LOGS_MAX).map(|_| OnceLock::new()).collect(),
            failed: Box::new(failed),
            cleaned: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            read: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            unwritten: Mutex::new(None),
            disk,
        })
    }

    /// What it keeps.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The shards have stopped, each log is whole on its medium, and the superblock has its end.
    ///
    /// # Errors
    ///
    /// [`EndError`]: the first one of a log, or else that of the superblock. It is returned once.
    pub fn ended(&self) -> Result<(), EndError> {
        let unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).take();
        unwritten.map_or(Ok(()), Err)?;
        self.disk.recorded().map_err(|source| EndError { log: None, source })
    }

    /// How the caches are flushed, if the logs are mapped.
    pub fn flush_instruction(&self) -> Option<&'static str> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().find_map(|(_, _, mapped)| mapped.as_ref().map(medium::instruction))
    }

    fn gate(&self, needs: &Needs) -> impl Iterator<Item = Gate> {
        // A log whose shard has not started has nothing to wait for.
        needs
            .iter()
            .filter_map(|(log, lsn)| Some(Gate { log: *self.names.get(usize::from(log))?.get()?, number: lsn.0 }))
    }
}

/// One shard of the server.
pub struct KvShard {
    pub(crate) shard: Shard,
    pub(crate) settings: Arc<Settings>,
    /// All logs.
    pub(crate) for_backups: Arc<LogFiles>,
    pub(crate) clients: Arc<Clients>,
    /// Ends connections of this shard.
    closer: Closer,
    pub(crate) medium: Medium,
    file: File,
    files: Files,
    /// The log in memory, if it is mapped: then nothing is ever under way.
    mapped: Option<MappedLog>,
    /// Writes that were stored and wait for a fence, with their memory. Empty between calls.
    stored: Vec<(WriteId, Vec<u8>)>,
    /// What was stored last lets something go on that is done between turns.
    goes_on: bool,
    /// Writes under way, by their token.
    writes: Vec<(u64, WriteId)>,
    next_token: u64,
    /// Replies of the command at hand, for their memory.
    scratch: Vec<u8>,
    /// Ends of what was written to the log and is not promised, each with the time of its first write in milliseconds since
    /// 1970; kept where replies leave before that.
    unpromised: VecDeque<(u64, Lsn)>,
    cleaner: Cleaner,
    /// When the shards of other logs may be woken again.
    call_again_at: Time,
    hope: Hope,
    unwritten_bytes_max: usize,
    /// A write that was refused because values are read; it begins when there is room.
    not_begun: Option<(FileOp, u64)>,
    /// Commands that wait for room in the log, for the medium, for memory, or for values.
    queue: Queue,
    lines: Lines,
    /// Counts the turns.
    turn: u64,
    /// Bytes of what was read, or is, for commands that were not carried out yet.
    fetched_bytes: Arc<AtomicUsize>,
    /// A read is under way that is there for its end alone.
    ticking: bool,
    /// When keys that have ended are looked for next, in nanoseconds since 1970.
    sweep_at_ns: u64,
    /// When the last write of the log was done.
    quiet_since: Time,
}

/// Whether there is hope for what waits for room or memory.
#[derive(Clone, Copy, Debug)]
enum Hope {
    /// Nothing waits.
    None,
    /// What was cleaned, and how many tombstones there were, when that changed last.
    Since { at: Time, cleaned: u64, tombstones: usize },
    /// What waits is refused until then.
    Lost { until: Time },
}

/// A message, and what it is: a command of RESP, or a request of HTTP.
#[derive(Clone, Copy)]
struct Asked<'a> {
    bytes: &'a [u8],
    http: Option<&'a http::Request>,
}

impl Asked<'_> {
    /// What it takes room in the log for, if it does.
    fn purpose(self) -> Option<Purpose> {
        match self.http {
            Some(request) => request.purpose(),
            None => commands::purpose(self.bytes),
        }
    }

    /// The same, as it waits in this place for something.
    fn to_resumed(self, place: u64, fetch: Fetch) -> Box<Resumed> {
        let command = Kept { bytes: self.bytes.into(), http: self.http.copied().map(Box::new) };
        Box::new(Resumed { place, command, fetch })
    }
}

/// The same beyond the call.
struct Kept {
    bytes: Box<[u8]>,
    http: Option<Box<http::Request>>,
}

impl Kept {
    fn asked(&self) -> Asked<'_> {
        Asked { bytes: &self.bytes, http: self.http.as_deref() }
    }
}

/// Memory of a reply that is kept for the next one.
const SCRATCH_BYTES_MAX: usize = 256 << 10;

impl KvShard {
    /// Whether room in the log is short for this, and the cleaner brings some back. What found none says so, and then what is no more
    /// urgent waits behind it.
    fn waits_for_room(&self, purpose: Purpose) -> bool {
        let log = self.shard.log();
        self.shard.waits_for_room().is_some_and(|waiting| waiting <= purpose)
            || purpose == Purpose::Writing && log.is_short_for(purpose) && log.can_be_cleaned()
    }

    /// Keeps the memory of a reply for the next one, unless it was a long one.
    fn keep_scratch(&mut self, out: Vec<u8>) {
        self.scratch = if out.capacity() > SCRATCH_BYTES_MAX { Vec::new() } else { out };
    }

    /// Whether the medium is behind: as much waits for it as may.
    fn is_behind(&self) -> bool {
        self.shard.log().unwritten_bytes() >= self.unwritten_bytes_max
    }

    /// Whether a command must wait for room in the log, or for the medium. One that takes no room never does.
    fn is_held_up(&self, asked: Asked<'_>) -> bool {
        // The first questions alone cost nothing, and are nearly always enough.
        let is_behind = self.is_behind();
        (is_behind || self.shard.log().is_short_for(Purpose::Writing))
            && asked.purpose().is_some_and(|purpose| is_behind || self.waits_for_room(purpose))
    }

    /// The same for a command that waits, also for memory.
    fn must_wait(&self, asked: Asked<'_>) -> bool {
        self.is_held_up(asked) || asked.purpose().is_some_and(|purpose| !self.shard.store().admits(purpose))
    }

    /// Whether a reply to what was done now waits for the medium.
    fn replies_wait(&mut self, now_ms: u64, needs: &Needs) -> bool {
        let Durability::Every { ms: lag_max_ms } = self.settings.durability else {
            return self.settings.durability == Durability::Always;
        };
        let own = self.shard.number();
        let promised = self.shard.store().promised(own);
        while self.unpromised.front().is_some_and(|(_, end)| *end <= promised) {
            self.unpromised.pop_front();
        }
        if let Some((_, end)) = needs.iter().find(|(log, _)| *log == own) {
            match self.unpromised.back_mut() {
                Some((since_ms, last)) if *since_ms == now_ms => *last = end.max(*last),
                Some((_, last)) if *last >= end => {}
                _ => self.unpromised.push_back((now_ms, end)),
            }
        }
        self.unpromised.front().is_some_and(|(since_ms, _)| now_ms.saturating_sub(*since_ms) > lag_max_ms)
    }
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

impl Service for Kv {
    type Shard = KvShard;
    type Conn = KvConn;
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, ..Profile::new("store", Framing::Custom) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<KvShard> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some((shard, file, mapped)) = free else {
            return Err(std::io::Error::other("there are more shards than the store has logs"));
        };
        let name = turn.open_log().map_err(std::io::Error::other)?;
        let _ = self.names[usize::from(shard.number())].set(name);
        let _ = self.wakers[usize::from(shard.number())].set(turn.waker());
        Ok(KvShard {
            shard,
            settings: Arc::clone(&self.settings),
            for_backups: Arc::clone(&self.for_backups),
            clients: Arc::clone(&self.clients),
            closer: turn.closer(),
            medium: self.disk.medium,
            file,
            files: turn.files(),
            mapped,
            stored: Vec::new(),
            goes_on: false,
            writes: Vec::new(),
            next_token: 0,
            scratch: Vec::new(),
            unpromised: VecDeque::new(),
            cleaner: Cleaner::default(),
            call_again_at: turn.now(),
            hope: Hope::None,
            unwritten_bytes_max: UNWRITTEN_BYTES_MAX.min(self.segment_bytes as usize / 2),
            not_begun: None,
            queue: Queue::default(),
            lines: Lines::default(),
            turn: 0,
            fetched_bytes: Arc::default(),
            ticking: false,
            sweep_at_ns: 0,
            quiet_since: turn.now(),
        })
    }

    fn accept(&self, shard: &mut KvShard, peer: &Peer) -> Result<KvConn, Refused> {
        let is_near = match peer {
            Peer::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Peer::Unix => true,
            _ => false,
        };
        let standing = match &self.settings.password {
            Some(_) => Standing::Unknown,
            None if is_near => Standing::Known,
            None => Standing::Denied,
        };
        let address = match peer {
            Peer::Tcp(address) => Some(SocketAddr::new(address.ip().to_canonical(), address.port())),
            _ => None,
        };
        let client = self.clients.add(shard.shard.number(), address, &shard.closer, now_ns() / 1_000_000);
        let session = Session { standing, is_tcp: address.is_some(), client, ..Session::default() };
        Ok(KvConn { session, ..KvConn::default() })
    }

    fn cut(&self, conn: &mut KvConn, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        // What one command can set another one can read.
        conn.session.reply_bytes_max = limits.connection_bytes_max.max(limits.message_bytes_max);
        let is_stranger = conn.is_stranger();
        if matches!(conn.protocol, Protocol::Unknown) {
            match http::spoken(buf, scanned, commands::is_command) {
                None if !is_stranger || buf.len() < STRANGER_BYTES_MAX => {
                    return Ok(Frame::Incomplete { need_bytes: None });
                }
                // What is too long for a stranger is told in the protocol that it seems to be.
                None if !buf.starts_with(b"GET /") => conn.protocol = Protocol::Resp,
                None | Some(http::Spoken::Http) => conn.protocol = Protocol::Http(Box::new(conn.reader())),
                // It may be in front of either. Each is looked at as if it were the first one, so there are few of them.
                Some(http::Spoken::Empty) => {}
                Some(http::Spoken::Resp) => conn.protocol = Protocol::Resp,
                Some(http::Spoken::Unknown(bytes)) => {
                    conn.protocol = Protocol::Neither(commands::unknown_line(&buf[..bytes]));
                    return Err(FramingError::Malformed);
                }
            }
        }
        if let Protocol::Http(reader) = &mut conn.protocol {
            return reader.cut(buf, scanned, limits, |request, head| request.has_password(head, &self.settings));
        }
        let of_listener = RespLimits {
            // As Redis has it: `message_bytes_max` ends them sooner.
            arguments_max: i32::MAX as usize,
            argument_bytes_max: limits.message_bytes_max,
            command_bytes_max: limits.message_bytes_max,
        };
        let scanned = if is_stranger {
            scan_of_stranger(buf, &of_listener, &mut conn.progress)
        } else {
            resp::scan(buf, &of_listener, &mut conn.progress)
        };
        match scanned {
            Ok(Scan::Command(bytes)) => {
                if is_stranger && commands::is_empty(&buf[..bytes], &conn.progress.spans()) {
                    conn.count_empty()?;
                }
                match commands::ends_connection(&buf[..bytes], &conn.progress.spans()) {
                    Ok(false) => {}
                    // Without a reply, as in Redis.
                    Ok(true) => return Err(FramingError::Malformed),
                    Err(malformed) => {
                        conn.session.malformed = Some(malformed);
                        return Err(FramingError::Malformed);
                    }
                }
                Ok(Frame::Part(Part { header_bytes: 0, body_bytes: bytes, trailer_bytes: 0, last: true }))
            }
            Ok(Scan::Incomplete(need)) => Ok(Frame::Incomplete { need_bytes: Some(need) }),
            Err(malformed) => {
                conn.session.malformed = Some(malformed);
                Err(FramingError::Malformed)
            }
        }
    }

    fn header_bytes_max(&self, limits: &Limits) -> usize {
        limits.message_bytes_max
    }

    fn call(&self, shard: &mut KvShard, conn: &mut KvConn, message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        let (key, bytes) = (message.key(), message.bytes());
        if conn.session.client.is_killed(key) {
            return reply.close();
        }
        conn.session.room_bytes = reply.session_room();
        let Protocol::Http(reader) = &mut conn.protocol else {
            return self.take_up(shard, conn, key, Asked { bytes, http: None }, reply);
        };
        match reader.take(bytes) {
            Some(http::Taken::Whole(request)) => {
                self.take_up(shard, conn, key, Asked { bytes, http: Some(&request) }, reply);
            }
            Some(http::Taken::Joined(request, whole)) => {
                self.take_up(shard, conn, key, Asked { bytes: &whole, http: Some(&request) }, reply);
            }
            Some(http::Taken::Head(request)) => self.welcome(conn, &request, bytes, reply),
            None => {}
        }
    }

    fn resume(
        &self,
        shard: &mut KvShard,
        conn: &mut KvConn,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_, Logged>,
    ) {
        conn.waiting = conn.waiting.saturating_sub(1);
        conn.session.room_bytes = reply.session_room();
        let (Ok(mut resumed), Some(key)) = (state.downcast::<Resumed>(), conn.key) else { return };
        if shard.queue.is_behind(key, resumed.place) {
            // One that went on with it waits again.
            return conn.wait(shard, key, resumed, reply, Queue::add);
        }
        // What was read for one has room that others wait for.
        if shard.lines.are_done() && !matches!(resumed.fetch, Fetch::Values(_) | Fetch::Until { .. }) {
            // One that has worked goes on behind all others.
            let has_worked = conn.worked.0 == shard.turn;
            resumed.fetch = if has_worked { Fetch::Turn } else { Fetch::FirstTurn };
            shard.lines.pass_over(has_worked);
            let line_up = |queue: &mut Queue, at: At, waiting| queue.line_up(at, waiting, Vec::new());
            return conn.wait(shard, key, resumed, reply, line_up);
        }
        let Resumed { place, command, fetch } = *resumed;
        match fetch {
            Fetch::Values(fetched) => match *fetched {
                Fetched { failed: Some(why), .. } => conn.fail(command.asked(), &why, reply),
                // Its room is kept until it is carried out.
                Fetched { values, room, .. } => {
                    shard.shard.set_values(Some(Arc::new(values)));
                    self.execute(shard, conn, key, Some(place), command.asked(), reply);
                    shard.shard.set_values(None);
                    drop(room);
                }
            },
            Fetch::Until { reply: bytes, .. } => {
                if !bytes.is_empty() {
                    reply.after(After::Nothing).bytes(&bytes);
                }
            }
            Fetch::Nothing
            | Fetch::Turn
            | Fetch::FirstTurn
            | Fetch::Promise { .. }
            | Fetch::Room { .. }
            | Fetch::Pause { .. } => {
                self.execute(shard, conn, key, Some(place), command.asked(), reply);
            }
        }
    }

    fn files_have_room(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        self.work(shard, turn);
    }

    fn refuse(&self, _: &mut Self::Shard, conn: &mut KvConn, reason: CloseReason, reply: &mut Reply<'_, Logged>) {
        let mut out = Vec::new();
        if let Protocol::Http(reader) = &conn.protocol {
            http::refuse(reader.status(reason), now_ns(), &mut out);
        } else if let Protocol::Neither(Some(why)) = &conn.protocol {
            Writer::new(&mut out, Version::Resp2).error_bytes(why);
        } else if let Some(malformed) = conn.session.malformed {
            Writer::new(&mut out, Version::Resp2).error(&format!("ERR {malformed}"));
        }
        if !out.is_empty() {
            reply.after(After::Nothing).bytes(&out);
        }
    }

    fn reply_bytes(&self, shard: &mut KvShard, conn: &mut KvConn, message: &[u8]) -> usize {
        match &conn.protocol {
            // A body alone has a request in front of it, whose reply may be as long.
            Protocol::Http(reader) if reader.has_short_reply() => http::SHORT_REPLY_BYTES,
            Protocol::Http(reader) => reader.whole_request().map_or(conn.session.reply_bytes_max, |request| {
                http::reply_bytes(shard, &conn.session, request, message, now_ns() / 1_000_000)
            }),
            _ => commands::reply_bytes(shard, &conn.session, message, now_ns() / 1_000_000),
        }
    }

    fn session(&self, conn: &KvConn) -> ksf::service::SessionState {
        let (is_stranger, head_bytes, awaits_rest) = match &conn.protocol {
            // Each request has the password, or has it not.
            Protocol::Http(reader) => (reader.is_of_stranger(), reader.kept_bytes(), reader.awaits_body()),
            _ => (conn.session.standing != Standing::Known, 0, false),
        };
        ksf::service::SessionState {
            is_stranger,
            bytes: conn.session.transaction.kept_bytes() + head_bytes,
            awaits_rest,
            ..ksf::service::SessionState::default()
        }
    }

    fn close(&self, shard: &mut KvShard, conn: KvConn) {
        self.clients.remove(shard.shard.number(), &conn.session.client);
        // Nobody hears of what these would do, and they would stand in the way of others.
        if let Some(key) = conn.key.filter(|_| conn.waiting > 0) {
            shard.queue.forget(key);
        }
    }

    fn turn_end(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        shard.turn += 1;
        shard.lines.begin_turn();
        self.work(shard, turn);
    }

    fn file_done(&self, shard: &mut KvShard, done: FileDone, turn: &mut Turn<'_>) {
        // A value that cannot be read is an error for those who ask for it.
        if let Some(is_right) = shard.queue.has_read(&done, &self.store, self.segment_bytes) {
            self.read.fetch_add(1, Ordering::Relaxed);
            self.damaged.fetch_add(u64::from(!is_right), Ordering::Relaxed);
            return;
        }
        if let Err(error) = &done.result {
            (self.failed)(&error.to_string());
            return;
        }
        if let FileOp::Read { into, .. } = &done.op {
            if !shard.cleaner.has_read(done.token, into) {
                shard.ticking = false;
            }
            return;
        }
        let Some(at) = shard.writes.iter().position(|(token, _)| *token == done.token) else { return };
        let (_, id) = shard.writes.swap_remove(at);
        shard.quiet_since = turn.now();
        self.release(&shard.shard.written(id, true, Vec::new()), turn);
    }

    /// A log that ends well says how far replies told of it, as one does that is idle; and so does the superblock, which knows it
    /// also where the end of the log is lost.
    fn stop(&self, mut shard: KvShard) {
        let log = shard.shard.number();
        shard.shard.say(now_ns());
        // One at a time: none of them may be on the disk without those before it.
        while let Some(write) = shard.shard.next_write(1, now_ns()) {
            if let Some(mapped) = &mut shard.mapped {
                mapped.write(write.place, write.offset, &write.bytes);
                mapped.commit();
                shard.shard.written(write.id, true, write.bytes);
                continue;
            }
            let offset = u64::from(write.place) * self.segment_bytes + write.offset;
            if let Err(source) = self.disk.write_at(log, offset, &write.bytes) {
                // Other shards may still have to write what they acknowledged.
                let error = EndError { log: Some(log), source };
                self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
            shard.shard.written(write.id, true, write.bytes);
        }
        self.disk.ended(log, shard.shard.log().promised());
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("keys", self.store.keys() as u64),
            ("segments_cleaned", self.cleaned.load(Ordering::Relaxed)),
            ("keys_ended", self.ended.load(Ordering::Relaxed)),
            ("commands_waited", self.waits.load(Ordering::Relaxed)),
            ("memory_bytes", self.store.memory().sizes().used as u64),
            ("values_on_disk", self.store.memory().sizes().away as u64),
            ("values_read", self.read.load(Ordering::Relaxed)),
            ("values_damaged", self.damaged.load(Ordering::Relaxed)),
        ]
    }
}

impl Kv {
    /// Carries out a command now, or when there is room for what it writes.
    fn take_up(
        &self,
        shard: &mut KvShard,
        conn: &mut KvConn,
        key: ConnKey,
        asked: Asked<'_>,
        reply: &mut Reply<'_, Logged>,
    ) {
        if conn.waiting > 0 || !conn.never_waits(asked) && shard.is_held_up(asked) {
            let place = shard.queue.next_place();
            conn.wait(shard, key, asked.to_resumed(place, Fetch::Nothing), reply, Queue::add);
        } else {
            self.execute(shard, conn, key, None, asked, reply);
        }
    }

    /// A command changed nothing, and is to be tried again. `place`: what it had in the queue.
    fn put_off(
        &self,
        shard: &mut KvShard,
        conn: &mut KvConn,
        (key, place): (ConnKey, Option<u64>),
        asked: Asked<'_>,
        undone: Undone,
        reply: &mut Reply<'_, Logged>,
    ) {
        let place = place.unwrap_or_else(|| shard.queue.next_place());
        let wanted = match undone {
            Undone::Short => {
                return conn.wait(shard, key, asked.to_resumed(place, Fetch::Nothing), reply, Queue::add_first);
            }
            Undone::Away(wanted) => wanted,
        };
        // What a reply may tell, and what a command may write.
        let bytes_max = conn.session.reply_bytes_max.saturating_add(shard.shard.log().geometry().append_bytes_max());
        match queue::plan(&wanted, bytes_max, &shard.fetched_bytes) {
            Ok(fetch) => {
                let line_up = |queue: &mut Queue, at: At, waiting| queue.line_up(at, waiting, wanted);
                conn.wait(shard, key, asked.to_resumed(place, fetch), reply, line_up);
            }
            Err(why) => conn.fail(asked, &why, reply),
        }
    }

    /// Has a command wait for a time or for the next turn, and those behind it on its connection.
    fn wait_first(
        shard: &mut KvShard,
        conn: &mut KvConn,
        (key, place): (ConnKey, Option<u64>),
        asked: Asked<'_>,
        fetch: Fetch,
        reply: &mut Reply<'_, Logged>,
    ) {
        let place = place.unwrap_or_else(|| shard.queue.next_place());
        let line_up = |queue: &mut Queue, at: At, waiting| queue.line_up(at, waiting, Vec::new());
        conn.wait(shard, key, asked.to_resumed(place, fetch), reply, line_up);
    }

    /// Answers the head of a request whose client waits before it sends the body.
    fn welcome(&self, conn: &KvConn, request: &http::Request, head: &[u8], reply: &mut Reply<'_, Logged>) {
        let mut out = Vec::new();
        // Its head is kept until the body is there.
        let is_wanted = if head.len() > reply.session_room() {
            http::refuse(503, now_ns(), &mut out);
            false
        } else {
            http::welcome(&self.settings, &conn.session, request, head, now_ns(), &mut out)
        };
        reply.after(After::Nothing).bytes(&out);
        if !is_wanted {
            reply.close();
        }
    }

    /// Carries out a command. `place`: what it had in the queue.
    fn execute(
        &self,
        shard: &mut KvShard,
        conn: &mut KvConn,
        key: ConnKey,
        place: Option<u64>,
        asked: Asked<'_>,
        reply: &mut Reply<'_, Logged>,
    ) {
        let is_full = place.is_none() && !conn.never_waits(asked) && shard.lines.is_full();
        if conn.has_worked(shard.turn, is_full) {
            return Self::wait_first(shard, conn, (key, place), asked, Fetch::Turn, reply);
        }
        let now_ns = now_ns();
        if self.clients.is_paused() && !conn.never_waits(asked) {
            let writes = asked.purpose().is_some();
            if self.clients.waits(writes, monotonic_ms()) {
                return Self::wait_first(shard, conn, (key, place), asked, Fetch::Pause { writes }, reply);
            }
        }
        let mut out = std::mem::take(&mut shard.scratch);
        out.clear();
        // One that has waited is not the one that was cut last.
        let spans = if place.is_none() { conn.progress.spans() } else { Spans::default() };
        let worked_before = work::done();
        let done = match asked.http {
            Some(request) => {
                let done = http::execute(shard, &conn.session, request, asked.bytes, now_ns, &mut out);
                work::add(work::of_bytes(out.len()));
                done
            }
            None => commands::execute(shard, &mut conn.session, asked.bytes, &spans, now_ns, &mut out),
        };
        let worked = work::done() - worked_before;
        conn.work(shard.turn, worked);
        shard.lines.work(worked, place.is_some());
        if let Some(undone) = shard.shard.undone() {
            // Whatever it says, it says without what it asked for.
            shard.keep_scratch(out);
            return self.put_off(shard, conn, (key, place), asked, undone, reply);
        }
        if let Some(at_ms) = done.until_ms {
            let fetch = Fetch::Until { at_ms, reply: out[..].into() };
            shard.keep_scratch(out);
            return Self::wait_first(shard, conn, (key, place), asked, fetch, reply);
        }
        let waits = shard.replies_wait(now_ns / 1_000_000, &done.needs) || done.is_durable;
        if let Some(range) = done.file {
            // It is of no use unless it is what was promised before, so it waits for nothing.
            let sent = reply.after(After::Nothing).file(|head| head.extend_from_slice(&out), range, b"\r\n");
            if sent.is_err() {
                reply.after(After::Nothing).bytes(b"-ERR this connection takes no bytes of files\r\n");
            }
        } else if !out.is_empty() {
            for gate in self.gate(&done.needs).filter(|_| waits) {
                reply.after(gate);
            }
            reply.after(After::Nothing).bytes(&out);
        }
        if done.close {
            reply.close();
        }
        shard.keep_scratch(out);
    }
}

#[cfg(test)]
mod tests;
