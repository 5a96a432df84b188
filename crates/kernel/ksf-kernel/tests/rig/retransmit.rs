//! A segment as TCP sends it after a loss: bytes that had arrived, joined to new ones.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const TCP_HEADER_BYTES: usize = 20;
const ACK_PSH: u8 = 0x18;
const FIN: u8 = 0x01;

/// Sends the server `repeated`, the last bytes `client` sent, and then `fresh`, which it has not sent yet, in one
/// segment. The client's own TCP knows nothing of it: it takes the server's answer for a mistake and drops it, and gets
/// it again when it has sent `fresh` itself. Needs IPv4 and root.
pub(crate) fn send_joined(client: &TcpStream, repeated: &[u8], fresh: &[u8]) {
    send(client, ACK_PSH, repeated, fresh);
}

/// The same, and the end of the client's direction with it.
pub(crate) fn send_joined_and_end(client: &TcpStream, repeated: &[u8], fresh: &[u8]) {
    send(client, ACK_PSH | FIN, repeated, fresh);
}

fn send(client: &TcpStream, flags: u8, repeated: &[u8], fresh: &[u8]) {
    let (SocketAddr::V4(local), SocketAddr::V4(peer)) = (client.local_addr().unwrap(), client.peer_addr().unwrap())
    else {
        panic!("IPv4 only")
    };
    let [next_out, next_in] = sequence_numbers(client);
    let mut segment = Vec::with_capacity(TCP_HEADER_BYTES + repeated.len() + fresh.len());
    segment.extend_from_slice(&local.port().to_be_bytes());
    segment.extend_from_slice(&peer.port().to_be_bytes());
    segment.extend_from_slice(&next_out.wrapping_sub(repeated.len() as u32).to_be_bytes());
    segment.extend_from_slice(&next_in.to_be_bytes());
    segment.extend_from_slice(&[(TCP_HEADER_BYTES as u8 / 4) << 4, flags]);
    segment.extend_from_slice(&512u16.to_be_bytes()); // window, scaled
    segment.extend_from_slice(&[0; 4]); // checksum, urgent pointer
    segment.extend_from_slice(repeated);
    segment.extend_from_slice(fresh);
    let sum = checksum(*local.ip(), *peer.ip(), &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    send_raw(*peer.ip(), &segment).expect("a raw socket sends");
}

/// Of the next byte to send and the next to come (`TCP_REPAIR`, Linux 3.5).
fn sequence_numbers(client: &TcpStream) -> [u32; 2] {
    // linux/tcp.h; leaving repair mode without a window probe is from 4.17.
    const REPAIR_ON: libc::c_int = 1;
    const REPAIR_OFF_NO_PROBE: libc::c_int = -1;
    const RECV_QUEUE: libc::c_int = 1;
    const SEND_QUEUE: libc::c_int = 2;
    set(client, libc::TCP_REPAIR, REPAIR_ON);
    let numbers = [SEND_QUEUE, RECV_QUEUE].map(|queue| {
        set(client, libc::TCP_REPAIR_QUEUE, queue);
        let mut value = MaybeUninit::<u32>::uninit();
        let mut len = size_of::<u32>() as libc::socklen_t;
        // SAFETY: `value` has room for the `len` bytes the kernel writes.
        let rc = unsafe {
            libc::getsockopt(
                client.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_QUEUE_SEQ,
                value.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        // SAFETY: the call succeeded, so the kernel has written a whole u32.
        unsafe { value.assume_init() }
    });
    set(client, libc::TCP_REPAIR, REPAIR_OFF_NO_PROBE);
    numbers
}

fn set(client: &TcpStream, option: libc::c_int, value: libc::c_int) {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`.
    let rc = unsafe { libc::setsockopt(client.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), len) };
    assert_eq!(rc, 0, "{}", io::Error::last_os_error());
}

/// RFC 9293, section 3.1, over the pseudo header.
fn checksum(from: Ipv4Addr, to: Ipv4Addr, segment: &[u8]) -> u16 {
    let pseudo = [&from.octets()[..], &to.octets(), &[0, libc::IPPROTO_TCP as u8]].concat();
    let words = |bytes: &[u8]| -> u64 {
        bytes.chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0))).sum()
    };
    let mut sum = words(&pseudo) + segment.len() as u64 + words(segment);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn send_raw(to: Ipv4Addr, segment: &[u8]) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = std::net::SocketAddrV4::new(to, 0);
    rustix::net::sendto(&socket, segment, rustix::net::SendFlags::empty(), &to)?;
    Ok(())
}
