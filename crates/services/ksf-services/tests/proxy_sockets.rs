//! The proxy of the demo server on real sockets, on every engine that works here: slow and dying clients, backends that
//! reset, fall silent, break off or do not read, and connections to backends that are kept. What it says and in which
//! order is tried without sockets in http_proxy.rs.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::common::{counter, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::Server;
use ksf_services::http::Proxy;
use ksf_test::stream::{be_patient, connect, expect_end, expect_reset, read_exactly, read_rest, reset};
use ksf_test::{PATIENCE, pattern, side_by_side, wait_until};
use socket2::{Domain, Socket, Type};

/// What one turn receives at most: every slot of a shard.
const SLOTS_BYTES: u64 = ksf::server::SLOT_BYTES as u64 * ksf::server::SLOTS as u64;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
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
        let listener = TcpListener::bind(loopback4()).expect("a free port");
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

struct Running {
    server: Server,
    proxy: Arc<Proxy>,
    addr: SocketAddr,
}

impl Running {
    fn start(engine: EngineKind, backends: &[SocketAddr], limits: Limits) -> Self {
        let proxy = Arc::new(Proxy::new(backends.to_vec(), true, 1));
        // One shard, so that it is known which connection is kept.
        let cpu = ksf::cpus::allowed().unwrap()[0];
        let server = Server::builder()
            .engine(engine)
            .cpus(Some(vec![cpu]))
            .limits(limits)
            .listen(ListenAddr::Tcp(loopback4()), Arc::clone(&proxy), None)
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

/// How a response without a length ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Whole,
    BackendResets,
    BackendIsSilent,
    ServerDrains,
    ServerStops,
}

/// An orderly end of the connection would pass for the end of such a response.
#[test]
fn response_without_a_length_does_not_end_in_order_when_it_is_cut_short() {
    use End::{BackendIsSilent, BackendResets, ServerDrains, ServerStops, Whole};
    for engine in engines() {
        for end in [Whole, BackendResets, BackendIsSilent, ServerDrains, ServerStops] {
            let (go_on, wait) = std::sync::mpsc::channel::<()>();
            let wait = std::sync::Mutex::new(wait);
            let backend = Backend::start(move |mut stream, _| {
                read_head(&mut stream);
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhalf").unwrap();
                // Until it is told, or the test is over.
                let _ = wait.lock().unwrap().recv_timeout(PATIENCE);
                if end == BackendResets {
                    reset(stream);
                }
            });
            let limits = Limits { drain_timeout_ms: 100, ..Limits::default() };
            let running = Running::start(engine, &[backend.addr], limits.clone());
            let mut clients = ["1.0", "1.1"].map(|version| {
                let mut client = connect(running.addr);
                write!(client, "GET / HTTP/{version}\r\nHost: x\r\n\r\n").unwrap();
                client
            });
            for (client, body) in clients.iter_mut().zip([&b"half"[..], b"4\r\nhalf\r\n"]) {
                read_head(client);
                assert_eq!(read_exactly(client, body.len()), body, "{engine}, {end:?}");
            }
            match end {
                Whole | BackendResets => (0..2).for_each(|_| go_on.send(()).unwrap()),
                // Only now: no pause of this test ends a response before.
                BackendIsSilent => running.server.set_limits(&Limits { upstream_timeout_ms: 100, ..limits }.into()),
                ServerDrains => drop(running.server.drain().unwrap()),
                ServerStops => drop(running.server),
            }
            let [mut old, mut new] = clients;
            if end == Whole {
                expect_end(&mut old);
                assert_eq!(read_exactly(&mut new, 5), b"0\r\n\r\n", "{engine}");
            } else {
                expect_reset(&mut old);
                assert_eq!(read_rest(new), b"", "{engine}, {end:?}");
            }
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
    // Each backend meets one short limit: with others it might end by one of them first.
    let long = PATIENCE.as_millis() as u64;
    let limits = Limits {
        connect_timeout_ms: long,
        upstream_timeout_ms: long,
        send_timeout_ms: long,
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
        let running = Running::start(engine, &[addr], Limits { connect_timeout_ms: 100, ..limits.clone() });
        let answer = running.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"), "{engine}: {answer}");
        assert_eq!(running.own("backend_connect_timeouts"), 2, "{engine}");
        drop(fillers);

        // Never answers.
        let silent = Backend::start(|mut stream, _| drop(stream.read_to_end(&mut Vec::new())));
        let running = Running::start(engine, &[silent.addr], Limits { upstream_timeout_ms: 100, ..limits.clone() });
        let answer = running.refused(GET);
        assert!(answer.starts_with("HTTP/1.1 504 "), "{engine}: {answer}");
        assert_eq!((running.own("backend_silent"), running.own("repeated")), (1, 0), "{engine}");

        // Never reads. Whichever limit is over first, the client is not at fault.
        let of_send = Limits { send_timeout_ms: 100, ..limits.clone() };
        let of_answer = Limits { upstream_timeout_ms: 100, ..limits.clone() };
        for limits in [of_send, of_answer] {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let ended = std::sync::Mutex::new(ended);
            let deaf = Backend::start(move |stream, _| {
                let _ = ended.lock().unwrap().recv_timeout(PATIENCE);
                drop(stream);
            });
            let running = Running::start(engine, &[deaf.addr], limits);
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
            assert_eq!((running.own("backend_not_taken"), running.own("slow_heads")), (1, 0), "{engine}");
            drop(end);
        }
    }
}

/// A backend may take an orderly end for that of the request.
#[test]
fn a_request_that_is_cut_short_does_not_end_in_order_for_the_backend() {
    const LENGTH: &[u8] = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n0123456789";
    const CHUNKS: &[u8] = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    let last = [CHUNKS, b"0\r\n"].concat();
    for engine in engines() {
        for request in [LENGTH, CHUNKS, &last] {
            for by_reset in [false, true] {
                let (tell, told) = std::sync::mpsc::channel();
                let (tell_end, told_end) = std::sync::mpsc::channel();
                let backend = Backend::start(move |mut stream, _| {
                    read_head(&mut stream);
                    // A byte of the body has come: the exchange has begun.
                    read_exactly(&mut stream, 1);
                    tell.send(()).unwrap();
                    tell_end.send(stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind())).unwrap();
                });
                let running = Running::start(engine, &[backend.addr], Limits::default());
                let mut client = connect(running.addr);
                client.write_all(request).unwrap();
                told.recv_timeout(PATIENCE).expect("the beginning of the request");
                if by_reset {
                    reset(client);
                } else {
                    client.shutdown(std::net::Shutdown::Write).unwrap();
                    read_rest(client);
                }
                let seen = told_end.recv_timeout(PATIENCE).expect("the end");
                let text = request.escape_ascii();
                assert_eq!(seen, Err(io::ErrorKind::ConnectionReset), "{engine}, by reset {by_reset}: {text}");
            }
        }
    }
}

/// TCP has all of the request. A backend that works on it must not take the end for one of a client that has all it wants.
#[test]
fn an_exchange_that_is_not_over_resets_its_backend() {
    for engine in engines() {
        for end in [End::BackendIsSilent, End::ServerDrains, End::ServerStops] {
            let (tell, told) = std::sync::mpsc::channel();
            let (tell_end, told_end) = std::sync::mpsc::channel();
            let backend = Backend::start(move |mut stream, _| {
                read_head(&mut stream);
                tell.send(()).unwrap();
                tell_end.send(stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind())).unwrap();
            });
            let limits = Limits { drain_timeout_ms: 100, ..Limits::default() };
            let running = Running::start(engine, &[backend.addr], limits.clone());
            let mut client = connect(running.addr);
            client.write_all(GET).unwrap();
            told.recv_timeout(PATIENCE).expect("the request");
            match end {
                End::ServerDrains => drop(running.server.drain().unwrap()),
                End::ServerStops => drop(running.server),
                _ => running.server.set_limits(&Limits { upstream_timeout_ms: 100, ..limits }.into()),
            }
            let seen = told_end.recv_timeout(PATIENCE).expect("the end");
            assert_eq!(seen, Err(io::ErrorKind::ConnectionReset), "{engine}, {end:?}");
        }
    }
}

/// Its backend waits as long as the proxy. Only a backend that keeps a client waiting for leave to send is silent.
#[test]
fn a_client_that_stalls_in_its_body_is_at_fault() {
    const HEAD: &str = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n";
    const EXPECT: &str = "Expect: 100-continue\r\n";
    for engine in engines() {
        for (field, continues, body, status, counted) in [
            ("", false, "half", 408, "slow_heads"),
            (EXPECT, true, "", 408, "slow_heads"),
            (EXPECT, true, "half", 408, "slow_heads"),
            // Without leave, as clients do after a while.
            (EXPECT, false, "half", 408, "slow_heads"),
            (EXPECT, false, "", 504, "backend_silent"),
        ] {
            let what = format!("{engine}: {field:?}, {continues}, {body:?}");
            let (tell, told) = std::sync::mpsc::channel();
            let (tell_end, told_end) = std::sync::mpsc::channel();
            let backend = Backend::start(move |mut stream, _| {
                read_head(&mut stream);
                if continues {
                    stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
                }
                read_exactly(&mut stream, body.len());
                tell.send(()).unwrap();
                tell_end.send(stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind())).unwrap();
            });
            let running = Running::start(engine, &[backend.addr], Limits::default());
            let mut client = connect(running.addr);
            write!(client, "{HEAD}{field}\r\n").unwrap();
            if continues {
                assert!(read_head(&mut client).starts_with(b"HTTP/1.1 100 "), "{what}");
            }
            client.write_all(body.as_bytes()).unwrap();
            told.recv_timeout(PATIENCE).expect("what came of the request");
            running.server.set_limits(&Limits { upstream_timeout_ms: 100, ..Limits::default() }.into());
            let answer = String::from_utf8(read_rest(client)).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {answer}");
            let seen = told_end.recv_timeout(PATIENCE).expect("the end");
            assert_eq!(seen, Err(io::ErrorKind::ConnectionReset), "{what}");
            for counter in ["slow_heads", "backend_silent", "backend_truncated"] {
                assert_eq!(running.own(counter), u64::from(counter == counted), "{what}: {counter}");
            }
        }
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

#[test]
fn kept_connections_are_few_and_end() {
    side_by_side(engines(), |engine| {
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
        // Before any of them is kept.
        let begun = Instant::now();
        clients.iter_mut().for_each(|client| client.write_all(GET).unwrap());
        for client in &mut clients {
            assert_eq!(read_exactly(client, RETURNED.len()), RETURNED, "{engine}");
        }
        assert_eq!((asked.load(Ordering::SeqCst), running.count("dialed")), (5, 5), "{engine}");
        // Three end at once, the kept two when their time is over.
        for _ in 0..3 {
            ends.recv_timeout(PATIENCE).expect("one too many is kept");
        }
        for _ in 0..2 {
            ends.recv_timeout(PATIENCE).expect("a kept connection ends");
        }
        // Not a limit on speed: the first three did not wait for this.
        assert!(begun.elapsed() > Duration::from_millis(2_500), "{engine}: nothing was kept");
    });
}
