//! Compiles the built-in framing programs.
//!
//! One clang call per object, then the DWARF is stripped and the BTF kept, as in ksf-kernel. `CLANG` and `LLVM_STRIP`
//! name other tools; without llvm-strip the objects are embedded unstripped, only larger.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const OBJECTS: [&str; 3] = ["record_mark", "length_prefix", "delimiter"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=LLVM_STRIP");
    for object in OBJECTS {
        compile(object, &out);
    }
}

fn compile(name: &str, out: &Path) {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let object = out.join(format!("{name}.bpf.o"));
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-DKSF_AF_KCM", "-c"])
        .arg(format!("bpf/{name}.bpf.c"))
        .arg("-o")
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{clang} could not compile bpf/{name}.bpf.c ({status})")),
        Err(error) => fail(&format!(
            "cannot run {clang}: {error}. The framing programs need clang 14 or later with the BPF target: install \
             Debian's package `clang`, or name the compiler in CLANG"
        )),
    }
    let strip = env::var("LLVM_STRIP").unwrap_or_else(|_| "llvm-strip".into());
    // -g drops DWARF and keeps .BTF and .BTF.ext. A missing tool costs size only.
    if !Command::new(&strip).arg("-g").arg(&object).status().is_ok_and(|status| status.success()) {
        println!("cargo:warning={strip} is missing: the framing programs are embedded with their debug information");
    }
}

fn fail(message: &str) -> ! {
    // Cargo shows a build script's stderr when it fails.
    eprintln!("ksf-bpf-framing: {message}");
    exit(1);
}
