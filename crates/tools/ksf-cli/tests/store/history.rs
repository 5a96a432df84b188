//! Histories of single keys with crashes in them are linearizable, as porcupine judges them.
//!
//! Clients on threads, one command at a time, write down when they sent each command, when its reply came and what it was. The
//! client that is told a certain number of replies kills the store. A command that was under way then has no reply: it happened
//! before the next start was ready, or never, because a start takes the locks of the logs before it reads them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use ksf_test::{Folder, Random, installed_or_skip, own_network, program_or_skip, signal, stderr, stdout};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{connect, connect_on, engines, start};
use crate::store::client::{Client, command};

const KILLS: usize = 25;
const CLIENTS: usize = 6;
/// Replies between a start and a kill at most.
const REPLIES_MAX: usize = 200;
/// Keys that are set and deleted, and keys that are counted.
const KEYS: [&str; 3] = ["a", "b", "c"];
const COUNTERS: [&str; 2] = ["m", "n"];

/// The judge as `scripts/setup.sh test` builds it; `None`: the test is skipped.
fn judge_or_skip() -> Option<PathBuf> {
    program_or_skip("go")?;
    installed_or_skip(env!("CARGO_TARGET_TMPDIR"), "porcupine/client")
}

/// What the judge says of a history, and whether it is right.
fn judged(judge: &Path, history: &[Value]) -> (bool, String) {
    let folder = Folder::new();
    let lines: String = history.iter().map(|operation| format!("{operation}\n")).collect();
    let output = Command::new(judge).arg(folder.write("history", lines)).output().expect("the judge starts");
    let said = stdout(&output);
    match output.status.code() {
        Some(0) => assert!(said.starts_with("linearizable: "), "{said}"),
        Some(1) => assert!(said.starts_with("not linearizable: "), "{said}"),
        status => panic!("the judge ended with {status:?}: {}", stderr(&output)),
    }
    (output.status.success(), said)
}

/// A clock for all clients, in nanoseconds.
struct Clock(Instant);

impl Clock {
    fn now(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// Sends commands until the connection breaks. The last one has no reply, and no time of its return.
fn work(mut client: Client, number: usize, random: &mut Random, clock: &Clock, replied: impl Fn()) -> Vec<Value> {
    let mut history = Vec::new();
    for write in 0.. {
        // No value is written twice.
        let value = format!("{number}.{write}");
        let (key, doing) = match random.below(10) {
            0..=2 => (random.pick(&KEYS), "set"),
            3 => (random.pick(&KEYS), "del"),
            4..=6 => (random.pick(&KEYS), "get"),
            7 => (random.pick(&COUNTERS), "get"),
            _ => (random.pick(&COUNTERS), "incr"),
        };
        let words = [doing.as_bytes(), key.as_bytes(), value.as_bytes()];
        let words = if doing == "set" { &words[..] } else { &words[..2] };
        let call = clock.now();
        let reply = client.write(&command(words)).and_then(|()| client.read()).ok();
        let end = clock.now();
        let is_last = reply.is_none();
        history.push(json!({
            "client": number, "key": key, "do": doing, "value": value, "reply": reply, "call": call, "return": end,
        }));
        if is_last {
            break;
        }
        replied();
    }
    history
}

/// Says of the commands that no reply came to when they had happened at the latest.
fn settle(round: &mut [Value], ready: u64) {
    round.iter_mut().filter(|operation| operation["reply"].is_null()).for_each(|operation| {
        operation["return"] = ready.into();
    });
}

/// A history of a store on this engine that is killed again and again.
fn recorded(engine: &str) -> Vec<Value> {
    let mut random = Random::of_test(13);
    let folder = Folder::new();
    let data = folder.path("store");
    let clock = Clock(Instant::now());
    // All, and what was done since the last start.
    let (mut history, mut round) = (Vec::new(), Vec::new());
    let mut number = 0;
    for _ in 0..KILLS {
        let mut server = start(engine, &data, &[]);
        settle(&mut round, clock.now());
        history.append(&mut round);
        let (replies, pid, kill_at) = (AtomicUsize::new(0), server.pid(), random.within(1..=REPLIES_MAX));
        let replied = || {
            if replies.fetch_add(1, Ordering::Relaxed) + 1 == kill_at {
                signal(pid, Signal::KILL);
            }
        };
        let clients: Vec<Client> = (0..CLIENTS).map(|number| connect_on(number, &server)).collect();
        thread::scope(|scope| {
            let (clock, replied) = (&clock, &replied);
            let mut threads = Vec::new();
            for client in clients {
                number += 1;
                let (number, mut random) = (number, Random::new(random.bits()));
                threads.push(scope.spawn(move || work(client, number, &mut random, clock, replied)));
            }
            for thread in threads {
                round.extend(thread.join().expect("a client does not fail"));
            }
        });
        server.wait();
    }
    let server = start(engine, &data, &[]);
    settle(&mut round, clock.now());
    history.append(&mut round);
    // What is there at the end.
    let mut client = connect(&server);
    for key in KEYS.iter().chain(&COUNTERS) {
        let call = clock.now();
        let reply = client.ask(&format!("GET {key}"));
        let end = clock.now();
        history.push(json!({
            "client": 0, "key": key, "do": "get", "value": "", "reply": reply, "call": call, "return": end,
        }));
    }
    server.stop();
    history
}

#[test]
fn histories_with_crashes_are_linearizable() {
    let Some(judge) = judge_or_skip() else { return };
    own_network();
    for engine in engines() {
        let history = recorded(engine);
        let under_way = history.iter().filter(|operation| operation["reply"].is_null()).count();
        let (is_right, said) = judged(&judge, &history);
        assert!(is_right, "{engine}: {said}{}", Value::from(history.clone()));
        assert_eq!(
            under_way,
            KILLS * CLIENTS,
            "{engine}: each client has one command that a kill left without a reply"
        );
        println!("{engine}: {KILLS} kills, {under_way} commands under way, {said}");
        // The same store, if it had lost the last write of a key before the end.
        let mut lost = history;
        let last =
            lost.iter_mut().rev().find(|operation| operation["reply"].as_str().is_some_and(|reply| reply != "nil"));
        last.expect("a key is there at the end")["reply"] = "nil".into();
        let (is_right, said) = judged(&judge, &lost);
        assert!(!is_right, "{engine}: a lost write passes: {said}");
    }
}

/// What is done, the reply or "?" for none, the times of call and return.
type ByHand = (&'static str, &'static str, u64, u64);

/// A history of one key.
fn by_hand(operations: &[ByHand]) -> Vec<Value> {
    let operation = |(number, (words, reply, call, end)): (usize, &ByHand)| {
        let (doing, value) = words.split_once(' ').unwrap_or((*words, ""));
        let reply = (*reply != "?").then_some(*reply);
        json!({
            "client": number, "key": "k", "do": doing, "value": value, "reply": reply, "call": call, "return": end,
        })
    };
    operations.iter().enumerate().map(operation).collect()
}

#[test]
fn the_judge_of_histories_tells_right_from_wrong() {
    let Some(judge) = judge_or_skip() else { return };
    // A crash is between 10 and 20.
    for (what, operations, is_right) in [
        ("what was acknowledged is there", &[("set 1", "+OK", 1, 2), ("get", "1", 21, 22)][..], true),
        ("what was acknowledged is lost", &[("set 1", "+OK", 1, 2), ("get", "nil", 21, 22)], false),
        ("what was under way is there", &[("set 1", "?", 9, 20), ("get", "1", 21, 22)], true),
        ("what was under way is not there", &[("set 1", "?", 9, 20), ("get", "nil", 21, 22)], true),
        (
            "what was under way comes late",
            &[("set 1", "?", 9, 20), ("get", "nil", 21, 22), ("get", "1", 23, 24)],
            false,
        ),
        ("what was read is lost", &[("set 1", "?", 8, 20), ("get", "1", 9, 10), ("get", "nil", 21, 22)], false),
        ("what was deleted comes back", &[("set 1", "+OK", 1, 2), ("del", ":1", 3, 4), ("get", "1", 21, 22)], false),
        ("reads at one time see both", &[("set 1", "+OK", 1, 9), ("get", "nil", 2, 3), ("get", "1", 4, 5)], true),
        ("reads go back", &[("set 1", "+OK", 1, 9), ("get", "1", 2, 3), ("get", "nil", 4, 5)], false),
        ("a count is given twice", &[("incr", ":1", 1, 2), ("incr", ":1", 21, 22)], false),
        ("a count under way is there", &[("incr", ":1", 1, 2), ("incr", "?", 9, 20), ("incr", ":3", 21, 22)], true),
        ("a count is made up", &[("incr", ":1", 1, 2), ("incr", ":3", 21, 22)], false),
    ] {
        let (found, said) = judged(&judge, &by_hand(operations));
        assert_eq!(found, is_right, "{what}: {said}");
    }
}
