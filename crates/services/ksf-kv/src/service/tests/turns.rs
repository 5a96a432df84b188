//! Pipelines of every command and request let other connections in behind a bounded amount of work.

use std::collections::BTreeMap;

use ksf_test::Random;

use super::*;
use crate::cluster::{Cluster, NodeSpec};

/// One shard of a cluster that has every slot, on persistent memory, on which no operation is ever under way.
fn world_or_skip(places: u32) -> Option<World> {
    world_of_or_skip(places, 3)
}

fn world_of_or_skip(places: u32, conns: u32) -> Option<World> {
    let address = "192.0.2.1:6379";
    let node = NodeSpec { address: address.into(), slots: "0-16383".into() };
    let cluster = Some(Cluster::new(&[node], address).unwrap());
    let settings = Settings { durability: Durability::None, cluster, ..Settings::default() };
    // As many as are written: nothing is cleaned here.
    let (segment_bytes, places) = (2 * UNWRITTEN_BYTES as u64, places);
    let options = DiskOptions { logs: 1, segment_bytes, places, medium: Medium::PmemMemory };
    Some(World::set_up_with(Folder::in_memory_or_skip()?, options, conns, settings))
}

impl World {
    /// A connection begins anew.
    pub(super) fn renew(&mut self, conn: usize) {
        if let Some(conn) = self.conns[conn].take() {
            conn.end(&mut self.env);
        }
        let key = ConnKey { index: conn as u32, generation: 0 };
        self.conns[conn] = Some(Connection::new(self.on.clone(), Peer::Unix, key, self.env.now).unwrap());
    }

    /// All replies to these on a connection of their own, and the units of work that they took.
    fn converse(&mut self, requests: &[u8]) -> (String, u64) {
        self.renew(0);
        let before = work::done();
        self.conns[0].as_mut().unwrap().receive(Chunk::from_vec(requests.to_vec()), &mut self.env);
        let mut told = String::new();
        // What waits for the medium, or for its turn, leaves in a later one.
        for turn in 0.. {
            self.on.wake();
            self.end_turn();
            told.push_str(&self.take(0));
            if turn >= 2 && self.waiting() == 0 {
                break;
            }
            assert!(turn < 1000, "it does not end: {}", requests[..requests.len().min(200)].escape_ascii());
        }
        (told, work::done() - before)
    }

    /// A pipeline on one connection, while another one asks for something in each turn. Returns the replies and the number of turns.
    ///
    /// # Panics
    ///
    /// The other one has no answer in a turn, or a turn does more work than a share and one request of `units`.
    fn pipeline(&mut self, what: &str, requests: Vec<u8>, units: u64, is_over: impl Fn(&str) -> bool) -> (String, u64) {
        const TURNS_MAX: u64 = 20_000;
        self.renew(0);
        let (mut told, mut turns) = (String::new(), 0);
        let mut before = work::done();
        self.conns[0].as_mut().unwrap().receive(Chunk::from_vec(requests), &mut self.env);
        loop {
            self.receive(1, "PING\r\n");
            assert_eq!(self.take_batch(1).as_deref(), Some("+PONG\r\n"), "{what}");
            while let Some(batch) = self.take_batch(0) {
                told.push_str(&batch);
            }
            let done = work::done() - before;
            // What one request takes depends on those before it.
            assert!(
                done <= TURN_WORK_MAX + 2 * units + 1024,
                "{what}: {done} units in a turn, one request takes {units}"
            );
            if is_over(&told) || self.conns[0].as_ref().unwrap().is_closing() {
                break;
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "{what} does not go on: {}", &told[..told.len().min(400)]);
            before = work::done();
            self.on.wake();
            self.end_one_turn();
            self.env.take_gated();
            self.conns.iter_mut().flatten().for_each(|conn| conn.open_gates(&mut self.env));
        }
        self.end_turn();
        (told, turns)
    }
}

/// Requests that take some shares of a turn together.
fn count(units: u64) -> usize {
    (3 * TURN_WORK_MAX / units.max(1)).clamp(4, 100) as usize
}

/// Also if the last argument is long, or one too many: then most of them are refused.
#[test]
fn a_pipeline_of_any_command_lets_others_in() {
    const SIZE: table::Size = (400, 16);
    const MARK: &str = "-ERR unknown command 'mark'";
    let Some(mut world) = world_or_skip(64) else { return };
    let all = table::all((16, 16), |commands| world.converse(commands).0);
    let mut divided = 0;
    for one in &all {
        if one.is_write {
            // A log has room for what one of them writes.
            let Some(empty) = world_or_skip(16) else { return };
            world = empty;
        }
        for request in [one.request(SIZE), one.padded(SIZE, 2_000)] {
            world.converse(&table::encoded(&table::make_all(SIZE)));
            let (_, units) = world.converse(&request);
            world.converse(&table::encoded(&table::make_all(SIZE)));
            let requests = [request.repeat(count(units)), b"*1\r\n$4\r\nmark\r\n".to_vec()].concat();
            let (_, turns) = world.pipeline(&one.name, requests, units, |told| told.contains(MARK));
            divided += u64::from(turns > 0);
        }
    }
    assert!(divided > all.len() as u64 / 2, "{divided} pipelines took more than one turn");
}

/// As many turns pass for each as its work needs, and no connection comes a second time before all others have come.
#[test]
fn pipelines_of_many_connections_let_others_in() {
    const CONNS: usize = 100;
    const SHARES: u64 = 5;
    let Some(mut world) = world_of_or_skip(64, 3 + CONNS as u32) else { return };
    world.converse(&table::encoded(&table::make("list", (400, 16))));
    let ask = array(["LRANGE", "{b}list", "0", "-1"].map(str::to_owned).into_iter());
    let (reply, units) = world.converse(ask.as_bytes());
    assert!(reply.starts_with("*400\r\n"), "{reply}");
    let asked = (SHARES * TURN_WORK_MAX / units) as usize;
    // Cheap ones between them have more connections go on in a turn.
    let cheap = 500;
    let requests = [ask.repeat(asked / 2), "PING\r\n".repeat(cheap), ask.repeat(asked - asked / 2)].concat();
    let wanted = asked * reply.len() + cheap * "+PONG\r\n".len();
    let all = 3..3 + CONNS;
    for conn in all.clone() {
        world.receive(conn, &requests);
    }
    let (mut told, mut turns) = (vec![0; CONNS], 0);
    let mut before = work::done();
    while told.iter().any(|bytes| *bytes < wanted) {
        world.receive(1, "PING\r\n");
        assert_eq!(world.take_batch(1).as_deref(), Some("+PONG\r\n"));
        world.on.wake();
        world.end_one_turn();
        for conn in all.clone() {
            while let Some(batch) = world.take_batch(conn) {
                told[conn - 3] += batch.len();
            }
        }
        let done = std::mem::replace(&mut before, work::done());
        let done = before - done;
        // Of those that waited, and of those that did not.
        assert!(done <= 2 * ALL_WORK_MAX + 16 * units + 1024, "{done} units in a turn, one request takes {units}");
        let (least, most) = (told.iter().min().unwrap(), told.iter().max().unwrap());
        // One is behind by its cheap ones, which take the turns of a share, too.
        assert!(most - least <= 3 * (TURN_WORK_MAX / units + 2) as usize * reply.len(), "{least} to {most}");
        turns += 1;
    }
    assert!(turns >= CONNS as u64 * (SHARES - 1) * TURN_WORK_MAX / (2 * ALL_WORK_MAX), "{turns} turns");
}

#[test]
fn a_pipeline_of_any_http_request_lets_others_in() {
    let Some(mut world) = world_or_skip(64) else { return };
    for key in 0..1_000 {
        world.send(2, &array(["SET", &format!("{{b}}{key}"), "v"].map(str::to_owned).into_iter()));
    }
    world.take(2);
    let requests = table::http_requests(&"x".repeat(100_000));
    let is_driven = |method: &[u8]| requests.iter().any(|(what, ..)| what.as_bytes().starts_with(method));
    assert!(crate::http::METHODS.iter().all(|method| is_driven(method)));
    let string = table::encoded(&table::make("string", (100, 1_000)));
    for (what, request, status) in requests {
        world.converse(&string);
        let (told, units) = world.converse(&request);
        assert_eq!(statuses(&told), [status.to_string()], "{what}: {told}");
        if told.contains("Connection: close") {
            continue;
        }
        world.converse(&string);
        let count = if request.len() < 1_000 { count(units) } else { 8 };
        let (told, _) = world.pipeline(&what, request.repeat(count), units, |told| statuses(told).len() == count);
        assert_eq!(statuses(&told).len(), count, "{what}");
    }
}

/// Redis has no such bound: its `EXEC` goes on until the last command is done.
#[test]
fn an_exec_with_too_much_work_changes_nothing_and_lets_others_in() {
    /// The bound, with one command and what `EXEC` itself takes.
    const UNITS_MAX: u64 = (1 << 20) + (64 << 10);
    let long = "x".repeat(100_000);
    let members: Vec<String> = (0..5_000).map(|member| member.to_string()).collect();
    let members = members.iter().map(|member| &member[..]);
    let sadd: Vec<&str> = ["SADD", "{b}members"].into_iter().chain(members).collect();
    for (what, times) in [
        (&["SDIFF", "{b}members", "{b}nothing"][..], 2_000),
        (&["LCS", "{b}short", "{b}short", "LEN"], 2_000),
        // It looks at what the transaction itself has set.
        (&["APPEND", "{b}string", "x"], 12_000),
        (&["SETRANGE", "{b}string", "0", "x"], 12_000),
        (&["GETRANGE", "{b}string", "0", "0"], 12_000),
        (&["LPOS", "{b}list", "nothing"], 12_000),
    ] {
        let Some(mut world) = world_or_skip(64) else { return };
        // The bytes of a queue are not what bounds it here.
        let limits = &mut world.env.limits;
        (limits.connection_bytes_max, limits.shard_bytes_max) = (64 << 20, 256 << 20);
        let mut both = |conn, words: &[&str]| world.ask(conn, words);
        both(1, &sadd);
        both(1, &["SET", "{b}short", &"ab".repeat(400)]);
        both(1, &["SET", "{b}string", &long]);
        both(1, &[&["RPUSH", "{b}list"][..], &["element"; 1_000]].concat());
        both(0, &["MULTI"]);
        both(0, &["SET", "{b}new", "1"]);
        both(0, &["APPEND", "{b}string", "x"]);
        let many = array(what.iter().map(|word| (*word).to_owned())).repeat(times);
        world.send(0, &many);
        while !world.take(0).is_empty() {}
        let before = work::done();
        let told = world.ask(0, &["EXEC"]);
        let units = work::done() - before;
        assert!(
            told.starts_with("-EXECABORT Transaction discarded because it has too much work"),
            "{what:?}: {units} units, {told:.200}"
        );
        assert!(units <= UNITS_MAX, "{what:?}: {units} units");
        assert_eq!(world.ask(1, &["EXISTS", "{b}new"]), ":0\r\n", "{what:?}");
        assert_eq!(world.ask(1, &["STRLEN", "{b}string"]), ":100000\r\n", "{what:?}");
        assert_eq!(world.ask(0, &["MULTI"]), "+OK\r\n", "{what:?}");
    }
    // What a transaction of many small writes does is far below.
    let Some(mut world) = world_or_skip(64) else { return };
    world.ask(0, &["MULTI"]);
    world.send(0, &"INCR {b}number\r\n".repeat(1_000));
    while !world.take(0).is_empty() {}
    assert!(world.ask(0, &["EXEC"]).ends_with(":1000\r\n"));
}

/// No command is divided: all other clients of the shard wait until the last key is done.
#[test]
fn a_command_on_many_keys_allocates_little_for_each() {
    const KEYS: u64 = 5_000;
    let Some(mut world) = world_or_skip(64) else { return };
    let mut random = Random::of_test(1);
    let mut keys: Vec<String> = (0..KEYS).map(|number| format!("{{b}}{number:07}")).collect();
    keys.sort_by_cached_key(|_| random.bits());
    let pairs: Vec<&str> = keys.iter().flat_map(|key| [&key[..], "v"]).collect();
    let keys: Vec<&str> = keys.iter().map(|key| &key[..]).collect();
    for (name, words, wanted) in [
        ("MSETNX", &pairs, ":1\r\n".to_owned()),
        ("MSET", &pairs, "+OK\r\n".to_owned()),
        ("MGET", &keys, format!("*{KEYS}\r\n{}", "$1\r\nv\r\n".repeat(keys.len()))),
        ("EXISTS", &keys, format!(":{KEYS}\r\n")),
        ("TOUCH", &keys, format!(":{KEYS}\r\n")),
        ("UNLINK", &keys, format!(":{KEYS}\r\n")),
        ("DEL", &keys, ":0\r\n".to_owned()),
    ] {
        let command = array([&[name][..], words].concat().into_iter().map(str::to_owned));
        let before = allocations();
        world.send(0, &command);
        let taken = allocations() - before;
        assert!(world.take(0) == wanted, "{name}");
        assert!(taken < KEYS / 2, "{name} of {KEYS} keys: {taken} allocations");
    }
}

/// Commands look at their keys in the order of the index.
#[test]
fn keys_in_any_order_and_named_twice_count_as_they_were_sent() {
    const KEYS: usize = 500;
    let Some(mut world) = world_or_skip(64) else { return };
    let mut random = Random::of_test(1);
    // More than one sort puts in order by insertion.
    let named: Vec<(String, String)> =
        (0..4 * KEYS).map(|at| (format!("{{b}}{}", random.below(KEYS as u64)), at.to_string())).collect();
    let last: BTreeMap<&str, &str> = named.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let keys: Vec<&str> = named.iter().map(|(key, _)| &key[..]).collect();
    let pairs: Vec<&str> = named.iter().flat_map(|(key, value)| [&key[..], &value[..]]).collect();
    let bulk = |value: &str| format!("${}\r\n{value}\r\n", value.len());
    let values = format!("*{}\r\n{}", keys.len(), keys.iter().map(|key| bulk(last[key])).collect::<String>());
    for (set, done) in [("MSET", "+OK\r\n"), ("MSETNX", ":1\r\n")] {
        let mut ask = |name: &str, words: &[&str]| world.ask(0, &[&[name][..], words].concat());
        assert_eq!(ask(set, &pairs), done);
        assert!(ask("MGET", &keys) == values, "{set}");
        assert_eq!(ask("EXISTS", &keys), format!(":{}\r\n", keys.len()), "{set}");
        assert_eq!(ask("DEL", &keys), format!(":{}\r\n", last.len()), "{set}");
    }
}
