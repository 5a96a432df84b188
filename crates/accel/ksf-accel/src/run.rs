//! A holder for a command, as a process of its own.
//!
//! ```text
//!  ksf accel run ── fork ── (parent ends) ── fork ── holder: ksf, own session
//!       └── exec(PROG): its pid, signals and exit status are its own
//! ```
//!
//! The holder is a grandchild in a session of its own: the program never sees it as a child, and Ctrl-C does not reach
//! it. It is a fresh `exec()` of the calling binary, so nothing of the caller's memory or threads comes along.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ksf_accel_proto::message::{ENVIRONMENT, ENVIRONMENT_PORTS};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use crate::holder::ProgramAddress;
use crate::{AccelError, AccelOptions, Holder, Level, Refused};

/// A holder that is ready for the program which this process will become.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Variables to set for the program.
    pub environment: Vec<(OsString, OsString)>,
    /// Process id of the holder.
    pub holder: u32,
    /// The mechanism in use.
    pub level: Level,
    /// Why not a better one.
    pub refused: Vec<Refused>,
}

/// Starts a holder that lives as long as this process and all that comes from it.
///
/// `holder`: a command that calls [`holder_main`] in its process, as a rule this binary with a hidden argument; its
/// environment and standard descriptors are set here. `library`: the preload library. Then set the variables and
/// `exec()` the program.
pub fn prepare(options: &AccelOptions, mut holder: Command, library: &Path) -> Result<Prepared, AccelError> {
    let system = |action| move |error: io::Error| AccelError::system(action, error);
    options.check()?;
    if library.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte)) {
        let problem =
            format!("{} has a space or a colon in its path, which LD_PRELOAD cannot express", library.display());
        return Err(AccelError::Option { option: "library", problem });
    }
    let address = ProgramAddress::new().map_err(system("making the holder's socket"))?;
    let accel = address.environment();
    let (mut report, report_end) = io::pipe().map_err(system("pipe()"))?;
    let report_end = OwnedFd::from(report_end);
    let order = Order {
        options: options.clone(),
        address: accel.clone(),
        start: std::process::id(),
        report: report_end.as_raw_fd(),
    };
    let order = serde_json::to_string(&order).map_err(|error| system("encoding options")(error.into()))?;
    holder
        .env(ORDER, order)
        .env_remove("LD_PRELOAD")
        .env_remove(ENVIRONMENT)
        .current_dir("/")
        // The socket is there before the holder runs: the program can connect at once.
        .stdin(Stdio::from(address.into_socket()))
        // The program's output is not kept open by a process that outlives it.
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let kept = report_end.as_raw_fd();
    // SAFETY: between fork and exec only the system calls of `leave_parent` are made: no allocation, no lock.
    unsafe { holder.pre_exec(move || leave_parent(kept)) };
    let mut middle = holder.spawn().map_err(system("starting the holder"))?;
    drop((holder, report_end));
    match middle.wait() {
        // Whoever has SIGCHLD ignored finds no child to wait for; the kernel has waited.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {}
        result => drop(result.map_err(system("waiting for the holder's parent"))?),
    }
    let mut said = String::new();
    report.read_to_string(&mut said).map_err(system("hearing from the holder"))?;
    let ready: Result<Ready, String> =
        serde_json::from_str(&said).map_err(|_| AccelError::Holder { said: format!("it said {said:?}") })?;
    let ready = ready.map_err(|said| AccelError::Holder { said })?;
    let preload = preload(library, std::env::var_os("LD_PRELOAD"));
    let mut environment = vec![("LD_PRELOAD".into(), preload), (ENVIRONMENT.into(), accel.into())];
    environment.extend(options.source_ports.iter().map(|ports| (ENVIRONMENT_PORTS.into(), ports.into())));
    let Ready { pid, level, refused } = ready;
    Ok(Prepared { environment, holder: pid, level, refused })
}

/// The holder's process: serves until the program has ended. To be called before anything else in that process: it closes
/// all descriptors that were inherited.
pub fn holder_main() -> Result<(), AccelError> {
    let wrong = |said: &str| AccelError::Holder { said: said.to_owned() };
    let order = std::env::var(ORDER).map_err(|_| wrong("it was started by hand, without an order"))?;
    let order: Order = serde_json::from_str(&order).map_err(|error| wrong(&error.to_string()))?;
    if order.report < 3 {
        return Err(wrong("no pipe for its report"));
    }
    // What the caller had open stays out: the program's pipes end when the program ends.
    close_inherited(order.report);
    // SAFETY: `prepare` has opened this descriptor for us, and nothing in this process owns it.
    let report = unsafe { OwnedFd::from_raw_fd(order.report) };
    // As `ps` shows it, however this binary was called.
    let _ = rustix::thread::set_name(c"ksf-accel");
    // Ctrl-C and a service manager's SIGTERM are for the program. Until that has ended, connections wait in queues.
    ignore_signals();
    raise_descriptor_limit();
    let holder = begin(order);
    let ready = holder.as_ref().map_err(ToString::to_string).map(|holder| Ready {
        pid: std::process::id(),
        level: holder.level(),
        refused: holder.refused().to_vec(),
    });
    let said = serde_json::to_vec(&ready).map_err(|error| AccelError::system("encoding the report", error))?;
    // Who waits for it may have been killed: then the holder notices by itself. The pipe's end says that this is all.
    let _ = std::fs::File::from(report).write_all(&said);
    holder?.run();
    Ok(())
}

/// The library before those that are there already, once.
fn preload(library: &Path, before: Option<OsString>) -> OsString {
    let mut preload = library.as_os_str().to_owned();
    let others = before.unwrap_or_default();
    for other in others.as_bytes().split(|byte| b" :".contains(byte)) {
        if !other.is_empty() && other != library.as_os_str().as_bytes() {
            preload.push(":");
            preload.push(std::ffi::OsStr::from_bytes(other));
        }
    }
    preload
}

fn begin(order: Order) -> Result<Holder, AccelError> {
    let wrong = |said: &str| AccelError::Holder { said: said.to_owned() };
    let system = |action| move |error: rustix::io::Errno| AccelError::system(action, error);
    let start = Pid::from_raw(order.start as i32).ok_or_else(|| wrong("no process to live for"))?;
    let start =
        rustix::process::pidfd_open(start, PidfdFlags::empty()).map_err(system("pidfd_open() of the program"))?;
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(system("dup()"))?;
    let null = std::fs::File::open("/dev/null").map_err(|error| AccelError::system("opening /dev/null", error))?;
    rustix::stdio::dup2_stdin(&null).map_err(system("dup2()"))?;
    let address = ProgramAddress::from_parts(socket, &order.address).ok_or_else(|| wrong("a bad address"))?;
    Holder::new(order.options, address, Some(start))
}

/// Variable with which a holder is told what to do.
const ORDER: &str = "KSF_ACCEL_HOLDER";

#[derive(Serialize, Deserialize)]
struct Order {
    options: AccelOptions,
    address: String,
    /// Process id of what becomes the program.
    start: u32,
    /// Descriptor of the pipe that the caller reads.
    report: RawFd,
}

#[derive(Serialize, Deserialize)]
struct Ready {
    pid: u32,
    level: Level,
    refused: Vec<Refused>,
}

/// Runs in the first child: it ends at once, and a second one goes on in a session of its own, with one descriptor more
/// than the standard ones.
fn leave_parent(kept: RawFd) -> io::Result<()> {
    // SAFETY: a number and flags; the descriptor is open, because the parent waits until this child has ended.
    if unsafe { libc::fcntl(kept, libc::F_SETFD, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::process::setsid()?;
    // SAFETY: the child has one thread, and makes nothing but system calls before exec.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(()),
        // SAFETY: ends this process without running anything of the parent's.
        _ => unsafe { libc::_exit(0) },
    }
}

fn ignore_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: SIG_IGN is no handler, so no code of ours runs in a signal.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Closes all descriptors from 3 on but one.
fn close_inherited(keep: i32) {
    let close = |first: i32, last: u32| {
        if first >= 0 && first as u32 <= last {
            // SAFETY: called before anything but `keep` and the standard descriptors is owned by this process: what is
            // closed was inherited.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    close(3, (keep - 1) as u32);
    close(keep + 1, u32::MAX);
}

/// A queue is a descriptor, and there may be many.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_libraries_stay_and_ours_is_named_once() {
        let with = |before: &str| preload(Path::new("/lib/ours.so"), Some(before.into()));
        assert_eq!(preload(Path::new("/lib/ours.so"), None), "/lib/ours.so");
        assert_eq!(with(""), "/lib/ours.so");
        assert_eq!(with("/lib/a.so /lib/b.so"), "/lib/ours.so:/lib/a.so:/lib/b.so");
        assert_eq!(with("/lib/a.so:/lib/ours.so"), "/lib/ours.so:/lib/a.so");
    }
}
