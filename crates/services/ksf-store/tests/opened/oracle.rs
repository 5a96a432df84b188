//! What a start must find, by the shortest way that there is: each log in order, each key by all of its records.

use std::collections::BTreeMap;

use ksf_store::format::{Batch, BatchHeader, Lsn, Malformed, Record, RecordKind, SegmentHeader, Standing};
use ksf_store::index::leaf::{OLDER_MAX, Origin, Value};
use ksf_store::log::Geometry;
use ksf_store::recover::{Found, RecoverError};
use ksf_store::store::{Shard, Store};

use crate::common::Medium;

/// A log, and its records by their places.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    end: Lsn,
    promised: Lsn,
    epoch: u32,
    records: Vec<(Lsn, RecordKind, u64)>,
}

impl Verdict {
    pub(crate) fn of(found: &Found, medium: &Medium) -> Self {
        let mut records = Vec::new();
        found.records(medium, |lsn, record| records.push((lsn, record.kind, record.version))).unwrap();
        assert_eq!(records.len() as u64, found.record_count());
        Self { end: found.end(), promised: found.promised(), epoch: found.epoch(), records }
    }
}

/// Reads a log from its first segment to its last.
pub(crate) fn read(log: u16, geometry: Geometry, medium: &Medium) -> Result<Verdict, RecoverError> {
    let mut reader = Reader { log, geometry, end: Lsn(0), promised: Lsn(0), epoch: 0, records: Vec::new() };
    let mut segments: BTreeMap<u64, (u32, SegmentHeader)> = BTreeMap::new();
    let (mut erased, mut newest) = (Vec::new(), (0, 0, None));
    for (place, bytes) in (0..).zip(&medium.places) {
        let header = SegmentHeader::decode(bytes).ok();
        if let Some(header) = header.clone().filter(|header| !reader.is_ours(header)) {
            return Err(RecoverError::Foreign { log, place, ours: geometry, header: Box::new(header) });
        }
        let Some(header) = header.filter(|header| header.number < u64::MAX / geometry.segment_bytes - 1) else {
            reader.promised = reader.promised.max(reader.promised_in(bytes, u64::MAX));
            continue;
        };
        if header.standing != Standing::Cleaned && (header.epoch, header.number) >= (newest.0, newest.1) {
            newest = (header.epoch, header.number, header.live.clone());
        }
        match header.standing {
            Standing::Counts => {
                let number = header.number;
                if let Some((other, _)) = segments.insert(number, (place, header)) {
                    return Err(RecoverError::Twice { log, number, places: (other, place) });
                }
            }
            Standing::Cleaned => erased.push(header.number),
            Standing::GivenUp => {}
        }
    }
    let named = newest.2.unwrap_or_default();
    let missing = named.into_iter().find(|number| !segments.contains_key(number) && !erased.contains(number));
    let places =
        segments.iter().map(|(number, (place, _))| reader.promised_in(&medium.places[*place as usize], *number));
    let promised_anywhere = places.fold(reader.promised, Lsn::max);
    let (last, mut broken) = (segments.keys().next_back().copied(), None);
    for (number, (place, header)) in &segments {
        if header.live.is_none() && Some(*number) == last {
            reader.end = reader.end.max(Lsn(number * geometry.segment_bytes));
            broken = Some(Malformed::HeaderChecksum);
            break;
        }
        if missing.is_some_and(|missing| missing < *number) {
            break;
        }
        reader.end = geometry.first_batch(*number);
        reader.epoch = reader.epoch.max(header.epoch);
        broken = reader.follow(*number, &medium.places[*place as usize]).err();
        if broken.is_some() {
            break;
        }
    }
    if broken.is_some() || missing.is_some() {
        reader.promised = reader.promised.max(promised_anywhere);
    }
    let Reader { end, promised, epoch, records, .. } = reader;
    match missing {
        Some(number) if promised > geometry.first_batch(number) => Err(RecoverError::Missing { log, number }),
        _ if promised > end => {
            let malformed = broken.unwrap_or(Malformed::HeaderChecksum);
            Err(RecoverError::Damaged { log, from: end, promised, malformed })
        }
        _ => Ok(Verdict { end, promised, epoch, records }),
    }
}

struct Reader {
    log: u16,
    geometry: Geometry,
    end: Lsn,
    promised: Lsn,
    epoch: u32,
    records: Vec<(Lsn, RecordKind, u64)>,
}

impl Reader {
    fn is_ours(&self, header: &SegmentHeader) -> bool {
        let Geometry { store, block_bytes, segment_bytes } = self.geometry;
        (header.store, header.log) == (store, self.log)
            && (header.segment_bytes, header.block_bytes as usize) == (segment_bytes, block_bytes.get())
    }

    /// What batches of segments up to `last` say.
    fn promised_in(&self, place: &[u8], last: u64) -> Lsn {
        let mut promised = Lsn(0);
        for at in (0..place.len()).step_by(self.geometry.block_bytes.get()) {
            if let Ok(header) = BatchHeader::decode(&place[at..])
                && (header.store, header.log) == (self.geometry.store, self.log)
                && header.lsn.0 % self.geometry.segment_bytes == at as u64
                && header.lsn.0 / self.geometry.segment_bytes <= last
                && header.promised <= header.lsn
            {
                promised = promised.max(header.promised);
            }
        }
        promised
    }

    fn follow(&mut self, number: u64, segment: &[u8]) -> Result<(), Malformed> {
        loop {
            let at = (self.end.0 - number * self.geometry.segment_bytes) as usize;
            let batch = Batch::decode(segment.get(at..).unwrap_or_default())?;
            let header = batch.header;
            if (header.store, header.log, header.lsn) != (self.geometry.store, self.log, self.end) {
                return Err(Malformed::Magic);
            }
            if header.epoch < self.epoch {
                return Err(Malformed::Content);
            }
            let records = batch.records().collect::<Result<Vec<_>, _>>()?;
            self.records.extend(records.into_iter().map(|(lsn, record)| (lsn, record.kind, record.version)));
            self.epoch = header.epoch;
            self.promised = self.promised.max(header.promised);
            self.end.0 += header.total_bytes(self.geometry.block_bytes) as u64;
            if header.ends_segment {
                self.end = Lsn((number + 1) * self.geometry.segment_bytes);
                return Ok(());
            }
        }
    }
}

/// A record of a key as a whole.
struct Base {
    origin: Origin,
    bytes: u64,
    is_gone: bool,
    value: Vec<u8>,
    expires_ms: Option<u64>,
}

/// Holds a store against the records of its logs: of each key the newest one counts, and the others are counted. What each segment
/// has that counts is looked at, too. A store with cells is not held against anything here.
pub(crate) fn compare(store: &Store, shards: &[Shard], found: &[Found], media: &[Medium]) {
    let flushed = found.iter().map(Found::flushed).max().unwrap_or_default();
    let mut bases: BTreeMap<Vec<u8>, Vec<Base>> = BTreeMap::new();
    let (mut flush, mut has_cells) = (None, false);
    for (found, medium) in found.iter().zip(media) {
        let take = |lsn, record: Record<'_>| {
            let origin = Origin { log: found.log(), lsn, version: record.version };
            let bytes = record.encoded_bytes() as u64;
            match record.kind {
                _ if record.version < flushed => {}
                RecordKind::Flush => flush = Some((origin, bytes)),
                RecordKind::String | RecordKind::Drop => {
                    let (is_gone, value) = (record.kind == RecordKind::Drop, record.value.to_vec());
                    let base = Base { origin, bytes, is_gone, value, expires_ms: record.expires_ms };
                    bases.entry(record.key.to_vec()).or_default().push(base);
                }
                _ => has_cells = true,
            }
        };
        found.records(medium, take).unwrap();
    }
    assert_eq!(store.flushed(), flushed);
    if has_cells {
        return;
    }
    let mut live: BTreeMap<(u16, u64), u64> = BTreeMap::new();
    let mut count = |origin: Origin, bytes| {
        let segment = found[usize::from(origin.log)].geometry().segment_of(origin.lsn);
        *live.entry((origin.log, segment)).or_default() += bytes;
    };
    flush.into_iter().for_each(|(origin, bytes)| count(origin, bytes));
    let mut keys = 0;
    store.index().scan(b"", |entry| {
        let key = entry.key.escape_ascii();
        let all = bases.remove(entry.key).unwrap_or_default();
        let older = (all.len() as u32 - 1).min(OLDER_MAX);
        // Of those with one version, the one that was read last.
        let newest = all.into_iter().max_by_key(|base| base.origin.version).unwrap();
        assert_eq!((entry.origin, entry.older), (newest.origin, older), "{key}");
        assert_eq!(entry.expires_ms, newest.expires_ms, "{key}");
        match entry.value {
            Value::Here(value) => assert!(!newest.is_gone && value == newest.value, "{key}"),
            Value::OnMedium(bytes) => assert!(!newest.is_gone && bytes as usize == newest.value.len(), "{key}"),
            Value::Gone => assert!(newest.is_gone, "{key}"),
            Value::Cells(_) => panic!("{key} has cells"),
        }
        keys += usize::from(!newest.is_gone);
        if !newest.is_gone || older > 0 {
            count(newest.origin, newest.bytes);
        }
        true
    });
    assert!(bases.is_empty(), "the index lacks keys");
    assert_eq!(store.keys(), keys);
    for shard in shards {
        for (number, segment) in shard.log().segments() {
            let counts = live.remove(&(shard.number(), *number)).unwrap_or_default();
            assert_eq!(segment.live_bytes, counts, "segment {number} of log {}", shard.number());
        }
    }
    assert!(live.is_empty(), "records count that are in no segment: {live:?}");
}
