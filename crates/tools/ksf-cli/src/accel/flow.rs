//! `ksf accel flow`: packets to the CPU that wants them. The work is done by `ksf_accel::flow`; here are the flags,
//! the texts and the exit statuses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use ksf::cpus::CpuSet;
use ksf_accel::flow::{
    ConnectOptions, ConnectPrograms, Counter, CpuMask, FlowError, Layout, LayoutError, ModeWish, Policy, PortRange,
    Proof, Steering, Trial,
};
use serde::Serialize;

use super::{Moment, until_stopped};
use crate::manager;
use crate::output::{Failure, Status, json_line, one_line, print, say};
use crate::signals::Events;

/// Schema name of the JSON forms; the number goes up when a field changes its meaning or goes.
const SCHEMA: &str = "ksf-flow/1";

/// How long a connection of the self-check may take.
const TRIAL: Duration = Duration::from_secs(3);

/// Send packets to the CPU that wants them: replies to the one that opened the connection, others by a policy
///
/// Active connections say with their source port which CPU opened them; an XDP program brings the replies back there.
/// docs/flow.md explains the layout of ports, the traps, and how to write a policy.
#[derive(Debug, Args)]
pub(crate) struct FlowArgs {
    #[command(subcommand)]
    command: FlowCommand,
}

#[derive(Debug, Subcommand)]
enum FlowCommand {
    Attach(AttachArgs),
    Check(CheckArgs),
}

/// Steer what an interface receives, until interrupted; then everything is as before
#[derive(Debug, Args)]
struct AttachArgs {
    /// The interface
    #[arg(value_name = "IFACE")]
    iface: String,
    /// Who decides: ports, hash, round-robin, pass, or the path of a policy; repeatable, each may leave a packet to the
    /// next [default: ports]
    #[arg(short, long, value_name = "FILE|NAME", value_hint = ValueHint::FilePath)]
    policy: Vec<Policy>,
    /// Where in the receive path
    #[arg(short, long, value_enum, value_name = "MODE", default_value_t)]
    mode: ModeFlag,
    /// Give connections that programs of this cgroup open a port of their CPU; a folder of cgroup2
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    cgroup: Option<PathBuf>,
    /// With --cgroup: connections to loopback addresses, too
    #[arg(long, requires = "cgroup")]
    loopback: bool,
    /// Check with a connection from each CPU to this TCP service behind the interface
    #[arg(long = "try", value_name = "ADDR:PORT")]
    trial: Option<SocketAddr>,
    #[command(flatten)]
    layout: LayoutFlags,
    /// Print the counters every SECONDS, too [default: at the end only]
    #[arg(short, long, value_name = "SECONDS", value_parser = crate::number::number::<1, 86_400>)]
    watch: Option<u64>,
    /// JSON documents instead of text, one a line
    #[arg(long)]
    json: bool,
}

/// Show which source ports belong to which CPU
#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    layout: LayoutFlags,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct LayoutFlags {
    /// CPUs that packets may go to, as in 0-3,8 [default: those this process may run on]
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuSet>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum ModeFlag {
    /// In the driver if packets survive it there, else behind it
    #[default]
    Auto,
    /// In the driver
    Native,
    /// Behind the driver: works on every device
    Generic,
}

/// Runs the command.
pub(super) fn run(args: FlowArgs) -> Result<ExitCode, Failure> {
    match args.command {
        FlowCommand::Attach(args) => attach(args),
        FlowCommand::Check(args) => check(&args),
    }
}

fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let range = PortRange::of_this_network().map_err(|error| Failure::os("cannot read the port range", &error))?;
    let layout = layout(&args.layout)?;
    let text = if args.json { json_line(&LayoutDocument::new(&layout, range))? } else { layout_text(&layout, range) };
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn attach(args: AttachArgs) -> Result<ExitCode, Failure> {
    let signals = Events::take().map_err(|error| Failure::os("cannot take over the signals", &error))?;
    let layout = layout(&args.layout)?;
    let policies = if args.policy.is_empty() { vec![Policy::Ports] } else { args.policy };
    let mut steering = Steering::load(&layout, &policies).map_err(failure)?;
    let connects = args.cgroup.as_deref().map(|cgroup| {
        let mut options = ConnectOptions::default();
        options.loopback = args.loopback;
        ConnectPrograms::attach(cgroup, &layout, &options)
    });
    let connects = connects.transpose().map_err(failure)?;
    let wish = match args.mode {
        ModeFlag::Auto => ModeWish::Auto,
        ModeFlag::Native => ModeWish::Native,
        ModeFlag::Generic => ModeWish::Generic,
    };
    let mode = steering.attach(&args.iface, wish).map_err(failure)?;
    let names: Vec<String> = policies.iter().map(Policy::to_string).collect();
    say(&format_args!("steering {} in {mode} mode by {}, port layout {layout}", args.iface, names.join(", ")));
    if let Some(to) = args.trial {
        let trials = steering.prove(to, TRIAL).map_err(failure)?;
        let mode = steering.mode().unwrap_or(mode);
        for trial in &trials {
            say(&format_args!("{}", trial_text(trial, to)));
        }
        if trials.iter().any(|trial| trial.processed_on.is_err()) {
            // Dropping everything detaches.
            let what = format!("no connection to {to} while {} is steered in {mode} mode: detached", args.iface);
            return Err(Failure::new(Status::Unavailable, what).remedy("try it without ksf, then another service"));
        }
        say(&format_args!("self-check passed in {mode} mode"));
    }
    manager::ready(&format!("steering {}", args.iface));
    let mut broken_said = false;
    until_stopped(&signals, args.watch, |moment| {
        if moment == Moment::Show {
            return show(&args.iface, &steering, connects.as_ref(), args.json);
        }
        if let Some(mode) = steering.settle().map_err(failure)? {
            say(&format_args!(
                "{} hands over packets with unfinished checksums, which native mode cannot send to another CPU: now in \
                 {mode} mode",
                args.iface
            ));
        }
        if !broken_said && steering.proof().map_err(failure)? == Proof::Broken {
            broken_said = true;
            say(&format_args!(
                "{} hands over packets with unfinished checksums: nothing is steered in native mode; use --mode auto, or \
                 switch tx checksumming off on the other side (ethtool -K)",
                args.iface
            ));
        }
        Ok(())
    })
}

fn layout(flags: &LayoutFlags) -> Result<Layout, Failure> {
    let layout = match &flags.cpus {
        Some(cpus) => PortRange::of_this_network()
            .map_err(LayoutError::Unreadable)
            .and_then(|range| Layout::new(range, &cpus.iter().collect::<CpuMask>())),
        None => Layout::of_this_machine(),
    };
    layout.map_err(|error| failure(error.into()))
}

fn trial_text(trial: &Trial, to: SocketAddr) -> String {
    match &trial.processed_on {
        Ok(cpu) if trial.is_local() => format!("opened on CPU {cpu}, processed there"),
        Ok(cpu) => format!("opened on CPU {}, processed on CPU {cpu}", trial.cpu),
        Err(error) => format!("opened on CPU {}: no connection to {to}: {error}", trial.cpu),
    }
}

fn show(iface: &str, steering: &Steering, connects: Option<&ConnectPrograms>, json: bool) -> Result<(), Failure> {
    let (frames, targets) = counted(steering)?;
    let connections = connects.map(ConnectPrograms::counters).transpose().map_err(failure)?;
    let text = if json {
        json_line(&CountersDocument {
            schema: SCHEMA,
            interface: iface,
            mode: steering.mode().map(|mode| mode.to_string()),
            frames: by_name(&frames),
            targets: targets.iter().copied().collect(),
            connections: connections.as_deref().map(by_name),
        })?
    } else {
        counters_text(&frames, &targets, connections.as_deref().unwrap_or_default())
    };
    print(text.as_bytes())
}

/// CPUs, and the frames that went to each.
type Targets = Vec<(usize, u64)>;

/// Frames by what became of them and by the CPU they went to, of one moment: what comes between the two is counted in both. Where
/// frames never stop, those of the last try.
fn counted(steering: &Steering) -> Result<(Vec<Counter>, Targets), Failure> {
    const TRIES: usize = 16;
    let mut frames = steering.counters().map_err(failure)?;
    let mut targets = Targets::new();
    for _ in 0..TRIES {
        targets = steering.targets().map_err(failure)?;
        let now = steering.counters().map_err(failure)?;
        if now == frames {
            break;
        }
        frames = now;
    }
    Ok((frames, targets))
}

/// Counters that are not zero, with the CPUs that counted.
fn counters_text(frames: &[Counter], targets: &[(usize, u64)], connections: &[Counter]) -> String {
    let mut out = String::new();
    for (title, counters) in [("frames", frames), ("connections", connections)] {
        let counters = counters.iter().filter(|counter| counter.total() > 0);
        for (at, counter) in counters.enumerate() {
            if at == 0 {
                let _ = writeln!(out, "{title}");
            }
            let cpus = counter.per_cpu.iter().enumerate().filter(|(_, value)| **value > 0);
            let cpus: Vec<String> = cpus.map(|(cpu, value)| format!("{cpu}:{value}")).collect();
            let _ =
                writeln!(out, "  {:<18} {:>12}  {} [{}]", counter.name, counter.total(), counter.help, cpus.join(" "));
        }
    }
    let _ = writeln!(out, "frames for");
    for (cpu, count) in targets {
        let _ = writeln!(out, "  CPU {cpu:<14} {count:>12}");
    }
    out
}

fn layout_text(layout: &Layout, range: PortRange) -> String {
    let mut out = String::new();
    let used = layout.ports_per_cpu() as usize * layout.cpus().len();
    let all = usize::from(range.high.saturating_sub(range.low)) + 1;
    let _ = writeln!(
        out,
        "port layout {layout}: {} ports for each of {} CPUs, {used} of the {all} from {} to {}",
        layout.ports_per_cpu(),
        layout.cpus().len(),
        range.low,
        range.high
    );
    for chunk in chunks(layout) {
        let _ = writeln!(
            out,
            "  CPU {:<4} ports {:>5} to {:>5}  NIC match: dst-port {} m {:#06x}",
            chunk.cpu,
            chunk.low,
            chunk.high,
            chunk.low,
            layout.ports_per_cpu() - 1
        );
    }
    out
}

fn chunks(layout: &Layout) -> Vec<ChunkDocument> {
    let chunk = |cpu: usize| layout.ports_of(cpu).map(|ports| ChunkDocument { cpu, low: ports.low, high: ports.high });
    layout.cpus().iter().filter_map(chunk).collect()
}

#[derive(Debug, Serialize)]
struct LayoutDocument {
    schema: &'static str,
    layout: String,
    range: [u16; 2],
    ports_per_cpu: u32,
    chunks: Vec<ChunkDocument>,
}

#[derive(Debug, Serialize)]
struct ChunkDocument {
    cpu: usize,
    low: u16,
    high: u16,
}

impl LayoutDocument {
    fn new(layout: &Layout, range: PortRange) -> Self {
        Self {
            schema: SCHEMA,
            layout: layout.to_string(),
            range: [range.low, range.high],
            ports_per_cpu: layout.ports_per_cpu(),
            chunks: chunks(layout),
        }
    }
}

#[derive(Debug, Serialize)]
struct CountersDocument<'a> {
    schema: &'static str,
    interface: &'a str,
    mode: Option<String>,
    /// Per counter: its value on each CPU, by number.
    frames: BTreeMap<&'static str, &'a [u64]>,
    /// Frames by the CPU they were meant for.
    targets: BTreeMap<usize, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connections: Option<BTreeMap<&'static str, &'a [u64]>>,
}

fn by_name(counters: &[Counter]) -> BTreeMap<&'static str, &[u64]> {
    counters.iter().map(|counter| (counter.name, counter.per_cpu.as_slice())).collect()
}

fn failure(error: FlowError) -> Failure {
    let status = match &error {
        FlowError::NotPermitted { .. } => Status::NoPermission,
        FlowError::Unreadable { .. } | FlowError::BadPolicy { .. } => Status::NoInput,
        FlowError::TooManyPolicies { .. } => Status::Usage,
        FlowError::BadCpu { .. } => Status::Data,
        FlowError::System { .. } => Status::Os,
        _ => Status::Unavailable,
    };
    Failure::new(status, one_line(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_shown() {
        let range = PortRange { low: 32768, high: 60999 };
        let layout = Layout::new(range, &"0,3".parse().unwrap()).unwrap();
        assert_eq!(
            layout_text(&layout, range),
            "port layout 13:4:0,3: 8192 ports for each of 2 CPUs, 16384 of the 28232 from 32768 to 60999\n  \
             CPU 0    ports 32768 to 40959  NIC match: dst-port 32768 m 0x1fff\n  \
             CPU 3    ports 40960 to 49151  NIC match: dst-port 40960 m 0x1fff\n"
        );
        let json: serde_json::Value =
            serde_json::from_str(&json_line(&LayoutDocument::new(&layout, range)).unwrap()).unwrap();
        assert_eq!(json["schema"], SCHEMA);
        assert_eq!(json["layout"], "13:4:0,3");
        assert_eq!(json["chunks"][1], serde_json::json!({"cpu": 3, "low": 40960, "high": 49151}));
    }

    #[test]
    fn counters_that_are_zero_are_left_out() {
        let counter = |name, per_cpu: &[u64]| Counter { name, help: "help", per_cpu: per_cpu.to_vec() };
        let text = counters_text(&[counter("local", &[0, 3, 4]), counter("redirected", &[0; 3])], &[(1, 3)], &[]);
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.contains("local") && text.contains("7  help [1:3 2:4]") && !text.contains("redirected"), "{text}");
    }
}
