//! The native framings and their eBPF twins give the same length, however the stream is cut.

use ksf::error::FramingError;
use ksf::framing::{Delimiter, Endian, Frame, Framing, LengthPrefix};
use ksf_bpf_framing::{BuiltinFraming, FramingOptions, FramingProgram, FramingVerdict};
use proptest::collection::vec;
use proptest::prelude::*;

const EBADMSG: i32 = 74;
const EMSGSIZE: i32 = 90;

/// What a twin must say, by the native framing and the limits of the twins.
fn native(framing: Framing, stream: &[u8]) -> FramingVerdict {
    const FRAGMENTS_MAX: usize = 256;
    const LINE_BYTES_MAX: usize = 4096;
    let mut length = 0;
    for _ in 0..FRAGMENTS_MAX {
        let Some(rest) = stream.get(length..) else { return FramingVerdict::NeedMore };
        match framing.parse(rest, 0) {
            Ok(Frame::Part(part)) => {
                length += part.total_bytes();
                if length > i32::MAX as usize {
                    return FramingVerdict::Error(EMSGSIZE);
                }
                if matches!(framing, Framing::Delimiter(_)) && length > LINE_BYTES_MAX {
                    return FramingVerdict::Error(EMSGSIZE);
                }
                if part.last {
                    return FramingVerdict::Length(length as u32);
                }
            }
            Ok(Frame::Incomplete { need_bytes: None }) if stream.len() >= LINE_BYTES_MAX => {
                return FramingVerdict::Error(EMSGSIZE);
            }
            Ok(Frame::Incomplete { .. }) => return FramingVerdict::NeedMore,
            Err(FramingError::ShorterThanHeader { .. }) => return FramingVerdict::Error(EBADMSG),
            Err(FramingError::Absurd { .. }) => return FramingVerdict::Error(EMSGSIZE),
            Err(error) => panic!("{framing:?}: {error}"),
        }
    }
    FramingVerdict::Error(EMSGSIZE)
}

fn twin(framing: &Framing) -> FramingProgram {
    let builtin = match framing {
        Framing::RecordMark => BuiltinFraming::RecordMark,
        Framing::LengthPrefix(prefix) => BuiltinFraming::LengthPrefix {
            offset: prefix.offset,
            width: prefix.width,
            big_endian: prefix.endian == Endian::Big,
            adjust: prefix.adjust,
        },
        Framing::Delimiter(delimiter) => BuiltinFraming::Delimiter(delimiter.as_bytes()),
        other => panic!("{other:?} has no twin"),
    };
    FramingProgram::builtin(&builtin, &FramingOptions::default()).unwrap_or_else(|error| panic!("{framing:?}: {error}"))
}

/// Every prefix of the stream, each in pieces that end at `cuts`.
fn agree(framing: Framing, stream: &[u8], cuts: &[usize]) {
    let twin = twin(&framing);
    for len in 0..=stream.len() {
        let arrived = &stream[..len];
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (len + 1)).chain([0, len]).collect();
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &arrived[cut[0]..cut[1]]).collect();
        let says = twin.message_len(&pieces);
        assert_eq!(says, Ok(native(framing, arrived)), "{framing:?} {arrived:?} in {} pieces", pieces.len());
    }
}

/// Bytes among which small numbers, last marks and delimiters are common.
fn wire_byte() -> impl Strategy<Value = u8> {
    prop_oneof![Just(0), Just(0), 0..4_u8, Just(0x80), Just(0x7f), Just(0xff), Just(b'\n'), Just(b'\r'), any::<u8>()]
}

fn prefix() -> impl Strategy<Value = Framing> {
    let endian = prop_oneof![Just(Endian::Big), Just(Endian::Little)];
    let adjust = prop_oneof![-20..20, Just(i32::MIN), Just(i32::MAX), any::<i32>()];
    (prop_oneof![0..9_u8, any::<u8>()], 0..4_u32, endian, adjust).prop_map(|(offset, width, endian, adjust)| {
        Framing::LengthPrefix(LengthPrefix { offset, width: 1 << width, endian, adjust, strip: false })
    })
}

fn delimiter() -> impl Strategy<Value = Framing> {
    // Few different bytes, so that delimiters overlap themselves and the stream nearly has them.
    vec(prop_oneof![Just(b'a'), Just(b'b'), Just(0)], 1..=8)
        .prop_map(|bytes| Framing::Delimiter(Delimiter::new(&bytes).expect("1 to 8 bytes")))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn record_marks(stream in vec(wire_byte(), 0..60), cuts in vec(any::<usize>(), 0..6)) {
        agree(Framing::RecordMark, &stream, &cuts);
    }

    #[test]
    fn length_prefixes(framing in prefix(), stream in vec(wire_byte(), 0..40), cuts in vec(any::<usize>(), 0..6)) {
        agree(framing, &stream, &cuts);
    }

    #[test]
    fn length_prefixes_far_in(framing in prefix(), stream in vec(wire_byte(), 255..270)) {
        agree(framing, &stream, &[7, 100]);
    }

    #[test]
    fn delimiters(
        framing in delimiter(),
        stream in vec(prop_oneof![Just(b'a'), Just(b'b'), Just(0)], 0..80),
        cuts in vec(any::<usize>(), 0..6),
    ) {
        agree(framing, &stream, &cuts);
    }
}

#[test]
fn the_usual_delimiters() {
    for delimiter in [Delimiter::LF, Delimiter::CRLF, Delimiter::new(b"\r\n\r\n").unwrap()] {
        agree(Framing::Delimiter(delimiter), b"GET / HTTP/1.1\r\nHost: a\n\r\r\n\r\n\r\nrest", &[5, 17]);
    }
}

#[test]
fn records_of_many_fragments() {
    for fragments in [255, 256, 257] {
        let mut stream = [0, 0, 0, 1, b'x'].repeat(fragments - 1);
        stream.extend([0x80, 0, 0, 0]);
        let says = twin(&Framing::RecordMark).message_len(&[&stream]);
        assert_eq!(says, Ok(native(Framing::RecordMark, &stream)));
        let expected = if fragments <= 256 {
            FramingVerdict::Length(stream.len() as u32)
        } else {
            FramingVerdict::Error(EMSGSIZE)
        };
        assert_eq!(says, Ok(expected));
    }
}

#[test]
fn lines_at_the_limit() {
    for end in [4094, 4095, 4096, 4097, 5000] {
        let mut stream = vec![b'x'; end];
        stream[end - 1] = b'\n';
        for delimiter in [Delimiter::LF, Delimiter::CRLF] {
            let framing = Framing::Delimiter(delimiter);
            for arrived in [&stream[..end.min(4095)], &stream[..end.min(4096)], &stream[..]] {
                let says = twin(&framing).message_len(&[arrived]);
                assert_eq!(says, Ok(native(framing, arrived)), "{delimiter:?} {end} {}", arrived.len());
            }
        }
    }
    // The worst case: the last byte of the delimiter everywhere.
    let framing = Framing::Delimiter(Delimiter::CRLF);
    assert_eq!(twin(&framing).message_len(&[&[b'\n'; 5000]]), Ok(FramingVerdict::Error(EMSGSIZE)));
}

#[test]
fn parameters_are_checked() {
    let options = FramingOptions::default();
    for builtin in [
        BuiltinFraming::Delimiter(b""),
        BuiltinFraming::Delimiter(b"123456789"),
        BuiltinFraming::LengthPrefix { offset: 0, width: 3, big_endian: true, adjust: 0 },
    ] {
        assert!(FramingProgram::builtin(&builtin, &options).is_err(), "{builtin:?}");
    }
}
