//! A log on files whose replies wait for its writes, on both engines.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::files::{create, pipe, read_line, start};
use crate::common::net::*;
use ksf::files::{File, FileDone, FileOp, Files};
use ksf::framing::{Delimiter, Framing};
use ksf::gates::{Gate, LogId};
use ksf::limits::Limits;
use ksf::logged::{After, Logged};
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, Service, Turn};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// Bytes of a record in a log.
const RECORD_BYTES: usize = 16;

/// A log: `add` is answered with the number of its record when that is durable, `get` with the last number when that is,
/// as pieces.
/// Batches go to `stripes` in turn, so writes of one stripe can be held up while those of another are done.
struct AppendLog {
    stripes: Vec<File>,
    begun: AtomicU64,
    done: AtomicU64,
}

struct OpenLog {
    files: Files,
    log: LogId,
    last: u64,
    /// Records since the last write began.
    batch: Vec<u8>,
    /// The last record of each write under way, and whether it is done: released in order.
    writes: VecDeque<(u64, bool)>,
    /// Where each stripe ends.
    ends: Vec<u64>,
}

impl AppendLog {
    fn new(stripes: Vec<File>) -> Arc<Self> {
        Arc::new(Self { stripes, begun: AtomicU64::new(0), done: AtomicU64::new(0) })
    }
}

impl Service for AppendLog {
    type Shard = OpenLog;
    type Conn = ();
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, ..Profile::new("append-log", LINES) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OpenLog> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        let (files, ends) = (turn.files(), vec![0; self.stripes.len()]);
        Ok(OpenLog { files, log, last: 0, batch: Vec::new(), writes: VecDeque::new(), ends })
    }

    fn accept(&self, _: &mut OpenLog, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OpenLog, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        match message.bytes() {
            b"add" => {
                shard.last += 1;
                shard.batch.extend_from_slice(&record(shard.last));
            }
            b"get" => {
                let gate = Gate { log: shard.log, number: shard.last };
                let answered = reply.after(gate).pieces(|pieces| {
                    pieces.bytes(shard.last.to_string().as_bytes());
                    Ok(())
                });
                return answered.expect("no range of a file is in it");
            }
            _ => return reply.after(After::Nothing).bytes(b"hello"),
        }
        reply.after(Gate { log: shard.log, number: shard.last }).bytes(shard.last.to_string().as_bytes());
    }

    fn turn_end(&self, shard: &mut OpenLog, _: &mut Turn<'_>) {
        if shard.batch.is_empty() {
            return;
        }
        let mut data = shard.files.buffer(shard.batch.len());
        data.fill(&shard.batch);
        shard.batch.clear();
        let stripe = (self.begun.fetch_add(1, Ordering::SeqCst) as usize) % self.stripes.len();
        let end = &mut shard.ends[stripe];
        let write = FileOp::write_durably(&self.stripes[stripe], *end, data);
        *end = shard.last * RECORD_BYTES as u64;
        shard.files.begin(write, shard.last).unwrap();
        shard.writes.push_back((shard.last, false));
    }

    fn file_done(&self, shard: &mut OpenLog, done: FileDone, turn: &mut Turn<'_>) {
        assert!(done.bytes().unwrap().is_multiple_of(RECORD_BYTES));
        let write = shard.writes.iter_mut().find(|(last, _)| *last == done.token).unwrap();
        write.1 = true;
        while let Some((last, true)) = shard.writes.front() {
            turn.release(shard.log, *last);
            shard.writes.pop_front();
        }
        self.done.fetch_add(1, Ordering::SeqCst);
    }
}

fn record(number: u64) -> [u8; RECORD_BYTES] {
    format!("{number:015}\n").into_bytes().try_into().unwrap()
}

fn assert_silent(peer: &mut std::net::TcpStream) {
    peer.set_nonblocking(true).unwrap();
    assert_eq!(peer.read(&mut [0; 16]).unwrap_err().kind(), ErrorKind::WouldBlock);
    peer.set_nonblocking(false).unwrap();
}

#[test]
fn a_reply_leaves_when_its_record_is_in_the_file() {
    own_network();
    const PEERS: usize = 8;
    const ADDS: usize = 50;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(&folder.path().join("log"));
        let service = AppendLog::new(vec![file.try_clone().unwrap().into()]);
        let server = start(engine, Limits::default(), Arc::clone(&service));
        let seen = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..PEERS {
                scope.spawn(|| {
                    let mut peer = connect(&server);
                    let mut last = 0;
                    for _ in 0..ADDS {
                        peer.write_all(b"add\nadd\nget\n").unwrap();
                        let [first, second, got] =
                            std::array::from_fn(|_| read_line(&mut peer).parse::<u64>().unwrap());
                        assert!(last < first && first < second && second <= got, "{last} {first} {second} {got}");
                        for number in [first, second, got] {
                            let mut bytes = [0; RECORD_BYTES];
                            file.read_exact_at(&mut bytes, (number - 1) * RECORD_BYTES as u64).unwrap();
                            assert_eq!(bytes, record(number), "{engine}: a reply came before its record");
                        }
                        last = got;
                        seen.lock().unwrap().extend([first, second]);
                    }
                });
            }
        });
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(1..=(2 * PEERS * ADDS) as u64), "{engine}: each record has one answer");
        server.drain().unwrap();
        assert_eq!(service.begun.load(Ordering::SeqCst), service.done.load(Ordering::SeqCst));
    }
}

/// The write of the first record waits in a full pipe, that of the second is done: both replies wait for the first.
#[test]
fn writes_that_end_out_of_order_open_gates_in_order() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let slow = pipe(&folder.path().join("slow"));
        rustix::io::ioctl_fionbio(&slow, true).unwrap();
        let (mut filled, mut writer) = (0, slow.try_clone().unwrap());
        while let Ok(bytes) = writer.write(&[0; 4096]) {
            filled += bytes;
        }
        rustix::io::ioctl_fionbio(&slow, false).unwrap();
        let quick = create(&folder.path().join("quick"));
        let service = AppendLog::new(vec![slow.try_clone().unwrap().into(), quick.into()]);
        let server = start(engine, Limits::default(), Arc::clone(&service));
        let log = &*service;
        let [mut one, mut two, mut three] = std::array::from_fn(|_| connect(&server));
        one.write_all(b"add\n").unwrap();
        wait_until("the first write begins", || log.begun.load(Ordering::SeqCst) == 1);
        two.write_all(b"hi\nadd\n").unwrap();
        expect(&mut two, b"hello\n");
        wait_until("the second write is done", || log.done.load(Ordering::SeqCst) == 1);
        three.write_all(b"hi\nget\n").unwrap();
        expect(&mut three, b"hello\n");
        [&mut one, &mut two, &mut three].into_iter().for_each(assert_silent);
        let in_pipe = read_exactly(&mut &slow, filled + RECORD_BYTES);
        assert_eq!(in_pipe[filled..], record(1), "{engine}");
        expect(&mut one, b"1\n");
        expect(&mut two, b"2\n");
        expect(&mut three, b"2\n");
        drop([one, two, three]);
        server.drain().unwrap();
    }
}
