//! What is queued for one connection, and which thread sends it.
//!
//! Any thread adds whole messages; one at a time sends. A peer that reads slowly leaves the rest in the
//! queue, and no thread waits for it.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};

use ksf::error::FramingError;
use ksf::limits::Time;
use ksf::output::{Output, SendBatch, Spares};
use ksf::pool::Chunk;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::combining_lock::CombiningLock;
use crate::options::MessageFraming;
use crate::sync::{Arc, AtomicBool, AtomicUsize, Mutex, Ordering};

/// A socket as far as sending is concerned.
pub(crate) trait Transmit {
    /// Sends some of a batch without waiting, and says how many bytes.
    fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno>;
}

/// The queue and the sender of a connection.
#[derive(Debug)]
pub(crate) struct OutQueue<T> {
    queue: Mutex<Queue>,
    sender: CombiningLock<Sender<T>>,
    /// Bytes that are not sent yet, and those of the batch that is sent in part.
    bytes: AtomicUsize,
    /// The same of all queues that share it.
    total: Arc<AtomicUsize>,
    /// Bytes ever sent, to see progress.
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
    /// Messages of [`OutQueue::push_movable`] that are not sent completely, in order.
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
    /// Bytes of the batch that are sent and count still: its memory is free only when all of it is sent.
    sent_of_batch: usize,
    /// Bytes ever sent.
    sent: u64,
    /// The error of the socket that ended sending.
    errno: Option<i32>,
}

/// Condition on which a queue takes a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// While fewer bytes than these wait.
    Below(usize),
    /// Always. `usize`: bytes that the sum has counted for the message, which replaces them when it is queued.
    Reserved(usize),
}

/// What became of a message that was to be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It will be sent.
    Queued,
    /// It is with the caller alone: too much waits already.
    Full,
    /// The same: sending has ended.
    Ended,
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

/// Bytes of buffers that a connection keeps for its next replies.
const SPARE_BYTES_MAX: usize = 16 << 10;

impl<T: Transmit> OutQueue<T> {
    /// An empty queue whose bytes are counted in `total`, too.
    pub(crate) fn new(socket: Arc<T>, total: Arc<AtomicUsize>) -> Self {
        Self {
            queue: Mutex::default(),
            sender: CombiningLock::new(Sender {
                socket: Some(socket),
                batch: None,
                sent_of_batch: 0,
                sent: 0,
                errno: None,
            }),
            bytes: AtomicUsize::new(0),
            total,
            sent: AtomicUsize::new(0),
            blocked: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        }
    }

    /// Bytes that wait. A batch counts until all of it is sent.
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

    /// True if nothing is sent any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// True while TCP has no room.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::SeqCst)
    }

    /// Appends a message if there is `room`; `write` appends its body to the buffer it is given. Nothing is sent yet.
    pub(crate) fn push(
        &self,
        framing: &MessageFraming,
        room: Room,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Pushed, FramingError> {
        let Some(mut queue) = self.lock_for(room) else { return Ok(Pushed::Full) };
        queue.append(framing, write).map(|bytes| self.added(&mut queue, bytes, room))
    }

    /// The same for a message whose body is sent from where it lies.
    pub(crate) fn push_chunk(&self, framing: &MessageFraming, room: Room, body: Chunk) -> Result<Pushed, FramingError> {
        let Some(mut queue) = self.lock_for(room) else { return Ok(Pushed::Full) };
        queue.append_chunk(framing, body).map(|bytes| self.added(&mut queue, bytes, room))
    }

    /// The same for a message that could have gone to any connection. `repeatable`: also when this one failed while it
    /// was being sent.
    pub(crate) fn push_movable(
        &self,
        framing: &MessageFraming,
        room: Room,
        body: &[u8],
        repeatable: bool,
    ) -> Result<Pushed, FramingError> {
        let Some(mut queue) = self.lock_for(room) else { return Ok(Pushed::Full) };
        let bytes = queue.append(framing, |tail| tail.extend_from_slice(body))?;
        let (start, end) = (queue.end, queue.end + bytes as u64);
        let header_bytes = match framing {
            MessageFraming::Native(framing) => framing.reply_header_bytes() as u64,
            MessageFraming::Program(_) => 0,
        };
        let place = start + header_bytes..start + header_bytes + body.len() as u64;
        queue.movable.push_back(Movable { start, end, body: place, copy: repeatable.then(|| body.to_vec()) });
        Ok(self.added(&mut queue, bytes, room))
    }

    /// Appends whatever a service wrote, framing included; `output` is empty then.
    pub(crate) fn append(&self, output: &mut Output) {
        let bytes = output.len();
        if bytes == 0 {
            return;
        }
        let mut queue = self.lock();
        let Queue { output: waiting, spares: of_queue, .. } = &mut *queue;
        waiting.add(output, of_queue);
        self.added(&mut queue, bytes, Room::Reserved(0));
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
                        queue.spares.free_beyond(SPARE_BYTES_MAX);
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
                    sender.sent_of_batch += bytes;
                    let mut queue = self.lock();
                    batch.advance(bytes, &mut queue.spares);
                    let sent = sender.sent;
                    while queue.movable.pop_front_if(|message| message.end <= sent).is_some() {}
                    if batch.is_empty()
                        && let Some(batch) = sender.batch.take()
                    {
                        batch.recycle(&mut queue.spares);
                        let bytes = std::mem::take(&mut sender.sent_of_batch);
                        self.bytes.fetch_sub(bytes, Ordering::SeqCst);
                        self.total.fetch_sub(bytes, Ordering::SeqCst);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // The socket asks for room from here on (SOCK_NOSPACE). The thread that gets that event sends if it sees
                    // the flag; it may have come before the flag was up, so this tries again with the flag up. An event
                    // that comes before this thread lets go of the sender is announced.
                    if self.blocked.swap(true, Ordering::SeqCst) {
                        return Sent::Blocked(*total);
                    }
                }
                Err(errno) => {
                    self.failed.store(true, Ordering::SeqCst);
                    sender.errno = Some(errno.raw_os_error());
                    return Sent::Failed(errno.raw_os_error());
                }
            }
        }
    }

    /// The error of the socket that ended sending. Waits for a thread that is sending.
    pub(crate) fn send_error(&self) -> Option<i32> {
        self.sender.lock().errno
    }

    /// Ends sending for good. Returns the socket, and the bytes that are not sent.
    pub(crate) fn stop(&self) -> (Option<Arc<T>>, Vec<u8>) {
        let mut sender = self.sender.lock();
        let mut queue = self.lock();
        queue.closed = true;
        let rest = unsent(sender.batch.take(), &mut queue);
        self.forget_bytes();
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
        self.forget_bytes();
        self.blocked.store(false, Ordering::SeqCst);
        let mut leftover = Leftover::default();
        for message in std::mem::take(&mut queue.movable) {
            match message.copy {
                Some(copy) => leftover.movable.push((copy, true)),
                // It was not begun: the peer cannot have seen any of it.
                None if message.start >= sent => {
                    let range = (message.body.start - sent) as usize..(message.body.end - sent) as usize;
                    leftover.movable.push((rest[range].to_vec(), false));
                }
                None => leftover.uncertain += 1,
            }
        }
        leftover
    }

    /// Counts what was appended, or drops it.
    fn added(&self, queue: &mut Queue, bytes: usize, room: Room) -> Pushed {
        queue.end += bytes as u64;
        if queue.closed {
            queue.output.take().recycle(&mut queue.spares);
            queue.movable.clear();
            return Pushed::Ended;
        }
        let reserved = if let Room::Reserved(bytes) = room { bytes } else { 0 };
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        // In one step, which wraps around where the message is shorter: the sum never has both, and never neither.
        self.total.fetch_add(bytes.wrapping_sub(reserved), Ordering::SeqCst);
        Pushed::Queued
    }

    /// The queue, if it takes a message. A queue that has ended takes what is dropped then.
    fn lock_for(&self, room: Room) -> Option<crate::sync::MutexGuard<'_, Queue>> {
        let queue = self.lock();
        let takes = match room {
            Room::Below(bytes_max) => queue.closed || self.bytes() < bytes_max,
            Room::Reserved(_) => true,
        };
        takes.then_some(queue)
    }

    /// Nothing waits any more. Called under the locks of the sender and the queue, which all that count have.
    fn forget_bytes(&self) {
        let bytes = self.bytes.swap(0, Ordering::SeqCst);
        self.total.fetch_sub(bytes, Ordering::SeqCst);
    }

    fn lock(&self) -> crate::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Queue {
    fn append(&mut self, framing: &MessageFraming, write: impl FnOnce(&mut Vec<u8>)) -> Result<usize, FramingError> {
        let draft = Draft::new(self.output.tail(&mut self.spares));
        match framing {
            MessageFraming::Native(framing) => {
                framing.begin_reply(draft.tail);
                write(draft.tail);
                framing.finish_reply(draft.tail, draft.start, 0)?;
                draft.tail.extend_from_slice(framing.reply_trailer());
            }
            MessageFraming::Program(_) => write(draft.tail),
        }
        Ok(draft.finish())
    }

    fn append_chunk(&mut self, framing: &MessageFraming, body: Chunk) -> Result<usize, FramingError> {
        let mut bytes = body.len();
        if let MessageFraming::Native(framing) = framing {
            let tail = self.output.tail(&mut self.spares);
            let start = tail.len();
            framing.begin_reply(tail);
            if let Err(error) = framing.finish_reply(tail, start, body.len()) {
                tail.truncate(start);
                return Err(error);
            }
            bytes += tail.len() - start + framing.reply_trailer().len();
        }
        self.output.push_chunk(body, &mut self.spares);
        if let MessageFraming::Native(framing) = framing {
            self.output.tail(&mut self.spares).extend_from_slice(framing.reply_trailer());
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

/// A message that is being written. Until it is whole it is taken back: when it does not fit its framing, and when
/// the thread that writes it panics.
struct Draft<'a> {
    tail: &'a mut Vec<u8>,
    start: usize,
    is_whole: bool,
}

impl<'a> Draft<'a> {
    fn new(tail: &'a mut Vec<u8>) -> Self {
        let start = tail.len();
        Self { tail, start, is_whole: false }
    }

    /// It is whole. Its bytes.
    fn finish(mut self) -> usize {
        self.is_whole = true;
        self.tail.len() - self.start
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if !self.is_whole {
            self.tail.truncate(self.start);
        }
    }
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

/// Whether a queue moves, for a thread that looks at it at intervals.
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

#[cfg(test)]
mod tests {
    use ksf::framing::{Delimiter, Framing, LengthPrefix};

    use super::*;

    /// Takes any message.
    const ANY: Room = Room::Reserved(0);

    /// Takes `room` bytes, then none; `broken`: fails instead.
    #[derive(Debug, Default)]
    struct Peer {
        arrived: Mutex<Vec<u8>>,
        room: AtomicUsize,
        broken: AtomicBool,
        tries: AtomicUsize,
    }

    impl Transmit for Peer {
        fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno> {
            self.tries.fetch_add(1, Ordering::SeqCst);
            let mut slices = [&[][..]; 8];
            let filled = batch.slices(&mut slices);
            let bytes = slices[..filled].concat();
            let take = bytes.len().min(self.room.load(Ordering::SeqCst));
            self.room.fetch_sub(take, Ordering::SeqCst);
            if take == 0 {
                return Err(if self.broken.load(Ordering::SeqCst) { Errno::PIPE } else { Errno::AGAIN });
            }
            self.arrived.lock().unwrap().extend_from_slice(&bytes[..take]);
            Ok(take)
        }
    }

    fn out_queue(room: usize) -> (Arc<Peer>, OutQueue<Peer>) {
        let peer = Arc::new(Peer { room: AtomicUsize::new(room), ..Peer::default() });
        (Arc::clone(&peer), OutQueue::new(peer, Arc::default()))
    }

    fn two_bytes() -> MessageFraming {
        Framing::LengthPrefix(LengthPrefix::big_endian(2)).into()
    }

    #[test]
    fn messages_of_all_kinds_leave_whole_and_in_order_however_little_is_taken() {
        for room in 1..20 {
            let (peer, out_queue) = out_queue(0);
            assert_eq!(out_queue.push(&two_bytes(), ANY, |tail| tail.extend_from_slice(b"one")), Ok(Pushed::Queued));
            assert_eq!(out_queue.push_chunk(&two_bytes(), ANY, Chunk::from_vec(b"two".to_vec())), Ok(Pushed::Queued));
            let lines = Framing::Delimiter(Delimiter::CRLF).into();
            assert_eq!(out_queue.push_chunk(&lines, ANY, Chunk::from_vec(b"three".to_vec())), Ok(Pushed::Queued));
            assert_eq!(out_queue.push_movable(&lines, ANY, b"four", false), Ok(Pushed::Queued));
            let expected = b"\0\x03one\0\x03twothree\r\nfour\r\n";
            assert_eq!((out_queue.bytes(), out_queue.sent()), (expected.len(), 0));
            let mut counted = 0;
            for round in 0..=expected.len().div_ceil(room) {
                peer.room.store(room, Ordering::SeqCst);
                match out_queue.send() {
                    Sent::All(bytes) => counted += bytes,
                    Sent::Blocked(bytes) => {
                        counted += bytes;
                        assert!(out_queue.is_blocked() && out_queue.bytes() > 0, "round {round} with room for {room}");
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(*peer.arrived.lock().unwrap(), expected, "room for {room}");
            assert_eq!((out_queue.bytes(), out_queue.sent(), counted), (0, expected.len(), expected.len()));
            assert!(!out_queue.is_blocked());
        }
    }

    #[test]
    fn a_queue_that_is_full_takes_no_more_until_what_left_together_is_sent() {
        let (peer, out_queue) = out_queue(0);
        let total = Arc::clone(&out_queue.total);
        let push = |body: &[u8]| out_queue.push(&two_bytes(), Room::Below(6), |tail| tail.extend_from_slice(body));
        assert_eq!(
            [push(b"abc"), push(b"defg"), push(b"")],
            [Ok(Pushed::Queued), Ok(Pushed::Queued), Ok(Pushed::Full)]
        );
        assert_eq!(out_queue.push_chunk(&two_bytes(), Room::Below(6), Chunk::from_vec(vec![1])), Ok(Pushed::Full));
        assert_eq!(out_queue.push_movable(&two_bytes(), Room::Below(6), b"h", true), Ok(Pushed::Full));
        assert_eq!((out_queue.bytes(), total.load(Ordering::SeqCst)), (11, 11));
        peer.room.store(6, Ordering::SeqCst);
        assert_eq!(out_queue.send(), Sent::Blocked(6));
        // The memory of what left together is free when all of it has left.
        assert_eq!(push(b"h"), Ok(Pushed::Full));
        assert_eq!((out_queue.bytes(), total.load(Ordering::SeqCst)), (11, 11));
        peer.room.store(5, Ordering::SeqCst);
        assert_eq!(out_queue.send(), Sent::All(5));
        assert_eq!(push(b"h"), Ok(Pushed::Queued));
        assert_eq!((out_queue.bytes(), total.load(Ordering::SeqCst)), (3, 3));
        // What is thrown away is counted no longer, and after that nothing is.
        assert_eq!(out_queue.stop().1, b"\0\x01h"[..]);
        assert_eq!((push(b""), out_queue.bytes(), total.load(Ordering::SeqCst)), (Ok(Pushed::Ended), 0, 0));
    }

    #[test]
    fn a_message_replaces_what_was_reserved_for_it() {
        let (_, out_queue) = out_queue(0);
        let total = Arc::clone(&out_queue.total);
        total.store(10, Ordering::SeqCst);
        let push =
            |reserved| out_queue.push(&two_bytes(), Room::Reserved(reserved), |tail| tail.extend_from_slice(b"abc"));
        // Shorter than expected, and longer.
        assert_eq!((push(7), total.load(Ordering::SeqCst)), (Ok(Pushed::Queued), 3 + 5));
        assert_eq!((push(3), total.load(Ordering::SeqCst)), (Ok(Pushed::Queued), 5 + 5));
        assert_eq!(out_queue.bytes(), 10);
        // Nothing is queued: the reservation stays.
        total.fetch_add(9, Ordering::SeqCst);
        out_queue.fail();
        assert_eq!((push(9), total.load(Ordering::SeqCst)), (Ok(Pushed::Ended), 9));
    }

    #[test]
    fn what_does_not_fit_its_framing_leaves_no_trace() {
        let (peer, out_queue) = out_queue(100);
        let one_byte = Framing::LengthPrefix(LengthPrefix::big_endian(1)).into();
        out_queue.push(&one_byte, ANY, |tail| tail.push(b'a')).unwrap();
        out_queue.push(&one_byte, ANY, |tail| tail.extend_from_slice(&[0; 256])).unwrap_err();
        out_queue.push_chunk(&one_byte, ANY, Chunk::from_vec(vec![0; 256])).unwrap_err();
        out_queue.push_movable(&one_byte, ANY, &[0; 256], true).unwrap_err();
        out_queue.push(&one_byte, ANY, |tail| tail.push(b'b')).unwrap();
        assert_eq!(out_queue.send(), Sent::All(4));
        assert_eq!(*peer.arrived.lock().unwrap(), b"\x01a\x01b");
        assert!(out_queue.fail().movable.is_empty());
    }

    #[test]
    fn a_panic_while_a_message_is_written_leaves_nothing_of_it() {
        let (peer, out_queue) = out_queue(100);
        let push = |write: fn(&mut Vec<u8>)| out_queue.push(&two_bytes(), ANY, write);
        push(|tail| tail.push(b'a')).unwrap();
        let torn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = push(|tail| {
                tail.push(b'x');
                std::panic::resume_unwind(Box::new(()));
            });
        }));
        assert!(torn.is_err());
        push(|tail| tail.push(b'b')).unwrap();
        assert_eq!(out_queue.send(), Sent::All(6));
        assert_eq!(*peer.arrived.lock().unwrap(), b"\0\x01a\0\x01b");
    }

    #[test]
    fn no_room_is_met_twice_before_it_is_believed_and_once_while_it_is_known() {
        let (peer, out_queue) = out_queue(0);
        out_queue.push(&two_bytes(), ANY, |_| ()).unwrap();
        assert_eq!(out_queue.send(), Sent::Blocked(0));
        assert_eq!(peer.tries.swap(0, Ordering::SeqCst), 2);
        assert_eq!(out_queue.send(), Sent::Blocked(0));
        assert_eq!(peer.tries.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_failed_connection_returns_what_the_peer_cannot_have_seen() {
        // Whole, begun, begun and repeatable, not begun; one in between that only this peer could have.
        for (room, movable, uncertain) in [
            (0, vec![(&b"aa"[..], false), (b"bb", false), (b"dd", true)], 0),
            (1, vec![(b"bb", false), (b"dd", true)], 1),
            (4, vec![(b"bb", false), (b"dd", true)], 0),
            (7, vec![(b"dd", true)], 1),
            (8, vec![(b"dd", true)], 0),
            (14, vec![(b"dd", true)], 0),
            (15, vec![(b"dd", true)], 0),
            (16, vec![], 0),
        ] {
            let (peer, out_queue) = out_queue(room);
            peer.broken.store(true, Ordering::SeqCst);
            out_queue.push_movable(&two_bytes(), ANY, b"aa", false).unwrap();
            out_queue.push_movable(&two_bytes(), ANY, b"bb", false).unwrap();
            out_queue.push(&two_bytes(), ANY, |tail| tail.extend_from_slice(b"cc")).unwrap();
            out_queue.push_movable(&two_bytes(), ANY, b"dd", true).unwrap();
            let sent = out_queue.send();
            assert!(matches!(sent, Sent::Failed(_)) || (room == 16 && sent == Sent::All(16)), "{sent:?}");
            let leftover = out_queue.fail();
            let returned: Vec<_> = leftover.movable.iter().map(|(body, repeatable)| (&body[..], *repeatable)).collect();
            assert_eq!((returned, leftover.uncertain), (movable, uncertain), "{room} bytes were sent");
            assert_eq!(out_queue.bytes(), 0);
            let again = out_queue.fail();
            assert!(again.movable.is_empty() && again.uncertain == 0, "returned twice");
        }
    }

    #[test]
    fn after_the_end_messages_are_refused() {
        let (peer, out_queue) = out_queue(3);
        out_queue.push_movable(&two_bytes(), ANY, b"aa", true).unwrap();
        assert_eq!(out_queue.send(), Sent::Blocked(3));
        out_queue.push(&two_bytes(), ANY, |tail| tail.push(b'b')).unwrap();
        let (socket, unsent) = out_queue.stop();
        assert!(socket.is_some_and(|socket| Arc::ptr_eq(&socket, &peer)) && out_queue.socket().is_none());
        assert_eq!(unsent, b"a\0\x01b");
        peer.room.store(100, Ordering::SeqCst);
        assert_eq!(out_queue.push(&two_bytes(), ANY, |tail| tail.push(b'c')), Ok(Pushed::Ended));
        assert_eq!(out_queue.push_chunk(&two_bytes(), ANY, Chunk::from_vec(vec![1])), Ok(Pushed::Ended));
        assert_eq!(out_queue.push_movable(&two_bytes(), ANY, b"c", true), Ok(Pushed::Ended));
        assert_eq!((out_queue.send(), out_queue.bytes()), (Sent::All(0), 0));
        assert_eq!(*peer.arrived.lock().unwrap(), b"\0\x02a");
        let (_, unsent) = out_queue.stop();
        assert!(unsent.is_empty(), "returned twice");
    }

    #[test]
    fn a_queue_is_overdue_when_nothing_moves() {
        let mut progress = SendProgress::default();
        let at = |ms: u64| Time(ms * 1_000_000);
        assert!(!progress.is_overdue(5, 0, at(0), 10));
        assert!(!progress.is_overdue(5, 0, at(10), 10));
        assert!(progress.is_overdue(5, 0, at(11), 10));
        assert!(!progress.is_overdue(5, 0, at(11), 0), "0: for ever");
        assert!(!progress.is_overdue(5, 1, at(12), 10), "one byte moved");
        assert!(progress.is_overdue(5, 1, at(23), 10));
        assert!(!progress.is_overdue(0, 1, at(24), 10), "nothing waits");
        assert!(!progress.is_overdue(5, 1, at(30), 10));
    }
}
