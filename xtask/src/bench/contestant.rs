//! Who is measured: the engines of ksf and their peers, and how each is started.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::case::{Case, ECHO_BYTES, FileLoad, Placement, Row, Service, WorkLoad};
use crate::process::{Ready, Server, display, output};

/// nfs-ganesha's port of MOUNT. It runs in the bench's own network only, and one at a time.
pub(super) const GANESHA_MOUNT_PORT: u16 = 20_048;

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// What only root may do.
pub(super) const ROOT: &str = "root";

/// All contestants: what each is called, and which programs of Debian, and rights, it needs.
macro_rules! contestants {
    ($($(#[$doc:meta])* $name:ident = $label:literal $(needs $($needed:expr),+)?;)+) => {
        /// One server of the comparison.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum Contestant {
            $($(#[$doc])* $name,)+
        }

        impl Contestant {
            fn label(self) -> &'static str {
                match self {
                    $(Contestant::$name => $label,)+
                }
            }

            /// Programs that must be installed, and [`ROOT`].
            pub(super) fn needs(self) -> &'static [&'static str] {
                match self {
                    $(Contestant::$name => &[$($($needed),+)?],)+
                }
            }
        }
    };
}

contestants! {
    /// `ksf --engine kernel`; over UDP that is XDP.
    Kernel = "ksf kernel" needs ROOT;
    /// `ksf --engine uring`.
    Uring = "ksf uring";
    /// `ksf --engine epoll`.
    Epoll = "ksf epoll";
    /// bench/peers/threads.c.
    Threads = "threads";
    /// The same, which looks for 100 us before it sleeps. Only with a CPU of its own.
    ThreadsSpin = "threads spin";
    /// bench/peers/event_loop.c: one loop of epoll, without a thread for each connection.
    EventLoop = "event loop";
    /// bench/peers/udp_plain.c.
    UdpPlain = "recvfrom";
    /// bench/peers/udp_mmsg.c.
    UdpMmsg = "recvmmsg";
    /// The same, which looks for 100 us before it sleeps. Only with a CPU of its own.
    UdpMmsgSpin = "recvmmsg spin";
    /// bench/peers/pair_floor.c: no server, the least that a round trip through the stack takes.
    PairFloor = "stack floor";
    /// bench/peers/pread_send.c: no protocol, the least that a READ out of the page cache takes.
    PreadSend = "pread+send";
    /// nfs-ganesha of Debian.
    Ganesha = "nfs-ganesha" needs ROOT, "ganesha.nfsd", "rpcbind";
    /// The same with what ganesha-core-config(8) offers against work beside the calls.
    GaneshaTuned = "nfs-ganesha tuned" needs ROOT, "ganesha.nfsd", "rpcbind";
    /// `ksf nfs`, as it comes.
    Nfs = "ksf nfs" needs ROOT;
    /// `ksf 9p`, as it comes.
    Ninep = "ksf 9p" needs ROOT;
    /// diod of Debian, as it comes, without authentication.
    Diod = "diod" needs ROOT, "diod";
    /// sockperf of Debian, server and client.
    Sockperf = "sockperf" needs "sockperf";
    /// The same, whose server and client never sleep (`--nonblocked`, `--timeout 0`). Only with a CPU of its own.
    SockperfTuned = "sockperf spin" needs "sockperf";
    /// bench/peers/work_server.c, a thread per connection.
    WorkThreads = "thread/conn.";
    /// bench/peers/work_server.c, a loop per thread, connections pinned to loops.
    WorkLoops = "pinned loops";
    /// `ksf serve` with two workers.
    Workers2 = "ksf 2 workers";
    /// `ksf serve` with four workers.
    Workers4 = "ksf 4 workers";
    /// bench/peers/work_server.c, two workers on AF_KCM. Only in the VM.
    KernelWorkers2 = "AF_KCM 2 workers";
    /// bench/peers/work_server.c, four workers on AF_KCM. Only in the VM.
    KernelWorkers4 = "AF_KCM 4 workers";
    /// No server: one queue before four workers, simulated by worktest with the same messages.
    IdealQueue = "ideal queue";
    /// nginx of Debian, whose workers take turns to wait for one listener (`accept_mutex on`).
    NginxMutex = "nginx mutex" needs "nginx";
    /// nginx whose workers all wait for one listener with EPOLLEXCLUSIVE: its default.
    NginxExclusive = "nginx" needs "nginx";
    /// nginx with a listener for each worker (`reuseport`).
    NginxReuseport = "nginx reuseport" needs "nginx";
    /// The same, which is told of a connection with its first bytes and takes all there are (`deferred`, `multi_accept on`).
    NginxTuned = "nginx tuned" needs "nginx";
    /// The nginx of [`Contestant::NginxExclusive`] under `ksf accel run`.
    Accel = "accel, nginx" needs "nginx";
    /// The same under `ksf accel run --off`.
    AccelOff = "accel off, nginx" needs "nginx";
    /// `ksf serve demo`.
    Demo = "ksf demo";
    /// The nginx of [`Contestant::NginxExclusive`], loaded by wrk.
    Wrk = "nginx by wrk" needs "nginx", "wrk";
    /// The same, loaded by ab.
    Ab = "nginx by ab" needs "nginx", "ab";
    /// HAProxy of Debian, whose threads share one listener.
    Haproxy = "haproxy" needs "haproxy";
    /// HAProxy with a listener for each thread (`shards by-thread`).
    HaproxyShards = "haproxy shards" needs "haproxy";
    /// The HAProxy of [`Contestant::Haproxy`] under `ksf accel run`.
    AccelHaproxy = "accel, haproxy" needs "haproxy";
    /// That of [`Contestant::HaproxyShards`] under `ksf accel run`.
    AccelHaproxyShards = "accel, haproxy shards" needs "haproxy";
    /// lighttpd of Debian, whose workers share one listener.
    Lighttpd = "lighttpd" needs "lighttpd";
    /// The same under `ksf accel run`.
    AccelLighttpd = "accel, lighttpd" needs "lighttpd";
    /// `ksf store` on its own engine, as it comes: each write is on the disk when it is answered.
    Store = "ksf store";
    /// `ksf store --engine epoll`.
    StoreEpoll = "ksf store epoll";
    /// Redis of Debian with `appendfsync always`.
    RedisAlways = "redis always" needs "redis-server";
    /// Redis with `appendfsync everysec`.
    RedisEverysec = "redis everysec" needs "redis-server";
    /// Redis that keeps nothing on a disk.
    Redis = "redis no AOF" needs "redis-server";
    /// The Redis of [`Contestant::RedisAlways`], loaded by redis-benchmark.
    RedisBenchmark = "redis always by redis-benchmark" needs "redis-server", "redis-benchmark";
    /// [`Contestant::RedisAlways`] with two threads for its sockets (`io-threads`).
    RedisAlwaysThreads = "redis always, io-threads" needs "redis-server";
    /// [`Contestant::Redis`] with two threads for its sockets.
    RedisThreads = "redis no AOF, io-threads" needs "redis-server";
    /// The store of [`Contestant::Store`], loaded by redis-benchmark.
    StoreBenchmark = "ksf store by redis-benchmark" needs "redis-benchmark";
    /// The store of [`Contestant::Store`] with a log so long that nothing is cleaned.
    StoreRoomy = "ksf store with room";
    /// That store with its data in memory, where no write waits for a disk.
    StoreTmpfs = "ksf store, tmpfs" needs ROOT;
    /// That in memory, which answers before a write is where it is to be (`--durability none`).
    StoreNone = "ksf store none, tmpfs" needs ROOT;
    /// bench/peers/http_log.c, which throws away what it is sent.
    HttpNone = "epoll http";
    /// The same, which writes what it is sent to a file.
    HttpAppend = "epoll http, append";
    /// The same, which then calls fdatasync for each request.
    HttpSync = "epoll http, fdatasync";
}

impl fmt::Display for Contestant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.label())
    }
}

impl Contestant {
    /// The engine, if this is ksf and not a peer.
    pub(crate) fn engine(self) -> Option<&'static str> {
        match self {
            Contestant::Kernel => Some("kernel"),
            Contestant::Uring => Some("uring"),
            Contestant::Epoll => Some("epoll"),
            _ => None,
        }
    }

    /// Whether this is ksf and not a peer.
    pub(crate) fn is_ksf(self) -> bool {
        let is_own = matches!(self, Contestant::Demo | Contestant::Nfs | Contestant::Ninep) || self.is_store();
        self.engine().is_some() || self.workers().is_some() || self.is_accelerated() || is_own
    }

    /// Whether this is `ksf store`, however it is started.
    pub(crate) fn is_store(self) -> bool {
        use Contestant::{Store, StoreBenchmark, StoreEpoll, StoreNone, StoreRoomy, StoreTmpfs};
        matches!(self, Store | StoreBenchmark | StoreEpoll | StoreNone | StoreRoomy | StoreTmpfs)
    }

    /// Whether its data are on a file system in memory.
    pub(crate) fn is_in_memory(self) -> bool {
        matches!(self, Contestant::StoreNone | Contestant::StoreTmpfs)
    }

    /// Whether `ksf accel run` makes queues for it.
    pub(crate) fn is_accelerated(self) -> bool {
        use Contestant::{Accel, AccelHaproxy, AccelHaproxyShards, AccelLighttpd, AccelOff};
        matches!(self, Accel | AccelOff | AccelHaproxy | AccelHaproxyShards | AccelLighttpd)
    }

    /// Whether there is a server for a tool to look at, and a client of ours that counts messages.
    pub(crate) fn can_be_watched(self) -> bool {
        use Contestant::{
            Ab, IdealQueue, PairFloor, PreadSend, RedisBenchmark, Sockperf, SockperfTuned, StoreBenchmark, Wrk,
        };
        let has_other_client = matches!(self, Ab | RedisBenchmark | Sockperf | SockperfTuned | StoreBenchmark | Wrk);
        !has_other_client && !matches!(self, IdealQueue | PairFloor | PreadSend)
    }

    /// What ends its server. nfs-ganesha 4.3 waits four seconds for its threads of 9P when it is asked to end; diod 1.0.24 crashed
    /// once then, in its own shutdown.
    pub(crate) fn end_signal(self, row: Row) -> Signal {
        match (self, row) {
            (Contestant::Ganesha, Row::Ninep) | (Contestant::Diod, _) => Signal::KILL,
            _ => Signal::TERM,
        }
    }

    /// Whether it is measured in a placement.
    pub(crate) fn is_for(self, placement: Placement) -> bool {
        match self {
            // It has one thread only.
            Contestant::PairFloor => placement != Placement::Other,
            // A server that spins on the client's CPU keeps the client from it.
            Contestant::ThreadsSpin | Contestant::UdpMmsgSpin | Contestant::SockperfTuned => {
                placement != Placement::Same
            }
            // On one CPU its threads have nowhere to run.
            Contestant::RedisThreads | Contestant::RedisAlwaysThreads => placement == Placement::Unpinned,
            _ => true,
        }
    }

    /// Worker threads behind the multiplexor.
    pub(crate) fn workers(self) -> Option<u32> {
        match self {
            Contestant::Workers2 => Some(2),
            Contestant::Workers4 => Some(4),
            _ => None,
        }
    }
}

/// Workers of [`Contestant::IdealQueue`].
pub(crate) const IDEAL_WORKERS: u32 = 4;

/// The programs that the bench runs.
pub(crate) struct Programs {
    pub(crate) ksf: PathBuf,
    /// Where the peers are compiled to, and for configurations; gone with this value.
    scratch: TempDir,
}

impl Programs {
    /// Compiles the peers of bench/peers.
    pub(crate) fn build(ksf: PathBuf) -> Result<Programs> {
        // Below the folder that `supervise` removes when this process is killed.
        let scratch = tempfile::Builder::new().prefix("bench-").tempdir()?;
        let programs = Programs { ksf, scratch };
        for name in [
            "threads",
            "event_loop",
            "udp_plain",
            "udp_mmsg",
            "pair_floor",
            "pread_send",
            "work_server",
            "http_log",
            "host_costs",
        ] {
            let source = crate::root().join("bench/peers").join(name).with_extension("c");
            let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
            cc.args(["-O2", "-Wall", "-Wextra", "-pthread", "-o"]).arg(programs.peer_path(name));
            output(cc.arg(source), Duration::from_secs(120)).context("cannot compile a peer")?;
        }
        Ok(programs)
    }

    pub(crate) fn peer(&self, name: &str) -> Command {
        Command::new(self.peer_path(name))
    }

    pub(crate) fn peer_path(&self, name: &str) -> PathBuf {
        self.scratch().join(name)
    }

    /// The folder that file servers export.
    pub(super) fn export_path(&self) -> PathBuf {
        self.scratch().join("export")
    }

    /// Makes a folder in it with so many empty files, once. Returns its name.
    pub(super) fn make_listed(&self, files: u64) -> Result<String> {
        let name = format!("files-{files}");
        let folder = self.export_path().join(&name);
        if !folder.exists() {
            std::fs::create_dir(&folder)?;
            (0..files).try_for_each(|at| std::fs::File::create(folder.join(format!("file{at:06}"))).map(drop))?;
        }
        Ok(name)
    }

    /// A file of so many bytes that is in the page cache.
    fn make_blocks(&self, bytes: usize) -> Result<PathBuf> {
        let path = self.scratch().join("blocks");
        std::fs::write(&path, (0..bytes).map(|at| (at / 7) as u8).collect::<Vec<u8>>())?;
        Ok(path)
    }

    /// Makes that folder. Its files are those of the anonymous user, which root is by the default of both servers.
    fn make_export(&self) -> Result<PathBuf> {
        let export = self.export_path();
        std::fs::create_dir_all(&export)?;
        std::fs::set_permissions(&export, std::fs::Permissions::from_mode(0o777))?;
        Ok(export)
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }
}

/// The CPUs of client and server in one placement; None: not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pinning {
    pub(crate) placement: Placement,
    /// The client's CPU, and the one that it does not use.
    first: usize,
    second: Option<usize>,
}

impl Pinning {
    /// The pinning on the CPUs that this process may use. None if there are too few.
    pub(crate) fn new(placement: Placement, connections: u32, cpus: &[usize]) -> Option<Pinning> {
        let (first, second) = (*cpus.first()?, cpus.get(1).copied());
        let needs_two = matches!(placement, Placement::Other | Placement::Shared) || connections > 1;
        (!needs_two || second.is_some()).then_some(Pinning { placement, first, second })
    }

    /// No pinning.
    pub(crate) fn free(placement: Placement) -> Pinning {
        Pinning { placement, first: 0, second: None }
    }

    /// The CPUs for the client's threads.
    pub(crate) fn client(&self, connections: u32) -> Option<String> {
        match self.placement {
            Placement::Unpinned | Placement::Vm => None,
            Placement::Same if connections > 1 => Some(self.both()),
            Placement::Same | Placement::Other | Placement::Shared => Some(self.first.to_string()),
        }
    }

    /// The CPUs for the server's threads.
    pub(super) fn server(&self, connections: u32) -> Option<String> {
        match self.placement {
            Placement::Unpinned | Placement::Vm => None,
            Placement::Same if connections > 1 => Some(self.both()),
            Placement::Same => Some(self.first.to_string()),
            Placement::Other => self.second.map(|cpu| cpu.to_string()),
            Placement::Shared => Some(self.both()),
        }
    }

    fn both(&self) -> String {
        [Some(self.first), self.second].iter().flatten().map(usize::to_string).collect::<Vec<_>>().join(",")
    }
}

/// The command that starts a contestant's server for a case, and how it shows that it is ready.
pub(crate) fn server_command(
    programs: &Programs,
    contestant: Contestant,
    case: &Case,
    pinning: &Pinning,
    port: u16,
) -> Result<(Command, Ready)> {
    let cpus = pinning.server(case.client_threads());
    let service = match case.service {
        Service::Echo => "echo",
        Service::Null | Service::Files(_) => "rpc",
        Service::Work(load) => return work_server_command(programs, contestant, load, cpus.as_deref(), port),
        Service::Web(_) | Service::Store(_) => anyhow::bail!("servers of text protocols are started elsewhere"),
    };
    let peer = |name: &str| {
        let mut command = programs.peer(name);
        command.args([service, "127.0.0.1", &port.to_string()]);
        // Only servers of streams run on two CPUs; there each connection's thread, or loop, follows its client.
        let several = cpus.as_ref().is_some_and(|cpus| cpus.contains(','));
        command.args(if several { Some("incoming") } else { cpus.as_deref() });
        if matches!(contestant, Contestant::ThreadsSpin | Contestant::UdpMmsgSpin) {
            command.args(cpus.is_none().then_some("-1")).arg("spin");
        }
        (command, Ready::Lines(1, "ready"))
    };
    Ok(match contestant {
        Contestant::Kernel | Contestant::Uring | Contestant::Epoll => {
            let engine = contestant.engine().expect("it is ksf");
            let mut command = Command::new(&programs.ksf);
            command.arg(match case.service {
                Service::Echo => "kecho",
                Service::Null => "krpc2",
                Service::Files(_) => anyhow::bail!("{contestant} has no files"),
                Service::Work(_) | Service::Web(_) | Service::Store(_) => unreachable!("it has been served above"),
            });
            let transport = if case.udp { "udp" } else { "tcp" };
            command.args(["--listen", &format!("{transport}:127.0.0.1:{port}")]);
            command.args(["--engine", engine]);
            if let Some(cpus) = &cpus {
                command.args(["--cpus", cpus]);
            }
            (command, Ready::Lines(1, "ready"))
        }
        Contestant::Threads | Contestant::ThreadsSpin => peer("threads"),
        Contestant::EventLoop => peer("event_loop"),
        Contestant::UdpPlain => peer("udp_plain"),
        Contestant::UdpMmsg | Contestant::UdpMmsgSpin => peer("udp_mmsg"),
        Contestant::Ganesha | Contestant::GaneshaTuned => {
            let tuned = contestant == Contestant::GaneshaTuned;
            let mut command = pinned("ganesha.nfsd", cpus.as_deref());
            command.args(["-F", "-L", "STDERR", "-N", "NIV_EVENT", "-f"]);
            command.arg(ganesha_config(programs, case, port, tuned)?);
            command.arg("-p").arg(programs.scratch().join("ganesha.pid"));
            (command, Ready::Lines(1, "NFS SERVER INITIALIZED"))
        }
        Contestant::Nfs | Contestant::Ninep => {
            let name = if contestant == Contestant::Nfs { "nfs" } else { "9p" };
            let mut command = Command::new(&programs.ksf);
            command.args([name, "--listen", &format!("tcp:127.0.0.1:{port}")]);
            command.arg("--export").arg(programs.make_export()?);
            command.arg("--state").arg(programs.scratch().join(format!("{name}-state")));
            if let Some(cpus) = &cpus {
                command.args(["--cpus", cpus]);
            }
            (command, Ready::Lines(1, "ready"))
        }
        Contestant::Diod => {
            let mut command = pinned("diod", cpus.as_deref());
            command.args(["--foreground", "--no-auth", "--logdest", "stderr"]);
            command.args(["--listen", &format!("127.0.0.1:{port}")]);
            command.arg("--export").arg(programs.make_export()?);
            (command, Ready::Port(port))
        }
        Contestant::Sockperf | Contestant::SockperfTuned => {
            let mut command = pinned("sockperf", cpus.as_deref());
            command.args(["server", "--tcp", "-i", "127.0.0.1", "-p", &port.to_string()]);
            command.args(sockperf_tuning(contestant));
            (command, Ready::Port(port))
        }
        _ => anyhow::bail!("{contestant} does not answer such messages"),
    })
}

/// The servers whose messages cost something. Their threads are kept to the CPUs, and free among them.
fn work_server_command(
    programs: &Programs,
    contestant: Contestant,
    load: &WorkLoad,
    cpus: Option<&str>,
    port: u16,
) -> Result<(Command, Ready)> {
    let port_text = port.to_string();
    let mut command;
    match (contestant, contestant.workers()) {
        (_, Some(workers)) => {
            let path = programs.scratch().join(format!("workers-{workers}.toml"));
            let text = format!(
                "[[service]]\nname = \"work\"\nkind = \"work\"\nengine = \"epoll\"\nworkers = {workers}\n\
                 listen = [\"tcp:127.0.0.1:{port}\"]\n"
            );
            std::fs::write(&path, text).context("cannot write a configuration")?;
            command = pinned(&programs.ksf, cpus);
            command.arg("serve").arg(path);
        }
        (Contestant::WorkThreads, _) => {
            command = pinned(programs.peer_path("work_server"), cpus);
            command.args(["threads", "127.0.0.1", &port_text]);
        }
        (Contestant::WorkLoops, _) => {
            command = pinned(programs.peer_path("work_server"), cpus);
            command.args(["epoll", "127.0.0.1", &port_text, load.loops]);
        }
        _ => anyhow::bail!("{contestant} does not serve work"),
    }
    Ok((command, Ready::Lines(1, "ready")))
}

/// Starts a server; gives back its command line, too.
pub(crate) fn start(contestant: Contestant, (mut command, ready): (Command, Ready)) -> Result<(Server, String)> {
    let server = Server::start(&contestant.to_string(), &mut command, ready, START_TIMEOUT)?;
    Ok((server, display(&command)))
}

/// sockperf's own client: it measures its own server only, whose messages carry its header.
pub(crate) fn sockperf_client(contestant: Contestant, pinning: &Pinning, port: u16, seconds: f64) -> Command {
    let mut command = pinned("sockperf", pinning.client(1).as_deref());
    command.args(["ping-pong", "--tcp", "--full-rtt", "-i", "127.0.0.1"]);
    command.args(["-p", &port.to_string(), "-m", &ECHO_BYTES.to_string()]);
    command.args(["-t", &(seconds.ceil() as u64).max(1).to_string()]);
    command.args(sockperf_tuning(contestant));
    command
}

/// sockperf(1): sockets that do not block, and a wait for them that does not either.
fn sockperf_tuning(contestant: Contestant) -> &'static [&'static str] {
    match contestant {
        Contestant::SockperfTuned => &["--nonblocked", "--timeout", "0"],
        _ => &[],
    }
}

/// The floor: one thread plays both ends, so there is one CPU, and no other.
pub(crate) fn pair_floor(programs: &Programs, case: &Case, pinning: &Pinning, count: u64) -> Command {
    let mut command = programs.peer("pair_floor");
    command.args([if case.udp { "udp" } else { "tcp" }, &count.to_string()]);
    // A NULL call with AUTH_NONE and its reply; over TCP each has a record mark.
    command.args(match (case.service, case.udp) {
        (Service::Null, false) => ["44", "28"].map(str::to_owned),
        (Service::Null, true) => ["40", "24"].map(str::to_owned),
        _ => [ECHO_BYTES.to_string(), ECHO_BYTES.to_string()],
    });
    command.args(pinning.client(1));
    command
}

/// The floor of READ: both ends, each on its CPU, and the file that is read.
pub(crate) fn pread_send(
    programs: &Programs,
    case: &Case,
    load: &FileLoad,
    pinning: &Pinning,
    count: u64,
) -> Result<Command> {
    let mut command = programs.peer("pread_send");
    command.arg(programs.make_blocks((load.files * load.file_bytes) as usize)?);
    command.args([load.io_bytes.into(), case.in_flight.into(), count].map(|number: u64| number.to_string()));
    command.args(pinning.client(1).into_iter().chain(pinning.server(1)));
    Ok(command)
}

pub(super) fn pinned(program: impl AsRef<OsStr>, cpus: Option<&str>) -> Command {
    let Some(cpus) = cpus else {
        return Command::new(program);
    };
    let mut command = Command::new("taskset");
    command.args(["-c", cpus]).arg(program);
    command
}

/// NFSv3 or 9P over TCP on a port of our choice. It does not run without an export, which only calls of files use.
fn ganesha_config(programs: &Programs, case: &Case, port: u16, tuned: bool) -> Result<PathBuf> {
    // ganesha-core-config(8): neither counted by client and export, nor remembered to find repetitions.
    let tuning = if tuned { "Enable_Fast_Stats = true;\n    DRC_Disabled = true;" } else { "" };
    let template = include_str!("../../../bench/peers/ganesha.conf");
    let export = programs.make_export()?;
    let text = template
        .replace("@PROTOCOL@", if case.row == Row::Ninep { "9P" } else { "3" })
        .replace("@PORT@", &port.to_string())
        .replace("@MOUNT_PORT@", &GANESHA_MOUNT_PORT.to_string())
        .replace("@TUNING@", tuning)
        .replace("@EXPORT@", &export.display().to_string());
    let path = programs.scratch().join("ganesha.conf");
    std::fs::write(&path, text).context("cannot write nfs-ganesha's configuration")?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_need_their_cpus() {
        assert!(Pinning::new(Placement::Other, 1, &[4]).is_none());
        assert!(Pinning::new(Placement::Same, 2, &[4]).is_none());
        assert!(Pinning::new(Placement::Shared, 1, &[4]).is_none());
        assert!(Pinning::new(Placement::Same, 1, &[4]).is_some());
    }

    #[test]
    fn server_and_client_are_where_the_placement_says() {
        let pins = |placement, connections| {
            let pinning = Pinning::new(placement, connections, &[4, 6]).unwrap();
            (pinning.client(connections), pinning.server(connections))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(pins(Placement::Same, 1), (some("4"), some("4")));
        assert_eq!(pins(Placement::Other, 1), (some("4"), some("6")));
        assert_eq!(pins(Placement::Unpinned, 1), (None, None));
        assert_eq!(pins(Placement::Shared, 1), (some("4"), some("4,6")));
        assert_eq!(pins(Placement::Same, 2), (some("4,6"), some("4,6")));
        assert_eq!(pins(Placement::Other, 2), (some("4"), some("6")));
    }
}
