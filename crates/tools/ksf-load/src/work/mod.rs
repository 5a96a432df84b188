//! `worktest`: loads the work service, whose messages say what they cost, and verifies every reply.
//!
//! ```text
//!   Args -> Plan -+-> drive: one thread, epoll -> Book: in flight, classes, faults -> Report
//!                 |     Jobs, Spread, Schedule: what is sent, drawn from one seed
//!                 +-> ideal: the same messages before one queue, on paper ----------> Report
//! ```

mod book;
mod drive;
mod ideal;
mod load;
mod message;
mod plan;
pub mod report;

use std::io::ErrorKind;
use std::time::Duration;

use self::load::{Jobs, Mix, Slow, WorkTime, schedule};
use self::message::{REQUEST_BYTES_MAX, REQUEST_BYTES_MIN};
use self::plan::{Pace, Plan};
use self::report::Report;
use crate::drive::open::Arrival;
use crate::drive::pin::Pinning;
use crate::drive::transport::{SocketOptions, Transport};
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_duration, parse_in, parse_rate, parse_u64};
use crate::options::target::Target;
use crate::report::tool::{Io, with_process_io};

pub use self::load::Kind;

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
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure a work service, whose messages say what they cost, and verify every reply",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct Args {
    /// Where to send: a host name or address with a port, or unix:/path for a Unix-domain stream socket
    #[arg(value_name = "HOST:PORT", required_unless_present = "ideal")]
    pub host: Option<String>,

    /// What messages ask for
    #[arg(short = 'k', long, value_enum, default_value = "inline")]
    pub kind: Kind,

    /// Length of a request in bytes, its length word and header (28 bytes) included [default: 64; discard: 5000]
    #[arg(short = 'l', long, value_name = "BYTES", value_parser = length)]
    pub length: Option<u64>,

    /// Time of work of a message: one, or two between which it is drawn
    #[arg(short = 'w', long, value_name = "TIME[..TIME]", value_parser = work_time, default_value = "50us..200us")]
    pub work: WorkTime,

    /// So many of a hundred messages work for TIME instead: they sleep, or compute with --kind compute
    #[arg(long, value_name = "PERCENT:TIME", value_parser = slow)]
    pub slow: Option<Slow>,

    /// Connections, all of weight 1 [default: 1]
    #[arg(short = 'n', long, value_name = "N", value_parser = connections, conflicts_with = "weights")]
    pub connections: Option<u64>,

    /// Connections by their weights, such as 3:1: what each has in flight, or its share of the messages
    #[arg(long, value_name = "N:N...", value_parser = weights)]
    pub weights: Option<Weights>,

    /// Messages in flight per connection and unit of weight; with --spread in all; with --rate at most per connection
    /// [default: 1, or 1024 with --rate]
    #[arg(short = 'a', long, value_name = "N", value_parser = in_flight)]
    pub in_flight: Option<u64>,

    /// Closed loop over all connections: each message goes to one that is drawn by weight
    #[arg(long, conflicts_with = "rate")]
    pub spread: bool,

    /// Open loop: send N messages per second over all connections, and count latency from the intended start
    #[arg(long, value_name = "N[/s]", value_parser = parse_rate)]
    pub rate: Option<u64>,

    /// Gaps between the messages of --rate
    #[arg(long, value_enum, default_value = "poisson", requires = "rate")]
    pub arrival: Arrival,

    /// Never sleep within this time before a message of --rate is due (precise, but burns a CPU)
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", requires = "rate")]
    pub spin: Duration,

    /// Seed of arrivals, times and connections
    #[arg(long, value_name = "N", value_parser = parse_u64, default_value = "1")]
    pub seed: u64,

    /// Send nothing; compute what one queue before N workers would do with the messages of --rate
    #[arg(long, value_name = "N", value_parser = workers, requires = "rate", conflicts_with = "host")]
    pub ideal: Option<u64>,

    /// Messages over all connections [default: no limit]
    #[arg(short = 'c', long, value_name = "N", value_parser = parse_u64)]
    pub count: Option<u64>,

    /// Length of the run [default: 5 s, or no limit with -c]
    #[arg(long, value_name = "TIME", value_parser = positive)]
    pub duration: Option<Duration>,

    /// A message without a reply after this time is lost
    #[arg(long, value_name = "TIME", value_parser = positive, default_value = "5s")]
    pub timeout: Duration,

    /// The CPU to run on [default: the first of the mask]
    #[arg(long, value_name = "N", conflicts_with = "no_pin")]
    pub cpu: Option<String>,

    /// Leave the thread to the scheduler
    #[arg(long)]
    pub no_pin: bool,

    /// Suppress the header line
    #[arg(short = 'H', long)]
    pub no_header: bool,

    /// Print one JSON document instead of the table
    #[arg(long)]
    pub json: bool,
}

const AFTER_HELP: &str = "\
Loads are closed (a reply makes room for the next request) unless --rate is given. Latencies of the quick and of the \
--slow messages are told apart. The reply to a discarded message has no name: with several in flight on a connection it \
counts for the oldest, so the mean is exact and the quantiles are not.

Numbers take a suffix: k m g are powers of 1024, K M G powers of 1000. Times take us, ms, s, m or h; without a unit they \
are seconds.

Exit status: 0 every reply was right, 1 replies were wrong, missing or surplus, 64 wrong use, 65 bad number, \
68 unknown host, 69 no connection, 71 system error, 74 the results cannot be written.";

/// A weight for each connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weights(pub Vec<u32>);

/// A measurement that took place.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Everything that was measured.
    pub report: Report,
}

impl Outcome {
    /// 0 if every reply was right and none is missing, else 1.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.report.ok)
    }
}

/// Runs worktest on stdout and stderr until it is done or interrupted.
pub fn run(args: Args) -> Result<Outcome, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs worktest with the given output.
pub fn run_with(args: &Args, io: &mut Io<'_>) -> Result<Outcome, LoadError> {
    let plan = args.plan()?;
    let report = match (plan.ideal_workers, plan.pace) {
        (Some(workers), Pace::Open { rate_per_s, arrival, .. }) => {
            let mut schedule = schedule(arrival, rate_per_s, plan.seed);
            let mut jobs = Jobs::new(plan.mix, plan.seed);
            let until_ns = plan.duration.map_or(u64::MAX, |duration| duration.as_nanos() as u64);
            let messages = plan.messages.unwrap_or(u64::MAX);
            Report::of_ideal(&plan, &ideal::simulate(&mut schedule, &mut jobs, workers, messages, until_ns))
        }
        _ => Report::of_run(&plan, &drive::run(&plan, io)?),
    };
    let text = match plan.json {
        true => serde_json::to_string_pretty(&report).map_err(|error| LoadError::Output(error.into()))? + "\n",
        false => report.table(plan.header),
    };
    match io.out.write_all(text.as_bytes()).and_then(|()| io.out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => return Err(LoadError::Output(error)),
        _ => {}
    }
    // Talk: if nobody can hear it, nothing is lost.
    let mut say = |line: &str| drop(writeln!(io.err, "worktest: {line}"));
    report.notes.iter().for_each(|note| say(note));
    if !report.ok {
        say(&format!("error: not every reply was right: {}; {} correct", report.faults(), report.run.messages));
    }
    report.warnings.iter().for_each(|warning| say(&format!("warning: {}", warning.text)));
    Ok(Outcome { report })
}

impl Args {
    /// Checks what clap cannot, and fills in defaults.
    fn plan(&self) -> Result<Plan, LoadError> {
        let usage = |text: &str| Err(LoadError::Usage(text.into()));
        // No port is usual for the service; 0 is the one that a target cannot name.
        let target = self.host.as_deref().map(|host| Target::parse(host, 0)).transpose()?;
        let transport = match &target {
            Some(Target::Inet { port: 0, .. }) => return usage("the target has no port; write HOST:PORT"),
            Some(Target::Unix(_)) => Transport::Unix,
            _ => Transport::Tcp,
        };
        if self.kind == Kind::Discard && self.slow.is_some() {
            return usage(
                "--slow and --kind discard exclude each other: the replies to discarded messages have no name",
            );
        }
        let ones = self.connections.unwrap_or(1) as usize;
        let weights = self.weights.as_ref().map_or_else(|| vec![1; ones], |weights| weights.0.clone());
        let in_flight = self.in_flight.unwrap_or(match self.rate {
            Some(_) => OPEN_IN_FLIGHT,
            None => 1,
        }) as usize;
        let pace = match (self.rate, self.spread) {
            (Some(rate_per_s), _) => Pace::Open { rate_per_s, arrival: self.arrival, spin: self.spin },
            (None, true) => Pace::Window,
            (None, false) => Pace::PerConnection,
        };
        let duration = match (self.duration, self.count) {
            (None, None) => Some(DURATION),
            (duration, _) => duration,
        };
        let pinning = Pinning::of_options(self.cpu.as_deref(), self.no_pin)?;
        let request_bytes = self.length.unwrap_or(match self.kind {
            Kind::Discard => 5000,
            _ => 64,
        });
        let plan = Plan {
            target,
            ideal_workers: self.ideal.map(|workers| workers as usize),
            socket: SocketOptions {
                transport,
                nodelay: true,
                connect_timeout: self.timeout,
                tick: (self.timeout / 4).clamp(Duration::from_millis(1), Duration::from_millis(250)),
                send_buffer_bytes: None,
                receive_buffer_bytes: None,
            },
            weights,
            in_flight,
            pace,
            mix: Mix { kind: self.kind, work: self.work, slow: self.slow },
            request_bytes: request_bytes as usize,
            messages: self.count,
            duration,
            pinning,
            seed: self.seed,
            json: self.json,
            header: !self.no_header,
        };
        match plan.rooms().iter().any(|&room| room as u64 > IN_FLIGHT_MAX) {
            true => usage("-a times the largest weight is more than 65536 in flight on one connection"),
            false => Ok(plan),
        }
    }
}

fn length(text: &str) -> Result<u64, NumberError> {
    parse_in(text, REQUEST_BYTES_MIN as u64, REQUEST_BYTES_MAX as u64)
}

fn in_flight(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 1, IN_FLIGHT_MAX)
}

fn connections(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 1, CONNECTIONS_MAX as u64)
}

fn workers(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 1, 1 << 20)
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

fn positive(text: &str) -> Result<Duration, NumberError> {
    match parse_duration(text)? {
        Duration::ZERO => Err(NumberError::OutOfRange { text: text.to_owned(), min: 1, max: u64::from(u32::MAX) }),
        time => Ok(time),
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
    match min_us <= max_us {
        true => Ok(WorkTime { min_us, max_us }),
        false => Err(NumberError::Invalid { text: text.to_owned() }),
    }
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
        args: Args,
    }

    fn plan(options: &str) -> Result<Plan, u8> {
        let words = ["worktest"].into_iter().chain(options.split_whitespace());
        let program = Program::try_parse_from(words).map_err(|error| exit_code_of_parse(&error))?;
        program.args.plan().map_err(|error| error.exit_code())
    }

    #[test]
    fn defaults_depend_on_the_load() {
        let closed = plan("host:1").unwrap();
        assert_eq!((closed.in_flight, closed.request_bytes, closed.weights.as_slice()), (1, 64, &[1][..]));
        assert_eq!((closed.duration, closed.messages), (Some(DURATION), None));
        assert_eq!(plan("host:1 -k discard").unwrap().request_bytes, 5000);
        let open = plan("host:1 --rate 10k/s -c 5").unwrap();
        assert_eq!((open.in_flight, open.duration, open.messages), (1024, None, Some(5)));
        assert_eq!(open.mix.work, WorkTime { min_us: 50, max_us: 200 });
    }

    #[test]
    fn weights_are_requests_in_flight_or_shares() {
        assert_eq!(plan("host:1 --weights 8:1:1 -a 4").unwrap().rooms(), [32, 4, 4]);
        assert_eq!(plan("host:1 --weights 3:1 -a 32 --spread").unwrap().rooms(), [32, 32]);
        assert_eq!(plan("host:1 -n 3 --rate 9 -a 7").unwrap().rooms(), [7, 7, 7]);
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
