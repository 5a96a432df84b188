//! Socket options that shards and listeners use.

use std::io;
use std::net::{Ipv6Addr, TcpListener};
use std::os::fd::AsRawFd;

use super::machine::Machine;
use super::verdict::{Lack, Probe, Verdict};

/// The probes.
pub(crate) const PROBES: &[Probe] = &[
    Probe {
        name: "net_reuseport_steering",
        title: "one listener per shard, chosen by the CPU of the SYN",
        fallback: "the kernel spreads connections by a hash; some cross CPUs",
        run: reuseport_steering,
    },
    Probe {
        name: "net_ipv6_loopback",
        title: "listen on [::1]",
        fallback: "the default listeners are IPv4 only",
        run: ipv6_loopback,
    },
];

fn reuseport_steering(_: &Machine) -> Verdict {
    // "Return the number of this CPU": classic BPF, one ancillary load and a return.
    const AD_CPU: u32 = (-0x1000_i32 + 36) as u32;
    let mut code = [
        libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: AD_CPU },
        libc::sock_filter { code: (libc::BPF_RET | libc::BPF_A) as u16, jt: 0, jf: 0, k: 0 },
    ];
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    let result = tcp_socket().and_then(|socket| {
        set_option(&socket, libc::SO_REUSEPORT, &1_i32)?;
        set_option(&socket, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
    });
    match result {
        Ok(()) => Verdict::works("SO_ATTACH_REUSEPORT_CBPF accepted (kernel 4.5)"),
        Err(error) => Verdict::Fails(Lack::errno(
            &error,
            format!("the kernel refuses SO_ATTACH_REUSEPORT_CBPF: {error}"),
            "boot Linux 4.5 or later; in a sandbox allow setsockopt",
        )),
    }
}

fn ipv6_loopback(_: &Machine) -> Verdict {
    match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        Ok(_) => Verdict::works("bound"),
        Err(error) => Verdict::Fails(Lack::errno(
            &error,
            "IPv6 is off on loopback (net.ipv6.conf.lo.disable_ipv6, or a kernel without IPv6)",
            "sysctl -w net.ipv6.conf.lo.disable_ipv6=0",
        )),
    }
}

fn tcp_socket() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn set_option<T>(socket: &impl AsRawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the kernel reads `size_of::<T>()` bytes of `value`
    // (and, for a filter program, the instructions it points to) before the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
