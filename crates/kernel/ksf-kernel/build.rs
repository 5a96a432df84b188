//! Compiles the kernel programs and turns the counters of their header into Rust.

use ksf_bpf::compile::{Programs, counters, write_out};

fn main() {
    Programs::of_this_crate().compile(&["echo", "rpc_null"]);
    write_out("counters.rs", &counters("ksf_abi.h", "KSF_COUNTERS", "COUNTERS", "the kernel half"));
}
