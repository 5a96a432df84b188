//! Resets of connections that are not read: no receive reports them.
//!
//! A poll of the ring reports the end of the peer's direction, too (`IO_POLL_UNMASK`, Linux 6.18), and would do so all the time while
//! a connection that has seen it waits for its replies. An edge of an epoll instance that is asked for no event reports an error or
//! a hang-up alone, once. A connection is added when it is not read for the first time, and stays until it is released.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::Uring;
use super::ring::Op;
use crate::engine::{Event, Reading};

/// Connections that one call reports.
const REPORTED_MAX: usize = 64;

impl Uring {
    /// Has resets of this connection reported while it is not read. Without a descriptor or memory for that they are not.
    pub(super) fn watch_unread(&mut self, index: u32) {
        let state = &self.conns[index as usize];
        if state.is_watched || state.key.is_none() || state.releasing {
            return;
        }
        if self.unread.is_none() {
            self.unread = epoll::create(CreateFlags::CLOEXEC).ok();
            self.arm_unread();
        }
        let Some(unread) = &self.unread else { return };
        let state = &mut self.conns[index as usize];
        // SAFETY: the socket of a connection stays open until the engine has released it (`Engine::open`).
        let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
        state.is_watched = epoll::add(unread, socket, EventData::new_u64(index.into()), EventFlags::ET).is_ok();
    }

    /// Takes a connection that is about to be released out of the epoll instance.
    pub(super) fn watch_no_more(&mut self, index: u32) {
        let state = &mut self.conns[index as usize];
        if state.is_watched
            && let Some(unread) = &self.unread
        {
            state.is_watched = false;
            // SAFETY: the socket stays open until the engine has released the connection (`Engine::open`), which follows.
            let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
            // It was added, so this cannot fail.
            let _ = epoll::delete(unread, socket);
        }
    }

    /// Asks the ring for a completion when the epoll instance has something to report.
    pub(super) fn arm_unread(&mut self) {
        if let Some(unread) = &self.unread {
            let entry = opcode::PollAdd::new(Fd(unread.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
            self.push(entry.user_data(Op::Unread.user_data()));
        }
    }

    /// Reports the connections that were reset, of those without a receive.
    pub(super) fn report_resets(&mut self, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        if !cqueue::more(entry.flags()) {
            self.rearm.push(Op::Unread);
        }
        let Some(unread) = &self.unread else { return };
        loop {
            let mut reported = Vec::with_capacity(REPORTED_MAX);
            let count = epoll::wait(unread, rustix::buffer::spare_capacity(&mut reported), Some(&Timespec::default()));
            for event in &reported {
                let Some(state) = self.conns.get_mut(event.data.u64() as usize) else { continue };
                // Others have a receive, or a poll, that reports it.
                let is_unread = matches!(state.wanted, Reading::Off | Reading::Direct) && state.direct.is_none();
                if let Some(conn) = state.key.filter(|_| is_unread && !state.releasing) {
                    state.wanted = Reading::Off;
                    events.push(Event::Failed { conn });
                }
            }
            if count.unwrap_or(0) < REPORTED_MAX {
                return;
            }
        }
    }
}
