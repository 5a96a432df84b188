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
//! connections: see [`worktest`]. `http` measures servers that speak HTTP/1.1, connection by connection: see [`http`].
#![deny(unsafe_code)]

mod args;
mod clock;
mod closed;
mod columns;
mod driver;
mod echo;
pub mod echotest;
mod error;
mod exchange;
mod fault;
mod gate;
pub mod http;
pub mod numbers;
mod oncrpc;
mod open;
mod pattern;
mod pin;
mod progress;
mod protocol;
mod random;
mod record;
pub mod report;
mod rpc;
pub mod rpctest;
mod session;
mod stats;
mod sys;
mod table;
mod tally;
mod target;
mod tool;
mod transport;
mod warn;
pub mod worktest;

pub use args::{CommonArgs, NoDelay};
pub use error::{LoadError, exit_code_of_parse};
pub use open::Arrival;
pub use tool::{Io, Outcome};
