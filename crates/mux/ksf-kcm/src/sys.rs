//! The calls for which there is no safe wrapper: three ioctls, and a socket option.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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
    let mut value: libc::c_int = 0;
    let mut bytes = size_of_val(&value) as libc::socklen_t;
    let to = std::ptr::from_mut(&mut value).cast();
    // SAFETY: the kernel writes at most `bytes` bytes to `value`, which is as long and borrowed exclusively.
    let result = unsafe { libc::getsockopt(kcm.as_raw_fd(), SOL_KCM, KCM_RECV_DISABLE, to, &raw mut bytes) };
    if result < 0 { Err(last_error()) } else { Ok(value != 0) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
