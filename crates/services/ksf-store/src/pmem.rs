//! A log on persistent memory: its file is mapped, records are written with stores, and what was flushed from the caches of
//! the CPU before a fence is durable.
//!
//! ```text
//!   next_write() ─► PmemLog::write ... write ─► PmemLog::commit ─► written()
//!                   stores and flushes          one fence          replies may leave
//! ```
//!
//! **What a power cut may tear.** Of what was stored and not fenced, each cache line may be on the medium or not. The
//! order of the stores does not matter, because the CPU writes lines back when it wants. Within a line the medium keeps words of 8
//! bytes whole, and a line may be a mix of them. Nothing here needs even that:
//!
//! - *A batch* has a checksum of its header and one of its body. A batch that is torn in any way is the torn end of the
//!   log, as it is on a disk. It lies where nothing counts, so no bytes are torn of which replies told.
//! - *The header of a segment* is written over an older one when the segment is erased, or when the next one begins in its
//!   place. A disk writes the first sector of it whole, so that there is always the old or the new one. Memory does not.
//!   So the header is written to the [journal](JOURNAL_BYTES) of the log first, behind the last place. Once that is fenced,
//!   the header is stored in its place. A start that finds a whole header in the journal has it in place again. That
//!   changes nothing if it was there already.
//!
//! The rest of the block behind a batch or a header is not written. No reader looks at it.

use crate::format::{HEADER_BYTES, meaningful_bytes};

/// Bytes of the journal of a log, behind its last place: two blocks of 4,096 bytes. The first block of a segment fits
/// into it with the head of the journal.
pub const JOURNAL_BYTES: usize = 8192;

/// Bytes of the head of the journal: one cache line.
const HEAD_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"ksfJ";
/// Longest header of a segment, with its list.
const HEADER_BYTES_MAX: usize = JOURNAL_BYTES - HEAD_BYTES;

/// Memory that keeps what was stored over a power cut, once it was flushed and then fenced. Without that it may keep it, too.
pub trait Lines {
    /// Bytes of the memory.
    fn bytes(&self) -> u64;

    /// Stores bytes. Every reader of the memory sees them from now on.
    fn store(&mut self, at: u64, bytes: &[u8]);

    /// Begins to write back every cache line of which one of these bytes is a part. The next fence waits for that.
    fn flush(&mut self, at: u64, bytes: u64);

    /// What was flushed before is durable when this returns.
    fn fence(&mut self);
}

/// Where the journal of a log begins.
pub fn journal_at(segment_bytes: u64, places: u32) -> u64 {
    segment_bytes * u64::from(places)
}

/// The header of a segment as the journal of its log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journaled {
    /// The place of the segment.
    pub place: u32,
    /// The front of the place.
    pub header: Vec<u8>,
}

impl Journaled {
    /// What a journal has; `None` if it was never written, or not whole. Then every header is in its place.
    pub fn decode(journal: &[u8]) -> Option<Self> {
        let word = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(journal.get(at..at + 4)?.try_into().ok()?)) };
        let (place, bytes) = (word(8)?, word(12)? as usize);
        let whole = journal.get(..HEAD_BYTES.checked_add(bytes)?)?;
        let is_whole = journal.get(4..8)? == MAGIC && crc32c::crc32c(&whole[4..]) == word(0)?;
        is_whole.then(|| Self { place, header: whole[HEAD_BYTES..].to_vec() })
    }

    /// As the journal has it.
    ///
    /// # Panics
    ///
    /// The header is longer than the journal. That of a segment with blocks of 4,096 bytes is shorter.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.header.len() <= HEADER_BYTES_MAX, "a header of {} bytes", self.header.len());
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[4..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.place.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.header.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.header);
        let crc = crc32c::crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Puts it into the front of a place as that was read.
    pub fn overlay(&self, place: u32, front: &mut [u8]) {
        if place == self.place {
            let bytes = self.header.len().min(front.len());
            front[..bytes].copy_from_slice(&self.header[..bytes]);
        }
    }
}

/// The medium of one log.
#[derive(Debug)]
pub struct PmemLog<L> {
    lines: L,
    segment_bytes: u64,
    journal_at: u64,
    /// A header was stored in its place since the last fence, so the journal is still needed.
    needs_journal: bool,
}

impl<L: Lines> PmemLog<L> {
    /// A log with this number of places of one segment each, and the journal behind them.
    ///
    /// # Panics
    ///
    /// The memory is too short for them.
    pub fn new(lines: L, segment_bytes: u64, places: u32) -> Self {
        let journal_at = journal_at(segment_bytes, places);
        assert!(journal_at + JOURNAL_BYTES as u64 <= lines.bytes(), "{} bytes are too few for a log", lines.bytes());
        Self { lines, segment_bytes, journal_at, needs_journal: false }
    }

    /// Takes a [write](crate::log::Write) of the log, or a [repair](crate::recover::Repair). It is durable after the next
    /// [`commit`](Self::commit).
    ///
    /// # Panics
    ///
    /// It lies outside of the places.
    pub fn write(&mut self, place: u32, offset: u64, bytes: &[u8]) {
        let bytes = &bytes[..meaningful_bytes(bytes)];
        let at = u64::from(place) * self.segment_bytes + offset;
        assert!(at + bytes.len() as u64 <= self.journal_at, "a write to byte {at} is outside of the log");
        if offset == 0 {
            self.journal(&Journaled { place, header: bytes.to_vec() });
            self.needs_journal = true;
        }
        self.put(at, bytes);
    }

    /// Makes durable what was written.
    pub fn commit(&mut self) {
        self.lines.fence();
        self.needs_journal = false;
    }

    /// Makes durable what is there, also what a process before this one stored and did not flush.
    pub fn keep_all(&mut self) {
        self.lines.flush(0, self.lines.bytes());
        self.commit();
    }

    /// Brings the header that the journal has to its place, durably.
    pub fn finish(&mut self, journaled: &Journaled) {
        let Journaled { place, header } = journaled;
        self.put(u64::from(*place) * self.segment_bytes, header);
        self.commit();
    }

    /// The memory.
    pub fn lines(&self) -> &L {
        &self.lines
    }

    /// The same, to be changed by a test.
    pub fn lines_mut(&mut self) -> &mut L {
        &mut self.lines
    }

    /// Has a header in the journal, durably, before anything of it is in its place.
    fn journal(&mut self, journaled: &Journaled) {
        debug_assert!(journaled.header.len() >= HEADER_BYTES);
        if self.needs_journal {
            // The one of before may be torn in its place until then.
            self.commit();
        }
        self.put(self.journal_at, &journaled.encode());
        self.lines.fence();
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.lines.store(at, bytes);
        self.lines.flush(at, bytes.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journaled() -> Journaled {
        Journaled { place: 0x0102_0304, header: (0..200).collect() }
    }

    /// `docs/formats/store.md` has a row for each field.
    #[test]
    fn the_journal_is_as_described() {
        let encoded = journaled().encode();
        assert_eq!(Journaled::decode(&encoded), Some(journaled()));
        let values = [crc32c::crc32c(&encoded[4..]), u32::from_le_bytes(*b"ksfJ"), journaled().place, 200, 0x0302_0100];
        let docs = include_str!("../../../../docs/formats/store.md");
        let lines = docs.lines().skip_while(|line| !line.starts_with("| journal, byte |")).skip(2);
        let rows: Vec<&str> = lines.take_while(|line| line.starts_with('|')).collect();
        assert_eq!(rows.len(), values.len());
        for (row, value) in rows.into_iter().zip(values) {
            let at: usize = row.trim_matches('|').split('|').next().unwrap().trim().parse().unwrap();
            assert_eq!(encoded[at..at + 4], value.to_le_bytes(), "{row}");
        }
    }

    /// One that was written in part is none, also where the rest is that of an older one.
    #[test]
    fn a_journal_that_is_torn_is_none() {
        let (old, new) = (journaled(), Journaled { place: 7, header: vec![9; 136] });
        let (old, new) = (old.encode(), new.encode());
        for cut in (8..new.len()).step_by(8) {
            let mut torn = old.clone();
            torn[..cut].copy_from_slice(&new[..cut]);
            assert_eq!(Journaled::decode(&torn), None, "{cut} bytes of the new one");
            let mut torn = old.clone();
            torn[cut..new.len()].copy_from_slice(&new[cut..]);
            assert_eq!(Journaled::decode(&torn), None, "all but {cut} bytes of the new one");
        }
        for cut in 0..old.len() {
            assert_eq!(Journaled::decode(&old[..cut]), None);
        }
        assert_eq!(Journaled::decode(&[0; JOURNAL_BYTES]), None);
        assert_eq!(Journaled::decode(&[0xff; JOURNAL_BYTES]), None);
    }

    /// Everything that the medium is asked for, in order.
    #[derive(Debug, Default)]
    struct Asked(Vec<(&'static str, u64, u64)>);

    impl Lines for Asked {
        fn bytes(&self) -> u64 {
            1 << 20
        }

        fn store(&mut self, at: u64, bytes: &[u8]) {
            self.0.push(("store", at, bytes.len() as u64));
        }

        fn flush(&mut self, at: u64, bytes: u64) {
            self.0.push(("flush", at, bytes));
        }

        fn fence(&mut self) {
            self.0.push(("fence", 0, 0));
        }
    }

    /// Batches share one fence; a header takes one more, and the second of two waits for the first.
    #[test]
    fn batches_share_a_fence() {
        let header = crate::format::SegmentHeader {
            store: 1,
            log: 0,
            number: 0,
            epoch: 1,
            segment_bytes: 8192,
            block_bytes: 4096,
            standing: crate::format::Standing::Counts,
            live: Some(vec![1, 2]),
        };
        let mut log = PmemLog::new(Asked::default(), 8192, 4);
        log.write(1, 4096, &[1; 100]);
        log.write(2, 4096, &[1; 200]);
        log.commit();
        let put = |at: u64, bytes: u64| [("store", at, bytes), ("flush", at, bytes)];
        let fence = [("fence", 0, 0)];
        let batches = [&put(12288, 100)[..], &put(20480, 200), &fence].concat();
        assert_eq!(std::mem::take(&mut log.lines_mut().0), batches);
        log.write(0, 0, &header.encode());
        log.write(0, 4096, &[1; 100]);
        log.write(3, 0, &header.encode());
        log.commit();
        let journal = put(4 * 8192, 144);
        let headers =
            [&journal[..], &fence, &put(0, 80), &put(4096, 100), &fence, &journal, &fence, &put(3 * 8192, 80), &fence];
        assert_eq!(log.lines().0, headers.concat());
    }
}
