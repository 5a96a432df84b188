//! The program's listeners: which descriptors they have, what the holder knows of them.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use ksf_accel_proto::message::{Answer, NO_WORKER, Request};
use rustix::net::{AddressFamily, ipproto, sockopt};

use crate::descriptor::borrow;
use crate::process::Entered;
use crate::table::{self, DescriptorKind, LISTENERS};
use crate::{holder, worker};

/// `SO_COOKIE`: the kernel's name of a socket, never used twice.
fn cookie(fd: c_int) -> Option<u64> {
    sockopt::socket_cookie(borrow(fd)).ok()
}

fn listens(fd: c_int) -> bool {
    sockopt::socket_acceptconn(borrow(fd)) == Ok(true)
}

fn is_tcp(fd: c_int) -> bool {
    let socket = borrow(fd);
    matches!(sockopt::socket_domain(socket), Ok(AddressFamily::INET | AddressFamily::INET6))
        && sockopt::socket_protocol(socket) == Ok(Some(ipproto::TCP))
}

/// What a descriptor is, after looking. A listener has an entry from now on.
pub(crate) fn meet(entered: &Entered, fd: c_int) -> Option<usize> {
    let known = match table::kind(fd) {
        DescriptorKind::Listener(slot) => Some(slot),
        _ => None,
    };
    let found = listens(fd).then(|| cookie(fd)).flatten();
    if let (Some(slot), Some(cookie)) = (known, found)
        && LISTENERS[slot].cookie.load(Ordering::Relaxed) == cookie
    {
        return Some(slot);
    }
    // What the known one is apart from listening, it is for ever.
    let is_tcp = is_tcp(fd);
    // The number means something else than it did: it was closed where this library could not see it.
    if known.is_some() {
        forget(entered, fd);
        tell_closed(entered);
    }
    let Some(cookie) = found.filter(|_| is_tcp) else {
        let kind = match is_tcp {
            true if may_listen(fd) => DescriptorKind::MayListen,
            // A connection, whose next calls are to cost nothing.
            true => DescriptorKind::None,
            false => DescriptorKind::Foreign,
        };
        table::set_kind(fd, kind);
        return None;
    };
    let slot = table::find_listener(cookie).or_else(|| table::new_listener(cookie));
    let Some(slot) = slot.filter(|slot| table::set_kind(fd, DescriptorKind::Listener(*slot))) else {
        table::set_kind(fd, DescriptorKind::Foreign);
        return None;
    };
    LISTENERS[slot].descriptors.fetch_add(1, Ordering::Relaxed);
    Some(slot)
}

/// `listen()` was called, with success.
pub(crate) fn listened(entered: &Entered, fd: c_int, backlog: c_int) {
    if let Some(slot) = meet(entered, fd) {
        let listener = &LISTENERS[slot];
        listener.backlog.store(backlog, Ordering::Relaxed);
        listener.refused.store(0, Ordering::Relaxed);
        tell(entered, slot, fd);
    }
}

/// A descriptor came in a message from another process. `errno` stays as it is.
pub(crate) fn received(fd: c_int) {
    if may_listen(fd) {
        let errno = ksf_interpose::errno::errno();
        if let Some(entered) = crate::process::enter() {
            meet(&entered, fd);
        }
        ksf_interpose::errno::set_errno(errno);
    }
}

/// `bind()` was called, with success, on a TCP socket that may listen. The process that calls `listen()` may be a child:
/// then this one sees no more of it than a descriptor that it adds to an epoll instance.
pub(crate) fn bound(_entered: &Entered, fd: c_int) {
    if matches!(table::kind(fd), DescriptorKind::None | DescriptorKind::Foreign) {
        table::set_kind(fd, DescriptorKind::MayListen);
    }
}

/// True of a TCP socket that listens, or has no connection: one system call. `errno` stays as it is.
pub(crate) fn may_listen(fd: c_int) -> bool {
    /// TCP_CLOSE and TCP_LISTEN (include/net/tcp_states.h).
    const STATES: [u8; 2] = [7, 10];
    let errno = ksf_interpose::errno::errno();
    let (mut state, mut length) = (0u8, 1);
    // SAFETY: `tcpi_state` is the first byte; the kernel writes no more than the length says.
    let result =
        unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &mut length) };
    ksf_interpose::errno::set_errno(errno);
    result == 0 && STATES.contains(&state)
}

/// Tells the holder of a listener. True: it has it now.
pub(crate) fn tell(entered: &Entered, slot: usize, fd: c_int) -> bool {
    let listener = &LISTENERS[slot];
    let backlog = match listener.backlog.load(Ordering::Relaxed) {
        0 => backlog_of(fd),
        backlog => backlog,
    };
    let request = Request::Listen { cookie: listener.cookie.load(Ordering::Relaxed), backlog };
    entered.process.told.fetch_or(1 << slot, Ordering::Relaxed);
    match holder::ask(entered.process, &request, Some(fd)) {
        Some(reply) => match reply.answer {
            Answer::Done { listener: index, .. } => {
                listener.index.store(index, Ordering::Release);
                true
            }
            Answer::Refused { .. } => {
                listener.refused.store(1, Ordering::Relaxed);
                false
            }
        },
        None => false,
    }
}

/// What a listener that came from elsewhere was given to `listen()`: `tcpi_sacked` of a listener (Linux 2.6.24,
/// net/ipv4/tcp.c, tcp_get_info).
fn backlog_of(fd: c_int) -> c_int {
    // SAFETY: the buffer is as long as said; a short answer leaves zeros.
    unsafe {
        let mut info: libc::tcp_info = std::mem::zeroed();
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        let errno = ksf_interpose::errno::errno();
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &mut length);
        ksf_interpose::errno::set_errno(errno);
        info.tcpi_sacked as c_int
    }
}

/// A descriptor of a listener is about to be closed, or something else is to take its number. After the last one the
/// process listens there no more; the holder is told by [`tell_closed`], when it is done: the holder looks whether the
/// listener is still there.
pub(crate) fn forget(entered: &Entered, fd: c_int) {
    let DescriptorKind::Listener(slot) = table::kind(fd) else { return };
    table::set_kind(fd, DescriptorKind::None);
    let listener = &LISTENERS[slot];
    if listener.descriptors.fetch_sub(1, Ordering::Relaxed) > 1 {
        return;
    }
    for (index, instance) in table::instances() {
        if let Some(worker) = worker::end(entered, index, instance, slot) {
            listener.left[worker as usize / 64].fetch_or(1 << (worker % 64), Ordering::Relaxed);
        }
    }
    if let Some(stolen) = listener.stolen.take() {
        crate::descriptor::release(stolen);
    }
    listener.closed.store(1, Ordering::Relaxed);
}

/// Tells the holder of listeners that [`forget`] has ended, if it knows of them from this process: most children close
/// what they inherit and do not need.
pub(crate) fn tell_closed(entered: &Entered) {
    for (slot, listener) in LISTENERS.iter().enumerate() {
        if listener.closed.swap(0, Ordering::Relaxed) == 0 {
            continue;
        }
        let cookie = listener.cookie.load(Ordering::Relaxed);
        let told = entered.process.told.fetch_and(!(1 << slot), Ordering::Relaxed) & (1 << slot) != 0;
        let mut worker = NO_WORKER;
        for (word, left) in listener.left.iter().enumerate() {
            let mut left = left.swap(0, Ordering::Relaxed);
            while left != 0 {
                worker = word as u32 * 64 + left.trailing_zeros();
                left &= left - 1;
                holder::ask(entered.process, &Request::Leave { cookie, worker, closed: 1 }, None);
            }
        }
        if told && worker == NO_WORKER {
            holder::ask(entered.process, &Request::Leave { cookie, worker, closed: 1 }, None);
        }
        // Met again meanwhile, by a number that was not known.
        if listener.descriptors.load(Ordering::Relaxed) == 0 {
            listener.cookie.store(0, Ordering::Release);
        }
    }
}

/// A descriptor was duplicated by the program. A second number of an epoll instance is not followed: whoever waits by it
/// gets the same events, without the notes of when.
pub(crate) fn copied(_entered: &Entered, from: c_int, to: c_int) {
    let kind = table::kind(from);
    if table::set_kind(to, kind)
        && let DescriptorKind::Listener(slot) = kind
    {
        LISTENERS[slot].descriptors.fetch_add(1, Ordering::Relaxed);
    }
}
