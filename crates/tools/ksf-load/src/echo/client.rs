//! Echo as a [`Protocol`]: every byte of every reply is compared with what was sent.
//!
//! On a stream the replies come in order and need no identifier: the stream is one endless
//! [`Pattern`]. In a datagram the identifier stands in front, as many of its four bytes as fit, so that loss,
//! duplicates and reordering are told apart; the pattern fills the rest.

use crate::drive::protocol::{Factory, Protocol};
use crate::echo::pattern::Pattern;
use crate::record::Sink;
use crate::record::fault::Fault;

/// The most that is asked of one receive on a stream. Messages up to this length arrive by one receive each.
const RECEIVE_BYTES_MAX: usize = 256 * 1024;

/// The longest datagram payload over IPv4: 65,535 less 20 of IP and 8 of UDP header.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 65_507;

/// Echo on a stream.
#[derive(Debug)]
pub(crate) struct EchoStream {
    pattern: Pattern,
    buffer: Box<[u8]>,
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
        // With --batch a receive takes what there is, so short messages get a long buffer as well.
        EchoStream {
            pattern,
            buffer: vec![0; RECEIVE_BYTES_MAX].into(),
            send_offset: 0,
            receive_offset: 0,
            receive_index: 0,
            checked: 0,
            corrupt: false,
        }
    }
}

impl Protocol for EchoStream {
    #[inline]
    fn encode(&mut self, _id: u32, _index: u64) -> &[u8] {
        let offset = self.send_offset;
        self.send_offset = self.pattern.next_offset(offset);
        self.pattern.slice(offset, 0, self.pattern.message_bytes())
    }

    #[inline]
    fn window(&mut self, batch: bool) -> &mut [u8] {
        let len = match batch {
            true => self.buffer.len(),
            false => (self.pattern.message_bytes() - self.checked).min(self.buffer.len()),
        };
        &mut self.buffer[..len]
    }

    #[inline]
    fn received(&mut self, len: usize, sink: &mut Sink<'_>) {
        let message_bytes = self.pattern.message_bytes();
        let mut got = &self.buffer[..len];
        while !got.is_empty() {
            if !sink.is_awaiting() {
                sink.break_off(Fault::Unsolicited, || format!("{} bytes after the last echo", got.len()));
                return;
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
    }
}

/// Echo in datagrams.
#[derive(Debug)]
pub(crate) struct EchoDatagram {
    pattern: Pattern,
    request: Box<[u8]>,
    buffer: Box<[u8]>,
    id_bytes: usize,
}

impl EchoDatagram {
    fn new(pattern: Pattern) -> EchoDatagram {
        let message_bytes = pattern.message_bytes();
        EchoDatagram {
            request: vec![0; message_bytes].into(),
            // Longer than any datagram, so that one that is too long is seen as such.
            buffer: vec![0; 1 << 16].into(),
            id_bytes: id_bytes(message_bytes),
            pattern,
        }
    }
}

/// How many bytes of the identifier fit.
fn id_bytes(message_bytes: usize) -> usize {
    message_bytes.min(4)
}

impl Protocol for EchoDatagram {
    #[inline]
    fn encode(&mut self, id: u32, index: u64) -> &[u8] {
        let (head, body) = self.request.split_at_mut(self.id_bytes);
        head.copy_from_slice(&id.to_be_bytes()[4 - self.id_bytes..]);
        let offset = self.pattern.offset(index);
        body.copy_from_slice(self.pattern.slice(offset, self.id_bytes, body.len()));
        &self.request
    }

    #[inline]
    fn window(&mut self, _batch: bool) -> &mut [u8] {
        &mut self.buffer
    }

    #[inline]
    fn received(&mut self, len: usize, sink: &mut Sink<'_>) {
        let message_bytes = self.pattern.message_bytes();
        let Some((head, body)) = self.buffer[..len].split_at_checked(self.id_bytes) else {
            sink.fault(Fault::Length, || {
                format!("datagram of {len} bytes, not {message_bytes}, too short for its number")
            });
            return;
        };
        let id = head.iter().fold(0, |id, byte| id << 8 | u32::from(*byte));
        let Some(request) = sink.settle(id) else {
            return;
        };
        if len != message_bytes {
            sink.reject(Fault::Length, || {
                format!("message {}: datagram of {len} bytes, not {message_bytes}", request.index)
            });
            return;
        }
        let offset = self.pattern.offset(request.index);
        let expected = self.pattern.slice(offset, self.id_bytes, body.len());
        if body != expected {
            sink.reject(Fault::Corrupt, || {
                let difference = self.pattern.describe_difference(offset + self.id_bytes, expected, body);
                format!("message {}, after its number: {difference}", request.index)
            });
            return;
        }
        sink.complete(request);
    }
}

/// Makes [`EchoStream`]s.
#[derive(Debug)]
pub(crate) struct EchoStreamFactory(pub(crate) Pattern);

impl Factory for EchoStreamFactory {
    type Protocol = EchoStream;

    fn make(&self) -> EchoStream {
        EchoStream::new(self.0.clone())
    }

    fn id_bits(&self) -> u32 {
        32
    }

    fn request_bytes(&self) -> usize {
        self.0.message_bytes()
    }
}

/// Makes [`EchoDatagram`]s.
#[derive(Debug)]
pub(crate) struct EchoDatagramFactory(pub(crate) Pattern);

impl Factory for EchoDatagramFactory {
    type Protocol = EchoDatagram;

    fn make(&self) -> EchoDatagram {
        EchoDatagram::new(self.0.clone())
    }

    fn id_bits(&self) -> u32 {
        8 * id_bytes(self.0.message_bytes()) as u32
    }

    fn request_bytes(&self) -> usize {
        self.0.message_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::table::Table;
    use crate::record::Record;
    use proptest::prelude::*;

    fn receive<P: Protocol>(echo: &mut P, table: &mut Table, rec: &mut Record, bytes: &[u8]) {
        echo.window(true)[..bytes.len()].copy_from_slice(bytes);
        echo.received(bytes.len(), &mut Sink::new(table, rec, 10));
    }

    fn send<P: Protocol>(echo: &mut P, table: &mut Table, n: usize) -> Vec<Vec<u8>> {
        (0..n)
            .map(|_| {
                let (id, index) = table.issue(1);
                echo.encode(id, index).to_vec()
            })
            .collect()
    }

    #[test]
    fn swapped_stream_messages_are_corrupt() {
        let mut echo = EchoStream::new(Pattern::new(10));
        let (mut table, mut rec) = (Table::new(4, 32, 0), Record::new());
        let messages = send(&mut echo, &mut table, 4);
        for at in [0, 2, 1, 3] {
            receive(&mut echo, &mut table, &mut rec, &messages[at]);
        }
        assert_eq!(rec.faults.count(Fault::Corrupt), 2);
        assert_eq!(rec.latencies.count(), 2);
        assert_eq!((rec.settled, table.in_flight()), (4, 0));
    }

    #[test]
    fn bytes_beyond_the_last_echo_are_unsolicited() {
        let mut echo = EchoStream::new(Pattern::new(10));
        let (mut table, mut rec) = (Table::new(1, 32, 0), Record::new());
        let messages = send(&mut echo, &mut table, 1);
        receive(&mut echo, &mut table, &mut rec, &messages[0]);
        receive(&mut echo, &mut table, &mut rec, b"x");
        assert_eq!(rec.faults.count(Fault::Unsolicited), 1);
    }

    #[test]
    fn datagrams_tell_what_went_wrong() {
        let mut echo = EchoDatagram::new(Pattern::new(16));
        let (mut table, mut rec) = (Table::new(8, 32, 77), Record::new());
        let messages = send(&mut echo, &mut table, 6);
        receive(&mut echo, &mut table, &mut rec, &messages[1]);
        receive(&mut echo, &mut table, &mut rec, &messages[0]);
        receive(&mut echo, &mut table, &mut rec, &messages[0]);
        receive(&mut echo, &mut table, &mut rec, &messages[2][..15]);
        let mut wrong = messages[3].clone();
        wrong[15] ^= 1;
        receive(&mut echo, &mut table, &mut rec, &wrong);
        let mut unknown = messages[4].clone();
        unknown[0] ^= 0x40;
        receive(&mut echo, &mut table, &mut rec, &unknown);
        receive(&mut echo, &mut table, &mut rec, &messages[5][..3]);
        let counts = [(Fault::Duplicate, 1), (Fault::Length, 2), (Fault::Corrupt, 1), (Fault::Unknown, 1)];
        for (kind, count) in counts {
            assert_eq!(rec.faults.count(kind), count, "{kind:?}: {:?}", rec.notes);
        }
        assert_eq!(rec.faults.total(), 5);
        assert_eq!(rec.reordered, 1);
        assert_eq!(table.in_flight(), 2, "4 and 5 are still awaited");
    }

    proptest! {
        #[test]
        fn a_faithful_stream_is_accepted_in_any_pieces(
            len in 1usize..3000, messages in 1usize..12, pieces in proptest::collection::vec(1usize..2000, 1..50),
        ) {
            let mut echo = EchoStream::new(Pattern::new(len));
            let (mut table, mut rec) = (Table::new(messages, 32, 0), Record::new());
            let bytes = send(&mut echo, &mut table, messages).concat();
            let mut rest = &bytes[..];
            for piece in pieces.iter().cycle() {
                let take = (*piece).min(rest.len()).min(echo.window(false).len());
                receive(&mut echo, &mut table, &mut rec, &rest[..take]);
                rest = &rest[take..];
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(rec.latencies.count(), messages as u64);
            prop_assert_eq!(rec.faults.total(), 0);
        }

        #[test]
        fn any_flipped_bit_is_found(len in 1usize..500, messages in 1usize..6, at: proptest::sample::Index, bit in 0u8..8) {
            let mut echo = EchoStream::new(Pattern::new(len));
            let (mut table, mut rec) = (Table::new(messages, 32, 0), Record::new());
            let mut bytes = send(&mut echo, &mut table, messages).concat();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            receive(&mut echo, &mut table, &mut rec, &bytes);
            prop_assert_eq!(rec.faults.count(Fault::Corrupt), 1);
            prop_assert_eq!(rec.latencies.count(), messages as u64 - 1);
        }

        #[test]
        fn faithful_datagrams_are_accepted_in_any_order(len in 1usize..300, mut order in proptest::sample::subsequence((0..20usize).collect::<Vec<_>>(), 20)) {
            let factory = EchoDatagramFactory(Pattern::new(len));
            let mut echo = factory.make();
            let (mut table, mut rec) = (Table::new(20, factory.id_bits(), 3), Record::new());
            let messages = send(&mut echo, &mut table, 20);
            order.reverse();
            for at in order {
                receive(&mut echo, &mut table, &mut rec, &messages[at]);
            }
            prop_assert_eq!(rec.latencies.count(), 20);
            prop_assert_eq!(rec.faults.total(), 0);
        }
    }
}
