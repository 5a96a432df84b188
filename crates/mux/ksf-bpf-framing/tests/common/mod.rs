//! What the tests share: a compiler call and an assembler.

#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::path::{Path, PathBuf};

use ksf_test::compile::bpf;

pub(crate) mod asm;

/// Compiles C source against the crate's header.
pub(crate) fn compile(name: &str, source: &str, flags: &[&str]) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let [c, object] = ["bpf.c", "bpf.o"].map(|end| dir.join(format!("{name}.{end}")));
    fs::write(&c, source).expect("the target directory is writable");
    bpf(&c, &object, &Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf"), flags);
    fs::read(object).expect("clang wrote it")
}

/// The example of the documentation.
pub(crate) const THRIFT: &str = include_str!("../../bpf/thrift.bpf.c");
