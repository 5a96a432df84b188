//! `ksf load kv` as another judge of the store: every reply while it is served, every acknowledged write after a crash.

use std::path::Path;
use std::process::Stdio;

use ksf_test::{Running, stdout};
use rustix::process::Signal;

use super::{connect, kill, start};
use crate::support::{Folder, Server, engines, engines_of_effort, ksf, run, stderr, wait_until};

/// `ksf load kv` with words split at blanks; its JSON.
fn load(server: &Server, options: &str, status: i32) -> serde_json::Value {
    let address = server.address(" tcp ").to_string();
    let words = ["load", "kv", &address, "--json", "--no-pin"];
    let output = run(&words.into_iter().chain(options.split_whitespace()).collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(status), "{options}: {}", stderr(&output));
    serde_json::from_str(&stdout(&output)).expect("one document")
}

fn audit(server: &Server, journal: &Path, status: i32) -> serde_json::Value {
    load(server, &format!("--audit {}", journal.display()), status)["audit"].clone()
}

#[test]
fn every_reply_of_the_store_is_right() {
    for engine in engines_of_effort(1) {
        let folder = Folder::new();
        let server = start(engine, &folder.path("store"), &[]);
        for options in [
            "-c 50 -P 16 --sizes 64,1400 --mix 90:10 --zipf 0.99 -n 30000 --keys 2000",
            "-c 4 -j 2 --mix 1:1 -n 5000 --keys 100",
            "-c 3 -P 8 --sizes 32,20000 --mix 1:3 -n 1000 --keys 50",
            "-c 10 --rate 5K --mix 1:1 -n 2000 --keys 1000",
        ] {
            let report = load(&server, options, 0);
            assert_eq!(report["run"]["misses"], 0, "{engine}: {options}");
        }
        server.stop();
    }
}

#[test]
fn an_audit_is_clean_after_every_kill_9_and_finds_one_write_that_is_taken_away() {
    for engine in engines() {
        let folder = Folder::new();
        let (data, journal) = (folder.path("store"), folder.path("journal"));
        for round in 1..=4 {
            let mut server = start(engine, &data, &[]);
            let mut command = ksf();
            command.args(["load", "kv", &server.address(" tcp ").to_string(), "--no-pin", "--duration", "1h"]);
            command.args([
                "-c",
                "8",
                "-P",
                "8",
                "--keys",
                "500",
                "--sizes",
                "40,3000",
                "--mix",
                "30:70",
                "--timeout",
                "60s",
            ]);
            command.arg("--journal").arg(&journal).stdout(Stdio::null()).stderr(Stdio::piped());
            let length = || std::fs::metadata(&journal).map_or(0, |file| file.len());
            let before = length();
            let mut load = Running::start(&mut command);
            // Acknowledgments of 28 bytes.
            wait_until("2000 more writes are acknowledged", || length() > before + 2000 * 28);
            server.signal(Signal::KILL);
            server.wait();
            assert_eq!(load.wait().code(), Some(1), "{:#?}", load.err.seen());
            // Of what it says nothing is about a reply that came.
            let expected =
                |line: &String| ["closed", "a connection failed", "warning"].iter().any(|part| line.contains(part));
            let wrong: Vec<&String> = load.err.seen().iter().filter(|line| !expected(line)).collect();
            assert!(wrong.is_empty(), "{engine}: {wrong:#?}");

            let server = start(engine, &data, &[]);
            let found = audit(&server, &journal, 0);
            assert!(found["acknowledged"] == 500 && found["right"] == 500, "{engine}: {found}");
            assert_eq!(found["sessions"], round, "{engine}: {found}");
            kill(server);
        }
        // The audit of a store that has lost a write, and of one that has an old one.
        let server = start(engine, &data, &[]);
        let mut client = connect(&server);
        client.write(b"*2\r\n$3\r\nDEL\r\n$16\r\nkey:000000000042\r\n").unwrap();
        assert_eq!(client.read().unwrap(), ":1");
        assert_eq!(audit(&server, &journal, 1)["lost"], 1);
        assert_eq!(client.ask("SET key:000000000042 hello"), "+OK");
        let found = audit(&server, &journal, 1);
        assert!(found["lost"] == 0 && found["foreign"] == 1 && found["right"] == 499, "{found}");
        server.stop();
    }
}

#[test]
fn a_password_is_sent_by_the_load_generator() {
    let folder = Folder::new();
    let password = folder.write("password", "open sesame\n");
    let server = start("epoll", &folder.path("store"), &["--password-file", password.to_str().unwrap()]);
    load(&server, &format!("-n 500 --keys 100 --password-file {}", password.display()), 0);
    load(&server, "-n 500 --keys 100", 1);
    server.stop();
}
