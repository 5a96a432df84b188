//! Nothing is allocated per message: twenty times the messages need no more allocations.

mod common;

use std::io::{Read, Write};

use common::*;
use ksf_test::alloc::{Counting, allocations_of_all};

#[global_allocator]
static COUNTING: Counting = Counting;

/// What formatting and thread start may differ by from run to run.
const SLACK: u64 = 50;

// One test: what another one allocates meanwhile would count.
#[test]
fn twenty_times_the_messages_need_no_more_allocations() {
    echoes();
    writes();
}

fn echoes() {
    // The servers here allocate nothing per message either.
    let tcp = tcp_server(stream::echo);
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let udp_address = udp.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(&buffer[..len], peer);
        }
    });
    for options in [
        format!("{tcp} -l 40"),
        format!("{tcp} -l 40 -a 32"),
        format!("{tcp} -l 40 -a 32 --batch 8"),
        format!("{tcp} -l 40 --rate 100K"),
        format!("{udp_address} -u -l 40 -a 4"),
    ] {
        let allocations = |count: u64| {
            let before = allocations_of_all();
            run_echotest(&format!("{options} -c {count}")).assert_clean(count);
            allocations_of_all() - before
        };
        allocations(1000);
        let (few, many) = (allocations(1000), allocations(20_000));
        assert!(many <= few + SLACK, "{options}: {few} for 1000 messages, {many} for 20,000");
    }
}

fn writes() {
    // Every command is as long as every other: "SET", a key of 16 bytes, a value of 64.
    const COMMAND: usize = b"*3\r\n$3\r\nSET\r\n$16\r\nkey:000000000000\r\n$64\r\n\r\n".len() + 64;
    let server = tcp_server(|mut stream| {
        let mut command = [0; COMMAND];
        loop {
            match stream.read_exact(&mut command) {
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            }
            assert!(command.ends_with(b"\r\n"));
            stream.write_all(b"+OK\r\n")?;
        }
    });
    let folder = Folder::new();
    for options in ["-c 1", "-c 4 -P 8 --zipf 0.9", "-c 2 --rate 100K", "-c 4 -P 8 --journal"] {
        let allocations = |count: u64| {
            // A journal of its own for each run: one that is continued is read.
            let journal =
                if options.ends_with("journal") { folder.path(&count.to_string()) } else { Default::default() };
            let _ = std::fs::remove_file(&journal);
            let before = allocations_of_all();
            run_kv(&format!("{server} --keys 100 --mix 0:1 -n {count} {options} {}", journal.display()))
                .assert_clean(count);
            allocations_of_all() - before
        };
        allocations(1000);
        let (few, many) = (allocations(1000), allocations(20_000));
        assert!(many <= few + SLACK, "{options}: {few} for 1000 writes, {many} for 20,000");
    }
}
