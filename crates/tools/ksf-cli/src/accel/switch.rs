//! `ksf accel pause` and `resume`: loaded but off, and on again, while the program runs.

use std::process::ExitCode;

use clap::Args;
use ksf_accel::status;

use super::run::failure;
use super::status::of_process;
use crate::output::{Failure, say};

/// Send connections of a program to its own listener again, until ksf accel resume
///
/// The library stays loaded and queues stay open: what waits in them is accepted. Nothing else changes, so that a program
/// can be compared with itself.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    program: Wanted,
}

/// Steer connections of a program again, that was paused or started with --off
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    program: Wanted,
}

#[derive(Debug, Args)]
struct Wanted {
    /// Process id of the program, of one of its workers, or of its holder
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
}

/// Runs `pause`.
pub(super) fn pause(args: &PauseArgs) -> Result<ExitCode, Failure> {
    switch(&args.program, status::pause, "is switched off: its own listener takes all connections")
}

/// Runs `resume`.
pub(super) fn resume(args: &ResumeArgs) -> Result<ExitCode, Failure> {
    switch(&args.program, status::resume, "is switched on")
}

type Switch = fn(&std::path::Path) -> Result<status::Status, ksf_accel::AccelError>;

fn switch(wanted: &Wanted, switch: Switch, what: &str) -> Result<ExitCode, Failure> {
    for (socket, _) in of_process(wanted.pid)? {
        let now = switch(&socket).map_err(|error| failure(&error))?;
        say(&format_args!("{} (holder {}) {what}", now.program.join(" "), now.pid));
    }
    Ok(ExitCode::SUCCESS)
}
