//! What the engine `kernel` is made of: program types, maps and the redirect from a socket to
//! itself. Programs are loaded and attached to sockets and namespaces of the probe's own.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use ksf_kernel::KernelError;

use super::machine::{Machine, SETCAP};
use super::sys_bpf::{self as bpf, MapSpec, insn};
use super::verdict::{Lack, Probe, Verdict};
use crate::output::one_line;

const NET_ADMIN: u32 = 12;
const PERFMON: u32 = 38;
const BPF: u32 = 39;

const USER_SPACE: &str = "engine uring, or epoll: the same service in user space";
const UDP_USER_SPACE: &str = "UDP is answered in user space";

/// The probes, in the order in which one builds on the other.
pub(crate) const PROBES: &[Probe] = &[
    Probe { name: "bpf_syscall", title: "load an eBPF program at all", fallback: USER_SPACE, run: syscall },
    Probe { name: "bpf_btf", title: "type information of the running kernel", fallback: USER_SPACE, run: btf },
    Probe { name: "bpf_sk_skb", title: "load a verdict program for socket data", fallback: USER_SPACE, run: sk_skb },
    Probe { name: "bpf_sockmap", title: "create a map and a hash of sockets", fallback: USER_SPACE, run: sockmap },
    Probe { name: "bpf_sk_storage", title: "state of a program per socket", fallback: USER_SPACE, run: sk_storage },
    Probe {
        name: "bpf_mmap_array",
        title: "counters that user space reads without a system call",
        fallback: USER_SPACE,
        run: mmap_array,
    },
    Probe {
        name: "bpf_redirect",
        title: "a program sends a TCP segment back on its own socket",
        fallback: USER_SPACE,
        run: redirect,
    },
    Probe {
        name: "bpf_syscall_program",
        title: "run a program from user space (needed by ksf run for its fallback)",
        fallback: "messages of a user's program that the kernel passed on are not answered",
        run: syscall_program,
    },
    Probe {
        name: "xdp_generic",
        title: "a program sees UDP packets before the stack, in a private namespace",
        fallback: UDP_USER_SPACE,
        run: xdp_generic,
    },
    Probe {
        name: "bpf_self_test",
        title: "the kernel half does what it relies on: odd sizes, slow readers, half-close",
        fallback: USER_SPACE,
        run: self_test,
    },
];

fn syscall(machine: &Machine) -> Verdict {
    let program = [insn::set(0, 0), insn::exit()];
    match bpf::prog_load(bpf::PROG_SOCKET_FILTER, 0, 0, &program) {
        Ok(_) => Verdict::works("a program of two instructions was accepted"),
        Err(error) if machine.unprivileged_bpf_disabled == Some(0) => machine.bpf_fails(&error, &[]),
        Err(error) => machine.bpf_fails(&error, &[BPF]),
    }
}

fn btf(_: &Machine) -> Verdict {
    const PATH: &str = "/sys/kernel/btf/vmlinux";
    const MAGIC: [u8; 2] = 0xeb9f_u16.to_ne_bytes();
    let mut magic = [0; 2];
    match File::open(PATH).and_then(|mut file| file.read_exact(&mut magic)) {
        Ok(()) if magic == MAGIC => Verdict::works(PATH),
        Ok(()) => Verdict::unknown(format!("{PATH} is not type information")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Verdict::Fails(Lack::errno(
            &error,
            "the kernel is built without CONFIG_DEBUG_INFO_BTF, or /sys is not mounted",
            "boot a distribution kernel (Debian 12, Fedora, Ubuntu 20.10 and later have it)",
        )),
        Err(error) => Verdict::unknown(format!("{PATH}: {error}")),
    }
}

fn sk_skb(machine: &Machine) -> Verdict {
    const PASS: i32 = 1;
    let program = [insn::set(0, PASS), insn::exit()];
    let attach = bpf::ATTACH_STREAM_VERDICT;
    match bpf::prog_load(bpf::PROG_SK_SKB, attach, 0, &program) {
        Ok(_) => Verdict::works("program type sk_skb, attach type stream verdict"),
        Err(error) => machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
    }
}

fn sockmap(machine: &Machine) -> Verdict {
    for (kind, value_bytes) in [(bpf::MAP_SOCKMAP, 4), (bpf::MAP_SOCKHASH, 8)] {
        let spec = MapSpec { kind, value_bytes, entries: 1, ..MapSpec::default() };
        if let Err(error) = bpf::map_create(spec) {
            return machine.bpf_fails(&error, &[BPF, NET_ADMIN]);
        }
    }
    Verdict::works("map and hash were created")
}

fn sk_storage(machine: &Machine) -> Verdict {
    let created = bpf::btf_load_int().and_then(|btf| {
        bpf::map_create(MapSpec {
            kind: bpf::MAP_SK_STORAGE,
            value_bytes: 4,
            flags: bpf::NO_PREALLOC,
            btf: Some(btf.as_fd()),
            ..MapSpec::default()
        })
    });
    match created {
        Ok(_) => Verdict::works("a storage map was created"),
        Err(error) => machine.bpf_fails(&error, &[BPF]),
    }
}

fn mmap_array(machine: &Machine) -> Verdict {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    const BYTES: usize = 4096;
    let map = match counter_map(bpf::MMAPABLE) {
        Ok(map) => map,
        Err(error) => return machine.bpf_fails(&error, &[BPF]),
    };
    if let Err(error) = bpf::map_update(map.as_fd(), 0, &42_u64.to_ne_bytes()) {
        return machine.bpf_fails(&error, &[BPF]);
    }
    // SAFETY: a new shared mapping at an address the kernel chooses aliases nothing in Rust.
    let mapped = unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ, MapFlags::SHARED, &map, 0) };
    let memory = match mapped {
        Ok(memory) => memory,
        Err(error) => return machine.bpf_fails(&error.into(), &[BPF]),
    };
    // SAFETY: the mapping is readable and page aligned; nobody writes the map any more.
    let value = unsafe { memory.cast::<u64>().read() };
    // SAFETY: the mapping was made above with this length and is not used below.
    let _ = unsafe { munmap(memory, BYTES) };
    if value == 42 {
        Verdict::works("a value was read through the mapping")
    } else {
        Verdict::fails("the mapping does not show the map's value", SETCAP)
    }
}

/// The heart of the engine, in miniature: one connection, one program that redirects each
/// segment to the socket it came from, one message that must come back.
fn redirect(machine: &Machine) -> Verdict {
    const MESSAGE: &[u8] = b"ksf doctor: does this come back?";
    let prepared = (|| -> io::Result<_> {
        let map =
            bpf::map_create(MapSpec { kind: bpf::MAP_SOCKMAP, value_bytes: 4, entries: 1, ..MapSpec::default() })?;
        let program = redirecting_program(&map);
        let attach = bpf::ATTACH_STREAM_VERDICT;
        let program = bpf::prog_load(bpf::PROG_SK_SKB, attach, 0, &program)?;
        bpf::prog_attach(map.as_fd(), program.as_fd(), attach)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        bpf::map_update(map.as_fd(), 0, &server.as_raw_fd().to_ne_bytes())?;
        Ok((client, server, map))
    })();
    let (mut client, _server, _map) = match prepared {
        Ok(parts) => parts,
        Err(error) => return machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
    };
    let mut echo = vec![0; MESSAGE.len()];
    let exchange = client
        .set_read_timeout(Some(Duration::from_secs(1)))
        .and_then(|()| client.write_all(MESSAGE))
        .and_then(|()| client.read_exact(&mut echo));
    match exchange {
        Ok(()) if echo == MESSAGE => Verdict::works("a message came back from the kernel"),
        Ok(()) => Verdict::fails("the message came back changed", "boot another kernel"),
        Err(error) => Verdict::fails(format!("the message did not come back ({error})"), "boot Linux 6.1 or later"),
    }
}

fn redirecting_program(map: &OwnedFd) -> Vec<bpf::Insn> {
    const SK_REDIRECT_MAP: i32 = 52;
    // r1 is the segment already; the result of the helper is the program's verdict.
    let mut program = insn::load_map(2, map.as_fd()).to_vec();
    program.extend([insn::set(3, 0), insn::set(4, 0), insn::call(SK_REDIRECT_MAP), insn::exit()]);
    program
}

fn syscall_program(machine: &Machine) -> Verdict {
    const ANSWER: i32 = 42;
    let program = [insn::set(0, ANSWER), insn::exit()];
    let result = bpf::prog_load(bpf::PROG_SYSCALL, 0, bpf::SLEEPABLE, &program)
        .and_then(|program| bpf::syscall_run(program.as_fd()));
    match result {
        Ok(42) => Verdict::works("a program ran and returned its value (kernel 5.14)"),
        Ok(other) => Verdict::unknown(format!("the program returned {other} instead of 42")),
        Err(error) => machine.bpf_fails(&error, &[BPF, PERFMON]),
    }
}

fn self_test(_: &Machine) -> Verdict {
    match ksf_kernel::self_test() {
        Ok(()) => Verdict::works("passed"),
        Err(KernelError::NotPermitted { action, cause, .. }) => {
            Verdict::fails(format!("not permitted to {action}: {cause}"), SETCAP)
        }
        Err(error @ KernelError::SelfTest { .. }) => {
            Verdict::fails(error.to_string(), "boot another kernel, and please report this")
        }
        Err(error) => Verdict::fails(one_line(&error.to_string()), "boot Linux 6.1 or later"),
    }
}

/// Attaches a counting program to the lo of a new network namespace, so that the machine's own
/// lo never carries it, and sends one datagram through it.
fn xdp_generic(machine: &Machine) -> Verdict {
    const PASS: i32 = 2;
    let loaded = counter_map(0).and_then(|map| {
        let program = bpf::counting_program(map.as_fd(), PASS);
        let program = bpf::prog_load(bpf::PROG_XDP, bpf::ATTACH_XDP, 0, &program)?;
        Ok((map, program))
    });
    let (map, program) = match loaded {
        Ok(pair) => pair,
        Err(error) => return machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
    };
    // unshare changes the calling thread only, and the namespace ends with it.
    let attempt = thread::spawn(move || -> Result<u64, (&'static str, io::Error)> {
        private_namespace().map_err(|error| ("namespace", error))?;
        let link = bpf::link_xdp(program.as_fd(), LO, bpf::XDP_SKB_MODE).map_err(|error| ("attach", error))?;
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| ("datagram", e))?;
        let exchange = || -> io::Result<()> {
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            socket.send_to(b"ksf", socket.local_addr()?)?;
            socket.recv(&mut [0; 8]).map(drop)
        };
        exchange().map_err(|error| ("datagram", error))?;
        drop(link);
        bpf::map_lookup_u64(map.as_fd(), 0).map_err(|error| ("counter", error))
    });
    match attempt.join() {
        Ok(Ok(0)) => Verdict::fails("the program is attached but sees no packet", "boot Linux 6.1 or later"),
        Ok(Ok(_)) => Verdict::works("the program saw a datagram on lo (generic mode)"),
        Ok(Err(("namespace", error))) => {
            Verdict::unknown(format!("no private network namespace to try it in ({error}); needs CAP_SYS_ADMIN"))
        }
        Ok(Err(("attach", error))) => machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
        Ok(Err((step, error))) => Verdict::unknown(format!("{step}: {error}")),
        Err(_) => Verdict::unknown("the probe itself failed"),
    }
}

/// lo is the first interface of every network namespace.
const LO: u32 = 1;

/// Moves this thread to a new network namespace and brings its lo up.
fn private_namespace() -> io::Result<()> {
    // SAFETY: CLONE_NEWNET changes only which namespace this thread's new sockets belong to.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: all-zero bytes are a valid ifreq (integers, arrays and unions of them).
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the descriptor is open and the kernel reads one ifreq at the given address.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn counter_map(flags: u32) -> io::Result<OwnedFd> {
    bpf::map_create(MapSpec { kind: bpf::MAP_ARRAY, value_bytes: 8, entries: 1, flags, btf: None })
}
