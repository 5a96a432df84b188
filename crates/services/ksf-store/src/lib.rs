//! A durable, ordered key-value store, sans-IO: no socket, no clock, no file of its own.
//!
//! ```text
//!   command ─► records ─► Log (one for each shard) ─► batch ─► medium ─► durable ─► replies leave
//!                │                                                │
//!                ▼                                                ▼ at the next start
//!              Index (shared by all shards)  ◄── records ◄── recover: follow, cut, apply
//! ```
#![forbid(unsafe_code)]

pub mod away;
pub mod backup;
pub mod cells;
pub mod format;
pub mod index;
pub mod log;
pub mod memory;
pub mod pmem;
pub mod promises;
pub mod recover;
pub mod salvage;
pub mod store;
mod threads;
pub mod update;
pub mod watch;
pub mod work;
