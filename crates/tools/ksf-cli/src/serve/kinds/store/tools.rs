//! A store looked at, written down and taken up: `ksf store check`, `dump`, `backup`, `salvage`, `load`.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueHint};
use ksf::listener::ListenAddr;
use ksf_kv::Settings;
use ksf_kv::ask::{AskError, Asker, Socket};
use ksf_kv::backup::{self, BackupError};
use ksf_kv::load::{self, Checked, Fault, IntoFolderError, LoadError, Loaded};
use ksf_kv::offline::{self, OfflineError};
use ksf_kv::whole::{FileError, Name, write_whole};
use rustix::io::Errno;

use super::memory::half_of_the_machine;
use super::{LOG_BYTES_MAX, LOG_BYTES_MIN, explain, limits, options, read_password};
use crate::number::number;
use crate::output::{self, Failure, Status, say};

/// What can be done with a store beside serving it.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreTool {
    Check(CheckArgs),
    Dump(DumpArgs),
    Backup(BackupArgs),
    Salvage(SalvageArgs),
    Load(LoadArgs),
}

/// Read a store as a start would, and every checksum in it; nothing is changed
///
/// The store must not be served meanwhile. Ends with 65 if what was acknowledged is damaged.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Folder of the store
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    data: PathBuf,
}

/// Write a store down as commands of RESP, which `ksf store load` and redis-cli --pipe take
#[derive(Debug, Args)]
pub(crate) struct DumpArgs {
    /// Folder of the store, which must not be served meanwhile
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    data: PathBuf,
    /// A new file for the commands, FILE.partial until it is whole [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

/// Write a store down as it is at one moment while it is served, as commands that `ksf store load` and redis-cli --pipe take
///
/// All that was acknowledged before is in it, transactions whole. The file gets its name, and replaces one that is there, when
/// it is whole and on the disk; until then it is FILE.partial. Its end has a checksum, so `ksf store load` takes no part of one that was
/// cut. A store that is short of room gives the backup up: then begin again when less is written.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// What the store listens on: unix:PATH or ADDR:PORT
    #[arg(value_name = "SOCKET")]
    from: ListenAddr,
    /// The file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// File with the password
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    password_file: Option<PathBuf>,
}

/// Write down as commands what can be read of a damaged store; nothing is changed
///
/// The last resort, where there is no backup. What is damaged is missing, what was never acknowledged may be there, and so may
/// keys that were deleted.
#[derive(Debug, Args)]
pub(crate) struct SalvageArgs {
    /// Folder of the store, which must not be served meanwhile
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    data: PathBuf,
    /// A new file for the commands, FILE.partial until it is whole [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

/// Load a dump, a backup, or what Redis wrote: an AOF, the folder of one (appendonlydir) or its manifest, an RDB file
///
/// All of it is looked at before anything is sent: what is damaged or cut is named with its place (65), and nothing of it is loaded.
/// Keys that are there stay, and what is loaded is added to them, so the store should be empty. Ends with 1 if a command
/// was answered with an error; a new folder (--data) is not made then (65).
#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// The file, or the folder of an AOF
    #[arg(value_name = "FILE", value_hint = ValueHint::AnyPath)]
    file: PathBuf,
    /// The server: unix:PATH or ADDR:PORT
    #[arg(long, value_name = "SOCKET", default_value = "127.0.0.1:6379")]
    to: ListenAddr,
    /// File with the password
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    password_file: Option<PathBuf>,
    /// Make a store in this folder, which is empty or not there, instead of sending to a server
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with_all = ["to", "password_file"])]
    data: Option<PathBuf>,
    /// Bytes of the one log of that store, into which all must fit
    #[arg(long, value_name = "BYTES", default_value = "1g", value_parser = number::<LOG_BYTES_MIN, LOG_BYTES_MAX>)]
    log_bytes: u64,
}

impl StoreTool {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        match self {
            StoreTool::Check(CheckArgs { data }) => check(&data),
            StoreTool::Dump(DumpArgs { data, output }) => {
                let keys = write_down(output.as_deref(), |mut to| offline::dump(&data, now_ms(), &mut to))?;
                say(&format_args!("{}: {keys} keys written down", data.display()));
                Ok(ExitCode::SUCCESS)
            }
            StoreTool::Backup(args) => make_backup(&args),
            StoreTool::Salvage(SalvageArgs { data, output }) => {
                let (keys, logs) = write_down(output.as_deref(), |mut to| offline::salvage(&data, now_ms(), &mut to))?;
                for (log, found) in logs.iter().enumerate() {
                    say(&format_args!(
                        "log {log}: {} whole batches with {} records; {} segments cannot be read",
                        found.batches, found.records, found.unreadable
                    ));
                }
                say(&format_args!("{}: {keys} keys written down; the store was not changed", data.display()));
                Ok(ExitCode::SUCCESS)
            }
            StoreTool::Load(args) => load(&args),
        }
    }
}

fn check(data: &Path) -> Result<ExitCode, Failure> {
    let check = offline::check(data).map_err(explain)?;
    let mut text = format!("{}: whole; {} keys, {} starts\n", data.display(), check.keys, check.starts);
    for log in &check.logs {
        text.push_str(&format!(
            "log {}: {} records; it ends at byte {} and says that it was acknowledged up to byte {}\n",
            log.log, log.records, log.end.0, log.promised.0
        ));
    }
    text.push_str(&format!("read in {}\n", check.recovery));
    output::print(text.into_bytes()).map(|()| ExitCode::SUCCESS)
}

/// A server that knows the password, if there is one.
fn connect(address: &ListenAddr, password_file: Option<&Path>) -> Result<Socket, Failure> {
    let refused = |error: AskError| {
        Failure::new(Status::Unavailable, format!("cannot talk to {address}: {error}"))
            .remedy("start the store, or name another server")
    };
    let password = password_file.map(read_password).transpose()?;
    let socket = Socket::connect(address).map_err(|error| refused(error.into()))?;
    if let Some(password) = password {
        // Nothing follows an answer that nobody asked for.
        Asker::new(&socket).authenticate(&password).map_err(|error| match error {
            AskError::Refused(text) => {
                Failure::new(Status::NoPermission, format!("{address} does not take the password: {text}"))
            }
            error => refused(error),
        })?;
    }
    Ok(socket)
}

fn make_backup(args: &BackupArgs) -> Result<ExitCode, Failure> {
    let BackupArgs { from, file, password_file } = args;
    let socket = connect(from, password_file.as_deref())?;
    let made = backup::backup(&mut Asker::new(&socket), file, now_ms()).map_err(|error| match error {
        BackupError::Ask(AskError::Refused(text)) => {
            let status = match text.split(' ').next() {
                Some("NOAUTH" | "DENIED") => Status::NoPermission,
                _ => Status::Unavailable,
            };
            Failure::new(status, format!("no backup of {from}: {text}"))
        }
        BackupError::Ask(error) => Failure::new(Status::Unavailable, format!("no backup of {from}: {error}")),
        BackupError::Copy(error) => Failure::new(Status::Data, format!("no backup of {from}: {error}")),
        BackupError::File(error) => file_failure(&error),
    })?;
    say(&format_args!("{}: {} keys of {from} in {} bytes", file.display(), made.keys, made.bytes));
    Ok(ExitCode::SUCCESS)
}

/// Says now and then how far a long load is.
struct Progress<'a> {
    file: &'a Path,
    all: Checked,
    tenths: u64,
}

impl Progress<'_> {
    /// Bytes of commands above which it is said.
    const LONG_BYTES: u64 = 64 << 20;

    fn answered(&mut self, commands: u64) {
        let tenths = commands * 10 / self.all.commands.max(1);
        if self.all.bytes >= Self::LONG_BYTES && self.tenths < tenths && tenths < 10 {
            self.tenths = tenths;
            let Self { file, all: Checked { commands: all, .. }, .. } = self;
            say(&format_args!("{}: {commands} of {all} commands loaded", file.display()));
        }
    }
}

fn load(args: &LoadArgs) -> Result<ExitCode, Failure> {
    let LoadArgs { file, to, password_file, data, log_bytes } = args;
    let now_ms = now_ms();
    let files = load::files(file).map_err(load_failure)?;
    let all = load::check(&files, now_ms).map_err(load_failure)?;
    let mut progress = Progress { file, all, tenths: 0 };
    let answered = |commands| progress.answered(commands);
    let loaded = match data {
        Some(data) => {
            let failed = |error: &str| {
                say(&format_args!("a write of the store failed: {error}; nothing was loaded"));
                std::process::exit(i32::from(Status::Os as u8));
            };
            let memory_bytes_max = usize::try_from(half_of_the_machine()).unwrap_or(usize::MAX);
            let settings = Settings { memory_bytes_max, ..Settings::default() };
            let how = (options(*log_bytes, 1), limits(), settings);
            load::into_folder(&files, now_ms, data, how, failed, answered).map_err(folder_failure)?
        }
        None => {
            let socket = connect(to, password_file.as_deref())?;
            load::load(&files, now_ms, &socket, &socket, answered).map_err(|error| {
                // What is still on its way to the server is of no use.
                socket.end();
                load_failure(error)
            })?
        }
    };
    let Loaded { commands, errors, first_error } = loaded;
    say(&format_args!("{}: {commands} commands, {errors} errors", file.display()));
    Ok(match first_error {
        None => ExitCode::SUCCESS,
        Some(error) => {
            say(&format_args!("the first error: {error}"));
            ExitCode::from(1)
        }
    })
}

fn load_failure(error: LoadError) -> Failure {
    let what = error.to_string();
    match error {
        LoadError::File { path, fault: Fault::Io(error) } => {
            Failure::new(Status::of_input(&error), format!("cannot read {}: {error}", path.display()))
        }
        LoadError::File { .. } => Failure::new(Status::Data, format!("{what}; nothing was loaded")),
        LoadError::Connection { action, source } => Failure::os(action, &source),
    }
}

fn folder_failure(error: IntoFolderError) -> Failure {
    let what = error.to_string();
    match error {
        IntoFolderError::NotEmpty(_) | IntoFolderError::LeftOver(_) => Failure::new(Status::Unavailable, what),
        IntoFolderError::Disk(error) => explain(error),
        IntoFolderError::Io { action, path, source } => Failure::os(format!("{action} {}", path.display()), &source),
        IntoFolderError::Server(_) => Failure::new(Status::Os, what),
        IntoFolderError::Load(error) => load_failure(error),
        IntoFolderError::Refused { .. } => Failure::new(Status::Data, what)
            .remedy("more --log-bytes, or load into a store that is served, which takes the rest"),
    }
}

/// Writes commands to a file that is not there yet, and gets its name when it is whole, or to stdout.
fn write_down<T>(
    path: Option<&Path>,
    write: impl FnOnce(&mut dyn Write) -> Result<T, OfflineError>,
) -> Result<T, Failure> {
    let Some(path) = path else { return write(&mut BufWriter::new(io::stdout())).map_err(failure) };
    if fs::symlink_metadata(path).is_ok() {
        return Err(Failure::os(format!("cannot write to {}", path.display()), &Errno::EXIST.into()));
    }
    write_whole(path, Name::New, |to| write(to)).map_err(failure)
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn failure(error: OfflineError) -> Failure {
    match error {
        OfflineError::Disk(error) => explain(error),
        OfflineError::Io { action, source } => Failure::os(action, &source),
        OfflineError::File(error) => file_failure(&error),
    }
}

fn file_failure(FileError { action, path, source }: &FileError) -> Failure {
    Failure::os(format!("{action} {}", path.display()), source)
}
