//! The holder's socket and its connections: one request, one answer, nothing ever waited for.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ksf_accel_proto::message::{Answer, NO_WORKER, REQUEST_BYTES, Refusal, Request};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::{EventSource, Holder, data};
use crate::sys;

/// Connections at a time. A process has one or two, as a rule only while it asks.
const CONNS_MAX: usize = 4096;
/// Connections that have not said Hello. It is the first thing that is said, so older ones are not of the library.
///
/// Every process of this network namespace can connect. Beyond a limit the user with the most connections loses its oldest:
/// what one user opens keeps no other out. Strangers are one user.
const UNAUTHENTICATED_MAX: usize = 32;

/// Where the program finds its holder: a listening socket in the abstract namespace, and the secret.
#[derive(Debug)]
pub struct ProgramAddress {
    pub(super) name: String,
    pub(super) token: [u8; 16],
    pub(super) socket: OwnedFd,
}

impl ProgramAddress {
    /// A new one, in the network namespace of this thread.
    pub fn new() -> io::Result<Self> {
        let (name, token) = (sys::unique_name()?, sys::random()?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::net::listen(&socket, 1024)?;
        Ok(Self { name, token, socket })
    }

    /// One that another process has made, from what it handed over: `socket`, and the value of [`Self::environment`].
    pub fn from_parts(socket: OwnedFd, environment: &str) -> Option<Self> {
        let (name, token) = environment.rsplit_once(':')?;
        let token: Vec<u8> = (0..token.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(token.get(at..at + 2)?, 16).ok())
            .collect::<Option<_>>()?;
        Some(Self { name: name.to_owned(), token: token.try_into().ok()?, socket })
    }

    /// Value of the environment variable `ksf_accel_proto::message::ENVIRONMENT`.
    pub fn environment(&self) -> String {
        environment(&self.name, &self.token)
    }

    /// The socket, to hand it over. Without it the address is only a name.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }
}

pub(super) fn environment(name: &str, token: &[u8; 16]) -> String {
    format!("{name}:{}", sys::hex(token))
}

pub(super) struct ProgramSocket {
    pub(super) address: ProgramAddress,
}

impl ProgramSocket {
    pub(super) fn new(address: ProgramAddress) -> Self {
        Self { address }
    }
}

impl AsFd for ProgramSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.address.socket.as_fd()
    }
}

/// A process of the program, as far as it is connected.
pub(super) struct ConnectedProcess {
    pub(super) socket: OwnedFd,
    /// The process that connected; 0: one that this process namespace does not show.
    pub(super) pid: u32,
    /// Its effective user then.
    pub(super) uid: u32,
    /// It has shown the token.
    pub(super) known: bool,
    /// It lives in the holder's process namespace, so its thread ids mean something here.
    pub(super) same_pids: bool,
}

/// What is sent back: the answer, and descriptors with it.
pub(super) struct Reply {
    pub(super) answer: Answer,
    pub(super) files: Vec<OwnedFd>,
}

impl Reply {
    pub(super) fn refused(reason: Refusal) -> Self {
        Self { answer: Answer::Refused { reason }, files: Vec::new() }
    }
}

impl Holder {
    pub(super) fn accept_conns(&mut self) {
        // As many as wait, but not for ever: others have something to say too.
        for _ in 0..64 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.program_socket, flags) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE) => {
                    // No descriptor is left: give up one that has not said Hello, or another, rather than spin.
                    if !self.evict(|conn| !conn.known) {
                        self.evict(|_| true);
                    }
                    return;
                }
                Err(_) => return,
            };
            let Ok((pid, uid)) = sys::peer(socket.as_fd()) else { continue };
            if self.conns.len() >= CONNS_MAX && !self.evict(|conn| !conn.known) {
                self.evict(|_| true);
            }
            if self.conns.values().filter(|conn| !conn.known).count() >= UNAUTHENTICATED_MAX {
                self.evict(|conn| !conn.known);
            }
            let number = self.conn_next;
            self.conn_next += 1;
            if epoll::add(&self.epoll, &socket, data(EventSource::Conn, number), EventFlags::IN).is_err() {
                continue;
            }
            self.conns.insert(number, ConnectedProcess { socket, pid, uid, known: false, same_pids: false });
        }
    }

    /// A connection has something to say, or has ended.
    pub(super) fn serve(&mut self, number: u64) {
        let Some(conn) = self.conns.get(&number) else { return };
        let (request, files) = match receive(conn.socket.as_fd()) {
            Ok(Some(message)) => message,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(None) | Err(_) => return self.hang_up(number),
        };
        let is_hello = matches!(request, Some(Request::Hello { .. }));
        let begins_worker = matches!(request, Some(Request::Join { worker: NO_WORKER, .. }));
        let reply = match request {
            Some(request) if conn.known || is_hello => self.answer(number, request, files),
            Some(_) => Reply::refused(Refusal::Token),
            None => Reply::refused(Refusal::Malformed),
        };
        if let Answer::Refused { reason } = reply.answer {
            self.note_refusal(reason);
        }
        let Some(conn) = self.conns.get(&number) else { return };
        let is_sent = send(conn.socket.as_fd(), &reply).is_ok();
        // A process that does not read its answers has no use for them. Who shows a wrong token gets one answer.
        if !is_sent || !conn.known {
            self.hang_up(number);
        }
        if let Answer::Done { worker, .. } = reply.answer
            && begins_worker
            && !is_sent
        {
            // The process has given up waiting: it does not know of this worker, and would never serve its queue.
            self.free_worker(worker as usize);
        }
    }

    /// Ends a connection; the workers of its process stay.
    pub(super) fn hang_up(&mut self, number: u64) {
        if let Some(conn) = self.conns.remove(&number) {
            let _ = epoll::delete(&self.epoll, &conn.socket);
        }
    }

    /// Hangs up on one of the selected connections: the oldest of the user with the most. Users that are not trusted count as one,
    /// because one may have many, and come first of equals. False: none is selected.
    fn evict(&mut self, selects: impl Fn(&ConnectedProcess) -> bool) -> bool {
        let mut groups: HashMap<Option<u32>, HashMap<u32, Vec<u64>>> = HashMap::new();
        for (&number, conn) in self.conns.iter().filter(|(_, conn)| selects(conn)) {
            let group = Some(conn.uid).filter(|uid| self.trusted_users.contains(uid));
            groups.entry(group).or_default().entry(conn.uid).or_default().push(number);
        }
        let most = |group: &(Option<u32>, HashMap<u32, Vec<u64>>)| {
            (group.1.values().map(Vec::len).sum::<usize>(), group.0.is_none())
        };
        let group = groups.into_iter().max_by_key(most);
        let users = group.into_iter().flat_map(|(_, users)| users.into_values());
        let oldest = users.filter_map(|numbers| Some((numbers.len(), Reverse(*numbers.iter().min()?)))).max();
        let Some((_, Reverse(number))) = oldest else { return false };
        self.hang_up(number);
        true
    }
}

type Message = (Option<Request>, Vec<OwnedFd>);

/// One message and its descriptors; a message of another size is no request. `None`: the connection has ended.
fn receive(socket: BorrowedFd<'_>) -> Result<Option<Message>, Errno> {
    // One more than a request, so that a longer one is seen.
    let mut bytes = [0; REQUEST_BYTES + 1];
    // One descriptor is expected; what does not fit the kernel closes.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = rustix::net::recvmsg(socket, &mut [io::IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut files = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            files.extend(rights);
        }
    }
    if message.bytes == 0 {
        return Ok(None);
    }
    let whole = !message.flags.contains(ReturnFlags::TRUNC) && files.len() <= 1;
    let request = if whole { Request::decode(&bytes[..message.bytes]) } else { None };
    Ok(Some((request, files)))
}

fn send(socket: BorrowedFd<'_>, reply: &Reply) -> Result<(), Errno> {
    let bytes = reply.answer.encode();
    let files: Vec<BorrowedFd<'_>> = reply.files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "two descriptors at most");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[io::IoSlice::new(&bytes)], &mut control, flags).map(drop)
}
