//! A server that is played by hand: it answers well, and it lies in every way that there is.

use std::sync::Mutex;

use ksf_proto::resp::Arguments;

use super::*;
use crate::drive::connection::{ClientConnection, Context, Life, Next, Terms, TimeLimit};
use crate::drive::table::RequestTable;
use crate::record::Record;

const TERMS: Terms =
    Terms { life: Life::Kept, limit: TimeLimit::Reply { progress_bytes: u64::MAX }, timeout_ns: 1_000_000_000 };

const RUN: u64 = 7;

/// Connections with their record.
struct Case {
    connections: Vec<ClientConnection<KvClient>>,
    record: Record<KvCounters>,
}

/// What has been written down; at most so many.
#[derive(Debug)]
struct Paper {
    written: Mutex<Vec<Written>>,
    room: usize,
}

impl Witness for Paper {
    fn write_down(&self, acknowledged: &[Written]) -> io::Result<()> {
        let mut written = self.written.lock().unwrap();
        if written.len() + acknowledged.len() > self.room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        written.extend_from_slice(acknowledged);
        Ok(())
    }
}

impl Case {
    fn new(connections: usize) -> Case {
        Case::with(connections, &[], None, [0; 10])
    }

    fn with(connections: usize, login: &[&str], witness: Option<Arc<dyn Witness>>, acknowledged: [u64; 10]) -> Case {
        let login: Vec<Vec<u8>> = login.iter().map(|word| word.as_bytes().to_vec()).collect();
        let shared = Arc::new(KvWorkload {
            space: Space::new(1, acknowledged),
            values: Values::new(RUN, 100),
            frames: Frames::new("key:", &[64, 100], &login),
            witness,
            connections: connections as u64,
        });
        let connection = |number: u32| {
            ClientConnection::new(KvClient::new(shared.clone(), number, 1000), RequestTable::new(1000, 32, 0), number)
        };
        let connections = (0..connections as u32).map(connection).collect();
        let mut case = Case { connections, record: Record::new(2, false) };
        for at in 0..case.connections.len() {
            case.on(at, |connection, cx| {
                connection.open(0, 0, cx);
                connection.established(cx);
            });
        }
        case
    }

    fn on<T>(
        &mut self,
        at: usize,
        event: impl FnOnce(&mut ClientConnection<KvClient>, &mut Context<'_, KvCounters>) -> T,
    ) -> T {
        let mut cx = Context { now_ns: 10, terms: &TERMS, record: &mut self.record };
        event(&mut self.connections[at], &mut cx)
    }

    fn send(&mut self, at: usize, command: Command) -> Vec<u8> {
        self.on(at, |connection, cx| connection.issue(&command, 0, cx).to_vec())
    }

    fn get(&mut self, at: usize, key: u64) {
        self.send(at, Command::Get { key });
    }

    /// Sends a write; the value.
    fn set(&mut self, at: usize, key: u64) -> Vec<u8> {
        let command = self.send(at, Command::Set { rank: key, size: 0 });
        Arguments::of(&command).unwrap().nth(2).unwrap().to_vec()
    }

    /// Writes and gets an acknowledgment; the value.
    fn write(&mut self, at: usize, key: u64) -> Vec<u8> {
        let value = self.set(at, key);
        assert_eq!(self.receive(at, b"+OK\r\n"), Next::Room);
        value
    }

    fn receive(&mut self, at: usize, bytes: &[u8]) -> Next {
        let (used, next) = self.on(at, |connection, cx| connection.received(bytes, 0, false, cx));
        assert_eq!(used, bytes.len());
        next
    }

    /// Reads a key and gets this value.
    fn read(&mut self, at: usize, key: u64, value: &[u8]) {
        self.get(at, key);
        self.receive(at, &bulk(value));
    }

    #[track_caller]
    fn assert_faults(&self, faults: &str) {
        assert_eq!(self.record.faults.in_words(), faults, "{:?}", self.record.notes);
    }
}

fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

#[test]
fn commands_are_as_servers_take_them() {
    let mut case = Case::new(3);
    assert_eq!(case.send(0, Command::Get { key: 7 }), b"*2\r\n$3\r\nGET\r\n$16\r\nkey:000000000007\r\n");
    let command = case.send(1, Command::Set { rank: 5, size: 1 });
    let words: Vec<&[u8]> = Arguments::of(&command).unwrap().collect();
    assert_eq!((words.len(), words[0], words[2].len()), (3, &b"SET"[..], 100));
    assert_eq!(words[1], b"key:000000000004", "the second of three connections writes 1, 4 and 7");
    assert!(command.starts_with(b"*3\r\n$3\r\nSET\r\n$16\r\n") && command.ends_with(b"\r\n"));
    // Of ten keys the last one is of the first connection: the others have none of that rank.
    for (at, key) in [(0, "9"), (1, "7"), (2, "8")] {
        let command = case.send(at, Command::Set { rank: 9, size: 0 });
        assert_eq!(Arguments::of(&command).unwrap().nth(1), Some(format!("key:00000000000{key}").as_bytes()));
    }
    let command = case.send(2, Command::Fill { key: 3, size: 0 });
    assert_eq!(Arguments::of(&command).unwrap().nth(1), Some(&b"key:000000000003"[..]));
}

#[test]
fn a_server_that_is_right_is_found_right_however_its_replies_are_cut() {
    for cut in 1..200 {
        let mut case = Case::new(2);
        let (first, second) = (case.set(0, 0), case.set(0, 0));
        case.get(0, 0);
        case.get(0, 1);
        case.set(1, 1);
        let replies = [b"+OK\r\n+OK\r\n", &bulk(&second)[..], b"$-1\r\n"].concat();
        let (mut held, mut from) = (0, 0);
        while from + held < replies.len() {
            let to = (from + held + cut).min(replies.len());
            let (used, _) = case.on(0, |connection, cx| connection.received(&replies[from..to], held, false, cx));
            (held, from) = (to - from - used, from + used);
        }
        case.receive(1, b"+OK\r\n");
        case.assert_faults("");
        assert_ne!(first, second);
        let KvCounters { hits, misses, unchecked, held, newer, journaled } = case.record.counters;
        assert_eq!([hits, misses, unchecked, held, newer, journaled], [1, 1, 0, 1, 0, 0]);
        assert_eq!([0, 1].map(|class| case.record.latencies[class].count()), [2, 3]);
    }
}

#[test]
fn every_lie_about_a_value_is_found() {
    type Lie = fn(old: &[u8], new: &[u8], other: &[u8]) -> Vec<u8>;
    let lies: [(&str, Lie); 9] = [
        ("1 old", |old, _, _| bulk(old)),
        ("1 missing", |_, _, _| b"$-1\r\n".to_vec()),
        ("1 misdirected", |_, _, other| bulk(other)),
        ("1 foreign", |_, _, _| bulk(b"hello")),
        ("1 foreign", |_, _, _| {
            let mut value = Vec::new();
            Values::new(RUN + 1, 64).write(&mut value, 0, u64::MAX, 64);
            bulk(&value)
        }),
        ("1 unknown", |_, _, _| {
            let mut value = Vec::new();
            Values::new(RUN, 64).write(&mut value, 0, (1 << 40) + 3, 64);
            bulk(&value)
        }),
        ("1 damaged", |_, new, _| bulk(&new[..new.len() - 1])),
        ("1 damaged", |old, new, _| bulk(&[&new[..40], &old[40..]].concat())),
        ("1 damaged", |_, new, _| {
            let mut value = new.to_vec();
            value[33] ^= 1;
            bulk(&value)
        }),
    ];
    for (faults, lie) in lies {
        let mut case = Case::new(2);
        let (old, new, other) = (case.write(0, 0), case.write(0, 0), case.write(1, 1));
        case.read(0, 0, &new);
        case.assert_faults("");
        // To whom the key belongs, and to another one.
        for (at, faults) in [(0, faults.to_owned()), (1, faults.replace('1', "2"))] {
            case.get(at, 0);
            case.receive(at, &lie(&old, &new, &other));
            case.assert_faults(&faults);
        }
        assert_eq!((case.record.answered, case.record.failed), (4, 2));
        assert!(case.record.notes[0].text.contains("key:000000000000"), "{:?}", case.record.notes);
    }
}

#[test]
fn a_read_in_a_pipeline_sees_the_writes_in_front_of_it_and_none_behind() {
    for (seen, faults) in [(0, "1 old"), (1, ""), (2, "1 unknown")] {
        let mut case = Case::new(1);
        let first = case.write(0, 3);
        let second = case.set(0, 3);
        case.get(0, 3);
        let third = case.set(0, 3);
        let value = [&first, &second, &third][seen];
        case.receive(0, &[b"+OK\r\n", &bulk(value)[..], b"+OK\r\n"].concat());
        case.assert_faults(faults);
    }
}

#[test]
fn a_read_of_anothers_key_sees_what_was_acknowledged_or_seen_before_it_was_sent() {
    let mut case = Case::new(3);
    let first = case.write(0, 0);
    // While the second write is under way, both are right...
    let second = case.set(0, 0);
    case.read(1, 0, &first);
    case.read(1, 0, &second);
    case.assert_faults("");
    // ...until one was seen.
    case.read(2, 0, &first);
    case.assert_faults("1 old");
    // A read that was sent before the acknowledgment may see what was there then.
    let third = {
        case.receive(0, b"+OK\r\n");
        case.get(1, 0);
        case.write(0, 0)
    };
    case.receive(1, &bulk(&second));
    case.assert_faults("1 old");
    case.read(1, 0, &second);
    case.assert_faults("2 old");
    case.read(1, 0, &third);
    case.assert_faults("2 old");
}

#[test]
fn what_a_refused_write_left_is_not_known() {
    let mut case = Case::new(1);
    let first = case.write(0, 0);
    let second = case.set(0, 0);
    case.receive(0, b"-OOM the log is full\r\n");
    case.assert_faults("1 rejected");
    assert!(case.record.notes[0].text.contains("SET key:000000000000 was answered by -OOM the log is full"));
    case.read(0, 0, &first);
    case.read(0, 0, &second);
    case.assert_faults("1 rejected");
}

#[test]
fn a_key_without_an_acknowledged_write_may_have_anything_but_a_damaged_value_of_ours() {
    let mut case = Case::new(1);
    case.get(0, 0);
    case.receive(0, b"$-1\r\n");
    case.read(0, 0, b"what was there before");
    let value = case.set(0, 0);
    case.receive(0, b"-ERR no\r\n");
    case.read(0, 0, &value);
    let counters = &case.record.counters;
    assert_eq!((counters.hits, counters.misses, counters.unchecked, counters.held), (1, 1, 1, 0));
    case.read(0, 1, &value[..value.len() - 1]);
    case.read(0, 1, &value);
    case.assert_faults("1 misdirected, 1 rejected, 1 damaged");
}

#[test]
fn replies_of_another_kind_and_replies_to_nothing_are_told() {
    for (command, reply) in [
        (Command::Get { key: 0 }, &b"+OK\r\n"[..]),
        (Command::Get { key: 0 }, b":1\r\n"),
        (Command::Get { key: 0 }, b"*0\r\n"),
        (Command::Set { rank: 0, size: 0 }, b"+QUEUED\r\n"),
        (Command::Set { rank: 0, size: 0 }, b"$-1\r\n"),
    ] {
        let mut case = Case::new(1);
        case.send(0, command);
        assert_eq!(case.receive(0, reply), Next::Room);
        case.assert_faults("1 malformed");
    }
    let mut case = Case::new(1);
    case.get(0, 0);
    case.get(0, 0);
    assert_eq!(case.receive(0, b"HTTP/1.1 400\r\n"), Next::Close);
    case.assert_faults("2 closed, 1 malformed");
    let mut case = Case::new(1);
    case.get(0, 0);
    assert_eq!(case.receive(0, b"$-1\r\n$-1\r\n"), Next::Close);
    case.assert_faults("1 unsolicited");
}

#[test]
fn a_login_comes_first_and_must_be_right() {
    let mut case = Case::with(1, &["me", "secret"], None, [0; 10]);
    let sent = case.send(0, Command::Get { key: 1 });
    assert!(sent.starts_with(b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$6\r\nsecret\r\n*2\r\n$3\r\nGET\r\n"));
    assert!(case.send(0, Command::Get { key: 1 }).starts_with(b"*2\r\n$3\r\nGET\r\n"));
    case.receive(0, b"+OK\r\n$-1\r\n");
    case.receive(0, b"$-1\r\n");
    case.assert_faults("");
    assert_eq!(case.record.answered, 2);
    let mut case = Case::with(1, &["wrong"], None, [0; 10]);
    case.get(0, 1);
    assert_eq!(case.receive(0, b"-WRONGPASS no\r\n-NOAUTH no\r\n"), Next::Close);
    case.assert_faults("1 closed, 1 rejected");
    assert!(case.record.notes[0].text.contains("AUTH was answered by -WRONGPASS no"), "{:?}", case.record.notes);
}

#[test]
fn what_was_acknowledged_is_written_down_or_the_run_ends() {
    let paper = Arc::new(Paper { written: Mutex::default(), room: 600 });
    let mut case = Case::with(2, &[], Some(paper.clone()), [0; 10]);
    for _ in 0..500 {
        case.set(0, 0);
    }
    case.receive(0, &b"+OK\r\n".repeat(499));
    case.receive(0, b"-ERR no\r\n");
    assert_eq!(case.record.counters.journaled, 499);
    let versions: Vec<u64> = paper.written.lock().unwrap().iter().map(|written| written.version).collect();
    assert_eq!(versions, (1..=499).map(|number| (1 << 40) + number).collect::<Vec<u64>>());
    (0..102).for_each(|_| drop(case.set(1, 1)));
    assert_eq!(case.receive(1, &b"+OK\r\n".repeat(102)), Next::Close);
    case.assert_faults("1 rejected, 1 journal");
    assert_eq!((case.record.counters.journaled, paper.written.lock().unwrap().len()), (499, 499));
}

#[test]
fn an_audit_knows_what_was_acknowledged_and_allows_what_came_later() {
    let mut values = Vec::new();
    Values::new(RUN, 64).write(&mut values, 0, 100, 64);
    let later = {
        let mut value = Vec::new();
        Values::new(RUN, 64).write(&mut value, 1, 101, 64);
        value
    };
    let mut acknowledged = [0; 10];
    acknowledged[..3].fill(100);
    let mut case = Case::with(1, &[], None, acknowledged);
    case.read(0, 0, &values);
    case.read(0, 1, &later);
    case.get(0, 2);
    case.receive(0, b"$-1\r\n");
    case.assert_faults("1 missing");
    assert_eq!((case.record.counters.held, case.record.counters.newer), (2, 1));
}
