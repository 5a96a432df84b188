//! The JSON document of `--json`, described in docs/formats/load-json.md and docs/formats/load.schema.json.
//!
//! The types can be read back, so that programs which run many measurements need no parser of their own.
//! Times end in `_s` (seconds) or `_us` (microseconds); absent values are `null`, never left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::drive::driver::{RunResult, ThreadResult};
use crate::drive::open::OpenRecord;
use crate::options::{Pace, Plan};
use crate::record::Latencies;
use crate::record::fault::Fault;
use crate::record::stats::{Running, Summary};
use crate::report::warn::Warning;

/// The name of the document's format.
pub const FORMAT: &str = "ksf-load";

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const VERSION: u32 = 1;

/// The whole document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// `echotest` or `rpctest`.
    pub tool: String,
    /// Version of the program.
    pub tool_version: String,
    /// The machine the load came from.
    pub machine: Machine,
    /// Where the load went.
    pub target: TargetReport,
    /// What was asked for, with defaults filled in.
    pub config: Config,
    /// One per iteration.
    pub runs: Vec<RunReport>,
    /// All iterations together.
    pub total: Total,
    /// Reasons to doubt the figures.
    pub warnings: Vec<WarningReport>,
    /// The first few faults in words.
    pub notes: Vec<String>,
    /// Whether the user ended the measurement.
    pub interrupted: bool,
    /// Whether every reply was right and none is missing.
    pub ok: bool,
}

/// The machine the load came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// `uname -s` and `-r`.
    pub kernel: String,
    /// `uname -m`.
    pub architecture: String,
    /// CPUs this process may use.
    pub cpus_allowed: Vec<usize>,
}

/// Where the load went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetReport {
    /// As given, with the port.
    pub name: String,
    /// `tcp`, `udp` or `unix`.
    pub transport: String,
    /// The addresses that were connected to.
    pub addresses: Vec<String>,
}

/// What was asked for, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// `synchronous` (`-a 0`), `closed` or `open`.
    pub mode: String,
    /// Most messages in flight per thread.
    pub in_flight: u64,
    /// Threads, each with a connection.
    pub threads: u64,
    /// Iterations asked for; `null` for no end.
    pub iterations: Option<u64>,
    /// Messages per thread and iteration; `null` for no limit.
    pub messages_per_thread: Option<u64>,
    /// Length of an iteration; `null` for no limit.
    pub duration_s: Option<f64>,
    /// Length of a request as it goes to the socket.
    pub request_bytes: u64,
    /// Most messages per send; 1 is the original's method.
    pub batch: u64,
    /// What is sent: tool-specific, such as `length`, `auth`, `fragments`.
    pub message: BTreeMap<String, String>,
    /// Target rate over all threads; `null` in a closed loop.
    pub rate_per_s: Option<u64>,
    /// `constant` or `poisson`; `null` in a closed loop.
    pub arrival: Option<String>,
    /// Seed of the arrivals; `null` in a closed loop.
    pub seed: Option<u64>,
    /// Time limit without a reply (streams) or per message (UDP).
    pub timeout_s: f64,
    /// Whether TCP_NODELAY is set; `null` if not TCP.
    pub nodelay: Option<bool>,
    /// Priority that was asked for.
    pub nice: i32,
}

/// One iteration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// From 1.
    pub run: u64,
    /// Start, seconds since the epoch.
    pub started_unix_s: f64,
    /// From the first thread's start to the last one's end.
    pub wall_s: f64,
    /// Correct replies.
    pub messages: u64,
    /// Correct replies per second of wall time.
    pub rate_per_s: f64,
    /// Bits sent and received, 10^6 per second.
    pub mbps: f64,
    /// Latency of the correct replies.
    pub latency: LatencyReport,
    /// User and system time of the threads.
    pub cpu_s: f64,
    /// The same per correct reply.
    pub cpu_us_per_message: f64,
    /// System calls on the connections.
    pub calls: Calls,
    /// Wrong and missing replies by kind.
    pub faults: BTreeMap<String, u64>,
    /// Replies that came after a reply to a younger request. No fault where the protocol has identifiers.
    pub reordered: u64,
    /// Datagrams this machine dropped because the receive buffer was full.
    pub dropped_here: u64,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
    /// One per thread.
    pub threads: Vec<ThreadReport>,
    /// Why threads gave up.
    pub failures: Vec<String>,
}

/// A latency distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// Exact.
    pub min_us: f64,
    /// Exact.
    pub mean_us: f64,
    /// From the histogram.
    pub stdev_us: f64,
    /// Exact.
    pub max_us: f64,
    /// Ascending; 50, 90, 99, 99.9, 99.99 and those of `-q`.
    pub quantiles: Vec<QuantileReport>,
}

/// One quantile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantileReport {
    /// In percent.
    pub percent: f64,
    /// What that part of the replies did not exceed, to three digits.
    pub us: f64,
}

/// System calls on the connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// send(2), those in vain included.
    pub sends: u64,
    /// recv(2), those in vain included.
    pub receives: u64,
    /// The most replies one receive returned: 1 unless `--batch` is given.
    pub replies_per_receive_max: u64,
}

/// What only an open loop measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpenReport {
    /// Messages that were due while the bound on the number in flight was reached.
    pub bound_hits: u64,
    /// Messages that were due within the time and never sent.
    pub unsent: u64,
    /// How late messages were sent although there was room.
    pub lag: LatencyReport,
}

/// One thread of one iteration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThreadReport {
    /// The CPU it was bound to.
    pub cpu: Option<usize>,
    /// From its start to its end.
    pub elapsed_s: f64,
    /// Correct replies.
    pub messages: u64,
    /// User and system time.
    pub cpu_s: f64,
    /// Time it was runnable but waited for the CPU.
    pub runqueue_wait_s: f64,
}

/// All iterations together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Total {
    /// Iterations that ran.
    pub runs: u64,
    /// Correct replies.
    pub messages: u64,
    /// Wrong and missing replies.
    pub faults: u64,
    /// Over the iterations' rates.
    pub rate_per_s: Spread,
    /// Over the iterations' median latencies.
    pub median_latency_us: Spread,
    /// All replies of all iterations in one distribution.
    pub latency: LatencyReport,
}

/// How a figure varied over the iterations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Middle.
    pub median: f64,
    /// Arithmetic.
    pub mean: f64,
    /// Largest.
    pub max: f64,
}

/// A reason to doubt the figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarningReport {
    /// A stable name.
    pub code: String,
    /// What was seen and what to do.
    pub text: String,
}

const QUANTILES: [f64; 5] = [50.0, 90.0, 99.0, 99.9, 99.99];

impl Machine {
    pub(crate) fn this() -> Machine {
        let uname = rustix::system::uname();
        Machine {
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            architecture: uname.machine().to_string_lossy().into_owned(),
            cpus_allowed: crate::drive::pin::allowed_cpus(),
        }
    }
}

impl Config {
    pub(crate) fn of(plan: &Plan, request_bytes: usize, message: &[(&str, String)]) -> Config {
        let (mode, rate_per_s, arrival, seed) = match plan.pace {
            Pace::Closed { synchronous: true } => ("synchronous", None, None, None),
            Pace::Closed { synchronous: false } => ("closed", None, None, None),
            Pace::Open { rate_per_s, arrival, seed, .. } => {
                ("open", Some(rate_per_s), Some(arrival.name().to_string()), Some(seed))
            }
        };
        Config {
            mode: mode.into(),
            in_flight: plan.in_flight as u64,
            threads: plan.threads as u64,
            iterations: (plan.iterations != u64::MAX).then_some(plan.iterations),
            messages_per_thread: plan.messages,
            duration_s: plan.duration.map(|duration| duration.as_secs_f64()),
            request_bytes: request_bytes as u64,
            batch: plan.batch as u64,
            message: message.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            rate_per_s,
            arrival,
            seed,
            timeout_s: plan.timeout.as_secs_f64(),
            nodelay: (plan.socket.transport.name() == "tcp").then_some(plan.socket.nodelay),
            nice: plan.nice,
        }
    }
}

impl RunReport {
    pub(crate) fn of(run: &RunResult, summary: &Summary, plan: &Plan) -> RunReport {
        RunReport {
            run: summary.number,
            started_unix_s: micro(summary.started_unix_s),
            wall_s: nano(summary.wall_s),
            messages: summary.messages,
            rate_per_s: milli(summary.rate_per_s()),
            mbps: milli(summary.mbps()),
            latency: LatencyReport::of(&summary.latencies, &plan.quantiles),
            cpu_s: nano(summary.cpu_s),
            cpu_us_per_message: milli(summary.cpu_us_per_message()),
            calls: Calls {
                sends: summary.send_calls,
                receives: summary.receive_calls,
                replies_per_receive_max: summary.replies_per_receive_max,
            },
            faults: summary.faults.by_name(Fault::OF_CALLS),
            reordered: summary.reordered,
            dropped_here: summary.dropped,
            open: summary.open.as_ref().map(OpenReport::of),
            threads: run.threads.iter().map(ThreadReport::of).collect(),
            failures: summary.failures.clone(),
        }
    }
}

impl ThreadReport {
    fn of(thread: &ThreadResult) -> ThreadReport {
        ThreadReport {
            cpu: thread.cpu,
            elapsed_s: thread.elapsed_ns() as f64 / 1e9,
            messages: thread.record.latencies.count(),
            cpu_s: thread.cpu_ns as f64 / 1e9,
            runqueue_wait_s: thread.runqueue_wait_ns as f64 / 1e9,
        }
    }
}

impl LatencyReport {
    pub(crate) fn of(latencies: &Latencies, more_quantiles: &[f64]) -> LatencyReport {
        let mut percents: Vec<f64> = QUANTILES.iter().chain(more_quantiles).copied().collect();
        percents.sort_by(f64::total_cmp);
        percents.dedup();
        LatencyReport {
            min_us: latencies.min() as f64 / 1e3,
            mean_us: milli(latencies.mean_ns() / 1e3),
            stdev_us: match latencies.is_empty() {
                true => 0.0,
                false => milli(latencies.histogram.stdev() / 1e3),
            },
            max_us: latencies.max_ns as f64 / 1e3,
            quantiles: percents
                .into_iter()
                .map(|percent| QuantileReport { percent, us: latencies.at_percent(percent) as f64 / 1e3 })
                .collect(),
        }
    }
}

impl LatencyReport {
    /// A quantile in microseconds; 0 for one that is not reported.
    pub(crate) fn at(&self, percent: f64) -> f64 {
        self.quantiles.iter().find(|quantile| quantile.percent == percent).map_or(0.0, |quantile| quantile.us)
    }
}

impl OpenReport {
    pub(crate) fn of(open: &OpenRecord) -> OpenReport {
        OpenReport { bound_hits: open.bound_hits, unsent: open.unsent, lag: LatencyReport::of(&open.lag, &[]) }
    }
}

impl Spread {
    pub(crate) fn of(running: &Running) -> Spread {
        Spread {
            min: milli(running.min()),
            median: milli(running.median()),
            mean: milli(running.mean()),
            max: milli(running.max()),
        }
    }
}

impl WarningReport {
    pub(crate) fn of(warning: &Warning) -> WarningReport {
        WarningReport { code: warning.code.into(), text: warning.text.clone() }
    }
}

/// Three decimals: nanoseconds for times in us, and more than rates deserve. Fewer than 16 digits in all also make
/// every reader of the document get the same number.
pub(crate) fn milli(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

pub(crate) fn micro(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

pub(crate) fn nano(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}
