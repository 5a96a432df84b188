//! Files with commands, or with what becomes commands, taken up by a store.
//!
//! ```text
//!   FILE of commands, AOF, RDB ─┐                     ┌─► check: all of it is looked at, and nothing is sent
//!   folder of an AOF: manifest ─┴► files ─► commands ─┴─► load: sent, and every reply is read
//! ```
//!
//! What is damaged is told by its name and its place before anything of it was sent.

mod folder;
mod manifest;
mod snapshot;
mod stream;

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use ksf_proto::rdb::BadRdb;
use ksf_proto::resp::Malformed;

pub use self::folder::{IntoFolderError, into_folder};
use self::stream::Stop;
use crate::ask::read_reply;

/// What a file has that is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It has something else than commands.
    #[error("byte {at} begins no command ({malformed})")]
    Malformed {
        /// Where.
        at: u64,
        /// What is wrong.
        malformed: Malformed,
    },
    /// It ends within a command.
    #[error("the command at byte {at} is not whole")]
    Cut {
        /// Where it begins.
        at: u64,
    },
    /// It ends within a transaction.
    #[error("the transaction at byte {at} is not whole")]
    CutTransaction {
        /// Where it begins.
        at: u64,
    },
    /// It begins as a snapshot, and is none that can be taken.
    #[error("the RDB snapshot cannot be taken from byte {at} on: {bad}")]
    Snapshot {
        /// Where what is wrong begins.
        at: u64,
        /// What is wrong.
        bad: BadRdb,
    },
    /// It ends within a snapshot.
    #[error("the RDB snapshot is cut: what begins at byte {at} is not whole")]
    CutSnapshot {
        /// Where what is not whole begins.
        at: u64,
    },
    /// It has keys of another database.
    #[error("byte {at} begins keys of database {number}, and a store has database 0 alone")]
    Database {
        /// Where.
        at: u64,
        /// The database.
        number: String,
    },
    /// It is a backup, and not a whole one.
    #[error("at byte {at} the backup {what}")]
    Backup {
        /// Where.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It is a list of files that makes no sense.
    #[error("line {line} {what}")]
    Manifest {
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// It is a folder, and not that of an AOF.
    #[error("the folder has {found} files that end in .manifest, and that of an AOF has one")]
    Folder {
        /// Such files.
        found: usize,
    },
}

/// Why files were not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// One of them cannot be taken.
    #[error("{}: {fault}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What it has.
        #[source]
        fault: Fault,
    },
    /// The server does not take them.
    #[error("{action}: {source}")]
    Connection {
        /// What was tried.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

fn in_file(path: &Path) -> impl FnOnce(Fault) -> LoadError + use<'_> {
    move |fault| LoadError::File { path: path.to_owned(), fault }
}

/// The files that are loaded where this one was named, in their order: itself, or those that the manifest of an AOF lists, which is
/// named itself or by the folder that it is in.
///
/// # Errors
///
/// [`LoadError`].
pub fn files(path: &Path) -> Result<Vec<PathBuf>, LoadError> {
    manifest::files(path)
}

/// What files have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Commands that they are, or become.
    pub commands: u64,
    /// Bytes of these.
    pub bytes: u64,
}

/// Looks at all of the files, as [`load`] does.
///
/// # Errors
///
/// [`LoadError::File`]: the first that is wrong with them.
pub fn check(files: &[PathBuf], now_ms: u64) -> Result<Checked, LoadError> {
    let mut checked = Checked::default();
    go_through(files, now_ms, &mut |bytes, commands| {
        checked.commands += commands;
        checked.bytes += bytes.len() as u64;
        Ok(())
    })?;
    Ok(checked)
}

/// Hands out the commands of the files, whole ones, and how many these are.
fn go_through(files: &[PathBuf], now_ms: u64, sink: &mut stream::Sink<'_>) -> Result<(), LoadError> {
    for path in files {
        let through = File::open(path).map_err(|error| Stop::Fault(error.into()));
        let through = through.and_then(|file| stream::go_through(file, now_ms, sink));
        through.map_err(|stop| match stop {
            Stop::Fault(fault) => in_file(path)(fault),
            Stop::Sink(source) => LoadError::Connection { action: "sending the commands", source },
        })?;
    }
    Ok(())
}

/// What became of the commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Commands that were sent and answered.
    pub commands: u64,
    /// Errors among the answers.
    pub errors: u64,
    /// The first of them.
    pub first_error: Option<String>,
}

/// Sends every command of the files to a server, `to` and `from` being the two halves of the connection, and reads the answers.
/// `answered` is told now and then how many there were. Of snapshots, keys that have ended at `now_ms` are left out.
///
/// # Errors
///
/// [`LoadError`]: a file cannot be taken, or the connection ends early. What was sent before is not taken back; of a
/// transaction that was not sent whole nothing is carried out.
pub fn load(
    files: &[PathBuf],
    now_ms: u64,
    to: impl Write + Send,
    from: impl Read,
    mut answered: impl FnMut(u64),
) -> Result<Loaded, LoadError> {
    let (counted, counts) = mpsc::channel();
    thread::scope(|scope| {
        let sender = scope.spawn(move || send(files, now_ms, to, &counted));
        let mut from = BufReader::new(from);
        let mut loaded = Loaded::default();
        for count in counts {
            for _ in 0..count {
                let error = read_reply(&mut from)
                    .map_err(|source| LoadError::Connection { action: "reading a reply", source })?;
                loaded.commands += 1;
                loaded.errors += u64::from(error.is_some());
                loaded.first_error = loaded.first_error.or(error);
            }
            answered(loaded.commands);
        }
        match sender.join() {
            Ok(sent) => sent.map(|()| loaded),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Sends whole commands, and tells how many before it sends them.
fn send(files: &[PathBuf], now_ms: u64, mut to: impl Write, counted: &mpsc::Sender<u64>) -> Result<(), LoadError> {
    go_through(files, now_ms, &mut |bytes, commands| {
        // Where nobody reads replies any more the connection has ended, and the reader says why.
        counted.send(commands).map_err(|_| io::ErrorKind::BrokenPipe)?;
        to.write_all(bytes)
    })
}
