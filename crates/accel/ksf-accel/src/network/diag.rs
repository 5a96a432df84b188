//! Netlink's `sock_diag` (sock_diag(7)): asked for listening sockets, the kernel looks at no others, so the time this
//! takes does not grow with the number of connections.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, sockopt};

use super::Listening;

// linux/netlink.h, linux/sock_diag.h
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const HEADER_BYTES: usize = 16;

// linux/inet_diag.h: `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const REQUEST_BYTES: usize = 56;
const MESSAGE_BYTES: usize = 72;
const STATE_LISTEN: u8 = 10;

/// As large as the kernel makes a part of its answer (net/netlink/af_netlink.c, `netlink_dump`).
const PART_BYTES: usize = 32 * 1024;

/// All listening TCP sockets.
pub(super) fn listening() -> io::Result<Vec<Listening>> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    // The kernel answers at once; whatever happens, nobody is to wait here.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_secs(1)))?;
    let mut found = Vec::new();
    let mut part = vec![0; PART_BYTES];
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        rustix::net::send(&socket, &request(family), SendFlags::empty())?;
        loop {
            let (bytes, length) = rustix::net::recv(&socket, &mut part[..], RecvFlags::TRUNC)?;
            if length > bytes {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if read(&part[..bytes], &mut found)? {
                break;
            }
        }
    }
    Ok(found)
}

fn request(family: u8) -> Vec<u8> {
    let bytes = HEADER_BYTES + REQUEST_BYTES;
    let mut request = Vec::with_capacity(bytes);
    request.extend((bytes as u32).to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // Sequence and port: there is one question at a time.
    request.extend([0; 8]);
    request.extend([family, libc::IPPROTO_TCP as u8, 0, 0]);
    request.extend((1u32 << STATE_LISTEN).to_ne_bytes());
    // All addresses.
    request.resize(bytes, 0);
    request
}

/// Takes the messages of one part of an answer; true: it was the last.
fn read(mut part: &[u8], found: &mut Vec<Listening>) -> io::Result<bool> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    while !part.is_empty() {
        let length = u32::from_ne_bytes(array(part, 0).ok_or_else(invalid)?) as usize;
        let kind = u16::from_ne_bytes(array(part, 4).ok_or_else(invalid)?);
        let message = part.get(HEADER_BYTES..length).ok_or_else(invalid)?;
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let errno = i32::from_ne_bytes(array(message, 0).ok_or_else(invalid)?);
                return Err(io::Error::from_raw_os_error(errno.saturating_neg()));
            }
            SOCK_DIAG_BY_FAMILY => found.push(socket(message).ok_or_else(invalid)?),
            _ => {}
        }
        part = part.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// `struct inet_diag_msg`: family and state first, the local port at 4 and the address at 8, both in network order; the
/// inode is the last word.
fn socket(message: &[u8]) -> Option<Listening> {
    let family = i32::from(*message.first()?);
    let address = match family {
        libc::AF_INET => Ipv4Addr::from(array::<4>(message, 8)?).into(),
        libc::AF_INET6 => {
            let address = Ipv6Addr::from(array::<16>(message, 8)?);
            address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
        }
        _ => return None,
    };
    let inode = u32::from_ne_bytes(array(message, MESSAGE_BYTES - 4)?);
    Some(Listening { address, port: u16::from_be_bytes(array(message, 4)?), inode: inode.into() })
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn parts_and_errors_are_told_apart() {
        let mut found = Vec::new();
        let mut body = [0; MESSAGE_BYTES];
        (body[0], body[1]) = (libc::AF_INET as u8, STATE_LISTEN);
        body[4..6].copy_from_slice(&80u16.to_be_bytes());
        body[8..12].copy_from_slice(&[10, 0, 0, 1]);
        body[68..].copy_from_slice(&4711u32.to_ne_bytes());
        let one = message(SOCK_DIAG_BY_FAMILY, &body);
        assert!(!read(&one, &mut found).unwrap());
        assert!(read(&[one.clone(), message(NLMSG_DONE, &[0; 4])].concat(), &mut found).unwrap());
        assert_eq!(found, [Listening { address: "10.0.0.1".parse().unwrap(), port: 80, inode: 4711 }; 2]);
        let refused = message(NLMSG_ERROR, &(-libc::ENOENT).to_ne_bytes());
        assert_eq!(read(&refused, &mut found).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        for broken in [&one[..one.len() - 1], &one[..20], &one[..3], &message(SOCK_DIAG_BY_FAMILY, &body[..8])] {
            assert!(read(broken, &mut found).is_err());
        }
    }
}
