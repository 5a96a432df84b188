//! Room in a shard's log: which segment is cleaned next, what becomes of its records, and when it is erased.

use std::mem;
use std::sync::atomic::Ordering;

use crate::cells::{cell_bytes, cell_key_of, is_base};
use crate::format::{BatchHeader, HEADER_BYTES, Lsn, Record, RecordKind};
use crate::index::Locked;
use crate::index::leaf::{Entry, Origin, Value};
use crate::log::{AppendError, Log, Purpose, Segment};
use crate::recover::batch_in;

use super::append::see_flush;
use super::{Going, Needs, Older, Shard, Store, lock};

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

impl Shard {
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
                    if record.kind == RecordKind::Flush {
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

/// Whether cleaning may bring room into a log: cleaning it, or, for a removal, another one, after which its tombstones outweigh nothing.
pub(super) fn brings_room(store: &Store, number: u16, log: &Log, purpose: Purpose) -> bool {
    let others = (0..).zip(store.has_dead.iter()).filter(|(other, _): &(u16, _)| *other != number);
    let mut others = others.filter(|_| purpose == Purpose::Removing);
    log.can_be_squeezed(purpose) || others.any(|(_, has_dead)| has_dead.load(Ordering::Relaxed))
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
                    self.absent.forget(record.key, base.origin.version);
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
    pub(super) fn forget_older(&self, older: &Older) {
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
}
