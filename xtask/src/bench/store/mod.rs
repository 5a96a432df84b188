//! Key-value servers: `ksf store` and Redis, their loads, and what is measured of them.
//!
//! ```text
//!   a folder of its own on the disk ── server ◄── ksf load kv, redis-benchmark (commands)
//!                                        ▲
//!                                        └────── a million keys from here, and a second start (keys)
//! ```

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::case::{Case, Metric};
use super::contestant::{Contestant, Pinning, Programs, pinned, start};
use super::measure::{Meter, insert_spent, insert_switches, without_port};
use super::raw::Sample;
use crate::cpu::anonymous_bytes;
use crate::process::{Ready, Server, display, output};

mod medium;

pub(super) use self::medium::medium;

/// A load for a key-value server. Clients are [`Case::connections`], commands in flight on each [`Case::in_flight`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreLoad {
    /// Each command writes a key.
    Set { value_bytes: u32 },
    /// Each command reads a key that is there.
    Get { value_bytes: u32 },
    /// [`KEYS`] are written; then the server is started anew.
    Keys,
}

/// Bytes of each log of `ksf store`: what a measurement writes fits, and making it takes a part of a second.
const LOG_BYTES: u64 = 256 << 20;
/// The least that a store takes.
const LOG_BYTES_MIN: u64 = 128 << 20;

/// Keys that commands are about.
const KEYS_OF_LOAD: u64 = 100_000;
/// Keys that are read: they are written before.
const KEYS_READ: u64 = 10_000;
/// `key:` and 12 digits.
const KEY_BYTES_OF_LOAD: u64 = 16;
/// Commands to warm a server up with.
const WARM_UP_COUNT: u64 = 5_000;

/// Keys whose memory and recovery are measured.
const KEYS: u64 = 1_000_000;
/// Written before, so that buffers have their size.
const KEYS_BEFORE: u64 = 20_000;
/// Commands that are sent before their replies are read.
const BATCH: u64 = 10_000;
/// A key, and a value, in [`StoreLoad::Keys`].
const WORD_BYTES: usize = 8;

/// Commands of redis-benchmark for each second wanted, about what Redis does.
const BENCHMARK_PER_S: f64 = 150_000.0;

/// Beyond the length of the load.
const SLACK: Duration = Duration::from_secs(60);
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(1);

impl Meter<'_> {
    /// One round of one contestant with a load of a key-value server.
    pub(super) fn store(
        &self,
        case: &Case,
        load: StoreLoad,
        contestant: Contestant,
        pinning: &Pinning,
        sample: &mut Sample,
    ) -> Result<()> {
        // Removed after the server has ended: what is made later is dropped first.
        let folder = tempfile::Builder::new().prefix("store-").tempdir_in(self.programs.scratch())?;
        let data = folder.path().join("data");
        std::fs::create_dir(&data).context("cannot make a folder for data")?;
        let port = crate::process::free_port()?;
        let begin = || {
            let (command, ready) = self.server_of(contestant, pinning, &data, port)?;
            start(contestant, (self.watch.server(command), ready))
        };
        let shown = |command: &str| without_port(command, port);
        let (server, command) = begin()?;
        sample.server_command = shown(&command);
        let value_bytes = match load {
            StoreLoad::Keys => return self.keys(server, begin, port, sample),
            StoreLoad::Set { value_bytes } | StoreLoad::Get { value_bytes } => value_bytes,
        };
        let mut client = Client { case, load, value_bytes, pinning, port, folder: folder.path(), round: sample.round };
        let warm_up_count = self.effort.count(WARM_UP_COUNT).max(client.least());
        let warm_up = parse(&output(&mut client.command(&self.programs.ksf, Some(warm_up_count), None, true), SLACK)?)?;
        let seconds = (self.effort.seconds > 0.0).then_some(self.effort.seconds);
        let count = seconds.is_none().then_some(warm_up_count);
        client.round += 1;

        if contestant == Contestant::RedisBenchmark {
            let wanted = seconds.map(|seconds| (seconds * BENCHMARK_PER_S) as u64);
            let mut command = client.benchmark(wanted.or(count).unwrap_or(warm_up_count));
            sample.client_command = shown(&display(&command));
            let text = output(&mut command, SLACK)?;
            let rate = benchmark_rate(&text).with_context(|| format!("redis-benchmark printed:\n{text}"))?;
            sample.metrics.insert(Metric::MessagesPerS, rate);
            return server.stop().map(drop);
        }
        let command = client.command(&self.programs.ksf, count, seconds, false);
        sample.client_command = shown(&display(&command));
        let timeout = Duration::from_secs_f64(seconds.unwrap_or(0.0)) + SLACK;
        let written_before = written_bytes(server.pid());
        let (text, spent) = self.observed(&server, || self.client(command, &server, timeout))?;
        let written = written_bytes(server.pid());
        let result = parse(&text)?;
        insert(sample, &result);
        insert_spent(sample, &spent, result.replies);
        if let (StoreLoad::Set { .. }, Some(before), Some(after)) = (load, written_before, written) {
            let stored = result.replies * (KEY_BYTES_OF_LOAD + u64::from(value_bytes));
            sample.metrics.insert(Metric::WrittenRatio, (after - before) as f64 / stored as f64);
        }
        self.insert_events(sample, &spent, result.replies)?;
        insert_switches(sample, server.stop()?, warm_up.replies + result.replies);
        Ok(())
    }

    /// Memory for each key, and the time of a start that finds them.
    fn keys(
        &self,
        server: Server,
        begin: impl FnOnce() -> Result<(Server, String)>,
        port: u16,
        sample: &mut Sample,
    ) -> Result<()> {
        let count = self.effort.count(KEYS);
        write_keys(port, b'w', self.effort.count(KEYS_BEFORE))?;
        let before = anonymous_bytes(server.pid())?;
        write_keys(port, b'k', count)?;
        let bytes = anonymous_bytes(server.pid())?.saturating_sub(before);
        server.stop()?;

        let began = Instant::now();
        let (server, _) = begin()?;
        let found = await_keys(port)?;
        let seconds = began.elapsed().as_secs_f64();
        let expected = count + self.effort.count(KEYS_BEFORE);
        ensure!(found == expected, "{found} keys were found after a start, and {expected} were acknowledged");
        sample.metrics.insert(Metric::KeyBytes, bytes as f64 / count as f64);
        sample.metrics.insert(Metric::RecoveredKeysPerS, found as f64 / seconds);
        server.stop().map(drop)
    }

    fn server_of(&self, contestant: Contestant, pinning: &Pinning, data: &Path, port: u16) -> Result<(Command, Ready)> {
        let log_bytes = if self.effort.seconds > 0.0 { LOG_BYTES } else { LOG_BYTES_MIN };
        server_command(self.programs, contestant, pinning.server(1).as_deref(), data, log_bytes, port)
    }
}

fn server_command(
    programs: &Programs,
    contestant: Contestant,
    cpus: Option<&str>,
    data: &Path,
    log_bytes: u64,
    port: u16,
) -> Result<(Command, Ready)> {
    let fsync = match contestant {
        Contestant::Store | Contestant::StoreEpoll => {
            let mut command = Command::new(&programs.ksf);
            command.arg("store").arg("--data").arg(data).args(["--log-bytes", &log_bytes.to_string()]);
            command.args(["--listen", &format!("127.0.0.1:{port}")]);
            if contestant == Contestant::StoreEpoll {
                command.args(["--engine", "epoll"]);
            }
            if let Some(cpus) = cpus {
                command.args(["--cpus", cpus]);
            }
            return Ok((command, Ready::Lines(1, "ready")));
        }
        Contestant::RedisAlways | Contestant::RedisBenchmark => Some("always"),
        Contestant::RedisEverysec => Some("everysec"),
        Contestant::Redis => None,
        _ => anyhow::bail!("{contestant} keeps no keys"),
    };
    let mut command = pinned("redis-server", cpus);
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"]).arg(data);
    match fsync {
        Some(when) => command.args(["--appendonly", "yes", "--appendfsync", when]),
        None => command.args(["--appendonly", "no"]),
    };
    Ok((command, Ready::Port(port)))
}

/// One load of commands.
struct Client<'a> {
    case: &'a Case,
    load: StoreLoad,
    value_bytes: u32,
    pinning: &'a Pinning,
    port: u16,
    folder: &'a Path,
    round: u32,
}

impl Client<'_> {
    /// One command on each connection.
    fn least(&self) -> u64 {
        u64::from(self.case.connections)
    }

    /// The command line of `ksf load kv`. Keys that are read are written by the warm-up, whose journal says what they
    /// must be, so that the measured run begins with reads.
    fn command(&self, ksf: &Path, count: Option<u64>, seconds: Option<f64>, is_warm_up: bool) -> Command {
        let mut command = Command::new(ksf);
        command.args(["load", "kv", &format!("127.0.0.1:{}", self.port)]);
        command.args(["-c", &self.case.connections.to_string(), "-P", &self.case.in_flight.to_string()]);
        command.args(["--sizes", &self.value_bytes.to_string(), "--seed", &(self.round + 1).to_string()]);
        match self.load {
            StoreLoad::Get { .. } => {
                command.args(["--mix", if is_warm_up { "0:1" } else { "1:0" }, "--keys", &KEYS_READ.to_string()]);
                command.arg("--journal").arg(self.folder.join("journal"));
            }
            StoreLoad::Set { .. } | StoreLoad::Keys => {
                command.args(["--mix", "0:1", "--no-fill", "--keys", &KEYS_OF_LOAD.to_string()]);
            }
        }
        if let Some(count) = count {
            command.args(["-n", &count.to_string()]);
        }
        if let Some(seconds) = seconds {
            command.args(["--duration", &format!("{:.0}ms", seconds * 1e3)]);
        }
        match self.pinning.client(1) {
            Some(cpus) => command.args(["--cpu", &cpus]),
            None => command.arg("--no-pin"),
        };
        command.arg("--json");
        command
    }

    /// The same load by redis-benchmark.
    fn benchmark(&self, count: u64) -> Command {
        let mut command = pinned("redis-benchmark", self.pinning.client(1).as_deref());
        command.args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-t", "set", "--csv"]);
        command.args(["-c", &self.case.connections.to_string(), "-P", &self.case.in_flight.to_string()]);
        command.args(["-d", &self.value_bytes.to_string(), "-r", &KEYS_OF_LOAD.to_string(), "-n", &count.to_string()]);
        command
    }
}

/// "SET","93896.71","0.499",...: name, commands per second, and latencies.
fn benchmark_rate(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("\"SET\",\""))?;
    line.split('"').next()?.parse().ok().filter(|rate| *rate > 0.0)
}

/// What is read of the JSON of `ksf load kv` (docs/formats/kv.md).
#[derive(Deserialize)]
struct Document {
    run: Run,
    warnings: Vec<Warning>,
    ok: bool,
}

#[derive(Deserialize)]
struct Run {
    replies: u64,
    rate_per_s: f64,
    latency: Latency,
    misses: u64,
    unchecked: u64,
    cpu_us_per_reply: f64,
}

#[derive(Deserialize)]
struct Latency {
    max_us: f64,
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
    let Document { run, warnings, ok } = serde_json::from_str(text)?;
    ensure!(ok, "replies were lost or wrong");
    ensure!(run.replies > 0, "no command was answered");
    ensure!(run.misses + run.unchecked == 0, "reads found nothing, or nothing that can be checked");
    let at = |percent| {
        let found = run.latency.quantiles.iter().find(|quantile| quantile.percent == percent);
        found.map(|quantile| quantile.us).with_context(|| format!("no quantile {percent}"))
    };
    Ok(StoreResult {
        replies: run.replies,
        rate_per_s: run.rate_per_s,
        latency_us: [at(50.0)?, at(99.0)?, at(99.9)?, run.latency.max_us],
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

/// Bytes that a process, with all of its threads, made the kernel write to disks. None where the kernel does not count.
fn written_bytes(pid: u32) -> Option<u64> {
    bytes_in(&std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?)
}

/// "write_bytes: 4096", beside what never reached a disk.
fn bytes_in(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.parse().ok()
}

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("cannot connect to the server")?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sets so many keys of 8 bytes, which begin with a letter, to values of 8 bytes.
fn write_keys(port: u16, letter: u8, count: u64) -> Result<()> {
    const ANSWER: &[u8] = b"+OK\r\n";
    let mut stream = connect(port)?;
    let mut next = 0;
    while next < count {
        let end = (next + BATCH).min(count);
        let mut commands = Vec::new();
        for number in next..end {
            let letter = char::from(letter);
            let width = WORD_BYTES - 1;
            write!(commands, "*3\r\n$3\r\nSET\r\n$8\r\n{letter}{number:0width$}\r\n$8\r\nv{number:0width$}\r\n")?;
        }
        stream.write_all(&commands)?;
        let mut answers = vec![0; (end - next) as usize * ANSWER.len()];
        stream.read_exact(&mut answers).context("the replies to SET did not come")?;
        let is_right = answers.chunks(ANSWER.len()).all(|answer| answer == ANSWER);
        ensure!(is_right, "a reply to SET is wrong: {:?}", String::from_utf8_lossy(&answers[..answers.len().min(100)]));
        next = end;
    }
    Ok(())
}

/// The number of keys, as soon as the server says it; Redis answers `-LOADING` before.
fn await_keys(port: u16) -> Result<u64> {
    let mut stream = connect(port)?;
    loop {
        stream.write_all(b"*1\r\n$6\r\nDBSIZE\r\n")?;
        let line = read_line(&mut stream)?;
        if let Some(number) = line.strip_prefix(':') {
            return number.parse().with_context(|| format!("DBSIZE was answered by {line}"));
        }
        ensure!(line.starts_with("-LOADING"), "DBSIZE was answered by {line}");
        std::thread::sleep(RETRY);
    }
}

fn read_line(stream: &mut TcpStream) -> Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).context("the server does not answer")?;
        line.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"ok":true,"warnings":[{"code":"generator-busy","text":"t"}],"run":{"replies":90,
        "rate_per_s":45.5,"misses":0,"unchecked":0,"cpu_us_per_reply":4.5,"latency":{"max_us":9.5,"quantiles":[
            {"percent":50.0,"us":1.0},{"percent":99.0,"us":8.0},{"percent":99.9,"us":9.0}]}}}"#;

    #[test]
    fn a_result_is_read() {
        let expected = StoreResult {
            replies: 90,
            rate_per_s: 45.5,
            latency_us: [1.0, 8.0, 9.0, 9.5],
            client_cpu_us: 4.5,
            warnings: vec!["generator-busy".into()],
        };
        assert_eq!(read(TEXT).unwrap(), expected);
    }

    #[test]
    fn what_was_not_checked_is_never_a_result() {
        for (from, to) in [
            ("\"ok\":true", "\"ok\":false"),
            ("\"replies\":90", "\"replies\":0"),
            ("\"misses\":0", "\"misses\":1"),
            ("\"unchecked\":0", "\"unchecked\":1"),
            ("\"percent\":99.9", "\"percent\":99.5"),
        ] {
            assert!(read(&TEXT.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn the_rate_of_redis_benchmark_is_read() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"93896.71\",\"0.499\"\n";
        assert_eq!(benchmark_rate(text), Some(93896.71));
        assert_eq!(benchmark_rate("\"GET\",\"1.0\"\n"), None);
    }

    #[test]
    fn written_bytes_are_those_of_disks() {
        let io = "wchar: 700\nread_bytes: 1\nwrite_bytes: 8192\ncancelled_write_bytes: 5\n";
        assert_eq!(bytes_in(io), Some(8192));
        assert_eq!(bytes_in("wchar: 700\n"), None);
    }
}
