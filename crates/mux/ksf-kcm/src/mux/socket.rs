//! A message socket: one of the kernel's sockets of every connection, and what others gave back.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ksf_mux::backend::Endpoint;
use ksf_mux::{ConnectionError, ConnectionId, RecvError, SendError, SendOptions};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use super::message::KernelMessage;
use super::{Handle, lock};

/// What an event is for, where it is not for a connection: no connection has such a name.
const BELL: u64 = u64::MAX;
const RETURNED: u64 = u64::MAX - 1;
const REPORTS: u64 = u64::MAX - 2;
const EVENTS_MAX: usize = 16;
const EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// One worker's side of a [`KernelMux`](super::KernelMux). A thread usually has one of its own.
pub struct KernelSocket {
    mux: Handle,
    member: Arc<Member>,
}

/// What connections know of a message socket.
pub(super) struct Member {
    pub(super) number: u64,
    /// The kernel's sockets, what was given back, the bell. Level-triggered.
    set: OwnedFd,
    /// A semaphore: a waiting thread is to look again.
    bell: OwnedFd,
    woken: AtomicBool,
    waiting: AtomicUsize,
    receiving: AtomicBool,
    reports: AtomicBool,
    own: Mutex<Own>,
}

#[derive(Default)]
struct Own {
    /// What the last look at the set has found.
    found: VecDeque<u64>,
    buffer: Vec<u8>,
}

impl Member {
    pub(super) fn new(number: u64, returned: impl AsFd) -> std::io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let bell = eventfd(0, flags)?;
        epoll::add(&set, &bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        epoll::add(&set, returned, epoll::EventData::new_u64(RETURNED), epoll::EventFlags::IN)?;
        Ok(Self {
            number,
            set,
            bell,
            woken: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            receiving: AtomicBool::new(true),
            reports: AtomicBool::new(false),
            own: Mutex::default(),
        })
    }

    pub(super) fn set(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    pub(super) fn is_receiving(&self) -> bool {
        self.receiving.load(Ordering::SeqCst)
    }

    /// False if it was so before.
    pub(super) fn change_receiving(&self, receiving: bool, returned: impl AsFd) -> bool {
        if self.receiving.swap(receiving, Ordering::SeqCst) == receiving {
            return false;
        }
        let data = epoll::EventData::new_u64(RETURNED);
        let flags = if receiving { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let _ = epoll::modify(&self.set, returned, data, flags);
        if !receiving {
            // A waiting thread is told that it would wait for ever.
            self.ring(self.waiting.load(Ordering::SeqCst) as u64);
        }
        true
    }

    fn ring(&self, times: u64) {
        if times > 0 {
            let _ = rustix::io::write(&self.bell, &times.to_ne_bytes());
        }
    }

    /// Looks what is there, or waits for something for so long; `None`: for ever.
    fn look(&self, own: Option<&mut Own>, timeout: Option<Duration>) -> std::io::Result<usize> {
        let timeout = timeout.map(|time| Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() });
        let mut events = [EVENT; EVENTS_MAX];
        // A thread that only waits leaves events where they are.
        let max = if own.is_some() { EVENTS_MAX } else { 1 };
        let count = match epoll::wait(&self.set, &mut events[..max], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        if let Some(own) = own {
            own.found.extend(events[..count].iter().map(|event| event.data.u64()));
        }
        Ok(count)
    }
}

impl KernelSocket {
    pub(super) fn new(mux: Handle) -> std::io::Result<Self> {
        let member = mux.0.join()?;
        Ok(Self { mux, member })
    }

    /// The next message. `None` waits for ever; [`Duration::ZERO`] does not wait.
    pub fn receive(&self, timeout: Option<Duration>) -> Result<KernelMessage, RecvError> {
        // A time beyond the clock's end does not come.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if !self.is_receiving() {
                return Err(if timeout == Some(Duration::ZERO) { RecvError::WouldBlock } else { RecvError::Disabled });
            }
            if let Some(result) = self.next() {
                return result;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match (left, timeout) {
                (Some(Duration::ZERO), Some(Duration::ZERO)) => return Err(RecvError::WouldBlock),
                (Some(Duration::ZERO), Some(timeout)) => return Err(RecvError::TimedOut(timeout)),
                _ => {}
            }
            self.member.waiting.fetch_add(1, Ordering::SeqCst);
            // A thread that stops it after this sees that another one waits.
            let waited = if self.is_receiving() { self.member.look(None, left) } else { Ok(0) };
            self.member.waiting.fetch_sub(1, Ordering::SeqCst);
            waited?;
        }
    }

    /// A message that is there already.
    fn next(&self) -> Option<Result<KernelMessage, RecvError>> {
        let shared = &self.mux.0;
        let mut own = lock(&self.member.own);
        loop {
            let Some(found) = own.found.pop_front() else {
                match self.member.look(Some(&mut own), Some(Duration::ZERO)) {
                    Ok(0) => return None,
                    Ok(_) => continue,
                    Err(error) => return Some(Err(error.into())),
                }
            };
            match found {
                BELL => {
                    self.member.woken.store(false, Ordering::SeqCst);
                    let _ = rustix::io::read(&self.member.bell, &mut [0; 8]);
                }
                RETURNED => {
                    if let Some(message) = shared.returned.pop() {
                        return Some(Ok(message));
                    }
                }
                REPORTS => {
                    if let Some((connection, error)) = shared.reports.pop() {
                        return Some(Err(RecvError::Connection { connection, error }));
                    }
                }
                connection => {
                    if let Some(message) = self.take(&mut own.buffer, ConnectionId::from_u64(connection)) {
                        return Some(Ok(message));
                    }
                }
            }
        }
    }

    /// Takes a message of a connection, if it has one for this socket.
    fn take(&self, buffer: &mut Vec<u8>, connection: ConnectionId) -> Option<KernelMessage> {
        let shared = &self.mux.0;
        let conn = shared.find(connection)?;
        let lane = conn.lane(&self.member)?;
        if conn.must_wait() && !shared.pause(&conn) {
            return None;
        }
        // One byte more than the longest: a message that fills the buffer is too long.
        let buffer_bytes = conn.wire_bytes_max().saturating_add(1);
        if buffer.len() < buffer_bytes {
            buffer.resize(buffer_bytes, 0);
        }
        let received = shared.take(&conn, &lane.socket, &mut buffer[..buffer_bytes]);
        if received.is_err() {
            lane.unlist();
        }
        received.ok()?
    }
}

impl Endpoint for KernelSocket {
    type Message = KernelMessage;

    fn receive(&self, timeout: Option<Duration>) -> Result<KernelMessage, RecvError> {
        self.receive(timeout)
    }

    fn give_back(&self, message: KernelMessage) {
        self.mux.0.returned.push_front(message);
    }

    /// The kernel looks by itself.
    fn look(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn announce(&self) {
        if !self.member.woken.swap(true, Ordering::SeqCst) {
            self.member.ring(1);
        }
    }

    fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        self.mux.0.send_to_any(body, options)
    }

    fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        let conn = self.mux.0.find(connection).ok_or(SendError::Gone(connection))?;
        self.mux.0.reply(&conn, conn.limits.out_queue_bytes_max, body)
    }

    fn set_receiving(&self, receiving: bool) {
        self.mux.0.set_receiving(&self.member, receiving);
    }

    fn is_receiving(&self) -> bool {
        self.member.is_receiving()
    }

    fn report_ends(&self) {
        if !self.member.reports.swap(true, Ordering::SeqCst) {
            self.mux.0.reports_wanted.fetch_add(1, Ordering::SeqCst);
            let data = epoll::EventData::new_u64(REPORTS);
            let _ = epoll::add(&self.member.set, &self.mux.0.reports, data, epoll::EventFlags::IN);
        }
    }

    fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        Ok(self.member.set())
    }
}

impl Drop for KernelSocket {
    fn drop(&mut self) {
        if self.member.reports.load(Ordering::SeqCst) {
            self.mux.0.reports_wanted.fetch_sub(1, Ordering::SeqCst);
        }
        self.mux.0.leave(&self.member);
    }
}

impl fmt::Debug for KernelSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelSocket").field("receiving", &self.is_receiving()).finish_non_exhaustive()
    }
}

/// The sockets that are told of the end of a connection.
pub(super) type Report = (ConnectionId, ConnectionError);
