//! The kernel half of a service: programs on its TCP sockets, and on an interface for UDP.

use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;
use ksf::assist::Assist;
use ksf::listener::ListenAddr;
use ksf_kernel::{KernelError, KernelOptions, KernelService, ObjectSource, XdpLink};
use serde::Deserialize;

use crate::number::{Number, number};

/// The kernel half as flags.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct KernelArgs {
    /// Answer UDP by XDP on this interface; repeatable [default: lo for loopback addresses]
    #[arg(long, value_name = "IFACE", conflicts_with = "no_xdp")]
    xdp: Vec<String>,
    /// Answer UDP in user space
    #[arg(long)]
    no_xdp: bool,
    /// Bytes the kernel half may have outstanding on one connection before it passes to user space
    #[arg(long, value_name = "BYTES", value_parser = number::<1, { u32::MAX as u64 }>)]
    window_bytes: Option<u64>,
}

/// The kernel half in the table of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct KernelTable {
    /// Interface for XDP, `"none"` to answer UDP in user space.
    #[serde(default)]
    pub(crate) xdp: Xdp,
    /// Bytes the kernel half may have outstanding on a connection.
    pub(crate) window_bytes: Option<Number<1, { u32::MAX as u64 }>>,
}

impl From<KernelArgs> for KernelTable {
    fn from(args: KernelArgs) -> Self {
        let xdp = match (args.no_xdp, args.xdp.is_empty()) {
            (true, _) => Xdp::Off,
            (false, true) => Xdp::Loopback,
            (false, false) => Xdp::On(args.xdp),
        };
        KernelTable { xdp, window_bytes: args.window_bytes.map(Number) }
    }
}

/// Where UDP is answered by XDP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub(crate) enum Xdp {
    /// Nowhere.
    Off,
    /// On lo, for listeners on loopback: a program on another interface sees all of its packets, so it is put there
    /// only when somebody says so.
    #[default]
    Loopback,
    /// On these interfaces; failing to attach there is an error.
    On(Vec<String>),
}

impl From<String> for Xdp {
    fn from(interface: String) -> Self {
        if interface == "none" { Xdp::Off } else { Xdp::On(vec![interface]) }
    }
}

/// A loaded kernel half. Dropping it takes everything out of the kernel.
#[derive(Debug)]
pub(crate) struct Half {
    pub(crate) service: KernelService,
    links: Vec<XdpLink>,
}

impl Half {
    /// Loads the programs; nothing is attached yet.
    pub(crate) fn load(source: &ObjectSource, options: &KernelOptions) -> Result<Self, KernelError> {
        Ok(Half { service: KernelService::load(source, options)?, links: Vec::new() })
    }

    /// The seam for the engine.
    pub(crate) fn assist(&self) -> Arc<dyn Assist> {
        Arc::new(self.service.assist())
    }

    /// Has XDP answer the UDP listeners among `listeners`, as `wish` says. The notes say which are left to user space.
    pub(crate) fn attach_udp(&mut self, wish: &Xdp, listeners: &[ListenAddr]) -> Result<Vec<String>, KernelError> {
        let udp: Vec<SocketAddr> = listeners
            .iter()
            .filter_map(|listener| match listener {
                ListenAddr::Udp(address) => Some(*address),
                _ => None,
            })
            .collect();
        if udp.is_empty() {
            return Ok(Vec::new());
        }
        match wish {
            Xdp::Off => Ok(Vec::new()),
            Xdp::On(interfaces) => {
                for interface in interfaces {
                    self.links.push(self.service.attach_udp(interface, &udp)?);
                }
                Ok(Vec::new())
            }
            Xdp::Loopback => {
                let is_local = |address: &SocketAddr| address.ip().is_loopback() || address.ip().is_unspecified();
                let local: Vec<SocketAddr> = udp.iter().copied().filter(is_local).collect();
                if !local.is_empty() {
                    self.links.push(self.service.attach_udp("lo", &local)?);
                }
                let from_outside = udp.iter().filter(|address| !address.ip().is_loopback());
                Ok(from_outside
                    .map(|address| {
                        format!(
                            "udp {address}: datagrams of other machines are answered in user space; \
                             to have XDP answer them: --xdp IFACE"
                        )
                    })
                    .collect())
            }
        }
    }

    /// Takes XDP off its interfaces.
    pub(crate) fn detach_udp(&mut self) {
        self.links.clear();
    }

    /// Interfaces with their modes, for the line of a ready UDP listener: `lo:generic`. Empty without XDP.
    pub(crate) fn xdp(&self) -> String {
        let links: Vec<String> =
            self.links.iter().map(|link| format!("{}:{}", link.interface(), link.mode())).collect();
        links.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_file_say_where_xdp_goes() {
        let table = |text: &str| toml::from_str::<KernelTable>(text).unwrap();
        assert_eq!(table(""), KernelArgs::default().into());
        assert_eq!(table("xdp = \"none\"").xdp, Xdp::Off);
        let flags = KernelArgs { xdp: vec!["eth0".into()], window_bytes: Some(65536), ..KernelArgs::default() };
        assert_eq!(table("xdp = \"eth0\"\nwindow_bytes = \"64k\""), flags.into());
    }
}
