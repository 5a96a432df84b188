//! What the engine `kernel` is made of: program types, maps, and programs that answer on sockets and in a namespace of
//! the probe's own.
//!
//! `ProgramType::is_supported` and `MapType::is_supported` of libbpf-rs say "no" to a process without rights and on a
//! kernel without the feature alike. A cause is looked up by errno, so programs are loaded and maps created by the calls
//! that keep it.

use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::thread;
use std::time::Duration;

use ksf_bpf::to_io;
use ksf_kernel::{Builtin, KernelError, KernelOptions, KernelService, ObjectSource};
use libbpf_rs::libbpf_sys::{self, bpf_insn, bpf_map_create_opts, bpf_prog_load_opts};
use libbpf_rs::{MapHandle, MapType, ProgramType};

use super::machine::Machine;
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
        title: "a map for counters that user space reads without a system call",
        fallback: USER_SPACE,
        run: mmap_array,
    },
    Probe {
        name: "bpf_syscall_program",
        title: "a program that user space runs (needed by ksf run for its fallback)",
        fallback: "messages of a user's program that the kernel passed on are not answered",
        run: syscall_program,
    },
    Probe {
        name: "xdp_generic",
        title: "a program answers UDP packets before the stack, in a private namespace",
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
    match load(ProgramType::SocketFilter, bpf_prog_load_opts::default()) {
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
    let expected_attach_type = libbpf_sys::BPF_SK_SKB_STREAM_VERDICT;
    match load(ProgramType::SkSkb, bpf_prog_load_opts { expected_attach_type, ..Default::default() }) {
        Ok(_) => Verdict::works("program type sk_skb, attach type stream verdict"),
        Err(error) => machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
    }
}

fn sockmap(machine: &Machine) -> Verdict {
    match create(MapType::Sockmap, 0).and_then(|_| create(MapType::Sockhash, 0)) {
        Ok(_) => Verdict::works("map and hash were created"),
        Err(error) => machine.bpf_fails(&error, &[BPF, NET_ADMIN]),
    }
}

/// Needs type information of key and value, which libbpf's own probe has at hand; loading that asks for the same right.
fn sk_storage(machine: &Machine) -> Verdict {
    match MapType::SkStorage.is_supported() {
        Ok(true) => Verdict::works("a storage map was created"),
        Ok(false) => machine.bpf_fails(&io::Error::from_raw_os_error(libc::EOPNOTSUPP), &[BPF]),
        Err(error) => machine.bpf_fails(&to_io(error), &[BPF]),
    }
}

fn mmap_array(machine: &Machine) -> Verdict {
    match create(MapType::Array, libbpf_sys::BPF_F_MMAPABLE) {
        Ok(_) => Verdict::works("an array that mmap(2) takes was created (kernel 5.5)"),
        Err(error) => machine.bpf_fails(&error, &[BPF]),
    }
}

fn syscall_program(machine: &Machine) -> Verdict {
    let prog_flags = libbpf_sys::BPF_F_SLEEPABLE;
    match load(ProgramType::Syscall, bpf_prog_load_opts { prog_flags, ..Default::default() }) {
        Ok(_) => Verdict::works("a program of type syscall was accepted (kernel 5.14)"),
        Err(error) => machine.bpf_fails(&error, &[BPF, PERFMON]),
    }
}

fn self_test(machine: &Machine) -> Verdict {
    match ksf_kernel::self_test() {
        Ok(()) => Verdict::works("passed"),
        Err(error) => Verdict::Fails(why_kernel(machine, &error)),
    }
}

/// Has the kernel half answer a datagram on the lo of a new network namespace, so that the machine's own lo never
/// carries the program.
fn xdp_generic(machine: &Machine) -> Verdict {
    enum Attempt {
        Namespace(io::Error),
        Attach(KernelError),
        Datagram(io::Error),
    }
    let mut options = KernelOptions::default();
    options.connections_max = 1;
    let service = match KernelService::load(&ObjectSource::Builtin(Builtin::Echo), &options) {
        Ok(service) => service,
        Err(error) => return Verdict::Fails(why_kernel(machine, &error)),
    };
    // unshare changes the calling thread only, and the namespace ends with it.
    let probe = || -> Result<(), Attempt> {
        private_namespace().map_err(Attempt::Namespace)?;
        // Nobody listens there: an answer is the program's.
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
        let _link = service.attach_udp("lo", &[address]).map_err(Attempt::Attach)?;
        let exchange = || -> io::Result<()> {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            socket.connect(address)?;
            socket.send(b"ksf")?;
            socket.recv(&mut [0; 8]).map(drop)
        };
        exchange().map_err(Attempt::Datagram)
    };
    match thread::scope(|scope| scope.spawn(probe).join()) {
        Ok(Ok(())) => Verdict::works("the program answered a datagram on lo (generic mode)"),
        Ok(Err(Attempt::Namespace(error))) => {
            Verdict::unknown(format!("no private network namespace to try it in ({error}); needs CAP_SYS_ADMIN"))
        }
        Ok(Err(Attempt::Attach(error))) => Verdict::Fails(why_kernel(machine, &error)),
        // The port is unreachable: the datagram went past the program.
        Ok(Err(Attempt::Datagram(error))) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Verdict::fails("the program is attached but sees no packet", "boot Linux 6.1 or later")
        }
        Ok(Err(Attempt::Datagram(error))) => Verdict::unknown(format!("datagram: {error}")),
        Err(_) => Verdict::unknown("the probe itself failed"),
    }
}

/// Explains why the kernel half does not run.
pub(crate) fn why_kernel(machine: &Machine, error: &KernelError) -> Lack {
    let (cause, remedy) = match error {
        KernelError::NotPermitted { action, .. } => {
            let refused = io::Error::from_raw_os_error(libc::EPERM);
            let lack = machine.why_bpf(&refused, &[BPF, NET_ADMIN, PERFMON]);
            return Lack { cause: format!("not permitted to {action}: {}", lack.cause), ..lack };
        }
        KernelError::System { action, error } => {
            let lack = machine.why_bpf(error, &[]);
            return Lack { cause: one_line(&format!("{action} failed: {}", lack.cause)), ..lack };
        }
        KernelError::Unsupported { feature, detail } => {
            (format!("this kernel lacks {feature} ({detail})"), "boot Linux 6.1 or later")
        }
        KernelError::XdpBusy { interface, program } => (
            format!("interface {interface} already runs the XDP program {program}"),
            "stop the server it belongs to, or leave UDP to user space with --no-xdp",
        ),
        KernelError::NoInterface { interface } => {
            (format!("there is no interface {interface}"), "see ip link for the names")
        }
        KernelError::SelfTest { test, problem } => {
            (format!("the self-test failed: {test}: {problem}"), "boot another kernel, and please report this")
        }
        other => (other.to_string(), "boot Linux 6.1 or later; ksf doctor says what is missing"),
    };
    Lack { cause: one_line(&cause), errno: None, remedy: remedy.to_owned() }
}

/// Loads a program that returns 1, which every type of program may.
fn load(kind: ProgramType, options: bpf_prog_load_opts) -> io::Result<OwnedFd> {
    const SET_RESULT: u8 = (libbpf_sys::BPF_ALU64 | libbpf_sys::BPF_MOV | libbpf_sys::BPF_K) as u8;
    const EXIT: u8 = (libbpf_sys::BPF_JMP | libbpf_sys::BPF_EXIT) as u8;
    let program =
        [bpf_insn { code: SET_RESULT, imm: 1, ..Default::default() }, bpf_insn { code: EXIT, ..Default::default() }];
    let mut options = bpf_prog_load_opts { sz: size_of::<bpf_prog_load_opts>() as _, ..options };
    let (license, length) = (c"GPL".as_ptr(), program.len() as _);
    // SAFETY: the license and `length` instructions are read, and the options, whose own length they say, are valid for
    // the call and hold no other address. A program needs no name.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(kind as u32, ptr::null(), license, program.as_ptr(), length, &raw mut options)
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call made this descriptor, and nobody else has seen it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Creates a map of one entry with a key of four bytes and a value of eight, or of four where it must be.
fn create(kind: MapType, map_flags: u32) -> io::Result<MapHandle> {
    let options = bpf_map_create_opts { sz: size_of::<bpf_map_create_opts>() as _, map_flags, ..Default::default() };
    let value_bytes = if kind == MapType::Sockmap { 4 } else { 8 };
    MapHandle::create(kind, None::<&str>, 4, value_bytes, 1, &options).map_err(to_io)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_half_lacks_has_a_remedy_that_fits() {
        let machine = Machine { capabilities: u64::MAX, seccomp: Some(2), ..Machine::default() };
        let remedy = |error: &KernelError| why_kernel(&machine, error).remedy;
        let full = io::Error::from_raw_os_error(libc::EMFILE);
        assert!(remedy(&KernelError::System { action: "x", error: full }).contains("ulimit -n"));
        let busy = KernelError::XdpBusy { interface: "lo".into(), program: "x".into() };
        assert!(remedy(&busy).contains("--no-xdp"));
        let refused = KernelError::NotPermitted { action: "load", cause: "x".into(), remedy: "x".into() };
        assert!(remedy(&refused).contains("SystemCallFilter"));
        let lack = why_kernel(&Machine::default(), &refused);
        assert!(lack.cause.contains("CAP_BPF") && lack.remedy.contains("setcap"), "{lack:?}");
        assert_eq!(lack.errno, Some(libc::EPERM));
    }
}
