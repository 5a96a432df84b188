//! Services on workers whose replies are much longer than the requests: each reply has its room before it is made.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use crate::common::{frame, read_frame, wait_until};
use ksf::engine::EngineKind;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::{Message, Order, Profile, Reply, Server, Service};
use ksf_mux::{Mux, Workers, WorkersOptions};
use ksf_test::Folder;

const REPLY_BYTES: usize = 1 << 20;
const ROOM_BYTES: usize = 8 * REPLY_BYTES;
const WORKERS: usize = 3;

/// A request of eight bytes is answered with [`REPLY_BYTES`]: `now` at once, `late` by another thread, `panic` not at all. The
/// others return as they are.
struct Long {
    order: Order,
}

fn is_long(message: &[u8]) -> bool {
    message.len() == 8
}

impl Service for Long {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: self.order, ..Profile::new("long", Framing::LengthPrefix(LengthPrefix::big_endian(4))) }
    }

    fn fork(&self, (): &()) -> Option<()> {
        Some(())
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if !is_long(message.bytes()) {
            return reply.bytes(message.bytes());
        }
        match message.bytes().trim_ascii_end() {
            b"now" => reply.bytes(&vec![b'r'; REPLY_BYTES]),
            b"late" => {
                let deferred = reply.defer_for(REPLY_BYTES);
                thread::spawn(move || deferred.reply(vec![b'r'; REPLY_BYTES]));
            }
            _ => panic!("as the test asked for"),
        }
    }

    fn reply_bytes(&self, (): &mut (), (): &mut (), message: &[u8]) -> usize {
        if is_long(message) { REPLY_BYTES } else { message.len() }
    }
}

/// A server on a Unix socket: the kernel keeps less of a reply than of TCP's.
struct Running {
    _server: Server,
    mux: Mux,
    folder: Folder,
}

impl Running {
    fn start(order: Order) -> Self {
        let limits =
            Limits { shard_bytes_max: ROOM_BYTES, send_timeout_ms: 0, idle_timeout_ms: 0, ..Limits::default() };
        let service = Arc::new(Long { order });
        let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(WORKERS, limits.clone())).unwrap();
        let mux = workers.mux().clone();
        let folder = Folder::new();
        let builder = Server::builder().engine(EngineKind::Epoll).limits(limits);
        let server =
            builder.listen(ListenAddr::Unix(folder.path("socket")), service, None).adopt(workers).start().unwrap();
        Self { _server: server, mux, folder }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path("socket")).unwrap()
    }
}

/// A thousand peers ask and do not read: as many replies are made as have room. Others are answered meanwhile, and all of
/// them when the peers read.
#[test]
fn replies_are_made_when_they_have_room() {
    const CONNECTIONS: usize = 1000;
    const READERS: usize = 40;
    for (order, request) in [(Order::Requests, b"now     "), (Order::Requests, b"late    "), (Order::Free, b"now     ")]
    {
        let running = Running::start(order);
        let mux = &running.mux;
        let mut quick = running.connect();
        // The requests, and two replies beyond the room: one goes on without, and one may count as reserved and as queued
        // for a moment.
        let bound = ROOM_BYTES + 2 * REPLY_BYTES + CONNECTIONS * frame(request).len() * 3;
        let mut look = || {
            assert!(mux.memory() <= bound, "{order:?} {request:?}: {} bytes of {bound}", mux.memory());
            quick.write_all(&frame(b"quick")).unwrap();
            assert_eq!(read_frame(&mut quick), b"quick");
        };
        let mut peers = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut peer = running.connect();
            peer.write_all(&frame(request).repeat(3)).unwrap();
            peers.push(peer);
            look();
        }
        wait_until("there is no room for one more", || {
            look();
            mux.memory() > ROOM_BYTES - REPLY_BYTES
        });
        // Some leave, first and last ones; the others get what they asked for.
        peers.drain(..(CONNECTIONS - READERS) / 2);
        peers.truncate(READERS);
        thread::scope(|scope| {
            for mut peer in peers {
                scope.spawn(move || {
                    for _ in 0..3 {
                        assert_eq!(read_frame(&mut peer).len(), REPLY_BYTES);
                    }
                });
            }
        });
        look();
        wait_until("nothing is left", || mux.memory() == 0);
    }
}

/// Room that was reserved is free again after a panic, and after a peer left that waited for it.
#[test]
fn room_that_was_reserved_is_returned() {
    let running = Running::start(Order::Requests);
    let mux = &running.mux;
    let mut peers: Vec<_> = (0..40).map(|_| running.connect()).collect();
    for peer in &mut peers {
        peer.write_all(&frame(b"panic   ")).unwrap();
        let _ = peer.read(&mut [0]);
    }
    wait_until("no reservation is left", || mux.memory() == 0);
    for round in 0..3 {
        let mut peers: Vec<_> = (0..100).map(|_| running.connect()).collect();
        for peer in &mut peers {
            peer.write_all(&frame(b"now     ").repeat(4)).unwrap();
        }
        wait_until("there is no room for one more", || mux.memory() > ROOM_BYTES - REPLY_BYTES);
        drop(peers);
        wait_until(format_args!("nothing is left in round {round}"), || mux.memory() == 0);
    }
    let mut last = running.connect();
    last.write_all(&frame(b"now     ")).unwrap();
    assert_eq!(read_frame(&mut last).len(), REPLY_BYTES);
}
