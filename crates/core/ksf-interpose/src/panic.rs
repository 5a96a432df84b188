//! Panics of a library in a program that knows nothing of it.

use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

/// From now on a panic of this library says so in one line on standard error and ends the process with SIGABRT, at once.
/// The hook of std would allocate and open files for a backtrace: functions that the library defines once more, which may
/// wait for a lock that the thread holds. A handler of the program's for SIGABRT might, too: it is not called.
pub fn abort_on_panic(name: &'static str) {
    static NAME: OnceLock<&str> = OnceLock::new();
    let _ = NAME.set(name);
    // What has no size is not allocated: the name is not the closure's.
    std::panic::set_hook(Box::new(|info| {
        let name = NAME.get().unwrap_or(&"ksf");
        let mut line = [0; 512];
        let mut rest = &mut line[..];
        let _ = writeln!(rest, "{name}: {info}");
        let left = rest.len();
        let line = &line[..line.len() - left];
        // SAFETY: only written to; a program that has closed it is told nothing.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, line);
        // SAFETY: a signal's default is always allowed.
        unsafe { libc::signal(libc::SIGABRT, libc::SIG_DFL) };
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_the_process_without_its_handlers() {
        extern "C" fn handler(_: libc::c_int) {
            // SAFETY: ends the process.
            unsafe { libc::_exit(3) };
        }
        // SAFETY: the child calls nothing that takes a lock which another thread might hold; the status is written where it
        // is told to.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGABRT, handler as extern "C" fn(libc::c_int) as libc::sighandler_t);
                abort_on_panic("test");
                panic!("as it is meant");
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "{status:x}");
    }
}
