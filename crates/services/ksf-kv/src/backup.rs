//! A backup of a store that is served, over its socket.
//!
//! ```text
//!   FILE.partial ─► SAVE ─► KSF.BACKUP BEGIN ─► READ, DONE for each segment ─► END ─► recover ─► write ─► sync ─► FILE
//! ```
//!
//! The logs come as they lie, up to where they were promised when the backup began, into a file without a name beside `FILE`.
//! From there they are recovered as a start recovers them, with all strings on the disk. The server is done with it by then.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ksf_store::away::Wanted as Value;
use ksf_store::backup::{CopiedLog, CopyError, Wanted, is_first_block, recover, wanted};
use ksf_store::format::{LOGS_MAX, Lsn};
use ksf_store::log::Geometry;
use ksf_store::recover::{Found, Places};
use ksf_store::store::{Opening, Store};

use crate::ask::{AskError, Asker};
use crate::offline::write_store;
use crate::seal::Sealing;
use crate::whole::{FileError, Name, Partial, file_error, make_file, with_suffix};

/// A backup that is whole and on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Keys in it.
    pub keys: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Why there is no backup. What had the file's name has it still.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The server does not answer as it should.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// What the server has is damaged.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Makes a backup of the store behind a connection: its commands, without those keys that have ended at `now_ms`. A file
/// that is there is replaced when the backup is whole.
///
/// # Errors
///
/// [`BackupError`].
pub fn backup<S: Read + Write>(asker: &mut Asker<S>, path: &Path, now_ms: u64) -> Result<Made, BackupError> {
    // Before the copy: a second backup into the file is refused from here on.
    let partial = Partial::new(path)?;
    let scratch = Scratch::new(&with_suffix(path, ".copy"))?;
    let (geometry, mut copies) = copy(asker, &scratch)?;
    let found = recover(geometry, &mut copies)?;
    let epoch = found.iter().map(Found::epoch).max().unwrap_or(0);
    // It runs beside the server, which shall not feel it: one thread.
    let opening = Opening::new(epoch + 1, 0, NonZeroUsize::MIN);
    let (store, _) = Store::open(found, &copies, opening).map_err(CopyError::from)?;
    partial.write(Name::Any, |to| {
        let made = write_commands(&store, &copies, to, now_ms).map_err(file_error("writing", path));
        made.map_err(BackupError::from)
    })
}

/// What was copied, in a file without a name: it goes with the process.
struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    fn new(path: &Path) -> Result<Self, BackupError> {
        let file = make_file(path)?;
        fs::remove_file(path).map_err(file_error("removing", path))?;
        Ok(Self { file, path: path.to_owned() })
    }
}

/// The segments of a log in it.
struct Segments<'s> {
    scratch: &'s Scratch,
    /// Where the first place begins.
    offset: u64,
    segment_bytes: u64,
    /// Bytes that each place has.
    bytes: Vec<usize>,
}

impl Segments<'_> {
    fn offset_of(&self, place: u32) -> u64 {
        self.offset + u64::from(place) * self.segment_bytes
    }

    /// The value that is there, with every checksum right.
    fn value(&self, wanted: &Value) -> io::Result<Vec<u8>> {
        let at = wanted.read_at().map_err(|why| io::Error::other(format!("a value is nowhere: {why:?}")))?;
        // What is asked for may go on behind the end.
        let here = self.bytes.get(at.place as usize).copied().unwrap_or(0).saturating_sub(at.offset as usize);
        let mut bytes = vec![0; at.bytes.min(here)];
        self.scratch.file.read_exact_at(&mut bytes, self.offset_of(at.place) + at.offset)?;
        let record = wanted.record(&bytes);
        record
            .map(|record| record.value.to_vec())
            .map_err(|why| io::Error::other(format!("a value was copied wrong: {why}")))
    }
}

impl Places for Segments<'_> {
    fn places(&self) -> u32 {
        self.bytes.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> io::Result<()> {
        into.resize(self.bytes[place as usize], 0);
        self.scratch.file.read_exact_at(into, self.offset_of(place))
    }
}

type Copies<'s> = Vec<CopiedLog<Segments<'s>>>;

/// The logs of the server, as they are when the backup begins.
fn copy<'s, S: Read + Write>(
    asker: &mut Asker<S>,
    scratch: &'s Scratch,
) -> Result<(Geometry, Copies<'s>), BackupError> {
    const HEAD: usize = 4;
    const PLACES_MAX: u64 = 1 << 16;
    // What was acknowledged and is not on the medium would be missing, where replies do not wait for that.
    asker.status(&[b"SAVE"])?;
    let numbers = asker.numbers(&[b"KSF.BACKUP", b"BEGIN"], HEAD + LOGS_MAX)?;
    let [store, segment_bytes, block_bytes, places, ends @ ..] = &numbers[..] else {
        return Err(AskError::Unexpected.into());
    };
    let block_bytes = usize::try_from(*block_bytes).ok().and_then(NonZeroUsize::new).ok_or(AskError::Unexpected)?;
    let geometry = Geometry { store: *store, block_bytes, segment_bytes: *segment_bytes };
    let is_sound = block_bytes.is_power_of_two()
        && (512..=1 << 20).contains(&block_bytes.get())
        && segment_bytes.is_multiple_of(block_bytes.get() as u64)
        && (1..=1 << 32).contains(segment_bytes)
        && *places <= PLACES_MAX;
    if !is_sound {
        return Err(AskError::Unexpected.into());
    }
    let mut copies = Vec::with_capacity(ends.len());
    for (log, end) in (0..).zip(ends) {
        let (end, offset) = (Lsn(*end), u64::from(log) * places * segment_bytes);
        let segments = Segments { scratch, offset, segment_bytes: *segment_bytes, bytes: Vec::new() };
        let mut copied = CopiedLog { end, headers: Vec::new(), content: segments };
        for _ in 0..*places {
            copy_place(asker, &geometry, log, &mut copied)?;
        }
        copies.push(copied);
    }
    asker.status(&[b"KSF.BACKUP", b"END"])?;
    Ok((geometry, copies))
}

/// Copies what is needed of the next place.
fn copy_place<S: Read + Write>(
    asker: &mut Asker<S>,
    geometry: &Geometry,
    log: u16,
    copied: &mut CopiedLog<Segments<'_>>,
) -> Result<(), BackupError> {
    const LOOKS_MAX: u32 = 100;
    const PIECE_BYTES: usize = 4 << 20;
    let CopiedLog { end, headers, content } = copied;
    let place = headers.len() as u32;
    let block_bytes = geometry.block_bytes.get();
    let [log_text, place_text] = [u32::from(log), place].map(|number| number.to_string());
    let read = |asker: &mut Asker<S>, offset: usize, bytes: usize, into: &mut Vec<u8>| {
        let [offset, count] = [offset, bytes].map(|number| number.to_string());
        let words = [
            &b"KSF.BACKUP"[..],
            b"READ",
            log_text.as_bytes(),
            place_text.as_bytes(),
            offset.as_bytes(),
            count.as_bytes(),
        ];
        into.clear();
        asker.bytes(&words, bytes, into)
    };
    let first_block = |asker: &mut Asker<S>| {
        let mut block = Vec::new();
        read(asker, 0, block_bytes, &mut block)?;
        // Without O_DIRECT, it may be read in the middle of a write.
        let mut looks = 0;
        while !is_first_block(&block) && looks < LOOKS_MAX {
            looks += 1;
            read(asker, 0, block_bytes, &mut block)?;
        }
        Ok::<_, AskError>(block)
    };
    let block = first_block(asker)?;
    let Wanted::Segment { number, bytes } = wanted(geometry, log, *end, &block) else {
        headers.push(block);
        content.bytes.push(0);
        return Ok(());
    };
    let bytes = usize::try_from(bytes).map_err(|_| AskError::Unexpected)?;
    let (mut at, mut piece) = (0, Vec::new());
    while at < bytes {
        read(asker, at, PIECE_BYTES.min(bytes - at), &mut piece)?;
        let written = content.scratch.file.write_all_at(&piece, content.offset_of(place) + at as u64);
        written.map_err(file_error("writing", &content.scratch.path))?;
        at += piece.len();
    }
    // Where it is another one by now, it is all that counts of the place.
    headers.push(first_block(asker)?);
    content.bytes.push(bytes);
    asker.status(&[b"KSF.BACKUP", b"DONE", log_text.as_bytes(), number.to_string().as_bytes()])?;
    Ok(())
}

fn write_commands(store: &Store, copies: &Copies<'_>, to: &mut impl Write, now_ms: u64) -> io::Result<Made> {
    let mut to = Sealing::begin(to)?;
    let keys = write_store(store, now_ms, &mut to, |wanted| {
        let log = wanted.read_at().map_or(0, |at| at.log);
        copies[usize::from(log)].content.value(wanted)
    })?;
    let (_, bytes) = to.end(keys)?;
    Ok(Made { keys, bytes })
}
