//! Runs of `ksf load http`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ksf_load::http::report::{HttpBody, HttpReport};

use super::{BODY_BYTES, WebLoad, WebResult};
use crate::bench::case::Case;
use crate::bench::contestant::Pinning;
use crate::process::{Running, display, output};

/// Beyond the length of the load: the generator's own time limits.
pub(super) const SLACK: Duration = Duration::from_secs(60);

/// How long a load lasts that is interrupted at its end.
const UNTIL_INTERRUPTED: &str = "1h";

/// The header by which an answer names its worker.
pub(super) const WORKER_FIELD: &str = "X-Worker";

/// Asks for a compressed answer.
pub(super) const COMPRESS: &str = "Accept-Encoding: gzip";

/// One load.
pub(super) struct Client<'a> {
    pub(super) load: &'static WebLoad,
    /// The rate of the load as far as this run goes.
    pub(super) rate_per_s: Option<u32>,
    pub(super) case: &'a Case,
    pub(super) pinning: &'a Pinning,
    pub(super) port: u16,
    /// The server's process.
    pub(super) pid: u32,
    /// So many requests; None: as long as is said elsewhere.
    pub(super) count: Option<u64>,
    pub(super) round: u32,
}

/// What differs from run to run and is left out where commands are shown.
#[derive(Clone, Copy)]
pub(super) struct Shown {
    pub(super) port: u16,
    pub(super) pid: u32,
}

impl Shown {
    pub(super) fn clean(self, command: &str) -> String {
        let pid = format!("--server-pid {}", self.pid);
        command.replace(&pid, "--server-pid PID").replace(&self.port.to_string(), "PORT")
    }
}

/// A load that lasts until it is interrupted.
pub(super) struct RunningLoad {
    pub(super) command: String,
    running: Running,
}

impl Client<'_> {
    /// The command line; without a count and a length it runs until it is interrupted.
    pub(super) fn command(&self, ksf: &Path, seconds: Option<f64>) -> Command {
        let mut command = Command::new(ksf);
        command.args(["load", "http", &self.url(), "-n", &self.case.in_flight.to_string()]);
        if self.load.keep {
            command.args(["-r", "0"]);
        }
        if let Some(rate) = self.rate_per_s {
            command.args(["--rate", &rate.to_string(), "--seed", &(self.round + 1).to_string()]);
        }
        match (self.count, seconds) {
            (Some(count), _) => command.args(["-c", &count.to_string()]),
            (None, Some(seconds)) => command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]),
            (None, None) => command.args(["--duration", UNTIL_INTERRUPTED]),
        };
        match self.pinning.client(self.case.connections) {
            Some(cpus) => command.args(["--cpu", &cpus]),
            None => command.args(["--no-pin", "-j", &self.case.connections.to_string()]),
        };
        if self.load.names_worker {
            command.args(["--tally", WORKER_FIELD]);
        }
        match self.load.costly {
            true => command.args(["--header", COMPRESS]),
            false => command.args(["--expect-bytes", &BODY_BYTES.to_string()]),
        };
        command.args(["--server-pid", &self.pid.to_string(), "--json"]);
        command
    }

    /// Runs it to its end, which is that of its count.
    pub(super) fn run(&self, ksf: &Path) -> Result<WebResult> {
        parse(&output(&mut self.command(ksf, None), SLACK)?)
    }

    /// Starts it, to be interrupted.
    pub(super) fn start(&self, ksf: &Path) -> Result<RunningLoad> {
        let mut command = Client { count: None, ..*self }.command(ksf, None);
        let mut running = Running::start(&mut command)?;
        running.wait_until_interruptible(SLACK)?;
        Ok(RunningLoad { command: display(&command), running })
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }
}

impl RunningLoad {
    /// Ends it as Ctrl-C does; what was under way is still awaited.
    pub(super) fn interrupt(self) -> Result<WebResult> {
        parse(&self.running.interrupt(SLACK)?)
    }
}

/// Reads a result. Failed requests are part of it; wrong or surplus bytes are an error, whatever was done to the server.
pub(super) fn parse(text: &str) -> Result<WebResult> {
    read(text).with_context(|| format!("ksf load http printed:\n{text}"))
}

fn read(text: &str) -> Result<WebResult> {
    let HttpReport { body: HttpBody { run, .. }, warnings, .. } = serde_json::from_str(text)?;
    ensure!(run.requests.answered > 0, "no request was answered");
    let mut failures: BTreeMap<String, u64> = run.failures.into_iter().filter(|(_, count)| *count > 0).collect();
    for kind in ["bad_response", "unexpected_status", "wrong_body", "address_exhausted", "local_limit"] {
        if let Some(count) = failures.get(kind) {
            bail!("{count} {kind}");
        }
    }
    ensure!(run.connections.surplus == 0, "surplus bytes");
    if run.requests.unanswered > 0 {
        failures.insert("unanswered".into(), run.requests.unanswered);
    }
    let response = run.response;
    let (values, by_thread) = match run.tally {
        Some(tally) => (tally.values, tally.threads),
        None => (BTreeMap::new(), vec![BTreeMap::new(); run.threads.len()]),
    };
    Ok(WebResult {
        answered: run.requests.answered,
        rate_per_s: run.requests.rate_per_s,
        response_us: [response.at(50.0), response.at(99.0), response.at(99.9), response.max_us],
        server_cpu_us: run.server.context("no CPU time of the server")?.cpu_us,
        client_cpu_us: run.cpu_s * 1e6,
        failures,
        values,
        threads: run.threads.iter().map(|thread| thread.cpu).zip(by_thread).collect(),
        warnings: warnings.into_iter().map(|warning| warning.code).collect(),
    })
}
