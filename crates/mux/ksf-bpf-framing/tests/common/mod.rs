//! What the tests share: a compiler call and an assembler.

#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::path::PathBuf;

use ksf_test::compile::bpf;

pub(crate) mod asm;

/// Compiles C source against the headers as they are installed.
pub(crate) fn compile(name: &str, source: &str, flags: &[&str]) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    ksf_bpf::write_sdk(&folder, &[ksf_bpf_framing::SDK]).expect("the target directory is writable");
    let [c, object] = ["bpf.c", "bpf.o"].map(|end| folder.join(format!("{name}.{end}")));
    fs::write(&c, source).expect("the target directory is writable");
    bpf(&c, &object, &folder, flags);
    let bytes = fs::read(object).expect("clang wrote it");
    let _ = fs::remove_dir_all(folder);
    bytes
}

/// The example of the documentation.
pub(crate) const THRIFT: &str = include_str!("../../bpf/thrift.bpf.c");
