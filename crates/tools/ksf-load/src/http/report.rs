//! What `http` prints: a table, or the JSON document of docs/formats/load-json.md.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::LoadHttpArgs;
use super::client::{Exchange, HttpCounters};
use super::plan::HttpPlan;
use super::ports::Forecast;
use super::server_cpu::Used;
use crate::drive::plan::Route;
use crate::drive::protocol::Protocol;
use crate::options::name;
use crate::record::run::RunRecord;
use crate::record::running;
use crate::record::tally::TallyKind;
use crate::record::{End, Fault, Latencies, Note};
use crate::report::document::{
    Document, LatencyReport, OpenReport, SpinReport, TargetReport, ThreadReport, micro, milli, nano,
};
use crate::report::warn::{self, Warning};

/// The name of the document's format.
pub const FORMAT: &str = "ksf-http";

/// How many failures are described.
const NOTES_MAX: usize = 10;

/// The whole document. It is `ok` if every request had its right response, and all are accounted for.
pub type HttpReport = Document<HttpBody>;

/// What was asked for and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HttpBody {
    /// What was asked for, with defaults filled in.
    pub config: LoadHttpArgs,
    /// Length of a request (of the last one of a connection).
    pub request_bytes: u64,
    /// Whether the ports last.
    pub ports: PortsReport,
    /// What was measured.
    pub run: HttpRunReport,
}

/// Whether the ports last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortsReport {
    /// Ephemeral ports of one source towards one destination.
    pub per_pair: u64,
    /// Pairs of a source and a destination.
    pub pairs: u64,
    /// Connections at a time plus those that this side closes; `null` where that depends on the server's speed.
    pub needed: Option<u64>,
    /// Connections of this network namespace in TIME_WAIT before the run; `null` if not known.
    pub time_wait_before: Option<u64>,
    /// The same after it.
    pub time_wait_after: Option<u64>,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpRunReport {
    /// Start, seconds since the epoch.
    pub started_unix_s: f64,
    /// What rates refer to: the duration, or the time until the last request was settled.
    pub wall_s: f64,
    /// Every request is in exactly one of these.
    pub requests: Requests,
    /// Every connection is in exactly one of these.
    pub connections: Connections,
    /// From the start of a request to its connection. In an open loop all three count from the intended start.
    pub connect: LatencyReport,
    /// From the start of a request to the first byte of its answer.
    pub first_byte: LatencyReport,
    /// From the start of a request to the last byte of its right answer.
    pub response: LatencyReport,
    /// Failed requests by kind.
    pub failures: BTreeMap<String, u64>,
    /// Whole answers by status.
    pub statuses: BTreeMap<String, u64>,
    /// Only with `--tally`.
    pub tally: Option<TallyReport>,
    /// Sent.
    pub sent_bytes: u64,
    /// Received.
    pub received_bytes: u64,
    /// Of it, bodies of whole answers without their framing.
    pub body_bytes: u64,
    /// What the server used; `null` unless asked for.
    pub server: Option<ServerReport>,
    /// User and system time of this program's threads.
    pub cpu_s: f64,
    /// The same per right answer.
    pub cpu_us_per_request: f64,
    /// The kernel's counters of this network namespace, by its names; `null` for those that it does not have.
    pub kernel: BTreeMap<String, Option<u64>>,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
    /// Only with `--spin`.
    pub spin: Option<SpinReport>,
    /// One per thread.
    pub threads: Vec<ThreadReport>,
}

/// Requests: `started = answered + failed + unanswered`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requests {
    /// A connection was opened for them, or they were given one.
    pub started: u64,
    /// Right answers.
    pub answered: u64,
    /// See `failures`.
    pub failed: u64,
    /// Given up at the end.
    pub unanswered: u64,
    /// Those of which the first byte of an answer came, whatever became of it.
    pub begun: u64,
    /// First bytes within `wall_s`, per second.
    pub begun_per_s: f64,
    /// Right answers within `wall_s`, per second.
    pub rate_per_s: f64,
}

/// Connections: `attempted = established + not_established`, and `established` is the sum of `ended`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Connections {
    /// Begun.
    pub attempted: u64,
    /// They stood.
    pub established: u64,
    /// They did not.
    pub not_established: u64,
    /// How they ended: `by_server`, `by_client`, `by_reset`, `failed`.
    pub ended: BTreeMap<String, u64>,
    /// Those that brought bytes nobody had asked for.
    pub surplus: u64,
    /// Those that the server was asked to close and did not within the time limit.
    pub close_timeouts: u64,
    /// Established within `wall_s`, per second.
    pub rate_per_s: f64,
}

/// Whole answers by the value of a field of their heads; `""` for those without it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TallyReport {
    /// The field.
    pub name: String,
    /// Over all threads.
    pub values: BTreeMap<String, u64>,
    /// One per thread, in the order of `threads`.
    pub threads: Vec<BTreeMap<String, u64>>,
}

/// What the server used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerReport {
    /// The processes that were named.
    pub pids: Vec<u32>,
    /// The control group that was named.
    pub cgroup: Option<String>,
    /// User and system time.
    pub cpu_us: f64,
    /// Of it; of processes only to a clock tick.
    pub user_us: f64,
    /// Of it; of processes only to a clock tick.
    pub system_us: f64,
    /// Per established connection.
    pub cpu_us_per_connection: f64,
    /// Per right answer.
    pub cpu_us_per_request: f64,
    /// Processes that were seen; 0 for a control group.
    pub processes: u64,
}

/// What a run of http measured.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) run: RunRecord<HttpCounters>,
    pub(crate) server: Option<Used>,
    /// By how much the kernel's counters rose.
    pub(crate) kernel: BTreeMap<String, Option<u64>>,
    pub(crate) time_wait_before: Option<u64>,
    pub(crate) time_wait_after: Option<u64>,
}

pub(crate) fn of(
    plan: &HttpPlan,
    routes: &[Route],
    exchange: &Arc<Exchange>,
    forecast: &Forecast,
    early: Vec<Warning>,
    measured: &Measured,
) -> HttpReport {
    let run = &measured.run;
    let mut addresses: Vec<String> = routes.iter().map(|route| route.destination.to_string()).collect();
    addresses.sort();
    addresses.dedup();
    let names: Vec<String> = plan.urls.iter().map(ToString::to_string).collect();
    let body = HttpBody {
        config: plan.args.clone(),
        request_bytes: exchange.request_bytes() as u64,
        ports: PortsReport {
            per_pair: forecast.per_pair,
            pairs: forecast.pairs,
            needed: forecast.needed,
            time_wait_before: measured.time_wait_before,
            time_wait_after: measured.time_wait_after,
        },
        run: HttpRunReport::of(plan, measured),
    };
    let target = TargetReport { name: names.join(" "), transport: "tcp".into(), addresses };
    let mut report = Document::new(FORMAT, Some(target), body);
    let balance = run.record.check(0, 0, 0);
    report.warn(early);
    report.warn(about_run(plan, measured));
    if let Err(what) = &balance {
        let text = format!("not all is accounted for ({what}): a defect of this program, please report it");
        report.warn([Warning { code: "accounting", text }]);
    }
    report.notes = notes(run);
    report.interrupted = run.is_interrupted();
    report.ok = run.record.is_clean() && balance.is_ok();
    report
}

/// The text for people.
pub(crate) fn text(report: &HttpReport) -> String {
    let (run, config) = (&report.body.run, &report.body.config);
    let mut lines = Vec::new();
    let mut line = |text: String| lines.push(text + "\n");
    line(format!(
        "{}: {:.1} s, {} loop, {} connections, requests per connection {}, close by {}",
        report.target.as_ref().map_or("", |target| &target.name),
        run.wall_s,
        config.pace.mode(),
        config.connections.unwrap_or_default(),
        match config.requests_per_connection {
            0 => "unlimited".to_owned(),
            requests => requests.to_string(),
        },
        name(&config.close)
    ));
    line(format!(
        "{:<12} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "count", "per s", "mean us", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us"
    ));
    for (name, count, rate, latency) in [
        ("connect", run.connections.established, run.connections.rate_per_s, &run.connect),
        ("first byte", run.requests.begun, run.requests.begun_per_s, &run.first_byte),
        ("response", run.requests.answered, run.requests.rate_per_s, &run.response),
    ] {
        let [p50, p90, p99, p999] = [50.0, 90.0, 99.0, 99.9].map(|percent| latency.at(percent));
        line(format!(
            "{name:<12} {count:>10} {rate:>10.0} {:>9.1} {p50:>9.1} {p90:>9.1} {p99:>9.1} {p999:>9.1} {:>9.1}",
            latency.mean_us, latency.max_us
        ));
    }
    let requests = &run.requests;
    line(format!(
        "requests     {} started = {} answered + {} failed + {} unanswered",
        requests.started, requests.answered, requests.failed, requests.unanswered
    ));
    let connections = &run.connections;
    line(format!(
        "connections  {} attempted = {} established + {} not; ended {}",
        connections.attempted,
        connections.established,
        connections.not_established,
        or_none(in_words(&connections.ended))
    ));
    if requests.failed > 0 {
        line(format!("failures     {}", in_words(&run.failures)));
    }
    line(format!("statuses     {}", or_none(in_words(&run.statuses))));
    if let Some(tally) = &run.tally {
        line(format!("{:<12} {}", tally.name, or_none(in_words(&tally.values))));
    }
    if let Some(server) = &run.server {
        line(format!(
            "server CPU   {:.2} us per connection, {:.2} us per request ({:.3} s user, {:.3} s system)",
            server.cpu_us_per_connection,
            server.cpu_us_per_request,
            server.user_us / 1e6,
            server.system_us / 1e6
        ));
    }
    line(format!("client CPU   {:.2} us per request ({:.3} s)", run.cpu_us_per_request, run.cpu_s));
    if let Some(spin) = &run.spin {
        line(format!("spin         {}: {}", config.pace.spin, spin.in_words()));
    }
    let risen: BTreeMap<String, u64> =
        run.kernel.iter().map(|(name, rise)| (name.clone(), rise.unwrap_or(0))).collect();
    line(format!("kernel       {}", or_none(in_words(&risen))));
    lines.concat()
}

impl HttpBody {
    /// What went wrong, in words.
    pub(crate) fn faults(&self) -> String {
        let mut parts = vec![in_words(&self.run.failures)];
        for (count, name) in
            [(self.run.requests.unanswered, "unanswered"), (self.run.connections.surplus, "with surplus bytes")]
        {
            if count > 0 {
                parts.push(format!("{count} {name}"));
            }
        }
        parts.retain(|part| !part.is_empty());
        parts.join(", ")
    }
}

impl HttpRunReport {
    fn of(plan: &HttpPlan, measured: &Measured) -> HttpRunReport {
        let (run, record) = (&measured.run, &measured.run.record);
        let connections = &record.connections;
        let wall_s = run.wall_s();
        let latency = |latencies: &Latencies| LatencyReport::of(latencies, &[]);
        let per = |amount: f64, of: f64| milli(running::per(amount, of));
        let steps = record.steps.as_ref().expect("connections come and go");
        HttpRunReport {
            started_unix_s: micro(run.started_unix_s),
            wall_s: nano(wall_s),
            requests: Requests {
                started: record.started,
                answered: record.answered,
                failed: record.failed,
                unanswered: record.unanswered,
                begun: steps.first_byte.count(),
                begun_per_s: per(steps.first_byte_in_time as f64, wall_s),
                rate_per_s: milli(run.rate_per_s()),
            },
            connections: Connections {
                attempted: connections.attempted,
                established: connections.established,
                not_established: connections.not_established,
                ended: connections.ends.by_name(End::ALL),
                surplus: connections.surplus,
                close_timeouts: connections.close_timeouts,
                rate_per_s: per(connections.established_in_time as f64, wall_s),
            },
            connect: latency(&steps.connect),
            first_byte: latency(&steps.first_byte),
            response: latency(&run.latencies),
            failures: record.faults.by_name(Fault::OF_HTTP),
            statuses: record.counters.statuses.iter().map(|(status, count)| (status.to_string(), *count)).collect(),
            tally: plan.expected.tally.clone().map(|name| TallyReport {
                name,
                values: record.counters.tallied.clone(),
                threads: run.threads.iter().map(|thread| thread.record.counters.tallied.clone()).collect(),
            }),
            sent_bytes: record.sent_bytes,
            received_bytes: record.received_bytes,
            body_bytes: record.counters.body_bytes,
            server: measured.server.map(|used| {
                let cpu_us = used.time.all_ns as f64 / 1e3;
                ServerReport {
                    pids: plan.args.server_pid.clone(),
                    cgroup: plan.args.server_cgroup.as_ref().map(|path| path.display().to_string()),
                    cpu_us,
                    user_us: used.time.user_ns as f64 / 1e3,
                    system_us: used.time.system_ns as f64 / 1e3,
                    cpu_us_per_connection: per(cpu_us, connections.established as f64),
                    cpu_us_per_request: per(cpu_us, record.answered as f64),
                    processes: used.processes,
                }
            }),
            cpu_s: nano(run.cpu_s()),
            cpu_us_per_request: milli(run.cpu_us_per_reply()),
            kernel: measured.kernel.clone(),
            open: run.lateness.as_ref().map(OpenReport::of),
            spin: SpinReport::of(&plan.drive, run),
            threads: run.threads.iter().map(ThreadReport::of).collect(),
        }
    }
}

/// Reasons to doubt the figures.
fn about_run(plan: &HttpPlan, measured: &Measured) -> Vec<Warning> {
    let (drive, run) = (&plan.drive, &measured.run);
    let room = format!("all {} connections busy", drive.connections);
    let mut warnings = warn::schedule(drive, run, &room, "-n");
    warnings.extend(warn::busy_generator(drive, run, false, "add threads on CPUs of their own (--cpu)"));
    let risen = |name: &str| measured.kernel.get(name).copied().flatten().unwrap_or(0);
    let dropped = risen("ListenOverflows").max(risen("ListenDrops"));
    if dropped > 0 {
        let text = format!(
            "a queue of accepted connections was full {dropped} times in this network namespace: such a connect is tried \
             again after a second, which the slowest latencies show; raise the server's backlog and net.core.somaxconn, \
             or lower -n"
        );
        warnings.push(Warning { code: "listen-queue-full", text });
    }
    if run.record.connections.close_timeouts > 0 {
        let text = format!(
            "the server did not close {} connections it was asked to close, each of which cost a time limit; use \
             --close client or --close reset",
            run.record.connections.close_timeouts
        );
        warnings.push(Warning { code: "server-keeps-open", text });
    }
    if measured.server.is_some_and(|used| used.roots_gone > 0) {
        let text = "a process of --server-pid ended during the run: what it used since it was last seen is missing";
        warnings.push(Warning { code: "server-gone", text: text.into() });
    }
    if run.threads.iter().any(|thread| thread.hopeless) {
        let text =
            "not one of the first 1000 connections was established, so the run was ended; is the server running?";
        warnings.push(Warning { code: "nobody-there", text: text.into() });
    }
    warnings
}

fn notes(run: &RunRecord<HttpCounters>) -> Vec<String> {
    let mut notes: Vec<&Note> = run.record.notes.iter().collect();
    notes.sort_by_key(|note| note.at_ns);
    let seconds = |note: &Note| note.at_ns.saturating_sub(run.start_ns()) as f64 / 1e9;
    notes.into_iter().take(NOTES_MAX).map(|note| format!("after {:.3} s: {}", seconds(note), note.text)).collect()
}

fn in_words(counts: &BTreeMap<String, u64>) -> String {
    let occurred = counts.iter().filter(|(_, count)| **count > 0);
    occurred.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
}

fn or_none(text: String) -> String {
    if text.is_empty() { "none".to_owned() } else { text }
}
