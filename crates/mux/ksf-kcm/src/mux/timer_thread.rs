//! The one thread of a multiplexor on AF_KCM: it hears of the ends of connections, and does in time what no other thread is
//! told of.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ksf::limits::Time;
use ksf_mux::ConnectionError;
use ksf_mux::backend::{Event, Pushed, UNREAD_MAX};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::connection::{Ending, KernelConnection, Tcp};
use super::{SIGNAL, Shared, lock, read};

/// Time between looks at limits of time.
const TICK: Duration = Duration::from_millis(100);
/// The same for connections that end, or whose peer reads slowly: AF_KCM does not report that it has cut everything, and
/// takes the report away that TCP has room.
const SHORT_TICK: Duration = Duration::from_millis(1);
/// For those that do so for longer than [`TICK`].
const CALM_TICK: Duration = Duration::from_millis(10);
/// Time after which bytes are given up that the kernel does not cut: they are the beginning of a message whose rest
/// does not come. Each of its pauses ends by work it has queued already, which takes far less.
const QUIET: Duration = Duration::from_secs(1);

const EVENTS_MAX: usize = 64;
const EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// A connection the timer thread looks after, and since when.
struct Case {
    conn: Arc<KernelConnection>,
    since: Instant,
}

/// Until the multiplexor is closed.
pub(super) fn run(shared: &Shared) {
    let mut cases: Vec<Case> = Vec::new();
    let mut ticked = Instant::now();
    while !shared.stopped.load(Ordering::SeqCst) {
        shared.hear(shared.sleeps(&cases));
        let now = Instant::now();
        cases.extend(lock(&shared.busy).drain(..).map(|conn| Case { conn, since: now }));
        cases.retain(|case| shared.step(&case.conn, now));
        if now.duration_since(ticked) >= TICK {
            ticked = now;
            shared.all().iter().for_each(|conn| shared.check_time(conn, now));
        }
    }
}

impl Shared {
    /// Wakes the timer thread.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.signal, &1_u64.to_ne_bytes());
    }

    /// Has the timer thread look after a connection until it is quiet.
    pub(super) fn look_after(&self, conn: &Arc<KernelConnection>) {
        if !conn.busy.swap(true, Ordering::SeqCst) {
            lock(&self.busy).push(Arc::clone(conn));
        }
        self.signal();
    }

    fn sleeps(&self, cases: &[Case]) -> Option<Duration> {
        let now = Instant::now();
        let rest = (!read(&self.table).all.is_empty()).then_some(TICK);
        let of = |case: &Case| {
            let is_fresh = now.duration_since(case.since) < TICK;
            let tick = if is_fresh { SHORT_TICK } else { CALM_TICK };
            let waits_for_more = !case.conn.outbox.is_blocked() && lock(&case.conn.ending).is_none();
            match *lock(&case.conn.batch_until) {
                Some(until) if waits_for_more => until.saturating_duration_since(now),
                _ => tick,
            }
        };
        cases.iter().map(of).chain(rest).min()
    }

    /// Waits for what TCP sockets report.
    fn hear(&self, timeout: Option<Duration>) {
        let timeout = timeout.map(|time| Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() });
        let mut events = [EVENT; EVENTS_MAX];
        let count = match epoll::wait(&self.watched, &mut events[..], timeout.as_ref()) {
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
            if data == SIGNAL {
                let _ = rustix::io::read(&self.signal, &mut [0; 8]);
            } else if let Some(conn) = self.find(ksf_mux::ConnectionId::from_u64(data))
                && let Some(tcp) = conn.tcp()
            {
                let error = sockopt::socket_error(&*tcp).unwrap_or_else(Err).err();
                self.note(&conn, flags, error);
            }
        }
    }

    /// The kernel has reported something on the TCP socket.
    pub(super) fn note(&self, conn: &Arc<KernelConnection>, flags: epoll::EventFlags, error: Option<Errno>) {
        use epoll::EventFlags as On;
        if flags.contains(On::HUP) {
            // Reset, or given up by TCP: nothing can be sent any more.
            let errno = error.filter(|error| *error != Errno::PIPE).unwrap_or(Errno::CONNRESET);
            return self.end(conn, ConnectionError::Socket { errno: errno.raw_os_error() });
        }
        let errno = match error {
            // How AF_KCM reports the end of the stream.
            Some(Errno::PIPE) => None,
            None if flags.contains(On::RDHUP) => None,
            None => return,
            error => error,
        };
        lock(&conn.ending).get_or_insert(Ending { errno, unread: None });
        self.look_after(conn);
    }

    /// Goes on with what a connection waits for. False: nothing.
    fn step(&self, conn: &Arc<KernelConnection>, now: Instant) -> bool {
        let is_due = lock(&conn.batch_until).is_none_or(|until| until <= now);
        if conn.outbox.bytes() > 0 && is_due {
            self.flush(conn);
        }
        let is_ending = conn.error.get().is_none() && self.ends(conn, now);
        let waits = |conn: &KernelConnection| conn.error.get().is_none() && conn.outbox.bytes() > 0;
        if is_ending || (waits(conn) && !conn.detached.load(Ordering::SeqCst)) {
            return true;
        }
        conn.busy.store(false, Ordering::SeqCst);
        // A thread that queued something just now relied on this list.
        waits(conn) && !conn.detached.load(Ordering::SeqCst) && !conn.busy.swap(true, Ordering::SeqCst)
    }

    /// Announces the end of a connection when everything is received that came before it. False: nothing to wait for.
    fn ends(&self, conn: &Arc<KernelConnection>, now: Instant) -> bool {
        let Some(tcp) = conn.tcp() else { return false };
        let Some(mut ending) = *lock(&conn.ending) else { return false };
        if crate::intake::is_dead(&*tcp) {
            self.end(conn, ConnectionError::Socket { errno: libc::ECONNRESET });
            return false;
        }
        let Some(errno) = ending.errno else {
            match conn.unread_bytes(&tcp) {
                Ok(Some(bytes)) => {
                    let since = ending.unread.filter(|(before, _)| *before == bytes).map_or(now, |(_, since)| since);
                    ending.unread = Some((bytes, since));
                    *lock(&conn.ending) = Some(ending);
                    if bytes > 0 && now.duration_since(since) < QUIET {
                        return true;
                    }
                }
                Ok(None) => return true,
                Err(_) => {}
            }
            self.end(conn, conn.end_of_stream(&tcp));
            return false;
        };
        // The kernel cuts no more; what it has cut is received first.
        if conn.has_messages() {
            return true;
        }
        self.end(
            conn,
            match errno {
                Errno::TIMEDOUT => ConnectionError::AssemblyTimeout { limit_ms: conn.limits.assembly_timeout_ms },
                errno => ConnectionError::Kernel { errno: errno.raw_os_error() },
            },
        );
        false
    }

    /// A connection brings no more messages, and none is to be taken of those that are there.
    pub(super) fn refuse(&self, conn: &Arc<KernelConnection>, error: ConnectionError) {
        conn.refused.store(true, Ordering::SeqCst);
        conn.set_paused(true);
        self.end(conn, error);
    }

    /// A connection brings no more messages.
    pub(super) fn end(&self, conn: &Arc<KernelConnection>, error: ConnectionError) {
        // Also where the peer's direction ended before: nothing can be sent any more.
        let failed = matches!(error, ConnectionError::Socket { .. } | ConnectionError::SendTimeout { .. });
        if conn.error.set(error.clone()).is_ok() {
            self.counts.ends.note(&error);
            self.events.push(Event::Ended { connection: conn.id, error });
        } else if !failed {
            return;
        }
        if failed {
            let leftover = conn.outbox.fail();
            let mut messages = leftover.uncertain;
            for (body, repeatable) in leftover.movable {
                self.counts.tx_retries.fetch_add(1, Ordering::Relaxed);
                // Nowhere to go: as lost as if it had been sent and not arrived.
                messages += usize::from(!self.send_elsewhere(&body, repeatable, conn));
            }
            if messages > 0 {
                self.events.push(Event::Uncertain { connection: conn.id, messages });
            }
            self.room.1.notify_all();
        }
        self.settle(conn);
    }

    /// Queues a message on another connection, whatever is queued there already.
    fn send_elsewhere(&self, body: &[u8], repeatable: bool, but: &Arc<KernelConnection>) -> bool {
        let mut conns = self.all();
        conns.retain(|conn| !Arc::ptr_eq(conn, but) && conn.error.get().is_none());
        conns.sort_by_key(|conn| conn.outbox.bytes());
        let takes = |conn: &&Arc<KernelConnection>| {
            let pushed = conn.outbox.push_movable(&conn.framing, usize::MAX, body, repeatable);
            pushed.is_ok_and(|pushed| pushed == Pushed::Queued)
        };
        let taken = conns.iter().find(takes);
        if let Some(conn) = taken {
            conn.counts.tx_messages.fetch_add(1, Ordering::Relaxed);
            self.flush(conn);
        }
        taken.is_some()
    }

    /// Tells readers of an end when the last message is done with.
    pub(super) fn settle(&self, conn: &KernelConnection) {
        let Some(error) = conn.error.get() else { return };
        if conn.waiting_messages.load(Ordering::SeqCst) == 0
            && !conn.reported.swap(true, Ordering::SeqCst)
            && self.reports_wanted.load(Ordering::SeqCst) > 0
        {
            self.reports.push_within(UNREAD_MAX, (conn.id, error.clone()));
        }
    }

    fn check_time(&self, conn: &Arc<KernelConnection>, now: Instant) {
        let Some(tcp) = conn.tcp() else { return };
        let (limits, clock) = (&conn.limits, clock());
        let is_overdue =
            lock(&conn.progress).is_overdue(conn.outbox.bytes(), conn.outbox.sent(), clock, limits.send_timeout_ms);
        if is_overdue {
            self.refuse(conn, ConnectionError::SendTimeout { limit_ms: limits.send_timeout_ms });
        }
        // Later than the kernel's own timer, which says the same.
        let limit_ms = limits.assembly_timeout_ms;
        if limit_ms > 0 && conn.unfinished_for(&tcp, now) > Duration::from_millis(limit_ms) {
            self.refuse(conn, ConnectionError::AssemblyTimeout { limit_ms });
        }
        let limit_ms = limits.idle_timeout_ms;
        let is_idle = limit_ms > 0 && conn.waiting_messages.load(Ordering::SeqCst) == 0;
        if is_idle && conn.intake.idle_for(now) >= Duration::from_millis(limit_ms) {
            self.refuse(conn, ConnectionError::IdleTimeout { limit_ms });
        }
    }
}

impl KernelConnection {
    fn end_of_stream(&self, tcp: &Tcp) -> ConnectionError {
        use std::os::fd::AsFd as _;
        match self.intake.outstanding_bytes(tcp.as_fd()) as usize {
            0 => ConnectionError::PeerClosed,
            bytes => ConnectionError::PeerClosedMidMessage { bytes },
        }
    }
}

impl super::connection::Counts {
    /// Adds those of a connection that is detached.
    pub(super) fn add(&self, other: &Self) {
        for (sum, count) in [
            (&self.rx_messages, &other.rx_messages),
            (&self.rx_bytes, &other.rx_bytes),
            (&self.tx_messages, &other.tx_messages),
            (&self.tx_bytes, &other.tx_bytes),
        ] {
            sum.fetch_add(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// The monotonic clock.
fn clock() -> Time {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
