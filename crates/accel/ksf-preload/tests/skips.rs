//! A skipped test is seen, though it passes; in CI it does not pass.

mod common;

use std::process::{Command, Output};

/// Set where the helper below is run by a test, not by hand.
const HELPER: &str = "KSF_PRELOAD_TEST_HELPER";

/// Runs the helper below as `cargo test` would: the test runner shows what a test prints only if that test fails.
fn run(ci: Option<&str>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "helper_is_skipped", "--ignored"]).env(HELPER, "1").env_remove("CI");
    command.envs(ci.map(|value| ("CI", value))).output().unwrap()
}

#[test]
fn a_skipped_test_says_so_though_it_passes() {
    let output = run(None);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "skipped: helper_is_skipped: needs a unicorn\n");
}

#[test]
fn in_ci_a_skipped_test_fails() {
    let output = run(Some("true"));
    assert_eq!(output.status.code(), Some(101));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("skipped in CI: needs a unicorn"), "{said}");
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_is_skipped() {
    if std::env::var_os(HELPER).is_some() {
        common::skip("needs a unicorn");
    }
}
