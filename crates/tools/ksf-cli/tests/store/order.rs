//! The promise on the wire: no reply to a write leaves before the write of its record is done, as strace(1) sees both.
//!
//! On epoll, where writes to the disk are system calls. On io_uring the kernel writes without one; what holds replies back is
//! the same code.

use std::collections::{BTreeMap, BTreeSet};

use ksf_test::{Folder, Random, own_network};

use super::connect_on;
use crate::store::client::{Client, command};
use crate::store::trace::{Event, Trace, Traced, What};

const CONNECTIONS: usize = 3;
const ROUNDS: usize = 40;
/// Commands that a connection sends in a round at most.
const WINDOW: usize = 8;

/// Each write is held back for 3 ms where its call begins, so that a reply that does not wait for it is seen before its end.
const SLOW_WRITES: [&str; 2] = ["-e", "inject=pwritev2:delay_enter=3000"];

const OK: &[u8] = b"+OK\r\n";

/// What the value of a command begins with.
fn token(connection: usize, number: usize) -> String {
    format!("<record {connection} {number}>")
}

/// All records that are in these bytes.
fn tokens(data: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let text = String::from_utf8_lossy(data);
    let records: Vec<_> = text
        .split("<record ")
        .skip(1)
        .filter_map(|text| {
            let (connection, number) = text.split_once('>')?.0.split_once(' ')?;
            Some((connection.parse().ok()?, number.parse().ok()?))
        })
        .collect();
    records.into_iter()
}

/// Has connections set keys in pipelines, with this durability. What strace saw, and how often each connection set a key; `None`:
/// there is no strace.
fn traced(durability: &str) -> Option<(Trace, [usize; CONNECTIONS])> {
    own_network();
    let mut random = Random::of_test(12);
    let folder = Folder::new();
    let traced = Traced::start(&folder, &folder.path("store"), &["--durability", durability], &SLOW_WRITES)?;
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|number| connect_on(number, &traced.server)).collect();
    for (connection, client) in clients.iter_mut().enumerate() {
        // Tells the connection of a socket.
        let greeting = format!("<connection {connection}>");
        client.write(&command(&[b"ECHO", greeting.as_bytes()])).unwrap();
        assert_eq!(client.read().unwrap(), greeting);
    }
    let mut sent = [0; CONNECTIONS];
    for _ in 0..ROUNDS {
        let windows = sent.map(|_| random.within(1..=WINDOW));
        for (connection, client) in clients.iter_mut().enumerate() {
            let mut bytes = Vec::new();
            for _ in 0..windows[connection] {
                sent[connection] += 1;
                let value = token(connection, sent[connection]) + &"v".repeat(random.length(3_000));
                bytes.extend(command(&[b"SET", format!("key {}", random.below(50)).as_bytes(), value.as_bytes()]));
            }
            client.write(&bytes).unwrap();
        }
        for (connection, client) in clients.iter_mut().enumerate() {
            (0..windows[connection]).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        }
    }
    drop(clients);
    Some((traced.stop(), sent))
}

/// Replies to SET that each connection was sent, and those of them that left before their record was written.
fn early(trace: &Trace) -> ([usize; CONNECTIONS], BTreeSet<(usize, usize)>) {
    let (mut written, mut early) = (BTreeSet::new(), BTreeSet::new());
    // Of each socket its connection, and the bytes that it took behind the greeting.
    let mut sockets: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for event in &trace.events {
        match *event {
            Event::Begin(call) => {
                let What::Send { socket, data } = &trace.calls[call] else { continue };
                let Some((connection, bytes)) = sockets.get(&socket[..]) else { continue };
                let replies = (bytes / OK.len() + 1)..=(bytes + data.len()) / OK.len();
                early.extend(replies.map(|number| (*connection, number)).filter(|reply| !written.contains(reply)));
            }
            Event::End(call, result) => match &trace.calls[call] {
                What::Write { file, data, .. } if file.starts_with("log-") => {
                    assert_eq!(result, data.len(), "a write to {file} was cut");
                    written.extend(tokens(data));
                }
                What::Send { socket, data } => {
                    if let Some((_, bytes)) = sockets.get_mut(&socket[..]) {
                        *bytes += result;
                    } else if let Some((_, rest)) = String::from_utf8_lossy(data).split_once("<connection ") {
                        let connection = rest.split('>').next().and_then(|number| number.parse().ok());
                        sockets.insert(socket, (connection.expect("a greeting is whole"), 0));
                    }
                }
                _ => {}
            },
        }
    }
    let mut replies = [0; CONNECTIONS];
    sockets.values().for_each(|(connection, bytes)| replies[*connection] = bytes / OK.len());
    (replies, early)
}

#[test]
fn no_reply_leaves_before_the_write_of_its_record_is_done() {
    let Some((trace, sent)) = traced("always") else { return };
    let (replies, early) = early(&trace);
    assert_eq!(replies, sent, "not every reply was seen to leave");
    assert!(early.is_empty(), "of {sent:?} these left early: {early:?}");
    let is_record = |what: &&What| matches!(what, What::Write { data, .. } if tokens(data).next().is_some());
    for write in trace.calls.iter().filter(is_record) {
        assert!(matches!(write, What::Write { is_durable: true, .. }), "a record was written without RWF_DSYNC");
    }
}

/// So the test above would see it.
#[test]
fn replies_that_do_not_wait_for_the_disk_are_seen_to_leave_early() {
    let Some((trace, sent)) = traced("none") else { return };
    let (replies, early) = early(&trace);
    assert_eq!(replies, sent, "not every reply was seen to leave");
    assert!(!early.is_empty(), "of {sent:?} none left early");
}
