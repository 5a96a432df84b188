//! `ksf store`: a key-value server that real clients talk to, by RESP and by HTTP, and that acknowledges only what is on the
//! medium.
//!
//! ```text
//!   service.rs   one shard of the server: messages in, replies behind gates, batches to the disk
//!   cleaner.rs   brings room back into a log
//!   commands/    what a command does, a file for each family
//!   http/        requests of HTTP/1.1 on the same port
//!   disk.rs      the folder of a store: superblock, logs, recovery
//!   offline.rs   check, dump, salvage, load
//!   settings.rs  what the server is told when it starts
//! ```
#![forbid(unsafe_code)]

mod cleaner;
mod commands;
pub mod disk;
mod http;
pub mod offline;
mod service;
mod settings;

pub use http::Requests;
pub use service::{Kv, KvConn, KvShard};
pub use settings::{Durability, Settings};
