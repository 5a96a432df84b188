//! The command line of every command. Man pages and completions are made from these
//! definitions.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::cpus::CpuList;
use crate::serve::address::Listen;
use crate::serve::limits::LimitFlags;
use crate::serve::resources::ResourceFlags;

/// Port of `kecho`, as in the original.
pub(crate) const ECHO_PORT: u16 = 60007;
/// Port of `krpc2`, as in the original.
pub(crate) const RPC_PORT: u16 = 62049;

/// Network services at kernel speed on stock Linux
///
/// A service answers each message at the cheapest place that can: a program in the kernel's TCP
/// and UDP path, or a shard per CPU in user space on io_uring or epoll. Which one runs is said at
/// start; `ksf doctor` says what this machine offers.
#[derive(Debug, Parser)]
#[command(name = "ksf", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Kecho(EchoArgs),
    Krpc2(RpcArgs),
    Serve(ServeArgs),
    Run(RunArgs),
    Echotest(ksf_load::echo::Args),
    Rpctest(ksf_load::rpc::Args),
    Worktest(ksf_load::work::Args),
    Load(crate::load::LoadArgs),
    Doctor(DoctorArgs),
    Stat(StatArgs),
    Completions(CompletionArgs),
    Man(ManArgs),
    Sdk(SdkArgs),
    KcmRun(crate::kcm_run::KcmRunArgs),
    Accel(crate::accel::AccelArgs),
}

/// Echo server: every byte and every datagram goes back to its sender
#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// ONC RPC server (RFC 5531) that answers the NULL procedure of NFSv3 and MOUNTv3
#[derive(Debug, Args)]
pub(crate) struct RpcArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Register another program and its versions, as in 200000:1-3; repeatable
    #[arg(long = "program", value_name = "PROG:LOW[-HIGH]")]
    pub(crate) programs: Vec<ProgramRange>,
    /// Register the programs with the rpcbind of this machine, and unregister at the end
    #[arg(long)]
    pub(crate) rpcbind: bool,
}

/// Run several services from one TOML file, or the demo server
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    pub(crate) service: Option<ServeCommand>,
    /// The configuration file; an example is packaging/ksf.toml (one that is called demo is ./demo)
    #[arg(value_hint = ValueHint::FilePath, required = true)]
    pub(crate) config: Option<PathBuf>,
    /// Check the file and end
    #[arg(long)]
    pub(crate) check: bool,
    #[command(flatten)]
    pub(crate) stats: StatsArgs,
    // Before the limits, whose heading holds for all that follows.
    #[command(flatten)]
    pub(crate) loudness: Loudness,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) resources: ResourceFlags,
}

/// Services that need no file.
#[derive(Debug, Subcommand)]
pub(crate) enum ServeCommand {
    Demo(Box<DemoArgs>),
}

/// HTTP server that answers every request with one page, or asks backends; with the flags of Fastsocket's demo server
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Workers, each pinned to a CPU of its own [default: one per CPU of the process, from --start-core on]
    #[arg(short, long, value_name = "N", value_parser = crate::number::number::<1, 1024>)]
    pub(crate) workers: Option<u64>,
    /// CPU of the first worker; the others have the CPUs behind it
    #[arg(short = 'c', long, value_name = "CPU", default_value_t = 0)]
    pub(crate) start_core: usize,
    /// Address to listen on; repeatable [default: loopback, IPv4 and IPv6, port 8080]
    ///
    /// ADDR:PORT, [ADDR6]:PORT, unix:/PATH, systemd or systemd:NAME.
    #[arg(short, long, alias = "listen", value_name = "ADDR:PORT")]
    pub(crate) addr: Vec<Listen>,
    /// Ask this backend instead of answering; repeatable: they take turns
    #[arg(short = 'x', long, value_name = "ADDR:PORT", conflicts_with = "body_bytes")]
    pub(crate) backend: Vec<SocketAddr>,
    /// Answer more than one request on a connection, from the server and through the proxy
    #[arg(short, long)]
    pub(crate) keep_alive: bool,
    /// Length of the page
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = crate::number::number::<0, { 64 << 20 }>)]
    pub(crate) body_bytes: u64,
    /// Write statistics to this file every second; with -v those of every worker, which otherwise go to stderr
    #[arg(short = 'o', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) log: Option<PathBuf>,
    /// Not offered: a service manager does it better
    #[arg(short, long, hide = true)]
    pub(crate) daemon: bool,
    /// What moves the bytes
    #[arg(short, long, value_enum, value_name = "ENGINE", default_value_t)]
    pub(crate) engine: EngineWish,
    #[command(flatten)]
    pub(crate) stats: StatsArgs,
    /// File of limits in TOML, read again on SIGHUP; flags win over it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config_limits: Option<PathBuf>,
    // Before the limits, whose heading holds for all that follows.
    #[command(flatten)]
    pub(crate) loudness: Loudness,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) resources: ResourceFlags,
}

/// Run a service of your own, compiled against ksf.bpf.h
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The compiled program
    #[arg(value_name = "OBJECT.bpf.o", value_hint = ValueHint::FilePath)]
    pub(crate) object: PathBuf,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// What all servers take.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServerArgs {
    /// Address to listen on; repeatable [default: loopback, IPv4 and IPv6]
    ///
    /// ADDR:PORT and [ADDR6]:PORT listen with every transport of the service, tcp:ADDR:PORT and
    /// udp:ADDR:PORT with one, unix:/PATH on a stream socket in the file system; systemd takes
    /// the sockets of the service manager, systemd:NAME those with that name. Without --listen
    /// the sockets of the service manager are taken if there are any; otherwise the service
    /// answers on loopback only.
    #[arg(short, long, value_name = "ADDR:PORT")]
    pub(crate) listen: Vec<Listen>,
    /// What moves the bytes
    #[arg(short, long, value_enum, value_name = "ENGINE", default_value_t)]
    pub(crate) engine: EngineWish,
    /// CPUs for shards, as in 0-3,8; the mask of the process is never widened
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuList>,
    /// Worker threads that share all connections: a message goes to whichever is free [default: none, each shard
    /// answers its own connections]
    ///
    /// For services that block or compute. The kernel half does not stand in front of workers.
    #[arg(long, value_name = "N", value_parser = crate::number::number::<1, 1024>)]
    pub(crate) workers: Option<u64>,
    /// Answer UDP by XDP on this interface; repeatable [default: lo for loopback addresses]
    #[arg(long, value_name = "IFACE", conflicts_with = "no_xdp")]
    pub(crate) xdp: Vec<String>,
    /// Answer UDP in user space
    #[arg(long)]
    pub(crate) no_xdp: bool,
    /// Bytes the kernel half may have outstanding on one connection before it passes to user space
    #[arg(long, value_name = "BYTES", value_parser = crate::number::number::<1, { u32::MAX as u64 }>)]
    pub(crate) window_bytes: Option<u64>,
    #[command(flatten)]
    pub(crate) stats: StatsArgs,
    /// File of limits in TOML, read again on SIGHUP; flags win over it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config_limits: Option<PathBuf>,
    // Before the limits, whose heading holds for all that follows.
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

/// Try each kernel feature; say what works, what falls back, why, and how to get it
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// One JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show the live counters of a running server
#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Process id of the server, or path of its socket [default: the only server there is]
    #[arg(value_name = "PID|SOCKET", value_hint = ValueHint::FilePath)]
    pub(crate) server: Option<String>,
    /// One JSON document per reading instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Read again every SECONDS and show the rates, until interrupted
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) watch: Option<f64>,
    /// Show counters that are zero, too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Explain every counter and end
    #[arg(long)]
    pub(crate) help_counters: bool,
}

/// Print a completion script
#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page, or write all of them
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write a page for every command to this folder
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
    /// Command whose page is printed [default: ksf itself]
    #[arg(conflicts_with = "dir")]
    pub(crate) command: Option<String>,
}

/// Write the headers that programs for `ksf run`, policies for `ksf accel flow` and framing programs are compiled against
#[derive(Debug, Args)]
pub(crate) struct SdkArgs {
    /// Folder to write ksf.bpf.h and its companions to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

/// What moves the bytes, as asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineWish {
    /// The best one that works here
    #[default]
    Auto,
    /// Programs in the kernel, the rest by io_uring or epoll
    Kernel,
    /// io_uring, one ring per shard
    Uring,
    /// Plain system calls, for containers without io_uring
    Epoll,
}

/// An RPC program with its versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct ProgramRange {
    pub(crate) program: u32,
    pub(crate) low: u32,
    pub(crate) high: u32,
}

impl FromStr for ProgramRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || -> Option<ProgramRange> {
            let (program, versions) = text.split_once(':')?;
            let (low, high) = versions.split_once('-').unwrap_or((versions, versions));
            Some(ProgramRange { program: program.parse().ok()?, low: low.parse().ok()?, high: high.parse().ok()? })
        };
        match parts() {
            Some(range) if range.low <= range.high => Ok(range),
            Some(_) => Err(format!("\"{text}\": the first version is above the last")),
            None => Err(format!("\"{text}\" is not a program with versions; write it like 100003:3-4")),
        }
    }
}

impl TryFrom<String> for ProgramRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for ProgramRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}-{}", self.program, self.low, self.high)
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("\"{text}\" is not a number of seconds from 0.05 to 86400")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn programs_are_read() {
        let range: ProgramRange = "100003:3-4".parse().unwrap();
        assert_eq!((range.program, range.low, range.high), (100_003, 3, 4));
        assert_eq!("7:2".parse::<ProgramRange>().unwrap().to_string(), "7:2-2");
        for text in ["", "1", "1:", "1:x", "1:3-2", "1:-1", "4294967296:1"] {
            assert!(text.parse::<ProgramRange>().is_err(), "{text}");
        }
    }
}
