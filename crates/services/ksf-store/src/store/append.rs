//! Appends the changes of a command to the log and applies them to the index.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::away::Wanted;
use crate::cells::{self, is_base};
use crate::format::{KEY_BYTES_MAX, Link, Lsn, Record, RecordKind};
use crate::index::Locked;
use crate::index::leaf::{Entry, OLDER_MAX, Origin, Value};
use crate::log::{AppendError, Log, Purpose};
use crate::memory::NoRoom;
use crate::update::{Changes, Records, Update};
use crate::work;

use super::cleaning::brings_room;
use super::{Clock, Needs, Store, UpdateError, record_bytes};

/// The parts of a [`Shard`](super::Shard) that a commit needs.
pub(super) struct Appender<'s> {
    pub(super) store: &'s Store,
    pub(super) number: u16,
    pub(super) log: &'s mut Log,
    pub(super) flushed: &'s mut u64,
    pub(super) last_version: &'s mut u64,
    pub(super) missing: &'s mut BTreeMap<u64, Wanted>,
    pub(super) is_short: &'s mut bool,
    pub(super) wanted: &'s mut Option<(Purpose, usize)>,
    pub(super) gives_up: bool,
}

impl Appender<'_> {
    /// [`Shard::commit`].
    pub(super) fn commit(&mut self, update: Update<'_, '_>, clock: Clock) -> Result<Needs, UpdateError> {
        let purpose = update.purpose();
        let (mut locked, needs, changes, mut asked_for) = update.done();
        self.missing.append(&mut asked_for);
        if !self.missing.is_empty() {
            // Its changes come from values that it did not have.
            return Err(UpdateError::Undone);
        }
        self.append(&mut locked, needs, &changes, purpose, clock)
    }

    pub(super) fn append(
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
        let removes = records.iter().all(|record| matches!(record.kind, RecordKind::Drop | RecordKind::Remove));
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
        // Cells of one key are applied together.
        for run in records.chunk_by(|one, next| !is_base(one.kind) && !is_base(next.kind) && one.key == next.key) {
            let placed = run.iter().zip(&mut places);
            let mut placed =
                placed.map(|(record, lsn)| (record, Origin { log: *number, lsn, version: record.version }));
            if !is_base(run[0].kind) {
                store.apply_cells(locked, run[0].key, placed);
                store.settle_cells(run);
            } else if let Some((record, origin)) = placed.next() {
                match store.apply_base(locked, record, origin) {
                    // The log is this shard's own: it needs no lock.
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

impl Store {
    /// Marks the tombstone that was just written as dead if it masks no older record, as when the same command had written the key.
    fn settle_base(&self, locked: &mut Locked<'_>, record: &Record<'_>) {
        if record.kind == RecordKind::Drop {
            locked.get(record.key).filter(Entry::is_settled).iter().for_each(|entry| self.outdate(entry));
        }
    }

    /// Applies the base record of a key to the index, unless the index has a newer one. Returns the record that became dead, and its
    /// bytes; the caller reports it to the log of that record.
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
            RecordKind::Drop => Value::Gone,
            _ => Value::Here(record.value),
        };
        let is_there = value != Value::Gone;
        let (expires_ms, older) = (record.expires_ms, older.min(OLDER_MAX));
        locked.set(&Entry { key: record.key, value, origin, expires_ms, older });
        self.count_key(was_there, is_there);
        outdated
    }
}

/// Marks all records of the log as dead if another shard has flushed the store since the last call. Each append calls this first, so
/// that the records behind it stay live.
pub(super) fn see_flush(store: &Store, log: &mut Log, flushed: &mut u64) {
    let version = store.flushed();
    if *flushed != version {
        *flushed = version;
        log.forget_all_but(None);
    }
}
