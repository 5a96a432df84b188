//! Reads into registered memory, on a real ring and real files with O_DIRECT. What the kernel pins it says itself: VmPin
//! in /proc/self/status.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ksf_test::{Helper, is_helper, say, skip, wait_until};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::Uring;
use super::registered::{MISSES, PLACES};
use crate::buffers::{Buffer, Buffers, CLASS_BYTES_MAX};
use crate::engine::tests::Bench;
use crate::engine::{Engine, EngineKind, Event, Wait};
use crate::env::Env;
use crate::files::{File, FileDone, FileError, FileOp, Files, Owner};

const KIB: usize = 1 << 10;

/// What is pinned is counted by the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// An engine with an open file.
struct Direct {
    bench: Bench<Uring>,
    buffers: Buffers,
    files: Files,
    file: File,
    /// The same file through the page cache.
    plain: std::fs::File,
    _folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Direct {
    /// `None`: this machine has no io_uring, or its temporary files no O_DIRECT, and that is said.
    fn start(pinned_bytes_max: usize) -> Option<Self> {
        if let Err(error) = EngineKind::Uring.probe() {
            skip(format_args!("needs io_uring ({error})"));
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let plain = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let file: OwnedFd = match rustix::fs::open(&path, OFlags::RDWR | OFlags::DIRECT, Mode::empty()) {
            Ok(file) => file,
            Err(error) => {
                skip(format_args!("needs O_DIRECT ({error})"));
                return None;
            }
        };
        let mut bench = Bench::<Uring>::new();
        bench.env.limits.file_pinned_bytes_max = pinned_bytes_max;
        let buffers = Buffers::new(0);
        let Env { files, limits, .. } = &mut bench.env;
        let files = files.of(Owner::Service(0), limits, &buffers);
        // The kernel ends the ring of an engine that was dropped a little later.
        wait_until("nothing is pinned", || pinned_bytes() == 0);
        let (_folder, _alone) = (folder, alone);
        Some(Self { bench, buffers, files, file: file.into(), plain, _folder, _alone })
    }

    /// Hands an operation to the engine, which submits it with its next wait.
    fn begin(&mut self, op: FileOp) {
        self.files.begin(op, 0).unwrap();
        let begun = self.bench.env.files.next().unwrap();
        self.bench.engine.begin_file(begun, &self.bench.env);
    }

    /// Waits for the end of an operation.
    fn end(&mut self) -> FileDone {
        let is_end = |event: &Event| matches!(event, Event::File(_));
        self.bench.wait_for("the end of an operation", |events| events.iter().any(is_end));
        let at = self.bench.events.iter().position(is_end).unwrap();
        let Event::File(begun) = self.bench.events.remove(at) else { unreachable!() };
        self.bench.env.files.ended(*begun).1
    }

    /// Fills a part of the file.
    fn lay(&self, offset: usize, bytes: usize, with: u8) {
        self.plain.write_all_at(&vec![with; bytes], offset as u64).unwrap();
    }

    /// Begins to read into the front of a buffer, which has other bytes there.
    fn begin_read(&mut self, offset: usize, bytes: usize, mut into: Buffer, with: u8) {
        into.set_len(0);
        into.part_mut(0..bytes).fill(!with);
        self.begin(FileOp::read(&self.file.clone(), offset as u64, bytes, into));
    }

    /// Reads a part of the file into the front of a buffer, which comes back, and asserts that all of it is these bytes.
    #[track_caller]
    fn read(&mut self, offset: usize, bytes: usize, into: Buffer, with: u8) -> Buffer {
        self.begin_read(offset, bytes, into, with);
        let done = self.end();
        assert_eq!(done.bytes(), Ok(bytes));
        let into = read_into(done);
        assert_all(&into, with);
        into
    }

    /// The same as often as it takes until memory is registered that might be in vain.
    #[track_caller]
    fn read_until_registered(&mut self, offset: usize, bytes: usize, mut into: Buffer, with: u8) -> Buffer {
        let before = self.counts().0;
        for _ in 0..MISSES {
            into = self.read(offset, bytes, into, with);
        }
        assert_eq!(self.counts().0, before + 1);
        into
    }

    /// How often memory was registered, how many operations used that, and how often it was refused.
    fn counts(&self) -> (u64, u64, u64) {
        let stats = &self.bench.env.stats;
        let [registered, used] = [&stats.file_memory_registered, &stats.file_ops_registered].map(|c| c.value());
        (registered, used, stats.file_memory_refused.value())
    }

    /// Asserts that so much is pinned, by the engine's count and by the kernel's.
    #[track_caller]
    fn expect_pinned(&self, bytes: usize) {
        assert_eq!(self.bench.engine.files.registered.pinned_bytes(), bytes);
        // Older kernels let go later.
        wait_until(format_args!("{bytes} bytes are pinned"), || pinned_bytes() == bytes);
    }

    /// A pipe with O_DIRECT (packets): a read of it lasts until somebody writes.
    fn pipe() -> (File, OwnedFd) {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
        // The end that is read has the flag only if it is set.
        rustix::fs::fcntl_setfl(&reader, OFlags::DIRECT).unwrap();
        (reader.into(), writer)
    }

    /// Submits what was begun, and waits for nothing.
    fn submit(&mut self) {
        let wait = Wait { timeout: Some(std::time::Duration::from_micros(1)), gather: None };
        self.bench.engine.wait(&mut self.bench.env, wait, &mut self.bench.events).unwrap();
    }
}

fn read_into(done: FileDone) -> Buffer {
    let FileOp::Read { into, .. } = done.op else { panic!("{done:?}") };
    into
}

#[track_caller]
fn assert_all(bytes: &[u8], with: u8) {
    let wrong = bytes.iter().position(|byte| *byte != with);
    assert_eq!(wrong, None, "{} instead of {with}", bytes[wrong.unwrap_or(0)]);
}

/// What the kernel has pinned of this process.
fn pinned_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * KIB
}

#[test]
fn memory_is_registered_once_and_used_again_and_again() {
    let Some(mut direct) = Direct::start(1 << 20) else { return };
    let mut buffer = direct.buffers.take(64 * KIB);
    for round in 1..=3 {
        direct.lay(round * 64 * KIB, 64 * KIB, round as u8);
        buffer = direct.read(round * 64 * KIB, 64 * KIB, buffer, round as u8);
    }
    assert_eq!(direct.counts(), (1, 3, 0));
    // Given back and taken again, it is the same memory; behind what is filled, too.
    drop(buffer);
    let mut into = direct.buffers.take(64 * KIB);
    into.fill(&[7; 4 * KIB]);
    direct.begin(FileOp::read(&direct.file.clone(), 128 << 10, 8 * KIB, into));
    let done = direct.end();
    assert_eq!(done.bytes(), Ok(8 * KIB));
    let into = read_into(done);
    assert_eq!(into.len(), 12 * KIB);
    assert_all(&into[..4 * KIB], 7);
    assert_all(&into[4 * KIB..], 2);
    assert_eq!(direct.counts(), (1, 4, 0));
    direct.expect_pinned(64 * KIB);
}

#[test]
fn only_what_pays_is_registered() {
    let Some(mut direct) = Direct::start(16 << 20) else { return };
    // Through the page cache.
    direct.lay(0, CLASS_BYTES_MAX + 4 * KIB, 1);
    let plain = File::from(direct.plain.try_clone().unwrap());
    direct.begin(FileOp::read(&plain, 0, 64 * KIB, direct.buffers.take(64 * KIB)));
    assert_eq!(direct.end().bytes(), Ok(64 * KIB));
    // Longer than the classes: never used again.
    let long = direct.buffers.take(CLASS_BYTES_MAX + 4 * KIB);
    direct.read(0, CLASS_BYTES_MAX + 4 * KIB, long, 1);
    // Writes: they gain nothing.
    let mut written = direct.buffers.take(64 * KIB);
    written.fill(&[2; 64 * KIB]);
    direct.begin(FileOp::write_durably(&direct.file.clone(), 0, written));
    assert_eq!(direct.end().bytes(), Ok(64 * KIB));
    assert_eq!(direct.counts(), (0, 0, 0));
    // All of a short buffer, and of a long one what was touched.
    let short = direct.buffers.take(20 * KIB);
    let _short = direct.read(0, 20 * KIB, short, 2);
    direct.expect_pinned(32 * KIB);
    let long = direct.buffers.take(1 << 20);
    let _long = direct.read(8 * KIB, 8 * KIB, long, 2);
    direct.expect_pinned((32 + 8) * KIB);
    assert_eq!(direct.counts(), (2, 2, 0));
}

/// Each time a little more of a long buffer is read into.
#[test]
fn memory_that_grows_is_registered_now_and_then() {
    const PAGES: usize = 64;
    let Some(mut direct) = Direct::start(16 << 20) else { return };
    direct.lay(0, PAGES * 4 * KIB, 1);
    let mut buffer = direct.buffers.take(1 << 20);
    for pages in 1..=PAGES {
        buffer = direct.read(0, pages * 4 * KIB, buffer, 1);
    }
    // The first one, and one of so many of the others.
    let registered = 1 + (PAGES as u64 - 1) / u64::from(MISSES);
    assert_eq!(direct.counts(), (registered, registered, 0));
    // It grows no more.
    for _ in 0..3 * MISSES {
        buffer = direct.read(0, PAGES * 4 * KIB, buffer, 1);
    }
    let (again, used, refused) = direct.counts();
    assert_eq!((again, refused), (registered + 1, 0));
    assert!(used > registered + u64::from(MISSES), "{used}");
    direct.expect_pinned(PAGES * 4 * KIB);
}

/// The kernel still has the pages that were there before.
#[test]
fn memory_that_was_forgotten_has_other_pages() {
    let Some(mut direct) = Direct::start(1 << 20) else { return };
    direct.lay(0, 64 * KIB, 1);
    let buffer = direct.buffers.take(64 * KIB);
    let mut buffer = direct.read(0, 64 * KIB, buffer, 1);
    for round in 2..4 {
        assert!(buffer.forget());
        direct.lay(0, 64 * KIB, round);
        buffer = direct.read_until_registered(0, 64 * KIB, buffer, round);
        let round = u64::from(round);
        assert_eq!(direct.counts(), (round, round, 0));
        // Pages that are not there any more are let go of.
        direct.expect_pinned(64 * KIB);
    }
}

/// Freed on another thread, and mapped anew at the same address.
#[test]
fn memory_that_was_freed_and_allocated_anew_has_other_pages() {
    const BYTES: usize = 256 * KIB;
    const TRIES: usize = 200;
    let Some(mut direct) = Direct::start(TRIES * BYTES * 2) else { return };
    direct.lay(0, BYTES, 1);
    direct.lay(BYTES, BYTES, 2);
    for round in 0..TRIES {
        let mut buffer = direct.buffers.take(BYTES);
        let used = direct.counts().1;
        // Others may have had its address.
        while direct.counts().1 == used {
            buffer = direct.read(0, BYTES, buffer, 1);
        }
        let address = buffer.as_mut_ptr().addr();
        let buffers = direct.buffers.clone();
        let others: Vec<_> = (0..buffers_kept()).map(|_| buffers.take(BYTES)).collect();
        // A class that is full frees the next one.
        std::thread::spawn(move || {
            drop(others);
            drop(buffer);
        })
        .join()
        .unwrap();
        assert_eq!(direct.buffers.kept(), buffers_kept());
        // Those of the class, and then new mappings until one lies there.
        let mut taken = Vec::new();
        let again = (0..buffers_kept() + 32).find_map(|_| {
            let mut buffer = direct.buffers.take(BYTES);
            if buffer.as_mut_ptr().addr() == address {
                return Some(buffer);
            }
            taken.push(buffer);
            None
        });
        let Some(again) = again else { continue };
        direct.read_until_registered(BYTES, BYTES, again, 2);
        eprintln!("the address came again in round {round}");
        return;
    }
    panic!("no memory was mapped at the same address");
}

/// Buffers that a class keeps at least.
fn buffers_kept() -> usize {
    4
}

/// Not submitted yet, and waiting in the kernel.
#[test]
fn memory_that_is_used_stays_registered() {
    const READS: usize = 2 * MISSES as usize + 1;
    let Some(mut direct) = Direct::start(64 * KIB) else { return };
    let with = |number: usize| 10 + number as u8;
    for number in 0..READS {
        direct.lay(number * 64 * KIB, 64 * KIB, with(number));
    }
    // In one submission: others want the room before the kernel has seen the first request.
    for number in 0..READS {
        let buffer = direct.buffers.take(64 * KIB);
        direct.begin_read(number * 64 * KIB, 64 * KIB, buffer, with(number));
    }
    let mut seen = Vec::new();
    for _ in 0..READS {
        let done = direct.end();
        assert_eq!(done.bytes(), Ok(64 * KIB));
        let FileOp::Read { offset, .. } = done.op else { panic!("{done:?}") };
        let into = read_into(done);
        assert_all(&into, with(offset as usize / (64 * KIB)));
        seen.push(into);
    }
    assert_eq!(direct.counts(), (1, 1, 0));
    drop(seen);
    // Read into while it waits for a pipe.
    let (pipe, writer) = Direct::pipe();
    let used = direct.counts().1;
    // The first one may be known already; if not, one has the room once it is its turn.
    let mut reads = 0;
    while direct.counts().1 == used {
        let mut into = direct.buffers.take(64 * KIB);
        into.room_mut().fill(0xff);
        direct.begin(FileOp::read(&pipe, 0, 4 * KIB, into));
        reads += 1;
    }
    direct.submit();
    for number in 0..READS {
        let buffer = direct.buffers.take(32 * KIB);
        direct.read(number * 64 * KIB, 32 * KIB, buffer, with(number));
    }
    assert_eq!(direct.counts().1, used + 1);
    direct.expect_pinned(64 * KIB);
    for read in 0..reads {
        rustix::io::write(&writer, &[read as u8; 4 * KIB]).unwrap();
    }
    for _ in 0..reads {
        let done = direct.end();
        assert_eq!(done.bytes(), Ok(4 * KIB));
        let into = read_into(done);
        assert!(usize::from(into[0]) < reads, "{}", into[0]);
        assert_all(&into, into[0]);
    }
    // Now there is room for others.
    let before = direct.counts().0;
    for _ in 0..READS {
        let buffer = direct.buffers.take(32 * KIB);
        direct.read(0, 32 * KIB, buffer, with(0));
    }
    assert!(direct.counts().0 > before);
}

#[test]
fn a_full_table_and_a_full_budget_make_room_for_what_is_used() {
    for (most, places) in [(64 << 20, usize::from(PLACES)), (64 * KIB, 16)] {
        let Some(mut direct) = Direct::start(most) else { return };
        let count = places + places / 2;
        for number in 0..count {
            direct.lay(number * 4 * KIB, 4 * KIB, number as u8);
        }
        let mut buffers: Vec<_> = (0..count).map(|_| direct.buffers.take(4 * KIB)).collect();
        for round in 0..3 {
            let taken = std::mem::take(&mut buffers);
            for (number, buffer) in taken.into_iter().enumerate() {
                buffers.push(direct.read(number * 4 * KIB, 4 * KIB, buffer, number as u8));
                assert!(direct.bench.engine.files.registered.pinned_bytes() <= most.min(places * 4 * KIB));
            }
            let (registered, used, refused) = direct.counts();
            // One of so many that find no room, and most of those that have it use it.
            let misses = (round + 1) * count - used as usize;
            assert!(
                registered as usize <= places + misses / (MISSES as usize - 1) + 1,
                "{registered}, {misses} misses"
            );
            assert!(registered as usize > places && refused == 0);
        }
        // One that is used again and again gets a place.
        let mut buffer = direct.buffers.take(4 * KIB);
        let used = direct.counts().1;
        for _ in 0..2 * MISSES {
            buffer = direct.read(0, 4 * KIB, buffer, 0);
        }
        assert!(direct.counts().1 > used);
    }
}

/// What was used last stays.
#[test]
fn what_was_not_used_for_longest_makes_room() {
    let Some(mut direct) = Direct::start(4 * 64 * KIB) else { return };
    direct.lay(0, 64 * KIB, 1);
    let mut buffers: Vec<_> = (0..4).map(|_| direct.buffers.take(64 * KIB)).collect();
    // The first one is used again, so the second one is the oldest.
    for at in [0, 1, 2, 3, 0] {
        let buffer = buffers.remove(at);
        buffers.insert(at, direct.read(0, 64 * KIB, buffer, 1));
    }
    assert_eq!(direct.counts(), (4, 5, 0));
    let other = direct.buffers.take(64 * KIB);
    let _other = direct.read_until_registered(0, 64 * KIB, other, 1);
    for at in [0, 2, 3, 1] {
        let (_, used, _) = direct.counts();
        let buffer = buffers.remove(at);
        buffers.insert(at, direct.read(0, 64 * KIB, buffer, 1));
        assert_eq!(direct.counts().1 - used, u64::from(at != 1), "buffer {at}");
    }
    assert_eq!(direct.counts().0, 5);
}

#[test]
fn a_limit_that_is_lowered_is_kept() {
    let Some(mut direct) = Direct::start(1 << 20) else { return };
    direct.lay(0, 64 * KIB, 1);
    let mut buffers: Vec<_> = (0..4).map(|_| direct.buffers.take(64 * KIB)).collect();
    buffers = buffers.into_iter().map(|buffer| direct.read(0, 64 * KIB, buffer, 1)).collect();
    direct.expect_pinned(256 * KIB);
    direct.bench.env.limits.file_pinned_bytes_max = 0;
    for buffer in buffers {
        direct.read(0, 64 * KIB, buffer, 1);
    }
    direct.expect_pinned(0);
    assert_eq!(direct.counts(), (4, 4, 0));
}

/// And nothing stays pinned, although the thread of the engine goes on.
#[test]
fn an_engine_that_ends_loses_nothing_that_is_under_way() {
    let Some(mut direct) = Direct::start(16 << 20) else { return };
    let (pipe, _writer) = Direct::pipe();
    for number in 0..16 {
        direct.lay(number * 256 * KIB, 256 * KIB, number as u8);
    }
    for number in 0..16 {
        let into = direct.buffers.take(256 * KIB);
        direct.begin_read(number * 256 * KIB, 256 * KIB, into, number as u8);
        let into = direct.buffers.take(64 * KIB);
        direct.begin(FileOp::read(&pipe, 0, 64 * KIB, into));
    }
    assert_eq!(direct.counts(), (32, 32, 0));
    direct.submit();
    let Direct { bench, _alone, .. } = direct;
    let Bench { mut env, mut engine, events } = bench;
    let early = events.into_iter().filter_map(|event| match event {
        Event::File(begun) => Some(*begun),
        _ => None,
    });
    let ended: Vec<_> = early.chain(engine.end_files(&mut env)).collect();
    assert_eq!(ended.len(), 32);
    let mut of_pipe = 0;
    for begun in ended {
        let done = env.files.ended(begun).1;
        let FileOp::Read { file, offset, .. } = &done.op else { panic!("{done:?}") };
        let (is_of_pipe, offset) = (file.is_same(&pipe), *offset);
        of_pipe += usize::from(is_of_pipe);
        match done.bytes() {
            Ok(bytes) => {
                assert_eq!((is_of_pipe, bytes), (false, 256 * KIB));
                assert_all(&read_into(done), (offset >> 18) as u8);
            }
            Err(error) => assert_eq!(error, FileError::Cancelled),
        }
    }
    assert_eq!(of_pipe, 16);
    drop((env, engine));
    wait_until("nothing is pinned", || pinned_bytes() == 0);
}

/// RLIMIT_MEMLOCK is that of a process.
#[test]
fn operations_go_on_where_no_memory_may_be_locked() {
    if let Err(error) = EngineKind::Uring.probe() {
        return skip(format_args!("needs io_uring ({error})"));
    }
    let mut helper = Helper::start("engine::uring::registered_tests::helper_that_may_lock_nothing", &[]);
    assert_eq!(helper.hear(), "done");
}

#[test]
#[ignore = "a part of the test above"]
fn helper_that_may_lock_nothing() {
    if !is_helper() {
        return;
    }
    // With this capability the limit is none.
    let mut sets = capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::IPC_LOCK);
    }
    set_capabilities(None, sets).unwrap();
    let Some(mut direct) = Direct::start(16 << 20) else { return say("done") };
    // Some kernels count the ring, too, so the limit is lowered when that is there.
    let Rlimit { maximum, .. } = getrlimit(Resource::Memlock);
    let lock_at_most = |bytes| setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum }).unwrap();
    lock_at_most(0);
    direct.lay(0, 64 * KIB, 1);
    let mut buffer = direct.buffers.take(64 * KIB);
    for _ in 0..20 {
        buffer = direct.read(0, 64 * KIB, buffer, 1);
    }
    // It was asked once.
    assert_eq!(direct.counts(), (0, 0, 1));
    direct.expect_pinned(0);
    // When there is more, that is seen after a while.
    lock_at_most(8 << 20);
    direct.bench.env.now = direct.bench.env.now.plus_ms(60_000);
    buffer = direct.read(0, 64 * KIB, buffer, 1);
    assert_eq!(direct.counts(), (1, 1, 1));
    // What is registered stays, and no more is.
    lock_at_most(0);
    let other = direct.buffers.take(64 * KIB);
    let other = direct.read(0, 64 * KIB, other, 1);
    direct.read(0, 64 * KIB, buffer, 1);
    assert_eq!(direct.counts(), (1, 2, 2));
    direct.read(0, 64 * KIB, other, 1);
    assert_eq!(direct.counts().2, 2);
    say("done");
}
