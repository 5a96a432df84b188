//! Nothing is allocated per message: twenty times the messages need no more allocations.

mod common;

use common::*;
use ksf_test::alloc::{Counting, allocations_of_all};

#[global_allocator]
static COUNTING: Counting = Counting;

/// What formatting and thread start may differ by from run to run.
const SLACK: u64 = 50;

#[test]
fn twenty_times_the_messages_need_no_more_allocations() {
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
