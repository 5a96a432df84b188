//! The two system calls that the safe wrappers lack. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// Lets bind choose an address without a port: connect chooses the port, and may take one that another socket of the
/// same address uses towards another destination (IP_BIND_ADDRESS_NO_PORT, Linux 4.2).
pub(crate) fn bind_address_no_port(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open while it is borrowed, and the kernel reads the size of an int from `on`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Nanoseconds of user and system time of a process, threads that have ended included; `None` if there is no such
/// process. Reaped children are not included.
pub fn process_cpu_ns(pid: u32) -> Option<u64> {
    /// CPUCLOCK_SCHED of include/linux/posix-timers_types.h: precise to the nanosecond.
    const SCHED: libc::clockid_t = 2;
    // The clock of another process, as clock_getcpuclockid(3) makes it.
    let clock = (!(pid as libc::clockid_t)) << 3 | SCHED;
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the kernel writes a timespec to `time`, or fails.
    let result = unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so the kernel has written it.
    let time = unsafe { time.assume_init() };
    Some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::clock::thread_cpu_ns;

    #[test]
    fn the_clock_of_a_process_counts_its_threads_also_when_they_have_ended() {
        let before = process_cpu_ns(std::process::id()).unwrap();
        let used = std::thread::spawn(|| {
            while thread_cpu_ns() < 20_000_000 {}
            thread_cpu_ns()
        });
        let used = used.join().unwrap();
        assert!(process_cpu_ns(std::process::id()).unwrap() - before >= used);
        // No process has the largest number (proc(5), pid_max).
        assert_eq!(process_cpu_ns(i32::MAX as u32 >> 3), None);
    }

    #[test]
    fn two_sockets_of_an_address_may_share_a_port() {
        let servers = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        bind_address_no_port(&socket).unwrap();
        socket.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
        assert_eq!(socket.local_addr().unwrap().as_socket().unwrap().port(), 0, "bind chose no port");
        socket.connect(&servers[0].local_addr().unwrap().into()).unwrap();
        assert_ne!(socket.local_addr().unwrap().as_socket().unwrap().port(), 0);
    }
}
