//! The server on real sockets and a real folder, on both engines: what it answers, and that it is there after a start.

mod common;

use std::io::Write;

use common::{Client, Redis, Serving, counter, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::disk::{Disk, DiskError, DiskOptions};
use ksf_test::{own_network, stream};

/// What is asked, and what the answer is, in order.
const CONVERSATION: &[(&str, &str)] = &[
    ("PING", "+PONG"),
    ("SET greeting hello", "+OK"),
    ("GET greeting", "hello"),
    ("get nothing", "nil"),
    ("SET greeting again NX", "nil"),
    ("SET greeting again XX GET", "hello"),
    ("GETSET greeting third", "again"),
    ("APPEND greeting -part", ":10"),
    ("STRLEN greeting", ":10"),
    ("MSET a 1 b 2 c 3", "+OK"),
    ("MGET a b x c", "[1 2 nil 3]"),
    ("MSETNX c 4 d 5", ":0"),
    ("INCRBY a 41", ":42"),
    ("DECR a", ":41"),
    ("INCR greeting", "-ERR value is not an integer or out of range"),
    ("SET big 9223372036854775807", "+OK"),
    ("INCR big", "-ERR increment or decrement would overflow"),
    ("DEL b x c", ":2"),
    ("EXISTS a a b", ":2"),
    ("TTL a", ":-1"),
    ("TTL b", ":-2"),
    ("EXPIRE a 100", ":1"),
    ("EXPIRE a 50 GT", ":0"),
    ("PERSIST a", ":1"),
    ("EXPIRE a -1", ":1"),
    ("GET a", "nil"),
    ("SETEX short 100 value", "+OK"),
    ("TTL short", ":100"),
    ("SET short kept KEEPTTL", "+OK"),
    ("TTL short", ":100"),
    ("TYPE short", "+string"),
    ("DBSIZE", ":3"),
    ("KEYS *e*", "[greeting]"),
    ("SELECT 1", "-ERR DB index is out of range"),
    ("CONFIG GET append*", "[appendonly yes appendfsync always]"),
    ("SET a", "-ERR wrong number of arguments for 'set' command"),
    ("SET a b EX 0", "-ERR invalid expire time in 'set' command"),
    ("SET a b NX XX", "-ERR syntax error"),
    ("NONSENSE a b", "-ERR unknown command 'NONSENSE', with args beginning with: 'a' 'b' "),
    ("GETDEL short", "kept"),
];

/// What is asked of this server and of Redis, and answered by both in the same way.
const SAME_AS_REDIS: &[&str] = &[
    "SET text Hello-World",
    "GETRANGE text 0 4",
    "GETRANGE text -5 -1",
    "GETRANGE text -1 -5",
    "GETRANGE text 0 -100",
    "GETRANGE text 3 1",
    "GETRANGE text 5 100",
    "GETRANGE none 0 -1",
    "SUBSTR text 1 2",
    "GETRANGE text a 2",
    "SETRANGE text 6 Redis",
    "GET text",
    "SETRANGE padded 3 x",
    "STRLEN padded",
    "SETRANGE text -1 x",
    "SETRANGE text 536870911 xx",
    "TOUCH text padded none",
    "GETEX text",
    "GETEX text PXAT 4000000000000",
    "PEXPIRETIME text",
    "EXPIRETIME text",
    "GETEX text PERSIST",
    "PEXPIRETIME text",
    "EXPIRETIME none",
    "GETEX none EX 10",
    "GETEX text EX 0",
    "GETEX text EX",
    "GETEX text NONSENSE 1",
    "GETEX text PXAT 1",
    "EXISTS text",
    "GETEX",
    "EXPIREAT padded 4000000000",
    "EXPIRETIME padded",
    "SET n 5 NX",
    "INCRBY n x",
    "DECRBY n 7",
    "APPEND n 0",
    "MSET a 1 b",
    "SETEX a -1 v",
    "COMMAND GETKEYS MSET a 1 b 2",
    "COMMAND GETKEYS DEL a b",
    "COMMAND GETKEYS GET a b",
    "COMMAND GETKEYS NONSENSE a",
    // Hashes.
    "HSET h a 1 b 2 c 3",
    "HSET h a 1 d 4",
    "HSET h a",
    "HSET h a 1 b",
    "HMSET h e 5",
    "HGET h a",
    "HGET h none",
    "HGET none a",
    "HMGET h a none e",
    "HMGET none a",
    "HGETALL h",
    "HGETALL none",
    "HKEYS h",
    "HVALS h",
    "HLEN h",
    "HLEN none",
    "HEXISTS h a",
    "HEXISTS h none",
    "HSTRLEN h a",
    "HSETNX h a 9",
    "HSETNX h f 9",
    "HDEL h f none f",
    "HINCRBY h a 41",
    "HINCRBY h a x",
    "HINCRBY h a 9223372036854775807",
    "HINCRBYFLOAT h a 0.5",
    "HINCRBYFLOAT h a 3.0e3",
    "HINCRBYFLOAT h a x",
    "HINCRBY h a 1",
    "HSET h text words",
    "HINCRBYFLOAT h text 1",
    "HSCAN h 0",
    "HSCAN h 0 MATCH [bc] COUNT 100",
    "HSCAN none 0",
    "HSCAN h x",
    "HSCAN h 0 COUNT 0",
    "HRANDFIELD none",
    "HRANDFIELD none 5",
    "HSET one field value",
    "HRANDFIELD one",
    "HRANDFIELD one 5",
    "HRANDFIELD one -2",
    "HRANDFIELD one -2 WITHVALUES",
    "HRANDFIELD one 1 NONSENSE",
    "TYPE h",
    "GET h",
    "APPEND h x",
    "STRLEN h",
    "INCR h",
    "GETRANGE h 0 1",
    "SETRANGE h 0 x",
    "GETSET h x",
    "GETDEL h",
    "GETEX h",
    "SET h x GET",
    "MGET h text",
    "SETNX h x",
    "HGET n a",
    "HSET n a 1",
    "HDEL n a",
    "HGETALL n",
    "HLEN n",
    "EXPIRETIME h",
    "EXPIREAT h 4000000000",
    "EXPIRETIME h",
    "HSET h a 2",
    "EXPIRETIME h",
    "PERSIST h",
    "PERSIST h",
    "PEXPIRETIME h",
    "EXPIREAT one 4000000000",
    "HDEL one field",
    "EXISTS one",
    "HSET one again 1",
    "TTL one",
    "EXPIRE one -1",
    "HGETALL one",
    "HSET one new 2",
    "HGETALL one",
    "SET h string",
    "HGETALL h",
    "DEL h one",
    "HGETALL h",
    // Sets.
    "SADD s 1 2 3",
    "SADD s 3 4 4",
    "SCARD s",
    "SMEMBERS s",
    "SMEMBERS none",
    "SISMEMBER s 1",
    "SISMEMBER s 9",
    "SMISMEMBER s 1 9 2",
    "SMISMEMBER none 1",
    "SREM s 1 9",
    "SADD t 3 4 5",
    "SINTER s t",
    "SUNION s t",
    "SDIFF s t",
    "SDIFF none t",
    "SINTER s none",
    "SINTERSTORE u s t",
    "SMEMBERS u",
    "SUNIONSTORE u s t u",
    "SMEMBERS u",
    "SDIFFSTORE u s t",
    "SMEMBERS u",
    "SDIFFSTORE u s s",
    "EXISTS u",
    "SMOVE s t 2",
    "SMOVE s t 2",
    "SMOVE s none2 3",
    "SMEMBERS none2",
    "SMOVE text t 2",
    "SMOVE t t 5",
    "SSCAN t 0",
    "SSCAN t 0 MATCH [3]",
    "SPOP none",
    "SPOP none 2",
    "SPOP none2",
    "EXISTS none2",
    "SPOP t -1",
    "SPOP t 0",
    "SRANDMEMBER none",
    "SRANDMEMBER none 3",
    "SADD one 7",
    "SRANDMEMBER one",
    "SRANDMEMBER one 3",
    "SRANDMEMBER one -3",
    "SPOP one 3",
    "SADD s",
    "SADD text 1",
    "SINTER s text",
    "SCARD text",
    "HGET s 1",
    "TYPE s",
    "SREM s 4",
    "EXISTS s",
    // Lists.
    "RPUSH l a b c",
    "LPUSH l z y",
    "LRANGE l 0 -1",
    "LRANGE l 1 2",
    "LRANGE l -2 100",
    "LRANGE l 5 2",
    "LRANGE none 0 -1",
    "LLEN l",
    "LLEN none",
    "LINDEX l 0",
    "LINDEX l -1",
    "LINDEX l 5",
    "LINDEX l x",
    "LSET l 1 new",
    "LSET l 9 new",
    "LSET none 0 new",
    "LPUSHX none a",
    "RPUSHX l a",
    "LPUSHX l a",
    "LRANGE l 0 -1",
    "LPOS l a",
    "LPOS l a RANK 2",
    "LPOS l a RANK -1",
    "LPOS l a COUNT 0",
    "LPOS l a COUNT 2 RANK -1",
    "LPOS l a COUNT 0 MAXLEN 3",
    "LPOS l none",
    "LPOS l none COUNT 1",
    "LPOS l a RANK 0",
    "LPOS l a COUNT -1",
    "LINSERT l BEFORE b x",
    "LINSERT l AFTER a x",
    "LINSERT l AFTER none x",
    "LINSERT none AFTER a x",
    "LINSERT l BESIDE a x",
    "LRANGE l 0 -1",
    "LREM l 2 a",
    "LREM l -1 x",
    "LREM l 0 none",
    "LRANGE l 0 -1",
    "LPOP l",
    "RPOP l",
    "LPOP l 0",
    "LPOP l 2",
    "RPOP l 9",
    "LPOP l",
    "LPOP l 2",
    "LPOP l -1",
    "EXISTS l",
    "RPUSH l 1 2 3 4 5 6",
    "LTRIM l 1 -2",
    "LRANGE l 0 -1",
    "RPOPLPUSH l m",
    "RPOPLPUSH none m",
    "LMOVE l m LEFT RIGHT",
    "LMOVE l l LEFT RIGHT",
    "LMOVE l l UP RIGHT",
    "LRANGE l 0 -1",
    "LRANGE m 0 -1",
    "LMOVE l text LEFT LEFT",
    "RPUSH text x",
    "LRANGE text 0 -1",
    "SADD l x",
    "TYPE l",
    "RPUSH single x",
    "PEXPIREAT single 4000000000000",
    "RPOPLPUSH single single",
    "PEXPIRETIME single",
    "LTRIM l 5 9",
    "EXISTS l",
    // Sorted sets.
    "ZADD z 1 a 2 b 3 c",
    "ZADD z 1 a 2.5 b 4 d",
    "ZADD z CH 1 a 2 b",
    "ZADD z NX 9 a 5 e",
    "ZADD z XX 6 e 7 f",
    "ZADD z GT CH 5 e 9 d",
    "ZADD z LT CH 7 e 8 d",
    "ZADD z INCR 0.5 a",
    "ZADD z NX INCR 1 a",
    "ZADD z NX XX 1 a",
    "ZADD z NX GT 1 a",
    "ZADD z INCR 1 a 2 b",
    "ZADD z x a",
    "ZADD z 1",
    "ZADD z NX 1",
    "ZADD text 1 a",
    "ZCARD z",
    "ZCARD none",
    "ZSCORE z a",
    "ZSCORE z none",
    "ZSCORE none a",
    "ZMSCORE z a none b",
    "ZINCRBY z 10 a",
    "ZINCRBY z x a",
    "ZINCRBY z -inf neg",
    "ZINCRBY z inf neg",
    "ZADD z inf top",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZRANGE z 0 1",
    "ZRANGE z 0 1 REV",
    "ZRANGE z -2 -1",
    "ZRANGE z 5 1",
    "ZRANGE none 0 -1",
    "ZRANGE z 1 (8 BYSCORE",
    "ZRANGE z 8 1 BYSCORE REV WITHSCORES",
    "ZRANGE z -inf +inf BYSCORE LIMIT 1 2",
    "ZRANGE z -inf +inf BYSCORE LIMIT 1 -1",
    "ZRANGE z 0 1 LIMIT 0 1",
    "ZRANGE z a b BYSCORE",
    "ZRANGE z 0 1 NONSENSE",
    "ZREVRANGE z 0 1 WITHSCORES",
    "ZRANGEBYSCORE z (2 8 WITHSCORES",
    "ZRANGEBYSCORE z (2 8 LIMIT 1 1",
    "ZREVRANGEBYSCORE z 8 (2",
    "ZCOUNT z 2 8",
    "ZCOUNT z (2 8",
    "ZCOUNT z x 8",
    "ZRANK z b",
    "ZREVRANK z b",
    "ZRANK z none",
    "ZRANK none a",
    "ZSCAN z 0",
    "ZSCAN z 0 MATCH [ab]",
    "ZREM z b none",
    "ZPOPMIN z",
    "ZPOPMAX z 2",
    "ZPOPMIN none",
    "ZPOPMIN none 2",
    "ZPOPMIN z 0",
    "ZPOPMIN z -1",
    "ZADD z 1 l 2 m 3 n 4 o 5 p",
    "ZADD z -1 neg1 -2.5 neg2 0 zero -0 minuszero",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZREMRANGEBYSCORE z -2 (1",
    "ZREMRANGEBYRANK z 0 1",
    "ZREMRANGEBYRANK z -1 -1",
    "ZRANGE z 0 -1 WITHSCORES",
    "TYPE z",
    "HGET z a",
    "ZREMRANGEBYRANK z 0 -1",
    "EXISTS z",
    "MULTI",
    "ZADD z 1 a 2 b",
    "ZINCRBY z 5 a",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZRANGEBYSCORE z 2 5",
    "EXEC",
    "ZRANGE z 0 -1 WITHSCORES",
    // Transactions.
    "EXEC",
    "DISCARD",
    "MULTI",
    "MULTI",
    "SET tx 1",
    "INCR tx",
    "HSET tx a 1",
    "HSET txh a 1 b 2",
    "HDEL txh a",
    "HGETALL txh",
    "HLEN txh",
    "RPUSH txl a b c",
    "LPOP txl",
    "RPOPLPUSH txl txl",
    "LRANGE txl 0 -1",
    "SADD txs 1 2 3",
    "SREM txs 2",
    "SMEMBERS txs",
    "DEL txs",
    "SADD txs 7",
    "SMEMBERS txs",
    "PEXPIREAT txs 4000000000000",
    "PEXPIRETIME txs",
    "GET tx",
    "GET none",
    "WATCH tx",
    "PING",
    "EXEC",
    "GET tx",
    "HGETALL txh",
    "LRANGE txl 0 -1",
    "SMEMBERS txs",
    "PEXPIRETIME txs",
    "MULTI",
    "EXEC",
    "MULTI",
    "SET tx 5",
    "DISCARD",
    "GET tx",
    "MULTI",
    "SET tx 6",
    "NONSENSE",
    "SET",
    "EXEC",
    "GET tx",
    "WATCH tx txh none",
    "MULTI",
    "SET tx 7",
    "EXEC",
    "WATCH tx",
    "SET tx 8",
    "MULTI",
    "SET tx 9",
    "EXEC",
    "GET tx",
    "WATCH txh",
    "HSET txh c 3",
    "MULTI",
    "EXEC",
    "WATCH none",
    "SADD none a",
    "MULTI",
    "EXEC",
    "DEL none",
    "WATCH tx",
    "SET tx 10",
    "UNWATCH",
    "MULTI",
    "GET tx",
    "EXEC",
];

#[test]
fn it_answers_what_redis_answers() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let peer = &mut redis.client;
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    for version in ["2", "3"] {
        client.ask(&format!("HELLO {version}"));
        peer.ask(&format!("HELLO {version}"));
        for question in SAME_AS_REDIS {
            assert_eq!(client.ask(question), peer.ask(question), "RESP{version}: {question}");
        }
        for key in peer.ask("KEYS *").trim_matches(['[', ']']).split(' ') {
            assert_eq!(client.ask(&format!("DEL {key}")), ":1", "RESP{version}: {key}");
            peer.ask(&format!("DEL {key}"));
        }
        assert_eq!(client.ask("DBSIZE"), ":0", "RESP{version}");
    }
    serving.stop();
}

#[test]
fn it_answers_as_redis_does_and_remembers() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        for (question, answer) in CONVERSATION {
            let answered = client.ask(question);
            assert_eq!(answered, answer.trim_end(), "{engine}: {question}");
        }
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(
            client.ask("MGET greeting a b big short"),
            "[third-part nil nil 9223372036854775807 nil]",
            "{engine}"
        );
        assert_eq!(client.ask("DBSIZE"), ":2", "{engine}");
        serving.stop();
    }
}

/// What one connection wrote, another one on any shard sees, and everything acknowledged is there after a start.
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

/// Others see a transaction whole, also while both halves of it are written on all shards, and nobody waits for ever.
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

/// What is in the keys of [`FILLED`], asked again after a start.
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

/// Keys with cells are what they were, also when the server starts twice and the segments were cleaned in between.
#[test]
fn cells_are_there_after_every_start() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        FILLED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{engine}: {command}"));
        let was: Vec<String> = LOOKED_AT.iter().map(|question| client.ask(question)).collect();
        serving.stop();
        for start in 0..3 {
            let serving = Serving::start(engine, folder.path());
            let mut client = serving.connect();
            for (question, was) in LOOKED_AT.iter().zip(&was) {
                assert_eq!(&client.ask(question), was, "{engine}, start {start}: {question}");
            }
            serving.stop();
        }
    }
}

#[test]
fn a_dump_and_what_is_salvaged_make_the_same_keys_again() {
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

/// A hash that no command of the server's limit could make at once.
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

/// Fields that are overwritten for ever stay within the logs, and none of a key that was deleted comes back.
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

/// Overwriting for ever takes no more than the logs have, and nobody is told that they are full.
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
                        // Some pass the others by: what waits for room must not lose its place.
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
    own_network();
    let value = "v".repeat(20_000);
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
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
        // No memory is taken for what the log could never take.
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

/// Nobody asks for them again: they are found, taken out, and stay so at the next start.
#[test]
fn keys_that_have_ended_are_taken_out_though_nobody_names_them() {
    own_network();
    const KEYS: usize = 1000;
    for engine in engines() {
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

#[test]
fn malformed_commands_are_told_and_end_the_connection() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
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
    let options = DiskOptions { logs: 1, segment_bytes: 1 << 20, places: 2 };
    let disk = Disk::open(folder.path(), options).unwrap();
    assert!(matches!(Disk::open(folder.path(), options), Err(DiskError::InUse(_))));
    drop(disk);
    assert_eq!(Disk::open(folder.path(), options).unwrap().epoch, 2);
}
