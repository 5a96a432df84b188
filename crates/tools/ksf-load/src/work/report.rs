//! What worktest prints: a table, or the JSON document of docs/formats/worktest.schema.json.
//!
//! Times end in `_s` (seconds) or `_us` (microseconds); absent values are `null`, never left out.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::drive::Ran;
use super::ideal::Ideal;
use super::load::{Class, Kind};
use super::plan::{Pace, Plan};
use crate::drive::open::OpenRecord;
use crate::record::Latencies;
use crate::record::fault::{Fault, Faults};
use crate::record::stats;
use crate::report::json::{Calls, LatencyReport, Machine, OpenReport, TargetReport, WarningReport, micro, milli, nano};
use crate::report::warn;

/// The name of the document's format.
pub const FORMAT: &str = "ksf-worktest";

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const VERSION: u32 = 1;

/// The whole document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// Version of the program.
    pub tool_version: String,
    /// The machine the load came from.
    pub machine: Machine,
    /// Where the load went; `null` for a simulation.
    pub target: Option<TargetReport>,
    /// What was asked for, with defaults filled in.
    pub config: Config,
    /// What was measured.
    pub run: Run,
    /// Reasons to doubt the figures.
    pub warnings: Vec<WarningReport>,
    /// The first few faults in words.
    pub notes: Vec<String>,
    /// Whether the user ended the measurement.
    pub interrupted: bool,
    /// Whether every reply was right and none is missing.
    pub ok: bool,
}

/// What was asked for, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
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
pub struct Run {
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
    pub calls: Calls,
    /// Wrong and missing replies by kind.
    pub faults: BTreeMap<String, u64>,
    /// Replies that came after the reply to a younger request of their connection.
    pub reordered: u64,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
}

/// The messages of one class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
pub struct ConnectionReport {
    /// Correct replies.
    pub messages: u64,
    /// Exact.
    pub mean_us: f64,
}

impl Report {
    pub(crate) fn of_run(plan: &Plan, ran: &Ran) -> Report {
        let wall_s = (ran.end_ns - ran.start_ns) as f64 / 1e9;
        let book = &ran.book;
        let (all, classes) = classes(Class::ALL.map(|class| book.latencies(class)), wall_s);
        let cpu_s = ran.cpu_ns as f64 / 1e9;
        let run = Run {
            started_unix_s: micro(ran.started_unix_s),
            wall_s: nano(wall_s),
            messages: all.count(),
            rate_per_s: per(all.count() as f64, wall_s),
            latency: LatencyReport::of(&all, &[]),
            classes,
            connections: (0..plan.weights.len())
                .map(|at| {
                    let (messages, mean_ns) = book.answered(at);
                    ConnectionReport { messages, mean_us: milli(mean_ns / 1e3) }
                })
                .collect(),
            cpu_s: nano(cpu_s),
            cpu_us_per_message: per(cpu_s * 1e6, all.count() as f64),
            runqueue_wait_s: nano(ran.runqueue_wait_ns as f64 / 1e9),
            calls: Calls {
                sends: ran.calls.sends,
                receives: ran.calls.receives,
                replies_per_receive_max: ran.calls.replies_per_receive_max,
            },
            faults: book.faults().by_name(Fault::OF_WORK),
            reordered: book.reordered(),
            open: ran.open.as_ref().map(OpenReport::of),
        };
        let mut addresses: Vec<String> = ran.peers.iter().map(ToString::to_string).collect();
        addresses.dedup();
        let target = plan.target.as_ref().map(|target| TargetReport {
            name: target.to_string(),
            transport: plan.socket.transport.name().into(),
            addresses,
        });
        let mut report = Report::new(plan, target, run);
        report.config.cpu = ran.cpu;
        report.warnings = warnings(plan, &report.run, ran.open.as_ref());
        report.notes = book.notes().to_vec();
        report.interrupted = ran.interrupted;
        report.ok = book.is_clean();
        report
    }

    pub(crate) fn of_ideal(plan: &Plan, ideal: &Ideal) -> Report {
        let wall_s = ideal.end_ns as f64 / 1e9;
        let (all, classes) = classes(ideal.latencies.each_ref(), wall_s);
        let run = Run {
            started_unix_s: 0.0,
            wall_s: nano(wall_s),
            messages: all.count(),
            rate_per_s: per(all.count() as f64, wall_s),
            latency: LatencyReport::of(&all, &[]),
            classes,
            connections: Vec::new(),
            cpu_s: 0.0,
            cpu_us_per_message: 0.0,
            runqueue_wait_s: 0.0,
            calls: Calls { sends: 0, receives: 0, replies_per_receive_max: 0 },
            faults: Faults::default().by_name(Fault::OF_WORK),
            reordered: 0,
            open: None,
        };
        Report::new(plan, None, run)
    }

    fn new(plan: &Plan, target: Option<TargetReport>, run: Run) -> Report {
        Report {
            format: FORMAT.into(),
            version: VERSION,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            machine: Machine::this(),
            target,
            config: Config::of(plan),
            run,
            warnings: Vec::new(),
            notes: Vec::new(),
            interrupted: false,
            ok: true,
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
        row("all", self.run.messages, self.run.rate_per_s, &self.run.latency);
        if self.run.classes.len() > 1 {
            for class in &self.run.classes {
                row(&class.name, class.messages, class.rate_per_s, &class.latency);
            }
        }
        out
    }

    /// "3 lost, 1 duplicate".
    pub(crate) fn faults(&self) -> String {
        let faults = self.run.faults.iter().filter(|(_, count)| **count > 0);
        faults.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    }
}

impl Config {
    fn of(plan: &Plan) -> Config {
        let (mode, rate_per_s, arrival) = match plan.pace {
            Pace::PerConnection => ("connection", None, None),
            Pace::Window => ("window", None, None),
            Pace::Open { rate_per_s, arrival, .. } => ("open", Some(rate_per_s), Some(arrival.name().to_owned())),
        };
        let work = |us: u32| if plan.mix.kind.works() { u64::from(us) } else { 0 };
        Config {
            mode: mode.into(),
            ideal_workers: plan.ideal_workers.map(|workers| workers as u64),
            weights: plan.weights.clone(),
            in_flight: plan.in_flight as u64,
            kind: Kind::name(plan.mix.kind).into(),
            request_bytes: plan.request_bytes as u64,
            work_min_us: work(plan.mix.work.min_us),
            work_max_us: work(plan.mix.work.max_us),
            slow_percent: plan.mix.slow.map_or(0.0, |slow| slow.percent),
            slow_work_us: plan.mix.slow.map(|slow| slow.work_us.into()),
            messages: plan.messages,
            duration_s: plan.duration.map(|duration| duration.as_secs_f64()),
            rate_per_s,
            arrival,
            seed: plan.seed,
            timeout_s: plan.socket.connect_timeout.as_secs_f64(),
            cpu: None,
        }
    }
}

fn classes(latencies: [&Latencies; Class::ALL.len()], wall_s: f64) -> (Latencies, Vec<ClassReport>) {
    let mut all = Latencies::new();
    let mut reports = Vec::new();
    for (class, latencies) in Class::ALL.into_iter().zip(latencies) {
        all.merge(latencies);
        if class == Class::Quick || !latencies.is_empty() {
            reports.push(ClassReport {
                name: class.name().into(),
                messages: latencies.count(),
                rate_per_s: per(latencies.count() as f64, wall_s),
                latency: LatencyReport::of(latencies, &[]),
            });
        }
    }
    (all, reports)
}

/// Reasons to believe that the generator and not the server was the limit.
fn warnings(plan: &Plan, run: &Run, open: Option<&OpenRecord>) -> Vec<WarningReport> {
    let mut warnings = Vec::new();
    let share = |seconds: f64| per(seconds, run.wall_s);
    let busy = share(run.cpu_s + run.runqueue_wait_s);
    let several = plan.rooms().iter().sum::<usize>() > 1;
    // Who spins is busy on purpose; whether it was late all the same is told below.
    let spins = matches!(plan.pace, Pace::Open { spin, .. } if !spin.is_zero());
    if several && !spins && busy > warn::BUSY_SHARE {
        warnings.push(WarningReport {
            code: "generator-busy".into(),
            text: format!(
                "this program used {:.0} % of a CPU and waited {:.0} % of the time for it: the server may be able to do \
                 more than was measured; give this program a CPU of its own (--cpu)",
                share(run.cpu_s) * 100.0,
                share(run.runqueue_wait_s) * 100.0
            ),
        });
    }
    if let (Pace::Open { rate_per_s, .. }, Some(open)) = (plan.pace, open) {
        let room = format!("{} in flight on their connection", plan.in_flight);
        let found = [warn::late_schedule(open, 1e9 / rate_per_s as f64), warn::bound_reached(open, &room, "-a")];
        warnings.extend(found.iter().flatten().map(WarningReport::of));
    }
    warnings
}

fn per(amount: f64, of: f64) -> f64 {
    milli(stats::per(amount, of))
}
