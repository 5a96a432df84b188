//! What worktest prints: a table, or the JSON document of docs/formats/load-json.md.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::WorkPlan;
use super::ideal::Ideal;
use super::mix::Class;
use crate::options::name;
use crate::record::run::Run;
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
    pub config: WorkConfig,
    /// What was measured.
    pub run: WorkRunReport,
}

/// What was asked for, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkConfig {
    /// `connection` (closed, a reply makes room on its connection), `window` (closed, on a drawn one) or `open`.
    pub mode: String,
    /// Workers of a simulation; `null` for a real server.
    pub ideal_workers: Option<u64>,
    /// One for each connection.
    pub weights: Vec<u32>,
    /// Per unit of weight; in a window in all; in an open loop the most per connection.
    pub in_flight: u64,
    /// `inline`, `discard`, `sleep` or `compute`.
    pub kind: String,
    /// The whole request.
    pub request_bytes: u64,
    /// Least time of work; 0 where the kind does none.
    pub work_min_us: u64,
    /// Most time of work.
    pub work_max_us: u64,
    /// Messages in a hundred that take longer; 0 for none.
    pub slow_percent: f64,
    /// How long those take; `null` for none.
    pub slow_work_us: Option<u64>,
    /// Messages over all connections; `null` for no limit.
    pub messages: Option<u64>,
    /// `null` for no limit.
    pub duration_s: Option<f64>,
    /// `off`, `auto` or `fixed`: whether threads poll before they sleep.
    pub spin: String,
    /// The longest that is polled before a sleep.
    pub spin_us: f64,
    /// `null` in a closed loop.
    pub rate_per_s: Option<u64>,
    /// `constant` or `poisson`; `null` in a closed loop.
    pub arrival: Option<String>,
    /// Of all that is drawn.
    pub seed: u64,
    /// Without a reply for this time a message is lost.
    pub timeout_s: f64,
    /// The CPU the generator was bound to.
    pub cpu: Option<usize>,
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
pub(super) fn of_run(plan: &WorkPlan, run: &Run<()>) -> (WorkReport, Latencies) {
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
    let mut config = WorkConfig::of(plan);
    config.cpu = thread.cpu;
    let mut document = Document::new(FORMAT, target, WorkBody { config, run: report });
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
    (Document::new(FORMAT, None, WorkBody { config: WorkConfig::of(plan), run }), all)
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

impl WorkConfig {
    fn of(plan: &WorkPlan) -> WorkConfig {
        let (drive, mix) = (&plan.drive, &plan.mix);
        let (rate_per_s, arrival, _) = drive.pace.in_parts();
        let work = |us: u32| if mix.kind.works() { u64::from(us) } else { 0 };
        WorkConfig {
            mode: match (rate_per_s, drive.spread) {
                (Some(_), _) => "open",
                (None, Some(_)) => "window",
                (None, None) => "connection",
            }
            .into(),
            ideal_workers: plan.ideal_workers.map(|workers| workers as u64),
            weights: drive.weights.clone(),
            in_flight: drive.in_flight as u64,
            kind: name(&mix.kind),
            request_bytes: plan.request_bytes as u64,
            work_min_us: work(mix.work.min_us),
            work_max_us: work(mix.work.max_us),
            slow_percent: mix.slow.map_or(0.0, |slow| slow.percent),
            slow_work_us: mix.slow.map(|slow| slow.work_us.into()),
            messages: drive.requests,
            duration_s: drive.duration.map(|duration| duration.as_secs_f64()),
            spin: drive.spin.name().into(),
            spin_us: drive.spin.limit().as_secs_f64() * 1e6,
            rate_per_s,
            arrival,
            seed: plan.seed,
            timeout_s: drive.terms.timeout_ns as f64 / 1e9,
            cpu: None,
        }
    }
}

/// Reasons to believe that the generator and not the server was the limit.
fn warnings(plan: &WorkPlan, run: &Run<()>) -> Vec<Warning> {
    let drive = &plan.drive;
    let room = format!("{} in flight on their connection", drive.in_flight);
    let schedule = warn::schedule(drive, run, &room, "-a");
    let busy = warn::busy_generator(drive, run, true, "give this program a CPU of its own (--cpu)");
    busy.into_iter().chain(schedule).collect()
}
