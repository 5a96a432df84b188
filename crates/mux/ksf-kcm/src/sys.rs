//! The calls for which there is no safe wrapper: three ioctls, and socket options.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// include/linux/socket.h.
pub(crate) const AF_KCM: u16 = 41;
const SOL_KCM: libc::c_int = 281;

// include/uapi/linux/kcm.h; the ioctls count from SIOCPROTOPRIVATE (include/uapi/linux/sockios.h).
const KCM_RECV_DISABLE: libc::c_int = 1;
const SIOCPROTOPRIVATE: u32 = 0x89e0;
const SIOCKCMATTACH: u32 = SIOCPROTOPRIVATE;
const SIOCKCMUNATTACH: u32 = SIOCPROTOPRIVATE + 1;
const SIOCKCMCLONE: u32 = SIOCPROTOPRIVATE + 2;

/// include/uapi/asm-generic/socket.h; since Linux 4.12.
const SO_MEMINFO: libc::c_int = 55;
/// Index of `sk_wmem_queued` (include/uapi/linux/sock_diag.h).
const SK_MEMINFO_WMEM_QUEUED: usize = 5;
const SK_MEMINFO_VARS: usize = 9;

/// `tcpi_bytes_received` in struct tcp_info (include/uapi/linux/tcp.h), since Linux 4.1.
const TCPI_BYTES_RECEIVED: usize = 128;

#[repr(C)]
struct Attach {
    fd: libc::c_int,
    bpf_fd: libc::c_int,
}

/// struct kcm_unattach and struct kcm_clone.
#[repr(C)]
struct OneFd {
    fd: libc::c_int,
}

pub(crate) fn attach(kcm: BorrowedFd<'_>, tcp: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut request = Attach { fd: tcp.as_raw_fd(), bpf_fd: program.as_raw_fd() };
    // SAFETY: `Attach` is the kernel's struct kcm_attach, which is what SIOCKCMATTACH reads.
    unsafe { ioctl(kcm, SIOCKCMATTACH, &mut request) }
}

pub(crate) fn unattach(kcm: BorrowedFd<'_>, tcp: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut request = OneFd { fd: tcp.as_raw_fd() };
    // SAFETY: `OneFd` is the kernel's struct kcm_unattach, which is what SIOCKCMUNATTACH reads.
    unsafe { ioctl(kcm, SIOCKCMUNATTACH, &mut request) }
}

pub(crate) fn clone(kcm: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut request = OneFd { fd: -1 };
    // SAFETY: `OneFd` is the kernel's struct kcm_clone, which is what SIOCKCMCLONE writes.
    unsafe { ioctl(kcm, SIOCKCMCLONE, &mut request) }?;
    // SAFETY: the call succeeded, so the kernel has put a new descriptor there; no other code has seen its number.
    let clone = unsafe { OwnedFd::from_raw_fd(request.fd) };
    // The ioctl has no flag for it. A process that is started just now inherits the descriptor nevertheless.
    rustix::io::fcntl_setfd(&clone, rustix::io::FdFlags::CLOEXEC)?;
    Ok(clone)
}

/// # Safety
///
/// The kernel reads and writes one `T` for `request`, and any bytes are a valid `T`.
unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Result<(), Errno> {
    // SAFETY: the descriptor is borrowed and so open; the caller keeps that `T` is what the kernel takes, and the
    // exclusive borrow that it is valid for the time of the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), std::ptr::from_mut(argument)) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

pub(crate) fn set_recv_disabled(kcm: BorrowedFd<'_>, disabled: bool) -> Result<(), Errno> {
    let value = libc::c_int::from(disabled);
    let bytes = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes of `value`, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(kcm.as_raw_fd(), SOL_KCM, KCM_RECV_DISABLE, std::ptr::from_ref(&value).cast(), bytes)
    };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

pub(crate) fn is_recv_disabled(kcm: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut value = [0];
    option(kcm, SOL_KCM, KCM_RECV_DISABLE, &mut value)?;
    Ok(value[0] != 0)
}

/// Bytes that were sent on a KCM socket and that no TCP connection has taken yet.
pub(crate) fn queued_bytes(kcm: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut info = [0; SK_MEMINFO_VARS];
    option(kcm, libc::SOL_SOCKET, SO_MEMINFO, &mut info)?;
    Ok(info[SK_MEMINFO_WMEM_QUEUED] as usize)
}

/// Bytes of the stream a TCP connection has received; the peer's end of it counts as one.
pub(crate) fn received_bytes(tcp: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut info = [0; (TCPI_BYTES_RECEIVED + 8) / 4];
    option(tcp, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    let at = TCPI_BYTES_RECEIVED / 4;
    let [a, b, c, d] = info[at].to_ne_bytes();
    let [e, f, g, h] = info[at + 1].to_ne_bytes();
    Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
}

/// Reads a socket option made of 32-bit words; those the kernel does not know stay 0.
fn option(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, words: &mut [u32]) -> Result<(), Errno> {
    let mut bytes = size_of_val(words) as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `words`, which is as long and borrowed exclusively.
    let result =
        unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, name, words.as_mut_ptr().cast(), &raw mut bytes) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
