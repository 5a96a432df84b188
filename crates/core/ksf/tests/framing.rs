//! Any split of a stream gives what the whole stream gives, for every framing; garbage ends in a reason, not in a
//! panic; every limit holds.

use crate::common;
use crate::common::{bytes_of, env, feed, in_slot};
use ksf::connection::Connection;
use ksf::framing::{Delimiter, Endian, Frame, Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::service::ConnKey;
use ksf::{CloseReason, Order, Peer};
use ksf_sim::ideal::{decode, encode};
use proptest::prelude::*;

/// Small enough that random streams meet every one of them.
fn limits() -> Limits {
    Limits { message_bytes_max: 40, fragments_max: 4, header_bytes_max: 48, ..Limits::default() }
}

fn prefixes() -> impl Strategy<Value = LengthPrefix> {
    let endian = prop_oneof![Just(Endian::Big), Just(Endian::Little)];
    (0u8..6, prop_oneof![Just(1u8), Just(2), Just(4), Just(8)], endian, -3i32..20, any::<bool>()).prop_map(
        |(offset, width, endian, adjust, strip)| {
            let offset = if strip { 0 } else { offset };
            LengthPrefix { offset, width, endian, adjust, strip }
        },
    )
}

/// Over two letters, so that a delimiter's beginning is found in front of it all the time.
fn delimiters() -> impl Strategy<Value = Delimiter> {
    prop::collection::vec(prop_oneof![Just(b'a'), Just(b'b')], 1..=8)
        .prop_map(|bytes| Delimiter::new(&bytes).expect("1 to 8 bytes"))
}

fn framings() -> impl Strategy<Value = Framing> {
    prop_oneof![
        Just(Framing::RecordMark),
        prefixes().prop_map(Framing::LengthPrefix),
        delimiters().prop_map(Framing::Delimiter),
        Just(Framing::Delimiter(Delimiter::CRLF)),
        Just(Framing::Delimiter(Delimiter::new(b"\r\r\n").expect("3 bytes"))),
    ]
}

/// A stream that is mostly messages of this framing: bodies over few letters, up to just above the limit, records in
/// fragments (empty ones, too), and now and then bytes that are nothing.
fn streams(framing: Framing) -> impl Strategy<Value = Vec<u8>> {
    let letters = prop_oneof![Just(b'a'), Just(b'b'), Just(b'\r'), Just(b'\n'), any::<u8>()];
    let bodies = prop_oneof![
        4 => prop::collection::vec(letters.clone(), 0..8),
        2 => prop::collection::vec(letters.clone(), 0..44),
        1 => (38usize..44).prop_flat_map(move |length| prop::collection::vec(letters.clone(), length)),
    ];
    let message = (bodies, prop::collection::vec(prop_oneof![Just(0usize), 0usize..20], 0..5))
        .prop_map(move |(body, fragments)| encode(framing, &body, &fragments));
    let part = prop_oneof![
        12 => message,
        1 => prop::collection::vec(any::<u8>(), 1..12),
    ];
    (prop::collection::vec(part, 0..10), 0usize..12).prop_map(|(parts, cut)| {
        let mut stream = parts.concat();
        // Often the last message is cut off.
        stream.truncate(stream.len() - cut.saturating_sub(6).min(stream.len()));
        stream
    })
}

fn chunks() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![Just(vec![1; 1024]), prop::collection::vec(1usize..5, 0..64), prop::collection::vec(1usize..80, 0..32),]
}

/// A search that goes on looks no further back than a delimiter is long: one that stands there is not found.
#[test]
fn resumed_search_for_a_delimiter_does_not_look_back() {
    for bytes in 1..=8 {
        let delimiter = [&b"abcdefg"[..bytes - 1], b"\n"].concat();
        let framing = Framing::Delimiter(Delimiter::new(&delimiter).expect("1 to 8 bytes"));
        let behind = [&b"x".repeat(50)[..], &delimiter].concat();
        for scanned in bytes..40 {
            // The last of them ends where the search may begin.
            let end = scanned - (bytes - 1);
            let stream = [&delimiter.repeat(end / bytes)[..], &b"x".repeat(100)].concat();
            let stream = [&stream[..end], &behind[..]].concat();
            let Ok(Frame::Part(part)) = framing.parse(&stream, scanned) else { panic!("{bytes} bytes from {scanned}") };
            assert_eq!(part.body_bytes, end + 50, "{bytes} bytes from {scanned}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_split_gives_what_the_ideal_gives(
        (framing, stream) in framings().prop_flat_map(|framing| (Just(framing), streams(framing))),
        chunks in chunks(),
    ) {
        let ideal = decode(framing, &limits(), &stream);
        let whole = feed(framing, &limits(), &stream, &[]);
        let split = feed(framing, &limits(), &stream, &chunks);
        prop_assert_eq!(&whole.messages, &ideal.messages);
        prop_assert_eq!(&split.messages, &ideal.messages);
        prop_assert_eq!((whole.end, split.end), (Some(ideal.end), Some(ideal.end)));
        prop_assert_eq!(&split.replies, &whole.replies);
        // The replies are the messages again, so the framing reads them as such.
        let no_limits = Limits { fragments_max: u32::MAX, message_bytes_max: usize::MAX, ..limits() };
        let replies = decode(framing, &no_limits, &whole.replies);
        if framing_keeps_bodies(framing) {
            prop_assert_eq!(replies.messages, ideal.messages);
            prop_assert_eq!(replies.end, CloseReason::PeerClosed);
        }
    }

    #[test]
    fn raw_bytes_come_back_whatever_the_split(
        stream in prop::collection::vec(any::<u8>(), 0..3000),
        chunks in chunks(),
    ) {
        let outcome = feed(Framing::Raw, &limits(), &stream, &chunks);
        prop_assert_eq!(outcome.messages.concat(), stream.clone());
        prop_assert_eq!(outcome.replies, stream);
        prop_assert_eq!(outcome.end, Some(CloseReason::PeerClosed));
    }

    #[test]
    fn garbage_ends_in_a_reason(
        framing in framings(),
        stream in prop::collection::vec(any::<u8>(), 0..600),
        chunks in chunks(),
    ) {
        let ideal = decode(framing, &limits(), &stream);
        let outcome = feed(framing, &limits(), &stream, &chunks);
        prop_assert_eq!(outcome.messages, ideal.messages);
        prop_assert_eq!(outcome.end, Some(ideal.end));
    }

    /// Several peers leave messages unfinished in one environment: together they stay within the limit, and all of the
    /// memory comes back, in whatever order they end and for whatever reason.
    #[test]
    fn memory_for_unfinished_messages_is_bounded_and_returns(
        framing in framings(),
        limit in 0usize..200,
        steps in prop::collection::vec((0usize..6, prop::collection::vec(any::<u8>(), 1..60)), 1..80),
    ) {
        let limits = Limits { assembly_bytes_max: limit, out_queue_bytes_max: 30, ..limits() };
        let mut env = env(limits, 64, 16);
        let service = common::Recorder::new(framing, Order::Free);
        let mut places: Vec<Option<Box<Connection>>> = (0..6).map(|_| None).collect();
        for (at, bytes) in steps {
            let key = ConnKey { index: at as u32, generation: 0 };
            let conn = places[at].get_or_insert_with(|| {
                Connection::new(std::sync::Arc::clone(&service), Peer::Unix, key, env.now).unwrap()
            });
            let chunk = in_slot(&mut env, &bytes);
            conn.receive(chunk, &mut env);
            // Twice the limit, the slots, and for each place a chunk and a message. Each is counted with the 4 KiB that a
            // copy of it takes.
            let most = 2 * limit + 16 * 4096 + 6 * (4096 + 4096);
            prop_assert!(env.budget.input_bytes() <= most, "{} of {most}", env.budget.input_bytes());
            for _ in 0..env.budget.waiting() {
                let Some(key) = env.budget.next_to_proceed(&env.limits) else { break };
                if let Some(conn) = &mut places[key.index as usize] {
                    conn.proceed(&mut env);
                }
            }
            let conn = places[at].as_mut().unwrap();
            if let Some(batch) = conn.take_batch(env.now, &mut env.spares) {
                // This peer takes its replies one chunk late: so some input is put aside.
                let bytes = bytes_of(&batch).len();
                if !bytes.is_multiple_of(3) {
                    conn.sent(bytes, true, &mut env);
                }
            }
            let closing = conn.is_closing();
            if closing || bytes.len().is_multiple_of(7) {
                places[at].take().unwrap().end(&mut env);
            }
        }
        let left: usize = places.iter().flatten().count();
        for conn in places.into_iter().flatten() {
            conn.end(&mut env);
        }
        prop_assert_eq!(env.budget.input_bytes(), 0, "{} ended at the end", left);
        prop_assert_eq!(env.pool.in_use(), 0);
    }
}

/// Whether a reply that repeats a message reads as that message: not where the framing adds a delimiter that the
/// end of the body may begin, nor where the body brings its own header.
fn framing_keeps_bodies(framing: Framing) -> bool {
    match framing {
        Framing::RecordMark => true,
        Framing::LengthPrefix(prefix) => prefix.adjust == i32::from(prefix.width) && prefix.strip,
        _ => false,
    }
}
