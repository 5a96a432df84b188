//! The store: commands on keys, over the index that all shards share and the log that each of them has.
//!
//! ```text
//!   shard 0: update ─► index (leaves of its keys locked) ─► log 0 ─┐
//!   shard 1: update ─► index                             ─► log 1 ─┼► written ─► Promises ─► how far replies may go
//!   shard 1: read   ─► index: saw what log 0 wrote: the reply waits for log 0
//! ```
//!
//! Any shard executes any command. What it changes is one append to its own log, so it is durable whole or not at all; the
//! leaves of its keys are locked until the index has it, so others see it whole.

mod open;

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use smallvec::SmallVec;

use crate::away::{Away, Missing, Readable, Values, Wanted};
use crate::backup::Backups;
use crate::cells::{self, Head, Shape, cell_bytes, cell_key_of, is_base};
use crate::format::{BatchHeader, HEADER_BYTES, KEY_BYTES_MAX, Kind, Link, Lsn, Record};
use crate::index::leaf::{Entry, LetGo, OLDER_MAX, Origin, Value};
use crate::index::{Cleared, Index, Locked, Position, Round, bytes_of_leaf};
use crate::log::{AppendError, Log, News, Purpose, Segment, Write, WriteId};
use crate::memory::{Memory, NoRoom, Sizes};
use crate::promises::Promises;
use crate::recover::batch_in;
use crate::update::{Changes, Records, Update, View};
use crate::work;

pub use self::open::Opening;

/// What all shards share.
#[derive(Debug)]
pub struct Store {
    index: Index,
    /// What belongs to keys that are no strings.
    cells: Index,
    /// Keys that are not gone.
    keys: AtomicUsize,
    next_version: AtomicU64,
    /// The largest version of a tombstone that was taken out of the index.
    forgotten_version: AtomicU64,
    promises: Mutex<Promises>,
    /// Of each log, how far replies may tell of it.
    promised: Box<[AtomicU64]>,
    /// Of each log, where what commands appended ends.
    appended: Box<[CachePadded<AtomicU64>]>,
    pub(crate) backups: Mutex<Backups>,
    /// Of each log, the records that other shards made out of date.
    outdated: Box<[Mutex<Vec<Outdated>>]>,
    /// Of each log, whether it may have something that is out of date. Its shard looks when somebody needs that.
    has_dead: Box<[AtomicBool]>,
    /// Logs in which a removal lacks room.
    wanting: AtomicUsize,
    /// How far ended keys were looked for.
    sweep: Mutex<Round>,
    /// Whether that goes on, or memory is left to be given back.
    is_sweeping: CachePadded<AtomicBool>,
    /// Starts before this one: cursors of another start are told by it.
    epoch: u32,
    /// The last flush. What others look at of it is beside it.
    flush: Mutex<Flush>,
    flushed: CachePadded<Flushed>,
    /// What flushes took out, as far as its memory was not given back.
    cleared: Mutex<Vec<Cleared>>,
    memory: Arc<Memory>,
    /// The key from which on values are let go of next.
    hand: Mutex<Vec<u8>>,
    readable: Arc<Readable>,
}

/// What every command looks at of the last flush. It has cache lines of its own, because it hardly ever changes.
#[derive(Debug, Default)]
struct Flushed {
    /// Its version: changed only while nobody has a key locked.
    version: AtomicU64,
    /// Whether it may be that it is not promised.
    waits: AtomicBool,
}

/// What took every key out.
#[derive(Debug, Default)]
struct Flush {
    /// The log of its record, and where that lies by now.
    origin: (u16, Lsn),
    /// The end of the record when it was written.
    end: Lsn,
}

/// Where a record lies that is out of date, and its bytes.
type Outdated = (Lsn, usize);
/// Of how many of them memory is kept for the next ones.
const OUTDATED_KEPT: usize = 4096;

/// One shard's part of the store.
#[derive(Debug)]
pub struct Shard {
    store: Arc<Store>,
    number: u16,
    log: Log,
    /// Segments that were cleaned, and are not yet erased.
    going: BTreeMap<u64, Going>,
    /// Promises that moved since they were last asked for.
    moved: Vec<(u16, Lsn)>,
    /// Empty between two looks at what other shards made out of date: its memory is kept.
    outdated: Vec<Outdated>,
    /// The version of the last flush of which the log knows.
    flushed: u64,
    last_version: u64,
    /// The number above those of all segments that others know of.
    next_segment: u64,
    /// What was read for the command at hand, which asked for it before.
    values: Option<Arc<Values>>,
    /// What the command at hand asked for in vain.
    missing: BTreeMap<u64, Wanted>,
    /// The command at hand would take memory, or room in the log, of which there is none yet.
    is_short: bool,
    /// The most urgent purpose for which the log had no room, and the bytes of the records, until it has.
    wanted: Option<(Purpose, usize)>,
    /// What waits for room is refused.
    gives_up: bool,
    /// That a removal lacks room is among what the store counts.
    told_of_want: bool,
    /// Places that were free when no segment was [due to be cleaned](Self::due_to_clean).
    not_due_at: Option<usize>,
}

/// Why a command was not carried out, and changed nothing. It is to be tried again.
#[derive(Debug)]
pub enum Undone {
    /// It needs values that are on a medium alone: with them it can be carried out.
    Away(Vec<Wanted>),
    /// It takes memory, and values must be let go of before, or logs be cleaned: when there is [room](Store::admits). Or the log must be
    /// cleaned before: when nothing as urgent [waits for room](Shard::waits_for_room).
    Short,
}

/// What goes with a segment.
#[derive(Debug)]
struct Going {
    older: Vec<Older>,
    /// What outdates them: while a crash may take that, they are what the keys have.
    outdated_by: Needs,
}

/// A record that is out of date.
#[derive(Debug)]
struct Older {
    key: Box<[u8]>,
    version: u64,
    /// The cell, if it is the record of one.
    cell: Option<Vec<u8>>,
}

/// What must be promised before a reply may leave: of each log, everything before a place in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs(SmallVec<[(u16, Lsn); 2]>);

impl Needs {
    pub(crate) fn add(&mut self, log: u16, lsn: Lsn) {
        match self.0.iter_mut().find(|(known, _)| *known == log) {
            Some((_, known)) => *known = (*known).max(lsn),
            None => self.0.push((log, lsn)),
        }
    }

    /// The logs and the places in them; none if the reply may leave at once.
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

/// What a key has.
#[derive(Clone, Copy, Debug)]
pub struct Got<'a> {
    /// What it is.
    pub shape: Shape,
    /// The value of a string.
    pub(crate) held: Held<'a>,
    /// Cells of what is no string; of a string 1.
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
pub(crate) enum Held<'a> {
    Here(&'a [u8]),
    Away(Away, Option<&'a Missing<'a>>),
}

impl<'a> Got<'a> {
    /// The value of a string. One that is on a medium alone is empty here: the command that asked for it [changes
    /// nothing](Undone), whatever it makes of that, and is tried again when the value was read.
    pub fn value(&self) -> &'a [u8] {
        match self.held {
            Held::Here(value) => value,
            Held::Away(away, missing) => {
                missing.iter().for_each(|missing| missing.note(away));
                &[]
            }
        }
    }

    /// Bytes of the value of a string, wherever it is.
    pub fn value_bytes(&self) -> usize {
        match self.held {
            Held::Here(value) => value.len(),
            Held::Away(away, _) => away.value_bytes as usize,
        }
    }
}

/// What a reader of a key can have of values that are on a medium alone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sources<'a> {
    pub(crate) values: Option<&'a Values>,
    pub(crate) missing: Option<&'a Missing<'a>>,
}

/// Why a segment cannot be cleaned now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CleanError {
    /// The log takes no record.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A batch that was written is no longer readable.
    #[error("segment {segment} of log {log} is damaged {at} bytes behind its start; it is not cleaned")]
    Damaged {
        /// The log.
        log: u16,
        /// The number of the segment.
        segment: u64,
        /// Bytes of the segment in front of the damage.
        at: usize,
    },
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
    /// What must stay in memory is more than may be.
    #[error("keys, and what stays in memory with them, have more than the {bytes_max} bytes that they may have")]
    Memory {
        /// Bytes that the store may have in memory.
        bytes_max: usize,
    },
    /// It is to be tried again: [`Shard::undone`] says when.
    #[error("values that are not in memory, or memory, must be waited for")]
    Undone,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is changed by single calls that do not panic in between.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Keys that it has. Those that have ended count until they are [taken out](Shard::sweep).
    pub fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The index of what belongs to keys that are no strings.
    pub fn cells(&self) -> &Index {
        &self.cells
    }

    /// What keys and values take of memory, and how much they may.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The same by a look at all that there is, as a check of what is counted.
    pub fn measure(&self) -> Sizes {
        let used = lock(&self.cleared).iter().map(Cleared::used).sum();
        self.index.measure() + self.cells.measure() + Sizes { used, values: used, ..Sizes::default() }
    }

    /// Whether a command for this purpose can be carried out, or is refused, without waiting for memory.
    pub fn admits(&self, purpose: Purpose) -> bool {
        self.memory.admit(purpose) != Err(NoRoom::Yet)
    }

    /// Lets go of values that are on a medium, too, until enough memory is free again, or as much was done as `budget` says.
    pub fn let_go(&self, budget: LetGo) {
        let sizes = self.memory.sizes();
        let Some(over) = sizes.used.checked_sub(self.memory.low_bytes()).filter(|over| *over > 0) else { return };
        // If another shard does it, that is enough.
        let Some(mut hand) = self.hand.try_lock().ok().filter(|_| sizes.values > 0) else { return };
        let budget = LetGo { bytes: budget.bytes.min(over), ..budget };
        self.index.let_go(&mut hand, budget, |origin| origin.lsn < self.promised(origin.log));
    }

    /// Takes a value that was read for a command, if the key still has this version and there is room for it.
    pub fn take_in(&self, key: &[u8], version: u64, value: &Arc<[u8]>) -> bool {
        let has_room = self.memory.used().saturating_add(value.len()) <= self.memory.bytes_max();
        has_room && self.index.take_in(key, version, value)
    }

    /// Where the value is that [`scan`](Self::scan) shows, if it is on a medium alone.
    pub fn locate(&self, got: &Got<'_>) -> Option<Wanted> {
        match got.held {
            Held::Here(_) => None,
            Held::Away(away, _) => Some(self.readable.want(away, self.promised(away.origin.log))),
        }
    }

    pub(crate) fn missing(&self) -> Missing<'_> {
        Missing::new(&self.readable, &self.promised)
    }

    /// The version of the last flush, 0 without one: no record of a smaller version counts.
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

    pub(crate) fn forgotten_version(&self) -> u64 {
        self.forgotten_version.load(Ordering::Relaxed)
    }

    /// How far replies may tell of a log.
    pub fn promised(&self, log: u16) -> Lsn {
        Lsn(self.promised[usize::from(log)].load(Ordering::Acquire))
    }

    /// How far replies may tell of each log, at one moment.
    pub(crate) fn promised_ends(&self) -> Vec<Lsn> {
        let promises = lock(&self.promises);
        (0..self.promised.len()).map(|log| promises.promised(log as u16)).collect()
    }

    /// What must be promised so that all is that commands appended to any log by now.
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
        Value::Here(value) => string(Held::Here(value)),
        Value::OnMedium(value_bytes) => match sources.values.and_then(|values| values.get(version)) {
            Some(value) => string(Held::Here(value)),
            None => {
                let away = Away { origin: entry.origin, value_bytes, record_bytes: record_bytes(entry) };
                string(Held::Away(away, sources.missing))
            }
        },
        Value::Cells(head) => {
            let Head { shape, count, first, version, .. } = Head::decode(head);
            (count > 0).then_some(Got { shape, held: Held::Here(&[]), count, first, version, expires_ms })
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
            let (kind, expires_ms) = (Kind::Flush, None);
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

    /// Whether the log is idle, and its medium does not say yet that replies may tell of its last record: [`Log::must_say`].
    pub fn must_say(&self) -> bool {
        self.log.must_say()
    }

    /// Has the log say so, if it is promised: [`Log::say`].
    pub fn say(&mut self, time_ns: u64) -> bool {
        self.log.promise(self.store.promised(self.number));
        self.log.say(time_ns)
    }

    /// A write of the shard's log is done: [`Log::written`]. Returns the logs of which replies may tell more from now on,
    /// and how far.
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

    /// Writes what counts of a segment anew, at most so many bytes of it in this step. `segment` is the front of the segment
    /// as it is on the medium, as far as it was read. True when it is done: then the segment will be erased.
    ///
    /// # Errors
    ///
    /// The log is full, or failed: the step may be tried again. The segment is damaged: it stays as it is, because what lies
    /// behind the damage counts and cannot be written anew.
    pub fn clean(&mut self, cleaning: &mut Cleaning, segment: &[u8], budget_bytes: usize) -> Result<bool, CleanError> {
        let Self { store, number, log, going, flushed, .. } = self;
        let store = &**store;
        let geometry = *log.geometry();
        let end = cleaning.at.saturating_add(budget_bytes);
        let is_whole = segment.len() as u64 >= geometry.segment_bytes;
        loop {
            let first = geometry.first_batch(cleaning.number);
            let lsn = Lsn((cleaning.number * geometry.segment_bytes + cleaning.at as u64).max(first.0));
            let at = (lsn.0 % geometry.segment_bytes) as usize;
            let header = BatchHeader::decode(segment.get(at..).unwrap_or_default());
            let read_to = header.map_or(at + HEADER_BYTES, |header| at + header.total_bytes(geometry.block_bytes));
            if at >= end || read_to > segment.len() && !is_whole {
                return Ok(false);
            }
            // The last batch of a segment says that it is: without it the segment was not read to its end.
            let Some(batch) = batch_in(geometry, *number, lsn, segment) else {
                return Err(CleanError::Damaged { log: *number, segment: cleaning.number, at });
            };
            for (lsn, record) in batch.records().flatten().skip(cleaning.handled) {
                store.index.with(&[record.key], |locked| {
                    see_flush(store, log, flushed);
                    if record.version < *flushed {
                        // A crash may still take what outdates it.
                        store.note_flush(&mut cleaning.outdated_by);
                        return Ok(());
                    }
                    let again =
                        |moved_to: &mut Lsn| log.append_for(Purpose::Cleaning, &[record], [], |_, lsn| *moved_to = lsn);
                    if record.kind == Kind::Flush {
                        return store.move_flush((*number, lsn), again);
                    }
                    match store.move_record(locked, &record, (*number, lsn), again)? {
                        Fate::Uncounted => {}
                        Fate::Outdated(older) => {
                            locked
                                .get(record.key)
                                .iter()
                                .for_each(|entry| store.note(&mut cleaning.outdated_by, entry));
                            cleaning.older.push(older);
                        }
                        Fate::Copied(older) => cleaning.older.push(older),
                    }
                    Ok::<_, AppendError>(())
                })?;
                cleaning.handled += 1;
            }
            (cleaning.at, cleaning.handled) = (read_to, 0);
            if batch.header.ends_segment {
                break;
            }
        }
        let (older, outdated_by) = (mem::take(&mut cleaning.older), mem::take(&mut cleaning.outdated_by));
        going.insert(cleaning.number, Going { older, outdated_by });
        log.cleaned(cleaning.number);
        Ok(true)
    }

    /// The segment to be cleaned next: [`Log::next_to_clean`], of those that no backup needs, because they cannot be erased.
    pub fn next_to_clean(&self) -> Option<(u64, Segment)> {
        self.unless_needed(|log, may| log.next_to_clean_of(may))
    }

    /// What is chosen of the segments that no backup needs.
    fn unless_needed(
        &self,
        choose: impl FnOnce(&Log, &dyn Fn(u64) -> bool) -> Option<(u64, Segment)>,
    ) -> Option<(u64, Segment)> {
        let backups = lock(&self.store.backups);
        let (log, geometry) = (self.number, self.log.geometry());
        let is_needed = |segment| backups.holding.as_ref().is_some_and(|holding| holding.needs(geometry, log, segment));
        choose(&self.log, &|segment| !is_needed(segment))
    }

    /// The most urgent purpose for which a command found no room in the log, where there is none yet, but may be when this log was cleaned,
    /// or, for a removal, another one.
    pub fn waits_for_room(&self) -> Option<Purpose> {
        self.lacking().filter(|purpose| !self.gives_up && brings_room(&self.store, self.number, &self.log, *purpose))
    }

    /// What the log lacks room for.
    fn lacking(&self) -> Option<Purpose> {
        self.wanted.filter(|(purpose, bytes)| !self.log.takes(*purpose, *bytes)).map(|(purpose, _)| purpose)
    }

    /// Whether other shards are to clean their logs now: tombstones in this one, or in memory, outweigh records there.
    pub fn needs_others(&self) -> bool {
        self.waits_for_room().is_some() || self.store.memory.waits_for_tombstones()
    }

    /// Whether commands that wait for room or memory are refused instead, because cleaning has brought none for long. As far as memory is
    /// concerned, this is for all shards.
    pub fn set_giving_up(&mut self, gives_up: bool) {
        self.gives_up = gives_up;
        if gives_up && self.wanted.take().is_some() {
            self.tell_others();
        }
        self.store.memory.set_giving_up(gives_up);
    }

    /// Tells others whether a removal lacks room, and whether there is something to be cleaned for theirs.
    fn tell_others(&mut self) {
        let lacks_room = self.lacking() == Some(Purpose::Removing);
        if mem::replace(&mut self.told_of_want, lacks_room) != lacks_room {
            // Wraps as a difference of counts does.
            self.store.wanting.fetch_add(if lacks_room { 1 } else { usize::MAX }, Ordering::Relaxed);
        }
        let log = &self.log;
        let has_dead = log.gives_back() || log.last_has_dead() || log.next_with_dead(|_| true).is_some();
        self.store.has_dead[usize::from(self.number)].store(has_dead, Ordering::Relaxed);
    }

    /// The segment to be cleaned next so that tombstones can go: the older records that they outweigh, here or in other logs, and
    /// then their own.
    fn due_for_tombstones(&mut self) -> Option<(u64, Segment)> {
        let store = &self.store;
        if store.wanting.load(Ordering::Relaxed) == 0 && !store.memory.is_short_of_tombstones() {
            return None;
        }
        self.tell_others();
        if self.log.is_short_for(Purpose::Removing) {
            return self.unless_needed(|log, may| log.next_to_squeeze(Purpose::Removing, may));
        }
        let due = self.unless_needed(|log, may| log.next_with_dead(may));
        if due.is_none() && self.log.last_has_dead() && !self.log.gives_back() {
            // Where there is no place for the next one, the log is full of other segments.
            let _ = self.log.end_last(Purpose::Writing);
        }
        due
    }

    /// The same, if it is time to: what gives little room is cleaned late.
    pub fn due_to_clean(&mut self) -> Option<(u64, Segment)> {
        let lacking = self.lacking();
        if self.wanted.is_some() {
            self.wanted = self.wanted.filter(|_| lacking.is_some());
            self.tell_others();
        }
        // New values come last: there may be no end of them.
        if lacking.is_none_or(|purpose| purpose == Purpose::Writing)
            && let Some(due) = self.due_for_tombstones()
        {
            return Some(due);
        }
        if let Some(purpose) = lacking {
            let squeezed = || self.unless_needed(|log, may| log.next_to_squeeze(purpose, may));
            let due = self.next_to_clean().or_else(squeezed);
            if due.is_none() && !self.log.gives_back() && self.log.last_gives_room(purpose) {
                // What counts of it goes into the next one, whose place comes back with its own.
                let _ = self.log.end_last(Purpose::Cleaning);
            }
            return due;
        }
        let (free, cheap_max, dear_max) = (self.log.free_places(), self.log.free_max(true), self.log.free_max(false));
        // It is asked in each turn: there is a look at every segment when one more is in use, and where room is short.
        if free > cheap_max || free > dear_max && self.not_due_at == Some(free) {
            return None;
        }
        let due = self.next_to_clean().filter(|(_, segment)| free <= dear_max || self.log.is_cheap(segment));
        self.not_due_at = due.is_none().then_some(free);
        due
    }

    /// Begins to erase segments that were cleaned, but for those that a [backup](crate::backup) needs:
    /// [`Log::erase_cleaned`]. If room for writes is short, and what the backup needs could bring some, the backup is given up.
    pub fn erase_cleaned(&mut self) {
        let lacking = self.lacking();
        let Self { store, number, log, going, .. } = self;
        let lacks_memory = store.memory.is_short_of_tombstones() || store.wanting.load(Ordering::Relaxed) > 0;
        let is_short = log.is_short_for(Purpose::Writing) || lacks_memory;
        if going.is_empty() && !is_short {
            return;
        }
        // Held until all is decided: a backup that begins after this has at least the promises that this goes by.
        let mut backups = lock(&store.backups);
        let geometry = *log.geometry();
        if is_short && let Some(holding) = &backups.holding {
            let needs = |segment| holding.needs(&geometry, *number, segment);
            let brings_some = log.cleaned_segments().any(needs)
                || log.next_to_clean_of(needs).is_some()
                || lacking.is_some_and(|purpose| log.next_to_squeeze(purpose, needs).is_some())
                || lacks_memory && log.next_with_dead(needs).is_some();
            if brings_some {
                backups.holding = None;
            }
        }
        let is_needed =
            |segment| backups.holding.as_ref().is_some_and(|holding| holding.needs(&geometry, *number, segment));
        let is_promised = |needs: &Needs| needs.iter().all(|(log, lsn)| lsn <= store.promised(log));
        let may_go = |segment: u64| going.get(&segment).is_none_or(|going| is_promised(&going.outdated_by));
        // No entry names one that may go any more: nobody begins to read it, and who reads it is waited for.
        log.erase_cleaned(|segment| may_go(segment) && !is_needed(segment) && store.readable.remove(*number, segment));
    }
}

/// What makes the changes of a command so: the shard, but for what all shards share.
struct Appender<'s> {
    store: &'s Store,
    number: u16,
    log: &'s mut Log,
    flushed: &'s mut u64,
    last_version: &'s mut u64,
    missing: &'s mut BTreeMap<u64, Wanted>,
    is_short: &'s mut bool,
    wanted: &'s mut Option<(Purpose, usize)>,
    gives_up: bool,
}

/// Whether cleaning may bring room into a log: cleaning it, or, for a removal, another one, after which its tombstones outweigh nothing.
fn brings_room(store: &Store, number: u16, log: &Log, purpose: Purpose) -> bool {
    let others = (0..).zip(store.has_dead.iter()).filter(|(other, _): &(u16, _)| *other != number);
    let mut others = others.filter(|_| purpose == Purpose::Removing);
    log.can_be_squeezed(purpose) || others.any(|(_, has_dead)| has_dead.load(Ordering::Relaxed))
}

impl Appender<'_> {
    /// [`Shard::commit`].
    fn commit(&mut self, update: Update<'_, '_>, clock: Clock) -> Result<Needs, UpdateError> {
        let purpose = update.purpose();
        let (mut locked, needs, changes, mut asked_for) = update.done();
        self.missing.append(&mut asked_for);
        if !self.missing.is_empty() {
            // What it made of values that it did not see.
            return Err(UpdateError::Undone);
        }
        self.append(&mut locked, needs, &changes, purpose, clock)
    }

    fn append(
        &mut self,
        locked: &mut Locked<'_>,
        mut needs: Needs,
        changes: &Changes<'_>,
        purpose: Purpose,
        clock: Clock,
    ) -> Result<Needs, UpdateError> {
        let Self { store, number, log, flushed, last_version, is_short, wanted, gives_up, .. } = self;
        if changes.is_empty() {
            return Ok(needs);
        }
        see_flush(store, log, flushed);
        let mut records = Records::new();
        changes.iter().for_each(|(key, change)| change.records(key, clock.received_ns, &mut records));
        let units = |record: &Record<'_>| 1 + work::of_bytes(record.value.len());
        work::add(records.iter().map(units).sum());
        let first_version = store.next_version.fetch_add(records.len() as u64, Ordering::Relaxed);
        records.iter_mut().zip(first_version..).for_each(|(record, version)| record.version = version);
        let is_long = |record: &&Record<'_>| {
            let extra = if is_base(record.kind) { 0 } else { cells::EXTRA_BYTES + cells::ORDER_BYTES };
            record.key.len() + record.subkey.len() + extra > KEY_BYTES_MAX
        };
        if let Some(long) = records.iter().find(is_long) {
            let (key_bytes, value_bytes) = (long.key.len() + long.subkey.len(), long.value.len());
            return Err(UpdateError::TooLong { key_bytes, value_bytes });
        }
        let links = needs.iter().filter(|(log, _)| log != number).map(|(log, lsn)| Link { log, lsn });
        let mut last = Lsn::default();
        let mut places: SmallVec<[Lsn; 1]> = SmallVec::new();
        let removes = records.iter().all(|record| matches!(record.kind, Kind::Drop | Kind::Remove));
        let purpose = if removes { Purpose::Removing } else { purpose.max(Purpose::Keeping) };
        match store.memory.admit(purpose) {
            Err(NoRoom::Yet) => {
                **is_short = true;
                return Err(UpdateError::Undone);
            }
            Err(NoRoom::Full) => {
                return Err(UpdateError::Memory { bytes_max: store.memory.bytes_max() });
            }
            Ok(()) => {}
        }
        let appended = log.append_for(purpose, &records, links, |_, lsn| {
            places.push(lsn);
            last = lsn;
        });
        let is_full = appended == Err(AppendError::Full);
        if is_full && !*gives_up && brings_room(store, *number, log, purpose) {
            if wanted.is_none_or(|(held, _)| purpose <= held) {
                **wanted = Some((purpose, records.iter().map(Record::encoded_bytes).sum()));
            }
            **is_short = true;
            return Err(UpdateError::Undone);
        }
        appended?;
        let mut places = places.into_iter();
        // Cells of one key together.
        for run in records.chunk_by(|one, next| !is_base(one.kind) && !is_base(next.kind) && one.key == next.key) {
            let placed = run.iter().zip(&mut places);
            let mut placed =
                placed.map(|(record, lsn)| (record, Origin { log: *number, lsn, version: record.version }));
            if !is_base(run[0].kind) {
                store.apply_cells(locked, run[0].key, placed);
                store.settle_cells(run);
            } else if let Some((record, origin)) = placed.next() {
                match store.apply_base(locked, record, origin) {
                    // This log is at hand.
                    Some((origin, bytes)) if origin.log == *number && origin.lsn != Lsn::default() => {
                        log.forget(origin.lsn, bytes);
                    }
                    Some((origin, bytes)) => store.outdate_at(origin, bytes),
                    None => {}
                }
                store.settle_base(locked, record);
            }
        }
        **last_version = first_version + records.len() as u64 - 1;
        let end = Lsn(last.0 + 1);
        store.appended[usize::from(*number)].store(end.0, Ordering::Release);
        needs.add(*number, end);
        Ok(needs)
    }
}

/// Another shard may have taken every key out since this one looked last: then nothing counts that its log had. What the log
/// gets after that is appended behind such a look.
fn see_flush(store: &Store, log: &mut Log, flushed: &mut u64) {
    let version = store.flushed();
    if *flushed != version {
        *flushed = version;
        log.forget_all_but(None);
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

/// What cleaning made of a record.
enum Fate {
    /// No entry counts it.
    Uncounted,
    /// It is out of date, and goes with its segment.
    Outdated(Older),
    /// It was written anew. Where it was it is older than its copy: segments are not erased in the order in which they were cleaned,
    /// so the one that has the copy, and one with a tombstone behind it, may go before.
    Copied(Older),
}

/// A segment that is being cleaned.
#[derive(Debug)]
pub struct Cleaning {
    /// The segment.
    pub number: u64,
    /// How far it is cleaned, in bytes: up to a batch.
    at: usize,
    /// Records of that batch that are done.
    handled: usize,
    /// What it has that is out of date.
    older: Vec<Older>,
    /// What outdates that, as far as it is not promised.
    outdated_by: Needs,
}

impl Cleaning {
    /// Begins with a segment, which is not the last one of its log.
    pub fn new(number: u64) -> Self {
        Self { number, at: 0, handled: 0, older: Vec::new(), outdated_by: Needs::default() }
    }
}

impl Store {
    /// Writes a record anew, if it is the one that counts. From then on the entry counts it as an older one, until its segment is
    /// erased.
    fn move_record(
        &self,
        locked: &mut Locked<'_>,
        record: &Record<'_>,
        (log, lsn): (u16, Lsn),
        again: impl FnOnce(&mut Lsn) -> Result<(), AppendError>,
    ) -> Result<Fate, AppendError> {
        let Some(base) = locked.get(record.key) else { return Ok(Fate::Uncounted) };
        let mut moved_to = lsn;
        let older = |cell| Older { key: record.key.into(), version: record.version, cell };
        if is_base(record.kind) {
            if (base.origin.log, base.origin.lsn) != (log, lsn) {
                return Ok(Fate::Outdated(older(None)));
            }
            match base.value {
                Value::Gone if base.is_settled() => {
                    self.forgotten_version.fetch_max(base.origin.version, Ordering::Relaxed);
                    locked.remove(record.key);
                }
                Value::Cells(head) if base.is_settled() => {
                    let (head, expires_ms) = (head.to_vec(), base.expires_ms);
                    let origin = Origin { version: base.origin.version, ..Origin::default() };
                    let value = Value::Cells(&head);
                    locked.set(&Entry { key: record.key, value, origin, expires_ms, older: 0 });
                }
                _ => {
                    again(&mut moved_to)?;
                    locked.moved(record.key, log, moved_to);
                    locked.add_older(record.key);
                    return Ok(Fate::Copied(older(None)));
                }
            }
            return Ok(Fate::Uncounted);
        }
        let name = cell_key_of(record);
        if base.origin.version > record.version {
            return Ok(Fate::Outdated(older(Some(name))));
        }
        self.cells.with(&[&name], |cells| {
            let Some(cell) = cells.get(&name) else { return Ok(Fate::Uncounted) };
            if (cell.origin.log, cell.origin.lsn) != (log, lsn) {
                return Ok(Fate::Outdated(older(Some(name.clone()))));
            }
            if cell.is_settled() {
                cells.remove(&name);
                return Ok(Fate::Uncounted);
            }
            again(&mut moved_to)?;
            cells.moved(&name, log, moved_to);
            cells.add_older(&name);
            Ok(Fate::Copied(older(Some(name.clone()))))
        })
    }

    /// Writes the record of the last flush anew: there may always be records that it outdates.
    fn move_flush(
        &self,
        at: (u16, Lsn),
        again: impl FnOnce(&mut Lsn) -> Result<(), AppendError>,
    ) -> Result<(), AppendError> {
        let mut flush = lock(&self.flush);
        if flush.origin == at {
            again(&mut flush.origin.1)?;
        }
        Ok(())
    }

    /// An older record is on no medium any more.
    fn forget_older(&self, older: &Older) {
        let key = &older.key[..];
        self.index.with(&[key], |locked| {
            if older.version < self.flushed() {
                // The entry does not count it.
                return;
            }
            let base = locked.get(key);
            let cell = older.cell.as_ref().filter(|_| base.is_none_or(|base| base.origin.version < older.version));
            match cell {
                Some(name) => self.cells.with(&[name], |cells| {
                    if cells.forget_older(name)
                        && let Some(cell) = cells.get(name)
                    {
                        self.outdate_at(cell.origin, cell_bytes(&cell));
                    }
                }),
                None => {
                    if locked.forget_older(key)
                        && let Some(entry) = locked.get(key)
                    {
                        self.outdate(&entry);
                    }
                }
            }
        });
    }

    /// Marks the record of a removed key that was just written as dead if nothing older is left: the same command had written
    /// that.
    fn settle_base(&self, locked: &mut Locked<'_>, record: &Record<'_>) {
        if record.kind == Kind::Drop {
            locked.get(record.key).filter(Entry::is_settled).iter().for_each(|entry| self.outdate(entry));
        }
    }

    /// Brings the base of a key into the index, if it is the newest. Returns a record that is out of date by that, of so many bytes,
    /// of which its log is still to be told.
    fn apply_base(&self, locked: &mut Locked<'_>, record: &Record<'_>, origin: Origin) -> Option<(Origin, usize)> {
        let before = locked.get(record.key);
        let was_there = before.is_some_and(|before| self.is_there(&before));
        let mut older = match before {
            // A key with cells may have no base of its own.
            Some(before) => before.older.saturating_add(u32::from(before.origin.lsn != Lsn::default())),
            None => 0,
        };
        let mut outdated = None;
        if let Some(before) = before {
            if before.origin.version > record.version {
                locked.add_older(record.key);
                return Some((origin, record.encoded_bytes()));
            }
            if !before.is_settled() {
                outdated = Some((before.origin, record_bytes(&before)));
            }
            if matches!(before.value, Value::Cells(_)) {
                older = older.saturating_add(self.bury_cells(record.key));
            }
        }
        let value = match record.kind {
            Kind::Drop => Value::Gone,
            _ => Value::Here(record.value),
        };
        let is_there = value != Value::Gone;
        let (expires_ms, older) = (record.expires_ms, older.min(OLDER_MAX));
        locked.set(&Entry { key: record.key, value, origin, expires_ms, older });
        self.count_key(was_there, is_there);
        outdated
    }
}
