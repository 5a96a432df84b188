//! What tests of several crates need, each once. It knows none of the other crates, so every one of them can use it.
//!
//! ```text
//!   what a machine may lack   skip, root_or_skip, program_or_skip, two_cpus_or_skip, working
//!   what the kernel refuses   refuse_call, refuse_waiting_reads
//!   a place of its own        own_network, in_new_network, side_by_side, Folder, image_or_skip, on_cpu
//!   others to talk to         stream (peers, echo, servers), rpc (messages written word by word), Running (programs)
//!   what comes in random      Random, pattern, Random::of_test, which says its seed when its test fails
//!   file servers            files (random steps beside a plain directory, trees), acl (POSIX ACLs)
//!   what is counted           alloc::Counting
//!   what takes its time       wait_until, PATIENCE, effort (seeds in make test and in make soak)
//! ```

pub mod acl;
pub mod alloc;
mod calls;
pub mod compile;
mod cpu;
mod disk;
mod effort;
pub mod files;
mod folder;
mod helper;
mod network;
mod process;
mod random;
pub mod rpc;
mod skip;
pub mod stream;
mod wait;

pub use calls::{refuse_call, refuse_waiting_reads};
pub use cpu::{cpus, on_cpu, pin, two_cpus_or_skip};
pub use disk::{image_or_skip, mount_image};
pub use effort::effort;
pub use folder::{Folder, folder, install, keeps_absent_names, reads_at_once, repository};
pub use helper::{Helper, is_helper, listen, say};
pub use network::{
    FAR, FarEnd, NEAR, assert_own_network, counted, in_new_network, ip, may_have_networks, network_on_two_cpus_or_skip,
    own_network, own_network_or_skip, own_run_or_skip, side_by_side, sysctl, tc, veth,
};
pub use process::{Lines, Running, is_alive, run, signal, stderr, stdout, succeeds};
pub use random::{Random, TestRandom, pattern};
pub use skip::{installed_or_skip, is_root, program_or_skip, root_or_skip, skip, working};
pub use wait::{PATIENCE, wait_until};
