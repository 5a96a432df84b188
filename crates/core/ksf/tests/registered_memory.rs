//! A server that reads a file with O_DIRECT into memory that is registered with the ring, and that stops while it does.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::files::{create, start};
use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::files::{File, FileDone, FileError, FileOp, Files};
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, ShardService, Turn};
use ksf_sim::ideal::encode;
use rustix::fs::{Mode, OFlags};

const FRAMING: Framing = Framing::LengthPrefix(LengthPrefix::big_endian(4));
const READS: u64 = 16;
const READ_BYTES: usize = 256 << 10;
/// The token of the read of the pipe; another one has the number of its place in the file.
const PIPE: u64 = u64::MAX;

/// The token of a read, and what it read.
type Heard = (u64, Result<Vec<u8>, FileError>);

/// A message has it begin many reads of a file, and one of a pipe that never ends.
struct Disk {
    file: File,
    /// Of packets: opened with O_DIRECT, and nothing is in it.
    pipe: File,
    begun: AtomicU64,
    heard: Mutex<Vec<Heard>>,
}

impl Disk {
    fn begin(&self, files: &Files, file: &File, offset: u64, token: u64) {
        let into = files.buffer(READ_BYTES);
        files.begin(FileOp::read(file, offset, READ_BYTES, into), token).unwrap();
        self.begun.fetch_add(1, Ordering::SeqCst);
    }
}

impl ShardService for Disk {
    type Shard = Files;
    type Conn = ();

    fn profile(&self) -> Profile<'_> {
        Profile::new("disk", FRAMING)
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Files> {
        Ok(turn.files())
    }

    fn accept(&self, _: &mut Files, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, files: &mut Files, (): &mut (), _: &Message<'_>, _: &mut Reply<'_>) {
        self.begin(files, &self.pipe, 0, PIPE);
        for number in 0..READS {
            self.begin(files, &self.file, number * READ_BYTES as u64, number);
        }
    }

    fn file_done(&self, _: &mut Files, done: FileDone, _: &mut Turn<'_>) {
        let result = done.bytes();
        let FileOp::Read { into, .. } = done.op else { panic!("it only reads") };
        self.heard.lock().unwrap().push((done.token, result.map(|bytes| into[..bytes].to_vec())));
    }
}

/// Every operation is heard of, and what is said to be read is what the file has there.
#[test]
fn a_server_that_stops_tells_of_reads_into_registered_memory() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let plain = create(&path);
    for number in 0..READS {
        plain.write_all_at(&[number as u8; READ_BYTES], number * READ_BYTES as u64).unwrap();
    }
    for engine in engines() {
        for drains in [false, true] {
            let file = match rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()) {
                Ok(file) => file.into(),
                Err(error) => return skip(format_args!("needs O_DIRECT ({error})")),
            };
            let (reader, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
            // The end that is read has the flag only if it is set.
            rustix::fs::fcntl_setfl(&reader, OFlags::DIRECT).unwrap();
            let disk = Disk { file, pipe: reader.into(), begun: AtomicU64::new(0), heard: Mutex::default() };
            let disk = Arc::new(disk);
            let server = start(engine, Limits { drain_timeout_ms: 50, ..Limits::default() }, Arc::clone(&disk));
            let mut peer = connect(&server);
            peer.write_all(&encode(FRAMING, b"go", &[])).unwrap();
            wait_until("all begin", || disk.begun.load(Ordering::SeqCst) == READS + 1);
            if engine == EngineKind::Uring {
                until_count(&server, "file_ops_registered", READS + 1);
            }
            if drains {
                server.drain().unwrap();
            } else {
                drop(server);
            }
            let heard = disk.heard.lock().unwrap();
            assert_eq!(heard.len() as u64, READS + 1, "{engine}, drains: {drains}");
            assert!(heard.iter().any(|(token, _)| *token == PIPE));
            for (token, result) in &*heard {
                match result {
                    Ok(bytes) => {
                        assert_ne!(*token, PIPE);
                        let is_right = bytes.iter().all(|byte| u64::from(*byte) == *token);
                        assert_eq!((bytes.len(), is_right), (READ_BYTES, true), "{engine}, read {token}");
                    }
                    Err(error) => assert_eq!(*error, FileError::Cancelled),
                }
            }
        }
    }
}
