//! `http`: loads a server that speaks HTTP/1.1, connection by connection, and accounts for every request.
//!
//! ```text
//!   LoadHttpArgs -> HttpPlan -> ports: will they last?
//!                      |
//!                      +-> drive: threads, connections -> HttpClient: requests, checks; response::Reader: heads, bodies, any cut
//!                      +-> kernel_counters, server_cpu: watched meanwhile
//!                      +-> HttpReport
//! ```
//!
//! There is no TLS, no pipelining and no body in requests.

mod client;
mod kernel_counters;
mod plan;
mod ports;
pub mod report;
mod response;
mod server_cpu;
mod url;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::kernel_counters::{KernelCounters, time_wait};
use self::plan::HttpPlan;
use self::ports::Forecast;
use self::report::{HttpReport, Measured};
use self::response::Expected;
use self::server_cpu::Watch;
use self::url::{Url, check_header, is_token};
use crate::drive::connection::{CloseBy, Life, Terms, TimeLimit};
use crate::drive::descriptors::raise_descriptors;
use crate::drive::pin::Pinning;
use crate::drive::plan::{Destination, DrivePlan};
use crate::drive::schedule::Arrival;
use crate::drive::threads;
use crate::drive::worker::ns;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_duration, parse_in, parse_u64};
use crate::options::{CpuArgs, OutputArgs, PaceArgs, number, positive_time, reports, usage};
use crate::report::document::say;
use crate::report::files::Files;
use crate::report::{Io, warn, with_process_io};

/// Length of a run if neither `--duration` nor `-c` is given.
const DURATION: Duration = Duration::from_secs(10);

/// Connections of a closed loop, and at most in an open one, where `-n` is a safety net and not the load.
const CONNECTIONS: u64 = 64;
const OPEN_CONNECTIONS: u64 = 1024;
const CONNECTIONS_MAX: u64 = 1 << 20;

/// Options of http.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(
    version,
    about = "Measure a server of HTTP/1.1: connections or requests per second, latencies, every error by kind",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct LoadHttpArgs {
    /// What to ask for: http://HOST[:PORT][/PATH]; connections go to several in turn
    #[arg(value_name = "URL", required = true)]
    pub urls: Vec<String>,

    /// Connections at a time, over all threads [default: 64; with --rate at most 1024]
    #[arg(short = 'n', long, value_name = "N", value_parser = number::<1, CONNECTIONS_MAX>)]
    pub connections: Option<u64>,

    /// Requests on a connection before it is closed; 0 for no limit (keep-alive)
    #[arg(short = 'r', long, value_name = "N", value_parser = parse_u64, default_value = "1")]
    pub requests_per_connection: u64,

    /// Who closes a connection that has had its requests
    #[arg(long, value_name = "WHO", value_enum, default_value = "server")]
    pub close: CloseBy,

    /// The same as --close reset: end connections by a reset, which leaves nothing in TIME_WAIT
    #[arg(long, conflicts_with = "close")]
    pub linger0: bool,

    /// Requests over all connections [default: no limit]
    #[arg(short = 'c', long, value_name = "N", value_parser = number::<1, { u64::MAX }>)]
    pub count: Option<u64>,

    /// Length of the run [default: 10 s, or no limit with -c]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    #[serde(rename = "duration_s", with = "reports::seconds")]
    pub duration: Option<Duration>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub pace: PaceArgs,

    /// Time limit of a connect
    #[arg(long, value_name = "TIME", value_parser = positive_time, default_value = "5s")]
    #[serde(rename = "connect_timeout_s", with = "reports::all_seconds")]
    pub connect_timeout: Duration,

    /// Time limit of an answer, from when its connection stands
    #[arg(long, value_name = "TIME", value_parser = positive_time, default_value = "5s")]
    #[serde(rename = "timeout_s", with = "reports::all_seconds")]
    pub timeout: Duration,

    /// How long what is under way at the end is awaited [default: both time limits]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(rename = "drain_s", with = "reports::seconds")]
    pub drain: Option<Duration>,

    /// Addresses of this machine to connect from, in turn; each has ports of its own
    #[arg(long, value_name = "ADDR,...", value_delimiter = ',')]
    pub source: Vec<IpAddr>,

    /// A line of the request's head; repeatable
    #[arg(long, value_name = "NAME: VALUE")]
    pub header: Vec<String>,

    /// Statuses that are right [default: 200 to 299]
    #[arg(long, value_name = "STATUS,...", value_delimiter = ',', value_parser = status)]
    pub expect_status: Vec<u16>,

    /// The body that every answer must have
    #[arg(long, value_name = "FILE", conflicts_with = "expect_bytes")]
    #[serde(serialize_with = "reports::path")]
    pub check: Option<PathBuf>,

    /// The length that the body of every answer must have
    #[arg(long, value_name = "N", value_parser = parse_u64)]
    pub expect_bytes: Option<u64>,

    /// Count answers, those of each thread apart, by the value of this field of their heads; it may name the worker
    #[arg(long, value_name = "NAME")]
    pub tally: Option<String>,

    /// Threads [default: 1, or one for each CPU of --cpu]
    #[arg(short = 'j', long = "jobs", value_name = "N", value_parser = number::<1, 1024>)]
    pub jobs: Option<u64>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub cpus: CpuArgs,

    /// Report the CPU time of this process and all its descendants; repeatable
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..1 << 22))]
    pub server_pid: Vec<u32>,

    /// Report the CPU time of this control group, a directory with cpu.stat
    #[arg(long, value_name = "PATH")]
    #[serde(serialize_with = "reports::path")]
    pub server_cgroup: Option<PathBuf>,

    /// Run although the ports cannot last
    #[arg(long)]
    pub force: bool,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub output: OutputArgs,
}

const AFTER_HELP: &str = "\
Each connection has one request at a time. Latencies count from the start of the request, connecting included; with \
--rate from the intended start, so that a request that had to wait is charged for the wait. Requests are GET; there is \
no TLS.

Who closes first has the connection in TIME_WAIT for a minute, and its port with it. Before it starts, the program \
computes whether its ports last, and says what to do if they do not.

Numbers take a suffix: k m g are powers of 1024, K M G powers of 1000. Times take us, ms, s, m or h; without a unit they \
are seconds.

Exit status: 0 every request had its right answer, 1 some had not, 64 wrong use, 65 bad number, 66 no such file, \
68 unknown host, 69 no connection or not enough ports, 70 bug of this program, 71 system error, \
74 the results cannot be written.";

/// Runs http on stdout and stderr until it is done or interrupted.
pub fn run(args: LoadHttpArgs) -> Result<HttpReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs http with the given output.
pub fn run_with(args: &LoadHttpArgs, io: &mut Io<'_>) -> Result<HttpReport, LoadError> {
    let mut plan = args.plan()?;
    let (routes, exchange) = plan.resolve()?;
    let forecast = Forecast::of(&plan, &routes);
    let mut early: Vec<_> = forecast.judge(plan.args.force)?.into_iter().collect();
    raise_descriptors(plan.drive.connections as u64)?;
    early.extend(warn::shared_cpus(&plan.drive));
    let urls: Vec<String> = plan.urls.iter().map(ToString::to_string).collect();
    let mut files = Files::create(&plan.args.output, format!("http {}", urls.join(" ")))?;

    let mut server = Watch::begin(&plan.args.server_pid, plan.args.server_cgroup.as_deref())?;
    let (time_wait_before, counters) = (time_wait(), KernelCounters::now());
    let run = threads::run(&plan.drive, &exchange, 1, io.stop, |_| {
        if let Some(server) = &mut server {
            server.look();
        }
    })?;
    let server = server.map(Watch::end).transpose()?;
    let kernel = KernelCounters::now().since(&counters);
    let measured = Measured { run, server, kernel, time_wait_before, time_wait_after: time_wait() };

    let run = &measured.run;
    files.add_run(run.started_unix_s, run.wall_s(), &run.latencies)?;
    files.finish(&run.latencies)?;
    let report = report::of(&plan, &routes, &exchange, &forecast, early, &measured);
    report.notes.iter().for_each(|note| say("http", note, io));
    let complaint = format!("not every answer was right: {}", report.body.faults());
    report.publish("http", plan.args.output.json, &report::text(&report), &complaint, io)?;
    Ok(report)
}

impl LoadHttpArgs {
    /// Checks what clap cannot, and fills in defaults.
    fn plan(&self) -> Result<HttpPlan, LoadError> {
        let urls = self.urls.iter().map(|text| Url::parse(text)).collect::<Result<Vec<_>, _>>()?;
        self.header.iter().try_for_each(|line| check_header(line))?;
        if let Some(name) = self.tally.as_ref().filter(|name| !is_token(name)) {
            return usage(format!("--tally `{name}`: it is no name of a field"));
        }
        for source in &self.source {
            // bind(2) says so only when it is too late.
            let probe = std::net::UdpSocket::bind((*source, 0));
            probe.map_err(|error| LoadError::Usage(format!("--source {source}: {error}; is it of this machine?")))?;
        }
        let pinning = self.cpus.pinning()?;
        let threads = match (&pinning, self.jobs) {
            (Pinning::List(_), Some(_)) => return usage("-j and --cpu exclude each other: each CPU has one thread"),
            (Pinning::List(cpus), None) => cpus.len(),
            (_, jobs) => jobs.unwrap_or(1) as usize,
        };
        let connections = self.connections.unwrap_or(match self.pace.rate {
            Some(_) => OPEN_CONNECTIONS,
            None => CONNECTIONS.max(threads as u64),
        }) as usize;
        if connections < threads {
            return usage("there are fewer connections (-n) than threads");
        }
        let body = match &self.check {
            Some(path) => {
                Some(std::fs::read(path).map_err(|source| LoadError::ReadFile { path: path.clone(), source })?)
            }
            None => None,
        };
        let close = if self.linger0 { CloseBy::Reset } else { self.close };
        let life = Life::Renewed {
            requests: self.requests_per_connection,
            close,
            connect_timeout_ns: ns(self.connect_timeout),
        };
        let limit = TimeLimit::Reply { progress_bytes: u64::MAX };
        let drain = self.drain.unwrap_or(self.connect_timeout + self.timeout);
        let duration = match (self.duration, self.count) {
            (None, None) => Some(DURATION),
            (duration, _) => duration,
        };
        let mut args = LoadHttpArgs {
            connections: Some(connections as u64),
            close,
            duration,
            drain: Some(drain),
            jobs: Some(threads as u64),
            ..self.clone()
        };
        Ok(HttpPlan {
            drive: DrivePlan {
                pace: args.pace.fill(Arrival::Poisson),
                connections,
                requests: self.count,
                duration,
                late: drain,
                drain,
                threads,
                pinning,
                spin: self.pace.spin,
                ..DrivePlan::new(
                    "http",
                    Destination::Renewed(Vec::new()),
                    Terms { life, limit, timeout_ns: ns(self.timeout) },
                )
            },
            urls,
            expected: Expected {
                statuses: self.expect_status.clone(),
                body: body.map(Vec::into_boxed_slice),
                body_bytes: self.expect_bytes,
                tally: self.tally.clone(),
            },
            args,
        })
    }
}

fn status(text: &str) -> Result<u16, NumberError> {
    parse_in(text, 200, 999).map(|status| status as u16)
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::client::Exchange;
    use super::*;
    use crate::error::exit_code_of_parse;

    pub(crate) use super::client::{HttpClient, HttpCounters};

    /// What any server is asked for, and may answer.
    pub(crate) fn exchange(close: CloseBy) -> Exchange {
        Exchange { requests: vec![Default::default()], close, expected: Expected::default() }
    }

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: LoadHttpArgs,
    }

    /// The plan of a command line, or the exit status.
    pub(super) fn plan(options: &str) -> Result<HttpPlan, u8> {
        let words = ["http"].into_iter().chain(options.split_whitespace());
        let program = Program::try_parse_from(words).map_err(|error| exit_code_of_parse(&error))?;
        program.args.plan().map_err(|error| error.exit_code())
    }

    #[test]
    fn defaults_depend_on_the_load() {
        let closed = plan("http://h/").unwrap();
        assert_eq!((closed.drive.connections, closed.drive.threads, closed.drive.duration), (64, 1, Some(DURATION)));
        assert_eq!((closed.args.requests_per_connection, closed.args.close), (1, CloseBy::Server));
        assert_eq!(closed.drive.drain, Duration::from_secs(10));
        let open = plan("http://h/ --rate 1K -c 9 --cpu 0,1 --linger0").unwrap();
        assert_eq!((open.drive.connections, open.drive.threads, open.drive.duration), (1024, 2, None));
        assert_eq!(open.args.close, CloseBy::Reset);
    }

    #[test]
    fn threads_share_connections_requests_and_rate() {
        let plan = plan("http://h/ -n 5 -c 7 -j 3 --rate 30").unwrap().drive;
        let shares = |all| [0, 1, 2].map(|thread| plan.share(all, thread));
        assert_eq!((shares(5), shares(7)), ([2, 2, 1], [3, 2, 2]));
        assert!(plan.schedule(2).is_some());
    }

    #[test]
    fn wrong_use_has_its_status() {
        for (options, status) in [
            ("", 64),
            ("https://h/", 64),
            ("http://h/ --linger0 --close client", 64),
            ("http://h/ --arrival poisson", 64),
            ("http://h/ --spin 2s", 65),
            ("http://h/ -j 2 --cpu 0,1", 64),
            ("http://h/ -j 2 -n 1", 64),
            ("http://h/ --cpu x", 64),
            ("http://h/ --source 192.0.2.1", 64),
            ("http://h/ --header nothing", 64),
            ("http://h/ --tally a:b", 64),
            ("http://h/ --source nothing", 65),
            ("http://h/ -n 0", 65),
            ("http://h/ --timeout 0", 65),
            ("http://h/ --expect-status 100", 65),
            ("http://h/ --server-pid 0", 65),
            ("http://h/ --check /no/such/file", 66),
        ] {
            assert_eq!(plan(options).map(|_| ()).unwrap_err(), status, "{options}");
        }
    }
}
