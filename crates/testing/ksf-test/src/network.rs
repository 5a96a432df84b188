//! Networks of a test's own: no port is taken, no sysctl or firewall of the machine plays a part.

use std::net::{Ipv4Addr, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use rustix::ioctl::{Opcode, Setter, ioctl};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::{is_helper, is_root, root_or_skip, run, succeeds, two_cpus_or_skip};

/// Gives this thread, and every thread and process it starts from now on, a network namespace with nothing but a
/// loopback device in its first state. Without root ([`is_root`]) the test runs on the machine's own loopback. The
/// namespace ends with its last thread and socket.
pub fn own_network() {
    if may_have_networks() {
        unshare(UnshareFlags::NEWNET);
        bring_loopback_up();
    }
}

/// [`own_network`] for a test that cannot do without; `None`: the test is skipped. `what` needs root: `sk_lookup`.
#[track_caller]
pub fn own_network_or_skip(what: &str) -> Option<()> {
    root_or_skip(what)?;
    own_network();
    Some(())
}

/// [`own_network_or_skip`] for a test about two CPUs: the first two that it may use.
#[track_caller]
pub fn network_on_two_cpus_or_skip(what: &str) -> Option<[usize; 2]> {
    own_network_or_skip(what)?;
    two_cpus_or_skip()
}

/// [`own_network_or_skip`], with a mount namespace too, where /run is empty and for root to write.
#[track_caller]
pub fn own_run_or_skip(what: &str) -> Option<()> {
    own_network_or_skip(what)?;
    unshare(UnshareFlags::NEWNS);
    succeeds(&["mount", "--make-rprivate", "/"]);
    succeeds(&["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"]);
    Some(())
}

/// Runs `work` on a thread of its own, in a network namespace of its own; both end with it. Needs root.
pub fn in_new_network<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let builder = thread::Builder::new().name(thread::current().name().unwrap_or("a test").to_owned());
    let inside = || {
        own_network();
        work()
    };
    let result = thread::scope(|scope| builder.spawn_scoped(scope, inside).expect("a thread starts").join());
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs a test that waits for each of these side by side, in networks of their own.
pub fn side_by_side<T: Send>(all: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    thread::scope(|scope| {
        let test = &test;
        let run = |one| scope.spawn(move || in_new_network(|| test(one)));
        let running: Vec<_> = all.into_iter().map(run).collect();
        for result in running.into_iter().map(|test| test.join()) {
            result.unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

/// True if [`own_network`] makes one.
pub fn may_have_networks() -> bool {
    is_root()
}

/// Fails in a test that has forgotten [`own_network`], which would pass here and not on a machine set up otherwise.
#[track_caller]
pub fn assert_own_network() {
    let network = |task: &str| std::fs::read_link(format!("/proc/{task}/ns/net")).expect("/proc is mounted");
    // The main thread, which runs no test, has the network this process was started in. That of a helper is its test's.
    let own = network("thread-self") != network("self");
    assert!(own || is_helper() || !may_have_networks(), "a test on sockets begins with own_network()");
}

/// `ip` of iproute2, with words split at blanks, in the network namespace of the calling thread; what it says.
#[track_caller]
pub fn ip(line: &str) -> String {
    run(Command::new("ip").args(line.split_whitespace()))
}

/// `tc` of iproute2 likewise.
#[track_caller]
pub fn tc(line: &str) -> String {
    run(Command::new("tc").args(line.split_whitespace()))
}

/// Sets a sysctl of the calling thread's network namespace: `ipv4/tcp_rmem`.
#[track_caller]
pub fn sysctl(name: &str, value: &str) {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// A counter of the calling thread's network namespace, of a layer of the protocols (`Ip: `, `Tcp: `): proc_net_snmp(5).
pub fn counted(layer: &str, counter: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/snmp").expect("/proc is mounted");
    let mut rows = table.lines().filter_map(|line| line.strip_prefix(layer)).map(|row| row.split(' '));
    let (names, values) = (rows.next().expect("names"), rows.next().expect("values"));
    let found = names.zip(values).find(|(name, _)| *name == counter);
    found.and_then(|(_, value)| value.parse().ok()).unwrap_or_else(|| panic!("no counter {counter} of {layer}"))
}

/// The interface of a [`veth`] in the calling thread's network namespace, and its addresses.
pub const NEAR: (&str, [&str; 2]) = ("near", ["10.9.8.1", "fd09::1"]);
/// The one on the other end.
pub const FAR: (&str, [&str; 2]) = ("far", ["10.9.8.2", "fd09::2"]);

/// Joins the calling thread's network namespace, which is the test's own, with another one by a pair of veth.
pub fn veth() -> FarEnd {
    let (sender, works) = channel::<Box<dyn FnOnce() + Send>>();
    let thread = thread::spawn(move || {
        own_network();
        works.into_iter().for_each(|work| work());
    });
    let far = FarEnd { works: Some(sender), thread: Some(thread) };
    let tid = far.run(|| rustix::thread::gettid().as_raw_nonzero());
    ip(&format!("link add {} type veth peer name {} netns {tid}", NEAR.0, FAR.0));
    set_up(NEAR);
    far.run(|| set_up(FAR));
    far
}

fn set_up((interface, [v4, v6]): (&str, [&str; 2])) {
    ip(&format!("addr add {v4}/24 dev {interface}"));
    ip(&format!("addr add {v6}/64 dev {interface} nodad"));
    ip(&format!("link set {interface} up"));
}

/// A thread in a network namespace of its own, at the other end of a [`veth`]. Both end with the value.
#[derive(Debug)]
pub struct FarEnd {
    works: Option<Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl FarEnd {
    /// Does something there, and waits for it.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = channel();
        let work = move || sender.send(catch_unwind(AssertUnwindSafe(work))).expect("it is waited for");
        self.works.as_ref().expect("until it ends").send(Box::new(work)).expect("the thread works");
        result.recv().expect("the thread works").unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for FarEnd {
    fn drop(&mut self) {
        self.works = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What `ip link set lo up` does, without a process for each network.
fn bring_loopback_up() {
    const SIOCSIFFLAGS: Opcode = 0x8914;
    const IFF_UP: i16 = 1;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a socket");
    // linux/if.h `struct ifreq`: the name in 16 bytes, and a union of 24 that begins with the flags.
    let mut request = [0_u8; 40];
    request[..2].copy_from_slice(b"lo");
    request[16..18].copy_from_slice(&IFF_UP.to_ne_bytes());
    // SAFETY: the kernel reads one `struct ifreq`, which the request has the layout and the size of.
    let done = unsafe { ioctl(&socket, Setter::<SIOCSIFFLAGS, _>::new(request)) };
    done.unwrap_or_else(|error| panic!("bringing lo up: {error}"));
}

fn unshare(flags: UnshareFlags) {
    // SAFETY: the flags of this file change which namespaces this thread, and what it starts from now on, belongs to; no
    // memory and no table of descriptors is shared less.
    unsafe { unshare_unsafe(flags) }.unwrap_or_else(|error| panic!("unshare {flags:?}: {error}"));
}
