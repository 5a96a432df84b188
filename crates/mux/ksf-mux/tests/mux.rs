//! Connections on one side, workers on the other, on real sockets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{PATIENCE, frame, read_frame, wait_until};
use ksf::framing::{Framing, LengthPrefix};
use ksf_mux::{ConnectionError, Event, Mux, MuxOptions, RecvError, SendError, SendOptions};

fn options() -> MuxOptions {
    MuxOptions::new(Framing::LengthPrefix(LengthPrefix::big_endian(4)))
}

fn pair() -> (UnixStream, std::os::fd::OwnedFd) {
    let (client, server) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    (client, server.into())
}

/// Workers that answer every message until they are told to stop.
fn with_workers<R>(mux: &Mux, workers: usize, work: impl Fn(&ksf_mux::Message) + Sync, test: impl FnOnce() -> R) -> R {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..workers {
            let socket = mux.socket().unwrap();
            let (stop, work) = (&stop, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    match socket.recv_timeout(Duration::from_millis(20)) {
                        Ok(message) => work(&message),
                        Err(RecvError::TimedOut(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
        stop.store(true, Ordering::SeqCst);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[test]
fn every_message_is_answered_once_and_to_its_own_connection() {
    const CONNECTIONS: usize = 8;
    const MESSAGES: usize = 3000;
    let mux = Mux::new(options()).unwrap();
    with_workers(
        &mux,
        3,
        |message| message.reply(message.bytes()).unwrap(),
        || {
            thread::scope(|scope| {
                for number in 0..CONNECTIONS {
                    let (client, server) = pair();
                    mux.attach(server).unwrap();
                    let mut writer = client.try_clone().unwrap();
                    scope.spawn(move || {
                        let mut bytes = Vec::new();
                        for at in 0..MESSAGES {
                            let mut body = format!("{number}/{at}/").into_bytes();
                            body.resize(body.len() + (at * 7919) % 3000, b'.');
                            bytes.extend_from_slice(&frame(&body));
                        }
                        // Cut anywhere: 1 byte to some messages at once.
                        let mut rest = &bytes[..];
                        let mut step = number + 1;
                        while !rest.is_empty() {
                            step = (step * 31 + 7) % 9000;
                            let (now, later) = rest.split_at((step + 1).min(rest.len()));
                            writer.write_all(now).unwrap();
                            rest = later;
                        }
                    });
                    let mut reader = client;
                    scope.spawn(move || {
                        let mut seen = vec![false; MESSAGES];
                        for _ in 0..MESSAGES {
                            let body = String::from_utf8(read_frame(&mut reader)).unwrap();
                            let mut fields = body.split('/');
                            assert_eq!(fields.next().unwrap(), number.to_string());
                            let at: usize = fields.next().unwrap().parse().unwrap();
                            assert_eq!(fields.next().unwrap().len(), (at * 7919) % 3000);
                            assert!(!std::mem::replace(&mut seen[at], true), "{at} was answered twice");
                        }
                    });
                }
            });
        },
    );
}

#[test]
fn in_order_one_at_a_time() {
    const MESSAGES: u32 = 2000;
    let mux = Mux::new({
        let mut options = options();
        options.ordering = ksf::Order::Requests;
        options
    })
    .unwrap();
    let (busy, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = |message: &ksf_mux::Message| {
        most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::yield_now();
        message.reply(message.bytes()).unwrap();
        busy.fetch_sub(1, Ordering::SeqCst);
    };
    with_workers(&mux, 4, work, || {
        let (mut client, server) = pair();
        mux.attach(server).unwrap();
        let mut writer = client.try_clone().unwrap();
        let write = thread::spawn(move || {
            for at in 0..MESSAGES {
                writer.write_all(&frame(&at.to_be_bytes())).unwrap();
            }
        });
        for at in 0..MESSAGES {
            assert_eq!(read_frame(&mut client), at.to_be_bytes());
        }
        write.join().unwrap();
    });
    assert_eq!(most.into_inner(), 1, "two messages of one connection were worked on at once");
}

#[test]
fn a_capped_class_leaves_a_worker_for_the_others() {
    let mut options = options();
    // One segment has many messages: each is told its class by its own first byte.
    options.classify = Some(std::sync::Arc::new(|message| (message.first() == Some(&b'l')).then_some(0)));
    options.class_caps = vec![1];
    let mux = Mux::new(options).unwrap();
    let (mut client, server) = pair();
    mux.attach(server).unwrap();
    let (long, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let release = AtomicBool::new(false);
    let work = |message: &ksf_mux::Message| {
        if message.first() == Some(&b'l') {
            most.fetch_max(long.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            wait_until("the long ones are released", || release.load(Ordering::SeqCst));
            long.fetch_sub(1, Ordering::SeqCst);
        }
        message.reply(message.bytes()).unwrap();
    };
    with_workers(&mux, 2, work, || {
        let messages = [&b"long one"[..], b"quick one", b"long two", b"quick two", b"long three", b"quick three"];
        client.write_all(&messages.map(frame).concat()).unwrap();
        // Were two of the three long ones begun, nobody would be left for these.
        let mut quick: Vec<_> = (0..3).map(|_| read_frame(&mut client)).collect();
        quick.sort();
        release.store(true, Ordering::SeqCst);
        assert_eq!(quick, [&b"quick one"[..], b"quick three", b"quick two"]);
        let mut rest: Vec<_> = (0..3).map(|_| read_frame(&mut client)).collect();
        rest.sort();
        assert_eq!(rest, [&b"long one"[..], b"long three", b"long two"]);
    });
    assert_eq!(most.load(Ordering::SeqCst), 1, "so many long ones were worked on at once");
}

#[test]
fn in_order_the_next_message_waits_until_the_one_before_is_dropped() {
    let mut with_order = options();
    with_order.ordering = ksf::Order::Requests;
    let mux = Mux::new(with_order).unwrap();
    let socket = mux.socket().unwrap();
    let (mut client, server) = pair();
    mux.attach(server).unwrap();
    client.write_all(&frame(b"x").repeat(500)).unwrap();
    // Cheap messages: a worker takes more and more of them at once, where it may.
    for _ in 0..498 {
        drop(socket.recv_timeout(PATIENCE).unwrap());
    }
    let held = socket.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(socket.try_recv(), Err(RecvError::WouldBlock)), "two at once");
    drop(held);
    assert_eq!(socket.recv_timeout(PATIENCE).unwrap().bytes(), b"x");
}

#[test]
fn an_end_is_reported_after_the_last_message_to_reader_and_monitor() {
    let mux = Mux::new(options()).unwrap();
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    socket.report_ends();
    let (mut client, server) = pair();
    let connection = mux.attach(server).unwrap();
    client.write_all(&frame(b"last")).unwrap();
    client.write_all(&[0, 0, 0, 9, 1, 2]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let message = socket.recv_timeout(PATIENCE).unwrap();
    assert_eq!((message.bytes(), message.connection()), (&b"last"[..], connection));
    drop(message);
    let expected = ConnectionError::PeerClosedMidMessage { bytes: 6 };
    match socket.recv_timeout(PATIENCE) {
        Err(RecvError::Connection { connection: which, error }) => {
            assert_eq!((which, error), (connection, expected.clone()))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(mux.event(), Some(Event::Ended { connection, error: expected }));
    // Still there, until it is detached: answers can be sent to who only ended its own direction.
    mux.reply(connection, b"answer").unwrap();
    assert_eq!(read_frame(&mut client), b"answer");
    let detached = mux.detach(connection).unwrap();
    assert_eq!(detached.unread, [0, 0, 0, 9, 1, 2]);
    assert!(mux.detach(connection).is_none());
    assert!(matches!(mux.reply(connection, b"late"), Err(SendError::Gone(gone)) if gone == connection));
}

#[test]
fn detach_returns_what_belongs_to_no_message() {
    let mux = Mux::new(options()).unwrap();
    let socket = mux.socket().unwrap();
    let (mut client, server) = pair();
    let connection = mux.attach(server).unwrap();
    client.write_all(&[&frame(b"whole")[..], &[0, 0, 0, 60], &[7; 25]].concat()).unwrap();
    let message = socket.recv_timeout(PATIENCE).unwrap();
    assert_eq!(message.bytes(), b"whole");
    let detached = mux.detach(connection).unwrap();
    assert_eq!(detached.unread, [&[0, 0, 0, 60][..], &[7; 25]].concat());
    assert!(detached.unsent.is_empty());
    // The message stays valid; its answer has nowhere to go.
    assert_eq!(message.bytes(), b"whole");
    assert!(matches!(message.reply(b"x"), Err(SendError::Gone(_))));
    // The socket works as before.
    client.write_all(&[7; 35]).unwrap();
    let mut rest = [0; 35];
    let mut server = UnixStream::from(detached.socket);
    server.read_exact(&mut rest).unwrap();
    assert_eq!(rest, [7; 35]);
    server.write_all(b"bye").unwrap();
    let mut answer = [0; 3];
    client.read_exact(&mut answer).unwrap();
    // And it can be attached again; the place has a new generation.
    let again = mux.attach(server.into()).unwrap();
    assert_eq!(again.index, connection.index);
    assert_ne!(again, connection);
}

#[test]
fn connections_are_found_in_whatever_order_others_go() {
    let mux = Mux::new(options()).unwrap();
    let mut attached: Vec<_> = (0..20).map(|_| pair()).map(|(peer, near)| (mux.attach(near).unwrap(), peer)).collect();
    for at in [0, 18, 7, 7, 0, 3, 13, 1] {
        let (gone, _peer) = attached.remove(at);
        assert!(mux.detach(gone).is_some() && mux.detach(gone).is_none());
        let mut all = mux.connections();
        all.sort();
        let mut expected: Vec<_> = attached.iter().map(|(id, _)| *id).collect();
        expected.sort();
        assert_eq!(all, expected);
        for (id, peer) in &mut attached {
            mux.reply(*id, &id.to_u64().to_be_bytes()).unwrap();
            assert_eq!(read_frame(peer), id.to_u64().to_be_bytes());
        }
        let (peer, near) = pair();
        attached.push((mux.attach(near).unwrap(), peer));
    }
}

#[test]
fn a_late_answer_does_not_reach_the_next_connection_in_the_same_place() {
    let mux = Mux::new(options()).unwrap();
    let socket = mux.socket().unwrap();
    let (mut first, server) = pair();
    let old = mux.attach(server).unwrap();
    first.write_all(&frame(b"question")).unwrap();
    let message = socket.recv_timeout(PATIENCE).unwrap();
    drop(mux.detach(old));
    let (mut second, server) = pair();
    let new = mux.attach(server).unwrap();
    assert_eq!(old.index, new.index);
    assert!(message.reply(b"secret").is_err());
    assert!(mux.reply(old, b"secret").is_err());
    mux.reply(new, b"for the second").unwrap();
    assert_eq!(read_frame(&mut second), b"for the second");
}

#[test]
fn messages_that_find_no_other_connection_are_told_together() {
    let mut options = options();
    options.limits.out_queue_bytes_max = 16 << 20;
    let mux = Mux::new(options).unwrap();
    assert_eq!(mux.event(), None);
    let socket = mux.socket().unwrap();
    let (client, server) = pair();
    let connection = mux.attach(server).unwrap();
    // The first one is more than fits on its way, so it is begun; the others are not.
    for _ in 0..3 {
        socket.send(&[7; 4 << 20], SendOptions::default()).unwrap();
    }
    drop(client);
    let mut events = Vec::new();
    wait_until("the failure is told", || {
        let _ = socket.recv_timeout(Duration::from_millis(1));
        events.extend(std::iter::from_fn(|| mux.event()));
        events.len() >= 2
    });
    let [Event::Ended { .. }, uncertain] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*uncertain, Event::Uncertain { connection, messages: 3 });
}

#[test]
fn a_connection_that_is_full_takes_no_message_until_its_peer_reads() {
    const BODY: [u8; 1000] = [7; 1000];
    let mut options = options();
    (options.limits.out_queue_bytes_max, options.limits.connection_bytes_max) = (100_000, 300_000);
    let mux = Mux::new(options).unwrap();
    let socket = mux.socket().unwrap();
    let (mut client, server) = pair();
    let connection = mux.attach(server).unwrap();
    client.write_all(&frame(b"question")).unwrap();
    let message = socket.recv_timeout(PATIENCE).unwrap();
    let queued = || mux.connection_stats()[0].unsent_bytes;
    let mut sent = 0;
    let mut fill = |send: &dyn Fn() -> Result<(), SendError>| {
        let refused = loop {
            match send() {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, SendError::WouldBlock), "{refused}");
        queued()
    };
    let full = 100_000..101_004;
    assert!(full.contains(&fill(&|| socket.send_to(connection, &BODY))));
    let to = |wait| {
        let mut options = SendOptions::default();
        (options.to, options.wait) = (Some(connection), wait);
        socket.send(&BODY, options)
    };
    assert!(matches!(to(None), Err(SendError::WouldBlock)));
    assert!(matches!(to(Some(Duration::from_millis(20))), Err(SendError::TimedOut(_))));
    assert!(matches!(socket.send(&BODY, SendOptions::default()), Err(SendError::WouldBlock)), "there is no other one");
    // The message in work can be answered still, up to the budget.
    assert!((300_000..301_004).contains(&fill(&|| message.reply(&BODY))));
    drop(message);
    // Requests of a peer that does not read are not received: it gets them back in its own buffers.
    client.write_all(&frame(b"another")).unwrap();
    assert!(matches!(socket.try_recv(), Err(RecvError::WouldBlock)));
    thread::scope(|scope| {
        scope.spawn(|| (0..=sent).for_each(|_| assert_eq!(read_frame(&mut client), BODY)));
        assert_eq!(to(Some(PATIENCE)).unwrap(), connection);
    });
    assert_eq!(socket.recv_timeout(PATIENCE).unwrap().bytes(), b"another");
    drop(mux.detach(connection));
    assert!(matches!(to(Some(PATIENCE)), Err(SendError::Gone(gone)) if gone == connection));
    assert_eq!(mux.memory(), 0);
}

#[test]
fn a_peer_that_does_not_read_parks_its_requests_and_no_worker() {
    const REPLY_BYTES: usize = 40_000;
    let options = options();
    let bound = options.limits.out_queue_bytes_max + REPLY_BYTES + 4;
    let mux = Mux::new(options).unwrap();
    let big = vec![b'x'; REPLY_BYTES];
    let work = |message: &ksf_mux::Message| match message.bytes() {
        b"big" => message.reply(&big).unwrap(),
        other => message.reply(other).unwrap(),
    };
    with_workers(&mux, 1, work, || {
        let (mut slow, server) = pair();
        let connection = mux.attach(server).unwrap();
        let (mut quick, server) = pair();
        mux.attach(server).unwrap();
        let queued = || {
            let all = mux.connection_stats();
            all.iter().find(|stats| stats.connection == connection).unwrap().unsent_bytes
        };
        // More answers than any buffer holds, and the one worker goes on.
        slow.write_all(&frame(b"big").repeat(200)).unwrap();
        for at in 0..500u32 {
            quick.write_all(&frame(&at.to_be_bytes())).unwrap();
            assert_eq!(read_frame(&mut quick), at.to_be_bytes());
            assert!(queued() <= bound, "{} bytes are queued for a peer that does not read", queued());
        }
        assert!(queued() > 0, "the peer's requests were not worked on");
        for _ in 0..200 {
            assert_eq!(read_frame(&mut slow), big);
            assert!(queued() <= bound, "{} bytes are queued", queued());
        }
    });
}

/// A wake-up for the stop may be taken by a worker that is awake: it is passed on.
#[test]
fn a_stop_reaches_every_worker_that_sleeps() {
    const MESSAGES: usize = 32;
    for _ in 0..3_000 {
        let mux = Mux::new(options()).unwrap();
        let mut clients: Vec<_> = (0..4)
            .map(|_| UnixStream::pair().unwrap())
            .map(|(client, server)| {
                mux.attach(server.into()).unwrap();
                client
            })
            .collect();
        let received = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let socket = mux.socket().unwrap();
                    loop {
                        match socket.recv_timeout(PATIENCE) {
                            Ok(_) if received.fetch_add(1, Ordering::SeqCst) + 1 == MESSAGES => mux.stop(),
                            Ok(_) => {}
                            Err(RecvError::Stopped) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            for _ in 0..MESSAGES / 4 {
                clients.iter_mut().for_each(|client| client.write_all(&frame(b"x")).unwrap());
            }
        });
        assert_eq!(received.into_inner(), MESSAGES);
    }
}
