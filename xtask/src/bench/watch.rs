//! perf and strace, which count a server's system calls. They slow it down, so times are never taken from a measurement
//! that is watched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::process::{descendants, output};

const PERF_TIMEOUT: Duration = Duration::from_secs(60);
const STRACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Counted by [`Watch::Count`].
const SYSCALLS: &str = "raw_syscalls:sys_enter";

/// The observer of a measurement.
#[derive(Clone, Debug)]
pub(crate) enum Watch {
    Nothing,
    /// perf counts the system calls of the server's processes, and writes the count to the file.
    Count(PathBuf),
}

/// Whether perf may count system calls here. The command may be missing, or not be for this kernel.
pub(super) fn look_for_perf() -> Result<(), String> {
    let mut perf = Command::new("perf");
    let said = output(perf.args(["stat", "-a", "-e", SYSCALLS, "--", "true"]), PERF_TIMEOUT);
    said.map(drop).map_err(|error| format!("perf does not run (install linux-perf, be root): {error:#}"))
}

impl Watch {
    /// The client's command, during which the server is watched.
    pub(super) fn client(&self, inner: Command, server: u32) -> Command {
        let Watch::Count(file) = self else { return inner };
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x,", "-e", SYSCALLS, "-p", &processes(server), "-o"]).arg(file);
        perf.arg("--").arg(inner.get_program()).args(inner.get_args());
        perf
    }
}

/// A server's command under strace, which counts its system calls from start to end and writes a summary to the file.
pub(super) fn under_strace(inner: Command, summary: &Path) -> Command {
    let mut command = Command::new("strace");
    // -D: the server is our child, and strace its own: SIGTERM then reaches the server.
    command.args(["-D", "-f", "-c", "-o"]).arg(summary).arg(inner.get_program()).args(inner.get_args());
    command
}

/// A server and all that it has started, as perf takes them.
fn processes(server: u32) -> String {
    let all: Vec<String> = std::iter::once(server).chain(descendants(server)).map(|pid| pid.to_string()).collect();
    all.join(",")
}

/// The system calls that [`Watch::Count`] has counted.
pub(super) fn counted(file: &Path) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("perf left no {}", file.display()))?;
    perf_count(&text).with_context(|| format!("perf said:\n{text}"))
}

/// "1234,,raw_syscalls:sys_enter,5678,100.00,,"
fn perf_count(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(SYSCALLS))?;
    match line.split(',').next()? {
        // It did not run at all, as a server whose messages the kernel answers.
        "<not counted>" => Some(0),
        count => count.parse().ok(),
    }
}

/// Waits for the summary that strace writes when its server has ended; returns the number of calls.
pub(super) fn await_strace(summary: &Path) -> Result<u64> {
    let deadline = Instant::now() + STRACE_TIMEOUT;
    loop {
        let text = fs::read_to_string(summary).unwrap_or_default();
        if let Some(total) = strace_total(&text) {
            return Ok(total);
        }
        ensure!(Instant::now() < deadline, "strace wrote no summary, but: '{text}'");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// "100.00    0.000000           0        42         3 total": seconds, usecs, calls, errors.
fn strace_total(summary: &str) -> Option<u64> {
    let line = summary.lines().find(|line| line.trim_end().ends_with(" total"))?;
    line.split_ascii_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strace_output() {
        let text = "% time     seconds  usecs/call     calls    errors syscall\n\
                    ------ ----------- ----------- --------- --------- ----------------\n\
                     60.00    0.000010           1        40         2 recvfrom\n\
                     40.00    0.000002           1         2           sendto\n\
                    ------ ----------- ----------- --------- --------- ----------------\n\
                    100.00    0.000012           0        42         2 total\n";
        assert_eq!(strace_total(text), Some(42));
        assert_eq!(strace_total("nothing"), None);
    }

    #[test]
    fn perf_output() {
        let text = |count: &str| format!("# started on Sun\n\n{count},,raw_syscalls:sys_enter,5678,100.00,,\n");
        assert_eq!(perf_count(&text("1234")), Some(1234));
        assert_eq!(perf_count(&text("<not counted>")), Some(0));
        assert_eq!(perf_count(&text("<not supported>")), None);
        assert_eq!(perf_count(""), None);
    }

    #[test]
    fn server_and_client_are_run_under_the_tool() {
        let shown = |command: &Command| crate::process::display(command);
        let client = || {
            let mut command = Command::new("client");
            command.arg("x");
            command
        };
        let count = Watch::Count("/t/f".into());
        let pid = i32::MAX as u32; // no process has it, so it has no children
        assert_eq!(
            shown(&count.client(client(), pid)),
            format!("perf stat -x, -e {SYSCALLS} -p {pid} -o f -- client x")
        );
        assert_eq!(shown(&under_strace(client(), Path::new("/t/f"))), "strace -D -f -c -o f client x");
        assert_eq!(shown(&Watch::Nothing.client(client(), pid)), "client x");
    }
}
