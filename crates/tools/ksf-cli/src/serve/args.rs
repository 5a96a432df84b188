//! Flags that servers share.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use ksf::cpus::CpuSet;

use super::engine::EngineWish;
use super::kernel::KernelArgs;
use super::limits::LimitFlags;
use super::listen::ListenEntry;
use super::resources::ResourceFlags;
use super::spin::SpinWish;
use super::workers::WorkerArgs;

/// Where one service runs.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ServerArgs {
    /// Address to listen on; repeatable [default: loopback, IPv4 and IPv6]
    ///
    /// ADDR:PORT and [ADDR6]:PORT listen with every transport of the service, tcp:ADDR:PORT and
    /// udp:ADDR:PORT with one, unix:/PATH on a stream socket in the file system; systemd takes
    /// the sockets of the service manager, systemd:NAME those with that name. Without --listen
    /// the sockets of the service manager are taken if there are any; otherwise the service
    /// answers on loopback only. Behind the address limits may follow that hold there instead of
    /// those of the service, as in 0.0.0.0:7000,message_bytes_max=64k,idle_timeout_ms=5000.
    #[arg(short, long, value_name = "ADDR:PORT")]
    pub(crate) listen: Vec<ListenEntry>,
    /// What moves the bytes
    #[arg(short, long, value_enum, value_name = "ENGINE", default_value_t)]
    pub(crate) engine: EngineWish,
    /// CPUs for shards, as in 0-3,8; the mask of the process is never widened
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuSet>,
    #[command(flatten)]
    pub(crate) spin: SpinArgs,
    /// File of limits in TOML, read again on SIGHUP; flags win over it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config_limits: Option<PathBuf>,
}

/// How long shards look for work before they sleep.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct SpinArgs {
    /// How long a shard looks for work before it sleeps: auto, off, or microseconds
    ///
    /// A wake-up costs more than a short message. A shard spins only while messages come closer together than it may
    /// spin, and only where spinning finds them, so an idle server costs nothing; a busy one takes more of its CPU.
    /// auto: up to 50 us.
    #[arg(long, value_name = "auto|off|US", default_value_t)]
    pub(crate) spin: SpinWish,
}

/// A service that shards, workers and the kernel may answer for, in a process of its own.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ServiceArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workers: WorkerArgs,
    #[command(flatten)]
    pub(crate) kernel: KernelArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

/// What concerns the process and all of its services. The last of a command's flags, because the heading of the limits
/// holds for all that follow.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ProcessArgs {
    #[command(flatten)]
    pub(crate) stats: StatsArgs,
    #[command(flatten)]
    pub(crate) loudness: Loudness,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) resources: ResourceFlags,
}

/// Where counters can be read.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct StatsArgs {
    /// Socket for `ksf stat` [default: /run/ksf/PID.sock, or the same below $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) stats_socket: Option<PathBuf>,
    /// Serve the counters as Prometheus text on http://ADDR:PORT/metrics [default: off]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) prometheus: Option<SocketAddr>,
}

/// How much a server says.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct Loudness {
    /// Say more: limits in force, shards, and the counters at the end
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Say nothing but errors
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}
