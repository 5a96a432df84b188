//! Memory that clients take which send and do not read. The server is a process of its own. The clients send every command of the
//! table and every request of HTTP, and fill the state of sessions.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::common::bound::{bound_bytes, slot_bytes};
use crate::common::table::{self, Driven, Size};
use crate::common::*;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_kv::cluster::{Cluster, NodeSpec};
use ksf_test::{Helper, PATIENCE, effort, is_helper, listen, say, stream, wait_until};

const ENGINE: &str = "KSF_TEST_ENGINE";
const FOLDER: &str = "KSF_TEST_FOLDER";

const REPLY_BYTES_MAX: usize = 4 << 20;
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Elements of a key, and bytes of each. Together they almost reach the limit of a reply.
const LONG: Size = (64, 48 << 10);
/// Elements of keys that are created again for each command that writes.
const WRITTEN: Size = (64, 4 << 10);
/// Elements of keys for the test of long arguments.
const TRIED: Size = (64, 64);
/// Bytes of an argument other than a key.
const PADDING_BYTES: usize = 256 << 10;
/// Longest reply that may wait in the server's memory for a client.
const LONG_REPLY_BYTES: usize = 16 << 10;

fn limits() -> Limits {
    Limits {
        connection_bytes_max: REPLY_BYTES_MAX,
        message_bytes_max: MESSAGE_BYTES_MAX,
        shard_bytes_max: 8 << 20,
        assembly_bytes_max: 4 << 20,
        // No pass changes its holder earlier, and no connection is closed because others wait.
        pressure_timeout_ms: 60_000,
        send_timeout_ms: 600_000,
        ..Limits::default()
    }
}

/// Runs the server in a process of its own, so that the test measures the server's memory alone.
#[test]
#[ignore = "the server of the tests below"]
fn helper_serves() {
    if !is_helper() {
        return;
    }
    let engine = std::env::var(ENGINE).unwrap();
    let engine = engines().into_iter().find(|known| known.name() == engine).unwrap();
    let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).unwrap());
    // Every second slot, so that replies about slots are long.
    let slots = |first: usize| {
        let slots: Vec<String> = (first..16_384).step_by(2).map(|slot| slot.to_string()).collect();
        slots.join(",")
    };
    let node = |last: usize| NodeSpec { address: format!("192.0.2.{}:6379", last + 1), slots: slots(last) };
    let cluster = Some(Cluster::new(&[node(0), node(1)], "192.0.2.1:6379").unwrap());
    let serving = Serving::start_on(engine, &folder, limits(), Settings { cluster, ..Settings::default() }, 32);
    say(serving.address());
    while listen().is_some() {}
    serving.stop();
}

fn soon() -> Duration {
    effort(PATIENCE, Duration::from_secs(1))
}

/// The same while the server works off what its sockets had.
const BURST: Duration = Duration::from_secs(1);

/// A server in a process of its own.
struct Apart {
    server: Helper,
    /// Kept here, because the server is killed.
    _folder: tempfile::TempDir,
    address: SocketAddr,
    idle_bytes: usize,
}

impl Apart {
    fn start(engine: EngineKind) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let env = [(ENGINE, engine.name().to_owned()), (FOLDER, path)];
        let mut server = Helper::start("memory::helper_serves", &env);
        let address = server.hear().parse().unwrap();
        Self { server, _folder: folder, address, idle_bytes: 0 }
    }

    /// Takes the present memory as the start: it is not due to peers.
    fn note_idle(&mut self) {
        self.idle_bytes = self.resident_bytes();
    }

    fn resident_bytes(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.server.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    fn connect(&self) -> Client {
        Client::new(self.address)
    }

    fn shards() -> usize {
        ksf::cpus::allowed().unwrap().len()
    }

    /// Resident bytes above those at the start.
    fn taken_bytes(&self) -> usize {
        self.resident_bytes().saturating_sub(self.idle_bytes)
    }

    /// Bytes of keys and values, as the server counts them.
    fn stored_bytes(&self) -> usize {
        let info = self.connect().ask("INFO memory");
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse().unwrap()
    }

    /// Time until another client has its reply.
    fn ping(&self, what: &str) -> Duration {
        let begin = Instant::now();
        assert_eq!(self.connect().ask("PING"), "+PONG", "{what}");
        begin.elapsed()
    }

    /// Checks that another client gets a reply, in a soak within the promised second. Other tests may slow the machine down.
    fn ping_soon(&self, what: &str) {
        let (took, soon) = (self.ping(what), soon());
        assert!(took < soon, "{what}: PING took {took:?}");
    }

    /// Checks that another client gets a reply while these connections are open, and that the server's memory is within its bound,
    /// besides the keys and values that the connections wrote.
    fn check(&self, peers: Vec<TcpStream>, stored_before: usize, what: &str) {
        // Waits until the server has processed or queued the input in its sockets, which takes as long as the machine needs.
        let (mut most, mut longest) = (0, Duration::ZERO);
        wait_until(format_args!("{what}: the burst is over"), || {
            most = most.max(self.taken_bytes());
            let took = self.ping(what);
            longest = longest.max(took);
            took < soon()
        });
        assert!(longest < effort(PATIENCE, BURST), "{what}: in the burst PING took {longest:?}");
        // Several connections, so that most likely each shard has one behind the input of the others.
        for _ in 0..8 * Self::shards() {
            self.ping_soon(what);
            most = most.max(self.taken_bytes());
        }
        let bound = bound_bytes(&limits(), REPLY_BYTES_MAX, Self::shards(), peers.len());
        drop(peers);
        let stored = self.stored_bytes().saturating_sub(stored_before);
        assert!(most <= bound + bound / 4 + stored, "{what}: {most} bytes of {bound}, {stored} stored");
    }

    /// Opens 100 connections (1,000 in a soak). Each sends one of these requests and reads nothing.
    fn attack(&self, requests: &[Vec<u8>], what: &str) {
        let stored_before = self.stored_bytes();
        let peers: Vec<TcpStream> = (0..effort(100, 1000))
            .map(|at| {
                let mut peer = stream::connect(self.address);
                // The small buffer keeps replies in the server.
                rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 4096).unwrap();
                peer.set_nonblocking(true).unwrap();
                let mut left = &requests[at % requests.len()][..];
                // The rest is not sent: the socket is full because the server has stopped reading.
                while let Ok(sent @ 1..) = peer.write(left) {
                    left = &left[sent..];
                }
                if at % 50 == 49 {
                    self.ping_soon(&format!("{what}, {at} have sent"));
                }
                peer
            })
            .collect();
        self.check(peers, stored_before, what);
        if effort(false, true) {
            self.check_memory_is_returned(what);
        }
    }

    /// Checks that the server returns memory. Receive slots stay, and so does some freed memory until there is more of it.
    fn check_memory_is_returned(&self, what: &str) {
        let rest = Self::shards() * (slot_bytes() + (16 << 20));
        wait_until(format_args!("{what}: memory is returned"), || self.taken_bytes() <= rest + rest / 4);
        self.ping(what);
    }

    /// Sends these commands on a new connection. Returns all replies.
    fn converse(&self, commands: &[u8]) -> String {
        let mut peer = stream::connect(self.address);
        peer.write_all(commands).unwrap();
        // The server closes the connection after the last reply.
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let mut replies = Vec::new();
        let _ = peer.read_to_end(&mut replies);
        String::from_utf8_lossy(&replies).into_owned()
    }
}

fn encoded(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    words.iter().for_each(|word| bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes()));
    bytes
}

/// Keys of each type, and some with long names.
fn fill(apart: &Apart, size: Size) {
    apart.converse(&table::encoded(&table::make_all(size)));
    let name = |at: usize| format!("{{b}}{at}{}", "x".repeat(30 << 10));
    let long: Vec<Vec<String>> = (0..40).map(|at| vec!["SET".into(), name(at), "1".into()]).collect();
    apart.converse(&table::encoded(&long));
}

/// Commands with long replies run one by one, all others together; in a soak each runs by itself.
#[test]
fn clients_that_ask_and_do_not_read_take_no_more_than_is_stated() {
    let mut all: Vec<Driven> = Vec::new();
    for engine in engines_of_effort() {
        let mut apart = Apart::start(engine);
        if all.is_empty() {
            all = table::all(TRIED, |commands| apart.converse(commands));
        }
        fill(&apart, LONG);
        // Replies about connections are long, too.
        let crowd: Vec<TcpStream> = (0..200).map(|_| stream::connect(apart.address)).collect();
        apart.note_idle();
        let (mut long, mut others) = (Vec::new(), Vec::new());
        for one in &all {
            let replies = apart.converse(&one.request(WRITTEN));
            let is_long = one.reply(WRITTEN, &replies).len() > LONG_REPLY_BYTES;
            let requests = [one.request(WRITTEN).repeat(4), one.padded(WRITTEN, PADDING_BYTES).repeat(effort(2, 1))];
            if is_long && effort(!one.is_write, true) {
                apart.attack(&requests[..1], &format!("{engine}: {}", one.name));
            }
            long.extend(is_long.then_some(&one.name[..]));
            if effort(false, true) {
                apart.attack(&requests, &format!("{engine}: {}, long arguments", one.name));
            } else {
                others.extend(requests);
            }
        }
        for requests in others.chunks(100) {
            apart.attack(requests, &format!("{engine}: all commands"));
        }
        for name in [
            "mget",
            "lrange",
            "hgetall",
            "smembers",
            "zrange",
            "getrange",
            "get",
            "command",
            "exec",
            "keys",
            "lpop",
            "getdel",
            "cluster|slots",
            "cluster|getkeysinslot",
            "client|list",
        ] {
            assert!(long.contains(&name), "{engine}: {name} is not among {long:?}");
        }
        drop(crowd);
        apart.check_memory_is_returned(&format!("{engine}: afterwards"));
    }
}

/// Every request of HTTP.
#[test]
fn clients_that_ask_by_http_and_do_not_read_take_no_more_than_is_stated() {
    for engine in engines_of_effort() {
        let mut apart = Apart::start(engine);
        fill(&apart, LONG);
        apart.note_idle();
        let (mut long, mut others) = (Vec::new(), Vec::new());
        for (what, request, status) in table::http_requests(&"x".repeat(PADDING_BYTES)) {
            apart.converse(&table::encoded(&table::make("string", LONG)));
            let response = apart.converse(&request);
            assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{engine}: {what}: {response:.200}");
            let requests = request.repeat(4);
            if response.len() > LONG_REPLY_BYTES {
                apart.converse(&table::encoded(&table::make("string", LONG)));
                apart.attack(&[requests], &format!("{engine}: {what}"));
                long.push(what);
            } else {
                others.push(requests);
            }
        }
        let [value, keys, prefix] = &long[..] else { panic!("{engine}: {long:?}") };
        assert!(value.ends_with("string") && keys.ends_with("/") && prefix.contains("prefix"), "{engine}: {long:?}");
        apart.attack(&others, &format!("{engine}: all other requests"));
        apart.check_memory_is_returned(&format!("{engine}: afterwards"));
    }
}

#[test]
fn what_sessions_keep_is_no_more_than_is_stated() {
    for engine in engines_of_effort() {
        let mut apart = Apart::start(engine);
        apart.note_idle();
        let value = "x".repeat(400 << 10);
        let mut queue = encoded(&["MULTI"]);
        (0..8).for_each(|_| queue.extend_from_slice(&encoded(&["SET", "{b}key", &value])));
        let watch: Vec<u8> = (0..8).flat_map(|_| encoded(&["WATCH", &format!("{{b}}{}", &value[..60_000])])).collect();
        let name = encoded(&["CLIENT", "SETNAME", &value]);
        let head = format!(
            "PUT /%7Bb%7D HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\nX: {value}"
        );
        for (what, request) in [("MULTI", queue), ("WATCH", watch), ("SETNAME", name), ("a head", head.into_bytes())] {
            let stored_before = apart.stored_bytes();
            let peers: Vec<TcpStream> = (0..effort(100, 1000))
                .map(|at| {
                    let mut peer = stream::connect(apart.address);
                    peer.set_nonblocking(true).unwrap();
                    let mut left = &request[..];
                    while let Ok(sent @ 1..) = peer.write(left) {
                        left = &left[sent..];
                    }
                    if at % 50 == 49 {
                        apart.ping_soon(&format!("{engine}: {what}, {at} have sent"));
                    }
                    peer
                })
                .collect();
            apart.check(peers, stored_before, &format!("{engine}: {what}"));
        }
        apart.check_memory_is_returned(&format!("{engine}: afterwards"));
        let mut client = apart.connect();
        assert!(client.ask(&format!("CLIENT SETNAME {}", "x".repeat(65))).starts_with("-ERR Client names"));
        assert_eq!(client.ask(&format!("CLIENT SETNAME {}", "x".repeat(64))), "+OK");
    }
}
