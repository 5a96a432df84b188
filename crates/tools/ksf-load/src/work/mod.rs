//! `worktest`: loads the work service, whose messages say what they cost, and verifies every reply.
//!
//! ```text
//!   WorktestArgs -> WorkPlan -+-> drive: one thread, many connections -> WorkClient: requests, checks -> WorkReport
//!                             |     Jobs, Spread, Schedule: what is sent, drawn from one seed
//!                             +-> ideal: the same messages before one queue, on paper -----------------> WorkReport
//! ```

mod client;
mod ideal;
mod message;
mod mix;
pub mod report;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::client::Work;
use self::message::{Codec, REQUEST_BYTES_MAX, REQUEST_BYTES_MIN};
use self::mix::{Jobs, Mix, Slow, WorkTime};
use self::report::WorkReport;
use crate::drive::connection::{Life, Terms, TimeLimit};
use crate::drive::plan::{Destination, DrivePlan, Pace};
use crate::drive::random::sub_seed;
use crate::drive::schedule::Arrival;
use crate::drive::socket::{SocketOptions, Transport};
use crate::drive::threads;
use crate::drive::worker::ns;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_duration, parse_in, parse_u64};
use crate::options::target::Target;
use crate::options::{CpuArgs, OutputArgs, PaceArgs, number, positive_time, reports, usage};
use crate::report::document::say;
use crate::report::files::Files;
use crate::report::{Io, with_process_io};

pub use self::mix::WorkKind;

/// Length of a run if neither `--duration` nor `-c` is given.
const DURATION: Duration = Duration::from_secs(5);

/// In flight at most on a connection in an open loop, where `-a` is a safety net and not the load.
const OPEN_IN_FLIGHT: u64 = 1024;

/// On one connection.
const IN_FLIGHT_MAX: u64 = 65_536;
const CONNECTIONS_MAX: usize = 1024;
const WEIGHT_MAX: u64 = 1000;

/// The service does no more for one message.
const WORK_MAX: Duration = Duration::from_secs(10);

/// Options of worktest.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(
    version,
    about = "Measure a work service, whose messages say what they cost, and verify every reply",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct WorktestArgs {
    /// Where to send: a host name or address with a port, or unix:/path for a Unix-domain stream socket
    #[arg(value_name = "HOST:PORT", required_unless_present = "ideal")]
    pub host: Option<String>,

    /// What messages ask for
    #[arg(short = 'k', long, value_enum, default_value = "inline")]
    pub kind: WorkKind,

    /// Length of a request in bytes, its length word and header (28 bytes) included [default: 64; discard: 5000]
    #[arg(short = 'l', long, value_name = "BYTES", value_parser = number::<{ REQUEST_BYTES_MIN as u64 }, { REQUEST_BYTES_MAX as u64 }>)]
    pub length: Option<u64>,

    /// Time of work of a message: one, or two between which it is drawn
    #[arg(short = 'w', long, value_name = "TIME[..TIME]", value_parser = work_time, default_value = "50us..200us")]
    pub work: WorkTime,

    /// So many of a hundred messages work for TIME instead: they sleep, or compute with --kind compute
    #[arg(long, value_name = "PERCENT:TIME", value_parser = slow)]
    pub slow: Option<Slow>,

    /// Connections, all of weight 1 [default: 1]
    #[arg(short = 'n', long, value_name = "N", value_parser = number::<1, { CONNECTIONS_MAX as u64 }>, conflicts_with = "weights")]
    pub connections: Option<u64>,

    /// Connections by their weights, such as 3:1: what each has in flight, or its share of the messages
    #[arg(long, value_name = "N:N...", value_parser = weights)]
    pub weights: Option<Weights>,

    /// Messages in flight per connection and unit of weight; with --spread in all; with --rate at most per connection
    /// [default: 1, or 1024 with --rate]
    #[arg(short = 'a', long, value_name = "N", value_parser = number::<1, IN_FLIGHT_MAX>)]
    pub in_flight: Option<u64>,

    /// Closed loop over all connections: each message goes to one that is drawn by weight
    #[arg(long, conflicts_with = "rate")]
    pub spread: bool,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub pace: PaceArgs,

    /// Send nothing; compute what one queue before N workers would do with the messages of --rate
    #[arg(long, value_name = "N", value_parser = number::<1, { 1 << 20 }>, requires = "rate", conflicts_with = "host")]
    pub ideal: Option<u64>,

    /// Messages over all connections [default: no limit]
    #[arg(short = 'c', long, value_name = "N", value_parser = parse_u64)]
    pub count: Option<u64>,

    /// Length of the run [default: 5 s, or no limit with -c]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    #[serde(rename = "duration_s", with = "reports::seconds")]
    pub duration: Option<Duration>,

    /// A message without a reply after this time is lost
    #[arg(long, value_name = "TIME", value_parser = positive_time, default_value = "5s")]
    #[serde(rename = "timeout_s", with = "reports::all_seconds")]
    pub timeout: Duration,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub cpus: CpuArgs,

    /// Suppress the header line
    #[arg(short = 'H', long)]
    pub no_header: bool,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub output: OutputArgs,
}

const AFTER_HELP: &str = "\
Loads are closed (a reply makes room for the next request) unless --rate is given. Latencies of the quick and of the \
--slow messages are told apart. The reply to a discarded message has no name: with several in flight on a connection it \
counts for the oldest, so the mean is exact and the quantiles are not.

Numbers take a suffix: k m g are powers of 1024, K M G powers of 1000. Times take us, ms, s, m or h; without a unit they \
are seconds.

Exit status: 0 every reply was right, 1 replies were wrong, missing or surplus, 64 wrong use, 65 bad number, \
68 unknown host, 69 no connection, 70 bug of this program, 71 system error, \
74 the results cannot be written.";

/// A weight for each connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights(pub Vec<u32>);

/// The plan of one run.
#[derive(Debug, Clone)]
struct WorkPlan {
    drive: DrivePlan,
    /// `None`: nothing is sent, workers are simulated.
    target: Option<Target>,
    socket: SocketOptions,
    mix: Mix,
    request_bytes: usize,
    /// With defaults filled in.
    args: WorktestArgs,
}

/// Runs worktest on stdout and stderr until it is done or interrupted.
pub fn run(args: WorktestArgs) -> Result<WorkReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs worktest with the given output.
pub fn run_with(args: &WorktestArgs, io: &mut Io<'_>) -> Result<WorkReport, LoadError> {
    let mut plan = args.plan()?;
    let target = plan.target.as_ref().map_or("ideal".to_owned(), ToString::to_string);
    let mut files = Files::create(&plan.args.output, format!("worktest {target}"))?;
    let (report, latencies) = match (args.ideal, plan.drive.schedule(0)) {
        (Some(workers), Some(mut schedule)) => {
            let mut jobs = Jobs::new(plan.mix, args.pace.seed);
            let until_ns = plan.drive.duration.map_or(u64::MAX, ns);
            let messages = plan.drive.requests.unwrap_or(u64::MAX);
            let ideal = ideal::simulate(&mut schedule, &mut jobs, workers as usize, messages, until_ns);
            report::of_ideal(&plan, &ideal)
        }
        _ => {
            plan.resolve()?;
            let codec = Arc::new(Codec::new(plan.request_bytes, plan.mix.kind == WorkKind::Discard));
            let work = Work { codec, mix: plan.mix, seed: args.pace.seed };
            report::of_run(&plan, &threads::run(&plan.drive, &work, 1, io.stop, |_| {})?)
        }
    };
    let run = &report.body.run;
    files.add_run(run.started_unix_s, run.wall_s, &latencies)?;
    files.finish(&latencies)?;
    report.notes.iter().for_each(|note| say("worktest", note, io));
    let complaint = format!("not every reply was right: {}; {} correct", run.faults(), run.messages);
    report.publish("worktest", plan.args.output.json, &run.table(!args.no_header), &complaint, io)?;
    Ok(report)
}

impl WorktestArgs {
    /// Checks what clap cannot, and fills in defaults.
    fn plan(&self) -> Result<WorkPlan, LoadError> {
        // No port is usual for the service; 0 is the one that a target cannot name.
        let target = self.host.as_deref().map(|host| Target::parse(host, 0)).transpose()?;
        let transport = match &target {
            Some(Target::Inet { port: 0, .. }) => return usage("the target has no port; write HOST:PORT"),
            Some(Target::Unix(_)) => Transport::Unix,
            _ => Transport::Tcp,
        };
        if self.kind == WorkKind::Discard && self.slow.is_some() {
            return usage(
                "--slow and --kind discard exclude each other: the replies to discarded messages have no name",
            );
        }
        let ones = self.connections.unwrap_or(1) as usize;
        let weights = self.weights.as_ref().map_or_else(|| vec![1; ones], |weights| weights.0.clone());
        let in_flight = self.in_flight.unwrap_or(match self.pace.rate {
            Some(_) => OPEN_IN_FLIGHT,
            None => 1,
        });
        let drawn = self.spread || self.pace.rate.is_some();
        let most = if drawn { 1 } else { weights.iter().copied().max().unwrap_or(1) };
        if in_flight * u64::from(most) > IN_FLIGHT_MAX {
            return usage("-a times the largest weight is more than 65536 in flight on one connection");
        }
        let seed = self.pace.seed;
        let mut args = self.clone();
        let pace = match args.pace.fill(Arrival::Poisson) {
            Pace::Open { rate_per_s, arrival, seed } => {
                Pace::Open { rate_per_s, arrival, seed: sub_seed(seed, "arrivals") }
            }
            closed => closed,
        };
        let duration = match (self.duration, self.count) {
            (None, None) => Some(DURATION),
            (duration, _) => duration,
        };
        let request_bytes = self.length.unwrap_or(match self.kind {
            WorkKind::Discard => 5000,
            _ => 64,
        });
        let args = WorktestArgs {
            length: Some(request_bytes),
            weights: Some(Weights(weights.clone())),
            connections: Some(weights.len() as u64),
            in_flight: Some(in_flight),
            duration,
            ..args
        };
        let terms = Terms { life: Life::Kept, limit: TimeLimit::Request, timeout_ns: ns(self.timeout) };
        let socket = SocketOptions { nodelay: true, tick: terms.tick(), ..SocketOptions::new(transport, self.timeout) };
        Ok(WorkPlan {
            drive: DrivePlan {
                pace,
                // As much with one system call as there is: the servers that are measured share the machine with this
                // program, and the cost of a message must not be that of its generator.
                batch: usize::MAX,
                connections: weights.len(),
                weights,
                spread: drawn.then(|| sub_seed(seed, "spread")),
                in_flight: in_flight as usize,
                requests: self.count,
                duration,
                pinning: self.cpus.pinning()?,
                spin: self.pace.spin,
                ..DrivePlan::new("worktest", Destination::Renewed(Vec::new()), terms)
            },
            target,
            socket,
            mix: Mix { kind: self.kind, work: self.work, slow: self.slow },
            request_bytes: request_bytes as usize,
            args,
        })
    }
}

impl WorkPlan {
    fn resolve(&mut self) -> Result<(), LoadError> {
        if let Some(target) = self.target.clone() {
            let endpoints = target.resolve()?;
            self.drive.destination = Destination::Kept { target, endpoints, socket: self.socket.clone() };
        }
        Ok(())
    }
}

fn weights(text: &str) -> Result<Weights, NumberError> {
    let weights: Vec<u32> = text
        .split(':')
        .map(|part| parse_in(part, 1, WEIGHT_MAX).map(|weight| weight as u32))
        .collect::<Result<_, _>>()?;
    match weights.len() {
        1..=CONNECTIONS_MAX => Ok(Weights(weights)),
        _ => Err(NumberError::Invalid { text: text.to_owned() }),
    }
}

fn work_us(text: &str) -> Result<u32, NumberError> {
    let time = parse_duration(text)?;
    match time <= WORK_MAX {
        true => Ok(time.as_micros() as u32),
        false => Err(NumberError::OutOfRange { text: text.to_owned(), min: 0, max: WORK_MAX.as_secs() }),
    }
}

fn work_time(text: &str) -> Result<WorkTime, NumberError> {
    let (min_us, max_us) = match text.split_once("..") {
        Some((least, most)) => (work_us(least)?, work_us(most)?),
        None => (work_us(text)?, work_us(text)?),
    };
    if min_us <= max_us { Ok(WorkTime { min_us, max_us }) } else { Err(NumberError::Invalid { text: text.to_owned() }) }
}

fn slow(text: &str) -> Result<Slow, NumberError> {
    let invalid = || NumberError::Invalid { text: text.to_owned() };
    let (percent, time) = text.split_once(':').ok_or_else(invalid)?;
    let percent: f64 = percent.parse().map_err(|_| invalid())?;
    match (0.0..=100.0).contains(&percent) {
        true => Ok(Slow { percent, work_us: work_us(time)? }),
        false => Err(NumberError::OutOfRange { text: text.to_owned(), min: 0, max: 100 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::exit_code_of_parse;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: WorktestArgs,
    }

    fn plan(options: &str) -> Result<WorkPlan, u8> {
        let words = ["worktest"].into_iter().chain(options.split_whitespace());
        let program = Program::try_parse_from(words).map_err(|error| exit_code_of_parse(&error))?;
        program.args.plan().map_err(|error| error.exit_code())
    }

    #[test]
    fn defaults_depend_on_the_load() {
        let closed = plan("host:1").unwrap();
        assert_eq!((closed.drive.in_flight, closed.request_bytes, closed.drive.weights.as_slice()), (1, 64, &[1][..]));
        assert_eq!((closed.drive.duration, closed.drive.requests), (Some(DURATION), None));
        assert_eq!(plan("host:1 -k discard").unwrap().request_bytes, 5000);
        let open = plan("host:1 --rate 10k/s -c 5").unwrap();
        assert_eq!((open.drive.in_flight, open.drive.duration, open.drive.requests), (1024, None, Some(5)));
        assert_eq!(open.mix.work, WorkTime { min_us: 50, max_us: 200 });
    }

    #[test]
    fn weights_are_requests_in_flight_or_shares() {
        let rooms = |options: &str| {
            let drive = plan(&format!("host:1 {options}")).unwrap().drive;
            (0..drive.connections).map(|connection| drive.room(connection)).collect::<Vec<_>>()
        };
        assert_eq!(rooms("--weights 8:1:1 -a 4"), [32, 4, 4]);
        assert_eq!(rooms("--weights 3:1 -a 32 --spread"), [32, 32]);
        assert_eq!(rooms("-n 3 --rate 9 -a 7"), [7, 7, 7]);
    }

    #[test]
    fn times_and_shares_are_read() {
        assert_eq!(plan("h:1 -w 100us").unwrap().mix.work, WorkTime { min_us: 100, max_us: 100 });
        assert_eq!(plan("h:1 --slow 2.5:20ms").unwrap().mix.slow, Some(Slow { percent: 2.5, work_us: 20_000 }));
    }

    #[test]
    fn wrong_use_has_its_status() {
        for (options, status) in [
            ("", 64),
            ("host", 64),
            ("host:1 -k nothing", 64),
            ("host:1 -k discard --slow 1:1ms", 64),
            ("host:1 -n 2 --weights 1:1", 64),
            ("host:1 --spread --rate 5", 64),
            ("host:1 --arrival poisson", 64),
            ("--ideal 4", 64),
            ("host:1 --rate 5 --ideal 4", 64),
            ("host:1 --weights 1000:1 -a 100", 64),
            ("host:1 --weights 0:1", 65),
            ("host:1 -l 27", 65),
            ("host:1 -w 2ms..1ms", 65),
            ("host:1 -w 11s", 65),
            ("host:1 --slow 101:1ms", 65),
            ("host:1 --slow 1ms", 65),
            ("host:1 -a 0", 65),
            ("host:1 --timeout 0", 65),
        ] {
            assert_eq!(plan(options).map(|_| ()).unwrap_err(), status, "{options}");
        }
    }
}
