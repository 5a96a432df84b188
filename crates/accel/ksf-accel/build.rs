//! Compiles the programs that choose queues (`bpf/`), and those that steer packets (`bpf/flow/`).
//!
//! `state.h` is written by hand, as a reader wants it. From the Rust types this script makes a header of
//! `_Static_assert`s, one for every size, offset and limit that both sides know: where they differ, nothing compiles.
//! The counters of `flow/ksf_flow_abi.h` are turned into Rust.
//!
//! One clang call per object: `-O2 -g -target bpf`, then the DWARF is stripped and the BTF kept. `CLANG` and
//! `LLVM_STRIP` name other tools.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

use ksf_accel_proto::state::{CPUS_MAX, Control, HOME_MAX, Home, LISTENERS_MAX, State, WORKERS_MAX, Worker};

const OBJECTS: [&str; 5] = ["steer", "group", "share", "flow/steer", "flow/connect"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=LLVM_STRIP");
    fs::create_dir_all(out.join("flow")).expect("OUT_DIR is writable");
    fs::write(out.join("layout.h"), layout()).expect("OUT_DIR is writable");
    fs::write(out.join("flow/counters.rs"), counters()).expect("OUT_DIR is writable");
    for object in OBJECTS {
        compile(object, &out);
    }
}

/// What the Rust side says about the memory that both sides share.
fn layout() -> String {
    let mut text = String::from("/* Made by build.rs from ksf_accel_proto::state. */\n");
    let mut same = |c: &str, rust: usize| {
        writeln!(text, "_Static_assert({c} == {rust}, \"{c} differs from ksf_accel_proto::state\");")
            .expect("a string");
    };
    same("KSF_LISTENERS_MAX", LISTENERS_MAX);
    same("KSF_WORKERS_MAX", WORKERS_MAX);
    same("KSF_CPUS_MAX", CPUS_MAX);
    same("KSF_HOME_MAX", HOME_MAX);
    same("sizeof(struct ksf_control)", size_of::<Control>());
    same("sizeof(struct ksf_home)", size_of::<Home>());
    same("sizeof(struct ksf_worker)", size_of::<Worker>());
    same("sizeof(struct ksf_state)", size_of::<State>());
    macro_rules! offsets {
        ($rust:ident, $c:literal: $($field:ident)*) => {
            $(same(concat!("__builtin_offsetof(struct ", $c, ", ", stringify!($field), ")"), offset_of!($rust, $field));)*
        };
    }
    offsets!(State, "ksf_state": control homes workers);
    offsets!(Control, "ksf_control": version on workers_end busy_limit_ns paused);
    offsets!(Home, "ksf_home": len worker);
    offsets!(Worker, "ksf_worker": ready busy_since_ns generation cpu pid stalled accepted_own accepted_fallback
        accepted_stolen steered_local steered_remote);
    text
}

/// The counters that `flow/ksf_flow_abi.h` lists.
fn counters() -> String {
    let abi = fs::read_to_string("bpf/flow/ksf_flow_abi.h").expect("bpf/flow/ksf_flow_abi.h is part of the crate");
    table("FLOW_COUNTERS", "the XDP programs", section(&abi, "KSF_FLOW_COUNTERS(X)"))
        + &table("CONNECT_COUNTERS", "the connect programs", section(&abi, "KSF_CONNECT_COUNTERS(X)"))
}

/// The lines of one list: what follows its name, up to the first line that does not go on.
fn section<'a>(abi: &'a str, name: &str) -> Vec<&'a str> {
    let (_, rest) = abi.split_once(&format!("#define {name} \\\n")).expect("the list of counters");
    let mut going_on = true;
    rest.lines().take_while(|line| std::mem::replace(&mut going_on, line.ends_with('\\'))).collect()
}

/// Lines `X(name, "help") \` as a Rust table.
fn table(name: &str, whose: &str, lines: Vec<&str>) -> String {
    let mut table = format!(
        "/// Name and help of each counter of {whose}, in the order of the map.\npub const {name}: &[(&str, &str)] = &[\n"
    );
    for line in lines {
        let line = line.trim().strip_prefix("X(").expect("X(name, \"help\")");
        let (name, help) = line.split_once(", ").expect("X(name, \"help\")");
        let help = help.trim_end_matches('\\').trim_end().strip_suffix(')').expect("X(name, \"help\")");
        writeln!(table, "    (\"{name}\", {help}),").expect("writing to a string");
    }
    table.push_str("];\n");
    table
}

fn compile(name: &str, out: &Path) {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let object = out.join(format!("{name}.bpf.o"));
    let status = Command::new(&clang)
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror"])
        .args(["-Wno-unused-function", "-I"])
        .arg(out)
        .arg("-c")
        .arg(format!("bpf/{name}.bpf.c"))
        .arg("-o")
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{clang} could not compile bpf/{name}.bpf.c ({status})")),
        Err(error) => fail(&format!(
            "cannot run {clang}: {error}. The steering programs need clang 14 or later with the BPF target: \
             install Debian's package `clang`, or name the compiler in CLANG"
        )),
    }
    let strip = env::var("LLVM_STRIP").unwrap_or_else(|_| "llvm-strip".into());
    // -g drops DWARF and keeps .BTF and .BTF.ext. A missing tool costs size only.
    if !Command::new(&strip).arg("-g").arg(&object).status().is_ok_and(|status| status.success()) {
        println!("cargo:warning={strip} is missing: the steering programs are embedded with their debug information");
    }
}

fn fail(message: &str) -> ! {
    // Cargo shows a build script's stderr when it fails.
    eprintln!("ksf-accel: {message}");
    exit(1);
}
