//! This library's own descriptors, of the multiplexors and of its own: the program does not know of them, and must not take
//! them away when it closes or replaces numbers ([`crate::hooks`]). What a call of libc's closes by itself
//! (`fclose`), or a bare system call, is found when the library closes the number.

use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use ksf_interpose::OwnDescriptors;

use crate::kcm::Answer;
use crate::table::lock;
use crate::{ownership, signals};

static OWN: OwnDescriptors<{ 1 << 16 }> = OwnDescriptors::new();
/// What is noted is what is open, for other threads that hold this.
static CHANGES: Mutex<()> = Mutex::new(());

/// False while the library never had one: most programs.
pub(crate) fn is_used() -> bool {
    OWN.is_used()
}

/// Takes a descriptor as the library's own, under a high number.
pub(crate) fn keep(fd: OwnedFd) -> OwnedFd {
    let changes = lock(&CHANGES);
    let high = OWN.keep(fd.as_fd());
    drop(changes);
    high.unwrap_or(fd)
}

/// Closes one of the library's own, for the library. For the program it is not open (EBADF). None: it is not one of them.
pub(crate) fn close(fd: c_int) -> Option<Answer<c_int>> {
    if !OWN.has(fd) || !ownership::is_owner() {
        return None;
    }
    if !signals::is_inside() {
        return OWN.is_intact(fd).then_some(Err(libc::EBADF));
    }
    let _changes = lock(&CHANGES);
    // Else it is the program's by now.
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
    let _changes = lock(&CHANGES);
    if OWN.is_intact(to) { Err(libc::EBUSY) } else { Ok(real()) }
}

/// Closes these, but for the library's own: as `close_range`, 0, or -1 and `errno`. The caller has signals blocked.
pub(crate) fn close_around(range: &RangeInclusive<c_int>, flags: c_int) -> c_int {
    let last = if *range.end() == c_int::MAX { u32::MAX } else { *range.end() as u32 };
    let _changes = lock(&CHANGES);
    OWN.close_around(*range.start() as u32, last, |first, last| {
        // SAFETY: closes what the program wants closed.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int }
    })
}

/// The right to change them, while no handler can run.
pub(crate) type Locked = MutexGuard<'static, ()>;

pub(crate) fn locked() -> Locked {
    lock(&CHANGES)
}

/// In a child: closes what it has of the parent's. A connection that the parent closes would stay open, and its alarm silent.
pub(crate) fn leave(_locked: &mut Locked) {
    for fd in OWN.within(0, u32::MAX).filter(|fd| OWN.is_intact(*fd)) {
        OWN.forget(fd);
        close_intact(fd);
    }
}
