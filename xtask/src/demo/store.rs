//! The key-value store in the demo: a row for SET and one for GET on each engine that it runs on, and what a `kill -9`
//! under load leaves of it.
//!
//! ```text
//!   store ◄── ksf load kv --journal FILE      acknowledged writes are written down
//!     ╳ kill -9
//!   store ◄── ksf load kv --audit FILE        started again: is each of them there?
//! ```

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ksf_load::kv::report::{AuditReport, KvBody, KvReport};

use super::{Demo, MESSAGE_BYTES, START_TIMEOUT};
use crate::bench::medium;
use crate::load::Amount;
use crate::process::{Ready, Running, Server, free_port, output};

/// Engines that run it: what it does cannot be done in the kernel.
pub(super) const ENGINES: [&str; 2] = ["uring", "epoll"];

/// Keys that a load is about.
const KEYS: u64 = 1000;
/// As many in flight as the other services have, on connections as a server of keys has them.
const CONNECTIONS: u32 = 8;
const IN_FLIGHT: u32 = super::IN_FLIGHT / CONNECTIONS;
/// What the logs of all shards may take on the disk, where that is not too little for one of them.
const LOGS_BYTES: u64 = 256 << 20;
const LOG_BYTES_MIN: u64 = 8 << 20;
const LOG_BYTES_MAX: u64 = 64 << 20;

/// The store is not killed before so many writes are acknowledged, each of which takes so many bytes of the journal.
const WRITES_MIN: u64 = 4000;
const RECORD_BYTES: u64 = 28;
/// A load that would go on for so long when nobody ended it.
const ENDLESS: Amount = Amount::Seconds(600.0);
/// Beyond the length of a load.
const SLACK: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The commands of a row.
#[derive(Clone, Copy)]
enum Operation {
    Set,
    Get,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Set => "store SET",
            Self::Get => "store GET",
        }
    }
}

/// What came of a load in which every reply was right.
struct Loaded {
    p50_us: f64,
    p99_us: f64,
    rate_per_s: f64,
    faults: u64,
}

impl Demo {
    /// The rows of the store on an engine, and a line that says what it stores on.
    pub(super) fn measure_store(&mut self, engine: &'static str) -> Result<(Vec<Vec<String>>, String)> {
        let data = tempfile::tempdir().context("cannot make a folder for the store")?;
        let (server, port) = self.start_store(engine, data.path())?;
        // The first start has made the logs: the file system writes out what it did for that before anything is measured.
        let folder = File::open(data.path()).context("cannot open the folder of the store")?;
        rustix::fs::syncfs(&folder).context("cannot sync the file system of the store")?;
        let mut rows = Vec::new();
        for operation in [Operation::Set, Operation::Get] {
            eprintln!("demo: {} over tcp on {engine}", operation.name());
            let one = self.load_store(operation, port, 1, 1)?;
            let many = self.load_store(operation, port, CONNECTIONS, IN_FLIGHT)?;
            rows.push(vec![
                operation.name().into(),
                "tcp".into(),
                engine.into(),
                format!("{:.1}", one.p50_us),
                format!("{:.1}", one.p99_us),
                format!("{:.0}", many.rate_per_s),
                (one.faults + many.faults).to_string(),
            ]);
        }
        let said = server.line_with("medium=").context("the store does not say what its medium is")?;
        let on = medium(data.path());
        server.stop()?;
        Ok((rows, format!("store on {engine}: SET is answered when it is on the medium: {}, {on}", medium_of(&said)?)))
    }

    /// Kills the store under load, starts it again, and asks it for every write that it had acknowledged.
    pub(super) fn crash_store(&mut self, engine: &'static str) -> Result<Audit> {
        eprintln!("demo: kill -9 of the store under load on {engine}");
        let folder = tempfile::tempdir().context("cannot make a folder for the store")?;
        let (data, journal) = (folder.path().join("data"), folder.path().join("journal"));
        let (server, port) = self.start_store(engine, &data)?;
        let mut command = self.store_load(Operation::Set, port, CONNECTIONS, IN_FLIGHT, ENDLESS);
        let load = Running::start(command.arg("--journal").arg(&journal))?;
        let (started, wanted_bytes) = (Instant::now(), WRITES_MIN * RECORD_BYTES);
        let length = self.amount.length();
        while started.elapsed() < length || journal.metadata().map_or(0, |journal| journal.len()) < wanted_bytes {
            ensure!(started.elapsed() < length + SLACK, "the store acknowledges nothing");
            std::thread::sleep(POLL_INTERVAL);
        }
        server.kill();
        // Its connections end: that is all that may be wrong.
        load.finish(SLACK, &[1]).context("the load that the store was killed under")?;

        let (server, port) = self.start_store(engine, &data)?;
        let mut command = Command::new(&self.ksf);
        command.args(["load", "kv", &format!("127.0.0.1:{port}"), "--no-pin", "--json", "--audit"]).arg(&journal);
        let text = Running::start(&mut command)?.finish(SLACK, &[0, 1])?;
        server.stop()?;
        Audit::read(&text, engine).with_context(|| format!("ksf load kv --audit printed:\n{text}"))
    }

    /// The store and its port.
    fn start_store(&mut self, engine: &str, data: &Path) -> Result<(Server, u16)> {
        let port = free_port()?;
        let shards = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        let log_bytes = (LOGS_BYTES / shards).clamp(LOG_BYTES_MIN, LOG_BYTES_MAX);
        let mut command = Command::new(&self.ksf);
        command.args(["store", "--listen", &format!("127.0.0.1:{port}"), "--engine", engine]);
        command.args(["--log-bytes", &log_bytes.to_string(), "--data"]).arg(data);
        let server = Server::start("store", &mut command, Ready::Lines(1, "ready"), START_TIMEOUT)?;
        self.pids.push(server.pid());
        Ok((server, port))
    }

    fn store_load(&self, operation: Operation, port: u16, connections: u32, in_flight: u32, amount: Amount) -> Command {
        let mut command = Command::new(&self.ksf);
        command.args(["load", "kv", &format!("127.0.0.1:{port}"), "--json", "--no-pin"]);
        command.args(["-c", &connections.to_string(), "-P", &in_flight.to_string()]);
        match amount {
            // It has one count for all connections.
            Amount::Messages(count) => command.args(["-n", &count.saturating_mul(connections.into()).to_string()]),
            Amount::Seconds(seconds) => command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]),
        };
        command.args(["--keys", &KEYS.to_string(), "--sizes", &MESSAGE_BYTES.to_string()]);
        match operation {
            Operation::Set => command.args(["--mix", "0:1", "--no-fill"]),
            // The keys are written before, so that each read finds what can be checked.
            Operation::Get => command.args(["--mix", "1:0"]),
        };
        command
    }

    fn load_store(&self, operation: Operation, port: u16, connections: u32, in_flight: u32) -> Result<Loaded> {
        let mut command = self.store_load(operation, port, connections, in_flight, self.amount);
        let text = output(&mut command, self.amount.length() + SLACK)?;
        Loaded::read(&text).with_context(|| format!("ksf load kv printed:\n{text}"))
    }
}

/// "... medium=file (O_DIRECT and RWF_DSYNC) durability=always ...": the medium, of a store whose writes are durable.
fn medium_of(line: &str) -> Result<&str> {
    let (_, behind) = line.split_once("medium=").with_context(|| format!("no medium: {line}"))?;
    let (medium, behind) = behind.split_once(" durability=").with_context(|| format!("no durability: {line}"))?;
    ensure!(behind.starts_with("always "), "the store does not wait for its medium: {line}");
    Ok(medium)
}

impl Loaded {
    fn read(text: &str) -> Result<Self> {
        let KvReport { body: KvBody { run, .. }, ok, .. } = serde_json::from_str(text)?;
        ensure!(ok, "replies were lost or wrong");
        ensure!(run.replies > 0, "no command was answered");
        Ok(Self {
            p50_us: run.latency.at(50.0),
            p99_us: run.latency.at(99.0),
            rate_per_s: run.rate_per_s,
            faults: run.faults.values().sum(),
        })
    }
}

/// What was found of the writes that a store had acknowledged before it was killed.
pub(super) struct Audit {
    engine: &'static str,
    found: AuditReport,
}

impl Audit {
    fn read(text: &str, engine: &'static str) -> Result<Self> {
        let KvReport { body: KvBody { audit, .. }, ok, .. } = serde_json::from_str(text)?;
        Self::of(audit.context("it is no audit")?, ok, engine)
    }

    fn of(found: AuditReport, ok: bool, engine: &'static str) -> Result<Self> {
        ensure!(found.records > 0, "nothing had been acknowledged");
        let audit = Self { engine, found };
        ensure!(ok == audit.is_clean(), "an audit that is not whole");
        Ok(audit)
    }

    /// Whether each acknowledged write is there.
    pub(super) fn is_clean(&self) -> bool {
        let AuditReport { lost, damaged, foreign, unread, .. } = self.found;
        lost + damaged + foreign + unread == 0
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AuditReport { records, lost, damaged, foreign, unread, .. } = self.found;
        write!(out, "kill -9 under load: {records} acknowledged writes, {lost} lost")?;
        if damaged + foreign + unread > 0 {
            write!(out, ", {damaged} damaged, {foreign} foreign, {unread} not read")?;
        }
        write!(out, " (store on {})", self.engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_says_what_is_lost() {
        let none = AuditReport {
            sessions: 1,
            records: 70,
            torn_bytes: 0,
            acknowledged: 9,
            right: 9,
            newer: 0,
            lost: 0,
            damaged: 0,
            foreign: 0,
            unread: 0,
        };
        let audit = Audit::of(none.clone(), true, "uring").unwrap();
        assert!(audit.is_clean());
        assert_eq!(audit.to_string(), "kill -9 under load: 70 acknowledged writes, 0 lost (store on uring)");
        for found in [
            AuditReport { lost: 3, ..none.clone() },
            AuditReport { damaged: 3, ..none.clone() },
            AuditReport { foreign: 3, ..none.clone() },
            AuditReport { unread: 3, ..none.clone() },
        ] {
            // Where the verdict and the counts differ, nobody knows.
            assert!(Audit::of(found.clone(), true, "epoll").is_err());
            let audit = Audit::of(found, false, "epoll").unwrap();
            assert!(!audit.is_clean() && audit.to_string().contains("3 "), "{audit}");
        }
        assert!(Audit::of(none.clone(), false, "epoll").is_err());
        assert!(Audit::of(AuditReport { records: 0, ..none }, true, "epoll").is_err());
    }

    #[test]
    fn a_medium_is_that_of_a_store_that_waits_for_it() {
        let line = "ksf: store /d: medium=file (O_DIRECT and RWF_DSYNC) durability=always logs=2 keys=0 memory=1 of 2";
        assert_eq!(medium_of(line).unwrap(), "file (O_DIRECT and RWF_DSYNC)");
        assert!(medium_of(&line.replace("always", "none")).is_err());
    }
}
