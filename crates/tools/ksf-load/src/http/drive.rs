//! One thread, many connections: opens, sends and receives as the plan and the connections say.
//!
//! A connection costs socket, connect, send, epoll_ctl, recv and close, and its share of epoll_wait. To get there:
//! sockets are watched by edges, so that they are registered once; the first send is tried right behind connect,
//! and tells by its success that the connection stands (on loopback it does so at once); a received end of the stream
//! is told by the event, so no receive is needed to see it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, recv, send, socket_with, sockopt,
};

use super::book::Book;
use super::conn::{Conn, Next, Phase, Terms};
use super::plan::{Pace, Plan, Route};
use crate::drive::clock::monotonic_ns;
use crate::drive::open::{OpenRecord, Schedule};
use crate::drive::sys::bind_address_no_port;
use crate::error::LoadError;

/// Room for what one receive brings; answers are read in place.
const RECEIVE_BYTES: usize = 128 * 1024;

/// Events of one wait.
const EVENTS: usize = 512;

/// The most connections opened, or requests sent on schedule, between two looks at what has come.
const STARTS_PER_TURN: usize = 32;

/// Closed loop: how long a place rests after its connect has failed. Without a rest, a server that refuses would be
/// asked a hundred thousand times a second.
const REST_NS: u64 = 1_000_000;

/// So many failed connects without a single connection end the run: nobody is there.
const HOPELESS: u64 = 1000;

/// Requests longer than this do not wait for acknowledgements (TCP_NODELAY): they may need several segments.
const SEGMENT_BYTES: usize = 1200;

/// What one thread did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) book: Book,
    pub(crate) open: Option<OpenRecord>,
    pub(crate) start_ns: u64,
    /// The end of what counts for rates.
    pub(crate) end_ns: u64,
    pub(crate) interrupted: bool,
    /// The end came because nobody was there.
    pub(crate) hopeless: bool,
}

/// A place for a connection.
#[derive(Debug, Default)]
struct Place {
    conn: Conn,
    socket: Option<OwnedFd>,
    /// Tells this connection from the one that had the place before.
    generation: u32,
    route: usize,
    /// The request asks the server to close.
    closes: bool,
    sent_bytes: usize,
}

/// What an event told of beside bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Come {
    Bytes,
    /// Nothing will come behind the bytes.
    End,
    /// An error is behind them.
    Error,
}

/// Open loop only.
struct Open {
    schedule: Schedule,
    record: OpenRecord,
    /// Until when the next request had no room.
    held_until_ns: u64,
    spin_ns: u64,
}

pub(crate) struct Driver<'a> {
    terms: &'a Terms,
    routes: &'a [Route],
    stop: &'a AtomicBool,
    epoll: OwnedFd,
    places: Vec<Place>,
    /// Places without a connection.
    free: Vec<usize>,
    /// Places that rest, and until when; the earliest first.
    resting: VecDeque<(u64, usize)>,
    /// Open loop: places with an idle connection, the youngest last; some may have ended meanwhile.
    idle: Vec<(usize, u32)>,
    next_route: usize,
    /// Requests yet to be started.
    quota: u64,
    duration_ns: Option<u64>,
    drain_ns: u64,
    tick_ns: u64,
    open: Option<Open>,
    book: Book,
    received: Box<[u8]>,
    /// Nothing more is started.
    ending: bool,
    interrupted: bool,
    hopeless: bool,
}

impl<'a> Driver<'a> {
    /// The part of `thread` in the plan.
    pub(crate) fn new(
        plan: &'a Plan,
        routes: &'a [Route],
        thread: usize,
        stop: &'a AtomicBool,
    ) -> Result<Self, LoadError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| LoadError::system("cannot make an epoll instance", error))?;
        let connections = plan.share(plan.connections as u64, thread) as usize;
        let open = plan.schedule(thread).map(|schedule| Open {
            schedule,
            record: OpenRecord::new(),
            held_until_ns: 0,
            spin_ns: match plan.pace {
                Pace::Open { spin, .. } => spin.as_nanos() as u64,
                Pace::Closed => 0,
            },
        });
        let limit_ns = plan.terms.connect_timeout_ns.min(plan.terms.timeout_ns);
        Ok(Driver {
            terms: &plan.terms,
            routes,
            stop,
            epoll,
            places: (0..connections).map(|_| Place::default()).collect(),
            free: (0..connections).rev().collect(),
            resting: VecDeque::new(),
            idle: Vec::new(),
            // So that the threads do not all begin with the same route.
            next_route: thread,
            quota: plan.requests.map_or(u64::MAX, |requests| plan.share(requests, thread)),
            duration_ns: plan.duration.map(|duration| duration.as_nanos() as u64),
            drain_ns: plan.drain.as_nanos() as u64,
            tick_ns: (limit_ns / 8).clamp(1_000_000, 100_000_000),
            open,
            book: Book::new(),
            received: vec![0; RECEIVE_BYTES].into(),
            ending: false,
            interrupted: false,
            hopeless: false,
        })
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Result<Ran, LoadError> {
        let start_ns = monotonic_ns();
        if let Some(duration_ns) = self.duration_ns {
            self.book.until_ns = start_ns.saturating_add(duration_ns);
        }
        if let Some(open) = &mut self.open {
            open.schedule.start(start_ns);
        }
        let mut events = Vec::with_capacity(EVENTS);
        let mut look_ns = start_ns + self.tick_ns;
        let mut drained_ns = u64::MAX;
        loop {
            let now_ns = monotonic_ns();
            if now_ns >= look_ns {
                look_ns = now_ns + self.tick_ns;
                self.look(now_ns);
            }
            let wait_ns = match self.open.is_some() {
                true => self.start_due(now_ns),
                false => self.start_free(now_ns),
            };
            if !self.may_start(now_ns) {
                drained_ns = drained_ns.min(now_ns.saturating_add(self.drain_ns));
                if self.is_over() || now_ns >= drained_ns {
                    break;
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
        let stopped_ns = monotonic_ns();
        for at in 0..self.places.len() {
            self.apply(at, |conn, terms, book| conn.give_up(terms, book));
        }
        // With all requests settled before the time was over, the last of them is the end.
        let settled_ns = if self.book.last_ns > 0 { self.book.last_ns } else { stopped_ns };
        let end_ns = match self.quota == 0 || self.hopeless || self.book.until_ns == u64::MAX {
            true => settled_ns.min(self.book.until_ns),
            false => self.book.until_ns,
        };
        Ok(Ran {
            open: self.open.map(|open| open.record),
            start_ns,
            end_ns: end_ns.max(start_ns + 1),
            interrupted: self.interrupted,
            hopeless: self.hopeless,
            book: self.book,
        })
    }

    /// What is done now and then: time limits, and whether to go on.
    fn look(&mut self, now_ns: u64) {
        for at in 0..self.places.len() {
            if self.places[at].socket.is_some() {
                self.apply(at, |conn, _, book| conn.expire(now_ns, book));
            }
        }
        if !self.interrupted && self.stop.load(Ordering::Relaxed) {
            self.interrupted = true;
            self.ending = true;
            self.book.until_ns = self.book.until_ns.min(now_ns);
        }
        if !self.ending && self.book.established == 0 && self.book.not_established >= HOPELESS {
            self.book.note(now_ns, "given up: not one of the first 1000 connections was established");
            (self.hopeless, self.ending) = (true, true);
        }
        self.give_up_late(now_ns);
    }

    /// Open loop: what was due within the time but found no room is sent for as long as answers are awaited.
    fn give_up_late(&mut self, now_ns: u64) {
        let Some(open) = &mut self.open else { return };
        if self.ending || now_ns < self.book.until_ns.saturating_add(self.drain_ns) {
            return;
        }
        while self.quota > 0 && open.schedule.due_ns() < self.book.until_ns {
            open.schedule.advance();
            open.record.unsent += 1;
            self.quota -= 1;
        }
        self.ending = true;
    }

    /// Whether requests are still to be started.
    fn may_start(&self, now_ns: u64) -> bool {
        let in_time = match &self.open {
            Some(open) => open.schedule.due_ns() < self.book.until_ns,
            None => now_ns < self.book.until_ns,
        };
        !self.ending && self.quota > 0 && in_time
    }

    /// At the end: closes what is idle, and tells whether nothing is under way any more.
    fn is_over(&mut self) -> bool {
        let mut over = true;
        for at in 0..self.places.len() {
            match self.places[at].conn.phase() {
                Phase::Closed => {}
                Phase::Idle => self.apply(at, |conn, terms, book| conn.give_up(terms, book)),
                _ => over = false,
            }
        }
        over
    }

    /// Closed loop: opens connections at free places. Returns how long to wait for events.
    fn start_free(&mut self, now_ns: u64) -> u64 {
        while self.resting.front().is_some_and(|(until_ns, _)| *until_ns <= now_ns) {
            self.free.extend(self.resting.pop_front().map(|(_, at)| at));
        }
        for _ in 0..STARTS_PER_TURN {
            if self.free.is_empty() || !self.may_start(now_ns) {
                break;
            }
            if let Some(at) = self.free.pop() {
                self.open_at(at, monotonic_ns());
            }
        }
        if !self.free.is_empty() && self.may_start(now_ns) {
            return 0;
        }
        let rest_ns = self.resting.front().map_or(u64::MAX, |(until_ns, _)| until_ns - now_ns);
        rest_ns.min(self.tick_ns)
    }

    /// Open loop: starts what is due. Returns how long to wait for events.
    fn start_due(&mut self, now_ns: u64) -> u64 {
        for _ in 0..STARTS_PER_TURN {
            if !self.may_start(now_ns) {
                return self.tick_ns;
            }
            let Some(open) = &mut self.open else { return self.tick_ns };
            let due_ns = open.schedule.due_ns();
            if due_ns > now_ns {
                return (due_ns - now_ns).saturating_sub(open.spin_ns).min(self.tick_ns);
            }
            let idle = loop {
                match self.idle.pop() {
                    Some((at, generation)) => {
                        let place = &self.places[at];
                        if place.generation == generation && place.conn.phase() == Phase::Idle {
                            break Some(at);
                        }
                    }
                    None => break None,
                }
            };
            if idle.is_none() && self.free.is_empty() {
                open.held_until_ns = now_ns;
                return self.tick_ns;
            }
            open.record.bound_hits += u64::from(due_ns <= open.held_until_ns);
            open.record.lag.record(now_ns - due_ns.max(open.held_until_ns).min(now_ns));
            open.schedule.advance();
            match (idle, self.free.last().copied()) {
                (Some(at), _) => self.ask_at(at, due_ns),
                (None, Some(at)) => {
                    self.free.pop();
                    self.open_at(at, due_ns);
                }
                (None, None) => unreachable!("there is room"),
            }
        }
        0
    }

    /// Opens a connection for a request that was to start at `start_ns`.
    fn open_at(&mut self, at: usize, start_ns: u64) {
        self.quota -= 1;
        let route = self.next_route % self.routes.len();
        self.next_route = (route + 1) % self.routes.len();
        let place = &mut self.places[at];
        place.route = route;
        place.conn.open(start_ns, monotonic_ns(), self.terms, &mut self.book);
        place.closes = place.conn.asks_to_close(self.terms);
        place.sent_bytes = 0;
        match begin_connect(&self.routes[route]) {
            Ok(socket) => place.socket = Some(socket),
            Err(errno) => {
                let now_ns = monotonic_ns();
                return self.apply(at, |conn, _, book| conn.error(errno, now_ns, book));
            }
        }
        self.send(at);
        self.watch(at);
    }

    /// Watches a new connection, if it still stands.
    fn watch(&mut self, at: usize) {
        let place = &self.places[at];
        let Some(socket) = &place.socket else { return };
        let data = epoll::EventData::new_u64(at as u64);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        // What has come before is told at once.
        if let Err(errno) = epoll::add(&self.epoll, socket, data, flags) {
            let now_ns = monotonic_ns();
            self.apply(at, |conn, _, book| conn.error(errno, now_ns, book));
        }
    }

    /// Sends a request on an idle connection.
    fn ask_at(&mut self, at: usize, start_ns: u64) {
        self.quota -= 1;
        let place = &mut self.places[at];
        place.conn.ask(start_ns, monotonic_ns(), self.terms, &mut self.book);
        place.closes = place.conn.asks_to_close(self.terms);
        place.sent_bytes = 0;
        self.send(at);
    }

    /// A place gets a new connection only between two waits, so the event is of the connection that has the place.
    fn on_event(&mut self, at: usize, flags: epoll::EventFlags) {
        let generation = self.places[at].generation;
        if matches!(self.places[at].conn.phase(), Phase::Connecting | Phase::Sending) {
            self.send(at);
        }
        let readable =
            epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(readable) && self.places[at].generation == generation {
            // A reset ends the stream, too, but is an error, which is received behind what has come before.
            let come = match flags {
                flags if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) => Come::Error,
                flags if flags.contains(epoll::EventFlags::RDHUP) => Come::End,
                _ => Come::Bytes,
            };
            self.receive(at, generation, come);
        }
    }

    /// Sends what is left of the request. The first success tells that the connection stands.
    fn send(&mut self, at: usize) {
        let place = &mut self.places[at];
        let Some(socket) = &place.socket else { return };
        let request = &self.routes[place.route].requests[usize::from(place.closes)];
        loop {
            let connecting = place.conn.phase() == Phase::Connecting;
            // Taken before the send, which on loopback does the server's part of the work, too.
            let now_ns = if connecting { monotonic_ns() } else { 0 };
            match send(socket, &request[place.sent_bytes..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    if connecting {
                        place.conn.established(now_ns, self.terms, &mut self.book);
                    }
                    place.sent_bytes += sent;
                    self.book.sent_bytes += sent as u64;
                    if place.sent_bytes == request.len() {
                        return place.conn.sent();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    let now_ns = monotonic_ns();
                    return self.apply(at, |conn, _, book| conn.error(errno, now_ns, book));
                }
            }
        }
    }

    /// Receives all there is.
    fn receive(&mut self, at: usize, generation: u32, come: Come) {
        loop {
            let Some(socket) = &self.places[at].socket else { return };
            let got = match recv(socket, &mut *self.received, RecvFlags::DONTWAIT) {
                Ok((got, _)) => Ok(got),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(errno) => Err(errno),
            };
            let now_ns = monotonic_ns();
            // Lent to the connection; `apply` may not need it.
            let bytes = std::mem::take(&mut self.received);
            let drained = got.is_ok_and(|got| got < bytes.len());
            self.apply(at, |conn, terms, book| match got {
                Ok(0) => conn.ended(now_ns, terms, book),
                Ok(got) => conn.received(&bytes[..got], drained && come == Come::End, now_ns, terms, book),
                Err(errno) => conn.error(errno, now_ns, book),
            });
            self.received = bytes;
            // A short receive has emptied the socket; what comes later has an event of its own (epoll(7)). An error that
            // the event told of has none.
            if drained && come != Come::Error || self.places[at].generation != generation {
                return;
            }
        }
    }

    /// Gives a connection an event and does what follows from it.
    fn apply(&mut self, at: usize, event: impl FnOnce(&mut Conn, &Terms, &mut Book) -> Next) {
        let place = &mut self.places[at];
        let connecting = place.conn.phase() == Phase::Connecting;
        if place.conn.phase() == Phase::Closed {
            return;
        }
        match event(&mut place.conn, self.terms, &mut self.book) {
            Next::Wait => {}
            Next::Idle => self.idle_at(at),
            next => {
                place.generation = place.generation.wrapping_add(1);
                let socket = place.socket.take();
                if let (Next::Reset, Some(socket)) = (next, &socket) {
                    // Without it the close would be an orderly one, which the report then shows in TIME_WAIT.
                    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
                }
                drop(socket);
                match connecting && self.open.is_none() {
                    true => self.resting.push_back((monotonic_ns() + REST_NS, at)),
                    false => self.free.push(at),
                }
            }
        }
    }

    /// A connection can take another request.
    fn idle_at(&mut self, at: usize) {
        match self.open.is_some() {
            true => self.idle.push((at, self.places[at].generation)),
            false => {
                let now_ns = monotonic_ns();
                match self.may_start(now_ns) {
                    true => self.ask_at(at, now_ns),
                    false => self.apply(at, |conn, terms, book| conn.give_up(terms, book)),
                }
            }
        }
    }

    fn wait(&self, events: &mut Vec<epoll::Event>, wait_ns: u64) -> Result<(), LoadError> {
        let nap = Duration::from_nanos(wait_ns);
        let nap = Timespec { tv_sec: nap.as_secs() as i64, tv_nsec: nap.subsec_nanos().into() };
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&nap)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(LoadError::system("cannot wait for answers", error)),
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
    if route.requests[1].len() > SEGMENT_BYTES {
        sockopt::set_tcp_nodelay(&socket, true)?;
    }
    match connect(&socket, &route.destination) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
