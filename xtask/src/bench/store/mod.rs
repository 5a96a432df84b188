//! Key-value servers: `ksf store` and its peers, their loads, and what is measured of them.
//!
//! ```text
//!   home.rs     a folder for each server, on the disk or in memory
//!   servers.rs  ksf store, Redis, bench/peers/http_log.c
//!      ▲
//!      ├── commands.rs  ksf load kv, redis-benchmark: reads and writes, also of a log that is being cleaned
//!      ├── keys.rs      many keys from here, and a second start
//!      └── post.rs      wrk, with requests of HTTP as those of PASTE's phttpd
//! ```

use std::path::Path;

use anyhow::{Context, Result};

use super::case::Case;
use super::contestant::{Contestant, Pinning, start};
use super::measure::{Effort, Meter, without_port};
use super::raw::Sample;
use crate::process::free_port;

mod commands;
mod home;
mod keys;
mod medium;
mod post;
mod servers;

use self::home::Home;
pub(crate) use self::medium::medium;
use self::servers::Wanted;

/// A load for a key-value server. Clients are [`Case::connections`], commands in flight on each [`Case::in_flight`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreLoad {
    /// So many reads of keys that are there to so many writes.
    Commands { gets: u32, sets: u32, value_bytes: u32 },
    /// Each command writes a key anew. The keys fill [`FULL_PERCENT`] of [`LOG_BYTES_FULL`].
    Overwrite { value_bytes: u32 },
    /// So many keys of 8 bytes are written; then the server is started anew.
    Keys { count: u64, value_bytes: u32 },
    /// Requests of HTTP of so many bytes, head included, of which each writes a key.
    Post { request_bytes: u32 },
}

/// Bytes of each log of `ksf store`: what a measurement of a second writes fits without cleaning, and making it takes a
/// part of a second.
const LOG_BYTES: u64 = 256 << 20;
/// The same for HTTP: wrk loads for whole seconds.
const LOG_BYTES_POST: u64 = 512 << 20;
/// The least that a store takes, and what a log's length is a multiple of here.
const LOG_BYTES_MIN: u64 = 128 << 20;

/// Bytes of a log that is so full that it is cleaned.
const LOG_BYTES_FULL: u64 = LOG_BYTES_MIN;
/// The part of it that counts, in hundredths.
const FULL_PERCENT: u64 = 70;
/// Bytes of a log that has room for all that is written to the one that is full.
const LOG_BYTES_ROOMY: u64 = 1 << 30;

/// Bytes of a record beside key and value (docs/formats/store.md).
const RECORD_BYTES: u64 = 32;

/// A server that is to be loaded, and what it is loaded with.
struct StoreMeasurement<'a> {
    case: &'a Case,
    contestant: Contestant,
    pinning: &'a Pinning,
    port: u16,
    /// Where the client may keep something.
    folder: &'a Path,
    log_bytes: u64,
}

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
        let log_bytes = log_bytes(load, contestant, self.effort);
        let cpus = pinning.server(1);
        // A store has a log for each of its CPUs.
        let logs = match &cpus {
            Some(list) => list.split(',').count(),
            None => ksf::cpus::allowed().context("cannot tell which CPUs are ours")?.len(),
        };
        let memory_bytes = contestant.is_in_memory().then_some(log_bytes * logs as u64);
        // Removed after the server has ended: what is made later is dropped first.
        let home = Home::make(self.programs.scratch(), memory_bytes)?;
        let port = free_port()?;
        let (ksf, peer) = (&self.programs.ksf, self.programs.peer_path("http_log"));
        let wanted = Wanted { contestant, ksf, peer: &peer, cpus: cpus.as_deref(), data: home.data(), log_bytes, port };
        let begin = || {
            let (command, ready) = wanted.command()?;
            start(contestant, (command, ready))
        };
        let (server, command) = begin()?;
        sample.server_command = without_port(&command, port);
        let run = StoreMeasurement { case, contestant, pinning, port, folder: home.folder(), log_bytes };
        match load {
            StoreLoad::Commands { gets, sets, value_bytes } => {
                self.commands(&run, [gets, sets], value_bytes, server, sample)
            }
            StoreLoad::Overwrite { value_bytes } => self.overwrite(&run, value_bytes, server, sample),
            StoreLoad::Keys { count, value_bytes } => self.keys(server, begin, port, (count, value_bytes), sample),
            StoreLoad::Post { request_bytes } => self.post(&run, request_bytes, server, sample),
        }
    }
}

/// Bytes of each log of a store, so that it is cleaned where that is measured and nowhere else.
fn log_bytes(load: StoreLoad, contestant: Contestant, effort: Effort) -> u64 {
    if effort.seconds <= 0.0 {
        return LOG_BYTES_MIN;
    }
    match load {
        StoreLoad::Commands { .. } => LOG_BYTES,
        StoreLoad::Post { .. } => LOG_BYTES_POST,
        StoreLoad::Overwrite { .. } if contestant == Contestant::StoreRoomy => LOG_BYTES_ROOMY,
        StoreLoad::Overwrite { .. } => LOG_BYTES_FULL,
        // Twice what the records have.
        StoreLoad::Keys { count, value_bytes } => {
            let record_bytes = RECORD_BYTES + keys::KEY_BYTES as u64 + u64::from(value_bytes);
            (2 * count * record_bytes).max(LOG_BYTES).next_multiple_of(LOG_BYTES_MIN)
        }
    }
}

/// Bytes that a process, with all of its threads, made the kernel write to disks. None where the kernel does not count.
fn written_bytes(pid: u32) -> Option<u64> {
    bytes_in(&std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?)
}

/// "write_bytes: 4096", beside what never reached a disk.
fn bytes_in(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_those_of_disks() {
        let io = "wchar: 700\nread_bytes: 1\nwrite_bytes: 8192\ncancelled_write_bytes: 5\n";
        assert_eq!(bytes_in(io), Some(8192));
        assert_eq!(bytes_in("wchar: 700\n"), None);
    }

    #[test]
    fn only_a_log_that_is_to_be_cleaned_is_short_of_room() {
        let full = Effort { seconds: 1.0, scale: 1.0, rate_divisor: 1 };
        let of = |load, contestant| log_bytes(load, contestant, full);
        let keys = |count, value_bytes| of(StoreLoad::Keys { count, value_bytes }, Contestant::Store);
        assert_eq!(keys(1_000_000, 8), LOG_BYTES);
        // Cleaning begins at three quarters: docs/store.md.
        assert!(keys(200_000, 1400) * 3 / 4 > 200_000 * 1440);
        let overwrite = StoreLoad::Overwrite { value_bytes: 1024 };
        assert_eq!(of(overwrite, Contestant::Store), LOG_BYTES_FULL);
        assert!(of(overwrite, Contestant::StoreRoomy) > 4 * LOG_BYTES_FULL);
        let smoke = Effort { seconds: 0.0, ..full };
        assert_eq!(log_bytes(overwrite, Contestant::StoreRoomy, smoke), LOG_BYTES_MIN);
    }
}
