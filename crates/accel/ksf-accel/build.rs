//! Compiles the programs that choose queues (`bpf/`), and those that steer packets (`bpf/flow/`).
//!
//! `state.h` is written by hand, as a reader wants it. From the Rust types this script makes a header of
//! `_Static_assert`s, one for every size, offset and limit that both sides know: where they differ, nothing compiles.
//! The counters of `flow/ksf_flow_abi.h` are turned into Rust.

use std::fmt::Write as _;
use std::mem::offset_of;

use ksf_accel_proto::state::{CPUS_MAX, Control, HOME_MAX, Home, LISTENERS_MAX, State, WORKERS_MAX, Worker};
use ksf_bpf::compile::{Programs, counters, write_out};

fn main() {
    write_out("layout.h", &layout());
    Programs::of_this_crate().compile(&["steer", "share", "flow/steer", "flow/connect"]);
    let flow = |list, constant, whose| counters("flow/ksf_flow_abi.h", list, constant, whose);
    let tables = flow("KSF_FLOW_COUNTERS", "FLOW_COUNTERS", "the XDP programs")
        + &flow("KSF_CONNECT_COUNTERS", "CONNECT_COUNTERS", "the connect programs");
    write_out("flow/counters.rs", &tables);
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
    offsets!(Control, "ksf_control": version on workers_end busy_limit_ns rescue_pending);
    offsets!(Home, "ksf_home": len worker);
    offsets!(Worker, "ksf_worker": ready busy_since_ns generation cpu pid stalled accepted_own accepted_fallback
        accepted_stolen steered_local steered_remote);
    text
}
