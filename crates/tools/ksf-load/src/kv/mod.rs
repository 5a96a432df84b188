//! `kv`: loads a key-value server that speaks RESP (`ksf store`, Redis), and checks every reply exactly.
//!
//! ```text
//!   LoadKvArgs -> KvPlan -> drive: threads, connections -> KvClient: commands, checks -> KvReport
//!                    |         Commands: what is asked for    |  Space: what may be at each key
//!                    |                                        |  Values: what says what it is
//!                    +-> --journal, --audit                   +-> Journal: what was acknowledged
//! ```
//!
//! A run writes all keys, then measures. An audit reads all keys of a journal instead.

mod client;
mod journal;
mod keys;
mod mix;
mod plan;
pub mod report;
mod space;
mod values;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::client::{Frames, KvClient, KvCounters, KvWorkload, Witness};
use self::journal::{Journal, Journaled};
use self::keys::Choice;
use self::mix::{CLASSES, Commands};
use self::plan::{KvPlan, Stage};
use self::report::KvReport;
use self::space::Space;
use self::values::{VALUE_BYTES_MAX, VALUE_BYTES_MIN, Values};
use crate::drive::clock::unix_seconds;
use crate::drive::descriptors::raise_descriptors;
use crate::drive::plan::DrivePlan;
use crate::drive::protocol::Protocol;
use crate::drive::random::mix;
use crate::drive::threads;
use crate::error::LoadError;
use crate::options::{CpuArgs, OutputArgs, PaceArgs, number, positive_time, reports};
use crate::record::run::RunRecord;
use crate::report::document::say;
use crate::report::files::Files;
use crate::report::{Io, with_process_io};

pub use self::mix::Shares;

/// 24 bytes of memory each.
const KEYS_MAX: u64 = 1 << 30;

/// On one connection.
const IN_FLIGHT_MAX: u64 = 65_536;

/// On all of them.
const CONNECTIONS_MAX: u64 = 1 << 20;

/// Options of kv.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(
    version,
    about = "Measure a key-value server of RESP, such as ksf store or Redis, and check every reply; audit it after a crash",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct LoadKvArgs {
    /// The server: a host name or address, with port 6379 if none is given, or unix:/path for a Unix-domain stream socket
    #[arg(value_name = "HOST[:PORT]", required_unless_present = "listen")]
    pub target: Option<String>,

    /// The same, by the name that the address has at the server
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "target")]
    pub listen: Option<String>,

    /// Connections, over all threads
    #[arg(short = 'c', long, value_name = "N", value_parser = number::<1, CONNECTIONS_MAX>, default_value = "50")]
    pub connections: u64,

    /// Commands in flight on each connection; with --rate the most [default: 1, or 128 with --rate]
    #[arg(short = 'P', long, value_name = "N", value_parser = number::<1, IN_FLIGHT_MAX>)]
    pub pipeline: Option<u64>,

    /// Commands over all connections [default: no limit]
    #[arg(short = 'n', long, value_name = "N", value_parser = number::<1, { u64::MAX }>)]
    pub count: Option<u64>,

    /// Length of the run [default: 10 s, or no limit with -n]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    #[serde(rename = "duration_s", with = "reports::seconds")]
    pub duration: Option<Duration>,

    /// Different keys, as many as there are connections at least; each takes 24 bytes of memory here
    #[arg(long, value_name = "N", value_parser = number::<1, KEYS_MAX>, default_value = "100K")]
    pub keys: u64,

    /// What the names of all keys begin with; 12 digits follow
    #[arg(long, value_name = "TEXT", value_parser = plan::prefix, default_value = "key:")]
    pub prefix: String,

    /// Draw keys by Zipf's law with this exponent, above 0 and below 1 [default: each key is as likely as any other]
    #[arg(long, value_name = "THETA", value_parser = plan::theta)]
    pub zipf: Option<f64>,

    /// Lengths of the values, one of which is drawn for each write; at least 32 bytes, which say what the value is
    #[arg(
        long,
        value_name = "BYTES,...",
        value_delimiter = ',',
        value_parser = number::<{ VALUE_BYTES_MIN as u64 }, { VALUE_BYTES_MAX as u64 }>,
        default_value = "64"
    )]
    pub sizes: Vec<u64>,

    /// Shares of reads and writes
    #[arg(long, value_name = "GET:SET", value_parser = plan::shares, default_value = "90:10")]
    pub mix: Shares,

    /// Do not write all keys before the run: reads of keys that are not written yet find nothing, or are not checked
    #[arg(long)]
    pub no_fill: bool,

    /// Write every acknowledged write down in this file; one that is there is continued, without filling keys again
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "reports::path")]
    pub journal: Option<PathBuf>,

    /// Read every key of a journal instead: is everything there that was acknowledged?
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["journal", "rate", "count", "duration", "keys", "prefix", "zipf", "sizes", "mix", "no_fill"]
    )]
    #[serde(serialize_with = "reports::path")]
    pub audit: Option<PathBuf>,

    /// The user to log in as (AUTH) [default: the server's default user]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// The password to log in with; others can see it in the list of processes
    #[arg(long, value_name = "TEXT", conflicts_with = "password_file")]
    #[serde(skip)]
    pub password: Option<String>,

    /// File with the password
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "reports::path")]
    pub password_file: Option<PathBuf>,

    #[command(flatten)]
    #[serde(flatten)]
    #[allow(missing_docs)]
    pub pace: PaceArgs,

    /// Give up after this time without a reply on a connection
    #[arg(long, value_name = "TIME", value_parser = positive_time, default_value = "5s")]
    #[serde(rename = "timeout_s", with = "reports::all_seconds")]
    pub timeout: Duration,

    /// Threads [default: 1, or one for each CPU of --cpu]
    #[arg(short = 'j', long = "jobs", value_name = "N", value_parser = number::<1, 1024>)]
    pub jobs: Option<u64>,

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
Each key is written by one connection only, and each value says its key, its version and a checksum: so every reply is \
checked exactly, while any number of connections read and write. A read sees the last write that was acknowledged before \
it was sent, or a later one that was sent; on the connection that writes the key, the last one in front of it.

Loads are closed (a reply makes room for the next command) unless --rate is given.

With --journal a write counts as acknowledged when it stands in the file. After a crash, --audit asks for every key of the \
file, and tells what is lost (gone, or older than what was acknowledged), damaged (wrong checksum) or foreign (not written \
by this journal's runs). Writes that were sent and not acknowledged may be there or not.

Numbers take a suffix: k m g are powers of 1024, K M G powers of 1000. Times take us, ms, s, m or h; without a unit they \
are seconds.

Exit status: 0 every reply was right, 1 replies were wrong or missing, or something acknowledged is not there, 64 wrong use, \
65 bad number or damaged journal, 66 no such file, 68 unknown host, 69 no connection, 70 bug of this program, \
71 system error, 73 a file cannot be \
written, 74 the results cannot be written.";

/// Runs kv on stdout and stderr until it is done or interrupted.
pub fn run(args: LoadKvArgs) -> Result<KvReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs kv with the given output.
pub fn run_with(args: &LoadKvArgs, io: &mut Io<'_>) -> Result<KvReport, LoadError> {
    let mut plan = args.plan()?;
    let audited = args.audit.as_deref().map(journal::read).transpose()?;
    if let Some(journaled) = &audited {
        plan.audit(journaled);
    }
    plan.resolve()?;
    raise_descriptors(plan.drive.connections as u64)?;
    let mut files = Files::create(&plan.args.output, format!("kv {}", plan.target))?;
    let (run, stage) = match &audited {
        Some(journaled) => (audit(&plan, journaled, io)?, Stage::Audit),
        None => load(&plan, args.journal.as_deref(), io)?,
    };
    files.add_run(run.started_unix_s, run.wall_s(), &run.latencies)?;
    files.finish(&run.latencies)?;
    let report = report::of(&plan, stage, audited.as_ref(), &run);
    report.notes.iter().for_each(|note| say("kv", note, io));
    report.publish(
        "kv",
        plan.args.output.json,
        &report::text(&report, !args.no_header),
        &report.body.complaint(),
        io,
    )?;
    Ok(report)
}

/// Writes all keys, then runs the load; what the last of them did.
fn load(plan: &KvPlan, journal: Option<&Path>, io: &Io<'_>) -> Result<(RunRecord<KvCounters>, Stage), LoadError> {
    let new_run = mix(unix_seconds().to_bits() ^ u64::from(std::process::id()) << 32);
    let begun = journal.map(|path| Journal::begin(path, new_run, plan.args.keys, &plan.args.prefix)).transpose()?;
    let (shared, journal) = match begun {
        None => (plan.shared(new_run, 1, None, None), None),
        Some((journal, said)) => {
            let journal = Arc::new(journal);
            let shared = plan.shared(said.run, said.session, Some(&said.acknowledged), Some(journal.clone()));
            (shared, Some((journal, said.session)))
        }
    };
    let is_new = journal.as_ref().is_none_or(|(_, session)| *session == 1);
    let run = |drive: &DrivePlan, stage| {
        let kv = Kv { plan, stage, shared: shared.clone() };
        threads::run(drive, &kv, 1, io.stop, |_| {}).map(|run| (run, stage))
    };
    let filled = if !plan.args.no_fill && is_new { Some(run(&plan.fill_drive(), Stage::Fill)?) } else { None };
    let ran = match filled {
        Some((filled, stage)) if !filled.record.is_clean() || filled.is_interrupted() => (filled, stage),
        _ => run(&plan.drive, Stage::Load)?,
    };
    if let Some((journal, _)) = journal {
        journal.sync()?;
    }
    Ok(ran)
}

/// Reads all keys of a journal.
fn audit(plan: &KvPlan, journaled: &Journaled, io: &Io<'_>) -> Result<RunRecord<KvCounters>, LoadError> {
    // A session of its own, so that all earlier ones may have sent what they have.
    let shared = plan.shared(journaled.run, journaled.session + 1, Some(&journaled.acknowledged), None);
    let kv = Kv { plan, stage: Stage::Audit, shared };
    threads::run(&plan.drive, &kv, 1, io.stop, |_| {})
}

/// A key-value server, as one run loads it.
#[derive(Debug)]
struct Kv<'a> {
    plan: &'a KvPlan,
    stage: Stage,
    shared: Arc<KvWorkload>,
}

impl Protocol for Kv<'_> {
    type Client = KvClient;
    type Mix = Commands;

    fn client(&self, connection: u32) -> KvClient {
        let in_flight = match self.stage {
            Stage::Fill => self.plan.fill_in_flight(),
            Stage::Load | Stage::Audit => self.plan.drive.in_flight,
        };
        KvClient::new(self.shared.clone(), connection, in_flight)
    }

    fn mix(&self, thread: usize) -> Commands {
        let KvPlan { drive, sizes, args, .. } = self.plan;
        let LoadKvArgs { mix, zipf, keys, pace: PaceArgs { seed, .. }, .. } = args;
        match self.stage {
            Stage::Load => Commands::drawn(*mix, Choice::new(*keys, *zipf), sizes.len(), *seed, thread),
            stage => Commands::in_order(stage == Stage::Fill, sizes.len(), *seed, thread, drive.threads),
        }
    }

    fn operations(&self) -> usize {
        CLASSES.len()
    }

    fn request_bytes(&self) -> usize {
        self.shared.frames.command_bytes_max()
    }
}

impl KvPlan {
    /// What the connections share in this session of a run. `acknowledged` has a version for each key; `None`: nothing is
    /// known of any.
    fn shared(
        &self,
        run: u64,
        session: u64,
        acknowledged: Option<&[u64]>,
        witness: Option<Arc<dyn Witness>>,
    ) -> Arc<KvWorkload> {
        let longest = self.sizes.iter().copied().max().unwrap_or(VALUE_BYTES_MIN);
        let space = match acknowledged {
            Some(versions) => Space::new(session, versions.iter().copied()),
            None => Space::new(session, (0..self.args.keys).map(|_| 0)),
        };
        Arc::new(KvWorkload {
            space,
            values: Values::new(run, longest),
            frames: Frames::new(&self.args.prefix, &self.sizes, &self.login),
            witness,
            connections: self.drive.connections as u64,
        })
    }
}
