//! epoll: message sockets are epoll sets themselves, so they can be added as they are. What differs is done here:
//! room to send, errors of connections, and sets that are readable without a message.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use libc::{EPOLL_CTL_DEL, EPOLLERR, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDNORM, epoll_event, sigset_t};

use crate::hooks::{give, to_ms};
use crate::kcm::Kcm;
use crate::signals::Blocked;
use crate::table::{Entry, find, lock};
use crate::{ownership, real};

/// A message socket in a set of the program's.
pub(crate) struct Registered {
    set: c_int,
    fd: c_int,
    data: u64,
    kcm: Weak<Kcm>,
}

static REGISTERED: Mutex<Vec<Registered>> = Mutex::new(Vec::new());

/// `epoll_ctl`, with `real` for libc's own.
pub(crate) fn control(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<epoll_event>,
    real: impl Fn(c_int, c_int, Option<epoll_event>) -> c_int,
) -> Option<c_int> {
    let entry = find(fd)?;
    let wanted = event.map_or(0, |event| event.events);
    let data = event.map_or(0, |event| event.u64);
    // What a second descriptor may say, besides the first; deleted, or not there, if nothing.
    let beside = |other: c_int, events: u32| {
        // EEXIST, ENOENT: what was there before decides, so both are tried.
        real(EPOLL_CTL_DEL, other, None);
        if operation != EPOLL_CTL_DEL {
            real(libc::EPOLL_CTL_ADD, other, Some(epoll_event { events, u64: data }));
        }
    };
    match entry {
        Entry::Kcm(kcm) => {
            let out = EPOLLOUT as u32;
            let own = event.map(|event| epoll_event { events: wanted & !out, ..event });
            let result = real(operation, fd, own);
            if result < 0 {
                return Some(result);
            }
            if wanted & out != 0 {
                beside(kcm.room.as_raw_fd(), wanted & (out | (EPOLLET | EPOLLONESHOT) as u32));
            } else {
                real(EPOLL_CTL_DEL, kcm.room.as_raw_fd(), None);
            }
            let mut registered = lock(&REGISTERED);
            registered.retain(|of| (of.set, of.fd) != (set, fd) && of.kcm.strong_count() > 0);
            if operation != EPOLL_CTL_DEL {
                registered.push(Registered { set, fd, data, kcm: Arc::downgrade(&kcm) });
            }
            Some(result)
        }
        Entry::Tcp(tcp) => {
            beside(tcp.alarm(), EPOLLERR as u32);
            // The bytes it has are the multiplexor's.
            let events = wanted & !((EPOLLIN | EPOLLRDNORM) as u32);
            Some(real(operation, fd, event.map(|event| epoll_event { events, ..event })))
        }
        Entry::Inherited if operation != EPOLL_CTL_DEL => Some(give(Err(ownership::refuse(fd)))),
        Entry::Program(_) | Entry::Inherited => None,
    }
}

/// `epoll_pwait`: a message socket is reported when a message is there.
///
/// # Safety
///
/// `events` has room for `max` events; `signals` is null or a set.
pub(crate) unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
    signals: *const sigset_t,
) -> c_int {
    // A signal between two looks would not end the call: it comes during one.
    let blocked = Blocked::all();
    let signals = if signals.is_null() { &raw const blocked.before } else { signals };
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        // SAFETY: handed on from the caller.
        let count = unsafe { real::epoll_pwait(set, events, max, to_ms(left), signals) };
        if count <= 0 {
            return count;
        }
        // SAFETY: the kernel has filled in so many, and there is room for them.
        let found = unsafe { std::slice::from_raw_parts_mut(events, count as usize) };
        let mut kept = 0;
        for at in 0..found.len() {
            let mut event = found[at];
            let data = event.u64;
            let kcm =
                lock(&REGISTERED).iter().find(|of| of.set == set && of.data == data).and_then(|of| of.kcm.upgrade());
            let readable = (EPOLLIN | EPOLLRDNORM) as u32;
            if event.events & readable != 0
                && let Some(kcm) = kcm
                && !kcm.socket.is_readable().unwrap_or(true)
            {
                event.events &= !readable;
            }
            if event.events != 0 {
                found[kept] = event;
                kept += 1;
            }
        }
        if kept > 0 || left.is_some_and(|left| left.is_zero()) {
            return kept as c_int;
        }
    }
}

/// True if a message socket is in this set.
pub(crate) fn concerns(set: c_int) -> bool {
    lock(&REGISTERED).iter().any(|of| of.set == set)
}

/// Forgets a set or socket that is closed.
pub(crate) fn forget(fd: c_int) {
    lock(&REGISTERED).retain(|of| of.set != fd && of.fd != fd);
}

/// The list, kept from everybody.
pub(crate) type Locked = MutexGuard<'static, Vec<Registered>>;

pub(crate) fn locked() -> Locked {
    lock(&REGISTERED)
}

/// In a child: forgets what the parent has registered.
pub(crate) fn leave(registered: &mut Locked) {
    std::mem::forget(std::mem::take(&mut **registered));
}

/// A pointer that need not be there.
///
/// # Safety
///
/// `event` is null or can be read.
pub(crate) unsafe fn read(event: *mut c_void) -> Option<epoll_event> {
    if event.is_null() {
        return None;
    }
    // SAFETY: it can be read; the struct is packed, so it may lie anywhere.
    Some(unsafe { event.cast::<epoll_event>().read_unaligned() })
}
