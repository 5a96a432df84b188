//! Kills the store in the middle of its work, cleaning among it, again and again, and holds it to every acknowledgement.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use ksf_test::{Folder, Random};

use super::{connect, engines, kill, start};
use crate::store::client::{Client, command};
use crate::support::value;

const CLIENTS: usize = 5;
const COUNTERS: usize = 3;
const ROUNDS: usize = 4;

/// What a client was told before the store was killed.
#[derive(Default)]
struct Journal {
    /// Of its own key: the last value that was acknowledged, and the last that was sent.
    set: (u64, u64),
    /// The same of the two keys that it sets together.
    pair: (u64, u64),
    /// Of each counter, the values that it was told.
    counted: [Vec<u64>; COUNTERS],
    /// Of each counter, how often it was sent.
    sent: [u64; COUNTERS],
}

#[derive(Clone, Copy)]
enum Sent {
    Set(u64),
    Pair(u64),
    Count(usize),
}

fn key(kind: &str, client: usize) -> String {
    format!("{kind} {client}")
}

/// Works in windows of pipelined commands until the connection breaks.
fn work(mut client: Client, number: usize, journal: &mut Journal, random: &mut Random, acknowledged: &AtomicU64) {
    let [set, one, other] = ["set", "one", "other"].map(|kind| key(kind, number));
    loop {
        let mut bytes = Vec::new();
        let mut window = Vec::new();
        for _ in 0..random.within(1..=24) {
            let sent = match random.below(3) {
                0 => {
                    journal.set.1 += 1;
                    let value = format!("{} {}", journal.set.1, "x".repeat(random.length(80_000)));
                    bytes.extend(command(&[b"SET", set.as_bytes(), value.as_bytes()]));
                    Sent::Set(journal.set.1)
                }
                1 => {
                    journal.pair.1 += 1;
                    let value = journal.pair.1.to_string();
                    bytes.extend(command(&[
                        b"MSET",
                        one.as_bytes(),
                        value.as_bytes(),
                        other.as_bytes(),
                        value.as_bytes(),
                    ]));
                    Sent::Pair(journal.pair.1)
                }
                _ => {
                    let counter = random.within(0..=COUNTERS - 1);
                    journal.sent[counter] += 1;
                    bytes.extend(command(&[b"INCR", key("counter", counter).as_bytes()]));
                    Sent::Count(counter)
                }
            };
            window.push(sent);
        }
        if client.write(&bytes).is_err() {
            return;
        }
        for sent in window {
            let Ok(reply) = client.read() else { return };
            match sent {
                Sent::Set(value) => {
                    assert_eq!(reply, "+OK");
                    journal.set.0 = value;
                }
                Sent::Pair(value) => {
                    assert_eq!(reply, "+OK");
                    journal.pair.0 = value;
                }
                Sent::Count(counter) => {
                    let value = reply.strip_prefix(':').and_then(|value| value.parse().ok());
                    journal.counted[counter].push(value.unwrap_or_else(|| panic!("INCR: {reply}")));
                }
            }
            acknowledged.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Looks for all that was acknowledged, and takes what it finds for what the next round begins with.
fn audit(client: &mut Client, journals: &mut [Journal]) {
    let first = |value: String| value.split(' ').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
    for (number, journal) in journals.iter_mut().enumerate() {
        let mut get = |kind: &str| {
            client.write(&command(&[b"GET", key(kind, number).as_bytes()])).unwrap();
            first(client.read().unwrap())
        };
        let (set, one, other) = (get("set"), get("one"), get("other"));
        let (acknowledged, sent) = journal.set;
        assert!((acknowledged..=sent).contains(&set), "{set} is none of {acknowledged} to {sent}");
        let (acknowledged, sent) = journal.pair;
        assert!((acknowledged..=sent).contains(&one), "{one} is none of {acknowledged} to {sent}");
        assert_eq!(one, other, "keys that were set together");
        (journal.set, journal.pair) = ((set, set), (one, one));
    }
    for counter in 0..COUNTERS {
        client.write(&command(&[b"GET", key("counter", counter).as_bytes()])).unwrap();
        let value = first(client.read().unwrap());
        let told: Vec<u64> = journals.iter().flat_map(|journal| journal.counted[counter].iter().copied()).collect();
        let sent: u64 = journals.iter().map(|journal| journal.sent[counter]).sum();
        assert!(told.iter().all(|told| *told <= value), "counter {counter} is {value} and was more");
        assert!(told.len() as u64 <= value && value <= sent, "{} told, {value}, {sent} sent", told.len());
        let different: BTreeSet<u64> = told.iter().copied().collect();
        assert_eq!(different.len(), told.len(), "a value of counter {counter} was given to two");
    }
}

#[test]
fn nothing_acknowledged_is_lost_however_often_it_is_killed() {
    for engine in engines() {
        let mut random = Random::of_test(11);
        let folder = Folder::new();
        let data = folder.path("store");
        let mut journals: Vec<Journal> = (0..CLIENTS).map(|_| Journal::default()).collect();
        let (mut all, mut cleaned, mut rounds) = (0, 0, 0);
        // Until a segment was cleaned, too: how much is written in a round is left to chance.
        while rounds < ROUNDS || cleaned == 0 {
            rounds += 1;
            assert!(rounds < 10 * ROUNDS, "{engine}: nothing is cleaned");
            let server = start(engine, &data, &[]);
            audit(&mut connect(&server), &mut journals);
            let acknowledged = AtomicU64::new(0);
            let until = 1 + random.below(800);
            std::thread::scope(|scope| {
                for (number, journal) in journals.iter_mut().enumerate() {
                    let client = connect(&server);
                    let mut random = Random::new(random.bits());
                    let acknowledged = &acknowledged;
                    scope.spawn(move || work(client, number, journal, &mut random, acknowledged));
                }
                ksf_test::wait_until("so many are acknowledged", || acknowledged.load(Ordering::Relaxed) >= until);
                cleaned += value(&server.stat()["services"][0]["own"], "segments_cleaned");
                kill(server);
            });
            all += acknowledged.load(Ordering::Relaxed);
        }
        let server = start(engine, &data, &[]);
        audit(&mut connect(&server), &mut journals);
        println!("{engine}: {all} writes acknowledged in {rounds} rounds, {cleaned} segments cleaned, all there");
        server.stop();
    }
}
