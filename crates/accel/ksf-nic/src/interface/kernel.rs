//! The running kernel, asked by netlink. Numbers of commands and attributes are those of linux/ethtool_netlink.h,
//! linux/netdev.h (Linux 6.8) and linux/rtnetlink.h.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::{Channels, Coalescing, Direction, Identity, InterfaceOps, Ntuple, QueueIrq};
use crate::netlink::{
    self, Attributes, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, attribute, attribute_string, attribute_u32, attributes,
};

/// Length of `struct genlmsghdr`.
const GENERIC_BYTES: usize = 4;
/// How often a dump is taken again when interfaces changed meanwhile.
const DUMPS_MAX: usize = 5;

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const ETHTOOL_MSG_FEATURES_GET: u8 = 11;
const ETHTOOL_MSG_FEATURES_SET: u8 = 12;
const ETHTOOL_MSG_CHANNELS_GET: u8 = 17;
const ETHTOOL_MSG_CHANNELS_SET: u8 = 18;
const ETHTOOL_MSG_COALESCE_GET: u8 = 19;
const ETHTOOL_MSG_COALESCE_SET: u8 = 20;
/// The first attribute of each ethtool message.
const ETHTOOL_A_HEADER: u16 = 1;
const ETHTOOL_A_HEADER_DEV_NAME: u16 = 2;
const ETHTOOL_A_HEADER_FLAGS: u16 = 3;
const ETHTOOL_FLAG_OMIT_REPLY: u32 = 2;
const ETHTOOL_A_CHANNELS_RX_MAX: u16 = 2;
const ETHTOOL_A_CHANNELS_TX_MAX: u16 = 3;
const ETHTOOL_A_CHANNELS_COMBINED_MAX: u16 = 5;
const ETHTOOL_A_CHANNELS_RX_COUNT: u16 = 6;
const ETHTOOL_A_CHANNELS_TX_COUNT: u16 = 7;
const ETHTOOL_A_CHANNELS_COMBINED_COUNT: u16 = 9;
const ETHTOOL_A_COALESCE_RX_USECS: u16 = 2;
const ETHTOOL_A_COALESCE_USE_ADAPTIVE_RX: u16 = 11;
const ETHTOOL_A_FEATURES_HW: u16 = 2;
const ETHTOOL_A_FEATURES_WANTED: u16 = 3;
const ETHTOOL_A_FEATURES_ACTIVE: u16 = 4;
const ETHTOOL_A_FEATURES_NOCHANGE: u16 = 5;
const ETHTOOL_A_BITSET_BITS: u16 = 3;
const ETHTOOL_A_BITSET_BITS_BIT: u16 = 1;
const ETHTOOL_A_BITSET_BIT_NAME: u16 = 2;
const ETHTOOL_A_BITSET_BIT_VALUE: u16 = 3;
/// The feature that ethtool(8) calls ntuple-filters.
const NTUPLE: &str = "rx-ntuple-filter";

const NETDEV_CMD_QUEUE_GET: u8 = 10;
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_A_QUEUE_ID: u16 = 1;
const NETDEV_A_QUEUE_IFINDEX: u16 = 2;
const NETDEV_A_QUEUE_TYPE: u16 = 3;
const NETDEV_A_QUEUE_NAPI_ID: u16 = 4;
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_IRQ: u16 = 3;

const RTM_GETLINK: u16 = 18;
/// Length of `struct ifinfomsg`; the index is at byte 4.
const IFINFO_BYTES: usize = 16;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;

/// A netlink socket for each of the two protocols, in the network namespace of the thread that made them.
#[derive(Debug)]
pub struct Netlink {
    generic: NetlinkSocket,
    route: NetlinkSocket,
}

impl Netlink {
    /// Opens the sockets.
    ///
    /// # Errors
    ///
    /// What socket(2) answers: a seccomp profile, the limit of descriptors.
    pub fn open() -> io::Result<Self> {
        Ok(Self { generic: NetlinkSocket::open(Some(netlink::GENERIC))?, route: NetlinkSocket::open(None)? })
    }

    /// Number of a generic family; EOPNOTSUPP where the kernel does not have it.
    fn family(&self, name: &str) -> io::Result<u16> {
        let attributes = Attributes::default().string(CTRL_ATTR_FAMILY_NAME, name);
        let answers = self.generic.ask(GENL_ID_CTRL, NLM_F_ACK, &[CTRL_CMD_GETFAMILY, 1, 0, 0], &attributes);
        let answers = answers.map_err(|error| match error.raw_os_error() {
            Some(code) if code == rustix::io::Errno::NOENT.raw_os_error() => rustix::io::Errno::OPNOTSUPP.into(),
            _ => error,
        })?;
        let id = answers.first().and_then(|answer| attribute(answer.get(GENERIC_BYTES..)?, CTRL_ATTR_FAMILY_ID));
        let id = id.and_then(|id| Some(u16::from_ne_bytes(id.try_into().ok()?)));
        id.ok_or_else(|| rustix::io::Errno::BADMSG.into())
    }

    /// Asks the family `ethtool` for the attributes of one message.
    fn ethtool(&self, iface: &str, command: u8) -> io::Result<Vec<u8>> {
        let header = Attributes::default().string(ETHTOOL_A_HEADER_DEV_NAME, iface);
        let attributes = Attributes::default().nest(ETHTOOL_A_HEADER, header);
        let family = self.family("ethtool")?;
        let answers = self.generic.ask(family, NLM_F_ACK, &[command, 1, 0, 0], &attributes)?;
        let answer = answers.into_iter().next().and_then(|answer| Some(answer.get(GENERIC_BYTES..)?.to_vec()));
        answer.ok_or_else(|| rustix::io::Errno::BADMSG.into())
    }

    /// Has the family `ethtool` change something.
    fn set_ethtool(&self, iface: &str, command: u8, fill: impl FnOnce(Attributes) -> Attributes) -> io::Result<()> {
        let header = Attributes::default()
            .string(ETHTOOL_A_HEADER_DEV_NAME, iface)
            .u32(ETHTOOL_A_HEADER_FLAGS, ETHTOOL_FLAG_OMIT_REPLY);
        let attributes = fill(Attributes::default().nest(ETHTOOL_A_HEADER, header));
        let family = self.family("ethtool")?;
        self.generic.ask(family, NLM_F_ACK, &[command, 1, 0, 0], &attributes).map(drop)
    }

    /// Dumps what the family `netdev` knows of an interface.
    fn netdev(&self, family: u16, command: u8, attributes: &Attributes) -> io::Result<Vec<Vec<u8>>> {
        for _ in 1..DUMPS_MAX {
            match self.generic.ask(family, NLM_F_DUMP, &[command, 1, 0, 0], attributes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
        self.generic.ask(family, NLM_F_DUMP, &[command, 1, 0, 0], attributes)
    }
}

impl InterfaceOps for Netlink {
    fn identity(&self, iface: &str) -> io::Result<Identity> {
        let attributes = Attributes::default().string(IFLA_IFNAME, iface);
        let answers = self.route.ask(RTM_GETLINK, NLM_F_ACK, &[0; IFINFO_BYTES], &attributes)?;
        let parse = |answer: &[u8]| {
            let index = answer.get(4..8)?;
            let attributes = answer.get(IFINFO_BYTES..)?;
            let address = attribute(attributes, IFLA_ADDRESS).unwrap_or_default();
            let kind = attribute(attributes, IFLA_LINKINFO).and_then(|info| attribute_string(info, IFLA_INFO_KIND));
            Some(Identity {
                ifindex: u32::from_ne_bytes(index.try_into().ok()?),
                address: address.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":"),
                kind: kind.unwrap_or_default().to_owned(),
            })
        };
        let identity = answers.first().and_then(|answer| parse(answer));
        identity.ok_or_else(|| rustix::io::Errno::BADMSG.into())
    }

    fn channels(&self, iface: &str) -> io::Result<Channels> {
        let answer = self.ethtool(iface, ETHTOOL_MSG_CHANNELS_GET)?;
        let number = |kind| attribute_u32(&answer, kind).unwrap_or(0);
        Ok(Channels {
            rx: number(ETHTOOL_A_CHANNELS_RX_COUNT),
            tx: number(ETHTOOL_A_CHANNELS_TX_COUNT),
            combined: number(ETHTOOL_A_CHANNELS_COMBINED_COUNT),
            rx_max: number(ETHTOOL_A_CHANNELS_RX_MAX),
            tx_max: number(ETHTOOL_A_CHANNELS_TX_MAX),
            combined_max: number(ETHTOOL_A_CHANNELS_COMBINED_MAX),
        })
    }

    fn set_channels(&mut self, iface: &str, wanted: Channels) -> io::Result<()> {
        // A count the driver does not have must not be named: the kernel refuses it even where it is zero.
        let now = self.channels(iface)?;
        self.set_ethtool(iface, ETHTOOL_MSG_CHANNELS_SET, |mut attributes| {
            for (kind, max, count) in [
                (ETHTOOL_A_CHANNELS_RX_COUNT, now.rx_max, wanted.rx),
                (ETHTOOL_A_CHANNELS_TX_COUNT, now.tx_max, wanted.tx),
                (ETHTOOL_A_CHANNELS_COMBINED_COUNT, now.combined_max, wanted.combined),
            ] {
                if max > 0 {
                    attributes = attributes.u32(kind, count);
                }
            }
            attributes
        })
    }

    fn coalescing(&self, iface: &str) -> io::Result<Coalescing> {
        let answer = self.ethtool(iface, ETHTOOL_MSG_COALESCE_GET)?;
        let adaptive = attribute(&answer, ETHTOOL_A_COALESCE_USE_ADAPTIVE_RX).and_then(|value| value.first());
        Ok(Coalescing {
            adaptive_rx: adaptive.map(|value| *value != 0),
            rx_usecs: attribute_u32(&answer, ETHTOOL_A_COALESCE_RX_USECS),
        })
    }

    fn set_coalescing(&mut self, iface: &str, wanted: Coalescing) -> io::Result<()> {
        self.set_ethtool(iface, ETHTOOL_MSG_COALESCE_SET, |mut attributes| {
            if let Some(on) = wanted.adaptive_rx {
                attributes = attributes.u8(ETHTOOL_A_COALESCE_USE_ADAPTIVE_RX, on.into());
            }
            if let Some(usecs) = wanted.rx_usecs {
                attributes = attributes.u32(ETHTOOL_A_COALESCE_RX_USECS, usecs);
            }
            attributes
        })
    }

    fn ntuple(&self, iface: &str) -> io::Result<Ntuple> {
        let answer = self.ethtool(iface, ETHTOOL_MSG_FEATURES_GET)?;
        let has = |kind| attribute(&answer, kind).is_some_and(has_ntuple);
        Ok(Ntuple {
            on: has(ETHTOOL_A_FEATURES_ACTIVE),
            changeable: has(ETHTOOL_A_FEATURES_HW) && !has(ETHTOOL_A_FEATURES_NOCHANGE),
        })
    }

    fn set_ntuple(&mut self, iface: &str, on: bool) -> io::Result<()> {
        let mut bit = Attributes::default().string(ETHTOOL_A_BITSET_BIT_NAME, NTUPLE);
        if on {
            bit = bit.bytes(ETHTOOL_A_BITSET_BIT_VALUE, &[]);
        }
        let bits = Attributes::default().nest(ETHTOOL_A_BITSET_BITS_BIT, bit);
        let bitset = Attributes::default().nest(ETHTOOL_A_BITSET_BITS, bits);
        self.set_ethtool(iface, ETHTOOL_MSG_FEATURES_SET, |attributes| {
            attributes.nest(ETHTOOL_A_FEATURES_WANTED, bitset)
        })
    }

    fn queue_irqs(&self, iface: &str) -> io::Result<Vec<QueueIrq>> {
        let family = match self.family("netdev") {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(Vec::new()),
            result => result?,
        };
        let ifindex = self.identity(iface)?.ifindex;
        let of_interface = Attributes::default().u32(NETDEV_A_NAPI_IFINDEX, ifindex);
        let napis = match self.netdev(family, NETDEV_CMD_NAPI_GET, &of_interface) {
            // Linux 6.6 and 6.7 have the family without these commands.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(Vec::new()),
            result => result?,
        };
        let irqs: BTreeMap<u32, u32> = napis
            .iter()
            .filter_map(|napi| napi.get(GENERIC_BYTES..))
            .filter_map(|napi| Some((attribute_u32(napi, NETDEV_A_NAPI_ID)?, attribute_u32(napi, NETDEV_A_NAPI_IRQ)?)))
            .collect();
        let of_interface = Attributes::default().u32(NETDEV_A_QUEUE_IFINDEX, ifindex);
        let queues = self.netdev(family, NETDEV_CMD_QUEUE_GET, &of_interface)?;
        let parse = |queue: &Vec<u8>| {
            let queue = queue.get(GENERIC_BYTES..)?;
            let direction = match attribute_u32(queue, NETDEV_A_QUEUE_TYPE)? {
                0 => Direction::Rx,
                1 => Direction::Tx,
                _ => return None,
            };
            let irq = *irqs.get(&attribute_u32(queue, NETDEV_A_QUEUE_NAPI_ID)?)?;
            Some(QueueIrq { direction, queue: attribute_u32(queue, NETDEV_A_QUEUE_ID)?, irq })
        };
        Ok(queues.iter().filter_map(parse).collect())
    }

    fn namespace(&self) -> String {
        let inode = std::fs::metadata("/proc/thread-self/ns/net").map(|meta| meta.ino());
        inode.map(|inode| inode.to_string()).unwrap_or_default()
    }
}

/// Whether a verbose bitset has the feature: lists hold the set bits, with a mask also cleared ones without VALUE.
fn has_ntuple(bitset: &[u8]) -> bool {
    const ETHTOOL_A_BITSET_NOMASK: u16 = 1;
    let is_list = attribute(bitset, ETHTOOL_A_BITSET_NOMASK).is_some();
    let bits = attribute(bitset, ETHTOOL_A_BITSET_BITS).unwrap_or_default();
    attributes(bits).filter(|(kind, _)| *kind == ETHTOOL_A_BITSET_BITS_BIT).any(|(_, bit)| {
        attribute_string(bit, ETHTOOL_A_BITSET_BIT_NAME) == Some(NTUPLE)
            && (is_list || attribute(bit, ETHTOOL_A_BITSET_BIT_VALUE).is_some())
    })
}
