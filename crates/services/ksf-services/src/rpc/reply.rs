//! How a program answers: at once, or later.

use std::any::Any;
use std::sync::Arc;

use ksf::deferred::Deferred;
use ksf::files::{FileRange, NoFileReplies};
use ksf::gates::Gate;
use ksf::pool::Chunk;
use ksf::{Pieces, Reply};
use ksf_proto::oncrpc::{ReplyStatus, put_reply, put_success};
use ksf_proto::xdr::XdrWrite;

use super::call::ProcError;
use super::stats::RpcStats;

/// Proof that a call was answered, or will be.
#[derive(Debug)]
#[must_use]
pub struct Answered(());

/// The answer to one call.
pub struct RpcReply<'a, 'r> {
    xid: u32,
    /// Place of the program in the table.
    program: u32,
    reply: &'a mut Reply<'r>,
    stats: &'a Arc<RpcStats>,
}

impl<'a, 'r> RpcReply<'a, 'r> {
    pub(super) fn new(xid: u32, program: u32, reply: &'a mut Reply<'r>, stats: &'a Arc<RpcStats>) -> Self {
        Self { xid, program, reply, stats }
    }

    /// Holds the reply until what `gate` names is durable: [`Reply::gate`]. On shards only. A program all of whose
    /// replies wait is a [`LoggedProgram`](super::LoggedProgram) instead, in which none can pass the gate.
    pub fn gate(&mut self, gate: Gate) {
        self.reply.gate(gate);
    }

    /// Number of the shard this runs on.
    pub fn shard(&self) -> usize {
        self.reply.shard()
    }

    /// Answers SUCCESS with the results that `write` appends; if it fails, what
    /// it wrote is taken back and its error is answered instead.
    ///
    /// `write` must only append: the buffer may hold earlier replies.
    #[inline]
    pub fn results<F>(self, write: F) -> Answered
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let xid = self.xid;
        let result = self.reply.message(|out| encode(out, xid, write));
        if let Err(error) = result {
            self.stats.count_reply(error.status());
        }
        Answered(())
    }

    /// Answers SUCCESS without results.
    #[inline]
    pub fn void(self) -> Answered {
        let xid = self.xid;
        self.reply.message(|out| put_success(out, xid));
        Answered(())
    }

    /// Answers an error.
    #[cold]
    pub fn error(self, error: ProcError) -> Answered {
        self.status(error.status())
    }

    /// Answers any status but SUCCESS.
    #[cold]
    pub(super) fn status(self, status: ReplyStatus) -> Answered {
        let xid = self.xid;
        self.reply.message(|out| put_reply(out, xid, status));
        self.stats.count_reply(status);
        Answered(())
    }

    /// Answers later, from any thread, in any order: an xid says what is answered.
    pub fn defer(self) -> (Answered, RpcDeferred) {
        let deferred = self.reply.defer();
        (Answered(()), Origin::of(&self).deferred(deferred))
    }

    /// The same for results of up to `result_bytes` bytes, which are taken off
    /// the connection's budget until the answer comes ([`Reply::defer_for`]).
    pub fn defer_for(self, result_bytes: usize) -> (Answered, RpcDeferred) {
        let deferred = self.reply.defer_for(result_bytes);
        (Answered(()), Origin::of(&self).deferred(deferred))
    }

    /// Answers SUCCESS with results that end in bytes from where they lie: the
    /// data of a read. `write` appends what precedes them; the padding that XDR
    /// asks for is added (RFC 4506 section 4.10).
    pub fn results_with<F>(self, write: F, data: Chunk) -> Answered
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let (xid, end) = (self.xid, padding(data.len()));
        let head = |out: &mut Vec<u8>| {
            put_success(out, xid);
            write(out);
        };
        self.reply.parts(head, data, end);
        Answered(())
    }

    /// Answers SUCCESS with results that end in a range of a file: the data of a read, which the shard reads while the
    /// connection sends ([`Reply::file`]). `write` appends what precedes them, their length included; the padding that
    /// XDR asks for is added. If the file turns out to be shorter than the range, the connection is reset.
    ///
    /// # Errors
    ///
    /// The reply comes back where files cannot be sent, which is for datagrams and on workers: the program reads the
    /// file itself, into a buffer.
    pub fn results_file<F>(self, write: F, range: FileRange) -> Result<Answered, Self>
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let (xid, end) = (self.xid, padding(range.bytes));
        let head = |out: &mut Vec<u8>| {
            put_success(out, xid);
            write(out);
        };
        match self.reply.file(head, range, end) {
            Ok(()) => Ok(Answered(())),
            Err(NoFileReplies) => Err(self),
        }
    }

    /// Answers SUCCESS with results of several pieces, each of which leaves from where it lies: the entries of a directory
    /// with their data, or a read that several buffers hold.
    ///
    /// # Errors
    ///
    /// `write` failed, because a range of a file was among the pieces and files cannot be sent here: see
    /// [`RpcReply::results_file`]. The reply comes back, and nothing was sent.
    pub fn results_pieces<F>(self, write: F) -> Result<Answered, Self>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        let xid = self.xid;
        match self.reply.pieces(|pieces| ResultPieces::begin(xid, pieces, write)) {
            Ok(()) => Ok(Answered(())),
            Err(NoFileReplies) => Err(self),
        }
    }

    /// Answers from a thread that may block, in a file system for instance, with
    /// up to `result_bytes` bytes of results: [`Reply::block`].
    pub fn block<F>(self, result_bytes: usize, task: F) -> Answered
    where
        F: FnOnce(RpcDeferred) + Send + 'static,
    {
        let origin = Origin::of(&self);
        self.reply.block(result_bytes, move |deferred| task(origin.deferred(deferred)));
        Answered(())
    }
}

/// The pieces of a call's results, in the order of their XDR.
#[derive(Debug)]
pub struct ResultPieces<'a, 'r>(&'a mut Pieces<'r>);

impl<'a, 'r> ResultPieces<'a, 'r> {
    /// Adds the head of a reply with SUCCESS, and what `write` adds.
    pub(super) fn begin<F>(xid: u32, pieces: &'a mut Pieces<'r>, write: F) -> Result<(), NoFileReplies>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        pieces.write(|out| put_success(out, xid));
        write(&mut ResultPieces(pieces))
    }

    /// Adds what `write` appends to the buffer.
    pub fn write<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.0.write(write)
    }

    /// Adds opaque data of variable length (RFC 4506 section 4.10): their length, the data from where they lie, padding.
    pub fn opaque(&mut self, data: Chunk) {
        let bytes = data.len();
        self.0.write(|out| out.put_u32(bytes as u32));
        self.0.chunk(data);
        self.0.bytes(padding(bytes));
    }

    /// The same for a range of a file.
    ///
    /// # Errors
    ///
    /// [`NoFileReplies`], as [`Pieces::file`]. Nothing was added.
    pub fn opaque_file(&mut self, range: FileRange) -> Result<(), NoFileReplies> {
        let bytes = range.bytes;
        if !self.0.takes_files() {
            return Err(NoFileReplies);
        }
        self.0.write(|out| out.put_u32(bytes as u32));
        self.0.file(range)?;
        self.0.bytes(padding(bytes));
        Ok(())
    }
}

/// What follows opaque data of this length, so that it ends at a multiple of four.
fn padding(bytes: usize) -> &'static [u8] {
    const ZEROS: [u8; 3] = [0; 3];
    &ZEROS[..bytes.next_multiple_of(4) - bytes]
}

/// What must be known of a call to answer it later.
struct Origin {
    xid: u32,
    program: u32,
    stats: Arc<RpcStats>,
}

impl Origin {
    fn of(reply: &RpcReply<'_, '_>) -> Self {
        Self { xid: reply.xid, program: reply.program, stats: Arc::clone(reply.stats) }
    }

    fn deferred(self, deferred: Deferred) -> RpcDeferred {
        let Self { xid, program, stats } = self;
        RpcDeferred { xid, program, deferred, stats }
    }
}

/// The answer to a call that is given later. Dropping it without an answer
/// closes the connection, see [`Deferred`].
#[derive(Debug)]
pub struct RpcDeferred {
    xid: u32,
    program: u32,
    deferred: Deferred,
    stats: Arc<RpcStats>,
}

impl RpcDeferred {
    /// As [`RpcReply::results`].
    pub fn results<F>(self, write: F)
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let body = self.body(write);
        self.deferred.reply(body);
    }

    /// As [`RpcReply::results_with`].
    pub fn results_with<F>(self, write: F, data: Chunk)
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let (head, end) = self.parts(write, &data);
        self.deferred.reply_parts(head, data, end);
    }

    /// As [`RpcReply::results_pieces`].
    ///
    /// # Errors
    ///
    /// [`RpcReply::results_pieces`]. The answer is still owed.
    pub fn results_pieces<F>(self, write: F) -> Result<(), Self>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        self.answer_with(|xid, deferred| deferred.reply_pieces(|pieces| ResultPieces::begin(xid, pieces, write)))
    }

    /// Answers by `answer`, which takes the call's xid, and gives back what it does not answer.
    pub(super) fn answer_with(self, answer: impl FnOnce(u32, Deferred) -> Result<(), Deferred>) -> Result<(), Self> {
        let Self { xid, program, deferred, stats } = self;
        answer(xid, deferred).map_err(|deferred| Self { xid, program, deferred, stats })
    }

    /// Goes on with the call on the thread of its connection: the program's
    /// [`resume`](super::ShardProgram::resume) is called there with `state`.
    pub fn resume(self, state: impl Any + Send) {
        let (deferred, resumed) = self.into_resumed(state);
        deferred.resume(resumed);
    }

    /// As [`RpcReply::error`].
    pub fn error(self, error: ProcError) {
        self.results(|_| Err(error));
    }

    /// The body of the reply that these results make; an error is counted.
    pub(super) fn body<F>(&self, write: F) -> Vec<u8>
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let mut body = Vec::new();
        if let Err(error) = encode(&mut body, self.xid, write) {
            self.stats.count_reply(error.status());
        }
        body
    }

    /// What precedes and what follows `data` in a reply that ends in them.
    pub(super) fn parts<F>(&self, write: F, data: &Chunk) -> (Vec<u8>, &'static [u8])
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let mut head = Vec::new();
        put_success(&mut head, self.xid);
        write(&mut head);
        (head, padding(data.len()))
    }

    pub(super) fn into_inner(self) -> Deferred {
        self.deferred
    }

    pub(super) fn into_resumed(self, state: impl Any + Send) -> (Deferred, Resumed) {
        (self.deferred, Resumed { xid: self.xid, program: self.program, state: Box::new(state) })
    }
}

/// A call on its way back to its connection.
pub(super) struct Resumed {
    pub(super) xid: u32,
    /// Place of its program in the table.
    pub(super) program: u32,
    pub(super) state: Box<dyn Any + Send>,
}

#[inline]
fn encode<F>(out: &mut Vec<u8>, xid: u32, write: F) -> Result<(), ProcError>
where
    F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
{
    let start = out.len();
    put_success(out, xid);
    let result = write(out);
    if let Err(error) = result {
        out.truncate(start);
        put_reply(out, xid, error.status());
    }
    result
}
