//! The RPC service: from message to program and back.

use std::any::Any;
use std::sync::Arc;

use ksf::framing::Framing;
use ksf::{Message, Order, Peer, Refused, Reply, Service};
use ksf_proto::oncrpc::{Call, CallError, ReplyStatus};

use super::call::RpcCall;
use super::reply::{Answered, Resumed, RpcReply};
use super::stats::RpcStats;
use super::table::ProgramTable;

/// Serves the programs of a table.
#[derive(Debug)]
pub struct RpcService {
    name: String,
    table: ProgramTable,
    stats: Arc<RpcStats>,
}

impl RpcService {
    /// A service called `name` in messages and counters.
    pub fn new(name: impl Into<String>, table: ProgramTable) -> Self {
        Self { name: name.into(), table, stats: Arc::default() }
    }

    /// The programs it serves.
    pub fn table(&self) -> &ProgramTable {
        &self.table
    }

    #[cold]
    fn refuse(&self, error: CallError, reply: &mut Reply<'_>) {
        if let CallError::Unanswerable(why) = error {
            self.stats.count_unanswerable(why);
            // For a stream; a datagram is dropped by not answering it.
            reply.close();
        } else if let Some((xid, status)) = error.reply() {
            let Answered { .. } = RpcReply::new(xid, reply, &self.stats).status(status);
        }
    }
}

impl Service for RpcService {
    type Conn = ();

    fn name(&self) -> &str {
        &self.name
    }

    fn framing(&self) -> Framing {
        Framing::RecordMark
    }

    /// RFC 5531 section 9: the xid matches replies with calls, their order does not.
    fn order(&self) -> Order {
        Order::Free
    }

    fn fork(&self, (): &()) -> Option<()> {
        Some(())
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    #[inline]
    fn call(&self, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let call = match Call::parse(message.bytes()) {
            Ok(call) => call,
            Err(error) => return self.refuse(error, reply),
        };
        let reply = RpcReply::new(call.xid, reply, &self.stats);
        let Answered { .. } = match self.table.find(call.program, call.version) {
            Ok(program) => program.call(&RpcCall::new(call, message), reply),
            Err(accepted) => reply.status(ReplyStatus::Accepted(accepted)),
        };
    }

    fn resume(&self, (): &mut (), state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        // The framework brings back what `RpcDeferred::resume` gave it, and nothing else is resumed here.
        let Ok(resumed) = state.downcast::<Resumed>() else { return reply.close() };
        let reply = RpcReply::new(resumed.xid, reply, &self.stats);
        let Answered { .. } = resumed.program.resume(resumed.state, reply);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.stats.read()
    }
}
