//! The tests of this crate, in one executable: each file is a module.

mod coherence;
mod common;
mod procedures;
mod server;
