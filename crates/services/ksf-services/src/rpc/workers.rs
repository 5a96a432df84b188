//! The RPC service where there are no shards: on the workers of a multiplexor.

use std::sync::Arc;

use ksf::framing::Framing;
use ksf::{Message, Order, Peer, Refused, Reply, Service};
use ksf_proto::oncrpc::{Call, ReplyStatus};

use super::call::{ProcError, RpcCall};
use super::reply::{Answered, RpcReply};
use super::service::RpcService;

/// Serves the programs of a table on workers. Several of them answer calls of one connection at once.
#[derive(Clone, Debug)]
pub struct RpcOnWorkers(Arc<RpcService>);

/// A program of the table can be run by shards only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the program {program} has state on shards, which workers do not have: run it without workers")]
pub struct NeedsShards {
    /// Name of the program.
    pub program: String,
}

impl RpcOnWorkers {
    /// The same programs, under the same name and with the same counters.
    ///
    /// # Errors
    ///
    /// [`NeedsShards`] names the first program that does not run outside of shards.
    pub fn new(service: Arc<RpcService>) -> Result<Self, NeedsShards> {
        if let Some(program) = service.table.all().find(|program| program.outside_of_shards().is_none()) {
            return Err(NeedsShards { program: program.name().to_owned() });
        }
        Ok(Self(service))
    }
}

impl Service for RpcOnWorkers {
    type Conn = ();

    fn name(&self) -> &str {
        self.0.name()
    }

    fn framing(&self) -> Framing {
        Framing::RecordMark
    }

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
            Err(error) => return self.0.refuse(error, reply),
        };
        let found = self.0.table.find(call.program, call.version);
        let reply = RpcReply::new(call.xid, found.unwrap_or(0) as u32, reply, &self.0.stats);
        let Answered { .. } = match found.map(|at| self.0.table.program(at).outside_of_shards()) {
            Ok(Some(program)) => program.call(&RpcCall::new(call, message), reply),
            // `RpcOnWorkers::new` refuses the table.
            Ok(None) => reply.error(ProcError::SystemErr),
            Err(accepted) => reply.status(ReplyStatus::Accepted(accepted)),
        };
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        ksf::ShardService::counters(&*self.0)
    }
}
