//! UDP through XDP on real devices: lo (generic) and a veth pair (native), each in network namespaces of the test.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::common::*;
use ksf_kernel::{Builtin, KernelError, KernelService, XdpMode};

/// Not a port of the kernel's choice, which is a served one now and then: XDP passes what comes from there. Never the
/// same again: a process that is being started by another test holds a copy of a closed socket for a moment.
static CLIENT_PORT: AtomicU16 = AtomicU16::new(4000);

fn client(local: &str, server: SocketAddr) -> UdpSocket {
    let local: IpAddr = local.parse().unwrap();
    let socket = UdpSocket::bind((local, CLIENT_PORT.fetch_add(1, Ordering::Relaxed))).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket.connect(server).unwrap();
    socket
}

fn echoes(socket: &UdpSocket, sizes: impl Iterator<Item = usize>) -> u64 {
    let mut buf = vec![0; 65_536];
    let mut count = 0;
    for size in sizes {
        let message = pattern(size, size as u64);
        socket.send(&message).unwrap();
        let bytes = socket.recv(&mut buf).unwrap_or_else(|error| panic!("the echo of {size} bytes: {error}"));
        assert_eq!(&buf[..bytes], message, "{size} bytes");
        count += 1;
    }
    count
}

#[test]
fn lo_answers_in_generic_mode() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let service = load(Builtin::Echo);
    let addresses = ["127.0.0.1:60007".parse().unwrap(), "[::1]:60007".parse().unwrap()];
    let link = service.attach_udp("lo", &addresses).unwrap();
    assert_eq!(link.mode(), XdpMode::Generic);
    // No socket is bound to the port: whatever answers is XDP. A wrong checksum would not reach the client.
    let v4 = client("127.0.0.1", addresses[0]);
    let v6 = client("::1", addresses[1]);
    let mut answered = echoes(&v4, (0..1500).chain([4000, 9000, 15_999, 16_000]));
    answered += echoes(&v6, (0..1500).step_by(7));
    assert_eq!(counter(&service, "xdp_answered"), answered);
    // Longer than the program takes: the stack refuses it, as nobody listens.
    v4.send(&[0; 16_001]).unwrap();
    assert_eq!(v4.recv(&mut [0; 10]).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(counter(&service, "xdp_passed_limit"), 1);
    // Dropping the link gives the port back to the stack.
    drop(link);
    v4.send(b"anybody?").unwrap();
    assert_eq!(v4.recv(&mut [0; 10]).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn what_xdp_passes_reaches_user_space() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let service = load(Builtin::RpcNull);
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let _link = service.attach_udp("lo", &[address]).unwrap();
    let client = client("127.0.0.1", address);
    let mut buf = [0; 100];
    client.send(&null_call(7)[4..]).unwrap();
    let bytes = client.recv(&mut buf).unwrap();
    assert_eq!(&buf[..bytes], &null_reply(7)[4..]);
    let getattr = rpc_call(8, 100_003, 3, 1);
    client.send(&getattr[4..]).unwrap();
    let bytes = server.recv(&mut buf).unwrap();
    assert_eq!(&buf[..bytes], &getattr[4..]);
    assert_eq!(counter(&service, "xdp_passed_unanswerable"), 1);
}

/// lo in every network namespace.
const LO_INDEX: i32 = 1;

/// An interface has one XDP program; the services of a process share it, in whatever order they come and go.
#[test]
fn services_share_an_interface() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let echo_address: SocketAddr = "127.0.0.1:60007".parse().unwrap();
    let null_address: SocketAddr = "127.0.0.1:62049".parse().unwrap();
    let grown_address: SocketAddr = "127.0.0.1:60008".parse().unwrap();
    let (echo, null, second) = (load(Builtin::Echo), load(Builtin::RpcNull), load(Builtin::Echo));
    let echoed = |address: SocketAddr| {
        let client = client("127.0.0.1", address);
        client.send(b"hello").unwrap();
        let mut buf = [0; 10];
        client.recv(&mut buf).is_ok_and(|bytes| &buf[..bytes] == b"hello")
    };
    let called = || {
        let client = client("127.0.0.1", null_address);
        client.send(&null_call(7)[4..]).unwrap();
        let mut buf = [0; 40];
        client.recv(&mut buf).is_ok_and(|bytes| buf[..bytes] == null_reply(7)[4..])
    };
    let first_link = echo.attach_udp("lo", &[echo_address]).unwrap();
    let null_link = null.attach_udp("lo", &[null_address]).unwrap();
    let second_link = second.attach_udp("lo", &[grown_address]).unwrap();
    // The same service once more is no second turn.
    let again = echo.attach_udp("lo", &["127.0.0.2:60007".parse().unwrap()]).unwrap();
    assert!(echoed(echo_address) && called() && echoed(grown_address));
    drop(again);
    assert!(echoed(echo_address) && called() && echoed(grown_address));
    drop(null_link); // from the middle
    assert!(echoed(echo_address) && !called() && echoed(grown_address));
    drop(first_link); // the one that is attached
    assert!(!echoed(echo_address) && !called() && echoed(grown_address));
    let null_link = null.attach_udp("lo", &[null_address]).unwrap();
    assert!(called() && echoed(grown_address));
    drop(second_link);
    assert!(called() && !echoed(grown_address));
    drop(null_link);
    assert!(!called());
}

#[test]
fn an_interface_in_use_is_named() {
    let Some(()) = own_network_or_skip("XDP") else { return };
    // Somebody else's program.
    let object = object::compile("tests/bpf/other.bpf.c", &[]);
    let object = libbpf_rs::ObjectBuilder::default().open_file(object).unwrap().load().unwrap();
    let other = object.progs_mut().next().expect("its program");
    let _link = other.attach_xdp(LO_INDEX).unwrap();
    let service = load(Builtin::Echo);
    let error = service.attach_udp("lo", &["127.0.0.1:7".parse().unwrap()]).unwrap_err();
    let KernelError::XdpBusy { interface, program } = &error else { panic!("{error}") };
    assert_eq!(interface, "lo");
    assert!(program.contains("other_program"), "{program}");
    let error = service.attach_udp("none0", &["127.0.0.1:7".parse().unwrap()]).unwrap_err();
    assert!(matches!(error, KernelError::NoInterface { .. }), "{error}");
}

fn near_server(family: usize) -> SocketAddr {
    SocketAddr::new(NEAR.1[family].parse().unwrap(), 60_007)
}

/// The server's end of a veth pair is in this thread's namespace, the client's in another's.
fn on_veth(client: impl FnOnce() + Send + 'static) {
    let Some(()) = own_network_or_skip("XDP") else { return };
    let far = veth();
    let service = load(Builtin::Echo);
    let link = service.attach_udp(NEAR.0, &[near_server(0), near_server(1)]).unwrap();
    assert_eq!(link.mode(), XdpMode::Native);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        far.run(|| {
            // NAPI on the receiving side: veth sends XDP_TX frames to nobody else (drivers/net/veth.c).
            let _peer = XdpPass::attach(FAR.0);
            client();
        });
    }));
    if let Err(panic) = result {
        let counters: Vec<_> = service.counters().into_iter().filter(|counter| counter.value > 0).collect();
        eprintln!("the service saw {counters:?}");
        std::panic::resume_unwind(panic);
    }
    assert!(counter(&service, "xdp_answered") > 0);
}

/// A program that passes everything, on the client's end.
struct XdpPass {
    _service: KernelService,
    _link: ksf_kernel::XdpLink,
}

impl XdpPass {
    fn attach(interface: &str) -> Self {
        let service = load(Builtin::Echo);
        // A port nobody sends to.
        let link = service.attach_udp(interface, &[SocketAddr::new(FAR.1[0].parse().unwrap(), 1)]).unwrap();
        Self { _service: service, _link: link }
    }
}

#[test]
fn veth_answers_in_native_mode() {
    on_veth(|| {
        // The client's stack checks both checksums of what comes back: veth leaves frames of XDP_TX unverified.
        let [v4, v6] = [0, 1].map(|family| client(FAR.1[family], near_server(family)));
        echoes(&v4, 0..=1472);
        echoes(&v6, 0..=1452);
        let errors = checksum_errors();
        assert_eq!(errors, 0, "the client's stack saw {errors} wrong checksums");
    });
}

/// Fragments pass to the stack, where nobody listens, and the program goes on.
#[test]
fn fragments_pass_on_veth() {
    on_veth(|| {
        let v4 = client(FAR.1[0], near_server(0));
        v4.send(&pattern(4000, 1)).unwrap();
        assert_eq!(v4.recv(&mut [0; 10]).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
        echoes(&v4, 10..20);
    });
}

/// InCsumErrors of the UDP line of /proc/net/snmp and of Udp6 in snmp6, in this namespace.
fn checksum_errors() -> u64 {
    let snmp6 = std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap();
    let udp6 = snmp6.lines().find(|line| line.starts_with("Udp6InCsumErrors")).unwrap();
    counted("Udp: ", "InCsumErrors")
        + counted("Ip: ", "InHdrErrors")
        + udp6.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
}
