//! Operations of one shard that the engine does not have yet, and how much is under way.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{FileDone, FileError, FileOp, FileOutcome, FileRange, FileRefused, Files, Refusal};
use crate::buffers::Buffers;
use crate::limits::Limits;
use crate::service::ConnKey;

/// The receiver of the end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A service of the shard, by its number.
    Service(u32),
    /// A connection: the operation reads a part of a reply.
    Reply(ConnKey),
}

/// Operations of one shard: those the engine does not have yet, and how much is under way.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    begun: VecDeque<Box<Begun>>,
    /// Operations without an end, those in `begun` included.
    pub(super) running: usize,
    bytes: usize,
    ops_max: usize,
    bytes_max: usize,
    /// Those that wait for room, in order, and the bytes that each needs.
    waiting: VecDeque<(Waiter, usize)>,
    /// Services in `waiting`: each is there once.
    refused: Vec<u32>,
    /// There may be more room than when those that wait were looked at.
    changed: bool,
    stopping: bool,
}

/// A connection or service that goes on when there is room. A connection that ended stays in the queue as its key alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// A service that was refused an operation.
    Service(u32),
    /// A connection that was refused to read a part of a reply.
    Reply(ConnKey),
    /// A connection whose messages are not handed over, because its service would be refused.
    Messages(ConnKey),
}

impl Waiter {
    fn conn(self) -> Option<ConnKey> {
        match self {
            Self::Service(_) => None,
            Self::Reply(key) | Self::Messages(key) => Some(key),
        }
    }
}

impl Queue {
    pub(super) fn begin(&mut self, owner: Owner, op: FileOp, token: u64) -> Result<(), Box<FileRefused>> {
        let bytes = op.bytes();
        let reason = if self.stopping {
            Refusal::Stopping
        } else if self.running >= self.ops_max {
            Refusal::Operations { limit: self.ops_max }
        } else if self.bytes > 0 && self.bytes.saturating_add(bytes) > self.bytes_max {
            Refusal::Bytes { limit: self.bytes_max }
        } else {
            self.running += 1;
            self.bytes += bytes;
            self.begun.push_back(Box::new(Begun { owner, token, bytes, op, result: Err(FileError::Cancelled) }));
            return Ok(());
        };
        if !self.stopping {
            // What is longer than that would keep others from the room for which it waits.
            let needs = bytes.min(self.bytes_max / 2);
            match owner {
                Owner::Service(number) if self.refused.contains(&number) => {}
                Owner::Service(number) => {
                    self.refused.push(number);
                    self.waiting.push_back((Waiter::Service(number), needs));
                }
                Owner::Reply(key) => self.waiting.push_back((Waiter::Reply(key), needs)),
            }
        }
        Err(Box::new(FileRefused { reason, op }))
    }
}

impl Queue {
    fn fits(&self, bytes: usize) -> bool {
        self.running < self.ops_max && (self.bytes == 0 || self.bytes.saturating_add(bytes) <= self.bytes_max)
    }

    /// True if what comes next would be refused, or overtake what waits.
    fn is_full(&self) -> bool {
        !self.fits(self.waiting.front().map_or(1, |(_, needs)| *needs))
    }
}

/// The shard's side of [`Files`]. A shard whose services want none pays a look for it.
#[derive(Debug, Default)]
pub(crate) struct ShardFiles {
    queue: Option<Arc<Shared>>,
    taken: bool,
}

impl ShardFiles {
    pub(crate) fn set_limits(&self, limits: &Limits) {
        if let Some(mut queue) = self.queue() {
            // Without one there would be nothing to wait for.
            let limits = (limits.file_ops_max.max(1), limits.file_bytes_max);
            queue.changed |= limits != (queue.ops_max, queue.bytes_max);
            (queue.ops_max, queue.bytes_max) = limits;
        }
    }

    /// What a service begins operations with.
    pub(crate) fn of(&mut self, owner: Owner, limits: &Limits, buffers: &Buffers) -> Files {
        let queue = Arc::clone(self.queue.get_or_insert_default());
        self.set_limits(limits);
        self.taken |= matches!(owner, Owner::Service(_));
        Files { queue, owner, buffers: buffers.clone(), on_its_thread: PhantomData }
    }

    /// True if there may be operations: a service took its [`Files`], or a reply has a range of a file.
    #[inline]
    pub(crate) fn are_used(&self) -> bool {
        self.queue.is_some()
    }

    /// True if a service took its [`Files`] since the last call.
    pub(crate) fn were_taken(&mut self) -> bool {
        mem::take(&mut self.taken)
    }

    /// True while messages that may begin operations are not handed over.
    pub(crate) fn is_full(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.is_full.load(Ordering::Relaxed))
    }

    /// Has this connection go on when there is room.
    pub(crate) fn wait(&self, key: ConnKey) {
        if let Some(mut queue) = self.queue() {
            queue.waiting.push_back((Waiter::Messages(key), 1));
        }
    }

    /// How many wait that may be asked to go on.
    pub(crate) fn waiting(&self) -> usize {
        let Some(mut queue) = self.queue() else { return 0 };
        let changed = mem::take(&mut queue.changed) || queue.running == 0;
        if changed { queue.waiting.len() } else { 0 }
    }

    /// The next to go on, if there is room for the first that waits.
    pub(crate) fn next_to_go_on(&self) -> Option<Waiter> {
        let mut queue = self.queue()?;
        let (_, needs) = *queue.waiting.front()?;
        if !queue.fits(needs) {
            return None;
        }
        let (waiter, _) = queue.waiting.pop_front()?;
        queue.refused.retain(|number| waiter != Waiter::Service(*number));
        Some(waiter)
    }

    /// Forgets those that wait and that `exists` knows no more, once there are more than `most`.
    pub(crate) fn forget_ended(&self, most: usize, exists: impl Fn(ConnKey) -> bool) {
        if let Some(mut queue) = self.queue()
            && queue.waiting.len() > most
        {
            queue.waiting.retain(|(waiter, _)| waiter.conn().is_none_or(&exists));
        }
    }

    /// Begins to read a part of a reply. If it is refused for now, the connection [goes on](Self::next_to_go_on) when there is
    /// room.
    pub(crate) fn read(&mut self, key: ConnKey, range: FileRange, limits: &Limits, buffers: &Buffers) {
        let into = buffers.take(range.bytes);
        let read = FileOp::read(&range.file, range.offset, range.bytes, into);
        let _ = self.of(Owner::Reply(key), limits, buffers).begin(read, 0);
    }

    fn queue(&self) -> Option<Locked<'_>> {
        self.queue.as_deref().map(Shared::lock)
    }

    /// The next operation for the engine.
    #[inline]
    pub(crate) fn next(&self) -> Option<Box<Begun>> {
        self.queue()?.begun.pop_front()
    }

    pub(crate) fn running(&self) -> usize {
        self.queue().map_or(0, |queue| queue.running)
    }

    /// Nothing begins any more.
    pub(crate) fn stop(&self) {
        if let Some(mut queue) = self.queue() {
            queue.stopping = true;
        }
    }

    /// An operation ended: makes room, and returns what its owner is told.
    pub(crate) fn ended(&self, begun: Begun) -> (Owner, FileDone) {
        let Begun { owner, token, bytes, op, result } = begun;
        if let Some(mut queue) = self.queue() {
            queue.running -= 1;
            queue.bytes -= bytes;
            queue.changed = true;
        }
        (owner, FileDone { token, result, op })
    }
}

/// The queue, for services and their shard.
///
/// No thread contends for it: services and shard use it on one thread. It is a lock because what lends it to them may be made
/// on another thread.
#[derive(Debug, Default)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// [`Queue::is_full`]: asked for each message, for which a lock would be dear.
    is_full: AtomicBool,
}

impl Shared {
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { queue: self.queue.lock().unwrap_or_else(PoisonError::into_inner), is_full: &self.is_full }
    }
}

/// The queue, locked. When it is let go of, what is kept beside it is true again.
pub(super) struct Locked<'s> {
    queue: MutexGuard<'s, Queue>,
    is_full: &'s AtomicBool,
}

impl Deref for Locked<'_> {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.is_full.store(self.queue.is_full(), Ordering::Relaxed);
    }
}

/// An operation on its way through an engine. Boxed, so that it moves cheaply between the engine, threads and the shard.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) owner: Owner,
    token: u64,
    bytes: usize,
    pub(crate) op: FileOp,
    pub(crate) result: Result<FileOutcome, FileError>,
}

impl Begun {
    /// Sets the result of a read or a write from what the kernel says.
    pub(crate) fn moved(&mut self, result: Result<usize, Errno>) {
        self.result = match (result, &mut self.op) {
            (Err(errno), _) => Err(errno.into()),
            (Ok(read), FileOp::Read { into, .. }) => {
                into.set_len(into.len() + read);
                Ok(FileOutcome::Bytes(read))
            }
            (Ok(written), FileOp::Write { data, .. }) if written < data.len() => Err(FileError::Short { written }),
            (Ok(bytes), _) => Ok(FileOutcome::Bytes(bytes)),
        };
    }
}
