//! Drives the load: threads, connections, the closed and the open loop, time limits.
//!
//! ```text
//!   DrivePlan -> threads: pinned, let go together
//!             +-> Worker: sockets, one thread
//!                   | blocking: one connection, waits in its receive calls    events: many connections, or a schedule
//!                   +-> ClientConnection: what an event means, time limits; no socket and no clock
//!                         | RequestTable: what is in flight, what an identifier means
//!                         | Client, Mix: the protocol
//!                         +-> Record
//! ```

mod blocking;
pub(crate) mod clock;
pub(crate) mod connection;
pub(crate) mod descriptors;
mod events;
pub(crate) mod pin;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod protocol;
pub(crate) mod random;
pub(crate) mod schedule;
pub(crate) mod socket;
pub(crate) mod spin;
pub(crate) mod sys;
pub(crate) mod table;
pub(crate) mod threads;
pub(crate) mod worker;
