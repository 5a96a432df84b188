//! What a file or memory that is registered with a ring saves, for what a store does.
//! `cargo bench -p ksf --bench registered [-- FOLDER | DEVICE ...]` prints it. A block device that is named is written to.
//!
//! * plain: a descriptor and an address, as the engine asks.
//! * file: a slot of the ring's table of files (IORING_REGISTER_FILES), the address as before.
//! * memory: a descriptor, and memory that the kernel has pinned (IORING_REGISTER_BUFFERS).
//! * both.
//! * huge: a descriptor and an address, in memory of huge pages, where the kernel pins fewer and longer pieces.
//!
//! What is printed is the CPU time of this process for an operation, with that of the kernel's worker threads for it. It
//! leaves out what the disk takes, and most of what a busy machine adds. Ways are interleaved, and the lowest and the median of
//! a way's rounds are compared. Writes carry RWF_DSYNC, as the store's do.

use std::alloc::Layout;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, opcode, squeue};

const ROUNDS: usize = 25;
const FILE_BYTES: usize = 16 << 20;
/// Memory of the operations under way, within the usual RLIMIT_MEMLOCK.
const MEMORY_BYTES: usize = 4 << 20;
const HUGE_BYTES: usize = 2 << 20;
/// Bytes and operations of a round.
const ROUND_BYTES: usize = 4 << 20;
const ROUND_OPERATIONS: usize = 128;

const WAYS: [&str; 5] = ["plain", "file", "memory", "both", "huge"];

#[derive(Clone, Copy)]
struct Case {
    write: bool,
    bytes: usize,
    in_flight: usize,
}

fn main() {
    let named: Vec<_> = std::env::args_os().skip(1).filter(|word| word != "--bench").map(PathBuf::from).collect();
    let targets = if named.is_empty() { vec![std::env::temp_dir(), "/dev/shm".into()] } else { named };
    for target in targets {
        let path = if target.is_dir() { target.join(format!("ksf-registered-{}", std::process::id())) } else { target };
        for direct in [true, false] {
            match open(&path, direct) {
                Ok(file) => table(&path, &file, direct),
                Err(error) => println!("{}: {error}", path.display()),
            }
        }
        let device = std::fs::metadata(&path).is_ok_and(|made| made.file_type().is_block_device());
        if !device {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// A file whose blocks are all written, so that the file system has nothing to decide.
fn open(path: &Path, direct: bool) -> std::io::Result<File> {
    let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
    file.write_all(&vec![7; FILE_BYTES])?;
    file.sync_all()?;
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

fn table(path: &Path, file: &File, direct: bool) {
    let cache = if direct { "O_DIRECT" } else { "page cache" };
    println!("{}, {cache}: CPU time of an operation in us (lowest and median of {ROUNDS} rounds)", path.display());
    println!(
        "{:>6} {:>6} {:>6}   {:<90} lowest, median against plain",
        "",
        "KiB",
        "flying",
        WAYS.map(|way| format!("{way:<18}")).concat()
    );
    for write in [true, false] {
        for kib in [4, 16, 64, 512, 1024] {
            let bytes = kib << 10;
            for in_flight in [1, (MEMORY_BYTES / bytes).min(32)] {
                let measured = measure(file, Case { write, bytes, in_flight });
                print!("{:>6} {kib:>6} {in_flight:>6}   ", if write { "write" } else { "read" });
                let micros = |time: Duration| time.as_secs_f64() * 1e6;
                for (low, median) in measured {
                    print!("{:>8.2} {:>8.2} ", micros(low), micros(median));
                }
                let (low, median) = measured[0];
                for (lower, middle) in &measured[1..] {
                    print!(
                        "  {:.3} {:.3}",
                        lower.as_secs_f64() / low.as_secs_f64(),
                        middle.as_secs_f64() / median.as_secs_f64()
                    );
                }
                println!();
            }
        }
    }
}

/// Of each way the lowest and the median CPU time of an operation.
fn measure(file: &File, case: Case) -> [(Duration, Duration); 5] {
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(256)
        .expect("a ring with deferred completions (6.1)");
    ring.submitter().register_files(&[file.as_raw_fd()]).expect("a slot for the file");
    let (memory, huge) = (Memory::new(4096), Memory::new(HUGE_BYTES));
    let whole = libc::iovec { iov_base: memory.0.cast(), iov_len: MEMORY_BYTES };
    // SAFETY: the memory outlives the ring, which is dropped first, when nothing is under way.
    unsafe { ring.submitter().register_buffers(&[whole]) }.expect("RLIMIT_MEMLOCK of 4 MiB");
    let mut times: [Vec<Duration>; 5] = Default::default();
    for round in 0..ROUNDS {
        for turn in 0..WAYS.len() {
            // Each way comes first, second ... as often.
            let way = (turn + round) % WAYS.len();
            let memory = if way == 4 { &huge } else { &memory };
            times[way].push(run(&mut ring, file, case, way, memory));
        }
    }
    drop(ring);
    times.map(|mut times| {
        times.sort_unstable();
        (times[0], times[times.len() / 2])
    })
}

/// Runs a round; CPU time of one operation.
fn run(ring: &mut IoUring, file: &File, case: Case, way: usize, memory: &Memory) -> Duration {
    let operations = (ROUND_BYTES / case.bytes).min(ROUND_OPERATIONS).max(case.in_flight);
    let before = cpu_time();
    let (mut begun, mut ended) = (0, 0);
    let mut places: Vec<usize> = (0..case.in_flight).collect();
    while ended < operations {
        while begun < operations
            && let Some(place) = places.pop()
        {
            // SAFETY: the place lies within the memory, and no other operation under way has it.
            let to = unsafe { memory.0.add(place * case.bytes) };
            let offset = (begun * case.bytes % FILE_BYTES) as u64;
            let request = request(file, case, way, to, offset).user_data(place as u64);
            // SAFETY: the file and the memory live until the request has ended.
            unsafe { ring.submission().push(&request) }.expect("room for all that are under way");
            begun += 1;
        }
        ring.submit_and_wait(1).expect("a ring");
        for entry in ring.completion() {
            assert_eq!(entry.result(), case.bytes as i32, "{}", WAYS[way]);
            places.push(entry.user_data() as usize);
            ended += 1;
        }
    }
    (cpu_time() - before) / operations as u32
}

fn request(file: &File, case: Case, way: usize, memory: *mut u8, offset: u64) -> squeue::Entry {
    let (bytes, pinned) = (case.bytes as u32, way == 2 || way == 3);
    macro_rules! on {
        ($file:expr) => {
            match (case.write, pinned) {
                (true, false) => {
                    opcode::Write::new($file, memory, bytes).offset(offset).rw_flags(libc::RWF_DSYNC).build()
                }
                (true, true) => {
                    opcode::WriteFixed::new($file, memory, bytes, 0).offset(offset).rw_flags(libc::RWF_DSYNC).build()
                }
                (false, false) => opcode::Read::new($file, memory, bytes).offset(offset).build(),
                (false, true) => opcode::ReadFixed::new($file, memory, bytes, 0).offset(offset).build(),
            }
        };
    }
    if way == 1 || way == 3 { on!(Fixed(0)) } else { on!(Fd(file.as_raw_fd())) }
}

/// Memory of small pages, or of huge ones.
struct Memory(*mut u8, Layout);

impl Memory {
    fn new(page_bytes: usize) -> Self {
        let layout = Layout::from_size_align(MEMORY_BYTES, page_bytes).expect("a power of two");
        // SAFETY: the layout is not empty.
        let memory = unsafe { std::alloc::alloc(layout) };
        assert!(!memory.is_null(), "no memory");
        let advice = if page_bytes == HUGE_BYTES { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range is whole pages that were allocated right now, and was not touched before.
        unsafe {
            libc::madvise(memory.cast(), MEMORY_BYTES, advice);
            memory.write_bytes(7, MEMORY_BYTES);
        }
        Self(memory, layout)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no ring uses it any more.
        unsafe { std::alloc::dealloc(self.0, self.1) };
    }
}

/// CPU time of all threads of this process, with those that the kernel runs for its rings.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
