//! Cleaning a log while it is served: one segment at a time, in small steps between the turns.
//!
//! ```text
//!   places are short ─► the segment with the least that counts ─► read a piece ─► write anew what counts of it ─┐
//!                                                                  ▲                                            │
//!                                                                  └──────────── until it is done ──────────────┴─► erase
//! ```

use ksf::files::{File, FileOp, Files};
use ksf_store::log::AppendError;
use ksf_store::store::{CleanError, Cleaning, Shard};

/// Bytes that are read, and cleaned, in one step.
const PIECE_BYTES: usize = 256 << 10;

/// The cleaner of a shard's log.
#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    at_work: Option<Work>,
    /// Segments that it has cleaned.
    pub(crate) cleaned: u64,
}

#[derive(Debug)]
struct Work {
    cleaning: Cleaning,
    /// Where the segment begins in the file.
    offset: u64,
    segment: Vec<u8>,
    /// The read that is under way, by its token.
    reading: Option<u64>,
}

impl Cleaner {
    /// Begins what is to be done next. `token`: for a read; it is used if true is returned.
    pub(crate) fn step(&mut self, shard: &mut Shard, file: &File, files: &Files, token: u64) -> bool {
        shard.erase_cleaned();
        let log = shard.log();
        let geometry = *log.geometry();
        if self.at_work.is_none() {
            self.at_work = shard.due_to_clean().map(|(number, segment)| Work {
                cleaning: Cleaning::new(number),
                offset: u64::from(segment.place) * geometry.segment_bytes,
                segment: Vec::with_capacity(geometry.segment_bytes as usize),
                reading: None,
            });
        }
        let Some(work) = &mut self.at_work else { return false };
        let bytes = PIECE_BYTES.min(geometry.segment_bytes as usize - work.segment.len());
        if work.reading.is_some() || bytes == 0 {
            return false;
        }
        let read = FileOp::read(file, work.offset + work.segment.len() as u64, bytes, files.buffer(bytes));
        // What is refused is tried again in the next turn.
        let begun = files.begin(read, token).is_ok();
        work.reading = begun.then_some(token);
        begun
    }

    /// True while a read is under way.
    pub(crate) fn is_reading(&self) -> bool {
        self.at_work.as_ref().is_some_and(|work| work.reading.is_some())
    }

    /// True while a segment is being cleaned, and what is to be done next needs no read.
    pub(crate) fn is_at_work(&self) -> bool {
        self.at_work.is_some() && !self.is_reading()
    }

    /// True if this read was its own.
    pub(crate) fn has_read(&mut self, token: u64, bytes: &[u8]) -> bool {
        let Some(work) = self.at_work.as_mut().filter(|work| work.reading == Some(token)) else { return false };
        work.reading = None;
        work.segment.extend_from_slice(bytes);
        true
    }

    /// Writes anew what counts of what was read.
    ///
    /// # Errors
    ///
    /// A write of the log failed before, or the segment is damaged.
    pub(crate) fn clean(&mut self, shard: &mut Shard) -> Result<(), CleanError> {
        let Some(work) = &mut self.at_work else { return Ok(()) };
        match shard.clean(&mut work.cleaning, &work.segment, usize::MAX) {
            Ok(true) => {
                self.at_work = None;
                self.cleaned += 1;
                Ok(())
            }
            // No place is left until one that was cleaned before is erased.
            Ok(false) | Err(CleanError::Append(AppendError::Full)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
