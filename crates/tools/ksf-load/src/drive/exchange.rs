//! One connection at work: the sends and receives of the loops, and how an exchange ends.
//!
//! The method is the original's: one send per message and at most one message per receive, so that the figures
//! count system calls per message as a plain client has them. `--batch` is the only way around it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use rustix::time::Timespec;

use crate::drive::clock::monotonic_ns;
use crate::drive::protocol::{Factory, Protocol};
use crate::drive::table::Table;
use crate::drive::transport::Socket;
use crate::record::fault::Fault;
use crate::record::{Record, Sink};

/// Bytes that count as progress even though no reply is complete yet: a large echo may take longer than the
/// time limit, a peer that trickles single bytes shall not.
const PROGRESS_BYTES: u64 = 16 * 1024;

/// How many settled replies lie between two updates of the progress counter; a power of two.
const PROGRESS_STEP: u64 = 256;

/// How long a server may take to close after we did, at the end of a run, before we stop listening for
/// surplus bytes.
const FAREWELL: Duration = Duration::from_millis(100);

/// How long outstanding replies are awaited after the user asked to stop.
const STOPPED_TIMEOUT_NS: u64 = 1_000_000_000;

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// All messages were sent and settled (or, over UDP, given up).
    Done,
    /// The user asked to stop.
    Interrupted,
    /// The connection or the replies do not allow to go on; in words.
    Failed(String),
    /// Nobody listens on the UDP port (an ICMP message said so) and nothing was ever answered.
    Refused,
}

/// What both loops need beside the connection.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Messages to send; `u64::MAX` for no limit.
    pub(crate) messages: u64,
    /// When to stop sending, CLOCK_MONOTONIC; `u64::MAX` for never.
    pub(crate) until_ns: u64,
    /// Most messages per send.
    pub(crate) batch: usize,
    pub(crate) timeout_ns: u64,
}

/// What a thread shares with the one that watches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<'a> {
    /// Set when the user wants to stop.
    pub(crate) stop: &'a AtomicBool,
    /// Replies settled so far, roughly: for the progress line.
    pub(crate) settled: &'a AtomicU64,
}

/// One connection and everything that happens on it.
pub(crate) struct Exchange<'a, P> {
    socket: &'a Socket,
    shared: Shared<'a>,
    protocol: P,
    pub(crate) table: Table,
    pub(crate) record: Record,
    pub(crate) limits: Limits,
    /// What the socket did not take of the last request, from `unsent_at`.
    unsent: Vec<u8>,
    unsent_at: usize,
    /// Several requests for one send.
    gathered: Vec<u8>,
    /// When something last arrived, CLOCK_MONOTONIC.
    pub(crate) now_ns: u64,
    /// Whether nothing has been sent since `now_ns`, so that it can serve as a start time.
    pub(crate) now_is_fresh: bool,
    last_progress_ns: u64,
    bytes_at_progress: u64,
    is_datagram: bool,
    next_sweep_ns: u64,
    connected: bool,
}

impl<'a, P: Protocol> Exchange<'a, P> {
    /// Prepares an exchange; nothing is sent yet.
    pub(crate) fn new<F: Factory<Protocol = P>>(
        socket: &'a Socket,
        shared: Shared<'a>,
        factory: &F,
        in_flight: usize,
        id_base: u32,
        limits: Limits,
    ) -> Exchange<'a, P> {
        let gathered_bytes = match limits.batch {
            1 => 0,
            batch => batch * factory.request_bytes(),
        };
        Exchange {
            socket,
            shared,
            protocol: factory.make(),
            table: Table::new(in_flight, factory.id_bits(), id_base),
            record: Record::new(),
            unsent: Vec::with_capacity(gathered_bytes.max(factory.request_bytes())),
            unsent_at: 0,
            gathered: Vec::with_capacity(gathered_bytes),
            limits,
            now_ns: 0,
            now_is_fresh: false,
            last_progress_ns: 0,
            bytes_at_progress: 0,
            is_datagram: socket.transport.is_datagram(),
            next_sweep_ns: 0,
            connected: true,
        }
    }

    /// Starts the clocks.
    pub(crate) fn start(&mut self) {
        self.now_ns = monotonic_ns();
        self.now_is_fresh = true;
        self.last_progress_ns = self.now_ns;
        self.next_sweep_ns = self.now_ns + self.sweep_interval_ns();
    }

    /// Whether the plan has more messages to send.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.table.issued() < self.limits.messages && self.now_ns < self.limits.until_ns
    }

    /// Whether part of a request waits for the socket.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.unsent_at < self.unsent.len()
    }

    /// Whether the user asked to stop.
    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    /// A start time for the next request: the last arrival if nothing happened since, so that a steady exchange
    /// reads the clock once per message. It can only make latencies longer, by the time of decoding.
    #[inline]
    pub(crate) fn start_time(&mut self) -> u64 {
        if !self.now_is_fresh {
            self.now_ns = monotonic_ns();
        }
        self.now_is_fresh = false;
        self.now_ns
    }

    /// Sends one request whose latency counts from `start_ns`. The caller has checked for room and that the
    /// socket is not blocked.
    #[inline]
    pub(crate) fn send_one(&mut self, start_ns: u64) -> Result<(), End> {
        let (id, index) = self.table.issue(start_ns);
        let bytes = self.protocol.encode(id, index);
        self.record.send_calls += 1;
        match send(self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) if sent == bytes.len() => {
                self.record.sent_bytes += sent as u64;
                Ok(())
            }
            Ok(sent) => {
                self.unsent.clear();
                self.unsent.extend_from_slice(&bytes[sent..]);
                self.unsent_at = 0;
                self.record.sent_bytes += sent as u64;
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {
                self.unsent.clear();
                self.unsent.extend_from_slice(bytes);
                self.unsent_at = 0;
                Ok(())
            }
            Err(error) => Err(self.send_failed(error)),
        }
    }

    /// Sends up to `most` requests in one send.
    pub(crate) fn send_batch(&mut self, start_ns: u64, most: usize) -> Result<(), End> {
        self.gathered.clear();
        for _ in 0..most {
            if !self.table.has_room() || !self.has_more() {
                break;
            }
            let (id, index) = self.table.issue(start_ns);
            self.gathered.extend_from_slice(self.protocol.encode(id, index));
        }
        std::mem::swap(&mut self.unsent, &mut self.gathered);
        self.unsent_at = 0;
        self.flush()
    }

    /// Sends what the socket did not take before.
    #[cold]
    pub(crate) fn flush(&mut self) -> Result<(), End> {
        self.record.send_calls += 1;
        let rest = &self.unsent[self.unsent_at..];
        match send(self.socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => {
                self.unsent_at += sent;
                self.record.sent_bytes += sent as u64;
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => Ok(()),
            Err(error) => Err(self.send_failed(error)),
        }
    }

    /// Receives at most one reply. Returns whether anything came; with `flags` empty it waits up to one tick.
    #[inline]
    pub(crate) fn receive(&mut self, flags: RecvFlags) -> Result<bool, End> {
        let window = self.protocol.window(self.limits.batch > 1);
        self.record.receive_calls += 1;
        let got = recv(self.socket, window, flags);
        match got {
            // A datagram may be empty, a stream that returns nothing has ended.
            Ok((0, _)) if !self.is_datagram => Err(self.closed("the peer closed the connection")),
            Ok((len, _)) => {
                self.now_ns = monotonic_ns();
                self.now_is_fresh = true;
                self.take(len)?;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(self.receive_failed(error)),
        }
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<(), End> {
        let before = self.record.settled;
        let mut sink = Sink::new(&mut self.table, &mut self.record, self.now_ns);
        self.protocol.received(len, &mut sink);
        let broken = sink.is_broken();
        self.record.received_bytes += len as u64;
        let replies = self.record.settled - before;
        if replies > 0 {
            self.last_progress_ns = self.now_ns;
            self.record.replies_per_receive_max = self.record.replies_per_receive_max.max(replies);
            if self.record.settled & (PROGRESS_STEP - 1) < replies {
                self.shared.settled.store(self.record.settled, Ordering::Relaxed);
            }
        }
        match (broken, replies) {
            (true, _) => Err(self.closed("the replies cannot be read any further")),
            (false, 0) if !self.is_datagram => self.check_progress(),
            (false, _) => Ok(()),
        }
    }

    /// Waits until the socket can be read, or written if it is blocked, or until `timeout` is over.
    pub(crate) fn wait(&mut self, timeout: Duration) {
        let mut events = PollFlags::IN;
        if self.is_blocked() {
            events |= PollFlags::OUT;
        }
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // An interrupted or failed poll only means that the next receive looks for itself.
        let _ = poll(&mut [PollFd::new(self.socket, events)], Some(&timeout));
    }

    /// After a wait in vain: has the time limit passed?
    #[cold]
    pub(crate) fn check_time(&mut self) -> Result<(), End> {
        self.now_ns = monotonic_ns();
        self.now_is_fresh = true;
        if self.is_datagram {
            self.sweep();
            return Ok(());
        }
        self.check_progress()
    }

    /// On a stream: was there a reply, or enough of one, within the time limit?
    fn check_progress(&mut self) -> Result<(), End> {
        let bytes = self.record.received_bytes + self.record.sent_bytes;
        if bytes - self.bytes_at_progress >= PROGRESS_BYTES {
            self.bytes_at_progress = bytes;
            self.last_progress_ns = self.now_ns;
        }
        // Somebody who asked to stop does not want to wait long for replies that may never come.
        let limit_ns = match self.is_stopped() {
            true => self.limits.timeout_ns.min(STOPPED_TIMEOUT_NS),
            false => self.limits.timeout_ns,
        };
        if self.now_ns.saturating_sub(self.last_progress_ns) < limit_ns {
            return Ok(());
        }
        let seconds = limit_ns as f64 / 1e9;
        let lost = self.table.in_flight() as u64;
        let text = format!("no reply for {seconds} s, {lost} outstanding");
        self.table.expire(u64::MAX);
        let note = text.clone();
        self.record.fault(Fault::Lost, lost, move || note);
        Err(End::Failed(text))
    }

    /// Nothing is outstanding: the time limit starts again.
    pub(crate) fn note_idle(&mut self) {
        self.last_progress_ns = monotonic_ns();
    }

    /// Over UDP every message has its own time limit: gives up those that are over it. Called after every
    /// receive, does something only every eighth of the limit.
    #[inline]
    pub(crate) fn sweep_if_due(&mut self) {
        if self.is_datagram && self.now_ns >= self.next_sweep_ns {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        self.next_sweep_ns = self.now_ns + self.sweep_interval_ns();
        let deadline = self.now_ns.saturating_sub(self.limits.timeout_ns);
        let lost = self.table.expire(deadline);
        if lost > 0 {
            let seconds = self.limits.timeout_ns as f64 / 1e9;
            self.record.fault(Fault::Lost, lost, || format!("{lost} unanswered for {seconds} s"));
        }
    }

    fn sweep_interval_ns(&self) -> u64 {
        self.limits.timeout_ns / 8 + 1
    }

    /// At the end: says goodbye and listens for bytes nobody asked for.
    pub(crate) fn finish(&mut self) {
        self.shared.settled.store(self.record.settled, Ordering::Relaxed);
        if !self.connected {
            return;
        }
        if !self.is_datagram && shutdown(self.socket, Shutdown::Write).is_err() {
            return;
        }
        match self.is_datagram {
            // There is no end of stream to wait for: one look after a moment must do.
            true => {
                self.wait(FAREWELL / 10);
                while let Ok(true) = self.receive(RecvFlags::DONTWAIT) {}
            }
            false => self.read_to_end(),
        }
    }

    fn read_to_end(&mut self) {
        let deadline = monotonic_ns() + FAREWELL.as_nanos() as u64;
        loop {
            match self.receive(RecvFlags::DONTWAIT) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(_) => return,
            }
            let now = monotonic_ns();
            if now >= deadline {
                return;
            }
            self.wait(Duration::from_nanos(deadline - now));
        }
    }

    fn send_failed(&mut self, error: Errno) -> End {
        if self.is_refused(error) {
            return End::Refused;
        }
        self.closed(&format!("send: {}", std::io::Error::from(error)))
    }

    fn receive_failed(&mut self, error: Errno) -> End {
        if self.is_refused(error) {
            return End::Refused;
        }
        self.closed(&format!("receive: {}", std::io::Error::from(error)))
    }

    fn is_refused(&self, error: Errno) -> bool {
        self.is_datagram && error == Errno::CONNREFUSED && self.record.settled == 0
    }

    #[cold]
    fn closed(&mut self, reason: &str) -> End {
        self.connected = false;
        let outstanding = self.table.in_flight() as u64;
        let text = format!("{reason}, {outstanding} replies outstanding");
        self.table.expire(u64::MAX);
        let note = text.clone();
        self.record.fault(Fault::Closed, outstanding, move || note);
        End::Failed(text)
    }
}
