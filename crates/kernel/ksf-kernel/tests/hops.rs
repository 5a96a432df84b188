//! What becomes of a hop whose socket fails for good. In a process of its own: the test finds the sockets of hops among
//! its descriptors.

use std::io::{ErrorKind, Read};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::common::*;
use ksf::Server;
use ksf_kernel::Builtin;
use ksf_services::rpc;
use ksf_test::stream::{ask, connect};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketType};

/// Makes each send into a hop that is there now fail with EPIPE. A kernel without memory makes it fail, too: whatever
/// the error is, the work queue gives the socket up.
fn break_hops() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let numbers: Vec<i32> = descriptors.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut broken = 0;
    for number in numbers {
        // SAFETY: the number is used at once, and no other thread of this process closes descriptors meanwhile but that of
        // the list, for which the calls below fail.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let is_hop = socket_domain(socket) == Ok(AddressFamily::UNIX) && socket_type(socket) == Ok(SocketType::DGRAM);
        if is_hop && rustix::net::getpeername(socket).is_ok() {
            rustix::net::shutdown(socket, Shutdown::Read).unwrap();
            broken += 1;
        }
    }
    broken
}

/// The connection whose reply was lost ends, and the hop serves the next one: no call waits for ever, and none is lost
/// behind a connection that stays.
#[test]
fn a_hop_that_fails_ends_one_connection_and_is_renewed() {
    let Some(()) = root_or_skip("eBPF") else { return };
    in_new_network(|| {
        let cpus = ksf::cpus::choose(None).expect("a CPU");
        let kernel = load_with(Builtin::RpcNull, |options| {
            options.shards = cpus.len() as u32;
            // Every reply takes a hop.
            options.lag_bytes_max = 0;
        });
        let mut table = rpc::ProgramTable::new();
        table.register(rpc::Program::NFS_V3).expect("an empty table");
        let server = Server::builder().listen(
            "tcp:127.0.0.1:0".parse().unwrap(),
            Arc::new(rpc::NullService::new("rpc", table)),
            Some(Arc::new(kernel.assist())),
        );
        let server = server.start().unwrap();
        let ksf::listener::ListenAddr::Tcp(address) = server.listeners()[0].addr else { unreachable!("it is TCP") };
        let mut client = connect(address);
        (0..200).for_each(|xid| ask(&mut client, &null_call(xid), &null_reply(xid)));
        assert!(counter(&kernel, "segments_hopped") > 0);

        let hops = break_hops();
        assert!(hops > 0);
        let mut lost = 0;
        let mut call = |xid| {
            send_all(&mut client, &null_call(xid));
            let mut reply = [0; 28];
            match client.read_exact(&mut reply) {
                Ok(()) => assert_eq!(reply[..], null_reply(xid)),
                Err(error) => {
                    // At once, and not by a time limit: nothing more will come.
                    assert!(
                        matches!(error.kind(), ErrorKind::ConnectionReset),
                        "call {xid} after {lost} lost: {error}"
                    );
                    lost += 1;
                    client = connect(address);
                }
            }
        };
        (0..2_000).for_each(&mut call);
        let before = counter(&kernel, "segments_hopped");
        // On a busy machine a call may meet only now a hop that is broken: of another CPU.
        (0..200).for_each(&mut call);
        assert!(counter(&kernel, "segments_hopped") > before, "renewed hops carry replies");
        assert!(lost > 0 && lost <= hops, "{lost} connections for {hops} sockets");
        assert_eq!(counter(&kernel, "replies_broken"), lost as u64);
        drop(client);
        server.drain().unwrap();
    });
}
