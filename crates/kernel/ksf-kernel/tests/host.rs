//! The logic of the programs, compiled for the host: `tests/host/logic.c` against a model of the kernel, once as it is,
//! and once for each mutant, which the tests must find.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ksf_test::Folder;

/// Rules that must not be missed when they are taken out; `KSF_MUTANT_*` in `bpf/`.
const MUTANTS: [&str; 11] = [
    "NO_GATE",
    "STORE_BEFORE_RESIZE",
    "NO_BOUNDARY",
    "NO_SETTLE",
    "NO_OUTSTANDING",
    "NO_LAG",
    "NO_EPOCH",
    "PASS_FIN",
    "NO_TRIM",
    "TRIM_BY_STEPS",
    "WOKEN_BEFORE_WAKE",
];

fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| {
        let found = ["cc", "gcc", "clang"]
            .into_iter()
            .find(|name| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success()));
        found.expect("a C compiler: Debian's package gcc, or CC").to_owned()
    })
}

fn compile(folder: &Folder, name: &str, flags: &[&str]) -> Result<PathBuf, String> {
    let program = folder.path(name);
    let output = Command::new(compiler())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-DKSF_HOST"])
        .args(["-I../ksf-bpf/bpf", "-Ibpf", "-Itests/host"])
        // Static functions of the headers that the host has no use for, and the names of framings.
        .args(["-Wno-unused-function", "-Wno-unused-parameter", "-Wno-unused-const-variable"])
        .args(flags)
        .args(["tests/host/logic.c", "tests/host/simulator.c", "-o"])
        .arg(&program)
        .output()
        .expect("the compiler runs");
    if output.status.success() { Ok(program) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// With the sanitizers where the compiler has their libraries.
fn compile_checked(folder: &Folder, name: &str, flags: &[&str]) -> PathBuf {
    let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    compile(folder, name, &[flags, &sanitizers].concat())
        .or_else(|_| compile(folder, name, flags))
        .unwrap_or_else(|error| panic!("the logic does not compile for the host:\n{error}"))
}

fn run(program: &Path, seeds: &str) -> Output {
    // The model frees what it can reach; what a failed test leaves is no leak of the logic.
    Command::new(program).arg(seeds).env("ASAN_OPTIONS", "detect_leaks=0").output().expect("the program runs")
}

#[test]
fn the_logic_passes() {
    let output = run(&compile_checked(&Folder::new(), "logic", &[]), "400");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_mutant_is_found() {
    let folder = Folder::new();
    // One without the sanitizers takes a third of the time, and is found by its own checks.
    let find = |mutant: &str| {
        let program = compile(&folder, &format!("mutant-{mutant}"), &[&format!("-DKSF_MUTANT_{mutant}")]);
        let output = run(&program.unwrap_or_else(|error| panic!("{mutant} does not compile:\n{error}")), "400");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "no test noticed {mutant}");
        assert!(said.contains("FAILED: "), "{mutant} was not found by a test: {said}");
        println!("{mutant}: {}", said.trim_end());
    };
    let (some, others) = MUTANTS.split_at(MUTANTS.len() / 2);
    std::thread::scope(|scope| {
        scope.spawn(|| some.iter().for_each(|mutant| find(mutant)));
        others.iter().for_each(|mutant| find(mutant));
    });
}
