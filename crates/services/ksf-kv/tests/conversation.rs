//! Replies of the server, compared with those of Redis.

mod lists;

use std::collections::{HashMap, HashSet};
use std::io::BufReader;
use std::os::unix::net::UnixStream;

use self::lists::{NOT_IN_A_LIST, ONCE_AS_REDIS, SAME_AS_REDIS};
use crate::common::{Client, Compared, Serving, engines};
use crate::watching::TOUCHING;
use crate::{connections, keys};
use ksf::engine::EngineKind;
use ksf_test::{own_network, stream};

/// Commands in their order, each with its reply.
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

#[test]
fn saves_memory_and_the_end_of_a_connection_are_answered_as_by_redis() {
    let Some(mut both) = Compared::start() else { return };
    both.assert_same(ONCE_AS_REDIS);
    // QUIT was the last one.
    assert_eq!((stream::read_rest(&mut both.client.0), stream::read_rest(&mut both.redis.client.0)), (vec![], vec![]));
    both.client = both.serving.connect();
    both.redis.client = Client(BufReader::new(UnixStream::connect(both.redis.folder.path("redis")).unwrap()));
    // The numbers differ.
    for question in ["LASTSAVE", "MEMORY USAGE only", "MEMORY USAGE only SAMPLES 0"] {
        for reply in both.ask(question) {
            assert!(reply.strip_prefix(':').is_some_and(|number| number.parse::<u64>().is_ok()), "{question}: {reply}");
        }
    }
    both.serving.stop();
}

/// Whoever adds a command adds lines to the lists that are compared with Redis.
#[test]
fn every_command_is_in_a_list_that_is_compared_with_redis() {
    let serving = Serving::fresh(EngineKind::Epoll);
    let mut client = serving.connect();
    let listed = client.ask("COMMAND LIST");
    let all: Vec<&str> = listed.trim_matches(['[', ']']).split(' ').collect();
    assert!(all.len() > 160, "{all:?}");
    let asked = |commands: &[&str]| -> HashSet<String> {
        let commands = commands.iter().flat_map(|commands| commands.split(';'));
        commands
            .flat_map(|command| {
                let mut words = command.split(' ').map(str::to_lowercase);
                let name = words.next().unwrap_or_default();
                let subcommand = words.next().map(|word| format!("{name}|{word}"));
                [Some(name), subcommand].into_iter().flatten()
            })
            .collect()
    };
    let compared =
        asked(&[SAME_AS_REDIS, ONCE_AS_REDIS, TOUCHING, connections::SAME_AS_REDIS, keys::SAME_AS_REDIS].concat());
    let reasons: HashMap<&str, &str> = NOT_IN_A_LIST.iter().copied().collect();
    for name in &all {
        assert!(compared.contains(*name) != reasons.contains_key(name), "{name} is in no list, or in two");
    }
    for (name, reason) in &reasons {
        assert!(all.contains(name), "there is no {name}: {reason}");
    }
    let touching = asked(TOUCHING);
    let mut writes = 0;
    for name in all.iter().filter(|name| !name.contains('|')) {
        let about = client.ask(&format!("COMMAND INFO {name}"));
        let is_write = about.split(['+', ' ', ']', '[']).any(|word| word == "write");
        assert!(!is_write || touching.contains(*name), "{name} writes, and no WATCH is compared with it");
        writes += usize::from(is_write);
    }
    assert!(writes > 60, "{writes} commands write");
    serving.stop();
}

#[test]
fn replies_are_those_of_redis() {
    let Some(mut both) = Compared::start() else { return };
    for version in ["2", "3"] {
        both.ask(&format!("HELLO {version}"));
        both.assert_same(SAME_AS_REDIS);
        for key in both.redis.client.ask("KEYS *").trim_matches(['[', ']']).split(' ') {
            assert_eq!(both.ask(&format!("DEL {key}"))[0], ":1", "RESP{version}: {key}");
        }
        assert_eq!(both.client.ask("DBSIZE"), ":0", "RESP{version}");
    }
    both.serving.stop();
}

#[test]
fn conversation_is_remembered_after_a_restart() {
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
