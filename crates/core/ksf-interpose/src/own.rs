//! Descriptors that a library keeps in a program that knows nothing of them.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// The numbers of a library's own descriptors. All of them are below `N`.
///
/// They are high, out of the way of a program that counts on the lowest free number, and closed by `exec`. The program may
/// close one by a bare system call, or libc may, and then the number is the program's: it must not be closed, or asked
/// questions, any more. So the inode is known, too. Sockets have one each; eventfds and epoll instances share one.
#[derive(Debug)]
pub struct OwnDescriptors<const N: usize> {
    /// 0: not the library's.
    inodes: [AtomicU64; N],
    /// None of them is below the complement of this. All zeros, a static takes no room in the file and no memory.
    not_start: AtomicU32,
    /// All of them are below.
    end: AtomicU32,
}

/// From this number on, where the limit allows.
const FIRST: u64 = 4096;

impl<const N: usize> OwnDescriptors<N> {
    /// None.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self { inodes: [const { AtomicU64::new(0) }; N], not_start: AtomicU32::new(0), end: AtomicU32::new(0) }
    }

    /// Takes a descriptor as the library's own: a duplicate under a high number, which is the caller's to keep in its place.
    /// `None`: none is free, and the number itself is noted.
    ///
    /// # Errors
    ///
    /// EBADF: the program has closed the number. EMFILE: no number below `N` is free.
    pub fn keep(&self, fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let first = if limit >= FIRST + 256 { FIRST } else { limit - limit / 4 };
        // Before the number can be seen.
        self.not_start.fetch_max(!(first as u32), Ordering::Release);
        loop {
            let inode = inode_of(fd.as_raw_fd()).ok_or(Errno::BADF)?;
            let high = match rustix::io::fcntl_dupfd_cloexec(fd, first as c_int) {
                Ok(high) if (high.as_raw_fd() as usize) < N => high,
                result => {
                    // SAFETY: it was just opened. Not by close(2), which a library may define: its caller may hold a lock.
                    let _ = result.map(|high| unsafe { rustix::io::close(high.into_raw_fd()) });
                    let number = fd.as_raw_fd();
                    self.not_start.fetch_max(!(number as u32), Ordering::Release);
                    return if self.note(number, inode) { Ok(None) } else { Err(Errno::MFILE) };
                }
            };
            if self.note(high.as_raw_fd(), inode) {
                return Ok(Some(high));
            }
            // A thread of the program has closed the number before it was noted, and it may be the program's by now.
            let _ = high.into_raw_fd();
        }
    }

    /// False: the number is `N` or more, or stands for another inode.
    fn note(&self, number: c_int, inode: u64) -> bool {
        let Some(place) = self.inodes.get(number as usize) else { return false };
        self.end.fetch_max(number as u32 + 1, Ordering::Release);
        place.store(inode, Ordering::Release);
        let is_intact = inode_of(number) == Some(inode);
        if !is_intact {
            self.forget(number);
        }
        is_intact
    }

    /// None of them is below. `u32::MAX`: there never was one.
    #[inline]
    pub fn start(&self) -> u32 {
        !self.not_start.load(Ordering::Acquire)
    }

    /// True of a number that [`Self::keep`] has noted: a load and a compare.
    #[inline]
    pub fn has(&self, fd: c_int) -> bool {
        self.inodes.get(fd as usize).is_some_and(|inode| inode.load(Ordering::Acquire) != 0)
    }

    /// True if the number is still what [`Self::keep`] made it.
    pub fn is_intact(&self, fd: c_int) -> bool {
        self.has(fd) && inode_of(fd) == Some(self.inodes[fd as usize].load(Ordering::Relaxed))
    }

    /// The library is about to close the number, or has lost it.
    pub fn forget(&self, fd: c_int) {
        if let Some(inode) = self.inodes.get(fd as usize) {
            inode.store(0, Ordering::Release);
        }
    }

    /// The library's own from `first` to `last`, both included.
    pub fn within(&self, first: u32, last: u32) -> impl Iterator<Item = c_int> {
        let end = last.saturating_add(1).min(self.end.load(Ordering::Relaxed));
        (first.max(self.start())..end).map(|fd| fd as c_int).filter(|fd| self.has(*fd))
    }

    /// Calls `close` for each range of numbers from `first` to `last` between the library's own, until one call fails: not
    /// 0, which is returned.
    pub fn close_around(&self, first: u32, last: u32, mut close: impl FnMut(u32, u32) -> c_int) -> c_int {
        let mut from = first;
        for fd in self.within(first, last).filter(|fd| self.is_intact(*fd)) {
            let fd = fd as u32;
            if fd > from {
                let result = close(from, fd - 1);
                if result != 0 {
                    return result;
                }
            }
            from = fd + 1;
        }
        if from > last { 0 } else { close(from, last) }
    }
}

fn inode_of(fd: c_int) -> Option<u64> {
    // SAFETY: used for one system call; where the number means nothing any more, the kernel says so.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.max(0)) };
    rustix::fs::fstat(fd).ok().map(|stat| stat.st_ino)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn own_descriptors_are_high_known_and_closed_around() {
        static OWN: OwnDescriptors<{ 1 << 16 }> = OwnDescriptors::new();
        let opened = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(OWN.start(), u32::MAX);
        let [a, b] = [(); 2].map(|()| OWN.keep(opened.as_fd()).unwrap().unwrap());
        let (a, b) = (a.as_raw_fd().min(b.as_raw_fd()), a.as_raw_fd().max(b.as_raw_fd()));
        assert!(a > 100 && OWN.start() <= a as u32 && OWN.is_intact(a) && OWN.has(b) && !OWN.has(a - 1));
        let ranges = |first: c_int, last| {
            let mut ranges = Vec::new();
            let add = |from, to| {
                ranges.push((from, to));
                0
            };
            assert_eq!(OWN.close_around(first as u32, last, add), 0);
            ranges
        };
        let mut wanted = vec![(3, a as u32 - 1)];
        if b > a + 1 {
            wanted.push((a as u32 + 1, b as u32 - 1));
        }
        wanted.push((b as u32 + 1, u32::MAX));
        assert_eq!(ranges(3, u32::MAX), wanted);
        assert_eq!(ranges(a, a as u32), []);
        assert_eq!(OWN.close_around(3, u32::MAX, |_, _| -1), -1);
        // SAFETY: the number is open, and becomes another file by this.
        assert_eq!(unsafe { libc::dup2(0, a) }, a);
        assert!(OWN.has(a) && !OWN.is_intact(a) && OWN.is_intact(b));
        assert_eq!(ranges(a, a as u32), [(a as u32, a as u32)]);
        OWN.forget(a);
        assert!(!OWN.has(a));
    }

    #[test]
    fn a_descriptor_that_cannot_be_noted_is_refused() {
        static OWN: OwnDescriptors<2> = OwnDescriptors::new();
        let opened = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(OWN.keep(opened.as_fd()).unwrap_err(), Errno::MFILE);
        // Without a high number below the bound, a low one is noted itself.
        assert!(OWN.keep(std::io::stderr().as_fd()).is_err());
        assert!(OWN.keep(std::io::stdout().as_fd()).unwrap().is_none());
        assert!(OWN.start() == 1 && OWN.is_intact(1) && !OWN.has(2));
        // SAFETY: the number is not open, which is what is tested.
        let closed = unsafe { BorrowedFd::borrow_raw(c_int::MAX) };
        assert_eq!(OWN.keep(closed).unwrap_err(), Errno::BADF);
    }
}
