//! Receives datagrams: many by one system call where many come, one by the cheapest call where they come one by one.

use std::os::fd::{BorrowedFd, RawFd};
use std::{io, mem, ptr};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Event;
use super::datagrams::TOGETHER_MAX;
use super::msg::{CONTROL_BYTES, Control, Name, is_option_on, read_pktinfo, socket_addr};
use crate::env::Env;
use crate::listener::DatagramPeer;
use crate::pool::SlotMut;

/// Datagrams received from one socket before others get their turn.
const BURST: usize = 64;
/// Datagrams received without a look at other descriptors.
const WITHOUT_LOOK_MAX: usize = 128;
/// Receives of one datagram before there is a look whether there are more. One that is ready for two costs the kernel a
/// second try, 0.4 us of a round trip of 11 (Linux 6.18).
const SINGLES: u8 = 8;

/// Receives from the datagram sockets of an engine.
pub(super) struct DatagramReceiver {
    sockets: Vec<Socket>,
    /// Headers made once: only what the kernel changes is set again.
    headers: Box<[libc::mmsghdr]>,
    parts: Box<[Part]>,
    /// Where the next datagrams go, from the first on; a part without a slot has none behind it.
    slots: [Option<SlotMut>; TOGETHER_MAX],
    /// Datagrams since the last look at other descriptors.
    without_look: usize,
}

/// What the header of one datagram points to, but for its slot.
struct Part {
    name: Name,
    control: Control,
    slice: libc::iovec,
}

struct Socket {
    fd: RawFd,
    /// The kernel tells where datagrams were sent to.
    has_pktinfo: bool,
    /// Datagrams to be ready for: one more than came the last time, at least twice as many when all were used.
    ready: usize,
    /// Receives of one datagram that are left before two are tried.
    singles: u8,
    /// The last receive brought several: there are probably more by now.
    is_busy: bool,
    /// It is not read for now.
    stopped: bool,
}

/// What one receive found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// As many as it was ready for: there may be more.
    More,
    /// One, and no more were looked for.
    One,
    /// All there was.
    All,
    /// There was no slot to receive into.
    NoSlot,
}

/// There was no slot to receive into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoSlot;

impl DatagramReceiver {
    pub(super) fn new() -> Self {
        let slice = || libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let part = |_| Part { name: Name::default(), control: Control::default(), slice: slice() };
        let mut parts: Box<[Part]> = (0..TOGETHER_MAX).map(part).collect();
        let headers = parts.iter_mut().map(Part::header).collect();
        Self { sockets: Vec::new(), headers, parts, slots: [const { None }; _], without_look: 0 }
    }

    /// Adds a socket under this number.
    pub(super) fn open(&mut self, socket: u32, fd: RawFd) {
        let at = socket as usize;
        if at >= self.sockets.len() {
            let none = || Socket { fd: -1, has_pktinfo: true, ready: 2, singles: 0, is_busy: false, stopped: true };
            self.sockets.resize_with(at + 1, none);
        }
        self.sockets[at].fd = fd;
        self.sockets[at].stopped = false;
        self.sockets[at].has_pktinfo = has_pktinfo(fd);
    }

    /// True if there is probably something to receive from a socket, without anybody saying so.
    pub(super) fn is_busy(&self, socket: u32) -> bool {
        self.sockets[socket as usize].is_busy
    }

    /// Receives from a socket, or not.
    pub(super) fn set_reading(&mut self, socket: u32, reads: bool) {
        let state = &mut self.sockets[socket as usize];
        // A number that is a listener's has no socket here, and is never read.
        state.stopped = !reads || state.fd < 0;
        // It is asked for again: the slots that are ready go back meanwhile.
        state.is_busy = false;
        self.slots.iter_mut().for_each(|slot| *slot = None);
    }

    /// A socket was shut down, which poll reports for ever, and no receive takes: it is read no more.
    pub(super) fn end(&mut self, socket: u32) {
        self.sockets[socket as usize].fd = -1;
        self.set_reading(socket, false);
    }

    /// True if a socket was shut down; and where there is none.
    pub(super) fn has_ended(&self, socket: u32) -> bool {
        self.sockets[socket as usize].fd < 0
    }

    /// True if a socket is read.
    pub(super) fn reads(&self, socket: u32) -> bool {
        !self.sockets[socket as usize].stopped
    }

    /// True if other descriptors had to wait long enough: they must be looked at now.
    pub(super) fn is_look_due(&self) -> bool {
        self.without_look >= WITHOUT_LOOK_MAX
    }

    /// Other descriptors are looked at.
    pub(super) fn looked(&mut self) {
        self.without_look = 0;
    }

    /// Receives what a socket has, but not more than is fair to others, without waiting.
    pub(super) fn receive(&mut self, socket: u32, env: &mut Env, events: &mut Vec<Event>) -> Result<(), NoSlot> {
        let before = events.len();
        let mut result = Ok(());
        if self.sockets[socket as usize].stopped {
            return result;
        }
        while events.len() - before < BURST {
            match self.receive_once(socket, env, events) {
                Found::More => {}
                Found::All | Found::One => break,
                Found::NoSlot => {
                    result = Err(NoSlot);
                    break;
                }
            }
        }
        self.without_look += events.len() - before;
        result
    }

    fn receive_once(&mut self, socket: u32, env: &mut Env, events: &mut Vec<Event>) -> Found {
        let at = socket as usize;
        let wanted = self.sockets[at].ready;
        let ready = self.prepare(wanted, env);
        if ready == 0 {
            env.stats.slots_exhausted.add(1);
            self.sockets[at].is_busy = false;
            return Found::NoSlot;
        }
        env.stats.syscalls.add(1);
        let state = &mut self.sockets[at];
        let fd = state.fd;
        let count = match (ready, state.has_pktinfo) {
            (1, false) => self.receive_from(fd),
            (1, true) => self.receive_msg(fd),
            _ => self.receive_mmsg(fd, ready),
        };
        for ((header, part), slot) in self.headers.iter_mut().zip(&self.parts).zip(&mut self.slots).take(count) {
            let Some(slot) = slot.take() else { break };
            let length = header.msg_len as usize;
            let truncated = length > part.slice.iov_len || header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            let peer = part.peer(&header.msg_hdr);
            Part::reset(&mut header.msg_hdr);
            let chunk = slot.freeze(length);
            events.extend(peer.map(|peer| Event::Datagram { socket, peer, chunk, truncated }));
        }
        let state = &mut self.sockets[at];
        state.is_busy = count > 1;
        let found = match (count, ready) {
            (1, 1) if wanted == 1 => {
                state.singles -= 1;
                if state.singles == 0 {
                    state.ready = 2;
                }
                Found::One
            }
            (1, 2) => {
                // One came where two had room: probably the next comes alone, too.
                (state.ready, state.singles) = (1, SINGLES);
                Found::All
            }
            _ if count == ready => {
                state.ready = (2 * ready).min(TOGETHER_MAX);
                Found::More
            }
            _ => {
                state.ready = state.ready.min((count + 1).max(2));
                Found::All
            }
        };
        // Slots are for everybody.
        let kept = if state.is_busy { state.ready } else { 0 };
        self.slots.iter_mut().take(ready).skip(kept).for_each(|slot| *slot = None);
        found
    }

    /// Fills the headers with free slots for up to `wanted` datagrams. Returns the number of datagrams that have a slot.
    fn prepare(&mut self, wanted: usize, env: &mut Env) -> usize {
        // The first ones were used, and those behind them may be left of the last time.
        for at in 0..wanted {
            if self.slots[at].is_none() {
                let Some(mut slot) = env.pool.take().or_else(|| self.slots[at + 1..].iter_mut().find_map(Option::take))
                else {
                    return at;
                };
                let room = slot.as_mut_slice();
                self.parts[at].slice = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
                self.slots[at] = Some(slot);
            }
        }
        wanted
    }

    /// One datagram, of a socket that does not tell where it was sent to. A header costs the kernel two copies more, each
    /// way.
    fn receive_from(&mut self, fd: RawFd) -> usize {
        let (part, header) = (&mut self.parts[0], &mut self.headers[0]);
        let (room, room_bytes) = (part.slice.iov_base, part.slice.iov_len);
        let name_len = &raw mut header.msg_hdr.msg_namelen;
        header.msg_hdr.msg_controllen = 0;
        header.msg_hdr.msg_flags = 0;
        // MSG_TRUNC: the length of the datagram, also where that is more than the room.
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: `room` is the slot `slots[0]`, held by this value alone, and the name has room for `msg_namelen` bytes; both
        // stay where they are through the call.
        let length = unsafe { libc::recvfrom(fd, room, room_bytes, flags, part.name.as_mut_ptr().cast(), name_len) };
        let Ok(length) = u32::try_from(length) else {
            Part::reset(&mut header.msg_hdr);
            return 0;
        };
        header.msg_len = length;
        1
    }

    /// One datagram.
    fn receive_msg(&mut self, fd: RawFd) -> usize {
        let header = &mut self.headers[0];
        // SAFETY: every pointer in the header is to a live, exclusively held buffer of the length given (`parts[0]` and
        // `slots[0]`), which stays where it is through the call.
        let length = unsafe { libc::recvmsg(fd, &raw mut header.msg_hdr, libc::MSG_DONTWAIT) };
        let Ok(length) = u32::try_from(length) else { return 0 };
        header.msg_len = length;
        1
    }

    /// Up to `ready` datagrams.
    fn receive_mmsg(&mut self, fd: RawFd, ready: usize) -> usize {
        let (count, no_limit) = (ready as libc::c_uint, ptr::null_mut());
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: `ready` is at most the number of headers; every pointer in the first of them is to a live, exclusively held
        // buffer of the length given (`parts` and `slots`), which stays where it is through the call.
        let result = unsafe { libc::recvmmsg(fd, self.headers.as_mut_ptr(), count, flags as _, no_limit) };
        usize::try_from(result).unwrap_or(0)
    }
}

impl Part {
    fn header(&mut self) -> libc::mmsghdr {
        // SAFETY: all fields are plain data for which zero is a valid value.
        let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
        header.msg_hdr.msg_name = self.name.as_mut_ptr().cast();
        header.msg_hdr.msg_iov = &raw mut self.slice;
        header.msg_hdr.msg_iovlen = 1;
        header.msg_hdr.msg_control = self.control.as_mut_ptr().cast();
        Self::reset(&mut header.msg_hdr);
        header
    }

    /// Sets again what a receive changes.
    fn reset(header: &mut libc::msghdr) {
        header.msg_namelen = Name::BYTES as libc::socklen_t;
        header.msg_controllen = CONTROL_BYTES;
    }

    fn peer(&self, header: &libc::msghdr) -> Option<DatagramPeer> {
        let name = &self.name.bytes()[..(header.msg_namelen as usize).min(Name::BYTES)];
        let control = &self.control.bytes()[..header.msg_controllen.min(CONTROL_BYTES)];
        socket_addr(name).map(|addr| DatagramPeer { addr, local: read_pktinfo(control) })
    }
}

/// Fails where a socket was shut down before it was handed over: nothing tells when it has datagrams.
pub(super) fn check_not_shut_down(fd: RawFd) -> io::Result<()> {
    // SAFETY: the shard keeps the sockets open as long as the engine.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut ends = [PollFd::new(&socket, PollFlags::RDHUP)];
    poll(&mut ends, Some(&Timespec::default()))?;
    if ends[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP) {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "the socket was shut down; hand over one that can be received from",
        ));
    }
    Ok(())
}

/// Whether a socket was asked to tell where each datagram was sent to.
fn has_pktinfo(fd: RawFd) -> bool {
    // A socket of another family has no such option: it does not tell.
    let is_on = |level, name| is_option_on(fd, level, name).unwrap_or(false);
    is_on(libc::IPPROTO_IP, libc::IP_PKTINFO) || is_on(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_number_without_a_datagram_socket_is_not_read() {
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut receiver = DatagramReceiver::new();
        receiver.open(1, udp.as_raw_fd());
        assert!(receiver.reads(1));
        assert!(!receiver.reads(0), "a poll of no descriptor ends at once, and so would each wait of the shard");
        receiver.set_reading(0, true);
        assert!(!receiver.reads(0));
        receiver.set_reading(1, false);
        receiver.set_reading(1, true);
        assert!(receiver.reads(1));
    }
}
