//! Compiles the kernel programs and turns what their headers say into Rust.
//!
//! One clang call per object: `-O2 -g -target bpf`, then the DWARF is stripped and the BTF kept, and the object is
//! embedded with `include_bytes!`. `CLANG` and `LLVM_STRIP` name other tools; without llvm-strip the objects are
//! embedded unstripped, only larger.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const OBJECTS: [&str; 2] = ["echo", "rpc_null"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=LLVM_STRIP");
    for object in OBJECTS {
        compile(object, &out);
    }
    let abi = fs::read_to_string("bpf/ksf_abi.h").expect("bpf/ksf_abi.h is part of the crate");
    fs::write(out.join("counters.rs"), counters(&abi)).expect("OUT_DIR is writable");
}

fn compile(name: &str, out: &Path) {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let object = out.join(format!("{name}.bpf.o"));
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror"])
        // Static helpers that one of the services does not use.
        .args(["-Wno-unused-function", "-c"])
        .arg(format!("bpf/{name}.bpf.c"))
        .arg("-o")
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{clang} could not compile bpf/{name}.bpf.c ({status})")),
        Err(error) => fail(&format!(
            "cannot run {clang}: {error}. The kernel programs need clang 14 or later with the BPF target: \
             install Debian's package `clang`, or name the compiler in CLANG"
        )),
    }
    let strip = env::var("LLVM_STRIP").unwrap_or_else(|_| "llvm-strip".into());
    // -g drops DWARF and keeps .BTF and .BTF.ext. A missing tool costs size only.
    if !Command::new(&strip).arg("-g").arg(&object).status().is_ok_and(|status| status.success()) {
        println!("cargo:warning={strip} is missing: the kernel programs are embedded with their debug information");
    }
}

/// The lines `X(name, "help") \` of the header as a Rust table.
fn counters(abi: &str) -> String {
    let mut table = String::from(
        "/// Name and help of every counter, in the order of the map.\npub const COUNTERS: &[(&str, &str)] = &[\n",
    );
    let lines = abi.lines().filter_map(|line| line.trim().strip_prefix("X("));
    for line in lines {
        let (name, help) = line.split_once(", ").expect("X(name, \"help\")");
        let help = help.trim_end_matches('\\').trim_end().strip_suffix(')').expect("X(name, \"help\")");
        writeln!(table, "    (\"{name}\", {help}),").expect("writing to a string");
    }
    table.push_str("];\n");
    table
}

fn fail(message: &str) -> ! {
    // Cargo shows a build script's stderr when it fails.
    eprintln!("ksf-kernel: {message}");
    exit(1);
}
