//! Plain system calls that both engines and the shard use.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::{io, mem, ptr};

/// Accepts one connection from a socket in non-blocking mode, or finds none waiting.
pub(crate) fn accept_now(socket: RawFd) -> io::Result<Option<OwnedFd>> {
    // SAFETY: null address pointers: the address is not asked for.
    let fd = unsafe { libc::accept4(socket, ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC) };
    if fd >= 0 {
        // SAFETY: just made by accept4, and no other code knows it.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }));
    }
    let error = io::Error::last_os_error();
    // A connection that was reset before it was accepted is no failure.
    let gone = matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EPROTO));
    if gone || error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
}

/// Switches the blocking mode of a socket, for all processes that share it.
pub(crate) fn set_nonblocking(socket: RawFd, on: bool) -> io::Result<()> {
    let on = libc::c_int::from(on);
    // SAFETY: `on` is read before the call returns.
    let result = unsafe { libc::ioctl(socket, libc::FIONBIO, &raw const on) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How often another thread took the CPU from this one. Zero where the kernel does not tell.
pub(crate) fn preemptions() -> u64 {
    // SAFETY: `rusage` is integers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: `usage` lives through the call and is exclusively ours.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if result == 0 { u64::try_from(usage.ru_nivcsw).unwrap_or(0) } else { 0 }
}

pub(super) fn receive_into(socket: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the slice is exclusively ours and as long as we say.
    let result = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
