//! `cargo xtask bench`: ksf and its peers, side by side in one run.
//!
//! Fair by construction: the contestants of a case are measured in turn (A B C, A B C, ...), each
//! alone on the machine, with the same verifying client and the same placement; medians and spread
//! of all rounds are reported, lost rows too. Nothing here is a test of speed: `--smoke`, which
//! `make test` runs, only asserts that every row runs and that every reply was verified.

mod case;
mod chart;
mod contestant;
mod goals;
mod measure;
mod namespace;
#[cfg(test)]
mod peers;
mod raw;
pub(crate) mod report;
mod text;
mod vm;
mod web;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use self::case::{CASES, Case, Placement, Row};
pub(crate) use self::case::{Pace, WorkLoad};
use self::contestant::{Contestant, Pinning, Programs};
use self::measure::{Effort, Meter, raise_file_limit};
use self::raw::{Raw, Sample};
use crate::machine::Origin;

/// Packages whose version belongs to a result.
const PACKAGES: &[&str] = &[
    "gcc",
    "clang",
    "apache2-utils",
    "haproxy",
    "lighttpd",
    "memcached",
    "nfs-ganesha",
    "nginx-light",
    "redis-server",
    "sockperf",
    "wrk",
];

/// Rounds of a smoke run, and of its scale: 5,000 messages become 100, 10,000 connections 200.
const SMOKE: (u32, Effort) = (1, Effort { seconds: 0.0, scale: 0.02 });

const VM_ROUNDS_MAX: u32 = 3;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run every row for a moment, report to the target directory; fails if a row does not run
    #[arg(long)]
    smoke: bool,
    /// Rounds; each measures every contestant once
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
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
    /// The directory of the results instead of bench/results/DATE-MACHINE
    #[arg(long)]
    out: Option<PathBuf>,
    /// The ksf to measure instead of the release build (with --smoke: the debug build)
    #[arg(long)]
    ksf: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let profile = if options.smoke { "debug" } else { "release" };
    let ksf = crate::ksf_binary(options.ksf.as_ref(), profile)?;
    let have = Have::look();
    namespace::enter()?;
    let (runs, effort) = match options.smoke {
        true => SMOKE,
        false => (options.runs, Effort { seconds: options.seconds, scale: 1.0 }),
    };
    let programs = Programs::build(ksf)?;
    let mut bench = Bench {
        raw: Raw { schema: 1, origin: Origin::read(PACKAGES)?, runs, seconds: effort.seconds, ..Raw::default() },
        cpus: crate::cpu::allowed()?,
        smoke: options.smoke,
        have,
    };
    let rpcbind = match bench.have.ganesha {
        Ok(()) => Some(namespace::rpcbind()?),
        Err(_) => None,
    };
    let cases = CASES.iter().filter(|case| wanted(options, case));
    for case in cases.clone() {
        bench.measure(&programs, effort, case);
    }
    for case in cases.clone().filter(|case| case.counts_syscalls()) {
        bench.count_syscalls(&programs, effort, case);
    }
    let in_vm: Vec<_> = cases.filter(|case| case.row == Row::Mux).collect();
    if !in_vm.is_empty() {
        bench.measure_in_vm(&programs, effort, &in_vm);
    }
    if let Some(rpcbind) = rpcbind {
        rpcbind.stop()?;
    }
    bench.finish(options)
}

fn wanted(options: &Options, case: &Case) -> bool {
    let named = |name: &String| name == case.name;
    (options.only.is_empty() || options.only.contains(&case.row))
        && (options.case.is_empty() || options.case.iter().any(named))
}

/// What of the peers and rights is here, or why not.
struct Have {
    kernel: Result<(), String>,
    ganesha: Result<(), String>,
    sockperf: Result<(), String>,
    nginx: Result<(), String>,
    haproxy: Result<(), String>,
    lighttpd: Result<(), String>,
    wrk: Result<(), String>,
    ab: Result<(), String>,
    redis: Result<(), String>,
    memcached: Result<(), String>,
    strace: Result<(), String>,
    vm: Result<(), String>,
}

impl Have {
    fn look() -> Have {
        let root = match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err("needs root".to_owned()),
        };
        let installed = |program: &str| match find_program(program) {
            true => Ok(()),
            false => Err(format!("{program} is not installed; run: scripts/setup.sh bench")),
        };
        Have {
            kernel: root.clone(),
            ganesha: root.and_then(|()| installed("ganesha.nfsd")).and_then(|()| installed("rpcbind")),
            sockperf: installed("sockperf"),
            nginx: installed("nginx"),
            haproxy: installed("haproxy"),
            lighttpd: installed("lighttpd"),
            wrk: installed("wrk"),
            ab: installed("ab"),
            redis: installed("redis-server"),
            memcached: installed("memcached"),
            strace: installed("strace"),
            vm: vm::look(),
        }
    }

    fn contestant(&self, contestant: Contestant) -> Result<(), String> {
        match contestant {
            Contestant::Kernel => self.kernel.clone(),
            Contestant::Ganesha => self.ganesha.clone(),
            Contestant::Sockperf => self.sockperf.clone(),
            Contestant::NginxMutex | Contestant::NginxExclusive | Contestant::NginxReuseport => self.nginx.clone(),
            Contestant::Accel | Contestant::AccelOff => self.nginx.clone(),
            Contestant::Haproxy
            | Contestant::HaproxyShards
            | Contestant::AccelHaproxy
            | Contestant::AccelHaproxyShards => self.haproxy.clone(),
            Contestant::Lighttpd | Contestant::AccelLighttpd => self.lighttpd.clone(),
            Contestant::Wrk => self.nginx.clone().and_then(|()| self.wrk.clone()),
            Contestant::Ab => self.nginx.clone().and_then(|()| self.ab.clone()),
            Contestant::Redis | Contestant::AccelRedis | Contestant::QueueRedis | Contestant::QueueOffRedis => {
                self.redis.clone()
            }
            Contestant::Memcached
            | Contestant::AccelMemcached
            | Contestant::QueueMemcached
            | Contestant::QueueOffMemcached => self.memcached.clone(),
            _ => Ok(()),
        }
    }
}

fn find_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

struct Bench {
    raw: Raw,
    cpus: Vec<u32>,
    smoke: bool,
    have: Have,
}

impl Bench {
    /// All rounds of a case: placement by placement, and in each the contestants in turn.
    fn measure(&mut self, programs: &Programs, effort: Effort, case: &Case) {
        let meter = Meter { programs, effort };
        if case.idle > 0 {
            // Both ends of them are in processes with the same limit; the rest is slack.
            let files = (f64::from(case.idle) * effort.scale) as u64 + 100;
            if let Err(why) = raise_file_limit(files) {
                self.skip(format!("{}: {why}", case.title));
                return;
            }
        }
        let contestants = self.contestants(case);
        for pinning in self.pinnings(case) {
            for round in 0..self.raw.runs {
                for &contestant in &contestants {
                    if contestant == Contestant::PairFloor && pinning.placement == Placement::Other {
                        continue; // it has one thread only
                    }
                    self.say(case, contestant, &pinning, &format!("round {}", round + 1));
                    let sample = meter.sample(case, contestant, &pinning, round);
                    self.keep(sample);
                }
            }
        }
    }

    /// Cases of the multiplexor once more, beside AF_KCM.
    fn measure_in_vm(&mut self, programs: &Programs, effort: Effort, cases: &[&'static Case]) {
        if let Err(why) = self.have.vm.clone() {
            return self.skip(format!("AF_KCM in the VM: {why}"));
        }
        // Shape needs no more.
        let rounds = self.raw.runs.min(VM_ROUNDS_MAX);
        eprintln!("bench: AF_KCM in the VM, {rounds} rounds");
        for sample in vm::measure(programs, effort, rounds, cases) {
            self.keep(sample);
        }
    }

    fn count_syscalls(&mut self, programs: &Programs, effort: Effort, case: &Case) {
        if let Err(why) = self.have.strace.clone() {
            return self.skip(format!("system calls per message: {why}"));
        }
        let Some(pinning) = Pinning::new(Placement::Unpinned, 1, &self.cpus) else {
            return;
        };
        let meter = Meter { programs, effort };
        for contestant in self.contestants(case) {
            if matches!(contestant, Contestant::PairFloor | Contestant::Sockperf | Contestant::IdealQueue) {
                continue; // no server, and a client that counts no messages
            }
            self.say(case, contestant, &pinning, "system calls");
            let sample = meter.syscalls(case, contestant, &pinning);
            self.keep(sample);
        }
    }

    /// The contestants of a case that can run here; the others are noted as left out.
    fn contestants(&mut self, case: &Case) -> Vec<Contestant> {
        let (can, cannot): (Vec<_>, Vec<_>) = case
            .contestants
            .iter()
            .map(|&contestant| (contestant, self.have.contestant(contestant)))
            .partition(|(_, have)| have.is_ok());
        for (contestant, why) in cannot {
            self.skip(format!("{contestant}: {}", why.expect_err("partitioned")));
        }
        can.into_iter().map(|(contestant, _)| contestant).collect()
    }

    fn pinnings(&mut self, case: &Case) -> Vec<Pinning> {
        let placements: &[Placement] = match (self.smoke, case.row) {
            // Balance and locality are those of workers that are bound to CPUs.
            (true, Row::Accel) if self.cpus.len() > 1 => &[Placement::Same],
            (true, _) => &[Placement::Unpinned],
            (false, Row::Accel) => &[Placement::Same],
            (false, Row::Idle) => &[Placement::Other],
            (false, Row::Mux) => &[Placement::Shared],
            (false, _) => &[Placement::Same, Placement::Other, Placement::Unpinned],
        };
        let mut pinnings = Vec::new();
        for &placement in placements {
            match Pinning::new(placement, case.client_threads(), &self.cpus) {
                Some(pinning) => pinnings.push(pinning),
                None => self.skip(format!("{} on the {placement}: needs two CPUs, this machine lends one", case.title)),
            }
        }
        pinnings
    }

    fn skip(&mut self, what: String) {
        if !self.raw.skipped.contains(&what) {
            eprintln!("bench: left out: {what}");
            self.raw.skipped.push(what);
        }
    }

    fn keep(&mut self, sample: Sample) {
        if let Some(error) = &sample.error {
            eprintln!("bench: {} {} failed: {error}", sample.case, sample.contestant);
        }
        self.raw.samples.push(sample);
    }

    fn say(&self, case: &Case, contestant: Contestant, pinning: &Pinning, what: &str) {
        eprintln!("bench: {}, {contestant}, {}, {what}", case.title, pinning.placement);
    }

    /// Writes results and report; fails if something did not run.
    fn finish(self, options: &Options) -> Result<()> {
        let dir = match (&options.out, self.smoke) {
            (Some(dir), _) => dir.clone(),
            (None, true) => crate::target_dir()?.join("bench-smoke"),
            (None, false) => crate::root().join("bench/results").join(self.raw.origin.slug()),
        };
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let json = serde_json::to_string_pretty(&self.raw)?;
        std::fs::write(dir.join("raw.json"), json + "\n").context("cannot write raw.json")?;
        report::rewrite(&dir)?;
        eprintln!("bench: results are in {}", dir.display());

        let failed = self.raw.samples.iter().filter(|sample| sample.error.is_some()).count();
        if failed > 0 {
            bail!("{failed} of {} measurements failed (messages above)", self.raw.samples.len());
        }
        if self.smoke {
            self.finish_smoke()?;
        }
        Ok(())
    }

    /// In CI everything is installed and allowed, so nothing may be left out.
    fn finish_smoke(&self) -> Result<()> {
        let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
        if ci && !self.raw.skipped.is_empty() {
            bail!("left out in CI: {}", self.raw.skipped.join("; "));
        }
        println!(
            "bench smoke: {} measurements ran, every reply was verified, {} left out",
            self.raw.samples.len(),
            self.raw.skipped.len()
        );
        Ok(())
    }
}
