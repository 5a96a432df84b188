//! One log: where the next record goes, what is to be written, and how far it is durable.
//!
//! A log has no medium: it says what to write and where, several writes at a time, and is told when each is done.
//!
//! ```text
//!   append ─► open batch ─┐ close, as soon as a write may begin
//!                         ▼
//!             next_write() ─► medium ─► written() ─► durable(): everything before is on the medium
//! ```
//!
//! The open batch grows while writes are under way. So the busier the log, the more records share a write, and a lone
//! record waits for nobody.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;

use crate::format::{
    BatchBuilder, BatchHeader, HEADER_BYTES, KEY_BYTES_MAX, LINK_BYTES, LOGS_MAX, Link, Lsn, Record, SegmentHeader,
    Standing,
};

/// What all logs of a store have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The store's own number, drawn when it was made: bytes of another store are not taken for its own.
    pub store: u64,
    /// Bytes of a block: what the medium writes whole, at least 512 and a power of two.
    pub block_bytes: NonZeroUsize,
    /// Bytes of a segment: whole blocks.
    pub segment_bytes: u64,
}

impl Geometry {
    /// The segment of a place in a log.
    pub fn segment_of(&self, lsn: Lsn) -> u64 {
        lsn.0 / self.segment_bytes
    }

    /// Where the first batch of a segment begins.
    pub fn first_batch(&self, segment: u64) -> Lsn {
        // A list of segments in a header may name any number.
        Lsn(segment.saturating_mul(self.segment_bytes).saturating_add(self.block_bytes.get() as u64))
    }

    /// Most bytes that the records of one append may have.
    pub fn append_bytes_max(&self) -> usize {
        // The header, a batch of one block that only ends the segment, and that of the append.
        self.segment_bytes as usize - 2 * self.block_bytes.get() - HEADER_BYTES - LOGS_MAX * LINK_BYTES
    }
}

/// A write for the medium. It must be on the medium, not only in a cache, before [`Log::written`] is told.
#[derive(Debug)]
pub struct Write {
    /// Tells [`Log::written`] which one is done.
    pub id: WriteId,
    /// The place of the segment on the medium.
    pub place: u32,
    /// Where in the place: a multiple of the block size.
    pub offset: u64,
    /// Whole blocks.
    pub bytes: Vec<u8>,
}

/// What became true when a write was done.
#[derive(Debug)]
pub enum News {
    /// The log is durable up to the end of a batch, which saw this of other logs:
    /// [`Promises`](crate::promises::Promises) wants to know.
    Durable {
        /// The end of the batch.
        end: Lsn,
        /// What it saw.
        links: Vec<Link>,
    },
    /// No record of this segment is on the medium any more.
    Erased {
        /// The segment.
        number: u64,
    },
}

/// Names a write of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteId(u64);

/// Why records cannot be appended. Nothing of them was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// Every place is used; space comes back by cleaning.
    #[error("the log is full")]
    Full,
    /// The records are longer than a segment holds.
    #[error("{bytes} bytes of records, and a segment holds {limit}")]
    TooLong {
        /// Bytes of the records.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
    /// A write failed: nothing can be made durable any more. Also a log that was not
    /// [repaired](crate::recover::Found::repairs) takes nothing.
    #[error("a write of the log failed, or it was not repaired")]
    Failed,
}

/// A segment of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its place on the medium.
    pub place: u32,
    /// Bytes of records in it that are not out of date.
    pub live_bytes: u64,
    /// Bytes of the longest record in it, whether that counts or not.
    pub longest_bytes: u64,
    /// Bytes of all records in it.
    record_bytes: u64,
    state: State,
}

impl Segment {
    /// One with records of so many bytes, all of which count.
    pub(crate) fn in_use(place: u32, record_bytes: u64, longest_bytes: u64) -> Self {
        Self { place, live_bytes: record_bytes, longest_bytes, record_bytes, state: State::InUse }
    }

    /// Bytes of records in it that are out of date.
    pub fn dead_bytes(&self) -> u64 {
        self.record_bytes - self.live_bytes.min(self.record_bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InUse,
    /// Everything that counts was written again before this place of the log.
    Cleaned(Lsn),
}

/// What is under way, in the order of the log.
#[derive(Debug)]
struct Flight {
    id: WriteId,
    what: Work,
    /// Bytes of the write, until it is done.
    bytes: usize,
    done: bool,
}

#[derive(Debug)]
enum Work {
    /// The log goes on in this segment.
    Begins,
    /// Up to here the log is durable when this and everything before is done.
    Reaches(Lsn, Vec<Link>),
    /// This segment is erased, and its place free, when this is done.
    Erases { number: u64, place: u32 },
}

/// One log of a store.
#[derive(Debug)]
pub struct Log {
    geometry: Geometry,
    log: u16,
    epoch: u32,
    segments: BTreeMap<u64, Segment>,
    free: Vec<u32>,
    /// Places of the log, free or not.
    places: usize,
    open: BatchBuilder,
    /// Where the open batch begins.
    open_at: Lsn,
    /// Closed, and not yet handed to the medium.
    waiting: VecDeque<Write>,
    flights: VecDeque<Flight>,
    in_flight: usize,
    /// Bytes of the writes that are not done, begun or not.
    flight_bytes: usize,
    next_id: u64,
    durable: Lsn,
    promised: Lsn,
    /// Where the last batch with records ends, and how far batches say that replies may have told.
    recorded: Lsn,
    said: Lsn,
    failed: bool,
    spare: Vec<Vec<u8>>,
}

/// Buffers that are kept for the next batches.
const SPARE_MAX: usize = 8;
/// The longest of them.
const SPARE_BYTES_MAX: usize = 1 << 20;

/// What records are appended for. Each purpose leaves places to those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// The cleaner writes them anew, or one record takes every key away: no place is left.
    Cleaning,
    /// They take keys away, after which cleaning finds more: one place is left.
    Removing,
    /// They take the place of others that are nearly as long, after which cleaning finds more: one place is left, and for removals one of
    /// each [`PLACES_PER_RESERVED`].
    Keeping,
    /// Any other: the same is left, and for what keeps one of each [`PLACES_PER_KEPT`].
    Writing,
}

/// Of so many places one is kept for removals. Where removals are spread over all segments, what they wrote into the reserve when that
/// is used up is a thirty-second of the log, and so is what they made out of date: in some segment more than a
/// [copy](Log::copy_loss) of it may lose.
const PLACES_PER_RESERVED: usize = 32;
/// Of so many places one is kept for what keeps. What that wrote there is out of date when it writes the same again, so the place comes back;
/// one more in a log of as many places as is common would have the cleaner write more for all others.
const PLACES_PER_KEPT: usize = 64;
/// A log of fewer places keeps none for that: too few would be left to write.
const PLACES_TO_KEEP_FROM: usize = 16;
/// Places that are free at most when any segment is to be cleaned that pays, in a log of few places.
const FREE_MIN: usize = 4;
/// Bytes that the cleaner copies at most for each byte of space that it frees for new values in a full log. It bounds the wait of a new value,
/// and the writes that it costs; a log whose dead records are spread more thinly refuses the value instead.
pub const COPIED_PER_FREED_MAX: u64 = 32;
/// Bytes of a segment that the cleaner reads, and appends, at a time.
pub const CLEANED_AT_ONCE_BYTES: usize = 256 << 10;

impl Log {
    /// An empty log with `places` places of one segment each.
    pub fn create(geometry: Geometry, log: u16, places: u32) -> Self {
        let free = (0..places).rev().collect();
        Self::open(geometry, log, 0, BTreeMap::new(), free, Lsn::default())
    }

    /// A log as recovery found and repaired it: it goes on at `end`.
    pub(crate) fn open(
        geometry: Geometry,
        log: u16,
        epoch: u32,
        segments: BTreeMap<u64, Segment>,
        free: Vec<u32>,
        end: Lsn,
    ) -> Self {
        Self {
            geometry,
            log,
            epoch,
            places: segments.len() + free.len(),
            segments,
            free,
            open: BatchBuilder::new(Vec::new()),
            open_at: end,
            waiting: VecDeque::new(),
            flights: VecDeque::new(),
            in_flight: 0,
            flight_bytes: 0,
            next_id: 0,
            durable: end,
            promised: end,
            recorded: end,
            said: end,
            failed: false,
            spare: Vec::new(),
        }
    }

    /// The same where the last batch with records ends here, and batches say that replies may have told so far.
    pub(crate) fn having_said(self, recorded: Lsn, said: Lsn) -> Self {
        Self { recorded, said, ..self }
    }

    /// The same, to be looked at: it takes nothing.
    pub(crate) fn without_writes(self) -> Self {
        Self { failed: true, ..self }
    }

    /// What it has in common with the other logs of its store.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Everything before is on the medium.
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// Replies may tell of everything before from now on: it is [durable](Self::durable), and so is all that it saw of
    /// other logs. Batches say so from here on, and recovery takes none of it for a torn tail.
    pub fn promise(&mut self, lsn: Lsn) {
        self.promised = self.promised.max(lsn.min(self.durable));
    }

    /// How far replies may tell of it.
    pub fn promised(&self) -> Lsn {
        self.promised
    }

    /// Its segments by their numbers.
    pub fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// Places without a segment.
    pub fn free_places(&self) -> usize {
        self.free.len()
    }

    /// True if a write is under way or to be begun.
    pub fn is_busy(&self) -> bool {
        !self.flights.is_empty() || !self.waiting.is_empty() || !self.open.is_empty()
    }

    /// Bytes that were appended, or are to be erased, and are not on the medium: the memory that the log takes, but for what
    /// it keeps for the next batches. Nothing here bounds it; it becomes less with every write that is [done](Self::written).
    pub fn unwritten_bytes(&self) -> usize {
        self.flight_bytes + if self.open.is_empty() { 0 } else { self.open.len() }
    }

    /// Appends records, which become durable together, and tells `placed` where each begins. The log is durable behind
    /// such a place when the record is.
    ///
    /// # Errors
    ///
    /// [`AppendError`]; nothing was appended.
    pub fn append(
        &mut self,
        records: &[Record<'_>],
        links: impl IntoIterator<Item = Link>,
        placed: impl FnMut(usize, Lsn),
    ) -> Result<(), AppendError> {
        self.append_for(Purpose::Writing, records, links, placed)
    }

    /// The same for a purpose, for which places are kept back.
    ///
    /// # Errors
    ///
    /// [`AppendError`]; nothing was appended.
    pub fn append_for(
        &mut self,
        purpose: Purpose,
        records: &[Record<'_>],
        links: impl IntoIterator<Item = Link>,
        mut placed: impl FnMut(usize, Lsn),
    ) -> Result<(), AppendError> {
        if self.failed {
            return Err(AppendError::Failed);
        }
        debug_assert!(records.iter().all(|record| record.key.len().max(record.subkey.len()) <= KEY_BYTES_MAX));
        let bytes: usize = records.iter().map(Record::encoded_bytes).sum();
        let limit = self.geometry.append_bytes_max();
        if bytes > limit {
            return Err(AppendError::TooLong { bytes, limit });
        }
        if !self.takes(purpose, bytes) {
            return Err(AppendError::Full);
        }
        if !self.fits(bytes) {
            self.begin_segment(self.left_by(purpose))?;
        }
        for (at, record) in records.iter().enumerate() {
            let offset = self.open.push(record);
            placed(at, Lsn(self.open_at.0 + u64::from(offset)));
        }
        if let Some(segment) = self.segments.get_mut(&self.geometry.segment_of(self.open_at)) {
            let longest = records.iter().map(Record::encoded_bytes).max().unwrap_or(0);
            segment.live_bytes += bytes as u64;
            segment.record_bytes += bytes as u64;
            segment.longest_bytes = segment.longest_bytes.max(longest as u64);
        }
        links.into_iter().for_each(|link| self.open.link(link));
        Ok(())
    }

    /// Places that records of a purpose leave to others.
    pub(crate) fn left_by(&self, purpose: Purpose) -> usize {
        let for_removals = self.places.div_ceil(PLACES_PER_RESERVED);
        let for_keeping = if self.places < PLACES_TO_KEEP_FROM { 0 } else { self.places.div_ceil(PLACES_PER_KEPT) };
        match purpose {
            Purpose::Cleaning => 0,
            Purpose::Removing => 1,
            Purpose::Keeping => 1 + for_removals,
            Purpose::Writing => 1 + for_removals + for_keeping,
        }
    }

    /// Whether no segment can be begun for a purpose.
    pub fn is_short_for(&self, purpose: Purpose) -> bool {
        self.free.len() <= self.left_by(purpose)
    }

    /// Whether there is room for so many bytes of records. A segment that was begun for a purpose that comes first is left to it, as long
    /// as that needs the room: cleaning to give places back, or removals so that there is something to clean.
    pub(crate) fn takes(&self, purpose: Purpose, bytes: usize) -> bool {
        let left = self.left_by(purpose);
        self.free.len() > left || self.free.len() == left && self.fits(bytes)
    }

    /// True if the open batch can take so many bytes more, and leave a block to end the segment with.
    fn fits(&self, bytes: usize) -> bool {
        let segment = self.geometry.segment_of(self.open_at);
        if !self.segments.contains_key(&segment) {
            return false;
        }
        let block_bytes = self.geometry.block_bytes.get();
        let batch = (self.open.len() + LOGS_MAX * LINK_BYTES + bytes).next_multiple_of(block_bytes);
        let end = (segment + 1) * self.geometry.segment_bytes;
        self.open_at.0 + (batch + block_bytes) as u64 <= end
    }

    /// Ends the segment, if there is one, and begins the next.
    fn begin_segment(&mut self, reserve: usize) -> Result<(), AppendError> {
        if self.free.len() <= reserve {
            return Err(AppendError::Full);
        }
        let Some(place) = self.free.pop() else { return Err(AppendError::Full) };
        let current = self.geometry.segment_of(self.open_at);
        let number = if self.segments.contains_key(&current) {
            self.close_batch(true, 0);
            current + 1
        } else {
            // The first one of a new log, or the first one after a start.
            self.geometry.segment_of(Lsn(self.open_at.0 + self.geometry.segment_bytes - 1))
        };
        let header = SegmentHeader { live: Some(self.segments.keys().copied().collect()), ..self.header(number) };
        let first_batch = self.geometry.first_batch(number);
        self.push_write(place, 0, header.encode(), Work::Begins);
        self.segments.insert(number, Segment::in_use(place, 0, 0));
        self.open_at = first_batch;
        Ok(())
    }

    fn push_write(&mut self, place: u32, offset: u64, bytes: Vec<u8>, what: Work) {
        let id = WriteId(self.next_id);
        self.next_id += 1;
        self.flight_bytes += bytes.len();
        self.flights.push_back(Flight { id, what, bytes: bytes.len(), done: false });
        self.waiting.push_back(Write { id, place, offset, bytes });
    }

    fn close_batch(&mut self, ends_segment: bool, time_ns: u64) {
        let number = self.geometry.segment_of(self.open_at);
        let Some(segment) = self.segments.get(&number).copied() else { return };
        let next = BatchBuilder::new(self.spare.pop().unwrap_or_default());
        let batch = std::mem::replace(&mut self.open, next);
        let header = BatchHeader {
            store: self.geometry.store,
            log: self.log,
            lsn: self.open_at,
            promised: self.promised,
            epoch: self.epoch,
            records: 0,
            links: 0,
            body_bytes: 0,
            body_crc: 0,
            time_ns,
            ends_segment,
        };
        let links = batch.links().to_vec();
        let has_records = !batch.is_empty();
        let (_, bytes) = batch.finish(header, self.geometry.block_bytes);
        self.said = self.promised;
        let (offset, end) = (self.open_at.0 % self.geometry.segment_bytes, Lsn(self.open_at.0 + bytes.len() as u64));
        self.push_write(segment.place, offset, bytes, Work::Reaches(end, links));
        self.open_at = end;
        if has_records {
            self.recorded = end;
        }
    }

    /// Whether nothing is under way, and no batch behind the last record says that replies may tell of it. If it is
    /// damaged then, that looks like the torn end of a write of which nobody was told.
    pub fn must_say(&self) -> bool {
        self.said < self.recorded && !self.is_busy() && !self.failed
    }

    /// Says so, if it [must](Self::must_say) and that is promised, by a batch without records: one block, which is the next
    /// write. `time_ns`: as in [`next_write`](Self::next_write). True if there is such a write.
    pub fn say(&mut self, time_ns: u64) -> bool {
        if !self.must_say() || self.recorded > self.promised {
            return false;
        }
        let number = self.geometry.segment_of(self.open_at);
        let has_segment = self.segments.contains_key(&number);
        // Where the last place is in use, its rest is the cleaner's.
        let is_kept = has_segment && self.free.is_empty();
        if is_kept || !has_segment && self.begin_segment(self.left_by(Purpose::Writing)).is_err() {
            // There is room for what must be there alone. The next batch says it.
            self.said = self.recorded;
            return false;
        }
        // Where there is room for the end of the segment alone, that says it.
        let (number, ends_segment) = (self.geometry.segment_of(self.open_at), !self.fits(0));
        self.close_batch(ends_segment, time_ns);
        if ends_segment {
            self.open_at = Lsn((number + 1) * self.geometry.segment_bytes);
        }
        true
    }

    /// The next write, if one may begin while at most `in_flight_max` are under way. `time_ns`: nanoseconds since 1970,
    /// which the batch records.
    pub fn next_write(&mut self, in_flight_max: usize, time_ns: u64) -> Option<Write> {
        if self.failed || self.in_flight >= in_flight_max {
            return None;
        }
        if self.waiting.is_empty() && !self.open.is_empty() {
            self.close_batch(false, time_ns);
        }
        let write = self.waiting.pop_front()?;
        self.in_flight += 1;
        Some(write)
    }

    /// A write is on the medium, or failed. `buffer` is that of the write, for the next one, unless it was given back by
    /// [`Log::reuse`]. Tells `news` what
    /// is true from now on. After a failure there are no more.
    pub fn written(&mut self, id: WriteId, ok: bool, buffer: Vec<u8>, mut news: impl FnMut(News)) {
        self.in_flight -= 1;
        self.failed |= !ok;
        self.reuse(buffer);
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.id == id) {
            flight.done = true;
            self.flight_bytes -= std::mem::take(&mut flight.bytes);
        }
        while !self.failed && self.flights.front().is_some_and(|flight| flight.done) {
            match self.flights.pop_front().map(|flight| flight.what) {
                Some(Work::Reaches(lsn, links)) => {
                    self.durable = lsn;
                    news(News::Durable { end: lsn, links });
                }
                Some(Work::Erases { number, place }) => {
                    self.free.push(place);
                    news(News::Erased { number });
                }
                Some(Work::Begins) | None => {}
            }
        }
    }

    /// Takes the buffer of a write whose bytes were copied elsewhere, for a next batch.
    pub fn reuse(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_MAX && (1..=SPARE_BYTES_MAX).contains(&buffer.capacity()) {
            self.spare.push(buffer);
        }
    }

    /// The record at this place, of so many [bytes](Record::encoded_bytes), is out of date.
    pub fn forget(&mut self, lsn: Lsn, bytes: usize) {
        if let Some(segment) = self.segments.get_mut(&self.geometry.segment_of(lsn)) {
            segment.live_bytes = segment.live_bytes.saturating_sub(bytes as u64);
        }
    }

    /// Every record is out of date, but for one at this place of so many [bytes](Record::encoded_bytes), if there is one.
    pub fn forget_all_but(&mut self, kept: Option<(Lsn, usize)>) {
        self.segments.values_mut().for_each(|segment| segment.live_bytes = 0);
        if let Some((lsn, bytes)) = kept
            && let Some(segment) = self.segments.get_mut(&self.geometry.segment_of(lsn))
        {
            segment.live_bytes = bytes as u64;
        }
    }

    /// The segment whose cleaning gives most: that with the fewest bytes that count, of those that are whole on the medium and
    /// whose cleaning gives more room than it takes. Never the last one: its batches say how far the log is, whose places must not be given out again.
    pub fn next_to_clean(&self) -> Option<(u64, Segment)> {
        self.next_to_clean_of(|_| true)
    }

    /// The same, of those for which `may` is true.
    pub(crate) fn next_to_clean_of(&self, may: impl Fn(u64) -> bool) -> Option<(u64, Segment)> {
        let pays = self.whole_segments().filter(|(number, segment)| may(*number) && self.pays(segment));
        pays.min_by_key(|(_, segment)| segment.live_bytes)
    }

    /// Segments that are whole on the medium, and were not cleaned.
    fn whole_segments(&self) -> impl Iterator<Item = (u64, Segment)> + '_ {
        let last = self.segments.keys().next_back().copied();
        let end = |number: u64| Lsn((number + 1) * self.geometry.segment_bytes);
        let whole = move |number: u64| Some(number) != last && end(number) <= self.open_at.min(self.durable);
        let in_use =
            self.segments.iter().filter(move |(number, segment)| segment.state == State::InUse && whole(**number));
        in_use.map(|(number, segment)| (*number, *segment))
    }

    /// The segment with the most that is out of date, of those for which `may` is true, whether its cleaning [pays](Self::pays) or not: what
    /// counts of it fits into a new segment, and leaves [room](Self::gives_room) there for a purpose. Each time there is less that is
    /// out of date, so this comes to an end.
    pub(crate) fn next_to_squeeze(&self, purpose: Purpose, may: impl Fn(u64) -> bool) -> Option<(u64, Segment)> {
        let gives = |segment: &Segment| self.gives_room(purpose, segment, segment.dead_bytes());
        let all = self.whole_segments().filter(|(number, segment)| may(*number) && gives(segment));
        all.max_by_key(|(_, segment)| segment.dead_bytes())
    }

    /// Whether the copy of what counts of a segment fits into a new one, and leaves room there: `waste_bytes` of it do not count. For new
    /// values the room must be worth the copy: [`COPIED_PER_FREED_MAX`].
    fn gives_room(&self, purpose: Purpose, segment: &Segment, waste_bytes: u64) -> bool {
        let (room, loss) = (self.geometry.append_bytes_max() as u64, self.copy_loss());
        // The longest record may not fit into the rest of the segment in which the copy begins.
        let freed = waste_bytes.saturating_sub(loss + segment.longest_bytes);
        let is_worth_it = purpose < Purpose::Writing || segment.live_bytes <= COPIED_PER_FREED_MAX * freed;
        waste_bytes > loss && segment.live_bytes + loss <= room && is_worth_it
    }

    /// Whether the last segment could be squeezed if another one were the last: records that take the place of others may all be in it,
    /// the old ones and the new ones.
    pub(crate) fn last_gives_room(&self, purpose: Purpose) -> bool {
        let Some((number, last)) = self.segments.last_key_value() else { return false };
        if purpose == Purpose::Writing {
            // No place for a new segment is spent where this one could not be squeezed behind it.
            return self.gives_room(purpose, last, last.dead_bytes());
        }
        let is_open = *number == self.geometry.segment_of(self.open_at);
        let open_bytes = if self.open.is_empty() { 0 } else { self.open.len() as u64 };
        let used = if is_open {
            self.open_at.0 % self.geometry.segment_bytes + open_bytes
        } else {
            self.geometry.segment_bytes
        };
        self.gives_room(purpose, last, used.saturating_sub(last.live_bytes))
    }

    /// The segment with the most that is out of date, of those for which `may` is true, whatever room its cleaning gives. There must be a
    /// place for the copy beside that which cleaning for room needs.
    pub(crate) fn next_with_dead(&self, may: impl Fn(u64) -> bool) -> Option<(u64, Segment)> {
        let has_dead = |number: u64, segment: &Segment| may(number) && segment.dead_bytes() > 0;
        let all = self.whole_segments().filter(|(number, segment)| has_dead(*number, segment));
        all.max_by_key(|(_, segment)| segment.dead_bytes())
    }

    /// Bytes of room that the copy of what counts of a segment may lose: what each batch of the cleaner has beside its records.
    fn copy_loss(&self) -> u64 {
        let batches = self.geometry.segment_bytes / CLEANED_AT_ONCE_BYTES as u64 + 3;
        batches * (self.geometry.block_bytes.get() + 2 * HEADER_BYTES) as u64
    }

    /// Whether the last segment has something that is out of date.
    pub(crate) fn last_has_dead(&self) -> bool {
        self.segments.values().next_back().is_some_and(|last| last.dead_bytes() > 0)
    }

    /// Ends the last segment, so that it can be cleaned: where a place is left behind this purpose, and what was appended is on its way.
    pub(crate) fn end_last(&mut self, purpose: Purpose) -> Result<(), AppendError> {
        if self.failed {
            return Err(AppendError::Failed);
        }
        self.begin_segment(self.left_by(purpose))?;
        // The one before is whole where the log is durable behind it, and nothing else may ever be written there.
        self.close_batch(false, 0);
        Ok(())
    }

    /// Places that are free at most when a segment is to be cleaned: a quarter of all if at most half of it counts (`cheap`), and
    /// else a sixteenth. What waits gets cheaper, because more of it goes out of date; and the fewer places are kept free, the
    /// less the segments in use are full of what counts.
    pub(crate) fn free_max(&self, cheap: bool) -> usize {
        let (places, left) = (self.places, self.left_by(Purpose::Writing));
        // Above the places at which writers wait, where there are enough; the more are kept free, the more is written anew.
        let least = (places / 4).min(FREE_MIN).max(left);
        least.max(if cheap { places / 4 } else { places / 16 })
    }

    /// Whether at most half of a segment counts.
    pub(crate) fn is_cheap(&self, segment: &Segment) -> bool {
        2 * segment.live_bytes <= self.geometry.append_bytes_max() as u64
    }

    /// Segments that were cleaned and are not being erased.
    pub(crate) fn cleaned_segments(&self) -> impl Iterator<Item = u64> + '_ {
        self.segments.iter().filter(|(_, segment)| segment.state != State::InUse).map(|(number, _)| *number)
    }

    /// Whether segments that were cleaned wait to be erased.
    pub fn has_cleaned_segments(&self) -> bool {
        self.cleaned_segments().next().is_some()
    }

    /// True if cleaning a segment would give more room than it takes, or segments that were cleaned wait to be erased.
    pub fn can_be_cleaned(&self) -> bool {
        self.gives_back() || self.next_to_clean().is_some()
    }

    /// The same where what is out of date is cleaned for a purpose though it does not pay, also of segments that are not whole on the medium
    /// yet.
    pub(crate) fn can_be_squeezed(&self, purpose: Purpose) -> bool {
        let mut before_last = self.segments.values().rev().skip(1).filter(|segment| segment.state == State::InUse);
        self.gives_back()
            || before_last.any(|segment| self.pays(segment) || self.gives_room(purpose, segment, segment.dead_bytes()))
            || self.last_gives_room(purpose)
    }

    /// Whether segments that were cleaned are not free yet.
    pub(crate) fn gives_back(&self) -> bool {
        let erasing = self.flights.iter().any(|flight| matches!(flight.what, Work::Erases { .. }));
        erasing || self.has_cleaned_segments()
    }

    /// True if cleaning this segment gives more room than it takes. Long records leave the end of a segment unused, and will
    /// do so again: there must be room for one more of the longest beside what counts. If that is less than half of the room,
    /// two such segments make one.
    fn pays(&self, segment: &Segment) -> bool {
        let (room, live) = (self.geometry.append_bytes_max() as u64, segment.live_bytes);
        // Headers and ends of blocks, of which the cleaner's batches have others than those of the commands.
        let between = room / 64;
        let is_small = live + 4 * self.geometry.block_bytes.get() as u64 <= room / 2;
        is_small || live <= room / 8 * 7 && live + segment.longest_bytes + between <= room
    }

    /// Everything of the segment that counts was appended again; its place is free once that is promised, and
    /// [`Log::erase_cleaned`] was called.
    pub fn cleaned(&mut self, number: u64) {
        let written_again_before = self.appended_end();
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.state = State::Cleaned(written_again_before);
        }
    }

    /// Where what was appended ends. The next batch may begin behind that, in the next segment.
    fn appended_end(&self) -> Lsn {
        if !self.open.is_empty() {
            return Lsn(self.open_at.0 + self.open.len() as u64);
        }
        let end_of = |flight: &Flight| match &flight.what {
            Work::Reaches(end, _) => Some(*end),
            Work::Begins | Work::Erases { .. } => None,
        };
        self.flights.iter().rev().find_map(end_of).unwrap_or(self.durable)
    }

    /// Begins to overwrite the headers of cleaned segments whose records are promised elsewhere in the log. `may_go` says
    /// of a segment whether what outdates its records in other logs is promised, too.
    pub fn erase_cleaned(&mut self, may_go: impl Fn(u64) -> bool) {
        let promised = self.promised;
        let ready = |number: &u64, segment: &mut Segment| matches!(segment.state, State::Cleaned(at) if at <= promised && may_go(*number));
        let ready: Vec<_> = self.segments.extract_if(.., ready).collect();
        ready.into_iter().for_each(|(number, segment)| self.erase(number, segment.place));
    }

    fn erase(&mut self, number: u64, place: u32) {
        let header = SegmentHeader { standing: Standing::Cleaned, ..self.header(number) };
        self.push_write(place, 0, header.encode(), Work::Erases { number, place });
    }

    fn header(&self, number: u64) -> SegmentHeader {
        SegmentHeader {
            store: self.geometry.store,
            log: self.log,
            number,
            epoch: self.epoch,
            segment_bytes: self.geometry.segment_bytes,
            block_bytes: self.geometry.block_bytes.get() as u32,
            standing: Standing::Counts,
            live: Some(Vec::new()),
        }
    }
}
