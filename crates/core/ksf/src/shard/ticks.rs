//! What happens by the clock: timeouts, trying again, and the end of a drain.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::assisted::Tick;
use super::{Draining, Phase, Shard};
use crate::engine::Engine;
use crate::error::CloseReason;
use crate::limits::Time;
use crate::service::ConnKey;

impl<E: Engine> Shard<E> {
    /// Sets the timer for the next tick, if there is anything to look after then and it is not set already.
    pub(super) fn set_timer(&mut self) {
        let ticking = self.open > 0 || !self.accept_again.is_empty() || self.draining.is_some();
        if ticking && self.timer_set.is_none_or(|set| set > self.next_tick) {
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

    pub(super) fn tick_ms(&self) -> u64 {
        let limits = &self.env.limits;
        let timeouts =
            [limits.assembly_timeout_ms, limits.idle_timeout_ms, limits.send_timeout_ms, limits.linger_timeout_ms];
        let outgoing = [limits.connect_timeout_ms, limits.upstream_timeout_ms, limits.upstream_idle_ms];
        let shortest = timeouts.into_iter().chain(outgoing).filter(|ms| *ms > 0).min().unwrap_or(u64::MAX);
        (shortest / 4).clamp(5, 250)
    }

    pub(super) fn tick(&mut self) {
        let now = self.env.now;
        self.next_tick = now.plus_ms(if self.draining.is_some() { 5 } else { self.tick_ms() });
        for (listener, _) in self.accept_again.extract_if(.., |(_, when)| *when <= now) {
            if let Some(Some(from)) = self.listeners.get(listener as usize)
                && let Some(socket) = &from.socket
                && self.draining.is_none()
            {
                self.engine.listen(listener, socket.as_raw_fd());
            }
        }
        for index in 0..self.places.len() as u32 {
            self.tick_conn(index, now);
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
        if let Some(Draining { deadline, handshakes_until }) = self.draining {
            if now >= deadline {
                for index in 0..self.places.len() as u32 {
                    self.abort(index, CloseReason::DrainTimeout);
                }
            }
            if self.open == 0 && handshakes_until.is_none() {
                self.stop = true;
            }
        }
    }

    fn tick_conn(&mut self, index: u32, now: Time) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        match conn.phase {
            Phase::Releasing(_) => {}
            Phase::Lingering { reason, deadline, .. } if now >= deadline => self.release(index, reason),
            Phase::Lingering { .. } => {}
            Phase::Open => {
                let was_closing = conn.stream.is_closing();
                let mut touch = false;
                if let Some(assist) = &mut conn.assist {
                    match assist.tick(conn.socket.as_fd(), &mut *conn.stream, &self.env) {
                        Tick::Quiet => {}
                        Tick::LookAfter => touch = true,
                        Tick::Lost => {
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
