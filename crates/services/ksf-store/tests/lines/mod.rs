//! Memory that keeps over a power cut what was flushed and fenced, and of the rest what chance says.
//!
//! ```text
//!   store ─► seen ── flush ─► pending, as it was then ── fence ─► kept
//!             └── the CPU writes any line back when it wants ──────► kept
//! ```
//!
//! It works by difference: a power cut looks at each line of which `seen` is not what is `kept`. The code under test does not
//! say where it may be interrupted: the power goes before any store of 8 bytes, any flush and any fence.

use std::collections::BTreeMap;

use ksf_store::log::{Geometry, Log, Write};
use ksf_store::pmem::{JOURNAL_BYTES, Journaled, Lines, PmemLog, journal_at};
use ksf_store::recover::{Found, Places, Repair, cut_by_links};
use ksf_test::Random;

use crate::common::Medium;
use crate::opened::read_all;

const LINE_BYTES: usize = 64;
const WORD_BYTES: usize = 8;

/// What is wrong with the code that writes, or that starts: each of these must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// One flush in 16 is left out.
    FlushLeftOut,
    /// One fence in 16 is left out.
    FenceLeftOut,
    /// What is in a place is flushed behind its fence.
    FenceBeforeFlush,
    /// The fence behind the journal is left out: a header is stored together with what is to save it.
    HeaderWithJournal,
    /// A second header takes the journal while the first is not known to be in its place.
    JournalTooSoon,
    /// A start does not make durable what it finds.
    FoundNotKept,
    /// A start does not look into the journal.
    JournalNotRead,
}

/// The memory of one log.
#[derive(Debug)]
pub(crate) struct SimulatedLines {
    /// What any reader sees.
    seen: Vec<u8>,
    /// What a power cut leaves of lines that were not stored to since.
    kept: Vec<u8>,
    /// Lines that were flushed since the last fence, as they were then.
    pending: BTreeMap<usize, [u8; LINE_BYTES]>,
    journal_at: u64,
    random: Random,
    mutant: Option<Mutant>,
    /// Steps until the power goes, if it is about to.
    left: Option<u64>,
    /// Steps that were done.
    done: u64,
    /// The journal was stored to since the last fence.
    in_journal: bool,
    /// For [`Mutant::FenceBeforeFlush`]: what is flushed behind the next fence.
    late: Vec<(u64, u64)>,
}

impl SimulatedLines {
    fn new(geometry: Geometry, places: u32, seed: u64, mutant: Option<Mutant>) -> Self {
        let journal_at = journal_at(geometry.segment_bytes, places);
        let bytes = journal_at as usize + JOURNAL_BYTES;
        Self {
            seen: vec![0; bytes],
            kept: vec![0; bytes],
            pending: BTreeMap::new(),
            journal_at,
            random: Random::new(seed),
            mutant,
            left: None,
            done: 0,
            in_journal: false,
            late: Vec::new(),
        }
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// Whether there is power for one more step.
    fn step(&mut self) -> bool {
        if let Some(left) = &mut self.left {
            if *left == 0 {
                return false;
            }
            *left -= 1;
        }
        self.done += 1;
        true
    }

    /// The line reaches the medium.
    fn write_back(&mut self, at: usize) {
        self.kept[at..at + LINE_BYTES].copy_from_slice(&self.seen[at..at + LINE_BYTES]);
    }

    /// Of each line that is not known to be on the medium, what is there is old, new, as it was flushed, or a mix of their words.
    fn lose_power(&mut self) {
        for at in (0..self.seen.len()).step_by(LINE_BYTES) {
            if self.seen[at..at + LINE_BYTES] == self.kept[at..at + LINE_BYTES] {
                continue;
            }
            let mut new = [0; LINE_BYTES];
            new.copy_from_slice(&self.seen[at..at + LINE_BYTES]);
            let flushed = self.pending.get(&at).copied().unwrap_or(new);
            match self.random.within(0..=3) {
                0 => {}
                1 => self.write_back(at),
                _ => {
                    for word in (0..LINE_BYTES).step_by(WORD_BYTES) {
                        if let Some(line) = self.random.pick(&[None, Some(new), Some(flushed)]) {
                            let to = &mut self.kept[at + word..at + word + WORD_BYTES];
                            to.copy_from_slice(&line[word..word + WORD_BYTES]);
                        }
                    }
                }
            }
        }
        self.seen.clone_from(&self.kept);
        self.forget();
    }

    /// What the CPU was told to write back, and had not: that is no longer known.
    fn forget(&mut self) {
        self.pending.clear();
        self.late.clear();
        (self.in_journal, self.left) = (false, None);
    }

    fn flush_now(&mut self, at: u64, bytes: u64) {
        let (first, end) = (at as usize / LINE_BYTES * LINE_BYTES, (at + bytes) as usize);
        for line in (first..end).step_by(LINE_BYTES) {
            let now = &self.seen[line..line + LINE_BYTES];
            if *now == self.kept[line..line + LINE_BYTES] {
                self.pending.remove(&line);
            } else {
                let mut content = [0; LINE_BYTES];
                content.copy_from_slice(now);
                self.pending.insert(line, content);
            }
        }
    }
}

impl Lines for SimulatedLines {
    fn bytes(&self) -> u64 {
        self.seen.len() as u64
    }

    fn store(&mut self, at: u64, bytes: &[u8]) {
        self.in_journal |= at == self.journal_at;
        for (number, word) in bytes.chunks(WORD_BYTES).enumerate() {
            if !self.step() {
                return;
            }
            let at = at as usize + number * WORD_BYTES;
            self.seen[at..at + word.len()].copy_from_slice(word);
            if self.random.one_in(64) {
                self.write_back(at / LINE_BYTES * LINE_BYTES);
            }
        }
    }

    fn flush(&mut self, at: u64, bytes: u64) {
        if !self.step() || self.is(Mutant::FlushLeftOut) && self.random.one_in(16) {
            return;
        }
        // What is in the journal keeps its order, so that this is about the places.
        if self.is(Mutant::FenceBeforeFlush) && at < self.journal_at {
            self.late.push((at, bytes));
        } else {
            self.flush_now(at, bytes);
        }
    }

    fn fence(&mut self) {
        let in_journal = std::mem::take(&mut self.in_journal);
        let is_left_out =
            self.is(Mutant::FenceLeftOut) && self.random.one_in(16) || self.is(Mutant::HeaderWithJournal) && in_journal;
        if !self.step() || is_left_out {
            return;
        }
        for (at, line) in std::mem::take(&mut self.pending) {
            self.kept[at..at + LINE_BYTES].copy_from_slice(&line);
        }
        for (at, bytes) in std::mem::take(&mut self.late) {
            self.flush_now(at, bytes);
        }
    }
}

/// A log on such memory.
pub(crate) struct PmemMedium {
    geometry: Geometry,
    places: u32,
    log: PmemLog<SimulatedLines>,
    /// What was stored and is not told to be durable.
    under_way: Vec<Write>,
}

impl PmemMedium {
    pub(crate) fn new(geometry: Geometry, places: u32, seed: u64, mutant: Option<Mutant>) -> Self {
        let lines = SimulatedLines::new(geometry, places, seed, mutant);
        let log = PmemLog::new(lines, geometry.segment_bytes, places);
        Self { geometry, places, log, under_way: Vec::new() }
    }

    /// Stores a write of the log.
    pub(crate) fn begin(&mut self, write: Write) {
        self.put(write.place, write.offset, &write.bytes);
        self.under_way.push(write);
    }

    /// One fence for all that was begun.
    pub(crate) fn end_all(&mut self) -> Vec<Write> {
        self.commit();
        std::mem::take(&mut self.under_way)
    }

    pub(crate) fn put(&mut self, place: u32, offset: u64, bytes: &[u8]) {
        if self.log.lines().is(Mutant::JournalTooSoon) {
            // The log no longer knows whether it needs the journal.
            self.forget_process();
        }
        self.log.write(place, offset, bytes);
    }

    pub(crate) fn commit(&mut self) {
        self.log.commit();
    }

    /// Steps that were done: stores of 8 bytes, flushes and fences.
    pub(crate) fn steps(&self) -> u64 {
        self.log.lines().done
    }

    /// Behind this number of steps nothing happens any more, until the power [goes](Self::lose_power).
    pub(crate) fn fail_after(&mut self, steps: u64) {
        self.log.lines_mut().left = Some(steps);
    }

    pub(crate) fn lose_power(&mut self) {
        self.log.lines_mut().lose_power();
        self.forget_process();
        self.under_way.clear();
    }

    /// The process ends in the middle of what its log has to write: with the power, or without, and then the CPU keeps what
    /// it stored.
    pub(crate) fn crash(&mut self, log: &mut Log, random: &mut Random) {
        self.fail_after(random.below(400));
        while let Some(write) = log.next_write(usize::MAX, 0) {
            self.begin(write);
        }
        if random.one_in(4) {
            self.log.lines_mut().forget();
            self.forget_process();
            self.under_way.clear();
        } else {
            self.lose_power();
        }
    }

    /// The same memory without what the process knew.
    fn forget_process(&mut self) {
        let nothing = Geometry { segment_bytes: 0, ..self.geometry };
        let lines = std::mem::replace(self.log.lines_mut(), SimulatedLines::new(nothing, 0, 0, None));
        self.log = PmemLog::new(lines, self.geometry.segment_bytes, self.places);
    }

    fn journaled(&self) -> Option<Journaled> {
        let lines = self.log.lines();
        let is_read = !lines.is(Mutant::JournalNotRead);
        Journaled::decode(&lines.seen[lines.journal_at as usize..]).filter(|_| is_read)
    }

    /// Makes durable what is there.
    fn keep_all(&mut self) {
        if !self.log.lines().is(Mutant::FoundNotKept) {
            self.log.keep_all();
        }
    }

    /// The front of a place, as a start reads it.
    pub(crate) fn front(&self, place: u32, bytes: usize) -> Vec<u8> {
        let from = place as usize * self.geometry.segment_bytes as usize;
        let mut front = self.log.lines().seen[from..from + bytes].to_vec();
        self.journaled().iter().for_each(|journaled| journaled.overlay(place, &mut front));
        front
    }

    fn image(&self) -> Medium {
        let place = |place| self.front(place, self.geometry.segment_bytes as usize);
        Medium { places: (0..self.places).map(place).collect(), under_way: Vec::new(), ..Medium::default() }
    }
}

impl Places for PmemMedium {
    fn places(&self) -> u32 {
        self.places
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        *into = self.front(place, self.geometry.segment_bytes as usize);
        Ok(())
    }
}

/// Starts the logs as `ksf-kv` does: what is there is read, kept, and repaired. The power goes now and then meanwhile, and
/// `epoch` grows.
pub(crate) fn recover(
    geometry: Geometry,
    media: &mut [PmemMedium],
    epoch: &mut u32,
    random: &mut Random,
) -> Vec<Found> {
    loop {
        let images: Vec<Medium> = media.iter().map(PmemMedium::image).collect();
        let mut found = read_all(geometry, &images).unwrap();
        cut_by_links(&mut found).unwrap();
        // All of them, before any tells of what it has, which may have seen what another one has.
        media.iter_mut().for_each(PmemMedium::keep_all);
        let mut is_cut_off = false;
        for (found, medium) in found.iter_mut().zip(&mut *media) {
            if is_cut_off {
                break;
            }
            if random.one_in(8) {
                is_cut_off = true;
                medium.fail_after(random.below(200));
            }
            if let Some(journaled) = medium.journaled() {
                medium.log.finish(&journaled);
            }
            for Repair { place, offset, bytes } in found.repairs(*epoch) {
                medium.put(place, offset, &bytes);
                medium.commit();
            }
        }
        if !is_cut_off {
            return found;
        }
        media.iter_mut().for_each(PmemMedium::lose_power);
        *epoch += 1;
    }
}
