//! What user space asks a TCP socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The counts of `struct tcp_info` (linux/tcp.h) that tell what TCP has taken and given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TcpCounts {
    /// Bytes received in order, the FIN counted as one.
    pub(crate) received: u64,
    /// Bytes TCP has taken for sending, sent or not, each counted once.
    pub(crate) taken: u64,
}

// Offsets in struct tcp_info, stable since the fields came: bytes_received (Linux 4.1), notsent_bytes (4.6),
// bytes_sent and bytes_retrans (4.19).
const BYTES_RECEIVED: usize = 128;
const NOTSENT_BYTES: usize = 144;
const BYTES_SENT: usize = 200;
const BYTES_RETRANS: usize = 208;
const TCP_INFO_BYTES: usize = 216;

/// Asks for the counts. Takes the socket's lock: no verdict program is running on it any more when this returns.
pub(crate) fn counts(socket: BorrowedFd<'_>) -> io::Result<TcpCounts> {
    let mut info = [0u8; TCP_INFO_BYTES];
    let got = sockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    if got < TCP_INFO_BYTES {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "struct tcp_info ends before tcpi_bytes_retrans"));
    }
    let u64_at = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().expect("eight bytes"));
    let u32_at = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("four bytes"));
    Ok(TcpCounts {
        received: u64_at(BYTES_RECEIVED),
        taken: u64_at(BYTES_SENT) - u64_at(BYTES_RETRANS) + u64::from(u32_at(NOTSENT_BYTES)),
    })
}

/// The socket's cookie: a number the kernel never uses twice.
pub(crate) fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie = [0u8; 8];
    sockopt(socket, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

pub(crate) fn set_rcvlowat(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_int(socket, libc::SO_RCVLOWAT, bytes as i32)
}

/// Sets SO_SNDBUF beyond the system's limit (needs CAP_NET_ADMIN), or up to it.
pub(crate) fn set_sndbuf(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_int(socket, libc::SO_SNDBUFFORCE, bytes as i32).or_else(|_| set_int(socket, libc::SO_SNDBUF, bytes as i32))
}

fn set_int(socket: BorrowedFd<'_>, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option value is an int that lives for the call, and its size is given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn sockopt(socket: BorrowedFd<'_>, level: i32, option: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: `value` is writable for `len` bytes; the kernel writes no more and says how much.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(len as usize) }
}
