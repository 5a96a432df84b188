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

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::{BatchHeader, HEADER_BYTES, KEY_BYTES_MAX, Kind, Link, Lsn, Record};
use crate::index::leaf::{Entry, OLDER_MAX, Origin, Value};
use crate::index::{Index, Locked};
use crate::log::{AppendError, Log, News, Purpose, Write, WriteId};
use crate::promises::Promises;
use crate::recover::{Found, batch_in};

/// What all shards share.
#[derive(Debug)]
pub struct Store {
    index: Index,
    /// Keys that are not gone.
    keys: AtomicUsize,
    next_version: AtomicU64,
    promises: Mutex<Promises>,
    /// Of each log, how far replies may tell of it.
    promised: Box<[AtomicU64]>,
    /// Of each log, the records that other shards made out of date.
    outdated: Box<[Mutex<Vec<Outdated>>]>,
}

/// Where a record lies that is out of date, and its bytes.
type Outdated = (Lsn, usize);

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
}

/// What goes with a segment.
#[derive(Debug)]
struct Going {
    /// The keys of its older records.
    older: Vec<Box<[u8]>>,
    /// What outdates them: while a crash may take that, they are what the keys have.
    outdated_by: Needs,
}

/// What must be promised before a reply may leave: of each log, everything before a place in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs(Vec<(u16, Lsn)>);

impl Needs {
    fn add(&mut self, log: u16, lsn: Lsn) {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Got<'a> {
    /// The value.
    pub value: &'a [u8],
    /// The version of the last write. It changes with every write, and never comes back.
    pub version: u64,
    /// When the key ends: milliseconds since 1970.
    pub expires_ms: Option<u64>,
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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is changed by single calls that do not panic in between.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Keys that it has. Those that have ended count until somebody looks at them.
    pub fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// How far replies may tell of a log.
    pub fn promised(&self, log: u16) -> Lsn {
        Lsn(self.promised[usize::from(log)].load(Ordering::Acquire))
    }

    /// Looks at keys, all at one moment. What the reply needs is returned with what `look` made of it.
    pub fn read<R>(&self, keys: &[&[u8]], now_ms: u64, look: impl FnOnce(&mut View<'_, '_>) -> R) -> (R, Needs) {
        self.index.with(keys, |locked| {
            let mut view = View { store: self, locked, now_ms, needs: Needs::default() };
            let result = look(&mut view);
            (result, view.needs)
        })
    }

    /// Goes through the keys from `from` on, in order, until `take` returns false; [`Index::scan`] tells what is seen.
    pub fn scan(&self, from: &[u8], now_ms: u64, mut take: impl FnMut(&[u8], Got<'_>) -> bool) -> Needs {
        let mut needs = Needs::default();
        self.index.scan(from, |entry| {
            self.note(&mut needs, entry.origin);
            got(entry, now_ms).is_none_or(|got| take(entry.key, got))
        });
        needs
    }

    /// Somebody saw what a record did: notes it, unless the record is promised already.
    fn note(&self, needs: &mut Needs, origin: Origin) {
        let end = Lsn(origin.lsn.0 + 1);
        if end > self.promised(origin.log) {
            needs.add(origin.log, end);
        }
    }

    fn outdate(&self, entry: &Entry<'_>) {
        let bytes = record_bytes(entry);
        lock(&self.outdated[usize::from(entry.origin.log)]).push((entry.origin.lsn, bytes));
    }
}

fn got<'a>(entry: &Entry<'a>, now_ms: u64) -> Option<Got<'a>> {
    let Value::Here(value) = entry.value else { return None };
    let lives = entry.expires_ms.is_none_or(|end| now_ms < end);
    lives.then_some(Got { value, version: entry.origin.version, expires_ms: entry.expires_ms })
}

/// Bytes of the record of an entry, but for the time of receipt.
fn record_bytes(entry: &Entry<'_>) -> usize {
    let value_bytes = match entry.value {
        Value::Here(value) => value.len(),
        Value::OnMedium(bytes) => bytes as usize,
        Value::Gone => 0,
    };
    Record::bytes_of(entry.key.len(), value_bytes, entry.expires_ms.is_some())
}

/// Keys as a read sees them.
#[derive(Debug)]
pub struct View<'v, 'l> {
    store: &'v Store,
    locked: &'v mut Locked<'l>,
    now_ms: u64,
    needs: Needs,
}

impl View<'_, '_> {
    /// What a key has, if it is there. It is one that the command named.
    pub fn get(&mut self, key: &[u8]) -> Option<Got<'_>> {
        let entry = self.locked.get(key)?;
        self.store.note(&mut self.needs, entry.origin);
        got(&entry, self.now_ms)
    }
}

/// A change of one key.
#[derive(Debug)]
enum Change<'k> {
    Set { value: Cow<'k, [u8]>, expires_ms: Option<u64> },
    Remove,
}

/// Keys as a command sees and changes them.
#[derive(Debug)]
pub struct Update<'v, 'l, 'k> {
    view: View<'v, 'l>,
    changes: BTreeMap<&'k [u8], Change<'k>>,
}

impl<'k> Update<'_, '_, 'k> {
    /// What a key has, also by this command. It is one that the command named.
    pub fn get(&mut self, key: &[u8]) -> Option<Got<'_>> {
        match self.changes.get(key) {
            Some(Change::Set { value, expires_ms }) => Some(Got { value, version: 0, expires_ms: *expires_ms }),
            Some(Change::Remove) => None,
            None => self.view.get(key),
        }
    }

    /// Sets what a key has, and when it ends.
    pub fn set(&mut self, key: &'k [u8], value: impl Into<Cow<'k, [u8]>>, expires_ms: Option<u64>) {
        self.changes.insert(key, Change::Set { value: value.into(), expires_ms });
    }

    /// Takes a key out. True if it was there.
    pub fn remove(&mut self, key: &'k [u8]) -> bool {
        let was_there = self.get(key).is_some();
        // Also of a key that has ended, whose record is still there.
        if was_there || self.changes.contains_key(key) {
            self.changes.insert(key, Change::Remove);
        }
        was_there
    }
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

    /// The shard's log.
    pub fn log(&self) -> &Log {
        &self.log
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
        command: impl FnOnce(&mut Update<'_, '_, 'k>) -> R,
    ) -> Result<(R, Needs), UpdateError> {
        let Self { store, number, log, .. } = self;
        store.index.with(keys, |locked| {
            let view = View { store, locked, now_ms: clock.now_ms, needs: Needs::default() };
            let mut update = Update { view, changes: BTreeMap::new() };
            let result = command(&mut update);
            let Update { view: View { locked, mut needs, .. }, changes, .. } = update;
            if changes.is_empty() {
                return Ok((result, needs));
            }
            let first_version = store.next_version.fetch_add(changes.len() as u64, Ordering::Relaxed);
            let records = changes.iter().zip(first_version..).map(|((key, change), version)| {
                let (kind, value, expires_ms) = match change {
                    Change::Set { value, expires_ms } => (Kind::String, &**value, *expires_ms),
                    Change::Remove => (Kind::Drop, &[][..], None),
                };
                Record { kind, version, expires_ms, received_ns: clock.received_ns, key, subkey: &[], value }
            });
            let records: Vec<Record<'_>> = records.collect();
            if let Some(long) = records.iter().find(|record| record.key.len() > KEY_BYTES_MAX) {
                let (key_bytes, value_bytes) = (long.key.len(), long.value.len());
                return Err(UpdateError::TooLong { key_bytes, value_bytes });
            }
            let links = needs.iter().filter(|(log, _)| log != number).map(|(log, lsn)| Link { log, lsn });
            let mut last = Lsn::default();
            let mut places = Vec::with_capacity(records.len());
            let removes = changes.values().all(|change| matches!(change, Change::Remove));
            let purpose = if removes { Purpose::Removing } else { Purpose::Writing };
            log.append_for(purpose, &records, links.collect::<Vec<_>>(), |_, lsn| {
                places.push(lsn);
                last = lsn;
            })?;
            for (record, lsn) in records.iter().zip(places) {
                store.apply(locked, record, Origin { log: *number, lsn, version: record.version });
                if record.kind == Kind::Drop {
                    // Of a key that the same command brought there is nothing older.
                    locked.get(record.key).filter(Entry::is_settled).iter().for_each(|entry| store.outdate(entry));
                }
            }
            needs.add(*number, Lsn(last.0 + 1));
            Ok((result, needs))
        })
    }

    /// The next write of the shard's log: [`Log::next_write`].
    pub fn next_write(&mut self, in_flight_max: usize, time_ns: u64) -> Option<Write> {
        self.log.promise(self.store.promised(self.number));
        for (lsn, bytes) in mem::take(&mut *lock(&self.store.outdated[usize::from(self.number)])) {
            self.log.forget(lsn, bytes);
        }
        self.log.next_write(in_flight_max, time_ns)
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
            for key in self.going.remove(&number).map(|going| going.older).unwrap_or_default() {
                self.store.index.with(&[&key], |locked| {
                    if locked.forget_older(&key)
                        && let Some(entry) = locked.get(&key)
                    {
                        self.store.outdate(&entry);
                    }
                });
            }
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
    /// The log is full, or failed; the step may be tried again.
    pub fn clean(&mut self, cleaning: &mut Cleaning, segment: &[u8], budget_bytes: usize) -> Result<bool, AppendError> {
        let Self { store, number, log, going, .. } = self;
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
            let Some(batch) = batch_in(geometry, *number, lsn, segment) else { break };
            for (lsn, record) in batch.records().flatten().skip(cleaning.handled) {
                store.index.with(&[record.key], |locked| {
                    let Some(entry) = locked.get(record.key) else { return Ok(()) };
                    if (entry.origin.log, entry.origin.lsn) != (*number, lsn) {
                        store.note(&mut cleaning.outdated_by, entry.origin);
                        cleaning.older.push(record.key.into());
                        return Ok(());
                    }
                    if entry.is_settled() {
                        locked.remove(record.key);
                        return Ok(());
                    }
                    let mut moved_to = lsn;
                    log.append_for(Purpose::Cleaning, &[record], [], |_, lsn| moved_to = lsn)?;
                    locked.moved(record.key, *number, moved_to);
                    // The copy that goes with the segment is an older record until then.
                    Ok(())
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

    /// Begins to erase segments that were cleaned: [`Log::erase_cleaned`].
    pub fn erase_cleaned(&mut self) {
        let Self { store, log, going, .. } = self;
        let is_promised = |needs: &Needs| needs.iter().all(|(log, lsn)| lsn <= store.promised(log));
        log.erase_cleaned(|number| going.get(&number).is_none_or(|going| is_promised(&going.outdated_by)));
    }
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
    /// Keys of which it has records that are out of date.
    older: Vec<Box<[u8]>>,
    /// What outdates them, as far as that is not promised.
    outdated_by: Needs,
}

impl Cleaning {
    /// Begins with a segment, which is not the last one of its log.
    pub fn new(number: u64) -> Self {
        Self { number, at: 0, handled: 0, older: Vec::new(), outdated_by: Needs::default() }
    }
}

impl Store {
    /// Brings a record into the index, if it is the newest of its key.
    fn apply(&self, locked: &mut Locked<'_>, record: &Record<'_>, origin: Origin) {
        let before = locked.get(record.key);
        let was_there = before.is_some_and(|before| before.value != Value::Gone);
        let older = match before {
            Some(before) => (before.older + 1).min(OLDER_MAX),
            None => 0,
        };
        if let Some(before) = before {
            if before.origin.version > record.version {
                locked.add_older(record.key);
                lock(&self.outdated[usize::from(origin.log)]).push((origin.lsn, record.encoded_bytes()));
                return;
            }
            if !before.is_settled() {
                self.outdate(&before);
            }
        }
        let value = if record.kind == Kind::Drop { Value::Gone } else { Value::Here(record.value) };
        let is_there = value != Value::Gone;
        locked.set(&Entry { key: record.key, value, origin, expires_ms: record.expires_ms, older });
        self.keys.fetch_add(usize::from(is_there), Ordering::Relaxed);
        self.keys.fetch_sub(usize::from(was_there), Ordering::Relaxed);
    }

    /// Makes a store of its logs as recovery found and [cut](crate::recover::cut_by_links) them. `epoch` is larger than at
    /// any start before, and the caller made that durable, and then their [repairs](Found::repairs). Without these the
    /// store can be read only.
    pub fn open(logs: Vec<Found>, epoch: u32) -> (Arc<Self>, Vec<Shard>) {
        let ends = logs.iter().map(Found::end);
        let store = Self {
            index: Index::default(),
            keys: AtomicUsize::new(0),
            next_version: AtomicU64::new(1),
            promises: Mutex::new(Promises::new(ends.clone())),
            promised: ends.map(|end| AtomicU64::new(end.0)).collect(),
            outdated: logs.iter().map(|_| Mutex::default()).collect(),
        };
        for found in &logs {
            found.records(|lsn, record| {
                let origin = Origin { log: found.log(), lsn, version: record.version };
                store.next_version.fetch_max(record.version + 1, Ordering::Relaxed);
                store.index.with(&[record.key], |locked| {
                    let before = locked.get(record.key);
                    // Not yet: an older record may follow, in another log.
                    let settled =
                        before.filter(|before| before.is_settled() && before.origin.version <= record.version);
                    settled.iter().for_each(|before| store.outdate(before));
                    store.apply(locked, &record, origin);
                });
            });
        }
        store.index.scan(b"", |entry| {
            if entry.is_settled() {
                store.outdate(entry);
            }
            true
        });
        let store = Arc::new(store);
        let shard = |found: Found| Shard {
            store: Arc::clone(&store),
            number: found.log(),
            log: found.into_log(epoch),
            going: BTreeMap::new(),
            moved: Vec::new(),
        };
        let shards = logs.into_iter().map(shard).collect();
        (store, shards)
    }
}
