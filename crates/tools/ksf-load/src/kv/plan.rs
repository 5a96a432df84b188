//! What kv is to do: its options, checked and with defaults filled in.

use std::time::Duration;

use super::LoadKvArgs;
use super::journal::Journaled;
use super::mix::Shares;
use crate::drive::connection::{Life, Terms, TimeLimit};
use crate::drive::pin::Pinning;
use crate::drive::plan::{Destination, DrivePlan, Pace};
use crate::drive::random::sub_seed;
use crate::drive::schedule::Arrival;
use crate::drive::socket::{SocketOptions, Transport};
use crate::drive::worker::ns;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_in};
use crate::options::target::Target;
use crate::options::usage;

/// That of Redis.
const PORT: u16 = 6379;

/// Length of a run if neither `--duration` nor `-n` is given.
const DURATION: Duration = Duration::from_secs(10);

/// In flight at most on a connection in an open loop, where `-P` is a safety net and not the load.
const OPEN_IN_FLIGHT: u64 = 128;

/// In flight at least on a connection while keys are filled, which is not measured.
const FILL_IN_FLIGHT: usize = 16;

/// Bytes that are as good as a reply: a long value may take longer than the time limit.
const PROGRESS_BYTES: u64 = 16 * 1024;

/// The longest beginning of keys.
const PREFIX_BYTES_MAX: usize = 256;

const SHARE_MAX: u64 = 1_000_000;

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Writes all keys.
    Fill,
    /// What is measured.
    Load,
    /// Reads all keys of a journal.
    Audit,
}

impl Stage {
    /// The name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Stage::Fill => "fill",
            Stage::Load => "load",
            Stage::Audit => "audit",
        }
    }
}

/// The plan of one run.
#[derive(Debug, Clone)]
pub(super) struct KvPlan {
    pub(super) drive: DrivePlan,
    pub(super) target: Target,
    pub(super) socket: SocketOptions,
    pub(super) sizes: Vec<usize>,
    /// The words of AUTH; none: there is nothing to log in with.
    pub(super) login: Vec<Vec<u8>>,
    /// With defaults filled in.
    pub(super) args: LoadKvArgs,
}

impl LoadKvArgs {
    /// Checks what clap cannot, and fills in defaults.
    pub(super) fn plan(&self) -> Result<KvPlan, LoadError> {
        let target = self.target.as_ref().or(self.listen.as_ref()).map_or("", String::as_str);
        let target = Target::parse(target, PORT)?;
        let transport = match &target {
            Target::Unix(_) => Transport::Unix,
            Target::Inet { .. } => Transport::Tcp,
        };
        let pinning = self.cpus.pinning()?;
        let threads = match (&pinning, self.jobs) {
            (Pinning::List(_), Some(_)) => return usage("-j and --cpu exclude each other: each CPU has one thread"),
            (Pinning::List(cpus), None) => cpus.len(),
            (_, jobs) => jobs.unwrap_or(1) as usize,
        };
        let connections = self.connections as usize;
        if connections < threads {
            return usage("there are fewer connections (-c) than threads");
        }
        if self.keys < self.connections {
            return usage("there are fewer --keys than connections (-c): each writes keys of its own");
        }
        let seed = self.pace.seed;
        let mut args = self.clone();
        let pace = match args.pace.fill(Arrival::Poisson) {
            Pace::Open { rate_per_s, arrival, seed } => {
                Pace::Open { rate_per_s, arrival, seed: sub_seed(seed, "arrivals") }
            }
            Pace::Closed => Pace::Closed,
        };
        let is_open = pace != Pace::Closed;
        let in_flight = self.pipeline.unwrap_or(if is_open { OPEN_IN_FLIGHT } else { 1 });
        let duration = match (self.duration, self.count) {
            (None, None) => Some(DURATION),
            (duration, _) => duration,
        };
        let args =
            LoadKvArgs { pipeline: Some(in_flight), duration, jobs: Some(threads as u64), password: None, ..args };
        let limit = TimeLimit::Reply { progress_bytes: PROGRESS_BYTES };
        let terms = Terms { life: Life::Kept, limit, timeout_ns: ns(self.timeout) };
        let socket = SocketOptions { nodelay: true, tick: terms.tick(), ..SocketOptions::new(transport, self.timeout) };
        let destination = Destination::Kept { target: target.clone(), endpoints: Vec::new(), socket: socket.clone() };
        Ok(KvPlan {
            drive: DrivePlan {
                pace,
                blocking: !is_open && connections == threads,
                // As much with one system call as there is, as every client that pipelines does.
                batch: usize::MAX,
                connections,
                weights: vec![1; connections],
                spread: is_open.then(|| sub_seed(seed, "spread")),
                in_flight: in_flight as usize,
                requests: self.count,
                duration,
                threads,
                pinning,
                spin: self.pace.spin,
                ..DrivePlan::new("kv", destination, terms)
            },
            target,
            socket,
            sizes: self.sizes.iter().map(|bytes| *bytes as usize).collect(),
            login: self.login()?,
            args,
        })
    }

    /// The words of AUTH.
    fn login(&self) -> Result<Vec<Vec<u8>>, LoadError> {
        let password = match (&self.password, &self.password_file) {
            (Some(text), _) => text.clone().into_bytes(),
            (None, Some(path)) => {
                let read = std::fs::read(path).map_err(|source| LoadError::ReadFile { path: path.clone(), source })?;
                read.strip_suffix(b"\n").unwrap_or(&read).to_vec()
            }
            (None, None) if self.user.is_some() => return usage("--user needs --password or --password-file"),
            (None, None) => return Ok(Vec::new()),
        };
        Ok(self.user.iter().map(|user| user.clone().into_bytes()).chain([password]).collect())
    }
}

impl KvPlan {
    /// Makes it the plan of an audit.
    pub(super) fn audit(&mut self, journaled: &Journaled) {
        let keys = journaled.acknowledged.len() as u64;
        self.args.keys = keys;
        self.args.prefix.clone_from(&journaled.prefix);
        let drive = &mut self.drive;
        drive.connections = drive.connections.min(journaled.acknowledged.len());
        drive.threads = drive.threads.min(drive.connections);
        drive.weights.truncate(drive.connections);
        drive.blocking = drive.connections == drive.threads;
        (drive.requests, drive.duration) = (Some(keys), None);
        self.args.connections = drive.connections as u64;
        (self.args.jobs, self.args.count, self.args.duration) = (Some(drive.threads as u64), drive.requests, None);
    }

    /// Finds the addresses of the target.
    pub(super) fn resolve(&mut self) -> Result<(), LoadError> {
        let (target, socket) = (self.target.clone(), self.socket.clone());
        let endpoints = target.resolve()?;
        self.drive.destination = Destination::Kept { target, endpoints, socket };
        Ok(())
    }

    /// How all keys are written before the run: as fast as may be.
    pub(super) fn fill_drive(&self) -> DrivePlan {
        DrivePlan {
            pace: Pace::Closed,
            spread: None,
            in_flight: self.fill_in_flight(),
            requests: Some(self.args.keys),
            duration: None,
            ..self.drive.clone()
        }
    }

    /// The most commands in flight on a connection while keys are filled.
    pub(super) fn fill_in_flight(&self) -> usize {
        self.drive.in_flight.max(FILL_IN_FLIGHT)
    }
}

/// `--prefix`: what can stand in the head of a journal.
pub(super) fn prefix(text: &str) -> Result<String, String> {
    match text.len() <= PREFIX_BYTES_MAX && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(text.to_owned()),
        false => Err(format!("at most {PREFIX_BYTES_MAX} letters, digits and signs of ASCII, without blanks")),
    }
}

/// `--zipf`.
pub(super) fn theta(text: &str) -> Result<f64, NumberError> {
    let theta: f64 = text.parse().map_err(|_| NumberError::Invalid { text: text.to_owned() })?;
    match theta > 0.0 && theta < 1.0 {
        true => Ok(theta),
        false => Err(NumberError::OutOfRange { text: text.to_owned(), min: 0, max: 1 }),
    }
}

/// `--mix`.
pub(super) fn shares(text: &str) -> Result<Shares, NumberError> {
    let (gets, sets) = text.split_once(':').ok_or_else(|| NumberError::Invalid { text: text.to_owned() })?;
    let share = |text| parse_in(text, 0, SHARE_MAX).map(|share| share as u32);
    let shares = Shares { gets: share(gets)?, sets: share(sets)? };
    match shares {
        Shares { gets: 0, sets: 0 } => Err(NumberError::OutOfRange { text: text.to_owned(), min: 1, max: SHARE_MAX }),
        _ => Ok(shares),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::error::exit_code_of_parse;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: LoadKvArgs,
    }

    fn plan(options: &str) -> Result<KvPlan, u8> {
        let words = ["kv"].into_iter().chain(options.split_whitespace());
        let program = Program::try_parse_from(words).map_err(|error| exit_code_of_parse(&error))?;
        program.args.plan().map_err(|error| error.exit_code())
    }

    #[test]
    fn defaults_depend_on_the_load() {
        let closed = plan("host").unwrap();
        assert_eq!(closed.target.to_string(), "host:6379");
        assert_eq!((closed.drive.connections, closed.drive.in_flight, closed.args.keys), (50, 1, 100_000));
        assert_eq!((closed.drive.duration, closed.drive.requests), (Some(DURATION), None));
        assert_eq!((closed.sizes.as_slice(), closed.args.mix), (&[64][..], Shares { gets: 90, sets: 10 }));
        assert!(
            !closed.args.no_fill && closed.args.zipf.is_none() && closed.login.is_empty() && !closed.drive.blocking
        );
        let open = plan("--listen host:1 --rate 10k/s -n 5").unwrap();
        assert_eq!((open.drive.in_flight, open.drive.duration, open.drive.requests), (128, None, Some(5)));
        assert!(open.drive.spread.is_some() && open.fill_drive().spread.is_none());
        assert_eq!((open.fill_drive().requests, open.fill_drive().in_flight), (Some(100_000), 128));
        assert!(plan("unix:/run/store -c 2 -j 2").unwrap().drive.blocking);
    }

    #[test]
    fn every_option_is_read() {
        let all =
            plan("h --sizes 64,1400 --mix 1:3 --zipf 0.99 -P 16 --prefix a: --no-fill --user me --password p").unwrap();
        assert_eq!((all.sizes.as_slice(), all.args.mix), (&[64, 1400][..], Shares { gets: 1, sets: 3 }));
        assert_eq!((all.args.zipf, all.drive.in_flight, all.args.prefix.as_str()), (Some(0.99), 16, "a:"));
        assert!(all.args.no_fill && all.args.password.is_none());
        assert_eq!(all.login, [b"me".to_vec(), b"p".to_vec()]);
        assert_eq!(all.fill_in_flight(), 16);
    }

    #[test]
    fn an_audit_is_of_the_keys_of_its_journal() {
        let folder = ksf_test::Folder::new();
        let path = folder.path("journal");
        super::super::journal::Journal::begin(&path, 1, 3, "p").unwrap();
        let journaled = super::super::journal::read(&path).unwrap();
        let mut audit = plan(&format!("h -c 8 -j 4 --audit {}", path.display())).unwrap();
        audit.audit(&journaled);
        let drive = &audit.drive;
        assert_eq!((audit.args.keys, audit.args.prefix.as_str(), drive.connections, drive.threads), (3, "p", 3, 3));
        assert_eq!((drive.requests, drive.duration, drive.weights.len()), (Some(3), None, 3));
    }

    #[test]
    fn wrong_use_has_its_status() {
        for (options, status) in [
            ("", 64),
            ("h --listen h", 64),
            ("h --nothing", 64),
            ("h -c 3 --keys 2", 64),
            ("h -c 1 -j 2", 64),
            ("h -j 2 --cpu 0,1", 64),
            ("h --user me", 64),
            ("h --password p --password-file f", 64),
            ("h --audit f --journal g", 64),
            ("h --audit f --rate 5", 64),
            ("h --audit f --keys 5", 64),
            ("h --arrival poisson", 64),
            ("h -c 0", 65),
            ("h -P 0", 65),
            ("h -n 0", 65),
            ("h --keys 0", 65),
            ("h --sizes 31", 65),
            ("h --sizes 64,", 65),
            ("h --zipf 1", 65),
            ("h --zipf 0", 65),
            ("h --zipf x", 65),
            ("h --mix 90", 65),
            ("h --mix 0:0", 65),
            ("h --mix a:b", 65),
            ("h --timeout 0", 65),
            ("h --password-file /no/such/file", 66),
        ] {
            assert_eq!(plan(options).map(|_| ()).unwrap_err(), status, "{options}");
        }
        assert!(prefix("key\n").is_err() && prefix("a b").is_err() && prefix(&"x".repeat(257)).is_err());
        assert_eq!(prefix("").as_deref(), Ok(""));
    }
}
