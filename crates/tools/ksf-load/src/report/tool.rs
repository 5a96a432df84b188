//! What both tools do with a plan: run the iterations, print, judge.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::drive::driver::{answering_endpoints, run_once};
use crate::drive::protocol::Factory;
use crate::error::LoadError;
use crate::options::Plan;
use crate::report::columns::Style;
use crate::report::json::{Config, Report};
use crate::report::progress::ProgressLine;
use crate::report::session::Session;

/// A measurement that took place.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Everything that was measured.
    pub report: Report,
}

impl Outcome {
    /// Whether every reply was right and none is missing.
    pub fn is_ok(&self) -> bool {
        self.report.ok
    }

    /// 0 if every reply was right and none is missing, else 1.
    pub fn exit_code(&self) -> u8 {
        match self.is_ok() {
            true => 0,
            false => 1,
        }
    }
}

/// Where a tool writes, and how it learns that the user wants to stop.
pub struct Io<'a> {
    /// Results.
    pub out: &'a mut dyn Write,
    /// Talk: progress, faults, warnings.
    pub err: &'a mut dyn Write,
    /// Set to end the measurement early; what was measured is still reported.
    pub stop: &'a AtomicBool,
}

/// Runs with stdout, stderr and SIGINT/SIGTERM. A second signal ends the process at once.
pub(crate) fn with_process_io<T>(work: impl FnOnce(&mut Io<'_>) -> Result<T, LoadError>) -> Result<T, LoadError> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut handlers = Vec::new();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let install = || -> io::Result<_> {
            // First the one that looks at the flag, then the one that sets it: so the first signal only sets it.
            let second = signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
            Ok([second, signal_hook::flag::register(signal, Arc::clone(&stop))?])
        };
        handlers.extend(install().map_err(|error| LoadError::system("cannot catch signals", error))?);
    }
    let outcome = work(&mut Io { out: &mut io::stdout(), err: &mut io::stderr(), stop: &stop });
    for handler in handlers {
        signal_hook::low_level::unregister(handler);
    }
    outcome
}

/// Runs a checked plan to its end.
pub(crate) fn measure<F: Factory>(
    plan: &Plan,
    style: Style,
    factory: &F,
    message: &[(&str, String)],
    io: &mut Io<'_>,
) -> Result<Outcome, LoadError> {
    let endpoints = answering_endpoints(plan, factory, plan.target.resolve()?);
    let mut session = Session::new(plan, style)?;
    if plan.verbose > 0 {
        session.introduce(factory.request_bytes(), message, io);
    }
    let mut progress = ProgressLine::new(plan);
    for number in 1..=plan.iterations {
        let run = run_once(plan, factory, &endpoints, number, io.stop, |at| progress.show(at, io.err));
        progress.clear(io.err);
        let go_on = match run {
            Ok(run) => session.take(&run, io)?,
            // Without any result there is nothing to report but the error.
            Err(error) if number == 1 => return Err(error),
            Err(error) => session.cannot_go_on(number, &error, io),
        };
        if io.stop.load(Ordering::Relaxed) || !go_on {
            break;
        }
    }
    session.finish(Config::of(plan, factory.request_bytes(), message), io)
}
