//! Numbers of Rlerror: those of Linux.

use ksf_fs::{ErrorKind, FsError};

/// A number that Rlerror tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) u32);

impl Errno {
    /// A value is too long for an attribute.
    pub(crate) const TOOBIG: Self = Self(libc::E2BIG as u32);
    pub(crate) const ACCES: Self = Self(libc::EACCES as u32);
    pub(crate) const BADF: Self = Self(libc::EBADF as u32);
    pub(crate) const INVAL: Self = Self(libc::EINVAL as u32);
    pub(crate) const IO: Self = Self(libc::EIO as u32);
    pub(crate) const MFILE: Self = Self(libc::EMFILE as u32);
    pub(crate) const MSGSIZE: Self = Self(libc::EMSGSIZE as u32);
    pub(crate) const NOENT: Self = Self(libc::ENOENT as u32);
    pub(crate) const NOMEM: Self = Self(libc::ENOMEM as u32);
    pub(crate) const NOTDIR: Self = Self(libc::ENOTDIR as u32);
    pub(crate) const NOTSUP: Self = Self(libc::EOPNOTSUPP as u32);
    pub(crate) const PROTO: Self = Self(libc::EPROTO as u32);
    pub(crate) const STALE: Self = Self(libc::ESTALE as u32);
}

impl From<FsError> for Errno {
    fn from(error: FsError) -> Self {
        // The kernel's own number, where it has given one for this.
        match u32::try_from(error.errno) {
            Ok(number) if number != 0 => Self(number),
            _ => error.kind().into(),
        }
    }
}

impl From<ErrorKind> for Errno {
    fn from(kind: ErrorKind) -> Self {
        let number = match kind {
            ErrorKind::NotPermitted => libc::EPERM,
            ErrorKind::NotFound => libc::ENOENT,
            ErrorKind::Io => libc::EIO,
            ErrorKind::NoDevice => libc::ENXIO,
            ErrorKind::Access => libc::EACCES,
            ErrorKind::Exists => libc::EEXIST,
            // A mount inside of an export is not crossed.
            ErrorKind::CrossesDevice | ErrorKind::MountPoint => libc::EXDEV,
            ErrorKind::NotDirectory => libc::ENOTDIR,
            ErrorKind::IsDirectory => libc::EISDIR,
            ErrorKind::Invalid | ErrorKind::WrongType | ErrorKind::BadCookie | ErrorKind::NotSync => libc::EINVAL,
            ErrorKind::TooBig => libc::EFBIG,
            ErrorKind::NoSpace => libc::ENOSPC,
            ErrorKind::ReadOnly => libc::EROFS,
            ErrorKind::TooManyLinks => libc::EMLINK,
            ErrorKind::NameTooLong => libc::ENAMETOOLONG,
            ErrorKind::NotEmpty => libc::ENOTEMPTY,
            ErrorKind::Quota => libc::EDQUOT,
            ErrorKind::Stale | ErrorKind::BadHandle => libc::ESTALE,
            ErrorKind::NotSupported => libc::EOPNOTSUPP,
            ErrorKind::BadMode => libc::EBADF,
            ErrorKind::TryLater => libc::EAGAIN,
            ErrorKind::Symlink => libc::ELOOP,
            ErrorKind::Busy => libc::EBUSY,
        };
        Self(number as u32)
    }
}
