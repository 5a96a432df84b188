//! What happens by the clock: timeouts, trying again, and the end of a drain.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::assisted::Look;
use super::stream::Stream;
use super::{Draining, Phase, Shard};
use crate::engine::{Engine, Reading};
use crate::error::CloseReason;
use crate::give_back;
use crate::limits::{Time, earlier};
use crate::service::ConnKey;

/// A time that does not come.
pub(super) const NEVER: Time = Time(u64::MAX);

/// Time to the next look at a connection whose deadline stays in the past although it was looked at: none should.
const AGAIN_MS: u64 = 250;

/// Time to the next try to start a thread for tasks, after the system had none.
const THREADS_AGAIN_MS: u64 = 50;

impl<E: Engine> Shard<E> {
    /// Sets the timer for the next tick, unless it is set for an earlier time: then it is put off when it comes.
    pub(super) fn set_timer(&mut self) {
        if self.env.tasks.as_ref().is_some_and(|tasks| tasks.lacks_thread()) {
            self.next_tick = self.next_tick.min(self.env.now.plus_ms(THREADS_AGAIN_MS));
        }
        if let Some(wake) = self.env.next_wake() {
            self.next_tick = self.next_tick.min(wake);
        }
        if self.env.budget.is_short() {
            self.next_tick = self.next_tick.min(self.silent_look);
        }
        let (most_bytes, bytes) = (self.env.budget.most_bytes(), self.env.budget.bytes());
        if let Some(at) = self.give_back.due(most_bytes, bytes, &self.env.limits) {
            self.next_tick = self.next_tick.min(at);
        }
        if self.next_tick < NEVER && self.timer_set.is_none_or(|set| set > self.next_tick) {
            let at = rustix::time::Timespec {
                tv_sec: (self.next_tick.0 / 1_000_000_000) as _,
                tv_nsec: (self.next_tick.0 % 1_000_000_000).max(1) as _,
            };
            let once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            let spec = rustix::time::Itimerspec { it_interval: once, it_value: at };
            // Cannot fail for a timer of ours and a valid time.
            let _ = rustix::time::timerfd_settime(&self.timer, rustix::time::TimerfdTimerFlags::ABSTIME, &spec);
            self.timer_set = Some(self.next_tick);
        }
    }

    /// Sees to it that a connection is looked at when a time limit of its is over. To be called whenever something
    /// happened on it. A deadline that moved on is left where it was set: activity costs nothing, and a look, once per
    /// time limit, puts it off.
    pub(super) fn arm(&mut self, index: u32) {
        let Some(conn) = self.places[index as usize].conn.as_ref() else { return };
        let deadline = match conn.phase {
            Phase::Open => {
                earlier(conn.stream.deadline(&self.env), conn.assist.as_ref().map(|assist| assist.deadline()))
            }
            Phase::Lingering(_) => conn.lingering.as_ref().map(|lingering| lingering.deadline),
            Phase::Releasing(_) => None,
        };
        if let Some(at) = deadline
            && let Some(expiry) = self.deadlines.set_if_earlier(index, at)
        {
            self.next_tick = self.next_tick.min(expiry);
        }
    }

    /// Does what is due by the clock.
    pub(super) fn tick(&mut self) {
        let now = self.env.now;
        if let Some(tasks) = self.env.tasks.as_ref().filter(|tasks| tasks.lacks_thread()) {
            tasks.try_start_thread();
        }
        // Their turn end is that of the next turn, which does not wait then.
        for number in self.env.take_due_wakes() {
            if let Some((_, service)) = self.services.get(number as usize) {
                service.info().active.set(true);
            }
        }
        for (listener, _) in self.accept_again.extract_if(.., |(_, when)| *when <= now) {
            if let Some(Some(from)) = self.listeners.get(listener as usize)
                && let Some(socket) = &from.socket
                && self.draining.is_none()
            {
                self.engine.listen(listener, socket.as_raw_fd());
            }
        }
        while let Some(index) = self.deadlines.pop_expired(now) {
            self.deadline_came(index, now);
        }
        if self.env.budget.is_short() && now >= self.silent_look {
            self.silent_look = now.plus_ms((self.env.limits.pressure_timeout_ms / 4).max(1));
            self.close_silent();
        }
        let (most_bytes, bytes) = (self.env.budget.most_bytes(), self.env.budget.bytes());
        if self.give_back.take(most_bytes, bytes, &self.env.limits, now) {
            self.env.budget.forget_most();
            self.env.buffers.free_kept();
            self.env.spares.free_beyond(0);
            give_back::trim();
        }
        if let Some(Draining { handshakes_until: Some(until), .. }) = self.draining
            && now >= until
        {
            for index in 0..self.listeners.len() as u32 {
                self.stop_listening(index);
            }
            self.draining = self.draining.map(|draining| Draining { handshakes_until: None, ..draining });
        }
        self.settle();
        if self.draining.is_some_and(|draining| now >= draining.deadline) {
            for index in 0..self.places.len() as u32 {
                self.abort(index, CloseReason::DrainTimeout);
            }
        }
        let drain = self.draining.map(|draining| draining.handshakes_until.unwrap_or(draining.deadline));
        let accept = self.accept_again.iter().map(|(_, when)| *when).min();
        let next = [self.deadlines.next_turn(), drain.filter(|at| *at > now), accept].into_iter().flatten().min();
        self.next_tick = next.unwrap_or(NEVER);
    }

    /// Closes silent peers, so that the time of those that wait for memory does not depend on their number.
    fn close_silent(&mut self) {
        let mut silent = Vec::new();
        for (index, place) in self.places.iter_mut().enumerate() {
            let Some(conn) = place.conn.as_mut().filter(|conn| conn.phase == Phase::Open) else { continue };
            let Stream::Served(stream) = &mut conn.stream else { continue };
            let Some(known) = stream.silent(&self.env) else { continue };
            // Under a kernel half the socket does not tell of all that arrived.
            let has_unread = match &mut conn.assist {
                Some(assist) if conn.reading == Reading::Off => {
                    assist.conn.has_unread(conn.socket.as_fd(), stream.received_bytes())
                }
                _ => rustix::io::ioctl_fionread(&conn.socket).unwrap_or(0) > 0,
            };
            if has_unread {
                stream.note_unread(self.env.now);
            } else {
                silent.push((known, ConnKey { index: index as u32, generation: place.generation }));
            }
        }
        silent.sort_unstable();
        while self.env.budget.keeps_too_much(&self.env.limits)
            && let Some((_, key)) = silent.pop()
        {
            if let Some((stream, env)) = self.served(key) {
                stream.close_silent(env);
            }
        }
    }

    fn deadline_came(&mut self, index: u32, now: Time) {
        self.env.stats.deadlines_checked.add(1);
        self.look_by_clock(index, now);
        self.arm(index);
        if self.deadlines.expiry(index).is_some_and(|at| at <= now) {
            self.deadlines.set(index, now.plus_ms(AGAIN_MS));
        }
    }

    fn look_by_clock(&mut self, index: u32, now: Time) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        match conn.phase {
            Phase::Releasing(_) => {}
            Phase::Lingering(reason) => {
                if conn.lingering.as_ref().is_none_or(|lingering| now >= lingering.deadline) {
                    self.release(index, reason);
                }
            }
            Phase::Open => {
                let was_closing = conn.stream.is_closing();
                let mut touch = false;
                if let (Some(assist), Stream::Served(stream)) = (&mut conn.assist, &mut conn.stream) {
                    match assist.look(conn.socket.as_fd(), stream, &self.env) {
                        Look::Quiet => {}
                        Look::Due => touch = true,
                        Look::Lost => {
                            self.abort(index, CloseReason::KernelHalf);
                            return;
                        }
                    }
                }
                if touch {
                    let _ = self.stream(key);
                }
                let Some(conn) = self.places[index as usize].conn.as_mut() else { return };
                if let Some(reason) = conn.stream.tick(&mut self.env) {
                    self.abort(index, reason);
                } else if conn.stream.is_closing() && !was_closing {
                    let _ = self.stream(key);
                }
            }
        }
    }
}

pub(super) fn timer() -> io::Result<OwnedFd> {
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    Ok(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?)
}

/// The monotonic clock.
pub(crate) fn now() -> Time {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
