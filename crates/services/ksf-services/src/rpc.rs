//! ONC RPC (RFC 5531): one service, a table of programs.
//!
//! ```text
//! message ──► Call::parse ──► ProgramTable ──► ShardProgram::call ──► RpcReply
//!                 │                │                 └─ results, an error, or later
//!                 │                └─ PROG_UNAVAIL, PROG_MISMATCH
//!                 └─ RPC_MISMATCH, AUTH_ERROR, or nothing that can be answered
//! ```
//!
//! Over streams messages lie between record marks, over datagrams as they are;
//! the framework takes care of both. A message that RFC 5531 has no answer for
//! closes a stream (what else would be read from it is not to be trusted) and is
//! dropped as a datagram; both are counted by cause.
//!
//! A [`Program`] has no state. A [`ShardProgram`] has some on each shard and of each
//! connection, and operations on files; in a [`LoggedProgram`] no reply leaves before
//! what it tells of is durable.
//!
//! NULL of NFSv3 and MOUNTv3 are here ([`nfs_null`], [`mount_null`]); a file
//! server registers programs of its own in their place.

mod call;
mod local;
mod logged;
mod null;
mod program;
mod reply;
pub mod rpcbind;
mod service;
mod stats;
mod table;
mod turn;
mod workers;

pub use call::{ProcError, RpcCall};
pub use local::{RpcConn, RpcShard};
pub use logged::{LoggedProgram, LoggedRpcDeferred, LoggedRpcReply};
pub use null::{NullProgram, mount_null, nfs_null};
pub use program::{Program, ShardProgram};
pub use reply::{Answered, ResultPieces, RpcDeferred, RpcReply};
pub use service::RpcService;
pub use table::{ProgramTable, TableError};
pub use turn::{RpcFiles, RpcTurn};
pub use workers::{NeedsShards, RpcOnWorkers};
