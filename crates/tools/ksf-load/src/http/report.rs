//! What `http` prints: a table, or the JSON document of docs/formats/http.schema.json.
//!
//! Times end in `_s` (seconds) or `_us` (microseconds); absent values are `null`, never left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::failure::{End, Failure};
use super::plan::{Pace, Plan, Route};
use super::ports::Forecast;
use super::run::{Measured, ThreadRan};
use crate::record::Latencies;
use crate::record::stats;
use crate::record::tally::Kind;
use crate::report::json::{
    LatencyReport, Machine, OpenReport, TargetReport, ThreadReport, WarningReport, micro, milli, nano,
};
use crate::report::warn::{self, Warning};

/// The name of the document's format.
pub const FORMAT: &str = "ksf-http";

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const VERSION: u32 = 1;

/// How many failures are described.
const NOTES_MAX: usize = 10;

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
    /// Where the load went.
    pub target: TargetReport,
    /// What was asked for, with defaults filled in.
    pub config: Config,
    /// Whether the ports last.
    pub ports: PortsReport,
    /// What was measured.
    pub run: Run,
    /// Reasons to doubt the figures.
    pub warnings: Vec<WarningReport>,
    /// The first few failures in words, with seconds since the start.
    pub notes: Vec<String>,
    /// Whether the user ended the measurement.
    pub interrupted: bool,
    /// Whether every request had its right answer, and the books balance.
    pub ok: bool,
}

/// What was asked for, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// `closed` or `open`.
    pub mode: String,
    /// At a time, over all threads.
    pub connections: u64,
    /// 0 for no limit.
    pub requests_per_connection: u64,
    /// Who closes first: `server`, `client` or `reset`.
    pub close: String,
    /// Source addresses; empty for the system's choice.
    pub sources: Vec<String>,
    /// Over all threads; `null` for no limit.
    pub requests: Option<u64>,
    /// `null` for no limit.
    pub duration_s: Option<f64>,
    /// `null` in a closed loop.
    pub rate_per_s: Option<u64>,
    /// `constant` or `poisson`; `null` in a closed loop.
    pub arrival: Option<String>,
    /// Of the arrivals; `null` in a closed loop.
    pub seed: Option<u64>,
    /// Of a connect.
    pub connect_timeout_s: f64,
    /// Of an answer.
    pub timeout_s: f64,
    /// How long what is under way at the end is awaited.
    pub drain_s: f64,
    /// Statuses that are right; empty for 200 to 299.
    pub expected_statuses: Vec<u16>,
    /// Length that bodies must have; `null` if any will do.
    pub expected_body_bytes: Option<u64>,
    /// Whether the bytes of bodies are compared.
    pub checks_body: bool,
    /// Length of a request (of the last one of a connection).
    pub request_bytes: u64,
    /// Threads.
    pub threads: u64,
}

/// Whether the ports last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PortsReport {
    /// Ephemeral ports of one source towards one destination.
    pub per_pair: u64,
    /// Pairs of a source and a destination.
    pub pairs: u64,
    /// What the run needs at a time, TIME_WAIT included; `null` where that depends on the server's speed.
    pub needed: Option<u64>,
    /// How long a port that this side closed first cannot be used again.
    pub time_wait_s: f64,
    /// Connections per second that can go on for ever; `null` for no limit.
    pub sustained_per_s: Option<f64>,
    /// Connections of this network namespace in TIME_WAIT before the run; `null` if not known.
    pub time_wait_before: Option<u64>,
    /// The same after it.
    pub time_wait_after: Option<u64>,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
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
    /// One per thread.
    pub threads: Vec<ThreadReport>,
}

/// Requests: `started = answered + failed + unanswered`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

impl Report {
    pub(crate) fn of(
        plan: &Plan,
        routes: &[Route],
        forecast: &Forecast,
        early: Vec<Warning>,
        measured: &Measured,
    ) -> Report {
        let balance = measured.book.check(0, 0, 0);
        let mut warnings = early;
        warnings.extend(about_run(plan, measured));
        if let Err(what) = &balance {
            let text = format!("the books do not balance ({what}): a defect of this program, please report it");
            warnings.push(Warning { code: "accounting", text });
        }
        let mut addresses: Vec<String> = routes.iter().map(|route| route.destination.to_string()).collect();
        addresses.sort();
        addresses.dedup();
        let names: Vec<String> = plan.urls.iter().map(ToString::to_string).collect();
        Report {
            format: FORMAT.into(),
            version: VERSION,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            machine: Machine::this(),
            target: TargetReport { name: names.join(" "), transport: "tcp".into(), addresses },
            config: Config::of(plan, routes),
            ports: PortsReport {
                per_pair: forecast.allowance.ports,
                pairs: forecast.pairs,
                needed: forecast.needed,
                time_wait_s: forecast.allowance.time_wait.as_secs_f64(),
                sustained_per_s: forecast.sustained_per_s().map(milli),
                time_wait_before: measured.time_wait_before,
                time_wait_after: measured.time_wait_after,
            },
            run: Run::of(plan, measured),
            warnings: warnings.iter().map(WarningReport::of).collect(),
            notes: notes(measured),
            interrupted: measured.threads.iter().any(|thread| thread.ran.interrupted),
            ok: measured.book.is_clean() && balance.is_ok(),
        }
    }

    /// The text for people.
    pub(crate) fn text(&self) -> String {
        let (run, config) = (&self.run, &self.config);
        let mut lines = Vec::new();
        let mut line = |text: String| lines.push(text + "\n");
        line(format!(
            "{}: {:.1} s, {} loop, {} connections, requests per connection {}, close by {}",
            self.target.name,
            run.wall_s,
            config.mode,
            config.connections,
            match config.requests_per_connection {
                0 => "unlimited".to_owned(),
                requests => requests.to_string(),
            },
            config.close
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
        let risen: BTreeMap<String, u64> =
            run.kernel.iter().map(|(name, rise)| (name.clone(), rise.unwrap_or(0))).collect();
        line(format!("kernel       {}", or_none(in_words(&risen))));
        lines.concat()
    }

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

impl Config {
    fn of(plan: &Plan, routes: &[Route]) -> Config {
        let (mode, rate_per_s, arrival, seed) = match plan.pace {
            Pace::Closed => ("closed", None, None, None),
            Pace::Open { rate_per_s, arrival, seed, .. } => {
                ("open", Some(rate_per_s), Some(arrival.name().to_owned()), Some(seed))
            }
        };
        let terms = &plan.terms;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let body = terms.expected.body.as_ref();
        Config {
            mode: mode.into(),
            connections: plan.connections as u64,
            requests_per_connection: terms.requests_per_connection,
            close: terms.close.name().into(),
            sources: plan.sources.iter().map(ToString::to_string).collect(),
            requests: plan.requests,
            duration_s: plan.duration.map(|duration| duration.as_secs_f64()),
            rate_per_s,
            arrival,
            seed,
            connect_timeout_s: seconds(terms.connect_timeout_ns),
            timeout_s: seconds(terms.timeout_ns),
            drain_s: plan.drain.as_secs_f64(),
            expected_statuses: terms.expected.statuses.clone(),
            expected_body_bytes: body.map(|body| body.len() as u64).or(terms.expected.body_bytes),
            checks_body: body.is_some(),
            request_bytes: routes.iter().map(|route| route.requests[1].len() as u64).max().unwrap_or(0),
            threads: plan.threads as u64,
        }
    }
}

impl Run {
    fn of(plan: &Plan, measured: &Measured) -> Run {
        let book = &measured.book;
        let wall_s = (measured.end_ns - measured.start_ns) as f64 / 1e9;
        let cpu_s = measured.threads.iter().map(|thread| thread.cpu_ns as f64 / 1e9).sum::<f64>();
        let latency = |latencies: &Latencies| LatencyReport::of(latencies, &[]);
        let per = |amount: f64, of: f64| milli(stats::per(amount, of));
        Run {
            started_unix_s: micro(measured.started_unix_s),
            wall_s: nano(wall_s),
            requests: Requests {
                started: book.started,
                answered: book.answered,
                failed: book.failures.total(),
                unanswered: book.unanswered,
                begun: book.first_byte.count(),
                begun_per_s: per(book.begun_in_time as f64, wall_s),
                rate_per_s: per(book.in_time as f64, wall_s),
            },
            connections: Connections {
                attempted: book.attempted,
                established: book.established,
                not_established: book.not_established,
                ended: book.ends.by_name(End::ALL),
                surplus: book.surplus,
                close_timeouts: book.close_timeouts,
                rate_per_s: per(book.established_in_time as f64, wall_s),
            },
            connect: latency(&book.connect),
            first_byte: latency(&book.first_byte),
            response: latency(&book.response),
            failures: book.failures.by_name(Failure::ALL),
            statuses: book.statuses.iter().map(|(status, count)| (status.to_string(), *count)).collect(),
            tally: plan.terms.expected.tally.clone().map(|name| TallyReport {
                name,
                values: book.tallied.clone(),
                threads: measured.threads.iter().map(|thread| thread.ran.book.tallied.clone()).collect(),
            }),
            sent_bytes: book.sent_bytes,
            received_bytes: book.received_bytes,
            body_bytes: book.body_bytes,
            server: measured.server.map(|used| {
                let cpu_us = used.time.all_ns as f64 / 1e3;
                ServerReport {
                    pids: plan.server_pids.clone(),
                    cgroup: plan.server_cgroup.as_ref().map(|path| path.display().to_string()),
                    cpu_us,
                    user_us: used.time.user_ns as f64 / 1e3,
                    system_us: used.time.system_ns as f64 / 1e3,
                    cpu_us_per_connection: per(cpu_us, book.established as f64),
                    cpu_us_per_request: per(cpu_us, book.answered as f64),
                    processes: used.processes,
                }
            }),
            cpu_s: nano(cpu_s),
            cpu_us_per_request: per(cpu_s * 1e6, book.answered as f64),
            kernel: measured.counters.clone(),
            open: measured.open.as_ref().map(OpenReport::of),
            threads: measured.threads.iter().map(thread).collect(),
        }
    }
}

fn thread(thread: &ThreadRan) -> ThreadReport {
    ThreadReport {
        cpu: thread.cpu,
        elapsed_s: thread.elapsed_ns as f64 / 1e9,
        messages: thread.ran.book.answered,
        cpu_s: thread.cpu_ns as f64 / 1e9,
        runqueue_wait_s: thread.runqueue_wait_ns as f64 / 1e9,
    }
}

/// Reasons to doubt the figures.
fn about_run(plan: &Plan, measured: &Measured) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let spins = matches!(plan.pace, Pace::Open { spin, .. } if !spin.is_zero());
    let share = |thread: &ThreadRan| stats::per(thread.cpu_ns as f64, thread.elapsed_ns as f64);
    let busiest = measured.threads.iter().map(share).fold(0.0, f64::max);
    if plan.connections > plan.threads && !spins && busiest > warn::BUSY_SHARE {
        let text = format!(
            "a thread of this program used {:.0} % of its CPU: the server may be able to do more than was measured; add \
             threads on CPUs of their own (--cpu)",
            busiest * 100.0
        );
        warnings.push(Warning { code: "generator-busy", text });
    }
    if let (Pace::Open { rate_per_s, .. }, Some(open)) = (plan.pace, &measured.open) {
        let gap_ns = plan.threads as f64 * 1e9 / rate_per_s as f64;
        warnings.extend(warn::late_schedule(open, gap_ns));
        warnings.extend(warn::bound_reached(open, &format!("all {} connections busy", plan.connections), "-n"));
    }
    let risen = |name: &str| measured.counters.get(name).copied().flatten().unwrap_or(0);
    let dropped = risen("ListenOverflows").max(risen("ListenDrops"));
    if dropped > 0 {
        let text = format!(
            "a queue of accepted connections was full {dropped} times in this network namespace: such a connect is tried \
             again after a second, which the slowest latencies show; raise the server's backlog and net.core.somaxconn, \
             or lower -n"
        );
        warnings.push(Warning { code: "listen-queue-full", text });
    }
    if measured.book.close_timeouts > 0 {
        let text = format!(
            "the server did not close {} connections it was asked to close, each of which cost a time limit; use \
             --close client or --close reset",
            measured.book.close_timeouts
        );
        warnings.push(Warning { code: "server-keeps-open", text });
    }
    if measured.server.is_some_and(|used| used.roots_gone > 0) {
        let text = "a process of --server-pid ended during the run: what it used since it was last seen is missing";
        warnings.push(Warning { code: "server-gone", text: text.into() });
    }
    if measured.threads.iter().any(|thread| thread.ran.hopeless) {
        let text =
            "not one of the first 1000 connections was established, so the run was ended; is the server running?";
        warnings.push(Warning { code: "nobody-there", text: text.into() });
    }
    warnings
}

fn notes(measured: &Measured) -> Vec<String> {
    let text = |(at_ns, what): &(u64, String)| {
        format!("after {:.3} s: {what}", at_ns.saturating_sub(measured.start_ns) as f64 / 1e9)
    };
    measured.book.notes.iter().take(NOTES_MAX).map(text).collect()
}

fn in_words(counts: &BTreeMap<String, u64>) -> String {
    let occurred = counts.iter().filter(|(_, count)| **count > 0);
    occurred.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
}

fn or_none(text: String) -> String {
    match text.is_empty() {
        true => "none".to_owned(),
        false => text,
    }
}
