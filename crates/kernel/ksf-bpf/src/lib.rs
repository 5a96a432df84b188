//! What all crates need that compile eBPF programs or load them with libbpf.
//!
//! - For build scripts: [`compile`], and the kernel's interface as programs see it (`bpf/ksf_kernel.h`).
//! - For code that loads (feature `load`): libbpf has one printer per process, so there must be one place that takes it,
//!   `Capture`. The headers that users' programs include are in `SDK`. The rest are calls that libbpf-rs has no form of, with libbpf's convention for errors made Rust's.
//!
//! Non-goal: loading. What is in an object, and what its failure means to a user, each crate knows for itself.

pub mod compile;

#[cfg(feature = "load")]
mod capture;
#[cfg(feature = "load")]
mod error;
#[cfg(feature = "load")]
mod link;
#[cfg(feature = "load")]
mod privilege;
#[cfg(feature = "load")]
mod program;
#[cfg(feature = "load")]
mod sdk;

#[cfg(feature = "load")]
pub use {
    capture::{Capture, last_lines},
    error::to_io,
    link::{check, link_create, network_cookie, owned},
    privilege::{Denial, is_denial, missing_capabilities},
    program::{program_id, program_info, program_name},
    sdk::{SDK, write_sdk},
};
