//! Networks of a test's own: no port is taken, no sysctl or firewall of the machine plays a part.

use std::process::Command;
use std::thread;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::{is_helper, is_root, root_or_skip, run};

/// Gives this thread, and every thread and process it starts from now on, a network namespace with nothing but a
/// loopback device in its first state. Without root ([`is_root`]) the test runs on the machine's own loopback. The
/// namespace ends with its last thread and socket.
pub fn own_network() {
    if may_have_networks() {
        unshare(UnshareFlags::NEWNET);
        ip("link set lo up");
    }
}

/// [`own_network`] for a test that cannot do without. False: the test is skipped. `what` needs root: `sk_lookup`.
#[track_caller]
pub fn own_network_or_skip(what: &str) -> bool {
    root_or_skip(what) && {
        own_network();
        true
    }
}

/// [`own_network_or_skip`], with a mount namespace too, where /run is empty and for root to write.
#[track_caller]
pub fn own_run_or_skip(what: &str) -> bool {
    own_network_or_skip(what) && {
        unshare(UnshareFlags::NEWNS);
        run(Command::new("mount").args(["--make-rprivate", "/"]));
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"]));
        true
    }
}

/// Runs `work` on a thread of its own, in a network namespace of its own; both end with it. Needs root.
pub fn in_new_network<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let builder = thread::Builder::new().name(thread::current().name().unwrap_or("a test").to_owned());
    let inside = || {
        own_network();
        work()
    };
    let result = thread::scope(|scope| builder.spawn_scoped(scope, inside).expect("a thread starts").join());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
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

fn unshare(flags: UnshareFlags) {
    // SAFETY: the flags of this file change which namespaces this thread, and what it starts from now on, belongs to; no
    // memory and no table of descriptors is shared less.
    unsafe { unshare_unsafe(flags) }.unwrap_or_else(|error| panic!("unshare {flags:?}: {error}"));
}
