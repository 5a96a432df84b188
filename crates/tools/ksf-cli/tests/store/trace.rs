//! What a store writes, syncs and sends, in the order in which strace(1) sees each call begin and end.
//!
//! strace stops a thread where a call begins and where it ends, takes one stop at a time, and writes it down before the thread goes
//! on. So a line that says that a write has ended comes before each call that the store makes because of that.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use ksf_test::program_or_skip;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Folder, Server, ksf};

/// The calls by which a store on epoll writes, makes durable, and answers.
const CALLS: &str = "trace=pwrite64,pwritev,pwritev2,fsync,fdatasync,sendto,sendmsg";
/// More than any string that the tests have written or sent by one call.
const STRING_BYTES_MAX: &str = "4194304";

#[derive(Debug, PartialEq)]
pub(crate) enum What {
    Write {
        file: String,
        offset: u64,
        data: Vec<u8>,
        /// With RWF_DSYNC: it is durable at the end of the call.
        is_durable: bool,
    },
    /// All that was written to the file before is durable at the end of the call.
    Sync {
        file: String,
    },
    Send {
        socket: String,
        data: Vec<u8>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Event {
    /// A call begins, by its index in [`Trace::calls`].
    Begin(usize),
    /// It has ended, with this result.
    End(usize, usize),
}

#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) calls: Vec<What>,
    pub(crate) events: Vec<Event>,
}

impl Trace {
    /// Reads what strace wrote with the options of [`Traced::start`]. A call that failed has no end.
    fn read(text: &str) -> Self {
        let mut trace = Self::default();
        let mut under_way = BTreeMap::new();
        for line in text.lines() {
            let (thread, line) = line.split_once(' ').unwrap_or_else(|| panic!("no thread in {line}"));
            let line = line.trim_start();
            if line.starts_with("+++") || line.starts_with("---") {
                continue;
            }
            if line.starts_with("<... ") {
                let index = under_way.remove(thread).unwrap_or_else(|| panic!("nothing is resumed by {line}"));
                trace.end(index, line);
                continue;
            }
            let index = trace.calls.len();
            match line.strip_suffix(" <unfinished ...>") {
                Some(call) => {
                    trace.calls.push(what(call));
                    trace.events.push(Event::Begin(index));
                    under_way.insert(thread, index);
                }
                None => {
                    let (call, _) = line.rsplit_once(" = ").unwrap_or_else(|| panic!("no result in {line}"));
                    let call = call.trim_end();
                    trace.calls.push(what(call.strip_suffix(')').unwrap_or(call)));
                    trace.events.push(Event::Begin(index));
                    trace.end(index, line);
                }
            }
        }
        trace
    }

    fn end(&mut self, index: usize, line: &str) {
        let result = line.rsplit_once(" = ").and_then(|(_, result)| result.split_whitespace().next());
        if let Some(result) = result.and_then(|result| result.parse().ok()) {
            self.events.push(Event::End(index, result));
        }
    }
}

/// A call without its last parenthesis: `pwrite64(3</data/superblock>, "\x00", 1, 4096`.
fn what(call: &str) -> What {
    let (name, arguments) = call.split_once('(').unwrap_or_else(|| panic!("no call: {call}"));
    let (descriptor, rest) = arguments.split_once(", ").unwrap_or((arguments, ""));
    let data = || -> Vec<u8> { rest.split('"').skip(1).step_by(2).flat_map(bytes).collect() };
    let file = || {
        let path = descriptor.split_once('<').map_or(descriptor, |(_, path)| path.trim_end_matches('>'));
        let decoded = String::from_utf8(bytes(path)).expect("a path of the test's own");
        let path = if decoded.is_empty() { path.to_owned() } else { decoded };
        path.rsplit('/').next().unwrap_or_default().to_owned()
    };
    let mut last = rest.rsplit(", ");
    let mut number = || {
        let word = last.next().unwrap_or_default();
        word.parse().unwrap_or_else(|_| panic!("{word} is no offset: {name}"))
    };
    match name {
        "fsync" | "fdatasync" => What::Sync { file: file() },
        "sendto" | "sendmsg" => What::Send { socket: descriptor.to_owned(), data: data() },
        "pwrite64" | "pwritev" => What::Write { file: file(), offset: number(), data: data(), is_durable: false },
        "pwritev2" => {
            let (rest, flags) = rest.rsplit_once(", ").expect("a call has flags");
            let offset = rest.rsplit(", ").next().and_then(|offset| offset.parse().ok()).expect("a call has an offset");
            What::Write { file: file(), offset, data: data(), is_durable: flags.contains("RWF_DSYNC") }
        }
        _ => panic!("{name} was not asked for"),
    }
}

/// A string as `-xx` writes it: `\x2b\x4f`.
fn bytes(text: &str) -> Vec<u8> {
    let byte = |digits: &str| u8::from_str_radix(&digits[..2], 16).unwrap_or_else(|_| panic!("{digits} is no byte"));
    text.split("\\x").skip(1).map(byte).collect()
}

/// A store on epoll under strace. Both are killed when their test fails.
pub(crate) struct Traced {
    pub(crate) server: Server,
    /// Of the store.
    process: Pid,
    log: PathBuf,
}

impl Traced {
    /// `options`: further ones of the store. `None`: there is no strace, and that is said.
    pub(crate) fn start(folder: &Folder, data: &Path, options: &[&str], strace_options: &[&str]) -> Option<Self> {
        let strace = program_or_skip("strace")?;
        let log = folder.path("strace");
        let mut command = Command::new(strace);
        command.args(["-f", "-qq", "-y", "-xx", "-v", "-s", STRING_BYTES_MAX, "-e", "signal=none", "-e", CALLS]);
        command.args(strace_options).arg("-o").arg(&log).arg("--").arg(ksf().get_program());
        command.args(["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data"]);
        command.arg(data).args(options);
        let server = Server::start_command(command, 1);
        // The first of these calls is made before there is a second thread.
        let text = std::fs::read_to_string(&log).expect("strace writes");
        let process = text.split_whitespace().next().and_then(|number| number.parse().ok()).and_then(Pid::from_raw);
        Some(Self { server, process: process.expect("a line begins with a process"), log })
    }

    /// Ends the store in its own way.
    pub(crate) fn stop(mut self) -> Trace {
        kill_process(self.process, Signal::TERM).expect("the store runs");
        let status = self.server.wait();
        assert_eq!(status.code(), Some(0), "{:#?}", self.server.seen());
        Trace::read(&std::fs::read_to_string(&self.log).expect("strace has written"))
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // Its number is its own until strace has waited for it, which then ends, too.
        if std::thread::panicking() {
            let _ = kill_process(self.process, Signal::KILL);
        }
    }
}

#[test]
fn what_strace_writes_is_read() {
    let text = r#"100 pwrite64(5</tmp/a/superblock>, "\x61\x62", 2, 4096) = 2
101   pwritev2(9<\x2f\x74\x2f\x6c\x6f\x67\x2d\x30\x30\x30>, [{iov_base="\x61", iov_len=1}, {iov_base="\x62\x63", iov_len=2}], 2, 8192, RWF_DSYNC <unfinished ...>
100 fdatasync(5</tmp/a/superblock>)         = 0
100 sendto(7<socket:[99]>, "\x2b\x4f\x4b\x0d\x0a", 5, MSG_DONTWAIT|MSG_NOSIGNAL, NULL, 0) = -1 EAGAIN (Resource temporarily unavailable)
101   <... pwritev2 resumed>) = 3 (DELAYED)
100 sendmsg(7<socket:[99]>, {msg_name=NULL, msg_namelen=0, msg_iov=[{iov_base="\x2b", iov_len=1}, {iov_base="\x4f", iov_len=1}], msg_iovlen=2, msg_controllen=0, msg_flags=0}, MSG_NOSIGNAL) = 2
101   +++ exited with 0 +++
"#;
    let trace = Trace::read(text);
    let write = |file: &str, offset, data: &[u8], is_durable| What::Write {
        file: file.to_owned(),
        offset,
        data: data.to_vec(),
        is_durable,
    };
    let send = |data: &[u8]| What::Send { socket: "7<socket:[99]>".to_owned(), data: data.to_vec() };
    let calls = [
        write("superblock", 4096, b"ab", false),
        write("log-000", 8192, b"abc", true),
        What::Sync { file: "superblock".to_owned() },
        send(b"+OK\r\n"),
        send(b"+O"),
    ];
    assert_eq!(trace.calls, calls);
    use Event::{Begin, End};
    let events = [Begin(0), End(0, 2), Begin(1), Begin(2), End(2, 0), Begin(3), End(1, 3), Begin(4), End(4, 2)];
    assert_eq!(trace.events, events);
}
