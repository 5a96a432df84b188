//! Runs the real binary and talks to it as a user does.
#![allow(dead_code)] // Each test file uses a part of it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Longer than anything takes on a loaded machine; reaching it is a failure, never an expectation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The binary under test.
pub(crate) fn ksf() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ksf"))
}

/// Where cargo leaves what it has built for tests. Not by `current_exe()`: in a mount namespace that a thread has unshared,
/// the kernel tells the file's path from the root of the machine, which is another where all of this runs in a chroot.
pub(crate) fn built_folder() -> PathBuf {
    std::path::Path::new(env!("CARGO_BIN_EXE_ksf")).with_file_name("deps")
}

/// Runs `ksf` to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    ksf().args(args).stdin(Stdio::null()).output().expect("ksf starts")
}

/// What a program said on stderr.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a program said on stdout.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether this process is root. Without root a test that needs it says so and passes, except in CI, where a test that
/// nobody runs is a failure.
pub(crate) fn root_or_skip(what: &str) -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "in CI no test may be skipped: needs root ({what})");
    say_skipped(&format!("needs root ({what})"));
    false
}

/// Says that a test did not run. Not by `eprintln!`, which the test runner hides of a test that passes.
pub(crate) fn say_skipped(why: &str) {
    let thread = std::thread::current();
    let line = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}

/// Moves this test's thread, and so every process it starts, to a new network namespace. False: no root, skip.
pub(crate) fn private_network() -> bool {
    if !root_or_skip("network namespace") {
        return false;
    }
    unshare(libc::CLONE_NEWNET);
    succeeds(&["ip", "link", "set", "lo", "up"]);
    true
}

/// [`private_network`], and an empty /run of its own, for root to write as ever. False: no root, skip.
pub(crate) fn private_network_and_run() -> bool {
    if !private_network() {
        return false;
    }
    unshare(libc::CLONE_NEWNS);
    succeeds(&["mount", "--make-rprivate", "/"]);
    succeeds(&["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"]);
    true
}

fn unshare(flags: libc::c_int) {
    // SAFETY: changes only what namespaces this thread, and what it starts from now on, belongs to.
    let result = unsafe { libc::unshare(flags) };
    assert_eq!(result, 0, "unshare: {}", std::io::Error::last_os_error());
}

fn succeeds(words: &[&str]) {
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|e| panic!("{words:?}: {e}"));
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
}

/// Has the command run under a seccomp filter that refuses io_uring, as containers do.
pub(crate) fn without_io_uring(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let statement = |code: u32, jt, k| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    // Load the number of the system call, refuse io_uring_setup, allow the rest (seccomp(2)).
    let filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        libc::sock_filter {
            jf: 1,
            ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, libc::SYS_io_uring_setup as u32)
        },
        statement(libc::BPF_RET | libc::BPF_K, 0, refuse),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: prctl copies the program, which lives until it returns, and writes nothing to it.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        if refused { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) };
}

/// A folder that is removed with the value.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        // Servers under test give up their rights, and read on.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        Folder(
            tempfile::Builder::new().prefix("ksf-cli-test-").permissions(mode).tempdir().expect("a temporary folder"),
        )
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("a temporary file");
        path
    }
}

/// A server that runs; killed when dropped.
pub(crate) struct Server {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
    /// Socket for `ksf stat`.
    pub(crate) stats: PathBuf,
    _folder: Folder,
}

impl Server {
    /// Starts `ksf ARGS` and waits for `listeners` ready lines.
    pub(crate) fn start<A: AsRef<OsStr>>(args: &[A], listeners: usize) -> Self {
        let mut command = ksf();
        command.args(args);
        Self::start_command(command, listeners)
    }

    /// Starts a prepared command, with a socket for `ksf stat` in a folder of its own.
    pub(crate) fn start_command(mut command: Command, listeners: usize) -> Self {
        let folder = Folder::new();
        let stats = folder.path("stats.sock");
        command.arg("--stats-socket").arg(&stats);
        Self::start_as_is(command, listeners, stats, folder)
    }

    /// Starts a prepared command that has its socket for `ksf stat` at `stats`.
    pub(crate) fn start_as_is(mut command: Command, listeners: usize, stats: PathBuf, folder: Folder) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("ksf starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut server = Server { child, lines, seen: Vec::new(), stats, _folder: folder };
        for _ in 0..listeners {
            server.line_with(" ready");
        }
        server
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that contains `part`.
    pub(crate) fn line_with(&mut self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with \"{part}\" ({error}); seen: {:#?}", self.seen),
            }
        }
    }

    /// All lines seen so far.
    pub(crate) fn seen(&self) -> &[String] {
        &self.seen
    }

    /// The address of the ready line that contains `part`, e.g. `tcp`.
    pub(crate) fn address(&self, part: &str) -> std::net::SocketAddr {
        let line = self.seen.iter().find(|line| line.contains(part) && line.ends_with(" ready"));
        let line = line.unwrap_or_else(|| panic!("no ready line with \"{part}\": {:#?}", self.seen));
        let mut words = line.split_whitespace().skip_while(|word| *word != "tcp" && *word != "udp");
        words.nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no address in {line}"))
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the server runs");
    }

    /// Waits for the end, and takes the lines said until then.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                break status;
            }
            assert!(Instant::now() < deadline, "the server does not end; seen: {:#?}", self.seen);
            std::thread::sleep(Duration::from_millis(5));
        };
        self.seen.extend(self.lines.iter());
        status
    }

    /// Stops gently and expects success.
    pub(crate) fn stop(mut self) -> Vec<String> {
        self.signal(rustix::process::Signal::TERM);
        let status = self.wait();
        assert_eq!(status.code(), Some(0), "{:#?}", self.seen);
        std::mem::take(&mut self.seen)
    }

    /// Counters and limits by `ksf stat --json`.
    pub(crate) fn stat(&self) -> serde_json::Value {
        let output = run(&["stat", "--json", self.stats.to_str().expect("a plain path")]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("stat prints JSON")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A value by name from a list of `{"name", "value"}`.
pub(crate) fn value(list: &serde_json::Value, name: &str) -> u64 {
    let entry = list.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == name));
    entry.and_then(|entry| entry["value"].as_u64()).unwrap_or_else(|| panic!("no {name} in {list}"))
}

/// Waits until `condition` holds; time alone is no proof of anything.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A copy of the binary that every user may run. Made by another process: a descriptor open for writing in this one
/// could be inherited by a child that another test starts meanwhile, and then the copy would be busy (ETXTBSY).
pub(crate) fn ksf_for_all(folder: &Folder) -> PathBuf {
    let copy = folder.path("ksf");
    let parent = folder.path("").display().to_string();
    succeeds(&["chmod", "755", &parent]);
    succeeds(&["install", "-m", "755", env!("CARGO_BIN_EXE_ksf"), &copy.display().to_string()]);
    copy
}
