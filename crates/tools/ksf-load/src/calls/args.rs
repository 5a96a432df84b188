//! The options that echotest and rpctest share, and the plan they make.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::drive::connection::{Life, Terms, TimeLimit};
use crate::drive::plan::{Destination, DrivePlan};
use crate::drive::probe::answering_endpoints;
use crate::drive::protocol::Protocol;
use crate::drive::schedule::Arrival;
use crate::drive::socket::{SocketOptions, Transport};
use crate::drive::table::RequestTable;
use crate::drive::worker::ns;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_u64};
use crate::options::target::Target;
use crate::options::{CpuArgs, OutputArgs, PaceArgs, number, positive_time, reports, usage};

/// The most requests in flight per thread. The originals clamped to 1023 and 1024.
const IN_FLIGHT_MAX: u64 = 65_536;

/// In flight at most in an open loop, where `-a` is a safety net and not the load.
const OPEN_IN_FLIGHT: u64 = 1024;

/// Length of an open-loop run if neither `--duration` nor `-c` is given.
const OPEN_DURATION: Duration = Duration::from_secs(10);

/// Messages per thread if neither `--duration` nor `-c` is given.
const MESSAGES: u64 = 1_000_000;

/// The most quantiles that get a column.
const QUANTILES_MAX: usize = 16;

/// The quantiles of the original: the median and one, two and three standard deviations of a normal distribution.
const QUANTILES: &str = ".3, 4.6, 31.7, 50, 68.3, 95.4, 99.7";

/// Bytes that count as progress even though no reply is complete yet: a large echo may take longer than the
/// time limit, a peer that trickles single bytes shall not.
const PROGRESS_BYTES: u64 = 16 * 1024;

/// Options of both echotest and rpctest.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(version, allow_negative_numbers = true)]
pub struct CallArgs {
    /// Where to send: a host name or address, or unix:/path for a Unix-domain stream socket
    #[arg(value_name = "[user@]HOST[:PORT]")]
    pub host: String,

    /// Most messages in flight per thread; 0 for a synchronous loop [default: 1, or 1024 with --rate]
    #[arg(short = 'a', long = "in-flight", value_name = "N", value_parser = number::<0, IN_FLIGHT_MAX>)]
    pub in_flight: Option<u64>,

    /// Messages per thread and iteration [default: 1000000, or no limit with --duration]
    #[arg(short = 'c', long = "count", value_name = "N", value_parser = parse_u64)]
    pub count: Option<u64>,

    /// Directory for each iteration's raw histogram, a gnuplot script for it, and an SVG plot
    #[arg(short = 'd', long = "histogram-dir", value_name = "DIR")]
    #[serde(serialize_with = "reports::path")]
    pub histogram_dir: Option<PathBuf>,

    /// Suppress the header line
    #[arg(short = 'H', long = "no-header", overrides_with = "no_header")]
    pub no_header: bool,

    /// Iterations, one line each [default: 99 for rpctest, endless for echotest, 1 with --rate or --duration]
    #[arg(short = 'i', long = "iterations", value_name = "N", value_parser = parse_u64)]
    pub iterations: Option<u64>,

    /// Threads, each with a connection of its own
    #[arg(short = 'j', long = "jobs", value_name = "N", default_value = "1", value_parser = number::<1, 10_000>)]
    pub jobs: u64,

    /// Show running averages instead of running medians
    #[arg(short = 'm', long = "average", overrides_with = "average")]
    pub average: bool,

    /// Port, where HOST names none [default: 60007 for echotest, 62049 for rpctest]
    #[arg(short = 'p', long = "port", value_name = "PORT", value_parser = number::<1, 65_535>)]
    pub port: Option<u64>,

    /// Quantiles to show, in percent; at most 16; "" for none
    #[arg(short = 'q', long = "quantiles", value_name = "LIST", default_value = QUANTILES, allow_hyphen_values = true)]
    pub quantiles: String,

    /// Use UDP
    #[arg(short = 'u', long = "udp", overrides_with = "udp")]
    pub udp: bool,

    /// Show more columns
    #[arg(short = 'x', long = "extended", overrides_with = "extended")]
    pub extended: bool,

    /// Say more on stderr; repeat for more
    #[arg(short = 'v', long = "verbose", action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Send up to N messages per send and take as many replies per receive as there are (not the original's method)
    #[arg(long, value_name = "N", default_value = "1", value_parser = number::<1, IN_FLIGHT_MAX>)]
    pub batch: u64,

    /// Give up after this time without a reply (TCP), or per message (UDP) [default: 5 s, UDP 1 s]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    #[serde(rename = "timeout_s", with = "reports::seconds")]
    pub timeout: Option<Duration>,

    /// Length of an iteration
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    #[serde(rename = "duration_s", with = "reports::seconds")]
    pub duration: Option<Duration>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub pace: PaceArgs,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub cpus: CpuArgs,

    /// Scheduling priority to ask for; ignored without the right to it [default: as the original]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-20..=19))]
    pub nice: Option<i32>,

    /// TCP_NODELAY; auto sets it with one message in flight, as the original
    #[arg(long, value_name = "WHEN", value_enum, default_value = "auto")]
    pub nodelay: NoDelay,

    /// SO_SNDBUF of the sockets, in bytes [default: the system's]
    #[arg(long, value_name = "BYTES", value_parser = number::<1, { 1 << 30 }>)]
    pub sndbuf: Option<u64>,

    /// SO_RCVBUF of the sockets, in bytes [default: the system's; UDP: what is in flight]
    #[arg(long, value_name = "BYTES", value_parser = number::<1, { 1 << 30 }>)]
    pub rcvbuf: Option<u64>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub output: OutputArgs,

    /// Show a progress line on stderr even if it is no terminal
    #[arg(long, overrides_with = "no_progress")]
    pub progress: bool,

    /// Never show a progress line
    #[arg(long, overrides_with = "progress")]
    pub no_progress: bool,
}

/// When TCP_NODELAY is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NoDelay {
    /// With at most one message in flight.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// What differs between the tools.
pub(crate) struct ToolDefaults {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    pub(crate) iterations: u64,
    pub(crate) nice: i32,
}

/// Everything that is known before the first connection, checked and with defaults filled in.
#[derive(Debug, Clone)]
pub(crate) struct CallPlan {
    pub(crate) drive: DrivePlan,
    pub(crate) target: Target,
    pub(crate) socket: SocketOptions,
    /// With defaults filled in.
    pub(crate) args: CallArgs,
    pub(crate) iterations: u64,
    /// In percent, ascending.
    pub(crate) quantiles: Vec<f64>,
}

impl CallArgs {
    /// Checks what clap cannot, and fills in the tool's defaults.
    pub(crate) fn plan(&self, tool: &ToolDefaults) -> Result<CallPlan, LoadError> {
        let port = self.port.map_or(tool.port, |port| port as u16);
        let target = Target::parse(&self.host, port)?;
        let rate = self.pace.rate;
        let transport = match (&target, self.udp) {
            (Target::Unix(_), true) => return usage("-u needs a host; a unix: target is a stream"),
            (Target::Unix(_), false) => Transport::Unix,
            (Target::Inet { .. }, true) => Transport::Udp,
            (Target::Inet { .. }, false) => Transport::Tcp,
        };
        if self.batch > 1 && transport.is_datagram() {
            return usage("--batch needs a stream: a datagram is one message");
        }
        if self.batch > 1 && rate.is_some() {
            return usage("--batch and --rate exclude each other: a batch has no schedule");
        }
        let in_flight_given = self.in_flight.unwrap_or(match rate {
            Some(_) => OPEN_IN_FLIGHT,
            None => 1,
        });
        if self.batch > in_flight_given.max(1) {
            return usage("--batch cannot be larger than -a: a batch is in flight as a whole");
        }
        let synchronous = in_flight_given == 0;
        if synchronous && rate.is_some() {
            return usage("-a 0 and --rate exclude each other: a synchronous loop has no schedule");
        }
        let duration = match (self.duration, rate, self.count) {
            (None, Some(_), None) => Some(OPEN_DURATION),
            (duration, _, _) => duration,
        };
        let messages = match (self.count, duration) {
            (Some(count), _) => Some(count.max(1)),
            (None, Some(_)) => None,
            (None, None) => Some(MESSAGES),
        };
        let iterations = match (self.iterations, rate, self.duration) {
            (Some(iterations), _, _) => iterations.max(1),
            (None, None, None) => tool.iterations,
            (None, _, _) => 1,
        };
        let (limit, default) = match transport.is_datagram() {
            true => (TimeLimit::Request, 1),
            false => (TimeLimit::Reply { progress_bytes: PROGRESS_BYTES }, 5),
        };
        let timeout = self.timeout.unwrap_or(Duration::from_secs(default));
        let terms = Terms { life: Life::Kept, limit, timeout_ns: ns(timeout) };
        let socket = SocketOptions {
            nodelay: match self.nodelay {
                NoDelay::On => true,
                NoDelay::Off => false,
                NoDelay::Auto => in_flight_given <= 1 || rate.is_some(),
            },
            tick: terms.tick(),
            send_buffer_bytes: self.sndbuf.map(|bytes| bytes as usize),
            receive_buffer_bytes: self.rcvbuf.map(|bytes| bytes as usize),
            ..SocketOptions::new(transport, timeout)
        };
        let nice = self.nice.unwrap_or(tool.nice);
        let threads = self.jobs as usize;
        let mut args = CallArgs {
            in_flight: Some(in_flight_given),
            count: messages,
            iterations: (iterations != u64::MAX).then_some(iterations),
            timeout: Some(timeout),
            duration,
            nice: Some(nice),
            nodelay: if socket.nodelay { NoDelay::On } else { NoDelay::Off },
            ..self.clone()
        };
        let destination = Destination::Kept { target: target.clone(), endpoints: Vec::new(), socket: socket.clone() };
        Ok(CallPlan {
            drive: DrivePlan {
                pace: args.pace.fill(Arrival::Constant),
                blocking: rate.is_none(),
                wait_all: synchronous,
                batch: self.batch as usize,
                connections: threads,
                in_flight: in_flight_given.max(1) as usize,
                requests: messages.map(|messages| messages.saturating_mul(self.jobs)),
                duration,
                threads,
                pinning: self.cpus.pinning()?,
                nice: Some(nice),
                spin: self.pace.spin,
                ..DrivePlan::new(tool.name, destination, terms)
            },
            target,
            socket,
            args,
            iterations,
            quantiles: parse_quantiles(&self.quantiles)?,
        })
    }
}

impl CallPlan {
    /// Fits the plan to a protocol's messages, and resolves the target.
    pub(crate) fn fit<P: Protocol>(&mut self, protocol: &P) -> Result<(), LoadError> {
        self.fit_identifiers(protocol.request_bytes(), protocol.id_bits())?;
        let (terms, socket) = (&self.drive.terms, self.socket.clone());
        let endpoints = answering_endpoints(protocol, terms, &socket, self.target.resolve()?);
        self.drive.destination = Destination::Kept { target: self.target.clone(), endpoints, socket };
        Ok(())
    }

    /// Fits the plan to messages of `message_bytes` whose identifiers have `id_bits` bits.
    fn fit_identifiers(&mut self, message_bytes: usize, id_bits: u32) -> Result<(), LoadError> {
        let most = RequestTable::most_in_flight(id_bits);
        let in_flight = self.drive.in_flight;
        if in_flight > most {
            return usage(format!(
                "-a {in_flight} is too much for datagrams of {message_bytes} bytes: their numbers tell only {most} apart; \
                 use -l 4 or more"
            ));
        }
        // The kernel charges a datagram with its own bookkeeping; with room for all that is in flight, a loss is
        // the network's or the server's. The system's limit (net.core.rmem_max) still holds.
        if self.socket.transport.is_datagram() && self.socket.receive_buffer_bytes.is_none() {
            const BOOKKEEPING: usize = 1024;
            const SYSTEM_DEFAULT: usize = 212_992;
            let needed = in_flight * (message_bytes + BOOKKEEPING);
            self.socket.receive_buffer_bytes = (needed > SYSTEM_DEFAULT).then_some(needed);
        }
        Ok(())
    }
}

/// Percent values separated by commas or blanks; sorted, at most 16, as in the original.
fn parse_quantiles(list: &str) -> Result<Vec<f64>, LoadError> {
    let mut quantiles = Vec::new();
    for text in list.split(|c: char| c == ',' || c.is_whitespace()).filter(|text| !text.is_empty()) {
        let wrong = |source| LoadError::Number { option: "-q".into(), source };
        let percent: f64 = text.parse().map_err(|_| wrong(NumberError::Invalid { text: text.to_string() }))?;
        if !(0.0..=100.0).contains(&percent) {
            return Err(wrong(NumberError::OutOfRange { text: text.to_string(), min: 0, max: 100 }));
        }
        quantiles.push(percent);
    }
    quantiles.truncate(QUANTILES_MAX);
    quantiles.sort_by(f64::total_cmp);
    Ok(quantiles)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::drive::pin::Pinning;
    use crate::error::exit_code_of_parse;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        common: CallArgs,
    }

    const TOOL: ToolDefaults = ToolDefaults { name: "rpctest", port: 62049, iterations: 99, nice: -20 };

    /// The plan of a command line, or the exit status.
    pub(crate) fn plan(line: &str) -> Result<CallPlan, u8> {
        let words = std::iter::once("rpctest").chain(line.split_whitespace());
        let program = Program::try_parse_from(words).map_err(|error| exit_code_of_parse(&error))?;
        program.common.plan(&TOOL).map_err(|error| error.exit_code())
    }

    #[test]
    fn the_defaults_of_the_original() {
        let plan = plan("localhost").unwrap();
        assert_eq!(plan.target.to_string(), "localhost:62049");
        assert_eq!((plan.args.in_flight, plan.drive.threads, plan.drive.batch), (Some(1), 1, 1));
        assert_eq!((plan.args.count, plan.iterations), (Some(1_000_000), 99));
        assert_eq!(plan.quantiles, [0.3, 4.6, 31.7, 50.0, 68.3, 95.4, 99.7]);
        assert_eq!(plan.drive.pinning, Pinning::Mask);
        assert!(plan.socket.nodelay && !plan.args.no_header && !plan.args.average && !plan.args.extended);
        assert_eq!(plan.socket.transport, Transport::Tcp);
    }

    #[test]
    fn options_may_follow_the_host_and_take_suffixes() {
        let plan = plan("-a 128 greg@localhost:99 -c9M -j2 -i 0 -Hmx -p 7 -H").unwrap();
        assert_eq!(plan.target.to_string(), "localhost:99");
        assert_eq!((plan.drive.in_flight, plan.drive.threads), (128, 2));
        assert_eq!((plan.args.count, plan.iterations), (Some(9_000_000), 1));
        assert!(plan.args.no_header && plan.args.average && plan.args.extended && !plan.socket.nodelay);
    }

    #[test]
    fn a_time_or_a_rate_makes_one_run_without_a_count() {
        let timed = plan("h --duration 500ms").unwrap();
        assert_eq!((timed.args.count, timed.iterations), (None, 1));
        let open = plan("h --rate 10K/s --arrival poisson").unwrap();
        assert_eq!((open.args.count, open.drive.duration), (None, Some(OPEN_DURATION)));
        assert_eq!(open.drive.in_flight, 1024);
        let counted = plan("h --rate 10K/s -c 5 -a 3").unwrap();
        assert_eq!((counted.args.count, counted.drive.duration), (Some(5), None));
        assert_eq!(counted.drive.in_flight, 3);
    }

    #[test]
    fn mistakes_get_the_status_of_the_original() {
        for (line, status) in [
            ("", 64),
            ("a b", 64),
            ("h --no-such", 64),
            ("h -a", 64),
            ("h -a x", 65),
            ("h -c -1", 65),
            ("h -c 2kfoo", 65),
            ("h -a 65537", 65),
            ("h -j 0", 65),
            ("h -p 0", 65),
            ("h:70000", 65),
            ("h -q 101", 65),
            ("h -q -1", 65),
            ("h -q 5,x", 65),
            ("h --timeout 0", 65),
            ("h --rate 0", 65),
            ("h --arrival poisson", 64),
            ("h --cpu x", 64),
            ("h --cpu 1 --no-pin", 64),
            ("unix:/x -u", 64),
            ("h -u --batch 2 -a 4", 64),
            ("h --batch 5 -a 4", 64),
            ("h --rate 5 --batch 2 -a 4", 64),
            ("h --rate 5 -a 0", 64),
            ("-h", 0),
            ("-V", 0),
        ] {
            assert_eq!(plan(line).err(), Some(status), "{line}");
        }
    }

    #[test]
    fn quantiles_are_sorted_and_cut() {
        assert!(parse_quantiles("").unwrap().is_empty());
        assert_eq!(parse_quantiles("99 1,50").unwrap(), [1.0, 50.0, 99.0]);
        let many = (0..20).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
        assert_eq!(parse_quantiles(&many).unwrap().len(), QUANTILES_MAX);
        assert!(parse_quantiles("nan").is_err());
    }

    #[test]
    fn an_empty_list_of_quantiles_is_accepted() {
        let program = Program::try_parse_from(["rpctest", "h", "-q", ""]).unwrap();
        assert!(program.common.plan(&TOOL).unwrap().quantiles.is_empty());
    }

    #[test]
    fn short_datagrams_limit_what_is_in_flight() {
        let mut plan = plan("h -u -a 200").unwrap();
        assert!(plan.clone().fit_identifiers(1, 8).is_err());
        plan.fit_identifiers(4, 32).unwrap();
        assert_eq!(plan.socket.receive_buffer_bytes, None);
        plan.drive.in_flight = 1024;
        plan.fit_identifiers(64, 32).unwrap();
        assert_eq!(plan.socket.receive_buffer_bytes, Some(1024 * 1088));
    }
}
