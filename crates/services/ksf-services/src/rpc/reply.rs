//! How a program answers: at once, or later.

use std::any::Any;
use std::sync::Arc;

use ksf::deferred::Deferred;
use ksf::files::{FileRange, NoFileReplies};
use ksf::gates::Gate;
use ksf::logged::{After, Logged, Mode, Named, Sends};
use ksf::pool::Chunk;
use ksf::{Pieces, Reply, Turn, Unlogged};
use ksf_proto::oncrpc::{ReplyStatus, put_reply, put_success};
use ksf_proto::xdr::XdrWrite;

use super::call::ProcError;
use super::stats::RpcStats;

/// Proof that a call was answered, or will be.
#[derive(Debug)]
#[must_use]
pub struct Answered(());

/// The answer to one call. Each method that answers takes it and gives an [`Answered`] for it, so that a program can neither
/// forget to answer nor answer twice.
///
/// The mode `M` is that of the service: [`ksf::logged`].
pub struct RpcReply<'a, M: Mode = Unlogged> {
    xid: u32,
    reply: Reply<'a, M>,
    stats: &'a Arc<RpcStats>,
}

impl<'a, M: Mode> RpcReply<'a, M> {
    pub(super) fn new(xid: u32, reply: &'a mut Reply<'_, M>, stats: &'a Arc<RpcStats>) -> Self {
        Self { xid, reply: reply.reborrow(), stats }
    }

    /// For an answer that tells of no data, in any mode: [`Reply::plain`].
    pub fn plain(self) -> RpcReply<'a, Named> {
        let Self { xid, reply, stats } = self;
        RpcReply { xid, reply: reply.into_plain(), stats }
    }

    /// Number of the shard this runs on.
    pub fn shard(&self) -> usize {
        self.reply.shard()
    }

    /// Answers later, from any thread, in any order: an xid says which call is answered. Results of up to `result_bytes` bytes are
    /// taken off the connection's budget until the answer comes ([`Reply::defer_for`]).
    pub fn defer_for(mut self, result_bytes: usize) -> (Answered, RpcDeferred<M::Later>) {
        let deferred = self.reply.defer_for(result_bytes);
        (Answered(()), RpcDeferred { xid: self.xid, deferred, stats: Arc::clone(self.stats) })
    }

    /// Answers from a thread that may block, in a file system for instance, with up to `result_bytes` bytes of results:
    /// [`Reply::block`].
    pub fn block<F>(mut self, result_bytes: usize, task: F) -> Answered
    where
        F: FnOnce(RpcDeferred<M::Later>) + Send + 'static,
    {
        let (xid, stats) = (self.xid, Arc::clone(self.stats));
        self.reply.block(result_bytes, move |deferred| task(RpcDeferred { xid, deferred, stats }));
        Answered(())
    }
}

impl<'a> RpcReply<'a, Logged> {
    /// The answer leaves once `after` is durable: [`Reply::after`].
    pub fn after(self, after: impl Into<After>) -> RpcReply<'a, Named> {
        let Self { xid, reply, stats } = self;
        RpcReply { xid, reply: reply.into_after(after), stats }
    }
}

impl<M: Sends> RpcReply<'_, M> {
    /// Holds the reply until what `gate` names is durable: [`Reply::gate`]. On shards only.
    pub fn gate(&mut self, gate: Gate) {
        self.reply.gate(gate);
    }

    /// Answers SUCCESS with the results that `write` appends; if it fails, what
    /// it wrote is taken back and its error is answered instead.
    ///
    /// `write` must only append: the buffer may hold earlier replies.
    #[inline]
    pub fn results<F>(mut self, write: F) -> Answered
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
    pub fn void(mut self) -> Answered {
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
    pub(super) fn status(mut self, status: ReplyStatus) -> Answered {
        let xid = self.xid;
        self.reply.message(|out| put_reply(out, xid, status));
        self.stats.count_reply(status);
        Answered(())
    }

    /// Answers SUCCESS with results that end in bytes from where they lie: the
    /// data of a read. `write` appends what precedes them; the padding that XDR
    /// asks for is added (RFC 4506 section 4.10).
    pub fn results_with<F>(mut self, write: F, data: Chunk) -> Answered
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
    pub fn results_file<F>(mut self, write: F, range: FileRange) -> Result<Answered, Self>
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
    pub fn results_pieces<F>(mut self, write: F) -> Result<Answered, Self>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        let xid = self.xid;
        match self.reply.pieces(|pieces| ResultPieces::begin(xid, pieces, write)) {
            Ok(()) => Ok(Answered(())),
            Err(NoFileReplies) => Err(self),
        }
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

/// The answer to a call that is given later. Dropping it without an answer
/// closes the connection, see [`Deferred`].
#[derive(Debug)]
pub struct RpcDeferred<M: Mode = Unlogged> {
    xid: u32,
    deferred: Deferred<M>,
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

    /// The same in this turn, on the shard's own thread: without the detour over the mailbox that other threads take.
    pub fn results_in<F>(self, turn: &mut Turn<'_>, write: F)
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let body = self.body(write);
        turn.reply(self.deferred, body);
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

    /// The same in this turn, on the shard's own thread.
    ///
    /// # Errors
    ///
    /// [`RpcReply::results_pieces`]. The answer is still owed.
    pub fn results_pieces_in<F>(self, turn: &mut Turn<'_>, write: F) -> Result<(), Self>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        self.answer_with(|xid, deferred| turn.reply_pieces(deferred, |pieces| ResultPieces::begin(xid, pieces, write)))
    }

    /// Answers by `answer`, which takes the call's xid, and gives back what it does not answer.
    fn answer_with(self, answer: impl FnOnce(u32, Deferred) -> Result<(), Deferred>) -> Result<(), Self> {
        let Self { xid, deferred, stats } = self;
        answer(xid, deferred).map_err(|deferred| Self { xid, deferred, stats })
    }

    /// As [`RpcReply::error`].
    pub fn error(self, error: ProcError) {
        self.results(|_| Err(error));
    }

    /// The body of the reply that these results make; an error is counted.
    fn body<F>(&self, write: F) -> Vec<u8>
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
    fn parts<F>(&self, write: F, data: &Chunk) -> (Vec<u8>, &'static [u8])
    where
        F: FnOnce(&mut Vec<u8>),
    {
        let mut head = Vec::new();
        put_success(&mut head, self.xid);
        write(&mut head);
        (head, padding(data.len()))
    }
}

impl<M: Mode> RpcDeferred<M> {
    /// Goes on with the call on the thread of its connection: [`Service::resume`](ksf::Service::resume) is called there, which hands
    /// `state` to [`ProgramTable::resume`](super::ProgramTable::resume).
    pub fn resume(self, state: impl Any + Send) {
        let Self { xid, deferred, .. } = self;
        deferred.resume(Resumed { xid, state: Box::new(state) });
    }

    /// The same, still in this turn, on the shard's own thread.
    pub fn resume_in(self, turn: &mut Turn<'_>, state: impl Any + Send) {
        let Self { xid, deferred, .. } = self;
        turn.resume(deferred, Box::new(Resumed { xid, state: Box::new(state) }));
    }
}

/// A call on its way back to its connection.
pub(super) struct Resumed {
    pub(super) xid: u32,
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
