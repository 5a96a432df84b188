//! Whole messages by the calls of the multiplexor: who gets them, who is answered, what is owed when something fails.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ksf_bpf_framing::FramingProgram;
use ksf_kcm::{AnyMessage, AnyMux, AnySocket, Backend, KcmError};
use ksf_mux::backend::{Endpoint as _, Multiplexor as _, Received as _};
use ksf_mux::{AttachError, ConnectionError, Event, MessageFraming, RecvError, SendError, SendOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::{PATIENCE, Tcp, connection, end_of, message, open, options, wait_for_bytes, wait_until};

type Case = (&'static str, fn(Backend));

pub(crate) fn cases(backend: Backend) {
    let all: [Case; 8] = [
        ("every message is answered once and to its connection", everybody_is_answered),
        ("sockets and connections come and go", come_and_go),
        ("an event loop is told", event_loop),
        ("a message that is given back is received again", given_back),
        ("who waits is told when its socket stops receiving", stopped_while_waiting),
        ("readers that want ends get them after the last message", reports),
        ("a peer that does not read parks its queue and nobody else", slow_reader),
        ("a reset is told, and what was not begun goes elsewhere", reset),
    ];
    for (name, case) in all {
        println!("{backend:?}: {name}");
        case(backend);
    }
}

fn attached(mux: &AnyMux) -> Tcp {
    let (near, far) = connection(None);
    Tcp { near: (), id: mux.attach(near).unwrap(), far }
}

fn next(socket: &AnySocket) -> AnyMessage {
    socket.receive(Some(PATIENCE)).unwrap()
}

fn everybody_is_answered(backend: Backend) {
    const CLIENTS: usize = 6;
    const MESSAGES: usize = 300;
    let mux = open(backend, options());
    let ends: Vec<_> = (0..CLIENTS).map(|_| connection(None)).collect();
    thread::scope(|scope| {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        for _ in 0..3 {
            let (socket, stop) = (mux.socket().unwrap(), Arc::clone(&stop));
            scope.spawn(move || {
                while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                    if let Ok(message) = socket.receive(Some(Duration::from_millis(20))) {
                        message.reply(&message).unwrap();
                    }
                }
            });
        }
        let clients: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(number, (near, mut far))| {
                mux.attach(near).unwrap();
                let letter = b'a' + number as u8;
                let sent: Vec<_> = (0..MESSAGES).map(|at| message(5 + (at * 37 + number) % 400, letter)).collect();
                let bytes = sent.concat();
                let mut writer = far.try_clone().unwrap();
                // Many in a segment, cut anywhere.
                scope.spawn(move || bytes.chunks(1777).for_each(|piece| writer.write_all(piece).unwrap()));
                scope.spawn(move || {
                    let mut answers: Vec<_> = (0..MESSAGES)
                        .map(|_| {
                            let mut head = [0; 4];
                            far.read_exact(&mut head).unwrap();
                            let mut answer = vec![0; u32::from_be_bytes(head) as usize];
                            answer[..4].copy_from_slice(&head);
                            far.read_exact(&mut answer[4..]).unwrap();
                            answer
                        })
                        .collect();
                    let mut sent = sent;
                    answers.sort();
                    sent.sort();
                    assert!(answers == sent, "client {number} got other answers than it sent messages");
                })
            })
            .collect();
        let results: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        results.into_iter().for_each(|result| result.unwrap());
    });
    let stats = mux.kcm_stats();
    let all = (CLIENTS * MESSAGES) as u64;
    assert_eq!((stats.rx_messages, stats.tx_messages, stats.attach), (all, all, CLIENTS as u64));
}

fn come_and_go(backend: Backend) {
    let mux = open(backend, options());
    // A connection from before there is any socket.
    let first = attached(&mux);
    first.put(10, b'a');
    let one = mux.socket().unwrap();
    assert_eq!(*next(&one), message(10, b'a'));
    let two = mux.socket().unwrap();
    let second = attached(&mux);
    let mut names = vec![first.id, second.id];
    let mut found = mux.connections();
    names.sort();
    found.sort();
    assert_eq!(found, names);

    // What waits for a socket that goes, goes to the other one.
    for _ in 0..8 {
        first.put(11, b'b');
        second.put(12, b'c');
    }
    for tcp in [&first, &second] {
        wait_for_bytes(&mux, || one.look().unwrap(), tcp.id, 88);
    }
    drop(one);
    let lengths: Vec<_> = (0..16).map(|_| next(&two).len()).collect();
    assert_eq!(lengths.iter().filter(|bytes| **bytes == 11).count(), 8);

    // Whole messages of a connection that is detached are received; answers to them are not sent to anybody.
    first.put(13, b'd');
    first.put(14, b'e');
    wait_for_bytes(&mux, || two.look().unwrap(), first.id, 27);
    let in_hand = next(&two);
    let detached = mux.detach(first.id).unwrap();
    assert_eq!((detached.unread.len(), detached.lost_bytes), (0, 0));
    let waiting = next(&two);
    assert_eq!(in_hand.len() + waiting.len(), 27);
    for message in [&in_hand, &waiting] {
        assert!(matches!(message.reply(message), Err(SendError::Gone(id)) if id == first.id));
    }
    assert!(mux.detach(first.id).is_none());
    assert!(matches!(two.send_to(first.id, b"x"), Err(SendError::Gone(_))));

    // Those that no socket wanted, too.
    let third = attached(&mux);
    two.set_receiving(false);
    third.put(16, b'g');
    third.put(17, b'h');
    wait_for_bytes(&mux, || two.look().unwrap(), third.id, 33);
    let rest = mux.detach(third.id).unwrap();
    two.set_receiving(true);
    let mut lengths = Vec::new();
    while let Ok(message) = two.receive(Some(Duration::ZERO)) {
        lengths.push(message.len());
    }
    // What was not cut yet is returned, or in TCP still.
    let socket = std::net::TcpStream::from(rest.socket);
    socket.set_nonblocking(true).unwrap();
    let in_tcp = (&socket).read(&mut [0; 64]).unwrap_or(0);
    let all = lengths.iter().sum::<usize>() + rest.unread.len() + in_tcp;
    assert_eq!((all, rest.lost_bytes), (33, 0), "{lengths:?}");

    // It can be attached again, and has another name.
    let again = mux.attach(detached.socket).unwrap();
    assert_ne!(again, first.id);
    first.put(15, b'f');
    let message = next(&two);
    assert_eq!((message.len(), message.connection()), (15, again));
    message.reply(&message).unwrap();
    assert_eq!(first.gets_bytes(15), self::message(15, b'f'));
    drop((message, in_hand, waiting));

    // With the last handle the connections close.
    drop((two, mux));
    assert_eq!((&second.far).read(&mut [0; 8]).unwrap(), 0);
}

fn event_loop(backend: Backend) {
    let mux = open(backend, options());
    let socket = mux.socket().unwrap();
    let tcp = attached(&mux);
    let ready = || {
        let mut set = [PollFd::from_borrowed_fd(socket.poll_fd().unwrap(), PollFlags::IN)];
        poll(&mut set, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap() > 0
    };
    socket.receive(Some(Duration::ZERO)).unwrap_err();
    let mut received = 0;
    for count in 1..=20 {
        tcp.put(10, b'a');
        while received < count {
            assert!(ready(), "nobody was told of message {received}");
            while socket.receive(Some(Duration::ZERO)).is_ok() {
                received += 1;
            }
        }
    }
}

fn given_back(backend: Backend) {
    let mux = open(backend, options());
    let (one, two) = (mux.socket().unwrap(), mux.socket().unwrap());
    let tcp = attached(&mux);
    one.set_receiving(false);
    tcp.put(10, b'a');
    tcp.put(11, b'b');
    let sorted = |mut messages: [AnyMessage; 2]| {
        messages.sort_by_key(|message| message.len());
        messages
    };
    let message = next(&two);
    assert_eq!(message.len(), 10);
    two.give_back(message);
    let [again, younger] = sorted([next(&two), next(&two)]);
    assert_eq!([again.len(), younger.len()], [10, 11]);
    two.give_back(younger);
    two.give_back(again);
    // Another socket gets them too, and one that does not receive gets none.
    assert!(matches!(one.receive(Some(Duration::ZERO)), Err(RecvError::WouldBlock)));
    two.set_receiving(false);
    one.set_receiving(true);
    assert_eq!(sorted([next(&one), next(&one)]).map(|message| message.len()), [10, 11]);
}

fn stopped_while_waiting(backend: Backend) {
    let mux = open(backend, options());
    let socket = mux.socket().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| socket.receive(None));
        thread::park_timeout(Duration::from_millis(20));
        // Whatever comes first, the call or this.
        socket.set_receiving(false);
        if backend == Backend::Kernel {
            assert!(matches!(waiting.join().unwrap(), Err(RecvError::Disabled)));
        } else {
            // ksf's own goes on waiting, for the end of this.
            drop(waiting);
            socket.set_receiving(true);
            let tcp = attached(&mux);
            tcp.put(10, b'a');
        }
    });
}

fn reports(backend: Backend) {
    let mux = open(backend, options());
    let socket = mux.socket().unwrap();
    socket.report_ends();
    let tcp = attached(&mux);
    tcp.put(10, b'a');
    tcp.put(11, b'b');
    tcp.far.shutdown(Shutdown::Write).unwrap();
    assert_eq!([next(&socket).len(), next(&socket).len()], [10, 11]);
    match socket.receive(Some(PATIENCE)) {
        Err(RecvError::Connection { connection, error }) => {
            assert_eq!((connection, error), (tcp.id, ConnectionError::PeerClosed));
        }
        other => panic!("{other:?}"),
    }
    // It can be answered still.
    socket.send_to(tcp.id, &message(9, b'c')).unwrap();
    assert_eq!(tcp.gets_bytes(9), message(9, b'c'));
}

/// The end overtakes messages in the kernel, and waits for them here: whoever is told may detach.
fn the_end_comes_last() {
    let mux = open(Backend::Kernel, options());
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    let (tcp, other) = (attached(&mux), attached(&mux));
    tcp.put(10, b'a');
    tcp.far.shutdown(Shutdown::Write).unwrap();
    // Reported after the first one.
    other.far.shutdown(Shutdown::Write).unwrap();
    let mut first = None;
    wait_until("a connection ends", || {
        first = mux.event();
        first.is_some()
    });
    assert_eq!(first, Some(Event::Ended { connection: other.id, error: ConnectionError::PeerClosed }));
    assert_eq!(next(&socket).connection(), tcp.id);
    assert_eq!(end_of(&mux, || (), tcp.id), ConnectionError::PeerClosed);
}

/// ksf's own keeps what a read has brought; here messages are taken one by one.
fn held_messages() {
    const HELD: usize = 4;
    let mut few = options();
    few.limits.deferred_max = HELD as u32;
    let mux = open(Backend::Kernel, few);
    let socket = mux.socket().unwrap();
    let (tcp, other) = (attached(&mux), attached(&mux));
    (0..3 * HELD).for_each(|_| tcp.put(10, b'a'));
    let mut held: Vec<_> = (0..HELD).map(|_| next(&socket)).collect();
    // No more of this one, while others are received.
    other.put(20, b'b');
    let message = next(&socket);
    assert_eq!(message.connection(), other.id);
    let is_paused = || mux.connection_stats().iter().any(|of| of.connection == tcp.id && of.is_paused);
    wait_until("the connection is paused", || {
        assert!(socket.receive(Some(Duration::ZERO)).is_err());
        is_paused()
    });
    held.pop();
    held.push(next(&socket));
    held.clear();
    let mut left = 2 * HELD - 1;
    while left > 0 {
        assert_eq!(next(&socket).connection(), tcp.id);
        left -= 1;
    }
}

fn slow_reader(backend: Backend) {
    let mux = open(backend, options());
    let socket = mux.socket().unwrap();
    let (slow, quick) = (attached(&mux), attached(&mux));
    let long = message(200_000, b's');
    let mut queued = 0;
    // Until TCP takes no more, and then the queue: what was sent waits, and no worker with it.
    let unsent = || mux.connection_stats().iter().find(|of| of.connection == slow.id).unwrap().unsent_bytes;
    let refused = loop {
        match socket.send_to(slow.id, &long) {
            Ok(()) => queued += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SendError::WouldBlock), "{refused}");
    assert!((256 << 10..(256 << 10) + long.len()).contains(&unsent()), "{}", unsent());
    quick.put(10, b'q');
    let message = next(&socket);
    message.reply(&message).unwrap();
    assert_eq!(quick.gets(), "10");
    // A message for any goes to the other one, and none is too many for it.
    assert_eq!(socket.send(&self::message(8, b'x'), SendOptions::default()).unwrap(), quick.id);
    for _ in 0..queued {
        assert!(slow.gets_bytes(long.len()) == long, "a message is torn");
    }
    wait_until("everything is sent", || unsent() == 0);
}

fn reset(backend: Backend) {
    let mux = open(backend, options());
    // From here on events are kept.
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    let (dying, other) = (attached(&mux), attached(&mux));
    // Half in TCP, half here; the others have not begun.
    let long = message(1_000_000, b'l');
    let mut prefer = SendOptions::default();
    prefer.prefer = Some(dying.id);
    let unsent = || mux.connection_stats().iter().find(|of| of.connection == dying.id).unwrap().unsent_bytes;
    while unsent() == 0 {
        assert_eq!(socket.send(&long, prefer).unwrap(), dying.id);
    }
    let mut wait = SendOptions::default();
    wait.batch = Some(PATIENCE);
    wait.prefer = Some(dying.id);
    let is_full = unsent() >= options().limits.out_queue_bytes_max;
    let last = if is_full { None } else { Some(socket.send(&message(12, b'm'), wait).unwrap()) };
    rustix::net::sockopt::set_socket_linger(&dying.far, Some(Duration::ZERO)).unwrap();
    let (id, far) = (dying.id, dying.far);
    drop(far);
    let mut uncertain = 0;
    let mut error = None;
    wait_until("the reset is told", || {
        let _ = socket.look();
        while let Some(event) = mux.event() {
            match event {
                Event::Ended { connection, error: why } if connection == id => error = Some(why),
                Event::Uncertain { connection, messages } if connection == id => uncertain += messages,
                other => panic!("{other:?}"),
            }
        }
        error.is_some() && uncertain > 0
    });
    assert!(matches!(error, Some(ConnectionError::Socket { .. })), "{error:?}");
    assert_eq!(uncertain, 1, "the one that was begun");
    if last == Some(id) {
        assert_eq!(other.gets_bytes(12), message(12, b'm'));
    }
    assert!(mux.detach(id).is_some());
}

/// What AF_KCM cannot do is said, and what it does wrong does not pass for messages.
pub(crate) fn on_af_kcm_alone(naive: &[u8]) {
    let refused = |change: fn(&mut ksf_mux::MuxOptions)| {
        let mut options = options();
        change(&mut options);
        // Who leaves the choice gets what can do it.
        assert_eq!(AnyMux::open(Backend::Auto, options.clone()).unwrap().backend(), Backend::Ksf);
        match AnyMux::open(Backend::Kernel, options) {
            Err(error @ KcmError::Unsupported { .. }) => assert_eq!(error.errno(), Some(libc::EOPNOTSUPP)),
            other => panic!("{other:?}"),
        }
    };
    refused(|options| options.ordering = ksf::Order::Requests);
    refused(|options| options.class_caps = vec![1]);
    refused(|options| options.detach_ended = true);
    refused(|options| options.limits.header_bytes_max = 100);
    refused(|options| options.limits.shard_bytes_max = 1 << 20);
    assert_eq!(AnyMux::open(Backend::Auto, options()).unwrap().backend(), Backend::Kernel);

    held_messages();
    the_end_comes_last();
    let mux = open(Backend::Kernel, options());
    // From here on events are kept.
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    match mux.attach(UnixStream::pair().unwrap().0.into()) {
        Err(error @ AttachError::NotAStream { .. }) => assert!(error.to_string().contains("TCP only"), "{error}"),
        other => panic!("{other:?}"),
    }
    let instructions = [0xb7, 0, 0, 0, 5, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let bare = FramingProgram::from_instructions(&instructions, &ksf_bpf_framing::FramingOptions::default()).unwrap();
    let attach = |program: FramingProgram, far: &mut Option<_>| {
        let (near, other) = connection(None);
        *far = Some(other);
        mux.attach_limited(near, MessageFraming::Program(Arc::new(program)), options().limits)
    };
    let mut far = None;
    let error = attach(bare, &mut far).unwrap_err();
    assert!(error.to_string().contains("object file"), "{error}");

    // A program that reads at the front of the segment: the first message is right, the second is noticed.
    let program = FramingProgram::from_object(naive, &ksf_bpf_framing::FramingOptions::default()).unwrap();
    let id = attach(program, &mut far).unwrap();
    let tcp = Tcp { near: (), far: far.unwrap(), id };
    (&tcp.far).write_all(&[message(10, b'a'), message(15, b'b'), message(20, b'c')].concat()).unwrap();
    assert_eq!(*next(&socket), message(10, b'a'));
    assert!(socket.receive(Some(Duration::from_millis(100))).is_err());
    let error = end_of(&mux, || (), id);
    assert_eq!(error, ConnectionError::Miscut { bytes: 10 });
    assert!(error.to_string().contains("-DKSF_AF_KCM"), "{error}");
    // Others go on.
    let good = attached(&mux);
    good.put(10, b'd');
    assert_eq!(next(&socket).connection(), good.id);

    // A worker that panics with a message in hand ends that connection.
    good.put(10, b'e');
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _message = next(&socket);
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    assert_eq!(end_of(&mux, || (), good.id), ConnectionError::WorkerPanicked);
    // Nothing is left of it all: no socket, no connection.
    drop((socket, mux));
    wait_until("the kernel has no multiplexor left", || {
        let text = std::fs::read_to_string("/proc/net/kcm").unwrap();
        text.starts_with("*** KCM statistics (0 MUX)")
    });
}
