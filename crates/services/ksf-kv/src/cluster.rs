//! A map of slots that is written down once: which node has which keys, so that clients find them without a proxy.
//!
//! A key belongs to one of 16,384 slots, and a slot to one node. Nothing moves: there are no replicas, and no node looks after
//! another one.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Slots that there are.
pub const SLOTS: u16 = 16_384;

/// What is said of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// Where clients reach it: `192.0.2.1:6379`, `[2001:db8::1]:6379`, `store1.example.org:6379`.
    pub address: String,
    /// Its slots: `0-5460`, or several parts, as in `0-99,200,300-399`.
    pub slots: String,
}

/// What is wrong with a map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The address of a node is none.
    #[error("\"{0}\" is no address of a node: it is written as HOST:PORT")]
    Address(String),
    /// An address is there twice.
    #[error("the node {0} is there twice")]
    Twice(String),
    /// Two nodes would have the same id.
    #[error("the nodes {0} and {1} have the same id: write one of them in another way")]
    SameId(String, String),
    /// The slots of a node are none.
    #[error("the slots of {node} are written as 0-99,200,300-399, each at most {}: \"{text}\" is none of that", SLOTS - 1)]
    Slots {
        /// The node.
        node: String,
        /// What is wrong.
        text: String,
    },
    /// A slot has two nodes.
    #[error("slot {slot} belongs to {one} and to {other}")]
    Overlap {
        /// The slot.
        slot: u16,
        /// The node that had it first.
        one: String,
        /// The other one.
        other: String,
    },
    /// Slots have no node.
    #[error("slots {first} to {last} belong to no node")]
    Missing {
        /// The first of them.
        first: u16,
        /// The last in a row.
        last: u16,
    },
    /// The node that this one is said to be is not in the map.
    #[error("this node is said to be {0}, which is not in the map of slots")]
    NotInMap(String),
}

/// A node of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// 40 hexadecimal digits, which follow from the address.
    pub(crate) id: String,
    /// In order; what lies side by side is one.
    pub(crate) slots: Vec<RangeInclusive<u16>>,
}

impl Node {
    fn at(address: &str) -> Result<Self, ClusterError> {
        let wrong = || ClusterError::Address(address.to_owned());
        let (host, port) = match address.parse::<SocketAddr>() {
            Ok(address) => (address.ip().to_string(), address.port()),
            Err(_) => {
                let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
                let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
                if host.is_empty() || host.len() > NAME_BYTES_MAX || !host.bytes().all(is_name) {
                    return Err(wrong());
                }
                (host.to_owned(), port.parse().map_err(|_| wrong())?)
            }
        };
        if port == 0 {
            return Err(wrong());
        }
        let id = id_of(&format!("{host}:{port}"));
        Ok(Self { host, port, id, slots: Vec::new() })
    }
}

/// As `MOVED` names it: without brackets around an IPv6 address, as Redis does.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Longest name of a host (RFC 1035).
const NAME_BYTES_MAX: usize = 253;
/// Bytes of an id.
const ID_BYTES: usize = 20;

/// The same on every node: three rounds of FNV-1a, each of which goes on with what those before made.
fn id_of(address: &str) -> String {
    let mut bytes = Vec::new();
    while bytes.len() < ID_BYTES {
        let all = bytes.iter().chain(address.as_bytes());
        let hash = all.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        bytes.extend_from_slice(&hash.to_be_bytes());
    }
    bytes[..ID_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Which node has which slots, and which of them this one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    pub(crate) nodes: Vec<Node>,
    own: u16,
    /// Of each slot, the place of its node.
    owners: Box<[u16]>,
}

/// No node has it.
const NOBODY: u16 = u16::MAX;
/// Nodes of a map at most: each has a slot.
const NODES_MAX: usize = SLOTS as usize;

impl Cluster {
    /// A map of all slots, on the node whose address is `own`.
    ///
    /// # Errors
    ///
    /// [`ClusterError`]: a slot has no node, or two; an address or a number is none; `own` is not in the map.
    pub fn new(specs: &[NodeSpec], own: &str) -> Result<Self, ClusterError> {
        let mut nodes: Vec<Node> = Vec::new();
        let mut owners = vec![NOBODY; usize::from(SLOTS)].into_boxed_slice();
        // More nodes than slots leave one without a slot, or share one.
        for (number, NodeSpec { address, slots }) in (0..).zip(specs.iter().take(NODES_MAX + 1)) {
            let node = Node::at(address)?;
            if nodes.iter().any(|known| (&known.host, known.port) == (&node.host, node.port)) {
                return Err(ClusterError::Twice(node.to_string()));
            }
            if let Some(known) = nodes.iter().find(|known| known.id == node.id) {
                return Err(ClusterError::SameId(known.to_string(), node.to_string()));
            }
            for part in slots.split(',') {
                let range = range(part.trim()).ok_or_else(|| {
                    let (node, text) = (node.to_string(), part.trim().to_owned());
                    ClusterError::Slots { node, text }
                })?;
                for slot in range {
                    let owner = std::mem::replace(&mut owners[usize::from(slot)], number);
                    if owner != NOBODY {
                        let one = nodes.get(usize::from(owner)).unwrap_or(&node).to_string();
                        return Err(ClusterError::Overlap { slot, one, other: node.to_string() });
                    }
                }
            }
            nodes.push(node);
        }
        for (owner, slots) in runs(&owners) {
            match nodes.get_mut(usize::from(owner)) {
                Some(node) => node.slots.push(slots),
                None => return Err(ClusterError::Missing { first: *slots.start(), last: *slots.end() }),
            }
        }
        let wanted = Node::at(own)?;
        let is_own = |node: &Node| (&node.host, node.port) == (&wanted.host, wanted.port);
        let own = nodes.iter().position(is_own).ok_or_else(|| ClusterError::NotInMap(own.to_owned()))?;
        Ok(Self { nodes, own: own as u16, owners })
    }

    /// The address of this node, as clients are told.
    pub fn address(&self) -> String {
        self.own().to_string()
    }

    /// How many slots this node has.
    pub fn own_slots(&self) -> usize {
        self.own().slots.iter().map(|slots| slots.clone().count()).sum()
    }

    /// How many nodes there are.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// This node.
    pub(crate) fn own(&self) -> &Node {
        &self.nodes[usize::from(self.own)]
    }

    /// Its place in the map, from 1.
    pub(crate) fn own_number(&self) -> usize {
        usize::from(self.own) + 1
    }

    /// The node of a slot, if it is another one.
    pub(crate) fn elsewhere(&self, slot: u16) -> Option<&Node> {
        let owner = self.owners[usize::from(slot)];
        (owner != self.own).then(|| &self.nodes[usize::from(owner)])
    }

    /// The parts of the map, in order, each with its node.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (RangeInclusive<u16>, &Node)> {
        runs(&self.owners).map(|(owner, slots)| (slots, &self.nodes[usize::from(owner)]))
    }
}

/// Slots that lie side by side and have the same owner.
fn runs(owners: &[u16]) -> impl Iterator<Item = (u16, RangeInclusive<u16>)> {
    let mut first = 0;
    owners.chunk_by(|one, other| one == other).map(move |run| {
        let slots = first..=first + (run.len() - 1) as u16;
        first += run.len() as u16;
        (run[0], slots)
    })
}

/// `17` or `17-99`.
fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|slot| *slot < SLOTS && !text.starts_with('+'));
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(text)?, number(text)?),
    };
    (first <= last).then_some(first..=last)
}

/// CRC-16/XMODEM of each byte.
const CRC16: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| crc << 8 ^ CRC16[usize::from((crc >> 8) as u8 ^ byte)])
}

/// The slot of a key. If it has something between the first `{` and the first `}` behind that, only this counts, so that keys can
/// be kept together.
pub(crate) fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let behind = &key[open + 1..];
        let tag = &behind[..behind.iter().position(|byte| *byte == b'}')?];
        (!tag.is_empty()).then_some(tag)
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(address: &str, slots: &str) -> NodeSpec {
        NodeSpec { address: address.into(), slots: slots.into() }
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        // What Redis says to CLUSTER KEYSLOT.
        for (key, slot) in [("a", 15_495), ("foo", 12_182), ("somekey", 11_058), ("foo{hash_tag}", 2_515), ("", 0)] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        let same = |one: &str, other: &str| slot_of(one.as_bytes()) == slot_of(other.as_bytes());
        assert!(same("{user1000}.following", "{user1000}.followers") && same("{user1000}", "user1000"));
        assert!(same("foo{{bar}}zap", "{bar") && same("foo{bar}{zap}", "bar"));
        assert!(!same("foo{}{bar}", "bar") && !same("foo{}bar", ""));
        assert!(same("foo{bar", "foo{bar") && !same("foo{bar", "bar"));
    }

    #[test]
    fn a_map_tells_who_has_a_slot() {
        let specs =
            [spec("127.0.0.1:1", "0-99, 200,101-199"), spec("[::1]:2", "100"), spec("c.example:3", "201-16383")];
        let cluster = Cluster::new(&specs, "[::1]:2").unwrap();
        assert_eq!(cluster.own().to_string(), "::1:2");
        assert_eq!(cluster.nodes[0].slots, [0..=99, 101..=200]);
        assert_eq!(cluster.elsewhere(150).unwrap().to_string(), "127.0.0.1:1");
        assert_eq!(cluster.elsewhere(16_383).unwrap().to_string(), "c.example:3");
        assert_eq!((cluster.elsewhere(100), cluster.own_number()), (None, 2));
        let parts: Vec<_> = cluster.parts().map(|(slots, node)| (*slots.start(), node.port)).collect();
        assert_eq!(parts, [(0, 1), (100, 2), (101, 1), (201, 3)]);
        let ids: Vec<_> = cluster.nodes.iter().map(|node| &node.id[..]).collect();
        assert!(ids.iter().all(|id| id.len() == 40) && ids[0] != ids[1] && ids[1] != ids[2]);
        assert_eq!(Cluster::new(&specs, "127.0.0.1:1").unwrap().nodes, cluster.nodes, "it is the same on each node");
    }

    #[test]
    fn a_map_that_is_wrong_is_told() {
        let told = |specs: &[NodeSpec], own: &str| Cluster::new(specs, own).unwrap_err().to_string();
        let all = || spec("a:1", "0-16383");
        assert_eq!(told(&[], "a:1"), "slots 0 to 16383 belong to no node");
        assert_eq!(told(&[spec("a:1", "0-9,11-16383")], "a:1"), "slots 10 to 10 belong to no node");
        assert_eq!(told(&[all(), spec("b:1", "5")], "a:1"), "slot 5 belongs to a:1 and to b:1");
        assert_eq!(told(&[spec("a:1", "0-5,5")], "a:1"), "slot 5 belongs to a:1 and to a:1");
        assert_eq!(told(&[all(), all()], "a:1"), "the node a:1 is there twice");
        assert!(told(&[all()], "b:1").contains("b:1, which is not in the map"));
        for slots in ["", "x", "1-", "9-5", "16384", "+5", "-5", "1--2", "0-5,"] {
            assert!(told(&[spec("a:1", slots)], "a:1").starts_with("the slots of a:1 are written as"), "{slots}");
        }
        for address in ["", "a", "a:", ":1", "a:0", "a:65536", "a b:1", "[::1]", "::1:1", "a,b:1", "a@b:1"] {
            assert!(told(&[spec(address, "0")], "a:1").contains("is no address of a node"), "{address}");
        }
    }
}
