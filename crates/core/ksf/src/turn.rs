//! What a service can do outside of a message, and what it hands to other threads.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use crate::deferred::{Answer, Deferred, Mail, Mailbox};
use crate::env::Env;
use crate::files::{Files, NoFileReplies, Owner};
use crate::gates::{Gates, LogId, TooManyLogs};
use crate::limits::Time;
use crate::logged::Mode;
use crate::pool::Chunk;
use crate::service::{ConnKey, Pieces};

/// What a service can do outside of a message: at its start, at the end of a turn, when a file operation is done.
pub struct Turn<'a> {
    pub(crate) env: &'a mut Env,
}

impl<'a> Turn<'a> {
    /// A turn of the shard that `env` belongs to; for code that plays a shard.
    pub fn new(env: &'a mut Env) -> Self {
        Self { env }
    }

    /// The time, read once per turn.
    pub fn now(&self) -> Time {
        self.env.now
    }

    /// Number of the shard.
    pub fn shard(&self) -> usize {
        self.env.shard
    }

    /// Asks for a [turn end](crate::Service::turn_end) at this time or soon after it, though nothing may happen until then. What
    /// the service asked for before on this shard is forgotten; what it asked for is told once.
    pub fn wake_at(&mut self, at: Time) {
        let Env { wakes, service, .. } = &mut *self.env;
        match wakes.iter_mut().find(|(number, _)| number == service) {
            Some((_, known)) => *known = at,
            None => wakes.push((*service, at)),
        }
    }

    /// What was live in the shard's pool when it was opened ([`PoolSpec::live`](crate::pool::PoolSpec::live)), in that order;
    /// for the service that owns it, at its start.
    pub fn take_live(&mut self) -> Vec<Chunk> {
        std::mem::take(&mut self.env.live)
    }

    /// What this service begins operations on files with, on this shard. It is kept in the service's state, and serves any of
    /// its calls.
    pub fn files(&mut self) -> Files {
        let Env { files, service, limits, buffers, .. } = &mut *self.env;
        files.of(Owner::Service(*service), limits, buffers)
    }

    /// Opens a log of this service on this shard: its replies may wait for what is written there. If the service panics in
    /// [`turn_end`](crate::Service::turn_end) or [`file_done`](crate::Service::file_done), its logs on this shard are [lost](crate::gates).
    ///
    /// # Errors
    ///
    /// [`TooManyLogs`]: the server has [`LOGS_MAX`](crate::gates::LOGS_MAX) already.
    pub fn open_log(&mut self) -> Result<LogId, TooManyLogs> {
        let log = self.env.gates.open_log()?;
        self.env.logs.push((self.env.service, log));
        Ok(log)
    }

    /// How far the logs of the server are durable.
    pub fn gates(&self) -> &Arc<Gates> {
        &self.env.gates
    }

    /// Says that `log` is durable up to `number`: the replies that waited for it leave at the end of this turn, those
    /// on other shards as soon as these wake up.
    pub fn release(&mut self, log: LogId, number: u64) {
        let waiting = self.env.gates.release(log, number);
        self.env.wake(waiting);
    }

    /// Releases logs from another thread: a committer's, for instance.
    pub fn releaser(&self) -> Releaser {
        Releaser { gates: Arc::clone(&self.env.gates), shards: Arc::clone(&self.env.shards) }
    }

    /// Wakes this shard from another thread.
    pub fn waker(&self) -> Waker {
        Waker { mailbox: Arc::clone(&self.env.mailbox) }
    }

    /// Ends connections of this shard from another thread, or from a call that is about another one.
    pub fn closer(&self) -> Closer {
        Closer { mailbox: Arc::clone(&self.env.mailbox) }
    }

    /// Answers a deferred message with bytes from where they lie: what a file operation read, for instance.
    pub fn reply_chunk(&mut self, deferred: Deferred, body: Chunk) {
        self.env.answer(deferred, Answer::Chunk(body));
    }

    /// Answers a deferred message with the pieces that `write` adds: [`Reply::pieces`](crate::Reply::pieces).
    ///
    /// # Errors
    ///
    /// [`Deferred::reply_pieces`].
    pub fn reply_pieces(
        &mut self,
        deferred: Deferred,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<(), Deferred> {
        match deferred.collect(&mut self.env.spares, write) {
            Ok(answer) => {
                self.env.answer(deferred, answer);
                Ok(())
            }
            Err(NoFileReplies) => Err(deferred),
        }
    }

    /// Answers a deferred message with this body, without the detour over the mailbox that other threads take.
    pub fn reply(&mut self, deferred: Deferred, body: Vec<u8>) {
        self.env.answer(deferred, Answer::Bytes(body));
    }

    /// Goes on with a deferred message on its connection: [`resume`](crate::Service::resume), still in this turn.
    pub fn resume<M: Mode>(&mut self, deferred: Deferred<M>, state: Box<dyn Any + Send>) {
        self.env.answer(deferred, Answer::Resume(state));
    }
}

/// Releases logs from any thread.
#[derive(Clone, Debug)]
pub struct Releaser {
    gates: Arc<Gates>,
    shards: Arc<OnceLock<Vec<Arc<Mailbox>>>>,
}

impl Releaser {
    /// Says that `log` is durable up to `number`, and wakes the shards whose replies wait for it.
    pub fn release(&self, log: LogId, number: u64) {
        let waiting = self.gates.release(log, number);
        // Before the server has started no reply waits.
        for (shard, mailbox) in self.shards.get().into_iter().flatten().enumerate() {
            if waiting >> shard & 1 == 1 {
                mailbox.post(Mail::Released);
            }
        }
    }
}

/// Ends connections of one shard from any thread.
#[derive(Clone, Debug)]
pub struct Closer {
    mailbox: Arc<Mailbox>,
}

impl Closer {
    /// Ends a connection as soon as its shard hears of it, without waiting for anything: replies that were not sent are lost. It
    /// counts as ended by the service. A connection that is gone is no mistake.
    pub fn close(&self, key: ConnKey) {
        self.mailbox.post(Mail::Close(key));
    }
}

/// Wakes one shard from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    mailbox: Arc<Mailbox>,
}

impl Waker {
    /// The services of the shard get a turn end though nothing happens to them: soon, and once for several calls at a time.
    pub fn wake(&self) {
        self.mailbox.post(Mail::Wake);
    }
}
