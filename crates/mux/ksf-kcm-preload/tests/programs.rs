//! Programs written for AF_KCM, run with the library preloaded.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, unshare_unsafe};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn is_root() -> bool {
    capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN)
}

/// Gives this test, and the programs it starts, a network namespace with nothing but a loopback device. Without
/// CAP_SYS_ADMIN it runs on the machine's own loopback.
fn own_network() {
    if !is_root() {
        return;
    }
    // SAFETY: changes the network namespace of this thread only, no memory and no descriptor.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    run(Command::new("ip").args(["link", "set", "lo", "up"]));
}

fn skip(what: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: needs {what}");
    eprintln!("skipped: needs {what}");
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Compiles a program into a directory that any user may read, beside the library.
fn compile(source: &str, flags: &[&str]) -> (PathBuf, PathBuf) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("ksf-kcm-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    let (program, library) = (directory.join("program"), directory.join("library.so"));
    run(Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(flags)
        .arg(repository().join(source))
        .arg("-o")
        .arg(&program));
    // Where cargo leaves it for tests.
    let built = std::env::current_exe().unwrap().with_file_name("libksf_kcm_preload.so");

    std::fs::copy(built, &library).unwrap();
    (program, library)
}

fn preloaded(program: &Path, library: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library);
    command
}

fn remove(program: &Path) {
    std::fs::remove_dir_all(program.parent().unwrap()).unwrap();
}

fn record(name: &str) -> String {
    std::fs::read_to_string(repository().join("lab/kcm").join(name)).unwrap()
}

fn check(observed: &str, name: &str) {
    let ours = record(name);
    for (wanted, observed) in ours.lines().zip(observed.lines()) {
        assert_eq!(observed, wanted);
    }
    assert_eq!(observed.lines().count(), ours.lines().count());
}

#[test]
fn contract_under_kcm_run() {
    own_network();
    let (program, library) = compile("lab/kcm/contract.c", &["-O1"]);
    check(&run(&mut preloaded(&program, &library)), "ours.txt");
    remove(&program);
}

#[test]
fn contract_without_the_right_to_load_programs() {
    if !is_root() {
        return skip("root, to become a user without rights");
    }
    let bpf = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled").unwrap_or_default();
    if bpf.trim() == "0" {
        return skip("kernel.unprivileged_bpf_disabled, or the verifier's rules for users apply");
    }
    own_network();
    let (program, library) = compile("lab/kcm/contract.c", &["-O2", "-D_FORTIFY_SOURCE=2"]);
    check(&run(preloaded(&program, &library).uid(65_534).gid(65_534)), "ours.txt");
    remove(&program);
}

/// What is not done as AF_KCM does it is told once by each process that meets it.
#[test]
fn processes_signals_and_programs() {
    own_network();
    let (program, library) = compile("lab/kcm/processes.c", &["-O1"]);
    let output = preloaded(&program, &library).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{}\n{said}", output.status);
    check(std::str::from_utf8(&output.stdout).unwrap(), "ours_processes.txt");
    let said: Vec<_> = said.lines().collect();
    let [after_fork, after_exec, passed, foreign] = said[..] else { panic!("{said:#?}") };
    for line in [after_fork, after_exec, passed] {
        assert!(line.contains("cannot be used after fork or exec, nor where it was passed to (EOPNOTSUPP)"), "{line}");
    }
    assert!(foreign.contains("its instructions are not known (ENOEXEC)"), "{foreign}");
    assert!(
        said.iter().all(|line| line.starts_with("ksf kcm-run: ") && line.ends_with("see docs/kcm.md")),
        "{said:#?}"
    );
    remove(&program);
}

#[test]
fn forks_under_load() {
    own_network();
    let (program, library) = compile("crates/mux/ksf-kcm-preload/tests/forks.c", &["-O1"]);
    run(&mut preloaded(&program, &library));
    remove(&program);
}

#[test]
fn the_table_of_processes_is_the_records() {
    let (theirs, ours) = (record("af_kcm_processes.txt"), record("ours_processes.txt"));
    assert_eq!(theirs.lines().count(), ours.lines().count());
    let rows = theirs.lines().zip(ours.lines()).map(|(theirs, ours)| {
        let (row, theirs) = theirs.split_once(": ").unwrap();
        let ours = ours.strip_prefix(row).and_then(|ours| ours.strip_prefix(": ")).expect(row);
        format!("| {row} | {theirs} | {ours} | `processes_signals_and_programs` |\n")
    });
    let table: String = rows.collect();
    let document = std::fs::read_to_string(repository().join("docs/kcm.md")).unwrap();
    assert!(document.contains(&table), "docs/kcm.md should have:\n{table}");
}

#[test]
fn loops_duplicates_and_workers() {
    own_network();
    let (program, library) = compile("crates/mux/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    run(&mut preloaded(&program, &library));
    remove(&program);
}

/// Nothing changes for a program that has nothing to do with AF_KCM.
#[test]
fn other_programs_run_as_ever() {
    own_network();
    let (program, library) = compile("crates/mux/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    let text =
        run(Command::new("sh").args(["-c", "printf 'b\\na\\n' | sort | tr -d '\\n'"]).env("LD_PRELOAD", &library));
    assert_eq!(text, "ab");
    // It does not hide that this kernel lacks the family where it is not preloaded, nor change another's errors.
    if !Path::new("/proc/net/kcm").exists() {
        assert!(!Command::new(&program).output().unwrap().status.success());
    }
    remove(&program);
}
