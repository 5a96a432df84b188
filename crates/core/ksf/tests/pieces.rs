//! Replies of several pieces: slots, buffers, ranges of files and the bytes between them leave as one message.

use std::any::Any;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::files::{File, FileRange, NoFileReplies};
use ksf::framing::{Delimiter, Framing, LengthPrefix};
use ksf::gates::{Gate, LogId};
use ksf::limits::Limits;
use ksf::pool::Chunk;
use ksf::service::{Message, Peer, Refused};
use ksf::{Pieces, Profile, Reply, Server, Service, Turn, Unlogged};

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Now,
    /// Behind a gate.
    Gated,
    /// By a thread.
    Later,
    /// When the message is resumed.
    Resumed,
    /// By the shard itself, at the end of the turn.
    TurnEnd,
    /// Without pieces.
    Plain,
}

const WHENS: [When; 6] = [When::Now, When::Gated, When::Later, When::Resumed, When::TurnEnd, When::Plain];

/// Of a request: how it is answered, and the seed of the pieces. Filler follows.
const HEAD_BYTES: usize = 6;
const CONTENT_BYTES: usize = 1 << 20;

fn request(when: When, seed: u32, filler: &[u8]) -> Vec<u8> {
    let at = WHENS.iter().position(|other| *other == when).unwrap();
    // No byte of a request is a line feed.
    let text = format!("{at}{seed:05}");
    assert_eq!(text.len(), HEAD_BYTES);
    [text.as_bytes(), filler].concat()
}

/// One piece of a reply.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Written(usize),
    Bytes(usize),
    Owned(usize),
    Heap(usize),
    Buffer(usize),
    /// The request, where it was received.
    Slot,
    /// Offset and length.
    File(usize, usize),
}

/// The pieces of the reply with this seed. Every third has a head, a slot, bytes, a buffer, a range of a file and a slot.
fn plan(seed: u32) -> Vec<Kind> {
    let mut random = Random::new(u64::from(seed) + 1);
    if seed.is_multiple_of(3) {
        let [a, b, c, d] = std::array::from_fn(|_| random.pick(&[0, 1, 3, 100, 2048, 2049, 5000, 70_000]));
        return vec![Kind::Written(a), Kind::Slot, Kind::Bytes(b), Kind::Owned(c), Kind::File(7, d), Kind::Slot];
    }
    let count = random.within(0..=12);
    let piece = |random: &mut Random| {
        let bytes = random.pick(&[0, 1, 3, 100, 2048, 2049, 5000, 70_000]);
        match random.within(0..=6) {
            0 => Kind::Written(bytes),
            1 => Kind::Bytes(bytes),
            2 => Kind::Owned(bytes),
            3 => Kind::Heap(bytes),
            4 => Kind::Buffer(bytes),
            5 => Kind::Slot,
            _ => Kind::File(random.within(0..=1000), random.pick(&[0, 1, 5000, 600_000])),
        }
    };
    (0..count).map(|_| piece(&mut random)).collect()
}

fn body(seed: u32, request: &[u8], content: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (at, kind) in plan(seed).into_iter().enumerate() {
        match kind {
            Kind::Written(bytes)
            | Kind::Bytes(bytes)
            | Kind::Owned(bytes)
            | Kind::Heap(bytes)
            | Kind::Buffer(bytes) => {
                body.extend_from_slice(&pattern(bytes, at as u64));
            }
            Kind::Slot => body.extend_from_slice(request),
            Kind::File(offset, bytes) => body.extend_from_slice(&content[offset..][..bytes]),
        }
    }
    body
}

struct Assembler {
    framing: Framing,
    file: File,
    /// What is read instead of the file where there are no ranges of files.
    content: Arc<Vec<u8>>,
}

/// A request that waits.
struct Waiting(Chunk);

impl Assembler {
    fn assemble(&self, request: &Chunk, pieces: &mut Pieces<'_>) -> Result<(), NoFileReplies> {
        let seed = std::str::from_utf8(&request[1..HEAD_BYTES]).unwrap().parse().unwrap();
        for (at, kind) in plan(seed).into_iter().enumerate() {
            let at = at as u64;
            match kind {
                Kind::Written(bytes) => pieces.write(|out| out.extend_from_slice(&pattern(bytes, at))),
                Kind::Bytes(bytes) => pieces.bytes(&pattern(bytes, at)),
                Kind::Owned(bytes) => pieces.owned(pattern(bytes, at)),
                Kind::Heap(bytes) => pieces.chunk(Chunk::from_vec(pattern(bytes, at))),
                Kind::Buffer(bytes) => {
                    let mut buffer = ksf::buffers::Buffers::default().take(bytes);
                    buffer.fill(&pattern(bytes, at));
                    pieces.buffer(buffer);
                }
                Kind::Slot => pieces.chunk(request.clone()),
                Kind::File(offset, bytes) => {
                    pieces.file(FileRange { file: self.file.clone(), offset: offset as u64, bytes })?;
                }
            }
        }
        Ok(())
    }

    /// The same with the bytes of the file instead of its ranges, where those are refused.
    fn copy(&self, request: &Chunk) -> Vec<u8> {
        let seed = std::str::from_utf8(&request[1..HEAD_BYTES]).unwrap().parse().unwrap();
        body(seed, request, &self.content)
    }
}

/// The log, the number of its last record, and what is answered at the end of the turn.
struct Desk {
    log: LogId,
    last: u64,
    at_end: Vec<(Deferred, Chunk)>,
}

struct Shared(Arc<Assembler>);

impl Service for Shared {
    type Shard = Desk;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, keeps_messages: true, ..Profile::new("assembler", self.0.framing) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Desk> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        Ok(Desk { log, last: 0, at_end: Vec::new() })
    }

    fn accept(&self, _: &mut Desk, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, desk: &mut Desk, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let request = message.keep();
        let when = WHENS[usize::from(request[0] - b'0')];
        match when {
            When::Now | When::Gated => {
                if when == When::Gated {
                    desk.last += 1;
                    reply.gate(Gate { log: desk.log, number: desk.last });
                }
                if reply.pieces(|pieces| self.0.assemble(&request, pieces)).is_err() {
                    reply.owned(self.0.copy(&request));
                }
            }
            When::Later => {
                let (deferred, service) = (reply.defer(), Arc::clone(&self.0));
                std::thread::spawn(move || {
                    if let Err(owed) = deferred.reply_pieces(|pieces| service.assemble(&request, pieces)) {
                        owed.reply(service.copy(&request));
                    }
                });
            }
            When::Resumed => reply.defer().resume(Waiting(request)),
            When::TurnEnd => desk.at_end.push((reply.defer(), request)),
            When::Plain => reply.bytes(&self.0.copy(&request)),
        }
    }

    fn resume(&self, _: &mut Desk, (): &mut (), state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        let Waiting(request) = *state.downcast().unwrap();
        if reply.pieces(|pieces| self.0.assemble(&request, pieces)).is_err() {
            reply.owned(self.0.copy(&request));
        }
    }

    fn turn_end(&self, desk: &mut Desk, turn: &mut Turn<'_>) {
        for (deferred, request) in std::mem::take(&mut desk.at_end) {
            if let Err(owed) = turn.reply_pieces(deferred, |pieces| self.0.assemble(&request, pieces)) {
                turn.reply(owed, self.0.copy(&request));
            }
        }
        turn.release(desk.log, desk.last);
    }
}

fn framed(framing: Framing, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    framing.begin_reply(&mut message);
    message.extend_from_slice(body);
    framing.finish_reply(&mut message, 0, 0).unwrap();
    message.extend_from_slice(framing.reply_trailer());
    message
}

fn start(engine: EngineKind, addr: &str, framing: Framing) -> (Server, Arc<Vec<u8>>) {
    let content = Arc::new(pattern(CONTENT_BYTES, 3));
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content, 0).unwrap();
    let service = Shared(Arc::new(Assembler { framing, file: file.into(), content: Arc::clone(&content) }));
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let limits = Limits { connection_bytes_max: 1 << 30, ..Limits::default() };
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits);
    (builder.listen(addr.parse().unwrap(), Arc::new(service), None).start().unwrap(), content)
}

const FRAMINGS: [Framing; 3] =
    [Framing::RecordMark, Framing::LengthPrefix(LengthPrefix::big_endian(4)), Framing::Delimiter(Delimiter::LF)];

/// A server on datagrams copies all pieces into one, and refuses ranges of files before anything is sent.
#[test]
fn pieces_of_a_datagram_are_copied() {
    for engine in engines_in_own_network() {
        let (server, content) = start(engine, "udp:127.0.0.1:0", Framing::RecordMark);
        let peer = datagrams(addr(&server));
        let mut got = vec![0; 65_536];
        let (mut asked, mut with_files) = (0, 0);
        for seed in 0..300 {
            let when = [When::Now, When::Later, When::TurnEnd, When::Resumed][seed as usize % 4];
            let request = request(when, seed, &[b'f'; 100]);
            let expected = body(seed, &request, &content);
            if expected.len() > 60_000 {
                continue;
            }
            asked += 1;
            with_files += u64::from(plan(seed).iter().any(|kind| matches!(kind, Kind::File(..))));
            peer.send(&request).unwrap();
            let length = peer.recv(&mut got).unwrap();
            assert!(got[..length] == expected, "{engine}, seed {seed}, {when:?}: {length} of {} bytes", expected.len());
        }
        assert!(with_files > 10 && asked > with_files, "{asked} replies, {with_files} with files");
        until_count(&server, "replies", asked);
        server.drain().unwrap();
    }
}

/// Also when all that is too long lies in pieces of its own.
#[test]
fn pieces_that_the_header_cannot_announce_end_the_connection() {
    for engine in engines_in_own_network() {
        let (server, content) = start(engine, ANY, Framing::LengthPrefix(LengthPrefix::big_endian(2)));
        let mut peer = connect(&server);
        let bytes = |seed: u32| body(seed, &request(When::Now, seed, b""), &content).len();
        let seed = (0..).find(|seed| (5000..65_536).contains(&bytes(*seed))).unwrap();
        let long = (0..).find(|seed| bytes(*seed) > 65_535).unwrap();
        let first = request(When::Now, seed, b"");
        let framing = Framing::LengthPrefix(LengthPrefix::big_endian(2));
        let asked = [framed(framing, &first), framed(framing, &request(When::Now, long, b""))].concat();
        peer.write_all(&asked).unwrap();
        assert!(read_rest(&mut peer) == framed(framing, &body(seed, &first, &content)), "{engine}");
        assert_eq!(count(&server, "replies_unframable"), 1, "{engine}");
        server.drain().unwrap();
    }
}

/// Pipelined, so that replies begin behind others in a buffer, sent and received in random parts.
#[test]
fn pieces_arrive_as_one_message_whatever_they_are_made_of() {
    own_network();
    for (number, (engine, framing)) in
        engines().into_iter().flat_map(|engine| FRAMINGS.map(|f| (engine, f))).enumerate()
    {
        let mut random = Random::of_test(number as u64);
        let (server, content) = start(engine, ANY, framing);
        let mut peer = connect(&server);
        for round in 0..12 {
            let (mut requests, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..random.within(1..=8) {
                let seed = random.within(0..=99_999) as u32;
                let filler = vec![b'f'; random.pick(&[0, 1, 3000, 20_000])];
                let request = request(random.pick(&WHENS), seed, &filler);
                requests.extend(framed(framing, &request));
                expected.extend(framed(framing, &body(seed, &request, &content)));
            }
            std::thread::scope(|scope| {
                let mut sender = peer.try_clone().unwrap();
                let cut = random.within(0..=requests.len());
                scope.spawn(move || {
                    sender.write_all(&requests[..cut]).unwrap();
                    sender.write_all(&requests[cut..]).unwrap();
                });
                let mut at = 0;
                while at < expected.len() {
                    let bytes = random.within(1..=100_000).min(expected.len() - at);
                    let got = read_exactly(&mut peer, bytes);
                    assert!(got == expected[at..][..bytes], "{engine}, {framing:?}, round {round}, at {at}");
                    at += bytes;
                }
            });
        }
        drop(peer);
        assert_eq!(count(&server, "replies_unframable"), 0, "{engine}");
        server.drain().unwrap();
    }
}
