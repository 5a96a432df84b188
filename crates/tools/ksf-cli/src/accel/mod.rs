//! `ksf accel`: makes the machine, and programs nobody changes, serve connections where they arrive.

mod attach;
mod flow;
mod nic;
mod profile;
mod run;
mod status;
mod switch;
mod unit;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};

use crate::manager;
use crate::output::Failure;
use crate::signals::{Event, Events};

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
    Nic(nic::NicArgs),
    /// The process that owns a program's queues; started by `ksf accel run`
    #[command(hide = true)]
    Holder,
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
        AccelCommand::Nic(args) => nic::run(args),
        AccelCommand::Holder => run::holder(),
    }
}

/// How often something that runs in the foreground is asked for news.
const LOOK: Duration = Duration::from_millis(250);

/// When [`until_stopped`] calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Now and then: is there news?
    Look,
    /// The counters are to be shown.
    Show,
}

/// Calls until a signal asks to stop: every [`LOOK`], every `watch_s` for the counters if they are wanted, and a last time.
fn until_stopped(
    signals: &Events,
    watch_s: Option<u64>,
    mut at: impl FnMut(Moment) -> Result<(), Failure>,
) -> Result<ExitCode, Failure> {
    let period = watch_s.map(Duration::from_secs);
    let mut next = period.map(|period| Instant::now() + period);
    loop {
        match signals.next(LOOK) {
            Some(Event::Stop) => break,
            // Nothing to read again.
            Some(Event::Reload) | None => {}
        }
        at(Moment::Look)?;
        if let (Some(period), Some(due)) = (period, next)
            && Instant::now() >= due
        {
            next = Some(due + period);
            at(Moment::Show)?;
        }
    }
    manager::stopping();
    at(Moment::Show)?;
    Ok(ExitCode::SUCCESS)
}
