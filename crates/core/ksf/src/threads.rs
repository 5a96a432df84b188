//! The threads of a process that serves, and the end of the process when one of them panics.
//!
//! A panic in work for one connection, request or job ends that alone: the code that calls a service, a task or a job of a pool
//! catches it and counts it. All other code of a thread works for the whole process. If it panics, the locks and queues that it
//! was changing are in an unknown state, and a part of the server is missing, so the process must end.

use std::io::{self, Write as _};
use std::thread::{self, JoinHandle};

/// Starts a thread. A panic that reaches the end of `body` aborts the process, so joining the thread never returns an error.
///
/// # Errors
///
/// The system refused the thread; `body` is dropped.
pub fn start<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::Builder::new().name(name.into()).spawn(move || {
        let _guard = AbortOnPanic;
        body()
    })
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            // The panic has printed its message. Without a stderr there is nowhere to write to.
            let name = thread::current().name().unwrap_or_default().to_owned();
            let _ =
                writeln!(io::stderr(), "ksf: thread {name} panicked; the process cannot serve without it and aborts");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;

    use ksf_test::{Helper, Running, is_helper, listen};

    use super::*;

    #[test]
    fn panic_on_a_thread_aborts_the_process() {
        let mut command = Helper::command("threads::tests::helper_panics");
        let mut helper = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
        assert_eq!(helper.wait().signal(), Some(libc::SIGABRT));
        let said = helper.err.seen().join("\n");
        assert!(said.contains("on purpose") && said.contains("ksf: thread ksf-part panicked; "), "{said}");
    }

    #[test]
    #[ignore = "a part of the test above"]
    fn helper_panics() {
        if !is_helper() {
            return;
        }
        start("ksf-part", || panic!("on purpose")).unwrap();
        while listen().is_some() {}
    }

    #[test]
    fn thread_that_ends_returns_its_result() {
        let thread = start("ksf-part", || thread::current().name().map(str::to_owned)).unwrap();
        assert_eq!(thread.join().unwrap().as_deref(), Some("ksf-part"));
    }
}
