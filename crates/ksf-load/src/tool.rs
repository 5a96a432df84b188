//! What both tools do with a plan: run the iterations, print, judge.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::args::Plan;
use crate::columns::{History, Style, header, row};
use crate::driver::{RunResult, answering_endpoints, run_once};
use crate::error::LoadError;
use crate::exchange::End;
use crate::pin::allowed_cpus;
use crate::progress::ProgressLine;
use crate::protocol::Factory;
use crate::record::{Fault, Faults, Latencies};
use crate::report::hdr::{self, Interval};
use crate::report::json::{
    Config, FORMAT, LatencyReport, Machine, Report, RunReport, Spread, TargetReport, Total, VERSION, WarningReport,
};
use crate::report::{raw, svg};
use crate::stats::Summary;
use crate::warn::{Warning, about_plan, about_run};

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
pub(crate) fn with_process_io(
    work: impl FnOnce(&mut Io<'_>) -> Result<Outcome, LoadError>,
) -> Result<Outcome, LoadError> {
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
    let mut session = Session::new(plan, style);
    if plan.verbose > 0 {
        session.introduce(factory.request_bytes(), message, io);
    }
    if plan.header && !plan.json {
        session.print(&header(style, plan), io)?;
    }
    let mut progress = ProgressLine::new(plan);
    for number in 1..=plan.iterations {
        let run = run_once(plan, factory, &endpoints, number, io.stop, |at| {
            progress.show(at, io.err);
        });
        progress.clear(io.err);
        let go_on = session.take(&run?, io)?;
        if io.stop.load(Ordering::Relaxed) || !go_on {
            break;
        }
    }
    session.finish(Config::of(plan, factory.request_bytes(), message), io)
}

/// The iterations so far.
struct Session<'a> {
    plan: &'a Plan,
    style: Style,
    history: History,
    runs: Vec<RunReport>,
    /// Kept only if they will be written.
    intervals: Vec<Interval>,
    latencies: Latencies,
    faults: Faults,
    messages: u64,
    notes: Vec<String>,
    warnings: Vec<Warning>,
    addresses: Vec<String>,
    ok: bool,
    interrupted: bool,
    /// The reader of stdout has gone; there is no point in going on.
    closed: bool,
}

/// The most faults that are described at the end.
const NOTES_MAX: usize = 10;

impl<'a> Session<'a> {
    fn new(plan: &'a Plan, style: Style) -> Session<'a> {
        Session {
            plan,
            style,
            history: History::default(),
            runs: Vec::new(),
            intervals: Vec::new(),
            latencies: Latencies::new(),
            faults: Faults::default(),
            messages: 0,
            notes: Vec::new(),
            warnings: about_plan(plan, &allowed_cpus()),
            addresses: Vec::new(),
            ok: true,
            interrupted: false,
            closed: false,
        }
    }

    fn introduce(&self, request_bytes: usize, message: &[(&str, String)], io: &mut Io<'_>) {
        let plan = self.plan;
        let message: Vec<String> = message.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let cpus: Vec<String> = (0..plan.threads)
            .map(|thread| plan.pinning.cpu_of(thread, plan.threads, &allowed_cpus()))
            .map(|cpu| cpu.map_or("any".into(), |cpu| cpu.to_string()))
            .collect();
        self.say(
            &format!(
                "{} over {}, requests of {request_bytes} bytes ({}), threads on CPU {}, \
                 clock CLOCK_MONOTONIC, histogram 1 ns to 1 h with 3 digits",
                plan.target,
                plan.socket.transport.name(),
                message.join(", "),
                cpus.join(" ")
            ),
            io,
        );
    }

    /// Takes a run's results; returns whether another run makes sense.
    fn take(&mut self, run: &RunResult, io: &mut Io<'_>) -> Result<bool, LoadError> {
        let summary = Summary::of(run);
        self.history.add(&summary);
        self.latencies.merge(&summary.latencies);
        self.faults.merge(&summary.faults);
        self.messages += summary.messages;
        self.ok &= summary.is_clean();
        self.interrupted |= run.threads.iter().any(|thread| thread.end == End::Interrupted);
        self.collect_notes(run, &summary);
        for warning in about_run(self.plan, run, &summary) {
            // The first of a kind speaks for all runs.
            if self.warnings.iter().all(|have| have.code != warning.code) {
                self.warnings.push(warning);
            }
        }
        for thread in &run.threads {
            let address = thread.peer.to_string();
            if !self.addresses.contains(&address) {
                self.addresses.push(address);
            }
        }
        if !self.plan.json {
            let line = row(self.style, self.plan, &summary, &self.history);
            self.print(&line, io)?;
        }
        if let Some(dir) = &self.plan.histogram_dir {
            raw::write_run(dir, self.plan.tool, run, &summary)?;
        }
        if self.plan.hdr.as_deref().is_some_and(|path| !hdr::is_text(path)) {
            self.intervals.push(Interval {
                started_unix_s: summary.started_unix_s,
                wall_s: summary.wall_s,
                latencies: summary.latencies.clone(),
            });
        }
        // Kept for the document and for embedding programs; an endless run without --json must not grow.
        if self.plan.json || self.plan.iterations != u64::MAX {
            self.runs.push(RunReport::of(run, &summary, self.plan));
        }
        Ok(summary.failures.is_empty() && !self.closed)
    }

    fn collect_notes(&mut self, run: &RunResult, summary: &Summary) {
        for (number, thread) in run.threads.iter().enumerate() {
            for note in &thread.record.notes {
                if self.notes.len() < NOTES_MAX {
                    self.notes.push(format!("run {}, thread {number}: {note}", run.number));
                }
            }
        }
        for failure in &summary.failures {
            let told = self.notes.iter().any(|note| note.contains(failure));
            if !told && self.notes.len() < NOTES_MAX {
                self.notes.push(format!("run {}: {failure}", run.number));
            }
        }
    }

    fn finish(mut self, config: Config, io: &mut Io<'_>) -> Result<Outcome, LoadError> {
        self.write_files()?;
        self.tell_faults(io);
        for warning in &self.warnings {
            self.say(&format!("warning: {}", warning.text), io);
        }
        let report = self.report(config);
        if self.plan.json {
            let text = serde_json::to_string_pretty(&report).map_err(|error| LoadError::Output(error.into()))?;
            self.print(&text, io)?;
        }
        Ok(Outcome { report })
    }

    fn write_files(&self) -> Result<(), LoadError> {
        let title = format!("{} {}", self.plan.tool, self.plan.target);
        if let Some(path) = &self.plan.hdr {
            raw::create(path, |out| match hdr::is_text(path) {
                true => hdr::write_text(out, &self.latencies),
                false => hdr::write_log(out, &title, &self.intervals),
            })?;
        }
        if let Some(path) = &self.plan.svg {
            svg::write_file(path, &title, &self.latencies)?;
        }
        Ok(())
    }

    fn tell_faults(&self, io: &mut Io<'_>) {
        if self.ok {
            return;
        }
        let counts: Vec<String> = Fault::ALL
            .iter()
            .filter(|kind| self.faults.count(**kind) > 0)
            .map(|kind| format!("{} {}", self.faults.count(*kind), kind.name()))
            .collect();
        let counts = match counts.is_empty() {
            true => "the connection failed".to_string(),
            false => counts.join(", "),
        };
        self.say(&format!("error: not every reply was right: {counts}; {} correct", self.messages), io);
        for note in &self.notes {
            self.say(&format!("  {note}"), io);
        }
        let all: u64 = self.faults.total();
        if all > self.notes.len() as u64 {
            self.say("  ... (only the first are described)", io);
        }
    }

    fn report(&self, config: Config) -> Report {
        Report {
            format: FORMAT.into(),
            version: VERSION,
            tool: self.plan.tool.into(),
            tool_version: env!("CARGO_PKG_VERSION").into(),
            machine: Machine::this(),
            target: TargetReport {
                name: self.plan.target.to_string(),
                transport: self.plan.socket.transport.name().into(),
                addresses: self.addresses.clone(),
            },
            config,
            runs: self.runs.clone(),
            total: Total {
                runs: self.history.runs(),
                messages: self.messages,
                faults: self.faults.total(),
                rate_per_s: Spread::of(self.history.rate_per_s()),
                median_latency_us: Spread::of(self.history.median_us()),
                latency: LatencyReport::of(&self.latencies, &self.plan.quantiles),
            },
            warnings: self.warnings.iter().map(WarningReport::of).collect(),
            notes: self.notes.clone(),
            interrupted: self.interrupted,
            ok: self.ok,
        }
    }

    /// A line of results. A closed pipe ends the measurement quietly.
    fn print(&mut self, line: &str, io: &mut Io<'_>) -> Result<(), LoadError> {
        match writeln!(io.out, "{line}").and_then(|()| io.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            result => result.map_err(LoadError::Output),
        }
    }

    /// A line of talk. If nobody can hear it, nothing is lost.
    fn say(&self, line: &str, io: &mut Io<'_>) {
        let _ = writeln!(io.err, "{}: {line}", self.plan.tool);
    }
}
