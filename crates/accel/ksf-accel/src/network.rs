//! Listening sockets of this network namespace, by netlink's `sock_diag` (sock_diag(7)). The kernel looks at no other
//! sockets, so the time does not grow with the number of connections.

use std::io;
use std::net::IpAddr;

use ksf_nic::netlink::{Attributes, NLM_F_DUMP, NetlinkSocket, SOCK_DIAG};

// linux/sock_diag.h; linux/inet_diag.h: `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const REQUEST_BYTES: usize = 56;
const MESSAGE_BYTES: usize = 72;
const STATE_LISTEN: u8 = 10;

/// A listening TCP socket of any process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listening {
    /// A mapped address comes as IPv4, as requests to it do.
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    pub(crate) inode: u64,
}

/// All listening TCP sockets of this thread's network namespace.
///
/// # Errors
///
/// The kernel lacks the module `inet_diag`, or a filter of system calls forbids the socket.
pub(crate) fn listening() -> io::Result<Vec<Listening>> {
    let kernel = NetlinkSocket::open(Some(SOCK_DIAG))?;
    let mut found = Vec::new();
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        for message in kernel.ask(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &request(family), &Attributes::default())? {
            found.push(socket(&message).ok_or(io::ErrorKind::InvalidData)?);
        }
    }
    Ok(found)
}

fn request(family: u8) -> Vec<u8> {
    let mut request = vec![family, libc::IPPROTO_TCP as u8, 0, 0];
    request.extend((1u32 << STATE_LISTEN).to_ne_bytes());
    // All addresses.
    request.resize(REQUEST_BYTES, 0);
    request
}

/// `struct inet_diag_msg`: family and state first, the local port at 4 and the address at 8, both in network order; the
/// inode is the last word.
fn socket(message: &[u8]) -> Option<Listening> {
    let family = i32::from(*message.first()?);
    let address = match family {
        libc::AF_INET => IpAddr::from(array::<4>(message, 8)?),
        libc::AF_INET6 => IpAddr::from(array::<16>(message, 8)?).to_canonical(),
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
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn listeners_are_found_and_connections_are_not() {
        let listeners = ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"].map(|it| TcpListener::bind(it).unwrap());
        let client = std::net::TcpStream::connect(listeners[0].local_addr().unwrap()).unwrap();
        let client = rustix::fs::fstat(&client).unwrap().st_ino;
        let found = listening().unwrap();
        for listener in listeners {
            let inode = rustix::fs::fstat(&listener).unwrap().st_ino;
            let address = listener.local_addr().unwrap();
            let expected = Listening { address: address.ip().to_canonical(), port: address.port(), inode };
            assert!(found.contains(&expected), "{expected:?} is not in {found:?}");
        }
        assert!(!found.iter().any(|socket| socket.inode == client));
    }

    #[test]
    fn a_message_is_read_and_a_short_one_refused() {
        let mut message = [0; MESSAGE_BYTES];
        (message[0], message[1]) = (libc::AF_INET as u8, STATE_LISTEN);
        message[4..6].copy_from_slice(&80u16.to_be_bytes());
        message[8..12].copy_from_slice(&[10, 0, 0, 1]);
        message[68..].copy_from_slice(&4711u32.to_ne_bytes());
        let expected = Listening { address: "10.0.0.1".parse().unwrap(), port: 80, inode: 4711 };
        assert_eq!(socket(&message), Some(expected));
        for short in [&message[..MESSAGE_BYTES - 1], &message[..8], &[]] {
            assert_eq!(socket(short), None);
        }
    }
}
