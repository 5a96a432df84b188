//! The wrapper of AF_KCM in a machine whose kernel has it, and what it says of kernels that have none.

mod calls;

use ksf_kcm::KcmError;
use ksf_lab::{Lab, turn};
use ksf_test::PATIENCE;

/// Set in a machine of the lab.
const INSIDE: &str = "KSF_TEST_KCM";

#[test]
fn on_af_kcm() {
    if std::env::var_os(INSIDE).is_some() {
        calls::cases();
        return;
    }
    let Some(_turn) = turn() else { return };
    let lab = Lab::new(std::env::current_exe().unwrap()).module("kcm").memory_mib(1024);
    let lab = ["--exact", "on_af_kcm", "--nocapture"].iter().fold(lab, |lab, word| lab.arg(*word));
    let outcome = lab.env(INSIDE, "1").time_limit(PATIENCE * 2).run().unwrap();
    assert!(outcome.success(), "{}\n{}", outcome.output, outcome.console);
    // A filter that fits no test would be a success, too.
    assert!(outcome.output.contains("test result: ok. 1 passed"), "{}", outcome.output);
}

/// Wherever this runs: AF_KCM works, or the error names the cause and a remedy.
#[test]
fn what_is_missing_is_said() {
    let Err(error) = ksf_kcm::probe() else { return };
    assert!(!error.to_string().is_empty() && !error.remedy().is_empty());
    if let KcmError::Absent(_) = error {
        assert_eq!(error.errno(), Some(libc::EAFNOSUPPORT));
    }
}
