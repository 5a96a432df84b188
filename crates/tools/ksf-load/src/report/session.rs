//! The iterations of one measurement: prints each, keeps what the end needs, and sums up.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use crate::drive::clock::unix_seconds;
use crate::drive::driver::RunResult;
use crate::drive::exchange::End;
use crate::drive::pin::allowed_cpus;
use crate::error::LoadError;
use crate::options::Plan;
use crate::record::Latencies;
use crate::record::fault::Faults;
use crate::record::stats::Summary;
use crate::report::columns::{History, Style, header, row};
use crate::report::hdr::{self, IntervalLog};
use crate::report::json::{
    Config, FORMAT, LatencyReport, Machine, Report, RunReport, Spread, TargetReport, Total, VERSION, WarningReport,
};
use crate::report::tool::{Io, Outcome};
use crate::report::warn::{Warning, about_plan, about_run};
use crate::report::{raw, svg};

/// The most faults that are described.
const NOTES_MAX: usize = 10;

/// What has been measured so far.
pub(crate) struct Session<'a> {
    plan: &'a Plan,
    style: Style,
    history: History,
    runs: Vec<RunReport>,
    interval_log: Option<IntervalLog<BufWriter<File>>>,
    latencies: Latencies,
    faults: Faults,
    messages: u64,
    notes: Vec<String>,
    warnings: Vec<Warning>,
    addresses: Vec<String>,
    ok: bool,
    interrupted: bool,
    header_printed: bool,
    /// The reader of stdout has gone; there is no point in going on.
    closed: bool,
}

impl<'a> Session<'a> {
    /// Starts with empty result files, so that one that cannot be written is found before the measurement.
    pub(crate) fn new(plan: &'a Plan, style: Style) -> Result<Session<'a>, LoadError> {
        let mut interval_log = None;
        for path in plan.hdr.iter().chain(&plan.svg) {
            let file = File::create(path).map_err(cannot_write(path))?;
            if Some(path) == plan.hdr.as_ref() && !hdr::is_text(path) {
                let log = IntervalLog::new(BufWriter::new(file), &title(plan), unix_seconds());
                interval_log = Some(log.map_err(cannot_write(path))?);
            }
        }
        Ok(Session {
            plan,
            style,
            history: History::default(),
            runs: Vec::new(),
            interval_log,
            latencies: Latencies::new(),
            faults: Faults::default(),
            messages: 0,
            notes: Vec::new(),
            warnings: about_plan(plan, &allowed_cpus()),
            addresses: Vec::new(),
            ok: true,
            interrupted: false,
            header_printed: false,
            closed: false,
        })
    }

    /// `-v`: what is about to be done.
    pub(crate) fn introduce(&self, request_bytes: usize, message: &[(&str, String)], io: &mut Io<'_>) {
        let plan = self.plan;
        let message: Vec<String> = message.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let allowed = allowed_cpus();
        let cpus: Vec<String> = (0..plan.threads)
            .map(|thread| plan.pinning.cpu_of(thread, plan.threads, &allowed))
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
    pub(crate) fn take(&mut self, run: &RunResult, io: &mut Io<'_>) -> Result<bool, LoadError> {
        let summary = Summary::of(run);
        self.history.add(&summary);
        self.latencies.merge(&summary.latencies);
        self.faults.merge(&summary.faults);
        self.messages += summary.messages;
        self.ok &= summary.is_clean();
        self.interrupted |= run.threads.iter().any(|thread| thread.end == End::Interrupted);
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
            if self.plan.header && !std::mem::replace(&mut self.header_printed, true) {
                self.print(&header(self.style, self.plan), io)?;
            }
            self.print(&row(self.style, self.plan, &summary, &self.history), io)?;
        }
        self.note_faults(run, &summary, io);
        if self.plan.verbose > 0 {
            self.say(&details(&summary), io);
        }
        self.write_run_files(run, &summary)?;
        // Kept for the document and for embedding programs; an endless run without --json must not grow.
        if self.plan.json || self.plan.iterations != u64::MAX {
            self.runs.push(RunReport::of(run, &summary, self.plan));
        }
        Ok(summary.failures.is_empty() && !self.closed)
    }

    /// A later run could not even start: what was measured before is still reported.
    pub(crate) fn cannot_go_on(&mut self, run: u64, error: &LoadError, io: &mut Io<'_>) -> bool {
        self.ok = false;
        self.note(format!("run {run}: {error}"), io);
        false
    }

    /// Writes the files, tells what was wrong, prints the document.
    pub(crate) fn finish(mut self, config: Config, io: &mut Io<'_>) -> Result<Outcome, LoadError> {
        self.write_final_files()?;
        self.sum_up_faults(io);
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

    /// The first faults are told when they happen: an endless measurement has no end to tell them at.
    fn note_faults(&mut self, run: &RunResult, summary: &Summary, io: &mut Io<'_>) {
        for thread in &run.threads {
            for note in &thread.record.notes {
                self.note(format!("run {}, thread {}: {note}", run.number, thread.index), io);
            }
        }
        for failure in &summary.failures {
            // Most failures have been described as the fault of the replies that are missing.
            if !self.notes.iter().any(|note| note.contains(failure)) {
                self.note(format!("run {}: {failure}", run.number), io);
            }
        }
    }

    fn note(&mut self, note: String, io: &mut Io<'_>) {
        if self.notes.len() < NOTES_MAX {
            self.say(&note, io);
            self.notes.push(note);
        }
    }

    fn sum_up_faults(&self, io: &mut Io<'_>) {
        if self.ok {
            return;
        }
        let counts = self.faults.in_words();
        let counts = match counts.is_empty() {
            true => "the connection failed".to_string(),
            false => counts,
        };
        self.say(&format!("error: not every reply was right: {counts}; {} correct", self.messages), io);
    }

    fn write_run_files(&mut self, run: &RunResult, summary: &Summary) -> Result<(), LoadError> {
        if let Some(dir) = &self.plan.histogram_dir {
            raw::write_run(dir, self.plan.tool, run, summary)?;
        }
        if let (Some(log), Some(path)) = (&mut self.interval_log, &self.plan.hdr) {
            log.add(summary.started_unix_s, summary.wall_s, &summary.latencies).map_err(cannot_write(path))?;
        }
        Ok(())
    }

    fn write_final_files(&self) -> Result<(), LoadError> {
        if let Some(path) = self.plan.hdr.as_deref().filter(|path| hdr::is_text(path)) {
            raw::create(path, |out| hdr::write_text(out, &self.latencies))?;
        }
        match &self.plan.svg {
            Some(path) => svg::write_file(path, &title(self.plan), &self.latencies),
            None => Ok(()),
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

fn title(plan: &Plan) -> String {
    format!("{} {}", plan.tool, plan.target)
}

fn cannot_write(path: &Path) -> impl Fn(io::Error) -> LoadError + '_ {
    |source| LoadError::CreateFile { path: path.to_path_buf(), source }
}

/// `-v`: what the table has no column for.
fn details(run: &Summary) -> String {
    format!(
        "run {}: {} sends, {} receives, at most {} replies per receive, {} reordered, client CPU {:.1} % of a CPU",
        run.number,
        run.send_calls,
        run.receive_calls,
        run.replies_per_receive_max,
        run.reordered,
        100.0 * run.cpu_s / run.wall_s.max(f64::MIN_POSITIVE)
    )
}
