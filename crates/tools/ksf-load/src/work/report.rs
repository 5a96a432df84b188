//! What worktest prints: a table, or the JSON document of docs/formats/load-json.md.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::ideal::Ideal;
use super::mix::Class;
use super::{WorkPlan, WorktestArgs};
use crate::record::run::RunRecord;
use crate::record::running;
use crate::record::{Fault, Faults, Latencies};
use crate::report::document::{
    CallsReport, Document, LatencyReport, OpenReport, SpinReport, TargetReport, micro, milli, nano,
};
use crate::report::warn::{self, Warning};

/// The name of the document's format.
pub const FORMAT: &str = "ksf-worktest";

/// The whole document.
pub type WorkReport = Document<WorkBody>;

/// What was asked for and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkBody {
    /// What was asked for, with defaults filled in.
    pub config: WorktestArgs,
    /// What was measured.
    pub run: WorkRunReport,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkRunReport {
    /// Start, seconds since the epoch; 0 for a simulation.
    pub started_unix_s: f64,
    /// From the start to the last reply.
    pub wall_s: f64,
    /// Correct replies.
    pub messages: u64,
    /// Correct replies per second.
    pub rate_per_s: f64,
    /// All of them in one distribution.
    pub latency: LatencyReport,
    /// The quick ones and, if there are any, the slow ones.
    pub classes: Vec<ClassReport>,
    /// One per connection.
    pub connections: Vec<ConnectionReport>,
    /// The CPU the generator was bound to.
    pub cpu: Option<usize>,
    /// User and system time of the generator.
    pub cpu_s: f64,
    /// The same per correct reply.
    pub cpu_us_per_message: f64,
    /// Time the generator was ready but waited for its CPU.
    pub runqueue_wait_s: f64,
    /// System calls on the connections.
    pub calls: CallsReport,
    /// Wrong and missing replies by kind.
    pub faults: BTreeMap<String, u64>,
    /// Replies that came after the reply to a younger request of their connection.
    pub reordered: u64,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
    /// Only with `--spin`.
    pub spin: Option<SpinReport>,
}

/// The messages of one class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassReport {
    /// `quick` or `slow`.
    pub name: String,
    /// Correct replies.
    pub messages: u64,
    /// Correct replies per second.
    pub rate_per_s: f64,
    /// Of the correct replies.
    pub latency: LatencyReport,
}

/// The messages of one connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionReport {
    /// Correct replies.
    pub messages: u64,
    /// Exact.
    pub mean_us: f64,
}

/// The report of a run against a server, and the latencies of all messages.
pub(super) fn of_run(plan: &WorkPlan, run: &RunRecord<()>) -> (WorkReport, Latencies) {
    let record = &run.record;
    let thread = &run.threads[0];
    let report = WorkRunReport {
        started_unix_s: micro(run.started_unix_s),
        connections: thread
            .peers
            .iter()
            .map(|(_, share)| ConnectionReport {
                messages: share.answered,
                mean_us: milli(share.sum_ns as f64 / share.answered.max(1) as f64 / 1e3),
            })
            .collect(),
        cpu: thread.cpu,
        cpu_s: nano(run.cpu_s()),
        cpu_us_per_message: milli(run.cpu_us_per_reply()),
        runqueue_wait_s: nano(thread.runqueue_wait_ns as f64 / 1e9),
        calls: CallsReport::of(&record.calls),
        faults: record.faults.by_name(Fault::OF_WORK),
        reordered: record.reordered,
        open: run.lateness.as_ref().map(OpenReport::of),
        spin: SpinReport::of(&plan.drive, run),
        ..WorkRunReport::of(&run.latencies, &record.latencies, run.wall_s())
    };
    let target = plan.target.as_ref().map(|target| TargetReport {
        name: target.to_string(),
        transport: plan.socket.transport.name().into(),
        addresses: run.addresses(),
    });
    let mut document = Document::new(FORMAT, target, WorkBody { config: plan.args.clone(), run: report });
    document.warn(warnings(plan, run));
    document.notes = record.notes.iter().map(|note| format!("connection {}: {}", note.connection, note.text)).collect();
    document.interrupted = run.is_interrupted();
    document.ok = record.is_clean();
    (document, run.latencies.clone())
}

/// The report of a simulation, and the latencies of all messages.
pub(super) fn of_ideal(plan: &WorkPlan, ideal: &Ideal) -> (WorkReport, Latencies) {
    let all = Latencies::sum(&ideal.latencies);
    let run = WorkRunReport::of(&all, &ideal.latencies, ideal.end_ns as f64 / 1e9);
    (Document::new(FORMAT, None, WorkBody { config: plan.args.clone(), run }), all)
}

impl WorkRunReport {
    /// Of latencies alone.
    fn of(all: &Latencies, by_class: &[Latencies], wall_s: f64) -> WorkRunReport {
        let per_s = |latencies: &Latencies| milli(running::per(latencies.count() as f64, wall_s));
        let classes = Class::ALL.into_iter().zip(by_class);
        let classes = classes.filter(|(class, latencies)| *class == Class::Quick || !latencies.is_empty());
        WorkRunReport {
            started_unix_s: 0.0,
            wall_s: nano(wall_s),
            messages: all.count(),
            rate_per_s: per_s(all),
            latency: LatencyReport::of(all, &[]),
            classes: classes
                .map(|(class, latencies)| ClassReport {
                    name: class.name().into(),
                    messages: latencies.count(),
                    rate_per_s: per_s(latencies),
                    latency: LatencyReport::of(latencies, &[]),
                })
                .collect(),
            connections: Vec::new(),
            cpu: None,
            cpu_s: 0.0,
            cpu_us_per_message: 0.0,
            runqueue_wait_s: 0.0,
            calls: CallsReport { sends: 0, receives: 0, replies_per_receive_max: 0 },
            faults: Faults::default().by_name(Fault::OF_WORK),
            reordered: 0,
            open: None,
            spin: None,
        }
    }

    /// The table for people.
    pub(crate) fn table(&self, header: bool) -> String {
        let mut out = String::new();
        if header {
            let _ = writeln!(
                out,
                "{:<6} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
                "class", "replies", "replies/s", "mean us", "stdev us", "p50 us", "p99 us", "p99.9 us", "max us"
            );
        }
        let mut row = |name: &str, messages: u64, rate: f64, latency: &LatencyReport| {
            let _ = writeln!(
                out,
                "{name:<6} {messages:>9} {rate:>10.0} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                latency.mean_us,
                latency.stdev_us,
                latency.at(50.0),
                latency.at(99.0),
                latency.at(99.9),
                latency.max_us
            );
        };
        row("all", self.messages, self.rate_per_s, &self.latency);
        if self.classes.len() > 1 {
            for class in &self.classes {
                row(&class.name, class.messages, class.rate_per_s, &class.latency);
            }
        }
        if let Some(spin) = &self.spin {
            let _ = writeln!(out, "spin   {}", spin.in_words());
        }
        out
    }

    /// "3 lost, 1 duplicate".
    pub(crate) fn faults(&self) -> String {
        let faults = self.faults.iter().filter(|(_, count)| **count > 0);
        faults.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    }
}

/// Reasons to believe that the generator and not the server was the limit.
fn warnings(plan: &WorkPlan, run: &RunRecord<()>) -> Vec<Warning> {
    let drive = &plan.drive;
    let room = format!("{} in flight on their connection", drive.in_flight);
    let schedule = warn::schedule(drive, run, &room, "-a");
    let busy = warn::busy_generator(drive, run, true, "give this program a CPU of its own (--cpu)");
    busy.into_iter().chain(schedule).collect()
}
