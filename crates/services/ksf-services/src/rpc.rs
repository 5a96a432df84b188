//! ONC RPC (RFC 5531): a table of programs, and the way from a message to the answer of one of them.
//!
//! ```text
//! Service::call ──► ProgramTable::call ──► Call::parse ──► number, version ──► closure: RpcCall, RpcReply ──► Answered
//!                                              │                │                  └─ results, an error, or later
//!                                              │                └─ PROG_UNAVAIL, PROG_MISMATCH
//!                                              └─ RPC_MISMATCH, AUTH_ERROR, or nothing that can be answered
//! ```
//!
//! An RPC program is a [`Service`](ksf::Service) with a program number: its messages lie between record marks over streams, and are
//! as they are over datagrams. [`NullService`] is the shortest one.

mod call;
mod null;
mod reply;
pub mod rpcbind;
mod stats;
mod table;

pub use call::{ProcError, RpcCall};
pub use null::NullService;
pub use reply::{Answered, ResultPieces, RpcDeferred, RpcReply};
pub use table::{Program, ProgramTable, TableError};
