//! Datagrams answered by XDP.

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use crate::KernelError;
use crate::abi::Port;
use crate::service::ServiceState;
use crate::xdp::XdpAttachment;

/// Where in the receive path the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, before a socket buffer exists.
    Native,
    /// Behind the driver, on a socket buffer: works everywhere (lo has nothing else).
    Generic,
}

impl fmt::Display for XdpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// XDP on one interface. Dropping it, or the end of the process, detaches.
#[derive(Debug)]
pub struct XdpLink {
    shared: Arc<ServiceState>,
    interface: String,
    mode: XdpMode,
    ports: Vec<Port>,
    // Given up after the ports.
    _place: XdpAttachment,
}

/// How many links serve each port: two interfaces may serve the same address.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    users: Mutex<HashMap<Port, u32>>,
}

impl XdpLink {
    pub(crate) fn attach(
        shared: Arc<ServiceState>,
        interface: &str,
        addresses: &[SocketAddr],
    ) -> Result<Self, KernelError> {
        let index = interface_index(interface)?;
        let ports = expand(addresses).map_err(|error| KernelError::system("listing local addresses", error))?;
        let place = XdpAttachment::take(&shared, interface, index)?;
        // From here on dropping it undoes all.
        let mode = place.mode;
        let mut link = Self { shared, interface: interface.to_owned(), mode, ports: Vec::new(), _place: place };
        for port in ports {
            link.shared.add_port(&port).map_err(|error| KernelError::system("registering a UDP port", error))?;
            link.ports.push(port);
        }
        Ok(link)
    }

    /// The interface's name.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Where the program runs.
    pub fn mode(&self) -> XdpMode {
        self.mode
    }
}

impl Drop for XdpLink {
    fn drop(&mut self) {
        for port in &self.ports {
            self.shared.remove_port(port);
        }
    }
}

impl ServiceState {
    fn add_port(&self, port: &Port) -> io::Result<()> {
        let mut users = self.ports.users.lock().expect("no panic while it is held");
        *users.entry(*port).or_default() += 1;
        self.loaded.maps.ports.update(&port.as_bytes(), &1u32.to_ne_bytes())
    }

    fn remove_port(&self, port: &Port) {
        let mut users = self.ports.users.lock().expect("no panic while it is held");
        if let Some(count) = users.get_mut(port) {
            *count -= 1;
            if *count == 0 {
                users.remove(port);
                // Not there only if the update failed.
                let _ = self.loaded.maps.ports.delete(&port.as_bytes());
            }
        }
    }
}

/// Concrete local addresses only: a wildcard in the kernel would also match datagrams that are to be forwarded.
fn expand(addresses: &[SocketAddr]) -> io::Result<Vec<Port>> {
    let mut ports = Vec::new();
    for address in addresses {
        let concrete = if address.ip().is_unspecified() { local_addresses(address)? } else { vec![address.ip()] };
        for ip in concrete {
            let port = port(ip, address.port());
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
    }
    Ok(ports)
}

fn port(ip: IpAddr, number: u16) -> Port {
    let mut address = [0; 16];
    let family = match ip.to_canonical() {
        IpAddr::V4(ip) => {
            address[..4].copy_from_slice(&ip.octets());
            4
        }
        IpAddr::V6(ip) => {
            address = ip.octets();
            6
        }
    };
    Port { port: number.to_be_bytes(), family, address }
}

/// The machine's addresses that a wildcard stands for: `::` stands for both families.
fn local_addresses(wildcard: &SocketAddr) -> io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs writes the head of a list it allocates.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut at = list;
    // SAFETY: the list ends with null and stays valid until freeifaddrs below; ifa_addr is null or points to an address
    // of the size its family has.
    unsafe {
        while let Some(entry) = at.as_ref() {
            if let Some(address) = entry.ifa_addr.as_ref() {
                match i32::from(address.sa_family) {
                    libc::AF_INET => {
                        let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                        found.push(IpAddr::from(u32::from_be(address.sin_addr.s_addr).to_be_bytes()));
                    }
                    libc::AF_INET6 if wildcard.is_ipv6() => {
                        let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                        found.push(IpAddr::from(address.sin6_addr.s6_addr));
                    }
                    _ => {}
                }
            }
            at = entry.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

fn interface_index(interface: &str) -> Result<u32, KernelError> {
    let missing = || KernelError::NoInterface { interface: interface.to_owned() };
    let name = CString::new(interface).map_err(|_| missing())?;
    // SAFETY: a NUL-terminated string that lives for the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(missing()),
        index => Ok(index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_becomes_the_machines_addresses() {
        let ports = expand(&["0.0.0.0:7".parse().unwrap()]).unwrap();
        assert!(ports.contains(&port("127.0.0.1".parse().unwrap(), 7)));
        assert!(ports.iter().all(|port| port.family == 4 && port.address[..4] != [0; 4]), "{ports:?}");
    }

    #[test]
    fn a_mapped_address_is_an_ipv4_one() {
        assert_eq!(port("::ffff:10.0.0.1".parse().unwrap(), 7), port("10.0.0.1".parse().unwrap(), 7));
    }
}
