//! Compiles the kernel programs, and turns the counters of their header into Rust.
//!
//! As in ksf-kernel: one clang call per object, the DWARF stripped and the BTF kept, embedded with `include_bytes!`.
//! `CLANG` and `LLVM_STRIP` name other tools.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const OBJECTS: [&str; 2] = ["hop", "guard"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=LLVM_STRIP");
    for object in OBJECTS {
        compile(object, &out);
    }
    let abi = fs::read_to_string("bpf/ksf_hop_abi.h").expect("bpf/ksf_hop_abi.h is part of the crate");
    fs::write(out.join("counters.rs"), table(&section(&abi, "KSF_HOP_COUNTERS(X)"))).expect("OUT_DIR is writable");
}

fn compile(name: &str, out: &Path) {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let object = out.join(format!("{name}.bpf.o"));
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror"])
        // Helpers that one of the programs does not use.
        .args(["-Wno-unused-function", "-c"])
        .arg(format!("bpf/{name}.bpf.c"))
        .arg("-o")
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{clang} could not compile bpf/{name}.bpf.c ({status})")),
        Err(error) => fail(&format!(
            "cannot run {clang}: {error}. The kernel programs need clang 14 or later with the BPF target: install \
             Debian's package `clang`, or name the compiler in CLANG"
        )),
    }
    let strip = env::var("LLVM_STRIP").unwrap_or_else(|_| "llvm-strip".into());
    if !Command::new(&strip).arg("-g").arg(&object).status().is_ok_and(|status| status.success()) {
        println!("cargo:warning={strip} is missing: the kernel programs are embedded with their debug information");
    }
}

/// The lines of one list: what follows its name, up to the first line that does not go on.
fn section<'a>(abi: &'a str, name: &str) -> Vec<&'a str> {
    let (_, rest) = abi.split_once(&format!("#define {name} \\\n")).expect("the list of counters");
    let mut going_on = true;
    rest.lines().take_while(|line| std::mem::replace(&mut going_on, line.ends_with('\\'))).collect()
}

/// Lines `X(name, "help") \` as a Rust table.
fn table(lines: &[&str]) -> String {
    let mut table =
        "/// Name and help of each counter, in the order of the map.\npub const COUNTERS: &[(&str, &str)] = &[\n"
            .to_owned();
    for line in lines {
        let line = line.trim().strip_prefix("X(").expect("X(name, \"help\")");
        let (name, help) = line.split_once(", ").expect("X(name, \"help\")");
        let help = help.trim_end_matches('\\').trim_end().strip_suffix(')').expect("X(name, \"help\")");
        writeln!(table, "    (\"{name}\", {help}),").expect("writing to a string");
    }
    table.push_str("];\n");
    table
}

fn fail(message: &str) -> ! {
    // Cargo shows a build script's stderr when it fails.
    eprintln!("ksf-hop: {message}");
    exit(1);
}
