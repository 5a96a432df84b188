//! What the tests share: networks of their own, the real holder, programs in C under the library, and clients that
//! count.

#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

mod actor;
mod client;
mod server;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use actor::Actors;
pub(crate) use client::{Client, Load, ask_each, refused};
use ksf_accel::status::{Counters, Status, WorkerStatus};
use ksf_accel::{Holder, Level, Options, Started};
pub(crate) use server::Server;

/// How long the kernel or another process may take; it only ends a test that has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Says that a test, or a part of it, does not run. Not by `println!`, which the test runner hides of a test that
/// passes. In CI a skip is a failure.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: {why}");
    let thread = thread::current();
    let line = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}

/// Gives this thread, and those and the processes it starts, a network namespace of their own. False: the test is
/// skipped.
pub(crate) fn own_network() -> bool {
    if !rustix::process::geteuid().is_root() {
        skip("needs root (a network namespace, sk_lookup)");
        return false;
    }
    // SAFETY: changes the network namespace of this thread only.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", io::Error::last_os_error());
    run(Command::new("ip").args(["link", "set", "lo", "up"]));
    true
}

/// Runs a command that must succeed; what it said.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Waits for something another process or the kernel does.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < limit, "never happened: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A folder of its own, which any user may enter. It is removed when the test process ends.
pub(crate) fn folder() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let folder = all_folders().join(NEXT.fetch_add(1, Relaxed).to_string());
    make_folder(&folder);
    folder
}

fn make_folder(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

fn all_folders() -> &'static Path {
    extern "C" fn remove() {
        let _ = std::fs::remove_dir_all(all_folders());
    }
    static ALL: OnceLock<PathBuf> = OnceLock::new();
    ALL.get_or_init(|| {
        let all = tempfile::Builder::new().prefix("ksf-preload-test-").tempdir().unwrap().keep();
        make_folder(&all);
        // SAFETY: the handler uses what is there until the end, and does not unwind.
        unsafe { libc::atexit(remove) };
        all
    })
}

/// The library, where cargo leaves it for tests. Programs that give up their rights must be able to read it too.
pub(crate) fn library() -> PathBuf {
    static COPY: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut copy = COPY.lock().unwrap_or_else(PoisonError::into_inner);
    copy.get_or_insert_with(|| {
        let built = std::env::current_exe().unwrap().with_file_name("libksf_preload.so");
        let copy = folder().join("libksf_accel.so");
        std::fs::copy(&built, &copy).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        copy
    })
    .clone()
}

/// A program of `tests/c`, compiled.
pub(crate) fn compiled(name: &str) -> PathBuf {
    static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut made = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    let program = made.get_or_insert_with(folder).join(name);
    if !program.exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c");
        let flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"];
        run(Command::new("cc").args(flags).arg(&program).arg(source));
    }
    program
}

pub(crate) fn holder() -> Started {
    holder_with(|_| {})
}

pub(crate) fn holder_with(change: impl FnOnce(&mut Options)) -> Started {
    let mut options = Options::default();
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

fn be_patient(options: &mut Options) {
    (options.busy_limit_ns, options.look_ms) = (60_000_000_000, 1000);
}

/// A command under the library, as `ksf accel run` starts it.
pub(crate) fn accelerated(program: impl AsRef<std::ffi::OsStr>, holder: &Started) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env("KSF_ACCEL", holder.environment());
    command
}

/// Sums over all workers that ever were.
pub(crate) fn counted(status: &Status) -> Counters {
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
    let limit = Instant::now() + PATIENCE;
    while ready(holder).len() != count {
        assert!(Instant::now() < limit, "never were {count} workers ready: {:#?}", holder.status());
        thread::sleep(Duration::from_millis(1));
    }
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

/// Binds the calling thread, and what it starts.
pub(crate) fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("the CPU is there");
}

/// What clients do on one CPU.
pub(crate) fn from_cpu<T: Send>(cpu: usize, action: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            pin(cpu);
            action()
        });
        client.join().expect("the clients do not panic")
    })
}

/// The first two CPUs this test may use; `None`: the test is skipped.
pub(crate) fn two_cpus() -> Option<(usize, usize)> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..1024).filter(|&cpu| set.is_set(cpu)).collect();
    match cpus[..] {
        [a, b, ..] => Some((a, b)),
        _ => {
            skip("needs two CPUs");
            None
        }
    }
}

/// Sends a signal to a process that the test has started.
pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process id");
    rustix::process::kill_process(pid, signal).expect("the process is there");
}
