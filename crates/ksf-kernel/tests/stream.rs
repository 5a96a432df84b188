//! TCP through both halves, on real sockets of the loopback device.

mod common;

use common::*;
use ksf_kernel::Builtin;

fn no_fallback(message: &[u8]) -> Vec<u8> {
    panic!("nothing falls through: {message:?}")
}

#[test]
fn null_calls_are_answered_in_the_kernel() {
    if !is_root("eBPF") {
        return;
    }
    for (habits, hopped) in [(POLLING, true), (PARKING, false)] {
        let service = load(Builtin::RpcNull);
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, habits, no_fallback);
        let started = std::time::Instant::now();
        for xid in 0..20_000 {
            send_all(&mut client, &null_call(xid));
            let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read_exactly(&mut client, 28)));
            if r.is_err() {
                panic!(
                    "xid {xid} {:?}",
                    service.counters().iter().filter(|c| c.value > 0).map(|c| (c.name, c.value)).collect::<Vec<_>>()
                );
            }
            assert_eq!(r.unwrap(), null_reply(xid), "xid {xid} {habits:?}");
        }
        println!("{habits:?}: {:?} each", started.elapsed() / 20_000);
        let answered = counter(&service, "messages_answered");
        println!(
            "{answered} {:?}",
            service.counters().iter().filter(|c| c.value > 0).map(|c| (c.name, c.value)).collect::<Vec<_>>()
        );
        assert!(answered > 10_000, "{habits:?}: {answered} of 20000 in the kernel");
        assert_eq!(counter(&service, "segments_hopped") > answered / 2, hopped);
        drop(client);
        half.join();
    }
}
