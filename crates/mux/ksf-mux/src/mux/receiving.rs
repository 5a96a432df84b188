//! Receiving: reads a connection, cuts messages, queues them, and releases what they used when they are finished.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use ksf::buffers::Buffers;
use ksf::pool::{Chunk, Memory, Pool, PoolSpec};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::socket_error;

use super::{Shared, Shortage, now};
use crate::batch::{CutMessages, MessageBatch};
use crate::connection::{Connection, Reader};
use crate::error::ConnectionError;
use crate::scheduler::{Source, Worker};
use crate::sync::Arc;
use crate::timer_thread;

/// Buffers of a thread that receives. It keeps them to reuse their memory.
pub(crate) struct Receiver {
    pool: Pool,
    found: CutMessages,
    batches: Vec<MessageBatch>,
    /// Free lists of message positions in a batch.
    pub(crate) ranges: Vec<Vec<Range<u32>>>,
}

impl Receiver {
    /// Room for 64 messages of a kilobyte, and for the usual contents of a socket buffer.
    const SLOT_BYTES: u32 = 64 << 10;
    const SLOTS: u32 = 32;
    /// Slots for short messages that a worker or a service keeps.
    const SHORT_SLOTS: u32 = 1024;

    pub(crate) fn new(buffers: &Buffers) -> std::io::Result<Self> {
        let long =
            PoolSpec { buffers: buffers.clone(), ..PoolSpec::new(Memory::Anonymous, Self::SLOT_BYTES, Self::SLOTS) };
        let opened = Pool::open(long.with_short(PoolSpec::short(Memory::Anonymous, Self::SHORT_SLOTS)));
        let pool = opened.map_err(|error| std::io::Error::other(error.to_string()))?.pool;
        Ok(Self { pool, found: CutMessages::default(), batches: Vec::new(), ranges: Vec::new() })
    }

    /// Receives the available bytes: at most `bytes_max`, and at most a slot. If kept messages occupy all slots, it allocates a
    /// block. Also returns true if the buffer is full.
    fn receive(&mut self, socket: &OwnedFd, bytes_max: usize) -> Result<(Chunk, bool), Errno> {
        match self.pool.take() {
            Some(mut slot) => {
                let len = bytes_max.min(slot.capacity());
                let (bytes, _) = rustix::net::recv(socket, &mut slot.as_mut_slice()[..len], RecvFlags::DONTWAIT)?;
                let full = bytes == len;
                Ok((slot.freeze(bytes), full))
            }
            None => {
                let mut block = vec![0; bytes_max.min(16 << 10)];
                let (bytes, _) = rustix::net::recv(socket, &mut block[..], RecvFlags::DONTWAIT)?;
                let full = bytes == block.len();
                block.truncate(bytes);
                block.shrink_to_fit();
                Ok((Chunk::from_vec(block), full))
            }
        }
    }
}

/// State of the worker that calls.
pub(crate) struct WorkerCx<'a> {
    pub(crate) worker: Option<&'a Worker<Arc<Connection>>>,
    pub(crate) receiver: &'a mut Receiver,
    /// Longest batch, in messages.
    pub(crate) batch_len: usize,
}

impl Shared {
    /// Reads one chunk of a connection, or all up to its end if epoll has reported the end.
    pub(crate) fn read(self: &Arc<Self>, conn: &Arc<Connection>, cx: &mut WorkerCx<'_>) {
        let mut wakes = 0;
        let mut ended = None;
        conn.reader.run(|reader| {
            loop {
                let Some(socket) = reader.socket.clone() else { return };
                if conn.error.get().is_some() || ended.is_some() {
                    return;
                }
                // Services answer nothing of a connection that failed. Receiving might tell that late: not while it is full. Only
                // here: the kernel tells an error once, and then an end of stream.
                if conn.hangup.load(Ordering::SeqCst)
                    && conn.attachment.get().is_some()
                    && let Ok(Err(errno)) = socket_error(&socket)
                {
                    ended = Some(ConnectionError::Socket { errno: errno.raw_os_error() });
                    return;
                }
                if conn.pressure.waits() || conn.room.waits() {
                    return;
                }
                if conn.is_full() {
                    self.counts.rx_pauses.fetch_add(1, Ordering::Relaxed);
                    conn.paused.store(true, Ordering::SeqCst);
                    // The budget may have been released before the flag was set: look again.
                    if conn.is_full() || !conn.paused.swap(false, Ordering::SeqCst) {
                        // Only a connection that is read may have the pass.
                        self.return_pass(conn, Shortage::Input);
                        return;
                    }
                }
                if let Some(what) = self.shortage(conn, reader) {
                    return self.wait_for_memory(conn, what);
                }
                let received = match reader.input.take_rest(&mut conn.input_room()) {
                    // The socket may have more.
                    Some(rest) => Ok((rest, true)),
                    None => cx.receiver.receive(&socket, self.receive_bytes_max(conn, reader)),
                };
                match received {
                    Ok((chunk, _)) if chunk.is_empty() => {
                        // The kernel reports a reset once, perhaps to a worker that sends, and then an end of stream.
                        ended = Some(match (conn.out_queue.send_error(), reader.input.unread_bytes()) {
                            (Some(errno), _) => ConnectionError::Socket { errno },
                            (None, 0) => ConnectionError::PeerClosed,
                            (None, bytes) => ConnectionError::PeerClosedMidMessage { bytes },
                        });
                        return;
                    }
                    Ok((chunk, full)) => {
                        let now = now().0;
                        conn.active_at.store(now, Ordering::Relaxed);
                        conn.read_at.store(now, Ordering::Relaxed);
                        let (more_wakes, all) = self.cut(conn, reader, &chunk, cx);
                        wakes += more_wakes;
                        match all {
                            Ok(true) => {}
                            Ok(false) => return self.wait_for_memory(conn, Shortage::Input),
                            Err(error) => ended = Some(error),
                        }
                        if full && ended.is_none() {
                            // The rest is read in the connection's next turn, after those of others.
                            wakes += self.scheduler.push_reread(cx.worker, Arc::clone(conn));
                            return;
                        }
                        // The buffer is not full, so all is read. epoll reports bytes that come later, but not again an end
                        // that it has reported.
                        if !conn.hangup.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => {
                        if reader.input.unread_bytes() == 0 {
                            self.return_pass(conn, Shortage::Input);
                        }
                        return;
                    }
                    Err(errno) => {
                        ended = Some(ConnectionError::Socket { errno: errno.raw_os_error() });
                        return;
                    }
                }
            }
        });
        self.wake(wakes);
        if let Some(error) = ended {
            self.end(conn, error);
        }
    }

    /// Cuts a chunk and queues its messages. Returns the number of workers to wake, and false if memory was short.
    pub(super) fn cut(
        self: &Arc<Self>,
        conn: &Arc<Connection>,
        reader: &mut Reader,
        chunk: &Chunk,
        cx: &mut WorkerCx<'_>,
    ) -> (usize, Result<bool, ConnectionError>) {
        let Receiver { found, batches, ranges, .. } = &mut *cx.receiver;
        let memory = (&mut conn.input_room(), &self.buffers);
        let cut = reader.input.cut(&conn.framing, chunk, &conn.limits(), memory, now(), found);
        if conn.unfinished_bytes.load(Ordering::SeqCst) > 0 {
            if reader.input.needs_header() {
                conn.counts.rx_need_more.fetch_add(1, Ordering::Relaxed);
            }
            self.timer.schedule_check(conn, timer_thread::TIMEOUT_TICK);
        }
        let bytes: usize = found.bytes();
        let count = found.len();
        if conn.room.has_pass() {
            conn.input_at.store(now().0, Ordering::SeqCst);
        }
        if conn.pressure.has_pass() {
            conn.input_at.store(now().0, Ordering::SeqCst);
            // The pass is for one message. The next ones wait for memory again.
            if count > 0 || reader.input.unread_bytes() == 0 {
                self.return_pass(conn, Shortage::Input);
            }
        }
        if count == 0 {
            return (0, cut);
        }
        conn.counts.rx_messages.fetch_add(count as u64, Ordering::Relaxed);
        conn.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        conn.waiting_messages.fetch_add(count, Ordering::SeqCst);
        conn.waiting_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.memory.fetch_add(bytes, Ordering::SeqCst);
        // Classes and ordered queues handle single messages.
        let alone = self.options.classify.is_some() || conn.ordered_queue().is_some();
        found.gather(chunk, if alone { 1 } else { cx.batch_len }, ranges, batches);
        (self.scheduler.push(cx.worker, conn, batches.drain(..)), cut)
    }

    /// Continues with a connection whose use of the budget has fallen: queues its next read and its parked messages if they
    /// waited for that.
    pub(crate) fn resume(&self, conn: &Arc<Connection>) {
        self.return_room(conn);
        self.return_reply_room(conn);
        if !conn.parked().is_empty() && !conn.is_throttled() {
            self.wake(self.scheduler.unpark(conn));
        }
        if conn.paused.load(Ordering::SeqCst) && !conn.is_full() && conn.paused.swap(false, Ordering::SeqCst) {
            self.wake(self.scheduler.push_reread(None, Arc::clone(conn)));
        }
    }

    /// Finishes messages. There is only one if it has a class or comes from an ordered queue. `worker` is the caller, if it takes
    /// its next message at once.
    pub(crate) fn finish(
        &self,
        worker: Option<&Worker<Arc<Connection>>>,
        conn: &Arc<Connection>,
        messages: usize,
        bytes: usize,
        class: Option<usize>,
    ) {
        conn.waiting_bytes.fetch_sub(bytes, Ordering::SeqCst);
        self.memory.fetch_sub(bytes, Ordering::SeqCst);
        let left = conn.waiting_messages.fetch_sub(messages, Ordering::SeqCst) - messages;
        if class.is_some() || conn.ordered_queue().is_some() {
            self.wake(self.scheduler.finish(worker, conn, class));
        }
        self.resume(conn);
        if left == 0 && conn.error.get().is_some() {
            self.settle(conn);
        }
    }
}
