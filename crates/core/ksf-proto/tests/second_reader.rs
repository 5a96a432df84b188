//! What a proxy passes on is read by another parser, that of node (`second_reader.js`): the same messages with the same
//! bodies, and no message more. Requests and responses are made of right and wrong parts, as clients and backends may
//! send them.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use ksf_proto::http1::{
    Body, BodyLength, CHUNK_END, LAST_CHUNK, Request, Response, begin_chunk, forward_request, forward_response,
    head_bytes, unchunked,
};
use proptest::prelude::*;
use proptest::sample::select;

/// Node, which reads for the thread that started it.
struct Node {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Node {
    fn start() -> Option<Self> {
        const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/second_reader.js");
        ksf_test::program_or_skip("node")?;
        let mut node = Command::new("node");
        node.arg("--no-deprecation").arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = node.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Some(Self { child, to, from })
    }

    /// The complete messages in `bytes`, and what follows them: `end`, `part`, or what is wrong.
    fn read(&mut self, kind: char, bytes: &[u8]) -> (Vec<String>, String) {
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
type Counts = (usize, usize);

/// Runs a property with a reader, unless there is none. It returns what it passed on: enough must be, or it says little.
fn with_node<S: Strategy>(strategy: S, property: impl Fn(&mut Node, S::Value) -> Result<Passed, TestCaseError>) {
    const CASES: u32 = 3000;
    let Some(node) = Node::start() else { return };
    let (node, counts) = (RefCell::new(node), Cell::<Counts>::default());
    let config = ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let run = runner.run(&strategy, |value| {
        let passed = property(&mut node.borrow_mut(), value)?;
        let with_body = passed.messages.iter().filter(|message| !message.ends_with(':')).count();
        let (all, with_bodies) = counts.get();
        counts.set((all + passed.messages.len(), with_bodies + with_body));
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
    let (all, with_bodies) = counts.get();
    assert!(
        all >= CASES as usize / 10 && with_bodies >= CASES as usize / 100,
        "{all} messages, {with_bodies} with a body"
    );
}

/// What was passed on, and what it says.
#[derive(Debug, Default)]
struct Passed {
    bytes: Vec<u8>,
    /// The complete messages, as the second reader shows them.
    messages: Vec<String>,
    /// The last message was passed on to its end.
    is_whole: bool,
}

impl Passed {
    fn complete(&mut self, first: &str, length: BodyLength, body: &[u8]) {
        let data = if length == BodyLength::Chunked { unchunked(body) } else { body.to_vec() };
        let mut shown = format!("{first}:");
        data.iter().for_each(|byte| write!(shown, "{byte:02x}").unwrap());
        self.messages.push(shown);
        self.is_whole = true;
    }

    /// Passes on a body that arrives in pieces of `step` bytes. How many bytes it has, if it was passed to its end.
    fn body(&mut self, first: &str, length: BodyLength, stream: &[u8], step: usize) -> Option<usize> {
        let (mut body, start) = (Body::new(length), self.bytes.len());
        for piece in stream.chunks(step) {
            let bytes = body.take(piece).ok()?;
            self.bytes.extend_from_slice(&piece[..bytes]);
            if bytes < piece.len() {
                break;
            }
        }
        let passed = self.bytes[start..].to_vec();
        body.may_end_here().then(|| self.complete(first, length, &passed))?;
        Some(passed.len())
    }

    /// Passes on a body without a length, which ends with its connection.
    fn pieces_as_chunks(&mut self, first: &str, body: &[u8], step: usize) {
        for piece in body.chunks(step) {
            begin_chunk(piece.len(), &mut self.bytes);
            self.bytes.extend_from_slice(piece);
            self.bytes.extend_from_slice(CHUNK_END);
        }
        self.bytes.extend_from_slice(LAST_CHUNK);
        self.complete(first, BodyLength::UntilClose, body);
    }
}

/// Passes on a stream of requests, up to the first that is refused.
fn pass_requests(mut stream: &[u8], step: usize) -> Passed {
    let mut passed = Passed { is_whole: true, ..Passed::default() };
    while let Some(length) = head_bytes(stream, 0) {
        let (head, behind) = stream.split_at(length);
        let Ok((request, method)) = Request::parse_with(head, |asked| asked.method) else { break };
        // The other reader knows the registered methods alone, and a body that is too short leaves a part of one.
        let is_known = METHODS[..=METHODS_RIGHT].contains(&method);
        if !is_known || forward_request(head, true, &mut passed.bytes).is_err() {
            break;
        }
        passed.is_whole = false;
        let Some(bytes) = passed.body(method, request.body, behind, step) else { break };
        stream = &behind[bytes..];
    }
    passed
}

/// Passes on a stream of interim responses and a final one to a client of HTTP/1.1.
fn pass_responses(mut stream: &[u8], to_head: bool, step: usize) -> Passed {
    let mut passed = Passed { is_whole: true, ..Passed::default() };
    while let Some(length) = head_bytes(stream, 0) {
        let (head, behind) = stream.split_at(length);
        let Ok(response) = Response::parse(head, to_head) else { break };
        let in_chunks = response.body == BodyLength::UntilClose;
        if forward_response(head, 1, true, in_chunks, &mut passed.bytes).is_err() {
            break;
        }
        passed.is_whole = false;
        let shown = response.status.to_string();
        if in_chunks {
            passed.pieces_as_chunks(&shown, behind, step);
            break;
        }
        if response.status >= 200 {
            passed.body(&shown, response.body, behind, step);
            break;
        }
        passed.complete(&shown, BodyLength::Fixed(0), &[]);
        stream = behind;
    }
    passed
}

const METHODS: &[&str] =
    &["POST", "GET", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "get", "Post", " GET", "CONNECT"];
const METHODS_RIGHT: usize = 6;

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
fn mostly(all: &'static [&'static str], right: usize) -> impl Strategy<Value = &'static str> {
    prop_oneof![15 => select(&all[..right]), 1 => select(all)]
}

fn line_end() -> impl Strategy<Value = &'static str> {
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

fn lines() -> impl Strategy<Value = String> {
    prop::collection::vec((mostly(FIELDS, FIELDS_RIGHT), line_end()), 0..4)
        .prop_map(|lines| lines.into_iter().flat_map(|(field, end)| [field, end]).collect())
}

fn body() -> impl Strategy<Value = String> {
    let chunks = prop::collection::vec(mostly(PIECES, PIECES_RIGHT), 1..5).prop_map(|pieces| pieces.concat());
    prop_oneof![
        3 => Just(String::new()),
        3 => Just("hello".to_owned()),
        3 => Just("5\r\nhello\r\n0\r\n\r\n".to_owned()),
        4 => chunks,
        1 => Just("GET /inner HTTP/1.1\r\nHost: h\r\n\r\n".to_owned()),
    ]
}

fn request() -> impl Strategy<Value = String> {
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

fn response() -> impl Strategy<Value = String> {
    const STARTS: &[&str] = &[
        "HTTP/1.1 200 OK",
        "HTTP/1.1 200 OK",
        "HTTP/1.1 204 No Content",
        "HTTP/1.1 304 Not Modified",
        "HTTP/1.1 100 Continue",
        "HTTP/1.1 103 Early Hints",
        "HTTP/1.0 200 OK",
        "HTTP/1.1 205 Reset Content",
        "HTTP/1.1 200 ",
        "HTTP/1.1 200 \u{e4}",
        "HTTP/1.1 101 Switching",
        "HTTP/1.1 200",
        "HTTP/1.1  200 OK",
        "HTTP/1.1 20 OK",
    ];
    const STARTS_RIGHT: usize = 10;
    (mostly(STARTS, STARTS_RIGHT), line_end(), lines(), line_end(), body())
        .prop_map(|(start, end, lines, last, body)| format!("{start}{end}{lines}{last}{body}"))
}

/// A stream of a few messages, in which a byte may be another one.
fn stream(message: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<u8>> {
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

fn check(node: &mut Node, kind: char, stream: &[u8], passed: Passed) -> Result<Passed, TestCaseError> {
    let (messages, end) = node.read(kind, &passed.bytes);
    let shown = format!("{}\npassed as\n{}", stream.escape_ascii(), passed.bytes.escape_ascii());
    prop_assert_eq!(&messages, &passed.messages, "{}: {}", end, shown);
    // What was broken off is a part of a message for the other reader, too.
    let wanted = if passed.is_whole { "end" } else { "part" };
    prop_assert_eq!(end, wanted, "{}", shown);
    Ok(passed)
}

#[test]
fn second_reader_finds_the_requests_that_were_passed_on() {
    with_node((stream(request()), 1..50usize), |node, (stream, step)| {
        check(node, 'q', &stream, pass_requests(&stream, step))
    });
}

#[test]
fn second_reader_finds_the_responses_that_were_passed_on() {
    with_node((stream(response()), 1..50usize, prop::bool::weighted(0.2)), |node, (stream, step, to_head)| {
        let kind = if to_head { 'h' } else { 'r' };
        check(node, kind, &stream, pass_responses(&stream, to_head, step))
    });
}
