//! Panics of a library in a program that knows nothing of it.

use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

/// From now on a panic of this library writes one line to standard error and ends the process with SIGABRT, at once.
/// The hook of std would allocate and open files for a backtrace: functions that the library defines once more, which may
/// wait for a lock that the thread holds. A handler of the program's for SIGABRT might, too: it is not called.
pub fn abort_on_panic(name: &'static str) {
    static NAME: OnceLock<&str> = OnceLock::new();
    let _ = NAME.set(name);
    // What has no size is not allocated: the name is not the closure's.
    std::panic::set_hook(Box::new(|info| {
        let name = NAME.get().unwrap_or(&"ksf");
        let mut line = [0; 512];
        let room = line.len() - 1;
        let mut rest = &mut line[..room];
        let _ = write!(rest, "{name}: {info}");
        let end = room - rest.len();
        line[..end].iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b' ');
        line[end] = b'\n';
        // SAFETY: used for one write. A program that has closed standard error and opened another file under its number
        // gets the line there, as it gets those of libc.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, &line[..=end]);
        // SAFETY: a signal's default is always allowed.
        unsafe { libc::signal(libc::SIGABRT, libc::SIG_DFL) };
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_panic_writes_a_line_and_ends_the_process_without_its_handlers() {
        extern "C" fn handler(_: libc::c_int) {
            // SAFETY: ends the process.
            unsafe { libc::_exit(3) };
        }
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child calls nothing that takes a lock which another thread might hold; the status is written where it
        // is told to.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGABRT, handler as extern "C" fn(libc::c_int) as libc::sighandler_t);
                libc::dup2(writer.as_raw_fd(), libc::STDERR_FILENO);
                abort_on_panic("test");
                panic!("as it is\nmeant");
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "{status:x}");
        drop(writer);
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("test: panicked at ") && said.ends_with(": as it is meant\n"), "{said:?}");
        assert_eq!(said.lines().count(), 1, "{said:?}");
    }
}
