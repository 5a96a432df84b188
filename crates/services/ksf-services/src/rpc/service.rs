//! The RPC service: from message to program and back.

use std::any::Any;
use std::io;
use std::sync::Arc;

use ksf::files::FileDone;
use ksf::framing::Framing;
use ksf::{Message, Order, Peer, Profile, Refused, Reply, ShardService, Turn};
use ksf_proto::oncrpc::{Call, CallError, ReplyStatus};

use super::call::RpcCall;
use super::local::{RpcConn, RpcShard};
use super::reply::{Answered, Resumed, RpcReply};
use super::stats::RpcStats;
use super::table::ProgramTable;

/// Serves the programs of a table on shards.
#[derive(Debug)]
pub struct RpcService {
    name: String,
    pub(super) table: ProgramTable,
    pub(super) stats: Arc<RpcStats>,
}

impl RpcService {
    /// A service called `name` in messages and counters.
    pub fn new(name: impl Into<String>, table: ProgramTable) -> Self {
        Self { name: name.into(), table, stats: Arc::default() }
    }

    /// The name in messages and counters.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The programs it serves.
    pub fn table(&self) -> &ProgramTable {
        &self.table
    }

    #[cold]
    pub(super) fn refuse(&self, error: CallError, reply: &mut Reply<'_>) {
        if let CallError::Unanswerable(why) = error {
            self.stats.count_unanswerable(why);
            // For a stream; a datagram is dropped by not answering it.
            reply.close();
        } else if let Some((xid, status)) = error.reply() {
            let Answered { .. } = RpcReply::new(xid, 0, reply, &self.stats).status(status);
        }
    }
}

impl ShardService for RpcService {
    type Shard = RpcShard;
    type Conn = RpcConn;

    fn profile(&self) -> Profile<'_> {
        // RFC 5531 section 9: the xid matches replies with calls, their order does not.
        let order = Order::Free;
        let keeps_messages = self.table.all().any(|program| program.keeps_messages());
        Profile { order, keeps_messages, ..Profile::new(&self.name, Framing::RecordMark) }
    }

    fn has_turn_end(&self) -> bool {
        self.table.all().any(|program| program.has_turn_end())
    }

    fn start(&self, turn: &mut Turn<'_>) -> io::Result<RpcShard> {
        RpcShard::start(&self.table, turn)
    }

    fn accept(&self, shard: &mut RpcShard, peer: &Peer) -> Result<RpcConn, Refused> {
        shard.accept(peer)
    }

    #[inline]
    fn call(&self, shard: &mut RpcShard, conn: &mut RpcConn, message: &Message<'_>, reply: &mut Reply<'_>) {
        let call = match Call::parse(message.bytes()) {
            Ok(call) => call,
            Err(error) => return self.refuse(error, reply),
        };
        let found = self.table.find(call.program, call.version);
        let reply = RpcReply::new(call.xid, found.unwrap_or(0) as u32, reply, &self.stats);
        let Answered { .. } = match found {
            Ok(at) => shard.call(at, conn, &RpcCall::new(call, message), reply),
            Err(accepted) => reply.status(ReplyStatus::Accepted(accepted)),
        };
    }

    fn turn_end(&self, shard: &mut RpcShard, turn: &mut Turn<'_>) {
        shard.turn_end(turn);
    }

    fn file_done(&self, shard: &mut RpcShard, done: FileDone, turn: &mut Turn<'_>) {
        shard.file_done(done, turn);
    }

    fn files_have_room(&self, shard: &mut RpcShard, turn: &mut Turn<'_>) {
        shard.files_have_room(turn);
    }

    fn resume(&self, shard: &mut RpcShard, conn: &mut RpcConn, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        // The framework brings back what `RpcDeferred::resume` gave it, and nothing else is resumed here.
        let Ok(resumed) = state.downcast::<Resumed>() else { return reply.close() };
        let Resumed { xid, program, state } = *resumed;
        let reply = RpcReply::new(xid, program, reply, &self.stats);
        let Answered { .. } = shard.resume(program as usize, conn, state, reply);
    }

    fn close(&self, shard: &mut RpcShard, conn: RpcConn) {
        shard.close(&conn);
    }

    fn stop(&self, shard: RpcShard) {
        shard.stop();
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let programs = self.table.all().flat_map(|program| program.counters());
        self.stats.read().into_iter().chain(programs).collect()
    }
}
