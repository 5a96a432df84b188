//! Many datagrams by one system call. The replies of a turn leave together; those that find their socket full wait, in
//! order.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::{io, iter, mem, ptr};

use super::Event;
use super::msg::{CONTROL_BYTES, SLICES_MAX, SendMsg, read_pktinfo, send_datagram_now, socket_addr};
use crate::env::Env;
use crate::listener::DatagramPeer;
use crate::output::SendBatch;
use crate::pool::SlotMut;

/// Datagrams of one system call.
pub(super) const TOGETHER_MAX: usize = 64;

/// What every datagram socket of an engine has to send.
pub(super) struct DatagramQueues {
    queues: Vec<Queue>,
    /// A message for each datagram of a system call.
    messages: Vec<SendMsg>,
    /// The same as the system call wants them, which copies them.
    headers: Vec<libc::mmsghdr>,
}

struct Queue {
    fd: RawFd,
    unsent: VecDeque<(DatagramPeer, SendBatch)>,
    /// The kernel had no room for the first of them.
    full: bool,
}

impl DatagramQueues {
    pub(super) fn new() -> Self {
        Self { queues: Vec::new(), messages: Vec::new(), headers: Vec::new() }
    }

    /// Adds a socket under this number.
    pub(super) fn open(&mut self, socket: u32, fd: RawFd) {
        let at = socket as usize;
        if at >= self.queues.len() {
            self.queues.resize_with(at + 1, || Queue { fd: -1, unsent: VecDeque::new(), full: false });
        }
        self.queues[at].fd = fd;
    }

    pub(super) fn fd(&self, socket: u32) -> RawFd {
        self.queues[socket as usize].fd
    }

    /// Lets a datagram wait for those that leave with it: until [`flush`](Self::flush), or until they are many.
    pub(super) fn push(&mut self, socket: u32, peer: DatagramPeer, batch: SendBatch, env: &mut Env) {
        let queue = &mut self.queues[socket as usize];
        queue.unsent.push_back((peer, batch));
        if queue.full {
            self.keep_to_limit(socket, env);
        } else if queue.unsent.len() >= TOGETHER_MAX {
            self.send(socket, env);
        }
    }

    /// Sends what waits, but where a socket is full.
    pub(super) fn flush(&mut self, env: &mut Env) {
        for socket in 0..self.queues.len() as u32 {
            let queue = &self.queues[socket as usize];
            if !queue.full && !queue.unsent.is_empty() {
                self.send(socket, env);
            }
        }
    }

    /// The kernel says that a socket has room: sends what waits for it.
    pub(super) fn has_room(&mut self, socket: u32, env: &mut Env) {
        self.queues[socket as usize].full = false;
        self.send(socket, env);
    }

    /// True while a socket is full: somebody has to tell when it has room.
    pub(super) fn is_full(&self, socket: u32) -> bool {
        self.queues[socket as usize].full
    }

    fn send(&mut self, socket: u32, env: &mut Env) {
        let queue = &mut self.queues[socket as usize];
        while !queue.unsent.is_empty() {
            match send_together(queue.fd, &queue.unsent, &mut self.messages, &mut self.headers, env) {
                Ok(sent) => {
                    env.stats.datagrams_out.add(sent as u64);
                    queue.unsent.drain(..sent).for_each(|(_, batch)| batch.recycle(&mut env.spares));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    queue.full = true;
                    break;
                }
                // The kernel refuses the first of them.
                Err(_) => {
                    env.stats.datagrams_unsent.add(1);
                    queue.unsent.drain(..1).for_each(|(_, batch)| batch.recycle(&mut env.spares));
                }
            }
        }
        self.keep_to_limit(socket, env);
    }

    /// Gives up those that came last to a full socket, if more wait than may.
    fn keep_to_limit(&mut self, socket: u32, env: &mut Env) {
        let waiting = self.queues.iter().filter(|queue| queue.full).map(|queue| queue.unsent.len()).sum::<usize>();
        let queue = &mut self.queues[socket as usize];
        if !queue.full {
            return;
        }
        for _ in env.limits.datagram_queue_max..waiting {
            let Some((_, batch)) = queue.unsent.pop_back() else { return };
            env.stats.datagrams_unsent.add(1);
            batch.recycle(&mut env.spares);
        }
    }
}

/// Sends as many of these as the socket takes now. Returns how many that were, at least one; an error is about the first.
fn send_together(
    fd: RawFd,
    datagrams: &VecDeque<(DatagramPeer, SendBatch)>,
    messages: &mut Vec<SendMsg>,
    headers: &mut Vec<libc::mmsghdr>,
    env: &Env,
) -> io::Result<usize> {
    let count = datagrams.len().min(TOGETHER_MAX);
    while messages.len() < count {
        messages.push(SendMsg::new());
    }
    if count == 1 {
        let (peer, batch) = &datagrams[0];
        let sent = send_datagram_now(fd, peer, batch, &mut messages[0], env)?;
        return if sent { Ok(1) } else { Err(io::ErrorKind::WouldBlock.into()) };
    }
    headers.clear();
    for ((peer, batch), message) in datagrams.iter().zip(&mut *messages) {
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = batch.slices(&mut slices);
        let header = message.prepare(&slices[..filled], Some(peer));
        // SAFETY: it points to the header in `message`, which is initialised and not changed meanwhile.
        headers.push(libc::mmsghdr { msg_hdr: unsafe { *header }, msg_len: 0 });
    }
    debug_assert_eq!(headers.len(), count);
    env.stats.syscalls.add(1);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `headers` holds `count` headers, which point into `messages` and to the slices of the batches; all of them
    // stay where they are through the call.
    let result = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count as libc::c_uint, flags as _) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Receives many datagrams by one system call.
pub(super) struct DatagramReceiver {
    parts: Vec<Part>,
    headers: Vec<libc::mmsghdr>,
    slots: Vec<SlotMut>,
    /// Slots to be ready with: one more than came the last time, at least twice as many when all were used.
    ready: usize,
}

/// What the header of one datagram points to, but for its slot.
struct Part {
    name: Aligned<{ mem::size_of::<libc::sockaddr_in6>() }>,
    control: Aligned<CONTROL_BYTES>,
    slice: libc::iovec,
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Aligned<const N: usize>([u8; N]);

/// What a [`DatagramReceiver`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// So many, and there may be more.
    More(usize),
    /// All there was.
    All,
    /// There was no slot to receive into.
    NoSlot,
}

impl DatagramReceiver {
    pub(super) fn new() -> Self {
        let slice = || libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let part = || Part { name: Aligned([0; _]), control: Aligned([0; _]), slice: slice() };
        let parts = (0..TOGETHER_MAX).map(|_| part()).collect();
        Self { parts, headers: Vec::new(), slots: Vec::new(), ready: 2 }
    }

    /// Receives what a socket has, by one call without waiting.
    pub(super) fn receive(&mut self, socket: u32, fd: RawFd, env: &mut Env, events: &mut Vec<Event>) -> Found {
        self.slots.extend(iter::from_fn(|| env.pool.take()).take(self.ready));
        let ready = self.slots.len();
        if ready == 0 {
            env.stats.slots_exhausted.add(1);
            return Found::NoSlot;
        }
        self.headers.clear();
        for (part, slot) in self.parts.iter_mut().zip(&mut self.slots) {
            self.headers.push(part.header(slot));
        }
        env.stats.syscalls.add(1);
        let (count, no_limit) = (ready as libc::c_uint, ptr::null_mut());
        // SAFETY: `headers` holds that many headers; every pointer in them is to a live, exclusively held buffer of the
        // length given, which stays where it is through the call.
        let result = unsafe { libc::recvmmsg(fd, self.headers.as_mut_ptr(), count, libc::MSG_DONTWAIT as _, no_limit) };
        let count = usize::try_from(result).unwrap_or(0);
        for ((header, part), slot) in self.headers.iter().zip(&self.parts).zip(self.slots.drain(..)).take(count) {
            let chunk = slot.freeze(header.msg_len as usize);
            let truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            let peer = part.peer(&header.msg_hdr);
            events.extend(peer.map(|peer| Event::Datagram { socket, peer, chunk, truncated }));
        }
        if count == ready {
            self.ready = (2 * ready).min(TOGETHER_MAX);
            Found::More(count)
        } else {
            self.ready = count + 1;
            Found::All
        }
    }
}

impl Part {
    fn header(&mut self, slot: &mut SlotMut) -> libc::mmsghdr {
        let buffer = slot.as_mut_slice();
        self.slice = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: all fields are plain data for which zero is a valid value.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_name = self.name.0.as_mut_ptr().cast();
        header.msg_namelen = self.name.0.len() as libc::socklen_t;
        header.msg_iov = &raw mut self.slice;
        header.msg_iovlen = 1;
        header.msg_control = self.control.0.as_mut_ptr().cast();
        header.msg_controllen = self.control.0.len();
        libc::mmsghdr { msg_hdr: header, msg_len: 0 }
    }

    fn peer(&self, header: &libc::msghdr) -> Option<DatagramPeer> {
        let name = &self.name.0[..(header.msg_namelen as usize).min(self.name.0.len())];
        let control = &self.control.0[..header.msg_controllen.min(CONTROL_BYTES)];
        socket_addr(name).map(|addr| DatagramPeer { addr, local: read_pktinfo(control) })
    }
}
