//! A call as a program sees it, and why it may have no results.

use std::ops::Deref;

use ksf::pool::Chunk;
use ksf::service::ConnKey;
use ksf::{Message, Peer};
use ksf_proto::oncrpc::{Accepted, AuthStat, Call, Denied, ReplyStatus};
use ksf_proto::xdr::XdrError;

/// A call, and what is known of where it came from.
pub struct RpcCall<'a> {
    call: Call<'a>,
    message: &'a Message<'a>,
}

impl<'a> RpcCall<'a> {
    pub(super) fn new(call: Call<'a>, message: &'a Message<'a>) -> Self {
        Self { call, message }
    }

    /// Who sent it.
    pub fn peer(&self) -> Peer {
        self.message.peer()
    }

    /// The connection it came on, or the datagram socket: with peer, xid and
    /// procedure, what a duplicate-request cache knows a call by.
    pub fn key(&self) -> ConnKey {
        self.message.key()
    }

    /// The whole message, as it arrived.
    pub fn message(&self) -> &'a Message<'a> {
        self.message
    }

    /// Keeps a part of the arguments beyond the call, where it was received if
    /// it may stay there: the data of a write, on their way to a file.
    ///
    /// # Panics
    /// If `part` is not a part of [`Call::args`].
    pub fn keep(&self, part: &[u8]) -> Chunk {
        let start = part.as_ptr().addr().wrapping_sub(self.message.bytes().as_ptr().addr());
        self.message.keep_part(start..start.wrapping_add(part.len()))
    }
}

impl<'a> Deref for RpcCall<'a> {
    type Target = Call<'a>;

    fn deref(&self) -> &Call<'a> {
        &self.call
    }
}

/// Why a procedure has no results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProcError {
    /// The program is not served over this transport: PROG_UNAVAIL.
    #[error("no such program over this transport")]
    ProgUnavail,
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
            Self::ProgUnavail => ReplyStatus::Accepted(Accepted::ProgUnavail),
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
