//! TCP through both halves, on real sockets of the loopback device.

use std::io::Read;
use std::net::{Shutdown, TcpStream};

use crate::common::*;
use ksf::assist::Assist;
use ksf_kernel::{Builtin, KernelService};
use ksf_test::stream::ask;

fn no_fallback(message: &[u8]) -> Vec<u8> {
    panic!("nothing falls through: {message:?}")
}

/// PROC_UNAVAIL, without the record mark (RFC 5531, section 9).
fn proc_unavailable(call: &[u8]) -> Vec<u8> {
    let words = [1u32, 0, 0, 0, 3].map(u32::to_be_bytes).concat();
    [&call[..4], &words].concat()
}

/// All that comes until the end of the stream.
fn read_to_end(client: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).expect("the end of the stream");
    bytes
}

#[test]
fn null_calls_are_answered_in_the_kernel() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for (habits, address) in [(POLLING, "127.0.0.1:0"), (PARKING, "127.0.0.1:0"), (PARKING, "[::1]:0")] {
        let service = load(Builtin::RpcNull);
        let (mut client, server) = tcp_pair(address);
        let half = UserHalf::serve(&service, server, habits, no_fallback);
        for xid in 0..5000 {
            ask(&mut client, &null_call(xid), &null_reply(xid));
        }
        let answered = counter(&service, "messages_answered");
        assert!(answered > 4900, "{habits:?}: {answered} of 5000 in the kernel");
        // Parked, a shorter reply goes direct and the lag is repaid now and then; polled, each takes the hop.
        let hopped = counter(&service, "segments_hopped");
        assert_eq!(hopped > answered / 2, !habits.parks, "{hopped} hops");
        drop(client);
        let outcome = half.join();
        assert_eq!(outcome.replied, answered * 28);
    }
}

#[test]
fn echo_is_byte_exact_whatever_the_size() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load(Builtin::Echo);
    let (mut client, server) = tcp_pair("127.0.0.1:0");
    let half = UserHalf::serve(&service, server, PARKING, no_fallback);
    let edges = [1448, 4096, 8192, 16_000, 16_064, 16_384, 32_768, 65_483, 65_536, 70_000];
    let around = edges.iter().flat_map(|edge| edge - 3..=edge + 3);
    for size in (1..=300).chain(around) {
        let message = pattern(size, size as u64);
        let mut sender = client.try_clone().unwrap();
        let sent = message.clone();
        // Written from another thread: both directions are full at the large sizes.
        let writer = std::thread::spawn(move || send_all(&mut sender, &sent));
        assert_eq!(read_exactly(&mut client, size), message, "{size} bytes");
        writer.join().unwrap();
    }
    assert!(counter(&service, "segments_answered") > 200);
    drop(client);
    half.join();
}

/// Calls that the kernel answers and calls that only user space can, in turn and mixed: one order, nothing missing.
#[test]
fn the_halves_take_turns() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for habits in [POLLING, PARKING] {
        let service = load(Builtin::RpcNull);
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, habits, proc_unavailable);
        for xid in 0..3000u32 {
            let hard = pattern(1, u64::from(xid))[0] < 40;
            let call = rpc_call(xid, 100_003, 3, u32::from(hard));
            let mut reply = null_reply(xid);
            reply[27] = if hard { 3 } else { 0 };
            ask(&mut client, &call, &reply);
        }
        assert!(counter(&service, "messages_answered") > 1000, "{habits:?}");
        assert!(counter(&service, "passed_unanswerable") > 300, "{habits:?}");
        drop(client);
        half.join();
    }
}

/// Bursts: the first segment may be answered in the kernel, the rest is not; replies keep the order of the calls.
#[test]
fn order_holds_under_pipelining() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for window_bytes in [0, 4096] {
        let service = load_with(Builtin::RpcNull, |options| options.window_bytes = window_bytes);
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, PARKING, proc_unavailable);
        let mut xid = 0;
        for round in 0..600u32 {
            let burst = 1 + u32::from(pattern(1, u64::from(round))[0]) % 20;
            let mut replies = Vec::new();
            for _ in 0..burst {
                let hard = xid % 7 == 3;
                send_all(&mut client, &rpc_call(xid, 100_003, 3, u32::from(hard)));
                let mut reply = null_reply(xid);
                reply[27] = if hard { 3 } else { 0 };
                replies.extend_from_slice(&reply);
                xid += 1;
            }
            assert_eq!(read_exactly(&mut client, replies.len()), replies, "round {round}");
        }
        assert!(counter(&service, "messages_answered") > 100);
        assert!(counter(&service, "segments_passed") > 100);
        drop(client);
        half.join();
    }
}

/// Bytes from before the socket came under the programs, unread and read.
#[test]
fn early_bytes_are_counted() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load(Builtin::RpcNull);
    // Unread: they wait in the receive queue.
    let (mut client, server) = tcp_pair("127.0.0.1:0");
    send_all(&mut client, &null_call(1));
    wait_until("the call arrives", || server.peek(&mut [0; 44]).is_ok_and(|bytes| bytes == 44));
    let half = UserHalf::serve(&service, server, PARKING, no_fallback);
    assert_eq!(read_exactly(&mut client, 28), null_reply(1));
    for xid in 2..500 {
        ask(&mut client, &null_call(xid), &null_reply(xid));
    }
    assert!(counter(&service, "messages_answered") > 400);
    drop(client);
    half.join();

    // Read and answered by user space.
    let (mut client, mut server) = tcp_pair("127.0.0.1:0");
    send_all(&mut client, &null_call(1));
    assert_eq!(read_exactly(&mut server, 44), null_call(1));
    send_all(&mut server, &null_reply(1));
    let so_far = Totals { received: 44, sent: 28, replied: 0 };
    let half = UserHalf::serve_from(&service, server, PARKING, no_fallback, so_far);
    assert_eq!(read_exactly(&mut client, 28), null_reply(1));
    let before = counter(&service, "messages_answered");
    for xid in 2..500 {
        ask(&mut client, &null_call(xid), &null_reply(xid));
    }
    assert!(counter(&service, "messages_answered") > before + 400);
    drop(client);
    half.join();
}

/// What a queueing discipline drops TCP sends again, and does not call that a retransmission. The program, which finds
/// the first byte ever sent from TCP's counts, comes afterwards.
#[test]
fn what_this_machine_dropped_does_not_keep_the_kernel_half_out() {
    const PIECE: usize = 20_000;
    const PIECES: usize = 500;
    let Some(()) = own_network_or_skip("eBPF") else { return };
    tc("qdisc add dev lo root tbf rate 400mbit burst 128kb limit 140kb");
    let (mut client, mut server) = tcp_pair("127.0.0.1:0");
    std::thread::scope(|scope| {
        scope.spawn(|| (0..PIECES).for_each(|_| send_all(&mut server, &[7; PIECE])));
        read_exactly(&mut client, PIECES * PIECE);
    });
    assert!(!tc("-s qdisc show dev lo").contains("dropped 0,"), "nothing was dropped");
    let service = load(Builtin::RpcNull);
    let so_far = Totals { received: 0, sent: (PIECES * PIECE) as u64, replied: 0 };
    let half = UserHalf::serve_from(&service, server, PARKING, no_fallback, so_far);
    for xid in 0..500 {
        ask(&mut client, &null_call(xid), &null_reply(xid));
    }
    assert!(counter(&service, "messages_answered") > 0, "all of 500 went to user space");
    drop(client);
    half.join();
}

/// Bytes that wait for the client.
fn unread(client: &TcpStream) -> libc::c_int {
    let mut bytes = 0;
    // SAFETY: FIONREAD writes an int.
    unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(client), libc::FIONREAD, &raw mut bytes) };
    bytes
}

#[test]
fn a_slow_reader_misses_nothing() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load(Builtin::Echo);
    for round in 0..60 {
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, if round % 2 == 0 { PARKING } else { POLLING }, no_fallback);
        let message = pattern(400_000 + round * 1000, round as u64);
        let mut sender = client.try_clone().unwrap();
        let to_send = message.clone();
        let writer = std::thread::spawn(move || {
            for piece in to_send.chunks(7001) {
                send_all(&mut sender, piece);
            }
            sender.shutdown(Shutdown::Write).unwrap();
        });
        // Starts to read when nothing moves any more, and then in small pieces.
        let mut waiting = None;
        wait_until("nothing moves", || {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let before = waiting.replace(unread(&client));
            before.is_some() && before == waiting && before != Some(0)
        });
        let mut got = Vec::new();
        let mut buf = [0; 1500];
        loop {
            match client.read(&mut buf).expect("more of the echo") {
                0 => break,
                bytes => got.extend_from_slice(&buf[..bytes]),
            }
        }
        assert!(got == message, "round {round}: {} of {} bytes", got.len(), message.len());
        writer.join().unwrap();
        half.join();
    }
}

#[test]
fn a_half_close_waits_for_the_last_reply() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for habits in [POLLING, PARKING] {
        let service = load(Builtin::RpcNull);
        for calls in 1..40 {
            let (mut client, server) = tcp_pair("127.0.0.1:0");
            let half = UserHalf::serve(&service, server, habits, no_fallback);
            ask(&mut client, &null_call(0), &null_reply(0));
            let mut replies = Vec::new();
            for xid in 0..calls {
                send_all(&mut client, &null_call(xid));
                replies.extend_from_slice(&null_reply(xid));
            }
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_to_end(&mut client), replies, "{calls} calls, {habits:?}");
            half.join();
        }
    }
}

/// Entries are used again; a full table refuses, counted, and the others go on.
#[test]
fn entries_are_used_again() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load_with(Builtin::RpcNull, |options| options.connections_max = 4);
    for round in 0..25 {
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, PARKING, no_fallback);
        for xid in 0..20 {
            ask(&mut client, &null_call(xid), &null_reply(xid));
        }
        drop(client);
        let outcome = half.join();
        assert!(outcome.replied > 0, "round {round}: the kernel half answered nothing");
    }
    assert_eq!(counter(&service, "sockets_refused"), 0);
    let pairs: Vec<_> = (0..5).map(|_| tcp_pair("127.0.0.1:0")).collect();
    let assist = service.assist();
    let attached: Vec<_> = pairs.iter().map(|(_, server)| assist.attach(std::os::fd::AsFd::as_fd(server))).collect();
    assert_eq!(attached.iter().filter(|conn| conn.is_some()).count(), 4);
    assert_eq!(counter(&service, "sockets_refused"), 1);
}

#[test]
fn sockets_of_other_kinds_are_refused() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load(Builtin::Echo);
    let assist = service.assist();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let attached = assist.attach(std::os::fd::AsFd::as_fd(&listener));
    // A listening socket may enter a socket map; what counts is that no connection suffers from it.
    drop(attached);
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(assist.attach(std::os::fd::AsFd::as_fd(&file)).is_none(), "not a socket");
}

/// The original panicked when its module was unloaded with active connections.
#[test]
fn unloading_with_active_connections_is_safe() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for _ in 0..20 {
        let service = load(Builtin::RpcNull);
        let ids = service.program_ids();
        assert_eq!(ids.len(), 5);
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, PARKING, no_fallback);
        ask(&mut client, &null_call(1), &null_reply(1));
        let mut sender = client.try_clone().unwrap();
        let flood = std::thread::spawn(move || {
            // Until the server is gone.
            let call = null_call(2);
            while std::io::Write::write_all(&mut sender, &call).is_ok() {}
        });
        read_exactly(&mut client, 28 * 100);
        half.stop();
        drop(service);
        // What arrives until the end are whole replies; then the end, clean or reset.
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest);
        for reply in rest.chunks_exact(28) {
            assert_eq!(reply, null_reply(2));
        }
        // Against a closed window the flood would wait for its time limit.
        let _ = client.shutdown(Shutdown::Both);
        flood.join().unwrap();
        wait_until("the programs are gone", || ids.iter().all(|&id| !program_exists(id)));
    }
}

fn program_exists(id: u32) -> bool {
    libbpf_rs::Program::fd_from_id(id).is_ok()
}

/// Killing the process that holds the programs, with connections in the middle of a message, leaves nothing.
#[test]
fn a_killed_server_leaves_nothing_behind() {
    let Some(()) = own_network_or_skip("eBPF") else { return };
    let mut server = Helper::start("stream::killed_child", &[]);
    let line = server.hear();
    let mut words = line.split(' ');
    let port: u16 = words.next().unwrap().parse().unwrap();
    let ids: Vec<u32> = words.map(|id| id.parse().unwrap()).collect();
    assert!(ids.len() == 5 && ids.iter().all(|&id| program_exists(id)));
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    ask(&mut client, b"hello", b"hello");
    send_all(&mut client, b"in the middle");
    assert!(xdp_is_attached());
    drop(server);
    let mut rest = Vec::new();
    let _ = client.read_to_end(&mut rest);
    wait_until("the programs are gone", || ids.iter().all(|&id| !program_exists(id)));
    assert!(!xdp_is_attached(), "XDP is still on lo");
}

fn xdp_is_attached() -> bool {
    ip("link show dev lo").contains("xdp")
}

/// Not a test: the other process of the one above.
#[test]
#[ignore = "run by a_killed_server_leaves_nothing_behind"]
fn killed_child() {
    if !is_helper() {
        return;
    }
    let service: KernelService = load(Builtin::Echo);
    let _link = service.attach_udp("lo", &["127.0.0.1:60007".parse().unwrap()]).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ids: Vec<String> = service.program_ids().iter().map(u32::to_string).collect();
    say(format_args!("{} {}", listener.local_addr().unwrap().port(), ids.join(" ")));
    let (socket, _) = listener.accept().unwrap();
    UserHalf::serve(&service, socket, PARKING, no_fallback).join();
}
