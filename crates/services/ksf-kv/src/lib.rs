//! `ksf store`: a key-value server that real clients talk to, by RESP and by HTTP, and that acknowledges only what is on the
//! medium.
//!
//! ```text
//!   service.rs   one shard of the server: messages in, replies behind gates, batches to the disk
//!   clients.rs   the connections of all shards, for CLIENT
//!   cluster.rs   which node has which keys: a map that is written down once
//!   cleaner.rs   brings room back into a log
//!   commands/    what a command does, a file for each family
//!   http/        requests of HTTP/1.1 on the same port
//!   disk.rs      the folder of a store: superblock, logs, recovery
//!   medium.rs    what its logs are written through: blocks, or persistent memory
//!   offline.rs   check, dump, salvage
//!   backup.rs    a backup of a store that is served; commands/backup.rs is the server's side, seal.rs the ends of the file
//!   load.rs      files with commands, AOFs and snapshots of Redis, checked and sent
//!   ask.rs       a client that asks one thing after the other
//!   whole.rs     a file that gets its name when it is whole
//!   settings.rs  what the server is told when it starts
//! ```
#![forbid(unsafe_code)]

pub mod ask;
pub mod backup;
mod cleaner;
mod clients;
pub mod cluster;
mod commands;
pub mod disk;
mod http;
pub mod load;
mod medium;
pub mod offline;
mod seal;
mod service;
mod settings;
pub mod whole;

pub use http::Requests;
pub use medium::Medium;
pub use service::{EndError, Kv, KvConn, KvShard};
pub use settings::{Durability, Settings};
