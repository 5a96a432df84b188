//! Requests and replies of the work service on the wire; the service itself is `ksf_services::work`.
//!
//! ```text
//! request: length (4) | how (4) | microseconds (4) | connection (4) | id (4) | index (8) | filler ...
//! reply:   length (4) | status (4)                 | connection (4) | id (4) | index (8) | filler ...
//! ```
//!
//! Numbers are big endian, lengths count what follows them. Everything from `connection` on is the payload, which the
//! service sends back; the reply to a discarded request ends after its status.

use super::mix::Job;

/// The parts of a request that are no filler.
pub(crate) const REQUEST_BYTES_MIN: usize = LENGTH_BYTES + 8 + PAYLOAD_BYTES_MIN;
/// The longest request: the limit of the service is 1 MiB by default.
pub(crate) const REQUEST_BYTES_MAX: usize = 1 << 20;

const LENGTH_BYTES: usize = 4;
const STATUS_BYTES: usize = 4;
const PAYLOAD_BYTES_MIN: usize = 16;

const STATUS_DONE: u32 = 0;

/// Who a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) connection: u32,
    pub(crate) id: u32,
    /// The how-manieth request of its connection.
    pub(crate) index: u64,
}

/// What a reply turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The payload of this message, with the right filler.
    Done(Name),
    /// The reply to a message that was discarded: it has no name.
    Discarded,
    /// Another status, or none of the forms above.
    Malformed,
    /// The form is right, the filler is not.
    Corrupt(Name),
}

/// Makes requests of one length and reads their replies.
#[derive(Debug)]
pub(crate) struct Codec {
    filler: Box<[u8]>,
    discard: bool,
}

impl Codec {
    /// `request_bytes` is the whole request, its length word included.
    pub(crate) fn new(request_bytes: usize, discard: bool) -> Codec {
        let filler = (0..request_bytes - REQUEST_BYTES_MIN).map(|at| (at % 251) as u8).collect();
        Codec { filler, discard }
    }

    pub(crate) fn request_bytes(&self) -> usize {
        REQUEST_BYTES_MIN + self.filler.len()
    }

    /// The length of a reply, its length word included.
    fn reply_bytes(&self) -> usize {
        LENGTH_BYTES + STATUS_BYTES + if self.discard { 0 } else { PAYLOAD_BYTES_MIN + self.filler.len() }
    }

    /// Appends a request.
    pub(crate) fn put_request(&self, out: &mut Vec<u8>, job: Job, name: Name) {
        let length = (self.request_bytes() - LENGTH_BYTES) as u32;
        let mut head = [0; REQUEST_BYTES_MIN];
        head[0..4].copy_from_slice(&length.to_be_bytes());
        head[4..8].copy_from_slice(&job.kind.how().to_be_bytes());
        head[8..12].copy_from_slice(&job.work_us.to_be_bytes());
        head[12..16].copy_from_slice(&name.connection.to_be_bytes());
        head[16..20].copy_from_slice(&name.id.to_be_bytes());
        head[20..28].copy_from_slice(&name.index.to_be_bytes());
        out.extend_from_slice(&head);
        out.extend_from_slice(&self.filler);
    }

    /// Takes the first reply off `bytes`; returns it and its length. `None`: it is not whole yet.
    ///
    /// All replies of a run have the same length, so another length is malformed before its bytes are here.
    #[inline]
    pub(crate) fn take_reply(&self, bytes: &[u8]) -> Option<(Reply, usize)> {
        let length = bytes.first_chunk().map(|length| u32::from_be_bytes(*length) as usize)?;
        if length != self.reply_bytes() - LENGTH_BYTES {
            return Some((Reply::Malformed, bytes.len()));
        }
        let reply = bytes.get(LENGTH_BYTES..LENGTH_BYTES + length)?;
        Some((self.read(reply), LENGTH_BYTES + length))
    }

    fn read(&self, reply: &[u8]) -> Reply {
        let word =
            |at: usize| reply.get(at..at + 4).map(|word| u32::from_be_bytes(word.try_into().expect("four bytes")));
        let Some(status) = word(0) else { return Reply::Malformed };
        if self.discard {
            return if status == STATUS_DONE { Reply::Discarded } else { Reply::Malformed };
        }
        let (Some(connection), Some(id), Some(high), Some(low)) = (word(4), word(8), word(12), word(16)) else {
            return Reply::Malformed;
        };
        let name = Name { connection, id, index: u64::from(high) << 32 | u64::from(low) };
        match status {
            STATUS_DONE if reply[STATUS_BYTES + PAYLOAD_BYTES_MIN..] == *self.filler => Reply::Done(name),
            STATUS_DONE => Reply::Corrupt(name),
            _ => Reply::Malformed,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::mix::{Class, WorkKind};
    use super::*;

    /// What a correct server answers to a request.
    pub(crate) fn answer(request: &[u8]) -> Vec<u8> {
        let discard = request[4..8] == WorkKind::Discard.how().to_be_bytes();
        let payload = if discard { &[][..] } else { &request[12..] };
        let length = (STATUS_BYTES + payload.len()) as u32;
        [&length.to_be_bytes()[..], &STATUS_DONE.to_be_bytes(), payload].concat()
    }

    const NAME: Name = Name { connection: 7, id: 0x0102_0304, index: 0x1_0000_0002 };

    fn request(codec: &Codec, kind: WorkKind) -> Vec<u8> {
        let mut out = Vec::new();
        codec.put_request(&mut out, Job { class: Class::Quick, kind, work_us: 300 }, NAME);
        out
    }

    #[test]
    fn a_request_is_as_documented() {
        let bytes = request(&Codec::new(30, false), WorkKind::Sleep);
        let expected = [0, 0, 0, 26, 0, 0, 0, 1, 0, 0, 1, 44, 0, 0, 0, 7, 1, 2, 3, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0, 1];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn replies_are_read_when_they_are_whole() {
        let codec = Codec::new(64, false);
        let reply = answer(&request(&codec, WorkKind::Inline));
        for cut in 0..reply.len() {
            assert_eq!(codec.take_reply(&reply[..cut]), None, "{cut}");
        }
        let two = [reply.clone(), reply.clone()].concat();
        assert_eq!(codec.take_reply(&two), Some((Reply::Done(NAME), reply.len())));
    }

    #[test]
    fn every_wrong_byte_is_seen() {
        let codec = Codec::new(64, false);
        let good = answer(&request(&codec, WorkKind::Inline));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert_ne!(codec.take_reply(&bad), Some((Reply::Done(NAME), good.len())), "byte {at}");
        }
        let mut other_status = good.clone();
        other_status[7] = 1;
        assert_eq!(codec.take_reply(&other_status), Some((Reply::Malformed, good.len())));
    }

    #[test]
    fn a_discarded_request_has_a_bare_reply() {
        let codec = Codec::new(5000, true);
        let sent = request(&codec, WorkKind::Discard);
        assert_eq!(sent.len(), 5000);
        assert_eq!(codec.take_reply(&answer(&sent)), Some((Reply::Discarded, 8)));
        assert_eq!(codec.take_reply(&[0, 0, 0, 4, 0, 0, 0, 1]), Some((Reply::Malformed, 8)));
    }
}
