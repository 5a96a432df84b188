//! The calls by which a server tells rpcbind where it listens (RFC 1833).
//!
//! Program 100000 on port 111: version 2 (the port mapper) names a port and
//! knows IPv4 only; versions 3 and 4 name a transport ("netid", RFC 5665) and a
//! universal address. Both have the same procedure numbers for SET and UNSET.
//!
//! Each function appends arguments; put a [`super::CallHeader`] before them.
//! Results: [`parse_bool`], [`parse_port`], [`parse_address`], [`parse_list`].

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use crate::xdr::{XdrError, XdrReader, XdrWrite};

/// Program number of rpcbind and of the port mapper.
pub const PROGRAM: u32 = 100_000;
/// Port of rpcbind, TCP and UDP.
pub const PORT: u16 = 111;
/// Version 2: the port mapper.
pub const VERSION_PORTMAP: u32 = 2;
/// Version 3: rpcbind.
pub const VERSION_RPCBIND_3: u32 = 3;
/// Version 4: rpcbind with the calls that Solaris added.
pub const VERSION_RPCBIND_4: u32 = 4;
/// Procedure: register.
pub const PROC_SET: u32 = 1;
/// Procedure: take a registration back.
pub const PROC_UNSET: u32 = 2;
/// Procedure: ask for a port (version 2) or a universal address (3 and 4).
pub const PROC_GETPORT: u32 = 3;
/// Procedure: list everything that is registered.
pub const PROC_DUMP: u32 = 4;

/// `prot` of a version 2 mapping: TCP.
pub const IPPROTO_TCP: u32 = 6;
/// `prot` of a version 2 mapping: UDP.
pub const IPPROTO_UDP: u32 = 17;

/// Greatest universal address that is read back. RFC 1833 sets no limit; paths
/// of Unix sockets (108 bytes) are the longest in use.
pub const ADDRESS_LIMIT_BYTES: u32 = 256;
/// Greatest netid or owner that is read back. RFC 1833 sets no limit.
pub const NAME_LIMIT_BYTES: u32 = 256;

/// A registration of version 2: `mapping`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Program number.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// [`IPPROTO_TCP`] or [`IPPROTO_UDP`].
    pub protocol: u32,
    /// Port; ignored by UNSET and GETPORT, send 0.
    pub port: u16,
}

impl Mapping {
    /// Appends the arguments of SET, UNSET or GETPORT.
    pub fn put(&self, out: &mut impl XdrWrite) {
        out.put_u32(self.program);
        out.put_u32(self.version);
        out.put_u32(self.protocol);
        out.put_u32(u32::from(self.port));
    }
}

/// A registration of versions 3 and 4: `rpcb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding<'a> {
    /// Program number.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Transport: "tcp", "udp", "tcp6", "udp6" or "local"; see [`netid`].
    pub netid: &'a str,
    /// Universal address, see [`universal_address`]; empty for UNSET.
    pub address: &'a str,
    /// The owner of the registration. rpcbind believes its socket's peer rather
    /// than this.
    pub owner: &'a str,
}

impl Binding<'_> {
    /// Appends the arguments of SET, UNSET or GETADDR.
    pub fn put(&self, out: &mut impl XdrWrite) {
        out.put_u32(self.program);
        out.put_u32(self.version);
        out.put_opaque(self.netid.as_bytes());
        out.put_opaque(self.address.as_bytes());
        out.put_opaque(self.owner.as_bytes());
    }
}

/// Transport name of an address (RFC 5665 section 5.1).
pub const fn netid(address: IpAddr, stream: bool) -> &'static str {
    match (address, stream) {
        (IpAddr::V4(_), true) => "tcp",
        (IpAddr::V4(_), false) => "udp",
        (IpAddr::V6(_), true) => "tcp6",
        (IpAddr::V6(_), false) => "udp6",
    }
}

/// Universal address of a socket (RFC 5665 section 5.2.3): the IP address, then
/// the two bytes of the port in decimal, joined by dots. 127.0.0.1:62049 is
/// "127.0.0.1.242.97".
pub fn universal_address(address: SocketAddr) -> String {
    let [high, low] = address.port().to_be_bytes();
    let mut text = address.ip().to_string();
    // Writing to a String cannot fail.
    let _ = write!(text, ".{high}.{low}");
    text
}

/// Reads a universal address back; `None` if it is not one of IP.
pub fn parse_universal_address(text: &str) -> Option<SocketAddr> {
    let (rest, low) = text.rsplit_once('.')?;
    let (host, high) = rest.rsplit_once('.')?;
    let port = u16::from_be_bytes([high.parse().ok()?, low.parse().ok()?]);
    Some(SocketAddr::new(host.parse().ok()?, port))
}

/// Result of SET and UNSET: true if it was done.
pub fn parse_bool(results: &[u8]) -> Result<bool, XdrError> {
    let mut r = XdrReader::new(results);
    let value = r.bool()?;
    r.finish()?;
    Ok(value)
}

/// Result of GETPORT of version 2: the port, or `None` if the program is not registered.
pub fn parse_port(results: &[u8]) -> Result<Option<u16>, XdrError> {
    let mut r = XdrReader::new(results);
    let value = r.u32()?;
    r.finish()?;
    let port = u16::try_from(value).map_err(|_| XdrError::Value { offset: 0, value, kind: "port" })?;
    Ok(Some(port).filter(|&port| port != 0))
}

/// Result of GETADDR of versions 3 and 4: a universal address, or `None` if the
/// program is not registered.
pub fn parse_address(results: &[u8]) -> Result<Option<&str>, XdrError> {
    let mut r = XdrReader::new(results);
    let address = r.utf8(ADDRESS_LIMIT_BYTES)?;
    r.finish()?;
    Ok(Some(address).filter(|address| !address.is_empty()))
}

/// Result of DUMP of versions 3 and 4: everything that is registered.
pub fn parse_list(results: &[u8]) -> Result<Vec<Binding<'_>>, XdrError> {
    let mut r = XdrReader::new(results);
    let mut list = Vec::new();
    // A linked list (`rp__list`): each node says whether it is one.
    while r.bool()? {
        list.push(Binding {
            program: r.u32()?,
            version: r.u32()?,
            netid: r.utf8(NAME_LIMIT_BYTES)?,
            address: r.utf8(ADDRESS_LIMIT_BYTES)?,
            owner: r.utf8(NAME_LIMIT_BYTES)?,
        });
    }
    r.finish()?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_as_the_rfc_draws_them() {
        let mut out = Vec::new();
        Mapping { program: 100_003, version: 3, protocol: IPPROTO_TCP, port: 62049 }.put(&mut out);
        assert_eq!(out, [0, 1, 0x86, 0xa3, 0, 0, 0, 3, 0, 0, 0, 6, 0, 0, 0xf2, 0x61]);

        let mut out = Vec::new();
        Binding { program: 100_005, version: 3, netid: "udp", address: "0.0.0.0.242.97", owner: "root" }.put(&mut out);
        let mut expected = vec![0, 1, 0x86, 0xa5, 0, 0, 0, 3];
        expected.extend_from_slice(b"\0\0\0\x03udp\0");
        expected.extend_from_slice(b"\0\0\0\x0e0.0.0.0.242.97\0\0");
        expected.extend_from_slice(b"\0\0\0\x04root");
        assert_eq!(out, expected);
    }

    #[test]
    fn universal_addresses() {
        for (socket, text) in [
            ("127.0.0.1:62049", "127.0.0.1.242.97"),
            ("0.0.0.0:111", "0.0.0.0.0.111"),
            ("[::1]:2049", "::1.8.1"),
            ("[fe80::2]:65535", "fe80::2.255.255"),
        ] {
            let socket: SocketAddr = socket.parse().unwrap();
            assert_eq!(universal_address(socket), text);
            assert_eq!(parse_universal_address(text), Some(socket));
        }
        for text in ["", "1.2", "/run/x.sock", "127.0.0.1.256.1", "127.0.0.1"] {
            assert_eq!(parse_universal_address(text), None, "{text}");
        }
    }

    #[test]
    fn netids() {
        let v4 = "1.2.3.4".parse().unwrap();
        let v6 = "::1".parse().unwrap();
        assert_eq!((netid(v4, true), netid(v4, false)), ("tcp", "udp"));
        assert_eq!((netid(v6, true), netid(v6, false)), ("tcp6", "udp6"));
    }

    #[test]
    fn results() {
        assert_eq!(parse_bool(&[0, 0, 0, 1]), Ok(true));
        assert!(parse_bool(&[0, 0, 0, 1, 0]).is_err());
        assert_eq!(parse_port(&[0, 0, 0xf2, 0x61]), Ok(Some(62049)));
        assert_eq!(parse_port(&[0, 0, 0, 0]), Ok(None));
        assert!(parse_port(&[0, 1, 0, 0]).is_err());
        assert_eq!(parse_address(b"\0\0\0\x03abc\0"), Ok(Some("abc")));
        assert_eq!(parse_address(&[0, 0, 0, 0]), Ok(None));
    }
    #[test]
    fn lists() {
        assert_eq!(parse_list(&[0, 0, 0, 0]), Ok(vec![]));
        let node = Binding { program: 100_000, version: 4, netid: "tcp", address: "0.0.0.0.0.111", owner: "superuser" };
        let mut list = Vec::new();
        for _ in 0..2 {
            list.put_bool(true);
            node.put(&mut list);
        }
        assert!(matches!(parse_list(&list), Err(XdrError::Truncated { .. })), "the end is missing");
        list.put_bool(false);
        assert_eq!(parse_list(&list), Ok(vec![node, node]));
        list.put_u32(0);
        assert!(parse_list(&list).is_err());
    }
}
