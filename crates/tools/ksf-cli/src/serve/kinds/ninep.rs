//! A 9P2000.L server: `kind = "9p"`, `ksf 9p`.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand, ValueHint};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::ListenerInfo;
use ksf_fs::{FsCounters, FsOptions, Identities, LaneOptions};
use ksf_ninep::{FIDS_MAX, MSIZE_MAX, MSIZE_MIN, Ninep, OpenError, Settings};
use serde::Deserialize;

use super::export::{CLOSE_WITHIN, ExportSpec, LANES, LANES_MAX, check_closed, default_state, own_identity_note};
use super::status::{Protocol, StatusArgs};
use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::serve::args::{ProcessArgs, ServerArgs};
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::running::{Running, State};
use crate::stats::Value;
use crate::toml_file::{Mistake, Table};

/// Port that needs no privilege, as in examples of diod; that of 9P is 564.
const PORT: u16 = 5640;

/// Most fids that one connection may be given.
const FIDS_LIMIT: u64 = 1 << 20;

/// 9P2000.L server: folders that Linux mounts
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct NinepArgs {
    #[command(subcommand)]
    pub(crate) tool: Option<NinepTool>,
    /// Folder to export, with options behind commas; repeatable
    ///
    /// ro: nothing can be changed. clients=CIDR: only these clients, repeatable. squash=root|all|none: whose requests are those
    /// of the anonymous user [default: root]. anon=UID:GID: that user [default: 65534:65534]. names=sync: changes of names and
    /// attributes are answered when they are on the medium; without it a client asks for that by fsync. secure: only from ports
    /// below 1024. exclusive: nothing but this server changes the folder, so attributes are kept.
    #[arg(long = "export", value_name = "DIR[,OPTION...]", required = true)]
    exports: Vec<ExportSpec>,
    /// Folder of the keys of the file layer
    /// [default: /var/lib/ksf/9p; without root ksf/9p below $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    state: Option<PathBuf>,
    /// Threads that carry requests out; more than CPUs, because they wait for disks
    #[arg(long, value_name = "N", default_value = "16", value_parser = number::<1, LANES_MAX>)]
    lanes: u64,
    /// Fids that one connection may have; a client that caches names has one for each of them
    #[arg(long, value_name = "N", default_value = "4096", value_parser = number::<16, FIDS_LIMIT>)]
    fids_max: u64,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

/// What can be done with a 9P server beside serving.
#[derive(Debug, Subcommand)]
pub(crate) enum NinepTool {
    /// Show what a running 9P server has answered, of each message
    Status(StatusArgs),
}

impl NinepTool {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        let Self::Status(args) = self;
        args.run(Protocol::Ninep)
    }
}

impl NinepArgs {
    pub(crate) fn single(self) -> Single<NinepServer> {
        let Self { tool: _, exports, state, lanes, fids_max, server, process } = self;
        let ninep = NinepServer { exports, folder: PathBuf::new(), state, lanes, fids_max };
        Single::new("9p", ninep, server, process)
    }
}

/// What the table of a service says of a 9P server.
#[derive(Debug, Deserialize)]
struct NinepTable {
    /// Folders with their options, relative to the file.
    exports: Vec<ExportSpec>,
    /// Folder of keys, relative to the file.
    state: Option<PathBuf>,
    /// Threads.
    lanes: Option<Number<1, LANES_MAX>>,
    /// Fids of one connection.
    fids_max: Option<Number<16, FIDS_LIMIT>>,
}

/// The 9P server.
#[derive(Debug)]
pub(crate) struct NinepServer {
    exports: Vec<ExportSpec>,
    /// Where relative paths begin.
    folder: PathBuf,
    state: Option<PathBuf>,
    lanes: u64,
    fids_max: u64,
}

impl ServiceKind for NinepServer {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let NinepTable { exports, state, lanes, fids_max } = table.take()?;
        if exports.is_empty() {
            return Err(table.mistake("exports has no folder; write exports = [\"/srv/data\"]"));
        }
        let folder = table.folder().to_owned();
        let state = state.map(|state| folder.join(state));
        let lanes = lanes.map_or(LANES, |number| number.0);
        Ok(NinepServer { exports, folder, state, lanes, fids_max: fids_max.map_or(FIDS_MAX as u64, |number| number.0) })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn has_datagrams(&self) -> bool {
        false
    }

    fn limits(&self) -> Limits {
        // Several reads and writes of 1 MiB at a time.
        Limits { connection_bytes_max: 16 << 20, ..Limits::default() }
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let state = self.state.clone().map_or_else(|| default_state("9p"), Ok)?;
        let settings = Settings {
            exports: self.exports.iter().map(|spec| spec.settings(&self.folder, false)).collect(),
            state,
            lanes: LaneOptions { threads: self.lanes as usize },
            fs: FsOptions::default(),
            msize_max: msize_max(launch.limits().message_bytes_max)?,
            fids_max: self.fids_max as usize,
        };
        let msize = settings.msize_max;
        let ninep = Ninep::open(settings).map_err(explain)?;
        let service = ninep.service(launch.name());
        let mut running = launch.serve_on_shards(Arc::new(service))?.start(())?;
        let lines = self.lines(&running.name, &ninep, msize, running.listeners());
        running.ready.splice(0..0, lines);
        if ninep.identities() == Identities::Own {
            running.notes.push(own_identity_note(&running.name));
        }
        Ok(running.with_state(Serving(Some(ninep))))
    }
}

impl NinepServer {
    /// A line for each export: how it is served, and how it is mounted.
    fn lines(&self, name: &str, ninep: &Ninep, msize: u32, listeners: &[ListenerInfo]) -> Vec<String> {
        let addresses: Vec<&ListenAddr> = listeners.iter().map(|listener| &listener.addr).collect();
        let line = |(export, spec): (ksf_ninep::ExportInfo<'_>, &ExportSpec)| {
            let path = export.path.display();
            let mount = mount_line(&addresses, export.path, msize).map(|line| format!("; to mount it: {line}"));
            format!("{name}: export {path} {}{}", spec.words(), mount.unwrap_or_default())
        };
        ninep.exports().zip(&self.exports).map(line).collect()
    }
}

/// What a client types. Linux before 6.16 mounts by IPv4 and by Unix sockets only.
fn mount_line(addresses: &[&ListenAddr], path: &Path, msize: u32) -> Option<String> {
    let rest = format!("version=9p2000.L,aname={},msize={msize},access=user", path.display());
    let of_address = |address: &&ListenAddr| match address {
        ListenAddr::Tcp(SocketAddr::V4(address)) => {
            let host = if address.ip().is_unspecified() { "SERVER".to_owned() } else { address.ip().to_string() };
            Some(format!("mount -t 9p -o trans=tcp,port={},{rest} {host} /mnt", address.port()))
        }
        ListenAddr::Unix(socket) => Some(format!("mount -t 9p -o trans=unix,{rest} {} /mnt", socket.display())),
        _ => None,
    };
    addresses.iter().find_map(of_address)
}

/// The greatest message that is agreed on.
fn msize_max(message_bytes_max: usize) -> Result<u32, Failure> {
    match u32::try_from(message_bytes_max).map_or(MSIZE_MAX, |bytes| bytes.min(MSIZE_MAX)) {
        msize if msize >= MSIZE_MIN => Ok(msize),
        _ => {
            let what = format!("message_bytes_max is {message_bytes_max}, and a client of 9P needs {MSIZE_MIN}");
            Err(Failure::new(Status::Data, what).remedy("let it be 4k at least; the default is 1088k"))
        }
    }
}

/// Why a server does not open, with its status; the error says the remedy.
fn explain(error: OpenError) -> Failure {
    let status = match &error {
        OpenError::Export(_) => Status::NoInput,
        OpenError::Lanes(_) | OpenError::Thread(_) => Status::Os,
    };
    Failure::new(status, error.to_string())
}

/// What is kept while it serves.
struct Serving(Option<Ninep>);

impl State for Serving {
    fn counters(&self) -> Vec<Value> {
        self.0.as_ref().map(counters).unwrap_or_default()
    }

    fn stop(mut self: Box<Self>) -> io::Result<()> {
        self.0.take().map_or(Ok(()), |ninep| check_closed(ninep.close(Instant::now() + CLOSE_WITHIN)))
    }
}

/// What `ksf stat` shows of it.
fn counters(ninep: &Ninep) -> Vec<Value> {
    let mut values = Vec::new();
    for counts in ninep.messages() {
        let name = counts.name;
        let mut add =
            |what: &str, help: String, value| values.push(Value::new(&format!("{name}_{what}"), &help, value));
        add("calls", format!("Requests T{name} that were answered."), counts.calls);
        add("failed", "Of these with Rlerror.".to_owned(), counts.failed);
        add("us", "Microseconds from request to answer, of all together.".to_owned(), counts.total_us);
    }
    let FsCounters { descriptors, open_files, hits, misses, attr_hits, evicted, stale, .. } = ninep.fs_counters();
    let lanes = ninep.lane_counters();
    let more = [
        (
            "descriptors",
            "Descriptors that are kept between requests now, without those of open fids.",
            descriptors as u64,
        ),
        ("open_files", "Files and directories that fids have open now.", open_files as u64),
        ("descriptor_hits", "Requests that found a descriptor.", hits),
        ("descriptor_misses", "Requests that had to open one.", misses),
        ("attributes_known", "Tgetattrs of exclusive exports that were answered without asking the kernel.", attr_hits),
        ("descriptors_evicted", "Descriptors that were closed for others.", evicted),
        ("handles_stale", "Requests for objects that were gone.", stale),
        ("lane_jobs_queued", "Requests that wait for a thread now.", lanes.queued_jobs as u64),
        ("syncs_queued", "Requests that wait for a sync now.", lanes.queued_syncs as u64),
        ("lane_jobs_panicked", "Requests that were given up because of a defect of ksf.", lanes.panicked),
    ];
    values.extend(more.map(|(name, help, value)| Value::new(name, help, value)));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_mount_is_one_that_can_be_typed() {
        let tcp = |address: &str| ListenAddr::Tcp(address.parse().unwrap());
        let unix = ListenAddr::Unix(PathBuf::from("/run/9p.sock"));
        let rest = "version=9p2000.L,aname=/srv/a,msize=65536,access=user";
        for (addresses, wanted) in [
            (vec![tcp("127.0.0.1:5640")], Some(format!("trans=tcp,port=5640,{rest} 127.0.0.1 /mnt"))),
            (vec![tcp("[::1]:7"), tcp("0.0.0.0:7")], Some(format!("trans=tcp,port=7,{rest} SERVER /mnt"))),
            (vec![tcp("[::1]:7"), unix], Some(format!("trans=unix,{rest} /run/9p.sock /mnt"))),
            (vec![tcp("[::1]:7")], None),
        ] {
            let line = mount_line(&addresses.iter().collect::<Vec<_>>(), Path::new("/srv/a"), 65_536);
            assert_eq!(line, wanted.map(|wanted| format!("mount -t 9p -o {wanted}")));
        }
    }

    #[test]
    fn messages_are_those_that_the_limits_let_through() {
        for (message_bytes_max, wanted) in
            [(Limits::default().message_bytes_max, MSIZE_MAX), (usize::MAX, MSIZE_MAX), (64 << 10, 64 << 10)]
        {
            assert_eq!(msize_max(message_bytes_max).unwrap(), wanted);
        }
        assert_eq!(msize_max(4095).unwrap_err().status, Status::Data);
    }
}
