//! The demo server and its proxy on real sockets, on every engine that works here: slow and dying clients, and backends
//! that refuse, reset, fall silent, break off, do not read, or are started anew.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::common::{counter, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::Server;
use ksf_services::http::{PageServer, Proxy};
use ksf_test::stream::{be_patient, connect, read_exactly, read_rest, reset};
use ksf_test::{PATIENCE, pattern, wait_until};
use socket2::{Domain, Socket, Type};

/// What one turn receives at most: every slot of a shard.
const SLOTS_BYTES: u64 = ksf::server::SLOT_BYTES as u64 * ksf::server::SLOTS as u64;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
/// Bytes of it as a backend gets it: with `Via: 1.1 ksf`.
const GET_PASSED_BYTES: u64 = GET.len() as u64 + 14;
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
const RETURNED: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nVia: 1.1 ksf\r\n\r\nhello";

/// Reads a head, its empty line included; what was read of it if the stream ends before.
fn read_head(stream: &mut impl Read) -> Vec<u8> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1..) => head.push(byte[0]),
            Ok(_) | Err(_) => break,
        }
    }
    head
}

fn loopback4() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn loopback6() -> SocketAddr {
    (Ipv6Addr::LOCALHOST, 0).into()
}

/// A backend with a script, which runs for each connection in a thread of its own. The script has the number of the
/// connection.
struct Backend {
    addr: SocketAddr,
    accepted: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Backend {
    fn start(script: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        Self::start_at(loopback4(), script)
    }

    fn start_at(addr: SocketAddr, script: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(addr).expect("a free port");
        Self::accept_from(listener, script)
    }

    fn accept_from(listener: TcpListener, script: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        let addr = listener.local_addr().unwrap();
        let (accepted, stop): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        let script = Arc::new(script);
        let (count, stopping) = (Arc::clone(&accepted), Arc::clone(&stop));
        let accepting = thread::spawn(move || {
            for stream in listener.incoming() {
                if stopping.load(Ordering::SeqCst) {
                    return;
                }
                let stream = stream.expect("accept");
                be_patient(&stream);
                let number = count.fetch_add(1, Ordering::SeqCst);
                let script = Arc::clone(&script);
                thread::spawn(move || script(stream, number));
            }
        });
        Self { addr, accepted, stop, accepting: Some(accepting) }
    }

    /// Answers every request on a connection with [`ANSWER`].
    fn good() -> Self {
        Self::start(|stream, _| answer_all(stream))
    }

    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.addr));
        drop(self.accepting.take().map(JoinHandle::join));
    }
}

fn answer_all(mut stream: TcpStream) {
    while read_head(&mut stream).ends_with(b"\r\n\r\n") {
        if stream.write_all(ANSWER).is_err() {
            return;
        }
    }
}

/// A port on which connections are refused, for as long as the value lives.
fn refusing() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&loopback4().into()).unwrap();
    let addr = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, addr)
}

struct Running {
    server: Server,
    proxy: Arc<Proxy>,
    addr: SocketAddr,
}

impl Running {
    fn start(engine: EngineKind, backends: &[SocketAddr], limits: Limits) -> Self {
        Self::start_at(loopback4(), engine, backends, limits)
    }

    fn start_at(addr: SocketAddr, engine: EngineKind, backends: &[SocketAddr], limits: Limits) -> Self {
        let proxy = Arc::new(Proxy::new(backends.to_vec(), true, 1));
        // One shard, so that it is known which connection is kept.
        let cpu = ksf::cpus::allowed().unwrap()[0];
        let server = Server::builder()
            .engine(engine)
            .cpus(Some(vec![cpu]))
            .limits(limits)
            .listen(ListenAddr::Tcp(addr), Arc::clone(&proxy), None)
            .start()
            .expect("the server starts");
        let addr = match &server.listeners()[0].addr {
            ListenAddr::Tcp(addr) => *addr,
            other => panic!("{other}"),
        };
        Self { server, proxy, addr }
    }

    fn count(&self, name: &str) -> u64 {
        self.server.counters().iter().find(|counter| counter.name == name).expect("a known counter").value
    }

    fn own(&self, name: &str) -> u64 {
        counter(&*self.proxy, name)
    }

    /// One request on a connection of its own that must be answered by a good backend.
    fn ask(&self) {
        let mut client = connect(self.addr);
        client.write_all(GET).unwrap();
        assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED);
    }

    /// One request on a connection of its own that must be answered with this status and the end.
    fn refused(&self, request: &[u8]) -> String {
        let mut client = connect(self.addr);
        client.write_all(request).unwrap();
        String::from_utf8(read_rest(client)).unwrap()
    }
}

#[test]
fn every_byte_may_come_by_itself() {
    for engine in engines() {
        let (to_backend, answers) = std::sync::mpsc::channel::<u8>();
        let answers = std::sync::Mutex::new(answers);
        let backend = Backend::start(move |mut stream, _| {
            while read_head(&mut stream).ends_with(b"\r\n\r\n") {
                for _ in ANSWER {
                    let Ok(byte) = answers.lock().unwrap().recv_timeout(PATIENCE) else { return };
                    stream.write_all(&[byte]).unwrap();
                }
            }
        });
        let running = Running::start(engine, &[backend.addr], Limits::default());
        let mut client = connect(running.addr);
        let (mut sent, mut answered) = (0, 0);
        for round in 0..2 {
            for byte in GET {
                client.write_all(&[*byte]).unwrap();
                sent += 1;
                wait_until("the byte is received", || running.count("bytes_in") == sent);
            }
            for byte in ANSWER {
                to_backend.send(*byte).unwrap();
                answered += 1;
                wait_until("the byte of the answer is received", || running.count("outgoing_bytes_in") == answered);
            }
            assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED, "{engine}, round {round}");
        }
        assert_eq!((backend.accepted(), running.count("outgoing_reused")), (1, 1), "{engine}");
    }
}

#[test]
fn the_page_server_takes_every_byte_by_itself() {
    for engine in engines() {
        let service = Arc::new(PageServer::new(64, true, 1));
        let builder = Server::builder().engine(engine).cpus(Some(vec![ksf::cpus::allowed().unwrap()[0]]));
        let server = builder.listen(ListenAddr::Tcp(loopback6()), Arc::clone(&service), None).start().unwrap();
        let ListenAddr::Tcp(addr) = server.listeners()[0].addr else { panic!("no address") };
        let mut client = connect(addr);
        let bytes_in = || server.counters().iter().find(|counter| counter.name == "bytes_in").unwrap().value;
        for (byte, sent) in GET.iter().zip(1..) {
            client.write_all(&[*byte]).unwrap();
            wait_until("the byte is received", || bytes_in() == sent);
        }
        let head = read_head(&mut client);
        assert!(head.starts_with(b"HTTP/1.1 200 OK\r\n"), "{engine}");
        assert_eq!(read_exactly(&mut client, 64).last(), Some(&b'\n'));
        assert_eq!(counter(&*service, "requests"), 1);
    }
}

#[test]
fn backends_of_both_families_take_turns_and_keep_their_connections() {
    for engine in engines() {
        let backends =
            [Backend::good(), Backend::start_at(loopback6(), |stream, _| answer_all(stream)), Backend::good()];
        let addrs: Vec<_> = backends.iter().map(|backend| backend.addr).collect();
        let running = Running::start_at(loopback6(), engine, &addrs, Limits::default());
        let mut client = connect(running.addr);
        for _ in 0..30 {
            client.write_all(GET).unwrap();
            assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED, "{engine}");
        }
        // Each was connected with once, and asked ten times.
        assert_eq!(backends.iter().map(Backend::accepted).collect::<Vec<_>>(), [1, 1, 1], "{engine}");
        assert_eq!((running.count("dialed"), running.count("outgoing_reused")), (3, 27), "{engine}");
        assert_eq!(running.own("requests"), 30);
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    for engine in engines() {
        let backend = Backend::start(|mut stream, _| {
            loop {
                let head = String::from_utf8(read_head(&mut stream)).unwrap();
                let Some(path) = head.split(' ').nth(1) else { return };
                stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
                write!(stream, "{:x}\r\n{path}\r\n0\r\n\r\n", path.len()).unwrap();
            }
        });
        let running = Running::start(engine, &[backend.addr; 3], Limits::default());
        let mut client = connect(running.addr);
        let mut writer = client.try_clone().unwrap();
        const REQUESTS: usize = 2000;
        let writing = thread::spawn(move || {
            for number in 0..REQUESTS {
                write!(writer, "GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            }
        });
        for number in 0..REQUESTS {
            let head = read_head(&mut client);
            assert!(head.starts_with(b"HTTP/1.1 200 OK\r\n"), "{engine}: {number}");
            let path = format!("/{number}");
            let expected = format!("{:x}\r\n{path}\r\n0\r\n\r\n", path.len());
            assert_eq!(read_exactly(&mut client, expected.len()), expected.as_bytes(), "{engine}: {number}");
        }
        writing.join().unwrap();
        assert_eq!(running.count("dialed"), 1, "{engine}: the backend is one, whatever it is called");
    }
}

/// Waits until more than `queue` bytes of what was read were not sent, and stay so: nothing moves any more. How many
/// were read, and how many of them are held.
fn standing(queue: u64, read_and_sent: impl Fn() -> (u64, u64)) -> (u64, u64) {
    let mut seen = (0, 0);
    wait_until("all that moves has moved", || {
        let now = read_and_sent();
        let stands = now == seen && now.0.saturating_sub(now.1) > queue;
        seen = now;
        thread::sleep(Duration::from_millis(50));
        stands
    });
    (seen.0, seen.0 - seen.1)
}

#[test]
fn a_slow_client_slows_its_backend_down_and_loses_nothing() {
    for engine in engines() {
        let body = pattern(24 << 20, 0);
        let sent = body.clone();
        let backend = Backend::start(move |mut stream, _| {
            read_head(&mut stream);
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", sent.len()).unwrap();
            stream.write_all(&sent).unwrap();
        });
        let limits = Limits { out_queue_bytes_max: 64 << 10, ..Limits::default() };
        let queue = limits.out_queue_bytes_max as u64;
        let running = Running::start(engine, &[backend.addr], limits);
        let mut client = connect(running.addr);
        client.write_all(GET).unwrap();
        // The client reads nothing: the proxy fills what the kernel buffers, then it stops to read the backend.
        wait_until("the backend is not read any more", || running.count("reads_paused") > 0);
        let (read, held) = standing(queue, || (running.count("outgoing_bytes_in"), running.count("bytes_out")));
        // What one turn receives may come on top.
        assert!(held <= queue + SLOTS_BYTES, "{engine}: {held} bytes are held for a client that does not read");
        assert!(read < body.len() as u64, "{engine}: the backend was read to its end");
        let head = read_head(&mut client);
        assert!(head.starts_with(b"HTTP/1.1 200 OK\r\n"));
        assert!(read_exactly(&mut client, body.len()) == body, "{engine}: the body is another");
    }
}

#[test]
fn a_slow_backend_slows_its_client_down_and_loses_nothing() {
    for engine in engines() {
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let body = pattern(24 << 20, 0);
        let expected = body.clone();
        let backend = Backend::start(move |mut stream, _| {
            read_head(&mut stream);
            wait.lock().unwrap().recv_timeout(PATIENCE).expect("told to go on");
            let same = read_exactly(&mut stream, expected.len()) == expected;
            stream
                .write_all(if same { ANSWER } else { b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n" })
                .unwrap();
        });
        let limits = Limits { out_queue_bytes_max: 64 << 10, ..Limits::default() };
        let queue = limits.out_queue_bytes_max as u64;
        let running = Running::start(engine, &[backend.addr], limits);
        let mut client = connect(running.addr);
        let mut writer = client.try_clone().unwrap();
        let writing = thread::spawn(move || {
            write!(writer, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len()).unwrap();
            writer.write_all(&body).unwrap();
        });
        wait_until("the client is not read any more", || running.count("reads_paused") > 0);
        let (_, held) = standing(queue, || (running.count("bytes_in"), running.count("outgoing_bytes_out")));
        assert!(held <= queue + SLOTS_BYTES, "{engine}: {held} bytes are held for a backend that does not read");
        go_on.send(()).unwrap();
        assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED, "{engine}");
        writing.join().unwrap();
    }
}

#[test]
fn who_refuses_is_passed_over() {
    for engine in engines() {
        let (_held, nobody) = refusing();
        let good = Backend::good();
        let running = Running::start(engine, &[nobody, good.addr], Limits::default());
        for _ in 0..10 {
            running.ask();
        }
        // Every second request began with the one that refuses.
        assert_eq!((running.own("backend_refused"), running.own("repeated")), (5, 5), "{engine}");
        assert_eq!((running.count("dials_failed"), running.own("bad_gateway")), (5, 0), "{engine}");
        let alone = Running::start(engine, &[nobody], Limits::default());
        let answer = alone.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 502 Bad Gateway\r\n"), "{engine}: {answer}");
        assert_eq!(alone.own("bad_gateway"), 1);
    }
}

#[test]
fn backends_that_break_the_connection() {
    for engine in engines() {
        // Resets after the request; ends without an answer; resets and ends in the middle of one.
        let resets = Backend::start(|mut stream, _| {
            read_head(&mut stream);
            reset(stream);
        });
        let ends = Backend::start(|mut stream, _| drop(read_head(&mut stream)));
        let at_once = Backend::start(|stream, _| reset(stream));
        for addr in [resets.addr, ends.addr, at_once.addr] {
            let running = Running::start(engine, &[addr], Limits::default());
            let answer = running.refused(GET);
            assert!(answer.starts_with("HTTP/1.1 502 "), "{engine}: {answer}");
            assert_eq!((running.own("backend_resets"), running.own("repeated")), (2, 1), "{engine}");
            let answer = running.refused(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
            assert!(answer.starts_with("HTTP/1.1 502 "), "{engine}: {answer}");
            // Unless it was broken before it was whole, a POST goes to one backend only.
            let asked = running.own("backend_resets") - 2;
            assert!(asked == 1 || addr == at_once.addr && asked == 2, "{engine}: asked {asked} times");
        }
        for by_reset in [false, true] {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let ended = std::sync::Mutex::new(ended);
            let breaks = Backend::start(move |mut stream, _| {
                read_head(&mut stream);
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").unwrap();
                // Not before the half was read, which a reset would destroy on its way.
                ended.lock().unwrap().recv_timeout(PATIENCE).expect("told to end");
                if by_reset {
                    reset(stream);
                }
            });
            let running = Running::start(engine, &[breaks.addr], Limits::default());
            let mut client = connect(running.addr);
            client.write_all(GET).unwrap();
            let head = String::from_utf8(read_head(&mut client)).unwrap();
            assert!(head.contains("Content-Length: 10\r\n"), "{engine}: {head}");
            assert_eq!(read_exactly(&mut client, 4), b"half");
            end.send(()).unwrap();
            assert_eq!(read_rest(client), b"", "{engine}: nothing may look like the rest");
            assert_eq!((running.own("backend_truncated"), running.own("repeated")), (1, 0), "{engine}");
        }
    }
}

#[test]
fn a_kept_connection_that_ended_is_replaced() {
    for engine in engines() {
        // Each connection answers once, and ends when it is told.
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = std::sync::Mutex::new(ends);
        let backend = Backend::start(move |mut stream, number| {
            read_head(&mut stream);
            stream.write_all(ANSWER).unwrap();
            if number == 0 {
                // The second request arrives on a connection that is about to end.
                read_head(&mut stream);
                ends.lock().unwrap().recv_timeout(PATIENCE).expect("told to end");
                return;
            }
            answer_all(stream);
        });
        let running = Running::start(engine, &[backend.addr], Limits::default());
        running.ask();
        let mut client = connect(running.addr);
        client.write_all(GET).unwrap();
        wait_until("the kept connection is used", || running.count("outgoing_reused") == 1);
        end.send(()).unwrap();
        assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED, "{engine}");
        assert_eq!((running.own("repeated"), backend.accepted()), (1, 2), "{engine}");
    }
}

#[test]
fn a_backend_started_anew_is_found_again() {
    for engine in engines() {
        let listener = TcpListener::bind(loopback4()).unwrap();
        let addr = listener.local_addr().unwrap();
        let first = Backend::accept_from(listener, |mut stream, _| {
            read_head(&mut stream);
            stream.write_all(ANSWER).unwrap();
        });
        let running = Running::start(engine, &[addr], Limits::default());
        running.ask();
        drop(first);
        // The kept connection ended with it.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&addr.into()).unwrap();
        let answer = running.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 502 "), "{engine}: {answer}");
        socket.listen(16).unwrap();
        let _second = Backend::accept_from(socket.into(), |stream, _| answer_all(stream));
        running.ask();
    }
}

#[test]
fn a_kept_connection_is_closed_when_its_backend_ends() {
    for engine in engines() {
        let (tell, told) = std::sync::mpsc::channel::<io::Result<usize>>();
        let backend = Backend::start(move |mut stream, _| {
            read_head(&mut stream);
            stream.write_all(ANSWER).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            tell.send(stream.read(&mut [0])).unwrap();
        });
        let limits = Limits { upstream_idle_ms: 0, ..Limits::default() };
        let running = Running::start(engine, &[backend.addr], limits);
        running.ask();
        let end = told.recv_timeout(PATIENCE).expect("the backend is told in time");
        assert!(matches!(end, Ok(0)), "{engine}: {end:?}");
    }
}

#[test]
fn bytes_nobody_asked_for_end_a_kept_connection() {
    for engine in engines() {
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let backend = Backend::start(move |mut stream, number| {
            if number > 0 {
                return answer_all(stream);
            }
            read_head(&mut stream);
            stream.write_all(ANSWER).unwrap();
            wait.lock().unwrap().recv_timeout(PATIENCE).expect("told to go on");
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil").unwrap();
            assert_eq!(read_rest(stream), b"", "no further request may come here");
        });
        let running = Running::start(engine, &[backend.addr], Limits::default());
        running.ask();
        let before = running.count("outgoing_bytes_in");
        go_on.send(()).unwrap();
        wait_until("the bytes are received", || running.count("outgoing_bytes_in") > before);
        running.ask();
        assert_eq!((running.count("outgoing_reused"), backend.accepted()), (0, 2), "{engine}");
    }
}

#[test]
fn slow_backends_run_into_their_time_limits() {
    let limits = Limits {
        connect_timeout_ms: 100,
        upstream_timeout_ms: 100,
        send_timeout_ms: 100,
        linger_timeout_ms: 0,
        out_queue_bytes_max: 64 << 10,
        ..Limits::default()
    };
    for engine in engines() {
        // Its queue of connections is full: the kernel does not answer further ones.
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&loopback4().into()).unwrap();
        full.listen(0).unwrap();
        let addr = full.local_addr().unwrap().as_socket().unwrap();
        let fillers: Vec<Socket> = (0..4)
            .map(|_| {
                let filler = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                filler.set_nonblocking(true).unwrap();
                drop(filler.connect(&addr.into()));
                filler
            })
            .collect();
        let running = Running::start(engine, &[addr], limits.clone());
        let answer = running.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"), "{engine}: {answer}");
        assert_eq!(running.own("backend_connect_timeouts"), 2, "{engine}");
        drop(fillers);

        // Never answers.
        let silent = Backend::start(|mut stream, _| drop(stream.read_to_end(&mut Vec::new())));
        let running = Running::start(engine, &[silent.addr], limits.clone());
        let answer = running.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 504 "), "{engine}: {answer}");
        assert_eq!((running.own("backend_silent"), running.own("repeated")), (1, 0), "{engine}");

        // Never reads.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = std::sync::Mutex::new(ended);
        let deaf = Backend::start(move |stream, _| {
            let _ = ended.lock().unwrap().recv_timeout(PATIENCE);
            drop(stream);
        });
        let running = Running::start(engine, &[deaf.addr], limits.clone());
        let mut client = connect(running.addr);
        let mut writer = client.try_clone().unwrap();
        let writing = thread::spawn(move || {
            write!(writer, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 1 << 30).unwrap();
            let chunk = vec![0; 1 << 20];
            // Until the proxy gives up.
            (0..1 << 10).map(|_| writer.write_all(&chunk)).take_while(io::Result::is_ok).count()
        });
        let head = read_head(&mut client);
        // The client may see the reset that its unread body causes before it has read the answer.
        assert!(head.is_empty() || head.starts_with(b"HTTP/1.1 504 "), "{engine}: {head:?}");
        assert!(writing.join().unwrap() < 1 << 10, "{engine}: the backend took a body that nobody read");
        assert_eq!(running.own("backend_not_taken"), 1, "{engine}");
        drop(end);
    }
}

#[test]
fn a_client_that_dies_takes_its_backends_connection_with_it() {
    for engine in engines() {
        let (tell, told) = std::sync::mpsc::channel::<usize>();
        let backend = Backend::start(move |mut stream, _| {
            read_head(&mut stream);
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            // An answer without an end.
            let chunk = vec![b'x'; 1 << 16];
            let written = (0..1 << 20).map(|_| stream.write_all(&chunk)).take_while(io::Result::is_ok).count();
            tell.send(written).unwrap();
        });
        let running = Running::start(engine, &[backend.addr], Limits::default());
        for by_reset in [false, true] {
            let mut client = connect(running.addr);
            client.write_all(GET).unwrap();
            read_exactly(&mut client, 1 << 20);
            // With unread bytes both are a reset to the other end; without, only one is.
            if by_reset {
                reset(client);
            } else {
                drop(client);
            }
            let written = told.recv_timeout(PATIENCE).expect("the backend is told that nobody reads");
            assert!(written < 1 << 20, "{engine}");
        }
        wait_until("both are counted", || running.own("clients_gone") == 2 && running.server.connections() == 0);
    }
}

/// An answer is on its way when the server is told to stop: it still arrives.
#[test]
fn draining_waits_for_answers() {
    for engine in engines() {
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let backend = Backend::start(move |mut stream, _| {
            read_head(&mut stream);
            stream.write_all(ANSWER).unwrap();
            read_head(&mut stream);
            wait.lock().unwrap().recv_timeout(PATIENCE).expect("told to go on");
            stream.write_all(ANSWER).unwrap();
        });
        let running = Running::start(engine, &[backend.addr], Limits::default());
        let mut idle = connect(running.addr);
        idle.write_all(GET).unwrap();
        assert_eq!(read_exactly(&mut idle, RETURNED.len()), RETURNED, "{engine}");
        let mut client = connect(running.addr);
        client.write_all(GET).unwrap();
        wait_until("the backend is asked", || running.count("outgoing_bytes_out") == 2 * GET_PASSED_BYTES);
        let Running { server, .. } = running;
        let draining = thread::spawn(move || server.drain());
        assert_eq!(read_rest(idle), b"", "{engine}: who waits for nothing is closed");
        go_on.send(()).unwrap();
        assert_eq!(read_exactly(&mut client, RETURNED.len()), RETURNED, "{engine}");
        assert_eq!(read_rest(client), b"", "{engine}: an orderly end");
        assert_eq!(draining.join().unwrap().unwrap().tasks_left, 0);
    }
}

#[test]
fn kept_connections_are_few_and_end() {
    for engine in engines() {
        let (ended, ends) = std::sync::mpsc::channel::<usize>();
        let asked = Arc::new(AtomicUsize::new(0));
        let all = Arc::clone(&asked);
        let backend = Backend::start(move |mut stream, number| {
            read_head(&mut stream);
            // Nobody is answered before all have asked: there are five connections.
            all.fetch_add(1, Ordering::SeqCst);
            wait_until("all have asked", || all.load(Ordering::SeqCst) >= 5);
            stream.write_all(ANSWER).unwrap();
            answer_all(stream);
            ended.send(number).unwrap();
        });
        let limits = Limits { upstreams_idle_max: 2, upstream_idle_ms: 3_000, ..Limits::default() };
        let running = Running::start(engine, &[backend.addr], limits);
        let mut clients: Vec<_> = (0..5).map(|_| connect(running.addr)).collect();
        clients.iter_mut().for_each(|client| client.write_all(GET).unwrap());
        for client in &mut clients {
            assert_eq!(read_exactly(client, RETURNED.len()), RETURNED, "{engine}");
        }
        assert_eq!((asked.load(Ordering::SeqCst), running.count("dialed")), (5, 5), "{engine}");
        // Three end at once, the kept two when their time is over.
        for _ in 0..3 {
            ends.recv_timeout(PATIENCE).expect("one too many is kept");
        }
        let kept = Instant::now();
        for _ in 0..2 {
            ends.recv_timeout(PATIENCE).expect("a kept connection ends");
        }
        // Not a limit on speed: the first three did not wait for this.
        assert!(kept.elapsed() > Duration::from_millis(500), "{engine}: nothing was kept");
    }
}

#[test]
fn many_clients_and_backends_at_once() {
    for engine in engines() {
        let bodies: Arc<Vec<u8>> = Arc::new(pattern(70_000, 0));
        let backends: Vec<_> = (0..3)
            .map(|_| {
                let bodies = Arc::clone(&bodies);
                Backend::start(move |mut stream, _| {
                    loop {
                        let head = String::from_utf8(read_head(&mut stream)).unwrap();
                        let Some(length) = head.split(['/', ' ']).nth(2) else { return };
                        let length: usize = length.parse().unwrap();
                        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").unwrap();
                        stream.write_all(&bodies[..length]).unwrap();
                    }
                })
            })
            .collect();
        let addrs: Vec<_> = backends.iter().map(|backend| backend.addr).collect();
        let running = Running::start(engine, &addrs, Limits::default());
        thread::scope(|scope| {
            for number in 0..16usize {
                let (addr, bodies) = (running.addr, &bodies);
                scope.spawn(move || {
                    let mut client = connect(addr);
                    for round in 0..40usize {
                        let length = (number * 4096 + round * 977) % 70_000;
                        write!(client, "GET /{length} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
                        let head = String::from_utf8(read_head(&mut client)).unwrap();
                        assert!(head.contains(&format!("\r\nContent-Length: {length}\r\n")), "{engine}: {head}");
                        assert!(read_exactly(&mut client, length) == bodies[..length], "{engine}: {number} {round}");
                    }
                });
            }
        });
        assert_eq!((running.own("requests"), running.own("repeated")), (640, 0), "{engine}");
        assert!(running.count("dialed") <= 16 * 3, "{engine}: connections are kept");
    }
}
