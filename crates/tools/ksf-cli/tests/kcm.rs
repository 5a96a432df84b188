//! What `ksf doctor` says of the kernel's own message sockets: in a machine that has them, in one that could, and here.

use crate::support::{run, stdout};
use ksf_lab::{Lab, turn};

/// What doctor found out about AF_KCM, in the document that the output begins with.
fn probe(output: &str) -> serde_json::Value {
    let mut documents = serde_json::Deserializer::from_str(output).into_iter::<serde_json::Value>();
    let report = documents.next().unwrap().unwrap();
    report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == "kcm").unwrap().clone()
}

/// The same kernel with the module, and with the module on its disk alone.
#[test]
fn doctor_tells_whether_af_kcm_works_and_what_it_lacks() {
    let Some(_turn) = turn() else { return };
    let kernel = ksf_lab::Kernel::from_environment().unwrap();
    let list = kernel.modules_dir().join("modules.dep");
    let guest = format!("/lib/modules/{}/modules.dep", kernel.version());
    let lab = || Lab::script("ksf doctor --json").file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").cpus(2);

    let lacking = probe(&lab().file(list, guest).run().unwrap().checked().unwrap());
    assert_eq!(lacking["outcome"], "fails");
    assert_eq!(lacking["errno"], 97, "EAFNOSUPPORT");
    assert!(lacking["detail"].as_str().unwrap().ends_with("is not loaded"), "{lacking}");
    assert_eq!(lacking["remedy"], "load it: modprobe kcm");

    let output = lab().module("kcm").run().unwrap().checked().unwrap();
    assert_eq!(probe(&output)["outcome"], "works", "{output}");
}

/// Wherever this runs: AF_KCM works, or the probe says why not and what gives it.
#[test]
fn what_is_missing_here_has_a_cause_and_a_remedy() {
    let probe = probe(&stdout(&run(&["doctor", "--json"])));
    if probe["outcome"] != "works" {
        for part in ["detail", "remedy"] {
            assert!(!probe[part].as_str().unwrap().is_empty(), "{probe}");
        }
    }
}
