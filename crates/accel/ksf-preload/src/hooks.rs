//! The functions of libc that are defined here once more.
//!
//! None of them panics on what a program passes.

use std::ffi::{c_char, c_int, c_uint, c_void};

use ksf_interpose::errno::{errno, fail, set_errno};
use libc::{
    cmsghdr, epoll_event, msghdr, pid_t, pthread_attr_t, pthread_t, sigset_t, sockaddr, socklen_t, ssize_t, timespec,
};

use crate::accept::Call;
use crate::environment::Target;
use crate::exec::own_environment;
use crate::process::{Entered, enter, is_inside, process};
use crate::real::{self, Strings, ThreadMain};
use crate::table::{self, DescriptorKind};
use crate::{accept as accepting, descriptor, exec, listener, pin, ports, wait, worker};

/// Defines functions of libc.
macro_rules! hooks {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty { $($body:tt)* })*) => { $(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As its manual page demands.
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
            // SAFETY: each function hands on what its caller passes, to the function whose manual page demands the same
            // of both.
            unsafe { $($body)* }
        }
    )* };
}

/// Does something beside the program's call; `errno` stays what the program's call left.
fn beside(action: impl FnOnce(&Entered)) {
    let errno = errno();
    if let Some(entered) = enter() {
        action(&entered);
    }
    set_errno(errno);
}

/// The program is about to give up what a number stands for. True: [`given_up`] is to be called after it.
#[inline]
fn closing(fd: c_int) -> bool {
    match table::kind(fd) {
        DescriptorKind::None | DescriptorKind::Own => false,
        kind => {
            beside(|entered| closed(entered, fd, kind));
            matches!(kind, DescriptorKind::Listener(_))
        }
    }
}

/// The program has given up listeners.
#[cold]
fn given_up() {
    beside(listener::tell_closed);
}

fn closed(entered: &Entered, fd: c_int, kind: DescriptorKind) {
    match kind {
        DescriptorKind::Listener(_) => listener::forget(entered, fd),
        DescriptorKind::Epoll(index) => worker::close_instance(entered, index),
        DescriptorKind::Foreign | DescriptorKind::MayListen => {
            table::set_kind(fd, DescriptorKind::None);
        }
        DescriptorKind::None | DescriptorKind::Own => {}
    }
}

/// Before and after a number is put onto another.
///
/// # Safety
///
/// `duplicate` is `dup2` or `dup3` of these numbers.
unsafe fn onto(from: c_int, to: c_int, duplicate: impl FnOnce() -> c_int) -> c_int {
    let (source, target) = (table::kind(from), table::kind(to));
    let nothing = source == DescriptorKind::None && target == DescriptorKind::None;
    // One that fails must not have closed anything.
    if nothing || from == to || rustix::io::fcntl_getfd(descriptor::borrow(from)).is_err() || from < 0 {
        return duplicate();
    }
    if target == DescriptorKind::Own {
        beside(|_| descriptor::make_room(to));
    }
    let was_listener = closing(to);
    let result = duplicate();
    if was_listener {
        given_up();
    }
    copied(from, result);
    result
}

#[inline]
fn copied(from: c_int, to: c_int) {
    if to >= 0 && matches!(table::kind(from), DescriptorKind::Listener(_) | DescriptorKind::MayListen) {
        beside(|entered| listener::copied(entered, from, to));
    }
}

/// After `fcntl` with a command that duplicates.
#[inline]
fn controlled(fd: c_int, command: c_int, result: c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        copied(fd, result);
    }
    result
}

/// A message has come, perhaps with descriptors: a listener among them may be watched before the program accepts.
///
/// # Safety
///
/// `recvmsg` has filled the message in.
#[cold]
unsafe fn received(message: &msghdr) {
    // SAFETY: the kernel has written `msg_controllen` bytes of whole headers.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null, or a header in that memory.
    while let Some(&cmsghdr { cmsg_level, cmsg_type, cmsg_len }) = unsafe { header.as_ref() } {
        if (cmsg_level, cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as above; behind the header there are so many descriptors.
            let (first, bytes) = unsafe { (libc::CMSG_DATA(header), cmsg_len - libc::CMSG_LEN(0) as usize) };
            let number = |at| {
                // SAFETY: within those bytes.
                unsafe { first.cast::<c_int>().add(at).read_unaligned() }
            };
            let numbers = (0..bytes / size_of::<c_int>()).map(number);
            numbers.for_each(listener::received);
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

/// Numbers that the program closes by range, as far as they are known here. False: nothing is its own here.
fn closing_range(first: c_uint, last: c_uint) -> bool {
    let Some(entered) = enter() else { return false };
    for (fd, kind) in table::marked(first, last) {
        closed(&entered, fd, kind);
    }
    true
}

/// `close_range` with this flag closes nothing.
const CLOSE_RANGE_CLOEXEC: c_int = 4;

hooks! {
    /// bind(2)
    fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
        let result = real::bind(fd, address, length);
        if result == 0
            && process().is_some()
            && matches!(c_int::from((*address).sa_family), libc::AF_INET | libc::AF_INET6)
            && listener::may_listen(fd)
        {
            beside(|entered| listener::bound(entered, fd));
        }
        result
    }

    /// listen(2)
    fn listen(fd: c_int, backlog: c_int) -> c_int {
        let result = real::listen(fd, backlog);
        if result == 0 && process().is_some() {
            beside(|entered| listener::listened(entered, fd, backlog));
        }
        result
    }

    /// accept(2)
    fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
        accepting::accept(Call { fd, address, length, flags: None })
    }

    /// accept4(2)
    fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
        accepting::accept(Call { fd, address, length, flags: Some(flags) })
    }

    /// connect(2)
    fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
        // The program has bound the source address of a connection. Its next calls are to cost nothing.
        if table::kind(fd) == DescriptorKind::MayListen {
            closing(fd);
        }
        ports::connect(fd, address, length)
    }

    /// recvmsg(2)
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        let result = real::recvmsg(fd, message, flags);
        if result >= 0 && (*message).msg_controllen > 0 && process().is_some() {
            received(&*message);
        }
        result
    }

    /// shutdown(2)
    fn shutdown(fd: c_int, how: c_int) -> c_int {
        let result = real::shutdown(fd, how);
        if result == 0 && how != libc::SHUT_WR && let DescriptorKind::Listener(slot) = table::kind(fd) {
            beside(|entered| worker::end_shut(entered, slot));
        }
        result
    }

    /// close(2)
    fn close(fd: c_int) -> c_int {
        // The library closes a descriptor of its own, such as a question's socket. The number may still be marked for one that
        // the program has closed unseen.
        if is_inside() {
            return real::close(fd);
        }
        if table::kind(fd) == DescriptorKind::Own && process().is_some_and(|process| process.is_own()) {
            return fail(libc::EBADF);
        }
        let was_listener = closing(fd);
        let result = real::close(fd);
        if was_listener {
            given_up();
        }
        result
    }

    /// close_range(2)
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        let errno = errno();
        if flags & CLOSE_RANGE_CLOEXEC != 0 || first > last || !closing_range(first, last) {
            return real::close_range(first, last, flags);
        }
        let result = descriptor::close_range_around(first, last, flags);
        given_up();
        if result == 0 {
            set_errno(errno);
        }
        result
    }

    /// closefrom(3)
    fn closefrom(first: c_int) -> () {
        let errno = errno();
        let from = first.max(0) as c_uint;
        if !closing_range(from, c_uint::MAX) || descriptor::close_range_around(from, c_uint::MAX, 0) != 0 {
            // Before Linux 5.9, libc closes what /proc lists, this library's own as well: they are missed, not trusted.
            real::closefrom(first);
        }
        given_up();
        set_errno(errno);
    }

    /// dup(2)
    fn dup(fd: c_int) -> c_int {
        let result = real::dup(fd);
        copied(fd, result);
        result
    }

    /// dup2(2)
    fn dup2(from: c_int, to: c_int) -> c_int {
        onto(from, to, || real::dup2(from, to))
    }

    /// dup3(2)
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
        onto(from, to, || real::dup3(from, to, flags))
    }

    /// fcntl(2), whose last argument may be missing: then what is handed on is not looked at either.
    fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
        controlled(fd, command, real::fcntl(fd, command, argument))
    }

    /// fcntl(2), with 64-bit offsets
    fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
        controlled(fd, command, real::fcntl64(fd, command, argument))
    }

    /// epoll_ctl(2)
    fn epoll_ctl(epoll: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        match table::kind(fd) {
            DescriptorKind::Listener(_) | DescriptorKind::MayListen => worker::control(epoll, op, fd, event),
            _ => real::epoll_ctl(epoll, op, fd, event),
        }
    }

    /// epoll_wait(2)
    fn epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int) -> c_int {
        wait::wait(epoll, events, || real::epoll_wait(epoll, events, count, timeout_ms))
    }

    /// epoll_pwait(2)
    fn epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int, signals: *const sigset_t) -> c_int {
        wait::wait(epoll, events, || real::epoll_pwait(epoll, events, count, timeout_ms, signals))
    }

    /// epoll_pwait2(2)
    fn epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, signals: *const sigset_t) -> c_int {
        wait::wait(epoll, events, || real::epoll_pwait2(epoll, events, count, timeout, signals))
    }

    /// execve(2)
    fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
        exec::exec(Target::Path(path), environment, |environment| real::execve(path, arguments, environment))
    }

    /// execv(3)
    fn execv(path: *const c_char, arguments: Strings) -> c_int {
        execve(path, arguments, own_environment())
    }

    /// execvpe(3)
    fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
        exec::exec(Target::Name(file), environment, |environment| real::execvpe(file, arguments, environment))
    }

    /// execvp(3)
    fn execvp(file: *const c_char, arguments: Strings) -> c_int {
        execvpe(file, arguments, own_environment())
    }

    /// fexecve(3)
    fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
        exec::exec(Target::Open(fd), environment, |environment| real::fexecve(fd, arguments, environment))
    }

    /// execveat(2)
    fn execveat(directory: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int) -> c_int {
        exec::exec(Target::At(directory, path, flags), environment, |environment| real::execveat(directory, path, arguments, environment, flags))
    }

    /// posix_spawn(3)
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int {
        spawn(Target::FromRoot(path), environment, |environment| real::posix_spawn(pid, path, actions, attributes, arguments, environment))
    }

    /// posix_spawnp(3)
    fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int {
        spawn(Target::named_from_root(file), environment, |environment| real::posix_spawnp(pid, file, actions, attributes, arguments, environment))
    }

    /// pthread_create(3)
    fn pthread_create(thread: *mut pthread_t, attributes: *const pthread_attr_t, main: ThreadMain, argument: *mut c_void) -> c_int {
        pin::unbound(|| real::pthread_create(thread, attributes, main, argument))
    }

    /// thrd_create(3), which makes its thread inside of libc
    fn thrd_create(thread: *mut pthread_t, main: *const c_void, argument: *mut c_void) -> c_int {
        pin::unbound(|| real::thrd_create(thread, main, argument))
    }

    /// system(3), which starts its shell inside of libc, as do the next two
    fn system(command: *const c_char) -> c_int {
        pin::unbound(|| real::system(command))
    }

    /// popen(3)
    fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
        pin::unbound(|| real::popen(command, mode))
    }

    /// wordexp(3)
    fn wordexp(words: *const c_char, result: *mut c_void, flags: c_int) -> c_int {
        pin::unbound(|| real::wordexp(words, result, flags))
    }
}

/// # Safety
///
/// `environment` is null or a list of strings that ends with null; the target's path or name is a string.
unsafe fn spawn(target: Target, environment: Strings, run: impl FnOnce(Strings) -> c_int) -> c_int {
    // SAFETY: handed on from the caller.
    pin::unbound(|| unsafe { crate::environment::restored(target, environment, run) })
}
