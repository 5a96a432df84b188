//! `tests/c/server.c` under the library, and other servers: whoever is started here ends with the test.

use std::process::{Command, Stdio};

use ksf_accel::Started;
use ksf_test::{PATIENCE, Running, wait_until};

use super::{accelerated, compiled};

/// A server and all processes that come from it.
pub(crate) struct Server {
    program: Running,
    pub(crate) port: u16,
    /// Of the processes that serve.
    group: u32,
}

impl Server {
    pub(crate) fn start(holder: &Started, style: &str, workers: usize) -> Server {
        Server::start_as(accelerated(compiled("server"), holder), style, workers, 0)
    }

    pub(crate) fn start_as(mut command: Command, style: &str, workers: usize, port: u16) -> Server {
        command.args([style, &workers.to_string(), &port.to_string()]);
        Server::start_after(command, style)
    }

    /// One that is started by another program, which may say something first.
    pub(crate) fn start_after(mut command: Command, style: &str) -> Server {
        let mut program = Running::start_group(command.stdout(Stdio::piped()));
        let numbers = |line: String| -> Option<(u16, u32)> {
            let (port, group) = line.split_once(' ')?;
            Some((port.parse().ok()?, group.parse().ok()?))
        };
        let told = std::iter::from_fn(|| program.out.within(PATIENCE)).find_map(numbers);
        let (port, group) = told.unwrap_or_else(|| panic!("{style}: told neither port nor group"));
        Server { program, port, group }
    }

    /// A server on the given address.
    pub(crate) fn other(mut command: Command, port: u16) -> Server {
        let program = Running::start_group(&mut command);
        let group = program.pid();
        Server { program, port, group }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Of the first process; it may have left others.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.program.wait()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its process group is its own: whatever it has forked ends too.
        let group = rustix::process::Pid::from_raw(self.group as i32).expect("a process group");
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        wait_until("the server has ended", || !lives(self.group));
    }
}

/// True while a process of the group has its memory and its descriptors; what its parent has not waited for has none.
fn lives(group: u32) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats.into_iter().any(|stat| {
        // After the name: state, parent, process group.
        let fields: Vec<&str> = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        fields.len() > 2 && fields[0] != "Z" && fields[2] == group.to_string()
    })
}
