//! Real connections over the device that is steered: the self-check after attaching.

use std::io::{self, Read as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

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
            ksf::cpus::pin_to(cpu)?;
            let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            source_port::choose_for_cpu(layout, socket.as_raw_fd(), cpu)?;
            // connect(2) waits no longer than that (socket(7), SO_SNDTIMEO).
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
            rustix::net::connect(&socket, &to).map_err(|error| match error {
                rustix::io::Errno::INPROGRESS => io::Error::from_raw_os_error(libc::ETIMEDOUT),
                error => error.into(),
            })?;
            let mut stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(limit))?;
            stream.shutdown(Shutdown::Write)?;
            // Whatever comes, from the service's process; a service that stays silent has answered the opening.
            let _ = stream.read(&mut [0]);
            // The CPU that processed what the socket received last; -1: none.
            let cpu = sockopt::socket_incoming_cpu(&stream)?;
            i32::try_from(cpu)
                .map(|cpu| cpu as usize)
                .map_err(|_| io::Error::other("no CPU is said to have processed it"))
        };
        let handle = thread::Builder::new().name("ksf-flow-trial".into()).spawn_scoped(scope, work)?;
        handle.join().unwrap_or_else(|_| Err(io::Error::other("the trial's thread ended")))
    })
}
