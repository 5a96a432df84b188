//! What peers ask for and what the ideal server answers.
//!
//! A request says what is to be done with it, so that the service is a function of the request and the model is, too:
//!
//! ```text
//!   request: peer (4) | number (4) | action (1) | replies (1) | length (2) | filler ...
//!   reply:   peer (4) | number (4) | part (1)   | filler of `length` bytes, told by peer, number and part
//! ```
//!
//! A reply to the wrong peer, of the wrong message, torn or doubled therefore never equals the expected one. On the wire
//! each byte is two letters, so that no body contains a delimiter.

use ksf_test::Random;

/// What a request asks the service to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ServiceAction {
    /// Replies at once, several times.
    Inline,
    /// Needs no reply.
    Quiet,
    /// Replies with the request itself, from the slot it lies in.
    Reflect,
    /// Keeps the message, and replies with it later.
    ReflectLater,
    /// Replies once now, and later as many times as it is asked to.
    Later,
    /// Defers, and then lets it be without an answer.
    LaterQuiet,
    /// Defers, and forgets it.
    Abandon,
    /// Replies once, then closes.
    Close,
    /// Asks a backend, and replies with its answer; meanwhile nothing behind the request is looked at.
    Ask,
    /// Writes a record to a log, and replies at once, several times: none leaves before the record is durable.
    Log,
    /// Replies with the last record of the log, as it is seen now: not before that is durable.
    See,
    /// The service goes on with it later, on its connection, and writes a record then.
    LogLater,
    /// The service panics, with a reply written and an answer deferred.
    Panic,
    /// The service panics when it goes on with the message.
    PanicLater,
}

impl ServiceAction {
    /// Every action, in the order of its number on the wire.
    pub const ALL: [Self; 14] = [
        Self::Inline,
        Self::Quiet,
        Self::Reflect,
        Self::ReflectLater,
        Self::Later,
        Self::LaterQuiet,
        Self::Abandon,
        Self::Close,
        Self::Ask,
        Self::Log,
        Self::See,
        Self::LogLater,
        Self::Panic,
        Self::PanicLater,
    ];
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimRequest {
    /// Number of the peer, over all peers of a world.
    pub peer: u32,
    /// Number of the request, from 0 per peer.
    pub number: u32,
    /// What is asked for.
    pub action: ServiceAction,
    /// How many replies.
    pub replies: u8,
    /// Filler bytes in each.
    pub length: u16,
    /// Filler of the request.
    pub filler: Vec<u8>,
}

const HEADER_BYTES: usize = 12;

impl SimRequest {
    /// A request as `random` has it, with one of `actions` and filler up to `length_max` bytes in both directions.
    pub fn random(peer: u32, number: u32, actions: &[ServiceAction], length_max: usize, random: &mut Random) -> Self {
        let filler = (0..random.length(length_max)).map(|_| random.bits() as u8).collect();
        let replies = random.within(1..=3) as u8;
        let length = random.length(length_max) as u16;
        Self { peer, number, action: random.pick(actions), replies, length, filler }
    }

    /// The body on the wire.
    pub fn to_text(&self) -> Vec<u8> {
        let mut bytes = head(self.peer, self.number);
        bytes.extend([self.action as u8, self.replies]);
        bytes.extend(self.length.to_be_bytes());
        bytes.extend(&self.filler);
        to_text(&bytes)
    }

    /// Reads a body; `None` if nobody wrote it as a request.
    pub fn from_text(text: &[u8]) -> Option<Self> {
        let bytes = from_text(text)?;
        let (header, filler) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        Some(Self {
            peer: word(0),
            number: word(4),
            action: *ServiceAction::ALL.get(usize::from(header[8]))?,
            replies: header[9],
            length: u16::from_be_bytes([header[10], header[11]]),
            filler: filler.to_vec(),
        })
    }

    /// Reply number `part` to it, as on the wire.
    pub fn reply(&self, part: u8) -> Vec<u8> {
        let mut bytes = head(self.peer, self.number);
        bytes.push(part);
        let mut filler = Random::new(u64::from(self.peer) << 40 ^ u64::from(self.number) << 8 ^ u64::from(part));
        bytes.extend((0..self.length).map(|_| filler.bits() as u8));
        to_text(&bytes)
    }

    /// Replies that leave before any deferred one to this request, in order.
    pub fn prompt_replies(&self) -> Vec<Vec<u8>> {
        match self.action {
            ServiceAction::Inline | ServiceAction::Log => (0..self.replies).map(|part| self.reply(part)).collect(),
            ServiceAction::Reflect => vec![self.to_text()],
            ServiceAction::Later | ServiceAction::Close | ServiceAction::See => vec![self.reply(0)],
            _ => Vec::new(),
        }
    }

    /// Deferred replies, in any order.
    pub fn late_replies(&self) -> Vec<Vec<u8>> {
        match self.action {
            ServiceAction::ReflectLater => vec![self.to_text()],
            ServiceAction::Ask | ServiceAction::LogLater => vec![self.reply(0)],
            ServiceAction::Later => (1..=self.replies).map(|part| self.reply(part)).collect(),
            _ => Vec::new(),
        }
    }

    /// True if it is open after the call.
    pub fn is_deferred(&self) -> bool {
        use ServiceAction::{Abandon, Ask, Later, LaterQuiet, LogLater, PanicLater, ReflectLater};
        matches!(self.action, Later | ReflectLater | LaterQuiet | Abandon | Ask | LogLater | PanicLater)
    }

    /// True if its replies wait for a log.
    pub fn is_gated(&self) -> bool {
        matches!(self.action, ServiceAction::Log | ServiceAction::See | ServiceAction::LogLater)
    }
}

/// Whose reply it is: the numbers of peer and request. `None` for what is no reply at all.
pub fn reply_to(text: &[u8]) -> Option<(u32, u32)> {
    let bytes = from_text(text.get(..16)?)?;
    let (peer, number) = bytes.split_first_chunk::<4>()?;
    Some((u32::from_be_bytes(*peer), u32::from_be_bytes(*number.first_chunk()?)))
}

fn head(peer: u32, number: u32) -> Vec<u8> {
    [peer.to_be_bytes(), number.to_be_bytes()].concat()
}

fn to_text(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [b'a' + (byte >> 4), b'a' + (byte & 15)]).collect()
}

fn from_text(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |letter: u8| letter.checked_sub(b'a').filter(|digit| *digit < 16);
    let (pairs, []) = text.as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_round_trip() {
        let mut random = Random::new(5);
        for number in 0..100 {
            let request = SimRequest::random(7, number, &ServiceAction::ALL, 50, &mut random);
            assert_eq!(SimRequest::from_text(&request.to_text()), Some(request.clone()));
            for reply in request.prompt_replies().iter().chain(&request.late_replies()) {
                assert_eq!(reply_to(reply), Some((7, number)));
            }
        }
        assert_eq!(SimRequest::from_text(b"odd"), None);
        assert_eq!(SimRequest::from_text(b"zz"), None);
    }
}
