//! Tells the crate where libbpf-sys has installed libbpf's headers, which are part of the SDK.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Not there without the feature `load`, where the crate has no libbpf.
    if let Ok(folder) = env::var("DEP_BPF_INCLUDE") {
        println!("cargo:rustc-env=KSF_LIBBPF_HEADERS={folder}/bpf");
    }
}
