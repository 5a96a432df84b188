//! Many keys, the memory that they take, and a start that finds them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::written_bytes;
use crate::bench::case::Metric;
use crate::bench::measure::Meter;
use crate::bench::raw::Sample;
use crate::cpu::anonymous_bytes;
use crate::process::Server;

/// A letter and a number.
pub(super) const KEY_BYTES: usize = 8;
const NUMBER_WIDTH: usize = KEY_BYTES - 1;
/// The length of a value for which the memory of a key is told.
const SMALL_BYTES: u32 = 8;

/// Written before, so that buffers have their size.
const KEYS_BEFORE: u64 = 20_000;

/// Commands, and bytes of them, that are sent before their replies are read.
const BATCH_MAX: u64 = 10_000;
const BATCH_BYTES: u64 = 1 << 20;

const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(1);

impl Meter<'_> {
    /// Memory for each key, and the time of a start that finds them.
    pub(super) fn keys(
        &self,
        server: Server,
        begin: impl FnOnce() -> Result<(Server, String)>,
        port: u16,
        (count, value_bytes): (u64, u32),
        sample: &mut Sample,
    ) -> Result<()> {
        let (count, count_before) = (self.effort.count(count), self.effort.count(KEYS_BEFORE));
        let written_before = written_bytes(server.pid());
        write_keys(port, b'w', count_before, value_bytes)?;
        let before = anonymous_bytes(server.pid())?;
        write_keys(port, b'k', count, value_bytes)?;
        let bytes = anonymous_bytes(server.pid())?.saturating_sub(before);
        // Of the store alone: the pages that another server makes dirty are more than its file has.
        let written = written_bytes(server.pid()).filter(|_| sample.contestant.is_store());
        server.stop()?;

        let began = Instant::now();
        let (server, _) = begin()?;
        let found = await_keys(port)?;
        let seconds = began.elapsed().as_secs_f64();
        let expected = count + count_before;
        ensure!(found == expected, "{found} keys were found after a start, and {expected} were acknowledged");
        if value_bytes == SMALL_BYTES {
            sample.metrics.insert(Metric::KeyBytes, bytes as f64 / count as f64);
        }
        sample.metrics.insert(Metric::RecoveredKeysPerS, found as f64 / seconds);
        if let (Some(before), Some(after)) = (written_before, written) {
            sample.metrics.insert(Metric::RecoveredBytesPerS, (after - before) as f64 / seconds);
        }
        server.stop().map(drop)
    }
}

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("cannot connect to the server")?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sets so many keys of 8 bytes, which begin with a letter, to values of so many bytes.
fn write_keys(port: u16, letter: u8, count: u64, value_bytes: u32) -> Result<()> {
    const ANSWER: &[u8] = b"+OK\r\n";
    let batch = (BATCH_BYTES / u64::from(value_bytes)).clamp(1, BATCH_MAX);
    let mut stream = connect(port)?;
    let mut next = 0;
    while next < count {
        let end = (next + batch).min(count);
        let mut commands = Vec::new();
        for number in next..end {
            set(&mut commands, char::from(letter), number, value_bytes)?;
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

fn set(commands: &mut Vec<u8>, letter: char, number: u64, value_bytes: u32) -> Result<()> {
    let width = value_bytes as usize - 1;
    write!(commands, "*3\r\n$3\r\nSET\r\n${KEY_BYTES}\r\n{letter}{number:0NUMBER_WIDTH$}\r\n")?;
    write!(commands, "${value_bytes}\r\nv{number:0width$}\r\n")?;
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

    #[test]
    fn keys_and_values_have_their_lengths() {
        let command = |number, value_bytes| {
            let mut command = Vec::new();
            set(&mut command, 'k', number, value_bytes).unwrap();
            String::from_utf8(command).unwrap()
        };
        assert_eq!(command(7, 8), "*3\r\n$3\r\nSET\r\n$8\r\nk0000007\r\n$8\r\nv0000007\r\n");
        let long = command(4_999_999, 1400);
        assert!(long.starts_with("*3\r\n$3\r\nSET\r\n$8\r\nk4999999\r\n$1400\r\nv0"), "{long}");
        assert!(long.ends_with("04999999\r\n") && long.rsplit("\r\n").nth(1).unwrap().len() == 1400, "{long}");
    }
}
