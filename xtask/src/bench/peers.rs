//! The small peers are proven by `--smoke`: each runs under a client that verifies every reply. Here is what no client
//! sends, and the count of a server's system calls.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use super::case::{CASES, Case, Metric, Placement, Service};
use super::contestant::{Contestant, Pinning, Programs, server_command, start};
use super::have::Have;
use super::measure::{Effort, Meter, SyscallCounter};
use super::watch::Watch;
use crate::process::free_port;

const TIMEOUT: Duration = Duration::from_secs(20);

fn record(words: &[u32]) -> Vec<u8> {
    let mark = 0x8000_0000 | (4 * words.len() as u32);
    std::iter::once(&mark).chain(words).flat_map(|word| word.to_be_bytes()).collect()
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

#[test]
fn records_may_be_cut_anywhere() {
    let programs = Programs::build("unused".into()).unwrap();
    let case = Case { service: Service::Null, connections: 1, ..CASES[0] };
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    for contestant in [Contestant::Threads, Contestant::ThreadsSpin, Contestant::EventLoop] {
        let port = free_port().unwrap();
        let command = server_command(&programs, contestant, &case, &pinning, port).unwrap();
        let (server, _) = start(contestant, command).unwrap();
        let mut stream = connect(port);
        // NULL calls of ONC RPC with AUTH_NONE (RFC 5531), and their replies.
        let requests: Vec<u8> = (0..100).flat_map(|xid| record(&[xid, 0, 2, 100_003, 3, 0, 0, 0, 0, 0])).collect();
        let expected: Vec<u8> = (0..100).flat_map(|xid| record(&[xid, 1, 0, 0, 0, 0])).collect();
        // Cuts within marks and bodies; the first piece holds many records, the last ones one byte.
        let (most, rest) = requests.split_at(requests.len() - 50);
        stream.write_all(most).unwrap();
        rest.iter().for_each(|byte| stream.write_all(&[*byte]).unwrap());
        let mut got = vec![0; expected.len()];
        stream.read_exact(&mut got).unwrap();
        assert!(got == expected, "{contestant}");

        // What it does not serve (here a fragment that is not the last) closes the connection.
        let mut other = connect(port);
        other.write_all(&40u32.to_be_bytes()).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        server.stop().unwrap();
    }
}

/// One receive and one send for each message, whoever counts.
#[test]
fn system_calls_are_counted() {
    let programs = Programs::build(crate::ksf_binary(None, "debug").unwrap()).unwrap();
    let have = Have::look();
    let case = CASES.iter().find(|case| case.name == "null-tcp-1").unwrap();
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    let effort = Effort { seconds: 0.0, scale: 0.1, rate_divisor: 1 };
    for by in [SyscallCounter::Perf, SyscallCounter::Strace] {
        if by == SyscallCounter::Perf && have.counter() != Ok(SyscallCounter::Perf) {
            continue;
        }
        let meter = Meter { programs: &programs, effort, watch: Watch::Nothing };
        let sample = meter.syscalls(case, Contestant::Threads, &pinning, by);
        let calls = sample.metrics.get(&Metric::Syscalls).copied().unwrap_or_default();
        assert!((1.9..2.5).contains(&calls), "{by:?}: {calls} {:?}", sample.error);
    }
}
