//! Why connections are not joined.

use std::io;
use std::path::PathBuf;

use ksf_bpf::{Denial, is_denial};

/// Why the hop is not used. Programs then talk TCP as ever: nothing stays attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HopError {
    /// The process may not do this.
    #[error("not permitted to {action}: {cause}")]
    NotPermitted {
        /// What was tried.
        action: &'static str,
        /// The missing capabilities, or what else forbids it, and what to do.
        cause: String,
    },
    /// The verifier or libbpf refused a program.
    #[error("this kernel refuses the hop's programs: {problem}")]
    Refused {
        /// What was said: for the verifier the last lines of its log.
        problem: String,
    },
    /// The self-test found that joined connections would not be what TCP is.
    #[error("the self-test failed, so nothing is joined: {problem}")]
    SelfTest {
        /// What was not as it should be.
        problem: String,
    },
    /// Nobody would notice a program that reads its sockets by splice().
    #[error(
        "programs that read sockets by splice() cannot be recognised here ({cause}), and would stall or see bytes in the wrong order: nothing is joined. If no program of the scope does that, say so (--no-splice)"
    )]
    NoGuard {
        /// Why the guard could not be attached.
        cause: String,
    },
    /// Neither a cgroup nor a port was named.
    #[error("whose connections? Name a cgroup (--cgroup), the ports of services (--port), or both")]
    NothingChosen,
    /// There is no cgroup2.
    #[error("no cgroup2 is mounted here: mount -t cgroup2 none /sys/fs/cgroup/unified")]
    NoCgroup,
    /// The cgroup cannot be opened, or is none of cgroup2.
    #[error("cannot use {}: {error}", .path.display())]
    Unreadable {
        /// Its folder.
        path: PathBuf,
        /// Why.
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
    /// A system call failed for another reason.
    #[error("{action} failed: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The error.
        error: io::Error,
    },
}

impl HopError {
    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        if is_denial(&error) { Self::not_permitted(action) } else { Self::System { action, error } }
    }

    pub(crate) fn not_permitted(action: &'static str) -> Self {
        Self::NotPermitted { action, cause: Denial::look().to_string() }
    }
}
