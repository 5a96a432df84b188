//! Messages that are written to a file from where they lie, on both engines.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::files::{File, FileData, FileDone, FileOp, Files};
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::pool::Chunk;
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, Server, Service, Turn, Unlogged};
use ksf_sim::ideal::encode;
use rustix::fs::{Mode, OFlags};

const FRAMING: Framing = Framing::LengthPrefix(LengthPrefix::big_endian(4));
const LONG_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

/// Writes long messages one behind the other, each by itself. Short ones it keeps until `flush`, and writes them at once behind
/// the others. A write is answered with the number of its bytes, a message that is kept with itself.
struct Writer {
    /// Without the page cache, where the file system permits it.
    long: File,
    short: File,
    /// Where the data of long messages lay when they were received, and when they were given away.
    places: Mutex<Vec<(usize, usize)>>,
    end: AtomicU64,
}

struct OpenWriter {
    files: Files,
    kept: Vec<Chunk>,
    waiting: HashMap<u64, Deferred>,
}

impl Service for Writer {
    type Shard = OpenWriter;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile { keeps_messages: true, ..Profile::new("writer", FRAMING) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OpenWriter> {
        Ok(OpenWriter { files: turn.files(), kept: Vec::new(), waiting: HashMap::new() })
    }

    fn accept(&self, _: &mut OpenWriter, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OpenWriter, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let chunk = message.keep();
        let (file, data) = if chunk.len() >= LONG_BYTES {
            self.places.lock().unwrap().push((message.bytes().as_ptr().addr(), chunk.as_ptr().addr()));
            (&self.long, FileData::from(chunk))
        } else if &*chunk == b"flush" {
            (&self.short, FileData::from(std::mem::take(&mut shard.kept)))
        } else {
            reply.bytes(&chunk);
            return shard.kept.push(chunk);
        };
        let offset = self.end.fetch_add(data.len() as u64, Ordering::SeqCst);
        shard.files.begin(FileOp::write(file, offset, data), offset).unwrap();
        shard.waiting.insert(offset, reply.defer());
    }

    fn file_done(&self, shard: &mut OpenWriter, done: FileDone, turn: &mut Turn<'_>) {
        let written = done.bytes().map_or_else(|error| format!("{error:?}"), |bytes| bytes.to_string());
        turn.reply(shard.waiting.remove(&done.token).unwrap(), written.into_bytes());
    }
}

#[test]
fn messages_are_written_to_a_file_from_where_they_lie() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let short = std::fs::File::create(&path).unwrap();
        let direct = rustix::fs::open(&path, OFlags::WRONLY | OFlags::DIRECT, Mode::empty());
        if let Err(error) = &direct {
            eprintln!("this file system has no O_DIRECT ({error}): long messages go through the page cache");
        }
        let long = direct.map_or_else(|_| short.try_clone().unwrap().into(), File::from);
        let (places, end) = (Mutex::default(), AtomicU64::new(0));
        let writer = Arc::new(Writer { long, short: short.into(), places, end });
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(Limits::default());
        let server = builder.listen(ANY.parse().unwrap(), Arc::clone(&writer), None).start().unwrap();
        let mut peer = connect(&server);
        let mut say = |message: &[u8], answer: &[u8]| {
            peer.write_all(&encode(FRAMING, message, &[])).unwrap();
            expect(&mut peer, &encode(FRAMING, answer, &[]));
        };
        let mut expected = Vec::new();
        for seed in 0..3 {
            let message = pattern(LONG_BYTES, seed);
            say(&message, LONG_BYTES.to_string().as_bytes());
            expected.extend(message);
        }
        for short in [&b"some"[..], b"bytes", b"x"] {
            say(short, short);
            expected.extend(short);
        }
        say(b"flush", b"10");
        assert!(std::fs::read(&path).unwrap() == expected, "{engine}: other bytes than were sent");
        for (received, written) in writer.places.lock().unwrap().iter() {
            assert_eq!(received, written, "{engine}: a copy was written");
            assert_eq!(written % PAGE_BYTES, 0, "{engine}: O_DIRECT takes whole pages");
        }
        drop(peer);
        server.drain().unwrap();
    }
}
