//! Programs written for AF_KCM, run with the library preloaded.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, unshare_unsafe};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
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

fn check_contract(observed: &str) {
    let ours = std::fs::read_to_string(repository().join("lab/kcm/ours.txt")).unwrap();
    for (wanted, observed) in ours.lines().zip(observed.lines()) {
        assert_eq!(observed, wanted);
    }
    assert_eq!(observed.lines().count(), ours.lines().count());
}

#[test]
fn contract_under_kcm_run() {
    own_network();
    let (program, library) = compile("lab/kcm/contract.c", &["-O1"]);
    check_contract(&run(&mut preloaded(&program, &library)));
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
    check_contract(&run(preloaded(&program, &library).uid(65_534).gid(65_534)));
    remove(&program);
}

#[test]
fn loops_duplicates_and_workers() {
    own_network();
    let (program, library) = compile("crates/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    run(&mut preloaded(&program, &library));
    remove(&program);
}

/// Nothing changes for a program that has nothing to do with AF_KCM.
#[test]
fn other_programs_run_as_ever() {
    own_network();
    let (program, library) = compile("crates/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    let text =
        run(Command::new("sh").args(["-c", "printf 'b\\na\\n' | sort | tr -d '\\n'"]).env("LD_PRELOAD", &library));
    assert_eq!(text, "ab");
    // It does not hide that this kernel lacks the family where it is not preloaded, nor change another's errors.
    if !Path::new("/proc/net/kcm").exists() {
        assert!(!Command::new(&program).output().unwrap().status.success());
    }
    remove(&program);
}
