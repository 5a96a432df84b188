//! Where no machine can be had, its test is skipped and says so, though it passes; in CI it does not pass.

use std::process::Output;

use ksf_test::{Helper, is_helper, stderr, stdout};

/// Runs the helper below on a host without a kernel for its machines.
fn run(ci: Option<&str>) -> Output {
    let mut command = Helper::command("skips::helper_takes_a_turn");
    command.env("KSF_LAB_KERNEL", "/no/such/place").env_remove("CI").env_remove("KSF_TEST_SKIPPED");
    command.envs(ci.map(|value| ("CI", value))).output().unwrap()
}

#[test]
fn a_test_without_a_machine_says_so_though_it_passes() {
    let output = run(None);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.starts_with("skipped: skips::helper_takes_a_turn: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(tells_the_remedy(&said), "{said}");
}

#[test]
fn in_ci_a_test_without_a_machine_fails() {
    for value in ["true", "1"] {
        let output = run(Some(value));
        assert_eq!(output.status.code(), Some(101), "CI={value}");
        let said = stdout(&output) + &stderr(&output);
        assert!(said.contains("skipped in CI: "), "{said}");
        assert!(tells_the_remedy(&said), "{said}");
    }
}

/// What is lacking here depends on the host, which may have no QEMU either.
fn tells_the_remedy(said: &str) -> bool {
    ["KSF_LAB_KERNEL", "scripts/setup.sh test"].iter().any(|remedy| said.contains(remedy))
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_takes_a_turn() {
    if is_helper() {
        assert!(ksf_lab::turn().is_none(), "there is no kernel");
    }
}
