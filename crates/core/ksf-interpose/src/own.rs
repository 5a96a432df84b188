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
/// questions, any more. So the file is known, too, by its device and inode. Sockets and pipes have an inode each; eventfds
/// and epoll instances share one.
#[derive(Debug)]
pub struct OwnDescriptors<const N: usize> {
    /// As [`file_of`] returns them. 0: not the library's.
    files: [AtomicU64; N],
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
        Self { files: [const { AtomicU64::new(0) }; N], not_start: AtomicU32::new(0), end: AtomicU32::new(0) }
    }

    /// Takes a descriptor as the library's own: returns its duplicate under a high number and closes `fd`, or returns `fd`
    /// itself if no high number is free.
    ///
    /// # Errors
    ///
    /// EBADF: the program has closed the number. EMFILE: no number below `N` is free.
    pub fn keep(&self, fd: OwnedFd) -> Result<OwnedFd, Errno> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let first = if limit >= FIRST + 256 { FIRST } else { limit - limit / 4 };
        // Before the number can be seen.
        self.not_start.fetch_max(!(first as u32), Ordering::Release);
        loop {
            let Some(file) = file_of(fd.as_raw_fd()) else {
                // Another thread of the program may open a file under this number at any time.
                let _ = fd.into_raw_fd();
                return Err(Errno::BADF);
            };
            let high = match rustix::io::fcntl_dupfd_cloexec(&fd, first as c_int) {
                Ok(high) if (high.as_raw_fd() as usize) < N => high,
                result => {
                    if let Ok(high) = result {
                        close_if(high, file);
                    }
                    let number = fd.as_raw_fd();
                    self.not_start.fetch_max(!(number as u32), Ordering::Release);
                    if self.note(number, file) {
                        return Ok(fd);
                    }
                    close_if(fd, file);
                    return Err(Errno::MFILE);
                }
            };
            if self.note(high.as_raw_fd(), file) {
                close_if(fd, file);
                return Ok(high);
            }
            // A thread of the program has closed the number before it was noted, and may have opened a file under it.
            let _ = high.into_raw_fd();
        }
    }

    /// False: the number is `N` or more, or stands for another file.
    fn note(&self, number: c_int, file: u64) -> bool {
        let Some(place) = self.files.get(number as usize) else { return false };
        self.end.fetch_max(number as u32 + 1, Ordering::Release);
        place.store(file, Ordering::Release);
        let is_intact = file_of(number) == Some(file);
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
        self.files.get(fd as usize).is_some_and(|file| file.load(Ordering::Acquire) != 0)
    }

    /// True if the number is still what [`Self::keep`] made it.
    pub fn is_intact(&self, fd: c_int) -> bool {
        self.has(fd) && file_of(fd) == Some(self.files[fd as usize].load(Ordering::Relaxed))
    }

    /// The library is about to close the number, or has lost it.
    pub fn forget(&self, fd: c_int) {
        if let Some(file) = self.files.get(fd as usize) {
            file.store(0, Ordering::Release);
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

/// Device and inode of an open file, as one number: those of a socket or a pipe have 32 bits each.
fn file_of(fd: c_int) -> Option<u64> {
    // SAFETY: used for one system call; where the number means nothing any more, the kernel says so.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.max(0)) };
    rustix::fs::fstat(fd).ok().map(|stat| stat.st_dev.rotate_left(32) ^ stat.st_ino)
}

/// Closes a number if it stands for this file. If not, the program has closed it, and opened another under it.
fn close_if(fd: OwnedFd, file: u64) {
    let number = fd.into_raw_fd();
    if file_of(number) == Some(file) {
        // SAFETY: it is the library's, which does not use it after this. Not by close(2), which a library may define: its
        // caller may hold a lock.
        unsafe { rustix::io::close(number) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, FromRawFd as _};

    use super::*;

    #[test]
    fn own_descriptors_are_high_known_and_closed_around() {
        static OWN: OwnDescriptors<{ 1 << 16 }> = OwnDescriptors::new();
        let opened = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(OWN.start(), u32::MAX);
        let copy = || opened.as_fd().try_clone_to_owned().unwrap();
        let low = copy().as_raw_fd();
        let [a, b] = [(); 2].map(|()| OWN.keep(copy()).unwrap());
        assert_eq!(copy().as_raw_fd(), low, "the low numbers are free again");
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
        let number = opened.as_raw_fd();
        assert_eq!(OWN.keep(opened.into()).unwrap_err(), Errno::MFILE);
        assert_eq!(file_of(number), None);
        // Without a high number below the bound, a low one is noted itself.
        // SAFETY: the number is open, and stays so.
        let stdout = OWN.keep(unsafe { OwnedFd::from_raw_fd(1) }).unwrap().into_raw_fd();
        assert!(stdout == 1 && OWN.start() == 1 && OWN.is_intact(1) && !OWN.has(2));
        // SAFETY: the number is not open, which is what is tested: it is not closed.
        let closed = unsafe { OwnedFd::from_raw_fd(c_int::MAX) };
        assert_eq!(OWN.keep(closed).unwrap_err(), Errno::BADF);
    }

    /// Another thread of the program may close a number while the library moves the descriptor away.
    #[test]
    fn a_number_of_another_file_is_not_closed() {
        let (ours, theirs) = std::io::pipe().unwrap();
        let file = file_of(ours.as_raw_fd()).unwrap();
        // SAFETY: the number is open, and becomes another file by this.
        let number = unsafe { libc::dup2(std::fs::File::open("/dev/null").unwrap().as_raw_fd(), ours.as_raw_fd()) };
        close_if(ours.into(), file);
        assert!(file_of(number).is_some());
        let number = theirs.as_raw_fd();
        close_if(theirs.into(), file);
        assert_eq!(file_of(number), None);
    }
}
