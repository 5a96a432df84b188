//! One worker: waits for its sockets of all connections, and works on their messages in turn.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ksf::Service;
use ksf::env::Env;
use ksf::error::CloseReason;
use ksf::limits::Limits;
use ksf::output::Output;
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::{Outcome, call_outside};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::ending::Ending;
use super::link::{End, Lane, Link, Reading};
use super::{Shared, lock, wire_bytes_max};
use crate::cut::cut;
use crate::error::KcmError;

/// What a worker waits for, and what others tell it.
#[derive(Debug)]
pub(super) struct Inbox {
    epoll: OwnedFd,
    event: OwnedFd,
    /// Numbers of links to look at.
    letters: Mutex<Vec<u64>>,
}

/// What an event is for, where it is not for a link.
const LETTERS: u64 = u64::MAX;
const EVENTS_MAX: usize = 64;
const EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// Time between looks at limits of time.
const TICK: Duration = Duration::from_millis(100);
/// The same for connections that end, or whose peer reads slowly: AF_KCM does not report that it has cut everything, and
/// takes the report away that TCP has room.
const SHORT_TICK: Duration = Duration::from_millis(1);

impl Inbox {
    pub(super) fn new() -> Result<Self, KcmError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(KcmError::os("epoll_create"))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(KcmError::os("eventfd"))?;
        let inbox = Self { epoll, event, letters: Mutex::default() };
        inbox.watch(&inbox.event, LETTERS, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(inbox)
    }

    pub(super) fn watch(&self, fd: impl AsFd, data: u64, flags: epoll::EventFlags) -> Result<(), KcmError> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(data), flags).map_err(KcmError::os("epoll_ctl"))
    }

    pub(super) fn post(&self, link: u64) {
        lock(&self.letters).push(link);
        self.wake();
    }

    pub(super) fn wake(&self) {
        // The counter cannot overflow in the life of a machine; and an edge comes with each write, read or not.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// What a service is lent while it works.
pub(super) fn env(limits: &Limits) -> Result<Env, KcmError> {
    // Messages come from the kernel's multiplexor; the framework wants a pool in every environment.
    let pool = Pool::new(Memory::Anonymous, 4096, 1).map_err(|error| std::io::Error::other(error.to_string()));
    let env = pool.and_then(|pool| Env::new(limits.clone(), pool));
    env.map_err(|error| KcmError::Os { call: "make the environment of a worker", error })
}

pub(super) struct Worker<S: Service> {
    shared: Arc<Shared<S>>,
    number: usize,
    env: Env,
    /// Links whose socket may have messages for this worker. One message of each is taken per round.
    readable: VecDeque<Arc<Link<S>>>,
    endings: Vec<Ending<S>>,
    blocked: Vec<Arc<Link<S>>>,
    buffer: Vec<u8>,
    ticked: Instant,
}

impl<S: Service> Worker<S> {
    pub(super) fn new(shared: Arc<Shared<S>>, number: usize, env: Env) -> Self {
        Self {
            shared,
            number,
            env,
            readable: VecDeque::new(),
            endings: Vec::new(),
            blocked: Vec::new(),
            buffer: Vec::new(),
            ticked: Instant::now(),
        }
    }

    /// Until the workers are to end. Whoever ends them then cuts off what is open, the connections that linger here too.
    pub(super) fn run(mut self) {
        while !self.shared.stopping.load(Ordering::SeqCst) {
            self.wait();
            for _ in 0..self.readable.len() {
                let Some(link) = self.readable.pop_front() else { break };
                if self.turn(&link) {
                    self.list(link);
                }
            }
            self.send_again();
            self.step_endings();
            self.tick();
        }
    }

    fn wait(&mut self) {
        let timeout = if !self.readable.is_empty() {
            Some(Duration::ZERO)
        } else if !self.endings.is_empty() || !self.blocked.is_empty() {
            Some(SHORT_TICK)
        } else if super::read(&self.shared.links).is_empty() {
            None
        } else {
            Some(TICK)
        };
        let timeout =
            timeout.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() });
        let mut events = [EVENT; EVENTS_MAX];
        let count = match epoll::wait(&self.shared.inboxes[self.number].epoll, &mut events[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            // It cannot fail but for want of memory: try again.
            Err(_) => {
                std::thread::yield_now();
                0
            }
        };
        for event in &events[..count] {
            let (data, flags) = (event.data.u64(), event.flags);
            if data == LETTERS {
                let letters = std::mem::take(&mut *lock(&self.shared.inboxes[self.number].letters));
                letters.into_iter().for_each(|number| self.look(number));
            } else if let Some(link) = self.shared.link(data >> 1) {
                if data & 1 == 1 {
                    self.note_end(&link, flags);
                    continue;
                }
                self.list(link);
            }
        }
    }

    /// Looks at a link because somebody said so: it ends, or can be read again.
    fn look(&mut self, number: u64) {
        let Some(link) = self.shared.link(number) else { return };
        let is_new = !self.endings.iter().any(|ending| ending.is_of(number));
        if link.home() == self.number && link.end.get().is_some() && is_new {
            self.endings.push(Ending::new(Arc::clone(&link)));
        }
        let is_blocked = link.home() == self.number && link.blocked.load(Ordering::SeqCst);
        if is_blocked && !self.blocked.iter().any(|known| known.number == number) {
            self.blocked.push(Arc::clone(&link));
        }
        self.list(link);
    }

    fn list(&mut self, link: Arc<Link<S>>) {
        let Some(lane) = link.lane(self.number) else { return };
        if !lane.listed.swap(true, Ordering::SeqCst) {
            self.readable.push_back(link);
        }
    }

    /// The TCP socket reported something. AF_KCM reports there, and nowhere else.
    fn note_end(&mut self, link: &Arc<Link<S>>, flags: epoll::EventFlags) {
        let error = sockopt::socket_error(link.tcp()).unwrap_or_else(Err).err();
        if let Some(end) = end_of(flags, error) {
            self.shared.end(link, end);
        }
    }

    /// Takes and works on one message; false if there is none, or none is to be taken.
    fn turn(&mut self, link: &Arc<Link<S>>) -> bool {
        let Some(lane) = link.lane(self.number) else { return false };
        lane.listed.store(false, Ordering::SeqCst);
        if !link.is_read() {
            return false;
        }
        let limits = self.shared.limits();
        if self.shared.must_wait(link, &limits) {
            lane.parked.store(true, Ordering::SeqCst);
            // Whoever made it wait no longer may have looked before that.
            if self.shared.must_wait(link, &limits) {
                self.env.stats.reads_paused.add(1);
                return false;
            }
            lane.parked.store(false, Ordering::SeqCst);
        }
        // One byte more than the longest: a message that fills the buffer is too long.
        let buffer_bytes = wire_bytes_max(&self.shared.service.framing(), &limits) + 1;
        self.buffer.resize(buffer_bytes, 0);
        link.intake.enter();
        let took = self.take_one(link, lane, &limits);
        link.intake.leave();
        took
    }

    fn take_one(&mut self, link: &Arc<Link<S>>, lane: &Lane<S>, limits: &Limits) -> bool {
        let received = match lane.socket.recv(&mut self.buffer) {
            Ok(Some(received)) => received,
            Ok(None) => return false,
            Err(_) => {
                self.shared.end(link, End { reason: CloseReason::Io, reading: Reading::Nothing });
                return false;
            }
        };
        link.intake.took(received.bytes);
        self.shared.bytes_in.fetch_add(received.bytes as u64, Ordering::Relaxed);
        let cut = if received.is_whole && received.bytes < self.buffer.len() {
            cut(&self.shared.service.framing(), &self.buffer[..received.bytes], limits)
        } else {
            Err(CloseReason::OversizedMessage)
        };
        match cut {
            Ok(message) => self.work(link, lane, &message),
            Err(reason) => self.shared.end(link, End { reason, reading: Reading::Stopped }),
        }
        true
    }

    fn work(&mut self, link: &Arc<Link<S>>, lane: &Lane<S>, message: &Chunk) {
        let Some(mut state) = lock(&lane.state).take() else {
            debug_assert!(false, "two messages of one socket at once");
            return;
        };
        self.env.stats.messages.add(1);
        let shared = &self.shared;
        let ticket = shared.desk.ticket();
        let mut output = Output::default();
        let (service, env) = (&*shared.service, &mut self.env);
        let called = catch_unwind(AssertUnwindSafe(|| {
            let given = ksf::Message::new(message, link.peer, link.key());
            call_outside(service, &mut state, &given, ticket, &mut output, env)
        }));
        *lock(&lane.state) = Some(state);
        match called {
            Ok(Outcome { deferred, close }) => {
                shared.send(link, output);
                if deferred > 0 {
                    link.pending.fetch_add(1, Ordering::SeqCst);
                    shared.desk.expect(ticket, link, deferred, close);
                } else if close {
                    shared.end(link, End { reason: CloseReason::Service, reading: Reading::Stopped });
                }
            }
            Err(_) => {
                self.env.stats.tasks_panicked.add(1);
                shared.desk.forget(ticket);
                shared.end(link, End { reason: CloseReason::Abandoned, reading: Reading::Stopped });
            }
        }
    }

    fn send_again(&mut self) {
        let shared = &self.shared;
        self.blocked.retain(|link| {
            shared.flush(link);
            let is_open = link.end.get().is_none_or(|end| end.reading != Reading::Nothing);
            if is_open && lock(&link.outbox).bytes() > 0 {
                return true;
            }
            link.blocked.store(false, Ordering::SeqCst);
            // Whoever queued something just now relied on this list.
            let is_needed = is_open && lock(&link.outbox).bytes() > 0;
            is_needed && !link.blocked.swap(true, Ordering::SeqCst)
        });
    }

    fn step_endings(&mut self) {
        let limits = self.shared.limits();
        let shared = &self.shared;
        self.endings.retain_mut(|ending| !ending.step(shared, &limits));
    }

    /// Looks after limits of time, for the links whose home this is.
    fn tick(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.ticked) < TICK {
            return;
        }
        self.ticked = now;
        let limits = self.shared.limits();
        for link in self.shared.all_links() {
            if link.home() != self.number {
                continue;
            }
            let blocked = lock(&link.outbox).blocked_since();
            let send_timeout = Duration::from_millis(limits.send_timeout_ms);
            if blocked.is_some_and(|since| now.saturating_duration_since(since) >= send_timeout) {
                self.shared.end(&link, End { reason: CloseReason::SendTimeout, reading: Reading::Nothing });
            }
            // Later than the kernel's own timer, which says the same.
            let assembly = Duration::from_millis(limits.assembly_timeout_ms);
            if link.unfinished_for(now) > assembly {
                self.shared.end(&link, End { reason: CloseReason::AssemblyTimeout, reading: Reading::Stopped });
            }
            let idle = Duration::from_millis(limits.idle_timeout_ms);
            if !idle.is_zero() && link.idle_for(now) >= idle {
                self.shared.end(&link, End { reason: CloseReason::IdleTimeout, reading: Reading::Stopped });
            }
        }
    }
}

/// What an event on the TCP socket says of the connection.
pub(super) fn end_of(flags: epoll::EventFlags, error: Option<Errno>) -> Option<End> {
    use epoll::EventFlags as On;
    let end = |reason, reading| Some(End { reason, reading });
    if flags.contains(On::HUP) {
        // Reset, or given up by TCP: nothing can be sent any more.
        return end(CloseReason::Io, Reading::Nothing);
    }
    match error {
        // How AF_KCM reports the end of the stream.
        Some(Errno::PIPE) => end(CloseReason::PeerClosed, Reading::All),
        None if flags.contains(On::RDHUP) => end(CloseReason::PeerClosed, Reading::All),
        None => None,
        Some(Errno::MSGSIZE) => end(CloseReason::OversizedMessage, Reading::Cut),
        Some(Errno::TIMEDOUT) => end(CloseReason::AssemblyTimeout, Reading::Cut),
        Some(Errno::NOMEM | Errno::NOBUFS) => end(CloseReason::MemoryLimit, Reading::Cut),
        Some(_) => end(CloseReason::MalformedFrame, Reading::Cut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_apart() {
        use epoll::EventFlags as On;
        let reason = |flags, error| end_of(flags, error).map(|end| end.reason);
        assert_eq!(reason(On::ERR | On::RDHUP, Some(Errno::PIPE)), Some(CloseReason::PeerClosed));
        assert_eq!(reason(On::RDHUP, None), Some(CloseReason::PeerClosed));
        assert_eq!(reason(On::ERR | On::HUP, Some(Errno::PIPE)), Some(CloseReason::Io));
        assert_eq!(reason(On::ERR, Some(Errno::MSGSIZE)), Some(CloseReason::OversizedMessage));
        assert_eq!(reason(On::ERR, Some(Errno::TIMEDOUT)), Some(CloseReason::AssemblyTimeout));
        assert_eq!(reason(On::ERR, Some(Errno::BADMSG)), Some(CloseReason::MalformedFrame));
        assert_eq!(reason(On::ERR, None), None);
    }
}
