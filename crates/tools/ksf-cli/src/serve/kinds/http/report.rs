//! Statistics of each shard, every second.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, Instant};

use crate::output::{Failure, say};
use crate::serve::kind::ShardReader;
use crate::serve::running::ShardCounts;

/// Writes statistics every second, until the server stops.
pub(super) struct Report {
    /// Standard error, if there is no file.
    pub(super) log: Option<File>,
    pub(super) every_shard: bool,
}

impl Report {
    /// Goes on by itself.
    pub(super) fn start(mut self, read: ShardReader) -> Result<(), Failure> {
        let report = move || {
            let mut before = (Instant::now(), Vec::new());
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let Some(shards) = read() else { return };
                let now = Instant::now();
                let lines = lines(&before.1, &shards, now.duration_since(before.0), self.every_shard);
                self.write(&lines);
                before = (now, shards);
            }
        };
        let thread = ksf::threads::start("ksf-report", report);
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
fn lines(before: &[ShardCounts], now: &[ShardCounts], elapsed: Duration, every_shard: bool) -> String {
    let none = ShardCounts::default();
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let rate = |count: u64| (count as f64 / seconds).round() as u64;
    let fresh: Vec<ShardCounts> =
        now.iter().enumerate().map(|(at, worker)| since(before.get(at).unwrap_or(&none), worker)).collect();
    let sum = |of: fn(&ShardCounts) -> u64| fresh.iter().map(of).sum::<u64>();
    let mut out = String::new();
    let accepted = sum(|worker| worker.accepted);
    let _ = writeln!(
        out,
        "requests/s {} accepted/s {} local {}",
        rate(sum(requests)),
        rate(accepted),
        share(sum(|worker| worker.local), accepted)
    );
    if !every_shard {
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

fn requests(worker: &ShardCounts) -> u64 {
    worker.own.iter().find(|(name, _)| *name == REQUESTS).map_or(0, |(_, count)| *count)
}

/// What a worker counted since `before`.
fn since(before: &ShardCounts, now: &ShardCounts) -> ShardCounts {
    let own = now
        .own
        .iter()
        .enumerate()
        .map(|(at, (name, count))| (*name, count - before.own.get(at).map_or(0, |(_, count)| *count)));
    ShardCounts {
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
fn events(worker: &ShardCounts) -> String {
    if worker.turns == 0 {
        return "-".to_owned();
    }
    let (least, most) = worker.events_range;
    format!("{least}/{:.1}/{most}", worker.events as f64 / worker.turns as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(accepted: u64, local: u64, requests: u64, bad: u64) -> ShardCounts {
        ShardCounts {
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
}
