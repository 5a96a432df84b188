//! What the logs of a store are written through: a disk, or persistent memory, which is mapped.

use std::fmt;
use std::fs::File;
use std::io;
use std::str::FromStr;

use ksf::mapped::{MappedFile, Mapping};
use ksf_store::pmem::{JOURNAL_BYTES, Lines, PmemLog, journal_at};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};

/// What the logs of a store are written through. It may change from start to start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Medium {
    /// Writes of whole blocks by the shard's engine, durable when they are done.
    #[default]
    Block,
    /// Stores into a mapping of the log with MAP_SYNC on a DAX file system, durable after a flush of the caches and a fence.
    Pmem,
    /// The same stores, flushes and fences on a file in the kernel's memory (tmpfs): a crash of the process loses nothing, and a
    /// power cut everything. It stands in for persistent memory where speed is measured.
    PmemMemory,
}

impl Medium {
    const ALL: [(Self, &str); 3] = [(Self::Block, "block"), (Self::Pmem, "pmem"), (Self::PmemMemory, "pmem-memory")];

    /// Whether what was acknowledged is there after a loss of power.
    pub fn survives_power_cut(self) -> bool {
        self != Self::PmemMemory
    }

    pub(crate) fn is_mapped(self) -> bool {
        self != Self::Block
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(medium, _)| medium == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Medium {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text).map(|(medium, _)| *medium);
        found.ok_or_else(|| format!("\"{text}\" is none of block, pmem, pmem-memory"))
    }
}

/// A log that is mapped.
#[derive(Debug)]
pub(crate) struct Mapped(MappedFile);

impl Lines for Mapped {
    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }

    fn store(&mut self, at: u64, bytes: &[u8]) {
        self.0.store(at as usize, bytes);
    }

    fn flush(&mut self, at: u64, bytes: u64) {
        self.0.flush(at as usize, bytes as usize);
    }

    fn fence(&mut self) {
        self.0.fence();
    }
}

/// A log on persistent memory.
pub(crate) type MappedLog = PmemLog<Mapped>;

/// How its cache lines are flushed.
pub(crate) fn instruction(log: &MappedLog) -> &'static str {
    log.lines().0.instruction()
}

/// Whether a file, which is on the file system of the logs, can be of this medium.
///
/// # Errors
///
/// It cannot be asked. [`io::ErrorKind::Unsupported`]: what is missing.
pub(crate) fn suits(medium: Medium, file: &File) -> io::Result<()> {
    let unsupported = |why: &str| Err(io::Error::new(io::ErrorKind::Unsupported, why));
    match medium {
        Medium::Block => Ok(()),
        Medium::Pmem => {
            let about = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
            if about.stx_attributes.contains(StatxAttributes::DAX) {
                return Ok(());
            }
            unsupported(
                "its file system has no DAX: it is to lie on a pmem device, and to be mounted with dax=always (ext4, XFS)",
            )
        }
        // TMPFS_MAGIC of statfs(2).
        Medium::PmemMemory if rustix::fs::fstatfs(file)?.f_type == 0x0102_1994 => Ok(()),
        Medium::PmemMemory => {
            unsupported("its file system is not in memory: it is to be a tmpfs, for instance /dev/shm")
        }
    }
}

/// Maps a log with this number of places. The file has the journal behind them.
///
/// # Errors
///
/// Those of [`MappedFile::map`].
pub(crate) fn map(medium: Medium, file: &File, segment_bytes: u64, places: u32) -> io::Result<MappedLog> {
    let bytes = journal_at(segment_bytes, places) + JOURNAL_BYTES as u64;
    let mapping = if medium == Medium::Pmem { Mapping::Synchronous } else { Mapping::Shared };
    let mapped = MappedFile::map(file, usize::try_from(bytes).unwrap_or(usize::MAX), mapping)?;
    mapped.populate();
    Ok(PmemLog::new(Mapped(mapped), segment_bytes, places))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_is_read_as_it_is_written() {
        for (medium, name) in Medium::ALL {
            assert_eq!((medium.to_string().as_str(), name.parse()), (name, Ok(medium)));
        }
        for text in ["", "memory", "Pmem", "pmem "] {
            assert!(text.parse::<Medium>().unwrap_err().contains("block, pmem, pmem-memory"), "{text}");
        }
    }
}
