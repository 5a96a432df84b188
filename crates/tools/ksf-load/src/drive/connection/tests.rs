//! Events in every phase, by table; and any events in any order, after which all must be accounted for. The protocol is
//! HTTP, whose connections come and go; one that lasts is tested with the work service.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::drive::protocol::Protocol;
use crate::http::tests::{HttpClient, HttpCounters, exchange};
use crate::record::tally::TallyKind;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const LAST_ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
const ENDLESS: &[u8] = b"HTTP/1.1 200 OK\r\n\r\nok";

fn terms(requests: u64, close: CloseBy) -> Terms {
    let life = Life::Renewed { requests, close, connect_timeout_ns: 100 };
    Terms { life, limit: TimeLimit::Reply { progress_bytes: u64::MAX }, timeout_ns: 1000 }
}

fn connection(terms: &Terms, in_flight: usize) -> ClientConnection<HttpClient> {
    let exchange = Arc::new(exchange(terms.close_by()));
    ClientConnection::new(exchange.client(0), RequestTable::new(in_flight, 32, 0), 0)
}

fn record() -> Record<HttpCounters> {
    Record::new(1, true)
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Established,
    Sent,
    Bytes(&'static [u8]),
    BytesAndEnd(&'static [u8]),
    End,
    Error(Errno),
    Expire,
    Ask,
}
use Event::*;

/// What the loop does about an event.
fn on(connection: &mut ClientConnection<HttpClient>, event: Event, cx: &mut Context<'_, HttpCounters>) -> Next {
    let now_ns = cx.now_ns;
    match event {
        Established => connection.established(cx),
        Sent => connection.sent(1, true, cx),
        Bytes(bytes) => return connection.received(bytes, 0, false, cx).1,
        BytesAndEnd(bytes) => return connection.received(bytes, 0, true, cx).1,
        End => return connection.ended(cx),
        Error(errno) => return connection.error(errno, cx),
        Expire => return connection.expire(cx),
        Ask => drop(connection.issue(&(), now_ns, cx).len()),
    }
    Next::Wait
}

/// Opens a connection for its first request.
fn open(connection: &mut ClientConnection<HttpClient>, start_ns: u64, cx: &mut Context<'_, HttpCounters>) {
    connection.open(0, start_ns, cx);
    connection.issue(&(), start_ns, cx);
}

struct Case {
    connection: ClientConnection<HttpClient>,
    record: Record<HttpCounters>,
    terms: Terms,
    now_ns: u64,
}

impl Case {
    /// A connection whose first request was to start at 10 and was opened at 15.
    fn new(terms: Terms) -> Case {
        let mut case = Case { connection: connection(&terms, 1), record: record(), terms, now_ns: 15 };
        let mut cx = Context { now_ns: 15, terms: &case.terms, record: &mut case.record };
        open(&mut case.connection, 10, &mut cx);
        case
    }

    fn on(&mut self, event: Event) -> Next {
        self.now_ns += if let Expire = event { 10_001 } else { 1 };
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        on(&mut self.connection, event, &mut cx)
    }

    fn check(&self) {
        let connecting = self.connection.phase == Phase::Connecting;
        let open = self.connection.phase != Phase::Closed && !connecting;
        self.record.check(self.connection.in_flight() as u64, connecting.into(), open.into()).unwrap();
    }
}

/// Runs the events; returns the last step and all faults.
#[track_caller]
fn run(terms: Terms, events: &[Event]) -> (Next, String, Record<HttpCounters>) {
    let mut case = Case::new(terms);
    let mut next = Next::Wait;
    for event in events {
        next = case.on(*event);
        case.check();
    }
    (next, case.record.faults.in_words(), case.record)
}

#[test]
fn failures_are_told_by_the_phase_they_came_in() {
    let reset = Error(Errno::CONNRESET);
    let asked_again = [Established, Sent, Bytes(ANSWER), Ask, Sent];
    for (events, failure) in [
        (&[Error(Errno::CONNREFUSED)][..], "1 refused"),
        (&[reset], "1 connect_reset"),
        (&[Error(Errno::HOSTUNREACH)], "1 unreachable"),
        (&[Error(Errno::ADDRNOTAVAIL)], "1 address_exhausted"),
        (&[Error(Errno::MFILE)], "1 local_limit"),
        (&[Error(Errno::INVAL)], "1 other"),
        (&[Expire], "1 connect_timeout"),
        (&[Established, reset], "1 send_reset"),
        (&[Established, Error(Errno::PIPE)], "1 send_reset"),
        (&[Established, Sent, reset], "1 receive_reset"),
        (&[Established, Sent, Error(Errno::TIMEDOUT)], "1 response_timeout"),
        (&[Established, Sent, Bytes(b"HTTP/1.1"), reset], "1 receive_reset"),
        (&[Established, Expire], "1 response_timeout"),
        (&[Established, Sent, Expire], "1 response_timeout"),
        (&[Established, Sent, Bytes(b"HTTP/1.1"), Expire], "1 response_timeout"),
        (&[Established, Sent, End], "1 closed_unanswered"),
        (&[Established, Sent, Bytes(b"HTTP/1.1"), End], "1 closed_early"),
        (&[Established, Sent, BytesAndEnd(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")], "1 closed_early"),
        (&[Established, Sent, Bytes(b"220 smtp\r\n")], "1 bad_response"),
        (&[Established, Sent, BytesAndEnd(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n")], "1 unexpected_status"),
        (&[&asked_again[..], &[End]].concat(), "1 stale"),
        (&[&asked_again[..], &[reset]].concat(), "1 stale"),
        (&[&asked_again[..4], &[Error(Errno::PIPE)]].concat(), "1 stale"),
        (&[&asked_again[..], &[Bytes(b"H"), End]].concat(), "1 closed_early"),
    ] {
        let (next, failures, record) = run(terms(0, CloseBy::Server), events);
        assert_eq!((failures.as_str(), next), (failure, Next::Close), "{events:?}");
        assert_eq!(record.answered + 1, record.started, "{events:?}");
        assert!(record.notes.len() == 1 && !record.is_clean(), "{events:?}");
    }
}

#[test]
fn who_closes_first_is_as_agreed() {
    let upto = [Established, Sent, Bytes(ANSWER)];
    for (close, events, next, ended) in [
        (CloseBy::Server, &[][..], Next::Wait, ""),
        (CloseBy::Server, &[End], Next::Close, "1 by_server"),
        (CloseBy::Server, &[Error(Errno::CONNRESET)], Next::Close, "1 by_server"),
        (CloseBy::Server, &[Expire], Next::Close, "1 by_client"),
        (CloseBy::Client, &[], Next::Close, "1 by_client"),
        (CloseBy::Reset, &[], Next::Reset, "1 by_reset"),
    ] {
        let (got, failures, record) = run(terms(1, close), &[&upto[..], events].concat());
        assert_eq!(
            (got, record.connections.ends.in_words().as_str(), failures.as_str()),
            (next, ended, ""),
            "{close:?} {events:?}"
        );
        assert!(record.is_clean());
        assert_eq!(record.connections.close_timeouts, u64::from(matches!(events, [Expire])));
    }
    // The server's end with the answer's last byte counts, whatever was agreed.
    for close in [CloseBy::Server, CloseBy::Client, CloseBy::Reset] {
        let (next, _, record) = run(terms(1, close), &[Established, Sent, BytesAndEnd(ANSWER)]);
        assert_eq!((next, record.connections.ends.in_words().as_str()), (Next::Close, "1 by_server"));
    }
}

#[test]
fn a_connection_lasts_as_long_as_both_sides_want() {
    let upto = [Established, Sent, Bytes(ANSWER), Ask, Sent];
    let (next, _, record) = run(terms(3, CloseBy::Client), &[&upto[..], &[Bytes(ANSWER)]].concat());
    assert_eq!((next, record.answered), (Next::Room, 2));
    let (next, _, record) = run(terms(2, CloseBy::Client), &[&upto[..], &[Bytes(ANSWER)]].concat());
    assert_eq!((next, record.answered), (Next::Close, 2));
    // The server says it is the last.
    let (next, _, record) = run(terms(0, CloseBy::Client), &[&upto[..], &[Bytes(LAST_ANSWER)]].concat());
    assert_eq!((next, record.answered), (Next::Close, 2));
    // It closes without a word: no failure while nothing is asked.
    let (next, failures, record) = run(terms(0, CloseBy::Client), &[&upto[..3], &[End]].concat());
    assert_eq!((next, failures.as_str(), record.answered), (Next::Close, "", 1));
    assert!(record.is_clean());
}

#[test]
fn the_end_of_the_stream_can_be_the_end_of_the_answer() {
    let (next, failures, record) = run(terms(1, CloseBy::Server), &[Established, Sent, Bytes(ENDLESS), End]);
    assert_eq!((next, failures.as_str(), record.answered), (Next::Close, "", 1));
    assert_eq!(record.connections.ends.in_words(), "1 by_server");
}

#[test]
fn bytes_that_nobody_asked_for_are_surplus() {
    let two: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK";
    for events in [
        &[Established, Sent, Bytes(two)][..],
        &[Established, Sent, BytesAndEnd(two)],
        &[Established, Sent, Bytes(ANSWER), Bytes(b"x")],
    ] {
        for per_connection in [0, 1] {
            let (next, _, record) = run(terms(per_connection, CloseBy::Server), events);
            assert_eq!((next, record.answered, record.connections.surplus), (Next::Close, 1, 1), "{events:?}");
            assert!(!record.is_clean());
        }
    }
}

#[test]
fn latencies_count_from_the_intended_start() {
    // Intended at 10, opened at 15; events at 16, 17, ...
    let head: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
    let (_, _, record) = run(terms(1, CloseBy::Client), &[Established, Sent, Bytes(head), Bytes(b"ok")]);
    let steps = record.steps.unwrap();
    let maxima = [&steps.connect, &steps.first_byte, &record.latencies[0]].map(|latencies| latencies.max_ns);
    assert_eq!(maxima, [6, 8, 9]);
}

#[test]
fn an_early_answer_ends_the_connection() {
    let (next, _, record) = run(terms(0, CloseBy::Server), &[Established, Bytes(ANSWER)]);
    assert_eq!((next, record.answered, record.connections.ends.in_words().as_str()), (Next::Close, 1, "1 by_client"));
}

#[test]
fn what_is_under_way_at_the_end_is_unanswered() {
    for (events, unanswered) in [
        (&[][..], 1),
        (&[Established], 1),
        (&[Established, Sent], 1),
        (&[Established, Sent, Bytes(b"H")], 1),
        (&[Established, Sent, Bytes(ANSWER)], 0),
    ] {
        let mut case = Case::new(terms(0, CloseBy::Reset));
        for event in events {
            case.on(*event);
        }
        let mut cx = Context { now_ns: case.now_ns, terms: &case.terms, record: &mut case.record };
        case.connection.give_up(&mut cx);
        case.check();
        assert_eq!(case.record.unanswered, unanswered, "{events:?}");
        assert_eq!(case.record.is_clean(), unanswered == 0);
    }
}

/// Anything that can happen to a connection.
fn event() -> impl Strategy<Value = Event> {
    let bytes = prop::sample::select(vec![
        ANSWER,
        LAST_ANSWER,
        ENDLESS,
        b"",
        b"H",
        b"TTP/1.1 200 OK\r\n",
        b"Content-Length: 1\r\n\r\n",
        b"x",
        b"nonsense\r\n",
        b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n",
        b"x\r\n0\r\n\r\n",
    ]);
    let errnos = vec![Errno::CONNREFUSED, Errno::CONNRESET, Errno::PIPE, Errno::TIMEDOUT, Errno::MFILE, Errno::INVAL];
    prop_oneof![
        3 => Just(Established),
        3 => Just(Sent),
        4 => bytes.clone().prop_map(Bytes),
        1 => bytes.prop_map(BytesAndEnd),
        1 => Just(End),
        1 => prop::sample::select(errnos).prop_map(Error),
        1 => Just(Expire),
        3 => Just(Ask),
    ]
}

proptest! {
    #[test]
    fn every_request_is_accounted_for_whatever_happens(
        events in prop::collection::vec((0usize..4, event()), 0..200),
        per_connection in 0u64..4,
        in_flight in 1usize..4,
        close in prop::sample::select(vec![CloseBy::Server, CloseBy::Client, CloseBy::Reset]),
    ) {
        let terms = terms(per_connection, close);
        let (mut connections, mut record) = ([(); 4].map(|()| connection(&terms, in_flight)), record());
        let mut begun = 0;
        for (now_ns, (at, event)) in (100..).zip(events) {
            let mut cx = Context { now_ns, terms: &terms, record: &mut record };
            let connection = &mut connections[at];
            let was = connection.phase;
            let next = match (event, was) {
                // What the loop does at an empty place is to open a connection.
                (_, Phase::Closed) => {
                    open(connection, now_ns - 50, &mut cx);
                    begun += 1;
                    Next::Wait
                }
                (Established, Phase::Connecting) => on(connection, event, &mut cx),
                (Sent, Phase::Open) => on(connection, event, &mut cx),
                (Ask, _) if connection.has_room(&terms) => {
                    begun += 1;
                    on(connection, event, &mut cx)
                }
                (Established | Sent | Ask, _) => Next::Wait,
                (BytesAndEnd(bytes), Phase::Connecting) if !bytes.is_empty() => Next::Wait,
                (Expire, _) => {
                    cx.now_ns += 10_000;
                    on(connection, event, &mut cx)
                }
                _ => on(connection, event, &mut cx),
            };
            let closed = connection.phase == Phase::Closed;
            prop_assert_eq!(matches!(next, Next::Close | Next::Reset), closed, "{:?} in {:?}", event, was);
            prop_assert!(next != Next::Room || connection.phase == Phase::Open);
            prop_assert_eq!(record.started, begun);
            let count = |test: &dyn Fn(&ClientConnection<HttpClient>) -> u64| connections.iter().map(test).sum::<u64>();
            let open = |connection: &ClientConnection<HttpClient>| {
                !matches!(connection.phase, Phase::Closed | Phase::Connecting)
            };
            let counts = [
                count(&|connection| connection.in_flight() as u64),
                count(&|connection| u64::from(connection.phase == Phase::Connecting)),
                count(&|connection| u64::from(open(connection))),
            ];
            prop_assert_eq!(record.check(counts[0], counts[1], counts[2]), Ok(()), "{:?} in {:?}", event, was);
        }
        for connection in &mut connections {
            connection.give_up(&mut Context { now_ns: 0, terms: &terms, record: &mut record });
        }
        prop_assert_eq!(record.check(0, 0, 0), Ok(()));
        let failed: u64 = Fault::ALL.iter().map(|kind| record.faults.count(*kind)).sum();
        prop_assert_eq!(failed, record.failed);
        prop_assert_eq!(begun, record.answered + failed + record.unanswered);
    }
}
