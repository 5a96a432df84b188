//! Load generators that verify every reply: `echotest`, `rpctest`, `worktest` and `http`.
//!
//! The first two take the options of the FreeBSD originals (same letters, number suffixes, ports and columns) and keep
//! their method: one message per send and at most one reply per receive, on one connection per thread. What
//! they add: every reply is checked, a lost one is counted instead of waited for, UDP is UDP, and there is an open
//! loop, JSON, HdrHistogram and SVG output.
//!
//! ```text
//!   args -> Plan -> driver: threads, pinned, one connection each
//!                     +-> closed / open loop -> Exchange: send, recv, time limits
//!                                                 | Protocol (echo, rpc): bytes <-> requests and replies, sans-IO
//!                                                 | Table: what is in flight, what an identifier means
//!                                                 + Record: latencies, faults, calls
//!   RunResult -> stats::Summary -> columns, report (json, hdr, svg, raw), warn
//! ```
//!
//! `worktest` measures how messages that take time are spread over workers, for which one thread drives many
//! connections: see [`work`]. `http` measures servers that speak HTTP/1.1, connection by connection: see [`http`].
#![deny(unsafe_code)]

mod drive;
pub mod echo;
mod error;
pub mod http;
mod options;
mod record;
pub mod report;
pub mod rpc;
pub mod work;

pub use drive::open::Arrival;
pub use error::{LoadError, exit_code_of_parse};
pub use options::{CommonArgs, NoDelay, numbers};
pub use report::tool::{Io, Outcome};
