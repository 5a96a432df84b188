//! Source ports for the programs of a cgroup, chosen by eBPF in connect(2).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use ksf_bpf::{link_create, network_cookie, to_io};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object};

use super::abi::{self, CONNECT_COUNTERS, ConnectSettings};
use super::steering::per_cpu;
use super::{Counter, FlowError, Layout};
use crate::bpf::{self, Loading};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flow/connect.bpf.o"));

/// Loads the programs; attached to nothing yet.
fn load() -> Result<Object, FlowError> {
    Loading::open(OBJECT).and_then(Loading::load).map_err(|error| FlowError::loading("the connect programs", &error))
}

/// How the programs choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Connections to loopback addresses get a port of a chunk, too. Default: no.
    pub loopback: bool,
    /// Ports tried before a connection is left alone, at most 64. More cost time in connect() when a chunk is nearly
    /// full; fewer give up on more connections.
    pub tries: u32,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { loopback: false, tries: 32 }
    }
}

/// Programs attached to a cgroup. Dropping it, or the end of the process, detaches them.
#[derive(Debug)]
pub struct ConnectPrograms {
    counts: MapHandle,
    settings: MapHandle,
    _links: [OwnedFd; 2],
}

impl ConnectPrograms {
    /// Loads the programs, attached to nothing, and gives them up again.
    ///
    /// # Errors
    ///
    /// The kernel does not take them, or not from this process.
    pub fn try_load() -> Result<(), FlowError> {
        load().map(drop)
    }

    /// From now on connections that processes below `cgroup` (a folder of cgroup2) open in this thread's network
    /// namespace get a source port of their CPU's chunk.
    ///
    /// # Errors
    ///
    /// [`FlowError::CgroupBusy`] if somebody else's program tolerates no other.
    pub fn attach(cgroup: &Path, layout: &Layout, options: &ConnectOptions) -> Result<Self, FlowError> {
        let unreadable = |error| FlowError::Unreadable { path: cgroup.to_owned(), error };
        let folder = File::open(cgroup).map_err(unreadable)?;
        let object = load()?;
        let map = |name| bpf::map(&object, name).map_err(|error| FlowError::system("keeping a map", error));
        let settings = map("ksf_settings")?;
        let values = ConnectSettings {
            layout: layout.into(),
            loopback: options.loopback.into(),
            netns_cookie: network_cookie()
                .map_err(|error| FlowError::system("asking for the network namespace", error))?,
            range_refused: 0,
            tries: options.tries,
        };
        let write = |map: &MapHandle, key: u32, value: &[u8]| {
            bpf::put(map, &key.to_ne_bytes(), value)
                .map_err(|error| FlowError::system("writing the programs' settings", error))
        };
        write(&settings, 0, &values.as_bytes())?;
        let chunk_of = map("ksf_chunk_of")?;
        for (index, cpu) in abi::numbered(layout.cpus()) {
            write(&chunk_of, cpu, &(index + 1).to_ne_bytes())?;
        }
        let reserved = map("ksf_reserved")?;
        for (word, bits) in reserved_ports().into_iter().enumerate().filter(|(_, bits)| *bits != 0) {
            write(&reserved, word as u32, &bits.to_ne_bytes())?;
        }
        let link = |name: &str, kind| {
            let program = bpf::program(&object, name).map_err(|error| FlowError::system("keeping a program", error))?;
            link_create(program.as_fd(), folder.as_raw_fd(), kind, 0).map_err(|error| {
                match error.raw_os_error() {
                    // kernel/bpf/cgroup.c: a program above or here that was attached without ALLOW_MULTI.
                    Some(libc::EPERM) if ksf_bpf::missing_capabilities().is_empty() => {
                        FlowError::CgroupBusy { cgroup: cgroup.to_owned() }
                    }
                    Some(libc::EBADF) => unreadable(io::Error::other("not a folder of cgroup2")),
                    _ => FlowError::system("attaching to a cgroup", error),
                }
            })
        };
        let links = [
            link("ksf_connect4", libbpf_sys::BPF_CGROUP_INET4_CONNECT)?,
            link("ksf_connect6", libbpf_sys::BPF_CGROUP_INET6_CONNECT)?,
        ];
        Ok(Self { counts: map("ksf_connect_counts")?, settings, _links: links })
    }

    /// What was done, per CPU that called connect().
    pub fn counters(&self) -> Result<Vec<Counter>, FlowError> {
        let mut counters = Vec::with_capacity(CONNECT_COUNTERS.len());
        for (index, &(name, help)) in CONNECT_COUNTERS.iter().enumerate() {
            counters.push(Counter { name, help, per_cpu: per_cpu(&self.counts, index as u32)? });
        }
        Ok(counters)
    }

    /// Whether this kernel lets a program set IP_LOCAL_PORT_RANGE, so that no port has to be bound. `None` until the
    /// first connection has tried it.
    pub fn takes_range(&self) -> Result<Option<bool>, FlowError> {
        let value = self
            .settings
            .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|error| FlowError::system("reading the programs' settings", to_io(&error)))?;
        let at = std::mem::offset_of!(ConnectSettings, range_refused);
        let refused = value.is_some_and(|value| value[at..at + 4] != [0; 4]);
        let by_range = self.counters()?.iter().any(|counter| counter.name == "by_range" && counter.total() > 0);
        Ok((refused || by_range).then_some(!refused))
    }
}

/// `net.ipv4.ip_local_reserved_ports` as a bitmap of 32-bit words. Unreadable counts as empty, which is the default.
fn reserved_ports() -> Vec<u32> {
    bitmap(&std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default())
}

fn bitmap(list: &str) -> Vec<u32> {
    let mut words = vec![0u32; 65_536 / 32];
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { continue };
        for port in first..=last {
            words[usize::from(port) / 32] |= 1 << (port % 32);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_become_bits() {
        let words = bitmap("8080,40000-40002,65535\n");
        let set: Vec<usize> = (0..65_536).filter(|port| words[port / 32] & 1 << (port % 32) != 0).collect();
        assert_eq!(set, [8080, 40000, 40001, 40002, 65535]);
        assert_eq!(bitmap("\n"), vec![0; 2048]);
    }
}
