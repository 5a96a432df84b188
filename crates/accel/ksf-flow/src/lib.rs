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
//! use ksf_flow::{ConnectOptions, ConnectPrograms, Layout, ModeWish, Policy, Steering};
//!
//! # fn main() -> Result<(), ksf_flow::FlowError> {
//! let layout = Layout::of_this_machine()?;
//! let connects = ConnectPrograms::attach("/sys/fs/cgroup/proxies".as_ref(), &layout, &ConnectOptions::default())?;
//! let mut steering = Steering::load(&layout, &[Policy::Ports])?;
//! let mode = steering.attach("eth1", ModeWish::Auto)?;
//! # Ok(()) }
//! ```
//!
//! Everything ends with the process: programs, maps and links are held by descriptors only, nothing is pinned.
//! docs/flow.md explains the layout and its traps.

mod cpus;
mod layout;
pub mod source_port;

pub use cpus::{BadCpuList, CPUS_MAX, CpuMask};
pub use layout::{Layout, LayoutError, PortRange};

#[cfg(feature = "bpf")]
mod abi;
#[cfg(feature = "bpf")]
mod connect;
#[cfg(feature = "bpf")]
mod error;
#[cfg(feature = "bpf")]
mod object;
#[cfg(feature = "bpf")]
mod policy;
#[cfg(feature = "bpf")]
pub mod report;
#[cfg(feature = "bpf")]
mod steering;
#[cfg(feature = "bpf")]
mod trial;

#[cfg(feature = "bpf")]
pub use abi::{CONNECT_COUNTERS, FLOW_COUNTERS};
#[cfg(feature = "bpf")]
pub use connect::{ConnectOptions, ConnectPrograms};
#[cfg(feature = "bpf")]
pub use error::FlowError;
#[cfg(feature = "bpf")]
pub use policy::Policy;
#[cfg(feature = "bpf")]
pub use steering::{Counter, Fate, Mode, ModeWish, Proof, Steering};
#[cfg(feature = "bpf")]
pub use trial::Trial;

/// The headers a policy is compiled against: name and text of each. They are needed in one directory.
pub const SDK: &[(&str, &str)] = &[
    ("ksf-policy.h", include_str!("../bpf/ksf-policy.h")),
    ("ksf_flow_abi.h", include_str!("../bpf/ksf_flow_abi.h")),
    ("ksf_flow_kernel.h", include_str!("../bpf/ksf_flow_kernel.h")),
];
