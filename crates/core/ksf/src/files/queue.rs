//! Operations of one shard that the engine does not have yet, and how much is under way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{FileDone, FileError, FileOp, FileOutcome, FileRange, FileRefused, Files, Refusal};
use crate::buffers::Buffers;
use crate::limits::Limits;
use crate::service::ConnKey;

/// Who hears of the end of an operation.
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
    stopping: bool,
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
        Err(Box::new(FileRefused { reason, op }))
    }
}

/// The shard's side of [`Files`]. A shard whose services want none pays a look for it.
#[derive(Debug, Default)]
pub(crate) struct ShardFiles(Option<Arc<Mutex<Queue>>>);

impl ShardFiles {
    pub(crate) fn set_limits(&self, limits: &Limits) {
        if let Some(mut queue) = self.queue() {
            (queue.ops_max, queue.bytes_max) = (limits.file_ops_max, limits.file_bytes_max);
        }
    }

    /// What a service begins operations with.
    pub(crate) fn of(&mut self, owner: Owner, limits: &Limits, buffers: &Buffers) -> Files {
        let queue = Arc::clone(self.0.get_or_insert_default());
        self.set_limits(limits);
        Files { queue, owner, buffers: buffers.clone() }
    }

    /// Begins to read a part of a reply. False: it is refused for now.
    pub(crate) fn read(&mut self, key: ConnKey, range: FileRange, limits: &Limits, buffers: &Buffers) -> bool {
        let into = buffers.take(range.bytes);
        let read = FileOp::read(&range.file, range.offset, range.bytes, into);
        self.of(Owner::Reply(key), limits, buffers).begin(read, 0).is_ok()
    }

    fn queue(&self) -> Option<MutexGuard<'_, Queue>> {
        self.0.as_deref().map(lock)
    }

    /// The next operation for the engine.
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
        }
        (owner, FileDone { token, result, op })
    }
}

/// Nobody contends for it: services and shard use it on one thread. It is a lock because what lends it to them may be made
/// on another thread.
pub(super) fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
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
