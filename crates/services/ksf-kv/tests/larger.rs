//! Stores that are larger than their memory, on both engines and a real folder: what is not in memory is read back right,
//! whatever happens meanwhile, and memory stays what it may be.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{Client, Serving, counter, engines, engines_of_effort};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_test::{Random, own_network};

const MEMORY_BYTES: usize = 1 << 20;
/// By what memory may exceed its bound: a command of each shard, and the slack of vectors.
const SLACK_BYTES: usize = 512 << 10;
const VALUE_BYTES: usize = 20_000;
/// With these the store is five times larger than its memory.
const KEYS: usize = 5 * MEMORY_BYTES / VALUE_BYTES + 10;

fn start(engine: EngineKind, folder: &Path, places: u32) -> Serving {
    let settings = Settings { memory_bytes_max: MEMORY_BYTES, ..Settings::default() };
    Serving::start_on(engine, folder, Limits::default(), settings, places)
}

fn key(number: usize) -> String {
    format!("key {number}")
}

/// A value that tells its key, and which one of that key it is.
fn value(number: usize, round: usize) -> String {
    format!("{number} {round} {}", "v".repeat(VALUE_BYTES + number % 7 * 500))
}

fn assert_bounded(serving: &Serving) {
    let used = counter(serving, "memory_bytes") as usize;
    assert!(used <= MEMORY_BYTES + SLACK_BYTES, "{used} bytes of {MEMORY_BYTES}");
}

/// The same by what it tells itself.
fn assert_says_that_it_is_bounded(client: &mut Client) {
    let info = client.ask("INFO");
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("it tells");
    assert!(used.parse::<usize>().unwrap() <= MEMORY_BYTES + SLACK_BYTES, "{used} bytes of {MEMORY_BYTES}");
}

fn fill(serving: &Serving, round: usize) {
    let mut client = serving.connect();
    for number in 0..KEYS {
        client.send(&["SET", &key(number), &value(number, round)]);
        assert_eq!(client.reply(), "+OK");
        assert_bounded(serving);
    }
}

/// Asks for all keys, some at a time in one pipeline.
fn read_all(client: &mut Client, round: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut numbers: Vec<usize> = (0..KEYS).collect();
    for at in 1..KEYS {
        numbers.swap(at, random.within(0..=at));
    }
    for some in numbers.chunks(16) {
        some.iter().for_each(|number| client.send(&["GET", &key(*number)]));
        for number in some {
            assert!(client.reply() == value(*number, round), "key {number}");
        }
    }
}

#[test]
fn every_value_is_read_back_from_a_store_five_times_larger_than_its_memory() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = start(engine, folder.path(), 12);
        fill(&serving, 1);
        assert!(counter(&serving, "values_on_disk") as usize > KEYS * 3 / 4, "{engine}");
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let mut client = serving.connect();
                scope.spawn(move || read_all(&mut client, 1, seed));
            }
        });
        assert_bounded(&serving);
        assert!(counter(&serving, "values_read") as usize > KEYS, "{engine}");
        serving.stop();
        // A start takes no more, and nothing is lost.
        let serving = start(engine, folder.path(), 12);
        assert_bounded(&serving);
        assert!(counter(&serving, "values_on_disk") as usize > KEYS * 3 / 4, "{engine}");
        read_all(&mut serving.connect(), 1, 7);
        assert_bounded(&serving);
        serving.stop();
    }
}

/// Commands that need values of several keys, and those that change them, are carried out once, with all of them.
#[test]
fn commands_on_several_keys_see_values_from_the_disk() {
    for engine in engines() {
        let serving = Serving::in_new_folder(|folder| start(engine, folder, 12));
        fill(&serving, 1);
        let mut client = serving.connect();
        // Long ago let go of.
        client.send(&["MGET", &key(0), "no key", &key(1), &key(0), &key(2)]);
        let wanted = format!("[{} nil {} {} {}]", value(0, 1), value(1, 1), value(0, 1), value(2, 1));
        assert!(client.reply() == wanted, "{engine}");
        client.send(&["APPEND", &key(3), "end"]);
        assert_eq!(client.reply(), format!(":{}", value(3, 1).len() + 3));
        client.send(&["STRLEN", &key(4)]);
        client.send(&["GETRANGE", &key(4), "0", "2"]);
        client.send(&["GETRANGE", &key(3), "-4", "-1"]);
        client.send(&["SET", &key(5), "short", "GET"]);
        client.send(&["GET", &key(5)]);
        client.send(&["INCR", &key(6)]);
        client.send(&["EXPIRE", &key(7), "1000"]);
        client.send(&["RENAME", &key(8), "other name"]);
        client.send(&["GETDEL", "other name"]);
        client.send(&["OBJECT", "ENCODING", &key(9)]);
        assert_eq!(client.reply(), format!(":{}", value(4, 1).len()));
        assert_eq!((client.reply(), client.reply()), (value(4, 1)[..3].to_owned(), "vend".to_owned()));
        assert!(client.reply() == value(5, 1));
        assert_eq!(client.reply(), "short");
        assert_eq!(client.reply(), "-ERR value is not an integer or out of range");
        assert_eq!((client.reply(), client.reply()), (":1".to_owned(), "+OK".to_owned()));
        assert!(client.reply() == value(8, 1));
        assert_eq!(client.reply(), "raw");
        // A transaction finds all of its values, and appends once.
        client.send(&["WATCH", &key(10)]);
        client.send(&["MULTI"]);
        client.send(&["APPEND", &key(10), "one"]);
        client.send(&["GETRANGE", &key(11), "0", "1"]);
        client.send(&["APPEND", &key(12), "two"]);
        client.send(&["GET", &key(13)]);
        client.send(&["EXEC"]);
        (0..2).for_each(|_| assert_eq!(client.reply(), "+OK"));
        (0..4).for_each(|_| assert_eq!(client.reply(), "+QUEUED"));
        let lengths = [value(10, 1).len() + 3, value(12, 1).len() + 3];
        let wanted = format!("[:{} 11 :{} {}]", lengths[0], lengths[1], value(13, 1));
        assert!(client.reply() == wanted, "{engine}");
        client.send(&["STRLEN", &key(10)]);
        client.send(&["DEL", &key(14)]);
        client.send(&["EXISTS", &key(14), &key(15)]);
        assert_eq!(client.reply(), format!(":{}", lengths[0]));
        assert_eq!((client.reply(), client.reply()), (":1".to_owned(), ":1".to_owned()));
        assert_bounded(&serving);
        serving.stop();
    }
}

/// Readers see no value older than what was acknowledged before they asked, and none that was never written, while values are
/// overwritten, let go of, and moved by the cleaner.
#[test]
fn overwriting_and_cleaning_while_values_are_read() {
    own_network();
    const ROUNDS: usize = 6;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = start(engine, folder.path(), 10);
        fill(&serving, 0);
        let acknowledged: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
        let is_over = AtomicBool::new(false);
        let (acknowledged, is_over) = (&acknowledged, &is_over);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2)
                .map(|half| {
                    let mut client = serving.connect();
                    scope.spawn(move || {
                        for round in 1..=ROUNDS {
                            for number in (half..KEYS).step_by(2) {
                                client.send(&["SET", &key(number), &value(number, round)]);
                                assert_eq!(client.reply(), "+OK", "{engine}");
                                acknowledged[number].store(round as u64, Ordering::SeqCst);
                                assert_says_that_it_is_bounded(&mut client);
                            }
                        }
                    })
                })
                .collect();
            for seed in 0..3 {
                let mut client = serving.connect();
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    while !is_over.load(Ordering::SeqCst) {
                        let numbers: Vec<usize> = (0..8).map(|_| random.within(0..=KEYS - 1)).collect();
                        let before: Vec<u64> =
                            numbers.iter().map(|number| acknowledged[*number].load(Ordering::SeqCst)).collect();
                        numbers.iter().for_each(|number| client.send(&["GET", &key(*number)]));
                        for (number, before) in numbers.into_iter().zip(before) {
                            let seen = client.reply();
                            let round: usize = seen.split(' ').nth(1).unwrap().parse().unwrap();
                            assert!(round as u64 >= before, "{engine}: key {number} is of round {round}, not {before}");
                            assert!(seen == value(number, round), "{engine}: key {number}");
                        }
                    }
                });
            }
            let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            is_over.store(true, Ordering::SeqCst);
            assert!(ended.iter().all(Result::is_ok), "{engine}");
        });
        assert!(counter(&serving, "segments_cleaned") > 5, "{engine}: {}", counter(&serving, "segments_cleaned"));
        assert!(counter(&serving, "values_read") > 50, "{engine}: {}", counter(&serving, "values_read"));
        assert_eq!(counter(&serving, "values_damaged"), 0);
        read_all(&mut serving.connect(), ROUNDS, 3);
        serving.stop();
        let serving = start(engine, folder.path(), 10);
        read_all(&mut serving.connect(), ROUNDS, 4);
        serving.stop();
    }
}

/// Commands that need more at once than a shard reads at a time wait for each other, and none of them for ever.
#[test]
fn commands_wait_for_room_for_what_is_read_for_them() {
    const LONG_BYTES: usize = 900_000;
    const LONG_KEYS: usize = 20;
    let long = |number: usize| format!("{number} {}", "v".repeat(LONG_BYTES));
    for engine in engines() {
        let settings = Settings { memory_bytes_max: MEMORY_BYTES, ..Settings::default() };
        let limits = Limits { message_bytes_max: 8 << 20, connection_bytes_max: 32 << 20, ..Limits::default() };
        let serving = Serving::in_new_folder(|folder| Serving::start_on(engine, folder, limits, settings, 32));
        let mut client = serving.connect();
        for number in 0..LONG_KEYS {
            client.send(&["SET", &key(number), &long(number)]);
            assert_eq!(client.reply(), "+OK", "{engine}");
        }
        let names: Vec<String> = (0..LONG_KEYS).map(key).collect();
        let mut all = vec!["MGET"];
        all.extend(names.iter().map(String::as_str));
        let wanted = format!("[{}]", (0..LONG_KEYS).map(long).collect::<Vec<_>>().join(" "));
        let (all, wanted, long) = (&all, &wanted, &long);
        std::thread::scope(|scope| {
            for number in 0..6 {
                let mut client = serving.connect();
                scope.spawn(move || {
                    for round in 0..3 {
                        if number % 2 == 0 {
                            client.send(all);
                            assert!(client.reply() == *wanted, "{engine}, {number}: round {round}");
                        } else {
                            let one = (number + round) % LONG_KEYS;
                            client.send(&["GET", &key(one)]);
                            client.send(&["SET", "other", "value"]);
                            assert!(client.reply() == long(one), "{engine}, {number}: round {round}");
                            assert_eq!(client.reply(), "+OK");
                        }
                    }
                });
            }
        });
        serving.stop();
    }
}

/// With a server that has room for one operation on files at a time: neither writes nor reads are lost for it.
#[test]
fn values_are_read_though_files_have_little_room() {
    for engine in engines() {
        let settings = Settings { memory_bytes_max: MEMORY_BYTES, ..Settings::default() };
        let limits = Limits { file_ops_max: 1, file_bytes_max: 64 << 10, ..Limits::default() };
        let serving = Serving::in_new_folder(|folder| Serving::start_on(engine, folder, limits, settings, 12));
        fill(&serving, 1);
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let mut client = serving.connect();
                scope.spawn(move || read_all(&mut client, 1, seed));
            }
            let mut client = serving.connect();
            scope.spawn(move || {
                for number in 0..KEYS {
                    client.send(&["SET", &format!("other {}", number % 20), &value(number, 2)]);
                    assert_eq!(client.reply(), "+OK", "{engine}");
                }
            });
        });
        assert!(counter(&serving, "values_read") as usize > KEYS, "{engine}");
        serving.stop();
    }
}

/// The place in a log where the value of this key lies: behind the key.
fn find(folder: &Path, key: &str, value: &str) -> (std::path::PathBuf, u64) {
    for log in 0.. {
        let path = folder.join(format!("log-{log:03}"));
        let bytes = std::fs::read(&path).expect("it is in one of the logs");
        let front = format!("{key}{}", &value[..200]);
        if let Some(at) = bytes.windows(front.len()).position(|bytes| bytes == front.as_bytes()) {
            return (path, (at + key.len()) as u64);
        }
    }
    unreachable!("there are logs without end")
}

#[test]
fn a_damaged_value_is_an_error_that_says_where_it_is_and_is_not_served() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = start(engine, folder.path(), 12);
        fill(&serving, 1);
        let (path, at) = find(folder.path(), &key(0), &value(0, 1));
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"X", at + 5_000).unwrap();
        file.sync_all().unwrap();
        let mut client = serving.connect();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        for _ in 0..2 {
            client.send(&["GET", &key(0)]);
            let told = client.reply();
            let (front, _) = told.split_at(told.len().min(200));
            assert!(told.starts_with(&format!("-ERR a value in {name} at byte ")), "{engine}: {front}");
            assert!(told.ends_with("cannot be read: the checksum of the data is wrong"), "{engine}: {front}");
        }
        client.send(&["MGET", &key(1), &key(0)]);
        client.send(&["APPEND", &key(0), "x"]);
        (0..2).for_each(|_| assert!(client.reply().starts_with("-ERR a value in ")));
        // What needs no value of it goes on, and so does everything else.
        client.send(&["STRLEN", &key(0)]);
        client.send(&["GET", &key(1)]);
        client.send(&["SET", &key(0), "new"]);
        client.send(&["GET", &key(0)]);
        assert_eq!(client.reply(), format!(":{}", value(0, 1).len()));
        assert!(client.reply() == value(1, 1));
        assert_eq!((client.reply(), client.reply()), ("+OK".to_owned(), "new".to_owned()));
        assert_eq!(counter(&serving, "values_damaged"), 4, "{engine}");
        serving.stop();
    }
}

/// Keys must be in memory: when they have no room, what would bring more is refused before it is logged, and the rest goes on.
#[test]
fn keys_without_room_are_refused_and_reads_and_deletes_go_on() {
    own_network();
    let refused = "-OOM command not allowed when used memory > 'maxmemory'.";
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let serving = start(engine, folder.path(), 12);
        let mut client = serving.connect();
        let (mut keys, mut told) = (0, String::new());
        while told != refused {
            (0..64)
                .for_each(|at| client.send(&["SET", &format!("a rather long name of a key {}", keys + at), "value"]));
            for _ in 0..64 {
                told = client.reply();
                assert!(told == "+OK" || told == refused, "{engine}: {told}");
                keys += usize::from(told == "+OK");
            }
            assert_bounded(&serving);
        }
        assert!(keys > 1_000, "{engine}: {keys}");
        assert_eq!(client.ask("DBSIZE"), format!(":{keys}"));
        client.send(&["GET", "a rather long name of a key 7"]);
        client.send(&["DEL", "a rather long name of a key 7"]);
        client.send(&["HSET", "hash", "field", "value"]);
        client.send(&["MULTI"]);
        client.send(&["SET", "another one", "value"]);
        client.send(&["EXEC"]);
        assert_eq!((client.reply(), client.reply()), ("value".to_owned(), ":1".to_owned()));
        assert_eq!(client.reply(), refused);
        assert_eq!((client.reply(), client.reply()), ("+OK".to_owned(), "+QUEUED".to_owned()));
        assert_eq!(client.reply(), refused);
        let told = client.ask("CONFIG GET maxmemory");
        assert_eq!(told, format!("[maxmemory {MEMORY_BYTES}]"));
        assert!(client.ask("MEMORY USAGE hash").starts_with("nil"));
        assert_eq!(client.ask("FLUSHALL"), "+OK");
        // It waits until the memory of the keys was given back.
        assert_eq!(client.ask("SET new value"), "+OK", "{engine}");
        let used: usize = client.ask("MEMORY USAGE new").trim_start_matches(':').parse().unwrap();
        assert!((8..100).contains(&used), "{used}");
        assert_bounded(&serving);
        serving.stop();
        let serving = start(engine, folder.path(), 12);
        assert_eq!(serving.connect().ask("DBSIZE"), ":1", "{engine}");
        serving.stop();
    }
}

/// A dump needs no memory for values, and has all of them.
#[test]
fn a_store_larger_than_its_memory_is_dumped() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let serving = start(EngineKind::Epoll, folder.path(), 12);
    fill(&serving, 1);
    serving.stop();
    let mut dumped = Vec::new();
    assert_eq!(ksf_kv::offline::dump(folder.path(), 0, &mut dumped).unwrap(), KEYS as u64);
    let text = String::from_utf8(dumped).unwrap();
    assert!((0..KEYS).all(|number| text.contains(&value(number, 1))));
    assert_eq!(ksf_kv::offline::check(folder.path()).unwrap().keys, KEYS);
}
