//! A listener of the program and its queues.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ksf_accel_proto::message::Refusal;
use rustix::event::EventfdFlags;

use super::Holder;
use crate::address::Address;
use crate::queue::{self, Placement};
use crate::steer;
use crate::sys;

/// One listening address of the program.
pub(super) struct Listener {
    pub(super) address: Address,
    /// The program's own sockets: one, or several where it uses SO_REUSEPORT itself.
    pub(super) own: Vec<Own>,
    pub(super) own_reuseport: bool,
    pub(super) backlog: i32,
    /// By worker's index.
    pub(super) queues: BTreeMap<usize, AcceptQueue>,
    /// Workers in the order in which their queues joined the reuseport group.
    pub(super) members: Vec<usize>,
    pub(super) hidden_port: u16,
    /// Woken workers look for queues that nobody serves.
    pub(super) rescue: OwnedFd,
    /// Why it is not accelerated.
    pub(super) not_accelerated: Option<String>,
    /// What went wrong last for one of its workers.
    pub(super) trouble: Option<String>,
    /// Somebody else's listeners on the same port.
    pub(super) excluded: Vec<String>,
    /// Since then connections wait in queues without a worker, and no worker is ready.
    pub(super) abandoned_since: Option<Instant>,
    /// Which queue the next Steal begins with.
    pub(super) steal_next: usize,
    /// What a blind mechanism was told last: worker and CPU.
    pub(super) told: Option<Vec<(usize, Option<u32>)>>,
}

/// A socket of the program's own. The holder has no descriptor of it: it would keep the port after the program's close.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Own {
    pub(super) cookie: u64,
    pub(super) inode: u64,
}

/// A listening socket in the reuseport group, from which one worker accepts.
pub(super) struct AcceptQueue {
    pub(super) fd: OwnedFd,
    /// `SO_COOKIE`, where it is the program's own socket.
    pub(super) own_cookie: Option<u64>,
    pub(super) inode: u64,
    /// Of the program's own socket: the number by which its worker's process has it.
    pub(super) own_fd: Option<u32>,
    /// Connections that waited at the last look.
    pub(super) waited: u32,
    /// The worker's count of accepted connections then.
    pub(super) accepted: u64,
    /// Connections waited, and none was taken, between the last two looks.
    pub(super) untouched: bool,
    /// It will wake the holder at the next connection.
    pub(super) armed: bool,
}

impl AcceptQueue {
    pub(super) fn new(fd: OwnedFd, own_cookie: Option<u64>) -> Self {
        let inode = inode(fd.as_fd());
        Self { fd, own_cookie, inode, own_fd: None, waited: 0, accepted: 0, untouched: false, armed: false }
    }
}

impl Holder {
    pub(super) fn find(&self, cookie: u64) -> Option<usize> {
        self.listeners.iter().position(|listener| {
            listener.as_ref().is_some_and(|listener| listener.own.iter().any(|own| own.cookie == cookie))
        })
    }

    /// The program listens on a socket. A listener that cannot be accelerated is kept too, for status.
    pub(super) fn listen(&mut self, socket: BorrowedFd<'_>, cookie: u64, backlog: i32) -> Result<usize, Refusal> {
        if !queue::is_listening_tcp(socket) || cookie_of(socket) != Some(cookie) {
            return Err(Refusal::NotListening);
        }
        if netns_cookie(socket) != netns_cookie(self.program_socket.as_fd()) {
            return Err(Refusal::Namespace);
        }
        let address = Address::of(socket).map_err(|_| Refusal::NotListening)?;
        // What the kernel keeps is true also where the program listened before the library was there.
        let backlog = backlog_of(socket).unwrap_or(backlog);
        if let Some(index) = self.find(cookie) {
            return self.listen_again(index, backlog);
        }
        let own = Own { cookie, inode: inode(socket) };
        let own_reuseport = sys::option_i32(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT).unwrap_or(0) != 0;
        let same = self
            .listeners
            .iter()
            .position(|listener| listener.as_ref().is_some_and(|listener| listener.address == address));
        match same {
            Some(index) if own_reuseport && self.listener(index).own_reuseport => {
                self.listener_mut(index).own.push(own);
                self.watch_next = Instant::now();
                return self.answer_for(index);
            }
            // Only one can listen there: the one that was known has been closed, and the kernel was faster to say so.
            Some(index) => self.close_listener(index),
            None => {}
        }
        let index = self.listeners.iter().position(Option::is_none).ok_or(Refusal::Full)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let rescue = rustix::event::eventfd(0, flags).map_err(|_| Refusal::Queue)?;
        self.listeners[index] = Some(Listener {
            address,
            own: vec![own],
            own_reuseport,
            backlog,
            queues: BTreeMap::new(),
            members: Vec::new(),
            hidden_port: 0,
            rescue,
            not_accelerated: self.reason_against(own_reuseport),
            trouble: None,
            excluded: Vec::new(),
            abandoned_since: None,
            steal_next: 0,
            told: None,
        });
        // One queue at once, to see whether there can be any; the others when workers come.
        if self.listener(index).not_accelerated.is_none()
            && !own_reuseport
            && let Err(why) = self.add_queue(index, 0, socket)
        {
            self.close_queues(index);
            self.listener_mut(index).not_accelerated = Some(why);
        }
        self.watch();
        self.answer_for(index)
    }

    /// Makes the queue of a worker, or takes over what the program has set since it was made.
    pub(super) fn add_queue(&mut self, index: usize, worker: usize, own: BorrowedFd<'_>) -> Result<(), String> {
        let listener = self.listeners[index].as_ref().expect("the caller has found it");
        if let Some(present) = listener.queues.get(&worker) {
            return queue::refresh(own, present.fd.as_fd(), &listener.address).map_err(|error| error.to_string());
        }
        let place = if self.steering.has_siblings() {
            steer::open_group(own).map_err(|error| format!("SO_REUSEPORT of the listener: {error}"))?;
            Placement::Sibling
        } else {
            Placement::Hidden(listener.hidden_port)
        };
        let made = queue::make(own, &listener.address, place, listener.backlog).map_err(|error| error.to_string())?;
        let port = queue::port(made.as_fd()).map_err(|error| error.to_string())?;
        self.steering
            .add(index, worker, made.as_fd())
            .map_err(|error| format!("the {} mechanism did not take a queue: {error}", self.steering.level().name()))?;
        let listener = self.listener_mut(index);
        listener.hidden_port = port;
        listener.members.push(worker);
        listener.told = None;
        listener.queues.insert(worker, AcceptQueue::new(made, None));
        Ok(())
    }

    /// Ends a listener: its queues, and all that is known of it.
    pub(super) fn close_listener(&mut self, index: usize) {
        if self.listeners[index].is_none() {
            return;
        }
        for worker in &self.steering.shared.state().workers {
            worker.ready.fetch_and(!(1 << index), Relaxed);
        }
        for worker in self.workers.iter_mut().flatten() {
            worker.joined &= !(1 << index);
        }
        self.close_queues(index);
        self.displaced.retain(|displaced| displaced.listener != index);
        self.listeners[index] = None;
    }

    pub(super) fn close_queues(&mut self, index: usize) {
        let listener = self.listener_mut(index);
        listener.members.clear();
        for (worker, queue) in std::mem::take(&mut listener.queues) {
            self.steering.remove(index, worker);
            // The program's own socket is closed by the program.
            if queue.own_cookie.is_none() {
                queue::close(queue.fd);
            }
        }
    }

    pub(super) fn listener(&self, index: usize) -> &Listener {
        self.listeners[index].as_ref().expect("an index that was found")
    }

    pub(super) fn listener_mut(&mut self, index: usize) -> &mut Listener {
        self.listeners[index].as_mut().expect("an index that was found")
    }

    /// `listen()` again changes the backlog.
    fn listen_again(&mut self, index: usize, backlog: i32) -> Result<usize, Refusal> {
        let listener = self.listener_mut(index);
        if listener.backlog != backlog {
            listener.backlog = backlog;
            for queue in listener.queues.values().filter(|queue| queue.own_cookie.is_none()) {
                let _ = rustix::net::listen(&queue.fd, backlog);
            }
        }
        self.answer_for(index)
    }

    fn answer_for(&self, index: usize) -> Result<usize, Refusal> {
        // It may have been closed by now, and its end been seen.
        let listener = self.listeners[index].as_ref().ok_or(Refusal::NotListening)?;
        match &listener.not_accelerated {
            None => Ok(index),
            Some(_) if self.steering.level() == crate::Level::Plain => Err(Refusal::Off),
            Some(_) => Err(Refusal::Queue),
        }
    }

    fn reason_against(&self, own_reuseport: bool) -> Option<String> {
        match self.steering.level() {
            crate::Level::Plain => Some("no mechanism works here, or none was asked for".into()),
            crate::Level::SkLookup => None,
            level if own_reuseport => Some(format!(
                "the program uses SO_REUSEPORT itself, and {} would take the place of its own choice",
                level.name()
            )),
            _ => None,
        }
    }
}

pub(super) fn cookie_of(socket: BorrowedFd<'_>) -> Option<u64> {
    rustix::net::sockopt::socket_cookie(socket).ok()
}

fn inode(socket: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstat(socket).map_or(0, |stat| stat.st_ino)
}

/// `None` on kernels before 5.14, where all are taken for the same.
fn netns_cookie(socket: BorrowedFd<'_>) -> Option<Vec<u8>> {
    // asm-generic/socket.h
    const SO_NETNS_COOKIE: i32 = 71;
    sys::option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE, 8).ok()
}

/// Of a listening socket, TCP_INFO tells the length of the queue and its limit in the fields `tcpi_unacked` and
/// `tcpi_sacked` (net/ipv4/tcp.c, `tcp_get_info`).
pub(super) fn waiting(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let info = sys::option(socket, libc::IPPROTO_TCP, libc::TCP_INFO, 32)?;
    let word = |at: usize| info.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
    // Eight bytes and four words come before.
    match (word(24), word(28)) {
        (Some(waiting), Some(max)) => Ok((waiting, max)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn backlog_of(socket: BorrowedFd<'_>) -> Option<i32> {
    waiting(socket).ok().and_then(|(_, max)| i32::try_from(max).ok())
}
