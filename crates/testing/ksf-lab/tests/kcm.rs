//! The kernel's own AF_KCM against the record of what it does, `lab/kcm/af_kcm*.txt`.

use std::path::Path;

use ksf_lab::{Lab, turn};

#[test]
fn af_kcm_does_what_is_on_record() {
    observe("contract.c", "af_kcm.txt");
}

#[test]
fn processes_share_af_kcm_as_is_on_record() {
    observe("processes.c", "af_kcm_processes.txt");
}

fn observe(program: &str, record: &str) {
    let Some(_turn) = turn() else { return };
    let kcm = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../lab/kcm");
    let recorded = std::fs::read_to_string(kcm.join(record)).unwrap();

    let observed = Lab::new(kcm.join(program)).module("kcm").run().unwrap().checked().unwrap();

    let differences: Vec<String> = recorded
        .lines()
        .zip(observed.lines())
        .filter(|(recorded, observed)| recorded != observed)
        .map(|(recorded, observed)| format!("recorded  {recorded}\nobserved  {observed}"))
        .collect();
    assert!(differences.is_empty(), "\n{}", differences.join("\n\n"));
    assert_eq!(recorded.lines().count(), observed.lines().count(), "rows came or went");
}
