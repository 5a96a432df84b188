//! Commands on keys of any type: cursor scans, renames, copies, flushes; and rarely used commands on strings.

use std::collections::BTreeMap;

use crate::common::{Client, Compared, Serving, assert_the_same_after_starts, engines, engines_of_effort};
use ksf::engine::EngineKind;
use ksf_test::{Random, own_network};

/// Commands to which this server and Redis return the same replies.
pub(crate) const SAME_AS_REDIS: &[&str] = &[
    // Renames.
    "SET text Hello",
    "RENAME text text",
    "RENAMENX text text",
    "RENAME none other",
    "RENAME none none",
    "RENAMENX none other",
    "RENAME text renamed",
    "GET renamed",
    "EXISTS text",
    "SET text again PXAT 4000000000000",
    "RENAMENX text renamed",
    "RENAMENX text new",
    "PEXPIRETIME new",
    "RENAME renamed new",
    "PEXPIRETIME new",
    "GET new",
    "RENAME new",
    "HSET hash a 1 b 2 c 3",
    "PEXPIREAT hash 4000000000000",
    "RENAME hash hash2",
    "HGETALL hash2",
    "HLEN hash2",
    "PEXPIRETIME hash2",
    "HGETALL hash",
    "HSET hash d 4",
    "RENAME hash2 hash",
    "HGETALL hash",
    "PEXPIRETIME hash",
    "HDEL hash a b c",
    "EXISTS hash hash2",
    "RPUSH list a b c d",
    "LPOP list",
    "LPUSH list z",
    "RENAME list list2",
    "LRANGE list2 0 -1",
    "RPUSH list2 y",
    "LPUSH list2 x",
    "LINDEX list2 0",
    "LLEN list2",
    "RENAME list2 new",
    "TYPE new",
    "LRANGE new 0 -1",
    "SADD set 1 2 3",
    "RENAME set new",
    "SMEMBERS new",
    "ZADD scored 3 a 1 b 2 c",
    "RENAME scored new",
    "ZRANGE new 0 -1 WITHSCORES",
    "ZADD new 9 b",
    "ZRANGE new 0 -1 WITHSCORES",
    "SET new string",
    "RENAME new scored",
    "GET scored",
    "DEL scored",
    // Copies.
    "COPY none other",
    "COPY none none",
    "SET text Hello PXAT 4000000000000",
    "COPY text text",
    "COPY text other",
    "COPY text other",
    "GET other",
    "PEXPIRETIME other",
    "SET text World",
    "COPY text other REPLACE",
    "GET other",
    "PEXPIRETIME other",
    "COPY text third DB 0",
    "COPY text third DB 1",
    "COPY text third DB x",
    "COPY text third DB 3000000000",
    "COPY text third DB -9223372036854775808",
    "EXPIREAT text 9223372036854775807",
    "PEXPIREAT text 9223372036854775807",
    "TTL text",
    "EXPIRETIME text",
    "PEXPIRETIME text",
    "PEXPIREAT text 4000000000000",
    "COPY text third DB",
    "COPY text third NONSENSE",
    "COPY text third REPLACE DB 0 REPLACE",
    "HSET hash a 1 b 2",
    "COPY hash text",
    "COPY hash text REPLACE",
    "HSET hash a 3",
    "HGETALL text",
    "HGETALL hash",
    "RPUSH list a b",
    "COPY list list2",
    "LPUSH list2 z",
    "LRANGE list 0 -1",
    "LRANGE list2 0 -1",
    "ZADD scored 2 a 1 b",
    "PEXPIREAT scored 4000000000000",
    "COPY scored scored2",
    "ZRANGE scored2 0 -1 WITHSCORES",
    "PEXPIRETIME scored2",
    "SADD set 1 2",
    "COPY set set2",
    "SREM set 1 2",
    "SMEMBERS set2",
    "SELECT x",
    "SELECT 3000000000",
    // In transactions, and with watched keys.
    "SET a 1",
    "MULTI",
    "RENAME a b",
    "GET a",
    "GET b",
    "COPY b c",
    "INCR c",
    "RENAME none d",
    "RENAME c b",
    "HSET tx f 1",
    "RENAME tx ty",
    "HSET ty g 2",
    "HGETALL ty",
    "COPY ty tz",
    "RENAMENX ty tz",
    "EXEC",
    "MGET a b c",
    "HGETALL tz",
    "EXISTS tx ty tz",
    "WATCH b",
    "COPY b c REPLACE",
    "MULTI",
    "GET c",
    "EXEC",
    "WATCH b c",
    "COPY b c REPLACE",
    "MULTI",
    "GET c",
    "EXEC",
    "WATCH b",
    "RENAME b c",
    "MULTI",
    "GET c",
    "EXEC",
    "WATCH b",
    "RENAME c b",
    "MULTI",
    "GET b",
    "EXEC",
    "WATCH tz",
    "COPY hash tz REPLACE",
    "MULTI",
    "EXEC",
    // Cursor scans that end after one step.
    "SCAN",
    "SCAN x",
    "SCAN 0 MATCH tz COUNT 1000",
    "SCAN 0 COUNT 1000 TYPE zset MATCH scored",
    "SCAN 0 COUNT 1000 TYPE ZSET MATCH scored",
    "SCAN 0 COUNT 1000 TYPE nonsense",
    "SCAN -1 COUNT 1000 MATCH nothing",
    "SCAN 0 COUNT 0",
    "SCAN 0 COUNT x",
    "SCAN 0 COUNT",
    "SCAN 0 MATCH",
    "SCAN 0 NONSENSE 1",
    "HSCAN none 0 NONSENSE",
    "HSCAN none x",
    "HSCAN list 0 NONSENSE",
    "HSCAN hash 0",
    "HSCAN hash 7 COUNT 1",
    "HSCAN hash 0 MATCH [b] COUNT 5",
    "HSCAN hash 0 TYPE hash",
    "HSCAN hash 0 COUNT",
    "SSCAN set2 0",
    "SSCAN set2 0 MATCH [2]",
    "SSCAN hash 0",
    "ZSCAN scored 0",
    "ZSCAN scored 0 MATCH a",
    "RANDOMKEY x",
    // Floating-point numbers.
    "SET f 10.50",
    "INCRBYFLOAT f 0.1",
    "INCRBYFLOAT f -5",
    "SET f 5.0e3 PXAT 4000000000000",
    "INCRBYFLOAT f 2.0e2",
    "PEXPIRETIME f",
    "INCRBYFLOAT f x",
    "INCRBYFLOAT f inf",
    "INCRBYFLOAT f nan",
    "INCRBYFLOAT hash x",
    "INCRBYFLOAT f -inf",
    "INCRBYFLOAT f 1e5000",
    "INCRBYFLOAT f 1e4000",
    "INCRBYFLOAT f -1e4000",
    "INCRBYFLOAT f 1e-5000",
    "INCRBYFLOAT f 1e-4000",
    "HINCRBYFLOAT hash n 0.1",
    "HINCRBYFLOAT hash n 0.2",
    "HINCRBYFLOAT hash n inf",
    "HINCRBYFLOAT hash n x",
    "HDEL hash n",
    "INCRBYFLOAT newf 3",
    "INCRBYFLOAT newf",
    "SET f words",
    "INCRBYFLOAT f 1",
    // Bits.
    "SETBIT bits 7 1",
    "SETBIT bits 7 1",
    "SETBIT bits 17 1",
    "SETBIT bits 17 0",
    "STRLEN bits",
    "SETBIT zeros 20 0",
    "STRLEN zeros",
    "SETBIT bits 7 2",
    "SETBIT bits 7 x",
    "SETBIT bits -1 1",
    "SETBIT bits x 1",
    "SETBIT bits 4294967296 1",
    "SETBIT hash 1 1",
    "GETBIT bits 7",
    "GETBIT bits 6",
    "GETBIT bits 700",
    "GETBIT none 7",
    "GETBIT none x",
    "GETBIT hash 1",
    "SET num 12345",
    "BITCOUNT num",
    "BITCOUNT none",
    "BITCOUNT none x y z",
    "BITCOUNT num 1 1",
    "BITCOUNT num 1 -2",
    "BITCOUNT num -1 -2",
    "BITCOUNT num 4 1",
    "BITCOUNT num 0 100",
    "BITCOUNT num 100 200",
    "BITCOUNT num -100 0",
    "BITCOUNT num 0",
    "BITCOUNT num 0 1 NONSENSE",
    "BITCOUNT num 0 x",
    "BITCOUNT num 5 30 BIT",
    "BITCOUNT num 0 -1 bit",
    "BITCOUNT num -3 -2 BIT",
    "BITCOUNT num 1 -1 BYTE",
    "BITCOUNT num 0 1 BIT x",
    "BITCOUNT hash",
    // The longest common subsequence.
    "MSET one ohmytext two mynewtext",
    "LCS one two",
    "LCS one two LEN",
    "LCS one two IDX",
    "LCS one two IDX MINMATCHLEN 4",
    "LCS one two IDX MINMATCHLEN 4 WITHMATCHLEN",
    "LCS one two IDX MINMATCHLEN -4 WITHMATCHLEN",
    "LCS one two IDX MINMATCHLEN 9223372036854775807",
    "LCS one two IDX MINMATCHLEN -9223372036854775808",
    "LCS one two IDX LEN",
    "LCS one two MINMATCHLEN",
    "LCS one two MINMATCHLEN x",
    "LCS one two NONSENSE",
    "LCS one none",
    "LCS one none IDX",
    "LCS one hash NONSENSE",
    "LCS one",
    "MSET one aababbabba two babaabbbaab",
    "LCS one two IDX WITHMATCHLEN",
    "LCS two one IDX WITHMATCHLEN",
    "LCS two two IDX WITHMATCHLEN",
    // Objects.
    "OBJECT",
    "OBJECT HELP",
    "OBJECT HELP x",
    "OBJECT ENCODING",
    "OBJECT NONSENSE x",
    "OBJECT ENCODING none",
    "OBJECT IDLETIME none",
    "OBJECT FREQ none",
    "OBJECT FREQ one",
    "OBJECT REFCOUNT one",
    "OBJECT ENCODING one",
    "OBJECT ENCODING num",
    "SET raw xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "OBJECT ENCODING raw",
    "OBJECT ENCODING hash",
    "HSET hash long xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "OBJECT ENCODING hash",
    "OBJECT ENCODING list",
    "OBJECT ENCODING set2",
    "SADD set2 x",
    "OBJECT ENCODING set2",
    "OBJECT ENCODING scored",
    // Expiry times.
    "SET num 1",
    "EXPIRE num 100 NX XX",
    "EXPIRE num 100 NX GT",
    "EXPIRE num 100 LT NX",
    "EXPIRE num 100 GT LT",
    "EXPIRE num 100 NONSENSE",
    "EXPIRE num x NONSENSE",
    "EXPIRE num x",
    "EXPIRE num 100 XX GT",
    "EXPIRE num 100 XX LT",
    "EXPIREAT num 4000000000 NX NX",
    "EXPIREAT num 4000000001 NX",
    "EXPIREAT num 4000000001 XX GT",
    "EXPIREAT num 4000000000 XX GT",
    "EXPIREAT num 4000000000 XX LT",
    "EXPIRETIME num",
    "EXPIRE none 9223372036854775807",
    "EXPIRE num -9223372036854775808",
    "PEXPIREAT num 9223372036854775807",
    "PEXPIREAT num -5 GT",
    "PEXPIREAT num -5 LT",
    "EXISTS num",
    "GETEX one PX 5 EX 5",
    "GETEX one PERSIST 5",
    "GETEX one EX x",
    "GETEX one EX 9223372036854775807",
    // All keys at once.
    "DBSIZE",
    "WATCH text",
    "FLUSHALL NONSENSE",
    "FLUSHALL ASYNC SYNC",
    "FLUSHDB x",
    "FLUSHALL",
    "MULTI",
    "GET text",
    "EXEC",
    "DBSIZE",
    "GET text",
    "HGETALL hash",
    "HSET hash new 1",
    "HGETALL hash",
    "SET text again",
    "FLUSHDB SYNC",
    "EXISTS hash text",
    "WATCH none",
    "FLUSHDB ASYNC",
    "MULTI",
    "SET text 1",
    "RPUSH list a",
    "EXEC",
    "flushall async",
    "SADD set a",
    "SMEMBERS set",
    // Positions of the keys in a command.
    "COMMAND GETKEYS OBJECT HELP",
    "COMMAND GETKEYS OBJECT ENCODING k",
    "COMMAND GETKEYS COPY a b REPLACE",
    "COMMAND GETKEYS RENAME a b",
    "COMMAND GETKEYS LCS a b IDX",
    "COMMAND GETKEYS SCAN 0",
];

#[test]
fn keys_are_answered_for_as_redis_does() {
    let Some(mut both) = Compared::start() else { return };
    for version in ["2", "3"] {
        both.ask(&format!("HELLO {version}"));
        both.assert_same(SAME_AS_REDIS);
        let [ours, theirs] = both.ask("KEYS *").map(|reply| reply.split(' ').count());
        assert_eq!(ours, theirs, "RESP{version}");
        both.assert_same(&["FLUSHALL", "DBSIZE", "RANDOMKEY", "SCAN 0"]);
    }
    both.serving.stop();
}

/// Redis computes sums with more bits than a double has, and the store computes as Redis does.
#[test]
fn sums_are_those_of_redis() {
    let Some(mut both) = Compared::start() else { return };
    let mut random = Random::of_test(3);
    let mut number = || {
        let (digits, sign) = (random.within(0..=18) as u32, random.pick(&["", "-"]));
        let (whole, fraction) = (random.below(10_u64.pow(digits)), random.below(10_u64.pow(18 - digits)));
        match random.below(4) {
            0 => format!("{sign}{whole}"),
            1 => format!("{sign}{whole}e{}", random.within(0..=40) as i32 - 20),
            _ => format!("{sign}{whole}.{fraction}"),
        }
    };
    for _ in 0..500 {
        // The second sum adds to a number that the first one has printed and rounded.
        for question in [
            format!("SET n {}", number()),
            format!("INCRBYFLOAT n {}", number()),
            format!("INCRBYFLOAT n {}", number()),
        ] {
            let [ours, theirs] = both.ask(&question);
            assert_eq!(ours, theirs, "{question}");
        }
    }
    both.serving.stop();
}

/// Sends one command of a cursor scan. Returns the cursor and the elements.
fn step(client: &mut Client, question: &str) -> (u64, Vec<String>) {
    let reply = client.ask(question);
    let (cursor, shown) = reply.strip_prefix('[').and_then(|rest| rest.split_once(' ')).expect("two words");
    let shown = shown.trim_matches(['[', ']']).split(' ').filter(|word| !word.is_empty());
    let (cursor, shown) = (cursor.parse().unwrap(), shown.map(str::to_owned).collect());
    assert!(cursor < 1 << 53, "some clients keep it in a double: {cursor}");
    (cursor, shown)
}

/// Scans to the end and calls `meanwhile` between the steps. Returns how often the server returned each element.
fn walk(
    client: &mut Client,
    (from, behind): (&str, &str),
    mut meanwhile: impl FnMut(&mut Client, usize),
) -> BTreeMap<String, usize> {
    let (mut cursor, mut steps, mut seen) = (0, 0, BTreeMap::new());
    loop {
        let (next, shown) = step(client, &format!("{from} {cursor} {behind}"));
        shown.into_iter().for_each(|word| *seen.entry(word).or_default() += 1);
        steps += 1;
        if next == 0 {
            assert!(steps > 10, "one step for all of it shows nothing");
            return seen;
        }
        meanwhile(client, steps);
        cursor = next;
    }
}

/// Sends all commands, then reads their replies. None of them may be an error.
fn pipeline(client: &mut Client, commands: impl IntoIterator<Item = String>) {
    let commands: Vec<String> = commands.into_iter().collect();
    for some in commands.chunks(100) {
        some.iter().for_each(|command| client.send(&command.split(' ').collect::<Vec<_>>()));
        for command in some {
            let told = client.reply();
            assert!(!told.starts_with('-'), "{command}: {told}");
        }
    }
}

const MANY: usize = 3_000;

/// Names of keys that exist throughout a scan, are deleted during it, or are created during it. They alternate in order.
fn stays(number: usize) -> String {
    format!("{number:05}-stays")
}
fn goes(number: usize) -> String {
    format!("{number:05}-goes")
}
fn comes(number: usize) -> String {
    format!("{:05}-comes-{number}", number * 7919 % MANY)
}

#[test]
fn a_walk_shows_every_key_that_is_there_all_the_time() {
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        pipeline(&mut client, (0..MANY).map(|number| format!("MSET {} v {} v", stays(number), goes(number))));
        assert_eq!(client.ask("HSET hash a 1"), ":1");
        let seen = walk(&mut client, ("SCAN", "COUNT 20"), |_, _| {});
        assert_eq!(seen.len(), 2 * MANY + 1, "{engine}");
        assert!(seen.values().all(|times| *times == 1), "{engine}: nothing changed meanwhile");
        let seen = walk(&mut client, ("SCAN", "COUNT 100 MATCH *-stays"), |_, _| {});
        assert_eq!(seen.len(), MANY, "{engine}");
        assert_eq!(step(&mut client, "SCAN 0 COUNT 100000 TYPE hash"), (0, vec!["hash".into()]), "{engine}");
        let (cursor, shown) = step(&mut client, "SCAN 0 COUNT 20");
        assert!(cursor != 0 && (20..40).contains(&shown.len()), "{engine}: {} at once", shown.len());
        // After each step the test creates keys, which split leaves, and deletes others.
        let seen = walk(&mut client, ("SCAN", "COUNT 50"), |client, step| {
            let come = (40 * step..40 * (step + 1)).map(|at| format!("SET {} v", comes(at)));
            let go = (25 * step..25 * (step + 1)).map(|at| format!("DEL {}", goes(at % MANY)));
            pipeline(client, come.chain(go));
        });
        let missing: Vec<_> = (0..MANY).map(stays).filter(|key| !seen.contains_key(key)).collect();
        assert!(missing.is_empty(), "{engine}: {missing:?}");
        serving.stop();
    }
}

#[test]
fn a_walk_through_a_key_shows_every_cell_that_is_there_all_the_time() {
    for engine in engines_of_effort() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        for (walks, add, take) in [("HSCAN", "HSET", "HDEL"), ("SSCAN", "SADD", "SREM"), ("ZSCAN", "ZADD", "ZREM")] {
            let put = |key: &str, member: &str, score: &str| match add {
                "HSET" => format!("HSET {key} {member} value"),
                "SADD" => format!("SADD {key} {member}"),
                _ => format!("ZADD {key} {score} {member}"),
            };
            // Its first and last leaf also hold the keys before and after it.
            for key in ["before", "key", "later"] {
                let members = (0..MANY).flat_map(|number| [stays(number), goes(number)]);
                pipeline(&mut client, members.map(|member| put(key, &member, "1")));
            }
            let words = if walks == "SSCAN" { 1 } else { 2 };
            let seen = walk(&mut client, (&format!("{walks} key"), "COUNT 50"), |_, _| {});
            assert_eq!(seen.len(), 2 * MANY + words - 1, "{engine}: {walks}");
            assert!(seen.values().filter(|times| **times > 1).count() < words, "{engine}: {walks}: each once");
            let seen = walk(&mut client, (&format!("{walks} key"), "COUNT 50"), |client, step| {
                pipeline(
                    client,
                    (25 * step..25 * (step + 1)).flat_map(|at| {
                        let go = format!("{take} key {}", goes(at % MANY));
                        // Members with a new score move in the order of the scores.
                        [go, put("key", &comes(at), "3"), put("key", &stays(at * 31 % MANY), "-7")]
                    }),
                );
            });
            let missing: Vec<_> = (0..MANY).map(stays).filter(|member| !seen.contains_key(member)).collect();
            assert!(missing.is_empty(), "{engine}: {walks}: {missing:?}");
            // A scan in a transaction returns the changes of the transaction.
            assert_eq!(client.ask("MULTI"), "+OK");
            client.ask(&format!("{take} key {}", stays(0)));
            client.ask(&format!("{walks} key 0 COUNT 10 MATCH *-stays"));
            let told = client.ask("EXEC");
            assert_eq!(told.matches("-stays").count(), MANY - 1, "{engine}: {walks}");
            assert!(told.starts_with("[:1 [0 ["), "{engine}: {walks}: {told:.100}");
            assert_eq!(client.ask("DEL before key later"), ":3");
        }
        serving.stop();
    }
}

/// Renames and copies of keys of each type.
const MOVED: &[&str] = &[
    "HSET h a 1 b 2 c 3",
    "PEXPIREAT h 4000000000000",
    "RENAME h hash",
    "HSET hash d 4",
    "RPUSH l a b c",
    "LPOP l",
    "RENAME l list",
    "LPUSH list z",
    "SADD s a b c",
    "SET set string",
    "RENAME s set",
    "ZADD z 3 a 1 b 2 c",
    "HSET scored old 1",
    "RENAME z scored",
    "ZADD scored 0 a",
    "SET t text PXAT 4000000000000",
    "RENAME t text",
    "COPY hash hash2",
    "HDEL hash2 a",
    "COPY list list2",
    "RPUSH list2 e",
    "COPY scored scored2",
    "ZREM scored2 c",
    "COPY text set2",
    "COPY set set2 REPLACE",
    "SADD gone a b",
    "RENAME gone back",
    "DEL back",
    "RENAME hash2 hash3",
    "RENAME hash3 hash2",
];

const LOOKED_AT: &[&str] = &[
    "DBSIZE",
    "EXISTS h l s z t gone back hash3",
    "HGETALL hash",
    "PEXPIRETIME hash",
    "LRANGE list 0 -1",
    "LINDEX list 0",
    "SMEMBERS set",
    "ZRANGE scored 0 -1 WITHSCORES",
    "GET text",
    "PEXPIRETIME text",
    "HGETALL hash2",
    "PEXPIRETIME hash2",
    "LRANGE list2 0 -1",
    "ZRANGE scored2 0 -1 WITHSCORES",
    "SMEMBERS set2",
    "PEXPIRETIME set2",
];

#[test]
fn renamed_and_copied_keys_are_there_after_every_start() {
    own_network();
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        MOVED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{engine}: {command}"));
        let was: Vec<String> = LOOKED_AT.iter().map(|question| client.ask(question)).collect();
        assert_eq!(was[..3], [":9", ":0", "[a 1 b 2 c 3 d 4]"], "{engine}");
        serving.stop();
        assert_the_same_after_starts(engine, folder.path(), LOOKED_AT, &was);
    }
}

/// A copy is one append to the log. A command whose copies do not fit into one changes nothing.
#[test]
fn a_key_that_is_longer_than_an_append_is_neither_copied_nor_renamed() {
    const FIELDS: usize = 80;
    let value = "v".repeat(15_000);
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        for field in 0..FIELDS {
            client.send(&["HSET", "hash", &field.to_string(), &value]);
            assert_eq!(client.reply(), ":1", "{engine}");
        }
        assert_eq!(client.ask("SET other text"), "+OK");
        for command in ["COPY hash copy", "COPY hash other REPLACE", "RENAME hash other", "RENAMENX hash new"] {
            let told = client.ask(command);
            assert!(told.starts_with("-ERR") && told.contains("a segment holds"), "{engine}: {command}: {told}");
        }
        // The second of two copies in a transaction fails, although each alone would fit.
        pipeline(&mut client, (40..FIELDS).map(|field| format!("HDEL hash {field}")));
        assert_eq!(client.ask("MULTI"), "+OK");
        ["COPY hash copy", "COPY hash copy2", "GET other"]
            .iter()
            .for_each(|word| assert_eq!(client.ask(word), "+QUEUED"));
        let told = client.ask("EXEC");
        assert!(told.starts_with("[:1 -ERR") && told.ends_with("text]"), "{engine}: {told}");
        assert_eq!(client.ask("EXISTS copy copy2 new"), ":1", "{engine}");
        assert_eq!((client.ask("GET other"), client.ask("HLEN hash")), ("text".into(), ":40".into()), "{engine}");
        assert_eq!(client.ask("HLEN copy"), ":40", "{engine}");
        serving.stop();
    }
}

#[test]
fn any_key_is_drawn() {
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        client.ask("MSET a 1 b 2 gone 3");
        client.ask("HSET c f 1");
        assert_eq!(client.ask("DEL gone"), ":1");
        let mut seen = BTreeMap::<String, usize>::new();
        (0..600).for_each(|_| *seen.entry(client.ask("RANDOMKEY")).or_default() += 1);
        assert_eq!(seen.keys().collect::<Vec<_>>(), ["a", "b", "c"], "{engine}: {seen:?}");
        assert!(seen.values().all(|times| *times > 100), "{engine}: {seen:?}");
        serving.stop();
    }
}

/// These commands visit all keys, some of which the transaction has locked.
#[test]
fn a_transaction_takes_no_command_that_looks_at_all_keys() {
    let serving = Serving::fresh(EngineKind::Epoll);
    let mut client = serving.connect();
    let of_all = ["SCAN 0", "RANDOMKEY", "KEYS *", "FLUSHALL", "FLUSHDB ASYNC", "INFO"];
    for command in of_all {
        assert_eq!(client.ask("MULTI"), "+OK");
        assert_eq!(client.ask(command), "-ERR Command not allowed inside a transaction", "{command}");
        assert!(client.ask("EXEC").starts_with("-EXECABORT"), "{command}");
    }
    serving.stop();
}

/// After each start the keys from before the flush are gone, those written after it exist, and the log is almost empty.
#[test]
fn a_flush_takes_all_keys_and_gives_the_room_of_the_logs_back() {
    own_network();
    let value = "v".repeat(20_000);
    for engine in engines_of_effort() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        for round in 0..6 {
            // Until the log is full.
            let mut keys = 0;
            while client.ask(&format!("SET {round}-{keys} {value}")) == "+OK" {
                keys += 1;
            }
            assert!(keys > 100, "{engine}: {keys} keys in round {round}");
            assert_eq!(client.ask("DBSIZE"), format!(":{}", keys + usize::from(round > 0)), "{engine}");
            assert_eq!(client.ask("FLUSHALL"), "+OK", "{engine}");
            assert_eq!(client.ask(&format!("EXISTS {round}-0 after")), ":0", "{engine}");
            assert_eq!(client.ask("HSET after a 1 b 2"), ":2", "{engine}");
        }
        client.ask("HDEL after a");
        serving.stop();
        let (mut dumped, mut salvaged) = (Vec::new(), Vec::new());
        assert_eq!(ksf_kv::offline::dump(folder.path(), 0, &mut dumped).unwrap(), 1, "{engine}");
        ksf_kv::offline::salvage(folder.path(), 0, &mut salvaged).unwrap();
        assert!(dumped == salvaged, "{engine}: {}", salvaged.escape_ascii());
        for start in 0..3 {
            let serving = Serving::start(engine, folder.path());
            let mut client = serving.connect();
            assert_eq!(client.ask("KEYS *"), "[after]", "{engine}, start {start}");
            assert_eq!(client.ask("HGETALL after"), "[b 2]", "{engine}, start {start}");
            serving.stop();
        }
    }
}

/// One client flushes while others write and scan on all shards. All commands end, and no client sees a part of a flush.
#[test]
fn others_see_a_flush_whole() {
    own_network();
    const ROUNDS: usize = 150;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        std::thread::scope(|scope| {
            for number in 0..4 {
                let mut client = serving.connect();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        match number {
                            0 => assert_eq!(client.ask("FLUSHALL"), "+OK"),
                            1 => {
                                let told = client.ask("MGET a b");
                                let values: Vec<&str> = told.trim_matches(['[', ']']).split(' ').collect();
                                assert!(values[0] == values[1], "{engine}: {told}");
                                walk_any(&mut client);
                            }
                            _ => {
                                let value = number * ROUNDS + round;
                                assert_eq!(client.ask(&format!("MSET a {value} b {value}")), "+OK");
                                let more = (0..20).map(|at| format!("HSET {number} {at} {round}"));
                                pipeline(&mut client, more);
                            }
                        }
                    }
                });
            }
        });
        let mut client = serving.connect();
        assert_eq!(client.ask("FLUSHALL"), "+OK", "{engine}");
        assert_eq!((client.ask("DBSIZE"), client.ask("SCAN 0")), (":0".into(), "[0 []]".into()), "{engine}");
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        assert_eq!(serving.connect().ask("DBSIZE"), ":0", "{engine}");
        serving.stop();
    }
}

/// Scans to the end and ignores the elements.
fn walk_any(client: &mut Client) {
    let mut cursor = 0;
    loop {
        (cursor, _) = step(client, &format!("SCAN {cursor} COUNT 3"));
        if cursor == 0 {
            return;
        }
    }
}
