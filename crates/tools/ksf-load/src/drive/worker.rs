//! One thread of a run: its connections, and what the loops do with them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt};

use crate::drive::clock::{monotonic_ns, thread_cpu_ns, thread_runqueue_wait_ns};
use crate::drive::connection::{ClientConnection, Context, Next, Phase, Terms};
use crate::drive::plan::{Destination, DrivePlan};
use crate::drive::protocol::{Client, CountersOf, Mix, Protocol};
use crate::drive::random::mix;
use crate::drive::schedule::{Lateness, Schedule};
use crate::drive::socket::{Socket, dropped_datagrams, is_apart};
use crate::drive::spin::Spinner;
use crate::drive::table::RequestTable;
use crate::error::LoadError;
use crate::options::target::Endpoint;
use crate::record::Record;
use crate::record::run::ThreadRun;

/// Room for what one receive brings. Messages up to this length arrive by one receive each.
const RECEIVE_BYTES: usize = 256 * 1024;

/// How many settled replies lie between two updates of the progress counter; a power of two.
const PROGRESS_STEP: u64 = 256;

/// How long a server may take to close after this side did, at the end of a run, while surplus bytes are looked for.
const FAREWELL: Duration = Duration::from_millis(100);

/// How long outstanding replies are awaited after the user asked to stop.
const STOPPED_TIMEOUT_NS: u64 = 1_000_000_000;

/// What a thread shares with the one that watches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunControl<'a> {
    /// Set when the user wants to stop.
    pub(crate) stop: &'a AtomicBool,
    /// Replies settled so far, roughly: for the progress line.
    pub(crate) settled: &'a AtomicU64,
}

/// A connection and its bytes, or the room for one.
pub(super) struct Slot<C> {
    pub(super) connection: ClientConnection<C>,
    pub(super) socket: Option<OwnedFd>,
    /// Only of connections that are to last.
    peer: Option<Endpoint>,
    /// Requests that are not sent, from `sent`.
    pub(super) out: Vec<u8>,
    sent: usize,
    /// Received bytes that were not used: the first `held`.
    inbox: Vec<u8>,
    held: usize,
    /// Open loop: whether it is in the list of those with room.
    pub(super) is_listed: bool,
}

impl<C> Slot<C> {
    /// Makes room for another connection.
    pub(super) fn close(&mut self, by_reset: bool) {
        self.out.clear();
        (self.sent, self.held, self.is_listed) = (0, 0, false);
        let socket = self.socket.take();
        if let (Some(socket), true) = (&socket, by_reset) {
            // Without it the close would be an orderly one, which the report then shows in TIME_WAIT.
            let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
        }
    }
}

/// Open loop only.
pub(super) struct Open {
    pub(super) schedule: Schedule,
    pub(super) lateness: Lateness,
    /// The connection of the next request, once it has been drawn.
    pub(super) drawn: Option<usize>,
    /// Until when the bound on what is in flight last kept a request that was due from being sent...
    pub(super) bound_until_ns: u64,
    /// ...and until when that bound or a full socket did.
    pub(super) held_until_ns: u64,
}

/// One thread of a run.
pub(crate) struct Worker<'a, P: Protocol> {
    pub(super) plan: &'a DrivePlan,
    pub(super) thread: usize,
    cpu: Option<usize>,
    shared: RunControl<'a>,
    pub(super) terms: Terms,
    pub(super) is_datagram: bool,
    pub(super) slots: Vec<Slot<P::Client>>,
    mix: P::Mix,
    pub(super) record: Record<CountersOf<P>>,
    pub(super) open: Option<Open>,
    pub(super) spinner: Spinner,
    /// Requests yet to be started.
    pub(super) quota: u64,
    /// When to stop starting requests, CLOCK_MONOTONIC.
    pub(super) until_ns: u64,
    buffer: Box<[u8]>,
    /// How often time limits are looked at.
    pub(super) tick: Duration,
    /// When something last arrived, or the clock was last read.
    pub(super) now_ns: u64,
    /// Whether nothing has been sent since `now_ns`, so that it can serve as a start time.
    now_is_fresh: bool,
    /// Nothing more is started.
    pub(super) ending: bool,
    pub(super) interrupted: bool,
    pub(super) hopeless: bool,
    /// An ICMP message said that no socket has the port.
    refused: bool,
    /// Settled replies that the watching thread was told of.
    told: u64,
}

impl<'a, P: Protocol> Worker<'a, P> {
    /// Prepares the thread's part of the plan; connections that are to last are made.
    pub(crate) fn new(
        plan: &'a DrivePlan,
        protocol: &P,
        run: u64,
        thread: usize,
        cpu: Option<usize>,
        shared: RunControl<'a>,
    ) -> Result<Self, LoadError> {
        let mut slots = Vec::new();
        let mut is_datagram = false;
        for number in plan.connections_of(thread) {
            let mut base = 0;
            let mut connected = None;
            let mut client = protocol.client(number as u32);
            if let Destination::Kept { target, endpoints, socket } = &plan.destination {
                let connection = Socket::connect(target, endpoints, socket)?;
                connection
                    .converse(socket, |stream| client.greet(stream))
                    .map_err(|error| LoadError::system(format!("cannot begin a session with {target}"), error))?;
                connected = Some(connection);
                is_datagram = socket.transport.is_datagram();
                if is_datagram {
                    base = id_base(run, thread);
                }
            }
            let table = RequestTable::new(plan.room(number), protocol.id_bits(), base);
            let (socket, peer) = connected.map(|socket| (socket.fd, socket.peer)).unzip();
            slots.push(Slot {
                connection: ClientConnection::new(client, table, number as u32),
                socket,
                peer,
                out: Vec::new(),
                sent: 0,
                inbox: Vec::new(),
                held: 0,
                is_listed: false,
            });
        }
        let terms = plan.terms;
        Ok(Worker {
            plan,
            thread,
            cpu,
            shared,
            terms,
            is_datagram,
            slots,
            mix: protocol.mix(thread),
            record: Record::new(protocol.operations(), !terms.is_kept()),
            open: plan.schedule(thread).map(|schedule| Open {
                schedule,
                lateness: Lateness::new(),
                drawn: None,
                bound_until_ns: 0,
                held_until_ns: 0,
            }),
            spinner: Spinner::new(plan.spin),
            quota: plan.requests.map_or(u64::MAX, |requests| plan.share(requests, thread)),
            until_ns: u64::MAX,
            buffer: vec![0; RECEIVE_BYTES].into(),
            tick: terms.tick(),
            now_ns: 0,
            now_is_fresh: false,
            ending: false,
            interrupted: false,
            hopeless: false,
            refused: false,
            told: 0,
        })
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Result<ThreadRun<CountersOf<P>>, LoadError> {
        let runqueue_before = thread_runqueue_wait_ns();
        let cpu_before = thread_cpu_ns();
        let start_ns = monotonic_ns();
        self.begin(start_ns);
        if self.plan.blocking {
            self.run_blocking()
        } else {
            self.run_events()?
        }
        let stopped_ns = monotonic_ns();
        let cpu_ns = thread_cpu_ns() - cpu_before;
        let runqueue_wait_ns = thread_runqueue_wait_ns().saturating_sub(runqueue_before);
        if self.refused {
            return Err(self.nobody_there());
        }
        let dropped = self.slots.iter().filter(|_| self.is_datagram).filter_map(|slot| slot.socket.as_ref());
        let dropped = dropped.filter_map(dropped_datagrams).sum();
        self.finish();
        // With all requests settled before the time was over, the last of them is the end.
        let settled_ns = if self.record.last_ns > 0 { self.record.last_ns } else { stopped_ns };
        let end_ns = match self.quota == 0 || self.hopeless || self.record.until_ns == u64::MAX {
            true => settled_ns.min(self.record.until_ns),
            false => self.record.until_ns,
        };
        Ok(ThreadRun {
            cpu: self.cpu,
            lateness: self.open.map(|open| open.lateness),
            start_ns,
            end_ns: end_ns.max(start_ns + 1),
            elapsed_ns: stopped_ns - start_ns,
            cpu_ns,
            runqueue_wait_ns,
            peers: self.slots.into_iter().filter_map(|slot| Some((slot.peer?, slot.connection.share()))).collect(),
            dropped,
            spin: self.spinner.record,
            interrupted: self.interrupted,
            hopeless: self.hopeless,
            record: self.record,
        })
    }

    /// Starts the clocks.
    fn begin(&mut self, start_ns: u64) {
        self.now_ns = start_ns;
        self.now_is_fresh = true;
        if let Some(duration) = self.plan.duration {
            self.until_ns = start_ns.saturating_add(ns(duration));
        }
        if let Some(open) = &mut self.open {
            open.schedule.start(start_ns);
        }
        if !self.terms.is_kept() {
            self.record.until_ns = self.until_ns;
            return;
        }
        for slot in &mut self.slots {
            let mut cx = Context { now_ns: start_ns, terms: &self.terms, record: &mut self.record };
            slot.connection.open(0, start_ns, &mut cx);
            slot.connection.established(&mut cx);
        }
    }

    /// Whether requests are still to be started.
    #[inline]
    pub(super) fn may_start(&self) -> bool {
        let in_time = match &self.open {
            // The schedule ends by its own time, not by when the last request could be sent.
            Some(open) => open.schedule.due_ns() < self.until_ns,
            None => self.now_ns < self.until_ns,
        };
        !self.ending && self.quota > 0 && in_time
    }

    /// Looks whether the user asked to stop.
    #[inline]
    pub(super) fn heed_stop(&mut self) {
        if self.shared.stop.load(Ordering::Relaxed) && !self.interrupted {
            (self.interrupted, self.ending) = (true, true);
            if !self.terms.is_kept() {
                self.record.until_ns = self.record.until_ns.min(self.now_ns);
                return;
            }
            // A user who asked to stop does not want to wait long for replies that may never come.
            self.terms.timeout_ns = self.terms.timeout_ns.min(STOPPED_TIMEOUT_NS);
            let cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
            self.slots.iter_mut().for_each(|slot| slot.connection.set_deadline(&cx));
        }
    }

    /// A start time for the next request: the last arrival if nothing happened since, so that a steady exchange
    /// reads the clock once per message. It can only make latencies longer, by the time of decoding.
    #[inline]
    pub(super) fn start_time(&mut self) -> u64 {
        if !self.now_is_fresh {
            self.now_ns = monotonic_ns();
        }
        self.now_is_fresh = false;
        self.now_ns
    }

    /// Reads the clock.
    #[inline]
    pub(super) fn read_clock(&mut self) -> u64 {
        self.now_ns = monotonic_ns();
        self.now_is_fresh = true;
        self.now_ns
    }

    /// Begins a request on a connection with room, and sends it, or puts it with those that are to be sent together.
    #[inline]
    pub(super) fn issue(&mut self, at: usize, start_ns: u64) -> Next {
        self.quota -= 1;
        let operation = self.mix.draw();
        let slot = &mut self.slots[at];
        let is_connecting = slot.connection.phase() == Phase::Connecting;
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        let bytes = slot.connection.issue(&operation, start_ns, &mut cx);
        let socket = match &slot.socket {
            Some(socket) if self.plan.batch == 1 && slot.out.is_empty() => socket,
            _ => {
                slot.out.extend_from_slice(bytes);
                return Next::Wait;
            }
        };
        if is_connecting {
            // Taken before the send, which on loopback does the server's part of the work, too.
            cx.now_ns = monotonic_ns();
        }
        cx.record.calls.sends += 1;
        let sent = match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {
                slot.out.extend_from_slice(bytes);
                return Next::Wait;
            }
            Err(errno) => return self.failed(at, errno),
        };
        let all = sent == bytes.len();
        if !all {
            slot.out.extend_from_slice(&bytes[sent..]);
        }
        if is_connecting {
            slot.connection.established(&mut cx);
        }
        slot.connection.sent(sent, all, &mut cx);
        if is_connecting { Next::Room } else { Next::Wait }
    }

    /// Sends what is not sent yet, as far as the socket takes it.
    pub(super) fn flush(&mut self, at: usize) -> Next {
        let slot = &mut self.slots[at];
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        let mut next = Next::Wait;
        while let (Some(socket), false) = (&slot.socket, slot.out.is_empty()) {
            let is_connecting = slot.connection.phase() == Phase::Connecting;
            if is_connecting {
                cx.now_ns = monotonic_ns();
            }
            cx.record.calls.sends += 1;
            let sent = match send(socket, &slot.out[slot.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN | Errno::NOBUFS) => break,
                Err(errno) => return self.failed(at, errno),
            };
            slot.sent += sent;
            let all = slot.sent == slot.out.len();
            if all {
                slot.out.clear();
                slot.sent = 0;
            }
            if is_connecting {
                slot.connection.established(&mut cx);
                next = Next::Room;
            }
            slot.connection.sent(sent, all, &mut cx);
        }
        next
    }

    /// Receives once: on a stream at most one reply, if requests are sent one by one. `None`: nothing came; with
    /// `flags` empty it waits up to one tick. `ending`: the stream ends behind what can be received now. Returns whether
    /// nothing is left, too.
    #[inline]
    pub(super) fn receive(&mut self, at: usize, flags: RecvFlags, ending: bool) -> Option<(bool, Next)> {
        let slot = &mut self.slots[at];
        let socket = slot.socket.as_ref()?;
        let held = slot.held;
        if held > 0 && slot.inbox.len() < 2 * held {
            slot.inbox.resize(4 * held, 0);
        }
        let window = match self.plan.batch {
            1 => slot.connection.window(&slot.inbox[..held]),
            _ => usize::MAX,
        };
        let room = match held {
            0 => &mut self.buffer[..],
            held => &mut slot.inbox[held..],
        };
        let window = if self.is_datagram { room.len() } else { window.min(room.len()) };
        self.record.calls.receives += 1;
        let got = match recv(socket, &mut room[..window], flags) {
            Ok((got, _)) => got,
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Err(errno) => return Some((true, self.failed(at, errno))),
        };
        self.now_ns = monotonic_ns();
        self.now_is_fresh = true;
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        // A datagram may be empty, a stream that returns nothing has ended.
        if got == 0 && !self.is_datagram {
            return Some((true, slot.connection.ended(&mut cx)));
        }
        let drained = got < window && !self.is_datagram;
        let bytes = match held {
            0 => &self.buffer[..got],
            held => &slot.inbox[..held + got],
        };
        let (used, next) = slot.connection.received(bytes, held, ending && drained, &mut cx);
        slot.held = if self.is_datagram { 0 } else { held + got - used };
        match (held, slot.held) {
            (_, 0) => {}
            (0, rest) => {
                if slot.inbox.is_empty() {
                    slot.inbox = vec![0; RECEIVE_BYTES];
                }
                slot.inbox[..rest].copy_from_slice(&self.buffer[used..got]);
            }
            _ => slot.inbox.copy_within(used..held + got, 0),
        }
        let settled = self.record.settled();
        if settled >= self.told + PROGRESS_STEP {
            self.told = settled;
            self.shared.settled.store(settled, Ordering::Relaxed);
        }
        Some((drained, next))
    }

    /// Now and then: whether replies on this connection are handled on another CPU than this thread's.
    pub(super) fn look_where_replies_are_handled(&mut self, at: usize) {
        if let (Some(socket), true) = (&self.slots[at].socket, self.spinner.is_look_due()) {
            self.spinner.heed(is_apart(socket));
        }
    }

    /// Looks at the time limits of a connection.
    pub(super) fn expire(&mut self, at: usize) -> Next {
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        self.slots[at].connection.expire(&mut cx)
    }

    /// Gives up a connection at the end.
    pub(super) fn give_up(&mut self, at: usize) -> Next {
        let mut cx = Context { now_ns: self.now_ns, terms: &self.terms, record: &mut self.record };
        self.slots[at].connection.give_up(&mut cx)
    }

    /// A call on a connection has failed.
    #[cold]
    pub(super) fn failed(&mut self, at: usize, errno: Errno) -> Next {
        self.refused |= self.is_datagram && errno == Errno::CONNREFUSED && self.record.settled() == 0;
        let now_ns = self.read_clock();
        let mut cx = Context { now_ns, terms: &self.terms, record: &mut self.record };
        self.slots[at].connection.error(errno, &mut cx)
    }

    /// Waits until a connection can be read, or written if something is not sent yet, or until `timeout` is over.
    pub(super) fn wait_for(&self, at: usize, timeout: Duration) {
        let slot = &self.slots[at];
        let Some(socket) = &slot.socket else { return };
        let mut events = PollFlags::IN;
        if !slot.out.is_empty() {
            events |= PollFlags::OUT;
        }
        // An interrupted or failed poll only means that the next receive looks for itself.
        let _ = poll(&mut [PollFd::new(socket, events)], Some(&timespec(timeout)));
    }

    /// At the end: says goodbye on the connections that were to last, and looks for bytes that no request asked for.
    fn finish(&mut self) {
        self.shared.settled.store(self.record.settled(), Ordering::Relaxed);
        let patience = match self.is_datagram {
            // There is no end of stream to wait for: one look after a moment must do.
            true => FAREWELL / 10,
            false => FAREWELL,
        };
        let deadline_ns = monotonic_ns() + ns(patience);
        if self.terms.is_kept() {
            for slot in &mut self.slots {
                if let Some(socket) = slot.socket.as_ref().filter(|_| slot.connection.begin_end()) {
                    // One that cannot be shut down has ended.
                    let _ = shutdown(socket, Shutdown::Write);
                }
            }
            for at in 0..self.slots.len() {
                while self.slots[at].connection.phase() == Phase::Ending {
                    if self.receive(at, RecvFlags::DONTWAIT, false).is_some() {
                        continue;
                    }
                    let now_ns = monotonic_ns();
                    if now_ns >= deadline_ns {
                        break;
                    }
                    self.wait_for(at, Duration::from_nanos(deadline_ns - now_ns));
                }
            }
        }
        for at in 0..self.slots.len() {
            self.give_up(at);
        }
    }

    fn nobody_there(&self) -> LoadError {
        let target = match &self.plan.destination {
            Destination::Kept { target, .. } => target.to_string(),
            Destination::Renewed(_) => String::new(),
        };
        let peers = self.slots.iter().filter_map(|slot| slot.peer.as_ref()).map(ToString::to_string);
        let reasons = format!("{}: no UDP socket on this port", peers.collect::<Vec<_>>().join(", "));
        LoadError::Unreachable { target, reasons }
    }
}

/// Identifiers of a TCP connection start at 0 as in the original. UDP sockets may get the port of an earlier one,
/// with its late replies, so each has its own numbers.
fn id_base(run: u64, thread: usize) -> u32 {
    mix(monotonic_ns() ^ run << 32 ^ thread as u64) as u32
}

/// In nanoseconds, as far as 64 bits go.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// As system calls take it.
pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
