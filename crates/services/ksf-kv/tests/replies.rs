//! Replies have a bound in bytes, whatever a command asks for.

use crate::common::{Client, Serving};
use ksf::engine::EngineKind;
use ksf::limits::Limits;

const LIMIT: usize = 64 << 10;
const TOO_LONG: &str = "-ERR the reply has more than 65536 bytes: ask for a part of it";

/// Three of them, and not four, fit into a reply.
fn long(number: usize) -> String {
    format!("{number}{}", "v".repeat(20_000))
}

fn start() -> (Serving, Client) {
    let limits = Limits { message_bytes_max: LIMIT, connection_bytes_max: LIMIT, ..Limits::default() };
    let serving = Serving::fresh_with(EngineKind::Epoll, limits);
    let mut client = serving.connect();
    for number in 0..4 {
        let (value, number) = (long(number), number.to_string());
        let (value, number) = (value.as_str(), number.as_str());
        for command in [
            &["SET", "string", value][..],
            &["HSET", "hash", number, value],
            &["RPUSH", "list", value],
            &["SADD", "set", value],
            &["ZADD", "scored", number, value],
        ] {
            client.send(command);
            assert!(!client.reply().starts_with('-'), "{}", command[0]);
        }
    }
    (serving, client)
}

#[test]
fn a_reply_that_is_too_long_is_an_error_and_changes_nothing() {
    let (serving, mut client) = start();
    for question in [
        "MGET string string string string",
        "HMGET hash 0 0 0 0",
        "HGETALL hash",
        "HVALS hash",
        "HSCAN hash 0",
        "HRANDFIELD hash 4 WITHVALUES",
        "HRANDFIELD hash -100 WITHVALUES",
        "LRANGE list 0 -1",
        "LPOP list 4",
        "RPOP list 5",
        "SMEMBERS set",
        "SSCAN set 0",
        "SUNION set",
        "SINTER set set",
        "SRANDMEMBER set 4",
        "SRANDMEMBER set -100",
        "SPOP set 4",
        "ZRANGE scored 0 -1",
        "ZRANGE scored 0 -1 REV WITHSCORES",
        "ZRANGE scored -inf +inf BYSCORE",
        "ZRANGE scored -inf +inf BYSCORE LIMIT 0 4",
        "ZRANGEBYSCORE scored 0 3",
        "ZSCAN scored 0",
        "ZPOPMIN scored 4",
    ] {
        assert_eq!(client.ask(question), TOO_LONG, "{question}");
    }
    assert_eq!(["LLEN list", "SCARD set", "ZCARD scored"].map(|question| client.ask(question)), [":4"; 3]);
    for question in [
        "MGET string string string none",
        "HMGET hash 0 1 none 2",
        "HKEYS hash",
        "HSCAN hash 0 MATCH [123]",
        "HRANDFIELD hash -100",
        "LRANGE list 1 3",
        "SRANDMEMBER set 3",
        "ZRANGE scored 1 3 WITHSCORES",
        "ZRANGE scored -inf +inf BYSCORE LIMIT 1 3",
        "LPOP list 3",
        "SPOP set 3",
        "ZPOPMAX scored 3",
    ] {
        let told = client.ask(question);
        assert!(told.starts_with('['), "{question}: {}", &told[..told.len().min(100)]);
    }
    assert_eq!(["LLEN list", "SCARD set", "ZCARD scored"].map(|question| client.ask(question)), [":1"; 3]);
    serving.stop();
}

#[test]
fn keys_are_told_as_far_as_a_reply_has_room() {
    let (serving, mut client) = start();
    for number in 0..4 {
        assert_eq!(client.ask(&format!("SET {} 1", long(number))), "+OK");
    }
    assert_eq!(client.ask("KEYS *"), TOO_LONG);
    assert_eq!(client.ask("KEYS [123]*"), format!("[{} {} {}]", long(1), long(2), long(3)));
    serving.stop();
}

/// More than there are, again and again: a short command that would take much memory.
#[test]
fn a_count_multiplies_no_reply_beyond_its_bound() {
    let (serving, mut client) = start();
    let value = "v".repeat(100);
    client.ask(&format!("HSET short field {value}"));
    client.ask(&format!("SADD members {value}"));
    assert_eq!(client.ask("HRANDFIELD short -1048576 WITHVALUES"), TOO_LONG);
    assert_eq!(client.ask("SRANDMEMBER members -1048576"), TOO_LONG);
    assert_eq!(client.ask("SRANDMEMBER members -3"), format!("[{value} {value} {value}]"));
    serving.stop();
}

#[test]
fn the_commands_of_a_transaction_share_the_bound() {
    let (serving, mut client) = start();
    for command in ["MULTI", "GET string", "LINDEX list 0", "HGET hash 0", "GETDEL string", "LPOP list", "SET last 1"] {
        client.ask(command);
    }
    let told = client.ask("EXEC");
    let (first, last) = (long(0), long(3));
    let expected = [&last[..], &first, &first, TOO_LONG, TOO_LONG, "+OK"].join(" ");
    assert!(told == format!("[{expected}]"), "{} bytes", told.len());
    assert_eq!(client.ask("STRLEN string"), format!(":{}", long(3).len()), "it is not gone");
    assert_eq!((client.ask("LLEN list"), client.ask("GET last")), (":4".into(), "1".into()));
    serving.stop();
}
