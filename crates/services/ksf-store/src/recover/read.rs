//! Reading logs on several threads.
//!
//! ```text
//!   headers of all places ─► each place by itself: Scan    on all threads, one after the other ahead of them
//!                                  │
//!                                  ▼ of each log, in the order of its segments
//!                            the end, and what is wrong there
//! ```
//!
//! Most of what a start checks concerns a segment alone: checksums, places, the records of its batches. What needs the log in
//! order is little: where the chain of batches breaks first, whether epochs grow from segment to segment, and how far
//! replies had told. So each segment is followed by itself, and the results are put together as if one thread had read the
//! whole log: also which error is told.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::vec;

use super::{Content, Found, FoundBatch, FoundSegment, Newest, Places, RecoverError, batch_of, header_at, header_of};
use crate::format::{Batch, BatchHeader, Lsn, Malformed, SegmentHeader, Standing};
use crate::log::Geometry;
use crate::threads::try_map_on_threads;

/// What the first block of a place says: nothing, if it is no header.
type Header = Result<Option<SegmentHeader>, RecoverError>;

/// A place to be read as a whole.
#[derive(Clone, Copy, Debug)]
struct Task {
    /// Which of the logs.
    at: usize,
    place: u32,
    /// The number of its segment, and the epoch in which that was begun. Without one, batches that are left there are looked for.
    segment: Option<(u64, u32)>,
}

/// Reads logs, of which each has its number, and finds the end of each chain of batches.
pub(super) fn read_logs<M: Places>(
    geometry: Geometry,
    media: &[(u16, &M)],
    threads: NonZeroUsize,
) -> Result<Vec<Found>, RecoverError> {
    let headers = read_headers(geometry, media, threads);
    let tasks = tasks(&headers);
    let scans = try_map_on_threads(threads, tasks.len(), Vec::new, |bytes, number| {
        // While each thread looks at one, the next ones are on their way.
        if let Some(next) = tasks.get(number + threads.get()) {
            media[next.at].1.ahead(next.place);
        }
        let Task { at, place, segment } = tasks[number];
        let (log, medium) = media[at];
        medium.read(place, bytes)?;
        Ok(Scan::of(geometry, log, segment, bytes))
    });
    let mut scans = scans.into_iter();
    let logs = media.iter().zip(headers);
    logs.map(|((log, _), headers)| put_together(geometry, *log, headers, &mut scans)).collect()
}

/// The headers of all places of each log; behind one that cannot be read, or is of another log, there may be none.
fn read_headers<M: Places>(geometry: Geometry, media: &[(u16, &M)], threads: NonZeroUsize) -> Vec<Vec<Header>> {
    let places = media.iter().flat_map(|(log, medium)| (0..medium.places()).map(move |place| (*log, *medium, place)));
    let places: Vec<_> = places.collect();
    let headers = try_map_on_threads(threads, places.len(), Vec::new, |bytes, number| {
        let (log, medium, place) = places[number];
        let read = medium.read_front(place, geometry.block_bytes.get(), bytes);
        read.map_err(|source| RecoverError::Unreadable { log, place, source })?;
        header_at(geometry, log, place, bytes)
    });
    let mut headers = headers.into_iter();
    media.iter().map(|(_, medium)| headers.by_ref().take(medium.places() as usize).collect()).collect()
}

/// What is to be read as a whole, in the order in which [`put_together`] asks for it.
fn tasks(headers: &[Vec<Header>]) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (at, headers) in headers.iter().enumerate() {
        let mut segments = BTreeMap::new();
        for (place, header) in (0..).zip(headers) {
            match header {
                Ok(None) => tasks.push(Task { at, place, segment: None }),
                Ok(Some(header)) if header.standing == Standing::Counts => {
                    let segment = Some((header.number, header.epoch));
                    segments.insert(header.number, Task { at, place, segment });
                }
                Ok(Some(_)) => {}
                // What comes behind it is not asked for.
                Err(_) => return tasks,
            }
        }
        tasks.extend(segments.into_values());
    }
    tasks
}

/// A log of what its places said.
fn put_together(
    geometry: Geometry,
    log: u16,
    headers: Vec<Header>,
    scans: &mut vec::IntoIter<io::Result<Scan>>,
) -> Result<Found, RecoverError> {
    // Those that are missing lie behind an error.
    let mut scan_of = |place| {
        let scan = scans.next().unwrap_or_else(|| Err(io::Error::other("it was not read")));
        scan.map_err(|source| RecoverError::Unreadable { log, place, source })
    };
    let mut found = Found::new(log, geometry);
    // The list of the segment that was begun last, also if that one was given up: it knows what was erased before.
    let (mut newest, mut erased) = (Newest::default(), Vec::new());
    for (place, header) in (0..).zip(headers) {
        let header = header?;
        if let Some(header) = &header {
            newest.see(header);
        }
        match header {
            Some(SegmentHeader { number, epoch, live, standing: Standing::Counts, .. }) => {
                if let Some(other) = found.segments.insert(number, FoundSegment { place, epoch, live }) {
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
                found.promised = found.promised.max(scan_of(place)?.promised_anywhere);
                found.unused.push(place);
            }
        }
    }
    let read = found.segments.iter().map(|(number, place)| Ok((*number, scan_of(place.place)?)));
    let read = read.collect::<Result<Vec<_>, RecoverError>>()?;
    found.follow(read, &newest, &erased)?;
    Ok(found)
}

/// A place, as far as it can be told without the others.
#[derive(Debug, Default)]
struct Scan {
    /// How far any batch in it, also one that was left by an earlier segment, says that replies had told of the log.
    promised_anywhere: Lsn,
    /// How far those of the chain say so.
    promised: Lsn,
    /// The batches of the chain.
    batches: Vec<FoundBatch>,
    /// The epoch of the first batch that is whole, whether that is in the chain or not.
    first_epoch: Option<u32>,
    /// The epoch of the last batch of the chain.
    epoch: u32,
    /// The end of the chain: the end of the segment, if the chain goes on there.
    end: Lsn,
    /// What stands there, if it does not.
    broken: Option<Malformed>,
    /// Where the header of a batch lies at the end that is not in the chain.
    cut_batch: Option<Lsn>,
    samples: Samples,
}

impl Scan {
    fn of(geometry: Geometry, log: u16, segment: Option<(u64, u32)>, bytes: &[u8]) -> Self {
        let (mut scan, mut from) = (Self::default(), 0);
        if let Some((number, epoch)) = segment {
            (scan.epoch, scan.end) = (epoch, geometry.first_batch(number));
            scan.broken = scan.follow(geometry, log, number, bytes).err();
            from = (scan.end.0 - number * geometry.segment_bytes) as usize;
        }
        let number = segment.map(|(number, _)| number);
        scan.promised_anywhere = scan.promised.max(promised_from(from, number, geometry, log, bytes));
        scan
    }

    /// Follows the chain to the end of the segment.
    ///
    /// # Errors
    ///
    /// What stands behind the last batch, at [`Scan::end`].
    fn follow(&mut self, geometry: Geometry, log: u16, number: u64, bytes: &[u8]) -> Result<(), Malformed> {
        loop {
            let batch = batch_of(geometry, log, number, self.end, bytes).inspect_err(|_| {
                // What its body lacks may come with the bytes of a later one, which is written here and torn, too.
                let is_begun = header_of(geometry, log, number, self.end, bytes).is_some();
                self.cut_batch = is_begun.then_some(self.end);
            })?;
            let header = batch.header;
            // Until all of it was looked at.
            self.cut_batch = Some(self.end);
            self.first_epoch = self.first_epoch.or(Some(header.epoch));
            if header.epoch < self.epoch {
                // A start cut the log before this batch of an earlier one.
                return Err(Malformed::Content);
            }
            let mut content = Content::default();
            for record in batch.records() {
                let (_, record) = record?;
                content.see(&record);
                self.samples.see(record.key);
            }
            let lsn = self.end;
            let end = Lsn(lsn.0 + header.total_bytes(geometry.block_bytes) as u64);
            let next = if header.ends_segment { Lsn((number + 1) * geometry.segment_bytes) } else { end };
            let (epoch, body_crc, links) = (header.epoch, header.body_crc, batch.links().collect());
            self.batches.push(FoundBatch { lsn, end, epoch, next, links, body_crc, content });
            (self.cut_batch, self.end, self.epoch) = (None, next, epoch);
            self.promised = self.promised.max(header.promised);
            if header.ends_segment {
                return Ok(());
            }
        }
    }
}

impl Found {
    /// Follows the chain of batches through the segments, in the order of their numbers, up to the first thing that makes no sense.
    fn follow(&mut self, read: Vec<(u64, Scan)>, newest: &Newest, erased: &[u64]) -> Result<(), RecoverError> {
        let named = newest.live.iter().flatten();
        let missing = named.copied().find(|number| !self.segments.contains_key(number) && !erased.contains(number));
        // How far any batch, also one behind the end of the chain, says that replies had told of the log.
        let promised_anywhere = read.iter().map(|(_, scan)| scan.promised_anywhere).fold(self.promised, Lsn::max);
        let (count, mut broken) = (read.len(), None);
        for (at, (number, scan)) in read.into_iter().enumerate() {
            let Some(place) = self.segments.get(&number) else { continue };
            if place.live.is_none() && at + 1 == count {
                broken = Some(Malformed::HeaderChecksum);
                self.end = self.end.max(Lsn(number * self.geometry.segment_bytes));
                break;
            }
            if missing.is_some_and(|missing| missing < number) {
                break;
            }
            self.end = self.geometry.first_batch(number);
            self.epoch = self.epoch.max(place.epoch);
            if scan.first_epoch.is_some_and(|epoch| epoch < self.epoch) {
                // A start cut the log before it, in an earlier segment.
                (self.cut_batch, broken) = (Some(self.end), Some(Malformed::Content));
                break;
            }
            self.epoch = self.epoch.max(scan.epoch);
            self.promised = self.promised.max(scan.promised);
            (self.end, self.cut_batch) = (scan.end, scan.cut_batch);
            self.batches.extend(scan.batches);
            self.samples.extend(scan.samples.keys);
            if scan.broken.is_some() {
                broken = scan.broken;
                break;
            }
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
}

/// How far any batch from an offset in a place on, also one that was left by an earlier segment, says that replies had told of the
/// log. The body of a whole one is passed by: clients choose the bytes of their values, also such that look like a header. So are headers
/// that no log writes: of a batch before what it promises, and in the place of the segment `number` of a later one.
fn promised_from(mut at: usize, number: Option<u64>, geometry: Geometry, log: u16, place: &[u8]) -> Lsn {
    let mut promised = Lsn::default();
    while let Some(bytes) = place.get(at..).filter(|bytes| !bytes.is_empty()) {
        let mut passed = geometry.block_bytes.get();
        let is_ours = |header: &BatchHeader| {
            let is_here = header.lsn.0 % geometry.segment_bytes == at as u64;
            let is_possible = number.is_none_or(|number| geometry.segment_of(header.lsn) <= number);
            (header.store, header.log) == (geometry.store, log)
                && is_here
                && is_possible
                && header.promised <= header.lsn
        };
        if let Some(header) = BatchHeader::decode(bytes).ok().filter(is_ours) {
            promised = promised.max(header.promised);
            if Batch::decode(bytes).is_ok() {
                passed = header.total_bytes(geometry.block_bytes);
            }
        }
        at += passed;
    }
    promised
}

/// Keys of some records, from all over a segment: by them all keys are cut into ranges of about the same size.
#[derive(Debug)]
struct Samples {
    keys: Vec<Box<[u8]>>,
    /// One of so many is taken.
    every: u32,
    /// Those that are passed by until then.
    left: u32,
}

impl Default for Samples {
    fn default() -> Self {
        Self { keys: Vec::new(), every: 64, left: 0 }
    }
}

impl Samples {
    /// So many of a segment at most.
    const MAX: usize = 128;

    fn see(&mut self, key: &[u8]) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        if self.keys.len() == Self::MAX {
            let mut is_kept = false;
            self.keys.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.every *= 2;
        }
        self.left = self.every - 1;
        self.keys.push(key.into());
    }
}
