//! An NFSv3 server: `kind = "nfs"`, `ksf nfs`.

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
use ksf_fs::{FsCounters, FsOptions, HandleSource, Identities, LaneOptions};
use ksf_nfs::drc::DrcLimits;
use ksf_nfs::{ClientCounts, NFS_PROGRAM, Nfs, OpenError, Settings, TRANSFER_BYTES_MAX};
use ksf_services::rpc::rpcbind::Registration;
use serde::Deserialize;

use super::export::{CLOSE_WITHIN, ExportSpec, LANES, LANES_MAX, check_closed, default_state, own_identity_note};
use super::rpc::register;
use super::status::{Protocol, StatusArgs};
use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::serve::args::{ProcessArgs, ServerArgs};
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::running::{Running, State};
use crate::stats::{ClientSnapshot, Value};
use crate::toml_file::{Mistake, Table};

/// Port of NFS.
const PORT: u16 = 2049;

/// What a message has besides the data of a WRITE, at most: headers, credential, handle.
const AROUND_DATA_BYTES: usize = 2048;

/// NFSv3 server: folders that clients mount
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct NfsArgs {
    #[command(subcommand)]
    pub(crate) tool: Option<NfsTool>,
    /// Folder to export, with options behind commas; repeatable
    ///
    /// ro: nothing can be changed. clients=CIDR: only these clients, repeatable. squash=root|all|none: whose requests are those
    /// of the anonymous user [default: root]. anon=UID:GID: that user [default: 65534:65534]. manage-gids: groups are looked up
    /// here, because a request has at most 16. names=async: changes of names and attributes are answered before they are on the
    /// medium. secure: only from ports below 1024. exclusive: nothing but this server changes the folder, so attributes are kept.
    #[arg(long = "export", value_name = "DIR[,OPTION...]", required = true)]
    exports: Vec<ExportSpec>,
    /// Folder of the keys that handles are verified with; clients that have mounted need them after a restart
    /// [default: /var/lib/ksf/nfs; without root ksf/nfs below $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    state: Option<PathBuf>,
    /// Threads that carry requests out; more than CPUs, because they wait for disks
    #[arg(long, value_name = "N", default_value = "16", value_parser = number::<1, LANES_MAX>)]
    lanes: u64,
    /// Register with the rpcbind of this machine, and unregister at the end: for clients that cannot be told a port
    #[arg(long)]
    rpcbind: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

/// What can be done with an NFS server beside serving.
#[derive(Debug, Subcommand)]
pub(crate) enum NfsTool {
    /// Show what a running NFS server has answered, of each procedure and each client
    Status(StatusArgs),
}

impl NfsTool {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        let Self::Status(args) = self;
        args.run(Protocol::Nfs)
    }
}

impl NfsArgs {
    pub(crate) fn single(self) -> Single<NfsServer> {
        let Self { tool: _, exports, state, lanes, rpcbind, server, process } = self;
        let nfs = NfsServer { exports, folder: PathBuf::new(), state, lanes, rpcbind };
        Single::new("nfs", nfs, server, process)
    }
}

/// What the table of a service says of an NFS server.
#[derive(Debug, Deserialize)]
struct NfsTable {
    /// Folders with their options, relative to the file.
    exports: Vec<ExportSpec>,
    /// Folder of keys, relative to the file.
    state: Option<PathBuf>,
    /// Threads.
    lanes: Option<Number<1, LANES_MAX>>,
    /// Whether to register with rpcbind.
    #[serde(default)]
    rpcbind: bool,
}

/// The NFS server.
#[derive(Debug)]
pub(crate) struct NfsServer {
    exports: Vec<ExportSpec>,
    /// Where relative paths begin.
    folder: PathBuf,
    state: Option<PathBuf>,
    lanes: u64,
    rpcbind: bool,
}

impl ServiceKind for NfsServer {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let NfsTable { exports, state, lanes, rpcbind } = table.take()?;
        if exports.is_empty() {
            return Err(table.mistake("exports has no folder; write exports = [\"/srv/data\"]"));
        }
        let folder = table.folder().to_owned();
        let state = state.map(|state| folder.join(state));
        Ok(NfsServer { exports, folder, state, lanes: lanes.map_or(LANES, |number| number.0), rpcbind })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn limits(&self) -> Limits {
        // Several READs and WRITEs of 1 MiB at a time.
        Limits { connection_bytes_max: 16 << 20, ..Limits::default() }
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let state = self.state.clone().map_or_else(|| default_state("nfs"), Ok)?;
        let message_bytes_max = launch.limits().message_bytes_max;
        let settings = Settings {
            exports: self.exports.iter().map(|spec| spec.settings(&self.folder, true)).collect(),
            state,
            lanes: LaneOptions { threads: self.lanes as usize },
            fs: FsOptions::default(),
            drc: DrcLimits::default(),
            transfer_bytes_max: transfer_bytes_max(message_bytes_max)?,
        };
        let nfs = Nfs::open(settings).map_err(explain)?;
        let service = nfs.service(launch.name()).map_err(|error| Failure::new(Status::Internal, error.to_string()))?;
        let programs = service.programs().clone();
        let mut running = launch.serve_on_shards(Arc::new(service))?.start(())?;
        let registration =
            self.rpcbind.then(|| register(&programs, running.listeners(), &[NFS_PROGRAM])).transpose()?;
        let lines = self.lines(&running.name, &nfs, running.listeners());
        running.ready.splice(0..0, lines);
        if nfs.identities() == Identities::Own {
            running.notes.push(own_identity_note(&running.name));
        }
        Ok(running.with_state(Serving { nfs: Some(nfs), registration }))
    }
}

impl NfsServer {
    /// A line for each export: how it is served, and how it is mounted.
    fn lines(&self, name: &str, nfs: &Nfs, listeners: &[ListenerInfo]) -> Vec<String> {
        let address = listeners.iter().find_map(|listener| match &listener.addr {
            ListenAddr::Tcp(address) => Some(*address),
            _ => None,
        });
        let line = |(export, spec): (ksf_nfs::ExportInfo<'_>, &ExportSpec)| {
            let path = export.path.display();
            let mount = address.map(|address| format!("; to mount it: {}", mount_line(address, export.path)));
            let forgets = match export.handles {
                HandleSource::Kernel => "",
                HandleSource::Table => " handles=until the server ends",
            };
            format!("{name}: export {path} {}{forgets}{}", spec.words(), mount.unwrap_or_default())
        };
        nfs.exports().zip(&self.exports).map(line).collect()
    }
}

/// What a client types.
fn mount_line(address: SocketAddr, path: &Path) -> String {
    let host = match address {
        _ if address.ip().is_unspecified() => "SERVER".to_owned(),
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    };
    let port = address.port();
    format!("mount -t nfs -o vers=3,tcp,nolock,port={port},mountport={port} {host}:{} /mnt", path.display())
}

/// The greatest READ and WRITE that fit into messages.
fn transfer_bytes_max(message_bytes_max: usize) -> Result<u32, Failure> {
    let room = message_bytes_max.saturating_sub(AROUND_DATA_BYTES) / 4096 * 4096;
    if room == 0 {
        let what = format!("message_bytes_max is {message_bytes_max}, which leaves no room for the data of a WRITE");
        return Err(Failure::new(Status::Data, what).remedy("let it be 8k at least; the default is 1088k"));
    }
    Ok(u32::try_from(room).map_or(TRANSFER_BYTES_MAX, |room| room.min(TRANSFER_BYTES_MAX)))
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
struct Serving {
    nfs: Option<Nfs>,
    registration: Option<Registration>,
}

impl State for Serving {
    fn counters(&self) -> Vec<Value> {
        self.nfs.as_ref().map(counters).unwrap_or_default()
    }

    fn clients(&self) -> Vec<ClientSnapshot> {
        self.nfs.as_ref().map(clients).unwrap_or_default()
    }

    fn retire(&mut self) {
        self.registration = None;
    }

    fn stop(mut self: Box<Self>) -> io::Result<()> {
        let Some(nfs) = self.nfs.take() else { return Ok(()) };
        check_closed(nfs.close(Instant::now() + CLOSE_WITHIN))
    }
}

/// What `ksf nfs status` shows of its clients.
fn clients(nfs: &Nfs) -> Vec<ClientSnapshot> {
    let client = |counts: ClientCounts| ClientSnapshot {
        address: counts.client.to_string(),
        connections: counts.connections,
        mounts: counts.mounts,
        calls: counts.calls,
        read_bytes: counts.read_bytes,
        written_bytes: counts.written_bytes,
    };
    nfs.clients().into_iter().map(client).collect()
}

/// What `ksf stat` shows of it.
fn counters(nfs: &Nfs) -> Vec<Value> {
    let mut values = Vec::new();
    for counts in nfs.procedures() {
        let name = counts.procedure.name();
        let mut add =
            |what: &str, help: String, value| values.push(Value::new(&format!("{name}_{what}"), &help, value));
        add("calls", format!("Calls of {} that were answered.", name.to_uppercase()), counts.calls);
        add("failed", "Of these with another status than OK.".to_owned(), counts.failed);
        add("us", "Microseconds from call to answer, of all together.".to_owned(), counts.total_us);
        if counts.procedure.changes() {
            add("replayed", "Of these with the reply to an earlier try.".to_owned(), counts.replayed);
        }
    }
    let FsCounters {
        descriptors,
        open_files: _,
        hits,
        misses,
        attr_hits,
        evicted,
        stale,
        uncommitted_files,
        settled,
        write_back_failures,
    } = nfs.fs_counters();
    let lanes = nfs.lane_counters();
    let drc = nfs.drc_sizes();
    let more = [
        (
            "mounts",
            "Mounts that clients told of and did not take back, in a list of at most 1,024.",
            nfs.mounts() as u64,
        ),
        ("descriptors", "Descriptors of files that are kept open now.", descriptors as u64),
        ("descriptor_hits", "Requests that found a descriptor.", hits),
        ("descriptor_misses", "Requests that had to open one.", misses),
        ("attributes_known", "GETATTRs of exclusive exports that were answered without asking the kernel.", attr_hits),
        ("descriptors_evicted", "Descriptors that were closed for others.", evicted),
        ("handles_stale", "Handles of objects that were gone.", stale),
        ("uncommitted_files", "Files with data that no client has committed yet.", uncommitted_files as u64),
        ("settled", "Times that names or attributes were brought to the medium before an answer.", settled),
        ("write_back_failures", "Times that data could not be brought to the medium.", write_back_failures),
        ("lane_jobs_queued", "Requests that wait for a thread now.", lanes.queued_jobs as u64),
        ("syncs_queued", "Requests that wait for a sync now.", lanes.queued_syncs as u64),
        ("lane_jobs_panicked", "Requests that were given up because of a defect of ksf.", lanes.panicked),
        ("duplicates_kept", "Replies that are kept for a second try now, and requests under way.", drc.entries as u64),
        ("duplicates_kept_bytes", "Memory that these take.", drc.bytes as u64),
    ];
    values.extend(more.map(|(name, help, value)| Value::new(name, help, value)));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_mount_is_one_that_can_be_typed() {
        for (address, wanted) in [
            ("127.0.0.1:2049", "port=2049,mountport=2049 127.0.0.1:/srv/a /mnt"),
            ("[::1]:7", "port=7,mountport=7 [::1]:/srv/a /mnt"),
            ("0.0.0.0:7", "port=7,mountport=7 SERVER:/srv/a /mnt"),
        ] {
            let line = mount_line(address.parse().unwrap(), Path::new("/srv/a"));
            assert_eq!(line, format!("mount -t nfs -o vers=3,tcp,nolock,{wanted}"));
        }
    }

    #[test]
    fn reads_and_writes_fit_into_messages() {
        for (message_bytes_max, wanted) in [
            (Limits::default().message_bytes_max, TRANSFER_BYTES_MAX),
            (usize::MAX, TRANSFER_BYTES_MAX),
            (64 << 10, 60 << 10),
            (8 << 10, 4 << 10),
        ] {
            assert_eq!(transfer_bytes_max(message_bytes_max).unwrap(), wanted);
        }
        assert_eq!(transfer_bytes_max(4096).unwrap_err().status, Status::Data);
    }
}
