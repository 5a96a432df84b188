//! Echo as a [`Client`]: every byte of every reply is compared with what was sent.
//!
//! On a stream the replies come in order and need no identifier: the stream is one endless
//! [`Pattern`]. In a datagram the identifier stands in front, as many of its four bytes as fit, so that loss,
//! duplicates and reordering are told apart; the pattern fills the rest.

use crate::drive::protocol::{Client, Protocol, Ticket, Uniform};
use crate::echo::pattern::Pattern;
use crate::record::{Fault, Sink};

/// The longest datagram payload over IPv4: 65,535 less 20 of IP and 8 of UDP header.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 65_507;

/// Echo on a stream.
#[derive(Debug)]
pub(crate) struct EchoStream {
    pattern: Pattern,
    send_offset: usize,
    receive_offset: usize,
    receive_index: u64,
    /// How much of the current reply has been checked.
    checked: usize,
    /// Whether the current reply has been counted as wrong.
    corrupt: bool,
}

impl EchoStream {
    fn new(pattern: Pattern) -> EchoStream {
        EchoStream { pattern, send_offset: 0, receive_offset: 0, receive_index: 0, checked: 0, corrupt: false }
    }
}

impl Client for EchoStream {
    type Operation = ();
    type Counters = ();

    #[inline]
    fn encode(&mut self, _ticket: &Ticket, _operation: &()) -> &[u8] {
        let offset = self.send_offset;
        self.send_offset = self.pattern.next_offset(offset);
        self.pattern.slice(offset, 0, self.pattern.message_bytes())
    }

    #[inline]
    fn window(&self, _held: &[u8]) -> usize {
        self.pattern.message_bytes() - self.checked
    }

    #[inline]
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        let message_bytes = self.pattern.message_bytes();
        let mut got = bytes;
        while !got.is_empty() {
            if !sink.is_awaiting() {
                sink.break_off(Fault::Unsolicited, || format!("{} bytes after the last echo", got.len()));
                break;
            }
            let (piece, rest) = got.split_at((message_bytes - self.checked).min(got.len()));
            let expected = self.pattern.slice(self.receive_offset, self.checked, piece.len());
            if piece != expected && !self.corrupt {
                self.corrupt = true;
                let (index, from) = (self.receive_index, self.checked);
                sink.fault(Fault::Corrupt, || {
                    let place = self.receive_offset + from;
                    let difference = self.pattern.describe_difference(place, expected, piece);
                    format!("message {index}, from byte {from}: {difference}")
                });
            }
            got = rest;
            self.checked += piece.len();
            if self.checked == message_bytes {
                self.checked = 0;
                self.receive_offset = self.pattern.next_offset(self.receive_offset);
                self.receive_index += 1;
                let corrupt = std::mem::take(&mut self.corrupt);
                match sink.settle_oldest() {
                    Some(request) if !corrupt => sink.complete(request),
                    _ => sink.settled_wrong(),
                }
            }
        }
        bytes.len()
    }
}

/// Echo in datagrams.
#[derive(Debug)]
pub(crate) struct EchoDatagram {
    pattern: Pattern,
    request: Box<[u8]>,
    id_bytes: usize,
}

impl EchoDatagram {
    fn new(pattern: Pattern) -> EchoDatagram {
        let message_bytes = pattern.message_bytes();
        EchoDatagram { request: vec![0; message_bytes].into(), id_bytes: id_bytes(message_bytes), pattern }
    }
}

/// How many bytes of the identifier fit.
fn id_bytes(message_bytes: usize) -> usize {
    message_bytes.min(4)
}

impl Client for EchoDatagram {
    type Operation = ();
    type Counters = ();

    #[inline]
    fn encode(&mut self, ticket: &Ticket, _operation: &()) -> &[u8] {
        let (head, body) = self.request.split_at_mut(self.id_bytes);
        head.copy_from_slice(&ticket.id.to_be_bytes()[4 - self.id_bytes..]);
        let offset = self.pattern.offset(ticket.index);
        body.copy_from_slice(self.pattern.slice(offset, self.id_bytes, body.len()));
        &self.request
    }

    #[inline]
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        let (len, message_bytes) = (bytes.len(), self.pattern.message_bytes());
        let Some((head, body)) = bytes.split_at_checked(self.id_bytes) else {
            sink.fault(Fault::Length, || {
                format!("datagram of {len} bytes, not {message_bytes}, too short for its number")
            });
            return len;
        };
        let id = head.iter().fold(0, |id, byte| id << 8 | u32::from(*byte));
        let Some(request) = sink.settle(id) else { return len };
        if len != message_bytes {
            sink.reject(Fault::Length, || {
                format!("message {}: datagram of {len} bytes, not {message_bytes}", request.index)
            });
            return len;
        }
        let offset = self.pattern.offset(request.index);
        let expected = self.pattern.slice(offset, self.id_bytes, body.len());
        match body == expected {
            true => sink.complete(request),
            false => sink.reject(Fault::Corrupt, || {
                let difference = self.pattern.describe_difference(offset + self.id_bytes, expected, body);
                format!("message {}, after its number: {difference}", request.index)
            }),
        }
        len
    }
}

/// Echo on streams.
pub(crate) fn streams(pattern: Pattern) -> impl Protocol<Client = EchoStream> {
    let request_bytes = pattern.message_bytes();
    Uniform { client: move || EchoStream::new(pattern.clone()), id_bits: 32, request_bytes }
}

/// Echo in datagrams.
pub(crate) fn datagrams(pattern: Pattern) -> impl Protocol<Client = EchoDatagram> {
    let request_bytes = pattern.message_bytes();
    let id_bits = 8 * id_bytes(request_bytes) as u32;
    Uniform { client: move || EchoDatagram::new(pattern.clone()), id_bits, request_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::tests::Bench;
    use proptest::prelude::*;

    #[test]
    fn swapped_stream_messages_are_corrupt() {
        let mut echo = Bench::new(EchoStream::new(Pattern::new(10)), 4);
        let messages = echo.send(4);
        for at in [0, 2, 1, 3] {
            echo.receive(&messages[at]);
        }
        assert_eq!(echo.faults(), "2 corrupt");
        assert_eq!((echo.record.answered, echo.record.settled(), echo.table.in_flight()), (2, 4, 0));
    }

    #[test]
    fn bytes_beyond_the_last_echo_are_unsolicited() {
        let mut echo = Bench::new(EchoStream::new(Pattern::new(10)), 1);
        let messages = echo.send(1);
        echo.receive(&messages[0]);
        echo.receive(b"x");
        assert_eq!(echo.faults(), "1 unsolicited");
    }

    #[test]
    fn datagrams_tell_what_went_wrong() {
        let mut echo = Bench::new(EchoDatagram::new(Pattern::new(16)), 8);
        let messages = echo.send(6);
        for at in [1, 0, 0] {
            echo.receive(&messages[at]);
        }
        echo.receive(&messages[2][..15]);
        let mut wrong = messages[3].clone();
        wrong[15] ^= 1;
        echo.receive(&wrong);
        let mut unknown = messages[4].clone();
        unknown[0] ^= 0x40;
        echo.receive(&unknown);
        echo.receive(&messages[5][..3]);
        assert_eq!(echo.faults(), "1 duplicate, 1 unknown, 1 corrupt, 2 length", "{:?}", echo.record.notes);
        assert_eq!(echo.record.reordered, 1);
        assert_eq!(echo.table.in_flight(), 2, "4 and 5 are still awaited");
    }

    proptest! {
        #[test]
        fn a_faithful_stream_is_accepted_in_any_pieces(
            len in 1usize..3000, messages in 1usize..12, pieces in proptest::collection::vec(1usize..2000, 1..50),
        ) {
            let mut echo = Bench::new(EchoStream::new(Pattern::new(len)), messages);
            let bytes = echo.send(messages).concat();
            let mut rest = &bytes[..];
            for piece in pieces.iter().cycle() {
                let take = (*piece).min(rest.len()).min(echo.client.window(&[]));
                echo.receive(&rest[..take]);
                rest = &rest[take..];
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!((echo.record.answered, echo.faults()), (messages as u64, String::new()));
        }

        #[test]
        fn any_flipped_bit_is_found(len in 1usize..500, messages in 1usize..6, at: proptest::sample::Index, bit in 0u8..8) {
            let mut echo = Bench::new(EchoStream::new(Pattern::new(len)), messages);
            let mut bytes = echo.send(messages).concat();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            echo.receive(&bytes);
            prop_assert_eq!((echo.record.answered, echo.faults()), (messages as u64 - 1, "1 corrupt".into()));
        }

        #[test]
        fn faithful_datagrams_are_accepted_in_any_order(len in 1usize..300, mut order in proptest::sample::subsequence((0..20usize).collect::<Vec<_>>(), 20)) {
            let mut echo = Bench::of(&datagrams(Pattern::new(len)), 20);
            let messages = echo.send(20);
            order.reverse();
            for at in order {
                echo.receive(&messages[at]);
            }
            prop_assert_eq!((echo.record.answered, echo.faults()), (20, String::new()));
        }
    }
}
