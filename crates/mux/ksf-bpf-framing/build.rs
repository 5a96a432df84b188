//! Compiles the built-in framing programs.

use ksf_bpf::compile::Programs;

fn main() {
    Programs::of_this_crate().flag("-DKSF_AF_KCM").compile(&["record_mark", "length_prefix", "delimiter"]);
}
