//! `tests/c/server.c` under the library, and other servers: whoever is started here ends with the test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use ksf_accel::Started;

use super::{accelerated, compiled};

/// A server and all processes that come from it.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    /// Of the processes that serve.
    group: i32,
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
        let mut child = in_own_group(command.stdout(Stdio::piped())).spawn().expect("the server starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let numbers = |line: String| -> Option<[i32; 2]> {
            let (port, group) = line.split_once(' ')?;
            Some([port.parse().ok()?, group.parse().ok()?])
        };
        let told = lines.filter_map(numbers).next();
        let [port, group] = told.unwrap_or_else(|| panic!("{style}: told neither port nor group"));
        Server { child, port: port as u16, group }
    }

    /// A server that listens where it was told to.
    pub(crate) fn other(mut command: Command, port: u16) -> Server {
        let child = in_own_group(&mut command).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let group = child.id() as i32;
        Server { child, port, group }
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
        // Its process group is its own: whatever it has forked ends too.
        let group = rustix::process::Pid::from_raw(self.group).expect("a process group");
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
        super::wait_until("the server has ended", || !lives(self.group));
    }
}

/// True while a process of the group has its memory and its descriptors; what its parent has not waited for has none.
fn lives(group: i32) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats.into_iter().any(|stat| {
        // After the name: state, parent, process group.
        let fields: Vec<&str> = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        fields.len() > 2 && fields[0] != "Z" && fields[2] == group.to_string()
    })
}
