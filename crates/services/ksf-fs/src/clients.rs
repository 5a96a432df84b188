//! Which machines an export is for.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Networks of clients; all machines where none is named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients(Vec<Network>);

impl Clients {
    /// Adds a network.
    pub fn add(&mut self, network: Network) {
        self.0.push(network);
    }

    /// The networks that were named.
    pub fn networks(&self) -> &[Network] {
        &self.0
    }

    /// Whether a machine is among them; `None`: its address is not known, as on a Unix socket.
    pub fn include(&self, ip: Option<IpAddr>) -> bool {
        self.0.is_empty() || ip.is_some_and(|ip| self.0.iter().any(|network| network.includes(ip)))
    }
}

/// An address, or all addresses that begin with the same bits: `10.0.0.0/8`, `fd00::/8`, `192.0.2.7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix_bits: u8,
}

impl Network {
    /// Whether this address is in it. An IPv4 address in the form of IPv6 (`::ffff:192.0.2.7`) is one of IPv4.
    pub fn includes(self, ip: IpAddr) -> bool {
        let bits = u32::from(self.prefix_bits);
        match (self.address, ip.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros() >= bits,
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros() >= bits,
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let no_network = || format!("\"{text}\" is no network; write it like 10.0.0.0/8, fd00::/8 or 192.0.2.7");
        let address: IpAddr = address.parse().map_err(|_| no_network())?;
        let all_bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix_bits = prefix.map_or(Ok(all_bits), str::parse).map_err(|_| no_network())?;
        if prefix_bits > all_bits {
            return Err(format!("\"{text}\": an address has {all_bits} bits"));
        }
        Ok(Self { address, prefix_bits })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn includes(network: &str, ip: &str) -> bool {
        network.parse::<Network>().unwrap().includes(ip.parse().unwrap())
    }

    #[test]
    fn a_network_is_the_addresses_with_its_first_bits() {
        for (network, ip, wanted) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.0/9", "10.128.0.0", false),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.6", false),
            ("0.0.0.0/0", "203.0.113.9", true),
            ("0.0.0.0/0", "::1", false),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("fd00::/8", "fdff::1", true),
            ("fd00::/8", "fe00::1", false),
            ("::/0", "10.0.0.1", false),
            ("::1", "::1", true),
            ("::1", "::2", false),
        ] {
            assert_eq!(includes(network, ip), wanted, "{network} {ip}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        for text in ["", "10.0.0.0/33", "::/129", "host", "10.0.0.0/", "10.0.0.0/-1", "10.0.0.0/256", "10.0.0/8"] {
            assert!(text.parse::<Network>().unwrap_err().contains(text), "{text}");
        }
    }

    #[test]
    fn without_a_network_all_are_included() {
        let mut clients = Clients::default();
        assert!(clients.include(None) && clients.include(Some("203.0.113.9".parse().unwrap())));
        clients.add("10.0.0.0/8".parse().unwrap());
        clients.add("::1".parse().unwrap());
        assert!(clients.include(Some("10.0.0.1".parse().unwrap())) && clients.include(Some("::1".parse().unwrap())));
        assert!(!clients.include(None) && !clients.include(Some("203.0.113.9".parse().unwrap())));
    }
}
