//! What memory that is registered with the ring saves a service on io_uring that reads files with O_DIRECT: through the engine,
//! from `Files::begin` to `file_done`. `cargo bench -p ksf --bench registered_engine [-- FOLDER]` prints it.
//!
//! Two servers, with `file_pinned_bytes_max` of 0 and of 16 MiB, read from a file each, in turns. What is printed is the CPU time
//! of this process for a read, with that of the kernel's worker threads for it. It leaves out what the disk takes, and most of
//! what a busy machine adds.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::files::{File, FileDone, FileOp, Files};
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, Server, ShardService, Turn};

const ROUNDS: usize = 11;
const FILE_BYTES: usize = 16 << 20;
/// Bytes and operations of a round.
const ROUND_BYTES: usize = 16 << 20;
const ROUND_OPERATIONS: usize = 64;
/// Memory of the operations under way.
const MEMORY_BYTES: usize = 4 << 20;
const PINNED_BYTES_MAX: [usize; 2] = [0, 16 << 20];

fn main() {
    let folder =
        std::env::args_os().skip(1).find(|word| word != "--bench").map_or_else(std::env::temp_dir, PathBuf::from);
    let mut sides = PINNED_BYTES_MAX.map(|bytes| Side::start(&folder, bytes));
    println!("{}, O_DIRECT: CPU time of a read in us, median of {ROUNDS} rounds", folder.display());
    println!("{:>6} {:>6} {:>10} {:>10} {:>8}", "KiB", "flying", "0", "16 MiB", "ratio");
    for kib in [64, 1024] {
        for in_flight in [1, (MEMORY_BYTES / (kib << 10)).min(32)] {
            let case = Case { bytes: kib << 10, in_flight };
            let [off, on] = measure(&mut sides, case).map(|time| time.as_secs_f64() * 1e6);
            println!("{kib:>6} {in_flight:>6} {off:>10.1} {on:>10.1} {:>8.2}", on / off);
        }
    }
    let counts = sides.map(|side| side.count("file_ops_registered"));
    assert!(counts[0] == 0 && counts[1] > 0, "reads into registered memory: {counts:?}");
}

/// CPU time of an operation on each side.
fn measure(sides: &mut [Side; 2], case: Case) -> [Duration; 2] {
    let mut times: [Vec<Duration>; 2] = Default::default();
    for round in 0..=ROUNDS {
        for turn in 0..2 {
            // Each side comes first as often as the other one.
            let way = (turn + round) % 2;
            let time = sides[way].run(case);
            // The first round touches the memory, and registers it.
            if round > 0 {
                times[way].push(time);
            }
        }
    }
    times.map(|mut times| {
        times.sort_unstable();
        times[ROUNDS / 2]
    })
}

#[derive(Clone, Copy)]
struct Case {
    bytes: usize,
    in_flight: usize,
}

impl Case {
    fn operations(&self) -> usize {
        (ROUND_BYTES / self.bytes).min(ROUND_OPERATIONS)
    }
}

/// A server, and a connection to it.
struct Side {
    server: Server,
    peer: TcpStream,
}

impl Side {
    fn start(folder: &Path, pinned_bytes_max: usize) -> Self {
        let limits = Limits { file_pinned_bytes_max: pinned_bytes_max, ..Limits::default() };
        let disk = Arc::new(Disk(open(folder).expect("a file with O_DIRECT")));
        let cpus = ksf::cpus::allowed().expect("a CPU")[..1].to_vec();
        let builder = Server::builder().engine(EngineKind::Uring).cpus(Some(cpus)).limits(limits);
        let any = "127.0.0.1:0".parse().expect("an address");
        let server = builder.listen(any, disk, None).start().expect("a server on io_uring");
        let ListenAddr::Tcp(addr) = server.listeners()[0].addr else { panic!("TCP") };
        let peer = TcpStream::connect(addr).expect("a connection");
        Self { server, peer }
    }

    /// Runs a round; CPU time of one operation.
    fn run(&mut self, case: Case) -> Duration {
        let operations = case.operations();
        let words = [case.bytes as u32, case.in_flight as u32, operations as u32];
        let before = cpu_time();
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let message = [&(body.len() as u32).to_be_bytes()[..], &body].concat();
        self.peer.write_all(&message).expect("a server");
        self.peer.read_exact(&mut [0; 8]).expect("its answer");
        (cpu_time() - before) / operations as u32
    }

    fn count(&self, name: &str) -> u64 {
        let counters = self.server.counters();
        counters.iter().find(|counter| counter.name == name).map_or(0, |counter| counter.value)
    }
}

/// A file without a name, whose blocks are all written, so that the file system has nothing to decide.
fn open(folder: &Path) -> std::io::Result<File> {
    let path = folder.join(format!("ksf-registered-engine-{}", std::process::id()));
    let mut file = std::fs::File::create(&path)?;
    file.write_all(&vec![7; FILE_BYTES])?;
    file.sync_all()?;
    let file = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    std::fs::remove_file(&path)?;
    Ok(OwnedFd::from(file?).into())
}

fn cpu_time() -> Duration {
    // SAFETY: an all-zero value is valid, and lives through the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage
    };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// A message has it run a round, and is answered at its end.
struct Disk(File);

#[derive(Default)]
struct Round {
    bytes: usize,
    begun: usize,
    ended: usize,
    operations: usize,
    answer: Option<Deferred>,
}

struct OpenDisk {
    files: Files,
    round: Round,
}

impl Disk {
    /// Begins the next read; the memory of the one before, if any, is used anew, as the classes would give it out.
    fn begin(&self, shard: &mut OpenDisk, before: Option<FileOp>) {
        let Round { bytes, begun, .. } = shard.round;
        let at = (begun * bytes % FILE_BYTES) as u64;
        drop(before);
        let op = FileOp::read(&self.0, at, bytes, shard.files.buffer(bytes));
        shard.files.begin(op, 0).expect("room");
        shard.round.begun += 1;
    }
}

impl ShardService for Disk {
    type Shard = OpenDisk;
    type Conn = ();

    fn profile(&self) -> Profile<'_> {
        Profile::new("disk", Framing::LengthPrefix(LengthPrefix::big_endian(4)))
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<OpenDisk> {
        Ok(OpenDisk { files: turn.files(), round: Round::default() })
    }

    fn accept(&self, _: &mut OpenDisk, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, shard: &mut OpenDisk, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let words: Vec<_> = message
            .bytes()
            .chunks_exact(4)
            .map(|word| u32::from_be_bytes(word.try_into().expect("4")) as usize)
            .collect();
        let &[bytes, in_flight, operations] = &words[..] else { panic!("a round") };
        let answer = Some(reply.defer());
        shard.round = Round { bytes, begun: 0, ended: 0, operations, answer };
        for _ in 0..in_flight.min(operations) {
            self.begin(shard, None);
        }
    }

    fn file_done(&self, shard: &mut OpenDisk, done: FileDone, turn: &mut Turn<'_>) {
        assert_eq!(done.bytes(), Ok(shard.round.bytes));
        shard.round.ended += 1;
        if shard.round.begun < shard.round.operations {
            self.begin(shard, Some(done.op));
        } else if shard.round.ended == shard.round.operations
            && let Some(answer) = shard.round.answer.take()
        {
            turn.reply(answer, b"done".to_vec());
        }
    }
}
