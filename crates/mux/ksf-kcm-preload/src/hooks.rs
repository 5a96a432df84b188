//! The functions of libc that are defined here once more. Each does a call on a message socket, on a connection that is
//! attached, or on a framing program; any other it hands on.
//!
//! None of them panics on what a program passes; what panicked would end the process at this boundary.

use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use ksf_interpose::Next;
use ksf_interpose::errno::{errno, set_errno};
use libc::{FILE, epoll_event, fd_set, iovec, mmsghdr, mode_t, msghdr, nfds_t, off64_t, pollfd, sigset_t};
use libc::{sighandler_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval};

use crate::kcm::{self, AF_KCM, Answer, Kcm};
use crate::message::{self, Target, part};
use crate::signals::Blocked;
use crate::table::{self, Entry};
use crate::{descriptor, events, keeper, ownership, passed, procfs, program, watch};

/// As functions of libc answer: a number, or -1 and errno.
pub(crate) trait Returned {
    fn failed() -> Self;
}

impl Returned for c_int {
    fn failed() -> Self {
        -1
    }
}

impl Returned for isize {
    fn failed() -> Self {
        -1
    }
}

pub(crate) fn give<T: Returned>(answer: Answer<T>) -> T {
    answer.unwrap_or_else(|errno| {
        set_errno(errno);
        T::failed()
    })
}

/// Defines functions of libc: each tries its body, and hands on where that gives `None`. `$real` is the next
/// definition.
macro_rules! hooks {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = |$real:ident| $body:expr;)*) => { $(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As its manual page demands.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            let $real = |$($argument: $type),*| -> $result {
                // SAFETY: the function has this type by its manual page (variadic ones take their arguments where
                // others do, on the ABIs of Linux), and the arguments are the caller's or as good.
                unsafe {
                    let function =
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> $result>(next::$name.get());
                    function($($argument),*)
                }
            };
            let done: Option<$result> = $body;
            done.unwrap_or_else(|| $real($($argument),*))
        }
    )*

        #[allow(non_upper_case_globals)]
        mod next {
            use super::Next;
            $(pub(super) static $name: Next = Next::new(concat!(stringify!($name), "\0"));)*
        }

        /// Looks all of them up: dlsym might allocate or take a lock in a signal handler.
        pub(crate) fn look_up_all() {
            $(next::$name.look_up();)*
        }
    };
}

/// For calls that have no meaning on a message socket.
fn refused(fd: c_int) -> Option<c_int> {
    table::on_kcm(fd, |_, _| Err(libc::EOPNOTSUPP)).map(give)
}

/// What reading does, whatever function it is called by.
///
/// # Safety
///
/// `parts` leads to `count` buffers that can be written.
unsafe fn read_parts(fd: c_int, parts: *const iovec, count: usize, flags: c_int) -> Option<isize> {
    let read = table::with(fd, |entry, blocked| match entry {
        Entry::Kcm(kcm) => {
            let on = Target { fd, kcm: &kcm, blocked };
            // SAFETY: handed on from the caller.
            Some(unsafe { message::receive_parts(on, parts, count, flags) })
        }
        // SAFETY: handed on from the caller.
        Entry::Tcp(tcp) => unsafe { message::unread(&tcp, parts, count, flags) },
        Entry::Inherited => Some(Err(ownership::refuse(fd))),
        Entry::Program(_) => None,
    });
    read.map(give)
}

/// What writing does, whatever function it is called by. `None` for the flags: those of `write`.
///
/// # Safety
///
/// `parts` leads to `count` parts that can be read.
unsafe fn write_parts(fd: c_int, parts: *const iovec, count: usize, flags: Option<c_int>) -> Option<isize> {
    let send = |kcm: &Arc<Kcm>, blocked: &Blocked| {
        let flags = flags.unwrap_or_else(|| message::write_flags(kcm));
        // SAFETY: handed on from the caller.
        unsafe { message::send_parts(Target { fd, kcm, blocked }, parts, count, flags) }
    };
    table::on_kcm(fd, send).map(give)
}

/// linux/close_range.h
const CLOSE_RANGE_CLOEXEC: c_int = 4;

fn to_fd(number: c_uint) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// Closes one with `real`, if it concerns this library. What a child closes that borrows this memory (vfork) stays open here.
fn close_one(fd: c_int, real: impl FnOnce() -> c_int) -> Option<c_int> {
    if let Some(answer) = descriptor::close(fd) {
        return Some(give(answer));
    }
    let _blocked = forget(&(fd..=fd))?;
    Some(real())
}

/// The program closes these. If one may be in the table, signals wait until it is closed: to close another's may take long.
fn forget(closed: &RangeInclusive<c_int>) -> Option<Blocked> {
    let is_known = table::may_have_any(closed);
    if !(is_known || events::is_used()) || !ownership::is_owner() {
        return None;
    }
    let blocked = Blocked::all();
    events::forget(closed);
    table::remove_range(closed.clone());
    is_known.then_some(blocked)
}

/// Closes these, but for the library's own, if there are any: 0, or -1 and `errno`. None in a child that borrows this memory.
fn close_all(closed: &RangeInclusive<c_int>, flags: c_int) -> Option<c_int> {
    let blocked = forget(closed);
    (blocked.is_some() || descriptor::is_used() && ownership::is_owner()).then(|| {
        let _blocked = Blocked::all();
        descriptor::close_around(closed, flags)
    })
}

/// Duplicates a descriptor with `real`, which replaces `to`, if that is given.
fn duplicate(fd: c_int, to: Option<c_int>, real: impl FnOnce() -> c_int) -> c_int {
    let is_known = |fd: c_int| table::may_have(fd);
    let replaced = to.filter(|to| *to != fd && descriptor::may_be(*to) && ownership::is_owner());
    let _blocked = (is_known(fd) || to.is_some_and(is_known) || replaced.is_some()).then(Blocked::all);
    let new = match replaced {
        Some(to) => give(descriptor::replace(to, real)),
        None => real(),
    };
    if new >= 0 && new != fd && (is_known(fd) || is_known(new)) {
        let _blocked = Blocked::all();
        table::copy(fd, new);
    }
    new
}

fn of_ms(timeout_ms: c_int) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

/// In milliseconds, rounded up; -1: for ever.
pub(crate) fn to_ms(timeout: Option<Duration>) -> c_int {
    timeout.map_or(-1, |timeout| c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX))
}

/// # Safety
///
/// `timeout` is null or can be read.
unsafe fn of_timespec(timeout: *const timespec) -> Option<Duration> {
    // SAFETY: handed on from the caller.
    let timeout = unsafe { timeout.as_ref() }?;
    Some(Duration::new(u64::try_from(timeout.tv_sec).ok()?, u32::try_from(timeout.tv_nsec).ok()?))
}

pub(crate) fn to_timespec(timeout: Duration) -> timespec {
    timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() }
}

/// `ppoll`, if it concerns anything of this library's.
///
/// # Safety
///
/// `set` leads to `count` entries; `signals` is null or a set.
unsafe fn watch(set: *mut pollfd, count: nfds_t, timeout: Option<Duration>, signals: *const sigset_t) -> Option<c_int> {
    if set.is_null() || count == 0 {
        return None;
    }
    // SAFETY: there are so many, and the signals are there or null.
    let (set, signals) = unsafe { (std::slice::from_raw_parts_mut(set, count as usize), signals.as_ref()) };
    if !set.iter().any(|polled| table::may_have(polled.fd)) {
        return None;
    }
    watch::watch(set, timeout, signals, &Blocked::all())
}

hooks! {
    /// socket(2)
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int =
        |real| (domain == AF_KCM).then(|| give(kcm::open(kind, protocol)));

    /// ioctl(2)
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int = |real| {
        let done = table::with(fd, |entry, _| match entry {
            // SAFETY: the caller's argument is what the request demands.
            Entry::Kcm(kcm) => unsafe { kcm::ioctl(&kcm, request, argument) },
            Entry::Inherited if kcm::is_own(request) => Some(Err(ownership::refuse(fd))),
            _ => None,
        });
        done.map(give)
    };

    /// getsockopt(2)
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int = |real| {
        let copy = |bytes: Vec<u8>| {
            if value.is_null() || length.is_null() {
                return Err(libc::EFAULT);
            }
            // SAFETY: the length can be read and written, and the value holds so many bytes.
            unsafe {
                let count = bytes.len().min(*length as usize);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), count);
                *length = count as socklen_t;
            }
            Ok(0)
        };
        let done = table::with(fd, |entry, _| match entry {
            Entry::Kcm(kcm) => Some(kcm::option(&kcm, level, name).and_then(copy)),
            Entry::Tcp(tcp) if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) && tcp.has_error() => {
                Some(copy(tcp.take_error().to_ne_bytes().to_vec()))
            }
            Entry::Inherited => Some(Err(ownership::refuse(fd))),
            _ => None,
        });
        done.map(give)
    };

    /// setsockopt(2)
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int = |real| {
        let set = |kcm: &Arc<Kcm>, _: &Blocked| {
            if value.is_null() {
                return Err(libc::EFAULT);
            }
            // SAFETY: the caller's value has so many bytes.
            let bytes = unsafe { std::slice::from_raw_parts(value.cast(), length as usize) };
            kcm::set_option(kcm, level, name, bytes)
        };
        table::on_kcm(fd, set).map(give)
    };

    /// bind(2)
    fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int = |real| refused(fd);
    /// connect(2)
    fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int = |real| refused(fd);
    /// listen(2)
    fn listen(fd: c_int, backlog: c_int) -> c_int = |real| refused(fd);
    /// accept(2)
    fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = |real| refused(fd);
    /// accept4(2)
    fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int = |real| refused(fd);
    /// shutdown(2)
    fn shutdown(fd: c_int, how: c_int) -> c_int = |real| refused(fd);
    /// getpeername(2)
    fn getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = |real| refused(fd);
    /// getsockname(2)
    fn getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = |real| refused(fd);

    /// recvmsg(2)
    fn recvmsg(fd: c_int, header: *mut msghdr, flags: c_int) -> ssize_t = |real| {
        let done = table::with(fd, |entry, blocked| match entry {
            // SAFETY: the caller's header is what the manual page demands.
            Entry::Kcm(kcm) => Some(unsafe { message::receive(Target { fd, kcm: &kcm, blocked }, header, flags) }),
            Entry::Tcp(tcp) if !header.is_null() => {
                // SAFETY: the header leads to its buffers.
                unsafe { message::unread(&tcp, (*header).msg_iov, (*header).msg_iovlen, flags) }
            }
            Entry::Inherited => Some(Err(ownership::refuse(fd))),
            _ => None,
        });
        done.map(give).or_else(|| {
            let result = real(fd, header, flags);
            if result >= 0 {
                // SAFETY: the kernel has filled it in.
                unsafe { passed::note(&*header) };
            }
            Some(result)
        })
    };
    /// recv(2)
    fn recv(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int) -> ssize_t =
        // SAFETY: the caller's buffer has so many bytes.
        |real| unsafe { read_parts(fd, &part(buffer, count), 1, flags) };
    /// recvfrom(2)
    fn recvfrom(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int, address: *mut sockaddr, length: *mut socklen_t) -> ssize_t =
        // SAFETY: the caller's buffer has so many bytes.
        |real| unsafe { read_parts(fd, &part(buffer, count), 1, flags) };
    /// read(2)
    fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t =
        // SAFETY: the caller's buffer has so many bytes.
        |real| unsafe { read_parts(fd, &part(buffer, count), 1, 0) };
    /// readv(2)
    fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t =
        // SAFETY: the caller has so many buffers.
        |real| unsafe { read_parts(fd, parts, usize::try_from(count).unwrap_or(0), 0) };
    /// recv(2), as programs compiled with _FORTIFY_SOURCE call it
    fn __recv_chk(fd: c_int, buffer: *mut c_void, count: size_t, size: size_t, flags: c_int) -> ssize_t =
        // SAFETY: the caller's buffer has `size` bytes; the real function ends a program that asks for more.
        |real| if count > size { None } else { unsafe { read_parts(fd, &part(buffer, count), 1, flags) } };
    /// recvfrom(2), as programs compiled with _FORTIFY_SOURCE call it
    fn __recvfrom_chk(fd: c_int, buffer: *mut c_void, count: size_t, size: size_t, flags: c_int, address: *mut sockaddr, length: *mut socklen_t) -> ssize_t =
        // SAFETY: the caller's buffer has `size` bytes; the real function ends a program that asks for more.
        |real| if count > size { None } else { unsafe { read_parts(fd, &part(buffer, count), 1, flags) } };
    /// read(2), as programs compiled with _FORTIFY_SOURCE call it
    fn __read_chk(fd: c_int, buffer: *mut c_void, count: size_t, size: size_t) -> ssize_t =
        // SAFETY: the caller's buffer has `size` bytes; the real function ends a program that asks for more.
        |real| if count > size { None } else { unsafe { read_parts(fd, &part(buffer, count), 1, 0) } };
    /// recvmmsg(2)
    fn recvmmsg(fd: c_int, headers: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int = |real| {
        // SAFETY: the caller has so many headers, and a timeout or none.
        let receive = |kcm: &Arc<Kcm>, blocked: &Blocked| unsafe {
            message::receive_many(Target { fd, kcm, blocked }, headers, count, flags, of_timespec(timeout))
        };
        table::on_kcm(fd, receive).map(give).or_else(|| {
            let received = real(fd, headers, count, flags, timeout);
            for at in 0..usize::try_from(received).unwrap_or(0) {
                // SAFETY: the kernel has filled in so many.
                unsafe { passed::note(&(*headers.add(at)).msg_hdr) };
            }
            Some(received)
        })
    };

    /// sendmsg(2)
    fn sendmsg(fd: c_int, header: *const msghdr, flags: c_int) -> ssize_t =
        // SAFETY: the caller's header is what the manual page demands.
        |real| table::on_kcm(fd, |kcm, blocked| unsafe { message::send(Target { fd, kcm, blocked }, header, flags) }).map(give);
    /// send(2)
    fn send(fd: c_int, bytes: *const c_void, count: size_t, flags: c_int) -> ssize_t =
        // SAFETY: the caller has so many bytes.
        |real| unsafe { write_parts(fd, &part(bytes, count), 1, Some(flags)) };
    /// sendto(2)
    fn sendto(fd: c_int, bytes: *const c_void, count: size_t, flags: c_int, address: *const sockaddr, length: socklen_t) -> ssize_t =
        // SAFETY: the caller has so many bytes.
        |real| unsafe { write_parts(fd, &part(bytes, count), 1, Some(flags)) };
    /// write(2)
    fn write(fd: c_int, bytes: *const c_void, count: size_t) -> ssize_t =
        // SAFETY: the caller has so many bytes.
        |real| unsafe { write_parts(fd, &part(bytes, count), 1, None) };
    /// writev(2)
    fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t =
        // SAFETY: the caller has so many parts.
        |real| unsafe { write_parts(fd, parts, usize::try_from(count).unwrap_or(0), None) };
    /// sendmmsg(2)
    fn sendmmsg(fd: c_int, headers: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int =
        // SAFETY: the caller has so many headers.
        |real| table::on_kcm(fd, |kcm, blocked| unsafe { message::send_many(Target { fd, kcm, blocked }, headers, count, flags) }).map(give);
    /// splice(2)
    fn splice(from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, bytes: size_t, flags: c_uint) -> ssize_t =
        |real| table::on_kcm(from, |kcm, blocked| message::splice(Target { fd: from, kcm, blocked }, to, bytes, flags)).map(give);

    /// poll(2)
    fn poll(set: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int =
        // SAFETY: the caller has so many entries.
        |real| unsafe { watch(set, count, of_ms(timeout_ms), std::ptr::null()) };
    /// poll(2), as programs compiled with _FORTIFY_SOURCE call it
    fn __poll_chk(set: *mut pollfd, count: nfds_t, timeout_ms: c_int, size: size_t) -> c_int = |real| {
        let fits = size / size_of::<pollfd>() >= count as usize;
        // SAFETY: the caller has so many entries; the real function ends a program that has not.
        if fits { unsafe { watch(set, count, of_ms(timeout_ms), std::ptr::null()) } } else { None }
    };
    /// ppoll(2)
    fn ppoll(set: *mut pollfd, count: nfds_t, timeout: *const timespec, signals: *const sigset_t) -> c_int =
        // SAFETY: the caller has so many entries, and a timeout and signals or none.
        |real| unsafe { watch(set, count, of_timespec(timeout), signals) };
    /// ppoll(2), as programs compiled with _FORTIFY_SOURCE call it
    fn __ppoll_chk(set: *mut pollfd, count: nfds_t, timeout: *const timespec, signals: *const sigset_t, size: size_t) -> c_int = |real| {
        let fits = size / size_of::<pollfd>() >= count as usize;
        // SAFETY: the caller has so many entries; the real function ends a program that has not.
        if fits { unsafe { watch(set, count, of_timespec(timeout), signals) } } else { None }
    };
    /// select(2)
    fn select(count: c_int, readable: *mut fd_set, writable: *mut fd_set, broken: *mut fd_set, timeout: *mut timeval) -> c_int = |real| {
        // SAFETY: the caller's sets and timeout are there or null.
        unsafe {
            let left = timeout.as_ref().map(|left| {
                Duration::from_secs(left.tv_sec.max(0) as u64) + Duration::from_micros(left.tv_usec.max(0) as u64)
            });
            select_by_poll(count, readable, writable, broken, left, std::ptr::null())
        }
    };
    /// pselect(2)
    fn pselect(count: c_int, readable: *mut fd_set, writable: *mut fd_set, broken: *mut fd_set, timeout: *const timespec, signals: *const sigset_t) -> c_int = |real| {
        // SAFETY: the caller's sets, timeout and signals are there or null.
        unsafe { select_by_poll(count, readable, writable, broken, of_timespec(timeout), signals) }
    };

    /// epoll_ctl(2)
    fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int = |real| {
        let own = |operation, fd, event: Option<epoll_event>| {
            let mut event = event;
            let before = errno();
            let event = event.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
            let result = real(set, operation, fd, event);
            if result >= 0 {
                give::<c_int>(Err(before));
            }
            result
        };
        // SAFETY: the caller's event is there or null.
        events::control(set, operation, fd, unsafe { events::read(event.cast()) }, own)
    };
    /// epoll_wait(2)
    fn epoll_wait(set: c_int, found: *mut epoll_event, max: c_int, timeout_ms: c_int) -> c_int =
        // SAFETY: the caller has room for so many.
        |real| unsafe { events::wait(set, found, max, of_ms(timeout_ms), std::ptr::null()) };
    /// epoll_pwait(2)
    fn epoll_pwait(set: c_int, found: *mut epoll_event, max: c_int, timeout_ms: c_int, signals: *const sigset_t) -> c_int =
        // SAFETY: the caller has room for so many, and signals or none.
        |real| unsafe { events::wait(set, found, max, of_ms(timeout_ms), signals) };
    /// epoll_pwait2(2)
    fn epoll_pwait2(set: c_int, found: *mut epoll_event, max: c_int, timeout: *const timespec, signals: *const sigset_t) -> c_int =
        // SAFETY: the caller has room for so many, and a timeout and signals or none.
        |real| unsafe { events::wait(set, found, max, of_timespec(timeout), signals) };

    /// close(2)
    fn close(fd: c_int) -> c_int = |real| close_one(fd, || real(fd));
    /// close_range(2)
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = |real| {
        // With that flag nothing is closed yet.
        let closes = first <= last && flags & CLOSE_RANGE_CLOEXEC == 0;
        if closes { close_all(&(to_fd(first)..=to_fd(last)), flags) } else { None }
    };
    /// closefrom(3)
    fn closefrom(first: c_int) -> () = |real| {
        // Before Linux 5.9 there is no close_range: libc closes what /proc lists, the library's own as well.
        close_all(&(first.max(0)..=c_int::MAX), 0).filter(|result| *result == 0).map(drop)
    };
    /// dup(2)
    fn dup(fd: c_int) -> c_int = |real| Some(duplicate(fd, None, || real(fd)));
    /// dup2(2)
    fn dup2(fd: c_int, to: c_int) -> c_int = |real| Some(duplicate(fd, Some(to), || real(fd, to)));
    /// dup3(2)
    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int = |real| Some(duplicate(fd, Some(to), || real(fd, to, flags)));
    /// fcntl(2)
    fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int = |real| {
        let duplicates = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
        duplicates.then(|| duplicate(fd, None, || real(fd, command, argument)))
    };
    /// fcntl(2), with 64-bit offsets
    fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int = |real| {
        let duplicates = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
        duplicates.then(|| duplicate(fd, None, || real(fd, command, argument)))
    };

    /// syscall(2): bpf has no function of its own
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long = |real| {
        if number == libc::SYS_bpf && ownership::is_owner() {
            let _blocked = Blocked::all();
            // SAFETY: the kernel demands of the caller's attributes what this does.
            unsafe { program::about_to_load(a, b, c) }.map(|program| {
                let result = real(number, a, b, c, d, e, f);
                let result = if result < 0 { Err(errno()) } else { Ok(result as c_int) };
                give(program::loaded(program, result)).into()
            })
        } else {
            None
        }
    };

    /// sigaction(2)
    fn sigaction(signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction) -> c_int = |real| {
        // SAFETY: null, or the caller's.
        before_handler(signal, unsafe { action.as_ref() }.map_or(libc::SIG_DFL, |action| action.sa_sigaction))
    };
    /// signal(2)
    fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);
    /// signal(2), by another name
    fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);
    /// signal(2), by another name
    fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);
    /// sysv_signal(3)
    fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);
    /// sysv_signal(3), as strictly conforming programs call it
    fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);
    /// sigset(3)
    fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t = |real| before_handler(signal, handler);

    /// access(2)
    fn access(path: *const c_char, mode: c_int) -> c_int =
        // SAFETY: the caller's path is a string.
        |real| unsafe { procfs::is_ours(path) }.then(|| give(if mode & libc::W_OK == 0 { Ok(0) } else { Err(libc::EACCES) }));
    /// open(2)
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int =
        // SAFETY: the caller's path is a string.
        |real| unsafe { procfs::open(path) }.map(give);
    /// open(2), with 64-bit offsets
    fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int =
        // SAFETY: the caller's path is a string.
        |real| unsafe { procfs::open(path) }.map(give);
    /// openat(2)
    fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int =
        // SAFETY: the caller's path is a string.
        |real| unsafe { procfs::open(path) }.map(give);
    /// openat(2), with 64-bit offsets
    fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int =
        // SAFETY: the caller's path is a string.
        |real| unsafe { procfs::open(path) }.map(give);
    /// fopen(3)
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE = |real| stream(path);
    /// fopen(3), with 64-bit offsets
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE = |real| stream(path);
}

/// Always `None`.
fn before_handler<T>(signal: c_int, handler: sighandler_t) -> Option<T> {
    /// SIG_HOLD of sigset(3).
    const SIG_HOLD: sighandler_t = 2;
    if ![libc::SIG_DFL, libc::SIG_IGN, SIG_HOLD].contains(&handler) {
        keeper::start_before_handler();
        crate::signals::note_handler(signal);
    }
    None
}

fn stream(path: *const c_char) -> Option<*mut FILE> {
    // SAFETY: the caller's path is a string.
    let fd = give(unsafe { procfs::open(path) }?);
    // SAFETY: the descriptor was just opened, and is the stream's from here on.
    Some(if fd < 0 { std::ptr::null_mut() } else { unsafe { libc::fdopen(fd, c"r".as_ptr()) } })
}

/// `select` as a `poll`, where a message socket or connection is among what is asked for.
///
/// # Safety
///
/// The sets are null or can be read and written, the signals null or a set.
unsafe fn select_by_poll(
    count: c_int,
    readable: *mut fd_set,
    writable: *mut fd_set,
    broken: *mut fd_set,
    timeout: Option<Duration>,
    signals: *const sigset_t,
) -> Option<c_int> {
    let sets = [
        (readable, libc::POLLIN | libc::POLLRDNORM, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
        (writable, libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
        (broken, libc::POLLPRI, libc::POLLPRI),
    ];
    let asked_of = |fd| {
        // SAFETY: the sets are as the contract says, and the number is below their size.
        let asked = sets.iter().filter(|(set, ..)| !set.is_null() && unsafe { libc::FD_ISSET(fd, *set) });
        asked.fold(0, |events, (_, asked, _)| events | asked)
    };
    let numbers = 0..count.clamp(0, libc::FD_SETSIZE as c_int);
    if !numbers.clone().any(|fd| table::may_have(fd) && asked_of(fd) != 0) {
        return None;
    }
    let blocked = Blocked::all();
    // On the stack: a child of `_Fork` may not wait for the allocator's lock.
    let mut polled = [pollfd { fd: -1, events: 0, revents: 0 }; libc::FD_SETSIZE];
    let asked = numbers.filter(|fd| asked_of(*fd) != 0);
    let count = polled.iter_mut().zip(asked).map(|(place, fd)| (place.fd, place.events) = (fd, asked_of(fd))).count();
    let polled = &mut polled[..count];
    // SAFETY: the signals are as the contract says.
    let result = watch::watch(polled, timeout, unsafe { signals.as_ref() }, &blocked)?;
    if result < 0 {
        return Some(result);
    }
    let mut found = 0;
    for (set, events, answers) in sets.into_iter().filter(|(set, ..)| !set.is_null()) {
        // SAFETY: as above.
        unsafe { libc::FD_ZERO(set) };
        for polled in &*polled {
            if polled.events & events != 0 && polled.revents & answers != 0 {
                // SAFETY: as above.
                unsafe { libc::FD_SET(polled.fd, set) };
                found += 1;
            }
        }
    }
    Some(found)
}
