//! Rules by which a stream is cut, and what they have in common.

use std::ops::Range;

use crate::error::FramingError;
use crate::framing::{Frame, Framing};
use crate::limits::Limits;

/// How the end of a message is found, and how long a message may be. A rule lives for one call of [`Cutter::next`](super::Cutter::next), so
/// it can borrow what belongs to the connection.
pub trait Rule {
    /// What a rule of its own can find wrong.
    type Error;

    /// What lies at the front of `buf`, of which `scanned` bytes were shown before without telling.
    ///
    /// # Errors
    ///
    /// The bytes make no sense.
    fn front(&mut self, buf: &[u8], scanned: usize) -> Result<Frame, Self::Error>;

    /// Calls `each` with the bodies of the messages at the front of `buf`, as long as they are there in one part and in
    /// full and no longer than allowed, and returns how many bytes they take. A short cut where the rule has one.
    #[inline]
    fn whole_messages(&self, _buf: &[u8], _each: impl FnMut(Range<usize>)) -> usize {
        0
    }

    /// Longest message, in bytes of body.
    fn message_bytes_max(&self) -> usize;

    /// Most bytes that may arrive before the rule can tell how the message goes on.
    fn header_bytes_max(&self) -> usize;

    /// Most bytes that the rule is shown, so that the cut does not depend on how much arrived at once.
    fn look_bytes_max(&self) -> usize {
        self.header_bytes_max()
    }

    /// Most parts of a message.
    fn parts_max(&self) -> u32;

    /// True if the bytes before the end are the message itself: too many of them are an oversized message, not an
    /// endless header.
    fn header_is_message(&self) -> bool {
        false
    }

    /// True if what happens to arrive whole may be longer than a message: a piece of a stream.
    fn cuts_pieces(&self) -> bool {
        false
    }
}

/// What a peer did that ends its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutError<E> {
    /// The rule makes no sense of the bytes.
    Rule(E),
    /// A message longer than the limit.
    Oversized {
        /// Bytes of the message, as far as they are known.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// More bytes than the limit, and the length of the message is still unknown.
    EndlessHeader {
        /// Bytes that arrived.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// More parts than the limit.
    EndlessParts {
        /// The limit.
        limit: u32,
    },
}

/// No header of a length prefix is longer: an offset of 255 and a field of 8 bytes.
const HEADER_BYTES_MAX: usize = u8::MAX as usize + 8;

/// The rule of a [`Framing`] that is not the service's own.
#[derive(Clone, Copy, Debug)]
pub struct Native<'a> {
    /// The framing.
    pub framing: Framing,
    /// The limits of the connection.
    pub limits: &'a Limits,
}

impl Rule for Native<'_> {
    type Error = FramingError;

    #[inline]
    fn front(&mut self, buf: &[u8], scanned: usize) -> Result<Frame, FramingError> {
        self.framing.parse(buf, scanned)
    }

    #[inline]
    fn whole_messages(&self, buf: &[u8], each: impl FnMut(Range<usize>)) -> usize {
        self.framing.whole_messages(buf, self.limits.message_bytes_max, each)
    }

    fn message_bytes_max(&self) -> usize {
        match self.framing {
            // Pieces of a stream are as long as they happen to arrive.
            Framing::Raw => usize::MAX,
            _ => self.limits.message_bytes_max,
        }
    }

    fn header_bytes_max(&self) -> usize {
        match self.framing {
            // Header and body are one here. The last bytes may be the delimiter's beginning; all before them is body.
            Framing::Delimiter(delimiter) => {
                self.limits.message_bytes_max.saturating_add(delimiter.as_bytes().len() - 1)
            }
            // A header is short, and may arrive whole, whatever the limit: a limit below it would end every stream.
            _ => self.limits.header_bytes_max.max(HEADER_BYTES_MAX),
        }
    }

    fn look_bytes_max(&self) -> usize {
        match self.framing {
            Framing::Raw => usize::MAX,
            // The longest message and its end.
            Framing::Delimiter(_) => self.header_bytes_max().saturating_add(1),
            _ => self.header_bytes_max(),
        }
    }

    fn parts_max(&self) -> u32 {
        self.limits.fragments_max
    }

    fn header_is_message(&self) -> bool {
        matches!(self.framing, Framing::Delimiter(_))
    }
}

/// What the rule says of `buf`, within its limits.
#[inline]
pub(super) fn front<R: Rule>(rule: &mut R, buf: &[u8], scanned: usize) -> Result<Frame, CutError<R::Error>> {
    let shown = &buf[..buf.len().min(rule.look_bytes_max())];
    let frame = rule.front(shown, scanned.min(shown.len())).map_err(CutError::Rule)?;
    if matches!(frame, Frame::Part(_)) {
        return Ok(frame);
    }
    let limit = rule.header_bytes_max();
    if buf.len() > limit {
        // The first byte too many, however many arrived with it.
        let bytes = limit + 1;
        return Err(if rule.header_is_message() {
            CutError::Oversized { bytes, limit: rule.message_bytes_max() }
        } else {
            CutError::EndlessHeader { bytes, limit }
        });
    }
    Ok(frame)
}

pub(super) fn check_size<R: Rule>(rule: &R, bytes: usize) -> Result<(), CutError<R::Error>> {
    let limit = rule.message_bytes_max();
    if bytes > limit { Err(CutError::Oversized { bytes, limit }) } else { Ok(()) }
}
