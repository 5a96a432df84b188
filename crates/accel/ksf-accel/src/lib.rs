//! The core of `ksf accel`: accept queues for programs nobody changes.
//!
//! ```text
//!  SYN ──► steering program ──► queue of a worker on this CPU ──► accept() there
//!               │ nobody ready, queue full, paused
//!               └──────────────► the program's own listener ─────► accept() by anybody
//! ```
//!
//! * [`Holder`]: owns the queues, serves the preload library's messages (`ksf_accel_proto::message`), sees deaths,
//!   rescues what nobody serves. It ends when the program has ended, and with it everything it made.
//! * [`Level`]: the ladder of mechanisms, from an `sk_lookup` program down to nothing, each tried in turn.
//! * [`attach`]: steers a program that runs already.
//! * [`copies`]: several copies of a program on one port.
//! * [`flow`]: source ports that name a CPU, and packets that are sent there.
//! * [`program`]: can a library help a program?
//! * [`run`]: starts a holder for a command, as a process of its own.
//! * [`status`]: what holders say about themselves, and how to find them.

mod address;
pub mod attach;
mod bpf;
pub mod copies;
mod error;
pub mod flow;
mod holder;
mod homes;
mod network;
mod options;
pub mod program;
mod queue;
pub mod run;
mod shared;
mod sockopt;
pub mod status;
mod steer;
mod sys;

pub use error::AccelError;
pub use holder::{Holder, ProgramAddress, Started};
pub use options::AccelOptions;
pub use steer::{Level, Refused};
