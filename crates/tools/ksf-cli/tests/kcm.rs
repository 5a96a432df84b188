//! Debian's kernel, older than the one here, in a machine. Its own message sockets, which it lacks and then has: what they do, what
//! `ksf doctor` says of them, and which sockets `ksf kcm-run` gives. The kernel half of ksf there. What `ksf doctor` says here.

use std::path::Path;

use crate::kcm_run::{LIBRARY, PROGRAMS, built, built_library, compile, differences};
use crate::support::{Folder, PATIENCE, run, stdout};
use ksf_lab::{Kernel, Lab, turn};

/// What doctor found out about a feature, in the document that the output begins with.
fn probe(output: &str, name: &str) -> serde_json::Value {
    let mut documents = serde_json::Deserializer::from_str(output).into_iter::<serde_json::Value>();
    let report = documents.next().unwrap().unwrap();
    report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == name).unwrap().clone()
}

/// What a command of the machine is to print.
enum Expected {
    /// This file of `lab/kcm`.
    Record(&'static str),
    Output(fn(&str) -> bool),
}
use Expected::{Output, Record};

/// Name, command, and what it prints; one machine runs them in this order, but for those that run beside others. The kernel is
/// Debian's, and has no AF_KCM while its module is not loaded.
const CHECKS: [(&str, &str, Expected); 9] = [
    ("another kernel runs the contract", "ksf kcm-run -- contract 2>/dev/null", Record("ours.txt")),
    ("another kernel runs processes", "ksf kcm-run -- processes 2>/dev/null", Record("ours_processes.txt")),
    // The kernel has nothing to answer with, so ksf has answered the programs above.
    (
        "it has no AF_KCM",
        "test ! -e /proc/net/kcm && ! contract 2>&1",
        Output(|said| said.contains("cannot open an AF_KCM socket: EAFNOSUPPORT")),
    ),
    (
        "doctor tells what is lacking",
        "ksf doctor --json",
        Output(|report| {
            let found = probe(report, "kcm");
            let detail = found["detail"].as_str().unwrap();
            // EAFNOSUPPORT.
            found["outcome"] == "fails"
                && found["errno"] == 97
                && detail.ends_with("is not loaded")
                && found["remedy"] == "load it: modprobe kcm"
        }),
    ),
    ("what doctor advises succeeds", "modprobe kcm 2>&1", Output(str::is_empty)),
    (
        "doctor tells that AF_KCM and the kernel half work",
        "ksf doctor --json",
        Output(|report| {
            let works = |name| probe(report, name)["outcome"] == "works";
            works("kcm") && works("bpf_self_test") && works("xdp_generic")
        }),
    ),
    // On a kernel that has AF_KCM the program gets the sockets that were chosen: the records differ. Each under another
    // kcm-run, whose library the inner one takes away or leaves.
    (
        "AF_KCM is chosen, and as recorded",
        "ksf kcm-run -- ksf kcm-run --mux=kcm -- contract 2>/dev/null",
        Record("af_kcm.txt"),
    ),
    (
        "auto chooses AF_KCM, which is as recorded between processes",
        "ksf kcm-run -- ksf kcm-run --mux=auto -- processes 2>/dev/null",
        Record("af_kcm_processes.txt"),
    ),
    (
        "without a choice ksf answers",
        "ksf kcm-run -- ksf kcm-run -- processes 2>/dev/null",
        Record("ours_processes.txt"),
    ),
];

/// Loads the module, when all commands before have ended.
const LOADS: usize = 4;

/// Ends the output of each command, with its status.
const END: &str = "--- status ";

/// The commands, those that wait most (contract) beside the others of their half.
fn script() -> String {
    let one = |(number, (_, command, _)): (usize, &(&str, &str, Expected))| {
        let beside = if command.ends_with("contract 2>/dev/null") { " &" } else { "" };
        let wait = if number + 1 == LOADS { "wait\n" } else { "" };
        format!("{{ if {command}; then echo '{END}0'; else echo \"{END}$?\"; fi; }} >/said-{number}{beside}\n{wait}")
    };
    let commands: String = CHECKS.iter().enumerate().map(one).collect();
    let said: String = (0..CHECKS.len()).map(|number| format!(" /said-{number}")).collect();
    format!("{commands}wait\ncat{said}\n")
}

/// The module of AF_KCM where modprobe finds it, and ksf installed, with the programs for AF_KCM.
fn machine(folder: &Folder) -> Lab {
    let lab = Lab::script(script()).tool("modprobe").tool("cat");
    let lab = lab.file(built(), "/usr/bin/ksf").file(built_library(), format!("/usr/lib/ksf/{LIBRARY}"));
    let lab = PROGRAMS.iter().fold(lab, |lab, (source, _)| {
        lab.file(compile(folder, source), format!("/bin/{}", source.trim_end_matches(".c")))
    });
    let kernel = Kernel::from_environment().unwrap();
    let mut files = kernel.modules().unwrap().files_in_order(&["kcm"]).unwrap();
    files.extend(["modules.dep", "modules.dep.bin"].map(String::from));
    let guest = Path::new("/lib/modules").join(kernel.version());
    files.iter().fold(lab, |lab, file| lab.file(kernel.modules_dir().join(file), guest.join(file)))
}

#[test]
fn a_kernel_does_as_recorded_without_af_kcm_and_with_it() {
    let Some(_turn) = turn() else { return };
    let output = machine(&Folder::new()).time_limit(PATIENCE * 4).run().unwrap().checked().unwrap();
    let mut rest = output.as_str();
    let mut failed = Vec::new();
    for (name, command, expected) in CHECKS {
        let (said, after) = rest.split_once(END).unwrap_or_else(|| panic!("{name}: no end in {output}"));
        let (status, after) = after.split_once('\n').unwrap_or_else(|| panic!("{name}: no status in {output}"));
        rest = after;
        let wrong = match expected {
            _ if status != "0" => format!("status {status}\n{said}"),
            Record(record) => differences(said, record),
            Output(holds) if !holds(said) => said.to_owned(),
            Output(_) => continue,
        };
        if !wrong.is_empty() {
            failed.push(format!("{name} ({command}): {wrong}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Wherever this runs: AF_KCM works, or the probe says why not and what gives it.
#[test]
fn what_is_missing_here_has_a_cause_and_a_remedy() {
    let probe = probe(&stdout(&run(&["doctor", "--json"])), "kcm");
    if probe["outcome"] != "works" {
        for part in ["detail", "remedy"] {
            assert!(!probe[part].as_str().unwrap().is_empty(), "{probe}");
        }
    }
}
