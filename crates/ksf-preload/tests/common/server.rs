//! `tests/c/server.c` under the library, and other servers: whoever is started here ends with the test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use ksf_accel::Started;

use super::{accelerated, compiled};

/// A server and all processes that come from it.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
}

impl Server {
    pub(crate) fn start(holder: &Started, style: &str, workers: usize) -> Server {
        Server::start_as(accelerated(compiled("server"), holder), style, workers, 0)
    }

    pub(crate) fn start_as(mut command: Command, style: &str, workers: usize, port: u16) -> Server {
        command.args([style, &workers.to_string(), &port.to_string()]).stdout(Stdio::piped());
        let mut child = in_own_group(&mut command).spawn().expect("the server starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).unwrap();
        let port = line.trim().parse().unwrap_or_else(|_| panic!("{style}: no port but {line:?}"));
        Server { child, port }
    }

    /// A server that listens where it was told to.
    pub(crate) fn other(mut command: Command, port: u16) -> Server {
        Server { child: in_own_group(&mut command).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")), port }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Of the first process; it may have left others.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().expect("a child")
    }
}

fn in_own_group(command: &mut Command) -> &mut Command {
    std::os::unix::process::CommandExt::process_group(command, 0)
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its process group is its own: whatever it has forked ends too, unless it has left the group.
        let group = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a process id");
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }
}
