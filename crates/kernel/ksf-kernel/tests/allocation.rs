//! No allocation per message where the halves take turns: parked, woken, answered, settled, parked again.

mod common;
#[allow(unreachable_pub)] // shared with tests that need it so
#[path = "../../../core/ksf/tests/common/meter.rs"]
mod meter;

use std::net::TcpStream;
use std::sync::Arc;

use common::*;
use ksf::Server;
use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::listener::ListenAddr;
use ksf_kernel::Builtin;
use ksf_test::alloc::Counting;
use meter::{METER, METER_BYTES, Meter};

#[global_allocator]
static COUNTING: Counting = Counting;

/// What the shard's thread has allocated so far, told by the service, which runs on it.
fn shard_allocations(client: &mut TcpStream) -> u64 {
    send_all(client, &rpc::record(METER));
    let reply = read_exactly(client, 4 + METER_BYTES);
    u64::from_be_bytes(reply[4..12].try_into().unwrap())
}

#[test]
fn taking_turns_allocates_nothing() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for engine in [EngineKind::Epoll, EngineKind::Uring].into_iter().filter(|engine| engine.probe().is_ok()) {
        in_new_network(|| {
            let kernel = load(Builtin::RpcNull);
            let assist = Some(Arc::new(kernel.assist()) as Arc<dyn ksf::assist::Assist>);
            let listen = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
            let cpu = ksf::cpus::choose(None).unwrap()[0];
            let builder = Server::builder().engine(engine).cpus(Some(vec![cpu]));
            let server = builder.listen(listen, Arc::new(Meter(Framing::RecordMark)), assist).start().unwrap();
            let ListenAddr::Tcp(address) = server.listeners()[0].addr else { panic!("not TCP") };
            let mut client = stream::connect(address);
            let hard = rpc_call(1, 100_003, 3, 1);
            let mut rounds = || {
                for xid in 0..500 {
                    // As many as it takes to be parked again, then one for user space, which echoes it.
                    for _ in 0..6 {
                        send_all(&mut client, &hard);
                        assert_eq!(read_exactly(&mut client, hard.len()), hard);
                    }
                    for _ in 0..3 {
                        let call = null_call(xid);
                        send_all(&mut client, &call);
                        let head = read_exactly(&mut client, 28);
                        if head != null_reply(xid) {
                            // Not parked yet: an echo by user space.
                            assert_eq!([head, read_exactly(&mut client, call.len() - 28)].concat(), call);
                        }
                    }
                }
                shard_allocations(&mut client)
            };
            let mut before = rounds();
            let made: Vec<u64> = (0..10)
                .map(|_| {
                    let now = rounds();
                    now - std::mem::replace(&mut before, now)
                })
                .collect();
            let parked = server.counters().iter().find(|counter| counter.name == "assist_settled").unwrap().value;
            assert!(parked > 1_000 && counter(&kernel, "wakes_sent") > 1_000, "{parked} times parked");
            // Warm at some time, and an allocation per thousand messages would show at all times.
            assert!(made.contains(&0), "{engine}: allocations per 4,500 messages: {made:?}");
        });
    }
}
