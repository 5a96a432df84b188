//! Bytes of one connection in, messages out. No socket, no clock.
//!
//! A message that lies whole in a received chunk is a slice of it. Any other is put together in a buffer, as it was on
//! the wire, so that what is unfinished can be given back when the connection is detached.

use ksf::framing::{Frame, Framing, Part};
use ksf::limits::Time;
use ksf::pool::Chunk;
use ksf_bpf_framing::{RunError, Verdict};

use crate::error::ConnectionError;
use crate::options::{Limits, MessageFraming};

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
        messages: &mut Vec<Chunk>,
    ) -> Result<(), ConnectionError> {
        let mut at = 0;
        while at < chunk.len() {
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

    /// Bytes of it.
    pub(crate) fn unfinished_bytes(&self) -> usize {
        self.wire.len()
    }

    /// The bytes that belong to no message, as they were on the wire.
    pub(crate) fn take_unread(&mut self) -> Vec<u8> {
        self.cut = Cut::default();
        std::mem::take(&mut self.wire)
    }

    fn cut_in_place(
        &mut self,
        chunk: &Chunk,
        at: &mut usize,
        now: Time,
        limits: &Limits,
        messages: &mut Vec<Chunk>,
    ) -> Result<(), ConnectionError> {
        let rest = &chunk[*at..];
        match self.front(rest, 0, limits)? {
            Front::Part(part) if part.last && part.total_bytes() <= rest.len() => {
                check_size(part.body_bytes, limits)?;
                let start = *at + part.header_bytes;
                messages.push(chunk.slice(start..start + part.body_bytes));
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
        messages: &mut Vec<Chunk>,
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
    fn complete_part(&mut self, messages: &mut Vec<Chunk>) {
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
            messages.push(Chunk::from_vec(wire));
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
