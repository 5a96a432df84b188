//! epoll: message sockets are epoll sets themselves, so they can be added as they are. What differs is done here:
//! room to send, errors of connections, and sets that are readable without a message.

use std::ffi::{c_int, c_void};
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use libc::{EPOLL_CTL_DEL, EPOLLERR, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDNORM, epoll_event, sigset_t};

use crate::attached::Attached;
use crate::hooks::{give, to_ms};
use crate::kcm::Kcm;
use crate::signals::{Blocked, SLICE, outside};
use crate::table::{Entry, lock, with};
use crate::{ownership, real};

/// What is in a set of the program's.
pub(crate) struct Registered {
    set: c_int,
    fd: c_int,
    data: u64,
    what: What,
}

enum What {
    Kcm(Weak<Kcm>),
    Tcp(Weak<Attached>),
}

/// Notes that it is in a set, or not any more.
fn register(set: c_int, fd: c_int, data: u64, what: Option<What>) {
    USED.store(true, Ordering::Release);
    let mut registered = lock(&REGISTERED);
    registered.retain(|of| {
        let is_open = match &of.what {
            What::Kcm(kcm) => kcm.strong_count() > 0,
            What::Tcp(tcp) => tcp.strong_count() > 0,
        };
        is_open && (of.set, of.fd) != (set, fd)
    });
    registered.extend(what.map(|what| Registered { set, fd, data, what }));
}

static REGISTERED: Mutex<Vec<Registered>> = Mutex::new(Vec::new());
/// False while nothing was ever registered: most programs.
static USED: AtomicBool = AtomicBool::new(false);

impl Registered {
    /// The message socket, if it is one that is open.
    fn socket(&self) -> Option<Arc<Kcm>> {
        match &self.what {
            What::Kcm(kcm) => kcm.upgrade(),
            What::Tcp(_) => None,
        }
    }

    /// The connection in this set, if it is one that is open.
    fn connection(&self, set: c_int) -> Option<Arc<Attached>> {
        match &self.what {
            What::Tcp(tcp) if self.set == set => tcp.upgrade(),
            _ => None,
        }
    }
}

/// `epoll_ctl`, with `real` for libc's own.
pub(crate) fn control(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<epoll_event>,
    real: impl Fn(c_int, c_int, Option<epoll_event>) -> c_int,
) -> Option<c_int> {
    with(fd, |entry, _| control_known(entry, set, operation, fd, event, real))
}

fn control_known(
    entry: Entry,
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<epoll_event>,
    real: impl Fn(c_int, c_int, Option<epoll_event>) -> c_int,
) -> Option<c_int> {
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
            let what = (operation != EPOLL_CTL_DEL).then(|| What::Kcm(Arc::downgrade(&kcm)));
            register(set, fd, data, what);
            Some(result)
        }
        Entry::Tcp(tcp) => {
            beside(tcp.alarm(), EPOLLERR as u32);
            // The bytes it has are the multiplexor's.
            let events = wanted & !((EPOLLIN | EPOLLRDNORM) as u32);
            let result = real(operation, fd, event.map(|event| epoll_event { events, ..event }));
            if result >= 0 {
                let what = (operation != EPOLL_CTL_DEL).then(|| What::Tcp(Arc::downgrade(&tcp)));
                register(set, fd, data, what);
            }
            Some(result)
        }
        Entry::Inherited if operation != EPOLL_CTL_DEL => Some(give(Err(ownership::refuse(fd)))),
        Entry::Program(_) | Entry::Inherited => None,
    }
}

/// `epoll_pwait`: a message socket is reported when a message is there. None if neither one nor a connection is in the set.
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
) -> Option<c_int> {
    if !is_used() || !ownership::is_owner() {
        return None;
    }
    // A signal between two looks would not end the call: it comes during one.
    let blocked = Blocked::all();
    if !lock(&REGISTERED).iter().any(|of| of.set == set) {
        return None;
    }
    let signals = if signals.is_null() { &raw const blocked.before } else { signals };
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let connections: Vec<_> = lock(&REGISTERED).iter().filter_map(|of| of.connection(set)).collect();
        connections.iter().for_each(|tcp| tcp.group.look());
        // What comes for a connection is read so often: no other reader may be there.
        let slice = (!connections.is_empty()).then_some(SLICE);
        drop(connections);
        let pause = left.map_or(slice, |left| Some(slice.map_or(left, |slice| left.min(slice))));
        // SAFETY: handed on from the caller.
        let count = outside(|| unsafe { real::epoll_pwait(set, events, max, to_ms(pause), signals) });
        if count < 0 || count == 0 && left.is_some_and(|left| left.is_zero()) {
            return Some(count);
        }
        // SAFETY: the kernel has filled in so many, and there is room for them.
        let found = unsafe { std::slice::from_raw_parts_mut(events, count as usize) };
        let mut kept = 0;
        for at in 0..found.len() {
            let mut event = found[at];
            let data = event.u64;
            let kcm =
                lock(&REGISTERED).iter().filter(|of| of.set == set && of.data == data).find_map(Registered::socket);
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
            return Some(kept as c_int);
        }
    }
}

/// False while no message socket or connection was in a set.
pub(crate) fn is_used() -> bool {
    USED.load(Ordering::Acquire)
}

/// Forgets sets and sockets that are closed.
pub(crate) fn forget(closed: &RangeInclusive<c_int>) {
    if is_used() {
        lock(&REGISTERED).retain(|of| !closed.contains(&of.set) && !closed.contains(&of.fd));
    }
}

/// The list, locked while no handler can run.
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
