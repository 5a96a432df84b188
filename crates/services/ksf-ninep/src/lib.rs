//! The 9P2000.L server: a service over the file layer `ksf-fs`.
//!
//! ```text
//! NinepService::call ── version, flush, clone of a fid, refusals ─► reply
//!        │ fids of the connection ─► Work (handles, open files)
//!        ▼
//! Lanes::submit ─► a lane: Fs, as the user of the attach ─► Done
//!        │
//!        ▼  back on the connection
//! NinepService::resume ─► fids, reply, Rflush of those that waited for it
//! ```
//!
//! On a shard nothing waits, and what belongs to a connection is touched by its shard alone: fids and tags have no lock. A fid that
//! was walked to is a handle of the file layer and takes no descriptor; one that was opened has a descriptor of its own, so its file
//! stays usable when it has no name any more.
//!
//! Nothing here checks a permission: the kernel does, with the identity of the attach ([`ksf_fs`]).

#![forbid(unsafe_code)]

mod counters;
mod fids;
mod names;
mod server;
mod service;
mod session;
mod wire;
mod work;

pub use counters::{MessageCounts, message_names};
pub use ksf_fs::{Clients, ExportSettings, Network};
pub use server::{FIDS_MAX, MSIZE_MAX, MSIZE_MIN, Ninep, Settings, msize_max};
pub use service::NinepService;
