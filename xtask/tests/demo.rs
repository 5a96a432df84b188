//! `cargo xtask demo`, which is what `make demo` runs after the build: with loads of a few messages, as root and without.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ksf_test::{Folder, install, root_or_skip};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");

/// Neither root nor anybody who works on the machine: nobody, on every Linux.
const NOBODY: u32 = 65_534;

/// The programs where every user may run them.
struct Programs(Folder);

impl Programs {
    fn copied() -> Self {
        let ksf = Path::new(XTASK).with_file_name("ksf");
        assert!(ksf.is_file(), "{} is missing; run: scripts/cargo build -p ksf-cli", ksf.display());
        let programs = Self(Folder::new());
        install(XTASK, &programs.0.path("xtask"));
        install(ksf, &programs.0.path("ksf"));
        programs
    }

    /// The demo after `wrapper`, a program that runs its arguments.
    fn demo(&self, wrapper: &[&str]) -> Command {
        self.demo_of("ksf", wrapper)
    }

    /// The same, shown by another program that is here.
    fn demo_of(&self, ksf: &str, wrapper: &[&str]) -> Command {
        let mut words = wrapper.iter().map(PathBuf::from).chain([self.0.path("xtask")]);
        let mut command = Command::new(words.next().expect("at least xtask"));
        command.args(words).args(["demo", "--messages", "200", "--ksf"]).arg(self.0.path(ksf)).current_dir("/");
        command
    }
}

/// The rows of the table, without their figures: service, transport, engine. Fails unless each is without errors.
fn rows(output: &Output) -> Vec<String> {
    let (table, said) = (ksf_test::stdout(output), ksf_test::stderr(output));
    assert!(output.status.success(), "{}:\n{table}{said}", output.status);
    // "store SET" is one cell, and so is "nfs READ 4 KiB".
    let words = |line: &str| {
        let fronts = [("| store ", "| store-"), ("| nfs ", "| nfs-"), ("| 9p ", "| 9p-")];
        let line = fronts.iter().fold(line.to_owned(), |line, (front, joined)| line.replacen(front, joined, 1));
        line.replacen(" 4 KiB ", " ", 1)
    };
    let cells =
        |line: String| line.split_whitespace().filter(|cell| *cell != "|").map(str::to_owned).collect::<Vec<_>>();
    let is_row = |line: &&str| ["| k", "| store ", "| nfs ", "| 9p "].iter().any(|front| line.starts_with(front));
    let lines = table.lines().filter(is_row).map(words).map(cells);
    let row = |cells: Vec<String>| {
        let figures: Vec<f64> = cells[3..].iter().map(|cell| cell.parse().expect("a figure")).collect();
        assert!(figures.len() == 4 && figures[..3].iter().all(|figure| *figure > 0.0), "{cells:?}");
        assert_eq!(cells[6], "0", "errors: {cells:?}");
        cells[..3].join(" ")
    };
    lines.map(row).collect()
}

/// The lines about engines that were skipped, by the engine's name.
fn skipped(output: &Output) -> BTreeMap<String, String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.strip_prefix("skipped: "));
    lines.map(|line| line.split_once(": ").expect("an engine and why")).map(|(e, why)| (e.into(), why.into())).collect()
}

/// The rows there must be: every service on every engine that was not skipped.
fn expected(output: &Output) -> Vec<String> {
    let skipped = skipped(output);
    let mut rows = Vec::new();
    for service in ["kecho", "krpc2"] {
        for (transport, engines) in [("tcp", ["kernel", "uring", "epoll"]), ("udp", ["xdp", "uring", "epoll"])] {
            let shown = engines.iter().filter(|engine| !skipped.contains_key(**engine));
            rows.extend(shown.map(|engine| format!("{service} {transport} {engine}")));
        }
    }
    for engine in store_engines(output) {
        rows.extend(["SET", "GET"].map(|operation| format!("store-{operation} tcp {engine}")));
    }
    // Both are alike for files.
    let engine = store_engines(output)[0];
    rows.extend(["GETATTR", "READ", "WRITE"].map(|procedure| format!("nfs-{procedure} tcp {engine}")));
    rows.push(format!("9p-getattr tcp {engine}"));
    rows
}

/// Those that the store runs on, and that were not skipped.
fn store_engines(output: &Output) -> Vec<&'static str> {
    let skipped = skipped(output);
    ["uring", "epoll"].into_iter().filter(|engine| !skipped.contains_key(*engine)).collect()
}

/// What the demo says of the crash: acknowledged writes, and how many of them were lost.
fn audited(output: &Output) -> (u64, u64) {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("kill -9 under load: "));
    let line = lines.next().unwrap_or_else(|| panic!("no crash: {text}"));
    let (acknowledged, behind) = line.split_once(" acknowledged writes, ").expect("acknowledged writes");
    let (lost, _) = behind.split_once(" lost").expect("how many were lost");
    assert_eq!(lines.next(), None, "it is one line");
    (acknowledged.parse().expect("a number"), lost.parse().expect("a number"))
}

/// What stored on what is said, and nothing was lost in a crash.
fn assert_store(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    for engine in store_engines(output) {
        let line = text.lines().find(|line| line.starts_with(&format!("store on {engine}: ")));
        let line = line.unwrap_or_else(|| panic!("no medium of {engine}: {text}"));
        assert!(line.contains("file (") && line.contains("RWF_DSYNC"), "{line}");
    }
    let (acknowledged, lost) = audited(output);
    assert!(acknowledged >= 4000 && lost == 0, "{acknowledged} acknowledged, {lost} lost");
}

fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn root_sees_every_engine_and_nothing_is_left_behind() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let programs = Programs::copied();
    // In a network of its own: XDP on the machine's lo is the machine's.
    let wrapper = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""];
    let output = programs.demo(&wrapper).output().expect("unshare (util-linux) starts");
    assert_eq!(rows(&output), expected(&output));
    assert_store(&output);
    assert_eq!(last_line(&output), "left behind: nothing (no process, no eBPF program or map, no XDP on lo)");
    let skipped = skipped(&output);
    assert!(skipped.is_empty() || std::env::var_os("CI").is_none(), "in CI every engine must run: {skipped:?}");
}

/// What a command says that is run by a user without rights.
fn without_root(mut command: Command) -> Output {
    if rustix::process::geteuid().is_root() {
        // Changing the user drops every capability.
        command.uid(NOBODY).gid(NOBODY);
    }
    command.output().unwrap()
}

/// By a program that empties the folder of a store that is started again.
#[test]
fn a_store_that_loses_what_it_acknowledged_fails_the_demo() {
    const FORGETFUL: &str = r#"#!/bin/sh
previous=
for word; do
    if [ "$previous" = --data ]; then data=$word; fi
    previous=$word
done
if [ "$1" = store ] && [ -e "$data/superblock" ]; then rm -r "$data"; fi
exec "${0%/*}/ksf" "$@"
"#;
    let programs = Programs::copied();
    let script = programs.0.write("script", FORGETFUL);
    install(script, &programs.0.path("forgetful"));
    let output = without_root(programs.demo_of("forgetful", &[]));
    let said = ksf_test::stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the store has lost what it had acknowledged"), "{said}");
    let (acknowledged, lost) = audited(&output);
    assert!(acknowledged >= 4000 && lost > 0, "{acknowledged} acknowledged, {lost} lost");
    assert_eq!(last_line(&output), "left behind: nothing (no process; no kernel engine ran)");
}

#[test]
fn without_root_it_says_what_is_skipped_why_and_what_is_needed() {
    let programs = Programs::copied();
    let output = without_root(programs.demo(&[]));
    assert_eq!(rows(&output), expected(&output));
    assert_store(&output);
    assert_eq!(last_line(&output), "left behind: nothing (no process; no kernel engine ran)");
    let skipped = skipped(&output);
    for engine in ["kernel", "xdp"] {
        let why = skipped.get(engine).unwrap_or_else(|| panic!("{engine} is not named: {skipped:?}"));
        assert!(why.contains("missing CAP_BPF") && why.contains("to get it: run as root"), "{why}");
    }
    assert!(!skipped.contains_key("epoll"), "it needs nothing: {skipped:?}");
}
