//! Load generators that verify every reply: `echotest`, `rpctest`, `worktest`, `http`, `kv`, `nfs` and `9p`.
//!
//! The first two take the options of the FreeBSD originals (same letters, number suffixes, ports and columns) and keep
//! their method: one message per send and at most one reply per receive, on one connection per thread. What
//! they add: every reply is checked, a lost one is counted instead of waited for, UDP is UDP, and there is an open
//! loop, JSON, HdrHistogram and SVG output.
//!
//! ```text
//!   options -> drive: threads, connections, closed and open loop     <- a folder per protocol: echo, rpc, work, http, kv, nfs, ninep
//!                +-> record: latencies, faults, connections, calls      (requests and replies as bytes, checks, options,
//!                      +-> report: JSON, table, files, warnings          its own counters and report)
//! ```
//!
//! The one engine is in [`drive`]; a protocol is a [`drive::protocol::Protocol`]. `worktest` measures how messages that
//! take time are spread over workers: see [`work`]. `http` measures servers that speak HTTP/1.1, connection by
//! connection: see [`http`]. `kv` measures key-value servers, and proves after a crash that what they acknowledged is there:
//! see [`kv`]. `nfs` and `9p` measure file servers, operation by operation in
//! any mix: see [`nfs`], [`ninep`] and what both share in [`files`]. What these, echotest and rpctest share beside the engine is
//! in [`calls`].
#![deny(unsafe_code)]

pub mod calls;
mod drive;
pub mod echo;
mod error;
pub mod files;
pub mod http;
pub mod kv;
pub mod nfs;
pub mod ninep;
mod options;
mod record;
pub mod report;
pub mod rpc;
pub mod work;

pub use drive::connection::CloseBy;
pub use drive::schedule::Arrival;
pub use drive::spin::ClientSpin;
pub use drive::sys::process_cpu_ns;
pub use error::{LoadError, exit_code_of_parse};
pub use options::{CpuArgs, OutputArgs, PaceArgs, numbers};
pub use report::Io;
