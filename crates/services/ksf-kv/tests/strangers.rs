//! Limits of peers that have not sent the password, in RESP and HTTP.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Client, Redis, Serving, engines};
use ksf::limits::Limits;
use ksf_kv::{Durability, Settings};
use ksf_test::{PATIENCE, own_network, stream, wait_until};

const PASSWORD: &str = "open sesame";

fn on_each_engine(test: impl Fn(&str, &Serving)) {
    on_each_engine_with(Limits::default(), test);
}

fn on_each_engine_with(limits: Limits, test: impl Fn(&str, &Serving)) {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        // No test here measures the disk.
        let durability = Durability::None;
        let settings = Settings { password: Some(PASSWORD.into()), durability, ..Settings::default() };
        // And none fills a log.
        let serving = Serving::start_on(engine, folder.path(), limits.clone(), settings, 32);
        test(&engine.to_string(), &serving);
        serving.stop();
    }
}

/// Sends bytes, leaves the sending direction open, and returns what the server sends until it ends the connection.
fn until_end(mut stream: impl Read + Write, bytes: &[u8]) -> String {
    // The server may have ended the connection already.
    let _ = stream.write_all(bytes);
    let mut sent = Vec::new();
    // A reset ends it, too. A time limit is a failure.
    if let Err(error) = stream.read_to_end(&mut sent) {
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "{}",
            bytes[..bytes.len().min(60)].escape_ascii()
        );
    }
    String::from_utf8_lossy(&sent).into_owned()
}

/// Beginnings of commands, with the errors that they get.
fn too_much() -> Vec<(Vec<u8>, &'static str)> {
    const COUNT: &str = "-ERR Protocol error: unauthenticated multibulk length\r\n";
    const LENGTH: &str = "-ERR Protocol error: unauthenticated bulk length\r\n";
    vec![
        (b"*11\r\n".to_vec(), COUNT),
        (b"*2147483647\r\n".to_vec(), COUNT),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$8388608\r\n".to_vec(), "-ERR Protocol error: invalid bulk length\r\n"),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n".to_vec(), LENGTH),
        (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n".to_vec(), LENGTH),
        (b"*x\r\n".to_vec(), "-ERR Protocol error: invalid multibulk length\r\n"),
    ]
}

#[test]
fn commands_before_auth_have_the_limits_of_redis() {
    let redis = Redis::start_with(&["--requirepass", PASSWORD, "--proto-max-bulk-len", "1114112"]);
    on_each_engine(|engine, serving| {
        for (bytes, told) in too_much() {
            let what = bytes.escape_ascii().to_string();
            assert_eq!(until_end(stream::connect(serving.address()), &bytes), told, "{engine}: {what}");
            if let Some(redis) = &redis {
                let theirs = UnixStream::connect(redis.folder.path("redis")).unwrap();
                assert_eq!(until_end(theirs, &bytes), told, "Redis: {what}");
            }
        }
        // The limit of one argument is also that of all together, and of an inline command.
        let half = [b"*9\r\n$4\r\nAUTH\r\n$9000\r\n".to_vec(), vec![b'x'; 9000], b"\r\n$9000\r\n".to_vec()].concat();
        let told = until_end(stream::connect(serving.address()), &half);
        assert_eq!(told, "-ERR Protocol error: unauthenticated bulk length\r\n", "{engine}");
        for front in ["PING ", "x", "GET "] {
            let told = until_end(stream::connect(serving.address()), &[front.as_bytes(), &[b'x'; 16 << 10]].concat());
            assert_eq!(told, "-ERR Protocol error: too big inline request\r\n", "{engine}: {front}");
        }
    });
}

/// Only a long password keeps guessers out.
#[test]
fn guesses_of_the_password_are_not_limited() {
    on_each_engine(|engine, serving| {
        let mut client = serving.connect();
        for guess in 0..200 {
            client.send(&["AUTH", &guess.to_string()]);
            let told = client.reply();
            assert!(told.starts_with("-WRONGPASS"), "{engine}: {told}");
        }
        client.send(&["AUTH", PASSWORD]);
        assert_eq!(client.reply(), "+OK", "{engine}");
    });
}

#[test]
fn limits_rise_with_the_password_and_fall_with_reset() {
    on_each_engine(|engine, serving| {
        let value = "v".repeat(1_000_000);
        let mut client = serving.connect();
        assert_eq!(client.ask("PING"), "-NOAUTH Authentication required.", "{engine}");
        let of_a_transaction = "-EXECABORT Transaction discarded because of: NOAUTH Authentication required.";
        assert_eq!(client.ask("EXEC"), of_a_transaction, "{engine}");
        assert_eq!(client.ask(&format!("AUTH {}", "x".repeat(16_000)))[..10], *"-WRONGPASS", "{engine}");
        // In one pipeline: commands behind AUTH have the limits that it brings.
        client.send(&["AUTH", PASSWORD]);
        client.send(&["SET", "k", &value]);
        client.send(&["DEL", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"]);
        for reply in ["+OK", "+OK", ":1"] {
            assert_eq!(client.reply(), reply, "{engine}");
        }
        assert_eq!(client.ask("RESET"), "+RESET", "{engine}");
        let told = until_end(client.0.into_inner(), b"*11\r\n");
        assert_eq!(told, "-ERR Protocol error: unauthenticated multibulk length\r\n", "{engine}");

        // AUTH does not wait for the end of a pause, because the limits of the commands behind it depend on it.
        let mut near = serving.connect();
        near.send(&["AUTH", PASSWORD]);
        assert_eq!(near.reply(), "+OK", "{engine}");
        assert_eq!(near.ask("CLIENT PAUSE 100 ALL"), "+OK", "{engine}");
        let mut client = serving.connect();
        client.send(&["AUTH", PASSWORD]);
        client.send(&["SET", "k", &value]);
        assert_eq!((client.reply(), client.reply()), ("+OK".into(), "+OK".into()), "{engine}");
    });
}

fn http(fields: &str) -> Vec<u8> {
    format!("PUT /key HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes()
}

#[test]
fn requests_without_the_password_have_16_kib() {
    let password = format!("Authorization: Bearer {PASSWORD}\r\n");
    let long = format!("X: {}\r\n", "x".repeat(16 << 10));
    on_each_engine(|engine, serving| {
        let status = |bytes: &[u8]| {
            let told = until_end(stream::connect(serving.address()), bytes);
            let bodies = told.matches("HTTP/1.1 ").count();
            assert_eq!(bodies, 1, "{engine}: {told}");
            told[9..12].parse::<u16>().unwrap_or_else(|_| panic!("{engine}: {told}"))
        };
        // The server answers each of these before its end.
        assert_eq!(status(&http("Content-Length: 16384\r\n")), 401, "{engine}");
        assert_eq!(status(&http("Authorization: Bearer no\r\nContent-Length: 1000000\r\n")), 401, "{engine}");
        let chunks = [http("Transfer-Encoding: chunked\r\n"), b"5000\r\n".to_vec(), vec![b'x'; 0x5000]].concat();
        assert_eq!(status(&chunks), 401, "{engine}");
        assert_eq!(status(&http(&long)[..(16 << 10) + 10]), 431, "{engine}");
        assert_eq!(status(&[&b"GET /"[..], &[b'x'; 16 << 10]].concat()), 431, "{engine}");

        // With the password a request is as long as any, and so are those behind it.
        let mut peer = stream::connect(serving.address());
        let put = http(&format!("{password}Content-Length: 1000000\r\n"));
        let second = http(&format!("{password}{long}Content-Length: 1\r\nConnection: close\r\n"));
        peer.write_all(&[put, vec![b'x'; 1_000_000], second, b"y".to_vec()].concat()).unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        let mut told = String::new();
        peer.read_to_string(&mut told).unwrap();
        let statuses: Vec<&str> = told.match_indices("HTTP/1.1 ").map(|(at, _)| &told[at + 9..at + 12]).collect();
        assert_eq!(statuses, ["201", "204"], "{engine}");
    });
}

/// Peers that announce much and send little take no memory from others.
#[test]
fn silent_strangers_hold_nobody_up() {
    on_each_engine(|engine, serving| {
        let part = [&b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n"[..], &[b'x'; 10_000]].concat();
        let mut strangers: Vec<_> = (0..100).map(|_| stream::connect(serving.address())).collect();
        for stranger in &mut strangers {
            let _ = stranger.write_all(&part);
        }
        let mut client = Client::new(serving.address());
        client.send(&["AUTH", PASSWORD]);
        assert_eq!(client.reply(), "+OK", "{engine}");
        for stranger in strangers {
            let told = until_end(stranger, b"");
            assert!(told.is_empty() || told.starts_with("-ERR Protocol error: unauthenticated"), "{engine}: {told}");
        }
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
    });
}

/// A peer without the password that sends the same command again and again, a few bytes at a time, and throws away the
/// replies.
struct Stranger {
    address: SocketAddr,
    stream: TcpStream,
    command: Vec<u8>,
    step_bytes: usize,
    sent_bytes: usize,
    /// It sends once in 50 ms, the others as fast as the server reads.
    is_slow: bool,
}

impl Stranger {
    fn new(address: SocketAddr, number: usize) -> Self {
        let long = |front: &str| [front.as_bytes(), &[b'x'; 14_000]].concat();
        let (command, step_bytes, is_slow) = match number % 8 {
            // The longest command that a stranger may send; it does not end within the test.
            0 => (long("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16000\r\n"), 1, true),
            1 => (long("*2\r\n$4\r\nAUTH\r\n$16000\r\n"), 100, true),
            2 => (long("GET /key HTTP/1.1\r\nHost: x\r\nX: "), 1, true),
            // Most of it at once.
            3 => (long("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16000\r\n"), 14_000, true),
            // These end and are sent again.
            4 => ([long("*2\r\n$4\r\nAUTH\r\n$14000\r\n"), b"\r\n".to_vec()].concat(), 1000, false),
            5 => (b"*1\r\n$4\r\nPING\r\n".to_vec(), 1, false),
            6 => (b"PUT /key HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".to_vec(), 7, false),
            _ => (long("SET k "), 3000, false),
        };
        Self { address, stream: Self::connect(address), command, step_bytes, sent_bytes: 0, is_slow }
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = stream::connect(address);
        stream.set_nonblocking(true).unwrap();
        stream
    }

    fn go_on(&mut self) {
        let is_over = |result: std::io::Result<usize>| match result {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        let rest = &self.command[self.sent_bytes..];
        let sent = self.stream.write(&rest[..rest.len().min(self.step_bytes)]);
        let sent_bytes = *sent.as_ref().unwrap_or(&0);
        if is_over(self.stream.read(&mut [0; 4096])) || is_over(sent) {
            self.stream = Self::connect(self.address);
            self.sent_bytes = 0;
        } else {
            self.sent_bytes = (self.sent_bytes + sent_bytes) % self.command.len();
        }
    }
}

/// Lets all strangers send until `ends`, and counts the rounds of the slow ones.
fn annoy(strangers: &mut [Stranger], ends: &AtomicBool, slow_rounds: &AtomicU64) {
    let mut slow_at = Instant::now();
    while !ends.load(Ordering::Relaxed) {
        let is_slow_round = Instant::now() >= slow_at;
        if is_slow_round {
            slow_at = Instant::now() + Duration::from_millis(50);
            slow_rounds.fetch_add(1, Ordering::Relaxed);
        }
        strangers.iter_mut().filter(|stranger| is_slow_round || !stranger.is_slow).for_each(Stranger::go_on);
    }
}

/// Long commands, too, which arrive in parts, also of clients that connect and give the password meanwhile, while strangers have all
/// the memory for commands in parts.
#[test]
fn a_thousand_strangers_keep_no_command_waiting_for_a_second() {
    const STRANGERS: usize = 1000;
    let little = Limits { assembly_bytes_max: 1 << 20, ..Limits::default() };
    for (limits, is_short) in [(Limits::default(), false), (little, true)] {
        on_each_engine_with(limits, |engine, serving| {
            let client = || {
                let mut client = serving.connect();
                client.send(&["AUTH", PASSWORD]);
                assert_eq!(client.reply(), "+OK", "{engine}");
                client
            };
            let mut clients: Vec<Client> = (0..4).map(|_| client()).collect();
            let mut strangers: Vec<_> = (0..STRANGERS).map(|number| Stranger::new(serving.address(), number)).collect();
            let (ends, slow_rounds) = (AtomicBool::new(false), AtomicU64::new(0));
            let mut most = Duration::ZERO;
            std::thread::scope(|scope| {
                scope.spawn(|| annoy(&mut strangers, &ends, &slow_rounds));
                // After a panic the thread above would not end.
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let rounds = || slow_rounds.load(Ordering::Relaxed);
                    let counters = || serving.server.counters().into_iter();
                    let waits = || counters().find(|counter| counter.name == "memory_waits").unwrap().value;
                    wait_until("the strangers are at work", || rounds() > 5 && (waits() > 0 || !is_short));
                    let end = rounds() + 30;
                    for number in (0..).take_while(|number| *number < 200 || rounds() < end) {
                        let value = "v".repeat(if number % 2 == 1 && number < 200 { 100_000 } else { 100 });
                        let place = &mut clients[number / 2 % 4];
                        let begin = Instant::now();
                        if number % 10 == 9 {
                            *place = client();
                        }
                        place.send(&["SET", "k", &value]);
                        assert_eq!(place.reply(), "+OK", "{engine}");
                        most = most.max(begin.elapsed());
                    }
                }));
                ends.store(true, Ordering::Relaxed);
                result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            });
            // The promise is one second. Next to other tests the machine may take longer.
            let bound = ksf_test::effort(PATIENCE, Duration::from_secs(1));
            assert!(most <= bound, "{engine}: a SET took {most:?}; short of memory: {is_short}");
        });
    }
}
