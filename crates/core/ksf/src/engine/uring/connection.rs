//! The life of a connection in the engine: opened, connected where it is outgoing, and released once the kernel is done
//! with it.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::{io, mem, ptr};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use super::Uring;
use super::receive::Recv;
use super::ring::Op;
use super::send::Send;
use crate::cutter::Direct;
use crate::engine::msg::sockaddr;
use crate::engine::{Event, Reading};
use crate::service::ConnKey;

/// One connection, as far as the engine is concerned.
#[derive(Default)]
pub(super) struct Conn {
    pub(super) key: Option<ConnKey>,
    pub(super) socket: RawFd,
    pub(super) recv: Recv,
    /// What the receive that is armed was armed for.
    pub(super) recv_for: Reading,
    /// The buffer that is lent, while a receive into it is armed.
    pub(super) direct: Option<Direct>,
    /// A poll for the end of the stream is armed.
    pub(super) hangup: Recv,
    /// A reset is reported although nothing is received.
    pub(super) is_watched: bool,
    pub(super) wanted: Reading,
    /// The address of a connect that is under way; boxed, because the kernel reads it.
    pub(super) connect: Option<Box<libc::sockaddr_storage>>,
    /// Boxed, because most batches leave at once.
    pub(super) send: Option<Box<Send>>,
    pub(super) releasing: bool,
}

impl Uring {
    pub(super) fn conn(&mut self, conn: ConnKey) -> Option<&mut Conn> {
        self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn))
    }

    pub(super) fn open_conn(&mut self, conn: ConnKey, socket: RawFd, reading: Reading) {
        let at = conn.index as usize;
        if at >= self.conns.len() {
            self.conns.resize_with(at + 1, Conn::default);
        }
        debug_assert!(self.conns[at].key.is_none(), "a place is reused only after Released");
        self.conns[at] = Conn { key: Some(conn), socket, wanted: reading, ..Conn::default() };
        self.arm_recv(conn.index);
    }

    pub(super) fn start_connect(&mut self, conn: ConnKey, to: SocketAddr) {
        let Some(state) = self.conn(conn) else { return };
        let (addr, len) = sockaddr(to);
        let addr = state.connect.insert(Box::new(addr));
        let entry = opcode::Connect::new(Fd(state.socket), ptr::from_ref(&**addr).cast(), len).build();
        self.push(entry.user_data(Op::Connect(conn.index).user_data()));
    }

    pub(super) fn connected(&mut self, index: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        state.connect = None;
        let Some(conn) = state.key else { return };
        if !state.releasing {
            let error = (entry.result() < 0).then(|| io::Error::from_raw_os_error(-entry.result()));
            events.push(Event::Connected { conn, error });
        }
        events.extend(self.released(index));
    }

    pub(super) fn release_conn(&mut self, conn: ConnKey) -> bool {
        let Some(state) = self.conn(conn) else { return false };
        state.releasing = true;
        // The kernel does not have it.
        drop(state.send.take_if(|send| send.lacks_memory));
        let cancel_send = state.send.as_mut().is_some_and(|send| !mem::replace(&mut send.cancelling, true));
        let cancel_connect = state.connect.is_some();
        self.change_reading(conn, Reading::Off);
        if cancel_connect {
            self.cancel(Op::Connect(conn.index));
        }
        if cancel_send {
            self.cancel(Op::Send(conn.index));
        }
        self.released(conn.index).is_some()
    }

    /// The event that ends a connection, once nothing of it is left in the kernel.
    #[inline]
    pub(super) fn released(&mut self, index: u32) -> Option<Event> {
        if self.conns[index as usize].releasing { self.released_now(index) } else { None }
    }

    #[inline(never)]
    fn released_now(&mut self, index: u32) -> Option<Event> {
        let state = &mut self.conns[index as usize];
        if state.recv != Recv::Off || state.hangup != Recv::Off {
            return None;
        }
        if state.send.is_some() || state.connect.is_some() {
            return None;
        }
        let conn = state.key.take()?;
        self.watch_no_more(index);
        let state = &mut self.conns[index as usize];
        *state = Conn::default();
        Some(Event::Released { conn })
    }
}
