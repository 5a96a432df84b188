//! A map of slots: what is answered with one, compared with Redis in a cluster, and that each node refuses what is not its own.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Client, Serving};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_kv::cluster::{Cluster, NodeSpec};
use ksf_test::{Running, own_network_or_skip, program_or_skip, wait_until};

/// Asked of a node that has the slots up to 8191, and of Redis as that node.
const SAME_AS_REDIS: &[&str] = &[
    "CLUSTER",
    "CLUSTER NONSENSE",
    "CLUSTER MYID",
    "CLUSTER MYID x",
    "CLUSTER SLOTS",
    "CLUSTER KEYSLOT",
    "CLUSTER KEYSLOT a",
    "CLUSTER KEYSLOT somekey",
    "CLUSTER KEYSLOT foo{hash_tag}",
    "CLUSTER KEYSLOT {user1000}.following",
    "CLUSTER KEYSLOT foo{}{bar}",
    "CLUSTER KEYSLOT foo{{bar}}zap",
    "CLUSTER KEYSLOT foo{bar}{zap}",
    "CLUSTER KEYSLOT foo{bar",
    "CLUSTER KEYSLOT foo}bar{",
    "CLUSTER COUNTKEYSINSLOT 3300",
    "CLUSTER COUNTKEYSINSLOT -1",
    "CLUSTER COUNTKEYSINSLOT 16384",
    "CLUSTER COUNTKEYSINSLOT x",
    "CLUSTER GETKEYSINSLOT 3300 10",
    "CLUSTER GETKEYSINSLOT 3300 -1",
    "CLUSTER GETKEYSINSLOT 3300 -9223372036854775808",
    "CLUSTER GETKEYSINSLOT 9223372036854775807 1",
    "CLUSTER COUNTKEYSINSLOT -9223372036854775808",
    "CLUSTER GETKEYSINSLOT 16384 1",
    "CLUSTER GETKEYSINSLOT x 1",
    "CLUSTER GETKEYSINSLOT 3300",
    "CLUSTER REPLICAS nonsense",
    "CLUSTER SLAVES nonsense",
    "CLUSTER COUNT-FAILURE-REPORTS nonsense",
    "CLUSTER LINKS",
    "READONLY",
    "READWRITE",
    "ASKING",
    "READONLY x",
    "SELECT 0",
    "SELECT 1",
    "SELECT x",
    "INFO cluster",
    "CONFIG GET cluster-enabled",
    // The slot of `b` is 3300, that of `f` 3168; `a` and `foo` are on the other node.
    "SET a 1",
    "GET foo",
    "MGET a foo",
    "MGET foo bar",
    "MSET b 1 f 1",
    "MSET {b}1 1 {b}2 2 b 3",
    "MGET {b}1 {b}2 b",
    "SET b 1",
    "GET b",
    "RENAME b f",
    "RENAME b {b}3",
    "COPY {b}3 f",
    "COPY {b}3 b",
    "LMOVE b f LEFT RIGHT",
    "SUNIONSTORE {b}4 b f",
    "LCS a b",
    "OBJECT ENCODING foo",
    "OBJECT ENCODING b",
    "OBJECT HELP",
    "GET",
    "NONSENSE foo",
    "CLUSTER COUNTKEYSINSLOT 3300",
    "CLUSTER GETKEYSINSLOT 3300 0",
    "DEL {b}1 {b}2 {b}3",
    "CLUSTER COUNTKEYSINSLOT 3300",
    "CLUSTER GETKEYSINSLOT 3300 10",
    "DBSIZE",
    "KEYS *",
    // In a transaction each command is looked at when it is sent, and all of them together when they are carried out.
    "MULTI",
    "SET b 1",
    "SET foo 1",
    "EXEC",
    "MULTI",
    "SET b 2",
    "SET f 2",
    "EXEC",
    "EXEC",
    "MULTI",
    "SET b 1",
    "MGET b f",
    "EXEC",
    // After an error, nothing is queued.
    "MULTI",
    "SET b 1",
    "NONSENSE",
    "SET f 1",
    "EXEC",
    "MULTI",
    "SET b 1",
    "SET f 1",
    "NONSENSE",
    "EXEC",
    "MULTI",
    "SET b 3",
    "GET b",
    "PING",
    "EXEC",
    "MULTI",
    "SET foo 1",
    "DISCARD",
    "MULTI",
    "PING",
    "EXEC",
    "GET b",
    "GET f",
    "WATCH foo",
    "WATCH b foo",
    "WATCH b",
    "MULTI",
    "SET {b}5 1",
    "EXEC",
    "UNWATCH",
    "DEL b {b}5",
    "DBSIZE",
];

/// Settings of the first of two nodes, each with half of the slots.
fn first_of_two(addresses: [SocketAddr; 2]) -> Settings {
    let spec = |at: usize, slots: &str| NodeSpec { address: addresses[at].to_string(), slots: slots.into() };
    let cluster = Cluster::new(&[spec(0, "0-8191"), spec(1, "8192-16383")], &addresses[0].to_string()).unwrap();
    Settings { cluster: Some(cluster), ..Settings::default() }
}

/// Addresses of two nodes, in the network of the test. The system gives their ports to nobody who asks for any, nor those of the
/// bus between nodes, which are 10,000 higher.
fn addresses() -> [SocketAddr; 2] {
    [7001, 7002].map(|port| ([127, 0, 0, 1], port).into())
}

/// Redis as the first of two nodes with these ids, of which the other one is not there.
fn redis_node(addresses: [SocketAddr; 2], ids: [&str; 2], folder: &Path) -> Option<(Client, Running)> {
    let redis = program_or_skip("redis-server")?;
    let line = |at: usize, role: &str, slots: &str| {
        let bus = addresses[at].port() + 10_000;
        format!("{} {}@{bus} {role} - 0 0 {} connected {slots}\n", ids[at], addresses[at], at + 1)
    };
    let nodes = [line(0, "myself,master", "0-8191"), line(1, "master", "8192-16383")].concat();
    std::fs::write(folder.join("nodes.conf"), nodes + "vars currentEpoch 2 lastVoteEpoch 0\n").unwrap();
    let mut command = Command::new(redis);
    command.args(["--bind", "127.0.0.1", "--save", "", "--cluster-enabled", "yes", "--cluster-node-timeout", "600000"]);
    command.args(["--port", &addresses[0].port().to_string(), "--dir"]).arg(folder);
    let running = Running::start(command.stdout(Stdio::null()));
    wait_until("Redis listens", || TcpStream::connect(addresses[0]).is_ok());
    let mut client = Client::new(addresses[0]);
    wait_until("Redis serves the slots", || client.ask("CLUSTER INFO").contains("cluster_state:ok"));
    Some((client, running))
}

/// The parts of a text, in an order that does not depend on that in which they came.
fn sorted<'t>(text: &'t str, between: &str) -> Vec<&'t str> {
    let mut parts: Vec<&str> = text.split(between).map(|part| part.trim_matches([' ', '[', ']'])).collect();
    parts.sort_unstable();
    parts
}

#[test]
fn a_node_answers_as_redis_does() {
    if own_network_or_skip("ports of its own").is_none() {
        return;
    }
    let addresses = addresses();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let settings = first_of_two(addresses);
    let serving = Serving::start_set(EngineKind::Epoll, folders[0].path(), Limits::default(), settings);
    let mut client = serving.connect();
    let nodes = client.ask("CLUSTER NODES");
    let ids: Vec<&str> = nodes.lines().filter_map(|line| line.split(' ').next()).collect();
    let Some((mut peer, _running)) = redis_node(addresses, [ids[0], ids[1]], folders[1].path()) else { return };
    for version in ["2", "3"] {
        let hello = format!("HELLO {version}");
        let [ours, theirs] = [client.ask(&hello), peer.ask(&hello)];
        assert!([ours, theirs].iter().all(|told| told.contains(" mode cluster ")), "{hello}");
        for question in SAME_AS_REDIS {
            assert_eq!(client.ask(question), peer.ask(question), "RESP{version}: {question}");
        }
        for id in &ids {
            for question in ["REPLICAS", "SLAVES", "COUNT-FAILURE-REPORTS"].map(|word| format!("CLUSTER {word} {id}")) {
                assert_eq!(client.ask(&question), peer.ask(&question), "RESP{version}: {question}");
            }
        }
        let [ours, theirs] = [client.ask("CLUSTER SHARDS"), peer.ask("CLUSTER SHARDS")];
        assert_eq!(sorted(&ours, "slots"), sorted(&theirs, "slots"), "RESP{version}");
        // Nodes of ours have no bus, and do not see whether others are there.
        let told = |text: String| {
            let lines = text.trim_start_matches("=txt:").lines().filter(|line| !line.is_empty());
            let mut lines: Vec<String> = lines
                .map(|line| {
                    let words: Vec<&str> = line.split(' ').collect();
                    let address = words[1].split('@').next().unwrap();
                    [words[0], address, words[2], words[3], words[8]].join(" ")
                })
                .collect();
            lines.sort_unstable();
            lines
        };
        assert_eq!(told(client.ask("CLUSTER NODES")), told(peer.ask("CLUSTER NODES")), "RESP{version}");
        let told = |text: String| text.lines().take(7).map(str::to_owned).collect::<Vec<_>>();
        let ours = told(client.ask("CLUSTER INFO"));
        assert_eq!(ours, told(peer.ask("CLUSTER INFO")), "RESP{version}");
        assert!(ours.len() == 7 && ours[6] == "cluster_size:2", "{ours:?}");
    }
    serving.stop();
}

/// What another node has is refused over HTTP, too, before a body is asked for.
#[test]
fn http_tells_which_node_has_a_key() {
    use std::io::Write;
    let settings = first_of_two(addresses());
    let serving =
        Serving::in_new_folder(|folder| Serving::start_set(EngineKind::Epoll, folder, Limits::default(), settings));
    let ask = |head: &str, body: &str| {
        let mut stream = ksf_test::stream::connect(serving.address());
        stream.write_all(format!("{head} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n").as_bytes()).unwrap();
        stream.write_all(format!("Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        String::from_utf8(ksf_test::stream::read_rest(stream)).unwrap()
    };
    for (head, body) in [("GET /foo", ""), ("PUT /foo", "x"), ("DELETE /foo", ""), ("POST /", "key:0002x")] {
        let answer = ask(head, body);
        assert!(answer.starts_with("HTTP/1.1 421 ") && answer.ends_with("node 127.0.0.1:7002\n"), "{head}: {answer}");
    }
    assert!(ask("PUT /b", "x").starts_with("HTTP/1.1 201 "));
    assert!(ask("GET /b", "").ends_with("\r\n\r\nx"));
    assert!(ask("GET /", "").ends_with("{\"keys\":[\"b\"],\"next\":null}\n"));
    serving.stop();
}
