//! XDP frame by frame, without a network: what is answered, what passes untouched, and every checksum.

use crate::common::*;
use ksf_kernel::{Builtin, KernelService, XdpLink};

const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;
const SERVED: u16 = 60_007;
const CLIENT: u16 = 40_000;

/// A frame with a UDP datagram; the setters break one thing each.
#[derive(Clone)]
struct Datagram {
    v6: bool,
    source: [u8; 16],
    target: [u8; 16],
    source_port: u16,
    target_port: u16,
    payload: Vec<u8>,
    checksum: Checksum,
}

#[derive(Clone, Copy, PartialEq)]
enum Checksum {
    Full,
    Partial,
    None,
    Wrong,
}

fn v4(payload: &[u8]) -> Datagram {
    let mut source = [0; 16];
    source[..4].copy_from_slice(&[127, 0, 0, 9]);
    let mut target = [0; 16];
    target[..4].copy_from_slice(&[127, 0, 0, 1]);
    let checksum = Checksum::Full;
    Datagram {
        v6: false,
        source,
        target,
        source_port: CLIENT,
        target_port: SERVED,
        payload: payload.to_vec(),
        checksum,
    }
}

fn v6(payload: &[u8]) -> Datagram {
    let mut source = [0; 16];
    source[..2].copy_from_slice(&[0xfd, 0]);
    source[15] = 9;
    let mut target = [0; 16];
    target[15] = 1;
    Datagram { v6: true, source, target, ..v4(payload) }
}

/// One's complement sum in network byte order (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let total: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    let folded = (total & 0xffff) + (total >> 16);
    (folded & 0xffff) as u16 + (folded >> 16) as u16
}

impl Datagram {
    fn pseudo_header(&self) -> Vec<u8> {
        let length = (8 + self.payload.len()) as u16;
        let address = if self.v6 { 16 } else { 4 };
        let mut bytes = [&self.source[..address], &self.target[..address]].concat();
        bytes.extend_from_slice(&[0, 17]);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes
    }

    fn udp(&self) -> Vec<u8> {
        let length = (8 + self.payload.len()) as u16;
        let mut udp = Vec::new();
        for field in [self.source_port, self.target_port, length, 0] {
            udp.extend_from_slice(&field.to_be_bytes());
        }
        udp.extend_from_slice(&self.payload);
        let checksum = match self.checksum {
            Checksum::None => 0,
            Checksum::Partial => sum(&self.pseudo_header()),
            full => {
                let right = !sum(&[self.pseudo_header(), udp.clone()].concat());
                let right = if right == 0 { 0xffff } else { right };
                if full == Checksum::Wrong { right ^ 0x0100 } else { right }
            }
        };
        udp[6..8].copy_from_slice(&checksum.to_be_bytes());
        udp
    }

    fn frame(&self) -> Vec<u8> {
        let udp = self.udp();
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9];
        if self.v6 {
            frame.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend_from_slice(&(udp.len() as u16).to_be_bytes());
            frame.extend_from_slice(&[17, 5]);
            frame.extend_from_slice(&self.source);
            frame.extend_from_slice(&self.target);
        } else {
            frame.extend_from_slice(&[8, 0]);
            let mut ip = vec![0x45, 0];
            ip.extend_from_slice(&((20 + udp.len()) as u16).to_be_bytes());
            ip.extend_from_slice(&[0x12, 0x34, 0x40, 0, 5, 17, 0, 0]);
            ip.extend_from_slice(&self.source[..4]);
            ip.extend_from_slice(&self.target[..4]);
            fix_ip_checksum(&mut ip);
            frame.extend_from_slice(&ip);
        }
        frame.extend_from_slice(&udp);
        frame
    }

    /// The datagram that answers this one.
    fn reply(&self, payload: &[u8]) -> Self {
        Self {
            source: self.target,
            target: self.source,
            source_port: self.target_port,
            target_port: self.source_port,
            payload: payload.to_vec(),
            checksum: Checksum::Full,
            v6: self.v6,
        }
    }
}

fn fix_ip_checksum(ip: &mut [u8]) {
    ip[10..12].fill(0);
    let checksum = !sum(ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// `expected` as the program writes it: its own hop limit, the ends of the Ethernet header swapped.
fn as_sent(expected: &Datagram) -> Vec<u8> {
    let mut frame = expected.frame();
    frame[..12].rotate_left(6);
    if expected.v6 {
        frame[21] = 64;
    } else {
        frame[22] = 64;
        fix_ip_checksum(&mut frame[14..34]);
    }
    frame
}

struct Bench {
    service: KernelService,
    _link: XdpLink,
}

/// A loaded service whose ports are registered; attached to nothing that carries traffic.
fn bench(builtin: Builtin) -> Bench {
    let service = load(builtin);
    let addresses = [format!("127.0.0.1:{SERVED}").parse().unwrap(), format!("[::1]:{SERVED}").parse().unwrap()];
    let link = service.attach_udp("lo", &addresses).expect("XDP on the lo of this namespace");
    Bench { service, _link: link }
}

impl Bench {
    fn answers(&self, request: &Datagram, frame: &[u8], payload: &[u8]) {
        let (action, out) = self.service.try_frame(frame).unwrap();
        assert_eq!(action, XDP_TX, "a datagram of {} bytes", request.payload.len());
        let expected = as_sent(&request.reply(payload));
        assert_eq!(out, expected, "the reply to {} bytes", request.payload.len());
    }

    /// Passes, untouched, and for that reason.
    fn passes(&self, frame: &[u8], reason: Option<&str>) {
        let before = reason.map(|reason| counter(&self.service, reason));
        let answered = counter(&self.service, "xdp_answered");
        let (action, out) = self.service.try_frame(frame).unwrap();
        assert_eq!(action, XDP_PASS, "{reason:?}");
        assert_eq!(out, frame, "{reason:?}: untouched");
        assert_eq!(counter(&self.service, "xdp_answered"), answered);
        if let (Some(reason), Some(before)) = (reason, before) {
            assert_eq!(counter(&self.service, reason), before + 1, "{reason}");
        }
    }
}

#[test]
fn echo_of_every_size_in_both_families() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let bench = bench(Builtin::Echo);
    for size in 0..=1472 {
        let payload = pattern(size, size as u64);
        for request in [v4(&payload), v6(&payload)] {
            bench.answers(&request, &request.frame(), &payload);
        }
    }
    assert_eq!(counter(&bench.service, "xdp_answered"), 2 * 1473);
}

#[test]
fn every_kind_of_checksum() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let bench = bench(Builtin::Echo);
    let payload = pattern(77, 3);
    for (checksum, v4_ok, v6_ok) in [
        (Checksum::Full, true, true),
        (Checksum::Partial, true, true),
        (Checksum::None, true, false),
        (Checksum::Wrong, false, false),
    ] {
        for (request, ok) in [(v4(&payload), v4_ok), (v6(&payload), v6_ok)] {
            let request = Datagram { checksum, ..request };
            if ok {
                bench.answers(&request, &request.frame(), &payload);
            } else {
                bench.passes(&request.frame(), Some("xdp_passed_checksum"));
            }
        }
    }
    // A sum of all ones is sent as 0xffff, never as 0 (RFC 768): search a payload that has it.
    let found = (0..=u16::MAX).map(|word| v4(&word.to_be_bytes())).find(|request| {
        let reply = request.reply(&request.payload);
        reply.udp()[6..8] == [0xff, 0xff]
    });
    let request = found.expect("one of 65536 payloads sums up so");
    bench.answers(&request, &request.frame(), &request.payload);
}

#[test]
fn null_calls_shrink_the_frame() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let bench = bench(Builtin::RpcNull);
    for xid in [0, 1, 0xdead_beef] {
        let call = &null_call(xid)[4..];
        let reply = &null_reply(xid)[4..];
        for request in [v4(call), v6(call)] {
            bench.answers(&request, &request.frame(), reply);
        }
    }
    let getattr = &rpc_call(1, 100_003, 3, 1)[4..];
    bench.passes(&v4(getattr).frame(), Some("xdp_passed_unanswerable"));
}

#[test]
fn padding_is_not_echoed() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let bench = bench(Builtin::Echo);
    let request = v4(b"hi");
    let mut frame = request.frame();
    frame.resize(60, 0xee); // Ethernet's shortest frame
    bench.answers(&request, &frame, b"hi");
}

#[test]
fn the_unusual_passes_untouched() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let bench = bench(Builtin::Echo);
    let good = v4(b"payload").frame();
    let good6 = v6(b"payload").frame();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = good.clone();
        change(&mut frame);
        let length = (usize::from(frame[14] & 15) * 4).max(20);
        if frame.len() >= 14 + length {
            fix_ip_checksum(&mut frame[14..14 + length]);
        }
        frame
    };

    let first_fragment = changed(&|frame| frame[20] = 0x20);
    bench.passes(&first_fragment, Some("xdp_passed_fragment"));
    bench.passes(&changed(&|frame| frame[21] = 1), Some("xdp_passed_fragment"));
    let options = changed(&|frame| {
        frame[14] = 0x46;
        frame.splice(34..34, [1, 1, 1, 1]);
        frame[17] += 4;
    });
    bench.passes(&options, Some("xdp_passed_options"));
    let mut bad_ip_sum = good.clone();
    bad_ip_sum[24] ^= 1;
    bench.passes(&bad_ip_sum, Some("xdp_passed_checksum"));

    let mut truncated = good.clone();
    truncated.pop();
    bench.passes(&truncated, Some("xdp_passed_malformed"));
    bench.passes(&changed(&|frame| frame[39] = 8), Some("xdp_passed_malformed")); // UDP length within IP length
    bench.passes(&changed(&|frame| frame[0] = 0xff), Some("xdp_passed_malformed")); // broadcast
    bench.passes(&changed(&|frame| frame[26] = 224), Some("xdp_passed_malformed")); // from multicast
    bench.passes(&changed(&|frame| frame[26] = 0), Some("xdp_passed_malformed")); // from 0/8
    let no_port = Datagram { source_port: 0, ..v4(b"payload") };
    bench.passes(&no_port.frame(), Some("xdp_passed_malformed"));
    let mut from_multicast = good6.clone();
    from_multicast[22] = 0xff;
    bench.passes(&from_multicast, Some("xdp_passed_malformed"));

    let from_served = Datagram { source_port: SERVED, source: v4(b"").target, ..v4(b"payload") };
    bench.passes(&from_served.frame(), Some("xdp_passed_loop"));
    // Another host's service of the same port is a loop in the making, too.
    let from_other = Datagram { source_port: SERVED, ..v4(b"payload") };
    bench.passes(&from_other.frame(), Some("xdp_passed_loop"));

    // Not ours at all: no counter.
    let other_port = Datagram { target_port: 1, ..v4(b"payload") };
    bench.passes(&other_port.frame(), None);
    let mut other_address = v4(b"payload");
    other_address.target[3] = 2;
    bench.passes(&other_address.frame(), None);
    bench.passes(&changed(&|frame| frame[23] = 6), None); // TCP
    let mut vlan = good.clone();
    vlan.splice(12..12, [0x81, 0, 0, 5]);
    bench.passes(&vlan, None);
    let mut hop_by_hop = good6.clone();
    hop_by_hop[20] = 0;
    bench.passes(&hop_by_hop, None);
    let mut fragment6 = good6.clone();
    fragment6[20] = 44;
    bench.passes(&fragment6, None);
    for len in 14..42 {
        bench.passes(&good[..len], None);
    }
    assert_eq!(counter(&bench.service, "xdp_answered"), 0);
}
