//! This library's own descriptors, of the multiplexors and of its own: the program does not know of them, and must not take
//! them away when it closes or replaces numbers ([`crate::hooks`]). What a call of libc's closes by itself
//! (`fclose`), or a bare system call, is found when the library closes the number.

use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ksf_interpose::OwnDescriptors;
use ksf_interpose::errno::{errno, set_errno};

use crate::kcm::{Answer, borrow};
use crate::ownership;
use crate::signals::{self, Blocked};
use crate::table::lock;

/// The kernel's default for fs.nr_open, above which no number is. Memory that is not used costs nothing.
const FDS_MAX: usize = 1 << 20;

static OWN: OwnDescriptors<FDS_MAX> = OwnDescriptors::new();
/// Calls of [`close_around`] under way: no number becomes the library's meanwhile. No thread holds the lock while it closes a
/// file of the program, which may wait in the kernel. For a thread that holds it, the numbers that are noted are those that are
/// open.
static RANGES: Mutex<usize> = Mutex::new(0);
/// None is under way any more.
static RANGES_CLOSED: Condvar = Condvar::new();

/// False while the library never had one: most programs.
pub(crate) fn is_used() -> bool {
    OWN.start() != u32::MAX
}

/// True if the number may be one of the library's own, now or soon.
pub(crate) fn may_be(fd: c_int) -> bool {
    u32::try_from(fd).is_ok_and(|fd| fd >= OWN.start())
}

/// Takes a descriptor as the library's own, under a high number. Waits for calls of [`close_around`].
pub(crate) fn keep(fd: OwnedFd) -> std::io::Result<OwnedFd> {
    let ranges = RANGES_CLOSED.wait_while(lock(&RANGES), |ranges| *ranges > 0);
    let _ranges = ranges.unwrap_or_else(PoisonError::into_inner);
    Ok(OWN.keep(fd)?)
}

/// As [`keep`], but does not wait for calls of [`close_around`]. None: one is under way, or [`keep`] fails.
pub(crate) fn keep_now(fd: OwnedFd) -> Option<OwnedFd> {
    let ranges = lock(&RANGES);
    if *ranges == 0 { OWN.keep(fd).ok() } else { None }
}

/// Closes one of the library's own, for the library. For the program it is not open (EBADF). None: it is not one of them.
pub(crate) fn close(fd: c_int) -> Option<Answer<c_int>> {
    if !may_be(fd) || !ownership::is_owner() {
        return None;
    }
    if !signals::is_inside() {
        let _blocked = Blocked::all();
        let _ranges = lock(&RANGES);
        // A number that is not open may become the library's before libc closes it. One that the program has open may not.
        return (OWN.is_intact(fd) || borrow(fd).is_none()).then_some(Err(libc::EBADF));
    }
    if !OWN.has(fd) {
        return None;
    }
    let _ranges = lock(&RANGES);
    // If it is not, the program has closed it, and may have opened another file under its number.
    if OWN.is_intact(fd) {
        close_intact(fd);
    }
    OWN.forget(fd);
    Some(Ok(0))
}

fn close_intact(fd: c_int) {
    // SAFETY: it is the library's own, which it does not use after this. Not by close(2), which is defined here.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// Replaces a number with `real`. The library's own are refused, as the kernel refuses a number that is just being opened
/// (EBUSY). The caller has signals blocked.
pub(crate) fn replace(to: c_int, real: impl FnOnce() -> c_int) -> Answer<c_int> {
    let ranges = lock(&RANGES);
    if OWN.is_intact(to) {
        return Err(libc::EBUSY);
    }
    // What the program has open cannot become the library's, and to close it may take long.
    let _ranges = borrow(to).is_none().then_some(ranges);
    Ok(real())
}

/// Closes these, but for the library's own: as `close_range`, 0, or -1 and `errno`. The caller has signals blocked.
pub(crate) fn close_around(range: &RangeInclusive<c_int>, flags: c_int) -> c_int {
    let last = if *range.end() == c_int::MAX { u32::MAX } else { *range.end() as u32 };
    // SAFETY: closes what the program wants closed.
    let close = |first: u32, last: u32| unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int };
    let (first, start) = (*range.start() as u32, OWN.start());
    // The library has none there, and to close the program's may take long.
    if first < start {
        let result = close(first, last.min(start - 1));
        if result != 0 || last < start {
            return result;
        }
    }
    *lock(&RANGES) += 1;
    let result = OWN.close_around(first.max(start), last, close);
    let errno = errno();
    let mut ranges = lock(&RANGES);
    *ranges -= 1;
    if *ranges == 0 {
        RANGES_CLOSED.notify_all();
    }
    drop(ranges);
    set_errno(errno);
    result
}

/// The right to change them, while no handler can run.
pub(crate) type Locked = MutexGuard<'static, usize>;

pub(crate) fn locked() -> Locked {
    lock(&RANGES)
}

/// In a child: closes what it has of the parent's. A connection that the parent closes would stay open, and its alarm silent.
pub(crate) fn leave(ranges: &mut Locked) {
    **ranges = 0;
    for fd in OWN.within(0, u32::MAX).filter(|fd| OWN.is_intact(*fd)) {
        OWN.forget(fd);
        close_intact(fd);
    }
}
