//! The half of ksf that runs in the kernel, and its loader.
//!
//! A service is one C function on the SDK in `bpf/` ([`SDK`]). Loaded as a [`KernelService`] it answers messages of TCP
//! connections in a sockmap verdict program and datagrams in XDP; what it leaves goes to user space, where
//! [`Caller`] runs the same verified function. [`KernelAssist`] is the connection to the framework: it implements
//! [`ksf::assist::Assist`].
//!
//! ```no_run
//! use ksf_kernel::{Builtin, KernelService, ObjectSource, KernelOptions};
//!
//! # fn main() -> Result<(), ksf_kernel::KernelError> {
//! let service = KernelService::load(&ObjectSource::Builtin(Builtin::Echo), &KernelOptions::default())?;
//! ksf_kernel::self_test()?;
//! let assist = service.assist(); // for the engine
//! let udp = service.attach_udp("lo", &["127.0.0.1:60007".parse().unwrap()])?;
//! # Ok(()) }
//! ```
//!
//! Everything ends with the process: programs, maps and links are held by descriptors only, nothing is pinned.

mod abi;
mod assist;
mod call;
mod conns;
mod error;
mod hops;
mod object;
mod options;
mod selftest;
mod service;
mod sys;
mod tcp;
mod udp;
mod wake;
mod xdp;

pub use abi::COUNTERS;
pub use assist::KernelAssist;
pub use call::{Caller, Verdict};
pub use error::KernelError;
pub use ksf_bpf::missing_capabilities;
pub use object::ObjectSource;
pub use options::KernelOptions;
pub use selftest::{self_test, self_test_of};
pub use service::{Builtin, Counter, KernelService};
pub use udp::{XdpLink, XdpMode};

/// The SDK's headers: name and text of each. A service author needs them in one folder, with [`ksf_bpf::SDK`]:
/// [`ksf_bpf::write_sdk`] puts them there.
pub const SDK: &[(&str, &str)] = &[
    ("ksf.bpf.h", include_str!("../bpf/ksf.bpf.h")),
    ("ksf_abi.h", include_str!("../bpf/ksf_abi.h")),
    ("ksf_call.h", include_str!("../bpf/ksf_call.h")),
    ("ksf_datagram.h", include_str!("../bpf/ksf_datagram.h")),
    ("ksf_framing.h", include_str!("../bpf/ksf_framing.h")),
    ("ksf_maps.h", include_str!("../bpf/ksf_maps.h")),
    ("ksf_message.h", include_str!("../bpf/ksf_message.h")),
    ("ksf_platform.h", include_str!("../bpf/ksf_platform.h")),
    ("ksf_segment.h", include_str!("../bpf/ksf_segment.h")),
    ("ksf_stream.h", include_str!("../bpf/ksf_stream.h")),
];
