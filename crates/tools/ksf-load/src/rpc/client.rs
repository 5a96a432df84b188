//! NULL calls as a [`Client`]: record-marked on a stream, bare in datagrams.

use ksf_proto::oncrpc::record::{MARK_BYTES, RecordMark, put_fragments};
use ksf_proto::oncrpc::{ACCEPTED_HEADER_BYTES, Reply};

use crate::drive::protocol::{Client, Protocol, Ticket, Uniform};
use crate::record::{Fault, Sink};
use crate::rpc::oncrpc::{self, SUCCESS};

/// The longest reply that is read. A NULL reply with the largest verifier has 424 bytes; the rest is slack for
/// other procedures.
const REPLY_BYTES_MAX: usize = 64 * 1024;

/// An encoded call in which only the identifier changes.
#[derive(Debug, Clone)]
pub(crate) struct CallTemplate {
    bytes: Vec<u8>,
    /// Where the four bytes of the identifier are; apart when the call is fragmented.
    xid_at: [usize; 4],
}

impl CallTemplate {
    /// For datagrams: no record mark.
    pub(crate) fn bare(message: &[u8]) -> CallTemplate {
        CallTemplate { bytes: message.to_vec(), xid_at: [0, 1, 2, 3] }
    }

    /// For streams: one fragment, or three (first byte, middle, last byte) as `-f` asks.
    pub(crate) fn marked(message: &[u8], in_three: bool) -> CallTemplate {
        let ahead = if in_three { vec![1, message.len() - 2] } else { Vec::new() };
        let mut bytes = Vec::new();
        put_fragments(&mut bytes, message, ahead);
        let xid_at = match in_three {
            // mark, byte 0, mark, bytes 1 to 3
            true => [4, 9, 10, 11],
            false => [4, 5, 6, 7],
        };
        CallTemplate { bytes, xid_at }
    }

    #[inline]
    fn with_xid(&mut self, xid: u32) -> &[u8] {
        for (at, byte) in self.xid_at.into_iter().zip(xid.to_be_bytes()) {
            self.bytes[at] = byte;
        }
        &self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// How a stream is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadMethod {
    /// One receive per reply: what is missing of the reply, and the mark of the next.
    MarkAhead,
    /// Two receives per reply, the mark and then the fragment, as a plain synchronous client does (`-a 0`).
    MarkThenBody,
}

/// Calls on a record-marked stream.
#[derive(Debug)]
pub(crate) struct RpcStream {
    call: CallTemplate,
    method: ReadMethod,
    results: bool,
    /// The earlier fragments of a reply in several.
    earlier: Vec<u8>,
}

impl RpcStream {
    fn new(call: CallTemplate, method: ReadMethod, results: bool) -> RpcStream {
        RpcStream { call, method, results, earlier: Vec::with_capacity(REPLY_BYTES_MAX) }
    }
}

/// The record mark in front of `bytes`, if it is here.
#[inline]
fn mark_of(bytes: &[u8]) -> Option<RecordMark> {
    bytes.first_chunk().map(|mark| RecordMark::from_bytes(*mark))
}

impl Client for RpcStream {
    type Operation = ();
    type Counters = ();

    #[inline]
    fn encode(&mut self, ticket: &Ticket, _operation: &()) -> &[u8] {
        self.call.with_xid(ticket.id)
    }

    #[inline]
    fn window(&self, held: &[u8]) -> usize {
        let wanted = match (mark_of(held), self.method) {
            (None, ReadMethod::MarkThenBody) => MARK_BYTES,
            // The mark is not known yet. The least a reply can have is 24 bytes with its mark (AUTH_ERROR), so
            // these 32 bytes cannot hold two.
            (None, ReadMethod::MarkAhead) => MARK_BYTES + ACCEPTED_HEADER_BYTES + MARK_BYTES,
            (Some(mark), ReadMethod::MarkThenBody) => MARK_BYTES + mark.len as usize,
            (Some(mark), ReadMethod::MarkAhead) => MARK_BYTES + mark.len as usize + MARK_BYTES,
        };
        wanted - held.len()
    }

    #[inline]
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        let mut at = 0;
        while let Some(mark) = mark_of(&bytes[at..]) {
            let fragment_bytes = mark.len as usize;
            if self.earlier.len() + fragment_bytes > REPLY_BYTES_MAX {
                sink.break_off(Fault::Malformed, || {
                    format!("a fragment of {fragment_bytes} bytes: a reply of more than {REPLY_BYTES_MAX} bytes")
                });
                return bytes.len();
            }
            let body = at + MARK_BYTES;
            let Some(fragment) = bytes.get(body..body + fragment_bytes) else { break };
            if mark.last && self.earlier.is_empty() {
                take_reply(fragment, self.results, sink);
            } else {
                self.earlier.extend_from_slice(fragment);
                if mark.last {
                    take_reply(&self.earlier, self.results, sink);
                    self.earlier.clear();
                }
            }
            at = body + fragment_bytes;
        }
        at
    }
}

/// Calls in datagrams.
#[derive(Debug)]
pub(crate) struct RpcDatagram {
    call: CallTemplate,
    results: bool,
}

impl Client for RpcDatagram {
    type Operation = ();
    type Counters = ();

    #[inline]
    fn encode(&mut self, ticket: &Ticket, _operation: &()) -> &[u8] {
        self.call.with_xid(ticket.id)
    }

    #[inline]
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        take_reply(bytes, self.results, sink);
        bytes.len()
    }
}

/// Judges one reply message and settles its call.
#[inline]
fn take_reply(message: &[u8], results: bool, sink: &mut Sink<'_, ()>) {
    match Reply::parse(message) {
        Ok(Reply { xid, status: SUCCESS, results: behind, .. }) if results || behind.is_empty() => {
            if let Some(request) = sink.settle(xid) {
                sink.complete(request);
            }
        }
        Ok(Reply { status: SUCCESS, results, .. }) => {
            oncrpc::malformed(message, &format_args!("{} bytes too many at the end", results.len()), sink);
        }
        reply => oncrpc::fail(message, reply, sink),
    }
}

/// Calls on streams.
pub(crate) fn streams(call: CallTemplate, method: ReadMethod, results: bool) -> impl Protocol<Client = RpcStream> {
    let request_bytes = call.len();
    Uniform { client: move || RpcStream::new(call.clone(), method, results), id_bits: 32, request_bytes }
}

/// Calls in datagrams.
pub(crate) fn datagrams(call: CallTemplate, results: bool) -> impl Protocol<Client = RpcDatagram> {
    let request_bytes = call.len();
    Uniform { client: move || RpcDatagram { call: call.clone(), results }, id_bits: 32, request_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::tests::Bench;
    use crate::rpc::oncrpc::call_message;
    use ksf_test::rpc;
    use proptest::prelude::*;

    fn call() -> Vec<u8> {
        call_message((100_003, 3), 0, None)
    }

    fn success(xid: u32) -> Vec<u8> {
        rpc::accepted(xid, &[0])
    }

    /// A record in fragments of the given lengths; the last takes the rest.
    fn record(body: &[u8], cuts: &[usize]) -> Vec<u8> {
        let (mut out, mut rest) = (Vec::new(), body);
        for cut in cuts {
            let (head, tail) = rest.split_at((*cut).min(rest.len()));
            out.extend(rpc::fragment(false, head));
            rest = tail;
        }
        [out, rpc::record(rest)].concat()
    }

    fn stream(method: ReadMethod, in_flight: usize) -> Bench<RpcStream> {
        Bench::new(RpcStream::new(CallTemplate::marked(&call(), false), method, false), in_flight)
    }

    /// Sends so many calls, and answers each with what `answer` makes of its identifier.
    fn answered(rpc: &mut Bench<RpcStream>, calls: usize, mut answer: impl FnMut(u32) -> Vec<u8>) -> Vec<u8> {
        let xid = |call: &Vec<u8>| u32::from_be_bytes(*call[MARK_BYTES..].first_chunk().unwrap());
        rpc.send(calls).iter().flat_map(|call| answer(xid(call))).collect()
    }

    #[test]
    fn the_lengths_of_the_original() {
        assert_eq!(CallTemplate::marked(&call(), false).len(), 44);
        assert_eq!(CallTemplate::marked(&call(), true).len(), 52);
        assert_eq!(CallTemplate::bare(&call()).len(), 40);
    }

    #[test]
    fn three_fragments_carry_the_same_call() {
        let mut template = CallTemplate::marked(&call(), true);
        let bytes = template.with_xid(0x0102_0304).to_vec();
        let mut message = Vec::new();
        let mut rest = &bytes[..];
        let mut fragments = Vec::new();
        while let Some((mark, tail)) = rest.split_first_chunk() {
            let RecordMark { last, len } = RecordMark::from_bytes(*mark);
            let len = len as usize;
            fragments.push((len, last));
            message.extend_from_slice(&tail[..len]);
            rest = &tail[len..];
        }
        assert_eq!(fragments, [(1, false), (38, false), (1, true)]);
        let mut expected = call();
        expected[..4].copy_from_slice(&[1, 2, 3, 4]);
        assert_eq!(message, expected);
    }

    #[test]
    fn one_reply_per_receive_when_replies_queue_up() {
        for (method, receives) in [(ReadMethod::MarkAhead, 50), (ReadMethod::MarkThenBody, 100)] {
            let mut rpc = stream(method, 50);
            let bytes = answered(&mut rpc, 50, |xid| record(&success(xid), &[]));
            let per_receive = rpc.feed(&bytes, usize::MAX);
            assert_eq!(rpc.record.answered, 50);
            assert!(per_receive.iter().all(|&replies| replies <= 1));
            assert_eq!(per_receive.len(), receives, "{method:?}");
        }
    }

    #[test]
    fn the_shortest_replies_do_not_share_a_receive() {
        let mut rpc = stream(ReadMethod::MarkAhead, 8);
        let bytes = answered(&mut rpc, 8, |xid| rpc::record(&rpc::words(&[xid, 1, 1, 1, 2])));
        let per_receive = rpc.feed(&bytes, usize::MAX);
        assert!(per_receive.iter().all(|&replies| replies <= 1));
        assert_eq!(rpc.faults(), "8 rejected");
    }

    #[test]
    fn a_record_mark_beyond_the_limit_breaks_the_stream_off() {
        let mut rpc = stream(ReadMethod::MarkAhead, 1);
        rpc.send(1);
        rpc.receive(&0xffff_ffffu32.to_be_bytes());
        assert_eq!((rpc.broken, rpc.faults().as_str()), (true, "1 malformed"));
    }

    #[test]
    fn a_malformed_reply_settles_its_call_once() {
        let mut rpc = stream(ReadMethod::MarkAhead, 2);
        let mut reply = answered(&mut rpc, 1, success);
        reply.push(0);
        rpc.receive(&record(&reply, &[]));
        rpc.receive(&record(&[1, 2], &[]));
        assert_eq!(rpc.faults(), "2 malformed");
        assert_eq!((rpc.record.settled(), rpc.table.in_flight()), (1, 0));
    }

    proptest! {
        /// However the bytes are split and the replies fragmented, each reply is found exactly once.
        #[test]
        fn any_fragments_and_any_splits(
            replies in proptest::collection::vec(proptest::collection::vec(0usize..12, 0..5), 1..20),
            most in 1usize..50,
            mark_ahead: bool,
        ) {
            let method = if mark_ahead { ReadMethod::MarkAhead } else { ReadMethod::MarkThenBody };
            let mut rpc = stream(method, 32);
            let mut cuts = replies.iter();
            let bytes = answered(&mut rpc, replies.len(), |xid| record(&success(xid), cuts.next().unwrap()));
            rpc.feed(&bytes, most);
            prop_assert_eq!((rpc.record.answered, rpc.faults()), (replies.len() as u64, String::new()));
        }

        #[test]
        fn garbage_never_panics_nor_stalls(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut rpc = stream(ReadMethod::MarkAhead, 4);
            rpc.send(1);
            rpc.feed(&bytes, usize::MAX);
        }
    }
}
