//! What a program can do outside of a call, and its operations on files.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ksf::buffers::Buffer;
use ksf::files::{FileDone, FileOp, FileRefused, Files, NoFileReplies};
use ksf::gates::{Gates, LogId, TooManyLogs};
use ksf::limits::Time;
use ksf::pool::Chunk;
use ksf::shard_service::{Releaser, Turn};

use super::call::ProcError;
use super::reply::{ResultPieces, RpcDeferred};

/// What a program can do outside of a call: at its start, at the end of a turn, when a file operation is done.
pub struct RpcTurn<'t, 'env> {
    turn: &'t mut Turn<'env>,
    /// Place of the program in the table.
    program: u32,
    operations: &'t Operations,
}

impl<'t, 'env> RpcTurn<'t, 'env> {
    pub(super) fn new(turn: &'t mut Turn<'env>, program: u32, operations: &'t Operations) -> Self {
        Self { turn, program, operations }
    }

    /// The time, read once per turn.
    pub fn now(&self) -> Time {
        self.turn.now()
    }

    /// Number of the shard.
    pub fn shard(&self) -> usize {
        self.turn.shard()
    }

    /// What was live in the shard's pool when it was opened: [`Turn::take_live`]. The first program that asks gets it.
    pub fn take_live(&mut self) -> Vec<Chunk> {
        self.turn.take_live()
    }

    /// What this program begins operations on files with, on this shard. It is kept in the program's state, and serves
    /// any of its calls.
    pub fn files(&mut self) -> RpcFiles {
        RpcFiles { files: self.turn.files(), program: self.program, operations: self.operations.clone() }
    }

    /// A new log of this program on this shard, of which nothing is released: [`Turn::open_log`]. If a program panics outside
    /// of a call, the logs of all programs of its table on the shard are [lost](ksf::gates).
    ///
    /// # Errors
    ///
    /// [`TooManyLogs`]: the server has all that it may have.
    pub fn open_log(&mut self) -> Result<LogId, TooManyLogs> {
        self.turn.open_log()
    }

    /// How far the logs of the server are durable.
    pub fn gates(&self) -> &Arc<Gates> {
        self.turn.gates()
    }

    /// Says that `log` is durable up to `number`: [`Turn::release`].
    pub fn release(&mut self, log: LogId, number: u64) {
        self.turn.release(log, number);
    }

    /// Releases logs from another thread.
    pub fn releaser(&self) -> Releaser {
        self.turn.releaser()
    }

    /// Answers a deferred call in this turn: [`RpcDeferred::results`] without the detour over the mailbox that other
    /// threads take.
    pub fn results<F>(&mut self, deferred: RpcDeferred, write: F)
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let body = deferred.body(write);
        self.turn.reply(deferred.into_inner(), body);
    }

    /// The same with data at the end from where they lie: [`RpcDeferred::results_with`].
    pub fn results_with<F>(&mut self, deferred: RpcDeferred, write: F, data: Chunk)
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let (head, end) = deferred.parts(write, &data);
        self.turn.reply_parts(deferred.into_inner(), head, data, end);
    }

    /// The same with several pieces: [`RpcReply::results_pieces`](super::RpcReply::results_pieces).
    ///
    /// # Errors
    ///
    /// [`RpcDeferred::results_pieces`].
    pub fn results_pieces<F>(&mut self, deferred: RpcDeferred, write: F) -> Result<(), RpcDeferred>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        deferred.answer_with(|xid, deferred| {
            self.turn.reply_pieces(deferred, |pieces| ResultPieces::begin(xid, pieces, write))
        })
    }

    /// Answers a deferred call with an error in this turn.
    pub fn error(&mut self, deferred: RpcDeferred, error: ProcError) {
        self.results(deferred, |_| Err(error));
    }

    /// Goes on with a deferred call on its connection, still in this turn:
    /// [`ShardProgram::resume`](super::ShardProgram::resume).
    pub fn resume(&mut self, deferred: RpcDeferred, state: impl Any + Send) {
        let (deferred, resumed) = deferred.into_resumed(state);
        self.turn.resume(deferred, Box::new(resumed));
    }
}

/// Begins operations on files for one program on one shard. Their ends are told to that program alone, by
/// [`ShardProgram::file_done`](super::ShardProgram::file_done).
#[derive(Clone, Debug)]
pub struct RpcFiles {
    files: Files,
    program: u32,
    operations: Operations,
}

impl RpcFiles {
    /// Begins an operation in this turn. `token` comes back with its end; those of other programs may be the same.
    ///
    /// # Errors
    ///
    /// [`FileRefused`] with the operation: a limit is reached, or the server stops.
    pub fn begin(&self, op: FileOp, token: u64) -> Result<(), Box<FileRefused>> {
        let number = self.operations.add(Owned { program: self.program, token });
        self.files.begin(op, number).inspect_err(|_| {
            self.operations.take(number);
        })
    }

    /// Operations that are under way on the shard, of all services.
    pub fn under_way(&self) -> usize {
        self.files.under_way()
    }

    /// An empty, page-aligned buffer of at least `bytes` bytes, to read into or to write from.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        self.files.buffer(bytes)
    }
}

/// An operation that is under way: whose it is, and what that program knows it by.
#[derive(Clone, Copy, Debug)]
struct Owned {
    program: u32,
    token: u64,
}

/// The operations of all programs on one shard. The framework knows one service, which begins them under numbers of its
/// own; so a program has all 64 bits of its tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Operations(Rc<RefCell<Table>>);

#[derive(Debug, Default)]
struct Table {
    /// By their numbers. It grows to as many as were under way at once ([`Limits::file_ops_max`] bounds that).
    ///
    /// [`Limits::file_ops_max`]: ksf::limits::Limits::file_ops_max
    places: Vec<Option<Owned>>,
    free: Vec<usize>,
}

impl Operations {
    fn add(&self, owned: Owned) -> u64 {
        let mut table = self.0.borrow_mut();
        let at = table.free.pop().unwrap_or(table.places.len());
        if at == table.places.len() {
            table.places.push(None);
        }
        table.places[at] = Some(owned);
        at as u64
    }

    fn take(&self, number: u64) -> Option<Owned> {
        let mut table = self.0.borrow_mut();
        let at = number as usize;
        let owned = table.places.get_mut(at)?.take()?;
        table.free.push(at);
        Some(owned)
    }

    /// The program that began an operation, and the end as the program knows it.
    pub(super) fn ended(&self, done: FileDone) -> Option<(usize, FileDone)> {
        let Owned { program, token } = self.take(done.token)?;
        Some((program as usize, FileDone { token, ..done }))
    }
}
