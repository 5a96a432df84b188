//! The contract of AF_KCM, row by row: what is observed here must be what `lab/kcm/ours.txt` says, and `docs/kcm.md`
//! puts that beside what AF_KCM does. The rows mirror `lab/kcm/contract.c`.

mod answers;
mod bugs;
#[path = "../common/mod.rs"]
mod common;
mod document;
mod support;

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ksf_mux::kcm::{
    AttachOptions, Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, RecvBuffer, proc_net_kcm, proc_net_kcm_stats,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use support::*;

#[test]
fn types_of_sockets() {
    let open = |socket_type, protocol| outcome(Kind::from_raw(socket_type, protocol).map_err(|error| error.errno()));
    check(&[
        ("socket(SOCK_DGRAM)", open(2, 0)),
        ("socket(SOCK_SEQPACKET)", open(5, 0)),
        ("socket(SOCK_STREAM)", open(1, 0)),
        ("socket(protocol 1)", open(2, 1)),
    ]);
    assert_eq!(Kind::from_raw(Kind::Seqpacket.raw() | 0o2_000_000 | 0o4000, 0), Ok(Kind::Seqpacket));
}

#[test]
fn attach_and_unattach() {
    own_network();
    let (mux, other) = (kcm(Kind::Dgram), kcm(Kind::Dgram));
    let attach = |mux: &KcmSocket, socket: OwnedFd| {
        outcome(mux.attach(socket, framing(), AttachOptions::default()).map_err(|error| error.errno()))
    };
    let unattach = |mux: &KcmSocket, socket: &OwnedFd| {
        let connection = mux.connection_of(socket);
        let detached = connection.ok_or(ksf_mux::kcm::NotAttached).and_then(|connection| mux.unattach(connection));
        outcome(detached.map_err(|error| error.errno()))
    };
    let unconnected =
        || rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let (near, _far) = connection(None);
    let clone = || near.try_clone().unwrap();
    check(&[
        ("attach a listening socket", attach(&mux, TcpListener::bind("127.0.0.1:0").unwrap().into())),
        ("attach an unconnected socket", attach(&mux, unconnected())),
        ("attach a UDP socket", attach(&mux, UdpSocket::bind("127.0.0.1:0").unwrap().into())),
        ("attach", attach(&mux, clone())),
        ("attach again", attach(&mux, clone())),
        ("attach to another mux", attach(&other, clone())),
        ("unattach from another mux", unattach(&other, &near)),
        ("unattach", unattach(&mux, &near)),
        ("unattach again", unattach(&mux, &near)),
        ("attach after unattach", attach(&mux, clone())),
    ]);
}

#[test]
fn whole_messages() {
    own_network();
    for (kind, name) in [(Kind::Dgram, "DGRAM"), (Kind::Seqpacket, "SEQPACKET")] {
        let mux = kcm(kind);
        let tcp = attached(&mux);
        let nothing = mux.recv(&mut [0; 64], Flags::DONTWAIT).map_err(|error| error.errno());
        check(&[(&format!("{name}, nothing there, MSG_DONTWAIT"), outcome(nothing))]);

        tcp.put(10, b'a');
        tcp.put(20, b'b');
        let got = [receive(&mux), receive(&mux), receive_now(&mux)].join(", ");
        check(&[(&format!("{name}, two messages"), got)]);

        tcp.put(50, b'a');
        tcp.put(30, b'b');
        let got = [receive_into(&mux, 20, Flags::NONE), receive(&mux)];
        // The third is there in one kind only.
        let third = if kind == Kind::Dgram { receive_now(&mux) } else { receive(&mux) };
        check(&[(&format!("{name}, 20 of 50 bytes, then the rest"), [got.join(", "), third].join(", "))]);

        tcp.put(50, b'a');
        let got = [receive_into(&mux, 20, Flags::PEEK), receive_into(&mux, 20, Flags::TRUNC)].join(", ");
        check(&[(&format!("{name}, MSG_PEEK, then MSG_TRUNC, of 20 of 50 bytes"), got)]);
        drain(&mux);

        // A header in two pieces, and a body in two: each is received before the next is sent.
        for (at, piece) in message(30, b'p').chunks(3).enumerate() {
            (&tcp.far).write_all(piece).unwrap();
            wait_for_bytes(&mux, tcp.id, (at + 1) * 3);
        }
        check(&[(&format!("{name}, 30 bytes, three at a time"), receive(&mux))]);
    }
}

#[test]
fn a_message_goes_into_several_buffers() {
    own_network();
    let mux = kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    (&tcp.far).write_all(&[&12u32.to_be_bytes()[..], b"abcdefgh"].concat()).unwrap();
    let (mut first, mut second) = ([0; 5], [0; 5]);
    let received = mux.recvmsg(&mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)], Flags::NONE).unwrap();
    assert_eq!((received.bytes, received.flags, received.connection), (10, Flags::NONE, tcp.id));
    assert_eq!((&first, &second), (b"\0\0\0\x0ca", b"bcdef"));
    let received = mux.recv(&mut first, Flags::PEEK).unwrap();
    assert_eq!((received.bytes, received.flags), (2, Flags::EOR), "the end of what is left");
    let received = mux.recv(&mut second, Flags::NONE).unwrap();
    assert_eq!((received.bytes, received.flags, &second[..2]), (2, Flags::EOR, &b"gh"[..]));
}

#[test]
fn splice_to_a_pipe() {
    own_network();
    let mux = kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    let (mut reader, writer) = std::io::pipe().unwrap();
    tcp.put(60, b'a');
    tcp.put(30, b'b');
    mux.set_receive_timeout(Some(PATIENCE));
    let spliced = mux.splice(&writer, 10, Flags::NONE).unwrap();
    let observed = format!("{spliced}, {}, {}", receive(&mux), receive(&mux));
    check(&[("SEQPACKET, splice 10 of 60 bytes, then the rest", observed)]);
    let mut bytes = [0; 10];
    reader.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..], message(60, b'a')[..10]);

    // Into a file, and in pieces; a pipe that is closed leaves the message where it is.
    tcp.put(64, b'c');
    let folder = ksf_test::Folder::new();
    let path = folder.path("spliced");
    let file = std::fs::File::create(&path).unwrap();
    assert_eq!(mux.splice(&file, 40, Flags::NONE).unwrap(), 40);
    drop(reader);
    assert!(matches!(mux.splice(&writer, 40, Flags::NONE), Err(KcmSocketError::System(_))));
    assert_eq!(mux.splice(&file, 40, Flags::NONE).unwrap(), 24);
    assert_eq!(std::fs::read(&path).unwrap(), message(64, b'c'));
    assert_eq!(receive_now(&mux), "nothing");
}

#[test]
fn receiving_takes_no_longer_than_it_may() {
    let mux = kcm(Kind::Dgram);
    mux.set_receive_timeout(Some(Duration::from_millis(50)));
    let received = mux.recv(&mut [0; 64], Flags::NONE).map_err(|error| error.errno());
    check(&[("blocking receive, SO_RCVTIMEO of the message socket", outcome(received))]);
    // Nor does a disabled one, which waits for being enabled.
    mux.set_receiving(false);
    assert_eq!(mux.recv(&mut [0; 64], Flags::NONE).map_err(|error| error.errno()), Err(11));
}

#[test]
fn a_disabled_socket_receives_when_it_is_enabled() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    mux.set_receiving(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&mux));
        // Whatever comes first, the call or this.
        mux.set_receiving(true);
        assert_eq!(waiting.join().unwrap(), "10 a EOR");
    });
}

#[test]
fn many_at_once() {
    own_network();
    let mux = kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    for at in 0..5 {
        tcp.put(10 + at, b'a' + at as u8);
    }
    wait_for_bytes(&mux, tcp.id, 60);
    let mut buffers = [[0; 64]; 8];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    let count = mux.recvmmsg(&mut slots, Flags::DONTWAIT, None).unwrap();
    let last = slots[count - 1].received.unwrap();
    check(&[("recvmmsg of 8, five there", format!("{count}, the last of {} bytes", last.bytes))]);

    tcp.put(10, b'f');
    mux.set_receive_timeout(Some(PATIENCE));
    assert_eq!(mux.recvmmsg(&mut slots, Flags::WAITFORONE, None).unwrap(), 1);
    let nothing = mux.recvmmsg(&mut slots, Flags::NONE, Some(Duration::from_millis(10)));
    assert!(matches!(nothing, Err(KcmSocketError::WouldBlock)), "{nothing:?}");
}

#[test]
fn messages_of_one_segment() {
    own_network();
    for (program, name) in [(documented(), "documented"), (framing(), "offset-aware")] {
        let mux = kcm(Kind::Dgram);
        let tcp = attached_with(&mux, program, None);
        let all: Vec<u8> = (0..6).flat_map(|at| message(10 + 5 * at, b'a' + at as u8)).collect();
        (&tcp.far).write_all(&all).unwrap();
        let lengths: Vec<_> = (0..6).map(|_| receive(&mux).split(' ').next().unwrap().to_owned()).collect();
        assert_eq!(receive_now(&mux), "nothing");
        let error = if mux.event().is_none() { "none" } else { "some" };
        let row = format!("10 15 20 25 30 35 in one segment, {name} program");
        check(&[(&row, format!("{}; error {error}", lengths.join(" ")))]);
    }
}

#[test]
fn clones() {
    own_network();
    let first = kcm(Kind::Seqpacket);
    let sockets = [first.try_clone().unwrap(), first.try_clone().unwrap(), first.try_clone().unwrap()];
    let kind = if sockets[0].kind() == Kind::Seqpacket { "SOCK_SEQPACKET" } else { "SOCK_DGRAM" };
    check(&[("type of a clone of SOCK_SEQPACKET", kind.to_owned())]);
    let tcp = attached(&first);
    (0..40).for_each(|_| tcp.put(10, b'a'));
    wait_for_bytes(&sockets[2], tcp.id, 400);
    let counts = [drain(&first), drain(&sockets[0]), drain(&sockets[1]), drain(&sockets[2])];
    let counts = counts.map(|count| count.to_string()).join(" ");
    check(&[("40 messages for four sockets, nobody reading", counts)]);
}

#[test]
fn receive_disable() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let other = mux.try_clone().unwrap();
    let tcp = attached(&mux);
    mux.set_receiving(false);
    let read_back = i32::from(!mux.is_receiving()).to_string();
    check(&[("KCM_RECV_DISABLE", "ok".into()), ("KCM_RECV_DISABLE, read back", read_back)]);
    let put = |count| {
        (0..count).for_each(|_| tcp.put(10, b'a'));
        wait_for_bytes(&other, tcp.id, count * 10);
    };
    put(4);
    check(&[("four messages, this socket disabled, the other not", format!("{} {}", drain(&mux), drain(&other)))]);

    // Disabled with a message in its hand, which it has peeked at.
    mux.set_receiving(true);
    put(4);
    assert_eq!(receive_into(&mux, 64, Flags::PEEK), "10 a EOR");
    mux.set_receiving(false);
    check(&[("four messages, then this socket disabled", format!("{} {}", drain(&mux), drain(&other)))]);

    other.set_receiving(false);
    tcp.put(10, b'a');
    tcp.put(11, b'b');
    let here = drain(&mux) + drain(&other);
    other.set_receiving(true);
    let there = [receive(&other), receive(&other)].len() + drain(&other);
    check(&[("two messages, all sockets disabled, then one enabled", format!("{here}, {there}"))]);

    drop(other);
    tcp.put(10, b'a');
    let here = drain(&mux);
    mux.set_receiving(true);
    let there = [receive(&mux)].len() + drain(&mux);
    check(&[("the other socket closed, this one disabled, then enabled", format!("{here}, {there}"))]);
}

#[test]
fn ends_of_messages_that_are_sent() {
    own_network();
    for (kind, name) in [(Kind::Dgram, "DGRAM"), (Kind::Seqpacket, "SEQPACKET")] {
        let mux = kcm(kind);
        let tcp = attached(&mux);
        let send = |letter, flags| assert_eq!(mux.send(&message(10, letter), flags).unwrap(), 10);
        send(b'a', Flags::NONE);
        let before = if kind == Kind::Dgram { tcp.gets() } else { tcp.has() };
        send(b'b', Flags::EOR);
        check(&[(&format!("{name}, send 10, then 10 with MSG_EOR"), format!("{before}, {}", tcp.gets()))]);

        send(b'a', Flags::MORE);
        let before = tcp.has();
        send(b'b', Flags::EOR);
        check(&[(
            &format!("{name}, send 10 with MSG_MORE, then 10 with MSG_EOR"),
            format!("{before}, {}", tcp.gets()),
        )]);

        // No more is sent: the timer thread ends the batch.
        send(b'a', Flags::BATCH | Flags::EOR);
        let before = tcp.gets();
        send(b'b', Flags::EOR);
        check(&[(&format!("{name}, send 10 with MSG_BATCH, then 10"), format!("{before}, {}", tcp.gets()))]);
        let nothing = mux.send(&[], Flags::EOR).map_err(|error| error.errno());
        check(&[(&format!("{name}, send nothing"), outcome(nothing))]);
        assert_eq!(tcp.has(), "nothing");
    }
}

#[test]
fn a_batch_leaves_with_the_next_message() {
    own_network();
    let mut options = KcmOptions::default();
    options.batch_timeout_ms = 3_600_000;
    for how in ["send", "flush", "drop"] {
        let mux = KcmSocket::new(Kind::Dgram, options.clone()).unwrap();
        let holder = mux.try_clone().unwrap();
        let tcp = attached(&mux);
        mux.send(&message(10, b'a'), Flags::BATCH).unwrap();
        mux.send(&message(10, b'b'), Flags::BATCH).unwrap();
        assert_eq!(tcp.has(), "nothing", "{how}");
        assert_eq!(mux.stats().connections[0].unsent_bytes, 20);
        let wanted = match how {
            "send" => mux.send(&message(10, b'c'), Flags::NONE).map(|bytes| 20 + bytes).unwrap(),
            "flush" => {
                mux.flush();
                20
            }
            _ => {
                drop(mux);
                20
            }
        };
        assert_eq!(tcp.gets(), wanted.to_string(), "{how}");
        drop(holder);
    }
}

#[test]
fn a_batch_that_grows_too_long_leaves() {
    own_network();
    let mut options = KcmOptions::default();
    options.batch_timeout_ms = 3_600_000;
    options.limits.out_queue_bytes_max = 1000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let tcp = attached(&mux);
    for _ in 0..5 {
        mux.send(&message(100, b'a'), Flags::BATCH).unwrap();
    }
    assert_eq!(tcp.gets(), "500");
}

#[test]
fn several_sent_at_once() {
    own_network();
    let mux = kcm(Kind::Seqpacket);
    let tcp = [attached(&mux), attached(&mux)];
    let messages = [message(10, b'a'), message(11, b'b')];
    let parts = [[IoSlice::new(&messages[0])], [IoSlice::new(&messages[1])]];
    let sent = mux.sendmmsg(&[(&parts[0], Flags::EOR), (&parts[1], Flags::EOR)], Flags::DONTWAIT).unwrap();
    let first = tcp[0].gets();
    let observed = format!("{sent} sent; connections: {first}, {}", tcp[1].has());
    check(&[("SEQPACKET, sendmmsg of 10 and 11 with MSG_EOR in each", observed)]);
}

#[test]
fn connections_take_turns() {
    own_network();
    for (flags, name) in [(Flags::NONE, "each pushed"), (Flags::BATCH, "all but the last with MSG_BATCH")] {
        let mux = kcm(Kind::Dgram);
        let tcp = [attached(&mux), attached(&mux), attached(&mux), attached(&mux)];
        for at in 0..16 {
            mux.send(&message(10, b'a'), if at < 15 { flags } else { Flags::NONE }).unwrap();
        }
        let sent = mux.stats();
        let counts = sent.connections.iter().map(|of| of.tx_messages.to_string()).collect::<Vec<_>>().join(" ");
        check(&[(&format!("16 messages over four connections, {name}"), counts)]);
        for (tcp, of) in tcp.iter().zip(&sent.connections) {
            let mut bytes = vec![0; of.tx_messages as usize * 10];
            (&tcp.far).read_exact(&mut bytes).unwrap();
            assert_eq!(tcp.has(), "nothing");
        }
    }
}

#[test]
fn what_programs_return() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached_with(&mux, constant(-74), None);
    tcp.put(10, b'a');
    let error = errno_name(error_of(&mux, tcp.id).errno());
    let woken = if mux.is_readable().unwrap() { "woken" } else { "not woken" };
    check(&[("program returns -EBADMSG", format!("{error} on the connection; reader {woken}"))]);
    mux.unattach(tcp.id).unwrap();

    let tcp = attached(&mux);
    (&tcp.far).write_all(&3u32.to_be_bytes()).unwrap();
    let got = receive(&mux);
    let error = if mux.event().is_none() { "none" } else { "some" };
    check(&[("length 3, header of 4", format!("{error} on the connection; reader: {got}"))]);
}

#[test]
fn too_long() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached_with(&mux, framing(), Some(8192));
    tcp.put(20_000, b'a');
    let error = errno_name(error_of(&mux, tcp.id).errno());
    let detached = mux.unattach(tcp.id).unwrap();
    let mut rest = vec![0; 20_000 - detached.unread.len()];
    let mut near = std::net::TcpStream::from(detached.socket);
    near.read_exact(&mut rest).unwrap();
    assert_eq!([detached.unread, rest].concat(), message(20_000, b'a'));
    let observed = format!("{error} on the connection; its bytes can be read after unattach");
    check(&[("message longer than SO_RCVBUF", observed)]);
    // A length of its own, and one that fits exactly.
    let (near, far) = connection(None);
    let mut options = AttachOptions::default();
    options.message_bytes_max = Some(100);
    let id = mux.attach(near, framing(), options).unwrap();
    let tcp = Tcp { near: far.try_clone().unwrap().into(), far, id };
    tcp.put(100, b'b');
    tcp.put(101, b'c');
    assert_eq!(receive(&mux), "100 b EOR");
    assert_eq!(errno_name(error_of(&mux, id).errno()), "EMSGSIZE");
}

#[test]
fn assembly_takes_no_longer_than_it_may() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let limited = || {
        let (near, far) = connection(None);
        set_socket_timeout(&near, Timeout::Recv, Some(Duration::from_secs(1))).unwrap();
        let id = mux.attach(near.try_clone().unwrap(), framing(), AttachOptions::default()).unwrap();
        Tcp { near, far, id }
    };
    let tcp = limited();
    (&tcp.far).write_all(&message(64, b'a')[..20]).unwrap();
    let error = errno_name(error_of(&mux, tcp.id).errno());
    check(&[("20 of 64 bytes, SO_RCVTIMEO 1 s", format!("{error} on the connection"))]);

    // Progress does not prolong it: a byte comes whenever the last one was received.
    let tcp = limited();
    let start = Instant::now();
    let mut error = None;
    let long = message(60_000, b'a');
    for piece in long.chunks(1) {
        (&tcp.far).write_all(piece).unwrap();
        mux.look().unwrap();
        std::thread::park_timeout(Duration::from_millis(1));
        error = mux.event();
        assert!(start.elapsed() < PATIENCE, "no error");
        if error.is_some() {
            break;
        }
    }
    let Some(ksf_mux::Event::Ended { error, .. }) = error else { panic!("{error:?}") };
    let observed = format!("{}, while bytes still came", errno_name(error.errno()));
    check(&[("6 bytes of 64 every 300 ms, SO_RCVTIMEO 1 s", observed)]);
    // An explicit time goes before that of the socket.
    let (near, far) = connection(None);
    let mut options = AttachOptions::default();
    options.assembly_timeout_ms = Some(20);
    let id = mux.attach(near, framing(), options).unwrap();
    (&far).write_all(&[0]).unwrap();
    assert_eq!(error_of(&mux, id).to_string(), "a message did not arrive within assembly_timeout_ms (20)");
}

#[test]
fn end_of_stream() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    (&tcp.far).write_all(&message(64, b'b')[..20]).unwrap();
    tcp.far.shutdown(Shutdown::Write).unwrap();
    let error = errno_name(error_of(&mux, tcp.id).errno());
    let mut hung_up = [rustix::event::PollFd::new(&tcp.near, rustix::event::PollFlags::RDHUP)];
    assert_eq!(rustix::event::poll(&mut hung_up, None).unwrap(), 1);
    let observed = format!("{error} on the connection, POLLRDHUP; reader: {}, {}", receive(&mux), receive_now(&mux));
    check(&[("a message, half of one, FIN", observed)]);
}

#[test]
fn readers_that_want_errors_get_them_after_the_last_message() {
    own_network();
    let mux = kcm(Kind::Dgram);
    mux.report_errors();
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    tcp.far.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive(&mux), "10 a EOR");
    let error = mux.recv(&mut [0; 64], Flags::NONE).unwrap_err();
    assert!(matches!(error, KcmSocketError::Connection { connection, .. } if connection == tcp.id), "{error}");
    assert_eq!(errno_name(error.errno()), "EPIPE");
}

#[test]
fn unattach_with_bytes() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached(&mux);
    let whole = message(60, b'a');
    (&tcp.far).write_all(&whole[..25]).unwrap();
    wait_for_bytes(&mux, tcp.id, 25);
    let detached = mux.unattach(tcp.id).unwrap();
    (&tcp.far).write_all(&whole[25..]).unwrap();
    let mut rest = [0; 35];
    std::net::TcpStream::from(detached.socket).read_exact(&mut rest).unwrap();
    let left = [&detached.unread[..], &rest].concat();
    assert_eq!(left, whole);
    check(&[("25 of 60 bytes, unattach, 35 more, left to read", left.len().to_string())]);
}

#[test]
fn nobody_gets_what_was_for_another() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let first = attached(&mux);
    mux.unattach(first.id).unwrap();
    drop(first);
    let sent = mux.send(&message(40, b'a'), Flags::DONTWAIT).map_err(|error| error.errno());
    let second = attached(&mux);
    mux.send(&message(10, b'b'), Flags::NONE).unwrap();
    let mut bytes = [0; 10];
    (&second.far).read_exact(&mut bytes).unwrap();
    // What was sent first would have come first.
    assert_eq!(bytes[..], message(10, b'b'));
    check(&[("send without a connection", outcome(sent)), ("then another client attached gets", second.has())]);
}

#[test]
fn a_closed_descriptor_stays_attached() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let Tcp { near, far, id } = attached(&mux);
    drop(near);
    let tcp = Tcp { near: far.try_clone().unwrap().into(), far, id };
    tcp.put(10, b'a');
    check(&[("connection closed without unattach, then a message", receive(&mux))]);
}

#[test]
fn statistics() {
    own_network();
    let mux = kcm(Kind::Dgram);
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    assert_eq!(receive(&mux), "10 a EOR");
    mux.send(&message(20, b'b'), Flags::NONE).unwrap();
    let all = [mux.stats()];
    let (kcm, stats) = (proc_net_kcm(&all), proc_net_kcm_stats(&all));
    let cells = |text: &str, line: usize| -> Vec<String> {
        text.lines().nth(line).unwrap().split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(cells(&kcm, 0).join(" "), "*** KCM statistics (1 MUX) ****");
    assert_eq!(cells(&kcm, 2).join(" "), "mux 1 10 1 20 - - - - KCMs: 1, Psocks 1");
    assert_eq!(cells(&kcm, 3).join(" "), "kcm-0 1 10 1 20 0 0 0 -");
    assert_eq!(cells(&kcm, 4).join(" "), "psock-0 1 10 1 20 0 0 0 0");
    let of = |name: &str, line: usize| {
        let at = cells(&stats, line).iter().position(|title| title == name).unwrap();
        // The line below has no name in front.
        cells(&stats, line + 1)[at - 1].clone()
    };
    assert_eq!(["RX-Msgs", "TX-Bytes", "Attach", "Unattach"].map(|name| of(name, 0)), ["1", "20", "1", "0"]);
    assert_eq!(["RX-Bytes", "Reserved", "RX-TooBig"].map(|name| of(name, 2)), ["10", "1", "0"]);
    check(&[("/proc/net/kcm", "ok".into()), ("/proc/net/kcm_stats", "ok".into())]);
}
