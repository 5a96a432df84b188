//! Rows of AF_KCM's contract, as any multiplexor keeps it: what is observed is compared with the records by those that
//! bring one.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ksf_bpf_framing::{BuiltinFraming, FramingProgram};
use ksf_mux::kcm::{
    AttachOptions, Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, NotAttached, RecvBuffer, RecvInfo, proc_net_kcm,
    proc_net_kcm_stats,
};
use ksf_mux::{ConnectionError, ConnectionId, Event, Mux};
use rustix::io::Errno;

use super::{PATIENCE, Tcp, connection, message, wait_until};

/// Makes the first socket of a multiplexor.
pub(crate) type Open<'a> = &'a dyn Fn(Kind, KcmOptions) -> KcmSocket;

/// What was observed: the row, and what happened.
#[derive(Default)]
pub(crate) struct Rows(pub(crate) Vec<(String, String)>);

impl Rows {
    fn add(&mut self, row: impl Into<String>, observed: impl Into<String>) {
        self.0.push((row.into(), observed.into()));
    }
}

/// A length of four bytes that counts itself, kept in the message: a program that finds the message also in AF_KCM.
pub(crate) fn program() -> Arc<FramingProgram> {
    let builtin = BuiltinFraming::LengthPrefix { offset: 0, width: 4, big_endian: true, adjust: 0 };
    Arc::new(FramingProgram::builtin(&builtin, &ksf_bpf_framing::FramingOptions::default()).unwrap())
}

fn socket(open: Open<'_>, kind: Kind) -> KcmSocket {
    open(kind, KcmOptions::default())
}

fn attached_with(socket: &KcmSocket, receive_buffer: Option<usize>) -> Tcp {
    let (near, far) = connection(receive_buffer);
    let id = socket.attach(near, program(), AttachOptions::default()).unwrap();
    Tcp { near: (), far, id }
}

pub(crate) fn attached(socket: &KcmSocket) -> Tcp {
    attached_with(socket, None)
}

/// The end of a connection, waited for. `look`: has ksf's multiplexor read what nobody receives.
pub(crate) fn end_of(mux: &Mux, look: impl Fn(), connection: ConnectionId) -> ConnectionError {
    let mut error = None;
    wait_until("the connection ends", || {
        look();
        while let Some(event) = mux.event() {
            match event {
                Event::Ended { connection: ended, error: why } if ended == connection => error = Some(why),
                _ => {}
            }
        }
        error.is_some()
    });
    error.unwrap()
}

/// Waits until so many bytes have come on a connection that nobody has received.
pub(crate) fn wait_for_bytes(mux: &Mux, look: impl Fn(), connection: ConnectionId, bytes: usize) {
    wait_until("bytes arrive", || {
        look();
        let all = mux.connection_stats();
        all.iter().any(|of| of.connection == connection && of.waiting_bytes >= bytes)
    });
}

/// The same, for a message socket.
pub(crate) fn arrives(socket: &KcmSocket, connection: ConnectionId, bytes: usize) {
    wait_for_bytes(socket.mux(), || socket.look().unwrap(), connection, bytes);
}

fn ends(socket: &KcmSocket, connection: ConnectionId) -> ConnectionError {
    end_of(socket.mux(), || socket.look().unwrap(), connection)
}

pub(crate) fn errno_name(errno: i32) -> String {
    let known = [
        (Errno::AGAIN, "EAGAIN"),
        (Errno::ALREADY, "EALREADY"),
        (Errno::BADMSG, "EBADMSG"),
        (Errno::CONNRESET, "ECONNRESET"),
        (Errno::MSGSIZE, "EMSGSIZE"),
        (Errno::NOENT, "ENOENT"),
        (Errno::NOTCONN, "ENOTCONN"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::PIPE, "EPIPE"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::SOCKTNOSUPPORT, "ESOCKTNOSUPPORT"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
    ];
    let found = known.iter().find(|(known, _)| known.raw_os_error() == errno);
    found.map_or_else(|| format!("error {errno}"), |(_, name)| (*name).to_owned())
}

pub(crate) fn outcome<T>(result: Result<T, i32>) -> String {
    result.map_or_else(errno_name, |_| "ok".to_owned())
}

pub(crate) fn describe(buffer: &[u8], received: Result<RecvInfo, KcmSocketError>) -> String {
    match received {
        Err(KcmSocketError::WouldBlock) => "nothing".into(),
        Err(error) => errno_name(error.errno()),
        Ok(received) => {
            let last = char::from(buffer[received.bytes - 1]);
            let last = if last < ' ' { '-' } else { last };
            let has = |flag, name| if received.flags.contains(flag) { name } else { "" };
            format!("{} {last}{}{}", received.bytes, has(Flags::TRUNC, " TRUNC"), has(Flags::EOR, " EOR"))
        }
    }
}

pub(crate) fn receive_into(socket: &KcmSocket, size: usize, flags: Flags) -> String {
    let mut buffer = vec![0; 1 << 20];
    socket.set_receive_timeout(Some(PATIENCE));
    let received = socket.recv(&mut buffer[..size], flags);
    describe(&buffer, received)
}

pub(crate) fn receive(socket: &KcmSocket) -> String {
    receive_into(socket, 1 << 20, Flags::NONE)
}

pub(crate) fn receive_now(socket: &KcmSocket) -> String {
    receive_into(socket, 1 << 20, Flags::DONTWAIT)
}

pub(crate) fn drain(socket: &KcmSocket) -> usize {
    std::iter::repeat_with(|| receive_now(socket)).take_while(|what| what != "nothing").count()
}

pub(crate) fn attach_and_unattach(open: Open<'_>, rows: &mut Rows) {
    let (mux, other) = (socket(open, Kind::Dgram), socket(open, Kind::Dgram));
    let attach = |mux: &KcmSocket, socket: OwnedFd| {
        outcome(mux.attach(socket, program(), AttachOptions::default()).map_err(|error| error.errno()))
    };
    let unattach = |mux: &KcmSocket, socket: &OwnedFd| {
        let connection = mux.connection_of(socket);
        let detached = connection.ok_or(NotAttached).and_then(|connection| mux.unattach(connection));
        outcome(detached.map_err(|error| error.errno()))
    };
    let unconnected =
        || rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let (near, _far) = connection(None);
    let clone = || near.try_clone().unwrap();
    rows.add("attach a listening socket", attach(&mux, TcpListener::bind("127.0.0.1:0").unwrap().into()));
    rows.add("attach an unconnected socket", attach(&mux, unconnected()));
    rows.add("attach a UDP socket", attach(&mux, UdpSocket::bind("127.0.0.1:0").unwrap().into()));
    rows.add("attach", attach(&mux, clone()));
    rows.add("attach again", attach(&mux, clone()));
    rows.add("attach to another mux", attach(&other, clone()));
    rows.add("unattach from another mux", unattach(&other, &near));
    rows.add("unattach", unattach(&mux, &near));
    rows.add("unattach again", unattach(&mux, &near));
    rows.add("attach after unattach", attach(&mux, clone()));
}

pub(crate) fn whole_messages(open: Open<'_>, rows: &mut Rows) {
    for (kind, name) in [(Kind::Dgram, "DGRAM"), (Kind::Seqpacket, "SEQPACKET")] {
        let mux = socket(open, kind);
        let tcp = attached(&mux);
        let nothing = mux.recv(&mut [0; 64], Flags::DONTWAIT).map_err(|error| error.errno());
        rows.add(format!("{name}, nothing there, MSG_DONTWAIT"), outcome(nothing));
        tcp.put(10, b'a');
        tcp.put(20, b'b');
        let got = [receive(&mux), receive(&mux), receive_now(&mux)].join(", ");
        rows.add(format!("{name}, two messages"), got);

        tcp.put(50, b'a');
        tcp.put(30, b'b');
        let got = [receive_into(&mux, 20, Flags::NONE), receive(&mux)];
        // The third is there in one kind only.
        let third = if kind == Kind::Dgram { receive_now(&mux) } else { receive(&mux) };
        rows.add(format!("{name}, 20 of 50 bytes, then the rest"), [got.join(", "), third].join(", "));

        tcp.put(50, b'a');
        let got = [receive_into(&mux, 20, Flags::PEEK), receive_into(&mux, 20, Flags::TRUNC)].join(", ");
        rows.add(format!("{name}, MSG_PEEK, then MSG_TRUNC, of 20 of 50 bytes"), got);
        drain(&mux);

        for (at, piece) in message(30, b'p').chunks(3).enumerate() {
            (&tcp.far).write_all(piece).unwrap();
            arrives(&mux, tcp.id, (at + 1) * 3);
        }
        rows.add(format!("{name}, 30 bytes, three at a time"), receive(&mux));
    }
    let mux = socket(open, Kind::Dgram);
    mux.set_receive_timeout(Some(Duration::from_millis(50)));
    let received = mux.recv(&mut [0; 64], Flags::NONE).map_err(|error| error.errno());
    rows.add("blocking receive, SO_RCVTIMEO of the message socket", outcome(received));
}

pub(crate) fn splice(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Seqpacket);
    let tcp = attached(&mux);
    let (mut reader, writer) = std::io::pipe().unwrap();
    tcp.put(60, b'a');
    tcp.put(30, b'b');
    mux.set_receive_timeout(Some(PATIENCE));
    let spliced = mux.splice(&writer, 10, Flags::NONE).unwrap();
    let observed = format!("{spliced}, {}, {}", receive(&mux), receive(&mux));
    rows.add("SEQPACKET, splice 10 of 60 bytes, then the rest", observed);
    let mut bytes = [0; 10];
    reader.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..], message(60, b'a')[..10]);
}

pub(crate) fn many_at_once(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Seqpacket);
    let tcp = attached(&mux);
    (0..5).for_each(|at| tcp.put(10 + at, b'a'));
    arrives(&mux, tcp.id, 60);
    let mut buffers = [[0; 64]; 8];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    // The kernel may be at the last one still.
    mux.set_receive_timeout(Some(PATIENCE));
    let count = mux.recvmmsg(&mut slots[..5], Flags::NONE, None).unwrap();
    assert!(mux.recvmmsg(&mut slots[5..], Flags::DONTWAIT, None).is_err());
    let last = slots[count - 1].received.unwrap();
    rows.add("recvmmsg of 8, five there", format!("{count}, the last of {} bytes", last.bytes));
}

pub(crate) fn one_segment(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let tcp = attached(&mux);
    let all: Vec<u8> = (0..6).flat_map(|at| message(10 + 5 * at, b'a' + at as u8)).collect();
    (&tcp.far).write_all(&all).unwrap();
    let lengths: Vec<_> = (0..6).map(|_| receive(&mux).split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(receive_now(&mux), "nothing");
    let error = if mux.event().is_none() { "none" } else { "some" };
    let row = "10 15 20 25 30 35 in one segment, offset-aware program";
    rows.add(row, format!("{}; error {error}", lengths.join(" ")));
}

pub(crate) fn clones(open: Open<'_>, rows: &mut Rows) {
    let first = socket(open, Kind::Seqpacket);
    let sockets = [first.try_clone().unwrap(), first.try_clone().unwrap(), first.try_clone().unwrap()];
    let kind = if sockets[0].kind() == Kind::Seqpacket { "SOCK_SEQPACKET" } else { "SOCK_DGRAM" };
    rows.add("type of a clone of SOCK_SEQPACKET", kind);
    let tcp = attached(&first);
    for count in 1..=40 {
        // Each in a segment of its own, which the kernel deals out as one.
        tcp.put(10, b'a');
        arrives(&first, tcp.id, count * 10);
    }
    let mut counts = [0; 4];
    wait_until("all are received", || {
        counts[0] += drain(&first);
        for (count, socket) in counts[1..].iter_mut().zip(&sockets) {
            *count += drain(socket);
        }
        counts.iter().sum::<usize>() == 40
    });
    let counts = counts.map(|count| count.to_string()).join(" ");
    rows.add("40 messages for four sockets, nobody reading", counts);
}

pub(crate) fn receive_disable(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let other = mux.try_clone().unwrap();
    let tcp = attached(&mux);
    mux.set_receiving(false);
    rows.add("KCM_RECV_DISABLE", "ok");
    rows.add("KCM_RECV_DISABLE, read back", i32::from(!mux.is_receiving()).to_string());
    // What is there, when all of it has come.
    let count = |wanted: usize| {
        let mut counts = [0, 0];
        wait_until("all are received", || {
            counts[0] += drain(&mux);
            counts[1] += drain(&other);
            counts.iter().sum::<usize>() == wanted
        });
        counts.map(|count| count.to_string()).join(" ")
    };
    let put = |count: usize| (0..count).for_each(|_| tcp.put(10, b'a'));
    put(4);
    rows.add("four messages, this socket disabled, the other not", count(4));

    // Disabled with a message in its hand, which it has peeked at.
    mux.set_receiving(true);
    put(4);
    other.set_receiving(false);
    assert_eq!(receive_into(&mux, 64, Flags::PEEK), "10 a EOR");
    other.set_receiving(true);
    mux.set_receiving(false);
    rows.add("four messages, then this socket disabled", count(4));

    other.set_receiving(false);
    tcp.put(10, b'a');
    tcp.put(11, b'b');
    arrives(&mux, tcp.id, 21);
    let here = drain(&mux) + drain(&other);
    other.set_receiving(true);
    let there = [receive(&other), receive(&other)].len() + drain(&other);
    rows.add("two messages, all sockets disabled, then one enabled", format!("{here}, {there}"));

    drop(other);
    tcp.put(10, b'a');
    arrives(&mux, tcp.id, 10);
    let here = drain(&mux);
    mux.set_receiving(true);
    let there = [receive(&mux)].len() + drain(&mux);
    rows.add("the other socket closed, this one disabled, then enabled", format!("{here}, {there}"));
}

pub(crate) fn ends_of_messages(open: Open<'_>, rows: &mut Rows) {
    for (kind, name) in [(Kind::Dgram, "DGRAM"), (Kind::Seqpacket, "SEQPACKET")] {
        let mux = socket(open, kind);
        let tcp = attached(&mux);
        let send = |letter, flags| assert_eq!(mux.send(&message(10, letter), flags).unwrap(), 10);
        send(b'a', Flags::NONE);
        let before = if kind == Kind::Dgram { tcp.gets() } else { tcp.has() };
        send(b'b', Flags::EOR);
        rows.add(format!("{name}, send 10, then 10 with MSG_EOR"), format!("{before}, {}", tcp.gets()));
        send(b'a', Flags::MORE);
        let before = tcp.has();
        send(b'b', Flags::EOR);
        rows.add(format!("{name}, send 10 with MSG_MORE, then 10 with MSG_EOR"), format!("{before}, {}", tcp.gets()));
        // No call sends more: the timer thread ends the batch.
        send(b'a', Flags::BATCH | Flags::EOR);
        let before = tcp.gets();
        send(b'b', Flags::EOR);
        rows.add(format!("{name}, send 10 with MSG_BATCH, then 10"), format!("{before}, {}", tcp.gets()));
        let nothing = mux.send(&[], Flags::EOR).map_err(|error| error.errno());
        rows.add(format!("{name}, send nothing"), outcome(nothing));
        assert_eq!(tcp.has(), "nothing");
    }
}

pub(crate) fn several_sent_at_once(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Seqpacket);
    let tcp = [attached(&mux), attached(&mux)];
    let messages = [message(10, b'a'), message(11, b'b')];
    let parts = [[IoSlice::new(&messages[0])], [IoSlice::new(&messages[1])]];
    let sent = mux.sendmmsg(&[(&parts[0], Flags::EOR), (&parts[1], Flags::EOR)], Flags::DONTWAIT).unwrap();
    let first = tcp[0].gets();
    let observed = format!("{sent} sent; connections: {first}, {}", tcp[1].has());
    rows.add("SEQPACKET, sendmmsg of 10 and 11 with MSG_EOR in each", observed);
}

pub(crate) fn connections_take_turns(open: Open<'_>, rows: &mut Rows) {
    for (flags, name) in [(Flags::NONE, "each pushed"), (Flags::BATCH, "all but the last with MSG_BATCH")] {
        let mut patient = KcmOptions::default();
        patient.batch_timeout_ms = 60_000;
        let mux = open(Kind::Dgram, patient);
        let tcp = [attached(&mux), attached(&mux), attached(&mux), attached(&mux)];
        for at in 0..16 {
            mux.send(&message(10, b'a'), if at < 15 { flags } else { Flags::NONE }).unwrap();
        }
        let sent = mux.stats();
        let counts = sent.connections.iter().map(|of| of.tx_messages.to_string()).collect::<Vec<_>>().join(" ");
        rows.add(format!("16 messages over four connections, {name}"), counts);
        for (tcp, of) in tcp.iter().zip(&sent.connections) {
            assert_eq!(tcp.gets_bytes(of.tx_messages as usize * 10).len(), of.tx_messages as usize * 10);
            assert_eq!(tcp.has(), "nothing");
        }
    }
}

pub(crate) fn nobody_gets_what_was_for_another(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let first = attached(&mux);
    mux.unattach(first.id).unwrap();
    drop(first);
    let sent = mux.send(&message(40, b'a'), Flags::DONTWAIT).map_err(|error| error.errno());
    let second = attached(&mux);
    mux.send(&message(10, b'b'), Flags::NONE).unwrap();
    // What was sent first would have come first.
    assert_eq!(second.gets_bytes(10), message(10, b'b'));
    rows.add("send without a connection", outcome(sent));
    rows.add("then another client attached gets", second.has());
    second.put(10, b'a');
    rows.add("connection closed without unattach, then a message", receive(&mux));
}

pub(crate) fn answers(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let tcp = [attached(&mux), attached(&mux), attached(&mux), attached(&mux)];
    let send = |letter| mux.send(&message(10, letter), Flags::DONTWAIT).map_err(|error| error.errno());
    for (at, letter) in [(3, b'd'), (2, b'c'), (1, b'b'), (0, b'a')] {
        tcp[at].put(10, letter);
        assert_eq!(receive(&mux).as_bytes()[3], letter);
        send(letter).unwrap();
    }
    let got = || tcp.iter().map(|tcp| char::from(tcp.gets_bytes(10)[9]).to_string()).collect::<Vec<_>>().join(" ");
    rows.add("four connections ask, 4 3 2 1, each is answered at once", got());

    for (at, letter) in [(3, b'd'), (2, b'c'), (1, b'b'), (0, b'a')] {
        tcp[at].put(10, letter);
        arrives(&mux, tcp[at].id, 10);
    }
    let mut buffers = [[0; 64]; 4];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    assert_eq!(mux.recvmmsg(&mut slots, Flags::NONE, None).unwrap(), 4);
    // In whichever order they came.
    buffers.iter().for_each(|buffer| assert_eq!(send(buffer[9]).unwrap(), 10));
    rows.add("the same, received with one call, then answered", got());

    tcp[0].put(10, b'a');
    receive(&mux);
    mux.unattach(tcp[0].id).unwrap();
    let other = attached(&mux);
    rows.add("a client asks and is unattached, then its answer", outcome(send(b'a')));
    rows.add("and another client gets", other.has());
}

pub(crate) fn errors_of_connections(open: Open<'_>, rows: &mut Rows) {
    // Shorter than its header, which the program refuses as such a one in C would.
    let mux = socket(open, Kind::Dgram);
    let tcp = attached(&mux);
    (&tcp.far).write_all(&3_u32.to_be_bytes()).unwrap();
    let error = errno_name(ends(&mux, tcp.id).errno());
    let woken = if receive_now(&mux) == "nothing" { "not woken" } else { "woken" };
    rows.add("program returns -EBADMSG", format!("{error} on the connection; reader {woken}"));

    let mux = socket(open, Kind::Dgram);
    let (near, far) = connection(None);
    let mut short = AttachOptions::default();
    short.assembly_timeout_ms = Some(1000);
    let tcp = Tcp { near: (), id: mux.attach(near, program(), short).unwrap(), far };
    (&tcp.far).write_all(&message(64, b'a')[..20]).unwrap();
    let error = errno_name(ends(&mux, tcp.id).errno());
    rows.add("20 of 64 bytes, SO_RCVTIMEO 1 s", format!("{error} on the connection"));

    // Longer than the receive buffer that AF_KCM was given, too: its bytes stay in TCP.
    let mux = socket(open, Kind::Dgram);
    let tcp = attached_with(&mux, Some(8192));
    let long = message(200_000, b'a');
    let writer = std::thread::spawn({
        let (mut far, long) = (tcp.far.try_clone().unwrap(), long.clone());
        move || far.write_all(&long)
    });
    let error = errno_name(ends(&mux, tcp.id).errno());
    let detached = mux.unattach(tcp.id).unwrap();
    let mut rest = vec![0; long.len() - detached.unread.len()];
    std::net::TcpStream::from(detached.socket).read_exact(&mut rest).unwrap();
    assert_eq!([detached.unread, rest].concat(), long);
    writer.join().unwrap().unwrap();
    let observed = format!("{error} on the connection; its bytes can be read after unattach");
    rows.add("message longer than SO_RCVBUF", observed);
}

pub(crate) fn end_of_stream(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let (near, far) = connection(None);
    let watched = near.try_clone().unwrap();
    let tcp = Tcp { near: (), id: mux.attach(near, program(), AttachOptions::default()).unwrap(), far };
    tcp.put(10, b'a');
    (&tcp.far).write_all(&message(64, b'b')[..20]).unwrap();
    tcp.far.shutdown(Shutdown::Write).unwrap();
    // On AF_KCM the end is told when the last message was received.
    let got = receive(&mux);
    let error = ends(&mux, tcp.id);
    assert_eq!(error.to_string(), "the peer closed the connection inside a message, after 20 bytes of it");
    let mut hung_up = [rustix::event::PollFd::new(&watched, rustix::event::PollFlags::RDHUP)];
    assert_eq!(rustix::event::poll(&mut hung_up, None).unwrap(), 1);
    let error = errno_name(error.errno());
    let observed = format!("{error} on the connection, POLLRDHUP; reader: {got}, {}", receive_now(&mux));
    rows.add("a message, half of one, FIN", observed);
}

pub(crate) fn unattach_with_bytes(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let tcp = attached(&mux);
    let whole = message(60, b'a');
    (&tcp.far).write_all(&whole[..25]).unwrap();
    arrives(&mux, tcp.id, 25);
    let detached = mux.unattach(tcp.id).unwrap();
    assert_eq!(detached.unread.len(), 25);
    (&tcp.far).write_all(&whole[25..]).unwrap();
    let mut rest = [0; 35];
    std::net::TcpStream::from(detached.socket).read_exact(&mut rest).unwrap();
    let left = [&detached.unread[..], &rest].concat();
    assert_eq!(left, whole);
    rows.add("25 of 60 bytes, unattach, 35 more, left to read", left.len().to_string());
}

pub(crate) fn statistics(open: Open<'_>, rows: &mut Rows) {
    let mux = socket(open, Kind::Dgram);
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    assert_eq!(receive(&mux), "10 a EOR");
    mux.send(&message(20, b'b'), Flags::NONE).unwrap();
    let all = [mux.stats()];
    let (kcm, stats) = (proc_net_kcm(&all), proc_net_kcm_stats(&all));
    let line = |at: usize| kcm.lines().nth(at).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(line(2), "mux 1 10 1 20 - - - - KCMs: 1, Psocks 1");
    assert_eq!(line(4), "psock-0 1 10 1 20 0 0 0 0");
    assert!(stats.contains("Attach"), "{stats}");
    rows.add("/proc/net/kcm", "ok");
    rows.add("/proc/net/kcm_stats", "ok");
}
