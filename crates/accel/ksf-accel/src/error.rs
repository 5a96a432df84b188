//! What can go wrong before a program is accelerated. Afterwards nothing is an error: the program runs on without.

use std::io;

/// Why a holder could not be started, found or asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccelError {
    /// A system call failed.
    #[error("{action} failed: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The error.
        error: io::Error,
    },
    /// The holder's process ended before it was ready.
    #[error("the holder did not start: {said}. Run the program without ksf accel, and report this")]
    Holder {
        /// What it said last.
        said: String,
    },
    /// A holder answered what this version does not understand.
    #[error("{socket} answers something else than ksf's status ({problem}): is the holder of another version?")]
    Status {
        /// Its socket.
        socket: String,
        /// What is wrong with it.
        problem: String,
    },
    /// What was asked for is not to be had here.
    #[error("{what}: {why}")]
    Unavailable {
        /// What.
        what: &'static str,
        /// Why not.
        why: String,
    },
    /// A setting makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// Which one.
        option: &'static str,
        /// Why, and what is allowed.
        problem: String,
    },
}

impl AccelError {
    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        Self::System { action, error: error.into() }
    }
}
