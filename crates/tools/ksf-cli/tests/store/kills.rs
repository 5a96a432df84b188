//! Kills the store 40 times (500 in `make soak`) on one folder with each engine, and holds it after each kill to every reply.
//!
//! ```text
//!   start ─► audit ─► pipelined commands on four connections ─► kill -9 ─┐
//!     ▲                (which, and when: by numbers from a seed)         │
//!     └──────────────────────────────────────────────────────────────────┘
//! ```

use std::path::Path;

use ksf_test::{Folder, Random, effort, own_network};

use super::{connect, connect_on, engines, kill, list_of_two_cpus, start};
use crate::store::client::Client;
use crate::store::journal::{CONNECTIONS, Journals, found};
use crate::store::offline::tool;

/// On each of the two engines, in `make test`.
const KILLS: usize = 40;
/// The same in `make soak`: so many that logs are cleaned.
const KILLS_IN_SOAK: usize = 500;
/// Commands that a connection has under way at most.
const PIPELINE: usize = 16;
/// Replies, or bytes of commands, after which the store is killed at the latest.
const REPLIES_MAX: usize = 60;
const BYTES_MAX: usize = 60_000;

/// Bytes of a segment of the smallest log, and how many have room in it.
const SEGMENT_BYTES: usize = 2 << 20;
const PLACES: u64 = 4;

/// Works until so many replies were read, or so many bytes were sent, the last command cut where that is.
fn work(journals: &mut Journals, clients: &mut [Client], random: &mut Random) -> Result<(), String> {
    let (mut replies_left, mut bytes_left) = match random.one_in(2) {
        true => (random.within(1..=REPLIES_MAX), usize::MAX),
        false => (usize::MAX, random.within(0..=BYTES_MAX)),
    };
    while replies_left > 0 && bytes_left > 0 {
        let connection = random.within(0..=CONNECTIONS - 1);
        let under_way = journals.under_way(connection);
        if under_way < PIPELINE && (under_way == 0 || random.one_in(3)) {
            let bytes = journals.send(connection, random.within(1..=PIPELINE - under_way), random);
            let some = bytes.len().min(bytes_left);
            clients[connection].write(&bytes[..some]).expect("the store reads");
            bytes_left -= some;
        } else {
            journals.take_reply(connection, &mut clients[connection])?;
            replies_left -= 1;
        }
    }
    Ok(())
}

/// Segments that the logs have begun, of the log with the most.
fn segments_begun(data: &Path) -> u64 {
    let logs = (0..).map(|log| data.join(format!("log-{log:03}"))).map_while(|log| std::fs::read(log).ok());
    let begun = |log: Vec<u8>| {
        let headers = log.chunks(SEGMENT_BYTES).filter(|segment| segment[4..8] == *b"ksfS");
        headers.map(|segment| 1 + u64::from_le_bytes(*segment[8..].first_chunk().unwrap())).max().unwrap_or(0)
    };
    logs.map(begun).max().expect("a store has a log")
}

fn is_killed(engine: &str) {
    own_network();
    if !engines().contains(&engine) {
        return;
    }
    let mut random = Random::of_test(1_000);
    let folder = Folder::new();
    let data = folder.path("store");
    let cpus = list_of_two_cpus();
    let mut journals = Journals::default();
    let (mut replies, mut under_way) = (0, 0);
    let kills_wanted = effort(KILLS, KILLS_IN_SOAK);
    for kills in 0..kills_wanted {
        let server = start(engine, &data, &["--cpus", &cpus]);
        let audited = journals.audit(&found(&mut connect(&server)));
        audited.unwrap_or_else(|error| panic!("{engine}, after kill {kills}: {error}"));
        let mut clients: Vec<Client> = (0..CONNECTIONS).map(|number| connect_on(number, &server)).collect();
        let worked = work(&mut journals, &mut clients, &mut random);
        kill(server);
        worked.unwrap_or_else(|error| panic!("{engine}, before kill {}: {error}", kills + 1));
        replies += journals.answered().iter().sum::<usize>();
        under_way += (0..CONNECTIONS).map(|connection| journals.under_way(connection)).sum::<usize>();
    }
    let server = start(engine, &data, &["--cpus", &cpus]);
    let audited = journals.audit(&found(&mut connect(&server)));
    audited.unwrap_or_else(|error| panic!("{engine}, after the last kill: {error}"));
    server.stop();
    let segments = segments_begun(&data);
    println!("{engine}: {kills_wanted} kills, {replies} commands answered, {under_way} under way, {segments} segments");
    // A place is used again when what it had was cleaned and erased.
    let are_cleaned = kills_wanted == KILLS_IN_SOAK;
    assert!(!are_cleaned || segments > PLACES, "{engine}: {segments} segments were begun, so nothing was cleaned");
    assert!(tool(&["check", data.to_str().unwrap()], 0).contains(&format!(", {} starts", kills_wanted + 1)));
}

#[test]
fn kills_of_one_store_lose_nothing_on_uring() {
    is_killed("uring");
}

#[test]
fn kills_of_one_store_lose_nothing_on_epoll() {
    is_killed("epoll");
}
