//! Real connections over the device that is steered: the self-check after attaching.

use std::io::{self, Read as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::Duration;

use super::{CpuMask, FlowError, Layout, Mode, ModeWish, Steering, source_port};

/// A connection opened on one CPU.
#[derive(Debug)]
pub struct Trial {
    /// Where it was opened.
    pub cpu: usize,
    /// The CPU that processed the answer, or why there was no connection.
    pub processed_on: io::Result<usize>,
}

impl Trial {
    /// Whether the answer came back to the CPU that opened the connection.
    pub fn is_local(&self) -> bool {
        matches!(self.processed_on, Ok(cpu) if cpu == self.cpu)
    }
}

impl Steering {
    /// Opens a connection to `to`, a TCP service behind the interface, on each CPU of the layout that this process may
    /// run on; nothing is sent over it, and it is closed at once. If in native mode one fails, or frames turn out not to
    /// survive it, and the wish was [`ModeWish::Auto`], the programs go behind the driver and it is tried again:
    /// [`Steering::mode`] says where they ended.
    ///
    /// `limit`: how long each may take to open, and how long the service has to close its side or to say something. The
    /// CPU is that of the last packet: the answer to the opening alone says little on a veth, where the peer's kernel
    /// answers on the caller's CPU.
    ///
    /// # Errors
    ///
    /// Those of [`Steering::settle`]. A connection that fails is none: it is in the result.
    pub fn prove(&mut self, to: SocketAddr, limit: Duration) -> Result<Vec<Trial>, FlowError> {
        let trials = self.trials(to, limit)?;
        let fell_back = self.settle()?.is_some();
        let failed = self.mode() == Some(Mode::Native) && trials.iter().any(|trial| trial.processed_on.is_err());
        if fell_back || failed && self.go_behind_the_driver()? {
            return self.trials(to, limit);
        }
        Ok(trials)
    }

    fn trials(&self, to: SocketAddr, limit: Duration) -> Result<Vec<Trial>, FlowError> {
        let allowed = CpuMask::of_this_thread().map_err(|error| FlowError::system("asking for the CPUs", error))?;
        let layout = *self.layout();
        let cpus = layout.cpus().iter().filter(|&cpu| allowed.contains(cpu));
        Ok(cpus.map(|cpu| Trial { cpu, processed_on: connect_on(&layout, cpu, to, limit) }).collect())
    }

    fn go_behind_the_driver(&mut self) -> Result<bool, FlowError> {
        match self.attached_to() {
            Some((interface, ModeWish::Auto)) => {
                let interface = interface.to_owned();
                self.reattach(&interface, Mode::Generic).map(|_| true)
            }
            _ => Ok(false),
        }
    }
}

/// The CPU that processed the answer to a connection opened on `cpu`. On a thread of its own, which is pinned.
fn connect_on(layout: &Layout, cpu: usize, to: SocketAddr, limit: Duration) -> io::Result<usize> {
    thread::scope(|scope| {
        let work = || -> io::Result<usize> {
            let mut one = rustix::thread::CpuSet::new();
            one.set(cpu);
            rustix::thread::sched_setaffinity(None, &one)?;
            let socket = socket_for(&to)?;
            source_port::choose_for_cpu(layout, socket.as_raw_fd(), cpu)?;
            // connect(2) waits no longer than that (socket(7), SO_SNDTIMEO).
            let send = libc::timeval { tv_sec: limit.as_secs() as i64, tv_usec: i64::from(limit.subsec_micros()) };
            set_option(socket.as_raw_fd(), libc::SO_SNDTIMEO, &send)?;
            rustix::net::connect(&socket, &to).map_err(|error| match error {
                rustix::io::Errno::INPROGRESS => io::Error::from_raw_os_error(libc::ETIMEDOUT),
                error => error.into(),
            })?;
            let mut stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(limit))?;
            stream.shutdown(Shutdown::Write)?;
            // Whatever comes, from the service's process; a service that stays silent has answered the opening.
            let _ = stream.read(&mut [0]);
            incoming_cpu(&stream)
        };
        let handle = thread::Builder::new().name("ksf-flow-trial".into()).spawn_scoped(scope, work)?;
        handle.join().unwrap_or_else(|_| Err(io::Error::other("the trial's thread ended")))
    })
}

fn socket_for(to: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: makes a descriptor of three numbers.
    let socket = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

fn set_option<T>(socket: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes of `value`, which lives for the call.
    let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, option, std::ptr::from_ref(value).cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The CPU that processed what the socket received last.
fn incoming_cpu(stream: &TcpStream) -> io::Result<usize> {
    let mut cpu = -1i32;
    let mut bytes = size_of_val(&cpu) as libc::socklen_t;
    // SAFETY: the kernel writes at most four bytes to `cpu`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            std::ptr::from_mut(&mut cpu).cast(),
            &raw mut bytes,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    usize::try_from(cpu).map_err(|_| io::Error::other("the kernel does not say which CPU processed the answer"))
}
