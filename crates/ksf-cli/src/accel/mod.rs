//! `ksf accel`: makes the machine, and programs nobody changes, serve connections where they arrive.

mod flow;
mod hop;
mod nic;

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
    Flow(flow::FlowArgs),
    Hop(hop::HopArgs),
    Nic(nic::NicArgs),
}

/// Runs the command.
pub(crate) fn run(args: AccelArgs) -> Result<ExitCode, Failure> {
    match args.command {
        AccelCommand::Flow(args) => flow::run(args),
        AccelCommand::Hop(args) => hop::run(args),
        AccelCommand::Nic(args) => nic::run(args),
    }
}
