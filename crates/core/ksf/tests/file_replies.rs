//! Replies with a range of a file in them: their bytes and their order, peers that are slow, files that are too short.

use std::any::Any;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::files::pipe;
use crate::common::net::*;
use crate::common::{KEY, env, in_slot};
use ksf::connection::Connection;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::env::Env;
use ksf::files::{File, FileError, FileRange, NoFileReplies};
use ksf::framing::{Delimiter, Framing};
use ksf::gates::{Gate, LogId};
use ksf::limits::Limits;
use ksf::output::{FILE_RANGE_BYTES, FILE_WINDOW_BYTES, SendBatch};
use ksf::pool::Chunk;
use ksf::service::{Message, Peer, Refused};
use ksf::session::OnShard;
use ksf::{Pieces, Profile, Reply, Server, Service, Turn, Unlogged};
use ksf_test::effort;

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// Answers `range FILE OFFSET BYTES` with that, between a head and an end; `fresh PATH BYTES` alike; `gated` with a number does so behind a gate, and
/// `later` when the message is resumed. `pieces` does so with a chunk of [`CHUNK_BYTES`] and the range twice, and `gated-pieces`
/// behind a gate. Anything else is sent back.
struct Library {
    files: Vec<File>,
    deferred: Mutex<Vec<Deferred>>,
}

/// Of a chunk that is a piece of its own.
const CHUNK_BYTES: usize = 3000;

/// Two ranges of files in one reply, with other pieces around them.
fn add_pieces(range: FileRange, pieces: &mut Pieces<'_>) -> Result<(), NoFileReplies> {
    pieces.bytes(b"<");
    pieces.chunk(Chunk::from_vec(vec![b'c'; CHUNK_BYTES]));
    pieces.file(range.clone())?;
    pieces.bytes(b"|");
    pieces.file(range)?;
    pieces.owned(vec![b'o'; CHUNK_BYTES]);
    pieces.bytes(b">");
    Ok(())
}

/// The bytes of these pieces, behind them the end of the line.
fn bytes_of_pieces(range: &[u8]) -> Vec<u8> {
    [b"<", &[b'c'; CHUNK_BYTES][..], range, b"|", range, &[b'o'; CHUNK_BYTES], b">\n"].concat()
}

/// What a resumed message goes on with.
struct Later(String);

impl Library {
    fn new(files: Vec<File>) -> Arc<Self> {
        Arc::new(Self { files, deferred: Mutex::default() })
    }

    fn answer(&self, log: LogId, text: &str, reply: &mut Reply<'_>) {
        let words: Vec<_> = text.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            verb @ ("range" | "gated" | "pieces" | "gated-pieces") => {
                if verb.starts_with("gated") {
                    reply.gate(Gate { log, number: number(4) as u64 });
                }
                let file = self.files[number(1)].clone();
                let range = FileRange { file, offset: number(2) as u64, bytes: number(3) };
                let sent = match verb {
                    "pieces" | "gated-pieces" => reply.pieces(|pieces| add_pieces(range, pieces)),
                    _ => reply.file(|head| head.extend_from_slice(b"<"), range, b">"),
                };
                sent.unwrap();
            }
            // From a file that is opened for this reply alone.
            "fresh" => {
                let range = FileRange { file: open(words[1]), offset: 0, bytes: number(2) };
                reply.file(|head| head.extend_from_slice(b"<"), range, b">").unwrap();
            }
            "later" => self.deferred.lock().unwrap().push(reply.defer_for(100)),
            _ => reply.bytes(text.as_bytes()),
        }
    }
}

impl Service for Library {
    type Shard = LogId;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("library", LINES)
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<LogId> {
        turn.open_log().map_err(std::io::Error::other)
    }

    fn accept(&self, _: &mut LogId, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, log: &mut LogId, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.answer(*log, std::str::from_utf8(message.bytes()).unwrap(), reply);
    }

    fn resume(&self, log: &mut LogId, (): &mut (), state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        let Later(text) = *state.downcast().unwrap();
        self.answer(*log, &text, reply);
    }
}

fn all_of(batch: &SendBatch, most: usize) -> Vec<u8> {
    let mut slices = [&[][..]; 64];
    let filled = batch.slices(&mut slices);
    let mut bytes = slices[..filled].concat();
    bytes.truncate(most);
    bytes
}

/// Whatever happens first: reads that end early, or are refused, batches sent in parts, gates, answers that come later.
#[test]
fn bytes_and_order_are_those_of_replies_without_files() {
    let content = pattern(3 << 20, 1);
    for seed in 0..60 {
        let mut random = Random::of_test(seed);
        let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
        let limits = Limits { out_queue_bytes_max: 1 << 30, connection_bytes_max: 1 << 30, ..Limits::default() };
        let mut env = env(limits, 4096, 16);
        let log = library.start(&mut Turn::new(&mut env)).unwrap();
        let on = OnShard::new(Arc::clone(&library), log);
        let mut conn = Connection::new(on, Peer::Unix, KEY, env.now).unwrap();
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        let (mut to_receive, mut gates, mut later) = (12, 0, Vec::new());
        let (mut reading, mut batch) = (None::<FileRange>, None::<SendBatch>);
        while to_receive > 0 || got.len() < expected.len() {
            match random.within(0..=6) {
                0 if to_receive > 0 => {
                    to_receive -= 1;
                    let (offset, most) = (random.within(0..=(1 << 20)), random.pick(&[0, 1, 5000, 2 << 20]));
                    let bytes = random.within(0..=most);
                    let several = random.one_in(3);
                    let range = &content[offset..][..bytes];
                    let in_file = if several { bytes_of_pieces(range) } else { [b"<", range, b">\n"].concat() };
                    let verb = if several { "pieces" } else { "range" };
                    match random.within(0..=3) {
                        0 => {
                            conn.receive(in_slot(&mut env, b"hello\n"), &mut env);
                            expected.extend_from_slice(b"hello\n");
                        }
                        1 => {
                            let line = format!("{verb} 0 {offset} {bytes}\n");
                            conn.receive(in_slot(&mut env, line.as_bytes()), &mut env);
                            expected.extend_from_slice(&in_file);
                        }
                        2 => {
                            gates += 1;
                            let verb = if several { "gated-pieces" } else { "gated" };
                            let line = format!("{verb} 0 {offset} {bytes} {gates}\n");
                            conn.receive(in_slot(&mut env, line.as_bytes()), &mut env);
                            expected.extend_from_slice(&in_file);
                        }
                        _ => {
                            conn.receive(in_slot(&mut env, b"later\n"), &mut env);
                            later.push((verb, offset, bytes));
                            expected.extend_from_slice(&in_file);
                        }
                    }
                }
                1 if !later.is_empty() => {
                    let at = random.within(0..=later.len() - 1);
                    let (verb, offset, bytes) = later.remove(at);
                    let deferred = library.deferred.lock().unwrap().remove(at);
                    if verb == "pieces" && random.one_in(2) {
                        let range = FileRange { file: library.files[0].clone(), offset: offset as u64, bytes };
                        deferred.reply_pieces(|pieces| add_pieces(range, pieces)).unwrap();
                    } else {
                        deferred.resume(Later(format!("{verb} 0 {offset} {bytes}")));
                    }
                    for delivery in env.mailbox.take_deliveries() {
                        assert!(conn.deliver(delivery, &mut env));
                    }
                }
                2 => {
                    Turn::new(&mut env).release(log, random.within(0..=gates) as u64);
                    env.take_gated();
                    conn.open_gates(&mut env);
                }
                3 => {
                    if reading.is_none() {
                        reading = conn.file_to_read(env.now);
                    }
                }
                4 => {
                    if let Some(range) = reading.take() {
                        let most = if random.one_in(2) { range.bytes } else { random.within(1..=range.bytes) };
                        let mut into = env.buffers.take(most);
                        into.fill(&content[range.offset as usize..][..most]);
                        match random.within(0..=9) {
                            0 => conn.file_not_read(),
                            1 => assert!(conn.file_read(&range, Err(FileError::Interrupted), &mut env)),
                            _ => assert!(conn.file_read(&range, Ok(into), &mut env)),
                        }
                    }
                }
                _ => {
                    batch = batch.or_else(|| conn.take_batch(env.now, &mut env.spares));
                    if let Some(sending) = &mut batch {
                        let most = if random.one_in(2) { usize::MAX } else { random.within(1..=300_000) };
                        let bytes = all_of(sending, most);
                        got.extend_from_slice(&bytes);
                        sending.advance(bytes.len(), &mut env.spares);
                        let done = sending.is_empty();
                        conn.sent(bytes.len(), done, &mut env);
                        if done && let Some(batch) = batch.take() {
                            batch.recycle(&mut env.spares);
                        }
                    }
                }
            }
            let in_memory = batch.as_ref().map_or(0, SendBatch::len);
            assert!(in_memory < 2 * FILE_WINDOW_BYTES + 100_000, "seed {seed}: a batch of {in_memory} bytes");
            assert_eq!(env.budget.reply_bytes(), conn.owed_bytes(), "seed {seed}");
            assert!(got == expected[..got.len()], "seed {seed}: other bytes than expected");
        }
        assert!(conn.is_settled(), "seed {seed}");
        conn.end(&mut env);
        assert_eq!((env.budget.reply_bytes(), env.pool.in_use()), (0, 0), "seed {seed}");
    }
}

#[test]
fn two_windows_of_a_file_are_in_memory() {
    let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
    let mut env = env(Limits::default(), 4096, 16);
    let log = library.start(&mut Turn::new(&mut env)).unwrap();
    let on = OnShard::new(Arc::clone(&library), log);
    let mut conn = Connection::new(on, Peer::Unix, KEY, env.now).unwrap();
    conn.receive(in_slot(&mut env, b"range 0 0 100000000\n"), &mut env);
    let counted = 3 + FILE_RANGE_BYTES + 2 * FILE_WINDOW_BYTES;
    assert_eq!(conn.queued_bytes(), counted, "of a range, the memory that it may take counts");
    // Reads for as long as the connection wants it.
    let read = |conn: &mut Connection, env: &mut ksf::env::Env| {
        let mut bytes = 0;
        while let Some(range) = conn.file_to_read(env.now) {
            (0..2).for_each(|_| {
                assert!(conn.file_to_read(env.now).is_none(), "one read at a time, however often it is asked")
            });
            let ksf::env::Env { buffers, .. } = env;
            let mut into = buffers.take(range.bytes);
            into.set_len(range.bytes);
            assert!(conn.file_read(&range, Ok(into), env));
            bytes += range.bytes;
        }
        bytes
    };
    assert_eq!(read(&mut conn, &mut env), FILE_WINDOW_BYTES);
    let batch = conn.take_batch(env.now, &mut env.spares).unwrap();
    assert_eq!(batch.len(), 1 + FILE_WINDOW_BYTES);
    assert_eq!(read(&mut conn, &mut env), 0, "the peer took nothing yet");
    conn.sent(2, false, &mut env);
    assert_eq!(read(&mut conn, &mut env), FILE_WINDOW_BYTES, "the next is read while this one is sent");
    conn.sent(batch.len() - 2, true, &mut env);
    conn.end(&mut env);
}

/// Reads and sends until the connection wants nothing more: the bytes that were sent, and the most that was counted on
/// the way.
fn drive(conn: &mut Connection, env: &mut Env) -> (usize, usize) {
    let (mut sent, mut most) = (0, 0);
    loop {
        let mut rests = true;
        while let Some(range) = conn.file_to_read(env.now) {
            rests = false;
            let mut into = env.buffers.take(range.bytes);
            into.set_len(range.bytes);
            assert!(conn.file_read(&range, Ok(into), env));
            most = most.max(env.budget.reply_bytes());
        }
        while let Some(batch) = conn.take_batch(env.now, &mut env.spares) {
            rests = false;
            sent += batch.len();
            conn.sent(batch.len(), true, env);
            batch.recycle(&mut env.spares);
        }
        assert_eq!(env.budget.reply_bytes(), conn.owed_bytes());
        if rests {
            return (sent, most);
        }
    }
}

/// Both bounds are the budget's: a range holds memory once it is read, and a list costs as much as it is long.
#[test]
fn lists_of_ranges_hold_what_is_read_and_cost_their_length() {
    for (ranges, bytes) in [(100, 1 << 20), (100_000, 10)] {
        let file = File::from(tempfile::tempfile().unwrap());
        let library = Library::new(vec![file.clone()]);
        let mut env = env(Limits::default(), 4096, 16);
        let log = library.start(&mut Turn::new(&mut env)).unwrap();
        let mut conn = Connection::new(OnShard::new(Arc::clone(&library), log), Peer::Unix, KEY, env.now).unwrap();
        conn.receive(in_slot(&mut env, b"later\nlater\n"), &mut env);
        let answer = |env: &mut Env, conn: &mut Connection, ranges: usize| {
            let deferred = library.deferred.lock().unwrap().pop().unwrap();
            let add = |pieces: &mut Pieces<'_>| {
                (0..ranges).try_for_each(|_| pieces.file(FileRange { file: file.clone(), offset: 0, bytes }))
            };
            deferred.reply_pieces(add).unwrap();
            env.mailbox.take_deliveries().into_iter().for_each(|delivery| assert!(conn.deliver(delivery, env)));
        };
        // The second one first: it is held back, and no part of it is read.
        answer(&mut env, &mut conn, ranges);
        assert!(!conn.is_closing(), "{ranges} ranges of {bytes} bytes");
        assert!(conn.queued_bytes() <= ranges * FILE_RANGE_BYTES + 10, "{ranges} ranges of {bytes} bytes");
        answer(&mut env, &mut conn, 1);
        let (sent, most) = drive(&mut conn, &mut env);
        assert_eq!(sent, (ranges + 1) * bytes + 2);
        assert!(
            most <= ranges * FILE_RANGE_BYTES + 4 * FILE_WINDOW_BYTES,
            "{most} bytes for {ranges} ranges of {bytes} bytes"
        );
        assert!(conn.is_settled());
        conn.end(&mut env);
    }
}

/// What the kernel keeps for the bytes of the file is the head of that reply alone.
#[test]
fn replies_in_front_of_a_file_leave_without_it() {
    let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
    let mut env = env(Limits::default(), 4096, 16);
    let log = library.start(&mut Turn::new(&mut env)).unwrap();
    let mut conn = Connection::new(OnShard::new(library, log), Peer::Unix, KEY, env.now).unwrap();
    conn.receive(in_slot(&mut env, b"hello\nthere\nrange 0 0 10\n"), &mut env);
    for (bytes, waits_for_the_file) in [(&b"hello\nthere\n"[..], false), (b"<", true)] {
        let batch = conn.take_batch(env.now, &mut env.spares).unwrap();
        assert_eq!(all_of(&batch, 100), bytes);
        assert_eq!(conn.file_follows(), waits_for_the_file);
        conn.sent(bytes.len(), true, &mut env);
    }
    assert!(conn.take_batch(env.now, &mut env.spares).is_none());
    assert!(conn.file_to_read(env.now).is_some());
    conn.end(&mut env);
}

/// The same for a reply of several pieces.
#[test]
fn replies_in_front_of_pieces_leave_without_them() {
    let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
    let mut env = env(Limits::default(), 4096, 16);
    let log = library.start(&mut Turn::new(&mut env)).unwrap();
    let mut conn = Connection::new(OnShard::new(library, log), Peer::Unix, KEY, env.now).unwrap();
    conn.receive(in_slot(&mut env, b"hello\nthere\npieces 0 0 3\nbye\n"), &mut env);
    let pieces = bytes_of_pieces(b"012");
    let (head, rest) = pieces.split_at(1 + CHUNK_BYTES);
    let (middle, end) = rest.split_at(b"012|".len());
    let end = [b"012", &end[3..], b"bye\n"].concat();
    let read = |conn: &mut Connection, env: &mut ksf::env::Env| {
        let range = conn.file_to_read(env.now).unwrap();
        let mut into = env.buffers.take(3);
        into.fill(b"012");
        assert!(conn.file_read(&range, Ok(into), env));
    };
    let steps =
        [(&b"hello\nthere\n"[..], false, false), (head, true, true), (middle, true, true), (&end, false, false)];
    for (bytes, waits_for_the_file, then_read) in steps {
        let batch = conn.take_batch(env.now, &mut env.spares).unwrap();
        assert_eq!(all_of(&batch, 10_000), bytes);
        assert_eq!(conn.file_follows(), waits_for_the_file);
        conn.sent(bytes.len(), true, &mut env);
        if then_read {
            read(&mut conn, &mut env);
        }
    }
    assert!(conn.is_settled());
    conn.end(&mut env);
}

#[test]
fn a_file_that_is_not_read_in_time_ends_the_connection_and_makes_it_not_idle_before() {
    let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
    let mut env = env(Limits { idle_timeout_ms: 10, send_timeout_ms: 100, ..Limits::default() }, 4096, 16);
    let log = library.start(&mut Turn::new(&mut env)).unwrap();
    let mut conn = Connection::new(OnShard::new(library, log), Peer::Unix, KEY, env.now).unwrap();
    conn.receive(in_slot(&mut env, b"range 0 0 10\n"), &mut env);
    let head = conn.take_batch(env.now, &mut env.spares).unwrap();
    conn.sent(head.len(), true, &mut env);
    conn.file_to_read(env.now).unwrap();
    let begun = env.now;
    env.now = begun.plus_ms(100);
    assert_eq!(conn.tick(&mut env), None);
    assert!(!conn.is_closing(), "it waits for us: it is not idle");
    assert!(conn.deadline(&env).is_some_and(|at| at <= begun.plus_ms(101)));
    env.now = begun.plus_ms(101);
    assert_eq!(conn.tick(&mut env), Some(ksf::CloseReason::FileRange));
    conn.end(&mut env);
}

#[test]
fn a_file_that_ends_too_early_ends_the_connection() {
    let library = Library::new(vec![tempfile::tempfile().unwrap().into()]);
    for failure in [None, Some(FileError::Medium)] {
        let mut env = env(Limits::default(), 4096, 16);
        let log = library.start(&mut Turn::new(&mut env)).unwrap();
        let on = OnShard::new(Arc::clone(&library), log);
        let mut conn = Connection::new(on, Peer::Unix, KEY, env.now).unwrap();
        conn.receive(in_slot(&mut env, b"range 0 0 10\nhello\n"), &mut env);
        let batch = conn.take_batch(env.now, &mut env.spares).unwrap();
        assert_eq!(all_of(&batch, 100), b"<");
        let range = conn.file_to_read(env.now).unwrap();
        let read = failure.map_or_else(|| Ok(env.buffers.take(10)), Err);
        assert!(!conn.file_read(&range, read, &mut env), "a reset, because a part of the reply has left");
        conn.sent(1, true, &mut env);
        assert!(
            conn.take_batch(env.now, &mut env.spares).is_none(),
            "what is behind the missing bytes must not follow the head"
        );
        assert!(conn.is_closing());
        conn.end(&mut env);
        assert_eq!(env.budget.reply_bytes(), 0);
    }
}

fn start(engine: EngineKind, limits: Limits, library: Arc<Library>) -> Server {
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits);
    builder.listen(ANY.parse().unwrap(), library, None).start().unwrap()
}

fn open(path: &str) -> File {
    std::fs::File::open(Path::new(path)).unwrap().into()
}

const CONTENT_BYTES: usize = 24 << 20;

/// A file of [`CONTENT_BYTES`].
fn content() -> (Vec<u8>, File) {
    let content = pattern(CONTENT_BYTES, 3);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content, 0).unwrap();
    (content, file.into())
}

/// Far more than a socket holds, to peers of which one takes its bytes only when the others are done; also with room for one
/// read at a time.
#[test]
fn a_slow_peer_gets_every_byte_of_a_file_and_holds_nobody_up() {
    own_network();
    let (content, file) = content();
    let everything = format!("range 0 0 {CONTENT_BYTES}\nhello\nrange 0 5 7\n");
    let check = |peer: &mut std::net::TcpStream| {
        expect(peer, b"<");
        for at in (0..CONTENT_BYTES).step_by(1 << 20) {
            assert!(read_exactly(peer, 1 << 20) == content[at..][..1 << 20]);
        }
        expect(peer, b">\nhello\n<");
        expect(peer, &content[5..12]);
        expect(peer, b">\n");
    };
    for (engine, file_ops_max) in engines().into_iter().flat_map(|engine| [(engine, 1), (engine, 1024)]) {
        let limits = Limits { file_ops_max, ..Limits::default() };
        let server = start(engine, limits, Library::new(vec![file.clone()]));
        let mut slow = connect(&server);
        slow.write_all(everything.as_bytes()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut peer = connect(&server);
                    peer.write_all(everything.as_bytes()).unwrap();
                    check(&mut peer);
                });
            }
        });
        check(&mut slow);
        // A drain waits for what is on its way.
        slow.write_all(everything.as_bytes()).unwrap();
        expect(&mut slow, b"<");
        std::thread::scope(|scope| {
            let draining = scope.spawn(move || server.drain());
            for at in (0..CONTENT_BYTES).step_by(1 << 20) {
                assert!(read_exactly(&mut slow, 1 << 20) == content[at..][..1 << 20], "{engine}");
            }
            expect(&mut slow, b">\n");
            let _ = read_rest(&mut slow);
            draining.join().unwrap().unwrap();
        });
    }
}

/// Both would otherwise look like the end of the reply.
#[test]
fn a_promise_that_a_file_does_not_keep_resets_the_connection() {
    own_network();
    let (content, file) = content();
    for engine in engines() {
        // Nothing is mapped at the address 0 of this process: reading it is an I/O error.
        let server = start(engine, Limits::default(), Library::new(vec![file.clone(), open("/proc/self/mem")]));
        let mut well = connect(&server);
        let requests = [format!("range 0 0 {}\n", CONTENT_BYTES + 1), "range 1 0 100\n".to_owned()];
        for (lost, request) in requests.iter().enumerate() {
            let mut peer = connect(&server);
            peer.write_all(request.as_bytes()).unwrap();
            let mut got = Vec::new();
            let error = peer.read_to_end(&mut got).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{engine}");
            assert!(got.len() <= 1 + CONTENT_BYTES);
            until_count(&server, "closed_file_range", lost as u64 + 1);
            well.write_all(b"range 0 9 3\n").unwrap();
            expect(&mut well, &[b"<", &content[9..12], b">\n"].concat());
        }
        drop(well);
        server.drain().unwrap();
    }
}

/// Whatever hangs, and however long.
#[test]
fn connections_that_end_while_they_wait_for_a_file_let_go_of_it() {
    own_network();
    let peers = effort(8, 50);
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(&folder.path().join("pipe"));
        let path = folder.path().join("fresh-data");
        std::fs::write(&path, b"content").unwrap();
        let limits = Limits { file_ops_max: 1, ..Limits::default() };
        let server = start(engine, limits, Library::new(vec![writer.try_clone().unwrap().into()]));
        let mut holder = connect(&server);
        ask(&mut holder, b"range 0 0 1\n", b"<");
        for gone in 1..=peers {
            let mut peer = connect(&server);
            ask(&mut peer, format!("fresh {} 7\n", path.display()).as_bytes(), b"<");
            rustix::net::sockopt::set_socket_linger(&peer, Some(std::time::Duration::ZERO)).unwrap();
            drop(peer);
            until_count(&server, "closed_io", gone);
        }
        wait_until("every file is closed", || {
            let fds = std::fs::read_dir("/proc/self/fd").unwrap();
            fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok()).all(|open| open != path)
        });
        writer.write_all(b"x").unwrap();
        expect(&mut holder, b"x>\n");
        ask(&mut holder, format!("fresh {} 7\n", path.display()).as_bytes(), b"<content>\n");
        drop(holder);
        server.drain().unwrap();
    }
}

/// Of two connections that wait to read a file the first wants nothing any more when there is room, and no other operation
/// ends after that.
#[test]
fn room_for_a_read_goes_to_a_connection_that_uses_it() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let [mut endless, mut ends] = ["endless", "ends"].map(|name| pipe(&folder.path().join(name)));
        let data = tempfile::tempfile().unwrap();
        data.write_all_at(b"content", 0).unwrap();
        let files = [&endless, &ends, &data].map(|file| File::from(file.try_clone().unwrap()));
        let library = Library::new(files.to_vec());
        let limits =
            Limits { file_ops_max: 2, connection_bytes_max: 1000, linger_timeout_ms: 60_000, ..Limits::default() };
        let server = start(engine, limits, Arc::clone(&library));
        let [mut first, mut second, mut wants_no_more, mut last] = std::array::from_fn(|_| connect(&server));
        ask(&mut first, b"range 0 0 1\n", b"<");
        ask(&mut second, b"range 1 0 1\n", b"<");
        ask(&mut wants_no_more, b"range 2 0 7\nlater\n", b"<");
        wait_until("the second message", || library.deferred.lock().unwrap().len() == 1);
        ask(&mut last, b"range 2 0 7\n", b"<");
        // More than the connection may owe: what waits there is thrown away, and the connection lingers.
        library.deferred.lock().unwrap().remove(0).reply(vec![0; 10_000]);
        assert_eq!(read_rest(&mut wants_no_more), b"");
        ends.write_all(b"x").unwrap();
        expect(&mut second, b"x>\n");
        expect(&mut last, b"content>\n");
        endless.write_all(b"y").unwrap();
        expect(&mut first, b"y>\n");
        drop((first, second, wants_no_more, last));
        server.drain().unwrap();
    }
}
