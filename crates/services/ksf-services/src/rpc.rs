//! ONC RPC (RFC 5531): one service, a table of programs.
//!
//! ```text
//! message ──► Call::parse ──► ProgramTable ──► Program::call ──► RpcReply
//!                 │                │                 └─ results, or an error
//!                 │                └─ PROG_UNAVAIL, PROG_MISMATCH
//!                 └─ RPC_MISMATCH, AUTH_ERROR, or nothing that can be answered
//! ```
//!
//! Over streams messages lie between record marks, over datagrams as they are;
//! the framework takes care of both. A message that RFC 5531 has no answer for
//! closes a stream (what else would be read from it is not to be trusted) and is
//! dropped as a datagram; both are counted by cause.
//!
//! NULL of NFSv3 and MOUNTv3 are here ([`nfs_null`], [`mount_null`]); a file
//! server registers programs of its own in their place.

mod call;
mod null;
mod program;
mod reply;
pub mod rpcbind;
mod service;
mod stats;
mod table;

pub use call::{ProcError, RpcCall};
pub use null::{NullProgram, mount_null, nfs_null};
pub use program::Program;
pub use reply::{Answered, RpcDeferred, RpcReply};
pub use service::RpcService;
pub use table::{ProgramTable, TableError};
