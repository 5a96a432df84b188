//! Tests that this machine cannot run: they say so, and they fail in CI, where a test that nobody runs is a failure.

use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;

use rustix::thread::{CapabilitySet, capabilities};

/// Says that the calling test, or a part of it, does not run, and why: `needs two CPUs`.
///
/// # Panics
/// Where the environment variable `CI` is set.
#[track_caller]
pub fn skip(why: impl Display) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: {why}");
    // Not by `eprintln!`, which the test runner hides of a test that passes.
    let thread = std::thread::current();
    let line = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
    // scripts/test.sh prints these at its end.
    if let Some(file) = std::env::var_os("KSF_TEST_SKIPPED") {
        let file = std::fs::OpenOptions::new().append(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of skipped tests is there");
    }
}

/// True if this process may make namespaces and configure networks, as root of the machine may. Root of a container
/// often may not.
pub fn is_root() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    rustix::process::geteuid().is_root() && capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// [`is_root`]; `None`: the test is skipped. `what` needs root: `eBPF`.
///
/// ```text
/// let Some(()) = root_or_skip("eBPF") else { return };
/// ```
#[track_caller]
pub fn root_or_skip(what: &str) -> Option<()> {
    if !is_root() {
        skip(format_args!("needs root ({what})"));
        return None;
    }
    Some(())
}

/// Where a program is installed, also one for administrators; `None`: the test is skipped.
#[track_caller]
pub fn program_or_skip(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let found = folders.map(|folder| folder.join(name)).find(|program| program.is_file());
    if found.is_none() {
        skip(format_args!("needs {name}"));
    }
    found
}

/// What `scripts/setup.sh test` installed from a registry: `porcupine/client`. `build` is the `CARGO_TARGET_TMPDIR` of the test,
/// beside which it lies. `None`: the test is skipped.
#[track_caller]
pub fn installed_or_skip(build: &str, name: &str) -> Option<PathBuf> {
    let target = std::path::Path::new(build).parent().expect("a folder in the one that cargo builds in");
    let path = target.join("clients").join(name);
    if !path.exists() {
        skip(format_args!("needs {} (scripts/setup.sh test)", path.display()));
        return None;
    }
    Some(path)
}

/// Those of `choices` that work here; the others are said to be skipped. For engines:
/// `working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe)`.
#[track_caller]
pub fn working<T: Copy + Display + Sync, E: Display + Send>(
    choices: impl IntoIterator<Item = T>,
    probe: impl Fn(T) -> Result<(), E> + Sync,
) -> Vec<T> {
    let works = |choice: &T| {
        // On another thread: the end of a ring that was tried interrupts system calls of the thread that made it.
        let tried = std::thread::scope(|scope| scope.spawn(|| probe(*choice)).join());
        let tried = tried.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        tried.inspect_err(|error| skip(format_args!("needs {choice} ({error})"))).is_ok()
    };
    choices.into_iter().filter(works).collect()
}
