//! What there is: the interface, its queues and interrupts, the CPUs, and the present value of every setting.

use std::collections::BTreeMap;
use std::io;

use crate::error::NicError;
use crate::files::SystemFiles;
use crate::interface::{Channels, Coalescing, Identity, InterfaceOps, Ntuple};
use crate::irqs::{QueueInterrupt, queue_interrupts};
use crate::setting::{Setting, channels_text, switch_text};
use ksf::cpus::{CpuSet, CpuSetError};

/// Facts about an interface and its machine. Planning needs nothing else.
#[derive(Debug, Clone)]
pub struct Inventory {
    /// Name of the interface.
    pub iface: String,
    /// Who it is; `None` if the kernel cannot be asked (files of a test).
    pub identity: Option<Identity>,
    /// The driver, or the kind of a virtual interface.
    pub driver: String,
    /// The NUMA node of the device, where it has one.
    pub node: Option<u32>,
    /// CPUs of that node; empty without one.
    pub near: CpuSet,
    /// CPUs that are online.
    pub online: CpuSet,
    /// CPUs this process may run on: taskset, cpuset, isolcpus.
    pub allowed: CpuSet,
    /// Numbers of receive queues.
    pub rx: Vec<u32>,
    /// Numbers of transmit queues.
    pub tx: Vec<u32>,
    /// Interrupts of queues.
    pub interrupts: Vec<QueueInterrupt>,
    /// Numbers of queues and their maxima, or why they are not known.
    pub channels: Result<Channels, Lack>,
    /// Interrupt coalescing, or why it is not known.
    pub coalescing: Result<Coalescing, Lack>,
    /// Flow steering filters, or why they are not known.
    pub ntuple: Result<Ntuple, Lack>,
    /// The present value of every setting, or why there is none.
    pub values: BTreeMap<Setting, Result<String, Lack>>,
    /// How the default route passes the interface: an empty text if it is its own, else the interface above.
    pub default_route: Option<String>,
    /// The running irqbalance.
    pub irqbalance: Option<Irqbalance>,
}

/// Why a setting has no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// The driver or the kernel does not have it.
    NotSupported,
    /// It cannot be read.
    Unreadable(String),
}

/// A running irqbalance(1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Irqbalance {
    /// Its process.
    pub pid: u32,
    /// Its arguments.
    pub args: Vec<String>,
}

impl Irqbalance {
    /// Whether it was told to leave an interrupt alone, or has a script that may say so.
    pub fn leaves_alone(&self, irq: u32) -> bool {
        let mut args = self.args.iter().peekable();
        while let Some(arg) = args.next() {
            let (name, value) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (arg.as_str(), args.peek().map(|next| next.to_string())),
            };
            match name {
                "--banirq" | "-i" if value.as_deref().is_some_and(|value| value.parse() == Ok(irq)) => return true,
                "--policyscript" | "-l" | "--banscript" | "-b" | "--banmod" | "-m" => return true,
                _ => {}
            }
        }
        false
    }
}

/// Why a read failed, in the plan's terms.
pub(crate) fn lack_of(error: &io::Error) -> Lack {
    let code = error.raw_os_error();
    let is = |errno: rustix::io::Errno| code == Some(errno.raw_os_error());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::Unsupported => Lack::NotSupported,
        _ if is(rustix::io::Errno::OPNOTSUPP) => Lack::NotSupported,
        _ => Lack::Unreadable(error.to_string()),
    }
}

/// Whether a text can be the name of an interface (dev_valid_name() of Linux).
pub fn check_name(iface: &str) -> Result<(), NicError> {
    let bad_byte = |byte: u8| byte == b'/' || byte == b':' || byte.is_ascii_whitespace() || byte == 0;
    if iface.is_empty() || iface.len() > 15 || iface == "." || iface == ".." || iface.bytes().any(bad_byte) {
        return Err(NicError::BadName { name: iface.to_owned() });
    }
    Ok(())
}

/// Interfaces that are up, but for loopback ones, in the order of their names.
///
/// # Errors
///
/// /sys/class/net cannot be listed. An interface that goes away meanwhile is left out.
pub fn interfaces(files: &dyn SystemFiles) -> io::Result<Vec<String>> {
    // linux/if.h
    const UP: u32 = 1;
    const LOOPBACK: u32 = 8;
    let is_up = |name: &String| {
        let flags = files.read(&format!("sys/class/net/{name}/flags")).unwrap_or_default();
        let flags = flags.trim().strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        flags.is_some_and(|flags| flags & (UP | LOOPBACK) == UP)
    };
    let mut names: Vec<String> = files.list("sys/class/net")?.into_iter().filter(is_up).collect();
    names.sort_unstable();
    Ok(names)
}

impl Inventory {
    /// Looks at an interface. Changes nothing.
    pub fn look(files: &dyn SystemFiles, ops: &dyn InterfaceOps, iface: &str) -> Result<Self, NicError> {
        check_name(iface)?;
        let identity = identity(files, ops, iface)?;
        let folder = format!("sys/class/net/{iface}");
        let queue_names = files
            .list(&format!("{folder}/queues"))
            .map_err(|error| NicError::Read { path: format!("/{folder}/queues"), error })?;
        let (rx, tx) = (queues(&queue_names, "rx-"), queues(&queue_names, "tx-"));
        let device = files.canonical(&format!("{folder}/device")).ok();
        let node = device.as_deref().and_then(|device| numa_node(files, device));
        let near = node.map(|node| list_of(files, &format!("sys/devices/system/node/node{node}/cpulist")));
        let online = list_of(files, "sys/devices/system/cpu/online")?;
        let interrupts = queue_interrupts(files, ops, iface, device.as_deref());
        let lack = |error: io::Error| lack_of(&error);
        let channels = ops.channels(iface).map_err(lack);
        let coalescing = ops.coalescing(iface).map_err(lack);
        let ntuple = ops.ntuple(iface).map_err(lack);

        let mut values = BTreeMap::new();
        values.insert(Setting::Channels, channels.clone().map(channels_text));
        let adaptive = coalescing.clone().and_then(|all| all.adaptive_rx.ok_or(Lack::NotSupported));
        values.insert(Setting::AdaptiveRx, adaptive.map(switch_text));
        let usecs = coalescing.clone().and_then(|all| all.rx_usecs.ok_or(Lack::NotSupported));
        values.insert(Setting::RxUsecs, usecs.map(|usecs| usecs.to_string()));
        values.insert(Setting::Ntuple, ntuple.clone().map(|ntuple| switch_text(ntuple.on)));
        let mut keys = vec![Setting::SockFlows, Setting::DeferIrqs, Setting::GroFlush, Setting::Threaded];
        keys.extend(interrupts.iter().map(QueueInterrupt::key));
        keys.extend(rx.iter().flat_map(|&queue| [Setting::Rps { queue }, Setting::RpsFlows { queue }]));
        keys.extend(tx.iter().flat_map(|&queue| [Setting::Xps { queue }, Setting::XpsRxqs { queue }]));
        for key in keys {
            let value = key.path(iface).map_or(Err(Lack::NotSupported), |path| files.read(&path).map_err(lack));
            values.insert(key, value);
        }
        Ok(Self {
            driver: driver(files, device.as_deref(), identity.as_ref()),
            near: near.transpose()?.unwrap_or_default(),
            allowed: allowed(files, &online)?,
            default_route: default_route(files, iface),
            irqbalance: irqbalance(files),
            iface: iface.to_owned(),
            identity,
            node,
            online,
            rx,
            tx,
            interrupts,
            channels,
            coalescing,
            ntuple,
            values,
        })
    }

    /// The present value of a setting.
    pub fn value(&self, key: &Setting) -> Result<&str, Lack> {
        match self.values.get(key) {
            Some(Ok(value)) => Ok(value),
            Some(Err(lack)) => Err(lack.clone()),
            None => Err(Lack::NotSupported),
        }
    }

    /// The present value of a setting that is a number.
    pub fn number(&self, key: &Setting) -> Option<u64> {
        self.value(key).ok()?.trim().parse().ok()
    }
}

/// Who the interface is, if /sys and this thread's network namespace agree about it.
fn identity(files: &dyn SystemFiles, ops: &dyn InterfaceOps, iface: &str) -> Result<Option<Identity>, NicError> {
    let no_interface = || NicError::NoInterface { iface: iface.to_owned() };
    let read = |name: &str| files.read(&format!("sys/class/net/{iface}/{name}"));
    let in_sys = match (read("ifindex"), read("address")) {
        (Ok(index), address) => Some((index.trim().to_owned(), address.unwrap_or_default().trim().to_owned())),
        (Err(error), _) if error.kind() == io::ErrorKind::NotFound => None,
        (Err(error), _) => return Err(NicError::Read { path: format!("/sys/class/net/{iface}/ifindex"), error }),
    };
    let identity = match ops.identity(iface) {
        Ok(identity) => Some(identity),
        Err(error) => match lack_of(&error) {
            Lack::NotSupported => None,
            _ if is_no_device(&error) => return Err(no_interface()),
            _ => return Err(NicError::Interface { iface: iface.to_owned(), error }),
        },
    };
    let other = |seen: String| NicError::OtherNamespace { iface: iface.to_owned(), seen };
    match (identity, in_sys) {
        (None, None) => Err(no_interface()),
        (None, Some(_)) => Ok(None),
        (Some(_), None) => Err(other("it is not in /sys/class/net".to_owned())),
        // Names and indexes repeat in other network namespaces (each has its eth0), addresses hardly do.
        (Some(identity), Some((index, address))) => {
            if identity.ifindex.to_string() != index {
                return Err(other(format!("index {} and {index}", identity.ifindex)));
            }
            if identity.address != address {
                return Err(other(format!("address {} and {address}", identity.address)));
            }
            Ok(Some(identity))
        }
    }
}

/// Whether an error says that there is no such interface.
pub(crate) fn is_no_device(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

fn queues(names: &[String], prefix: &str) -> Vec<u32> {
    let mut queues: Vec<u32> =
        names.iter().filter_map(|name| name.strip_prefix(prefix)).filter_map(|number| number.parse().ok()).collect();
    queues.sort_unstable();
    queues
}

/// A device and what it sits on, up to the root of all devices: a virtio device sits on one of PCI, which has the node
/// and the interrupts.
pub(crate) fn with_parents(device: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(device), |path| path.rsplit_once('/').map(|(parent, _)| parent))
        .take_while(|path| *path != "sys/devices" && path.starts_with("sys/devices/"))
}

fn numa_node(files: &dyn SystemFiles, device: &str) -> Option<u32> {
    // -1, which does not parse, is a device of no particular node.
    with_parents(device).find_map(|path| files.read(&format!("{path}/numa_node")).ok())?.trim().parse().ok()
}

fn driver(files: &dyn SystemFiles, device: Option<&str>, identity: Option<&Identity>) -> String {
    let driver = device.and_then(|device| files.canonical(&format!("{device}/driver")).ok());
    let name = driver.as_deref().and_then(|path| path.rsplit('/').next()).map(str::to_owned);
    let kind = || identity.map(|identity| identity.kind.clone()).filter(|kind| !kind.is_empty());
    name.or_else(kind).unwrap_or_else(|| "this driver".to_owned())
}

fn list_of(files: &dyn SystemFiles, path: &str) -> Result<CpuSet, NicError> {
    let text = files.read(path).map_err(|error| NicError::Read { path: format!("/{path}"), error })?;
    let content = |error: CpuSetError| NicError::Content { path: format!("/{path}"), why: error.to_string() };
    CpuSet::from_list(&text).map_err(content)
}

/// The CPUs of this thread. Files of a test have no such thread: there, all that are online.
fn allowed(files: &dyn SystemFiles, online: &CpuSet) -> Result<CpuSet, NicError> {
    const STATUS: &str = "proc/thread-self/status";
    let Ok(status) = files.read(STATUS) else { return Ok(online.clone()) };
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    CpuSet::from_list(list).map_err(|error| NicError::Content { path: format!("/{STATUS}"), why: error.to_string() })
}

/// Whether a default route passes the interface, itself or by an interface above it (bond, bridge, VLAN).
fn default_route(files: &dyn SystemFiles, iface: &str) -> Option<String> {
    let ipv4 = files.read("proc/thread-self/net/route").unwrap_or_default();
    let ipv6 = files.read("proc/thread-self/net/ipv6_route").unwrap_or_default();
    let carriers = default_route_carriers(&ipv4, &ipv6);
    let mut seen = vec![iface.to_owned()];
    let mut at = 0;
    while let Some(name) = seen.get(at).cloned() {
        if carriers.contains(&name) {
            return Some(if name == iface { String::new() } else { name });
        }
        let entries = files.list(&format!("sys/class/net/{name}")).unwrap_or_default();
        for upper in entries.iter().filter_map(|entry| entry.strip_prefix("upper_")) {
            if !seen.iter().any(|known| known == upper) {
                seen.push(upper.to_owned());
            }
        }
        at += 1;
    }
    None
}

/// Names of interfaces in default routes: of /proc/net/route, and of /proc/net/ipv6_route, which also lists routes
/// that reject (flag 0x200) and those on lo.
fn default_route_carriers(ipv4: &str, ipv6: &str) -> Vec<String> {
    const RTF_REJECT: u32 = 0x200;
    let mut carriers = Vec::new();
    for line in ipv4.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [iface, "00000000", _, _, _, _, _, "00000000", ..] = words[..] {
            carriers.push(iface.to_owned());
        }
    }
    for line in ipv6.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [target, "00", .., flags, iface] = words[..] else { continue };
        let rejects = u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & RTF_REJECT != 0);
        if target.bytes().all(|byte| byte == b'0') && !rejects && iface != "lo" {
            carriers.push(iface.to_owned());
        }
    }
    carriers
}

fn irqbalance(files: &dyn SystemFiles) -> Option<Irqbalance> {
    let processes = files.list("proc").ok()?;
    let mut pids: Vec<u32> = processes.iter().filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    let pid = pids
        .into_iter()
        .find(|pid| files.read(&format!("proc/{pid}/comm")).is_ok_and(|name| name.trim() == "irqbalance"))?;
    let line = files.read(&format!("proc/{pid}/cmdline")).unwrap_or_default();
    let args = line.split('\0').skip(1).filter(|arg| !arg.is_empty()).map(str::to_owned).collect();
    Some(Irqbalance { pid, args })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_linux_takes() {
        for name in ["eth0", "enp3s0f1np1", "br-lan", "eth0.100", "a"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a/b", "../x", "eth0:1", "a b", "a\n", "sixteen-bytes-ab"] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn default_routes_are_found_in_both_families() {
        let ipv4 = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
            eth2\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n";
        let zero = "0".repeat(32);
        let other = "f".repeat(32);
        let route = |target: &str, bits: &str, flags: &str, iface: &str| {
            format!("{target} {bits} {zero} 00 {zero} ffffffff 00000001 00000000 {flags} {iface}\n")
        };
        let ipv6 = route(&zero, "00", "00200200", "eth4")
            + &route(&zero, "00", "00000003", "eth3")
            + &route(&other, "40", "00000001", "eth5")
            + &route(&zero, "00", "00000001", "lo");
        assert_eq!(default_route_carriers(ipv4, &ipv6), ["eth0", "eth3"]);
        assert!(default_route_carriers("", "garbage\n\n00").is_empty());
    }

    #[test]
    fn irqbalance_is_understood() {
        let with = |args: &[&str]| Irqbalance { pid: 1, args: args.iter().map(|arg| arg.to_string()).collect() };
        assert!(with(&["--foreground", "--banirq=38"]).leaves_alone(38));
        assert!(with(&["-i", "38"]).leaves_alone(38));
        assert!(with(&["--policyscript=/etc/x"]).leaves_alone(7));
        assert!(!with(&["--foreground", "--banirq=3"]).leaves_alone(38));
        assert!(!with(&[]).leaves_alone(38));
    }

    #[test]
    fn parents_end_below_the_root_of_devices() {
        let path = "sys/devices/pci0000:00/0000:00:03.0/virtio2";
        let all: Vec<&str> = with_parents(path).collect();
        assert_eq!(all, [path, "sys/devices/pci0000:00/0000:00:03.0", "sys/devices/pci0000:00"]);
        assert_eq!(with_parents("sys/other").count(), 0);
    }
}
