//! Events in every phase, by table; and any events in any order, after which the books must balance.

use proptest::prelude::*;

use super::*;
use crate::record::tally::Kind;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const LAST_ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
const ENDLESS: &[u8] = b"HTTP/1.1 200 OK\r\n\r\nok";

fn terms(requests_per_connection: u64, close: CloseBy) -> Terms {
    let expected = Expected::default();
    Terms { requests_per_connection, close, connect_timeout_ns: 100, timeout_ns: 1000, expected }
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

struct Case {
    conn: Conn,
    book: Book,
    terms: Terms,
    now_ns: u64,
}

impl Case {
    /// A connection whose first request was to start at 10 and was opened at 15.
    fn new(terms: Terms) -> Case {
        let mut case = Case { conn: Conn::default(), book: Book::new(), terms, now_ns: 15 };
        case.conn.open(10, 15, &case.terms, &mut case.book);
        case
    }

    fn on(&mut self, event: Event) -> Next {
        self.now_ns += 1;
        let Case { conn, book, terms, now_ns } = self;
        match event {
            Established => {
                conn.established(*now_ns, terms, book);
                Next::Wait
            }
            Sent => {
                conn.sent();
                Next::Wait
            }
            Bytes(bytes) => conn.received(bytes, false, *now_ns, terms, book),
            BytesAndEnd(bytes) => conn.received(bytes, true, *now_ns, terms, book),
            End => conn.ended(*now_ns, terms, book),
            Error(errno) => conn.error(errno, *now_ns, book),
            Expire => {
                *now_ns += 10_000;
                conn.expire(*now_ns, book)
            }
            Ask => {
                conn.ask(*now_ns, *now_ns, terms, book);
                Next::Wait
            }
        }
    }

    fn check(&self) {
        let connecting = self.conn.phase == Phase::Connecting;
        let open = self.conn.phase != Phase::Closed && !connecting;
        self.book.check(self.conn.is_asking().into(), connecting.into(), open.into()).unwrap();
    }
}

/// Runs the events; returns the last step and all failures.
#[track_caller]
fn run(terms: Terms, events: &[Event]) -> (Next, String, Book) {
    let mut case = Case::new(terms);
    let mut next = Next::Wait;
    for event in events {
        next = case.on(*event);
        case.check();
    }
    (next, case.book.failures.in_words(), case.book)
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
        let (next, failures, book) = run(terms(0, CloseBy::Server), events);
        assert_eq!((failures.as_str(), next), (failure, Next::Close), "{events:?}");
        assert_eq!(book.answered + 1, book.started, "{events:?}");
        assert!(book.notes.len() == 1 && !book.is_clean(), "{events:?}");
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
        let (got, failures, book) = run(terms(1, close), &[&upto[..], events].concat());
        assert_eq!((got, book.ends.in_words().as_str(), failures.as_str()), (next, ended, ""), "{close:?} {events:?}");
        assert!(book.is_clean());
        assert_eq!(book.close_timeouts, u64::from(matches!(events, [Expire])));
    }
    // The server's end with the answer's last byte counts, whatever was agreed.
    for close in [CloseBy::Server, CloseBy::Client, CloseBy::Reset] {
        let (next, _, book) = run(terms(1, close), &[Established, Sent, BytesAndEnd(ANSWER)]);
        assert_eq!((next, book.ends.in_words().as_str()), (Next::Close, "1 by_server"));
    }
}

#[test]
fn a_connection_lasts_as_long_as_both_sides_want() {
    let upto = [Established, Sent, Bytes(ANSWER), Ask, Sent];
    let (next, _, book) = run(terms(3, CloseBy::Client), &[&upto[..], &[Bytes(ANSWER)]].concat());
    assert_eq!((next, book.answered), (Next::Idle, 2));
    let (next, _, book) = run(terms(2, CloseBy::Client), &[&upto[..], &[Bytes(ANSWER)]].concat());
    assert_eq!((next, book.answered), (Next::Close, 2));
    // The server says it is the last.
    let (next, _, book) = run(terms(0, CloseBy::Client), &[&upto[..], &[Bytes(LAST_ANSWER)]].concat());
    assert_eq!((next, book.answered), (Next::Close, 2));
    // It closes without a word: no failure while nothing is asked.
    let (next, failures, book) = run(terms(0, CloseBy::Client), &[&upto[..3], &[End]].concat());
    assert_eq!((next, failures.as_str(), book.answered), (Next::Close, "", 1));
    assert!(book.is_clean());
}

#[test]
fn the_end_of_the_stream_can_be_the_end_of_the_answer() {
    let (next, failures, book) = run(terms(1, CloseBy::Server), &[Established, Sent, Bytes(ENDLESS), End]);
    assert_eq!((next, failures.as_str(), book.answered), (Next::Close, "", 1));
    assert_eq!(book.ends.in_words(), "1 by_server");
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
            let (next, _, book) = run(terms(per_connection, CloseBy::Server), events);
            assert_eq!((next, book.answered, book.surplus), (Next::Close, 1, 1), "{events:?}");
            assert!(!book.is_clean());
        }
    }
}

#[test]
fn latencies_count_from_the_intended_start() {
    // Intended at 10, opened at 15; events at 16, 17, ...
    let head: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
    let (_, _, book) = run(terms(1, CloseBy::Client), &[Established, Sent, Bytes(head), Bytes(b"ok")]);
    let maxima = [&book.connect, &book.first_byte, &book.response].map(|latencies| latencies.max_ns);
    assert_eq!(maxima, [6, 8, 9]);
}

#[test]
fn an_early_answer_ends_the_connection() {
    let (next, _, book) = run(terms(0, CloseBy::Server), &[Established, Bytes(ANSWER)]);
    assert_eq!((next, book.answered, book.ends.in_words().as_str()), (Next::Close, 1, "1 by_client"));
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
        case.conn.give_up(&case.terms, &mut case.book);
        case.check();
        assert_eq!(case.book.unanswered, unanswered, "{events:?}");
        assert_eq!(case.book.is_clean(), unanswered == 0);
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
        close in prop::sample::select(vec![CloseBy::Server, CloseBy::Client, CloseBy::Reset]),
    ) {
        let terms = terms(per_connection, close);
        let (mut conns, mut book) = ([(); 4].map(|()| Conn::default()), Book::new());
        let mut begun = 0;
        for (now_ns, (at, event)) in (100..).zip(events) {
            let conn = &mut conns[at];
            let was = conn.phase;
            let next = match (event, conn.phase) {
                // What the driver does at an empty place is to open a connection.
                (_, Phase::Closed) => {
                    conn.open(now_ns - 50, now_ns, &terms, &mut book);
                    begun += 1;
                    Next::Wait
                }
                (Established, Phase::Connecting) => {
                    conn.established(now_ns, &terms, &mut book);
                    Next::Wait
                }
                (Established, _) => Next::Wait,
                (Sent, Phase::Sending) => {
                    conn.sent();
                    Next::Wait
                }
                (Sent, _) => Next::Wait,
                (Ask, Phase::Idle) => {
                    conn.ask(now_ns, now_ns, &terms, &mut book);
                    begun += 1;
                    Next::Wait
                }
                (Ask, _) => Next::Wait,
                (Bytes(bytes), _) => conn.received(bytes, false, now_ns, &terms, &mut book),
                (BytesAndEnd(bytes), Phase::Connecting) if !bytes.is_empty() => Next::Wait,
                (BytesAndEnd(bytes), _) => conn.received(bytes, true, now_ns, &terms, &mut book),
                (End, _) => conn.ended(now_ns, &terms, &mut book),
                (Error(errno), _) => conn.error(errno, now_ns, &mut book),
                (Expire, _) => conn.expire(now_ns + 10_000, &mut book),
            };
            prop_assert_eq!(matches!(next, Next::Close | Next::Reset), conn.phase == Phase::Closed, "{:?} in {:?}", event, was);
            prop_assert!(next != Next::Idle || conn.phase == Phase::Idle);
            prop_assert_eq!(book.started, begun);
            let count = |test: &dyn Fn(&Conn) -> bool| conns.iter().filter(|conn| test(conn)).count() as u64;
            let open = |conn: &Conn| !matches!(conn.phase, Phase::Closed | Phase::Connecting);
            let counts = [count(&Conn::is_asking), count(&|conn| conn.phase == Phase::Connecting), count(&open)];
            prop_assert_eq!(book.check(counts[0], counts[1], counts[2]), Ok(()), "{:?} in {:?}", event, was);
        }
        for conn in &mut conns {
            conn.give_up(&terms, &mut book);
        }
        prop_assert_eq!(book.check(0, 0, 0), Ok(()));
        let failed: u64 = Failure::ALL.iter().map(|kind| book.failures.count(*kind)).sum();
        prop_assert_eq!(begun, book.answered + failed + book.unanswered);
    }
}
