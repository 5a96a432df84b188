//! Source ports of connections that the program opens: of the CPU that opens them, where it is asked for.

use std::net::TcpListener;
use std::process::Command;

use crate::common::*;
use ksf_accel_proto::{CpuMask, Layout, PortRange};

/// An address of this network that is no loopback address, and a listener there. Its port is none that connections get.
fn service() -> (TcpListener, String) {
    ip("address add 10.9.0.1/32 dev lo");
    let listener = TcpListener::bind("10.9.0.1:8000").unwrap();
    (listener, format!("{} 8000", 0x0a09_0001))
}

fn actors(layout: &str) -> Actors {
    let mut command = Command::new(compiled("actor"));
    command.env("LD_PRELOAD", library()).env("KSF_ACCEL_PORTS", layout);
    Actors::start_as(command)
}

#[test]
fn connections_have_ports_of_the_cpu_that_opens_them() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let (_listener, to) = service();
    let cpus: CpuMask = [a, b].into_iter().collect();
    let layout = Layout::new(PortRange::of_this_network().unwrap(), &cpus).unwrap();
    let mut actors = actors(&layout.to_string());
    for (thread, cpu) in [(1, a), (2, b)] {
        actors.zero(0, &format!("thread {thread}"));
        actors.zero(thread, &format!("bind_cpu {cpu}"));
    }
    actors.zero(0, "fork 3");
    actors.zero(3, &format!("bind_cpu {b}"));
    for _ in 0..20 {
        for (actor, cpu) in [(1, a), (2, b), (3, b)] {
            let port = actors.number(actor, &format!("connect {to}"));
            assert_eq!(layout.cpu_of_port(port as u16), Some(cpu), "{port} of {layout}");
        }
    }
    // Errors are the kernel's.
    assert_eq!(actors.call(0, &format!("connect {} 1", 0x0a09_0001)), "failed ECONNREFUSED");
}

#[test]
fn a_full_chunk_and_a_layout_that_is_none_cost_no_connection() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let (_listener, to) = service();
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40063").unwrap();
    let layout: Layout = format!("4:2500:{a},{b}").parse().unwrap();
    let mut full = actors(&layout.to_string());
    full.zero(0, &format!("bind_cpu {b}"));
    let ports: Vec<u16> = (0..20).map(|_| full.number(0, &format!("connect {to}")) as u16).collect();
    let own = |port: &&u16| layout.cpu_of_port(**port) == Some(b);
    assert_eq!((ports[..16].iter().filter(own).count(), ports[16..].iter().filter(own).count()), (16, 0), "{ports:?}");
    for nonsense in ["", "13", "99:1:0"] {
        assert!(actors(nonsense).number(0, &format!("connect {to}")) > 0, "{nonsense}");
    }
}

#[test]
fn a_program_that_starts_itself_with_a_cleaned_environment_keeps_the_layout() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let ports = |how: &str| {
        let mut command = accelerated(compiled("execs"), &holder);
        let output =
            run(command.args([how, "self"]).env("KSF_ACCEL_PORTS", "13:4:0-1").stdin(std::process::Stdio::null()));
        output.lines().filter(|line| *line == "KSF_ACCEL_PORTS=13:4:0-1").count()
    };
    assert_eq!(["execve", "execle", "posix_spawn", "vfork"].map(ports), [1; 4]);
}
