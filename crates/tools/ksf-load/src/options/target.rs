//! Where the load goes: `[user@]host[:port]`, `[v6]:port`, a bare IPv6 address, or `unix:/path`.
//!
//! The user part is accepted and ignored, as in the originals, so that a login can be pasted. A port in
//! the target wins over `-p`. Host names go through the system's resolver and every address it returns is tried.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_in};

/// A target as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// A host by name or address, and a port.
    Inet {
        /// Name or address, without brackets.
        host: String,
        /// UDP or TCP port.
        port: u16,
    },
    /// A Unix-domain stream socket.
    Unix(PathBuf),
}

/// One address a connection can be tried with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// IPv4 or IPv6.
    Inet(SocketAddr),
    /// A path in the file system.
    Unix(PathBuf),
}

impl Target {
    /// Reads a target; `default_port` is used where it names none.
    pub(crate) fn parse(text: &str, default_port: u16) -> Result<Target, LoadError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.is_empty() {
                true => Err(invalid(text, "the path after `unix:` is empty")),
                false => Ok(Target::Unix(PathBuf::from(path))),
            };
        }
        let address = match text.split_once('@') {
            Some((_user, address)) => address,
            None => text,
        };
        let (host, port) = split_port(address).map_err(|reason| invalid(text, reason))?;
        if host.is_empty() {
            return Err(invalid(text, "the host is empty"));
        }
        if host.contains('/') {
            return Err(invalid(text, "a host has no slash; write `unix:/path` for a Unix-domain socket"));
        }
        if host.contains(|c: char| c.is_whitespace() || "@[]".contains(c)) {
            return Err(invalid(text, "a host has no blanks, brackets or `@`"));
        }
        let port = match port {
            Some(digits) => parse_port(digits)?,
            None => default_port,
        };
        let host = host.to_string();
        Ok(Target::Inet { host, port })
    }

    /// Reads the authority of a URL (RFC 3986, section 3.2) without a user: a name, an IPv4 address, or an IPv6 address
    /// in brackets, which may have a zone (`[fe80::1%25eth0]`, RFC 6874). The port is decimal digits alone; without one,
    /// also behind a colon, it is `default_port`.
    ///
    /// # Errors
    ///
    /// The text is none, or its port is not in 1 to 65535.
    pub(crate) fn of_authority(text: &str, default_port: u16) -> Result<Target, LoadError> {
        let wrong = |reason: &str| LoadError::Usage(format!("invalid URL with `{text}`: {reason}"));
        let (host, port) = if let Some(bracketed) = text.strip_prefix('[') {
            let (address, behind) = bracketed.split_once(']').ok_or_else(|| wrong("the bracket is not closed"))?;
            let host = address_with_zone(address).ok_or_else(|| wrong("in brackets stands an IPv6 address"))?;
            (host, behind)
        } else {
            let (host, behind) = text.split_at(text.find(':').unwrap_or(text.len()));
            if host.is_empty() {
                return Err(wrong("the host is empty"));
            }
            if !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)) {
                return Err(wrong("a host has letters, digits, `-`, `.`, `_` and `~`"));
            }
            (host.to_owned(), behind)
        };
        let port = match behind_colon(port) {
            Some("") => default_port,
            // Two colons: an address without brackets.
            Some(digits) if digits.contains(':') => return Err(wrong("an IPv6 address stands in brackets")),
            Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => parse_port(digits)?,
            Some(digits) => {
                let source = NumberError::Invalid { text: digits.to_owned() };
                return Err(LoadError::Number { option: "port".into(), source });
            }
            None => return Err(wrong("only `:port` may follow the bracket")),
        };
        Ok(Target::Inet { host, port })
    }

    /// The addresses to try, in the resolver's order.
    pub(crate) fn resolve(&self) -> Result<Vec<Endpoint>, LoadError> {
        match self {
            Target::Unix(path) => Ok(vec![Endpoint::Unix(path.clone())]),
            Target::Inet { host, port } => {
                let unknown = |source| LoadError::UnknownHost { host: host.clone(), source };
                let mut endpoints = Vec::new();
                for address in (host.as_str(), *port).to_socket_addrs().map_err(unknown)? {
                    let endpoint = Endpoint::Inet(address);
                    if !endpoints.contains(&endpoint) {
                        endpoints.push(endpoint);
                    }
                }
                if endpoints.is_empty() { Err(unknown(std::io::ErrorKind::NotFound.into())) } else { Ok(endpoints) }
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Inet { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Target::Inet { host, port } => write!(f, "{host}:{port}"),
            Target::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Inet(address) => address.fmt(f),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Splits the port off. Two colons without brackets are an IPv6 address without a port.
fn split_port(address: &str) -> Result<(&str, Option<&str>), &'static str> {
    if let Some(bracketed) = address.strip_prefix('[') {
        let (host, rest) = bracketed.split_once(']').ok_or("the bracket is not closed")?;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err("only `:port` may follow the bracket"),
        };
    }
    match address.split_once(':') {
        Some((_, port)) if port.contains(':') => Ok((address, None)),
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((address, None)),
    }
}

/// What follows the colon behind a host; empty if nothing does.
fn behind_colon(text: &str) -> Option<&str> {
    if text.is_empty() { Some(text) } else { text.strip_prefix(':') }
}

/// An IPv6 address as the system's resolver takes it, with the zone behind `%`, from one as URLs have it, behind `%25`
/// and percent-encoded.
fn address_with_zone(text: &str) -> Option<String> {
    let (address, zone) = text.split_once("%25").map_or((text, None), |(address, zone)| (address, Some(zone)));
    address.parse::<Ipv6Addr>().ok()?;
    let Some(mut rest) = zone else { return Some(address.to_owned()) };
    let mut host = format!("{address}%");
    while let Some(first) = rest.chars().next() {
        let (char, behind) = match rest.strip_prefix('%') {
            Some(escaped) => {
                let digits = escaped.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
                (char::from(u8::from_str_radix(digits, 16).ok()?), &escaped[2..])
            }
            None => (first, &rest[first.len_utf8()..]),
        };
        // An interface's name.
        if !char.is_ascii_alphanumeric() && !"-._~".contains(char) {
            return None;
        }
        host.push(char);
        rest = behind;
    }
    (!host.ends_with('%')).then_some(host)
}

fn parse_port(digits: &str) -> Result<u16, LoadError> {
    let number = parse_in(digits, 1, u64::from(u16::MAX))
        .map_err(|source| LoadError::Number { option: "port".into(), source })?;
    Ok(number as u16)
}

fn invalid(text: &str, reason: &str) -> LoadError {
    LoadError::Usage(format!(
        "invalid target `{text}`: {reason} (expected [user@]host[:port], [v6-address]:port or unix:/path)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn inet(host: &str, port: u16) -> Target {
        Target::Inet { host: host.into(), port }
    }

    #[test]
    fn every_form_is_read() {
        for (text, target) in [
            ("localhost", inet("localhost", 7)),
            ("localhost:99", inet("localhost", 99)),
            ("greg@10.0.0.1:0x10", inet("10.0.0.1", 16)),
            ("127.0.0.1", inet("127.0.0.1", 7)),
            ("::1", inet("::1", 7)),
            ("[::1]", inet("::1", 7)),
            ("[::1]:62049", inet("::1", 62049)),
            ("u@[fe80::1%lo]:1", inet("fe80::1%lo", 1)),
            ("unix:/run/a@b:c", Target::Unix("/run/a@b:c".into())),
        ] {
            assert_eq!(Target::parse(text, 7).unwrap(), target, "{text}");
        }
    }

    #[test]
    fn wrong_forms_get_the_right_status() {
        for (text, status) in [
            ("", 64),
            ("@", 64),
            (":99", 64),
            ("[::1", 64),
            ("[::1]x", 64),
            ("unix:", 64),
            ("/run/x.sock", 64),
            ("a b", 64),
            ("host:", 65),
            ("host:0", 65),
            ("host:65536", 65),
            ("host:http", 65),
            ("host:-1", 65),
        ] {
            let error = Target::parse(text, 7).unwrap_err();
            assert_eq!(error.exit_code(), status, "{text}: {error}");
        }
    }

    #[test]
    fn literals_resolve_to_themselves() {
        assert_eq!(
            Target::parse("[::1]:9", 7).unwrap().resolve().unwrap(),
            [Endpoint::Inet("[::1]:9".parse().unwrap())]
        );
        assert_eq!(
            Target::parse("127.0.0.1", 7).unwrap().resolve().unwrap(),
            [Endpoint::Inet("127.0.0.1:7".parse().unwrap())]
        );
    }

    #[test]
    fn a_name_that_does_not_exist_is_an_unknown_host() {
        // `.invalid` never resolves (RFC 6761, section 6.4).
        let target = Target::parse("no-such-host.invalid", 7).unwrap();
        assert_eq!(target.resolve().unwrap_err().exit_code(), 68);
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(text in "[a-z0-9.:@\\[\\]]{0,30}") {
            if let Ok(target) = Target::parse(&text, 7) {
                prop_assert_eq!(Target::parse(&target.to_string(), 9).unwrap(), target);
            }
        }
    }
}
