//! The JSON document of `--json`: what all tools say, and the parts that their bodies are made of.
//!
//! The types can be read back, so that programs which run many measurements need no parser of their own. They are the
//! schema: a member that they do not know is an error. docs/formats/load-json.md describes them.
//! Times end in `_s` (seconds) or `_us` (microseconds); absent values are `null`, never left out.

use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use crate::drive::plan::DrivePlan;
use crate::drive::schedule::Lateness;
use crate::drive::spin::{ClientSpin, SpinRecord};
use crate::error::LoadError;
use crate::record::run::{RunRecord, ThreadRun};
use crate::record::running::per;
use crate::record::{Calls, Counters, Latencies};
use crate::report::Io;
use crate::report::escape::{escape, escape_json, escape_lines};
use crate::report::warn::Warning;

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const VERSION: u32 = 2;

/// The whole document; its body is that of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document<B> {
    /// The name of the format.
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// Version of the program.
    pub tool_version: String,
    /// The machine the load came from.
    pub machine: Machine,
    /// Where the load went; `null` if nothing was sent.
    pub target: Option<TargetReport>,
    /// What the tool was asked for, and what it measured.
    #[serde(flatten)]
    pub body: B,
    /// Reasons to doubt the figures.
    pub warnings: Vec<WarningReport>,
    /// The first few faults in words.
    pub notes: Vec<String>,
    /// Whether the user ended the measurement.
    pub interrupted: bool,
    /// Whether every reply was right and none is missing.
    pub ok: bool,
}

impl<B: Serialize> Document<B> {
    /// A document of a measurement at which nothing was wrong.
    pub(crate) fn new(format: &str, target: Option<TargetReport>, body: B) -> Document<B> {
        Document {
            format: format.to_owned(),
            version: VERSION,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Machine::this(),
            target,
            body,
            warnings: Vec::new(),
            notes: Vec::new(),
            interrupted: false,
            ok: true,
        }
    }

    /// The exit status: 0 if every reply was right and none is missing, else 1.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.ok)
    }

    /// Adds reasons to doubt the figures.
    pub(crate) fn warn(&mut self, warnings: impl IntoIterator<Item = Warning>) {
        let report = |warning: Warning| WarningReport { code: warning.code.into(), text: warning.text };
        self.warnings.extend(warnings.into_iter().map(report));
    }

    /// Prints the document as JSON, or the table, and says what was wrong: `complaint` is for a measurement that is
    /// not [`ok`](Document::ok).
    pub(crate) fn publish(
        &self,
        tool: &str,
        json: bool,
        table: &str,
        complaint: &str,
        io: &mut Io<'_>,
    ) -> Result<(), LoadError> {
        if json {
            let text = serde_json::to_string_pretty(self).map_err(|error| LoadError::Output(error.into()))?;
            print(&(escape_json(&text) + "\n"), io)?;
        } else {
            print(table, io)?;
        }
        if !self.ok {
            say(tool, &format!("error: {complaint}"), io);
        }
        self.warnings.iter().for_each(|warning| say(tool, &format!("warning: {}", warning.text), io));
        Ok(())
    }
}

/// Prints results, [escaped](escape); returns whether the reader of stdout is still there. One that has seen enough is no
/// error.
pub(crate) fn print(text: &str, io: &mut Io<'_>) -> Result<bool, LoadError> {
    match io.out.write_all(escape_lines(text).as_bytes()).and_then(|()| io.out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(LoadError::Output(error)),
    }
}

/// A line on stderr, [escaped](escape). If it cannot be written, no result is lost.
pub(crate) fn say(tool: &str, line: &str, io: &mut Io<'_>) {
    let _ = writeln!(io.err, "{tool}: {}", escape(line));
}

/// The machine the load came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
pub struct TargetReport {
    /// As given, with the port.
    pub name: String,
    /// `tcp`, `udp` or `unix`.
    pub transport: String,
    /// The addresses that were connected to.
    pub addresses: Vec<String>,
}

/// A latency distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
pub struct QuantileReport {
    /// In percent.
    pub percent: f64,
    /// What that part of the replies did not exceed, to three digits.
    pub us: f64,
}

/// System calls on the connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallsReport {
    /// send(2), those in vain included.
    pub sends: u64,
    /// recv(2), those in vain included.
    pub receives: u64,
    /// The most replies that one receive returned.
    pub replies_per_receive_max: u64,
}

/// What polling before sleeping brought (`--spin`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpinReport {
    /// Waits for replies.
    pub waits: u64,
    /// Those that ended while the thread polled, so that it did not sleep.
    pub caught: u64,
    /// Those in which it polled in vain, and slept.
    pub missed: u64,
    /// Time spent polling for replies.
    pub spent_s: f64,
}

/// What only an open loop measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenReport {
    /// Messages that were due while the bound on the number in flight was reached.
    pub bound_hits: u64,
    /// Messages that were due within the time and never sent.
    pub unsent: u64,
    /// How late messages were sent although there was room.
    pub lag: LatencyReport,
}

/// One thread of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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

/// A reason to doubt the figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
            cpus_allowed: ksf::cpus::allowed().unwrap_or_default(),
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
            stdev_us: if latencies.is_empty() { 0.0 } else { milli(latencies.histogram.stdev() / 1e3) },
            max_us: latencies.max_ns as f64 / 1e3,
            quantiles: percents
                .into_iter()
                .map(|percent| QuantileReport { percent, us: latencies.at_percent(percent) as f64 / 1e3 })
                .collect(),
        }
    }

    /// A quantile in microseconds; 0 for one that is not reported.
    pub fn at(&self, percent: f64) -> f64 {
        self.quantiles.iter().find(|quantile| quantile.percent == percent).map_or(0.0, |quantile| quantile.us)
    }
}

impl SpinReport {
    /// `None` if nothing was to be polled for.
    pub(crate) fn of<C: Counters>(plan: &DrivePlan, run: &RunRecord<C>) -> Option<SpinReport> {
        let SpinRecord { waits, caught, missed, spent_ns } = run.spin();
        (plan.spin != ClientSpin::Off).then_some(SpinReport { waits, caught, missed, spent_s: spent_ns as f64 / 1e9 })
    }

    /// "12.5 % of 800 waits without a sleep, 0.004 s polled".
    pub(crate) fn in_words(&self) -> String {
        let share = 100.0 * per(self.caught as f64, self.waits as f64);
        format!("{share:.1} % of {} waits without a sleep, {:.3} s polled", self.waits, self.spent_s)
    }
}

impl OpenReport {
    pub(crate) fn of(open: &Lateness) -> OpenReport {
        OpenReport { bound_hits: open.bound_hits, unsent: open.unsent, lag: LatencyReport::of(&open.lag, &[]) }
    }
}

impl CallsReport {
    pub(crate) fn of(calls: &Calls) -> CallsReport {
        let Calls { sends, receives, replies_per_receive_max } = *calls;
        CallsReport { sends, receives, replies_per_receive_max }
    }
}

impl ThreadReport {
    pub(crate) fn of<C: Counters>(thread: &ThreadRun<C>) -> ThreadReport {
        ThreadReport {
            cpu: thread.cpu,
            elapsed_s: thread.elapsed_ns as f64 / 1e9,
            messages: thread.record.answered,
            cpu_s: thread.cpu_ns as f64 / 1e9,
            runqueue_wait_s: thread.runqueue_wait_ns as f64 / 1e9,
        }
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
