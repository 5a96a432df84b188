//! Facts about the machine and this process that explain a refused call.
//!
//! An errno alone is a poor explanation: EPERM from io_uring_setup can be a sysctl, a seccomp
//! profile or a security module. So the probes look the likely causes up here and name the one
//! that holds.

use std::fs;
use std::io;

use super::verdict::{Lack, Verdict};

/// Capabilities that matter to ksf: bit number (linux/capability.h), name, what needs it.
pub(crate) const CAPABILITIES: &[(u32, &str, &str)] = &[
    (12, "CAP_NET_ADMIN", "attach programs to sockets and interfaces"),
    (21, "CAP_SYS_ADMIN", "io_uring where the sysctl restricts it"),
    (38, "CAP_PERFMON", "let programs follow kernel pointers"),
    (39, "CAP_BPF", "load eBPF programs"),
];

/// The command that gives an installed binary the rights of the kernel engine without root.
pub(crate) const SETCAP: &str = "run as root, or: setcap cap_bpf,cap_net_admin,cap_perfmon+ep \"$(command -v ksf)\"";

/// The kernel's internal "not supported", which bpf(2) lets out (include/linux/errno.h).
const ENOTSUPP: i32 = 524;

/// What was read from /proc about this process and kernel. Fields are `None` where the file
/// does not exist or cannot be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    /// Effective user id.
    pub(crate) uid: u32,
    /// Effective capabilities as a bit mask.
    pub(crate) capabilities: u64,
    /// 0 off, 1 strict, 2 filter.
    pub(crate) seccomp: Option<u32>,
    /// 0 allowed, 1 only with CAP_SYS_ADMIN or the group, 2 off (kernel 6.6 and later).
    pub(crate) io_uring_disabled: Option<i64>,
    /// 0 allowed, 1 and 2 only with CAP_BPF.
    pub(crate) unprivileged_bpf_disabled: Option<i64>,
    /// Kernel release, e.g. `6.1.0-18-amd64`.
    pub(crate) kernel: String,
    /// Machine architecture, e.g. `x86_64`.
    pub(crate) architecture: String,
}

impl Machine {
    /// Reads the facts of this process and kernel.
    pub(crate) fn look() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let uname = rustix::system::uname();
        Machine {
            uid: rustix::process::geteuid().as_raw(),
            capabilities: field(&status, "CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0),
            seccomp: field(&status, "Seccomp:").and_then(|text| text.parse().ok()),
            io_uring_disabled: sysctl("kernel/io_uring_disabled"),
            unprivileged_bpf_disabled: sysctl("kernel/unprivileged_bpf_disabled"),
            kernel: uname.release().to_string_lossy().into_owned(),
            architecture: uname.machine().to_string_lossy().into_owned(),
        }
    }

    /// Whether the effective set holds capability number `bit`.
    pub(crate) fn capable(&self, bit: u32) -> bool {
        self.capabilities & (1 << bit) != 0
    }

    /// CAP_SYS_ADMIN stands for CAP_BPF and CAP_PERFMON too (kernel 5.8, commit 2c78ee898d8f).
    pub(crate) fn capable_bpf(&self, bit: u32) -> bool {
        self.capable(bit) || self.capable(21)
    }

    /// Explains an error of io_uring_setup or io_uring_register.
    pub(crate) fn why_uring(&self, error: &io::Error) -> Lack {
        let errno = error.raw_os_error().unwrap_or(0);
        match (errno, self.io_uring_disabled) {
            (libc::EPERM, Some(2)) => Lack::errno(
                error,
                "io_uring is switched off (kernel.io_uring_disabled = 2)",
                "sysctl -w kernel.io_uring_disabled=0",
            ),
            (libc::EPERM, Some(1)) if !self.capable(21) => Lack::errno(
                error,
                "io_uring is restricted (kernel.io_uring_disabled = 1) and this process has \
                 neither CAP_SYS_ADMIN nor the group of kernel.io_uring_group",
                "join that group, run as root, or: sysctl -w kernel.io_uring_disabled=0",
            ),
            (libc::EPERM | libc::ENOSYS | libc::EACCES, _) if self.seccomp == Some(2) => Lack::errno(
                error,
                "a seccomp filter is active on this process (container or unit) and refuses io_uring",
                "allow io_uring_setup, io_uring_enter and io_uring_register in the profile, \
                     e.g. SystemCallFilter=@aio or docker --security-opt seccomp=PROFILE",
            ),
            (libc::EPERM, _) => Lack::errno(
                error,
                "a security module refuses io_uring (no sysctl and no seccomp filter does)",
                "allow io_uring in the SELinux or AppArmor policy",
            ),
            (libc::ENOSYS, _) => Lack::errno(
                error,
                "the kernel is built without io_uring (CONFIG_IO_URING)",
                "boot a kernel with CONFIG_IO_URING=y",
            ),
            (libc::EINVAL, _) => Lack::errno(
                error,
                format!("kernel {} does not know this feature", self.kernel),
                "boot Linux 6.1 or later",
            ),
            _ => shortage(error),
        }
    }

    /// Explains an error of bpf(2). `needs` are the capability numbers the call asks for.
    pub(crate) fn why_bpf(&self, error: &io::Error, needs: &[u32]) -> Lack {
        let errno = error.raw_os_error().unwrap_or(0);
        let missing: Vec<_> = CAPABILITIES
            .iter()
            .filter(|(bit, name, _)| {
                needs.contains(bit)
                    && match *name {
                        "CAP_BPF" | "CAP_PERFMON" => !self.capable_bpf(*bit),
                        _ => !self.capable(*bit),
                    }
            })
            .map(|(_, name, _)| *name)
            .collect();
        match errno {
            libc::EPERM | libc::EACCES if !missing.is_empty() => {
                Lack::errno(error, format!("missing {}", missing.join(", ")), SETCAP)
            }
            libc::EPERM | libc::EACCES | libc::ENOSYS if self.seccomp == Some(2) => Lack::errno(
                error,
                "a seccomp filter is active on this process and refuses bpf(2)",
                "allow bpf in the profile, e.g. SystemCallFilter=bpf",
            ),
            libc::EPERM | libc::EACCES => Lack::errno(
                error,
                "refused although the capabilities are there: a security module, lockdown, a \
                 user namespace other than the initial one, or a kernel without this program type",
                "run in the initial user namespace; look for the refusal in the kernel log",
            ),
            libc::ENOSYS => Lack::errno(
                error,
                "the kernel is built without bpf(2) (CONFIG_BPF_SYSCALL)",
                "boot a kernel with CONFIG_BPF_SYSCALL=y",
            ),
            libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP => Lack::errno(
                error,
                format!("kernel {} does not offer it ({error})", self.kernel),
                "boot Linux 6.1 or later, built with CONFIG_BPF_STREAM_PARSER and CONFIG_DEBUG_INFO_BTF",
            ),
            _ => shortage(error),
        }
    }

    /// [`Machine::why_uring`] as a verdict.
    pub(crate) fn uring_fails(&self, error: &io::Error) -> Verdict {
        Verdict::Fails(self.why_uring(error))
    }

    /// [`Machine::why_bpf`] as a verdict.
    pub(crate) fn bpf_fails(&self, error: &io::Error, needs: &[u32]) -> Verdict {
        Verdict::Fails(self.why_bpf(error, needs))
    }
}

/// Explains an error that any call can have: something is used up.
fn shortage(error: &io::Error) -> Lack {
    let (cause, remedy) = match error.raw_os_error() {
        Some(libc::EMFILE) => (
            "this process may open no more files (RLIMIT_NOFILE)",
            "raise the limit of open files: ulimit -n, or LimitNOFILE= in the unit",
        ),
        Some(libc::ENFILE) => {
            ("this machine may open no more files (fs.file-max)", "raise the limit: sysctl -w fs.file-max=NUMBER")
        }
        Some(libc::ENOMEM) => (
            "no memory (RLIMIT_MEMLOCK on kernels before 5.12, or the cgroup's limit)",
            "raise ulimit -l or the memory limit of the cgroup",
        ),
        _ => {
            let cause = format!("the kernel answered: {error}");
            return Lack::errno(error, cause, "no known remedy; please report this");
        }
    };
    Lack::errno(error, cause, remedy)
}

/// A number below /proc/sys, or `None` where it does not exist.
pub(crate) fn sysctl(name: &str) -> Option<i64> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok()?.split_whitespace().next()?.parse().ok()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(errno: i32) -> io::Error {
        io::Error::from_raw_os_error(errno)
    }

    #[test]
    fn a_sysctl_explains_before_seccomp_does() {
        let machine = Machine { io_uring_disabled: Some(2), seccomp: Some(2), ..Machine::default() };
        let lack = machine.why_uring(&error(libc::EPERM));
        assert!(lack.cause.contains("io_uring_disabled = 2"), "{lack:?}");
        assert_eq!(lack.errno, Some(libc::EPERM));
    }

    #[test]
    fn a_restricted_ring_is_no_excuse_for_an_administrator() {
        let root = Machine { io_uring_disabled: Some(1), capabilities: 1 << 21, ..Machine::default() };
        assert!(root.why_uring(&error(libc::EPERM)).cause.contains("security module"));
        let user = Machine { io_uring_disabled: Some(1), ..Machine::default() };
        assert!(user.why_uring(&error(libc::EPERM)).cause.contains("io_uring_disabled = 1"));
    }

    #[test]
    fn seccomp_is_named_where_it_is_active() {
        let machine =
            Machine { io_uring_disabled: Some(0), seccomp: Some(2), capabilities: u64::MAX, ..Machine::default() };
        assert!(machine.why_uring(&error(libc::ENOSYS)).cause.contains("seccomp"));
        assert!(machine.why_bpf(&error(libc::EPERM), &[39]).cause.contains("seccomp"));
    }

    #[test]
    fn missing_capabilities_are_named_one_by_one() {
        let machine = Machine { capabilities: 1 << 39, ..Machine::default() };
        let lack = machine.why_bpf(&error(libc::EPERM), &[39, 12]);
        assert_eq!(lack.cause, "missing CAP_NET_ADMIN");
        assert!(lack.remedy.contains("setcap"));
    }

    #[test]
    fn a_remedy_fits_its_errno() {
        let machine = Machine { capabilities: u64::MAX, ..Machine::default() };
        for (errno, remedy) in [(libc::EMFILE, "ulimit -n"), (libc::ENFILE, "fs.file-max"), (libc::ENOMEM, "ulimit -l")]
        {
            for lack in [machine.why_bpf(&error(errno), &[39]), machine.why_uring(&error(errno))] {
                assert!(lack.remedy.contains(remedy) && lack.errno == Some(errno), "{lack:?}");
            }
        }
    }

    #[test]
    fn the_status_file_is_read_by_whole_field_names() {
        let status = "Seccomp:\t2\nSeccomp_filters:\t1\nCapEff:\t000001ff\n";
        assert_eq!(field(status, "Seccomp:"), Some("2"));
        assert_eq!(field(status, "CapEff:"), Some("000001ff"));
        assert_eq!(field(status, "CapBnd:"), None);
    }
}
