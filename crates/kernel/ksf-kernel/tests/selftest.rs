//! The self-test must find out programs that do not do what they should: whatever breaks them on another kernel, this
//! is how it would show.

mod common;

use std::path::Path;
use std::process::Command;

use common::is_root;
use ksf_kernel::{Builtin, KernelError, ObjectSource, self_test_of};

/// Compiles an object as the build does, with a rule taken out (`KSF_MUTANT_*` in `bpf/`) if flags say so.
fn compile(source: &str, name: &str, flags: &[&str]) -> ObjectSource {
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.bpf.o", std::process::id()));
    let output = Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".into()))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function"])
        .args(["-Ibpf", "-c", source, "-o"])
        .arg(&object)
        .args(flags)
        .output()
        .expect("clang runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ObjectSource::File(object)
}

const ECHO: ObjectSource = ObjectSource::Builtin(Builtin::Echo);
const RPC_NULL: ObjectSource = ObjectSource::Builtin(Builtin::RpcNull);

/// The part of the test that failed, and how.
fn failure(echo: &ObjectSource, rpc_null: &ObjectSource) -> (&'static str, String) {
    match self_test_of(echo, rpc_null) {
        Err(KernelError::SelfTest { test, problem }) => (test, problem),
        other => panic!("{other:?} of {echo:?} and {rpc_null:?}"),
    }
}

/// What the tests below break is what is built in, compiled once more.
#[test]
fn whole_objects_pass() {
    if !is_root("eBPF") {
        return;
    }
    let echo = compile("bpf/echo.bpf.c", "echo", &[]);
    let rpc_null = compile("bpf/rpc_null.bpf.c", "rpc_null", &[]);
    self_test_of(&echo, &rpc_null).unwrap();
}

#[test]
fn changed_bytes_are_found() {
    if !is_root("eBPF") {
        return;
    }
    let liar = compile("tests/bpf/liar.bpf.c", "liar", &[]);
    assert_eq!(failure(&liar, &RPC_NULL), ("echo of odd sizes", "other bytes came back".into()));
}

#[test]
fn a_function_that_does_not_answer_is_found() {
    if !is_root("eBPF") {
        return;
    }
    let idler = compile("tests/bpf/idler.bpf.c", "idler", &[]);
    let passed = "the service's function passed the message";
    assert_eq!(failure(&idler, &RPC_NULL), ("echo of odd sizes", passed.into()));
}

/// A reply shorter than its request is counted as consumed with its own length: without the rule that makes up for it
/// the socket polls readable for ever, and an engine would spin.
#[test]
fn a_wrong_count_of_consumed_bytes_is_found() {
    if !is_root("eBPF") {
        return;
    }
    let no_lag = compile("bpf/rpc_null.bpf.c", "no_lag", &["-DKSF_MUTANT_NO_LAG"]);
    let (test, problem) = failure(&ECHO, &no_lag);
    assert_eq!(test, "shorter replies");
    assert!(problem.contains("polls readable"), "{problem}");
}

#[test]
fn lost_bytes_are_found() {
    if !is_root("eBPF") {
        return;
    }
    let loser = compile("tests/bpf/loser.bpf.c", "loser", &[]);
    assert_eq!(failure(&loser, &RPC_NULL), ("echo of odd sizes", "1 of 2 bytes came back, then no more".into()));
}
