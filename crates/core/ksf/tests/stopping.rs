//! Stopping under load. A drain answers every request that was read and resets no connection. Dropping the server ends everything.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use crate::common::Recorder;
use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::server::Drained;
use ksf::{Order, Profile, Server, Service};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// Echoes lines, every third one from the task threads, and counts them: the server's counters end with it.
fn counting() -> (Arc<impl Service>, Arc<AtomicU64>) {
    let messages = Arc::<AtomicU64>::default();
    let handed = Arc::clone(&messages);
    let service = calls(Profile::new("counting", LINES), move |message, reply| {
        let number = handed.fetch_add(1, Ordering::Relaxed);
        let body = message.bytes().to_vec();
        if !number.is_multiple_of(3) {
            reply.bytes(&body);
        } else {
            reply.block(body.len(), move |deferred| deferred.reply(body));
        }
    });
    (service, messages)
}

/// End of a client.
#[derive(Debug)]
struct Ended {
    replies: u64,
    by: Result<(), ErrorKind>,
}

/// Sends `depth` lines and reads their replies, repeatedly, until the server closes the connection. Reports the first round to `started`.
fn client(at: SocketAddr, depth: usize, started: mpsc::Sender<()>) -> Ended {
    let mut peer = connect_to(at);
    let lines = b"twelve bytes\n".repeat(depth);
    let mut replies = 0;
    let mut got = vec![0; lines.len()];
    loop {
        if let Err(error) = peer.write_all(&lines) {
            return Ended { replies, by: Err(error.kind()) };
        }
        let mut filled = 0;
        while filled < got.len() {
            match peer.read(&mut got[filled..]) {
                Ok(0) => {
                    assert_eq!(filled % 13, 0, "a torn reply");
                    assert!(lines.starts_with(&got[..filled]), "a wrong reply");
                    return Ended { replies: replies + filled as u64 / 13, by: Ok(()) };
                }
                Ok(length) => filled += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Ended { replies, by: Err(error.kind()) },
            }
        }
        assert!(got == lines, "a wrong reply");
        if replies == 0 {
            // The test may no longer listen.
            let _ = started.send(());
        }
        replies += depth as u64;
    }
}

const CLIENTS: usize = 8;

/// Starts clients with these depths in rotation. Returns when each has received a reply.
fn clients(at: SocketAddr, depths: &[usize]) -> Vec<std::thread::JoinHandle<Ended>> {
    let (started, all_started) = mpsc::channel();
    let start = |depth| {
        let started = started.clone();
        std::thread::spawn(move || client(at, depth, started))
    };
    let clients = depths.iter().copied().cycle().take(CLIENTS).map(start).collect();
    // A client that fails drops its sender, so this does not wait for it.
    drop(started);
    (0..CLIENTS).for_each(|_| all_started.recv().expect("a client was answered wrongly"));
    clients
}

#[test]
fn a_drained_server_has_answered_what_it_read_and_resets_nobody() {
    for engine in engines_in_own_network() {
        let (service, messages) = counting();
        let server = all_shards(engine, ANY, Limits::default(), service);
        let clients = clients(addr(&server), &[1, 4, 32]);
        server.drain().unwrap();
        let ended: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(ended.iter().all(|ended| ended.by.is_ok()), "{engine}: a client was reset: {ended:?}");
        let replies: u64 = ended.iter().map(|ended| ended.replies).sum();
        assert_eq!(replies, messages.load(Ordering::Relaxed), "{engine}: read and not answered");
    }
}

#[test]
fn a_drain_waits_for_deferred_replies_and_unfinished_messages() {
    for engine in engines_in_own_network() {
        let service = Recorder::new(LINES, Order::Requests);
        let server = one_shard(engine, ANY, Limits::default(), Arc::clone(&service));
        let (mut idle, mut waits, mut sends) = (connect(&server), connect(&server), connect(&server));
        waits.write_all(b"defer\n").unwrap();
        sends.write_all(b"half a li").unwrap();
        wait_until("all is read", || count(&server, "bytes_in") == 15);
        let drained = std::thread::spawn(move || server.drain());
        // The shard closes an idle connection at once, so its end shows that the shard drains.
        expect_end(&mut idle);
        sends.write_all(b"ne\n").unwrap();
        expect(&mut sends, b"half a line\n");
        expect_end(&mut sends);
        service.wait_for_deferred().reply(b"late".to_vec());
        expect(&mut waits, b"late\n");
        expect_end(&mut waits);
        drop((idle, sends, waits));
        drained.join().unwrap().unwrap();
    }
}

#[test]
fn a_drain_ends_after_its_time_whatever_the_peers_do() {
    for engine in engines_in_own_network() {
        let service = Recorder::new(LINES, Order::Requests);
        let limits = Limits { drain_timeout_ms: 50, ..Limits::default() };
        let server = one_shard(engine, ANY, limits, Arc::clone(&service));
        let mut stubborn = connect(&server);
        stubborn.write_all(b"never a whole li").unwrap();
        let mut forgotten = connect(&server);
        forgotten.write_all(b"defer\n").unwrap();
        wait_until("all is read", || count(&server, "bytes_in") == 22);
        server.drain().unwrap();
        expect_end(&mut stubborn);
        // Its reply is outstanding.
        expect_reset(&mut forgotten);
    }
}

/// The handshake of connections that wait to be accepted is complete, so the server must not reset them.
#[test]
fn connections_made_before_a_drain_are_not_reset() {
    for engine in engines_in_own_network() {
        let server = all_shards(engine, ANY, Limits::default(), Arc::new(Echo));
        let mut peers: Vec<_> = (0..200).map(|_| connect(&server)).collect();
        let drained = std::thread::spawn(move || server.drain());
        for peer in &mut peers {
            expect_end(peer);
            peer.shutdown(Shutdown::Both).unwrap();
        }
        drained.join().unwrap().unwrap();
    }
}

/// A draining server that a deferred reply keeps from ending, the peer of that reply, and the reply.
fn draining<W: Read + Write>(engine: EngineKind, server: Server, service: &Recorder, mut waits: W) -> Draining<W> {
    waits.write_all(b"defer\n").unwrap();
    let late = service.wait_for_deferred();
    let ended = std::thread::spawn(move || server.drain().unwrap());
    Draining { engine, ended, late, waits }
}

struct Draining<W> {
    engine: EngineKind,
    ended: std::thread::JoinHandle<Drained>,
    late: Deferred,
    /// Kept open: the server does not wait for replies to closed connections.
    waits: W,
}

impl<W: Read + Write> Draining<W> {
    /// Connects until the server refuses, then lets it end. Connections that it accepted are closed in order or served.
    fn refuses<S: Read + Write>(mut self, connect: impl Fn() -> std::io::Result<S>) {
        let mut taken = Vec::new();
        let refused = loop {
            match connect() {
                Ok(peer) => taken.push(peer),
                Err(error) => break error,
            }
            assert!(taken.len() < 4096, "{}: connections are taken, and nobody is there for them", self.engine);
        };
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{}", self.engine);
        for peer in &mut taken {
            expect_end(peer);
        }
        drop(taken);
        assert!(!self.ended.is_finished(), "{}: it ended before its last reply", self.engine);
        self.late.reply(b"late".to_vec());
        expect(&mut self.waits, b"late");
        self.ended.join().unwrap();
    }
}

#[test]
fn connections_during_a_drain_are_refused() {
    side_by_side(engines(), |engine| {
        let service = Recorder::new(LINES, Order::Requests);
        let server = all_shards(engine, ANY, Limits::default(), Arc::clone(&service));
        let (at, waits) = (addr(&server), connect(&server));
        // TCP repeats a SYN after a second if it was refused while the last handshakes completed.
        let again = || std::net::TcpStream::connect_timeout(&at, PATIENCE);
        draining(engine, server, &service, waits).refuses(again);
    });
}

#[test]
fn connections_to_a_path_during_a_drain_are_refused() {
    for engine in engines_in_own_network() {
        let folder = Folder::new();
        let path = folder.path("socket");
        let service = Recorder::new(LINES, Order::Requests);
        let addr = format!("unix:{}", path.display());
        let server = all_shards(engine, &addr, Limits::default(), Arc::clone(&service));
        let waits = UnixStream::connect(&path).unwrap();
        draining(engine, server, &service, waits).refuses(|| UnixStream::connect(&path));
        assert!(!path.exists());
    }
}

/// Connections that wait on a socket of the service manager are for the next instance.
#[test]
fn connections_to_a_socket_that_was_handed_over_wait_for_its_next_holder() {
    for engine in engines_in_own_network() {
        let handed_over = TcpListener::bind("127.0.0.1:0").unwrap();
        let service = Recorder::new(LINES, Order::Requests);
        let socket = handed_over.try_clone().unwrap().into();
        // One shard: others may notice the end later.
        let cpus = Some(ksf::cpus::allowed().unwrap()[..1].to_vec());
        let builder = Server::builder().engine(engine).cpus(cpus).inherit(socket, Arc::clone(&service), None);
        let server = builder.start().unwrap();
        let mut idle = connect(&server);
        let (at, waits) = (addr(&server), connect(&server));
        let draining = draining(engine, server, &service, waits);
        // The shard drains now.
        expect_end(&mut idle);
        drop(idle);
        let mut peer = connect_to(at);
        peer.write_all(b"for the next").unwrap();
        draining.late.reply(b"late".to_vec());
        draining.ended.join().unwrap();
        handed_over.set_nonblocking(true).unwrap();
        let accept = |of: &TcpStream| {
            let mut accepted = None;
            wait_until("it waits to be accepted", || {
                accepted = handed_over.accept().ok();
                accepted.is_some()
            });
            let (accepted, from) = accepted.unwrap();
            assert_eq!(from, of.local_addr().unwrap(), "{engine}");
            accepted.set_nonblocking(false).unwrap();
            accepted
        };
        expect(&mut accept(&peer), b"for the next");
        // Other peers can still connect.
        accept(&connect_to(at));
    }
}

#[test]
fn a_dropped_server_ends_everything_and_its_port_is_free() {
    for engine in engines_in_own_network() {
        let (service, _) = counting();
        let server = all_shards(engine, ANY, Limits::default(), Arc::clone(&service));
        let at = addr(&server);
        let clients = clients(at, &[16]);
        drop(server);
        for client in clients {
            // It panics at a wrong or torn reply; any end of the connection is right.
            client.join().unwrap();
        }
        assert_eq!(Arc::strong_count(&service), 1, "{engine}: somebody still holds the service");
        let server = all_shards(engine, &format!("tcp:{at}"), Limits::default(), Arc::new(Echo));
        ask(&mut connect(&server), b"hello", b"hello");
    }
}

#[test]
fn a_server_stops_with_answers_outstanding() {
    for engine in engines_in_own_network() {
        let service = Recorder::new(LINES, Order::Requests);
        let server = one_shard(engine, ANY, Limits::default(), Arc::clone(&service));
        let mut peer = connect(&server);
        peer.write_all(b"defer\n").unwrap();
        let late = service.wait_for_deferred();
        drop(server);
        expect_reset(&mut peer);
        // The reply has no receiver, which must not cause a panic.
        late.reply(b"too late".to_vec());
    }
}

#[test]
fn a_task_that_does_not_end_keeps_no_server_from_stopping() {
    for engine in engines_in_own_network() {
        for gently in [true, false] {
            let (stuck, let_go) = mpsc::channel::<()>();
            let (running, is_running) = mpsc::channel();
            let let_go = Mutex::new(Some(let_go));
            // Gives the line to a task that ends when the test lets it.
            let service = calls(Profile::new("stuck", LINES), move |_, reply| {
                let let_go = let_go.lock().unwrap().take().expect("one message");
                let running = running.clone();
                reply.block(0, move |deferred| {
                    running.send(()).unwrap();
                    // Waits until the test drops the sender.
                    let_go.recv().unwrap_err();
                    deferred.reply(b"nobody is left to hear this".to_vec());
                });
            });
            let limits = Limits { drain_timeout_ms: 50, ..Limits::default() };
            let server = one_shard(engine, ANY, limits, service);
            let at = addr(&server);
            let mut peer = connect(&server);
            peer.write_all(b"never\n").unwrap();
            is_running.recv_timeout(PATIENCE).unwrap();
            let (stopped, is_stopped) = mpsc::channel();
            std::thread::spawn(move || {
                let drained = gently.then(|| server.drain().unwrap());
                stopped.send(drained).unwrap();
            });
            let drained = is_stopped.recv_timeout(PATIENCE).expect("it waits for the task");
            assert_eq!(drained, gently.then_some(Drained { tasks_left: 1 }), "{engine}");
            // The server has stopped although the task runs: the peer is closed and the port is free.
            expect_reset(&mut peer);
            let server = one_shard(engine, &format!("tcp:{at}"), Limits::default(), Arc::new(Echo));
            // The remaining thread ends with its task, whose reply has no receiver.
            drop(stuck);
            let ended = is_running.recv_timeout(PATIENCE);
            assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected), "{engine}: the task still holds its channel");
            assert_eq!(server.drain().unwrap(), Drained::default());
        }
    }
}
