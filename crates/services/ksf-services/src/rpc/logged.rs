//! Programs that promise durability: every reply says what it depends on, and the compiler sees to it.
//!
//! [`LoggedProgram`] is [`ShardProgram`] with another reply, as [`ksf::logged::LoggedService`] is for services: a
//! [`LoggedRpcReply`] has no method that answers without an [`After`], and a call that was deferred can only be resumed,
//! which leads to a [`LoggedRpcReply`] again.

use std::any::Any;
use std::io;
use std::ops::RangeInclusive;

use ksf::files::{FileDone, FileRange, NoFileReplies};
use ksf::gates::Gate;
use ksf::logged::After;
use ksf::pool::Chunk;
use ksf::{Peer, Refused};

use super::call::{ProcError, RpcCall};
use super::program::ShardProgram;
use super::reply::{Answered, ResultPieces, RpcDeferred, RpcReply};
use super::turn::RpcTurn;

/// A program whose replies wait for logs. [`ProgramTable::register_logged`](super::ProgramTable::register_logged) takes it.
pub trait LoggedProgram: Send + Sync + 'static {
    /// State of one shard: [`ShardProgram::Shard`].
    type Shard: 'static;
    /// State of one connection: [`ShardProgram::Conn`].
    type Conn: 'static;

    /// Name for people.
    fn name(&self) -> &str;

    /// Program number.
    fn number(&self) -> u32;

    /// The versions this value answers.
    fn versions(&self) -> RangeInclusive<u32>;

    /// See [`ShardProgram::keeps_messages`].
    fn keeps_messages(&self) -> bool {
        false
    }

    /// See [`ShardProgram::start`].
    ///
    /// # Errors
    ///
    /// The program cannot work here; the server does not start.
    fn start(&self, turn: &mut RpcTurn<'_, '_>) -> io::Result<Self::Shard>;

    /// See [`ShardProgram::accept`].
    ///
    /// # Errors
    ///
    /// [`Refused`]: the program does not want the connection.
    fn accept(&self, shard: &mut Self::Shard, peer: &Peer) -> Result<Self::Conn, Refused>;

    /// See [`ShardProgram::call`].
    fn call(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        call: &RpcCall<'_>,
        reply: LoggedRpcReply<'_, '_>,
    ) -> Answered;

    /// See [`ShardProgram::resume`].
    fn resume(
        &self,
        shard: &mut Self::Shard,
        conn: &mut Self::Conn,
        state: Box<dyn Any + Send>,
        reply: LoggedRpcReply<'_, '_>,
    ) -> Answered {
        let _ = (shard, conn, state);
        reply.error(After::Nothing, ProcError::SystemErr)
    }

    /// See [`ShardProgram::turn_end`]: here the batch of the turn is written.
    fn turn_end(&self, shard: &mut Self::Shard, turn: &mut RpcTurn<'_, '_>);

    /// See [`ShardProgram::file_done`]: here a batch that is durable is [released](RpcTurn::release).
    fn file_done(&self, shard: &mut Self::Shard, done: FileDone, turn: &mut RpcTurn<'_, '_>) {
        let _ = (shard, done, turn);
    }

    /// See [`ShardProgram::files_have_room`].
    fn files_have_room(&self, shard: &mut Self::Shard, turn: &mut RpcTurn<'_, '_>) {
        let _ = (shard, turn);
    }

    /// See [`ShardProgram::close`].
    fn close(&self, shard: &mut Self::Shard, conn: Self::Conn) {
        let _ = shard;
        drop(conn);
    }

    /// See [`ShardProgram::stop`].
    fn stop(&self, shard: Self::Shard) {
        drop(shard);
    }

    /// See [`ShardProgram::counters`].
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A [`LoggedProgram`] as the table takes it.
pub(super) struct OfLogged<P>(pub(super) P);

impl<P: LoggedProgram> ShardProgram for OfLogged<P> {
    type Shard = P::Shard;
    type Conn = P::Conn;

    fn name(&self) -> &str {
        self.0.name()
    }

    fn number(&self) -> u32 {
        self.0.number()
    }

    fn versions(&self) -> RangeInclusive<u32> {
        self.0.versions()
    }

    fn keeps_messages(&self) -> bool {
        self.0.keeps_messages()
    }

    fn start(&self, turn: &mut RpcTurn<'_, '_>) -> io::Result<P::Shard> {
        self.0.start(turn)
    }

    fn accept(&self, shard: &mut P::Shard, peer: &Peer) -> Result<P::Conn, Refused> {
        self.0.accept(shard, peer)
    }

    fn call(&self, shard: &mut P::Shard, conn: &mut P::Conn, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        self.0.call(shard, conn, call, LoggedRpcReply(reply))
    }

    fn resume(
        &self,
        shard: &mut P::Shard,
        conn: &mut P::Conn,
        state: Box<dyn Any + Send>,
        reply: RpcReply<'_, '_>,
    ) -> Answered {
        self.0.resume(shard, conn, state, LoggedRpcReply(reply))
    }

    fn turn_end(&self, shard: &mut P::Shard, turn: &mut RpcTurn<'_, '_>) {
        self.0.turn_end(shard, turn);
    }

    fn file_done(&self, shard: &mut P::Shard, done: FileDone, turn: &mut RpcTurn<'_, '_>) {
        self.0.file_done(shard, done, turn);
    }

    fn files_have_room(&self, shard: &mut P::Shard, turn: &mut RpcTurn<'_, '_>) {
        self.0.files_have_room(shard, turn);
    }

    fn close(&self, shard: &mut P::Shard, conn: P::Conn) {
        self.0.close(shard, conn);
    }

    fn stop(&self, shard: P::Shard) {
        self.0.stop(shard);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}

/// The answer to one call. Everything that answers says what must be durable first.
pub struct LoggedRpcReply<'a, 'r>(RpcReply<'a, 'r>);

impl<'a, 'r> LoggedRpcReply<'a, 'r> {
    fn after(mut self, after: impl Into<After>) -> RpcReply<'a, 'r> {
        if let After::Gate(gate) = after.into() {
            self.0.gate(gate);
        }
        self.0
    }

    /// Adds a further log to wait for: a reply that saw what several logs wrote. A reply that is deferred says what it waits
    /// for when its call goes on.
    pub fn also_after(&mut self, gate: Gate) {
        self.0.gate(gate);
    }

    /// As [`RpcReply::results`], once `after` is durable.
    pub fn results<F>(self, after: impl Into<After>, write: F) -> Answered
    where
        F: FnOnce(&mut Vec<u8>) -> Result<(), ProcError>,
    {
        self.after(after).results(write)
    }

    /// As [`RpcReply::void`], once `after` is durable.
    pub fn void(self, after: impl Into<After>) -> Answered {
        self.after(after).void()
    }

    /// As [`RpcReply::results_with`], once `after` is durable.
    pub fn results_with<F>(self, after: impl Into<After>, write: F, data: Chunk) -> Answered
    where
        F: FnOnce(&mut Vec<u8>),
    {
        self.after(after).results_with(write, data)
    }

    /// As [`RpcReply::results_file`], once `after` is durable.
    ///
    /// # Errors
    ///
    /// The reply comes back, and still waits for `after`: see [`RpcReply::results_file`].
    pub fn results_file<F>(self, after: impl Into<After>, write: F, range: FileRange) -> Result<Answered, Self>
    where
        F: FnOnce(&mut Vec<u8>),
    {
        self.after(after).results_file(write, range).map_err(Self)
    }

    /// As [`RpcReply::results_pieces`], once `after` is durable.
    ///
    /// # Errors
    ///
    /// The reply comes back, and still waits for `after`: see [`RpcReply::results_pieces`].
    pub fn results_pieces<F>(self, after: impl Into<After>, write: F) -> Result<Answered, Self>
    where
        F: FnOnce(&mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies>,
    {
        self.after(after).results_pieces(write).map_err(Self)
    }

    /// As [`RpcReply::error`], once `after` is durable: an error may tell of data, too.
    pub fn error(self, after: impl Into<After>, error: ProcError) -> Answered {
        self.after(after).error(error)
    }

    /// Goes on later, for results of up to `result_bytes` bytes: [`RpcReply::defer_for`].
    pub fn defer_for(self, result_bytes: usize) -> (Answered, LoggedRpcDeferred) {
        let (answered, deferred) = self.0.defer_for(result_bytes);
        (answered, LoggedRpcDeferred(deferred))
    }

    /// Number of the shard this runs on.
    pub fn shard(&self) -> usize {
        self.0.shard()
    }
}

/// The right, and the duty, to go on with a call. It can be resumed; it cannot be answered past the gate.
#[derive(Debug)]
pub struct LoggedRpcDeferred(RpcDeferred);

impl LoggedRpcDeferred {
    /// Goes on from any thread: [`RpcDeferred::resume`].
    pub fn resume(self, state: impl Any + Send) {
        self.0.resume(state);
    }

    /// Goes on in this turn, on the shard's own thread: [`RpcTurn::resume`].
    pub fn resume_in(self, turn: &mut RpcTurn<'_, '_>, state: impl Any + Send) {
        turn.resume(self.0, state);
    }
}
