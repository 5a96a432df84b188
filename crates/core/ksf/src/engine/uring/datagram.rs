//! Datagrams: one multishot receive per socket. Sends need the ring only to hear of room in a full socket.

use std::mem;
use std::os::fd::RawFd;

use io_uring::types::{Fd, RecvMsgOut};
use io_uring::{cqueue, opcode};

use super::Uring;
use super::buffer_ring::BUFFER_GROUP;
use super::ring::Op;
use crate::engine::Event;
use crate::engine::msg::{CONTROL_BYTES, read_pktinfo, socket_addr};
use crate::env::Env;
use crate::listener::DatagramPeer;

pub(super) struct DatagramSocket {
    /// Read by the kernel while the receive is armed; boxed so that its address holds.
    header: Box<libc::msghdr>,
    /// A poll for room to send is armed.
    polled: bool,
    /// A receive is armed, or being cancelled.
    armed: bool,
    /// It is not read for now.
    stopped: bool,
}

impl DatagramSocket {
    fn new() -> Self {
        // SAFETY: all fields are plain data for which zero is a valid value.
        let mut header: Box<libc::msghdr> = unsafe { Box::new(mem::zeroed()) };
        header.msg_namelen = mem::size_of::<libc::sockaddr_in6>() as libc::socklen_t;
        header.msg_controllen = CONTROL_BYTES;
        Self { header, polled: false, armed: false, stopped: false }
    }
}

impl Uring {
    pub(super) fn start_datagrams(&mut self, socket: u32, fd: RawFd) {
        let at = socket as usize;
        if at >= self.sockets.len() {
            self.sockets.resize_with(at + 1, DatagramSocket::new);
        }
        self.datagrams.open(socket, fd);
        self.arm_datagram(socket);
    }

    /// Asks to be told when a full socket has room.
    pub(super) fn poll_full_sockets(&mut self) {
        for socket in 0..self.sockets.len() as u32 {
            if self.datagrams.is_full(socket) && !mem::replace(&mut self.sockets[socket as usize].polled, true) {
                let poll = opcode::PollAdd::new(Fd(self.datagrams.fd(socket)), libc::POLLOUT as u32).build();
                self.push(poll.user_data(Op::Room(socket).user_data()));
            }
        }
    }

    pub(super) fn socket_has_room(&mut self, socket: u32, env: &mut Env) {
        self.sockets[socket as usize].polled = false;
        self.datagrams.has_room(socket, env);
    }

    pub(super) fn received_datagram(
        &mut self,
        socket: u32,
        entry: &cqueue::Entry,
        env: &mut Env,
        events: &mut Vec<Event>,
    ) {
        if !cqueue::more(entry.flags()) {
            self.sockets[socket as usize].armed = false;
            self.rearm.push(Op::Datagram(socket));
        }
        if entry.result() == -libc::ENOBUFS {
            env.stats.slots_exhausted.add(1);
        }
        let Some(slot) = cqueue::buffer_select(entry.flags()).and_then(|at| self.buffers.take(at, &mut env.pool))
        else {
            return;
        };
        let Ok(length) = usize::try_from(entry.result()) else { return };
        let whole = slot.freeze(length);
        let header = &self.sockets[socket as usize].header;
        let Ok(out) = RecvMsgOut::parse(&whole, header) else { return };
        let Some(addr) = socket_addr(out.name_data()) else { return };
        let peer = DatagramPeer { addr, local: read_pktinfo(out.control_data()) };
        let truncated = out.is_payload_truncated() || out.flags() & libc::MSG_TRUNC as u32 != 0;
        let payload_bytes = out.payload_data().len();
        let start = whole.len() - payload_bytes;
        let chunk = whole.slice(start..start + payload_bytes);
        events.push(Event::Datagram { socket, peer, chunk, truncated });
    }

    pub(super) fn read_datagrams(&mut self, socket: u32, reads: bool) {
        let state = &mut self.sockets[socket as usize];
        let stops = state.armed && !reads && !state.stopped;
        state.stopped = !reads;
        if stops {
            self.cancel(Op::Datagram(socket));
        }
        self.arm_datagram(socket);
    }

    /// Receives, unless it does so or is not to.
    pub(super) fn arm_datagram(&mut self, socket: u32) {
        let state = &mut self.sockets[socket as usize];
        if state.stopped || mem::replace(&mut state.armed, true) {
            return;
        }
        let (fd, header) = (Fd(self.datagrams.fd(socket)), &raw const *self.sockets[socket as usize].header);
        let entry = opcode::RecvMsgMulti::new(fd, header, BUFFER_GROUP).build();
        self.push(entry.user_data(Op::Datagram(socket).user_data()));
    }
}
