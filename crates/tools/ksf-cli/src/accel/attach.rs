//! `ksf accel attach`: a program that runs already gets connections on the CPU where they arrive.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ksf::cpus::CpuSet;
use ksf_accel::AccelOptions;
use ksf_accel::attach::Attached;

use super::run::{failure, usable};
use crate::output::{Failure, say};
use crate::signals::{Event, Events};

/// How long the end of the program may go unnoticed.
const LOOK: Duration = Duration::from_millis(200);

/// Steer connections to the processes of a running program, until interrupted; then everything is as before
///
/// For programs whose processes have a socket each on the same address (SO_REUSEPORT): copies of a Go program, nginx with
/// reuseport. Each process gets the connections that arrive on its CPU. A program whose workers share one socket must be
/// started by ksf accel run.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// Process ids; their descendants are found
    #[arg(required = true, value_name = "PID", value_parser = crate::number::number::<1, 4_194_304>)]
    pids: Vec<u64>,
    /// CPUs that processes may be at home on, as in 0-3,8 [default: those they may run on]
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuSet>,
    /// Leave processes where the kernel puts them, instead of binding each to its CPU
    #[arg(long)]
    no_pin: bool,
}

/// Runs the command.
pub(super) fn run(args: &AttachArgs) -> Result<ExitCode, Failure> {
    let signals = Events::take().map_err(|error| Failure::os("cannot take over the signals", &error))?;
    let mut options = AccelOptions::default();
    options.cpus = args.cpus.as_ref().map(usable).transpose()?;
    options.pin = !args.no_pin;
    let pids: Vec<u32> = args.pids.iter().map(|pid| *pid as u32).collect();
    let attached = Attached::new(&pids, options).map_err(|error| failure(&error))?;
    describe(&attached);
    while !attached.has_ended() {
        if signals.next(LOOK) == Some(Event::Stop) {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One line for each listener that there is now.
fn describe(attached: &Attached) {
    let Ok(status) = attached.status() else { return };
    if status.listeners.is_empty() {
        say(&"the program does not listen on TCP yet");
    }
    for listener in &status.listeners {
        match &listener.not_accelerated {
            Some(why) => say(&format_args!("{} is not accelerated: {why}", listener.address)),
            None => say(&format_args!("{} is steered to {} processes", listener.address, listener.queues.len())),
        }
    }
}
