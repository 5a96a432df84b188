//! The loop of a thread with many connections, or with a schedule: opens, sends and receives as the plan, the schedule
//! and the connections say, and waits for events of all of them.
//!
//! A connection that comes and goes costs socket, connect, send, epoll_ctl, recv and close, and its share of
//! epoll_wait. To get there: sockets are watched by edges, so that they are registered once; the first send is tried
//! right behind connect, and tells by its success that the connection stands (on loopback it does so at once); a
//! received end of the stream is told by the event, so no receive is needed to see it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, connect, socket_with, sockopt};

use crate::drive::clock::monotonic_ns;
use crate::drive::connection::{Context, Next, Phase};
use crate::drive::plan::{Destination, Route};
use crate::drive::protocol::Protocol;
use crate::drive::random::Spread;
use crate::drive::sys::bind_address_no_port;
use crate::drive::worker::{Worker, ns, timespec};
use crate::error::LoadError;
use crate::record::Moment;

/// Events of one wait.
const EVENTS: usize = 512;

/// The most connections opened, or requests sent on schedule, between two looks at what has come.
const STARTS_PER_TURN: usize = 32;

/// Closed loop: how long a place rests after its connect has failed. Without a rest, a server that refuses would be
/// asked a hundred thousand times a second.
const REST_NS: u64 = 1_000_000;

/// So many failed connects without a single connection end the run.
const HOPELESS: u64 = 1000;

/// What an event told of beside bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// More bytes may come.
    Bytes,
    /// Nothing will come behind the bytes.
    End,
    /// An error is behind them.
    Error,
}

/// Where a request that is due can go.
enum Room {
    /// To this connection.
    At(usize),
    /// To a new connection in this place.
    New(usize),
    /// As much is in flight as may be.
    None,
    /// There is room, but the socket is full.
    Full,
}

struct EventLoop<'w, 'a, P: Protocol> {
    worker: &'w mut Worker<'a, P>,
    epoll: OwnedFd,
    /// Draws the connection of each request.
    spread: Option<Spread>,
    /// Places without a connection.
    free: Vec<usize>,
    /// Places that rest, and until when; the earliest first.
    resting: VecDeque<(u64, usize)>,
    /// Open loop: connections with room, the youngest last; some may have none any more.
    roomy: Vec<usize>,
    /// Connections with requests that are sent together at the end of a turn.
    unsent: Vec<usize>,
    next_route: usize,
    tick_ns: u64,
}

impl<P: Protocol> Worker<'_, P> {
    /// Runs until all requests are settled, or given up.
    pub(super) fn run_events(&mut self) -> Result<(), LoadError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| LoadError::system("cannot make an epoll instance", error))?;
        let is_kept = self.terms.is_kept();
        let own = self.plan.connections_of(self.thread);
        let spread = |seed: u64| Spread::new(&self.plan.weights[own], seed ^ self.thread as u64);
        EventLoop {
            epoll,
            spread: self.plan.spread.map(spread),
            free: (0..self.slots.len()).rev().filter(|_| !is_kept).collect(),
            resting: VecDeque::new(),
            roomy: Vec::new(),
            unsent: Vec::new(),
            // So that the threads do not all begin with the same route.
            next_route: self.thread,
            tick_ns: ns(self.tick),
            worker: self,
        }
        .run()
    }
}

impl<P: Protocol> EventLoop<'_, '_, P> {
    fn run(mut self) -> Result<(), LoadError> {
        for at in 0..self.worker.slots.len() {
            self.watch(at);
            self.use_room(at);
        }
        let mut events = Vec::with_capacity(EVENTS);
        let mut look_ns = self.worker.now_ns + self.tick_ns;
        let mut drained_ns = u64::MAX;
        loop {
            let now_ns = self.worker.read_clock();
            if now_ns >= look_ns {
                look_ns = now_ns + self.tick_ns;
                self.look(now_ns);
            }
            let wait_ns = if self.worker.open.is_some() { self.start_due(now_ns) } else { self.start_free(now_ns) };
            self.flush_all();
            if !self.worker.may_start() {
                drained_ns = drained_ns.min(now_ns.saturating_add(ns(self.worker.plan.drain)));
                if self.is_over() || now_ns >= drained_ns {
                    return Ok(());
                }
            }
            events.clear();
            self.wait(&mut events, wait_ns)?;
            for event in &events {
                // Copied: the struct is packed.
                let (data, flags) = (event.data, event.flags);
                self.on_event(data.u64() as usize, flags);
            }
        }
    }

    /// Waits for events; polls first, if replies come fast.
    fn wait(&mut self, events: &mut Vec<epoll::Event>, wait_ns: u64) -> Result<(), LoadError> {
        let spinner = &mut self.worker.spinner;
        if !spinner.is_on() || wait_ns == 0 || self.worker.record.in_flight() == 0 {
            return self.wait_for(events, wait_ns);
        }
        let spin_ns = spinner.begin().min(wait_ns);
        let begin_ns = monotonic_ns();
        let mut polled_ns = 0;
        while events.is_empty() && polled_ns < spin_ns {
            self.wait_for(events, 0)?;
            std::hint::spin_loop();
            polled_ns = monotonic_ns() - begin_ns;
        }
        let caught = !events.is_empty();
        if !caught {
            self.wait_for(events, wait_ns - spin_ns)?;
        }
        // A wait that ends because something is due, or can be sent, tells nothing of replies.
        let is_reply = |event: &&epoll::Event| { event.flags }.contains(epoll::EventFlags::IN);
        if let Some(event) = events.iter().find(is_reply) {
            let at = event.data.u64() as usize;
            self.worker.spinner.end(monotonic_ns() - begin_ns, polled_ns, caught);
            self.worker.look_where_replies_are_handled(at);
        }
        Ok(())
    }

    fn wait_for(&self, events: &mut Vec<epoll::Event>, wait_ns: u64) -> Result<(), LoadError> {
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&timespec(Duration::from_nanos(wait_ns)))) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(LoadError::system("cannot wait for replies", error)),
        }
    }

    /// What is done now and then: time limits, and whether to go on.
    fn look(&mut self, now_ns: u64) {
        for at in 0..self.worker.slots.len() {
            self.apply(at, |worker| worker.expire(at));
        }
        self.worker.heed_stop();
        let connections = &self.worker.record.connections;
        if !self.worker.ending && connections.established == 0 && connections.not_established >= HOPELESS {
            let text = || format!("given up: not one of the first {HOPELESS} connections was established");
            self.worker.record.note(Moment { now_ns, connection: 0 }, text);
            (self.worker.hopeless, self.worker.ending) = (true, true);
        }
        self.give_up_late(now_ns);
    }

    /// Open loop: requests that were due within the time but found no room are still sent for a while.
    fn give_up_late(&mut self, now_ns: u64) {
        let worker = &mut *self.worker;
        let Some(open) = &mut worker.open else { return };
        if worker.ending || now_ns < worker.until_ns.saturating_add(ns(worker.plan.late)) {
            return;
        }
        while worker.quota > 0 && open.schedule.due_ns() < worker.until_ns {
            open.schedule.advance();
            open.lateness.unsent += 1;
            worker.quota -= 1;
        }
        worker.ending = true;
    }

    /// At the end: closes connections that come and go and are idle, and tells whether nothing is in flight any more.
    fn is_over(&mut self) -> bool {
        let mut over = true;
        for at in 0..self.worker.slots.len() {
            let connection = &self.worker.slots[at].connection;
            match connection.phase() {
                Phase::Closed => {}
                Phase::Open if connection.in_flight() == 0 => {
                    if !self.worker.terms.is_kept() {
                        self.apply(at, |worker| worker.give_up(at));
                    }
                }
                _ => over = false,
            }
        }
        over
    }

    /// Closed loop: opens connections in free places. Returns how long to wait for events.
    fn start_free(&mut self, now_ns: u64) -> u64 {
        while self.resting.front().is_some_and(|(until_ns, _)| *until_ns <= now_ns) {
            self.free.extend(self.resting.pop_front().map(|(_, at)| at));
        }
        for _ in 0..STARTS_PER_TURN {
            if !self.worker.may_start() {
                break;
            }
            let Some(at) = self.free.pop() else { break };
            self.open_at(at, None);
        }
        if !self.free.is_empty() && self.worker.may_start() {
            return 0;
        }
        let rest_ns = self.resting.front().map_or(u64::MAX, |(until_ns, _)| until_ns - now_ns);
        rest_ns.min(self.tick_ns)
    }

    /// Open loop: starts what is due. Returns how long to wait for events.
    fn start_due(&mut self, now_ns: u64) -> u64 {
        for _ in 0..STARTS_PER_TURN {
            if !self.worker.may_start() {
                return self.tick_ns;
            }
            let room = self.find_room();
            let Some(open) = &mut self.worker.open else { return self.tick_ns };
            let due_ns = open.schedule.due_ns();
            if due_ns > now_ns {
                return (due_ns - now_ns).saturating_sub(ns(self.worker.plan.spin.limit())).min(self.tick_ns);
            }
            if let Room::None | Room::Full = room {
                open.held_until_ns = now_ns;
                if let Room::None = room {
                    open.bound_until_ns = now_ns;
                }
                return self.tick_ns;
            }
            open.lateness.bound_hits += u64::from(due_ns <= open.bound_until_ns);
            open.lateness.lag.record(now_ns - due_ns.max(open.held_until_ns).min(now_ns));
            open.schedule.advance();
            open.drawn = None;
            match room {
                Room::At(at) => self.issue(at, due_ns),
                Room::New(at) => {
                    self.free.pop();
                    self.open_at(at, Some(due_ns));
                }
                Room::None | Room::Full => {}
            }
        }
        0
    }

    /// Where the next request of a schedule can go.
    fn find_room(&mut self) -> Room {
        if let (Some(spread), Some(open)) = (&mut self.spread, &mut self.worker.open) {
            let at = *open.drawn.get_or_insert_with(|| spread.draw());
            return if self.has_room(at) { Room::At(at) } else { Room::None };
        }
        while let Some(&at) = self.roomy.last() {
            if self.worker.slots[at].is_listed && self.has_room(at) {
                return match self.worker.plan.batch == 1 && !self.worker.slots[at].out.is_empty() {
                    true => Room::Full,
                    false => Room::At(at),
                };
            }
            self.roomy.pop();
            self.worker.slots[at].is_listed = false;
        }
        self.free.last().map_or(Room::None, |at| Room::New(*at))
    }

    fn has_room(&self, at: usize) -> bool {
        self.worker.slots[at].connection.has_room(&self.worker.terms)
    }

    /// Uses the room on a connection that may have some.
    fn use_room(&mut self, at: usize) {
        match (&mut self.spread, self.worker.open.is_some()) {
            // The schedule will.
            (Some(_), true) => {}
            (None, true) => {
                if self.has_room(at) && !std::mem::replace(&mut self.worker.slots[at].is_listed, true) {
                    self.roomy.push(at);
                }
            }
            (Some(_), false) => self.fill_window(),
            (None, false) => {
                while self.has_room(at) && self.worker.may_start() {
                    let start_ns = self.worker.start_time();
                    self.issue(at, start_ns);
                }
                let connection = &self.worker.slots[at].connection;
                let is_idle = connection.phase() == Phase::Open && connection.in_flight() == 0;
                if is_idle && !self.worker.terms.is_kept() {
                    self.apply(at, |worker| worker.give_up(at));
                }
            }
        }
    }

    /// Closed loop over all connections: each request goes to one that is drawn.
    fn fill_window(&mut self) {
        while self.worker.record.in_flight() < self.worker.plan.in_flight as u64 && self.worker.may_start() {
            let Some(spread) = &mut self.spread else { return };
            let at = spread.draw();
            if !self.has_room(at) {
                // It has ended, which ends the run.
                return;
            }
            let start_ns = self.worker.start_time();
            self.issue(at, start_ns);
        }
    }

    /// Begins a request.
    fn issue(&mut self, at: usize, start_ns: u64) {
        if self.worker.plan.batch > 1 && self.worker.slots[at].out.is_empty() {
            self.unsent.push(at);
        }
        self.apply(at, |worker| worker.issue(at, start_ns));
    }

    fn flush_all(&mut self) {
        while let Some(at) = self.unsent.pop() {
            self.apply(at, |worker| worker.flush(at));
        }
    }

    /// Opens a connection for a request that was due at `due_ns`, or is now.
    fn open_at(&mut self, at: usize, due_ns: Option<u64>) {
        let worker = &mut *self.worker;
        let Destination::Renewed(routes) = &worker.plan.destination else { return };
        let number = self.next_route % routes.len();
        self.next_route = number + 1;
        let now_ns = worker.read_clock();
        let start_ns = due_ns.unwrap_or(now_ns);
        let mut cx = Context { now_ns, terms: &worker.terms, record: &mut worker.record };
        worker.slots[at].connection.open(number, start_ns, &mut cx);
        self.apply(at, |worker| match begin_connect(&routes[number]) {
            Ok(socket) => {
                worker.slots[at].socket = Some(socket);
                worker.issue(at, start_ns)
            }
            Err(errno) => {
                worker.issue(at, start_ns);
                worker.failed(at, errno)
            }
        });
        self.watch(at);
    }

    /// Watches a new connection, if it still stands.
    fn watch(&mut self, at: usize) {
        let Some(socket) = &self.worker.slots[at].socket else { return };
        let data = epoll::EventData::new_u64(at as u64);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        // What has come before is told at once.
        if let Err(errno) = epoll::add(&self.epoll, socket, data, flags) {
            self.apply(at, |worker| worker.failed(at, errno));
        }
    }

    /// A place gets a new connection only between two waits, so the event is of the connection that has the place.
    fn on_event(&mut self, at: usize, flags: epoll::EventFlags) {
        self.apply(at, |worker| worker.flush(at));
        let readable =
            epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if !flags.intersects(readable) {
            return;
        }
        // A reset ends the stream, too, but is an error, which is received behind what has come before.
        let behind = match flags {
            flags if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) => Behind::Error,
            flags if flags.contains(epoll::EventFlags::RDHUP) => Behind::End,
            _ => Behind::Bytes,
        };
        loop {
            let mut drained = true;
            self.apply(at, |worker| match worker.receive(at, RecvFlags::DONTWAIT, behind == Behind::End) {
                Some((empty, next)) => {
                    drained = empty && behind != Behind::Error;
                    next
                }
                None => Next::Wait,
            });
            // A receive that brought less than it asked for has emptied the socket; what comes later has an event of
            // its own (epoll(7)). An error that the event told of has none.
            if drained {
                break;
            }
        }
        self.flush_all();
    }

    /// Gives a connection an event and does what follows from it.
    fn apply(&mut self, at: usize, event: impl FnOnce(&mut Worker<'_, P>) -> Next) {
        let phase = self.worker.slots[at].connection.phase();
        if phase == Phase::Closed {
            return;
        }
        match event(self.worker) {
            Next::Wait => {}
            Next::Room => self.use_room(at),
            // Datagrams get lost, and others may follow; on a stream something is wrong.
            Next::Lost if self.worker.is_datagram => self.use_room(at),
            Next::Lost => self.worker.ending = true,
            next @ (Next::Close | Next::Reset) => {
                self.worker.slots[at].close(next == Next::Reset);
                match self.worker.terms.is_kept() {
                    // What the others have in flight is still awaited.
                    true => self.worker.ending = true,
                    false if phase == Phase::Connecting && self.worker.open.is_none() => {
                        self.resting.push_back((monotonic_ns() + REST_NS, at));
                    }
                    false => self.free.push(at),
                }
            }
        }
    }
}

/// Makes a socket and lets it connect.
fn begin_connect(route: &Route) -> Result<OwnedFd, Errno> {
    let family = match route.destination {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    if let Some(source) = route.source {
        bind_address_no_port(&socket).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
        bind(&socket, &SocketAddr::new(source, 0))?;
    }
    if route.nodelay {
        sockopt::set_tcp_nodelay(&socket, true)?;
    }
    match connect(&socket, &route.destination) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
