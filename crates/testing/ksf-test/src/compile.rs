//! Programs in C that tests compile.

use std::path::Path;
use std::process::Command;

use crate::run;

/// What every C program of the tests is compiled with.
const WARNINGS: [&str; 3] = ["-Wall", "-Wextra", "-Werror"];

/// Compiles a C file to a program for this machine, with further flags behind the file.
#[track_caller]
pub fn cc(source: impl AsRef<Path>, program: &Path, flags: &[&str]) {
    let mut command = Command::new("cc");
    run(command.args(WARNINGS).args(["-pthread", "-o"]).arg(program).arg(source.as_ref()).args(flags));
}

/// Compiles a C file to an eBPF object, as the examples' Makefiles do: with the headers of a folder and further flags.
/// The environment variable `CLANG` names another compiler.
#[track_caller]
pub fn bpf(source: impl AsRef<Path>, object: &Path, headers: &Path, flags: &[&str]) {
    let mut command = Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".into()));
    command.args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function"]);
    run(command.args(flags).arg("-I").arg(headers).arg("-c").arg(source.as_ref()).arg("-o").arg(object));
}
