//! What the tests share: a compiler call, an assembler, and a source of random numbers.

#![allow(dead_code, reason = "each test file uses a part")]

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) mod asm;

/// Compiles C source against the crate's header, with `flags` behind the usual ones.
pub(crate) fn compile(name: &str, source: &str, flags: &[&str]) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let [c, object] = ["bpf.c", "bpf.o"].map(|end| dir.join(format!("{name}.{end}")));
    fs::write(&c, source).expect("the target directory is writable");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    let status = Command::new(clang)
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-I"])
        .arg(headers)
        .args(flags)
        .arg("-c")
        .args([&c, Path::new("-o"), &object])
        .status();
    assert!(status.expect("clang runs").success(), "{name} does not compile");
    fs::read(object).expect("clang wrote it")
}

/// The example of the documentation.
pub(crate) const THRIFT: &str = include_str!("../../bpf/thrift.bpf.c");

/// Xorshift (Marsaglia 2003): the same numbers on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
