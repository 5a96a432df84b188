//! `ksf kcm-run` finds its library, becomes the program, and gives it the sockets of AF_KCM. In `kcm.rs` it does on other
//! kernels.

use crate::support;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Folder, PATIENCE, built_folder, stderr, stdout};
use ksf_test::compile::cc;
use ksf_test::effort;

pub(crate) const LIBRARY: &str = "libksf_kcm_preload.so";
const LAB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../lab/kcm");

/// Programs written for AF_KCM, and what they print under `ksf kcm-run`.
pub(crate) const PROGRAMS: [(&str, &str); 2] = [("contract.c", "ours.txt"), ("processes.c", "ours_processes.txt")];

/// Where cargo leaves the library for tests.
pub(crate) fn built_library() -> PathBuf {
    built_folder().join(LIBRARY)
}

/// `ksf kcm-run` of the build, without what the environment of this test may say.
fn kcm_run(ksf: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string()).arg(ksf).arg("kcm-run");
    command.env_remove("LD_PRELOAD").env_remove("KSF_LIB_DIR");
    command
}

pub(crate) fn built() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_ksf"))
}

pub(crate) fn compile(folder: &Folder, source: &str) -> PathBuf {
    let program = folder.path(source.trim_end_matches(".c"));
    cc(Path::new(LAB).join(source), &program, &["-O1"]);
    program
}

/// As `make install` puts them: PREFIX/bin/ksf and PREFIX/lib/ksf/LIBRARY.
fn install(folder: &Folder) -> PathBuf {
    let ksf = folder.path("bin/ksf");
    for (from, to) in [(built(), ksf.clone()), (&built_library(), folder.path("lib/ksf").join(LIBRARY))] {
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }
    ksf
}

/// The lines that differ from the record; none if it is met.
pub(crate) fn differences(observed: &str, record: &str) -> String {
    let recorded = std::fs::read_to_string(Path::new(LAB).join(record)).unwrap();
    let lines = recorded.lines().zip(observed.lines()).filter(|(recorded, observed)| recorded != observed);
    let mut all: String =
        lines.map(|(recorded, observed)| format!("recorded  {recorded}\nobserved  {observed}\n")).collect();
    if observed.lines().count() != recorded.lines().count() {
        all += &format!("rows came or went:\n{observed}");
    }
    all
}

#[test]
fn an_installed_ksf_runs_programs_for_af_kcm() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    let ksf = install(&folder);
    // The contract waits for ten seconds; the gate has it in kcm.rs, with an installed ksf, and in ksf-kcm-preload.
    for (source, record) in effort(&PROGRAMS[1..], &PROGRAMS[..]) {
        let program = compile(&folder, source);
        let output = kcm_run(&ksf).arg("--").arg(&program).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{source}: {}{}", stdout(&output), stderr(&output));
        assert_eq!(differences(&stdout(&output), record), "", "{source}, {record}");
    }
}

/// A server over eight clients, as the kernel's documentation shows it, answers the right ones, unless turns are asked for.
#[test]
fn a_server_answers_the_clients_that_asked_unless_turns_are_asked_for() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    let ksf = install(&folder);
    let (answers, contract) = (compile(&folder, "answers.c"), compile(&folder, "contract.c"));
    // Each says for itself, whatever another kcm-run around it has said.
    for (send, how) in [(&["--send=answer"][..], "each"), (&[], "many")] {
        let mut command = kcm_run(&ksf);
        command.args(["--send=in-turn", "--"]).arg(&ksf).arg("kcm-run").args(send).arg("--").arg(&answers).arg(how);
        let output = command.output().unwrap();
        assert_eq!(stdout(&output), "160000 answers\n", "{send:?} {how}: {}", stderr(&output));
    }
    let output = kcm_run(&ksf).args(["--send=in-turn", "--"]).arg(&contract).arg("answers").output().unwrap();
    let rows = stdout(&output);
    let answered = rows.lines().find(|row| row.starts_with("four connections ask"));
    assert_eq!(answered, Some("four connections ask, 4 3 2 1, each is answered at once: d c b a"));
}

/// The kernel's sockets promise no connection.
#[test]
fn answers_are_refused_on_the_kernels_sockets() {
    let folder = Folder::new();
    std::fs::copy(built_library(), folder.path(LIBRARY)).unwrap();
    let run = |mux: &str| {
        let mut command = kcm_run(built());
        command.env("KSF_LIB_DIR", folder.path("")).args([
            mux,
            "--send=answer",
            "--",
            "sh",
            "-c",
            "echo \"$LD_PRELOAD\"",
        ]);
        command.output().unwrap()
    };
    let refused = run("--mux=kcm");
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    let line = stderr(&refused);
    assert!(line.lines().count() == 1 && line.contains("--send") && line.contains("--mux=ksf"), "{line}");
    // Where there is a choice, those are taken that can.
    assert_eq!(stdout(&run("--mux=auto")).trim(), folder.path("").join(LIBRARY).display().to_string());
}

/// Wherever this runs: the kernel's sockets, or one line that says why not and what gives them.
#[test]
fn without_af_kcm_the_kernels_sockets_are_refused_and_auto_takes_ours() {
    let folder = Folder::new();
    std::fs::copy(built_library(), folder.path(LIBRARY)).unwrap();
    let run = |mux: &str| {
        let mut command = kcm_run(built());
        command.env("KSF_LIB_DIR", folder.path("")).args([mux, "--", "sh", "-c", "printf %s \"$LD_PRELOAD\""]);
        command.output().unwrap()
    };
    let (kernels, auto) = (run("--mux=kcm"), run("--mux=auto"));
    assert_eq!(auto.status.code(), Some(0), "{auto:?}");
    if kernels.status.success() {
        assert_eq!((stdout(&kernels), stdout(&auto)), (String::new(), String::new()));
        return;
    }
    assert_eq!(stdout(&auto), folder.path("").join(LIBRARY).display().to_string());
    assert!(matches!(kernels.status.code(), Some(69 | 77)), "{kernels:?}");
    let line = stderr(&kernels);
    assert!(line.lines().count() == 1 && line.contains("AF_KCM") && line.contains("--mux=ksf"), "{line}");
}

#[test]
fn it_becomes_the_program_with_the_library_preloaded() {
    let folder = Folder::new();
    std::fs::copy(built_library(), folder.path(LIBRARY)).unwrap();
    let mut command = kcm_run(built());
    command.env("KSF_LIB_DIR", folder.path(""));
    // Not a builtin of a shell alone: a second program shows that the library bears its environment on.
    let script = "printf '%s %s' \"$LD_PRELOAD\" \"$(printf b | cat)\"; echo oops >&2; exit 7";
    let output = command.args(["--", "sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(stdout(&output), format!("{} b", folder.path("").join(LIBRARY).display()));
    assert_eq!(stderr(&output), "oops\n");

    let missing = kcm_run(built()).env("KSF_LIB_DIR", folder.path("")).arg("/does/not/exist").output().unwrap();
    assert_eq!(missing.status.code(), Some(66), "{missing:?}");
}

#[test]
fn without_its_library_it_says_where_it_looked() {
    let output = kcm_run(built()).env("KSF_LIB_DIR", "/does/not/exist").arg("true").output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let line = stderr(&output);
    assert!(line.contains("libksf_kcm_preload.so is not in /does/not/exist") && line.lines().count() == 1, "{line}");
}
