//! What can go wrong when programs are loaded, sorted by whose fault it is.

use std::fmt;
use std::io;
use std::path::PathBuf;

use ksf_bpf::{Denial, is_denial};

/// Why a kernel half could not be set up.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The process may not do this; the cause was looked up, not guessed.
    #[error("not permitted to {action}: {cause}. {remedy}")]
    NotPermitted {
        /// What was tried.
        action: &'static str,
        /// The missing capability or the setting that forbids it.
        cause: String,
        /// What to do about it.
        remedy: String,
    },
    /// The running kernel lacks something.
    #[error("this kernel lacks {feature}: {detail}")]
    Unsupported {
        /// What is missing.
        feature: &'static str,
        /// How that was noticed, and what would have it.
        detail: String,
    },
    /// The verifier refused a program.
    #[error("the kernel's verifier refused program {program}:\n{summary}\n(the full log has {} lines)", .log.lines().count())]
    Verifier {
        /// The program's name in the object.
        program: String,
        /// The last useful lines.
        summary: String,
        /// Everything the verifier said.
        log: String,
    },
    /// The object is not one of ours, or of another version.
    #[error("{object}: {problem}")]
    BadObject {
        /// The object's path or name.
        object: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The object cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Unreadable {
        /// The object's path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Another XDP program is attached to the interface.
    #[error(
        "interface {interface} already runs the XDP program {program}: detach it (`ip link set {interface} xdp off`), or serve UDP from user space"
    )]
    XdpBusy {
        /// The interface's name.
        interface: String,
        /// Name and id of the other program, as far as they can be told.
        program: String,
    },
    /// There is no such interface.
    #[error("no interface {interface}")]
    NoInterface {
        /// The name that was asked for.
        interface: String,
    },
    /// A setting makes no sense.
    #[error("{option}: {problem}")]
    BadOption {
        /// Which one.
        option: &'static str,
        /// Why, and what is allowed.
        problem: String,
    },
    /// The kernel behaved unlike the programs expect.
    #[error("the kernel half failed its self-test: {test}: {problem}. Use the uring engine")]
    SelfTest {
        /// Which part.
        test: &'static str,
        /// What happened.
        problem: String,
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

/// As it is displayed: a verifier's log runs to thousands of lines, and `unwrap` would print them all.
impl fmt::Debug for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl KernelError {
    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        if is_denial(&error) { Self::not_permitted(action) } else { Self::System { action, error } }
    }

    pub(crate) fn not_permitted(action: &'static str) -> Self {
        let Denial { cause, remedy } = Denial::look();
        Self::NotPermitted { action, cause, remedy }
    }
}
