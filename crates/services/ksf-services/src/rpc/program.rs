//! What the author of an RPC program writes.
//!
//! A [`Program`] has no state: it answers each call from what is in the call. A [`ShardProgram`] has state on each shard
//! and of each connection, hears of turn ends and of the operations on files that it began, and lets replies wait behind
//! [gates](ksf::gates). Every [`Program`] is a [`ShardProgram`] without state.

use std::any::Any;
use std::io;
use std::ops::RangeInclusive;

use ksf::files::FileDone;
use ksf::{Peer, Refused};

use super::call::{ProcError, RpcCall};
use super::reply::{Answered, RpcReply};
use super::turn::RpcTurn;

/// A program, or some of its versions, without state: NULL of NFSv3 and of MOUNT.
pub trait Program: Send + Sync + 'static {
    /// Name for people.
    fn name(&self) -> &str;

    /// Program number.
    fn number(&self) -> u32;

    /// The versions this value answers.
    fn versions(&self) -> RangeInclusive<u32>;

    /// Answers a call to one of the versions: at once ([`RpcReply::results`],
    /// [`RpcReply::error`]) or later ([`RpcReply::defer`], [`RpcReply::block`]).
    ///
    /// Each of them takes the reply and gives an [`Answered`] for it, so that a
    /// program can neither forget to answer nor answer twice.
    fn call(&self, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered;

    /// Goes on with a call that was deferred, on the thread of its connection: [`RpcDeferred::resume`] carried `state`
    /// here. Not called if the connection ended.
    ///
    /// [`RpcDeferred::resume`]: super::RpcDeferred::resume
    fn resume(&self, state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered {
        drop(state);
        reply.error(ProcError::SystemErr)
    }
}

/// A program with state on each shard and of each connection: a file server.
///
/// One value serves all shards. The states are made on the shard's own thread, stay there, and are handed to every call
/// without a lock.
pub trait ShardProgram: Send + Sync + 'static {
    /// False if [`turn_end`](Self::turn_end) need not be called.
    const HAS_TURN_END: bool = true;

    /// State of one shard.
    type Shard: 'static;
    /// State of one connection, or of one datagram socket: a table of open files, for instance.
    type Conn: 'static;

    /// Name for people.
    fn name(&self) -> &str;

    /// Program number.
    fn number(&self) -> u32;

    /// The versions this value answers.
    fn versions(&self) -> RangeInclusive<u32>;

    /// True when the program keeps arguments beyond the call ([`RpcCall::keep`]): those that did not arrive in one slot
    /// are then kept without a further copy.
    fn keeps_messages(&self) -> bool {
        false
    }

    /// Makes the state of a shard, on its thread, before it accepts anything.
    ///
    /// # Errors
    ///
    /// The program cannot work here; the server does not start.
    fn start(&self, turn: &mut RpcTurn<'_, '_>) -> io::Result<Self::Shard>;

    /// A connection was accepted, or a datagram socket opened; which programs its peer will call is not known yet.
    ///
    /// # Errors
    ///
    /// [`Refused`]: the connection is closed, for all programs of the table, and counted.
    fn accept(&self, shard: &mut Self::Shard, peer: &Peer) -> Result<Self::Conn, Refused>;

    /// Answers a call: [`Program::call`], with the states.
    fn call(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        call: &RpcCall<'_>,
        reply: RpcReply<'_, '_>,
    ) -> Answered;

    /// Goes on with a call that was deferred, back on its connection: [`RpcDeferred::resume`] or [`RpcTurn::resume`]
    /// carried `state` here. The call may be deferred once more. Not called if the connection ended.
    ///
    /// [`RpcDeferred::resume`]: super::RpcDeferred::resume
    fn resume(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        state: Box<dyn Any + Send>,
        reply: RpcReply<'_, '_>,
    ) -> Answered {
        let _ = (shard, conn, state);
        reply.error(ProcError::SystemErr)
    }

    /// The messages of a turn are through, of all connections; nothing of their replies has left yet. Called only after
    /// turns in which the program was called.
    fn turn_end(&self, shard: &mut Self::Shard, turn: &mut RpcTurn<'_, '_>) {
        let _ = (shard, turn);
    }

    /// An operation ended that the program began with its [`RpcFiles`](super::RpcFiles). Each one ends once, also when
    /// the server stops; only one that the kernel does not let go of in time does not.
    fn file_done(&self, shard: &mut Self::Shard, done: FileDone, turn: &mut RpcTurn<'_, '_>) {
        let _ = (shard, done, turn);
    }

    /// There is room for operations on files again, after one was refused of this program, or of another one of the service:
    /// [`ShardService::files_have_room`](ksf::ShardService::files_have_room).
    fn files_have_room(&self, shard: &mut Self::Shard, turn: &mut RpcTurn<'_, '_>) {
        let _ = (shard, turn);
    }

    /// The connection ended.
    fn close(&self, shard: &mut Self::Shard, conn: Self::Conn) {
        let _ = shard;
        drop(conn);
    }

    /// The shard ends; no connection is left.
    fn stop(&self, shard: Self::Shard) {
        drop(shard);
    }

    /// What answers where there are no shards, which is on [workers](super::RpcOnWorkers). A program that needs its
    /// states has nothing there.
    fn outside_of_shards(&self) -> Option<&dyn Program> {
        None
    }

    /// Counters of the program's own: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

impl<P: Program> ShardProgram for P {
    const HAS_TURN_END: bool = false;

    type Shard = ();
    type Conn = ();

    fn name(&self) -> &str {
        Program::name(self)
    }

    fn number(&self) -> u32 {
        Program::number(self)
    }

    fn versions(&self) -> RangeInclusive<u32> {
        Program::versions(self)
    }

    fn start(&self, _: &mut RpcTurn<'_, '_>) -> io::Result<()> {
        Ok(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    #[inline]
    fn call(&self, (): &mut (), (): &mut (), call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        Program::call(self, call, reply)
    }

    fn resume(&self, (): &mut (), (): &mut (), state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered {
        Program::resume(self, state, reply)
    }

    fn outside_of_shards(&self) -> Option<&dyn Program> {
        Some(self)
    }
}
