//! `ksf serve demo`: the plan of the demo server, and its statistics every second.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::plan::{self, Demo, LimitSource, Plan, What, Xdp};
use super::running::Worker;
use super::{Services, lock};
use crate::args::{DemoArgs, EngineWish};
use crate::manager;
use crate::output::{Failure, Status, say};
use crate::serve::address::Listen;
use crate::serve::resources::Resources;

/// Port of the demo server. The original had 80, which needs rights.
const DEMO_PORT: u16 = 8080;

/// Limits that suit HTTP better than the common defaults: cookies are long, and browsers keep connections for ever.
const HEADER_BYTES_MAX: u64 = 8 << 10;
const IDLE_TIMEOUT_MS: u64 = 60_000;

/// Runs `ksf serve demo`.
pub(crate) fn run(args: DemoArgs) -> Result<ExitCode, Failure> {
    let passed = manager::passed_sockets()?;
    let (stats, loudness) = (args.stats.clone(), args.loudness);
    let every_worker = loudness.verbose > 0;
    let log = args.log.as_deref().map(open_log).transpose()?;
    let reporter = (every_worker || log.is_some()).then_some(Reporter { log, every_worker });
    super::run(vec![plan(args, passed)?], &stats, loudness, reporter)
}

fn plan(args: DemoArgs, mut passed: Vec<manager::Passed>) -> Result<Plan, Failure> {
    if args.daemon {
        return Err(Failure::new(Status::Usage, "ksf does not go to the background by itself: -d is not offered")
            .remedy("let the service manager do it: systemd-run --unit=ksf-demo ksf serve demo ..., or a unit"));
    }
    if args.engine == EngineWish::Kernel {
        return Err(Failure::new(Status::Unavailable, "the demo server has no kernel half")
            .remedy("use --engine=auto, uring or epoll"));
    }
    let listen = listeners(&args.addr, passed.is_empty())?;
    let sockets = plan::sockets(&listen, DEMO_PORT, None, &mut passed)?;
    plan::all_taken(&passed)?;
    let mut flags = args.limits;
    if args.config_limits.is_none() {
        flags.header_bytes_max.get_or_insert(HEADER_BYTES_MAX);
        flags.idle_timeout_ms.get_or_insert(IDLE_TIMEOUT_MS);
    }
    Ok(Plan {
        name: "demo".to_owned(),
        what: What::Demo(Demo {
            backends: args.backend,
            keep_alive: args.keep_alive,
            body_bytes: args.body_bytes as usize,
        }),
        sockets,
        engine: args.engine,
        cpus: Some(cpus(args.start_core, args.workers)?),
        xdp: Xdp::Off,
        window_bytes: None,
        workers: 0,
        classes: Vec::new(),
        limits: LimitSource::Flags { file: args.config_limits, flags },
        resources: Resources::resolve(&[], &args.resources),
    })
}

/// HTTP is spoken on streams only.
fn listeners(wishes: &[Listen], none_passed: bool) -> Result<Vec<Listen>, Failure> {
    if wishes.is_empty() && none_passed {
        let both = [
            Listen::Tcp((Ipv4Addr::LOCALHOST, DEMO_PORT).into()),
            Listen::Tcp((Ipv6Addr::LOCALHOST, DEMO_PORT).into()),
        ];
        return Ok(both.into_iter().filter(plan::is_on_this_machine).collect());
    }
    let stream = |wish: &Listen| match wish {
        Listen::Any(address) => Ok(Listen::Tcp(*address)),
        Listen::Udp(address) => {
            Err(Failure::new(Status::Data, format!("the demo server does not answer on udp:{address}"))
                .remedy("HTTP/1 needs TCP or a Unix socket"))
        }
        wish => Ok(wish.clone()),
    };
    wishes.iter().map(stream).collect()
}

/// One CPU per worker, from the first one on.
fn cpus(start: usize, workers: Option<u64>) -> Result<Vec<usize>, Failure> {
    let Some(workers) = workers else {
        let allowed = ksf::cpus::allowed().map_err(|error| Failure::os("cannot read the CPU mask", &error))?;
        let cpus: Vec<usize> = allowed.iter().copied().filter(|cpu| *cpu >= start).collect();
        // Nothing is left: the wish as it is, for the message.
        return Ok(if cpus.is_empty() { vec![start] } else { cpus });
    };
    Ok((start..start.saturating_add(workers as usize)).collect())
}

fn open_log(path: &Path) -> Result<File, Failure> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|error| Failure::os(format!("cannot write statistics to {}", path.display()), &error))
}

/// Writes statistics every second, until the server stops.
pub(super) struct Reporter {
    /// Standard error, if there is no file.
    log: Option<File>,
    every_worker: bool,
}

impl Reporter {
    /// Goes on by itself.
    pub(super) fn start(mut self, services: Services) -> Result<(), Failure> {
        let report = move || {
            let mut before = (Instant::now(), Vec::new());
            loop {
                std::thread::sleep(Duration::from_secs(1));
                // The list is empty once the services drain.
                let Some(workers) = lock(&services).first().map(super::Running::workers) else { return };
                let now = Instant::now();
                let lines = lines(&before.1, &workers, now.duration_since(before.0), self.every_worker);
                self.write(&lines);
                before = (now, workers);
            }
        };
        let thread = std::thread::Builder::new().name("ksf-report".into()).spawn(report);
        thread.map(drop).map_err(|error| Failure::os("cannot start a thread", &error))
    }

    fn write(&mut self, lines: &str) {
        match &mut self.log {
            // A full disk must not stop the server.
            Some(file) => drop(file.write_all(lines.as_bytes())),
            None => lines.lines().for_each(|line| say(&line)),
        }
    }
}

/// What happened in `elapsed`: a line for all, and one for each worker if wanted.
fn lines(before: &[Worker], now: &[Worker], elapsed: Duration, every_worker: bool) -> String {
    let none = Worker::default();
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let rate = |count: u64| (count as f64 / seconds).round() as u64;
    let fresh: Vec<Worker> =
        now.iter().enumerate().map(|(at, worker)| since(before.get(at).unwrap_or(&none), worker)).collect();
    let sum = |of: fn(&Worker) -> u64| fresh.iter().map(of).sum::<u64>();
    let mut out = String::new();
    let accepted = sum(|worker| worker.accepted);
    let _ = writeln!(
        out,
        "requests/s {} accepted/s {} local {}",
        rate(sum(requests)),
        rate(accepted),
        share(sum(|worker| worker.local), accepted)
    );
    if !every_worker {
        return out;
    }
    for (number, worker) in fresh.iter().enumerate() {
        let _ = write!(
            out,
            "worker {number} cpu {}: requests/s {} accepted/s {} local {} looks/s {} empty/s {} events min/avg/max {}",
            worker.cpu,
            rate(requests(worker)),
            rate(worker.accepted),
            share(worker.local, worker.accepted),
            rate(worker.turns),
            rate(worker.turns_empty),
            events(worker),
        );
        for (name, count) in worker.own.iter().filter(|(name, count)| *name != REQUESTS && *count > 0) {
            let _ = write!(out, " {name} {count}");
        }
        out.push('\n');
    }
    out
}

const REQUESTS: &str = "requests";

fn requests(worker: &Worker) -> u64 {
    worker.own.iter().find(|(name, _)| *name == REQUESTS).map_or(0, |(_, count)| *count)
}

/// What a worker counted since `before`.
fn since(before: &Worker, now: &Worker) -> Worker {
    let own = now
        .own
        .iter()
        .enumerate()
        .map(|(at, (name, count))| (*name, count - before.own.get(at).map_or(0, |(_, count)| *count)));
    Worker {
        accepted: now.accepted - before.accepted,
        local: now.local - before.local,
        turns: now.turns - before.turns,
        turns_empty: now.turns_empty - before.turns_empty,
        events: now.events - before.events,
        own: own.collect(),
        ..*now
    }
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1}%", part as f64 * 100.0 / whole as f64) }
}

/// Least and most are those of the last full second in which the worker did something.
fn events(worker: &Worker) -> String {
    if worker.turns == 0 {
        return "-".to_owned();
    }
    let (least, most) = worker.events_range;
    format!("{least}/{:.1}/{most}", worker.events as f64 / worker.turns as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(accepted: u64, local: u64, requests: u64, bad: u64) -> Worker {
        Worker {
            cpu: 3,
            accepted,
            local,
            turns: accepted,
            turns_empty: 0,
            events: accepted * 2,
            events_range: (1, 9),
            own: vec![("requests", requests), ("bad_requests", bad)],
        }
    }

    #[test]
    fn statistics_are_of_the_last_interval() {
        let (before, now) = ([worker(10, 10, 20, 1), worker(0, 0, 0, 0)], [worker(30, 25, 60, 4), worker(0, 0, 0, 0)]);
        let text = lines(&before, &now, Duration::from_secs(2), true);
        assert_eq!(
            text,
            "requests/s 20 accepted/s 10 local 75.0%\n\
             worker 0 cpu 3: requests/s 20 accepted/s 10 local 75.0% looks/s 10 empty/s 0 events min/avg/max 1/2.0/9 \
             bad_requests 3\n\
             worker 1 cpu 3: requests/s 0 accepted/s 0 local - looks/s 0 empty/s 0 events min/avg/max -\n"
        );
        assert_eq!(lines(&before, &now, Duration::from_secs(2), false).lines().count(), 1);
    }

    #[test]
    fn workers_have_the_cpus_from_the_first_one_on() {
        assert_eq!(cpus(2, Some(3)).unwrap(), [2, 3, 4]);
        assert_eq!(cpus(0, None).unwrap(), ksf::cpus::allowed().unwrap());
        assert_eq!(cpus(9999, None).unwrap(), [9999]);
    }

    #[test]
    fn streams_only() {
        let wishes = ["127.0.0.1:1".parse().unwrap(), "unix:/x".parse().unwrap()];
        assert_eq!(listeners(&wishes, true).unwrap()[0], "tcp:127.0.0.1:1".parse().unwrap());
        assert_eq!(listeners(&["udp:127.0.0.1:1".parse().unwrap()], true).unwrap_err().status, Status::Data);
        assert!(listeners(&[], false).unwrap().is_empty());
    }
}
