//! Addresses to listen on, as typed: `127.0.0.1:60007`, `[::1]:60007`, `tcp:...`, `udp:...`,
//! `unix:/path`, `systemd` and `systemd:NAME`.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where the user wants a service to listen.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Listen {
    /// An address without a transport: every transport the service speaks.
    Any(SocketAddr),
    Tcp(SocketAddr),
    Udp(SocketAddr),
    /// A stream socket in the file system.
    Unix(PathBuf),
    /// Sockets passed by the service manager: those with this name, or all of them.
    Systemd(Option<String>),
}

impl Listen {
    /// The listeners of a service for which no address was given: loopback only, because a
    /// service that answers strangers should be somebody's decision.
    pub(crate) fn default_for(port: u16) -> Vec<Listen> {
        vec![Listen::Any((Ipv4Addr::LOCALHOST, port).into()), Listen::Any((Ipv6Addr::LOCALHOST, port).into())]
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "systemd" {
            return Ok(Listen::Systemd(None));
        }
        match text.split_once(':') {
            Some(("unix", "")) => Err("unix: needs a path, as in unix:/run/ksf/echo".into()),
            Some(("unix", path)) => Ok(Listen::Unix(path.into())),
            Some(("systemd", name)) => Ok(Listen::Systemd(Some(name.to_owned()))),
            Some(("tcp", rest)) => socket_address(rest).map(Listen::Tcp),
            Some(("udp", rest)) => socket_address(rest).map(Listen::Udp),
            _ => socket_address(text).map(Listen::Any),
        }
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Any(address) => write!(f, "{address}"),
            Listen::Tcp(address) => write!(f, "tcp:{address}"),
            Listen::Udp(address) => write!(f, "udp:{address}"),
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
            Listen::Systemd(None) => f.write_str("systemd"),
            Listen::Systemd(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}

/// Names are not resolved: which of a name's addresses a server answers on must not depend on
/// a name server.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let hint = match text.rsplit_once(':') {
            _ if text.parse::<std::net::IpAddr>().is_ok() => {
                "the port is missing; write ADDR:PORT, with an IPv6 address in brackets"
            }
            Some((_, port)) if port.parse::<u32>().is_ok_and(|port| port > 65535) => "the largest port is 65535",
            Some((host, port)) if port.parse::<u16>().is_ok() && host.contains(':') => {
                "write an IPv6 address in brackets, as in [::1]:60007"
            }
            Some((host, port)) if port.parse::<u16>().is_ok() && !host.is_empty() => {
                "write the address in numbers, as in 127.0.0.1:60007"
            }
            _ => "write ADDR:PORT, [ADDR6]:PORT, tcp:ADDR:PORT, udp:ADDR:PORT or unix:/PATH",
        };
        format!("\"{text}\" is not an address to listen on; {hint}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_written_back() {
        for text in [
            "127.0.0.1:60007",
            "[::1]:60007",
            "tcp:0.0.0.0:0",
            "udp:[::]:1",
            "unix:/run/ksf/echo",
            "systemd",
            "systemd:echo",
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn mistakes_are_told_apart() {
        for (text, part) in [
            ("", "ADDR:PORT"),
            ("127.0.0.1", "port is missing"),
            ("::1", "port is missing"),
            ("localhost:60007", "in numbers"),
            ("1::2:60007:5555555", "65535"),
            ("127.0.0.1:70000", "65535"),
            ("unix:", "path"),
            ("tcp:60007", "ADDR:PORT"),
            (":60007", "ADDR:PORT"),
        ] {
            let error = text.parse::<Listen>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn the_default_is_loopback() {
        for listen in Listen::default_for(60007) {
            let Listen::Any(address) = listen else {
                panic!("{listen} is not an address");
            };
            assert!(address.ip().is_loopback());
        }
    }
}
