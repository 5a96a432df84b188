//! Active connections whose replies come back to the CPU that opened them, and receive steering by pluggable policies.
//!
//! Three parts, which share the [`Layout`] of source ports:
//!
//! * [`source_port`]: a process gives its own sockets ports of the caller's CPU, as a preload library does;
//! * [`ConnectPrograms`]: the same by eBPF for all programs of a cgroup;
//! * [`Steering`]: an XDP program sends what arrives to the CPU that a [`Policy`] names; [`Policy::Ports`] reads it from
//!   the port. Users write policies against [`SDK`].
//!
//! ```no_run
//! use ksf_accel::flow::{ConnectOptions, ConnectPrograms, Layout, ModeWish, Policy, Steering};
//!
//! # fn main() -> Result<(), ksf_accel::flow::FlowError> {
//! let layout = Layout::of_this_machine()?;
//! let connects = ConnectPrograms::attach("/sys/fs/cgroup/proxies".as_ref(), &layout, &ConnectOptions::default())?;
//! let mut steering = Steering::load(&layout, &[Policy::Ports])?;
//! let mode = steering.attach("eth1", ModeWish::Auto)?;
//! # Ok(()) }
//! ```
//!
//! Everything ends with the process: programs, maps and links are held by descriptors only, nothing is pinned.
//! docs/flow.md explains the layout and its traps.

mod abi;
mod connect;
mod error;
mod policy;
mod steering;
mod trial;

pub use abi::{CONNECT_COUNTERS, FLOW_COUNTERS};
pub use connect::{ConnectOptions, ConnectPrograms};
pub use error::FlowError;
pub use ksf_accel_proto::{BadCpuList, CPUS_MAX, CpuMask, Layout, LayoutError, PortRange, source_port};
pub use policy::Policy;
pub use steering::{Counter, Fate, Mode, ModeWish, Proof, Steering};
pub use trial::Trial;

/// The headers a policy is compiled against: name and text of each. They are needed in one directory.
pub const SDK: &[(&str, &str)] = &[
    ("ksf-policy.h", include_str!("../../bpf/flow/ksf-policy.h")),
    ("ksf_flow_abi.h", include_str!("../../bpf/flow/ksf_flow_abi.h")),
];
