//! The kernel's own AF_KCM against the record of what it does, `lab/kcm/af_kcm.txt`.

use std::path::Path;

use ksf_lab::{Lab, turn};

#[test]
fn af_kcm_does_what_is_on_record() {
    let Some(_turn) = turn() else { return };
    let kcm = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/kcm");
    let recorded = std::fs::read_to_string(kcm.join("af_kcm.txt")).unwrap();

    let observed = Lab::new(kcm.join("contract.c")).module("kcm").run().unwrap().checked().unwrap();

    let differences: Vec<String> = recorded
        .lines()
        .zip(observed.lines())
        .filter(|(recorded, observed)| recorded != observed)
        .map(|(recorded, observed)| format!("recorded  {recorded}\nobserved  {observed}"))
        .collect();
    assert!(differences.is_empty(), "\n{}", differences.join("\n\n"));
    assert_eq!(recorded.lines().count(), observed.lines().count(), "rows came or went");
}
