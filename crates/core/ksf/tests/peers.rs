//! Peers that misbehave: each gets what it deserves and a counter, and nobody else notices.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::common::Recorder;
use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::{Order, Server};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use socket2::SockRef;

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

fn server(engine: EngineKind, framing: Framing, limits: Limits) -> (Server, Arc<Recorder>) {
    let service = Recorder::new(framing, Order::Requests);
    (one_shard(engine, ANY, limits, Arc::clone(&service)), service)
}

fn deferred(service: &Recorder) -> usize {
    service.deferred.lock().unwrap().len()
}

/// Writes until the server closes. Returns the bytes written.
fn write_until_closed(peer: &mut TcpStream, bytes: &[u8]) -> usize {
    let mut written = 0;
    loop {
        match peer.write(bytes) {
            Ok(length) => written += length,
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => return written,
            Err(error) => panic!("{error} instead of a closed connection"),
        }
    }
}

#[test]
fn a_peer_that_never_reads_is_bounded_and_closed() {
    for engine in engines_in_own_network() {
        let limits = Limits { out_queue_bytes_max: 64 << 10, ..Limits::default() };
        let patient = Limits { send_timeout_ms: PATIENCE.as_millis() as u64, ..limits.clone() };
        let server = one_shard(engine, ANY, patient, Arc::new(Echo));
        let mut other = connect(&server);
        let mut held_max = 0;
        std::thread::scope(|scope| {
            let mut peer = connect_with_small_window(&server);
            let writer = scope.spawn(move || write_until_closed(&mut peer, &[7; 16 << 10]));
            let mut ask_other = || {
                ask(&mut other, b"still there?", b"still there?");
                // The other has nothing outstanding: what came in and did not go out is held for the one who does not read.
                // Between the two looks both may have grown.
                held_max = held_max.max(count(&server, "bytes_in").saturating_sub(count(&server, "bytes_out")));
                held_max
            };
            wait_until("it is not read any more", || ask_other() > 64 << 10 && count(&server, "reads_paused") > 0);
            for _ in 0..10 {
                ask_other();
            }
            server.set_limits(&Limits { send_timeout_ms: 400, ..limits.clone() }.into());
            wait_until("it is closed", || {
                ask_other();
                count(&server, "closed_send_timeout") > 0
            });
            assert!(writer.join().unwrap() > 64 << 10);
        });
        // One chunk beyond the limit, and what the kernel had delivered already when reading was stopped.
        let limit = limits.out_queue_bytes_max as u64 + 129 * u64::from(ksf::server::SLOT_BYTES);
        assert!(held_max <= limit, "{engine}: {held_max} bytes were held, limit {limit}");
        ask(&mut other, b"bye", b"bye");
        assert_eq!(count(&server, "closed_total"), 1, "{engine}");
    }
}

/// A peer that reads as fast as it writes, where each reply must be sent before the next request is looked at: more
/// arrives in a turn than is answered in one, and what waits must stay bounded all the same.
#[test]
fn a_fast_peer_does_not_fill_the_memory() {
    own_network();
    let line = [&[b'x'; 999][..], b"\n"].concat();
    let lines = line.repeat(40_000);
    for engine in engines() {
        let limits = Limits { out_queue_bytes_max: 0, ..Limits::default() };
        let (server, _) = server(engine, LINES, limits);
        let mut peer = connect(&server);
        let mut writer = peer.try_clone().unwrap();
        let mut held_max = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&lines).unwrap());
            let mut got = vec![0; line.len()];
            for at in 0..lines.len() / line.len() {
                peer.read_exact(&mut got).unwrap_or_else(|error| panic!("{engine}: line {at}: {error}"));
                assert!(got == line, "{engine}: line {at} is wrong");
                // In this order: the difference is never more than was there.
                let came_in = count(&server, "bytes_in");
                held_max = held_max.max(came_in.saturating_sub(count(&server, "bytes_out")));
            }
        });
        let limit = 129 * u64::from(ksf::server::SLOT_BYTES);
        assert!(held_max <= limit, "{engine}: {held_max} bytes were held, limit {limit}");
    }
}

#[test]
fn a_slow_reader_gets_every_byte() {
    own_network();
    // More than the kernel holds on the way (net.ipv4.tcp_wmem: 4 MiB as a rule), so the server must pause.
    let bytes = pattern(16 << 20, 0);
    for engine in engines() {
        let limits = Limits { out_queue_bytes_max: 64 << 10, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::new(Echo));
        let mut peer = connect_with_small_window(&server);
        let mut writer = peer.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write_all(&bytes).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            // Only when the server has given up reading does this peer begin to.
            wait_until("the server pauses", || count(&server, "reads_paused") > 0);
            let mut random = Random::of_test(3);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let mut got = [0; 5000];
                let length = peer.read(&mut got[..random.within(1..=5000).min(rest.len())]).unwrap();
                assert!(length > 0 && rest.starts_with(&got[..length]), "{engine}: wrong with {} to go", rest.len());
                rest = &rest[length..];
            }
            expect_end(&mut peer);
        });
        until_count(&server, "closed_by_peer", 1);
    }
}

/// One batch that a socket takes in many parts, with other slices than the first time.
#[test]
fn a_batch_larger_than_any_send_buffer_arrives_whole() {
    own_network();
    const LINES_LONG: usize = 2000;
    for engine in engines() {
        let limits = Limits { out_queue_bytes_max: usize::MAX, connection_bytes_max: usize::MAX, ..Limits::default() };
        let (server, _) = server(engine, LINES, limits);
        let mut peer = connect_with_small_window(&server);
        peer.write_all(&b"long\n".repeat(LINES_LONG)).unwrap();
        // All is answered, and 20 MB wait: the socket takes a few at most.
        wait_until("all is answered", || count(&server, "replies") == LINES_LONG as u64);
        let expected = [&[b'.'; 10_000][..], b"\n"].concat();
        for line in 0..LINES_LONG {
            let mut got = [0; 10_001];
            peer.read_exact(&mut got).unwrap_or_else(|error| panic!("{engine}: line {line}: {error}"));
            assert!(got[..] == expected[..], "{engine}: line {line} is wrong");
        }
        ask(&mut peer, b"end\n", b"end\n");
    }
}

#[test]
fn half_close_with_requests_in_flight_and_deferred() {
    for engine in engines_in_own_network() {
        let (server, service) = server(engine, LINES, Limits::default());
        let mut peer = connect(&server);
        peer.write_all(b"1\ndefer\n3\ndefer\n").unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        expect(&mut peer, b"1\n");
        wait_until("both are deferred", || deferred(&service) == 2);
        let mut waiting = std::mem::take(&mut *service.deferred.lock().unwrap());
        std::thread::scope(|scope| {
            let (last, first) = (waiting.pop().unwrap(), waiting.pop().unwrap());
            scope.spawn(|| last.reply(b"four".to_vec())).join().unwrap();
            scope.spawn(|| first.reply(b"two".to_vec())).join().unwrap();
        });
        expect(&mut peer, b"two\n3\nfour\n");
        expect_end(&mut peer);
        until_count(&server, "closed_by_peer", 1);
        assert_eq!(count(&server, "replies_deferred"), 2);
    }
}

#[test]
fn a_reset_in_the_middle_of_a_message() {
    for engine in engines_in_own_network() {
        let (server, service) = server(engine, Framing::RecordMark, Limits::default());
        let mut other = connect(&server);
        let mut peer = connect(&server);
        peer.write_all(&[0x80, 0, 0, 100, 1, 2, 3]).unwrap();
        until_count(&server, "bytes_in", 7);
        reset(peer);
        until_count(&server, "closed_io", 1);
        ask(&mut other, &[0x80, 0, 0, 1, 9], &[0x80, 0, 0, 1, 9]);
        assert_eq!(*service.messages.lock().unwrap(), [[9]], "half a message is no message");
        // And a half-close there.
        let mut peer = connect(&server);
        peer.write_all(&[0x80, 0, 0, 100, 1, 2, 3]).unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut peer);
        until_count(&server, "closed_by_peer_mid_message", 1);
    }
}

/// A late answer belongs to a connection that is gone, and its place has another one by now.
#[test]
fn a_late_answer_does_not_reach_the_next_connection_in_the_place() {
    for engine in engines_in_own_network() {
        let (server, service) = server(engine, LINES, Limits::default());
        let mut peer = connect(&server);
        peer.write_all(b"defer\n").unwrap();
        wait_until("it is deferred", || deferred(&service) == 1);
        reset(peer);
        until_count(&server, "closed_io", 1);
        let mut next = connect(&server);
        next.write_all(b"defer\n").unwrap();
        wait_until("it is deferred", || deferred(&service) == 2);
        let late = service.deferred.lock().unwrap().remove(0);
        late.reply(b"for the dead".to_vec());
        until_count(&server, "replies_too_late", 1);
        let due = service.deferred.lock().unwrap().remove(0);
        due.reply(b"for the living".to_vec());
        expect(&mut next, b"for the living\n");
    }
}

/// A request in work takes room until it is done, also when its peer has reset: else peers that ask and leave fill the memory.
#[test]
fn the_work_of_peers_that_reset_takes_room_until_it_is_done() {
    for engine in engines_in_own_network() {
        // Each takes the 4 KiB that a reply is expected to have, and its own bytes.
        let limits = Limits { shard_bytes_max: 16 * 4096, ..Limits::default() };
        let (server, service) = server(engine, LINES, limits);
        for asked in 1..=14 {
            let mut peer = connect(&server);
            peer.write_all(b"defer\n").unwrap();
            wait_until("it is deferred", || deferred(&service) == asked);
            reset(peer);
            until_count(&server, "closed_io", asked as u64);
        }
        let mut next = connect(&server);
        let mut long = b"defer".to_vec();
        long.resize(8 << 10, b'.');
        long.push(b'\n');
        next.write_all(&long).unwrap();
        until_count(&server, "reply_waits", 1);
        assert_eq!(deferred(&service), 14);
        for late in service.deferred.lock().unwrap().drain(..3) {
            late.reply(b"for the dead".to_vec());
        }
        until_count(&server, "replies_too_late", 3);
        wait_until("it is handed over", || deferred(&service) == 12);
        let due = service.deferred.lock().unwrap().remove(11);
        due.reply(b"for the living".to_vec());
        expect(&mut next, b"for the living\n");
    }
}

/// A peer with as many requests in work as are allowed is not read, and one that has ended its direction sends nothing. The
/// server notices their resets all the same, while it waits for the answers.
#[test]
fn a_reset_ends_a_connection_that_is_not_read() {
    for engine in engines_in_own_network() {
        let limits = Limits { deferred_max: 2, ..Limits::default() };
        let (server, service) = server(engine, LINES, limits);
        for (requests, half_closes, late) in [(2, false, 2), (1, true, 3)] {
            let mut peer = connect(&server);
            peer.write_all(&b"defer\n".repeat(requests)).unwrap();
            wait_until("they are deferred", || deferred(&service) == requests);
            if half_closes {
                peer.shutdown(Shutdown::Write).unwrap();
            } else {
                until_count(&server, "reads_paused", 1);
            }
            reset(peer);
            until_count(&server, "closed_io", if half_closes { 2 } else { 1 });
            service.deferred.lock().unwrap().clear();
            until_count(&server, "replies_too_late", late);
        }
    }
}

/// The end of a peer whose host has vanished is not heard of: the kernel asks for it after a while.
#[test]
fn connections_are_kept_alive() {
    /// Of tcp_diag and /proc/net/tcp (Documentation/networking/proc_net_tcp.rst): another timer than those of segments.
    const KEEPALIVE: &str = "02:";
    for engine in engines_in_own_network() {
        let (server, _service) = server(engine, LINES, Limits::default());
        let mut peer = connect(&server);
        ask(&mut peer, b"hello\n", b"hello\n");
        let ends = [addr(&server), peer.local_addr().unwrap()].map(|end| format!(":{:04X}", end.port()));
        let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let is_ours = |line: &Vec<String>| line[1].ends_with(&ends[0]) && line[2].ends_with(&ends[1]);
        let ours = table.lines().map(fields).find(is_ours).expect("the connection, as the server has it");
        assert!(ours[5].starts_with(KEEPALIVE), "{engine}: {ours:?}");
    }
}

/// The other end of a connection to a server in this process.
fn accepted(peer: &TcpStream) -> OwnedFd {
    let (process, address) = (pidfd_open(getpid(), PidfdFlags::empty()).unwrap(), peer.local_addr().unwrap());
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let numbers = entries.map(|name| name.to_str().unwrap().parse().unwrap());
    let mut copies = numbers.filter_map(|fd| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let is_theirs = |copy: &OwnedFd| SockRef::from(copy).peer_addr().is_ok_and(|at| at.as_socket() == Some(address));
    copies.find(is_theirs).expect("the server has the connection")
}

/// Also on a socket of a service manager, unless that has chosen other times.
#[test]
fn peers_that_have_vanished_are_noticed_after_two_minutes() {
    own_network();
    let is_after = |peer: &TcpStream, idle: Duration, all: Duration| {
        let socket = accepted(peer);
        let socket = SockRef::from(&socket);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), idle);
        let probing = socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(idle + probing, all);
        // With bytes on their way nothing but the kernel's own limit (tcp_retries2) ends it.
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
    };
    let (minute, two_minutes) = (Duration::from_mins(1), Duration::from_mins(2));
    for engine in engines() {
        let (server, _service) = server(engine, LINES, Limits::default());
        let mut peer = connect(&server);
        ask(&mut peer, b"hello\n", b"hello\n");
        is_after(&peer, minute, two_minutes);
        for is_chosen in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let chosen = socket2::TcpKeepalive::new().with_time(10 * minute).with_interval(minute).with_retries(5);
            if is_chosen {
                SockRef::from(&listener).set_tcp_keepalive(&chosen).unwrap();
            }
            let server =
                Server::builder().engine(engine).inherit(listener.into(), Arc::new(Echo), None).start().unwrap();
            let mut peer = connect(&server);
            ask(&mut peer, b"hello", b"hello");
            match is_chosen {
                false => is_after(&peer, minute, two_minutes),
                true => is_after(&peer, 10 * minute, 15 * minute),
            }
        }
    }
}

#[test]
fn slow_loris_peers_are_cut_off_and_the_others_served() {
    for engine in engines_in_own_network() {
        let limits = Limits { assembly_timeout_ms: 150, ..Limits::default() };
        let (server, _) = server(engine, Framing::RecordMark, limits);
        let mut other = connect(&server);
        let mut peers: Vec<_> = (0..50).map(|_| connect(&server)).collect();
        for peer in &mut peers {
            peer.write_all(&[0x80, 0]).unwrap();
        }
        std::thread::scope(|scope| {
            // One of them trickles: progress does not help it.
            let mut trickler = peers[0].try_clone().unwrap();
            scope.spawn(move || {
                trickler.write_all(&[0x10, 0]).unwrap();
                loop {
                    let mut byte = [0];
                    trickler.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                    match trickler.read(&mut byte) {
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        _ => return,
                    }
                    if trickler.write_all(&[1]).is_err() {
                        return;
                    }
                }
            });
            wait_until("all are cut off", || {
                ask(&mut other, &[0x80, 0, 0, 1, 9], &[0x80, 0, 0, 1, 9]);
                count(&server, "closed_assembly_timeout") >= 50
            });
        });
        assert_eq!(count(&server, "closed_total"), 50, "{engine}");
        for peer in &mut peers[1..] {
            expect_end(peer);
        }
    }
}

#[test]
fn idle_peers_are_closed_if_asked_for() {
    for engine in engines_in_own_network() {
        let (server, _) = server(engine, LINES, Limits { idle_timeout_ms: 50, ..Limits::default() });
        let mut peer = connect(&server);
        expect_end(&mut peer);
        drop(peer);
        until_count(&server, "closed_idle_timeout", 1);
    }
}

/// Messages no server should take: the connection ends with the named counter, after the replies before it.
#[test]
fn bad_messages_are_named() {
    own_network();
    let limits = Limits { message_bytes_max: 1000, fragments_max: 10, ..Limits::default() };
    let nine_p = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };
    let good_record = [0x80, 0, 0, 2, b'h', b'i'];
    type Case<'a> = (&'a str, Framing, &'a [u8], &'a [u8], &'a str);
    let cases: [Case<'_>; 6] = [
        ("an oversized record", Framing::RecordMark, &good_record, &[0x80, 0, 3, 0xe9], "closed_oversized_message"),
        (
            "two fragments too long together",
            Framing::RecordMark,
            &good_record,
            &OVERSIZED_SUM,
            "closed_oversized_message",
        ),
        ("fragments without end", Framing::RecordMark, &good_record, &[0; 44], "closed_endless_fragments"),
        (
            "shorter than its header",
            Framing::LengthPrefix(nine_p),
            &[6, 0, 0, 0, 7, 7],
            &[3, 0, 0, 0],
            "closed_malformed_frame",
        ),
        ("a line without end", LINES, b"hi\n", &[b'x'; 5000], "closed_oversized_message"),
        ("a line too long", LINES, b"hi\n", &LONG_LINE, "closed_oversized_message"),
    ];
    for engine in engines() {
        for (what, framing, good, bad, counter) in cases {
            let (server, service) = server(engine, framing, limits.clone());
            let mut other = connect(&server);
            let mut peer = connect(&server);
            peer.write_all(&[good, bad].concat()).unwrap();
            expect(&mut peer, good);
            expect_end(&mut peer);
            drop(peer);
            until_count(&server, counter, 1);
            ask(&mut other, good, good);
            assert_eq!(service.messages.lock().unwrap().len(), 2, "{engine}: {what}");
            assert_eq!(count(&server, "closed_total"), 1, "{engine}: {what}");
        }
    }
}

const OVERSIZED_SUM: [u8; 504 + 4] = {
    let mut bytes = [0; 508];
    (bytes[2], bytes[3]) = (1, 0xf4); // 500 bytes, not the last fragment
    (bytes[506], bytes[507]) = (1, 0xf5); // and 501 more
    bytes
};

const LONG_LINE: [u8; 1002] = {
    let mut bytes = [b'x'; 1002];
    bytes[1001] = b'\n';
    bytes
};

#[test]
fn empty_fragments_are_legal_and_split_anywhere() {
    for engine in engines_in_own_network() {
        let (server, _) = server(engine, Framing::RecordMark, Limits::default());
        let mut peer = connect(&server);
        let record = [0, 0, 0, 0, 0, 0, 0, 1, b'h', 0, 0, 0, 0, 0, 0, 0, 1, b'i', 0x80, 0, 0, 0];
        for cut in 0..=record.len() {
            let before = count(&server, "bytes_in");
            peer.write_all(&record[..cut]).unwrap();
            wait_until("the first part is read", || count(&server, "bytes_in") - before == cut as u64);
            ask(&mut peer, &record[cut..], &[0x80, 0, 0, 2, b'h', b'i']);
        }
    }
}

/// Thousands at once, each with half a message, none of which may cost the others anything.
#[test]
fn a_storm_of_resets_leaves_nothing_behind() {
    for engine in engines_in_own_network() {
        let (server, _) = server(engine, LINES, Limits::default());
        let mut other = connect(&server);
        for round in 0..10 {
            let mut peers: Vec<_> = (0..100).map(|_| connect(&server)).collect();
            for (at, peer) in peers.iter_mut().enumerate() {
                let bytes: &[u8] = [&b"half a li"[..], b"defer\n", b"long\nlong\n", b""][at % 4];
                peer.write_all(bytes).unwrap();
            }
            peers.into_iter().for_each(reset);
            ask(&mut other, b"and you?\n", b"and you?\n");
            wait_until("all are gone", || count(&server, "closed_total") == 100 * (round + 1));
            assert_eq!(server.connections(), 1);
        }
        // Those that sent all of their requests and vanished count as any other end, but all are counted.
        let ends: u64 = ["closed_io", "closed_by_peer"].iter().map(|counter| count(&server, counter)).sum();
        assert_eq!(ends, 1000, "{engine}");
    }
}
