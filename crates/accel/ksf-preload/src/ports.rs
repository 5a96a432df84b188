//! Source ports of connections that the program opens: from the chunk of the CPU that calls `connect()`, so that `ksf accel
//! flow` can bring the replies there (receive flow deliver). Needs no holder.

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use ksf_accel_proto::{Layout, source_port};
use libc::{sockaddr, socklen_t};

use crate::real;

/// Written once, when the library starts.
static LAYOUT: OnceLock<Layout> = OnceLock::new();

/// Takes the layout of the environment; what is none is no layout.
pub(crate) fn set(text: &CStr) {
    if let Some(layout) = text.to_str().ok().and_then(|text| text.parse().ok()) {
        let _ = LAYOUT.set(layout);
    }
}

/// `connect()` of any socket. Connections to loopback addresses keep the kernel's ports: their packets are processed where
/// they are sent.
///
/// # Safety
///
/// `address` is null or readable for `length` bytes.
#[inline]
pub(crate) unsafe fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: handed on from the caller.
    let call = || unsafe { real::connect(fd, address, length) };
    match LAYOUT.get() {
        // SAFETY: handed on from the caller.
        Some(layout) => unsafe { source_port::connect(layout, false, fd, address, length, call) },
        None => call(),
    }
}
