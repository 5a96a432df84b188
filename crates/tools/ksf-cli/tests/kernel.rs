//! The kernel engine behind the command line, each test in a network namespace of its own. Needs root.

use crate::support;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::support::{Folder, Server, ksf, run, stderr, value, wait_until, xdp_on_lo};
use ksf_test::stream::{ask, connect, datagrams};
use ksf_test::{compile, counted};
use rustix::process::Signal;

fn tcp_echo(address: SocketAddr, message: &[u8]) {
    let mut peer = connect(address);
    (0..20).for_each(|_| ask(&mut peer, message, message));
}

fn udp_echo(address: SocketAddr, message: &[u8]) {
    let socket = datagrams(address);
    let mut back = [0; 2048];
    for _ in 0..20 {
        socket.send(message).unwrap();
        let length = socket.recv(&mut back).unwrap();
        assert_eq!(&back[..length], message);
    }
}

#[test]
fn auto_takes_the_kernel_for_tcp_and_xdp_for_udp() {
    let Some(()) = support::private_network() else { return };
    let server = Server::start(&["kecho", "--listen", "127.0.0.1:0", "--listen", "[::1]:0"], 4);
    for line in server.seen() {
        assert!(line.contains("engine=kernel"), "{line}");
        assert_eq!(line.contains(" udp "), line.contains("xdp=lo:generic"), "{line}");
    }
    for family in [" 127.0.0.1:", " [::1]:"] {
        // While user space owes a reply the kernel does not answer, so a quick peer may be served there for a while.
        let answered = || value(&server.stat()["services"][0]["kernel"], "segments_answered");
        let before = answered();
        wait_until("the kernel answers", || {
            tcp_echo(server.address(&format!("tcp{family}")), b"over tcp");
            answered() > before
        });
        udp_echo(server.address(&format!("udp{family}")), b"over udp");
    }
    let service = &server.stat()["services"][0];
    assert_eq!(service["engine"], "kernel");
    assert_eq!(value(&service["kernel"], "xdp_answered"), 40, "{service}");
    assert_eq!(value(&service["counters"], "datagrams_in"), 0, "XDP left datagrams to user space: {service}");
    assert!(xdp_on_lo());
    server.stop();
    assert!(!xdp_on_lo(), "XDP is left behind");
}

/// Packets that reached the IP layer, in front of netfilter.
fn ip_packets_received() -> u64 {
    counted("Ip: ", "InReceives")
}

/// TCP counts a segment when netfilter's input has let it through.
#[test]
fn requests_that_the_kernel_half_answers_pass_netfilter_and_tcp() {
    let Some(()) = support::private_network() else { return };
    let server = Server::start(&["kecho", "--engine", "kernel", "--listen", "tcp:127.0.0.1:0"], 1);
    let answered = || value(&server.stat()["services"][0]["kernel"], "segments_answered");
    let mut peer = connect(server.address(" tcp "));
    // While user space owes a reply the kernel does not answer, so a quick peer may be served there for a while.
    wait_until("the kernel answers", || {
        let before = answered();
        ask(&mut peer, b"over tcp", b"over tcp");
        answered() > before
    });
    let (before, received) = (answered(), counted("Tcp: ", "InSegs"));
    (0..20).for_each(|_| ask(&mut peer, b"over tcp", b"over tcp"));
    let received = counted("Tcp: ", "InSegs") - received;
    assert!(answered() > before);
    // Each request, and each reply.
    assert!(received >= 2 * 20, "{received} segments");
    server.stop();
}

/// So netfilter, and whatever else is at or above the IP layer, does not see the requests: only the replies, at the client.
#[test]
fn requests_that_xdp_answers_do_not_reach_the_ip_layer() {
    let Some(()) = support::private_network() else { return };
    const REQUESTS: u64 = 20;
    for (xdp, received) in [("--xdp=lo", REQUESTS), ("--no-xdp", 2 * REQUESTS)] {
        let args = ["kecho", "--engine", "kernel", xdp, "--listen", "udp:127.0.0.1:0"];
        let server = Server::start(&args, 1);
        let before = ip_packets_received();
        udp_echo(server.address(" udp "), b"over udp");
        assert_eq!(ip_packets_received() - before, received, "{xdp}");
        server.stop();
    }
}

#[test]
fn a_killed_server_leaves_nothing_on_the_interface() {
    let Some(()) = support::private_network() else { return };
    let mut server = Server::start(&["krpc2", "--engine", "kernel", "--listen", "127.0.0.1:0"], 2);
    let _open = TcpStream::connect(server.address(" tcp ")).unwrap();
    assert!(xdp_on_lo());
    server.signal(Signal::KILL);
    assert_eq!(server.wait().code(), None);
    // The kernel closes the link when it has closed the process's descriptors, which may be after the wait.
    wait_until("XDP is gone", || !xdp_on_lo());
}

#[test]
fn without_xdp_udp_is_answered_in_user_space() {
    let Some(()) = support::private_network() else { return };
    let server = Server::start(&["kecho", "--engine", "kernel", "--no-xdp", "--listen", "udp:127.0.0.1:0"], 1);
    assert!(!server.seen()[0].contains("engine=kernel"), "{:?}", server.seen());
    udp_echo(server.address(" udp "), b"user space");
    assert!(!xdp_on_lo());
    server.stop();
}

#[test]
fn a_busy_or_missing_interface_is_named() {
    let Some(()) = support::private_network() else { return };
    let first = Server::start(&["kecho", "--engine", "kernel", "--listen", "udp:127.0.0.1:0"], 1);
    let output = run(&["krpc2", "--engine", "kernel", "--listen", "udp:127.0.0.1:0"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("interface lo already runs") && text.contains("--no-xdp"), "{text}");
    // With `auto` it is a fallback that is said, not an error.
    let mut second = Server::start(&["krpc2", "--listen", "udp:127.0.0.1:0"], 1);
    second.line_with("instead of XDP: interface lo already runs");
    second.stop();
    first.stop();
    let output = run(&["kecho", "--xdp", "none0", "--listen", "udp:127.0.0.1:0"]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains("none0"), "{}", stderr(&output));
}

#[test]
fn a_program_of_ones_own_is_served_in_the_kernel_and_in_user_space() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    let sdk = folder.path("sdk");
    assert!(ksf().args(["sdk", "--dir"]).arg(&sdk).status().unwrap().success());
    let source = folder.write(
        "ping.bpf.c",
        r#"
        #include "ksf.bpf.h"
        KSF_SERVICE(ping, KSF_DELIMITER("\r\n"))
        {
                if (ksf_len(m) != 4 || ksf_msg_u32(m, 0) != 0x50494e47)
                        return KSF_PASS;
                ksf_put_text(m, "PONG");
                return KSF_REPLY;
        }
        "#,
    );
    let object = folder.path("ping.bpf.o");
    compile::bpf(source, &object, &sdk, &[]);
    let object = object.to_str().unwrap();
    for (engine, workers) in [("kernel", ""), ("uring", ""), ("epoll", ""), ("epoll", "--workers=2")] {
        let mut words = vec!["run", object, "--engine", engine, "--listen", "127.0.0.1:0"];
        words.extend((!workers.is_empty()).then_some(workers));
        let server = Server::start(&words, 2);
        let mut stream = connect(server.address(" tcp "));
        (0..20).for_each(|_| ask(&mut stream, b"PING\r\nPING\r\n", b"PONG\r\nPONG\r\n"));
        let udp = datagrams(server.address(" udp "));
        udp.send(b"PING").unwrap();
        let mut back = [0; 16];
        let length = udp.recv(&mut back).unwrap();
        assert_eq!(&back[..length], b"PONG", "{engine}");
        // What the program does not answer nobody does: the connection ends, and that is counted.
        stream.write_all(b"WHAT\r\n").unwrap();
        assert_eq!(stream.read(&mut back).unwrap_or(0), 0, "{engine}");
        wait_until("the pass is counted", || value(&server.stat()["services"][0]["own"], "program_passed") == 1);
        server.stop();
    }
}

#[test]
fn an_object_that_is_none_is_refused() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    let path = folder.write("text.bpf.o", "this is no object");
    let output = run(&["run", path.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(65), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("text.bpf.o"), "{text}");
}
