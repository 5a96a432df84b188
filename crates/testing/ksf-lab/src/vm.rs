//! A running QEMU, watched by a thread that ends it in time.

use std::io::{PipeReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::error::Error;
use crate::evaluate::{End, Remains, RunLimits, RunOutcome};

/// A machine whose program has started. Dropped, it is switched off at once, as by a power failure.
///
/// It ends by itself when its program ends or when its time limit is reached, also while nobody waits for it, and with
/// the process that started it, however that ends.
#[derive(Debug)]
pub struct Vm {
    shared: Arc<VmState>,
    process: OwnedFd,
    supervisor: Option<JoinHandle<()>>,
    forwards: Vec<Forward>,
    limits: RunLimits,
}

/// A TCP port of the machine and the port of the host's loopback that leads to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forward {
    pub(crate) guest: u16,
    pub(crate) host: u16,
}

/// What to start.
pub(crate) struct Start {
    pub(crate) qemu: Command,
    pub(crate) initramfs: Vec<u8>,
    pub(crate) forwards: Vec<Forward>,
    pub(crate) limits: RunLimits,
    /// Whether to pass the program's output on to standard output while it comes.
    pub(crate) echo: bool,
}

#[derive(Debug, Default)]
struct VmState {
    remains: Mutex<Remains>,
    /// Notified whenever the remains have grown or QEMU has ended.
    changed: Condvar,
}

impl VmState {
    fn lock(&self) -> MutexGuard<'_, Remains> {
        // Bytes that were appended before a panic elsewhere are as good as any.
        self.remains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`, or until QEMU has ended; true if `done`.
    fn wait_until(&self, done: impl Fn(&Remains) -> bool) -> bool {
        let waiting = |remains: &mut Remains| remains.end.is_none() && !done(remains);
        let remains = self.changed.wait_while(self.lock(), waiting).unwrap_or_else(PoisonError::into_inner);
        done(&remains)
    }
}

impl Vm {
    /// Boots a machine and returns when its program is about to start.
    pub(crate) fn start(start: Start) -> Result<Vm, Error> {
        let (forwards, limits) = (start.forwards.clone(), start.limits);
        let shared = Arc::new(VmState::default());
        let (started, process) = mpsc::channel();
        let for_supervisor = Arc::clone(&shared);
        let supervisor = thread::Builder::new()
            .name("ksf-lab".into())
            .spawn(move || supervise(start, &for_supervisor, started))
            .map_err(Error::host("start a thread"))?;
        let process = process.recv().expect("the supervisor answers before it does anything else")?;

        let vm = Vm { shared, process, supervisor: Some(supervisor), forwards, limits };
        if vm.shared.wait_until(Remains::started) {
            return Ok(vm);
        }
        Err(vm.wait().expect_err("a program that has not started has no outcome"))
    }

    /// Waits for the program, and for the machine to power off.
    pub fn wait(mut self) -> Result<RunOutcome, Error> {
        self.join();
        self.shared.lock().evaluate(self.limits)
    }

    /// Waits until the program has written `text`. Fails as [`wait`](Self::wait) does if the machine ends before, and
    /// with [`Error::Description`] if the program ends well without writing it.
    pub fn wait_for(&self, text: &str) -> Result<(), Error> {
        let text_bytes = text.as_bytes();
        if self.shared.wait_until(|remains| contains(&remains.output, text_bytes)) {
            return Ok(());
        }
        let outcome = self.shared.lock().evaluate(self.limits)?;
        let what = format!("the program {} without writing '{text}'; it wrote:\n{}", outcome.status, outcome.output);
        Err(Error::Description { what })
    }

    /// The address on the host that leads to a TCP port of the machine; none if
    /// [`Lab::forward_tcp`](crate::Lab::forward_tcp) was not asked for it.
    ///
    /// QEMU accepts connections there as soon as the machine runs, whether or not the program listens already: let the
    /// program say when it does, and [`wait_for`](Self::wait_for) that.
    pub fn address_of_port(&self, guest_port: u16) -> Option<SocketAddr> {
        let forward = self.forwards.iter().find(|forward| forward.guest == guest_port)?;
        Some((Ipv4Addr::LOCALHOST, forward.host).into())
    }

    fn join(&mut self) {
        if let Some(supervisor) = self.supervisor.take()
            && let Err(panic) = supervisor.join()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(supervisor) = self.supervisor.take() {
            // A pidfd never names another process; that this one has ended already is not an error.
            let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
            let _ = supervisor.join();
        }
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    needle.is_empty() || haystack.windows(needle.len()).any(|window| window == needle)
}

/// The supervisor thread: starts QEMU, collects what it writes, ends it at its time limit, reaps it.
///
/// QEMU is to die with the thread that started it (PR_SET_PDEATHSIG is about threads), so that is this thread, which
/// lives exactly as long as QEMU.
fn supervise(start: Start, shared: &VmState, started: Sender<Result<OwnedFd, Error>>) {
    let (mut child, pipes) = match launch(start.qemu, start.initramfs) {
        Ok((child, pipes, process)) => {
            // The receiver waits for exactly this.
            let _ = started.send(Ok(process));
            (child, pipes)
        }
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let timed_out = collect(pipes, shared, start.limits, start.echo) == Collected::TimedOut;
    if timed_out {
        // Fails only if it has just ended by itself.
        let _ = child.kill();
    }
    let failure = match child.wait() {
        Ok(status) => (!status.success()).then(|| status.to_string()),
        Err(error) => Some(format!("no exit status: {error}")),
    };
    shared.lock().end = Some(End { timed_out, failure });
    shared.changed.notify_all();
}

/// The reading ends of QEMU's serial ports and of its standard error.
struct Pipes([(PipeReader, Stream); 4]);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Console,
    Output,
    Report,
    Messages,
}

impl Stream {
    fn of(self, remains: &mut Remains) -> &mut Vec<u8> {
        match self {
            Stream::Console => &mut remains.console,
            Stream::Output => &mut remains.output,
            Stream::Report => &mut remains.report,
            Stream::Messages => &mut remains.messages,
        }
    }
}

/// Starts QEMU. All that is here of its ends of the pipes is closed on return, the one that the command holds included:
/// else the pipes would not end with QEMU.
fn launch(mut qemu: Command, initramfs: Vec<u8>) -> Result<(Child, Pipes, OwnedFd), Error> {
    let initramfs = memory_file(initramfs)?;
    let pipe = || std::io::pipe().map_err(Error::host("create a pipe"));
    let (console, console_end) = pipe()?;
    let (output, output_end) = pipe()?;
    let (report, report_end) = pipe()?;
    let (messages, messages_end) = pipe()?;

    qemu.arg("-initrd").arg(path_of(&initramfs));
    for (name, end) in [("console", &console_end), ("output", &output_end), ("report", &report_end)] {
        qemu.arg("-chardev").arg(format!("file,id={name},path={}", path_of(end)));
        qemu.arg("-serial").arg(format!("chardev:{name}"));
    }
    qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages_end);
    inherit(
        &mut qemu,
        [initramfs.as_raw_fd(), console_end.as_raw_fd(), output_end.as_raw_fd(), report_end.as_raw_fd()],
    );
    let mut child = qemu.spawn().map_err(Error::host("start QEMU"))?;

    let process = match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
        Ok(process) => process,
        Err(error) => {
            let _: std::io::Result<ExitStatus> = child.kill().and_then(|()| child.wait());
            return Err(Error::host("watch QEMU")(error));
        }
    };
    let pipes = Pipes([
        (console, Stream::Console),
        (output, Stream::Output),
        (report, Stream::Report),
        (messages, Stream::Messages),
    ]);
    Ok((child, pipes, process))
}

/// A file that exists in memory only, so that no exit path leaves one behind.
fn memory_file(contents: Vec<u8>) -> Result<OwnedFd, Error> {
    let failed = "put the initramfs into memory";
    let fd = rustix::fs::memfd_create("initramfs", rustix::fs::MemfdFlags::CLOEXEC).map_err(Error::host(failed))?;
    let mut file = std::fs::File::from(fd);
    file.write_all(&contents).map_err(Error::host(failed))?;
    Ok(file.into())
}

/// The name under which the process that inherits this file descriptor can open it.
fn path_of(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Lets the command keep these file descriptors, which are close-on-exec here because other threads start programs
/// too, and lets it die with the calling thread.
fn inherit(command: &mut Command, fds: [RawFd; 4]) {
    let parent = rustix::process::getpid();
    let in_child = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died just before that call.
        if rustix::process::getppid() != Some(parent) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        for fd in fds {
            // SAFETY: `launch` keeps these open until the command has been started.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe functions may run: these are bare system calls, and nothing
    // here allocates or locks.
    unsafe { command.pre_exec(in_child) };
}

#[derive(PartialEq, Eq)]
enum Collected {
    Everything,
    TimedOut,
}

/// Reads every pipe to its end, which is QEMU's end, or until a limit is reached.
fn collect(pipes: Pipes, shared: &VmState, limits: RunLimits, echo: bool) -> Collected {
    let mut deadline = Instant::now() + limits.boot;
    let mut started = false;
    let mut open = Vec::from(pipes.0);
    let mut buffer = vec![0; 64 * 1024];
    while !open.is_empty() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Collected::TimedOut;
        }
        let readable = wait_readable(&open, remaining);
        let mut ready = readable.into_iter();
        open.retain_mut(|(pipe, stream)| {
            if ready.next() != Some(true) {
                return true;
            }
            // An error ends a pipe as its end does: what is to be known about QEMU, its exit status says.
            let read = pipe.read(&mut buffer).unwrap_or(0);
            if echo && *stream == Stream::Output {
                // A reader of ours that went away must not stop the machine.
                let _ = std::io::stdout().write_all(&buffer[..read]).and_then(|()| std::io::stdout().flush());
            }
            stream.of(&mut shared.lock()).extend_from_slice(&buffer[..read]);
            shared.changed.notify_all();
            read > 0
        });
        // How long a boot takes depends on who else uses the host; the program's time starts when it does.
        if !started && shared.lock().started() {
            started = true;
            deadline = Instant::now() + limits.program;
        }
    }
    Collected::Everything
}

/// Waits until a pipe can be read or the time is over; which can be.
fn wait_readable(pipes: &[(PipeReader, Stream)], timeout: Duration) -> Vec<bool> {
    let mut fds: Vec<PollFd<'_>> =
        pipes.iter().map(|(pipe, _)| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)).collect();
    let timeout = Timespec::try_from(timeout).ok();
    // Interrupted, or over: the caller looks at the time and comes back.
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
        Err(_) => vec![false; pipes.len()],
    }
}
