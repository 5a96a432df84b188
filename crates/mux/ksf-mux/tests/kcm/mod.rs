//! Message sockets with the contract of AF_KCM, as Rust programs call them. The contract's rows are judged by
//! `lab/kcm/contract.c`, which runs on the kernel's sockets and on these (docs/kcm.md); here is what the rows lack.

mod answers;
mod bugs;
mod support;

use std::io::{IoSliceMut, Read as _, Write as _};
use std::net::Shutdown;
use std::time::Duration;

use ksf_mux::kcm::{
    AttachOptions, Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, RecvBuffer, proc_net_kcm, proc_net_kcm_stats,
};
use support::*;

#[test]
fn a_message_goes_into_several_buffers() {
    let mux = own_kcm(Kind::Seqpacket);
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
    let mux = own_kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    let (mut reader, writer) = std::io::pipe().unwrap();
    tcp.put(60, b'a');
    tcp.put(30, b'b');
    mux.set_receive_timeout(Some(PATIENCE));
    let spliced = mux.splice(&writer, 10, Flags::NONE).unwrap();
    assert_eq!((spliced, receive(&mux), receive(&mux)), (10, "50 a EOR".into(), "30 b EOR".into()));
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

/// A disabled socket waits for being enabled, and no longer than it may.
#[test]
fn a_disabled_socket_waits_for_its_time() {
    let mux = kcm(Kind::Dgram);
    mux.set_receive_timeout(Some(Duration::from_millis(50)));
    mux.set_receiving(false);
    assert!(matches!(mux.recv(&mut [0; 64], Flags::NONE), Err(KcmSocketError::WouldBlock)));
}

#[test]
fn several_are_received_for_as_long_as_the_caller_waits() {
    let mux = own_kcm(Kind::Seqpacket);
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    let mut buffers = [[0; 64]; 8];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    mux.set_receive_timeout(Some(PATIENCE));
    assert_eq!(mux.recvmmsg(&mut slots, Flags::WAITFORONE, None).unwrap(), 1);
    let nothing = mux.recvmmsg(&mut slots, Flags::NONE, Some(Duration::from_millis(10)));
    assert!(matches!(nothing, Err(KcmSocketError::WouldBlock)), "{nothing:?}");
}

/// They go before SO_RCVBUF and SO_RCVTIMEO of the connection, which the contract's rows have.
#[test]
fn limits_that_are_given_at_attach_hold() {
    let mux = own_kcm(Kind::Dgram);
    let attached_with = |options| {
        let (near, far) = connection(None);
        let id = mux.attach(near, framing(), options).unwrap();
        Tcp { near: far.try_clone().unwrap().into(), far, id }
    };
    let mut options = AttachOptions::default();
    options.message_bytes_max = Some(100);
    let tcp = attached_with(options);
    tcp.put(100, b'b');
    tcp.put(101, b'c');
    assert_eq!(receive(&mux), "100 b EOR");
    assert_eq!(errno_name(error_of(&mux, tcp.id).errno()), "EMSGSIZE");
    options = AttachOptions::default();
    options.assembly_timeout_ms = Some(20);
    let tcp = attached_with(options);
    (&tcp.far).write_all(&[0]).unwrap();
    assert_eq!(error_of(&mux, tcp.id).to_string(), "a message did not arrive within assembly_timeout_ms (20)");
}

#[test]
fn a_disabled_socket_receives_when_it_is_enabled() {
    let mux = own_kcm(Kind::Dgram);
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
fn readers_that_want_errors_get_them_after_the_last_message() {
    let mux = own_kcm(Kind::Dgram);
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
fn statistics() {
    let mux = own_kcm(Kind::Dgram);
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
}
