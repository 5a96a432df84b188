//! Compiles eBPF programs in the build scripts of the crates that embed them.
//!
//! One clang call per object, then the DWARF is stripped and the BTF kept. The environment variables `CLANG` and
//! `LLVM_STRIP` name other tools; without llvm-strip the objects are embedded unstripped, only larger.
//!
//! Programs include the kernel's interface, `ksf_kernel.h` of this crate, and libbpf's own headers, which libbpf-sys
//! installs into its build folder. Cargo tells that folder to the build scripts of crates that depend on libbpf-sys
//! themselves, so a crate with programs does, whether or not its code calls libbpf.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, exit};

/// The folder of `ksf_kernel.h`.
const HEADERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/bpf");

/// What every program is compiled with.
const FLAGS: [&str; 9] = [
    "-O2",
    "-g",
    "-target",
    "bpf",
    "-mcpu=v3",
    "-std=gnu11",
    "-Wall",
    "-Werror",
    // Helpers of the headers that one of the programs does not use.
    "-Wno-unused-function",
];

/// The programs in the folder `bpf` of the crate whose build script this is.
#[derive(Debug)]
pub struct Programs {
    clang: OsString,
    strip: OsString,
    out: PathBuf,
    libbpf: PathBuf,
    flags: Vec<OsString>,
}

impl Programs {
    /// What Cargo tells the build script. Has Cargo run it again when a program, a header or a tool changes.
    pub fn of_this_crate() -> Self {
        for path in ["bpf", HEADERS] {
            println!("cargo:rerun-if-changed={path}");
        }
        let tool = |variable: &str, usual: &str| {
            println!("cargo:rerun-if-env-changed={variable}");
            env::var_os(variable).unwrap_or_else(|| usual.into())
        };
        Self {
            clang: tool("CLANG", "clang"),
            strip: tool("LLVM_STRIP", "llvm-strip"),
            out: out_dir(),
            libbpf: told("DEP_BPF_INCLUDE", "add libbpf-sys to the crate's dependencies").into(),
            flags: Vec::new(),
        }
    }

    /// With a flag for clang behind the usual ones.
    #[must_use]
    pub fn flag(mut self, flag: impl Into<OsString>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Compiles `bpf/NAME.bpf.c` to `OUT_DIR/NAME.bpf.o`, for each of these names, which may have a folder in them.
    /// Headers are found that [`write_out`] has written. A failure ends the build script, with what is missing and what
    /// to install.
    pub fn compile(&self, names: &[&str]) {
        for name in names {
            let object = self.out.join(format!("{name}.bpf.o"));
            make_parent(&object);
            if let Err(error) = self.compile_one(&format!("bpf/{name}.bpf.c"), &object) {
                fail(&error);
            }
            if !self.is_stripped(&object) {
                let strip = self.strip.display();
                println!("cargo:warning={strip} is missing: {name}.bpf.o is embedded with its debug information");
            }
        }
    }

    fn compile_one(&self, source: &str, object: &Path) -> Result<(), String> {
        let mut command = Command::new(&self.clang);
        command.args(FLAGS).args(&self.flags);
        command.args(["-I", HEADERS, "-I"]).arg(&self.out).arg("-isystem").arg(&self.libbpf);
        let status = command.args(["-c", source, "-o"]).arg(object).status();
        explain(&self.clang.to_string_lossy(), source, status)
    }

    /// `-g` drops DWARF and keeps .BTF and .BTF.ext.
    fn is_stripped(&self, object: &Path) -> bool {
        Command::new(&self.strip).arg("-g").arg(object).status().is_ok_and(|status| status.success())
    }
}

fn explain(clang: &str, source: &str, status: io::Result<ExitStatus>) -> Result<(), String> {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{clang} could not compile {source} ({status})")),
        Err(error) => Err(format!(
            "cannot run {clang}: {error}. eBPF programs need clang 14 or later with the BPF target: install Debian's \
             packages clang and llvm, or name the compiler in the environment variable CLANG"
        )),
    }
}

/// Writes a file of `OUT_DIR`, which the crate takes in with `include!` or a program with `#include`.
pub fn write_out(name: &str, text: &str) {
    let file = out_dir().join(name);
    make_parent(&file);
    if let Err(error) = fs::write(&file, text) {
        fail(&format!("cannot write {}: {error}", file.display()));
    }
}

fn make_parent(file: &Path) {
    if let Some(Err(error)) = file.parent().map(fs::create_dir_all) {
        fail(&format!("cannot make the folder of {}: {error}", file.display()));
    }
}

fn out_dir() -> PathBuf {
    told("OUT_DIR", "Cargo sets it for build scripts").into()
}

fn told(variable: &str, why: &str) -> OsString {
    env::var_os(variable).unwrap_or_else(|| fail(&format!("{variable} is not set: {why}")))
}

/// The counters of a header of the folder `bpf`, as Rust: the lines `X(name, "help") \` behind `#define LIST(X) \`
/// become `pub const CONSTANT: &[(&str, &str)]`, in that order. `whose` completes "Name and help of each counter of ...".
pub fn counters(header: &str, list: &str, constant: &str, whose: &str) -> String {
    let text = fs::read_to_string(format!("bpf/{header}"))
        .unwrap_or_else(|error| fail(&format!("cannot read bpf/{header}: {error}")));
    table(&text, list, constant, whose).unwrap_or_else(|what| fail(&format!("bpf/{header}: {what}")))
}

fn table(header: &str, list: &str, constant: &str, whose: &str) -> Result<String, String> {
    let (_, rest) = header.split_once(&format!("#define {list}(X) \\\n")).ok_or(format!("no list {list}(X)"))?;
    let mut table = format!(
        "/// Name and help of each counter of {whose}, in the order of the map.\n\
         pub const {constant}: &[(&str, &str)] = &[\n"
    );
    let mut goes_on = true;
    for line in rest.lines().take_while(|line| std::mem::replace(&mut goes_on, line.ends_with('\\'))) {
        let entry = line.trim_end_matches('\\').trim();
        let parts = entry.strip_prefix("X(").and_then(|entry| entry.strip_suffix(')')?.split_once(", "));
        let (name, help) = parts.ok_or(format!("{list}: not X(name, \"help\"): {line}"))?;
        let _ = writeln!(table, "    (\"{name}\", {help}),");
    }
    table.push_str("];\n");
    Ok(table)
}

/// Cargo shows a build script's standard error when it fails.
fn fail(message: &str) -> ! {
    eprintln!("{}: {message}", env::var("CARGO_PKG_NAME").unwrap_or_default());
    exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_is_missing_is_named_with_what_to_install() {
        let run = |clang: &str| explain(clang, "bpf/x.bpf.c", Command::new(clang).status());
        let error = run("/does/not/exist/clang").unwrap_err();
        for part in ["/does/not/exist/clang", "No such file", "packages clang and llvm", "CLANG"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(run("false").unwrap_err(), "false could not compile bpf/x.bpf.c (exit status: 1)");
        assert_eq!(run("true"), Ok(()));
    }

    #[test]
    fn a_list_of_counters_becomes_a_table() {
        let header = "#define A(X) \\\n\tX(one, \"the first\") \\\n\tX(two, \"with \\\"quotes\\\"\")\nX(other, \"\")\n";
        let expected = "/// Name and help of each counter of the test, in the order of the map.\n\
                        pub const NAMES: &[(&str, &str)] = &[\n    (\"one\", \"the first\"),\n    \
                        (\"two\", \"with \\\"quotes\\\"\"),\n];\n";
        assert_eq!(table(header, "A", "NAMES", "the test").as_deref(), Ok(expected));
        assert_eq!(table(header, "B", "NAMES", "").unwrap_err(), "no list B(X)");
        assert!(table("#define A(X) \\\n\tY(one)\n", "A", "NAMES", "").unwrap_err().contains("Y(one)"));
    }
}
