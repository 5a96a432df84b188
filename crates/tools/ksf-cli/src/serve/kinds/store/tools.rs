//! A store's folder looked at, written down and taken up: `ksf store check`, `dump`, `salvage`, `load`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueHint};
use ksf_kv::offline::{self, OfflineError};

use super::{explain, read_password};
use crate::output::{self, Failure, Status, say};

/// What can be done with a store that is not served, and with commands in a file.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreTool {
    Check(CheckArgs),
    Dump(DumpArgs),
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
    /// A new file for the commands [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
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
    /// A new file for the commands [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

/// Send the commands of a file to a server: a dump, or an AOF of Redis without RDB preamble
///
/// Ends with 1 if a command was answered with an error.
#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// The file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// The server
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:6379")]
    to: SocketAddr,
    /// File with the password
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    password_file: Option<PathBuf>,
}

impl StoreTool {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        match self {
            StoreTool::Check(CheckArgs { data }) => check(&data),
            StoreTool::Dump(DumpArgs { data, output }) => {
                let to = &mut open(output.as_deref())?;
                let keys = offline::dump(&data, now_ms(), to).map_err(failure)?;
                say(&format_args!("{}: {keys} keys written down", data.display()));
                Ok(ExitCode::SUCCESS)
            }
            StoreTool::Salvage(SalvageArgs { data, output }) => {
                let to = &mut open(output.as_deref())?;
                let (keys, logs) = offline::salvage(&data, now_ms(), to).map_err(failure)?;
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
    output::print(text.into_bytes()).map(|()| ExitCode::SUCCESS)
}

fn load(args: &LoadArgs) -> Result<ExitCode, Failure> {
    let LoadArgs { file: path, to, password_file } = args;
    let file = File::open(path)
        .map_err(|error| Failure::new(Status::of_input(&error), format!("cannot read {}: {error}", path.display())))?;
    let refused = |error: io::Error| {
        Failure::new(Status::Unavailable, format!("cannot talk to {to}: {error}"))
            .remedy("start the store, or name another server with --to")
    };
    let stream = TcpStream::connect(to).map_err(refused)?;
    if let Some(password) = password_file.as_deref().map(read_password).transpose()? {
        let mut auth = format!("*2\r\n$4\r\nAUTH\r\n${}\r\n", password.len()).into_bytes();
        auth.extend_from_slice(&password);
        auth.extend_from_slice(b"\r\n");
        (&stream).write_all(&auth).map_err(refused)?;
        if let Some(error) = offline::read_reply(&mut io::BufReader::with_capacity(1, &stream)).map_err(refused)? {
            return Err(Failure::new(Status::NoPermission, format!("{to} does not take the password: {error}")));
        }
    }
    let loaded = offline::load(file, &stream, &stream).map_err(|error| {
        // What is still on its way to the server is of no use.
        let _ = stream.shutdown(Shutdown::Both);
        let Failure { status, what, .. } = failure(error);
        Failure::new(status, format!("{}: {what}", path.display()))
    })?;
    say(&format_args!("{}: {} commands, {} errors", path.display(), loaded.commands, loaded.errors));
    Ok(match loaded.first_error {
        None => ExitCode::SUCCESS,
        Some(error) => {
            say(&format_args!("the first error: {error}"));
            ExitCode::from(1)
        }
    })
}

/// The file for the commands, which is not there yet, or stdout.
fn open(path: Option<&Path>) -> Result<Box<dyn Write>, Failure> {
    let Some(path) = path else { return Ok(Box::new(BufWriter::new(io::stdout()))) };
    let file = File::options().write(true).create_new(true).open(path);
    let file = file.map_err(|error| Failure::os(format!("cannot write to {}", path.display()), &error));
    Ok(Box::new(BufWriter::new(file?)))
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn failure(error: OfflineError) -> Failure {
    match error {
        OfflineError::Disk(error) => explain(error),
        OfflineError::Io { action, source } => Failure::os(action, &source),
        error => Failure::new(Status::Data, error.to_string()),
    }
}
