//! Runs of the load generators, and what they say as JSON.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::process::output;

/// Beyond the length of the load: connecting, the generator's own time limits.
const SLACK: Duration = Duration::from_secs(60);

/// Which generator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tool {
    Echo { message_bytes: usize },
    Rpc,
}

/// How long a load lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    /// Messages on each connection.
    Messages(u64),
    Seconds(f64),
}

/// One run of a generator against a server on 127.0.0.1.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) tool: Tool,
    pub(crate) udp: bool,
    /// Per connection.
    pub(crate) in_flight: u32,
    /// Each has a connection of its own.
    pub(crate) threads: u32,
    pub(crate) amount: Amount,
    /// For the threads in turn; None: not pinned.
    pub(crate) cpus: Option<String>,
    pub(crate) port: u16,
}

/// What came of a run in which every reply came and was right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadResult {
    pub(crate) messages: u64,
    pub(crate) messages_per_s: f64,
    pub(crate) rtt_p50_us: f64,
    pub(crate) rtt_p99_us: f64,
}

impl Load {
    /// The command line.
    pub(crate) fn command(&self, ksf: &Path) -> Command {
        let mut command = Command::new(ksf);
        match self.tool {
            Tool::Rpc => command.arg("rpctest"),
            Tool::Echo { message_bytes } => command.args(["echotest", "-l", &message_bytes.to_string()]),
        };
        if self.udp {
            command.arg("-u");
        }
        command.args(["-a", &self.in_flight.to_string(), "-j", &self.threads.to_string()]);
        match self.amount {
            Amount::Messages(count) => command.args(["-c", &count.to_string()]),
            Amount::Seconds(seconds) => command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]),
        };
        match &self.cpus {
            Some(cpus) => command.args(["--cpu", cpus]),
            None => command.arg("--no-pin"),
        };
        // Client and server have the same priority: the originals' -20 would let the client starve
        // a server on its CPU.
        command.args(["-i", "1", "--nice", "0", "--json", "--no-progress"]);
        command.arg(format!("127.0.0.1:{}", self.port));
        command
    }

    /// Runs it; fails if a reply was lost or wrong.
    pub(crate) fn run(&self, ksf: &Path) -> Result<LoadResult> {
        let length = match self.amount {
            Amount::Messages(_) => Duration::ZERO,
            Amount::Seconds(seconds) => Duration::from_secs_f64(seconds),
        };
        let text = output(&mut self.command(ksf), length + SLACK)?;
        parse(&text).with_context(|| format!("the generator printed:\n{text}"))
    }
}

/// What is read of the generators' JSON.
#[derive(Deserialize)]
struct Document {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    messages: u64,
    messages_per_s: f64,
    errors: u64,
    latency_us: Latency,
}

#[derive(Deserialize)]
struct Latency {
    p50: f64,
    p99: f64,
}

fn parse(text: &str) -> Result<LoadResult> {
    let document: Document = serde_json::from_str(text)?;
    let run = document.runs.first().context("no run")?;
    ensure!(run.errors == 0, "{} replies were lost or wrong", run.errors);
    ensure!(run.messages > 0, "no message was answered");
    Ok(LoadResult {
        messages: run.messages,
        messages_per_s: run.messages_per_s,
        rtt_p50_us: run.latency_us.p50,
        rtt_p99_us: run.latency_us.p99,
    })
}
