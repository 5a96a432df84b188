//! From bytes of a connection to messages in the queues, and what is left of them when they are done with.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use ksf::pool::{Chunk, Memory, Pool};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{Shared, now};
use crate::error::ConnectionError;
use crate::keeper;
use crate::link::{Link, Reader};
use crate::run::{Found, Run};
use crate::scheduler::{Source, Worker};
use crate::sync::Arc;

/// What a thread needs to receive: slots and a list, kept for their memory.
pub(crate) struct Receiver {
    pool: Pool,
    found: Found,
    runs: Vec<Run>,
    /// Lists of places in a run, to be used again.
    pub(crate) ranges: Vec<Vec<Range<u32>>>,
}

impl Receiver {
    /// Long enough for 64 messages of a kilobyte, and for what a socket buffer usually holds.
    const SLOT_BYTES: u32 = 64 << 10;
    const SLOTS: u32 = 32;

    pub(crate) fn new() -> std::io::Result<Self> {
        let pool = Pool::new(Memory::Anonymous, Self::SLOT_BYTES, Self::SLOTS)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self { pool, found: Found::default(), runs: Vec::new(), ranges: Vec::new() })
    }

    /// Receives what is there, up to a slot. Where all slots hold messages somebody keeps: into a block of its own.
    fn receive(&mut self, socket: &OwnedFd) -> Result<(Chunk, bool), Errno> {
        match self.pool.take() {
            Some(mut slot) => {
                let (bytes, _) = rustix::net::recv(socket, slot.as_mut_slice(), RecvFlags::DONTWAIT)?;
                let full = bytes == slot.capacity();
                Ok((slot.freeze(bytes), full))
            }
            None => {
                let mut block = vec![0; 16 << 10];
                let (bytes, _) = rustix::net::recv(socket, &mut block[..], RecvFlags::DONTWAIT)?;
                let full = bytes == block.len();
                block.truncate(bytes);
                block.shrink_to_fit();
                Ok((Chunk::from_vec(block), full))
            }
        }
    }
}

/// The calling thread, as a worker.
pub(crate) struct Me<'a> {
    pub(crate) worker: Option<&'a Worker<Arc<Link>>>,
    pub(crate) receiver: &'a mut Receiver,
    /// How many messages may travel together.
    pub(crate) run_len: usize,
}

impl Shared {
    /// Reads a connection: a chunk, or until its end if that was announced.
    pub(crate) fn read(self: &Arc<Self>, link: &Arc<Link>, me: &mut Me<'_>) {
        let mut wakes = 0;
        let mut ended = None;
        link.reader.run(|reader| {
            loop {
                let Some(socket) = reader.socket.clone() else { return };
                if link.error.get().is_some() || ended.is_some() {
                    return;
                }
                if link.doomed.load(Ordering::SeqCst) {
                    reader.framer.take_unread();
                    self.charge(link, 0);
                    ended = Some(ConnectionError::MemoryLimit { limit: self.limits().mux_bytes_max });
                    return;
                }
                if link.is_full() {
                    self.counts.rx_pauses.fetch_add(1, Ordering::Relaxed);
                    link.paused.store(true, Ordering::SeqCst);
                    // What was in the way may have gone before the flag was up.
                    if link.is_full() || !link.paused.swap(false, Ordering::SeqCst) {
                        return;
                    }
                }
                match me.receiver.receive(&socket) {
                    Ok((chunk, _)) if chunk.is_empty() => {
                        let bytes = reader.framer.unfinished_bytes();
                        ended = Some(match bytes {
                            0 => ConnectionError::PeerClosed,
                            bytes => ConnectionError::PeerClosedMidMessage { bytes },
                        });
                        return;
                    }
                    Ok((chunk, full)) => {
                        link.active_at.store(now().0, Ordering::Relaxed);
                        let (more_wakes, error) = self.cut(link, reader, &chunk, me);
                        wakes += more_wakes;
                        ended = error;
                        if full && ended.is_none() {
                            // Others first: what is left is read when its turn comes.
                            wakes += self.scheduler.push_visit(me.worker, Arc::clone(link));
                            return;
                        }
                        // Less than there was room for: everything is read. What comes later is another event, but
                        // an end that was announced already is not.
                        if !link.hangup.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return,
                    Err(errno) => {
                        ended = Some(ConnectionError::Socket { errno: errno.raw_os_error() });
                        return;
                    }
                }
            }
        });
        self.wake(wakes);
        if let Some(error) = ended {
            self.end(link, error);
        }
    }

    /// Cuts a chunk and queues its messages. Returns how many workers to wake.
    pub(super) fn cut(
        self: &Arc<Self>,
        link: &Arc<Link>,
        reader: &mut Reader,
        chunk: &Chunk,
        me: &mut Me<'_>,
    ) -> (usize, Option<ConnectionError>) {
        let Receiver { found, runs, ranges, .. } = &mut *me.receiver;
        let had_unfinished = reader.framer.unfinished_bytes() > 0;
        let cut = reader.framer.push(chunk, now(), &link.limits(), found);
        let unfinished = if cut.is_ok() { reader.framer.unfinished_bytes() } else { 0 };
        if unfinished > 0 || had_unfinished {
            self.charge(link, unfinished);
        }
        if unfinished > 0 {
            if reader.framer.needs_header() {
                link.counts.rx_need_more.fetch_add(1, Ordering::Relaxed);
            }
            self.keeper.look_after(link, keeper::TIMED);
            if self.memory.load(Ordering::SeqCst) > self.limits().mux_bytes_max {
                self.relieve_memory();
            }
        }
        let bytes: usize = found.bytes();
        let count = found.len();
        if count == 0 {
            return (0, cut.err());
        }
        link.counts.rx_messages.fetch_add(count as u64, Ordering::Relaxed);
        link.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.counts.rx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        link.waiting_messages.fetch_add(count, Ordering::SeqCst);
        link.waiting_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.memory.fetch_add(bytes, Ordering::SeqCst);
        // Where each is looked at by itself it also travels by itself.
        let alone = self.options.classify.is_some() || link.lane().is_some();
        found.gather(chunk, if alone { 1 } else { me.run_len }, ranges, runs);
        (self.scheduler.push(me.worker, link, runs.drain(..)), cut.err())
    }

    /// Notes how many bytes of an unfinished message a connection keeps.
    pub(super) fn charge(&self, link: &Link, bytes: usize) {
        let before = link.unfinished_bytes.swap(bytes, Ordering::SeqCst);
        if bytes > before {
            self.memory.fetch_add(bytes - before, Ordering::SeqCst);
        } else {
            self.memory.fetch_sub(before - bytes, Ordering::SeqCst);
        }
    }

    /// Dooms the connection that keeps most for an unfinished message.
    pub(super) fn relieve_memory(&self) {
        let table = self.read_table();
        let hog = table.all.iter().max_by_key(|link| link.unfinished_bytes.load(Ordering::SeqCst)).cloned();
        drop(table);
        if let Some(hog) = hog
            && !hog.doomed.swap(true, Ordering::SeqCst)
        {
            self.wake(self.scheduler.push_visit(None, hog));
        }
    }

    /// Reads on where a connection was left alone because too much of it waited.
    pub(crate) fn resume(&self, link: &Arc<Link>) {
        if link.paused.load(Ordering::SeqCst) && !link.is_full() && link.paused.swap(false, Ordering::SeqCst) {
            self.wake(self.scheduler.push_visit(None, Arc::clone(link)));
        }
    }

    /// Messages are done with; several only where none is in a class or a lane. `worker`: the one that calls, if it
    /// comes for another at once.
    pub(crate) fn finish(
        &self,
        worker: Option<&Worker<Arc<Link>>>,
        link: &Arc<Link>,
        messages: usize,
        bytes: usize,
        class: Option<usize>,
    ) {
        link.waiting_bytes.fetch_sub(bytes, Ordering::SeqCst);
        self.memory.fetch_sub(bytes, Ordering::SeqCst);
        let left = link.waiting_messages.fetch_sub(messages, Ordering::SeqCst) - messages;
        if class.is_some() || link.lane().is_some() {
            self.wake(self.scheduler.finish(worker, link, class));
        }
        self.resume(link);
        if left == 0 && link.error.get().is_some() {
            self.settle(link);
        }
    }
}
