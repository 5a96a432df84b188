//! A store's folder while no process serves it: looking at it, and writing it down as commands.
//!
//! Nothing here changes the folder.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use ksf_proto::resp;
use ksf_store::away::Wanted;
use ksf_store::cells::{Shape, score_of};
use ksf_store::format::{Lsn, Record, RecordKind};
use ksf_store::salvage::{Salvaged, salvage as salvage_log};
use ksf_store::store::Store;

use crate::disk::{Disk, DiskError, recover_error};
use crate::whole::FileError;

/// A log that is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogCheck {
    /// Its number.
    pub log: u16,
    /// Where it ends.
    pub end: Lsn,
    /// How far it says that replies told of it.
    pub promised: Lsn,
    /// Records in it, those that are out of date among them.
    pub records: u64,
}

/// A store that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its logs.
    pub logs: Vec<LogCheck>,
    /// Its keys.
    pub keys: usize,
    /// How often it was started.
    pub starts: u32,
    /// How fast it was read.
    pub recovery: Recovery,
}

/// How long a store took to be read, and how much that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Keys that it has.
    pub keys: usize,
    /// Bytes of its logs.
    pub log_bytes: u64,
    /// Threads that read it.
    pub threads: usize,
    /// From the first byte to the last key.
    pub took: Duration,
}

impl fmt::Display for Recovery {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, log_bytes, threads, took } = self;
        let seconds = took.as_secs_f64().max(1e-9);
        let (keys_per_s, mb_per_s) = (*keys as f64 / seconds, *log_bytes as f64 / seconds / 1e6);
        let threads = if *threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
        write!(to, "{} ms by {threads}, {keys_per_s:.0} keys/s, {mb_per_s:.0} MB/s of log", took.as_millis())
    }
}

/// Reads a store as a start does, and every checksum in it.
///
/// # Errors
///
/// [`DiskError`]: it is in use, is no store, or is damaged.
pub fn check(folder: &Path) -> Result<Check, DiskError> {
    let began = Instant::now();
    let mut disk = Disk::look(folder)?;
    let logs = disk.found.iter().map(|found| {
        let records = found.record_count();
        LogCheck { log: found.log(), end: found.end(), promised: found.promised(), records }
    });
    let (logs, starts, log_bytes) = (logs.collect(), disk.epoch, disk.found_bytes());
    // Only keys are wanted in memory.
    let (store, _) = disk.open_store(0)?;
    let (keys, threads, took) = (store.keys(), disk.threads.get(), began.elapsed());
    Ok(Check { logs, keys, starts, recovery: Recovery { keys, log_bytes, threads, took } })
}

/// Why a store was not written down.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// It does not open.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// What was written does not arrive.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The file for it cannot be had.
    #[error(transparent)]
    File(#[from] FileError),
}

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> OfflineError {
    move |source| OfflineError::Io { action, source }
}

pub(crate) fn write_command<'w>(to: &mut impl Write, words: impl ExactSizeIterator<Item = &'w [u8]>) -> io::Result<()> {
    write!(to, "*{}\r\n", words.len())?;
    for word in words {
        write!(to, "${}\r\n", word.len())?;
        to.write_all(word)?;
        to.write_all(b"\r\n")?;
    }
    Ok(())
}

/// What a key has.
enum Written {
    String(Vec<u8>),
    /// Subkeys and values in their order.
    Cells(Shape, Vec<(Vec<u8>, Vec<u8>)>),
}

/// Bytes of the cells that one command makes, unless a single one has more.
pub(crate) const CELLS_BYTES: usize = 256 << 10;
/// Bytes of a string that one command makes: half of the longest message that a server takes by default. What is behind
/// them is appended, for which the server writes the string anew.
const STRING_BYTES: usize = 4 << 20;

/// What a cell takes beside its bytes, or its score does.
pub(crate) const CELL_EXTRA_BYTES: usize = 64;

/// Cells for one command: those in front of `left`, which begins behind them then.
fn some_cells<'c>(left: &mut &'c [(Vec<u8>, Vec<u8>)]) -> Option<&'c [(Vec<u8>, Vec<u8>)]> {
    let mut bytes = 0;
    let fits = |(subkey, value): &&(Vec<u8>, Vec<u8>)| {
        bytes += subkey.len() + value.len() + CELL_EXTRA_BYTES;
        bytes <= CELLS_BYTES
    };
    let count = left.iter().take_while(fits).count().max(1);
    let (some, rest) = left.split_at_checked(count)?;
    *left = rest;
    Some(some)
}

/// A string as commands: `SET` with the time of its end, and `APPEND` if it is long.
pub(crate) fn write_string(to: &mut impl Write, key: &[u8], value: &[u8], expires_ms: Option<u64>) -> io::Result<()> {
    let end = expires_ms.map(|ms| ms.to_string());
    let (first, rest) = value.split_at(value.len().min(STRING_BYTES));
    let mut words = vec![&b"SET"[..], key, first];
    words.extend(end.iter().flat_map(|end| [&b"PXAT"[..], end.as_bytes()]));
    write_command(to, words.into_iter())?;
    rest.chunks(STRING_BYTES).try_for_each(|part| write_command(to, [&b"APPEND"[..], key, part].into_iter()))
}

/// How many commands that makes of a value.
pub(crate) fn string_commands(value: &[u8]) -> u64 {
    value.len().div_ceil(STRING_BYTES).max(1) as u64
}

/// The time of the end of what is no string, if it has one.
pub(crate) fn write_end(to: &mut impl Write, key: &[u8], expires_ms: Option<u64>) -> io::Result<()> {
    let Some(end) = expires_ms.map(|ms| ms.to_string()) else { return Ok(()) };
    write_command(to, [&b"PEXPIREAT"[..], key, end.as_bytes()].into_iter())
}

/// A key as commands: `SET` with the time of its end, and `APPEND` if it is long, or `HSET`, `SADD`, `RPUSH`, `ZADD` and
/// `PEXPIREAT`.
fn write_key(to: &mut impl Write, key: &[u8], written: &Written, expires_ms: Option<u64>) -> io::Result<()> {
    let (shape, cells) = match written {
        Written::String(value) => return write_string(to, key, value, expires_ms),
        Written::Cells(shape, cells) => (*shape, cells),
    };
    let mut left = &cells[..];
    while let Some(some) = some_cells(&mut left) {
        let scores: Vec<String> = some.iter().map(|(_, value)| resp::format_double(score_of(value))).collect();
        let mut words = vec![key];
        for ((subkey, value), score) in some.iter().zip(&scores) {
            match shape {
                Shape::String => {}
                Shape::Hash => words.extend([&subkey[..], &value[..]]),
                Shape::Set => words.push(subkey),
                Shape::List => words.push(value),
                Shape::SortedSet => words.extend([score.as_bytes(), &subkey[..]]),
            }
        }
        words.insert(
            0,
            match shape {
                Shape::Hash => b"HSET",
                Shape::Set => b"SADD",
                Shape::List => b"RPUSH",
                Shape::SortedSet | Shape::String => b"ZADD",
            },
        );
        write_command(to, words.into_iter())?;
    }
    write_end(to, key, expires_ms)
}

/// Writes down each key that has not ended at `now_ms`, in order, as a command. Returns how many there are.
///
/// # Errors
///
/// [`OfflineError`]: also if what was acknowledged is damaged.
pub fn dump(folder: &Path, now_ms: u64, to: &mut impl Write) -> Result<u64, OfflineError> {
    let mut disk = Disk::look(folder)?;
    // Values are read one after the other.
    let (store, _) = disk.open_store(0)?;
    write_store(&store, now_ms, to, |wanted| disk.value(wanted)).map_err(io_error("writing the commands"))
}

/// [`dump`] of a store that is open, whose values are read as `value` says.
pub(crate) fn write_store(
    store: &Store,
    now_ms: u64,
    to: &mut impl Write,
    value: impl Fn(&Wanted) -> io::Result<Vec<u8>>,
) -> io::Result<u64> {
    let (mut keys, mut result) = (0, Ok(()));
    store.scan(b"", now_ms, |key, got| {
        keys += 1;
        let written = match got.shape {
            Shape::String => {
                match store.locate(&got).map_or_else(|| Ok(got.value().to_vec()), |wanted| value(&wanted)) {
                    Ok(value) => Written::String(value),
                    Err(error) => {
                        result = Err(error);
                        return false;
                    }
                }
            }
            shape => {
                let mut cells = Vec::new();
                store.walk(key, |subkey, value| cells.push((subkey.to_vec(), value.to_vec())));
                Written::Cells(shape, cells)
            }
        };
        result = write_key(to, key, &written, got.expires_ms);
        result.is_ok()
    });
    result.and_then(|()| to.flush()).map(|()| keys)
}

/// The newest records of the cells of a key by their subkeys; that of its end, which has none, apart.
type NewestCells = BTreeMap<(bool, Vec<u8>), Newest>;

/// The newest record of a key or a cell.
#[derive(Default)]
struct Newest {
    version: u64,
    kind: Option<RecordKind>,
    value: Vec<u8>,
    expires_ms: Option<u64>,
}

impl Newest {
    fn see(&mut self, record: &Record<'_>) {
        if record.version >= self.version {
            let (kind, value) = (Some(record.kind), record.value.to_vec());
            *self = Self { version: record.version, kind, value, expires_ms: record.expires_ms };
        }
    }

    /// What the key has: the cells that are newer than its base, or the base.
    fn with(self, cells: NewestCells) -> Option<(Written, Option<u64>)> {
        let (mut shape, mut expires_ms, mut found) = (None, None, Vec::new());
        for ((_, subkey), cell) in cells.into_iter().filter(|(_, cell)| cell.version > self.version) {
            let of = match cell.kind {
                Some(RecordKind::Field) => Shape::Hash,
                Some(RecordKind::Member) => Shape::Set,
                Some(RecordKind::Element) => Shape::List,
                Some(RecordKind::Scored) => Shape::SortedSet,
                Some(RecordKind::Expire) => {
                    expires_ms = cell.expires_ms;
                    continue;
                }
                Some(RecordKind::Remove | RecordKind::String | RecordKind::Drop | RecordKind::Flush) | None => continue,
            };
            // Where a record that took the key away is damaged, there may be cells of two shapes.
            if *shape.get_or_insert(of) == of {
                found.push((subkey, cell.value));
            }
        }
        match (shape, self.kind) {
            (Some(shape), _) => Some((Written::Cells(shape, found), expires_ms)),
            (None, Some(RecordKind::String)) => Some((Written::String(self.value), self.expires_ms)),
            (None, _) => None,
        }
    }
}

/// Writes down each key of which anything can be read, whatever is damaged. Returns how many there are, and what each log had.
///
/// # Errors
///
/// [`OfflineError`]: also if a file is not the log of this store that its name says, so that all of that log would be missing.
pub fn salvage(folder: &Path, now_ms: u64, to: &mut impl Write) -> Result<(u64, Vec<Salvaged>), OfflineError> {
    let (_lock, geometry, media) = Disk::media(folder)?;
    // Of each key, and of each of its cells, the newest record.
    let mut newest: BTreeMap<Vec<u8>, (Newest, NewestCells)> = BTreeMap::new();
    let (mut salvaged, mut flushed) = (Vec::new(), 0);
    for (log, medium) in (0..).zip(&media) {
        let of_log = salvage_log(log, geometry, medium, |record| {
            if record.kind == RecordKind::Flush {
                flushed = record.version.max(flushed);
                return;
            }
            let (base, cells) = newest.entry(record.key.to_vec()).or_default();
            match record.kind {
                RecordKind::String | RecordKind::Drop => base.see(&record),
                kind => cells.entry((kind == RecordKind::Expire, record.subkey.to_vec())).or_default().see(&record),
            }
        });
        salvaged.push(of_log.map_err(recover_error(folder))?);
    }
    let mut keys = 0;
    for (key, (mut base, cells)) in newest {
        if base.version < flushed {
            base = Newest { version: flushed, ..Newest::default() };
        }
        let Some((written, expires_ms)) = base.with(cells) else { continue };
        if expires_ms.is_none_or(|end| now_ms < end) {
            keys += 1;
            write_key(to, &key, &written, expires_ms).map_err(io_error("writing the commands"))?;
        }
    }
    to.flush().map_err(io_error("writing the commands"))?;
    Ok((keys, salvaged))
}

#[cfg(test)]
mod tests {
    use ksf_proto::resp::{Progress, RespLimits, Scan};

    use super::*;

    const COMMAND_BYTES_MAX: usize = 1 << 30;

    /// The commands that a key becomes, each with its first word and its bytes.
    fn commands(written: &Written) -> Vec<(String, usize)> {
        let mut bytes = Vec::new();
        write_key(&mut bytes, b"key", written, Some(4_000_000_000_000)).unwrap();
        let max = COMMAND_BYTES_MAX;
        let limits = RespLimits { arguments_max: 1 << 20, argument_bytes_max: max, command_bytes_max: max };
        let (mut left, mut found) = (&bytes[..], Vec::new());
        while !left.is_empty() {
            let Ok(Scan::Command(length)) = resp::scan(left, &limits, &mut Progress::default()) else { panic!() };
            let words: Vec<&[u8]> = resp::Arguments::of(&left[..length]).unwrap().collect();
            found.push((String::from_utf8(words[0].to_vec()).unwrap(), length));
            left = &left[length..];
        }
        found
    }

    #[test]
    fn long_keys_become_commands_of_bounded_length() {
        let names = |found: &[(String, usize)]| found.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        for (bytes, count) in [(0, 1), (1, 1), (STRING_BYTES, 1), (STRING_BYTES + 1, 2), (2 * STRING_BYTES, 2)] {
            let value = vec![b'v'; bytes];
            assert_eq!(string_commands(&value), count);
            assert_eq!(commands(&Written::String(value)).len() as u64, count, "{bytes}");
        }
        let string = commands(&Written::String(vec![b'v'; 2 * STRING_BYTES + 1]));
        assert_eq!(names(&string), ["SET", "APPEND", "APPEND"]);
        assert!(string.iter().all(|(_, bytes)| *bytes < STRING_BYTES + 100), "{string:?}");
        let cell = |bytes: usize| move |number: u32| (number.to_be_bytes().to_vec(), vec![b'v'; bytes]);
        let cells = commands(&Written::Cells(Shape::Hash, (0..20).map(cell(100_000)).collect()));
        assert_eq!(cells.len(), 11, "two in each, and the end: {cells:?}");
        assert!(cells.iter().all(|(_, bytes)| *bytes < CELLS_BYTES + 100));
        let long = commands(&Written::Cells(Shape::List, (0..3).map(cell(CELLS_BYTES)).collect()));
        assert_eq!(names(&long), ["RPUSH", "RPUSH", "RPUSH", "PEXPIREAT"]);
        let short = commands(&Written::Cells(Shape::Set, (0..1000).map(cell(0)).collect()));
        assert_eq!(names(&short), ["SADD", "PEXPIREAT"]);
    }
}
