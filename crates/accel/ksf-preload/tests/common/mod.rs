//! What the tests share: networks of their own, the real holder, programs in C under the library, and clients that
//! count.

mod actor;
mod client;
mod server;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

pub(crate) use actor::Actors;
pub(crate) use client::{Client, Load, ask_each, refused};
use ksf_accel::status::{Status, WorkerCounters, WorkerStatus};
use ksf_accel::{AccelOptions, Holder, Level, Started};
use ksf_test::compile::cc;
pub(crate) use ksf_test::*;
pub(crate) use server::Server;

/// A network namespace of the test's own; `None`: the test is skipped.
pub(crate) fn own_network() -> Option<()> {
    own_network_or_skip("a network namespace, sk_lookup")
}

/// The same, and the first two CPUs.
pub(crate) fn network_on_two_cpus() -> Option<[usize; 2]> {
    network_on_two_cpus_or_skip("a network namespace, sk_lookup")
}

/// A folder that every user may enter. It is removed when the test process ends.
fn shared_folder() -> &'static Path {
    extern "C" fn remove() {
        let _ = std::fs::remove_dir_all(shared_folder());
    }
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // SAFETY: the handler uses what is there until the end, and does not unwind.
        unsafe { libc::atexit(remove) };
        Folder::new().keep()
    })
}

/// The library, where cargo leaves it for tests. Programs that give up their rights must be able to read it too.
pub(crate) fn library() -> PathBuf {
    static COPY: OnceLock<PathBuf> = OnceLock::new();
    COPY.get_or_init(|| {
        let built = std::env::current_exe().unwrap().with_file_name("libksf_preload.so");
        let copy = shared_folder().join("libksf_accel.so");
        std::fs::copy(&built, &copy).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        copy
    })
    .clone()
}

/// A program of `tests/c`, compiled.
pub(crate) fn compiled(name: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let program = shared_folder().join(name);
    if !program.exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c");
        cc(source, &program, &["-O1", "-g"]);
    }
    program
}

pub(crate) fn holder() -> Started {
    holder_with(|_| {})
}

pub(crate) fn holder_with(change: impl FnOnce(&mut AccelOptions)) -> Started {
    let mut options = AccelOptions::default();
    options.status_folder = Some(folder());
    change(&mut options);
    Holder::start(options).expect("a holder starts")
}

/// A holder that passes nobody over for a while: an actor does nothing between two calls, and a busy machine may keep
/// any worker from its queue.
pub(crate) fn patient() -> Started {
    holder_with(be_patient)
}

pub(crate) fn patient_at(level: Level) -> Started {
    let holder = holder_with(|options| {
        be_patient(options);
        options.level = Some(level);
    });
    assert_eq!(holder.level(), level, "{:?}", holder.refused());
    holder
}

pub(crate) fn be_patient(options: &mut AccelOptions) {
    (options.busy_limit_ns, options.look_ms) = (60_000_000_000, 1000);
}

/// A command under the library, as `ksf accel run` starts it.
pub(crate) fn accelerated(program: impl AsRef<std::ffi::OsStr>, holder: &Started) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env("KSF_ACCEL", holder.environment());
    command
}

/// Sums over all workers that ever were.
pub(crate) fn counted(status: &Status) -> WorkerCounters {
    let mut sum = status.ended_workers;
    status.workers.iter().for_each(|worker| sum.add(&worker.counters));
    sum
}

/// Workers that serve something now.
pub(crate) fn ready(holder: &Started) -> Vec<WorkerStatus> {
    let workers = holder.status().expect("the holder answers").workers;
    workers.into_iter().filter(|worker| !worker.ready.is_empty()).collect()
}

pub(crate) fn wait_ready(holder: &Started, count: usize) {
    let what = std::fmt::from_fn(|f| write!(f, "{count} workers are ready: {:#?}", holder.status()));
    wait_until(what, || ready(holder).len() == count);
}

/// Asks as [`ask_each`] does, and waits before each question until `workers` workers are ready. A worker that blocks in
/// `accept()` is not ready between a connection and its next call; a connection that comes then goes to the program's listener.
pub(crate) fn ask_ready(holder: &Started, workers: usize, port: u16, count: usize) {
    for _ in 0..count {
        wait_ready(holder, workers);
        ask_each(Ipv4Addr::LOCALHOST, port, "who\n", 1);
    }
}

/// A program in a network namespace of the test's own, with its holder; `None`: the test is skipped.
pub(crate) fn begin() -> Option<(Started, Actors)> {
    own_network()?;
    let holder = patient();
    let actors = Actors::start(&holder);
    Some((holder, actors))
}

/// The same with a ready worker in the main thread: holder, program, listener, port, epoll instance.
pub(crate) fn one_worker() -> Option<(Started, Actors, i64, u16, i64)> {
    let (holder, mut actors) = begin()?;
    let (listener, port, epoll) = worker(&mut actors, &holder);
    Some((holder, actors, listener, port, epoll))
}

/// Makes the main thread a ready worker: listener, port, epoll instance.
pub(crate) fn worker(actors: &mut Actors, holder: &Started) -> (i64, u16, i64) {
    let (listener, port) = actors.listener();
    let epoll = actors.watching(0, listener);
    wait_ready(holder, 1);
    (listener, port, epoll)
}

/// Connections that wait in queues now.
pub(crate) fn waiting(holder: &Started) -> u32 {
    let status = holder.status().expect("the holder answers");
    status.listeners.iter().flat_map(|listener| &listener.queues).map(|queue| queue.waiting).sum()
}

pub(crate) fn at_level(level: Level) -> Started {
    let holder = holder_with(|options| options.level = Some(level));
    assert_eq!(holder.level(), level, "{:?}", holder.refused());
    holder
}
