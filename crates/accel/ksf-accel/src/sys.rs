//! System calls that the crates below have no safe form of: options by number, BPF, shared memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use ksf_bpf::{check, link_create};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mm::{MapFlags, ProtFlags};

/// `getsockopt()` of an option of any size; the bytes the kernel wrote.
pub(crate) fn option(socket: BorrowedFd<'_>, level: i32, name: i32, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut value = vec![0u8; bytes_max];
    let mut bytes = bytes_max as libc::socklen_t;
    // SAFETY: `value` is writable for `bytes` bytes, and the kernel writes no more than that.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut bytes) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    value.truncate(bytes as usize);
    Ok(value)
}

/// `getsockopt()` of an `int`.
pub(crate) fn option_i32(socket: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let value = option(socket, level, name, 4)?;
    value.try_into().map(i32::from_ne_bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// `setsockopt()`.
pub(crate) fn set_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    // SAFETY: `value` is readable for its length; options whose value holds pointers do not come this way.
    let rc = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), value.len() as libc::socklen_t)
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Process and effective user that connected a Unix socket, as the kernel noted them then. The process id is 0 where this
/// process namespace does not show it.
pub(crate) fn peer(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    // `struct ucred`: pid, uid, gid.
    let credentials = option(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, size_of::<libc::ucred>())?;
    let word = |at: usize| credentials.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    word(0).zip(word(4)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Process id behind a pidfd. `None`: it has ended.
pub(crate) fn pid_of(pidfd: BorrowedFd<'_>) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok().filter(|pid| *pid > 0)
}

/// The descriptor by which a process has a socket open, `hint` first. An error: /proc does not tell this process.
pub(crate) fn descriptor_of(pid: u32, inode: u64, hint: Option<u32>) -> io::Result<Option<u32>> {
    let folder = format!("/proc/{pid}/fd");
    let wanted = format!("socket:[{inode}]");
    let is_it =
        |fd: u32| std::fs::read_link(format!("{folder}/{fd}")).is_ok_and(|to| to.as_os_str() == wanted.as_str());
    if let Some(fd) = hint.filter(|fd| is_it(*fd)) {
        return Ok(Some(fd));
    }
    let entries = std::fs::read_dir(&folder)?;
    let mut numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(numbers.find(|fd| is_it(*fd)))
}

/// A pidfd of who connected a Unix socket. The kernel knows it since 6.5; before, it is found by its id, which may be
/// another's already.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>, pid: u32) -> io::Result<OwnedFd> {
    // asm-generic/socket.h
    const SO_PEERPIDFD: i32 = 77;
    match option_i32(socket, libc::SOL_SOCKET, SO_PEERPIDFD) {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let pid = rustix::process::Pid::from_raw(pid as i32).ok_or(io::ErrorKind::NotFound)?;
            Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
        }
        Err(error) => Err(error),
    }
}

/// The process of a pidfd has ended.
pub(crate) fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    readable_now(&mut [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)]).is_ok_and(|count| count > 0)
}

/// `poll()` without waiting: how many have something to say.
pub(crate) fn readable_now(fds: &mut [PollFd<'_>]) -> rustix::io::Result<usize> {
    rustix::event::poll(fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
}

/// A name that no other holder has.
pub(crate) fn unique_name() -> io::Result<String> {
    Ok(format!("ksf-accel-{}-{}", std::process::id(), hex(&random::<4>()?)))
}

/// From the kernel.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(bytes)
}

/// As text, two digits a byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The classic filter that `SO_ATTACH_FILTER` gave the socket; empty: none. `EACCES`: it has an eBPF filter.
pub(crate) fn filter(socket: BorrowedFd<'_>) -> io::Result<Vec<libc::sock_filter>> {
    // Number of SO_GET_FILTER (asm-generic/socket.h). Its length counts instructions, not bytes.
    const SO_GET_FILTER: i32 = libc::SO_ATTACH_FILTER;
    let mut filter = vec![libc::sock_filter { code: 0, jt: 0, jf: 0, k: 0 }; 4096];
    let mut len = filter.len() as libc::socklen_t;
    let at = filter.as_mut_ptr().cast();
    // SAFETY: `filter` has room for `len` instructions, which is BPF_MAXINSNS.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_GET_FILTER, at, &raw mut len) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    filter.truncate(len as usize);
    Ok(filter)
}

/// `SO_ATTACH_FILTER` or `SO_ATTACH_REUSEPORT_CBPF`.
pub(crate) fn attach_classic(socket: BorrowedFd<'_>, name: i32, program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: `sock_fprog` points to `len` instructions that live through the call; the kernel only reads them.
    let rc = unsafe {
        let bytes = size_of_val(&program) as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, (&raw const program).cast(), bytes)
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Moves this thread into a network namespace.
pub(crate) fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a descriptor and a flag; it changes what this thread sees of the network, and no memory.
    let rc = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Attaches an sk_lookup program to a network namespace. Ends with the descriptor.
pub(crate) fn attach_lookup(program: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    link_create(program, namespace.as_raw_fd(), libbpf_sys::BPF_SK_LOOKUP, 0)
}

/// Ids of the sk_lookup programs of a network namespace, in the order in which they run.
pub(crate) fn lookup_programs(namespace: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut ids = vec![0u32; 64];
    let mut count = ids.len() as u32;
    let fd = namespace.as_raw_fd();
    // SAFETY: `ids` has room for `count` ids; null stands for "flags not wanted".
    check(unsafe {
        libbpf_sys::bpf_prog_query(
            fd,
            libbpf_sys::BPF_SK_LOOKUP,
            0,
            std::ptr::null_mut(),
            ids.as_mut_ptr(),
            &raw mut count,
        )
    })?;
    ids.truncate(count as usize);
    Ok(ids)
}

/// A shared, writable mapping of a descriptor from its beginning.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain shared memory and belongs to no thread; only atomics are laid over it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice: no existing memory is touched.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)? };
        Ok(Self { at: NonNull::new(at.cast()).expect("mmap never returns null here"), bytes })
    }

    /// The mapping's beginning as a `T`, checked to fit.
    pub(crate) fn at<T>(&self) -> NonNull<T> {
        assert!(size_of::<T>() <= self.bytes && align_of::<T>() <= rustix::param::page_size());
        self.at.cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nobody else unmaps it; borrows live no longer than `self`.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
