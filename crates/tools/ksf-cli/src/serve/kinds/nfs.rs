//! An NFSv3 server: `kind = "nfs"`, `ksf nfs`.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_fs::{Export, FsOptions, HandleSource};
use ksf_nfs::drc::DrcLimits;
use ksf_nfs::{ClientCounts, NFS_PROGRAM, Nfs, Settings, TRANSFER_BYTES_MAX, transfer_bytes_max};
use ksf_services::rpc::rpcbind::Registration;
use serde::Deserialize;

use super::export::{self, FileServer, explain};
use super::rpc::register;
use super::status::{Protocol, StatusArgs};
use crate::output::{Failure, Status};
use crate::serve::args::{ProcessArgs, ServerArgs};
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::limits::help_of;
use crate::serve::running::{Running, State};
use crate::stats::{ClientSnapshot, Value};
use crate::toml_file::{Mistake, Table};

/// Default port of NFS.
const PORT: u16 = 2049;

/// NFSv3 server: folders that clients mount
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, mut_args(help_of(limits())))]
pub(crate) struct NfsArgs {
    #[command(subcommand)]
    pub(crate) tool: Option<NfsTool>,
    #[command(flatten)]
    files: FileServer,
    /// Register with the rpcbind of this machine, and unregister at the end: for clients that cannot be told a port
    #[arg(long)]
    rpcbind: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

/// Subcommands of `ksf nfs`.
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
        let Self { tool: _, files, rpcbind, server, process } = self;
        Single::new("nfs", NfsServer { files, rpcbind }, server, process)
    }
}

/// Keys of an NFS server in the table of a service.
#[derive(Debug, Deserialize)]
struct NfsTable {
    /// Register with rpcbind.
    #[serde(default)]
    rpcbind: bool,
}

/// The NFS server.
#[derive(Debug)]
pub(crate) struct NfsServer {
    files: FileServer,
    rpcbind: bool,
}

impl ServiceKind for NfsServer {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let NfsTable { rpcbind } = table.take()?;
        Ok(NfsServer { files: FileServer::read(table)?, rpcbind })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn limits(&self) -> Limits {
        limits()
    }

    fn descriptors_max(&self, _: &Limits) -> usize {
        FsOptions::default().open_wanted(false)
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        launch.listener_limits()?.iter().try_for_each(check)?;
        let files = self.files.settings("nfs", true, launch.descriptors_max())?;
        let settings = Settings { files, drc: DrcLimits::default(), transfer_bytes_max: TRANSFER_BYTES_MAX };
        let nfs = Nfs::open(settings).map_err(explain)?;
        let service = nfs.service(launch.name()).map_err(|error| Failure::new(Status::Internal, error.to_string()))?;
        let programs = service.programs().clone();
        let mut running = launch.serve_on_shards(Arc::new(service))?.start(())?;
        let registration =
            self.rpcbind.then(|| register(&programs, running.listeners(), &[NFS_PROGRAM])).transpose()?;
        let address = running.listeners().iter().find_map(|listener| match &listener.addr {
            ListenAddr::Tcp(address) => Some(*address),
            _ => None,
        });
        let more = |export: &Export| {
            let forgets = match export.handles() {
                HandleSource::Kernel => "",
                HandleSource::Table => " handles=until the server ends",
            };
            let mount = address.map(|address| format!("; to mount it: {}", mount_line(address, export.path())));
            format!("{forgets}{}", mount.unwrap_or_default())
        };
        self.files.tell(&mut running, nfs.exports(), nfs.files().identities(), more);
        Ok(running.keep_sizes().with_state(Serving { nfs: Some(nfs), registration }))
    }
}

/// Default limits of an NFS server.
fn limits() -> Limits {
    // Room for several concurrent READs and WRITEs of 1 MiB.
    Limits { connection_bytes_max: 16 << 20, ..Limits::default() }
}

/// Mount command of an export.
fn mount_line(address: SocketAddr, path: &Path) -> String {
    // mount.nfs takes `tcp` for IPv4 alone (nfs(5)).
    let (tcp, protocol) = if address.is_ipv4() { ("tcp", "tcp") } else { ("proto=tcp6", "tcp6") };
    let host = match address {
        _ if address.ip().is_unspecified() => "SERVER".to_owned(),
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    };
    let port = address.port();
    format!(
        "mount -t nfs -o vers=3,{tcp},nolock,port={port},mountport={port},mountproto={protocol} {host}:{} /mnt",
        path.display()
    )
}

/// Refuses limits of a listener without room for the data of a WRITE.
fn check(limits: &Limits) -> Result<(), Failure> {
    if transfer_bytes_max(limits) > 0 {
        return Ok(());
    }
    let Limits { message_bytes_max, connection_bytes_max, .. } = limits;
    let what = format!(
        "message_bytes_max is {message_bytes_max} and connection_bytes_max {connection_bytes_max}, which leaves no room for the \
         data of a WRITE"
    );
    Err(Failure::new(Status::Data, what).remedy("let both be 8k at least; the defaults are 1088k and 16m"))
}

/// State of a running NFS server.
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
        self.nfs.take().map_or(Ok(()), |nfs| export::close(nfs.files()))
    }
}

/// Clients, as `ksf nfs status` shows them.
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

/// Counters, as `ksf stat` shows them.
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
    let (fs, drc) = (nfs.files().fs_counters(), nfs.drc_sizes());
    let more = [
        (
            "mounts",
            "Mounts that clients told of and did not take back, in a list of at most 1,024.",
            nfs.mounts() as u64,
        ),
        ("uncommitted_files", "Files with data that no client has committed yet.", fs.uncommitted_files as u64),
        ("settled", "Times that names or attributes were brought to the medium before an answer.", fs.settled),
        ("write_back_failures", "Times that data could not be brought to the medium.", fs.write_back_failures),
        ("duplicates_kept", "Replies that are kept for a second try now, and requests under way.", drc.entries as u64),
        ("duplicates_kept_bytes", "Memory that these take.", drc.bytes as u64),
    ];
    values.extend(more.map(|(name, help, value)| Value::new(name, help, value)));
    values.extend(export::counters(nfs.files()));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_mount_is_one_that_can_be_typed() {
        for (address, wanted) in [
            ("127.0.0.1:2049", "tcp,nolock,port=2049,mountport=2049,mountproto=tcp 127.0.0.1"),
            ("0.0.0.0:7", "tcp,nolock,port=7,mountport=7,mountproto=tcp SERVER"),
            ("[::1]:7", "proto=tcp6,nolock,port=7,mountport=7,mountproto=tcp6 [::1]"),
            ("[::]:7", "proto=tcp6,nolock,port=7,mountport=7,mountproto=tcp6 SERVER"),
        ] {
            let line = mount_line(address.parse().unwrap(), Path::new("/srv/a"));
            assert_eq!(line, format!("mount -t nfs -o vers=3,{wanted}:/srv/a /mnt"));
        }
    }

    #[test]
    fn reads_and_writes_fit_into_messages_and_connections() {
        let of =
            |message_bytes_max, connection_bytes_max| Limits { message_bytes_max, connection_bytes_max, ..limits() };
        for (limits, wanted) in [
            (limits(), TRANSFER_BYTES_MAX),
            (of(usize::MAX, usize::MAX), TRANSFER_BYTES_MAX),
            (of(64 << 10, usize::MAX), 60 << 10),
            (of(usize::MAX, 64 << 10), 60 << 10),
            (of(8 << 10, 8 << 10), 4 << 10),
        ] {
            assert_eq!(transfer_bytes_max(&limits), wanted);
            check(&limits).unwrap();
        }
        for limits in [of(4096, usize::MAX), of(usize::MAX, 4096)] {
            assert_eq!(check(&limits).unwrap_err().status, Status::Data);
        }
    }
}
