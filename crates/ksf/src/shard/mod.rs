//! One core's share of a server: a thread with its engine, sockets, slots and connections.
//!
//! A turn: wait for events; hand bytes to connections, which call their service; deliver deferred replies; then send
//! what every touched connection has queued, one batch each. Nothing is shared with other shards but the count of
//! connections.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{io, mem};

use crate::assist::{Assist, AssistConn};
use crate::deferred::{Mail, Target};
use crate::engine::epoll::{accept_now, set_nonblocking};
use crate::engine::{Engine, Event, Reading, Wait};
use crate::env::Env;
use crate::error::CloseReason;
use crate::limits::Time;
use crate::listener::{DatagramPeer, ListenAddr};
use crate::output::SendBatch;
use crate::pace::Pace;
use crate::pool::Chunk;
use crate::service::{ConnKey, Peer, Refused};

mod erased;

pub(crate) use erased::AnyService;
use erased::{Datagrams, Stream};

/// What a shard needs to serve one listener.
pub(crate) struct ShardListener {
    pub(crate) addr: ListenAddr,
    pub(crate) socket: OwnedFd,
    pub(crate) kind: ListenerKind,
    pub(crate) service: Arc<dyn AnyService>,
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
    stream: Box<dyn Stream>,
    /// Taken out of the kernel half before the socket is closed: fields drop in this order.
    /// Boxed, because the table of connections has room for more than there are.
    assist: Option<Box<AssistState>>,
    socket: OwnedFd,
    reading: Reading,
    /// In the list of connections to look after at the end of the turn.
    touched: bool,
    phase: Phase,
}

struct AssistState {
    conn: Box<dyn AssistConn>,
    /// Messages in a row that were answered before the next one came: low load, which the kernel half serves best.
    lone_messages: u32,
    /// How many it takes: more when the peer was seen to pipeline.
    lone_wanted: u32,
    messages_seen: u64,
    received_seen: u64,
    waiting_since: Option<Time>,
    /// Reply bytes of the kernel half at the last tick.
    replied_seen: u64,
    /// Bytes received when something was announced that is not here yet, and ticks to wait for it.
    expects: Option<(u64, u8)>,
    /// Since when receives said "end" too early, and the bytes received by then: a peer that reads slowly keeps the
    /// bytes in front of the end back for as long as it likes.
    end_since: Option<(Time, u64)>,
    /// A receive said "end" while bytes still wait in the kernel: receive again a little later.
    early_end: bool,
    /// Since when TCP has not taken what the kernel half queued, as ticks saw it.
    undrained_since: Option<Time>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Everything is sent and our direction is shut; what still arrives is thrown away until the peer closes, because
    /// closing with unread bytes would reset the connection and destroy replies on their way.
    Lingering(CloseReason, Time),
    /// The engine is asked to end its operations.
    Releasing(CloseReason),
}

/// Lone messages after which a connection is given to the kernel half. Enough that a pipelining client, which has a
/// single message outstanding now and then, stays with the batching of user space.
const LONE_MESSAGES: u32 = 4;

/// The same for a peer that has had several messages outstanding: it will again, and on a CPU that it shares with the
/// server each change of sides costs more than it wins.
const LONE_MESSAGES_PIPELINING: u32 = 64;

/// Ticks in which something announced by the kernel half must arrive before the connection may be parked again.
const EXPECT_TICKS: u8 = 2;

/// Batches sent for one connection before others get their turn.
const SEND_ROUNDS_MAX: u32 = 8;

/// Pause between looks whether TCP has taken what the kernel half queued; its work queue needs a few microseconds.
const ASSIST_WAIT: Duration = Duration::from_micros(20);

/// Time after which accepting is tried again when it failed.
const ACCEPT_RETRY_MS: u64 = 50;

/// Numbers of the watched descriptors.
const MAIL: u32 = 0;
const TIMER: u32 = 1;
const HALVES: u32 = 2;

pub(crate) struct Shard<E: Engine> {
    engine: E,
    env: Env,
    listeners: Vec<Option<ShardListener>>,
    datagrams: Vec<Option<Box<dyn Datagrams>>>,
    halves: Vec<Arc<dyn Assist>>,
    /// Connections under a kernel half, by the name it has for them.
    tokens: HashMap<u64, ConnKey>,
    /// Tokens of a wake-up, kept for its memory.
    woken: Vec<u64>,
    places: Vec<Place>,
    free: Vec<u32>,
    open: usize,
    /// Connections of the whole server.
    connections: Arc<AtomicUsize>,
    touched: Vec<u32>,
    /// The list of the last turn, kept for its memory.
    looked_after: Vec<u32>,
    accept_again: Vec<(u32, Time)>,
    /// Kept so that a connection can be accepted, and closed, when the process has no descriptor left.
    spare_fd: Option<OwnedFd>,
    events: Vec<Event>,
    mail: Vec<Mail>,
    replies: Vec<SendBatch>,
    pace: Pace,
    /// Ticks come from a timer that is set once per tick. A time limit on every wait would set and cancel one at every
    /// turn, which in a virtual machine leaves it twice.
    timer: OwnedFd,
    timer_set: Option<Time>,
    next_tick: Time,
    draining: Option<Time>,
    stop: bool,
}

impl<E: Engine> Shard<E> {
    pub(crate) fn new(
        mut env: Env,
        listeners: Vec<ShardListener>,
        connections: Arc<AtomicUsize>,
    ) -> Result<Self, crate::Error> {
        env.now = now();
        let engine = E::new(&mut env)?;
        let mut shard = Self {
            engine,
            env,
            listeners: Vec::new(),
            datagrams: Vec::new(),
            halves: Vec::new(),
            tokens: HashMap::new(),
            woken: Vec::new(),
            places: Vec::new(),
            free: Vec::new(),
            open: 0,
            connections,
            touched: Vec::new(),
            looked_after: Vec::new(),
            accept_again: Vec::new(),
            spare_fd: spare_fd(),
            events: Vec::with_capacity(256),
            mail: Vec::new(),
            replies: Vec::new(),
            pace: Pace::default(),
            timer: timer().map_err(crate::Error::Thread)?,
            timer_set: None,
            next_tick: Time::default(),
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
        // Before any socket is closed: what the engine has not submitted yet must not meet a descriptor used again.
        self.engine.shutdown();
        let reason = CloseReason::Stopped;
        for index in 0..self.places.len() {
            self.forget(index as u32, reason);
        }
        self.close_datagrams();
        Ok(())
    }

    fn close_datagrams(&mut self) {
        // Before any state is given back: what the engine has under way must not come for it any more.
        self.engine.shutdown();
        for datagrams in self.datagrams.drain(..).flatten() {
            datagrams.end();
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        self.set_timer();
        // Touched already: somebody waits for the kernel half.
        let timeout = (!self.touched.is_empty()).then_some(ASSIST_WAIT);
        let wait = Wait { timeout, gather: self.pace.gather() };
        let mut events = mem::take(&mut self.events);
        let before = self.env.stats.messages.value();
        self.engine.wait(&mut self.env, wait, &mut events)?;
        self.env.now = now();
        self.env.stats.turns.add(1);
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        self.read_mail();
        self.look_after_touched();
        self.pace.turn_over(self.env.stats.messages.value() - before, self.env.now);
        if self.env.now >= self.next_tick {
            self.tick();
        }
        Ok(())
    }

    /// Sets the timer for the next tick, if there is anything to look after then and it is not set already.
    fn set_timer(&mut self) {
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

    fn add_listener(&mut self, listener: ShardListener) -> Result<(), crate::Error> {
        let index = self.listeners.len() as u32;
        let fd = listener.socket.as_raw_fd();
        if let ListenAddr::Udp(local) = listener.addr {
            let (addr, service) = (listener.addr.clone(), listener.service.name());
            let datagrams = listener.service.open_datagrams(Peer::Udp(local), index);
            let datagrams = datagrams.map_err(|Refused| crate::Error::RefusedByService {
                service: service.to_owned(),
                addr: addr.clone(),
            })?;
            // In the list first: whatever fails from here on, the service gets its state back.
            self.datagrams.push(Some(datagrams));
            let fail = |source| crate::Error::Listen { addr, step: "receiving datagrams", source };
            self.engine.listen_datagrams(index, fd).map_err(fail)?;
        } else {
            self.datagrams.push(None);
            self.engine.listen(index, fd);
        }
        if let Some(half) = &listener.assist
            && !self.halves.iter().any(|known| Arc::ptr_eq(known, half))
        {
            if let Some(fd) = half.wake_fd(self.env.shard) {
                self.engine.watch(HALVES + self.halves.len() as u32, fd.as_raw_fd())?;
            }
            self.halves.push(Arc::clone(half));
        }
        self.listeners.push(Some(listener));
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Accepted { listener, socket } => self.accepted(listener, socket),
            Event::AcceptFailed { listener, error } => self.accept_failed(listener, &error),
            Event::Received { conn, chunk } => {
                if let Some((conn, env)) = self.stream(conn) {
                    conn.receive(chunk, env);
                    if env.is_over_budget() {
                        self.relieve_memory();
                    }
                }
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
            Event::Watched { watch: MAIL } => {}
            Event::Watched { watch: TIMER } => {
                let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                self.timer_set = None;
            }
            Event::Watched { watch } => self.take_wakes((watch - HALVES) as usize),
            Event::Datagram { socket, peer, chunk, truncated } => self.datagram(socket, peer, &chunk, truncated),
        }
    }

    /// The connection's stream, which will be looked after at the end of the turn.
    fn stream(&mut self, key: ConnKey) -> Option<(&mut dyn Stream, &mut Env)> {
        let place = self.places.get_mut(key.index as usize).filter(|place| place.generation == key.generation)?;
        let conn = place.conn.as_mut().filter(|conn| !matches!(conn.phase, Phase::Releasing(_)))?;
        if !mem::replace(&mut conn.touched, true) {
            self.touched.push(key.index);
        }
        Some((&mut *conn.stream, &mut self.env))
    }

    /// Closes those who keep most of the memory for unfinished input, until the rest is within the budget. Each round
    /// looks at every connection, and frees at least the average share of one: who wants to cause many of them must
    /// make a connection for each.
    fn relieve_memory(&mut self) {
        while self.env.is_over_budget() {
            let keepers = self.places.iter().enumerate().filter_map(|(index, place)| {
                let conn = place.conn.as_ref().filter(|conn| conn.phase == Phase::Open)?;
                let key = ConnKey { index: index as u32, generation: place.generation };
                Some((key, conn.stream.unfinished_bytes()))
            });
            // Nobody keeps any: what is counted belongs to connections whose end is under way.
            let Some((hog, 1..)) = keepers.max_by_key(|(_, bytes)| *bytes) else { return };
            if let Some((stream, env)) = self.stream(hog) {
                stream.close_for_memory(env);
            }
        }
    }

    fn end_of_stream(&mut self, key: ConnKey) {
        let now = self.env.now;
        let Some(place) = self.places.get_mut(key.index as usize) else { return };
        if place.generation == key.generation
            && let Some(Conn { assist: Some(assist), socket, stream, .. }) = &mut place.conn
        {
            let received_bytes = stream.received_bytes();
            let since = match assist.end_since {
                Some((since, received)) if received == received_bytes => since,
                _ => now,
            };
            assist.end_since = Some((since, received_bytes));
            if !assist.conn.is_end(socket.as_fd(), received_bytes) {
                assist.early_end = true;
                if now > since.plus_ms(self.env.limits.send_timeout_ms) {
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

    fn accepted(&mut self, listener: u32, socket: OwnedFd) {
        let stats = &self.env.stats;
        stats.accepted.add(1);
        let Some(Some(from)) = self.listeners.get(listener as usize) else { return };
        if self.connections.load(Ordering::Relaxed) >= self.env.limits.connections_max {
            stats.refused_connections_max.add(1);
            return;
        }
        let Some(peer) = peer_of(&socket, from.kind) else {
            // Reset before it was accepted.
            stats.count_close(CloseReason::Io);
            return;
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, conn: None });
            self.places.len() as u32 - 1
        });
        let key = ConnKey { index, generation: self.places[index as usize].generation };
        let Ok(stream) = from.service.open(peer, key, &self.env) else {
            stats.refused_by_service.add(1);
            self.free.push(index);
            return;
        };
        let assist = from.assist.as_ref().filter(|_| from.kind == ListenerKind::Tcp).and_then(|half| {
            let conn = half.attach(socket.as_fd())?;
            let lone_messages = LONE_MESSAGES;
            Some(Box::new(AssistState {
                conn,
                lone_messages,
                lone_wanted: LONE_MESSAGES,
                messages_seen: 0,
                received_seen: 0,
                waiting_since: None,
                replied_seen: 0,
                expects: None,
                end_since: None,
                early_end: false,
                undrained_since: None,
            }))
        });
        if let Some(assist) = &assist {
            self.tokens.insert(assist.conn.token(), key);
        }
        // After attaching: the engine's first receive finds what arrived before.
        self.engine.open(key, socket.as_raw_fd());
        let (reading, phase) = (Reading::On, Phase::Open);
        self.places[index as usize].conn = Some(Conn { stream, assist, socket, reading, touched: false, phase });
        self.open += 1;
        self.connections.fetch_add(1, Ordering::Relaxed);
        if self.open == 1 {
            self.next_tick = self.env.now.plus_ms(self.tick_ms());
        }
        let draining = self.draining.is_some();
        // Looked after at the end of the turn: a kernel half takes over at once.
        if let Some((stream, env)) = self.stream(key)
            && draining
        {
            stream.drain(env);
        }
    }

    fn accept_failed(&mut self, listener: u32, error: &io::Error) {
        let no_fd = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
        if no_fd {
            self.refuse_waiting(listener);
        } else if error.kind() != io::ErrorKind::WouldBlock {
            self.env.stats.accept_errors.add(1);
        }
        self.accept_again.push((listener, self.env.now.plus_ms(ACCEPT_RETRY_MS)));
        self.next_tick = self.next_tick.min(self.env.now.plus_ms(ACCEPT_RETRY_MS));
    }

    /// Out of descriptors: accepts what waits on the spare one, and closes it. A refusal tells the peer at once, where
    /// a connection left in the queue would hang.
    fn refuse_waiting(&mut self, listener: u32) {
        let Some(Some(from)) = self.listeners.get(listener as usize) else { return };
        let socket = from.socket.as_raw_fd();
        drop(self.spare_fd.take());
        if set_nonblocking(socket, true).is_ok() {
            for _ in 0..REFUSE_BURST {
                match accept_now(socket) {
                    Ok(Some(_closed_here)) => self.env.stats.refused_no_fd.add(1),
                    Ok(None) | Err(_) => break,
                }
            }
            // It stays like that until the engine listens again and chooses its mode: another shard may share the
            // socket, and would hang in an accept that finds nothing.
        }
        self.spare_fd = spare_fd();
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
            && let Some(Conn { assist: Some(assist), stream, .. }) = &mut self.places[key.index as usize].conn
        {
            assist.expects = Some((stream.received_bytes(), EXPECT_TICKS));
        }
    }

    fn datagram(&mut self, socket: u32, peer: DatagramPeer, chunk: &Chunk, truncated: bool) {
        let stats = &self.env.stats;
        stats.datagrams_in.add(1);
        if truncated || chunk.len() > self.env.limits.message_bytes_max {
            stats.datagrams_oversized.add(1);
            return;
        }
        if self.env.deferred_datagrams >= self.env.limits.deferred_datagrams_max {
            stats.datagrams_refused_deferred_max.add(1);
            return;
        }
        let Some(Some(datagrams)) = self.datagrams.get_mut(socket as usize) else { return };
        datagrams.receive(peer, chunk, &mut self.env, &mut self.replies);
        self.send_datagrams(socket, peer);
    }

    fn send_datagrams(&mut self, socket: u32, peer: DatagramPeer) {
        for batch in self.replies.drain(..) {
            self.engine.send_datagram(socket, peer, batch, &mut self.env);
        }
    }

    fn read_mail(&mut self) {
        let mailbox = Arc::clone(&self.env.mailbox);
        let mut mail = mem::take(&mut self.mail);
        mailbox.take(&mut mail);
        for letter in mail.drain(..) {
            match letter {
                Mail::Answer { target: Target::Stream { key, ticket }, answer } => {
                    let delivered = self.stream(key).is_some_and(|(stream, env)| stream.answer(ticket, answer, env));
                    if !delivered {
                        self.env.stats.replies_too_late.add(1);
                    }
                }
                Mail::Answer { target: Target::Datagram { socket, peer }, answer } => {
                    if let Some(Some(datagrams)) = self.datagrams.get_mut(socket as usize) {
                        datagrams.answer(peer, answer, &mut self.env, &mut self.replies);
                        self.send_datagrams(socket, peer);
                    }
                }
                Mail::Limits(limits) => {
                    self.env.limits = *limits;
                    self.relieve_memory();
                }
                Mail::Drain => self.start_draining(),
                Mail::Stop => self.stop = true,
            }
        }
        self.mail = mail;
    }

    fn look_after_touched(&mut self) {
        // Who has to be looked after again is put on the other list.
        let mut touched = mem::replace(&mut self.touched, mem::take(&mut self.looked_after));
        for index in touched.drain(..) {
            if let Some(conn) = self.places[index as usize].conn.as_mut() {
                conn.touched = false;
                self.look_after(index);
            }
        }
        self.looked_after = touched;
    }

    /// Sends what is due, reads or stops reading, hands over to the kernel half, closes.
    fn look_after(&mut self, index: u32) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        let Conn { stream, assist, socket, phase, .. } = conn;
        if let Some(assist) = assist
            && mem::take(&mut assist.early_end)
        {
            // The next turn, which comes soon, receives again.
            conn.touched = true;
            self.touched.push(index);
            return;
        }
        if *phase != Phase::Open {
            match *phase {
                Phase::Lingering(reason, _) if stream.saw_eof() => self.release(index, reason),
                Phase::Lingering(..) if conn.reading != Reading::On => {
                    conn.reading = Reading::On;
                    self.engine.set_reading(key, Reading::On);
                }
                _ => {}
            }
            return;
        }
        if assist.as_ref().is_some_and(|assist| assist.conn.is_broken()) {
            self.abort(index, CloseReason::KernelHalf);
            return;
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
        while stream.has_output() || stream.finished().is_some() {
            // Both would overtake what the kernel half has queued.
            let turn = assist
                .as_mut()
                .map_or(Turn::Ours, |assist| assist.whose_turn(socket.as_fd(), stream.sent_bytes(), &self.env));
            if turn == Turn::Stuck {
                self.abort(index, CloseReason::KernelHalf);
                return;
            }
            rounds += 1;
            again = turn == Turn::KernelHalfs || rounds > SEND_ROUNDS_MAX;
            if again {
                conn.touched = true;
                self.touched.push(index);
                break;
            }
            let Some(batch) = stream.take_batch(self.env.now) else { break };
            if let Some(assist) = assist
                && stream.owes_only_the_batch()
            {
                assist.settle_ahead(socket.as_fd(), &**stream, batch.len());
            }
            let (bytes, done) = self.engine.send(key, batch, &mut self.env);
            stream.sent(bytes, done, &mut self.env);
        }
        if !again && let Some(reason) = stream.finished() {
            self.finish(index, reason);
            return;
        }
        // Also when it is looked after again: meanwhile more could arrive than is answered in a turn.
        let mut reading = if stream.wants_bytes(&self.env) { Reading::On } else { Reading::Off };
        if let Some(assist) = assist {
            let settled = stream.is_settled();
            if assist.hand_over(settled, socket.as_fd(), &**stream, &self.env) && reading == Reading::On {
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
        }
    }

    /// All replies are sent: ends our direction, and waits for the peer to end its own.
    fn finish(&mut self, index: u32, reason: CloseReason) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        let Some(conn) = place.conn.as_mut() else { return };
        let lingers = !conn.stream.saw_eof() && self.env.limits.linger_timeout_ms > 0;
        if !lingers || rustix::net::shutdown(&conn.socket, rustix::net::Shutdown::Write).is_err() {
            self.release(index, reason);
            return;
        }
        conn.phase = Phase::Lingering(reason, self.env.now.plus_ms(self.env.limits.linger_timeout_ms));
        if conn.reading != Reading::On {
            conn.reading = Reading::On;
            self.engine.set_reading(key, Reading::On);
        }
    }

    /// Ends a connection without waiting for anything.
    fn abort(&mut self, index: u32, reason: CloseReason) {
        let Some(conn) = self.places[index as usize].conn.as_ref() else { return };
        let reason = match conn.phase {
            Phase::Releasing(_) => return,
            Phase::Lingering(reason, _) => reason,
            // Bytes are lost: whatever else is known of the connection, its end is not orderly.
            Phase::Open if reason == CloseReason::KernelHalf => {
                let _ = rustix::net::sockopt::set_socket_linger(&conn.socket, Some(Duration::ZERO));
                reason
            }
            // The peer is gone after an orderly end: that end is the reason.
            Phase::Open => conn.stream.finished().unwrap_or(reason),
        };
        self.release(index, reason);
    }

    fn release(&mut self, index: u32, reason: CloseReason) {
        let place = &mut self.places[index as usize];
        let key = ConnKey { index, generation: place.generation };
        if let Some(conn) = place.conn.as_mut() {
            conn.phase = Phase::Releasing(reason);
            self.engine.release(key);
        }
    }

    fn released(&mut self, key: ConnKey) {
        let place = &self.places[key.index as usize];
        if place.generation == key.generation
            && let Some(Conn { phase: Phase::Releasing(reason), .. }) = place.conn
        {
            self.forget(key.index, reason);
        }
    }

    /// Closes the socket and frees the place.
    fn forget(&mut self, index: u32, reason: CloseReason) {
        let place = &mut self.places[index as usize];
        let Some(conn) = place.conn.take() else { return };
        place.generation = place.generation.wrapping_add(1);
        if let Some(assist) = conn.assist {
            self.tokens.remove(&assist.conn.token());
        }
        drop(conn.socket);
        conn.stream.end(&mut self.env);
        self.env.stats.count_close(reason);
        self.free.push(index);
        self.open -= 1;
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn start_draining(&mut self) {
        if self.draining.is_some() {
            return;
        }
        self.draining = Some(self.env.now.plus_ms(self.env.limits.drain_timeout_ms));
        self.next_tick = self.env.now;
        for index in 0..self.listeners.len() {
            self.stop_listening(index as u32);
        }
        for index in 0..self.places.len() as u32 {
            let key = ConnKey { index, generation: self.places[index as usize].generation };
            if let Some((stream, env)) = self.stream(key) {
                stream.drain(env);
            }
        }
        self.look_after_touched();
    }

    /// Takes the connections that wait to be accepted, so that closing the socket does not reset them, and stops.
    fn stop_listening(&mut self, index: u32) {
        let Some(listener) = &self.listeners[index as usize] else { return };
        if listener.kind == ListenerKind::Udp {
            return;
        }
        self.engine.unlisten(index);
        let socket = listener.socket.as_raw_fd();
        if set_nonblocking(socket, true).is_ok() {
            while let Ok(Some(connection)) = accept_now(socket) {
                self.accepted(index, connection);
            }
        }
    }

    fn tick_ms(&self) -> u64 {
        let limits = &self.env.limits;
        let timeouts =
            [limits.assembly_timeout_ms, limits.idle_timeout_ms, limits.send_timeout_ms, limits.linger_timeout_ms];
        let shortest = timeouts.into_iter().filter(|ms| *ms > 0).min().unwrap_or(u64::MAX);
        (shortest / 4).clamp(5, 250)
    }

    fn tick(&mut self) {
        let now = self.env.now;
        self.next_tick = now.plus_ms(if self.draining.is_some() { 5 } else { self.tick_ms() });
        for (listener, _) in self.accept_again.extract_if(.., |(_, when)| *when <= now) {
            if let Some(Some(from)) = self.listeners.get(listener as usize)
                && self.draining.is_none()
            {
                self.engine.listen(listener, from.socket.as_raw_fd());
            }
        }
        for index in 0..self.places.len() as u32 {
            self.tick_conn(index, now);
        }
        self.look_after_touched();
        if let Some(deadline) = self.draining {
            if now >= deadline {
                for index in 0..self.places.len() as u32 {
                    self.abort(index, CloseReason::DrainTimeout);
                }
            }
            if self.open == 0 {
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
            Phase::Lingering(reason, deadline) if now >= deadline => self.release(index, reason),
            Phase::Lingering(..) => {}
            Phase::Open => {
                let was_closing = conn.stream.is_closing();
                let mut touch = false;
                let mut lost = false;
                if let Some(assist) = &mut conn.assist {
                    // What the kernel half answers is activity, too.
                    let replied = assist.conn.replied_bytes();
                    if mem::replace(&mut assist.replied_seen, replied) != replied {
                        conn.stream.note_activity(now);
                        assist.undrained_since = None;
                    }
                    if let Some((_, ticks)) = &mut assist.expects {
                        *ticks -= 1;
                        if *ticks == 0 {
                            assist.expects = None;
                            touch = true;
                        }
                    }
                    touch |= assist.conn.is_broken();
                    if assist.conn.drained(conn.socket.as_fd(), conn.stream.sent_bytes()) {
                        assist.undrained_since = None;
                    } else {
                        // TCP had room for it, so this takes microseconds, and more on a machine that is overloaded.
                        let since = *assist.undrained_since.get_or_insert(now);
                        lost = now > since.plus_ms(self.env.limits.send_timeout_ms);
                    }
                }
                if lost {
                    self.abort(index, CloseReason::KernelHalf);
                    return;
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

/// Who may send on a connection with a kernel half.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Ours,
    KernelHalfs,
    /// It was the kernel half's for too long.
    Stuck,
}

impl AssistState {
    /// Whether user space may send or close: only when TCP has taken what the kernel half queued.
    fn whose_turn(&mut self, socket: BorrowedFd<'_>, sent_bytes: u64, env: &Env) -> Turn {
        // The kernel half's worker may wait for this very CPU: let it run before sleeping, which takes longer.
        for look in 0..2 {
            if self.conn.drained(socket, sent_bytes) {
                self.waiting_since = None;
                return Turn::Ours;
            }
            if look == 0 {
                rustix::thread::sched_yield();
            }
        }
        env.stats.assist_waits.add(1);
        let since = *self.waiting_since.get_or_insert(env.now);
        // A peer that does not read fills TCP, and then the queue does not drain.
        if env.now > since.plus_ms(env.limits.send_timeout_ms) { Turn::Stuck } else { Turn::KernelHalfs }
    }

    /// True while messages come one at a time.
    fn is_lone(&mut self, stream: &dyn Stream) -> bool {
        let fresh = stream.messages() - self.messages_seen;
        self.messages_seen += fresh;
        let fresh_bytes = stream.received_bytes() - self.received_seen;
        self.received_seen += fresh_bytes;
        // Without framing all that came together is one message. What came to the kernel half, one by one, tells.
        let joined = fresh == 1 && self.conn.typical_bytes().is_some_and(|typical| fresh_bytes >= 2 * typical);
        let fresh = fresh + u64::from(joined);
        match fresh {
            0 => {}
            1 => self.lone_messages = self.lone_messages.saturating_add(1),
            _ => {
                self.lone_messages = 0;
                self.lone_wanted = LONE_MESSAGES_PIPELINING;
            }
        }
        if self.lone_messages < self.lone_wanted {
            return false;
        }
        self.lone_wanted = LONE_MESSAGES;
        true
    }

    /// Told before a batch that answers everything: its receiver may send the next message before this thread goes on.
    fn settle_ahead(&mut self, socket: BorrowedFd<'_>, stream: &dyn Stream, batch_bytes: usize) {
        if self.is_lone(stream) {
            let sent_after = stream.sent_bytes() + batch_bytes as u64;
            self.conn.settle_ahead(socket, stream.received_bytes(), sent_after);
        }
    }

    /// Gives a quiet, settled connection to the kernel half. True if the engine need not look for bytes.
    fn hand_over(&mut self, settled: bool, socket: BorrowedFd<'_>, stream: &dyn Stream, env: &Env) -> bool {
        if !settled || !self.is_lone(stream) {
            return false;
        }
        self.conn.settle(socket, stream.received_bytes(), stream.sent_bytes());
        if self.expects.is_some_and(|(received, _)| received == stream.received_bytes()) {
            return false;
        }
        self.expects = None;
        let parked = self.conn.park(socket, env.shard);
        env.stats.assist_settled.add(u64::from(parked));
        parked
    }
}

/// Connections refused per failed accept when descriptors are exhausted.
const REFUSE_BURST: usize = 1024;

fn spare_fd() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}

fn timer() -> io::Result<OwnedFd> {
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    Ok(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?)
}

fn peer_of(socket: &OwnedFd, kind: ListenerKind) -> Option<Peer> {
    match kind {
        ListenerKind::Unix => Some(Peer::Unix),
        ListenerKind::Tcp | ListenerKind::Udp => {
            socket2::SockRef::from(socket).peer_addr().ok()?.as_socket().map(Peer::Tcp)
        }
    }
}

/// The monotonic clock.
pub(crate) fn now() -> Time {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
