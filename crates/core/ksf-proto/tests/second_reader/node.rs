//! Node as a reader of HTTP, and streams of requests for it. Tests of other crates have this file, too.

#![allow(dead_code, reason = "each crate uses a part")]

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use proptest::prelude::*;
use proptest::sample::select;

/// Node, which reads for the thread that started it.
pub(crate) struct Node {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Node {
    pub(crate) fn start() -> Option<Self> {
        let script = ksf_test::repository().join("crates/core/ksf-proto/tests/second_reader.js");
        ksf_test::program_or_skip("node")?;
        let mut node = Command::new("node");
        node.arg("--no-deprecation").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = node.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Some(Self { child, to, from })
    }

    /// The complete messages in `bytes`, and what follows them: `end`, `part`, or what is wrong.
    pub(crate) fn read(&mut self, kind: char, bytes: &[u8]) -> (Vec<String>, String) {
        let mut line = format!("{kind} ");
        bytes.iter().for_each(|byte| write!(line, "{byte:02x}").unwrap());
        line.push('\n');
        self.to.write_all(line.as_bytes()).unwrap();
        line.clear();
        self.from.read_line(&mut line).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let ends = words.iter().position(|word| !word.contains(':')).expect("an answer has an end");
        (words[..ends].iter().map(|word| (*word).to_owned()).collect(), words[ends..].join(" "))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Messages that were passed on, and those with a body.
pub(crate) type Counts = (usize, usize);

/// Runs a property with a reader, unless there is none. Fewer messages than `messages_min`, a tenth of them with a body, would say
/// little.
pub(crate) fn with_node<S: Strategy>(
    cases: u32,
    messages_min: usize,
    strategy: S,
    property: impl Fn(&mut Node, S::Value) -> Result<Counts, TestCaseError>,
) {
    let Some(node) = Node::start() else { return };
    let (node, counts) = (RefCell::new(node), Cell::<Counts>::default());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let run = runner.run(&strategy, |value| {
        let (messages, with_body) = property(&mut node.borrow_mut(), value)?;
        let (all, with_bodies) = counts.get();
        counts.set((all + messages, with_bodies + with_body));
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
    let (all, with_bodies) = counts.get();
    assert!(all >= messages_min && with_bodies >= messages_min / 10, "{all} messages, {with_bodies} with a body");
}

pub(crate) const METHODS: &[&str] =
    &["POST", "GET", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "get", "Post", " GET", "CONNECT"];
pub(crate) const METHODS_RIGHT: usize = 6;

const TARGETS: &[&str] = &[
    "/",
    "/a?b",
    "//x",
    "http://h/",
    "http://h",
    "HTTP://h:80?q",
    "http://[::1]:8/",
    "*",
    "http://u@h/",
    "h:80",
    "/#f",
    "/\u{fc}",
    "http://",
    "http:///x",
    "/a b",
    "https://h/",
    "",
    "/\t",
    "/\"<>\\^`{|}~",
    "/%",
    "http://a,b/",
];
const TARGETS_RIGHT: usize = 7;

const VERSIONS: &[&str] = &["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "http/1.1", "HTTP/2.0", "HTTP/1.1 "];
const VERSIONS_RIGHT: usize = 2;

/// Fields that matter, right and wrong.
const FIELDS: &[&str] = &[
    "Content-Length: 5",
    "Transfer-Encoding: chunked",
    "Content-Length: 5",
    "transfer-encoding: Chunked",
    "Connection: close",
    "Connection: keep-alive, X",
    "Connection: content-length, transfer-encoding",
    "Upgrade: h2c",
    "Expect: 100-continue",
    "X: \u{e4}\t\"",
    "Content-Length: 0",
    "content-length: 05",
    "Connection: Host",
    "Max-Forwards: 0",
    "Host: h",
    "Host: a b",
    "Host:",
    "Host: h:80",
    "Host: u@h",
    "Host : h",
    "Content-Length: +5",
    "Content-Length: 5, 5",
    "Content-Length: 6",
    "Content-Length : 5",
    "Content-Length:",
    "Content-Length: 0x5",
    "Content-Length: 18446744073709551616",
    "Content-Length: 5 5",
    "Content_Length: 5",
    "Content-Length\t: 5",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding:",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding : chunked",
    "Expect: x",
    "Max-Forwards: x",
    " folded",
    ": x",
    "X",
    "X: \x01",
];
const FIELDS_RIGHT: usize = 14;

const LINE_ENDS: &[&str] = &["\r\n", "\n", "\r", "\r\r\n"];

/// One of the right parts, which are first, or now and then any of them.
pub(crate) fn mostly(all: &'static [&'static str], right: usize) -> impl Strategy<Value = &'static str> {
    prop_oneof![15 => select(&all[..right]), 1 => select(all)]
}

pub(crate) fn line_end() -> impl Strategy<Value = &'static str> {
    prop_oneof![60 => Just(LINE_ENDS[0]), 1 => select(LINE_ENDS)]
}

/// Parts of bodies in chunks, and of trailers.
const PIECES: &[&str] = &[
    "5\r\nhello\r\n",
    "5;a=b\r\nhello\r\n",
    "3;a=\"\\\";\"\r\nabc\r\n",
    "0\r\n\r\n",
    "0\r\n\r\n",
    "0\r\n\r\n",
    "0\r\n\r\n",
    "0\r\n",
    "0;x\r\n",
    "00\r\n\r\n",
    "T: v\r\n",
    "\r\n",
    "GET /smug HTTP/1.1\r\n",
    "Host: x\r\n",
    "Content-Length: 5\r\n",
    "Transfer-Encoding: chunked\r\n",
    "5 \r\nhello\r\n",
    "5 ;a\r\nhello\r\n",
    "5; a\r\nhello\r\n",
    "5;\r\nhello\r\n",
    "5;a=\"\r\nhello\r\n",
    "5;a=\"b\"c\r\nhello\r\n",
    "0x5\r\nhello\r\n",
    "+5\r\nhello\r\n",
    "-0\r\n\r\n",
    "5\nhello\n",
    "5\r\nhello",
    "5\r\nhelloX\r\n",
    "fffffffffffffffff\r\n",
    "10000000000000005\r\nhello\r\n",
    "A\r\n0123456789\r\n",
    "a;b\nc\r\n0123456789\r\n",
    " T: v\r\n",
    "T : v\r\n",
    "T: \x01\r\n",
    "T:\r\n",
    "5;a\x7f\r\nhello\r\n",
    "5_\r\nhello\r\n",
    "5;\u{e4}\r\nhello\r\n",
    "5;a=\"\u{e4}\"\r\nhello\r\n",
];

const PIECES_RIGHT: usize = 12;

/// Latin 1, so that bytes above 0x7f stand alone, or UTF-8.
fn bytes_of(text: &str, is_latin: bool) -> Vec<u8> {
    if is_latin { text.chars().map(|char| char as u8).collect() } else { text.as_bytes().to_vec() }
}

pub(crate) fn lines() -> impl Strategy<Value = String> {
    prop::collection::vec((mostly(FIELDS, FIELDS_RIGHT), line_end()), 0..4)
        .prop_map(|lines| lines.into_iter().flat_map(|(field, end)| [field, end]).collect())
}

pub(crate) fn body() -> impl Strategy<Value = String> {
    let chunks = prop::collection::vec(mostly(PIECES, PIECES_RIGHT), 1..5).prop_map(|pieces| pieces.concat());
    prop_oneof![
        3 => Just(String::new()),
        3 => Just("hello".to_owned()),
        3 => Just("5\r\nhello\r\n0\r\n\r\n".to_owned()),
        4 => chunks,
        1 => Just("GET /inner HTTP/1.1\r\nHost: h\r\n\r\n".to_owned()),
    ]
}

pub(crate) fn request() -> impl Strategy<Value = String> {
    let target = mostly(TARGETS, TARGETS_RIGHT);
    let line = (mostly(METHODS, METHODS_RIGHT), target, mostly(VERSIONS, VERSIONS_RIGHT), line_end());
    let host = prop_oneof![8 => Just("Host: h\r\n"), 1 => Just("")];
    let front = prop_oneof![12 => Just(""), 1 => Just("\r\n"), 1 => Just("\n"), 1 => Just(" ")];
    (front, line, host, lines(), line_end(), body()).prop_map(
        |(front, (method, target, version, end), host, lines, last, body)| {
            format!("{front}{method} {target} {version}{end}{host}{lines}{last}{body}")
        },
    )
}

/// A stream of a few messages, in which a byte may be another one.
pub(crate) fn stream(message: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::option::weighted(0.3, (any::<prop::sample::Index>(), select(&b" \t\r\n\0:;,\"0a\xff"[..])));
    (prop::collection::vec(message, 1..4), any::<bool>(), damage).prop_map(|(messages, is_latin, damage)| {
        let mut stream = bytes_of(&messages.concat(), is_latin);
        if let Some((at, byte)) = damage {
            let at = at.index(stream.len());
            stream[at] = byte;
        }
        stream
    })
}
