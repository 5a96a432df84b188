//! What can go wrong when steering is set up.

use std::io;
use std::path::PathBuf;

use ksf_bpf::{Denial, is_denial};

use super::LayoutError;
use crate::bpf::LoadError;

/// Why steering could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// The process may not do this.
    #[error("not permitted to {action}: {cause}")]
    NotPermitted {
        /// What was tried.
        action: &'static str,
        /// The missing capabilities, or what else forbids it, and what to do.
        cause: String,
    },
    /// The verifier or libbpf refused a program.
    #[error("{object} could not be loaded: {problem}")]
    Refused {
        /// The object's path, or the name of a built-in one.
        object: String,
        /// What was said: for the verifier the last lines of its log.
        problem: String,
    },
    /// The object is not a policy, or one for another version.
    #[error("{object}: {problem}")]
    BadPolicy {
        /// The object's path.
        object: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The object cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Unreadable {
        /// The object's or the cgroup's path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Somebody else's XDP program is on the interface; it stays.
    #[error(
        "interface {interface} already runs the XDP program {program}: it was left alone. Detach it (`ip link set {interface} xdp off`), or steer by RPS"
    )]
    Busy {
        /// The interface's name.
        interface: String,
        /// Name and id of the other program, as far as they can be told.
        program: String,
    },
    /// There is no such interface.
    #[error("no interface {interface} in this network namespace")]
    NoInterface {
        /// The name that was asked for.
        interface: String,
    },
    /// More policies than the chain has places.
    #[error("{count} policies; {max} can stand behind one another")]
    TooManyPolicies {
        /// How many were given.
        count: usize,
        /// How many there can be.
        max: usize,
    },
    /// A CPU of the layout does not exist or is off.
    #[error("CPU {cpu} cannot take frames: {error}. Name the CPUs that are online")]
    BadCpu {
        /// Its number.
        cpu: usize,
        /// What the kernel said.
        error: io::Error,
    },
    /// The cgroup takes no program beside one that is attached.
    #[error(
        "a program that tolerates no other is attached to {} or above: it was left alone. Use another cgroup", .cgroup.display()
    )]
    CgroupBusy {
        /// The cgroup's folder.
        cgroup: PathBuf,
    },
    /// No port layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A system call failed for another reason.
    #[error("{action} failed: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The error.
        error: io::Error,
    },
}

impl FlowError {
    /// `object`: the object's path, or the name of a built-in one.
    pub(crate) fn loading(object: &str, error: &LoadError) -> Self {
        if error.is_denial() {
            return Self::not_permitted("load BPF programs");
        }
        Self::Refused { object: object.to_owned(), problem: error.text() }
    }

    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        if is_denial(&error) { Self::not_permitted(action) } else { Self::System { action, error } }
    }

    pub(crate) fn not_permitted(action: &'static str) -> Self {
        Self::NotPermitted { action, cause: Denial::look().to_string() }
    }
}
