//! `cargo xtask bench`: ksf and its peers, side by side in one run.
//!
//! Fair by construction: the contestants of a case are measured in turn (A B C, A B C, ...), each
//! alone on the machine, with the same verifying client and the same placement; medians and spread
//! of all rounds are reported, lost rows too. Nothing here is a test of speed: `--smoke`, which
//! `make test` runs, only asserts that every row runs and that every reply was verified.
//!
//! ```text
//!   groups (`--only`) ── of cases ── of steps: a case in one placement, all contestants in turn
//!                                      │ after each the report's raw.json is whole (results.rs)
//!                                      ▼
//!   raw.json ── judge.rs: met, lost, undecided ── report.rs: report.md; chart.rs: report.html, on demand
//! ```

pub(crate) mod case;
mod chart;
mod contestant;
mod goals;
mod have;
mod host;
mod judge;
mod measure;
mod namespace;
#[cfg(test)]
mod peers;
mod raw;
pub(crate) mod report;
mod results;
mod stats;
mod store;
mod vm;
mod watch;
mod web;

use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::process::Signal;

use self::case::{CASES, Case, Placement, Row};
pub(crate) use self::case::{FileLoad, FileProtocol, Pace, WorkLoad};
use self::contestant::{Contestant, Pinning, Programs};
use self::have::Have;
use self::host::HostCosts;
use self::measure::{Effort, Meter, raise_file_limit};
use self::raw::{Group, Raw, Sample, Step};
use self::results::Results;
pub(crate) use self::store::medium;
use self::watch::Watch;
use crate::machine::{Machine, Revision};
use crate::process::die_with_parent;

/// Packages whose version belongs to a result.
const PACKAGES: &[&str] = &[
    "gcc",
    "clang",
    "diod",
    "apache2-utils",
    "haproxy",
    "lighttpd",
    "nfs-ganesha",
    "nginx-light",
    "redis-server",
    "sockperf",
    "wrk",
];

/// Rounds of a smoke run, and its effort: 5,000 messages become 100, 10,000 connections 200, 2,000 per second 200.
const SMOKE: (u32, Effort) = (1, Effort { seconds: 0.0, scale: 0.02, rate_divisor: 10 });

/// Rounds in the VM of what has no goal there: shape needs no more.
const SHAPE_ROUNDS_MAX: u32 = 3;

#[derive(clap::Args)]
pub(crate) struct BenchOptions {
    /// Run every row for a moment, report to the target directory; fails if a row does not run
    #[arg(long)]
    smoke: bool,
    /// Rounds; each measures every contestant once. Where a goal is undecided there are up to three times as many
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Wanted length of one measurement, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Only these rows (repeatable)
    #[arg(long, value_name = "ROW")]
    only: Vec<Row>,
    /// Only these cases, by their names in raw.json (repeatable)
    #[arg(long, value_name = "CASE", value_parser = CASES.iter().map(|case| case.name).collect::<Vec<_>>())]
    case: Vec<String>,
    /// Measure anew what the report already has
    #[arg(long)]
    again: bool,
    /// The directory of the report, instead of that in bench/results of this commit and machine, which is continued
    #[arg(long)]
    out: Option<PathBuf>,
    /// The ksf to measure instead of the release build (with --smoke: the debug build)
    #[arg(long)]
    ksf: Option<PathBuf>,
}

pub(crate) fn run(options: &BenchOptions) -> Result<()> {
    let is_whole = options.only.is_empty() && options.case.is_empty();
    // Without root both halves would choose ports in one network.
    if options.smoke && is_whole && rustix::process::geteuid().is_root() {
        return in_halves(options);
    }
    let profile = if options.smoke { "debug" } else { "release" };
    let ksf = crate::ksf_binary(options.ksf.as_ref(), profile)?;
    let have = Have::look();
    namespace::enter()?;
    let (runs, effort) = match options.smoke {
        true => SMOKE,
        false => (options.runs, Effort { seconds: options.seconds, scale: 1.0, rate_divisor: 1 }),
    };
    let revision = Revision::of(&crate::root());
    let results = Results::open(options.out.as_deref(), options.smoke, &revision, Machine::read(PACKAGES)?)?;
    let cpus = ksf::cpus::allowed().context("cannot tell which CPUs are ours")?;
    let programs = Programs::build(ksf)?;
    let mut bench = Bench { results, revision, runs, effort, cpus, smoke: options.smoke, have, programs };
    let rpcbind = match bench.have.contestant(Contestant::Ganesha) {
        Ok(()) => Some(namespace::rpcbind()?),
        Err(_) => None,
    };
    for &row in Row::value_variants() {
        let wanted = |case: &Case| {
            (options.only.is_empty() || options.only.contains(&row))
                && match options.case.is_empty() {
                    true => !options.smoke || case.is_in_smoke(),
                    false => options.case.iter().any(|name| name == case.name),
                }
        };
        bench.group(row, wanted, options.again)?;
    }
    if let Some(rpcbind) = rpcbind {
        rpcbind.stop()?;
    }
    bench.finish()
}

/// A smoke run measures nothing: two halves of its rows run side by side, each in namespaces of its own.
fn in_halves(options: &BenchOptions) -> Result<()> {
    let out = options.out.clone().map_or_else(|| crate::target_dir().map(|dir| dir.join("bench-smoke")), Ok)?;
    let start = |name: &str, has_files: bool| {
        let mut half = Command::new(std::env::current_exe()?);
        half.args(["bench", "--smoke", "--out"]).arg(out.join(name));
        for row in Row::value_variants().iter().filter(|row| row.has_files() == has_files) {
            half.args(["--only", &row.name()]);
        }
        if let Some(ksf) = &options.ksf {
            half.arg("--ksf").arg(ksf);
        }
        die_with_parent(&mut half, Signal::TERM);
        half.spawn().context("cannot start a half of the smoke run")
    };
    let halves = [("files", start("files", true)?), ("others", start("others", false)?)];
    let ends = halves.map(|(name, mut half)| (name, half.wait()));
    let mut failed = Vec::new();
    for (name, status) in ends {
        let status = status?;
        if !status.success() {
            failed.push(format!("the half {name} of the smoke run ended with {status} (messages above)"));
            // The other half may have written its lines behind these.
            let raw = Raw::read(&Results::of_smoke(&out.join(name))).ok();
            failed.extend(raw.iter().flat_map(Raw::errors));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n  "));
    Ok(())
}

/// After how many rounds the goals are looked at; beyond the first only while one is undecided.
fn looks(runs: u32) -> [u32; stats::LOOKS_MAX as usize] {
    [runs, runs + runs.div_ceil(2), 2 * runs, 3 * runs]
}

struct Bench {
    results: Results,
    revision: Revision,
    runs: u32,
    effort: Effort,
    cpus: Vec<usize>,
    smoke: bool,
    have: Have,
    programs: Programs,
}

impl Bench {
    /// Measures what is still open of a group, as far as it is wanted.
    fn group(&mut self, row: Row, wanted: impl Fn(&Case) -> bool, again: bool) -> Result<()> {
        let cases: Vec<&'static Case> = CASES.iter().filter(|case| case.row == row).collect();
        if !cases.iter().any(|case| wanted(case)) {
            return Ok(());
        }
        let mut planned = self.plan(row, &cases)?;
        planned.retain(|(case, _)| wanted(case));
        let group = self.results.group(row);
        for step in planned.iter().map(|(case, pinning)| case.step(pinning.placement)).filter(|_| again) {
            group.done.remove(&step);
            group.open.insert(step);
        }
        planned.retain(|(case, pinning)| group.open.contains(&case.step(pinning.placement)));
        if !planned.is_empty() {
            let host = HostCosts::measure(&self.programs, self.effort, &self.cpus)?;
            self.results.group(row).host.push(host);
        }
        let mut in_vm = Vec::new();
        for (case, pinning) in planned {
            let step = case.step(pinning.placement);
            if pinning.placement == Placement::Vm {
                in_vm.push(case);
                continue;
            }
            let samples = self.measure(case, &pinning);
            self.keep(row, &step, samples)?;
        }
        for (step, samples) in self.measure_in_vm(&in_vm) {
            self.keep(row, &step, samples)?;
        }
        self.results.write_report()
    }

    /// All steps of a group; what cannot be measured here is noted as left out.
    fn plan(&mut self, row: Row, cases: &[&'static Case]) -> Result<Vec<(&'static Case, Pinning)>> {
        let mut skipped = Vec::new();
        let mut planned = Vec::new();
        for &case in cases {
            if let Err(why) = self.have.case(case) {
                skipped.push(format!("{}: {why}", case.title));
                continue;
            }
            for contestant in case.contestants {
                skipped.extend(self.have.contestant(*contestant).err().map(|why| format!("{contestant}: {why}")));
            }
            skipped.extend(self.have.counter().err().map(|why| format!("system calls per message: {why}")));
            // Both ends of idle connections are in processes with the same limit; the rest is slack.
            let files = (f64::from(case.idle) * self.effort.scale) as u64 + 100;
            if let Err(why) = raise_file_limit(files) {
                skipped.push(format!("{}: {why}", case.title));
                continue;
            }
            for &placement in self.placements(case) {
                match Pinning::new(placement, case.client_threads(), &self.cpus) {
                    Some(pinning) => planned.push((case, pinning)),
                    None => skipped
                        .push(format!("{} on the {placement}: needs two CPUs, this machine lends one", case.title)),
                }
            }
        }
        // A smoke run boots no machine: the lab's tests do.
        if row == Row::Mux && !self.smoke {
            match &self.have.vm {
                Ok(()) => planned.extend(cases.iter().map(|&case| (case, Pinning::free(Placement::Vm)))),
                Err(why) => skipped.push(format!("AF_KCM in the VM: {why}")),
            }
        }
        skipped.sort();
        skipped.dedup();
        skipped.iter().for_each(|what| eprintln!("bench: left out: {what}"));

        let (runs, seconds) = (self.runs, self.effort.seconds);
        let medium = row.has_files().then(|| store::medium(self.programs.scratch()));
        let new = || Group { medium, ..Group::new(row, &self.revision, runs, seconds) };
        let group = self.results.group_or(row, new);
        ensure!(
            (group.runs, group.seconds) == (runs, seconds),
            "{} was begun with --runs {} --seconds {}; go on with these, or name another directory with --out",
            row.name(),
            group.runs,
            group.seconds
        );
        group.skipped = skipped;
        group.open = planned.iter().map(|(case, pinning)| case.step(pinning.placement)).collect();
        group.open.retain(|step| !group.done.contains(step));
        Ok(planned)
    }

    fn placements(&self, case: &Case) -> &'static [Placement] {
        match (self.smoke, case.row) {
            // Balance and locality are those of workers that are bound to CPUs.
            (true, Row::Accel) if self.cpus.len() > 1 => &[Placement::Same],
            (true, _) => &[Placement::Unpinned],
            (false, Row::Accel) => &[Placement::Same],
            // On its server's CPU a client does not poll.
            (false, _) if case.client_polls => &[Placement::Other],
            (false, Row::Idle) => &[Placement::Other],
            (false, Row::Mux) => &[Placement::Shared],
            // One CPU for the server is what Redis uses; on the client's CPU the client would be the limit.
            (false, Row::Store) if case.is_unpinned_too() => &[Placement::Other, Placement::Unpinned],
            (false, Row::Store) => &[Placement::Other],
            (false, Row::Nfs | Row::Ninep) if !case.is_everywhere() => &[Placement::Other],
            (false, _) => &[Placement::Same, Placement::Other, Placement::Unpinned],
        }
    }

    /// All rounds of a step, in each the contestants in turn, and their system calls.
    fn measure(&self, case: &Case, pinning: &Pinning) -> Vec<Sample> {
        let meter = self.meter();
        let mut contestants = case.contestants.to_vec();
        contestants.retain(|&one| self.have.contestant(one).is_ok() && one.is_for(pinning.placement));
        let say = |contestant, what: &str| {
            eprintln!("bench: {}, {contestant}, {}, {what}", case.title, pinning.placement);
        };
        let mut samples: Vec<Sample> = Vec::new();
        let mut rounds = |rounds: Range<u32>, wanted: &dyn Fn(Contestant) -> bool| {
            for round in rounds {
                for &contestant in contestants.iter().filter(|&&contestant| wanted(contestant)) {
                    say(contestant, &format!("round {}", round + 1));
                    samples.push(meter.sample(case, contestant, pinning, round));
                }
            }
            judge::undecided(&samples, &case.step(pinning.placement))
        };
        let mut undecided = rounds(0..self.runs, &|_| true);
        for look in looks(self.runs).windows(2).filter(|_| !self.smoke) {
            if undecided.is_empty() {
                break;
            }
            undecided = rounds(look[0]..look[1], &|contestant| undecided.contains(&contestant));
        }
        let counter = match self.have.counter() {
            Ok(counter) if case.counts_syscalls(counter) => counter,
            _ => return samples,
        };
        // One shows a smoke run that the counter counts.
        let counted = if self.smoke { 1 } else { contestants.len() };
        for contestant in contestants.into_iter().filter(|contestant| contestant.can_be_watched()).take(counted) {
            say(contestant, "system calls");
            samples.push(meter.syscalls(case, contestant, pinning, counter));
        }
        samples
    }

    fn meter(&self) -> Meter<'_> {
        Meter { programs: &self.programs, effort: self.effort, watch: Watch::Nothing }
    }

    /// Cases of the multiplexor once more, beside AF_KCM.
    fn measure_in_vm(&self, cases: &[&'static Case]) -> Vec<(Step, Vec<Sample>)> {
        if cases.is_empty() {
            return Vec::new();
        }
        let rounds = |case: &Case| match judge::has_goal(case, Placement::Vm) {
            true => self.runs,
            false => self.runs.min(SHAPE_ROUNDS_MAX),
        };
        eprintln!("bench: AF_KCM in the VM");
        let samples = vm::measure(&self.programs, self.effort, &rounds, cases);
        let of = |case: &Case| samples.iter().filter(|sample| sample.case == case.name).cloned().collect();
        cases.iter().map(|case| (case.step(Placement::Vm), of(case))).collect()
    }

    fn keep(&mut self, row: Row, step: &Step, samples: Vec<Sample>) -> Result<()> {
        for sample in &samples {
            if let Some(error) = sample.error_line() {
                eprintln!("bench: failed: {error}");
            }
        }
        self.results.keep(row, step, samples)
    }

    /// Fails if something did not run.
    fn finish(self) -> Result<()> {
        let raw = self.results.raw();
        // Once more, at the end: what is above may be far above, or cut from a log.
        let failed: Vec<String> = raw.errors().collect();
        if !failed.is_empty() {
            bail!("{} of {} measurements failed:\n  {}", failed.len(), raw.samples.len(), failed.join("\n  "));
        }
        if self.smoke {
            let skipped: Vec<&str> = raw.groups.iter().flat_map(|group| &group.skipped).map(String::as_str).collect();
            // In CI everything is installed and allowed, so nothing may be left out.
            let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
            ensure!(!ci || skipped.is_empty(), "left out in CI: {}", skipped.join("; "));
            println!(
                "bench smoke: {} measurements ran, every reply was verified, {} left out",
                raw.samples.len(),
                skipped.len()
            );
        }
        Ok(())
    }
}
