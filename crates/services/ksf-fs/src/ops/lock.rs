//! Locks on ranges of open files: those of the kernel that belong to the open file (fcntl(2), open file description locks). They
//! conflict with locks of local processes, and end when the file is closed.

use super::open::OpenFile;
use crate::error::{ErrorKind, FsError};
use crate::lane::Lane;
use crate::layer::Fs;
use crate::sys::{self, RawLock};

/// What a lock keeps others from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Writing; others may have the same lock.
    Shared,
    /// Reading and writing.
    Exclusive,
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    /// The first one.
    pub start: u64,
    /// How many; 0: all behind the first one.
    pub length: u64,
}

impl LockRange {
    fn raw(self, kind: i16) -> Result<RawLock, FsError> {
        let number = |number: u64| i64::try_from(number).map_err(|_| ErrorKind::Invalid);
        Ok(RawLock { kind, start: number(self.start)?, length: number(self.length)? })
    }
}

impl LockKind {
    fn raw(self) -> i16 {
        match self {
            Self::Shared => sys::LOCK_SHARED,
            Self::Exclusive => sys::LOCK_EXCLUSIVE,
        }
    }
}

impl Fs {
    /// Takes a lock, changes it to another kind, or gives it back (`None`). False: another open file has one that is in the way.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::BadMode`]: the file is not open for what the lock is for. [`ErrorKind::Invalid`]: there is no such range.
    pub fn lock_open(
        &self,
        lane: &Lane,
        file: &OpenFile,
        kind: Option<LockKind>,
        range: LockRange,
    ) -> Result<bool, FsError> {
        lane.check()?;
        let raw = range.raw(kind.map_or(sys::LOCK_NONE, LockKind::raw))?;
        Ok(sys::try_lock(file.descriptor()?, raw)?)
    }

    /// A lock of another open file that is in the way of this one.
    ///
    /// # Errors
    ///
    /// As [`Fs::lock_open`].
    pub fn find_lock(
        &self,
        lane: &Lane,
        file: &OpenFile,
        kind: LockKind,
        range: LockRange,
    ) -> Result<Option<(LockKind, LockRange)>, FsError> {
        lane.check()?;
        let found = sys::find_lock(file.descriptor()?, range.raw(kind.raw())?)?;
        let kind = match found.kind {
            sys::LOCK_SHARED => LockKind::Shared,
            sys::LOCK_EXCLUSIVE => LockKind::Exclusive,
            _ => return Ok(None),
        };
        Ok(Some((kind, LockRange { start: found.start as u64, length: found.length as u64 })))
    }
}
