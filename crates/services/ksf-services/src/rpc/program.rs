//! What the author of an RPC program writes.

use std::any::Any;
use std::ops::RangeInclusive;

use super::call::{ProcError, RpcCall};
use super::reply::{Answered, RpcReply};

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
    fn call(&self, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered;

    /// Goes on with a call that was deferred, on the thread of its connection:
    /// [`RpcDeferred::resume`] carried `state` here. Not called if the
    /// connection ended.
    fn resume(&self, state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered {
        drop(state);
        reply.error(ProcError::SystemErr)
    }
}
