//! What is queued for one connection, and who sends it.
//!
//! Any thread adds whole messages; one at a time sends, and whoever finds nobody sending does. A peer that reads slowly
//! leaves the rest in the queue, and nobody waits for it.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};

use ksf::error::FramingError;
use ksf::framing::Framing;
use ksf::limits::Time;
use ksf::output::{Output, SendBatch, Spares};
use ksf::pool::Chunk;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::baton::Baton;
use crate::options::MessageFraming;
use crate::sync::{Arc, AtomicBool, AtomicUsize, Mutex, Ordering};

/// A socket as far as sending is concerned.
pub(crate) trait Transmit {
    /// Sends some of a batch without waiting, and says how many bytes.
    fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno>;
}

/// The queue and the sender of a connection.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    queue: Mutex<Queue>,
    sender: Baton<Sender<T>>,
    /// Bytes that are not sent yet.
    bytes: AtomicUsize,
    /// Bytes ever sent, for whoever looks for progress.
    sent: AtomicUsize,
    /// TCP took less than there was: it will say when it has room.
    blocked: AtomicBool,
    failed: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    output: Output,
    spares: Spares,
    /// Nothing that is added will be sent.
    closed: bool,
    /// Bytes ever queued: the place in the stream where the next message begins.
    end: u64,
    /// Messages of [`Outbox::push_movable`] that are not sent completely, in order.
    movable: VecDeque<Movable>,
}

/// A message that was sent to any connection, so another one may have it when this one fails.
#[derive(Debug)]
pub(crate) struct Movable {
    start: u64,
    end: u64,
    /// Where in the stream its body lies, between the framing.
    body: std::ops::Range<u64>,
    /// Its body, where it may also be repeated when its beginning was sent already.
    copy: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Sender<T> {
    socket: Option<Arc<T>>,
    batch: Option<SendBatch>,
    /// Bytes ever sent.
    sent: u64,
}

/// What came of an attempt to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Everything is sent; so many bytes now.
    All(usize),
    /// TCP has no more room; so many bytes were sent.
    Blocked(usize),
    /// The socket failed.
    Failed(i32),
    /// Another thread sends.
    Elsewhere,
}

/// What a failed connection leaves behind of the messages that could have gone to any.
#[derive(Debug, Default)]
pub(crate) struct Leftover {
    /// Bodies of messages another connection may have, and whether they may be repeated.
    pub(crate) movable: Vec<(Vec<u8>, bool)>,
    /// Messages that may have arrived or not, and must not be repeated.
    pub(crate) uncertain: usize,
}

const SLICES_MAX: usize = 64;

impl<T: Transmit> Outbox<T> {
    pub(crate) fn new(socket: Arc<T>) -> Self {
        Self {
            queue: Mutex::default(),
            sender: Baton::new(Sender { socket: Some(socket), batch: None, sent: 0 }),
            bytes: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            blocked: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        }
    }

    /// Bytes that wait.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Bytes ever sent.
    pub(crate) fn sent(&self) -> usize {
        self.sent.load(Ordering::SeqCst)
    }

    /// The socket, unless sending has ended.
    pub(crate) fn socket(&self) -> Option<Arc<T>> {
        self.sender.lock().socket.clone()
    }

    /// True while TCP has no room.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::SeqCst)
    }

    /// Appends a message; `write` appends its body to the buffer it is given. Nothing is sent yet. False: sending has
    /// ended, and the message is dropped.
    pub(crate) fn push(
        &self,
        framing: &MessageFraming,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<bool, FramingError> {
        let mut queue = self.lock();
        queue.append(framing, write).map(|bytes| self.added(&mut queue, bytes))
    }

    /// Appends a message whose body is sent from where it lies. False as in [`Self::push`].
    pub(crate) fn push_chunk(&self, framing: &MessageFraming, body: Chunk) -> Result<bool, FramingError> {
        let mut queue = self.lock();
        queue.append_chunk(framing, body).map(|bytes| self.added(&mut queue, bytes))
    }

    /// Appends a message that could have gone to any connection. `repeatable`: also when this one failed while it was
    /// being sent. False: sending has ended, and the message is with the caller alone.
    pub(crate) fn push_movable(
        &self,
        framing: &MessageFraming,
        body: &[u8],
        repeatable: bool,
    ) -> Result<bool, FramingError> {
        let mut queue = self.lock();
        let bytes = queue.append(framing, |tail| tail.extend_from_slice(body))?;
        let (start, end) = (queue.end, queue.end + bytes as u64);
        let header_bytes = match framing {
            MessageFraming::Native(framing) => framing.reply_header_bytes() as u64,
            MessageFraming::Program(_) => 0,
        };
        let place = start + header_bytes..start + header_bytes + body.len() as u64;
        queue.movable.push_back(Movable { start, end, body: place, copy: repeatable.then(|| body.to_vec()) });
        Ok(self.added(&mut queue, bytes))
    }

    /// Appends whatever a service wrote, framing included.
    pub(crate) fn append(&self, mut output: Output, spares: &mut Spares) {
        let bytes = output.len();
        if bytes == 0 {
            return;
        }
        let mut queue = self.lock();
        let Queue { output: waiting, spares: of_queue, .. } = &mut *queue;
        // Buffers stay with whom they are from, or one side would have all of them in the end.
        match output.as_slice() {
            Some(slice) => {
                waiting.tail(of_queue).extend_from_slice(slice);
                output.take().recycle(spares);
            }
            None => waiting.append(output, of_queue),
        }
        self.added(&mut queue, bytes);
    }

    /// Sends as much as TCP takes, unless another thread does.
    pub(crate) fn send(&self) -> Sent {
        let mut result = Sent::Elsewhere;
        let mut total = 0;
        self.sender.run(|sender| {
            // A failure is told once: another announcement finds nothing left to try.
            if !matches!(result, Sent::Failed(_)) {
                result = self.drain(sender, &mut total);
            }
        });
        result
    }

    fn drain(&self, sender: &mut Sender<T>, total: &mut usize) -> Sent {
        let Some(socket) = sender.socket.clone() else { return Sent::All(*total) };
        if self.failed.load(Ordering::SeqCst) {
            return Sent::All(*total);
        }
        loop {
            let batch = match &mut sender.batch {
                Some(batch) => batch,
                empty => {
                    let mut queue = self.lock();
                    if queue.output.is_empty() {
                        self.blocked.store(false, Ordering::SeqCst);
                        return Sent::All(*total);
                    }
                    empty.insert(queue.output.take())
                }
            };
            match socket.transmit(batch) {
                Ok(bytes) => {
                    *total += bytes;
                    sender.sent += bytes as u64;
                    self.sent.fetch_add(bytes, Ordering::SeqCst);
                    self.bytes.fetch_sub(bytes, Ordering::SeqCst);
                    let mut queue = self.lock();
                    batch.advance(bytes, &mut queue.spares);
                    let sent = sender.sent;
                    while queue.movable.pop_front_if(|message| message.end <= sent).is_some() {}
                    if batch.is_empty()
                        && let Some(batch) = sender.batch.take()
                    {
                        batch.recycle(&mut queue.spares);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // The socket asks for room from here on (SOCK_NOSPACE). Whoever gets that event sends if it sees the
                    // flag; it may have come before the flag was up, so this tries again with the flag up. An event
                    // that comes before this thread lets go of the sender is announced.
                    if self.blocked.swap(true, Ordering::SeqCst) {
                        return Sent::Blocked(*total);
                    }
                }
                Err(errno) => {
                    self.failed.store(true, Ordering::SeqCst);
                    return Sent::Failed(errno.raw_os_error());
                }
            }
        }
    }

    /// Ends sending for good. Returns the socket, and the bytes that are not sent.
    pub(crate) fn stop(&self) -> (Option<Arc<T>>, Vec<u8>) {
        let mut sender = self.sender.lock();
        let mut queue = self.lock();
        queue.closed = true;
        let rest = unsent(sender.batch.take(), &mut queue);
        self.bytes.store(0, Ordering::SeqCst);
        self.failed.store(true, Ordering::SeqCst);
        (sender.socket.take(), rest)
    }

    /// The connection failed: nothing more is sent. What could go elsewhere is returned.
    pub(crate) fn fail(&self) -> Leftover {
        let mut sender = self.sender.lock();
        self.failed.store(true, Ordering::SeqCst);
        let mut queue = self.lock();
        queue.closed = true;
        let sent = sender.sent;
        let rest = unsent(sender.batch.take(), &mut queue);
        self.bytes.store(0, Ordering::SeqCst);
        self.blocked.store(false, Ordering::SeqCst);
        let mut leftover = Leftover::default();
        for message in std::mem::take(&mut queue.movable) {
            match message.copy {
                Some(copy) => leftover.movable.push((copy, true)),
                // Not begun: the peer cannot have seen any of it.
                None if message.start >= sent => {
                    let range = (message.body.start - sent) as usize..(message.body.end - sent) as usize;
                    leftover.movable.push((rest[range].to_vec(), false));
                }
                None => leftover.uncertain += 1,
            }
        }
        leftover
    }

    /// Counts what was appended. False if it is dropped instead.
    fn added(&self, queue: &mut Queue, bytes: usize) -> bool {
        queue.end += bytes as u64;
        if queue.closed {
            queue.output.take().recycle(&mut queue.spares);
            queue.movable.clear();
            return false;
        }
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        true
    }

    fn lock(&self) -> crate::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Queue {
    fn append(&mut self, framing: &MessageFraming, write: impl FnOnce(&mut Vec<u8>)) -> Result<usize, FramingError> {
        let tail = self.output.tail(&mut self.spares);
        let start = tail.len();
        match framing {
            MessageFraming::Native(framing) => {
                tail.resize(start + framing.reply_header_bytes(), 0);
                write(tail);
                if let Err(error) = framing.finish_reply(tail, start, 0) {
                    tail.truncate(start);
                    return Err(error);
                }
                tail.extend_from_slice(framing.reply_trailer());
            }
            MessageFraming::Program(_) => write(tail),
        }
        Ok(tail.len() - start)
    }

    fn append_chunk(&mut self, framing: &MessageFraming, body: Chunk) -> Result<usize, FramingError> {
        let mut bytes = body.len();
        if let MessageFraming::Native(framing) = framing {
            let tail = self.output.tail(&mut self.spares);
            let start = tail.len();
            tail.resize(start + framing.reply_header_bytes(), 0);
            if let Err(error) = framing.finish_reply(tail, start, body.len()) {
                tail.truncate(start);
                return Err(error);
            }
            bytes += tail.len() - start + framing.reply_trailer().len();
        }
        self.output.push_chunk(body, &mut self.spares);
        if let MessageFraming::Native(Framing::Delimiter(delimiter)) = framing {
            self.output.tail(&mut self.spares).extend_from_slice(delimiter.as_bytes());
        }
        Ok(bytes)
    }
}

/// Every byte that is not sent, in order.
fn unsent(batch: Option<SendBatch>, queue: &mut Queue) -> Vec<u8> {
    let mut rest = Vec::new();
    let waiting = queue.output.take();
    for mut batch in batch.into_iter().chain([waiting]) {
        while !batch.is_empty() {
            let mut slices = [&[][..]; SLICES_MAX];
            let filled = batch.slices(&mut slices);
            let bytes: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            slices[..filled].iter().for_each(|slice| rest.extend_from_slice(slice));
            batch.advance(bytes, &mut queue.spares);
        }
    }
    rest
}

impl Transmit for OwnedFd {
    fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno> {
        let mut slices = [&[][..]; SLICES_MAX];
        let filled = batch.slices(&mut slices);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if filled == 1 {
            return rustix::net::send(self.as_fd(), slices[0], flags);
        }
        let parts = slices.map(IoSlice::new);
        sendmsg(self.as_fd(), &parts[..filled], &mut SendAncillaryBuffer::default(), flags)
    }
}

/// Whether a queue moves, for whoever looks at it now and then.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendProgress {
    /// When bytes began to wait, or were last sent, and how many had been sent by then.
    since: Option<(Time, usize)>,
}

impl SendProgress {
    /// True when bytes wait and none was sent for `limit_ms`.
    pub(crate) fn is_overdue(&mut self, bytes: usize, sent: usize, now: Time, limit_ms: u64) -> bool {
        match self.since {
            _ if bytes == 0 => self.since = None,
            Some((since, before)) if sent == before => return limit_ms != 0 && now > since.plus_ms(limit_ms),
            _ => self.since = Some((now, sent)),
        }
        false
    }
}
