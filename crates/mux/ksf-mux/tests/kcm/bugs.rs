//! The bugs and limits of AF_KCM that `docs/kcm.md` lists: each has a test that would fail with it.

use std::io::{Read as _, Write as _};
use std::time::Instant;

use ksf_mux::kcm::{Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, proc_net_kcm_stats};
use ksf_mux::{ConnectionError, Event};
use rustix::net::sockopt;

use super::support::*;

/// B1: a program that reads at the start takes the first message's length for all messages of a segment.
#[test]
fn bug_b1_messages_of_one_segment_are_cut_by_their_own_length() {
    let mux = own_kcm(Kind::Dgram);
    let tcp = attached_with(&mux, documented(), None);
    let lengths: Vec<usize> = (0..500).map(|at| 4 + (at * 37) % 90).collect();
    let all: Vec<u8> = lengths.iter().flat_map(|bytes| message(*bytes, b'a')).collect();
    (&tcp.far).write_all(&all).unwrap();
    mux.set_receive_timeout(Some(PATIENCE));
    let got: Vec<usize> = lengths.iter().map(|_| mux.recv(&mut [0; 128], Flags::NONE).unwrap().bytes).collect();
    assert_eq!(got, lengths);
}

/// B2: of a message read in part from a SOCK_SEQPACKET socket the rest is lost, by recv and by splice.
#[test]
fn bug_b2_the_rest_of_a_message_is_not_lost() {
    let mux = own_kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    let sent: Vec<u8> = (0..20u8).flat_map(|at| message(100, b'a' + at)).collect();
    (&tcp.far).write_all(&sent).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    mux.set_receive_timeout(Some(PATIENCE));
    let mut got = Vec::new();
    let mut in_message = 0;
    for at in 0.. {
        if got.len() == sent.len() {
            break;
        }
        let size = 1 + at * 7 % 40;
        if at % 3 == 0 {
            let bytes = mux.splice(&writer, size, Flags::NONE).unwrap();
            let before = got.len();
            got.resize(before + bytes, 0);
            reader.read_exact(&mut got[before..]).unwrap();
            in_message = (in_message + bytes) % 100;
        } else {
            let mut buffer = vec![0; size];
            let received = mux.recv(&mut buffer, Flags::NONE).unwrap();
            got.extend_from_slice(&buffer[..received.bytes]);
            in_message += received.bytes;
            assert_eq!(received.flags.contains(Flags::EOR), in_message == 100, "the end of each message is marked");
            in_message %= 100;
        }
    }
    assert_eq!(got, sent);
}

/// B3: while the program asks for more there is no limit.
#[test]
fn bug_b3_a_header_that_never_ends_is_bounded() {
    let mux = own_kcm(Kind::Dgram);
    let tcp = attached_with(&mux, constant(0), Some(16_384));
    tcp.far.set_nonblocking(true).unwrap();
    let zeros = [0; 65_536];
    let mut taken = 0;
    let mut most = 0;
    let end = Instant::now() + PATIENCE;
    let error = loop {
        taken += (&tcp.far).write(&zeros).unwrap_or(0);
        mux.look().unwrap();
        most = most.max(mux.stats().connections[0].waiting_bytes);
        if let Some(Event::Ended { error, .. }) = mux.event() {
            break error;
        }
        assert!(Instant::now() < end);
    };
    assert!(matches!(error, ConnectionError::EndlessHeader { limit: 4096, .. }), "{error}");
    assert!(most <= 4096 && taken < 4 << 20, "{most} bytes kept, {taken} taken");
    // And the peer can push no more than TCP's own buffers hold.
    let mut more = 0;
    while let Ok(bytes) = (&tcp.far).write(&zeros) {
        more += bytes;
        assert!(more < 64 << 20, "nothing stops the peer");
    }
    assert_eq!(errno_name(error.errno()), "EMSGSIZE");
}

/// B4: what was for a connection that died goes to the one that is attached next: another client.
#[test]
fn bug_b4_replies_never_reach_another_client() {
    own_network();
    let mut options = KcmOptions::default();
    options.batch_timeout_ms = 3_600_000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let first = attached(&mux);
    // Queued and not sent.
    mux.send(&message(40, b'a'), Flags::BATCH).unwrap();
    let detached = mux.unattach(first.id).unwrap();
    assert_eq!(detached.unsent, message(40, b'a'));
    let second = attached(&mux);
    assert_eq!((first.id.index, second.id.index), (0, 0), "the same place in the table");
    assert!(matches!(mux.reply(first.id, &message(40, b'b')), Err(KcmSocketError::Gone(_))));
    mux.reply(second.id, &message(10, b'c')).unwrap();
    let mut bytes = [0; 10];
    (&second.far).read_exact(&mut bytes).unwrap();
    assert_eq!((bytes[..].to_vec(), second.has()), (message(10, b'c'), "nothing".into()));
}

/// B5: a socket keeps a connection that was reset in the middle of a message until it is unattached, and then repeats
/// the message whether that does harm or not.
#[test]
fn bug_b5_a_reset_holds_nobody_up_and_repeats_only_what_may_be() {
    own_network();
    for repeatable in [false, true] {
        let mux = kcm(Kind::Dgram);
        let first = attached(&mux);
        mux.set_repeatable(repeatable);
        // More than TCP takes from a peer that does not read.
        sockopt::set_socket_send_buffer_size(&first.near, 16_384).unwrap();
        let long = message(900_000, b'a');
        mux.send(&long, Flags::NONE).unwrap();
        assert!(mux.stats().connections[0].unsent_bytes > 0, "TCP took it all");
        let second = attached(&mux);
        sockopt::set_socket_linger(&first.far, Some(std::time::Duration::ZERO)).unwrap();
        drop(first.far);
        assert!(matches!(error_of(&mux, first.id), ConnectionError::Socket { .. }));
        mux.send(&message(10, b'b'), Flags::NONE).unwrap();
        // Nothing was unattached, and the next message has gone through.
        let wanted = if repeatable { long.len() + 10 } else { 10 };
        let mut bytes = vec![0; wanted];
        (&second.far).read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[wanted - 10..], message(10, b'b'));
        assert_eq!(second.has(), "nothing");
        let uncertain = Event::Uncertain { connection: first.id, messages: 1 };
        assert_eq!(mux.event(), (!repeatable).then_some(uncertain));
        assert_eq!(mux.stats().mux.tx_retries, u64::from(repeatable));
    }
}

/// B6: every message is charged the memory of the whole segment it came in, so few fill a socket.
#[test]
fn bug_b6_messages_count_for_their_own_length() {
    own_network();
    let mut options = KcmOptions::default();
    options.limits.connection_bytes_max = 60_000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let tcp = attached(&mux);
    let all: Vec<u8> = (0..300).flat_map(|_| message(100, b'a')).collect();
    (&tcp.far).write_all(&all).unwrap();
    wait_for_bytes(&mux, tcp.id, 30_000);
    let stats = mux.stats().connections[0];
    assert_eq!((stats.waiting_messages, stats.waiting_bytes, stats.is_paused), (300, 30_000, false));
}

/// B7: messages near SO_RCVBUF stall without an error.
#[test]
fn bug_b7_messages_as_long_as_the_receive_buffer_arrive() {
    let mux = own_kcm(Kind::Dgram);
    let tcp = attached_with(&mux, framing(), Some(8192));
    let limit = sockopt::socket_recv_buffer_size(&tcp.near).unwrap();
    for bytes in [7372, 8192, limit - 1, limit] {
        std::thread::scope(|scope| {
            scope.spawn(|| tcp.put(bytes, b'a'));
            assert_eq!(receive(&mux), format!("{bytes} a EOR"));
        });
    }
}

/// B8: unattach loses the bytes of an unfinished message, and drops a whole one that waits.
#[test]
fn bug_b8_unattach_loses_nothing() {
    let mux = own_kcm(Kind::Dgram);
    let tcp = attached(&mux);
    let half = &message(60, b'b')[..25];
    (&tcp.far).write_all(&[&message(10, b'a'), half].concat()).unwrap();
    wait_for_bytes(&mux, tcp.id, 35);
    let detached = mux.unattach(tcp.id).unwrap();
    assert_eq!(detached.unread, half);
    assert_eq!(receive(&mux), "10 a EOR");
    assert_eq!(mux.stats().mux.rx_ready_drops, 0);
}

/// B9: two columns are exchanged, one lags, one counts bytes twice.
#[test]
fn bug_b9_statistics_are_right() {
    own_network();
    let mut options = KcmOptions::default();
    options.batch_timeout_ms = 3_600_000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let (first, second, third) = (attached(&mux), attached(&mux), attached(&mux));
    // In pieces: each byte counts once.
    for (at, piece) in message(64, b'a').chunks(16).enumerate() {
        (&first.far).write_all(piece).unwrap();
        wait_for_bytes(&mux, first.id, (at + 1) * 16);
    }
    // Counted before it is received.
    let stats = mux.stats();
    assert_eq!((stats.mux.rx_messages, stats.mux.rx_bytes), (1, 64));
    assert_eq!((stats.connections[0].rx_messages, stats.connections[0].rx_bytes), (1, 64));
    mux.unattach(second.id).unwrap();
    mux.unattach(third.id).unwrap();
    mux.send(&message(10, b'b'), Flags::BATCH).unwrap();
    mux.unattach(first.id).unwrap();
    let text = proc_net_kcm_stats(&[mux.stats()]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let number = |title| lines[1][lines[0].iter().position(|other| *other == title).unwrap() - 1];
    assert_eq!((number("Unattach"), number("UnattchRsvd"), number("Attach")), ("3", "1", "3"));
    assert_eq!((number("RX-Msgs"), number("RX-Bytes")), ("1", "64"), "those of connections that are gone count");
}

/// B10: a message does not say where it came from.
#[test]
fn bug_b10_a_message_names_its_connection_and_is_answered_there() {
    let mux = own_kcm(Kind::Dgram);
    let tcp = [attached(&mux), attached(&mux), attached(&mux)];
    for (at, tcp) in tcp.iter().enumerate() {
        tcp.put(10 + at, b'a');
    }
    mux.set_receive_timeout(Some(PATIENCE));
    for _ in &tcp {
        let received = mux.recv(&mut [0; 64], Flags::NONE).unwrap();
        assert_eq!(received.connection, tcp[received.bytes - 10].id);
        mux.reply(received.connection, &message(received.bytes + 100, b'b')).unwrap();
    }
    for (at, tcp) in tcp.iter().enumerate() {
        assert_eq!(tcp.gets(), (110 + at).to_string());
        assert_eq!(tcp.has(), "nothing");
    }
}
