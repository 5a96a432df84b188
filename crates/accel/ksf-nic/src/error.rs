//! What can go wrong, and what to do about it.

use std::io;
use std::path::PathBuf;

use ksf::cpus::CpuSet;

/// Why nothing, or not everything, could be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The text cannot be the name of an interface.
    #[error("\"{name}\" cannot be the name of an interface")]
    BadName {
        /// What was given.
        name: String,
    },
    /// There is no such interface in this network namespace.
    #[error("there is no interface {iface} in this network namespace")]
    NoInterface {
        /// The interface.
        iface: String,
    },
    /// /sys shows the interfaces of another network namespace than the one of this process.
    #[error(
        "/sys shows another network namespace than the one of this process: {iface} is not the same in both ({seen})"
    )]
    OtherNamespace {
        /// The interface.
        iface: String,
        /// What differs.
        seen: String,
    },
    /// CPUs that were asked for cannot be used.
    #[error("CPUs {cpus} cannot be used: only {usable} are online and in the mask of this process")]
    Cpus {
        /// The CPUs that cannot be used.
        cpus: CpuSet,
        /// The CPUs that can.
        usable: CpuSet,
    },
    /// Traffic of the default route passes the interface, and nobody said that this is meant.
    #[error("{iface} carries the default route{through}")]
    DefaultRoute {
        /// The interface.
        iface: String,
        /// How, where it is not its own: " of bond0, which is above it".
        through: String,
    },
    /// The tree the settings live in cannot be written, as in most containers.
    #[error("{path} is read-only, as in a container; nothing was changed")]
    ReadOnly {
        /// The first file that cannot be written.
        path: String,
    },
    /// The rights to change a setting are missing.
    #[error("not permitted to change {path}; nothing was changed")]
    NotPermitted {
        /// The first file or setting that may not be written.
        path: String,
    },
    /// Nothing is recorded for the interface.
    #[error("nothing is recorded for {iface}: no settings are applied")]
    NothingApplied {
        /// The interface.
        iface: String,
    },
    /// The last apply or rollback did not come to its end.
    #[error("the last {what} on {iface} was interrupted")]
    Interrupted {
        /// The interface.
        iface: String,
        /// "apply" or "rollback".
        what: &'static str,
    },
    /// The record tells of an interface that is not there any more.
    #[error("the record is of another interface that was named {iface} ({detail})")]
    OtherInterface {
        /// The interface.
        iface: String,
        /// What differs.
        detail: String,
    },
    /// Another process works on the records.
    #[error("another ksf works on the records in {}", path.display())]
    Busy {
        /// The folder of the records.
        path: PathBuf,
    },
    /// The record cannot be understood, or is not to be trusted.
    #[error("the record {} cannot be used: {why}", path.display())]
    BadRecord {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The record cannot be read or written.
    #[error("cannot {what} the record {}: {error}", path.display())]
    Record {
        /// "read", "write" or "remove".
        what: &'static str,
        /// The file or its folder.
        path: PathBuf,
        /// What the system answered.
        error: io::Error,
    },
    /// A file of /sys or /proc that always exists cannot be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: String,
        /// What the system answered.
        error: io::Error,
    },
    /// A file has a content that is not understood.
    #[error("{path} says something unexpected: {why}")]
    Content {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The kernel cannot be asked about interfaces.
    #[error("cannot ask the kernel about {iface}: {error}")]
    Interface {
        /// The interface.
        iface: String,
        /// What the system answered.
        error: io::Error,
    },
}

impl NicError {
    /// What the user can do, in words for the line an error is told in. Empty where the error says it all.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::OtherNamespace { .. } => {
                "mount a fresh sysfs in a mount namespace of your own, or use ip netns exec, which does"
            }
            Self::DefaultRoute { .. } => "add --yes if a mistake here may cost the connection to this machine",
            Self::ReadOnly { .. } => "run ksf on the host, or in a container with a writable /sys and /proc/sys",
            Self::NotPermitted { .. } => "run as root, with CAP_NET_ADMIN in the interface's network namespace",
            Self::Interrupted { .. } => "run ksf accel nic rollback first",
            Self::OtherInterface { .. } => {
                "ksf accel nic rollback --force forgets it, and restores only what interfaces share"
            }
            Self::Busy { .. } => "try again when it has ended",
            Self::BadRecord { .. } => "see docs/nic.md, remove the file, and set old values by hand",
            _ => "",
        }
    }

    /// Whether the cause is a missing right.
    pub fn is_rights(&self) -> bool {
        match self {
            Self::ReadOnly { .. } | Self::NotPermitted { .. } => true,
            Self::Record { error, .. } | Self::Read { error, .. } | Self::Interface { error, .. } => {
                matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
            }
            _ => false,
        }
    }
}
