//! Rights and limits of this process and machine that decide how far a server gets.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ksf::cpus::CpuSet;
use rustix::process::{Resource, getrlimit};

use super::machine::{CAPABILITIES, Machine, SETCAP, sysctl};
use super::verdict::{Lack, Probe, Verdict};

/// The probes.
pub(crate) const PROBES: &[Probe] = &[
    Probe {
        name: "cap_bpf",
        title: "CAP_BPF: load eBPF programs",
        fallback: "engine uring or epoll, UDP in user space",
        run: |machine| capability(machine, "CAP_BPF"),
    },
    Probe {
        name: "cap_net_admin",
        title: "CAP_NET_ADMIN: attach programs to sockets and interfaces",
        fallback: "engine uring or epoll, UDP in user space",
        run: |machine| capability(machine, "CAP_NET_ADMIN"),
    },
    Probe {
        name: "cap_perfmon",
        title: "CAP_PERFMON: let programs follow kernel pointers",
        fallback: "engine uring or epoll",
        run: |machine| capability(machine, "CAP_PERFMON"),
    },
    Probe {
        name: "cap_sys_admin",
        title: "CAP_SYS_ADMIN: only for io_uring where kernel.io_uring_disabled = 1",
        fallback: "nothing is lost unless that sysctl is 1",
        run: |machine| capability(machine, "CAP_SYS_ADMIN"),
    },
    Probe {
        name: "unprivileged_bpf",
        title: "eBPF is not closed to this process by kernel.unprivileged_bpf_disabled",
        fallback: "nothing more is lost: the kernel engine asks for capabilities anyway",
        run: unprivileged_bpf,
    },
    Probe {
        name: "memlock",
        title: "locked memory for rings and maps",
        fallback: "on kernels before 5.12 rings and maps may fail with ENOMEM",
        run: memlock,
    },
    Probe {
        name: "open_files",
        title: "descriptors for 10,000 connections",
        fallback: "connections above the limit are closed and counted (refused_no_fd)",
        run: open_files,
    },
    Probe { name: "cpus", title: "CPUs for shards", fallback: "one shard does all the work", run: cpus },
    Probe {
        name: "somaxconn",
        title: "accept queue for bursts of connections",
        fallback: "in a burst the peers' SYNs are retried after a second",
        run: somaxconn,
    },
    Probe {
        name: "send_buffer",
        title: "large send buffers, so that the kernel engine never meets a full one",
        fallback: "the kernel engine passes to user space earlier",
        run: send_buffer,
    },
    Probe {
        name: "rpcbind",
        title: "rpcbind answers on this machine (for krpc2 --rpcbind)",
        fallback: "clients must be told the port; nothing else is lost",
        run: rpcbind,
    },
];

fn capability(machine: &Machine, wanted: &str) -> Verdict {
    let Some((bit, name, _)) = CAPABILITIES.iter().find(|(_, name, _)| *name == wanted) else {
        return Verdict::unknown(format!("{wanted} is not in the table"));
    };
    if machine.capable(*bit) {
        return Verdict::works("in the effective set");
    }
    if matches!(*name, "CAP_BPF" | "CAP_PERFMON") && machine.capable_bpf(*bit) {
        return Verdict::works("by CAP_SYS_ADMIN");
    }
    let remedy = match *name {
        "CAP_SYS_ADMIN" => "not needed by default; run as root if the sysctl stays as it is",
        _ => SETCAP,
    };
    Verdict::fails(format!("{name} is not in the effective set"), remedy)
}

fn unprivileged_bpf(machine: &Machine) -> Verdict {
    match machine.unprivileged_bpf_disabled {
        Some(0) => Verdict::works("open to all (0)"),
        Some(value) if machine.capable_bpf(39) => {
            Verdict::works(format!("closed to others ({value}), but this process has CAP_BPF"))
        }
        Some(value) => Verdict::fails(
            format!("kernel.unprivileged_bpf_disabled = {value}"),
            format!("leave the sysctl as it is; {SETCAP}"),
        ),
        None => Verdict::unknown("kernel.unprivileged_bpf_disabled cannot be read"),
    }
}

fn memlock(machine: &Machine) -> Verdict {
    const ENOUGH_BYTES: u64 = 64 << 20;
    let accounted_by_cgroup = kernel_at_least(&machine.kernel, 5, 12);
    match getrlimit(Resource::Memlock).current {
        None => Verdict::works("unlimited"),
        Some(bytes) if bytes >= ENOUGH_BYTES => Verdict::works(format!("{} MiB", bytes >> 20)),
        Some(bytes) if accounted_by_cgroup => {
            Verdict::works(format!("{} KiB; this kernel charges rings and maps to the cgroup instead", bytes >> 10))
        }
        Some(bytes) => Verdict::fails(
            format!("RLIMIT_MEMLOCK is {} KiB", bytes >> 10),
            "ulimit -l 65536, or LimitMEMLOCK=64M in the unit",
        ),
    }
}

/// The one place where a version is compared: what is asked is which limit the kernel charges,
/// and that cannot be tried without using the memory up.
fn kernel_at_least(release: &str, major: u32, minor: u32) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    found >= (major, minor)
}

fn open_files(_: &Machine) -> Verdict {
    const WANTED: u64 = 10_000 + 100;
    let limit = getrlimit(Resource::Nofile);
    match (limit.current, limit.maximum) {
        (None, _) => Verdict::works("unlimited"),
        (Some(soft), _) if soft >= WANTED => Verdict::works(format!("RLIMIT_NOFILE is {soft}")),
        (Some(soft), Some(hard)) if hard >= WANTED => {
            Verdict::works(format!("RLIMIT_NOFILE is {soft}; a server raises it to {hard} by itself"))
        }
        (Some(soft), None) => Verdict::works(format!("RLIMIT_NOFILE is {soft}; a server raises it by itself")),
        (Some(_), Some(hard)) => Verdict::fails(
            format!("the hard limit of RLIMIT_NOFILE is {hard}"),
            "ulimit -Hn 65536 as root, or LimitNOFILE=65536 in the unit",
        ),
    }
}

fn cpus(_: &Machine) -> Verdict {
    let allowed = match CpuSet::of_thread(None) {
        Ok(allowed) => allowed,
        Err(error) => return Verdict::unknown(format!("sched_getaffinity: {error}")),
    };
    let mut text = format!("{} of this process: {allowed}", allowed.len());
    if let Some(cgroup) = cgroup_cpuset() {
        text.push_str(&format!("; cpuset of the cgroup: {cgroup}"));
    }
    if allowed.len() > 1 {
        Verdict::works(text)
    } else {
        Verdict::fails(
            format!("only one CPU ({text})"),
            "widen the mask (taskset, AllowedCPUs=, docker --cpuset-cpus) if the machine has more",
        )
    }
}

/// The CPUs of this process's control group, version 2 or version 1.
fn cgroup_cpuset() -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path_of = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            (controllers.split(',').any(|name| name == controller)).then(|| path.to_owned())
        })
    };
    let mut candidates = Vec::new();
    if let Some(path) = path_of("cpuset") {
        candidates.push(format!("/sys/fs/cgroup/cpuset{path}/cpuset.effective_cpus"));
    }
    if let Some(path) = path_of("") {
        candidates.push(format!("/sys/fs/cgroup{path}/cpuset.cpus.effective"));
    }
    candidates
        .iter()
        .find_map(|path| fs::read_to_string(path).ok())
        .map(|list| list.trim().to_owned())
        .filter(|list| !list.is_empty())
}

fn somaxconn(_: &Machine) -> Verdict {
    const WANTED: i64 = 1024;
    match sysctl("net/core/somaxconn") {
        Some(value) if value >= WANTED => Verdict::works(format!("net.core.somaxconn = {value}")),
        Some(value) => Verdict::fails(format!("net.core.somaxconn = {value}"), "sysctl -w net.core.somaxconn=4096"),
        None => Verdict::unknown("net.core.somaxconn cannot be read"),
    }
}

fn send_buffer(_: &Machine) -> Verdict {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
    const WANTED_BYTES: usize = 4 << 20;
    let flags = SocketFlags::CLOEXEC;
    let socket = match socket_with(AddressFamily::INET, SocketType::STREAM, flags, None) {
        Ok(socket) => socket,
        Err(error) => return Verdict::unknown(format!("no TCP socket: {error}")),
    };
    // The kernel doubles the value for its own overhead (socket(7)), so half of it is asked for.
    let forced = sockopt::set_socket_send_buffer_size_force(&socket, WANTED_BYTES / 2).is_ok();
    if !forced && let Err(error) = sockopt::set_socket_send_buffer_size(&socket, WANTED_BYTES / 2) {
        return Verdict::unknown(format!("SO_SNDBUF: {error}"));
    }
    match sockopt::socket_send_buffer_size(&socket) {
        Ok(bytes) if bytes >= WANTED_BYTES => Verdict::works(format!(
            "{} KiB granted{}",
            bytes >> 10,
            if forced { " (beyond wmem_max by CAP_NET_ADMIN)" } else { "" }
        )),
        Ok(bytes) => Verdict::fails(
            format!(
                "only {} KiB granted (net.core.wmem_max = {})",
                bytes >> 10,
                sysctl("net/core/wmem_max").unwrap_or(-1)
            ),
            "sysctl -w net.core.wmem_max=4194304, or give CAP_NET_ADMIN",
        ),
        Err(error) => Verdict::unknown(format!("SO_SNDBUF: {error}")),
    }
}

fn rpcbind(_: &Machine) -> Verdict {
    const SOCKET: &str = "/run/rpcbind.sock";
    const PORT: u16 = 111;
    if UnixStream::connect(SOCKET).is_ok() {
        return Verdict::works(format!("answers on {SOCKET}"));
    }
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    match TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
        Ok(_) => Verdict::works(format!("answers on {address}")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Verdict::Fails(Lack::errno(
            &error,
            format!("nobody listens on {SOCKET} or {address}"),
            "apt-get install rpcbind && systemctl start rpcbind",
        )),
        Err(error) => Verdict::unknown(format!("{address}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert!(kernel_at_least("6.1.0-18-amd64", 5, 12));
        assert!(kernel_at_least("5.12.0", 5, 12));
        assert!(!kernel_at_least("5.4.0-100", 5, 12));
        assert!(!kernel_at_least("unknown", 5, 12));
    }

    #[test]
    fn sys_admin_stands_for_bpf_and_perfmon_but_not_for_net_admin() {
        let machine = Machine { capabilities: 1 << 21, ..Machine::default() };
        assert_eq!(capability(&machine, "CAP_BPF").word(), "works");
        assert_eq!(capability(&machine, "CAP_PERFMON").word(), "works");
        assert_eq!(capability(&machine, "CAP_NET_ADMIN").word(), "fails");
    }
}
