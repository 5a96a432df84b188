//! One core's share of a server: a thread with its engine, sockets, slots and connections.
//!
//! A turn: wait for events; hand bytes to connections, which call their service; deliver deferred replies; then send
//! what every touched connection has queued, one batch each. Nothing is shared with other shards but the count of
//! connections.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem};

use crate::adopt::{Adopter, OpenConnections};
use crate::assist::Assist;
use crate::connection::Connection;
use crate::deferred::Mail;
use crate::engine::syscalls::preemptions;
use crate::engine::{Engine, Event, Reading, Wait};
use crate::env::Env;
use crate::error::CloseReason;
use crate::gates::Gate;
use crate::give_back::GiveBack;
use crate::limits::Time;
use crate::listener::{DatagramPeer, ListenAddr, is_own};
use crate::outgoing::ExchangeWork;
use crate::pace::Pace;
use crate::pool::Chunk;
use crate::service::ConnKey;
use crate::spin::{Outcome, Spin, Spinner};
use crate::stats::Stats;

mod accepting;
mod assisted;
mod datagrams;
mod ending;
mod erased;
mod files;
mod look_after;
mod mail;
mod outgoing;
mod stream;
#[cfg(test)]
mod tests;
mod ticks;
mod timer_wheel;

use accepting::spare_fd;
use assisted::AssistState;
use datagrams::DatagramService;
pub(crate) use erased::AnyService;
use erased::LocalService;
use outgoing::Outgoing;
use stream::Stream;
pub(crate) use ticks::now;
use ticks::{NEVER, timer};
use timer_wheel::TimerWheel;

/// What a shard needs to serve one listener.
pub(crate) struct ShardListener {
    pub(crate) addr: ListenAddr,
    /// Closed, and not there any more, when the shard drains.
    pub(crate) socket: Option<OwnedFd>,
    /// Others may listen on it, too.
    pub(crate) handed_over: bool,
    pub(crate) kind: ListenerKind,
    pub(crate) service: Arc<dyn AnyService>,
    /// Takes the connections of a stream listener, if they are not served here.
    pub(crate) adopter: Option<Arc<dyn Adopter>>,
    pub(crate) assist: Option<Arc<dyn Assist>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    Tcp,
    Unix,
    Udp,
}

/// A connection's place in the table.
struct Place {
    generation: u32,
    conn: Option<Conn>,
}

struct Conn {
    stream: Stream,
    /// Taken out of the kernel half before the socket is closed: fields drop in this order.
    /// Boxed, because the table of connections has room for more than there are.
    assist: Option<Box<AssistState>>,
    socket: OwnedFd,
    reading: Reading,
    /// In the list of connections to look after at the end of the turn.
    touched: bool,
    phase: Phase,
    /// While it lingers.
    lingering: Option<Box<Lingering>>,
    /// The outgoing connection of its exchange.
    upstream: Option<ConnKey>,
    /// The listener it came from; none of them for an outgoing connection.
    listener: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Everything is sent and our direction is shut; what still arrives is thrown away until the peer closes, because
    /// closing with unread bytes would reset the connection and destroy replies on their way. But not for ever, and not
    /// whatever it sends.
    Lingering(CloseReason),
    /// The engine is asked to end its operations.
    Releasing(CloseReason),
}

/// Until when, and with how many bytes a connection began to linger. In a box, because most connections never have this.
struct Lingering {
    deadline: Time,
    received_before: u64,
}

/// Pause between looks whether TCP has taken what the kernel half queued. Its work queue needs a few microseconds, maybe
/// of this very CPU: the first pause lets it run.
const ASSIST_WAIT_FIRST: Duration = Duration::from_micros(2);
const ASSIST_WAIT: Duration = Duration::from_micros(20);

/// Numbers of the watched descriptors.
const MAIL: u32 = 0;
const TIMER: u32 = 1;
const HALVES: u32 = 2;

pub(crate) struct Shard<E: Engine> {
    engine: E,
    env: Env,
    listeners: Vec<Option<ShardListener>>,
    /// The service of each listener, on this shard.
    served_by: Vec<Rc<dyn LocalService>>,
    /// Every service once, by its identity.
    services: Vec<(usize, Rc<dyn LocalService>)>,
    /// Those that want to hear of the end of a turn, by their number.
    batching: Vec<(u32, Rc<dyn LocalService>)>,
    datagrams: Vec<Option<Box<DatagramService>>>,
    /// The addresses of those.
    own_datagrams: Vec<SocketAddr>,
    /// Those that are not read for now.
    datagrams_stopped: Vec<bool>,
    halves: Vec<Arc<dyn Assist>>,
    /// Connections under a kernel half, by the name it has for them.
    tokens: HashMap<u64, ConnKey>,
    /// Tokens of a wake-up, kept for its memory.
    woken: Vec<u64>,
    places: Vec<Place>,
    free: Vec<u32>,
    /// Outgoing connections that are kept, by where they lead; used last, used first.
    idle: HashMap<SocketAddr, Vec<ConnKey>>,
    /// The list of the work for exchanges of the last round, kept for its memory.
    exchange_work: Vec<ExchangeWork>,
    open: usize,
    /// Connections of the whole server.
    connections: Arc<OpenConnections>,
    touched: Vec<u32>,
    /// How many of those are to be looked at again only because the kernel half has not come so far.
    await_half: usize,
    /// There were some in the turn before.
    awaited_half: bool,
    /// The list of the last turn, kept for its memory.
    looked_after: Vec<u32>,
    accept_again: Vec<(u32, Time)>,
    /// Kept so that a connection can be accepted, and closed, when the process has no descriptor left.
    spare_fd: Option<OwnedFd>,
    events: Vec<Event>,
    mail: Vec<Mail>,
    /// The mailbox was reported as readable in this turn.
    mail_arrived: bool,
    /// Connections whose next replies wait for a gate.
    gated: Vec<(Gate, ConnKey)>,
    pace: Pace,
    spinner: Spinner,
    /// How often another thread took the CPU from this one, as far as it was looked at.
    preemptions: u64,
    looks: LooksNow,
    /// The CPU whose connections are local, if they are counted.
    local_cpu: Option<u32>,
    /// What is due by the clock ends a wait by a timer, which is set for the earliest only. A time limit on every wait
    /// would set and cancel one at every turn, which in a virtual machine leaves it twice.
    timer: OwnedFd,
    timer_set: Option<Time>,
    /// The deadline of each connection that has one.
    deadlines: TimerWheel,
    next_tick: Time,
    /// Next look for silent peers, while memory is short.
    silent_look: Time,
    give_back: GiveBack,
    draining: Option<Draining>,
    stop: bool,
}

/// The end of a shard that finishes what it has.
#[derive(Clone, Copy)]
struct Draining {
    /// When its sockets are closed at the latest.
    deadline: Time,
    /// Until when handshakes that were begun may be completed; then the listening sockets are closed.
    handshakes_until: Option<Time>,
}

/// The looks for work of the second that is under way.
#[derive(Default)]
struct LooksNow {
    least: Option<u64>,
    most: u64,
    since: Time,
}

impl LooksNow {
    fn note(&mut self, events: u64, now: Time, stats: &Stats) {
        const SECOND_MS: u64 = 1_000;
        stats.events.add(events);
        stats.turns_empty.add(u64::from(events == 0));
        if now >= self.since.plus_ms(SECOND_MS) {
            stats.looks.publish(self.least.unwrap_or(0), self.most);
            *self = Self { since: now, ..Self::default() };
        }
        self.least = Some(self.least.map_or(events, |least| least.min(events)));
        self.most = self.most.max(events);
    }
}

impl<E: Engine> Shard<E> {
    pub(crate) fn new(
        mut env: Env,
        listeners: Vec<ShardListener>,
        connections: Arc<OpenConnections>,
        local_cpu: Option<u32>,
        spin: Spin,
    ) -> Result<Self, crate::Error> {
        let now = now();
        env.now = now;
        let engine = E::new(&mut env, spin != Spin::Off)?;
        let mut shard = Self {
            engine,
            env,
            listeners: Vec::new(),
            served_by: Vec::new(),
            services: Vec::new(),
            batching: Vec::new(),
            datagrams: Vec::new(),
            own_datagrams: Vec::new(),
            datagrams_stopped: Vec::new(),
            halves: Vec::new(),
            tokens: HashMap::new(),
            woken: Vec::new(),
            places: Vec::new(),
            free: Vec::new(),
            idle: HashMap::new(),
            exchange_work: Vec::new(),
            open: 0,
            connections,
            touched: Vec::new(),
            await_half: 0,
            awaited_half: false,
            looked_after: Vec::new(),
            accept_again: Vec::new(),
            spare_fd: spare_fd(),
            events: Vec::with_capacity(256),
            mail: Vec::new(),
            mail_arrived: false,
            gated: Vec::new(),
            pace: Pace::default(),
            spinner: Spinner::new(spin),
            preemptions: 0,
            looks: LooksNow::default(),
            local_cpu,
            timer: timer().map_err(crate::Error::Thread)?,
            timer_set: None,
            deadlines: TimerWheel::new(now),
            next_tick: NEVER,
            silent_look: now,
            give_back: GiveBack::default(),
            draining: None,
            stop: false,
        };
        shard.engine.watch(MAIL, shard.env.mailbox.as_fd().as_raw_fd())?;
        shard.engine.watch(TIMER, shard.timer.as_raw_fd())?;
        let added = listeners.into_iter().try_for_each(|listener| shard.add_listener(listener));
        if let Err(error) = added {
            // The service gets back the state of the sockets it took before.
            shard.close_datagrams();
            return Err(error);
        }
        Ok(shard)
    }

    /// Works until the server stops.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.stop {
            self.turn()?;
        }
        self.engine.flush(&mut self.env);
        self.end_files();
        // Before any socket is closed: what the engine has not submitted yet must not meet a descriptor used again.
        self.engine.shutdown();
        let reason = CloseReason::Stopped;
        for index in 0..self.places.len() {
            self.forget(index as u32, reason);
        }
        self.close_datagrams();
        self.served_by.clear();
        self.batching.clear();
        for (_, service) in self.services.drain(..) {
            service.stop();
        }
        Ok(())
    }

    fn close_datagrams(&mut self) {
        // Before any state is given back: what the engine has under way must not come for it any more.
        self.engine.shutdown();
        for mut datagrams in self.datagrams.drain(..).flatten() {
            datagrams.end(&mut self.env);
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        self.pace_datagrams();
        // What services began after the end of the turn, when their connections went on.
        self.begin_files();
        self.set_timer();
        let timeout = self.next_timeout();
        self.awaited_half = self.await_half > 0;
        let wait = Wait { timeout, gather: self.pace.gather() };
        let mut events = mem::take(&mut self.events);
        let before = self.env.stats.messages.value();
        self.wait(wait, &mut events)?;
        self.env.stats.turns.add(1);
        self.go_on();
        self.looks.note(events.len() as u64, self.env.now, &self.env.stats);
        // Taken off the end one by one, in the order in which they came.
        events.reverse();
        while let Some(event) = events.pop() {
            self.handle(event);
        }
        self.events = events;
        self.read_mail();
        self.end_turn();
        self.settle();
        self.pace.turn_over(self.env.stats.messages.value() - before, self.env.now);
        if self.env.now >= self.next_tick {
            self.tick();
        }
        self.stop |= self.is_drained();
        Ok(())
    }

    /// Waits for events; looks for them first, if that pays.
    fn wait(&mut self, wait: Wait, events: &mut Vec<Event>) -> io::Result<()> {
        let begun = self.env.now;
        let spin = self.spinner.next().filter(|_| wait.timeout.is_none() && wait.gather.is_none());
        let outcome = match spin {
            Some(length) => self.spin(length, events)?,
            None => None,
        };
        if events.is_empty() {
            self.engine.wait(&mut self.env, wait, events)?;
            self.env.now = now();
        }
        let time = self.env.now.since(begun);
        match outcome {
            Some(outcome) => self.spinner.spun(time, outcome),
            None if wait.timeout.is_none() => self.spinner.waited(time),
            None => {}
        }
        Ok(())
    }

    /// Looks for events so long. None: they were there already, so it would not have slept either.
    fn spin(&mut self, length: Duration, events: &mut Vec<Event>) -> io::Result<Option<Outcome>> {
        let look = Wait { timeout: Some(Duration::ZERO), gather: None };
        self.engine.wait(&mut self.env, look, events)?;
        self.env.now = now();
        if !events.is_empty() {
            return Ok(None);
        }
        self.env.stats.spins.add(1);
        let begun = self.env.now;
        let mut spun = Duration::ZERO;
        while events.is_empty() && spun < length {
            self.engine.wait(&mut self.env, look, events)?;
            self.env.now = now();
            spun = self.env.now.since(begun);
        }
        self.env.stats.spins_missed.add(u64::from(events.is_empty()));
        // Between two looks there is next to nothing, unless the CPU was away. What a virtual machine loses to others, it does
        // not get back by sleeping. The count is that of the last long spin: asking for it before each takes a system call,
        // and a thread that was preempted since, while it worked, is one that should not spin, either.
        let preemptions = if spun < length * 2 { self.preemptions } else { preemptions() };
        let preempted = mem::replace(&mut self.preemptions, preemptions) != preemptions;
        Ok(Some(match events.is_empty() {
            _ if preempted => Outcome::Preempted,
            true => Outcome::Missed,
            false => Outcome::Found,
        }))
    }

    /// How long the next wait may take without an event.
    fn next_timeout(&self) -> Option<Duration> {
        if self.has_work_left() || self.touched.len() > self.await_half {
            return Some(Duration::ZERO);
        }
        (self.await_half > 0).then_some(if self.awaited_half { ASSIST_WAIT } else { ASSIST_WAIT_FIRST })
    }

    /// True when something is left to do for which no event will come: exchange work of more than one turn, which goes on when
    /// others had theirs, and what followed from replies that were sent at the end of the turn, when services were called
    /// again and memory became free; and input of connections that gave way.
    fn has_work_left(&self) -> bool {
        let env = &self.env;
        let unended = self.batching.iter().any(|(_, service)| service.info().waits_for_turn_end());
        let answered = !env.answered.is_empty() || env.released || !env.gated.is_empty();
        unended
            || answered
            || env.shares.is_awaited()
            || !env.exchange_work.is_empty()
            || env.budget.may_proceed(&env.limits)
    }

    /// Begins the turn with the connections that gave way in earlier ones.
    fn go_on(&mut self) {
        self.env.begin_turn();
        while let Some(key) = self.env.next_to_go_on() {
            if let Some((conn, env)) = self.served(key) {
                conn.go_on(env);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Accepted { listener, socket } => self.accepted(listener, socket),
            Event::AcceptFailed { listener, error } => self.accept_failed(listener, &error),
            Event::Connected { conn, error } => self.connected(conn, error.as_ref()),
            Event::Received { conn, chunk } => {
                if let Some((conn, env)) = self.stream(conn) {
                    conn.receive(chunk, env);
                }
            }
            Event::ReceivedDirect { conn, direct, bytes } => {
                if let Some((conn, env)) = self.served(conn) {
                    conn.received_direct(direct, bytes, env);
                }
            }
            Event::Quiet { conn } => {
                // Looked after at the end of the turn, it lends its buffer.
                let _ = self.stream(conn);
            }
            Event::Eof { conn } => {
                self.note_not_reading(conn);
                self.end_of_stream(conn);
            }
            Event::Failed { conn } => {
                if self.stream(conn).is_some() {
                    self.note_not_reading(conn);
                    self.abort(conn.index, CloseReason::Io);
                }
            }
            Event::Sent { conn, bytes, done } => {
                if let Some((stream, env)) = self.stream(conn) {
                    stream.sent(bytes, done, env);
                }
            }
            Event::Released { conn } => self.released(conn),
            Event::Unparked { conn } => self.unparked(conn),
            Event::Watched { watch: MAIL } => self.mail_arrived = true,
            Event::Watched { watch: TIMER } => {
                let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                self.timer_set = None;
            }
            Event::Watched { watch } => self.take_wakes((watch - HALVES) as usize),
            Event::File(begun) => self.file_ended(*begun),
            Event::Datagram { socket, peer, chunk, truncated } => self.datagram(socket, peer, &chunk, truncated),
        }
    }

    /// The connection's stream, which will be looked after at the end of the turn.
    fn stream(&mut self, key: ConnKey) -> Option<(&mut Stream, &mut Env)> {
        let place = self.places.get_mut(key.index as usize).filter(|place| place.generation == key.generation)?;
        let conn = place.conn.as_mut().filter(|conn| !matches!(conn.phase, Phase::Releasing(_)))?;
        if !mem::replace(&mut conn.touched, true) {
            self.touched.push(key.index);
        }
        Some((&mut conn.stream, &mut self.env))
    }

    /// The same of a connection that a service answers.
    fn served(&mut self, key: ConnKey) -> Option<(&mut Connection, &mut Env)> {
        let (stream, env) = self.stream(key)?;
        Some((stream.served()?, env))
    }

    /// A connection whose operations the engine ends: nothing is sent on it any more, and its requests in work count as its own.
    fn releasing(&mut self, key: ConnKey) -> Option<(&mut Connection, &mut Env)> {
        let place = self.places.get_mut(key.index as usize).filter(|place| place.generation == key.generation)?;
        let conn = place.conn.as_mut().filter(|conn| matches!(conn.phase, Phase::Releasing(_)))?;
        Some((conn.stream.served()?, &mut self.env))
    }

    /// The stream of an outgoing connection, which will be looked after at the end of the turn.
    fn outgoing(&mut self, key: ConnKey) -> Option<(&mut Outgoing, &mut Env)> {
        let (stream, env) = self.stream(key)?;
        Some((stream.outgoing()?, env))
    }

    /// The messages of the turn are through: services commit what they did, and what was answered meanwhile, or waited
    /// for a log or for memory, goes on.
    fn end_turn(&mut self) {
        self.files_have_room();
        self.deliver_answered();
        for (number, service) in &self.batching {
            self.env.service = *number;
            service.turn_end(&mut self.env);
        }
        // Before replies are sent: the disk works meanwhile.
        self.begin_files();
        self.deliver_answered();
        if self.env.released || !self.env.gated.is_empty() {
            self.open_gates();
        }
        if self.env.budget.waiting() > 0 {
            self.proceed();
        }
        if self.env.budget.update_overfull(&self.env.limits) {
            self.overfull_changed();
        }
        if self.env.budget.update_short_of_replies(&self.env.limits) {
            for index in 0..self.places.len() as u32 {
                let _ = self.outgoing(ConnKey { index, generation: self.places[index as usize].generation });
            }
        }
    }

    /// Lets replies go whose logs are durable far enough.
    fn open_gates(&mut self) {
        let mut gated = mem::take(&mut self.gated);
        loop {
            // What opens may show the next gate of the same connection.
            let released = mem::take(&mut self.env.released);
            if !released && self.env.gated.is_empty() {
                break;
            }
            gated.append(&mut self.env.gated);
            let shard = self.env.shard;
            gated.retain(|(gate, key)| {
                let place = self.places.get(key.index as usize);
                if place.is_none_or(|place| place.generation != key.generation) {
                    return false;
                }
                let closed = self.env.gates.wait(*gate, shard);
                if !closed && let Some((conn, env)) = self.served(*key) {
                    conn.open_gates(env);
                }
                closed
            });
            for socket in 0..self.datagrams.len() {
                if let Some(Some(datagrams)) = self.datagrams.get_mut(socket) {
                    datagrams.open_gates(&mut self.env, self.engine.datagram_output(socket as u32));
                    self.engine.datagrams_added(socket as u32, &mut self.env);
                }
            }
        }
        self.gated = gated;
    }

    /// Lets connections go on that were not read for lack of memory, each at most once.
    fn proceed(&mut self) {
        // Peers that come, wait and leave while memory is short must not make the queue grow.
        if self.env.budget.waiting() > 2 * self.open + 64 {
            let places = &self.places;
            let exists = |key: ConnKey| {
                let place = places.get(key.index as usize);
                place.is_some_and(|place| place.generation == key.generation && place.conn.is_some())
            };
            self.env.budget.forget_ended(exists);
        }
        for _ in 0..self.env.budget.waiting() {
            let Some(key) = self.env.budget.next_to_proceed(&self.env.limits) else { break };
            if let Some((conn, env)) = self.served(key) {
                conn.proceed(env);
            }
        }
    }

    /// Stops, or goes on, to read all connections at the end of this turn.
    fn overfull_changed(&mut self) {
        let overfull = self.env.budget.is_overfull();
        self.env.stats.memory_stops.add(u64::from(overfull));
        for index in 0..self.places.len() as u32 {
            let key = ConnKey { index, generation: self.places[index as usize].generation };
            if let Some((conn, env)) = self.served(key)
                && !overfull
            {
                conn.read_again(env);
            }
        }
    }

    fn end_of_stream(&mut self, key: ConnKey) {
        let now = self.env.now;
        let Some(place) = self.places.get_mut(key.index as usize) else { return };
        if place.generation == key.generation
            && let Some(Conn { assist: Some(assist), socket, stream: Stream::Served(stream), .. }) = &mut place.conn
        {
            let received_bytes = stream.received_bytes();
            let since = assist.end_since(received_bytes, now);
            if !assist.conn.is_end(socket.as_fd(), received_bytes) {
                assist.early_end = true;
                if now > since.plus_ms(stream.limits(&self.env).send_timeout_ms) {
                    // An orderly end would hide that bytes are missing.
                    self.abort(key.index, CloseReason::KernelHalf);
                } else {
                    let _ = self.stream(key);
                }
                return;
            }
        }
        if let Some((stream, env)) = self.stream(key) {
            stream.peer_closed(env);
        }
    }

    /// The engine stopped to receive by itself.
    fn note_not_reading(&mut self, key: ConnKey) {
        let place = self.places.get_mut(key.index as usize).filter(|place| place.generation == key.generation);
        if let Some(conn) = place.and_then(|place| place.conn.as_mut()) {
            conn.reading = Reading::Off;
        }
    }

    fn take_wakes(&mut self, half: usize) {
        let Some(half) = self.halves.get(half) else { return };
        let mut tokens = mem::take(&mut self.woken);
        half.take_wakes(self.env.shard, &mut |token| tokens.push(token));
        for token in tokens.drain(..) {
            if let Some(key) = self.tokens.get(&token).copied() {
                self.unparked(key);
            }
        }
        self.woken = tokens;
    }

    /// Something for user space is on its way: bytes, or the end of the stream. Until it is here the connection must not
    /// be parked again, or it would never be received.
    fn unparked(&mut self, key: ConnKey) {
        if self.stream(key).is_some()
            && let Some(Conn { assist: Some(assist), stream: Stream::Served(stream), .. }) =
                &mut self.places[key.index as usize].conn
        {
            assist.expect(stream.received_bytes(), self.env.now);
        }
    }

    fn datagram(&mut self, socket: u32, peer: DatagramPeer, chunk: &Chunk, truncated: bool) {
        let stats = &self.env.stats;
        stats.datagrams_in.add(1);
        if is_own(peer.addr, &self.own_datagrams) {
            stats.datagrams_from_self.add(1);
            return;
        }
        if truncated || chunk.len() > self.env.limits.of(socket).message_bytes_max {
            stats.datagrams_oversized.add(1);
            return;
        }
        if self.env.deferred_datagrams >= self.env.limits.deferred_datagrams_max {
            stats.datagrams_refused_deferred_max.add(1);
            return;
        }
        let Some(Some(datagrams)) = self.datagrams.get_mut(socket as usize) else { return };
        datagrams.receive(peer, chunk, &mut self.env, self.engine.datagram_output(socket));
        self.engine.datagrams_added(socket, &mut self.env);
    }

    /// Hands over datagrams that were put aside, and reads sockets as long as what they bring is handed over.
    fn pace_datagrams(&mut self) {
        for at in 0..self.datagrams.len() {
            let Some(datagrams) = &mut self.datagrams[at] else { continue };
            let socket = at as u32;
            let stop = !datagrams.go_on(&mut self.env, self.engine.datagram_output(socket));
            self.engine.datagrams_added(socket, &mut self.env);
            if mem::replace(&mut self.datagrams_stopped[at], stop) != stop {
                self.env.stats.reads_paused.add(u64::from(stop));
                self.engine.set_datagrams_reading(socket, !stop);
            }
        }
    }
}
