//! The cutter by itself: whatever the splits, the loans and the shortages of memory, the same bytes give the same
//! messages, and all memory comes back.

use ksf::buffers::Buffers;
use ksf::cutter::{Cut, CutError, Cutter, Native, Room};
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf::limits::{Limits, Time};
use ksf_sim::ideal::encode;
use proptest::prelude::*;

/// Room that is there or not, as the test decides.
struct Budget {
    used: usize,
    limit: usize,
    short: bool,
}

impl Room for Budget {
    fn grow(&mut self, bytes: usize) -> bool {
        if self.short || self.used + bytes > self.limit {
            return false;
        }
        self.used += bytes;
        true
    }

    fn shrink(&mut self, bytes: usize) {
        self.used -= bytes;
    }
}

struct Bench {
    framing: Framing,
    limits: Limits,
    buffers: Buffers,
    cutter: Cutter,
    room: Budget,
    messages: Vec<Vec<u8>>,
}

impl Bench {
    fn new(framing: Framing) -> Self {
        let limits = Limits { message_bytes_max: 20_000, ..Limits::default() };
        let (buffers, cutter, room) =
            (Buffers::default(), Cutter::keeping_wire(), Budget { used: 0, limit: usize::MAX, short: false });
        Self { framing, limits, buffers, cutter, room, messages: Vec::new() }
    }

    /// Cuts what is left of `chunk`; where it stopped for lack of room, or the error.
    fn feed(&mut self, chunk: &[u8], at: &mut usize) -> Result<bool, CutError<ksf::error::FramingError>> {
        let Self { framing, limits, buffers, cutter, room, messages } = self;
        loop {
            let mut rule = Native { framing: *framing, limits };
            match cutter.next(chunk, at, &mut rule, room, buffers, Time(1))? {
                Cut::InPlace(range) => messages.push(chunk[range].to_vec()),
                Cut::Assembled(message) => messages.push(message.to_vec()),
                Cut::More => return Ok(true),
                Cut::NoRoom => return Ok(false),
            }
        }
    }
}

fn framings() -> impl Strategy<Value = Framing> {
    let nine_p = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };
    prop_oneof![
        Just(Framing::RecordMark),
        Just(Framing::LengthPrefix(LengthPrefix::big_endian(4))),
        Just(Framing::LengthPrefix(nine_p)),
        Just(Framing::Delimiter(Delimiter::CRLF)),
    ]
}

proptest! {
    /// Chunks of any length, memory that is short now and then, and long rests that are received into the buffer itself.
    #[test]
    fn loans_and_shortages_change_nothing(
        framing in framings(),
        bodies in prop::collection::vec((prop::collection::vec(97u8..120, 0..9000), prop::collection::vec(0usize..5000, 0..3)), 1..6),
        chunks in prop::collection::vec(1usize..3000, 1..40),
        short in prop::collection::vec(any::<bool>(), 40),
        loans in prop::collection::vec(1usize..2000, 1..10),
    ) {
        let wire: Vec<u8> = bodies.iter().flat_map(|(body, cuts)| encode(framing, body, cuts)).collect();
        let mut bench = Bench::new(framing);
        let (mut at, mut turn) = (0, 0);
        while at < wire.len() {
            turn += 1;
            // An engine that is lent a buffer fills it before it receives anything else.
            if let Some(mut direct) = bench.cutter.direct(loans[turn % loans.len()], &mut bench.room) {
                let take = direct.missing().min(chunks[turn % chunks.len()]).min(wire.len() - at);
                direct.room_mut()[..take].copy_from_slice(&wire[at..at + take]);
                at += take;
                prop_assert!(!bench.cutter.is_idle() && bench.cutter.since() == Some(Time(1)));
                bench.messages.extend(bench.cutter.give_back(direct, take, &mut bench.room).map(|whole| whole.to_vec()));
                continue;
            }
            let end = (at + chunks[turn % chunks.len()]).min(wire.len());
            let (chunk, mut within) = (&wire[at..end], 0);
            bench.room.short = short[turn % short.len()];
            let all = bench.feed(chunk, &mut within).unwrap();
            prop_assert!(all == (within == chunk.len()));
            if !all {
                // There is room again: the rest of the same chunk goes on where it stopped.
                bench.room.short = false;
                prop_assert!(bench.feed(chunk, &mut within).unwrap());
            }
            bench.room.short = false;
            at = end;
        }
        let expected: Vec<_> = ksf_sim::ideal::decode(framing, &bench.limits, &wire).messages;
        prop_assert_eq!(bench.messages.len(), expected.len());
        prop_assert!(bench.messages == expected);
        prop_assert!(bench.cutter.is_idle());
        prop_assert_eq!(bench.room.used, 0);
    }

    /// A connection that is given back gets the bytes of its unfinished message as they were on the wire.
    #[test]
    fn the_unread_bytes_are_those_of_the_wire(
        framing in framings(),
        body in prop::collection::vec(97u8..120, 0..9000),
        cuts in prop::collection::vec(0usize..5000, 0..3),
        chunks in prop::collection::vec(1usize..3000, 1..10),
        left in 0usize..10_000,
    ) {
        let wire = encode(framing, &body, &cuts);
        let arrived = &wire[..wire.len().saturating_sub(1).min(left)];
        let mut bench = Bench::new(framing);
        let mut at = 0;
        for turn in 0.. {
            if at == arrived.len() {
                break;
            }
            let end = (at + chunks[turn % chunks.len()]).min(arrived.len());
            let mut within = 0;
            prop_assert!(bench.feed(&arrived[at..end], &mut within).unwrap());
            at = end;
        }
        prop_assert_eq!(bench.cutter.take_unread(&mut bench.room), arrived);
        prop_assert!(bench.cutter.is_idle() && bench.messages.is_empty());
        prop_assert_eq!(bench.room.used, 0);
    }
}

#[test]
fn a_known_length_is_one_buffer_of_its_class_from_the_start() {
    let mut bench = Bench::new(Framing::RecordMark);
    bench.limits.message_bytes_max = 2 << 20;
    let mut at = 0;
    let mark = (0x8000_0000_u32 | (1 << 20)).to_be_bytes();
    assert!(bench.feed(&mark, &mut at).unwrap());
    assert_eq!(bench.room.used, 4096, "only what was touched is counted");
    // What is lent is counted, and grows with what has arrived; so is the header that is kept for the wire, with its place.
    const HEADER: usize = 4 + size_of::<(usize, usize)>();
    let mut arrived = 0;
    for lent in [64 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10] {
        assert!(bench.cutter.may_lend(1, &mut bench.room));
        assert_eq!(bench.room.used, HEADER + arrived + lent, "counted before it is lent");
        let direct = bench.cutter.direct(1, &mut bench.room).unwrap();
        assert_eq!((direct.missing(), bench.room.used), (lent, HEADER + arrived + lent));
        arrived += lent;
        let whole = bench.cutter.give_back(direct, lent, &mut bench.room);
        let whole = whole.map(|message| (message.len(), message.capacity()));
        assert_eq!(whole, (arrived == 1 << 20).then_some((1 << 20, 1 << 20)));
    }
    assert_eq!((bench.room.used, bench.cutter.take_copied_bytes()), (0, 0), "nothing was copied");
}

#[test]
fn a_short_rest_is_lent_only_behind_a_long_one() {
    let mut bench = Bench::new(Framing::RecordMark);
    for (arrived, lends) in [(9_000, true), (10_001, false)] {
        let mut at = 0;
        let mark = (0x8000_0000_u32 | 20_000).to_be_bytes();
        assert!(bench.feed(&[&mark[..], &vec![1; arrived]].concat(), &mut at).unwrap());
        assert_eq!(bench.cutter.may_lend(10_000, &mut bench.room), lends);
        assert_eq!(bench.cutter.take_copied_bytes(), arrived);
        if let Some(direct) = bench.cutter.direct(10_000, &mut bench.room) {
            assert!(bench.cutter.may_lend(10_000, &mut bench.room), "while it is lent");
            assert!(bench.cutter.give_back(direct, 10_999, &mut bench.room).is_none());
            assert_eq!(bench.cutter.direct(10_000, &mut bench.room).unwrap().missing(), 1);
        }
        bench.cutter.reset(&mut bench.room);
    }
}

#[test]
fn a_loan_that_comes_back_after_the_end_is_dropped() {
    let mut bench = Bench::new(Framing::RecordMark);
    let mut at = 0;
    assert!(bench.feed(&[0x80, 0, 0x10, 0, 1, 2, 3], &mut at).unwrap());
    let direct = bench.cutter.direct(1, &mut bench.room).unwrap();
    assert!(bench.cutter.direct(1, &mut bench.room).is_none(), "a buffer is lent once");
    bench.cutter.reset(&mut bench.room);
    assert!(bench.cutter.give_back(direct, 100, &mut bench.room).is_none());
    assert!(bench.cutter.is_idle());
    assert_eq!((bench.room.used, bench.buffers.kept()), (0, 1));
}

#[test]
fn without_room_nothing_is_taken() {
    let mut bench = Bench::new(Framing::Delimiter(Delimiter::LF));
    bench.room.short = true;
    let (chunk, mut at) = (b"whole\nhalf", 0);
    assert!(!bench.feed(chunk, &mut at).unwrap());
    assert_eq!((at, bench.messages.len()), (6, 1), "what is whole needs no room");
    assert!(bench.cutter.is_idle());
}

#[test]
fn whole_messages_are_taken_first_and_the_rest_the_long_way() {
    for (framing, whole) in [(Framing::RecordMark, 2), (Framing::Delimiter(Delimiter::LF), 0)] {
        let wire: Vec<u8> =
            [&b"one"[..], b"three", b"five"].iter().flat_map(|body| encode(framing, body, &[])).collect();
        let mut bench = Bench::new(framing);
        let (mut at, mut taken) = (0, Vec::new());
        let rule = Native { framing, limits: &bench.limits };
        bench.cutter.take_whole(&wire[..wire.len() - 1], &mut at, &rule, |body| taken.push(wire[body].to_vec()));
        assert_eq!(taken, [&b"one"[..], b"three"][..whole]);
        assert!(bench.feed(&wire[..wire.len() - 1], &mut at).unwrap());
        // Inside a message nothing is simple.
        let rule = Native { framing, limits: &bench.limits };
        bench.cutter.take_whole(&wire, &mut 0, &rule, |body| panic!("{body:?} in the middle of a message"));
        assert!(bench.feed(&wire[wire.len() - 1..], &mut 0).unwrap());
        taken.append(&mut bench.messages);
        assert_eq!(taken, [&b"one"[..], b"three", b"five"], "{framing:?}");
    }
}

#[test]
fn a_message_counts_from_its_first_byte() {
    let mut bench = Bench::new(Framing::RecordMark);
    let mut push = |bytes: &[u8], now| {
        let mut at = 0;
        let mut rule = Native { framing: bench.framing, limits: &bench.limits };
        while let Cut::InPlace(_) | Cut::Assembled(_) =
            bench.cutter.next(bytes, &mut at, &mut rule, &mut bench.room, &bench.buffers, Time(now)).unwrap()
        {}
        (bench.cutter.since(), bench.cutter.arrived_bytes(), bench.cutter.needs_header())
    };
    assert_eq!(push(&[0x80, 0, 0, 1, 7], 1), (None, 0, false));
    assert_eq!(push(&[0x80, 0, 0, 1, 7, 0], 2), (Some(Time(2)), 1, true));
    assert_eq!(push(&[0, 0, 1, 7, 0], 3), (Some(Time(2)), 6, true));
    assert_eq!(push(&[0, 0, 1], 4), (Some(Time(2)), 9, false));
    assert_eq!(push(&[7, 0x80, 0, 0, 0, 1], 5), (Some(Time(5)), 1, true));
}

/// What a stream ends with, and the bytes that are given back then, are the same wherever it is cut in two.
fn end(framing: Framing, limits: &Limits, stream: &[u8]) -> (usize, Option<CutError<ksf::error::FramingError>>) {
    let run = |split: usize| {
        let mut bench = Bench { limits: limits.clone(), ..Bench::new(framing) };
        let (mut error, mut unread) = (None, Vec::new());
        for chunk in [&stream[..split], &stream[split..]] {
            let mut at = 0;
            if error.is_none() {
                error = bench.feed(chunk, &mut at).err();
                if error.is_some() {
                    unread = bench.cutter.take_unread(&mut bench.room);
                }
            }
            unread.extend_from_slice(if error.is_some() { &chunk[at..] } else { &[] });
        }
        if error.is_none() {
            unread = bench.cutter.take_unread(&mut bench.room);
        }
        assert_eq!(bench.room.used, 0);
        assert!(stream.ends_with(&unread), "{framing:?}, cut at {split}: {unread:?} of {stream:?}");
        assert!(!bench.messages.is_empty() || unread == stream, "{framing:?}, cut at {split}: bytes are lost");
        (bench.messages, error, unread)
    };
    let whole = run(stream.len());
    (0..stream.len()).for_each(|split| assert_eq!(run(split), whole, "{framing:?}, cut at {split}"));
    (whole.0.len(), whole.1)
}

#[test]
fn at_a_limit_a_stream_ends_the_same_wherever_it_was_cut() {
    let limits = Limits { message_bytes_max: 40, header_bytes_max: 24, fragments_max: 4, ..Limits::default() };
    let oversized = |bytes| Some(CutError::Oversized { bytes, limit: 40 });
    let prefix = Framing::LengthPrefix(LengthPrefix::big_endian(2));
    for framing in [prefix, Framing::RecordMark] {
        assert_eq!(end(framing, &limits, &encode(framing, &[1; 40], &[])), (1, None));
        assert_eq!(end(framing, &limits, &encode(framing, &[1; 41], &[])), (0, oversized(41)));
    }
    let marks = |body: &[u8], cuts: &[usize]| encode(Framing::RecordMark, body, cuts);
    // The last fragment is the one too much, in bytes and in number; empty ones count.
    let streams = [marks(&[1; 5], &[]), marks(&[1; 41], &[20, 20])].concat();
    assert_eq!(end(Framing::RecordMark, &limits, &streams), (1, oversized(41)));
    let endless = Some(CutError::EndlessParts { limit: 4 });
    assert_eq!(end(Framing::RecordMark, &limits, &marks(b"abcd", &[1, 1, 1])), (1, None));
    assert_eq!(end(Framing::RecordMark, &limits, &marks(b"abcde", &[1, 1, 1, 1])), (0, endless));
    assert_eq!(end(Framing::RecordMark, &limits, &[0; 20]), (0, endless));
    for delimiter in [&b"\n"[..], b"\r\n", b"12345678"] {
        let framing = Framing::Delimiter(Delimiter::new(delimiter).unwrap());
        assert_eq!(end(framing, &limits, &encode(framing, &[b'x'; 40], &[])), (1, None));
        let bytes = 40 + delimiter.len();
        assert_eq!(end(framing, &limits, &encode(framing, &[b'x'; 41], &[])), (0, oversized(bytes)));
        let long_header = Limits { header_bytes_max: 50, ..limits.clone() };
        assert_eq!(end(framing, &long_header, &encode(framing, &[b'x'; 41], &[])), (0, oversized(bytes)));
    }
    // A header of a known length is no endless one.
    let short = Limits { header_bytes_max: 2, ..limits };
    assert_eq!(end(Framing::RecordMark, &short, &marks(b"abc", &[])), (1, None));
}

/// All that waits for its delimiter is message: the limit of headers says nothing of it.
#[test]
fn a_message_without_its_delimiter_ends_at_the_limit_of_messages() {
    let limits = Limits { message_bytes_max: 16, header_bytes_max: 4096, ..Limits::default() };
    let line = [b'x'; 16];
    // What comes behind the longest message is its delimiter, or too much.
    for (delimiter, too_many) in [(Delimiter::LF, 17), (Delimiter::CRLF, 18)] {
        let framing = Framing::Delimiter(delimiter);
        let oversized = Some(CutError::Oversized { bytes: too_many, limit: 16 });
        let begun = [&line[..], &delimiter.as_bytes()[..too_many - 17]].concat();
        for (wire, messages, error) in [
            (vec![b'x'; too_many], 0, oversized),
            (vec![b'x'; 100], 0, oversized),
            (encode(framing, &[b'x'; 17], &[]), 0, oversized),
            (begun, 0, None),
            (encode(framing, &line, &[]), 1, None),
        ] {
            assert_eq!(end(framing, &limits, &wire), (messages, error), "{delimiter:?}, {} bytes", wire.len());
            let mut bench = Bench { limits: limits.clone(), ..Bench::new(framing) };
            let mut push = |at: usize| bench.feed(&wire[at..=at], &mut 0).err().map(|error| (at + 1, error));
            let ended = (0..wire.len()).find_map(&mut push);
            assert_eq!(ended, error.map(|error| (too_many, error)), "{delimiter:?}, byte by byte");
            assert_eq!(bench.messages.len(), messages);
        }
    }
}

#[test]
fn memory_is_counted_as_it_is_taken_from_the_machine() {
    let mut bench = Bench::new(Framing::RecordMark);
    bench.limits.message_bytes_max = 1 << 20;
    let announce = |bench: &mut Bench, bytes: u32| {
        assert!(bench.feed(&(0x8000_0000 | bytes).to_be_bytes(), &mut 0).unwrap());
        bench.room.used
    };
    // The memory of a short buffer is cleared, so taken, at once.
    for (bytes, used) in [(1, 4096), (4097, 8192), (20_000, 32_768), (32_769, 4096), (1 << 20, 4096)] {
        assert_eq!(announce(&mut bench, bytes), used, "{bytes}");
        bench.cutter.reset(&mut bench.room);
    }
    // A long one that was used before has the pages of that time.
    announce(&mut bench, 1 << 20);
    assert!(bench.feed(&vec![1; 100_000], &mut 0).unwrap());
    bench.cutter.reset(&mut bench.room);
    assert_eq!(announce(&mut bench, 1 << 20), 25 * 4096);
    bench.cutter.reset(&mut bench.room);
    // With room for less it gives them back to the machine.
    bench.room.limit = 24 * 4096;
    assert_eq!(announce(&mut bench, 1 << 20), 4096);
    assert_eq!(bench.buffers.kept(), 4);
}
