//! What peers, framing programs and callers do wrong, and what each gets for it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, frame, own_network};
use ksf::error::FramingError;
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf::limits::MESSAGE_BYTES_MAX;
use ksf_bpf_framing::{FramingProgram, RunError};
use ksf_mux::{
    AttachError, ConnectionError, ConnectionId, Event, MessageFraming, MessageSocket, Mux, MuxOptions, RecvError,
};
use rustix::io::Errno;

const PREFIX: Framing = Framing::LengthPrefix(LengthPrefix::big_endian(4));

struct Setup {
    mux: Mux,
    socket: MessageSocket,
    client: UnixStream,
    connection: ConnectionId,
}

fn setup(framing: impl Into<MessageFraming>, change: impl FnOnce(&mut MuxOptions)) -> Setup {
    let mut options = MuxOptions::new(framing);
    change(&mut options);
    let mux = Mux::new(options).unwrap();
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    socket.report_ends();
    let (client, server) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let connection = mux.attach(server.into()).unwrap();
    Setup { mux, socket, client, connection }
}

impl Setup {
    /// The end of the connection, as the reader and the monitor are told.
    fn end(&self) -> ConnectionError {
        let error = match self.socket.recv_timeout(PATIENCE) {
            Err(RecvError::Connection { connection, error }) if connection == self.connection => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(self.mux.event(), Some(Event::Ended { connection: self.connection, error: error.clone() }));
        error
    }
}

/// A program of these instructions: opcode, registers, offset, immediate.
fn program(instructions: &[(u8, u8, i16, i32)]) -> MessageFraming {
    let bytes: Vec<u8> = instructions
        .iter()
        .flat_map(|(opcode, registers, offset, immediate)| {
            [&[*opcode, *registers][..], &offset.to_ne_bytes(), &immediate.to_ne_bytes()].concat()
        })
        .collect();
    MessageFraming::Program(Arc::new(FramingProgram::from_instructions(&bytes, &Default::default()).unwrap()))
}

/// A program that always returns `value`.
fn always(value: i32) -> MessageFraming {
    program(&[(0xb7, 0, 0, value), (0x95, 0, 0, 0)])
}

#[test]
fn a_framing_program_that_returns_nonsense_ends_the_connection() {
    let endless = program(&[(0xb7, 0, 0, 1), (0x05, 0, -1, 0), (0x95, 0, 0, 0)]);
    let cases = [
        (always(-74), ConnectionError::Refused { errno: 74 }, Errno::BADMSG),
        (always(-86), ConnectionError::HandedBack, Errno::NODATA),
        (always(-4096), ConnectionError::Program(RunError::NotAnErrno { value: -4096 }), Errno::PROTO),
        (
            always(i32::MAX),
            ConnectionError::OversizedMessage { bytes: i32::MAX as usize, limit: MESSAGE_BYTES_MAX },
            Errno::MSGSIZE,
        ),
        (endless, ConnectionError::Program(RunError::Budget { limit: 10_000 }), Errno::PROTO),
    ];
    for (framing, expected, errno) in cases {
        let mut setup = setup(framing, |_| {});
        setup.client.write_all(b"whatever").unwrap();
        let error = setup.end();
        assert_eq!(error, expected);
        assert_eq!(error.errno(), errno.raw_os_error());
        // Nothing is lost: what cannot be cut is given back.
        assert_eq!(setup.mux.detach(setup.connection).unwrap().unread, b"whatever");
    }
}

#[test]
fn peers_that_break_the_rules_are_told_apart() {
    let short = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };
    let cases: [(Framing, &[u8], ConnectionError); 5] = [
        (PREFIX, &[0, 0x20, 0, 0, 1], ConnectionError::OversizedMessage { bytes: 0x20_0000, limit: MESSAGE_BYTES_MAX }),
        (
            Framing::LengthPrefix(short),
            &[3, 0, 0, 0],
            ConnectionError::Malformed(FramingError::ShorterThanHeader { value: 3, header_bytes: 4 }),
        ),
        (Framing::RecordMark, &[0; 40], ConnectionError::EndlessFragments { limit: 8 }),
        (Framing::Delimiter(Delimiter::LF), &[b'x'; 200], ConnectionError::OversizedMessage { bytes: 101, limit: 100 }),
        (PREFIX, &[0, 0, 0], ConnectionError::PeerClosedMidMessage { bytes: 3 }),
    ];
    for (framing, bytes, expected) in cases {
        let mut setup = setup(framing, |options| {
            options.limits.fragments_max = 8;
            if matches!(framing, Framing::Delimiter(_)) {
                options.limits.message_bytes_max = 100;
            }
        });
        setup.client.write_all(bytes).unwrap();
        if matches!(expected, ConnectionError::PeerClosedMidMessage { .. }) {
            setup.client.shutdown(std::net::Shutdown::Write).unwrap();
        }
        assert_eq!(setup.end(), expected);
    }
}

#[test]
fn a_header_that_never_ends_is_cut_off_at_its_limit() {
    // A program that always wants more: AF_KCM takes bytes for ever (bug B3).
    let mut setup = setup(always(0), |_| {});
    let mut taken = 0;
    while taken < 1 << 20 {
        match setup.client.write(&[7; 1024]) {
            Ok(bytes) => taken += bytes,
            Err(error) => panic!("{error}"),
        }
        match setup.socket.try_recv() {
            Err(RecvError::WouldBlock) => {}
            Err(RecvError::Connection { error, .. }) => {
                let ConnectionError::EndlessHeader { bytes, limit: 4096 } = error else { panic!("{error}") };
                assert!((4097..=4096 + 1024).contains(&bytes), "{bytes}");
                return;
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("{taken} bytes of a header were taken");
}

#[test]
fn a_trickling_peer_has_until_the_timeout_for_a_message() {
    const BYTES: usize = 1000;
    let mut setup = setup(PREFIX, |options| options.limits.assembly_timeout_ms = 100);
    setup.client.write_all(&(BYTES as u32).to_be_bytes()).unwrap();
    let (sent, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let trickle = thread::spawn({
        let (sent, stop) = (Arc::clone(&sent), Arc::clone(&stop));
        move || {
            // One byte short of the message, always in time for a timeout that progress would prolong.
            while sent.load(Ordering::SeqCst) < BYTES - 1 && !stop.load(Ordering::SeqCst) {
                setup.client.write_all(&[1]).unwrap();
                sent.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(5));
            }
            setup.client
        }
    });
    let error = match setup.socket.recv_timeout(PATIENCE) {
        Err(RecvError::Connection { error, .. }) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(error, ConnectionError::AssemblyTimeout { limit_ms: 100 });
    assert!(sent.load(Ordering::SeqCst) < BYTES - 1, "progress prolonged the timeout");
    stop.store(true, Ordering::SeqCst);
    let _client = trickle.join().unwrap();
    let unread = setup.mux.detach(setup.connection).unwrap().unread;
    assert_eq!(unread[..4], (BYTES as u32).to_be_bytes());
    assert!(unread[4..].iter().all(|byte| *byte == 1));
}

#[test]
fn the_time_for_a_message_stands_still_while_its_peer_is_not_read() {
    const LIMIT: Duration = Duration::from_secs(2);
    let mut setup = setup(PREFIX, |options| {
        options.limits.assembly_timeout_ms = PATIENCE.as_millis() as u64;
        options.limits.deferred_max = 1;
    });
    setup.client.write_all(&[&frame(b"first")[..], &[0, 0, 0, 4]].concat()).unwrap();
    let held = setup.socket.recv_timeout(PATIENCE).unwrap();
    // This byte is met by the limit, and left where it is.
    setup.client.write_all(b"f").unwrap();
    assert!(matches!(setup.socket.try_recv(), Err(RecvError::WouldBlock)));
    // The limit from here on: nothing above may take longer than it.
    let mut limits = (*setup.mux.limits()).clone();
    limits.assembly_timeout_ms = LIMIT.as_millis() as u64;
    setup.mux.set_limits(limits);
    thread::sleep(LIMIT + Duration::from_millis(100));
    assert_eq!(setup.mux.event(), None);
    // Read again: from now on the time counts, and the rest does not come.
    let read_again = Instant::now();
    drop(held);
    assert_eq!(setup.end(), ConnectionError::AssemblyTimeout { limit_ms: LIMIT.as_millis() as u64 });
    assert!(read_again.elapsed() > LIMIT / 2, "the time before counted");
}

#[test]
fn a_limit_that_is_set_later_holds_for_connections_that_do_nothing() {
    let setup = setup(PREFIX, |_| {});
    let mut limits = (*setup.mux.limits()).clone();
    limits.idle_timeout_ms = 30;
    setup.mux.set_limits(limits);
    assert_eq!(setup.end(), ConnectionError::IdleTimeout { limit_ms: 30 });
}

#[test]
fn a_flood_is_not_read_beyond_the_limit() {
    let mut setup = setup(PREFIX, |options| options.limits.connection_bytes_max = 100_000);
    setup.client.set_nonblocking(true).unwrap();
    let message = [&1000u32.to_be_bytes()[..], &[7; 1000]].concat();
    // Somebody reads the bytes, nobody finishes with the messages.
    let mut held = Vec::new();
    let mut full = 0;
    while full < 3 {
        match setup.client.write(&message.repeat(20)) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        match setup.socket.try_recv() {
            Ok(message) => {
                held.push(message);
                full = 0;
            }
            Err(RecvError::WouldBlock) => full += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(held.len() < 500, "reading goes on");
    }
    // The limit and what one read brings on top of it.
    assert!((100..=100 + 66).contains(&held.len()), "{}", held.len());
    // Reading goes on when they are done with.
    held.clear();
    assert_eq!(setup.socket.recv_timeout(PATIENCE).unwrap().len(), 1000);
}

#[test]
fn a_reset_reaches_the_reader_after_the_messages() {
    own_network();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut setup = setup(PREFIX, |_| {});
    setup.connection = setup.mux.attach(listener.accept().unwrap().0.into()).unwrap();
    client.write_all(&[0, 0, 0, 1, b'x', 0, 0, 0, 5, b'h']).unwrap();
    assert_eq!(setup.socket.recv_timeout(PATIENCE).unwrap().bytes(), b"x");
    // Closed with a byte unread: TCP sends a reset.
    setup.mux.reply(setup.connection, b"unread").unwrap();
    let mut byte = [0];
    client.read_exact(&mut byte).unwrap();
    drop(client);
    assert_eq!(setup.end(), ConnectionError::Socket { errno: Errno::CONNRESET.raw_os_error() });
}

#[test]
fn a_worker_that_panics_ends_the_connection_of_its_message_only() {
    let mut setup = setup(PREFIX, |_| {});
    let (mut other, server) = UnixStream::pair().unwrap();
    setup.mux.attach(server.into()).unwrap();
    setup.client.write_all(&[0, 0, 0, 1, b'x']).unwrap();
    let worker = setup.socket.try_clone().unwrap();
    let panicked = thread::spawn(move || {
        let _message = worker.recv_timeout(PATIENCE).unwrap();
        panic!("as the test asked for");
    });
    assert!(panicked.join().is_err());
    assert_eq!(setup.end(), ConnectionError::WorkerPanicked);
    other.write_all(&[0, 0, 0, 1, b'y']).unwrap();
    assert_eq!(setup.socket.recv_timeout(PATIENCE).unwrap().bytes(), b"y");
}

#[test]
fn only_connected_stream_sockets_are_attached_and_each_once() {
    own_network();
    let mux = Mux::new(MuxOptions::new(PREFIX)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let fresh = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    let cases: [(OwnedFd, &str); 5] = [
        (listener.as_fd().try_clone_to_owned().unwrap(), "listening"),
        (fresh, "not connected"),
        (udp.into(), "of another type"),
        (UnixDatagram::unbound().unwrap().into(), "of another type"),
        (pipe, "no socket"),
    ];
    for (socket, expected) in cases {
        match mux.attach(socket) {
            Err(error @ AttachError::NotAStream { what }) => {
                assert_eq!((what, error.errno()), (expected, Errno::OPNOTSUPP.raw_os_error()));
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let again = client.try_clone().unwrap();
    let connection = mux.attach(client.into()).unwrap();
    let elsewhere = Mux::new(MuxOptions::new(PREFIX)).unwrap();
    for mux in [&mux, &elsewhere] {
        assert!(matches!(mux.attach(again.try_clone().unwrap().into()), Err(AttachError::Already)));
    }
    // Closing one's own descriptor does not end the connection, detaching does not close it.
    drop(again);
    let detached = mux.detach(connection).unwrap();
    elsewhere.attach(detached.socket).unwrap();
}
