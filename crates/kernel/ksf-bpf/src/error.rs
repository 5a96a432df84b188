//! Errors of libbpf-rs.

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
