//! Bytes that are no commands, and names that may be any bytes, compared with Redis.

use std::io::{BufRead, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::common::{Client, Compared, Redis, Serving, engines};
use ksf::limits::Limits;
use ksf_test::stream;

/// Raw bytes, each sent on a connection of its own. This server and Redis return the same bytes until the connection ends.
const SAME_BYTES_AS_REDIS: &[&str] = &[
    "*01\r\n$4\r\nPING\r\n",
    "*+1\r\n$4\r\nPING\r\n",
    "*-0\r\nPING\r\n",
    "*00\r\nPING\r\n",
    "*\r\nPING\r\n",
    "*0\r\nPING\r\n",
    "*-1\r\nPING\r\n",
    "*-9999999999\r\nPING\r\n",
    "*1\r\n$-1\r\nPING\r\n",
    "*1\r\n$-0\r\n\r\nPING\r\n",
    "*1\r\n$04\r\nPING\r\n",
    "*1\r\n$+4\r\nPING\r\n",
    "*1\r\n$\r\nPING\r\n",
    "*1\r\n:4\r\nPING\r\n",
    "*12345678901234567890\r\n",
    "*2147483648\r\n",
    "*1\r\n$99999999999999999999\r\n",
    "*1\r\n$0\r\n\r\nPING\r\n",
    "*1\r\n$4\r\nPOST\r\nPING\r\n",
    "PING a\"b\r\nPING\r\n",
    "PING a\"b c\"\r\n",
    "PING \"a\"b\r\nPING\r\n",
    "PING 'a\\'b'\r\n",
    "\"PI\\x4eG\"\r\n",
    "PING a\x0bb\r\n",
    "\x0bPING\r\n",
    "PING \"\r\nPING\r\n",
    "PING\rx\nPING\n",
    "PING ''\r\n",
    "PING \"\\xzz\\q\"\r\n",
    "PING\r\nNONSENSE x y\r\nPING\r\n",
    "\r\n\nPING\r\n",
];

#[test]
fn malformed_commands_get_the_replies_of_redis() {
    let Some(redis) = Redis::start() else { return };
    let socket = redis.folder.path("redis");
    for engine in engines() {
        let serving = Serving::fresh(engine);
        for text in SAME_BYTES_AS_REDIS {
            let theirs = UnixStream::connect(&socket).unwrap();
            let theirs = all_of(theirs, text.as_bytes(), |stream| stream.shutdown(Shutdown::Write).unwrap());
            let ours = stream::connect(serving.address());
            let ours = all_of(ours, text.as_bytes(), |stream| drop(stream.shutdown(Shutdown::Write)));
            assert_eq!(ours.escape_ascii().to_string(), theirs.escape_ascii().to_string(), "{engine}: {text:?}");
        }
        serving.stop();
    }
}

/// Sends bytes and shuts that direction down. Returns all bytes of the peer.
fn all_of<S: Read + Write>(mut stream: S, bytes: &[u8], shutdown: impl Fn(&S)) -> Vec<u8> {
    // The peer may close the connection before it has received all of them.
    let _ = stream.write_all(bytes);
    shutdown(&stream);
    let mut sent = Vec::new();
    let _ = stream.read_to_end(&mut sent);
    sent
}

/// The length of a command bounds its arguments, as in Redis, and not their number.
#[test]
fn command_with_more_than_a_million_arguments_is_carried_out() {
    const KEYS: usize = 1_050_000;
    for engine in engines() {
        let limits = Limits { message_bytes_max: 8 << 20, connection_bytes_max: 8 << 20, ..Limits::default() };
        let serving = Serving::fresh_with(engine, limits);
        let mut client = serving.connect();
        client.ask("SET a 1");
        let command = [format!("*{}\r\n$3\r\nDEL\r\n", KEYS + 1).into_bytes(), b"$1\r\na\r\n".repeat(KEYS)].concat();
        client.0.get_mut().write_all(&command).unwrap();
        assert_eq!(client.reply(), ":1", "{engine}");
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
        serving.stop();
    }
}

/// Names and options may be any bytes.
#[test]
fn errors_name_unknown_words_as_in_redis() {
    let Some(Compared { serving, mut client, mut redis }) = Compared::start() else { return };
    let (long, name) = ([b'a'; 200], [b'n'; 130]);
    let questions: [&[&[u8]]; 10] = [
        &[b"\xff\xfebad", b"\xe9", b"x\r\ny"],
        &[b"a\0b", b"c\0d", b"e"],
        &[&name, &long[..100], &long[..50], b"behind"],
        &[b"nope", &long, b"behind"],
        &[b"client", b"\xff\r"],
        &[b"cluster", &name, b"x"],
        &[b"expire", b"none", b"1", b"\xe4\r\nx\r\n"],
        &[b"client", b"kill", b"type", b"\xe4\0x"],
        &[b"client", b"kill", b"user", b"\xff\n"],
        &[b"hello", b"3", b"\xe4"],
    ];
    for words in questions {
        let told = [first_line_of(&mut client, words), first_line_of(&mut redis.client, words)];
        assert_eq!(told[0].escape_ascii().to_string(), told[1].escape_ascii().to_string(), "{words:?}");
    }
    serving.stop();
}

/// Sends a command of these words. Returns the first line of the reply.
fn first_line_of<S: Read + Write>(client: &mut Client<S>, words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(&[format!("${}\r\n", word.len()).as_bytes(), word, b"\r\n"].concat());
    }
    client.0.get_mut().write_all(&bytes).unwrap();
    let mut line = Vec::new();
    client.0.read_until(b'\n', &mut line).unwrap();
    line
}
