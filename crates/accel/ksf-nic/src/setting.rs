//! Settings: what they are called, where they live, and when two values of one are the same.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

use crate::files::SystemFiles;
use crate::interface::{Channels, Coalescing, InterfaceOps};
use ksf::cpus::CpuSet;

/// Settings that belong together; `--skip` names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Number of queues.
    Queues,
    /// Interrupt coalescing.
    Coalescing,
    /// Flow steering in the hardware.
    Arfs,
    /// Interrupt affinity.
    Irq,
    /// Receive packet steering.
    Rps,
    /// Receive flow steering.
    Rfs,
    /// Transmit packet steering.
    Xps,
    /// Deferred interrupts and threads.
    Napi,
}

impl Group {
    /// All groups, in the order in which they are applied.
    pub const ALL: [Group; 8] =
        [Self::Queues, Self::Coalescing, Self::Arfs, Self::Irq, Self::Rps, Self::Rfs, Self::Xps, Self::Napi];

    /// The word of the command line and of JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queues => "queues",
            Self::Coalescing => "coalescing",
            Self::Arfs => "arfs",
            Self::Irq => "irq",
            Self::Rps => "rps",
            Self::Rfs => "rfs",
            Self::Xps => "xps",
            Self::Napi => "napi",
        }
    }
}

/// One setting of an interface. The order is the order in which settings are applied: queues before everything that
/// belongs to a queue, the switch of adaptive coalescing before the delay it overrides, the flow table of the machine
/// before those of queues. Rollback goes the other way, but for queues, which come first there too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "setting", rename_all = "snake_case")]
pub enum Setting {
    /// Numbers of queues.
    Channels,
    /// Adaptive interrupt coalescing of receive queues.
    AdaptiveRx,
    /// Delay of receive interrupts, in microseconds.
    RxUsecs,
    /// Flow steering filters in the hardware.
    Ntuple,
    /// CPUs an interrupt may go to.
    Irq {
        /// Number of the interrupt, which changes when a driver asks for its interrupts anew.
        number: u32,
        /// What the driver named it, which stays.
        handler: String,
    },
    /// CPUs that work on what a queue received.
    Rps {
        /// The receive queue.
        queue: u32,
    },
    /// Entries of the machine's table of flows and the CPUs that read them. Shared by all interfaces.
    SockFlows,
    /// Entries of a queue's table of flows.
    RpsFlows {
        /// The receive queue.
        queue: u32,
    },
    /// CPUs that send by a queue.
    Xps {
        /// The transmit queue.
        queue: u32,
    },
    /// Receive queues whose connections send by a queue. Recorded because it can be lost with the queue, never set.
    XpsRxqs {
        /// The transmit queue.
        queue: u32,
    },
    /// How often NAPI may find nothing before interrupts are enabled again.
    DeferIrqs,
    /// Nanoseconds after which NAPI looks again by itself.
    GroFlush,
    /// Whether NAPI runs in kernel threads.
    Threaded,
}

/// File names in /proc/irq/N that are not folders named by a driver.
const IRQ_FILES: &[&str] = &[
    "smp_affinity",
    "smp_affinity_list",
    "affinity_hint",
    "effective_affinity",
    "effective_affinity_list",
    "node",
    "spurious",
];

impl Setting {
    /// The group of the setting.
    pub fn group(&self) -> Group {
        match self {
            Self::Channels => Group::Queues,
            Self::AdaptiveRx | Self::RxUsecs => Group::Coalescing,
            Self::Ntuple => Group::Arfs,
            Self::Irq { .. } => Group::Irq,
            Self::Rps { .. } => Group::Rps,
            Self::SockFlows | Self::RpsFlows { .. } => Group::Rfs,
            Self::Xps { .. } | Self::XpsRxqs { .. } => Group::Xps,
            Self::DeferIrqs | Self::GroFlush | Self::Threaded => Group::Napi,
        }
    }

    /// The name of the setting without that of its queue or interrupt.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Channels => "channels",
            Self::AdaptiveRx => "adaptive-rx",
            Self::RxUsecs => "rx-usecs",
            Self::Ntuple => "ntuple-filters",
            Self::Irq { .. } => "smp_affinity",
            Self::Rps { .. } => "rps_cpus",
            Self::SockFlows => "rps_sock_flow_entries",
            Self::RpsFlows { .. } => "rps_flow_cnt",
            Self::Xps { .. } => "xps_cpus",
            Self::XpsRxqs { .. } => "xps_rxqs",
            Self::DeferIrqs => "napi_defer_hard_irqs",
            Self::GroFlush => "gro_flush_timeout",
            Self::Threaded => "threaded",
        }
    }

    /// The queue the setting belongs to: its folder's first part, and its number.
    pub fn queue(&self) -> Option<(&'static str, u32)> {
        match self {
            Self::Rps { queue } | Self::RpsFlows { queue } => Some(("rx", *queue)),
            Self::Xps { queue } | Self::XpsRxqs { queue } => Some(("tx", *queue)),
            _ => None,
        }
    }

    /// Whether all interfaces of the machine share the setting.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::SockFlows)
    }

    /// Whether the value is a mask of CPUs or queues.
    fn is_mask(&self) -> bool {
        matches!(self, Self::Irq { .. } | Self::Rps { .. } | Self::Xps { .. } | Self::XpsRxqs { .. })
    }

    /// Whether drivers may take another value than the one written, such as the next multiple of two.
    pub(crate) fn is_rounded(&self) -> bool {
        matches!(self, Self::RxUsecs)
    }

    /// Whether two texts are the same value: `3`, `00000003` and `3\n` are the same mask.
    pub fn same(&self, one: &str, other: &str) -> bool {
        let (one, other) = (one.trim(), other.trim());
        if one == other {
            return true;
        }
        match (CpuSet::from_mask(one), CpuSet::from_mask(other)) {
            (Ok(one), Ok(other)) if self.is_mask() => one == other,
            _ => false,
        }
    }

    /// The value for people: a mask of CPUs as a list.
    pub fn shown(&self, text: &str) -> String {
        match self {
            Self::Irq { .. } | Self::Rps { .. } | Self::Xps { .. } => match CpuSet::from_mask(text) {
                Ok(cpus) if cpus.is_empty() => "none".to_owned(),
                Ok(cpus) => format!("CPU {cpus}"),
                Err(_) => text.trim().to_owned(),
            },
            _ => text.trim().to_owned(),
        }
    }

    /// The file the setting lives in; `None` for those changed by netlink.
    pub fn path(&self, iface: &str) -> Option<String> {
        let of_queue = |direction: &str, queue: &u32| {
            Some(format!("sys/class/net/{iface}/queues/{direction}-{queue}/{}", self.name()))
        };
        match self {
            Self::Channels | Self::AdaptiveRx | Self::RxUsecs | Self::Ntuple => None,
            Self::Irq { number, .. } => Some(format!("proc/irq/{number}/smp_affinity")),
            Self::Rps { queue } | Self::RpsFlows { queue } => of_queue("rx", queue),
            Self::Xps { queue } | Self::XpsRxqs { queue } => of_queue("tx", queue),
            Self::SockFlows => Some("proc/sys/net/core/rps_sock_flow_entries".to_owned()),
            Self::DeferIrqs | Self::GroFlush | Self::Threaded => Some(format!("sys/class/net/{iface}/{}", self.name())),
        }
    }

    /// The value now, as the kernel writes it.
    pub(crate) fn read(&self, files: &dyn SystemFiles, ops: &dyn InterfaceOps, iface: &str) -> io::Result<String> {
        match self {
            Self::Channels => Ok(channels_text(ops.channels(iface)?)),
            Self::AdaptiveRx => {
                ops.coalescing(iface)?.adaptive_rx.map(switch_text).ok_or_else(|| io::ErrorKind::Unsupported.into())
            }
            Self::RxUsecs => {
                let usecs = ops.coalescing(iface)?.rx_usecs;
                usecs.map(|usecs| usecs.to_string()).ok_or_else(|| io::ErrorKind::Unsupported.into())
            }
            Self::Ntuple => Ok(switch_text(ops.ntuple(iface)?.on)),
            Self::Irq { number, handler } => {
                files.read(&irq_path(files, *number, handler).ok_or(io::ErrorKind::NotFound)?)
            }
            _ => files.read(&self.path(iface).unwrap_or_default()),
        }
    }

    /// Changes the value.
    pub(crate) fn write(
        &self,
        files: &mut dyn SystemFiles,
        ops: &mut dyn InterfaceOps,
        iface: &str,
        value: &str,
    ) -> io::Result<()> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        let switch = || switch_of(value).ok_or_else(bad);
        match self {
            Self::Channels => ops.set_channels(iface, channels_of(value).ok_or_else(bad)?),
            Self::AdaptiveRx => ops.set_coalescing(iface, Coalescing { adaptive_rx: Some(switch()?), rx_usecs: None }),
            Self::RxUsecs => {
                let usecs = value.trim().parse().map_err(|_| bad())?;
                ops.set_coalescing(iface, Coalescing { adaptive_rx: None, rx_usecs: Some(usecs) })
            }
            Self::Ntuple => ops.set_ntuple(iface, switch()?),
            Self::Irq { number, handler } => {
                let path = irq_path(files, *number, handler).ok_or(io::ErrorKind::NotFound)?;
                files.write(&path, value)
            }
            _ => files.write(&self.path(iface).unwrap_or_default(), value),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Irq { number, handler } => write!(f, "irq {number} ({handler})"),
            key => match key.queue() {
                Some((direction, queue)) => write!(f, "{direction}-{queue} {}", key.name()),
                None => f.write_str(key.name()),
            },
        }
    }
}

/// Names the drivers gave the handlers of an interrupt: folders in /proc/irq/N.
pub(crate) fn irq_handlers(files: &dyn SystemFiles, number: u32) -> Vec<String> {
    let mut names = files.list(&format!("proc/irq/{number}")).unwrap_or_default();
    names.retain(|name| !IRQ_FILES.contains(&name.as_str()));
    names.sort_unstable();
    names
}

/// Where the affinity of an interrupt is: by its number if the name still fits, else by the name, because a driver that
/// changes its queues frees its interrupts and gets others.
fn irq_path(files: &dyn SystemFiles, number: u32, handler: &str) -> Option<String> {
    let has_it = |number: u32| irq_handlers(files, number).iter().any(|name| name == handler);
    let number = if has_it(number) {
        number
    } else {
        let numbers = files.list("proc/irq").ok()?;
        let mut found = numbers.iter().filter_map(|name| name.parse().ok()).filter(|number| has_it(*number));
        found.next().filter(|_| found.next().is_none())?
    };
    Some(format!("proc/irq/{number}/smp_affinity"))
}

pub(crate) fn channels_text(channels: Channels) -> String {
    format!("rx {} tx {} combined {}", channels.rx, channels.tx, channels.combined)
}

fn channels_of(text: &str) -> Option<Channels> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["rx", rx, "tx", tx, "combined", combined] = words[..] else { return None };
    let (rx, tx, combined) = (rx.parse().ok()?, tx.parse().ok()?, combined.parse().ok()?);
    Some(Channels { rx, tx, combined, ..Channels::default() })
}

pub(crate) fn switch_text(on: bool) -> String {
    if on { "on" } else { "off" }.to_owned()
}

fn switch_of(text: &str) -> Option<bool> {
    match text.trim() {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_compared_as_sets_and_numbers_as_texts() {
        let mask = Setting::Rps { queue: 0 };
        assert!(mask.same("00000000,00000003\n", "3") && !mask.same("3", "1") && !mask.same("", "0"));
        // A mask would read them as the same set of CPUs.
        assert!(!Setting::GroFlush.same("010", "10") && Setting::GroFlush.same("10\n", "10"));
    }

    #[test]
    fn channels_survive_their_text() {
        let channels = Channels { rx: 1, tx: 2, combined: 3, ..Channels::default() };
        assert_eq!(channels_of(&channels_text(channels)), Some(channels));
        for text in ["", "rx 1", "rx a tx 2 combined 3", "rx 1 tx 2 combined 3 4"] {
            assert_eq!(channels_of(text), None, "{text}");
        }
    }

    #[test]
    fn queues_come_before_what_belongs_to_them() {
        let mut keys = [
            Setting::RpsFlows { queue: 0 },
            Setting::RxUsecs,
            Setting::SockFlows,
            Setting::AdaptiveRx,
            Setting::Channels,
        ];
        keys.sort();
        let names: Vec<&str> = keys.iter().map(Setting::name).collect();
        assert_eq!(names, ["channels", "adaptive-rx", "rx-usecs", "rps_sock_flow_entries", "rps_flow_cnt"]);
    }
}
