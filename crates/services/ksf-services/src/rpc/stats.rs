//! Counters of the RPC service.
//!
//! Only what goes wrong is counted here; calls and replies are counted by the
//! shards. So these may be shared between shards: the good path never touches
//! them.

use std::sync::atomic::{AtomicU64, Ordering};

use ksf_proto::oncrpc::{Accepted, Denied, ReplyStatus, Unanswerable};

macro_rules! rpc_stats {
    ($($name:ident,)+) => {
        #[derive(Debug, Default)]
        pub(super) struct RpcStats {
            $($name: AtomicU64,)+
        }

        impl RpcStats {
            pub(super) fn read(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)+]
            }
        }
    };
}

rpc_stats! {
    // Answered with an error.
    rpc_mismatch,
    auth_error,
    prog_unavail,
    prog_mismatch,
    proc_unavail,
    garbage_args,
    system_err,
    // Not answered: datagram dropped, stream closed.
    unanswerable_no_xid,
    unanswerable_not_a_call,
    unanswerable_short_header,
}

impl RpcStats {
    #[cold]
    pub(super) fn count_reply(&self, status: ReplyStatus) {
        let counter = match status {
            ReplyStatus::Accepted(accepted) => match accepted {
                Accepted::Success => return,
                Accepted::ProgUnavail => &self.prog_unavail,
                Accepted::ProgMismatch { .. } => &self.prog_mismatch,
                Accepted::ProcUnavail => &self.proc_unavail,
                Accepted::GarbageArgs => &self.garbage_args,
                Accepted::SystemErr => &self.system_err,
            },
            ReplyStatus::Denied(Denied::RpcMismatch { .. }) => &self.rpc_mismatch,
            ReplyStatus::Denied(Denied::AuthError(_)) => &self.auth_error,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    pub(super) fn count_unanswerable(&self, why: Unanswerable) {
        let counter = match why {
            Unanswerable::NoXid { .. } => &self.unanswerable_no_xid,
            Unanswerable::NotACall { .. } => &self.unanswerable_not_a_call,
            Unanswerable::Header(_) => &self.unanswerable_short_header,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
