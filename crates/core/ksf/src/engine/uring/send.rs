//! Sending what a socket did not take at once.

use std::mem;

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use super::Uring;
use super::ring::Op;
use crate::engine::Event;
use crate::engine::msg::{SLICES_MAX, SendMsg, send_now};
use crate::env::Env;
use crate::output::SendBatch;
use crate::service::ConnKey;

#[derive(Default)]
pub(super) struct Send {
    pub(super) batch: SendBatch,
    /// Owned here because the kernel reads it until the completion.
    pub(super) msg: Option<Box<SendMsg>>,
    pub(super) cancelling: bool,
    /// The kernel had no memory for it, and does not have it.
    pub(super) lacks_memory: bool,
}

impl Uring {
    pub(super) fn send_batch(
        &mut self,
        conn: ConnKey,
        mut batch: SendBatch,
        last: bool,
        env: &mut Env,
    ) -> (usize, bool) {
        let Some(state) = self.conns.get_mut(conn.index as usize).filter(|state| state.key == Some(conn)) else {
            return (0, false);
        };
        debug_assert!(state.send.is_none(), "one send in flight per connection");
        match send_now(state.socket, &mut batch, last, &mut self.msg, env) {
            Ok(bytes) if batch.is_empty() => {
                batch.recycle(&mut env.spares);
                (bytes, true)
            }
            Ok(bytes) => {
                let mut send = self.spare_sends.take();
                send.batch = batch;
                state.send = Some(send);
                self.submit_send(conn.index);
                (bytes, false)
            }
            Err(_) => {
                self.ready.push(Event::Failed { conn });
                (0, false)
            }
        }
    }

    pub(super) fn sent(&mut self, index: u32, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        let state = &mut self.conns[index as usize];
        let (Some(conn), Some(mut send)) = (state.key, state.send.take()) else { return };
        self.spare_msgs.extend(send.msg.take());
        let result = entry.result();
        // Not on Linux 6.18: as in `received`.
        let retry = matches!(-result, libc::EAGAIN | libc::EINTR | libc::EFAULT);
        let over = if result < 0 && (send.cancelling || !retry) {
            if !state.releasing {
                events.push(Event::Failed { conn });
            }
            true
        } else {
            let bytes = result.max(0) as usize;
            send.batch.advance(bytes, &mut env.spares);
            let done = send.batch.is_empty();
            if bytes > 0 {
                events.push(Event::Sent { conn, bytes, done });
            }
            done || state.releasing
        };
        if over {
            mem::take(&mut send.batch).recycle(&mut env.spares);
            send.cancelling = false;
            self.spare_sends.give(send);
        } else {
            // As in `send_now`.
            send.lacks_memory = result == -libc::EFAULT;
            let lacks_memory = send.lacks_memory;
            state.send = Some(send);
            if lacks_memory {
                self.no_memory.add(index, env);
            } else {
                self.submit_send(index);
            }
        }
        events.extend(self.released(index));
    }

    /// Tries again what the kernel had no memory for.
    pub(super) fn send_again(&mut self) {
        for index in self.no_memory.take_due() {
            let send = self.conns[index as usize].send.as_mut();
            if send.is_some_and(|send| mem::take(&mut send.lacks_memory)) {
                self.submit_send(index);
            }
        }
    }

    pub(super) fn submit_send(&mut self, index: u32) {
        let state = &mut self.conns[index as usize];
        let Some(send) = &mut state.send else { return };
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = send.batch.slices(&mut slices);
        let offered: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
        // As in `send_now`.
        let more = if offered < send.batch.len() { libc::MSG_MORE } else { 0 };
        let flags = libc::MSG_NOSIGNAL | more;
        let entry = if filled == 1 {
            let bytes = slices[0];
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            opcode::Send::new(Fd(state.socket), bytes.as_ptr(), len).flags(flags).build()
        } else {
            let mut msg = self.spare_msgs.pop().unwrap_or_else(SendMsg::boxed);
            let header = msg.prepare(&slices[..filled]);
            send.msg = Some(msg);
            opcode::SendMsg::new(Fd(state.socket), header).flags(flags as u32).build()
        };
        self.push(entry.user_data(Op::Send(index).user_data()));
    }
}
