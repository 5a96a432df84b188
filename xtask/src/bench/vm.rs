//! The loads of the multiplexor beside AF_KCM, on an emulated machine whose kernel has it.
//!
//! All runs are in one boot, in turn as elsewhere. Times of an emulated processor are good for shape alone: nothing here
//! is compared with a figure from outside.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use ksf_lab::Lab;

use super::case::{Case, Placement, Row, Service};
use super::contestant::{Contestant, Pinning, Programs};
use super::measure::{Effort, insert_result, load};
use super::raw::Sample;
use crate::load::{Load, parse_work};
use crate::process::display;

/// Emulated processors: as many as the rows outside use.
const CPUS: u32 = 2;
const PORT: u16 = 7000;
/// Before the output of each run.
const MARK: &str = "@@@ ";
/// For start, warm-up and end of a server, beyond the length of the load; emulated.
const SLACK: Duration = Duration::from_secs(30);

/// Whether such machines can be had here; else why not. Fetches their kernel, so it must come before the network is left.
pub(crate) fn look() -> Result<(), String> {
    ksf_lab::available().map_err(|error| error.to_string())
}

/// All rounds of these cases. Runs that fail are samples with an error.
pub(crate) fn measure(
    programs: &Programs,
    effort: Effort,
    rounds: &dyn Fn(&Case) -> u32,
    cases: &[&'static Case],
) -> Vec<Sample> {
    let mut runs = Vec::new();
    for &case in cases {
        for round in 0..rounds(case) {
            runs.extend(
                contestants(case).map(|contestant| VmMeasurement::new(programs, effort, case, contestant, round)),
            );
        }
    }
    let output = boot(programs, &runs).map_err(|error| format!("{error:#}"));
    runs.into_iter().map(|run| run.sample(output.as_deref())).collect()
}

/// Those of the case that can be had in a placement.
pub(super) fn contestants_in(case: &Case, placement: Placement) -> Vec<Contestant> {
    match placement {
        Placement::Vm if case.row == Row::Mux => contestants(case).collect(),
        _ => case.contestants.to_vec(),
    }
}

/// Those of the case that can be had there, and AF_KCM beside those of ours that have as many workers.
pub(super) fn contestants(case: &Case) -> impl Iterator<Item = Contestant> {
    let kernel = |contestant| match contestant {
        Contestant::Workers2 => Some(Contestant::KernelWorkers2),
        Contestant::Workers4 => Some(Contestant::KernelWorkers4),
        _ => None,
    };
    case.contestants
        .iter()
        .filter(|contestant| **contestant != Contestant::IdealQueue)
        .flat_map(move |&contestant| [Some(contestant), kernel(contestant)])
        .flatten()
}

/// One measurement, in the script and in what it prints.
struct VmMeasurement<'a> {
    case: &'a Case,
    contestant: Contestant,
    round: u32,
    server: String,
    warm_up: String,
    load: Load,
    client: String,
}

impl<'a> VmMeasurement<'a> {
    fn new(programs: &Programs, effort: Effort, case: &'a Case, contestant: Contestant, round: u32) -> Self {
        let pinning = Pinning::free(Placement::Vm);
        let line = |amount| {
            let load = load(case, &pinning, PORT, amount, round);
            let line = display(&load.command(&programs.ksf));
            (load, line)
        };
        let (_, warm_up) = line(effort.warm_up(case));
        let (load, client) = line(effort.amount(case, Placement::Vm));
        VmMeasurement { case, contestant, round, server: server(case, contestant), warm_up, load, client }
    }

    fn mark(&self) -> String {
        format!("{MARK}{} {:?} {}", self.case.name, self.contestant, self.round)
    }

    /// The lines of the script: a server that answers the first load is ready.
    fn script(&self, script: &mut String) {
        let VmMeasurement { server, warm_up, client, .. } = self;
        let mark = self.mark();
        let _ = writeln!(
            script,
            "{server} >/tmp/server 2>&1 &\nserver=$!\n\
             until {warm_up} >/tmp/warm 2>&1; do kill -0 $server || {{ cat /tmp/server; exit 1; }}; done\n\
             echo '{mark}'\n{client}\nkill $server\nwait $server || :"
        );
    }

    fn time(&self) -> Duration {
        SLACK + self.load.amount.length()
    }

    /// What the machine printed of this run.
    fn sample(self, output: Result<&str, &String>) -> Sample {
        let mut sample = Sample::new(self.case, self.contestant, Placement::Vm, self.round);
        sample.server_command = self.server.replace(&PORT.to_string(), "PORT");
        sample.client_command = self.client.replace(&PORT.to_string(), "PORT");
        let result = match output {
            Ok(output) => part(output, &self.mark()).and_then(parse_work).map_err(|error| format!("{error:#}")),
            Err(error) => Err(error.clone()),
        };
        match result {
            Ok(result) => insert_result(&mut sample, self.case, &result),
            Err(error) => sample.error = Some(error),
        }
        sample
    }
}

/// The command of a server on the machine.
fn server(case: &Case, contestant: Contestant) -> String {
    let Service::Work(load) = case.service else { unreachable!("only work is measured here") };
    match contestant {
        Contestant::WorkThreads => format!("work_server threads 127.0.0.1 {PORT}"),
        Contestant::WorkLoops => format!("work_server epoll 127.0.0.1 {PORT} {}", load.loops),
        Contestant::KernelWorkers2 => format!("work_server kcm 127.0.0.1 {PORT} 2"),
        Contestant::KernelWorkers4 => format!("work_server kcm 127.0.0.1 {PORT} 4"),
        _ => format!("ksf serve /etc/{}", file_name(contestant)),
    }
}

fn file_name(contestant: Contestant) -> String {
    format!("workers-{}.toml", workers(contestant))
}

fn workers(contestant: Contestant) -> u32 {
    contestant.workers().expect("it has workers")
}

fn boot(programs: &Programs, runs: &[VmMeasurement<'_>]) -> Result<String> {
    let mut script = String::new();
    runs.iter().for_each(|run| run.script(&mut script));
    let time: Duration = runs.iter().map(VmMeasurement::time).sum();
    let mut lab = Lab::script(script).module("kcm").tool("cat").cpus(CPUS).time_limit(time);
    for (host, guest) in
        [(programs.ksf.as_path(), "/bin/ksf"), (&programs.peer_path("work_server"), "/bin/work_server")]
            as [(&Path, &str); 2]
    {
        lab = lab.file(host, guest);
    }
    for contestant in [Contestant::Workers2, Contestant::Workers4] {
        let workers = workers(contestant);
        let text = format!(
            "[[service]]\nname = \"work\"\nkind = \"work\"\nengine = \"epoll\"\nworkers = {workers}\n\
             listen = [\"tcp:127.0.0.1:{PORT}\"]\n"
        );
        lab = lab.text(format!("/etc/{}", file_name(contestant)), text);
    }
    lab.run()?.checked().context("the machine")
}

/// The document after this mark.
fn part<'a>(output: &'a str, mark: &str) -> Result<&'a str> {
    let (_, after) = output.split_once(&format!("{mark}\n")).with_context(|| format!("nothing after \"{mark}\""))?;
    let end = after.find(MARK).unwrap_or(after.len());
    let document = &after[..end];
    // What follows it is the server's.
    let end = document.rfind('}').map_or(document.len(), |at| at + 1);
    Ok(&document[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::case::CASES;

    #[test]
    fn the_part_of_a_run_is_found() {
        let output = "@@@ a X 0\n{\"a\":{}}\nbye\n@@@ a X 1\n{}\n";
        assert_eq!(part(output, "@@@ a X 0").unwrap(), "{\"a\":{}}");
        assert_eq!(part(output, "@@@ a X 1").unwrap(), "{}");
        assert!(part(output, "@@@ b X 1").is_err());
    }

    #[test]
    fn af_kcm_stands_beside_as_many_workers_of_ours() {
        let mixed = CASES.iter().find(|case| case.name == "mux-mixed").unwrap();
        assert_eq!(contestants(mixed).collect::<Vec<_>>(), [Contestant::Workers4, Contestant::KernelWorkers4]);
        let loops = CASES.iter().find(|case| case.name == "mux-pipeline-64").unwrap();
        let all: Vec<_> = contestants(loops).collect();
        assert!(all.contains(&Contestant::KernelWorkers2) && all.contains(&Contestant::WorkLoops), "{all:?}");
    }
}
