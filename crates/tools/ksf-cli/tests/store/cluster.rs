//! More than one store: clients of a cluster find every key by a map of slots, and `nutcracker` shards without one; a node is
//! killed and started again under load.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use ksf_test::{Running, program_or_skip, stdout};
use rustix::process::Signal;

use super::{connect, kill};
use crate::store::client::{Client, command};
use crate::support::{Folder, Server, private_network, run, stderr, wait_until};

const PORTS: [u16; 3] = [7001, 7002, 7003];
const PROXY_PORT: u16 = 22_121;

/// What its reader is told to write into files is what is tried.
const GUIDE: &str = include_str!("../../../../../docs/scaling.md");

/// The first part of the guide between two texts.
fn part_of_guide(from: &str, to: &str) -> &'static str {
    let part = GUIDE.split_once(from).and_then(|(_, behind)| behind.split_once(to));
    part.unwrap_or_else(|| panic!("nothing lies between {from} and {to}")).0
}

fn map_of_guide() -> &'static str {
    part_of_guide("```toml\n", "```")
}

/// Starts one of the stores; `map`: as a node of the cluster.
fn start(folder: &Folder, number: usize, map: Option<&Path>) -> Server {
    let (address, data) = (format!("127.0.0.1:{}", PORTS[number]), folder.path(&format!("store{number}")));
    let mut args = vec!["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", &address, "--data"];
    args.push(data.to_str().unwrap());
    if let Some(map) = map {
        args.extend(["--cluster-file", map.to_str().unwrap(), "--cluster-node", &address]);
    }
    Server::start(&args, 1)
}

/// `redis-cli` with these arguments, which is given commands line by line; its answers.
fn redis_cli(args: &[&str], lines: &str) -> Vec<String> {
    let mut running = Command::new("redis-cli");
    running.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = running.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    // Where it is sent to, it says on lines of their own.
    stdout(&output).lines().filter(|line| !line.starts_with("-> ")).map(str::to_owned).collect()
}

/// Own addresses of the sockets of this network that are wanted by their own address, that of their peer, and their state, in
/// order.
fn sockets(protocol: &str, is_wanted: impl Fn([&str; 3]) -> bool) -> Vec<String> {
    let table = std::fs::read_to_string(format!("/proc/thread-self/net/{protocol}")).unwrap();
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut own: Vec<String> =
        fields.filter(|fields| is_wanted([fields[1], fields[2], fields[3]])).map(|fields| fields[1].into()).collect();
    own.sort_unstable();
    // Each shard has one.
    own.dedup();
    own
}

#[test]
fn redis_cli_finds_every_key_of_a_cluster_also_after_a_crash_of_a_node() {
    if private_network().is_none() || program_or_skip("redis-cli").is_none() {
        return;
    }
    let folder = Folder::new();
    let map = folder.write("cluster.toml", map_of_guide());
    let mut servers: Vec<Server> = (0..3).map(|number| start(&folder, number, Some(&map))).collect();
    for (server, part) in servers.iter().zip(["slots=5461 nodes=3", "slots=5462 nodes=3", "slots=5461 nodes=3"]) {
        assert!(server.seen()[0].contains(part), "{}", server.seen()[0]);
    }
    let sets: String = (0..60).map(|number| format!("set key{number} value{number}\n")).collect();
    assert_eq!(redis_cli(&["-c", "-p", "7001"], &sets), vec!["OK"; 60]);
    let sizes: Vec<u64> =
        servers.iter().map(|server| connect(server).ask("DBSIZE")[1..].parse::<u64>().unwrap()).collect();
    assert!(sizes.iter().sum::<u64>() == 60 && sizes.iter().all(|size| *size > 0), "{sizes:?}");
    // Nodes know each other by the map alone.
    assert_eq!(sockets("tcp", |[_, _, state]| state == "0A"), PORTS.map(|port| format!("0100007F:{port:04X}")));
    let between_nodes = |[own, peer, state]: [&str; 3]| {
        let is_node = |end: &str| PORTS.iter().any(|port| end.ends_with(&format!(":{port:04X}")));
        state != "0A" && is_node(own) && is_node(peer)
    };
    assert_eq!(sockets("tcp", between_nodes), Vec::<String>::new());
    for other in ["tcp6", "udp", "udp6"] {
        assert_eq!(sockets(other, |_| true), Vec::<String>::new(), "{other}");
    }
    // A client that knows nothing of clusters is told.
    let plain = redis_cli(&["-p", "7001"], "get key1\n");
    assert_eq!(plain[0], "MOVED 9189 127.0.0.1:7002");
    let together =
        redis_cli(&["-c", "-p", "7001"], "mset {user}a 1 {user}b 2\nmget {user}a {user}b\nmset key1 1 key2 2\n");
    assert_eq!(together[..3], ["OK", "1", "2"]);
    assert!(together[3].starts_with("CROSSSLOT "), "{together:?}");
    // Its own check of a cluster: all nodes say the same, and every slot is served.
    let check = redis_cli(&["--cluster", "check", "127.0.0.1:7003"], "").join("\n");
    assert!(check.contains("[OK] All nodes agree about slots configuration."), "{check}");
    assert!(check.contains("[OK] All 16384 slots covered."), "{check}");

    kill(servers.remove(1));
    servers.insert(1, start(&folder, 1, Some(&map)));
    let gets: String = (0..60).map(|number| format!("get key{number}\n")).collect();
    let values: Vec<String> = (0..60).map(|number| format!("value{number}")).collect();
    assert_eq!(redis_cli(&["-c", "-p", "7003"], &gets), values);
    servers.into_iter().for_each(|server| drop(server.stop()));
}

#[test]
fn a_map_that_is_wrong_is_refused() {
    let folder = Folder::new();
    let map = folder.path("cluster.toml");
    let (data, good) = (folder.path("store"), map_of_guide());
    let start = |text: &str, more: &[&str]| {
        std::fs::write(&map, text).unwrap();
        let args = ["store", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap(), "--cluster-file"];
        let output = run(&[&args[..], &[map.to_str().unwrap()], more].concat());
        (output.status.code(), stderr(&output))
    };
    for (text, node, part) in [
        (good, "127.0.0.1:7004", "127.0.0.1:7004, which is not in the map of slots"),
        (&good.replace("0-5460", "0-5459")[..], "127.0.0.1:7001", "slots 5460 to 5460 belong to no node"),
        (
            &good.replace("0-5460", "0-5461")[..],
            "127.0.0.1:7001",
            "slot 5461 belongs to 127.0.0.1:7001 and to 127.0.0.1:7002",
        ),
        (&good.replace("slots", "slot")[..], "127.0.0.1:7001", "slot"),
        ("", "127.0.0.1:7001", "cluster"),
    ] {
        let (status, told) = start(text, &["--cluster-node", node]);
        assert_eq!(status, Some(78), "{told}");
        assert!(told.contains(part) && told.contains("cluster.toml") && told.lines().count() == 1, "{told}");
    }
    let (status, told) = start(good, &[]);
    assert!(status == Some(64) && told.contains("--cluster-node"), "{status:?} {told}");
    assert!(!data.exists(), "nothing was made");
}

#[test]
fn a_file_of_services_may_have_a_map_of_slots() {
    let folder = Folder::new();
    let path = folder.path("ksf.toml");
    let service = "engine = \"epoll\"\n[[service]]\nname = \"kv\"\nkind = \"store\"\ndata = \"data\"\nlog_bytes = \"8m\"\n\
                   listen = [\"127.0.0.1:0\"]\n";
    let own = "cluster_node = \"127.0.0.1:7003\"\n";
    let inline = map_of_guide().replace("[[cluster]]", "[[service.cluster]]");
    std::fs::write(folder.path("cluster.toml"), map_of_guide()).unwrap();
    for text in [format!("{service}{own}{inline}"), format!("{service}{own}cluster_file = \"cluster.toml\"\n")] {
        std::fs::write(&path, text).unwrap();
        let server = Server::start(&["serve", path.to_str().unwrap()], 1);
        assert!(server.seen()[0].contains("node=127.0.0.1:7003 slots=5461 nodes=3"), "{}", server.seen()[0]);
        let mut client = connect(&server);
        assert_eq!(client.ask("SET key1 a"), "-MOVED 9189 127.0.0.1:7002");
        assert_eq!(client.ask("CLUSTER MYID").len(), 40);
        server.stop();
    }
    for (text, part) in [
        (format!("{service}{inline}"), "cluster_node"),
        (format!("{service}{own}"), "cluster_file"),
        (format!("{service}{own}cluster_file = \"cluster.toml\"\n{inline}"), "not in both"),
        (format!("{service}{own}{}", inline.replace("0-5460", "0-5459")), "slots 5460 to 5460 belong to no node"),
    ] {
        std::fs::write(&path, text).unwrap();
        let output = run(&["serve", "--check", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(78), "{}", stderr(&output));
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

/// The proxy over the three stores.
fn start_proxy(folder: &Folder) -> Option<Running> {
    let program = program_or_skip("nutcracker")?;
    let file = folder.write("nutcracker.yml", part_of_guide("<<'END'\n", "END\n"));
    let mut command = Command::new(program);
    command.arg("--conf-file").arg(&file).arg("--output").arg(folder.path("nutcracker.log"));
    command.args(["--stats-addr", "127.0.0.1"]).stdout(Stdio::null()).stderr(Stdio::null());
    Some(Running::start(&mut command))
}

/// What a client asks through the proxy.
fn ask_proxy(words: &str) -> Option<String> {
    let stream = std::net::TcpStream::connect(("127.0.0.1", PROXY_PORT)).ok()?;
    drop(stream);
    Some(Client::connect(([127, 0, 0, 1], PROXY_PORT).into()).ask(words))
}

/// A proxy that keeps no copies: while a node is away its keys are answered by errors, and those of the others as ever. When it
/// is back, everything that was acknowledged is there.
#[test]
fn nutcracker_over_three_stores_loses_nothing_when_one_is_killed_under_load() {
    if private_network().is_none() {
        return;
    }
    let folder = Folder::new();
    let Some(proxy) = start_proxy(&folder) else { return };
    let mut servers: Vec<Server> = (0..3).map(|number| start(&folder, number, None)).collect();
    wait_until("the proxy serves", || ask_proxy("SET key1 value1").is_some_and(|reply| reply == "+OK"));
    let mut client = Client::connect(([127, 0, 0, 1], PROXY_PORT).into());
    for number in 0..60 {
        assert_eq!(client.ask(&format!("SET key{number} value{number}")), "+OK");
    }
    client.write(&command(&[b"MGET", b"key1", b"key2", b"none"])).unwrap();
    assert_eq!(client.read().unwrap(), "[value1 value2 nil]", "of several nodes");
    assert_eq!(client.ask("DEL key58 key59 none"), ":2");
    let sizes: Vec<u64> =
        servers.iter().map(|server| connect(server).ask("DBSIZE")[1..].parse::<u64>().unwrap()).collect();
    assert!(sizes.iter().sum::<u64>() == 58 && sizes.iter().all(|size| *size > 0), "{sizes:?}");
    let of_the_second = (0..58).map(|number| format!("GET key{number}"));
    let mut second = connect(&servers[1]);
    let get = of_the_second.into_iter().find(|get| second.ask(get) != "nil").expect("it has some");

    let journal = folder.path("journal");
    let mut load = crate::support::ksf();
    load.args(["load", "kv", &format!("127.0.0.1:{PROXY_PORT}"), "--no-pin", "--json", "--duration", "1h"]);
    load.args(["-c", "8", "-P", "4", "--keys", "500", "--sizes", "40,3000", "--mix", "30:70", "--journal"])
        .arg(&journal);
    let mut load = Running::start(load.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let length = || std::fs::metadata(&journal).map_or(0, |file| file.len());
    // Acknowledgments of 28 bytes.
    let more = |count: u64| {
        let before = length();
        wait_until("more writes are acknowledged", || length() > before + count * 28);
    };
    more(2000);
    kill(servers.remove(1));
    wait_until("its keys are refused", || ask_proxy(&get).is_some_and(|reply| reply.starts_with("-ERR")));
    // Those of the others are served.
    more(1000);
    servers.insert(1, start(&folder, 1, None));
    wait_until("its keys are there again", || ask_proxy(&get).is_some_and(|reply| reply.starts_with("value")));
    more(1000);
    load.signal(Signal::TERM);
    load.wait();
    let report: serde_json::Value = serde_json::from_str(&load.out.seen().join("\n"))
        .unwrap_or_else(|error| panic!("{error}: {:?}", load.err.seen()));
    let faults = report["run"]["faults"].as_object().expect("faults by kind");
    let told: Vec<&String> =
        faults.iter().filter(|(_, count)| count.as_u64() != Some(0)).map(|(kind, _)| kind).collect();
    assert_eq!(told, ["rejected"], "{}", report["notes"]);

    let address = format!("127.0.0.1:{PROXY_PORT}");
    let audit = run(&["load", "kv", &address, "--json", "--no-pin", "--audit", journal.to_str().unwrap()]);
    assert_eq!(audit.status.code(), Some(0), "{}", stderr(&audit));
    let found: serde_json::Value = serde_json::from_str(&stdout(&audit)).unwrap();
    assert!(found["audit"]["acknowledged"] == 500 && found["audit"]["right"] == 500, "{}", found["audit"]);
    drop(client);
    drop(proxy);
    servers.into_iter().for_each(|server| drop(server.stop()));
}
