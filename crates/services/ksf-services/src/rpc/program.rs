//! What the author of an RPC program writes, and how it answers.

use std::ops::RangeInclusive;
use std::sync::Arc;

use ksf::Reply;
use ksf::deferred::Deferred;
use ksf_proto::oncrpc::{Accepted, AuthStat, Call, Denied, ReplyStatus, put_reply, put_success};
use ksf_proto::xdr::XdrError;

use super::stats::RpcStats;

/// A program, or some of its versions: NFSv3, MOUNT.
pub trait Program: Send + Sync + 'static {
    /// Name for people.
    fn name(&self) -> &str;

    /// Program number.
    fn number(&self) -> u32;

    /// The versions this value answers.
    fn versions(&self) -> RangeInclusive<u32>;

    /// Answers a call to one of the versions: at once ([`RpcReply::results`],
    /// [`RpcReply::error`]) or later ([`RpcReply::defer`], [`RpcReply::offload`]).
    ///
    /// Each of them takes the reply and gives an [`Answered`] for it, so that a
    /// program can neither forget to answer nor answer twice.
    fn call(&self, call: &Call<'_>, reply: RpcReply<'_, '_>) -> Answered;
}

/// Why a procedure has no results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProcError {
    /// The program has no such procedure: PROC_UNAVAIL.
    #[error("no such procedure")]
    ProcUnavail,
    /// The arguments cannot be decoded: GARBAGE_ARGS.
    #[error("the arguments cannot be decoded")]
    GarbageArgs,
    /// The server failed: SYSTEM_ERR.
    #[error("the server failed")]
    SystemErr,
    /// The credential is good, but not for this procedure: AUTH_ERROR, most
    /// often [`AuthStat::TOOWEAK`].
    #[error("the credential does not do: {0}")]
    Auth(AuthStat),
}

impl ProcError {
    /// What it is on the wire.
    pub const fn status(self) -> ReplyStatus {
        match self {
            Self::ProcUnavail => ReplyStatus::Accepted(Accepted::ProcUnavail),
            Self::GarbageArgs => ReplyStatus::Accepted(Accepted::GarbageArgs),
            Self::SystemErr => ReplyStatus::Accepted(Accepted::SystemErr),
            Self::Auth(stat) => ReplyStatus::Denied(Denied::AuthError(stat)),
        }
    }
}

/// Arguments that are not what the procedure declares, so that decoding them is
/// a line with a question mark.
impl From<XdrError> for ProcError {
    fn from(_: XdrError) -> Self {
        Self::GarbageArgs
    }
}

/// Proof that a call was answered, or will be.
#[derive(Debug)]
#[must_use]
pub struct Answered(());

/// The answer to one call.
pub struct RpcReply<'a, 'r> {
    xid: u32,
    reply: &'a mut Reply<'r>,
    stats: &'a Arc<RpcStats>,
}

impl<'a, 'r> RpcReply<'a, 'r> {
    pub(super) fn new(xid: u32, reply: &'a mut Reply<'r>, stats: &'a Arc<RpcStats>) -> Self {
        Self { xid, reply, stats }
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
        let deferred = RpcDeferred { xid: self.xid, deferred: self.reply.defer(), stats: Arc::clone(self.stats) };
        (Answered(()), deferred)
    }

    /// Answers from the thread pool of this core. If its queue is full the
    /// answer is SYSTEM_ERR, at once; the framework counts `tasks_refused`.
    pub fn offload<F>(self, task: F) -> Answered
    where
        F: FnOnce(RpcDeferred) + Send + 'static,
    {
        let (xid, stats) = (self.xid, Arc::clone(self.stats));
        let submitted = self.reply.offload(move |deferred| {
            task(RpcDeferred { xid, deferred, stats });
        });
        match submitted {
            Ok(()) => Answered(()),
            Err(_) => self.error(ProcError::SystemErr),
        }
    }
}

/// The answer to a call that is given later. Dropping it without an answer
/// closes the connection, see [`Deferred`].
#[derive(Debug)]
pub struct RpcDeferred {
    xid: u32,
    deferred: Deferred,
    stats: Arc<RpcStats>,
}

impl RpcDeferred {
    /// As [`RpcReply::results`].
    pub fn results<F>(self, write: F)
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        let mut body = Vec::new();
        if let Err(error) = encode(&mut body, self.xid, write) {
            self.stats.count_reply(error.status());
        }
        self.deferred.reply(body);
    }

    /// As [`RpcReply::error`].
    pub fn error(self, error: ProcError) {
        self.results(|_| Err(error));
    }
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
