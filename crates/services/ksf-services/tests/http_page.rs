//! The demo server, without a socket: requests split anywhere, pipelined, with bodies, and bad ones.

use std::sync::Arc;

use crate::common::{Wire, counter};
use crate::node::{request, stream, with_node};
use ksf::CloseReason;
use ksf::limits::Limits;
use ksf_services::http::PageServer;
use ksf_test::alloc::bytes;
use proptest::prelude::*;

fn server(keep_alive: bool) -> Arc<PageServer> {
    Arc::new(PageServer::new(64, keep_alive, 1))
}

/// The body of an answer that is no refusal.
const PAGE: &[u8] = b"abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijk\n";

/// Cuts answers off: the status and the head of each. Those to HEAD announce the page and do not bring it.
fn answers(mut bytes: &[u8]) -> Vec<(u16, String)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole head") + 4;
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head[9..12].parse().unwrap();
        let body = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let body: usize = body.map_or(0, |length| length.parse().unwrap());
        bytes = &bytes[end..];
        if body > 0 {
            bytes = bytes.strip_prefix(PAGE).unwrap_or(bytes);
        }
        found.push((status, head));
    }
    found
}

fn statuses(bytes: &[u8]) -> Vec<u16> {
    answers(bytes).into_iter().map(|(status, _)| status).collect()
}

const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn a_request_is_answered_with_the_page_and_the_connection_is_closed() {
    let server = server(false);
    let mut wire = Wire::new(&server);
    let sent = wire.feed(GET.as_bytes());
    let (head, body) = sent.split_at(sent.len() - 64);
    let head = std::str::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("\r\nConnection: close\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Length: 64\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert_eq!(body, PAGE);
    assert_eq!(wire.closed(), Some(CloseReason::Service));
}

#[test]
fn keep_alive_is_what_the_client_and_the_server_want() {
    for (server_wants, request, stays, told) in [
        (true, GET, true, ""),
        (true, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", false, "Connection: close"),
        (true, "GET / HTTP/1.0\r\n\r\n", false, "Connection: close"),
        (true, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", true, "Connection: keep-alive"),
        (false, GET, false, "Connection: close"),
        (false, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", false, "Connection: close"),
    ] {
        let mut wire = Wire::new(&server(server_wants));
        let sent = wire.feed(request.as_bytes());
        let head = answers(&sent).remove(0).1;
        let said = head.lines().find(|line| line.starts_with("Connection")).unwrap_or("");
        assert_eq!((wire.closed().is_none(), said), (stays, told), "{request:?}");
    }
}

#[test]
fn a_head_request_has_no_body() {
    let mut wire = Wire::new(&server(true));
    let sent = wire.feed(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(sent.ends_with(b"Content-Length: 64\r\n\r\n"), "{}", String::from_utf8_lossy(&sent));
}

/// While several responses wait for a peer that does not read.
#[test]
fn responses_share_a_long_page() {
    const REQUESTS: usize = 8;
    let head = "HEAD / HTTP/1.1\r\nHost: x\r\n\r\n";
    // The first of these is copied, but not long.
    for page_bytes in [4096, 4097, 100_000] {
        let mut wire = Wire::new(&Arc::new(PageServer::new(page_bytes, true, 1)));
        wire.feed(GET.as_bytes());
        let requests = format!("{}{head}", GET.repeat(REQUESTS));
        let before = bytes();
        wire.feed_unread(requests.as_bytes());
        let taken = bytes() - before;
        assert!(taken < 50_000, "{taken} bytes for {REQUESTS} pages of {page_bytes}");
        let sent = wire.sent();
        let length = format!("Content-Length: {page_bytes}\r\n\r\n");
        let mut parts = std::str::from_utf8(&sent).unwrap().split("HTTP/1.1 200 OK\r\n").skip(1);
        let page: String = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijk\n"
            .chars()
            .cycle()
            .take(page_bytes)
            .collect();
        for _ in 0..REQUESTS {
            let (_, body) = parts.next().unwrap().split_once(&length).unwrap();
            assert!(body == page, "{page_bytes}: {} bytes", body.len());
        }
        assert!(parts.next().unwrap().ends_with(&length) && parts.next().is_none(), "{page_bytes}");
        assert_eq!(wire.closed(), None);
    }
}

#[test]
fn a_client_that_waits_before_its_body_is_told_to_go_on() {
    let mut wire = Wire::new(&server(true));
    let head = "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    assert_eq!(wire.feed(head.as_bytes()), b"HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(statuses(&wire.feed(b"abc")), [200]);
    // Who has sent it already need not be told.
    assert_eq!(statuses(&wire.feed(format!("{head}abc").as_bytes())), [100, 200]);
}

/// Each part of a body has its time, the first one behind an interim answer, too.
#[test]
fn body_that_stops_is_refused_in_time() {
    let timeout_ms = ksf::limits::Limits::default().assembly_timeout_ms;
    for expects in ["", "Expect: 100-continue\r\n"] {
        for (length, parts) in [
            ("Content-Length: 3", &["", "a", "b"][..]),
            ("Transfer-Encoding: chunked", &["", "3", "\r\n", "ab", "c\r\n", "0\r\n", "X: y\r\n"]),
        ] {
            for stop in 0..parts.len() {
                let mut wire = Wire::new(&server(true));
                wire.feed(format!("POST / HTTP/1.1\r\nHost: x\r\n{expects}{length}\r\n\r\n").as_bytes());
                let mut now_ms = 0;
                for part in &parts[1..=stop] {
                    now_ms += timeout_ms - 1;
                    assert!(wire.set_time_ms(now_ms).is_empty() && wire.closed().is_none(), "{length}, {stop}");
                    assert!(wire.feed(part.as_bytes()).is_empty(), "{length}, {stop}");
                }
                assert!(wire.set_time_ms(now_ms + timeout_ms - 1).is_empty(), "{length}, {stop}");
                let told = wire.set_time_ms(now_ms + timeout_ms + 1);
                assert_eq!(statuses(&told), [408], "{expects}{length}, {stop}");
                assert_eq!(wire.closed(), Some(CloseReason::AssemblyTimeout));
            }
        }
    }
    // Between two requests nothing is awaited, and an empty line is no part of one.
    let mut wire = Wire::new(&server(true));
    assert_eq!(statuses(&wire.feed(format!("{GET}\r\n").as_bytes())), [200]);
    assert!(wire.set_time_ms(100 * timeout_ms).is_empty() && wire.closed().is_none());
}

#[test]
fn bad_requests_are_answered_counted_and_the_last() {
    let server = server(true);
    for (bytes, status, reason) in [
        ("nonsense\r\n\r\n".to_owned(), 400, CloseReason::MalformedFrame),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400, CloseReason::MalformedFrame),
        ("GET / HTTP/3.0\r\nHost: x\r\n\r\n".to_owned(), 505, CloseReason::MalformedFrame),
        ("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n".to_owned(), 501, CloseReason::MalformedFrame),
        (
            "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz".to_owned(),
            400,
            CloseReason::MalformedFrame,
        ),
        (format!("GET / HTTP/1.1\r\nA: {}\r\n\r\n", "x".repeat(5000)), 431, CloseReason::EndlessHeader),
        (format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(5000)), 431, CloseReason::EndlessHeader),
    ] {
        // At once, and byte by byte; behind a good request in both.
        let stream = format!("{GET}{bytes}{GET}");
        for step in [stream.len(), 1] {
            let mut wire = Wire::new(&server);
            let sent = wire.feed_all(stream.as_bytes().chunks(step));
            assert_eq!(statuses(&sent), [200, status], "{bytes:.40?} by {step}");
            assert_eq!(wire.closed(), Some(reason), "{bytes:.40?} by {step}");
        }
    }
    assert_eq!((counter(&*server, "bad_requests"), counter(&*server, "oversized_heads")), (10, 4));
    assert_eq!(counter(&*server, "requests"), 14 + 2, "the head before a malformed chunk was read");
    assert_eq!(counter(&*server, "clients_gone"), 0);
}

#[test]
fn body_that_is_longer_than_any_is_refused_by_its_length() {
    let server = server(true);
    for (field, status) in [
        (format!("Content-Length: {}", u64::MAX), Some(413)),
        (format!("Content-Length: {}", i64::MAX), Some(413)),
        (format!("Content-Length: {}", (1_u64 << 40) + 1), Some(413)),
        (format!("Content-Length: {}", 1_u64 << 40), None),
        ("Content-Length: 18446744073709551616".to_owned(), Some(400)),
    ] {
        let mut wire = Wire::new(&server);
        let sent = wire.feed(format!("POST / HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n").as_bytes());
        assert_eq!(statuses(&sent), status.into_iter().collect::<Vec<_>>(), "{field}");
        assert_eq!(wire.closed().is_some(), status.is_some(), "{field}");
    }
    let mut wire = Wire::new(&server);
    let sent = wire.feed(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n");
    assert_eq!(statuses(&sent), [400]);
}

#[test]
fn a_client_that_leaves_in_a_body_is_counted() {
    let server = server(true);
    let mut wire = Wire::new(&server);
    wire.feed(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab");
    wire.eof();
    drop(wire.into_end());
    assert_eq!(counter(&*server, "clients_gone"), 1);
}

#[test]
fn a_body_costs_no_memory() {
    let limits = Limits { message_bytes_max: 100, assembly_bytes_max: 8192, ..Limits::default() };
    let mut wire = Wire::with_limits(&server(true), limits);
    assert!(wire.feed(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n").is_empty());
    for _ in 0..1000 {
        assert!(wire.unfinished_bytes() == 0 && wire.closed().is_none());
        wire.feed(&[7; 4000]);
    }
    assert_eq!(statuses(&wire.feed(GET.as_bytes())), [200]);
    assert_eq!(wire.slots_in_use(), 0);
}

proptest! {
    #[test]
    fn any_split_gives_the_same_answers(
        kinds in prop::collection::vec(0..5usize, 1..8),
        pieces in prop::collection::vec(1..60usize, 0..80),
        damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let requests = [
            GET,
            "\r\nHEAD /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\nGET / HTTP/",
            "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        ];
        let mut stream: Vec<u8> = kinds.iter().flat_map(|kind| requests[*kind].bytes()).collect();
        if let Some((at, byte)) = damage {
            let at = at.index(stream.len());
            stream[at] = byte;
        }
        let mut whole = Wire::new(&server(true));
        let expected = (whole.feed(&stream), whole.closed());
        let mut cut = Wire::new(&server(true));
        let (mut sent, mut rest) = (Vec::new(), &stream[..]);
        for length in pieces.iter().copied().chain([usize::MAX]) {
            let (piece, behind) = rest.split_at(length.min(rest.len()));
            sent.extend(cut.feed(piece));
            rest = behind;
        }
        if damage.is_none() {
            prop_assert_eq!(statuses(&sent), vec![200; kinds.len()]);
        }
        prop_assert_eq!((sent, cut.closed()), expected);
    }
}

/// Of a stream that another reader takes no more requests are carried out than it finds.
#[test]
fn second_reader_finds_each_request_that_is_carried_out() {
    with_node(3000, 100, (stream(request()), 1..200usize), |node, (stream, step)| {
        let (messages, end) = node.read('q', &stream);
        if end.starts_with("bad") {
            return Ok((0, 0));
        }
        let mut wire = Wire::new(&server(true));
        let mut sent = Vec::new();
        for piece in stream.chunks(step) {
            if wire.closed().is_none() {
                sent.extend(wire.feed(piece));
            }
        }
        let done = statuses(&sent).into_iter().filter(|status| *status == 200).count();
        let shown = format!("{}\nanswered\n{}", stream.escape_ascii(), sent.escape_ascii());
        prop_assert!(done <= messages.len(), "{messages:?} {end}: {shown}");
        Ok((done, messages[..done].iter().filter(|message| !message.ends_with(':')).count()))
    });
}
