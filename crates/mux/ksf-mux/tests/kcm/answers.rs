//! Which connection a message goes to that names none (docs/kcm.md, "Which connection a message goes to").

use std::io::{IoSlice, IoSliceMut};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::Duration;

use ksf_mux::kcm::{Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, RecvBuffer, Routing};
use rustix::net::sockopt;
use rustix::thread::{Pid, gettid};

use super::support::*;
use crate::common::clients::{answer_many, answer_one, serve};
use crate::common::wait_until;

/// Requests of each client.
const REQUESTS: usize = 20_000;

#[test]
fn every_client_gets_its_own_answers() {
    let mux = own_kcm(Kind::Dgram);
    serve(&mux, REQUESTS, || attached(&mux).far, answer_one);
}

#[test]
fn every_client_gets_its_own_answers_of_workers_that_hold_several() {
    let mux = own_kcm(Kind::Seqpacket);
    serve(&mux, REQUESTS, || attached(&mux).far, answer_many);
}

/// Receives so many messages with one call.
fn receive_many(socket: &KcmSocket, count: usize) {
    let mut buffers = vec![[0; 64]; count];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    socket.set_receive_timeout(Some(PATIENCE));
    assert_eq!(socket.recvmmsg(&mut slots, Flags::NONE, None).unwrap(), count);
}

/// Each of these connections asks, in this order, and the socket receives all with one call.
fn asked_by(socket: &KcmSocket, connections: &[&Tcp]) {
    for tcp in connections {
        tcp.put(10, b'a');
        wait_for_bytes(socket, tcp.id, 10);
    }
    receive_many(socket, connections.len());
}

fn send(socket: &KcmSocket, letter: u8) -> Result<usize, KcmSocketError> {
    socket.send(&message(10, letter), Flags::EOR | Flags::DONTWAIT)
}

/// What the peer gets next.
fn gets(tcp: &Tcp) -> char {
    char::from(tcp.gets_bytes(10)[9])
}

/// The last message of a call has any number of answers, and what has none leaves nothing over.
#[test]
fn answers_may_be_several_or_none() {
    let mux = own_kcm(Kind::Dgram);
    let (one, two) = (attached(&mux), attached(&mux));
    asked_by(&mux, &[&one, &two]);
    "abc".bytes().for_each(|letter| assert_eq!(send(&mux, letter).unwrap(), 10));
    assert_eq!((gets(&one), gets(&two), gets(&two)), ('a', 'b', 'c'));
    asked_by(&mux, &[&two, &two, &two]);
    asked_by(&mux, &[&one]);
    "de".bytes().for_each(|letter| assert_eq!(send(&mux, letter).unwrap(), 10));
    assert_eq!((gets(&one), gets(&one), two.has()), ('d', 'e', "nothing".into()));
}

#[test]
fn the_answer_to_a_connection_that_is_gone_reaches_nobody() {
    let mux = own_kcm(Kind::Dgram);
    let (one, two, three) = (attached(&mux), attached(&mux), attached(&mux));
    asked_by(&mux, &[&one, &two, &three]);
    mux.unattach(two.id).unwrap();
    let answers = [message(10, b'a'), message(10, b'b'), message(10, b'c')];
    let parts: Vec<_> = answers.iter().map(|answer| [IoSlice::new(answer)]).collect();
    let messages: Vec<_> = parts.iter().map(|parts| (&parts[..], Flags::NONE)).collect();
    // The call ends in front of it, so the next one begins with it, and is told.
    assert_eq!(mux.sendmmsg(&messages, Flags::NONE).unwrap(), 1);
    let error = mux.sendmmsg(&messages[1..], Flags::NONE).unwrap_err();
    assert!(
        matches!(error, KcmSocketError::SenderGone(id) if id == two.id) && errno_name(error.errno()) == "ECONNRESET"
    );
    assert_eq!(mux.sendmmsg(&messages[2..], Flags::NONE).unwrap(), 1);
    assert_eq!((gets(&one), gets(&three)), ('a', 'c'));
    // Of the last one it stays so until something is received.
    mux.unattach(three.id).unwrap();
    for _ in 0..2 {
        assert!(matches!(send(&mux, b'd'), Err(KcmSocketError::SenderGone(id)) if id == three.id));
    }
    asked_by(&mux, &[&one]);
    send(&mux, b'e').unwrap();
    assert_eq!((gets(&one), one.has()), ('e', "nothing".into()));
}

/// Half a message that answers somebody does not become the beginning of the next one.
#[test]
fn the_pieces_of_an_answer_go_to_one_connection() {
    let mux = own_kcm(Kind::Seqpacket);
    let (one, two) = (attached(&mux), attached(&mux));
    asked_by(&mux, &[&one]);
    mux.send(&message(10, b'a')[..4], Flags::NONE).unwrap();
    // Received in the middle of what is sent: it is answered after that.
    asked_by(&mux, &[&two]);
    mux.send(&message(10, b'a')[4..], Flags::EOR).unwrap();
    send(&mux, b'b').unwrap();
    assert_eq!((gets(&one), gets(&two)), ('a', 'b'));

    asked_by(&mux, &[&one]);
    mux.send(&message(10, b'c')[..4], Flags::NONE).unwrap();
    mux.unattach(one.id).unwrap();
    let rest = mux.send(&message(10, b'c')[4..], Flags::EOR);
    assert!(matches!(rest, Err(KcmSocketError::SenderGone(id)) if id == one.id), "{rest:?}");
    asked_by(&mux, &[&two]);
    send(&mux, b'd').unwrap();
    assert_eq!((gets(&two), two.has()), ('d', "nothing".into()));
}

/// A message is received with the first piece of it, once; one that was only looked at is not.
#[test]
fn pieces_of_a_request_are_one_message() {
    let mux = own_kcm(Kind::Seqpacket);
    let (one, two) = (attached(&mux), attached(&mux));
    for tcp in [&one, &two] {
        tcp.put(100, b'a');
        wait_for_bytes(&mux, tcp.id, 100);
    }
    // Two slots for the first, and the beginning of the second.
    receive_many(&mux, 3);
    assert_eq!(receive(&mux), "36 a EOR");
    "ab".bytes().for_each(|letter| assert_eq!(send(&mux, letter).unwrap(), 10));
    assert_eq!((gets(&one), gets(&two)), ('a', 'b'));

    one.put(10, b'a');
    assert_eq!(receive_into(&mux, 64, Flags::PEEK), "10 a EOR");
    assert!(mux.is_readable().unwrap());
    send(&mux, b'c').unwrap();
    assert_eq!(gets(&two), 'c');
    assert_eq!(receive(&mux), "10 a EOR");
    send(&mux, b'd').unwrap();
    assert_eq!(gets(&one), 'd');

    let (_reader, writer) = std::io::pipe().unwrap();
    two.put(10, b'a');
    mux.splice(&writer, 4, Flags::NONE).unwrap();
    send(&mux, b'e').unwrap();
    assert_eq!(gets(&two), 'e');
}

#[test]
fn threads_of_one_socket_answer_what_each_received() {
    let mux = own_kcm(Kind::Dgram);
    let (one, two) = (attached(&mux), attached(&mux));
    asked_by(&mux, &[&one]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // It has received nothing itself.
            send(&mux, b'a').unwrap();
            asked_by(&mux, &[&two]);
            send(&mux, b'b').unwrap();
        });
    });
    send(&mux, b'c').unwrap();
    assert_eq!((gets(&one), gets(&two), gets(&one)), ('a', 'b', 'c'));
}

/// However many threads a socket has: each of them answers its own client.
#[test]
fn two_hundred_threads_of_one_socket_answer_what_each_received() {
    const THREADS: u32 = 200;
    let mux = own_kcm(Kind::Dgram);
    let clients: Vec<_> = (0..THREADS).map(|_| attached(&mux)).collect();
    let all_have_received = Barrier::new(clients.len());
    std::thread::scope(|scope| {
        for client in &clients {
            // One after the other, so that each thread receives of the client that is named here.
            let (has_received, received) = channel();
            let (mux, all_have_received) = (&mux, &all_have_received);
            scope.spawn(move || {
                asked_by(mux, &[client]);
                has_received.send(()).unwrap();
                all_have_received.wait();
                mux.send(&numbered(client.id.index), Flags::NONE).unwrap();
            });
            received.recv().unwrap();
        }
    });
    for client in &clients {
        assert_eq!(client.gets_bytes(10), numbered(client.id.index), "of the thread that received it");
    }
}

/// A message of 10 bytes that says a number.
fn numbered(number: u32) -> Vec<u8> {
    [&message(10, b'n')[..6], &number.to_be_bytes()].concat()
}

/// One peer that does not read is waited for by those that answer it, and by nobody else.
#[test]
fn an_answer_waits_for_room_on_its_connection() {
    own_network();
    let mut options = KcmOptions::default();
    options.limits.connection_bytes_max = 100_000;
    options.limits.out_queue_bytes_max = 50_000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let (slow, quick) = (attached(&mux), attached(&mux));
    sockopt::set_socket_send_buffer_size(&slow.near, 16_384).unwrap();
    let other = mux.try_clone().unwrap();
    asked_by(&other, &[&quick]);
    asked_by(&mux, &[&slow]);
    let long = message(20_000, b'l');
    let mut queued = 0;
    let full = loop {
        match mux.send(&long, Flags::DONTWAIT) {
            Ok(bytes) => queued += bytes,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, KcmSocketError::WouldBlock), "{full}");
    assert!(queued > 100_000, "answers have the budget of the connection: {queued}");
    assert!(!mux.is_writable() && other.is_writable());
    send(&other, b'q').unwrap();
    assert_eq!(gets(&quick), 'q');
    // What waited goes where it was to go.
    std::thread::scope(|scope| {
        scope.spawn(|| mux.send(&message(10, b's'), Flags::NONE).unwrap());
        slow.gets_bytes(queued);
        assert_eq!(gets(&slow), 's');
    });
    assert!(mux.is_writable());
    assert_eq!(quick.has(), "nothing");
}

/// A socket of several threads, the connection of a peer that does not read, and another one.
struct SharedSocket {
    mux: KcmSocket,
    slow: Tcp,
    quick: Tcp,
}

impl SharedSocket {
    fn new(kind: Kind) -> Self {
        let mut options = KcmOptions::default();
        options.limits.connection_bytes_max = 500_000;
        options.limits.out_queue_bytes_max = 50_000;
        let mux = KcmSocket::new(kind, options).unwrap();
        mux.set_send_timeout(Some(PATIENCE));
        let (slow, quick) = (attached(&mux), attached(&mux));
        sockopt::set_socket_send_buffer_size(&slow.near, 16_384).unwrap();
        Self { mux, slow, quick }
    }

    /// The calling thread receives from the slow connection, and answers with more than TCP and the budget of the
    /// connection have room for. Returns the length.
    fn fill(&self) -> usize {
        asked_by(&self.mux, &[&self.slow]);
        let long = message(1_000_000, b'l');
        assert_eq!(self.mux.send(&long, Flags::EOR | Flags::DONTWAIT).unwrap(), long.len());
        assert!(!self.mux.is_writable());
        long.len()
    }
}

/// Waits until this thread of the process sleeps.
fn sleeps(thread: Pid) {
    let stat = format!("/proc/self/task/{thread}/stat");
    wait_until("the thread sleeps", || std::fs::read_to_string(&stat).unwrap().contains(") S "));
}

#[test]
fn a_thread_that_waits_for_room_holds_up_no_other_of_its_socket() {
    own_network();
    let shared = SharedSocket::new(Kind::Dgram);
    let SharedSocket { mux, slow, quick } = &shared;
    asked_by(mux, &[quick]);
    std::thread::scope(|scope| {
        let (about_to_wait, waits) = channel();
        let shared = &shared;
        let answerer = scope.spawn(move || {
            let queued = shared.fill();
            about_to_wait.send((gettid(), queued)).unwrap();
            mux.send(&message(10, b's'), Flags::NONE).unwrap();
        });
        let (thread, queued) = waits.recv_timeout(PATIENCE).unwrap();
        sleeps(thread);
        assert!(mux.is_writable());
        send(mux, b'q').unwrap();
        mux.send(&message(10, b'r')[..4], Flags::MORE | Flags::DONTWAIT).unwrap();
        mux.send(&message(10, b'r')[4..], Flags::DONTWAIT).unwrap();
        assert_eq!((gets(quick), gets(quick)), ('q', 'r'));
        assert!(!answerer.is_finished());
        slow.gets_bytes(queued);
        assert_eq!((gets(slow), quick.has()), ('s', "nothing".into()));
    });
}

/// A message in pieces that waits for room is waited for by the first piece of another one, and by no message that is
/// whole.
#[test]
fn a_message_in_pieces_that_waits_for_room_keeps_its_beginning() {
    own_network();
    let shared = SharedSocket::new(Kind::Seqpacket);
    let SharedSocket { mux, slow, quick } = &shared;
    asked_by(mux, &[quick]);
    std::thread::scope(|scope| {
        let (about_to_wait, waits) = channel();
        let (shared, also_about_to_wait) = (&shared, about_to_wait.clone());
        let answerer = scope.spawn(move || {
            let queued = shared.fill();
            let whole = message(10, b's');
            let (begin, end) = whole.split_at(4);
            mux.send(begin, Flags::NONE).unwrap();
            mux.set_send_timeout(Some(Duration::from_millis(20)));
            let late = mux.send(end, Flags::EOR);
            assert!(matches!(late, Err(KcmSocketError::WouldBlock)), "{late:?}");
            mux.set_send_timeout(Some(PATIENCE));
            about_to_wait.send((gettid(), queued)).unwrap();
            mux.send(end, Flags::EOR).unwrap();
        });
        let (thread, queued) = waits.recv_timeout(PATIENCE).unwrap();
        sleeps(thread);
        send(mux, b'q').unwrap();
        assert_eq!(gets(quick), 'q');
        let begun = mux.send(&message(10, b'r')[..4], Flags::DONTWAIT);
        assert!(matches!(begun, Err(KcmSocketError::WouldBlock)), "{begun:?}");
        // One that may wait begins when the other one is queued.
        let beginner = scope.spawn(move || {
            asked_by(mux, &[quick]);
            also_about_to_wait.send((gettid(), 0)).unwrap();
            mux.send(&message(10, b'r')[..4], Flags::NONE).unwrap();
            mux.send(&message(10, b'r')[4..], Flags::EOR).unwrap();
        });
        sleeps(waits.recv_timeout(PATIENCE).unwrap().0);
        assert!(!answerer.is_finished() && !beginner.is_finished());
        slow.gets_bytes(queued);
        assert_eq!((gets(slow), gets(quick)), ('s', 'r'));
    });
}

/// Answers to several connections leave with their call, although all but the last of them may wait for more.
#[test]
fn answers_of_one_call_leave_at_once() {
    own_network();
    let mut options = KcmOptions::default();
    options.batch_timeout_ms = 3_600_000;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let (one, two) = (attached(&mux), attached(&mux));
    asked_by(&mux, &[&one, &one, &two, &one, &two]);
    let answers: Vec<_> = (b'a'..=b'e').map(|letter| message(10, letter)).collect();
    let parts: Vec<_> = answers.iter().map(|answer| [IoSlice::new(answer)]).collect();
    let messages: Vec<_> = parts.iter().map(|parts| (&parts[..], Flags::NONE)).collect();
    assert_eq!(mux.sendmmsg(&messages, Flags::NONE).unwrap(), 5);
    assert_eq!((gets(&one), gets(&one), gets(&one)), ('a', 'b', 'd'));
    assert_eq!((gets(&two), gets(&two)), ('c', 'e'));
}

#[test]
fn who_asks_for_turns_gets_them() {
    own_network();
    let mut options = KcmOptions::default();
    options.routing = Routing::InTurn;
    let mux = KcmSocket::new(Kind::Dgram, options).unwrap();
    let (one, two) = (attached(&mux), attached(&mux));
    asked_by(&mux, &[&one]);
    "ab".bytes().for_each(|letter| assert_eq!(send(&mux, letter).unwrap(), 10));
    assert_eq!((gets(&one), gets(&two)), ('a', 'b'));
}
