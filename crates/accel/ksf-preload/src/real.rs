//! The next definition of a function that is defined here once more: libc's, or another library's that is preloaded.

use std::ffi::{c_char, c_int, c_uint, c_void};

use ksf_interpose::Next;
use libc::{epoll_event, msghdr, pid_t, pthread_attr_t, pthread_t, sigset_t, sockaddr, socklen_t, ssize_t, timespec};

/// A list of strings that ends with null: arguments or environment.
pub(crate) type Strings = *const *const c_char;
pub(crate) type ThreadMain = extern "C" fn(*mut c_void) -> *mut c_void;

/// Defines `name(arguments)`, which calls the next definition. Looked up when the library starts: later, dlsym might
/// allocate or take a lock.
macro_rules! real {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            /// # Safety
            ///
            /// As its manual page demands.
            pub(crate) unsafe fn $name($($argument: $type),*) -> $result {
                // SAFETY: the function has this type by its manual page (variadic ones take their arguments where
                // others do, on the ABIs of Linux); the arguments are handed on from the caller.
                unsafe {
                    let function = next::$name.get();
                    let function =
                        std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> $result>(function);
                    function($($argument),*)
                }
            }
        )*

        #[allow(non_upper_case_globals)]
        mod next {
            use super::Next;
            $(pub(super) static $name: Next = Next::new(concat!(stringify!($name), "\0"));)*
        }

        /// Looks all of them up.
        pub(crate) fn find_all() {
            $(next::$name.look_up();)*
        }
    };
}

real! {
    fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn closefrom(first: c_int) -> ();
    fn dup(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    fn epoll_ctl(epoll: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    fn epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int) -> c_int;
    fn epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int, signals: *const sigset_t) -> c_int;
    fn epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, signals: *const sigset_t) -> c_int;
    fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int;
    fn execveat(directory: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int) -> c_int;
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
    fn posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
    fn thrd_create(thread: *mut pthread_t, main: *const c_void, argument: *mut c_void) -> c_int;
    fn system(command: *const c_char) -> c_int;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void;
    fn wordexp(words: *const c_char, result: *mut c_void, flags: c_int) -> c_int;
    fn pthread_create(thread: *mut pthread_t, attributes: *const pthread_attr_t, main: ThreadMain, argument: *mut c_void) -> c_int;
}
