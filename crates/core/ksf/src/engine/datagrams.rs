//! Many datagrams by one system call. The replies of a turn leave together; those that find their socket full wait, in
//! order.

use std::os::fd::RawFd;
use std::{io, ptr};

use super::msg::{Control, Name, write_pktinfo};
use crate::datagram_output::DatagramOutput;
use crate::env::Env;
use crate::listener::DatagramPeer;

/// Datagrams of one system call.
pub(super) const TOGETHER_MAX: usize = 64;
/// Replies that are longer together do not wait for the end of the turn.
const TOGETHER_BYTES_MAX: usize = 256 << 10;

/// What every datagram socket of an engine has to send.
pub(super) struct DatagramQueues {
    queues: Vec<Queue>,
    sender: Sender,
}

struct Queue {
    fd: RawFd,
    unsent: DatagramOutput,
    /// The kernel had no room for the first of them.
    full: bool,
}

impl DatagramQueues {
    pub(super) fn new() -> Self {
        Self { queues: Vec::new(), sender: Sender::new() }
    }

    /// Adds a socket under this number.
    pub(super) fn open(&mut self, socket: u32, fd: RawFd) {
        let at = socket as usize;
        if at >= self.queues.len() {
            let none = || Queue { fd: -1, unsent: DatagramOutput::default(), full: false };
            self.queues.resize_with(at + 1, none);
        }
        self.queues[at].fd = fd;
    }

    pub(super) fn fd(&self, socket: u32) -> RawFd {
        self.queues[socket as usize].fd
    }

    /// Where the replies of a socket go. They leave by [`flush`](Self::flush), or when they are [many](Self::added).
    pub(super) fn output(&mut self, socket: u32) -> &mut DatagramOutput {
        &mut self.queues[socket as usize].unsent
    }

    /// Replies were added.
    pub(super) fn added(&mut self, socket: u32, env: &mut Env) {
        let queue = &mut self.queues[socket as usize];
        if queue.full {
            self.keep_to_limit(socket, env);
        } else if queue.unsent.len() >= TOGETHER_MAX || queue.unsent.bytes() >= TOGETHER_BYTES_MAX {
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
            env.stats.syscalls.add(1);
            match self.sender.send(queue.fd, &queue.unsent) {
                Ok(sent) => {
                    env.stats.datagrams_out.add(sent as u64);
                    queue.unsent.advance(sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    queue.full = true;
                    break;
                }
                // The kernel refuses the first of them.
                Err(_) => {
                    env.stats.datagrams_unsent.add(1);
                    queue.unsent.advance(1);
                }
            }
        }
        self.keep_to_limit(socket, env);
    }

    /// Gives up those that came last to a full socket, if more wait than may.
    fn keep_to_limit(&mut self, socket: u32, env: &mut Env) {
        if !self.queues[socket as usize].full {
            return;
        }
        let waiting = self.queues.iter().filter(|queue| queue.full).map(|queue| queue.unsent.len()).sum::<usize>();
        let unsent = &mut self.queues[socket as usize].unsent;
        for _ in env.limits.datagram_queue_max..waiting {
            if unsent.is_empty() {
                return;
            }
            env.stats.datagrams_unsent.add(1);
            unsent.drop_last();
        }
    }
}

/// Headers for [`TOGETHER_MAX`] datagrams, made once: for each datagram only the address, the bytes and the lengths are
/// set.
struct Sender {
    headers: Box<[libc::mmsghdr]>,
    parts: Box<[Part]>,
}

/// What the header of one datagram points to, but for the bytes.
struct Part {
    name: Name,
    control: Control,
    slice: libc::iovec,
}

impl Sender {
    fn new() -> Self {
        let slice = || libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let part = |_| Part { name: Name::default(), control: Control::default(), slice: slice() };
        let mut parts: Box<[Part]> = (0..TOGETHER_MAX).map(part).collect();
        let header = |part: &mut Part| {
            // SAFETY: all fields are plain data for which zero is a valid value (null pointers, lengths of 0).
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_name = part.name.as_mut_ptr().cast();
            header.msg_hdr.msg_iov = &raw mut part.slice;
            header.msg_hdr.msg_iovlen = 1;
            header
        };
        let headers = parts.iter_mut().map(header).collect();
        Self { headers, parts }
    }

    /// Sends as many of these as the socket takes now. Returns how many that were, at least one; an error is about the
    /// first.
    fn send(&mut self, fd: RawFd, unsent: &DatagramOutput) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let mut count = 0;
        for ((peer, bytes), (part, header)) in unsent.iter().zip(self.parts.iter_mut().zip(&mut self.headers)) {
            part.fill(&mut header.msg_hdr, peer, bytes);
            count += 1;
        }
        let (parts, headers) = (&mut self.parts, &mut self.headers);
        let result = match &headers[..count] {
            // A header costs the kernel two copies more than its parts do.
            [only] if only.msg_hdr.msg_controllen == 0 => {
                let part = &parts[0];
                let (bytes, len) = (part.slice.iov_base.cast_const(), part.slice.iov_len);
                let (name, name_len) = (part.name.as_ptr().cast(), only.msg_hdr.msg_namelen);
                // SAFETY: `slice` is a reply in `unsent`, and the name one of that length in `part`; both live through the
                // call, which reads them.
                unsafe { libc::sendto(fd, bytes, len, flags, name, name_len) }.min(1)
            }
            // SAFETY: the header points into `parts[0]` and to a reply in `unsent`, which stay where they are through the call.
            [only] => unsafe { libc::sendmsg(fd, &raw const only.msg_hdr, flags) }.min(1),
            // SAFETY: the first `count` headers point each into their part and to a reply in `unsent`, all of which stay where
            // they are through the call.
            _ => unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count as libc::c_uint, flags as _) as isize },
        };
        match result {
            ..0 => Err(io::Error::last_os_error()),
            // A datagram without a byte is one, too.
            sent => Ok(if count == 1 { 1 } else { sent as usize }),
        }
    }
}

impl Part {
    #[inline]
    fn fill(&mut self, header: &mut libc::msghdr, peer: &DatagramPeer, bytes: &[u8]) {
        self.slice = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        header.msg_namelen = self.name.set(peer.addr);
        (header.msg_control, header.msg_controllen) = match peer.local {
            None => (ptr::null_mut(), 0),
            Some((local, interface)) => {
                let len = write_pktinfo(&mut self.control, local, interface);
                (self.control.as_mut_ptr().cast(), len)
            }
        };
    }
}
