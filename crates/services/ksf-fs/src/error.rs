//! Errors of operations, in words that each protocol can translate.

use std::fmt;

use rustix::io::Errno;

/// What went wrong, without the words of a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Only the owner, or the superuser, may do this (EPERM).
    NotPermitted,
    /// There is no entry of this name (ENOENT).
    NotFound,
    /// The medium failed (EIO), or the error has no kind of its own.
    Io,
    /// There is no such device (ENXIO, ENODEV).
    NoDevice,
    /// The caller lacks the permission (EACCES), or an idmapped mount has no mapping for a user or group (EOVERFLOW).
    Access,
    /// An entry of this name exists (EEXIST).
    Exists,
    /// Source and target lie on different file systems or exports (EXDEV).
    CrossesDevice,
    /// The name is a mount inside of the export, which the export does not cross.
    MountPoint,
    /// A folder was needed (ENOTDIR).
    NotDirectory,
    /// The object is a folder (EISDIR).
    IsDirectory,
    /// An argument is out of its range, or a name is not one (EINVAL).
    Invalid,
    /// The object has the wrong type: a FIFO, a socket or a device that would be read or written.
    WrongType,
    /// The offset or the length is beyond what a file may have (EFBIG).
    TooBig,
    /// The file system is full (ENOSPC).
    NoSpace,
    /// The file system or the export is read-only (EROFS).
    ReadOnly,
    /// The object has as many links as it may have (EMLINK).
    TooManyLinks,
    /// The name is longer than 255 bytes, or than the file system takes (ENAMETOOLONG).
    NameTooLong,
    /// The folder is not empty (ENOTEMPTY).
    NotEmpty,
    /// The caller's quota is used up (EDQUOT).
    Quota,
    /// The handle was right, and its object is gone (ESTALE).
    Stale,
    /// These bytes were never a handle of this server.
    BadHandle,
    /// The guard of a change did not match.
    NotSync,
    /// The cookie of a listing belongs to another folder, or to nothing.
    BadCookie,
    /// The file system cannot do this (EOPNOTSUPP).
    NotSupported,
    /// The file is not open for this (EBADF).
    BadMode,
    /// Something is short now: descriptors, memory, a lane with its identity (ENFILE, EMFILE, ENOMEM, EAGAIN).
    TryLater,
    /// A symbolic link stands where none may be (ELOOP).
    Symlink,
    /// The object is in use, by a mount for instance (EBUSY, ETXTBSY).
    Busy,
}

/// The error of an operation: its kind, and the number that the kernel gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsError {
    /// What went wrong.
    pub kind: ErrorKind,
    /// The kernel's number; if the layer itself refused, that of the local system call, or 0 if there is none.
    pub errno: i32,
}

impl FsError {
    /// An error that the layer itself found.
    pub const fn new(kind: ErrorKind) -> Self {
        Self { kind, errno: 0 }
    }

    /// An error that the layer itself found, with the number of the local system call.
    pub(crate) const fn of_call(kind: ErrorKind, errno: Errno) -> Self {
        Self { kind, errno: errno.raw_os_error() }
    }

    /// What went wrong.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for FsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errno {
            0 => write!(f, "{:?}", self.kind),
            errno => write!(f, "{:?}: {}", self.kind, Errno::from_raw_os_error(errno)),
        }
    }
}

impl std::error::Error for FsError {}

impl From<ErrorKind> for FsError {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

impl From<Errno> for FsError {
    fn from(errno: Errno) -> Self {
        Self { kind: kind_of(errno), errno: errno.raw_os_error() }
    }
}

impl From<FsError> for Errno {
    fn from(error: FsError) -> Self {
        // The number says more than the kind.
        if error.errno > 0 { Errno::from_raw_os_error(error.errno) } else { error.kind.into() }
    }
}

impl From<ErrorKind> for Errno {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::NotPermitted => Errno::PERM,
            ErrorKind::NotFound => Errno::NOENT,
            ErrorKind::Io => Errno::IO,
            ErrorKind::NoDevice => Errno::NXIO,
            ErrorKind::Access => Errno::ACCESS,
            ErrorKind::Exists => Errno::EXIST,
            // A mount inside of an export is not crossed.
            ErrorKind::CrossesDevice | ErrorKind::MountPoint => Errno::XDEV,
            ErrorKind::NotDirectory => Errno::NOTDIR,
            ErrorKind::IsDirectory => Errno::ISDIR,
            ErrorKind::Invalid | ErrorKind::WrongType | ErrorKind::BadCookie | ErrorKind::NotSync => Errno::INVAL,
            ErrorKind::TooBig => Errno::FBIG,
            ErrorKind::NoSpace => Errno::NOSPC,
            ErrorKind::ReadOnly => Errno::ROFS,
            ErrorKind::TooManyLinks => Errno::MLINK,
            ErrorKind::NameTooLong => Errno::NAMETOOLONG,
            ErrorKind::NotEmpty => Errno::NOTEMPTY,
            ErrorKind::Quota => Errno::DQUOT,
            ErrorKind::Stale | ErrorKind::BadHandle => Errno::STALE,
            ErrorKind::NotSupported => Errno::OPNOTSUPP,
            ErrorKind::BadMode => Errno::BADF,
            ErrorKind::TryLater => Errno::AGAIN,
            ErrorKind::Symlink => Errno::LOOP,
            ErrorKind::Busy => Errno::BUSY,
        }
    }
}

fn kind_of(errno: Errno) -> ErrorKind {
    match errno {
        Errno::PERM => ErrorKind::NotPermitted,
        Errno::NOENT => ErrorKind::NotFound,
        Errno::BADF => ErrorKind::BadMode,
        Errno::NXIO | Errno::NODEV => ErrorKind::NoDevice,
        // Offsets are checked before. Locks alone have ranges that overflow, and 9P reports the kernel's number.
        Errno::ACCESS | Errno::OVERFLOW => ErrorKind::Access,
        Errno::EXIST => ErrorKind::Exists,
        Errno::XDEV => ErrorKind::CrossesDevice,
        Errno::NOTDIR => ErrorKind::NotDirectory,
        Errno::ISDIR => ErrorKind::IsDirectory,
        Errno::INVAL => ErrorKind::Invalid,
        Errno::FBIG => ErrorKind::TooBig,
        Errno::NOSPC => ErrorKind::NoSpace,
        Errno::ROFS => ErrorKind::ReadOnly,
        Errno::MLINK => ErrorKind::TooManyLinks,
        Errno::NAMETOOLONG => ErrorKind::NameTooLong,
        Errno::NOTEMPTY => ErrorKind::NotEmpty,
        Errno::DQUOT => ErrorKind::Quota,
        Errno::STALE => ErrorKind::Stale,
        Errno::OPNOTSUPP | Errno::NOSYS => ErrorKind::NotSupported,
        Errno::NFILE | Errno::MFILE | Errno::NOMEM | Errno::AGAIN => ErrorKind::TryLater,
        Errno::LOOP => ErrorKind::Symlink,
        Errno::BUSY | Errno::TXTBSY => ErrorKind::Busy,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_have_their_kinds() {
        let table = [
            (libc::EPERM, ErrorKind::NotPermitted),
            (libc::ENOENT, ErrorKind::NotFound),
            (libc::EIO, ErrorKind::Io),
            (libc::ENXIO, ErrorKind::NoDevice),
            (libc::EBADF, ErrorKind::BadMode),
            (libc::EACCES, ErrorKind::Access),
            (libc::EOVERFLOW, ErrorKind::Access),
            (libc::EEXIST, ErrorKind::Exists),
            (libc::EXDEV, ErrorKind::CrossesDevice),
            (libc::ENODEV, ErrorKind::NoDevice),
            (libc::ENOTDIR, ErrorKind::NotDirectory),
            (libc::EISDIR, ErrorKind::IsDirectory),
            (libc::EINVAL, ErrorKind::Invalid),
            (libc::EFBIG, ErrorKind::TooBig),
            (libc::ENOSPC, ErrorKind::NoSpace),
            (libc::EROFS, ErrorKind::ReadOnly),
            (libc::EMLINK, ErrorKind::TooManyLinks),
            (libc::ENAMETOOLONG, ErrorKind::NameTooLong),
            (libc::ENOTEMPTY, ErrorKind::NotEmpty),
            (libc::EDQUOT, ErrorKind::Quota),
            (libc::ESTALE, ErrorKind::Stale),
            (libc::EOPNOTSUPP, ErrorKind::NotSupported),
            (libc::EMFILE, ErrorKind::TryLater),
            (libc::ENFILE, ErrorKind::TryLater),
            (libc::EAGAIN, ErrorKind::TryLater),
            (libc::ENOMEM, ErrorKind::TryLater),
            (libc::ELOOP, ErrorKind::Symlink),
            (libc::EBUSY, ErrorKind::Busy),
            (libc::ETXTBSY, ErrorKind::Busy),
            (libc::EPROTO, ErrorKind::Io),
        ];
        for (errno, kind) in table {
            let error = FsError::from(Errno::from_raw_os_error(errno));
            assert_eq!((error.kind(), error.errno), (kind, errno));
        }
    }
}
