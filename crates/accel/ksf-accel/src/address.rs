//! Where a listener listens, in the terms of the kernel's search for it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;

use crate::sys;

/// What a connection request is matched against: address, port and device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    /// 0: any device.
    pub(crate) ifindex: u32,
}

impl Key {
    /// As the steering program has it (`struct ksf_key` of `steer.bpf.c`).
    pub(crate) fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        let family = match self.address {
            IpAddr::V4(address) => {
                bytes[..4].copy_from_slice(&address.octets());
                libc::AF_INET as u16
            }
            IpAddr::V6(address) => {
                bytes[..16].copy_from_slice(&address.octets());
                libc::AF_INET6 as u16
            }
        };
        bytes[16..20].copy_from_slice(&self.ifindex.to_ne_bytes());
        bytes[20..22].copy_from_slice(&self.port.to_ne_bytes());
        bytes[22..24].copy_from_slice(&family.to_ne_bytes());
        bytes
    }
}

/// The address of a listening TCP socket, with what decides which requests are for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(crate) socket: SocketAddr,
    /// An IPv6 socket that takes IPv4 connections too.
    pub(crate) dual: bool,
    /// `SO_BINDTODEVICE`; 0: any.
    pub(crate) ifindex: u32,
}

impl Address {
    pub(crate) fn of(listener: BorrowedFd<'_>) -> std::io::Result<Self> {
        let socket = rustix::net::getsockname(listener)?;
        let socket = SocketAddr::try_from(socket).map_err(std::io::Error::from)?;
        let dual = socket.is_ipv6() && !rustix::net::sockopt::ipv6_v6only(listener)?;
        let ifindex = sys::option_i32(listener, libc::SOL_SOCKET, SO_BINDTOIFINDEX).unwrap_or(0) as u32;
        Ok(Self { socket, dual, ifindex })
    }

    pub(crate) fn is_ipv6(&self) -> bool {
        self.socket.is_ipv6()
    }

    /// All that a request to this listener can be found under.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let key = |address| Key { address, port: self.socket.port(), ifindex: self.ifindex };
        match self.socket.ip() {
            IpAddr::V6(address) => match address.to_ipv4_mapped() {
                Some(mapped) => vec![key(mapped.into())],
                None if address.is_unspecified() && self.dual => {
                    vec![key(address.into()), key(Ipv4Addr::UNSPECIFIED.into())]
                }
                None => vec![key(address.into())],
            },
            address => vec![key(address)],
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(f)?;
        if self.ifindex != 0 { write!(f, "%{}", self.ifindex) } else { Ok(()) }
    }
}

/// asm-generic/socket.h, kernel 5.1.
pub(crate) const SO_BINDTOIFINDEX: i32 = 62;

/// The loopback address a queue is bound to: nobody reaches it from outside, even where steering has ended. A queue
/// that takes both families must be bound to a mapped address, because the kernel makes a socket with a true IPv6
/// address take that family only (net/ipv6/af_inet6.c, `__inet6_bind`).
pub(crate) fn hidden(of: &Address, port: u16) -> SocketAddr {
    let address: IpAddr = match (of.is_ipv6(), of.dual) {
        (false, _) => Ipv4Addr::LOCALHOST.into(),
        (true, true) => Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(),
        (true, false) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(address, port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(address: &str, dual: bool) -> Vec<String> {
        let address = Address { socket: address.parse().unwrap(), dual, ifindex: 0 };
        address.keys().iter().map(|key| SocketAddr::new(key.address, key.port).to_string()).collect()
    }

    #[test]
    fn a_listener_is_found_under_every_address_it_takes() {
        assert_eq!(keys("0.0.0.0:80", false), ["0.0.0.0:80"]);
        assert_eq!(keys("[::]:80", false), ["[::]:80"]);
        assert_eq!(keys("[::]:80", true), ["[::]:80", "0.0.0.0:80"]);
        assert_eq!(keys("[::ffff:10.0.0.1]:80", true), ["10.0.0.1:80"]);
        assert_eq!(keys("[fe80::1]:80", true), ["[fe80::1]:80"]);
    }

    #[test]
    fn a_key_has_the_layout_of_the_program() {
        let key = Key { address: "1.2.3.4".parse().unwrap(), port: 0x1234, ifindex: 7 }.to_bytes();
        assert_eq!(key[..4], [1, 2, 3, 4]);
        assert_eq!(key[4..16], [0; 12]);
        assert_eq!(key[16..20], 7u32.to_ne_bytes());
        assert_eq!(key[20..22], 0x1234u16.to_ne_bytes());
        assert_eq!(key[22..24], 2u16.to_ne_bytes());
    }
}
