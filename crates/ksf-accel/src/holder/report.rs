//! The status socket: what is said to people.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use rustix::event::epoll::{self, EventFlags};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

use super::listener::{self, Listener};
use super::{Holder, Kind, data};
use crate::Level;
use crate::status::{ListenerStatus, QueueStatus, RefusedRequests, Reply, Status, WorkerStatus};

/// Questions at a time.
const CONNS_MAX: usize = 64;

pub(super) struct StatusSocket {
    socket: OwnedFd,
    path: PathBuf,
    conns: HashMap<u64, OwnedFd>,
    next: u64,
}

impl StatusSocket {
    /// `PID.sock`, or `PID-2.sock` and so on where this process has several holders.
    pub(super) fn bind(folder: &Path) -> io::Result<Self> {
        // Only its owner may ask; the socket itself says the same.
        match std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // It gets its name when it listens: a reader takes a socket without a listener for one of the dead.
        let unnamed = folder.join(format!(".{}", super::conn::unique_name()?));
        rustix::net::bind(&socket, &SocketAddrUnix::new(&unnamed)?)?;
        let path = std::fs::set_permissions(&unnamed, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| Ok(rustix::net::listen(&socket, 16)?))
            .and_then(|()| name(&unnamed, folder));
        std::fs::remove_file(&unnamed)?;
        Ok(Self { socket, path: path?, conns: HashMap::new(), next: 1 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for StatusSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives a socket the first free name of this process.
fn name(unnamed: &Path, folder: &Path) -> io::Result<PathBuf> {
    let pid = std::process::id();
    let mut number = 1;
    loop {
        let name = if number == 1 { format!("{pid}.sock") } else { format!("{pid}-{number}.sock") };
        let path = folder.join(name);
        match std::fs::hard_link(unnamed, &path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) if is_stale(&SocketAddrUnix::new(&path)?) => std::fs::remove_file(&path)?,
            Err(_) => number += 1,
        }
    }
}

/// Nobody listens there: an earlier process with this id was killed.
fn is_stale(address: &SocketAddrUnix) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .is_ok_and(|socket| rustix::net::connect(&socket, address) == Err(Errno::CONNREFUSED))
}

impl Holder {
    pub(super) fn accept_status(&mut self) {
        let Some(status) = &mut self.status_socket else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&status.socket, flags) else { return };
        if status.conns.len() >= CONNS_MAX {
            // The oldest has had its time.
            let oldest = status.conns.keys().min().copied();
            oldest.and_then(|oldest| status.conns.remove(&oldest));
        }
        let number = status.next;
        status.next += 1;
        if epoll::add(&self.epoll, &socket, data(Kind::StatusConn, number), EventFlags::IN).is_ok() {
            status.conns.insert(number, socket);
        }
    }

    pub(super) fn serve_status(&mut self, number: u64) {
        // One question per connection; it ends when `socket` is dropped.
        let Some(socket) = self.status_socket.as_mut().and_then(|status| status.conns.remove(&number)) else { return };
        let mut word = [0; 16];
        let Ok((len, _)) = rustix::net::recv(&socket, &mut word, RecvFlags::DONTWAIT) else { return };
        let error = match &word[..len] {
            b"status" => None,
            b"pause" => self.switch(false),
            b"resume" => self.switch(true),
            _ => Some("this holder knows status, pause and resume".to_owned()),
        };
        let reply = Reply { error, status: self.status() };
        // Who does not get an answer says so by itself.
        let _ = send(socket.as_fd(), &reply);
    }

    /// What was wrong with it, in words.
    fn switch(&mut self, on: bool) -> Option<String> {
        if self.level() == Level::IncomingCpu && !on {
            return Some("SO_INCOMING_CPU cannot be paused: its queues are members of the listener's group".into());
        }
        self.options.on = on;
        self.steering.shared.state().control.on.store(on.into(), SeqCst);
        for index in 0..self.listeners.len() {
            if self.listeners[index].is_some() {
                self.tell(index);
            }
        }
        self.pulse.beat(Instant::now());
        None
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            name: self.program_socket.address.name.clone(),
            program: self.options.program.clone(),
            on: self.options.on,
            level: self.level(),
            refused: self.steering.refused.clone(),
            other_programs: self.steering.others(),
            processes: self.lifetime.processes(),
            listeners: (0..self.listeners.len())
                .filter_map(|index| {
                    self.listeners[index].as_ref().map(|listener| self.listener_status(index, listener))
                })
                .collect(),
            workers: (0..self.workers.len()).filter_map(|index| self.worker_status(index)).collect(),
            ended_workers: self.ended_workers,
            stalls: self.stalls,
            rescues: self.rescues,
            refused_requests: self
                .refused_requests
                .values()
                .map(|&(reason, count)| RefusedRequests { why: reason.text().to_owned(), count })
                .collect(),
        }
    }

    fn listener_status(&self, index: usize, listener: &Listener) -> ListenerStatus {
        let queues = listener.queues.iter().map(|(&worker, queue)| {
            let (waiting, waiting_max) = listener::waiting(queue.fd.as_fd()).unwrap_or_default();
            QueueStatus { worker: worker as u32, ready: self.is_ready(index, worker), waiting, waiting_max }
        });
        ListenerStatus {
            address: listener.address.to_string(),
            mechanism: if listener.not_accelerated.is_some() { Level::Plain } else { self.level() },
            not_accelerated: listener.not_accelerated.clone(),
            trouble: listener.trouble.clone(),
            own_reuseport: listener.own_reuseport,
            excluded: listener.excluded.clone(),
            queues: queues.collect(),
        }
    }

    fn worker_status(&self, index: usize) -> Option<WorkerStatus> {
        let worker = self.workers[index].as_ref()?;
        let address = |(at, listener): (usize, &Option<Listener>)| {
            listener.as_ref().filter(|_| self.is_ready(at, index)).map(|listener| listener.address.to_string())
        };
        Some(WorkerStatus {
            index: index as u32,
            pid: worker.pid,
            tid: worker.tid,
            cpu: worker.cpu,
            ready: self.listeners.iter().enumerate().filter_map(address).collect(),
            stalled: self.steering.shared.worker(index).stalled.load(Relaxed) != 0,
            counters: self.counters(index),
        })
    }
}

fn send(socket: BorrowedFd<'_>, reply: &Reply) -> io::Result<()> {
    let file = std::fs::File::from(rustix::fs::memfd_create("ksf_status", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(io::BufWriter::new(&file), reply)?;
    io::Seek::rewind(&mut &file)?;
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[io::IoSlice::new(b"json")], &mut control, flags)?;
    Ok(())
}
