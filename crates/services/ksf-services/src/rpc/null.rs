//! A service whose programs know procedure 0 alone.

use ksf::framing::Framing;
use ksf::{Message, Order, Profile, Reply, Service};
use ksf_proto::oncrpc::PROC_NULL;

use super::call::ProcError;
use super::table::ProgramTable;

/// Answers NULL of all programs of a table, and PROC_UNAVAIL to everything else.
///
/// NULL takes void. Bytes behind the verifier are therefore arguments that
/// cannot be decoded, and are answered GARBAGE_ARGS, as RFC 5531 section 9 asks.
/// (The servers in use, Linux nfsd and those on libtirpc, decode void by looking
/// at nothing and answer SUCCESS. A client that means NULL sends no bytes, so
/// exactness costs no client anything and shows a broken encoder early.)
#[derive(Debug)]
pub struct NullService {
    name: String,
    programs: ProgramTable,
}

impl NullService {
    /// A service called `name` in messages and counters.
    pub fn new(name: impl Into<String>, programs: ProgramTable) -> Self {
        Self { name: name.into(), programs }
    }
}

impl Service for NullService {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        // RFC 5531 section 9: the xid matches replies with calls, their order does not.
        Profile { order: Order::Free, ..Profile::new(&self.name, Framing::RecordMark) }
    }

    #[inline]
    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.programs.call(message, reply, |call, reply| match call.procedure {
            PROC_NULL if call.args.is_empty() => reply.void(),
            PROC_NULL => reply.error(ProcError::GarbageArgs),
            _ => reply.error(ProcError::ProcUnavail),
        });
    }

    fn fork(&self, (): &()) -> Option<()> {
        Some(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.programs.counters()
    }
}
