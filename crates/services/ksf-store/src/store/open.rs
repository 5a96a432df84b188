//! Starting a store: what its logs have becomes the index, on several threads.
//!
//! ```text
//!   segments that were read and cut ─┬─► keys as a whole: sift into ranges of keys ─► sort, newest of each ─► leaves, filled
//!      (again, on all threads)       │      (some segments at a time, so that memory is bounded)
//!                                    └─► cells: each into the index, under the lock of its key
//! ```
//!
//! What must be in order, and what need not:
//!
//! - The version decides between the records of a key, not the place: segments are read in any order, by any thread. Of two records
//!   of one version, of which cleaning has written one, the later place counts.
//! - Where a log ends, and what is cut because another log lost what it saw, is known before: no record is looked at of which the
//!   batch does not count. So a transaction, which is in one batch, is there whole or not at all.
//! - A record that takes a key away is an entry like any other. It stays while there are older records of the key, of which
//!   all threads together count each once.
//! - The last flush is known before, too: records of a smaller version are out of date, in whichever log they are.
//! - Bases come before cells, because a base outweighs older cells and counts their records.
//! - Whether a key has ended is not asked: it is taken out by a record, later.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossbeam_utils::CachePadded;

use super::{Flush, Flushed, Shard, Store, lock, record_bytes};
use crate::away::Readable;
use crate::cells::{cell_bytes, cell_key_of, is_base};
use crate::format::{Lsn, Record, RecordKind};
use crate::index::leaf::bulk::{Heap, Router, join, merge};
use crate::index::leaf::{Entry, Leaf, Origin, PACKED_BYTES_MAX};
use crate::index::{Index, bytes_of_leaf};
use crate::memory::Memory;
use crate::promises::Promises;
use crate::recover::{Found, Piece, Places, RecoverError};
use crate::threads::on_threads;

/// How a store is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Larger than at any start before: the caller made that durable.
    pub epoch: u32,
    /// Bytes of memory for keys and values. Values for which there is no room stay on the medium.
    pub memory_bytes_max: usize,
    /// Threads that read the logs, each with one segment in memory.
    pub threads: NonZeroUsize,
    /// Bytes of records that are in memory unsorted: this many at most, or those of one segment. 2 GiB or less. What they are kept
    /// in grows by doubling, so it may take twice that. With little, leaves are made anew for each part that is sorted.
    pub unsorted_bytes_max: usize,
}

impl Opening {
    /// The usual one: an eighth of the memory is for what is unsorted, from 16 MiB up to 2 GiB; 256 MiB where there is memory for
    /// keys alone.
    pub fn new(epoch: u32, memory_bytes_max: usize, threads: NonZeroUsize) -> Self {
        let unsorted_bytes_max = match memory_bytes_max {
            0 => 256 << 20,
            _ => (memory_bytes_max / 8).clamp(16 << 20, UNSORTED_BYTES_MAX),
        };
        Self { epoch, memory_bytes_max, threads, unsorted_bytes_max }
    }
}

/// Places in a heap are numbers of 32 bits.
const UNSORTED_BYTES_MAX: usize = 2 << 30;
/// Ranges into which an index is cut to be looked through.
const SURVEY_RANGES: usize = 1024;
/// Records that are out of date are told one by one to the log; more than so many are put together by segment.
const OUTDATED_MAX: usize = 1 << 16;

/// Bytes of records that are out of date, by log and segment.
#[derive(Debug)]
struct Outdated {
    segment_bytes: u64,
    bytes: BTreeMap<(u16, u64), u64>,
}

impl Outdated {
    fn new(segment_bytes: u64) -> Self {
        Self { segment_bytes, bytes: BTreeMap::new() }
    }

    /// The record there. An entry without a record says so by the place 0, where no record is.
    fn add(&mut self, log: u16, lsn: Lsn, bytes: usize) {
        if lsn != Lsn::default() {
            *self.bytes.entry((log, lsn.0 / self.segment_bytes)).or_default() += bytes as u64;
        }
    }

    fn add_all(&mut self, other: Self) {
        for (segment, bytes) in other.bytes {
            *self.bytes.entry(segment).or_default() += bytes;
        }
    }

    fn tell(self, store: &Store) {
        for ((log, number), bytes) in self.bytes {
            lock(&store.outdated[usize::from(log)]).push((Lsn(number * self.segment_bytes), bytes as usize));
        }
    }
}

/// What a thread found in the segments that it read.
struct Sifted {
    bytes: Vec<u8>,
    /// By the range of their keys.
    heaps: Vec<Heap>,
    /// Records of the last flush: where they are, and their bytes.
    flushes: Vec<(u16, Lsn, usize)>,
    outdated: Outdated,
    /// The first segment that it could not read.
    error: Option<(usize, RecoverError)>,
}

/// What is kept from one part of the segments to the next.
#[derive(Default)]
struct Beside {
    /// Buffers that have the size of a segment.
    spare: Vec<Vec<u8>>,
    /// Records of the last flush: where they are, and their bytes.
    flushes: Vec<(u16, Lsn, usize)>,
}

/// What a thread knows of cells.
struct SiftedCells {
    bytes: Vec<u8>,
    /// Keys that have elements.
    lists: BTreeSet<Vec<u8>>,
    outdated: Outdated,
    error: Option<(usize, RecoverError)>,
}

/// The first error, as one thread would have met it.
fn first_of(errors: impl Iterator<Item = (usize, RecoverError)>) -> Result<(), RecoverError> {
    errors.min_by_key(|(at, _)| *at).map_or(Ok(()), |(_, error)| Err(error))
}

/// A start that is under way.
struct Start<'s, M> {
    store: &'s Store,
    logs: &'s [Found],
    /// Every segment of which something counts, log by log.
    pieces: Vec<(Piece<'s>, &'s M)>,
    flushed: u64,
    segment_bytes: u64,
    opening: Opening,
}

impl<M: Places> Start<'_, M> {
    /// Brings everything into the index.
    fn run(&self) -> Result<(), RecoverError> {
        let mut outdated = Outdated::new(self.segment_bytes);
        for (piece, _) in self.pieces.iter().filter(|(piece, _)| !self.counts(piece)) {
            outdated.add(piece.log(), Lsn(piece.number * self.segment_bytes + 1), piece.content.record_bytes as usize);
        }
        self.load(&mut outdated)?;
        self.apply_cells(&mut outdated)?;
        self.survey(&mut outdated);
        outdated.tell(self.store);
        Ok(())
    }

    /// Whether a segment has anything that the last flush did not take.
    fn counts(&self, piece: &Piece<'_>) -> bool {
        piece.content.version >= self.flushed
    }

    fn outdated(&self) -> Outdated {
        Outdated::new(self.segment_bytes)
    }

    /// Fills the index with the keys as a whole.
    fn load(&self, outdated: &mut Outdated) -> Result<(), RecoverError> {
        let samples = self.logs.iter().flat_map(|found| found.samples().iter().cloned());
        let router = Router::new(samples.collect());
        let has_bases = |piece: &Piece<'_>| self.counts(piece) && piece.content.cells < piece.content.records;
        let pieces: Vec<_> = self.pieces.iter().filter(|(piece, _)| has_bases(piece)).copied().collect();
        let ranges: Vec<Mutex<Vec<Leaf>>> = (0..router.ranges()).map(|_| Mutex::default()).collect();
        let (mut beside, mut used, mut from) = (Beside::default(), 0, 0);
        while from < pieces.len() {
            let (count, grants) = self.round(&pieces[from..], used);
            let heaps = self.sift(&pieces, from, &grants, &router, &mut beside, outdated)?;
            from += count;
            used = self.merge(&ranges, heaps, outdated);
        }
        // Cleaning may have written it anew.
        let mut flushes = beside.flushes;
        flushes.sort_unstable();
        if let Some((log, lsn, _)) = flushes.pop() {
            lock(&self.store.flush).origin = (log, lsn);
        }
        flushes.into_iter().for_each(|(log, lsn, bytes)| outdated.add(log, lsn, bytes));
        let leaves = ranges.into_iter().flat_map(|range| range.into_inner().unwrap_or_default());
        self.store.index.load(join(leaves));
        Ok(())
    }

    /// How many of these segments are sifted before anything is sorted, and how many bytes of long values each may take into
    /// memory, of which leaves have so many by now.
    fn round(&self, pieces: &[(Piece<'_>, &M)], used: usize) -> (usize, Vec<usize>) {
        let memory = &self.store.memory;
        let unsorted_bytes_max = self.opening.unsorted_bytes_max.min(UNSORTED_BYTES_MAX);
        let has_room = memory.low_bytes() > used.saturating_add(memory.used());
        let of = |piece: &Piece<'_>| {
            let (all, apart) = (piece.content.record_bytes as usize, piece.content.apart_bytes as usize);
            // What is beside each of the long values, of more than 256 bytes, is less than a sixteenth of them.
            (all - apart, if has_room { apart + apart / 16 } else { 0 })
        };
        let mut sum = 0;
        let fits = |(piece, _): &&(Piece<'_>, &M)| {
            let (packed, apart) = of(piece);
            sum += packed + apart;
            sum <= unsorted_bytes_max
        };
        let count = pieces.iter().take_while(fits).count().max(1);
        let pieces = &pieces[..count.min(pieces.len())];
        let packed: usize = pieces.iter().map(|(piece, _)| of(piece).0).sum();
        let mut room = memory.low_bytes().saturating_sub(used.saturating_add(memory.used()).saturating_add(packed));
        let grants = pieces.iter().map(|(piece, _)| {
            let grant = of(piece).1.min(room);
            room -= grant;
            grant
        });
        (count, grants.collect())
    }

    /// Reads segments from one on, as many as there are grants, and returns what they have by ranges of keys.
    fn sift(
        &self,
        pieces: &[(Piece<'_>, &M)],
        from: usize,
        grants: &[usize],
        router: &Router,
        beside: &mut Beside,
        outdated: &mut Outdated,
    ) -> Result<Vec<Vec<Heap>>, RecoverError> {
        let buffers = Mutex::new(mem::take(&mut beside.spare));
        let threads = self.opening.threads;
        let begin = || Sifted {
            bytes: lock(&buffers).pop().unwrap_or_default(),
            heaps: (0..router.ranges()).map(|_| Heap::default()).collect(),
            flushes: Vec::new(),
            outdated: self.outdated(),
            error: None,
        };
        let sifted = on_threads(threads, grants.len(), begin, |sifted, at| {
            if let Some((next, medium)) = pieces.get(from + at + threads.get()) {
                medium.ahead(next.place());
            }
            let (piece, medium) = &pieces[from + at];
            let (log, mut room) = (piece.log(), grants[at]);
            let Sifted { bytes, heaps, flushes, outdated, error } = sifted;
            let read = piece.read(*medium, bytes, |lsn, record| match record.kind {
                RecordKind::String | RecordKind::Drop | RecordKind::Flush if record.version < self.flushed => {
                    outdated.add(log, lsn, record.encoded_bytes());
                }
                RecordKind::String | RecordKind::Drop => {
                    let is_away = takes_no(&record, &mut room);
                    heaps[router.range_of(record.key)].push(&record, log, lsn, is_away);
                }
                RecordKind::Flush => flushes.push((log, lsn, record.encoded_bytes())),
                RecordKind::Field
                | RecordKind::Member
                | RecordKind::Element
                | RecordKind::Scored
                | RecordKind::Remove
                | RecordKind::Expire => {}
            });
            *error = read.err().map(|error| (at, error));
            error.is_none()
        });
        beside.spare = buffers.into_inner().unwrap_or_default();
        let (mut heaps, mut errors) = (Vec::new(), Vec::new());
        heaps.resize_with(router.ranges(), Vec::new);
        for of_thread in sifted {
            beside.spare.push(of_thread.bytes);
            beside.flushes.extend(of_thread.flushes);
            outdated.add_all(of_thread.outdated);
            errors.extend(of_thread.error);
            for (of_range, heap) in heaps.iter_mut().zip(of_thread.heaps).filter(|(_, heap)| !heap.is_empty()) {
                of_range.push(heap);
            }
        }
        first_of(errors.into_iter())?;
        Ok(heaps)
    }

    /// Brings what was sifted into the leaves of its range. Returns the bytes that all leaves take.
    fn merge(&self, ranges: &[Mutex<Vec<Leaf>>], heaps: Vec<Vec<Heap>>, outdated: &mut Outdated) -> usize {
        let heaps: Vec<Mutex<Vec<Heap>>> = heaps.into_iter().map(Mutex::new).collect();
        let begin = || (self.outdated(), 0);
        let merged = on_threads(self.opening.threads, ranges.len(), begin, |(outdated, used), at| {
            let heaps = mem::take(&mut *lock(&heaps[at]));
            let mut range = lock(&ranges[at]);
            let before = mem::take(&mut *range);
            *range = merge(before, heaps, |origin, bytes| outdated.add(origin.log, origin.lsn, bytes));
            let of_leaf = |leaf: &Leaf| leaf.entry(0).map_or(0, |entry| bytes_of_leaf(entry.key)) + leaf.sizes().used;
            *used += range.iter().map(of_leaf).sum::<usize>();
            true
        });
        let mut all_used = 0;
        for (of_thread, used) in merged {
            outdated.add_all(of_thread);
            all_used += used;
        }
        all_used
    }

    /// Brings the cells in, whose keys have their bases by now.
    fn apply_cells(&self, outdated: &mut Outdated) -> Result<(), RecoverError> {
        let (store, threads) = (self.store, self.opening.threads);
        let has_cells = |piece: &Piece<'_>| self.counts(piece) && piece.content.cells > 0;
        let pieces: Vec<_> = self.pieces.iter().filter(|(piece, _)| has_cells(piece)).copied().collect();
        let begin =
            || SiftedCells { bytes: Vec::new(), lists: BTreeSet::new(), outdated: self.outdated(), error: None };
        let sifted = on_threads(threads, pieces.len(), begin, |sifted, at| {
            if let Some((next, medium)) = pieces.get(at + threads.get()) {
                medium.ahead(next.place());
            }
            let (piece, medium) = &pieces[at];
            let log = piece.log();
            let SiftedCells { bytes, lists, outdated, error } = sifted;
            let read = piece.read(*medium, bytes, |lsn, record| {
                if is_base(record.kind) || record.kind == RecordKind::Flush {
                    return;
                }
                if record.version < self.flushed {
                    outdated.add(log, lsn, record.encoded_bytes());
                    return;
                }
                if record.kind == RecordKind::Element && !lists.contains(record.key) {
                    lists.insert(record.key.to_vec());
                }
                store.apply_found_cell(&record, Origin { log, lsn, version: record.version });
            });
            self.put_outdated_together();
            *error = read.err().map(|error| (at, error));
            error.is_none()
        });
        let (mut lists, mut errors) = (BTreeSet::new(), Vec::new());
        for of_thread in sifted {
            lists.extend(of_thread.lists);
            outdated.add_all(of_thread.outdated);
            errors.extend(of_thread.error);
        }
        first_of(errors.into_iter())?;
        let lists: Vec<_> = lists.into_iter().collect();
        on_threads(
            threads,
            lists.len(),
            || (),
            |(), at| {
                store.find_first(&lists[at]);
                true
            },
        );
        Ok(())
    }

    /// What commands tell one by one of records that are out of date must not become longer than the logs.
    fn put_outdated_together(&self) {
        for (log, outdated) in (0..).zip(self.store.outdated.iter()) {
            let mut outdated = lock(outdated);
            if outdated.len() > OUTDATED_MAX {
                let mut together = self.outdated();
                outdated.drain(..).for_each(|(lsn, bytes)| together.add(log, lsn, bytes));
                let of_segments = together.bytes.into_iter();
                outdated.extend(
                    of_segments.map(|((_, number), bytes)| (Lsn(number * self.segment_bytes + 1), bytes as usize)),
                );
            }
        }
    }

    /// Counts the keys, and looks for records that say that something is gone of which there is nothing older.
    fn survey(&self, outdated: &mut Outdated) {
        let store = self.store;
        let begin = || (self.outdated(), 0);
        let of_keys = self.look_through(&store.index, begin, |(outdated, keys), entry| {
            *keys += usize::from(store.is_there(entry));
            if entry.is_settled() {
                outdated.add(entry.origin.log, entry.origin.lsn, record_bytes(entry));
            }
        });
        let mut keys = 0;
        for (of_thread, count) in of_keys {
            outdated.add_all(of_thread);
            keys += count;
        }
        store.keys.store(keys, Ordering::Relaxed);
        let begin = || self.outdated();
        let of_cells = self.look_through(&store.cells, begin, |outdated, cell| {
            if cell.is_settled() {
                outdated.add(cell.origin.log, cell.origin.lsn, cell_bytes(cell));
            }
        });
        of_cells.into_iter().for_each(|of_thread| outdated.add_all(of_thread));
    }

    fn look_through<T: Send>(
        &self,
        index: &Index,
        begin: impl Fn() -> T + Sync,
        look: impl Fn(&mut T, &Entry<'_>) + Sync,
    ) -> Vec<T> {
        let firsts = index.ranges(SURVEY_RANGES);
        on_threads(self.opening.threads, firsts.len(), begin, |state, at| {
            let end = firsts.get(at + 1);
            index.scan(&firsts[at], |entry| {
                let is_here = end.is_none_or(|end| entry.key < &end[..]);
                if is_here {
                    look(state, entry);
                }
                is_here
            });
            true
        })
    }
}

/// Whether a long value has no room: what it takes of it is gone.
fn takes_no(record: &Record<'_>, room: &mut usize) -> bool {
    if record.value.len() <= PACKED_BYTES_MAX {
        return false;
    }
    match room.checked_sub(record.value.len() + Leaf::APART_BYTES) {
        Some(left) => {
            *room = left;
            false
        }
        None => true,
    }
}

impl Store {
    /// Makes a store of its logs as recovery found and [cut](crate::recover::cut_by_links) them, and made durable by their
    /// [repairs](Found::repairs). Without these the store can be read only. Records are read from the medium of each log once
    /// more, and once again if there are cells.
    ///
    /// # Errors
    ///
    /// A medium cannot be read, or has become another one since.
    pub fn open<M: Places>(
        logs: Vec<Found>,
        media: &[M],
        opening: Opening,
    ) -> Result<(Arc<Self>, Vec<Shard>), RecoverError> {
        let ends = logs.iter().map(Found::end);
        let contents: Vec<_> = logs.iter().map(Found::content).collect();
        let flushed = contents.iter().map(|content| content.flushed).max().unwrap_or_default();
        let version = contents.iter().map(|content| content.version).max().unwrap_or_default();
        let memory = Arc::new(Memory::new(opening.memory_bytes_max));
        let store = Self {
            index: Index::new(Arc::clone(&memory), true),
            // Values of cells stay in memory: a command walks through many of them.
            cells: Index::new(Arc::clone(&memory), false),
            keys: AtomicUsize::new(0),
            next_version: AtomicU64::new(version.saturating_add(1)),
            absent: Arc::default(),
            promises: Mutex::new(Promises::new(ends.clone())),
            promised: ends.map(|end| AtomicU64::new(end.0)).collect(),
            appended: logs.iter().map(|_| CachePadded::default()).collect(),
            backups: Mutex::default(),
            outdated: logs.iter().map(|_| Mutex::default()).collect(),
            has_dead: logs.iter().map(|_| AtomicBool::new(true)).collect(),
            wanting: AtomicUsize::new(0),
            sweep: Mutex::default(),
            is_sweeping: CachePadded::default(),
            epoch: opening.epoch,
            flush: Mutex::new(Flush::default()),
            flushed: CachePadded::new(Flushed { version: AtomicU64::new(flushed), waits: AtomicBool::new(false) }),
            cleared: Mutex::default(),
            memory,
            hand: Mutex::default(),
            readable: Arc::new(Readable::new(logs.first().map(Found::geometry), logs.len())),
        };
        let segment_bytes = logs.first().map_or(1, |found| found.geometry().segment_bytes);
        let pieces =
            logs.iter().zip(media).flat_map(|(found, medium)| found.pieces().map(move |piece| (piece, medium)));
        let pieces = pieces.filter(|(piece, _)| piece.content.records > 0).collect();
        Start { store: &store, logs: &logs, pieces, flushed, segment_bytes, opening }.run()?;
        let store = Arc::new(store);
        let shard = |found: Found| {
            let (number, log) = (found.log(), found.into_log(opening.epoch));
            store.readable.add(number, log.segments());
            let next_segment = log.segments().keys().next_back().map_or(0, |last| last + 1);
            Shard {
                store: Arc::clone(&store),
                number,
                log,
                going: BTreeMap::new(),
                moved: Vec::new(),
                outdated: Vec::new(),
                flushed,
                last_version: 0,
                next_segment,
                values: None,
                missing: BTreeMap::new(),
                is_short: false,
                wanted: None,
                gives_up: false,
                told_of_want: false,
                not_due_at: None,
            }
        };
        let shards = logs.into_iter().map(shard).collect();
        Ok((store, shards))
    }

    /// Brings a cell of a log into the index. An older one may follow.
    fn apply_found_cell(&self, record: &Record<'_>, origin: Origin) {
        let age = |origin: Origin| (origin.version, origin.log, origin.lsn);
        self.index.with(&[record.key], |locked| {
            let name = cell_key_of(record);
            let is_copied = self.cells.with(&[&name], |cells| {
                let before = cells.get(&name).filter(|before| before.origin.version <= record.version);
                // Of a record that cleaning wrote anew the later one counts, whichever is read first.
                let is_copied = before.is_some_and(|before| age(before.origin) > age(origin));
                if is_copied {
                    cells.add_older(&name);
                } else if let Some(before) = before.filter(Entry::is_settled) {
                    self.outdate_at(before.origin, cell_bytes(&before));
                }
                is_copied
            });
            if is_copied {
                self.outdate_at(origin, record.encoded_bytes());
            } else {
                self.apply_cells(locked, record.key, [(record, origin)]);
            }
        });
    }
}
