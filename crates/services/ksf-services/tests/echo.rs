//! Echo, driven without a socket: every byte comes back, once, in order.

use std::sync::Arc;

use crate::common::{SLOT_BYTES, Wire};
use ksf::CloseReason;
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf_services::echo::{Echo, MessageEcho};
use ksf_test::pattern;
use proptest::prelude::*;

#[test]
fn bytes_come_back_as_they_arrive() {
    let service = Arc::new(Echo);
    for len in [1, 2, 2047, 2048, 2049, SLOT_BYTES, SLOT_BYTES + 1, 70_000] {
        let bytes = pattern(len, 0);
        let mut wire = Wire::new(&service);
        assert_eq!(wire.feed(&bytes), bytes, "{len} bytes");
        assert_eq!(wire.slots_in_use(), 0, "a sent slot is free again");
        wire.eof();
        assert_eq!(wire.closed(), Some(CloseReason::PeerClosed));
    }
}

#[test]
fn each_framing_returns_its_messages() {
    let nine_p = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };
    let cases: [(Framing, &[u8]); 5] = [
        (Framing::LengthPrefix(LengthPrefix::big_endian(2)), b"\0\x03abc\0\0\0\x01z"),
        (Framing::LengthPrefix(nine_p), b"\x07\0\0\0abc\x04\0\0\0\x05\0\0\0z"),
        (Framing::Delimiter(Delimiter::LF), b"abc\n\nz\n"),
        (Framing::Delimiter(Delimiter::CRLF), b"abc\r\n\r\nz\n\r\r\n"),
        (Framing::RecordMark, b"\x80\0\0\x03abc\x80\0\0\0\x80\0\0\x01z"),
    ];
    for (framing, stream) in cases {
        let service = Arc::new(MessageEcho::new(framing).unwrap());
        for chunk_bytes in 1..=stream.len() {
            let mut wire = Wire::new(&service);
            let sent = wire.feed_all(stream.chunks(chunk_bytes));
            assert_eq!(sent, stream, "{framing:?}, chunks of {chunk_bytes}");
            assert_eq!(wire.closed(), None);
        }
    }
}

#[test]
fn messages_wait_until_they_are_whole() {
    let service = Arc::new(MessageEcho::new(Framing::Delimiter(Delimiter::LF)).unwrap());
    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(b"not y"), b"");
    assert_eq!(wire.feed(b"et\nno"), b"not yet\n");
    wire.eof();
    assert_eq!(wire.closed(), Some(CloseReason::PeerClosedMidMessage));
}

#[test]
fn a_framing_that_cannot_be_used_is_refused() {
    let three_bytes = LengthPrefix::big_endian(3);
    assert!(MessageEcho::new(Framing::LengthPrefix(three_bytes)).is_err());
}

proptest! {
    #[test]
    fn any_split_returns_the_same_bytes(
        len in 1usize..70_000,
        cuts in proptest::collection::vec(1usize..9_000, 1..20),
    ) {
        let bytes = pattern(len, 0);
        let mut wire = Wire::new(&Arc::new(Echo));
        let (mut sent, mut rest) = (Vec::new(), &bytes[..]);
        for cut in cuts.iter().cycle() {
            let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
            sent.extend(wire.feed(chunk));
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert!(sent == bytes);
        prop_assert_eq!(wire.slots_in_use(), 0);
    }
}
