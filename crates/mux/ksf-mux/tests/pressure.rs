//! Memory for messages in part is short: peers are slowed down, and only those that do not go on are closed.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::common::{PATIENCE, frame, wait_until};
use ksf::framing::{Framing, LengthPrefix};
use ksf_mux::{ConnectionError, Event, MessageSocket, Mux, MuxOptions, RecvError};

const BYTES: usize = 1 << 20;

fn mux(assembly_bytes_max: usize, pressure_timeout_ms: u64) -> Mux {
    let mut options = MuxOptions::new(Framing::LengthPrefix(LengthPrefix::big_endian(4)));
    options.limits.assembly_bytes_max = assembly_bytes_max;
    options.limits.shard_bytes_max = assembly_bytes_max;
    options.limits.pressure_timeout_ms = pressure_timeout_ms;
    let mux = Mux::new(options).unwrap();
    assert_eq!(mux.event(), None);
    mux
}

fn client(mux: &Mux) -> UnixStream {
    let (client, server) = UnixStream::pair().unwrap();
    mux.attach(server.into()).unwrap();
    client
}

/// Reads until memory is short: nothing more is taken, and no message is whole.
fn fill(mux: &Mux, socket: &MessageSocket) {
    wait_until("memory is short", || {
        assert!(matches!(socket.try_recv(), Err(RecvError::WouldBlock)));
        mux.memory_waits() > 0
    });
}

/// More memory is asked for than there is: everybody is slowed down, and nobody is closed.
#[test]
fn many_long_messages_at_once_all_arrive() {
    const WRITERS: usize = 64;
    for workers in [1, 4] {
        let mux = mux(8 * BYTES, PATIENCE.as_millis() as u64);
        let mut clients: Vec<_> = (0..WRITERS).map(|_| client(&mux)).collect();
        let message = frame(&vec![b'x'; BYTES]);
        // All of them wait for their rest at the same time.
        let (head, tail) = message.split_at(4096);
        clients.iter_mut().for_each(|client| client.write_all(head).unwrap());
        let writers: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                let tail = tail.to_vec();
                thread::spawn(move || {
                    client.write_all(&tail).unwrap();
                    // A second message, behind which no more comes.
                    client.write_all(&frame(b"end")).unwrap();
                    client
                })
            })
            .collect();
        let (long, short, most) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    let socket = mux.socket().unwrap();
                    loop {
                        let message = match socket.recv_timeout(PATIENCE) {
                            Ok(message) => message,
                            Err(RecvError::Stopped) => return,
                            Err(error) => panic!("{error}"),
                        };
                        most.fetch_max(mux.memory(), Ordering::SeqCst);
                        if message.bytes() != b"end" {
                            assert!(message.bytes() == vec![b'x'; BYTES]);
                            long.fetch_add(1, Ordering::SeqCst);
                        } else if short.fetch_add(1, Ordering::SeqCst) + 1 == WRITERS {
                            mux.stop();
                        }
                    }
                });
            }
        });
        assert_eq!((long.into_inner(), mux.event(), mux.connections().len()), (WRITERS, None, WRITERS));
        assert!(mux.memory_waits() > 0, "there was room for all of them");
        // The limit, what eight that are read all the same may take on top of it, and what each worker works on.
        let most = most.into_inner();
        assert!(most < (17 + 2 * workers) * BYTES, "{most} bytes were kept");
        writers.into_iter().for_each(|writer| drop(writer.join().unwrap()));
        assert_eq!(mux.memory(), 0);
    }
}

/// Peers that fill the memory and say nothing more are closed; their memory is free then, and the others are served.
#[test]
fn who_does_not_go_on_is_closed_and_frees_memory() {
    let mux = mux(256 << 10, 200);
    let socket = mux.socket().unwrap();
    let mut hogs: Vec<_> = (0..6).map(|_| client(&mux)).collect();
    let half = &frame(&vec![b'h'; 120 << 10])[..60 << 10];
    hogs.iter_mut().for_each(|hog| hog.write_all(half).unwrap());
    fill(&mux, &socket);
    let mut peer = client(&mux);
    let message = frame(&vec![b'p'; 100 << 10]);
    let writer = thread::spawn(move || {
        peer.write_all(&message).unwrap();
        peer
    });
    assert!(socket.recv_timeout(PATIENCE).unwrap().bytes() == vec![b'p'; 100 << 10]);
    let _peer = writer.join().unwrap();
    let mut ended = 0;
    // Each hog that is left keeps less than 64 KiB.
    wait_until("a peer that does not go on is closed, and what it kept is free", || {
        assert!(matches!(socket.try_recv(), Err(RecvError::WouldBlock)));
        while let Some(event) = mux.event() {
            let Event::Ended { error, .. } = event else { panic!("{event:?}") };
            assert_eq!(error, ConnectionError::MemoryLimit { limit: 256 << 10 });
            ended += 1;
        }
        ended > 0 && mux.memory() <= (hogs.len() - ended) * (64 << 10)
    });
}

/// Replies that wait for a peer are not taken for messages in part: they close nobody.
#[test]
fn queued_replies_do_not_stop_messages_in_part() {
    let mux = mux(256 << 10, 200);
    let socket = mux.socket().unwrap();
    let mut deaf = client(&mux);
    // More than the socket takes, and more than the limit in all.
    deaf.write_all(&frame(b"ask").repeat(4)).unwrap();
    let asked: Vec<_> = (0..4).map(|_| socket.recv_timeout(PATIENCE).unwrap()).collect();
    asked.iter().for_each(|message| message.reply(&vec![b'r'; 200 << 10]).unwrap());
    drop(asked);
    assert!(mux.memory() > 256 << 10);
    let mut peer = client(&mux);
    let message = frame(&vec![b'p'; 100 << 10]);
    let writer = thread::spawn(move || {
        peer.write_all(&message).unwrap();
        peer
    });
    assert!(socket.recv_timeout(PATIENCE).unwrap().bytes() == vec![b'p'; 100 << 10]);
    assert_eq!((mux.event(), mux.memory_waits()), (None, 0));
    drop(writer.join().unwrap());
}

/// Messages that are kept have all room there is: of those that come only a few are received, short ones all the same,
/// and all of them when there is room.
#[test]
fn long_messages_wait_for_room_and_short_ones_do_not() {
    const LONG: usize = 256 << 10;
    const CLIENTS: usize = 60;
    let mux = mux(4 * LONG, PATIENCE.as_millis() as u64);
    let socket = mux.socket().unwrap();
    let long = frame(&vec![b'x'; LONG]);
    let writers: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (mut client, long) = (client(&mux), long.clone());
            thread::spawn(move || {
                client.write_all(&long).unwrap();
                client
            })
        })
        .collect();
    let mut kept = Vec::new();
    // Three that have room, one that makes it full, and eight that are read all the same.
    while kept.len() < 12 {
        kept.push(socket.recv_timeout(PATIENCE).unwrap());
    }
    let mut peers: Vec<_> = (0..50).map(|_| client(&mux)).collect();
    for peer in &mut peers {
        peer.write_all(&frame(&[b's'; 4096])).unwrap();
        let message = socket.recv_timeout(PATIENCE).unwrap();
        assert!(message.bytes() == [b's'; 4096], "{} bytes with {} of memory", message.bytes().len(), mux.memory());
    }
    for _ in kept.len()..CLIENTS {
        // One leaves, and another one comes.
        drop(kept.pop());
        kept.push(socket.recv_timeout(PATIENCE).unwrap());
        assert!(kept.iter().all(|message| message.bytes().len() == LONG));
    }
    drop(kept);
    writers.into_iter().for_each(|writer| drop(writer.join().unwrap()));
    assert_eq!((mux.event(), mux.memory()), (None, 0));
}
