//! Nothing is allocated per message: twenty times the messages need no more allocations.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract; counting touches
// only an atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is that of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `alloc` above with this layout, so from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What formatting and thread start may differ by from run to run.
const SLACK: u64 = 50;

#[test]
fn twenty_times_the_messages_need_no_more_allocations() {
    // The servers here allocate nothing per message either.
    let tcp = tcp_server(good_echo);
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
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            run_echotest(&format!("{options} -c {count}")).assert_clean(count);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        };
        allocations(1000);
        let (few, many) = (allocations(1000), allocations(20_000));
        assert!(many <= few + SLACK, "{options}: {few} for 1000 messages, {many} for 20,000");
    }
}
