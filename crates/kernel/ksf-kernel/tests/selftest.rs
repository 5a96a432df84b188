//! The self-test must find out programs that do not do what they should: whatever breaks them on another kernel, this
//! is how it would show.

use crate::common::{object, root_or_skip};
use ksf_kernel::{Builtin, KernelError, ObjectSource, self_test_of};

/// An object of the build's headers, with a rule taken out (`KSF_MUTANT_*` in `bpf/`) if flags say so.
fn compile(source: &str, flags: &[&str]) -> ObjectSource {
    ObjectSource::File(object::compile(source, &[&["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/bpf")], flags].concat()))
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
    let Some(()) = root_or_skip("eBPF") else { return };
    let echo = compile("bpf/echo.bpf.c", &[]);
    let rpc_null = compile("bpf/rpc_null.bpf.c", &[]);
    self_test_of(&echo, &rpc_null).unwrap();
}

#[test]
fn changed_bytes_are_found() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let liar = compile("tests/bpf/liar.bpf.c", &[]);
    assert_eq!(failure(&liar, &RPC_NULL), ("echo of odd sizes", "other bytes came back".into()));
}

#[test]
fn a_function_that_does_not_answer_is_found() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let idler = compile("tests/bpf/idler.bpf.c", &[]);
    let passed = "the service's function passed the message";
    assert_eq!(failure(&idler, &RPC_NULL), ("echo of odd sizes", passed.into()));
}

/// A reply shorter than its request is counted as consumed with its own length: without the rule that makes up for it
/// the socket polls readable for ever, and an engine would spin.
#[test]
fn a_wrong_count_of_consumed_bytes_is_found() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let no_lag = compile("bpf/rpc_null.bpf.c", &["-DKSF_MUTANT_NO_LAG"]);
    let (test, problem) = failure(&ECHO, &no_lag);
    assert_eq!(test, "shorter replies");
    assert!(problem.contains("polls readable"), "{problem}");
}

#[test]
fn lost_bytes_are_found() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let loser = compile("tests/bpf/loser.bpf.c", &[]);
    let (test, problem) = failure(&loser, &RPC_NULL);
    assert_eq!(test, "echo of odd sizes");
    assert!(problem.starts_with("1 of 2 bytes came back, then no more (the server has received 1 bytes"), "{problem}");
}
