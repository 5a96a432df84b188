//! One thread, many connections: sends what is allowed, takes replies as they come.
//!
//! Unlike echotest and rpctest this sends and receives as much as there is with one system call: the servers it
//! measures share the machine with it, and the cost of a message must not be that of its generator.

use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::book::{Book, Taken};
use super::load::{Jobs, Spread, schedule};
use super::plan::{Pace, Plan};
use crate::drive::clock::{monotonic_ns, thread_cpu_ns, thread_runqueue_wait_ns, unix_seconds};
use crate::drive::open::{OpenRecord, Schedule};
use crate::drive::pin::{allowed_cpus, pin_to};
use crate::drive::transport::Socket;
use crate::error::LoadError;
use crate::options::target::Endpoint;
use crate::report::tool::Io;

/// Room for replies of one connection; at least one reply more than the longest fits beside what is left of the last.
const RECEIVE_BYTES: usize = 256 * 1024;

/// Events of one wait.
const EVENTS: usize = 64;

/// System calls on the connections.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Calls {
    pub(crate) sends: u64,
    pub(crate) receives: u64,
    /// The most replies that one receive returned.
    pub(crate) replies_per_receive_max: u64,
}

/// What was measured.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) book: Book,
    pub(crate) cpu: Option<usize>,
    pub(crate) peers: Vec<Endpoint>,
    pub(crate) started_unix_s: f64,
    pub(crate) start_ns: u64,
    /// Of the last reply.
    pub(crate) end_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) runqueue_wait_ns: u64,
    pub(crate) calls: Calls,
    pub(crate) open: Option<OpenRecord>,
    pub(crate) interrupted: bool,
}

/// Runs the plan against its target, on a thread of its own that can be pinned.
pub(crate) fn run(plan: &Plan, io: &Io<'_>) -> Result<Ran, LoadError> {
    let stop = io.stop;
    let measured = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let cpu = plan.pinning.cpu_of(0, 1, &allowed_cpus());
            if let Some(cpu) = cpu {
                pin_to(cpu).map_err(|error| LoadError::system(format!("cannot run on CPU {cpu}"), error))?;
            }
            let mut ran = Driver::new(plan)?.run(&|| stop.load(std::sync::atomic::Ordering::Relaxed))?;
            ran.cpu = cpu;
            Ok(ran)
        });
        thread.join()
    });
    measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A connection's bytes.
struct Wire {
    socket: Socket,
    out: Vec<u8>,
    /// How much of `out` is sent.
    sent: usize,
    received: Box<[u8]>,
    held: usize,
    /// The socket is full: waiting for room.
    blocked: bool,
}

struct Driver<'a> {
    plan: &'a Plan,
    wires: Vec<Wire>,
    epoll: rustix::fd::OwnedFd,
    book: Book,
    jobs: Jobs,
    spread: Spread,
    open: Option<Open>,
    calls: Calls,
    /// Until when new requests are sent.
    until_ns: u64,
    /// Something failed, or the user stops: nothing new is sent.
    ending: bool,
    last_reply_ns: u64,
}

struct Open {
    schedule: Schedule,
    record: OpenRecord,
    /// The connection of the next message, once it has been drawn.
    next: Option<usize>,
    /// Until when the next message had no room.
    held_until_ns: u64,
    spin_ns: u64,
}

impl<'a> Driver<'a> {
    fn new(plan: &'a Plan) -> Result<Self, LoadError> {
        let target = plan.target.as_ref().expect("only a simulation has no target");
        let endpoints = target.resolve()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| LoadError::system("cannot make an epoll instance", error))?;
        let mut wires = Vec::new();
        for at in 0..plan.weights.len() {
            // In turn, so that a server that gives its threads connections in turn does so by our numbers.
            let socket = Socket::connect(target, &endpoints, &plan.socket)?;
            epoll::add(&epoll, &socket, epoll::EventData::new_u64(at as u64), epoll::EventFlags::IN)
                .map_err(|error| LoadError::system("cannot watch a connection", error))?;
            let received = vec![0; RECEIVE_BYTES.max(2 * plan.codec().request_bytes())].into();
            wires.push(Wire { socket, out: Vec::new(), sent: 0, received, held: 0, blocked: false });
        }
        let open = match plan.pace {
            Pace::Open { rate_per_s, arrival, spin } => Some(Open {
                schedule: schedule(arrival, rate_per_s, plan.seed),
                record: OpenRecord::new(),
                next: None,
                held_until_ns: 0,
                spin_ns: spin.as_nanos() as u64,
            }),
            Pace::PerConnection | Pace::Window => None,
        };
        Ok(Driver {
            plan,
            wires,
            epoll,
            book: Book::new(&plan.rooms(), plan.codec()),
            jobs: Jobs::new(plan.mix, plan.seed),
            spread: Spread::new(&plan.weights, plan.seed),
            open,
            calls: Calls::default(),
            until_ns: u64::MAX,
            ending: false,
            last_reply_ns: 0,
        })
    }

    fn run(mut self, stopped: &dyn Fn() -> bool) -> Result<Ran, LoadError> {
        let timeout_ns = self.plan.socket.connect_timeout.as_nanos() as u64;
        let tick_ns = self.plan.socket.tick.as_nanos() as u64;
        let started_unix_s = unix_seconds();
        let (cpu_before, wait_before) = (thread_cpu_ns(), thread_runqueue_wait_ns());
        let start_ns = monotonic_ns();
        self.last_reply_ns = start_ns;
        if let Some(duration) = self.plan.duration {
            self.until_ns = start_ns + duration.as_nanos() as u64;
        }
        if let Some(open) = &mut self.open {
            open.schedule.start(start_ns);
        }
        let mut look_ns = start_ns + tick_ns;
        let mut interrupted = false;
        let mut events = Vec::with_capacity(EVENTS);
        let mut now_ns = start_ns;
        for at in 0..self.wires.len() {
            self.fill(at, now_ns);
        }
        self.flush_all();
        loop {
            now_ns = monotonic_ns();
            if now_ns >= look_ns {
                look_ns = now_ns + tick_ns;
                interrupted |= stopped();
                self.ending |= interrupted;
                self.ending |= self.book.expire(now_ns.saturating_sub(timeout_ns)) > 0;
                self.give_up_late(now_ns, timeout_ns);
            }
            let due_ns = self.send_due(now_ns);
            if self.book.in_flight() == 0 && (due_ns.is_none() && !self.may_send(now_ns)) {
                break;
            }
            events.clear();
            self.wait(&mut events, now_ns, due_ns, tick_ns)?;
            now_ns = monotonic_ns();
            for event in &events {
                let at = event.data.u64() as usize;
                // Copied: the struct is packed.
                let flags = event.flags;
                if flags.contains(epoll::EventFlags::OUT) {
                    self.flush(at);
                }
                if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                    self.receive(at, now_ns);
                }
            }
        }
        Ok(Ran {
            cpu: None,
            peers: self.wires.iter().map(|wire| wire.socket.peer.clone()).collect(),
            started_unix_s,
            start_ns,
            end_ns: self.last_reply_ns,
            cpu_ns: thread_cpu_ns() - cpu_before,
            runqueue_wait_ns: thread_runqueue_wait_ns().saturating_sub(wait_before),
            calls: self.calls,
            open: self.open.map(|open| open.record),
            interrupted,
            book: self.book,
        })
    }

    /// Whether new requests are sent in a closed loop, or are yet to come in an open one.
    fn may_send(&self, now_ns: u64) -> bool {
        let counted = self.plan.messages.is_none_or(|messages| self.book.issued() < messages);
        let in_time = match &self.open {
            Some(open) => open.schedule.due_ns() < self.until_ns,
            None => now_ns < self.until_ns,
        };
        counted && in_time && !self.ending
    }

    /// Sends what the closed loop has room for; `at` is the connection whose replies made the room.
    fn fill(&mut self, at: usize, now_ns: u64) {
        match self.plan.pace {
            Pace::PerConnection => {
                while self.book.has_room(at) && self.may_send(now_ns) {
                    self.issue(at, now_ns);
                }
            }
            Pace::Window => {
                while self.book.in_flight() < self.plan.in_flight && self.may_send(now_ns) {
                    let to = self.spread.draw();
                    if !self.book.has_room(to) {
                        // It is closed, which ends the run.
                        break;
                    }
                    self.issue(to, now_ns);
                }
            }
            Pace::Open { .. } => {}
        }
    }

    fn issue(&mut self, at: usize, start_ns: u64) {
        let job = self.jobs.draw();
        self.book.issue(at, job, start_ns, &mut self.wires[at].out);
    }

    /// Open loop: sends what is due, and returns when the next is; `None` if there is none, or no room for it.
    fn send_due(&mut self, now_ns: u64) -> Option<u64> {
        self.open.as_ref()?;
        let mut next_ns = None;
        while self.may_send(now_ns) {
            let open = self.open.as_mut()?;
            let due_ns = open.schedule.due_ns();
            if due_ns > now_ns {
                next_ns = Some(due_ns);
                break;
            }
            let first_try = open.next.is_none();
            let at = *open.next.get_or_insert_with(|| self.spread.draw());
            if !self.book.has_room(at) {
                open.record.bound_hits += u64::from(first_try);
                open.held_until_ns = now_ns;
                break;
            }
            open.next = None;
            open.record.lag.record(now_ns - due_ns.max(open.held_until_ns).min(now_ns));
            open.schedule.advance();
            self.issue(at, due_ns);
        }
        self.flush_all();
        next_ns
    }

    /// Open loop: what was due within the time but found no room is sent for one time limit more.
    fn give_up_late(&mut self, now_ns: u64, timeout_ns: u64) {
        if self.until_ns == u64::MAX || now_ns < self.until_ns.saturating_add(timeout_ns) || !self.may_send(now_ns) {
            return;
        }
        if let Some(open) = &mut self.open {
            let mut left = self.plan.messages.map_or(u64::MAX, |messages| messages - self.book.issued());
            while left > 0 && open.schedule.due_ns() < self.until_ns {
                open.schedule.advance();
                open.record.unsent += 1;
                left -= 1;
            }
            self.ending = true;
        }
    }

    fn wait(
        &self,
        events: &mut Vec<epoll::Event>,
        now_ns: u64,
        due_ns: Option<u64>,
        tick_ns: u64,
    ) -> Result<(), LoadError> {
        let spin_ns = self.open.as_ref().map_or(0, |open| open.spin_ns);
        let nap_ns = due_ns.map_or(tick_ns, |due_ns| (due_ns - now_ns).saturating_sub(spin_ns).min(tick_ns));
        let nap = Duration::from_nanos(nap_ns);
        let nap = Timespec { tv_sec: nap.as_secs() as i64, tv_nsec: nap.subsec_nanos().into() };
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&nap)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(LoadError::system("cannot wait for replies", error)),
        }
    }

    /// Takes what has come on a connection, and sends what that makes room for.
    fn receive(&mut self, at: usize, now_ns: u64) {
        if self.book.is_closed(at) {
            return;
        }
        let wire = &mut self.wires[at];
        self.calls.receives += 1;
        let got = match recv(&wire.socket, &mut wire.received[wire.held..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return self.close(at, "the server ended the connection"),
            Ok((got, _)) => got,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(error) => return self.close(at, &error.to_string()),
        };
        wire.held += got;
        let mut replies = 0;
        let mut readable = true;
        let used = self.book.take(at, &wire.received[..wire.held], now_ns, |taken| {
            replies += 1;
            readable &= taken != Taken::Unreadable;
        });
        wire.received.copy_within(used..wire.held, 0);
        wire.held -= used;
        self.calls.replies_per_receive_max = self.calls.replies_per_receive_max.max(replies);
        if replies > 0 {
            self.last_reply_ns = now_ns;
        }
        if !readable {
            return self.close(at, "it cannot be read any further");
        }
        self.fill(at, now_ns);
        match self.plan.pace {
            Pace::Window => self.flush_all(),
            Pace::PerConnection | Pace::Open { .. } => self.flush(at),
        }
    }

    fn flush_all(&mut self) {
        for at in 0..self.wires.len() {
            self.flush(at);
        }
    }

    fn flush(&mut self, at: usize) {
        let wire = &mut self.wires[at];
        while wire.sent < wire.out.len() {
            self.calls.sends += 1;
            match send(&wire.socket, &wire.out[wire.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => wire.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return self.close(at, &error.to_string()),
            }
        }
        if wire.sent == wire.out.len() {
            wire.out.clear();
            wire.sent = 0;
        }
        let blocked = !wire.out.is_empty();
        if blocked != wire.blocked {
            wire.blocked = blocked;
            let flags = match blocked {
                true => epoll::EventFlags::IN | epoll::EventFlags::OUT,
                false => epoll::EventFlags::IN,
            };
            // It cannot fail for a descriptor that is watched already.
            let _ = epoll::modify(&self.epoll, &wire.socket, epoll::EventData::new_u64(at as u64), flags);
        }
    }

    /// A connection that fails ends the run: what the others have in flight is still awaited.
    fn close(&mut self, at: usize, why: &str) {
        let wire = &mut self.wires[at];
        wire.out.clear();
        wire.sent = 0;
        let _ = epoll::delete(&self.epoll, &wire.socket);
        self.book.close(at, why);
        self.ending = true;
    }
}
