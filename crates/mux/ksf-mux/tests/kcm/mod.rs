//! The contract of AF_KCM, row by row: what is observed here must be what `lab/kcm/ours.txt` says, and `docs/kcm.md`
//! puts that beside what AF_KCM does. The rows mirror `lab/kcm/contract.c`.

mod answers;
mod bugs;
mod document;
mod support;

use std::io::{IoSliceMut, Read as _, Write as _};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::common::contract::{self, Open, Rows};
use ksf_mux::kcm::{
    AttachOptions, Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, RecvBuffer, proc_net_kcm, proc_net_kcm_stats,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use support::*;

/// Observes rows that every multiplexor keeps, and compares them with the record.
fn observe(step: fn(Open<'_>, &mut Rows)) {
    own_network();
    let mut rows = Rows::default();
    step(&|kind, options| KcmSocket::new(kind, options).unwrap(), &mut rows);
    assert!(!rows.0.is_empty());
    rows.0.into_iter().for_each(|(row, observed)| check(&[(&row, observed)]));
}

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
    observe(contract::attach_and_unattach);
}

#[test]
fn whole_messages() {
    observe(contract::whole_messages);
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
    observe(contract::clones);
}

#[test]
fn receive_disable() {
    observe(contract::receive_disable);
}

#[test]
fn ends_of_messages_that_are_sent() {
    observe(contract::ends_of_messages);
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
    observe(contract::several_sent_at_once);
}

#[test]
fn connections_take_turns() {
    observe(contract::connections_take_turns);
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
    observe(contract::end_of_stream);
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
    observe(contract::unattach_with_bytes);
}

#[test]
fn nobody_gets_what_was_for_another() {
    observe(contract::nobody_gets_what_was_for_another);
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
