//! Source ports for active connections of this process: what a preload library does around connect(2).
//!
//! Nothing here allocates, takes a lock, or changes `errno` but where it says so: it runs inside of any program, also
//! between fork and exec, and in signal handlers (connect is async-signal-safe).

use std::io;
use std::os::fd::RawFd;

use crate::Layout;

/// `IP_LOCAL_PORT_RANGE` of linux/in.h, kernel 6.3 (91d0b78c5177). At level IPPROTO_IP for IPv6 sockets, too.
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;

/// What was done with a socket before its connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Its port will come from the chunk of the CPU that called.
    Chosen,
    /// Left alone: the program has chosen the port, or is connected already.
    Bound,
    /// Left alone: the program has set a port range of its own.
    OwnRange,
    /// Left alone: not a TCP socket, or not an internet address.
    NotTcp,
    /// Left alone: to a loopback address, which the caller did not want.
    Loopback,
    /// Left alone: on a CPU that has no chunk.
    NoChunk,
    /// Left alone: the kernel has no IP_LOCAL_PORT_RANGE (before 6.3), or a sandbox forbids it.
    Unsupported,
}

/// Connects as the program wanted, from a port of the chunk of the CPU that calls.
///
/// `connect` makes the program's call: connect(2) with these arguments. Returns what it returned, and leaves `errno` as it
/// left it. A program without us would have had every port of the range: so if the chunk has none left for this
/// destination (EADDRNOTAVAIL), the range is given back and the call repeated.
///
/// `loopback`: choose for loopback addresses, too. There the SYN runs on the caller's CPU anyway.
///
/// # Safety
///
/// `address` is null or readable for `bytes` bytes.
pub unsafe fn connect(
    layout: &Layout,
    loopback: bool,
    socket: RawFd,
    address: *const libc::sockaddr,
    bytes: libc::socklen_t,
    mut connect: impl FnMut() -> libc::c_int,
) -> libc::c_int {
    // SAFETY: the caller's promise about `address`.
    let choice = unsafe { choose(layout, loopback, socket, address, bytes) };
    let before = errno();
    let result = connect();
    if choice != Choice::Chosen || result == 0 || errno() != libc::EADDRNOTAVAIL {
        return result;
    }
    if !set_range(socket, 0) {
        return fail(libc::EADDRNOTAVAIL);
    }
    set_errno(before);
    connect()
}

/// As [`choose`], for a CPU that need not be the caller's, and without a look at the socket's kind. Sets `errno` where it
/// fails.
pub fn choose_for_cpu(layout: &Layout, socket: RawFd, cpu: usize) -> io::Result<()> {
    let range = layout.option_of(cpu).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    if set_range(socket, range) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives a socket that is about to connect the port range of the CPU that calls.
///
/// A connect that fails with EADDRNOTAVAIL after [`Choice::Chosen`] has found no port in the chunk; [`connect`] deals with
/// that.
///
/// # Safety
///
/// `address` is null or readable for `bytes` bytes.
pub unsafe fn choose(
    layout: &Layout,
    loopback: bool,
    socket: RawFd,
    address: *const libc::sockaddr,
    bytes: libc::socklen_t,
) -> Choice {
    let before = errno();
    // SAFETY: the caller's promise.
    let choice = unsafe { Destination::read(address, bytes) }.map_or(Choice::NotTcp, |to| {
        if !is_tcp(socket) {
            Choice::NotTcp
        } else if to == Destination::Loopback && !loopback {
            Choice::Loopback
        } else {
            choose_range(layout, socket)
        }
    });
    set_errno(before);
    choice
}

fn choose_range(layout: &Layout, socket: RawFd) -> Choice {
    if has_port(socket) {
        return Choice::Bound;
    }
    // SAFETY: no arguments. It is answered from memory shared with the kernel, as a rule.
    let cpu = unsafe { libc::sched_getcpu() };
    let Some(range) = usize::try_from(cpu).ok().and_then(|cpu| layout.option_of(cpu)) else { return Choice::NoChunk };
    match option_u32(socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE) {
        None => return Choice::Unsupported,
        Some(0) => {}
        // A chunk of ours: an earlier connect of this socket failed, maybe on another CPU.
        Some(old) if layout.cpu_of_port(old as u16).and_then(|cpu| layout.option_of(cpu)) == Some(old) => {}
        Some(_) => return Choice::OwnRange,
    }
    if set_range(socket, range) { Choice::Chosen } else { Choice::Unsupported }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Destination {
    Loopback,
    Elsewhere,
}

impl Destination {
    /// `None`: not an internet address, or cut off (the kernel will say so).
    ///
    /// # Safety
    ///
    /// `address` is null or readable for `bytes` bytes.
    unsafe fn read(address: *const libc::sockaddr, bytes: libc::socklen_t) -> Option<Self> {
        let bytes = bytes as usize;
        if address.is_null() || bytes < size_of::<libc::sa_family_t>() {
            return None;
        }
        // SAFETY: not null and long enough (checked above); a program's address need not be aligned.
        let family = unsafe { (&raw const (*address).sa_family).read_unaligned() };
        let is_loopback = match i32::from(family) {
            libc::AF_INET if bytes >= size_of::<libc::sockaddr_in>() => {
                // SAFETY: as long as a sockaddr_in (checked).
                let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
                address.sin_addr.s_addr.to_ne_bytes()[0] == 127
            }
            // As far as the address: the kernel takes one without a scope, too (SIN6_LEN_RFC2133).
            libc::AF_INET6 if bytes >= 24 => {
                let mut six = [0u8; 16];
                // SAFETY: 16 bytes from offset 8 on lie within the 24 checked above; `six` is ours.
                unsafe { six.as_mut_ptr().copy_from_nonoverlapping(address.cast::<u8>().add(8), 16) };
                let six = std::net::Ipv6Addr::from(six);
                six.is_loopback() || six.to_ipv4_mapped().is_some_and(|four| four.is_loopback())
            }
            _ => return None,
        };
        Some(if is_loopback { Self::Loopback } else { Self::Elsewhere })
    }
}

/// MPTCP is a protocol of its own here: its subflows choose their ports later.
fn is_tcp(socket: RawFd) -> bool {
    option_u32(socket, libc::SOL_SOCKET, libc::SO_TYPE) == Some(libc::SOCK_STREAM as u32)
        && option_u32(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP as u32)
}

/// Whether the socket has a port: bound to one, connected, or about to be.
fn has_port(socket: RawFd) -> bool {
    let mut address = [0u8; size_of::<libc::sockaddr_in6>()];
    let mut bytes = address.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, which is the array's length.
    let result = unsafe { libc::getsockname(socket, address.as_mut_ptr().cast(), &raw mut bytes) };
    // The port is at the same place in both families. Unknown counts as bound: left alone.
    result != 0 || address[2..4] != [0, 0]
}

fn set_range(socket: RawFd, range: u32) -> bool {
    let bytes = size_of_val(&range) as libc::socklen_t;
    // SAFETY: the kernel reads four bytes of `range`, which lives for the call.
    let result = unsafe {
        libc::setsockopt(socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, std::ptr::from_ref(&range).cast(), bytes)
    };
    result == 0
}

fn option_u32(socket: RawFd, level: libc::c_int, option: libc::c_int) -> Option<u32> {
    let mut value = 0u32;
    let mut bytes = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most four bytes to `value`.
    let result =
        unsafe { libc::getsockopt(socket, level, option, std::ptr::from_mut(&mut value).cast(), &raw mut bytes) };
    (result == 0).then_some(value)
}

fn errno() -> libc::c_int {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: libc::c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = value };
}

fn fail(error: libc::c_int) -> libc::c_int {
    set_errno(error);
    -1
}
