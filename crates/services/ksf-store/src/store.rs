//! The store: commands on keys, over the index that all shards share and the log that each of them has.
//!
//! ```text
//!   shard 0: update ─► index (leaves of its keys locked) ─► log 0 ─┐
//!   shard 1: update ─► index                             ─► log 1 ─┼► written ─► Promises ─► how far replies may go
//!   shard 1: read   ─► index: saw what log 0 wrote: the reply waits for log 0
//! ```
//!
//! Any shard executes any command. A command's changes are one append to the shard's own log, so they are durable as a whole or not
//! at all. The leaves of its keys stay locked until the index has the changes, so other shards see all or none of them.

mod append;
mod cleaning;
mod open;

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use smallvec::SmallVec;

use crate::away::{Away, Missing, Readable, Values, Wanted};
use crate::backup::Backups;
use crate::cells::{self, Head, Shape};
use crate::format::{Lsn, Record, RecordKind};
use crate::index::leaf::{Entry, LetGo, Origin, Value};
use crate::index::{Cleared, Index, Position, Round, bytes_of_leaf};
use crate::log::{AppendError, Log, News, Purpose, Write, WriteId};
use crate::memory::{Memory, NoRoom, Sizes};
use crate::promises::Promises;
use crate::update::{Update, View};
use crate::watch::{Absent, Seen};
use crate::work;

use self::append::{Appender, see_flush};
pub use self::cleaning::{CleanError, Cleaning};
pub use self::open::Opening;

/// State that all shards share.
#[derive(Debug)]
pub struct Store {
    index: Index,
    /// Elements of the keys that are not strings.
    cells: Index,
    /// Number of keys.
    keys: AtomicUsize,
    next_version: AtomicU64,
    /// Missing keys that are watched.
    absent: Arc<Absent>,
    promises: Mutex<Promises>,
    /// Commit LSN of each log.
    promised: Box<[AtomicU64]>,
    /// End of each log, with what is not written yet.
    appended: Box<[CachePadded<AtomicU64>]>,
    pub(crate) backups: Mutex<Backups>,
    /// Records of each log that other shards made dead.
    outdated: Box<[Mutex<Vec<Outdated>>]>,
    /// True for each log that may have dead records. Its shard checks when room is needed.
    has_dead: Box<[AtomicBool]>,
    /// Logs in which a removal lacks room.
    wanting: AtomicUsize,
    /// Cursor of the search for expired keys.
    sweep: Mutex<Round>,
    /// True while that search is under way or memory of flushes is left to be freed.
    is_sweeping: CachePadded<AtomicBool>,
    /// Number of starts before this one, by which cursors of another start are recognised.
    epoch: u32,
    /// The last flush. Commands read `flushed`.
    flush: Mutex<Flush>,
    flushed: CachePadded<Flushed>,
    /// Leaves that flushes removed and whose memory is not freed yet.
    cleared: Mutex<Vec<Cleared>>,
    memory: Arc<Memory>,
    /// CLOCK hand: the key at which the next eviction begins.
    hand: Mutex<Vec<u8>>,
    readable: Arc<Readable>,
}

/// The part of the last flush that every command reads. It hardly ever changes, so it has cache lines of its own.
#[derive(Debug, Default)]
struct Flushed {
    /// Its version. It changes only while no key is locked.
    version: AtomicU64,
    /// False if the flush is known to be committed.
    waits: AtomicBool,
}

/// A command that removed every key.
#[derive(Debug, Default)]
struct Flush {
    /// The log and the current LSN of its record.
    origin: (u16, Lsn),
    /// The end of the record when it was written.
    end: Lsn,
}

/// LSN and size in bytes of a dead record.
type Outdated = (Lsn, usize);
/// Dead records for which memory is kept.
const OUTDATED_KEPT: usize = 4096;

/// One shard's part of the store.
#[derive(Debug)]
pub struct Shard {
    store: Arc<Store>,
    number: u16,
    log: Log,
    /// Segments that were cleaned, and are not yet erased.
    going: BTreeMap<u64, Going>,
    /// Commit LSNs that advanced since the last [`written`](Self::written).
    moved: Vec<(u16, Lsn)>,
    /// Scratch for records that other shards made dead. It is empty between two calls; its memory is kept.
    outdated: Vec<Outdated>,
    /// Version of the last flush that was applied to the log.
    flushed: u64,
    last_version: u64,
    /// One more than the number of the last segment that readers can find.
    next_segment: u64,
    /// Values that were read from the disk for the current command.
    values: Option<Arc<Values>>,
    /// Values that the current command needs and that are on the disk only.
    missing: BTreeMap<u64, Wanted>,
    /// The current command needs memory, or room in the log, that is not free yet.
    is_short: bool,
    /// The most urgent purpose for which the log had no room, and the bytes of the records, until it has.
    wanted: Option<(Purpose, usize)>,
    /// Commands that need room are refused instead of waiting.
    gives_up: bool,
    /// This log is counted in [`Store::wanting`].
    told_of_want: bool,
    /// Places that were free when no segment was [due to be cleaned](Self::due_to_clean).
    not_due_at: Option<usize>,
}

/// Reason to retry a command. It has changed nothing.
#[derive(Debug)]
pub enum Undone {
    /// It needs values that are on the disk only; the caller reads them first.
    Away(Vec<Wanted>),
    /// It needs memory, or room in the log. The caller retries when the store [admits](Store::admits) it and no command of the same
    /// urgency [waits for room](Shard::waits_for_room).
    Short,
}

/// Dead records of a segment that is going to be erased.
#[derive(Debug)]
struct Going {
    older: Vec<Older>,
    /// Records that replace them. Until these are committed, a crash brings the dead ones back.
    outdated_by: Needs,
}

/// A dead record.
#[derive(Debug)]
struct Older {
    key: Box<[u8]>,
    version: u64,
    /// The element, if the record is of one.
    cell: Option<Vec<u8>>,
}

/// Per log, the LSN that must be committed before a reply may be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs(SmallVec<[(u16, Lsn); 2]>);

impl Needs {
    pub(crate) fn add(&mut self, log: u16, lsn: Lsn) {
        match self.0.iter_mut().find(|(known, _)| *known == log) {
            Some((_, known)) => *known = (*known).max(lsn),
            None => self.0.push((log, lsn)),
        }
    }

    /// The logs and LSNs; none if the reply may be sent at once.
    pub fn iter(&self) -> impl Iterator<Item = (u16, Lsn)> + '_ {
        self.0.iter().copied()
    }
}

/// The time of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Milliseconds since 1970: keys end by it.
    pub now_ms: u64,
    /// When the request was received, in nanoseconds since 1970, if that is recorded.
    pub received_ns: Option<u64>,
}

/// State of a key.
#[derive(Clone, Copy, Debug)]
pub struct Got<'a> {
    /// Type of its value.
    pub shape: Shape,
    /// The value of a string.
    pub(crate) held: StringValue<'a>,
    /// Number of elements; 1 for a string.
    pub count: u64,
    /// The place of the first element of a list.
    pub first: i64,
    /// The version of the last write. It changes with every write, and never comes back.
    pub version: u64,
    /// When the key ends: milliseconds since 1970.
    pub expires_ms: Option<u64>,
}

/// The value of a string, or where it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StringValue<'a> {
    Here(&'a [u8]),
    Away(Away, Option<&'a Missing<'a>>),
}

impl<'a> Got<'a> {
    /// The value of a string. It is empty if the value is on the disk only: the command is then [retried](Undone) when the value was
    /// read, and its changes are discarded.
    pub fn value(&self) -> &'a [u8] {
        match self.held {
            StringValue::Here(value) => value,
            StringValue::Away(away, missing) => {
                missing.iter().for_each(|missing| missing.note(away));
                &[]
            }
        }
    }

    /// Bytes of the value of a string, wherever it is.
    pub fn value_bytes(&self) -> usize {
        match self.held {
            StringValue::Here(value) => value.len(),
            StringValue::Away(away, _) => away.value_bytes as usize,
        }
    }
}

/// Access to values that are on the disk only.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sources<'a> {
    pub(crate) values: Option<&'a Values>,
    pub(crate) missing: Option<&'a Missing<'a>>,
}

/// Why a command changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// A key or value is longer than it may be.
    #[error("a key of {key_bytes} bytes with a value of {value_bytes} bytes is too long")]
    TooLong {
        /// Bytes of the key.
        key_bytes: usize,
        /// Bytes of the value.
        value_bytes: usize,
    },
    /// The log takes no more.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// Data that cannot be evicted exceeds the limit.
    #[error("out of memory: data that cannot be evicted exceeds {bytes_max} bytes")]
    Memory {
        /// Limit of the store's memory, in bytes.
        bytes_max: usize,
    },
    /// The command is to be retried; [`Shard::undone`] returns the reason.
    #[error("retry: values must be read from the disk, or memory must be freed")]
    Undone,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data behind these locks is valid after each call that changes it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Number of keys. Expired keys count until [`Shard::sweep`] removes them.
    pub fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The index of the elements of keys that are not strings.
    pub fn cells(&self) -> &Index {
        &self.cells
    }

    /// Memory of keys and values, and its limit.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Measures that memory by visiting every entry, to check the counts.
    pub fn measure(&self) -> Sizes {
        let used = lock(&self.cleared).iter().map(Cleared::used).sum();
        self.index.measure() + self.cells.measure() + Sizes { used, values: used, ..Sizes::default() }
    }

    /// Returns true if a command for this purpose does not wait for memory: it is executed or refused.
    pub fn admits(&self, purpose: Purpose) -> bool {
        self.memory.admit(purpose) != Err(NoRoom::Yet)
    }

    /// Evicts committed values until usage is at the low-water mark or `budget` is spent.
    pub fn let_go(&self, budget: LetGo) {
        let sizes = self.memory.sizes();
        let Some(over) = sizes.used.checked_sub(self.memory.low_bytes()).filter(|over| *over > 0) else { return };
        // If another shard does it, that is enough.
        let Some(mut hand) = self.hand.try_lock().ok().filter(|_| sizes.values > 0) else { return };
        let budget = LetGo { bytes: budget.bytes.min(over), ..budget };
        self.index.let_go(&mut hand, budget, |origin| origin.lsn < self.promised(origin.log));
    }

    /// Caches a value that was read for a command, if the key still has this version and there is room.
    pub fn take_in(&self, key: &[u8], version: u64, value: &Arc<[u8]>) -> bool {
        let has_room = self.memory.used().saturating_add(value.len()) <= self.memory.bytes_max();
        has_room && self.index.take_in(key, version, value)
    }

    /// Returns the place of a value from [`scan`](Self::scan) that is on the disk only.
    pub fn locate(&self, got: &Got<'_>) -> Option<Wanted> {
        match got.held {
            StringValue::Here(_) => None,
            StringValue::Away(away, _) => Some(self.readable.want(away, self.promised(away.origin.log))),
        }
    }

    pub(crate) fn missing(&self) -> Missing<'_> {
        Missing::new(&self.readable, &self.promised)
    }

    /// Version of the last flush; 0 without one. Records of smaller versions are dead.
    pub fn flushed(&self) -> u64 {
        self.flushed.version.load(Ordering::Acquire)
    }

    /// The version of the next write, or a smaller one.
    pub(crate) fn next_version(&self) -> u64 {
        self.next_version.load(Ordering::Relaxed)
    }

    /// A version that no write has.
    pub(crate) fn take_version(&self) -> u64 {
        self.next_version.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn absent(&self) -> &Arc<Absent> {
        &self.absent
    }

    /// Commit LSN of a log.
    pub fn promised(&self, log: u16) -> Lsn {
        Lsn(self.promised[usize::from(log)].load(Ordering::Acquire))
    }

    /// Commit LSNs of all logs at one moment.
    pub(crate) fn promised_ends(&self) -> Vec<Lsn> {
        let promises = lock(&self.promises);
        (0..self.promised.len()).map(|log| promises.promised(log as u16)).collect()
    }

    /// Returns the LSNs that cover everything that commands have appended so far.
    pub fn all_appended(&self) -> Needs {
        let mut needs = Needs::default();
        for (log, appended) in (0..).zip(self.appended.iter()) {
            let end = Lsn(appended.load(Ordering::Acquire));
            if end > self.promised(log) {
                needs.add(log, end);
            }
        }
        needs
    }

    /// Locks keys for a command that keeps its update among what is its own, until a shard [commits](Shard::commit) it.
    /// `values`: [those](Shard::values) that the shard has for it.
    pub fn update<'k, R>(
        &self,
        values: Option<Arc<Values>>,
        keys: &[&'k [u8]],
        clock: Clock,
        command: impl FnOnce(Update<'_, 'k>) -> R,
    ) -> R {
        self.index.with_own(keys, |locked| command(Update::new(self, values, locked, clock.now_ms)))
    }

    /// Goes through the keys from `from` on, in order, until `take` returns false; [`Index::scan`] tells what is seen. A value
    /// that is on a medium alone is not shown, but [where](Self::locate) it is.
    pub fn scan(&self, from: &[u8], now_ms: u64, mut take: impl FnMut(&[u8], Got<'_>) -> bool) -> Needs {
        let mut needs = Needs::default();
        self.index.scan(from, |entry| {
            self.note(&mut needs, entry);
            got(entry, now_ms, Sources::default()).is_none_or(|got| take(entry.key, got))
        });
        self.note_flush(&mut needs);
        needs
    }

    /// Goes through some of the keys, about `count` of them, from a cursor on; 0 begins. Returns the cursor to go on from, which
    /// is 0 at the end; [`Index::step`] tells what is seen. One of another start of the store, or of a key, begins anew.
    pub fn scan_some(
        &self,
        cursor: u64,
        count: usize,
        now_ms: u64,
        mut take: impl FnMut(&[u8], Got<'_>),
    ) -> (u64, Needs) {
        let mut needs = Needs::default();
        let counts = |entry: &Entry<'_>| {
            self.note(&mut needs, entry);
            got(entry, now_ms, Sources::default()).is_some()
        };
        let next = self.index.step(&[], self.position(cursor), count, counts, |entry| {
            if let Some(got) = got(entry, now_ms, Sources::default()) {
                take(entry.key, got);
            }
        });
        self.note_flush(&mut needs);
        (self.cursor(next), needs)
    }

    /// The cursor that names a position, or the end.
    pub(crate) fn cursor(&self, position: Option<Position>) -> u64 {
        position.map_or(0, |position| u64::from(self.epoch as u8) << Position::BITS | position.number())
    }

    /// The position that a cursor names. Some clients keep a cursor in a double: 53 bits.
    pub(crate) fn position(&self, cursor: u64) -> Option<Position> {
        let is_ours = cursor >> Position::BITS == u64::from(self.epoch as u8);
        is_ours.then(|| Position::of_number(cursor))
    }

    /// A key that is drawn at random: [`Index::draw`].
    pub fn random_key(&self, now_ms: u64, random: impl FnMut() -> u64) -> (Option<Vec<u8>>, Needs) {
        let mut needs = Needs::default();
        let key = self.index.draw(random, |entry| {
            self.note(&mut needs, entry);
            got(entry, now_ms, Sources::default()).map(|_| entry.key.to_vec())
        });
        self.note_flush(&mut needs);
        (key, needs)
    }

    /// Goes through the cells of a key that [`scan`](Self::scan) shows, in order.
    pub fn walk(&self, key: &[u8], mut take: impl FnMut(&[u8], &[u8])) {
        cells::walk(&self.cells, key, &[], |subkey, value| {
            take(subkey, value);
            true
        });
    }

    /// Somebody saw what records did: notes them, unless they are promised already.
    pub(crate) fn note(&self, needs: &mut Needs, entry: &Entry<'_>) {
        let mut note = |log: u16, end: Lsn| {
            if end > self.promised(log) {
                needs.add(log, end);
            }
        };
        if entry.origin.lsn != Lsn::default() {
            note(entry.origin.log, Lsn(entry.origin.lsn.0 + 1));
        }
        if let Value::Cells(head) = entry.value {
            Head::decode(head).seen.into_iter().for_each(|(log, end)| note(log, end));
        }
    }

    /// Somebody saw that what a flush took is gone: notes it, unless it is promised already. Where nothing is locked, this comes
    /// after the look: the flush may come in between.
    pub(crate) fn note_flush(&self, needs: &mut Needs) {
        if !self.flushed.waits.load(Ordering::Acquire) {
            return;
        }
        let flush = lock(&self.flush);
        let (log, _) = flush.origin;
        if flush.end > self.promised(log) {
            needs.add(log, flush.end);
        } else {
            self.flushed.waits.store(false, Ordering::Release);
        }
    }

    /// Gives some memory back that flushes left; true if there is more.
    fn free_some(&self, leaves_max: usize) -> bool {
        // If another shard does it, that is enough.
        let Ok(mut cleared) = self.cleared.try_lock() else { return false };
        for _ in 0..leaves_max {
            let Some(last) = cleared.last_mut() else { return false };
            if !last.free_one(&self.memory) {
                cleared.pop();
            }
        }
        !cleared.is_empty()
    }

    fn outdate(&self, entry: &Entry<'_>) {
        self.outdate_at(entry.origin, record_bytes(entry));
    }

    /// The record there is out of date. An entry without a record says so by the place 0, where no record is.
    pub(crate) fn outdate_at(&self, origin: Origin, bytes: usize) {
        if origin.lsn != Lsn::default() {
            let log = usize::from(origin.log);
            lock(&self.outdated[log]).push((origin.lsn, bytes));
            if !self.has_dead[log].load(Ordering::Relaxed) {
                self.has_dead[log].store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether an entry is that of a key that is there, also if it has ended.
    pub(crate) fn is_there(&self, entry: &Entry<'_>) -> bool {
        match entry.value {
            Value::Gone => false,
            Value::Cells(head) => Head::decode(head).count > 0,
            Value::Here(_) | Value::OnMedium(_) => true,
        }
    }

    pub(crate) fn count_key(&self, was_there: bool, is_there: bool) {
        // All shards have this count in common: nothing is written to it that changes nothing.
        if is_there && !was_there {
            self.keys.fetch_add(1, Ordering::Relaxed);
        } else if was_there && !is_there {
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// True if a key that ends at `expires_ms` is absent.
pub(crate) fn is_expired(expires_ms: Option<u64>, now_ms: u64) -> bool {
    expires_ms.is_some_and(|end| now_ms >= end)
}

pub(crate) fn got<'a>(entry: &Entry<'a>, now_ms: u64, sources: Sources<'a>) -> Option<Got<'a>> {
    let expires_ms = entry.expires_ms;
    if is_expired(expires_ms, now_ms) {
        return None;
    }
    let version = entry.origin.version;
    let string = |held| Some(Got { shape: Shape::String, held, count: 1, first: 0, version, expires_ms });
    match entry.value {
        Value::Here(value) => string(StringValue::Here(value)),
        Value::OnMedium(value_bytes) => match sources.values.and_then(|values| values.get(version)) {
            Some(value) => string(StringValue::Here(value)),
            None => {
                let away = Away { origin: entry.origin, value_bytes, record_bytes: record_bytes(entry) };
                string(StringValue::Away(away, sources.missing))
            }
        },
        Value::Cells(head) => {
            let Head { shape, count, first, version, .. } = Head::decode(head);
            (count > 0).then_some(Got { shape, held: StringValue::Here(&[]), count, first, version, expires_ms })
        }
        Value::Gone => None,
    }
}

/// Bytes of the record of the base of a key, but for the time of receipt.
fn record_bytes(entry: &Entry<'_>) -> usize {
    let (value_bytes, expires) = match entry.value {
        Value::Here(value) => (value.len(), entry.expires_ms.is_some()),
        Value::OnMedium(bytes) => (bytes as usize, entry.expires_ms.is_some()),
        // The time belongs to a cell.
        Value::Cells(_) | Value::Gone => (0, false),
    };
    Record::bytes_of(entry.key.len(), value_bytes, expires)
}

impl Shard {
    /// What all shards share.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The number of its log.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The version of the last record that a command on this shard wrote; 0 before the first one. It is the version of the key
    /// if that was one record of one key.
    pub fn last_version(&self) -> u64 {
        self.last_version
    }

    /// The shard's log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Gives the next command values that were read for it.
    pub fn set_values(&mut self, values: Option<Arc<Values>>) {
        self.values = values;
    }

    /// What was read for the command at hand.
    pub fn values(&self) -> Option<Arc<Values>> {
        self.values.clone()
    }

    /// Whether the command at hand was not carried out, and must be tried again.
    pub fn is_undone(&self) -> bool {
        self.is_short || !self.missing.is_empty()
    }

    /// The end of a command: why it was not carried out, if it must be tried again. Whatever it returned is not to be told then.
    pub fn undone(&mut self) -> Option<Undone> {
        let is_short = mem::take(&mut self.is_short);
        if !self.missing.is_empty() {
            return Some(Undone::Away(mem::take(&mut self.missing).into_values().collect()));
        }
        is_short.then_some(Undone::Short)
    }

    /// Looks at keys, all at one moment. What the reply needs is returned with what `look` made of it; whether that may be told
    /// says [`undone`](Self::undone).
    pub fn read<R>(&mut self, keys: &[&[u8]], now_ms: u64, look: impl FnOnce(&mut View<'_, '_>) -> R) -> (R, Needs) {
        let Self { store, values, missing, .. } = self;
        let store: &Store = store;
        store.index.with_own(keys, |locked| {
            let mut view = View::new(store, values.clone(), locked, now_ms);
            let result = look(&mut view);
            let (needs, mut asked_for) = view.done();
            missing.append(&mut asked_for);
            (result, needs)
        })
    }

    /// Sees keys as they are at one moment, each for [`View::has_changed`]. The reply needs what is returned with them.
    ///
    /// Expired keys are removed first, because a later removal would count as a change. A log without room keeps them.
    pub fn watch(&mut self, keys: &[&[u8]], clock: Clock) -> (Vec<Seen>, Needs) {
        for key in keys {
            // Each for itself: one that stays, for want of room, keeps no other.
            let removed = self.update(&[*key], clock, |update| update.remove_ended(key));
            if matches!(removed, Err(UpdateError::Undone)) {
                // No command waits for it.
                self.undone();
            }
        }
        self.read(keys, clock.now_ms, |view| keys.iter().map(|key| view.see(key)).collect())
    }

    /// Carries out a command on these keys, whole or not at all. The reply needs what is returned with its result.
    ///
    /// # Errors
    ///
    /// [`UpdateError`]: nothing was changed.
    pub fn update<'k, R>(
        &mut self,
        keys: &[&'k [u8]],
        clock: Clock,
        command: impl FnOnce(&mut Update<'_, 'k>) -> R,
    ) -> Result<(R, Needs), UpdateError> {
        let values = self.values();
        let (store, mut appender) = self.appender();
        store.update(values, keys, clock, |mut update| {
            let result = command(&mut update);
            Ok((result, appender.commit(update, clock)?))
        })
    }

    /// Makes what an update changes so, whole or not at all. The reply needs what is returned.
    ///
    /// # Errors
    ///
    /// [`UpdateError`]: nothing was changed.
    pub fn commit(&mut self, update: Update<'_, '_>, clock: Clock) -> Result<Needs, UpdateError> {
        let (_, mut appender) = self.appender();
        appender.commit(update, clock)
    }

    /// What all shards share, and what makes changes so.
    fn appender(&mut self) -> (&Store, Appender<'_>) {
        let Self { store, number, log, flushed, last_version, missing, is_short, wanted, gives_up, .. } = self;
        let (store, number, gives_up) = (&**store, *number, *gives_up);
        let appender = Appender { store, number, log, flushed, last_version, missing, is_short, wanted, gives_up };
        (store, appender)
    }

    /// Takes every key out by one record, which is durable or not, and others see all keys or none. The reply needs what is
    /// returned. Their memory is given back in steps, by those of [`sweep`](Self::sweep).
    ///
    /// The record may take the last place: there is nothing left behind it that the cleaner would have to write anew.
    ///
    /// # Errors
    ///
    /// [`UpdateError`]: nothing was changed.
    pub fn flush(&mut self, clock: Clock) -> Result<Needs, UpdateError> {
        // With the time of receipt.
        let bytes = Record::bytes_of(0, 0, true);
        if !self.log.takes(Purpose::Cleaning, bytes) && self.log.gives_back() && !self.gives_up {
            self.is_short = true;
            self.wanted = Some((Purpose::Removing, bytes));
            return Err(UpdateError::Undone);
        }
        let Self { store, number, log, flushed, .. } = self;
        let (store, number) = (&**store, *number);
        // While nobody has a key locked, all that has a smaller version was appended, and nothing that has a larger one.
        let append = || {
            let version = store.next_version.fetch_add(1, Ordering::Relaxed);
            let received_ns = clock.received_ns;
            let (kind, expires_ms) = (RecordKind::Flush, None);
            let record = Record { kind, version, expires_ms, received_ns, key: &[], subkey: &[], value: &[] };
            let mut lsn = Lsn::default();
            log.append_for(Purpose::Cleaning, &[record], [], |_, at| lsn = at)?;
            log.forget_all_but(Some((lsn, record.encoded_bytes())));
            *flushed = version;
            // The other logs forget all when they see it; these are records that they have forgotten then.
            store.outdated.iter().for_each(|outdated| lock(outdated).clear());
            store.keys.store(0, Ordering::Relaxed);
            let end = Lsn(lsn.0 + 1);
            store.appended[usize::from(number)].store(end.0, Ordering::Release);
            let mut flush = lock(&store.flush);
            *flush = Flush { origin: (number, lsn), end };
            store.flushed.version.store(version, Ordering::Release);
            store.flushed.waits.store(true, Ordering::Release);
            Ok::<_, AppendError>(end)
        };
        let clear = || {
            let cleared = store.cells.clear_if(append)?;
            // The empty leaf of the cells stays; that of the keys is yet to come.
            store.memory.all_goes(bytes_of_leaf(&[]));
            Ok::<_, AppendError>(cleared)
        };
        let ((end, cells), keys) = store.index.clear_if(clear)?;
        lock(&store.cleared).extend([keys, cells]);
        store.is_sweeping.store(true, Ordering::Relaxed);
        let mut needs = Needs::default();
        needs.add(number, end);
        Ok(needs)
    }

    /// Takes out keys that have ended, at most as many as `budget` says, and tells `removed` of each. Each removal is a
    /// record like that of a command, so no start brings the key back, whatever its clock says. True if there may be more.
    ///
    /// # Errors
    ///
    /// [`UpdateError`]: the log takes no more; the keys are found again later.
    pub fn sweep(
        &mut self,
        clock: Clock,
        budget: SweepBudget,
        mut removed: impl FnMut(&[u8], Needs),
    ) -> Result<bool, UpdateError> {
        let SweepBudget { leaves_max, keys_max, work_max } = budget;
        let store = Arc::clone(&self.store);
        let has_memory = store.free_some(leaves_max);
        let ended = {
            let mut round = lock(&store.sweep);
            let is_there = |entry: &Entry<'_>| store.is_there(entry);
            let ended = store.index.find_ended(&mut round, clock.now_ms, (leaves_max, keys_max), is_there);
            let goes_on = round.is_under_way() || !lock(&store.cleared).is_empty();
            store.is_sweeping.store(goes_on, Ordering::Relaxed);
            ended
        };
        let begun = work::done();
        for key in &ended {
            if work::done() - begun >= work_max {
                // The next sweep finds the others, and not only the next round.
                lock(&store.sweep).go_back(key);
                store.is_sweeping.store(true, Ordering::Relaxed);
                return Ok(true);
            }
            let done = self.update(&[&key[..]], clock, |update| update.remove_ended(key));
            if matches!(done, Err(UpdateError::Undone)) {
                // No command waits for it. The cleaner knows what is wanted.
                self.undone();
                return Err(AppendError::Full.into());
            }
            let (is_removed, needs) = done?;
            if is_removed {
                removed(key, needs);
            }
        }
        Ok(has_memory || ended.len() == keys_max)
    }

    /// When a [sweep](Self::sweep) of any shard finds something to do, in milliseconds since 1970: 0 at once, `None` if no key
    /// ends. Until then it costs next to nothing.
    pub fn next_sweep_ms(&self) -> Option<u64> {
        if self.store.is_sweeping.load(Ordering::Relaxed) { Some(0) } else { self.store.index.soonest_ms() }
    }

    /// The next write of the shard's log: [`Log::next_write`].
    pub fn next_write(&mut self, in_flight_max: usize, time_ns: u64) -> Option<Write> {
        let Self { store, number, log, flushed, outdated, .. } = self;
        log.promise(store.promised(*number));
        see_flush(store, log, flushed);
        // Others go on with the memory of the last time.
        mem::swap(outdated, &mut *lock(&store.outdated[usize::from(*number)]));
        outdated.drain(..).for_each(|(lsn, bytes)| log.forget(lsn, bytes));
        outdated.shrink_to(OUTDATED_KEPT);
        log.next_write(in_flight_max, time_ns)
    }

    /// Takes the buffer of a write whose bytes were copied elsewhere: [`Log::reuse`].
    pub fn reuse(&mut self, buffer: Vec<u8>) {
        self.log.reuse(buffer);
    }

    /// True if the log is idle and no commit marker follows its last record: [`Log::must_say`].
    pub fn must_say(&self) -> bool {
        self.log.must_say()
    }

    /// Writes that commit marker, if the record is committed: [`Log::say`].
    pub fn say(&mut self, time_ns: u64) -> bool {
        self.log.promise(self.store.promised(self.number));
        self.log.say(time_ns)
    }

    /// Completes a write of the shard's log: [`Log::written`]. Returns the logs whose commit LSN advanced, with that LSN.
    pub fn written(&mut self, id: WriteId, ok: bool, buffer: Vec<u8>) -> Vec<(u16, Lsn)> {
        let mut durable = Vec::new();
        let mut erased = Vec::new();
        self.log.written(id, ok, buffer, |news| match news {
            News::Durable { end, links } => durable.push((end, links)),
            News::Erased { number } => erased.push(number),
        });
        for number in erased {
            for older in self.going.remove(&number).map(|going| going.older).unwrap_or_default() {
                self.store.forget_older(&older);
            }
        }
        // Before replies may tell of what is in them.
        let begun = self.log.segments().range(self.next_segment..);
        self.next_segment = begun.clone().next_back().map_or(self.next_segment, |(number, _)| number + 1);
        if begun.clone().next().is_some() {
            self.store.readable.add(self.number, begun);
        }
        if !durable.is_empty() {
            let mut promises = lock(&self.store.promises);
            durable.into_iter().for_each(|(end, links)| promises.durable(self.number, end, links));
            promises.advance(|log, lsn| {
                self.store.promised[usize::from(log)].fetch_max(lsn.0, Ordering::Release);
                self.moved.push((log, lsn));
            });
        }
        self.log.promise(self.store.promised(self.number));
        mem::take(&mut self.moved)
    }
}

/// What one [sweep](Shard::sweep) does at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepBudget {
    /// Leaves of the index, each of some hundred keys, in which it looks.
    pub leaves_max: usize,
    /// Keys that it takes out.
    pub keys_max: usize,
    /// [Work](crate::work) after which it takes no further one out: the elements of a key are work, too.
    pub work_max: u64,
}
