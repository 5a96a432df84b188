//! The JSON document of echotest and rpctest, described in docs/formats/load-json.md.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::calls::args::{CallArgs, CallPlan};
use crate::record::Fault;
use crate::record::run::RunRecord;
use crate::record::running::Running;
use crate::report::document::{
    CallsReport, Document, LatencyReport, OpenReport, SpinReport, ThreadReport, micro, milli, nano,
};

/// The name of the document's format.
pub const FORMAT: &str = "ksf-load";

/// The whole document.
pub type CallReport = Document<CallBody>;

/// What was asked for and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallBody {
    /// `echotest`, `rpctest`, `nfs` or `9p`.
    pub tool: String,
    /// What was asked for, with defaults filled in.
    pub config: CallArgs,
    /// Length of a request as it goes to the socket.
    pub request_bytes: u64,
    /// What is sent: tool-specific, such as `length`, `auth`, `fragments`.
    pub message: BTreeMap<String, String>,
    /// One per iteration.
    pub runs: Vec<CallRunReport>,
    /// All iterations together.
    pub total: Total,
}

/// One iteration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallRunReport {
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
    pub calls: CallsReport,
    /// Wrong and missing replies by kind.
    pub faults: BTreeMap<String, u64>,
    /// Replies that came after a reply to a younger request. No fault where the protocol has identifiers.
    pub reordered: u64,
    /// Datagrams this machine dropped because the receive buffer was full.
    pub dropped_here: u64,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
    /// Only with `--spin`.
    pub spin: Option<SpinReport>,
    /// One per thread.
    pub threads: Vec<ThreadReport>,
    /// Why threads gave up.
    pub failures: Vec<String>,
}

/// All iterations together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
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

impl CallRunReport {
    pub(crate) fn of(plan: &CallPlan, run: &RunRecord<()>) -> CallRunReport {
        let record = &run.record;
        CallRunReport {
            run: run.number,
            started_unix_s: micro(run.started_unix_s),
            wall_s: nano(run.wall_s()),
            messages: record.answered,
            rate_per_s: milli(run.rate_per_s()),
            mbps: milli(run.mbps()),
            latency: LatencyReport::of(&run.latencies, &plan.quantiles),
            cpu_s: nano(run.cpu_s()),
            cpu_us_per_message: milli(run.cpu_us_per_reply()),
            calls: CallsReport::of(&record.calls),
            faults: record.faults.by_name(Fault::OF_CALLS),
            reordered: record.reordered,
            dropped_here: run.dropped(),
            open: run.lateness.as_ref().map(OpenReport::of),
            spin: SpinReport::of(&plan.drive, run),
            threads: run.threads.iter().map(ThreadReport::of).collect(),
            failures: record.failures.clone(),
        }
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
