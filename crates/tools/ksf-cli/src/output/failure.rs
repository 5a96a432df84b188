//! How a run of `ksf` ends: one line on stderr and one exit status from a fixed table.
//!
//! The numbers are those of BSD's `sysexits.h`, which the original echotest and rpctest used
//! too (64 and 65), so that scripts can tell "you typed it wrong" from "the machine lacks it".

use std::fmt;
use std::io;
use std::process::ExitCode;

use super::{escape, one_line};

/// The exit statuses, in the order of the manual page's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// A flag, argument or subcommand that does not exist or does not fit here.
    Usage = 64,
    /// A number, address or other value that cannot be understood, or wrong replies.
    Data = 65,
    /// A file given by the user cannot be opened.
    NoInput = 66,
    /// What was asked for is not to be had: a busy port, an engine this machine lacks.
    Unavailable = 69,
    /// A defect of ksf itself.
    Internal = 70,
    /// The system refused a call for lack of resources or for a reason of its own.
    Os = 71,
    /// The rights are missing.
    NoPermission = 77,
    /// The configuration file is wrong.
    Config = 78,
}

impl Status {
    /// A file that the user named, or a service should read, cannot be opened.
    pub(crate) fn of_input(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Status::NoPermission,
            _ => Status::NoInput,
        }
    }
}

/// Every status with its meaning, for the manual page.
pub(crate) const EXIT_STATUSES: &[(u8, &str)] = &[
    (0, "Success. For a server: it was asked to stop and has drained. For a load generator: every reply was right."),
    (
        1,
        "load generators: replies were wrong, missing or surplus. accel nic: a setting does not hold (verify), or was \
         left alone because somebody else changed it (rollback).",
    ),
    (64, "Wrong use: an unknown flag or command, a missing or surplus argument."),
    (65, "A number, address or list that cannot be understood."),
    (66, "A file named on the command line cannot be opened."),
    (68, "load generators: the host is unknown."),
    (69, "Not available: the port is busy, the engine cannot run here, no server answers."),
    (70, "A defect in ksf. Please report it."),
    (71, "The system refused a call, for example for lack of descriptors or memory."),
    (73, "load generators: a file cannot be written."),
    (74, "load generators: the results cannot be written."),
    (77, "Missing rights: a capability, the mode of a file, a seccomp profile; the line names it."),
    (78, "The configuration file is wrong; the line names the key and its place."),
];

/// An error that ends the program: what happened, what to do about it, and the status.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    /// What happened, and to what. No trailing full stop.
    pub(crate) what: String,
    /// What the user can do. Empty if `what` already says it.
    pub(crate) remedy: String,
}

impl Failure {
    pub(crate) fn new(status: Status, what: impl Into<String>) -> Self {
        Failure { status, what: what.into(), remedy: String::new() }
    }

    /// Adds what the user can do.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    /// A failed system call that has no more specific explanation.
    pub(crate) fn os(what: impl fmt::Display, error: &io::Error) -> Self {
        let status = match error.kind() {
            io::ErrorKind::PermissionDenied => Status::NoPermission,
            _ => Status::Os,
        };
        Failure::new(status, format!("{what}: {error}"))
    }

    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(self.status as u8)
    }
}

impl fmt::Display for Failure {
    /// One line, whatever the parts contain: a user greps it, a journal stores it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = one_line(&self.what);
        if !self.remedy.is_empty() {
            line.push_str("; ");
            line.push_str(&one_line(&self.remedy));
        }
        f.write_str(&escape(&line))
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::new(Status::Config, "a\n  b").remedy("do\nthis");
        assert_eq!(failure.to_string(), "a b; do this");
        let failure = Failure::new(Status::Config, "a\x1b[2J").remedy("b\u{9b}");
        assert_eq!(failure.to_string(), r"a\x1b[2J; b\x9b");
    }

    #[test]
    fn every_status_is_in_the_table() {
        for status in [
            Status::Usage,
            Status::Data,
            Status::NoInput,
            Status::Unavailable,
            Status::Internal,
            Status::Os,
            Status::NoPermission,
            Status::Config,
        ] {
            assert!(EXIT_STATUSES.iter().any(|(code, _)| *code == status as u8));
        }
    }

    #[test]
    fn a_refused_call_maps_to_its_status() {
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(Failure::os("x", &denied).status, Status::NoPermission);
        let full = io::Error::from_raw_os_error(libc::EMFILE);
        assert_eq!(Failure::os("x", &full).status, Status::Os);
    }
}
