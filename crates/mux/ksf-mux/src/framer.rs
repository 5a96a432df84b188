//! Bytes of one connection in, messages out. No socket, no clock.
//!
//! A message that lies whole in a received chunk is a slice of it. Any other is put together in a buffer, as it was on
//! the wire, so that what is unfinished can be given back when the connection is detached.

use ksf::framing::{Frame, Framing, Part};
use ksf::limits::{Limits, Time};
use ksf::pool::Chunk;
use ksf_bpf_framing::{RunError, Verdict};

use crate::batch::CutMessages;
use crate::error::ConnectionError;
use crate::options::MessageFraming;

/// Cuts a stream.
#[derive(Debug)]
pub(crate) struct Framer {
    framing: MessageFraming,
    /// The beginning of a message, as it was on the wire.
    wire: Vec<u8>,
    /// What is known of it.
    cut: Cut,
    started: Time,
}

/// Where the bytes of an unfinished message belong.
#[derive(Debug, Default)]
struct Cut {
    /// Bodies of the parts that are complete, as ranges of the wire.
    bodies: Vec<std::ops::Range<usize>>,
    /// Bytes of the wire that belong to complete parts.
    complete: usize,
    /// The part that follows them, once its header is there.
    part: Option<Part>,
    parts: u32,
    /// Bytes behind `complete` in which no end was found.
    seen: usize,
    /// Bytes of all bodies so far.
    body_bytes: usize,
}

/// What lies at the front of a stream.
enum Front {
    Part(Part),
    /// Too few bytes to tell.
    Incomplete,
}

impl Framer {
    pub(crate) fn new(framing: MessageFraming) -> Self {
        Self { framing, wire: Vec::new(), cut: Cut::default(), started: Time::default() }
    }

    /// Cuts what was received. Whole messages are appended to `messages`; an error means that no more can be cut, and
    /// that the bytes from there on are kept for [`Self::into_unread`].
    pub(crate) fn push(
        &mut self,
        chunk: &Chunk,
        now: Time,
        limits: &Limits,
        messages: &mut CutMessages,
    ) -> Result<(), ConnectionError> {
        let mut at = 0;
        while at < chunk.len() {
            if self.wire.is_empty() {
                self.cut_short(chunk, &mut at, limits, messages);
                if at == chunk.len() {
                    break;
                }
            }
            let cut = if self.wire.is_empty() {
                self.cut_in_place(chunk, &mut at, now, limits, messages)
            } else {
                self.cut_assembled(chunk, &mut at, limits, messages)
            };
            if let Err(error) = cut {
                self.wire.extend_from_slice(&chunk[at..]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Since when a message is unfinished.
    pub(crate) fn unfinished_since(&self) -> Option<Time> {
        (!self.wire.is_empty()).then_some(self.started)
    }

    /// True while the length of the unfinished message, or of its next part, is unknown.
    pub(crate) fn needs_header(&self) -> bool {
        !self.wire.is_empty() && self.cut.part.is_none()
    }

    /// Lets its time begin now.
    pub(crate) fn restart(&mut self, now: Time) {
        self.started = now;
    }

    /// Bytes of it.
    pub(crate) fn unfinished_bytes(&self) -> usize {
        self.wire.len()
    }

    /// The bytes that belong to no message, as they were on the wire.
    pub(crate) fn take_unread(&mut self) -> Vec<u8> {
        self.cut = Cut::default();
        std::mem::take(&mut self.wire)
    }

    /// Cuts whole messages as long as that is simple. What it leaves is for [`Self::cut_in_place`].
    fn cut_short(&self, chunk: &Chunk, at: &mut usize, limits: &Limits, messages: &mut CutMessages) {
        /// No header of a length prefix is longer.
        const HEADER_BYTES_MAX: usize = u8::MAX as usize + 8;
        let MessageFraming::Native(framing) = &self.framing else { return };
        if limits.header_bytes_max < HEADER_BYTES_MAX {
            return;
        }
        let start = *at;
        *at += framing.whole_messages(&chunk[start..], limits.message_bytes_max, |body| {
            messages.in_place(start + body.start..start + body.end);
        });
    }

    fn cut_in_place(
        &mut self,
        chunk: &Chunk,
        at: &mut usize,
        now: Time,
        limits: &Limits,
        messages: &mut CutMessages,
    ) -> Result<(), ConnectionError> {
        let rest = &chunk[*at..];
        match self.front(rest, 0, limits)? {
            Front::Part(part) if part.last && part.total_bytes() <= rest.len() => {
                check_size(part.body_bytes, limits)?;
                let start = *at + part.header_bytes;
                messages.in_place(start..start + part.body_bytes);
                *at += part.total_bytes();
            }
            front => {
                if let Front::Part(part) = &front {
                    check_size(part.body_bytes, limits)?;
                }
                self.started = now;
                if let Front::Part(part) = front {
                    self.cut.begin(part, limits)?;
                    let take = part.total_bytes().min(rest.len());
                    self.wire.extend_from_slice(&rest[..take]);
                    *at += take;
                    self.complete_part(messages);
                } else {
                    self.cut.seen = rest.len();
                    self.wire.extend_from_slice(rest);
                    *at += rest.len();
                }
            }
        }
        Ok(())
    }

    fn cut_assembled(
        &mut self,
        chunk: &Chunk,
        at: &mut usize,
        limits: &Limits,
        messages: &mut CutMessages,
    ) -> Result<(), ConnectionError> {
        let rest = &chunk[*at..];
        if let Some(part) = self.cut.part {
            let missing = self.cut.complete + part.total_bytes() - self.wire.len();
            let take = missing.min(rest.len());
            self.wire.extend_from_slice(&rest[..take]);
            *at += take;
            self.complete_part(messages);
            return Ok(());
        }
        // The header of a part is unfinished. What is taken too much of is given back below: not much, or a message of
        // many small parts would be copied once per part.
        let before = self.wire.len();
        let take = rest.len().min(self.header_look(limits).saturating_add(1));
        self.wire.extend_from_slice(&rest[..take]);
        let front = self.front(&self.wire[self.cut.complete..], self.cut.seen, limits);
        let front = match front {
            Ok(front) => front,
            Err(error) => {
                self.wire.truncate(before);
                return Err(error);
            }
        };
        match front {
            Front::Part(part) => {
                let body_bytes = self.cut.body_bytes + part.body_bytes;
                let checked = check_size(body_bytes, limits).and_then(|()| self.cut.begin(part, limits));
                if let Err(error) = checked {
                    self.wire.truncate(before);
                    return Err(error);
                }
                let end = (self.cut.complete + part.total_bytes()).min(self.wire.len());
                // Never before what was there already: the header of a message does not end before it is complete.
                let end = end.max(before);
                self.wire.truncate(end);
                *at += end - before;
                self.complete_part(messages);
            }
            Front::Incomplete => {
                self.cut.seen = self.wire.len() - self.cut.complete;
                *at += take;
            }
        }
        Ok(())
    }

    /// Ends the current part if it is complete, and the message with its last part.
    fn complete_part(&mut self, messages: &mut CutMessages) {
        let Some(part) = self.cut.part else { return };
        if self.wire.len() < self.cut.complete + part.total_bytes() {
            return;
        }
        let start = self.cut.complete + part.header_bytes;
        self.cut.bodies.push(start..start + part.body_bytes);
        self.cut.body_bytes += part.body_bytes;
        self.cut.complete += part.total_bytes();
        self.cut.part = None;
        self.cut.seen = 0;
        if part.last {
            let mut wire = std::mem::take(&mut self.wire);
            let mut end = 0;
            for body in self.cut.bodies.drain(..) {
                let len = body.len();
                wire.copy_within(body, end);
                end += len;
            }
            wire.truncate(end);
            messages.assembled(Chunk::from_vec(wire));
            self.cut = Cut::default();
        }
    }

    /// What lies at the front of `bytes`, of which `seen` were looked at before. Bytes beyond the limit for headers are
    /// not looked at, so that what a stream is cut into does not depend on how much of it came at once.
    fn front(&self, bytes: &[u8], seen: usize, limits: &Limits) -> Result<Front, ConnectionError> {
        let (limit, look) = (self.header_limit(limits), self.header_look(limits));
        let front = self.ask(&bytes[..bytes.len().min(look)], seen)?;
        if matches!(front, Front::Incomplete) && bytes.len() >= look.max(limit + 1) {
            return Err(ConnectionError::EndlessHeader { bytes: look.max(limit + 1), limit });
        }
        Ok(front)
    }

    fn ask(&self, bytes: &[u8], seen: usize) -> Result<Front, ConnectionError> {
        match &self.framing {
            MessageFraming::Native(framing) => match framing.parse(bytes, seen).map_err(ConnectionError::Malformed)? {
                Frame::Part(part) => Ok(Front::Part(part)),
                Frame::Incomplete { .. } => Ok(Front::Incomplete),
            },
            MessageFraming::Program(program) => match program.message_len_after(&[bytes], seen) {
                Ok(Verdict::Length(bytes)) => {
                    Ok(Front::Part(Part { header_bytes: 0, body_bytes: bytes as usize, trailer_bytes: 0, last: true }))
                }
                Ok(Verdict::NeedMore) => Ok(Front::Incomplete),
                Ok(Verdict::Error(Verdict::ESTRPIPE)) => Err(ConnectionError::HandedBack),
                Ok(Verdict::Error(errno)) => Err(ConnectionError::Refused { errno }),
                Err(RunError::TooLong { bytes, max_bytes }) => {
                    Err(ConnectionError::OversizedMessage { bytes: bytes as usize, limit: max_bytes as usize })
                }
                Err(error) => Err(ConnectionError::Program(error)),
            },
        }
    }

    /// Most bytes in which the length of a message must show.
    fn header_limit(&self, limits: &Limits) -> usize {
        match self.framing {
            MessageFraming::Native(Framing::Delimiter(_)) => limits.header_bytes_max.max(limits.message_bytes_max),
            _ => limits.header_bytes_max,
        }
        .min(usize::MAX - 8)
    }

    /// Bytes that are worth a look.
    fn header_look(&self, limits: &Limits) -> usize {
        let limit = self.header_limit(limits);
        match &self.framing {
            // All of it is a message, however long.
            MessageFraming::Native(Framing::Raw) => usize::MAX,
            // The longest message and its end.
            MessageFraming::Native(Framing::Delimiter(delimiter)) => limit.saturating_add(delimiter.as_bytes().len()),
            _ => limit,
        }
    }
}

impl Cut {
    fn begin(&mut self, part: Part, limits: &Limits) -> Result<(), ConnectionError> {
        self.parts += 1;
        if self.parts > limits.fragments_max {
            return Err(ConnectionError::EndlessFragments { limit: limits.fragments_max });
        }
        self.part = Some(part);
        Ok(())
    }
}

fn check_size(bytes: usize, limits: &Limits) -> Result<(), ConnectionError> {
    let limit = limits.message_bytes_max;
    if bytes > limit { Err(ConnectionError::OversizedMessage { bytes, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ksf::framing::{Delimiter, Endian, LengthPrefix};
    use ksf_bpf_framing::{Builtin, FramingProgram};
    use proptest::prelude::*;

    use super::*;

    const NINE_P: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };

    fn limits() -> Limits {
        Limits { message_bytes_max: 40, header_bytes_max: 24, fragments_max: 4, ..Limits::default() }
    }

    fn program(builtin: &Builtin<'_>) -> MessageFraming {
        let options = ksf_bpf_framing::Options::default();
        MessageFraming::Program(Arc::new(FramingProgram::builtin(builtin, &options).unwrap()))
    }

    /// Every kind of native framing, and programs that know a length at once and only at the end.
    fn framings() -> Vec<MessageFraming> {
        let prefix = |prefix| MessageFraming::from(Framing::LengthPrefix(prefix));
        vec![
            Framing::RecordMark.into(),
            prefix(NINE_P),
            prefix(LengthPrefix::big_endian(1)),
            prefix(LengthPrefix { offset: 3, width: 2, endian: Endian::Big, adjust: 5, strip: false }),
            Framing::Delimiter(Delimiter::LF).into(),
            Framing::Delimiter(Delimiter::CRLF).into(),
            Framing::Delimiter(Delimiter::new(b"abab").unwrap()).into(),
            program(&Builtin::LengthPrefix { offset: 0, width: 4, big_endian: false, adjust: 0 }),
            program(&Builtin::RecordMark),
            program(&Builtin::Delimiter(b"\r\n")),
        ]
    }

    struct Cut {
        messages: Vec<Vec<u8>>,
        error: Option<ConnectionError>,
        unread: Vec<u8>,
    }

    /// Cuts a stream that arrives in chunks of these lengths, the rest in one; after an error nothing more is pushed.
    fn cut(framing: &MessageFraming, stream: &[u8], chunks: &[usize], limits: &Limits) -> Cut {
        let mut framer = Framer::new(framing.clone());
        let (mut messages, mut error, mut rest) = (Vec::new(), None, stream);
        for chunk in chunks.iter().copied().chain([usize::MAX]) {
            let (now, later) = rest.split_at(chunk.min(rest.len()));
            rest = later;
            let (chunk, mut found) = (Chunk::from_vec(now.to_vec()), CutMessages::default());
            let pushed = framer.push(&chunk, Time(1), limits, &mut found);
            let mut runs = Vec::new();
            found.gather(&chunk, 3, &mut Vec::new(), &mut runs);
            for mut run in runs {
                messages.extend(std::iter::from_fn(|| run.pop().map(|range| run.chunk()[range].to_vec())));
            }
            if let Err(stop) = pushed {
                error = Some(stop);
                break;
            }
        }
        assert_eq!(framer.unfinished_since().is_some(), framer.unfinished_bytes() > 0);
        let mut unread = framer.take_unread();
        assert_eq!(framer.unfinished_bytes(), 0);
        unread.extend_from_slice(rest);
        Cut { messages, error, unread }
    }

    /// A stream of messages of these lengths, with fragments where the framing has them, and something in the end.
    fn stream(framing: &MessageFraming, lens: &[u8], fragment_bytes: usize, tail: &[u8]) -> Vec<u8> {
        let mut stream = Vec::new();
        for (at, len) in lens.iter().enumerate() {
            let body: Vec<u8> =
                (0..*len).map(|byte| b"abcdefgh"[usize::from(byte) % 8].wrapping_add(at as u8)).collect();
            match framing {
                MessageFraming::Native(Framing::RecordMark) => record(&mut stream, &body, fragment_bytes),
                MessageFraming::Native(Framing::LengthPrefix(prefix)) if !prefix.strip => {
                    let start = stream.len();
                    stream.extend_from_slice(&vec![7; prefix.header_bytes()]);
                    stream.extend_from_slice(&body);
                    let value = (stream.len() - start) as i64 - i64::from(prefix.adjust);
                    let field = start + usize::from(prefix.offset)..start + prefix.header_bytes();
                    let bytes = value.to_be_bytes();
                    stream[field.clone()].copy_from_slice(&bytes[8 - field.len()..]);
                    if prefix.endian == Endian::Little {
                        stream[field].reverse();
                    }
                }
                MessageFraming::Native(framing) => {
                    let start = stream.len();
                    stream.resize(start + framing.reply_header_bytes(), 0);
                    stream.extend_from_slice(&body);
                    framing.finish_reply(&mut stream, start, 0).unwrap();
                    stream.extend_from_slice(framing.reply_trailer());
                }
                MessageFraming::Program(program) if program.name().contains("record") => {
                    record(&mut stream, &body, fragment_bytes);
                }
                MessageFraming::Program(program) if program.name().contains("prefix") => {
                    stream.extend_from_slice(&(body.len() as u32 + 4).to_le_bytes());
                    stream.extend_from_slice(&body);
                }
                MessageFraming::Program(_) => {
                    stream.extend_from_slice(&body);
                    stream.extend_from_slice(b"\r\n");
                }
            }
        }
        stream.extend_from_slice(tail);
        stream
    }

    fn record(stream: &mut Vec<u8>, body: &[u8], fragment_bytes: usize) {
        let mut rest = body;
        loop {
            let (fragment, later) = rest.split_at(fragment_bytes.min(rest.len()));
            rest = later;
            let last = if rest.is_empty() { 1 << 31 } else { 0 };
            stream.extend_from_slice(&(fragment.len() as u32 | last).to_be_bytes());
            stream.extend_from_slice(fragment);
            if rest.is_empty() {
                return;
            }
        }
    }

    /// Bytes of the wire the messages came from.
    fn wire_bytes(framing: &MessageFraming, stream: &[u8], messages: usize) -> usize {
        let mut at = 0;
        for _ in 0..messages {
            loop {
                let part = match framing {
                    MessageFraming::Native(framing) => match framing.parse(&stream[at..], 0).unwrap() {
                        Frame::Part(part) => part,
                        Frame::Incomplete { .. } => panic!("a message out of nothing"),
                    },
                    MessageFraming::Program(program) => match program.message_len(&[&stream[at..]]).unwrap() {
                        Verdict::Length(bytes) => {
                            Part { header_bytes: 0, body_bytes: bytes as usize, trailer_bytes: 0, last: true }
                        }
                        other => panic!("{other:?}"),
                    },
                };
                at += part.total_bytes();
                if part.last {
                    break;
                }
            }
        }
        at
    }

    proptest! {
        #[test]
        fn a_stream_is_cut_the_same_however_it_arrives(
            lens in prop::collection::vec(0u8..44, 0..8),
            fragment_bytes in 1usize..30,
            tail in prop::collection::vec(prop_oneof![Just(0u8), Just(b'\r'), Just(b'\n'), Just(b'a'), any::<u8>()], 0..60),
            chunks in prop::collection::vec(0usize..50, 0..40),
        ) {
            for framing in framings() {
                let stream = stream(&framing, &lens, fragment_bytes, &tail);
                let whole = cut(&framing, &stream, &[], &limits());
                let split = cut(&framing, &stream, &chunks, &limits());
                let bytewise = cut(&framing, &stream, &vec![1; stream.len()], &limits());
                for other in [&split, &bytewise] {
                    prop_assert_eq!(&other.messages, &whole.messages, "{:?}", framing);
                    prop_assert_eq!(&other.error, &whole.error, "{:?}", framing);
                    prop_assert_eq!(&other.unread, &whole.unread, "{:?}", framing);
                }
                // Messages and the rest are all there was.
                let taken = wire_bytes(&framing, &stream, whole.messages.len());
                prop_assert_eq!(&whole.unread[..], &stream[taken..], "{:?}", framing);
                prop_assert!(whole.messages.iter().all(|message| message.len() <= 40 || is_program(&framing)));
                if whole.error.is_none() && tail.is_empty() {
                    prop_assert_eq!(whole.messages.len(), lens.len(), "{:?}", framing);
                }
            }
        }
    }

    fn is_program(framing: &MessageFraming) -> bool {
        matches!(framing, MessageFraming::Program(_))
    }

    #[test]
    fn raw_chunks_are_messages() {
        let whole = cut(&Framing::Raw.into(), &[1; 40], &[30, 0, 5], &limits());
        assert_eq!(whole.messages.iter().map(Vec::len).collect::<Vec<_>>(), [30, 5, 5]);
        let long = cut(&Framing::Raw.into(), &[1; 41], &[], &limits());
        assert_eq!(long.error, Some(ConnectionError::OversizedMessage { bytes: 41, limit: 40 }));
        assert_eq!(long.unread, [1; 41]);
    }

    /// Cut in every place and in one piece, with the same end.
    fn ends(framing: impl Into<MessageFraming>, stream: &[u8], limits: &Limits) -> (usize, Option<ConnectionError>) {
        let framing = framing.into();
        let whole = cut(&framing, stream, &[], limits);
        for at in 0..=stream.len() {
            let split = cut(&framing, stream, &[at], limits);
            assert_eq!((&split.messages, &split.error), (&whole.messages, &whole.error), "cut at {at}");
            assert_eq!(split.unread, whole.unread, "cut at {at}");
        }
        (whole.messages.len(), whole.error)
    }

    #[test]
    fn a_message_may_be_as_long_as_its_limit_and_no_longer() {
        let oversized = |bytes| Some(ConnectionError::OversizedMessage { bytes, limit: 40 });
        for framing in [Framing::LengthPrefix(LengthPrefix::big_endian(2)), Framing::RecordMark] {
            let framing = MessageFraming::from(framing);
            assert_eq!(ends(framing.clone(), &stream(&framing, &[40], 13, &[]), &limits()), (1, None));
            assert_eq!(ends(framing.clone(), &stream(&framing, &[41], 41, &[]), &limits()), (0, oversized(41)));
        }
        // The header is part of the message here.
        assert_eq!(ends(Framing::LengthPrefix(NINE_P), &[&[40, 0, 0, 0][..], &[1; 36]].concat(), &limits()), (1, None));
        assert_eq!(ends(Framing::LengthPrefix(NINE_P), &[41, 0, 0, 0], &limits()), (0, oversized(41)));
        // The last fragment is the one too much.
        let mark = MessageFraming::from(Framing::RecordMark);
        assert_eq!(ends(mark.clone(), &stream(&mark, &[5, 41], 20, &[]), &limits()), (1, oversized(41)));
        let program = program(&Builtin::LengthPrefix { offset: 0, width: 4, big_endian: false, adjust: 0 });
        assert_eq!(ends(program.clone(), &[40, 0, 0, 0], &limits()), (0, None));
        assert_eq!(ends(program, &[41, 0, 0, 0], &limits()), (0, oversized(41)));
    }

    #[test]
    fn a_line_may_be_as_long_as_the_longest_message_whatever_ends_it() {
        for end in [&b"\n"[..], b"\r\n", b"12345678"] {
            let framing = Framing::Delimiter(Delimiter::new(end).unwrap());
            assert_eq!(ends(framing, &[&[b'x'; 40], end].concat(), &limits()), (1, None));
            let endless = Some(ConnectionError::EndlessHeader { bytes: 40 + end.len(), limit: 40 });
            assert_eq!(ends(framing, &[&[b'x'; 41], end].concat(), &limits()), (0, endless));
            let long_header = Limits { header_bytes_max: 50, ..limits() };
            let oversized = Some(ConnectionError::OversizedMessage { bytes: 41, limit: 40 });
            assert_eq!(ends(framing, &[&[b'x'; 41], end].concat(), &long_header), (0, oversized));
        }
    }

    #[test]
    fn a_length_must_show_within_the_limit_for_headers() {
        let lines = program(&Builtin::Delimiter(b"\n"));
        assert_eq!(ends(lines.clone(), &[&[b'x'; 23][..], b"\n"].concat(), &limits()), (1, None));
        let endless = Some(ConnectionError::EndlessHeader { bytes: 25, limit: 24 });
        assert_eq!(ends(lines.clone(), &[&[b'x'; 24][..], b"\n"].concat(), &limits()), (0, endless));
        assert_eq!(ends(lines, &[b'x'; 24], &limits()), (0, None), "the next byte may be its end");
        let short = Limits { header_bytes_max: 3, ..limits() };
        let endless = Some(ConnectionError::EndlessHeader { bytes: 4, limit: 3 });
        assert_eq!(ends(Framing::RecordMark, &[0x80, 0, 0, 0], &short), (0, endless));
    }

    #[test]
    fn a_record_may_have_as_many_fragments_as_its_limit() {
        let mark = MessageFraming::from(Framing::RecordMark);
        assert_eq!(ends(mark.clone(), &stream(&mark, &[4, 4], 1, &[]), &limits()), (2, None));
        let endless = Some(ConnectionError::EndlessFragments { limit: 4 });
        assert_eq!(ends(mark.clone(), &stream(&mark, &[5], 1, &[]), &limits()), (0, endless.clone()));
        assert_eq!(ends(mark, &[0; 20], &limits()), (0, endless), "empty fragments count");
    }

    #[test]
    fn a_message_counts_from_its_first_byte() {
        let mut framer = Framer::new(Framing::RecordMark.into());
        let mut messages = CutMessages::default();
        let mut push = |framer: &mut Framer, bytes: &[u8], now| {
            framer.push(&Chunk::from_vec(bytes.to_vec()), Time(now), &limits(), &mut messages).unwrap();
        };
        push(&mut framer, &[0x80, 0, 0, 1, 7], 1);
        assert_eq!(framer.unfinished_since(), None);
        push(&mut framer, &[0x80, 0, 0, 1, 7, 0], 2);
        push(&mut framer, &[0, 0, 1, 7, 0], 3);
        push(&mut framer, &[0, 0, 1], 4);
        assert_eq!((framer.unfinished_since(), framer.unfinished_bytes()), (Some(Time(2)), 9));
        push(&mut framer, &[7, 0x80, 0, 0, 0, 1], 5);
        assert_eq!((framer.unfinished_since(), framer.unfinished_bytes()), (Some(Time(5)), 1));
    }
}
