//! `ksf accel hop attach` as a process.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::ksf;

/// `ksf accel hop attach ARGS` that has begun; killed when dropped.
pub(crate) struct Attached {
    child: Child,
    errors: BufReader<ChildStderr>,
    pub(crate) said: String,
}

impl Attached {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_careful(&[&["--no-fionread"], args].concat())
    }

    pub(crate) fn start_careful(args: &[&str]) -> Self {
        let mut command = ksf();
        command.args(["accel", "hop", "attach", "--no-splice"]).args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ksf starts");
        let errors = BufReader::new(child.stderr.take().unwrap());
        let mut attached = Self { child, errors, said: String::new() };
        while !attached.said.contains("joining connections ") {
            let bytes = attached.errors.read_line(&mut attached.said).unwrap();
            assert!(bytes > 0, "it ended: {}", attached.said);
        }
        attached
    }

    /// Interrupts it as Ctrl-C does; what it printed.
    pub(crate) fn interrupt(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        let mut out = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{}", self.said);
        out
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
