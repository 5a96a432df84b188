//! `cargo xtask demo`, which is what `make demo` runs after the build: with short loads, as root and without.

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
        let mut words = wrapper.iter().map(PathBuf::from).chain([self.0.path("xtask")]);
        let mut command = Command::new(words.next().expect("at least xtask"));
        command.args(words).args(["demo", "--seconds", "0.05", "--ksf"]).arg(self.0.path("ksf")).current_dir("/");
        command
    }
}

/// The rows of the table, without their figures: service, transport, engine. Fails unless each is without errors.
fn rows(output: &Output) -> Vec<String> {
    let (table, said) = (ksf_test::stdout(output), ksf_test::stderr(output));
    assert!(output.status.success(), "{}:\n{table}{said}", output.status);
    let cells = |line: &str| line.split_whitespace().filter(|cell| *cell != "|").map(str::to_owned).collect::<Vec<_>>();
    let lines = table.lines().filter(|line| line.starts_with("| k")).map(cells);
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
    rows
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
    assert_eq!(last_line(&output), "left behind: nothing (no process, no eBPF program or map, no XDP on lo)");
    let skipped = skipped(&output);
    assert!(skipped.is_empty() || std::env::var_os("CI").is_none(), "in CI every engine must run: {skipped:?}");
}

#[test]
fn without_root_it_says_what_is_skipped_why_and_what_is_needed() {
    let programs = Programs::copied();
    let mut demo = programs.demo(&[]);
    if rustix::process::geteuid().is_root() {
        // Changing the user drops every capability.
        demo.uid(NOBODY).gid(NOBODY);
    }
    let output = demo.output().unwrap();
    assert_eq!(rows(&output), expected(&output));
    assert_eq!(last_line(&output), "left behind: nothing (no process; no kernel engine ran)");
    let skipped = skipped(&output);
    for engine in ["kernel", "xdp"] {
        let why = skipped.get(engine).unwrap_or_else(|| panic!("{engine} is not named: {skipped:?}"));
        assert!(why.contains("missing CAP_BPF") && why.contains("to get it: run as root"), "{why}");
    }
    assert!(!skipped.contains_key("epoll"), "it needs nothing: {skipped:?}");
}
