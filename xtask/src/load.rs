//! Runs of the load generators, and what they say as JSON.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ksf_load::calls::report::CallReport;
use ksf_load::work::report::{WorkBody, WorkReport};

use crate::bench::{FileLoad, FileProtocol, Pace, WorkLoad};
use crate::process::output;

/// The sequence of IOR in place of a mix.
pub(crate) const IOR: &str = "ior";

/// Beyond the length of the load: connecting, the generator's own time limits.
const SLACK: Duration = Duration::from_secs(60);

/// Which generator.
#[derive(Clone, Debug)]
pub(crate) enum Tool {
    Echo { message_bytes: usize },
    Rpc,
    Work(Work),
    Files(Files),
}

/// A load for a file server.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) load: &'static FileLoad,
    /// The folder that is exported.
    pub(crate) export: PathBuf,
    /// Bytes of a READ and of a WRITE, at most those of `load`.
    pub(crate) io_bytes: u32,
    /// Of NFS; none: that of its server.
    pub(crate) mount_port: Option<u16>,
}

/// A load for the work service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) load: &'static WorkLoad,
    /// Of what the messages cost, of their connections and arrivals.
    pub(crate) seed: u64,
    /// Nothing is sent: so many workers are simulated.
    pub(crate) ideal_workers: Option<u32>,
}

/// How long a load lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    /// Messages on each connection.
    Messages(u64),
    Seconds(f64),
}

impl Amount {
    /// The least time that it takes.
    pub(crate) fn length(self) -> Duration {
        match self {
            Self::Messages(_) => Duration::ZERO,
            Self::Seconds(seconds) => Duration::from_secs_f64(seconds),
        }
    }
}

/// One run of a generator against a server on 127.0.0.1.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) tool: Tool,
    pub(crate) udp: bool,
    /// Per connection; where work is spread over connections, in all.
    pub(crate) in_flight: u32,
    /// It polls before it sleeps, where the server has another CPU. Not of worktest.
    pub(crate) polls: bool,
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
    /// What only worktest tells.
    pub(crate) work: Option<WorkResult>,
}

/// What only worktest tells.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkResult {
    pub(crate) rtt_mean_us: f64,
    pub(crate) rtt_stdev_us: f64,
    pub(crate) rtt_p999_us: f64,
    /// p50, p99, p99.9 of the quick messages, where some are slow.
    pub(crate) quick_us: Option<[f64; 3]>,
    /// User and system time of the client per message.
    pub(crate) client_cpu_us: f64,
}

impl Load {
    /// The command line.
    pub(crate) fn command(&self, ksf: &Path) -> Command {
        let mut command = Command::new(ksf);
        match &self.tool {
            Tool::Work(work) => return self.work_command(command, *work),
            Tool::Files(files) => files.options(&mut command),
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
        if self.polls {
            command.args(["--spin", "auto"]);
        }
        match &self.tool {
            Tool::Files(files) => {
                let scheme = files.load.protocol.name();
                command.arg(format!("{scheme}://127.0.0.1:{}{}", self.port, files.export.display()))
            }
            _ => command.arg(format!("127.0.0.1:{}", self.port)),
        };
        command
    }

    fn work_command(&self, mut command: Command, Work { load, seed, ideal_workers }: Work) -> Command {
        command.args(["worktest", "-k", load.kind, "-a", &self.in_flight.to_string()]);
        let weights: Vec<String> = load.weights.iter().map(u32::to_string).collect();
        command.args(["--weights", &weights.join(":")]);
        if let Some([least, most]) = load.work_us {
            command.args(["-w", &format!("{least}us..{most}us")]);
        }
        if let Some([percent, ms]) = load.slow {
            command.args(["--slow", &format!("{percent}:{ms}ms")]);
        }
        match load.pace {
            Pace::Connection => {}
            Pace::Window => drop(command.arg("--spread")),
            // Without sleep in between: on a virtual machine a CPU that sleeps wakes up so late that this would be all
            // that is measured.
            Pace::Rate(per_s) => drop(command.args(["--rate", &per_s.to_string(), "--spin", "5ms"])),
        }
        command.args(["--seed", &seed.to_string()]);
        match self.amount {
            // A schedule has one count, whatever the number of connections.
            Amount::Messages(count) => command.args(["-c", &(count * load.weights.len() as u64).to_string()]),
            Amount::Seconds(seconds) => command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]),
        };
        match &self.cpus {
            Some(cpus) => command.args(["--cpu", cpus]),
            None => command.arg("--no-pin"),
        };
        command.arg("--json");
        match ideal_workers {
            Some(workers) => command.args(["--ideal", &workers.to_string()]),
            None => command.arg(format!("127.0.0.1:{}", self.port)),
        };
        command
    }

    /// Runs it; fails if a reply was lost or wrong.
    pub(crate) fn run(&self, ksf: &Path) -> Result<LoadResult> {
        self.run_by(ksf, |mut command, timeout| output(&mut command, timeout))
    }

    /// The same by something that runs the command and gives back its standard output.
    pub(crate) fn run_by(
        &self,
        ksf: &Path,
        run: impl FnOnce(Command, Duration) -> Result<String>,
    ) -> Result<LoadResult> {
        let text = run(self.command(ksf), self.amount.length() + SLACK)?;
        let parse = match self.tool {
            Tool::Work(_) => parse_work,
            Tool::Echo { .. } | Tool::Rpc | Tool::Files(_) => parse,
        };
        parse(&text).with_context(|| format!("the generator printed:\n{text}"))
    }
}

impl Files {
    fn options<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let FileLoad { protocol, mix, files, file_bytes, io_bytes: _, stable } = self.load;
        command.args(["load", protocol.name()]);
        if *mix == IOR {
            return command.args(["--shape", IOR]);
        }
        command.args(["--mix", mix, "--files", &files.to_string()]);
        command.args(["--file-bytes", &file_bytes.to_string(), "--io-bytes", &self.io_bytes.to_string()]);
        if *protocol == FileProtocol::Nfs {
            command.args(["--stable", stable]);
            if let Some(port) = self.mount_port {
                command.args(["--mount-port", &port.to_string()]);
            }
        }
        command
    }
}

fn parse(text: &str) -> Result<LoadResult> {
    let document: CallReport = serde_json::from_str(text)?;
    ensure!(document.ok, "replies were lost or wrong");
    let [run] = document.body.runs.as_slice() else { bail!("{} runs, not 1", document.body.runs.len()) };
    ensure!(run.messages > 0, "no message was answered");
    Ok(LoadResult {
        messages: run.messages,
        messages_per_s: run.rate_per_s,
        rtt_p50_us: run.latency.at(50.0),
        rtt_p99_us: run.latency.at(99.0),
        faults: document.body.total.faults,
        warnings: document.warnings.into_iter().map(|warning| warning.code).collect(),
        work: None,
    })
}

/// Reads what worktest printed.
pub(crate) fn parse_work(text: &str) -> Result<LoadResult> {
    let WorkReport { body: WorkBody { run, .. }, warnings, ok, .. } = serde_json::from_str(text)?;
    ensure!(ok, "replies were lost or wrong");
    ensure!(run.messages > 0, "no message was answered");
    let mut quick_us = None;
    if run.classes.len() > 1 {
        let quick = run.classes.iter().find(|class| class.name == "quick").context("no class of quick messages")?;
        quick_us = Some([50.0, 99.0, 99.9].map(|percent| quick.latency.at(percent)));
    }
    Ok(LoadResult {
        messages: run.messages,
        messages_per_s: run.rate_per_s,
        rtt_p50_us: run.latency.at(50.0),
        rtt_p99_us: run.latency.at(99.0),
        faults: 0,
        warnings: warnings.into_iter().map(|warning| warning.code).collect(),
        work: Some(WorkResult {
            rtt_mean_us: run.latency.mean_us,
            rtt_stdev_us: run.latency.stdev_us,
            rtt_p999_us: run.latency.at(99.9),
            quick_us,
            client_cpu_us: run.cpu_us_per_message,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What worktest prints of a simulation, which needs no server.
    fn simulated(options: &[&str]) -> String {
        use clap::{Args, Command, FromArgMatches};
        use ksf_load::work::WorktestArgs;
        let words = ["worktest", "--ideal", "4", "--rate", "400", "--json"].iter().chain(options);
        let matches = WorktestArgs::augment_args(Command::new("worktest")).get_matches_from(words);
        let args = WorktestArgs::from_arg_matches(&matches).unwrap();
        let (mut out, stop) = (Vec::new(), std::sync::atomic::AtomicBool::new(false));
        let mut io = ksf_load::Io { out: &mut out, err: &mut Vec::new(), stop: &stop };
        ksf_load::work::run_with(&args, &mut io).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_result_of_worktest_is_read_and_a_doubtful_one_is_an_error() {
        let text = simulated(&["-c", "500", "--slow", "20:5ms"]);
        let result = parse_work(&text).unwrap();
        let quick_us = result.work.as_ref().unwrap().quick_us.unwrap();
        assert_eq!(result.messages, 500);
        // Three digits of 5 ms.
        assert!(quick_us[0] < 4990.0 && result.rtt_p99_us > 4990.0, "{quick_us:?} {}", result.rtt_p99_us);
        assert_eq!(parse_work(&simulated(&["-c", "9"])).unwrap().work.unwrap().quick_us, None);
        assert!(parse_work(&text.replace("\"ok\": true", "\"ok\": false")).is_err());
        assert!(parse_work(&simulated(&["-c", "0"])).is_err() && parse_work("{").is_err());
    }

    #[test]
    fn the_command_for_work_names_the_whole_load() {
        static LOAD: WorkLoad = WorkLoad {
            kind: "sleep",
            work_us: Some([50, 200]),
            slow: Some([20, 5]),
            weights: &[3, 1],
            pace: Pace::Window,
            loops: "01",
        };
        let load = Load {
            tool: Tool::Work(Work { load: &LOAD, seed: 4, ideal_workers: None }),
            udp: false,
            in_flight: 32,
            polls: false,
            threads: 1,
            amount: Amount::Messages(50),
            cpus: Some("0".into()),
            port: 7,
        };
        assert_eq!(
            crate::process::display(&load.command(Path::new("/x/ksf"))),
            "ksf worktest -k sleep -a 32 --weights 3:1 -w 50us..200us --slow 20:5ms --spread --seed 4 -c 100 --cpu 0 \
             --json 127.0.0.1:7"
        );
    }

    #[test]
    fn the_command_is_that_of_the_generator() {
        let load = Load {
            tool: Tool::Echo { message_bytes: 64 },
            udp: true,
            in_flight: 128,
            polls: false,
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
