//! A backup: the logs as they are at one moment, while the store goes on.
//!
//! ```text
//!   begin: how far each log is promised ─► copy place by place, in any order ─► cut each log there ─► recover
//!          no segment that begins before that is erased, until it was copied or the backup is given up
//! ```
//!
//! What is promised of all logs at one moment is a state of the store: it has all that replies told of, and each batch with all
//! that it saw, so transactions are whole. A start recovers it from the logs, and so does this. What lies before the end is never
//! written again while its segment is there. So a copy needs no memory and no lock, and takes its time: all that it costs
//! is room in the logs, for what is cleaned and not erased. The backup is given up as soon as a log is short of room that
//! only the backup keeps from it, so nobody waits for one that is slow.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use crate::format::{Lsn, SegmentHeader, Standing};
use crate::log::Geometry;
use crate::recover::{Found, Places, RecoverError, cut_by_links};
use crate::store::{Store, lock};

/// The backup of a store that is under way; there is one at most.
#[derive(Debug, Default)]
pub(crate) struct Backups {
    /// How many began.
    begun: u64,
    pub(crate) holding: Option<Holding>,
}

/// What the backup under way keeps from being erased.
#[derive(Debug)]
pub(crate) struct Holding {
    number: u64,
    /// Of each log, how far it is copied.
    ends: Vec<Lsn>,
    /// Segments that it has.
    copied: BTreeSet<(u16, u64)>,
}

impl Holding {
    /// Whether it still needs this segment.
    pub(crate) fn needs(&self, geometry: &Geometry, log: u16, segment: u64) -> bool {
        let begins_before = |end: &Lsn| Lsn(segment * geometry.segment_bytes) < *end;
        self.ends.get(usize::from(log)).is_some_and(begins_before) && !self.copied.contains(&(log, segment))
    }
}

/// A backup, until it is dropped.
#[derive(Debug)]
pub struct Backup {
    store: Arc<Store>,
    number: u64,
    ends: Vec<Lsn>,
}

impl Backup {
    /// Begins one with all that is promised now. `None`: another one is under way.
    pub fn begin(store: &Arc<Store>) -> Option<Self> {
        let mut backups = lock(&store.backups);
        if backups.holding.is_some() {
            return None;
        }
        // Whatever was erased before this has been decided by promises that are among these.
        let ends = store.promised_ends();
        backups.begun += 1;
        let number = backups.begun;
        backups.holding = Some(Holding { number, ends: ends.clone(), copied: BTreeSet::new() });
        drop(backups);
        Some(Self { store: Arc::clone(store), number, ends })
    }

    /// Of each log, where it ends in the backup.
    pub fn ends(&self) -> &[Lsn] {
        &self.ends
    }

    /// False if it was given up because a log needed the room: what is copied from now on is of no use.
    pub fn is_held(&self) -> bool {
        lock(&self.store.backups).holding.as_ref().is_some_and(|holding| holding.number == self.number)
    }

    /// A segment was copied, and may be erased. False if the backup had been given up by then: the copy is of no use.
    pub fn copied(&self, log: u16, segment: u64) -> bool {
        let mut backups = lock(&self.store.backups);
        let Some(holding) = backups.holding.as_mut().filter(|holding| holding.number == self.number) else {
            return false;
        };
        holding.copied.insert((log, segment));
        true
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        let mut backups = lock(&self.store.backups);
        if backups.holding.as_ref().is_some_and(|holding| holding.number == self.number) {
            backups.holding = None;
        }
    }
}

/// What a copy needs of a place of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Its first block.
    Header,
    /// This segment: so many bytes from the beginning of the place.
    Segment {
        /// Its number.
        number: u64,
        /// The bytes: whole blocks.
        bytes: u64,
    },
}

/// What a copy of a log up to `end` needs of the place that begins with this block.
///
/// When a segment was copied its header must be read again: if that is another one by then, the segment had been cleaned before the
/// backup began, and the place was being erased. Then the header is all that the copy has of it.
pub fn wanted(geometry: &Geometry, log: u16, end: Lsn, block: &[u8]) -> Wanted {
    let Ok(header) = SegmentHeader::decode(block) else { return Wanted::Header };
    let is_ours = (header.store, header.log, header.segment_bytes) == (geometry.store, log, geometry.segment_bytes);
    match header.bytes_before(end).filter(|_| is_ours) {
        Some(bytes) => Wanted::Segment { number: header.number, bytes },
        None => Wanted::Header,
    }
}

/// Whether a block is the first one of a place: a header, or the zeros of a place that was never used. If not, it was read while
/// it was written, and is to be read again; or it is damaged.
pub fn is_first_block(block: &[u8]) -> bool {
    SegmentHeader::decode(block).is_ok() || block.iter().all(|byte| *byte == 0)
}

/// A log as it was copied.
#[derive(Debug)]
pub struct CopiedLog<M> {
    /// Where it ends.
    pub end: Lsn,
    /// The first block of each place, as it was read last.
    pub headers: Vec<Vec<u8>>,
    /// What was [wanted] of the places that have a segment.
    pub content: M,
}

impl<M: Places> Places for CopiedLog<M> {
    fn places(&self) -> u32 {
        self.headers.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> io::Result<()> {
        let header = &self.headers[place as usize];
        match SegmentHeader::decode(header).ok().and_then(|header| header.bytes_before(self.end)) {
            Some(bytes) => {
                self.content.read(place, into)?;
                into.truncate(bytes as usize);
            }
            None => into.clone_from(header),
        }
        Ok(())
    }

    fn read_front(&self, place: u32, bytes: usize, into: &mut Vec<u8>) -> io::Result<()> {
        let header = &self.headers[place as usize];
        if bytes > header.len() {
            return self.read(place, into);
        }
        into.clone_from(header);
        Ok(())
    }
}

impl SegmentHeader {
    /// Bytes of the segment that lie before a place in its log; `None`: there are none that count.
    fn bytes_before(&self, end: Lsn) -> Option<u64> {
        let begin = self.number.checked_mul(self.segment_bytes).filter(|_| self.standing == Standing::Counts)?;
        end.0.checked_sub(begin).filter(|bytes| *bytes > 0).map(|bytes| bytes.min(self.segment_bytes))
    }
}

impl<M> CopiedLog<M> {
    /// Takes the headers out that say nothing of what was there when the backup began.
    ///
    /// The last segment names those that counted when it was begun. One of them may have been erased before the backup began, and its place
    /// been taken by a segment that was begun since, which may be erased by now, too. So each place that has such a segment stands for
    /// one that is named and not there.
    fn settle(&mut self, geometry: &Geometry, log: u16) -> Result<(), CopyError> {
        let (mut known, mut others, mut last) = (BTreeSet::new(), Vec::new(), None);
        for (at, block) in self.headers.iter().enumerate() {
            if !is_first_block(block) {
                return Err(CopyError::Header { log, place: at });
            }
            let Ok(header) = SegmentHeader::decode(block) else { continue };
            let begins_before = header.number.saturating_mul(geometry.segment_bytes) < self.end.0;
            if !begins_before || header.standing == Standing::GivenUp {
                others.push(at);
                continue;
            }
            known.insert(header.number);
            if header.standing == Standing::Counts {
                last = last.max(Some((header.epoch, header.number, header.live.unwrap_or_default())));
            }
        }
        let named = last.map(|(_, _, live)| live).unwrap_or_default();
        let mut erased = named.into_iter().filter(|number| !known.contains(number));
        for at in others {
            let block_bytes = geometry.block_bytes.get();
            let erased = erased.next().map(|number| SegmentHeader {
                store: geometry.store,
                log,
                number,
                epoch: 0,
                segment_bytes: geometry.segment_bytes,
                block_bytes: block_bytes as u32,
                standing: Standing::Cleaned,
                live: Some(Vec::new()),
            });
            self.headers[at] = erased.map_or_else(|| vec![0; block_bytes], |header| header.encode());
        }
        Ok(())
    }
}

/// Why the copy of a store is no store.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// What the logs have is damaged.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// A place begins with something else than a segment.
    #[error("place {place} of log {log} has a damaged header")]
    Header {
        /// The log.
        log: u16,
        /// The place.
        place: usize,
    },
    /// A log is not whole.
    #[error("log {log} is damaged from byte {} on, and it was acknowledged up to byte {}", .found.0, .end.0)]
    Short {
        /// The log.
        log: u16,
        /// Where its end was found.
        found: Lsn,
        /// Where it ends.
        end: Lsn,
    },
}

/// The logs of a store that was copied, whole up to their ends, for [`Store::open`], which will take no writes.
///
/// # Errors
///
/// [`CopyError`]: a log is damaged.
pub fn recover<M: Places>(geometry: Geometry, copies: &mut [CopiedLog<M>]) -> Result<Vec<Found>, CopyError> {
    let ends: Vec<Lsn> = copies.iter().map(|copy| copy.end).collect();
    let read = |(log, copy): (u16, &mut CopiedLog<M>)| {
        copy.settle(&geometry, log)?;
        Ok::<_, CopyError>(Found::read(log, geometry, &*copy)?)
    };
    let mut found = (0..).zip(copies).map(read).collect::<Result<Vec<_>, _>>()?;
    cut_by_links(&mut found)?;
    for (found, end) in found.iter().zip(ends) {
        // A segment that was begun and has no batch adds nothing to the one before.
        let has_no_batch = end == geometry.first_batch(geometry.segment_of(end));
        let needed = if has_no_batch { Lsn(geometry.segment_of(end) * geometry.segment_bytes) } else { end };
        if found.end() < needed {
            return Err(CopyError::Short { log: found.log(), found: found.end(), end });
        }
    }
    Ok(found)
}
