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
//! sense are a torn tail, which nobody was told of, only if no batch anywhere in the log says that they were.

use std::collections::BTreeMap;

use crate::format::{Batch, BatchBuilder, BatchHeader, Kind, Link, Lsn, Malformed, Record, SegmentHeader, Standing};
use crate::log::{Geometry, Log, Segment};

/// The medium of one log, as recovery reads it. A place that was never written reads as zeros.
pub trait Places {
    /// Number of places.
    fn places(&self) -> u32;

    /// Reads a whole place: one segment.
    ///
    /// # Errors
    ///
    /// The medium cannot be read; the store does not start.
    fn read(&mut self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()>;

    /// Reads at least the first `bytes` bytes of a place.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    fn read_front(&mut self, place: u32, bytes: usize, into: &mut Vec<u8>) -> std::io::Result<()> {
        let _ = bytes;
        self.read(place, into)
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

/// A log whose segments were read, one after the other: what is in them is read again when it is needed.
#[derive(Debug)]
pub struct Found {
    log: u16,
    geometry: Geometry,
    segments: BTreeMap<u64, Place>,
    /// Places without a segment.
    unused: Vec<u32>,
    /// Each batch of the chain, in order.
    batches: Vec<FoundBatch>,
    /// How far replies may have told of it.
    promised: Lsn,
    epoch: u32,
    end: Lsn,
    /// Where a whole batch lies behind the end that does not count.
    cut_batch: Option<Lsn>,
    /// What must be written before anything else was told.
    repaired: bool,
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

#[derive(Debug)]
struct Place {
    place: u32,
    epoch: u32,
    live: Option<Vec<u64>>,
}

#[derive(Debug)]
struct FoundBatch {
    lsn: Lsn,
    end: Lsn,
    epoch: u32,
    /// Where the next one begins: behind this one, or in the next segment.
    next: Lsn,
    links: Vec<Link>,
    /// The version of the last flush in it; 0 without one.
    flushed: u64,
    /// Bytes of its records, and of the longest one.
    record_bytes: u64,
    longest_bytes: u64,
}

impl Found {
    /// Reads a log, and finds the end of its chain of batches.
    ///
    /// # Errors
    ///
    /// The medium cannot be read, or data that was acknowledged is damaged.
    pub fn read(log: u16, geometry: Geometry, medium: &mut impl Places) -> Result<Self, RecoverError> {
        let mut found = Self {
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
        };
        // The list of the segment that was begun last, also if that one was given up: it knows what was erased before.
        let mut newest = Newest::default();
        let (mut erased, mut bytes) = (Vec::new(), Vec::new());
        for place in 0..medium.places() {
            let unreadable = |source| RecoverError::Unreadable { log, place, source };
            medium.read_front(place, geometry.block_bytes.get(), &mut bytes).map_err(unreadable)?;
            let header = SegmentHeader::decode(&bytes).ok().filter(|header| found.is_ours(header));
            if let Some(header) = &header {
                newest.see(header);
            }
            match header {
                Some(SegmentHeader { number, epoch, live, standing: Standing::Counts, .. }) => {
                    if let Some(other) = found.segments.insert(number, Place { place, epoch, live }) {
                        return Err(RecoverError::Twice { log, number, places: (other.place, place) });
                    }
                }
                Some(header) => {
                    if header.standing == Standing::Cleaned {
                        erased.push(header.number);
                    }
                    found.unused.push(place);
                }
                None => {
                    // A header that is damaged must not hide what the batches behind it know.
                    medium.read(place, &mut bytes).map_err(unreadable)?;
                    found.promised = found.promised.max(found.promised_in(&bytes));
                    found.unused.push(place);
                }
            }
        }
        found.follow(medium, &newest, &erased)?;
        Ok(found)
    }

    fn is_ours(&self, header: &SegmentHeader) -> bool {
        let geometry = &self.geometry;
        let same = (header.store, header.log) == (geometry.store, self.log);
        // No log is ever so long that the end of a segment is no number.
        let is_possible = header.number < u64::MAX / geometry.segment_bytes - 1;
        same && is_possible
            && (header.segment_bytes, header.block_bytes as usize)
                == (geometry.segment_bytes, geometry.block_bytes.get())
    }

    /// Follows the chain of batches through the segments, up to the first thing that makes no sense.
    fn follow(&mut self, medium: &mut impl Places, newest: &Newest, erased: &[u64]) -> Result<(), RecoverError> {
        let named = newest.live.iter().flatten();
        let missing = named.copied().find(|number| !self.segments.contains_key(number) && !erased.contains(number));
        let numbers: Vec<u64> = self.segments.keys().copied().collect();
        // How far any batch, also one behind the end of the chain, says that replies had told of the log.
        let (mut promised_anywhere, mut followed) = (self.promised, 0);
        let (mut broken, mut bytes) = (None, Vec::new());
        for (at, number) in numbers.iter().enumerate() {
            if self.segments[number].live.is_none() && at + 1 == numbers.len() {
                broken = Some(Malformed::HeaderChecksum);
                self.end = self.end.max(Lsn(number * self.geometry.segment_bytes));
                break;
            }
            if missing.is_some_and(|missing| missing < *number) {
                break;
            }
            self.end = self.geometry.first_batch(*number);
            self.epoch = self.epoch.max(self.segments[number].epoch);
            self.read_segment(medium, *number, &mut bytes)?;
            promised_anywhere = promised_anywhere.max(self.promised_in(&bytes));
            followed = at + 1;
            if let Err(malformed) = self.follow_segment(*number, &bytes) {
                broken = Some(malformed);
                break;
            }
        }
        for number in &numbers[followed..] {
            self.read_segment(medium, *number, &mut bytes)?;
            promised_anywhere = promised_anywhere.max(self.promised_in(&bytes));
        }
        let is_cut = broken.is_some() || missing.is_some();
        let promised = if is_cut { promised_anywhere.max(self.promised) } else { self.promised };
        let log = self.log;
        if let Some(number) = missing
            && promised > self.geometry.first_batch(number)
        {
            return Err(RecoverError::Missing { log, number });
        }
        if promised > self.end {
            let malformed = broken.unwrap_or(Malformed::HeaderChecksum);
            return Err(RecoverError::Damaged { log, from: self.end, promised, malformed });
        }
        self.promised = promised;
        Ok(())
    }

    /// Follows the chain to the end of a segment.
    ///
    /// # Errors
    ///
    /// What stands behind the last batch, at [`Found::end`].
    fn follow_segment(&mut self, number: u64, bytes: &[u8]) -> Result<(), Malformed> {
        let geometry = self.geometry;
        loop {
            let batch = batch_of(geometry, self.log, number, self.end, bytes)?;
            // Until all of it was looked at.
            self.cut_batch = Some(self.end);
            if batch.header.epoch < self.epoch {
                // A start cut the log before this batch of an earlier one.
                return Err(Malformed::Content);
            }
            let (mut flushed, mut record_bytes, mut longest_bytes) = (0, 0, 0_u64);
            for record in batch.records() {
                let (_, record) = record?;
                let bytes = record.encoded_bytes() as u64;
                (record_bytes, longest_bytes) = (record_bytes + bytes, longest_bytes.max(bytes));
                if record.kind == Kind::Flush {
                    flushed = record.version.max(flushed);
                }
            }
            let header = batch.header;
            let links = batch.links().collect();
            let lsn = self.end;
            self.cut_batch = None;
            self.end = Lsn(lsn.0 + header.total_bytes(geometry.block_bytes) as u64);
            self.epoch = header.epoch;
            self.promised = self.promised.max(header.promised);
            let next_segment = Lsn((number + 1) * geometry.segment_bytes);
            let next = if header.ends_segment { next_segment } else { self.end };
            let (end, epoch) = (self.end, header.epoch);
            self.batches.push(FoundBatch { lsn, end, epoch, next, links, flushed, record_bytes, longest_bytes });
            if header.ends_segment {
                self.end = next;
                return Ok(());
            }
        }
    }

    /// The bytes of a segment.
    fn read_segment(&self, medium: &mut impl Places, number: u64, into: &mut Vec<u8>) -> Result<(), RecoverError> {
        let place = self.segments.get(&number).map_or(0, |place| place.place);
        let log = self.log;
        medium.read(place, into).map_err(|source| RecoverError::Unreadable { log, place, source })
    }

    /// How far any batch in a place, also one that was left by an earlier segment, says that replies had told of the log.
    fn promised_in(&self, place: &[u8]) -> Lsn {
        let block_bytes = self.geometry.block_bytes.get();
        let headers = (0..place.len()).step_by(block_bytes).filter_map(|at| {
            let header = BatchHeader::decode(&place[at..]).ok()?;
            let is_ours = (header.store, header.log) == (self.geometry.store, self.log);
            let is_here = header.lsn.0 % self.geometry.segment_bytes == at as u64;
            (is_ours && is_here).then_some(header.promised)
        });
        headers.max().unwrap_or_default()
    }

    /// Every record of the log with its place, in order: the medium is read once more.
    ///
    /// # Errors
    ///
    /// The medium cannot be read, or has become another one since.
    pub fn records(&self, medium: &mut impl Places, mut take: impl FnMut(Lsn, Record<'_>)) -> Result<(), RecoverError> {
        let (mut bytes, mut read) = (Vec::new(), None);
        // One that has none may have been written over what was read.
        for found in self.batches.iter().filter(|batch| batch.record_bytes > 0) {
            let number = self.geometry.segment_of(found.lsn);
            if read != Some(number) {
                self.read_segment(medium, number, &mut bytes)?;
                read = Some(number);
            }
            let (log, from, promised) = (self.log, found.lsn, self.promised);
            let damaged = |malformed| RecoverError::Damaged { log, from, promised, malformed };
            let batch = batch_of(self.geometry, log, number, from, &bytes).map_err(damaged)?;
            for record in batch.records() {
                let (lsn, record) = record.map_err(damaged)?;
                take(lsn, record);
            }
        }
        Ok(())
    }

    /// What it has in common with the other logs of its store.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The version of its last flush, 0 without one: no record of a smaller version counts, in any log of the store.
    pub fn flushed(&self) -> u64 {
        self.batches.iter().map(|batch| batch.flushed).max().unwrap_or_default()
    }

    /// The number of the log.
    pub fn log(&self) -> u16 {
        self.log
    }

    /// The end of the log.
    pub fn end(&self) -> Lsn {
        self.end
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

    /// An empty batch in the place of the one that was cut, if a whole one lies there.
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
        let (links, flushed, record_bytes, longest_bytes) = (Vec::new(), 0, 0, 0);
        self.batches.push(FoundBatch { lsn, end, epoch, next, links, flushed, record_bytes, longest_bytes });
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
        for (number, place) in &self.segments {
            // A segment that was begun, and of which nothing counts, is begun again elsewhere.
            if last.is_some_and(|last| *number <= last) {
                let (bytes, longest) = self.record_bytes(*number);
                segments.insert(*number, Segment::in_use(place.place, bytes, longest));
            } else {
                free.push(place.place);
            }
        }
        let end = self.batches.last().map_or(Lsn::default(), |batch| batch.next);
        let log = Log::open(self.geometry, self.log, epoch, segments, free, end);
        if self.repaired { log } else { log.without_writes() }
    }

    /// The bytes of all records of a segment, and of the longest one.
    fn record_bytes(&self, number: u64) -> (u64, u64) {
        let from = self.batches.partition_point(|batch| self.geometry.segment_of(batch.lsn) < number);
        let batches = self.batches[from..].iter();
        let batches = batches.take_while(|batch| self.geometry.segment_of(batch.lsn) == number);
        batches.fold((0, 0), |(sum, longest), batch| (sum + batch.record_bytes, batch.longest_bytes.max(longest)))
    }
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
