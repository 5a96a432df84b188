//! Several copies of a program on one port, one for each CPU: for programs that no library can be loaded into.
//!
//! ```text
//!  ksf accel run --copies N ─┬─ copy on CPU 0: bind(:80) ── cgroup program: SO_REUSEPORT ── listen()
//!                            ├─ copy on CPU 1: the same
//!                            └─ a thread that steers (see `attach`): each CPU's connections to its copy
//! ```
//!
//! The copies are children of this process, in a cgroup of their own. They know nothing of each other: a program that
//! keeps state in its memory, or writes files of fixed names, cannot be run so.

mod cgroup;

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use rustix::event::{PollFd, PollFlags};

use crate::attach::Attached;
use crate::bpf::{self, Loading};
use crate::{AccelError, AccelOptions, homes, steer};
use cgroup::Cgroup;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/share.bpf.o"));

/// As many as there can be workers.
pub const COPIES_MAX: usize = ksf_accel_proto::state::WORKERS_MAX;

/// Signals that are passed on to the copies.
const PASSED_ON: [i32; 7] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGCONT];

/// The copies of a program.
#[derive(Debug)]
pub struct Copies {
    copies: Vec<CopyProcess>,
    /// In the order in which they ended.
    ended: Vec<ExitStatus>,
    attached: Result<Attached, AccelError>,
    signals: Signals,
    share: Share,
}

#[derive(Debug)]
struct CopyProcess {
    child: Child,
    pidfd: OwnedFd,
}

impl Copies {
    /// Starts `count` copies of what `command` makes, each bound to one CPU of `options` in turn, and steers to them. From
    /// now on this thread's signals are the copies'. To be called before other threads are started.
    ///
    /// Needs CAP_BPF and CAP_NET_ADMIN, and the right to make a cgroup.
    pub fn start(
        count: usize,
        mut command: impl FnMut() -> Command,
        options: AccelOptions,
    ) -> Result<Self, AccelError> {
        options.check()?;
        if !(1..=COPIES_MAX).contains(&count) {
            let problem = format!("{count} were asked for, possible are 1 to {COPIES_MAX}");
            return Err(AccelError::Option { option: "copies", problem });
        }
        let share = Share::new()?;
        let entrance = share.cgroup.entrance().map_err(|error| AccelError::system("opening a cgroup", error))?;
        let own = homes::affinity(None).map_err(|error| AccelError::system("sched_getaffinity()", error))?;
        let cpus = homes::allowed(options.cpus.as_deref(), &own);
        let signals = Signals::take().map_err(|error| AccelError::system("taking over the signals", error))?;
        let mut copies = Vec::new();
        for index in 0..count {
            let cpu = options.pin.then(|| cpus[index % cpus.len()] as usize);
            let mut command = command();
            let (entrance, before) = (entrance.as_raw_fd(), signals.before);
            // SAFETY: between fork and exec only the system calls of `become_copy` are made.
            unsafe { command.pre_exec(move || become_copy(entrance, cpu, &before)) };
            let started = command.spawn().and_then(CopyProcess::new);
            match started {
                Ok(copy) => copies.push(copy),
                Err(error) => {
                    end_all(&mut copies);
                    return Err(AccelError::system("starting the program", error));
                }
            }
        }
        let pids: Vec<u32> = copies.iter().map(|copy| copy.child.id()).collect();
        let attached = Attached::new(&pids, options);
        Ok(Self { copies, ended: Vec::new(), attached, signals, share })
    }

    /// Why nothing steers; the copies serve all the same.
    pub fn not_steered(&self) -> Option<&AccelError> {
        self.attached.as_ref().err()
    }

    /// Process ids of the copies that live.
    pub fn pids(&self) -> Vec<u32> {
        self.copies.iter().map(|copy| copy.child.id()).collect()
    }

    /// How many sockets of the copies could share their port.
    pub fn shared(&self) -> u64 {
        let counted = self.share.counts.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        counted.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
    }

    /// Waits until a copy ends; `None`: all have ended. Signals are passed on meanwhile.
    pub fn wait(&mut self) -> Option<(u32, ExitStatus)> {
        while !self.copies.is_empty() {
            let mut polled: Vec<PollFd<'_>> =
                self.copies.iter().map(|copy| PollFd::new(&copy.pidfd, PollFlags::IN)).collect();
            polled.push(PollFd::new(&self.signals.fd, PollFlags::IN));
            // What is interrupted is looked at again.
            let _ = rustix::event::poll(&mut polled, None);
            let ended = polled[..polled.len() - 1].iter().position(|fd| !fd.revents().is_empty());
            if let Some(signal) = self.signals.next() {
                self.pass_on(signal);
            }
            if let Some(index) = ended {
                let CopyProcess { mut child, .. } = self.copies.remove(index);
                // Its end was announced; where SIGCHLD is ignored, the kernel has taken its status.
                let status = child.wait().unwrap_or_default();
                self.ended.push(status);
                return Some((child.id(), status));
            }
        }
        None
    }

    /// The first status that is not success, else success.
    pub fn status(&self) -> ExitStatus {
        self.ended.iter().find(|status| !status.success()).copied().unwrap_or_default()
    }

    fn pass_on(&self, signal: i32) {
        for copy in &self.copies {
            // SAFETY: no memory is involved. The child has not been waited for, so the id is its own.
            unsafe { libc::kill(copy.child.id() as i32, signal) };
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        end_all(&mut self.copies);
    }
}

fn end_all(copies: &mut Vec<CopyProcess>) {
    for mut copy in copies.drain(..) {
        let _ = copy.child.kill();
        let _ = copy.child.wait();
    }
}

impl CopyProcess {
    fn new(mut child: Child) -> io::Result<Self> {
        let pid = rustix::process::Pid::from_child(&child);
        match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child, pidfd }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.into())
            }
        }
    }
}

/// Runs in the child.
fn become_copy(entrance: RawFd, cpu: Option<usize>, signals: &libc::sigset_t) -> io::Result<()> {
    // Nobody would steer to it, nor pass signals on.
    // SAFETY: no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
    // SAFETY: the parent holds the descriptor until the child has called exec, and the byte is readable.
    if unsafe { libc::write(entrance, b"0".as_ptr().cast(), 1) } != 1 {
        return Err(io::Error::last_os_error());
    }
    if let Some(cpu) = cpu {
        ksf::cpus::pin_to(cpu)?;
    }
    // SAFETY: reads the set, which was filled in by `Signals::take`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, signals, std::ptr::null_mut()) };
    Ok(())
}

/// The cgroup, and the programs that make its sockets share their ports. They end with their descriptors.
#[derive(Debug)]
struct Share {
    // Before the cgroup, which is removed when they are gone.
    _links: [OwnedFd; 2],
    counts: MapHandle,
    cgroup: Cgroup,
}

impl Share {
    fn new() -> Result<Self, AccelError> {
        let unavailable = |error: io::Error| AccelError::Unavailable {
            what: "copies cannot share a port",
            why: steer::explain(&error),
        };
        let cgroup = Cgroup::new().map_err(|error| AccelError::system("making a cgroup", error))?;
        let folder = cgroup.folder().map_err(|error| AccelError::system("opening a cgroup", error))?;
        let object = Loading::open(OBJECT).and_then(Loading::load).map_err(|error| unavailable(error.into()))?;
        let link = |name: &str, kind| {
            let program = bpf::program(&object, name).map_err(unavailable)?;
            ksf_bpf::link_create(program.as_fd(), folder.as_raw_fd(), kind, 0).map_err(unavailable)
        };
        let links = [
            link("ksf_share4", libbpf_sys::BPF_CGROUP_INET4_BIND)?,
            link("ksf_share6", libbpf_sys::BPF_CGROUP_INET6_BIND)?,
        ];
        let counts = bpf::map(&object, "ksf_shared").map_err(unavailable)?;
        Ok(Self { _links: links, counts, cgroup })
    }
}

/// The signals of this thread, as a descriptor.
#[derive(Debug)]
struct Signals {
    fd: OwnedFd,
    /// The mask as it was.
    before: libc::sigset_t,
}

impl Signals {
    fn take() -> io::Result<Self> {
        // SAFETY: sets are plain numbers, filled in before they are used; the calls write to the given sets, and the
        // descriptor is the kernel's answer.
        unsafe {
            let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigemptyset(&mut set);
            PASSED_ON.iter().for_each(|signal| {
                libc::sigaddset(&mut set, *signal);
            });
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
            Ok(Self { fd: OwnedFd::from_raw_fd(fd), before })
        }
    }

    /// One that somebody has sent. What the terminal sends (Ctrl-C) is sent to the copies as well.
    fn next(&self) -> Option<i32> {
        // SAFETY: plain numbers.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&info);
        // SAFETY: `info` is writable for its size.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut info).cast(), bytes) };
        // Positive codes are the kernel's (sigaction(2)).
        (read == bytes as isize && info.ssi_code <= 0).then_some(info.ssi_signo as i32)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: reads the set, which was filled in by `take`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
