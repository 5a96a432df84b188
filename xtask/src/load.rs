//! Runs of the load generators, and what they say as JSON.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
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
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoadResult {
    pub(crate) messages: u64,
    pub(crate) messages_per_s: f64,
    pub(crate) rtt_p50_us: f64,
    pub(crate) rtt_p99_us: f64,
    /// Wrong and missing replies.
    pub(crate) faults: u64,
    /// Reasons to doubt the figures, by the generator's names for them.
    pub(crate) warnings: Vec<String>,
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

/// What is read of the generators' JSON (docs/formats/load-json.md).
#[derive(Deserialize)]
struct Document {
    runs: Vec<Run>,
    warnings: Vec<Warning>,
    total: Total,
    ok: bool,
}

#[derive(Deserialize)]
struct Total {
    faults: u64,
}

#[derive(Deserialize)]
struct Run {
    messages: u64,
    rate_per_s: f64,
    latency: Latency,
}

#[derive(Deserialize)]
struct Latency {
    quantiles: Vec<Quantile>,
}

#[derive(Deserialize)]
struct Quantile {
    percent: f64,
    us: f64,
}

#[derive(Deserialize)]
struct Warning {
    code: String,
}

fn parse(text: &str) -> Result<LoadResult> {
    let document: Document = serde_json::from_str(text)?;
    ensure!(document.ok, "replies were lost or wrong");
    let [run] = document.runs.as_slice() else { bail!("{} runs, not 1", document.runs.len()) };
    ensure!(run.messages > 0, "no message was answered");
    let quantile = |percent: f64| -> Result<f64> {
        let mut quantiles = run.latency.quantiles.iter();
        let found = quantiles.find(|quantile| quantile.percent == percent);
        Ok(found.with_context(|| format!("no quantile {percent}"))?.us)
    };
    Ok(LoadResult {
        messages: run.messages,
        messages_per_s: run.rate_per_s,
        rtt_p50_us: quantile(50.0)?,
        rtt_p99_us: quantile(99.0)?,
        faults: document.total.faults,
        warnings: document.warnings.into_iter().map(|warning| warning.code).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"format":"ksf-load","version":1,"ok":true,"total":{"faults":0},
        "warnings":[{"code":"busy-generator","text":"t"}],
        "runs":[{"run":1,"messages":700,"rate_per_s":1400.5,"latency":{"min_us":1.0,"quantiles":[
            {"percent":50.0,"us":7.5},{"percent":99.0,"us":9.25}]}}]}"#;

    #[test]
    fn a_result_is_read() {
        let expected = LoadResult {
            messages: 700,
            messages_per_s: 1400.5,
            rtt_p50_us: 7.5,
            rtt_p99_us: 9.25,
            faults: 0,
            warnings: vec!["busy-generator".into()],
        };
        assert_eq!(parse(TEXT).unwrap(), expected);
    }

    #[test]
    fn a_doubtful_result_is_an_error() {
        for (from, to) in [
            ("\"ok\":true", "\"ok\":false"),
            ("\"messages\":700", "\"messages\":0"),
            ("\"percent\":99.0", "\"percent\":98.0"),
            ("{\"format\"", "{format"),
        ] {
            assert!(parse(&TEXT.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn the_command_is_that_of_the_generator() {
        let load = Load {
            tool: Tool::Echo { message_bytes: 64 },
            udp: true,
            in_flight: 128,
            threads: 2,
            amount: Amount::Seconds(0.25),
            cpus: Some("0,1".into()),
            port: 7,
        };
        let command = crate::process::display(&load.command(Path::new("/x/ksf")));
        assert_eq!(
            command,
            "ksf echotest -l 64 -u -a 128 -j 2 --duration 250ms --cpu 0,1 -i 1 --nice 0 --json \
             --no-progress 127.0.0.1:7"
        );
    }
}
