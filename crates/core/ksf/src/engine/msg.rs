//! Message headers for sendmsg and recvmsg: addresses, and the control data that says where a datagram was sent to.

use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::RawFd;

use crate::env::Env;
use crate::output::SendBatch;

/// Room for an IPv6 pktinfo control message, the larger of the two, and for the length of segments.
pub(crate) const CONTROL_BYTES: usize = 64;

/// Slices sent by one system call.
pub(crate) const SLICES_MAX: usize = 16;

/// Everything a sendmsg to a stream points to. Its address must not change while the kernel uses it: boxed, if that is
/// longer than a call.
pub(crate) struct SendMsg {
    header: libc::msghdr,
    slices: [libc::iovec; SLICES_MAX],
}

impl SendMsg {
    pub(crate) fn boxed() -> Box<Self> {
        // SAFETY: all fields are plain data for which zero is a valid value (null pointers, lengths of 0).
        Box::new(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    /// Points to these bytes; returns the header for the system call. The caller keeps `slices` and this box alive and in
    /// place until the call (or its completion) is over.
    pub(crate) fn prepare(&mut self, slices: &[&[u8]]) -> *const libc::msghdr {
        for (to, from) in self.slices.iter_mut().zip(slices) {
            *to = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        }
        self.header.msg_iov = self.slices.as_mut_ptr();
        self.header.msg_iovlen = slices.len().min(SLICES_MAX);
        &self.header
    }
}

/// Control data, aligned as the kernel wants it.
#[repr(C, align(8))]
pub(crate) struct Control([u8; CONTROL_BYTES]);

impl Default for Control {
    fn default() -> Self {
        Self([0; CONTROL_BYTES])
    }
}

impl Control {
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub(crate) fn bytes(&self) -> &[u8; CONTROL_BYTES] {
        &self.0
    }
}

/// Room for the address of a datagram's peer, as the kernel writes and reads it.
#[derive(Default)]
#[repr(C, align(8))]
pub(crate) struct Name([u8; Self::BYTES]);

impl Name {
    pub(crate) const BYTES: usize = mem::size_of::<libc::sockaddr_in6>();

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub(crate) fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Writes an address; returns its length. What [`socket_addr`] reads.
    #[inline]
    pub(crate) fn set(&mut self, addr: SocketAddr) -> libc::socklen_t {
        let to = &mut self.0;
        to[2..4].copy_from_slice(&addr.port().to_be_bytes());
        match addr {
            SocketAddr::V4(addr) => {
                to[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                to[4..8].copy_from_slice(&addr.ip().octets());
                to[8..16].fill(0);
                mem::size_of::<libc::sockaddr_in>() as libc::socklen_t
            }
            SocketAddr::V6(addr) => {
                to[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                to[4..8].copy_from_slice(&addr.flowinfo().to_be_bytes());
                to[8..24].copy_from_slice(&addr.ip().octets());
                to[24..28].copy_from_slice(&addr.scope_id().to_ne_bytes());
                Self::BYTES as libc::socklen_t
            }
        }
    }
}

/// Sends what the socket takes now. Returns the number of bytes; the batch is empty when that was all of it. `last`: the
/// end may wait for the FIN that follows.
///
/// While TCP is short of memory (net.ipv4.tcp_mem), a socket under a sockmap verdict refuses each send with EFAULT, as long
/// as bytes that were passed to user space wait in it: the kernel charges them to the socket without asking for memory
/// (sk_psock_skb_ingress_self), and takes what is left, a negative number, for the length that it may copy
/// (tcp_wmem_schedule, Linux 6.1 to 6.18). Nothing was sent then, and the connection is sound: that is no failure, but a
/// socket without room. Where the bytes themselves cannot be read, a damaged page of persistent memory, the limit on the time
/// of a send ends the connection.
pub(crate) fn send_now(
    socket: RawFd,
    batch: &mut SendBatch,
    last: bool,
    msg: &mut SendMsg,
    env: &mut Env,
) -> io::Result<usize> {
    let mut sent = 0;
    while !batch.is_empty() {
        env.stats.syscalls.add(1);
        let (offered, result) = match batch.as_slice() {
            Some(bytes) => (bytes.len(), send_slice(socket, bytes, last)),
            None => send_slices(socket, batch, last, msg),
        };
        match result {
            Ok(bytes) => {
                batch.advance(bytes, &mut env.spares);
                sent += bytes;
                if bytes < offered {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::EFAULT) => {
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

/// `more`: the kernel may wait for what comes next.
fn send_flags(more: bool) -> libc::c_int {
    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 }
}

fn send_slice(socket: RawFd, bytes: &[u8], more: bool) -> io::Result<usize> {
    // SAFETY: the slice lives through the call.
    let result = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), send_flags(more)) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends as many pieces as go in one call. Returns how many bytes they have, and what was sent of them.
#[inline(never)]
fn send_slices(socket: RawFd, batch: &SendBatch, last: bool, msg: &mut SendMsg) -> (usize, io::Result<usize>) {
    let mut slices = [&[][..]; SLICES_MAX];
    let filled = batch.slices(&mut slices);
    let offered: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
    // What this call has no room for follows at once, and must not begin another segment.
    let more = last || offered < batch.len();
    if let [only] = slices[..filled] {
        return (offered, send_slice(socket, only, more));
    }
    // SAFETY: the header points into `msg` and to the slices, which live through the call.
    let result = unsafe { libc::sendmsg(socket, msg.prepare(&slices[..filled]), send_flags(more)) };
    (offered, usize::try_from(result).map_err(|_| io::Error::last_os_error()))
}

/// Converts an address for the kernel.
pub(crate) fn sockaddr(addr: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    let addr = socket2::SockAddr::from(addr);
    let len = addr.len();
    // SAFETY: socket2's storage type is a transparent wrapper of the C structure, which is plain data.
    let storage = unsafe { mem::transmute_copy(&addr.as_storage()) };
    (storage, len)
}

/// Converts an address from the kernel; `None` for a family that is not IP.
pub(crate) fn socket_addr(bytes: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match family {
        libc::AF_INET => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(SocketAddrV4::new(Ipv4Addr::from(ip), port).into())
        }
        libc::AF_INET6 => {
            let flow = u32::from_be_bytes(bytes.get(4..8)?.try_into().ok()?);
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let scope = u32::from_ne_bytes(bytes.get(24..28)?.try_into().ok()?);
            Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope).into())
        }
        _ => None,
    }
}

/// Finds the address to answer from in control data: `struct cmsghdr` is a length (8 bytes), a level and a type (4 each);
/// `in_pktinfo` is index, chosen source, destination; `in6_pktinfo` is destination, index. The two of IPv4 differ for
/// broadcasts and multicasts, whose destination is no host to send from: the chosen source then is of the interface. For IPv6
/// it is left to the kernel.
pub(crate) fn read_pktinfo(mut control: &[u8]) -> Option<(IpAddr, u32)> {
    while control.len() >= 16 {
        let len = usize::try_from(u64::from_ne_bytes(control[..8].try_into().ok()?)).ok()?;
        let level = i32::from_ne_bytes(control[8..12].try_into().ok()?);
        let kind = i32::from_ne_bytes(control[12..16].try_into().ok()?);
        let data = control.get(16..len)?;
        if level == libc::IPPROTO_IP && kind == libc::IP_PKTINFO {
            let index = u32::from_ne_bytes(data.get(..4)?.try_into().ok()?);
            let source: [u8; 4] = data.get(4..8)?.try_into().ok()?;
            return Some((Ipv4Addr::from(source).into(), index));
        }
        if level == libc::IPPROTO_IPV6 && kind == libc::IPV6_PKTINFO {
            let destination: [u8; 16] = data.get(..16)?.try_into().ok()?;
            let destination = Ipv6Addr::from(destination);
            let source = if destination.is_multicast() { Ipv6Addr::UNSPECIFIED } else { destination };
            let index = u32::from_ne_bytes(data.get(16..20)?.try_into().ok()?);
            return Some((source.into(), index));
        }
        control = control.get(len.next_multiple_of(8)..)?;
    }
    None
}

/// Asks the kernel to send from `local`.
pub(crate) fn write_pktinfo(control: &mut Control, local: IpAddr, interface: u32) -> usize {
    let mut data = [0; 20];
    let (level, kind, len) = match local {
        IpAddr::V4(ip) => {
            // The source goes where the kernel reads `ipi_spec_dst`; the routing table chooses the interface.
            data[4..8].copy_from_slice(&ip.octets());
            (libc::IPPROTO_IP, libc::IP_PKTINFO, 12)
        }
        IpAddr::V6(ip) => {
            data[..16].copy_from_slice(&ip.octets());
            let link_local = ip.is_unicast_link_local();
            data[16..20].copy_from_slice(&(if link_local { interface } else { 0 }).to_ne_bytes());
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20)
        }
    };
    control.0[..8].copy_from_slice(&(16 + len as u64).to_ne_bytes());
    control.0[8..12].copy_from_slice(&level.to_ne_bytes());
    control.0[12..16].copy_from_slice(&kind.to_ne_bytes());
    control.0[16..16 + len].copy_from_slice(&data[..len]);
    (16 + len).next_multiple_of(8)
}

/// Has the kernel cut what is sent into datagrams of `bytes` bytes; behind the `len` bytes that are filled. Returns how many
/// are filled then.
pub(crate) fn write_segment_bytes(control: &mut Control, len: usize, bytes: u16) -> usize {
    let to = &mut control.0[len..];
    to[..8].copy_from_slice(&(16 + mem::size_of_val(&bytes) as u64).to_ne_bytes());
    to[8..12].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
    to[12..16].copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
    to[16..18].copy_from_slice(&bytes.to_ne_bytes());
    len + 24
}

/// Whether an option of a socket is on; `None`: it has no such option.
pub(crate) fn is_option_on(fd: RawFd, level: libc::c_int, name: libc::c_int) -> Option<bool> {
    let (mut on, mut len) = (0 as libc::c_int, mem::size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: `on` has room for `len` bytes, and both live through the call.
    let result = unsafe { libc::getsockopt(fd, level, name, (&raw mut on).cast(), &raw mut len) };
    (result == 0).then_some(on != 0)
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["127.0.0.1:80", "[fe80::1%3]:443"] {
            let addr: SocketAddr = text.parse().unwrap();
            let (storage, len) = sockaddr(addr);
            // SAFETY: plain data, read as bytes of its own length.
            let bytes = unsafe { std::slice::from_raw_parts(ptr::from_ref(&storage).cast::<u8>(), len as usize) };
            assert_eq!(socket_addr(bytes), Some(addr));
            let mut name = Name([0xff; _]);
            assert_eq!(name.set(addr), len);
            assert_eq!(&name.bytes()[..len as usize], bytes);
        }
        assert_eq!(socket_addr(&[1, 0, 0]), None);
    }

    #[test]
    fn control_data_is_read_as_the_kernel_writes_it_and_never_beyond_its_end() {
        let mut control = Control([0; CONTROL_BYTES]);
        let v6: IpAddr = "fe80::2".parse().unwrap();
        let len = write_pktinfo(&mut control, v6, 7);
        assert_eq!(read_pktinfo(&control.0[..len]), Some((v6, 7)));
        // A group of hosts is not an address to answer from: the kernel chooses one.
        let len_v6 = write_pktinfo(&mut control, "ff02::1".parse().unwrap(), 0);
        assert_eq!(read_pktinfo(&control.0[..len_v6]), Some((Ipv6Addr::UNSPECIFIED.into(), 0)));
        // What the kernel writes for IPv4 also has the interface, and the destination in the packet, here of a broadcast.
        let len = write_pktinfo(&mut control, "10.0.0.1".parse().unwrap(), 0);
        control.0[16..20].copy_from_slice(&3u32.to_ne_bytes());
        control.0[24..28].copy_from_slice(&[10, 0, 0, 255]);
        assert_eq!(read_pktinfo(&control.0[..len]), Some(("10.0.0.1".parse().unwrap(), 3)));
        for short in 0..len {
            let _ = read_pktinfo(&control.0[..short]);
        }
        control.0[..8].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(read_pktinfo(&control.0), None);
    }
}
