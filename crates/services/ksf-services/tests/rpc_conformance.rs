//! Each reply and each refusal of RFC 5531, byte for byte, whichever way the
//! call is cut into fragments and the stream into chunks.
//!
//! The vectors are in `common/vectors.rs`.

use crate::common::vectors::{answerable, fragment, fragments_of, record, service, unanswerable};
use crate::common::{Wire, counter};
use ksf::CloseReason;
use ksf::limits::Limits;
use proptest::prelude::*;

/// Every way of writing the message that a test wants: the name and the bytes.
fn encodings(message: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> =
        (1..=message.len()).map(|len| (format!("fragments of {len}"), fragments_of(message, len))).collect();
    let empty = fragment(false, &[]);
    all.push(("one record".into(), record(message)));
    all.push(("an empty fragment first".into(), [&empty[..], &record(message)].concat()));
    all.push(("an empty fragment last".into(), [fragment(false, message), record(&[])].concat()));
    let among = message.iter().flat_map(|byte| [&empty[..], &fragment(false, &[*byte])].concat());
    all.push(("empty fragments among single bytes".into(), among.chain(record(&[])).collect()));
    // What rpctest -f sends: 1 byte, all but two, 1 byte.
    if let [first, middle @ .., last] = message {
        all.push((
            "three fragments of rpctest -f".into(),
            [fragment(false, &[*first]), fragment(false, middle), record(&[*last])].concat(),
        ));
    }
    all
}

#[test]
fn every_answer_in_every_fragmentation() {
    let service = service();
    for case in answerable() {
        let before = case.counter.map(|name| counter(&*service, name));
        let encodings = encodings(&case.message);
        for (how, stream) in &encodings {
            let mut wire = Wire::new(&service);
            assert_eq!(wire.feed(stream), record(&case.reply), "{}, {how}", case.name);
            assert_eq!(wire.closed(), None, "{}, {how}", case.name);
        }
        let after = case.counter.map(|name| counter(&*service, name));
        assert_eq!(before.map(|n| n + encodings.len() as u64), after, "{}", case.name);
    }
}

#[test]
fn every_answer_in_every_split_of_the_stream() {
    let service = service();
    for case in answerable() {
        let expected = record(&case.reply);
        for stream in [record(&case.message), fragments_of(&case.message, 7)] {
            for at in 0..stream.len() {
                let (head, tail) = stream.split_at(at);
                let mut wire = Wire::new(&service);
                assert_eq!(wire.feed(head), [], "{} split at {at}", case.name);
                assert_eq!(wire.feed(tail), expected, "{} split at {at}", case.name);
            }
            let mut wire = Wire::new(&service);
            assert_eq!(wire.feed_all(stream.chunks(1)), expected, "{} byte by byte", case.name);
            assert_eq!((wire.closed(), wire.slots_in_use()), (None, 0));
        }
    }
}

#[test]
fn unanswerable_messages_close_the_stream_and_are_counted() {
    let service = service();
    let good = &answerable()[0];
    for (message, name) in unanswerable() {
        let before = counter(&*service, name);
        let (call, reply) = (record(&good.message), record(&good.reply));
        let mut wire = Wire::new(&service);
        let sent = wire.feed(&[&call[..], &record(&message), &call].concat());
        assert_eq!(sent, reply, "only what came before {message:02x?} is answered");
        assert_eq!(wire.closed(), Some(CloseReason::Service));
        assert_eq!(counter(&*service, name), before + 1, "{name}");
        assert_eq!(wire.feed(&call), [], "a closing connection answers no more");
    }
}

#[test]
fn records_over_the_limits_close_the_stream_before_they_are_stored() {
    let service = service();
    let limits = || Limits { message_bytes_max: 100, fragments_max: 8, ..Limits::default() };

    let mut wire = Wire::with_limits(&service, limits());
    assert_eq!(wire.feed(&[0xff, 0xff, 0xff, 0xff]), []); // 2 GiB - 1
    assert_eq!(wire.closed(), Some(CloseReason::OversizedMessage));

    let mut wire = Wire::with_limits(&service, limits());
    let halves = [fragment(false, &[0; 60]), fragment(true, &[0; 60])].concat();
    assert_eq!(wire.feed(&halves), []);
    assert_eq!(wire.closed(), Some(CloseReason::OversizedMessage));

    let mut wire = Wire::with_limits(&service, limits());
    assert_eq!(wire.feed(&fragment(false, &[]).repeat(9)), []);
    assert_eq!(wire.closed(), Some(CloseReason::EndlessFragments));
    assert_eq!(wire.slots_in_use(), 0);
}

#[test]
fn half_close_answers_what_was_whole() {
    let service = service();
    let case = &answerable()[0];
    let (call, reply) = (record(&case.message), record(&case.reply));

    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&call.repeat(3)), reply.repeat(3));
    assert_eq!(wire.eof(), []);
    assert_eq!(wire.closed(), Some(CloseReason::PeerClosed));

    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&[&call[..], &call[..20]].concat()), reply);
    wire.eof();
    assert_eq!(wire.closed(), Some(CloseReason::PeerClosedMidMessage));
}

proptest! {
    /// Any calls, fragmented and split in any way, behind each other: the
    /// replies are those of the calls one by one.
    #[test]
    fn pipelined_calls_in_any_split(
        picks in proptest::collection::vec((any::<prop::sample::Index>(), 1usize..80), 1..20),
        cuts in proptest::collection::vec(1usize..200, 1..60),
    ) {
        let cases = answerable();
        let (mut stream, mut expected) = (Vec::new(), Vec::new());
        for (pick, fragment_bytes) in picks {
            let case = &cases[pick.index(cases.len())];
            stream.extend(fragments_of(&case.message, fragment_bytes));
            expected.extend(record(&case.reply));
        }
        let mut wire = Wire::new(&service());
        let (mut sent, mut rest) = (Vec::new(), &stream[..]);
        for cut in cuts.iter().cycle() {
            let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
            sent.extend(wire.feed(chunk));
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(sent, expected);
        prop_assert_eq!((wire.closed(), wire.slots_in_use()), (None, 0));
    }
}
