//! What all crates need that load eBPF programs with libbpf.
//!
//! libbpf has one printer per process, so there must be one place that takes it: [`Capture`]. The rest are calls that
//! libbpf-rs has no form of, with libbpf's convention for errors made Rust's.
//!
//! Non-goal: loading. What is in an object, and what its failure means to a user, each crate knows for itself.

mod capture;
mod link;
mod privilege;
mod program;

pub use capture::{Capture, last_lines};
pub use link::{check, link_create, network_cookie, owned};
pub use privilege::{Denial, is_denial, missing_capabilities};
pub use program::{program_id, program_info, program_name};

use std::borrow::Borrow;
use std::io;

/// The error as one of the system, as far as libbpf-rs tells: its own text, but for a missing permission, of which libbpf
/// guesses the cause.
pub fn to_io(error: impl Borrow<libbpf_rs::Error>) -> io::Error {
    let error = error.borrow();
    let kind = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => return io::Error::from_raw_os_error(libc::EPERM),
        libbpf_rs::ErrorKind::NotFound => io::ErrorKind::NotFound,
        libbpf_rs::ErrorKind::OutOfMemory => io::ErrorKind::OutOfMemory,
        libbpf_rs::ErrorKind::InvalidInput | libbpf_rs::ErrorKind::InvalidData => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string())
}
