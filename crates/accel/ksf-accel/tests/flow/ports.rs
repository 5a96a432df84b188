//! Source ports: chosen by the library, and by the programs of a cgroup.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::common::*;
use ksf_accel::flow::source_port::{self, Choice};
use ksf_accel::flow::{
    ConnectOptions, ConnectPrograms, CpuMask, FlowError, Layout, ModeWish, Policy, PortRange, Steering,
};
use ksf_test::{NEAR, in_new_network, ip, pin, skip};

fn layout(cpus: [usize; 2]) -> Layout {
    let cpus: CpuMask = cpus.into_iter().collect();
    Layout::new(PortRange::of_this_network().unwrap(), &cpus).unwrap()
}

fn set_range(low: u16, high: u16) {
    // That of this thread's network namespace.
    fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{low} {high}")).unwrap();
}

fn option(socket: &impl AsRawFd, level: i32, option: i32) -> u32 {
    let mut value = 0u32;
    let mut bytes = 4;
    // SAFETY: the kernel writes at most four bytes to `value`.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut bytes) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    value
}

fn set_option(socket: &impl AsRawFd, level: i32, option: i32, value: u32) {
    // SAFETY: the kernel reads four bytes of `value`.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), 4) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

fn bind(socket: &impl AsRawFd, to: &SocketAddr) {
    let (address, length) = raw_address(to);
    // SAFETY: an address that lives for the call.
    let result = unsafe { libc::bind(socket.as_raw_fd(), address.as_ptr().cast(), length) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

fn connect(socket: &impl AsRawFd, to: &SocketAddr) -> io::Result<()> {
    let (address, length) = raw_address(to);
    // SAFETY: an address that lives for the call.
    let result = unsafe { libc::connect(socket.as_raw_fd(), address.as_ptr().cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

const IP_LOCAL_PORT_RANGE: i32 = 51;
const IP_BIND_ADDRESS_NO_PORT: i32 = 24;

fn choose(layout: &Layout, loopback: bool, socket: &impl AsRawFd, to: &str) -> Choice {
    let (address, length) = raw_address(&to.parse().unwrap());
    // SAFETY: an address that lives for the call.
    unsafe { source_port::choose(layout, loopback, socket.as_raw_fd(), address.as_ptr().cast(), length) }
}

#[test]
fn the_library_chooses_for_plain_tcp_sockets_only() {
    let Some(cpus) = network_on_two_cpus() else { return };
    let layout = layout(cpus);
    pin(cpus[1]);
    let four: SocketAddr = "10.0.0.1:80".parse().unwrap();
    let six: SocketAddr = "[fd00::1]:80".parse().unwrap();
    let range = layout.option_of(cpus[1]).unwrap();
    for (to, address) in
        [("10.0.0.1:80", four), ("[fd00::1]:80", six), ("[::ffff:10.0.0.1]:80", six), ("10.0.0.1:80", six)]
    {
        let socket = tcp_socket(&address);
        assert_eq!(choose(&layout, false, &socket, to), Choice::Chosen, "{to}");
        assert_eq!(option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE), range);
    }
    for to in ["127.0.0.1:80", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
        let socket = tcp_socket(&to.parse().unwrap());
        assert_eq!(choose(&layout, false, &socket, to), Choice::Loopback, "{to}");
        assert_eq!(option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE), 0);
        assert_eq!(choose(&layout, true, &socket, to), Choice::Chosen, "{to}");
    }

    let datagrams = UdpSocket::bind("0.0.0.0:0").unwrap();
    assert_eq!(choose(&layout, true, &datagrams, "10.0.0.1:80"), Choice::NotTcp);
    let (local, _) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(choose(&layout, true, &local, "10.0.0.1:80"), Choice::NotTcp);
    assert_eq!(choose(&layout, true, &fs::File::open("/dev/null").unwrap(), "10.0.0.1:80"), Choice::NotTcp);
    let socket = tcp_socket(&four);
    for (bytes, length) in [(&[1, 0, 47, 120][..], 4), (&[2, 0, 0, 80, 10, 0, 0, 1][..], 8), (&[2][..], 1)] {
        // SAFETY: an address of `length` bytes that lives for the call.
        let choice = unsafe { source_port::choose(&layout, true, socket.as_raw_fd(), bytes.as_ptr().cast(), length) };
        assert_eq!(choice, Choice::NotTcp, "{bytes:?}");
    }
    // SAFETY: null is allowed.
    let choice = unsafe { source_port::choose(&layout, true, socket.as_raw_fd(), std::ptr::null(), 16) };
    assert_eq!(choice, Choice::NotTcp);

    // Bound by the program: to a port, and to one that the kernel chose.
    for port in [5000, 0] {
        let socket = tcp_socket(&four);
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], port)));
        assert_eq!(choose(&layout, true, &socket, "10.0.0.1:80"), Choice::Bound);
    }
    // To an address only.
    let socket = tcp_socket(&four);
    set_option(&socket, libc::IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    bind(&socket, &"127.0.0.1:0".parse().unwrap());
    assert_eq!(choose(&layout, true, &socket, "10.0.0.1:80"), Choice::Chosen);
    // A range of its own, and one of ours from an earlier try on the other CPU.
    let socket = tcp_socket(&four);
    set_option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, 50_000 | 50_009 << 16);
    assert_eq!(choose(&layout, true, &socket, "10.0.0.1:80"), Choice::OwnRange);
    set_option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, layout.option_of(cpus[0]).unwrap());
    assert_eq!(choose(&layout, true, &socket, "10.0.0.1:80"), Choice::Chosen);
    assert_eq!(option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE), range);

    let elsewhere = Layout::new(PortRange { low: 32768, high: 60999 }, &[cpus[0]].into_iter().collect()).unwrap();
    assert_eq!(choose(&elsewhere, true, &tcp_socket(&four), "10.0.0.1:80"), Choice::NoChunk);
}

#[test]
fn the_library_keeps_errno_and_the_programs_result() {
    let Some(cpus) = network_on_two_cpus() else { return };
    let layout = layout(cpus);
    // SAFETY: the address of this thread's errno is always valid.
    let errno = || unsafe { &mut *libc::__errno_location() };
    for fd in [tcp_socket(&"10.0.0.1:1".parse().unwrap()).as_raw_fd(), -1] {
        for to in ["10.0.0.1:80", "127.0.0.1:80", "[fd00::1]:80"] {
            let (address, length) = raw_address(&to.parse().unwrap());
            *errno() = 4711;
            // SAFETY: an address that lives for the call; the descriptor need not be open.
            unsafe { source_port::choose(&layout, true, fd, address.as_ptr().cast(), length) };
            assert_eq!(*errno(), 4711);
        }
    }
    let to: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let socket = tcp_socket(&to);
    let error = connect_by_library(&layout, true, socket.as_raw_fd(), &to).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED));
    let to: SocketAddr = "10.255.0.1:9".parse().unwrap();
    let error = connect_by_library(&layout, true, tcp_socket(&to).as_raw_fd(), &to).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH));
}

#[test]
fn a_full_chunk_costs_no_connection() {
    let Some(cpus) = network_on_two_cpus() else { return };
    set_range(40_000, 40_063);
    let layout = layout(cpus);
    assert_eq!(layout.ports_per_cpu(), 32);
    pin(cpus[0]);
    let listener = TcpListener::bind("127.0.0.1:7").unwrap();
    let to = listener.local_addr().unwrap();
    let mut open = Vec::new();
    for number in 0..64 {
        let socket = tcp_socket(&to);
        let result = connect_by_library(&layout, true, socket.as_raw_fd(), &to);
        result.unwrap_or_else(|error| panic!("connection {number} of 64 ports: {error}"));
        let stream = TcpStream::from(socket);
        let port = stream.local_addr().unwrap().port();
        assert_eq!(layout.cpu_of_port(port) == Some(cpus[0]), number < 32, "connection {number} from {port}");
        open.push(stream);
    }
    // As without us.
    let socket = tcp_socket(&to);
    let error = connect_by_library(&layout, true, socket.as_raw_fd(), &to).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL));
}

/// A folder of cgroup2 for the clients of a test: removed at the end.
struct Cgroup {
    folder: PathBuf,
}

impl Cgroup {
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let Some(root) = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            words.next().filter(|_| words.next() == Some("cgroup2"))
        }) else {
            skip("needs cgroup2");
            return None;
        };
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new(root).join(format!("ksf-flow-{}-{number}", std::process::id()));
        if let Err(error) = fs::create_dir(&folder) {
            skip(format_args!("needs a cgroup of its own: {error}"));
            return None;
        }
        Some(Self { folder })
    }

    /// Runs this test binary's client in the cgroup and in this network namespace, pinned to `cpu`; what it says.
    fn client(&self, cpu: usize, orders: &[&str]) -> Vec<String> {
        let exe = std::env::current_exe().unwrap();
        // The shell enters the cgroup, then becomes the client.
        let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        let output = std::process::Command::new("sh")
            .args(["-c", script])
            .arg(&self.folder)
            .args(["taskset", "-c", &cpu.to_string()])
            .arg(exe)
            .args(["--exact", "flow::ports::helper_connects", "--ignored", "--nocapture", "--test-threads", "2"])
            .env(ORDERS, orders.join(";"))
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{orders:?}: {out}{err}");
        // The test runner begins the first line.
        let said: Vec<String> =
            out.lines().filter_map(|line| line.split_once("said ")).map(|(_, said)| said.to_owned()).collect();
        assert_eq!(said.len(), orders.len(), "{out}");
        said
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended is still in it for a moment.
        let gone = || fs::remove_dir(&self.folder).is_ok();
        while self.folder.exists() && !gone() && fs::read_to_string(self.folder.join("cgroup.procs")).is_ok() {
            thread::yield_now();
        }
    }
}

const ORDERS: &str = "KSF_FLOW_TEST_ORDERS";

/// The client in the cgroup: per order one connection, and the port it was opened from, or the error.
#[test]
#[ignore = "a part of the tests below"]
fn helper_connects() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let mut open = Vec::new();
    for order in orders.split(';') {
        let (kind, to) = order.split_once(' ').unwrap();
        let to: SocketAddr = to.parse().unwrap();
        let socket = match kind {
            "udp" => OwnedFd::from(UdpSocket::bind("0.0.0.0:0").unwrap()),
            _ => tcp_socket(&to),
        };
        match kind {
            "reuse" | "open-reuse" => {
                set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
                set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
            }
            "bound" => bind(&socket, &"0.0.0.0:5005".parse().unwrap()),
            "source" => {
                set_option(&socket, libc::IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
                let source = if to.is_ipv4() { "10.9.8.3:0" } else { "[fd09::3]:0" };
                bind(&socket, &source.parse().unwrap());
            }
            _ => {}
        }
        if let Err(error) = connect(&socket, &to) {
            println!("said error {}", error.raw_os_error().unwrap());
            continue;
        }
        if kind.ends_with("reuse") {
            assert_eq!(option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR), 1, "it is put back");
            assert_eq!(option(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT), 1, "it is put back");
        }
        let range = option(&socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE);
        let mut stream = TcpStream::from(socket);
        let source = stream.local_addr().unwrap();
        if kind == "udp" {
            println!("said {} 0 {range}", source.port());
            continue;
        }
        if kind == "source" {
            assert!(["10.9.8.3", "fd09::3"].contains(&source.ip().to_string().as_str()), "{source}");
        }
        if !kind.starts_with("open") {
            exchange(&mut stream, 1000);
        }
        println!("said {} {} {range}", source.port(), incoming_cpu(&stream));
        open.push(stream);
    }
}

fn port(said: &str) -> u16 {
    said.split(' ').next().and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("not a port: {said}"))
}

fn count(programs: &ConnectPrograms, name: &str) -> u64 {
    programs.counters().unwrap().iter().find(|counter| counter.name == name).expect("a counter").total()
}

#[test]
fn programs_of_a_cgroup_connect_from_their_cpus_chunk() {
    let Some(cpus) = root_on_two_cpus() else { return };
    let Some(cgroup) = Cgroup::new() else { return };
    in_new_network(|| {
        let peer = start_peer(true);
        ip("addr add 10.9.8.3/24 dev near");
        ip("-6 addr add fd09::3/64 dev near nodad");
        let layout = layout(cpus);
        let programs = ConnectPrograms::attach(&cgroup.folder, &layout, &ConnectOptions::default()).unwrap();
        assert_eq!(programs.takes_range().unwrap(), None);
        let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
        steering.attach(NEAR.0, ModeWish::Generic).unwrap();

        let four = format!("plain {ECHO4}");
        let six = format!("plain {ECHO6}");
        let mapped = "plain [::ffff:10.9.8.2]:7".to_owned();
        let reuse = format!("reuse {ECHO4}");
        let (source4, source6) = (format!("source {ECHO4}"), format!("source {ECHO6}"));
        let orders: Vec<&str> = [&four, &six, &mapped, &reuse, &source4, &source6, &four, &six]
            .iter()
            .map(|order| order.as_str())
            .collect();
        for cpu in cpus {
            for said in cgroup.client(cpu, &orders) {
                assert_eq!(layout.cpu_of_port(port(&said)), Some(cpu), "{said}");
                assert_eq!(said.split(' ').nth(1), Some(cpu.to_string().as_str()), "processed there: {said}");
            }
        }
        let chosen = count(&programs, "by_range") + count(&programs, "by_bind");
        assert_eq!(chosen, 2 * orders.len() as u64);
        let takes_range = programs.takes_range().unwrap().expect("it was tried");
        assert_eq!(count(&programs, if takes_range { "by_bind" } else { "by_range" }), 0);
        eprintln!("this kernel takes IP_LOCAL_PORT_RANGE from a program: {takes_range}");

        // What the program decides is its own.
        let bound = format!("bound {ECHO4}");
        let datagram = format!("udp {ECHO4}");
        let said = cgroup.client(cpus[0], &[&bound, &datagram, "plain 127.0.0.1:9", "plain [::1]:9"]);
        assert_eq!(port(&said[0]), 5005);
        assert_eq!(said[2..], ["error 111", "error 111"]);
        for (name, expected) in [("left_bound", 1), ("left_not_tcp", 1), ("left_loopback", 2), ("left_netns", 0)] {
            assert_eq!(count(&programs, name), expected, "{name}");
        }
        // Other network namespaces have other port ranges.
        in_new_network(|| cgroup.client(cpus[0], &["plain 127.0.0.1:9"]));
        assert_eq!(count(&programs, "left_netns"), 1);
        // A CPU without a chunk.
        drop(programs);
        let one: CpuMask = [cpus[0]].into_iter().collect();
        let narrow = Layout::new(PortRange::of_this_network().unwrap(), &one).unwrap();
        let programs = ConnectPrograms::attach(&cgroup.folder, &narrow, &ConnectOptions::default()).unwrap();
        cgroup.client(cpus[1], &[&four]);
        assert_eq!((count(&programs, "left_cpu"), count(&programs, "by_bind")), (1, 0));
        drop(programs);
        // Nothing is left: ports come from the kernel's range, which has none of a chunk now.
        set_range(50_000, 50_999);
        for said in cgroup.client(cpus[1], &[four.as_str(); 4]) {
            assert!((50_000..51_000).contains(&port(&said)), "{said}");
        }
        drop(peer);
    });
}

#[test]
fn a_chunk_without_free_ports_costs_no_connection() {
    let Some(cpus) = root_on_two_cpus() else { return };
    let Some(cgroup) = Cgroup::new() else { return };
    // With SO_REUSEADDR a port can be bound that another connection has, and connect() would fail.
    for order in ["open 127.0.0.1:7", "open-reuse 127.0.0.1:7"] {
        in_new_network(|| {
            set_range(40_000, 40_063);
            fs::write("/proc/sys/net/ipv4/ip_local_reserved_ports", "40000-40003").unwrap();
            let layout = layout(cpus);
            let mut options = ConnectOptions::default();
            options.loopback = true;
            options.tries = 64;
            let programs = ConnectPrograms::attach(&cgroup.folder, &layout, &options).unwrap();
            let _listener = TcpListener::bind("127.0.0.1:7").unwrap();
            let said = cgroup.client(cpus[0], &[order; 60]);
            // All 60 ports that are not reserved, each once, as without us.
            let mut ports: Vec<u16> = said.iter().map(|said| port(said)).collect();
            ports.sort_unstable();
            assert_eq!(ports, (40_004..=40_063).collect::<Vec<_>>(), "{order}");
            if programs.takes_range().unwrap() == Some(false) {
                assert!(count(&programs, "left_exhausted") >= 32, "{:?}", programs.counters());
                assert_eq!(count(&programs, "by_bind") + count(&programs, "left_exhausted"), 60);
            }
            assert_eq!(count(&programs, "left_error"), 0);
        });
    }
}

#[test]
fn a_cgroup_that_takes_no_program_is_left_alone() {
    let Some(cpus) = root_on_two_cpus() else { return };
    let layout = layout(cpus);
    let attach = |folder: &Path| ConnectPrograms::attach(folder, &layout, &ConnectOptions::default()).unwrap_err();
    let error = attach(Path::new("/nonexistent"));
    assert!(matches!(error, FlowError::Unreadable { .. }), "{error}");
    let error = attach(Path::new("/tmp"));
    assert!(error.to_string().contains("cgroup2"), "{error}");
}
