//! Operations on files, on both engines: reads and writes of all kinds, what the kernel says when a medium is full or fails,
//! and the end of a server with operations under way.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::files::{create, pipe, read_line, start};
use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::files::{File, FileDone, FileError, FileOp, FileOutcome, Files};
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, Server, Service, Turn, Unlogged};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::ReadWriteFlags;

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// Does with files what its messages say, and answers with what came of it: the result as text, or the bytes of a read.
/// Files are named by the number in the answer to `open`.
struct Disk {
    dir: File,
    /// Every end that it was told of.
    heard: Mutex<Vec<Result<(), FileError>>>,
    begun: AtomicU64,
    refused: AtomicU64,
}

struct OpenDisk {
    files: Files,
    open: Vec<File>,
    waiting: HashMap<u64, Deferred>,
    next: u64,
}

impl Disk {
    fn new(dir: &Path) -> Arc<Self> {
        let dir = std::fs::File::open(dir).unwrap().into();
        Arc::new(Self { dir, heard: Mutex::default(), begun: AtomicU64::new(0), refused: AtomicU64::new(0) })
    }

    fn op(&self, shard: &mut OpenDisk, words: &[&str]) -> FileOp {
        let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<usize>().unwrap());
        let file = || shard.open[number(1)].clone();
        let read = |flags| {
            let into = shard.files.buffer(number(3));
            FileOp::Read { file: file(), offset: number(2) as u64, bytes: number(3), into, flags }
        };
        match words[0] {
            "open" => {
                let flags = OFlags::RDWR | if words.contains(&"create") { OFlags::CREATE } else { OFlags::empty() };
                let flags = flags | if words.contains(&"direct") { OFlags::DIRECT } else { OFlags::empty() };
                let mode = if words.contains(&"create") { Mode::RUSR | Mode::WUSR } else { Mode::empty() };
                FileOp::open_beneath(&self.dir, CString::new(words[1]).unwrap(), flags, mode)
            }
            // Of a pipe: waits for the other end.
            "open-to-read" => {
                FileOp::open_beneath(&self.dir, CString::new(words[1]).unwrap(), OFlags::RDONLY, Mode::empty())
            }
            "read" | "panic" => read(ReadWriteFlags::empty()),
            "read-now" => read(ReadWriteFlags::NOWAIT),
            "write" => {
                let mut data = shard.files.buffer(number(3));
                data.fill(&vec![number(4) as u8; number(3)]);
                FileOp::write(&file(), number(2) as u64, data)
            }
            "sync" => FileOp::Sync { file: file(), data_only: false },
            "data-sync" => FileOp::data_sync(&file()),
            "stat" => FileOp::stat(&file()),
            "allocate" => {
                FileOp::Allocate { file: file(), mode: FallocateFlags::empty(), offset: 0, bytes: number(2) as u64 }
            }
            "close-shared" => FileOp::Close { file: Some(file()) },
            "close" => FileOp::Close { file: shard.open.pop() },
            word => panic!("{word}?"),
        }
    }
}

impl Service for Disk {
    type Shard = OpenDisk;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("disk", LINES)
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OpenDisk> {
        Ok(OpenDisk { files: turn.files(), open: Vec::new(), waiting: HashMap::new(), next: 0 })
    }

    fn accept(&self, _: &mut OpenDisk, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OpenDisk, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let text = std::str::from_utf8(message.bytes()).unwrap();
        let words: Vec<_> = text.split(' ').collect();
        let op = self.op(shard, &words);
        let reply_bytes = if let FileOp::Read { bytes, .. } = op { bytes } else { 100 };
        shard.next += 1;
        // The lowest bit says that its end makes the service panic.
        let token = shard.next << 1 | u64::from(words[0] == "panic");
        match shard.files.begin(op, token) {
            Ok(()) => {
                shard.waiting.insert(token, reply.defer_for(reply_bytes));
                self.begun.fetch_add(1, Ordering::SeqCst);
            }
            Err(refused) => {
                self.refused.fetch_add(1, Ordering::SeqCst);
                reply.bytes(refused.to_string().as_bytes());
            }
        }
    }

    fn file_done(&self, shard: &mut OpenDisk, done: FileDone, turn: &mut Turn<'_>) {
        self.heard.lock().unwrap().push(done.bytes().map(|_| ()));
        let deferred = shard.waiting.remove(&done.token).unwrap();
        assert!(done.token & 1 == 0, "on purpose");
        let text = match (done.result, done.op) {
            (Ok(FileOutcome::Bytes(_)), FileOp::Read { into, .. }) => {
                return turn.reply_chunk(deferred, ksf::pool::Chunk::from_buffer(into));
            }
            (Ok(FileOutcome::Bytes(bytes)), _) => format!("{bytes} bytes"),
            (Ok(FileOutcome::Opened(file)), _) => {
                shard.open.push(file);
                format!("file {}", shard.open.len() - 1)
            }
            (Ok(FileOutcome::Stat(stat)), _) => format!("{} bytes", stat.stx_size),
            (Ok(FileOutcome::Done), _) => "done".to_owned(),
            (Err(error), _) => format!("{error:?}"),
        };
        turn.reply(deferred, text.into_bytes());
    }
}

#[test]
fn every_operation_does_what_its_system_call_does() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let server = start(engine, Limits::default(), Disk::new(folder.path()));
        let mut peer = connect(&server);
        let mut say = |line: &str, answer: &str| ask(&mut peer, format!("{line}\n").as_bytes(), answer.as_bytes());
        say("open new", &format!("Os({})\n", libc::ENOENT));
        say("open ../new create", &format!("Os({})\n", libc::EXDEV));
        say("open new create", "file 0\n");
        say("write 0 3 5 65", "5 bytes\n");
        say("stat 0", "8 bytes\n");
        say("read 0 0 100", "\0\0\0AAAAA\n");
        say("read 0 4 2", "AA\n");
        say("read-now 0 4 2", "AA\n");
        say("read 0 8 2", "\n");
        say("allocate 0 4096", "done\n");
        say("stat 0", "4096 bytes\n");
        say("sync 0", "done\n");
        say("data-sync 0", "done\n");
        say("close-shared 0", "Shared\n");
        say("close", "done\n");
        let direct = rustix::fs::open(folder.path().join("new"), OFlags::RDWR | OFlags::DIRECT, Mode::empty());
        if direct.is_ok() {
            say("open new direct", "file 0\n");
            say("write 0 0 8192 66", "8192 bytes\n");
            say("write 0 1 8192 66", &format!("Os({})\n", libc::EINVAL));
            say("close", "done\n");
        }
        drop(peer);
        server.drain().unwrap();
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        let open = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        assert_eq!(
            open.filter(|path| path.ends_with("new")).count(),
            usize::from(direct.is_ok()),
            "{engine}: all closed"
        );
    }
}

/// Pipelined, from several connections, and none of it copied.
#[test]
fn reads_of_1_mib_come_back_whole() {
    own_network();
    const READ_BYTES: usize = 1 << 20;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        // A delimiter in it would end a reply early only for the reader below, which counts.
        let bytes = pattern(5 * READ_BYTES, 7);
        std::fs::write(folder.path().join("data"), &bytes).unwrap();
        let server = start(engine, Limits::default(), Disk::new(folder.path()));
        let mut first = connect(&server);
        ask(&mut first, b"open data\n", b"file 0\n");
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (server, bytes) = (&server, &bytes);
                scope.spawn(move || {
                    let mut peer = connect(server);
                    let offsets: Vec<_> = (0..8).map(|at| (seed * 8 + at) * 123_457 % (4 * READ_BYTES)).collect();
                    for offset in &offsets {
                        peer.write_all(format!("read 0 {offset} {READ_BYTES}\n").as_bytes()).unwrap();
                    }
                    for offset in offsets {
                        let got = read_exactly(&mut peer, READ_BYTES + 1);
                        assert!(got[..READ_BYTES] == bytes[offset..][..READ_BYTES], "{engine} {offset}");
                    }
                });
            }
        });
        drop(first);
        server.drain().unwrap();
    }
}

#[test]
fn a_full_or_broken_medium_is_told_apart_from_success() {
    let Some(()) = own_run_or_skip("a file system of 1 MiB") else { return };
    succeeds(&["mkdir", "/run/small"]);
    succeeds(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/run/small"]);
    for engine in engines() {
        let server = start(engine, Limits::default(), Disk::new(Path::new("/run/small")));
        let mut peer = connect(&server);
        ask(&mut peer, b"open data create\n", b"file 0\n");
        ask(&mut peer, b"write 0 0 700000 1\n", b"700000 bytes\n");
        peer.write_all(b"write 0 700000 700000 1\n").unwrap();
        let answer = read_line(&mut peer);
        let written: usize =
            answer.strip_prefix("Short { written: ").unwrap().strip_suffix(" }").unwrap().parse().unwrap();
        assert!((1..=(1 << 20) - 700_000).contains(&written), "{engine}: {answer}");
        let rest = format!("write 0 {} {} 1\n", 700_000 + written, 700_000 - written);
        ask(&mut peer, rest.as_bytes(), b"NoSpace\n");
        std::fs::remove_file("/run/small/data").unwrap();
        drop(peer);
        server.drain().unwrap();

        let server = start(engine, Limits::default(), Disk::new(Path::new("/dev")));
        let mut peer = connect(&server);
        ask(&mut peer, b"open full\n", b"file 0\n");
        ask(&mut peer, b"write 0 0 10 1\n", b"NoSpace\n");
        drop(peer);
        server.drain().unwrap();

        // Nothing is mapped at the address 0 of this process: reading it is an I/O error.
        let server = start(engine, Limits::default(), Disk::new(Path::new("/proc/self")));
        let mut peer = connect(&server);
        ask(&mut peer, b"open mem\n", b"file 0\n");
        ask(&mut peer, b"read 0 0 10\n", b"Medium\n");
        drop(peer);
        server.drain().unwrap();
    }
}

/// The kernel would never end the read of an empty pipe by itself.
#[test]
fn a_server_that_stops_cancels_what_waits_and_tells_of_it() {
    for engine in engines_in_own_network() {
        for drains in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let _pipe = pipe(&folder.path().join("pipe"));
            let disk = Disk::new(folder.path());
            let server = start(engine, Limits { drain_timeout_ms: 50, ..Limits::default() }, Arc::clone(&disk));
            let mut peer = connect(&server);
            ask(&mut peer, b"open pipe\n", b"file 0\n");
            peer.write_all(&b"read 0 0 10\n".repeat(100)).unwrap();
            wait_until("the reads begin", || disk.begun.load(Ordering::SeqCst) == 101);
            if drains {
                server.drain().unwrap();
            } else {
                drop(server);
            }
            let heard = disk.heard.lock().unwrap();
            assert_eq!(heard[1..], [Err(FileError::Cancelled); 100], "{engine}, drains: {drains}");
        }
    }
}

/// A thread in open(2) of a pipe cannot be called back. It keeps what it uses, and ends when the other end is there: nobody
/// is told.
#[test]
fn what_cannot_be_cancelled_holds_a_stopping_server_up_for_a_while_only() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        drop(pipe(&path));
        let disk = Disk::new(folder.path());
        let server = start(engine, Limits { drain_timeout_ms: 50, ..Limits::default() }, Arc::clone(&disk));
        let mut peer = connect(&server);
        peer.write_all(b"open-to-read pipe\n").unwrap();
        wait_until("the opening begins", || disk.begun.load(Ordering::SeqCst) == 1);
        if engine == EngineKind::Epoll {
            wait_until("a thread waits in openat2(2)", || {
                let tasks = std::fs::read_dir("/proc/self/task").unwrap();
                let calls = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("syscall")).ok());
                calls.into_iter().any(|call| call.starts_with(&format!("{} ", libc::SYS_openat2)))
            });
        }
        drop(server);
        let heard = disk.heard.lock().unwrap();
        match engine {
            // Nothing, unless what waited there was a thread of another test, and this one had not begun.
            EngineKind::Epoll => assert!(heard.iter().all(|end| *end == Err(FileError::Cancelled)), "{heard:?}"),
            // The pipe is opened at once, or the opening is cancelled.
            EngineKind::Uring => assert_eq!(heard.len(), 1),
        }
        // Ends the thread, if there is one.
        drop(std::fs::File::options().read(true).write(true).open(&path).unwrap());
    }
}

#[test]
fn what_is_under_way_is_bounded() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(&folder.path().join("pipe"));
        let limits = Limits { file_ops_max: 2, file_bytes_max: 1000, ..Limits::default() };
        let disk = Disk::new(folder.path());
        let server = start(engine, limits, Arc::clone(&disk));
        let mut peer = connect(&server);
        ask(&mut peer, b"open pipe\n", b"file 0\n");
        let mut waiting = connect(&server);
        waiting.write_all(b"read 0 0 999\n").unwrap();
        wait_until("the read begins", || disk.begun.load(Ordering::SeqCst) == 2);
        let refused = b"a file operation was refused: operations with file_bytes_max, 1000 bytes, are under way\n";
        ask(&mut peer, b"read 0 0 2\n", refused);
        writer.write_all(b"x").unwrap();
        expect(&mut waiting, b"x\n");
        // Alone one may exceed the limit.
        waiting.write_all(b"read 0 0 2000\n").unwrap();
        wait_until("the read begins", || disk.begun.load(Ordering::SeqCst) == 3);
        writer.write_all(b"y").unwrap();
        expect(&mut waiting, b"y\n");
        // The third message waits for one of two operations.
        waiting.write_all(b"read 0 0 1\nread 0 0 1\nread 0 0 1\n").unwrap();
        wait_until("two reads begin", || disk.begun.load(Ordering::SeqCst) == 5);
        writer.write_all(b"zzz").unwrap();
        expect(&mut waiting, b"z\nz\nz\n");
        drop((peer, waiting));
        server.drain().unwrap();
    }
}

/// Also messages of connections that have nothing under way themselves, and however many come.
#[test]
fn messages_wait_while_operations_are_full() {
    own_network();
    const READS: usize = 500;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(&folder.path().join("pipe"));
        std::fs::write(folder.path().join("data"), b"ABCDEFGH").unwrap();
        let disk = Disk::new(folder.path());
        let limits = Limits { file_ops_max: 2, ..Limits::default() };
        let server = start(engine, limits, Arc::clone(&disk));
        let mut holder = connect(&server);
        // One after the other, because files have the numbers of the order in which they were opened.
        holder.write_all(b"open pipe\n").unwrap();
        expect(&mut holder, b"file 0\n");
        holder.write_all(b"open data\nread 0 0 1\nread 0 0 1\n").unwrap();
        expect(&mut holder, b"file 1\n");
        wait_until("both reads begin", || disk.begun.load(Ordering::SeqCst) == 4);
        let mut others = [connect(&server), connect(&server)];
        for other in &mut others {
            for at in 0..READS {
                other.write_all(format!("read 1 {} 1\n", at % 8).as_bytes()).unwrap();
            }
        }
        // Ends one of the two.
        writer.write_all(b"x").unwrap();
        for other in &mut others {
            for at in 0..READS {
                expect(other, &[b"ABCDEFGH"[at % 8], b'\n']);
            }
        }
        assert_eq!(disk.refused.load(Ordering::SeqCst), 0, "{engine}");
        writer.write_all(b"x").unwrap();
        expect(&mut holder, b"x\nx\n");
        drop((holder, others));
        server.drain().unwrap();
    }
}

/// What arrived with the last one that found room is put aside, and the others stay in the socket.
#[test]
fn datagrams_wait_while_operations_are_full() {
    own_network();
    const READS: usize = 50;
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(&folder.path().join("pipe"));
        std::fs::write(folder.path().join("data"), b"ABCDEFGH").unwrap();
        let disk = Disk::new(folder.path());
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let limits = Limits { file_ops_max: 2, ..Limits::default() };
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits);
        let builder = builder.listen(ANY.parse().unwrap(), Arc::clone(&disk), None);
        let server = builder.listen("udp:127.0.0.1:0".parse().unwrap(), Arc::clone(&disk), None).start().unwrap();
        let mut holder = connect(&server);
        // One after the other, because files have the numbers of the order in which they were opened.
        holder.write_all(b"open pipe\n").unwrap();
        expect(&mut holder, b"file 0\n");
        holder.write_all(b"open data\nread 0 0 1\nread 0 0 1\n").unwrap();
        expect(&mut holder, b"file 1\n");
        wait_until("both reads begin", || disk.begun.load(Ordering::SeqCst) == 4);
        let ListenAddr::Udp(addr) = server.listeners()[1].addr else { panic!("no port") };
        let peer = datagrams(addr);
        for at in 0..READS {
            peer.send(format!("read 1 {} 1", at % 8).as_bytes()).unwrap();
        }
        // Ends one of the two.
        writer.write_all(b"x").unwrap();
        let mut got: Vec<_> = (0..READS)
            .map(|_| {
                let mut byte = [0; 2];
                assert_eq!(peer.recv(&mut byte).unwrap(), 1, "{engine}");
                byte[0]
            })
            .collect();
        let mut due: Vec<_> = (0..READS).map(|at| b"ABCDEFGH"[at % 8]).collect();
        got.sort_unstable();
        due.sort_unstable();
        assert_eq!(got, due, "{engine}");
        assert_eq!(disk.refused.load(Ordering::SeqCst), 0, "{engine}");
        writer.write_all(b"x").unwrap();
        expect(&mut holder, b"x\nx\n");
        drop(holder);
        server.drain().unwrap();
    }
}

/// Answers any message with the file, read in [`PARTS`] operations that are begun at once. Those that are refused it tries again
/// when it hears of room.
struct Patient {
    file: File,
    refused: AtomicU64,
}

struct OpenPatient {
    files: Files,
    refused: VecDeque<(FileOp, u64)>,
    parts: [Vec<u8>; PARTS],
    missing: usize,
    reply: Option<Deferred>,
}

const PARTS: usize = 5;
const PART_BYTES: usize = 200;

impl Patient {
    fn begin(&self, shard: &mut OpenPatient, op: FileOp, token: u64) -> bool {
        let refused = shard.files.begin(op, token).err();
        let begun = refused.is_none();
        if let Some(refused) = refused {
            self.refused.fetch_add(1, Ordering::SeqCst);
            shard.refused.push_back((refused.op, token));
        }
        begun
    }
}

impl Service for Patient {
    type Shard = OpenPatient;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("patient", LINES)
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OpenPatient> {
        let (files, parts) = (turn.files(), Default::default());
        Ok(OpenPatient { files, refused: VecDeque::new(), parts, missing: 0, reply: None })
    }

    fn accept(&self, _: &mut OpenPatient, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OpenPatient, (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        (shard.reply, shard.missing) = (Some(reply.defer()), PARTS);
        for part in 0..PARTS {
            let read = FileOp::read(&self.file, (part * PART_BYTES) as u64, PART_BYTES, shard.files.buffer(PART_BYTES));
            self.begin(shard, read, part as u64);
        }
    }

    fn files_have_room(&self, shard: &mut OpenPatient, _: &mut Turn<'_>) {
        for _ in 0..shard.refused.len() {
            let (op, token) = shard.refused.pop_front().unwrap();
            self.begin(shard, op, token);
        }
    }

    fn file_done(&self, shard: &mut OpenPatient, done: FileDone, turn: &mut Turn<'_>) {
        let FileOp::Read { into, .. } = done.op else { panic!("it only reads") };
        shard.parts[done.token as usize] = into.to_vec();
        shard.missing -= 1;
        if shard.missing == 0 {
            turn.reply(shard.reply.take().unwrap(), shard.parts.concat());
        }
    }
}

/// By number and by bytes, where other services have everything that is under way.
#[test]
fn a_service_that_was_refused_hears_when_there_is_room() {
    for engine in engines_in_own_network() {
        for (file_ops_max, file_bytes_max, held_bytes) in [(1024, 1000, 900), (1024, 1, 900), (2, 1 << 20, 1)] {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = pipe(&folder.path().join("pipe"));
            let content = pattern(PARTS * PART_BYTES, 5);
            let file = create(&folder.path().join("data"));
            file.write_all_at(&content, 0).unwrap();
            let disk = Disk::new(folder.path());
            let patient = Arc::new(Patient { file: file.into(), refused: AtomicU64::new(0) });
            let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
            let limits = Limits { file_ops_max, file_bytes_max, ..Limits::default() };
            let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits);
            let builder = builder.listen(ANY.parse().unwrap(), Arc::clone(&disk), None);
            let server = builder.listen(ANY.parse().unwrap(), Arc::clone(&patient), None).start().unwrap();
            let ksf::listener::ListenAddr::Tcp(to) = server.listeners()[1].addr else { panic!("no port") };
            let (mut holder, mut peer) = (connect(&server), connect_to(to));
            ask(&mut holder, b"open pipe\n", b"file 0\n");
            // Before the other service has anything under way: its message is handed over all the same, because there is
            // room for a byte.
            peer.write_all(b"all\n").unwrap();
            expect(&mut peer, &[&content[..], b"\n"].concat());
            let refused = patient.refused.load(Ordering::SeqCst);
            holder.write_all(format!("read 0 0 {held_bytes}\n").as_bytes()).unwrap();
            wait_until("the read begins", || disk.begun.load(Ordering::SeqCst) == 2);
            peer.write_all(b"all\n").unwrap();
            if file_bytes_max == 1000 {
                wait_until("all are refused", || patient.refused.load(Ordering::SeqCst) >= refused + PARTS as u64);
            }
            writer.write_all(b"x").unwrap();
            expect(&mut holder, b"x\n");
            expect(&mut peer, &[&content[..], b"\n"].concat());
            drop((holder, peer));
            server.drain().unwrap();
        }
    }
}

#[test]
fn a_panic_at_the_end_of_an_operation_closes_whom_it_was_for_alone() {
    for engine in engines_in_own_network() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("data"), b"bytes").unwrap();
        let server = start(engine, Limits::default(), Disk::new(folder.path()));
        let mut peer = connect(&server);
        ask(&mut peer, b"open data\n", b"file 0\n");
        let mut unlucky = connect(&server);
        unlucky.write_all(b"panic 0 0 5\n").unwrap();
        expect_end(&mut unlucky);
        ask(&mut peer, b"read 0 0 5\n", b"bytes\n");
        until_count(&server, "panics", 1);
        drop(peer);
        server.drain().unwrap();
    }
}
