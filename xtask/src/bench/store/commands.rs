//! Loads of commands: `ksf load kv`, whose every reply is checked, and redis-benchmark, to check it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ksf_load::kv::report::{KvBody, KvReport};

use super::{FULL_PERCENT, LOG_BYTES_FULL, RECORD_BYTES, StoreMeasurement, written_bytes};
use crate::bench::case::Metric;
use crate::bench::contestant::{Contestant, pinned};
use crate::bench::measure::{Meter, insert_spent, insert_switches, without_port};
use crate::bench::raw::Sample;
use crate::process::{Server, display, output};

/// Keys that commands are about.
const KEYS_OF_LOAD: u64 = 100_000;
/// Keys of which some are read: they are written before.
const KEYS_READ: u64 = 10_000;
/// `key:` and 12 digits.
const KEY_BYTES: u64 = 16;
/// Commands to warm a server up with.
const WARM_UP_COUNT: u64 = 5_000;

/// Longer, a log with much room would have to be cleaned, too.
const OVERWRITE_SECONDS_MAX: f64 = 2.0;

/// Commands of redis-benchmark for each second wanted, about what Redis does.
const BENCHMARK_PER_S: f64 = 150_000.0;

/// Fewest commands of redis-benchmark, which counts milliseconds: with 100 it has taken none, and says "inf" for the rate.
const BENCHMARK_COUNT_MIN: u64 = 10_000;

/// Beyond the length of the load.
const SLACK: Duration = Duration::from_secs(60);

impl Meter<'_> {
    /// Reads and writes in these shares.
    pub(super) fn commands(
        &self,
        run: &StoreMeasurement<'_>,
        shares: [u32; 2],
        value_bytes: u32,
        server: Server,
        sample: &mut Sample,
    ) -> Result<()> {
        let has_reads = shares[0] > 0;
        let keys = if has_reads { KEYS_READ } else { KEYS_OF_LOAD };
        let filling = if has_reads { Filling::Journal } else { Filling::None };
        let load = Load { run, shares, value_bytes, keys, filling };
        let warm_up_count = self.effort.count(WARM_UP_COUNT).max(load.least());
        let full = self.effort.seconds_for(run.case, run.pinning.placement);
        let seconds = (self.effort.seconds > 0.0).then_some(full);
        self.load(&load, warm_up_count, seconds, server, sample).map(drop)
    }

    /// Writes of keys that fill a part of the log. Each is written once, then as many are written anew: by then a log that is full
    /// is being cleaned.
    pub(super) fn overwrite(
        &self,
        run: &StoreMeasurement<'_>,
        value_bytes: u32,
        server: Server,
        sample: &mut Sample,
    ) -> Result<()> {
        let record_bytes = RECORD_BYTES + KEY_BYTES + u64::from(value_bytes);
        let keys = self.effort.count(LOG_BYTES_FULL * FULL_PERCENT / 100 / record_bytes);
        let keys = keys.max(u64::from(run.case.connections));
        let load = Load { run, shares: [0, 1], value_bytes, keys, filling: Filling::WarmUp };
        let seconds = (self.effort.seconds > 0.0).then_some(self.effort.seconds.min(OVERWRITE_SECONDS_MAX));
        let written = self.load(&load, keys, seconds, server, sample)?;
        let (Some(written), true) = (written, seconds.is_some()) else { return Ok(()) };
        check_cleaning(run.contestant, written, run.log_bytes)
    }

    /// Warms a server up and loads it. Returns the bytes that it wrote to the disk meanwhile, if they are known.
    fn load(
        &self,
        load: &Load<'_>,
        warm_up_count: u64,
        seconds: Option<f64>,
        server: Server,
        sample: &mut Sample,
    ) -> Result<Option<u64>> {
        let StoreMeasurement { contestant, port, .. } = *load.run;
        let written_at_start = written_bytes(server.pid());
        let seed = u64::from(sample.round) + 1;
        let mut warm_up = load.command(&self.programs.ksf, seed, Some(warm_up_count), None, true);
        let warm_up = parse(&output(&mut warm_up, SLACK)?)?;
        let count = seconds.is_none().then_some(warm_up_count);

        if matches!(contestant, Contestant::RedisBenchmark | Contestant::StoreBenchmark) {
            let wanted = seconds.map_or(warm_up_count, |seconds| (seconds * BENCHMARK_PER_S) as u64);
            let mut command = load.benchmark(wanted.max(BENCHMARK_COUNT_MIN));
            sample.client_command = without_port(&display(&command), port);
            let text = output(&mut command, SLACK)?;
            let rate = benchmark_rate(&text).with_context(|| format!("redis-benchmark printed:\n{text}"))?;
            sample.metrics.insert(Metric::MessagesPerS, rate);
            return server.stop().map(|_| None);
        }
        let command = load.command(&self.programs.ksf, seed + 1, count, seconds, false);
        sample.client_command = without_port(&display(&command), port);
        let timeout = Duration::from_secs_f64(seconds.unwrap_or(0.0)) + SLACK;
        let before = written_bytes(server.pid());
        let (text, spent) = self.observed(&server, || self.client(command, &server, timeout))?;
        let after = written_bytes(server.pid());
        let result = parse(&text)?;
        insert(sample, &result);
        insert_spent(sample, &spent, result.replies);
        if let ([0, _], Some(before), Some(after)) = (load.shares, before, after) {
            let stored = result.replies * (KEY_BYTES + u64::from(load.value_bytes));
            sample.metrics.insert(Metric::WrittenRatio, (after - before) as f64 / stored as f64);
        }
        self.insert_events(sample, &spent, result.replies)?;
        insert_switches(sample, server.stop()?, warm_up.replies + result.replies);
        Ok(written_at_start.zip(after).map(|(start, end)| end - start))
    }
}

/// Of more than it holds, a log was cleaned; up to three quarters it was not (docs/store.md).
fn check_cleaning(contestant: Contestant, written: u64, log_bytes: u64) -> Result<()> {
    let mib = |bytes: u64| bytes >> 20;
    match contestant {
        Contestant::StoreRoomy => ensure!(
            written < log_bytes / 4 * 3,
            "{} MiB were written to a log of {}: it had no room, and was cleaned",
            mib(written),
            mib(log_bytes)
        ),
        _ => ensure!(
            written > log_bytes,
            "{} MiB were written to a log of {}: it need not have been cleaned",
            mib(written),
            mib(log_bytes)
        ),
    }
    Ok(())
}

/// What is there before the measured run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filling {
    /// Nothing that matters.
    None,
    /// All keys, which the warm-up writes.
    WarmUp,
    /// The same; a journal says what they must be, and the measured run begins with its first command.
    Journal,
}

/// One load of commands.
struct Load<'a> {
    run: &'a StoreMeasurement<'a>,
    /// So many reads to so many writes.
    shares: [u32; 2],
    value_bytes: u32,
    keys: u64,
    filling: Filling,
}

impl Load<'_> {
    /// One command on each connection.
    fn least(&self) -> u64 {
        u64::from(self.run.case.connections)
    }

    /// The command line of `ksf load kv`. The warm-up writes only.
    fn command(&self, ksf: &Path, seed: u64, count: Option<u64>, seconds: Option<f64>, is_warm_up: bool) -> Command {
        let StoreMeasurement { case, pinning, port, folder, .. } = *self.run;
        let mut command = Command::new(ksf);
        command.args(["load", "kv", &format!("127.0.0.1:{port}")]);
        command.args(["-c", &case.connections.to_string(), "-P", &case.in_flight.to_string()]);
        command.args(["--sizes", &self.value_bytes.to_string(), "--seed", &seed.to_string()]);
        let [gets, sets] = if is_warm_up { [0, 1] } else { self.shares };
        command.args(["--mix", &format!("{gets}:{sets}"), "--keys", &self.keys.to_string()]);
        if self.filling == Filling::Journal {
            command.arg("--journal").arg(folder.join("journal"));
        } else if self.filling == Filling::None || !is_warm_up {
            command.arg("--no-fill");
        }
        if let Some(count) = count {
            command.args(["-n", &count.to_string()]);
        }
        if let Some(seconds) = seconds {
            command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]);
        }
        match pinning.client(1) {
            Some(cpus) => command.args(["--cpu", &cpus]),
            None => command.arg("--no-pin"),
        };
        command.arg("--json");
        command
    }

    /// The same load by redis-benchmark.
    fn benchmark(&self, count: u64) -> Command {
        let StoreMeasurement { case, pinning, port, .. } = *self.run;
        let mut command = pinned("redis-benchmark", pinning.client(1).as_deref());
        command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-t", "set", "--csv"]);
        command.args(["-c", &case.connections.to_string(), "-P", &case.in_flight.to_string()]);
        command.args(["-d", &self.value_bytes.to_string(), "-r", &self.keys.to_string(), "-n", &count.to_string()]);
        command
    }
}

/// "SET","93896.71","0.499",...: name, commands per second, and latencies.
fn benchmark_rate(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("\"SET\",\""))?;
    line.split('"').next()?.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite())
}

/// What the client found, with every reply checked.
#[derive(Debug, PartialEq)]
struct StoreResult {
    replies: u64,
    rate_per_s: f64,
    /// p50, p99, p99.9 and the longest.
    latency_us: [f64; 4],
    client_cpu_us: f64,
    warnings: Vec<String>,
}

fn parse(text: &str) -> Result<StoreResult> {
    read(text).with_context(|| format!("ksf load kv printed:\n{text}"))
}

fn read(text: &str) -> Result<StoreResult> {
    let KvReport { body: KvBody { run, .. }, warnings, ok, .. } = serde_json::from_str(text)?;
    ensure!(ok, "replies were lost or wrong");
    ensure!(run.replies > 0, "no command was answered");
    ensure!(run.misses + run.unchecked == 0, "reads found nothing, or nothing that can be checked");
    let latency = run.latency;
    Ok(StoreResult {
        replies: run.replies,
        rate_per_s: run.rate_per_s,
        latency_us: [latency.at(50.0), latency.at(99.0), latency.at(99.9), latency.max_us],
        client_cpu_us: run.cpu_us_per_reply,
        warnings: warnings.into_iter().map(|warning| warning.code).collect(),
    })
}

fn insert(sample: &mut Sample, result: &StoreResult) {
    sample.warnings.clone_from(&result.warnings);
    let [p50, p99, p999, max] = result.latency_us;
    sample.metrics.extend([
        (Metric::MessagesPerS, result.rate_per_s),
        (Metric::RttP50Us, p50),
        (Metric::RttP99Us, p99),
        (Metric::RttP999Us, p999),
        (Metric::RttMaxUs, max),
        (Metric::ClientCpuUs, result.client_cpu_us),
    ]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::case::{CASES, Placement};
    use crate::bench::contestant::Pinning;

    #[test]
    fn the_rate_of_redis_benchmark_is_read() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"93896.71\",\"0.499\"\n";
        assert_eq!(benchmark_rate(text), Some(93896.71));
        assert_eq!(benchmark_rate("\"GET\",\"1.0\"\n"), None);
        assert_eq!(benchmark_rate("\"SET\",\"inf\",\"0.0\"\n"), None, "it took no millisecond");
    }

    /// What is read was written by the warm-up, and what is written anew, too; the measured run fills nothing.
    #[test]
    fn only_the_warm_up_fills() {
        let case = CASES.iter().find(|case| case.name == "store-set-1").unwrap();
        let pinning = Pinning::free(Placement::Unpinned);
        let folder = Path::new("/tmp/x");
        let run =
            StoreMeasurement { case, contestant: Contestant::Store, pinning: &pinning, port: 7, folder, log_bytes: 0 };
        let shown = |shares, filling, is_warm_up| {
            let load = Load { run: &run, shares, value_bytes: 64, keys: 9, filling };
            let text = display(&load.command(Path::new("ksf"), 3, None, Some(0.5), is_warm_up));
            let (_, text) = text.split_once("--seed 3 ").unwrap();
            text.split_once(" --duration").unwrap().0.to_owned()
        };
        for (shares, filling, warm_up, measured) in [
            ([0, 1], Filling::None, "--mix 0:1 --keys 9 --no-fill", "--mix 0:1 --keys 9 --no-fill"),
            ([0, 1], Filling::WarmUp, "--mix 0:1 --keys 9", "--mix 0:1 --keys 9 --no-fill"),
            (
                [90, 10],
                Filling::Journal,
                "--mix 0:1 --keys 9 --journal journal",
                "--mix 90:10 --keys 9 --journal journal",
            ),
        ] {
            assert_eq!(shown(shares, filling, true), warm_up);
            assert_eq!(shown(shares, filling, false), measured);
        }
    }

    #[test]
    fn a_log_is_cleaned_where_that_is_measured_and_nowhere_else() {
        let is_right = |contestant, written| check_cleaning(contestant, written, 100 << 20).is_ok();
        assert!(is_right(Contestant::Store, 101 << 20) && !is_right(Contestant::Store, 99 << 20));
        assert!(is_right(Contestant::StoreRoomy, 74 << 20) && !is_right(Contestant::StoreRoomy, 76 << 20));
    }
}
