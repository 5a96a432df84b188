//! A 9P2000.L server: `kind = "9p"`, `ksf 9p`.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_fs::{Export, FsOptions};
use ksf_ninep::{FIDS_MAX, MSIZE_MAX, MSIZE_MIN, Ninep, Settings, msize_max};
use serde::Deserialize;

use super::export::{self, FileServer, explain};
use super::status::{Protocol, StatusArgs};
use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::serve::args::{ProcessArgs, ServerArgs};
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::limits::help_of;
use crate::serve::running::{Running, State};
use crate::stats::Value;
use crate::toml_file::{Mistake, Table};

/// Port that needs no privilege, as in examples of diod; that of 9P is 564.
const PORT: u16 = 5640;

/// Most fids that one connection may be given.
const FIDS_LIMIT: u64 = 1 << 20;

/// 9P2000.L server: folders that Linux mounts
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, mut_args(help_of(limits())))]
pub(crate) struct NinepArgs {
    #[command(subcommand)]
    pub(crate) tool: Option<NinepTool>,
    #[command(flatten)]
    files: FileServer,
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
        let Self { tool: _, files, fids_max, server, process } = self;
        Single::new("9p", NinepServer { files, fids_max }, server, process)
    }
}

/// What the table of a service says of a 9P server alone.
#[derive(Debug, Deserialize)]
struct NinepTable {
    /// Fids of one connection.
    fids_max: Option<Number<16, FIDS_LIMIT>>,
}

/// The 9P server.
#[derive(Debug)]
pub(crate) struct NinepServer {
    files: FileServer,
    fids_max: u64,
}

impl ServiceKind for NinepServer {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let NinepTable { fids_max } = table.take()?;
        let fids_max = fids_max.map_or(FIDS_MAX as u64, |number| number.0);
        Ok(NinepServer { files: FileServer::read(table)?, fids_max })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn has_datagrams(&self) -> bool {
        false
    }

    fn limits(&self) -> Limits {
        limits()
    }

    fn descriptors_max(&self, _: &Limits) -> usize {
        FsOptions::default().open_wanted(true)
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        launch.listener_limits()?.iter().try_for_each(check)?;
        let files = self.files.settings("9p", false, launch.descriptors_max())?;
        let settings = Settings { files, msize_max: MSIZE_MAX, fids_max: self.fids_max as usize };
        let msize = msize_max(launch.limits());
        let ninep = Ninep::open(settings).map_err(explain)?;
        let service = ninep.service(launch.name());
        let mut running = launch.serve_on_shards(Arc::new(service))?.start(())?;
        let addresses: Vec<ListenAddr> = running.listeners().iter().map(|listener| listener.addr.clone()).collect();
        let more = |export: &Export| {
            let line = mount_line(&addresses, export.path(), msize);
            line.map(|line| format!("; to mount it: {line}")).unwrap_or_default()
        };
        self.files.tell(&mut running, ninep.exports(), ninep.files().identities(), more);
        Ok(running.keep_sizes().with_state(Serving(Some(ninep))))
    }
}

/// The limits of a 9P server where nothing is said.
fn limits() -> Limits {
    // Several reads and writes of 1 MiB at a time.
    Limits { connection_bytes_max: 16 << 20, ..Limits::default() }
}

/// What a client types. Linux before 6.16 mounts by IPv4 and by Unix sockets only.
fn mount_line(addresses: &[ListenAddr], path: &Path, msize: u32) -> Option<String> {
    let rest = format!("version=9p2000.L,aname={},msize={msize},access=user", path.display());
    let of_address = |address: &ListenAddr| match address {
        ListenAddr::Tcp(SocketAddr::V4(address)) => {
            let host = if address.ip().is_unspecified() { "SERVER".to_owned() } else { address.ip().to_string() };
            Some(format!("mount -t 9p -o trans=tcp,port={},{rest} {host} /mnt", address.port()))
        }
        ListenAddr::Unix(socket) => Some(format!("mount -t 9p -o trans=unix,{rest} {} /mnt", socket.display())),
        _ => None,
    };
    addresses.iter().find_map(of_address)
}

/// Refuses limits of a listener that are too low for clients.
fn check(limits: &Limits) -> Result<(), Failure> {
    if msize_max(limits) >= MSIZE_MIN {
        return Ok(());
    }
    let Limits { message_bytes_max, connection_bytes_max, .. } = limits;
    let what = format!(
        "message_bytes_max is {message_bytes_max} and connection_bytes_max {connection_bytes_max}, and a client of 9P needs {MSIZE_MIN}"
    );
    Err(Failure::new(Status::Data, what).remedy("let both be 4k at least; the defaults are 1088k and 16m"))
}

/// What is kept while it serves.
struct Serving(Option<Ninep>);

impl State for Serving {
    fn counters(&self) -> Vec<Value> {
        self.0.as_ref().map(counters).unwrap_or_default()
    }

    fn stop(mut self: Box<Self>) -> io::Result<()> {
        self.0.take().map_or(Ok(()), |ninep| export::close(ninep.files()))
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
    let open = ninep.files().fs_counters().open_files as u64;
    values.push(Value::new("open_files", "Files and directories that fids have open now.", open));
    values.extend(export::counters(ninep.files()));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_mount_is_one_that_can_be_typed() {
        let tcp = |address: &str| ListenAddr::Tcp(address.parse().unwrap());
        let unix = ListenAddr::Unix("/run/9p.sock".into());
        let rest = "version=9p2000.L,aname=/srv/a,msize=65536,access=user";
        for (addresses, wanted) in [
            (vec![tcp("127.0.0.1:5640")], Some(format!("trans=tcp,port=5640,{rest} 127.0.0.1 /mnt"))),
            (vec![tcp("[::1]:7"), tcp("0.0.0.0:7")], Some(format!("trans=tcp,port=7,{rest} SERVER /mnt"))),
            (vec![tcp("[::1]:7"), unix], Some(format!("trans=unix,{rest} /run/9p.sock /mnt"))),
            (vec![tcp("[::1]:7")], None),
        ] {
            let line = mount_line(&addresses, Path::new("/srv/a"), 65_536);
            assert_eq!(line, wanted.map(|wanted| format!("mount -t 9p -o {wanted}")));
        }
    }

    #[test]
    fn messages_are_those_that_the_limits_let_through() {
        let of =
            |message_bytes_max, connection_bytes_max| Limits { message_bytes_max, connection_bytes_max, ..limits() };
        for (limits, wanted) in [
            (limits(), MSIZE_MAX),
            (of(usize::MAX, usize::MAX), MSIZE_MAX),
            (of(64 << 10, usize::MAX), 64 << 10),
            (of(usize::MAX, 64 << 10), 64 << 10),
        ] {
            assert_eq!(msize_max(&limits), wanted);
            check(&limits).unwrap();
        }
        for limits in [of(4095, usize::MAX), of(usize::MAX, 4095)] {
            assert_eq!(check(&limits).unwrap_err().status, Status::Data);
        }
    }
}
