//! Message sockets over TCP: N workers, M connections, and messages as the unit of scheduling.
//!
//! See [`Mux`] for connections, [`MessageSocket`] for workers, [`scheduler`] for who gets which message.

#![forbid(unsafe_code)]

mod baton;
mod error;
mod framer;
pub mod kcm;
mod keeper;
mod link;
mod monitor;
mod mux;
mod options;
mod outbox;
pub mod scheduler;
mod socket;
mod sync;

pub use error::{AttachError, ConnectionError, RecvError, SendError};
pub use monitor::Event;
pub use mux::{ConnectionId, Detached, Mux};
pub use options::{Classify, Limits, MessageFraming, Options, Ordering};
pub use socket::{Message, MessageSocket, SendOptions};
