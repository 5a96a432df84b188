//! When does the program end? When none of its processes is left, whatever they became.
//!
//! Three things are watched: the process that was started (a pidfd), the processes that said Hello (pidfds, because
//! `exec()` of a program without the library keeps the process), and the children of those, which may never say
//! anything. For the last, every Hello is answered with a descriptor of a memfd that holds a shared `flock()`. The
//! library maps it and closes the descriptor. A lock belongs to the open file description, a mapping keeps that alive,
//! and `fork()` inherits the mapping; so the lock ends when the last of them has ended or called `exec()`.
//!
//! The memfd begins with a secret by which the holder knows a child again, whatever its user: only `fork()` of an admitted
//! process brings the mapping, and `exec()` takes it away.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};

use crate::sys;

/// Between two looks at the lock, once no known process lives. A lock that is given back wakes nobody.
const LOOK: Duration = Duration::from_millis(250);

pub(super) struct Lifetime {
    file: OwnedFd,
    /// The memfd's first bytes.
    secret: [u8; 16],
    start: Option<OwnedFd>,
    start_ended: bool,
    /// pidfds of processes that said Hello and live.
    processes: HashMap<u32, OwnedFd>,
    /// Looks in a row that found nobody. A child between `fork()` and its own Hello is in no list if it has called
    /// `exec()`; it has until the second look.
    looks: u32,
    next: Option<Instant>,
}

impl Lifetime {
    pub(super) fn new(start: Option<OwnedFd>) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("ksf_lifetime", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, rustix::param::page_size() as u64)?;
        let secret = sys::random()?;
        rustix::io::pwrite(&file, &secret, 0)?;
        // No process of the program changes it, or cuts it short under another's feet.
        rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, secret, start, start_ended: false, processes: HashMap::new(), looks: 0, next: None })
    }

    pub(super) fn start(&self) -> Option<BorrowedFd<'_>> {
        self.start.as_ref().map(AsFd::as_fd)
    }

    /// See [`Lifetime::secret`].
    pub(super) fn secret(&self) -> &[u8; 16] {
        &self.secret
    }

    /// True for the process that was started, until it ends.
    pub(super) fn is_start(&self, pid: u32) -> bool {
        self.start().is_some_and(|start| sys::pid_of(start) == Some(pid))
    }

    /// A descriptor with a lock of its own, for a process to map and close.
    pub(super) fn lock(&mut self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared)?;
        Ok(file)
    }

    pub(super) fn knows(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }

    /// The process with this id has ended, though that has not been handled yet.
    pub(super) fn has_ended(&self, pid: u32) -> bool {
        self.processes.get(&pid).is_some_and(|pidfd| sys::has_ended(pidfd.as_fd()))
    }

    pub(super) fn add(&mut self, pid: u32, pidfd: OwnedFd) {
        self.processes.insert(pid, pidfd);
        self.next = None;
    }

    pub(super) fn processes(&self) -> Vec<u32> {
        let mut processes: Vec<u32> = self.processes.keys().copied().collect();
        processes.sort_unstable();
        processes
    }

    /// 0 is the process that was started.
    pub(super) fn ended(&mut self, pid: u32) -> Option<OwnedFd> {
        let ended = if pid == 0 {
            self.start_ended = true;
            self.start.take()
        } else {
            self.processes.remove(&pid)
        };
        if self.is_unwatched() {
            (self.looks, self.next) = (0, Some(Instant::now()));
        }
        ended
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// True: nobody is left.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        if self.next.is_none_or(|next| next > now) {
            return false;
        }
        self.looks = if self.is_unlocked() { self.looks + 1 } else { 0 };
        self.next = Some(now + LOOK);
        self.looks > 2
    }

    /// All processes that can be watched have ended.
    fn is_unwatched(&self) -> bool {
        self.start_ended && self.processes.is_empty()
    }

    fn is_unlocked(&self) -> bool {
        if rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return false;
        }
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        true
    }
}
