//! The NFSv3 server (RFC 1813): the programs NFS 3 and MOUNT 3 for the RPC service, over the file layer `ksf-fs`.
//!
//! ```text
//! NfsService ─► NfsProgram::call ── arguments, handle, export, client ── refused ─► reply
//!                    │ may its second try differ? ─► Drc ── known ─► the reply to its first try
//!                    ▼
//!               Lanes::submit ─► a lane: Fs, as the caller ─► results ─► Drc, reply
//! ```
//!
//! On a shard nothing waits: a call is decoded, its handle verified without a system call, and given to a lane. GETATTR on an
//! exclusive export is answered on the shard if the file layer knows the attributes ([`ksf_fs::Fs::known_attr`]). The data of a
//! WRITE stay where they were received; those of a READ leave from where they were read into.
//!
//! Nothing here checks a permission: the kernel does, with the caller's identity ([`ksf_fs`]). What is checked here is
//! whether the export that a handle belongs to is for the client's address, at MNT and at every call.

#![forbid(unsafe_code)]

mod activity;
mod counters;
pub mod drc;
mod mount;
mod procedure;
mod program;
mod request;
mod results;
mod server;
mod service;
mod status;
mod wire;

pub use activity::{CLIENTS_MAX, Client, ClientCounts, Connection};
pub use counters::ProcedureCounts;
pub use ksf_fs::{Clients, ExportSettings, Network};
pub use ksf_proto::oncrpc::NFS_PROGRAM;
pub use procedure::Procedure;
pub use server::{Nfs, Settings, TRANSFER_BYTES_MAX, transfer_bytes_max};
pub use service::NfsService;
pub use status::Status;
