//! What a proxy passes on is read by another parser, that of node (`second_reader.js`): the same messages with the same
//! bodies, and no message more. Requests and responses are made of right and wrong parts, as clients and backends may
//! send them.

mod node;

use std::fmt::Write as _;

use ksf_proto::http1::{
    Body, BodyLength, CHUNK_END, LAST_CHUNK, Request, Response, begin_chunk, forward_request, forward_response,
    head_bytes, unchunked,
};
use proptest::prelude::*;

use node::{Counts, METHODS, METHODS_RIGHT, Node, body, line_end, lines, mostly, request, stream, with_node};

const CASES: u32 = 3000;
const MESSAGES_MIN: usize = 300;

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

fn check(node: &mut Node, kind: char, stream: &[u8], passed: &Passed) -> Result<Counts, TestCaseError> {
    let (messages, end) = node.read(kind, &passed.bytes);
    let shown = format!("{}\npassed as\n{}", stream.escape_ascii(), passed.bytes.escape_ascii());
    prop_assert_eq!(&messages, &passed.messages, "{}: {}", end, shown);
    // What was broken off is a part of a message for the other reader, too.
    let wanted = if passed.is_whole { "end" } else { "part" };
    prop_assert_eq!(end, wanted, "{}", shown);
    let with_body = passed.messages.iter().filter(|message| !message.ends_with(':')).count();
    Ok((passed.messages.len(), with_body))
}

#[test]
fn second_reader_finds_the_requests_that_were_passed_on() {
    with_node(CASES, MESSAGES_MIN, (stream(request()), 1..50usize), |node, (stream, step)| {
        check(node, 'q', &stream, &pass_requests(&stream, step))
    });
}

#[test]
fn second_reader_finds_the_responses_that_were_passed_on() {
    with_node(
        CASES,
        MESSAGES_MIN,
        (stream(response()), 1..50usize, prop::bool::weighted(0.2)),
        |node, (stream, step, to_head)| {
            let kind = if to_head { 'h' } else { 'r' };
            check(node, kind, &stream, &pass_responses(&stream, to_head, step))
        },
    );
}
