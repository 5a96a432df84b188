//! `ksf accel run`: an unmodified program with an accept queue for each of its workers.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::{Args, ValueEnum, ValueHint};
use ksf::cpus::CpuSet;
use ksf_accel::copies::Copies;
use ksf_accel::flow::{CpuMask, Layout, LayoutError, PortRange, source_port};
use ksf_accel::program::{self, Obstacle};
use ksf_accel::run::{Prepared, holder_main, prepare};
use ksf_accel::{AccelError, AccelOptions, Level};

use super::profile;
use crate::library;
use crate::output::{Failure, Status, say};

/// Its name where it is installed, and where it is built.
pub(super) const LIBRARY: [&str; 2] = ["libksf_accel.so", "libksf_preload.so"];

/// Run a program with an accept queue for each worker, so that it accepts connections on the CPU where they arrive
///
/// The program is started as it is: process id, signals and exit status are its own. A second process, the holder, owns
/// the queues and ends with the program. A program that cannot be helped is run all the same, and a line says why.
/// `ksf accel status` shows what is accelerated; docs/accel.md explains it.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// CPUs that workers may be at home on, as in 0-3,8 [default: those the program may run on]
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuSet>,
    /// Leave threads where the kernel puts them, instead of binding each worker to its CPU
    #[arg(long)]
    no_pin: bool,
    /// What brings connections to queues
    #[arg(long, value_enum, value_name = "STEP", default_value_t)]
    steering: SteeringFlag,
    /// What is known of the program (ksf accel profile) [default: by the name of its file]
    #[arg(long, value_name = "NAME", value_parser = profile::names(), conflicts_with = "copies")]
    profile: Option<String>,
    /// Load everything, and steer nothing: for comparison
    #[arg(long)]
    off: bool,
    /// Run so many copies that share their port, each on a CPU: for static and Go programs, which no library can help
    ///
    /// The copies are children of ksf, which passes signals on and ends when the last has ended, with the first status that
    /// is not 0. They know nothing of each other: not for programs that keep state or write files of fixed names.
    #[arg(long, value_name = "N", conflicts_with = "steering")]
    #[arg(value_parser = crate::number::number::<1, { ksf_accel::copies::COPIES_MAX as u64 }>)]
    copies: Option<u64>,
    /// Give connections that the program opens a source port that names the CPU, for ksf accel flow to bring replies there;
    /// LAYOUT as ksf accel flow check shows it [default: that of --cpus, or of the program's CPUs]
    #[arg(long, value_name = "LAYOUT", num_args = 0..=1, require_equals = true, conflicts_with = "copies")]
    source_ports: Option<Option<Layout>>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum SteeringFlag {
    /// The best that works here
    #[default]
    Auto,
    /// An sk_lookup program: needs CAP_BPF and CAP_NET_ADMIN, Linux 5.9
    Lookup,
    /// A classic BPF program that knows the CPU only: needs no rights
    Classic,
    /// Nothing: all workers share the program's listener
    Plain,
}

impl SteeringFlag {
    fn level(self) -> Option<Level> {
        Some(match self {
            SteeringFlag::Auto => return None,
            SteeringFlag::Lookup => Level::SkLookup,
            SteeringFlag::Classic => Level::ClassicBpf,
            SteeringFlag::Plain => Level::Plain,
        })
    }
}

/// Becomes the program, or waits for its copies.
pub(super) fn run(args: &RunArgs) -> Result<ExitCode, Failure> {
    match args.copies {
        Some(count) => copies(args, count as usize),
        None => match become_program(args)? {},
    }
}

/// Returns only if that fails.
fn become_program(args: &RunArgs) -> Result<Infallible, Failure> {
    let cpus = args.cpus.as_ref().map(usable).transpose()?;
    let ports = args.source_ports.map(|layout| source_ports(layout, cpus.as_deref())).transpose()?.flatten();
    let mut command = command(args)?;
    let name = &args.command[0];
    let Some(file) = program::find(name, std::env::var_os("PATH").as_deref()) else {
        // It will say so, in the kernel's own words.
        return Err(cannot_run(name, &command.exec()));
    };
    let profile = profile::choose(args.profile.as_deref(), &args.command);
    match accelerate(args, &file, cpus, ports) {
        Ok(prepared) => {
            command.envs(prepared.environment);
            if let Some(profile) = profile {
                command.envs(profile.unset_variables());
            }
        }
        Err(why) => say(&format_args!("{} is not accelerated: {why}", Path::new(name).display())),
    }
    Err(cannot_run(name, &command.exec()))
}

/// Runs copies of the program until the last has ended.
fn copies(args: &RunArgs, count: usize) -> Result<ExitCode, Failure> {
    let cpus = args.cpus.as_ref().map(usable).transpose()?;
    command(args)?;
    let mut copies = Copies::start(count, || command(args).unwrap_or_else(|_| Command::new("")), options(args, cpus))
        .map_err(|error| match error {
        AccelError::System { action: "starting the program", error } => cannot_run(&args.command[0], &error),
        error => failure(&error),
    })?;
    if let Some(error) = copies.not_steered() {
        say(&format_args!("the kernel chooses among the copies, not their CPU: {error}"));
    }
    while let Some((pid, status)) = copies.wait() {
        if !status.success() && !copies.pids().is_empty() {
            say(&format_args!("copy {pid} has ended ({status}); the others serve on"));
        }
    }
    let status = copies.status();
    // As a shell tells of a signal.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(code as u8))
}

fn command(args: &RunArgs) -> Result<Command, Failure> {
    let (name, arguments) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::new(Status::Usage, "no program was given").remedy("see ksf accel run --help"))?;
    let mut command = Command::new(name);
    command.args(arguments);
    Ok(command)
}

fn cannot_run(name: &OsStr, error: &std::io::Error) -> Failure {
    let what = format!("cannot run {}", Path::new(name).display());
    match error.kind() {
        std::io::ErrorKind::NotFound => Failure::new(Status::NoInput, format!("{what}: {error}")),
        _ => Failure::os(what, error),
    }
}

fn options(args: &RunArgs, cpus: Option<Vec<u32>>) -> AccelOptions {
    let mut options = AccelOptions::default();
    options.level = args.steering.level();
    options.cpus = cpus;
    options.pin = !args.no_pin;
    options.on = !args.off;
    options.program = args.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    options
}

/// The process of the holder.
pub(super) fn holder() -> Result<ExitCode, Failure> {
    holder_main().map(|()| ExitCode::SUCCESS).map_err(|error| failure(&error))
}

/// A holder for the program, or why there is none.
fn accelerate(args: &RunArgs, file: &Path, cpus: Option<Vec<u32>>, ports: Option<Layout>) -> Result<Prepared, String> {
    if let Some(obstacle) = program::obstacle(file) {
        return Err(format!("{obstacle}{}", advice(&obstacle)));
    }
    let library = library::find(&LIBRARY).map_err(|failure| failure.to_string())?;
    // This very binary, also where it has been replaced since it was started.
    let mut holder = Command::new("/proc/self/exe");
    holder.arg0("ksf").args(["accel", "holder"]);
    let mut options = options(args, cpus);
    options.source_ports = ports.map(|layout| layout.to_string());
    let prepared = prepare(&options, holder, &library).map_err(|error| error.to_string())?;
    let refused = prepared.refused.iter().map(|refused| format!("{}: {}", refused.level.name(), refused.why));
    let refused = refused.collect::<Vec<_>>().join("; ");
    match prepared.level {
        Level::Plain if args.steering != SteeringFlag::Plain => {
            Err(format!("nothing can steer connections here ({refused})"))
        }
        level => {
            if args.steering == SteeringFlag::Auto && level != Level::ALL[0] {
                say(&format_args!("connections are steered by {}, not by better means ({refused})", level.name()));
            }
            Ok(prepared)
        }
    }
}

/// The layout for connections that the program opens, or none where the kernel cannot take ports from a range.
fn source_ports(layout: Option<Layout>, cpus: Option<&[u32]>) -> Result<Option<Layout>, Failure> {
    let own = || match cpus {
        Some(cpus) => {
            let cpus: CpuMask = cpus.iter().map(|cpu| *cpu as usize).collect();
            Layout::new(PortRange::of_this_network().map_err(LayoutError::Unreadable)?, &cpus)
        }
        None => Layout::of_this_machine(),
    };
    let layout = layout.map_or_else(own, Ok).map_err(|error| Failure::new(Status::Unavailable, error.to_string()))?;
    let cpu = layout.cpus().iter().next();
    let tried = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
        .map_err(std::io::Error::from)
        .and_then(|socket| source_port::choose_for_cpu(&layout, socket.as_raw_fd(), cpu.unwrap_or_default()));
    if let Err(error) = tried {
        say(&format_args!(
            "its connections keep the kernel's source ports: IP_LOCAL_PORT_RANGE needs Linux 6.3 ({error})"
        ));
        return Ok(None);
    }
    Ok(Some(layout))
}

fn advice(obstacle: &Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Privileged => "; start it as the user whose rights it takes",
        Obstacle::Static | Obstacle::Go => "; --copies N runs copies of it that share its port, each on a CPU",
        _ => "",
    }
}

/// The CPUs of a list that this process may run on, or why not.
pub(super) fn usable(list: &CpuSet) -> Result<Vec<u32>, Failure> {
    let own =
        CpuSet::of_thread(None).map_err(|error| Failure::os("cannot read which CPUs this process may use", &error))?;
    let usable: Vec<u32> = list.and(&own).iter().map(|cpu| cpu as u32).collect();
    if usable.is_empty() {
        return Err(Failure::new(Status::Unavailable, "this process may use none of the CPUs of --cpus")
            .remedy("see taskset -p $$ for those it may use"));
    }
    Ok(usable)
}

/// A failure of the holder's crate as a line with a status.
pub(super) fn failure(error: &AccelError) -> Failure {
    match error {
        AccelError::System { action, error } => Failure::os(action, error),
        AccelError::Option { .. } => Failure::new(Status::Data, error.to_string()),
        AccelError::Status { .. } | AccelError::Unavailable { .. } => {
            Failure::new(Status::Unavailable, error.to_string())
        }
        _ => Failure::new(Status::Os, error.to_string()),
    }
}
