//! The server on real sockets and a real folder, on both engines: its replies, and its data after a
//! start.

use std::io::Write;

use crate::common::{Client, Serving, assert_the_same_after_starts, counter, engines, engines_of_effort};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_kv::disk::{Disk, DiskError, DiskOptions};
use ksf_test::{own_network, stream, wait_until};

/// Connections on all shards see each write, and every acknowledged write survives a start.
#[test]
fn many_clients_on_all_shards_lose_nothing() {
    own_network();
    const CLIENTS: usize = 6;
    const ROUNDS: usize = 200;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let mut client = serving.connect();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        // Pipelined: a write, a read of it, and a count that all share.
                        let (key, value) = (format!("key {number} {}", round % 20), format!("value {round}"));
                        client.send(&["SET", &key, &value]);
                        client.send(&["GET", &key]);
                        client.send(&["INCR", "all"]);
                        assert_eq!(client.reply(), "+OK");
                        assert_eq!(client.reply(), value);
                        assert!(client.reply().starts_with(':'));
                    }
                });
            }
        });
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(client.ask("GET all"), (CLIENTS * ROUNDS).to_string(), "{engine}");
        for number in 0..CLIENTS {
            for last in ROUNDS - 20..ROUNDS {
                client.send(&["GET", &format!("key {number} {}", last % 20)]);
                assert_eq!(client.reply(), format!("value {last}"), "{engine}");
            }
        }
        serving.stop();
    }
}

/// Other clients see transactions only as a whole, also while all shards write the same keys. No
/// transaction waits for ever.
#[test]
fn a_transaction_is_seen_whole_and_is_there_after_a_start() {
    own_network();
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 200;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let mut client = serving.connect();
                scope.spawn(move || {
                    let keys = if number % 2 == 0 { ["first", "second"] } else { ["second", "first"] };
                    for _ in 0..ROUNDS {
                        client.send(&["MULTI"]);
                        keys.iter().for_each(|key| client.send(&["HINCRBY", key, "count", "1"]));
                        keys.iter().for_each(|key| client.send(&["RPUSH", &format!("list of {key}"), "x"]));
                        client.send(&["EXEC"]);
                        assert_eq!(client.reply(), "+OK");
                        (0..4).for_each(|_| assert_eq!(client.reply(), "+QUEUED"));
                        let told = client.reply();
                        let told: Vec<&str> = told.trim_matches(['[', ']']).split(' ').collect();
                        assert!(told.len() == 4 && told.iter().all(|one| *one == told[0]), "{engine}: {told:?}");
                    }
                });
            }
        });
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        for key in ["first", "second"] {
            assert_eq!(client.ask(&format!("HGET {key} count")), (CLIENTS * ROUNDS).to_string(), "{engine}");
            client.send(&["LLEN", &format!("list of {key}")]);
            assert_eq!(client.reply(), format!(":{}", CLIENTS * ROUNDS), "{engine}");
        }
        serving.stop();
    }
}

/// Questions about the keys of [`FILLED`], repeated after a start.
const LOOKED_AT: &[&str] = &[
    "HGETALL hash",
    "HLEN hash",
    "TYPE hash",
    "EXPIRETIME hash",
    "EXISTS gone",
    "HGETALL back",
    "DBSIZE",
    "SMEMBERS set",
    "LRANGE list 0 -1",
    "LINDEX list 0",
    "LLEN list",
    "ZRANGE scored 0 -1 WITHSCORES",
];

const FILLED: &[&str] = &[
    "HSET hash a 1 b 2 c 3",
    "HDEL hash b",
    "HSET hash a 4",
    "EXPIREAT hash 4000000000",
    "HSET gone a 1",
    "HDEL gone a",
    "HSET back a 1 b 2",
    "DEL back",
    "HSET back c 3",
    "SADD set a b c",
    "SREM set b",
    "RPUSH list a b c d",
    "LPUSH list z",
    "RPOP list",
    "LPOP list",
    "LSET list 1 new",
    "LINSERT list BEFORE new x",
    "ZADD scored 3 a 1 b -2 c 5 d",
    "ZADD scored 0 a",
    "ZREM scored d",
];

/// Keys with cells keep their content over two starts, also if segments are cleaned in between.
#[test]
fn cells_are_there_after_every_start() {
    own_network();
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        FILLED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{engine}: {command}"));
        let was: Vec<String> = LOOKED_AT.iter().map(|question| client.ask(question)).collect();
        serving.stop();
        assert_the_same_after_starts(engine, folder.path(), LOOKED_AT, &was);
    }
}

#[test]
fn dump_and_salvage_restore_all_keys() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    FILLED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{command}"));
    let was: Vec<String> = LOOKED_AT.iter().map(|question| client.ask(question)).collect();
    serving.stop();
    let (mut dumped, mut salvaged) = (Vec::new(), Vec::new());
    let keys = ksf_kv::offline::dump(folder.path(), 0, &mut dumped).unwrap();
    assert_eq!(ksf_kv::offline::salvage(folder.path(), 0, &mut salvaged).unwrap().0, keys);
    for commands in [dumped, salvaged] {
        let other = tempfile::tempdir().unwrap();
        let serving = Serving::start(EngineKind::Epoll, other.path());
        let mut client = serving.connect();
        client.0.get_mut().write_all(&commands).unwrap();
        client.send(&["ECHO", "done"]);
        while client.reply() != "done" {}
        for (question, was) in LOOKED_AT.iter().zip(&was) {
            assert_eq!(&client.ask(question), was, "{question}");
        }
        serving.stop();
    }
}

/// The hash is longer than the longest command that the server takes.
#[test]
fn no_command_of_a_dump_is_longer_than_a_server_takes() {
    own_network();
    const FIELDS: usize = 100;
    let limits = Limits { message_bytes_max: 400 << 10, ..Limits::default() };
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let serving = Serving::start_with(EngineKind::Epoll, folder.path(), limits.clone());
    let mut client = serving.connect();
    for field in 0..FIELDS {
        client.send(&["HSET", "hash", &field.to_string(), &"v".repeat(15_000)]);
        assert_eq!(client.reply(), ":1");
    }
    serving.stop();
    let (mut dumped, mut salvaged) = (Vec::new(), Vec::new());
    ksf_kv::offline::dump(folder.path(), 0, &mut dumped).unwrap();
    ksf_kv::offline::salvage(folder.path(), 0, &mut salvaged).unwrap();
    assert!(dumped == salvaged);
    let serving = Serving::start_with(EngineKind::Epoll, other.path(), limits);
    let mut client = serving.connect();
    client.send(&["PING"]);
    assert_eq!(client.reply(), "+PONG");
    client.0.get_mut().write_all(&dumped).unwrap();
    client.send(&["HLEN", "hash"]);
    loop {
        let reply = client.reply();
        assert!(!reply.starts_with('-'), "{reply}");
        if reply == format!(":{FIELDS}") {
            break;
        }
    }
    assert_eq!(client.ask("HSTRLEN hash 99"), ":15000");
    serving.stop();
}

/// Endless overwriting of fields stays within the logs. No field of a deleted key comes back.
#[test]
fn overwriting_cells_for_ever_stays_within_the_logs() {
    own_network();
    const FIELDS: usize = 40;
    const ROUNDS: usize = 40;
    let value = |round: usize| format!("{round} {}", "v".repeat(20_000));
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        client.ask("HSET deleted a 1 b 2 c 3");
        assert_eq!(client.ask("DEL deleted"), ":1");
        for round in 0..ROUNDS {
            (0..FIELDS).for_each(|field| client.send(&["HSET", "hash", &field.to_string(), &value(round)]));
            let added = if round == 0 { ":1" } else { ":0" };
            (0..FIELDS).for_each(|field| assert_eq!(client.reply(), added, "{engine}: {round} {field}"));
        }
        assert!(counter(&serving, "segments_cleaned") > 10, "{engine}: {}", counter(&serving, "segments_cleaned"));
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(client.ask("HLEN hash"), format!(":{FIELDS}"), "{engine}");
        for field in 0..FIELDS {
            assert!(client.ask(&format!("HGET hash {field}")) == value(ROUNDS - 1), "{engine}: {field}");
        }
        assert_eq!(client.ask("DBSIZE"), ":1", "{engine}");
        serving.stop();
    }
}

/// Endless overwriting stays within the logs. No client gets the error of a full log.
#[test]
fn overwriting_for_ever_stays_within_the_logs() {
    own_network();
    const CLIENTS: usize = 4;
    const KEYS: usize = 20;
    const ROUNDS: usize = 60;
    let value = |client: usize, round: usize| format!("{client} {round} {}", "v".repeat(20_000));
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let mut client = serving.connect();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        // Commands that need no room pass those that wait for it, which keep their
                        // places.
                        (0..KEYS)
                            .for_each(|key| client.send(&["SET", &format!("{number} {key}"), &value(number, round)]));
                        client.send(&["INCR", "rounds"]);
                        client.send(&["STRLEN", &format!("{number} 7")]);
                        (0..KEYS).for_each(|_| assert_eq!(client.reply(), "+OK"));
                        assert!(client.reply().starts_with(':'));
                        assert_eq!(client.reply(), format!(":{}", value(number, round).len()));
                    }
                });
            }
        });
        assert!(counter(&serving, "segments_cleaned") > 30, "{engine}: {}", counter(&serving, "segments_cleaned"));
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(client.ask("GET rounds"), (CLIENTS * ROUNDS).to_string(), "{engine}");
        for (number, key) in (0..CLIENTS).flat_map(|number| (0..KEYS).map(move |key| (number, key))) {
            client.send(&["GET", &format!("{number} {key}")]);
            assert!(client.reply() == value(number, ROUNDS - 1), "{engine}: {number} {key}");
        }
        serving.stop();
    }
}

#[test]
fn a_full_store_is_read_and_has_room_when_keys_are_deleted() {
    let value = "v".repeat(20_000);
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        let set = |client: &mut Client, key: usize| {
            client.send(&["SET", &key.to_string(), &value]);
            client.reply()
        };
        let mut keys = 0;
        let told = loop {
            match set(&mut client, keys) {
                ok if ok == "+OK" => keys += 1,
                told => break told,
            }
        };
        // A value that is too long for the log takes no memory.
        let too_long = "-ERR string exceeds maximum allowed size (proto-max-bulk-len)";
        assert_eq!(client.ask("SETRANGE 0 500000000 x"), too_long, "{engine}");
        assert!(told.starts_with("-OOM the log is full") && keys > 100, "{engine}: {told} after {keys} keys");
        assert_eq!(client.ask("STRLEN 0"), ":20000", "{engine}");
        for key in (0..keys).filter(|key| key % 2 == 0) {
            assert_eq!(client.ask(&format!("DEL {key}")), ":1", "{engine}");
        }
        for key in 0..keys / 4 {
            assert_eq!(set(&mut client, 2 * key), "+OK", "{engine}: {key} of {keys}");
        }
        assert_eq!(client.ask("DBSIZE"), format!(":{}", keys / 2 + keys / 4), "{engine}");
        serving.stop();
    }
}

/// Sends commands in pipelines. Returns the number of `wanted` replies, and the first other reply.
fn ask_all(
    client: &mut Client,
    commands: impl IntoIterator<Item = Vec<String>>,
    wanted: &str,
) -> (usize, Option<String>) {
    let (mut done, mut other) = (0, None);
    let mut commands = commands.into_iter().peekable();
    while other.is_none() && commands.peek().is_some() {
        let mut sent = 0;
        for command in commands.by_ref().take(200) {
            client.send(&command.iter().map(String::as_str).collect::<Vec<_>>());
            sent += 1;
        }
        for _ in 0..sent {
            let told = client.reply();
            if told == wanted {
                done += 1;
            } else {
                other.get_or_insert(told);
            }
        }
    }
    (done, other)
}

/// The records of these small values are hardly longer than those of their removals. The removals
/// are spread over all segments. A connection of another shard writes some of them to its own log.
#[test]
fn a_full_store_takes_every_removal_and_every_flush() {
    own_network();
    const MIXED: usize = 7919;
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let start = || Serving::start_on(engine, folder.path(), Limits::default(), Settings::default(), 8);
        let fill = |serving: &Serving| {
            let value = "v".repeat(64);
            let set = |key: usize| vec!["SET".to_owned(), format!("key {key}"), value.clone()];
            let (keys, told) = ask_all(&mut serving.connect(), (0..).map(set), "+OK");
            assert!(told.as_ref().is_some_and(|told| told.starts_with("-OOM the log is full")), "{engine}: {told:?}");
            keys
        };
        let serving = start();
        let keys = fill(&serving);
        let delete = |at: usize| vec!["DEL".to_owned(), format!("key {}", at * MIXED % keys)];
        assert!(keys > 10_000 && !keys.is_multiple_of(MIXED), "{engine}: {keys}");
        let mut clients = [serving.connect(), serving.connect()];
        for (part, client) in [0..keys / 3, keys / 3..keys / 2].into_iter().zip(&mut clients) {
            let count = part.len();
            assert_eq!(ask_all(client, part.map(delete), ":1"), (count, None), "{engine}");
        }
        serving.stop();
        let serving = start();
        let rest = (keys / 2..keys).map(delete);
        assert_eq!(ask_all(&mut serving.connect(), rest, ":1"), (keys - keys / 2, None), "{engine}");
        assert_eq!(serving.connect().ask("DBSIZE"), ":0", "{engine}");
        assert!(fill(&serving) > keys / 10 * 8, "{engine}");
        serving.stop();
        let serving = start();
        assert_eq!(serving.connect().ask("FLUSHALL"), "+OK", "{engine}");
        assert!(fill(&serving) > keys / 10 * 8, "{engine}");
        serving.stop();
    }
}

/// Neither a queue, which is always short, nor deleted keys take memory for good.
#[test]
fn deleted_data_frees_its_memory() {
    const MEMORY_BYTES: usize = 500_000;
    for engine in engines() {
        let settings = Settings { memory_bytes_max: MEMORY_BYTES, ..Settings::default() };
        let serving =
            Serving::in_new_folder(|folder| Serving::start_on(engine, folder, Limits::default(), settings, 12));
        let mut client = serving.connect();
        for element in 0..100 {
            let pair = |_| [&["RPUSH", "queue", "an element"][..], &["LPOP", "queue"][..]];
            assert_eq!(client.ask("RPUSH queue first"), ":1", "{engine}: {element}");
            let pairs = (0..100).flat_map(pair);
            pairs.clone().for_each(|command| client.send(command));
            for command in pairs {
                let told = client.reply();
                assert!(!told.starts_with('-'), "{engine}: {element}: {command:?} {told}");
            }
            assert_eq!(client.ask("LPOP queue"), "an element");
        }
        let set = |key: usize| vec!["SET".to_owned(), format!("key {key}"), "value".to_owned()];
        let (keys, told) = ask_all(&mut client, (0..).map(set), "+OK");
        assert!(
            told.is_some_and(|told| told.starts_with("-OOM command not allowed")) && keys > 1_000,
            "{engine}: {keys}"
        );
        let delete = |key: usize| vec!["DEL".to_owned(), format!("key {key}")];
        assert_eq!(ask_all(&mut client, (0..keys).map(delete), ":1"), (keys, None), "{engine}");
        assert_eq!(ask_all(&mut client, (0..keys / 10 * 8).map(set), "+OK"), (keys / 10 * 8, None), "{engine}");
        serving.stop();
    }
}

/// The keys do not come back at the next start.
#[test]
fn expired_keys_are_removed_without_a_command_that_names_them() {
    own_network();
    const KEYS: usize = 1000;
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(client.ask("SET stays 1"), "+OK");
        assert_eq!(client.ask("SET later 1 EX 1000"), "+OK");
        for key in 0..KEYS {
            assert_eq!(client.ask(&format!("SET ends-{key} value PX 1")), "+OK", "{engine}");
        }
        assert_eq!(client.ask("HSET hash a 1 b 2"), ":2");
        assert_eq!(client.ask("PEXPIRE hash 1"), ":1");
        // Each question is a turn.
        while client.ask("DBSIZE") != ":2" {}
        assert_eq!(counter(&serving, "keys_ended"), KEYS as u64 + 1, "{engine}");
        assert_eq!(client.ask("DEL hash ends-0"), ":0", "{engine}");
        assert_eq!(client.ask("MGET stays later"), "[1 1]", "{engine}");
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        assert_eq!(serving.connect().ask("DBSIZE"), ":2", "{engine}");
        serving.stop();
    }
}

/// Without any command, the store wakes up at the next expiry.
#[test]
fn expired_keys_are_removed_from_an_idle_store() {
    const KEYS: usize = 1000;
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        for key in 0..KEYS {
            client.send(&["SET", &format!("ends-{key}"), "value", "PX", "400"]);
        }
        (0..KEYS).for_each(|_| assert_eq!(client.reply(), "+OK", "{engine}"));
        assert_eq!(client.ask("SET stays 1"), "+OK");
        assert_eq!(client.ask("SET later 1 EX 1000"), "+OK");
        wait_until("all keys that expire are removed", || counter(&serving, "keys") == 2);
        assert_eq!(counter(&serving, "keys_ended"), KEYS as u64, "{engine}");
        serving.stop();
    }
}

#[test]
fn malformed_command_gets_an_error_and_ends_its_connection() {
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        client.0.get_mut().write_all(b"*1\r\n:3\r\n").unwrap();
        assert_eq!(client.reply(), "-ERR Protocol error: expected '$', got ':'", "{engine}");
        stream::expect_end(&mut client.0);
        let mut client = serving.connect();
        client.0.get_mut().write_all(b"SET inline 'a value'\r\nGET inline\r\n\r\nHELLO 3\r\nGET none\r\n").unwrap();
        assert_eq!((client.reply(), client.reply()), ("+OK".into(), "a value".into()), "{engine}");
        assert!(client.reply().contains("proto :3"), "{engine}");
        assert_eq!(client.reply(), "_", "{engine}");
        serving.stop();
    }
}

#[test]
fn a_store_is_opened_once_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { logs: 1, segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    let disk = Disk::open(folder.path(), options).unwrap();
    assert!(matches!(Disk::open(folder.path(), options), Err(DiskError::InUse(_))));
    drop(disk);
    assert_eq!(Disk::open(folder.path(), options).unwrap().epoch, 2);
}
