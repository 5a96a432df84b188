//! `nfsstat3` (RFC 1813 section 2.6), and what the errors of the file layer are there.

use ksf_fs::ErrorKind;

/// How a procedure ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// The call was carried out.
    pub const OK: Self = Self(0);
    /// Not the owner.
    pub const PERM: Self = Self(1);
    /// There is no such name.
    pub const NOENT: Self = Self(2);
    /// The medium failed.
    pub const IO: Self = Self(5);
    /// There is no such device.
    pub const NXIO: Self = Self(6);
    /// The caller may not do that.
    pub const ACCES: Self = Self(13);
    /// The name is there.
    pub const EXIST: Self = Self(17);
    /// Between two file systems.
    pub const XDEV: Self = Self(18);
    /// Not a folder.
    pub const NOTDIR: Self = Self(20);
    /// A folder.
    pub const ISDIR: Self = Self(21);
    /// An argument that cannot be.
    pub const INVAL: Self = Self(22);
    /// A file that would be too large.
    pub const FBIG: Self = Self(27);
    /// No room.
    pub const NOSPC: Self = Self(28);
    /// Read-only.
    pub const ROFS: Self = Self(30);
    /// Too many links.
    pub const MLINK: Self = Self(31);
    /// A name that is too long.
    pub const NAMETOOLONG: Self = Self(63);
    /// A folder with entries.
    pub const NOTEMPTY: Self = Self(66);
    /// The quota is used up.
    pub const DQUOT: Self = Self(69);
    /// What the handle named is gone.
    pub const STALE: Self = Self(70);
    /// No handle of this server.
    pub const BADHANDLE: Self = Self(10_001);
    /// The guard of SETATTR did not match.
    pub const NOT_SYNC: Self = Self(10_002);
    /// A cookie that leads nowhere.
    pub const BAD_COOKIE: Self = Self(10_003);
    /// The file system cannot do that.
    pub const NOTSUPP: Self = Self(10_004);
    /// No entry fits in the reply.
    pub const TOOSMALL: Self = Self(10_005);
    /// A type that MKNOD does not make.
    pub const BADTYPE: Self = Self(10_007);
    /// The client should try later.
    pub const JUKEBOX: Self = Self(10_008);
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::NotPermitted => Self::PERM,
            ErrorKind::NotFound => Self::NOENT,
            // No call of NFS is one on an open file.
            ErrorKind::Io | ErrorKind::BadMode => Self::IO,
            ErrorKind::NoDevice => Self::NXIO,
            // A mount is not crossed, and what is in use is left alone: the client can do nothing about either.
            ErrorKind::Access | ErrorKind::MountPoint | ErrorKind::Busy => Self::ACCES,
            ErrorKind::Exists => Self::EXIST,
            ErrorKind::CrossesDevice => Self::XDEV,
            ErrorKind::NotDirectory => Self::NOTDIR,
            ErrorKind::IsDirectory => Self::ISDIR,
            ErrorKind::Invalid | ErrorKind::WrongType | ErrorKind::Symlink => Self::INVAL,
            ErrorKind::TooBig => Self::FBIG,
            ErrorKind::NoSpace => Self::NOSPC,
            ErrorKind::ReadOnly => Self::ROFS,
            ErrorKind::TooManyLinks => Self::MLINK,
            ErrorKind::NameTooLong => Self::NAMETOOLONG,
            ErrorKind::NotEmpty => Self::NOTEMPTY,
            ErrorKind::Quota => Self::DQUOT,
            ErrorKind::Stale => Self::STALE,
            ErrorKind::BadHandle => Self::BADHANDLE,
            ErrorKind::NotSync => Self::NOT_SYNC,
            ErrorKind::BadCookie => Self::BAD_COOKIE,
            ErrorKind::NotSupported => Self::NOTSUPP,
            ErrorKind::TryLater => Self::JUKEBOX,
        }
    }
}

#[cfg(test)]
mod tests {
    use ksf_fs::FsError;
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn each_kind_has_the_status_of_the_rfc() {
        for (kind, status) in [
            (ErrorKind::NotPermitted, 1),
            (ErrorKind::NotFound, 2),
            (ErrorKind::Io, 5),
            (ErrorKind::BadMode, 5),
            (ErrorKind::NoDevice, 6),
            (ErrorKind::Access, 13),
            (ErrorKind::MountPoint, 13),
            (ErrorKind::Busy, 13),
            (ErrorKind::Exists, 17),
            (ErrorKind::CrossesDevice, 18),
            (ErrorKind::NotDirectory, 20),
            (ErrorKind::IsDirectory, 21),
            (ErrorKind::Invalid, 22),
            (ErrorKind::WrongType, 22),
            (ErrorKind::Symlink, 22),
            (ErrorKind::TooBig, 27),
            (ErrorKind::NoSpace, 28),
            (ErrorKind::ReadOnly, 30),
            (ErrorKind::TooManyLinks, 31),
            (ErrorKind::NameTooLong, 63),
            (ErrorKind::NotEmpty, 66),
            (ErrorKind::Quota, 69),
            (ErrorKind::Stale, 70),
            (ErrorKind::BadHandle, 10_001),
            (ErrorKind::NotSync, 10_002),
            (ErrorKind::BadCookie, 10_003),
            (ErrorKind::NotSupported, 10_004),
            (ErrorKind::TryLater, 10_008),
        ] {
            assert_eq!(Status::from(kind), Status(status), "{kind:?}");
        }
    }

    #[test]
    fn each_number_of_the_kernel_has_the_status_of_the_rfc() {
        for (errno, status) in [
            (Errno::PERM, 1),
            (Errno::NOENT, 2),
            (Errno::IO, 5),
            (Errno::NXIO, 6),
            (Errno::NODEV, 6),
            (Errno::ACCESS, 13),
            (Errno::OVERFLOW, 13),
            (Errno::BUSY, 13),
            (Errno::TXTBSY, 13),
            (Errno::EXIST, 17),
            (Errno::XDEV, 18),
            (Errno::NOTDIR, 20),
            (Errno::ISDIR, 21),
            (Errno::INVAL, 22),
            (Errno::LOOP, 22),
            (Errno::FBIG, 27),
            (Errno::NOSPC, 28),
            (Errno::ROFS, 30),
            (Errno::MLINK, 31),
            (Errno::NAMETOOLONG, 63),
            (Errno::NOTEMPTY, 66),
            (Errno::DQUOT, 69),
            (Errno::STALE, 70),
            (Errno::OPNOTSUPP, 10_004),
            (Errno::NFILE, 10_008),
            (Errno::MFILE, 10_008),
            (Errno::NOMEM, 10_008),
            (Errno::AGAIN, 10_008),
            // One that no operation is known to have.
            (Errno::NOTTY, 5),
        ] {
            assert_eq!(Status::from(FsError::from(errno).kind()), Status(status), "{errno:?}");
        }
    }
}
