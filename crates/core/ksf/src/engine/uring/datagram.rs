//! Datagrams: one multishot receive per socket; sends wait in the kernel only for a full socket.

use std::mem;
use std::os::fd::RawFd;

use io_uring::types::{Fd, RecvMsgOut};
use io_uring::{cqueue, opcode};

use super::Uring;
use super::buffer_ring::BUFFER_GROUP;
use super::ring::Op;
use crate::engine::Event;
use crate::engine::msg::{CONTROL_BYTES, SLICES_MAX, SendMsg, read_pktinfo, send_datagram_now, socket_addr};
use crate::env::Env;
use crate::listener::DatagramPeer;
use crate::output::SendBatch;

pub(super) struct DatagramSocket {
    pub(super) fd: RawFd,
    /// Read by the kernel while the receive is armed; boxed so that its address holds.
    pub(super) header: Box<libc::msghdr>,
}

pub(super) struct DatagramSend {
    pub(super) batch: SendBatch,
    pub(super) msg: Box<SendMsg>,
}

impl Uring {
    pub(super) fn start_datagrams(&mut self, socket: u32, fd: RawFd) {
        // SAFETY: all fields are plain data for which zero is a valid value.
        let mut header: Box<libc::msghdr> = unsafe { Box::new(mem::zeroed()) };
        header.msg_namelen = mem::size_of::<libc::sockaddr_in6>() as libc::socklen_t;
        header.msg_controllen = CONTROL_BYTES;
        let at = socket as usize;
        while self.sockets.len() <= at {
            // SAFETY: as above.
            let header = unsafe { Box::new(mem::zeroed()) };
            self.sockets.push(DatagramSocket { fd: -1, header });
        }
        self.sockets[at] = DatagramSocket { fd, header };
        self.arm_datagram(socket);
    }

    pub(super) fn send_one(&mut self, socket: u32, peer: DatagramPeer, batch: SendBatch, env: &mut Env) {
        let fd = self.sockets[socket as usize].fd;
        let counter = match send_datagram_now(fd, &peer, &batch, &mut self.msg, env) {
            Ok(true) => &env.stats.datagrams_out,
            Ok(false) => match self.submit_datagram(fd, &peer, batch, env.limits.datagram_queue_max) {
                Ok(()) => return,
                Err(back) => {
                    env.stats.datagrams_unsent.add(1);
                    return back.recycle(&mut env.spares);
                }
            },
            Err(_) => &env.stats.datagrams_unsent,
        };
        counter.add(1);
        batch.recycle(&mut env.spares);
    }

    pub(super) fn received_datagram(
        &mut self,
        socket: u32,
        entry: &cqueue::Entry,
        env: &mut Env,
        events: &mut Vec<Event>,
    ) {
        if !cqueue::more(entry.flags()) {
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

    pub(super) fn sent_datagram(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env) {
        if let Some(send) = self.datagrams[index as usize].take() {
            send.batch.recycle(&mut env.spares);
            self.spare_msgs.push(send.msg);
            self.free_datagrams.push(index);
            let counter = if entry.result() < 0 { &env.stats.datagrams_unsent } else { &env.stats.datagrams_out };
            counter.add(1);
        }
    }

    pub(super) fn arm_datagram(&mut self, socket: u32) {
        let state = &self.sockets[socket as usize];
        let entry = opcode::RecvMsgMulti::new(Fd(state.fd), &raw const *state.header, BUFFER_GROUP).build();
        self.push(entry.user_data(Op::Datagram(socket).user_data()));
    }

    /// Lets a datagram wait for room in its socket; gives it back if `queue_max` do already.
    pub(super) fn submit_datagram(
        &mut self,
        fd: RawFd,
        peer: &DatagramPeer,
        batch: SendBatch,
        queue_max: usize,
    ) -> Result<(), SendBatch> {
        if self.datagrams.len() - self.free_datagrams.len() >= queue_max {
            return Err(batch);
        }
        let index = self.free_datagrams.pop().unwrap_or_else(|| {
            self.datagrams.push(None);
            self.datagrams.len() as u32 - 1
        });
        let mut msg = self.spare_msgs.pop().unwrap_or_else(SendMsg::boxed);
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = batch.slices(&mut slices);
        let header = msg.prepare(&slices[..filled], Some(peer));
        let entry = opcode::SendMsg::new(Fd(fd), header).flags(libc::MSG_NOSIGNAL as u32).build();
        self.datagrams[index as usize] = Some(DatagramSend { batch, msg });
        self.push(entry.user_data(Op::SendDatagram(index).user_data()));
        Ok(())
    }
}
