//! Driving the load: threads, sockets, the closed and the open loop.

pub(crate) mod clock;
pub(crate) mod closed;
pub(crate) mod driver;
pub(crate) mod exchange;
pub(crate) mod gate;
pub(crate) mod open;
pub(crate) mod pin;
pub(crate) mod protocol;
pub(crate) mod random;
pub(crate) mod sys;
pub(crate) mod table;
pub(crate) mod transport;
