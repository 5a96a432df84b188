//! Many datagrams by one system call. The replies of a turn leave together; those that find their socket full wait, in
//! order. Replies of one length to one peer go through the kernel as one packet, which is cut where it leaves the machine or
//! arrives (UDP_SEGMENT, Linux 4.18): with 128 messages of a peer in flight that takes half of the CPU time.

use std::os::fd::{BorrowedFd, RawFd};
use std::{io, ptr};

use rustix::net::RecvFlags;

use super::msg::{Control, Name, is_option_on, write_pktinfo, write_segment_bytes};
use crate::datagram_output::{DatagramOutput, Run};
use crate::env::Env;

/// Datagrams of one system call.
pub(super) const TOGETHER_MAX: usize = 64;
/// Replies that are longer together do not wait for the end of the turn.
const TOGETHER_BYTES_MAX: usize = 256 << 10;
/// Replies that leave one by one after the kernel refused some that were joined: a path that is too narrow for them, or a
/// device that cannot cut them, does not change soon.
const UNJOINED: usize = 4096;

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
    /// The kernel cuts replies that are joined.
    joins: bool,
    /// Replies before it is asked to do so again.
    unjoined: usize,
    /// What the shard's budget knows of those that wait for room.
    counted_bytes: usize,
}

impl Queue {
    fn socket(&self) -> BorrowedFd<'_> {
        // SAFETY: the shard keeps the sockets open as long as the engine.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Takes what the next call would be told instead of doing its work (SO_ERROR).
    fn take_pending_error(&self) {
        let _ = rustix::net::sockopt::socket_error(self.socket());
    }

    fn recount(&mut self, env: &mut Env) {
        let bytes = if self.full { self.unsent.bytes() } else { 0 };
        if bytes != self.counted_bytes {
            env.budget.recount_replies(self.counted_bytes, bytes);
            self.counted_bytes = bytes;
        }
    }
}

impl DatagramQueues {
    pub(super) fn new() -> Self {
        Self { queues: Vec::new(), sender: Sender::new() }
    }

    /// Adds a socket under this number.
    pub(super) fn open(&mut self, socket: u32, fd: RawFd) {
        let at = socket as usize;
        if at >= self.queues.len() {
            let none = || Queue {
                fd: -1,
                unsent: DatagramOutput::default(),
                full: false,
                joins: false,
                unjoined: 0,
                counted_bytes: 0,
            };
            self.queues.resize_with(at + 1, none);
        }
        self.queues[at].fd = fd;
        self.queues[at].joins = is_option_on(fd, libc::SOL_UDP, libc::UDP_SEGMENT).is_some();
    }

    pub(super) fn fd(&self, socket: u32) -> RawFd {
        self.queues[socket as usize].fd
    }

    /// Takes the pending error of a socket, and those in its queue (IP_RECVERR): a datagram that it sent before met a port
    /// without a listener (ICMP).
    pub(super) fn take_errors(&mut self, socket: u32) {
        let queue = &self.queues[socket as usize];
        let flags = RecvFlags::ERRQUEUE | RecvFlags::DONTWAIT;
        // Some at a time: where there are more, the socket is reported again.
        for _ in 0..TOGETHER_MAX {
            if rustix::net::recv(queue.socket(), &mut [0; 0][..], flags).is_err() {
                break;
            }
        }
        queue.take_pending_error();
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

    /// True while a socket is full: the engine has to tell when it has room.
    pub(super) fn is_full(&self, socket: u32) -> bool {
        self.queues[socket as usize].full
    }

    fn send(&mut self, socket: u32, env: &mut Env) {
        let queue = &mut self.queues[socket as usize];
        // Replies that were refused together and are tried one by one: their peer may be what the kernel refuses...
        let mut tried_apart = 0;
        // ...or that they were joined.
        let mut for_joining = false;
        // The first of them was refused, and is tried once more.
        let mut tried_again = false;
        while !queue.unsent.is_empty() {
            env.stats.syscalls.add(1);
            let may_join = queue.joins && queue.unjoined == 0 && tried_apart == 0;
            match self.sender.send(queue.fd, &queue.unsent, may_join) {
                Ok(sent) => {
                    tried_again = false;
                    if std::mem::take(&mut tried_apart) > 0 && for_joining {
                        queue.unjoined = UNJOINED;
                    }
                    env.stats.datagrams_out.add(sent as u64);
                    queue.unsent.advance(sent);
                    queue.unjoined = queue.unjoined.saturating_sub(sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    queue.full = true;
                    break;
                }
                // It may be the error of one that left before, of any number: a socket that is connected, or has IP_RECVERR, is
                // told it by its next call, which then sends nothing. So an error is believed when the same is tried with none
                // pending.
                Err(_) if !tried_again => {
                    env.stats.syscalls.add(1);
                    queue.take_pending_error();
                    tried_again = true;
                }
                // Not all of them may be at fault: each gets its own two tries.
                Err(error) if self.sender.counts[0] > 1 => {
                    tried_again = false;
                    tried_apart = self.sender.counts[0];
                    for_joining = may_be_for_joining(&error);
                }
                // The kernel refuses the first of them.
                Err(_) => {
                    tried_again = false;
                    env.stats.datagrams_unsent.add(1);
                    queue.unsent.advance(1);
                    tried_apart = tried_apart.saturating_sub(1);
                }
            }
        }
        self.keep_to_limit(socket, env);
    }

    /// Gives up those that came last to a full socket, if more wait than may: more datagrams, or more bytes than the
    /// shard's budget has room for. Bytes that were counted before had room.
    fn keep_to_limit(&mut self, socket: u32, env: &mut Env) {
        let had_room_bytes = self.queues[socket as usize].counted_bytes;
        self.queues[socket as usize].recount(env);
        if !self.queues[socket as usize].full {
            return;
        }
        let mut waiting = self.queues.iter().filter(|queue| queue.full).map(|queue| queue.unsent.len()).sum::<usize>();
        let queue = &mut self.queues[socket as usize];
        let is_too_much = |waiting: usize, counted_bytes: usize, env: &Env| {
            waiting > env.limits.datagram_queue_max
                || counted_bytes > had_room_bytes && env.budget.owed_bytes() > env.limits.shard_bytes_max
        };
        while is_too_much(waiting, queue.counted_bytes, env) && !queue.unsent.is_empty() {
            waiting -= 1;
            env.stats.datagrams_unsent.add(1);
            queue.unsent.drop_last();
            queue.recount(env);
        }
    }
}

/// Whether the kernel may have refused replies because they are joined: a path that is too narrow, a device or a socket that
/// cannot cut them (udp(7), `udp_send_skb`). It refuses a peer without a port by one of these, too.
fn may_be_for_joining(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP))
}

/// Headers for [`TOGETHER_MAX`] runs of datagrams, made once: for each run only the address, the bytes and the lengths are
/// set.
struct Sender {
    headers: Box<[libc::mmsghdr]>,
    parts: Box<[Part]>,
    /// Datagrams of each run.
    counts: [usize; TOGETHER_MAX],
    /// What the next calls are told instead of sending: errors that come between two calls come when they like.
    #[cfg(test)]
    told: std::collections::VecDeque<libc::c_int>,
}

/// What the header of one run points to, but for the bytes.
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
        Self {
            headers,
            parts,
            counts: [0; _],
            #[cfg(test)]
            told: Default::default(),
        }
    }

    /// Sends as many of these as the socket takes now, joined where they may be. Returns how many that were, at least one; an
    /// error is about the first run.
    fn send(&mut self, fd: RawFd, unsent: &DatagramOutput, may_join: bool) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let (mut runs, mut replies) = (0, 0);
        while runs < TOGETHER_MAX
            && let Some(run) = unsent.run(replies, may_join)
        {
            self.parts[runs].fill(&mut self.headers[runs].msg_hdr, &run);
            self.counts[runs] = run.count;
            (runs, replies) = (runs + 1, replies + run.count);
        }
        #[cfg(test)]
        if let Some(error) = self.told.pop_front() {
            return Err(io::Error::from_raw_os_error(error));
        }
        let (parts, headers) = (&mut self.parts, &mut self.headers);
        let result = match &headers[..runs] {
            // A header costs the kernel two copies more than its parts do.
            [only] if only.msg_hdr.msg_controllen == 0 => {
                let part = &parts[0];
                let (bytes, len) = (part.slice.iov_base.cast_const(), part.slice.iov_len);
                let (name, name_len) = (part.name.as_ptr().cast(), only.msg_hdr.msg_namelen);
                // SAFETY: `slice` is a reply in `unsent`, and the name one of that length in `part`; both live through the
                // call, which reads them.
                unsafe { libc::sendto(fd, bytes, len, flags, name, name_len) }
            }
            // SAFETY: the header points into `parts[0]` and to replies in `unsent`, which stay where they are through the call.
            [only] => unsafe { libc::sendmsg(fd, &raw const only.msg_hdr, flags) },
            // SAFETY: the first `runs` headers point each into their part and to replies in `unsent`, all of which stay where
            // they are through the call.
            _ => unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), runs as libc::c_uint, flags as _) as isize },
        };
        match result {
            ..0 => Err(io::Error::last_os_error()),
            // The number of bytes, which may be none.
            _ if runs == 1 => Ok(self.counts[0]),
            sent => Ok(self.counts[..sent as usize].iter().sum()),
        }
    }
}

impl Part {
    #[inline]
    fn fill(&mut self, header: &mut libc::msghdr, run: &Run<'_>) {
        self.slice = libc::iovec { iov_base: run.bytes.as_ptr().cast_mut().cast(), iov_len: run.bytes.len() };
        header.msg_namelen = self.name.set(run.peer.addr);
        let mut len = 0;
        if let Some((local, interface)) = run.peer.local {
            len = write_pktinfo(&mut self.control, local, interface);
        }
        if run.count > 1 {
            len = write_segment_bytes(&mut self.control, len, run.segment_bytes as u16);
        }
        (header.msg_control, header.msg_controllen) =
            if len == 0 { (ptr::null_mut(), 0) } else { (self.control.as_mut_ptr().cast(), len) };
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use ksf_test::{PATIENCE, wait_until};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::limits::Limits;
    use crate::listener::{DatagramPeer, set_option};
    use crate::pool::{Memory, Pool};

    const COUNT: usize = 20;
    const REPLY: &[u8] = b"a reply";

    /// Replies of a socket to one peer, which takes them as they came through the kernel.
    struct Bench {
        env: Env,
        queues: DatagramQueues,
        ours: UdpSocket,
        peer: UdpSocket,
    }

    impl Bench {
        fn new() -> Self {
            let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
            let on: libc::c_int = 1;
            set_option(&peer, libc::SOL_UDP, libc::UDP_GRO, &on).unwrap();
            peer.set_read_timeout(Some(PATIENCE)).unwrap();
            let env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
            let (ours, mut queues) = (UdpSocket::bind("127.0.0.1:0").unwrap(), DatagramQueues::new());
            queues.open(0, ours.as_raw_fd());
            Self { env, queues, ours, peer }
        }

        /// Sends `COUNT` replies, whose first calls are told these errors. Returns how many were given up.
        fn send_told(&mut self, told: &[libc::c_int]) -> u64 {
            let before = self.env.stats.datagrams_unsent.value();
            let to = DatagramPeer { addr: self.peer.local_addr().unwrap(), local: None };
            self.queues.sender.told.extend(told);
            (0..COUNT).for_each(|_| self.queues.output(0).add(to, |bytes| bytes.extend_from_slice(REPLY)));
            self.queues.flush(&mut self.env);
            assert!(self.queues.sender.told.is_empty() && self.queues.output(0).is_empty());
            self.env.stats.datagrams_unsent.value() - before
        }

        /// Receives `COUNT` replies, in packets of this number.
        fn expect_joined(&self, replies: usize, what: &str) {
            for _ in 0..COUNT / replies {
                let bytes = self.peer.recv(&mut [0; 1000]).unwrap();
                assert_eq!(bytes, replies * REPLY.len(), "{what}");
            }
        }
    }

    /// That of a peer that is gone comes between the tries of replies to another one.
    #[test]
    fn errors_of_others_in_any_number_cost_no_reply() {
        let (gone, joined) = (libc::ECONNREFUSED, libc::EINVAL);
        let cases: [&[libc::c_int]; 5] =
            [&[gone], &[gone, gone], &[gone, joined, gone], &[joined, joined, gone], &[gone, gone, gone]];
        for told in cases {
            let mut bench = Bench::new();
            assert_eq!(bench.send_told(told), 0, "told {told:?}");
            let mut bytes = 0;
            while bytes < COUNT * REPLY.len() {
                bytes += bench.peer.recv(&mut [0; 1000]).unwrap();
            }
        }
    }

    /// EMSGSIZE is also what an ICMP message about the path of an earlier datagram brings.
    #[test]
    fn only_what_is_refused_twice_for_joining_leaves_unjoined() {
        let cases: [(&[libc::c_int], usize); 3] = [
            (&[libc::EMSGSIZE], COUNT),
            (&[libc::ECONNREFUSED, libc::ECONNREFUSED], COUNT),
            (&[libc::EMSGSIZE, libc::EMSGSIZE], 1),
        ];
        for (told, together) in cases {
            let mut bench = Bench::new();
            assert_eq!(bench.send_told(told), 0);
            let mut bytes = 0;
            while bytes < COUNT * REPLY.len() {
                bytes += bench.peer.recv(&mut [0; 1000]).unwrap();
            }
            // Those that come later.
            assert_eq!(bench.send_told(&[]), 0);
            bench.expect_joined(together, &format!("after {told:?}"));
        }
    }

    /// The first try is told one error, and another one comes before the second.
    #[test]
    fn a_pending_error_is_taken_before_the_second_try() {
        let mut bench = Bench::new();
        let at = bench.peer.local_addr().unwrap();
        bench.ours.connect(at).unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        drop(std::mem::replace(&mut bench.peer, other));
        bench.ours.send(b"anybody?").unwrap();
        let no_wait = Timespec::default();
        let is_told = || poll(&mut [PollFd::new(&bench.ours, PollFlags::empty())], Some(&no_wait)).unwrap() > 0;
        wait_until("it is told", is_told);
        bench.peer = UdpSocket::bind(at).unwrap();
        let to = DatagramPeer { addr: at, local: None };
        bench.queues.sender.told.push_back(libc::ECONNREFUSED);
        bench.queues.output(0).add(to, |bytes| bytes.extend_from_slice(REPLY));
        bench.queues.flush(&mut bench.env);
        assert_eq!((bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()), (1, 0));
    }
}
