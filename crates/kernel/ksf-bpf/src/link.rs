//! Links and descriptors.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// libbpf's convention: a negative errno, and errno set.
pub fn check(rc: i32) -> io::Result<i32> {
    if rc < 0 { Err(io::Error::from_raw_os_error(-rc)) } else { Ok(rc) }
}

/// The same for a call that makes a descriptor.
///
/// # Safety
///
/// The descriptor, if it is one, was made by that call, and nobody else owns it.
pub unsafe fn owned(rc: i32) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    check(rc).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Attaches a program by a link, which ends with its descriptor, so also with the process. `target`: the descriptor of a
/// network namespace or of a folder of cgroup2, or an interface's index, as `kind` asks.
pub fn link_create(
    program: BorrowedFd<'_>,
    target: i32,
    kind: libbpf_sys::bpf_attach_type,
    flags: u32,
) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: `opts` is valid for the call and says its size; the kernel has just made the descriptor.
    unsafe { owned(libbpf_sys::bpf_link_create(program.as_raw_fd(), target, kind, &raw const opts)) }
}

/// The cookie of this thread's network namespace (`SO_NETNS_COOKIE` of asm-generic/socket.h, kernel 5.14).
pub fn network_cookie() -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    let mut cookie = 0u64;
    let mut bytes = size_of_val(&cookie) as libc::socklen_t;
    let value = (&raw mut cookie).cast();
    // SAFETY: the kernel writes at most `bytes` bytes to `cookie`, which has as many.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut bytes) };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}
