//! The receiving side of a connection: the framework's cutter, with the framings that connections have here.

use std::sync::atomic::{AtomicUsize, Ordering};

use ksf::buffers::Buffers;
use ksf::cutter::{Cut, CutError, Cutter, Native, Room, Rule};
use ksf::error::FramingError;
use ksf::framing::{Frame, Part};
use ksf::limits::{Limits, Time};
use ksf::pool::Chunk;
use ksf_bpf_framing::{FramingProgram, FramingVerdict, RunError};

use crate::batch::CutMessages;
use crate::error::ConnectionError;
use crate::options::MessageFraming;

/// What was received of a stream and belongs to no whole message.
#[derive(Debug)]
pub(crate) struct Input {
    cutter: Cutter,
    /// What follows the cutter's bytes: memory was short, or the stream cannot be cut any more.
    rest: Vec<u8>,
}

impl Input {
    pub(crate) fn new() -> Self {
        Self { cutter: Cutter::keeping_wire(), rest: Vec::new() }
    }

    /// Cuts what was received, and appends whole messages to `messages`. What cannot be cut is kept for
    /// [`Self::take_unread`]. False: memory is short, and the rest is kept for [`Self::take_rest`].
    ///
    /// # Errors
    ///
    /// What the peer did; no more can be cut.
    pub(crate) fn cut(
        &mut self,
        framing: &MessageFraming,
        chunk: &Chunk,
        limits: &Limits,
        (room, buffers): (&mut InputRoom<'_>, &Buffers),
        now: Time,
        messages: &mut CutMessages,
    ) -> Result<bool, ConnectionError> {
        let mut at = 0;
        let all = match framing {
            MessageFraming::Native(framing) => {
                let mut rule = Native { framing: *framing, limits };
                self.cut_by(&mut rule, chunk, &mut at, (room, buffers), now, messages)
            }
            MessageFraming::Program(program) => {
                let mut rule = ByProgram { program, limits };
                self.cut_by(&mut rule, chunk, &mut at, (room, buffers), now, messages)
            }
        };
        if at < chunk.len() {
            // Copied: the slot goes back to the worker that received into it.
            room.add(chunk.len() - at);
            self.rest.extend_from_slice(&chunk[at..]);
        }
        all
    }

    fn cut_by<R: Rule<Error: Into<ConnectionError>>>(
        &mut self,
        rule: &mut R,
        chunk: &Chunk,
        at: &mut usize,
        (room, buffers): (&mut InputRoom<'_>, &Buffers),
        now: Time,
        messages: &mut CutMessages,
    ) -> Result<bool, ConnectionError> {
        loop {
            let before = messages.len();
            self.cutter.take_whole(chunk, at, rule, |body| messages.in_place(body));
            room.grants_message &= messages.len() == before;
            match self.cutter.next(chunk, at, rule, room, buffers, now)? {
                Cut::InPlace(body) => messages.in_place(body),
                Cut::Assembled(message) => messages.assembled(Chunk::from_buffer(message)),
                Cut::More => return Ok(true),
                Cut::NoRoom => return Ok(false),
            }
            room.grants_message = false;
        }
    }

    /// What was left when memory was short, to be cut before anything that is received later.
    pub(crate) fn take_rest(&mut self, room: &mut InputRoom<'_>) -> Option<Chunk> {
        if self.rest.is_empty() {
            return None;
        }
        room.shrink(self.rest.len());
        Some(Chunk::from_vec(std::mem::take(&mut self.rest)))
    }

    /// Since when a message is unfinished.
    pub(crate) fn unfinished_since(&self) -> Option<Time> {
        self.cutter.since()
    }

    /// True while the length of the unfinished message, or of its next part, is unknown.
    pub(crate) fn needs_header(&self) -> bool {
        self.cutter.needs_header()
    }

    /// Bytes that are missing of the unfinished message, or of its part, as far as is known.
    pub(crate) fn missing_bytes(&self) -> usize {
        self.cutter.missing_bytes()
    }

    /// Lets its time begin now.
    pub(crate) fn restart(&mut self, now: Time) {
        self.cutter.restart(now);
    }

    /// Bytes that arrived and belong to no whole message.
    pub(crate) fn unread_bytes(&self) -> usize {
        self.cutter.arrived_bytes() + self.rest.len()
    }

    /// These bytes as they were on the wire, which are forgotten.
    pub(crate) fn take_unread(&mut self, room: &mut InputRoom<'_>) -> Vec<u8> {
        let mut unread = self.cutter.take_unread(room);
        room.shrink(self.rest.len());
        unread.append(&mut self.rest);
        unread
    }
}

/// The memory that a connection takes for what has not arrived in full.
pub(crate) struct InputRoom<'a> {
    /// What it takes.
    pub(crate) own_bytes: &'a AtomicUsize,
    /// What all connections take together, and may take.
    pub(crate) all_bytes: &'a AtomicUsize,
    pub(crate) all_bytes_max: usize,
    /// The message in part, or the next one, is received whatever there is: the connection has a pass.
    pub(crate) grants_message: bool,
}

impl InputRoom<'_> {
    /// Counts what is here, whether there is room or not.
    fn add(&mut self, bytes: usize) {
        self.own_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.all_bytes.fetch_add(bytes, Ordering::SeqCst);
    }
}

impl Room for InputRoom<'_> {
    fn grow(&mut self, bytes: usize) -> bool {
        let before = self.all_bytes.fetch_add(bytes, Ordering::SeqCst);
        let granted = self.grants_message || before.saturating_add(bytes) <= self.all_bytes_max;
        if granted {
            self.own_bytes.fetch_add(bytes, Ordering::SeqCst);
        } else {
            self.all_bytes.fetch_sub(bytes, Ordering::SeqCst);
        }
        granted
    }

    fn fits(&self, bytes: usize) -> bool {
        self.all_bytes.load(Ordering::SeqCst).saturating_add(bytes) <= self.all_bytes_max
    }

    fn shrink(&mut self, bytes: usize) {
        if bytes > 0 {
            self.own_bytes.fetch_sub(bytes, Ordering::SeqCst);
            self.all_bytes.fetch_sub(bytes, Ordering::SeqCst);
        }
    }
}

/// The rule of a framing program: a message is what the program says, all of it.
struct ByProgram<'a> {
    program: &'a FramingProgram,
    limits: &'a Limits,
}

impl Rule for ByProgram<'_> {
    type Error = ConnectionError;

    fn front(&mut self, buf: &[u8], scanned: usize) -> Result<Frame, ConnectionError> {
        match self.program.message_len_after(&[buf], scanned) {
            Ok(FramingVerdict::Length(bytes)) => {
                Ok(Frame::Part(Part { header_bytes: 0, body_bytes: bytes as usize, trailer_bytes: 0, last: true }))
            }
            Ok(FramingVerdict::NeedMore) => Ok(Frame::Incomplete { need_bytes: None }),
            Ok(FramingVerdict::Error(FramingVerdict::ESTRPIPE)) => Err(ConnectionError::HandedBack),
            Ok(FramingVerdict::Error(errno)) => Err(ConnectionError::Refused { errno }),
            Err(RunError::TooLong { bytes, max_bytes }) => {
                Err(ConnectionError::OversizedMessage { bytes: bytes as usize, limit: max_bytes as usize })
            }
            Err(error) => Err(ConnectionError::Program(error)),
        }
    }

    fn message_bytes_max(&self) -> usize {
        self.limits.message_bytes_max
    }

    fn header_bytes_max(&self) -> usize {
        self.limits.header_bytes_max
    }

    fn parts_max(&self) -> u32 {
        self.limits.fragments_max
    }
}

impl From<FramingError> for ConnectionError {
    fn from(error: FramingError) -> Self {
        Self::Malformed(error)
    }
}

impl<E: Into<Self>> From<CutError<E>> for ConnectionError {
    fn from(error: CutError<E>) -> Self {
        match error {
            CutError::Rule(error) => error.into(),
            CutError::Oversized { bytes, limit } => Self::OversizedMessage { bytes, limit },
            CutError::EndlessHeader { bytes, limit } => Self::EndlessHeader { bytes, limit },
            CutError::EndlessParts { limit } => Self::EndlessFragments { limit },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
    use ksf_bpf_framing::BuiltinFraming;
    use proptest::prelude::*;

    use super::*;

    const NINE_P: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };

    fn limits() -> Limits {
        Limits { message_bytes_max: 40, header_bytes_max: 24, fragments_max: 4, ..Limits::default() }
    }

    fn program(builtin: &BuiltinFraming<'_>) -> MessageFraming {
        let options = ksf_bpf_framing::FramingOptions::default();
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
            program(&BuiltinFraming::LengthPrefix { offset: 0, width: 4, big_endian: false, adjust: 0 }),
            program(&BuiltinFraming::RecordMark),
            program(&BuiltinFraming::Delimiter(b"\r\n")),
        ]
    }

    #[derive(Default)]
    struct Memory {
        own: AtomicUsize,
        all: AtomicUsize,
        buffers: Buffers,
    }

    impl Memory {
        fn room(&self, all_bytes_max: usize) -> InputRoom<'_> {
            InputRoom { own_bytes: &self.own, all_bytes: &self.all, all_bytes_max, grants_message: false }
        }

        fn used(&self) -> (usize, usize) {
            (self.own.load(Ordering::SeqCst), self.all.load(Ordering::SeqCst))
        }

        fn cut(
            &self,
            input: &mut Input,
            framing: &MessageFraming,
            chunk: &Chunk,
            limits: &Limits,
            found: &mut CutMessages,
        ) -> Result<bool, ConnectionError> {
            input.cut(framing, chunk, limits, (&mut self.room(usize::MAX), &self.buffers), Time(1), found)
        }
    }

    struct Cut {
        messages: Vec<Vec<u8>>,
        error: Option<ConnectionError>,
        unread: Vec<u8>,
    }

    /// Cuts a stream that arrives in chunks of these lengths, the rest in one; after an error nothing more is pushed.
    fn cut(framing: &MessageFraming, stream: &[u8], chunks: &[usize], limits: &Limits) -> Cut {
        let (memory, mut input) = (Memory::default(), Input::new());
        let (mut messages, mut error, mut rest) = (Vec::new(), None, stream);
        for chunk in chunks.iter().copied().chain([usize::MAX]) {
            let (now, later) = rest.split_at(chunk.min(rest.len()));
            rest = later;
            let (chunk, mut found) = (Chunk::from_vec(now.to_vec()), CutMessages::default());
            let cut = memory.cut(&mut input, framing, &chunk, limits, &mut found);
            let mut runs = Vec::new();
            found.gather(&chunk, 3, &mut Vec::new(), &mut runs);
            for mut run in runs {
                messages.extend(std::iter::from_fn(|| run.pop().map(|range| run.chunk()[range].to_vec())));
            }
            match cut {
                Ok(all) => assert!(all),
                Err(stop) => {
                    error = Some(stop);
                    break;
                }
            }
        }
        assert_eq!(memory.own.load(Ordering::SeqCst) > 0, input.unread_bytes() > 0);
        let mut unread = input.take_unread(&mut memory.room(usize::MAX));
        assert_eq!((input.unread_bytes(), input.unfinished_since(), memory.used()), (0, None, (0, 0)));
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
                        FramingVerdict::Length(bytes) => {
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
    fn a_length_that_a_program_tells_must_show_in_time_and_stay_within_the_limit() {
        let lines = program(&BuiltinFraming::Delimiter(b"\n"));
        assert_eq!(ends(lines.clone(), &[&[b'x'; 23][..], b"\n"].concat(), &limits()), (1, None));
        let endless = Some(ConnectionError::EndlessHeader { bytes: 25, limit: 24 });
        assert_eq!(ends(lines.clone(), &[&[b'x'; 24][..], b"\n"].concat(), &limits()), (0, endless));
        assert_eq!(ends(lines, &[b'x'; 24], &limits()), (0, None), "the next byte may be its end");
        let program = program(&BuiltinFraming::LengthPrefix { offset: 0, width: 4, big_endian: false, adjust: 0 });
        let oversized = Some(ConnectionError::OversizedMessage { bytes: 41, limit: 40 });
        assert_eq!(ends(program.clone(), &[40, 0, 0, 0], &limits()), (0, None));
        assert_eq!(ends(program, &[41, 0, 0, 0], &limits()), (0, oversized));
    }

    #[test]
    fn what_has_no_room_is_kept_and_cut_later() {
        let framing = MessageFraming::from(Framing::RecordMark);
        let (memory, mut input, mut found) = (Memory::default(), Input::new(), CutMessages::default());
        let chunk = Chunk::from_vec([&[0x80, 0, 0, 1, b'x', 0x80, 0, 0, 2][..], b"y"].concat());
        let mut short = memory.room(4095);
        let all = input.cut(&framing, &chunk, &limits(), (&mut short, &memory.buffers), Time(1), &mut found);
        assert_eq!((all, found.len(), input.unread_bytes(), memory.used()), (Ok(false), 1, 5, (5, 5)));
        let rest = input.take_rest(&mut short).unwrap();
        assert_eq!((&rest[..], memory.used()), (&b"\x80\0\0\x02y"[..], (0, 0)));
        assert_eq!(memory.cut(&mut input, &framing, &rest, &limits(), &mut found), Ok(true));
        // A page, and the header that was cut off, with its place.
        const USED: usize = 4096 + 4 + size_of::<(usize, usize)>();
        assert_eq!((found.len(), input.unread_bytes(), memory.used()), (1, 5, (USED, USED)));
        let last = Chunk::from_vec(b"z".to_vec());
        assert_eq!(memory.cut(&mut input, &framing, &last, &limits(), &mut found), Ok(true));
        assert_eq!((found.len(), input.unread_bytes(), memory.used()), (2, 0, (0, 0)));
    }
}
