//! Locks on ranges of open files: those of the kernel that belong to the open file (fcntl(2), open file description locks). They
//! conflict with locks of local processes, and end when the file is closed.
//!
//! The kernel keeps a file's locked ranges in a list without a bound, and each lock, unlock and close walks it. So the ranges are
//! counted here, as the kernel splits and joins them, and bounded.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use super::open::OpenFile;
use crate::error::{ErrorKind, FsError};
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::Fs;
use crate::sys::{self, RawLock};

/// Ranges that are locked through one open file, at most.
pub const LOCKS_OF_OPEN_MAX: usize = 1024;
/// Ranges of one file that clients have locked, at most. Connections have shares of them.
pub const LOCKS_OF_FILE_MAX: usize = 8192;
/// Ranges of all files that clients have locked, at most. Connections have shares of them.
pub const LOCKS_MAX: usize = 65_536;

/// Ranges of each of these bounds that a connection may have while any is free.
const RESERVED: usize = 8;

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

    /// Its first and its last byte. The kernel refuses a range that goes beyond the last offset.
    fn bytes(self) -> (u64, u64) {
        let last = if self.length == 0 { u64::MAX } else { self.start.saturating_add(self.length - 1) };
        (self.start, last.min(i64::MAX as u64))
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

/// Bytes with a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Locked {
    first: u64,
    last: u64,
    kind: LockKind,
}

/// The ranges that are locked through one open file, in their order. As in the kernel none overlap, and those of one kind do not touch.
#[derive(Debug, Default)]
pub(crate) struct LockedRanges(Vec<Locked>);

impl LockedRanges {
    /// Memory that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Locked>()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The ranges that go when `first..=last` gets a lock, or loses it (`None`), and those that come in their place.
    fn change(&self, (first, last): (u64, u64), kind: Option<LockKind>) -> (Range<usize>, [Option<Locked>; 3]) {
        let mut from = self.0.partition_point(|range| range.last < first);
        let mut to = self.0.partition_point(|range| range.first <= last);
        let is_same = |range: &Locked| Some(range.kind) == kind;
        // Those that touch it become one with it.
        if from > 0 && is_same(&self.0[from - 1]) && self.0[from - 1].last + 1 == first {
            from -= 1;
        }
        if self.0.get(to).is_some_and(|range| is_same(range) && range.first == last + 1) {
            to += 1;
        }
        let gone = &self.0[from..to];
        let mut locked = kind.map(|kind| Locked { first, last, kind });
        let mut left = gone.first().filter(|range| range.first < first).copied();
        let mut right = gone.last().filter(|range| range.last > last).copied();
        if let (Some(joined), Some(range)) = (&mut locked, left.take_if(|range| is_same(range))) {
            joined.first = range.first;
        }
        if let (Some(joined), Some(range)) = (&mut locked, right.take_if(|range| is_same(range))) {
            joined.last = range.last;
        }
        let left = left.map(|range| Locked { last: first - 1, ..range });
        let right = right.map(|range| Locked { first: last + 1, ..range });
        (from..to, [left, locked, right])
    }

    fn apply(&mut self, (gone, new): (Range<usize>, [Option<Locked>; 3])) {
        self.0.splice(gone, new.into_iter().flatten());
        if self.0.len() < self.0.capacity() / 4 {
            self.0.shrink_to_fit();
        }
    }
}

/// Counts the locked ranges of all clients.
#[derive(Debug, Default)]
pub(crate) struct LockCounts(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: Count,
    by_file: HashMap<Handle, Count>,
}

/// Ranges that connections have.
#[derive(Debug, Default)]
struct Count {
    total: usize,
    /// By the number of the connection's account. None is 0.
    own: HashMap<u64, usize>,
}

impl Count {
    /// True if a connection may have `more` ranges. Beyond [`RESERVED`] it gets one more while it has fewer than are free of the first
    /// half of all: a few connections leave the second half to others.
    fn is_free(&self, account: u64, more: usize, max: usize) -> bool {
        let own = self.own.get(&account).copied().unwrap_or_default();
        // Before the last of them.
        let (own, total) = (own + more - 1, self.total + more - 1);
        total < max && (own < RESERVED || own + total < max / 2)
    }

    fn change(&mut self, account: u64, before: usize, after: usize) {
        self.total = self.total - before + after;
        let own = self.own.entry(account).or_default();
        *own = *own - before + after;
        if *own == 0 {
            self.own.remove(&account);
        }
    }
}

impl LockCounts {
    /// Changes the ranges of a file that a connection has, by the number of its account, from one number to another. False: they would
    /// be too many.
    pub(crate) fn change(&self, file: &Handle, account: u64, before: usize, after: usize) -> bool {
        if before == after {
            return true;
        }
        let Counts { all, by_file } = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if after > before {
            let more = after - before;
            let of_file = by_file.get(file);
            if !all.is_free(account, more, LOCKS_MAX)
                || of_file.is_some_and(|of_file| !of_file.is_free(account, more, LOCKS_OF_FILE_MAX))
            {
                return false;
            }
        }
        all.change(account, before, after);
        let of_file = by_file.entry(file.clone()).or_default();
        of_file.change(account, before, after);
        if of_file.total == 0 {
            by_file.remove(file);
        }
        true
    }
}

impl Fs {
    /// Takes a lock, changes it to another kind, or gives it back (`None`). False: another open file has one that is in the way.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::BadMode`]: the file is not open for what the lock is for. [`ErrorKind::Invalid`]: there is no such range. ENOLCK:
    /// there would be more locked ranges than [`LOCKS_OF_OPEN_MAX`], or than the connection's share of [`LOCKS_OF_FILE_MAX`] or
    /// [`LOCKS_MAX`].
    pub fn lock_open(
        &self,
        lane: &Lane,
        file: &OpenFile,
        kind: Option<LockKind>,
        range: LockRange,
    ) -> Result<bool, FsError> {
        lane.check()?;
        let raw = range.raw(kind.map_or(sys::LOCK_NONE, LockKind::raw))?;
        let (descriptor, mut ranges, locks) = file.locks()?;
        let change = ranges.change(range.bytes(), kind);
        let (before, gone, new) = (ranges.len(), change.0.len(), change.1.iter().flatten().count());
        let after = before - gone + new;
        // Counted before the kernel has more of them, and after it has fewer.
        let most = before.max(after);
        if most > before && (most > LOCKS_OF_OPEN_MAX || !locks.count(before, most)) {
            return Err(Errno::NOLCK.into());
        }
        let result = sys::try_lock(descriptor, raw);
        let is_done = matches!(result, Ok(true));
        locks.count(most, if is_done { after } else { before });
        if is_done {
            ranges.apply(change);
        }
        Ok(result?)
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use proptest::prelude::*;

    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    const KINDS: [Option<LockKind>; 3] = [None, Some(LockKind::Shared), Some(LockKind::Exclusive)];

    /// The locks of this process's open file, as the kernel lists them in /proc.
    fn in_kernel(file: &File) -> Vec<Locked> {
        use std::os::fd::AsRawFd;
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
        // "lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:2f:12 0 EOF"
        let locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
        let mut locks: Vec<Locked> = locks
            .map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                let kind = if words[3] == "READ" { LockKind::Shared } else { LockKind::Exclusive };
                let last = words[7].parse().unwrap_or(i64::MAX as u64);
                Locked { first: words[6].parse().unwrap(), last, kind }
            })
            .collect();
        locks.sort_by_key(|lock| lock.first);
        locks
    }

    proptest! {
        #[test]
        fn ranges_are_those_of_the_kernel(
            steps in proptest::collection::vec((0_usize..3, 0_u64..30, 0_u64..8, any::<bool>()), 0..60),
        ) {
            let file = tempfile::tempfile().unwrap();
            let mut ranges = LockedRanges::default();
            for (kind, start, length, is_at_end) in steps {
                // As far from the last offset as from the first.
                let start = if is_at_end { i64::MAX as u64 - start } else { start };
                let (kind, range) = (KINDS[kind], LockRange { start, length });
                let raw = range.raw(kind.map_or(sys::LOCK_NONE, LockKind::raw)).unwrap();
                match sys::try_lock(&file, raw) {
                    Ok(is_granted) => {
                        prop_assert!(is_granted);
                        let change = ranges.change(range.bytes(), kind);
                        ranges.apply(change);
                    }
                    Err(errno) => prop_assert_eq!(errno, Errno::OVERFLOW),
                }
                prop_assert_eq!(&ranges.0, &in_kernel(&file));
                prop_assert!(ranges.0.capacity() / 4 <= ranges.len(), "{}", ranges.0.capacity());
            }
        }
    }

    fn file(number: u8) -> Handle {
        Handle::new(1, &Key([3; 16]), &KernelHandle::new(1, &[number; 8]).unwrap()).unwrap()
    }

    /// Locks as many ranges of a file as the connection gets.
    fn take_all(counts: &LockCounts, file: &Handle, account: u64) -> usize {
        (0..).take_while(|count| counts.change(file, account, *count, count + 1)).count()
    }

    #[test]
    fn connections_that_lock_all_they_can_leave_ranges_of_a_file_to_others() {
        let counts = LockCounts::default();
        let taken: Vec<usize> = (0..600).map(|account| take_all(&counts, &file(0), account)).collect();
        // Each gets half of what is free of the first half, and eight of the rest.
        assert_eq!(taken[..6], [2048, 1024, 512, 256, 128, 64]);
        assert!(taken[..500].iter().all(|count| *count >= 8));
        assert_eq!(taken.iter().sum::<usize>(), LOCKS_OF_FILE_MAX);
        assert_eq!(taken[599], 0);
        // No range more for the one that has just got the last one.
        assert!(counts.change(&file(0), 0, 2048, 2047) && counts.change(&file(0), 599, 0, 1));
        assert!(!counts.change(&file(0), 599, 1, 2) && counts.change(&file(1), 599, 0, 1));
    }

    #[test]
    fn connections_that_lock_all_they_can_leave_ranges_of_all_files_to_others() {
        let counts = LockCounts::default();
        let of_files = |account| (0..40).map(|number| take_all(&counts, &file(number), account)).collect::<Vec<_>>();
        let taken: Vec<Vec<usize>> = (0..6000).map(of_files).collect();
        let sums: Vec<usize> = taken.iter().map(|of_files| of_files.iter().sum()).collect();
        assert_eq!(sums[..5], [16_384, 8192, 4096, 2048, 1024]);
        assert!(sums[..4000].iter().all(|sum| *sum >= 8));
        assert_eq!((sums.iter().sum(), sums[5999]), (LOCKS_MAX, 0));
        // What is given back is free.
        for (account, of_files) in (0..).zip(&taken) {
            for (number, count) in (0..).zip(of_files) {
                assert!(counts.change(&file(number), account, *count, 0));
            }
        }
        assert_eq!(take_all(&counts, &file(0), 6000), 2048);
        assert!(counts.change(&file(0), 6000, 2048, 0));
        let counts = counts.0.lock().unwrap();
        assert!(counts.by_file.is_empty() && counts.all.own.is_empty() && counts.all.total == 0);
    }
}
