//! Fractions as arguments, compared with Redis.

use crate::common::Compared;

/// Texts of floating-point numbers, used wherever a command takes one.
const FRACTIONS: [&str; 43] = [
    "1e400",
    "-1e400",
    "1e-400",
    "1e-310",
    "0x10",
    "0x1p4",
    "-0X1.8p1",
    "0x1p-1080",
    "0x1p2000",
    "0x1p20000",
    "0x",
    "0x1g",
    "0x.p1",
    "\t1",
    "1\t",
    "",
    "inf",
    "+inf",
    "-INF",
    "infinity",
    "infinit",
    "nan",
    "-nan",
    "nan(1)",
    "1.",
    ".5",
    "+.5",
    "+5",
    "1e5",
    "1e+5",
    "1e",
    "e5",
    "--1",
    "1_0",
    "1d0",
    "5e-324",
    "2e-324",
    "1.7976931348623159e308",
    "1\0",
    "(1",
    "00012",
    "0x1.fffffffffffffp3",
    "0e999",
];

#[test]
fn fractions_are_read_as_in_redis() {
    let Some(Compared { serving, mut client, mut redis }) = Compared::start() else { return };
    for text in FRACTIONS {
        let (open, of_score) = (format!("({text}"), [text, "m"]);
        let questions: Vec<Vec<&str>> = vec![
            vec!["DEL", "z", "s", "h"],
            [&["ZADD", "z"][..], &of_score].concat(),
            vec!["ZSCORE", "z", "m"],
            vec!["ZRANGEBYSCORE", "z", text, "+inf"],
            vec!["ZCOUNT", "z", "-inf", text],
            vec!["ZCOUNT", "z", &open, "+inf"],
            vec!["ZINCRBY", "z", text, "other"],
            vec!["ZADD", "z", "INCR", text, "third"],
            vec!["SET", "s", "1"],
            vec!["INCRBYFLOAT", "s", text],
            vec!["SET", "s", text],
            vec!["INCRBYFLOAT", "s", "1"],
            vec!["HINCRBYFLOAT", "h", "f", text],
            vec!["HSET", "h", "g", text],
            vec!["HINCRBYFLOAT", "h", "g", "1"],
            vec!["ZREMRANGEBYSCORE", "z", "-inf", text],
        ];
        for question in questions {
            client.send(&question);
            redis.client.send(&question);
            assert_eq!(client.reply(), redis.client.reply(), "{question:?}");
        }
    }
    serving.stop();
}
