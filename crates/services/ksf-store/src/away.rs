//! Values that are away: on a medium alone. Where each is read, and what keeps it there meanwhile.
//!
//! ```text
//!   a command asks for a value ─► Missing: Wanted, with a Pin on its segment    the command changes nothing
//!                                    │ the shard reads, and checks
//!                                    ▼
//!                                 Values, by version ─► the same command again, with them
//! ```
//!
//! The entry of a key says which record has its value: log, place in it, version, length. The checksums are those of the
//! record itself. A version is given once, so a value that was read belongs to the key as long as the key has that version,
//! wherever cleaning has written the record meanwhile; a key that was overwritten has another one, and the command asks again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::{Lsn, Malformed, Record};
use crate::index::leaf::Origin;
use crate::log::{Geometry, Segment};

/// The record that has the value of a key, as the key's entry tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Away {
    pub(crate) origin: Origin,
    /// Bytes of the value.
    pub(crate) value_bytes: u32,
    /// Bytes of the record, but for a time of receipt.
    pub(crate) record_bytes: usize,
}

/// Where the segments of all logs lie that hold records of which replies may tell, and how many read each.
#[derive(Debug)]
pub(crate) struct Readable {
    geometry: Option<Geometry>,
    logs: Box<[Mutex<BTreeMap<u64, ReadableSegment>>]>,
}

#[derive(Debug)]
struct ReadableSegment {
    place: u32,
    readers: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is changed by single calls that do not panic in between.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readable {
    pub(crate) fn new(geometry: Option<Geometry>, logs: usize) -> Self {
        Self { geometry, logs: (0..logs).map(|_| Mutex::default()).collect() }
    }

    /// Segments of a log may be read.
    pub(crate) fn add<'s>(&self, log: u16, segments: impl IntoIterator<Item = (&'s u64, &'s Segment)>) {
        let mut places = lock(&self.logs[usize::from(log)]);
        for (number, segment) in segments {
            places.insert(*number, ReadableSegment { place: segment.place, readers: 0 });
        }
    }

    /// A segment, of which nothing counts any more, may be read no more. False if it is being read: then it stays.
    pub(crate) fn remove(&self, log: u16, number: u64) -> bool {
        let mut places = lock(&self.logs[usize::from(log)]);
        let is_read = places.get(&number).is_some_and(|place| place.readers > 0);
        if !is_read {
            places.remove(&number);
        }
        !is_read
    }

    /// Keeps a segment until the pin is dropped; `None` if it is not there. The caller has the leaf locked whose entry names
    /// it: so nothing was moved out of it that could let it go before.
    fn pin(self: &Arc<Self>, log: u16, number: u64) -> Option<(Pin, u32)> {
        let mut places = lock(self.logs.get(usize::from(log))?);
        let place = places.get_mut(&number)?;
        place.readers += 1;
        let at = place.place;
        drop(places);
        Some((Pin { places: Arc::clone(self), log, number }, at))
    }

    /// What is to be read for a value.
    pub(crate) fn want(self: &Arc<Self>, away: Away, promised: Lsn) -> Wanted {
        let Away { origin: Origin { log, lsn, version }, value_bytes, record_bytes } = away;
        let at = match self.geometry.filter(|_| lsn < promised) {
            // Cleaning has written it anew, and the copy is on its way. What it was copied from may be gone any moment.
            None => At::Unwritten,
            Some(geometry) => match self.pin(log, geometry.segment_of(lsn)) {
                Some((pin, place)) => {
                    let offset = lsn.0 % geometry.segment_bytes;
                    // The record may have a time of receipt, which the entry does not know.
                    let bytes = (record_bytes as u64 + 8).min(geometry.segment_bytes - offset) as usize;
                    At::Medium { place, offset, bytes, _pin: pin }
                }
                None => At::Nowhere,
            },
        };
        Wanted { log, lsn, version, value_bytes: value_bytes as usize, at }
    }
}

/// Keeps a segment from being erased.
#[derive(Debug)]
struct Pin {
    places: Arc<Readable>,
    log: u16,
    number: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(place) = lock(&self.places.logs[usize::from(self.log)]).get_mut(&self.number) {
            place.readers -= 1;
        }
    }
}

/// A value that a command needs. As long as this is there, the record is.
#[derive(Debug)]
pub struct Wanted {
    log: u16,
    lsn: Lsn,
    version: u64,
    value_bytes: usize,
    at: At,
}

#[derive(Debug)]
enum At {
    Medium { place: u32, offset: u64, bytes: usize, _pin: Pin },
    Unwritten,
    Nowhere,
}

/// Bytes of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAt {
    /// The log.
    pub log: u16,
    /// The place of the segment on its medium.
    pub place: u32,
    /// The first byte in that place.
    pub offset: u64,
    /// How many: as many as the record has, or a few more.
    pub bytes: usize,
}

/// Why there is nothing to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotThere {
    /// It was written anew a moment ago: it can be read when replies may tell of that place in its log.
    Unwritten {
        /// The log.
        log: u16,
        /// The place in it.
        lsn: Lsn,
    },
    /// No segment has it: the store is damaged.
    Nowhere {
        /// The log.
        log: u16,
        /// The place in it.
        lsn: Lsn,
    },
}

impl Wanted {
    /// What is to be read.
    ///
    /// # Errors
    ///
    /// [`NotThere`].
    pub fn read_at(&self) -> Result<ReadAt, NotThere> {
        let (log, lsn) = (self.log, self.lsn);
        match self.at {
            At::Medium { place, offset, bytes, .. } => Ok(ReadAt { log, place, offset, bytes }),
            At::Unwritten => Err(NotThere::Unwritten { log, lsn }),
            At::Nowhere => Err(NotThere::Nowhere { log, lsn }),
        }
    }

    /// Its version, which no other value has.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Bytes of the value.
    pub fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// The record in what was read, with every checksum right.
    ///
    /// # Errors
    ///
    /// The bytes are another record, or none.
    pub fn record<'r>(&self, read: &'r [u8]) -> Result<Record<'r>, Malformed> {
        let record = Record::decode(read, true)?;
        let is_it = record.version == self.version && record.value.len() == self.value_bytes;
        if is_it { Ok(record) } else { Err(Malformed::Content) }
    }
}

/// Values that were read for a command, by their versions.
#[derive(Debug, Default)]
pub struct Values(BTreeMap<u64, Arc<[u8]>>);

impl Values {
    /// Adds the value of a version.
    pub fn insert(&mut self, version: u64, value: Arc<[u8]>) {
        self.0.insert(version, value);
    }

    pub(crate) fn get(&self, version: u64) -> Option<&[u8]> {
        self.0.get(&version).map(|value| &**value)
    }
}

/// Values that a command asked for and that are not there: by version, each once.
#[derive(Debug)]
pub(crate) struct Missing<'s> {
    places: &'s Arc<Readable>,
    promised: &'s [AtomicU64],
    wanted: RefCell<BTreeMap<u64, Wanted>>,
}

impl<'s> Missing<'s> {
    pub(crate) fn new(places: &'s Arc<Readable>, promised: &'s [AtomicU64]) -> Self {
        Self { places, promised, wanted: RefCell::default() }
    }

    /// The command asked for this one. Its leaf is locked.
    pub(crate) fn note(&self, away: Away) {
        if let MapEntry::Vacant(vacant) = self.wanted.borrow_mut().entry(away.origin.version) {
            let promised = self.promised[usize::from(away.origin.log)].load(Ordering::Acquire);
            vacant.insert(self.places.want(away, Lsn(promised)));
        }
    }

    pub(crate) fn into_wanted(self) -> BTreeMap<u64, Wanted> {
        self.wanted.into_inner()
    }
}
