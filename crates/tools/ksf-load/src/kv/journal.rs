//! The journal: a file that only grows, with every write that was acknowledged.
//!
//! ```text
//!   ksf journal of acknowledged writes, version 1\n      the head: text, up to an empty line
//!   run 0123456789abcdef\n                               in every value of the journal's runs
//!   keys 100000\n
//!   prefix key:\n                                        a key's name is this and its number, with 12 digits
//!   # what follows, in words\n
//!   \n
//!   sequence (8) | key (8) | version (8) | CRC-32C of the 24 bytes (4)      records, numbers big endian
//! ```
//!
//! The sequence is 1, 2, 3, ... A record with the key 2^64 - 1 begins a session, whose number its version is: one for each run
//! with this journal. Every other record says that the write of this version of the key was acknowledged. Of a key the last
//! version counts, which is the largest.
//!
//! An acknowledgment is written down when write(2) has returned, which survives the death of both programs, but not that of
//! this machine: to audit what a machine loses with its power, keep the journal on another one. What stands at the end and is
//! no whole record was not written down: it is cut off when a session begins. Anything else that is no record is damage, and
//! such a journal is refused. Memory: 8 bytes for each key while it is read, some KiB while it is written.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::KEYS_MAX;
use super::client::{Witness, Written};
use super::space::SESSIONS_MAX;
use crate::error::LoadError;

const FIRST_LINE: &str = "ksf journal of acknowledged writes, version 1";

const WORDS: &str = "\
# Behind the empty line: records of 28 bytes, numbers big endian:
#   sequence, from 1 (8) | key (8) | version (8) | CRC-32C of these 24 bytes (4)
# Each says that the write of this version of the key was acknowledged; with the key 2^64 - 1, that this session begins.
# ksf load kv --audit proves that all of it is there.
";

/// The longest head.
const HEAD_BYTES_MAX: usize = 4096;

const RECORD_BYTES: usize = 28;

/// The key of the record that begins a session.
const SESSION: u64 = u64::MAX;

/// What a journal says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Journaled {
    /// In every value of its runs.
    pub(super) run: u64,
    /// Before the number of each key.
    pub(super) prefix: String,
    /// The last session; 0: none.
    pub(super) session: u64,
    /// Acknowledgments.
    pub(super) records: u64,
    /// For each key the last version that was acknowledged; 0: none.
    pub(super) acknowledged: Vec<u64>,
    /// Up to the end of the last record.
    good_bytes: u64,
    /// Behind it.
    pub(super) torn_bytes: u64,
    /// Of the last record.
    sequence: u64,
}

/// A journal that is being written.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    tail: Mutex<Tail>,
}

#[derive(Debug)]
struct Tail {
    file: File,
    sequence: u64,
    /// Up to the end of the last record.
    good_bytes: u64,
    /// Nothing more can be written: a part of a record may stand at the end.
    is_broken: bool,
    bytes: Vec<u8>,
}

impl Journal {
    /// Begins a session: in a new journal, or in one that is there, which must be of the same keys. Returns what it says,
    /// this session included.
    ///
    /// # Errors
    /// The file cannot be had, is of other keys, is in use, or is damaged.
    pub(super) fn begin(path: &Path, new_run: u64, keys: u64, prefix: &str) -> Result<(Journal, Journaled), LoadError> {
        let cannot_write = |source| LoadError::CreateFile { path: path.to_path_buf(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(path).map_err(cannot_write)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                LoadError::Usage(format!("{}: another run writes this journal", path.display()))
            }
            TryLockError::Error(source) => cannot_write(source),
        })?;
        let is_new = file.metadata().map_err(cannot_write)?.len() == 0;
        let mut journaled = match is_new {
            true => Journaled {
                run: new_run,
                prefix: prefix.to_owned(),
                session: 0,
                records: 0,
                acknowledged: vec![0; keys as usize],
                good_bytes: 0,
                torn_bytes: 0,
                sequence: 0,
            },
            false => read_from(&mut BufReader::with_capacity(1 << 16, &file), path)?,
        };
        if journaled.prefix != prefix || journaled.acknowledged.len() as u64 != keys {
            return Err(LoadError::Usage(format!(
                "{} is the journal of --keys {} --prefix {}; give these, or another file",
                path.display(),
                journaled.acknowledged.len(),
                journaled.prefix
            )));
        }
        if journaled.session >= SESSIONS_MAX {
            return Err(bad(path, "it has had all the sessions that a journal can have".into()));
        }
        if journaled.torn_bytes > 0 {
            file.set_len(journaled.good_bytes).map_err(cannot_write)?;
        }
        let (sequence, good_bytes) = (journaled.sequence, journaled.good_bytes);
        let mut tail = Tail { file, sequence, good_bytes, is_broken: false, bytes: Vec::new() };
        if is_new {
            tail.bytes.extend_from_slice(head(new_run, keys, prefix).as_bytes());
        }
        journaled.session += 1;
        tail.append([(SESSION, journaled.session)]).map_err(cannot_write)?;
        Ok((Journal { path: path.to_path_buf(), tail: Mutex::new(tail) }, journaled))
    }

    /// Has what was written down survive this machine, too.
    pub(super) fn sync(&self) -> Result<(), LoadError> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.file.sync_data().map_err(|source| LoadError::CreateFile { path: self.path.clone(), source })
    }
}

impl Witness for Journal {
    fn write_down(&self, acknowledged: &[Written]) -> io::Result<()> {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.append(acknowledged.iter().map(|written| (written.key, written.version)))
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display())))
    }
}

impl Tail {
    /// Writes records behind what `bytes` has.
    fn append(&mut self, records: impl IntoIterator<Item = (u64, u64)>) -> io::Result<()> {
        if self.is_broken {
            return Err(io::Error::other("an earlier write to the journal has failed"));
        }
        for (key, version) in records {
            self.sequence += 1;
            let start = self.bytes.len();
            for number in [self.sequence, key, version] {
                self.bytes.extend_from_slice(&number.to_be_bytes());
            }
            let sum = crc32c::crc32c(&self.bytes[start..]);
            self.bytes.extend_from_slice(&sum.to_be_bytes());
        }
        let written = self.file.write_all(&self.bytes);
        match written {
            Ok(()) => self.good_bytes += self.bytes.len() as u64,
            Err(_) => {
                self.is_broken = true;
                // What is left of it is cut off by the next session at the latest.
                let _ = self.file.set_len(self.good_bytes);
            }
        }
        self.bytes.clear();
        written
    }
}

/// Reads a journal that is not being written.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub(super) fn read(path: &Path) -> Result<Journaled, LoadError> {
    let file = File::open(path).map_err(|source| LoadError::ReadFile { path: path.to_path_buf(), source })?;
    read_from(&mut BufReader::with_capacity(1 << 16, file), path)
}

fn read_from(input: &mut impl Read, path: &Path) -> Result<Journaled, LoadError> {
    let cannot_read = |source| LoadError::ReadFile { path: path.to_path_buf(), source };
    let mut head = Vec::new();
    while !head.ends_with(b"\n\n") {
        let mut byte = [0];
        let got = fill(input, &mut byte).map_err(cannot_read)?;
        head.extend_from_slice(&byte[..got]);
        if got == 0 || head.len() > HEAD_BYTES_MAX {
            return Err(bad(path, "it has no head of a journal".into()));
        }
    }
    let mut journaled = parse_head(&head).ok_or_else(|| bad(path, "it has no head of a journal".into()))?;
    let mut record = [0; RECORD_BYTES];
    loop {
        let got = fill(input, &mut record).map_err(cannot_read)?;
        if got < RECORD_BYTES {
            journaled.torn_bytes = got as u64;
            return Ok(journaled);
        }
        let Some([sequence, key, version]) = parse_record(&record) else {
            let at = journaled.good_bytes;
            return match zeros(&record, input).map_err(cannot_read)? {
                // A file system may have made the file longer and not have written to it.
                Some(bytes) => Ok(Journaled { torn_bytes: bytes, ..journaled }),
                None => Err(bad(path, format!("it is damaged from byte {at} on"))),
            };
        };
        journaled.take(sequence, key, version).map_err(|what| bad(path, what))?;
    }
}

impl Journaled {
    fn take(&mut self, sequence: u64, key: u64, version: u64) -> Result<(), String> {
        let at = self.good_bytes;
        if sequence != self.sequence + 1 {
            return Err(format!("at byte {at} it has record {sequence} behind record {}", self.sequence));
        }
        if key == SESSION {
            if version <= self.session || version > SESSIONS_MAX {
                return Err(format!("at byte {at} session {version} begins behind session {}", self.session));
            }
            self.session = version;
        } else {
            let keys = self.acknowledged.len();
            let Some(last) = usize::try_from(key).ok().and_then(|key| self.acknowledged.get_mut(key)) else {
                return Err(format!("at byte {at} it has key {key}, and it is of {keys} keys"));
            };
            *last = version.max(*last);
            self.records += 1;
        }
        self.sequence = sequence;
        self.good_bytes += RECORD_BYTES as u64;
        Ok(())
    }
}

fn head(run: u64, keys: u64, prefix: &str) -> String {
    format!("{FIRST_LINE}\nrun {run:016x}\nkeys {keys}\nprefix {prefix}\n{WORDS}\n")
}

fn parse_head(head: &[u8]) -> Option<Journaled> {
    let text = std::str::from_utf8(head).ok()?;
    let mut lines = text.lines();
    lines.next().filter(|first| *first == FIRST_LINE)?;
    let mut value = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
    let run = u64::from_str_radix(value("run")?, 16).ok()?;
    let keys: u64 = value("keys")?.parse().ok()?;
    let prefix = value("prefix")?.to_owned();
    (1..=KEYS_MAX).contains(&keys).then(|| Journaled {
        run,
        prefix,
        session: 0,
        records: 0,
        acknowledged: vec![0; keys as usize],
        good_bytes: head.len() as u64,
        torn_bytes: 0,
        sequence: 0,
    })
}

/// Sequence, key and version. `None`: the checksum is wrong.
fn parse_record(record: &[u8; RECORD_BYTES]) -> Option<[u64; 3]> {
    let (numbers, sum) = record.split_at(RECORD_BYTES - 4);
    if crc32c::crc32c(numbers).to_be_bytes() != sum {
        return None;
    }
    let number = |at: usize| numbers[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    Some([number(0), number(8), number(16)])
}

/// How many bytes there are from here to the end, if all of them are 0.
fn zeros(begun: &[u8], input: &mut impl Read) -> io::Result<Option<u64>> {
    let mut all = begun.iter().all(|byte| *byte == 0);
    let mut count = begun.len() as u64;
    let mut buffer = [0; 4096];
    while all {
        let got = fill(input, &mut buffer)?;
        if got == 0 {
            return Ok(Some(count));
        }
        all = buffer[..got].iter().all(|byte| *byte == 0);
        count += got as u64;
    }
    Ok(None)
}

/// Reads until the buffer is full, or the end.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(got) => filled += got,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn bad(path: &Path, what: String) -> LoadError {
    LoadError::BadFile { path: path.to_path_buf(), what }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const RUN: u64 = 0xfeed;

    fn begin(path: &Path) -> (Journal, Journaled) {
        Journal::begin(path, RUN, 10, "key:").unwrap()
    }

    fn write(journal: &Journal, versions: &[(u64, u64)]) {
        let written: Vec<Written> = versions.iter().map(|&(key, version)| Written { key, version }).collect();
        journal.write_down(&written).unwrap();
    }

    /// A journal with three acknowledgments.
    fn small(folder: &ksf_test::Folder) -> PathBuf {
        let path = folder.path("journal");
        let (journal, _) = begin(&path);
        write(&journal, &[(3, 5), (4, 6)]);
        write(&journal, &[(3, 7)]);
        path
    }

    #[test]
    fn what_was_written_down_is_read_and_continued() {
        let folder = ksf_test::Folder::new();
        let path = small(&folder);
        let journaled = read(&path).unwrap();
        assert_eq!((journaled.run, journaled.prefix.as_str(), journaled.session), (RUN, "key:", 1));
        assert_eq!((journaled.records, journaled.torn_bytes), (3, 0));
        assert_eq!(journaled.acknowledged, [0, 0, 0, 7, 6, 0, 0, 0, 0, 0]);
        // Another program would have another number.
        let (journal, continued) = Journal::begin(&path, RUN + 1, 10, "key:").unwrap();
        assert_eq!((continued.run, continued.session), (RUN, 2));
        assert_eq!(continued.acknowledged, journaled.acknowledged);
        write(&journal, &[(0, 9)]);
        journal.sync().unwrap();
        let journaled = read(&path).unwrap();
        assert_eq!((journaled.session, journaled.records, journaled.acknowledged[0]), (2, 4, 9));
    }

    #[test]
    fn the_file_is_as_its_head_says() {
        let folder = ksf_test::Folder::new();
        let bytes = fs::read(small(&folder)).unwrap();
        let end = bytes.windows(2).position(|pair| pair == b"\n\n").unwrap() + 2;
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        assert!(head.starts_with(
            "ksf journal of acknowledged writes, version 1\nrun 000000000000feed\nkeys 10\nprefix key:\n# "
        ));
        assert!(head.len() < HEAD_BYTES_MAX - 256, "with a prefix of 256 bytes it can be read, too");
        let records: Vec<&[u8]> = bytes[end..].chunks(28).collect();
        assert_eq!(records.len(), 4);
        for (record, numbers) in records.iter().zip([[1, u64::MAX, 1], [2, 3, 5], [3, 4, 6], [4, 3, 7]]) {
            let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
            assert_eq!(record[..24], numbers);
            assert_eq!(record[24..], crc32c::crc32c(&numbers).to_be_bytes());
        }
    }

    #[test]
    fn what_was_torn_off_is_left_out_and_cut_off() {
        let folder = ksf_test::Folder::new();
        let path = small(&folder);
        let whole = fs::read(&path).unwrap();
        let (start, last) = (whole.len() - 4 * RECORD_BYTES, whole.len() - RECORD_BYTES);
        for length in start..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let journaled = read(&path).unwrap();
            let records = (length - start) / RECORD_BYTES;
            assert_eq!(journaled.records, records.saturating_sub(1) as u64);
            assert_eq!(journaled.torn_bytes, ((length - start) % RECORD_BYTES) as u64);
        }
        for zeros in [1, 28, 100, 10_000] {
            fs::write(&path, [&whole[..], &vec![0; zeros]].concat()).unwrap();
            let journaled = read(&path).unwrap();
            assert_eq!((journaled.records, journaled.torn_bytes), (3, zeros as u64));
        }
        fs::write(&path, &whole[..last + 3]).unwrap();
        let (journal, journaled) = begin(&path);
        assert_eq!((journaled.session, journaled.records, journaled.torn_bytes), (2, 2, 3));
        write(&journal, &[(9, 9)]);
        let journaled = read(&path).unwrap();
        assert_eq!((journaled.records, journaled.torn_bytes, journaled.acknowledged[9]), (3, 0, 9));
    }

    #[test]
    fn damage_is_told_with_its_place_and_refused() {
        let folder = ksf_test::Folder::new();
        let path = small(&folder);
        let whole = fs::read(&path).unwrap();
        let start = whole.len() - 4 * RECORD_BYTES;
        for at in start..whole.len() {
            let mut spoiled = whole.clone();
            spoiled[at] ^= 4;
            fs::write(&path, &spoiled).unwrap();
            let error = read(&path).unwrap_err();
            let from = start + (at - start) / RECORD_BYTES * RECORD_BYTES;
            assert_eq!(error.exit_code(), 65);
            assert!(error.to_string().contains(&format!("damaged from byte {from}")), "{at}: {error}");
        }
        // A record in the middle is gone, or there twice.
        let second = start + RECORD_BYTES..start + 2 * RECORD_BYTES;
        let gone = [&whole[..second.start], &whole[second.end..]].concat();
        let twice = [&whole[..second.end], &whole[second.start..]].concat();
        for (bytes, what) in [(gone, "record 3 behind record 1"), (twice, "record 2 behind record 2")] {
            fs::write(&path, bytes).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains(what));
            assert_eq!(Journal::begin(&path, RUN, 10, "key:").unwrap_err().exit_code(), 65);
        }
    }

    #[test]
    fn what_is_no_journal_or_that_of_others_is_refused() {
        let folder = ksf_test::Folder::new();
        let path = folder.path("journal");
        for bytes in
            [&b"x"[..], b"\n\n", &[b'x'; 10_000], head(1, 0, "key:").as_bytes(), head(1, 1 << 60, "").as_bytes()]
        {
            fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path).unwrap_err().exit_code(), 65);
        }
        assert_eq!(read(&folder.path("none")).unwrap_err().exit_code(), 66);
        fs::remove_file(&path).unwrap();
        let path = small(&folder);
        for (keys, prefix) in [(11, "key:"), (10, "other:")] {
            let error = Journal::begin(&path, RUN, keys, prefix).unwrap_err();
            assert_eq!(error.exit_code(), 64);
            assert!(error.to_string().contains("--keys 10 --prefix key:"), "{error}");
        }
        let (_journal, _) = begin(&path);
        let error = Journal::begin(&path, RUN, 10, "key:").unwrap_err();
        assert!(error.to_string().contains("another run"), "{error}");
        assert_eq!(Journal::begin(Path::new("/proc/none"), RUN, 10, "key:").unwrap_err().exit_code(), 73);
    }

    #[test]
    fn a_full_disk_is_told_and_nothing_is_written_behind_it() {
        // Takes nothing, and can be locked (full(4)).
        let error = Journal::begin(Path::new("/dev/full"), RUN, 10, "key:").unwrap_err();
        assert_eq!(error.exit_code(), 73);
        let folder = ksf_test::Folder::new();
        let (journal, _) = begin(&folder.path("journal"));
        journal.tail.lock().unwrap().file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        for part in ["space", "has failed"] {
            let error = journal.write_down(&[Written { key: 1, version: 1 }]).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
