//! Ethernet frames, with right checksums.

use std::net::SocketAddr;

pub(crate) const SYN: u8 = 0x02;
pub(crate) const SYN_ACK: u8 = 0x12;
pub(crate) const ACK: u8 = 0x10;

/// A frame to build.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) protocol: u8,
    pub(crate) flags: u8,
    pub(crate) payload: usize,
    /// VLAN tags from the outermost on: protocol and tag.
    pub(crate) tags: Vec<(u16, u16)>,
    /// Bytes of IPv4 options.
    pub(crate) options: usize,
    /// The fragment field of IPv4.
    pub(crate) fragment: u16,
    /// Numbers of IPv6 extension headers, of eight bytes each.
    pub(crate) extensions: Vec<u8>,
    /// Leaves the checksum as a sender does that leaves it to the device: the sum of the pseudo header.
    pub(crate) partial: bool,
}

impl Frame {
    pub(crate) fn tcp(from: &str, to: &str, flags: u8) -> Self {
        Self {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            protocol: 6,
            flags,
            payload: 0,
            tags: Vec::new(),
            options: 0,
            fragment: 0,
            extensions: Vec::new(),
            partial: false,
        }
    }

    pub(crate) fn udp(from: &str, to: &str) -> Self {
        Self { protocol: 17, ..Self::tcp(from, to, 0) }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        for (protocol, tag) in &self.tags {
            frame.extend(protocol.to_be_bytes());
            frame.extend(tag.to_be_bytes());
        }
        let segment = self.segment();
        match (self.from, self.to) {
            (SocketAddr::V4(from), SocketAddr::V4(to)) => {
                frame.extend([8, 0]);
                let header = 20 + self.options;
                let mut ip = vec![0x40 | (header / 4) as u8, 0];
                ip.extend(((header + segment.len()) as u16).to_be_bytes());
                ip.extend([0, 1]);
                ip.extend(self.fragment.to_be_bytes());
                ip.extend([64, self.protocol, 0, 0]);
                ip.extend(from.ip().octets());
                ip.extend(to.ip().octets());
                ip.resize(header, 1);
                let sum = checksum(&[&ip]);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                frame.extend(ip);
            }
            (SocketAddr::V6(from), SocketAddr::V6(to)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(((segment.len() + 8 * self.extensions.len()) as u16).to_be_bytes());
                frame.push(self.extensions.first().copied().unwrap_or(self.protocol));
                frame.push(64);
                frame.extend(from.ip().octets());
                frame.extend(to.ip().octets());
                for at in 0..self.extensions.len() {
                    frame.push(self.extensions.get(at + 1).copied().unwrap_or(self.protocol));
                    frame.extend([0, 1, 4, 0, 0, 0, 0]);
                }
            }
            _ => panic!("one family"),
        }
        frame.extend(segment);
        frame
    }

    fn segment(&self) -> Vec<u8> {
        let mut segment = Vec::new();
        segment.extend(self.from.port().to_be_bytes());
        segment.extend(self.to.port().to_be_bytes());
        let check_at = if self.protocol == 17 {
            segment.extend((8 + self.payload as u16).to_be_bytes());
            6
        } else {
            segment.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, self.flags, 0xff, 0xff]);
            16
        };
        segment.extend([0, 0]);
        if self.protocol != 17 {
            segment.extend([0, 0]);
        }
        segment.extend((0..self.payload).map(|at| at as u8));
        let pseudo = self.pseudo(segment.len());
        let sum = if self.partial { !checksum(&[&pseudo]) } else { checksum(&[&pseudo, &segment]) };
        segment[check_at..check_at + 2].copy_from_slice(&sum.to_be_bytes());
        segment
    }

    fn pseudo(&self, bytes: usize) -> Vec<u8> {
        let mut pseudo = Vec::new();
        for address in [self.from, self.to] {
            match address.ip() {
                std::net::IpAddr::V4(ip) => pseudo.extend(ip.octets()),
                std::net::IpAddr::V6(ip) => pseudo.extend(ip.octets()),
            }
        }
        pseudo.extend((bytes as u32).to_be_bytes());
        pseudo.extend([0, 0, 0, self.protocol]);
        pseudo
    }
}

/// RFC 1071. Every part but the last has an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
