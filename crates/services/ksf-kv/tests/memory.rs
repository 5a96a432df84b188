//! What clients that send and do not read can make a server take: measured on a server in a process of its own, with every
//! command of the table whose reply is long, and with what sessions keep.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::common::*;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_test::{Helper, effort, is_helper, listen, say, stream};

const ENGINE: &str = "KSF_TEST_ENGINE";

const REPLY_BYTES_MAX: usize = 4 << 20;
const MESSAGE_BYTES_MAX: usize = 1 << 20;

fn limits() -> Limits {
    Limits {
        connection_bytes_max: REPLY_BYTES_MAX,
        message_bytes_max: MESSAGE_BYTES_MAX,
        shard_bytes_max: 8 << 20,
        assembly_bytes_max: 4 << 20,
        // Passes change hands no sooner, and nobody is closed for what others do.
        pressure_timeout_ms: 60_000,
        send_timeout_ms: 600_000,
        ..Limits::default()
    }
}

/// What docs/memory.md states for these limits, beyond a server that has no connection.
fn bound_bytes(shards: usize, connections: usize) -> usize {
    let Limits { shard_bytes_max, assembly_bytes_max, .. } = limits();
    let replies = shard_bytes_max + 2 * REPLY_BYTES_MAX;
    let input = 2 * assembly_bytes_max + ksf::budget::PASSES * MESSAGE_BYTES_MAX;
    let slots = ksf::server::SLOTS as usize * ksf::server::SLOT_BYTES as usize;
    shards * (replies + input + slots) + connections * (16 << 10)
}

/// Serves, so that only the memory of the server is measured.
#[test]
#[ignore = "the server of the tests below"]
fn helper_serves() {
    if !is_helper() {
        return;
    }
    let engine = std::env::var(ENGINE).unwrap();
    let engine = engines().into_iter().find(|known| known.name() == engine).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start_on(engine, folder.path(), limits(), ksf_kv::Settings::default(), 32);
    say(serving.address());
    while listen().is_some() {}
    serving.stop();
}

/// A server in a process of its own.
struct Apart {
    server: Helper,
    address: SocketAddr,
    idle_bytes: usize,
}

impl Apart {
    fn start(engine: EngineKind) -> Self {
        let mut server = Helper::start("memory::helper_serves", &[(ENGINE, engine.name().to_owned())]);
        let address = server.hear().parse().unwrap();
        Self { server, address, idle_bytes: 0 }
    }

    /// What it has now is not the work of peers.
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

    /// Another client is answered, and the server has no more memory than it may.
    fn check(&self, connections: usize, what: &str) {
        let shards = ksf::cpus::allowed().unwrap().len();
        let bound = bound_bytes(shards, connections);
        // On each shard, most likely, behind what the others sent.
        for _ in 0..8 * shards {
            assert_eq!(self.connect().ask("PING"), "+PONG", "{what}");
            let taken = self.resident_bytes().saturating_sub(self.idle_bytes);
            assert!(taken <= bound + bound / 4, "{what}: {taken} bytes of {bound}");
        }
    }

    /// So many connections send the same, and read nothing.
    fn attack(&self, request: &[u8], what: &str) {
        let connections = effort(100, 1000);
        let peers: Vec<TcpStream> = (0..connections)
            .map(|_| {
                let mut peer = stream::connect(self.address);
                peer.set_nonblocking(true).unwrap();
                // What does not fit is not sent: then the server reads no more.
                let _ = peer.write(request);
                peer
            })
            .collect();
        self.check(connections, what);
        drop(peers);
    }
}

fn encoded(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    words.iter().for_each(|word| bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes()));
    bytes
}

/// Keys of each shape, with almost as many bytes as a reply may have. Of the string, three fit.
fn fill(client: &mut Client) -> [&'static str; 5] {
    let part = |at: usize| format!("{at:03}{}", "x".repeat(48 << 10));
    assert_eq!(client.ask(&format!("SET string {}", "x".repeat(900 << 10))), "+OK");
    for at in 0..64 {
        let part = part(at);
        for command in ["RPUSH list", "SADD set", &format!("HSET hash {at}"), &format!("ZADD zset {at}")] {
            assert!(client.ask(&format!("{command} {part}")).starts_with(':'), "{command}");
        }
    }
    ["string", "list", "set", "hash", "zset"]
}

/// The commands that change nothing, with the number of words they take: from the table that the server tells.
fn commands(client: &mut Client) -> Vec<(String, i64)> {
    let names = client.ask("COMMAND LIST");
    let names = names.trim_matches(['[', ']']).split(' ').filter(|name| !name.contains('|'));
    let mut commands = Vec::new();
    for name in names {
        let about = client.ask(&format!("COMMAND INFO {name}"));
        let (_, rest) = about.split_once(" :").unwrap();
        let (arity, rest) = rest.split_once(' ').unwrap();
        let (flags, _) = rest.trim_start_matches(['[', '~']).split_once(']').unwrap();
        let has = |flag: &str| flags.split(' ').any(|known| known.trim_start_matches('+') == flag);
        if !["write", "admin", "blocking", "pubsub"].iter().any(|flag| has(flag)) {
            commands.push((name.to_owned(), arity.parse().unwrap()));
        }
    }
    assert!(commands.len() > 50, "{commands:?}");
    commands
}

/// The longest reply to a command with any of these keys, and what asks for it.
fn longest(apart: &Apart, name: &str, arity: i64, keys: [&str; 5]) -> (usize, Vec<u8>) {
    let words = arity.unsigned_abs() as usize;
    let words = if arity < 0 { vec![words, words + 2] } else { vec![words] };
    let mut best = (0, Vec::new());
    for key in keys {
        for words in words.iter().copied() {
            for rest in [&[key][..], &["0", "-1"], &["-inf", "+inf"], &["1", key]] {
                let rest = rest.iter().cycle().take(words.saturating_sub(2));
                let all: Vec<&str> = [name, key].into_iter().take(words).chain(rest.copied()).collect();
                let request = encoded(&all);
                // The end of the connection ends the reply.
                let mut peer = stream::connect(apart.address);
                peer.write_all(&request).unwrap();
                peer.shutdown(std::net::Shutdown::Write).unwrap();
                let mut reply = Vec::new();
                let _ = peer.read_to_end(&mut reply);
                if reply.len() > best.0 {
                    best = (reply.len(), request);
                }
            }
        }
    }
    best
}

#[test]
fn clients_that_ask_and_do_not_read_take_no_more_than_is_stated() {
    for engine in engines() {
        let mut apart = Apart::start(engine);
        let mut client = apart.connect();
        let keys = fill(&mut client);
        apart.note_idle();
        let mut long = Vec::new();
        for (name, arity) in commands(&mut client) {
            let (bytes, request) = longest(&apart, &name, arity, keys);
            if bytes > 16 << 10 {
                apart.attack(&request.repeat(4), &format!("{engine}: {name}"));
                long.push(name);
            }
        }
        for name in ["mget", "lrange", "hgetall", "smembers", "zrange", "getrange", "get", "command"] {
            assert!(long.iter().any(|known| known == name), "{engine}: {name} is not among {long:?}");
        }
    }
}

#[test]
fn what_sessions_keep_is_no_more_than_is_stated() {
    for engine in engines() {
        let mut apart = Apart::start(engine);
        apart.note_idle();
        let value = "x".repeat(400 << 10);
        let mut queue = encoded(&["MULTI"]);
        (0..8).for_each(|_| queue.extend_from_slice(&encoded(&["SET", "key", &value])));
        let watch: Vec<u8> = (0..8).flat_map(|_| encoded(&["WATCH", &value[..60_000]])).collect();
        let name = encoded(&["CLIENT", "SETNAME", &value]);
        let head =
            format!("PUT /kv/x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\nX: {value}");
        for (what, request) in [("MULTI", queue), ("WATCH", watch), ("SETNAME", name), ("a head", head.into_bytes())] {
            let connections = effort(100, 1000);
            let peers: Vec<TcpStream> = (0..connections)
                .map(|_| {
                    let mut peer = stream::connect(apart.address);
                    peer.set_nonblocking(true).unwrap();
                    let mut left = &request[..];
                    while let Ok(sent @ 1..) = peer.write(left) {
                        left = &left[sent..];
                    }
                    peer
                })
                .collect();
            apart.check(connections, &format!("{engine}: {what}"));
            drop(peers);
        }
        let mut client = apart.connect();
        assert!(client.ask(&format!("CLIENT SETNAME {}", "x".repeat(65))).starts_with("-ERR Client names"));
        assert_eq!(client.ask(&format!("CLIENT SETNAME {}", "x".repeat(64))), "+OK");
    }
}
