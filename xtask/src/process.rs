//! Servers under test: start, wait until ready, stop; none is left behind.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::cpu::Switches;
use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, set_parent_process_death_signal};

const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const STDERR_LINES_KEPT: usize = 30;

/// How a server shows that it can be used.
#[derive(Clone, Copy)]
pub(crate) enum Ready {
    /// By so many lines on stderr that hold the text.
    Lines(usize, &'static str),
    /// By accepting TCP connections on this port of 127.0.0.1.
    Port(u16),
}

/// A running server. Dropping it kills it.
pub(crate) struct Server {
    name: String,
    child: Child,
    stderr: Arc<Mutex<VecDeque<String>>>,
}

impl Server {
    /// Starts the command and waits until it is ready.
    pub(crate) fn start(name: &str, command: &mut Command, ready: Ready, timeout: Duration) -> Result<Server> {
        die_with_parent(command, Signal::TERM);
        let mut child = command
            // A group of its own: some servers send the SIGTERM that they get to their whole group (lighttpd).
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", display(command)))?;
        let stderr = Arc::new(Mutex::new(VecDeque::new()));
        let lines = follow(child.stderr.take().expect("stderr is piped"), stderr.clone());
        let mut server = Server { name: name.to_owned(), child, stderr };
        let deadline = Instant::now() + timeout;
        let is_ready = match ready {
            Ready::Lines(count, text) => server.wait_lines(&lines, count, text, deadline),
            Ready::Port(port) => server.wait_port(port, deadline),
        };
        is_ready.with_context(|| format!("command: {}", display(command)))?;
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks the server to end (SIGTERM) and waits for it. An end by that very signal is good, too:
    /// the small peers do not handle it. Says how often it slept and was preempted in its life.
    pub(crate) fn stop(self) -> Result<Switches> {
        self.end(Signal::TERM)
    }

    /// The same by another signal.
    pub(crate) fn end(mut self, signal: Signal) -> Result<Switches> {
        let before = Switches::of_children()?;
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).with_context(|| format!("cannot stop {}", self.name))?;
        let status = wait_timeout(&mut self.child, STOP_TIMEOUT)?
            .ok_or_else(|| anyhow!("{} did not end within {STOP_TIMEOUT:?} of {signal:?}; killed", self.name))?;
        use std::os::unix::process::ExitStatusExt;
        if status.success() || status.signal() == Some(signal.as_raw()) {
            return Ok(Switches::of_children()?.since(&before));
        }
        Err(self.failure(&format!("ended with {status}")))
    }

    /// The last of the lines that it has said on stderr lately that has the text.
    pub(crate) fn line_with(&self, text: &str) -> Option<String> {
        let lines = self.stderr.lock().expect("no holder panics");
        lines.iter().rev().find(|line| line.contains(text)).cloned()
    }

    /// Ends it as a crash does (SIGKILL), and waits until it is gone.
    pub(crate) fn kill(self) {
        drop(self);
    }

    fn wait_lines(&mut self, lines: &Receiver<String>, count: usize, text: &str, deadline: Instant) -> Result<()> {
        let mut seen = 0;
        while seen < count {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => seen += usize::from(line.contains(text)),
                Err(RecvTimeoutError::Timeout) => return Err(self.failure("was not ready in time")),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait()?;
                    return Err(self.failure(&format!("did not start ({status})")));
                }
            }
        }
        Ok(())
    }

    fn wait_port(&mut self, port: u16, deadline: Instant) -> Result<()> {
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(self.failure(&format!("did not start ({status})")));
            }
            if Instant::now() >= deadline {
                return Err(self.failure("was not ready in time"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// An error with the last lines that the server has said.
    fn failure(&self, what: &str) -> anyhow::Error {
        let lines = self.stderr.lock().expect("no holder panics");
        let said = if lines.is_empty() { "nothing".into() } else { Vec::from(lines.clone()).join("\n  ") };
        anyhow!("{} {what}; its stderr:\n  {said}", self.name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After stop() the child is reaped, and its number may be another's. Until then its group is killed: a master
        // that is killed alone leaves its workers behind.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Runs a command to its end and gives back its standard output.
/// A failure carries the last lines of its stderr.
pub(crate) fn output(command: &mut Command, timeout: Duration) -> Result<String> {
    Running::start(command)?.finish(timeout, &[0])
}

/// A command that runs beside this program. Dropping it kills it.
pub(crate) struct Running {
    command: String,
    child: Child,
    stderr: Arc<Mutex<VecDeque<String>>>,
    stdout: Option<JoinHandle<std::io::Result<String>>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Running> {
        die_with_parent(command, Signal::TERM);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", display(command)))?;
        let stderr = Arc::new(Mutex::new(VecDeque::new()));
        let _lines = follow(child.stderr.take().expect("stderr is piped"), stderr.clone());
        let mut stdout = child.stdout.take().expect("stdout is piped");
        let stdout = Some(std::thread::spawn(move || std::io::read_to_string(&mut stdout)));
        Ok(Running { command: display(command), child, stderr, stdout })
    }

    /// Waits until it has a handler for SIGINT (SigCgt of proc_pid_status(5)); before, an interrupt would just end it.
    pub(crate) fn wait_until_interruptible(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let path = format!("/proc/{}/status", self.child.id());
        while !catches_interrupt(&std::fs::read_to_string(&path).unwrap_or_default()) {
            if let Some(status) = self.child.try_wait()? {
                let said = Vec::from(self.stderr.lock().expect("no holder panics").clone()).join("\n  ");
                bail!("'{}' ended at once ({status}); its stderr:\n  {said}", self.command);
            }
            anyhow::ensure!(Instant::now() < deadline, "'{}' does not handle SIGINT", self.command);
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends it as Ctrl-C does, and gives back its standard output. Status 1 is as good as 0: it is for results that
    /// are not all well.
    pub(crate) fn interrupt(self, timeout: Duration) -> Result<String> {
        kill_process(Pid::from_child(&self.child), Signal::INT)
            .with_context(|| format!("cannot interrupt '{}'", self.command))?;
        self.finish(timeout, &[0, 1])
    }

    /// Waits until it ends with one of these statuses, and gives back its standard output.
    pub(crate) fn finish(mut self, timeout: Duration, good: &[i32]) -> Result<String> {
        let status = wait_timeout(&mut self.child, timeout)?;
        let said = || Vec::from(self.stderr.lock().expect("no holder panics").clone()).join("\n  ");
        let Some(status) = status else {
            bail!("'{}' did not end within {timeout:?}; killed. Its stderr:\n  {}", self.command, said());
        };
        let stdout = self.stdout.take().expect("it is taken once");
        let text = stdout.join().expect("the reader does not panic")?;
        if !status.code().is_some_and(|code| good.contains(&code)) {
            bail!("'{}' failed ({status}); its stderr:\n  {}", self.command, said());
        }
        Ok(text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // When it has ended, the child is reaped: both calls then do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn catches_interrupt(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & 1 << (Signal::INT.as_raw() - 1) != 0
}

/// A command as one would type it.
pub(crate) fn display(command: &Command) -> String {
    words(command).join(" ")
}

/// Program and arguments. Absolute paths lose their directory: reports name no paths of a machine.
fn words(command: &Command) -> Vec<String> {
    let short = |word: &OsStr| {
        let name = Path::new(word).file_name().filter(|_| word.as_bytes().starts_with(b"/"));
        name.unwrap_or(word).to_string_lossy().into_owned()
    };
    std::iter::once(command.get_program()).chain(command.get_args()).map(short).collect()
}

/// All processes that a process has started and that live, and theirs.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let mut parents = BTreeMap::<u32, Vec<u32>>::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // proc_pid_stat(5): the parent is the second field after the name, which may hold any letter.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        if let Some(parent) = parent {
            parents.entry(parent).or_default().push(pid);
        }
    }
    let mut found = parents.remove(&pid).unwrap_or_default();
    let mut next = 0;
    while let Some(child) = found.get(next) {
        found.extend(parents.remove(child).unwrap_or_default());
        next += 1;
    }
    found
}

/// A port that is free for TCP and UDP on 127.0.0.1 (another program can still be quicker).
pub(crate) fn free_port() -> Result<u16> {
    for _ in 0..100 {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free TCP port")?;
        let port = tcp.local_addr()?.port();
        if UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("found no port that is free for both TCP and UDP on 127.0.0.1");
}

/// Makes the kernel send a signal to the child when this process dies, even by SIGKILL.
pub(crate) fn die_with_parent(command: &mut Command, signal: Signal) {
    // SAFETY: the closure runs between fork and exec and makes one system call; it takes no lock
    // and allocates nothing.
    unsafe {
        command.pre_exec(move || Ok(set_parent_process_death_signal(Some(signal))?));
    }
}

fn wait_timeout(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Reads lines until the end of the stream, so that the child never blocks on a full pipe: sends
/// them on while somebody listens, and keeps the last ones.
fn follow(stream: impl std::io::Read + Send + 'static, kept: Arc<Mutex<VecDeque<String>>>) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(|line| line.ok()) {
            let line = String::from_utf8_lossy(&line).into_owned();
            let mut kept = kept.lock().expect("no holder panics");
            if kept.len() == STDERR_LINES_KEPT {
                kept.pop_front();
            }
            kept.push_back(line.clone());
            drop(kept);
            let _ = sender.send(line);
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const TIMEOUT: Duration = Duration::from_secs(10);

    #[test]
    fn a_server_is_ready_after_all_its_lines() {
        let mut command = shell("echo one ready >&2; echo noise >&2; echo two ready >&2; exec sleep 60");
        let server = Server::start("s", &mut command, Ready::Lines(2, "ready"), TIMEOUT).unwrap();
        server.stop().unwrap();
    }

    #[test]
    fn a_server_that_does_not_start_is_reported_with_its_words() {
        let mut command = shell("echo the port is busy >&2; exit 3");
        let result = Server::start("s", &mut command, Ready::Lines(1, "ready"), TIMEOUT);
        let text = format!("{:#}", result.err().unwrap());
        assert!(text.contains("the port is busy"), "{text}");
        assert!(text.contains("exit status: 3"), "{text}");
    }

    #[test]
    fn a_server_that_fails_at_the_end_is_reported() {
        let mut command = shell("trap 'echo leaked >&2; exit 4' TERM; echo ready >&2; while :; do sleep 0.01; done");
        let server = Server::start("s", &mut command, Ready::Lines(1, "ready"), TIMEOUT).unwrap();
        let text = format!("{:#}", server.stop().err().unwrap());
        assert!(text.contains("exit status: 4"), "{text}");
    }

    #[test]
    fn a_dropped_server_is_gone() {
        let mut command = shell("echo ready >&2; exec sleep 60");
        let server = Server::start("s", &mut command, Ready::Lines(1, "ready"), TIMEOUT).unwrap();
        let pid = server.pid();
        drop(server);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_dropped_server_takes_its_workers_along() {
        let mut command = shell("sleep 60 & echo $! ready >&2; wait");
        let server = Server::start("s", &mut command, Ready::Lines(1, "ready"), TIMEOUT).unwrap();
        let lines = server.stderr.lock().unwrap().clone();
        let worker = lines[0].split(' ').next().unwrap().to_owned();
        drop(server);
        // Whoever inherits it has yet to reap it.
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('Z'))
        };
        let deadline = Instant::now() + TIMEOUT;
        while !is_gone() {
            assert!(Instant::now() < deadline, "worker {worker} lives");
            std::thread::yield_now();
        }
    }

    #[test]
    fn children_of_children_are_descendants() {
        let mut command = shell("sh -c 'sleep 60 & echo $! >&2; wait' & wait");
        let server = Server::start("s", &mut command, Ready::Lines(1, ""), TIMEOUT).unwrap();
        let sleep = server.stderr.lock().unwrap()[0].parse().unwrap();
        let found = descendants(server.pid());
        assert!(found.len() == 2 && found.contains(&sleep), "{found:?}, not {sleep}");
        assert!(descendants(sleep).is_empty());
    }

    #[test]
    fn commands_are_shown_without_directories() {
        let mut command = Command::new("/usr/bin/strace");
        command.args(["-o", "/tmp/x/out", "--listen", "tcp:1/2", "-f"]);
        assert_eq!(display(&command), "strace -o out --listen tcp:1/2 -f");
    }

    #[test]
    fn output_of_a_failure_has_its_stderr() {
        let text = format!("{:#}", output(&mut shell("echo why >&2; exit 1"), TIMEOUT).err().unwrap());
        assert!(text.contains("why"), "{text}");
        assert_eq!(output(&mut shell("echo yes"), TIMEOUT).unwrap(), "yes\n");
    }

    #[test]
    fn who_ends_at_once_is_not_waited_for() {
        let mut running = Running::start(&mut Command::new("false")).unwrap();
        let text = format!("{:#}", running.wait_until_interruptible(TIMEOUT).unwrap_err());
        assert!(text.contains("exit status: 1"), "{text}");
    }

    #[test]
    fn what_is_interrupted_still_has_its_say() {
        for (status, good) in [(0, true), (1, true), (3, false)] {
            // A shell has a handler of its own before there is a trap: the file tells that there is one.
            let flag = std::env::temp_dir().join(format!("ksf-xtask-interrupt-{}-{status}", std::process::id()));
            let script = format!("trap 'echo done; exit {status}' INT; : > $0; while :; do sleep 0.01; done");
            let mut running = Running::start(shell(&script).arg(&flag)).unwrap();
            running.wait_until_interruptible(TIMEOUT).unwrap();
            let deadline = Instant::now() + TIMEOUT;
            while !flag.exists() {
                assert!(Instant::now() < deadline, "the script did not start");
                std::thread::yield_now();
            }
            std::fs::remove_file(&flag).unwrap();
            let result = running.interrupt(TIMEOUT);
            assert_eq!(result.is_ok(), good, "{status}: {result:?}");
            assert!(!good || result.unwrap() == "done\n");
        }
    }
}
