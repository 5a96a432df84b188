//! What the kernel tells and changes about an interface outside of /sys: rtnetlink, and the generic netlink families
//! `ethtool` (Linux 5.6) and `netdev` (6.8).
//!
//! Netlink, and not the ethtool ioctl: only netlink tells a setting that is zero from one that the driver does not
//! have, so a plan can say "not supported" before anything is tried. And it needs no unsafe code.

mod kernel;

use std::io;

use serde::{Deserialize, Serialize};

pub use kernel::Netlink;

/// An interface, as the network namespace of this thread knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Index of the interface.
    pub ifindex: u32,
    /// Hardware address as in /sys, e.g. `02:00:00:00:00:01`.
    pub address: String,
    /// Kind of a virtual interface, e.g. `veth`. Empty for a device.
    pub kind: String,
}

/// Numbers of queues (`ethtool -l`). What a driver does not have is zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Channels {
    /// Queues that only receive.
    pub rx: u32,
    /// Queues that only transmit.
    pub tx: u32,
    /// Pairs of both, with one interrupt.
    pub combined: u32,
    /// The largest number of queues that only receive.
    pub rx_max: u32,
    /// The largest number of queues that only transmit.
    pub tx_max: u32,
    /// The largest number of pairs.
    pub combined_max: u32,
}

/// Interrupt coalescing of receive queues (`ethtool -c`). `None` is what a driver does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// Whether the driver adapts the delay to the traffic.
    pub adaptive_rx: Option<bool>,
    /// Microseconds an interrupt may be delayed after a packet was received.
    pub rx_usecs: Option<u32>,
}

/// The feature `rx-ntuple-filter`, which aRFS needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ntuple {
    /// Whether it is on.
    pub on: bool,
    /// Whether it can be switched.
    pub changeable: bool,
}

/// Direction of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Receive.
    Rx,
    /// Transmit.
    Tx,
}

/// The interrupt that serves a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueIrq {
    /// Direction of the queue.
    pub direction: Direction,
    /// Number of the queue in its direction.
    pub queue: u32,
    /// Number of the interrupt.
    pub irq: u32,
}

/// Questions and orders to the kernel about one interface, by name. What a driver does not have answers EOPNOTSUPP.
pub trait InterfaceOps {
    /// Who the interface is.
    fn identity(&self, iface: &str) -> io::Result<Identity>;
    /// Numbers of queues.
    fn channels(&self, iface: &str) -> io::Result<Channels>;
    /// Changes the numbers of queues; the maxima are not looked at.
    fn set_channels(&mut self, iface: &str, channels: Channels) -> io::Result<()>;
    /// Interrupt coalescing.
    fn coalescing(&self, iface: &str) -> io::Result<Coalescing>;
    /// Changes the settings that are `Some`, and no others.
    fn set_coalescing(&mut self, iface: &str, coalescing: Coalescing) -> io::Result<()>;
    /// Flow steering filters in the hardware.
    fn ntuple(&self, iface: &str) -> io::Result<Ntuple>;
    /// Switches flow steering filters.
    fn set_ntuple(&mut self, iface: &str, on: bool) -> io::Result<()>;
    /// Which interrupt serves which queue, where the driver tells. Empty otherwise.
    fn queue_irqs(&self, iface: &str) -> io::Result<Vec<QueueIrq>>;
    /// What tells this thread's network namespace from others of this boot. Empty if there is none to ask.
    fn namespace(&self) -> String;
}
