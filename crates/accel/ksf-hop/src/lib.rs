//! Two processes of a machine that talk TCP, joined: what one end sends is put into the receive queue of the other.
//!
//! Neither process is changed or started anew. Programs in the kernel see a connection when it is established; when both
//! of its ends are here, a message is handed over in send() (a map of sockets, `sk_msg` programs) and does not pass TCP
//! and IP. TCP still opens and closes the connection, carries its first messages, and everything for which handing over
//! would not be what TCP is: when much waits for a slow reader, for readers that block, for large messages.
//!
//! ```no_run
//! use ksf_hop::{Hop, Options, Scope};
//!
//! # fn main() -> Result<(), ksf_hop::HopError> {
//! let scope = Scope { ports: vec![8080], ..Scope::default() };
//! let hop = Hop::start(&scope, &Options::default())?;
//! # Ok(()) }
//! ```
//!
//! [`Hop::start`] tests on connections of its own, first, whether the kernel keeps what TCP promises; an error means that
//! nothing is attached and programs go on as ever. docs/hop.md says when it helps, when not, and what to know before.

mod abi;
mod error;
mod hop;
mod object;
mod scope;
mod selftest;

pub use abi::COUNTERS;
pub use error::HopError;
pub use hop::{Counter, Guard, Hop, Options};
pub use scope::Scope;
