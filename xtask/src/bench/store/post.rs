//! Requests of HTTP as those of PASTE's phttpd, by wrk: POST, and the first 8 bytes of the body are the key.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::ops::RangeInclusive;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{StoreMeasurement, written_bytes};
use crate::bench::case::Metric;
use crate::bench::contestant::pinned;
use crate::bench::measure::{Meter, insert_spent, insert_switches, without_port};
use crate::bench::raw::Sample;
use crate::process::{Server, display};

/// Requests to warm a server up with, one after the other.
const WARM_UP_COUNT: u64 = 2_000;
/// Beyond the length of the load.
const SLACK: Duration = Duration::from_secs(60);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

const KEY_BYTES: usize = 8;
/// Bytes of the head of wrk's requests to a port of five digits.
const HEAD_BYTES: usize = 64;

/// Mean bytes of an answer: PASTE's have 64, those of the store an `ETag` more, and the first of each key says its length.
const ANSWER_BYTES: RangeInclusive<f64> = 60.0..=110.0;

impl Meter<'_> {
    /// Requests of so many bytes, each of which is answered before the next one on its connection.
    pub(super) fn post(
        &self,
        run: &StoreMeasurement<'_>,
        request_bytes: u32,
        server: Server,
        sample: &mut Sample,
    ) -> Result<()> {
        let warm_up_count = self.effort.count(WARM_UP_COUNT);
        let value_bytes = request_bytes as usize - HEAD_BYTES - KEY_BYTES;
        warm_up(run.port, warm_up_count, value_bytes, run.contestant.is_store())?;

        let command = wrk(run, request_bytes, self.effort.seconds);
        sample.client_command = without_port(&display(&command), run.port);
        let timeout = Duration::from_secs_f64(self.effort.seconds) + SLACK;
        let before = written_bytes(server.pid());
        let (text, spent) = self.observed(&server, || self.client(command, &server, timeout))?;
        let after = written_bytes(server.pid());
        let result = parse(&text)?;
        insert(sample, &result);
        // All that has ended meanwhile is wrk.
        let client_us = spent.clients.as_secs_f64() * 1e6 / result.requests as f64;
        sample.metrics.insert(Metric::ClientCpuUs, client_us);
        insert_spent(sample, &spent, result.requests);
        if let (Some(before), Some(after)) = (before, after) {
            let stored = result.requests * (KEY_BYTES + value_bytes) as u64;
            sample.metrics.insert(Metric::WrittenRatio, (after - before) as f64 / stored as f64);
        }
        self.insert_events(sample, &spent, result.requests)?;
        insert_switches(sample, server.stop()?, warm_up_count + result.requests);
        Ok(())
    }
}

/// wrk on one thread, for whole seconds.
fn wrk(run: &StoreMeasurement<'_>, request_bytes: u32, seconds: f64) -> Command {
    let mut command = pinned("wrk", run.pinning.client(1).as_deref());
    command.args(["-t", "1", "-c", &run.case.connections.to_string()]);
    command.args(["-d", &format!("{}s", (seconds.ceil() as u64).max(1)), "-s"]);
    command.arg(crate::root().join("bench/peers/post.lua"));
    command.args([format!("http://127.0.0.1:{}/", run.port), request_bytes.to_string()]);
    command
}

/// What bench/peers/post.lua prints at the end.
#[derive(Debug, Deserialize, PartialEq)]
struct PostResult {
    requests: u64,
    failed: u64,
    received_bytes: u64,
    duration_us: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

fn parse(text: &str) -> Result<PostResult> {
    read(text).with_context(|| format!("wrk printed:\n{text}"))
}

fn read(text: &str) -> Result<PostResult> {
    let line = text.lines().find(|line| line.starts_with('{')).context("no line of JSON")?;
    let result: PostResult = serde_json::from_str(line)?;
    ensure!(result.failed == 0, "{} requests failed", result.failed);
    ensure!(result.requests > 0, "no request was answered");
    let answer_bytes = result.received_bytes as f64 / result.requests as f64;
    ensure!(ANSWER_BYTES.contains(&answer_bytes), "answers have {answer_bytes:.1} bytes");
    Ok(result)
}

fn insert(sample: &mut Sample, result: &PostResult) {
    sample.metrics.extend([
        (Metric::MessagesPerS, result.requests as f64 / (result.duration_us / 1e6)),
        (Metric::RttP50Us, result.p50_us),
        (Metric::RttP99Us, result.p99_us),
        (Metric::RttP999Us, result.p999_us),
        (Metric::RttMaxUs, result.max_us),
    ]);
}

/// Writes so many keys one after the other, and where the server keeps them, reads the last one.
fn warm_up(port: u16, count: u64, value_bytes: usize, keeps: bool) -> Result<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("cannot connect to the server")?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let length = KEY_BYTES + value_bytes;
    for number in 0..count {
        let value = "v".repeat(value_bytes);
        let request =
            format!("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\nw{number:07}{value}");
        let (status, _) = exchange(&mut stream, &request)?;
        ensure!(matches!(status, 201 | 204), "a request was answered with {status}");
    }
    if keeps {
        let request = format!("GET /w{:07} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", count - 1);
        let (status, body) = exchange(&mut stream, &request)?;
        let is_right = body.len() == value_bytes && body.iter().all(|byte| *byte == b'v');
        ensure!(status == 200 && is_right, "a key has {} bytes ({status}), not what was written", body.len());
    }
    Ok(())
}

/// The status and the body of an answer.
fn exchange(stream: &mut TcpStream, request: &str) -> Result<(u16, Vec<u8>)> {
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut more = |answer: &mut Vec<u8>| -> Result<()> {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).context("the server does not answer")?;
        ensure!(count > 0, "the server has closed the connection");
        answer.extend_from_slice(&buffer[..count]);
        Ok(())
    };
    let body_at = loop {
        if let Some(at) = answer.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        more(&mut answer)?;
    };
    let head = String::from_utf8_lossy(&answer[..body_at]).into_owned();
    let status = head.split(' ').nth(1).and_then(|word| word.parse::<u16>().ok());
    let status = status.with_context(|| format!("no status in an answer:\n{head}"))?;
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).map(str::parse::<usize>);
    let end = body_at + length.transpose().context("no length in an answer")?.unwrap_or(0);
    while answer.len() < end {
        more(&mut answer)?;
    }
    ensure!(answer.len() == end, "surplus bytes");
    Ok((status, answer.split_off(body_at)))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use ksf_test::{program_or_skip, wait_until};

    use super::*;
    use crate::bench::case::{CASES, Placement};
    use crate::bench::contestant::{Contestant, Pinning};
    use crate::process::Running;

    const TEXT: &str = "Running 1s test @ http://127.0.0.1:80/\n  1 threads and 100 connections\n\
                        Requests/sec:  61234.56\nTransfer/sec:      4.00MB\n\
                        {\"requests\":1000,\"failed\":0,\"received_bytes\":64000,\"duration_us\":500000,\
                        \"p50_us\":10,\"p99_us\":20,\"p999_us\":30,\"max_us\":40}\n";

    #[test]
    fn what_wrk_found_is_read() {
        let result = read(TEXT).unwrap();
        assert_eq!((result.requests, result.p99_us, result.duration_us), (1000, 20.0, 500_000.0));
        let case = CASES.iter().find(|case| case.name == "store-post-1").unwrap();
        let mut sample = Sample::new(case, Contestant::HttpNone, Placement::Other, 0);
        insert(&mut sample, &result);
        assert_eq!(sample.metrics[&Metric::MessagesPerS], 2000.0);
    }

    #[test]
    fn requests_that_failed_and_answers_of_another_length_are_no_result() {
        for (from, to) in [
            ("\"failed\":0", "\"failed\":1"),
            ("\"requests\":1000", "\"requests\":0"),
            ("\"received_bytes\":64000", "\"received_bytes\":640000"),
            ("{\"requests\"", "[\"requests\""),
        ] {
            assert!(read(&TEXT.replace(from, to)).is_err(), "{to}");
        }
    }

    /// They have the length that is asked for, whatever the port, and keys in turn.
    #[test]
    fn wrk_sends_what_the_row_says() {
        if program_or_skip("wrk").is_none() {
            return;
        }
        const REQUEST_BYTES: usize = 1400;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let case = CASES.iter().find(|case| case.name == "store-post-1").unwrap();
        let pinning = Pinning::free(Placement::Unpinned);
        let folder = std::path::Path::new("unused");
        let run =
            StoreMeasurement { case, contestant: Contestant::Store, pinning: &pinning, port, folder, log_bytes: 0 };
        let wrk = Running::start(&mut wrk(&run, REQUEST_BYTES as u32, 60.0)).unwrap();
        let accept = || {
            let mut accepted = None;
            wait_until("wrk connects", || {
                accepted = listener.accept().ok();
                accepted.is_some()
            });
            accepted.unwrap().0
        };
        let serve = |mut stream: TcpStream| {
            stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
            let mut keys = Vec::new();
            for _ in 0..3 {
                let mut request = vec![0; REQUEST_BYTES];
                stream.read_exact(&mut request).ok()?;
                // What is too long shows in the next one.
                let text = String::from_utf8(request).unwrap();
                let (head, body) = text.split_once("\r\n\r\n").unwrap();
                assert!(head.starts_with("POST / HTTP/1.1\r\n"), "{head}");
                assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
                keys.push(body[..KEY_BYTES].to_owned());
                stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
            }
            Some(keys)
        };
        // wrk first tries the address with a connection that has no requests.
        let keys = serve(accept()).or_else(|| serve(accept())).unwrap();
        drop(wrk);
        assert!(keys[0] != keys[1] && keys[1] != keys[2], "{keys:?}");
    }
}
