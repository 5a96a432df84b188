//! The two kinds of connections of a shard, where it does not matter which one it is.

use super::outgoing::Outgoing;
use crate::connection::Connection;
use crate::env::Env;
use crate::error::CloseReason;
use crate::limits::Time;
use crate::pool::Chunk;

/// The protocol of a connection.
pub(super) enum Stream {
    /// A peer's, which a service answers.
    Served(Box<Connection>),
    /// Dialed for one of those.
    Outgoing(Box<Outgoing>),
}

impl Stream {
    pub(super) fn served(&mut self) -> Option<&mut Connection> {
        match self {
            Self::Served(served) => Some(served),
            Self::Outgoing(_) => None,
        }
    }

    pub(super) fn outgoing(&mut self) -> Option<&mut Outgoing> {
        match self {
            Self::Served(_) => None,
            Self::Outgoing(outgoing) => Some(outgoing),
        }
    }

    pub(super) fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        match self {
            Self::Served(served) => served.receive(chunk, env),
            Self::Outgoing(outgoing) => outgoing.receive(chunk, env),
        }
    }

    pub(super) fn peer_closed(&mut self, env: &mut Env) {
        match self {
            Self::Served(served) => served.peer_closed(env),
            Self::Outgoing(outgoing) => outgoing.peer_closed(env),
        }
    }

    pub(super) fn sent(&mut self, bytes: usize, done: bool, env: &mut Env) {
        match self {
            Self::Served(served) => served.sent(bytes, done, env),
            Self::Outgoing(outgoing) => outgoing.sent(bytes, done, env),
        }
    }

    pub(super) fn drain(&mut self, env: &mut Env) {
        match self {
            Self::Served(served) => served.drain(env),
            Self::Outgoing(outgoing) => outgoing.drain(),
        }
    }

    pub(super) fn tick(&mut self, env: &mut Env) -> Option<CloseReason> {
        match self {
            Self::Served(served) => served.tick(env),
            Self::Outgoing(outgoing) => outgoing.tick(env),
        }
    }

    pub(super) fn deadline(&self, env: &Env) -> Option<Time> {
        match self {
            Self::Served(served) => served.deadline(env),
            Self::Outgoing(outgoing) => outgoing.deadline(env),
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        match self {
            Self::Served(served) => served.is_closing(),
            Self::Outgoing(outgoing) => outgoing.finished().is_some(),
        }
    }

    pub(super) fn finished(&self) -> Option<CloseReason> {
        match self {
            Self::Served(served) => served.finished(),
            Self::Outgoing(outgoing) => outgoing.finished(),
        }
    }

    pub(super) fn needs_reset(&self) -> bool {
        match self {
            Self::Served(served) => served.needs_reset(),
            Self::Outgoing(outgoing) => outgoing.needs_reset(),
        }
    }

    pub(super) fn end(self, env: &mut Env) {
        match self {
            Self::Served(served) => served.end(env),
            Self::Outgoing(outgoing) => outgoing.end(env),
        }
    }
}
