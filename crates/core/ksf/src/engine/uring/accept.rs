//! Accepting connections.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use super::Uring;
use super::ring::Op;
use crate::engine::Event;
use crate::engine::syscalls::set_nonblocking;

pub(super) struct Listener {
    pub(super) socket: RawFd,
    pub(super) armed: bool,
    pub(super) wanted: bool,
}

impl Uring {
    pub(super) fn start_accepting(&mut self, listener: u32, socket: RawFd) {
        let at = listener as usize;
        if at >= self.listeners.len() {
            self.listeners.resize_with(at + 1, || Listener { socket: -1, armed: false, wanted: false });
        }
        self.listeners[at].socket = socket;
        self.listeners[at].wanted = true;
        // An inherited socket, or one that was accepted from directly, may be in non-blocking mode. Linux 6.18 waits all
        // the same; for a kernel that fails the accept instead, which is then tried anew at ticks, the mode is changed.
        let _ = set_nonblocking(socket, false);
        self.arm_accept(listener);
    }

    pub(super) fn stop_accepting(&mut self, listener: u32) {
        if let Some(state) = self.listeners.get_mut(listener as usize) {
            state.wanted = false;
            if state.armed {
                self.cancel(Op::Accept(listener));
                // Now, and not with the next wait: a peer that connects from here on belongs to another listener. Should this
                // fail, the next wait carries it out.
                self.flush_backlog();
                let _ = self.ring.submit();
            }
        }
    }

    pub(super) fn accepted(&mut self, listener: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.listeners[listener as usize];
        state.armed = cqueue::more(entry.flags());
        let result = entry.result();
        if result >= 0 {
            // SAFETY: the kernel made this descriptor for the accept request and told no other code of it.
            let socket = unsafe { OwnedFd::from_raw_fd(result) };
            events.push(Event::Accepted { listener, socket });
            if !state.armed && state.wanted {
                self.rearm.push(Op::Accept(listener));
            }
        } else if state.wanted && !state.armed {
            let error = io::Error::from_raw_os_error(-result);
            events.push(Event::AcceptFailed { listener, error });
        }
    }

    pub(super) fn arm_accept(&mut self, listener: u32) {
        let state = &mut self.listeners[listener as usize];
        if state.wanted && !state.armed {
            state.armed = true;
            let entry = opcode::AcceptMulti::new(Fd(state.socket)).flags(libc::SOCK_CLOEXEC).build();
            self.push(entry.user_data(Op::Accept(listener).user_data()));
        }
    }
}
