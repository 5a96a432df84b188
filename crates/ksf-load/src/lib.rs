//! Load generators that verify every reply.
#![forbid(unsafe_code)]

pub mod args;
mod clock;
mod closed;
mod driver;
mod echo;
pub mod error;
mod exchange;
pub mod numbers;
mod oncrpc;
mod open;
pub mod pattern;
mod pin;
mod protocol;
mod random;
mod record;
mod rpc;
mod table;
pub mod target;
mod transport;
