//! A store that is larger than its memory, as its users run it: what was acknowledged is there after a `kill -9`, and the
//! process takes no more of the machine than it may.

use std::path::Path;

use super::{connect, kill};
use crate::store::client::command;
use crate::support::{Folder, Server, engines_of_effort, first_cpu};

const VALUES: usize = 1_000;
const VALUE_BYTES: usize = 100_000;
/// What the process has beside keys and values: what waits for the disk (8 MiB), buffers that are used again, slots, and what the
/// allocator keeps.
const BESIDE_BYTES: usize = 56 << 20;
const MEMORY_BYTES: usize = 8 << 20;

fn start(engine: &str, data: &Path) -> Server {
    let args = ["store", "--engine", engine, "--cpus", &first_cpu(), "--log-bytes", "160m", "--memory-max", "8m"];
    let more = ["--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()];
    Server::start(&[&args[..], &more[..]].concat(), 1)
}

/// Bytes of the process that are in the memory of the machine.
fn resident_bytes(server: &Server) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

fn value(number: usize) -> Vec<u8> {
    let mut value = format!("{number} ").into_bytes();
    value.resize(VALUE_BYTES, b'v');
    value
}

#[test]
fn a_store_larger_than_its_memory_survives_kill_9_and_takes_no_more_than_it_may() {
    for engine in engines_of_effort(0) {
        let folder = Folder::new();
        let data = folder.path("store");
        let server = start(engine, &data);
        let at_start = resident_bytes(&server);
        let is_bounded = |server: &Server, what: &str| {
            let more = resident_bytes(server).saturating_sub(at_start);
            assert!(more <= MEMORY_BYTES + BESIDE_BYTES, "{engine}, {what}: {more} bytes more than an empty store");
        };
        let mut client = connect(&server);
        for number in 0..VALUES {
            client.write(&command(&[b"SET", format!("key {number}").as_bytes(), &value(number)])).unwrap();
            assert_eq!(client.read().unwrap(), "+OK");
        }
        is_bounded(&server, "filled");
        kill(server);
        let server = start(engine, &data);
        assert!(server.seen()[0].contains(&format!("keys={VALUES} ")), "{}", server.seen()[0]);
        assert!(server.seen()[0].contains(&format!(" of {MEMORY_BYTES} ")), "{}", server.seen()[0]);
        is_bounded(&server, "started again");
        let mut client = connect(&server);
        for first in (0..VALUES).step_by(8) {
            for number in first..first + 8 {
                client.write(&command(&[b"GET", format!("key {number}").as_bytes()])).unwrap();
            }
            for number in first..first + 8 {
                assert!(client.read().unwrap().as_bytes() == value(number), "{engine}: key {number}");
            }
        }
        is_bounded(&server, "read");
        server.stop();
    }
}
