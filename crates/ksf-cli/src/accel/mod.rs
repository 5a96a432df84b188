//! `ksf accel`: makes the machine, and programs nobody changes, serve connections where they arrive.

mod attach;
mod flow;
mod hop;
mod nic;
mod profile;
mod run;
mod status;
mod switch;
mod unit;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::exit::Failure;

/// Serve connections on the CPU where they arrive
#[derive(Debug, Args)]
pub(crate) struct AccelArgs {
    #[command(subcommand)]
    pub(crate) command: AccelCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AccelCommand {
    Run(run::RunArgs),
    Status(status::StatusArgs),
    Pause(switch::PauseArgs),
    Resume(switch::ResumeArgs),
    Attach(attach::AttachArgs),
    Profile(profile::ProfileArgs),
    Unit(unit::UnitArgs),
    Flow(flow::FlowArgs),
    Hop(hop::HopArgs),
    Nic(nic::NicArgs),
    /// The process that owns a program's queues; started by `ksf accel run`
    #[command(hide = true)]
    Holder(HolderArgs),
}

#[derive(Debug, Args)]
pub(crate) struct HolderArgs {
    #[command(flatten)]
    join: hop::JoinFlags,
}

/// Runs the command.
pub(crate) fn run(args: AccelArgs) -> Result<ExitCode, Failure> {
    match args.command {
        AccelCommand::Run(args) => run::run(&args),
        AccelCommand::Status(args) => status::run(&args),
        AccelCommand::Pause(args) => switch::pause(&args),
        AccelCommand::Resume(args) => switch::resume(&args),
        AccelCommand::Attach(args) => attach::run(&args),
        AccelCommand::Profile(args) => profile::run(&args),
        AccelCommand::Unit(args) => unit::run(&args),
        AccelCommand::Flow(args) => flow::run(args),
        AccelCommand::Hop(args) => hop::run(args),
        AccelCommand::Nic(args) => nic::run(args),
        AccelCommand::Holder(args) => run::holder(&args.join),
    }
}
