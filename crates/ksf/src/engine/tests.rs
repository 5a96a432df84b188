//! What every engine owes a shard.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Instant;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::*;
use crate::limits::Limits;
use crate::output::Output;
use crate::pool::{Memory, Pool};

const QUEUE_MAX: usize = 3;

/// Far more than anything here takes: a guard against hanging, not a measure.
const PATIENCE: Duration = Duration::from_secs(60);

fn datagram(env: &mut Env) -> SendBatch {
    let mut output = Output::default();
    output.tail(&mut env.spares).extend_from_slice(b"datagram");
    output.take()
}

/// A Unix socket of packets stands in for one of UDP: it ignores the address it is to send to (unix(7)), and is full
/// when its peer does not read. One of UDP is full only while a network is slow.
fn a_full_socket_holds_so_many_datagrams<E: Engine>() {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (full, reader) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
    let mut fillers = 0;
    while send(&full, b"datagram", SendFlags::DONTWAIT).is_ok() {
        fillers += 1;
    }
    let limits = Limits { datagram_queue_max: QUEUE_MAX, ..Limits::default() };
    let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
    let mut engine = E::new(&mut env).unwrap();
    engine.listen_datagrams(0, full.as_raw_fd()).unwrap();
    let peer = DatagramPeer { addr: SocketAddr::from(([127, 0, 0, 1], 9)), local: None };
    for _ in 0..QUEUE_MAX + 2 {
        let batch = datagram(&mut env);
        engine.send_datagram(0, peer, batch, &mut env);
    }
    assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (0, 2));
    // Those that wait leave when there is room, and then there is room for others.
    let read = |packets: usize| {
        for _ in 0..packets {
            let mut got = [0; 20];
            let (length, _) = recv(&reader, &mut got[..], RecvFlags::DONTWAIT).unwrap();
            assert_eq!(&got[..length], b"datagram");
        }
    };
    read(fillers);
    let mut events = Vec::new();
    let start = Instant::now();
    while env.stats.datagrams_out.value() < QUEUE_MAX as u64 {
        assert!(start.elapsed() < PATIENCE, "those that wait do not leave");
        engine.wait(&mut env, Wait { timeout: Some(PATIENCE), gather: None }, &mut events).unwrap();
    }
    let batch = datagram(&mut env);
    engine.send_datagram(0, peer, batch, &mut env);
    assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (QUEUE_MAX as u64 + 1, 2));
    read(QUEUE_MAX + 1);
    engine.shutdown();
}

#[test]
fn datagrams_that_wait_for_a_full_socket_are_bounded() {
    a_full_socket_holds_so_many_datagrams::<epoll::Epoll>();
    match EngineKind::Uring.probe() {
        Ok(()) => a_full_socket_holds_so_many_datagrams::<uring::Uring>(),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "skipped in CI: needs io_uring ({error})");
            println!("skipped: needs io_uring ({error})");
        }
    }
}
