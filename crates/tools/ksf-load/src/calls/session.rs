//! The iterations of echotest and rpctest: runs and prints each, keeps what the end needs, and sums up.

use std::sync::atomic::Ordering;

use crate::calls::args::CallPlan;
use crate::calls::columns::{History, Style, header, row};
use crate::calls::progress::ProgressLine;
use crate::calls::report::{CallBody, CallReport, CallRunReport, FORMAT, Spread, Total};
use crate::drive::protocol::{Client, Protocol};
use crate::drive::threads;
use crate::error::LoadError;
use crate::record::run::RunRecord;
use crate::record::{Faults, Latencies};
use crate::report::document::{Document, LatencyReport, TargetReport, print, say};
use crate::report::files::Files;
use crate::report::warn::{self, Warning};
use crate::report::{Io, raw};

/// The most faults that are described.
const NOTES_MAX: usize = 10;

/// What has been measured so far.
struct Session<'a> {
    plan: &'a CallPlan,
    style: Style,
    files: Files,
    history: History,
    runs: Vec<CallRunReport>,
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

/// Runs a checked plan to its end. `message` says what is sent.
pub(crate) fn measure<P: Protocol>(
    mut plan: CallPlan,
    style: Style,
    protocol: &P,
    message: &[(&str, String)],
    io: &mut Io<'_>,
) -> Result<CallReport, LoadError>
where
    P::Client: Client<Counters = ()>,
{
    plan.fit(protocol)?;
    let plan = &plan;
    let mut session = Session::new(plan, style)?;
    if plan.args.verbose > 0 {
        session.introduce(protocol.request_bytes(), message, io);
    }
    let mut progress = ProgressLine::new(plan);
    for number in 1..=plan.iterations {
        let run = threads::run(&plan.drive, protocol, number, io.stop, |at| progress.show(at, io.err));
        progress.clear(io.err);
        let go_on = match run {
            Ok(run) => session.take(&run, io)?,
            // Without any result there is nothing to report but the error.
            Err(error) if number == 1 => return Err(error),
            // What was measured before is still reported.
            Err(error) => {
                session.ok = false;
                session.note(format!("run {number}: {error}"), io);
                false
            }
        };
        if io.stop.load(Ordering::Relaxed) || !go_on {
            break;
        }
    }
    session.finish(protocol.request_bytes(), message, io)
}

impl<'a> Session<'a> {
    fn new(plan: &'a CallPlan, style: Style) -> Result<Session<'a>, LoadError> {
        Ok(Session {
            plan,
            style,
            files: Files::create(&plan.args.output, format!("{} {}", plan.drive.tool, plan.target))?,
            history: History::default(),
            runs: Vec::new(),
            latencies: Latencies::new(),
            faults: Faults::default(),
            messages: 0,
            notes: Vec::new(),
            warnings: warn::shared_cpus(&plan.drive).into_iter().collect(),
            addresses: Vec::new(),
            ok: true,
            interrupted: false,
            header_printed: false,
            closed: false,
        })
    }

    /// `-v`: what is about to be done.
    fn introduce(&self, request_bytes: usize, message: &[(&str, String)], io: &mut Io<'_>) {
        let plan = self.plan;
        let message: Vec<String> = message.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let cpu = |cpu: &Option<usize>| cpu.map_or("any".into(), |cpu| cpu.to_string());
        let cpus: Vec<String> = plan.drive.cpus().iter().map(cpu).collect();
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
    fn take(&mut self, run: &RunRecord<()>, io: &mut Io<'_>) -> Result<bool, LoadError> {
        let record = &run.record;
        self.history.add(run);
        self.latencies.merge(&run.latencies);
        self.faults.merge(&record.faults);
        self.messages += record.answered;
        self.ok &= record.is_clean();
        self.interrupted |= run.is_interrupted();
        for warning in about_run(self.plan, run) {
            // The first of a kind speaks for all runs.
            if self.warnings.iter().all(|have| have.code != warning.code) {
                self.warnings.push(warning);
            }
        }
        for address in run.addresses() {
            if !self.addresses.contains(&address) {
                self.addresses.push(address);
            }
        }
        if !self.plan.args.output.json {
            if !self.plan.args.no_header && !std::mem::replace(&mut self.header_printed, true) {
                self.print(&header(self.style, self.plan), io)?;
            }
            self.print(&row(self.style, self.plan, run, &self.history), io)?;
        }
        self.note_faults(run, io);
        if self.plan.args.verbose > 0 {
            self.say(&details(run), io);
        }
        if let Some(dir) = &self.plan.args.histogram_dir {
            raw::write_run(dir, self.plan.drive.tool, run)?;
        }
        self.files.add_run(run.started_unix_s, run.wall_s(), &run.latencies)?;
        // Kept for the document and for embedding programs; an endless run without --json must not grow.
        if self.plan.args.output.json || self.plan.iterations != u64::MAX {
            self.runs.push(CallRunReport::of(self.plan, run));
        }
        Ok(record.failures.is_empty() && !self.closed)
    }

    /// Writes the files, tells what was wrong, prints the document.
    fn finish(
        self,
        request_bytes: usize,
        message: &[(&str, String)],
        io: &mut Io<'_>,
    ) -> Result<CallReport, LoadError> {
        self.files.finish(&self.latencies)?;
        let plan = self.plan;
        let target = TargetReport {
            name: plan.target.to_string(),
            transport: plan.socket.transport.name().into(),
            addresses: self.addresses,
        };
        let total = Total {
            runs: self.history.runs(),
            messages: self.messages,
            faults: self.faults.total(),
            rate_per_s: Spread::of(self.history.rate_per_s()),
            median_latency_us: Spread::of(self.history.median_us()),
            latency: LatencyReport::of(&self.latencies, &plan.quantiles),
        };
        let body = CallBody {
            tool: plan.drive.tool.into(),
            config: plan.args.clone(),
            request_bytes: request_bytes as u64,
            message: message.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            runs: self.runs,
            total,
        };
        let mut report = Document::new(FORMAT, Some(target), body);
        report.warn(self.warnings);
        (report.notes, report.interrupted, report.ok) = (self.notes, self.interrupted, self.ok);
        let counts = match self.faults.total() {
            0 => "the connection failed".to_owned(),
            _ => self.faults.in_words(),
        };
        let complaint = format!("not every reply was right: {counts}; {} correct", self.messages);
        report.publish(plan.drive.tool, plan.args.output.json, "", &complaint, io)?;
        Ok(report)
    }

    /// The first faults are told when they happen: an endless measurement has no end to tell them at.
    fn note_faults(&mut self, run: &RunRecord<()>, io: &mut Io<'_>) {
        for (index, thread) in run.threads.iter().enumerate() {
            for note in &thread.record.notes {
                self.note(format!("run {}, thread {index}: {}", run.number, note.text), io);
            }
        }
        for failure in &run.record.failures {
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

    /// A line of results. A closed pipe ends the measurement quietly.
    fn print(&mut self, line: &str, io: &mut Io<'_>) -> Result<(), LoadError> {
        self.closed |= !print(&format!("{line}\n"), io)?;
        Ok(())
    }

    fn say(&self, line: &str, io: &mut Io<'_>) {
        say(self.plan.drive.tool, line, io);
    }
}

/// What is doubtful about a run.
fn about_run(plan: &CallPlan, run: &RunRecord<()>) -> Vec<Warning> {
    let remedy = match plan.drive.batch == 1 && !plan.socket.transport.is_datagram() {
        true => "add threads (-j) on CPUs of their own (--cpu), or several messages per send (--batch)",
        false => "add threads (-j) on CPUs of their own (--cpu)",
    };
    let room = format!("{} in flight", plan.drive.in_flight);
    let schedule = warn::schedule(&plan.drive, run, &room, "-a");
    let busy = warn::busy_generator(&plan.drive, run, false, remedy);
    busy.into_iter().chain(schedule).chain(warn::own_drops(run)).collect()
}

/// `-v`: what the table has no column for.
fn details(run: &RunRecord<()>) -> String {
    let record = &run.record;
    format!(
        "run {}: {} sends, {} receives, at most {} replies per receive, {} reordered, client CPU {:.1} % of a CPU",
        run.number,
        record.calls.sends,
        record.calls.receives,
        record.calls.replies_per_receive_max,
        record.reordered,
        100.0 * run.cpu_s() / run.wall_s().max(f64::MIN_POSITIVE)
    )
}
