//! Waiting for connections and wake-ups, together with the other workers.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::{ConnectionId, Shared, WorkerCx};
use crate::sync::Arc;

/// Data of the signal in the epoll set; no connection has it, because a generation never reaches it.
pub(super) const SIGNAL: u64 = u64::MAX;

const EVENTS_MAX: usize = 16;
const EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

impl Shared {
    /// Waits for something to do, for so long. Events of connections are handled: what they bring is queued.
    pub(crate) fn wait(
        self: &Arc<Self>,
        timeout: Option<&Timespec>,
        with_cx: impl FnOnce(&mut dyn FnMut(&mut WorkerCx<'_>)),
    ) -> std::io::Result<()> {
        if self.wait_set.note_blocking() {
            self.timer.watch_wait_set();
        }
        let mut buffer = [EVENT; EVENTS_MAX];
        // One while others wait too: each takes one.
        let max = if self.scheduler.has_sleepers() { 1 } else { EVENTS_MAX };
        if !self.scheduler.sleep() {
            return Ok(());
        }
        if self.is_stopped() {
            // The thread that stopped it did not see this sleeper.
            self.scheduler.awake(0);
            return Ok(());
        }
        let waited = epoll::wait(&self.epoll, &mut buffer[..max], timeout);
        let events = match waited {
            Ok(count) => &buffer[..count],
            Err(Errno::INTR) => &[],
            Err(errno) => {
                self.scheduler.awake(0);
                return Err(errno.into());
            }
        };
        let signalled = events.iter().any(|event| event.data.u64() == SIGNAL) && self.take_signal();
        self.scheduler.awake(usize::from(signalled));
        if signalled {
            self.pass_stop_on();
        }
        if !events.is_empty() {
            with_cx(&mut |cx| events.iter().for_each(|event| self.handle(event.data.u64(), event.flags, cx)));
        }
        Ok(())
    }

    /// Looks for events without waiting. Whether there was one.
    pub(crate) fn poll(self: &Arc<Self>, cx: &mut WorkerCx<'_>) -> std::io::Result<bool> {
        let mut buffer = [EVENT; EVENTS_MAX];
        let max = if self.scheduler.has_sleepers() { 1 } else { EVENTS_MAX };
        let count = match epoll::wait(&self.epoll, &mut buffer[..max], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for event in &buffer[..count] {
            if event.data.u64() == SIGNAL {
                let signals = usize::from(self.take_signal());
                self.scheduler.note_signals(signals);
                self.pass_stop_on();
            }
            self.handle(event.data.u64(), event.flags, cx);
        }
        Ok(count > 0)
    }

    pub(super) fn handle(self: &Arc<Self>, data: u64, flags: epoll::EventFlags, cx: &mut WorkerCx<'_>) {
        let Some(conn) = self.find(ConnectionId::from_u64(data)) else { return };
        let ends = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(ends) {
            conn.hangup.store(true, Ordering::SeqCst);
        }
        if flags.contains(epoll::EventFlags::OUT) && conn.out_queue.is_blocked() {
            self.send(&conn);
        }
        if flags.intersects(ends | epoll::EventFlags::IN) {
            self.read(&conn, cx);
        }
    }

    /// Wakes sleeping workers.
    pub(crate) fn wake(&self, workers: usize) {
        if workers > 0 {
            let _ = rustix::io::write(&self.signal, &(workers as u64).to_ne_bytes());
        }
    }

    /// After a wake-up was taken: where all are to stop it may have been meant for a worker that still sleeps.
    fn pass_stop_on(&self) {
        if self.is_stopped() {
            self.wake(self.scheduler.wake_all());
        }
    }

    /// Takes one wake-up and passes the others on. False if another worker took it.
    pub(super) fn take_signal(&self) -> bool {
        let mut count = [0; 8];
        if rustix::io::read(&self.signal, &mut count).is_err() {
            return false;
        }
        let rest = u64::from_ne_bytes(count) - 1;
        if rest > 0 {
            let _ = rustix::io::write(&self.signal, &rest.to_ne_bytes());
        }
        true
    }

    /// The set of all connections, for descriptors of event loops.
    pub(crate) fn connections_set(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }
}
#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use ksf::Order;
    use ksf::framing::Framing;
    use rustix::net::{RecvFlags, recv};

    use super::*;
    use crate::connection::Attachment;
    use crate::{Mux, MuxOptions, RecvError};

    /// The kernel tells an error once: the worker that reads would find an end of stream.
    #[test]
    fn an_error_is_left_to_the_worker_that_reads() {
        let (mux, _timer) = Mux::without_thread(MuxOptions::new(Framing::RecordMark)).unwrap();
        let worker = mux.socket().unwrap();
        let (peer, mut socket) = UnixStream::pair().unwrap();
        socket.write_all(b"never read").unwrap();
        let attachment = Attachment { state: Box::new(()), ended: |_, _| () };
        let id = mux.attach_served(socket.into(), Framing::RecordMark.into(), Order::Requests, attachment).unwrap();
        let conn = mux.shared().find(id).unwrap();
        let (mut peer, mut read) = (Some(peer), None);
        conn.reader.run(|reader| {
            if peer.take().is_some() {
                // Another worker is told of the error before this one reads.
                assert!(matches!(worker.try_recv(), Err(RecvError::WouldBlock)));
                read = reader
                    .socket
                    .as_ref()
                    .map(|socket| recv(socket, &mut [0; 8][..], RecvFlags::DONTWAIT).map(|(bytes, _)| bytes));
            }
        });
        assert_eq!(read, Some(Err(Errno::CONNRESET)));
    }
}
