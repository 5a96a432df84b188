//! What can go wrong before or beside the measurement, and the exit status it maps to.
//!
//! A measurement that ran but met wrong or missing replies is no error of this kind: it is a
//! report whose exit status is 1.

use std::io;
use std::path::PathBuf;

use crate::options::numbers::NumberError;

/// Why a load generator could not do its work. The text says what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Options that contradict each other, or a target that cannot be read.
    #[error("{0}")]
    Usage(String),
    /// A number that is none, or is out of range.
    #[error("{option}: {source}")]
    Number {
        /// The option or part of the target.
        option: String,
        /// What is wrong with its value.
        source: NumberError,
    },
    /// The host name has no address.
    #[error("cannot resolve `{host}`: {source}; check the name, or give an address")]
    UnknownHost {
        /// The name as given.
        host: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// No address of the target accepted a connection.
    #[error("cannot connect to {target}: {reasons}; is the server running, and on this port?")]
    Unreachable {
        /// The target as given.
        target: String,
        /// One reason per address that was tried.
        reasons: String,
    },
    /// The run would run out of something before it is measured: ports or descriptors.
    #[error("{0}")]
    Exhausted(String),
    /// The system refused a call that has nothing to do with the target.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A thread of the generator panicked.
    #[error("thread {thread} panicked, so there is no result: a bug of this program, please report it")]
    Panicked {
        /// Its number, from 0.
        thread: usize,
    },
    /// A result file cannot be created.
    #[error("cannot write {}: {source}", path.display())]
    CreateFile {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file named by the user cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file named by the user is not what it should be.
    #[error("{}: {what}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
    /// Writing the results failed (a closed pipe is not an error and never gets here).
    #[error("cannot write the results: {0}")]
    Output(io::Error),
}

impl LoadError {
    /// The exit status of BSD's `sysexits.h` that belongs to this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            LoadError::Usage(_) => 64,
            LoadError::Number { .. } | LoadError::BadFile { .. } => 65,
            LoadError::ReadFile { .. } => 66,
            LoadError::UnknownHost { .. } => 68,
            LoadError::Unreachable { .. } | LoadError::Exhausted(_) => 69,
            LoadError::Panicked { .. } => 70,
            LoadError::System { .. } => 71,
            LoadError::CreateFile { .. } => 73,
            LoadError::Output(_) => 74,
        }
    }

    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        LoadError::System { what: what.into(), source: source.into() }
    }
}

/// The exit status for a command line that clap refused: 0 for help and version, 65 for a value that
/// is no number, 64 for everything else.
pub fn exit_code_of_parse(error: &clap::Error) -> u8 {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
        ErrorKind::ValueValidation => 65,
        _ => 64,
    }
}
