//! The end of a turn: looks once after each connection that was touched.

use std::mem;
use std::os::fd::AsFd;

use super::assisted::Turn;
use super::stream::Stream;
use super::{Conn, Phase, Shard};
use crate::connection::input::DIRECT_BYTES_MIN;
use crate::engine::{Engine, Reading};
use crate::error::CloseReason;
use crate::service::ConnKey;

/// Batches sent for one connection before others get their turn.
const SEND_ROUNDS_MAX: u32 = 8;

impl<E: Engine> Shard<E> {
    pub(super) fn look_after_touched(&mut self) {
        // A connection that has to be looked after again is put on the other list.
        mem::swap(&mut self.touched, &mut self.looked_after);
        self.await_half = 0;
        for at in 0..self.looked_after.len() {
            let index = self.looked_after[at];
            if let Some(conn) = self.places[index as usize].conn.as_mut() {
                conn.touched = false;
                self.look_after(index);
                self.arm(index);
            }
        }
        self.looked_after.clear();
    }

    /// Sends what is due, reads or stops reading, hands over to the kernel half, closes.
    fn look_after(&mut self, index: u32) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        let Conn { stream, assist, socket, phase, .. } = conn;
        let Stream::Served(stream) = stream else { return self.look_after_outgoing(key) };
        let broken = *phase == Phase::Open && assist.as_ref().is_some_and(|assist| assist.conn.is_broken());
        if broken {
            // First of all: a receive that says "end" too early would say so again and again.
            self.abort(index, CloseReason::KernelHalf);
            return;
        }
        if let Some(assist) = assist
            && mem::take(&mut assist.early_end)
        {
            // The next turn, which comes soon, receives again.
            conn.touched = true;
            self.touched.push(index);
            self.await_half += 1;
            return;
        }
        match *phase {
            Phase::Open => {}
            Phase::Lingering(reason) => return self.look_after_lingering(index, reason),
            Phase::Releasing(_) => return,
        }
        if conn.reading == Reading::Parked {
            // Whatever the reason to look after it: user space is about to act, or has something to read.
            if let Some(assist) = assist {
                assist.conn.unpark(socket.as_fd());
                if assist.conn.is_trial() {
                    assist.lone_messages = 0;
                    self.pace.try_now();
                }
            }
            conn.reading = Reading::On;
            self.engine.set_reading(key, Reading::On);
        }
        if self.draining.is_some() {
            stream.drain(&mut self.env);
        }
        // What is sent at once may let the connection go on with requests that waited, so this can take some rounds.
        let mut rounds = 0;
        let mut again = false;
        while stream.has_output() || assist.is_some() && stream.finished().is_some() {
            // Both would overtake what the kernel half has queued.
            let turn =
                assist.as_mut().map_or(Turn::Ours, |assist| assist.whose_turn(socket.as_fd(), &**stream, &self.env));
            if turn == Turn::Stuck {
                self.abort(index, CloseReason::KernelHalf);
                return;
            }
            rounds += 1;
            again = turn == Turn::KernelHalfs || rounds > SEND_ROUNDS_MAX;
            if again {
                conn.touched = true;
                self.touched.push(index);
                self.await_half += usize::from(turn == Turn::KernelHalfs);
                break;
            }
            let Some(batch) = stream.take_batch(self.env.now, &mut self.env.spares) else { break };
            if let Some(assist) = assist
                && stream.owes_only_the_batch()
            {
                assist.settle_ahead(socket.as_fd(), &**stream, batch.len());
            }
            // The kernel half's socket takes no such hints.
            let last = assist.is_none() && (stream.ends_with_the_batch() || stream.file_follows());
            let (bytes, done) = self.engine.send(key, batch, last, &mut self.env);
            stream.sent(bytes, done, &mut self.env);
        }
        if let Some(range) = stream.file_to_read(self.env.now) {
            self.read_file(key, range);
        }
        let Some(conn) = self.places[index as usize].conn.as_mut() else { return };
        if let (Some(upstream), Stream::Served(stream)) = (conn.upstream, &conn.stream) {
            let (limits, queued_bytes) = (&self.env.limits, stream.queued_bytes());
            // With a share of its own in the shard's sum, it is looked at again when that share is gone.
            let is_shard_full = queued_bytes > 0 && self.env.budget.is_full(limits);
            let pause = queued_bytes > limits.out_queue_bytes_max || is_shard_full || stream.awaits_room();
            self.pace_exchange(upstream, pause);
        }
        let Some(conn) = self.places[index as usize].conn.as_mut() else { return };
        let Conn { stream: Stream::Served(stream), assist, socket, .. } = conn else { return };
        if !again && let Some(reason) = stream.finished() {
            self.finish(index, reason);
            return;
        }
        // Also when it is looked after again: meanwhile more could arrive than is answered in a turn.
        let mut reading = stream.reading(&mut self.env);
        if let Some(assist) = assist {
            let settled = stream.is_settled();
            if assist.hand_over(settled, socket.as_fd(), &**stream, &self.env) && reading.receives() {
                reading = Reading::Parked;
            }
        }
        if stream.saw_eof() {
            reading = Reading::Off;
        }
        if reading != conn.reading {
            if reading == Reading::Off && !stream.saw_eof() && !stream.is_closing() {
                self.env.stats.reads_paused.add(1);
            }
            conn.reading = reading;
            self.engine.set_reading(key, reading);
        } else if reading == Reading::Off {
            // It was opened unread, or its peer has sent all: the engine tells from now on if it is reset.
            self.engine.set_reading(key, reading);
        }
        // Earlier bytes of the message may still be under way; the engine tells when they are not.
        if reading == Reading::Direct
            && self.engine.is_quiet(key)
            && let Some(direct) = stream.lend_buffer(DIRECT_BYTES_MIN, &mut self.env)
        {
            self.engine.receive_direct(key, direct);
        }
    }

    /// The same of a connection that was dialed: no kernel half is in front of it, and it does not linger.
    fn look_after_outgoing(&mut self, key: ConnKey) {
        let Some(conn) = self.places[key.index as usize].conn.as_mut().filter(|conn| conn.phase == Phase::Open) else {
            return;
        };
        let Stream::Outgoing(outgoing) = &mut conn.stream else { return };
        if self.draining.is_some() {
            outgoing.drain();
        }
        if let Some(batch) = outgoing.take_batch(self.env.now) {
            let (bytes, done) = self.engine.send(key, batch, false, &mut self.env);
            outgoing.sent(bytes, done, &mut self.env);
        }
        if let Some(reason) = outgoing.finished() {
            return self.finish(key.index, reason);
        }
        let reading = match outgoing.reads() {
            false => Reading::Off,
            true if self.env.budget.is_short_of_replies() => Reading::Head,
            true => Reading::On,
        };
        if reading != conn.reading {
            self.env.stats.reads_paused.add(u64::from(reading == Reading::Off && !outgoing.saw_eof()));
            conn.reading = reading;
            self.engine.set_reading(key, reading);
        }
    }
}
