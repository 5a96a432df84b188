//! Telling a running rpcbind where programs listen, and taking it back.
//!
//! ```text
//! let entries = rpcbind::entries(service.table(), "0.0.0.0:62049".parse()?, true);
//! let _registered = Registration::new(&RpcbindEndpoint::local_defaults(), entries)?;
//! // ... dropped: unregistered
//! ```
//!
//! rpcbind believes callers on its Unix socket by their user, and callers on
//! loopback by their reserved port, so registering needs root or a rpcbind that
//! was started with `-i`. Calls are version 4 of the protocol, which names the
//! transport by netid and so covers IPv6.
//!
//! A server that was killed leaves its entries behind, since rpcbind never
//! checks them. An entry that names our own address is such a leftover (we hold
//! the port now) and is replaced; any other one belongs to somebody and is an
//! error.

mod client;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use ksf_proto::oncrpc::rpcbind::{PORT, netid, universal_address};

pub use client::{RpcbindClient, RpcbindError};

use super::table::ProgramTable;

/// Where rpcbind may be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RpcbindEndpoint {
    /// Its Unix socket.
    Unix(PathBuf),
    /// Its UDP port.
    Udp(SocketAddr),
    /// Its TCP port.
    Tcp(SocketAddr),
}

impl RpcbindEndpoint {
    /// Where the rpcbind of this machine is looked for, in this order: Unix
    /// socket, UDP, TCP.
    pub fn local_defaults() -> Vec<Self> {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        vec![Self::Unix(PathBuf::from("/run/rpcbind.sock")), Self::Udp(loopback), Self::Tcp(loopback)]
    }
}

impl std::fmt::Display for RpcbindEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Udp(address) => write!(f, "udp {address}"),
            Self::Tcp(address) => write!(f, "tcp {address}"),
        }
    }
}

/// One version of one program at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcbindEntry {
    /// Program number.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Transport: "tcp", "udp", "tcp6" or "udp6".
    pub netid: &'static str,
    /// Universal address.
    pub address: String,
}

/// Most versions of one program that are registered. A program that claims all
/// 2^32 versions would keep rpcbind busy for days.
const VERSIONS_MAX: usize = 64;

/// An entry for each program and version of the table, listening at `address`
/// over TCP (`stream`) or UDP. Of a program with more than 64 versions the
/// lowest 64 are named.
pub fn entries(table: &ProgramTable, address: SocketAddr, stream: bool) -> Vec<RpcbindEntry> {
    let netid = netid(address.ip(), stream);
    let address = universal_address(address);
    let versions = table
        .programs()
        .flat_map(|(program, versions)| versions.take(VERSIONS_MAX).map(move |version| (program, version)));
    versions.map(|(program, version)| RpcbindEntry { program, version, netid, address: address.clone() }).collect()
}

/// Entries that are registered for as long as this value lives.
#[derive(Debug)]
pub struct Registration {
    endpoint: RpcbindEndpoint,
    entries: Vec<RpcbindEntry>,
}

impl Registration {
    /// Registers `entries` with the first endpoint that answers: all of them, or
    /// none and an error.
    pub fn new(endpoints: &[RpcbindEndpoint], entries: Vec<RpcbindEntry>) -> Result<Self, RpcbindError> {
        let mut client = RpcbindClient::connect(endpoints)?;
        let mut registration = Self { endpoint: client.endpoint().clone(), entries: Vec::with_capacity(entries.len()) };
        let set_all = entries.into_iter().try_for_each(|entry| {
            set_or_replace(&mut client, &entry)?;
            registration.entries.push(entry);
            Ok(())
        });
        // Before `registration` may be dropped, which takes back what was set over a connection of its own: a server
        // that serves one at a time would wait for this one to end.
        drop(client);
        set_all.map(|()| registration)
    }

    /// Where it is registered.
    pub fn endpoint(&self) -> &RpcbindEndpoint {
        &self.endpoint
    }

    /// What is registered.
    pub fn entries(&self) -> &[RpcbindEntry] {
        &self.entries
    }

    /// Takes the entries back. Dropping does the same and keeps quiet about errors.
    pub fn remove(mut self) -> Result<(), RpcbindError> {
        self.unset_all()
    }

    fn unset_all(&mut self) -> Result<(), RpcbindError> {
        let entries = std::mem::take(&mut self.entries);
        if entries.is_empty() {
            return Ok(());
        }
        let mut client = RpcbindClient::connect(std::slice::from_ref(&self.endpoint))?;
        for entry in &entries {
            // Somebody may have replaced our entry, which is not ours to remove.
            let current = client.address_of(entry.program, entry.version, entry.netid)?;
            if current.as_deref() == Some(&entry.address) {
                client.unset(entry)?;
            }
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A rpcbind that is gone has forgotten the entries as well.
        let _ = self.unset_all();
    }
}

fn set_or_replace(client: &mut RpcbindClient, entry: &RpcbindEntry) -> Result<(), RpcbindError> {
    if client.set(entry)? {
        return Ok(());
    }
    let current = client.address_of(entry.program, entry.version, entry.netid)?;
    // Also after a datagram whose reply was lost: it was done, and asked again.
    if current.as_deref() == Some(&entry.address) && client.unset(entry)? && client.set(entry)? {
        return Ok(());
    }
    let entry = entry.clone();
    Err(match current {
        Some(address) => RpcbindError::Taken { entry, address },
        None => RpcbindError::NotPermitted { entry },
    })
}

#[cfg(test)]
mod tests {
    use super::super::Program;
    use super::*;

    #[test]
    fn a_table_gives_an_entry_for_each_version() {
        let mut table = ProgramTable::new();
        table.register(Program::NFS_V3).unwrap();
        table.register(Program::MOUNT_V3).unwrap();
        table.register(Program::new("ranged", 7, 1..=2)).unwrap();
        let entry = |program, version| RpcbindEntry { program, version, netid: "tcp6", address: "::1.242.97".into() };
        assert_eq!(
            entries(&table, "[::1]:62049".parse().unwrap(), true),
            [entry(100_003, 3), entry(100_005, 3), entry(7, 1), entry(7, 2)]
        );
    }

    #[test]
    fn a_program_of_all_versions_is_cut() {
        let mut table = ProgramTable::new();
        table.register(Program::new("all", 7, 0..=u32::MAX)).unwrap();
        let all = entries(&table, "127.0.0.1:1".parse().unwrap(), false);
        assert_eq!(all.len(), VERSIONS_MAX);
        assert_eq!((all[63].version, all[63].netid), (63, "udp"));
    }
}
