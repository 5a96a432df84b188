//! `ksf load nfs`: calls procedures of an NFSv3 server in any mix, on files that it makes before and removes after, and checks every
//! reply: status, type, size and number of the file, handles, and each byte that is read.
//!
//! ```text
//!   tree: MNT, MKDIR, CREATE, WRITE, one at a time -> files, all known
//!   mix:  procedures by their shares ─┐
//!   client: number of the call ───────┴─> file and offset ──> call ... reply ──> what it must say, from the same number
//! ```

mod call;
mod client;
mod listing;
mod mix;
mod tree;

use std::time::Duration;

use crate::calls::CallArgs;
use crate::calls::args::ToolDefaults;
use crate::calls::columns::Style;
use crate::calls::report::CallReport;
use crate::calls::session::measure;
use crate::error::LoadError;
use crate::files::FileArgs;
use crate::files::args::FilePlan;
use crate::files::content::Shape;
use crate::options::target::Target;
use crate::options::{name, number, usage};
use crate::report::document::say;
use crate::report::{Io, with_process_io};
use crate::rpc::oncrpc;

pub use self::call::{Procedure, Stable};
pub use self::listing::Listing;
pub use self::mix::Mix;

use self::client::Work;
use self::tree::{MountTarget, Tree};

const TOOL: ToolDefaults = ToolDefaults { name: "nfs", port: 2049, iterations: 1, nice: 0 };

const DEFAULT: FilePlan = FilePlan { shape: Shape { files: 100, file_bytes: 64 << 10 }, io_bytes: 4 << 10 };

/// Of a datagram, which has a head beside its data.
const DATAGRAM_IO_BYTES_MAX: usize = 32 * 1024;

/// For each call of the preparation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Options of `ksf load nfs`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure an NFSv3 server with any mix of procedures, and check every reply",
    allow_negative_numbers = true,
    mut_arg("host", |arg| arg.value_name("nfs://HOST[:PORT]/PATH").help("The exported folder; the measurement makes a folder in it, and removes it")),
    mut_arg("port", |arg| arg.help("Port, where the address names none [default: 2049]")),
    mut_arg("iterations", |arg| arg.help("Iterations, one line each [default: 1]")),
    after_help = AFTER_HELP
)]
pub struct LoadNfsArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: CallArgs,

    /// Procedures with their shares; or sfs2008, the shares of SPECsfs2008
    #[arg(long, value_name = "NAME=SHARE,...", default_value = "getattr=64,lookup=12,access=12,read=7,write=5")]
    pub mix: Mix,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub files: FileArgs,

    /// When a WRITE is done: in memory, with its data on the medium, or with its attributes, too
    #[arg(long, value_enum, default_value = "unstable")]
    pub stable: Stable,

    /// Credentials: none, sys or unix (the same as sys)
    #[arg(short = 'A', long = "auth", value_name = "TYPE", default_value = "sys")]
    pub auth: String,

    /// Port of the MOUNT program [default: that of NFS]
    #[arg(long, value_name = "PORT", value_parser = number::<1, 65_535>)]
    pub mount_port: Option<u64>,
}

const AFTER_HELP: &str = "\
Procedures: null, getattr, setattr, lookup, access, readlink, read, write, create, remove, readdir, readdirplus, fsstat, \
fsinfo, pathconf, commit. Writes write the bytes that are there already, so every read is checked.

Numbers take a suffix: k m g t p e z y are powers of 1024, K M G T P E Z Y powers of 1000, b is 512, w is 4.
Times take us, ms, s, m or h; without a unit they are seconds.

Exit status: 0 every reply was right, 1 replies were wrong, missing or surplus, 64 wrong use, 65 bad number, \
68 unknown host, 69 no connection, 70 bug of this program, 71 system error, or a file that cannot be made, \
73 a file cannot be written, 74 the results cannot be written.";

/// Runs on stdout and stderr until it is done or interrupted.
///
/// # Errors
///
/// [`LoadError`]: wrong use, no connection, an export that cannot be mounted or written, a result that cannot be written.
pub fn run(args: LoadNfsArgs) -> Result<CallReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs with the given output.
///
/// # Errors
///
/// As [`run`].
pub fn run_with(args: &LoadNfsArgs, io: &mut Io<'_>) -> Result<CallReport, LoadError> {
    let (address, path) = parts(&args.common.host)?;
    let plan = CallArgs { host: address.to_owned(), ..args.common.clone() }.plan(&TOOL)?;
    let Target::Inet { host, port } = plan.target.clone() else {
        return usage("an NFS server has a host and a port; write nfs://HOST[:PORT]/PATH");
    };
    let is_datagram = plan.socket.transport.is_datagram();
    let FilePlan { shape, io_bytes } = args.files(is_datagram)?;
    let credential = oncrpc::credential(&args.auth)?;
    let place = MountTarget {
        host,
        port,
        mount_port: args.mount_port.map_or(port, |port| port as u16),
        path: path.to_owned(),
        credential: credential.clone(),
        timeout: PATIENCE,
    };
    let connections = plan.drive.connections as u32;
    let tree = Tree::make(&place, shape)?;
    let work = Work {
        tree: tree.clone(),
        mix: args.mix.clone(),
        io_bytes,
        stable: args.stable,
        credential,
        is_datagram,
        seed: args.common.pace.seed,
    };
    let message = [
        ("mix", args.mix.in_words()),
        ("files", shape.files.to_string()),
        ("file_bytes", shape.file_bytes.to_string()),
        ("io_bytes", io_bytes.to_string()),
        ("stable", name(&args.stable)),
        ("auth", args.auth.clone()),
    ];
    let report = measure(plan, Style::Rpctest, &work, &message, io);
    if !args.files.keep
        && let Err(error) = tree.remove(&place, connections)
    {
        // What was measured counts, and is told.
        say(TOOL.name, &format!("{error}; remove the folder ksf-load-* by hand"), io);
    }
    report
}

impl LoadNfsArgs {
    fn files(&self, is_datagram: bool) -> Result<FilePlan, LoadError> {
        let plan = self.files.plan(DEFAULT)?;
        if is_datagram && plan.io_bytes > DATAGRAM_IO_BYTES_MAX {
            return usage("--io-bytes is more than 32 KiB, which is what a datagram has room for");
        }
        Ok(plan)
    }
}

/// `nfs://HOST[:PORT]/PATH` in its address and its path.
fn parts(url: &str) -> Result<(&str, &str), LoadError> {
    let rest = url.strip_prefix("nfs://").unwrap_or_default();
    match rest.find('/') {
        Some(at) if at > 0 => Ok((&rest[..at], &rest[at..])),
        _ => usage(format!("`{url}` is no exported folder; write nfs://HOST[:PORT]/PATH")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: LoadNfsArgs,
    }

    fn args(options: &str) -> LoadNfsArgs {
        Program::try_parse_from(["nfs"].into_iter().chain(options.split_whitespace())).unwrap().args
    }

    #[test]
    fn urls_have_an_address_and_a_path() {
        assert_eq!(parts("nfs://host/srv/data").unwrap(), ("host", "/srv/data"));
        assert_eq!(parts("nfs://[::1]:20049/").unwrap(), ("[::1]:20049", "/"));
        for url in ["host:/srv", "nfs://host", "nfs:///srv", "http://host/srv"] {
            assert!(parts(url).unwrap_err().to_string().contains("nfs://HOST[:PORT]/PATH"), "{url}");
        }
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        for (options, part) in [
            ("--file-bytes 0", "1 byte"),
            ("--file-bytes 1k", "--io-bytes is more"),
            ("--files 100000 --file-bytes 1m", "64 GiB"),
        ] {
            let error = args(&format!("nfs://h/x {options}")).files(false).unwrap_err().to_string();
            assert!(error.contains(part), "{options}: {error}");
        }
        assert!(args("nfs://h/x --io-bytes 64k").files(true).is_err());
        assert!(args("nfs://h/x --io-bytes 64k").files(false).is_ok());
    }
}
