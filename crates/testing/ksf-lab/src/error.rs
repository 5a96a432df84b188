//! What can go wrong with a machine, and what to do about it.

use std::path::PathBuf;
use std::time::Duration;

use crate::evaluate::RunStatus;

/// Why a machine did not run its program to the end.
///
/// Each message says what happened and what to do. Those with a log carry the end of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program that the laboratory itself needs is not installed.
    #[error(
        "{tool} is not installed; run scripts/setup.sh test, or: apt-get install --no-install-recommends {package}"
    )]
    MissingTool {
        /// The command.
        tool: String,
        /// The Debian package it comes from.
        package: &'static str,
    },

    /// There is no kernel to boot: not in the cache, and not to be had from Debian.
    #[error(
        "no kernel to boot: {reason}; connect to a Debian mirror and run scripts/setup.sh test, or unpack a linux-image \
         package (dpkg-deb -x) and name that directory in KSF_LAB_KERNEL"
    )]
    NoKernel {
        /// What was tried, and how it ended.
        reason: String,
    },

    /// The kernel has no such module, neither as a file nor built in.
    #[error("kernel {version} has no module '{module}'; look for its name in {}", list.display())]
    NoSuchModule {
        /// The module as it was asked for.
        module: String,
        /// The kernel's version.
        version: String,
        /// The file that lists every module.
        list: PathBuf,
    },

    /// A program needs a shared library that this machine does not have.
    #[error("{} needs the shared library {library}, which is not installed here", program.display())]
    MissingLibrary {
        /// The program on the host.
        program: PathBuf,
        /// The library's name.
        library: String,
    },

    /// A C program for the machine does not compile.
    #[error("{} does not compile (a static binary needs libc6-dev):\n{messages}", source_file.display())]
    Compile {
        /// The C file.
        source_file: PathBuf,
        /// What the compiler said.
        messages: String,
    },

    /// Something of the description cannot be put to use, such as a command of several lines.
    #[error("{what}")]
    Description {
        /// What, and why.
        what: String,
    },

    /// A tool failed.
    #[error("'{command}' failed: {messages}")]
    Tool {
        /// The command with its arguments.
        command: String,
        /// How it ended, and what it wrote to standard error.
        messages: String,
    },

    /// QEMU ended before the machine reported anything, most often because it rejected its command line.
    #[error("QEMU ended with {status}: {messages}")]
    Qemu {
        /// QEMU's exit status.
        status: String,
        /// What it wrote to standard error.
        messages: String,
    },

    /// The machine was not able to start the program: a module that does not load, a program that is not executable.
    #[error("the machine could not be set up: {what}\nend of the console:\n{console}")]
    Setup {
        /// What the first process of the machine said.
        what: String,
        /// The end of the kernel's log.
        console: String,
    },

    /// The kernel of the machine panicked. An oops counts: machines are booted with `oops=panic`.
    #[error("the kernel panicked: {what}\nend of the console:\n{console}")]
    Panic {
        /// The kernel's reason.
        what: String,
        /// The end of the kernel's log.
        console: String,
    },

    /// The machine ran longer than it was allowed to and was stopped.
    #[error(
        "stopped after the time limit of {limit:?}, {}; raise it with Lab::{} if that is not a hang\n\
         end of the output:\n{output}\nend of the console:\n{console}",
        if *started { "with the program running" } else { "before the program started" },
        if *started { "time_limit" } else { "boot_limit" }
    )]
    TimedOut {
        /// The limit.
        limit: Duration,
        /// Whether the program had started.
        started: bool,
        /// The end of what the program wrote.
        output: String,
        /// The end of the kernel's log.
        console: String,
    },

    /// The machine went away without saying how the program ended.
    #[error("the machine powered off without a report\nend of the console:\n{console}")]
    NoReport {
        /// The end of the kernel's log.
        console: String,
    },

    /// The program ran and failed; only of [`RunOutcome::checked`](crate::RunOutcome::checked).
    #[error("the program {status}; end of its output:\n{output}")]
    Failed {
        /// How it ended.
        status: RunStatus,
        /// The end of what it wrote.
        output: String,
    },

    /// The host refused something: a file that cannot be read, no memory, no processes.
    #[error("{what}: {source}")]
    Host {
        /// What was done, to what.
        what: String,
        /// The host's reason.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the cause is that this host lacks what a laboratory needs, so that a test may skip.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::MissingTool { .. } | Error::NoKernel { .. })
    }

    /// An adapter for `map_err`: an error of the host while doing `what`.
    pub(crate) fn host<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
        let what = what.into();
        move |error| Error::Host { what, source: error.into() }
    }
}
