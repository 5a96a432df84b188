//! What the tests share: a peer on the other end of a veth, sockets as the library has them, policies.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use ksf_accel::flow::{Layout, source_port};
use ksf_test::stream::{ask, be_patient, echo, serve};
use ksf_test::{FAR, FarEnd, compile, network_on_two_cpus_or_skip, root_or_skip, two_cpus_or_skip, veth};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// The first two CPUs, for tests about two that need root; `None`: the test is skipped.
pub(crate) fn root_on_two_cpus() -> Option<[usize; 2]> {
    root_or_skip("eBPF, network namespaces")?;
    two_cpus_or_skip()
}

/// The same, in a network namespace of the test's own.
pub(crate) fn network_on_two_cpus() -> Option<[usize; 2]> {
    network_on_two_cpus_or_skip("eBPF, network namespaces")
}

/// Where a [`start_peer`] serves.
pub(crate) const ECHO4: &str = "10.9.8.2:7";
pub(crate) const ECHO6: &str = "[fd09::2]:7";
/// Nobody listens there.
pub(crate) const CLOSED: &str = "10.9.8.2:9";

/// A machine on the other end of a veth, which serves echo. `checksum_offload`: it leaves checksums to the device, as a
/// veth's end does by default.
pub(crate) fn start_peer(checksum_offload: bool) -> FarEnd {
    let far = veth();
    if !checksum_offload {
        far.run(|| write_checksums(FAR.0));
    }
    for address in [ECHO4, ECHO6] {
        far.run(move || serve(TcpListener::bind(address).unwrap(), echo));
        // The first packet resolves the address.
        drop(TcpStream::connect(address).expect("the peer answers"));
    }
    far
}

/// Has the stack write the checksums of what an interface of this thread's network sends (`ethtool -K IFACE tx off`).
fn write_checksums(interface: &str) {
    /// `struct ethtool_value` and `ETHTOOL_STXCSUM` of linux/ethtool.h.
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value { command: 0x17, data: 0 };
    // SAFETY: an ifreq is numbers and a pointer; zeros are valid for all of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // SAFETY: the request and the value it points to live for the call; the name ends with a zero.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

/// A TCP socket that is not connected.
pub(crate) fn tcp_socket(to: &SocketAddr) -> OwnedFd {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// An address as connect(2) takes it: the bytes and how many of them count.
pub(crate) fn raw_address(to: &SocketAddr) -> ([u8; 28], libc::socklen_t) {
    let mut bytes = [0; 28];
    bytes[2..4].copy_from_slice(&to.port().to_be_bytes());
    let (family, length) = match to {
        SocketAddr::V4(to) => {
            bytes[4..8].copy_from_slice(&to.ip().octets());
            (libc::AF_INET, 16)
        }
        SocketAddr::V6(to) => {
            bytes[8..24].copy_from_slice(&to.ip().octets());
            (libc::AF_INET6, 28)
        }
    };
    bytes[..2].copy_from_slice(&(family as libc::sa_family_t).to_ne_bytes());
    (bytes, length)
}

/// Connects a socket as a program under the preload library does.
pub(crate) fn connect_by_library(layout: &Layout, loopback: bool, socket: RawFd, to: &SocketAddr) -> io::Result<()> {
    let (address, length) = raw_address(to);
    let pointer: *const libc::sockaddr = address.as_ptr().cast();
    // SAFETY: connect(2) with an address that lives for the call.
    let result = unsafe {
        source_port::connect(layout, loopback, socket, pointer, length, || libc::connect(socket, pointer, length))
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One exchange over a connected socket. A reply that does not come fails the test.
pub(crate) fn exchange(stream: &mut TcpStream, bytes: usize) {
    be_patient(stream);
    let sent = vec![b'x'; bytes];
    ask(stream, &sent, &sent);
}

/// The CPU that processed what the socket received last.
pub(crate) fn incoming_cpu(stream: &TcpStream) -> usize {
    let cpu = rustix::net::sockopt::socket_incoming_cpu(stream).unwrap();
    assert!(i32::try_from(cpu).is_ok(), "nothing was received");
    cpu as usize
}

/// Compiles a policy as the example's Makefile does, against the headers as they are installed.
pub(crate) fn compile_policy(source: &Path, flags: &[&str]) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("policy-{}-{number}", std::process::id()));
    ksf_bpf::write_sdk(&folder, &[ksf_accel::flow::SDK]).unwrap();
    let object = folder.join("policy.bpf.o");
    compile::bpf(source, &object, &folder, flags);
    object
}
