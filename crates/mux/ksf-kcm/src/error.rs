//! What can be missing, and what can go wrong.

use std::io;

use ksf::framing::Framing;
use ksf_bpf_framing::{FramingLoadError, VerifyError};

/// Why AF_KCM cannot be used, or a call on it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KcmError {
    /// The kernel knows no such sockets.
    #[error("{0}")]
    Absent(Absence),
    /// A right is missing: a seccomp profile or a security module.
    #[error("not permitted to open an AF_KCM socket ({error})")]
    NotPermitted {
        /// What the kernel answered.
        error: io::Error,
    },
    /// The framing program is not to be had in the kernel: rights, type information, or the verifier.
    #[error("the framing program for AF_KCM is not loaded: {0}")]
    Program(#[from] VerifyError),
    /// The framing program cannot be made.
    #[error("the framing program for AF_KCM cannot be made: {0}")]
    Parameters(#[from] FramingLoadError),
    /// There is no program for this framing.
    #[error("AF_KCM needs messages with an end: {framing:?} has no framing program")]
    NoProgram {
        /// The framing.
        framing: Framing,
    },
    /// The kernel has AF_KCM, but it does not do what it is needed for.
    #[error("AF_KCM does not deliver what was sent: {what}")]
    Broken {
        /// What was seen.
        what: String,
    },
    /// A call failed.
    #[error("{call}: {error}")]
    Os {
        /// The call.
        call: &'static str,
        /// What the kernel answered.
        error: io::Error,
    },
}

/// Why there are no sockets of the family, as looked up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absence {
    /// The running kernel is built without CONFIG_AF_KCM.
    #[error("the kernel {release} is built without AF_KCM (there is no module kcm)")]
    NotBuilt {
        /// Release of the kernel.
        release: String,
    },
    /// There is a module, and the kernel could not load it by itself.
    #[error("the module kcm of the kernel {release} is not loaded")]
    NotLoaded {
        /// Release of the kernel.
        release: String,
    },
    /// The modules of the running kernel are not here to be looked at, as in a container.
    #[error("the kernel {release} has no AF_KCM loaded, and its modules are not here to look for one")]
    Unknown {
        /// Release of the kernel.
        release: String,
    },
}

impl KcmError {
    /// Makes the error of a call from the `errno` of it.
    pub(crate) fn os(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |error| Self::Os { call, error: error.into() }
    }

    /// What gives AF_KCM, in words for the user of the program.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Absent(Absence::NotLoaded { .. }) => "load it: modprobe kcm",
            Self::Absent(Absence::NotBuilt { .. }) => {
                "boot a kernel with CONFIG_AF_KCM (Debian's has it), or use ksf's own multiplexor"
            }
            Self::Absent(Absence::Unknown { .. }) => {
                "modprobe kcm on the host, whose kernel needs CONFIG_AF_KCM (Debian's has it)"
            }
            Self::NotPermitted { .. } => "allow socket(AF_KCM) in the seccomp profile or the security module",
            Self::Program(VerifyError::NotPermitted { .. }) => "run as root, or with CAP_BPF and CAP_PERFMON",
            Self::Program(VerifyError::NoObject) => "compile the framing program to an object file",
            Self::Program(_) => "boot Linux 5.16 or later with BTF (CONFIG_DEBUG_INFO_BTF), and mount /sys",
            Self::NoProgram { .. } | Self::Parameters(_) => "use ksf's own multiplexor",
            Self::Broken { .. } => "use ksf's own multiplexor, and please report this",
            Self::Os { .. } => "see the error",
        }
    }

    /// Whether the cause is a missing right.
    pub fn is_rights(&self) -> bool {
        match self {
            Self::NotPermitted { .. } | Self::Program(VerifyError::NotPermitted { .. }) => true,
            Self::Os { error, .. } => error.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }

    /// The error number of the refused call, where one was refused.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Absent(_) => Some(libc::EAFNOSUPPORT),
            Self::NotPermitted { error } | Self::Os { error, .. } => error.raw_os_error(),
            Self::Program(VerifyError::NotPermitted { .. }) => Some(libc::EPERM),
            Self::NoProgram { .. } => Some(libc::EOPNOTSUPP),
            _ => None,
        }
    }
}

impl Absence {
    /// Looks up why `socket(AF_KCM)` said that there is no such family.
    pub(crate) fn look_up() -> Self {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let modules = format!("/lib/modules/{release}/modules.dep");
        match std::fs::read_to_string(modules) {
            Ok(list) => Self::from_modules(release, &list),
            Err(_) => match config(&release) {
                Some(config) if !config.lines().any(|line| line.starts_with("CONFIG_AF_KCM=")) => {
                    Self::NotBuilt { release }
                }
                _ => Self::Unknown { release },
            },
        }
    }

    /// `list`: modules.dep, a line "PATH: PATH ..." per module.
    fn from_modules(release: String, list: &str) -> Self {
        let is_kcm = |line: &str| {
            let path = line.split(':').next().unwrap_or_default();
            path.rsplit('/').next().is_some_and(|file| file.starts_with("kcm.ko"))
        };
        if list.lines().any(is_kcm) { Self::NotLoaded { release } } else { Self::NotBuilt { release } }
    }
}

/// How the kernel was configured, where a distribution's package says so.
fn config(release: &str) -> Option<String> {
    std::fs::read_to_string(format!("/boot/config-{release}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_is_there_is_not_loaded_and_one_that_is_not_was_not_built() {
        let absence = |list: &str| Absence::from_modules("6.1".into(), list);
        let other = "kernel/net/9p/9pnet.ko:\nkernel/net/x/notkcm.ko: kernel/net/kcm/kcm.ko\n";
        assert_eq!(absence(other), Absence::NotBuilt { release: "6.1".into() });
        for file in ["kernel/net/kcm/kcm.ko:", "kernel/net/kcm/kcm.ko.xz: kernel/lib/x.ko.xz"] {
            assert_eq!(absence(&format!("{other}{file}\n")), Absence::NotLoaded { release: "6.1".into() });
        }
    }

    #[test]
    fn each_error_says_what_gives_it() {
        let absent = KcmError::Absent(Absence::NotLoaded { release: "6.1".into() });
        assert_eq!(absent.to_string(), "the module kcm of the kernel 6.1 is not loaded");
        assert!(absent.remedy().contains("modprobe kcm") && !absent.is_rights());
        let error = || io::Error::from_raw_os_error(libc::EPERM);
        let refused = KcmError::Program(VerifyError::NotPermitted { error: error() });
        assert!(refused.remedy().contains("CAP_PERFMON") && refused.is_rights());
        assert!(KcmError::NotPermitted { error: error() }.is_rights());
    }
}
