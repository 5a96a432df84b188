//! The program NLM, version 4: every lock is refused, at once and by its name.
//!
//! There are no locks over the network here: a client mounts with `nolock`. One that does not, and finds this program, learns by
//! NLM4_DENIED_NOLOCKS that there are none, instead of waiting for an answer.

use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, RpcCall, RpcReply};

/// Program number of the network lock manager.
pub(crate) const PROGRAM: u32 = 100_021;
/// The version that goes with NFSv3 (Open Group, Protocols for Interworking: XNFS, chapter 14).
pub(crate) const VERSION: u32 = 4;
/// The server has no locks to give: `nlm4_denied_nolocks`.
const DENIED_NOLOCKS: u32 = 2;
/// Greatest cookie: `LM_MAXSTRLEN`.
const COOKIE_LIMIT_BYTES: u32 = 1024;

const NULL: u32 = 0;
const TEST: u32 = 1;
const GRANTED: u32 = 5;
const SHARE: u32 = 20;
const UNSHARE: u32 = 21;
const NM_LOCK: u32 = 22;
const FREE_ALL: u32 = 23;

/// Answers a call that asks for a lock: there are none.
pub(crate) fn no_locks(call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
    match call.procedure {
        NULL | FREE_ALL => reply.void(),
        TEST..=GRANTED | SHARE | UNSHARE | NM_LOCK => reply.results(|out| {
            // All arguments begin with a cookie, which comes back.
            let cookie = XdrReader::new(call.args).opaque(COOKIE_LIMIT_BYTES)?;
            out.put_opaque(cookie);
            out.put_u32(DENIED_NOLOCKS);
            if matches!(call.procedure, SHARE | UNSHARE) {
                // A sequence number that means nothing.
                out.put_u32(0);
            }
            Ok(())
        }),
        _ => reply.error(ProcError::ProcUnavail),
    }
}
