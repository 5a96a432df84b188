//! What kv prints: a table, or the JSON document of docs/formats/load-json.md.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::LoadKvArgs;
use super::client::KvCounters;
use super::journal::Journaled;
use super::mix::CLASSES;
use super::plan::{KvPlan, Stage};
use crate::record::Fault;
use crate::record::run::RunRecord;
use crate::record::running::per;
use crate::report::document::{
    CallsReport, Document, LatencyReport, OpenReport, SpinReport, TargetReport, ThreadReport, micro, milli, nano,
};
use crate::report::warn::{self, Warning};

/// The name of the document's format.
pub const FORMAT: &str = "ksf-kv";

/// How many faults are described.
const NOTES_MAX: usize = 10;

/// The whole document.
pub type KvReport = Document<KvBody>;

/// What was asked for and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvBody {
    /// What was asked for, with defaults filled in.
    pub config: LoadKvArgs,
    /// What was measured.
    pub run: KvRunReport,
    /// What an audit found; `null` for a load.
    pub audit: Option<AuditReport>,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvRunReport {
    /// `load`, `audit`, or `fill` where writing all keys before the load has failed.
    pub stage: String,
    /// Start, seconds since the epoch.
    pub started_unix_s: f64,
    /// From the start to the last reply.
    pub wall_s: f64,
    /// Right replies.
    pub replies: u64,
    /// Right replies per second.
    pub rate_per_s: f64,
    /// All of them in one distribution.
    pub latency: LatencyReport,
    /// `get` and `set`.
    pub operations: Vec<OperationReport>,
    /// Reads that found a value of this run, or of this journal's runs.
    pub hits: u64,
    /// Reads that found nothing, of keys without an acknowledged write.
    pub misses: u64,
    /// Reads that found something of others, of keys without an acknowledged write.
    pub unchecked: u64,
    /// Acknowledged writes that stand in the journal by this run.
    pub journaled: u64,
    /// Sent.
    pub sent_bytes: u64,
    /// Received.
    pub received_bytes: u64,
    /// User and system time of the generator.
    pub cpu_s: f64,
    /// The same per right reply.
    pub cpu_us_per_reply: f64,
    /// System calls on the connections.
    pub calls: CallsReport,
    /// Wrong and missing replies by kind.
    pub faults: BTreeMap<String, u64>,
    /// Only in an open loop.
    pub open: Option<OpenReport>,
    /// Only with `--spin`.
    pub spin: Option<SpinReport>,
    /// One per thread.
    pub threads: Vec<ThreadReport>,
}

/// The commands of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationReport {
    /// `get` or `set`.
    pub name: String,
    /// Right replies.
    pub replies: u64,
    /// Right replies per second.
    pub rate_per_s: f64,
    /// Of the right replies.
    pub latency: LatencyReport,
}

/// What an audit found: every key is in one of `right`, `lost`, `damaged`, `foreign`, `unread`, or has no acknowledged write.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditReport {
    /// Runs that wrote the journal.
    pub sessions: u64,
    /// Acknowledgments in it.
    pub records: u64,
    /// Bytes at its end that are no whole record.
    pub torn_bytes: u64,
    /// Keys with an acknowledged write.
    pub acknowledged: u64,
    /// Of these, those that have what was acknowledged, or a later write.
    pub right: u64,
    /// Of these, those that have a later write, which was sent and not acknowledged.
    pub newer: u64,
    /// Keys that are gone, or have an older write than was acknowledged.
    pub lost: u64,
    /// Keys whose value has a wrong checksum.
    pub damaged: u64,
    /// Keys with a value that no run of this journal wrote to them.
    pub foreign: u64,
    /// Keys that could not be read.
    pub unread: u64,
}

/// The report of a run, or of an audit of a journal.
pub(super) fn of(plan: &KvPlan, stage: Stage, audited: Option<&Journaled>, run: &RunRecord<KvCounters>) -> KvReport {
    let record = &run.record;
    let audit = audited.map(|journaled| AuditReport::of(journaled, run));
    let is_whole = audit.as_ref().is_none_or(|audit| audit.unread == 0);
    let body = KvBody { config: plan.args.clone(), run: KvRunReport::of(plan, stage, run), audit };
    let target = TargetReport {
        name: plan.target.to_string(),
        transport: plan.socket.transport.name().into(),
        addresses: run.addresses(),
    };
    let mut report = Document::new(FORMAT, Some(target), body);
    report.warn(warnings(plan, stage, audited, run));
    let notes = record.notes.iter().map(|note| format!("connection {}: {}", note.connection, note.text));
    report.notes = notes.take(NOTES_MAX).collect();
    report.interrupted = run.is_interrupted();
    report.ok = record.is_clean() && is_whole;
    report
}

/// The table for people.
pub(super) fn text(report: &KvReport, header: bool) -> String {
    let KvBody { run, audit, .. } = &report.body;
    let mut out = String::new();
    if header {
        let _ = writeln!(
            out,
            "{:<7} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
            run.stage, "replies", "replies/s", "mean us", "p50 us", "p99 us", "p99.9 us", "max us"
        );
    }
    let mut row = |name: &str, replies: u64, rate: f64, latency: &LatencyReport| {
        let _ = writeln!(
            out,
            "{name:<7} {replies:>10} {rate:>10.0} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            latency.mean_us,
            latency.at(50.0),
            latency.at(99.0),
            latency.at(99.9),
            latency.max_us
        );
    };
    row("all", run.replies, run.rate_per_s, &run.latency);
    for operation in run.operations.iter().filter(|operation| operation.replies > 0) {
        row(&operation.name, operation.replies, operation.rate_per_s, &operation.latency);
    }
    let _ = writeln!(
        out,
        "checked {} values; without an acknowledged write: {} keys had none, {} had one of others",
        run.hits, run.misses, run.unchecked
    );
    if run.journaled > 0 {
        let _ = writeln!(out, "journal {} acknowledged writes", run.journaled);
    }
    if let Some(spin) = &run.spin {
        let _ = writeln!(out, "spin    {}", spin.in_words());
    }
    if let Some(audit) = audit {
        let _ = writeln!(out, "audit   {}", audit.in_words());
    }
    out
}

impl KvBody {
    /// What was wrong, in words.
    pub(super) fn complaint(&self) -> String {
        let found = self.audit.as_ref().filter(|audit| audit.lost + audit.damaged + audit.foreign > 0);
        if let Some(audit) = found {
            return format!("not everything that was acknowledged is there: {}", audit.in_words());
        }
        let faults = self.run.faults.iter().filter(|(_, count)| **count > 0);
        let mut faults: Vec<String> = faults.map(|(name, count)| format!("{count} {name}")).collect();
        if let Some(audit) = self.audit.as_ref().filter(|audit| audit.unread > 0) {
            faults.push(format!("{} keys not read", audit.unread));
        }
        if faults.is_empty() {
            faults.push("a connection failed".into());
        }
        let stage =
            if self.run.stage == Stage::Fill.name() { "keys could not be filled" } else { "not every reply was right" };
        format!("{stage}: {}; {} right", faults.join(", "), self.run.replies)
    }
}

impl AuditReport {
    fn of(journaled: &Journaled, run: &RunRecord<KvCounters>) -> AuditReport {
        let record = &run.record;
        let sum = |faults: &[Fault]| faults.iter().map(|fault| record.faults.count(*fault)).sum::<u64>();
        let lost = sum(&[Fault::Missing, Fault::Old]);
        let damaged = sum(&[Fault::Damaged]);
        let foreign = sum(&[Fault::Foreign, Fault::Misdirected, Fault::Unknown]);
        let keys = journaled.acknowledged.len() as u64;
        AuditReport {
            sessions: journaled.session,
            records: journaled.records,
            torn_bytes: journaled.torn_bytes,
            acknowledged: journaled.acknowledged.iter().filter(|version| **version > 0).count() as u64,
            right: record.counters.held,
            newer: record.counters.newer.min(record.counters.held),
            lost,
            damaged,
            foreign,
            unread: keys.saturating_sub(record.answered + lost + damaged + foreign),
        }
    }

    fn in_words(&self) -> String {
        format!(
            "{} of {} keys with an acknowledged write are right ({} newer), {} lost, {} damaged, {} foreign, {} not read; \
             {} acknowledgments of {} runs",
            self.right,
            self.acknowledged,
            self.newer,
            self.lost,
            self.damaged,
            self.foreign,
            self.unread,
            self.records,
            self.sessions
        )
    }
}

impl KvRunReport {
    fn of(plan: &KvPlan, stage: Stage, run: &RunRecord<KvCounters>) -> KvRunReport {
        let (record, wall_s) = (&run.record, run.wall_s());
        let KvCounters { hits, misses, unchecked, journaled, .. } = record.counters;
        let operations = CLASSES.iter().zip(&record.latencies).map(|(name, latencies)| OperationReport {
            name: (*name).into(),
            replies: latencies.count(),
            rate_per_s: milli(per(latencies.count() as f64, wall_s)),
            latency: LatencyReport::of(latencies, &[]),
        });
        KvRunReport {
            stage: stage.name().into(),
            started_unix_s: micro(run.started_unix_s),
            wall_s: nano(wall_s),
            replies: record.answered,
            rate_per_s: milli(run.rate_per_s()),
            latency: LatencyReport::of(&run.latencies, &[]),
            operations: operations.collect(),
            hits,
            misses,
            unchecked,
            journaled,
            sent_bytes: record.sent_bytes,
            received_bytes: record.received_bytes,
            cpu_s: nano(run.cpu_s()),
            cpu_us_per_reply: milli(run.cpu_us_per_reply()),
            calls: CallsReport::of(&record.calls),
            faults: record.faults.by_name(Fault::OF_KV),
            open: run.lateness.as_ref().map(OpenReport::of),
            spin: SpinReport::of(&plan.drive, run),
            threads: run.threads.iter().map(ThreadReport::of).collect(),
        }
    }
}

/// Reasons to doubt the figures.
fn warnings(plan: &KvPlan, stage: Stage, audited: Option<&Journaled>, run: &RunRecord<KvCounters>) -> Vec<Warning> {
    let drive = &plan.drive;
    if stage == Stage::Audit {
        let is_empty = audited.is_some_and(|journaled| journaled.records == 0);
        let text = "no write was acknowledged by the journal: there was nothing to look for".to_owned();
        return is_empty.then_some(Warning { code: "nothing-acknowledged", text }).into_iter().collect();
    }
    let room = format!("{} in flight on their connection", drive.in_flight);
    let schedule = warn::schedule(drive, run, &room, "-P");
    let remedy = "add threads on CPUs of their own (--cpu)";
    let busy = warn::busy_generator(drive, run, true, remedy);
    warn::shared_cpus(drive).into_iter().chain(busy).chain(schedule).collect()
}
