//! What becomes of single frames: the programs run on them with BPF_PROG_TEST_RUN.

use std::path::Path;

use super::common::*;
use crate::flow::frames::{ACK, Frame, SYN, SYN_ACK};
use ksf_accel::flow::{CpuMask, Fate, FlowError, Layout, ModeWish, Policy, PortRange, Proof, Steering};
use ksf_test::{ip, pin};

fn layout(cpus: &[usize]) -> Layout {
    let cpus: CpuMask = cpus.iter().copied().collect();
    Layout::new(PortRange { low: 32768, high: 60999 }, &cpus).unwrap()
}

fn load(layout: &Layout, policies: &[Policy]) -> Steering {
    Steering::load(layout, policies).unwrap_or_else(|error| panic!("{policies:?}: {error}"))
}

fn fate(steering: &Steering, frame: &Frame) -> Fate {
    steering.try_frame(&frame.bytes()).unwrap()
}

fn counter(steering: &Steering, name: &str) -> u64 {
    steering.counters().unwrap().iter().find(|counter| counter.name == name).expect("a counter").total()
}

/// A reply to an active connection from `port`.
fn reply(port: u16) -> Frame {
    Frame::tcp("10.0.0.9:80", &format!("10.0.0.1:{port}"), ACK)
}

fn reply6(port: u16) -> Frame {
    Frame::tcp("[fd00::9]:80", &format!("[fd00::1]:{port}"), ACK)
}

#[test]
fn replies_go_to_the_cpu_of_their_port() {
    let Some([first, second]) = network_on_two_cpus() else { return };
    let layout = layout(&[first, second]);
    let steering = load(&layout, &[Policy::Ports]);
    let passed = Fate::Passed("passed_policy");
    for (port, expected) in [
        (32767, passed),
        (32768, Fate::Cpu(first)),
        (40959, Fate::Cpu(first)),
        (40960, Fate::Cpu(second)),
        (49151, Fate::Cpu(second)),
        (49152, passed),
        (80, passed),
        (65535, passed),
    ] {
        for frame in [reply(port), reply6(port)] {
            assert_eq!(fate(&steering, &frame), expected, "{frame:?}");
        }
        // The source port says nothing.
        let other = Frame::tcp(&format!("10.0.0.9:{port}"), "10.0.0.1:80", ACK);
        assert_eq!(fate(&steering, &other), passed);
    }
    // A datagram does not belong to a connection.
    assert_eq!(fate(&steering, &Frame::udp("10.0.0.9:53", "10.0.0.1:40000")), passed);
    assert_eq!(steering.proof().unwrap(), Proof::NotNeeded, "not attached in native mode");
}

#[test]
fn only_plain_headers_are_read() {
    let Some([first, second]) = root_on_two_cpus() else { return };
    let steering = load(&layout(&[first, second]), &[Policy::Ports]);
    let to_second = Fate::Cpu(second);
    let passed = Fate::Passed;
    let table: Vec<(&str, Frame, Fate)> = vec![
        ("plain", reply(40960), to_second),
        ("with data", reply(40960).with(|frame| frame.payload = 1000), to_second),
        ("a VLAN", reply(40960).with(|frame| frame.tags = vec![(0x8100, 0x6005)]), to_second),
        ("a VLAN in a VLAN", reply6(40960).with(|frame| frame.tags = vec![(0x88a8, 7), (0x8100, 5)]), to_second),
        ("three VLANs", reply(40960).with(|frame| frame.tags = vec![(0x8100, 1); 3]), passed("passed_not_ip")),
        ("IPv4 options", reply(40960).with(|frame| frame.options = 4), passed("passed_options")),
        ("many IPv4 options", reply(40960).with(|frame| frame.options = 40), passed("passed_options")),
        ("don't fragment", reply(40960).with(|frame| frame.fragment = 0x4000), to_second),
        ("first fragment", reply(40960).with(|frame| frame.fragment = 0x2000), passed("passed_fragment")),
        ("last fragment", reply(40960).with(|frame| frame.fragment = 185), passed("passed_fragment")),
        ("IPv6 fragment", reply6(40960).with(|frame| frame.extensions = vec![44]), passed("passed_fragment")),
        ("hop-by-hop", reply6(40960).with(|frame| frame.extensions = vec![0]), passed("passed_options")),
        ("two extensions", reply6(40960).with(|frame| frame.extensions = vec![60, 43]), passed("passed_options")),
        ("ICMP", reply(40960).with(|frame| frame.protocol = 1), passed("passed_protocol")),
        ("ICMPv6", reply6(40960).with(|frame| frame.protocol = 58), passed("passed_protocol")),
        ("UDP", Frame::udp("[fd00::9]:53", "[fd00::1]:40960"), passed("passed_policy")),
    ];
    for (what, frame, expected) in table {
        assert_eq!(fate(&steering, &frame), expected, "{what}");
    }
    let mut arp = reply(40960).bytes();
    arp[12..14].copy_from_slice(&[8, 6]);
    assert_eq!(steering.try_frame(&arp).unwrap(), Fate::Passed("passed_not_ip"));
    for version in [0x65, 0x44, 0x40] {
        let mut wrong = reply(40960).bytes();
        wrong[14] = version;
        assert_eq!(steering.try_frame(&wrong).unwrap(), Fate::Passed("passed_truncated"), "{version:x}");
    }
}

#[test]
fn no_cut_frame_is_steered() {
    let Some([first, second]) = root_on_two_cpus() else { return };
    let steering = load(&layout(&[first, second]), &[Policy::Ports, Policy::Hash]);
    let tagged = |frame: Frame| frame.with(|frame| frame.tags = vec![(0x88a8, 1), (0x8100, 2)]);
    let datagram = Frame::udp("10.0.0.9:53", "10.0.0.1:40960");
    for frame in [reply(40960), reply6(40960), tagged(reply(40960)), tagged(reply6(40960)), datagram] {
        let bytes = frame.bytes();
        assert!(matches!(steering.try_frame(&bytes).unwrap(), Fate::Cpu(_)));
        // The kernel takes no frame below an Ethernet header.
        for end in 14..bytes.len() {
            let fate = steering.try_frame(&bytes[..end]).unwrap();
            assert_eq!(fate, Fate::Passed("passed_truncated"), "{end} of {} bytes of {frame:?}", bytes.len());
        }
    }
    // The IP header says that there is less than a TCP header.
    for bytes in 0..40u16 {
        let mut short = reply(40960).bytes();
        short[16..18].copy_from_slice(&bytes.to_be_bytes());
        assert_eq!(steering.try_frame(&short).unwrap(), Fate::Passed("passed_truncated"), "{bytes}");
    }
}

#[test]
fn a_listening_port_in_a_chunk_is_no_active_connection() {
    let Some([first, second]) = network_on_two_cpus() else { return };
    let steering = load(&layout(&[first, second]), &[Policy::Ports]);
    let to = |port: u16, flags| Frame::tcp("127.0.0.1:50000", &format!("127.0.0.1:{port}"), flags);
    let listener = std::net::TcpListener::bind("127.0.0.1:41000").unwrap();
    let passed = Fate::Passed("passed_policy");
    // A connection that was opened before the program came.
    assert_eq!(fate(&steering, &to(41000, ACK)), Fate::Cpu(second));
    assert_eq!(fate(&steering, &to(41000, SYN)), passed);
    assert_eq!(fate(&steering, &to(41000, ACK)), passed, "its port is known now");
    // Others are not touched, whoever knocks there.
    for port in [41001, 40999, 41032, 40968] {
        assert_eq!(fate(&steering, &to(port, SYN)), Fate::Cpu(second));
        assert_eq!(fate(&steering, &to(port, SYN_ACK)), Fate::Cpu(second));
        assert_eq!(fate(&steering, &to(port, ACK)), Fate::Cpu(second));
    }
    drop(listener);
    assert_eq!(fate(&steering, &to(41000, SYN)), Fate::Cpu(second), "nobody listens any more");
    assert_eq!(fate(&steering, &to(41000, ACK)), Fate::Cpu(second));

    let listener = std::net::TcpListener::bind("[::1]:41000").unwrap();
    let to = |flags| Frame::tcp("[::1]:50000", "[::1]:41000", flags);
    assert_eq!(fate(&steering, &to(SYN)), passed);
    assert_eq!(fate(&steering, &to(ACK)), passed);
    drop(listener);
}

#[test]
fn a_hash_is_even_and_the_same_for_both_directions() {
    let Some(cpus) = root_on_two_cpus() else { return };
    let steering = load(&layout(&cpus), &[Policy::Hash]);
    let mut taken = [0u32; 2];
    for client in 0..400u16 {
        let (there, here) = (format!("10.1.{}.7:{}", client % 7, 2000 + 2 * client), "10.0.0.1:443");
        let there_to_here = fate(&steering, &Frame::tcp(&there, here, ACK));
        assert_eq!(fate(&steering, &Frame::tcp(here, &there, ACK)), there_to_here);
        assert_eq!(fate(&steering, &Frame::tcp(&there, here, SYN)), there_to_here, "flags do not count");
        let Fate::Cpu(cpu) = there_to_here else { panic!("{there_to_here:?}") };
        taken[cpus.iter().position(|it| *it == cpu).unwrap()] += 1;
    }
    // Even: 200 each, and six standard deviations (of 10).
    assert!(taken.iter().all(|count| (140..=260).contains(count)), "{taken:?}");
    let datagram = Frame::udp("[fd00::9]:53", "[fd00::1]:40960");
    assert!(matches!(fate(&steering, &datagram), Fate::Cpu(_)));
}

#[test]
fn new_connections_go_round() {
    let Some([first, second]) = root_on_two_cpus() else { return };
    let steering = load(&layout(&[first, second]), &[Policy::RoundRobin]);
    let from = |client: u16, flags| Frame::tcp(&format!("10.1.0.7:{}", 3000 + client), "10.0.0.1:443", flags);
    // Older than the program.
    assert_eq!(fate(&steering, &from(0, ACK)), Fate::Passed("passed_policy"));
    for client in 0..40 {
        let expected = Fate::Cpu(if client % 2 == 0 { first } else { second });
        assert_eq!(fate(&steering, &from(client, SYN)), expected, "client {client}");
        assert_eq!(fate(&steering, &from(client, SYN)), expected, "sent once more");
    }
    for client in (0..40).rev() {
        let expected = Fate::Cpu(if client % 2 == 0 { first } else { second });
        assert_eq!(fate(&steering, &from(client, ACK)), expected, "its packets follow");
    }
    assert_eq!(fate(&steering, &from(99, SYN_ACK)), Fate::Passed("passed_policy"), "nobody's opening");
    assert_eq!(fate(&steering, &Frame::udp("10.1.0.7:3000", "10.0.0.1:443")), Fate::Passed("passed_policy"));
}

#[test]
fn policies_stand_behind_one_another() {
    let Some([first, second]) = root_on_two_cpus() else { return };
    let layout = layout(&[first, second]);
    let steering = load(&layout, &[Policy::Ports, Policy::RoundRobin, Policy::Hash]);
    assert_eq!(fate(&steering, &reply(32768)), Fate::Cpu(first), "ports");
    let knock = Frame::tcp("10.1.0.7:3000", "10.0.0.1:443", SYN);
    assert_eq!(fate(&steering, &knock), Fate::Cpu(first), "in turn");
    assert!(matches!(fate(&steering, &Frame::udp("10.1.0.7:3000", "10.0.0.1:443")), Fate::Cpu(_)), "hash");

    let steering = load(&layout, &[Policy::Pass, Policy::Ports]);
    assert_eq!(fate(&steering, &reply(32768)), Fate::Passed("passed_policy"), "the first has the word");
    let steering = load(&layout, &[]);
    assert_eq!(fate(&steering, &reply(32768)), Fate::Passed("passed_no_policy"));
    let error = Steering::load(&layout, &vec![Policy::Hash; 9]).unwrap_err();
    assert!(matches!(error, FlowError::TooManyPolicies { count: 9, max: 8 }), "{error}");
    let last = [vec![Policy::Ports; 7], vec![Policy::Hash]].concat();
    assert!(matches!(fate(&load(&layout, &last), &Frame::udp("10.1.0.7:3000", "10.0.0.1:443")), Fate::Cpu(_)));
}

#[test]
fn a_policy_of_the_users_decides() {
    let Some([first, second]) = root_on_two_cpus() else { return };
    let layout = layout(&[first, second]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let object = compile_policy(&root.join("../../../examples/rps-policy/tenants.bpf.c"), &[]);
    let steering = load(&layout, &[Policy::File(object)]);
    let to_port = |port: u16| Frame::tcp("10.1.0.7:3000", &format!("10.0.0.1:{port}"), ACK);
    assert_eq!(fate(&steering, &to_port(443)), Fate::Cpu(first), "the first CPU is for TLS");
    let in_vlan = |vlan: u16| to_port(80).with(|frame| frame.tags = vec![(0x8100, vlan)]);
    assert_eq!(fate(&steering, &in_vlan(20)), Fate::Cpu(first), "tenants by their VLAN");
    assert_eq!(fate(&steering, &in_vlan(21)), Fate::Cpu(second));
    assert_eq!(fate(&steering, &to_port(80)), Fate::Passed("passed_policy"));

    // A wrong CPU does no harm.
    let object = compile_policy(&root.join("tests/flow/bpf/wild.bpf.c"), &[]);
    let steering = load(&layout, &[Policy::File(object)]);
    for cpu in [1000, 1024, 40_000, 65_000] {
        assert_eq!(fate(&steering, &to_port(cpu)), Fate::Passed("passed_bad_cpu"), "CPU {cpu}");
    }
    assert_eq!(counter(&steering, "passed_bad_cpu"), 4);
    assert_eq!(counter(&steering, "redirected"), 0);
    assert_eq!(fate(&steering, &to_port(second as u16)), Fate::Cpu(second));
}

#[test]
fn wrong_objects_are_explained() {
    let Some([first, _]) = root_on_two_cpus() else { return };
    let layout = layout(&[first]);
    let refuse = |policy: &Path| Steering::load(&layout, &[Policy::File(policy.into())]).unwrap_err();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flow/bpf");

    let error = refuse(&compile_policy(&source.join("wild.bpf.c"), &["-DKSF_FLOW_ABI=99"]));
    assert!(matches!(&error, FlowError::BadPolicy { problem, .. } if problem.contains("SDK 99")), "{error}");
    let error = refuse(&compile_policy(&source.join("plain.bpf.c"), &[]));
    assert!(matches!(&error, FlowError::BadPolicy { problem, .. } if problem.contains("KSF_POLICY")), "{error}");
    let error = refuse(&compile_policy(&source.join("two.bpf.c"), &[]));
    assert!(matches!(&error, FlowError::BadPolicy { problem, .. } if problem.contains("2 programs")), "{error}");
    let error = refuse(&compile_policy(&source.join("refused.bpf.c"), &[]));
    assert!(matches!(&error, FlowError::Refused { problem, .. } if problem.contains("invalid")), "{error}");
    let error = refuse(&Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"));
    assert!(matches!(error, FlowError::BadPolicy { .. }), "{error}");
    let error = refuse(Path::new("/nonexistent/x.o"));
    assert!(matches!(error, FlowError::Unreadable { .. }), "{error}");
    // A CPU that no machine has: the map has no place for it.
    let error = Steering::load(&"4:2048:1023".parse().unwrap(), &[]).unwrap_err();
    assert!(matches!(error, FlowError::BadCpu { cpu: 1023, .. }), "{error}");
}

/// In native mode only frames with a whole checksum may go to another CPU. The programs are attached to a veth that
/// carries nothing, for the mode; frames are tried one by one.
#[test]
fn unfinished_checksums_end_steering_in_native_mode() {
    let Some([first, second]) = network_on_two_cpus() else { return };
    ip("link add near type veth peer name far");
    // On the first CPU everything for the second is redirected.
    pin(first);
    let native = || {
        let mut steering = load(&layout(&[first, second]), &[Policy::Ports, Policy::Hash]);
        steering.attach("near", ModeWish::Native).unwrap();
        assert_eq!(steering.proof().unwrap(), Proof::None);
        steering
    };
    let long = |frame: Frame| frame.with(|frame| frame.payload = 500);
    let partial = |frame: Frame| frame.with(|frame| frame.partial = true);
    let answer = |frame: Frame| frame.with(|frame| frame.flags = SYN_ACK);

    let steering = native();
    assert_eq!(fate(&steering, &long(reply(40960))), Fate::Passed("passed_unproven"));
    assert_eq!(fate(&steering, &long(reply(32768))), Fate::Cpu(first), "stays anyway");
    assert_eq!(fate(&steering, &answer(reply(40960))), Fate::Cpu(second), "whole");
    assert_eq!(steering.proof().unwrap(), Proof::Whole);
    assert_eq!(fate(&steering, &long(reply(40960))), Fate::Cpu(second), "proven");
    assert_eq!(fate(&steering, &partial(answer(reply6(40960)))), Fate::Passed("passed_checksum"));
    assert_eq!(steering.proof().unwrap(), Proof::Broken);
    assert_eq!(fate(&steering, &answer(reply(40960))), Fate::Passed("passed_broken"), "for good");
    assert_eq!(fate(&steering, &reply(32768)), Fate::Cpu(first), "what stays is not harmed");
    drop(steering);

    for frame in [reply(40960), reply6(40960), reply(40960).with(|frame| frame.payload = 43)] {
        assert_eq!(fate(&native(), &frame), Fate::Cpu(second), "{frame:?}");
        assert_eq!(fate(&native(), &partial(frame)), Fate::Passed("passed_checksum"));
    }
    // A frame that stays teaches, too.
    let steering = native();
    assert_eq!(fate(&steering, &partial(reply(32768))), Fate::Cpu(first));
    assert_eq!(steering.proof().unwrap(), Proof::Broken);
    drop(steering);
    let steering = native();
    assert_eq!(fate(&steering, &reply(32768)), Fate::Cpu(first));
    assert_eq!(fate(&steering, &long(reply(40960))), Fate::Cpu(second));
    drop(steering);
    // Of datagrams to the second CPU; which those are the hash knows.
    let datagram = |port: u16| Frame::udp("10.0.0.9:53", &format!("10.0.0.1:{port}")).with(|frame| frame.payload = 3);
    let plain = load(&layout(&[first, second]), &[Policy::Ports, Policy::Hash]);
    let port = (1..100).find(|&port| fate(&plain, &datagram(port)) == Fate::Cpu(second)).unwrap();
    assert_eq!(fate(&native(), &datagram(port)), Fate::Cpu(second));
    assert_eq!(fate(&native(), &partial(datagram(port))), Fate::Passed("passed_checksum"));
    let mut without = datagram(port).bytes();
    without[40..42].copy_from_slice(&[0, 0]);
    assert_eq!(native().try_frame(&without).unwrap(), Fate::Cpu(second), "a datagram may have no checksum");

    let mut steering = load(&layout(&[first, second]), &[Policy::Ports]);
    steering.attach("near", ModeWish::Generic).unwrap();
    assert_eq!(fate(&steering, &partial(answer(reply(40960)))), Fate::Cpu(second), "the socket buffer knows");
}
