//! What a store finds when it starts: how far each log is whole, what was torn, what is damaged.
//!
//! ```text
//!   headers of all places ─► segments ─► chain of batches ─► end of the log ─► cut by links ─► records
//!                                           │
//!                                           └ broken: torn tail if nothing behind was durable, else damage
//! ```
//!
//! What a start takes for cut must be cut at every later start, too: [`Found::repairs`] says what makes it so.
//!
//! A batch tells how far replies had told of its log when it was made ([`BatchHeader::promised`]). So bytes that make no
//! sense are a torn tail, which nobody was told of, only if no batch anywhere in the log says that they were. A log that is
//! idle, or ends, says it by a batch without records ([`Log::say`]).

mod read;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use crate::format::{
    Batch, BatchBuilder, BatchHeader, Link, Lsn, Malformed, Record, RecordKind, SegmentHeader, Standing,
};
use crate::index::leaf::PACKED_BYTES_MAX;
use crate::log::{Geometry, Log, Segment};

/// The medium of one log, as recovery reads it, on several threads. A place that was never written reads as zeros.
pub trait Places: Sync {
    /// Number of places.
    fn places(&self) -> u32;

    /// Reads a whole place: one segment.
    ///
    /// # Errors
    ///
    /// The medium cannot be read; the store does not start.
    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()>;

    /// Reads at least the first `bytes` bytes of a place.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    fn read_front(&self, place: u32, bytes: usize, into: &mut Vec<u8>) -> std::io::Result<()> {
        let _ = bytes;
        self.read(place, into)
    }

    /// A place will be read as a whole soon: the medium may begin with that. What fails is told by the read.
    fn ahead(&self, place: u32) {
        let _ = place;
    }
}

/// Why a store cannot start. Nothing was changed on its media.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// The medium cannot be read.
    #[error("place {place} of log {log} cannot be read: {source}")]
    Unreadable {
        /// The log.
        log: u16,
        /// The place.
        place: u32,
        /// What the medium said.
        source: std::io::Error,
    },
    /// Data that was acknowledged is damaged.
    #[error(
        "log {log} is damaged from byte {} on: {malformed}, and it was acknowledged up to byte {}; \
         restore a backup, or give up what is behind with `salvage`", .from.0, .promised.0
    )]
    Damaged {
        /// The log.
        log: u16,
        /// The first byte that cannot be read.
        from: Lsn,
        /// How far replies may have told of the log.
        promised: Lsn,
        /// What is wrong there.
        malformed: Malformed,
    },
    /// A segment that counts is not there.
    #[error(
        "segment {number} of log {log} is missing or has a damaged header; restore a backup, or give it up with `salvage`"
    )]
    Missing {
        /// The log.
        log: u16,
        /// The segment.
        number: u64,
    },
    /// A whole header names another log, another store or other sizes: the file, or the superblock, is another one's.
    #[error(
        "place {place} of log {log} of store {:016x} has a segment of {} bytes that belongs to log {} of store {:016x}",
        .ours.store, .header.segment_bytes, .header.log, .header.store
    )]
    Foreign {
        /// The log.
        log: u16,
        /// The place.
        place: u32,
        /// What the logs of this store have in common.
        ours: Geometry,
        /// The header.
        header: Box<SegmentHeader>,
    },
    /// Two places say that they are the same segment.
    #[error("places {} and {} of log {log} are both segment {number}: files of another store?", .places.0, .places.1)]
    Twice {
        /// The log.
        log: u16,
        /// The segment.
        number: u64,
        /// The places.
        places: (u32, u32),
    },
    /// A log depends on what an other one no longer has.
    #[error(
        "log {log} was acknowledged up to byte {}, and its batch at byte {} depends on byte {} of log {}, which is not there",
        .promised.0, .batch.0, .link.lsn.0, .link.log
    )]
    Lost {
        /// The log.
        log: u16,
        /// The batch.
        batch: Lsn,
        /// How far replies may have told of the log.
        promised: Lsn,
        /// What it depends on.
        link: Link,
    },
}

/// A log whose segments were read: what is in them is read again when it is needed.
#[derive(Clone, Debug)]
pub struct Found {
    log: u16,
    geometry: Geometry,
    segments: BTreeMap<u64, FoundSegment>,
    /// Places without a segment.
    unused: Vec<u32>,
    /// Each batch of the chain, in order.
    batches: Vec<FoundBatch>,
    /// How far replies may have told of it.
    promised: Lsn,
    epoch: u32,
    end: Lsn,
    /// Where the header of a batch lies at the end that does not count, whole or torn.
    cut_batch: Option<Lsn>,
    /// What must be written before anything else was told.
    repaired: bool,
    /// Keys of some of its records, from all over the log.
    samples: Vec<Box<[u8]>>,
}

/// A write that must be on the medium before anything else is written to any log of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The place of the segment on the medium.
    pub place: u32,
    /// Where in the place: a multiple of the block size.
    pub offset: u64,
    /// Whole blocks.
    pub bytes: Vec<u8>,
}

/// What the header of the segment that was begun last says.
#[derive(Debug, Default)]
struct Newest {
    number: u64,
    epoch: u32,
    live: Option<Vec<u64>>,
}

impl Newest {
    fn see(&mut self, header: &SegmentHeader) {
        // Also if its list was not written whole: the place of one that the earlier lists name may have become its own.
        if header.standing != Standing::Cleaned && (header.epoch, header.number) >= (self.epoch, self.number) {
            *self = Self { number: header.number, epoch: header.epoch, live: header.live.clone() };
        }
    }
}

#[derive(Clone, Debug)]
struct FoundSegment {
    place: u32,
    epoch: u32,
    live: Option<Vec<u64>>,
}

#[derive(Clone, Debug)]
struct FoundBatch {
    lsn: Lsn,
    end: Lsn,
    epoch: u32,
    /// Where the next one begins: behind this one, or in the next segment.
    next: Lsn,
    links: Vec<Link>,
    /// The checksum of its body: who reads it again knows by it that it is the one whose records were checked.
    body_crc: u32,
    content: Content,
}

/// What records there are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Content {
    pub(crate) records: u64,
    /// Bytes of all of them, and of the longest one.
    pub(crate) record_bytes: u64,
    pub(crate) longest_bytes: u64,
    /// The largest version.
    pub(crate) version: u64,
    /// The version of the last flush; 0 without one.
    pub(crate) flushed: u64,
    /// Bytes of the strings that have memory of their own.
    pub(crate) apart_bytes: u64,
    /// Records of cells.
    pub(crate) cells: u64,
}

impl Content {
    fn see(&mut self, record: &Record<'_>) {
        let bytes = record.encoded_bytes() as u64;
        self.records += 1;
        (self.record_bytes, self.longest_bytes) = (self.record_bytes + bytes, self.longest_bytes.max(bytes));
        self.version = self.version.max(record.version);
        match record.kind {
            RecordKind::Flush => self.flushed = self.flushed.max(record.version),
            RecordKind::String | RecordKind::Drop => {
                let value_bytes = record.value.len();
                self.apart_bytes += if value_bytes > PACKED_BYTES_MAX { value_bytes as u64 } else { 0 };
            }
            RecordKind::Field
            | RecordKind::Member
            | RecordKind::Element
            | RecordKind::Scored
            | RecordKind::Remove
            | RecordKind::Expire => self.cells += 1,
        }
    }

    fn and(self, other: &Self) -> Self {
        Self {
            records: self.records + other.records,
            record_bytes: self.record_bytes + other.record_bytes,
            longest_bytes: self.longest_bytes.max(other.longest_bytes),
            version: self.version.max(other.version),
            flushed: self.flushed.max(other.flushed),
            apart_bytes: self.apart_bytes + other.apart_bytes,
            cells: self.cells + other.cells,
        }
    }

    fn of(batches: &[FoundBatch]) -> Self {
        batches.iter().fold(Self::default(), |sum, batch| sum.and(&batch.content))
    }
}

/// What counts of one segment of a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'f> {
    found: &'f Found,
    pub(crate) number: u64,
    batches: &'f [FoundBatch],
    pub(crate) content: Content,
}

impl Piece<'_> {
    /// The log.
    pub(crate) fn log(&self) -> u16 {
        self.found.log
    }

    /// The place of the segment.
    pub(crate) fn place(&self) -> u32 {
        self.found.segments.get(&self.number).map_or(0, |place| place.place)
    }

    /// Every record with its place, in order. The batches are those that were read before, so their checksums stand for those
    /// of the records.
    pub(crate) fn read(
        &self,
        medium: &impl Places,
        bytes: &mut Vec<u8>,
        mut take: impl FnMut(Lsn, Record<'_>),
    ) -> Result<(), RecoverError> {
        let Found { log, geometry, promised, .. } = *self.found;
        let place = self.place();
        medium.read(place, bytes).map_err(|source| RecoverError::Unreadable { log, place, source })?;
        // One that has none may have been written over what was read.
        for found in self.batches.iter().filter(|batch| batch.content.records > 0) {
            let from = found.lsn;
            let damaged = |malformed| RecoverError::Damaged { log, from, promised, malformed };
            let batch = batch_of(geometry, log, self.number, from, bytes).map_err(damaged)?;
            if batch.header.body_crc != found.body_crc {
                return Err(damaged(Malformed::DataChecksum));
            }
            for record in batch.known_records() {
                let (lsn, record) = record.map_err(damaged)?;
                take(lsn, record);
            }
        }
        Ok(())
    }
}

impl Found {
    fn new(log: u16, geometry: Geometry) -> Self {
        Self {
            log,
            geometry,
            segments: BTreeMap::new(),
            unused: Vec::new(),
            batches: Vec::new(),
            promised: Lsn::default(),
            epoch: 0,
            end: Lsn::default(),
            cut_batch: None,
            repaired: false,
            samples: Vec::new(),
        }
    }

    /// A log whose places were just made, and are all zeros.
    pub fn of_new(log: u16, geometry: Geometry, places: u32) -> Self {
        Self { unused: (0..places).collect(), ..Self::new(log, geometry) }
    }

    /// Reads a log, and finds the end of its chain of batches.
    ///
    /// # Errors
    ///
    /// The medium cannot be read, or data that was acknowledged is damaged.
    pub fn read(log: u16, geometry: Geometry, medium: &impl Places) -> Result<Self, RecoverError> {
        let found = read::read_logs(geometry, &[(log, medium)], NonZeroUsize::MIN)?;
        Ok(found.into_iter().next().unwrap_or_else(|| Self::new(log, geometry)))
    }

    /// Reads all logs of a store on so many threads, from log 0 on. What is found, and the error, are those of [`read`](Self::read) of
    /// one log after the other.
    ///
    /// Each thread has one segment in memory.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read), of the first log that has one.
    pub fn read_all<M: Places>(
        geometry: Geometry,
        media: &[M],
        threads: NonZeroUsize,
    ) -> Result<Vec<Self>, RecoverError> {
        let media: Vec<(u16, &M)> = (0..).zip(media).collect();
        read::read_logs(geometry, &media, threads)
    }

    /// Its segments of which something counts, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let number_of = |batch: &FoundBatch| self.geometry.segment_of(batch.lsn);
        self.batches.chunk_by(move |one, next| number_of(one) == number_of(next)).map(move |batches| {
            let number = batches.first().map_or(0, number_of);
            Piece { found: self, number, batches, content: Content::of(batches) }
        })
    }

    /// Keys of some of its records.
    pub(crate) fn samples(&self) -> &[Box<[u8]>] {
        &self.samples
    }

    /// What all of it has.
    pub(crate) fn content(&self) -> Content {
        Content::of(&self.batches)
    }

    /// Records in it, those that are out of date among them.
    pub fn record_count(&self) -> u64 {
        self.content().records
    }

    /// Bytes of its batches: what there was to be read of it.
    pub fn batch_bytes(&self) -> u64 {
        self.batches.iter().map(|batch| batch.end.0 - batch.lsn.0).sum()
    }

    /// Every record of the log with its place, in order: the medium is read once more.
    ///
    /// # Errors
    ///
    /// The medium cannot be read, or has become another one since.
    pub fn records(&self, medium: &impl Places, mut take: impl FnMut(Lsn, Record<'_>)) -> Result<(), RecoverError> {
        let mut bytes = Vec::new();
        let mut pieces = self.pieces().filter(|piece| piece.content.records > 0);
        pieces.try_for_each(|piece| piece.read(medium, &mut bytes, &mut take))
    }

    /// What it has in common with the other logs of its store.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The version of its last flush, 0 without one: no record of a smaller version counts, in any log of the store.
    pub fn flushed(&self) -> u64 {
        self.content().flushed
    }

    /// The number of the log.
    pub fn log(&self) -> u16 {
        self.log
    }

    /// The end of the log.
    pub fn end(&self) -> Lsn {
        self.end
    }

    /// The LSN behind the last batch, at which the log goes on: all before must be there at every later start.
    pub fn reached(&self) -> Lsn {
        self.batches.last().map_or(Lsn::default(), |batch| batch.next)
    }

    /// How far replies may have told of the log, as far as it says so itself.
    pub fn promised(&self) -> Lsn {
        self.promised
    }

    /// The epoch of the last batch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What was cut, and would be read again at a later start: these writes take it away. They go to the medium one after
    /// the other, each durable before the next. Only then may anything be written to a log of the store, this one or
    /// another one: what another log has become by then may look like what the cut batches saw.
    pub fn repairs(&mut self, epoch: u32) -> Vec<Repair> {
        self.repaired = true;
        let last = self.last_segment();
        // The last one first: a crash in between must not leave one without those before it.
        let begun = self.segments.iter().rev().take_while(|(number, _)| last.is_none_or(|last| **number > last));
        let given_up = begun.map(|(number, place)| {
            let header = SegmentHeader {
                store: self.geometry.store,
                log: self.log,
                number: *number,
                // It keeps its epoch, so that its list is not taken for newer than that of the segment that is begun again.
                epoch: place.epoch,
                segment_bytes: self.geometry.segment_bytes,
                block_bytes: self.geometry.block_bytes.get() as u32,
                standing: Standing::GivenUp,
                live: place.live.clone(),
            };
            Repair { place: place.place, offset: 0, bytes: header.encode() }
        });
        let mut repairs: Vec<Repair> = given_up.collect();
        repairs.extend(self.overwrite_cut_batch(epoch));
        repairs
    }

    /// An empty batch in the place of the one that was cut, if the header of one lies there.
    fn overwrite_cut_batch(&mut self, epoch: u32) -> Option<Repair> {
        let lsn = self.batches.last()?.next;
        let number = self.geometry.segment_of(lsn);
        self.cut_batch.filter(|cut| *cut == lsn && Some(number) == self.last_segment())?;
        let block_bytes = self.geometry.block_bytes;
        let next_segment = Lsn((number + 1) * self.geometry.segment_bytes);
        let header = BatchHeader {
            store: self.geometry.store,
            log: self.log,
            lsn,
            promised: lsn,
            epoch,
            records: 0,
            links: 0,
            body_bytes: 0,
            body_crc: 0,
            time_ns: 0,
            // A segment that goes on needs another block to end with.
            ends_segment: lsn.0 + 2 * block_bytes.get() as u64 > next_segment.0,
        };
        let (header, bytes) = BatchBuilder::new(Vec::new()).finish(header, block_bytes);
        let offset = lsn.0 % self.geometry.segment_bytes;
        let place = self.segments.get(&number)?.place;
        let end = Lsn(lsn.0 + bytes.len() as u64);
        let next = if header.ends_segment { next_segment } else { end };
        let (links, body_crc, content) = (Vec::new(), header.body_crc, Content::default());
        self.batches.push(FoundBatch { lsn, end, epoch, next, links, body_crc, content });
        (self.end, self.epoch, self.cut_batch) = (next, epoch, None);
        Some(Repair { place, offset, bytes })
    }

    /// The last segment of which something counts.
    fn last_segment(&self) -> Option<u64> {
        self.batches.last().map(|batch| self.geometry.segment_of(batch.lsn))
    }

    /// The log, to be appended to: what is behind its end is overwritten. It takes nothing if nobody asked for its
    /// [repairs](Self::repairs).
    pub fn into_log(self, epoch: u32) -> Log {
        let mut segments = BTreeMap::new();
        let mut free = self.unused.clone();
        let last = self.last_segment();
        let contents: BTreeMap<u64, Content> = self.pieces().map(|piece| (piece.number, piece.content)).collect();
        for (number, place) in &self.segments {
            // A segment that was begun, and of which nothing counts, is begun again elsewhere.
            if last.is_some_and(|last| *number <= last) {
                let content = contents.get(number).copied().unwrap_or_default();
                segments.insert(*number, Segment::in_use(place.place, content.record_bytes, content.longest_bytes));
            } else {
                free.push(place.place);
            }
        }
        let end = self.reached();
        let recorded =
            self.batches.iter().rfind(|batch| batch.content.record_bytes > 0).map_or(Lsn::default(), |batch| batch.end);
        let log = Log::open(self.geometry, self.log, epoch, segments, free, end).having_said(recorded, self.promised);
        if self.repaired { log } else { log.without_writes() }
    }
}

/// The header at the front of a place; `None` if no whole one of this log is there.
///
/// # Errors
///
/// [`RecoverError::Foreign`]. A place has zeros, or headers of its own log, from its beginning on: no crash leaves such a header.
pub(crate) fn header_at(
    geometry: Geometry,
    log: u16,
    place: u32,
    front: &[u8],
) -> Result<Option<SegmentHeader>, RecoverError> {
    let Ok(header) = SegmentHeader::decode(front) else { return Ok(None) };
    let sizes = (geometry.segment_bytes, geometry.block_bytes.get());
    if (header.store, header.log) != (geometry.store, log)
        || (header.segment_bytes, header.block_bytes as usize) != sizes
    {
        return Err(RecoverError::Foreign { log, place, ours: geometry, header: Box::new(header) });
    }
    // No log is ever so long that the end of a segment is no number.
    Ok((header.number < u64::MAX / geometry.segment_bytes - 1).then_some(header))
}

/// The batch at this place of a log, in the bytes of its segment.
fn batch_of(geometry: Geometry, log: u16, number: u64, lsn: Lsn, bytes: &[u8]) -> Result<Batch<'_>, Malformed> {
    let offset = (lsn.0 - number * geometry.segment_bytes) as usize;
    let batch = Batch::decode(bytes.get(offset..).unwrap_or_default())?;
    let header = &batch.header;
    // Not one that was left by what was there before.
    let is_here = (header.store, header.log, header.lsn) == (geometry.store, log, lsn);
    if is_here { Ok(batch) } else { Err(Malformed::Magic) }
}

/// The header of a batch at this place of a log, whose body may not be whole.
fn header_of(geometry: Geometry, log: u16, number: u64, lsn: Lsn, bytes: &[u8]) -> Option<BatchHeader> {
    let offset = (lsn.0 - number * geometry.segment_bytes) as usize;
    let header = BatchHeader::decode(bytes.get(offset..)?).ok()?;
    ((header.store, header.log, header.lsn) == (geometry.store, log, lsn)).then_some(header)
}

/// The batch at this place of a segment, of which the front was read; `None` if there is none.
pub(crate) fn batch_in(geometry: Geometry, log: u16, lsn: Lsn, segment: &[u8]) -> Option<Batch<'_>> {
    let batch = Batch::decode(segment.get((lsn.0 % geometry.segment_bytes) as usize..)?).ok()?;
    let header = &batch.header;
    ((header.store, header.log, header.lsn) == (geometry.store, log, lsn)).then_some(batch)
}

/// Cuts the logs of a store so that none depends on what another one no longer has.
///
/// A batch links only to what was written since the same start, so the other log as it has grown since another one is not
/// what it saw. Of a segment that was cleaned nobody can tell: [`Found::repairs`] takes away what was cut before anything
/// is written that could be cleaned.
///
/// # Errors
///
/// [`RecoverError::Lost`]: replies may have told of what would be cut.
pub fn cut_by_links(logs: &mut [Found]) -> Result<(), RecoverError> {
    loop {
        let cuts: Vec<_> = logs.iter().map(|found| first_without_ground(found, logs)).collect();
        if cuts.iter().all(Option::is_none) {
            return Ok(());
        }
        for (found, cut) in logs.iter_mut().zip(cuts) {
            let Some((first, link)) = cut else { continue };
            let (log, promised, batch) = (found.log, found.promised, found.batches[first].lsn);
            if promised > batch {
                return Err(RecoverError::Lost { log, batch, promised, link });
            }
            found.end = batch;
            found.cut_batch = Some(batch);
            found.batches.truncate(first);
        }
    }
}

/// The first batch of a log with a link to what is not there.
fn first_without_ground(found: &Found, logs: &[Found]) -> Option<(usize, Link)> {
    let is_there = |epoch: u32, link: &Link| {
        let Some(other) = logs.iter().find(|other| other.log == link.log) else { return false };
        let at = other.batches.partition_point(|batch| batch.end < link.lsn);
        let Some(seen) = other.batches.get(at) else { return false };
        // What was cleaned had been promised before.
        let is_cleaned = !other.segments.contains_key(&other.geometry.segment_of(link.lsn));
        is_cleaned || seen.epoch == epoch && seen.lsn < link.lsn
    };
    let lost = |batch: &FoundBatch| batch.links.iter().find(|link| !is_there(batch.epoch, link)).copied();
    found.batches.iter().enumerate().find_map(|(at, batch)| Some((at, lost(batch)?)))
}
