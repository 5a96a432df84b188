//! `ksf store` as its users run it: what it acknowledged is there after a `kill -9`, and it says why it does not start.

mod audit;
mod backup;
mod client;
mod cluster;
mod larger;
mod load;
mod offline;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;

use ksf_test::{ip, program_or_skip, succeeds};
use rustix::process::Signal;

use client::{Client, command};
use support::{Folder, Server, engines, ksf, private_network, private_network_and_run, run, stderr};

/// Starts a small store, which says that it is open and that it is ready.
fn start(engine: &str, data: &Path, more: &[&str]) -> Server {
    let args = ["store", "--engine", engine, "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data"];
    let args: Vec<&str> = args.into_iter().chain([data.to_str().unwrap()]).chain(more.iter().copied()).collect();
    Server::start(&args, 1)
}

fn connect(server: &Server) -> Client {
    Client::connect(server.address(" tcp "))
}

/// Ends it as a crash does.
fn kill(mut server: Server) {
    server.signal(Signal::KILL);
    server.wait();
}

#[test]
fn what_was_acknowledged_survives_kill_9() {
    for engine in engines() {
        let folder = Folder::new();
        let data = folder.path("store");
        let server = start(engine, &data, &[]);
        let first = &server.seen()[0];
        for part in ["durability=always", "medium=file", "RWF_DSYNC", "keys=0", "recovered in"] {
            assert!(first.contains(part), "no {part} in {first}");
        }
        let mut client = connect(&server);
        for round in 0..300 {
            let value = "v".repeat(round * 7);
            client.write(&command(&[b"SET", format!("key {round}").as_bytes(), value.as_bytes()])).unwrap();
        }
        (0..300).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        assert_eq!(client.ask("DEL greeting count"), ":0");
        assert_eq!(client.ask("INCRBY count 42"), ":42");
        kill(server);
        let server = start(engine, &data, &[]);
        assert!(server.seen()[0].contains("keys=301"), "{}", server.seen()[0]);
        let mut client = connect(&server);
        assert_eq!(client.ask("GET count"), "42");
        for round in 0..300 {
            client.write(&command(&[b"GET", format!("key {round}").as_bytes()])).unwrap();
            assert_eq!(client.read().unwrap().len(), round * 7, "{engine}");
        }
        server.stop();
    }
}

#[test]
fn redis_cli_sets_and_gets() {
    if program_or_skip("redis-cli").is_none() {
        return;
    }
    let folder = Folder::new();
    let ask = |server: &Server, words: &[&str]| {
        let port = server.address(" tcp ").port().to_string();
        succeeds(&[&["redis-cli", "-h", "127.0.0.1", "-p", &port], words].concat()).trim_end().to_owned()
    };
    let server = start("epoll", &folder.path("store"), &[]);
    assert_eq!(ask(&server, &["set", "greeting", "hello"]), "OK");
    kill(server);
    let server = start("epoll", &folder.path("store"), &[]);
    assert_eq!(ask(&server, &["-3", "get", "greeting"]), "hello");
    server.stop();
}

#[test]
fn a_store_is_served_by_one_process() {
    let folder = Folder::new();
    let data = folder.path("store");
    let server = start("epoll", &data, &[]);
    let second = run(&["store", "--engine", "epoll", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    let text = stderr(&second);
    assert_eq!(second.status.code(), Some(69), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(data.to_str().unwrap()) && text.contains("another process"), "{text}");
    // The first one is not disturbed.
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    server.stop();
}

#[test]
fn a_folder_that_cannot_be_had_is_named() {
    let folder = Folder::new();
    let file = folder.path("file");
    std::fs::write(&file, "").unwrap();
    for (data, status, part) in [("/sys/ksf-store", 77, "/sys/ksf-store"), (file.to_str().unwrap(), 66, "--data")] {
        let output = run(&["store", "--listen", "127.0.0.1:0", "--data", data]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(part), "{text}");
    }
}

/// What a first start left on a disk that was full is taken up by the next one.
#[test]
fn a_full_disk_is_told_and_is_no_obstacle_once_there_is_room() {
    if private_network_and_run().is_none() {
        return;
    }
    let data = "/run/small";
    std::fs::create_dir(data).unwrap();
    succeeds(&["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", data]);
    let output = run(&["store", "--log-bytes", "8m", "--cpus", "0", "--listen", "127.0.0.1:0", "--data", data]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(71), "{text}");
    assert!(text.contains("No space left") && text.contains("--log-bytes"), "{text}");
    succeeds(&["mount", "-o", "remount,size=200m", data]);
    let server = start("epoll", Path::new(data), &[]);
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    kill(server);
    let server = start("epoll", Path::new(data), &[]);
    assert_eq!(connect(&server).ask("GET a"), "b");
    server.stop();
}

#[test]
fn damage_to_what_was_acknowledged_is_refused_and_left_alone() {
    let folder = Folder::new();
    let data = folder.path("store");
    let server = start("epoll", &data, &["--cpus", "0"]);
    let mut client = connect(&server);
    (0..100).for_each(|at| assert_eq!(client.ask(&format!("SET key {at}")), "+OK"));
    kill(server);
    let log = data.join("log-000");
    let mut bytes = std::fs::read(&log).unwrap();
    // The second batch; many later ones say that it was acknowledged.
    let batches = (0..bytes.len()).step_by(4096).filter(|at| &bytes[at + 4..at + 8] == b"ksfB");
    let second = batches.collect::<Vec<_>>()[1];
    bytes[second + 70] ^= 1;
    std::fs::write(&log, &bytes).unwrap();
    let output = run(&["store", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(65), "{text}");
    assert!(text.contains("log 0 is damaged from byte 8192") && text.contains("salvage"), "{text}");
    assert!(std::fs::read(&log).unwrap() == bytes, "the log was changed");
}

#[test]
fn other_durabilities_are_said_and_lose_nothing_in_an_orderly_end() {
    for durability in ["none", "every=1000"] {
        let folder = Folder::new();
        let data = folder.path("store");
        let server = start("epoll", &data, &["--durability", durability]);
        assert!(server.seen()[0].contains(&format!("durability={durability} ")), "{}", server.seen()[0]);
        let mut client = connect(&server);
        for at in 0..1000 {
            client.write(&command(&[b"SET", format!("key {at}").as_bytes(), b"value"])).unwrap();
        }
        (0..1000).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        assert!(client.ask("INFO").contains(&format!("ksf_durability:{durability}\r\n")));
        drop(client);
        server.stop();
        let server = start("epoll", &data, &[]);
        assert_eq!(connect(&server).ask("DBSIZE"), ":1000", "{durability}");
        server.stop();
    }
    let output = run(&["store", "--data", "/nonexistent", "--durability", "sometimes"]);
    assert!(!output.status.success() && stderr(&output).contains("always, every=MS, none"), "{}", stderr(&output));
}

#[test]
fn a_password_is_asked_for_and_without_one_only_this_machine_is_served() {
    if private_network().is_none() {
        return;
    }
    ip("address add 192.0.2.1/32 dev lo");
    let folder = Folder::new();
    let password = folder.path("password");
    std::fs::write(&password, "open sesame\n").unwrap();
    let data = folder.path("store");
    let outside = ["--listen", "192.0.2.1:0"];
    let server = Server::start_command(
        {
            let mut command = ksf();
            command.args(["store", "--engine", "epoll", "--log-bytes", "8m", "--data"]).arg(&data).args(outside);
            command
        },
        1,
    );
    let mut client = connect(&server);
    assert!(client.ask("SET a b").starts_with("-DENIED "));
    client.read().expect_err("the connection ends");
    server.stop();

    let server = start("epoll", &data, &["--password-file", password.to_str().unwrap(), outside[0], outside[1]]);
    let mut client = connect(&server);
    assert_eq!(client.ask("SET a b"), "-NOAUTH Authentication required.");
    assert!(client.ask("HELLO 3").starts_with("-NOAUTH HELLO must be called"));
    assert!(client.ask("AUTH wrong").starts_with("-WRONGPASS "));
    assert!(client.ask("AUTH other wrong").starts_with("-WRONGPASS "));
    client.write(&command(&[b"AUTH", b"open sesame"])).unwrap();
    assert_eq!(client.read().unwrap(), "+OK");
    assert_eq!(client.ask("GET a"), "nil");
    let mut client = connect(&server);
    client.write(&command(&[b"HELLO", b"3", b"AUTH", b"default", b"open sesame", b"SETNAME", b"me"])).unwrap();
    assert!(client.read().unwrap().contains("proto :3"));
    assert_eq!(client.ask("CLIENT GETNAME"), "me");
    server.stop();
}

#[test]
fn a_file_of_services_may_have_a_store() {
    let folder = Folder::new();
    let path = folder.path("ksf.toml");
    let text = "engine = \"epoll\"\n[[service]]\nname = \"kv\"\nkind = \"store\"\ndata = \"data\"\nlog_bytes = \"8m\"\n\
                durability = \"every=50\"\nlisten = [\"127.0.0.1:0\"]\n";
    std::fs::write(&path, text).unwrap();
    let server = Server::start(&["serve", path.to_str().unwrap()], 1);
    assert!(server.seen()[0].starts_with("ksf: kv ") && server.seen()[0].contains("durability=every=50"));
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    assert!(folder.path("data").join("superblock").exists(), "the folder is not beside the file");
    server.stop();
    std::fs::write(&path, text.replace("every=50", "soon")).unwrap();
    let output = run(&["serve", "--check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78), "{}", stderr(&output));
    assert!(stderr(&output).contains("durability"), "{}", stderr(&output));
}
