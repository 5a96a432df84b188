//! Runs the real binary and talks to it as a user does.

pub(crate) mod export;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output, Stdio};

pub(crate) use ksf_test::{Folder, PATIENCE, Running, skip, stderr, stdout, succeeds, wait_until};
use ksf_test::{install, ip, own_network_or_skip, own_run_or_skip};
use rustix::process::Signal;

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

/// The first CPU that this process may use: CPU 0 may be another's.
pub(crate) fn first_cpu() -> String {
    ksf::cpus::allowed().unwrap()[0].to_string()
}

/// A network namespace of the test's own; `None`: no root, skip.
pub(crate) fn private_network() -> Option<()> {
    own_network_or_skip("network namespace")
}

/// The same, and an empty /run of its own, for root to write as ever.
pub(crate) fn private_network_and_run() -> Option<()> {
    own_run_or_skip("namespaces")
}

/// Whether lo of this network has an XDP program.
pub(crate) fn xdp_on_lo() -> bool {
    ip("-d link show dev lo").contains("xdp")
}

/// The engines of this machine that need no root.
pub(crate) fn engines() -> Vec<&'static str> {
    let report: serde_json::Value = serde_json::from_slice(&run(&["doctor", "--json"]).stdout).expect("JSON");
    let has_uring = report["engines"][1]["usable"].as_bool().expect("usable is a boolean");
    ksf_test::working(["uring", "epoll"], |engine| match engine {
        "uring" if !has_uring => Err("ksf doctor says why"),
        _ => Ok(()),
    })
}

/// One of them by turns, so that neighbouring tests take another; in a soak all. For what a service does on each: that the engines
/// work alike, tests of `ksf` show.
pub(crate) fn engines_of_effort(turn: usize) -> Vec<&'static str> {
    let all = engines();
    ksf_test::effort(vec![all[turn % all.len()]], all)
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

/// A server that runs; killed when dropped.
pub(crate) struct Server {
    program: Running,
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
        let program = Running::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
        let mut server = Server { program, stats, _folder: folder };
        for _ in 0..listeners {
            server.line_with(" ready");
        }
        server
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// The next line that contains `part`.
    pub(crate) fn line_with(&mut self, part: &str) -> String {
        self.program.err.with(part)
    }

    /// All lines seen so far.
    pub(crate) fn seen(&self) -> &[String] {
        self.program.err.seen()
    }

    /// The address of the ready line that contains `part`, e.g. `tcp`.
    pub(crate) fn address(&self, part: &str) -> std::net::SocketAddr {
        let line = self.seen().iter().find(|line| line.contains(part) && line.ends_with(" ready"));
        let line = line.unwrap_or_else(|| panic!("no ready line with \"{part}\": {:#?}", self.seen()));
        let mut words = line.split_whitespace().skip_while(|word| *word != "tcp" && *word != "udp");
        words.nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no address in {line}"))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.program.signal(signal);
    }

    /// Waits for the end, and takes the lines said until then.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.program.wait()
    }

    /// Stops gently and expects success.
    pub(crate) fn stop(mut self) -> Vec<String> {
        self.signal(Signal::TERM);
        let status = self.wait();
        assert_eq!(status.code(), Some(0), "{:#?}", self.seen());
        self.seen().to_vec()
    }

    /// Counters and limits by `ksf stat --json`.
    pub(crate) fn stat(&self) -> serde_json::Value {
        let output = run(&["stat", "--json", self.stats.to_str().expect("a plain path")]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("stat prints JSON")
    }
}

/// A value by name from a list of `{"name", "value"}`.
pub(crate) fn value(list: &serde_json::Value, name: &str) -> u64 {
    let entry = list.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == name));
    entry.and_then(|entry| entry["value"].as_u64()).unwrap_or_else(|| panic!("no {name} in {list}"))
}

/// A copy of the binary that every user may run.
pub(crate) fn ksf_for_all(folder: &Folder) -> PathBuf {
    let copy = folder.path("ksf");
    install(env!("CARGO_BIN_EXE_ksf"), &copy);
    copy
}
