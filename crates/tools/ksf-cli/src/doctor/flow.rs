//! What the kernel does by itself today of what Fastsocket patched in, and what `ksf accel flow` needs: each tried or
//! read, none guessed from a version.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use ksf_accel::flow::{ConnectPrograms, CpuMask, FlowError, Layout, Policy, PortRange, Steering, source_port};
use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Struct;

use super::machine::Machine;
use super::verdict::{Lack, Probe, Verdict};
use crate::output::one_line;

/// The probes.
pub(crate) const PROBES: &[Probe] = &[
    Probe {
        name: "flow_port_range",
        title: "a connection takes its source port from a range given by IP_LOCAL_PORT_RANGE",
        fallback: "connections of programs under a preload library keep the kernel's ports: replies are not brought home",
        run: port_range,
    },
    Probe {
        name: "flow_cpumap",
        title: "load the steering program and its map of CPUs",
        fallback: "replies are processed where the device delivers them; RPS and RFS steer without policies",
        run: cpumap,
    },
    Probe {
        name: "flow_cgroup_connect",
        title: "load programs for connect() of a cgroup, and find cgroup2",
        fallback: "static programs, and those that make their own system calls, keep the kernel's ports",
        run: cgroup_connect,
    },
    Probe {
        name: "flow_early_demux",
        title: "a segment finds its socket before its route, and takes the route from the socket (was: Direct-TCP)",
        fallback: "each segment looks its route up; the cost is a fraction of a microsecond",
        run: early_demux,
    },
    Probe {
        name: "flow_skb_cache",
        title: "socket buffers come from a cache of the CPU (was: Skb-Pool)",
        fallback: "socket buffers come from the slab allocator, which has caches per CPU of its own",
        run: skb_cache,
    },
    Probe {
        name: "flow_deferred_free",
        title: "a socket buffer read on another CPU is freed on the one that allocated it (was: Skb-Pool)",
        fallback: "it is freed where it was read, and its memory changes CPUs",
        run: deferred_free,
    },
    Probe {
        name: "flow_fast_vfs",
        title: "sockets stay out of the file system's caches when made and closed (was: fast VFS)",
        fallback: "making and closing sockets may share locks between CPUs",
        run: fast_vfs,
    },
];

fn fails(cause: impl AsRef<str>, errno: Option<i32>, remedy: impl Into<String>) -> Verdict {
    Verdict::Fails(Lack { cause: one_line(cause.as_ref()), errno, remedy: remedy.into() })
}

/// Connects on loopback from a range of 16 ports.
fn port_range(_: &Machine) -> Verdict {
    let attempt = || -> io::Result<Result<u16, io::Error>> {
        let range = PortRange::of_this_network()?;
        let cpu: CpuMask = [0].into_iter().collect();
        let chunk = PortRange { low: range.high.saturating_sub(31).max(range.low), high: range.high };
        let layout = Layout::new(chunk, &cpu).map_err(io::Error::other)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let SocketAddr::V4(to) = listener.local_addr()? else { return Err(io::Error::other("an IPv6 listener")) };
        let socket = tcp_socket()?;
        if let Err(refused) = source_port::choose_for_cpu(&layout, socket.as_raw_fd(), 0) {
            return Ok(Err(refused));
        }
        rustix::net::connect(&socket, &to)?;
        let port = TcpStream::from(socket).local_addr()?.port();
        Ok(if layout.cpu_of_port(port) == Some(0) { Ok(port) } else { Err(io::Error::other("it was ignored")) })
    };
    match attempt() {
        Ok(Ok(port)) => Verdict::works(format!("connected on loopback from port {port}, out of a range of 16")),
        Ok(Err(error)) => fails(
            format!("the kernel does not take it: {error}"),
            error.raw_os_error(),
            "boot Linux 6.3 or later; in a sandbox allow setsockopt",
        ),
        Err(error) => Verdict::unknown(format!("cannot connect on loopback: {error}")),
    }
}

fn cpumap(_: &Machine) -> Verdict {
    let attempt = || -> Result<usize, FlowError> {
        let cpus =
            CpuMask::of_this_thread().map_err(|error| FlowError::System { action: "asking for the CPUs", error })?;
        // Ports do not matter here.
        let layout = Layout::new(PortRange { low: 1024, high: u16::MAX }, &cpus)?;
        Steering::load(&layout, &[Policy::Ports])?;
        Ok(cpus.len())
    };
    match attempt() {
        Ok(cpus) => {
            Verdict::works(format!("the steering program was loaded, with queues of {cpus} CPUs; attached to nothing"))
        }
        Err(error) => refused(&error, "boot Linux 5.18 or later, built with CONFIG_BPF_SYSCALL"),
    }
}

fn cgroup_connect(_: &Machine) -> Verdict {
    if let Err(error) = ConnectPrograms::try_load() {
        return refused(&error, "boot a kernel with CONFIG_CGROUP_BPF");
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let folder = words.next()?;
        (words.next() == Some("cgroup2")).then_some(folder)
    });
    match mount {
        Some(folder) => Verdict::works(format!(
            "the programs were loaded, cgroup2 is at {folder}; whether they may set IP_LOCAL_PORT_RANGE shows with the \
             first connection (Linux 6.18: no, they bind a port)"
        )),
        None => fails("no cgroup2 is mounted", None, "mount -t cgroup2 none /sys/fs/cgroup/unified"),
    }
}

fn early_demux(_: &Machine) -> Verdict {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
    match (read("ip_early_demux"), read("tcp_early_demux")) {
        (Ok(ip), Ok(tcp)) => match (ip.trim(), tcp.trim()) {
            ("0", _) => fails(
                "net.ipv4.ip_early_demux = 0",
                None,
                "sysctl -w net.ipv4.ip_early_demux=1, unless this machine forwards",
            ),
            (_, "0") => fails(
                "net.ipv4.tcp_early_demux = 0",
                None,
                "sysctl -w net.ipv4.tcp_early_demux=1, unless this machine forwards",
            ),
            _ => Verdict::works("net.ipv4.ip_early_demux and tcp_early_demux are on in this network namespace"),
        },
        (Err(error), _) | (_, Err(error)) => {
            Verdict::unknown(format!("net.ipv4.*_early_demux cannot be read: {error}"))
        }
    }
}

/// The cache is a field of the kernel's per-CPU `struct napi_alloc_cache`. No counter shows its use; that it
/// exists can be seen in the kernel's type information.
fn skb_cache(_: &Machine) -> Verdict {
    let btf = match Btf::from_vmlinux() {
        Ok(btf) => btf,
        Err(error) => return Verdict::unknown(format!("the kernel's type information cannot be read: {error}")),
    };
    let Some(cache) = btf.type_by_name::<Struct<'_>>("napi_alloc_cache") else {
        return Verdict::unknown("the kernel's type information has no struct napi_alloc_cache");
    };
    let field = cache.iter().find(|member| member.name == Some(OsStr::new("skb_cache")));
    match field {
        Some(_) => Verdict::works(
            "struct napi_alloc_cache has skb_cache (read from the kernel's type information; its use is not counted)",
        ),
        None => fails("struct napi_alloc_cache has no skb_cache", None, "boot a later kernel (Debian 12 has it)"),
    }
}

fn deferred_free(_: &Machine) -> Verdict {
    const PATH: &str = "/proc/sys/net/core/skb_defer_max";
    match fs::read_to_string(PATH) {
        Ok(text) => match text.trim() {
            "0" => fails("net.core.skb_defer_max = 0", None, "sysctl -w net.core.skb_defer_max=128"),
            limit => Verdict::works(format!("net.core.skb_defer_max = {limit} buffers wait per CPU at most")),
        },
        // The setting belongs to the whole machine, so other network namespaces do not show it.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !in_first_network() => {
            Verdict::unknown("net.core.skb_defer_max is shown in the first network namespace only")
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fails("there is no net.core.skb_defer_max", error.raw_os_error(), "boot Linux 5.19 or later")
        }
        Err(error) => Verdict::unknown(format!("{PATH}: {error}")),
    }
}

/// A socket's name is no part of the dentry cache (d_alloc_pseudo(), 4b93688), so it leaves none there: that is tried. Its
/// inode is on no list of the file system either (a209dfc); from outside only the time of it all can be seen.
fn fast_vfs(_: &Machine) -> Verdict {
    const SOCKETS: i64 = 1000;
    let mut left = i64::MAX;
    let mut each_ns = u128::MAX;
    // The cache belongs to the whole machine: the quietest of a few rounds counts.
    for _ in 0..5 {
        let before = unused_dentries();
        let begin = Instant::now();
        for _ in 0..SOCKETS {
            if let Err(error) = tcp_socket() {
                return Verdict::unknown(format!("cannot make a socket: {error}"));
            }
        }
        each_ns = each_ns.min(begin.elapsed().as_nanos() / SOCKETS as u128);
        match (before, unused_dentries()) {
            (Ok(before), Ok(after)) => left = left.min((after - before).abs()),
            (Err(error), _) | (_, Err(error)) => {
                return Verdict::unknown(format!("fs.dentry-state cannot be read: {error}"));
            }
        }
        if left < SOCKETS / 2 {
            return Verdict::works(format!(
                "{SOCKETS} sockets, made and closed in {each_ns} ns each, left no names in the dentry cache (that they \
                 share no list cannot be seen from outside)"
            ));
        }
    }
    Verdict::unknown(format!("the dentry cache changed by {left} names while {SOCKETS} sockets were made and closed"))
}

/// Dentries that nobody uses and the cache keeps: the second number of fs.dentry-state.
fn unused_dentries() -> io::Result<i64> {
    let text = fs::read_to_string("/proc/sys/fs/dentry-state")?;
    let number = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("it is {text:?}")))
}

fn tcp_socket() -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn refused(error: &FlowError, remedy: &str) -> Verdict {
    match error {
        FlowError::NotPermitted { .. } => {
            fails(error.to_string(), Some(libc::EPERM), "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")
        }
        FlowError::System { error: inner, .. } => fails(error.to_string(), inner.raw_os_error(), remedy),
        _ => fails(error.to_string(), None, remedy),
    }
}

fn in_first_network() -> bool {
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/net"));
    matches!((namespace("1"), namespace("thread-self")), (Ok(first), Ok(ours)) if first == ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_looked_at_and_explained() {
        let machine = Machine::look();
        for probe in PROBES {
            let verdict = (probe.run)(&machine);
            let text = match &verdict {
                Verdict::Works(text) | Verdict::Unknown(text) => text,
                Verdict::Fails(lack) => {
                    assert!(!lack.remedy.is_empty(), "{}: {verdict:?}", probe.name);
                    &lack.cause
                }
            };
            assert!(!text.is_empty() && probe.name.starts_with("flow_"), "{}: {verdict:?}", probe.name);
        }
    }
}
