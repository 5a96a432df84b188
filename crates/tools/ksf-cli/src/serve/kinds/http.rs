//! HTTP/1: one page for every request, or a proxy: `kind = "http"`, `ksf serve demo`.

mod report;

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueHint};
use ksf::cpus::CpuSet;
use ksf::limits::Limits;
use ksf_services::http::{Counts, PageServer, Proxy};
use serde::Deserialize;

use self::report::Report;
use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::serve::args::{ProcessArgs, ServerArgs, SpinArgs};
use crate::serve::engine::EngineWish;
use crate::serve::kind::{Reporter, ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::limits::help_of;
use crate::serve::listen::ListenEntry;
use crate::serve::running::{Running, State};
use crate::serve::workers::WorkersTable;
use crate::toml_file::{Mistake, Table};

/// Port of the demo server. The original had 80, which needs rights.
const PORT: u16 = 8080;

/// Length of the page where nothing is said.
const BODY_BYTES: u64 = 64;
const BODY_BYTES_MAX: u64 = 64 << 20;

/// HTTP server that answers every request with one page, or asks backends; with the flags of Fastsocket's demo server
#[derive(Debug, Args)]
#[command(mut_args(help_of(limits())))]
pub(crate) struct DemoArgs {
    /// Workers, each pinned to a CPU of its own [default: one per CPU of the process, from --start-core on]
    #[arg(short, long, value_name = "N", value_parser = number::<1, 1024>)]
    workers: Option<u64>,
    /// Smallest CPU of a worker; the workers have the first CPUs of the process from this one on
    #[arg(short = 'c', long, value_name = "CPU", default_value_t = 0)]
    start_core: usize,
    /// Address to listen on; repeatable [default: loopback, IPv4 and IPv6, port 8080]
    ///
    /// ADDR:PORT, [ADDR6]:PORT, unix:/PATH, systemd or systemd:NAME, and behind it limits that hold there instead of those of
    /// the server, as in 0.0.0.0:8080,idle_timeout_ms=5000.
    #[arg(short, long, alias = "listen", value_name = "ADDR:PORT")]
    addr: Vec<ListenEntry>,
    /// Ask this backend instead of answering; repeatable: they take turns
    #[arg(short = 'x', long, value_name = "ADDR:PORT", conflicts_with = "body_bytes")]
    backend: Vec<SocketAddr>,
    /// Answer more than one request on a connection, from the server and through the proxy
    #[arg(short, long)]
    keep_alive: bool,
    /// Length of the page
    #[arg(long, value_name = "BYTES", default_value_t = BODY_BYTES, value_parser = number::<0, BODY_BYTES_MAX>)]
    body_bytes: u64,
    /// Write statistics to this file every second; with -v those of every worker, which otherwise go to stderr
    #[arg(short = 'o', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    log: Option<PathBuf>,
    /// Not offered: a service manager does it better
    #[arg(short, long, hide = true)]
    daemon: bool,
    /// What moves the bytes
    #[arg(short, long, value_enum, value_name = "ENGINE", default_value_t)]
    engine: EngineWish,
    #[command(flatten)]
    spin: SpinArgs,
    /// File of limits in TOML, read again on SIGHUP; flags win over it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config_limits: Option<PathBuf>,
    #[command(flatten)]
    process: ProcessArgs,
}

/// The limits of an HTTP server where nothing is said.
fn limits() -> Limits {
    // Cookies are long, and browsers keep connections for ever.
    Limits { header_bytes_max: 8 << 10, idle_timeout_ms: 60_000, ..Limits::default() }
}

impl DemoArgs {
    pub(crate) fn single(self) -> Result<Single<Http>, Failure> {
        if self.daemon {
            return Err(Failure::new(Status::Usage, "ksf does not go to the background by itself: -d is not offered")
                .remedy("let the service manager do it: systemd-run --unit=ksf-demo ksf serve demo ..., or a unit"));
        }
        let server = ServerArgs {
            listen: self.addr,
            engine: self.engine,
            cpus: Some(cpus(self.start_core, self.workers)?),
            spin: self.spin,
            config_limits: self.config_limits,
        };
        let http = Http { backends: self.backend, keep_alive: self.keep_alive, body_bytes: self.body_bytes as usize };
        let every_shard = self.process.loudness.verbose > 0;
        let log = self.log.as_deref().map(open_log).transpose()?;
        let reporter = (every_shard || log.is_some())
            .then(|| -> Reporter { Box::new(move |read| Report { log, every_shard }.start(read)) });
        Ok(Single { reporter, ..Single::new("demo", http, server, self.process) })
    }
}

/// One CPU per worker: of those that the process may use, the first ones from `start` on.
fn cpus(start: usize, workers: Option<u64>) -> Result<CpuSet, Failure> {
    let allowed = CpuSet::of_thread(None).map_err(|error| Failure::os("cannot read the CPU mask", &error))?;
    let count = workers.map_or(usize::MAX, |workers| workers as usize);
    let cpus: CpuSet = allowed.iter().filter(|cpu| *cpu >= start).take(count).collect();
    // Nothing is left: the wish as it is, for the message.
    Ok(if cpus.is_empty() { [start].into_iter().collect() } else { cpus })
}

fn open_log(path: &Path) -> Result<File, Failure> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|error| Failure::os(format!("cannot write statistics to {}", path.display()), &error))
}

/// What the table of a service says of HTTP.
#[derive(Debug, Deserialize)]
struct HttpTable {
    /// Whom to ask, in turn; it answers itself if there is nobody.
    #[serde(default)]
    backends: Vec<SocketAddr>,
    /// Whether a connection carries more than one request.
    #[serde(default)]
    keep_alive: bool,
    /// Length of the page.
    body_bytes: Option<Number<0, BODY_BYTES_MAX>>,
}

/// The HTTP service.
#[derive(Debug)]
pub(crate) struct Http {
    backends: Vec<SocketAddr>,
    keep_alive: bool,
    body_bytes: usize,
}

impl ServiceKind for Http {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let HttpTable { backends, keep_alive, body_bytes } = table.take()?;
        if body_bytes.is_some() && !backends.is_empty() {
            return Err(table.mistake("body_bytes is the length of the page; a service with backends has none"));
        }
        let body_bytes = body_bytes.map_or(BODY_BYTES, |number| number.0) as usize;
        Ok(Http { backends, keep_alive, body_bytes })
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

    fn descriptors_max(&self, limits: &Limits) -> usize {
        // One to a backend for each connection.
        if self.backends.is_empty() { 0 } else { limits.connections_max }
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let shards = launch.shards();
        // A system call for each connection: what the demo server is there to show.
        let launch = launch.with_locality();
        let shards_only = WorkersTable::default();
        if self.backends.is_empty() {
            let service = Arc::new(PageServer::new(self.body_bytes, self.keep_alive, shards));
            let counts = Counted(Arc::clone(service.counts()));
            launch.serve(service, &shards_only)?.start(counts)
        } else {
            let service = Arc::new(Proxy::new(self.backends.clone(), self.keep_alive, shards));
            let counts = Counted(Arc::clone(service.counts()));
            launch.serve(service, &shards_only)?.start(counts)
        }
    }
}

/// What each shard counts.
struct Counted(Arc<Counts>);

impl State for Counted {
    fn shard_counters(&self) -> Vec<Vec<(&'static str, u64)>> {
        self.0.workers().iter().map(|shard| shard.read()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_have_the_cpus_from_the_first_one_on() {
        let allowed = CpuSet::of_thread(None).unwrap();
        let last = allowed.iter().last().unwrap();
        assert_eq!(cpus(0, None).unwrap(), allowed);
        assert_eq!(cpus(0, Some(1)).unwrap(), allowed.iter().take(1).collect());
        assert_eq!(cpus(last, Some(3)).unwrap(), [last].into_iter().collect());
        assert_eq!(cpus(9999, None).unwrap().to_string(), "9999");
        assert_eq!(cpus(9999, Some(3)).unwrap().to_string(), "9999");
    }
}
