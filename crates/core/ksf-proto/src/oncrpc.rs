//! ONC RPC version 2 (RFC 5531).
//!
//! ```text
//! call:  xid  CALL=0  rpcvers=2  prog  vers  proc  cred  verf  arguments...
//! reply: xid  REPLY=1  MSG_ACCEPTED=0  verf  accept_stat  results...
//!                      MSG_DENIED=1    reject_stat ...
//! ```
//!
//! Over a datagram a message travels as it is; over a stream it is cut into
//! fragments, each behind a record mark (see [`record`]).
//!
//! [`Call::parse`] is the server's side: its error says which reply the RFC asks
//! for, so a server needs no protocol knowledge of its own. [`Reply::parse`] and
//! [`CallHeader`] are the client's side.

mod auth;
mod call;
pub mod record;
mod reply;
pub mod rpcbind;

pub use auth::{
    AUTH_BODY_LIMIT_BYTES, AuthStat, AuthSys, AuthSysTooLong, Credential, GIDS_LIMIT, Gids, MACHINE_NAME_LIMIT_BYTES,
    OpaqueAuth, auth_sys_body, flavor,
};
pub use call::{Call, CallError, CallHeader, Unanswerable};
pub use reply::{ACCEPTED_HEADER_BYTES, Accepted, Denied, Reply, ReplyError, ReplyStatus, put_reply, put_success};

/// The version of ONC RPC that RFC 5531 defines, and the only one in use.
pub const RPC_VERSION: u32 = 2;

/// Program number of NFS (RFC 1813).
pub const NFS_PROGRAM: u32 = 100_003;
/// Program number of the mount protocol (RFC 1813 appendix I).
pub const MOUNT_PROGRAM: u32 = 100_005;
/// Procedure 0 of every program: takes nothing, does nothing, returns nothing
/// (RFC 5531 section 12 asks each program for it).
pub const PROC_NULL: u32 = 0;

/// `msg_type` of a call.
pub(crate) const MSG_CALL: u32 = 0;
/// `msg_type` of a reply.
pub(crate) const MSG_REPLY: u32 = 1;
