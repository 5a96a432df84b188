//! The medium on a disk: a folder with a superblock and a file for each log.
//!
//! ```text
//!   DIR               of its owner alone, as all that is in it
//!   DIR/lock          held while a process has the store open
//!   DIR/superblock    two copies in blocks of their own: the store's number, its geometry, how often it was started, how far
//!                     each log must reach
//!   DIR/log-000 ...   places of one segment each, written with zeros once, so that no later write changes metadata;
//!                     `log-000.new` until that is done; behind the places, if it was ever mapped, the journal
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ksf_store::away::Wanted;
use ksf_store::format::{LOGS_MAX, Lsn};
use ksf_store::log::Geometry;
use ksf_store::pmem::{JOURNAL_BYTES, Journaled, journal_at};
use ksf_store::recover::{Found, Places, RecoverError, Repair, cut_by_links};
use ksf_store::store::{Opening, Shard, Store};

use crate::medium::{self, MappedLog, Medium};

/// Bytes of a block: O_DIRECT writes on common disks are multiples of it, and no disk tears a sector of 512.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of a segment by default.
pub const SEGMENT_BYTES: u64 = 16 << 20;
/// Places of a log by default: 1 GiB.
pub const PLACES: u32 = 64;

/// How long a start waits for writes that another process left on their way.
const LATE_WRITES_TIMEOUT: Duration = Duration::from_secs(10);
const LATE_WRITES_INTERVAL: Duration = Duration::from_millis(5);

const MAGIC: [u8; 8] = *b"ksfstore";
/// Of the format. A record of an unknown kind ends a log as a torn end does, so a new kind takes a new version, which a program
/// from before it refuses.
const VERSION: u32 = 2;
/// With journals behind the logs, which a program from before it does not look into.
const VERSION_JOURNALS: u32 = 3;
/// The first one: without records of kind 9. A store that has it gets the newer one at its start.
const VERSION_MIN: u32 = 1;

/// How a store is made. A store that is there already keeps what it was made with, but for the number of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Logs, one for each shard; a store never has fewer than it had.
    pub logs: u16,
    /// Bytes of a segment: whole blocks.
    pub segment_bytes: u64,
    /// Segments that a log has room for.
    pub places: u32,
    /// What the logs are written through from this start on.
    pub medium: Medium,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self { logs: 1, segment_bytes: SEGMENT_BYTES, places: PLACES, medium: Medium::default() }
    }
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file system says no.
    #[error("{action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What it says.
        source: io::Error,
    },
    /// Its file system, or the machine, cannot do what the medium needs.
    #[error("{} cannot be of the medium {medium}: {source}", .path.display())]
    Medium {
        /// The folder, or the log.
        path: PathBuf,
        /// The medium.
        medium: Medium,
        /// What is missing.
        source: io::Error,
    },
    /// Its folder is that of another user.
    #[error("{} belongs to user {owner}, and this process is user {user}", .path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Number of its user.
        owner: u32,
        /// Number of the effective user of this process.
        user: u32,
    },
    /// Another process has it open.
    #[error("{} is open in another process", .0.display())]
    InUse(PathBuf),
    /// A process that had it open is gone, or about to go, and a write of its is still on its way to a log.
    #[error("{} is still held by {holder}, which may be writing to it", .path.display())]
    LateWrites {
        /// The log.
        path: PathBuf,
        /// The process, as far as it is known.
        holder: String,
    },
    /// There is no superblock that makes sense, and logs are there.
    #[error("{} has logs and no superblock that can be read; restore it from a backup", .0.display())]
    NoSuperblock(PathBuf),
    /// The file of a log is gone.
    #[error("{} is missing, and the store is not whole without it; load a backup into a new folder", .0.display())]
    NoLog(PathBuf),
    /// The file of a log is shorter than it was made, or longer than that with a journal.
    #[error(
        "{} has {bytes} bytes, and the logs of this store were made with {log_bytes}: it was cut, or it or the superblock is \
         that of another store; put the files of the store back, or load a backup into a new folder",
        .path.display()
    )]
    LogLength {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        bytes: u64,
        /// Bytes that it had.
        log_bytes: u64,
    },
    /// A log is one of another store, or has the name of another one; or the superblock is that of another store.
    #[error(
        "{} is not a log of this store, or has the name of another one: {source}; \
         put the files of the store back under their names, or load a backup into a new folder", .path.display()
    )]
    ForeignLog {
        /// The file.
        path: PathBuf,
        /// What it has.
        source: RecoverError,
    },
    /// A log ends before what was acknowledged of it.
    #[error(
        "{} ends at byte {} of its log, and it was acknowledged up to byte {}: it is an older copy, or was overwritten; \
         put the newest one back, load a backup into a new folder, or write down what is left with `salvage`",
        .path.display(), .end.0, .reached.0
    )]
    OldLog {
        /// The file.
        path: PathBuf,
        /// Where the log ends.
        end: Lsn,
        /// Where it ended at an earlier start, or an orderly end.
        reached: Lsn,
    },
    /// The file `lock` is gone.
    #[error(
        "{} is missing, by which processes lock the store; make an empty file of that name, or serve the store", .0.display()
    )]
    NoLock(PathBuf),
    /// There is nothing that would be a store.
    #[error("there is no store in {}", .0.display())]
    NoStore(PathBuf),
    /// It was made by another version.
    #[error("{} has format {found}, and this program reads formats {VERSION_MIN} to {VERSION_JOURNALS}", .path.display())]
    Format {
        /// Where.
        path: PathBuf,
        /// What it has.
        found: u32,
    },
    /// What it has is damaged.
    #[error(transparent)]
    Recover(RecoverError),
}

/// An error of the logs in a folder.
pub(crate) fn recover_error(folder: &Path) -> impl Fn(RecoverError) -> DiskError {
    |source| match source {
        RecoverError::Foreign { log, .. } => DiskError::ForeignLog { path: log_path(folder, log), source },
        source => DiskError::Recover(source),
    }
}

/// What the superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Superblock {
    store: u64,
    segment_bytes: u64,
    places: u32,
    logs: u16,
    epoch: u32,
    /// A header may be whole in the journal of its log alone.
    has_journals: bool,
    /// Of each log, the LSN that it must reach, because it did at an earlier start or an orderly end; 0 if that is not known.
    reached: [u64; LOGS_MAX],
}

/// Where that begins in a copy.
const REACHED_AT: usize = 64;

impl Superblock {
    fn encode(&self) -> Vec<u8> {
        let mut block = Vec::with_capacity(BLOCK_BYTES);
        block.extend_from_slice(&[0; 4]);
        let version = if self.has_journals { VERSION_JOURNALS } else { VERSION };
        block.extend_from_slice(&version.to_le_bytes());
        block.extend_from_slice(&MAGIC);
        block.extend_from_slice(&self.store.to_le_bytes());
        block.extend_from_slice(&self.segment_bytes.to_le_bytes());
        block.extend_from_slice(&self.places.to_le_bytes());
        block.extend_from_slice(&self.epoch.to_le_bytes());
        block.extend_from_slice(&self.logs.to_le_bytes());
        block.resize(REACHED_AT, 0);
        self.reached.iter().for_each(|lsn| block.extend_from_slice(&lsn.to_le_bytes()));
        block.resize(BLOCK_BYTES, 0);
        let crc = crc32c::crc32c(&block[4..]);
        block[..4].copy_from_slice(&crc.to_le_bytes());
        block
    }

    fn geometry(&self) -> Geometry {
        let block_bytes = NonZeroUsize::MIN.saturating_add(BLOCK_BYTES - 1);
        Geometry { store: self.store, block_bytes, segment_bytes: self.segment_bytes }
    }

    /// `Err`: the number of another format.
    fn decode(block: &[u8]) -> Option<Result<Self, u32>> {
        let array = |at: usize| -> Option<[u8; 8]> { block.get(at..at + 8)?.try_into().ok() };
        let word = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?)) };
        if crc32c::crc32c(block.get(4..BLOCK_BYTES)?) != word(0)? || array(8)? != MAGIC {
            return None;
        }
        let version = word(4)?;
        if !(VERSION_MIN..=VERSION_JOURNALS).contains(&version) {
            return Some(Err(version));
        }
        let (store, segment_bytes) = (u64::from_le_bytes(array(16)?), u64::from_le_bytes(array(24)?));
        let logs = word(40)? as u16;
        let (places, epoch, has_journals) = (word(32)?, word(36)?, version == VERSION_JOURNALS);
        let mut reached = [0; LOGS_MAX];
        for (log, lsn) in reached.iter_mut().enumerate() {
            *lsn = u64::from_le_bytes(array(REACHED_AT + 8 * log)?);
        }
        Some(Ok(Self { store, segment_bytes, places, logs, epoch, has_journals, reached }))
    }

    /// Whether each log has all that it must have.
    fn hold_against(&self, folder: &Path, found: &[Found]) -> Result<(), DiskError> {
        let is_short = |(found, reached): &(&Found, &u64)| found.reached().0 < **reached;
        match found.iter().zip(&self.reached).find(is_short) {
            None => Ok(()),
            Some((found, reached)) => Err(DiskError::OldLog {
                path: log_path(folder, found.log()),
                end: found.reached(),
                reached: Lsn(*reached),
            }),
        }
    }
}

/// The superblock while the store is served.
#[derive(Debug)]
struct Last {
    superblock: Superblock,
    file: File,
    /// The copy that the start did not write: that one stays.
    copy: u32,
    /// Of the last write, if it failed. A later one has all that it was to have.
    error: Option<io::Error>,
}

/// A store's folder, opened and recovered.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    /// The start of this process, counted from the first one.
    pub epoch: u32,
    /// What its logs have in common.
    pub geometry: Geometry,
    /// The logs as they were found, cut so that none depends on what another one lost.
    pub found: Vec<Found>,
    /// The logs as they were read, to be read once more.
    media: Vec<LogFile>,
    /// A file for each log. Opened with O_DIRECT where the file system has it.
    pub logs: Vec<File>,
    /// Whether writes go past the page cache.
    pub direct: bool,
    /// What the logs are written through.
    pub medium: Medium,
    /// The logs in memory, if they are mapped.
    pub(crate) mapped: Vec<MappedLog>,
    /// Threads that read the logs.
    pub threads: NonZeroUsize,
    /// `None`: it is only looked at.
    last: Option<Mutex<Last>>,
    _lock: Lock,
}

/// The lock of a folder, until it is dropped.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // The lock belongs to the open file. A child of this process has that, too, between fork and exec: closing it here
        // alone would leave the lock until then. Where unlocking fails, it goes with the last one that closes the file.
        let _ = self.0.unlock();
    }
}

/// The error of a medium that a file is not on, or any other one.
fn medium_error(medium: Medium, action: &'static str, path: &Path, source: io::Error) -> DiskError {
    match source.kind() {
        io::ErrorKind::Unsupported => DiskError::Medium { path: path.to_owned(), medium, source },
        _ => io_error(action, path)(source),
    }
}

fn io_error<'p>(action: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> DiskError + use<'p> {
    move |source| DiskError::Io { action, path: path.to_owned(), source }
}

impl Disk {
    /// Opens a store, or makes one where the folder is empty or not there. Counts the start, durably. As many threads read the
    /// logs as [`DiskOptions::logs`] says that there are shards.
    ///
    /// # Errors
    ///
    /// [`DiskError`]. Where acknowledged data is damaged nothing was changed.
    pub fn open(folder: &Path, options: DiskOptions) -> Result<Self, DiskError> {
        make_folder(folder)?;
        let lock_path = folder.join("lock");
        let lock = own().create(true).truncate(false).write(true).open(&lock_path).and_then(keep_private);
        let lock = take(lock.map_err(io_error("opening", &lock_path))?, folder)?;
        let medium = options.medium;
        medium::suits(medium, &lock.0).map_err(|why| medium_error(medium, "looking at", folder, why))?;
        let superblock_path = folder.join("superblock");
        let before = read_superblock(folder)?;
        let there = logs_there(folder);
        let (mut now, copy) = match before {
            // No start has made its logs, and what it was to be made with may not have fitted.
            Some((before, _)) if before.logs == 0 && there == 0 => {
                let new = Superblock {
                    segment_bytes: options.segment_bytes.next_multiple_of(BLOCK_BYTES as u64),
                    places: options.places,
                    ..before
                };
                for copy in [0, 1] {
                    write_superblock(&superblock_path, &new, copy).map_err(io_error("writing", &superblock_path))?;
                }
                (new, 0)
            }
            Some(before) => before,
            None if there > 0 => return Err(DiskError::NoSuperblock(folder.to_owned())),
            None => {
                let new = Superblock {
                    store: random().map_err(io_error("reading", Path::new("/dev/urandom")))?,
                    segment_bytes: options.segment_bytes.next_multiple_of(BLOCK_BYTES as u64),
                    places: options.places,
                    logs: 0,
                    epoch: 0,
                    has_journals: medium.is_mapped(),
                    reached: [0; LOGS_MAX],
                };
                // Before the logs, so that what is left when these cannot be made is taken up by the next start.
                write_superblock(&superblock_path, &new, 0).map_err(io_error("writing", &superblock_path))?;
                sync_folder(folder)?;
                (new, 0)
            }
        };
        let geometry = now.geometry();
        let wanted = options.logs.max(now.logs).max(there).min(LOGS_MAX as u16);
        let threads = NonZeroUsize::new(options.logs.into()).unwrap_or(NonZeroUsize::MIN);
        let (places, segment_bytes) = (now.places, now.segment_bytes);
        let (mut media, mut logs, mut direct) = (Vec::new(), Vec::new(), true);
        let mut open = |log, media: &mut Vec<LogFile>| {
            let path = log_path(folder, log);
            let file = own().read(true).write(true).open(&path).and_then(keep_private);
            let file = whole_log(&path, file, segment_bytes * u64::from(places), JOURNAL_BYTES as u64)?;
            let flags = (rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::NOFOLLOW).bits() as i32;
            let open_direct = || OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).ok();
            // Of one that is mapped, values are read by its file.
            let written = match (!medium.is_mapped()).then(open_direct).flatten() {
                Some(written) => written,
                // The file system has no O_DIRECT: writes are as durable, and slower.
                None => {
                    direct = false;
                    file.try_clone().map_err(io_error("opening", &path))?
                }
            };
            lock_log(&written, &path, File::try_lock, LATE_WRITES_TIMEOUT)?;
            logs.push(written);
            media.push(LogFile::of(file, places, segment_bytes).map_err(io_error("reading", &path))?);
            Ok::<_, DiskError>(())
        };
        let known = now.logs.max(there).min(wanted);
        for log in 0..known {
            open(log, &mut media)?;
        }
        for (log, log_file) in (0..).zip(&media) {
            // What is found is told from now on, also what was on its way when the store ended.
            log_file.file.sync_data().map_err(io_error("syncing", &log_path(folder, log)))?;
        }
        let mut found = find(folder, &now, &media, threads)?;
        // What is there can be read: until here nothing was changed.
        let made = (known..wanted).try_for_each(|log| {
            make_log(&log_path(folder, log), segment_bytes, places)?;
            open(log, &mut media)?;
            found.push(Found::of_new(log, geometry, places));
            Ok::<_, DiskError>(())
        });
        if let Err(error) = made {
            // Of a store that was never there nothing is left that would fill the disk, or be as long for ever.
            if now.logs == 0 && there == 0 {
                (known..wanted).for_each(|log| drop(fs::remove_file(log_path(folder, log))));
            }
            return Err(error);
        }
        let were_mapped = now.has_journals;
        (now.logs, now.has_journals) = (wanted, medium.is_mapped());
        // What a superblock lost, the logs know: no two starts have one number.
        now.epoch = found.iter().map(Found::epoch).fold(now.epoch, u32::max) + 1;
        // What was found is on its medium, but for what caches of the CPU have of a log that was mapped, or is.
        if !were_mapped && !medium.is_mapped() {
            now.reached.iter_mut().zip(&found).for_each(|(reached, found)| *reached = found.reached().0);
        }
        // Not the copy that was read, so that a torn write leaves one.
        let file = write_superblock(&superblock_path, &now, 1 - copy).map_err(io_error("writing", &superblock_path))?;
        let last = Some(Mutex::new(Last { superblock: now, file, copy, error: None }));
        sync_folder(folder)?;
        // All of them, before any repair tells of what a log has, which may have seen what another one has.
        let mapped = media.iter().zip(0..).filter(|_| medium.is_mapped()).map(|(log_file, log)| {
            let error = |why| medium_error(medium, "mapping", &log_path(folder, log), why);
            map_and_keep(medium, log_file).map_err(error)
        });
        let mut mapped = mapped.collect::<Result<Vec<_>, _>>()?;
        for (at, (found, log_file)) in found.iter_mut().zip(&mut media).enumerate() {
            let (path, repairs) = (log_path(folder, found.log()), found.repairs(now.epoch));
            if let Some(mapped) = mapped.get_mut(at) {
                repair_mapped(mapped, log_file, &repairs);
            } else {
                log_file.settle().map_err(io_error("repairing", &path))?;
                repair(&path, now.segment_bytes, &repairs)?;
            }
        }
        let (folder, epoch) = (folder.to_owned(), now.epoch);
        Ok(Self { folder, epoch, geometry, found, media, logs, direct, medium, mapped, threads, last, _lock: lock })
    }

    /// Reads a store as [`Disk::open`] does, and changes nothing: there is no file to write to, and no start is counted.
    ///
    /// # Errors
    ///
    /// [`DiskError`].
    pub fn look(folder: &Path) -> Result<Self, DiskError> {
        let (lock, superblock, media) = Self::files(folder, JOURNAL_BYTES as u64)?;
        let geometry = superblock.geometry();
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let found = find(folder, &superblock, &media, threads)?;
        let epoch = found.iter().map(Found::epoch).fold(superblock.epoch, u32::max);
        let (folder, logs, mapped) = (folder.to_owned(), Vec::new(), Vec::new());
        let (direct, medium, last) = (false, Medium::default(), None);
        Ok(Self { folder, epoch, geometry, found, media, logs, direct, medium, mapped, threads, last, _lock: lock })
    }

    /// Bytes of the logs that were found: what there was to be read.
    pub fn found_bytes(&self) -> u64 {
        self.found.iter().map(Found::batch_bytes).sum()
    }

    /// Makes the store of the logs that were found, whose values take so much memory at most.
    ///
    /// # Errors
    ///
    /// [`DiskError`]: the logs are no longer what they were when they were found.
    pub(crate) fn open_store(&mut self, memory_bytes_max: usize) -> Result<(Arc<Store>, Vec<Shard>), DiskError> {
        let found = std::mem::take(&mut self.found);
        let opening = Opening::new(self.epoch, memory_bytes_max, self.threads);
        Store::open(found, &self.media, opening).map_err(recover_error(&self.folder))
    }

    /// The value that is there, with every checksum right.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is damaged.
    pub(crate) fn value(&self, wanted: &Wanted) -> io::Result<Vec<u8>> {
        let at = wanted.read_at().map_err(|why| io::Error::other(format!("a value is nowhere: {why:?}")))?;
        let LogFile { file, segment_bytes, .. } = &self.media[usize::from(at.log)];
        let mut bytes = vec![0; at.bytes];
        let offset = u64::from(at.place) * segment_bytes + at.offset;
        file.read_exact_at(&mut bytes, offset)?;
        match wanted.record(&bytes) {
            Ok(record) => Ok(record.value.to_vec()),
            Err(why) => {
                let log = at.log;
                Err(io::Error::other(format!("a value in log-{log:03} at byte {offset} cannot be read: {why}")))
            }
        }
    }

    /// Writes to a log, durably, while nothing else does.
    ///
    /// # Errors
    ///
    /// The file system says no.
    pub(crate) fn write_at(&self, log: u16, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let LogFile { file, .. } = &self.media[usize::from(log)];
        file.write_all_at(bytes, offset)?;
        file.sync_data()
    }

    /// A log has ended in order, and all before this LSN is on its medium: every later start must find it. A crash meanwhile leaves
    /// the superblock of the start, or this one. [`Disk::recorded`] returns the error of the write.
    pub(crate) fn ended(&self, log: u16, end: Lsn) {
        let Some(last) = &self.last else { return };
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let Last { superblock, file, copy, error } = &mut *last;
        superblock.reached[usize::from(log)] = end.0;
        *error = put_superblock(file, superblock, *copy).err();
    }

    /// The superblock has the end of each log that [has ended](Disk::ended).
    ///
    /// # Errors
    ///
    /// The file system refused the last write of it. It is returned once.
    pub(crate) fn recorded(&self) -> io::Result<()> {
        let Some(last) = &self.last else { return Ok(()) };
        last.lock().unwrap_or_else(PoisonError::into_inner).error.take().map_or(Ok(()), Err)
    }

    /// What a store's logs have in common, and each log, to be read, also if it is too long; the lock is held as long as the first value.
    ///
    /// # Errors
    ///
    /// [`DiskError`]; no log is read.
    pub fn media(folder: &Path) -> Result<(impl Sized + use<>, Geometry, Vec<impl Places + use<>>), DiskError> {
        let (lock, superblock, media) = Self::files(folder, u64::MAX)?;
        Ok((lock, superblock.geometry(), media))
    }

    /// `behind_max`: bytes that a file may have behind its log.
    fn files(folder: &Path, behind_max: u64) -> Result<(Lock, Superblock, Vec<LogFile>), DiskError> {
        let lock_path = folder.join("lock");
        let lock = match own().read(true).open(&lock_path) {
            Ok(lock) => take(lock, folder)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let is_store = folder.join("superblock").exists() || logs_there(folder) > 0;
                return Err(if is_store {
                    DiskError::NoLock(lock_path)
                } else {
                    DiskError::NoStore(folder.to_owned())
                });
            }
            Err(error) => return Err(io_error("opening", &lock_path)(error)),
        };
        let (superblock, _) = read_superblock(folder)?.ok_or_else(|| match logs_there(folder) {
            0 => DiskError::NoStore(folder.to_owned()),
            _ => DiskError::NoSuperblock(folder.to_owned()),
        })?;
        let (places, segment_bytes) = (superblock.places, superblock.segment_bytes);
        let open = |log| {
            let path = log_path(folder, log);
            let log_bytes = segment_bytes * u64::from(places);
            let file = whole_log(&path, own().read(true).open(&path), log_bytes, behind_max)?;
            lock_log(&file, &path, File::try_lock_shared, LATE_WRITES_TIMEOUT)?;
            LogFile::of(file, places, segment_bytes).map_err(io_error("reading", &path))
        };
        let logs = (0..superblock.logs.max(logs_there(folder))).map(open).collect::<Result<_, DiskError>>()?;
        Ok((lock, superblock, logs))
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Reads the logs, and cuts them so that none depends on what another one lost.
fn find(
    folder: &Path,
    superblock: &Superblock,
    media: &[LogFile],
    threads: NonZeroUsize,
) -> Result<Vec<Found>, DiskError> {
    let error = recover_error(folder);
    let mut found = Found::read_all(superblock.geometry(), media, threads).map_err(&error)?;
    cut_by_links(&mut found).map_err(error)?;
    superblock.hold_against(folder, &found)?;
    Ok(found)
}

/// The file of a log that is as long as it was made, perhaps with some bytes behind: a journal, or what the last resort passes by.
fn whole_log(path: &Path, opened: io::Result<File>, log_bytes: u64, behind_max: u64) -> Result<File, DiskError> {
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(DiskError::NoLog(path.to_owned())),
        opened => opened.map_err(io_error("opening", path))?,
    };
    let bytes = file.metadata().map_err(io_error("looking at", path))?.len();
    if !(log_bytes..=log_bytes.saturating_add(behind_max)).contains(&bytes) {
        return Err(DiskError::LogLength { path: path.to_owned(), bytes, log_bytes });
    }
    Ok(file)
}

/// Takes the lock of a folder.
fn take(lock: File, folder: &Path) -> Result<Lock, DiskError> {
    match lock.try_lock() {
        Ok(()) => Ok(Lock(lock)),
        Err(fs::TryLockError::WouldBlock) => Err(DiskError::InUse(folder.to_owned())),
        Err(fs::TryLockError::Error(error)) => Err(io_error("locking", &folder.join("lock"))(error)),
    }
}

/// Takes the lock of a log by the open file that its writes go through. io_uring has that until its last write is done,
/// also when the process that began it was killed, and the lock of the folder is free. So no write of another process comes
/// behind this.
fn lock_log(
    file: &File,
    path: &Path,
    take: impl Fn(&File) -> Result<(), fs::TryLockError>,
    timeout: Duration,
) -> Result<(), DiskError> {
    let deadline = Instant::now() + timeout;
    loop {
        match take(file) {
            Ok(()) => return Ok(()),
            Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(LATE_WRITES_INTERVAL),
            Err(fs::TryLockError::WouldBlock) => {
                return Err(DiskError::LateWrites { path: path.to_owned(), holder: holder_of(file) });
            }
            Err(fs::TryLockError::Error(error)) => return Err(io_error("locking", path)(error)),
        }
    }
}

/// The process that took the lock of a file, as proc_locks(5) has it.
fn holder_of(file: &File) -> String {
    let unknown = || "a process that is not known".to_owned();
    let Ok(metadata) = file.metadata() else { return unknown() };
    let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    let name = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    // "1: FLOCK  ADVISORY  WRITE 708 fe:00:12345 0 EOF"; those that wait have an arrow behind the number.
    let holder = locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&&name[..])).then(|| fields[4].to_owned())
    });
    let Some(pid) = holder else { return unknown() };
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(program) => format!("process {pid} ({})", program.trim_end()),
        Err(_) => format!("process {pid}, which has ended"),
    }
}

/// The newer copy of the superblock and its number; `None` if there is none that can be read.
fn read_superblock(folder: &Path) -> Result<Option<(Superblock, u32)>, DiskError> {
    let path = folder.join("superblock");
    let mut bytes = Vec::new();
    let read = match own().read(true).open(&path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("reading", &path)(error)),
    };
    let copies = (0..2).zip(read.chunks(BLOCK_BYTES));
    let copies =
        copies.filter_map(|(copy, block)| Some(Superblock::decode(block)?.map(|superblock| (superblock, copy))));
    let copies = copies.collect::<Result<Vec<_>, _>>();
    let copies = copies.map_err(|found| DiskError::Format { path: folder.to_owned(), found })?;
    // Two of one start are that of the start and that of its end.
    Ok(copies.into_iter().max_by_key(|(superblock, _)| (superblock.epoch, superblock.reached)))
}

/// Logs that are there: each was made whole, whatever a superblock of before says.
fn logs_there(folder: &Path) -> u16 {
    (0..LOGS_MAX as u16).take_while(|log| log_path(folder, *log).exists()).count() as u16
}

fn log_path(folder: &Path, log: u16) -> PathBuf {
    folder.join(format!("log-{log:03}"))
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Writes a log with zeros, so that the file system has nothing left to decide when it is written. It is there whole or not
/// at all.
fn make_log(path: &Path, segment_bytes: u64, places: u32) -> Result<(), DiskError> {
    const PIECE_BYTES: u64 = 1 << 20;
    let new = path.with_extension("new");
    let write = || -> io::Result<()> {
        let mut file = own().create(true).truncate(true).write(true).open(&new)?;
        let zeros = vec![0; PIECE_BYTES as usize];
        let mut left = segment_bytes * u64::from(places);
        while left > 0 {
            let piece = left.min(PIECE_BYTES);
            file.write_all(&zeros[..piece as usize])?;
            left -= piece;
        }
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|error| {
        // A disk that is full must not stay so for a store that is not there. What cannot be removed is overwritten.
        let _ = fs::remove_file(&new);
        io_error("writing", &new)(error)
    })
}

fn write_superblock(path: &Path, superblock: &Superblock, copy: u32) -> io::Result<File> {
    let file = own().create(true).truncate(false).write(true).open(path).and_then(keep_private)?;
    put_superblock(&file, superblock, copy)?;
    Ok(file)
}

fn put_superblock(file: &File, superblock: &Superblock, copy: u32) -> io::Result<()> {
    file.write_all_at(&superblock.encode(), u64::from(copy) * BLOCK_BYTES as u64)?;
    file.sync_all()
}

/// How a file of a store is opened: never one that a link names, and a new one is for its owner alone.
fn own() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(PRIVATE_FILE).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options
}

const PRIVATE_FILE: u32 = 0o600;
const PRIVATE_FOLDER: u32 = 0o700;

/// Takes a file from all but its owner: who may read it may lock it.
fn keep_private(file: File) -> io::Result<File> {
    if file.metadata()?.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(PRIVATE_FILE))?;
    }
    Ok(file)
}

/// Makes the folder and those that it lies in, so that a loss of power leaves their names, too. It is for its owner alone from then on, also
/// if it was there.
fn make_folder(folder: &Path) -> Result<(), DiskError> {
    let new: Vec<&Path> =
        folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(io_error("making", parent))?;
    }
    match DirBuilder::new().mode(PRIVATE_FOLDER).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io_error("making", folder)(error)),
        _ => {}
    }
    let there = fs::metadata(folder).map_err(io_error("looking at", folder))?;
    let (owner, user) = (there.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(DiskError::Foreign { path: folder.to_owned(), owner, user });
    }
    if there.mode() & 0o077 != 0 {
        fs::set_permissions(folder, Permissions::from_mode(PRIVATE_FOLDER)).map_err(io_error("closing", folder))?;
    }
    let parents = new.into_iter().filter_map(Path::parent);
    parents.map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent }).try_for_each(sync_folder)
}

fn sync_folder(folder: &Path) -> Result<(), DiskError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("syncing", folder))
}

/// Takes away what was cut, each piece durably before the next.
fn repair(path: &Path, segment_bytes: u64, repairs: &[Repair]) -> Result<(), DiskError> {
    if repairs.is_empty() {
        return Ok(());
    }
    let write = || -> io::Result<()> {
        let file = own().write(true).open(path)?;
        for Repair { place, offset, bytes } in repairs {
            file.write_all_at(bytes, u64::from(*place) * segment_bytes + offset)?;
            file.sync_data()?;
        }
        Ok(())
    };
    write().map_err(io_error("repairing", path))
}

/// Maps a log, and makes durable what was found in it.
fn map_and_keep(medium: Medium, log: &LogFile) -> io::Result<MappedLog> {
    log.give_journal()?;
    let mut mapped = medium::map(medium, &log.file, log.segment_bytes, log.places)?;
    mapped.keep_all();
    Ok(mapped)
}

/// Brings the header of the journal to its place, and takes away what was cut, each piece durably before the next.
fn repair_mapped(mapped: &mut MappedLog, log: &mut LogFile, repairs: &[Repair]) {
    if let Some(journaled) = log.journaled.take() {
        mapped.finish(&journaled);
    }
    for Repair { place, offset, bytes } in repairs {
        mapped.write(*place, *offset, bytes);
        mapped.commit();
    }
}

#[derive(Debug)]
struct LogFile {
    file: File,
    places: u32,
    segment_bytes: u64,
    /// What its journal has, until it is known to be in its place.
    journaled: Option<Journaled>,
}

impl LogFile {
    fn of(file: File, places: u32, segment_bytes: u64) -> io::Result<Self> {
        let at = journal_at(segment_bytes, places);
        let behind = file.metadata()?.len().saturating_sub(at);
        let mut journal = vec![0; behind.min(JOURNAL_BYTES as u64) as usize];
        file.read_exact_at(&mut journal, at)?;
        let journaled = Journaled::decode(&journal).filter(|journaled| journaled.place < places);
        Ok(Self { file, places, segment_bytes, journaled })
    }

    fn journal_at(&self) -> u64 {
        journal_at(self.segment_bytes, self.places)
    }

    /// Makes room for a journal, if there is none.
    fn give_journal(&self) -> io::Result<()> {
        let at = self.journal_at();
        if self.file.metadata()?.len() < at + JOURNAL_BYTES as u64 {
            self.file.write_all_at(&[0; JOURNAL_BYTES], at)?;
            self.file.sync_all()?;
        }
        Ok(())
    }

    /// Brings the header that the journal has to its place, and then has none there: blocks are written without a journal.
    fn settle(&mut self) -> io::Result<()> {
        if let Some(Journaled { place, header }) = self.journaled.take() {
            self.file.write_all_at(&header, u64::from(place) * self.segment_bytes)?;
            self.file.sync_data()?;
            self.file.write_all_at(&[0; JOURNAL_BYTES], self.journal_at())?;
            self.file.sync_data()?;
        }
        Ok(())
    }
}

impl Places for LogFile {
    fn places(&self) -> u32 {
        self.places
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> io::Result<()> {
        self.read_front(place, self.segment_bytes as usize, into)
    }

    fn read_front(&self, place: u32, bytes: usize, into: &mut Vec<u8>) -> io::Result<()> {
        into.resize(bytes, 0);
        self.file.read_exact_at(into, u64::from(place) * self.segment_bytes)?;
        self.journaled.iter().for_each(|journaled| journaled.overlay(place, into));
        Ok(())
    }

    fn ahead(&self, place: u32) {
        // The kernel begins to read, in large pieces, and does not wait. Without it the read itself does the same.
        let (offset, bytes) = (u64::from(place) * self.segment_bytes, NonZeroU64::new(self.segment_bytes));
        let _ = rustix::fs::fadvise(&self.file, offset, bytes, rustix::fs::Advice::WillNeed);
    }
}

#[cfg(test)]
mod tests;
