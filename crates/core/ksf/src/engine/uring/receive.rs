//! Receiving from streams, and waiting for the end of one that is parked.

use std::ptr;

use io_uring::types::Fd;
use io_uring::{cqueue, opcode, squeue};

use super::Uring;
use super::buffer_ring::BUFFER_GROUP;
use super::ring::Op;
use crate::cutter::Direct;
use crate::engine::{Event, HEAD_BYTES, Reading};
use crate::env::Env;
use crate::service::ConnKey;

/// State of a request that stays armed.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Recv {
    #[default]
    Off,
    Armed,
    Cancelling,
}

impl Uring {
    pub(super) fn change_reading(&mut self, conn: ConnKey, reading: Reading) {
        let Some(state) = self.conn(conn) else { return };
        state.wanted = reading;
        let stop_recv = state.recv == Recv::Armed && reading != state.recv_for;
        if stop_recv {
            state.recv = Recv::Cancelling;
        }
        let stop_hangup = reading != Reading::Parked && state.hangup == Recv::Armed;
        if stop_hangup {
            state.hangup = Recv::Cancelling;
        }
        if stop_recv {
            self.cancel(Op::Recv(conn.index));
        }
        if stop_hangup {
            self.cancel(Op::Hangup(conn.index));
        }
        self.arm_recv(conn.index);
        if matches!(reading, Reading::Off | Reading::Direct) {
            self.watch_unread(conn.index);
        }
    }

    pub(super) fn received(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        let slot = cqueue::buffer_select(entry.flags()).and_then(|at| self.buffers.take(at, &mut env.pool));
        let state = &mut self.conns[index as usize];
        let Some(conn) = state.key else { return };
        let ended = !cqueue::more(entry.flags());
        if ended {
            state.recv = Recv::Off;
        }
        let result = entry.result();
        let was_lent = state.direct.is_some();
        if was_lent {
            if let Some(direct) = state.direct.take()
                && !state.releasing
            {
                events.push(Event::ReceivedDirect { conn, direct, bytes: result.max(0) as usize });
            }
        } else if ended && state.wanted == Reading::Direct {
            events.push(Event::Quiet { conn });
        }
        match (result, slot) {
            (1.., Some(slot)) => {
                let chunk = slot.freeze(result as usize);
                events.push(Event::Received { conn, chunk });
            }
            (1.., None) if was_lent => {}
            (0, _) => {
                state.wanted = Reading::Off;
                events.push(Event::Eof { conn });
            }
            _ => match -result {
                libc::ENOBUFS => env.stats.slots_exhausted.add(1),
                // Linux 6.18 never gives us the last two, and no test can cause them. When another reader took what woke
                // a receive, it goes on waiting (io_recv returns to its poll), whatever the mode of the socket
                // (REQ_F_NOWAIT comes of MSG_DONTWAIT alone). EINTR needs a worker thread, which a socket that can be
                // polled gets only when there is no memory for that. They are here so that a kernel that does otherwise
                // costs a wake-up, and not a connection.
                libc::ECANCELED | libc::EAGAIN | libc::EINTR => {}
                _ => {
                    state.wanted = Reading::Off;
                    events.push(Event::Failed { conn });
                }
            },
        }
        if ended && state.wanted.receives() {
            self.rearm.push(Op::Recv(index));
        }
        if let Some(released) = self.released(index) {
            events.push(released);
        }
    }

    /// Receives into a lent buffer, once.
    pub(super) fn receive_lent(&mut self, conn: ConnKey, mut direct: Direct) {
        let Some(state) = self.conn(conn).filter(|state| state.recv == Recv::Off) else { return };
        let room = direct.room_mut();
        let len = u32::try_from(room.len()).unwrap_or(u32::MAX);
        let entry = opcode::Recv::new(Fd(state.socket), room.as_mut_ptr(), len).build();
        (state.recv, state.recv_for, state.direct) = (Recv::Armed, Reading::Direct, Some(direct));
        self.push(entry.user_data(Op::Recv(conn.index).user_data()));
    }

    pub(super) fn hung_up(&mut self, index: u32, entry: &cqueue::Entry, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        state.hangup = Recv::Off;
        let Some(conn) = state.key else { return };
        if entry.result() >= 0 && state.wanted == Reading::Parked {
            events.push(Event::Unparked { conn });
        } else if state.wanted == Reading::Parked {
            // Cancelled, and parked again before that took effect.
            self.rearm.push(Op::Recv(index));
        }
        events.extend(self.released(index));
    }

    /// Starts what is wanted of a connection and not under way yet.
    pub(super) fn arm_recv(&mut self, index: u32) {
        let state = &mut self.conns[index as usize];
        if state.key.is_none() {
            return;
        }
        let socket = Fd(state.socket);
        if state.wanted.receives() && state.recv == Recv::Off {
            (state.recv, state.recv_for) = (Recv::Armed, state.wanted);
            let entry = if state.wanted == Reading::On {
                opcode::RecvMulti::new(socket, BUFFER_GROUP).build()
            } else {
                // 0: as long as the slot.
                let most = if state.wanted == Reading::Head { HEAD_BYTES as u32 } else { 0 };
                let once = opcode::Recv::new(socket, ptr::null_mut(), most).buf_group(BUFFER_GROUP).build();
                once.flags(squeue::Flags::BUFFER_SELECT)
            };
            self.push(entry.user_data(Op::Recv(index).user_data()));
        } else if state.wanted == Reading::Parked && state.hangup == Recv::Off {
            state.hangup = Recv::Armed;
            let entry = opcode::PollAdd::new(socket, libc::POLLRDHUP as u32).build();
            self.push(entry.user_data(Op::Hangup(index).user_data()));
        }
    }
}
