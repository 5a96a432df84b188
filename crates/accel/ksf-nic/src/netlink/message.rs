//! Headers and attributes. Sans-IO.

use std::io;

/// Length of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

const NLM_F_REQUEST: u16 = 0x1;
/// Set by the kernel where what is dumped changed meanwhile, so that entries may be missing.
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLA_F_NESTED: u16 = 1 << 15;
/// The highest two bits of an attribute's type are flags.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Attributes under construction.
#[derive(Debug, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds one with these bytes.
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.put(kind, value);
        self
    }

    /// Adds a number.
    pub fn u8(self, kind: u16, value: u8) -> Self {
        self.bytes(kind, &[value])
    }

    /// Adds a number.
    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a text, with the zero at the end that the kernel's NLA_NUL_STRING wants.
    pub fn string(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    /// Adds attributes of attributes.
    pub fn nest(self, kind: u16, inner: Attributes) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.0)
    }

    fn put(&mut self, kind: u16, value: &[u8]) {
        // Requests are built from names of at most 16 bytes and numbers, so lengths fit.
        self.0.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// A request: header, the family's own fixed header, attributes.
pub(super) fn request(kind: u16, flags: u16, sequence: u32, fixed: &[u8], attributes: &Attributes) -> Vec<u8> {
    let length = HEADER_BYTES + fixed.len() + attributes.0.len();
    let mut message = Vec::with_capacity(length);
    message.extend_from_slice(&(length as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
    message.extend_from_slice(&sequence.to_ne_bytes());
    message.extend_from_slice(&0u32.to_ne_bytes());
    message.extend_from_slice(fixed);
    message.extend_from_slice(&attributes.0);
    message
}

/// What a datagram from the kernel adds to the answer of request `sequence`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More datagrams follow.
    More,
    /// The answer is complete.
    Done,
}

/// Takes the messages of a datagram apart; pushes the payload of each to `answers`.
///
/// # Errors
///
/// The error the kernel answered; EBADMSG for what is no netlink message; EINTR where a dump is inconsistent.
pub(super) fn take_apart(mut datagram: &[u8], sequence: u32, answers: &mut Vec<Vec<u8>>) -> io::Result<Progress> {
    let bad = || io::Error::from(rustix::io::Errno::BADMSG);
    while !datagram.is_empty() {
        let length = number(datagram, 0).ok_or_else(bad)? as usize;
        let kind = short(datagram, 4).ok_or_else(bad)?;
        let flags = short(datagram, 6).ok_or_else(bad)?;
        let theirs = number(datagram, 8).ok_or_else(bad)?;
        let payload = datagram.get(HEADER_BYTES..length).ok_or_else(bad)?;
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        if theirs != sequence {
            // The rest of an answer that was given up.
            continue;
        }
        if flags & NLM_F_DUMP_INTR != 0 {
            return Err(rustix::io::Errno::INTR.into());
        }
        match kind {
            NLMSG_ERROR | NLMSG_DONE => {
                let error = number(payload, 0).ok_or_else(bad)? as i32;
                return match error {
                    0.. => Ok(Progress::Done),
                    _ => Err(io::Error::from_raw_os_error(error.checked_neg().ok_or_else(bad)?)),
                };
            }
            _ => answers.push(payload.to_vec()),
        }
    }
    Ok(Progress::More)
}

/// Goes through attributes; stops where they are malformed.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(short(bytes, 0)?);
        let kind = short(bytes, 2)? & NLA_TYPE_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The first attribute of a type.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(theirs, _)| *theirs == kind).map(|(_, value)| value)
}

/// The first attribute of a type, as a number.
pub fn attribute_u32(bytes: &[u8], kind: u16) -> Option<u32> {
    number(attribute(bytes, kind)?, 0)
}

/// The first attribute of a type, as a string.
pub fn attribute_string(bytes: &[u8], kind: u16) -> Option<&str> {
    let value = attribute(bytes, kind)?;
    std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok()
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn attributes_come_back() {
        let inner = Attributes::default().u32(1, 7).string(2, "eth0");
        let built = Attributes::default().u8(5, 1).nest(3, inner).u32(6, u32::MAX);
        assert_eq!(built.0.len() % 4, 0);
        assert_eq!(attribute(&built.0, 5), Some(&[1][..]));
        assert_eq!(attribute_u32(&built.0, 6), Some(u32::MAX));
        let nest = attribute(&built.0, 3).unwrap();
        assert_eq!((attribute_u32(nest, 1), attribute_string(nest, 2)), (Some(7), Some("eth0")));
        assert_eq!(attribute(&built.0, 9), None);
    }

    fn message(kind: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut message = request(kind, 0, sequence, payload, &Attributes::default());
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    #[test]
    fn an_answer_ends_with_its_acknowledgement() {
        let mut answers = Vec::new();
        let ack = message(NLMSG_ERROR, 9, &0i32.to_ne_bytes());
        let datagram = [message(20, 9, b"abcde"), message(20, 8, b"old"), ack].concat();
        assert_eq!(take_apart(&datagram, 9, &mut answers).unwrap(), Progress::Done);
        assert_eq!(answers, [b"abcde".to_vec()]);
        assert_eq!(take_apart(&message(20, 9, b"x"), 9, &mut answers).unwrap(), Progress::More);
    }

    #[test]
    fn refusals_keep_their_number() {
        let datagram = message(NLMSG_ERROR, 1, &(-95i32).to_ne_bytes());
        assert_eq!(take_apart(&datagram, 1, &mut Vec::new()).unwrap_err().raw_os_error(), Some(95));
        let datagram = message(NLMSG_ERROR, 1, &i32::MIN.to_ne_bytes());
        assert!(take_apart(&datagram, 1, &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut answers = Vec::new();
            let _ = take_apart(&bytes, 0, &mut answers);
            prop_assert!(attributes(&bytes).count() <= bytes.len());
        }
    }
}
