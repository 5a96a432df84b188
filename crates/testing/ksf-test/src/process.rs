//! Programs that tests run.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::PATIENCE;

/// Runs a program to its end, which must be success; what it printed.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}\n{}{}", output.status, stdout(&output), stderr(&output));
    stdout(&output)
}

/// [`run`] with words: the program's name and its arguments.
#[track_caller]
pub fn succeeds(words: &[&str]) -> String {
    run(Command::new(words[0]).args(&words[1..]))
}

/// What a program said on stdout.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a program said on stderr.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Sends a signal to a process that the test has started.
#[track_caller]
pub fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).expect("a process id"), signal).expect("the process is there");
}

/// True while a thread of the process runs. A process whose parent has not waited for it has ended, and its files are closed,
/// when its first thread is the last one: a killed process may have others that still hold all files.
pub fn is_alive(pid: u32) -> bool {
    /// Fields of proc_pid_stat(5) from the state on: the state is the third, the number of threads the twentieth.
    const THREADS: usize = 20 - 3;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let threads = rest.split(' ').nth(THREADS).and_then(|threads| threads.parse::<u32>().ok());
    !rest.starts_with('Z') || threads.is_some_and(|threads| threads > 1)
}

/// A program that runs. It is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    is_group: bool,
    input: Option<ChildStdin>,
    /// What it says on stdout, if that is a pipe.
    pub out: Lines,
    /// What it says on stderr, if that is a pipe.
    pub err: Lines,
}

impl Running {
    /// Starts a program; what the command makes a pipe is connected to this value.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (out, err) = (Lines::of(child.stdout.take()), Lines::of(child.stderr.take()));
        let input = child.stdin.take();
        Self { child, is_group: false, input, out, err }
    }

    /// Starts a program in a process group of its own, which is killed with it.
    #[track_caller]
    pub fn start_group(command: &mut Command) -> Self {
        let mut running = Self::start(command.process_group(0));
        running.is_group = true;
        running
    }

    /// The number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        crate::signal(self.pid(), signal);
    }

    /// Writes a line to its stdin.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        writeln!(self.input.as_ref().expect("stdin is a pipe"), "{line}").expect("it reads");
    }

    /// Ends its stdin.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it can be waited for")
    }

    /// Waits for its end, and takes what it said until then into [`Lines::seen`].
    ///
    /// # Panics
    /// If it does not end within [`PATIENCE`].
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let limit = Instant::now() + PATIENCE;
        let status = loop {
            match self.ended() {
                Some(status) => break status,
                None if Instant::now() < limit => std::thread::sleep(Duration::from_millis(1)),
                None => {
                    let said = [self.out.now(), self.err.now()];
                    panic!("it does not end; it said {said:#?}; its threads:\n{}", threads_of(self.child.id()));
                }
            }
        };
        if !self.is_group {
            // The pipes of a group may be kept open by what the process has left behind.
            self.out.to_the_end();
            self.err.to_the_end();
        }
        status
    }

    /// Sends a signal and waits for the end, which must be success; what it said on stdout, if that is a pipe.
    #[track_caller]
    pub fn stop(mut self, signal: Signal) -> String {
        self.signal(signal);
        let status = self.wait();
        assert!(status.success(), "{status} after {signal:?}; it said {:#?}", self.err.now());
        self.out.now().iter().flat_map(|line| [line, "\n"]).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Once it has been waited for, its number may be another's: then there is a process with it.
        let is_ours = self.ended().is_none() || !Path::new(&format!("/proc/{}", self.pid())).exists();
        if self.is_group && is_ours {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What each thread of a process waits for, and the signals it has not taken.
fn threads_of(pid: u32) -> String {
    let mut all = String::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        for file in ["wchan", "syscall", "status"] {
            let text = std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            let tells = |line: &&str| file != "status" || line.starts_with("Sig") || line.starts_with("Shd");
            text.lines().filter(tells).for_each(|line| all.extend([line, "; "]));
        }
        all.push('\n');
    }
    all
}

/// The lines of a pipe, read as they come.
#[derive(Debug)]
pub struct Lines {
    // Threads may share a program; taking its lines needs it mutable.
    coming: Mutex<Receiver<String>>,
    seen: Vec<String>,
}

impl Default for Lines {
    /// No lines.
    fn default() -> Self {
        Self::of(None::<std::io::Empty>)
    }
}

impl Lines {
    fn of(pipe: Option<impl Read + Send + 'static>) -> Self {
        let (sender, coming) = channel();
        if let Some(pipe) = pipe {
            std::thread::spawn(move || {
                // Reads on when nobody listens, so that the program does not wait for that.
                BufReader::new(pipe).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
            });
        }
        Self { coming: Mutex::new(coming), seen: Vec::new() }
    }

    /// The next line that contains `part`.
    ///
    /// # Panics
    /// If none comes within [`PATIENCE`] or before the end.
    #[track_caller]
    pub fn with(&mut self, part: &str) -> String {
        let limit = Instant::now() + PATIENCE;
        while let Some(line) = self.within(limit.saturating_duration_since(Instant::now())) {
            if line.contains(part) {
                return line;
            }
        }
        panic!("no line with \"{part}\" comes; seen: {:#?}", self.seen)
    }

    /// The next line.
    #[track_caller]
    pub fn line(&mut self) -> String {
        self.with("")
    }

    /// The next line; `None`: none comes within this time, or none comes any more.
    pub fn within(&mut self, limit: Duration) -> Option<String> {
        let line = self.coming.get_mut().ok()?.recv_timeout(limit).ok()?;
        self.seen.push(line.clone());
        Some(line)
    }

    /// All lines that were taken so far, in order.
    pub fn seen(&self) -> &[String] {
        &self.seen
    }

    /// Takes what has come by now; all lines so far.
    pub fn now(&mut self) -> &[String] {
        self.seen.extend(self.coming.get_mut().expect("nobody panics in it").try_iter());
        &self.seen
    }

    /// Takes what comes until the pipe is closed; all lines.
    pub fn to_the_end(&mut self) -> &[String] {
        self.seen.extend(self.coming.get_mut().expect("nobody panics in it").iter());
        &self.seen
    }
}
