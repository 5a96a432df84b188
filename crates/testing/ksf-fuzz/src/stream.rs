//! Byte streams: the way a stream is cut into chunks does not matter.

use std::sync::Arc;

use ksf::connection::Connection;
use ksf::env::Env;
use ksf::framing::{Frame, Framing, Part};
use ksf::limits::{Limits, Time};
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::ConnKey;
use ksf::session::OnShard;
use ksf::{CloseReason, Peer, Service, Turn};
use ksf_proto::oncrpc::Reply;
use ksf_proto::oncrpc::record::RecordMark;
use ksf_services::echo::MessageEcho;
use ksf_services::rpc::{NullService, Program, ProgramTable};

use crate::input::{Choices, Cuts};

/// The cut of one part does not depend on how much of it has arrived, nor on
/// whether an earlier look did not suffice.
pub fn framing(input: &[u8]) {
    let mut choices = Choices::new(input);
    let framing = choices.framing();
    let stream = choices.rest();
    let whole = framing.parse(stream, 0);
    if let Ok(Frame::Incomplete { need_bytes: Some(need) }) = whole {
        assert!(need > stream.len(), "{framing:?} wants no more than the {} bytes it has", stream.len());
    }
    let mut scanned = 0;
    for len in 0..=stream.len() {
        let prefix = framing.parse(&stream[..len], 0);
        assert_eq!(framing.parse(&stream[..len], scanned), prefix, "{framing:?}, {scanned} of {len} bytes scanned");
        match prefix {
            Ok(Frame::Incomplete { .. }) => scanned = len,
            Ok(Frame::Part(part)) => {
                assert!(part.total_bytes() > 0, "{framing:?} makes no progress");
                if framing == Framing::Raw {
                    let all = Part { header_bytes: 0, body_bytes: len, trailer_bytes: 0, last: true };
                    assert_eq!(part, all);
                } else {
                    assert_eq!(whole, prefix, "{framing:?} cuts differently after {len} bytes");
                }
            }
            Err(_) => assert_eq!(whole, prefix, "{framing:?} fails differently after {len} bytes"),
        }
    }
}

/// A connection answers a stream in one way, however it arrives, and holds
/// nothing once it is over.
pub fn connection(input: &[u8]) {
    let mut choices = Choices::new(input);
    let framing = choices.framing();
    let seed = choices.byte();
    let service = Arc::new(MessageEcho::new(framing).expect("the framing is valid"));
    let (sent, _) = same_for_every_cut(&service, choices.rest(), seed);
    if framing == Framing::Raw {
        assert_eq!(sent, choices.rest());
    }
}

/// The RPC service sends whole records, each a reply that can be read.
pub fn rpc_stream(input: &[u8]) {
    let mut choices = Choices::new(input);
    let seed = choices.byte();
    let mut table = ProgramTable::new();
    let ranged = Program::new("ranged", 7, 2..=4);
    let registered = table.register(Program::NFS_V3).and(table.register(Program::MOUNT_V3)).and(table.register(ranged));
    registered.expect("the programs do not overlap");
    let service = Arc::new(NullService::new("fuzz", table));
    let (sent, reason) = same_for_every_cut(&service, choices.rest(), seed);

    let mut rest = &sent[..];
    while let Some((mark, tail)) = rest.split_first_chunk() {
        let mark = RecordMark::from_bytes(*mark);
        assert!(mark.last, "a reply is one fragment");
        let (message, tail) = tail.split_at(mark.len as usize);
        Reply::parse(message).expect("an own reply can be read");
        rest = tail;
    }
    assert!(rest.is_empty(), "a reply is cut off");
    let unanswered: u64 = service.counters().iter().filter(|c| c.0.starts_with("unanswerable")).map(|c| c.1).sum();
    // Both runs of the stream count.
    assert_eq!(unanswered, if reason == CloseReason::Service { 2 } else { 0 });
}

/// Feeds the stream at once and in pieces, compares, and gives what was sent and
/// why the connection ended.
pub(crate) fn same_for_every_cut<S: Service>(service: &Arc<S>, stream: &[u8], seed: u8) -> (Vec<u8>, CloseReason) {
    let at_once = feed(service, std::iter::once(stream));
    let in_pieces = feed(service, Cuts::new(seed).cut(stream));
    assert_eq!(at_once, in_pieces);
    at_once
}

const SLOT_BYTES: usize = 256;

/// A connection in a small world.
pub(crate) fn new_connection<S: Service>(service: &Arc<S>) -> (Box<Connection>, Env) {
    // Small, so that inputs of a fuzzer's length reach them.
    let limits = Limits { message_bytes_max: 200, header_bytes_max: 64, fragments_max: 16, ..Limits::default() };
    let pool = Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 8).expect("a small pool");
    let mut env = Env::new(limits, pool).expect("an event descriptor");
    let key = ConnKey { index: 0, generation: 0 };
    let state = service.start(&mut Turn::new(&mut env)).expect("the service starts");
    let new = Connection::new(OnShard::new(Arc::clone(service), state), Peer::Unix, key, Time(0));
    (new.expect("the service takes every connection"), env)
}

/// Receives as the engine would, in a slot if there is one that is long enough.
pub(crate) fn receive(connection: &mut Connection, env: &mut Env, bytes: &[u8]) {
    let chunk = match env.pool.take() {
        Some(mut slot) if bytes.len() <= SLOT_BYTES => {
            slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            slot.freeze(bytes.len())
        }
        _ => Chunk::from_vec(bytes.to_vec()),
    };
    connection.receive(chunk, env);
}

fn feed<'a, S: Service>(service: &Arc<S>, chunks: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, CloseReason) {
    let (mut connection, mut env) = new_connection(service);
    let mut sent = Vec::new();
    for bytes in chunks {
        receive(&mut connection, &mut env, bytes);
        send(&mut connection, &mut env, &mut sent);
    }
    connection.peer_closed(&mut env);
    send(&mut connection, &mut env, &mut sent);
    let reason = connection.finished().expect("over when both sides are done");
    connection.end(&mut env);
    assert_eq!((env.pool.in_use(), env.budget.input_bytes()), (0, 0), "slots, bytes of unfinished messages");
    (sent, reason)
}

/// A peer that takes everything at once.
pub(crate) fn send(connection: &mut Connection, env: &mut Env, sent: &mut Vec<u8>) {
    while let Some(mut batch) = connection.take_batch(Time(0), &mut env.spares) {
        while !batch.is_empty() {
            let mut slices: [&[u8]; 8] = [&[]; 8];
            let filled = batch.slices(&mut slices);
            let bytes: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            sent.extend(slices[..filled].iter().copied().flatten());
            batch.advance(bytes, &mut env.spares);
            connection.sent(bytes, batch.is_empty(), env);
        }
    }
}
