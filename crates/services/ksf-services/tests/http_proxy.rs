//! The proxy, without a socket: what it passes on and back, for every split of both streams, and what it does when
//! backends fail.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::common::{Wire, counter};
use crate::node::{METHODS, METHODS_RIGHT, request, stream, with_node};
use ksf::CloseReason;
use ksf::limits::Limits;
use ksf::outgoing::{ExchangeRequest, Failure, HangUp, Upstream};
use ksf::pool::Chunk;
use ksf_proto::http1::unchunked;
use ksf_services::http::Proxy;
use proptest::prelude::*;

const BACKENDS: [&str; 3] = ["10.0.0.1:80", "10.0.0.2:80", "[fd00::3]:80"];

fn proxy(backends: usize, keep_alive: bool) -> Arc<Proxy> {
    let backends = BACKENDS[..backends].iter().map(|backend| backend.parse().unwrap()).collect();
    Arc::new(Proxy::new(backends, keep_alive, 1))
}

fn backend(number: usize) -> SocketAddr {
    BACKENDS[number].parse().unwrap()
}

const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
/// The same, as a backend gets it.
const GET_PASSED: &str = "GET / HTTP/1.1\r\nHost: x\r\nVia: 1.1 ksf\r\n\r\n";

/// A client and the backend it is connected with, played by the test.
struct Meeting {
    client: Wire,
    /// Backends that were dialed, and whether a kept connection would do.
    dialed: Vec<(SocketAddr, bool)>,
    /// What the backend got that was dialed last.
    passed: Vec<u8>,
    /// How the last exchange ended.
    hung_up: Option<bool>,
}

impl Meeting {
    fn new(proxy: &Arc<Proxy>) -> Self {
        Self::with_limits(proxy, Limits::default())
    }

    fn with_limits(proxy: &Arc<Proxy>, limits: Limits) -> Self {
        let client = Wire::with_limits(proxy, limits);
        Self { client, dialed: Vec::new(), passed: Vec::new(), hung_up: None }
    }

    /// The client sends; what it gets.
    fn client(&mut self, bytes: &str) -> String {
        let sent = self.client.feed(bytes.as_bytes());
        self.carry_out();
        text(sent)
    }

    fn upstream(&mut self, event: Upstream) -> String {
        let sent = self.client.upstream(event);
        self.carry_out();
        text(sent)
    }

    /// The backend sends; what the client gets.
    fn backend(&mut self, bytes: &str) -> String {
        self.upstream(Upstream::Received(Chunk::from_vec(bytes.as_bytes().to_vec())))
    }

    fn connected(&mut self, reused: bool) {
        assert_eq!(self.upstream(Upstream::Connected { reused }), "");
    }

    fn carry_out(&mut self) {
        for order in self.client.orders() {
            match order {
                ExchangeRequest::Dial { to, reuse } => {
                    self.dialed.push((to, reuse));
                    self.passed.clear();
                    self.hung_up = None;
                }
                ExchangeRequest::Pass(bytes) => self.passed.extend_from_slice(&bytes),
                ExchangeRequest::HangUp(how) => {
                    assert_eq!(self.hung_up.replace(how == HangUp::Keep), None, "hung up twice")
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn passed(&self) -> &str {
        std::str::from_utf8(&self.passed).unwrap()
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("these tests send text")
}

/// How the proxy ends the head of a response that it puts into chunks.
const IN_CHUNKS: &str = "\r\nVia: 1.1 ksf\r\nTransfer-Encoding: chunked\r\n\r\n";

/// A response with one chunk in place of those that the proxy made of the pieces in which the body arrived.
fn in_one_chunk(got: String) -> String {
    let Some((head, body)) = got.split_once(IN_CHUNKS) else { return got };
    let data = text(unchunked(body.as_bytes()));
    let end = if body.ends_with("\r\n0\r\n\r\n") { "0\r\n\r\n" } else { "" };
    format!("{head}{IN_CHUNKS}{:x}\r\n{data}\r\n{end}", data.len())
}

#[test]
fn a_request_goes_to_a_backend_and_its_answer_to_the_client() {
    let mut meeting = Meeting::new(&proxy(1, true));
    assert_eq!(meeting.client("GET /a?b=c HTTP/1.1\r\nHost: x\r\nConnection: X\r\nX: 1\r\nY: 2\r\n\r\n"), "");
    assert_eq!(meeting.dialed, [(backend(0), true)]);
    assert_eq!(meeting.passed(), "GET /a?b=c HTTP/1.1\r\nHost: x\r\nY: 2\r\nVia: 1.1 ksf\r\n\r\n");
    meeting.connected(false);
    let answer = meeting.backend("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nKeep-Alive: 9\r\n\r\nhello");
    assert_eq!(answer, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nVia: 1.1 ksf\r\n\r\nhello");
    assert_eq!((meeting.hung_up, meeting.client.closed()), (Some(true), None));
    // The next request of the same client.
    assert_eq!(meeting.client(GET), "");
    assert_eq!(meeting.passed(), GET_PASSED);
}

/// What a client sends, what the backend gets, what the backend sends, what the client gets.
struct Exchange {
    name: &'static str,
    request: &'static str,
    passed: &'static str,
    answer: &'static str,
    returned: &'static str,
    /// The backend ends the connection behind its answer.
    ends: bool,
    /// Both connections may serve another exchange.
    client_stays: bool,
    backend_stays: bool,
}

/// A GET after which both connections stay.
const STAYS: Exchange = Exchange {
    name: "",
    request: GET,
    passed: GET_PASSED,
    answer: "",
    returned: "",
    ends: false,
    client_stays: true,
    backend_stays: true,
};

const EXCHANGES: [Exchange; 10] = [
    Exchange {
        name: "a body with a length",
        request: "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nGET / HTT",
        passed: "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nVia: 1.1 ksf\r\n\r\nGET / HTT",
        answer: "HTTP/1.1 201 Created\r\nContent-Length: 3\r\n\r\n\r\n\r",
        returned: "HTTP/1.1 201 Created\r\nContent-Length: 3\r\nVia: 1.1 ksf\r\n\r\n\r\n\r",
        ..STAYS
    },
    Exchange {
        name: "chunks both ways",
        request: "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n",
        passed: "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nVia: 1.1 ksf\r\n\r\n\
                 3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n",
        answer: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        returned: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nVia: 1.1 ksf\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        ..STAYS
    },
    Exchange {
        name: "an answer until the end of the connection",
        answer: "HTTP/1.0 200 OK\r\n\r\nall there is",
        returned: "HTTP/1.1 200 OK\r\nVia: 1.1 ksf\r\nTransfer-Encoding: chunked\r\n\r\n\
                   c\r\nall there is\r\n0\r\n\r\n",
        ends: true,
        backend_stays: false,
        ..STAYS
    },
    Exchange {
        name: "the same to a client of HTTP/1.0, which knows no chunks",
        request: "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        passed: "GET / HTTP/1.0\r\nVia: 1.1 ksf\r\nConnection: keep-alive\r\n\r\n",
        answer: "HTTP/1.0 200 OK\r\n\r\nall there is",
        returned: "HTTP/1.1 200 OK\r\nVia: 1.1 ksf\r\nConnection: close\r\n\r\nall there is",
        ends: true,
        client_stays: false,
        backend_stays: false,
    },
    Exchange {
        name: "HEAD, which has a length and no body",
        request: "HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
        passed: "HEAD / HTTP/1.1\r\nHost: x\r\nVia: 1.1 ksf\r\n\r\n",
        answer: "HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n",
        returned: "HTTP/1.1 200 OK\r\nContent-Length: 999\r\nVia: 1.1 ksf\r\n\r\n",
        ..STAYS
    },
    Exchange {
        name: "204, which has no body",
        answer: "HTTP/1.1 204 No Content\r\n\r\n",
        returned: "HTTP/1.1 204 No Content\r\nVia: 1.1 ksf\r\n\r\n",
        ..STAYS
    },
    Exchange {
        name: "304, which has a length and no body",
        answer: "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
        returned: "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nVia: 1.1 ksf\r\n\r\n",
        ..STAYS
    },
    Exchange {
        name: "interim answers in front",
        answer: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n\
                 HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nz",
        returned: "HTTP/1.1 100 Continue\r\nVia: 1.1 ksf\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\
                   Via: 1.1 ksf\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\nVia: 1.1 ksf\r\n\r\nz",
        ..STAYS
    },
    Exchange {
        name: "a client of HTTP/1.0 that keeps its connection, which knows no interim answers",
        request: "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        passed: "GET / HTTP/1.0\r\nVia: 1.1 ksf\r\nConnection: keep-alive\r\n\r\n",
        answer: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab",
        returned: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nVia: 1.1 ksf\r\nConnection: keep-alive\r\n\r\nab",
        backend_stays: false,
        ..STAYS
    },
    Exchange {
        name: "a backend that closes, to a client that goes on",
        answer: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab",
        returned: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nVia: 1.1 ksf\r\n\r\nab",
        ends: true,
        backend_stays: false,
        ..STAYS
    },
];

/// Both streams in two pieces, cut at every byte; and byte by byte.
#[test]
fn every_split_of_both_streams_passes_the_same() {
    for exchange in &EXCHANGES {
        let Exchange { name, request, passed, answer, returned, ends, client_stays, backend_stays } = exchange;
        let splits = |text: &'static str| {
            let twice = (0..text.len()).map(move |at| vec![&text[..at], &text[at..]]);
            twice.chain([text.split_inclusive(|_| true).collect()]).collect::<Vec<_>>()
        };
        let (requests, answers) = (splits(request), splits(answer));
        for at in 0..requests.len().max(answers.len()) {
            let proxy = proxy(1, true);
            let mut meeting = Meeting::new(&proxy);
            let mut got = String::new();
            for piece in &requests[at % requests.len()] {
                got += &meeting.client(piece);
            }
            assert_eq!((meeting.passed(), &*got), (*passed, ""), "{name}, split {at}");
            meeting.connected(at % 2 == 0);
            for piece in &answers[at % answers.len()] {
                got += &meeting.backend(piece);
            }
            if *ends {
                got += &meeting.upstream(Upstream::Ended);
            }
            assert_eq!(in_one_chunk(got), *returned, "{name}, split {at}");
            assert_eq!(meeting.hung_up, Some(*backend_stays), "{name}, split {at}");
            let closed = (!client_stays).then_some(CloseReason::Service);
            assert_eq!(meeting.client.closed(), closed, "{name}, split {at}");
            assert_eq!(meeting.dialed.len(), 1, "{name}");
            assert_eq!(meeting.client.slots_in_use(), 0, "{name}");
            drop(meeting.client.into_end());
            assert_eq!(counter(&*proxy, "clients_gone"), 0, "{name}");
        }
    }
}

#[test]
fn pipelined_requests_are_asked_one_by_one_and_answered_in_order() {
    let mut meeting = Meeting::new(&proxy(3, true));
    let second = "POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(meeting.client(&format!("{GET}{second}{GET}")), "");
    assert_eq!((meeting.dialed.len(), meeting.passed()), (1, GET_PASSED));
    for (number, body) in ["one", "two", "end"].into_iter().enumerate() {
        meeting.connected(false);
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n";
        let returned = meeting.backend(&format!("{head}\r\n{body}"));
        assert_eq!(returned, format!("{head}Via: 1.1 ksf\r\n\r\n{body}"));
        // The next one was asked for in the same moment, of the next backend.
        let asked = (number + 2).min(3);
        assert_eq!(meeting.dialed.len(), asked);
        if number == 0 {
            let passed = "POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nVia: 1.1 ksf\r\n\r\nabc";
            assert_eq!(meeting.passed(), passed);
        }
    }
    assert_eq!(meeting.dialed, [0, 1, 2].map(|number| (backend(number), true)));
    assert!(meeting.client.closed().is_none());
}

#[test]
fn backends_take_turns_over_all_connections() {
    let proxy = proxy(3, false);
    for turn in 0..7 {
        let mut meeting = Meeting::new(&proxy);
        meeting.client(GET);
        assert_eq!(meeting.dialed, [(backend(turn % 3), true)]);
    }
    assert_eq!(counter(&*proxy, "requests"), 7);
}

#[test]
fn without_keep_alive_the_answer_ends_the_connection() {
    for (keep_alive, request, stays) in [
        (true, GET, true),
        (false, GET, false),
        (true, "GET / HTTP/1.0\r\n\r\n", false),
        (true, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", false),
    ] {
        let mut meeting = Meeting::new(&proxy(1, keep_alive));
        meeting.client(&format!("{request}{GET}"));
        meeting.connected(false);
        let answer = meeting.backend("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(answer.contains("Connection: close"), !stays, "{answer:?}");
        assert_eq!(meeting.client.closed().is_none(), stays);
        assert_eq!(meeting.dialed.len(), if stays { 2 } else { 1 }, "what is behind the last request is not asked");
    }
}

/// Every backend fails in the same way: what the client gets, how many were asked, and what is counted.
#[test]
fn a_failure_is_answered_with_its_status_and_counted() {
    let post = "POST / HTTP/1.1\r\nHost: x\r\n\r\n";
    for (failure, request, connects, status, asked, counted) in [
        // A GET may be repeated whenever no answer came, a POST if it never left.
        (Failure::Refused, GET, false, 502, 4, "backend_refused"),
        (Failure::Refused, post, false, 502, 4, "backend_refused"),
        (Failure::Unreachable, GET, false, 502, 4, "backend_unreachable"),
        (Failure::ConnectTimeout, post, false, 504, 4, "backend_connect_timeouts"),
        (Failure::Reset, GET, true, 502, 4, "backend_resets"),
        (Failure::Reset, post, true, 502, 1, "backend_resets"),
        // Who is slow is not asked again: the request may be what makes it slow.
        (Failure::Silent, GET, true, 504, 1, "backend_silent"),
        (Failure::NotTaken, GET, true, 504, 1, "backend_not_taken"),
        (Failure::NoResources, GET, false, 503, 1, "no_resources"),
    ] {
        let proxy = proxy(3, true);
        let mut meeting = Meeting::new(&proxy);
        meeting.client(request);
        let mut got = String::new();
        for _ in 0..asked {
            assert_eq!(got, "", "{failure:?}: answered too early");
            if connects {
                meeting.connected(false);
            }
            got = meeting.upstream(Upstream::Failed(failure));
        }
        assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{failure:?}: {got:?}");
        assert!(got.ends_with("Content-Length: 0\r\nConnection: close\r\n\r\n"), "{got:?}");
        assert_eq!(meeting.client.closed(), Some(CloseReason::Service));
        let backends: Vec<_> = meeting.dialed.iter().map(|(to, _)| *to).collect();
        assert_eq!(backends, (0..asked).map(|turn| backend(turn % 3)).collect::<Vec<_>>(), "{failure:?}");
        // A kept connection is tried once, and never again for the same request.
        assert!(meeting.dialed.iter().enumerate().all(|(at, (_, reuse))| *reuse == (at == 0)));
        assert_eq!(counter(&*proxy, counted), asked as u64);
        assert_eq!(counter(&*proxy, "repeated"), asked as u64 - 1);
        let answered = match status {
            502 => "bad_gateway",
            503 => "unavailable",
            _ => "gateway_timeout",
        };
        assert_eq!(counter(&*proxy, answered), 1);
    }
}

#[test]
fn the_next_backend_answers_when_the_first_does_not() {
    let proxy = proxy(2, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client(GET);
    // A kept connection that the backend had closed, and a new one to the other.
    meeting.connected(true);
    assert_eq!(meeting.upstream(Upstream::Ended), "");
    assert_eq!(meeting.dialed, [(backend(0), true), (backend(1), false)]);
    assert_eq!(meeting.passed(), GET_PASSED);
    meeting.connected(false);
    let answer = meeting.backend("HTTP/1.1 204 No Content\r\n\r\n");
    assert_eq!(answer, "HTTP/1.1 204 No Content\r\nVia: 1.1 ksf\r\n\r\n");
    assert_eq!((meeting.hung_up, counter(&*proxy, "repeated")), (Some(true), 1));
}

#[test]
fn a_request_whose_body_is_gone_is_not_repeated() {
    let proxy = proxy(2, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client("PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc");
    let got = meeting.upstream(Upstream::Failed(Failure::Refused));
    assert!(got.starts_with("HTTP/1.1 502 "), "{got:?}");
    assert_eq!(meeting.dialed.len(), 1);
    // The rest of the body is not read as a request.
    assert_eq!(meeting.client("def"), "");
    assert_eq!(counter(&*proxy, "bad_requests"), 0);
}

#[test]
fn an_answer_that_makes_no_sense_is_a_bad_gateway() {
    let endless = format!("HTTP/1.1 200 OK\r\nA: {}", "x".repeat(70_000));
    for answer in [
        "nonsense\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        "\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: b\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\n",
        &endless,
    ] {
        for step in [answer.len(), 1000, 1] {
            let proxy = proxy(2, true);
            let mut meeting = Meeting::new(&proxy);
            meeting.client(GET);
            meeting.connected(false);
            let mut got = String::new();
            for piece in answer.as_bytes().chunks(step) {
                got += &meeting.backend(std::str::from_utf8(piece).unwrap());
            }
            assert!(got.starts_with("HTTP/1.1 502 ") && got.matches("HTTP/").count() == 1, "{answer:.40}: {got:.200}");
            assert_eq!((meeting.hung_up, meeting.dialed.len()), (Some(false), 1), "{answer:.40}");
            assert_eq!(counter(&*proxy, "backend_malformed"), 1);
            assert!(meeting.client.closed().is_some());
        }
    }
    // What cannot be passed to a client of HTTP/1.0.
    let mut meeting = Meeting::new(&proxy(1, true));
    meeting.client("GET / HTTP/1.0\r\n\r\n");
    let got = meeting.backend("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    assert!(got.starts_with("HTTP/1.1 502 "), "{got}");
}

/// A backend that sends interim answers without end costs a bounded number of them, however they arrive.
#[test]
fn interim_answers_of_one_exchange_are_bounded() {
    let interim = "HTTP/1.1 100 C\r\n\r\n";
    let stream = interim.repeat(3600);
    for (request, passed) in [(GET, 16), ("GET / HTTP/1.0\r\n\r\n", 0)] {
        for step in [stream.len(), 1000, 7] {
            let proxy = proxy(2, true);
            let mut meeting = Meeting::new(&proxy);
            meeting.client(request);
            meeting.connected(false);
            let pieces = stream.as_bytes().chunks(step);
            let got: String = pieces.map(|piece| meeting.backend(std::str::from_utf8(piece).unwrap())).collect();
            assert_eq!((got.matches(" 100 ").count(), got.matches(" 502 ").count()), (passed, 1), "by {step}");
            assert_eq!((meeting.hung_up, meeting.dialed.len()), (Some(false), 1), "by {step}");
            assert_eq!(counter(&*proxy, "backend_malformed"), 1);
            assert!(meeting.client.closed().is_some());
        }
    }
    // As many as may be, and those of each exchange by themselves.
    let mut meeting = Meeting::new(&proxy(1, true));
    for _ in 0..2 {
        meeting.client(GET);
        meeting.connected(false);
        let got = meeting.backend(&format!("{}HTTP/1.1 204 No Content\r\n\r\n", interim.repeat(16)));
        assert_eq!((got.matches(" 100 ").count(), got.matches(" 204 ").count()), (16, 1), "{got}");
        assert_eq!(meeting.hung_up, Some(true));
    }
}

/// A part of an answer's head, which does not end.
fn half_head(bytes: usize) -> String {
    format!("{:x<bytes$}", "HTTP/1.1 200 OK\r\nA: ")
}

#[test]
fn kept_heads_are_counted_until_they_are_passed_on() {
    let limits = Limits { header_bytes_max: 64 << 10, ..Limits::default() };
    let mut meeting = Meeting::with_limits(&proxy(1, true), limits);
    // That of a request is kept for another backend, until an answer begins.
    meeting.client(&format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(60_000)));
    let passed_bytes = meeting.passed.len();
    let counted_bytes = meeting.client.session_bytes();
    assert!((passed_bytes..=2 * passed_bytes).contains(&counted_bytes), "{counted_bytes} of {passed_bytes}");
    meeting.connected(false);
    // That of an answer is kept until it is whole, with the memory that it takes.
    for (sent_bytes, piece) in half_head(60_000).as_bytes().chunks(1000).enumerate() {
        meeting.backend(std::str::from_utf8(piece).unwrap());
        let (kept_bytes, counted_bytes) = ((sent_bytes + 1) * 1000, meeting.client.session_bytes());
        assert!((kept_bytes..2 * kept_bytes + 32).contains(&counted_bytes), "{counted_bytes} of {kept_bytes}");
    }
    let got = meeting.backend("\r\nContent-Length: 2\r\n\r\na");
    assert!(got.len() > 60_000 && got.ends_with("\r\n\r\na"));
    assert_eq!(meeting.client.session_bytes(), 0, "a body is not kept");
    meeting.backend("b");
    assert_eq!(meeting.hung_up, Some(true));
    // A request that cannot be repeated is not kept.
    meeting.client("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n");
    assert!(meeting.client.session_bytes() > 0);
    meeting.client("half");
    assert_eq!(meeting.client.session_bytes(), 0);
    meeting.upstream(Upstream::Failed(Failure::Refused));
    assert!(meeting.client.closed().is_some());
}

/// Limit of a shard, half of which is for sessions.
const SMALL_BYTES_MAX: usize = 32 << 10;

fn small() -> Limits {
    Limits { shard_bytes_max: SMALL_BYTES_MAX, header_bytes_max: 64 << 10, ..Limits::default() }
}

#[test]
fn answer_head_without_room_is_refused() {
    let proxy = proxy(2, true);
    let mut meeting = Meeting::with_limits(&proxy, small());
    meeting.client(GET);
    meeting.connected(false);
    let mut got = String::new();
    for piece in half_head(60_000).as_bytes().chunks(1000) {
        got += &meeting.backend(std::str::from_utf8(piece).unwrap());
        assert!(meeting.client.session_bytes() <= SMALL_BYTES_MAX / 2);
    }
    assert!(got.starts_with("HTTP/1.1 503 ") && got.matches("HTTP/").count() == 1, "{got:.200}");
    assert_eq!((meeting.hung_up, meeting.dialed.len()), (Some(false), 1));
    assert_eq!((counter(&*proxy, "no_resources"), counter(&*proxy, "unavailable")), (1, 1));
    assert!(meeting.client.closed().is_some() && meeting.client.session_bytes() == 0);
    // One that comes whole is not kept.
    let mut meeting = Meeting::with_limits(&proxy, small());
    meeting.client(GET);
    meeting.connected(false);
    let got = meeting.backend(&format!("{}\r\nContent-Length: 2\r\n\r\nab", half_head(40_000)));
    assert!(got.ends_with("\r\n\r\nab") && meeting.hung_up == Some(true));
}

/// A long head becomes a reply that its client may not read: it needs room among the replies, too. A short one does not.
#[test]
fn answer_head_behind_unread_replies_is_short_or_refused() {
    for (head_bytes, status) in [(4000, "200"), (10_000, "503")] {
        let proxy = proxy(1, true);
        let mut meeting = Meeting::with_limits(&proxy, small());
        meeting.client(&format!("{GET}{GET}"));
        meeting.connected(false);
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 24000\r\n\r\n{}", "x".repeat(24_000));
        let received = |bytes: String| Upstream::Received(Chunk::from_vec(bytes.into_bytes()));
        meeting.client.upstream_unread(received(answer));
        meeting.carry_out();
        assert_eq!(meeting.dialed.len(), 2, "the next request is with a backend");
        meeting.client.upstream_unread(received(half_head(head_bytes)));
        let got = meeting.backend("\r\nContent-Length: 0\r\n\r\n");
        let (_, second) = got.rsplit_once("HTTP/1.1 ").unwrap();
        assert!(second.starts_with(status), "{head_bytes}: {second:.100}");
    }
}

#[test]
fn request_head_without_room_is_passed_and_not_repeated() {
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(20_000));
    for (request, dialed) in [(&*long, 1), (GET, 3)] {
        let mut meeting = Meeting::with_limits(&proxy(2, true), small());
        meeting.client(request);
        assert!(meeting.passed.len() >= request.len() && meeting.client.session_bytes() < 4096);
        let mut got = String::new();
        while got.is_empty() {
            got = meeting.upstream(Upstream::Failed(Failure::Refused));
        }
        assert!(got.starts_with("HTTP/1.1 502 "), "{got}");
        assert_eq!(meeting.dialed.len(), dialed);
    }
}

/// Framing where there is no body is not passed on, and what follows it is no answer to the next request.
#[test]
fn forbidden_framing_is_dropped_and_ends_the_backend_connection() {
    for (answer, returned, backend_stays) in [
        (
            "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 204 No Content\r\nVia: 1.1 ksf\r\n\r\n",
            true,
        ),
        (
            "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
            "HTTP/1.1 204 No Content\r\nVia: 1.1 ksf\r\n\r\n",
            false,
        ),
        (
            "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 204 No Content\r\nVia: 1.1 ksf\r\n\r\n",
            false,
        ),
        (
            "HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 103 Early Hints\r\nVia: 1.1 ksf\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\nVia: 1.1 ksf\r\n\r\n",
            false,
        ),
        (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nVia: 1.1 ksf\r\n\r\n0\r\n\r\n",
            false,
        ),
    ] {
        let mut meeting = Meeting::new(&proxy(1, true));
        meeting.client(GET);
        meeting.connected(false);
        assert_eq!(meeting.backend(answer), returned, "{answer:?}");
        assert_eq!(meeting.hung_up, Some(backend_stays), "{answer:?}");
        assert!(meeting.client.closed().is_none());
    }
}

#[test]
fn options_and_trace_pass_as_many_proxies_as_they_may() {
    for (method, status) in [("OPTIONS", 200), ("TRACE", 405)] {
        let mut meeting = Meeting::new(&proxy(1, true));
        let got = meeting.client(&format!("{method} / HTTP/1.1\r\nHost: x\r\nMax-Forwards: 0\r\n\r\n{GET}"));
        assert!(got.starts_with(&format!("HTTP/1.1 {status} ")) && got.contains("\r\nAllow: "), "{got}");
        assert!(meeting.dialed.is_empty() && meeting.client.closed().is_some());
        let mut meeting = Meeting::new(&proxy(1, true));
        meeting.client(&format!("{method} / HTTP/1.1\r\nHost: x\r\nMax-Forwards: 3\r\n\r\n"));
        let passed = format!("{method} / HTTP/1.1\r\nHost: x\r\nMax-Forwards: 2\r\nVia: 1.1 ksf\r\n\r\n");
        assert_eq!(meeting.passed(), passed);
    }
}

#[test]
fn target_in_absolute_form_is_passed_as_a_path_and_its_host() {
    let mut meeting = Meeting::new(&proxy(1, true));
    meeting.client("GET http://real:81/a?b HTTP/1.1\r\nHost: other\r\n\r\n");
    assert_eq!(meeting.passed(), "GET /a?b HTTP/1.1\r\nHost: real:81\r\nVia: 1.1 ksf\r\n\r\n");
}

/// Whatever addresses a client or a backend names.
#[test]
fn a_proxy_connects_to_its_backends_only() {
    let mut meeting = Meeting::new(&proxy(2, true));
    for (head, goes) in [
        ("GET http://192.0.2.9:81/a HTTP/1.1\r\nHost: 192.0.2.9:81\r\n", true),
        ("GET / HTTP/1.1\r\nHost: 192.0.2.9:81\r\n", true),
        ("GET //192.0.2.9:81/ HTTP/1.1\r\nHost: x\r\n", true),
        ("GET / HTTP/1.1\r\nHost: x\r\nForwarded: host=192.0.2.9\r\nX-Forwarded-Host: 192.0.2.9\r\n", true),
        ("OPTIONS http://192.0.2.9:81 HTTP/1.1\r\nHost: 192.0.2.9:81\r\n", true),
        ("CONNECT 192.0.2.9:81 HTTP/1.1\r\nHost: 192.0.2.9:81\r\n", false),
    ] {
        let before = meeting.dialed.len();
        let told = meeting.client(&format!("{head}\r\n"));
        assert_eq!((meeting.dialed.len() - before, told.is_empty()), (usize::from(goes), goes), "{head}: {told}");
        if goes {
            meeting.connected(false);
            let redirect = "HTTP/1.1 307 x\r\nLocation: http://192.0.2.9:81/\r\nContent-Length: 0\r\n\r\n";
            assert!(meeting.backend(redirect).starts_with("HTTP/1.1 307 "), "{head}");
        }
        let to: Vec<SocketAddr> = meeting.dialed.iter().map(|(to, _)| *to).collect();
        assert!(to.iter().all(|to| [backend(0), backend(1)].contains(to)), "{head}: {to:?}");
    }
}

#[test]
fn request_behind_the_last_chunk_is_no_trailer() {
    let head = "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    for body in
        ["0\r\nGET /smug HTTP/1.1\r\nHost: y\r\n\r\n", "0\r\nHost: y\r\n\r\n", "1;\nx\r\na\r\n0\r\n\r\n", "0 \r\n\r\n"]
    {
        let stream = format!("{head}{body}");
        for step in [1, stream.len()] {
            let mut meeting = Meeting::new(&proxy(1, true));
            let got: String = stream
                .as_bytes()
                .chunks(step)
                .map(|piece| meeting.client(std::str::from_utf8(piece).unwrap()))
                .collect();
            assert!(got.starts_with("HTTP/1.1 400 ") && meeting.hung_up == Some(false), "{body:?} by {step}: {got}");
            assert!(!meeting.passed().contains("smug") && !meeting.passed().contains(": y"), "{body:?} by {step}");
        }
    }
}

#[test]
fn a_backend_that_breaks_off_ends_the_client_early() {
    for (what, rest) in [
        (Upstream::Failed(Failure::Reset), ""),
        (Upstream::Failed(Failure::Silent), ""),
        (Upstream::Ended, ""),
        (Upstream::Ended, "4\r\nabc"),
        (Upstream::Ended, "0\r\n"),
    ] {
        let proxy = proxy(2, true);
        let mut meeting = Meeting::new(&proxy);
        meeting.client(&format!("{GET}{GET}"));
        meeting.connected(false);
        let head = if rest.is_empty() { "Content-Length: 10" } else { "Transfer-Encoding: chunked" };
        let rest = if rest.is_empty() { "half" } else { rest };
        let answer = meeting.backend(&format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{rest}"));
        assert!(answer.ends_with(rest) && meeting.client.closed().is_none());
        assert_eq!(meeting.upstream(what), "", "nothing may look like the rest");
        assert_eq!(meeting.client.closed(), Some(CloseReason::Service));
        assert_eq!((meeting.dialed.len(), counter(&*proxy, "backend_truncated")), (1, 1));
    }
}

/// Without a length or chunks of the backend, the last chunk or the orderly end of the connection tells that a response is
/// whole: the client gets neither before the backend has ended in order.
#[test]
fn response_without_a_length_is_whole_or_visibly_cut_short() {
    const HALF: &str = "HTTP/1.1 200 OK\r\n\r\nhalf";
    for (request, returned, last_chunk) in [
        (GET, format!("HTTP/1.1 200 OK{IN_CHUNKS}4\r\nhalf\r\n"), "0\r\n\r\n"),
        ("GET / HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK\r\nVia: 1.1 ksf\r\nConnection: close\r\n\r\nhalf".to_owned(), ""),
    ] {
        let ends_by_close = last_chunk.is_empty();
        let half = || {
            let proxy = proxy(1, true);
            let mut meeting = Meeting::new(&proxy);
            meeting.client(request);
            meeting.connected(false);
            assert_eq!(meeting.backend(HALF), returned);
            // Whatever ends the connection now, a stop of the server for instance.
            assert_eq!(meeting.client.needs_reset(), ends_by_close, "{request:?}");
            (proxy, meeting)
        };
        let (_, mut whole) = half();
        assert_eq!(whole.upstream(Upstream::Ended), last_chunk);
        assert_eq!(whole.client.closed(), ends_by_close.then_some(CloseReason::Service), "{request:?}");
        assert!(!whole.client.needs_reset(), "{request:?}");
        for failure in [Failure::Reset, Failure::Silent] {
            let (proxy, mut cut_short) = half();
            assert_eq!(cut_short.upstream(Upstream::Failed(failure)), "", "nothing may look like the rest");
            assert_eq!(cut_short.client.closed(), Some(CloseReason::Service), "{request:?}");
            assert_eq!(cut_short.client.needs_reset(), ends_by_close, "{request:?}, {failure:?}");
            assert_eq!(counter(&*proxy, "backend_truncated"), 1);
        }
        // A whole response that its client has not read may be lost until it is sent.
        let mut unread = Meeting::new(&proxy(1, true));
        unread.client(request);
        unread.connected(false);
        unread.client.upstream_unread(Upstream::Received(Chunk::from_vec(HALF.into())));
        unread.client.upstream_unread(Upstream::Ended);
        assert!(unread.client.needs_reset(), "{request:?}");
        assert_eq!(text(unread.client.set_time_ms(1)), format!("{returned}{last_chunk}"));
        assert!(!unread.client.needs_reset(), "{request:?}");
    }
}

/// The client ends its own direction in its request, and so the exchange.
#[test]
fn early_response_without_a_length_is_visibly_cut_short() {
    let mut meeting = Meeting::new(&proxy(1, true));
    meeting.client("POST / HTTP/1.0\r\nContent-Length: 100\r\n\r\nsome");
    meeting.connected(false);
    assert!(meeting.backend("HTTP/1.1 200 OK\r\n\r\nhalf").ends_with("\r\n\r\nhalf"));
    assert_eq!(meeting.client.eof(), b"");
    meeting.carry_out();
    assert_eq!(meeting.hung_up, Some(false));
    assert!(meeting.client.needs_reset());
}

#[test]
fn a_backend_that_breaks_off_in_its_head_is_a_bad_gateway() {
    let proxy = proxy(2, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client(GET);
    meeting.connected(false);
    assert_eq!(meeting.backend("HTTP/1.1 200 OK\r\nContent-Le"), "");
    let got = meeting.upstream(Upstream::Ended);
    assert!(got.starts_with("HTTP/1.1 502 "), "{got}");
    assert_eq!((meeting.dialed.len(), counter(&*proxy, "backend_truncated")), (1, 1));
}

#[test]
fn what_follows_an_answer_is_nobodys() {
    let mut meeting = Meeting::new(&proxy(1, true));
    meeting.client(GET);
    meeting.connected(false);
    let surplus = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nforgotten";
    let answer = meeting.backend(surplus);
    assert!(answer.ends_with("\r\n\r\nab"), "{answer}");
    assert_eq!(meeting.hung_up, Some(false), "a connection out of step must not be kept");
    assert!(meeting.client.closed().is_none());
}

#[test]
fn an_answer_before_the_request_is_over_ends_both() {
    let mut meeting = Meeting::new(&proxy(1, true));
    meeting.client("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nsome");
    meeting.connected(false);
    let answer = meeting.backend("HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno");
    assert!(answer.contains("Connection: close\r\n") && answer.ends_with("no"), "{answer}");
    assert_eq!((meeting.hung_up, meeting.client.closed()), (Some(false), Some(CloseReason::Service)));
}

#[test]
fn bad_requests_are_not_passed() {
    let proxy = proxy(1, true);
    for (bytes, status) in [
        ("nonsense\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(), 400),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 405),
        ("PRI / HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 405),
        ("get / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), 501),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n".to_owned(), 400),
        ("GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/1.1\nHost: a\n\n".to_owned(), 400),
        (format!("PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", u64::MAX), 413),
        (format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "x".repeat(5000)), 431),
        (format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}", "x".repeat(5000)), 431),
    ] {
        let mut meeting = Meeting::new(&proxy);
        let got = meeting.client(&bytes);
        assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{bytes:.60}: {got}");
        assert!(meeting.dialed.is_empty() && meeting.client.closed().is_some());
    }
    assert_eq!(counter(&*proxy, "requests"), 0);
}

/// The head was passed already when the body turns out malformed: the backend's connection ends.
#[test]
fn a_malformed_body_ends_the_exchange() {
    let proxy = proxy(1, true);
    let mut meeting = Meeting::new(&proxy);
    let head = "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(meeting.client(head), "");
    let got = meeting.client("zz\r\n");
    assert!(got.starts_with("HTTP/1.1 400 "), "{got}");
    assert_eq!(meeting.hung_up, Some(false));
    // The same behind the head of an answer, which cannot be taken back.
    let mut meeting = Meeting::new(&proxy);
    meeting.client(head);
    meeting.connected(false);
    assert!(meeting.backend("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").ends_with("half"));
    assert_eq!(meeting.client("zz\r\n"), "");
    assert_eq!((meeting.hung_up, counter(&*proxy, "bad_requests")), (Some(false), 2));
    assert!(meeting.client.closed().is_some());
}

#[test]
fn a_head_that_comes_too_slowly_is_refused() {
    let proxy = proxy(1, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client("GET / HT");
    let got = text(meeting.client.set_time_ms(Limits::default().assembly_timeout_ms + 1));
    assert!(got.starts_with("HTTP/1.1 408 "), "{got}");
    assert_eq!((meeting.client.closed(), counter(&*proxy, "slow_heads")), (Some(CloseReason::AssemblyTimeout), 1));
}

/// A response that nobody asked for would pass for that to the next request.
#[test]
fn empty_lines_behind_a_request_begin_none() {
    let limits = Limits { idle_timeout_ms: 100_000, ..Limits::default() };
    let assembly_timeout_ms = limits.assembly_timeout_ms;
    for (empty, step) in [("\r\n", 2), ("\n", 1), ("\r\n\r\n", 1), ("\r\n", 1)] {
        let mut meeting = Meeting::with_limits(&proxy(1, true), limits.clone());
        let ask = |meeting: &mut Meeting, front: &str| {
            assert_eq!(meeting.client(&format!("{front}{GET}")), "");
            assert_eq!(meeting.passed(), GET_PASSED);
            meeting.connected(false);
            assert!(meeting.backend("HTTP/1.1 204 No Content\r\n\r\n").starts_with("HTTP/1.1 204 "));
        };
        ask(&mut meeting, "");
        for piece in empty.as_bytes().chunks(step) {
            assert_eq!(meeting.client(std::str::from_utf8(piece).unwrap()), "");
        }
        assert_eq!(meeting.client.unfinished_bytes(), 0);
        assert_eq!(text(meeting.client.set_time_ms(assembly_timeout_ms + 1)), "", "{empty:?}");
        assert!(meeting.client.closed().is_none());
        ask(&mut meeting, empty);
        // Nor do they keep a connection for longer than another one.
        assert_eq!(meeting.client(empty), "");
        assert_eq!(text(meeting.client.set_time_ms(assembly_timeout_ms + 2 + limits.idle_timeout_ms)), "");
        assert_eq!(meeting.client.closed(), Some(CloseReason::IdleTimeout), "{empty:?}");
    }
    // There are few of them, however they come.
    let mut meeting = Meeting::with_limits(&proxy(1, true), limits);
    for _ in 0..16 {
        assert_eq!(meeting.client("\r\n"), "");
    }
    assert!(meeting.client("\r\n").starts_with("HTTP/1.1 400 ") && meeting.client.closed().is_some());
}

#[test]
fn a_client_that_ends_its_direction_gets_its_answer() {
    let proxy = proxy(1, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client(GET);
    meeting.connected(false);
    assert!(meeting.client.eof().is_empty() && meeting.client.closed().is_none());
    let answer = meeting.backend("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab");
    assert!(answer.ends_with("ab"), "{answer}");
    assert_eq!(meeting.client.closed(), Some(CloseReason::PeerClosed));
    drop(meeting.client.into_end());
    assert_eq!(counter(&*proxy, "clients_gone"), 0);
}

#[test]
fn half_a_request_is_given_up_with_its_client() {
    let proxy = proxy(1, true);
    let mut meeting = Meeting::new(&proxy);
    meeting.client("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf");
    meeting.connected(false);
    assert!(meeting.client.eof().is_empty());
    meeting.carry_out();
    assert_eq!(meeting.hung_up, Some(false));
    assert!(meeting.client.closed().is_some());
    drop(meeting.client.into_end());
    assert_eq!(counter(&*proxy, "clients_gone"), 1);
}

#[test]
fn a_body_that_waits_for_a_full_backend_is_bounded() {
    let limits = Limits { assembly_bytes_max: 10_000, ..Limits::default() };
    let mut meeting = Meeting::with_limits(&proxy(1, true), limits);
    meeting.client("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n");
    meeting.connected(false);
    let before = meeting.passed.len();
    meeting.client.set_full(true);
    assert!(meeting.client.wants_bytes(), "the end of the stream is to be heard of");
    meeting.client(&"x".repeat(4000));
    assert!(!meeting.client.wants_bytes() && meeting.passed.len() == before);
    meeting.client.set_full(false);
    meeting.carry_out();
    assert_eq!(meeting.passed.len(), before + 4000);
    assert!(meeting.client.wants_bytes() && meeting.client.unfinished_bytes() == 0);
}

proptest! {
    /// Requests in any pieces, answers in any pieces, on one connection: each answer is that of its request.
    #[test]
    fn any_split_of_many_exchanges_passes_the_same(
        kinds in prop::collection::vec(0..EXCHANGES.len(), 1..6),
        pieces in prop::collection::vec(1..70usize, 0..60),
        answer_pieces in prop::collection::vec(1..70usize, 1..40),
    ) {
        // Those that stay, so that the next one is reached.
        let chosen: Vec<_> = kinds.iter().map(|kind| &EXCHANGES[*kind]).filter(|one| one.client_stays).collect();
        let stream: String = chosen.iter().map(|one| one.request).collect();
        let mut meeting = Meeting::new(&proxy(1, true));
        let mut rest = &stream[..];
        for length in pieces.iter().copied().chain([usize::MAX]) {
            let (piece, behind) = rest.split_at(length.min(rest.len()));
            // Who pipelines may be cut short by the limit on unread bytes, not here.
            prop_assert_eq!(meeting.client(piece), "");
            rest = behind;
        }
        let mut lengths = answer_pieces.iter().copied().cycle();
        for (number, one) in chosen.iter().enumerate() {
            prop_assert_eq!(meeting.dialed.len(), number + 1);
            prop_assert_eq!(meeting.passed(), one.passed);
            meeting.connected(number > 0);
            let (mut got, mut rest) = (String::new(), one.answer);
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at(lengths.next().unwrap_or(1).min(rest.len()));
                got += &meeting.backend(piece);
                rest = behind;
            }
            if got.contains(IN_CHUNKS) {
                got += &meeting.upstream(Upstream::Ended);
            }
            prop_assert_eq!(in_one_chunk(got), one.returned);
        }
        prop_assert!(meeting.client.closed().is_none());
        prop_assert_eq!(meeting.client.unfinished_bytes(), 0);
    }

    /// No bytes of a backend make the proxy panic, or send the client more than one head.
    #[test]
    fn any_answer_is_survived(
        at in any::<prop::sample::Index>(), byte in any::<u8>(), kind in 0..EXCHANGES.len(), step in 1..40usize,
    ) {
        let one = &EXCHANGES[kind];
        let mut answer = one.answer.as_bytes().to_vec();
        let at = at.index(answer.len());
        answer[at] = byte;
        let proxy = proxy(1, true);
        let mut meeting = Meeting::new(&proxy);
        meeting.client(one.request);
        meeting.connected(false);
        let mut got = Vec::new();
        for piece in answer.chunks(step) {
            got.extend(meeting.client.upstream(Upstream::Received(Chunk::from_vec(piece.to_vec()))));
        }
        got.extend(meeting.client.upstream(Upstream::Ended));
        meeting.carry_out();
        let heads = got.windows(9).filter(|nine| nine.starts_with(b"HTTP/1.1 ")).count();
        let interim = one.answer.matches("HTTP/1.").count();
        prop_assert!(heads <= interim + 1, "{}", String::from_utf8_lossy(&got));
        let complete = meeting.hung_up == Some(true);
        prop_assert!(complete || meeting.client.closed().is_some() || meeting.hung_up == Some(false)
            || meeting.dialed.len() == 2, "neither answered nor given up");
    }
}

/// Backends get a stream of requests, right and wrong, as another reader understands it: one message in each exchange, and a whole one
/// on a connection that is kept for other clients.
#[test]
fn second_reader_finds_one_message_in_each_exchange() {
    with_node(1000, 100, (stream(request()), 1..200usize, any::<bool>()), |node, (stream, step, is_answered_late)| {
        let mut meeting = Meeting::new(&proxy(1, true));
        let (mut connected, mut counts) = (0, (0, 0));
        let pieces = stream.chunks(step).map(Some).chain([None]);
        for piece in pieces {
            if let Some(piece) = piece.filter(|_| meeting.client.closed().is_none()) {
                meeting.client.feed(piece);
                meeting.carry_out();
            }
            // An answer may have the next exchange begin.
            loop {
                if meeting.dialed.len() > connected {
                    connected = meeting.dialed.len();
                    meeting.upstream(Upstream::Connected { reused: false });
                }
                if connected == 0 || meeting.hung_up.is_some() {
                    break;
                }
                let passed = meeting.passed.clone();
                // The other reader knows the registered methods alone.
                let method = passed.split(|byte| *byte == b' ').next().unwrap();
                if passed.contains(&b' ') && !METHODS[..=METHODS_RIGHT].iter().any(|known| known.as_bytes() == method) {
                    return Ok(counts);
                }
                let (messages, end) = node.read('q', &passed);
                let shown = format!("{}\npassed as\n{}", stream.escape_ascii(), passed.escape_ascii());
                prop_assert!(messages.len() <= 1 && ["end", "part"].contains(&&end[..]), "{messages:?} {end}: {shown}");
                let is_whole = messages.len() == 1 && end == "end";
                let is_last = piece.is_none();
                if !(is_last || is_whole && !is_answered_late) {
                    break;
                }
                meeting.backend("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                let is_kept = meeting.dialed.len() > connected || meeting.hung_up == Some(true);
                prop_assert!(is_whole || !is_kept, "kept in the middle of a message: {shown}");
                if !is_whole {
                    break;
                }
                counts = (counts.0 + 1, counts.1 + usize::from(!messages[0].ends_with(':')));
            }
        }
        Ok(counts)
    });
}
