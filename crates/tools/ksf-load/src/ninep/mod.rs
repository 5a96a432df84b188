//! `ksf load 9p`: sends requests of 9P2000.L in any mix, or as IOR does, on files that it makes before and removes after, and
//! checks every reply: type, tag, count, qid, attributes, and each byte that is read.
//!
//! ```text
//!   session: Tversion, Tattach, Twalk, Tlopen, one at a time ──> tree: the files; and the fids of each connection
//!   mix or ior ──────────────────────┐
//!   client: number of the request ───┴─> file and offset ──> T-message ... R-message ──> its content, from the same number
//! ```

mod client;
mod operation;
mod session;
mod tree;

use std::sync::Arc;
use std::time::Duration;

use crate::calls::CallArgs;
use crate::calls::args::ToolDefaults;
use crate::calls::columns::Style;
use crate::calls::report::CallReport;
use crate::calls::session::measure;
use crate::error::LoadError;
use crate::files::FileArgs;
use crate::files::args::FilePlan;
use crate::files::content::{Content, Shape};
use crate::options::{name, usage};
use crate::report::document::say;
use crate::report::{Io, with_process_io};

pub use self::operation::{Mix, Operation};

use self::client::{TAG_BITS, Work};
use self::operation::Load;
use self::tree::{AttachTarget, Tree};

const TOOL: ToolDefaults = ToolDefaults { name: "9p", port: 5640, iterations: 1, nice: 0 };

/// Few files: each connection opens all of them.
const DEFAULT: FilePlan = FilePlan { shape: Shape { files: 16, file_bytes: 64 << 10 }, io_bytes: 4 << 10 };

/// Each file takes a fid of each connection, of which servers grant about a thousand.
const FILES_MAX: usize = 500;

/// Bytes of a read and of a write of `--shape ior`, and how many there are of each.
const IOR_IO_BYTES: usize = 32;
const IOR_BLOCKS: usize = 4096;

/// For each request of the preparation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Options of `ksf load 9p`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure a server of 9P2000.L with any mix of requests, and check every reply",
    allow_negative_numbers = true,
    mut_arg("host", |arg| arg.value_name("9p://HOST[:PORT]/PATH|unix:SOCKET").help("The exported folder; the measurement makes a folder in it, and removes it")),
    mut_arg("port", |arg| arg.help("Port, where the address names none [default: 5640]")),
    mut_arg("iterations", |arg| arg.help("Iterations, one line each [default: 1]")),
    mut_arg("files", |arg| arg.help("Files that requests are about, 1 to 500 [default: 16]")),
    mut_arg("file_bytes", |arg| arg.help("Length of each file in bytes [default: 64k, of ior 4096 times --io-bytes]")),
    mut_arg("io_bytes", |arg| arg.help("Bytes of a read and of a write [default: 4k, of ior 32]")),
    after_help = AFTER_HELP
)]
pub struct LoadNinepArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: CallArgs,

    /// Operations with their shares: getattr, walk, read, write
    #[arg(
        long,
        value_name = "NAME=SHARE,...",
        default_value = "getattr=64,walk=24,read=7,write=5",
        conflicts_with = "shape"
    )]
    pub mix: Mix,

    /// A sequence in place of a mix
    #[arg(long, value_enum)]
    pub shape: Option<LoadShape>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub files: FileArgs,

    /// Name of the export, where the address is a socket [default: none, which is the only export]
    #[arg(long, value_name = "PATH")]
    pub aname: Option<String>,

    /// User of the attach, as a number; files get the group of this number [default: this program's user and group]
    #[arg(long, value_name = "UID")]
    pub uid: Option<u32>,
}

/// Sequences of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadShape {
    /// As IOR with a file per process: each connection writes a new file from front to back, then reads it
    Ior,
}

const AFTER_HELP: &str = "\
A walk is a Twalk of a name to a new fid and its Tclunk, which count as two messages. Writes write the bytes of their file, so \
every read is checked.

Numbers take a suffix: k m g t p e z y are powers of 1024, K M G T P E Z Y powers of 1000, b is 512, w is 4.
Times take us, ms, s, m or h; without a unit they are seconds.

Exit status: 0 every reply was right, 1 replies were wrong, missing or surplus, 64 wrong use, 65 bad number, \
68 unknown host, 69 no connection, 70 bug of this program, 71 system error, or a file that cannot be made, \
73 a file cannot be written, 74 the results cannot be written.";

/// Runs on stdout and stderr until it is done or interrupted.
///
/// # Errors
///
/// [`LoadError`]: wrong use, no connection, an export that cannot be attached or written, a result that cannot be written.
pub fn run(args: LoadNinepArgs) -> Result<CallReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs with the given output.
///
/// # Errors
///
/// As [`run`].
pub fn run_with(args: &LoadNinepArgs, io: &mut Io<'_>) -> Result<CallReport, LoadError> {
    let (address, aname) = args.parts()?;
    let files = args.files()?;
    let common = CallArgs { host: address.to_owned(), count: args.count(&files), ..args.common.clone() };
    let plan = common.plan(&TOOL)?;
    let load = args.load(&files, plan.drive.in_flight)?;
    let place = Arc::new(AttachTarget {
        target: plan.target.clone(),
        aname: aname.to_owned(),
        uid: args.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
        gid: args.uid.unwrap_or_else(|| rustix::process::getegid().as_raw()),
        timeout: PATIENCE,
    });
    let FilePlan { shape, io_bytes } = files;
    // What ior reads, it has written before.
    let tree = Tree::make(&place, Content::new(shape), args.shape.is_none())?;
    let work = Work {
        tree: Arc::clone(&tree),
        place: Arc::clone(&place),
        load,
        io_bytes,
        in_flight: plan.drive.in_flight,
        waits_for_all: plan.drive.wait_all,
        seed: args.common.pace.seed,
    };
    let message = [
        ("mix", args.shape.map_or_else(|| args.mix.in_words(), |shape| name(&shape))),
        ("files", shape.files.to_string()),
        ("file_bytes", shape.file_bytes.to_string()),
        ("io_bytes", io_bytes.to_string()),
    ];
    let report = measure(plan, Style::Rpctest, &work, &message, io);
    if !args.files.keep
        && let Err(error) = tree.remove(&place)
    {
        // The results of the measurement count nevertheless.
        say(TOOL.name, &format!("{error}; remove the folder ksf-load-* by hand"), io);
    }
    report
}

impl LoadNinepArgs {
    /// Address and name of the export.
    fn parts(&self) -> Result<(&str, &str), LoadError> {
        let host = self.common.host.as_str();
        if host.starts_with("unix:") {
            return Ok((host, self.aname.as_deref().unwrap_or("")));
        }
        let rest = host.strip_prefix("9p://").unwrap_or_default();
        match (rest.find('/'), &self.aname) {
            (Some(at), None) if at > 0 => Ok((&rest[..at], &rest[at..])),
            (Some(at), Some(_)) if at > 0 => usage("--aname is for unix:SOCKET; the address names an export"),
            _ => usage(format!(
                "`{host}` is no exported folder; write 9p://HOST[:PORT]/PATH, or unix:SOCKET with --aname"
            )),
        }
    }

    fn files(&self) -> Result<FilePlan, LoadError> {
        if self.common.udp {
            return usage("-u: 9P is spoken over streams");
        }
        let Some(LoadShape::Ior) = self.shape else {
            let plan = self.files.plan(DEFAULT)?;
            if plan.shape.files > FILES_MAX {
                return usage(format!("--files is more than {FILES_MAX}: each takes a fid of each connection"));
            }
            return Ok(plan);
        };
        if self.files.files.is_some() {
            return usage("--files is not for --shape ior, where each connection has one");
        }
        let io_bytes = self.files.io_bytes.map_or(IOR_IO_BYTES, |bytes| bytes as usize);
        let shape = Shape { files: self.common.jobs as usize, file_bytes: IOR_BLOCKS * io_bytes };
        self.files.plan(FilePlan { shape, io_bytes })
    }

    /// Messages of a connection: of ior all of its file, twice, unless something else ends it.
    fn count(&self, files: &FilePlan) -> Option<u64> {
        let ends = self.common.duration.is_some() || self.common.pace.rate.is_some();
        match (self.common.count, self.shape) {
            (None, Some(LoadShape::Ior)) if !ends => Some(2 * files.blocks()),
            (count, _) => count,
        }
    }

    fn load(&self, files: &FilePlan, in_flight: usize) -> Result<Load, LoadError> {
        if in_flight > 1 << (TAG_BITS - 1) {
            return usage("-a is more than 16384: tags are numbers of two bytes");
        }
        let Some(LoadShape::Ior) = self.shape else { return Ok(Load::Mix(self.mix.clone())) };
        if in_flight as u64 >= files.blocks() {
            return usage("-a has to be below the number of parts of a file, or a part is read while it is written");
        }
        Ok(Load::Ior { blocks: files.blocks() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: LoadNinepArgs,
    }

    fn args(options: &str) -> LoadNinepArgs {
        Program::try_parse_from(["9p"].into_iter().chain(options.split_whitespace())).unwrap().args
    }

    #[test]
    fn addresses_have_an_export() {
        for (options, parts) in [
            ("9p://host/srv/data", ("host", "/srv/data")),
            ("9p://[::1]:564/", ("[::1]:564", "/")),
            ("unix:/run/9p.sock", ("unix:/run/9p.sock", "")),
            ("unix:/run/9p.sock --aname /srv", ("unix:/run/9p.sock", "/srv")),
        ] {
            assert_eq!(args(options).parts().unwrap(), parts, "{options}");
        }
        for (options, part) in [
            ("host:/srv", "9p://HOST[:PORT]/PATH"),
            ("9p://host", "9p://HOST[:PORT]/PATH"),
            ("9p:///srv", "9p://HOST[:PORT]/PATH"),
            ("9p://h/srv --aname /srv", "--aname"),
        ] {
            assert!(args(options).parts().unwrap_err().to_string().contains(part), "{options}");
        }
    }

    #[test]
    fn ior_is_the_measurement_of_the_seed() {
        let args = args("9p://h/x --shape ior -j32");
        let files = args.files().unwrap();
        assert_eq!(files, FilePlan { shape: Shape { files: 32, file_bytes: 128 << 10 }, io_bytes: 32 });
        assert_eq!(args.count(&files), Some(2 * 4096));
        assert!(matches!(args.load(&files, 1).unwrap(), Load::Ior { blocks: 4096 }));
    }

    #[test]
    fn loads_that_cannot_be_are_refused() {
        let refused = |options: &str, in_flight| -> String {
            let args = args(&format!("9p://h/x {options}"));
            args.files().and_then(|files| args.load(&files, in_flight)).unwrap_err().to_string()
        };
        for (options, in_flight, part) in [
            ("-u", 1, "streams"),
            ("--files 501", 1, "500"),
            ("--shape ior --files 3", 1, "--files is not for"),
            ("--file-bytes 1k", 1, "--io-bytes is more"),
            ("", 16_385, "two bytes"),
            ("--shape ior --file-bytes 128", 4, "-a has to be below"),
        ] {
            assert!(refused(options, in_flight).contains(part), "{options}");
        }
        assert!(Program::try_parse_from(["9p", "--shape", "ior", "--mix", "read", "9p://h/x"]).is_err());
    }
}
